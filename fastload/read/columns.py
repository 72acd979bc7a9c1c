"""Reads datasets of a packed file other than pixels, whole or by rows; an index's from its shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.format.header import PackedFile, read_shard
from fastload.format.shards import split_of
from fastload.format.valid import open_hdf5
from fastload.read.identity import check_path


@contextmanager
def open_columns(file: PackedFile) -> Iterator[Mapping[str, Any]]:
    """Opens a file for reading datasets other than pixels: `columns[name][()]`, and slices or numbers of rows.

    An index's datasets are read from its shards, as `ShardedColumn`s. FileChangedError: it is not, or at the end no
    longer, the file whose header was read.
    """
    if file.holds_rows:
        with open_hdf5(file.path) as hdf5:
            check_path(file)
            yield hdf5
            check_path(file)
    else:
        yield {name: ShardedColumn(file, name) for name in file.fields}


class ShardedColumn:
    """A dataset of an index, read from its shards; indexed by rows as one of h5py is."""

    def __init__(self, index: PackedFile, name: str) -> None:
        self._index, self._name = index, name
        self.shape, self.dtype = (index.num_rows, *index.fields[name].shape), index.fields[name].dtype

    def __getitem__(self, key: Any) -> NDArray[Any]:
        """Returns rows by a whole number, a slice, an array of rows in ascending order, or all by ().

        A tuple of them chooses along further axes. `split` has the numbers of the index's splits.
        """
        shards, rest = self._index.shards, key[1:] if isinstance(key, tuple) else ()
        first = (*key, slice(None))[0] if isinstance(key, tuple) else key
        rows = np.arange(*first.indices(self.shape[0])) if isinstance(first, slice) else np.asarray(first, np.int64)
        if rows.size and not 0 <= rows.min() <= rows.max() < self.shape[0]:
            raise IndexError(f"{self._index.path}: {self._name!r} has {self.shape[0]:,} rows, asked for {first}")
        numbers, there = shards.locate(np.atleast_1d(rows))
        found = np.empty((len(numbers), *self.shape[1:]), self.dtype)[(slice(None), *rest)]
        for number in np.unique(numbers).tolist():
            wanted = there[here := numbers == number]
            first, stop = int(wanted.min()), int(wanted.max()) + 1
            held = self._index.shard_files.holding_rows(number, self._name, first, stop)
            with held, open_columns(read_shard(self._index, number)) as hdf5:
                found[here] = hdf5[self._name][(slice(first, stop), *rest)][wanted - first]
        if self._name == "split":
            found = split_of(self._index.splits, np.atleast_1d(rows)).astype(self.dtype)
        return found if np.ndim(rows) else found[0]
