"""Fixed shares: each rank has the same rows in every epoch, every row comes once, all ranks take as many steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.errors import OptionError, StateError
from fastload.plan import ChunkWindow, EpochPlan
from fastload.plan.order import make_order
from fastload.plan.randomness import batchmate_reuse

SHUFFLES = st.one_of(st.sampled_from(["full", False]), st.builds(ChunkWindow, st.integers(1, 5)))


@settings(deadline=None)
@given(
    start=st.integers(0, 50),
    num_rows=st.integers(1, 300),
    world_size=st.integers(1, 6),
    batch_size=st.integers(1, 40),
    chunk_rows=st.integers(1, 30),
    shuffle=SHUFFLES,
    ends=st.sampled_from(["drop", "pad", "exact"]),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 9),
)
def test_ranks_keep_their_piece_and_read_each_row_once_in_equal_steps(
    start, num_rows, world_size, batch_size, chunk_rows, shuffle, ends, seed, epoch
):
    rows = range(start, start + num_rows)
    options = {"chunk_rows": chunk_rows, "seed": seed, "epoch": epoch, "world_size": world_size}
    options |= {"batch_size": batch_size, "shuffle": shuffle, "ends": ends, "fixed_shares": True}
    if num_rows < world_size and ends != "drop":
        with pytest.raises(OptionError, match=f"{num_rows} rows do not give each of {world_size} ranks"):
            EpochPlan(rows, **options)
        return
    plan = EpochPlan(rows, **options)
    batches = [list(plan.batches(rank)) for rank in range(world_size)]
    assert {len(of_rank) for of_rank in batches} == {plan.num_steps}
    for piece, of_rank in zip(np.array_split(rows, world_size), batches, strict=True):
        piece = piece.tolist()
        read = [row for batch in of_rank for row in batch.rows[batch.valid].tolist()]
        assert all(set(batch.rows.tolist()) <= set(piece) for batch in of_rank)
        if ends == "exact":
            assert sorted(read) == piece
        elif ends == "pad":
            assert sorted(set(read)) == piece
        else:
            assert len(set(read)) == len(read) == plan.num_steps * batch_size
    for of_ranks in zip(*batches, strict=True):
        assert {batch.global_valid for batch in of_ranks} == {sum(int(batch.valid.sum()) for batch in of_ranks)}


def test_epochs_and_pieces_are_permuted_apart():
    orders = []
    for epoch in range(3):
        plan = EpochPlan(range(400), world_size=4, batch_size=100, shuffle="full", epoch=epoch, fixed_shares=True)
        orders += [tuple((plan.batch(rank, 0).rows - 100 * rank).tolist()) for rank in range(4)]
    assert len(set(orders)) == 12


GOLDEN_FULL = [[[6, 5], [3, 4]], [[8, 9], [7, 10]], [[13, 11], [12, 13]]]
GOLDEN_WINDOWS = [[[10, 3, 11, 4, 5, 9], [6, 2, 8, 1, 0, 7]], [[15, 20, 16, 19, 17, 18], [13, 12, 14, 22, 23, 21]]]


def test_the_order_never_drifts():
    plan = EpochPlan(range(3, 14), world_size=3, batch_size=2, shuffle="full", seed=7, epoch=2, ends="exact",
                     fixed_shares=True)  # fmt: skip
    assert [[batch.rows.tolist() for batch in plan.batches(rank)] for rank in range(3)] == GOLDEN_FULL
    plan = EpochPlan(range(24), chunk_rows=3, world_size=2, batch_size=6, shuffle=ChunkWindow(2), seed=7,
                     fixed_shares=True)  # fmt: skip
    assert [[batch.rows.tolist() for batch in plan.batches(rank)] for rank in range(2)] == GOLDEN_WINDOWS


@settings(deadline=None)
@given(num_rows=st.integers(8, 80), world_size=st.integers(2, 6), shuffle=SHUFFLES, seed=st.integers(0, 9))
def test_positions_of_several_ranks_at_once_are_those_of_each(num_rows, world_size, shuffle, seed):
    order = make_order(range(3, 3 + num_rows), 7, shuffle, seed=seed, epoch=1, world_size=world_size, fixed_shares=True)
    positions = np.random.default_rng(seed).permutation(num_rows)
    one_by_one = [order(np.array([position])).item() for position in positions]
    assert order(positions).tolist() == one_by_one and sorted(one_by_one) == list(range(3, 3 + num_rows))


@settings(deadline=None)
@given(
    num_rows=st.integers(6, 200),
    batch_size=st.integers(1, 30),
    order=st.one_of(st.tuples(st.just(1), SHUFFLES), st.tuples(st.integers(1, 6), st.just(False))),
    epoch=st.integers(0, 3),
)
def test_one_rank_and_unshuffled_ranks_have_the_order_of_every_plan(num_rows, batch_size, order, epoch):
    options = {"world_size": order[0], "shuffle": order[1], "ends": "exact"}
    options |= {"chunk_rows": 7, "epoch": epoch, "batch_size": batch_size}
    fixed, plain = (EpochPlan(range(num_rows), **options, fixed_shares=flag) for flag in (True, False))
    for rank in range(order[0]):
        for here, there in zip(fixed.batches(rank), plain.batches(rank), strict=True):
            assert here.rows.tolist() == there.rows.tolist()


@pytest.mark.parametrize("segment", [(2, 4, 1), (3, 5, 1)])
def test_other_ranks_or_batches_wait_for_the_epochs_end(segment):
    with pytest.raises(StateError, match=r"world and batch size that it began with.*not 3 and 4.*between epochs"):
        EpochPlan(range(60), world_size=3, batch_size=4, shuffle="full", fixed_shares=True, segments=(segment,))
    EpochPlan(range(60), world_size=3, batch_size=4, shuffle="full", fixed_shares=True, segments=((*segment[:2], 0),))


def test_batch_mates_meet_again_as_often_as_in_a_full_shuffle_of_the_piece():
    n, world_size, batch_size = 8000, 4, 100
    found = []
    for epoch in range(6):
        now, then = (
            EpochPlan(range(n), world_size=world_size, batch_size=batch_size, shuffle="full", epoch=e,
                      fixed_shares=True).rows_at(1, np.arange(n // world_size))
            for e in (epoch, epoch + 1)
        )  # fmt: skip
        position = np.empty(n, np.int64)
        position[then] = np.arange(then.size)
        found.append(batchmate_reuse(position[now].reshape(-1, batch_size), batch_size))
    # Full shuffle of all rows: 99 / 7999 = 0.0124; of a quarter of them 99 / 1999 = 0.0495, four times as often.
    assert np.mean(found) == pytest.approx(99 / 1999, rel=0.05)
