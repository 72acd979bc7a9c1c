"""Steps kept in bounded memory: an even part of them, the sums of all, and the rates made of a loader's numbers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fastload.profiling.meter.loops import Loop, Thinned
from fastload.timing.probe import LoaderStats
from fastload.timing.results import BatchWork, WorkTime

# Not known, a batch that is used again and cost nothing, one that was made.
WORKS = (None, BatchWork({}), BatchWork({"reading": WorkTime(0.5, 0.25)}))


@given(count=st.integers(0, 700), most=st.integers(1, 40))
def test_kept_steps_are_evenly_spaced_and_sums_are_exact(count, most):
    loop = Loop(lambda: None, Thinned(2 * most))
    for number in range(count):
        loop.add((float(number), 1.0, 2.0, 3.0, 4.0, 10, None), WORKS[number % 3])
    begins = [int(one.begin_s) for one in loop.steps]
    assert len(begins) <= 2 * most and begins[:1] == [0][:count]
    assert len({later - earlier for earlier, later in itertools.pairwise(begins)}) <= 1
    assert [number for number, _ in loop.numbered] == begins
    assert loop.works == tuple(WORKS[number % 3] for number in begins if number % 3)
    # The last one kept is no further from the end than the others from each other.
    assert count <= 2 * most or begins[-1] + 2 * (begins[1] - begins[0]) > count - 1
    totals = loop.totals
    assert (totals.steps, totals.samples, totals.wait_s, totals.compute_s) == (count, 10 * count, count, 4.0 * count)
    assert totals.batches == count // 3 and totals.stall_share == (0.1 if count else 0)
    assert totals.mean_stages() == ({"reading": WorkTime(0.5, 0.25)} if totals.batches else {})


def test_rates_and_shares_of_a_loader_and_zero_where_there_is_nothing_yet():
    stats = LoaderStats(fresh_samples=100, consumed_samples=300, steps=6, elapsed_s=2.0, stall_s=0.5, bytes_read=10)
    assert (stats.fresh_samples_per_s, stats.consumed_samples_per_s, stats.stall_share) == (50, 150, 0.25)
    assert repr(stats) == (
        "LoaderStats(steps=6, fresh_samples=100)\n  2 s, 150 samples/s, stalled 25.0% of the time, 10 bytes read"
    )
    stats = LoaderStats()
    assert stats.fresh_samples_per_s == stats.consumed_samples_per_s == stats.stall_share == 0
