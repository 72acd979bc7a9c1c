"""Batches from a cache: rows read once into device memory, or pinned host memory, and gathered from it in every epoch.

    planned batch -> rows of the file -> indices into the cache -> device -> gather -> transform (echo) -> training loop

`cache_choice.py` decides whether and where rows are cached; the threads of other batches read them, in the order of the
file. From then on a batch is its indices, row numbers, valid flags and the numbers that transforms drew, which a thread
lays into a slot some batches ahead: some dozen bytes per sample in one copy. Rows in device memory are gathered when
they are used, images by the kernel that transforms them (`ImageRows`). Rows in host memory are gathered over the bus by
a kernel on the side stream, behind the copy of their indices and ahead of their use, and are then a batch like any
other on the device.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.dataset import PackedDataset
from fastload.device import Backend, Pins
from fastload.errors import CacheError
from fastload.plan import PlannedBatch, rank_share
from fastload.prefetch.coming import coalesced
from fastload.prefetch.device_stage import SLOTS_IN_COPY, BatchStream, DeviceBatch, Epochs, moved_as_stored
from fastload.prefetch.fill_threads import WORDS, FillThreads
from fastload.prefetch.resolved import Location, Resolved
from fastload.prefetch.ring import INNER, FilledBatch, Ring, SlotField, allocate_aligned, slot_arrays, slot_bytes
from fastload.prefetch.thread_stream import ThreadFeed, ThreadStream, fact_fields
from fastload.read.fields import image_axes, with_counts
from fastload.read.row_errors import sample_error
from fastload.read.rows import open_rows
from fastload.system.machine import available_memory
from fastload.timing.probe import WorkerInfo
from fastload.transforms.engine import gpu
from fastload.transforms.engine.placement import ImageRows

# Read at a time while the cache is filled: three slots of so many bytes, and one a thread, are pinned meanwhile.
_LOAD_BYTES = 16 * 2**20

_INDEX = f"{INNER}index"
"""The field of a slot, int64 (B,), that says which of the cached rows a batch consists of."""

_log = logging.getLogger("fastload")

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, eq=False)
class RowCache:
    """Rows of a file in memory, which is freed with this object, once the device has done with it."""

    rows: range | NDArray[np.int64]  # the cached rows of the file, ascending: a range, or int64 (N,)
    location: Location  # where they are: "device" memory, or pinned memory of the "host"
    tensors: Mapping[str, torch.Tensor]  # all rows of each field, (N, ...); images (N, H, W, C) in the file's order
    nbytes: int  # of all of them
    pins: Pins | None = None  # of the host's memory
    damaged: frozenset[int] = frozenset()  # rows of the file that another row replaces

    def index_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the indices of rows of the file, int64 (B,), a new array; IndexError if one is not in the cache."""
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

    def gather(self, index: torch.Tensor) -> dict[str, torch.Tensor | ImageRows]:
        """Returns the fields of a batch, made by the caller's current stream; for rows in device memory.

        The index is int64 (B,) of `index_of`, on the device.
        """
        fields: dict[str, torch.Tensor | ImageRows] = {}
        gathered = functools.partial(_gathered, index=index)
        for name, rows in self.tensors.items():
            if name == "images":
                fields[name] = ImageRows(rows, index, functools.partial(moved_as_stored, rows, gathered))
            else:
                fields[name] = gathered(rows)
        return fields

    def fetch(self, index: torch.Tensor, host_index: torch.Tensor, backend: Backend) -> dict[str, torch.Tensor]:
        """Queues what brings the fields of a batch to the device; for rows in host memory, within the side stream.

        The index is int64 (B,) of `index_of`, on the device when the stream gets there, and on the host.
        """
        fetched = functools.partial(_fetched, index=index, host_index=host_index, backend=backend)
        fields = {name: fetched(rows) for name, rows in self.tensors.items() if name != "images"}
        if (images := self.tensors.get("images")) is not None:
            fields["images"] = moved_as_stored(images, fetched, backend)
        return fields


