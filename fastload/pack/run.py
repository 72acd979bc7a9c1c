"""One call of the packer from its listing to the published file: begun or continued, decoded, settled, finished."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import FormatError, SourceError
from fastload.format import read_header
from fastload.pack.chunk_work import Worker
from fastload.pack.finish import chunk_tasks, planned_places, publish, write_metadata
from fastload.pack.holes import close_holes
from fastload.pack.journal import DONE, SKIPPED, Claims, Journal
from fastload.pack.ordered.finish import finished_report
from fastload.pack.ordered.log import TaskLog
from fastload.pack.ordered.run import pack_ordered
from fastload.pack.report import PackReport, report_of
from fastload.pack.resume import PackJob, begin, continued, discard, exists, give_up, journal_path, unchanged_survey
from fastload.pack.settle import settle_rows
from fastload.pack.survey import Survey, row_order, survey_listing, unreadable
from fastload.pack.tasks import Places
from fastload.pack.workers import WorkerPool
from fastload.sources.listing import Arrays, Listing

# A second thread that copies gains nothing: both then wait for the file's lock (with neighbours on both cores, slower).
_RUN_BYTES = 8 * 2**20


def run_job(job: PackJob, pool: WorkerPool, started: float) -> PackReport:
    """Begin or continue, under the journal's lock."""
    pool.use(job.listing)
    if job.options.size is None and job.options.mode is None and _only_arrays(job.listing):
        pool.stay_here()
    with closing(Journal(journal_path(job.output))) as journal:
        try:
            if done := _finished(job, journal) or finished_report(job, journal, started):
                return done
            in_order = TaskLog(journal).is_one()
            found = None if in_order else continued(job, journal, pool)
            survey = found[0] if found is not None else _survey(job, pool)
            if found is None and survey.plan is None:
                if in_order and job.part.exists():
                    give_up(job, "it stored images in another way")
                found = begin(job, journal, survey)
        except BaseException:
            if not job.part.exists():
                discard(job, journal)
                journal.remove()  # Nothing was begun, so there is nothing to continue.
            raise
        if found is not None:
            return _pack(job, journal, pool, *found, started)
        assert survey.plan is not None, "what has none was begun"
        return pack_ordered(job, journal, pool, survey, survey.plan, started)


def _survey(job: PackJob, pool: WorkerPool) -> Survey:
    if job.output.exists() and not job.overwrite and not job.part.exists():
        raise exists(job.output)
    return survey_listing(
        job.listing, job.options, pool, source=job.source, on_error=job.on_error, progress=job.progress
    )


def _only_arrays(listing: Listing) -> bool:
    masks = listing.masks
    return isinstance(listing.files, Arrays) and (masks is None or isinstance(masks.files, Arrays))


def _pack(
    job: PackJob,
    journal: Journal,
    pool: WorkerPool,
    survey: Survey,
    claims: Claims,
    places: Places | None,
    started: float,
) -> PackReport:
    """Decode what is not done yet, close the holes, and publish."""
    rows = row_order(survey)
    kept = decoded = 0
    rate = 0.0
    if places is None:
        claims.state[:], claims.digest[:] = DONE, xxhash.xxh3_64_intdigest(b"")
    elif not claims.closing:
        _check_claims(job, pool, survey, claims, places)
        todo = _chunks_to_do(survey, claims)
        kept, decoded = _num_chunks(survey) - len(todo), len(todo)
        decode_started = time.perf_counter()
        images = _decode(job, journal, pool, survey, claims, places, rows, todo)
        rate = images / max(time.perf_counter() - decode_started, 1e-9)
    _check_skips(job, survey, claims, rows)
    sources = close_holes(claims.state == DONE, survey.listing.split[rows], shuffled=job.options.shuffle)
    samples, digests = rows[sources], claims.digest[sources]
    again = claims.closing
    settled = planned_places(survey, len(samples), job.meta)
    if places is not None and settled is not None and (again or len(samples) < len(rows)):
        if not again:
            journal.closing()
        settle_rows(
            survey, job.part, pool, places, settled, sources=sources, samples=samples, digests=digests, again=again,
            progress=job.progress,
        )  # fmt: skip
    header_digest = write_metadata(survey, job.part, job.meta, settled, samples=samples, digests=digests)
    if job.output.exists() and not job.overwrite:
        raise exists(job.output)
    publish(job.part, job.meta, job.output, journal, header_digest)
    skipped = _all_skipped(survey, claims, rows)
    return report_of(
        job, read_header(job.output), survey.converted, skipped, started=started, images_per_s=rate,
        chunks=_num_chunks(survey), chunks_kept=kept if not again else _num_chunks(survey), chunks_decoded=decoded,
        notes=survey.notes,
    )  # fmt: skip


