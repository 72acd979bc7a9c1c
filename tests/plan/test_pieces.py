"""Chunk windows over the pieces of several shards: every row once, whole chunks in a window, as one file would."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fastload.plan import ChunkPieces, ChunkWindow, EpochPlan


@st.composite
def cut_rows(draw: st.DrawFn) -> tuple[range, int, ChunkPieces]:
    """A range of rows of a file, its chunk length, and pieces of the file."""
    total, chunk_rows = draw(st.integers(1, 80)), draw(st.integers(1, 8))
    begins = sorted({0, *draw(st.lists(st.integers(0, total - 1), max_size=5))})
    leads = [draw(st.integers(0, chunk_rows - 1)) for _ in begins]
    start = draw(st.integers(0, total - 1))
    rows = range(start, draw(st.integers(start + 1, total)))
    return rows, chunk_rows, ChunkPieces(np.array(begins), np.array(leads))


def chunk_of(row: int, chunk_rows: int, pieces: ChunkPieces) -> tuple[int, int]:
    piece = int(np.searchsorted(pieces.begins, row, "right")) - 1
    return piece, int(row - pieces.begins[piece] + pieces.leads[piece]) // chunk_rows


@given(cut_rows(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 9))
def test_every_row_comes_once_and_a_window_holds_whole_chunks(cut, window, world_size, seed):
    rows, chunk_rows, pieces = cut
    options = {"chunk_rows": chunk_rows, "pieces": pieces, "shuffle": ChunkWindow(window), "seed": seed}
    plan = EpochPlan(rows, batch_size=3, world_size=world_size, ends="exact", **options)
    read = [batch.rows[batch.valid] for rank in range(world_size) for batch in plan.batches(rank)]
    assert sorted(np.concatenate(read).tolist()) == list(rows)
    if world_size > 1:
        return
    chunks = [chunk_of(row, chunk_rows, pieces) for row in np.concatenate(read).tolist()]
    left = {chunk: chunks.count(chunk) for chunk in chunks}
    while chunks:
        seen: set[tuple[int, int]] = set()
        for count, chunk in enumerate(chunks, 1):
            seen.add(chunk)
            assert len(seen) <= window, "rows of more chunks than a window has, before any of them is complete"
            if len(seen) == min(window, len(left)) and count == sum(left[one] for one in seen):
                break
        chunks = chunks[count:]
        left = {chunk: rows for chunk, rows in left.items() if chunk not in seen}


@given(
    st.integers(1, 80),
    st.integers(1, 8),
    st.lists(st.integers(0, 80), max_size=4),
    st.integers(1, 3),
    st.integers(0, 9),
)
def test_pieces_cut_where_chunks_end_change_nothing(total, chunk_rows, cuts, world_size, seed):
    begins = sorted({0, *(cut - cut % chunk_rows for cut in cuts if cut - cut % chunk_rows < total)})
    pieces = ChunkPieces(np.array(begins), np.zeros(len(begins), np.int64))
    for shuffle, fixed in itertools.product([ChunkWindow(2), "full", False], [False, True]):
        options = {"shuffle": shuffle, "seed": seed, "world_size": world_size, "ends": "drop"}
        options["fixed_pieces"] = world_size if fixed else 0
        one, many = (
            EpochPlan(range(total), chunk_rows=chunk_rows, batch_size=2, pieces=each, **options)
            for each in (None, pieces)
        )
        for rank in range(world_size):
            for a, b in zip(one.batches(rank), many.batches(rank), strict=True):
                np.testing.assert_array_equal(a.rows, b.rows)
