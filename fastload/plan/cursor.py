"""How far an epoch is, and which comes next: one cursor for the loader and for samplers, saved in states.

A step is in a loader the use of a batch, in a sampler the sample or batch drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fastload.errors import OptionError, StateError, check_whole
from fastload.plan.echo_schedule import EchoSchedule
from fastload.plan.epoch import EpochPlan
from fastload.plan.order import resolve_ends
from fastload.plan.shares import Segment, rank_share
from fastload.plan.state import PlanState, check_state, state_from_dict, state_to_dict


@dataclass
class Position:
    """How far an iteration of an epoch is; a state saves it."""

    plan: EpochPlan  # of the epoch, or of what was left of it when it was resumed
    schedule: EchoSchedule | None = None  # of the plan's batches; None: the echo factor is not chosen yet
    steps: int = 0  # done of the schedule; batches in use when the epoch was resumed are read again
    workers: int = 1  # of a `DataLoader`, which take batches in turn: a step of the plan is one batch of each
    first: int = field(init=False)  # steps that were done when the iteration began

    def __post_init__(self) -> None:
        self.first = self.steps

    @property
    def uses(self) -> EchoSchedule:
        """The schedule, after it was chosen."""
        assert self.schedule is not None, "the echo factor of this epoch is not chosen yet"
        return self.schedule

    @property
    def length(self) -> int:
        """Steps of the iteration from its beginning, echoes included."""
        return max(0, self.uses.num_steps - self.first)

    @property
    def finished(self) -> bool:
        return self.steps >= self.uses.num_steps

    def after(self, done: int | None, name: str) -> Position:
        """Returns the position after those steps of the iteration that a caller counted; None: after all of them.

        At most `length` of them count: a short last batch may be counted as a full one. Raises OptionError, with the
        name of that argument, if there are more than were taken of an unfinished iteration.
        """
        if done is None:
            return self
        check_whole(name, done, least=0)
        taken = self.steps - self.first
        if done > taken and not self.finished:
            raise OptionError(
                f"{name}={done}: only {taken} were drawn since the iteration began; count from there, not from the "
                f"beginning of the epoch"
            )
        return replace(self, steps=self.first + min(int(done), self.length))


class EpochCursor:
    """The epochs of a loader or sampler: each iteration is the next epoch, unless another one was asked for.

    Args:
        plan: of any whole epoch; the plans of all others differ from it in the epoch alone. Fixed shares follow a
            loaded state.
        identity: returns a string that identifies the data, for states.
        begin: returns the position at the beginning of a plan.
    """

    def __init__(
        self, plan: EpochPlan, identity: Callable[[], str], begin: Callable[[EpochPlan], Position] = Position
    ) -> None:
        self.plan = plan
        self._identity = identity
        self._begin = begin
        # A copy: plans keep those that follow them, so none may be kept from the first epoch on.
        self.next: Position | None = begin(replace(plan))  # None: all of the epoch after the last one
        self.last = self.next  # the running or last iteration
        self._finished: Position | None = None  # what a state left of its epoch, if that is nothing

    @property
    def standing(self) -> Position:
        """The next iteration if it is decided, else the running or last one."""
        return self.next or self.last

    @property
    def epoch(self) -> int:
        return self.standing.plan.epoch

    def coming(self, *, running: bool = False) -> Position:
        """Returns the next iteration; `running`: the last one while it runs, unless the next one is decided."""
        if self.next is not None:
            return self.next
        return self.last if running else self.whole(self.last.plan.epoch + 1)

    def begin(self, position: Position) -> Position:
        """Makes the coming iteration the running one, and returns it."""
        self.next, self.last, self._finished = None, position, None
        return position

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of an epoch; a loaded rest of that very epoch stays loaded."""
        check_whole("epoch", epoch, least=0)
        for loaded in (self.next, self._finished):
            if loaded is None or loaded.plan.epoch != epoch:
                continue
            if loaded is self._finished or loaded.plan.segments or loaded.first:
                self.next = loaded
                return
        self.next = self.whole(epoch)

    def state(self, position: Position, *, next_echo: int | None = None) -> dict[str, Any]:
        """Returns the state of a position; `next_echo` as in `PlanState`."""
        plan, shuffle = position.plan, position.plan.resolved_shuffle
        done = position.uses.finished(position.steps)
        segments = plan.segments_after(done // position.workers)
        echo_position = position.steps - done * position.uses.factor
        if echo_position:
            # An empty segment says of which world and batch size the batches in use are.
            segments = (*segments, Segment(plan.world_size, plan.batch_size, 0))
        return state_to_dict(
            PlanState(
                header_digest=self._identity(),
                seed=plan.seed,
                epoch=plan.epoch,
                shuffle=shuffle,
                ends=resolve_ends(plan.ends, shuffle),
                echo=position.uses.factor,
                echo_position=echo_position,
                echo_distance=position.uses.distance,
                next_echo=next_echo,
                segments=segments,
                fixed_shares=plan.fixed_shares,
                grouped=plan.groups is not None,
            )
        )

    def checked(self, state: object) -> PlanState:
        """Returns a user's state. Raises StateError if it is none, or of other data or another order."""
        if not isinstance(state, Mapping):
            raise StateError(f"load_state_dict() takes a dict of state_dict(), got {type(state).__name__}.")
        loaded = state_from_dict(dict(state))
        check_state(
            loaded,
            header_digest=self._identity(),
            seed=self.plan.seed,
            shuffle=self.plan.resolved_shuffle,
            grouped=self.plan.groups is not None,
        )
        return loaded

    def rest(self, state: object) -> Position:
        """Returns what a user's state leaves of its epoch, from the beginning of a step of the plan on."""
        loaded = self.checked(state)
        return self._begin(replace(self.plan, epoch=loaded.epoch, segments=loaded.segments))

    def resumed(
        self, state: PlanState, schedule_of: Callable[[int, int], EchoSchedule], *, keeps_all: bool
    ) -> Position:
        """Returns how far a state leaves its epoch in a loader, maybe with other ranks, batches, echo or shares.

        Args:
            state: of `checked`.
            schedule_of: returns the schedule of so many batches, of an epoch that began with the state's echo factor.
            keeps_all: whether the loader can have fixed shares although its plan has none.

        Raises:
            StateError: the state counts more steps than its batches have, or was saved within an epoch of other shares.
        """
        state = _with_shares_of(replace(self.plan, epoch=state.epoch), state, keeps_all=keeps_all)
        plan = replace(self.plan, epoch=state.epoch, segments=state.segments, fixed_shares=state.fixed_shares)
        schedule = schedule_of(plan.num_steps, state.echo)
        last = state.segments[-1] if state.segments else Segment(plan.world_size, plan.batch_size, 0)
        saved = replace(plan, world_size=last.world_size, batch_size=last.batch_size, ends=state.ends)
        theirs = EchoSchedule(saved.num_steps, state.echo, state.echo_distance)
        steps = state.echo_position
        if steps and (steps >= theirs.num_steps or theirs.finished(steps)):
            raise StateError(
                f"the loader state is damaged: echo_position is {steps}, of {saved.num_steps} batches left"
            )
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

    def load(self, position: Position) -> None:
        """Makes a position the next iteration; if nothing is left of it, the epoch after it, until it is named."""
        self.plan = replace(self.plan, fixed_shares=position.plan.fixed_shares)
        self.last, self.next, self._finished = position, position, None
        if position.finished:
            self._finished, self.next = position, self.whole(position.plan.epoch + 1)

    def whole(self, epoch: int) -> Position:
        """Returns the beginning of an epoch."""
        following = self.last.plan.following  # batches are read ahead by it
        plan = following if following is not None and following.epoch == epoch else replace(self.plan, epoch=epoch)
        return self._begin(plan)


def drawn(plan: EpochPlan, *, workers: int = 1) -> Position:
    """Returns the position of a sampler that draws once each sample or batch that a plan has for one rank.

    The rank's share is cut among `workers`. All ranks have as many batches, and none is empty.
    """
    batches = workers * plan.num_steps
    if workers > 1 and batches and plan.ends != "drop" and plan.world_size == workers:
        # For a single rank, the last shares may have no row in the last step: then they end before it.
        first = (plan.steps_done + plan.num_steps - 1) * plan.batch_size
        shares = [len(rank_share(len(plan.rows), rank=worker, world_size=workers)) for worker in range(workers)]
        batches -= sum(share <= first for share in shares)
    return Position(plan, EchoSchedule(batches), workers=workers)


def _with_shares_of(plan: EpochPlan, state: PlanState, *, keeps_all: bool) -> PlanState:
    """Returns the state in a form that can go on with the ranks, batches and shares of a plan.

    Within an epoch, a state of fixed shares needs the same number of ranks, the same batch size and fixed shares; any
    other state needs ranks that can read any row. Between epochs everything may change.
    """
    here = Segment(plan.world_size, plan.batch_size, 0)
    done = [segment for segment in state.segments if segment.steps]
    if not done:
        # With other shares the first batch is another one, so its echoes do not count.
        as_saved = state.fixed_shares == plan.fixed_shares
        return state if as_saved else replace(state, fixed_shares=plan.fixed_shares, echo_position=0)
    if not state.fixed_shares and not plan.fixed_shares:
        return state
    alike = all(segment[:2] == here[:2] for segment in done)
    if state.fixed_shares and alike and (plan.fixed_shares or keeps_all):
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
