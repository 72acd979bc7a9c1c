"""Clocks that time a step, the host's or CUDA events, and the time of a step that needs no loader."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from fastload.errors import OptionError
from fastload.profiling.meter.loops import num_samples


@runtime_checkable
class Clock(Protocol):
    """Marks on a time line, made by one thread. The time between two marks is known once the later one is done.

    A clock whose marks are times can inherit all but `mark`.
    """

    def mark(self) -> Any:
        """Returns a mark after everything done so far."""
        ...

    def is_done(self, mark: Any) -> bool:
        """Whether everything before the mark is done; does not wait."""
        return True

    def wait(self, mark: Any) -> None:
        """Waits until everything before the mark is done."""
        return None

    def between_s(self, earlier: Any, later: Any) -> float:
        """Returns the seconds between two marks that are done."""
        seconds: float = later - earlier
        return seconds

    def drop(self, mark: Any) -> None:
        """Gives a mark back that is no longer needed."""
        return None


class HostClock(Clock):
    """The host's clock: a mark is a time."""

    mark = staticmethod(time.perf_counter)


class CudaClock(Clock):
    """CUDA events on the current stream of a device: they time the device, not the host, which runs ahead of it.

    Args:
        index: of the device; None: the current one.
    """

    def __init__(self, index: int | None = None) -> None:
        import torch

        self._torch: Any = torch
        self.index: int = torch.cuda.current_device() if index is None else index
        self._free: list[Any] = []

    def mark(self) -> Any:
        # Events are reused: making one takes 3 times as long as recording it.
        event = self._free.pop() if self._free else self._torch.cuda.Event(enable_timing=True)
        event.record(self._torch.cuda.current_stream(self.index))
        return event

    def is_done(self, mark: Any) -> bool:
        return bool(mark.query())

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def between_s(self, earlier: Any, later: Any) -> float:
        return float(earlier.elapsed_time(later)) / 1e3

    def drop(self, mark: Any) -> None:
        self._free.append(mark)


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
