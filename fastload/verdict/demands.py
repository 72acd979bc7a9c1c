"""What a training loop asks of the machine: the input of a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fastload.measured import Step, Work


@dataclass(frozen=True)
class BatchWork:
    """What it cost to make one batch.

    Attributes:
        stages: by stage of `fastload.measured.STAGES` up to the hand-over, in the thread or process that makes batches.
        lock_s: of their blocked time, what was spent waiting for a lock that another thread or process held.
        slow_s: of their time, what the slow samples took beyond what a sample takes usually.
        runnable_s: beside that, what its thread waited for a CPU.
    """

    stages: Mapping[str, Work]
    lock_s: float = 0.0
    slow_s: float = 0.0
    runnable_s: float = 0.0

    def __add__(self, other: BatchWork) -> BatchWork:
        names = {**self.stages, **other.stages}
        stages = {name: self.stages.get(name, Work()) + other.stages.get(name, Work()) for name in names}
        sums = self.lock_s + other.lock_s, self.slow_s + other.slow_s, self.runnable_s + other.runnable_s
        return BatchWork(stages, *sums)


@dataclass(frozen=True)
class Demands:
    """One loader's batches and the steps that used them.

    Attributes:
        batches: what they cost, in the order of the steps, as far as it is known.
        steps: of the loop that asked for them.
        workers: threads or processes that make batches; 0: the loop does it itself.
        ahead: batches that may be under way or ready at once.
        cpus: that the job may use.
        receive_s: mean seconds on a CPU that taking over a batch costs the loop, inside its wait.
        receive_blocked_s: mean seconds that taking it over waits for the worker which made it: threads of that process
            pass on the memory, and get its GIL late while it runs Python.
        startups_s: for each epoch, from asking for its iterator to its first batch, beyond what a batch takes; and what
            the loop waited at its end.
        ended_s: of that, all waits at the end of epochs, which are part of no step.
        step_running_s: mean seconds of a step, outside the wait, that the loop's process was on a CPU, all threads.
        step_runnable_s: mean seconds of a step, outside the wait, that the loop's thread had no CPU although it wanted.
        fewer_workers: of a trial: how many were let work at once, and the mean seconds of a step then and with all of
            them; None: there was none.
        by_threads: whether workers are threads of the loop's process.
        persistent: whether workers live from epoch to epoch.
        is_fastload: whether the loader is a FastLoader.
        times_raw: of a packed file whose images it decodes, how many times their bytes the pixels take; 0: it is none.
        notes: further evidence, a line each, such as the line of code that takes longest.
    """

    batches: tuple[BatchWork, ...]
    steps: tuple[Step, ...]
    workers: int
    ahead: int
    cpus: int
    receive_s: float = 0.0
    receive_blocked_s: float = 0.0
    startups_s: tuple[float, ...] = ()
    ended_s: float = 0.0
    step_running_s: float = 0.0
    step_runnable_s: float = 0.0
    fewer_workers: tuple[int, float, float] | None = None
    by_threads: bool = False
    persistent: bool = False
    is_fastload: bool = False
    times_raw: float = 0.0
    notes: tuple[str, ...] = field(default=())
