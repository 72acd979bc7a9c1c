"""How often each batch is used, and in which step: a pure function of three numbers.

    echo=3            b0 b0' b0" b1 b1' b1" b2 b2' b2"
    MixedEcho(3)      b0 b1 b0' b2 b1' b0" b2' b1" b2"        each batch comes again a batch later, twice

Using a batch several times, augmented anew each time, is the data echoing of Choi et al., "Faster Neural Network
Training with Data Echoing", 2019 (arXiv 1907.05550); n is their echoing factor.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fastload.errors import OptionError

from .options import is_whole

MAX_AUTO_ECHO = 4
"""Most that echo="auto" chooses, since nobody asked for more: each further use of a batch teaches less."""


@dataclass(frozen=True)
class MixedEcho:
    """Echo that never uses one batch in two steps running: repeats come from a window of the last batches.

    At time k the k-th fresh batch comes, then echo j = 1..factor-1 of batch k - j * distance, for as many as there
    are; after the last fresh batch the remaining repeats follow. Each batch is used `factor` times, and at most
    (factor - 1) * distance + 1 batches are kept on the device. Only where an epoch is a single batch do its uses
    follow one another.

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
    """The option as it is, NumPy's integers as Python's.

    Raises:
        OptionError: it is none of the accepted values, which the message lists.
    """
    if isinstance(echo, MixedEcho) or echo == "auto":
        return echo
    if not is_whole(echo) or int(echo) < 1:
        raise OptionError(f'echo={echo!r}: give a whole number, 1 or more, MixedEcho(factor, distance) or "auto"')
    return int(echo)


class Use(NamedTuple):
    """What a step takes.

    Attributes:
        batch: its number, in the order of the plan.
        echo: times it was used before; 0 for a fresh one.
    """

    batch: int
    echo: int


@dataclass(frozen=True)
class EchoSchedule:
    """Which batch each step uses.

    A batch has its uses at the times batch + echo * distance. What comes after a step depends on the batches still
    in use and on those to come, not on those that are finished: the schedule of n batches, from a step on at which d
    of them are finished, is that of n - d batches from d * factor steps earlier on.

    Attributes:
        num_batches: 0 or more.
        factor: times each is used, 1 or more.
        distance: of `MixedEcho`; 0: the uses of a batch follow one another.
    """

    num_batches: int
    factor: int = 1
    distance: int = 0

    @property
    def num_steps(self) -> int:
        """Uses of all batches together."""
        return self.num_batches * self.factor

    def uses(self, step: int = 0) -> Iterator[Use]:
        """From a step on, lazily; getting there takes logarithmic time.

        Args:
            step: steps to leave out, in [0, num_steps].
        """
        if not self.distance:
            return (Use(*divmod(number, self.factor)) for number in range(step, self.num_steps))
        return self._mixed(step)

    def begun(self, step: int) -> int:
        """Batches used at least once in the first `step` steps: 0, 1, ..., without a gap."""
        if not self.distance:
            return -(-step // self.factor)
        return bisect_left(range(self.num_batches), step, key=self._before)

    def finished(self, step: int) -> int:
        """Batches whose last use is among the first `step` steps: 0, 1, ..., without a gap."""
        if not self.distance:
            return step // self.factor
        last = (self.factor - 1) * self.distance
        # Between these bounds, as of the batches in use at most so many steps are done.
        least = max(0, -((last_started_step(self.factor, self.distance) - step) // self.factor))
        most = min(self.num_batches, step // self.factor)
        counts = range(1, self.num_batches + 1)
        return bisect_right(counts, step, least, most, key=lambda count: self._before(count + last))

    def _mixed(self, step: int) -> Iterator[Use]:
        end = self.num_batches + (self.factor - 1) * self.distance
        # The last time that begins no later; times without a use come before it.
        time = bisect_right(range(end), step, key=self._before) - 1
        left_out = step - self._before(max(0, time))
        for now in range(max(0, time), end):
            for echo in self._echoes(now)[left_out:]:
                yield Use(now - echo * self.distance, echo)
            left_out = 0

    def _echoes(self, time: int) -> range:
        """Of the uses at a time, the echoes."""
        first = max(0, -(-(time - self.num_batches + 1) // self.distance))
        return range(first, min(self.factor - 1, time // self.distance) + 1)

    def _before(self, time: int) -> int:
        """Steps before a time: of each echo as many as batches had their turn, from 0 to all of them."""
        complete = min(self.factor, max(0, (time - self.num_batches) // self.distance + 1))
        begun = max(complete, min(self.factor, -(-time // self.distance)))
        under_way = begun - complete
        turns = under_way * time - self.distance * (complete + begun - 1) * under_way // 2
        return complete * self.num_batches + turns


def last_started_step(factor: int, distance: int) -> int:
    """The most steps after which the first of any number of batches is not finished yet."""
    return factor - 1 + distance * factor * (factor - 1) // 2


# How long a fresh batch may take, and a step, is measured; what follows from it is decided here.

# A last use may make an epoch this much longer than the source makes it anyway.
_SLACK = 1.1
# An epoch that waits less than this share of its work says nothing of the source, but that it keeps up.
_CALM = 0.05
# The first batches of an epoch are read while nobody works, and there are as many as slots.
_LEAST_BATCHES = 8
_MOST_PATIENCE = 16


class Pace(NamedTuple):
    """What a pass measured, from its first batch on.

    Attributes:
        batches: fresh ones.
        steps: done by the user, echoes included.
        stall_s: waited for fresh batches.
        work_s: all other time: the steps of the user.
    """

    batches: int = 0
    steps: int = 0
    stall_s: float = 0.0
    work_s: float = 0.0


@dataclass(frozen=True)
class EchoHistory:
    """What echo="auto" knows of earlier epochs.

    Attributes:
        calm: epochs running that did not wait.
        patience: how many of them before one use less is tried; doubled each time that was one too few.
        trying: whether the last epoch was such a trial.
    """

    calm: int = 0
    patience: int = 1
    trying: bool = False


class EchoChoice(NamedTuple):
    """The factor of the coming epoch, why, and what to remember."""

    factor: int
    reason: str
    history: EchoHistory


def choose_factor(pace: Pace, factor: int, history: EchoHistory) -> EchoChoice:
    """What an epoch's waits make of the factor it ran with.

    While the loop waits, a fresh batch takes the source L = stall + factor * step seconds, and the largest n with
    n * step <= 1.1 L is taken, 1 to `MAX_AUTO_ECHO`. When the loop does not wait, L is only known to be no more than
    factor * step: the source may have become faster, as files do once they are in the page cache. How fast it would
    be is not measured, since a source that is waited for less is also asked for less; one use less is tried instead,
    for an epoch. Where that was one too few, the next trial is twice as many epochs away. An epoch of fewer than 9
    batches says too little and changes nothing.

    Args:
        pace: of the epoch.
        factor: that it ran with.
        history: of the choice before; the first time an empty one.
    """
    if pace.batches < _LEAST_BATCHES or pace.steps < 1:
        reason = f"{pace.batches} fresh batches are too few to tell"
        return EchoChoice(factor, reason, history)
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
        # After a trial: it was one too few. Else the source became slower, and what earlier trials said is void.
        patience = min(2 * patience, _MOST_PATIENCE) if history.trying else 1
    reason = f"a fresh batch takes {1e3 * source_s:,.1f} ms, a step {1e3 * step_s:,.1f} ms"
    return EchoChoice(chosen, reason, EchoHistory(0, patience))
