"""The input of a verdict: a loop's measured steps and batches (`Demands`), and their mean costs (`Costs`)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fastload.timing.results import STAGES, BatchWork, Step, Work, mean_stages

MAKING_STAGES = STAGES[:-1]
"""The stages of making a batch before its copy to the device, in order."""


@dataclass(frozen=True)
class Demands:
    """One loader's batches and the steps that used them, whoever recorded them; all times in seconds."""

    batches: tuple[BatchWork, ...]  # their costs, in the order of the steps, as far as they are known
    steps: tuple[Step, ...]  # of the loop that asked for the batches; of a long run an evenly spaced part
    workers: int  # threads or processes that make batches; 0: the loop makes them itself
    ahead: int  # batches that may be in progress or ready at once
    cpus: int  # that the job may use
    num_steps: int = 0  # number of all steps; 0: `steps` are all
    # For each epoch with a batch, the time from asking for its iterator to its first batch, and the loop's wait at its
    # end, which found no more batches and belongs to no step
    epochs: tuple[tuple[float, float], ...] = ()
    receive_s: float = 0.0  # mean CPU time of the loop for receiving a batch, part of its wait
    # Mean time that receiving a batch waits for the worker that made it: a thread of that process passes the memory on,
    # and gets its GIL late while it runs Python
    receive_blocked_s: float = 0.0
    step_running_s: float = 0.0  # mean CPU time of the loop's process, all threads, in a step outside its wait
    step_runnable_s: float = 0.0  # mean time in a step, outside its wait, in which the loop's thread lacked a CPU
    # A trial: workers allowed to work at once, mean seconds of a step with those, and with all; None: there was none
    fewer_workers: tuple[int, float, float] | None = None
    by_threads: bool = False  # whether workers are threads of the loop's process
    persistent: bool = False  # whether workers live from epoch to epoch
    is_fastload: bool = False  # whether the loader is a FastLoader
    waits_only: bool = False  # whether nobody saw what batches cost, as a `Meter` does not in other loaders
    # Of a packed file whose images are decoded on the fly, bytes of the pixels over bytes in the file; 0: of no such
    compression_ratio: float = 0.0
    notes: tuple[str, ...] = ()  # further evidence, a line each, such as the line of code that takes longest

    @cached_property
    def startups_s(self) -> tuple[float, ...]:
        """For each epoch, what its first batch took beyond a usual one, and its end; empty if there are no workers."""
        if made_s := [batch.runnable_s + _whole_s(batch) for batch in self.batches if batch.stages]:
            usual_s = self.receive_s + self.receive_blocked_s + statistics.median(made_s)
        else:
            usual_s = statistics.median([step.wait_s for step in self.steps] or [0.0])
        return tuple(max(0.0, first_s - usual_s) + end_s for first_s, end_s in self.epochs) if self.workers else ()

    @property
    def ended_s(self) -> float:
        """Waits at the ends of all epochs."""
        return sum(end_s for _, end_s in self.epochs)

    def per_step(self, seconds: float) -> float:
        """Returns the share of each step in a time of the whole run."""
        return seconds / (self.num_steps or len(self.steps))


