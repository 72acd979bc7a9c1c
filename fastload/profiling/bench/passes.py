"""Timed passes over a loader's batches, and two ways of doing something compared in interleaved pairs.

Pairs run in turn (A B, B A, A B, ...), so that a machine that slows down or speeds up affects both. Each pair gives one
ratio; reported are the median, lowest, highest and number of the ratios.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.profiling.meter import sampler
from fastload.profiling.meter.sampler import OthersCpus

Show = Callable[[Mapping[str, str | float]], None]
"""Called with the current figures, by name."""


def counting(show: Show, part: str, total: int) -> Callable[[], None]:
    """Returns a function to call after each of `total` things, which shows how much of a part is done."""
    done = itertools.count(1)
    return lambda: show({"part": f"{part}, {next(done)} of {total}"})


@dataclass(frozen=True)
class TimedPass:
    """One timed pass."""

    samples: int  # received after the clock was started
    seconds: float  # from there to the end of the pass
    cpu_s: float  # CPU seconds of this process and its children meanwhile

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0


def repeat_epochs(loader: Iterable[Any], *, epochs: int | None = None) -> Iterator[Any]:
    """Yields a loader's batches, epoch after epoch, without end if `epochs` is None."""
    for _ in itertools.count() if epochs is None else range(epochs):
        yield from loader


def run_for(
    batches: Iterable[Any],
    seconds: float,
    work: Callable[[Any], int],
    *,
    discard: int = 1,
    synchronize: Callable[[], object] = lambda: None,
    enough: Callable[[int, int, float], bool] = lambda batches, samples, taken_s: batches >= 2,
) -> TimedPass:
    """Takes batches for some seconds and returns what that cost.

    The clock starts after the first `discard` batches, so start-up does not count, and after `synchronize`, which waits
    until the device has finished; it is called again before the clock is read.

    Args:
        work: called with each batch; returns its number of samples.
        enough: whether the pass may end, by its batches, samples and seconds; it then ends as soon as the time is over.
    """
    iterator = iter(batches)
    for _ in range(discard):
        batch = next(iterator, None)
        if batch is not None:
            work(batch)
            del batch  # so that the loader can reuse its memory
    synchronize()
    cpu_s, begun_s = cpu_seconds(), time.perf_counter()
    samples = 0
    for count, batch in enumerate(iterator, 1):
        samples += work(batch)
        del batch
        taken_s = time.perf_counter() - begun_s
        if taken_s >= seconds and enough(count, samples, taken_s):
            break
    synchronize()
    return TimedPass(samples, time.perf_counter() - begun_s, cpu_seconds() - cpu_s)


def cpu_seconds() -> float:
    """Returns the CPU seconds used so far by this process and by its children that are alive."""
    children = sampler.family_of(os.getpid())[1:]
    return time.process_time() + sum(sampler.cpu_seconds(children).values())


def touch(pixels: NDArray[Any]) -> int:
    """Reads one byte of each memory page (4 KiB) of a C-contiguous array, in memory order: 0.06 ms for 30 MB."""
    return int(pixels.reshape(-1).view(np.uint8)[::4096].max())


def touch_batch(batch: Any) -> int:
    """Reads one byte of each memory page of a batch's first field, its images; returns the number of samples."""
    images = batch[0]
    if images.device.type == "cpu":
        # Not torch's permute: it releases the GIL, and waits 5 ms to get it back while another thread runs Python.
        array = images.numpy()
        touch(array if array.flags.c_contiguous else array.transpose(0, 2, 3, 1))
    return len(images)


Way = Callable[[], float]
"""Runs once and returns a rate; higher is better."""

Spread = dict[str, float]
"""`median`, `lowest`, `highest` and `count` of a figure; `others_cpus`, as `OthersCpus` measures it, where known."""


def spread(values: Sequence[float], others: OthersCpus | None = None) -> Spread:
    found: Spread = {
        "median": statistics.median(values), "lowest": min(values), "highest": max(values), "count": len(values)
    }  # fmt: skip
    cpus = None if others is None else others.cpus
    return found if cpus is None else {**found, "others_cpus": cpus}


def repeated(way: Way, count: int) -> Spread:
    """Runs a way so many times; returns the spread of its results."""
    others, found = OthersCpus(), list[float]()
    for _ in range(count):
        with others.measured():
            found.append(way())
    return spread(found, others)


def compare(way: Way, base: Way, *, pairs: int, warm_up: int = 1) -> dict[str, Spread]:
    """Runs both ways in interleaved pairs; returns spreads of their rates, `way` and `base`, and of their `ratio`s."""
    for _ in range(warm_up):
        base()
        way()
    rates: dict[str, list[float]] = {"way": [], "base": []}
    others = {name: OthersCpus() for name in ("way", "base", "ratio")}
    for turn in range(pairs):
        for name, run in (("way", way), ("base", base))[:: -1 if turn % 2 else 1]:
            with others["ratio"].measured(), others[name].measured():
                rates[name].append(run())
    rates["ratio"] = [a / b for a, b in zip(rates["way"], rates["base"], strict=True)]
    return {name: spread(values, others[name]) for name, values in rates.items()}
