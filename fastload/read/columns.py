"""Reads datasets of a packed file other than pixels, whole or by rows; an index's from its shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastload.format.header import PIXEL_FIELDS, PackedFile

if TYPE_CHECKING:
    from fastload.read.rows import Rows


@contextmanager
def open_columns(file: PackedFile) -> Iterator[Mapping[str, StoredColumn]]:
    """Opens a file or index for reading its datasets other than pixels: `columns[name][()]`, and some of the rows.

    FileChangedError: it is not the file whose header was read.
    """
    from fastload.read.rows import open_rows  # 15 ms, which `fastload info` does not need

    names = [name for name in file.fields if name not in PIXEL_FIELDS]
    with closing(open_rows(file, names, "pread")) as reader:
        yield {name: StoredColumn(reader, name) for name in names}


class StoredColumn:
    """A dataset of a file or index; indexed by rows as one of h5py is."""

    def __init__(self, reader: Rows, name: str) -> None:
        self._reader, self._field = reader, reader.file.fields[name]
        self.shape, self.dtype = (reader.file.num_rows, *self._field.shape), self._field.dtype

    def __getitem__(self, key: Any) -> NDArray[Any]:
        """Returns rows by a whole number, a slice, an array of rows, or all by ().

        A tuple of them chooses along further axes. `split` of an index has the numbers of the index's splits.
        """
        first, *rest = (*key, slice(None))[: max(1, len(key))] if isinstance(key, tuple) else (key,)
        rows = np.arange(*first.indices(self.shape[0])) if isinstance(first, slice) else np.asarray(first, np.int64)
        found = self._field.empty(rows.size)
        self._reader.store.columns(np.atleast_1d(rows), {self._field.name: found})
        found = found[(slice(None), *rest)]
        return found if np.ndim(rows) else found[0]
