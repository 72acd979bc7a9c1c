"""Beginning a pack: anew, or where an interrupted call of the same pack stopped."""

from __future__ import annotations

import base64
import errno
import fcntl
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.decode import Target, decoder_versions
from fastload.errors import OutputError, ResumeError
from fastload.format import IMAGES_OFFSET
from fastload.layout import writer_name
from fastload.pack.chunk_work import Place, Places
from fastload.pack.finish import end_of, planned_places
from fastload.pack.journal import DONE, Claims, Journal, source_table
from fastload.pack.moved import move_columns
from fastload.pack.options import PackOptions, Progress
from fastload.pack.survey import Survey, all_but, free_bytes, row_order, survey_listing
from fastload.pack.workers import WorkerPool
from fastload.sources.listing import Listing, OnError


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


def journal_path(output: Path) -> Path:
    """Where the journal of an output lies."""
    return output.with_name(output.name + ".journal")


def begin(job: PackJob, journal: Journal, pool: WorkerPool) -> tuple[Survey, Claims, Places | None]:
    """The survey, what an interrupted call has already done, and where rows are packed (None without images).

    Raises:
        ResumeError: what lies there belongs to another source, option or release, and may not be overwritten.
        OutputError: the disk is too full, or the output appeared meanwhile.
        SourceError: as survey_listing.
    """
    identity = _identity(job)
    table = source_table(job.listing.keys, job.listing.sizes, job.listing.mtimes_ns)
    found = journal.read()
    if job.part.exists():
        changed = "its journal is missing or damaged"
        if found is not None:
            head, old_table, claims = found
            changed = _changed(identity, table, head, old_table, job)
            if not changed:
                survey = _survey_of(head, job)
                changed = _changed_after_packing(table, old_table, survey, claims)
            if not changed:
                _wait_for_orphans(job.part)
                return survey, claims, _places_from_json(head["places"])
        if not job.overwrite:
            raise ResumeError(
                f"{job.part}: left by an interrupted pack that this call cannot continue: {changed}. Start again with "
                f"`--overwrite`, or remove {job.part.name} and {journal.path.name}."
            )
        _wait_for_orphans(job.part)
    if job.output.exists() and not job.overwrite:
        raise exists(job.output)
    survey = survey_listing(
        job.listing, job.options, pool, source=job.source, on_error=job.on_error, progress=job.progress
    )
    job.part.unlink(missing_ok=True)
    _check_space(job.output, survey)
    places = planned_places(survey, survey.num_samples, job.meta)
    head = {
        **identity,
        "num_rows": survey.num_samples,
        "survey": _survey_to_json(survey),
        "places": [[place.base, place.row_bytes] for place in places.all] if places else [],
    }
    journal.begin(head, table)
    try:
        _reserve(job.part, end_of(survey, survey.num_samples, places) if places else IMAGES_OFFSET)
    except OSError:
        job.part.unlink(missing_ok=True)
        journal.remove()
        raise
    return survey, Claims.none(survey.num_samples), places


def unchanged_survey(job: PackJob, found: tuple[dict[str, Any], NDArray[np.void], Claims]) -> Survey | None:
    """The survey in a journal, if it is of the very pack that is asked for now; else None."""
    head, old_table, claims = found
    table = source_table(job.listing.keys, job.listing.sizes, job.listing.mtimes_ns)
    if _changed(_identity(job), table, head, old_table, job):
        return None
    survey = _survey_of(head, job)
    return None if _changed_after_packing(table, old_table, survey, claims) else survey


def exists(output: Path) -> OutputError:
    """The error that an output is there already."""
    return OutputError(f"{output}: exists. Choose another name, or replace it with `--overwrite`.")


def _identity(job: PackJob) -> dict[str, Any]:
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


