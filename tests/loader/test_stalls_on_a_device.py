"""What a loader says of its waits on a device, by the device's own time; and how far the host runs ahead of it."""

from __future__ import annotations

import gc

import pytest
import torch
from child_processes import in_a_fork
from fake_pool import FakePool
from hypothesis import given
from hypothesis import strategies as st
from late_backend import TimedDevice

from fastload import FastLoader, MixedEcho
from fastload.loader.echo_policy import EchoPolicy, pass_ended
from fastload.loader.iteration import Iteration, PassCounter
from fastload.plan import EchoSchedule, EpochPlan, Pace
from fastload.plan.cursor import Position
from fastload.prefetch.auto_workers import AutoWorkers
from fastload.prefetch.process_pool import ProcessPool
from fastload.prefetch.producer import Producer
from fastload.prefetch.recipe import make_recipe
from fastload.prefetch.ring import SampleForm
from fastload.timing.clocks import MOST_IN_FLIGHT, InFlight

PACKED = {"rows": 48, "size": (6, 5, 3), "seed": 3, "chunk_rows": 8}


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return torch.tensor(index)


class Source(FakePool):
    """Batches are read one after the other, from the beginning on; each takes its `reads_s`."""

    def __init__(self, device, reads_s):
        self.device = device
        self.done, at = [], device.now
        for read_s in reads_s:
            at += read_s
            self.done.append(at)

    def make(self, work):
        self.device.now = max(self.device.now, self.done.pop(0))
        work.arrays = {"labels": work.rows.copy(), "row": work.rows, "valid": work.whole.valid}
        work.in_one_piece, work.form = False, SampleForm(("labels",), None)

    def depth(self, run):
        return int(bool(self.done) and self.done[0] <= self.device.now)

    def leave(self, run):
        super().leave(run)
        self.done.clear()


def begin(device, reads_s, echo=1, distance=0, in_flight=None, ended=lambda _: None):
    """Returns a pass over a batch for each of the times, and its numbers."""
    schedule = EchoSchedule(len(reads_s), echo, distance)
    plan = EpochPlan(range(2 * len(reads_s)), batch_size=2, shuffle=False)
    counter = PassCounter(clock=lambda: device.now, in_flight=in_flight or InFlight(device.clock))
    options = FastLoader(Numbers(), 2, device=device)._options
    producer = Producer(options, make_recipe(options))
    producer.pool = Source(device, reads_s)
    producer.begin(plan)
    return Iteration(options, producer, (), Position(plan, schedule), counter, ended), counter


def train(iteration, device, step_s, *, kernels=1, steps=None):
    """Runs steps, each of so many kernels, and returns how often the host was how many steps ahead of the device."""
    ends, ahead = [], []
    for number, _ in enumerate(iteration, 1):
        for _ in range(kernels):
            device.work(step_s / kernels)
        ends.append(device.busy_until)
        ahead.append(sum(end > device.now for end in ends))
        if number == steps:
            break
    return ahead


def test_a_source_that_is_slow_stalls_the_device_for_what_it_takes_longer():
    device, paces = TimedDevice(copy_s=0.25), []
    iteration, counter = begin(device, [3.0] * 10, ended=paces.append)
    train(iteration, device, 1.0)
    # Three fields are copied when a batch was read: the first comes after 3.75, each other one 3 after the one before.
    stats = counter.snapshot()
    assert stats.stall_s == pytest.approx(3.75 + 9 * 2.0) == pytest.approx(device.idle_s)
    assert stats.stall_share == pytest.approx(stats.stall_s / stats.elapsed_s) and stats.elapsed_s == pytest.approx(30)
    # When the loop ended, the last batch was not there yet.
    assert paces == [(8, 8, pytest.approx(8 * 2.0), pytest.approx(8 * 1.0))]
    assert counter.pace() == (9, 9, pytest.approx(9 * 2.0), pytest.approx(9 * 1.0))


