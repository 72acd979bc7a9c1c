"""Reads the events that the injected module writes, while the files grow, and groups them by loader.

Of each event about a batch it computes the cost of making that batch, and of the step after it.
A `Timeline` divides the time of a script among its loops over loaders, and its work before, between and after them.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastload.profiling.doctor.trials import Recorded
from fastload.profiling.meter.loops import Thinned
from fastload.timing.results import WAITING, BatchWork, Lane, LoopStep, NetworkUse, WorkTime

MOST_FETCHES = MOST_STEPS = 16_384
"""Number of batches of a loader whose making is read, and of steps kept (8 MB). Of more, an evenly spaced part is."""

Event = dict[str, Any]

_decode = json.JSONDecoder().raw_decode

# Raised for an event whose values are missing or of other kinds than the injected module writes.
_MALFORMED = KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError


@dataclass(frozen=True, slots=True)
class Fetch:
    """One batch while it is made: when, by whom, at what cost."""

    pid: int  # of the process that made it
    begin_s: float  # on a clock that is the same in all processes
    wall_s: float
    work: BatchWork
    unknown_blocked_s: float = 0.0  # blocked time of reading that no timed call explains
    slow: tuple[float, ...] | None = ()  # seconds of its slowest samples; None: of samples asked for at once
    samples: tuple[int, float, float] = (0, 0.0, 0.0)  # how many were timed, their seconds, seconds of a typical one
    decoded: tuple[int, int, int] = (0, 0, 0)  # images that were decoded, their heights and their widths together
    waits: tuple[tuple[str, float], ...] = ()  # lines of the dataset's code that slept or waited for a socket; seconds
    first_wait: tuple[float, float] = (0.0, 0.0)  # of those: when the first began, and its seconds; 0: there was none


# The stage of a part of making a batch.
_STAGES = {
    **dict.fromkeys(("reading", "h5py", "lock"), "reading"),
    **dict.fromkeys(("decoding", "h5py-filtered"), "decoding"),
    "collate": "collate",
    "rest": "transform",
    "waiting": WAITING,
}


def fetch_of(pid: int, event: Event) -> Fetch:
    """Returns the cost of a batch by stage.

    A FastLoader has reported it with the batch; for other loaders it is made from the time spent in known functions and
    the CPU time of the thread.
    """
    if "inside" in event:
        work = BatchWork({name: WorkTime(*value) for name, value in event["inside"]["work"].items()})
        return Fetch(pid, event["t"], 0.0, work)
    wall, delay = event["wall"], min(event["delay"], event["wall"])
    total_running = sum(cpu for _, cpu in event["parts"].values()) or 1e-12
    running: dict[str, float] = defaultdict(float)
    blocked: dict[str, float] = defaultdict(float)
    lock_s = _lock_of_h5py(event)
    # Each part waited for a CPU in proportion to its time on one, about; together they did so for as long as is known.
    waited = {
        name: max(0.0, part_wall - part_running - delay * part_running / total_running)
        for name, (part_wall, part_running) in event["parts"].items()
    }
    known_s = max(0.0, sum(part_wall - part_running for part_wall, part_running in event["parts"].values()) - delay)
    scale = min(1.0, known_s / max(sum(waited.values()), 1e-12))
    for name, (_, part_running) in event["parts"].items():
        part_blocked, stage = scale * waited[name], _STAGES[name]
        running[stage] += part_running
        blocked["reading" if stage == "decoding" else stage] += part_blocked
        if name == "lock":
            lock_s += part_blocked
    # Meanwhile another thread pickles the batch before, and holds the GIL: the fetch waits for that.
    meanwhile, running["hand-over"] = event["out"]
    unknown = max(0.0, blocked.pop("transform", 0.0) - meanwhile)
    # While the fetching thread waits, other threads of its process may read or decode for it.
    others = {name: value for name, value in event["others"].items() if name != "lock"}
    total = sum(other_wall for other_wall, _ in others.values())
    explained = min(total, unknown)
    for name, (other_wall, other_running) in others.items():
        given, stage = explained * other_wall / total, _STAGES[name]
        ran = given * min(1.0, other_running / other_wall) if stage != "reading" else 0.0
        running[stage] += ran
        blocked["reading"] += given - ran
    unknown -= explained
    blocked["reading"] += unknown
    stages = {name: WorkTime(running[name], blocked[name]) for name in {**running, **blocked}}
    return Fetch(
        pid=pid,
        begin_s=event["t"],
        wall_s=wall,
        work=BatchWork(stages, lock_s=lock_s, runnable_s=delay),
        unknown_blocked_s=unknown,
        slow=tuple(event["slow"]) if "slow" in event else None,
        samples=tuple(event.get("samples", (0, 0.0, 0.0))),
        decoded=tuple(event.get("decoded", (0, 0, 0))),
        first_wait=tuple(event.get("first_wait", (0.0, 0.0))),
        waits=tuple((str(line), float(seconds)) for line, seconds in event.get("waits", {}).items()),
    )


def _lock_of_h5py(event: Event) -> float:
    """Returns the time that a fetch waited because h5py lets in one thread at a time.

    Without that lock n threads would need the n-th part of the time that at least one was inside; the rest counts as
    lock time.
    """
    busy, waits, threads = event["h5"]
    if threads < 2 or busy <= 0:
        return 0.0
    own = [event["parts"].get(name, (0.0, 0.0)) for name in ("h5py", "h5py-filtered")]
    if any(wall > 0 for wall, _ in own):
        # The fetch and another thread both call h5py: the time that the fetch was blocked there is the lock's.
        return float(min(max(0.0, sum(wall - running for wall, running in own)), waits))
    together = (busy + waits) / busy
    if together < 1.05 and busy > 0.5 * event["wall"]:
        together = float(threads)  # always busy, yet never two at once: the script has a lock of its own
    return min(busy, event["wall"]) * (1 - 1 / together) if together > 1.1 else 0.0


_NOTHING_S = 1e-3  # a step that takes less, and a tenth of the one after it, did nothing with its batch
_MOST = 64


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step and the CPU time of its process meanwhile; seconds."""

    step: LoopStep
    running_s: float  # CPU time of all threads of the process in the step, outside the wait
    runnable_s: float  # time that the loop's thread was ready to run but had no CPU
    receive: WorkTime  # cost of receiving the batch, part of the wait
    host_s: float = 0.0  # time of the loop's thread in the step, its waits for the GPU included
    gpu_s: float | None = None  # time of a step on the GPU, the latest that was known; None: none was timed
    others_s: float = 0.0  # of the step, that the loop waited for batches of other loaders


