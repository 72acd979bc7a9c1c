"""Batches from a cache: rows read once into device memory, or pinned host memory, and gathered from it in every epoch.

    planned batch -> rows of the file -> indices into the cache -> device -> gather -> transform (echo) -> training loop

`cache_choice.py` decides whether and where rows are cached, `cache_load.py` fills the cache. From then on a batch is
its indices, row numbers and valid flags: 17 bytes per sample in one copy. Its fields are `CachedRows` until they are
gathered, so that a gather can be part of another kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.dataset import PackedDataset
from fastload.device.backend import Backend
from fastload.device.copy import CHANNELS_FIRST, SLOTS_IN_COPY, BatchStream, DeviceBatch
from fastload.plan import PlannedBatch
from fastload.prefetch.resolved import Location, Resolved
from fastload.prefetch.ring import FilledBatch, Ring, SlotField
from fastload.timing.probe import WorkerInfo
from fastload.transforms.engine.placement import ImageRows

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, eq=False)
class CachedRows:
    """A field of a batch whose rows are in the cache and not gathered yet; see `CachedField`.

    Attributes:
        rows: (N, ...), all cached rows, in device memory or in pinned memory of the host.
        index: int64 (B,), on the device: the indices of the batch's samples in `rows`.
        host_index: the same on the host, if `rows` are on the host; else None.
    """

    rows: torch.Tensor
    index: torch.Tensor
    host_index: NDArray[np.int64] | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the field, (B, ...)."""
        return torch.Size((len(self.index), *self.rows.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the field."""
        return self.rows.dtype

    @property
    def device(self) -> torch.device:
        """The device of the batch."""
        return self.index.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The device tensors that `gather` reads."""
        return (self.index,) if self.host_index is not None else (self.rows, self.index)

    def gather(self) -> torch.Tensor:
        """Returns the field, (B, ...), as a new tensor on the device, made by the caller's current stream.

        The host waits for nothing.
        """
        return self._gathered(self.rows)

    def _gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows at `index` of contiguous rows."""
        words = _as_words(rows)
        if self.host_index is None:
            picked = words.index_select(0, self.index)
        else:
            # By the CPU, where no kernel reads the host's memory. torch's allocator of pinned memory gives none of it
            # out again before the copy is done.
            staged = torch.empty(
                (len(self.host_index), words.shape[1]), dtype=words.dtype, device="cpu", pin_memory=rows.is_pinned()
            )
            torch.index_select(words, 0, torch.from_numpy(self.host_index), out=staged)
            picked = staged.to(self.device, non_blocking=True)
        return picked.view(torch.uint8).view(rows.dtype).view(len(self.index), *rows.shape[1:])


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """Returns contiguous rows (N, ...) as (N, words) of the widest type that divides a row.

    torch gathers element by element (218x178x3 on 2 cores: 2,400 images/s in bytes, 19,000 in words of 4), and has few
    functions for the larger unsigned types.
    """
    row_bytes = rows.unsqueeze(1).flatten(1).view(torch.uint8)
    return row_bytes.view(next(word for size, word in _WORDS.items() if row_bytes.shape[1] % size == 0))


class CachedImages(CachedRows):
    """The images of a batch: `rows` are (N, H, W, C) in the file's memory order, `gather` gives (B, C, H, W)."""

    def as_image_rows(self) -> ImageRows:
        """Returns the images for transforms, which read them where they are if they can."""
        return ImageRows(self.rows, self.index, self.gather)

    @property
    def shape(self) -> torch.Size:
        """The shape of the images, (B, C, H, W)."""
        height, width, channels = self.rows.shape[1:]
        return torch.Size((len(self.index), channels, height, width))

    def gather(self) -> torch.Tensor:
        """Returns the images, (B, C, H, W) in channels_last memory; see `CachedRows.gather`."""
        channels_first = self.rows.permute(CHANNELS_FIRST)
        if not self.rows.is_contiguous() and channels_first.is_contiguous():
            # A file that stores (C, H, W): gathered as it lies, and turned by the device.
            return self._gathered(channels_first).contiguous(memory_format=torch.channels_last)
        return self._gathered(self.rows).permute(CHANNELS_FIRST)


class RowCache:
    """Rows of a file in memory, which is freed with this object, once the device has done with it.

    Attributes:
        rows: the cached rows of the file, ascending: a range, or int64 (N,).
        location: where they are: "device" memory, or pinned memory of the "host".
        images: (N, H, W, C) in the file's memory order; None if images were not asked for.
        fields: the other fields by name, (N, ...).
        nbytes: bytes of all of them.
    """

    def __init__(
        self, rows: range | NDArray[np.int64], location: Location, tensors: Mapping[str, torch.Tensor], nbytes: int
    ) -> None:
        self.rows = rows
        self.location = location
        self.images = tensors.get("images")
        self.fields = {name: tensor for name, tensor in tensors.items() if name != "images"}
        self.nbytes = nbytes

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

    def batch(self, index: torch.Tensor, host_index: NDArray[np.int64]) -> dict[str, CachedRows]:
        """Returns the fields of a batch, to be gathered.

        Args:
            index: int64 (B,), on the device, of `index_of`.
            host_index: the same on the host; the fields keep it.
        """
        on_host = host_index if self.location == "host" else None
        fields = {name: CachedRows(rows, index, on_host) for name, rows in self.fields.items()}
        return fields if self.images is None else fields | {"images": CachedImages(self.images, index, on_host)}

    def tensor(self, name: str) -> torch.Tensor:
        """Returns all cached rows of a field, images or another."""
        return self.images if name == "images" and self.images is not None else self.fields[name]


class CachedFeed:
    """Gathers batches from a cache, as the third feed beside `ThreadFeed` and `ProcessFeed`.

    Args:
        cache: of every row that will be planned.
        options: of the loader.
    """

    usable = True
    worker_info = WorkerInfo(0, 0, by_threads=False)

    def __init__(self, cache: RowCache, options: Resolved) -> None:
        assert options.backend is not None, "rows are cached for a device"
        self.views: Mapping[str, torch.dtype] = {}
        self._cache: RowCache | None = cache
        facts = SlotField("facts", (17 * options.plan.batch_size,), np.dtype(np.uint8))
        self._ring = Ring([facts], SLOTS_IN_COPY, options.backend.allocate, manual_release=True)

    def stream(self, planned: Iterator[PlannedBatch], epoch: int, *, timed: bool = False) -> BatchStream[FilledBatch]:
        """Begins a pass, which reads nothing."""
        assert self._cache is not None, "the feed was closed"
        return _IndexStream(planned, self._cache, self._ring)

    def worker_stats(self) -> None:
        """Returns None: the feed has no processes."""

    def begin_copy(self, batch: FilledBatch, backend: Backend) -> DeviceBatch[FilledBatch]:
        """Begins the copy of a batch's indices, row numbers and valid flags; see `BeginCopy`."""
        assert self._cache is not None, "the feed was closed"
        facts = batch.arrays["facts"]
        host_index, _, _ = _parts(facts)
        on_device = backend.copy(torch.from_numpy(facts))
        size = 8 * len(host_index)
        index, row = on_device[:size].view(torch.int64), on_device[size : 2 * size].view(torch.int64)
        # The slot will be filled again, and a gather from the host's memory needs the indices later.
        cached = self._cache.batch(index, host_index.copy() if self._cache.location == "host" else host_index)
        return DeviceBatch(batch, {"row": row, "valid": on_device[2 * size :].view(torch.bool)}, cached)

    def close(self) -> None:
        """Frees the cache."""
        self._cache = None


class _IndexStream:
    """Batches of indices into a cache, made as they are asked for: some microseconds each."""

    def __init__(self, planned: Iterator[PlannedBatch], cache: RowCache, ring: Ring) -> None:
        self._planned = planned
        self._cache: RowCache | None = cache
        self._ring = ring
        self._coming = next(planned, None)

    def __iter__(self) -> _IndexStream:
        return self

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
        """Whether next() would return a batch; it never waits."""
        return self._coming is not None

    def depth(self) -> None:
        """Returns None: no batch is made before it is asked for."""

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
