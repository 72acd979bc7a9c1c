"""Computes the cost of making a batch, and of the step after it, from one event of the injected module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastload.timing.results import BatchWork, Step, Work

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step and the CPU time of its process meanwhile; seconds.

    Attributes:
        step: its parts.
        running_s: CPU time of all threads of the process in the step, outside the wait.
        runnable_s: time that the loop's thread was ready to run but had no CPU.
        receive: cost of receiving the batch, part of the wait.
    """

    step: Step
    running_s: float
    runnable_s: float
    receive: Work


@dataclass(frozen=True, slots=True)
class Fetch:
    """One batch while it is made: when, by whom, at what cost.

    Attributes:
        pid: of the process that made it.
        begin_s, wall_s: start and duration; the clock is the same in all processes.
        work: cost by stage.
        unknown_blocked_s: blocked time of reading that no timed call explains.
        slow: seconds of its slowest samples.
        samples: number of samples timed, their sum in seconds, and the seconds of a typical one.
    """

    pid: int
    begin_s: float
    wall_s: float
    work: BatchWork
    unknown_blocked_s: float = 0.0
    slow: tuple[float, ...] = ()
    samples: tuple[int, float, float] = (0, 0.0, 0.0)


def step_of(batch: Event, step: Mapping[str, float]) -> StepRecord:
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
        step=Step(
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
        receive=Work(batch["cpu"], max(0.0, batch["into"][0] - batch["into"][1])),
    )


# The stage of a part of making a batch: of its time on a CPU. Its blocked time is reading, except for the last two.
_STAGES = {
    **dict.fromkeys(("reading", "h5py", "lock"), "reading"),
    **dict.fromkeys(("decoding", "h5py-filtered"), "decoding"),
    "collate": "collate",
    "rest": "transform",
}


def fetch_of(pid: int, event: Event) -> Fetch:
    """Returns the cost of a batch by stage.

    A FastLoader has reported it with the batch; for other loaders it is made from the time spent in known functions and
    the CPU time of the thread.
    """
    if "inside" in event:
        work = BatchWork({name: Work(*value) for name, value in event["inside"]["work"].items()})
        return Fetch(pid, event["t"], 0.0, work)
    wall, delay = event["wall"], min(event["delay"], event["wall"])
    total_running = sum(cpu for _, cpu in event["parts"].values()) or 1e-12
    works: dict[str, Work] = defaultdict(Work)
    unknown = lock_s = 0.0
    for name, (part_wall, part_running) in event["parts"].items():
        # Each part waited for a CPU in proportion to its time on one.
        blocked = max(0.0, part_wall - part_running - delay * part_running / total_running)
        stage = _STAGES[name]
        works[stage] += Work(part_running)
        if stage == "transform":
            unknown = blocked
        else:
            works["collate" if stage == "collate" else "reading"] += Work(blocked_s=blocked)
        if name == "lock":
            lock_s += blocked
    # Meanwhile another thread pickles the batch before, and holds the GIL: the fetch waits for that.
    unknown = max(0.0, unknown - event["out"][1])
    lock_s += _lock_of_h5py(event)
    # While the fetching thread waits, other threads of its process may read or decode for it.
    others = {name: value for name, value in event.get("others", {}).items() if name != "lock"}
    total = sum(other_wall for other_wall, _ in others.values())
    explained = min(total, unknown)
    for name, (other_wall, other_running) in others.items():
        given = explained * other_wall / total if total > 0 else 0.0
        stage = _STAGES[name]
        running = given * min(1.0, other_running / other_wall) if other_wall and stage != "reading" else 0.0
        works[stage] += Work(running)
        works["reading"] += Work(blocked_s=given - running)
    unknown -= explained
    works["reading"] += Work(blocked_s=unknown)
    works["hand-over"] = Work(event["out"][1])
    return Fetch(
        pid=pid,
        begin_s=event["t"],
        wall_s=wall,
        work=BatchWork(dict(works), lock_s=lock_s, runnable_s=delay),
        unknown_blocked_s=unknown,
        slow=tuple(event.get("slow") or ()),
        samples=tuple(event.get("samples") or (0, 0.0, 0.0)),
    )


def _lock_of_h5py(event: Event) -> float:
    """Returns the time that a fetch waited because h5py lets in one thread at a time.

    Without that lock n threads would need the n-th part of the time that at least one was inside; the rest counts as
    lock time.
    """
    busy, waits, threads = event.get("h5") or (0.0, 0.0, 0)
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