def step_of(batch: Mapping[str, Any], step: Mapping[str, float]) -> StepRecord:
    """Returns the step after a batch was received; `begun`: when it was asked for, or the epoch's iterator was made."""
    begin_s = batch["begun"]
    inside = batch.get("inside", {"copy": 0.0, "transform": 0.0})
    own_s = inside["copy"] + inside["transform"]
    wait_s = max(0.0, batch["t"] + batch["wait"] - begin_s - own_s)
    compute_s = max(0.0, step["wall"] - step["copy"])
    if step.get("gpu") is not None:
        # The GPU works on after the loop has launched the step: as long as it does, the loop's wait is no stall.
        hidden_s = min(wait_s, max(0.0, step["gpu"] - compute_s))
        wait_s, compute_s = wait_s - hidden_s, compute_s + hidden_s
    return StepRecord(
        step=LoopStep(
            begin_s=begin_s,
            wait_s=wait_s,
            copy_s=step["copy"] + inside["copy"],
            transform_s=inside["transform"],
            compute_s=compute_s,
            samples=batch["n"],
            queue_depth=inside.get("depth"),
        ),
        running_s=step["process_cpu"],
        runnable_s=step["delay"] + step["copy_delay"],
        others_s=step["others"],
        receive=WorkTime(max(0.0, batch["cpu"] - own_s), max(0.0, batch["into"][0] - batch["into"][1])),
        host_s=step["wall"],
        gpu_s=step.get("gpu"),
    )


@dataclass
class InARow:
    """Steps that may have done nothing with their batches, and wait for the next one.

    Where gradients are summed over several batches, these are often taken first, and then all worked on, as Hugging
    Face's Trainer does; a loop that reads one batch ahead takes two before its first step.
    """

    steps: list[StepRecord] = field(default_factory=list)

    def take(self, record: StepRecord | None) -> list[StepRecord]:
        """Takes the next step, or None if none follows; returns those whose work is known by then, in order."""
        if record is not None:
            self.steps.append(record)
            if record.host_s < _NOTHING_S and len(self.steps) < _MOST:
                return []
        found, self.steps = self.steps, []
        return _shared(found) if found and found[-1].host_s > 10 * sum(one.host_s for one in found[:-1]) else found


