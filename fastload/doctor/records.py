"""What the module injected into a job wrote down: its events, by process, put together by loader."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastload.measured import Step, Work
from fastload.verdict import BatchWork

Event = dict[str, Any]


@dataclass(frozen=True)
class Process:
    """One process of the job.

    Attributes:
        pid, argv, python: of it.
        rank: its RANK, "" without one.
        cpus: that it may run on.
        local_ranks: ranks of the job on this machine.
        events: in order, without the one that describes the process.
        complete: whether the file's last line is whole.
    """

    pid: int
    argv: tuple[str, ...]
    python: str
    rank: str
    cpus: int
    local_ranks: int
    events: tuple[Event, ...]
    complete: bool = True


@dataclass
class Epoch:
    """One pass over a loader.

    Attributes:
        begin_s: when its iterator was asked for.
        first_s: from there to its first batch; None: there was none.
        end_s: that the loop waited when there were no more batches.
        steps: one for each batch whose step is known to be over.
    """

    begin_s: float
    first_s: float | None = None
    end_s: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)


@dataclass(frozen=True)
class StepRecord:
    """One step, and what its process did meanwhile; seconds."""

    step: Step
    running_s: float
    process_running_s: float
    runnable_s: float
    receive: Work


@dataclass(frozen=True)
class Fetch:
    """One batch while it was made: when, by whom, and what it cost.

    Attributes:
        pid: of the process that made it.
        begin_s, wall_s: of the clock that all processes share.
        running_s, runnable_s: on a CPU, and ready for one.
        work: by stage.
        unknown_blocked_s: of reading's blocked time, what no timed call explains.
        slow: seconds of its slowest samples; usual_s of a sample like most; num_samples that were timed.
    """

    pid: int
    begin_s: float
    wall_s: float
    running_s: float
    runnable_s: float
    work: BatchWork
    unknown_blocked_s: float
    slow: tuple[float, ...] = ()
    usual_s: float = 0.0
    num_samples: int = 0


@dataclass
class LoaderRecord:
    """One loader of one process, over all its epochs."""

    process: Process
    facts: Event
    epochs: list[Epoch] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    lines: Counter[str] = field(default_factory=Counter)
    trials: list[Event] = field(default_factory=list)

    @property
    def steps(self) -> list[StepRecord]:
        """All steps, in order."""
        return [step for epoch in self.epochs for step in epoch.steps]

    @property
    def elapsed_s(self) -> float:
        """Time that the loop spent with this loader."""
        return sum(record.step.duration_s for record in self.steps) + sum(epoch.end_s for epoch in self.epochs)


@dataclass(frozen=True)
class Records:
    """A job's processes, and the loaders that they iterated."""

    processes: tuple[Process, ...]
    loaders: tuple[LoaderRecord, ...]

    @property
    def saw_torch(self) -> bool:
        """Whether any process imported torch's DataLoader."""
        return any(event["e"] == "torch" for process in self.processes for event in process.events)

    @property
    def faults(self) -> list[str]:
        """What went wrong in the injected module itself."""
        return [event["what"] for process in self.processes for event in process.events if event["e"] == "fault"]


def read_records(folder: Path) -> Records:
    """The records of a job that may still run. A line that is not whole, and what else cannot be read, is left out."""
    processes = [process for path in sorted(folder.glob("*.jsonl")) if (process := _read_process(path)) is not None]
    loaders: dict[tuple[int, int], LoaderRecord] = {}  # by pid and number; several where a loop makes loaders anew
    makers: dict[int, LoaderRecord] = {}  # by a worker's pid
    for process in processes:
        for number, loader in _loaders_of(process, makers).items():
            loaders[process.pid, number] = loader
    for process in processes:
        for event in process.events:
            record = loaders.get((process.pid, event.get("id", 0))) or makers.get(process.pid)
            if record is None:
                continue
            if event["e"] == "fetch":
                record.fetches.append(_fetch(process.pid, event))
            elif event["e"] == "line":
                # Each such event counts all looks of its process so far.
                record.lines.update(_newer(process, event))
    distinct = {id(loader): loader for loader in loaders.values()}
    return Records(tuple(processes), tuple(loader for loader in distinct.values() if loader.steps))


def _read_process(path: Path) -> Process | None:
    events: list[Event] = []
    complete = True
    try:
        for line in path.read_bytes().splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                complete = False
    except OSError:
        return None
    about = next((event for event in events if event.get("e") == "process"), None)
    if about is None:
        return None
    return Process(
        pid=about["pid"],
        argv=tuple(about["argv"]),
        python=about["python"],
        rank=about["rank"],
        cpus=about["cpus"],
        local_ranks=int(about["local_world"]) if str(about["local_world"]).isdigit() else 1,
        events=tuple(event for event in events if event.get("e") not in (None, "process")),
        complete=complete,
    )


