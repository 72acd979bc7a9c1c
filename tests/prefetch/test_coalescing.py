"""Small batches that are filled several at a time, and come out as they were planned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.plan import EpochPlan
from fastload.prefetch.ring import SLACK, Ring, SlotField
from fastload.prefetch.thread_stream import GROUP_BYTES, ThreadStream, group_size


def test_small_batches_are_coalesced_and_large_ones_are_not():
    assert group_size(GROUP_BYTES // 4, 1000) == 4
    assert group_size(GROUP_BYTES * 4, 1000) == 1
    assert group_size(1, 64) == 8, "an eighth of the epoch at most"
    assert group_size(0, 0) == 1


@given(
    num_rows=st.integers(1, 300),
    batch_size=st.integers(1, 20),
    size=st.integers(2, 9),
    ends=st.sampled_from(["drop", "pad", "exact"]),
)
def test_what_comes_out_of_a_group_is_what_was_planned(num_rows, batch_size, size, ends):
    plan = EpochPlan(range(num_rows), batch_size=batch_size, shuffle="full", ends=ends)
    filled = []

    def fill(planned, arrays):
        filled.append(len(planned.rows))
        arrays["images"][:] = planned.rows * 10
        return 8 * len(planned.rows)

    ring = Ring([SlotField("images", (size * batch_size,), np.dtype(np.int64))], SLACK + 1)
    found = list(ThreadStream(plan.batches(0), fill, ring, workers=1, group=size))
    assert filled[:-1] == [batch_size * size] * (len(filled) - 1)
    expected = list(plan.batches(0))
    assert len(found) == len(expected) == plan.num_steps
    for batch, planned in zip(found, expected, strict=True):
        np.testing.assert_array_equal(batch.arrays["images"], planned.rows * 10)
        np.testing.assert_array_equal(batch.planned.rows, planned.rows)
        np.testing.assert_array_equal(batch.planned.valid, planned.valid)
        assert (batch.planned.step, batch.planned.global_valid) == (planned.step, planned.global_valid)
        assert batch.bytes_read == 8 * batch_size


def test_the_rest_of_a_group_counts_as_ready():
    plan = EpochPlan(range(12), batch_size=2, shuffle=False)
    ring = Ring([SlotField("images", (6,), np.dtype(np.int64))], SLACK + 1)
    batches = ThreadStream(plan.batches(0), lambda planned, arrays: 0, ring, workers=1, group=3)
    next(batches)
    while batches.depth() < 5:
        pass
    next(batches)
    assert batches.depth() == 4 and batches.ready()
    batches.close()


def test_an_error_reaches_the_loop_in_its_turn():
    def broken(planned, arrays):
        if planned.step:
            raise OSError("disk")
        return 0

    plan = EpochPlan(range(12), batch_size=2, shuffle=False)
    ring = Ring([SlotField("images", (6,), np.dtype(np.int64))], SLACK + 1)
    batches = ThreadStream(plan.batches(0), broken, ring, workers=1, group=3)
    assert [next(batches).planned.step for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="disk"):
        next(batches)
