from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fastload.pack.compact import close_holes


@st.composite
def _packed_rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    split = np.repeat(np.arange(3, dtype=np.uint8), draw(st.tuples(*[st.integers(0, 12)] * 3)))
    good = np.array(draw(st.lists(st.booleans(), min_size=len(split), max_size=len(split))), dtype=bool)
    return good, split


@given(_packed_rows(), st.booleans())
def test_moving_rows_in_order_keeps_every_good_row_once_in_its_split(rows, shuffled):
    good, split = rows
    sources = close_holes(good, split, shuffled=shuffled)
    assert sorted(sources.tolist()) == np.flatnonzero(good).tolist()
    assert np.all(np.diff(split[sources].astype(int)) >= 0)
    content = np.arange(len(good))
    for row, source in enumerate(sources):
        assert source >= row
        content[row] = content[source]
    assert content[: len(sources)].tolist() == sources.tolist()


def test_shuffled_rows_are_filled_from_the_end_of_their_split():
    good = np.array([1, 0, 1, 1, 1, 1, 1, 1], dtype=bool)
    split = np.array([0, 0, 0, 0, 0, 1, 1, 1], dtype=np.uint8)
    assert close_holes(good, split, shuffled=True).tolist() == [0, 4, 2, 3, 7, 5, 6]
    assert close_holes(good, split, shuffled=False).tolist() == [0, 2, 3, 4, 5, 6, 7]


@given(_packed_rows())
def test_unshuffled_rows_keep_their_order(rows):
    good, split = rows
    assert np.all(np.diff(close_holes(good, split, shuffled=False)) > 0)
