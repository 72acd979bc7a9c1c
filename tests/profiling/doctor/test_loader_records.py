"""From lines of JSON to what a loop asked of the machine."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from child_processes import in_a_fork

from fastload.profiling.doctor import examine
from fastload.profiling.doctor.examine import Recording, loader_that_binds
from fastload.profiling.doctor.injected.loop_side import Gpu
from fastload.profiling.doctor.loader_records import Fetch, Interval, LoaderRecord, RecordedEvents
from fastload.profiling.doctor.loop_demands import (
    demands_of,
    first_of_workers,
    keeps_transform,
    seen_at_work,
    shares_its_waits,
    slow_samples,
)
from fastload.profiling.doctor.trials import Recorded
from fastload.profiling.verdict import judge
from fastload.profiling.verdict.sentences import OTHER_PROGRAMS
from fastload.timing.results import BatchWork, Verdict, WorkTime

LOADER = {"e": "loader", "id": 1, "workers": 1, "kind": "torch.DataLoader", "prefetch": 2, "persistent": False,
          "batch_size": 8, "dataset": "D (d.py:1)", "at": "train (main.py:3)", "length": 80, "sampler": "RandomSampler",
          "drop_last": False}  # fmt: skip


def step(wall: float, **others: float) -> dict:
    times = {"wall": wall, "process_cpu": 0.0, "delay": 0.0, "copy": 0.0, "copy_delay": 0.0, "others": 0.0}
    return times | others


def fetch(**others: object) -> dict:
    made = {"e": "fetch", "id": 0, "t": 0.0, "wall": 0.1, "delay": 0.01}
    made |= {"parts": {"rest": [0.1, 0.02]}, "others": {}, "out": [0.0, 0.0], "h5": [0.0, 0.0, 0]}
    return made | others


def write(folder: Path, pid: int, *events: dict, tail: str = "", **facts: object) -> Path:
    """The file of a process with these events."""
    process = {"e": "process", "pid": pid, "rank": "", "local_world": "", "cpus": 2, "python": "3.11.7"} | facts
    path = folder / f"{pid}.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in (process, *events)) + tail)
    return path


def loop(number: int, steps: list[dict], *, begin: float = 0.0, wait: float = 0.05, worker: int = 2) -> list[dict]:
    """An epoch: batches that are waited for, with the steps after them."""
    events: list[dict] = [{"e": "iter", "id": number, "t": begin, "s": 0.0, "pids": [worker]}]
    at, before = begin, None
    for one in steps:
        received = {"e": "next", "id": number, "t": at, "wait": wait, "cpu": 0.0, "into": [0.0, 0.0], "n": 8}
        events.append(received | {"step": before})
        at, before = at + wait + one["wall"], one
    return [*events, {"e": "end", "id": number, "t": at, "wait": 0.0, "step": before}]


def read_records(folder: Path, records: RecordedEvents | None = None) -> RecordedEvents:
    records = (records or RecordedEvents(folder)).read()
    for loader in records.loaders:
        records.read_making(loader)
    return records


def judged(folder: Path, *fetches: dict, steps: int = 4, **of_a_step: float) -> LoaderRecord:
    """The record of a loop's loader whose worker made these."""
    write(folder, 1, LOADER, *loop(1, [step(0.01, **of_a_step)] * steps))
    write(folder, 2, *fetches)
    [loader] = read_records(folder).loaders
    return loader


def test_of_recorded_steps_a_whole_and_the_least_disturbed_one_counts():
    """A loader that reads ahead asks for two batches before the first step: nothing lies between those.

    An epoch's last batch may be a small one.
    """
    empty, slow, quick, part, small = (
        Recorded([((size, 3, 8, 8), "float32", ())], ["operation"] * n, 0, s)
        for size, n, s in ((32, 0, 0.0), (32, 9, 3.0), (32, 8, 2.0), (32, 4, 1.0), (20, 9, 1.0))
    )
    assert LoaderRecord({}, {}).recorded is None and LoaderRecord({}, {}, recordings=[empty]).recorded is None
    assert LoaderRecord({}, {}, recordings=[empty, slow, quick, part, small]).recorded is quick


def test_the_shares_of_calls_add_up_to_the_part_that_was_timed_whatever_looks_see_more_of():
    work = BatchWork({"decoding": WorkTime(0.003), "transform": WorkTime(0.004, 0.001), "reading": WorkTime(0.002)})
    looks = {("call", "decoding", "PIL.ImageFile.load"): 60, ("call", "decoding", "PIL.Image.open"): 30,
             ("call", "transform", "ToTensor"): 10, ("line", "at (train.py:7)"): 4, ("look",): 100}  # fmt: skip
    loader = LoaderRecord({}, {}, fetches=[Fetch(1, 0.0, 0.01, work)] * 3, seen=Counter(looks))
    waits_at, notes = seen_at_work(loader)
    assert waits_at == "" and notes == [
        "decoding, of the time of making a batch: PIL.ImageFile.load 20%, PIL.Image.open 10%",
        "transform, of the time of making a batch: ToTensor 50%",
    ]


