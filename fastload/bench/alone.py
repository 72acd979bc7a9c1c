"""The loader alone: how fast, at what cost, and beside the bare copy of the same rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

from fastload.bench.bare import BareTake, can_be_bare
from fastload.bench.passes import run_for, touched
from fastload.bench.peak import peak_memory
from fastload.bench.subject import Subject
from fastload.meter.family import process_memory
from fastload.pairs import Spread, compare, spread

PAIRS = 5
FIRST_BATCHES = 5

_MOST_ROWS = 2000  # batches whose rows the bare copy gets; then from the beginning


@dataclass(frozen=True)
class AloneFigures:
    """What a loader gives when nothing else is done with its batches than to look at each page of them.

    Attributes:
        samples_per_s: of each pass.
        bytes_per_s: read, at the median rate.
        cpu_s_per_1000: seconds on a CPU, of all threads and processes, for 1,000 images.
        first_batch_s: from nothing to the first batch, imports done.
        peak_memory_bytes: anonymous and shared, of this process and its children, Python and torch included.
        loader_memory_bytes: of these, what came with the loader.
        take_samples_per_s: of the bare copy of the same rows, in turn with the loader; None: there is none.
        over_take: the loader's rate over the bare copy's, pair by pair.
        why_no_take: why there is none.
    """

    samples_per_s: Spread
    bytes_per_s: float
    cpu_s_per_1000: float
    first_batch_s: Spread
    peak_memory_bytes: int
    loader_memory_bytes: int
    take_samples_per_s: Spread | None = None
    over_take: Spread | None = None
    why_no_take: str = ""


def measure_alone(subject: Subject, *, told: Callable[[int, int], None] = lambda done, total: None) -> AloneFigures:
    """Measures the loader by itself for `seconds` of the options, half of them the bare copy.

    Args:
        told: how many parts are done, of how many.
    """
    cold = subject.options.cold
    bare = can_be_bare(subject.dataset.file, subject.dataset.fields)
    # Cold, the rows of a pass are read once only; half a dozen passes tell no more about a disk than three.
    pairs = 3 if cold else PAIRS
    total = 2 + pairs
    seconds = subject.options.seconds / (pairs * (2 if bare else 1) + 1)
    before = process_memory(os.getpid())
    first = [subject.first_batch() for _ in range(1 + FIRST_BATCHES)][1:]  # the first one imports
    told(1, total)
    subject.make_cold()
    with peak_memory(os.getpid()) as peak:
        rows = subject.rows(_MOST_ROWS, seconds)
    told(2, total)
    costs = []
    done = 2

    def loader() -> float:
        nonlocal done
        found = subject.run(seconds, touched)
        costs.append(found.cpu_s / found.samples * 1000)
        done += 1
        told(done, total)
        return found.samples_per_s

    ring = BareTake(subject.dataset.file, subject.dataset.fields, subject.batch_size) if bare and not cold else None

    def take() -> float:
        subject.make_cold()
        copy = ring or BareTake(subject.dataset.file, subject.dataset.fields, subject.batch_size)
        batches = copy.fill(rows if cold else cycle(rows))
        return run_for(batches, seconds, len, discard=subject.discard).samples_per_s

    if bare:
        result = compare(loader, take, pairs=pairs, warm_up=0 if cold else 1)
        rates = result["way"]
    else:
        result, rates = {}, spread([loader() for _ in range(pairs)])
    return AloneFigures(
        samples_per_s=rates,
        bytes_per_s=rates["median"] * subject.sample_bytes,
        cpu_s_per_1000=spread(costs)["median"],
        first_batch_s=spread(first),
        peak_memory_bytes=peak[0],
        loader_memory_bytes=max(0, peak[0] - before),
        take_samples_per_s=result.get("base"),
        over_take=result.get("ratio"),
        why_no_take="" if bare else _why_not_bare(subject),
    )


def _why_not_bare(subject: Subject) -> str:
    fields = subject.dataset.file.fields
    if any(fields[name].store is not None for name in subject.dataset.fields):
        return "its images differ in size or are kept encoded"
    return "its rows are compressed or cut into chunks that do not lie back to back"