def _changed(
    identity: Mapping[str, Any], table: NDArray[np.void], head: Mapping[str, Any], old: NDArray[np.void], job: PackJob
) -> str:
    """What differs from the interrupted pack, in words; "" when nothing does."""
    for name in ("release", "decoder", "layout"):
        if head[name] != identity[name]:
            return f"the {name} was {head[name]}, now it is {identity[name]}"
    for name, value in identity["options"].items():
        if head["options"].get(name) != value:
            return f"option {name} was {head['options'].get(name)}, now it is {value}"
    keys, old_keys = set(table["key"].tolist()), set(old["key"].tolist())
    if keys != old_keys or len(table) != len(old):
        new = [job.listing.keys[i] for i in np.flatnonzero(~np.isin(table["key"], old["key"]))[:3]]
        which = f", among the new ones {', '.join(new)}" if new else ""
        gone = len(old_keys - keys)
        return f"the source had {len(old)} images, of which {gone} are gone; now it has {len(table)}{which}"
    if head["fields"] != identity["fields"]:
        return "labels, splits or other fields of the source changed"
    return ""


def _changed_after_packing(table: NDArray[np.void], old: NDArray[np.void], survey: Survey, claims: Claims) -> str:
    """Which image changed after it was packed, in words; "" when none did.

    One that is not packed yet may have been repaired meanwhile, as the error about it asked for; one that was left
    out is then looked at again.
    """
    rows = row_order(survey)
    changed = np.isin(rows, np.flatnonzero(table != old))
    for row in np.flatnonzero(changed & ((claims.state == DONE) | claims.closing))[:1].tolist():
        before, now = old[rows[row]], table[rows[row]]
        what = "its size" if before["size"] != now["size"] else "its modification time"
        return (
            f"the source {survey.listing.keys[rows[row]]} changed after it was packed ({what}: {before['size']} bytes "
            f"then, {now['size']} now)"
        )
    claims.state[changed] = 0
    for row in np.flatnonzero(changed).tolist():
        claims.reasons.pop(row, None)
    return ""


def _survey_to_json(survey: Survey) -> dict[str, Any]:
    target, frames = survey.target, survey.frames
    left_out = all_but(len(survey.listing), survey.samples)
    return {
        "left_out": left_out.tolist(),
        "target": target and [target.height, target.width, target.channels, target.dtype.str, target.fit],
        "frames": "" if frames is None else base64.b64encode(zlib.compress(frames.astype("<i4").tobytes())).decode(),
        "sizes": [[h, w, n] for (h, w), n in survey.sizes.items()],
        "converted": survey.converted,
        "skipped": [list(pair) for pair in survey.skipped],
    }


def _survey_of(head: Mapping[str, Any], job: PackJob) -> Survey:
    kept, listing = head["survey"], job.listing
    target = frames = None
    if kept["target"]:
        height, width, channels, dtype, fit = kept["target"]
        target = Target(height=height, width=width, channels=channels, dtype=np.dtype(dtype), fit=fit)
    if kept["frames"] and target:
        frames = np.frombuffer(zlib.decompress(base64.b64decode(kept["frames"])), "<i4").reshape(-1, 2)
        listing = move_columns(listing, frames, target)
    return Survey(
        listing=listing,
        samples=all_but(len(listing), kept["left_out"]),
        options=job.options,
        target=target,
        frames=frames,
        sizes={(h, w): n for h, w, n in kept["sizes"]},
        converted=kept["converted"],
        skipped=tuple((key, reason) for key, reason in kept["skipped"]),
    )


def _places_from_json(kept: list[list[int]]) -> Places | None:
    return Places(*(Place(base, row_bytes) for base, row_bytes in kept)) if kept else None


def _wait_for_orphans(part: Path) -> None:
    """Wait until no worker of a killed packer has the file open any more; each ends with its parent, within moments."""
    fd = os.open(part, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def _check_space(output: Path, survey: Survey) -> None:
    free = free_bytes(output)
    if survey.bytes_needed > free:
        raise OutputError(
            errno.ENOSPC,
            f"needs {survey.bytes_needed:,} bytes for {survey.num_samples} images, {free:,} are free. Free some, or "
            f"choose a smaller `--size` or another disk",
            str(output),
        )


def _reserve(part: Path, num_bytes: int) -> None:
    """Create the file with all its space, so that a full disk is known before the first image is decoded."""
    try:
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
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
            f"{part}: {num_bytes:,} bytes cannot be reserved ({exc.strerror}). Free some space, choose a smaller "
            f"`--size`, or another disk."
        ) from exc
    finally:
        os.close(fd)


def _in_memory(fd: int) -> bool:
    """Whether an open file lies on tmpfs, by the device number in the kernel's table of mounts."""
    device = os.fstat(fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.split()[2] == number and " - tmpfs " in line for line in mounts)
