"""Chooses the cause that binds, and the change to make first: by what each change would bring, as the costs predict.

The model is small. W workers make a batch every `production_s`: the larger of what they need for its running and
blocked time, stretched by what they waited for CPUs, and of what all the job's running time needs on its CPUs. A step
takes the larger of that and of the loop's own time, and epochs' starts come on top. What a measured step takes beyond
the model (a disk that others use, batches that come in bursts) stays in every prediction, in proportion to the work
that is left. No time is known by heart.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fastload.measured import Cure, Verdict
from fastload.verdict.demands import Demands
from fastload.verdict.words import CAUSES, FASTLOAD_HELPS, change_for, compose

__all__ = ["CAUSES", "judge"]

WORTH = 1.1
"""Changes that bring less are not worth making."""

# A change that needs one number turned is made before one that needs work, if it brings this part of what that brings.
# More workers hide a cost; fewer take one away.
_MOST_OF_IT = {"too few workers": 0.75, "too many workers": 0.5}

# Costs that well-kept loaders hardly have: where one is so much of a batch, more workers would only hide it.
_UNUSUAL = ("collate", "hand-over", "lock contention", "a slow sample now and then")
_MUCH = 0.4

# A gain that was tried out, and is larger than what turns of a second differ by, comes first.
_TRIED = 1.2

# If all changes together bring so much, something other than compute binds, although none alone is worth making.
_SHARED = 1.25
_STAGES = ("reading", "decoding", "transform", "collate", "hand-over")


@dataclass(frozen=True)
class Costs:
    """Mean seconds a batch or step; see `Demands` for what they are made from.

    Attributes:
        running, blocked: of making a batch, by stage; `lock contention` and `a slow sample now and then` are carved out
            of the stage that they happen in.
        workers, cpus: see `Demands`.
        receive_s, receive_blocked_s: of the wait, what taking a batch over costs the loop.
        copy_s: of the loop's time, to bring a batch to the device.
        augment_s: of the loop's time, what it transforms itself when a batch is handed over.
        compute_s: of the loop's time, the rest of the step.
        loop_running_s: on a CPU, in the loop's process, outside the wait.
        startup_s: all epochs' starts, over the number of steps.
        stretch: how many times as long as they would alone its workers take, since they wait for CPUs.
    """

    running: dict[str, float]
    blocked: dict[str, float]
    workers: int
    cpus: int
    receive_s: float
    receive_blocked_s: float
    copy_s: float
    augment_s: float
    compute_s: float
    loop_running_s: float
    startup_s: float
    stretch: float = 1.0

    @property
    def make_s(self) -> float:
        """One batch by one worker that has a CPU whenever it wants one."""
        return sum(self.running.values()) + sum(self.blocked.values())

    @property
    def production_s(self) -> float:
        """Between two batches, if nobody waits for the loop."""
        cpu_s = (sum(self.running.values()) + self.receive_s + self.loop_running_s) / self.cpus
        return max(self.make_s * self.stretch / max(1, self.workers), cpu_s if self.workers else 0.0)

    @property
    def loop_s(self) -> float:
        """Between two steps, if the loop never waits for a batch."""
        return self.receive_s + self.receive_blocked_s + self.copy_s + self.augment_s + self.compute_s

    @property
    def step_s(self) -> float:
        """By the model, without the epochs' starts."""
        if self.workers == 0:
            return self.production_s + self.copy_s + self.augment_s + self.compute_s
        return max(self.production_s, self.loop_s)

    def without(self, cause: str) -> Costs:
        """The same without what one cause costs."""
        if cause == "copy to the device":
            return replace(self, copy_s=0.0, loop_running_s=max(0.0, self.loop_running_s - self.copy_s))
        if cause == "worker start-up":
            return replace(self, startup_s=0.0)
        before_s = sum(self.running.values())
        running, blocked = self.running | {cause: 0.0}, self.blocked | {cause: 0.0}
        if cause == "hand-over":
            return replace(self, running=running, blocked=blocked, receive_s=0.0, receive_blocked_s=0.0)
        # A worker that runs less gives up its GIL sooner to the thread that passes the memory on.
        late_s = self.receive_blocked_s * sum(running.values()) / before_s if before_s > 0 else 0.0
        augment_s = 0.0 if cause == "transform" else self.augment_s
        return replace(self, running=running, blocked=blocked, receive_blocked_s=late_s, augment_s=augment_s)

    def with_workers(self, workers: int) -> Costs:
        """The same with another number of workers, which a loop that did it all itself then has to take over from."""
        if self.workers <= workers:
            return replace(self, workers=workers)
        # What they cost by being many: starts, and waits for CPUs that they take from one another.
        share = workers / self.workers
        return replace(
            self,
            workers=workers,
            startup_s=self.startup_s * share,
            receive_blocked_s=self.receive_blocked_s * share,
            stretch=max(1.0, self.stretch * share),
        )