def _loaders_of(process: Process, makers: dict[int, LoaderRecord]) -> dict[int, LoaderRecord]:
    """The loaders that a process iterated, by number, with their epochs; notes whose workers are whose.

    A loop that makes its loader anew for each epoch has one record for all of them.
    """
    found: dict[int, LoaderRecord] = {}
    alike: dict[tuple[Any, ...], LoaderRecord] = {}
    waiting: dict[int, Event] = {}  # by loader, the batch whose step is under way
    for event in process.events:
        kind, number = event["e"], event.get("id", 0)
        if kind == "loader":
            kinds = tuple(value for name, value in event.items() if name not in ("id", "t"))
            found[number] = alike.setdefault(kinds, LoaderRecord(process, event))
        if number not in found:
            continue
        loader = found[number]
        if kind == "iter":
            loader.epochs.append(Epoch(event["t"]))
            waiting.pop(number, None)
            for pid in event.get("pids", ()):
                makers[pid] = loader
        elif kind == "trial":
            loader.trials.append(event)
        elif kind in ("next", "end") and loader.epochs:
            epoch = loader.epochs[-1]
            before = waiting.pop(number, None)
            if before is not None and event.get("step") is not None:
                epoch.steps.append(_step(before, event["step"], epoch))
            if "inside" in event:
                _note_inside(loader, event)
            if kind == "end":
                epoch.end_s = event["wait"]
            else:
                if epoch.first_s is None:
                    epoch.first_s = event["t"] + event["wait"] - epoch.begin_s
                    event = {**event, "first": True}
                waiting[number] = event
    return found


def _note_inside(loader: LoaderRecord, event: Event) -> None:
    """What a FastLoader told of a batch, in the place of what workers of other loaders are seen to do."""
    inside = event["inside"]
    workers, ahead, by_threads = inside["crew"]
    loader.facts |= {"workers": workers, "ahead": ahead, "by_threads": by_threads}
    work = BatchWork({name: Work(*value) for name, value in inside["work"].items()})
    if work.stages:
        running_s = sum(value.running_s for value in work.stages.values())
        loader.fetches.append(Fetch(loader.process.pid, event["t"], 0.0, running_s, 0.0, work, 0.0))


def _step(batch: Event, step: Mapping[str, float], epoch: Epoch) -> StepRecord:
    first = bool(batch.get("first"))
    # The first batch of an epoch is waited for from the moment that the iterator is made.
    begin_s = epoch.begin_s if first else batch["t"]
    inside = batch.get("inside", {"copy": 0.0, "transform": 0.0})
    own_s = inside["copy"] + inside["transform"]
    wait_s = max(0.0, batch["t"] + batch["wait"] - begin_s - own_s)
    compute_s = max(0.0, step["wall"] - step["copy"] - step["copy_delay"])
    if step.get("gpu") is not None:
        # The loop only launches what the GPU does: while that works, the loop's wait is no stall.
        hidden_s = min(wait_s, max(0.0, step["gpu"] - compute_s))
        wait_s, compute_s = wait_s - hidden_s, compute_s + hidden_s
    return StepRecord(
        step=Step(
            begin_s=begin_s,
            wait_s=wait_s,
            copy_s=step["copy"] + inside["copy"],
            transform_s=inside["transform"],
            compute_s=compute_s,
            samples=batch["n"],
            queue_depth=inside.get("depth"),
        ),
        running_s=step["cpu"],
        process_running_s=step["process_cpu"],
        runnable_s=step["delay"],
        receive=Work(batch["cpu"], max(0.0, batch["into"][0] - batch["into"][1])),
    )


