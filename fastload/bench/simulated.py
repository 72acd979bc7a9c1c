"""A simulated accelerator: it consumes samples at a fixed rate and leaves the CPU free, as a GPU does.

A step is launched and the loop goes on at once; it runs at most a few steps ahead of the accelerator and then sleeps
until the oldest of them is done. A step begins when the one before it ends, or, if it was launched later than that,
when it was launched: between the two the accelerator is idle. All of that is arithmetic on deadlines, so that a sleep
that lasts too long makes no step longer. No torch here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

AHEAD = 3
"""Steps launched and not done that the loop may have. PyTorch runs ahead of a GPU by a thousand kernels, one to three
steps of ResNet-50."""


class SimulatedAccelerator:
    """What a GPU of that speed would do with the steps launched on it. For one thread.

    Args:
        samples_per_s: what it trains on.
        ahead: steps that may be launched and not done.
        clock: seconds, never back.
        sleep: waits for so many seconds, or longer.
    """

    def __init__(
        self,
        samples_per_s: float,
        *,
        ahead: int = AHEAD,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.samples_per_s = samples_per_s
        self._ahead = ahead
        self._clock = clock
        self._sleep = sleep
        self._ends: deque[float] = deque()  # of the steps that are not done, in order
        self._busy_until = 0.0
        self.begin()

    def begin(self) -> None:
        """Counts from now on; what is still to be done of earlier steps counts as work."""
        now = self._clock()
        self._busy_until = max(self._busy_until, now)
        self.samples = 0
        self.busy_s = self._busy_until - now
        self.idle_s = 0.0

    def launch(self, samples: int) -> float:
        """Begins a step on so many samples as soon as the one before it is done, and returns before it ends.

        Waits where `ahead` steps are not done.

        Returns:
            Seconds that the accelerator had been idle when the step began.
        """
        while len(self._ends) >= self._ahead:
            self.sleep_until(self._ends[0])
            self._ends.popleft()
        now = self._clock()
        idle_s = max(0.0, now - self._busy_until)
        step_s = samples / self.samples_per_s
        self._busy_until = max(now, self._busy_until) + step_s
        self._ends.append(self._busy_until)
        self.samples += samples
        self.busy_s += step_s
        self.idle_s += idle_s
        return idle_s

    def finish(self) -> None:
        """Waits until all steps are done."""
        self.sleep_until(self._busy_until)
        self._ends.clear()

    @property
    def utilization(self) -> float:
        """Part of the time that it was at work, from `begin` to the end of the last step launched, 0 to 1."""
        total_s = self.busy_s + self.idle_s
        return self.busy_s / total_s if total_s else 0.0

    def reached_s(self) -> float:
        """When it is done with all that was launched; now, if it is done already."""
        return max(self._clock(), self._busy_until)

    def past(self, at_s: float) -> bool:
        """Whether that time is over."""
        return self._clock() >= at_s

    def sleep_until(self, deadline: float) -> None:
        """Waits on the host, however often it wakes too early."""
        while (left_s := deadline - self._clock()) > 0:
            self._sleep(left_s)


class AcceleratorClock:
    """When the accelerator gets to what it was given so far, as a CUDA event tells it: a `fastload.meter` clock.

    With it a `Meter` counts as waiting what the accelerator waited, not what the host did, which runs ahead.
    """

    name = "simulated"

    def __init__(self, accelerator: SimulatedAccelerator) -> None:
        self._accelerator = accelerator

    def mark(self) -> float:
        """See `fastload.meter.clocks.Clock`."""
        return self._accelerator.reached_s()

    def settled(self, mark: float) -> bool:
        """See `fastload.meter.clocks.Clock`."""
        return self._accelerator.past(mark)

    def settle(self, mark: float) -> None:
        """See `fastload.meter.clocks.Clock`."""
        self._accelerator.sleep_until(mark)

    def between_s(self, earlier: float, later: float) -> float:
        """See `fastload.meter.clocks.Clock`."""
        return later - earlier

    def drop(self, mark: float) -> None:
        """See `fastload.meter.clocks.Clock`."""
