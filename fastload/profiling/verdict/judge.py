"""Predicts what each change to the loading would gain, and chooses the cause to name and the change to make first.

The loop is played (`loop_model`) with the costs that were measured, scaled so that its steps take as long as they did,
and then again with each change. No cost is assumed; all are measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace

from fastload.profiling.verdict import sentences
from fastload.profiling.verdict.demands import (
    MAKING_STAGES,
    PACKED,
    Costs,
    Demands,
    costs_of,
    loop_packed,
    loop_with_channels_last,
    loop_with_one_tensor,
    saved_by_channels_last_s,
)
from fastload.profiling.verdict.loop_model import LoopModel
from fastload.system.advice import advice
from fastload.system.text import seconds_text
from fastload.timing.results import NETWORK, WAITING, Remedy, Verdict, WorkTime

_MADE = (*MAKING_STAGES, "lock contention", "a slow sample now and then")  # what the cost of a batch consists of

_HELD, _FULL = 0.25, 0.8  # parts of the CPUs: that others use, and that all use together
_LITTLE = 0.3  # of a step, in which it waits
_LACKED = 0.15  # part of a batch's making, or of a step, in which it was ready to run and had no CPU

WORTH = 1.1
"""Gain below which a change is not worth making."""

# Changes that take less effort than to pack come first if they save at least this share of the time that the best
# change saves. More workers only hide a cost, the others remove one: hence the shares.
_SHARE_OF_BEST = {
    "too few workers": 0.85, "too many workers": 0.5, WAITING: 0.75, "hand-over": 0.75, "worker start-up": 0.75,
    "compute": 0.75,
}  # fmt: skip
# "Make this Python code cheaper" names no concrete step, and its predicted gain is an upper limit: more workers come
# first if they save this share of it.
_SHARE_OF_LIMIT = 0.5

# Costs that are small in a well-written loader. Where one of them takes more than _MUCH of a batch, more workers would
# only hide it.
_UNUSUAL = ("collate", "hand-over", "lock contention", "a slow sample now and then")
_MUCH = 0.4

# A gain that was measured in a trial, and is larger than the noise between trials of a second, comes first.
_TRIED = 1.2

# Workers that a dataset may have whose code mostly waits, and the part of a batch's time that is `mostly`. If workers
# gain less than a part of what each would gain by waiting alone, they share the cause of the wait.
_MOST_WAITING, _MOSTLY, _PART_GAINED = 16, 0.6, 0.3

# If all changes together gain this much, something other than compute binds, although no change alone is worth making.
_SHARED = 1.25


def judge(demands: Demands) -> Verdict:
    """Returns what limits this loop of at least one step, the change to make first, and how much that gains."""
    steps, ended_s = demands.steps, demands.per_step(demands.ended_s)
    step_s = statistics.fmean(step.duration_s for step in steps) + ended_s
    waited_s = statistics.fmean(step.wait_s for step in steps) + ended_s
    if demands.waits_only:
        return _judged_by_waits(demands, step_s, waited_s)
    stall_share = waited_s / step_s if step_s > 0 else 0.0
    costs = costs_of(demands)
    modelled_s, best_s = _free_step_s(demands, costs, step_s)
    waits = _waits_most(demands, costs) or (costs.waits_for_network and stall_share > _LITTLE)
    if _is_held(demands, stall_share) and not waits:  # a sleep, or a server, takes as long while others run
        return _held(demands, costs, step_s, stall_share, best_s)
    remedies = sorted(_remedies(demands, costs, step_s, best_s), key=lambda remedy: remedy.step_s)
    first = _choose(demands, costs, remedies, step_s)
    worth_making = first is not None and first.gain >= WORTH
    # Several causes together may cost a lot although removing any one of them gains little.
    # No change removes the start-up of the first epoch, and a longer run makes it small.
    total_gain = (step_s - demands.per_step(sum(demands.startups_s[:1]))) / max(best_s, 1e-9)
    cause = first.cause if first is not None and (worth_making or total_gain > _SHARED) else "compute"
    is_explained = first is not None and bool(demands.batches) and step_s >= WORTH * modelled_s
    if not worth_making and total_gain >= WORTH and not is_explained:
        cause = ""  # the costs of the batches were not measured, or do not say why the loop waits
    started_s = demands.per_step(sum(demands.startups_s))
    if not worth_making and cause in ("", "compute") and stall_share >= 1 - 1 / WORTH and 2 * started_s > waited_s:
        return _started(demands, costs, step_s, stall_share, best_s)
    others = [remedy for remedy in remedies if remedy is not first and remedy.gain >= WORTH]
    verdict = Verdict(
        cause=cause,
        sentence="",
        evidence=(),
        step_s=step_s,
        stall_share=stall_share,
        cures=() if first is None else (first, *others),
        worth_making=worth_making,
        fastload_helps=cause in sentences.FASTLOAD_HELPS and demands.images and not demands.is_fastload,
        free_step_s=best_s,
    )
    evidence = (*sentences.evidence_of(verdict, demands, costs), *demands.notes)
    return replace(verdict, sentence=sentences.sentence_of(verdict, demands), evidence=evidence)


def _free_step_s(demands: Demands, costs: Costs, step_s: float) -> tuple[float, float]:
    """Returns a step with a loader that costs nothing: by the model alone, and by all that is known of it.

    Such a loader is never waited for, also where the costs of its batches do not say why this one is.
    """
    free = replace(costs.without(*_MADE, "copy to the device"), startup_s=0.0, restart_s=0.0, end_s=0.0)
    modelled_s = min(step_s, costs.step_s(free) if demands.batches else costs.own_s)
    if demands.on_device and not demands.timed_device:
        return modelled_s, modelled_s  # the device works while the loop waits
    own_s = statistics.fmean(step.compute_s for step in demands.steps)
    return modelled_s, min(step_s, own_s, demands.alone_s or min(modelled_s, demands.operations_s[0]))


def _is_held(demands: Demands, stall_share: float) -> bool:
    """Whether other programs take so much of the machine that the loop would be another one without them."""
    if demands.others_cpus < _HELD * demands.cpus:
        return False
    batches, step_s = demands.batches, statistics.fmean(step.duration_s for step in demands.steps)
    works = [sum(batch.stages.values(), WorkTime()) for batch in batches]
    making_s, lacking_s = sum(work.total_s for work in works), sum(batch.runnable_s for batch in batches)
    seen_s = sum(work.running_s for work in works) / max(1, len(batches)) + demands.receive_s + demands.step_running_s
    own_cpus = demands.job_cpus or seen_s / step_s
    # Who only sleeps, or waits for a disk, is held up by nobody; nor is a loop by batches that it does not wait for.
    waits = stall_share >= 1 - 1 / WORTH
    lacked = waits and lacking_s > _LACKED * (making_s + lacking_s)
    lacked = lacked or demands.step_runnable_s > _LACKED * step_s
    return lacked and own_cpus + demands.others_cpus > _FULL * demands.cpus


def _held(demands: Demands, costs: Costs, step_s: float, stall_share: float, best_s: float) -> Verdict:
    """Returns the verdict on a loop that ran with other programs: these first, and no gains."""
    sentence = (
        f"other programs hold the machine: they use {demands.others_cpus:.1f} of its {demands.cpus} CPUs, and "
        f"{stall_share:.0%} of the time the step waits for data ({seconds_text(step_s)} a step); "
        f"{advice('end other programs')}"
    )
    verdict = Verdict(sentences.OTHER_PROGRAMS, sentence, (), step_s, stall_share, free_step_s=best_s)
    return replace(verdict, evidence=(*sentences.evidence_of(verdict, demands, costs), *demands.notes))


def _started(demands: Demands, costs: Costs, step_s: float, stall_share: float, best_s: float) -> Verdict:
    """Returns the verdict on a run so short that the loader's start is most of its waits, and no change is worth it."""
    count, started_s = demands.num_steps or len(demands.steps), sum(demands.startups_s)
    sentence = (
        f"worker start-up dominates a run of {count} steps: {stall_share:.0%} of the time the step waits for data "
        f"({seconds_text(step_s)} a step), {seconds_text(started_s)} of it until the first batch of an epoch; "
        f"{advice('longer run', count=f'{max(100, 10 * count):,}')}"
    )
    verdict = Verdict("worker start-up", sentence, (), step_s, stall_share, free_step_s=best_s)
    return replace(verdict, evidence=(*sentences.evidence_of(verdict, demands, costs), *demands.notes))


