"""Copies rows from a mapping of the file: one copy, and for pixels the GIL released once a batch."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.format.header import PackedFile

KEEPS_GIL = 500
"""Elements up to which NumPy loops over an array without releasing the GIL, whose cost `system.syscalls` describes."""

# Rows up to this length (labels, attributes, boxes) are copied by indexing, in slices that keep the GIL.
_SHORT_ROW_BYTES = 256


class MappedRows:
    """Gathers rows of linear fields from one shared, read-only mapping, which outlives the descriptor.

    Any thread may call it, also after a fork.
    """

    def __init__(self, fd: int, file: PackedFile, fields: Sequence[str]) -> None:
        self._map = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._rows: dict[str, NDArray[np.uint8]] = {}
        self._short: dict[str, NDArray[np.void]] = {}  # rows as opaque elements, (N,)
        for name in fields:
            field = file.fields[name]
            assert field.offset is not None, f"{name} is not linear"
            # As bytes, whatever the dtype: NumPy copies a whole source that is not aligned to its elements.
            flat = np.frombuffer(self._map, np.uint8, file.num_rows * field.row_bytes, field.offset)
            self._rows[name] = flat.reshape(file.num_rows, field.row_bytes)
            if 0 < field.row_bytes <= _SHORT_ROW_BYTES:
                self._short[name] = flat.view((np.void, field.row_bytes))

    def gather(self, rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]]) -> None:
        """Copies rows, checked to be in range, into C-contiguous arrays of their fields' dtype, (B, ...) each."""
        for name, out in outs.items():
            assert out.flags.c_contiguous, "a gather needs C-contiguous memory"
            short = self._short.get(name)
            if short is None:
                source = self._rows[name]
                target = out.reshape(-1).view(np.uint8).reshape(len(rows), source.shape[1])
                # "clip", since rows were checked before: "raise" copies through a buffer, at a third of the speed.
                np.take(source, rows, axis=0, out=target, mode="clip")
                continue
            elements = out.reshape(-1).view(short.dtype)
            for first in range(0, len(rows), KEEPS_GIL):
                part = slice(first, first + KEEPS_GIL)
                elements[part] = short[rows[part]]

    def rows(self, name: str) -> NDArray[np.uint8]:
        """Returns all rows of a field as mapped, uint8 (N, row_bytes), read-only; valid until `close`."""
        return self._rows[name]

    def flat(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Returns a range of the file as mapped, uint8 (num_bytes,), read-only; valid until `close`."""
        return np.frombuffer(self._map, np.uint8, num_bytes, offset)

    def close(self) -> None:
        """Releases the mapping; it is unmapped when the last array over it is gone."""
        self._rows.clear()
        self._short.clear()
        self._map = None  # type: ignore[assignment]  # closing it would raise while a view lives
