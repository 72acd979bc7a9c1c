"""Cutting a sequence among ranks, and cutting again what a segment left."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.errors import OptionError
from fastload.plan.shares import Segment, Tails, checked_segments, merged, rank_share, share_bounds

# Numbers alone are quickly made: more examples than elsewhere.
EXAMPLES = settings().max_examples


@given(num_rows=st.integers(0, 3000), world_size=st.integers(1, 9))
def test_ranks_share_out_every_row_once(num_rows, world_size):
    shares = [rank_share(num_rows, rank=r, world_size=world_size) for r in range(world_size)]
    assert [i for share in shares for i in share] == list(range(num_rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    with pytest.raises(OptionError, match=f"rank {world_size} is outside"):
        rank_share(num_rows, rank=world_size, world_size=world_size)


@given(num_rows=st.integers(1, 300), world_size=st.integers(1, 400))
def test_bounds_of_a_position_are_those_of_its_share(num_rows, world_size):
    first, stop = share_bounds(np.arange(num_rows), num_rows, world_size)
    for rank in range(world_size):
        share = rank_share(num_rows, rank=rank, world_size=world_size)
        assert (first[share.start : share.stop] == share.start).all()
        assert (stop[share.start : share.stop] == share.stop).all()


@settings(max_examples=4 * EXAMPLES)
@given(
    num_rows=st.integers(0, 300),
    world_size=st.integers(1, 40),
    batch_size=st.integers(1, 40),
    steps=st.integers(0, 40),
)
def test_tails_are_what_each_rank_left_in_rank_order(num_rows, world_size, batch_size, steps):
    tails = Tails(num_rows, Segment(world_size, batch_size, steps))
    left = [
        position
        for rank in range(world_size)
        for position in rank_share(num_rows, rank=rank, world_size=world_size)[steps * batch_size :]
    ]
    assert tails.num_left == len(left)
    assert tails.origin(np.arange(len(left))).tolist() == left


def test_neighbouring_segments_of_one_shape_merge_and_empty_ones_vanish():
    segments = checked_segments([[2, 8, 3], [2, 8, 4], [3, 8, 0], [2, 8, 1], (2, 4, 5)])
    assert merged(segments) == ((2, 8, 8), (2, 4, 5))


@pytest.mark.parametrize("segments", [7, [(1, 2)], [(0, 1, 1)], [(1, 0, 1)], [(1, 1, -1)], [(1, 1.0, 1)], ["abc"]])
def test_malformed_segments_are_refused(segments):
    with pytest.raises(OptionError, match="world size, batch size, steps"):
        checked_segments(segments)
