from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.groups import GROUP_BYTES, Groups, group_size
from fastload.plan import EpochPlan
from fastload.ring import FilledBatch


def test_small_batches_are_grouped_and_large_ones_are_not():
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
def test_what_comes_apart_is_what_was_planned(num_rows, batch_size, size, ends):
    plan = EpochPlan(range(num_rows), batch_size=batch_size, shuffle="full", ends=ends)
    groups = Groups(plan.batches(0), size)
    filled = [FilledBatch({"images": group.rows * 10}, group, 8 * len(group.rows)) for group in groups]
    assert all(len(batch.planned.rows) == batch_size * size for batch in filled[:-1])
    apart = list(groups.apart(filled))
    expected = list(plan.batches(0))
    assert len(apart) == len(expected) == plan.num_steps
    for found, planned in zip(apart, expected, strict=True):
        np.testing.assert_array_equal(found.arrays["images"], planned.rows * 10)
        np.testing.assert_array_equal(found.planned.rows, planned.rows)
        np.testing.assert_array_equal(found.planned.valid, planned.valid)
        assert (found.planned.step, found.planned.global_valid) == (planned.step, planned.global_valid)
        assert found.bytes_read == 8 * batch_size


def test_an_error_of_the_stream_passes_through():
    def broken():
        raise OSError("disk")
        yield

    with pytest.raises(OSError, match="disk"):
        next(Groups(iter([]), 3).apart(broken()))