def judge(demands: Demands) -> Verdict:
    """What binds this loop, what to change first and what that would bring at most.

    Args:
        demands: with at least one step.
    """
    costs = costs_of(demands)
    steps = demands.steps
    step_s = statistics.fmean(step.duration_s for step in steps) + demands.ended_s / len(steps)
    waited_s = sum(step.wait_s for step in steps) + demands.ended_s
    stall_share = waited_s / (step_s * len(steps)) if step_s > 0 else 0.0
    best_s = costs.copy_s + costs.compute_s  # with a loader that costs nothing
    once_s = _once(demands)
    cures = sorted(_cures(demands, costs, step_s), key=lambda cure: cure.step_s)
    first = _choose(demands, costs, cures, step_s)
    worth_making = first is not None and first.gain >= WORTH
    # Several causes may share what no change alone would bring.
    all_of_it = (step_s - once_s) / max(best_s, 1e-9)
    cause = first.cause if first is not None and (worth_making or all_of_it > _SHARED) else "compute"
    if not demands.batches and not worth_making and all_of_it >= WORTH:
        cause = ""  # nobody saw what the batches cost
    others = [cure for cure in cures if cure is not first and cure.gain >= WORTH]
    verdict = Verdict(
        cause=cause,
        sentence="",
        evidence=(),
        step_s=step_s,
        stall_share=stall_share,
        cures=() if first is None else (first, *others),
        worth_making=worth_making,
        fastload_helps=cause in FASTLOAD_HELPS and not demands.is_fastload,
    )
    return compose(verdict, demands, costs, best_s)


def costs_of(demands: Demands) -> Costs:
    """Means over the batches and steps."""
    running, blocked = dict.fromkeys(_STAGES, 0.0), dict.fromkeys(_STAGES, 0.0)
    batches = demands.batches
    count = max(1, len(batches))
    for batch in batches:
        for stage, work in batch.stages.items():
            running[stage] = running.get(stage, 0.0) + work.running_s / count
            blocked[stage] = blocked.get(stage, 0.0) + work.blocked_s / count
    # A FastLoader reads without a lock; its threads may wait for the GIL, or for a disk that does not show.
    lock_s = 0.0 if demands.is_fastload else sum(batch.lock_s for batch in batches) / count
    _carve(running, blocked, "lock contention", lock_s, from_blocked=True)
    slow_s = sum(batch.slow_s for batch in batches) / count
    _carve(running, blocked, "a slow sample now and then", slow_s, from_blocked=False)
    steps = demands.steps
    copy_s = statistics.fmean(step.copy_s for step in steps)
    own_s = statistics.fmean(step.compute_s for step in steps)
    return Costs(
        running=running,
        blocked=blocked,
        workers=demands.workers,
        cpus=max(1, demands.cpus),
        receive_s=demands.receive_s,
        receive_blocked_s=demands.receive_blocked_s,
        copy_s=copy_s,
        augment_s=statistics.fmean(step.transform_s for step in steps),
        compute_s=max(own_s, _back_to_back(demands)),
        loop_running_s=demands.step_running_s,
        startup_s=sum(demands.startups_s) / len(steps),
        stretch=_stretch(demands),
    )


def _stretch(demands: Demands) -> float:
    made_s = sum(work.running_s + work.blocked_s for batch in demands.batches for work in batch.stages.values())
    return 1.0 + sum(batch.runnable_s for batch in demands.batches) / made_s if made_s > 0 else 1.0


def _carve(
    running: dict[str, float], blocked: dict[str, float], cause: str, cost_s: float, *, from_blocked: bool
) -> None:
    """Moves seconds from the stages, in proportion, to a cause of their own."""
    running[cause] = blocked[cause] = 0.0
    stages = [stage for stage in ("reading", "decoding", "transform") if running[stage] + blocked[stage] > 0]
    total = sum(blocked[stage] + (0.0 if from_blocked else running[stage]) for stage in stages)
    if cost_s <= 0 or total <= 0:
        return
    share = min(1.0, cost_s / total)
    for stage in stages:
        blocked[cause] += blocked[stage] * share
        blocked[stage] *= 1 - share
        if not from_blocked:
            running[cause] += running[stage] * share
            running[stage] *= 1 - share


def _back_to_back(demands: Demands) -> float:
    """What a step takes on the device, where the loop only launches it: seen when batches come back to back.

    A device that works by itself lets the loop go on at once, as long as it is idle. When several batches lie ready,
    the loop waits for the device instead, inside the step. 0.0 when that was not seen.
    """
    steps = demands.steps
    mean_s = statistics.fmean(step.duration_s for step in steps)
    ready = [
        second.compute_s
        for first, second in itertools.pairwise(steps)
        if max(first.wait_s, second.wait_s) < 0.1 * mean_s
    ]
    if len(ready) < 4:
        return 0.0
    return min(statistics.median(ready), mean_s)


