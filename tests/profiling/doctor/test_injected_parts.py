"""The parts of the injected package by themselves: what is wrapped, how its calls are timed, what is written down."""

from __future__ import annotations

import _socket
import itertools
import json
import os
import pickle
import socket
import sys
import threading
import time
import zlib
from types import SimpleNamespace

import numpy as np
import pytest

from fastload.profiling.doctor import injected
from fastload.profiling.doctor.injected import batch_making, loop_side, timed_calls, worker_trial
from fastload.profiling.doctor.injected.batch_making import TimedDataset
from fastload.profiling.doctor.injected.event_file import EventFile, events
from fastload.profiling.doctor.injected.loop_side import LoaderState
from fastload.profiling.doctor.injected.timed_calls import (
    DECODING,
    H5,
    READING,
    WAITING,
    OpenFetch,
    metering,
    passing,
    timed,
    waiting,
)
from fastload.profiling.doctor.injected.worker_trial import WorkerTrial


@pytest.fixture
def ticks(monkeypatch):
    """A clock that is one second later whenever it is read, and a loader at work."""
    wall, cpu = itertools.count(), itertools.count(step=10)
    monkeypatch.setattr(timed_calls, "clock", lambda: float(next(wall)))
    monkeypatch.setattr(timed_calls, "cpu_clock", lambda: float(next(cpu)))
    monkeypatch.setattr(timed_calls, "waited_s", lambda: 0.0)
    metering.reset()
    metering.active = True
    yield
    metering.reset()


@pytest.fixture
def folder(tmp_path):
    before = injected.record_into(str(tmp_path))
    yield tmp_path
    injected.record_into(before)


def written(folder):
    return [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]


