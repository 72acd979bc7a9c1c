"""One call of the packer, from its listing to the published file: `encode(task) -> locate(lengths) -> write`.

Workers make the rows of a task. Rows of one size know their offsets in the file beforehand as long as none is skipped,
and the worker that made them writes them at once. Of all others it keeps the bytes until the lengths of all earlier
rows are known, this process computes the offsets, and the same worker writes. A skipped sample never gets an offset, so
nothing is moved afterwards.

| file | content |
| --- | --- |
| `OUT.h5.part` | rows of images from byte 4096 on, and those of masks behind them if that place is known beforehand |
| `OUT.h5.masks` | else the rows of masks |
| `OUT.h5.journal` | what is packed, and each task when its rows are written |
| `OUT.h5.meta` | the file in which HDF5 builds its metadata, and which holds compressed chunks |
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format.header import read_header
from fastload.format.ragged import ENCODINGS
from fastload.pack.begin import begin_or_resume, discard
from fastload.pack.decisions import source_exceptions
from fastload.pack.encode import ROW
from fastload.pack.finish import Finished, PackReport, finish, finished_report, publish, report_of
from fastload.pack.journal import Journal, TaskRecord
from fastload.pack.pack_options import PackJob, journal_path, output_exists
from fastload.pack.pack_worker import PackedRows, PackTask, RowOffsets, Worker
from fastload.pack.pool import PackPool
from fastload.pack.survey import unreadable
from fastload.pack.tasks import PackTasks, only_arrays
from fastload.sources.listing import first_few


def run_job(job: PackJob, pool: PackPool, started: float) -> PackReport:
    """Begins or continues a pack, under the journal's lock, and returns the report of the finished file.

    Args:
        started: time.perf_counter() when the call began.

    Raises:
        SourceError: a sample cannot be packed and must not be skipped; rows before it stay.
        OutputError, ResumeError, PackError: as pack_images.
    """
    pool.use(job.listing)
    copies = job.options.size is None and job.options.mode is None and only_arrays(job.listing)
    if copies or job.listing.files is None:
        pool.workers = 0  # Copying arrays takes less time than sending tasks.
    with closing(Journal(journal_path(job.output))) as journal:
        found = journal.read()
        try:
            if done := finished_report(job, journal, found, started):
                return done
            tasks, kept = begin_or_resume(job, journal, found, pool)
        except BaseException:
            if not job.part.exists():
                discard(job, found)
                journal.remove()  # Nothing was begun, so there is nothing to continue.
            raise
        return _pack(tasks, journal, kept, pool, started)


def _pack(tasks: PackTasks, journal: Journal, kept: list[TaskRecord], pool: PackPool, started: float) -> PackReport:
    """Makes the rows that are not done yet, gives the file its metadata, publishes it and returns the report."""
    job, survey = tasks.job, tasks.survey
    if survey.plan is not None and survey.plan.special and not pool.workers:
        pool.local_threads = pool.threads  # Encoding releases the GIL, and takes longer than copying.
    begun = time.perf_counter()
    run = _Run(tasks, journal, kept)
    images = run.make(pool)
    rate = images / max(time.perf_counter() - begun, 1e-9)
    rows, reasons, ends = run.all_rows()
    skipped = _named(tasks, reasons)
    if not len(rows):
        raise SourceError(unreadable(job.source, skipped, len(tasks.samples)))
    path, header_digest = finish(tasks, rows, ends, pool.threads)
    if job.output.exists() and not job.overwrite:
        raise output_exists(job.output)
    done = Finished(
        header_digest=header_digest,
        converted=_converted(tasks, rows),
        skipped=(*survey.skipped, *skipped),
        notes=(*survey.notes, *_notes(tasks, rows)),
        store="raw" if survey.plan is None else str(survey.plan.option),
        encodings=_encodings(tasks, rows),
        chunks=tasks.chunks,
    )
    publish(tasks, journal, path, done)
    return report_of(
        job, read_header(job.output), done, started=started, images_per_s=rate, chunks_kept=tasks.chunks_of(kept)
    )


class _Run:
    """Runs the tasks: rows made by workers, located, written and journaled."""

    def __init__(self, tasks: PackTasks, journal: Journal, kept: list[TaskRecord]) -> None:
        self._tasks, self._journal = tasks, journal
        self._records = {record.number: record for record in kept}
        self._skipped = any(record.reasons for record in kept)
        self._total = len(tasks.samples) - sum(record.count for record in kept)
        self._done = 0
        self._ends: tuple[int, ...] = ()
        self._located: dict[int, tuple[PackedRows, tuple[int, ...]]] = {}

    def make(self, pool: PackPool) -> int:
        """Makes the rows of the tasks that are not done; returns their number."""
        if self._tasks.fixed and not self._skipped:
            for made in pool.run(Worker.pack, self._to_do(at_once=True)):
                if made.reasons:
                    self._check(made)
                    self._skipped = True  # Workers still finish what they have; the tasks before this one count.
                else:
                    self._written(made, self._tasks.starts(made.number))
            self._drop_from(min(set(range(self._tasks.num_tasks)) - self._records.keys(), default=None))
        self._ends = self._end_of(list(self._records.values()))
        for number in pool.run(Worker.pack, self._to_do(at_once=False), self._locate, Worker.write):
            self._written(*self._located.pop(number))
        return self._total

    def _to_do(self, *, at_once: bool) -> Iterator[PackTask]:
        """Yields the tasks that are not done; of those written at once no more after one has skipped samples."""
        for number in range(self._tasks.num_tasks):
            if at_once and self._skipped:
                return
            if number not in self._records:
                yield self._tasks.task(number, at_once=at_once)

    def _drop_from(self, first: int | None) -> None:
        """Forgets the tasks behind one that has skipped samples: their rows belong elsewhere."""
        for number in [number for number in self._records if first is not None and number > first]:
            self._done -= self._records.pop(number).count

    def _written(self, made: PackedRows, starts: tuple[int, ...]) -> None:
        rows = self._tasks.rows(made.number)
        record = TaskRecord(
            made.number, rows.start, rows.stop - rows.start, self._tasks.sources_check(made.number), starts,
            made.checks, made.rows, made.reasons,
        )  # fmt: skip
        self._journal.written(record)
        self._records[made.number] = record
        self._done += record.count
        if self._tasks.job.on_progress:
            self._tasks.job.on_progress("packing", self._done, self._total)

    def all_rows(self) -> tuple[NDArray[np.void], dict[int, str], tuple[int, ...]]:
        """Returns all rows (ROW), row -> why it was skipped, and where the rows of each stream end."""
        records = [self._records[number] for number in sorted(self._records)]
        reasons = {row: reason for record in records for row, reason in record.reasons.items()}
        if not self._tasks.streams:  # samples without images
            rows = np.zeros(len(self._tasks.samples), ROW)
            rows["row"], rows["digest"] = np.arange(len(rows)), xxhash.xxh3_64_intdigest(b"")
            return rows, {}, ()
        return np.concatenate([record.rows for record in records]), reasons, self._end_of(records)

    def _end_of(self, records: list[TaskRecord]) -> tuple[int, ...]:
        """Returns where rows end in each stream behind the last of these tasks."""
        if not records:
            return (0,) * len(self._tasks.streams)
        last = max(records, key=lambda record: record.number)
        return self._tasks.locate(last.number, last.rows, last.starts)[1]

    def _locate(self, made: PackedRows) -> RowOffsets:
        """Returns the offsets of a task's rows; called in the order of tasks."""
        self._check(made)
        self._located[made.number] = made, self._ends
        located, self._ends = self._tasks.locate(made.number, made.rows, self._ends)
        return located

    def _check(self, made: PackedRows) -> None:
        """Raises SourceError if samples failed that must not be skipped."""
        if made.reasons and self._tasks.job.on_error == "fail":
            bad = _named(self._tasks, made.reasons)
            kept = "What was packed so far is kept: the same command continues with it."
            raise SourceError(f"{unreadable(self._tasks.job.source, bad, len(self._tasks.samples))} {kept}")


