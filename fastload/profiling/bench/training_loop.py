"""Measures a training loop with a `Meter`: how long its steps wait, and how busy the accelerator is."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch

from fastload.profiling.bench.passes import Show, Spread, compare, counting, repeat_epochs, run_for
from fastload.profiling.bench.steps import TrainingStep
from fastload.profiling.bench.subject import Subject
from fastload.profiling.meter import Meter
from fastload.profiling.meter.sampler import OthersCpus
from fastload.profiling.verdict import judge
from fastload.timing.results import Measured

UTILIZATION_SIMULATED = "part of the time that the simulated accelerator was at work"
UTILIZATION_NVML = "NVML's duty cycle: part of the time in which any kernel ran, however small"

_SHOW_EVERY_S = 0.2


@dataclass(frozen=True)
class LoopFigures:
    """Figures of a training loop."""

    step: str  # name of the training step
    samples_per_s: float  # from the first batch received to the end of the last step
    stall_share: float  # share of the time that steps waited for data, 0 to 1, as in the verdict
    longest_wait_s: float  # for one batch
    utilization: float | None  # of the accelerator, 0 to 1; None: not known
    utilization_is: str  # how `utilization` is defined
    others_cpus: float | None  # CPUs that other programs used meanwhile; None: not known
    measured: Measured  # everything else, for reports


def run_loop(
    loader: Any,
    step: TrainingStep,
    seconds: float,
    *,
    title: str,
    epochs: int | None = None,
    part: str = "",
    show: Show = lambda figures: None,
    alone_samples_per_s: float | None = None,
) -> LoopFigures:
    """Trains on a loader's batches for some seconds, epoch after epoch, at most `epochs` of them.

    The clock starts when the first batch is there. `title` is the reports' title; `show` gets the current
    rates, not too often, under the name `part`; `alone_samples_per_s` is the rate of the step on one
    cached batch, if that was measured in turn with such a loop.
    """
    begin, shown_s, others = 0.0, 0.0, OthersCpus()
    with others.measured(), Meter(device=step.device) as meter:
        for batch in repeat_epochs(meter.watch(loader), epochs=epochs):
            if not begin:
                step.begin()
                begin = time.perf_counter()
                meter.restart()
            step(batch)
            del batch  # so that the loader can reuse its memory
            now = time.perf_counter()
            if now - shown_s >= _SHOW_EVERY_S:
                shown_s, totals = now, meter.totals
                rate = totals.samples / totals.duration_s if totals.duration_s else 0.0
                passed = f"{part}, {min(1.0, (now - begin) / seconds):.0%}"
                show({"part": passed, "images/s": rate, "stall share": f"{totals.stall_share:.1%}"})
            if now - begin >= seconds:
                break
        step.finish()
    demands = replace(meter.demands(loader), others_cpus=others.cpus or 0.0)
    if alone_samples_per_s:
        samples = statistics.fmean(one.samples for one in demands.steps)
        demands = replace(demands, alone_s=samples / alone_samples_per_s)
    verdict = judge(demands)
    measured = meter.measured(title, loader=loader, verdict=verdict)
    begun_s = measured.epochs_s[0]
    measured = replace(
        measured,
        headspace_samples_per_s=alone_samples_per_s,
        headspace_how=HOW_IN_TURN if alone_samples_per_s else "",
        steps=tuple(replace(one, begin_s=one.begin_s - begun_s) for one in measured.steps),
        epochs_s=tuple(at_s - begun_s for at_s in measured.epochs_s),
        readings=tuple({**one, "at_s": one["at_s"] - begun_s} for one in measured.readings if one["at_s"] >= begun_s),
    )
    busy, busy_is = step.utilization, UTILIZATION_SIMULATED
    if busy is None:
        readings = (reading.items() for reading in measured.readings)
        percents = [value for one in readings for name, value in one if name.endswith(".utilization_percent")]
        busy, busy_is = (statistics.fmean(percents) / 100, UTILIZATION_NVML) if percents else (None, "")
    return LoopFigures(
        step=step.name,
        samples_per_s=measured.samples_per_s,
        stall_share=verdict.stall_share,
        longest_wait_s=max(one.wait_s for one in measured.steps),
        utilization=busy,
        utilization_is=busy_is,
        others_cpus=others.cpus,
        measured=measured,
    )


PAIRS = 3
HOW_IN_TURN = "measured on one cached batch, in turn with the loop"


def headspace_in_turn(subject: Subject, step: TrainingStep, show: Show) -> dict[str, Spread]:
    """Measures the step on one cached batch, in turn with the loop that loads its batches, for `options.seconds`.

    Returns spreads: `way`, images/s of the loop; `base`, of the same step on a cached batch, an upper bound for any
    loader; `ratio` of each pair.
    """
    seconds = subject.options.seconds / (2 * PAIRS)
    tick = counting(show, "headspace", 2 * PAIRS)

    def loop() -> float:
        rate = subject.run(seconds, step, finish=step.finish).samples_per_s
        tick()
        return rate

    def cached_steps() -> float:
        rate = run_for(repeat(cached), seconds, step, synchronize=step.finish).samples_per_s
        tick()
        return rate

    cached = [field.clone(memory_format=torch.preserve_format) for field in next(iter(subject.shared_loader()))]
    if subject.options.cold:
        subject.close()
    step.begin()
    return compare(loop, cached_steps, pairs=PAIRS, warm_up=0)
