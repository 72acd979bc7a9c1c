"""The clock that times a device's steps, and the time of a step that needs no loader."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable
from typing import Any

from fastload.errors import OptionError
from fastload.profiling.meter.loops import num_samples
from fastload.timing.clocks import Clock, CudaClock, HostClock


def open_clock(device: Any) -> Clock:
    """Returns the clock for a device; None: CUDA's if this process has used CUDA, else the host's.

    Raises:
        OptionError: not a device, or one that cannot be timed.
    """
    if isinstance(device, Clock):
        return device
    torch: Any = sys.modules.get("torch")
    if device is None:
        return CudaClock() if torch is not None and torch.cuda.is_initialized() else HostClock()
    kind, _, number = str(device).partition(":")
    if kind == "cpu":
        return HostClock()
    if kind != "cuda" or not (number.isdigit() or not number):
        raise OptionError(
            f"device={str(device)!r}: a Meter times the CPU or CUDA. Give None, 'cpu', 'cuda' or 'cuda:1'; for other "
            f"devices give 'cpu' if the loop waits for each step, as loss.item() does."
        )
    import torch as torch_module

    if not torch_module.cuda.is_available() or int(number or 0) >= torch_module.cuda.device_count():
        raise OptionError(
            f"device={str(device)!r}: there are {torch_module.cuda.device_count()} CUDA devices, counted from 0. "
            f"Leave out device=, and the Meter finds the one in use."
        )
    return CudaClock(int(number) if number else None)


HOW = "measured on one cached batch"


def measure_headspace(
    step: Callable[[Any], object], batch: Any, seconds: float = 1.0, *, device: Any = None, samples: int | None = None
) -> float:
    """Returns the samples per second of `step(batch)` on one batch that is ready: transformed, and on the device.

    This is an upper bound for what a better loader could gain. The step runs on the same batch again and again. The
    first run does not count; the result is from the median of the others, so that another process on the machine, or a
    compiler at work, changes it little. The step changes the model as it always does.

    Args:
        step: what the loop does with a batch.
        batch: as the loop gets it.
        seconds: approximate time to measure; at least 3 steps are run.
        device: what computes, as in `Meter`.
        samples: in the batch; None: the length of its first array.

    Raises:
        OptionError: `seconds` is not above 0, or the number of samples in the batch is not known.
    """
    if not seconds > 0:
        raise OptionError(f"seconds={seconds!r}: give a time above 0")
    count = num_samples(batch) if samples is None else samples
    if not count:
        raise OptionError("batch: it has no array or tensor that says how many samples there are. Give samples=.")
    step(batch)
    clock = open_clock(device)  # after a step: if that used CUDA, CUDA's clock is chosen
    marks = [clock.mark()]
    while len(marks) < 5 or clock.between_s(marks[0], marks[-2]) < seconds:
        step(batch)
        marks.append(clock.mark())
        clock.wait(marks[-2])  # as in a training loop, the host may be one step ahead of the device, but not more
    clock.wait(marks[-1])
    return count / statistics.median(itertools.starmap(clock.between_s, itertools.pairwise(marks)))
