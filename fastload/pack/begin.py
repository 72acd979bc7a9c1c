"""The beginning of a pack: a new one, or where an interrupted call of the same pack stopped.

`resume` compares the journal with what is asked for now and returns the survey and the rows that are done; `begin`
starts over and reserves the file's space. The checks that both engines share come after them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import OutputError, ResumeError, SourceError
from fastload.format.header import IMAGES_OFFSET
from fastload.format.writer import writer_name
from fastload.images.decode import decoder_versions
from fastload.pack.decisions import decide
from fastload.pack.fill import HEADERS
from fastload.pack.finish import end_of_pixels, planned_extents
from fastload.pack.journal import DONE, SKIPPED, Journal, PackProgress, source_table, survey_from_json, survey_to_json
from fastload.pack.ordered.record_log import TaskLog
from fastload.pack.pack_options import PackJob, journal_path
from fastload.pack.pack_worker import Extent, Extents
from fastload.pack.pool import PackPool
from fastload.pack.survey import Survey, read_headers, row_order, unreadable, with_moved_coordinates
from fastload.sources.listing import first_few

SYNC_BYTES = 256 * 2**20
"""The journal's head is synced to disk for packs of so many bytes; for a small one that would take most of the time."""

_SMALLER = "`fastload pack` makes smaller files with `--size`, `--max-size` or `--store source`"


def resume(job: PackJob, journal: Journal, pool: PackPool) -> tuple[Survey, PackProgress, Extents | None] | None:
    """Returns the survey, the rows that an interrupted call has done, and where rows are packed (None without images).

    Returns:
        None when there is nothing to continue, or when it may be overwritten.

    Raises:
        ResumeError: what lies there belongs to another source, option or release, and may not be overwritten.
        SourceError: as survey_listing, about images that changed since then; only these are read again.
    """
    if not job.part.exists():
        return None
    table = _sources_of(job)
    found = journal.read()
    changed = "its journal is missing or damaged"
    if found is not None:
        head, old_table, progress = found
        changed = what_changed(identity_of(job), table, head, old_table, job)
        if not changed:
            survey = survey_from_json(head["survey"], job.listing, job.options, progress)
            rows = _changed_rows(table, old_table, survey, progress)
            changed = _changed_after_packing(table, old_table, survey, progress, rows)
        if not changed:
            wait_for_orphans(job.part)
            if len(rows):
                survey = _read_again(job, journal, pool, survey, progress, rows, table)
            return survey, progress, _extents_from_json(head["places"])
    require_overwrite(job, changed)
    return None


def begin(job: PackJob, journal: Journal, survey: Survey) -> tuple[Survey, PackProgress, Extents | None]:
    """Starts a new pack; returns the survey, no row done, and where rows are packed (None without images).

    Raises:
        OutputError: the disk is too full.
    """
    discard(job, journal)
    check_space(job.output, survey)
    extents = planned_extents(survey, survey.num_samples, job.meta)
    head = {
        **identity_of(job),
        "num_rows": survey.num_samples,
        "survey": survey_to_json(survey),
        "places": [[extent.base, extent.row_bytes] for extent in extents.all] if extents else [],
    }
    journal.begin(head, _sources_of(job), sync=survey.bytes_needed >= SYNC_BYTES)
    try:
        reserve(job.part, end_of_pixels(survey, survey.num_samples, extents) if extents else IMAGES_OFFSET)
    except OSError:
        job.part.unlink(missing_ok=True)
        journal.remove()
        raise
    return survey, PackProgress.none(survey.num_samples), extents


def unchanged_survey(job: PackJob, found: tuple[dict[str, Any], NDArray[np.void], PackProgress]) -> Survey | None:
    """Returns the survey in a journal if it is of the very pack that is asked for now, else None."""
    head, old_table, progress = found
    table = _sources_of(job)
    if what_changed(identity_of(job), table, head, old_table, job):
        return None
    survey = survey_from_json(head["survey"], job.listing, job.options, progress)
    return None if len(_changed_rows(table, old_table, survey, progress)) else survey


