"""Batches of rows that are alike: an order of its own, and the laws of all plans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import OptionError, StateError
from fastload.plan import EpochPlan
from fastload.plan.cursor import EpochCursor, drawn, state_from_dict
from fastload.plan.order import likeness


@given(
    rows=st.integers(1, 300),
    batch_size=st.integers(2, 5),
    world=st.integers(1, 3),
    ends=st.sampled_from(["drop", "pad", "exact"]),
    shuffle=st.sampled_from(["full", "chunk"]),
    seed=st.integers(0, 3),
    left=st.integers(0, 40),
    later=st.tuples(st.integers(1, 3), st.integers(1, 5)),
)
def test_grouping_covers_what_the_plan_covers_and_resumes(rows, batch_size, world, ends, shuffle, seed, left, later):
    numbers = np.random.default_rng(seed).integers(0, 50, rows)
    options = {"chunk_rows": 7, "seed": seed, "shuffle": shuffle, "ends": ends}
    plain, grouped = (
        EpochPlan(range(rows), world_size=world, batch_size=batch_size, groups=groups, **options)
        for groups in (None, numbers)
    )
    assert grouped.num_steps == plain.num_steps

    def counted(plan: EpochPlan, steps: int | None = None) -> list[int]:
        batches = [one for rank in range(plan.world_size) for one in plan.batches(rank, 0, steps)]
        return sorted(row for one in batches for row in one.rows[one.valid].tolist())

    # Which rows are left out or repeated hangs on the order, never how many.
    assert len(counted(grouped)) == len(counted(plain))
    if ends == "exact":
        assert counted(grouped) == list(range(rows))
    # Any batch alone is that of the epoch, and what is left after a stop, for other ranks, is what was not read.
    for rank in range(world):
        for step, batch in enumerate(grouped.batches(rank)):
            assert np.array_equal(batch.rows, grouped.batch(rank, step).rows)
    done = min(left, grouped.num_steps)
    rest = EpochPlan(
        range(rows), world_size=later[0], batch_size=later[1], groups=numbers,
        segments=grouped.segments_after(done), **options,
    )  # fmt: skip
    if ends == "exact":
        assert sorted([*counted(grouped, done), *counted(rest)]) == list(range(rows))


def test_batches_hold_images_of_like_shape():
    rng = np.random.default_rng(1)
    sizes = np.stack([rng.integers(200, 700, 4000), rng.integers(200, 700, 4000)], axis=1)
    alone, grouped = (
        EpochPlan(range(4000), chunk_rows=50, batch_size=8, shuffle="chunk", groups=groups)
        for groups in (None, likeness(sizes))
    )

    def padding(plan: EpochPlan) -> float:
        padded = image = 0
        for batch in plan.batches(0):
            padded += len(batch.rows) * int(sizes[batch.rows].max(axis=0).prod())
            image += int(sizes[batch.rows].prod(axis=1).sum())
        return 1 - image / padded

    assert padding(grouped) < 0.5 * padding(alone)
    first = [batch.rows.tolist() for batch in grouped.batches(0)]
    assert first != [batch.rows.tolist() for batch in grouped.following.batches(0)]
    # Shapes do not come in their order: half of the steps are taller than the ones before them.
    ratios = [float((sizes[rows][:, 1] / sizes[rows][:, 0]).mean()) for rows in first]
    rising = np.mean(np.diff(ratios) > 0)
    assert 0.4 < rising < 0.6


def test_a_state_says_that_rows_were_grouped():
    numbers = np.arange(20) % 3
    grouped, plain = (
        EpochCursor(EpochPlan(range(20), batch_size=2, shuffle="full", groups=groups), lambda: "digest")
        for groups in (numbers, None)
    )
    states = [cursor.state(drawn(cursor.standing.plan)) for cursor in (grouped, plain)]
    assert [state_from_dict(state).grouped for state in states] == [True, False]
    assert states[0]["shuffle"] == ["aspect", "full"] and states[1]["shuffle"] == "full"
    for cursor, state in zip((plain, grouped), states, strict=True):
        with pytest.raises(StateError, match="group_by is"):
            cursor.checked(state)


def test_groups_need_a_number_for_each_of_shuffled_rows():
    with pytest.raises(OptionError, match="a number for each of the rows, which are shuffled"):
        EpochPlan(range(9), groups=np.zeros(9, np.int64), shuffle=False)
    with pytest.raises(OptionError, match="a number for each"):
        EpochPlan(range(9), groups=np.zeros(8, np.int64), shuffle="full")