def _cures(demands: Demands, costs: Costs, step_s: float) -> Iterable[Cure]:
    """Every change that takes away anything, with what a step would take after it."""
    steady_s = max(step_s - costs.startup_s, 1e-9)
    # The model may be wrong by a third in what it knows.
    factor = min(1.5, max(0.67, steady_s / costs.step_s)) if costs.production_s > costs.loop_s else 1.0
    beyond_s = max(0.0, steady_s - _steady(costs, factor))
    once_s = _once(demands)

    waited_s = step_s - statistics.fmean(step.duration_s - step.wait_s for step in demands.steps)

    def predicted(after: Costs, factor: float = factor) -> float:
        left = _work(after) / _work(costs) if _work(costs) > 0 else 1.0
        # No change to the loading wins more than the loop waits for it.
        own_s = costs.copy_s + costs.augment_s + costs.compute_s
        least_s = step_s - waited_s - (own_s - after.copy_s - after.augment_s - after.compute_s)
        return min(step_s, max(least_s, _steady(after, factor) + beyond_s * left + after.startup_s))

    def cure(cause: str, after_s: float, workers: int = 0) -> Cure:
        return Cure(cause, change_for(cause, demands, workers), after_s, step_s / max(after_s, 1e-9))

    for cause in (*_STAGES, "lock contention", "copy to the device"):
        after = costs.without(cause)
        # Threads hand over nothing: the batch is where it was made.
        if after != costs and not (cause == "hand-over" and demands.by_threads):
            yield cure(cause, predicted(after))
    # Batches come in order, so that all wait for the one with a slow sample: without it the model's mean holds.
    slow = costs.without("a slow sample now and then")
    if slow.make_s < costs.make_s:
        share = 1 - slow.make_s / costs.make_s
        yield cure("a slow sample now and then", predicted(slow, min(factor, 1 + (factor - 1) * (1 - share))))
    if demands.startups_s and not demands.is_fastload and not (demands.persistent and len(demands.startups_s) > 1):
        # Workers that live on start once; in a run of one epoch it is that start which is long.
        startup_s = once_s if len(demands.startups_s) > 1 else 0.0
        yield cure("worker start-up", predicted(replace(costs, startup_s=startup_s)))
    workers = _enough_workers(costs, costs.cpus if costs.workers < costs.cpus else 4 * costs.cpus)
    if workers > costs.workers:
        yield cure("too few workers", predicted(costs.with_workers(workers)), workers)
    if costs.workers > costs.cpus:
        # Without so many rivals the loop's thread would have a CPU when it wants one.
        alone_s = max(0.0, costs.compute_s - demands.step_runnable_s)
        fewer = replace(costs.with_workers(costs.cpus), compute_s=alone_s)
        after_s = predicted(fewer, min(factor, 1.0))
        if demands.fewer_workers is not None:
            # It was tried out, so nothing has to be modelled but the starts.
            _, few_s, full_s = demands.fewer_workers
            after_s = min(step_s, steady_s * few_s / full_s + fewer.startup_s)
        yield cure("too many workers", after_s, costs.cpus)


def _once(demands: Demands) -> float:
    """The first epoch's start, over the steps: nothing takes it away, and a longer run makes it small."""
    return demands.startups_s[0] / len(demands.steps) if demands.startups_s else 0.0


def _work(costs: Costs) -> float:
    """All that is done for a batch before its step, by whoever does it."""
    return costs.make_s + costs.receive_s + costs.receive_blocked_s


def _steady(costs: Costs, factor: float) -> float:
    """A step without the epochs' starts, where production takes `factor` times what the model says."""
    if costs.workers == 0:
        return costs.step_s * factor
    return max(costs.production_s * factor, costs.loop_s)


def _enough_workers(costs: Costs, most: int) -> int:
    """The fewest workers that keep the loop fed, as the model has it."""
    wanted = math.ceil(costs.make_s / max(costs.loop_s, 1e-9) * 1.1)
    return max(1, min(most, wanted))


def _choose(demands: Demands, costs: Costs, cures: list[Cure], step_s: float) -> Cure | None:
    """The change to make first; cures come with the best first."""
    if not cures:
        return None
    best = cures[0]
    unusual_s = max(costs.running[cause] + costs.blocked[cause] for cause in _UNUSUAL)
    few_do = demands.workers < demands.cpus and unusual_s < _MUCH * costs.make_s
    for cure in cures:
        turned = few_do if cure.cause == "too few workers" else cure.cause == "too many workers"
        most_of_it = turned and step_s - cure.step_s >= _MOST_OF_IT[cure.cause] * (step_s - best.step_s)
        tried = cure.cause == "too many workers" and demands.fewer_workers is not None and cure.gain >= _TRIED
        if cure.gain >= WORTH and (most_of_it or tried):
            return cure
    # More workers than CPUs hide what they wait for; the wait itself is the cause.
    return next((cure for cure in cures if cure.cause != "too few workers"), None)