def _sources_of(job: PackJob) -> NDArray[np.void]:
    return source_table(job.listing.keys, job.listing.sizes, job.listing.mtimes_ns)


def _changed_rows(
    table: NDArray[np.void], old: NDArray[np.void], survey: Survey, progress: PackProgress
) -> NDArray[np.int64]:
    """Returns the rows whose source file is not the one that the journal knows, int64, ascending."""
    known, rows = old.copy(), row_order(survey)
    for row, (source, _) in progress.changed.items():
        known["size"][rows[row]], known["mtime_ns"][rows[row]] = source["size"], source["mtime_ns"]
    return np.flatnonzero(np.isin(rows, np.flatnonzero(table != known))).astype(np.int64)


def _changed_after_packing(
    table: NDArray[np.void], old: NDArray[np.void], survey: Survey, progress: PackProgress, changed: NDArray[np.int64]
) -> str:
    """Returns which of the changed rows was packed before its source changed, in words; "" when none was.

    An image that is not packed yet may have been repaired meanwhile, as the error about it asked for.
    """
    rows = row_order(survey)
    for row in changed[(progress.state[changed] == DONE) | progress.closing][:1].tolist():
        source, _ = progress.changed.get(row, (old[rows[row]], None))
        before, now = int(source["size"]), int(table[rows[row]]["size"])
        what = "its size" if before != now else "its time of modification, or what it holds"
        return (
            f"the source {survey.listing.keys[rows[row]]} changed after it was packed ({what}: {before} bytes then, "
            f"{now} now)"
        )
    return ""


def _read_again(
    job: PackJob,
    journal: Journal,
    pool: PackPool,
    survey: Survey,
    progress: PackProgress,
    changed: NDArray[np.int64],
    table: NDArray[np.void],
) -> Survey:
    """Reads the headers of images that changed before they were packed; updates the journal, returns the new survey.

    Raises:
        ResumeError: with them, all images would become something else.
        SourceError: a header cannot be read, unless such images are skipped.
    """
    samples = row_order(survey)[changed]
    headers = np.zeros(len(job.listing), HEADERS)
    if survey.target is not None and survey.headers is not None:
        found, _, bad = read_headers(job.listing, pool, job.on_progress, samples)
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
        survey = _with_headers(job, survey, headers, samples)
    else:
        reasons = {}
    journal.changed(changed, table[samples], headers[samples])
    progress.state[changed] = 0
    for row in changed.tolist():
        progress.reasons.pop(row, None)
    if reasons:
        rows = np.array(sorted(reasons), np.int64)
        journal.rows(rows, np.zeros(len(rows), np.uint64), reasons)
        progress.state[rows] = SKIPPED
        progress.reasons.update(reasons)
    return survey


def _with_headers(job: PackJob, survey: Survey, headers: NDArray[np.void], samples: NDArray[np.int64]) -> Survey:
    """Returns the survey with other headers of these samples, if images still become what they became before."""
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
    moved = with_moved_coordinates(job.listing, headers, goal)
    return replace(survey, listing=moved, headers=headers, sizes=decision.sizes)


def _described(header: np.void) -> str:
    return f"{header['height']}x{header['width']}, {header['channels']} channels of {header['bits']} bits"


def _extents_from_json(found: list[list[int]]) -> Extents | None:
    return Extents(*(Extent(base, row_bytes) for base, row_bytes in found)) if found else None


def require_overwrite(job: PackJob, changed: str) -> None:
    """Raises ResumeError about an unfinished pack that cannot be continued, unless it may be overwritten."""
    if not job.overwrite:
        raise ResumeError(
            f"{job.part}: left by an interrupted pack that this call cannot continue: {changed}. Start again with "
            f"`--overwrite`, or remove {job.part.name} and {journal_path(job.output).name}."
        )


def discard(job: PackJob, journal: Journal) -> None:
    """Removes the files of an unfinished pack, but for its journal."""
    for path in (*own_masks_files(job, journal), job.part):
        if path.exists():
            wait_for_orphans(path)
        path.unlink(missing_ok=True)


