"""Byte ranges of rows in a file, for read-ahead: by arithmetic, or from the index of a ragged field."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fastload.format.header import Field, PackedFile
from fastload.read.pread import PreadRows
from fastload.system import syscalls

_JOINED_BYTES = 4096  # ragged rows with a smaller gap between them are announced as one range


class RowExtents(Protocol):
    """Byte ranges of the rows of one field."""

    def num_bytes(self, stop: int) -> int:
        """Returns the bytes of the rows before `stop`; of all rows if they are not in order."""
        ...

    def last_byte(self, row: int) -> int | None:
        """Returns the last byte of a row; None if the disk would have to be waited for to find out."""
        ...

    def ranges(self, first: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the ranges, int64 (R, 2), (offset, length), that hold rows first[i] to stop[i] - 1 for each i."""
        ...

    def whole(self, stop: int) -> NDArray[np.int64]:
        """Returns the range that `num_bytes` counts, int64 (1, 2)."""
        ...


class LinearExtents:
    """`RowExtents` of rows that lie back to back."""

    def __init__(self, offset: int, row_bytes: int) -> None:
        self._offset = offset
        self._row_bytes = row_bytes

    def num_bytes(self, stop: int) -> int:
        """Returns the bytes of the rows before `stop`."""
        return self._row_bytes * stop

    def last_byte(self, row: int) -> int | None:
        """Returns the last byte of a row."""
        return self._offset + (row + 1) * self._row_bytes - 1

    def ranges(self, first: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns one range for each i."""
        return np.stack([self._offset + first * self._row_bytes, (stop - first) * self._row_bytes], axis=1)

    def whole(self, stop: int) -> NDArray[np.int64]:
        """Returns the range of the rows before `stop`."""
        return np.array([[self._offset, self._row_bytes * stop]])


class RaggedExtents:
    """`RowExtents` of a ragged field; reads its index from the file, without a mapping.

    Args:
        fd: descriptor of the file, open for reading as long as this lives.
        file: its header.
        field: a ragged field.
    """

    def __init__(self, fd: int, file: PackedFile, field: Field) -> None:
        assert field.ragged is not None, f"{field.name} is not ragged"
        self._fd = fd
        self._extent = field.ragged
        self._names = (f"{field.name}_offset", f"{field.name}_bytes")
        self._index = PreadRows(fd, file, self._names)
        self._bases = [file.fields[name].offset or 0 for name in self._names]

    def num_bytes(self, stop: int) -> int:
        """Returns the bytes of all rows: they may lie in any order."""
        return self._extent.num_bytes

    def last_byte(self, row: int) -> int | None:
        """Returns the last byte of a row; None if its index entry is not in memory."""
        found = [syscalls.read_resident(self._fd, base + 8 * row, 8) or b"" for base in self._bases]
        if min(map(len, found)) < 8:
            return None
        begin, length = (int.from_bytes(number, "little") for number in found)
        return self._extent.base + begin + max(length, 1) - 1

    def ranges(self, first: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the ranges of the rows, sorted; neighbours are joined."""
        counts = stop - first
        rows = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
        offset, length = (np.empty(len(rows), np.int64) for _ in range(2))
        self._index.gather(rows, dict(zip(self._names, (offset, length), strict=True)))
        # The index may be damaged, which reading the row will report; here ranges only must stay within the dataset.
        offset = offset.clip(0, self._extent.num_bytes)
        end = (offset + length.clip(0, self._extent.num_bytes)).clip(max=self._extent.num_bytes)
        order = np.argsort(offset, kind="stable")
        offset, end = offset[order], np.maximum.accumulate(end[order])
        begins = np.flatnonzero(np.concatenate(([True], offset[1:] > end[:-1] + _JOINED_BYTES)))
        ends = end[np.append(begins[1:] - 1, len(end) - 1)]
        return np.stack([self._extent.base + offset[begins], ends - offset[begins]], axis=1)

    def whole(self, stop: int) -> NDArray[np.int64]:
        """Returns the range of all rows."""
        return np.array([[self._extent.base, self._extent.num_bytes]])

    def close(self) -> None:
        """Releases what reading needed; the descriptor stays open."""
        self._index.close()
