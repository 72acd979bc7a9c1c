"""The driver of the ordered engine: one pack from its survey to the published file."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format.header import read_header
from fastload.format.ragged import ENCODINGS
from fastload.pack.begin import discard
from fastload.pack.decisions import source_exceptions
from fastload.pack.encoding import RaggedPlan
from fastload.pack.finish import PackReport, report_of
from fastload.pack.journal import Journal
from fastload.pack.ordered.ordered_begin import begin_ordered
from fastload.pack.ordered.ordered_finish import Finished, finish, publish
from fastload.pack.ordered.ordered_tasks import (
    EncodedTask,
    EncodeTask,
    OrderedPack,
    TaskOffsets,
    encode_rows,
    write_rows,
)
from fastload.pack.ordered.record_log import TaskLog, TaskRecord
from fastload.pack.pack_options import PackJob, output_exists
from fastload.pack.pool import PackPool
from fastload.pack.survey import Survey, unreadable
from fastload.sources.listing import first_few


def pack_ordered(
    job: PackJob, journal: Journal, pool: PackPool, survey: Survey, plan: RaggedPlan, started: float
) -> PackReport:
    """Makes the rows that are not done yet, gives the file its metadata, publishes it and returns the report.

    Raises:
        SourceError: a sample cannot be packed and must not be skipped; rows before it stay.
        OutputError, ResumeError, PackError: as pack_images.
    """
    pack, log = OrderedPack.of(job, survey, plan), TaskLog(journal)
    pool.use_threads()
    try:
        kept = begin_ordered(pack, log, pool)
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
        raise output_exists(job.output)
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
    """Runs the tasks: encoded by workers, given their offsets in order, written and journaled.

    Attributes:
        records: number -> a task that is written.
        ends: for each stream, where the rows that have offsets end.
    """

    def __init__(self, pack: OrderedPack, log: TaskLog, kept: list[TaskRecord]) -> None:
        self._pack, self._log = pack, log
        self.records = {record.number: record for record in kept}
        self.ends = (0,) * len(pack.streams)
        for record in kept:
            _, self.ends = pack.locate(record.number, record.rows, self.ends)
        self._located: dict[int, tuple[EncodedTask, tuple[int, ...]]] = {}

    def make(self, pool: PackPool, numbers: range) -> int:
        """Makes the rows of these tasks; returns their number."""
        bounds, job = self._pack.bounds, self._pack.job
        total = int(bounds[numbers.stop] - bounds[numbers.start])
        done = 0
        for number, checks in pool.run_in_order(encode_rows, self._locate, write_rows, self._tasks(numbers)):
            encoded, starts = self._located.pop(number)
            rows = self._pack.rows(number)
            record = TaskRecord(
                number, rows.start, rows.stop - rows.start, self._pack.sources_check(number), starts, checks,
                encoded.rows, encoded.reasons,
            )  # fmt: skip
            self._log.written(record)
            self.records[number] = record
            done += record.count
            if job.on_progress:
                job.on_progress("packing", done, total)
        return done

    def _tasks(self, numbers: range) -> Iterator[EncodeTask]:
        yield from map(self._pack.task, numbers)

    def _locate(self, encoded: EncodedTask) -> TaskOffsets:
        """Returns the offsets of a task's rows; called in the order of tasks."""
        if encoded.reasons and self._pack.job.on_error == "fail":
            bad = _named(self._pack, encoded.reasons)
            kept = "What was packed so far is kept: the same command continues with it."
            raise SourceError(f"{unreadable(self._pack.job.source, bad, len(self._pack.samples))} {kept}")
        self._located[encoded.number] = encoded, self.ends
        located, self.ends = self._pack.locate(encoded.number, encoded.rows, self.ends)
        return located


def _named(pack: OrderedPack, reasons: dict[int, str]) -> list[tuple[str, str]]:
    """Returns (key, reason) of skipped rows."""
    return [(pack.survey.listing.keys[pack.samples[row]], reason) for row, reason in sorted(reasons.items())]


def _encodings(plan: RaggedPlan, rows: NDArray[np.void]) -> dict[str, int]:
    counts = np.bincount(rows["encoding"], minlength=len(ENCODINGS)).tolist()
    return {name: count for name, count in zip(ENCODINGS, counts, strict=True) if count}


def _notes(pack: OrderedPack, rows: NDArray[np.void]) -> list[str]:
    """Returns notes about the rows that were made."""
    large = sum(
        int(np.sum(rows[stream.name] > stream.chunk_bytes)) for stream in pack.streams if stream.form == "ragged"
    )
    size = f"{pack.plan.chunk_bytes:,} bytes"
    notes = [f"{large} images or masks are larger than a chunk ({size}) and have chunks of their own"] if large else []
    cut_short = pack.samples[rows["row"][rows["missing_eoi"] > 0]].tolist()
    missing_eoi = [pack.survey.listing.keys[sample] for sample in cut_short]
    if missing_eoi:
        notes.append(
            f"{len(missing_eoi)} JPEGs end without their end marker, as a download does that was "
            f"interrupted: {first_few(missing_eoi)}. They can be decoded and were kept, but part of the "
            "picture may be gray or noise."
        )
    return notes


def _converted(pack: OrderedPack, rows: NDArray[np.void]) -> dict[str, int]:
    """Returns the conversions of the survey; those that depend on the encoding without samples skipped since."""
    survey, headers = pack.survey, pack.survey.headers
    assert headers is not None, "a plan is of images"
    expected = source_exceptions(pack.plan, survey.samples, headers)
    others = {name: count for name, count in survey.converted.items() if name not in expected}
    return others | source_exceptions(pack.plan, pack.samples[rows["row"]], headers)
