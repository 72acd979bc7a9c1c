"""Orders of an epoch: every row once, chunks whole, windows closed, slices without influence; their defaults."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.errors import OptionError
from fastload.plan.order import ChunkWindow, make_order, resolve_ends, resolve_shuffle
from fastload.plan.shares import rank_share
from fastload.system import native

# Numbers alone are quickly made: more examples than elsewhere.
EXAMPLES = settings().max_examples


@st.composite
def geometries(draw):
    """(rows, chunk_rows): splits that begin and end anywhere in a file of chunks."""
    chunk_rows = draw(st.one_of(st.integers(1, 12), st.integers(1, 200)))
    start = draw(st.integers(0, 3 * chunk_rows))
    return range(start, start + draw(st.integers(1, 600))), chunk_rows


@settings(max_examples=3 * EXAMPLES)
@given(data=st.data(), geometry=geometries(), chunks=st.integers(1, 20), world_size=st.integers(1, 9))
def test_the_compiled_loops_give_windows_the_rows_that_numpy_gives_them(data, geometry, chunks, world_size):
    rows, chunk_rows = geometry
    order = make_order(rows, chunk_rows, ChunkWindow(chunks), seed=1, epoch=2, world_size=world_size)
    first = data.draw(st.integers(0, len(rows) - 1))
    for positions in (np.arange(first, len(rows)), np.random.default_rng(first).permutation(len(rows))):
        compiled = order(positions)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "library", lambda: None)
            assert np.array_equal(compiled, order(positions))


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


@pytest.mark.parametrize(("chunk_rows", "window"), [(3, 1), (3, 16), (70, 16), (700, 1), (700, 16), (30_000, 4)])
def test_long_windows_and_short_ones_mix_alike(chunk_rows, window):
    # A window longer than a block takes the path with one key, a short one the path with a key each.
    rows = range(37, 30_011)
    order = make_order(rows, chunk_rows, ChunkWindow(window), seed=1, epoch=0, world_size=3)
    whole = order(np.arange(len(rows)))
    assert np.array_equal(np.sort(whole), rows)
    scattered = np.random.default_rng(0).permutation(len(rows))[:3000]
    assert np.array_equal(order(scattered), whole[scattered])
    assert np.array_equal(np.concatenate([order(scattered[i : i + 1]) for i in range(50)]), whole[scattered[:50]])


def test_rows_of_a_window_are_well_mixed():
    order = make_order(range(6400), 10, ChunkWindow(16), seed=5, epoch=0, world_size=1)
    chunks = (order(np.arange(6400)) // 10).reshape(40, 160)
    # 10 rows of each of 16 chunks: the first 16 rows of a window come from about 16 * (1 - (15/16)**16) = 10.3 chunks.
    assert 9 < np.mean([np.unique(part[:16]).size for part in chunks]) < 11.5


@pytest.mark.parametrize(
    ("shuffle", "if_shuffled", "if_not"),
    [
        (True, ChunkWindow(16), "full"),
        ("auto", ChunkWindow(16), "full"),
        (False, False, False),
        ("full", "full", "full"),
        ("chunk", ChunkWindow(16), ChunkWindow(16)),
        (ChunkWindow(3), ChunkWindow(3), ChunkWindow(3)),
    ],
)
def test_only_auto_depends_on_whether_the_file_was_shuffled_when_packed(shuffle, if_shuffled, if_not):
    assert (resolve_shuffle(shuffle, True), resolve_shuffle(shuffle, False)) == (if_shuffled, if_not)


@pytest.mark.parametrize("shuffle", [None, 1, 0, 16, "Full", "window", ["full"]])
def test_an_unknown_shuffle_is_refused_with_the_choices(shuffle):
    with pytest.raises(OptionError, match=r'"full", "chunk" or ChunkWindow\(chunks\)'):
        resolve_shuffle(shuffle, file_shuffled=True)


@pytest.mark.parametrize("chunks", [0, -1, 1.5, True, "16"])
def test_a_window_holds_whole_chunks(chunks):
    with pytest.raises(OptionError, match="1 or more"):
        ChunkWindow(chunks)


def test_ends_drop_only_when_shuffling():
    assert resolve_ends(None, False) == "exact"
    assert resolve_ends(None, "full") == resolve_ends(None, ChunkWindow()) == "drop"
    assert resolve_ends("pad", False) == "pad"
    with pytest.raises(OptionError, match='"drop", "pad", "exact" or None'):
        resolve_ends("last", False)