def _gathered(rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns contiguous rows (N, ...) at the index, (B, ...), on their device; `out` is memory for them."""
    # In words of the widest type that divides a row: torch gathers element by element (218x178x3 on 2 cores: 2,400
    # images/s in bytes, 19,000 in words of 4), and has few functions for the larger unsigned types.
    if out is None:
        out = torch.empty((len(index), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    source, target = (one.unsqueeze(1).flatten(1).view(torch.uint8) for one in (rows, out))
    word = next(word for size, word in _WORDS.items() if source.shape[1] % size == 0)
    torch.index_select(source.view(word), 0, index, out=target.view(word))
    return out


def _fetched(rows: torch.Tensor, index: torch.Tensor, host_index: torch.Tensor, backend: Backend) -> torch.Tensor:
    """Returns a new device tensor, (B, ...), to which the current stream moves contiguous rows (N, ...) of the host."""
    shape = (len(index), *rows.shape[1:])
    if backend.reads_host and gpu.kernel_runs(index.device):
        there = backend.empty(shape, rows.dtype)
        backend.run_kernel(functools.partial(gpu.gather_rows, index=index, out=there), rows)
        return there
    # By the CPU, where there is no kernel. torch's allocator of pinned memory gives none of it out again before the
    # copy is done.
    staged = torch.empty(shape, dtype=rows.dtype, device="cpu", pin_memory=rows.is_pinned())
    return backend.copy(_gathered(rows, host_index, staged))


class CachedFeed:
    """Gathers batches from a cache of every row that will be planned."""

    short_switches = False
    worker_info = WorkerInfo(0, 0, by_threads=False)

    def __init__(self, cache: RowCache, options: Resolved) -> None:
        assert options.backend is not None, "rows are cached for a device"
        self._cache: RowCache | None = cache
        self._options = options
        size = options.plan.batch_size
        fields = [SlotField(_INDEX, (size,), np.dtype(np.int64)), *options.words_field(), *fact_fields(size)]
        self._draw = options.draw if WORDS in (field.name for field in fields) else None
        self._pins = Pins(options.backend)
        dataset = options.packed.dataset
        names = with_counts(dataset.file, dataset.text_fields)
        self._reader = open_rows(dataset.file, names, options.read, check=dataset.check) if names else None  # of texts
        # One thread is enough for some numbers a sample, and is a few batches ahead.
        self._ring = Ring(fields, SLOTS_IN_COPY + 3, self._pins.add_if_possible, manual_release=True)
        self._threads = FillThreads(1)
        self._stream: _IndexStream | None = None

    @property
    def usable(self) -> bool:
        """Whether another stream can begin: the thread does not hang."""
        return not self._threads.left_behind

    def stream(self, epochs: Epochs, *, timed: bool = False) -> BatchStream:
        """Begins a stream, which reads nothing, and ends the one before it."""
        cache, options = self._cache, self._options
        assert cache is not None, "the feed was closed"
        known = weakref.ref(cache)  # the stream keeps it, and releases it when it is closed

        def fill(_: int, planned: PlannedBatch, arrays: Mapping[str, NDArray[Any]]) -> int:
            cache = known()
            assert cache is not None, "the pass is over"
            if damaged := cache.damaged.intersection(planned.rows.tolist() if cache.damaged else ()):
                # Shown only where no other row is left to take their place.
                error = sample_error(
                    options.packed.dataset.file, min(damaged), "is damaged, as are all rows of its batch"
                )
                error.rows = tuple(damaged)
                raise error
            arrays[_INDEX][:] = cache.index_of(planned.rows)
            return 0

        def texts(planned: PlannedBatch) -> dict[str, list[Any]]:
            reader = self._reader
            assert reader is not None, "there are texts"

            def read() -> dict[str, list[Any]]:
                reader.gather(planned.rows, {})  # which compares them
                return options.packed.dataset.texts(reader, planned.rows)

            return reader.within(planned.rows, read)

        if self._stream is not None:
            self._stream.close()
        self._stream = _IndexStream(
            coalesced(epochs, 1),
            fill,
            self._ring,
            self._threads,
            draw=self._draw,
            patience=options.patience(),
            replace_damaged=options.replace_damaged,
            texts=texts if self._reader is not None else None,
        )
        self._stream.cache = cache
        return self._stream

    def close(self) -> None:
        """Ends the thread, and frees the cache."""
        if self._stream is not None:
            self._stream.close()
        self._threads.close()
        if self._threads.left_behind:
            return
        self._pins.close()
        if self._reader is not None:
            self._reader.close()
        if self._cache is not None and self._cache.pins is not None:
            self._cache.pins.close()
        self._cache = self._stream = None


class _IndexStream(ThreadStream):
    """Batches of indices into a cache."""

    cache: RowCache | None = None

    def begin_copy(self, batch: FilledBatch, backend: Backend) -> DeviceBatch:
        """Begins the copy of indices, row numbers, valid flags and drawn numbers, and of rows in host memory behind."""
        cache, copied = self.cache, super().begin_copy(batch, backend)
        assert cache is not None, "the pass is over"
        index = copied.inner[_INDEX]
        if cache.location == "device":
            copied.gather = functools.partial(cache.gather, index)
            copied.memory += cache.tensors.values()
        else:
            copied.add(cache.fetch(index, torch.from_numpy(batch.arrays[_INDEX][: len(index)]), backend))
        return copied

    def close(self) -> None:
        """Ends the stream, and releases the cache."""
        self.cache = None
        super().close()


def cached_fields(dataset: PackedDataset, num_rows: int) -> list[SlotField]:
    """Returns the arrays of a cache of so many of a dataset's rows: fields as in the file, class labels as int64."""
    fields = []
    for name, shape, dtype in dataset.layout():
        is_class = name == "labels" and not shape and dtype.kind in "iu"
        fields.append(SlotField(name, (num_rows, *shape), np.dtype(np.int64) if is_class else dtype))
    return fields


def load_cache(options: Resolved) -> RowCache:
    """Returns a cache of the rows of a rank's share, or of all, with the fields asked for, read in the file's order.

    Raises:
        CacheError: the memory is not there.
        FileChangedError: the file was written to or truncated.
    """
    location, backend = options.cache, options.backend
    assert location is not None and backend is not None, "rows are cached for a device"
    begun_s = time.perf_counter()
    data, positions = options.packed, options.plan.rows
    if options.keeps_share:
        rank, world_size = options.share
        own = rank_share(len(positions), rank=rank, world_size=world_size)
        positions = positions[own.start : own.stop]
    rows = data.rows_in_file(positions)
    cache = _empty_cache(data.dataset, rows, location, backend)
    names = ", ".join(data.dataset.fields)
    what = f'cache="{location}": {len(rows):,} rows of {data.name} ({names}; {cache.nbytes:,} bytes)'
    _log.info("%s are being read into memory", what)
    batch_rows = max(1, min(len(rows), _LOAD_BYTES * len(rows) // max(1, cache.nbytes)))
    plan = replace(options.plan, batch_size=batch_rows, shuffle=False, fixed_pieces=0)
    as_they_are = replace(options.augmentation, transforms=())
    in_file_order = replace(options, plan=plan, cache=None, size_head=None, in_threads=False, augmentation=as_they_are)
    parts = (np.asarray(rows[first : first + batch_rows], np.int64) for first in range(0, len(rows), batch_rows))
    planned = (PlannedBatch(part, np.ones(len(part), np.bool_), len(part), n) for n, part in enumerate(parts))
    damaged = set[int]()
    with closing(ThreadFeed(in_file_order)) as feed, closing(feed.stream([(0, planned)])) as stream:
        for batch in stream:
            damaged.update(batch.planned.damaged)
            first, count = batch.planned.step * batch_rows, len(batch.planned.rows)  # the last may not fill its slot
            try:
                with backend.side_stream():
                    for name, cached in cache.tensors.items():
                        part, read = cached[first : first + count], torch.from_numpy(batch.arrays[name][:count])
                        if location == "host":
                            part.copy_(read)
                        else:
                            backend.fill(part, read)
            finally:
                # Also when memory ran out half way: what was begun still reads the slot. The threads read on meanwhile.
                backend.synchronize(backend.record())
                batch.release()
    took_s = time.perf_counter() - begun_s
    _log.info("%s were read in %.1f s (%.2f GB/s)", what, took_s, cache.nbytes / max(took_s, 1e-9) / 1e9)
    return replace(cache, damaged=frozenset(damaged))


def _empty_cache(
    dataset: PackedDataset, rows: range | NDArray[np.int64], location: Location, backend: Backend
) -> RowCache:
    """Returns a cache for rows with nothing in it. Raises CacheError where the memory is not there."""
    fields = cached_fields(dataset, len(rows))
    nbytes = sum(field.nbytes for field in fields)
    free = available_memory() if location == "host" else backend.memory().free
    pins = Pins(backend) if location == "host" else None
    try:
        if pins is not None:
            if nbytes > free:
                raise MemoryError("the system would hand it out, and end a process when it is written to")
            tensors = {name: torch.from_numpy(array) for name, array in _pinned(fields, pins).items()}
        else:
            # Memory of the side stream, which is the first to write to it.
            with backend.side_stream():
                tensors = {
                    field.name: backend.empty(field.shape, torch.from_numpy(np.empty(0, field.dtype)).dtype)
                    for field in fields
                }
    except (MemoryError, torch.cuda.OutOfMemoryError) as exc:
        raise CacheError(
            f'cache="{location}": {dataset.file.name}: no room for {nbytes:,} bytes of rows: {free:,} bytes are free, '
            f"{max(0, nbytes - free):,} are missing. Something took the memory since the loader was made: let it take "
            f'less, or give cache="auto".'
        ) from exc
    if "images" in tensors:
        axes, images = image_axes(dataset.file), tensors["images"]
        tensors["images"] = images[..., None] if axes == "HW" else images
        if axes == "CHW":
            tensors["images"] = images.permute(0, 2, 3, 1)
    return RowCache(rows, location, tensors, nbytes, pins)


def _pinned(fields: Sequence[SlotField], pins: Pins) -> dict[str, NDArray[Any]]:
    """Returns arrays in one piece of pinned host memory, which the device reads by itself."""
    memory = allocate_aligned(max(1, slot_bytes(fields)))
    if not pins.add(memory):
        raise CacheError(
            f'cache="host": the system does not let {memory.nbytes:,} bytes be pinned, and the device reads no other '
            f"memory of the host. `ulimit -l` says how much it lets; raise it, or leave cache out."
        )
    return slot_arrays(fields, memory)