def _judged_by_waits(demands: Demands, step_s: float, waited_s: float) -> Verdict:
    """Returns whether waiting binds a loop, and not why: nobody looked at what its batches cost."""
    fed_s = min(step_s - waited_s, demands.alone_s or step_s)
    share = waited_s / step_s if step_s else 0.0
    gain = step_s / fed_s if fed_s > 0 else math.inf
    binds = gain >= WORTH
    waits = f"{share:.0%} of the time the step waits for data ({seconds_text(step_s)} a step)"
    sentence = (
        f"the data binds: {waits}; {demands.waits_only}; with batches that cost nothing a step would be {gain:.1f} "
        f"times as fast"
        if binds
        else f"compute binds: only {waits}, so that no loader could make it more than {gain:.2f} times as fast"
    )
    remedy = Remedy("", advice("find out"), fed_s, gain)
    cause, cures = ("", (remedy,)) if binds else ("compute", ())
    verdict = Verdict(cause, sentence, (), step_s, share, cures, worth_making=binds, free_step_s=fed_s)
    return replace(verdict, evidence=(*sentences.parts_of_step(verdict, demands), *demands.notes))


def _remedies(demands: Demands, costs: Costs, step_s: float, best_s: float) -> Iterable[Remedy]:
    """Yields every change that saves any time, with the predicted time of a step after it, `best_s` at best."""
    model = costs.model
    saved_s = saved_by_channels_last_s(costs, demands)

    def remedy(
        cause: str, after: LoopModel, workers: int = 0, *, channels_last: bool = False, rest: float = costs.rest
    ) -> Remedy:
        after_s = max(best_s - channels_last * saved_s, min(step_s, rest * after.played().step_s))
        how = sentences.how_to(cause, demands, workers)
        return Remedy(cause, sentences.change_for(cause, demands, workers), after_s, step_s / max(after_s, 1e-9), how)

    packs = demands.images and not demands.is_fastload
    seconds = {name: costs.stages.get(name, WorkTime()).total_s for name in _MADE}
    seconds["hand-over"] += model.receive_s + model.receive_blocked_s
    seconds["copy to the device"] = costs.copy_s
    if packs:
        # One change removes all of them; it is named after the costliest.
        cause = max(PACKED, key=seconds.__getitem__)
        if demands.packs_transform and seconds["transform"] > sum(seconds[name] for name in PACKED):
            cause = "transform"
        if seconds[cause] > 0:
            # What the model does not explain is taken for contention with workers, where the step was played without.
            rest = 1.0 if demands.packs_transform and demands.by_format is not None else costs.rest
            packed = remedy(cause, loop_packed(costs, demands), channels_last=True, rest=rest)
            if demands.packs_transform and not demands.plain.lists_transforms:
                kept = remedy(cause, loop_packed(costs, replace(demands, keeps_transform=True)), channels_last=True)
                packed = replace(packed, least_gain=min(packed.gain, kept.gain))
            yield packed
    if demands.by_format is not None and demands.channels > 1 and saved_s > demands.by_format.convert_s:
        yield remedy("compute", loop_with_channels_last(costs, demands), channels_last=True)
    for cause in (*_MADE, "copy to the device"):
        if cause == WAITING or (packs and cause in PACKED) or (demands.packs_transform and cause == "transform"):
            continue  # the one more workers hide; of the others there was one change
        if cause == NETWORK and demands.network is not None and not demands.network.chunks:
            continue  # nothing came over it
        # Threads hand nothing over: the batch stays in the memory in which it was made.
        if seconds[cause] > 0 and not (cause == "hand-over" and demands.by_threads):
            one_tensor = demands.as_one_tensor if cause == "hand-over" else None
            after = loop_with_one_tensor(costs, demands, one_tensor) if one_tensor else costs.without(cause)
            if cause == "transform" and demands.is_fastload and not demands.by_threads:  # threads take over at once
                after = replace(after, startup_s=0.0, restart_s=0.0)
            if cause == NETWORK:  # the first batch of an epoch waits for it, too
                after = replace(after, startup_s=0.0, restart_s=0.0)
            yield remedy(cause, after)
    if demands.startups_s and not demands.is_fastload and not (demands.persistent and len(demands.startups_s) > 1):
        # Persistent workers still start once. If the run had one epoch only, that one start is the cost to remove.
        once = len(demands.startups_s) > 1
        yield remedy("worker start-up", replace(model, startup_s=once * model.startup_s, restart_s=0.0, end_s=0.0))
    # Enough to keep the loop fed, by the model.
    made_s = sum(work.total_s for work in model.batches) / len(model.batches)
    wanted = math.ceil(made_s / max(model.own_s + model.receive_s + model.receive_blocked_s, 1e-9) * 1.1)
    workers = max(1, min(wanted, model.cpus if model.workers < model.cpus else 4 * model.cpus))
    if costs.waits_for_network:
        pass  # what came was shared out among the workers
    elif not _waits_most(demands, costs):
        if workers > model.workers:
            yield remedy("too few workers", costs.with_workers(workers, demands.by_a_worker), workers)
    elif _is_shared(demands, costs):
        yield remedy(WAITING, costs.without(WAITING))
    elif (workers := _workers_that_hide(costs, wanted)) > model.workers:
        yield remedy(WAITING, costs.with_workers(workers, demands.by_a_worker), workers)
    if model.workers > model.cpus:
        after_s = min(step_s, costs.step_s(costs.with_workers(model.cpus)))
        if demands.fewer_workers is not None:
            # It was measured in a trial, so only the start-up has to be modelled.
            _, few_s, full_s = demands.fewer_workers
            after_s = min(step_s, step_s * few_s / full_s)
        after_s = max(best_s, after_s)
        change = sentences.change_for("too many workers", demands, model.cpus)
        how = sentences.how_to("too many workers", demands, model.cpus)
        yield Remedy("too many workers", change, after_s, step_s / max(after_s, 1e-9), how)


