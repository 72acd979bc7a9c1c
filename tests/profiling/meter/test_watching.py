"""Any loop under a Meter: its batches untouched, its steps right, whatever way it ends."""

from __future__ import annotations

import gc
import weakref
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hand_clock import BATCH, HandClock, SlowLoader, times
from torch.utils.data import DataLoader, TensorDataset

from fastload import Meter, OptionError
from fastload.profiling.meter import measure_headspace
from fastload.profiling.meter.loops import Loop, demands_of, num_samples


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def meter(clock):
    with Meter(device=clock, sample_every_s=0) as meter:
        yield meter


def train(meter, loader, clock, compute_s=2.0):
    for _ in meter.watch(loader):
        clock.now += compute_s


def test_batches_are_the_loaders_own_in_order(meter):
    batches = [torch.zeros(2), {"image": torch.zeros(3, 1)}, "text"]
    assert all(one is other for one, other in zip(batches, meter.watch(batches), strict=True))
    assert [step.samples for step in meter.measured().steps] == [2, 3, 0]


def test_ranks_share_the_cpus_and_what_other_programs_use(meter, clock, monkeypatch, no_launcher):
    train(meter, SlowLoader(clock, 3), clock)
    monkeypatch.setattr("fastload.profiling.meter.meter.mean_others", lambda *_: 3.0)
    monkeypatch.setattr("fastload.distributed.ranks.available_cpus", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    demands = meter.demands()
    assert (demands.cpus, demands.others_cpus) == (4, 1.5)


def test_a_device_that_is_behind_is_waited_for_at_the_end_or_before_the_marks_pile_up():
    clock = HandClock(behind=True)
    with Meter(device=clock, sample_every_s=0) as meter:
        for number, _ in enumerate(meter.watch(SlowLoader(clock, 600))):
            assert number - meter.totals.steps < 300
            assert number > 200 or (meter.totals.steps == 0 and clock.waited_for == [])
            clock.now += number
    assert [times(step)[3] for step in meter.measured().steps] == list(range(600))
    assert len(clock.dropped) == len({id(mark) for mark in clock.dropped}), "a mark that is used again is free once"


def test_a_broken_off_pass_has_the_batches_that_were_handed_over_and_a_step_that_raises_is_not_swallowed(clock):
    with pytest.raises(ZeroDivisionError), Meter(device=clock, sample_every_s=0) as meter:
        for number, _ in enumerate(meter.watch(SlowLoader(clock))):
            if number == 2:
                break
            clock.now += 2
        broken_off = meter.totals.steps
        for _ in meter.watch(SlowLoader(clock)):
            clock.now += 2
            _ = 1 // 0
    assert broken_off == 3
    loops = [[times(step) for step in loop.steps] for loop in meter._loops]
    assert loops == [[(1, 0, 0, 2), (1, 0, 0, 2), (1, 0, 0, 0)], [(1, 0, 0, 2)]]


def test_a_loader_that_raises_is_heard(meter):
    def broken():
        yield 1
        raise KeyError("photo")

    with pytest.raises(KeyError, match="photo"):
        list(meter.watch(broken()))
    assert meter.totals.steps == 1
    with pytest.raises(TypeError, match="not iterable"):
        list(meter.watch(type("Unwilling", (), {"__iter__": lambda _: iter(3)})()))
    train(meter, [1, 2], HandClock())  # the failed one does not stand in the way


def test_an_empty_loader_has_no_steps_and_no_verdict(meter):
    assert list(meter.watch([])) == []
    measured = meter.measured("nothing")
    assert measured.num_steps == 0 and measured.verdict is None and measured.samples_per_s == 0
    assert meter.demands().steps == () == meter.demands().epochs
    with pytest.raises(OptionError, match="no step yet"):
        _ = meter.verdict


def test_epochs_of_one_loader_are_one_loop_that_waits_and_computes(meter, clock):
    loader = SlowLoader(clock, 2, end_s=0.02)
    for _ in range(3):
        train(meter, loader, clock)
        clock.now += 100  # validation, unwatched
    measured, totals = meter.measured(), meter.totals
    assert [times(step) for step in measured.steps] == [(1, 0, 0, 2)] * 6
    assert measured.stages == {} and measured.headspace_samples_per_s is None
    assert (measured.num_steps, totals.wait_s, totals.duration_s) == (6, 6, 18)
    assert totals.stall_share == pytest.approx(1 / 3)
    # The wait at the end of each pass, which found no batch, belongs to no step, and is not lost.
    assert [end_s >= 0.02 for _, end_s in meter.demands().epochs] == [True] * 3
    again = meter.watch(loader)
    assert len(again) == 2 and [len(list(again)) for _ in range(2)] == [2, 2]


def test_a_loop_inside_another_is_not_a_part_of_its_steps_and_ends_with_it_when_it_is_left(meter, clock):
    training, validation = SlowLoader(clock, 3), SlowLoader(clock, 2, wait_s=10)
    left = None
    for number, _ in enumerate(meter.watch(training)):
        clock.now += 2
        if number == 1:
            train(meter, validation, clock, compute_s=50)
            left = iter(meter.watch(SlowLoader(clock, 5, wait_s=0)))
            next(left)
        clock.now += number != 1
    assert [times(step) for step in meter.measured(loader=training).steps] == [(1, 0, 0, 3), (1, 0, 0, 2), (1, 0, 0, 3)]
    assert [times(step) for step in meter.measured(loader=validation).steps] == [(10, 0, 0, 50)] * 2
    assert meter.measured().num_steps == 2, "the main loop is the one that took longest"
    assert [loop.totals.steps for loop in meter._loops] == [3, 2, 1]
    with pytest.raises(OptionError, match="take turns"):
        next(left)


def test_two_loops_that_take_turns_or_run_in_threads_need_a_meter_each(meter, clock):
    with pytest.raises(OptionError, match="a Meter of its own"):
        list(zip(meter.watch(SlowLoader(clock)), meter.watch(SlowLoader(clock)), strict=True))
    with Meter(sample_every_s=0) as one, Meter(sample_every_s=0) as other:
        pairs = list(zip(one.watch(range(4)), other.watch(range(4)), strict=True))
    assert len(pairs) == one.totals.steps == other.totals.steps == 4

    def steps_of(count):
        with Meter(sample_every_s=0) as meter:
            list(meter.watch(range(count)))
        return meter.totals.steps

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(steps_of, [50] * 4)) == [50] * 4


