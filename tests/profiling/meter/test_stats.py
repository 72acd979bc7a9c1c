"""The arithmetic of the loader's numbers."""

from __future__ import annotations

from fastload.timing.probe import LoaderStats


def test_rates_and_shares_and_zero_where_there_is_nothing_yet():
    stats = LoaderStats(fresh_samples=100, consumed_samples=300, steps=6, elapsed_s=2.0, stall_s=0.5, bytes_read=10)
    assert stats.fresh_samples_per_s == 50 and stats.consumed_samples_per_s == 150 and stats.stall_share == 0.25
    stats = LoaderStats()
    assert stats.fresh_samples_per_s == stats.consumed_samples_per_s == stats.stall_share == 0
