"""`workers="auto"`: the decision as a pure function, and loaders that make it."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastload import FastLoader
from fastload.prefetch.auto_workers import MOST_WORKERS, AutoWorkers, History, MeasuredPass, choose_workers
from fastload.system.machine import busy_processes_s
from sample_files import write_packed

ROOM = {"cpus": 2, "room": 2**20}
N = 2000


def epoch_of(*, batches=200, elapsed=10.0, starved=0.0, busy=0.5, start=0.0):
    return MeasuredPass(batches, elapsed, starved, busy, start)


# The decision

EPOCHS = st.builds(
    MeasuredPass,
    batches=st.integers(0, 500),
    elapsed_s=st.floats(0.0, 100.0),
    starved_s=st.floats(0.0, 120.0),
    busy_s=st.none() | st.floats(0.0, 1000.0),
    start_s=st.floats(0.0, 10.0),
)
LIMITS = st.fixed_dictionaries({"cpus": st.integers(1, 64), "room": st.integers(0, 64)})
HISTORIES = st.builds(
    History,
    before=st.integers(0, 16),
    rate=st.floats(0.1, 1000.0),
    start_s=st.floats(0.0, 2.0),
    rest=st.integers(0, 9),
    next_rest=st.integers(1, 64),
)


@given(EPOCHS, st.integers(1, 16), LIMITS, HISTORIES)
def test_any_choice_is_the_number_itself_the_one_before_or_more_within_the_limits(epoch, workers, limits, history):
    choice = choose_workers(epoch, workers, history, **limits)
    assert (choice is None) == (epoch.batches < max(8, 2 * workers) or epoch.elapsed_s < 1.0)
    if choice is None:
        return
    chosen, reason, _ = choice
    assert chosen in (workers, history.before) or workers < chosen <= max(MOST_WORKERS, limits["cpus"])
    assert reason
    if chosen > max(workers, history.before):
        assert chosen - workers <= limits["room"]


@given(EPOCHS, st.integers(1, 16), LIMITS)
def test_a_loop_that_does_not_wait_keeps_its_workers(epoch, workers, limits):
    choice = choose_workers(epoch._replace(starved_s=0.0), workers, History(), **limits)
    assert choice is None or choice.workers == workers


@pytest.mark.parametrize(
    ("epoch", "room", "number"),
    [
        ({"starved": 5.0}, 2**20, 5),  # they give half of what the loop would take: four would do, and a bit
        ({"starved": 9.9}, 2**20, MOST_WORKERS),
        ({"starved": 9.9}, 3, 5),  # the memory has no room for more
        ({"starved": 9.0, "busy": 19.0}, 2**20, 2),  # the CPUs run no more
        ({"starved": 9.0, "busy": 9.0}, 2**20, 4),
        ({"elapsed": 1.5, "starved": 0.5, "busy": 0.1, "start": 6.0}, 2**20, 2),  # starting them would take longer
        ({"elapsed": 1.5, "starved": 0.5, "busy": 0.1, "start": 0.1}, 2**20, 4),
    ],
)
def test_two_workers_become_as_many_as_help_at_once(epoch, room, number):
    assert choose_workers(epoch_of(**epoch), 2, History(), cpus=2, room=room).workers == number


def test_a_number_that_brings_nothing_is_taken_back_and_left_alone_for_longer_each_time():
    number, rests = 2, []
    history = History()
    for _ in range(40):
        tried = choose_workers(epoch_of(starved=9.0), number, history, **ROOM)
        history = tried.history
        if tried.workers == number:
            continue
        back = choose_workers(epoch_of(starved=9.0), tried.workers, history, **ROOM)
        assert back.workers == number
        history = back.history
        rests.append(history.rest)
    assert rests == [4, 8, 16, 32]


def test_a_number_that_helps_stays():
    tried = choose_workers(epoch_of(starved=5.0), 2, History(), **ROOM)
    kept = choose_workers(epoch_of(batches=400, starved=0.1), tried.workers, tried.history, **ROOM)
    assert kept.workers == tried.workers and not kept.history.before


def test_short_epochs_are_seen_together():
    auto = AutoWorkers()
    numbers = []
    for _ in range(3):
        auto.ended(epoch_of(batches=20, elapsed=0.4, starved=0.3, busy=0.05), 2, worker_bytes=1)
        numbers.append(auto.number)
    assert numbers[:2] == [2, 2] and numbers[2] > 2


# What is measured


def test_a_process_that_is_gone_is_not_known():
    assert busy_processes_s([2**22 + 1]) is None and busy_processes_s([]) == 0.0


# In a loader


class Fast(torch.utils.data.Dataset):
    """Takes next to nothing."""

    def __len__(self):
        return 640

    def __getitem__(self, index):
        return torch.tensor([index])


class Slow(Fast):
    """Is slow by what `Told` makes of it."""


class Told(AutoWorkers):
    """Decides by the waits that it is told of instead of those of a clock, which depend on what else runs."""

    def __init__(self, starved_s):
        super().__init__()
        self.starved_s = starved_s

    def ended(self, measured, workers, *, worker_bytes):
        assert measured.busy_s is not None and measured.batches == 79 and measured.elapsed_s > 0 and worker_bytes > 1
        super().ended(epoch_of(batches=79, starved=self.starved_s, busy=0.1), workers, worker_bytes=1)


def epochs_of(loader, count):
    """The rows of each epoch, and the state in its middle and after it."""
    found = []
    for _ in range(count):
        rows = []
        for step, batch in enumerate(loader):
            rows.append(batch.rows.tolist())
            if step == 20:
                found.append(json.dumps(loader.state_dict()))
        found += [rows, json.dumps(loader.state_dict())]
    return found


def test_a_slow_source_gets_more_processes_and_nothing_else_changes(caplog):
    caplog.set_level(logging.INFO, logger="fastload")
    auto = FastLoader(Slow(), 8, workers="auto", shuffle="full", seed=3)
    auto._auto = Told(starved_s=5.0)
    given = FastLoader(Fast(), 8, workers=1, shuffle="full", seed=3)
    found = epochs_of(auto, 2)
    assert [text.replace("Slow", "Fast") if isinstance(text, str) else text for text in found] == epochs_of(given, 2)
    said = [record.getMessage() for record in caplog.records if "workers=" in record.getMessage()]
    assert said[0].startswith('workers="auto": ') and "the loop waited 50% of the time" in said[0]
    assert auto._producer.pool.number > auto._recipe.workers
    assert auto._producer.pool.pass_meter.measured(0, 0.0, 0.0, 1.0).busy_s is not None, (
        "a choice that is made is made by what was measured"
    )
    assert given._producer.pool.pass_meter.measured(0, 0.0, 0.0, 1.0).busy_s is None, (
        "a number that was given is not watched"
    )
    auto.close()
    given.close()


def test_threads_stay_as_many_as_they_are(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (N, 8, 8, 3), dtype=np.uint8)
    path = write_packed(tmp_path / "file.h5", images)
    auto, given = FastLoader(path, 16, workers="auto"), FastLoader(path, 16, workers=1)
    pools = set()
    for _ in range(3):
        for step, (one, other) in enumerate(zip(auto, given, strict=True)):
            assert torch.equal(one.rows, other.rows) and torch.equal(one[0], other[0])
            if step == 7:
                assert auto.state_dict() == given.state_dict()
        pools.add(id(auto._producer.pool))
    assert len(pools) == 1 and auto._auto.number is None
    auto.close()
    given.close()
