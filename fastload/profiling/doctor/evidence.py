"""Turns the records of a loader into the input of a verdict (`Demands`)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from dataclasses import replace

from fastload.profiling.doctor.costs import Fetch
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
    facts, trials = loader.facts, loader.trials
    held_back = [(a["t"], b["t"]) for a, b in itertools.pairwise(trials) if b["limit"] and not a["limit"]]
    undisturbed = [one for one in loader.steps if not any(a <= one.step.begin_s < b for a, b in held_back)]
    steps = undisturbed or loader.steps
    slow_s, slow_note = slow_samples(loader.fetches)
    workers = facts["workers"]
    notes = [
        f"{facts['kind']} of {facts['dataset']}, batch_size {facts['batch_size']}, num_workers {workers}"
        + (", persistent" if facts["persistent"] else "")
    ]
    if loader.lines:
        line, count = loader.lines.most_common(1)[0]
        notes.append(f"workers were at {line} in {count / loader.lines.total():.0%} of {loader.lines.total()} looks")
    fewer_workers = None
    few, full = ([one for one in trials if bool(one["limit"]) == limited] for limited in (True, False))
    if few and full:
        few_s, full_s = (statistics.median(one["s"] / one["steps"] for one in ones) for ones in (few, full))
        fewer_workers = few[0]["limit"], few_s, full_s
        notes.append(
            f"with {few[0]['limit']} of {workers} workers allowed to work at once a step took {format_time(few_s)}, "
            f"with all {format_time(full_s)} (a trial while the script ran, in turn)"
        )
    return Demands(
        batches=tuple(replace(_explained(fetch, waits or WaitShares()), slow_s=slow_s) for fetch in loader.fetches),
        steps=tuple(_warm([record.step for record in steps])),
        workers=workers,
        ahead=facts.get("ahead", workers * facts["prefetch"]),
        cpus=cpus,
        num_steps=len(steps),
        epochs=tuple((epoch.first_s, epoch.end_s) for epoch in loader.epochs if epoch.first_s is not None),
        receive_s=statistics.fmean(record.receive.running_s for record in steps) if workers else 0.0,
        receive_blocked_s=statistics.fmean(record.receive.blocked_s for record in steps) if workers else 0.0,
        step_running_s=statistics.fmean(record.running_s for record in steps),
        step_runnable_s=statistics.fmean(record.runnable_s for record in steps),
        by_threads=facts.get("by_threads", False),
        fewer_workers=fewer_workers,
        persistent=facts["persistent"],
        is_fastload=facts["kind"].startswith("fastload."),
        compression_ratio=facts.get("compression_ratio", 0.0),
        notes=(*notes, *slow_note),
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


def slow_samples(fetches: Iterable[Fetch]) -> tuple[float, list[str]]:
    """Finds samples that take far longer than the others: 5 times a usual one, and twice the mean. Many are not slow.

    Returns:
        Seconds per batch that slow samples take beyond usual ones, and a line of evidence; 0.0 and none if there are no
            slow samples.
    """
    fetches = [fetch for fetch in fetches if fetch.num_samples]
    if not fetches:
        return 0.0, []
    usual_s = statistics.median(fetch.usual_s for fetch in fetches)
    count = sum(fetch.num_samples for fetch in fetches)
    least_s = max(5 * usual_s, 2 * sum(fetch.samples_s for fetch in fetches) / count)
    slow = [value for fetch in fetches for value in fetch.slow if value > least_s]
    if not slow or len(slow) > 0.1 * count:
        return 0.0, []
    mean, usual = format_time(sum(slow) / len(slow)), format_time(usual_s)
    extra_s = sum(value - usual_s for value in slow) / len(fetches)
    return extra_s, [f"{len(slow)} samples took {mean} each, where most take {usual}"]
