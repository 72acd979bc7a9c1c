"""Measures a training loop with a `Meter`: how long its steps wait, and how busy the accelerator is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch

from fastload.profiling.bench.passes import Spread, compare, repeat_epochs, run_for
from fastload.profiling.bench.steps import TrainingStep
from fastload.profiling.bench.subject import Subject
from fastload.profiling.meter import Meter
from fastload.timing.results import Measured

UTILIZATION_SIMULATED = "part of the time that the simulated accelerator was at work"
UTILIZATION_NVML = "NVML's duty cycle: part of the time in which any kernel ran, however small"

OnStep = Callable[[Meter, float], None]
"""Called after each step with the meter and the share of the time that has passed, 0 to 1."""


@dataclass(frozen=True)
class LoopFigures:
    """Figures of a training loop.

    Attributes:
        step: name of the training step.
        samples_per_s: from the first batch received to the end of the last step.
        stall_share: share of the time that steps waited for data, 0 to 1.
        longest_wait_s: for one batch, after the first.
        utilization: of the accelerator, 0 to 1; None: not known.
        utilization_is: how `utilization` is defined.
        measured: everything else, for reports.
    """

    step: str
    samples_per_s: float
    stall_share: float
    longest_wait_s: float
    utilization: float | None
    utilization_is: str
    measured: Measured


def run_loop(
    loader: Any,
    step: TrainingStep,
    seconds: float,
    *,
    title: str,
    command: str = "",
    epochs: int | None = None,
    on_progress: OnStep = lambda meter, part: None,
) -> LoopFigures:
    """Trains on a loader's batches for some seconds, epoch after epoch.

    Args:
        epochs: largest number of epochs; None: no limit.
        title, command: of the measurement, for reports.
        on_progress: called after each step.
    """
    with Meter(device=step.device) as meter:
        samples, begin = _train(meter, meter.watch(loader), step, seconds, epochs, on_progress)
        elapsed_s = time.perf_counter() - begin
    measured = meter.measured(title, loader=loader, command=command)
    totals = meter.totals
    first = measured.steps[0].wait_s if measured.steps else 0.0
    # The wait for the very first batch is start-up, which is reported on its own.
    stall_share = (totals.wait_s - first) / max(totals.duration_s - first, 1e-9)
    busy, busy_is = step.utilization, UTILIZATION_SIMULATED
    if busy is None:
        busy, busy_is = nvml_utilization(measured)
    return LoopFigures(
        step=step.name,
        samples_per_s=samples / elapsed_s if elapsed_s else 0.0,
        stall_share=min(1.0, max(0.0, stall_share)),
        longest_wait_s=max((one.wait_s for one in measured.steps[1:]), default=0.0),
        utilization=busy,
        utilization_is=busy_is if busy is not None else "",
        measured=measured,
    )


def _train(
    meter: Meter, watched: Iterable[Any], step: TrainingStep, seconds: float, epochs: int | None, on_progress: OnStep
) -> tuple[int, float]:
    samples, begin = 0, 0.0
    for batch in repeat_epochs(watched, epochs=epochs):  # type: ignore[arg-type]  # it has a length where its loader has
        if not begin:
            step.begin()
            begin = time.perf_counter()
        samples += step(batch)
        del batch  # so that the loader can reuse its memory
        passed = time.perf_counter() - begin
        on_progress(meter, min(1.0, passed / seconds))
        if passed >= seconds:
            break
    step.finish()
    return samples, begin


def nvml_utilization(measured: Measured) -> tuple[float | None, str]:
    """Returns NVML's utilization, mean over the GPUs in use, 0 to 1, and its definition; (None, "") if unknown."""
    values = [
        value
        for reading in measured.readings
        for name, value in reading.items()
        if name.endswith(".utilization_percent")
    ]
    return (statistics.fmean(values) / 100, UTILIZATION_NVML) if values else (None, "")


PAIRS = 3
HOW_IN_TURN = "measured on one cached batch, in turn with the loop"


def headspace_in_turn(
    subject: Subject, step: TrainingStep, *, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Spread]:
    """Measures the step on one cached batch, in turn with the loop that loads its batches, for `options.seconds`.

    Returns:
        `way`: images/s of the loop; `base`: of the same step on a cached batch, an upper bound for any loader; `ratio`:
            of each pair.
    """
    cold = subject.options.cold
    seconds = subject.options.seconds / (2 * PAIRS)
    done = 0

    def turn(way: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            nonlocal done
            rate = way()
            done += 1
            on_progress(done, 2 * PAIRS)
            return rate

        return run

    def loop() -> float:
        subject.make_cold()
        batches = subject.batches(subject.shared_loader())
        return run_for(batches, seconds, step, discard=subject.discard, synchronize=step.finish).samples_per_s

    def cached_steps() -> float:
        return run_for(repeat(cached), seconds, step, synchronize=step.finish).samples_per_s

    cached = [field.clone(memory_format=torch.preserve_format) for field in next(iter(subject.shared_loader()))]
    if cold:
        subject.close()
    step.begin()
    return compare(turn(loop), turn(cached_steps), pairs=PAIRS, warm_up=0)
