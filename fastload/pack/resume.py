"""Beginning a pack: anew, or where an interrupted call of the same pack stopped."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.decode import decoder_versions
from fastload.errors import OutputError, ResumeError, SourceError
from fastload.format import IMAGES_OFFSET
from fastload.layout import writer_name
from fastload.pack.decided import decide
from fastload.pack.finish import end_of, planned_places
from fastload.pack.headers import read_headers
from fastload.pack.journal import DONE, SKIPPED, Claims, Journal, source_table
from fastload.pack.kept_survey import survey_of, survey_to_json
from fastload.pack.options import PackOptions, Progress
from fastload.pack.ordered.log import TaskLog
from fastload.pack.reserve import check_space, reserve
from fastload.pack.survey import Survey, move_to, row_order, unreadable
from fastload.pack.tasks import HEADERS, Place, Places
from fastload.pack.workers import WorkerPool
from fastload.sources.listing import Listing, OnError, first_few

SYNC_BYTES = 256 * 2**20
"""A pack of so much is worth the wait until its journal's head is on disk; for a small one that is most of the time."""


@dataclass(frozen=True)
class PackJob:
    """What one call of pack_images was asked to do."""

    source: str
    output: Path
    listing: Listing
    options: PackOptions
    on_error: OnError
    overwrite: bool
    progress: Progress | None

    @property
    def part(self) -> Path:
        """The file under its name while it is being packed."""
        return self.output.with_name(self.output.name + ".part")

    @property
    def meta(self) -> Path:
        """The sparse twin in which HDF5 builds the metadata."""
        return self.output.with_name(self.output.name + ".meta")

    @property
    def masks(self) -> Path:
        """What holds the rows of masks while rows are packed in order."""
        return self.output.with_name(self.output.name + ".masks")


def journal_path(output: Path) -> Path:
    """Where the journal of an output lies."""
    return output.with_name(output.name + ".journal")


def continued(job: PackJob, journal: Journal, pool: WorkerPool) -> tuple[Survey, Claims, Places | None] | None:
    """The survey, what an interrupted call has already done, and where rows are packed (None without images).

    Returns:
        None when there is nothing to continue, or it may be overwritten.

    Raises:
        ResumeError: what lies there belongs to another source, option or release, and may not be overwritten.
        SourceError: as survey_listing; of images that were repaired meanwhile, only these are looked at.
    """
    if not job.part.exists():
        return None
    identity = identity_of(job)
    table = source_table(job.listing.keys, job.listing.sizes, job.listing.mtimes_ns)
    found = journal.read()
    changed = "its journal is missing or damaged"
    if found is not None:
        head, old_table, claims = found
        changed = what_changed(identity, table, head, old_table, job)
        if not changed:
            survey = survey_of(head["survey"], job.listing, job.options, claims)
            rows = _changed_rows(table, old_table, survey, claims)
            changed = _changed_after_packing(table, old_table, survey, claims, rows)
        if not changed:
            wait_for_orphans(job.part)
            if len(rows):
                survey = _look_again(job, journal, pool, survey, claims, rows, table)
            return survey, claims, _places_from_json(head["places"])
    give_up(job, changed)
    return None


def give_up(job: PackJob, changed: str) -> None:
    """Agree that an unfinished pack, which cannot be continued for this reason, is overwritten.

    Raises:
        ResumeError: the call did not say so.
    """
    if not job.overwrite:
        raise ResumeError(
            f"{job.part}: left by an interrupted pack that this call cannot continue: {changed}. Start again with "
            f"`--overwrite`, or remove {job.part.name} and {journal_path(job.output).name}."
        )


def discard(job: PackJob, journal: Journal) -> None:
    """Remove what an unfinished pack left, but for its journal; `.masks` only where that says that it is ours."""
    for path in (*own_masks(job, journal), job.part):
        if path.exists():
            wait_for_orphans(path)
        path.unlink(missing_ok=True)


def own_masks(job: PackJob, journal: Journal) -> list[Path]:
    """`.masks`, where it is there and the journal says that it is of the pack."""
    return [job.masks] if job.masks.exists() and TaskLog(journal).names(job.masks) else []


