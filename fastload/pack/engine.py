"""One call of the packer from its listing to the published file; here for rows of one size.

`run_job` begins or continues a pack. Rows of one size know their offset in the file beforehand, so workers decode
chunks straight into it, in any order. Skipped samples leave holes, which are closed before the file gets its metadata.
Rows of varying length go to `fastload.pack.ordered.ordered_engine`.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import FormatError, SourceError
from fastload.format.header import read_header
from fastload.pack.begin import begin, discard, require_overwrite, resume, unchanged_survey
from fastload.pack.compact import close_holes, compact_rows
from fastload.pack.finish import PackReport, chunk_tasks, planned_extents, publish, report_of, write_metadata
from fastload.pack.journal import DONE, SKIPPED, Journal, PackProgress
from fastload.pack.ordered.ordered_engine import pack_ordered
from fastload.pack.ordered.ordered_finish import finished_report
from fastload.pack.pack_options import PackJob, journal_path, output_exists
from fastload.pack.pack_worker import Extents, Worker
from fastload.pack.pool import PackPool
from fastload.pack.survey import Survey, row_order, survey_listing, unreadable
from fastload.sources.listing import Arrays, Listing

# A second thread that copies gains nothing: both then wait for the file's lock (with neighbours on both cores, slower).
_COPY_TASK_BYTES = 8 * 2**20


def run_job(job: PackJob, pool: PackPool, started: float) -> PackReport:
    """Begins or continues a pack, under the journal's lock, and returns the report of the finished file.

    Args:
        started: time.perf_counter() when the call began.
    """
    pool.use(job.listing)
    if job.options.size is None and job.options.mode is None and _only_arrays(job.listing):
        pool.use_this_process()
    with closing(Journal(journal_path(job.output))) as journal:
        try:
            ordered = journal.is_task_log
            if done := finished_report(job, journal, started) if ordered else _finished(job, journal):
                return done
            found = None if ordered else resume(job, journal, pool)
            survey = found[0] if found is not None else _survey(job, pool)
            if found is None and survey.plan is None:
                if ordered and job.part.exists():
                    require_overwrite(job, "it stored images in another way")
                found = begin(job, journal, survey)
        except BaseException:
            if not job.part.exists():
                discard(job, journal)
                journal.remove()  # Nothing was begun, so there is nothing to continue.
            raise
        if found is not None:
            return _pack(job, journal, pool, *found, started)
        assert survey.plan is not None, "begun above where there is none"
        return pack_ordered(job, journal, pool, survey, survey.plan, started)


def _only_arrays(listing: Listing) -> bool:
    masks = listing.masks
    return isinstance(listing.files, Arrays) and (masks is None or isinstance(masks.files, Arrays))


def _survey(job: PackJob, pool: PackPool) -> Survey:
    if job.output.exists() and not job.overwrite and not job.part.exists():
        raise output_exists(job.output)
    return survey_listing(
        job.listing, job.options, pool, source=job.source, on_error=job.on_error, progress=job.on_progress
    )


def _finished(job: PackJob, journal: Journal) -> PackReport | None:
    """Returns the report of a pack that was killed between the file's final name and the removal of its journal."""
    found = journal.read()
    if found is None or not found[2].finished or job.part.exists() or not job.output.exists():
        return None
    started = time.perf_counter()
    head, _, progress = found
    try:
        file = read_header(job.output)
    except FormatError:
        return None
    survey = unchanged_survey(job, found)
    if survey is None or not file.header_digest.startswith(progress.finished):
        return None  # The file is whole, but of another pack than the one asked for now.
    job.meta.unlink(missing_ok=True)
    journal.remove()
    chunks = -(-int(head["num_rows"]) // max(1, file.fields["images"].chunk_rows)) if "images" in file.fields else 0
    skipped = _all_skipped(survey, progress, row_order(survey))
    return report_of(
        job, file, survey.converted, skipped, started=started, images_per_s=0.0, chunks=chunks,
        chunks_kept=chunks, chunks_decoded=0, notes=survey.notes,
    )  # fmt: skip


def _pack(
    job: PackJob,
    journal: Journal,
    pool: PackPool,
    survey: Survey,
    progress: PackProgress,
    extents: Extents | None,
    started: float,
) -> PackReport:
    """Decodes the rows that are not done, closes the holes that skipped ones leave, and publishes the file."""
    rows = row_order(survey)
    chunks = -(-survey.num_samples // survey.chunk_rows) if survey.chunk_rows else 0
    interrupted = progress.closing
    decoded, rate = 0, 0.0
    if extents is None:
        progress.state[:], progress.digest[:] = DONE, xxhash.xxh3_64_intdigest(b"")
    elif not interrupted:
        _check_done_chunks(job, pool, survey, progress, extents, chunks)
        todo = _chunks_to_do(survey, progress)
        decode_started = time.perf_counter()
        images = _decode(job, journal, pool, survey, progress, extents, rows, todo)
        decoded, rate = len(todo), images / max(time.perf_counter() - decode_started, 1e-9)
    _check_skipped(job, survey, progress, rows)
    good = progress.state == DONE
    sources = np.arange(len(rows))
    if not good.all():
        sources = close_holes(good, survey.listing.split[rows], shuffled=job.options.shuffle)
    samples, digests = rows[sources], progress.digest[sources]
    final = planned_extents(survey, len(samples), job.meta)
    if extents is not None and final is not None and (interrupted or len(samples) < len(rows)):
        if not interrupted:
            journal.closing()
        compact_rows(
            survey, job.part, pool, extents, final, sources=sources, samples=samples, digests=digests,
            interrupted=interrupted, progress=job.on_progress,
        )  # fmt: skip
    header_digest = write_metadata(survey, job.part, job.meta, final, samples=samples, digests=digests)
    if job.output.exists() and not job.overwrite:
        raise output_exists(job.output)
    publish(job.part, job.meta, job.output, journal, header_digest)
    return report_of(
        job, read_header(job.output), survey.converted, _all_skipped(survey, progress, rows), started=started,
        images_per_s=rate, chunks=chunks, chunks_kept=0 if extents is None else chunks - decoded,
        chunks_decoded=decoded, notes=survey.notes,
    )  # fmt: skip


def _chunks_to_do(survey: Survey, progress: PackProgress) -> NDArray[np.int64]:
    """Returns the chunks with a row that is neither done nor skipped."""
    return np.unique(np.flatnonzero(progress.state == 0) // survey.chunk_rows)


def _check_done_chunks(
    job: PackJob, pool: PackPool, survey: Survey, progress: PackProgress, extents: Extents, chunks: int
) -> None:
    """Hashes what the journal says is done, and resets rows with another digest: disks may reorder writes."""
    whole = np.setdiff1d(np.arange(chunks), _chunks_to_do(survey, progress))
    tasks = chunk_tasks(survey, job.part, extents, survey.num_samples, whole, digests=progress.digest)
    for done, (rows, right) in enumerate(pool.run(Worker.check, tasks)):
        progress.state[rows[~right & (progress.state[rows] == DONE)]] = 0
        if job.on_progress:
            job.on_progress("checking what an earlier run packed", done + 1, len(whole))


def _decode(
    job: PackJob,
    journal: Journal,
    pool: PackPool,
    survey: Survey,
    progress: PackProgress,
    extents: Extents,
    rows: NDArray[np.int64],
    chunks: NDArray[np.int64],
) -> int:
    """Decodes these chunks into the file and journals each; returns the number of images decoded."""
    done = 0
    total = sum(min(survey.num_samples, (c + 1) * survey.chunk_rows) - c * survey.chunk_rows for c in chunks.tolist())
    arrays: dict[str, NDArray[Any]] = {"samples": rows}
    if survey.listing.digests is not None and survey.target is not None and survey.target.fit is None:
        arrays["digests"] = survey.listing.digests[rows]
    if survey.headers is not None and survey.must_keep_size:
        arrays["headers"] = survey.headers[rows]
    # Rows that are only copied take less time than a journal record, so small chunks are copied together.
    task_bytes = _COPY_TASK_BYTES if _only_arrays(job.listing) else 0
    tasks = chunk_tasks(survey, job.part, extents, len(rows), chunks, task_bytes=task_bytes, **arrays)
    for result in pool.run(Worker.pack, tasks):
        for row in result.reasons.keys() & progress.reasons.keys():
            result.reasons[row] = progress.reasons[row]  # Skipped by an earlier call; its chunk is decoded again.
        if result.reasons and job.on_error == "fail":
            bad = [(survey.listing.keys[rows[row]], reason) for row, reason in sorted(result.reasons.items())]
            kept = "Chunks packed so far are kept: the same command continues with them."
            raise SourceError(f"{unreadable(job.source, bad, len(rows))} {kept}")
        journal.rows(result.rows, result.digests, result.reasons)
        progress.state[result.rows] = DONE
        progress.digest[result.rows] = result.digests
        for row, reason in result.reasons.items():
            progress.state[row], progress.reasons[row] = SKIPPED, reason
        done += len(result.rows)
        if job.on_progress:
            job.on_progress("packing", done, total)
    return done


def _check_skipped(job: PackJob, survey: Survey, progress: PackProgress, rows: NDArray[np.int64]) -> None:
    """Raises SourceError if an earlier call skipped rows and this one must not, or if no row is left."""
    if progress.reasons and (job.on_error == "fail" or len(progress.reasons) == len(rows)):
        bad = [(survey.listing.keys[rows[row]], reason) for row, reason in sorted(progress.reasons.items())]
        raise SourceError(unreadable(job.source, bad, len(rows)))


def _all_skipped(survey: Survey, progress: PackProgress, rows: NDArray[np.int64]) -> tuple[tuple[str, str], ...]:
    """Returns (key, reason) of samples left out while listing, reading headers and decoding."""
    return (
        *survey.skipped,
        *((survey.listing.keys[rows[row]], text) for row, text in sorted(progress.reasons.items())),
    )
