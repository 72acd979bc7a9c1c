"""Reads the events that the injected module writes, while the files grow, and groups them by loader."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastload.profiling.doctor.costs import Event, Fetch, StepRecord, fetch_of, step_of
from fastload.timing.results import BatchWork, Work

MOST_FETCHES = 16_384
"""Number of fetches kept for a loader. When there are more, every second one is dropped, then half as many are kept."""

_decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True)
class Process:
    """One process of the job.

    Attributes:
        pid, python: its id and Python version.
        rank: its RANK, "" if there is none.
        cpus: CPUs that it may use.
        local_ranks: ranks of the job on this machine.
    """

    pid: int
    python: str
    rank: str
    cpus: int
    local_ranks: int


@dataclass
class LoaderEpoch:
    """One pass over a loader.

    Attributes:
        begin_s: when its iterator was made.
        first_s: from there to its first batch; None: there was none.
        end_s: the last wait, which found no more batches.
        steps: the steps that have ended.
        steps_s: their duration, summed.
    """

    begin_s: float
    first_s: float | None = None
    end_s: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)
    steps_s: float = 0.0


@dataclass
class LoaderRecord:
    """One loader of one process, over all its epochs. Of very many fetches, an evenly spaced sample is kept.

    Attributes:
        process: that iterates it.
        facts: its `loader` event.
        epochs: in order.
        fetches: the sample of its batches while they were made.
        lines: how often its workers were seen at each line of code.
        trials: its `trial` events.
    """

    process: Process
    facts: Event
    epochs: list[LoaderEpoch] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    lines: Counter[str] = field(default_factory=Counter)
    trials: list[Event] = field(default_factory=list)
    _fetches_seen: int = 0
    _fetches_every: int = 1

    @property
    def steps(self) -> list[StepRecord]:
        """All steps, in order."""
        return [step for epoch in self.epochs for step in epoch.steps]

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return sum(len(epoch.steps) for epoch in self.epochs)

    @property
    def elapsed_s(self) -> float:
        """Time that the loop spent with this loader."""
        return sum(epoch.steps_s + epoch.end_s for epoch in self.epochs)

    def last_steps(self, count: int) -> list[StepRecord]:
        """Returns the last `count` steps, in order."""
        found: list[StepRecord] = []
        for epoch in reversed(self.epochs):
            if len(found) >= count:
                break
            found = epoch.steps[-(count - len(found)) :] + found
        return found

    def wants_fetch(self) -> bool:
        """Whether the next fetch, in the order of reading, belongs to the sample. To be called once for each."""
        self._fetches_seen += 1
        return self._fetches_seen % self._fetches_every == 0

    def keep_fetch(self, fetch: Fetch) -> None:
        """Adds a fetch to the sample."""
        self.fetches.append(fetch)
        if len(self.fetches) > MOST_FETCHES:
            del self.fetches[::2]
            self._fetches_every *= 2


@dataclass(frozen=True)
class Records:
    """A job's processes, and the loaders that they iterated.

    Attributes:
        processes: all that wrote events.
        loaders: those with at least one step.
        saw_torch: whether any process imported torch's DataLoader.
        faults: failures of the injected module.
    """

    processes: tuple[Process, ...]
    loaders: tuple[LoaderRecord, ...]
    saw_torch: bool = False
    faults: tuple[str, ...] = ()


def read_records(folder: Path) -> Records:
    """Reads the records of a job, which may still run. Lines that are incomplete or cannot be parsed are left out."""
    return RecordReader(folder).read()


class RecordReader:
    """Reads a job's records again and again, only what is new each time. Objects that `read` returned are updated."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, _File] = {}
        self._makers: dict[int, LoaderRecord] = {}  # by a worker's pid

    def read(self) -> Records:
        """Returns everything recorded so far."""
        for path in sorted(self._folder.glob("*.jsonl")):
            if path not in self._files:
                self._files[path] = _File(path)
        for file in self._files.values():
            file.read(self._makers)
        # A worker's fetches are read only when its loader is known, from the file of the loop's process.
        known = [file for file in self._files.values() if file.process is not None]
        loaders = {id(loader): loader for file in known for loader in file.loaders.values()}
        for loader in loaders.values():
            loader.lines.clear()
        for file in known:
            file.read_fetches(self._makers)
        return Records(
            tuple(file.process for file in known if file.process is not None),
            tuple(loader for loader in loaders.values() if loader.num_steps),
            any(file.saw_torch for file in known),
            tuple(fault for file in known for fault in file.faults),
        )


