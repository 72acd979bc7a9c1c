"""Batches from a cache of rows: a batch is its indices, and what was drawn for it; some dozen bytes a sample.

Rows in device memory are gathered when they are used, images by the kernel that transforms them (`ImageRows`). Rows in
host memory are gathered over the bus by a kernel on the side stream, behind the copy of their indices and ahead of
their use, and are then a batch like any other on the device.
"""

from __future__ import annotations

import numpy as np
import torch

from fastload.dataset import PackedDataset, as_handed_over
from fastload.device import Backend
from fastload.prefetch.loader_plan import Location
from fastload.prefetch.ring import INNER, SlotField
from fastload.prefetch.row_cache import RowCache
from fastload.prefetch.work import Opened, Stage, Where, Work
from fastload.read.row_errors import sample_error

_INDEX = f"{INNER}index"
"""The field of a slot, int64 (B,), that says which of the cached rows a batch consists of."""


class _OfCache(Stage):
    """A stage that works on cached rows, which it has while its pool is open."""

    _rows: RowCache | None = None

    def open(self, opened: Opened) -> None:
        """Takes the cache."""
        self._rows = opened.cache

    @property
    def cache(self) -> RowCache:
        """The cached rows."""
        assert self._rows is not None, "the pass is over"
        return self._rows

    def close(self) -> None:
        """Lets go of the cache."""
        self._rows = None


class WriteIndex(_OfCache):
    """Writes into the slot which of the cached rows a batch consists of."""

    where = Where.THREAD

    def __init__(self, dataset: PackedDataset, location: Location) -> None:
        self._file = dataset.file
        self.why = f"all rows are cached in {location} memory: a batch is their places there"

    def own_fields(self, batch_size: int) -> list[SlotField]:
        """Returns the field of the index."""
        return [SlotField(_INDEX, (batch_size,), np.dtype(np.int64))]

    def run(self, work: Work) -> None:
        """Writes it. DamagedRowError: a row could not be read when the cache was filled."""
        cache, rows = self.cache, work.rows
        if damaged := cache.damaged.intersection(rows.tolist() if cache.damaged else ()):
            # Shown only where no other row is left to take their place.
            error = sample_error(self._file, min(damaged), "is damaged, as are all rows of its batch")
            error.rows = tuple(damaged)
            raise error
        work.arrays[_INDEX][:] = cache.index_of(rows)


class FetchCached(_OfCache):
    """Brings rows in host memory to the device, behind the copy of their index."""

    where = Where.SIDE_STREAM

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.why = "brings cached rows over the bus, from pinned memory of the host"

    def run(self, work: Work) -> None:
        """Queues what brings them."""
        index = work.inner[_INDEX]
        fields = self.cache.fetch(index, torch.from_numpy(work.arrays[_INDEX][: len(index)]), self._backend)
        work.fields |= fields
        work.memory += fields.values()


class GatherCached(_OfCache):
    """Gathers rows in device memory; images are left to the kernel that transforms them."""

    where = Where.USE

    why = "cached rows are in device memory"

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def run(self, work: Work) -> None:
        """Gathers; records where the loop's stream does, so that the rows are not freed meanwhile."""
        if work.raw is None:  # else it is the side stream, whose memory they are
            self._backend.note_read(self.cache.tensors.values())
        work.fields |= self.cache.gather(work.inner[_INDEX])


class FillCache(Stage):
    """Copies rows that were read to their places in a cache."""

    where = Where.SIDE_STREAM

    def __init__(self, dataset: PackedDataset, cache: RowCache, backend: Backend, part_rows: int) -> None:
        self._file, self._cache, self._backend, self._part_rows = dataset.file, cache, backend, part_rows
        self.damaged = set[int]()  # rows that another one replaces
        self.why = "rows are read once, to be cached"

    def run(self, work: Work) -> None:
        """Queues the copy."""
        self.damaged.update(work.whole.damaged)
        first, count = work.whole.step * self._part_rows, len(work.rows)  # the last may not fill its slot
        arrays = as_handed_over(self._file, {name: array[:count] for name, array in work.arrays.items()})
        for name, cached in self._cache.tensors.items():
            part, read = cached[first : first + count], torch.from_numpy(arrays[name])
            if self._cache.location == "host":
                part.copy_(read)
            else:
                self._backend.fill(part, read)