def _shared(records: list[StepRecord]) -> list[StepRecord]:
    """Returns steps with the mean of their work each; their waits stay."""
    count, begin_s, shared = len(records), records[0].step.begin_s, []
    work = {name: sum(getattr(one.step, name) for one in records) / count for name in ("copy_s", "compute_s")}
    times = {name: sum(getattr(one, name) for one in records) / count for name in ("running_s", "runnable_s", "host_s")}
    on_gpu = [one.gpu_s for one in records if one.gpu_s is not None]
    for record in records:
        step = replace(record.step, begin_s=begin_s, **work)
        gpu_s = sum(on_gpu) / count if len(on_gpu) == count else None
        shared.append(replace(record, step=step, gpu_s=gpu_s, **times))
        begin_s += step.duration_s
    return shared


@dataclass(eq=False)
class LoaderRecord:
    """One loader of one process, over all its epochs; `fetches` and `lines` after `RecordedEvents.read_making`."""

    process: Event  # the `process` event of the process that iterates it
    facts: Event  # its `loader` event
    steps: Thinned[StepRecord] = field(default_factory=lambda: Thinned(MOST_STEPS))  # that have ended
    last: deque[LoopStep] = field(default_factory=lambda: deque(maxlen=50))  # the latest of them
    # Of all steps: samples, and the time that they waited
    samples: int = 0
    wait_s: float = 0.0
    elapsed_s: float = 0.0  # time that the loop spent with this loader
    epochs: list[tuple[float, float]] = field(default_factory=list)  # as in `Demands`
    trials: list[Event] = field(default_factory=list)  # its `trial` events
    fetches: list[Fetch] = field(default_factory=list)  # how its batches were made
    passes: list[Interval] = field(default_factory=list)  # over it, as far as they have come
    networks: list[NetworkUse | None] = field(default_factory=list)  # what came over the network in each of these
    trains: bool = False  # whether its loop ran backward
    shape: tuple[int, ...] = ()  # of the images in its first batch, four numbers; empty: it had none
    dtype: str = ""  # of these
    sizes: tuple[int, ...] = ()  # in bytes, of all tensors in it
    recordings: list[Recorded] = field(default_factory=list)  # of some of its steps
    inner: int = 0  # batches that it took from a DataLoader within it; 0: there is none
    in_a_row: InARow = field(default_factory=InARow)  # steps that may belong to the next one's work
    num_nexts: int = 0  # batches that the loop got
    fetch_stride: int = 1  # of how many one is among them
    # How often its workers were looked at (`look`), seen at a `line`, waiting at one (`wait`), or in a `call` of a part
    # of making a batch: by kind and names
    seen: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def seen_at(self, kind: str) -> Counter[tuple[str, ...]]:
        """Returns the counts of one kind, by names."""
        return Counter({words[1:]: count for words, count in self.seen.items() if words[0] == kind})

    @property
    def recorded(self) -> Recorded | None:
        """The recorded step of a full batch with the least time between its operations; None: there is none.

        A loader that reads ahead asks for two batches at first, and nothing lies in between: that is no step.
        """
        most = max((len(one.operations) for one in self.recordings), default=0)
        whole = [one for one in self.recordings if len(one.operations) > most / 2]
        full = max((one.batch_size for one in whole), default=0)
        return min((one for one in whole if one.batch_size == full), key=lambda one: one.between_s, default=None)

    @property
    def decoded_size(self) -> tuple[int, int]:
        """Mean height and width of the images that were decoded for its batches; (0, 0): there were none."""
        count, heights, widths = (sum(fetch.decoded[number] for fetch in self.fetches) for number in range(3))
        return (heights // count, widths // count) if count else (0, 0)

    @property
    def network(self) -> NetworkUse | None:
        """Its use of the network; None: its data are on this machine, or it does not say."""
        came = [one for one in self.networks if one is not None]
        return functools.reduce(operator.add, reversed(came)) if came else None

    @property
    def inner_per_batch(self) -> float:
        """Batches of the DataLoader within it per batch of its own; 1.0 unless it regroups them."""
        inner = self.inner / max(1, self.num_nexts)
        return inner if inner and not 0.8 < inner < 1.25 else 1.0

    @property
    def name(self) -> str:
        """The dataset, and where the script iterates its loader."""
        at = re.sub(r"^<module> \((.*)\)$", r"\1", str(self.facts["at"]))
        return f"{self.facts['dataset']} at {at}" if at else str(self.facts["dataset"])

    def take(self, record: StepRecord | None) -> None:
        """Adds a step that has ended; None: none follows it for now."""
        for one in self.in_a_row.take(record):
            self.steps.add(one)
            self.last.append(one.step)
            self.samples += one.step.samples
            self.wait_s += one.step.wait_s
            self.elapsed_s += one.step.duration_s


class RecordedEvents:
    """A job's processes, and the loaders that they iterated: read repeatedly, each time only new events.

    The job may still run: lines that are incomplete or cannot be parsed are left out.
    """

    def __init__(self, folder: Path) -> None:
        self.num_processes = 0  # that wrote events
        self.loaders: tuple[LoaderRecord, ...] = ()  # those with at least one step
        self.saw_torch = False  # whether any process imported torch's DataLoader
        self.faults: tuple[str, ...] = ()  # failures of the injected module
        self.calls: dict[int, list[tuple[str, Interval]]] = {}  # of known functions, by the pid of who called them
        self._folder = folder
        self._files: dict[Path, _File] = {}
        self._makers: dict[int, LoaderRecord] = {}  # by a worker's pid

    def read(self) -> RecordedEvents:
        """Reads everything recorded so far, except how batches were made; returns itself."""
        for path in sorted(self._folder.glob("*.jsonl")):
            self._files.setdefault(path, _File(path))
        for file in self._files.values():
            file.read(self._makers)
            for loader in file.loaders.values():
                loader.take(None)
        known = [file for file in self._files.values() if file.process]
        self.num_processes, self.saw_torch = len(known), any(file.saw_torch for file in known)
        loaders = [loader for file in known for loader in file.loaders.values() if loader.steps.count]
        self.loaders = tuple(dict.fromkeys(loaders))
        self.faults = tuple(fault for file in known for fault in file.faults)
        self.calls = {file.process["pid"]: file.calls for file in known}
        return self

    def read_making(self, loader: LoaderRecord) -> None:
        """Reads how a loader's batches were made, by its workers or in the loop itself, as far as `read` has come."""
        files = []  # each with the loader that its process works for
        loader.seen.clear()
        for file in self._files.values():
            maker = self._makers.get(file.process.get("pid", 0))
            if maker is loader:
                loader.seen.update(file.seen)
            if maker is loader or loader in file.loaders.values():
                files.append((file, maker))
        every = loader.fetch_stride = max(1, -(-sum(file.num_made for file, _ in files) // MOST_FETCHES))
        made = (
            (file, maker, line)
            for file, maker in files
            for line in itertools.islice(filter(_is_about_making, _whole_lines(file.path)), file.num_made)
        )
        loader.fetches = [
            fetch
            for file, maker, line in itertools.islice(made, every - 1, None, every)  # parsing is slow
            if (event := _parsed(line)) and (fetch := file.fetch_for(loader, maker, event)) and fetch.work.stages
        ]


class _File:
    """The file of one process: what was read so far, and the state that the next lines continue."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process: Event = {}
        self.loaders: dict[int, LoaderRecord] = {}  # by number
        self.saw_torch = False
        self.faults: list[str] = []
        self.calls: list[tuple[str, Interval]] = []  # of known functions, by name
        self.num_made = 0  # lines about the making of a batch
        self.seen: dict[tuple[str, ...], int] = {}  # as in `LoaderRecord`
        self._read_to = 0
        # A loop that makes a new loader for each epoch gets one record for all; two that take turns have one each.
        self._alike: dict[tuple[Any, ...], list[LoaderRecord]] = {}
        self._last: dict[int, Event] = {}  # by loader: its last `iter` or `next`, until its epoch ends

    def read(self, makers: dict[int, LoaderRecord]) -> None:
        """Reads all new events except fetches; notes in `makers` which worker works for which loader."""
        for line in _whole_lines(self.path, self._read_to):
            self._read_to += len(line)
            self.num_made += _is_about_making(line)
            with suppress(*_MALFORMED):
                self._take({} if _is_fetch(line) else _parsed(line), makers)

    def fetch_for(self, loader: LoaderRecord, maker: LoaderRecord | None, event: Event) -> Fetch | None:
        """Returns the cost of a batch if it is one of a loader; None if it is not, or the event is malformed."""
        with suppress(*_MALFORMED):
            if self.loaders.get(event.get("id", 0), maker) is loader:
                return fetch_of(self.process["pid"], event)
        return None

    def _take(self, event: Event, makers: dict[int, LoaderRecord]) -> None:
        kind = event.get("e")
        if kind == "process":
            if type(event["pid"]) is int:
                self.process = event
        elif kind == "torch":
            self.saw_torch = True
        elif kind == "call":
            self.calls.append((str(event["name"]), Interval(event["t"], event["t"] + event["s"])))
        elif kind == "fault":
            self.faults.append(str(event["what"]))
        elif kind == "line":
            # the counts so far
            self.seen = {tuple(map(str, words)): int(count) for words, count in event["seen"]}
        elif kind is not None and self.process:
            self._follow(kind, event, makers)

    def _follow(self, kind: str, event: Event, makers: dict[int, LoaderRecord]) -> None:
        """Takes an event of a loop over a loader."""
        number = event.get("id", 0)
        if kind == "loader":
            kinds = tuple(str(value) for name, value in event.items() if name not in ("id", "t", "open"))
            alike = self._alike.setdefault(kinds, [])
            taking_turns = [self.loaders.get(one) for one in event.get("open", ())]
            alike += [] if any(one not in taking_turns for one in alike) else [LoaderRecord(self.process, event)]
            self.loaders[number] = next(one for one in alike if one not in taking_turns)
        loader, before = self.loaders.get(number), self._last.get(number)
        if loader is None:
            return
        if kind == "trial":
            loader.trials.append(event)
        elif kind == "inner":
            makers.update(dict.fromkeys(event["pids"], loader))
            found = {name: event[name] for name in ("workers", "prefetch", "persistent", "batch_size", "dataset")}
            loader.facts |= found | {"batch_size": loader.facts["batch_size"] or found["batch_size"]}
        elif kind == "trains":
            loader.trains = True
        elif kind == "operations":
            names = ("tensors", "operations", "images", "between", "threads")
            loader.recordings.append(Recorded(*(event[name] for name in names)))
        elif kind == "shape":
            shape = tuple(map(int, event["shape"]))
            loader.shape, loader.dtype = shape if len(shape) == 4 else (), str(event["dtype"])
            loader.sizes = tuple(map(int, event["bytes"]))
            loader.facts |= {"masks": bool(event.get("masks"))}
        elif kind == "iter":
            loader.take(None)
            self._last[number] = event
            loader.passes.append(Interval(event["t"], event["t"] + event["s"]))
            loader.networks.append(None)
            makers.update(dict.fromkeys(event.get("pids", ()), loader))
        elif kind in ("next", "end") and before is not None:
            loader.passes[-1] = Interval(loader.passes[-1].begin_s, event["t"] + event["wait"])
            is_first = before["e"] == "iter"
            if event["step"] is not None and not is_first:
                loader.take(step_of(before, event["step"]))
            if kind == "next":
                self._last[number] = event
                loader.num_nexts += 1
                loader.inner = event.get("inner", 0)
                loader.facts |= event.get("inside", {}).get("worker_info", {})
                if came := event.get("inside", {}).get("network"):
                    loader.networks[-1] = NetworkUse(**came)
                event["begun"] = before["t"] if is_first else event["t"]
                if is_first:
                    loader.epochs.append((event["t"] + event["wait"] - before["t"], 0.0))
            else:
                loader.take(None)
                del self._last[number]
                loader.elapsed_s += event["wait"]
                if not is_first:
                    loader.epochs[-1] = (loader.epochs[-1][0], event["wait"])


def _whole_lines(path: Path, begin: int = 0) -> Iterator[bytes]:
    """Yields the complete lines from a position on."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(begin)
        yield from itertools.takewhile(lambda line: line.endswith(b"\n"), file)


def _is_fetch(line: bytes) -> bool:
    return b'"fetch"' in line[:20]  # the kind comes first


def _is_about_making(line: bytes) -> bool:
    return _is_fetch(line) or b'"inside"' in line  # a FastLoader's figures come with the batch


def _parsed(line: bytes) -> Event:
    """Returns the event on a line, {} if it is malformed."""
    try:
        event, _ = _decode(line.decode())  # json.loads takes 1.5 times as long
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}


BEFORE, BETWEEN, AFTER = "before its first loop", "between its loops", "after its last loop"

_SEEN = 1 / 500  # of the run; a gap of less is not seen in a picture
_LEAST_CALLS, _MOST_CALLS = 0.01, 3  # part of the run, number of functions


@dataclass(frozen=True)
class Interval:
    """A piece of time; seconds on one clock."""

    begin_s: float
    end_s: float


@dataclass
class Timeline:
    """The seconds of a run: `loops` and `outside` together are all of it."""

    loops: list[float]  # of each loop, without loops inside of it
    outside: dict[str, float]  # by BEFORE, BETWEEN and AFTER
    calls: dict[str, dict[str, float]] = field(default_factory=dict)  # of these, the seconds of known calls, by name

    @property
    def total_s(self) -> float:
        return sum(self.loops) + sum(self.outside.values())

    def described(self) -> list[str]:
        """Returns what was outside of loops, and took a fiftieth of the time or more, in words."""
        found = []
        for where, seconds in self.outside.items():
            if seconds >= 0.02 * self.total_s:
                longest = sorted(self.calls[where].items(), key=lambda call: -call[1])[:3]
                known = [f"{name} {taken_s:.1f} s" for name, taken_s in longest if taken_s >= 0.05]
                inside = f" ({', '.join(known)})" if known else ""
                found.append(f"{seconds / self.total_s:.0%} of the run, {seconds:.1f} s, were {where}{inside}")
        return found


def timeline(
    run: Interval, passes: Sequence[Sequence[Interval]], calls: Sequence[tuple[str, Interval]] = ()
) -> Timeline:
    """Returns where the time of a run went.

    Args:
        run: from the script's begin to its end.
        passes: of each loop over a loader, within the run; a pass may lie within one of another loop, which then waits.
        calls: the name of a function, and a call of it; counted where they lie outside of all loops.
    """
    marks = sorted(
        [(span.begin_s, 1, loop) for loop, spans in enumerate(passes) for span in spans]
        + [(span.end_s, 0, loop) for loop, spans in enumerate(passes) for span in spans]
    )
    loops, gaps, open_loops, since_s = [0.0] * len(passes), list[Interval](), list[int](), run.begin_s
    for moment_s, begins, loop in marks:
        if open_loops:
            loops[open_loops[-1]] += moment_s - since_s
        elif moment_s > since_s:
            gaps.append(Interval(since_s, moment_s))
        since_s = moment_s
        if begins:
            open_loops.append(loop)
        elif loop in open_loops:
            open_loops.remove(loop)
    if run.end_s > since_s or not marks:
        gaps.append(Interval(since_s, max(since_s, run.end_s)))
    first_s = marks[0][0] if marks else run.end_s
    outside = dict.fromkeys((BEFORE, BETWEEN, AFTER), 0.0)
    named: dict[str, dict[str, float]] = {where: {} for where in outside}
    for gap in gaps:
        where = BEFORE if gap.begin_s < first_s else AFTER if marks and gap.begin_s >= marks[-1][0] else BETWEEN
        outside[where] += gap.end_s - gap.begin_s
        for name, call in calls:
            inside_s = min(call.end_s, gap.end_s) - max(call.begin_s, gap.begin_s)
            if inside_s > 0:
                named[where][name] = named[where].get(name, 0.0) + inside_s
    return Timeline(loops, outside, named)


def lanes_of(
    run: Interval, loops: Sequence[tuple[str, Sequence[Interval]]], calls: Sequence[tuple[str, Interval]]
) -> list[Lane]:
    """Returns the passes of each loop, by name, and the calls of functions that take long, to be drawn."""
    total_s, by_name = run.end_s - run.begin_s, dict[str, list[Interval]]()
    for name, span in calls:
        by_name.setdefault(name, []).append(span)
    long = [(sum(one.end_s - one.begin_s for one in spans), name) for name, spans in by_name.items()]
    kept = [name for seconds, name in sorted(long, reverse=True) if seconds >= _LEAST_CALLS * total_s][:_MOST_CALLS]
    lanes = []
    for name, spans in [*loops, *((name, by_name[name]) for name in kept)]:
        drawn: list[tuple[float, float]] = []
        for span in sorted(spans, key=lambda span: span.begin_s):
            begin_s, end_s = span.begin_s - run.begin_s, span.end_s - run.begin_s
            if drawn and begin_s - drawn[-1][1] < _SEEN * total_s:
                drawn[-1] = drawn[-1][0], max(drawn[-1][1], end_s)
            else:
                drawn.append((begin_s, end_s))
        lanes.append(Lane(name, sum(span.end_s - span.begin_s for span in spans), tuple(drawn)))
    return lanes
