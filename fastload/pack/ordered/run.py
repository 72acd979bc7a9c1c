"""One pack in order, from its survey to the published file."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format import read_header
from fastload.pack.decided import stored_otherwise
from fastload.pack.journal import Journal
from fastload.pack.ordered.begin import begin_in_order
from fastload.pack.ordered.finish import Finished, finish, publish
from fastload.pack.ordered.log import TaskLog, TaskRecord
from fastload.pack.ordered.tasks import OrderedPack
from fastload.pack.ordered.work import Encoded, EncodeTask, Placed, encode_rows, write_rows
from fastload.pack.report import PackReport, report_of
from fastload.pack.resume import PackJob, discard, exists
from fastload.pack.store_plan import StorePlan
from fastload.pack.survey import Survey, unreadable
from fastload.pack.workers import WorkerPool
from fastload.sources.listing import first_few
from fastload.store import ENCODINGS


def pack_ordered(
    job: PackJob, journal: Journal, pool: WorkerPool, survey: Survey, plan: StorePlan, started: float
) -> PackReport:
    """Make what is not done yet, lay the file out, and publish it.

    Raises:
        SourceError: a sample cannot be made, and none is to be skipped; what was done before it stays.
        OutputError, ResumeError, PackError: as pack_images.
    """
    pack, log = OrderedPack.of(job, survey, plan), TaskLog(journal)
    pool.use_threads()
    try:
        kept = begin_in_order(pack, log, pool)
    except BaseException:
        if not job.part.exists():
            discard(job, journal)
            journal.remove()  # Nothing was begun, so there is nothing to continue.
        raise
    begun = time.perf_counter()
    run = _Run(pack, log, kept)
    images = run.make(pool, range(len(kept), pack.num_tasks))
    rate = images / max(time.perf_counter() - begun, 1e-9)
    records = [run.records[number] for number in range(pack.num_tasks)]
    rows = np.concatenate([record.rows for record in records])
    reasons = {row: reason for record in records for row, reason in record.reasons.items()}
    skipped = _named(pack, reasons)
    if not len(rows):
        raise SourceError(unreadable(job.source, skipped, len(pack.samples)))
    path, header_digest = finish(pack, rows, run.ends, pool.threads)
    if job.output.exists() and not job.overwrite:
        raise exists(job.output)
    done = Finished(
        header_digest=header_digest,
        converted=_converted(pack, rows),
        skipped=(*survey.skipped, *skipped),
        notes=(*survey.notes, *_notes(pack, rows)),
        store=str(plan.option),
        encodings=_encodings(plan, rows),
        tasks=pack.num_tasks,
    )
    publish(job, journal, log, path, done)
    return report_of(
        job, read_header(job.output), done.converted, done.skipped, started=started, images_per_s=rate,
        chunks=done.tasks, chunks_kept=len(kept), chunks_decoded=done.tasks - len(kept), notes=done.notes,
        store=done.store, encodings=done.encodings,
    )  # fmt: skip


class _Run:
    """Tasks on their way: encoded, given their places in turn, written and journaled.

    Attributes:
        records: by number, those that are written.
        ends: for each stream, where the rows that have a place end.
    """

    def __init__(self, pack: OrderedPack, log: TaskLog, kept: list[TaskRecord]) -> None:
        self._pack, self._log = pack, log
        self.records = {record.number: record for record in kept}
        self.ends = (0,) * len(pack.streams)
        for record in kept:
            _, self.ends = pack.place(record.number, record.rows, self.ends)
        self._placed: dict[int, tuple[Encoded, tuple[int, ...]]] = {}

    def make(self, pool: WorkerPool, numbers: range) -> int:
        """Make the rows of these tasks; how many rows they have."""
        bounds, job = self._pack.bounds, self._pack.job
        total = int(bounds[numbers.stop] - bounds[numbers.start])
        done = 0
        for number, checks in pool.run_in_order(encode_rows, self._place, write_rows, self._tasks(numbers)):
            encoded, starts = self._placed.pop(number)
            rows = self._pack.rows(number)
            record = TaskRecord(
                number, rows.start, rows.stop - rows.start, self._pack.sources_check(number), starts, checks,
                encoded.rows, encoded.reasons,
            )  # fmt: skip
            self._log.written(record)
            self.records[number] = record
            done += record.count
            if job.progress:
                job.progress("packing", done, total)
        return done

    def _tasks(self, numbers: range) -> Iterator[EncodeTask]:
        yield from map(self._pack.task, numbers)

    def _place(self, encoded: Encoded) -> Placed:
        """Where a task's rows go; called in the order of tasks."""
        if encoded.reasons and self._pack.job.on_error == "fail":
            bad = _named(self._pack, encoded.reasons)
            kept = "What was packed so far is kept: the same command continues with it."
            raise SourceError(f"{unreadable(self._pack.job.source, bad, len(self._pack.samples))} {kept}")
        self._placed[encoded.number] = encoded, self.ends
        placed, self.ends = self._pack.place(encoded.number, encoded.rows, self.ends)
        return placed


def _named(pack: OrderedPack, reasons: dict[int, str]) -> list[tuple[str, str]]:
    """(key, reason) of rows that were left out."""
    return [(pack.survey.listing.keys[pack.samples[row]], reason) for row, reason in sorted(reasons.items())]


def _encodings(plan: StorePlan, rows: NDArray[np.void]) -> dict[str, int]:
    counts = np.bincount(rows["encoding"], minlength=len(ENCODINGS)).tolist()
    return {name: count for name, count in zip(ENCODINGS, counts, strict=True) if count}


def _notes(pack: OrderedPack, rows: NDArray[np.void]) -> list[str]:
    """What is to be said of the rows that were made."""
    large = sum(
        int(np.sum(rows[stream.name] > stream.chunk_bytes)) for stream in pack.streams if stream.form == "store"
    )
    size = f"{pack.plan.chunk_bytes:,} bytes"
    notes = [f"{large} images or masks are larger than a chunk ({size}) and have chunks of their own"] if large else []
    endless = [pack.survey.listing.keys[sample] for sample in pack.samples[rows["row"][rows["endless"] > 0]].tolist()]
    if endless:
        notes.append(
            f"{len(endless)} JPEGs end without their end marker, as a download does that was interrupted: "
            f"{first_few(endless)}. They can be decoded and were kept, but part of the picture may be gray or noise."
        )
    return notes


def _converted(pack: OrderedPack, rows: NDArray[np.void]) -> dict[str, int]:
    """What the survey says of conversions, without the samples that were left out since, where that can be told."""
    survey, headers = pack.survey, pack.survey.headers
    assert headers is not None, "a plan is of images"
    expected = stored_otherwise(pack.plan, survey.samples, headers)
    others = {what: count for what, count in survey.converted.items() if what not in expected}
    return others | stored_otherwise(pack.plan, pack.samples[rows["row"]], headers)
