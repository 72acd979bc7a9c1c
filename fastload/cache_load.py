"""Fills a store of rows: in the order of the file, by the threads, the pinned slots and the side stream that batches
take without one.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.backend import Backend
from fastload.cache import Place, RowStore, stored_fields
from fastload.cache_choice import CacheChoice
from fastload.dataset import PackedDataset
from fastload.device import DeviceBatch, to_device
from fastload.errors import CacheError
from fastload.feed import SLOTS_IN_COPY, Stream, ThreadFeed
from fastload.inputs import PackedInput
from fastload.memory import available_memory
from fastload.plan import PlannedBatch, rank_share
from fastload.read import Read, image_axes
from fastload.ring import FilledBatch, SlotField, allocate_aligned, slot_arrays, slot_bytes
from fastload.share import Share

# Read at a time while the store is filled: five slots of it are pinned meanwhile.
_LOAD_BYTES = 16 * 2**20

_log = logging.getLogger("fastload")


def load_store(
    data: PackedInput, choice: CacheChoice, share: Share, backend: Backend, *, read: Read, workers: int
) -> RowStore:
    """The rows that a rank keeps, read once in the order of the file.

    Args:
        data: without a transform; the fields asked for are kept.
        choice: where, and whether only the rank's share.
        share: the rank's.
        backend: of the device that will gather them.
        read, workers: as in `FastLoader`.

    Raises:
        CacheError: the memory is not there.
        FileChangedError: the file was written to or truncated.
    """
    assert choice.place is not None, "there is nothing to load"
    begun_s = time.perf_counter()
    dataset, place, positions = data.dataset, choice.place, data.plan_rows
    if choice.fixed_shares:
        own = rank_share(len(positions), rank=share.rank, world_size=share.world_size)
        positions = positions[own.start : own.stop]
    rows = data.rows_in_file(positions)
    store = _empty_store(dataset, rows, place, backend)
    what = (
        f'cache="{place}": {len(rows):,} rows of {dataset.path} ({", ".join(dataset.fields)}; {store.nbytes:,} bytes)'
    )
    _log.info("%s are being read into memory", what)
    row_bytes = max(1, store.nbytes // max(1, len(rows)))
    batch_rows = max(1, min(len(rows), _LOAD_BYTES // row_bytes))
    feed = ThreadFeed(
        dataset,
        batch_rows,
        num_steps=-(-len(rows) // batch_rows),
        read=read,
        workers=workers,
        chunk_rows=0,
        cache_chunks=workers + 1,  # of a compressed file; neighbouring batches share one
        backend=backend,
        announces=False,  # in file order the kernel's own read-ahead is better
    )
    try:
        stream = feed.stream(_in_order(rows, batch_rows), lambda _: 0, epoch=0)
        try:
            _fill(store, stream, backend, batch_rows)
        finally:
            stream.close()
    finally:
        feed.close()
    took_s = time.perf_counter() - begun_s
    _log.info("%s were read in %.1f s (%.2f GB/s)", what, took_s, store.nbytes / max(took_s, 1e-9) / 1e9)
    return store


def _empty_store(dataset: PackedDataset, rows: range | NDArray[np.int64], place: Place, backend: Backend) -> RowStore:
    fields = stored_fields(dataset, len(rows))
    nbytes = sum(field.nbytes for field in fields)
    free = available_memory() if place == "host" else backend.memory().free
    try:
        if place == "host":
            if nbytes > free:
                raise MemoryError("the system would give it all the same, and end a process when it is written to")
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
            f'cache="{place}": {dataset.path}: no room for {nbytes:,} bytes of rows: {free:,} bytes are free, '
            f"{max(0, nbytes - free):,} are missing. Something took the memory since the loader was made: let it take "
            f'less, or give cache="auto".'
        ) from exc
    if "images" in tensors:
        tensors["images"] = _height_width_channels(tensors["images"], image_axes(dataset.file))
    return RowStore(rows, place, tensors, nbytes)


def _pinned(fields: Sequence[SlotField], backend: Backend) -> dict[str, NDArray[Any]]:
    """Arrays in one piece of the host's memory that the device reads by itself."""
    # Pinned afterwards: torch's own pinned memory comes in powers of two, up to twice as much.
    memory = allocate_aligned(max(1, slot_bytes(fields)))
    unpin = backend.pin(memory)
    if unpin is None:
        raise CacheError(
            f'cache="host": the system does not let {memory.nbytes:,} bytes be pinned, and the device reads no other '
            f"memory of the host. `ulimit -l` says how much it lets; raise it, or leave cache out."
        )
    # NumPy's views keep the array that owns the memory, and not the view that they were made of.
    owner = memory if memory.base is None else memory.base
    weakref.finalize(owner, _release, backend, unpin, os.getpid()).atexit = False
    return slot_arrays(fields, memory)


def _release(backend: Backend, unpin: Callable[[], None], pid: int) -> None:
    if pid == os.getpid():  # a forked child has no device
        backend.drain()  # a kernel may still read it
        unpin()


def _height_width_channels(images: torch.Tensor, axes: str) -> torch.Tensor:
    """Images as the file has them, (N, ...), seen as (N, H, W, C)."""
    if axes == "HW":
        return images.unsqueeze(-1)
    return images.permute(0, 2, 3, 1) if axes == "CHW" else images


def _in_order(rows: range | NDArray[np.int64], batch_rows: int) -> Iterator[PlannedBatch]:
    for step, first in enumerate(range(0, len(rows), batch_rows)):
        part = np.asarray(rows[first : first + batch_rows], np.int64)
        yield PlannedBatch(part, np.ones(len(part), np.bool_), len(part), step)


def _fill(store: RowStore, stream: Stream, backend: Backend, batch_rows: int) -> None:
    """Puts batches of `_in_order` where they belong; all of it is there when this returns."""
    names = [*store.fields, *(["images"] if store.images is not None else [])]

    def parts(batch: FilledBatch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        first, count = batch.planned.step * batch_rows, len(batch.planned.rows)  # the last may not fill its slot
        for name in names:
            yield store.tensor(name)[first : first + count], torch.from_numpy(batch.arrays[name][:count])

    def begin_copy(batch: FilledBatch, backend: Backend) -> DeviceBatch[FilledBatch]:
        for destination, source in parts(batch):
            backend.fill(destination, source)
        return DeviceBatch(batch, {})

    if store.place == "host":
        for batch in stream:
            for destination, source in parts(batch):
                destination.copy_(source)
            batch.release()
        return
    stage = to_device(stream, backend, slots_in_copy=SLOTS_IN_COPY, begin_copy=begin_copy)
    try:
        for _ in stage:
            pass
    finally:
        if isinstance(stage, Generator):
            stage.close()  # waits for the copies that still run
