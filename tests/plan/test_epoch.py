"""Batches of an epoch: equal steps, every row as often as promised, resumed and cut anew."""

import doctest
import pickle
import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fastload.plan.epoch as epoch_module
from fastload.errors import OptionError, StateError
from fastload.plan import ChunkWindow, EpochPlan, rank_share
from fastload.plan.order import make_order
from fastload.plan.randomness import batchmate_reuse
from fastload.plan.shares import Segment, share_ranks

# Numbers alone are quickly made: more examples than elsewhere.
EXAMPLES = settings().max_examples

SHUFFLES = st.sampled_from([False, "full", "chunk", ChunkWindow(1), ChunkWindow(3)])
ENDS = st.sampled_from(["drop", "pad", "exact"])
NEVER = st.just(False)
ORDERS = st.sampled_from(["full", False, ChunkWindow(1), ChunkWindow(2), ChunkWindow(5)])


@st.composite
def plans(draw, ends=ENDS, max_rows=400, in_pieces=NEVER):
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
    world_size = options["world_size"]
    divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
    in_pieces = draw(in_pieces) and enough
    return EpochPlan(**options, fixed_pieces=draw(st.sampled_from(divisors)) if in_pieces else 0)


def all_batches(plan):
    return [list(plan.batches(rank)) for rank in range(plan.world_size)]


def counted(batches_of_ranks, steps=None):
    """How often each row was given as valid."""
    return Counter(
        row for batches in batches_of_ranks for batch in batches[:steps] for row in batch.rows[batch.valid].tolist()
    )


