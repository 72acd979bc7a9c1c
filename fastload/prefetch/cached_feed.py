"""Batches from a cache: rows read once into device memory, or pinned host memory, and gathered from it in every epoch.

    planned batch -> rows of the file -> indices into the cache -> device -> gather -> transform (echo) -> training loop

`cache_choice.py` decides whether and where rows are cached, `cache_load.py` fills the cache. From then on a batch is
its indices, row numbers and valid flags: 17 bytes per sample in one copy. Its images are `ImageRows` until they are
gathered, so that a gather can be part of another kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.dataset import PackedDataset
from fastload.device import Backend
from fastload.plan import PlannedBatch
from fastload.prefetch.device_stage import SLOTS_IN_COPY, BatchStream, DeviceBatch, moved_as_stored
from fastload.prefetch.resolved import Location, Resolved
from fastload.prefetch.ring import FilledBatch, Ring, SlotField
from fastload.timing.probe import WorkerInfo
from fastload.transforms.engine.placement import ImageRows

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, eq=False)
class RowCache:
    """Rows of a file in memory, which is freed with this object, once the device has done with it."""

    rows: range | NDArray[np.int64]  # the cached rows of the file, ascending: a range, or int64 (N,)
    location: Location  # where they are: "device" memory, or pinned memory of the "host"
    tensors: Mapping[str, torch.Tensor]  # all rows of each field, (N, ...); images (N, H, W, C) in the file's order
    nbytes: int  # of all of them

    def index_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the indices in the cache of rows of the file, int64 (B,), a new array.

        Raises:
            IndexError: a row is not in the cache.
        """
        if isinstance(self.rows, range):
            index = rows - self.rows.start
            known = (index >= 0) & (index < len(self.rows))
        else:
            index = np.searchsorted(self.rows, rows)
            known = self.rows[np.minimum(index, len(self.rows) - 1)] == rows
        # A gather on the device reads whatever lies there, or kills the process.
        if not known.all():
            raise IndexError(f"row {rows[~known][0]} is not among the {len(self.rows):,} rows kept in memory")
        return index

    def gather(self, index: torch.Tensor, host_index: NDArray[np.int64] | None) -> dict[str, torch.Tensor | ImageRows]:
        """Returns the fields of a batch, made by the caller's current stream; the host waits for nothing.

        Args:
            index: int64 (B,), on the device, of `index_of`.
            host_index: the same on the host, if the rows are there.
        """
        fields: dict[str, torch.Tensor | ImageRows] = {}
        for name, rows in self.tensors.items():
            gathered = functools.partial(_gathered, index=index, host_index=host_index)
            if name == "images":
                fields[name] = ImageRows(rows, index, functools.partial(moved_as_stored, rows, gathered))
            else:
                fields[name] = gathered(rows)
        return fields


def _gathered(rows: torch.Tensor, index: torch.Tensor, host_index: NDArray[np.int64] | None) -> torch.Tensor:
    """Returns contiguous rows (N, ...) at the index, (B, ...), as a new tensor on the device."""
    # In words of the widest type that divides a row: torch gathers element by element (218x178x3 on 2 cores: 2,400
    # images/s in bytes, 19,000 in words of 4), and has few functions for the larger unsigned types.
    words = rows.unsqueeze(1).flatten(1).view(torch.uint8)
    words = words.view(next(word for size, word in _WORDS.items() if words.shape[1] % size == 0))
    if host_index is None:
        picked = words.index_select(0, index)
    else:
        # By the CPU, where no kernel reads the host's memory. torch's allocator of pinned memory gives none of it
        # out again before the copy is done.
        shape = (len(host_index), words.shape[1])
        staged = torch.empty(shape, dtype=words.dtype, device="cpu", pin_memory=rows.is_pinned())
        torch.index_select(words, 0, torch.from_numpy(host_index), out=staged)
        picked = staged.to(index.device, non_blocking=True)
    return picked.view(torch.uint8).view(rows.dtype).view(len(index), *rows.shape[1:])


class CachedFeed:
    """Gathers batches from a cache of every row that will be planned; needs neither threads nor processes."""

    usable = True
    worker_info = WorkerInfo(0, 0, by_threads=False)

    def __init__(self, cache: RowCache, options: Resolved) -> None:
        assert options.backend is not None, "rows are cached for a device"
        self.views: Mapping[str, torch.dtype] = {}
        self._cache: RowCache | None = cache
        facts = SlotField("facts", (17 * options.plan.batch_size,), np.dtype(np.uint8))
        self._ring = Ring([facts], SLOTS_IN_COPY, options.backend.allocate, manual_release=True)

    def stream(self, planned: Iterator[PlannedBatch], epoch: int, *, timed: bool = False) -> BatchStream:
        """Begins a pass, which reads nothing."""
        assert self._cache is not None, "the feed was closed"
        return _IndexStream(planned, self._cache, self._ring)

    def begin_copy(self, batch: FilledBatch, backend: Backend) -> DeviceBatch:
        """Begins the copy of a batch's indices, row numbers and valid flags; see `BeginCopy`."""
        assert self._cache is not None, "the feed was closed"
        facts = batch.arrays["facts"]
        host_index, _, _ = _parts(facts)
        on_device = backend.copy(torch.from_numpy(facts))
        size = 8 * len(host_index)
        index, row = on_device[:size].view(torch.int64), on_device[size : 2 * size].view(torch.int64)
        fields = {"row": row, "valid": on_device[2 * size :].view(torch.bool)}
        if self._cache.location == "device":
            gather = functools.partial(self._cache.gather, index, None)
            return DeviceBatch(batch, fields, gather, (index, *self._cache.tensors.values()))
        # The slot will be filled again, and a gather from the host's memory needs the indices later.
        return DeviceBatch(batch, fields, functools.partial(self._cache.gather, index, host_index.copy()), (index,))

    def close(self) -> None:
        """Frees the cache."""
        self._cache = None


class _IndexStream(BatchStream):
    """Batches of indices into a cache, made as they are asked for: some microseconds each."""

    def __init__(self, planned: Iterator[PlannedBatch], cache: RowCache, ring: Ring) -> None:
        self._planned = planned
        self._cache: RowCache | None = cache
        self._ring = ring
        self._coming = next(planned, None)

    def __next__(self) -> FilledBatch:
        planned = self._coming
        if planned is None or self._cache is None:
            raise StopIteration
        index = self._cache.index_of(planned.rows)
        slot = self._ring.take()
        assert slot is not None, "the device stage keeps more slots than it said"
        for part, values in zip(_parts(slot.arrays["facts"]), (index, planned.rows, planned.valid), strict=True):
            part[...] = values
        self._coming = next(self._planned, None)
        return self._ring.hand_over(slot, planned, 0)

    def ready(self) -> bool:
        return self._coming is not None

    def close(self) -> None:
        """Ends the pass, and lets go of the cache."""
        self._coming = self._cache = None


def _parts(facts: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Returns views of a batch's 17 * B bytes: indices into the cache, rows of the file, valid flags, (B,) each."""
    size = 8 * (len(facts) // 17)
    return facts[:size].view(np.int64), facts[size : 2 * size].view(np.int64), facts[2 * size :].view(np.bool_)


def cached_fields(dataset: PackedDataset, num_rows: int) -> list[SlotField]:
    """Returns the arrays of a cache of so many of a dataset's rows: fields as in the file, class labels as int64."""
    fields = []
    for name, shape, dtype in dataset.layout():
        is_class = name == "labels" and not shape and dtype.kind in "iu"
        fields.append(SlotField(name, (num_rows, *shape), np.dtype(np.int64) if is_class else dtype))
    return fields