@pytest.mark.parametrize("kernels", [1, 8])
def test_a_device_that_always_works_has_no_stall_though_the_host_is_blocked_in_next(kernels):
    device = TimedDevice(queue=4)  # the driver takes four launches, then the host has to wait wherever it is
    iteration, counter = begin(device, [0.1] * 20)
    train(iteration, device, 4.0, kernels=kernels)
    stats = counter.snapshot()
    assert stats.stall_s == pytest.approx(0.1) == pytest.approx(device.idle_s)
    assert stats.blocked_s > (60 if kernels == 1 else 5), "the host is what waits"
    assert stats.stall_share < 0.01


times = st.floats(0, 4, width=16)


@given(
    reads_s=st.lists(times, min_size=1, max_size=12),
    steps_s=st.lists(times, min_size=1, max_size=5),
    copy_s=st.sampled_from([0.0, 0.25, 2.0]),
    queue=st.integers(1, 9),
    echo=st.integers(1, 3),
    distance=st.integers(0, 2),
)
def test_the_stall_is_the_time_in_which_no_kernel_ran(reads_s, steps_s, copy_s, queue, echo, distance):
    device, paces = TimedDevice(copy_s=copy_s, queue=queue), []
    iteration, counter = begin(device, reads_s, echo, distance if echo > 1 else 0, ended=paces.append)
    seen = 0
    for number, _ in enumerate(iteration):
        device.work(steps_s[number % len(steps_s)])
        before = device.now
        stats = counter.snapshot()
        assert device.now == before, "in the loop the host waits for no mark"
        assert seen <= stats.stall_s <= device.idle_s + 1e-6, "only what has happened is counted"
        seen = stats.stall_s
    before = device.now
    stats = counter.snapshot()
    assert stats.stall_s == pytest.approx(device.idle_s) and stats.steps == echo * len(reads_s)
    assert 0 <= stats.blocked_s <= stats.elapsed_s + 1e-6 and device.now <= max(before, device.busy_until)
    # Once all has happened, the pace is that of the pass up to its last batch.
    pace = counter.pace()
    assert pace.batches == len(reads_s) - 1 and pace.steps <= echo * len(reads_s) - 1
    assert pace.stall_s == pytest.approx(stats.stall_s - counter.on_stream.first_s)
    assert len(paces) == 1 and paces[0].batches <= pace.batches
    # Marks are used again: those of the batches in flight, and one of the pass.
    assert len(device.clock.live) <= 1


def test_only_waits_for_fresh_batches_are_stalls_where_batches_are_used_again():
    device, paces = TimedDevice(), []
    iteration, counter = begin(device, [3.0] * 12, 2, ended=paces.append)
    train(iteration, device, 1.0)
    # Two steps a batch: the source is one second late each time.
    assert counter.snapshot().stall_s == pytest.approx(3.0 + 11 * 1.0)
    # Not waited for: the two steps of the last batch have not begun when the loop ends.
    assert counter.pace() == (11, 22, pytest.approx(11.0), pytest.approx(22.0))
    assert paces[0].batches in (10, 11) and paces[0].stall_s == pytest.approx(paces[0].batches * 1.0)


def test_a_pass_that_is_left_amid_tells_what_had_happened_and_later_the_rest():
    device, paces = TimedDevice(), []
    iteration, counter = begin(device, [2.0] * 20, ended=paces.append)
    train(iteration, device, 1.0, steps=6)
    device.work(100.0)
    next(iteration)
    known = counter.snapshot().stall_s
    assert known == pytest.approx(2.0 + 5 * 1.0), (
        "the batch in hand has not begun: whether it is waited for is not known"
    )
    now = device.now
    iteration.close()
    del iteration
    gc.collect()
    assert device.now == now and len(paces) == 1, "to end a pass the host waits for no step"
    assert counter.snapshot().stall_s == pytest.approx(known) and device.now == pytest.approx(device.busy_until)


