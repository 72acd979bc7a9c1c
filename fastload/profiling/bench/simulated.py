"""A simulated accelerator: it consumes samples at a fixed rate and leaves the CPU free, as a GPU does.

A step is launched and the loop goes on at once; it runs at most a few steps ahead of the accelerator and then sleeps
until the oldest of them is done. A step starts when the one before it ends, or when it is launched, if that is later:
in between the accelerator is idle. All of this is arithmetic on deadlines, so a sleep that takes too long makes no step
longer. Works without torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from fastload.profiling.meter.clocks import Clock


class SimulatedAccelerator(Clock):
    """Does to a training loop what a GPU of a given speed would do. For one thread.

    It is a `TrainingStep`, and the meter's `Clock` of that step, as CUDA events are one of a GPU: with it a `Meter`
    counts the time that the accelerator waited, not the host, which runs ahead.

    Args:
        ahead: steps that may be launched and not finished. PyTorch runs ahead of a GPU by a thousand kernels, one to
            three steps of ResNet-50.
        clock: returns seconds and never goes back.
        sleep: sleeps for a number of seconds, or longer.

    Attributes:
        samples: launched since `begin`.
        busy_s, idle_s: seconds at work and idle since `begin`.
    """

    def __init__(
        self,
        samples_per_s: float,
        *,
        ahead: int = 3,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = f"simulated accelerator, {samples_per_s:,.0f} images/s"
        self.device = self
        self._samples_per_s, self._ahead = samples_per_s, ahead
        self._clock, self._sleep = clock, sleep
        self._ends: deque[float] = deque()  # of the steps that are not done, in order
        self._busy_until = 0.0
        self.begin()

    def begin(self) -> None:
        """Resets the counters; work that is still to be done counts as work."""
        now = self._clock()
        self._busy_until = max(self._busy_until, now)
        self.samples = 0
        self.busy_s = self._busy_until - now
        self.idle_s = 0.0

    def __call__(self, batch: Sequence[Any]) -> int:
        """Launches a step on a batch, images first, and returns its number of samples."""
        self.launch(len(batch[0]))
        return len(batch[0])

    def launch(self, samples: int) -> float:
        """Launches a step on so many samples and returns before it ends; waits while `ahead` steps are unfinished.

        Returns the seconds that the accelerator had been idle when the step started.
        """
        while len(self._ends) >= self._ahead:
            self.wait(self._ends.popleft())
        now = self._clock()
        idle_s = max(0.0, now - self._busy_until)
        step_s = samples / self._samples_per_s
        self._busy_until = max(now, self._busy_until) + step_s
        self._ends.append(self._busy_until)
        self.samples += samples
        self.busy_s += step_s
        self.idle_s += idle_s
        return idle_s

    def finish(self) -> None:
        """Waits until all steps are done."""
        self.wait(self._busy_until)
        self._ends.clear()

    @property
    def utilization(self) -> float:
        """Share of the time at work, from `begin` to the end of the last step launched, 0 to 1."""
        total_s = self.busy_s + self.idle_s
        return self.busy_s / total_s if total_s else 0.0

    def mark(self) -> float:
        """Returns the time at which everything launched so far is done, or the current time if that is later."""
        return max(self._clock(), self._busy_until)

    def is_done(self, mark: float) -> bool:
        """Whether that time has passed."""
        return self._clock() >= mark

    def wait(self, mark: float) -> None:
        """Sleeps until that time, again if it wakes too early."""
        while (left_s := mark - self._clock()) > 0:
            self._sleep(left_s)
