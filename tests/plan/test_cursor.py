"""Epochs that go on elsewhere: other nodes, ranks, batches and fixed pieces, and with rows that ranks keep."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.errors import StateError
from fastload.plan import ChunkWindow, EchoSchedule, EpochPlan
from fastload.plan.cursor import EpochCursor, Position, drawn, state_from_dict
from fastload.plan.cursor import resumed as rest_of

EXAMPLES = settings().max_examples
SHUFFLES = st.sampled_from([False, "full", ChunkWindow(1), ChunkWindow(3)])


def cursor_of(plan: EpochPlan) -> EpochCursor:
    return EpochCursor(plan, lambda: "digest", drawn)


def resumed(plan: EpochPlan, state: dict, *, echo: int = 1, on_device: bool = False) -> tuple[EpochCursor, Position]:
    """A cursor that loaded a state, and where it is."""
    cursor = cursor_of(plan)
    loaded = cursor.checked(json.loads(json.dumps(state)))
    position = rest_of(plan, loaded, lambda batches, _: EchoSchedule(batches, echo), on_device=on_device)
    cursor.load(position)
    return cursor, position


def counted(plan: EpochPlan, steps: int | None = None) -> list[Counter[int]]:
    """The rows of each rank that count, in so many steps, by default in all."""
    return [
        Counter(row for batch in plan.batches(rank, 0, steps) for row in batch.rows[batch.valid].tolist())
        for rank in range(plan.world_size)
    ]


def reads_its_pieces(plan: EpochPlan) -> bool:
    shares = np.array_split(plan.rows, plan.world_size)
    ranks, read = plan.world_size // plan.fixed_pieces, counted(plan)
    return all(
        sum(read[first : first + ranks], Counter()) == Counter(np.concatenate(shares[first : first + ranks]).tolist())
        for first in range(0, plan.world_size, ranks)
    )


@st.composite
def runs(draw):
    """Plans of one epoch for other nodes each, or for ranks without pieces, in the order in which they take over."""
    options = {"chunk_rows": draw(st.integers(1, 9)), "shuffle": draw(SHUFFLES), "seed": draw(st.integers(0, 9))}
    rows = range(7, 7 + draw(st.integers(16, 200)))
    plans = []
    for _ in range(draw(st.integers(2, 4))):
        nodes, ranks, in_pieces = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.booleans())
        pieces = nodes if in_pieces and nodes > 1 else 0
        batch_size = draw(st.integers(1, 9))
        plans.append(
            EpochPlan(
                rows, **options, ends="exact", epoch=2, world_size=nodes * ranks, batch_size=batch_size,
                fixed_pieces=pieces,
            )
        )  # fmt: skip
    return plans


@settings(max_examples=6 * EXAMPLES)
@given(plans=runs(), data=st.data())
def test_each_row_comes_once_over_all_ranks_and_nodes_and_the_next_epoch_is_in_the_loaders_own_pieces(plans, data):
    cursor = cursor_of(plans[0])
    position, seen = cursor.whole(2), Counter()
    state = cursor.state(position)
    for number, plan in enumerate(plans):
        if number:
            cursor, position = resumed(plan, state)
        steps = position.length if plan is plans[-1] else data.draw(st.integers(0, position.length))
        seen += sum(counted(position.plan, steps), Counter())
        position.steps = position.first + steps
        state = cursor.state(position)
    assert seen == Counter(plans[0].rows)
    following = cursor.whole(3)
    assert following.plan == replace(plans[-1], epoch=3)
    if following.plan.fixed_pieces:
        assert reads_its_pieces(following.plan)


@settings(max_examples=3 * EXAMPLES)
@given(plans=runs(), data=st.data())
def test_a_state_that_is_loaded_where_it_was_saved_changes_nothing(plans, data):
    for plan in plans:
        cursor = cursor_of(plan)
        position = cursor.whole(2)
        position.steps = data.draw(st.integers(0, position.length))
        rest = [list(position.plan.batches(rank, position.steps)) for rank in range(plan.world_size)]
        again = resumed(plan, cursor.state(position))[1].plan
        for rank, batches in enumerate(rest):
            for old, new in zip(batches, again.batches(rank), strict=True):
                assert np.array_equal(old.rows, new.rows) and old[2:5] == new[2:5]


def state_after(steps: int, plan: EpochPlan) -> dict:
    cursor = cursor_of(plan)
    position = cursor.whole(plan.epoch)
    position.steps = steps
    return cursor.state(position)


NODES = EpochPlan(range(120), world_size=6, batch_size=4, shuffle="full", fixed_pieces=2)
SHARES = replace(NODES, fixed_pieces=6)
PLAIN = replace(NODES, fixed_pieces=0)


def test_a_state_says_how_many_pieces_its_epoch_has_and_a_piece_a_rank_as_before():
    assert state_after(1, NODES)["shuffle"] == state_after(0, NODES)["shuffle"] == ["pieces", [2, "full"]]
    assert state_after(1, SHARES)["shuffle"] == state_after(0, SHARES)["shuffle"] == ["shares", "full"]
    assert state_after(1, PLAIN)["shuffle"] == "full"
    elsewhere = replace(PLAIN, world_size=2)
    for begun, pieces in ((NODES, 2), (SHARES, 6)):
        cursor, position = resumed(elsewhere, state_after(2, begun))
        position.steps = 1
        again = state_from_dict(cursor.state(position))
        assert again.epoch_pieces(99) == pieces and again.segments == ((6, 4, 2), (2, 4, 1))


def test_ranks_that_keep_their_share_go_on_with_no_other_epoch_and_begin_any():
    for state, named in ((state_after(1, NODES), "2 fixed pieces and changing"), (state_after(1, PLAIN), "changing")):
        with pytest.raises(StateError, match=f"within an epoch of {named} shares, world size 6.*would need rows"):
            resumed(SHARES, state, on_device=True)
        assert resumed(SHARES, state_after(0, NODES), on_device=True)[1].plan == SHARES
    with pytest.raises(StateError, match=r'of fixed shares, world size 6.*cache="device" and the state'):
        resumed(replace(SHARES, world_size=3, fixed_pieces=3), state_after(1, SHARES), on_device=True)
    for over in (state_after(5, NODES), state_after(5, PLAIN)):
        cursor, position = resumed(SHARES, over, on_device=True)
        assert position.finished and cursor.coming().plan == replace(SHARES, epoch=1)


def test_a_device_with_all_rows_keeps_to_the_shares_of_a_state_for_good_and_to_pieces_for_the_epoch():
    cursor, position = resumed(PLAIN, state_after(1, SHARES), on_device=True)
    assert position.plan.fixed_pieces == cursor.plan.fixed_pieces == 6
    cursor, position = resumed(PLAIN, state_after(1, NODES), on_device=True)
    assert (position.plan.epoch_pieces, position.plan.fixed_pieces, cursor.plan.fixed_pieces) == (2, 0, 0)


def test_echoes_of_a_first_batch_count_only_for_the_ranks_and_pieces_that_have_it():
    def begun(plan):
        cursor = cursor_of(plan)
        return cursor.state(Position(plan, EchoSchedule(plan.num_steps, 3), 1))

    assert begun(NODES)["echo_position"] == 1
    assert resumed(NODES, begun(NODES), echo=3)[1].steps == 1
    for plan, device in ((PLAIN, False), (SHARES, False), (replace(SHARES, batch_size=5), True)):
        other = SHARES if device else NODES
        position = resumed(plan, begun(other), echo=3, on_device=device)[1]
        assert position.steps == 0 and position.plan == plan
    # Other ranks in as many pieces do not read the batch again, and others do not read it at all.
    position = resumed(replace(NODES, world_size=2), begun(NODES), echo=3)[1]
    assert position.plan.segments == ((6, 4, 1),) and position.plan.begun_pieces == 2


def test_a_state_of_pieces_that_its_ranks_do_not_make_is_damaged():
    state = state_after(1, NODES) | {"shuffle": ["pieces", [4, "full"]]}
    with pytest.raises(StateError, match="4 fixed pieces was not begun by 6 ranks"):
        resumed(PLAIN, state)


@pytest.mark.parametrize("begun", [NODES, SHARES, PLAIN])
def test_a_sampler_reads_the_rest_of_any_pieces_once(begun):
    read = sum(counted(begun, 2), Counter())
    sampler = cursor_of(EpochPlan(range(120), world_size=5, batch_size=1, shuffle="full", ends="exact"))
    rest = sampler.rest(state_after(2, begun)).plan
    assert read + sum(counted(rest), Counter()) == Counter(range(120))
    assert rest.following == replace(sampler.plan, epoch=1)
