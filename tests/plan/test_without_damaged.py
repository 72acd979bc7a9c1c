"""Batches in which other rows take the place of damaged ones."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fastload.plan import PlannedBatch

ROWS = st.lists(st.integers(0, 12), min_size=1, max_size=12)


def planned_of(rows: list[int], padding: int = 0) -> PlannedBatch:
    valid = np.arange(len(rows)) < len(rows) - padding
    return PlannedBatch(np.array(rows), valid, int(valid.sum()), 3)


@given(rows=ROWS, damaged=st.sets(st.integers(0, 12)), padding=st.integers(0, 12))
def test_damaged_rows_are_replaced_by_the_next_good_ones_and_are_not_valid(rows, damaged, padding):
    planned = planned_of(rows, padding)
    found = planned.without(damaged, world_size=1)
    good = [row not in damaged for row in rows]
    if not any(good):
        assert found is None
        return
    if all(good):
        assert found is planned
        return
    for at, row in enumerate(rows):
        following = [other for other in rows[at:] + rows[:at] if other not in damaged]
        assert found.rows[at] == following[0]
        assert found.valid[at] == (planned.valid[at] and row not in damaged)
    assert found.global_valid == np.count_nonzero(found.valid) and found.step == 3
    counted = set(rows[: len(rows) - padding] if padding < len(rows) else [])
    assert set(found.damaged) == damaged & counted and planned.damaged == ()


@given(rows=ROWS, first=st.sets(st.integers(0, 12)), then=st.sets(st.integers(0, 12)))
def test_rows_found_damaged_one_after_another_give_the_same_batch_as_all_at_once(rows, first, then):
    planned = planned_of(rows)
    at_once, partly = planned.without(first | then, world_size=1), planned.without(first, world_size=1)
    in_turn = partly.without(then, world_size=1) if partly is not None else None
    assert (at_once is None) == (in_turn is None)
    if at_once is not None and in_turn is not None:
        assert at_once.rows.tolist() == in_turn.rows.tolist()
        assert at_once.valid.tolist() == in_turn.valid.tolist()
        assert at_once.global_valid == in_turn.global_valid
        assert set(at_once.damaged) >= set(in_turn.damaged)


def test_with_several_ranks_the_number_of_valid_rows_stays_what_all_of_them_know():
    assert planned_of([1, 2, 3]).without([2], world_size=2).global_valid == 3
    assert planned_of([1, 2, 3]).without([2], world_size=1).global_valid == 2
