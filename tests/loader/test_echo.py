"""Echo in passes of a loader: batches kept, and factors chosen from waits. Time is a fake clock's where it decides."""

from __future__ import annotations

import gc
import json
import logging
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from check_resume import through_torch
from fake_pool import FakePool

from fastload import FastLoader, MixedEcho, PackedDataset
from fastload.distributed.consensus import Agreement
from fastload.distributed.ranks import Share
from fastload.errors import StateError
from fastload.loader.echo_policy import EchoPolicy
from fastload.loader.iteration import Iteration, PassCounter
from fastload.plan import EchoSchedule, EpochPlan, Pace
from fastload.plan.cursor import Position
from fastload.prefetch.producer import Producer
from fastload.prefetch.recipe import make_recipe
from fastload.prefetch.ring import SampleForm
from fastload.transforms import RandomCrop
from sample_files import write_packed, write_ragged

N = 48
PACKED = {"rows": N, "size": (6, 5, 3), "seed": 3, "chunk_rows": 8}
SLOW, FAST = Pace(100, 100, stall_s=250.0, work_s=100.0), Pace(100, 100, stall_s=0.0, work_s=100.0)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return torch.tensor(index)


class Clock:
    """Time that passes when someone says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Source(FakePool):
    """A batch takes it source_s, it works ahead of the user, in so many slots."""

    def __init__(self, clock, source_s, slots=4):
        self.clock, self.source_s, self.slots = clock, source_s, slots
        self.made = []

    def begin(self, epochs, *, timed):
        self.taken = [self.clock.now] * self.slots
        self.done = self.clock.now
        return super().begin(epochs, timed=timed)

    def make(self, work):
        self.done = max(self.done, self.taken.pop(0)) + self.source_s
        self.clock.now = max(self.clock.now, self.done)
        self.taken.append(self.clock.now)
        work.form, work.fields = SampleForm(("labels",), None), {"labels": torch.from_numpy(work.rows.copy())}
        self.made.append(weakref.ref(work))

    def depth(self, run):
        raise AssertionError("on the CPU nothing is copied early")


def begin(source, schedule, ended=lambda _: None, epoch=0):
    plan = EpochPlan(range(2 * schedule.num_batches), batch_size=2, shuffle=False, epoch=epoch)
    counter = PassCounter(clock=source.clock)
    options = FastLoader(Numbers(), 2)._options
    producer = Producer(options, make_recipe(options))
    producer.pool = source
    producer.begin(plan)
    return Iteration(options, producer, (), Position(plan, schedule), counter, ended), counter


def train(iteration, clock, step_s, steps=None):
    rows = []
    for batch in iteration:
        rows.append(batch.rows.tolist())
        clock.now += step_s
        if len(rows) == steps:
            break
    return rows


@pytest.mark.parametrize(("factor", "source_s"), [(1, 3.0), (2, 3.0), (2, 0.5), (4, 5.0)])
def test_the_pace_is_what_the_source_and_the_steps_took(factor, source_s):
    clock, paces = Clock(), []
    iteration, counter = begin(Source(clock, source_s), EchoSchedule(10, factor), paces.append)
    assert len(train(iteration, clock, step_s=1.0)) == 10 * factor
    stall_s = 9 * max(0.0, source_s - factor)
    assert paces == [(9, 10 * factor, pytest.approx(stall_s), pytest.approx(10.0 * factor))]
    stats = counter.snapshot()
    assert (stats.fresh_samples, stats.consumed_samples, stats.echo) == (20, 20 * factor, factor)
    assert stats.stall_s == pytest.approx(source_s + stall_s)


def test_a_pass_that_is_left_tells_its_pace_once(caplog):
    clock, paces = Clock(), []
    iteration, _ = begin(Source(clock, 3.0), EchoSchedule(10, 1), paces.append)
    train(iteration, clock, 1.0, steps=4)
    iteration.end_measuring()
    train(iteration, clock, 1.0, steps=2)
    iteration.displace()
    del iteration
    gc.collect()
    # What the user did after the last batch that was handed over is not known to be a step.
    assert paces == [(3, 3, pytest.approx(6.0), pytest.approx(3.0))]


@pytest.mark.parametrize("schedule", [EchoSchedule(12, 3), EchoSchedule(12, 3, 2), EchoSchedule(1, 4, 1)])
def test_batches_are_kept_only_while_they_will_be_used(schedule):
    clock = Clock()
    source = Source(clock, 0.0)
    iteration, _ = begin(source, schedule)
    for (step, use), batch in zip(enumerate(schedule.uses(), 1), iteration, strict=True):
        assert batch.rows.tolist() == [2 * use.batch, 2 * use.batch + 1] == batch[0].tolist()
        batch[0].fill_(-1)  # the batch is the user's
        batch.rows[:] = -1
        alive = sum(made() is not None for made in source.made)
        assert alive == schedule.begun(step) - schedule.finished(step) <= (schedule.factor - 1) * schedule.distance + 1


def test_auto_follows_a_source_that_is_slow_and_then_becomes_fast(caplog):
    clock, policy, factors = Clock(), EchoPolicy(chooses=True), []
    caplog.set_level(logging.INFO, logger="fastload")
    for epoch in range(10):
        schedule = policy.next_schedule(60)
        factors.append(schedule.factor)
        source = Source(clock, source_s=3.8 if epoch < 4 else 0.1)
        iteration, _ = begin(source, schedule, lambda pace, factor=schedule.factor: policy.ended(pace, factor), epoch)
        assert len(train(iteration, clock, step_s=1.0)) == 60 * schedule.factor
    assert factors == [1, 4, 3, 4, 4, 3, 2, 1, 1, 1]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 6  # once a change
    change = "each batch is used 4 times from now on, not 1"
    assert said[0] == f'echo="auto": {change}: a fresh batch takes 3,800.0 ms, a step 1,000.0 ms'


def two_ranks():
    store = dist.HashStore()
    return [
        EchoPolicy(chooses=True, agreement=Agreement(store, Share(rank, 2), what="it", timeout_s=0.01))
        for rank in range(2)
    ]


def test_ranks_take_what_the_slowest_needs_and_say_so(caplog):
    caplog.set_level(logging.INFO, logger="fastload")
    slow, fast = two_ranks()
    assert slow.next_schedule(5).factor == fast.next_schedule(5).factor == 1
    slow.ended(SLOW, 1)
    fast.ended(FAST, 1)
    assert fast.next_schedule(5) == slow.next_schedule(5) == EchoSchedule(5, 3)
    assert "which asks for 1; another rank needs 3" in caplog.records[0].getMessage()
    # Asked again, nothing is agreed on again.
    assert fast.next_schedule(7) == slow.next_schedule(7) == EchoSchedule(7, 3)
    # A factor from a state replaces what a pass would have made it.
    slow.ended(SLOW, 3)
    fast.ended(FAST, 3)
    for rank in (slow, fast):
        assert rank.schedule_of(5, 2) == EchoSchedule(5, 2)
        rank.adopt(2)
    assert slow.next_schedule(5) == fast.next_schedule(5) == EchoSchedule(5, 2)
    slow.ended(Pace(), 2)
    fast.ended(Pace(), 2)
    assert slow.next_schedule(5) == fast.next_schedule(5) == EchoSchedule(5, 2)


class Interrupted:
    """A store whose network fails once."""

    def __init__(self):
        self.store, self.failures = dist.HashStore(), 1

    def set(self, key, value):
        if self.failures:
            self.failures -= 1
            raise dist.DistNetworkError("connection reset")
        self.store.set(key, value)

    def __getattr__(self, name):
        return getattr(self.store, name)


def test_what_could_not_be_published_when_a_pass_ended_is_when_the_factor_is_needed():
    policy = EchoPolicy(chooses=True, agreement=Agreement(Interrupted(), Share(0, 1), what="it", timeout_s=0.01))
    policy.ended(SLOW, 1)
    assert policy.next_schedule(5).factor == 3


# In a loader


def test_a_state_that_is_refused_changes_nothing(packed):
    loader = auto_with(packed, 3)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    for damaged in ({"echo_position": 2, "segments": [[1, 4, 12], [1, 4, 0]]}, {"segments": [[1, 4, 99]]}):
        with pytest.raises(StateError):
            loader.load_state_dict(state | {"echo": ["auto", 4, 0]} | damaged)
    assert len(loader) == 36 and len(list(iterator)) == 35


class Told(EchoPolicy):
    """Decides by the times that it is told of instead of those of a clock, which depend on what else runs."""

    def ended(self, pace, factor):
        assert pace.batches == 11 and pace.steps == 12 * factor and pace.work_s > 0
        super().ended(SLOW, factor)


def rows_of(loader):
    return [batch.rows.tolist() for batch in loader]


def test_auto_in_a_loader_fixes_a_factor_for_each_epoch_and_len_is_true():
    loader = FastLoader(Numbers(), 4, echo="auto", workers=1, shuffle="full")
    loader._echo = Told(chooses=True)
    assert len(loader) == len(loader) == 12
    assert len(rows_of(loader)) == 12 and loader.stats.echo == 1
    factor, rest = divmod(len(loader), 12)
    assert (factor, rest) == (3, 0)
    state = loader.state_dict()
    assert state["echo"] == ["auto", 1, factor] and state["epoch"] == 0
    second = rows_of(loader)
    assert len(second) == 12 * factor and loader.stats.echo == factor
    assert loader.stats.consumed_samples == factor * loader.stats.fresh_samples == 48 * factor
    # Each batch so many times running, and the epoch after it as before.
    assert second[::factor] == second[factor - 1 :: factor]
    resumed = FastLoader(Numbers(), 4, echo="auto", workers=1, shuffle="full")
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.epoch == 1 and len(resumed) == 12 * factor and rows_of(resumed) == second


def auto_with(packed, factor, **options):
    """A loader in the middle of training: its factor comes from a state."""
    loader = FastLoader(packed, 4, echo="auto", **options)
    loader.load_state_dict(loader.state_dict() | {"echo": ["auto", factor, 0]})
    return loader


@pytest.mark.parametrize("stop", [0, 1, 7, 35, 36])
@pytest.mark.parametrize("through", [lambda state: json.loads(json.dumps(state)), through_torch])
def test_a_state_of_auto_holds_the_factor_of_its_epoch(packed, stop, through):
    whole = rows_of(auto_with(packed, 3))
    assert len(whole) == 36
    loader = auto_with(packed, 3)
    state = through(loader.state_dict())
    for _ in zip(range(stop), loader if stop else (), strict=False):
        state = through(loader.state_dict())  # in the loop body
    # Within the body of the last step the next factor is not known.
    assert state["echo"] == ["auto", 3, 0]
    resumed = FastLoader(packed, 4, echo="auto")
    resumed.load_state_dict(state)
    if stop < 36:
        assert len(resumed) == 36 - stop and rows_of(resumed) == whole[stop:]
    else:
        assert resumed.epoch == 1 and len(resumed) == len(rows_of(resumed)) == 36


def test_len_is_true_whatever_came_before(packed):
    loader = auto_with(packed, 3)
    running = iter(loader)
    next(running)
    assert len(loader) == 36

    def whole_epoch():
        expected = len(loader)
        assert expected % 12 == 0 and len(rows_of(loader)) == expected
        return expected

    for _ in range(4):
        loader.set_epoch(50)
        whole_epoch()
        assert loader.epoch == 50
    next(iter(loader))
    whole_epoch()
    state = loader.state_dict()
    for _ in zip(range(5), loader, strict=False):
        pass
    loader.load_state_dict(state)
    assert whole_epoch() == 12 * state["echo"][2]


def test_a_state_of_auto_is_taken_by_a_given_echo_and_the_other_way_round(packed):
    auto, given = auto_with(packed, 3), FastLoader(packed, 4, echo=2)
    for _ in zip(range(4), auto, strict=False):
        pass
    given.load_state_dict(auto.state_dict())
    assert len(given) == len(rows_of(given)) == 2 * 10  # of 12 batches 2 were begun
    mixed = FastLoader(packed, 4, echo=MixedEcho(2))
    for _ in zip(range(4), mixed, strict=False):
        pass
    auto = FastLoader(packed, 4, echo="auto")
    auto.load_state_dict(mixed.state_dict())
    assert len(auto) == len(rows_of(auto)) == 2 * 9  # b0 b1 b0' b2


@pytest.mark.parametrize("echo", [3, MixedEcho(3, 2)])
def test_an_echo_gives_the_pixels_of_its_rows_whatever_the_loop_wrote(packed, pixels, echo):
    dataset = PackedDataset(packed, fields=["images", "row"])
    loader = FastLoader(dataset, 4, echo=echo, shuffle="full")
    assert len(loader) == 36
    seen, last = [], None
    for batch in loader:
        assert np.array_equal(batch[0].permute(0, 2, 3, 1).numpy(), pixels[batch.rows])
        assert torch.equal(batch[1], batch.rows)
        assert last != batch.rows.tolist() or echo == 3
        last = batch.rows.tolist()
        seen += last
        batch[0].zero_()
        batch[1].fill_(-1)
    assert sorted(seen) == sorted(3 * list(range(N)))
    stats = loader.stats
    assert (stats.fresh_samples, stats.consumed_samples, stats.echo) == (N, 3 * N, 3)


@pytest.mark.parametrize(("stored", "shares"), [("of several sizes", True), ("of one size", False)])
def test_uses_of_a_batch_share_the_crop_of_images_of_several_sizes_and_draw_it_anew_else(tmp_path, stored, shares):
    rng = np.random.default_rng(0)
    if stored == "of one size":
        path = write_packed(tmp_path / "a.h5", rng.integers(0, 256, (8, 30, 30, 3), dtype=np.uint8))
    else:
        images = [rng.integers(0, 256, (30 + i, 30 - i, 3), dtype=np.uint8) for i in range(8)]
        path = write_ragged(tmp_path / "a.h5", images)
    loader = FastLoader(path, 4, echo=2, transform=[RandomCrop(8)], share=None)
    batches = [batch[0].clone() for batch in loader]
    assert [torch.equal(*batches[first : first + 2]) for first in (0, 2)] == [shares, shares]
