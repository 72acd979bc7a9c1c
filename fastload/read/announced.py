"""Which bytes of a file rows are: by arithmetic, or, in a store, by what stands beside it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fastload.format import Field, PackedFile

from . import held
from .pread import PreadRows

_JOINED_BYTES = 4096  # rows of a store that lie no further apart are announced as one range


class Announced(Protocol):
    """The rows of one field on disk."""

    def num_bytes(self, stop: int) -> int:
        """Bytes of the first rows, up to `stop`; of all rows where they are not in order."""
        ...

    def last_byte(self, row: int) -> int | None:
        """The byte of the file at which a row ends; None where finding that out would take waiting for the disk."""
        ...

    def ranges(self, first: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ranges of the file, int64 (R, 2), (offset, length), that hold rows first[i] up to stop[i] for each i."""
        ...

    def whole(self, stop: int) -> NDArray[np.int64]:
        """The range that `num_bytes` is about."""
        ...


class LinearRows:
    """Rows that lie back to back; see `Announced`."""

    def __init__(self, offset: int, row_bytes: int) -> None:
        self._offset = offset
        self._row_bytes = row_bytes

    def num_bytes(self, stop: int) -> int:
        """See `Announced.num_bytes`."""
        return self._row_bytes * stop

    def last_byte(self, row: int) -> int | None:
        """See `Announced.last_byte`."""
        return self._offset + (row + 1) * self._row_bytes - 1

    def ranges(self, first: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Announced.ranges`."""
        return np.stack([self._offset + first * self._row_bytes, (stop - first) * self._row_bytes], axis=1)

    def whole(self, stop: int) -> NDArray[np.int64]:
        """See `Announced.whole`."""
        return np.array([[self._offset, self._row_bytes * stop]])


class RowsInStore:
    """Rows of a byte store; see `Announced`. What stands beside it is read from the file, a mapping is not needed.

    Args:
        fd: of the file, open for reading as long as this lives.
        file: its header.
        field: with a store.
    """

    def __init__(self, fd: int, file: PackedFile, field: Field) -> None:
        assert field.store is not None, f"{field.name} has no store"
        self._fd = fd
        self._store = field.store
        self._beside = (f"{field.name}_offset", f"{field.name}_bytes")
        self._index = PreadRows(fd, file, self._beside)
        self._bases = [file.fields[name].offset or 0 for name in self._beside]

    def num_bytes(self, stop: int) -> int:
        """See `Announced.num_bytes`."""
        return self._store.num_bytes

    def last_byte(self, row: int) -> int | None:
        """See `Announced.last_byte`."""
        found = [held.read_resident(self._fd, base + 8 * row, 8) or b"" for base in self._bases]
        if min(map(len, found)) < 8:
            return None
        begin, length = (int.from_bytes(number, "little") for number in found)
        return self._store.base + begin + max(length, 1) - 1

    def ranges(self, first: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Announced.ranges`."""
        counts = stop - first
        rows = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
        offset, length = (np.empty(len(rows), np.int64) for _ in range(2))
        self._index.gather(rows, dict(zip(self._beside, (offset, length), strict=True)))
        # A damaged file is met by whoever reads the row; here nothing outside the store is asked for.
        offset = offset.clip(0, self._store.num_bytes)
        end = (offset + length.clip(0, self._store.num_bytes)).clip(max=self._store.num_bytes)
        order = np.argsort(offset, kind="stable")
        offset, end = offset[order], np.maximum.accumulate(end[order])
        begins = np.flatnonzero(np.concatenate(([True], offset[1:] > end[:-1] + _JOINED_BYTES)))
        ends = end[np.append(begins[1:] - 1, len(end) - 1)]
        return np.stack([self._store.base + offset[begins], ends - offset[begins]], axis=1)

    def whole(self, stop: int) -> NDArray[np.int64]:
        """See `Announced.whole`."""
        return np.array([[self._store.base, self._store.num_bytes]])

    def close(self) -> None:
        """Gives back what reading took; the descriptor is the caller's."""
        self._index.close()
