"""The position in an epoch, and the next epoch: one cursor for the loader and for samplers, saved in states.

A state is a plain dictionary that any checkpoint can hold. A step is in a loader the use of a batch, in a sampler the
sample or batch drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeGuard

from fastload.errors import OptionError, StateError, check_whole, is_whole
from fastload.plan.echo_schedule import EchoSchedule, last_started_step
from fastload.plan.epoch import EpochPlan
from fastload.plan.order import ChunkWindow, Ends, ResolvedShuffle, resolve_ends
from fastload.plan.shares import Segment, checked_segments, rank_share
from fastload.plan.weighted import ClassBatches, Weighted

STATE_VERSION = 1
_MOST = 2**48  # steps, ranks and chunks that any epoch has
_DIGEST_CHARACTERS = frozenset("0123456789abcdef")
_KEYS = frozenset(("version", "header_digest", "seed", "epoch", "shuffle", "ends", "echo", "echo_position", "segments"))


@dataclass(frozen=True, repr=False)
class DrawingDigest:
    """The digest that a state keeps of a shuffle by weight or class, to tell it from others."""

    kind: Literal["weighted", "classes"]
    digest: str

    def __repr__(self) -> str:
        what = "Weighted(weights" if self.kind == "weighted" else "ClassBatches(classes"
        return f"{what} and options of digest {self.digest})"


SavedShuffle = Literal["full", False] | ChunkWindow | DrawingDigest


def saved_form(shuffle: ResolvedShuffle) -> SavedShuffle:
    """Returns a shuffle as states hold it."""
    if isinstance(shuffle, (Weighted, ClassBatches)):
        return DrawingDigest(shuffle.kind, shuffle.digest)
    return shuffle


@dataclass(frozen=True, kw_only=True)
class PlanState:
    """The data of a run, and the batch that comes next. The same on every rank. Names are as in `EpochPlan`."""

    header_digest: str  # identifies the packed file
    seed: int
    epoch: int
    shuffle: SavedShuffle  # resolved, as ends, so that a later default cannot change the order
    ends: Ends
    echo: int = 1  # times each batch is used
    # Steps done with batches that will be used again and so are not in `segments` yet: a step of the `EchoSchedule` of
    # the batches that segments leave. With distance 0, the uses so far of the current batch.
    echo_position: int = 0
    echo_distance: int = 0  # as in `EchoSchedule`
    next_echo: int | None = None  # `echo` of the next epoch; None: always the same, 0: not chosen yet
    segments: tuple[Segment, ...] = ()  # finished parts of the epoch: `EpochPlan.segments_after(steps)`
    fixed_shares: bool = False  # whether the epoch's order has as many fixed pieces as ranks began it
    fixed_pieces: int = 0  # number of its order's fixed pieces, if it is another one
    grouped: bool = False  # whether the plan has `groups`
    elastic: bool = False  # whether ranks share each step

    def epoch_pieces(self, world_size: int) -> int:
        """Returns the number of fixed pieces of the epoch's order; the ranks are those that begin it, if none have."""
        if not self.fixed_shares:
            return self.fixed_pieces
        return self.segments[0].world_size if self.segments else world_size


def state_to_dict(state: PlanState) -> dict[str, Any]:
    """Returns the state as numbers, strings, lists and dictionaries, as JSON and `torch.save(weights_only)` need it.

    shuffle becomes "full", False, ["window", chunks], ["weighted", digest] or ["classes", digest], with fixed shares
    ["shares", that], with fixed pieces ["pieces", [their number, that]], with groups ["aspect", all that], with elastic
    shares ["elastic", all that]; segments a
    list of [world_size, batch_size, steps]; echo a number, ["mixed", echo, echo_distance] or ["auto", echo, next_echo].
    NumPy's integers become Python's.
    """
    # A list: torch.distributed.checkpoint flattens dictionaries, and misses keys that another shuffle does not have.
    shuffle: Any = ["window", state.shuffle.chunks] if isinstance(state.shuffle, ChunkWindow) else state.shuffle
    if isinstance(state.shuffle, DrawingDigest):
        shuffle = [state.shuffle.kind, state.shuffle.digest]
    if state.fixed_shares:
        shuffle = ["shares", shuffle]
    elif state.fixed_pieces:
        shuffle = ["pieces", [int(state.fixed_pieces), shuffle]]
    if state.grouped:
        shuffle = ["aspect", shuffle]
    if state.elastic:
        shuffle = ["elastic", shuffle]
    # The keys stay as in the first release, so that all releases can load one another's checkpoints.
    echo: Any = int(state.echo)
    if state.echo_distance:
        echo = ["mixed", echo, int(state.echo_distance)]
    elif state.next_echo is not None:
        echo = ["auto", echo, int(state.next_echo)]
    return {
        "version": STATE_VERSION,
        "header_digest": state.header_digest,
        "seed": int(state.seed),
        "epoch": int(state.epoch),
        "shuffle": shuffle,
        "ends": state.ends,
        "echo": echo,
        "echo_position": int(state.echo_position),
        "segments": [[int(number) for number in segment] for segment in state.segments],
    }