def test_what_cannot_be_is_refused_and_says_how():
    def refused(message, call, *words, **options):
        with pytest.raises(OptionError, match=message):
            call(*words, **options)

    meter = Meter(sample_every_s=0)
    refused(r"with fastload\.Meter", meter.watch, [1])
    with meter:
        watched = meter.watch([1, 2, 3])
        under_way = iter(watched)
        next(under_way)
        refused("cannot be iterated", meter.watch, 3)
        refused("did not watch", meter.demands, [1])
    refused("after its `with`", list, watched)
    refused("after its `with`", next, under_way)
    refused("another one", meter.__enter__)
    assert meter.totals.steps == 1
    refused("sample_every_s", Meter, sample_every_s=-1)
    for device in ("tpu", "cuda:x"):
        refused("device=", Meter, device=device)
    if not torch.cuda.is_available():
        refused("0 CUDA devices", Meter, device="cuda")


def test_a_watched_loader_and_its_batches_are_not_kept_alive(meter):
    class Loader:
        def __iter__(self):
            for _ in range(3):
                yield np.zeros(4)

    loader, seen = Loader(), []
    for batch in meter.watch(loader):
        seen.append(weakref.ref(batch))
        assert sum(ref() is not None for ref in seen) <= 2
    gone = weakref.ref(loader)
    del loader, batch
    gc.collect()
    assert gone() is None and all(ref() is None for ref in seen)
    assert meter.totals.steps == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_is_judged_by_its_waits(workers):
    loader = DataLoader(TensorDataset(torch.zeros(12, 3)), batch_size=4, num_workers=workers)
    with Meter(sample_every_s=0) as meter:
        for _ in range(2):
            for (images,) in meter.watch(loader):
                assert images.shape == (4, 3)
    demands = meter.demands()
    assert (demands.workers, demands.ahead, demands.is_fastload) == (workers, 2 * workers, False)
    assert len(demands.epochs) == 2 and demands.receive_s > 0 and demands.waits_only
    assert [step.samples for step in demands.steps] == [4] * 6
    assert meter.verdict.cause in ("", "compute")


