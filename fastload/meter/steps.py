"""The steps of a loop as they were: all of them as long as they are few, then an evenly spaced part; sums of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fastload.measured import Step, Work
from fastload.verdict import BatchWork

MOST_STEPS = 8192
"""Steps kept. Beyond, every second one is dropped, and from then on every second, fourth, ... one is kept."""


Times = tuple[float, float, float, float, float, int, int | None]
"""The fields of a `Step`, which takes longer to make."""


@dataclass
class Totals:
    """Sums over every step so far; seconds."""

    steps: int = 0
    samples: int = 0
    wait_s: float = 0.0
    copy_s: float = 0.0
    transform_s: float = 0.0
    compute_s: float = 0.0
    batches: int = 0
    stages: dict[str, Work] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        """Of all steps."""
        return self.wait_s + self.copy_s + self.transform_s + self.compute_s

    @property
    def stall_share(self) -> float:
        """Part of the time that the loop waited for data, 0 to 1."""
        return self.wait_s / self.duration_s if self.duration_s else 0.0

    def mean_stages(self) -> Mapping[str, Work]:
        """Mean cost of a batch by stage."""
        count = max(1, self.batches)
        return {name: Work(work.running_s / count, work.blocked_s / count) for name, work in self.stages.items()}


class StepLog:
    """Keeps steps in bounded memory.

    Args:
        most: steps kept.
    """

    def __init__(self, most: int = MOST_STEPS) -> None:
        self.totals = Totals()
        self._most = most
        self._stride = 1
        self._kept: list[tuple[Times, BatchWork | None]] = []

    def add(self, step: Times, work: BatchWork | None) -> None:
        """One more step, and what its batch cost if that is known."""
        _, wait_s, copy_s, transform_s, compute_s, samples, _ = step
        totals = self.totals
        if totals.steps % self._stride == 0:
            if len(self._kept) == self._most:
                del self._kept[1::2]
                self._stride *= 2
            if totals.steps % self._stride == 0:
                self._kept.append((step, work))
        totals.steps += 1
        totals.samples += samples
        totals.wait_s += wait_s
        totals.copy_s += copy_s
        totals.transform_s += transform_s
        totals.compute_s += compute_s
        if work is not None and work.stages:
            totals.batches += 1
            stages = totals.stages
            for name, cost in work.stages.items():
                stages[name] = stages[name] + cost if name in stages else cost

    @property
    def numbered(self) -> list[tuple[int, Step]]:
        """Those kept with their numbers, counted from 0."""
        stride = self._stride
        return [(stride * place, Step(*times)) for place, (times, _) in enumerate(list(self._kept))]

    @property
    def steps(self) -> tuple[Step, ...]:
        """Those kept, in order."""
        return tuple(Step(*times) for times, _ in list(self._kept))

    @property
    def works(self) -> tuple[BatchWork, ...]:
        """What their batches cost, as far as it is known, in the same order."""
        return tuple(work for _, work in list(self._kept) if work is not None)
