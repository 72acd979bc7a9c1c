"""What is known of a watched loop beside its steps, and what it asked of the machine."""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastload.cpus import available_cpus
from fastload.meter.probe import Probe
from fastload.meter.steps import StepLog
from fastload.verdict import Demands


@dataclass
class Mean:
    """The mean of those steps that were looked at; 0 when there was none."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """One more."""
        self.total += value
        self.count += 1

    @property
    def value(self) -> float:
        """The mean so far."""
        return self.total / self.count if self.count else 0.0


@dataclass(eq=False)  # one loop is no other, whatever it watches
class Loop:
    """What is known of one loader's loop; times in seconds.

    Attributes:
        loader: what is watched; gives None when it is gone.
        log: its steps.
        elapsed_s: of all passes, without what other watched loops inside took.
        first_s: of each pass, until its first batch.
        ends_s: of each pass that reached its end, the wait that found no batch more.
        receive_s: on a CPU, in a wait, by the thread of the loop; of the first batches apart, in first_running_s.
        runnable_s: outside the wait of a step, that this thread had no CPU although it wanted one.
        process_s: that the process was on a CPU, all threads, during the passes.
        transform_running_s: on a CPU, by the thread of the loop, for what is done to a batch at the hand-over.
        probe: of the last pass; None: the loader tells nothing.
    """

    loader: Callable[[], Any]
    log: StepLog = field(default_factory=StepLog)
    elapsed_s: float = 0.0
    first_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    receive_s: Mean = field(default_factory=Mean)
    first_running_s: float = 0.0
    runnable_s: Mean = field(default_factory=Mean)
    process_s: float = 0.0
    transform_running_s: Mean = field(default_factory=Mean)
    probe: Probe | None = None

    @classmethod
    def of(cls, loader: Any) -> Loop:
        """A loop that does not keep its loader alive, if that can be."""
        try:
            return cls(weakref.ref(loader))
        except TypeError:
            return cls(lambda: loader)


def demands_of(loop: Loop) -> Demands:
    """What the loop asked of the machine so far."""
    totals, probe = loop.log.totals, loop.probe
    source = loop.loader()
    workers = probe.crew.workers if probe is not None else int(getattr(source, "num_workers", 0) or 0)
    ahead = probe.crew.ahead if probe is not None else workers * int(getattr(source, "prefetch_factor", None) or 2)
    by_threads = probe is not None and probe.crew.by_threads
    steps = max(1, totals.steps)
    working_s = sum(work.running_s for work in totals.stages.values()) if by_threads else 0.0
    waits = max(0, totals.steps - len(loop.first_s))
    in_wait_s = waits * loop.receive_s.value + loop.first_running_s + totals.steps * loop.transform_running_s.value
    ends = loop.ends_s + [0.0] * (len(loop.first_s) - len(loop.ends_s))
    usual_s = _batch_s(loop)
    return Demands(
        batches=loop.log.works,
        steps=loop.log.steps,
        workers=workers,
        ahead=max(1, ahead) if workers else 0,
        cpus=available_cpus(),
        receive_s=loop.receive_s.value,
        startups_s=tuple(
            max(0.0, first_s - usual_s) + end_s for first_s, end_s in zip(loop.first_s, ends, strict=True)
        ),
        ended_s=sum(loop.ends_s),
        step_running_s=max(0.0, loop.process_s - working_s - in_wait_s) / steps,
        step_runnable_s=loop.runnable_s.value,
        by_threads=by_threads,
        is_fastload=probe is not None,
        times_raw=probe.crew.times_raw if probe is not None else 0.0,
    )


def _batch_s(loop: Loop) -> float:
    """What the first batch of a pass takes beside starting up: as much as another one."""
    stages = loop.log.totals.mean_stages().values()
    if stages:
        return sum(work.running_s + work.blocked_s for work in stages)
    return statistics.median(step.wait_s for step in loop.log.steps) if loop.log.totals.steps else 0.0
