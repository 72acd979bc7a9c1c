"""From a loader's records to what a verdict is made from."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

from fastload.doctor.kernel import WaitShares
from fastload.doctor.records import Fetch, LoaderRecord, Records, StepRecord, slow_samples
from fastload.measured import Step, Work
from fastload.verdict import BatchWork, Demands
from fastload.verdict.words import format_time

# The first steps of a run compile, allocate and warm up.
_WARM_UP = 2
_MIN_STEPS = 10


def loader_that_binds(records: Records) -> LoaderRecord | None:
    """The loader whose loop the job spends most of its time in, on the rank that waits longest for it."""
    if not records.loaders:
        return None
    most = max(records.loaders, key=lambda loader: loader.elapsed_s)
    same = [loader for loader in records.loaders if loader.facts["id"] == most.facts["id"] and _alike(loader, most)]
    return max(same, key=lambda loader: sum(record.step.wait_s for record in loader.steps))


def _alike(loader: LoaderRecord, other: LoaderRecord) -> bool:
    return all(loader.facts[name] == other.facts[name] for name in ("kind", "workers", "dataset"))


def demands_of(loader: LoaderRecord, *, cpus: int, waits: WaitShares | None = None) -> Demands:
    """What one loader's loop asks of the machine.

    Args:
        loader: with at least one step.
        cpus: that its process may use, workers included.
        waits: what the kernel saw the fetching threads wait for, of the time that nothing else explains.
    """
    settled = _as_it_is(loader) or loader.steps
    fetches = loader.fetches
    slow_s, slow_mean_s, num_slow = slow_samples(fetches)
    batches = tuple(replace(_explained(fetch, waits or WaitShares()), slow_s=slow_s) for fetch in fetches)
    taken_over_s = statistics.fmean(record.receive.running_s + record.receive.blocked_s for record in settled)
    # A worker's first batch takes as long as most others, its waits for a CPU included.
    made_s = [max(fetch.wall_s, _made_s(fetch.work)) for fetch in fetches]
    usual_s = taken_over_s + (statistics.median(made_s) if made_s else 0.0)
    starts = [max(0.0, epoch.first_s - usual_s) + epoch.end_s for epoch in loader.epochs if epoch.first_s is not None]
    workers = loader.facts["workers"]
    return Demands(
        batches=batches,
        steps=tuple(_warm([record.step for record in settled])),
        workers=workers,
        ahead=loader.facts.get("ahead", workers * loader.facts["prefetch"]),
        cpus=cpus,
        receive_s=statistics.fmean(record.receive.running_s for record in settled) if workers else 0.0,
        receive_blocked_s=statistics.fmean(record.receive.blocked_s for record in settled) if workers else 0.0,
        startups_s=tuple(starts) if workers else (),
        ended_s=sum(epoch.end_s for epoch in loader.epochs),
        step_running_s=statistics.fmean(record.process_running_s for record in settled),
        step_runnable_s=statistics.fmean(record.runnable_s for record in settled),
        by_threads=loader.facts.get("by_threads", False),
        fewer_workers=_trial(loader),
        persistent=bool(loader.facts["persistent"]),
        is_fastload=loader.facts["kind"].startswith("fastload."),
        times_raw=loader.facts.get("times_raw", 0.0),
        notes=tuple(_notes(loader, num_slow, slow_mean_s)),
    )


def _warm(steps: list[Step]) -> list[Step]:
    """The same steps; those that compiled, allocated and warmed up take no longer than the others usually do."""
    if len(steps) < _MIN_STEPS:
        return steps
    usual_s = statistics.median(step.compute_s for step in steps[_WARM_UP:])
    warm = [replace(step, compute_s=min(step.compute_s, 3 * usual_s)) for step in steps[:_WARM_UP]]
    return [*warm, *steps[_WARM_UP:]]


def _made_s(batch: BatchWork) -> float:
    return sum(work.running_s + work.blocked_s for work in batch.stages.values())


def _explained(fetch: Fetch, waits: WaitShares) -> BatchWork:
    """The cost of a batch, its blocked time that no call explains put where the kernel saw it."""
    work = fetch.work
    reading = work.stages.get("reading", Work())
    # Whoever waits for the GIL would run: another thread of the process holds it.
    gil_s = min(reading.blocked_s, waits.gil * fetch.unknown_blocked_s)
    stages = {**work.stages, "reading": Work(reading.running_s, reading.blocked_s - gil_s)}
    lock_s = work.lock_s + waits.lock * fetch.unknown_blocked_s
    return replace(work, stages=stages, lock_s=lock_s, runnable_s=work.runnable_s + gil_s)


def _as_it_is(loader: LoaderRecord) -> list[StepRecord]:
    """The steps that were not taken while some workers were held back for a trial."""
    held = [
        (before["t"], after["t"])
        for before, after in itertools.pairwise(loader.trials)
        if after["limit"] and not before["limit"]
    ]
    return [record for record in loader.steps if not any(begin <= record.step.begin_s < end for begin, end in held)]


def _trial(loader: LoaderRecord) -> tuple[int, float, float] | None:
    """Workers let work at once, and seconds a step then and otherwise; of turns that were taken one after the other."""
    few = [trial["s"] / trial["steps"] for trial in loader.trials if trial["limit"]]
    full = [trial["s"] / trial["steps"] for trial in loader.trials if not trial["limit"]]
    if not few or not full:
        return None
    limit = next(trial["limit"] for trial in loader.trials if trial["limit"])
    return limit, statistics.median(few), statistics.median(full)


def _notes(loader: LoaderRecord, num_slow: int, slow_mean_s: float) -> list[str]:
    facts = loader.facts
    notes = [
        f"{facts['kind']} of {facts['dataset']}, batch_size {facts['batch_size']}, num_workers {facts['workers']}"
        + (", persistent" if facts["persistent"] else "")
    ]
    total = sum(loader.lines.values())
    if total:
        place, count = loader.lines.most_common(1)[0]
        notes.append(f"workers were at {place} in {count / total:.0%} of {total} looks")
    trial = _trial(loader)
    if trial is not None:
        limit, few_s, full_s = trial
        notes.append(
            f"with {limit} of {facts['workers']} workers let work at once a step took {format_time(few_s)}, with all "
            f"{format_time(full_s)} (in turns, tried out while the script ran)"
        )
    if num_slow:
        usual = statistics.median(fetch.usual_s for fetch in loader.fetches if fetch.num_samples)
        notes.append(f"{num_slow} samples took {format_time(slow_mean_s)} each, where most take {format_time(usual)}")
    return notes
