"""What a verdict predicts for a loop, against the same loop run again on a simulated machine with the change made.

40 drawn loops here; `FASTLOAD_LOOPS=1000 python -m pytest -s tests/profiling/verdict/test_predictions.py` takes 1,000,
in some minutes, and prints those that were predicted wrong.
"""

from __future__ import annotations

import math
import os
import random
import re
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
from simulated_machine import World, run

from fastload.profiling.doctor.loader_records import Fetch, Interval
from fastload.profiling.doctor.loop_demands import contending, starts
from fastload.profiling.verdict import Demands, judge
from fastload.profiling.verdict.demands import PACKED
from fastload.timing.results import BatchWork, LoopStep, WorkTime

LOOPS = int(os.environ.get("FASTLOAD_LOOPS", "40"))
FIRST = int(os.environ.get("FASTLOAD_FIRST_LOOP", "0"))


def demands_of(world, trace):
    """What the doctor would note of a run."""
    fetches = [
        Fetch(1, made.begin_s, made.end_s - made.begin_s,
              BatchWork({name: WorkTime(*cost) for name, cost in made.stages.items()}, runnable_s=made.runnable_s))
        for made in sorted(trace.made, key=lambda made: made.begin_s)
    ]  # fmt: skip
    ends_s = [*trace.asked_s[1:], math.inf]
    loader = SimpleNamespace(
        fetches=fetches, passes=[Interval(*one) for one in zip(trace.asked_s, ends_s, strict=True)],
        epochs=trace.first_s, fetch_stride=1,
    )  # fmt: skip
    steps = []
    for begin_s, wait_s, own_s, _ in trace.steps:
        hidden_s = min(wait_s, max(0.0, world.device_s - own_s))  # while the device is busy, nothing is waited for
        steps.append(LoopStep(begin_s, wait_s - hidden_s, 0.0, 0.0, own_s + hidden_s, 32))
    workers = world.workers
    return Demands(
        batches=tuple(fetch.work for fetch in fetches),
        steps=tuple(steps),
        workers=workers,
        ahead=workers * world.prefetch,
        cpus=world.cores,
        epochs=tuple((first_s, 0.0) for first_s in trace.first_s),
        receive_s=world.receive_s if workers else 0.0,
        step_running_s=world.own_s * world.threads,
        step_runnable_s=statistics.fmean(runnable_s for *_, runnable_s in trace.steps),
        persistent=world.persistent,
        starts_s=starts(loader) if workers else (),
        timed_device=bool(world.device_s),
        device_s=world.device_s,
        host_s=sorted(own_s for _, _, own_s, _ in trace.steps)[len(steps) // 10],
        contending=contending(fetches, 1, steps) if workers else (),
    )


def after(world, cure):
    """The same world with a change made."""
    if cure.cause in PACKED:
        stages = tuple(stage if stage[0] == "transform" else (stage[0], 0.0, 0.0) for stage in world.stages)
        return replace(world, stages=stages, receive_s=0.0, persistent=True)
    if cure.cause == "transform":
        stages = tuple((stage[0], 0.0, 0.0) if stage[0] == "transform" else stage for stage in world.stages)
        return replace(world, stages=stages)
    if cure.cause == "hand-over":
        return replace(world, receive_s=0.0)
    if cure.cause == "worker start-up":
        return replace(world, persistent=True)
    return replace(world, workers=int(re.search(r"workers=(\d+)", cure.change)[1]))


def drawn(number):
    draw = random.Random(number)

    def between(least, most):
        return least * (most / least) ** draw.random()

    cores = draw.choice([1, 2, 2, 4, 8])
    device_s = between(0.002, 0.08) if draw.random() < 0.3 else 0.0
    workers = draw.choice([0, 1, 2, 2, 4, 8])
    return World(
        cores=cores,
        workers=workers,
        stages=tuple(
            (name, between(0.0003, 0.03), between(0.0003, 0.03) if draw.random() < 0.3 else 0.0)
            for name in ("reading", "decoding", "transform", "collate")
        ),
        spread=draw.choice([0.0, 0.1, 0.3]),
        # Nobody can know what workers that do not exist would need to start and to hand over, nor how far they would
        # slow down a step of several threads.
        receive_s=between(0.0001, 0.002 if workers else 0.0002),
        own_s=0.001 if device_s else between(0.002, 0.08),
        threads=draw.choice([1, min(2, cores), cores]) if workers and not device_s else 1,
        parts=int(between(3, 80)),
        device_s=device_s,
        startup_s=draw.choice([0.0, 0.0, between(0.01, 0.3)]) if workers else 0.0,
        steps=int(between(16, 150)),
        persistent=draw.random() < 0.3,
        seed=number,
    )


def test_a_loop_with_the_change_made_takes_as_long_as_was_predicted(capsys):
    errors, lines = [], []
    for number in range(FIRST, FIRST + LOOPS):
        world = drawn(number)
        trace = run(world)
        verdict = judge(demands_of(world, trace))
        # One model: the figures of a verdict do not contradict one another.
        assert verdict.step_s == pytest.approx(trace.step_s)
        assert all(cure.gain == pytest.approx(verdict.step_s / cure.step_s) for cure in verdict.cures)
        assert verdict.worth_making == (bool(verdict.cures) and verdict.cures[0].gain >= 1.1)
        if not verdict.worth_making:
            free = replace(world, stages=(("transform", 0.0, 0.0),), receive_s=0.0, persistent=True)
            least = verdict.step_s / run(free).step_s
            error = 1.0 if least < 1.2 or verdict.cause != "compute" else 1.2 / least
        else:
            error = verdict.cures[0].step_s / run(after(world, verdict.cures[0])).step_s
        errors.append(error)
        if abs(error - 1) > 0.1:
            lines.append(f"loop {number}: {error:.2f} of the measured step; {verdict.sentence}\n    {world}")
    right = sum(abs(error - 1) <= 0.1 for error in errors)
    with capsys.disabled():
        if "FASTLOAD_LOOPS" in os.environ:
            print("", *lines, f"{right} of {len(errors)} within 10 %", sep="\n")
    assert right >= 0.9 * len(errors), "\n".join(lines)
    assert all(0.4 < error < 2.5 for error in errors), "\n".join(lines)