def test_a_killed_process_leaves_what_it_had_written(tmp_path):
    write(tmp_path, 1, LOADER, *loop(1, [step(0.01)] * 4)[:-1], tail='{"e":"next","id":1,"t"')
    write(tmp_path, 2, fetch(), fetch())
    (tmp_path / "3.jsonl").write_text("\x00\x00")
    records = read_records(tmp_path)
    assert records.num_processes == 2
    [found] = records.loaders
    assert found.steps.count == 3 and len(found.fetches) == 2


def test_records_that_grow_are_read_as_if_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("fastload.profiling.doctor.loader_records.MOST_FETCHES", 8)
    lines = [{"e": "line", "seen": [[["line", "f (a.py:3)"], count], [["look"], count]]} for count in (20, 40)]
    making = [fetch(t=float(number)) for number in range(30)]
    paths = [
        write(tmp_path, 1, *making[:1], lines[0], *making[1:], lines[1]),
        write(tmp_path, 2, LOADER, *loop(1, [step(0.01)] * 4, worker=1)),
    ]
    (tmp_path / "growing").mkdir()
    records = RecordedEvents(tmp_path / "growing")
    for path in paths:
        whole = path.read_text()
        for end in range(0, len(whole) + 70, 70):
            (tmp_path / "growing" / path.name).write_text(whole[:end])
            records.read()
    [found], [grown] = read_records(tmp_path).loaders, read_records(tmp_path / "growing", records).loaders
    assert grown.steps == found.steps and grown.elapsed_s == found.elapsed_s
    assert grown.fetches == found.fetches and grown.seen == found.seen == {("line", "f (a.py:3)"): 40, ("look",): 40}
    assert [made.begin_s for made in found.fetches] == [3.0, 7.0, 11.0, 15.0, 19.0, 23.0, 27.0]


def test_blocked_time_is_reading_and_running_time_that_nothing_claims_is_the_transform(tmp_path):
    parts = {"decoding": [0.03, 0.01], "collate": [0.02, 0.02], "rest": [0.05, 0.02]}
    [made] = judged(tmp_path, fetch(parts=parts, delay=0.0)).fetches
    stages = {name: (work.running_s, work.blocked_s) for name, work in made.work.stages.items()}
    assert stages["decoding"] == (0.01, 0.0) and stages["transform"] == (0.02, 0.0)
    assert stages["reading"] == pytest.approx((0.0, 0.05)) and stages["collate"] == pytest.approx((0.02, 0.0))
    another_thread = {"decoding": [0.04, 0.03]}
    [made] = judged(tmp_path, fetch(others=another_thread, delay=0.0)).fetches
    assert (made.work.stages["decoding"].running_s, made.unknown_blocked_s) == pytest.approx((0.03, 0.04))
    assert made.work.stages["reading"].blocked_s == pytest.approx(0.05)
    [made] = judged(tmp_path, fetch(parts={"rest": [0.1, 0.02]}, delay=0.08)).fetches  # it waited for a CPU
    assert made.work.stages["reading"].blocked_s == pytest.approx(0.0, abs=1e-9) and made.work.runnable_s == 0.08


def test_threads_in_h5py_wait_for_one_another_and_that_is_its_lock(tmp_path):
    # Four threads were inside for 0.1 s, one at a time: of 0.4 thread-seconds 0.3 were waits.
    told = fetch(parts={"rest": [0.1, 0.0]}, delay=0.0, others={"h5py": [0.4, 0.1]}, h5=[0.1, 0.3, 4])
    found = judged(tmp_path, told, told, steps=20)
    assert found.fetches[0].work.lock_s == pytest.approx(0.075)
    assert judge(demands_of(found, cpus=1)).cause == "lock contention"


def test_a_loop_that_makes_its_loader_anew_each_epoch_has_one_record_and_another_dataset_another(tmp_path):
    events = []
    for number, dataset in ((1, "D (d.py:1)"), (2, "V (d.py:9)"), (3, "D (d.py:1)")):
        events += [LOADER | {"id": number, "workers": 0, "dataset": dataset, "t": number}]
        events += loop(number, [step(0.01)] * 4, begin=float(number))
    write(tmp_path, 1, *events)
    records = read_records(tmp_path)
    assert sorted(len(loader.epochs) for loader in records.loaders) == [1, 2]
    assert len(loader_that_binds(records).epochs) == 2


