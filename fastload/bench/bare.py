"""The bare copy that a loader is measured against: one thread of `np.take` out of a mapping of the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.format import PackedFile

SLOTS = 5
"""Batches' worth of memory that is written in turn: as many as a `FastLoader` with two threads has."""


class BareTake:
    """Rows copied from a mapping into memory allocated once, one batch after another; nobody is handed anything.

    Args:
        file: header of a file whose fields lie on disk as linear arrays; see `can_be_bare`.
        names: fields to copy.
        batch_size: rows of the largest batch.
        slots: batches' worth of memory.
    """

    def __init__(self, file: PackedFile, names: Sequence[str], batch_size: int, slots: int = SLOTS) -> None:
        assert can_be_bare(file, names), "a field that is not one linear array cannot be mapped"
        self.num_slots = slots
        self._fields: list[tuple[NDArray[Any], NDArray[Any]]] = []
        for name in names:
            field = file.fields[name]
            mapped = np.memmap(file.path, field.dtype, "r", field.offset or 0, (file.num_rows, *field.shape))
            self._fields.append((mapped, np.zeros((slots, batch_size, *field.shape), field.dtype)))

    def fill(self, batches: Iterable[NDArray[np.int64]]) -> Iterator[NDArray[Any]]:
        """Each batch's first field, in memory that is written again `slots` batches later."""
        for number, rows in enumerate(batches):
            filled = []
            for mapped, slots in self._fields:
                out = slots[number % self.num_slots, : len(rows)]
                np.take(mapped, rows, axis=0, out=out, mode="clip")
                filled.append(out)
            yield filled[0]


def can_be_bare(file: PackedFile, names: Sequence[str]) -> bool:
    """Whether every row of these fields lies at a place that arithmetic knows."""
    return all(file.fields[name].offset is not None for name in names)