def _waits_most(demands: Demands, costs: Costs) -> bool:
    """Whether the dataset's code mostly sleeps or waits for the network while it makes a batch."""
    waits_s = costs.stages.get(WAITING, WorkTime()).total_s
    # With fewer workers than CPUs, a mixture of all kinds of work has too few workers.
    least_s = (_MOSTLY if demands.workers < demands.cpus else 0.0) * costs.make_s
    return waits_s > least_s and waits_s == max(work.total_s for work in costs.stages.values())


def _workers_that_hide(costs: Costs, wanted: int) -> int:
    """Returns the number of workers, up to those wanted, that hide a wait best; of nearly as good ones the least."""
    before, most = costs.model.workers, max(costs.model.cpus, _MOST_WAITING)
    some = {min(wanted, most), *(before + more for more in (1, 2, 4, 8) if before + more < min(wanted, most))}
    step_s = {workers: costs.step_s(costs.with_workers(workers)) for workers in some if workers > before}
    return min((one for one, s in step_s.items() if s <= 1.05 * min(step_s.values())), default=0)


def _is_shared(demands: Demands, costs: Costs) -> bool:
    """Whether more workers get no more of what they wait for: as was seen, or in a trial of fewer."""
    if demands.fewer_workers is None:
        return demands.waits_shared
    few, few_s, full_s = demands.fewer_workers
    expected = costs.step_s(costs.with_workers(few)) / costs.step_s(costs.model)
    return expected > _TRIED and few_s / full_s < 1 + _PART_GAINED * (expected - 1)


