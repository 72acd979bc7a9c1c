"""What a measurement of a training loop found: the figures that bench, doctor, tune and `Meter` print, draw and export.

Everything here is plain numbers and strings, so that it can be saved as JSON and read again by another program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

STAGES = ("reading", "decoding", "transform", "collate", "hand-over", "copy to the device")
"""What is done to a batch before a step, in order."""


@dataclass(frozen=True)
class Step:
    """One step of a training loop; times in seconds.

    Attributes:
        begin_s: when its batch was asked for, since the measurement began.
        wait_s: that the loop waited for the batch.
        copy_s: to bring it to the device, as far as the loop waited for that (on a GPU: of the device's time).
        transform_s: to augment it, likewise.
        compute_s: the rest, up to the next time that a batch is asked for.
        samples: in the batch.
        queue_depth: batches that lay ready when it was asked for; None: not known.
    """

    begin_s: float
    wait_s: float
    copy_s: float
    transform_s: float
    compute_s: float
    samples: int
    queue_depth: int | None = None

    @property
    def duration_s(self) -> float:
        """From one time that a batch is asked for to the next."""
        return self.wait_s + self.copy_s + self.transform_s + self.compute_s


@dataclass(frozen=True)
class Work:
    """What something cost the threads that did it, in seconds: on a CPU, and waiting for anything but a CPU."""

    running_s: float = 0.0
    blocked_s: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.running_s + other.running_s, self.blocked_s + other.blocked_s)


@dataclass(frozen=True)
class Cure:
    """One change, and what it would bring.

    Attributes:
        cause: what it takes away, one of `fastload.verdict.CAUSES`.
        change: what to do, as an imperative clause.
        step_s: mean seconds a step would take then.
        gain: how many times as fast a step would be, at most.
    """

    cause: str
    change: str
    step_s: float
    gain: float


@dataclass(frozen=True)
class Verdict:
    """What binds.

    Attributes:
        cause: one of `fastload.verdict.CAUSES`; empty: the loop waits, and its loader does not tell what for.
        sentence: all of it in one sentence, without the word `verdict:`.
        evidence: the measurements that it rests on, a line each.
        step_s: mean seconds a step takes.
        stall_share: part of the time that the loop waited for data, 0 to 1.
        cures: what was considered, the one to make first at the head; empty when nothing would help.
        worth_making: whether the first of them brings at least 1.1.
        fastload_helps: whether packing the data and feeding it with fastload takes the cause away.
    """

    cause: str
    sentence: str
    evidence: tuple[str, ...]
    step_s: float
    stall_share: float
    cures: tuple[Cure, ...] = ()
    worth_making: bool = False
    fastload_helps: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text under a head."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Measured:
    """Everything about one run.

    Attributes:
        title: what was measured, such as `fastload bench photos.h5`.
        command: to measure it again; empty: not by a command.
        steps: of the loop, in order; of a long run a sample, evenly spaced, with their own begin_s.
        num_steps: how many there were.
        elapsed_s: from the first batch asked for to the end.
        samples_per_s: over that time.
        stages: mean cost of a batch by stage of `STAGES`, in the threads or processes that did it.
        headspace_samples_per_s: rate of the same step without a loader; None: not known.
        headspace_how: `measured on one cached batch`, or how else it is known.
        readings: of the driver and the system, in order: `at_s` since the measurement began, and whichever of
            `gpuN.utilization_percent`, `gpuN.memory_bytes`, `gpuN.power_w`, `gpuN.sm_mhz` (N: index), `cpu_percent`
            (100: one core, all processes of the job), `cpu_percent.PID`, `memory_bytes` (anonymous and shared),
            `disk_read_bytes_per_s` (by the job), `disk_busy_percent`.
        verdict: what binds.
        facts: further figures, name and text, in the order to be shown.
        tables: further tables.
        environment: machine, versions, options; name and text.
    """

    title: str
    command: str = ""
    steps: tuple[Step, ...] = ()
    num_steps: int = 0
    elapsed_s: float = 0.0
    samples_per_s: float = 0.0
    stages: Mapping[str, Work] = field(default_factory=dict)
    headspace_samples_per_s: float | None = None
    headspace_how: str = ""
    readings: tuple[Mapping[str, float], ...] = ()
    verdict: Verdict | None = None
    facts: tuple[tuple[str, str], ...] = ()
    tables: tuple[Table, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All of it as numbers, strings, lists and dicts; `version` tells readers what to expect."""
        return {"version": 1, **asdict(self)}
