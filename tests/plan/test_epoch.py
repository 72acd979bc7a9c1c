"""Batches of an epoch: equal steps, every row as often as promised, resumed and cut anew."""

import doctest
import pickle
import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastload.plan.epoch as epoch_module
from fastload.errors import OptionError, StateError
from fastload.plan import ChunkWindow, EpochPlan, rank_share
from fastload.plan.order import make_order
from fastload.plan.randomness import batchmate_reuse
from fastload.plan.shares import Segment

# Numbers alone are quickly made: more examples than elsewhere.
EXAMPLES = settings().max_examples

SHUFFLES = st.sampled_from([False, "full", "chunk", ChunkWindow(1), ChunkWindow(3)])
ENDS = st.sampled_from(["drop", "pad", "exact"])
NEVER = st.just(False)
ORDERS = st.sampled_from(["full", False, ChunkWindow(1), ChunkWindow(2), ChunkWindow(5)])


@st.composite
def plans(draw, ends=ENDS, max_rows=400, fixed_shares=NEVER):
    start = draw(st.integers(0, 40))
    options = {
        "rows": range(start, start + draw(st.integers(0, max_rows))),
        "chunk_rows": draw(st.integers(1, 30)),
        "seed": draw(st.integers(0, 5)),
        "epoch": draw(st.integers(0, 5)),
        "world_size": draw(st.integers(1, 12)),
        "batch_size": draw(st.integers(1, 24)),
        "shuffle": draw(SHUFFLES),
        "ends": draw(ends),
    }
    enough = options["ends"] == "drop" or len(options["rows"]) >= options["world_size"]
    return EpochPlan(**options, fixed_shares=enough and draw(fixed_shares))


def all_batches(plan):
    return [list(plan.batches(rank)) for rank in range(plan.world_size)]


def counted(batches_of_ranks, steps=None):
    """How often each row was given as valid."""
    return Counter(
        row for batches in batches_of_ranks for batch in batches[:steps] for row in batch.rows[batch.valid].tolist()
    )


