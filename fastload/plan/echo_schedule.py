"""Echo: how often each batch is used, and in which steps; a pure function of three numbers.

    echo=3            b0 b0' b0" b1 b1' b1" b2 b2' b2"
    MixedEcho(3)      b0 b1 b0' b2 b1' b0" b2' b1" b2"        each batch comes again a batch later, twice

Using a batch several times, augmented anew each time, is the data echoing of Choi et al., "Faster Neural Network
Training with Data Echoing", 2019 (arXiv 1907.05550); n is their echoing factor.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Literal, NamedTuple

from fastload.errors import OptionError, is_whole

MAX_AUTO_ECHO = 4
"""Largest factor that echo="auto" chooses: each further use of a batch teaches less."""


@dataclass(frozen=True)
class MixedEcho:
    """Echo that never uses one batch in two consecutive steps: repeats come from a window of the last batches.

    At time k the k-th fresh batch comes, then echo j = 1..factor-1 of batch k - j * distance, as far as these exist;
    after the last fresh batch the remaining repeats follow. Each batch is used `factor` times, and at most
    (factor - 1) * distance + 1 batches are kept on the device. Only in an epoch of a single batch its uses follow one
    another.

    Attributes:
        factor: times each batch is used, 1 or more.
        distance: fresh batches from one use of a batch to its next, 1 or more.
    """

    factor: int
    distance: int = 1

    def __post_init__(self) -> None:
        for name in ("factor", "distance"):
            value = getattr(self, name)
            if not is_whole(value) or value < 1:
                raise OptionError(
                    f"MixedEcho({name}={value!r}): give whole numbers, 1 or more: times each batch is used, and "
                    f"batches from one use to the next"
                )
            object.__setattr__(self, name, int(value))  # NumPy's integers do not go into JSON


Echo = int | MixedEcho | Literal["auto"]


def check_echo(echo: Echo) -> Echo:
    """Returns the option, NumPy's integers as Python's. Raises OptionError, which lists the accepted values."""
    if isinstance(echo, MixedEcho) or echo == "auto":
        return echo
    if not is_whole(echo) or int(echo) < 1:
        raise OptionError(f'echo={echo!r}: give a whole number, 1 or more, MixedEcho(factor, distance) or "auto"')
    return int(echo)


class Use(NamedTuple):
    """The batch that a step uses, by its number in the plan, and how often it was used before; 0: it is fresh."""

    batch: int
    echo: int


@dataclass(frozen=True)
class EchoSchedule:
    """Which batch each step of an epoch uses.

    A batch is used at the times batch + echo * distance. The steps to come depend on the batches in use and on those to
    come, not on finished ones: after step s, at which d of n batches are finished, the schedule goes on like a schedule
    of n - d batches after step s - d * factor.
    """

    num_batches: int  # of the epoch, 0 or more
    factor: int = 1  # times each is used, 1 or more
    distance: int = 0  # as in `MixedEcho`; 0: the uses of a batch follow one another

    @property
    def num_steps(self) -> int:
        """Steps of the epoch: all uses of all batches."""
        return self.num_batches * self.factor

    def uses(self, step: int = 0) -> Iterator[Use]:
        """Yields the uses from a step in [0, num_steps] on; finding that step takes logarithmic time."""
        if not self.distance:
            yield from map(Use._make, map(divmod, range(step, self.num_steps), repeat(self.factor)))
            return
        end = self.num_batches + (self.factor - 1) * self.distance
        # The last time that begins no later than this step; times before it may have no use.
        time = max(0, bisect_right(range(end), step, key=self._before) - 1)
        left_out = step - self._before(time)
        for now in range(time, end):
            first = max(0, -(-(now - self.num_batches + 1) // self.distance))
            for echo in range(first, min(self.factor - 1, now // self.distance) + 1)[left_out:]:
                yield Use(now - echo * self.distance, echo)
            left_out = 0

    def begun(self, step: int) -> int:
        """Returns how many batches are used at least once in the first `step` steps: 0, 1, ..., without a gap."""
        if not self.distance:
            return -(-step // self.factor)
        return bisect_left(range(self.num_batches), step, key=self._before)

    def finished(self, step: int) -> int:
        """Returns how many batches have their last use in the first `step` steps: 0, 1, ..., without a gap."""
        if not self.distance:
            return step // self.factor
        last = (self.factor - 1) * self.distance
        # Bounds: at most last_started_step() steps belong to batches that are not finished.
        least = max(0, -((last_started_step(self.factor, self.distance) - step) // self.factor))
        most = min(self.num_batches, step // self.factor)
        counts = range(1, self.num_batches + 1)
        return bisect_right(counts, step, least, most, key=lambda count: self._before(count + last))

    def _before(self, time: int) -> int:
        """Returns the steps before a time: for each echo number, the batches that were used with it by then."""
        complete = min(self.factor, max(0, (time - self.num_batches) // self.distance + 1))
        begun = max(complete, min(self.factor, -(-time // self.distance)))
        partial = begun - complete
        uses = partial * time - self.distance * (complete + begun - 1) * partial // 2
        return complete * self.num_batches + uses


def last_started_step(factor: int, distance: int) -> int:
    """Returns the largest number of steps after which the first batch may still be unfinished."""
    return factor - 1 + distance * factor * (factor - 1) // 2


# echo="auto": the times of a fresh batch and of a step are measured elsewhere; the factor is chosen here.

# A last use may make an epoch this much longer than the source alone would.
_SLACK = 1.1
# In an epoch that waits less than this share of its work, the source keeps up; how fast it could be is not known.
_CALM = 0.05
# The first batches of an epoch, as many as the ring has slots, are read while no step runs.
_LEAST_BATCHES = 8
_MOST_PATIENCE = 16


class Pace(NamedTuple):
    """The times of an epoch, from its first batch on: waiting for fresh batches, and all others, the steps."""

    batches: int = 0
    steps: int = 0
    stall_s: float = 0.0
    work_s: float = 0.0


@dataclass(frozen=True)
class EchoHistory:
    """The memory of echo="auto" about earlier epochs."""

    calm: int = 0  # latest consecutive epochs that did not wait
    patience: int = 1  # how many of these it takes to try one use less; doubled each time that was too few
    trying: bool = False  # whether the last epoch was such a trial


class EchoChoice(NamedTuple):
    """The factor of the next epoch, the reason, and the memory of earlier epochs."""

    factor: int
    reason: str
    history: EchoHistory


def choose_factor(pace: Pace, factor: int, history: EchoHistory) -> EchoChoice:
    """Chooses the echo factor of the next epoch from the times of the last one.

    If the loop waits, the source needs L = stall + factor * step seconds for a fresh batch, and the largest n with
    n * step <= 1.1 L is chosen, from 1 to `MAX_AUTO_ECHO`. If the loop does not wait, L is only known to be at most
    factor * step: the source may have become faster, as files do once they are in the page cache. Its speed cannot be
    measured then, since a source that keeps up is asked for less than it could give; so one use less is tried for an
    epoch. If that was too few, the next trial is twice as many epochs away. An epoch of fewer than 9 batches says too
    little and changes nothing.
    """
    if pace.batches < _LEAST_BATCHES or pace.steps < 1:
        return EchoChoice(factor, f"{pace.batches} fresh batches are too few to tell", history)
    step_s, stall_s = pace.work_s / pace.steps, pace.stall_s / pace.batches
    if stall_s <= _CALM * factor * step_s:
        calm = history.calm + 1
        if factor == 1:
            return EchoChoice(1, "the loop did not wait", EchoHistory())
        patience = 1 if history.trying else history.patience
        if calm < patience:
            return EchoChoice(factor, "the loop did not wait", EchoHistory(calm, patience))
        reason = f"the loop did not wait with {factor}, one less is tried"
        return EchoChoice(factor - 1, reason, EchoHistory(0, patience, trying=True))
    source_s = stall_s + factor * step_s
    fitting = [n for n in range(1, MAX_AUTO_ECHO + 1) if n * step_s <= _SLACK * source_s]
    chosen = max(fitting, default=1)
    patience = history.patience
    if chosen > factor:
        # After a trial, it was one use too few. Else the source became slower, and earlier trials no longer count.
        patience = min(2 * patience, _MOST_PATIENCE) if history.trying else 1
    reason = f"a fresh batch takes {1e3 * source_s:,.1f} ms, a step {1e3 * step_s:,.1f} ms"
    return EchoChoice(chosen, reason, EchoHistory(0, patience))