class _File:
    """The file of one process: what was read so far, and the state that the next lines continue."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process: Process | None = None
        self.loaders: dict[int, LoaderRecord] = {}  # by number
        self.saw_torch = False
        self.faults: list[str] = []
        self._read_to = self._fetches_to = self._fetches_read_to = 0  # ends of: all lines; fetches found; parsed
        # A loop that makes a new loader for each epoch gets one record for all of them.
        self._alike: dict[tuple[Any, ...], LoaderRecord] = {}
        self._waiting: dict[int, Event] = {}  # by loader: the batch whose step is in progress
        self._code_lines: Mapping[str, int] = {}

    def read(self, makers: dict[int, LoaderRecord]) -> None:
        """Reads all new events except fetches; notes in `makers` which worker works for which loader."""
        for line, end in _whole_lines(self.path, self._read_to):
            self._read_to = end
            if _is_fetch(line):
                self._fetches_to = end
                continue
            event = _parsed(line)
            kind = event.get("e")
            if kind == "process":
                self.process = _process(event)
            elif kind == "torch":
                self.saw_torch = True
            elif kind == "fault":
                self.faults.append(event["what"])
            elif kind == "line":
                # Each such event has the counts of its process so far.
                self._code_lines = dict(map(tuple, event["places"]))
            elif kind is not None and self.process is not None:
                self._follow(kind, event, self.process, makers)

    def read_fetches(self, makers: Mapping[int, LoaderRecord]) -> None:
        """Reads new fetches and code lines of the loaders they belong to; nothing while the loader is not known."""
        assert self.process is not None, "only known processes are asked"
        maker = makers.get(self.process.pid)
        if maker is not None:
            maker.lines.update(self._code_lines)
        elif not self.loaders:
            return
        if self._fetches_read_to >= self._fetches_to:
            return
        for line, end in _whole_lines(self.path, self._fetches_read_to, self._fetches_to):
            self._fetches_read_to = end
            if not _is_fetch(line):
                continue
            if not self.loaders:
                assert maker is not None, "otherwise it has returned above"
                if maker.wants_fetch():  # asked before parsing, which is slow
                    _keep(maker, self.process.pid, _parsed(line))
                continue
            event = _parsed(line)
            record = self.loaders.get(event.get("id", 0)) or maker
            if record is not None and record.wants_fetch():
                _keep(record, self.process.pid, event)

    def _follow(self, kind: str, event: Event, process: Process, makers: dict[int, LoaderRecord]) -> None:
        number = event.get("id", 0)
        if kind == "loader":
            kinds = tuple(value for name, value in event.items() if name not in ("id", "t"))
            self.loaders[number] = self._alike.setdefault(kinds, LoaderRecord(process, event))
        loader = self.loaders.get(number)
        if loader is None:
            return
        if kind == "iter":
            loader.epochs.append(LoaderEpoch(event["t"]))
            self._waiting.pop(number, None)
            for pid in event.get("pids", ()):
                makers[pid] = loader
        elif kind == "trial":
            loader.trials.append(event)
        elif kind in ("next", "end") and loader.epochs:
            self._add_batch(kind, event, loader, number)

    def _add_batch(self, kind: str, event: Event, loader: LoaderRecord, number: int) -> None:
        epoch = loader.epochs[-1]
        before = self._waiting.pop(number, None)
        if before is not None and event.get("step") is not None:
            step = step_of(before, event["step"], epoch.begin_s)
            epoch.steps.append(step)
            epoch.steps_s += step.step.duration_s
        if "inside" in event:
            _add_own_figures(loader, event)
        if kind == "end":
            epoch.end_s = event["wait"]
        else:
            if epoch.first_s is None:
                epoch.first_s = event["t"] + event["wait"] - epoch.begin_s
                event = {**event, "first": True}
            self._waiting[number] = event


def _whole_lines(path: Path, begin: int, end: int | None = None) -> Iterator[tuple[bytes, int]]:
    """Yields the complete lines from one position to another, each with its end."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            for line in file:
                begin += len(line)
                if not line.endswith(b"\n") or (end is not None and begin > end):
                    return
                yield line, begin
                if begin == end:
                    return
    except OSError:
        return


def _is_fetch(line: bytes) -> bool:
    return b'"fetch"' in line[:20]  # the kind comes first


def _parsed(line: bytes) -> Event:
    """Returns the event on a line, {} if it is malformed."""
    try:
        event, _ = _decode(line.decode())  # json.loads takes 1.5 times as long
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _keep(record: LoaderRecord, pid: int, event: Event) -> None:
    if event:
        record.keep_fetch(fetch_of(pid, event))


def _process(event: Event) -> Process:
    return Process(
        pid=event["pid"],
        python=event["python"],
        rank=event["rank"],
        cpus=event["cpus"],
        local_ranks=int(event["local_world"]) if str(event["local_world"]).isdigit() else 1,
    )


def _add_own_figures(loader: LoaderRecord, event: Event) -> None:
    """Adds the costs that a FastLoader reported with a batch; for other loaders they come from the workers' fetches."""
    inside = event["inside"]
    loader.facts |= inside["worker_info"]
    work = BatchWork({name: Work(*value) for name, value in inside["work"].items()})
    if work.stages and loader.wants_fetch():
        loader.keep_fetch(Fetch(loader.process.pid, event["t"], 0.0, work))
