"""How far an epoch is, and how a saved state becomes that again: for the loader and for samplers.

The loader counts steps, echoes included: `Position`, which `resumed` makes from a state. Samplers count samples or
batches drawn: `Drawing`, and `EpochSequence`, which knows the epoch that comes next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fastload.errors import OptionError, StateError
from fastload.plan.echo_schedule import EchoSchedule
from fastload.plan.epoch import EpochPlan
from fastload.plan.shares import Segment, rank_share
from fastload.plan.state import PlanState
from fastload.system.whole_numbers import check_whole


@dataclass
class Position:
    """How far a loader's epoch is; a state saves it.

    Attributes:
        plan: plan of the epoch, or of what was left of it when it was resumed.
        schedule: which of the plan's batches each step uses; None: the echo factor is not chosen yet.
        steps: steps of the schedule that are done. Batches in use when the epoch was resumed are read again.
    """

    plan: EpochPlan
    schedule: EchoSchedule | None = None
    steps: int = 0

    @property
    def uses(self) -> EchoSchedule:
        """The schedule, after it was chosen."""
        assert self.schedule is not None, "the echo factor of this epoch is not chosen yet"
        return self.schedule

    @property
    def steps_left(self) -> int:
        """Steps still to come, echoes included."""
        return max(0, self.uses.num_steps - self.steps)

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return self.steps >= self.uses.num_steps

    def progress(self) -> tuple[tuple[Segment, ...], int]:
        """Returns `segments` and `echo_position` of a state."""
        done = self.uses.finished(self.steps)
        segments, echo_position = self.plan.segments_after(done), self.steps - done * self.uses.factor
        if echo_position:
            # An empty segment says of which world and batch size the batches in use are.
            segments = (*segments, Segment(self.plan.world_size, self.plan.batch_size, 0))
        return segments, echo_position


def resumed(state: PlanState, plan: EpochPlan, schedule: EchoSchedule) -> Position:
    """Returns how far a state leaves its epoch, which may be finished.

    Args:
        state: a state of the same data and order.
        plan: a plan with the state's epoch and segments, and the world, batch size and ends to go on with.
        schedule: schedule of the plan's batches.

    Raises:
        StateError: the state counts more steps than its batches have.
    """
    last = state.segments[-1] if state.segments else Segment(plan.world_size, plan.batch_size, 0)
    saved = replace(plan, world_size=last.world_size, batch_size=last.batch_size, ends=state.ends)
    theirs = EchoSchedule(saved.num_steps, state.echo, state.echo_distance)
    steps = state.echo_position
    if steps and (steps >= theirs.num_steps or theirs.finished(steps)):
        raise StateError(f"the loader state is damaged: echo_position is {steps}, of {saved.num_steps} batches left")
    same = (
        (last.world_size, last.batch_size) == (plan.world_size, plan.batch_size)
        and (theirs.factor, theirs.distance) == (schedule.factor, schedule.distance)
        # Other ends do not matter to a single batch.
        and (not theirs.distance or theirs.num_batches == schedule.num_batches)
    )
    if steps and not same:
        # Batches in use count as done: each of their rows was used at least once.
        plan = replace(plan, segments=saved.segments_after(theirs.begun(steps)))
        saved, steps = replace(saved, segments=plan.segments), 0
    if state.segments and saved.num_steps == 0:
        # With a smaller batch size, rows that "drop" left out may fill batches now; but that epoch is over.
        plan = replace(plan, segments=plan.segments_after(plan.num_steps))
    return Position(plan, replace(schedule, num_batches=plan.num_steps), steps)


def with_shares_of(plan: EpochPlan, state: PlanState, *, keeps_all: bool) -> PlanState:
    """Returns the state in a form that can go on with the ranks, batches and shares of a plan.

    Within an epoch, a state of fixed shares needs the same number of ranks, the same batch size and fixed shares; any
    other state needs ranks that can read any row. Between epochs everything may change.

    Args:
        plan: plan of the state's whole epoch, as the loader would begin it.
        state: a state of the same data and shuffle.
        keeps_all: whether the loader can have fixed shares although its plan has none.

    Raises:
        StateError: the state was saved within an epoch of other shares; the message says which.
    """
    here = Segment(plan.world_size, plan.batch_size, 0)
    done = [segment for segment in state.segments if segment.steps]
    if not done:
        # With other shares the first batch is another one, so its echoes do not count.
        as_saved = state.fixed_shares == plan.fixed_shares
        return state if as_saved else replace(state, fixed_shares=plan.fixed_shares, echo_position=0)
    alike = all(segment[:2] == here[:2] for segment in done)
    if state.fixed_shares == plan.fixed_shares and (alike or not plan.fixed_shares):
        return state
    if state.fixed_shares and alike and keeps_all:
        return state
    last = done[-1]
    saved = replace(
        plan,
        world_size=last.world_size,
        batch_size=last.batch_size,
        ends=state.ends,
        segments=state.segments,
        fixed_shares=False,  # has the same number of steps, and accepts segments of any ranks
    )
    if saved.num_steps == 0:
        all_steps = here._replace(steps=plan.num_steps)
        return replace(state, fixed_shares=plan.fixed_shares, echo_position=0, segments=(all_steps,))
    then, now = ("fixed" if fixed else "changing" for fixed in (state.fixed_shares, plan.fixed_shares))
    advice = 'cache="device" and the state\'s world and batch size' if state.fixed_shares else 'cache="host" or None'
    raise StateError(
        f"the state was saved within an epoch of {then} shares, world size {last.world_size}, batch size "
        f"{last.batch_size}; this loader has {now} shares, world size {here.world_size}, batch size {here.batch_size}, "
        f"and would need rows that other ranks keep. Go on with {advice}, or from a state saved at an epoch's end."
    )


@dataclass
class Drawing:
    """One iteration of a sampler, and how far it is.

    Attributes:
        plan: plan of its epoch, or of what was left of it.
        total: samples or batches that the iteration draws.
        skipped: batches left out at its beginning, since they were done before.
        drawn: samples or batches drawn so far.
    """

    plan: EpochPlan
    total: int
    skipped: int = 0
    drawn: int = 0

    def done(self, given: int | None, name: str) -> int:
        """Returns how many samples or batches are done: those that the caller counted, or all that were drawn.

        Args:
            given: the caller's count, at most `total` of which counts: a short last batch may be counted as a full one.
            name: name of that argument, for the message.

        Raises:
            OptionError: more than were drawn of an unfinished iteration.
        """
        if given is None:
            return self.drawn
        check_whole(name, given, least=0)
        if given > self.drawn < self.total:
            raise OptionError(
                f"{name}={given}: only {self.drawn} were drawn since the iteration began; count from there, not from "
                f"the beginning of the epoch"
            )
        return min(int(given), self.total)


class EpochSequence:
    """The epochs that a sampler iterates over: each iteration is the next epoch unless another one was asked for.

    Args:
        plan_of: returns the plan of an epoch.
        size: returns how many samples or batches the sampler draws from a plan.
    """

    def __init__(self, plan_of: Callable[[int], EpochPlan], size: Callable[[EpochPlan], int]) -> None:
        self._plan_of = plan_of
        self._size = size
        # The next iteration if it is decided already; None: all of the epoch after the last one.
        self._next: Drawing | None = self._whole(0)
        self._last = self._next
        self._finished: Drawing | None = None

    @property
    def standing(self) -> Drawing:
        """The next iteration if it is decided, else the running or last one."""
        return self._next or self._last

    def __len__(self) -> int:
        if self._next is not None:
            return self._next.total
        running = self._last.drawn < self._last.total
        return self._last.total if running else self._whole(0).total

    def begin(self) -> Drawing:
        """Begins the next iteration and returns it."""
        begun = self._next or self._whole(self._last.plan.epoch + 1)
        self._next, self._last, self._finished = None, begun, None
        return begun

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of an epoch; a loaded rest of that very epoch stays loaded."""
        check_whole("epoch", epoch, least=0)
        for loaded in (self._next, self._finished):
            if loaded is None or loaded.plan.epoch != epoch:
                continue
            if loaded is self._finished or loaded.plan.segments or loaded.skipped:
                self._next = loaded
                return
        self._next = self._whole(epoch)

    def load(self, plan: EpochPlan, skipped: int = 0) -> None:
        """Makes the next iteration the rest of an epoch, without its first `skipped` batches."""
        loaded = Drawing(plan, self._size(plan) - skipped, skipped)
        self._last, self._next, self._finished = loaded, loaded, None
        if loaded.total == 0:
            self._finished, self._next = loaded, self._whole(plan.epoch + 1)

    def _whole(self, epoch: int) -> Drawing:
        plan = self._plan_of(epoch)
        return Drawing(plan, self._size(plan))


def num_steps(plan: EpochPlan) -> int:
    """Returns the samples of one rank, for a plan whose batches are single samples."""
    return plan.num_steps


def num_batches(plan: EpochPlan, *, workers: int) -> int:
    """Returns the batches of one rank whose share is cut among `workers`. All ranks have as many, and none is empty."""
    batches = workers * plan.num_steps
    if not batches or plan.ends == "drop" or plan.world_size != workers:
        return batches
    # For a single rank, the last shares may have no row in the last step: then they end before it.
    first = (plan.steps_done + plan.num_steps - 1) * plan.batch_size
    shares = [len(rank_share(len(plan.rows), rank=worker, world_size=workers)) for worker in range(workers)]
    return batches - sum(share <= first for share in shares)
