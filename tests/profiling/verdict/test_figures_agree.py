"""Every pair of figures about one loop agrees: parts and step, gains and headspace, verdict and gains."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.profiling.report.page import key_figures
from fastload.profiling.verdict import Demands, judge
from fastload.timing.results import BatchWork, LoopStep, Measured, WorkTime

UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
TIME = r"([\d.,]+) (s|ms|µs)"

times = st.one_of(st.just(0.0), st.floats(1e-5, 0.1))
works = st.builds(WorkTime, times, times)
steps = st.builds(
    LoopStep, begin_s=st.just(0.0), wait_s=times, copy_s=times, transform_s=times, compute_s=st.floats(1e-4, 0.1),
    samples=st.just(32), queue_depth=st.integers(0, 5),
)  # fmt: skip
batches = st.builds(BatchWork, st.dictionaries(st.sampled_from(["reading", "decoding", "transform", "collate"]), works))
loops = st.builds(
    Demands,
    batches=st.lists(batches, max_size=4).map(tuple),
    steps=st.lists(steps, min_size=1, max_size=6).map(tuple),
    workers=st.integers(0, 4),
    ahead=st.integers(1, 8),
    cpus=st.integers(1, 8),
    num_steps=st.sampled_from([0, 60]),
    epochs=st.lists(st.tuples(times, times), max_size=3).map(tuple),
    receive_s=times,
    step_running_s=times,
    by_threads=st.booleans(),
    is_fastload=st.booleans(),
    timed_device=st.booleans(),
    alone_s=times,
    others_cpus=st.floats(0, 2),
    waits_only=st.booleans(),
)


def seconds(text, name):
    """The time in a sentence, by a pattern with TIME; 0 where it is not said."""
    found = re.search(name.replace("TIME", TIME), text)
    return 0.0 if found is None else float(found[1].replace(",", "")) * UNITS[found[2]]


def about(value):
    return pytest.approx(value, rel=0.01, abs=1e-7)  # three digits of each


@settings(max_examples=5 * settings.default.max_examples)
@given(demands=loops)
def test_parts_headspace_gains_and_verdict_agree(demands):
    verdict = judge(demands)
    mean = {
        name: sum(getattr(step, name) for step in demands.steps) / len(demands.steps)
        for name in ("wait_s", "copy_s", "transform_s", "compute_s")
    }
    told = verdict.evidence[0]
    step_s, parts = (
        seconds(told, "a step takes TIME"),
        ("waits TIME", "TIME for the copy", "TIME for its tr", "works TIME"),
    )
    assert about(verdict.step_s) == step_s == about(sum(seconds(told, part) for part in parts))
    assert about(verdict.stall_share * verdict.step_s) == seconds(told, "waits TIME")
    assert about(sum(mean.values()) + demands.per_step(demands.ended_s)) == verdict.step_s
    # A loader that costs nothing is not waited for; what a device does meanwhile is only known where it was timed.
    most = verdict.step_s / verdict.free_step_s
    assert seconds(told, "it would take TIME") == about(verdict.free_step_s)
    if demands.waits_only or demands.timed_device or not demands.on_device:
        assert most >= (1 - 1e-9) / max(1e-9, 1 - verdict.stall_share)
    # No change gains more than such a loader, and the sentence says the gain of the first.
    assert all(cure.gain <= most * (1 + 1e-9) for cure in verdict.cures)
    assert all(cure.gain == pytest.approx(verdict.step_s / cure.step_s) for cure in verdict.cures)
    if verdict.cures and not demands.waits_only and verdict.cause:
        assert re.search(rf"\b{verdict.cures[0].gain:.2f} times|\b{verdict.cures[0].gain:.1f} times", verdict.sentence)
    # Nothing but the first epoch's start is left out of what a free loader could bring.
    least = most - demands.per_step(sum(demands.startups_s[:1])) / verdict.free_step_s
    if verdict.cause == "compute":
        assert least <= 1.25, verdict.sentence
        if not demands.waits_only and least > 1.04 * (verdict.cures[0].gain if verdict.cures else 1.0):
            assert f"a loader that costs nothing {least:.2f} times" in verdict.sentence


@settings(max_examples=5 * settings.default.max_examples)
@given(demands=loops)
def test_a_measured_headspace_is_the_verdicts_or_it_is_said_that_it_cannot_be(demands):
    verdict, samples = judge(demands), 32
    rate = samples / (demands.alone_s or verdict.free_step_s)
    run = Measured("t", steps=demands.steps, num_steps=len(demands.steps), elapsed_s=1.0,
                   samples_per_s=samples / verdict.step_s, headspace_samples_per_s=rate, verdict=verdict)  # fmt: skip
    figures = {name: (value, remark) for name, value, remark in key_figures(run)}
    times = rate / run.samples_per_s  # the measured rate is this many times the run's
    assert float(figures["headspace, samples/s"][1].split()[0].replace(",", "")) == pytest.approx(
        times, rel=0.01, abs=0.006
    )
    best = verdict.step_s / verdict.free_step_s
    if demands.on_device and not demands.timed_device and not demands.waits_only:
        return
    if not best / 1.1 <= times * (1 + 1e-9) <= best * 1.1:
        assert any("contradict each other" in line for line in verdict.evidence)
    # A wait is in the report what it is in the verdict.
    assert seconds(figures["a step, mean"][0], "TIME") == about(verdict.step_s)
    share = float(figures["waiting for data"][0].split()[0]) / 100
    assert share == pytest.approx(verdict.stall_share, abs=0.006)


def test_waits_that_no_cost_explains_are_not_called_compute():
    # As `bench --step sim:0.8x` had it: batches are made fast enough, some come late all the same.
    device_s, batch = 0.004, BatchWork({"reading": WorkTime(0.002, 0.0)})
    late = tuple(LoopStep(0.0, 0.010 if number % 10 == 0 else 0.0, 0.0, 0.0, device_s, 256) for number in range(60))
    verdict = judge(Demands(
        (batch,) * 60, late, 2, 5, 2, by_threads=True, is_fastload=True, timed_device=True, alone_s=device_s,
    ))  # fmt: skip
    assert verdict.free_step_s == device_s and verdict.step_s == pytest.approx(0.005)
    assert verdict.cause == "" and "a loader that costs nothing would bring 1.25 times" in verdict.sentence
    assert "1.00 times" not in verdict.sentence and "disk" not in verdict.sentence


def test_first_batches_of_epochs_are_named_where_they_take_long():
    batch = BatchWork({"reading": WorkTime(0.002, 0.0)})
    steps = tuple(LoopStep(0.0, 0.402 if number % 20 == 0 else 0.0, 0.0, 0.0, 0.2, 32) for number in range(60))
    base = Demands((batch,) * 60, steps, 2, 5, 2, epochs=((0.402, 0.0),) * 3, is_fastload=True)
    assert (
        "the first batch of each of 3 epochs took 400 ms longer than a usual one: 9.1 % of the run"
        in judge(base).evidence
    )
    assert not any("first batch" in line for line in judge(Demands((batch,) * 60, steps, 2, 5, 2)).evidence)
