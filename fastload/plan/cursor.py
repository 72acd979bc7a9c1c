"""The position in an epoch, and the next epoch: one cursor for the loader and for samplers, saved in states.

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
from fastload.plan.state import PlanState, check_state, saved_form, state_from_dict, state_to_dict


@dataclass
class Position:
    """The position of an iteration within its epoch; a state saves it."""

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
        plan: of any whole epoch; the plans of all others differ from it in the epoch alone. Fixed shares may follow a
            loaded state; see `resumed`.
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
        """Sets the epoch of the next iteration; a loaded rest of that very epoch stays loaded."""
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
        pieces = plan.epoch_pieces
        fixed_shares = 0 < pieces == (segments[0].world_size if segments else plan.world_size)
        return state_to_dict(
            PlanState(
                header_digest=self._identity(),
                seed=plan.seed,
                epoch=plan.epoch,
                shuffle=saved_form(shuffle),
                ends=resolve_ends(plan.ends, shuffle),
                echo=position.uses.factor,
                echo_position=echo_position,
                echo_distance=position.uses.distance,
                next_echo=next_echo,
                segments=segments,
                fixed_shares=fixed_shares,
                fixed_pieces=0 if fixed_shares else pieces,
                grouped=plan.groups is not None,
                elastic=plan.elastic,
            )
        )

    def checked(self, state: object) -> PlanState:
        """Returns a user's state. Raises StateError if it is invalid, or of other data or another order."""
        if not isinstance(state, Mapping):
            raise StateError(f"load_state_dict() takes a dict of state_dict(), got {type(state).__name__}.")
        loaded = state_from_dict(dict(state))
        check_state(
            loaded,
            header_digest=self._identity(),
            seed=self.plan.seed,
            shuffle=saved_form(self.plan.resolved_shuffle),
            grouped=self.plan.groups is not None,
            elastic=self.plan.elastic,
        )
        return loaded

    def rest(self, state: object) -> Position:
        """Returns what a user's state leaves of its epoch, from the beginning of a step of the plan on."""
        loaded = self.checked(state)
        begun_pieces = loaded.epoch_pieces(self.plan.world_size)
        return self._begin(replace(self.plan, epoch=loaded.epoch, segments=loaded.segments, begun_pieces=begun_pieces))

    def load(self, position: Position) -> None:
        """Makes a position the next iteration; if nothing is left of it, the epoch after it, until it is named."""
        self.plan = replace(self.plan, fixed_pieces=position.plan.fixed_pieces)
        self.last, self.next, self._finished = position, position, None
        if position.finished:
            self._finished, self.next = position, self.whole(position.plan.epoch + 1)

    def whole(self, epoch: int) -> Position:
        """Returns the beginning of an epoch."""
        following = self.last.plan.following  # batches are read ahead by it
        plan = following if following is not None and following.epoch == epoch else replace(self.plan, epoch=epoch)
        return self._begin(plan)


def resumed(
    plan: EpochPlan, state: PlanState, schedule_of: Callable[[int, int], EchoSchedule], *, on_device: bool
) -> Position:
    """Returns how far a state leaves its epoch in a loader, maybe with other ranks, batches, echo or pieces.

    The epoch keeps the order of the fixed pieces that began it; the next one has the loader's own. A loader that
    caches rows on its device takes over the fixed shares of a state, for good.

    Args:
        plan: of the loader's epochs.
        state: of `EpochCursor.checked`.
        schedule_of: returns the schedule of so many batches, of an epoch that began with the state's echo factor.
        on_device: whether the loader caches rows on its device: its share's if the plan has fixed shares, else all.

    Raises:
        StateError: the state counts more steps than its batches have, or was saved within an epoch of other shares
            than this rank keeps.
    """
    state, plan = _joined(replace(plan, epoch=state.epoch), state, on_device=on_device)
    begun_pieces = plan.epoch_pieces
    schedule = schedule_of(plan.num_steps, state.echo)
    last = state.segments[-1] if state.segments else Segment(plan.world_size, plan.batch_size, 0)
    saved = _saved(plan, state, last)
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
        plan = replace(plan, segments=saved.segments_after(theirs.begun(steps)), begun_pieces=begun_pieces)
        saved, steps = replace(saved, segments=plan.segments), 0
    if state.segments and saved.num_steps == 0:
        # With a smaller batch size, rows that "drop" left out may fill batches now; but that epoch is over.
        plan = replace(plan, segments=plan.segments_after(plan.num_steps))
    return Position(plan, replace(schedule, num_batches=plan.num_steps), steps)


