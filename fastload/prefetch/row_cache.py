"""Rows of a file in memory: of the device, or pinned memory of the host, from which every epoch is gathered.

`cache_choice.py` decides whether and where rows are cached; `load_cache` in `recipe.py` reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.dataset import PackedDataset
from fastload.device import Backend, Pins, moved_as_stored
from fastload.errors import CacheError
from fastload.prefetch.loader_plan import Location
from fastload.prefetch.ring import SlotField, allocate_aligned, slot_arrays, slot_bytes
from fastload.read.reader import image_axes
from fastload.system.machine import available_memory
from fastload.transforms.engine import gpu
from fastload.transforms.engine.placement import ImageRows

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


def cached_fields(dataset: PackedDataset, num_rows: int) -> list[SlotField]:
    """Returns the arrays of a cache of so many of a dataset's rows: fields as in the file, class labels as int64."""
    fields = []
    for name, shape, dtype in dataset.layout():
        is_class = name == "labels" and not shape and dtype.kind in "iu"
        fields.append(SlotField(name, (num_rows, *shape), np.dtype(np.int64) if is_class else dtype))
    return fields


def empty_cache(
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