@settings(max_examples=4 * EXAMPLES)
@given(plan=plans())
def test_only_the_steps_in_which_shares_end_hold_repeats_which_begin_again_at_the_start_of_the_share(plan):
    fewest = len(plan.rows) // plan.world_size
    for rank, batches in enumerate(all_batches(plan)):
        size = len(rank_share(len(plan.rows), rank=rank, world_size=plan.world_size))
        rows = [row for batch in batches for row in batch.rows.tolist()]
        assert rows == [rows[i % size] for i in range(len(rows))] if size else set(rows) <= set(plan.rows)
        for batch in batches[: fewest // plan.batch_size]:
            assert batch.valid.all() and batch.global_valid == plan.world_size * plan.batch_size
            assert np.unique(batch.rows).size == plan.batch_size
    # Repeats fill less than one step of all ranks, whatever is repeated.
    assert plan.num_steps * plan.world_size * plan.batch_size - len(plan.rows) < plan.world_size * plan.batch_size


@settings(max_examples=3 * EXAMPLES)
@given(plan=plans(), window=st.integers(1, 20))
def test_at_most_one_chunk_a_border_is_read_by_two_ranks_repeats_included(plan, window):
    if len(plan.rows) < plan.world_size:
        # An empty share repeats other ranks' rows, so only rows that count are read once.
        plan = replace(plan, ends="exact")
    plan = replace(plan, shuffle=ChunkWindow(window))
    chunks = [set() for _ in range(plan.world_size)]
    for rank, batches in enumerate(all_batches(plan)):
        for batch in batches:
            rows = batch.rows if len(plan.rows) >= plan.world_size else batch.rows[batch.valid]
            chunks[rank].update((rows // plan.chunk_rows).tolist())
    assert sum(map(len, chunks)) - len(set().union(*chunks)) <= plan.world_size - 1


@st.composite
def replanned_epochs(draw):
    """Plans of one epoch, first to last, each with how many of its steps are done before the next takes over."""
    plan = draw(plans(max_rows=250, fixed_shares=st.booleans()))
    history = [(plan, draw(st.integers(0, plan.num_steps)))]
    for _ in range(draw(st.integers(1, 3))):
        plan, steps = history[-1]
        ranks, batch_size = draw(st.integers(1, 12)), draw(st.integers(1, 24))
        if plan.fixed_shares:
            ranks, batch_size = plan.world_size, plan.batch_size
        plan = replace(plan, segments=plan.segments_after(steps), world_size=ranks, batch_size=batch_size)
        history.append((plan, draw(st.integers(0, plan.num_steps))))
    return history


@settings(max_examples=12 * EXAMPLES)
@given(history=replanned_epochs())
def test_ranks_agree_and_every_row_comes_as_often_as_promised_before_and_after_every_change(history):
    done, most, seen = 0, 0, Counter()
    for plan, steps in history:
        batches, step_rows = all_batches(plan), plan.world_size * plan.batch_size
        assert plan.steps_done == done and {len(of_rank) for of_rank in batches} == {plan.num_steps}
        for number, step_of_ranks in enumerate(zip(*batches, strict=True)):
            total = sum(int(batch.valid.sum()) for batch in step_of_ranks)
            assert {batch.global_valid for batch in step_of_ranks} == {total}
            assert {batch.step for batch in step_of_ranks} == {done + number}
            for batch in step_of_ranks:
                assert batch.rows.shape == batch.valid.shape == (plan.batch_size,)
                assert batch.rows.dtype == np.int64 and batch.valid.dtype == np.bool_
                assert batch.valid.all() or plan.ends == "exact"
        if plan.fixed_shares:
            for piece, of_rank in zip(np.array_split(plan.rows, plan.world_size), batches, strict=True):
                assert all(np.isin(batch.rows, piece).all() for batch in of_rank)
        whole = seen + counted(batches)
        if plan.ends == "exact":
            assert whole == Counter(plan.rows)
        elif plan.ends == "drop":
            assert set(whole) <= set(plan.rows) and set(whole.values()) <= {1}
            assert len(plan.rows) - whole.total() < step_rows
        else:
            assert set(whole) == set(plan.rows)
            assert not plan.num_steps or whole.total() - len(plan.rows) < most + step_rows
        if plan.ends != "drop" and not plan.segments:  # no step more than the longest share needs
            longest = len(rank_share(len(plan.rows), rank=0, world_size=plan.world_size))
            assert plan.num_steps == -(-longest // plan.batch_size)
        seen += counted(batches, steps)
        done, most = done + steps, most + step_rows


def same_batches(left, right):
    return len(left) == len(right) and all(
        np.array_equal(a.rows, b.rows) and np.array_equal(a.valid, b.valid) and a[2:] == b[2:]
        for a, b in zip(left, right, strict=True)
    )


@settings(max_examples=2 * EXAMPLES)
@given(plan=plans(max_rows=200, fixed_shares=st.booleans()), data=st.data())
def test_random_access_a_late_start_and_iteration_agree(plan, data):
    rank = data.draw(st.integers(0, plan.world_size - 1))
    batches = list(plan.batches(rank))
    assert same_batches([plan.batch(rank, step) for step in range(plan.num_steps)], batches)
    start = data.draw(st.integers(0, plan.num_steps))
    assert same_batches(list(plan.batches(rank, start)), batches[start:])
    stop = data.draw(st.integers(start, plan.num_steps + 3))
    part = list(plan.batches(rank, start, stop))
    assert same_batches(part, batches[start:stop])
    planned_at_once = [len(batch.rows.base) for batch in part[:1]]
    assert all(count <= (stop - start) * plan.batch_size for count in planned_at_once), "no more than was asked for"
    if batches:
        positions = np.arange(plan.num_steps * plan.batch_size)
        assert np.array_equal(plan.rows_at(rank, positions), np.concatenate([batch.rows for batch in batches]))


@pytest.mark.parametrize("fixed_shares", [False, True])
@pytest.mark.parametrize("shuffle", ["full", "chunk", False])
def test_the_order_does_not_depend_on_the_size_of_a_block(shuffle, fixed_shares, monkeypatch):
    options = {"shuffle": shuffle, "ends": "exact", "fixed_shares": fixed_shares}
    plan = EpochPlan(range(11, 20_000), chunk_rows=70, world_size=2, batch_size=96, **options)
    before = list(plan.batches(1))
    monkeypatch.setattr(epoch_module, "_BLOCK_ROWS", 500)
    assert same_batches(list(plan.batches(1)), before)


@settings(max_examples=3 * EXAMPLES)
@given(plan=plans(fixed_shares=st.booleans()), data=st.data())
def test_same_ranks_and_batches_resume_as_if_never_interrupted(plan, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, plan.num_steps), min_size=1, max_size=3)))
    resumed, done = plan, 0
    for cut in cuts:
        resumed = replace(plan, segments=resumed.segments_after(cut - done))
        done = cut
    assert resumed.num_steps == plan.num_steps - done and resumed.steps_done == done
    for rank in range(plan.world_size):
        assert same_batches(list(resumed.batches(rank)), list(plan.batches(rank))[done:])


@pytest.mark.parametrize("shuffle", ["full", "chunk"])
def test_epochs_and_seeds_differ_and_repeat(shuffle):
    def order(**options):
        plan = EpochPlan(range(2000), chunk_rows=16, batch_size=2000, shuffle=shuffle, **options)
        return plan.batch(0, 0).rows

    orders = [order(seed=seed, epoch=epoch) for seed in range(3) for epoch in range(3)]
    for i, one in enumerate(orders):
        assert all((one == other).mean() < 0.05 for other in orders[:i])
    assert np.array_equal(order(seed=2, epoch=1), orders[7])


@pytest.mark.parametrize("shuffle", ["full", "chunk", False])
def test_a_billion_rows_on_1024_ranks_need_little_memory(shuffle):
    tracemalloc.start()
    try:
        plan = EpochPlan(range(10**9), chunk_rows=72, world_size=1024, batch_size=256, shuffle=shuffle)
        batch = next(plan.batches(1023))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 20e6
    assert np.unique(batch.rows).size == 256 and batch.rows.max() < 10**9
    resumed = replace(plan, world_size=1000, segments=plan.segments_after(3000))
    assert np.unique(resumed.batch(999, 0).rows).size == 256


def test_drop_may_leave_no_step_and_an_empty_range_none():
    assert EpochPlan(range(9), batch_size=10, shuffle="full").num_steps == 0
    empty = EpochPlan(range(4, 4), chunk_rows=3, batch_size=10, shuffle="chunk", ends="exact")
    assert empty.num_steps == 0 and list(empty.batches(0)) == []
    with pytest.raises(OptionError, match="no row"):
        empty.rows_at(0, np.arange(1))


def test_a_plan_pickles_and_compares_by_its_options():
    plan = EpochPlan(range(100), chunk_rows=7, seed=np.int64(3), shuffle="chunk", segments=[[1, 1, 5]])
    first = plan.batch(0, 0)
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan and hash(copy) == hash(plan) and plan.segments == (Segment(1, 1, 5),)
    assert np.array_equal(copy.batch(0, 0).rows, first.rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, "resolve_shuffle"),
        ({"shuffle": "auto"}, "resolve_shuffle"),
        ({"shuffle": "yes"}, 'choose True .*"full", "chunk" or ChunkWindow'),
        ({"shuffle": "chunk", "chunk_rows": 0}, "needs a file with chunks"),
        ({"ends": "wrap"}, '"drop", "pad", "exact"'),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"world_size": 0}, "world_size=0"),
        ({"seed": -1}, "seed=-1"),
        ({"epoch": 1.5}, "epoch=1.5"),
        ({"rows": range(0, 10, 2)}, "step 1"),
        ({"rows": 10}, "range of rows"),
        ({"rows": range(2**48 + 1)}, r"2\*\*48"),
        ({"segments": [(1, 2)]}, "world size, batch size, steps"),
        ({"fixed_shares": True, "world_size": 11, "ends": "pad"}, "10 rows do not give each of 11 ranks a row"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        EpochPlan(**({"rows": range(10), "chunk_rows": 2} | options))


def test_ranks_steps_and_positions_out_of_range_are_refused():
    plan = EpochPlan(range(10), world_size=2, batch_size=2)
    with pytest.raises(OptionError, match=r"rank 2 is outside 0\.\.1"):
        plan.batches(2)
    with pytest.raises(OptionError, match=r"step 3 is outside 0\.\.2"):
        plan.batch(0, 3)
    with pytest.raises(OptionError, match="step -1"):
        plan.batches(0, -1)
    with pytest.raises(OptionError, match="position -1"):
        plan.rows_at(0, np.array([3, -1]))


def test_segments_longer_than_the_epoch_are_refused():
    EpochPlan(range(10), batch_size=4, segments=((1, 4, 3),))
    with pytest.raises(StateError, match="does not fit this epoch"):
        EpochPlan(range(10), batch_size=4, segments=((1, 4, 4),))
    with pytest.raises(StateError, match="does not fit this epoch"):
        EpochPlan(range(10), batch_size=4, segments=((2, 5, 1), (1, 4, 1)))


# Fixed shares


def test_epochs_and_pieces_are_permuted_apart():
    orders = []
    for epoch in range(3):
        plan = EpochPlan(range(400), world_size=4, batch_size=100, shuffle="full", epoch=epoch, fixed_shares=True)
        orders += [tuple((plan.batch(rank, 0).rows - 100 * rank).tolist()) for rank in range(4)]
    assert len(set(orders)) == 12


@settings(deadline=None)
@given(num_rows=st.integers(8, 80), world_size=st.integers(2, 6), shuffle=ORDERS, seed=st.integers(0, 9))
def test_positions_of_several_ranks_at_once_are_those_of_each(num_rows, world_size, shuffle, seed):
    order = make_order(range(3, 3 + num_rows), 7, shuffle, seed=seed, epoch=1, world_size=world_size, fixed_shares=True)
    positions = np.random.default_rng(seed).permutation(num_rows)
    one_by_one = [order(np.array([position])).item() for position in positions]
    assert order(positions).tolist() == one_by_one and sorted(one_by_one) == list(range(3, 3 + num_rows))


@settings(deadline=None)
@given(
    num_rows=st.integers(6, 200),
    batch_size=st.integers(1, 30),
    order=st.one_of(st.tuples(st.just(1), ORDERS), st.tuples(st.integers(1, 6), st.just(False))),
    epoch=st.integers(0, 3),
)
def test_one_rank_and_unshuffled_ranks_have_the_order_of_every_plan(num_rows, batch_size, order, epoch):
    options = {"world_size": order[0], "shuffle": order[1], "ends": "exact"}
    options |= {"chunk_rows": 7, "epoch": epoch, "batch_size": batch_size}
    fixed, plain = (EpochPlan(range(num_rows), **options, fixed_shares=flag) for flag in (True, False))
    for rank in range(order[0]):
        for here, there in zip(fixed.batches(rank), plain.batches(rank), strict=True):
            assert here.rows.tolist() == there.rows.tolist()


def test_other_ranks_or_batches_wait_for_the_epochs_end():
    fixed = EpochPlan(range(60), world_size=3, batch_size=4, shuffle="full", fixed_shares=True)
    for ranks, batch_size in ((2, 4), (3, 5)):
        with pytest.raises(StateError, match=r"world and batch size that it began with.*not 3 and 4.*between epochs"):
            replace(fixed, segments=((ranks, batch_size, 1),))
        assert replace(fixed, segments=((ranks, batch_size, 0),)) == fixed


def test_batch_mates_meet_again_as_often_as_in_a_full_shuffle_of_the_piece():
    n, world_size, batch_size = 8000, 4, 100
    found = []
    for epoch in range(6):
        plan = EpochPlan(
            range(n), world_size=world_size, batch_size=batch_size, shuffle="full", epoch=epoch, fixed_shares=True
        )
        now, then = (one.rows_at(1, np.arange(n // world_size)) for one in (plan, replace(plan, epoch=epoch + 1)))
        position = np.empty(n, np.int64)
        position[then] = np.arange(then.size)
        found.append(batchmate_reuse(position[now].reshape(-1, batch_size), batch_size))
    # Full shuffle of all rows: 99 / 7999 = 0.0124; of a quarter of them 99 / 1999 = 0.0495, four times as often.
    assert np.mean(found) == pytest.approx(99 / 1999, rel=0.05)


def test_examples_in_docstrings_hold():
    results = doctest.testmod(epoch_module)
    assert results.attempted and not results.failed
