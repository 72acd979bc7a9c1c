"""Rows of a file in memory: of the device, or pinned memory of the host, from which every epoch is gathered.

`choose_cache` decides whether and where rows are cached, by the free memory, and `load_cache` (`producer.py`) reads
them. "device" caches all rows where they fit; with several ranks, where they do not, each rank's fixed share. "host"
caches all rows. "auto" takes the first of device, host and nowhere that has ample room, always for all rows, so that it
never changes the order.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.dataset import PackedDataset
from fastload.device import Backend, Pins, moved_as_stored
from fastload.distributed.consensus import least_of_all_ranks
from fastload.distributed.ranks import Nodes, Share, local_world_size
from fastload.errors import CacheError, OptionError, level_of_the_user
from fastload.plan import EpochPlan, rank_share
from fastload.plan.randomness import batchmate_reuse
from fastload.prefetch.inputs import Input
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


CacheOption = Literal["device", "host", "auto"] | None

# One part in so many of the memory stays free for batches, torch and the system, also where a cache is asked for.
_KEPT_FREE = 10
# "auto" is decided before the model is on the device, and nobody knows how much its weights, gradients, optimizer state
# and activations will take: half of the free memory is left to them, and half of the host's to the page cache and
# other processes.
_AUTO_PART = 2
# Rows of the batches whose mates are looked up in the next epoch, in half a second.
_MOST_COMPARED = 2**20

_log = logging.getLogger("fastload")


class CacheChoice(NamedTuple):
    """The place where a loader's rows are cached."""

    location: Location | None = None  # None: nowhere
    fixed_shares: bool = False  # whether each rank caches only its share, a fixed piece of the rows; see `EpochPlan`


def choose_cache(cache: object, data: Input, backend: Backend | None, share: Share) -> CacheChoice:
    """Returns where the rows are cached.

    Every rank comes to the same fixed shares: by the least room of all when there is a process group, else by the
    size of the device's memory, which they are assumed to have in common.

    Raises:
        OptionError: the option is invalid, or there is nothing that could be cached.
        CacheError: the rows do not fit.
        ShareError: the ranks could not agree.
    """
    if cache not in ("device", "host", "auto", None):
        raise OptionError(f'cache={cache!r} is not known; choose "device", "host", "auto" or None')
    if cache is None:
        return CacheChoice()
    packed = data.packed
    if backend is None or packed is None:
        if packed is not None:
            why_none = "batches stay on the CPU, where the kernel keeps the pages of files"
            refusal = (
                "rows are cached for a CUDA device; device is None or the CPU. Give device='cuda', or leave cache out: "
                "the kernel keeps the pages of a packed file in memory while there is room."
            )
        else:
            why_none = f"{data.name} runs Python code for each sample"
            refusal = (
                f"{why_none}, and only rows of a file can be cached. `fastload pack` the samples, and give the "
                f"transform to FastLoader, or leave cache out."
            )
        if cache == "auto":
            _log.info('cache="auto": None, since %s', why_none)
            return CacheChoice()
        raise OptionError(f"cache={cache!r}: {refusal}")
    # A share of a selection may repeat rows, which are cached once; it is counted as if it did not.
    num_rows = len(packed.rows_in_file(data.plan_rows))
    longest = len(rank_share(len(data.plan_rows), rank=0, world_size=share.world_size))
    whole, part = (sum(field.nbytes for field in cached_fields(packed.dataset, rows)) for rows in (num_rows, longest))
    rows = f"{num_rows:,} rows of {data.name}"
    if cache == "device":
        return CacheChoice("device", _must_share(rows, whole, min(whole, part), backend, share))
    available, ranks = available_memory(), local_world_size()
    if cache == "auto":
        return CacheChoice(_auto(rows, whole, backend.memory().free, available, ranks))
    # In each process on this machine.
    room = available - available // _KEPT_FREE
    if whole * ranks > room:
        copies = f", in each of {ranks} processes on this machine" if ranks > 1 else ""
        raise CacheError(
            f'cache="host": larger than memory: {rows} are {whole:,} bytes{copies}; {available:,} bytes of the '
            f"host's memory are available, of which a tenth is left alone: {whole * ranks - room:,} bytes are missing. "
            f"Leave cache out (batches are then read from the file), or choose a split or fewer fields."
        )
    return CacheChoice("host")


def _auto(rows: str, whole: int, free: int, available: int, ranks: int) -> Location | None:
    """Returns the first location with ample room, by the free memory of the device and the host; logs why."""
    device_room, host_room = free // _AUTO_PART, available // _AUTO_PART // ranks
    location: Location | None = None
    if whole <= device_room:
        location, why = "device", "fit in half of the device's free memory; the other half is for the model"
    elif whole <= host_room:
        location, why = "host", "do not fit in half of the device's free memory, and fit in half of the host's"
    else:
        why = "fit neither in half of the device's free memory nor in half of the host's"
    named = f'"{location}"' if location else None
    _log.info(
        f'cache="auto": {named}, since {rows}, {whole:,} bytes, {why} (free on the device: {free:,}, on '
        f"the host: {available:,} bytes for {ranks} ranks)"
    )
    return location


