"""The rows of a file, gathered into memory that is already there: one call a batch, any number of threads.

`mapped` copies from a mapping of the file, `pread` reads without one, `stored` has rows of different lengths, `chunked`
takes whole chunks of whatever does not lie on disk in one piece: `filtered` decodes those in gzip or zstd, h5py the
rest. `readahead` tells the kernel what comes next. No torch here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FormatError, OptionError
from fastload.format import PackedFile

from .chunked import ChunkedRows
from .identity import check_open, open_checked
from .mapped import KEEPS_GIL, MappedRows
from .pread import PreadRows
from .stored import StoredBytes, decode_rows

Read = Literal["map", "pread"]

__all__ = ["Read", "RowReader", "check_rows", "image_axes"]


class Rows(Protocol):
    """One way to read rows."""

    def gather(self, rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]]) -> None:
        """Copies rows, checked to be in range, into C-contiguous arrays of their fields' dtype, (B, ...) each."""
        ...

    def close(self) -> None: ...


class RowReader:
    """Reads any rows of a file's fields. Threads may share it, it survives a fork, and it cannot be pickled.

    Args:
        file: header, as `read_header` gave it.
        fields: names of the fields to read.
        read: "map" copies from a mapping; "pread" never maps, so that no truncation can kill the process (SIGBUS).
        cache_chunks, windows: as in `ChunkedRows`, for fields that are read chunk by chunk.

    Raises:
        OptionError: unknown field or `read`.
        MissingFileError, FileChangedError: the file is gone, or not the one whose header was read.
    """

    def __init__(
        self,
        file: PackedFile,
        fields: Sequence[str],
        read: Read = "map",
        *,
        cache_chunks: int = 8,
        windows: bool = False,
    ) -> None:
        if read not in ("map", "pread"):
            raise OptionError(f'read={read!r} is not known; choose "map" or "pread"')
        for name in fields:
            if name not in file.fields:
                raise OptionError(f"{file.path}: no field {name!r}; it has {', '.join(file.fields)}")
        self.file = file
        self._fd = open_checked(file)
        self._stores: list[tuple[Rows, tuple[str, ...]]] = []
        self._bytes: dict[str, StoredBytes] = {}
        linear = tuple(name for name in fields if file.fields[name].offset is not None)
        other = tuple(name for name in fields if file.fields[name].offset is None and file.fields[name].store is None)
        try:
            for name in fields:
                if file.fields[name].store is not None:
                    self._bytes[name] = StoredBytes(self._fd, file, name, read)
            # Small fields first: what they leave in a worker's cache is gone after the pixels.
            linear = tuple(sorted(linear, key=lambda name: file.fields[name].row_bytes))
            if linear:
                store = MappedRows if read == "map" else PreadRows
                self._stores.append((store(self._fd, file, linear), linear))
            if other:
                self._stores.append((ChunkedRows(file, other, cache_chunks=cache_chunks, windows=windows), other))
        except BaseException:
            self.close()
            raise

    def gather(self, rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]]) -> int:
        """Copies rows of the file into the arrays given, and returns the number of bytes copied.

        Args:
            rows: int64, (B,), any order, repeats allowed.
            outs: field -> C-contiguous array (B, ...) of the field's dtype in native byte order; arrays of other names
                are left alone. Rows of a field that differ in shape have none: see `decoded`.

        Raises:
            IndexError: a row is outside the file.
            FormatError: a stored row cannot be decoded; names its sample.
            FileChangedError: the file was replaced, truncated or written to since its header was read.
        """
        check_rows(rows, self.file.num_rows, self.file.path)
        self.check_identity()
        copied = 0
        for store, names in self._stores:
            chosen = {name: outs[name] for name in names if name in outs}
            store.gather(rows, chosen)
            copied += sum(out.nbytes for out in chosen.values())
        for name, stored in self._bytes.items():
            if name in outs:
                assert not self.file.fields[name].varied, f"rows of {name} do not fit into one array"
                decode_rows(stored, self.file, name, rows, outs[name])
                copied += outs[name].nbytes
        return copied

    def decoded(self, name: str, rows: NDArray[np.int64]) -> list[NDArray[Any]]:
        """The pixels of rows of a store, each an array of its own: (H, W, C), masks (H, W).

        Args:
            name: of a field with a store.
            rows: int64, (B,), any order, repeats allowed.

        Raises:
            IndexError: a row is outside the file.
            FormatError: a row cannot be decoded; names its sample.
            FileChangedError: the file was replaced, truncated or written to since its header was read.
        """
        check_rows(rows, self.file.num_rows, self.file.path)
        self.check_identity()
        return decode_rows(self._bytes[name], self.file, name, rows, None)

    def stored(self, name: str) -> StoredBytes:
        """The rows of a store as they are stored; until `close`.

        Whoever reads them calls `check_identity` before each batch and checks rows, as `gather` does.
        """
        return self._bytes[name]

    def mapped(self, name: str) -> NDArray[np.uint8] | None:
        """All rows of a field where they lie, uint8 (N, row_bytes), read-only; None where no mapping holds them.

        Whoever looks at them calls `check_identity` before each batch and checks rows, as `gather` does, and stops
        before `close`.
        """
        for store, names in self._stores:
            if name in names and isinstance(store, MappedRows):
                return store.rows(name)
        return None

    @property
    def fd(self) -> int:
        """The open file's descriptor, until `close`."""
        return self._fd

    def check_identity(self) -> None:
        """Raises FileChangedError if the file is not, byte for byte, what it was when its header was read."""
        # Every batch: a mapping of a truncated file kills the process, and 2 us is nothing to a batch's copy. This sees
        # writes and truncation; a replacement behind the same name leaves the open file as it was.
        check_open(self.file, self._fd)

    def close(self) -> None:
        """Closes what it opened; no gather may be running. Calling it again does nothing."""
        stores, self._stores = self._stores, []
        for store, _ in stores:
            store.close()
        stored, self._bytes = self._bytes, {}
        for each in stored.values():
            each.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # While the interpreter ends, globals are gone, and the kernel closes what is left.
        if getattr(self, "_fd", -1) >= 0 and not _is_finalizing():
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a RowReader holds an open file and cannot be pickled; pickle a PackedDataset")


def check_rows(rows: NDArray[np.int64], num_rows: int, what: object) -> None:
    """Raises IndexError naming the first row outside [0, num_rows): the gathers clip, so a bad one would pass."""
    unsigned = rows.view(np.uint64)  # a negative row is then larger than any
    for first in range(0, len(rows), KEEPS_GIL):
        if unsigned[first : first + KEEPS_GIL].max() >= num_rows:
            bad = rows[unsigned >= num_rows][0]
            raise IndexError(f"{what}: row {bad} is outside 0..{num_rows - 1}")


def image_axes(file: PackedFile) -> Literal["HWC", "CHW", "HW"]:
    """How the file stores the axes of one image: by its shape, since other writers do not say.

    Raises:
        FormatError: neither the first nor the last axis can be channels.
    """
    shape = file.fields["images"].shape
    if len(shape) == 2:
        return "HW"
    if len(shape) == 3 and shape[2] in (1, 3, 4):
        return "HWC"
    if len(shape) == 3 and shape[0] in (1, 3, 4):
        return "CHW"
    raise FormatError(
        f"{file.path}: one image has the shape {shape}; expected (H, W, C), (C, H, W) or (H, W) with 1, 3 or 4 "
        f"channels. Pack the original files."
    )
