"""A training loop under a `Meter`: what its steps waited for, and how busy the accelerator was."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from fastload.bench.passes import endless
from fastload.bench.steps import TrainingStep
from fastload.measured import Measured, Verdict
from fastload.meter import Meter
from fastload.verdict import judge

UTILIZATION_SIMULATED = "part of the time that the simulated accelerator was at work"
UTILIZATION_NVML = "NVML's duty cycle: part of the time in which any kernel ran, however small"

Told = Callable[[Meter, float], None]
"""Called after each step with the meter and the part of the time that is over, 0 to 1."""


@dataclass(frozen=True)
class LoopFigures:
    """What a training loop did.

    Attributes:
        step: what was done with a batch.
        samples_per_s: from the first batch in hand to the end of the last step.
        stall_share: part of the time that the step waited for data, 0 to 1.
        longest_wait_s: for one batch, after the first.
        utilization: of the accelerator, 0 to 1; None: there is none that tells.
        utilization_is: what that figure means.
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
    told: Told = lambda meter, part: None,
) -> LoopFigures:
    """Trains on a loader's batches for some seconds, epoch after epoch.

    Args:
        epochs: after which it ends in any case; None: never.
        title, command: of the measurement.
    """
    with Meter(device=step.device) as meter:
        samples, begin = _train(meter, meter.watch(loader), step, seconds, epochs, told)
        elapsed_s = time.perf_counter() - begin
    measured = meter.measured(title, loader=loader, command=command)
    totals = meter.totals
    first = measured.steps[0].wait_s if measured.steps else 0.0
    # Waiting for the very first batch is a figure of its own.
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
        measured=replace(measured, verdict=_verdict(meter, loader)),
    )


def _train(
    meter: Meter, watched: Iterable[Any], step: TrainingStep, seconds: float, epochs: int | None, told: Told
) -> tuple[int, float]:
    samples, begin = 0, 0.0
    for batch in endless(watched, epochs=epochs):  # type: ignore[arg-type]  # it has a length where its loader has
        if not begin:
            step.begin()
            begin = time.perf_counter()
        step(batch)
        samples += len(batch[0])
        del batch  # a loader may have its memory again
        passed = time.perf_counter() - begin
        told(meter, min(1.0, passed / seconds))
        if passed >= seconds:
            break
    step.finish()
    return samples, begin


def nvml_utilization(measured: Measured) -> tuple[float | None, str]:
    """Mean of the driver's figure over the GPUs that were used, 0 to 1; None where there is no driver."""
    values = [
        value
        for reading in measured.readings
        for name, value in reading.items()
        if name.endswith(".utilization_percent")
    ]
    return (statistics.fmean(values) / 100, UTILIZATION_NVML) if values else (None, "")


def _verdict(meter: Meter, loader: Any) -> Verdict | None:
    demands = meter.demands(loader)
    return judge(demands) if len(demands.steps) > 1 else None
