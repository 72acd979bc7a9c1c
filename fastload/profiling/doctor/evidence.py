"""Turns the records of a loader into the input of a verdict (`Demands`)."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

from fastload.profiling.doctor.costs import Fetch, slow_samples
from fastload.profiling.doctor.kernel import WaitShares
from fastload.profiling.doctor.loader_records import LoaderRecord, Records
from fastload.profiling.verdict import Demands
from fastload.profiling.verdict.sentences import format_time
from fastload.timing.results import BatchWork, Step, Work

# The first steps of a run include compilation, allocation and warm-up.
_WARM_UP = 2
_MIN_STEPS = 10


def loader_that_binds(records: Records) -> LoaderRecord | None:
    """Returns the loader with whose loop the job spends most of its time, on the rank that waits longest for it."""
    if not records.loaders:
        return None
    most = max(records.loaders, key=lambda loader: loader.elapsed_s)
    names = ("id", "kind", "workers", "dataset")  # the same loader of another rank has the same
    same = [loader for loader in records.loaders if all(loader.facts[name] == most.facts[name] for name in names)]
    return max(same, key=lambda loader: sum(record.step.wait_s for record in loader.steps))


def demands_of(loader: LoaderRecord, *, cpus: int, waits: WaitShares | None = None) -> Demands:
    """Returns what one loader's loop asks of the machine.

    Args:
        loader: with at least one step.
        cpus: CPUs that its process may use, workers included.
        waits: what the fetching threads waited for according to the kernel, for waits that nothing else explains.
    """
    held_back = [
        (before["t"], after["t"])
        for before, after in itertools.pairwise(loader.trials)
        if after["limit"] and not before["limit"]
    ]
    undisturbed = [one for one in loader.steps if not any(a <= one.step.begin_s < b for a, b in held_back)]
    steps = undisturbed or loader.steps
    fetches = loader.fetches
    slow_s, slow_mean_s, num_slow = slow_samples(fetches)
    batches = tuple(replace(_explained(fetch, waits or WaitShares()), slow_s=slow_s) for fetch in fetches)
    workers = loader.facts["workers"]
    return Demands(
        batches=batches,
        steps=tuple(_warm([record.step for record in steps])),
        workers=workers,
        ahead=loader.facts.get("ahead", workers * loader.facts["prefetch"]),
        cpus=cpus,
        num_steps=len(steps),
        epochs=tuple((epoch.first_s, epoch.end_s) for epoch in loader.epochs if epoch.first_s is not None),
        receive_s=statistics.fmean(record.receive.running_s for record in steps) if workers else 0.0,
        receive_blocked_s=statistics.fmean(record.receive.blocked_s for record in steps) if workers else 0.0,
        step_running_s=statistics.fmean(record.running_s for record in steps),
        step_runnable_s=statistics.fmean(record.runnable_s for record in steps),
        by_threads=loader.facts.get("by_threads", False),
        fewer_workers=_trial(loader),
        persistent=bool(loader.facts["persistent"]),
        is_fastload=loader.facts["kind"].startswith("fastload."),
        compression_ratio=loader.facts.get("compression_ratio", 0.0),
        notes=tuple(_notes(loader, num_slow, slow_mean_s)),
    )


def _warm(steps: list[Step]) -> list[Step]:
    """Returns the steps, the compute time of the first ones limited to 3 times the usual, to leave out warm-up."""
    if len(steps) < _MIN_STEPS:
        return steps
    usual_s = statistics.median(step.compute_s for step in steps[_WARM_UP:])
    warm = [replace(step, compute_s=min(step.compute_s, 3 * usual_s)) for step in steps[:_WARM_UP]]
    return [*warm, *steps[_WARM_UP:]]


def _explained(fetch: Fetch, waits: WaitShares) -> BatchWork:
    """Returns the cost of a batch, its unexplained waits assigned to locks and GIL as the kernel saw them."""
    work = fetch.work
    reading = work.stages.get("reading", Work())
    # A thread that waits for the GIL is ready to run: another thread of its process holds it.
    gil_s = min(reading.blocked_s, waits.gil * fetch.unknown_blocked_s)
    stages = {**work.stages, "reading": Work(reading.running_s, reading.blocked_s - gil_s)}
    lock_s = work.lock_s + waits.lock * fetch.unknown_blocked_s
    return replace(work, stages=stages, lock_s=lock_s, runnable_s=work.runnable_s + gil_s)


def _trial(loader: LoaderRecord) -> tuple[int, float, float] | None:
    """Returns the results of the trials: workers allowed to work at once, seconds per step with those, and with all."""
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
        line, count = loader.lines.most_common(1)[0]
        notes.append(f"workers were at {line} in {count / total:.0%} of {total} looks")
    trial = _trial(loader)
    if trial is not None:
        limit, few_s, full_s = trial
        notes.append(
            f"with {limit} of {facts['workers']} workers allowed to work at once a step took {format_time(few_s)}, "
            f"with all {format_time(full_s)} (a trial while the script ran, in turn)"
        )
    if num_slow:
        usual = statistics.median(fetch.usual_s for fetch in loader.fetches if fetch.num_samples)
        notes.append(f"{num_slow} samples took {format_time(slow_mean_s)} each, where most take {format_time(usual)}")
    return notes