def test_an_epochs_start_is_part_of_its_first_wait_and_its_end_of_no_step(tmp_path):
    first = loop(1, [step(0.01)] * 3, begin=1.0)
    first[0]["t"], first[-1]["wait"] = 0.5, 0.25
    write(tmp_path, 1, LOADER, *first, *loop(1, [step(0.01)] * 2, begin=5.0))
    [found] = read_records(tmp_path).loaders
    assert [value for epoch in found.epochs for value in epoch] == pytest.approx([0.55, 0.25, 0.05, 0.0])
    assert [one.step.begin_s for one in found.steps.kept] == pytest.approx([0.5, 1.06, 1.12, 5.0, 5.06])
    assert (found.steps.kept[0].step.wait_s, found.elapsed_s) == pytest.approx((0.55, 0.56 + 4 * 0.06 + 0.25))


def test_the_rank_that_waits_longest_is_judged(tmp_path):
    for rank, wait in ((0, 0.01), (1, 0.05)):
        events = loop(1, [step(0.01)] * 5, wait=wait)
        write(tmp_path, 10 + rank, LOADER, *events, rank=str(rank), local_world="2")
    assert loader_that_binds(read_records(tmp_path)).process["rank"] == "1"


def test_ranks_share_the_cpus_that_the_job_and_other_programs_use(tmp_path, monkeypatch):
    write(tmp_path, 10, LOADER, *loop(1, [step(0.01)] * 5), rank="0", local_world="2", cpus=8)
    monkeypatch.setattr(examine, "available_cpus", lambda: 8)
    monkeypatch.setattr(examine, "mean_others", lambda *_: 3.0)
    monkeypatch.setattr(examine, "mean_cpus", lambda *_: 5.0)
    with Recording() as recording:
        recording.records = read_records(tmp_path)
        found = recording.demands(loader_that_binds(recording.records))
    assert (found.cpus, found.others_cpus, found.job_cpus) == (4, 1.5, 2.5)


def test_while_the_gpu_works_the_loops_wait_is_no_stall(tmp_path):
    found = judged(tmp_path, steps=6, gpu=0.045).steps.kept[-1].step
    assert (found.wait_s, found.compute_s) == pytest.approx((0.015, 0.045))


@pytest.mark.parametrize(
    ("calls", "keeps"),
    [
        ({"PIL.Image.resize": 2, "copy": 3, "permute": 2, "Photos.__getitem__": 3}, False),
        ({"PIL.Image.resize": 2, "permute": 1, "blurred": 4}, True),
        ({}, False),
    ],
)
def test_resizing_and_making_floats_is_fastloaders_work_and_other_code_is_not(calls, keeps):
    seen = Counter({("call", "transform", name): count for name, count in calls.items()})
    assert keeps_transform(LoaderRecord({}, {}, seen=seen)) is keeps


def test_slow_samples_are_few_and_take_far_longer():
    def made(slow: list[float]) -> Fetch:
        samples = (50, 0.001 * (50 - len(slow)) + sum(slow), 0.001)
        return Fetch(1, 0.0, 0.1, BatchWork({}), slow=tuple(slow), samples=samples)

    extra_s, note = slow_samples([made([0.101]), made([])])
    assert extra_s == pytest.approx(0.05) and note == ["one sample took 101 ms, where most take 1.00 ms"]
    assert slow_samples([made([0.101] * 20), made([])]) == slow_samples([made([0.003])]) == (0.0, [])
    # Of samples asked for at once the sum is known: here 300 ms, where 50 usual ones take 50 ms.
    at_once = [Fetch(1, 0.0, 0.1, BatchWork({}), slow=None, samples=(50, s, s / 50)) for s in (0.05, 0.05, 0.3)]
    assert slow_samples(at_once) == (pytest.approx(0.25 / 3), ["one sample took 251 ms, where most take 1.00 ms"])
    assert slow_samples([*at_once[:2], replace(at_once[2], samples=(50, 0.2, 0.004))]) == (0.0, [])  # a slower batch


def test_a_workers_first_batch_is_part_of_its_start_where_it_costs_far_more():
    def made(pid: int, begin_s: float, cost_s: float) -> Fetch:
        return Fetch(pid, begin_s, cost_s, BatchWork({"transform": WorkTime(cost_s, 0.0)}))

    # Two epochs of two workers each, that begin anew and open something.
    opens = [made(pid, pid + 0.1 * number, 0.01 if number else 0.5) for number in range(5) for pid in (1, 2, 3, 4)]
    assert first_of_workers(opens) == {0, 1, 2, 3}
    assert first_of_workers([replace(one, pid=1) for one in opens]) == set(), "one slow batch of a loop is no start"
    alike = [made(one.pid, one.begin_s, 0.01) for one in opens]
    assert first_of_workers(alike) == first_of_workers([]) == set()


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_service_that_answers_one_at_a_time_shows_where_an_epoch_begins(lanes):
    """Four workers, whose batches are one wait of 1 s each behind those who asked before, or all at once."""
    made = []
    for epoch in range(3):
        free_s, ready_s = [100.0 * epoch] * lanes, [100.0 * epoch + 0.01 * worker for worker in range(4)]
        for number in range(40):
            asked_s, lane = ready_s[number % 4], number % lanes
            free_s[lane] = max(free_s[lane], asked_s) + 1.0
            ready_s[number % 4] = free_s[lane] + 0.001
            wait = asked_s + 0.0005, free_s[lane] - asked_s - 0.0005
            made.append(Fetch(number % 4, asked_s, free_s[lane] - asked_s, BatchWork({}), first_wait=wait))
    shared, note = shares_its_waits(made)
    assert shared == (lanes == 1)
    assert note == (["with few other workers active a wait takes 1.49 s, with all 4.00 s"] if shared else [])
    assert shares_its_waits(made[:8]) == (False, [])  # too few to tell
    assert shares_its_waits([replace(one, pid=1) for one in made]) == (False, [])  # of one worker