def _named(tasks: PackTasks, reasons: dict[int, str]) -> list[tuple[str, str]]:
    """Returns (key, reason) of skipped rows."""
    return [(tasks.survey.listing.keys[tasks.samples[row]], reason) for row, reason in sorted(reasons.items())]


def _encodings(tasks: PackTasks, rows: NDArray[np.void]) -> dict[str, int]:
    """Returns the number of images in each encoding."""
    if not tasks.streams:
        return {}
    counts = np.bincount(rows["encoding"], minlength=len(ENCODINGS)).tolist()
    return {name: count for name, count in zip(ENCODINGS, counts, strict=True) if count}


def _notes(tasks: PackTasks, rows: NDArray[np.void]) -> list[str]:
    """Returns notes about the rows that were made."""
    ragged = [stream for stream in tasks.streams if stream.spec is None]
    large = sum(int(np.sum(rows[stream.name] > stream.chunk_bytes)) for stream in ragged)
    notes = []
    if large:
        size = f"{ragged[0].chunk_bytes:,} bytes"
        notes.append(f"{large} images or masks are larger than a chunk ({size}) and have chunks of their own")
    cut_short = tasks.samples[rows["row"][rows["missing_eoi"] > 0]].tolist()
    missing_eoi = [tasks.survey.listing.keys[sample] for sample in cut_short]
    if missing_eoi:
        notes.append(
            f"{len(missing_eoi)} JPEGs end without their end marker, as a download does that was "
            f"interrupted: {first_few(missing_eoi)}. They can be decoded and were kept, but part of the "
            "picture may be gray or noise."
        )
    return notes


def _converted(tasks: PackTasks, rows: NDArray[np.void]) -> dict[str, int]:
    """Returns the conversions of the survey; those that depend on the encoding without samples skipped since."""
    survey, plan, headers = tasks.survey, tasks.survey.plan, tasks.survey.headers
    if plan is None or headers is None:
        return survey.converted
    expected = source_exceptions(plan, survey.samples, headers)
    others = {name: count for name, count in survey.converted.items() if name not in expected}
    return others | source_exceptions(plan, tasks.samples[rows["row"]], headers)