def begin(job: PackJob, journal: Journal, survey: Survey) -> tuple[Survey, Claims, Places | None]:
    """The survey, no claims, and where rows are packed (None without images).

    Raises:
        OutputError: the disk is too full.
    """
    discard(job, journal)
    check_space(job.output, survey)
    places = planned_places(survey, survey.num_samples, job.meta)
    head = {
        **identity_of(job),
        "num_rows": survey.num_samples,
        "survey": survey_to_json(survey),
        "places": [[place.base, place.row_bytes] for place in places.all] if places else [],
    }
    table = source_table(job.listing.keys, job.listing.sizes, job.listing.mtimes_ns)
    journal.begin(head, table, sync=survey.bytes_needed >= SYNC_BYTES)
    try:
        reserve(job.part, end_of(survey, survey.num_samples, places) if places else IMAGES_OFFSET)
    except OSError:
        job.part.unlink(missing_ok=True)
        journal.remove()
        raise
    return survey, Claims.none(survey.num_samples), places


def unchanged_survey(job: PackJob, found: tuple[dict[str, Any], NDArray[np.void], Claims]) -> Survey | None:
    """The survey in a journal, if it is of the very pack that is asked for now; else None."""
    head, old_table, claims = found
    table = source_table(job.listing.keys, job.listing.sizes, job.listing.mtimes_ns)
    if what_changed(identity_of(job), table, head, old_table, job):
        return None
    survey = survey_of(head["survey"], job.listing, job.options, claims)
    return None if len(_changed_rows(table, old_table, survey, claims)) else survey


def exists(output: Path) -> OutputError:
    """The error that an output is there already."""
    return OutputError(f"{output}: exists. Choose another name, or replace it with `--overwrite`.")


def identity_of(job: PackJob) -> dict[str, Any]:
    """What must be the same for a pack to be continued, besides the sources themselves."""
    fields = xxhash.xxh3_64()
    for name, column in sorted(job.listing.columns.items()):
        fields.update(f"{name} {column.values.dtype.str} {column.values.shape} {sorted(column.attrs.items())}".encode())
        fields.update(np.ascontiguousarray(column.values).data)
    fields.update(np.ascontiguousarray(job.listing.split).data)
    if (masks := job.listing.masks) is not None:
        fields.update(f"masks {masks.names} {masks.ignore_index} {sorted(masks.attrs.items())}".encode())
        fields.update(np.ascontiguousarray(masks.present).data)
    return {
        "release": writer_name(),
        "decoder": decoder_versions(),
        "layout": job.listing.layout,
        "options": job.options.to_dict(),
        "fields": fields.hexdigest(),
    }


def what_changed(
    identity: Mapping[str, Any], table: NDArray[np.void], head: Mapping[str, Any], old: NDArray[np.void], job: PackJob
) -> str:
    """What differs from the interrupted pack, in words; "" when nothing does."""
    for name in ("release", "decoder", "layout"):
        if head[name] != identity[name]:
            return f"the {name} was {head[name]}, now it is {identity[name]}"
    told, now = head["options"], identity["options"]
    for name in {**told, **now}:
        if told.get(name) != now.get(name):
            return f"option {name} was {told.get(name)}, now it is {now.get(name)}"
    keys, old_keys = set(table["key"].tolist()), set(old["key"].tolist())
    if keys != old_keys or len(table) != len(old):
        new = [job.listing.keys[i] for i in np.flatnonzero(~np.isin(table["key"], old["key"]))[:3]]
        which = f", among the new ones {', '.join(new)}" if new else ""
        gone = len(old_keys - keys)
        return f"the source had {len(old)} images, of which {gone} are gone; now it has {len(table)}{which}"
    if head["fields"] != identity["fields"]:
        return "labels, splits or other fields of the source changed"
    return ""


def _changed_rows(table: NDArray[np.void], old: NDArray[np.void], survey: Survey, claims: Claims) -> NDArray[np.int64]:
    """Rows whose source is no longer the one that the journal knows, int64, ascending."""
    known, rows = old.copy(), row_order(survey)
    for row, (source, _) in claims.changed.items():
        known["size"][rows[row]], known["mtime_ns"][rows[row]] = source["size"], source["mtime_ns"]
    return np.flatnonzero(np.isin(rows, np.flatnonzero(table != known))).astype(np.int64)