def test_of_samples_asked_for_at_once_no_slowest_ones_are_known(tmp_path):
    one_by_one, at_once = fetch(samples=[3, 0.6, 0.01], slow=[0.5]), fetch(samples=[3, 0.6, 0.2])
    assert [made.slow for made in judged(tmp_path, one_by_one, at_once).fetches] == [(0.5,), None]


def test_of_many_steps_an_even_part_is_kept_and_sums_are_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr("fastload.profiling.doctor.loader_records.MOST_STEPS", 8)
    found = judged(tmp_path, fetch(), steps=40)
    assert (found.steps.count, len(found.steps.kept), len(found.last)) == (40, 5, 40)
    assert found.elapsed_s == pytest.approx(40 * 0.06)
    assert (found.samples, found.wait_s) == (320, pytest.approx(40 * 0.05))
    assert (demands := demands_of(found, cpus=1)).num_steps == 40 and len(demands.steps) == 5


def test_the_gpus_time_of_a_step_is_read_when_it_is_known_and_never_waited_for():
    gpu = Gpu()
    assert gpu.mark() is None and gpu.step_s(None) is None
    marks = [Mock(**{"query.return_value": False, "elapsed_time.return_value": 10.0}) for _ in range(4)]
    gpu.cuda = Mock(**{"is_initialized.return_value": True, "Event.side_effect": marks})
    assert gpu.step_s(gpu.mark()) is None  # the GPU is not done yet
    marks[1].query.return_value = True
    assert gpu.step_s(gpu.mark()) == pytest.approx(0.010)
    marks[0].elapsed_time.assert_called_once_with(marks[1])
    assert all(mark.record.call_count == 1 for mark in marks)
    gpu.cuda.Event.assert_called_with(enable_timing=True)


def test_a_forked_process_frees_none_of_the_gpus_events():
    freed = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def __del__(self, here=os.getpid()):  # noqa: B008  # torch's ends a process that has no device
            freed.append(1) if os.getpid() == here else os._exit(3)

    gpu = Gpu()
    gpu.cuda = SimpleNamespace(is_initialized=lambda: True, Event=Event)
    kept = [gpu.mark()]
    in_a_fork(kept.clear)
    assert not freed
    kept.clear()
    assert freed


def test_the_batch_size_of_a_loader_that_does_not_know_it_is_that_of_its_first_batch(tmp_path):
    loader = LOADER | {"batch_size": 0}
    shape = {"e": "shape", "id": 1, "shape": [24, 3, 8, 8], "dtype": "float", "bytes": [24 * 192 * 4]}
    write(tmp_path, 1, loader, shape, *loop(1, [step(0.01)] * 4))
    [found] = read_records(tmp_path).loaders
    assert demands_of(found, cpus=2).plain.batch_size == 24


def test_beside_other_programs_nothing_is_said_of_what_other_loops_would_gain(tmp_path, monkeypatch):
    trains, checks = loop(1, [step(0.01)] * 4), loop(2, [step(0.01)] * 4, begin=1.0)
    write(tmp_path, 1, LOADER, LOADER | {"id": 2, "dataset": "Val"}, {"e": "trains", "id": 1}, *trains, *checks)
    with Recording() as recording:
        recording.records = read_records(tmp_path)
        loader = loader_that_binds(recording.records)
        asked = recording.demands(loader)
        for cause, is_told in ((OTHER_PROGRAMS, False), ("compute", True)):
            verdict = Verdict(cause, "It is so.", (), step_s=1.0, stall_share=0.0)
            monkeypatch.setattr(examine, "judge", lambda _, verdict=verdict: verdict)
            chosen, _, lines, _ = recording._in_its_run(loader, asked, Interval(0.0, 1.5))
            assert chosen is loader and any("Val" in line for line in lines)
            assert any(line.endswith("It is so.") for line in lines) == is_told