def _fetch(pid: int, event: Event) -> Fetch:
    """The cost of a batch by stage, out of the times that were taken by name and the clocks of its thread."""
    wall, running, delay = event["wall"], event["cpu"], min(event["delay"], event["wall"])
    parts = {name: (value[0], value[1]) for name, value in event["parts"].items()}
    total_running = sum(cpu for _, cpu in parts.values()) or 1e-12
    works: dict[str, Work] = defaultdict(Work)
    unknown = lock_s = 0.0
    for name, (part_wall, part_running) in parts.items():
        # Who wants a CPU waits for one now and then, so the delay is shared out by the time on a CPU.
        blocked = max(0.0, part_wall - part_running - delay * part_running / total_running)
        if name == "decoding" or name == "h5py-filtered":
            works["decoding"] += Work(part_running)
            works["reading"] += Work(blocked_s=blocked)
        elif name in ("reading", "h5py"):
            works["reading"] += Work(part_running, blocked)
        elif name == "lock":
            works["reading"] += Work(part_running, blocked)
            lock_s += blocked
        elif name == "collate":
            works["collate"] += Work(part_running, blocked)
        else:
            works["transform"] += Work(part_running)
            unknown = blocked
    # Pickling the batch before holds the GIL: the fetch waits for it, and for nothing else.
    unknown = max(0.0, unknown - event["out"][1])
    unknown, lock_s = _helpers(event, wall, unknown, lock_s, works)
    works["reading"] += Work(blocked_s=unknown)
    works["hand-over"] = Work(event["out"][1])
    timed = event.get("samples") or (0, 0.0, 0.0)
    return Fetch(
        pid=pid,
        begin_s=event["t"],
        wall_s=wall,
        running_s=running,
        runnable_s=delay,
        work=BatchWork(dict(works), lock_s=lock_s, runnable_s=delay),
        unknown_blocked_s=unknown,
        slow=tuple(event.get("slow") or ()),
        usual_s=timed[2],
        num_samples=timed[0],
    )


def _helpers(event: Event, wall: float, unknown: float, lock_s: float, works: dict[str, Work]) -> tuple[float, float]:
    """Shares out the time that a fetch waited for threads of its own; returns what stays unknown, and lock time.

    While the fetching thread waits, other threads of the process may read or decode for it. They wait for one another
    where they call h5py, which lets one thread in at a time: of the time in which at least one was inside, all but a
    part, one by the number of threads, would be gone without the lock.
    """
    others = {name: value for name, value in event.get("others", {}).items() if name != "lock"}
    total = sum(value[0] for value in others.values())
    busy, waits, threads = event.get("h5") or (0.0, 0.0, 0)
    own_h5 = sum(event["parts"].get(name, (0.0, 0.0))[0] for name in ("h5py", "h5py-filtered"))
    if threads > 1 and busy > 0:
        if own_h5 > 0:
            # The fetch calls h5py itself beside another thread: what it waited inside is the other one's.
            own_running = sum(event["parts"].get(name, (0.0, 0.0))[1] for name in ("h5py", "h5py-filtered"))
            lock_s += min(max(0.0, own_h5 - own_running), waits)
        else:
            together = (busy + waits) / busy
            if together < 1.05 and busy > 0.5 * wall:
                together = float(threads)  # never at once, though busy all the time: a lock of the script's own
            lock_s += min(busy, wall) * (1 - 1 / together) if together > 1.1 else 0.0
    if total > 0 and unknown > 0:
        share = min(1.0, total / unknown)
        for name, (other_wall, other_running) in others.items():
            given = unknown * share * other_wall / total
            part = min(1.0, other_running / other_wall) if other_wall else 0.0
            stage = (
                "decoding" if name in ("decoding", "h5py-filtered") else "reading" if name != "rest" else "transform"
            )
            works[stage] += Work(given * part if stage != "reading" else 0.0)
            works["reading"] += Work(blocked_s=given * (1 - part) if stage != "reading" else given)
        unknown *= 1 - share
    return unknown, lock_s


def _newer(process: Process, event: Event) -> dict[str, int]:
    last: Event | None = None
    for other in process.events:
        if other["e"] == "line":
            last = other
    return dict(map(tuple, event["places"])) if event is last else {}


def slow_samples(fetches: Iterable[Fetch], *, times: float = 5.0, at_most: float = 0.1) -> tuple[float, float, int]:
    """Samples that take far longer than the others, if they are few.

    Args:
        times: as long as a usual sample, at least.
        at_most: part of all samples; where more are slow, slow is usual.

    Returns:
        Seconds a batch that they take beyond a usual sample, the mean seconds of one, and how many there were; zeros
        when there are none.
    """
    fetches = [fetch for fetch in fetches if fetch.num_samples]
    if not fetches:
        return 0.0, 0.0, 0
    ordered = sorted(fetch.usual_s for fetch in fetches)
    usual = ordered[len(ordered) // 2]
    slow = [value for fetch in fetches for value in fetch.slow if value > times * usual]
    count = sum(fetch.num_samples for fetch in fetches)
    if not slow or len(slow) > at_most * count:
        return 0.0, 0.0, 0
    return sum(value - usual for value in slow) / len(fetches), sum(slow) / len(slow), len(slow)
