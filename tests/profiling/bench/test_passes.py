from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.profiling.bench.passes import compare, spread

RATES = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=9)


@given(RATES)
def test_a_median_lies_between_the_lowest_and_the_highest(values):
    found = spread(values)
    assert found["lowest"] <= found["median"] <= found["highest"]
    assert found["count"] == len(values)


@given(pairs=st.integers(1, 9), warm_up=st.integers(0, 2), times=st.floats(0.1, 10))
def test_each_pair_gives_one_ratio_of_its_own_two_runs(pairs, warm_up, times):
    ran = []

    def base() -> float:
        ran.append("base")
        return 10.0 + (len(ran) - 1) // 2  # the machine gets faster, for both

    def way() -> float:
        ran.append("way")
        return times * (10.0 + (len(ran) - 1) // 2)

    found = compare(way, base, pairs=pairs, warm_up=warm_up)
    assert found["ratio"]["count"] == pairs == ran.count("way") - warm_up
    assert [found["ratio"][name] for name in ("lowest", "highest")] == pytest.approx([times, times])
    turns = [tuple(ran[i : i + 2]) for i in range(2 * warm_up, len(ran), 2)]
    assert turns == [("way", "base") if i % 2 == 0 else ("base", "way") for i in range(pairs)]
