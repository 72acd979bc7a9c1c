"""Measures the loader alone: its rate, CPU time and memory, and its rate relative to a bare copy of the same rows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.format.header import PackedFile
from fastload.profiling.bench.passes import Show, Spread, compare, counting, repeated, run_for, spread, touch_batch
from fastload.profiling.bench.subject import Subject
from fastload.profiling.meter.sampler import peak_memory, process_memory

PAIRS = 5
FIRST_BATCHES = 5

_MOST_BATCHES = 2000  # whose rows the copy with np.take gets, again and again


@dataclass(frozen=True)
class AloneFigures:
    """Figures of a loader whose batches are only read, one byte of each memory page."""

    samples_per_s: Spread  # rate of each pass
    bytes_per_s: float  # bytes read, at the median rate
    cpu_s_per_1000: float  # CPU seconds of all threads and processes for 1,000 images
    first_batch_s: Spread  # seconds from opening the file to the first batch, without imports
    peak_memory_bytes: int  # anonymous and shared memory of this process and its children, Python and torch included
    loader_memory_bytes: int  # the part of `peak_memory_bytes` that was not there before the loader
    # Rate of a bare copy of the same rows, in turn with the loader; None: not possible
    take_samples_per_s: Spread | None = None
    over_take: Spread | None = None  # rate of the loader divided by the copy's, for each pair
    why_no_take: str = ""  # why there is no bare copy


def measure_alone(subject: Subject, show: Show) -> AloneFigures:
    """Measures the loader alone for `options.seconds`; half of that time goes to the bare copy."""
    cold, file, names = subject.options.cold, subject.dataset.file, subject.dataset.fields
    why_no_take = ""
    if any(name in file.ragged for name in names):
        why_no_take = "its images differ in size or are kept encoded"
    elif file.remote is not None:
        why_no_take = "its rows come chunk by chunk over the network"
    elif len(file.shards.names) > 1:
        why_no_take = "its rows lie in several shards"
    elif any(file.fields[name].offset is None for name in names):
        why_no_take = "its rows are compressed or cut into chunks that do not lie back to back"
    # A cold pass reads each row only once: three passes say as much about a disk as six.
    pairs, warm_up = 3 if cold else PAIRS, 0 if cold or why_no_take else 1
    tick = counting(show, "the loader alone", 2 + warm_up + pairs)
    seconds = subject.options.seconds / (pairs * (1 if why_no_take else 2) + 1)
    before = process_memory(os.getpid())
    subject.first_batch()  # includes imports
    first = repeated(subject.first_batch, FIRST_BATCHES)
    tick()
    subject.make_cold()
    with peak_memory(os.getpid()) as peak:
        rows = subject.rows(_MOST_BATCHES, seconds)
    tick()
    costs = []

    def loader() -> float:
        found = subject.run(seconds, touch_batch)
        costs.append(found.cpu_s / found.samples * 1000)
        tick()
        return found.samples_per_s

    warm = None if why_no_take or cold else BareTake(file, names, subject.batch_size)

    def take() -> float:
        subject.make_cold()
        batches = (warm or BareTake(file, names, subject.batch_size)).fill(rows if cold else cycle(rows))
        return run_for(batches, seconds, len, discard=int(len(rows) > 1)).samples_per_s

    if why_no_take:
        result = {"way": repeated(loader, pairs)}
    else:
        result = compare(loader, take, pairs=pairs, warm_up=warm_up)
    row_bytes = sum(file.fields[name].row_bytes for name in names)
    return AloneFigures(
        samples_per_s=result["way"],
        bytes_per_s=result["way"]["median"] * row_bytes,
        cpu_s_per_1000=spread(costs)["median"],
        first_batch_s=first,
        peak_memory_bytes=peak[0],
        loader_memory_bytes=max(0, peak[0] - before),
        take_samples_per_s=result.get("base"),
        over_take=result.get("ratio"),
        why_no_take=why_no_take,
    )


class BareTake:
    """Copies rows with `np.take` from a memory-mapped file, in one thread: the least a loader has to do.

    The fields are contiguous arrays in the file. `slots` batches' worth of memory are allocated once and used in turn;
    a `FastLoader` with two threads has 5.
    """

    def __init__(self, file: PackedFile, names: Sequence[str], batch_size: int, slots: int = 5) -> None:
        self.num_slots = slots
        self._fields: list[tuple[NDArray[Any], NDArray[Any]]] = []
        for name in names:
            field = file.fields[name]
            assert field.offset is not None, "a field that is not one linear array cannot be mapped"
            mapped = np.memmap(file.path, field.dtype, "r", field.offset, (file.num_rows, *field.shape))
            self._fields.append((mapped, np.zeros((slots, batch_size, *field.shape), field.dtype)))

    def fill(self, batches: Iterable[NDArray[np.int64]]) -> Iterator[NDArray[Any]]:
        """Yields the first field of each batch; its memory is overwritten `slots` batches later."""
        for number, rows in enumerate(batches):
            filled = []
            for mapped, slots in self._fields:
                out = slots[number % self.num_slots, : len(rows)]
                np.take(mapped, rows, axis=0, out=out, mode="clip")
                filled.append(out)
            yield filled[0]
