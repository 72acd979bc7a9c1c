"""Orders of an epoch: every row once, chunks whole, windows closed, slices without influence."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.plan.order import ChunkWindow, make_order
from fastload.plan.shares import rank_share

# Numbers alone are quickly made: more examples than elsewhere.
EXAMPLES = settings().max_examples


@st.composite
def geometries(draw):
    """(rows, chunk_rows): splits that begin and end anywhere in a file of chunks."""
    chunk_rows = draw(st.one_of(st.integers(1, 12), st.integers(1, 200)))
    start = draw(st.integers(0, 3 * chunk_rows))
    return range(start, start + draw(st.integers(1, 600))), chunk_rows


SHUFFLES = st.sampled_from([False, "full", ChunkWindow(1), ChunkWindow(2), ChunkWindow(5), ChunkWindow(1000)])


@settings(max_examples=5 * EXAMPLES)
@given(geometry=geometries(), shuffle=SHUFFLES, seed=st.integers(0, 99), world_size=st.integers(1, 20))
def test_every_row_comes_once(geometry, shuffle, seed, world_size):
    rows, chunk_rows = geometry
    order = make_order(rows, chunk_rows, shuffle, seed=seed, epoch=0, world_size=world_size)
    assert np.array_equal(np.sort(order(np.arange(len(rows)))), np.arange(rows.start, rows.stop))


@settings(max_examples=3 * EXAMPLES)
@given(data=st.data(), geometry=geometries(), shuffle=SHUFFLES, world_size=st.integers(1, 20))
def test_a_position_has_one_row_however_positions_are_asked_for(data, geometry, shuffle, world_size):
    rows, chunk_rows = geometry
    order = make_order(rows, chunk_rows, shuffle, seed=3, epoch=1, world_size=world_size)
    whole = order(np.arange(len(rows)))
    some = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=30)), dtype=np.int64)
    assert np.array_equal(order(some), whole[some])
    assert np.array_equal(pickle.loads(pickle.dumps(order))(some), whole[some])
    cut = data.draw(st.integers(0, len(rows)))
    halves = np.split(np.arange(len(rows)), [cut])
    assert np.array_equal(np.concatenate([order(half) for half in halves]), whole)


@settings(max_examples=3 * EXAMPLES)
@given(geometry=geometries(), window=st.integers(1, 20), seed=st.integers(0, 99), world_size=st.integers(1, 20))
def test_rows_stay_in_their_window_of_whole_chunks(geometry, window, seed, world_size):
    rows, chunk_rows = geometry
    chunks_shuffled = make_order(rows, chunk_rows, ChunkWindow(window), seed=seed, epoch=0, world_size=world_size)
    got = chunks_shuffled(np.arange(len(rows)))
    # Windows of one chunk on one rank show the order of the chunks themselves.
    order_of_chunks = make_order(rows, chunk_rows, ChunkWindow(1), seed=seed, epoch=0, world_size=1)
    sequence = order_of_chunks(np.arange(len(rows))) // chunk_rows
    assert (np.diff(sequence) != 0).sum() == np.unique(sequence).size - 1, "a chunk is cut in two"
    for rank in range(world_size):
        share = rank_share(len(rows), rank=rank, world_size=world_size)
        in_share = list(dict.fromkeys(sequence[share.start : share.stop].tolist()))
        where = share.start
        for first in range(0, len(in_share), window):
            members = in_share[first : first + window]
            size = int(np.isin(sequence[share.start : share.stop], members).sum())
            assert set(got[where : where + size] // chunk_rows) == set(members)
            where += size
        assert where == share.stop


@settings(max_examples=3 * EXAMPLES)
@given(geometry=geometries(), window=st.integers(1, 20), seed=st.integers(0, 99), world_size=st.integers(1, 30))
def test_at_most_one_chunk_a_border_is_read_by_two_ranks(geometry, window, seed, world_size):
    rows, chunk_rows = geometry
    order = make_order(rows, chunk_rows, ChunkWindow(window), seed=seed, epoch=0, world_size=world_size)
    chunks = order(np.arange(len(rows))) // chunk_rows
    readings = 0
    for rank in range(world_size):
        share = rank_share(len(rows), rank=rank, world_size=world_size)
        readings += np.unique(chunks[share.start : share.stop]).size
    assert readings - np.unique(chunks).size <= world_size - 1


def test_long_windows_and_short_ones_mix_alike():
    # A window longer than a block takes the path with one key, a short one the path with a key each.
    rows = range(37, 30_011)
    for chunk_rows, window in ((3, 1), (3, 16), (70, 16), (700, 1), (700, 16), (30_000, 4)):
        order = make_order(rows, chunk_rows, ChunkWindow(window), seed=1, epoch=0, world_size=3)
        whole = order(np.arange(len(rows)))
        assert np.array_equal(np.sort(whole), np.arange(rows.start, rows.stop))
        scattered = np.random.default_rng(0).permutation(len(rows))[:3000]
        assert np.array_equal(order(scattered), whole[scattered])
        assert np.array_equal(np.concatenate([order(scattered[i : i + 1]) for i in range(50)]), whole[scattered[:50]])


def test_rows_of_a_window_are_well_mixed():
    rows, window = range(0, 6400), 16
    order = make_order(rows, 10, ChunkWindow(window), seed=5, epoch=0, world_size=1)
    chunks = (order(np.arange(6400)) // 10).reshape(40, 160)
    # 10 rows of each of 16 chunks: the first 16 rows of a window come from about 16 * (1 - (15/16)**16) = 10.3 chunks.
    assert 9 < np.mean([np.unique(part[:16]).size for part in chunks]) < 11.5


@pytest.mark.parametrize(
    ("shuffle", "golden"),
    [(False, "GOLDEN_NONE"), ("full", "GOLDEN_FULL"), (ChunkWindow(2), "GOLDEN_CHUNK")],
)
def test_golden_orders_never_drift(shuffle, golden):
    order = make_order(range(3, 23), 4, shuffle, seed=42, epoch=7, world_size=2)
    assert order(np.arange(20)).tolist() == globals()[golden]


GOLDEN_NONE = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]
GOLDEN_FULL = [9, 15, 10, 21, 22, 18, 11, 7, 5, 19, 16, 14, 4, 20, 8, 6, 13, 12, 3, 17]
GOLDEN_CHUNK = [18, 13, 16, 14, 17, 15, 19, 12, 4, 5, 11, 6, 10, 8, 9, 7, 22, 3, 20, 21]