def _must_share(rows: str, whole: int, part: int, backend: Backend, share: Share) -> bool:
    """Whether each rank can cache its share only, `part` of the `whole` bytes; CacheError if not even that fits."""
    memory, several = backend.memory(), share.world_size > 1
    left_alone = memory.total // _KEPT_FREE
    here = memory.free - left_alone
    agreed = least_of_all_ranks(here, share, what="how much memory its device has for cache='device'")
    # Without a process group, ranks decide alike by the size that they all know.
    room = agreed if agreed is not None else memory.total - left_alone if several else here
    fixed = several and whole > room
    wanted = part if fixed else whole
    missing = wanted - min(room, here)
    if missing > 0:
        of_rank = f", the share of one of {share.world_size} ranks {part:,}" if several else ""
        least = hint = ""
        if wanted <= room:
            hint = (
                "No process group could be asked, so that ranks decide by the device's size and not by what is free: "
                "initialize torch.distributed before making the loader. "
            )
        elif agreed is not None:
            least = f"; the rank that has least has room for {agreed:,}"
        raise CacheError(
            f'cache="device": larger than memory: {rows} are {whole:,} bytes{of_rank}. Of '
            f"{memory.total:,} bytes of device memory {memory.free:,} are free, of which {left_alone:,} "
            f'are left for batches{least}: {missing:,} bytes are missing. {hint}Give cache="host" or "auto", or '
            f"choose a split, fewer fields or more ranks."
        )
    if several:
        asked = agreed is not None
        by = "the least of all ranks" if asked else "by the device's size: there is no process group to ask"
        _log.info(
            f'cache="device": each of {share.world_size} ranks keeps '
            f"{'its share of the' if fixed else 'all'} {rows}: {wanted:,} of {whole:,} bytes, for which there is room "
            f"in {room:,} bytes, {by}"
        )
    return fixed


def warn_of_fixed_pieces(plan: EpochPlan, share: Share, nodes: Nodes | None, *, file_shuffled: bool) -> None:
    """Warns, on rank 0, of the effect of fixed pieces on the order: shares in a cache, or else the rows of nodes."""
    if not plan.fixed_pieces or plan.shuffle is False or share.rank != 0:
        return
    if nodes is None:
        why = (
            f'cache="device": the rows do not fit on one device, so each of {plan.world_size} ranks keeps one piece of '
            f"the file in all epochs and each epoch permutes within the pieces."
        )
        instead = 'cache="host" or None keep the order.'
    else:
        why = (
            f'share="node": each of {nodes.number} nodes, of {nodes.ranks_per_node} ranks, reads one piece of the file '
            f"in all epochs, and each epoch permutes within the pieces."
        )
        instead = 'share="auto" mixes rows of all nodes.'
    figure = ""
    again, full = _mates_again(plan), (plan.batch_size - 1) / max(1, len(plan.rows) - 1)
    if again is not None and full:
        figure = (
            f" Of the pairs of samples in a batch of a rank, {again:.2%} meet again in the next epoch; under full "
            f"shuffle of all rows {full:.2%}, so {again / full:.1f} times as many, and without fixed pieces "
            f"{(_mates_again(replace(plan, fixed_pieces=0)) or 0) / full:.1f} times."
        )
    unmixed = "" if file_shuffled else " The file's rows were not shuffled when packed, so that pieces may differ much."
    warnings.warn(
        f"{why}{figure} A batch over all ranks is a stratified sample, as many rows of each piece.{unmixed} {instead}",
        stacklevel=level_of_the_user(),
    )


def _mates_again(plan: EpochPlan) -> float | None:
    """Returns `mates_again` of rank 0's batches, of the first million rows of them; None without any."""
    following, batches = plan.following, len(rank_share(len(plan.rows), rank=0, world_size=plan.world_size))
    batches = min(batches, _MOST_COMPARED) // plan.batch_size
    if following is None or plan.batch_size < 2 or not batches:
        return None
    if plan.groups is not None and len(plan.rows) > _MOST_COMPARED:
        return None  # a row's place takes sorting its block, and these rows lie in all of them
    rows = plan.rows_at(0, np.arange(batches * plan.batch_size))
    ranks, steps = following.places_of(rows)
    # As positions in a sequence of all batches: first rank 0's, then rank 1's, and so on.
    positions = (ranks * (int(steps.max()) + 1) + steps) * plan.batch_size
    return batchmate_reuse(positions.reshape(batches, plan.batch_size), plan.batch_size)
