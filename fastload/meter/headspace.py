"""How fast the step is without a loader: what a better loader could at most win."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from fastload.errors import OptionError
from fastload.meter.clocks import open_clock
from fastload.meter.shapes import num_samples

HOW = "measured on one cached batch"


def measure_headspace(
    step: Callable[[Any], object], batch: Any, seconds: float = 1.0, *, device: Any = None, samples: int | None = None
) -> float:
    """Samples a second that `step(batch)` reaches when the batch is there already: transformed, on the device.

    The batch is given to the step again and again. A first step is not counted; the median of the others is taken, so
    that a neighbour on the machine, or a compiler at work, moves it little. The step changes the model as
    it always does.

    Args:
        step: what the loop does with a batch.
        batch: as the loop gets it.
        seconds: to spend, more or less; 3 steps are made in any case.
        device: what computes, as in `Meter`.
        samples: in the batch; None: the length of its first array.

    Raises:
        OptionError: `seconds` is not above 0, or the batch does not say how many samples it has.
    """
    if not seconds > 0:
        raise OptionError(f"seconds={seconds!r}: give a time above 0")
    count = num_samples(batch) if samples is None else samples
    if not count:
        raise OptionError("batch: it has no array or tensor that says how many samples there are. Give samples=.")
    step(batch)
    clock = open_clock(device)  # after a step: what it computes on is known now
    marks = [clock.mark()]
    clock.settle(marks[0])
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        step(batch)
        marks.append(clock.mark())
        # One step may run ahead of the device, as in a loop; the host must not run away from it.
        if len(marks) > 2:
            times.append(_between(clock, marks))
    times.append(_between(clock, marks))
    return count / statistics.median(times)


def _between(clock: Any, marks: list[Any]) -> float:
    clock.settle(marks[1])
    taken: float = clock.between_s(marks[0], marks[1])
    clock.drop(marks.pop(0))
    return taken
