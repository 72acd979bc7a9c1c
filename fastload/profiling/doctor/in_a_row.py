"""A recorded step; and batches that a loop takes in a row before it works on them, which share that work equally."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fastload.timing.results import Step, Work

_NOTHING_S = 1e-3  # a step that takes less, and a tenth of the one after it, did nothing with its batch
_MOST = 64


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step and the CPU time of its process meanwhile; seconds."""

    step: Step
    running_s: float  # CPU time of all threads of the process in the step, outside the wait
    runnable_s: float  # time that the loop's thread was ready to run but had no CPU
    receive: Work  # cost of receiving the batch, part of the wait
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
        others_s=step["others"],
        receive=Work(max(0.0, batch["cpu"] - own_s), max(0.0, batch["into"][0] - batch["into"][1])),
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