def state_from_dict(data: object) -> PlanState:
    """Returns the state that `state_to_dict` wrote.

    Raises:
        StateError: it is no such dictionary, of a newer version, or a key is missing, unknown or has a wrong value.
    """
    if not isinstance(data, dict) or "version" not in data:
        raise StateError(
            f'a {type(data).__name__} without "version" is not a loader state; pass what state_dict() gave'
        )
    if not is_whole(data["version"]) or data["version"] != STATE_VERSION:
        raise StateError(
            f"the loader state has version {data['version']!r:.80}, this fastload reads version {STATE_VERSION}: "
            "install the release that wrote it, or begin the epoch anew without it"
        )
    if data.keys() != _KEYS:
        missing, unknown = sorted(_KEYS - data.keys()), sorted(map(str, data.keys() - _KEYS))
        raise StateError(f"the loader state is damaged: keys missing: {missing}, unknown: {unknown!s:.200}")
    for name in ("header_digest", "ends"):
        if not isinstance(data[name], str):
            raise _bad(name, data)
    for name in ("seed", "epoch", "echo_position"):
        if not is_whole(data[name]) or not 0 <= data[name] < 2**64:
            raise _bad(name, data)
    echo, distance, next_echo = _echo_from(data)
    if data["echo_position"] > last_started_step(echo, distance):
        raise _bad("echo_position", data)
    shuffle = data["shuffle"]
    if elastic := _is_named(shuffle, "elastic"):
        shuffle = shuffle[1]
    if grouped := _is_named(shuffle, "aspect"):
        shuffle = shuffle[1]
    fixed_pieces = 0
    if fixed_shares := _is_named(shuffle, "shares"):
        shuffle = shuffle[1]
    elif _is_named(shuffle, "pieces"):
        if not _is_pair(shuffle[1]) or not is_whole(shuffle[1][0]) or not 0 < shuffle[1][0] <= _MOST:
            raise _bad("shuffle", data)
        fixed_pieces, shuffle = shuffle[1]
    if _is_named(shuffle, "window") and is_whole(shuffle[1]) and 0 < shuffle[1] <= _MOST:
        shuffle = ChunkWindow(shuffle[1])
    for kind in ("weighted", "classes"):
        if _is_named(shuffle, kind) and _is_digest(shuffle[1]) and not fixed_shares and not fixed_pieces:
            shuffle = DrawingDigest(kind, shuffle[1])
    known = isinstance(shuffle, (ChunkWindow, DrawingDigest)) or _is_text(shuffle, "full")
    if shuffle is not False and not known:
        raise _bad("shuffle", data)
    try:
        ends = resolve_ends(data["ends"], shuffle)
        segments = checked_segments(data["segments"])
    except OptionError as error:
        raise StateError(f"the loader state is damaged: {error!s:.500}") from error
    if any(max(segment) > _MOST for segment in segments):
        raise _bad("segments", data)
    return PlanState(
        **{name: data[name] for name in ("header_digest", "seed", "epoch", "echo_position")},
        shuffle=shuffle,
        ends=ends,
        echo=echo,
        echo_distance=distance,
        next_echo=next_echo,
        segments=segments,
        fixed_shares=fixed_shares,
        fixed_pieces=fixed_pieces,
        grouped=grouped,
        elastic=elastic,
    )


def check_state(
    state: PlanState,
    *,
    header_digest: str,
    seed: int,
    shuffle: SavedShuffle,
    grouped: bool = False,
    elastic: bool = False,
) -> None:
    """Raises StateError, naming all that differs, if a state is of other data or another order than the loader's.

    Ends, echo and world size may differ: they change neither the order nor which rows are unread.
    """
    differing = [
        f"{name} is {ours!r} here and {theirs!r} in the state"
        for name, ours, theirs in (
            ("the file's header_digest", header_digest, state.header_digest),
            ("seed", seed, state.seed),
            ("shuffle", shuffle, state.shuffle),
            ("group_by", "aspect" if grouped else None, "aspect" if state.grouped else None),
            ("share", "elastic" if elastic else "a share each", "elastic" if state.elastic else "a share each"),
        )
        if ours != theirs
    ]
    if differing:
        raise StateError(
            f"the loader state belongs to other data or options: {'; '.join(differing)}. "
            "Make the loader with the state's values, or begin without the state."
        )


def _echo_from(data: dict[str, Any]) -> tuple[int, int, int | None]:
    """Returns factor, distance and the next epoch's factor."""
    echo = data["echo"]
    kind, factor, other = echo if isinstance(echo, (list, tuple)) and len(echo) == 3 else ("given", echo, 0)
    whole = is_whole(factor) and is_whole(other) and 1 <= factor < 2**31 and 0 <= other < 2**31
    if whole and _is_text(kind, "given"):
        return factor, 0, None
    if whole and _is_text(kind, "auto"):
        return factor, 0, other
    if whole and _is_text(kind, "mixed") and other:
        return factor, other, None
    raise _bad("echo", data)


def _is_text(value: object, text: str) -> bool:
    # Not by `==` alone: an array in a state compares element by element.
    return isinstance(value, str) and value == text


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 16 and _DIGEST_CHARACTERS.issuperset(value)


def _is_named(value: object, name: str) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a list or tuple of this name and one more value."""
    return _is_pair(value) and _is_text(value[0], name)


def _is_pair(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple)) and len(value) == 2


def _bad(name: str, data: dict[str, Any]) -> StateError:
    return StateError(f"the loader state is damaged: {name} is {data[name]!r:.200}")


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
