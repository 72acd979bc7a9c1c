"""Runs plans: packs shards, here or elsewhere, and joins what comes of them.

    plan = make_plan(call, shards, runner)                      list, survey, cut into N >= 1 shards
    reports = runner(plan, range(plan.num_shards))              `Here`; on a cluster `on_ray.OnRay`
    report = join(plan, reports)                                one file, or the index of N

A runner packs each shard under its own journal, so that the same call continues it after a kill, to its `target`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from fastload.errors import OutputError, PackError
from fastload.options.pack import PackOptions
from fastload.pack.begin import begin_or_resume, discard
from fastload.pack.encode import Headers
from fastload.pack.engine import make_rows
from fastload.pack.finish import PackReport, finish, finished_report
from fastload.pack.index import IndexReport, index_packed
from fastload.pack.journal import Journal
from fastload.pack.output_url import check_url, exists
from fastload.pack.pack_options import KEPT, PackJob, journal_path
from fastload.pack.plan import SUFFIX, PackPlan, Plan, PlanFile, Surveyor, is_plan
from fastload.pack.pool import PackPool
from fastload.pack.survey import Survey, survey_listing
from fastload.pack.target import kept_shard, remove_attempts, target_of
from fastload.remote.urls import ObjectPath, Remote, path_of, remote_in_force, requests_as
from fastload.sources.listing import first_few, only_arrays
from fastload.system.files import output_errors
from fastload.system.machine import worker_count
from fastload.system.threads import in_threads


class Runner(Surveyor, Protocol):
    """Packs plans; also lists and surveys what they are of."""

    def __call__(self, plan: PackPlan, numbers: Iterable[int]) -> list[PackReport]:
        """Packs these shards of a plan; returns their reports."""
        ...


class Here:
    """Packs in this process, with worker processes of its own for each shard.

    Args:
        workers: processes that decode; 0: this one does, None: one for each CPU.
        keep: a shard that an earlier call has completed is kept.
    """

    def __init__(self, workers: int | None, *, keep: bool = True) -> None:
        self._workers, self._keep, self._begun = workers, keep, time.perf_counter()
        self._open = ExitStack()
        self._pool: PackPool | None = None  # which listed the source

    def __enter__(self) -> Here:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open.__exit__(kind, error, tb)

    def pool(self, options: PackOptions, processes: int) -> PackPool:
        """Returns the workers that help to list a source, and pack it if it becomes one file."""
        self._pool = self._open.enter_context(_pool_of(options, processes, processes))
        return self._pool

    def survey(self, job: PackJob, headers: Headers | None = None) -> Survey:
        """Reads every header of a listing, unless they were read elsewhere, and decides what each image becomes."""
        assert self._pool is not None, "the source was listed"
        with self._open.pop_all():  # Each shard has other samples to send to its workers.
            self._pool.use(job.listing)
            return survey_listing(job, self._pool, headers)

    def __call__(self, plan: Plan, numbers: Iterable[int]) -> list[PackReport]:
        """Packs these shards, one after another; those that are complete already are kept."""
        return [self._pack(plan, plan.job(number)) for number in numbers]

    def _pack(self, plan: Plan, job: PackJob) -> PackReport:
        begun = self._begun if job.whole is None else time.perf_counter()
        if job.whole is not None:
            if not isinstance(job.output, ObjectPath):
                with output_errors(f"{job.output}: its folder cannot be made ({{}})."):
                    job.output.parent.mkdir(parents=True, exist_ok=True)
            kept = kept_shard(job)
            if kept is not None and self._keep:
                return kept
        with target_of(plan, job, keep=self._keep) as target:
            if target.report is None:
                with self._pool_for(target.job) as pool, closing(journal_of(target.job)) as journal:
                    target.report = make_file(target.job, journal, pool, begun)
        if isinstance(job.output, ObjectPath):
            return replace(target.made, seconds=time.perf_counter() - begun)
        return target.made

    @contextmanager
    def _pool_for(self, job: PackJob) -> Iterator[PackPool]:
        """Gives the workers that listed the source, or others."""
        if self._pool is not None and job.whole is None:
            yield self._pool
            return
        with packing_pool(job, self._workers) as pool:
            yield pool


@contextmanager
def _pool_of(options: PackOptions, processes: int, sharers: int) -> Iterator[PackPool]:
    with options.accepting_large(sharers), PackPool(processes) as pool:
        yield pool


@contextmanager
def packing_pool(job: PackJob, workers: int | None) -> Iterator[PackPool]:
    """Gives the workers that pack a job."""
    processes = worker_count(workers)
    # As a rule each CPU has an attempt at a shard.
    with _pool_of(job.options, processes, worker_count(workers or None) if job.alone else processes) as pool:
        yield pool


def pack_listing(job: PackJob, workers: int | None = None) -> PackReport:
    """Packs a listing that is made already, as one file; otherwise as `pack_images`."""
    with Here(workers) as here:
        return here(PackPlan(job), [0])[0]


def journal_of(job: PackJob) -> Journal:
    """Returns the journal of an output, locked; close it."""
    return Journal(journal_path(job.output), alone=job.alone)


def make_file(job: PackJob, journal: Journal, pool: PackPool, started: float) -> PackReport:
    """Begins or continues a pack under its journal's lock, and returns the report of the finished file."""
    pool.use(job.listing)
    copies = job.options.size is None and job.options.mode is None and only_arrays(job.listing)
    if copies or job.listing.files is None:
        pool.workers = 0  # Copying arrays takes less time than sending tasks.
    found = journal.read()
    try:
        if report := finished_report(job, journal, found):
            return replace(report, seconds=time.perf_counter() - started)
        tasks, records = begin_or_resume(job, journal, found, pool)
    except BaseException:
        if not os.path.lexists(job.part):
            discard(job, found)
            journal.remove()  # Nothing was begun, so there is nothing to continue.
        elif journal.is_empty():
            journal.remove()
        raise
    if tasks.survey.plan is not None and tasks.survey.plan.special and not pool.workers:
        pool.local_threads = pool.threads  # Encoding releases the GIL, and takes longer than copying.
    kept, rows_kept = tasks.chunks_of(records.values()), sum(record.count for record in records.values())
    begun = time.perf_counter()
    try:
        make_rows(tasks, journal, pool, records)
    except PackError as exc:  # a worker died
        raise PackError(f"{exc} {KEPT}") from exc
    making_s = time.perf_counter() - begun
    report = finish(tasks, records, journal, pool.threads)
    seconds, made = time.perf_counter() - started, tasks.survey.num_samples - rows_kept
    return replace(
        report, seconds=seconds, chunks_kept=kept, chunks_decoded=report.chunks - kept,
        images_per_s=made / max(seconds, 1e-9), decoded_per_s=made / max(making_s, 1e-9),
    )  # fmt: skip