@given(
    num_rows=st.integers(1, 60),
    more=st.integers(0, 150),
    shuffle=SHUFFLES,
    ends=st.sampled_from(["pad", "exact"]),
    elastic=st.booleans(),
)
def test_ranks_beyond_the_rows_repeat_each_row_as_often_as_any_other(num_rows, more, shuffle, ends, elastic):
    world_size = num_rows + more
    plan = EpochPlan(
        range(num_rows), chunk_rows=7, world_size=world_size, shuffle=shuffle, ends=ends, elastic=elastic, seed=3
    )
    (batches,) = zip(*all_batches(plan), strict=True)  # of the one step
    rows = np.concatenate([batch.rows for batch in batches])
    assert sum(batch.valid.sum() for batch in batches) == num_rows == batches[0].global_valid
    assert set(np.bincount(rows, minlength=num_rows)) <= {world_size // num_rows, -(-world_size // num_rows)}
    if not elastic:  # each time is a draw of its own
        times = [0 if batch.times is None else int(batch.times[0]) for batch in batches]
        assert len(set(zip(rows.tolist(), times, strict=True))) == world_size


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


def rows_of_nodes(plan):
    """The rows of each piece: those of the shares, in the file's order, of as many ranks."""
    shares = np.array_split(plan.rows, plan.world_size)
    ranks = plan.world_size // plan.fixed_pieces
    return [np.concatenate(shares[first : first + ranks]) for first in range(0, plan.world_size, ranks)]


@st.composite
def replanned_epochs(draw):
    """Plans of one epoch, first to last, each with how many of its steps are done before the next takes over."""
    plan = draw(plans(max_rows=250, in_pieces=st.booleans()))
    history = [(plan, draw(st.integers(0, plan.num_steps)))]
    for _ in range(draw(st.integers(1, 3))):
        plan, steps = history[-1]
        ranks, batch_size = draw(st.integers(1, 12)), draw(st.integers(1, 24))
        pieces = {"begun_pieces": plan.epoch_pieces, "fixed_pieces": 0}  # the next epoch has none
        segments = plan.segments_after(steps)
        plan = replace(plan, segments=segments, world_size=ranks, batch_size=batch_size, **pieces)
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
                assert batch.rows.shape == batch.valid.shape
                assert batch.rows.dtype == np.int64 and batch.valid.dtype == np.bool_
                if plan.ends == "exact":
                    assert batch.valid.all() or len(batch.rows) == 1
                    assert 1 <= len(batch.rows) <= plan.batch_size
                    assert len(batch.rows) == plan.batch_size or number == plan.num_steps - 1
                else:
                    assert len(batch.rows) == plan.batch_size
                    assert batch.valid.all() or plan.ends == "pad"
            if plan.ends == "exact":
                assert sum(map(len, (batch.rows for batch in step_of_ranks))) - total < plan.world_size
        if plan.fixed_pieces:
            node_rows, ranks = rows_of_nodes(plan), plan.world_size // plan.fixed_pieces
            for rank, of_rank in enumerate(batches):
                assert all(np.isin(batch.rows, node_rows[rank // ranks]).all() for batch in of_rank)
        whole = seen + counted(batches)
        if plan.ends == "drop":
            assert set(whole) <= set(plan.rows) and set(whole.values()) <= {1}
            assert len(plan.rows) - whole.total() < step_rows
        else:
            assert whole == Counter(plan.rows)
        if plan.ends != "drop" and not plan.segments:  # no step more than the longest share needs
            longest = len(rank_share(len(plan.rows), rank=0, world_size=plan.world_size))
            assert plan.num_steps == -(-longest // plan.batch_size)
        seen += counted(batches, steps)
        done, most = done + steps, most + step_rows


def same_batches(left, right):
    return len(left) == len(right) and all(
        np.array_equal(a.rows, b.rows)
        and np.array_equal(a.valid, b.valid)
        and np.array_equal(a.times, b.times)
        and a[2:5] == b[2:5]
        for a, b in zip(left, right, strict=True)
    )


@settings(max_examples=2 * EXAMPLES)
@given(plan=plans(max_rows=200, in_pieces=st.booleans()), data=st.data())
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
        rows = np.concatenate([batch.rows for batch in batches])
        assert np.array_equal(plan.rows_at(rank, positions)[: len(rows)], rows)


@pytest.mark.parametrize("fixed_pieces", [0, 2])
@pytest.mark.parametrize("shuffle", ["full", "chunk", False])
def test_the_order_does_not_depend_on_the_size_of_a_block(shuffle, fixed_pieces, monkeypatch):
    options = {"shuffle": shuffle, "ends": "exact", "fixed_pieces": fixed_pieces}
    plan = EpochPlan(range(11, 20_000), chunk_rows=70, world_size=2, batch_size=96, **options)
    before = list(plan.batches(1))
    monkeypatch.setattr(epoch_module, "_BLOCK_ROWS", 500)
    assert same_batches(list(plan.batches(1)), before)


@settings(max_examples=3 * EXAMPLES)
@given(plan=plans(in_pieces=st.booleans()), data=st.data())
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
        ({"fixed_pieces": 11, "world_size": 11, "ends": "pad"}, "10 rows do not give each of 11 ranks a row"),
        ({"fixed_pieces": 2, "world_size": 3}, "fixed_pieces=2: 3 ranks do not make as many groups of one size"),
        ({"fixed_pieces": -1}, "fixed_pieces=-1"),
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


# Fixed pieces


def test_epochs_and_pieces_are_permuted_apart():
    orders = []
    for epoch in range(3):
        plan = EpochPlan(range(400), world_size=4, batch_size=100, shuffle="full", epoch=epoch, fixed_pieces=4)
        orders += [tuple((plan.batch(rank, 0).rows - 100 * rank).tolist()) for rank in range(4)]
    assert len(set(orders)) == 12


@settings(deadline=None)
@given(
    num_rows=st.integers(8, 80),
    nodes=st.integers(2, 4),
    ranks_per_node=st.integers(1, 3),
    shuffle=ORDERS,
    seed=st.integers(0, 9),
)
def test_positions_of_several_ranks_at_once_are_those_of_each(num_rows, nodes, ranks_per_node, shuffle, seed):
    ranks = {"world_size": nodes * ranks_per_node, "fixed_pieces": nodes}
    order = make_order(range(3, 3 + num_rows), 7, shuffle, seed=seed, epoch=1, **ranks)
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
    fixed, plain = (EpochPlan(range(num_rows), **options, fixed_pieces=number) for number in (order[0], 0))
    for rank in range(order[0]):
        for here, there in zip(fixed.batches(rank), plain.batches(rank), strict=True):
            assert here.rows.tolist() == there.rows.tolist()


def test_pieces_of_a_segment_that_its_ranks_do_not_make_are_refused():
    plan = EpochPlan(range(60), world_size=4, batch_size=4, shuffle="full", fixed_pieces=2)
    assert replace(plan, segments=((3, 5, 0),), begun_pieces=3) == plan
    assert replace(plan, segments=((6, 4, 1),), begun_pieces=3).following == replace(plan, epoch=1)
    with pytest.raises(StateError, match="an epoch of 2 fixed pieces was not begun by 3 ranks"):
        replace(plan, segments=((3, 4, 1),))
    with pytest.raises(StateError, match="an epoch of 3 fixed pieces was not begun by 4 ranks"):
        replace(plan, segments=((4, 4, 1),), begun_pieces=3)


def test_batch_mates_meet_again_as_often_as_in_a_full_shuffle_of_the_piece():
    n, world_size, batch_size = 8000, 4, 100
    found = []
    for epoch in range(6):
        plan = EpochPlan(
            range(n), world_size=world_size, batch_size=batch_size, shuffle="full", epoch=epoch, fixed_pieces=4
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


# Pieces of nodes


@st.composite
def node_plans(draw, shuffles=SHUFFLES, ends=ENDS, min_rows=0):
    nodes, ranks = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    start, num_rows = draw(st.integers(0, 40)), draw(st.integers(max(min_rows, nodes * ranks), 400))
    return EpochPlan(
        range(start, start + num_rows), chunk_rows=draw(st.integers(1, 30)), seed=draw(st.integers(0, 5)),
        epoch=draw(st.integers(0, 5)), world_size=nodes * ranks, batch_size=draw(st.integers(1, 24)),
        shuffle=draw(shuffles), ends=draw(ends), fixed_pieces=nodes,
    )  # fmt: skip


@settings(max_examples=4 * EXAMPLES)
@given(plan=node_plans(ends=st.just("exact")))
def test_each_node_reads_the_rows_of_its_piece_once_in_every_epoch(plan):
    for epoch in (plan, plan.following, plan.following.following):
        counts = [counted([batches]) for batches in all_batches(epoch)]
        ranks = plan.world_size // plan.fixed_pieces
        for node, rows in enumerate(rows_of_nodes(plan)):
            assert sum(counts[node * ranks : (node + 1) * ranks], Counter()) == Counter(rows.tolist())


@settings(max_examples=2 * EXAMPLES)
@given(nodes=st.integers(2, 4), ranks=st.integers(2, 4), shuffle=st.sampled_from(["full", "chunk", ChunkWindow(1)]))
def test_two_epochs_give_the_ranks_of_a_node_different_rows(nodes, ranks, shuffle):
    options = {"world_size": nodes * ranks, "batch_size": 5, "shuffle": shuffle, "fixed_pieces": nodes, "chunk_rows": 5}
    plan = EpochPlan(range(nodes * ranks * 100), **options)
    now, then = ([set(counted([batches])) for batches in all_batches(epoch)] for epoch in (plan, plan.following))
    # By chance a rank gets the part 1 / ranks of its rows again; twenty chunks a rank make few chances differ much.
    assert sum(len(a & b) for a, b in zip(now, then, strict=True)) < 0.8 * len(plan.rows)
    assert all(a != b for a, b in zip(now, then, strict=True))


@given(plan=node_plans())
def test_a_piece_for_all_ranks_together_is_the_order_of_every_plan(plan):
    one, plain = (replace(plan, fixed_pieces=number) for number in (1, 0))
    for rank in range(plan.world_size):
        assert same_batches(list(one.batches(rank)), list(plain.batches(rank)))


@settings(max_examples=3 * EXAMPLES)
@given(plan=st.one_of(plans(in_pieces=st.booleans()), node_plans()), data=st.data())
def test_places_of_rows_are_those_of_their_batches(plan, data):
    if plan.shuffle is not False and data.draw(st.booleans()):
        plan = replace(plan, groups=np.arange(len(plan.rows)) % 5)
    for rank in range(plan.world_size):
        for batch in plan.batches(rank):
            ranks, steps = plan.places_of(batch.rows[batch.valid])
            if plan.ends != "pad":  # whose repeats come twice
                assert set(ranks.tolist()) <= {rank} and set(steps.tolist()) <= {batch.step}
    assume(plan.rows)
    order = plan._order
    positions = np.arange(len(plan.rows))
    assert np.array_equal(order.positions_of(order(positions)), positions)


@settings(max_examples=4 * EXAMPLES)
@given(plan=st.one_of(plans(in_pieces=st.booleans()), node_plans()), data=st.data())
def test_a_chunk_is_read_on_its_rank_not_before_its_step_and_within_its_window(plan, data):
    # Every row of the epoch comes once, and a share that has none repeats nothing that counts.
    fixed_pieces = plan.fixed_pieces if len(plan.rows) >= plan.world_size else 0
    plan = replace(plan, ends="exact", fixed_pieces=fixed_pieces)
    grouped = plan.shuffle is not False and data.draw(st.booleans())
    if grouped:
        plan = replace(plan, groups=np.arange(len(plan.rows)) % 5)
    chunks = (np.array(plan.rows) // plan.chunk_rows).tolist()
    borders = chunks_on_borders(plan, chunks)
    ranks, steps = plan.chunk_places(np.array(plan.rows, np.int64))
    if plan.shuffle == "full":
        assert set(ranks.tolist()) <= {-1} and set(steps.tolist()) <= {0}
        return
    window_rows = plan.chunk_rows * (plan.shuffle.chunks if plan.shuffle else 1)
    latest = window_rows + (2 * 64 * plan.batch_size if grouped else 0)
    for rank, batches in enumerate(all_batches(plan)):
        for batch in batches:
            for row in (batch.rows[batch.valid] - plan.rows.start).tolist():
                if chunks[row] in borders:
                    continue
                assert ranks[row] == rank
                assert steps[row] <= batch.step <= steps[row] + latest // plan.batch_size + 1


@given(plan=node_plans(shuffles=ORDERS), data=st.data())
def test_a_resumed_epoch_has_the_places_of_the_whole_one_and_other_ranks_have_places_of_their_own(plan, data):
    rows = np.array(plan.rows)
    steps = data.draw(st.integers(0, plan.num_steps))
    resumed = replace(plan, segments=plan.segments_after(steps), begun_pieces=plan.fixed_pieces)
    for here, there in zip(plan.chunk_places(rows), resumed.chunk_places(rows), strict=True):
        assert np.array_equal(here, there)
    elsewhere = replace(resumed, world_size=plan.world_size + 1, fixed_pieces=0)
    ranks, places = elsewhere.chunk_places(rows)
    assert set(ranks.tolist()) <= set(range(-1, plan.world_size + 1))
    assert places.min() >= 0 and places.max() <= len(rows) // elsewhere.world_size // plan.batch_size + 1


def chunks_on_borders(plan, chunks):
    """The chunks that two ranks read, or two nodes."""
    readers = {}
    for rank, batches in enumerate(all_batches(plan)):
        for batch in batches:
            for row in (batch.rows[batch.valid] - plan.rows.start).tolist():
                readers.setdefault(chunks[row], set()).add(rank)
    return {chunk for chunk, ranks in readers.items() if len(ranks) > 1}


def test_chunks_of_rows_that_are_not_planned_have_no_rank_and_no_rows_no_places():
    plan = EpochPlan(range(10, 90), chunk_rows=8, world_size=2, batch_size=4, shuffle=ChunkWindow(2))
    ranks, steps = plan.chunk_places(np.array([9, 10, 89, 90, -1, 2**47]))
    assert ranks.tolist()[:1] + ranks.tolist()[3:] == [-2] * 4 and set(ranks[1:3].tolist()) <= {0, 1}
    assert steps.tolist()[:1] + steps.tolist()[3:] == [0] * 4
    for shuffle in ("full", False, ChunkWindow(2)):
        empty = replace(plan, shuffle=shuffle, rows=range(3, 3))
        assert [part.tolist() for part in empty.chunk_places(np.arange(2))] == [[-2, -2], [0, 0]]
        assert [part.tolist() for part in plan.chunk_places(np.arange(0))] == [[], []]


def test_chunks_of_a_billion_rows_on_1024_ranks_have_places_in_little_memory():
    plan = EpochPlan(
        range(10**9), chunk_rows=72, world_size=1024, batch_size=256, shuffle=ChunkWindow(16), fixed_pieces=128
    )
    tracemalloc.start()
    try:
        rows = np.arange(0, 10**9, 10**6)
        ranks, steps = plan.chunk_places(rows)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1e6
    assert np.array_equal(ranks // 8, share_ranks(rows, 10**9, 1024) // 8) and steps.max() <= plan.num_steps
    assert not np.array_equal(ranks, share_ranks(rows, 10**9, 1024))
