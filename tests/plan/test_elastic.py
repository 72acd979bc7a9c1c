"""Elastic shares: steps hold the same rows for any number of ranks, and go on with the next row for any other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.errors import OptionError, StateError
from fastload.plan import ChunkWindow, EpochPlan, Weighted

WORLDS = (1, 2, 3, 4, 8)
TAKEN = 24  # rows of a step, which all of them divide
SHUFFLES = st.sampled_from([False, "full", "chunk", ChunkWindow(2)])


def plan_of(rows, ranks, **options):
    return EpochPlan(
        range(5, 5 + rows), chunk_rows=7, world_size=ranks, batch_size=TAKEN // ranks, elastic=True, **options
    )


def steps_of(plan, steps=None):
    """The valid rows of each step, of all ranks one after another."""
    batches = [list(plan.batches(rank)) for rank in range(plan.world_size)]
    assert {len(of_rank) for of_rank in batches} == {plan.num_steps}
    found = []
    for step in zip(*batches, strict=True):
        rows = np.concatenate([batch.rows[batch.valid] for batch in step])
        assert {batch.global_valid for batch in step} == {len(rows)}
        found.append(rows.tolist())
    return found[:steps]


@settings(deadline=None)
@given(
    rows=st.integers(0, 200), shuffle=SHUFFLES, epoch=st.integers(0, 3), ends=st.sampled_from(["drop", "pad", "exact"])
)
def test_steps_are_the_same_for_any_ranks_and_each_row_comes_once(rows, shuffle, epoch, ends):
    options = {"shuffle": shuffle, "seed": 3, "epoch": epoch, "ends": ends}
    alone = steps_of(plan_of(rows, 1, **options))
    for ranks in WORLDS:
        plan = plan_of(rows, ranks, **options)
        assert steps_of(plan) == alone
        for rank in range(ranks):
            for step, batch in enumerate(plan.batches(rank)):
                full = len(batch.rows) == plan.batch_size
                assert full or (ends == "exact" and step == plan.num_steps - 1 and len(batch.rows) >= 1)
                assert batch.valid.all() or ends == "pad" or len(batch.rows) == 1
                assert all(
                    np.array_equal(one, other) for one, other in zip(batch[:2], plan.batch(rank, step)[:2], strict=True)
                )
    seen = [row for step in alone for row in step]
    assert len(seen) == len(set(seen)) == (rows // TAKEN * TAKEN if ends == "drop" else rows)


@settings(deadline=None)
@given(
    rows=st.integers(1, 300),
    shuffle=SHUFFLES,
    history=st.lists(st.tuples(st.sampled_from(WORLDS), st.integers(0, 4)), min_size=1, max_size=4),
    ends=st.sampled_from(["drop", "exact"]),
)
def test_other_ranks_go_on_with_the_very_next_step(rows, shuffle, history, ends):
    options = {"shuffle": shuffle, "seed": 1, "ends": ends}
    whole, found, plan = steps_of(plan_of(rows, 1, **options)), [], plan_of(rows, history[0][0], **options)
    for ranks, steps in history:
        plan = replace(plan, world_size=ranks, batch_size=TAKEN // ranks)
        steps = min(steps, plan.num_steps)
        assert plan.steps_done == len(found)
        found += steps_of(plan, steps)
        plan = replace(plan, segments=plan.segments_after(steps))
    assert found + steps_of(plan) == whole


@settings(deadline=None)
@given(rows=st.integers(1, 200), first=st.integers(1, 9), second=st.integers(1, 9), steps=st.integers(0, 5))
def test_with_another_size_of_steps_the_next_row_comes_next(rows, first, second, steps):
    plan = EpochPlan(range(rows), batch_size=first, world_size=2, shuffle="full", ends="exact", elastic=True)
    sequence = EpochPlan(range(rows), batch_size=rows, shuffle="full", ends="exact", elastic=True).batch(0, 0).rows
    steps = min(steps, plan.num_steps)
    seen = [row for step in steps_of(plan, steps) for row in step]
    rest = replace(plan, world_size=3, batch_size=second, segments=plan.segments_after(steps))
    seen += [row for step in steps_of(rest) for row in step]
    assert sorted(seen) == list(range(rows))
    if rows >= steps * 2 * first:
        assert seen[: steps * 2 * first] == sequence[: steps * 2 * first].tolist()


def test_rows_drawn_by_weight_are_the_same_for_any_ranks():
    weights = Weighted(np.arange(1, 101))
    alone = steps_of(plan_of(100, 1, shuffle=weights))
    for ranks in WORLDS:
        plan = plan_of(100, ranks, shuffle=weights)
        assert steps_of(plan) == alone
        times = np.concatenate([batch.times for rank in range(ranks) for batch in plan.batches(rank)])
        assert len(set(times.tolist())) == len(times)


def test_what_elastic_shares_cannot_be_is_an_error():
    with pytest.raises(OptionError, match="fixed pieces do not"):
        EpochPlan(range(40), world_size=2, batch_size=4, elastic=True, fixed_pieces=2)
    with pytest.raises(OptionError, match="rank 3 is outside"):
        plan_of(40, 3).batches(3)
    plan = plan_of(40, 2)
    with pytest.raises(StateError, match=r"do not fit this epoch of 40 rows|damaged"):
        replace(plan, segments=((2, 12, 50),))