def drawn(plan: EpochPlan, *, workers: int = 1) -> Position:
    """Returns the position of a sampler that draws once each sample or batch that a plan has for one rank.

    The rank's share is cut among `workers`. All ranks have as many batches, and none is empty.
    """
    batches = workers * plan.num_steps
    if workers > 1 and batches and plan.ends != "drop" and plan.world_size == workers:
        # For a single rank, the last shares may have no row in the last step: then they end before it.
        first = (plan.steps_done + plan.num_steps - 1) * plan.batch_size
        units = plan.num_positions // plan.unit
        shares = [plan.unit * len(rank_share(units, rank=worker, world_size=workers)) for worker in range(workers)]
        batches -= sum(share <= first for share in shares)
    return Position(plan, EchoSchedule(batches), workers=workers)


def _joined(plan: EpochPlan, state: PlanState, *, on_device: bool) -> tuple[PlanState, EpochPlan]:
    """Returns a state in a form that can go on with the ranks, batches and cache of a plan, and the plan of its rest.

    A rank that keeps only its fixed share in memory cannot read what others keep: within an epoch it needs fixed
    shares of the same number of ranks, and the same batch size. Any other rank can go on with any state, and between
    epochs everything may change.
    """
    here = Segment(plan.world_size, plan.batch_size, 0)
    begun = state.epoch_pieces(plan.world_size)
    alike = all(segment[:2] == here[:2] for segment in state.segments)
    keeps_share = on_device and plan.fixed_pieces == plan.world_size > 1
    rest = replace(plan, segments=state.segments, begun_pieces=begun)
    if not rest.segments:
        # With other pieces the first batch is another one, so its echoes do not count.
        echoes_count = begun == plan.fixed_pieces and (alike or not keeps_share)
        return state if echoes_count else replace(state, echo_position=0), rest
    if on_device and state.fixed_shares and alike:
        return state, replace(rest, fixed_pieces=plan.world_size)
    if not keeps_share:
        return state, rest
    last = rest.segments[-1]
    if _saved(rest, state, last).num_steps == 0:
        all_steps = here._replace(steps=plan.num_steps)
        return replace(state, echo_position=0, segments=(all_steps,)), replace(plan, segments=(all_steps,))
    then = "fixed" if state.fixed_shares else f"{begun} fixed pieces and changing" if begun else "changing"
    advice = 'cache="device" and the state\'s world and batch size, or ' if state.fixed_shares else ""
    raise StateError(
        f"the state was saved within an epoch of {then} shares, world size {last.world_size}, batch size "
        f"{last.batch_size}; this loader has fixed shares, world size {here.world_size}, batch size {here.batch_size}, "
        f'and would need rows that other ranks keep. Go on with {advice}cache="host" or None, or from a state saved '
        f"at an epoch's end."
    )


def _saved(rest: EpochPlan, state: PlanState, last: Segment) -> EpochPlan:
    """Returns the plan of a rest with the ranks and batches of the state's last segment, which counts its steps."""
    return replace(
        rest,
        world_size=last.world_size,
        batch_size=last.batch_size,
        ends=state.ends,
        fixed_pieces=0,
        begun_pieces=rest.epoch_pieces,
    )
