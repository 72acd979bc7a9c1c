"""The results of measuring a training loop, which bench, doctor, tune and `Meter` print, draw and export.

All of them are plain numbers and strings, so that they can be saved as JSON and read by another program.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

SCHEMA = 1
"""Of the JSON that commands print and write: `schema` in all of it. A field that is renamed or removed raises it."""

WAITING = "waiting in the dataset's code"
"""The stage, and the cause, of a dataset whose own code sleeps or waits for the network."""

NETWORK = "waiting for the network"
"""The stage, and the cause, of rows behind a URL whose chunks have not come yet."""

STAGES = ("reading", NETWORK, WAITING, "decoding", "transform", "collate", "hand-over", "copy to the device")
"""The stages of making a batch, in order."""


def with_schema(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON object as commands print and write it; numbers that are not finite become null."""

    def finite(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): finite(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [finite(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {"schema": SCHEMA, **finite(content)}


@dataclass(frozen=True)
class LoopStep:
    """One step of a training loop; times in seconds."""

    begin_s: float  # when its batch was asked for, since the measurement began
    wait_s: float  # time the loop waited for the batch
    copy_s: float  # time of copying it to the device that the loop waited for (on a GPU: time of the device)
    transform_s: float  # time of augmenting it, likewise
    compute_s: float  # the rest, until the next batch is asked for
    samples: int  # samples in the batch
    queue_depth: int | None = None  # batches that were ready when it was asked for; None: not known

    @property
    def duration_s(self) -> float:
        """Seconds from asking for this batch to asking for the next."""
        return self.wait_s + self.copy_s + self.transform_s + self.compute_s


@dataclass(frozen=True)
class WorkTime:
    """Seconds that threads spent on something: running on a CPU, and blocked by anything but the lack of a CPU."""

    running_s: float = 0.0  # on a CPU
    blocked_s: float = 0.0  # by a disk, a lock, a sleep

    @property
    def total_s(self) -> float:
        return self.running_s + self.blocked_s

    def __add__(self, other: WorkTime) -> WorkTime:
        return WorkTime(self.running_s + other.running_s, self.blocked_s + other.blocked_s)

    def __truediv__(self, count: int) -> WorkTime:
        return WorkTime(self.running_s / count, self.blocked_s / count)


@dataclass(frozen=True)
class Remedy:
    """One change, and its expected gain."""

    cause: str  # the cause it removes, one of `fastload.profiling.verdict.CAUSES`
    change: str  # an imperative clause
    step_s: float  # mean seconds a step would take after it
    gain: float  # speed of a step after it over the present one, as predicted
    how: str = ""  # what to type, in one line or several; empty: the clause says all
    least_gain: float = 0.0  # if the dataset's own transforms have to be kept, of which nothing is known; 0: known

    @property
    def how_in_brief(self) -> str:
        """`how` if it is one line."""
        return "" if "\n" in self.how else self.how

    @property
    def instructions(self) -> list[str]:
        """`how` as lines to print, with a heading; none if it is empty."""
        if "\n" not in self.how:
            return [f"to do it: {self.how}"] if self.how else []
        return ["to do it:", *(f"  {line}" for line in self.how.split("\n"))]


@dataclass(frozen=True)
class Verdict:
    """The cause that limits the speed of a training loop, with evidence and remedies.

    Attributes:
        cause: one of `fastload.profiling.verdict.CAUSES`; empty: the loop waits, and its loader does not say for what.
        sentence: the whole verdict in one sentence, without the word `verdict:`.
        evidence: the measurements behind it, a line each.
        step_s: mean seconds a step takes.
        stall_share: part of the time that the loop waited for data, 0 to 1.
        cures: the remedies considered, best first; empty when nothing would help.
        worth_making: whether the first of them gains at least a factor of 1.1.
        fastload_helps: whether packing the data and loading it with fastload removes the cause.
        free_step_s: mean seconds a step would take with a loader that costs nothing; the headspace is the rate of that.
    """

    cause: str
    sentence: str
    evidence: tuple[str, ...]
    step_s: float
    stall_share: float
    cures: tuple[Remedy, ...] = ()
    worth_making: bool = False
    fastload_helps: bool = False
    free_step_s: float = 0.0


@dataclass(frozen=True)
class Table:
    """A table of text: a title, column heads and rows."""

    title: str  # what it shows
    head: tuple[str, ...]  # of its columns
    rows: tuple[tuple[str, ...], ...]  # as many cells as the head has


@dataclass(frozen=True)
class Lane:
    """When something in a run went on: a loop over a loader, or calls such as `torch.save`."""

    name: str  # of the loop or call
    seconds: float  # in all
    # begin and end of each time, in seconds since the run began; times with hardly anything between them are one
    spans_s: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Measured:
    """Everything measured in one run.

    Attributes:
        title: the subject, such as `fastload bench photos.h5`.
        command: repeats the measurement; empty: it was not made by a command.
        steps: steps of the loop, in order; of a long run an evenly spaced sample, with their own begin_s.
        num_steps: number of all steps.
        elapsed_s: seconds from asking for the first batch to the end.
        samples_per_s: mean rate over that time.
        epochs_s: when the first batch of each epoch was asked for, on the clock of `begin_s` of `steps`.
        lanes: of a script, when its loops and its longest calls went on.
        run_s: seconds of the script's run, from which `lanes` count; 0: there was no script.
        stages: mean cost of a batch by stage of `STAGES`, in the threads or processes that did the work.
        headspace_samples_per_s: rate of the same step without a loader; None: not known.
        headspace_how: how that is known, such as `measured on one cached batch`.
        readings: readings of the driver and the system, in order: `at_s` since the measurement began, and any of
            `gpuN.utilization_percent`, `gpuN.memory_bytes`, `gpuN.power_w`, `gpuN.sm_mhz` (N: index), `cpu_percent`
            (100: one core, all processes of the job), `cpu_percent.PID`, `others_cpu_percent` (of other programs, on
            the CPUs that the job may use), `memory_bytes` (anonymous and shared),
            `disk_read_bytes_per_s` (by the job), `disk_busy_percent`.
        verdict: what limits the speed.
        facts: further figures, name and text, in the order in which they are shown.
        tables: further tables.
        environment: machine, versions, options; name and text.
    """

    title: str
    command: str = ""
    steps: tuple[LoopStep, ...] = ()
    num_steps: int = 0
    elapsed_s: float = 0.0
    samples_per_s: float = 0.0
    stages: Mapping[str, WorkTime] = field(default_factory=dict)
    headspace_samples_per_s: float | None = None
    headspace_how: str = ""
    readings: tuple[Mapping[str, float], ...] = ()
    verdict: Verdict | None = None
    facts: tuple[tuple[str, str], ...] = ()
    tables: tuple[Table, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    epochs_s: tuple[float, ...] = ()
    lanes: tuple[Lane, ...] = ()
    run_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as numbers, strings, lists and dicts."""
        return asdict(self)


@dataclass(frozen=True)
class BatchWork:
    """The cost of making one batch, in seconds."""

    stages: Mapping[
        str, WorkTime
    ]  # by stage of `STAGES` up to the hand-over, in the thread or process that makes batches
    lock_s: float = 0.0  # part of their blocked time spent waiting for a lock of another thread or process
    slow_s: float = 0.0  # part of their time that slow samples took beyond the usual time of a sample
    runnable_s: float = 0.0  # additional time that the thread waited for a CPU

    @property
    def total_s(self) -> float:
        """Seconds of all stages."""
        return sum(work.total_s for work in self.stages.values())

    def __add__(self, other: BatchWork) -> BatchWork:
        names = {**self.stages, **other.stages}
        stages = {name: self.stages.get(name, WorkTime()) + other.stages.get(name, WorkTime()) for name in names}
        sums = self.lock_s + other.lock_s, self.slow_s + other.slow_s, self.runnable_s + other.runnable_s
        return BatchWork(stages, *sums)

    def __truediv__(self, count: int) -> BatchWork:
        stages = {name: work / count for name, work in self.stages.items()}
        return BatchWork(stages, self.lock_s / count, self.slow_s / count, self.runnable_s / count)


def mean_stages(batches: Sequence[BatchWork]) -> dict[str, WorkTime]:
    total = functools.reduce(operator.add, batches, BatchWork({}))
    return dict((total / max(1, len(batches))).stages)


_STATES = ("url", "in_flight", "allowed", "dataset_bytes", "room_bytes", "nodes", "by_node")


@dataclass(frozen=True)
class NetworkUse:
    """Counts of this process's fetches of one dataset in some time; all zero for a file of this machine.

    `+` and `-` add and subtract the counts; the result keeps the left side's other values.
    """

    elapsed_s: float = 0.0  # of the time
    bytes: int = 0  # of chunks that came
    chunks: int = 0  # that came
    again: int = 0  # of these, chunks that had come before and were evicted since
    hits: int = 0  # chunks that were found in the cache
    requests: int = 0  # that were sent, each try
    retries: int = 0  # of these, tries after one that failed
    refused: int = 0  # tries that the server refused for their number
    busy_s: float = 0.0  # of all tries together, from sending one to the end of its answer
    waited_s: float = 0.0  # of all threads together, in which they needed chunks that had not come
    url: str = ""
    in_flight: int = 0  # requests that `Remote` allows at once
    allowed: float = 0.0  # requests that the server bears at once, as far as it refused some
    dataset_bytes: int = 0  # of all objects
    room_bytes: int = 0  # of the cache
    nodes: int = 1  # machines that train together
    by_node: bool = False  # whether each of them has a share of its own: share="node"

    def __add__(self, other: NetworkUse) -> NetworkUse:
        return self._with(other, 1)

    def __sub__(self, other: NetworkUse) -> NetworkUse:
        return self._with(other, -1)

    def _with(self, other: NetworkUse, sign: int) -> NetworkUse:
        counts: dict[str, Any] = {
            one.name: getattr(self, one.name) + sign * getattr(other, one.name)
            for one in fields(self)
            if one.name not in _STATES
        }
        return replace(self, **counts)

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def mean_in_flight(self) -> float:
        """Requests that were in flight at once, on average."""
        return self.busy_s / self.elapsed_s if self.elapsed_s else 0.0
