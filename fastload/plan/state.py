"""Where in training a loader stands, as a plain dictionary that any checkpoint can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastload.errors import OptionError, StateError

from .options import ChunkWindow, Ends, ResolvedShuffle, is_whole, resolve_ends
from .shares import Segment, checked_segments

STATE_VERSION = 1
_KEYS = frozenset(("version", "header_digest", "seed", "epoch", "shuffle", "ends", "echo", "echo_position", "segments"))
_LATER_KEYS = frozenset(("fixed_shares",))  # always written, and absent in what earlier releases wrote


@dataclass(frozen=True, kw_only=True)
class PlanState:
    """What names the batch that comes next, and the data it comes from. The same on every rank.

    Attributes:
        header_digest: identity of the packed file.
        seed, epoch: as in `EpochPlan`.
        shuffle: resolved, so that a later default cannot change the order.
        ends: as in `EpochPlan`, resolved.
        echo: times each batch is used, 1 or more.
        echo_position: echoes of the batch in hand that are done, in [0, echo). Its batch is not in segments yet.
        segments: what of the epoch is done: `EpochPlan.segments_after(steps)`.
        fixed_shares: as in `EpochPlan`.
    """

    header_digest: str
    seed: int
    epoch: int
    shuffle: ResolvedShuffle
    ends: Ends
    echo: int = 1
    echo_position: int = 0
    segments: tuple[Segment, ...] = ()
    fixed_shares: bool = False


def state_to_dict(state: PlanState) -> dict[str, Any]:
    """The state as numbers, strings, lists and dictionaries only: JSON and `torch.save(weights_only)` take it.

    shuffle becomes "full", False or ["window", chunks]; segments a list of [world_size, batch_size, steps]. NumPy's
    integers become Python's, as both refuse them.
    """
    # No dictionary: torch.distributed.checkpoint takes those apart, and misses a key where another shuffle has none.
    shuffle = ["window", state.shuffle.chunks] if isinstance(state.shuffle, ChunkWindow) else state.shuffle
    return {
        "version": STATE_VERSION,
        "header_digest": state.header_digest,
        "seed": int(state.seed),
        "epoch": int(state.epoch),
        "shuffle": shuffle,
        "ends": state.ends,
        "echo": int(state.echo),
        "echo_position": int(state.echo_position),
        "segments": [[int(number) for number in segment] for segment in state.segments],
        "fixed_shares": bool(state.fixed_shares),
    }


def state_from_dict(data: object) -> PlanState:
    """The state that `state_to_dict` wrote.

    Raises:
        StateError: not such a dictionary, of a newer version, a key missing, unknown or with a value that cannot be.
    """
    if not isinstance(data, dict) or "version" not in data:
        raise StateError(
            f'a {type(data).__name__} without "version" is not a loader state; pass what state_dict() gave'
        )
    if data["version"] != STATE_VERSION:
        raise StateError(
            f"the loader state has version {data['version']!r}, this fastload reads version {STATE_VERSION}: "
            "install the release that wrote it, or begin the epoch anew without it"
        )
    if data.keys() - _LATER_KEYS != _KEYS:
        missing, unknown = sorted(_KEYS - data.keys()), sorted(map(str, data.keys() - _KEYS - _LATER_KEYS))
        raise StateError(f"the loader state is damaged: keys missing: {missing}, unknown: {unknown}")
    if not isinstance(data["header_digest"], str):
        raise _bad("header_digest", data)
    for name, least in (("seed", 0), ("epoch", 0), ("echo", 1), ("echo_position", 0)):
        if not is_whole(data[name]) or not least <= data[name] < 2**64:
            raise _bad(name, data)
    if data["echo_position"] >= data["echo"]:
        raise _bad("echo_position", data)
    fixed_shares = data.get("fixed_shares", False)
    if not isinstance(fixed_shares, bool):
        raise _bad("fixed_shares", data)
    shuffle = _shuffle_from(data)
    try:
        ends = resolve_ends(data["ends"], shuffle)
        segments = checked_segments(data["segments"])
    except OptionError as error:
        raise StateError(f"the loader state is damaged: {error}") from error
    if data["ends"] is None:
        raise _bad("ends", data)
    numbers = {name: data[name] for name in ("header_digest", "seed", "epoch", "echo", "echo_position")}
    return PlanState(**numbers, shuffle=shuffle, ends=ends, segments=segments, fixed_shares=fixed_shares)


def check_state(state: PlanState, *, header_digest: str, seed: int, shuffle: ResolvedShuffle) -> None:
    """Refuse a state of other data or of another order than a loader's own.

    Ends, echo and the world may differ from the state's: they change neither the order nor what is unread.

    Raises:
        StateError: names everything that differs, the state's value and the loader's.
    """
    differing = [
        f"{name} is {ours!r} here and {theirs!r} in the state"
        for name, ours, theirs in (
            ("the file's header_digest", header_digest, state.header_digest),
            ("seed", seed, state.seed),
            ("shuffle", shuffle, state.shuffle),
        )
        if ours != theirs
    ]
    if differing:
        raise StateError(
            f"the loader state belongs to other data or options: {'; '.join(differing)}. "
            "Make the loader with the state's values, or begin without the state."
        )


def _shuffle_from(data: dict[str, Any]) -> ResolvedShuffle:
    shuffle = data["shuffle"]
    if shuffle is False:
        return False
    if shuffle == "full":
        return "full"
    if isinstance(shuffle, (list, tuple)) and len(shuffle) == 2 and shuffle[0] == "window":
        try:
            return ChunkWindow(shuffle[1])
        except OptionError as error:
            raise _bad("shuffle", data) from error
    raise _bad("shuffle", data)


def _bad(name: str, data: dict[str, Any]) -> StateError:
    return StateError(f"the loader state is damaged: {name} is {data[name]!r}")