def _choose(demands: Demands, costs: Costs, remedies: list[Remedy], step_s: float) -> Remedy | None:
    """Returns the change to make first; `remedies` are sorted, best first."""
    if not remedies:
        return None
    best = remedies[0]
    unusual_s = max(costs.stages.get(cause, WorkTime()).total_s for cause in _UNUSUAL)
    more_may_help = demands.workers < demands.cpus and unusual_s < _MUCH * costs.make_s
    is_limit = best.cause == "transform" and not best.how
    for remedy in remedies:
        share = _SHARE_OF_BEST.get(remedy.cause, 1.0)
        if remedy.cause == "too few workers":
            share = 1.0 if not more_may_help else _SHARE_OF_LIMIT if is_limit else share
        saves_most = share < 1 and step_s - remedy.step_s >= share * (step_s - best.step_s)
        tried = remedy.cause == "too many workers" and demands.fewer_workers is not None and remedy.gain >= _TRIED
        if remedy.gain >= WORTH and (saves_most or tried):
            return remedy
    # More workers than CPUs would only hide what the workers wait for; that wait is the cause.
    waits = [remedy for remedy in remedies if remedy.cause == WAITING and _waits_most(demands, costs)]
    return next(iter(waits or [remedy for remedy in remedies if remedy.cause != "too few workers"]), None)