def test_demands_are_made_of_what_a_loop_noted():
    loop = Loop(lambda: None, epochs=[(5.0, 0.25), (3.0, 0.0)], process_s=11.0, first_running_s=1.0)
    for wait_s in (5.0, 1.0, 3.0, 1.0, 1.0):
        loop.add((0.0, wait_s, 0.0, 0.0, 2.0, 1, None), None)
    loop.receive_s.add(0.5)
    loop.receive_s.add(1.5)
    loop.transform_running_s.add(0.2)
    loop.runnable_s.add(0.125)
    demands = demands_of(loop)
    assert demands.epochs == ((5.0, 0.25), (3.0, 0.0)) and demands.ended_s == 0.25 and demands.num_steps == 5
    # 3 waits of 1 s on a CPU, 1 s of the first ones, 5 transforms of 0.2 s; 6 of 11 s are left to 5 steps.
    assert demands.step_running_s == pytest.approx(1.2)
    assert demands.receive_s == 1.0 and demands.step_runnable_s == 0.125


def test_a_loader_asked_for_has_its_own_verdict(meter, clock):
    waiting, fed = SlowLoader(clock, 9, wait_s=3), SlowLoader(clock, 4, wait_s=0.01)
    train(meter, waiting, clock, compute_s=1)
    train(meter, fed, clock, compute_s=1)
    verdict = meter.verdict
    assert meter.measured(loader=waiting).verdict == verdict
    # Waits alone say how much, but not what for.
    assert verdict.cause == "" and verdict.worth_making and verdict.stall_share == pytest.approx(0.75, abs=0.01)
    assert verdict.cures[0].gain == pytest.approx(4, rel=0.01) and "fastload.diagnose(loader)" in verdict.sentence
    verdict = meter.measured(loader=fed).verdict
    assert verdict.cause == "compute" and not verdict.worth_making and not verdict.cures


def test_samples_are_counted_whatever_a_batch_is_made_of():
    pair = namedtuple("Pair", "images labels")
    tensors = torch.zeros(5, 2)
    for batch in (tensors, (tensors, 1), [[tensors]], {"a": "text", "b": tensors}, pair(tensors, 0), tensors.numpy()):
        assert num_samples(batch) == 5
    assert num_samples(SimpleNamespace(x=torch.zeros(7, 2))) == 7 and num_samples(torch.zeros(())) == 1
    assert num_samples("text") == num_samples(None) == num_samples([]) == num_samples({"a": 3}) == 0


@pytest.mark.parametrize("behind", [False, True])
def test_the_headspace_is_the_rate_of_a_step_alone_without_the_first_one_and_a_disturbed_one(behind):
    clock, taken = HandClock(behind=behind), iter([100.0, 0.5, 0.5, 60.0, *[0.5] * 500])

    def step(batch):
        assert batch is BATCH
        clock.now += next(taken)

    assert measure_headspace(step, BATCH, 70, device=clock) == 4
    assert measure_headspace(step, BATCH, 0.1, device=clock, samples=3) == 6
    with Meter(device=clock, sample_every_s=0) as meter:
        for batch in meter.watch([BATCH]):
            step(batch)
        assert meter.headspace(step, BATCH, 5) == 4
    measured = meter.measured()
    assert measured.headspace_samples_per_s == 4 and measured.headspace_how == "measured on one cached batch"
    assert measured.num_steps == 1
    with pytest.raises(OptionError, match="seconds"):
        measure_headspace(print, BATCH, 0)
    with pytest.raises(OptionError, match="samples="):
        measure_headspace(print, "text")


def test_a_meter_that_restarts_leaves_out_what_came_before_and_does_so_only_in_the_first_step(clock, meter):
    with pytest.raises(OptionError, match="first step"):
        meter.restart()
    for number, _ in enumerate(meter.watch(SlowLoader(clock, 3))):
        clock.now += 5.0 if number == 0 else 0.0  # to begin the step
        if number == 0:
            meter.restart()
        if number == 1:
            with pytest.raises(OptionError, match="first step"):
                meter.restart()
        clock.now += 2.0
    measured = meter.measured()
    assert [times(step) for step in measured.steps] == [(0, 0, 0, 2), (1, 0, 0, 2), (1, 0, 0, 2)]
    assert meter.demands().epochs[0][0] == 0 and measured.epochs_s == (measured.steps[0].begin_s,)
    assert len(clock.dropped) == len({id(mark) for mark in clock.dropped})