@pytest.mark.parametrize(("source_s", "queue", "factor"), [(3.0, 1000, 3), (0.5, 1000, 1), (0.0, 3, 1)])
def test_echo_auto_chooses_from_the_time_that_the_device_waited(source_s, queue, factor):
    device, policy = TimedDevice(queue=queue), EchoPolicy(chooses=True)
    iteration, counter = begin(device, [source_s] * 30, ended=lambda pace: policy.ended(pace, 1))
    train(iteration, device, 1.0)
    assert policy.next_schedule(30).factor == factor
    if queue == 3:
        # By the host's clock the loop waited for most of its time, and each batch would have been used again.
        assert counter.waited_s > 20


class Noting(AutoWorkers):
    def ended(self, measured, workers, *, worker_bytes):
        self.measured = measured


@pytest.mark.parametrize(("stall_s", "starved_s"), [(0.0, 0.0), (3.0, 3.0), (50.0, 20.0)])
def test_processes_are_not_added_for_what_a_host_waits_while_its_device_works(stall_s, starved_s):
    options, auto = FastLoader(Numbers(), 2, workers=1)._options, Noting()
    pool = ProcessPool(options, make_recipe(options))
    pool.begin_pass()
    pool.pass_meter.starved_s = 20.0
    pass_ended(EchoPolicy(), auto, pool, PassCounter(), Pace(10, 10, stall_s=stall_s, work_s=60.0))
    pool.close()
    assert auto.measured.starved_s == starved_s and auto.measured.elapsed_s == stall_s + 60


def steps_ahead(echo, batches):
    device = TimedDevice()
    iteration, counter = begin(device, [0.1] * batches, echo)
    return train(iteration, device, 10.0), counter, device


@pytest.mark.parametrize("echo", [1, 3])
def test_the_host_is_no_more_than_some_batches_ahead_and_that_is_no_stall(echo):
    ahead, counter, device = steps_ahead(echo, 15)
    # One at work, and those that have not begun.
    assert max(ahead) == ahead[-1] == MOST_IN_FLIGHT + 1
    stats = counter.snapshot()
    assert stats.stall_s == pytest.approx(0.1) and stats.blocked_s > 10.0 * (15 * echo - MOST_IN_FLIGHT - 2)
    assert device.idle_s == pytest.approx(0.1), "the device is never kept waiting by that"


def test_batches_in_flight_are_bounded_over_short_epochs_too():
    device = TimedDevice()
    in_flight, ahead = InFlight(device.clock), []
    for _ in range(12):
        iteration, _ = begin(device, [0.0], in_flight=in_flight)
        train(iteration, device, 10.0)
        ahead.append(device.busy_until - device.now)
    assert max(ahead) == 10.0 * (MOST_IN_FLIGHT + 1)


def test_a_forked_process_looks_at_no_mark():
    device = TimedDevice()
    iteration, counter = begin(device, [1.0] * 4)
    train(iteration, device, 1.0, steps=3)
    marks = device.clock.marks

    def look():
        assert counter.snapshot().steps == 3 and counter.pace().batches <= 2
        iteration.close()

    in_a_fork(look)
    assert counter.snapshot().steps == 3 and device.clock.marks == marks


@pytest.mark.parametrize(
    "options", [{}, {"echo": 2}, {"echo": MixedEcho(2, 2)}, {"cache": "device"}, {"cache": "host"}]
)
def test_a_loaders_stats_are_those_of_the_devices_clock(packed, options):
    device = TimedDevice()
    loader = FastLoader(packed, 8, device=device, **options)
    for epoch in range(2):
        device.now += 50  # the script does other things: no stall
        for number, _ in enumerate(loader):
            device.work(1.0)
            if number:
                device.now += 7
        # Batches are there at once by the device's clock: it only waits for the loop, which is no stall of the loader.
        stats = loader.stats
        assert stats.stall_s == 0 and stats.steps == number + 1 and device.idle_s > 50 * epoch
        assert 0 < stats.blocked_s <= stats.elapsed_s < 50
    loader.close()


def test_on_the_cpu_the_host_is_blocked_for_as_long_as_it_waits_for_batches(packed):
    loader = FastLoader(packed, 8)
    for _ in loader:
        pass
    stats = loader.stats
    assert 0 < stats.blocked_s <= stats.stall_s <= stats.elapsed_s