def _changed_after_packing(
    table: NDArray[np.void], old: NDArray[np.void], survey: Survey, claims: Claims, changed: NDArray[np.int64]
) -> str:
    """Which image among the changed rows changed after it was packed, in words; "" when none did.

    One that is not packed yet may have been repaired meanwhile, as the error about it asked for.
    """
    rows = row_order(survey)
    for row in changed[(claims.state[changed] == DONE) | claims.closing][:1].tolist():
        source, _ = claims.changed.get(row, (old[rows[row]], None))
        before, now = int(source["size"]), int(table[rows[row]]["size"])
        what = "its size" if before != now else "its time of modification, or what it holds"
        return (
            f"the source {survey.listing.keys[rows[row]]} changed after it was packed ({what}: {before} bytes then, "
            f"{now} now)"
        )
    return ""


def _look_again(
    job: PackJob,
    journal: Journal,
    pool: WorkerPool,
    survey: Survey,
    claims: Claims,
    changed: NDArray[np.int64],
    table: NDArray[np.void],
) -> Survey:
    """The survey with the headers that images have now which changed before they were packed; the journal is told.

    Raises:
        ResumeError: what images become would be another thing with them.
        SourceError: a header cannot be read, unless such images are skipped.
    """
    samples = row_order(survey)[changed]
    headers = np.zeros(len(job.listing), HEADERS)
    if survey.target is not None and survey.headers is not None:
        found, _, bad = read_headers(job.listing, pool, job.progress, samples)
        reasons = {
            int(row): bad[sample] for row, sample in zip(changed, samples.tolist(), strict=True) if sample in bad
        }
        if bad and job.on_error == "fail":
            named = [(job.listing.keys[sample], bad[sample]) for sample in sorted(bad)]
            raise SourceError(
                f"{unreadable(job.source, named, len(job.listing))} What was packed so far is kept: the same command "
                f"continues with it."
            )
        headers = survey.headers.copy()
        headers[samples] = found[samples]
        survey = _decided_again(job, survey, headers, samples)
    else:
        reasons = {}
    journal.changed(changed, table[samples], headers[samples])
    claims.state[changed] = 0
    for row in changed.tolist():
        claims.reasons.pop(row, None)
    if reasons:
        rows = np.array(sorted(reasons), np.int64)
        journal.rows(rows, np.zeros(len(rows), np.uint64), reasons)
        claims.state[rows] = SKIPPED
        claims.reasons.update(reasons)
    return survey


def _decided_again(job: PackJob, survey: Survey, headers: NDArray[np.void], samples: NDArray[np.int64]) -> Survey:
    """The survey with these headers, those of some samples new."""
    goal = survey.target
    assert goal is not None, "only images have headers"
    before = survey.headers if survey.headers is not None else headers
    known = headers[survey.samples]
    known = known[known["height"] > 0]
    if not len(known):
        return replace(survey, headers=headers)  # Nothing is left to pack, which is an error of its own.
    why, decision = "", None
    try:
        decision = decide(known, job.options, job.source)
    except SourceError as exc:
        why = str(exc)
    if decision is None or decision.target != goal:
        names = [
            f"{job.listing.keys[sample]} ({_described(headers[sample])})"
            for sample in samples.tolist()
            if headers[sample] != before[sample]
        ]
        raise ResumeError(
            f"{job.part}: left by an interrupted pack into images of {goal.height}x{goal.width} with {goal.channels} "
            f"channels of {8 * goal.dtype.itemsize} bits. {first_few(names)} changed since then, so that not all "
            f"images would become that now{': ' + why if why else ''}. Bring back images of the former kind, or start "
            f"again with `--overwrite`."
        )
    return replace(survey, listing=move_to(job.listing, headers, goal), headers=headers, sizes=decision.sizes)


def _described(header: np.void) -> str:
    return f"{header['height']}x{header['width']}, {header['channels']} channels of {header['bits']} bits"


def _places_from_json(kept: list[list[int]]) -> Places | None:
    return Places(*(Place(base, row_bytes) for base, row_bytes in kept)) if kept else None


def wait_for_orphans(part: Path) -> None:
    """Wait until no worker of a killed packer has the file open any more; each ends with its parent, within moments."""
    fd = os.open(part, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)
