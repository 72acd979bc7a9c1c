"""Predicts what each change to the loading would gain, and chooses the cause to name and the change to make first.

The model is small. W workers finish a batch every `production_s`: the larger of (a) the running and blocked time of a
batch divided by W, stretched by waits for CPUs, and (b) the running time of the whole job divided by its CPUs. A step
takes the larger of that and of the loop's own time; start-up of epochs comes on top. What a measured step takes beyond
the model (a disk that others use, batches that come in bursts) stays in every prediction, in proportion to the work
that is left. No cost is assumed; all are measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace

from fastload.profiling.verdict.demands import MAKING_STAGES, Costs, Demands, costs_of
from fastload.profiling.verdict.sentences import FASTLOAD_HELPS, change_for, evidence_of, seconds_text, sentence_of
from fastload.timing.results import Remedy, Verdict

WORTH = 1.1
"""Gain below which a change is not worth making."""

# Changing the number of workers is less effort than any other change, so it comes first if it saves at least this share
# of the time that the best change saves. More workers only hide a cost, fewer remove one: hence the two shares.
_SHARE_OF_BEST = {"too few workers": 0.75, "too many workers": 0.5}

# Costs that are small in a well-written loader. Where one of them takes more than _MUCH of a batch, more workers would
# only hide it.
_UNUSUAL = ("collate", "hand-over", "lock contention", "a slow sample now and then")
_MUCH = 0.4

# A gain that was measured in a trial, and is larger than the noise between trials of a second, comes first.
_TRIED = 1.2

# If all changes together gain this much, something other than compute binds, although no change alone is worth making.
_SHARED = 1.25


def judge(demands: Demands) -> Verdict:
    """Returns what limits this loop of at least one step, the change to make first, and how much that gains at most."""
    steps, ended_s = demands.steps, demands.per_step(demands.ended_s)
    step_s = statistics.fmean(step.duration_s for step in steps) + ended_s
    waited_s = statistics.fmean(step.wait_s for step in steps) + ended_s
    if demands.waits_only:
        return _judged_by_waits(step_s, waited_s)
    stall_share = waited_s / step_s if step_s > 0 else 0.0
    costs = costs_of(demands)
    best_s = costs.copy_s + costs.compute_s  # with a loader that costs nothing
    remedies = sorted(_remedies(demands, costs, step_s), key=lambda remedy: remedy.step_s)
    first = _choose(demands, costs, remedies, step_s)
    worth_making = first is not None and first.gain >= WORTH
    # Several causes together may cost a lot although removing any one of them gains little.
    # No change removes the start-up of the first epoch, and a longer run makes it small.
    total_gain = (step_s - demands.per_step(sum(demands.startups_s[:1]))) / max(best_s, 1e-9)
    cause = first.cause if first is not None and (worth_making or total_gain > _SHARED) else "compute"
    if not demands.batches and not worth_making and total_gain >= WORTH:
        cause = ""  # the cost of the batches was not measured
    others = [remedy for remedy in remedies if remedy is not first and remedy.gain >= WORTH]
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
    evidence = (*evidence_of(verdict, demands, costs, best_s), *demands.notes)
    return replace(verdict, sentence=sentence_of(verdict, demands), evidence=evidence)


def _judged_by_waits(step_s: float, waited_s: float) -> Verdict:
    """Returns whether waiting binds a loop, and not why: nobody looked at what its batches cost."""
    fed_s = step_s - waited_s
    share = waited_s / step_s if step_s else 0.0
    gain = step_s / fed_s if fed_s > 0 else math.inf
    binds = gain >= WORTH
    waits = f"{share:.0%} of the time the step waits for data ({seconds_text(step_s)} a step)"
    sentence = (
        f"the data binds: {waits}; this loader does not say what for, fastload.diagnose(loader) or "
        f"`fastload doctor` does; a step could be {gain:.1f} times as fast at most"
        if binds
        else f"compute binds: only {waits}, so that no loader could make it more than {gain:.2f} times as fast"
    )
    evidence = (
        f"a step takes {seconds_text(step_s)}, of which {seconds_text(waited_s)} are waiting for its batch",
        f"with a loader that costs nothing it would take {seconds_text(fed_s)}",
    )
    remedy = Remedy("", "find out what the loader waits for", fed_s, gain)
    return Verdict("" if binds else "compute", sentence, evidence, step_s, share, (remedy,) * binds, worth_making=binds)


def _remedies(demands: Demands, costs: Costs, step_s: float) -> Iterable[Remedy]:
    """Yields every change that saves any time, with the predicted time of a step after it."""
    steady_s = max(step_s - costs.startup_s, 1e-9)
    # Where production binds, the model is scaled to the measured step, by a third at most; the rest is added on top.
    factor = min(1.5, max(0.67, steady_s / costs.step_s())) if costs.production_s > costs.loop_s else 1.0
    unexplained_s = max(0.0, steady_s - costs.step_s(factor))
    busy_s = statistics.fmean(step.duration_s - step.wait_s for step in demands.steps)

    def predicted(after: Costs, factor: float = factor) -> float:
        left = after.work_s / costs.work_s if costs.work_s > 0 else 1.0
        # No change to the loading saves more time than the loop waits for it.
        least_s = busy_s - (costs.own_s - after.own_s)
        return min(step_s, max(least_s, after.step_s(factor) + unexplained_s * left + after.startup_s))

    def remedy(cause: str, after_s: float, workers: int = 0) -> Remedy:
        return Remedy(cause, change_for(cause, demands, workers), after_s, step_s / max(after_s, 1e-9))

    for cause in (*MAKING_STAGES, "lock contention", "copy to the device"):
        after = costs.without(cause)
        # Threads hand nothing over: the batch stays in the memory in which it was made.
        if after != costs and not (cause == "hand-over" and demands.by_threads):
            yield remedy(cause, predicted(after))
    # Batches come in order, so one with a slow sample holds up all after it. Without it, the model needs less scaling.
    slow = costs.without("a slow sample now and then")
    if slow.make_s < costs.make_s:
        share = 1 - slow.make_s / costs.make_s
        yield remedy("a slow sample now and then", predicted(slow, min(factor, 1 + (factor - 1) * (1 - share))))
    if demands.startups_s and not demands.is_fastload and not (demands.persistent and len(demands.startups_s) > 1):
        # Persistent workers still start once. If the run had one epoch only, that one start is the cost to remove.
        startup_s = demands.per_step(demands.startups_s[0]) if len(demands.startups_s) > 1 else 0.0
        yield remedy("worker start-up", predicted(replace(costs, startup_s=startup_s)))
    # Enough to keep the loop fed, by the model.
    wanted = math.ceil(costs.make_s / max(costs.loop_s, 1e-9) * 1.1)
    workers = max(1, min(wanted, costs.cpus if costs.workers < costs.cpus else 4 * costs.cpus))
    if workers > costs.workers:
        yield remedy("too few workers", predicted(costs.with_workers(workers)), workers)
    if costs.workers > costs.cpus:
        # With fewer workers, the loop's thread no longer waits for a CPU.
        compute_s = max(0.0, costs.compute_s - demands.step_runnable_s)
        fewer = replace(costs.with_workers(costs.cpus), compute_s=compute_s)
        after_s = predicted(fewer, min(factor, 1.0))
        if demands.fewer_workers is not None:
            # It was measured in a trial, so only the start-up has to be modelled.
            _, few_s, full_s = demands.fewer_workers
            after_s = min(step_s, steady_s * few_s / full_s + fewer.startup_s)
        yield remedy("too many workers", after_s, costs.cpus)


def _choose(demands: Demands, costs: Costs, remedies: list[Remedy], step_s: float) -> Remedy | None:
    """Returns the change to make first; `remedies` are sorted, best first."""
    if not remedies:
        return None
    best = remedies[0]
    unusual_s = max(costs.stages[cause].total_s for cause in _UNUSUAL)
    more_may_help = demands.workers < demands.cpus and unusual_s < _MUCH * costs.make_s
    for remedy in remedies:
        is_count = more_may_help if remedy.cause == "too few workers" else remedy.cause == "too many workers"
        saves_most = is_count and step_s - remedy.step_s >= _SHARE_OF_BEST[remedy.cause] * (step_s - best.step_s)
        tried = remedy.cause == "too many workers" and demands.fewer_workers is not None and remedy.gain >= _TRIED
        if remedy.gain >= WORTH and (saves_most or tried):
            return remedy
    # More workers than CPUs would only hide what the workers wait for; that wait is the cause.
    return next((remedy for remedy in remedies if remedy.cause != "too few workers"), None)