def join(plan: PackPlan, reports: Sequence[PackReport], begun: float) -> PackReport:
    """Returns the report of a plan's output, given those of its shards in order; of several it writes the index.

    `begun`: when the call began.
    """
    if plan.cut is None:
        return reports[0]
    index = index_packed([report.path for report in reports], plan.whole.output, overwrite=plan.whole.overwrite)
    return _joined_report(plan.cut.survey, reports, index, begun)


def _joined_report(survey: Survey, reports: Sequence[PackReport], index: IndexReport, begun: float) -> PackReport:
    """Returns the report of an index, given its shards' reports, in order."""
    seconds = time.perf_counter() - begun
    made = sum(report.num_samples for report in reports if report.chunks_decoded)
    return replace(
        reports[0],
        path=index.path,
        num_samples=index.num_samples,
        image_shape=index.image_shape,
        splits=index.splits,
        converted=_added([survey.converted, *(report.converted for report in reports)]),
        skipped=(*survey.skipped, *(one for report in reports for one in report.skipped)),
        warned=tuple(one for report in reports for one in report.warned),
        notes=tuple(dict.fromkeys([*survey.notes, *(note for report in reports for note in report.notes)])),
        file_bytes=index.num_bytes + index.index_bytes,
        seconds=seconds,
        images_per_s=made / max(seconds, 1e-9),
        decoded_per_s=0.0,
        encodings=_added([report.encodings for report in reports]),
        num_shards=len(reports),
        **{name: sum(getattr(report, name) for report in reports)
           for name in ("chunks", "chunks_kept", "chunks_decoded", "pixel_bytes")},
    )  # fmt: skip


def _added(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for some in counts:
        total.update(some)
    return dict(total)


def index_plan(
    plan: str | Path, output: str | Path, *, overwrite: bool = False, remote: Remote | None = None
) -> IndexReport:
    """Writes the index of the shards of a plan, and removes what killed attempts at them have left.

    Args:
        plan: made by `fastload pack ... --plan` or `plan_images`; its path or URL.
        output: the index, in the folder of the plan; its path or URL.
        overwrite: replace an output that exists.
        remote: how objects behind URLs are requested.

    Raises:
        PackError: shards are missing, or do not belong to the plan; it names them.
        OptionError, OutputError, FormatError: as `index_files`.
    """
    if is_plan(output):
        raise OutputError(
            f"{output}: plans have this ending. Name the index, such as {str(output).removesuffix(SUFFIX)}."
        )
    with requests_as(remote):
        output = path_of(output)
        if isinstance(output, ObjectPath):
            check_url(output, overwrite=overwrite)
        found = PlanFile.read(path_of(plan))
        _check_packed(found)
        shards = [found.shard(number) for number in range(found.num_shards)]
        report = index_packed(shards, output, overwrite=overwrite)
        if not isinstance(found.path, ObjectPath):
            remove_attempts(shards)
        return report


def _check_packed(found: PlanFile) -> None:
    """Raises PackError if shards of a plan are missing, or do not belong to it."""
    plan, numbers = found.path, range(found.num_shards)
    shards = [found.shard(number) for number in numbers]
    at_url = isinstance(plan, ObjectPath)
    packed = in_threads(found.is_packed, numbers, remote_in_force().in_flight if at_url else 0, ordered=True)
    missing = [number for number, there in zip(numbers, packed, strict=True) if not there]
    if missing:
        others = [number for number in missing if exists(shards[number])]
        replaced = ""
        if others:
            replaced = f" Others have the names of {first_few(map(str, others))}: for these say `--overwrite`, too."
        raise PackError(
            f"{plan}: {len(missing)} of {len(shards)} shards are not packed: {first_few(map(str, missing))}. Pack them "
            f"with `--shard-index`, such as {missing[0]}, which becomes {shards[missing[0]].name}.{replaced}"
        )
