"""`Rows`: gathers rows of a dataset into memory that is there already.

One call a batch, from any number of threads. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FormatError, OptionError
from fastload.format.header import PackedFile
from fastload.format.texts import text_lists
from fastload.read.encoded import EncodedRows
from fastload.read.fields import with_counts
from fastload.read.linear import Read
from fastload.read.row_check import Check, RowCheck
from fastload.read.store import ResultT, Store
from fastload.read.table import Located, index_columns


class Rows:
    """Reads any rows of some fields of a dataset. Threads may share it, it survives a fork, and it cannot be pickled.

    Args:
        fields: those that are read, whatever the store opens more.
        store: where the rows lie.
        verify: as in `EncodedRows`; called before Pillow decodes a JPEG that libjpeg refuses.
        check: compares rows with their digests; None: nothing does.
    """

    def __init__(
        self,
        fields: Sequence[str],
        store: Store,
        *,
        verify: Callable[[PackedFile, int], None] | None = None,
        check: RowCheck | None = None,
    ) -> None:
        self.file, self.store, self._check = store.file, store, check
        kinds = {name: self.file.fields[name] for name in [*fields, *(check.needed if check else ())]}
        # Small fields first: the pixels push everything else out of the CPU's cache.
        ragged = self.file.ragged
        plain = sorted((field.chunked, field.row_bytes, name) for name, field in kinds.items() if name not in ragged)
        self._encoded = {name: EncodedRows(store, name, verify) for name in kinds if name in ragged}
        self._order = [*(name for _, _, name in plain), *self._encoded]

    def gather(self, rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]]) -> int:
        """Copies rows of the dataset into the arrays given, and returns the number of bytes copied.

        With `check` the rows are compared first, also in fields that no array is given for: call it, with or without
        arrays, before `decoded`, and before reading from `mapped` or `encoded`.

        Args:
            rows: int64, (B,), any order, repeats allowed.
            outs: field -> C-contiguous array (B, ...) of the field's dtype in native byte order; arrays of other names
                are left alone. Fields whose rows differ in shape are read by `decoded`.

        Raises:
            IndexError: a row is outside the dataset.
            DamagedRowError: rows are not what was packed; names the first one, and has the numbers of all.
            FormatError: a row cannot be decoded; names its sample.
            FileChangedError: a file was replaced, truncated or written to since its header was read.
        """
        known: dict[str, NDArray[Any]] = {}
        copied = 0
        for name in self._order:
            if name in outs:
                known[name] = outs[name]
                copied += outs[name].nbytes
        self.store.fill(rows, known, self._fill)
        return copied

    def within(self, rows: NDArray[np.int64], work: Callable[[], ResultT]) -> ResultT:
        """Returns what `work` does while the files of rows are held, so that what is mapped may be touched.

        It is done again where a file was touched meanwhile, or what came over a network had changed on its way.

        Raises IndexError and FileChangedError as `gather` does.
        """
        return self.store.within(self.store.table.locate(rows), work)

    def _fill(self, located: Located, outs: Mapping[str, NDArray[Any]]) -> None:
        plain = {name: out for name, out in outs.items() if name not in self._encoded} if self._encoded else outs
        if self._check is not None and len(due := self._check.due(located.rows)):
            self._check.gather(located, due, plain, self.store, self._encoded)
        else:
            for name, out in plain.items():
                self.store.copy(name, located, out)
        for name, encoded in self._encoded.items():
            if name in outs:
                assert not self.file.fields[name].varied, f"rows of {name} do not fit into one array"
                encoded.decoded(located.rows, outs[name])

    @property
    def compares(self) -> bool:
        """Whether there are rows that `gather` compares with their digests."""
        return self._check is not None and not self._check.all_seen

    def decoded(self, name: str, rows: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Decodes rows of a ragged field, unchecked; returns an array for each: (H, W, C), masks (H, W)."""
        return self.within(rows, lambda: self._encoded[name].decoded(rows))

    def encoded(self, name: str) -> EncodedRows:
        """Returns the reader of a ragged field's encoded bytes, to be used like `mapped`."""
        return self._encoded[name]

    def mapped(self, name: str) -> NDArray[np.uint8] | None:
        """Returns all rows of a field as one array, uint8 (N, row_bytes), read-only; None where they are not one.

        Valid until `close`, and to be touched within `within`.
        """
        return self.store.whole(name)

    def close(self) -> None:
        """Closes what it opened; no gather may be running. Calling it again does nothing."""
        self.store.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("Rows hold open files and cannot be pickled; pickle a PackedDataset")


def texts_of(reader: Rows, name: str, rows: NDArray[np.int64]) -> list[Any]:
    """Returns the texts of rows, unchecked: a str each, or a list of them; `with_counts` says of which fields.

    Raises IndexError and FileChangedError as `Rows.gather` does.
    """
    fields = {one: reader.file.fields[one] for one in with_counts(reader.file, [name])}
    arrays = {one: np.empty((len(rows), *field.shape), field.dtype) for one, field in fields.items()}
    reader.store.columns(rows, arrays)
    return text_lists(arrays.pop(name), *arrays.values())


def open_rows(
    file: PackedFile,
    fields: Sequence[str],
    read: Read = "auto",
    *,
    cache_chunks: int = 8,
    windows: bool = False,
    verify: Callable[[PackedFile, int], None] | None = None,
    check: Check | None = None,
) -> Rows:
    """Returns a reader of some fields of a dataset; the caller closes it.

    Args:
        read, cache_chunks, windows: as in `Store`.
        verify: as in `Rows`.
        check: when `gather` compares rows with their digests, of files that fastload wrote; None: never.

    Raises:
        OptionError: unknown field or `read`.
        FormatError: the index of a ragged field cannot be read row by row.
    """
    for name in fields:
        if name not in file.fields:
            raise OptionError(f"{file.name}: no field {name!r}; it has {', '.join(file.fields)}")
    row_check = None if check is None else RowCheck(file, fields, check)
    opened = [*fields, *(row_check.needed if row_check else ())]
    for name in opened.copy():
        columns = index_columns(file, name).values()
        if not all(file.fields[column].linear for column in columns):
            raise FormatError(f"{file.path}: the index of {name!r} does not lie in one piece. Pack it again.")
        opened += columns
    kind = Store
    if file.remote is not None:
        from fastload.read.remote_store import RemoteStore as kind  # imports what files of this machine do not need
    store = kind(file, opened, read, cache_chunks=cache_chunks, windows=windows, watcher=row_check)
    return Rows(fields, store, verify=verify, check=row_check)
