"""How rows are cut into tasks, and where a stream has them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fastload.format.writer import PixelSpec
from fastload.pack.engine import task_bounds
from fastload.pack.pack_worker import RowStream


@given(st.lists(st.integers(0, 50), min_size=1, max_size=80), st.integers(1, 120))
def test_tasks_hold_all_rows_once_and_few_bytes_each(lengths: list[int], task_bytes: int) -> None:
    bounds = task_bounds(np.array(lengths), task_bytes)
    assert bounds[0] == 0 and bounds[-1] == len(lengths)
    assert len(bounds) - 1 >= min(16, len(lengths))
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        assert stop - start == 1 or (stop > start and sum(lengths[start:stop]) <= task_bytes)


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 30), st.booleans(), st.data())
def test_offsets_of_rows_as_they_come_are_those_of_all_at_once(lengths, chunk_bytes, one_size, data) -> None:
    rows = np.array(lengths, np.int64)
    spec = PixelSpec((1,), np.dtype(np.uint8), 1) if one_size else None
    stream = RowStream("images", "x", 4096, chunk_bytes, spec)
    cut = data.draw(st.integers(0, len(lengths)))
    first, middle = stream.offsets(rows[:cut], 0)
    second, end = stream.offsets(rows[cut:], middle)
    whole, whole_end = stream.offsets(rows, 0)
    assert np.concatenate((first, second)).tolist() == whole.tolist() and end == whole_end
