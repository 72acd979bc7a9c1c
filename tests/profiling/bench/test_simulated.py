from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.profiling.bench.training_loop import SimulatedAccelerator
from fastload.profiling.meter import Meter
from fastload.timing.clocks import Clock


class Time:
    """Passes only when somebody sleeps or works; a sleep may last too long."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now = 100.0
        self.late_s = late_s

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0, "never spins"
        self.now += seconds + self.late_s


def accelerator(time: Time, rate: float = 1000.0, ahead: int = 3) -> SimulatedAccelerator:
    return SimulatedAccelerator(rate, ahead=ahead, clock=time.clock, sleep=time.sleep)


STEPS = st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 300)), min_size=1, max_size=60)


@given(steps=STEPS, late_s=st.floats(0, 0.2), ahead=st.integers(1, 5))
def test_it_works_no_more_than_all_the_time_counts_every_sample_and_lets_a_loop_run_ahead(steps, late_s, ahead):
    time = Time(late_s)
    gpu = accelerator(time, ahead=ahead)
    began, ends = time.now, []
    for wait_s, samples in steps:
        time.now += wait_s
        assert gpu([range(samples)]) == samples
        ends.append(gpu.mark())
        assert sum(end > time.now + 1e-9 for end in ends) <= ahead
    end = gpu.mark()
    gpu.finish()
    assert 0 < gpu.utilization <= 1
    assert gpu.samples == sum(samples for _, samples in steps)
    assert gpu.busy_s == pytest.approx(gpu.samples / 1000)
    assert gpu.busy_s + gpu.idle_s == pytest.approx(max(end, began) - began, abs=1e-6)
    assert time.now >= end - 1e-9


def test_a_launch_returns_at_once_until_too_many_are_under_way_and_sleeps_too_long_make_no_step_longer():
    time = Time(late_s=0.02)
    gpu = accelerator(time)
    for number in range(200):
        gpu([range(100)])
        assert number >= 3 or time.now == 100.0
    gpu.finish()
    assert gpu.utilization == 1
    assert gpu.mark() == pytest.approx(100.0 + 200 * 0.1, abs=0.021)


def test_work_left_over_counts_as_work_after_begin():
    time = Time()
    gpu = accelerator(time)
    gpu([range(1000)])
    gpu.begin()
    time.now += 2.0
    gpu([range(1000)])
    assert gpu.idle_s == pytest.approx(1.0)
    assert gpu.utilization == pytest.approx(2 / 3)
    assert gpu.samples == 1000


def test_a_meter_that_has_it_as_its_clock_sees_what_the_accelerator_waited_for():
    time = Time()
    gpu = accelerator(time)
    assert isinstance(gpu, Clock)

    def loader():
        for wait_s in (0.0, 0.05, 0.35):  # the second is over while the first step runs
            time.now += wait_s
            yield [[0]] * 100

    with Meter(device=gpu, sample_every_s=0) as meter:
        for batch in meter.watch(loader()):
            gpu([batch])
    waits = [round(step.wait_s, 6) for step in meter.measured().steps]
    assert waits == [0.0, 0.0, 0.2]
    assert [round(step.compute_s, 6) for step in meter.measured().steps] == [0.1] * 3