def _num_chunks(survey: Survey) -> int:
    return -(-survey.num_samples // survey.chunk_rows) if survey.chunk_rows else 0


def _chunks_to_do(survey: Survey, claims: Claims) -> NDArray[np.int64]:
    """Chunks with a row that is not decided."""
    return np.unique(np.flatnonzero(claims.state == 0) // survey.chunk_rows)


def _check_claims(job: PackJob, pool: WorkerPool, survey: Survey, claims: Claims, places: Places) -> None:
    """Hash what the journal says is done, and forget what is not so: order of writes to disk is not to be trusted."""
    whole = np.setdiff1d(np.arange(_num_chunks(survey)), _chunks_to_do(survey, claims))
    tasks = chunk_tasks(survey, job.part, places, survey.num_samples, whole, digests=claims.digest)
    for done, (rows, right) in enumerate(pool.run(Worker.check, tasks)):
        claims.state[rows[~right & (claims.state[rows] == DONE)]] = 0
        if job.progress:
            job.progress("checking what an earlier run packed", done + 1, len(whole))


def _decode(
    job: PackJob,
    journal: Journal,
    pool: WorkerPool,
    survey: Survey,
    claims: Claims,
    places: Places,
    rows: NDArray[np.int64],
    chunks: NDArray[np.int64],
) -> int:
    """Decode these chunks into their places, journaling each; images decoded."""
    done = 0
    total = sum(min(survey.num_samples, (c + 1) * survey.chunk_rows) - c * survey.chunk_rows for c in chunks.tolist())
    arrays: dict[str, NDArray[Any]] = {"samples": rows}
    if survey.listing.digests is not None and survey.target is not None and survey.target.fit is None:
        arrays["digests"] = survey.listing.digests[rows]
    if survey.headers is not None and survey.must_keep_size:
        arrays["headers"] = survey.headers[rows]
    # What is only copied takes less time than a record of it, so small chunks are copied together.
    run_bytes = _RUN_BYTES if _only_arrays(job.listing) else 0
    tasks = chunk_tasks(survey, job.part, places, len(rows), chunks, task_bytes=run_bytes, **arrays)
    for result in pool.run(Worker.pack, tasks):
        for row in result.reasons.keys() & claims.reasons.keys():
            result.reasons[row] = claims.reasons[row]  # known before: it was tried again with its chunk only
        if result.reasons and job.on_error == "fail":
            bad = [(survey.listing.keys[rows[row]], reason) for row, reason in sorted(result.reasons.items())]
            kept = "Chunks packed so far are kept: the same command continues with them."
            raise SourceError(f"{unreadable(job.source, bad, len(rows))} {kept}")
        journal.rows(result.rows, result.digests, result.reasons)
        claims.state[result.rows] = DONE
        claims.digest[result.rows] = result.digests
        for row, reason in result.reasons.items():
            claims.state[row], claims.reasons[row] = SKIPPED, reason
        done += len(result.rows)
        if job.progress:
            job.progress("packing", done, total)
    return done


def _check_skips(job: PackJob, survey: Survey, claims: Claims, rows: NDArray[np.int64]) -> None:
    """Refuse what an earlier call skipped when this one must not, and a file without a single row."""
    if claims.reasons and (job.on_error == "fail" or len(claims.reasons) == len(rows)):
        bad = [(survey.listing.keys[rows[row]], reason) for row, reason in sorted(claims.reasons.items())]
        raise SourceError(unreadable(job.source, bad, len(rows)))


def _finished(job: PackJob, journal: Journal) -> PackReport | None:
    """The report of a pack that was killed between the file's final name and the removal of its journal."""
    found = journal.read()
    if found is None or not found[2].finished or job.part.exists() or not job.output.exists():
        return None
    started = time.perf_counter()
    head, _, claims = found
    try:
        file = read_header(job.output)
    except FormatError:
        return None
    survey = unchanged_survey(job, found)
    if survey is None or not file.header_digest.startswith(claims.finished):
        return None  # The file is whole, but of another pack than the one asked for now.
    job.meta.unlink(missing_ok=True)
    journal.remove()
    chunks = -(-int(head["num_rows"]) // max(1, file.fields["images"].chunk_rows)) if "images" in file.fields else 0
    skipped = _all_skipped(survey, claims, row_order(survey))
    return report_of(
        job, file, survey.converted, skipped, started=started, images_per_s=0.0, chunks=chunks,
        chunks_kept=chunks, chunks_decoded=0, notes=survey.notes,
    )  # fmt: skip


def _all_skipped(survey: Survey, claims: Claims, rows: NDArray[np.int64]) -> tuple[tuple[str, str], ...]:
    """(key, reason) of what was left out when the source was listed, when headers were read and when decoding."""
    return (*survey.skipped, *((survey.listing.keys[rows[row]], text) for row, text in sorted(claims.reasons.items())))
