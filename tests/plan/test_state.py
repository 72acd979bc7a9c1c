"""A saved state: comes back equal, refuses what is damaged and what belongs elsewhere."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import StateError
from fastload.plan import ChunkWindow
from fastload.plan.cursor import PlanState, check_state, state_from_dict, state_to_dict
from fastload.plan.shares import Segment

STATE = PlanState(
    header_digest="abc", seed=1, epoch=2, shuffle=ChunkWindow(4), ends="drop", echo=3, echo_position=2,
    segments=(Segment(2, 32, 5), Segment(3, 32, 1)),
)  # fmt: skip


@given(
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 10**6),
    shuffle=st.one_of(st.sampled_from(["full", False]), st.builds(ChunkWindow, st.integers(1, 99).map(np.int64))),
    ends=st.sampled_from(["drop", "pad", "exact"]),
    echo=st.integers(1, 5),
    segments=st.lists(st.builds(Segment, *[st.integers(1, 99)] * 3), max_size=4).map(tuple),
    pieces=st.sampled_from([{}, {"fixed_shares": True}, {"fixed_pieces": 3}, {"fixed_pieces": np.int64(1)}]),
    grouped=st.booleans(),
)
def test_a_state_comes_back_equal_through_json(seed, epoch, shuffle, ends, echo, segments, pieces, grouped):
    state = PlanState(
        header_digest="d", seed=seed, epoch=epoch, shuffle=shuffle, ends=ends, echo=echo, echo_position=echo - 1,
        segments=segments, grouped=grouped, **pieces,
    )  # fmt: skip
    of_numpy = replace(
        state, seed=np.uint64(seed), epoch=np.int64(epoch), echo=np.int32(echo), echo_position=np.int64(echo - 1),
        segments=tuple(Segment(*map(np.int64, segment)) for segment in segments),
    )  # fmt: skip
    for each in (state, of_numpy):
        assert state_from_dict(json.loads(json.dumps(state_to_dict(each)))) == state


def test_the_dictionary_never_drifts():
    assert state_to_dict(STATE) == {
        "version": 1,
        "header_digest": "abc",
        "seed": 1,
        "epoch": 2,
        "shuffle": ["window", 4],
        "ends": "drop",
        "echo": 3,
        "echo_position": 2,
        "segments": [[2, 32, 5], [3, 32, 1]],
    }


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({"echo_distance": 2, "echo_position": 8}, {"echo": ["mixed", 3, 2], "echo_position": 8}),
        ({"next_echo": 0}, {"echo": ["auto", 3, 0]}),
        ({"next_echo": 4}, {"echo": ["auto", 3, 4]}),
        ({"fixed_shares": True}, {"shuffle": ["shares", ["window", 4]]}),
        ({"fixed_pieces": 2}, {"shuffle": ["pieces", [2, ["window", 4]]]}),
        ({"fixed_pieces": 2, "grouped": True}, {"shuffle": ["aspect", ["pieces", [2, ["window", 4]]]]}),
    ],
)
def test_fixed_pieces_and_echo_of_other_kinds_need_no_other_keys(fields, changed):
    state = replace(STATE, **fields)
    data = json.loads(json.dumps(state_to_dict(state)))
    assert data == state_to_dict(STATE) | changed and state_from_dict(data) == state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"header_digest": 5}, "header_digest is 5"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": True}, "seed is True"),
        ({"epoch": "1"}, "epoch is '1'"),
        ({"epoch": 2**64}, f"epoch is {2**64}"),
        ({"shuffle": True}, "shuffle is True"),
        ({"shuffle": 0}, "shuffle is 0"),
        ({"shuffle": ["window", 0]}, "shuffle is"),
        ({"ends": None}, "ends is None"),
        ({"ends": "wrap"}, "ends='wrap'"),
        ({"echo": 0}, "echo is 0"),
        ({"echo": ["mixed", 2]}, r"echo is \['mixed', 2\]"),
        ({"echo": ["mixed", 2, 0]}, "echo is"),
        ({"echo": ["mixed", 2, None]}, "echo is"),
        ({"echo": ["auto", 0, 1]}, "echo is"),
        ({"echo": ["auto", 2, -1]}, "echo is"),
        ({"echo": ["other", 2, 1]}, "echo is"),
        ({"echo": "auto"}, "echo is 'auto'"),
        ({"echo": ["mixed", 3, 2], "echo_position": 9}, "echo_position is 9"),
        ({"echo_position": 3}, "echo_position is 3"),
        ({"segments": [[1, 2]]}, "segment"),
        ({"segments": None}, "segments=None"),
        ({"shuffle": ["pieces", 2]}, "shuffle is"),
        ({"shuffle": ["pieces", [0, "full"]]}, "shuffle is"),
        ({"shuffle": ["pieces", ["2", "full"]]}, "shuffle is"),
        ({"shuffle": ["pieces", [2, ["shares", "full"]]]}, "shuffle is"),
        ({"shuffle": ["shares", ["aspect", "full"]]}, "shuffle is"),
        ({"shuffle": ["shares"]}, r"shuffle is \['shares'\]"),
        ({"shuffle": ["shares", "half"]}, r"shuffle is \['shares', 'half'\]"),
        ({"shuffle": np.array(["full", "full"])}, "shuffle is array"),
        ({"shuffle": ["window", 2**70]}, "shuffle is"),
        ({"version": np.array([1, 1])}, "version array"),
        ({"echo": [np.array([1, 2]), 2, 1]}, "echo is"),
        ({"echo": ["mixed", 2, 2**62]}, "echo is"),
        ({"segments": [[2**60, 1, 1]]}, "segments is"),
        ({"seed": "9" * 10**6}, r"seed is '9{100,300}\Z"),
        ({"more": 1}, r"unknown: \['more'\]"),
    ],
)
def test_a_damaged_state_is_refused_by_name(changes, message):
    with pytest.raises(StateError, match=message):
        state_from_dict(state_to_dict(STATE) | changes)


def test_a_missing_key_another_object_and_an_unknown_version_are_refused():
    data = state_to_dict(STATE)
    del data["seed"]
    with pytest.raises(StateError, match=r"missing: \['seed'\]"):
        state_from_dict(data)
    for other in (None, [], {}, "state"):
        with pytest.raises(StateError, match="not a loader state"):
            state_from_dict(other)
    for version in (2, 100, "1.0", None):  # named before anything else
        with pytest.raises(StateError, match=f"version {version!r}, this fastload reads version 1"):
            state_from_dict({"version": version, "what a later release adds": 1})


def test_a_state_of_other_data_is_refused_with_both_values():
    check_state(STATE, header_digest="abc", seed=1, shuffle=ChunkWindow(4))
    with pytest.raises(StateError, match="header_digest is 'xyz' here and 'abc' in the state"):
        check_state(STATE, header_digest="xyz", seed=1, shuffle=ChunkWindow(4))
    with pytest.raises(StateError, match=r"seed is 9 here and 1 .*shuffle is 'full' here and ChunkWindow\(chunks=4\)"):
        check_state(STATE, header_digest="abc", seed=9, shuffle="full")
