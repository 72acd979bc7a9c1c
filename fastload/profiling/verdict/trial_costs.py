"""Costs that no loop has shown, as measured in trials."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fastload.profiling.verdict.loop_model import LoopModel
from fastload.timing.results import Work

_LEAST_SLOWER, _MOST_SLOWER, _HALVINGS = 0.5, 8.0, 10


@dataclass(frozen=True)
class WorkerCosts:
    """What it takes to have batches made in another process, as `DataLoader` does, in seconds."""

    batch: Work  # of the worker, to hand a batch over
    receive_s: float = 0.0  # of the loop, to take it over
    touch_s: float = 0.0  # in the step, until the memory that it lies in is mapped
    unmap_s: float = 0.0  # in the next step, until that memory is given back
    start_s: float = 0.0  # until a worker begins

    @property
    def mapping_s(self) -> float:
        """Time of the loop's process in which memory with a batch is mapped, and given back."""
        return self.touch_s + self.unmap_s


@dataclass(frozen=True)
class FormatCosts:
    """What the operations of a step on the CPUs cost, by the memory format of the images, in seconds."""

    contiguous_s: float
    channels_last_s: float
    convert_s: float  # to bring a batch's images from the first format into the second
    between_s: float = math.inf  # of the step, between its operations; infinite: not known
    left_out: int = 0  # operations that could not be played again, and cost nothing here


@dataclass(frozen=True)
class FastLoaderCosts:
    """What a `FastLoader` would cost, in seconds."""

    batch: Work  # to make one, with the machine for itself
    # How many times as long a step takes beside it, CPUs shared in proportion left out; less than 1: the loop's steps
    # come after pauses, from which they begin with cold caches, and would come one after another.
    slows: float = 1.0
    begin_s: float = 0.0  # that the begin of an epoch takes beyond its batches

    def loop(self, own_s: float, own_cpus: float, cpus: int) -> LoopModel:
        """Returns a long epoch over it, of steps that take so long alone, on so many CPUs."""
        return LoopModel(
            batches=(self.batch,),
            workers=cpus,
            ahead=cpus + 3,
            in_turn=False,
            cpus=cpus,
            own_s=self.slows * own_s,
            own_cpus=own_cpus,
            steps=100,
        )

    def fitted(self, step_s: float, own_s: float, own_cpus: float, cpus: int) -> FastLoaderCosts:
        """Returns these with the slowdown by which such a step takes `step_s`."""
        low, high = _LEAST_SLOWER, _MOST_SLOWER
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if replace(self, slows=middle).loop(own_s, own_cpus, cpus).played().step_s < step_s:
                low = middle
            else:
                high = middle
        return replace(self, slows=low)
