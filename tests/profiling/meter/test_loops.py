"""Steps kept in bounded memory: an even part of them, the sums of all, and the rates made of a loader's numbers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fastload.profiling.meter.loops import Loop
from fastload.timing.probe import LoaderStats
from fastload.timing.results import BatchWork, Work


def step(number):
    return float(number), 1.0, 2.0, 3.0, 4.0, 10, None


@given(count=st.integers(0, 700), most=st.integers(1, 40))
def test_kept_steps_are_evenly_spaced_and_sums_are_exact(count, most):
    log = Loop(lambda: None, 2 * most)
    for number in range(count):
        log.add(step(number), BatchWork({"reading": Work(0.5, 0.25)}) if number % 2 else None)
    begins = [int(one.begin_s) for one in log.steps]
    assert len(begins) <= 2 * most and begins[:1] == [0][:count]
    assert len({later - earlier for earlier, later in itertools.pairwise(begins)}) <= 1
    assert [number for number, _ in log.numbered] == begins
    # The last one kept is no further from the end than the others from each other.
    assert count <= 2 * most or begins[-1] + 2 * (begins[1] - begins[0]) > count - 1
    totals = log.totals
    assert (totals.steps, totals.samples, totals.wait_s, totals.compute_s) == (count, 10 * count, count, 4.0 * count)
    assert totals.batches == count // 2
    if count > 1:
        assert totals.mean_stages() == {"reading": Work(0.5, 0.25)} and totals.stall_share == 0.1


def test_nothing_yet_is_zero_and_a_batch_used_again_costs_nothing_and_is_no_batch():
    log = Loop.of(())
    assert log.totals.stall_share == 0 and log.totals.mean_stages() == {} and log.steps == log.works == ()
    log.add(step(0), BatchWork({"reading": Work(1.0, 0.0)}))
    log.add(step(1), BatchWork({}))
    assert len(log.works) == 2 and log.totals.batches == 1
    assert log.totals.mean_stages() == {"reading": Work(1.0, 0.0)}


def test_rates_and_shares_of_a_loader_and_zero_where_there_is_nothing_yet():
    stats = LoaderStats(fresh_samples=100, consumed_samples=300, steps=6, elapsed_s=2.0, stall_s=0.5, bytes_read=10)
    assert (stats.fresh_samples_per_s, stats.consumed_samples_per_s, stats.stall_share) == (50, 150, 0.25)
    stats = LoaderStats()
    assert stats.fresh_samples_per_s == stats.consumed_samples_per_s == stats.stall_share == 0
