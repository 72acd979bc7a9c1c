"""Many steps in few columns: nothing that stands out is lost, and sums stay."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.profiling.report.plots import ceiling, into_columns, into_series, names_of
from fastload.timing.results import LoopStep

seconds = st.floats(0, 10)


def steps_of(waits):
    steps, at_s = [], 0.0
    for wait in waits:
        steps.append(LoopStep(at_s, wait, 0.001, 0.0, 0.01, 8))
        at_s += steps[-1].duration_s
    return steps


@given(waits=st.lists(seconds, min_size=1, max_size=200), count=st.integers(1, 50))
def test_columns_keep_the_slowest_step_and_the_sum(waits, count):
    steps = steps_of(waits)
    thin = into_columns(steps, count)
    assert len(thin.slowest_s) <= count and len(thin.edges_s) == len(thin.slowest_s) + 1
    assert thin.slowest_s.max() == pytest.approx(max(step.duration_s for step in steps))
    firsts = np.searchsorted([step.begin_s for step in steps], thin.edges_s[:-1])
    sizes = np.diff(np.append(firsts, len(steps)))
    assert sizes.max() == thin.steps_each and sizes.min() >= thin.steps_each - 1
    assert (thin.mean_s * sizes).sum() == pytest.approx(sum(step.duration_s for step in steps))
    assert (np.diff(thin.edges_s) >= 0).all()
    assert (thin.slowest_s >= thin.mean_s - 1e-9).all()


def test_few_steps_are_a_column_each_and_what_is_no_duration_counts_as_nothing():
    thin = into_columns(steps_of([0.1, 0.2, 0.3]), 100)
    assert thin.steps_each == 1
    assert thin.parts_s[0] == pytest.approx([0.1, 0.2, 0.3])
    assert thin.samples_per_s == pytest.approx([8 / 0.111, 8 / 0.211, 8 / 0.311])
    assert into_columns([LoopStep(0.0, 0, 0, 0, 0, 8)], 10).samples_per_s == pytest.approx([0])
    assert into_columns([LoopStep(0.0, math.nan, math.inf, -1.0, 0.5, 8)], 10).mean_s == pytest.approx([0.5])
    # One tall step does not make the others flat.
    thin = into_columns(steps_of([0.01] * 500 + [30.0] + [0.01] * 499), 250)
    assert ceiling(thin) < 0.2
    assert ceiling(into_columns(steps_of([0.01, 0.02]), 10)) > 0.031


def test_readings_keep_their_extremes_and_what_was_never_read_is_not_named():
    readings = [{"at_s": k / 10, "cpu_percent": 900.0 if k == 33 else 100.0} for k in range(100)]
    series = into_series(readings, "cpu_percent", 10)
    assert series is not None and len(series.mean) == 10
    assert series.high.max() == 900 and series.low.min() == 100
    readings = [{"at_s": 0.0, "a": 1.0, "b": math.nan}, {"at_s": 1.0, "c": math.inf, "b": 2.0}]
    assert names_of(readings) == ["a", "b"]
    assert into_series(readings, "c", 5) is None and into_series([], "a", 5) is None
