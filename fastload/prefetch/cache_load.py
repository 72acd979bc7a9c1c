"""Fills a cache of rows in the order of the file, by the threads, pinned slots and side stream of other batches."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.dataset import PackedDataset
from fastload.device import Backend
from fastload.errors import CacheError
from fastload.plan import PlannedBatch, rank_share
from fastload.prefetch.cached_feed import RowCache, cached_fields
from fastload.prefetch.device_stage import BatchStream, DeviceBatch, DeviceStage
from fastload.prefetch.resolved import Location, Resolved
from fastload.prefetch.ring import FilledBatch, SlotField, allocate_aligned, slot_arrays, slot_bytes
from fastload.prefetch.thread_stream import ThreadFeed
from fastload.read.reader import image_axes
from fastload.system.machine import available_memory

# Read at a time while the cache is filled: five slots of so many bytes are pinned meanwhile.
_LOAD_BYTES = 16 * 2**20

_log = logging.getLogger("fastload")


def load_cache(options: Resolved) -> RowCache:
    """Reads the rows that a rank caches, once, in the order of the file.

    Args:
        options: of a loader with a cache; the fields asked for are cached, those of the rank's share or of all rows.

    Raises:
        CacheError: the memory is not there.
        FileChangedError: the file was written to or truncated.
    """
    location, backend = options.cache, options.backend
    assert location is not None and backend is not None, "rows are cached for a device"
    begun_s = time.perf_counter()
    data, positions = options.packed, options.plan.rows
    if options.plan.fixed_shares:
        rank, world_size = options.share
        own = rank_share(len(positions), rank=rank, world_size=world_size)
        positions = positions[own.start : own.stop]
    rows = data.rows_in_file(positions)
    cache = _empty_cache(data.dataset, rows, location, backend)
    names = ", ".join(data.dataset.fields)
    what = f'cache="{location}": {len(rows):,} rows of {data.name} ({names}; {cache.nbytes:,} bytes)'
    _log.info("%s are being read into memory", what)
    row_bytes = max(1, cache.nbytes // max(1, len(rows)))
    batch_rows = max(1, min(len(rows), _LOAD_BYTES // row_bytes))
    plan = replace(options.plan, batch_size=batch_rows, shuffle=False, fixed_shares=False)
    in_file_order = replace(options, plan=plan, cache=None, size_head=None, in_threads=False)
    with (
        closing(ThreadFeed(in_file_order)) as feed,
        closing(feed.stream(_in_order(rows, batch_rows), epoch=0)) as stream,
    ):
        _fill(cache, stream, backend, batch_rows)
    took_s = time.perf_counter() - begun_s
    _log.info("%s were read in %.1f s (%.2f GB/s)", what, took_s, cache.nbytes / max(took_s, 1e-9) / 1e9)
    return cache


def _empty_cache(
    dataset: PackedDataset, rows: range | NDArray[np.int64], location: Location, backend: Backend
) -> RowCache:
    """Returns a cache for rows with nothing in it. Raises CacheError where the memory is not there."""
    fields = cached_fields(dataset, len(rows))
    nbytes = sum(field.nbytes for field in fields)
    free = available_memory() if location == "host" else backend.memory().free
    try:
        if location == "host":
            if nbytes > free:
                raise MemoryError("the system would hand it out, and end a process when it is written to")
            tensors = {name: torch.from_numpy(array) for name, array in _pinned(fields, backend).items()}
        else:
            # Memory of the side stream, which is the first to write to it.
            with backend.side_stream():
                tensors = {
                    field.name: backend.empty(field.shape, torch.from_numpy(np.empty(0, field.dtype)).dtype)
                    for field in fields
                }
    except (MemoryError, torch.cuda.OutOfMemoryError) as exc:
        raise CacheError(
            f'cache="{location}": {dataset.path}: no room for {nbytes:,} bytes of rows: {free:,} bytes are free, '
            f"{max(0, nbytes - free):,} are missing. Something took the memory since the loader was made: let it take "
            f'less, or give cache="auto".'
        ) from exc
    if "images" in tensors:
        axes, images = image_axes(dataset.file), tensors["images"]
        tensors["images"] = images[..., None] if axes == "HW" else images
        if axes == "CHW":
            tensors["images"] = images.permute(0, 2, 3, 1)
    return RowCache(rows, location, tensors, nbytes)


def _pinned(fields: Sequence[SlotField], backend: Backend) -> dict[str, NDArray[Any]]:
    """Returns arrays in one piece of pinned host memory, which the device reads by itself."""
    # Pinned afterwards: torch's own pinned memory comes in powers of two, up to twice as much.
    memory = allocate_aligned(max(1, slot_bytes(fields)))
    unpin = backend.pin(memory)
    if unpin is None:
        raise CacheError(
            f'cache="host": the system does not let {memory.nbytes:,} bytes be pinned, and the device reads no other '
            f"memory of the host. `ulimit -l` says how much it lets; raise it, or leave cache out."
        )
    pid = os.getpid()

    def release() -> None:
        if pid == os.getpid():  # a forked child has no device
            backend.drain()  # a kernel may still read it
            unpin()

    # NumPy's views keep the array that owns the memory, and not the view that they were made of.
    weakref.finalize(memory if memory.base is None else memory.base, release).atexit = False
    return slot_arrays(fields, memory)


def _in_order(rows: range | NDArray[np.int64], batch_rows: int) -> Iterator[PlannedBatch]:
    """Yields the rows in batches, in order."""
    for step, first in enumerate(range(0, len(rows), batch_rows)):
        part = np.asarray(rows[first : first + batch_rows], np.int64)
        yield PlannedBatch(part, np.ones(len(part), np.bool_), len(part), step)


def _fill(cache: RowCache, stream: BatchStream, backend: Backend, batch_rows: int) -> None:
    """Copies batches of `_in_order` into the cache; all copies are done when this returns."""

    def copy_with(copy: Callable[[torch.Tensor, torch.Tensor], object], batch: FilledBatch) -> None:
        first, count = batch.planned.step * batch_rows, len(batch.planned.rows)  # the last may not fill its slot
        for name, rows in cache.tensors.items():
            copy(rows[first : first + count], torch.from_numpy(batch.arrays[name][:count]))

    def begin_copy(batch: FilledBatch, backend: Backend) -> DeviceBatch:
        copy_with(backend.fill, batch)
        return DeviceBatch(batch, {})

    if cache.location == "host":
        for batch in stream:
            copy_with(torch.Tensor.copy_, batch)
            batch.release()
        return
    with closing(DeviceStage(stream, backend, begin_copy=begin_copy)) as stage:  # waits for the copies that still run
        for _ in stage:
            pass
