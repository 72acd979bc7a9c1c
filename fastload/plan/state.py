"""Saved states: where a loader or sampler stands, as a plain dictionary that any checkpoint can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from fastload.errors import OptionError, StateError, is_whole
from fastload.plan.chunk_order import ChunkWindow
from fastload.plan.class_batches import ClassBatches
from fastload.plan.echo_schedule import last_started_step
from fastload.plan.order import Ends, ResolvedShuffle, resolve_ends
from fastload.plan.shares import Segment, checked_segments
from fastload.plan.weighted import Weighted

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