def test_calls_are_timed_once_also_those_that_raise_while_a_loader_works(ticks):
    decode = timed(lambda: 7, DECODING)
    assert timed(lambda: decode() + decode(), READING)() == 14
    assert metering.parts == {DECODING: [2.0, 20.0], READING: [5.0 - 2.0, 50.0 - 20.0]}
    with pytest.raises(ZeroDivisionError):
        timed(lambda: 1 // 0, READING)()
    assert metering.parts.pop(READING) == [4.0, 40.0] and timed_calls.thread.stack == []
    passing(lambda: None, "into")()
    passing(lambda: None, "out")()
    assert metering.parts == {DECODING: [2.0, 20.0], "into": [1.0, 10.0], "out": [1.0, 10.0]}
    metering.reset()
    assert timed(lambda: 7, READING)() == passing(lambda: 7, "into")() == 7
    assert metering.parts == {}


def test_sleeps_are_timed_with_their_line_in_code_that_makes_a_batch_and_not_inside_other_timed_calls(monkeypatch):
    sleep = waiting(time.sleep)
    fetch = OpenFetch()
    monkeypatch.setattr(timed_calls.thread, "fetch", fetch)
    monkeypatch.setattr(timed_calls.thread, "stack", [[0.0, 0.0]])
    metering.active = True
    try:
        timed(lambda: sleep(0.01), READING)()  # such as h5py, with a slow file of the script's own
        assert set(fetch.parts) == {READING} and not fetch.waits
        sleep(0.01)
        sleep(0.02)
        thread = threading.Thread(target=sleep, args=(0.01,))  # a thread of another purpose
        thread.start()
        thread.join()
    finally:
        metering.reset()
    wall, cpu = fetch.parts.pop(WAITING)
    assert wall >= 0.03 > cpu and metering.parts == {}
    lines = sorted(fetch.waits.items())
    name = "test_sleeps_are_timed_with_their_line_in_code_that_makes_a_batch_and_not_inside_other_timed_calls"
    assert all(line.startswith(f"{name} (test_injected_parts.py:") for line, _ in lines)
    assert [seconds >= least for (_, seconds), least in zip(lines, (0.01, 0.02), strict=True)] == [True, True]


def fetched(batches, get, folder):
    """Has a fetcher make so many batches of 64 samples; returns their events."""
    dataset = type("Cheap", (), {"__getitem__": lambda self, index: get(index)})()
    fetcher = type("_MapDatasetFetcher", (), {})()
    fetcher.dataset, fetcher.collate_fn = dataset, list
    make = batch_making.fetching(lambda self, at: self.collate_fn([self.dataset[one] for one in at]))
    try:
        for number in range(batches):
            assert make(fetcher, range(64 * number, 64 * (number + 1))) == [
                one % 7 for one in range(64 * number, 64 * (number + 1))
            ]
    finally:
        metering.reset()
    return [event for event in written(folder) if event["e"] == "fetch"]


def test_short_calls_are_timed_in_few_batches_and_the_others_have_their_shares(folder):
    called = []
    decode = timed(lambda index: called.append(timed_calls.thread.fetch.whole) or index % 7, DECODING)
    events_of = fetched(100, decode, folder)
    detailed = len(called) - sum(called)
    assert len(events_of) == 100 and 4 * 64 <= detailed < 50 * 64
    for event in events_of:
        assert event["samples"][0] == 64 and set(event["parts"]) == {DECODING, "collate", "rest"}
        assert sum(wall for wall, _ in event["parts"].values()) == pytest.approx(event["wall"], rel=0.01)


def test_a_wait_is_seen_in_any_batch_and_all_are_timed_from_then_on(folder):
    sleep = waiting(time.sleep)
    decode = timed(lambda index: index % 7, DECODING)

    def get(index):
        if index == 80 * 64:
            sleep(0.02)
        return decode(index)

    parts = [event["parts"] for event in fetched(100, get, folder)]
    assert [number for number, one in enumerate(parts) if WAITING in one] == [80]
    assert parts[80][WAITING][0] >= 0.02 and sum(parts[80]["rest"]) < 0.02


def test_a_wrapped_sleep_is_no_method_and_is_pickled_by_its_name(folder):
    injected.install()
    try:

        class Pause:
            sleep = time.sleep

        assert Pause().sleep(0) is None and pickle.loads(pickle.dumps(time.sleep)) is time.sleep
        assert time.sleep.__name__ == "sleep" and time.sleep.__wrapped__ is not time.sleep
        received = socket.socket.recv
        assert received is not vars(_socket.socket)["recv"]
    finally:
        injected.uninstall()
    assert type(time.sleep) is type(len) and "recv" not in vars(socket.socket)


def test_h5py_with_filters_is_a_part_of_its_own_and_of_several_threads_inside_all_but_one_wait(ticks):
    for step in (1, 1, -1, -1):  # one from 0 to 3 s, another from 1 to 2 s
        metering.h5_move(step)
    assert metering.parts == {"inside h5py": [3.0, 1.0]}
    for dataset in (SimpleNamespace(compression="gzip"), SimpleNamespace(compression=None), object()):
        timed(lambda dataset: None, H5)(dataset)
    assert set(metering.parts) == {"h5py-filtered", "h5py", "inside h5py"}


def test_samples_asked_for_at_once_are_timed_together_and_others_one_by_one(ticks, monkeypatch):
    monkeypatch.setattr(batch_making, "clock", timed_calls.clock)
    monkeypatch.setattr(batch_making, "waited_s", timed_calls.waited_s)
    for dataset, ask, samples in (
        (SimpleNamespace(__getitems__=lambda many: [2 * n for n in many]), lambda data: data.__getitems__([1, 2]), 0.5),
        (range(0, 10, 2), lambda data: [data[1], data[2]], 1.0),
    ):
        thread, data = timed_calls.thread, TimedDataset(dataset)
        fetch = thread.fetch = OpenFetch()
        assert ask(data) == [2, 4]
        thread.fetch = None
        assert ask(data) == [2, 4], "outside of a fetch"
        event = batch_making._event(fetch, {}, 0.0, (2.0, 0.0, 0.0))
        assert event["samples"] == [2, 2 * samples, samples] and ("slow" in event) == (samples == 1.0)
    assert not hasattr(TimedDataset(range(3)), "__getitems__")


def test_functions_are_wrapped_at_once_or_when_their_module_was_imported_and_put_back(folder, monkeypatch):
    (folder / "simplejpeg.py").write_text("def decode_jpeg(data):\n    return data\nplain = decode_jpeg\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "simplejpeg", raising=False)
    before = zlib.decompress
    assert not injected.is_installed()
    injected.install()
    try:
        assert injected.is_installed() and zlib.decompress is not before and zlib.decompress.__wrapped__ is before
        assert zlib.decompress(zlib.compress(b"x")) == b"x"
        import simplejpeg

        assert simplejpeg.decode_jpeg.__wrapped__ is simplejpeg.plain and simplejpeg.decode_jpeg(3) == 3
    finally:
        injected.uninstall()
        del sys.modules["simplejpeg"]  # not by monkeypatch, which would bring this one back
    assert zlib.decompress is before and not injected.is_installed()
    assert [event["what"] for event in written(folder) if event["e"] == "fault"] == []


def test_what_cannot_be_written_is_lost_and_a_file_that_got_our_number_is_not_written_to(folder):
    events.write({"e": "begin"})
    events.write({"e": "begin", "t": object()})
    assert [event["e"] for event in written(folder)] == ["process", "begin"]
    nowhere = EventFile()
    nowhere.record_into(str(folder / "absent"))
    nowhere.write({"e": "begin"})
    os.dup2(os.open(folder / "mine", os.O_RDWR | os.O_CREAT), events._fd)
    events.write({"e": "begin"})
    assert (folder / "mine").read_bytes() == b"" and len(list(folder.glob("*.jsonl"))) == 2


def test_a_trial_takes_turns_once_the_loop_waits_and_then_lets_all_work(folder, monkeypatch):
    monkeypatch.setattr(WorkerTrial, "rest_share", -1.0)
    trial, limits = WorkerTrial(4, 2), []
    while trial.left:
        trial.step_begins(1, 0.1 * len(limits), 0.09)
        limits.append(trial.numbers[0])
    turns = [event for event in written(folder) if event["e"] == "trial"]
    assert [turn["limit"] for turn in turns] == [0, 2, 0, 2, 0, 2] and trial.numbers[0] == 0
    assert all(turn["steps"] == pytest.approx(turn["s"] / 0.1) for turn in turns)
    assert limits.index(2) > 20, "it begins when the loop was seen to wait, after each worker's first batches"
    fed = WorkerTrial(4, 2)
    for number in range(1000):
        fed.step_begins(1, number / 10, 0.001)
    assert fed.left == WorkerTrial.turns and fed.numbers[0] == 0


def rests_of(trial, count, resting_s=0.01):
    """The numbers of the steps at which workers had to rest, and at which they might go on again."""
    limits, at_s = [], 1.0
    for _ in range(count):
        trial.step_begins(1, at_s, 0.09)
        limits.append(trial.numbers[0])
        at_s += resting_s if limits[-1] else 0.1
    pairs = list(itertools.pairwise([0, *limits]))
    return [[number for number, pair in enumerate(pairs) if pair == change] for change in ((0, -1), (-1, 0))]


def test_workers_rest_until_enough_steps_were_taken_alone(folder, monkeypatch):
    monkeypatch.setattr(WorkerTrial, "longest_wait_s", 0.01)
    trial = WorkerTrial(2, 0)
    trial.numbers[3] = 1  # of a worker that never comes back, so that no step is alone
    begins, ends = rests_of(trial, 400)
    assert [end - begin for begin, end in zip(begins, ends, strict=True)] == [2] * len(begins) and len(begins) > 10
    assert begins[0] >= 10 * WorkerTrial.rests_after_s
    slow = WorkerTrial(2, 0)
    slow.numbers[3] = 1
    assert len(rests_of(slow, 400, resting_s=0.1)[0]) < 10, "they take a share of the loop's time"
    idle = WorkerTrial(2, 0)
    assert rests_of(idle, 400) == [[], []] and idle.alone > WorkerTrial.enough_alone
    assert not [event for event in written(folder) if event["e"] == "trial"]


def test_a_worker_rests_until_it_may_go_on_and_says_whether_it_makes_a_batch(folder, monkeypatch):
    trial = WorkerTrial(2, 0)
    monkeypatch.setenv("FASTLOAD_DOCTOR_TRIAL", trial.path)
    monkeypatch.setattr(worker_trial, "worker_id", lambda: 1)
    turns, fetcher, slots = worker_trial._Turns(), SimpleNamespace(), []
    slots.append(turns.wait(fetcher))
    assert list(trial.numbers) == [0, 0, 0, 0, 1]
    turns.done(slots[0])
    assert list(trial.numbers) == [0, 0, 1, 0, 0]
    trial.numbers[0] = -1
    other = threading.Thread(target=lambda: slots.append(turns.wait(fetcher)))
    other.start()
    while slots[1:] == [] and trial.numbers[0]:  # it looks again and again
        if trial.numbers[4] == 0:
            trial.numbers[0] = 0
    other.join()
    assert slots == [2, 2] and trial.numbers[4] == 1
    monkeypatch.setattr(turns, "longest_rest_s", 0.0)
    trial.numbers[0] = -1  # of a loop that is gone
    assert turns.wait(fetcher) == 2


@pytest.mark.parametrize(("batch", "count"), [
    ((np.zeros((8, 3, 4, 4)), np.zeros(8)), 8),
    ({"image": np.zeros((8, 3, 4, 4))}, 8),
    (((np.zeros((3, 9, 7)), np.zeros((3, 5, 6))), ({"boxes": np.zeros((11, 4))}, {"boxes": np.zeros((2, 4))})), 2),
    ([[1, 2], [3, 4]], 2),
    ("text", 0),
])  # fmt: skip
def test_the_samples_of_a_batch_are_its_tensors_first_dimension_or_the_images_in_its_list(batch, count):
    assert loop_side._handed_over(batch) == count


@pytest.mark.parametrize(("channels", "target", "masks"), [
    (3, (8, 24, 32), True), (3, (8, 1, 24, 32), True), (3, (8,), False), (3, (8, 3, 24, 32), False),
    (3, (8, 4, 4), False), (1, (8, 24, 32), True), (1, (8, 1, 24, 32), False),
])  # fmt: skip
def test_masks_are_what_has_the_size_of_the_images(folder, channels, target, masks):
    image, other = (np.zeros(shape, np.uint8) for shape in ((8, channels, 24, 32), target))
    state = LoaderState(SimpleNamespace(dataset=[0]))
    for batch in ((image, other), {"image": image, "mask": other}):
        state.note_shape(batch)
    noted = [event for event in written(folder) if event["e"] == "shape"]
    assert [(event["shape"], event["masks"]) for event in noted] == [([8, channels, 24, 32], masks)] * 2


def test_waits_for_a_cpu_that_no_clock_of_a_sample_saw_are_taken_from_the_slowest_ones():
    fetch = OpenFetch()
    fetch.samples = [0.001] * 20 + [0.006, 0.011]
    # 22 samples in 37 ms, of which the process had no CPU for 14.
    event = batch_making._event(fetch, {}, 0.0, (0.037, 0.023, 0.014))
    assert event["slow"] == [] and event["samples"][:2] == [22, pytest.approx(0.023)]
    event = batch_making._event(fetch, {}, 0.0, (0.037, 0.033, 0.004))
    assert event["slow"] == pytest.approx([0.006, 0.007]), "the rest is their own"