@dataclass(frozen=True)
class Costs:
    """Mean seconds per batch or per step, made from `Demands` by `costs_of`."""

    # Time to make a batch by stage. `lock contention` and `a slow sample now and then` are entries of their own, taken
    # out of the stages in which they happen
    stages: dict[str, Work]
    # workers, cpus, receive_s, receive_blocked_s: as in `Demands`
    workers: int
    cpus: int
    receive_s: float
    receive_blocked_s: float
    copy_s: float  # time of the loop to bring a batch to the device
    augment_s: float  # time of the loop to transform a batch when it is received
    compute_s: float  # the rest of the loop's time, the step itself
    loop_running_s: float  # CPU time of the loop's process, outside its wait
    startup_s: float  # start-up of all epochs, divided by the number of steps
    stretch: float = 1.0  # factor by which workers are slowed down because they wait for CPUs

    @property
    def running_s(self) -> float:
        """CPU time to make a batch."""
        return sum(work.running_s for work in self.stages.values())

    @property
    def make_s(self) -> float:
        """Time of one worker to make one batch, if it always has a CPU."""
        return self.running_s + sum(work.blocked_s for work in self.stages.values())

    @property
    def work_s(self) -> float:
        """All time spent on a batch before its step, by workers and loop."""
        return self.make_s + self.receive_s + self.receive_blocked_s

    @property
    def production_s(self) -> float:
        """Time between two finished batches, if no worker waits for the loop."""
        cpu_s = (self.running_s + self.receive_s + self.loop_running_s) / self.cpus
        return max(self.make_s * self.stretch / max(1, self.workers), cpu_s if self.workers else 0.0)

    @property
    def own_s(self) -> float:
        """Time of a step after its batch was received."""
        return self.copy_s + self.augment_s + self.compute_s

    @property
    def loop_s(self) -> float:
        """Time between two steps, if the loop never waits for a batch."""
        return self.receive_s + self.receive_blocked_s + self.own_s

    def step_s(self, factor: float = 1.0) -> float:
        """Returns the time of a step by the model, without start-up, with production scaled by `factor`."""
        if self.workers == 0:
            return (self.production_s + self.own_s) * factor
        return max(self.production_s * factor, self.loop_s)

    def without(self, cause: str) -> Costs:
        """Returns the costs after one cause is removed."""
        if cause == "copy to the device":
            return replace(self, copy_s=0.0, loop_running_s=max(0.0, self.loop_running_s - self.copy_s))
        after = replace(self, stages=self.stages | {cause: Work()})
        if cause == "hand-over":
            return replace(after, receive_s=0.0, receive_blocked_s=0.0)
        # A worker that runs less Python gives its GIL sooner to the thread that passes the batch's memory on.
        late_s = self.receive_blocked_s * after.running_s / self.running_s if self.running_s > 0 else 0.0
        return replace(after, receive_blocked_s=late_s, augment_s=0.0 if cause == "transform" else self.augment_s)

    def with_workers(self, workers: int) -> Costs:
        """Returns the costs with another number of workers; a loop that had none now has to receive its batches."""
        # With fewer workers, all that grows with their number shrinks: start-up, and waits for CPUs.
        share = min(1.0, workers / max(1, self.workers))
        return replace(
            self,
            workers=workers,
            startup_s=self.startup_s * share,
            receive_blocked_s=self.receive_blocked_s * share,
            stretch=max(1.0, self.stretch * share),
        )


def costs_of(demands: Demands) -> Costs:
    """Returns the mean costs over all batches and steps."""
    batches, steps = demands.batches, demands.steps
    count = max(1, len(batches))
    stages = dict.fromkeys(MAKING_STAGES, Work()) | mean_stages(batches)
    # A FastLoader reads without a lock: what looks like one is its threads waiting for the GIL, or for the disk.
    lock_s = 0.0 if demands.is_fastload else sum(batch.lock_s for batch in batches) / count
    _move(stages, "lock contention", lock_s, running=False)
    _move(stages, "a slow sample now and then", sum(batch.slow_s for batch in batches) / count, running=True)
    made_s = sum(map(_whole_s, batches))
    return Costs(
        stages=stages,
        workers=demands.workers,
        cpus=max(1, demands.cpus),
        receive_s=demands.receive_s,
        receive_blocked_s=demands.receive_blocked_s,
        copy_s=statistics.fmean(step.copy_s for step in steps),
        augment_s=statistics.fmean(step.transform_s for step in steps),
        compute_s=max(statistics.fmean(step.compute_s for step in steps), _device_step_s(steps)),
        loop_running_s=demands.step_running_s,
        startup_s=demands.per_step(sum(demands.startups_s)),
        stretch=1.0 + sum(batch.runnable_s for batch in batches) / made_s if made_s > 0 else 1.0,
    )


def _whole_s(batch: BatchWork) -> float:
    return sum(work.total_s for work in batch.stages.values())


def _move(stages: dict[str, Work], cause: str, cost_s: float, *, running: bool) -> None:
    """Moves blocked seconds, and running ones if asked for, out of the stages in proportion into an entry `cause`."""
    sources = {stage: stages[stage] for stage in ("reading", "decoding", "transform")}
    total = sum(work.blocked_s + running * work.running_s for work in sources.values())
    share = min(1.0, cost_s / total) if total > 0 else 0.0
    stages[cause] = Work()
    for stage, work in sources.items():
        running_s, blocked_s = running * share * work.running_s, share * work.blocked_s
        stages[cause] += Work(running_s, blocked_s)
        stages[stage] = Work(work.running_s - running_s, work.blocked_s - blocked_s)


def _device_step_s(steps: Sequence[Step]) -> float:
    """Returns the time of a step on a device that works asynchronously, 0.0 when it is not known.

    A loop that only launches kernels goes on at once while the device is idle. When several batches are ready in a row,
    the loop waits for the device inside the step instead: the median of such steps is the device's time.
    """
    mean_s = statistics.fmean(step.duration_s for step in steps)
    ready = [
        second.compute_s
        for first, second in itertools.pairwise(steps)
        if max(first.wait_s, second.wait_s) < 0.1 * mean_s
    ]
    return min(statistics.median(ready), mean_s) if len(ready) >= 4 else 0.0