def own_masks_files(job: PackJob, journal: Journal) -> list[Path]:
    """Returns `OUT.h5.masks` if it is there and the journal says that the packer made it, else nothing."""
    return [job.masks] if job.masks.exists() and TaskLog(journal).names(job.masks) else []


def wait_for_orphans(part: Path) -> None:
    """Waits until no worker of a killed packer has the file open; each ends with its parent, within moments."""
    fd = os.open(part, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def identity_of(job: PackJob) -> dict[str, Any]:
    """Returns what must be the same for a pack to be continued, besides the source files."""
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
    """Returns the first difference to the interrupted pack, in words; "" when there is none.

    Args:
        identity, table: `identity_of` and the source table now.
        head, old: the same from the journal.
    """
    for name in ("release", "decoder", "layout"):
        if head[name] != identity[name]:
            return f"the {name} was {head[name]}, now it is {identity[name]}"
    then, now = head["options"], identity["options"]
    for name in {**then, **now}:
        if then.get(name) != now.get(name):
            return f"option {name} was {then.get(name)}, now it is {now.get(name)}"
    keys, old_keys = set(table["key"].tolist()), set(old["key"].tolist())
    if keys != old_keys or len(table) != len(old):
        new = [job.listing.keys[i] for i in np.flatnonzero(~np.isin(table["key"], old["key"]))[:3]]
        which = f", among the new ones {', '.join(new)}" if new else ""
        gone = len(old_keys - keys)
        return f"the source had {len(old)} images, of which {gone} are gone; now it has {len(table)}{which}"
    if head["fields"] != identity["fields"]:
        return "labels, splits or other fields of the source changed"
    return ""


def check_space(output: Path, survey: Survey, extra: int = 0, done: float = 0) -> None:
    """Raises OutputError if the disk has too little free space.

    Args:
        extra: bytes needed besides the rows until the file is finished.
        done: fraction of the rows that lie there already, 0 to 1.
    """
    free, needed = free_bytes(output), int(survey.bytes_needed * (1 - done)) + extra
    if needed > free:
        raise disk_full(
            f"{output}: needs {needed:,} bytes for {survey.num_samples:,} images, {free:,} are free. Free some, or "
            f"choose another disk; {_SMALLER}."
        )


def free_bytes(output: Path) -> int:
    """Returns the bytes free on the file system of an output.

    Raises:
        OutputError: its folder is missing.
    """
    try:
        return shutil.disk_usage(output.absolute().parent).free
    except OSError as exc:
        raise OutputError(
            f"{output}: its folder {output.absolute().parent} does not exist or cannot be read "
            f"({os.strerror(exc.errno or 0)}). Make it first."
        ) from exc


def disk_full(message: str) -> OutputError:
    """Returns the error of a disk without room, its errno ENOSPC."""
    error = OutputError(message)
    error.errno = errno.ENOSPC
    return error


def reserve(part: Path, num_bytes: int, *, again: bool = False) -> None:
    """Creates the file with all its space, so that a full disk is noticed before the first image is decoded.

    Args:
        again: the file exists, and its content stays.

    Raises:
        OutputError: it cannot be created, or the space is not there.
    """
    try:
        fd = os.open(part, os.O_RDWR | (0 if again else os.O_CREAT | os.O_EXCL), 0o666)
    except OSError as exc:
        raise OutputError(f"{part}: cannot be written ({exc.strerror}). Choose another folder.") from exc
    try:
        if _in_memory(fd):
            # tmpfs would hand out its pages here and now, 0.25 s per GB during which no worker decodes; its free
            # space has just been checked.
            os.ftruncate(fd, num_bytes)
        else:
            os.posix_fallocate(fd, 0, num_bytes)
    except OSError as exc:
        raise OutputError(
            f"{part}: {num_bytes:,} bytes cannot be reserved ({exc.strerror}). Free some space, or choose another "
            f"disk; {_SMALLER}."
        ) from exc
    finally:
        os.close(fd)


def _in_memory(fd: int) -> bool:
    """Whether an open file lies on tmpfs, by its device number in the kernel's table of mounts."""
    device = os.fstat(fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.split()[2] == number and " - tmpfs " in line for line in mounts)
