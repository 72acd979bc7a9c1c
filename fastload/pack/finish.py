"""The end of a pack: the complete file is made (`complete`), gets its final name, and a report.

Each step can be repeated after a kill or a power failure at any instant.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import FormatError, SourceError
from fastload.format.header import PackedFile, read_header
from fastload.format.ragged import ENCODINGS, index_names
from fastload.pack.begin import changed_since, own_files, remove
from fastload.pack.complete import complete_file
from fastload.pack.decisions import source_exceptions
from fastload.pack.encode import ROW
from fastload.pack.engine import PackTasks
from fastload.pack.journal import Journal, JournalContents, TaskRecord, source_table
from fastload.pack.pack_options import PackJob, journal_path, output_exists
from fastload.pack.survey import unreadable
from fastload.system.files import mode_for, output_errors, sync_folder
from fastload.system.text import counted, format_bytes, object_text, seconds_text

_NOT_OF_THE_SAMPLE = ("images", "split", "key", "digest", "digest_fields")


@dataclass(frozen=True)
class PackReport:
    """The result of packing.

    Attributes:
        path: the finished file.
        layout: name of the source's layout.
        num_samples: rows of the file.
        image_shape: (H, W, C), 0 where images differ; () without images.
        dtype: "uint8" or "uint16"; "" without images.
        fields: names of the file's other datasets with a value for each sample: masks, labels, ...
        splits: name -> number of rows.
        converted: how many images were changed in kind, by a description such as "gray -> RGB".
        skipped: (key, reason) of each sample left out.
        notes: what was recognised in the source, what was absent or ignored, and what was chosen.
        file_bytes: size of the file.
        seconds: time this call took.
        images_per_s: images this call packed over `seconds`: listing, headers and finishing are part of it.
        chunks: chunks of the file as planned; where images have no chunks of their own, tasks of the packer.
        chunks_kept: those that an earlier, interrupted call had packed.
        chunks_decoded: those that this call packed.
        store: the encoding of images, such as "raw" or "jpeg:90".
        encodings: number of rows that are "raw", "jpeg" and "zstd".
        pixel_bytes: bytes of all decoded images and masks; 0 without images.
        decoded_per_s: `images_per_s` over the time that decoding and writing them took.
        warned: (key, warning) of each JPEG that was packed though libjpeg warns of it, as of corrupt data. Of those
            kept as they are (store="source") only some are looked at: that lack their end, or hold many zeros.
        num_shards: shards of the file, which is their index; None for one that holds its rows itself.
    """

    path: Path
    layout: str
    num_samples: int
    image_shape: tuple[int, ...]
    dtype: str
    fields: tuple[str, ...]
    splits: dict[str, int]
    converted: dict[str, int]
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    file_bytes: int
    seconds: float
    images_per_s: float
    chunks: int
    chunks_kept: int
    chunks_decoded: int
    store: str = "raw"
    encodings: dict[str, int] = field(default_factory=dict)
    pixel_bytes: int = 0
    decoded_per_s: float = 0.0
    warned: tuple[tuple[str, str], ...] = ()
    num_shards: int | None = None

    def __repr__(self) -> str:
        what = [str(self.path), counted(self.num_samples, "sample")]
        what += (
            [f"{self.dtype} ({', '.join(str(side or '?') for side in self.image_shape)})"] if self.image_shape else []
        )
        what += [format_bytes(self.file_bytes)]
        what += [] if self.num_shards is None else [counted(self.num_shards, "shard")]
        how = [f"layout {self.layout}", *self.fields, *(f"{name} {rows:,}" for name, rows in self.splits.items())]
        how += [f"{len(self.skipped):,} skipped"] if self.skipped else []
        how += [counted(len(self.warned), "warning")] if self.warned else []
        how += [f"{self.images_per_s:,.0f} images/s, {seconds_text(self.seconds)}", counted(len(self.notes), "note")]
        return object_text("PackReport", what, how)


def finish(tasks: PackTasks, records: Mapping[int, TaskRecord], journal: Journal, threads: int) -> PackReport:
    """Makes the complete file, synced to disk, gives it its final name, removes what only packing needed, and reports.

    The records are of all tasks; `threads` compress. Raises SourceError if no sample could be packed; OutputError
    if the disk is full, or the output was made meanwhile: what was packed stays.
    """
    job, survey = tasks.job, tasks.survey
    made = [records[number] for number in sorted(records)]
    skipped = tasks.named({row: reason for record in made for row, reason in record.reasons.items()})
    warnings = {row: warning for record in made for row, warning in record.warnings.items()}
    if tasks.streams:
        rows = np.concatenate([record.rows for record in made])
    else:  # samples without images
        rows = np.zeros(survey.num_samples, ROW)
        rows["row"], rows["digest"] = np.arange(len(rows)), xxhash.xxh3_64_intdigest(b"")
    if not len(rows):
        raise SourceError(unreadable(job, skipped, survey.num_samples))
    path, header_digest = complete_file(tasks, rows, tasks.end_of(records), threads)
    if job.output.exists() and not job.overwrite:
        raise output_exists(job.output)
    counts = np.bincount(rows["encoding"], minlength=len(ENCODINGS)).tolist() if tasks.streams else []
    height, width, channels = rows["shape"].astype(np.int64).T
    value_bytes = 0 if survey.plan is None else survey.plan.dtype.itemsize
    mask_bytes = 0 if survey.plan is None or len(tasks.streams) < 2 else survey.plan.mask_dtype.itemsize
    # The part of the report that no reader of the file could find out.
    done = {
        "converted": _converted(tasks, rows),
        "skipped": (*survey.skipped, *skipped),
        "warned": tasks.named({row: warnings.get(row, "") for row in rows["row"][rows["warned"] > 0].tolist()}),
        "notes": (*survey.notes, *_notes(tasks, rows)),
        "store": "raw" if survey.plan is None else str(survey.plan.option),
        "encodings": {name: count for name, count in zip(ENCODINGS, counts, strict=False) if count},
        "chunks": tasks.chunks_of(made),
        "pixel_bytes": int((height * width * (channels * value_bytes + mask_bytes)).sum()),
        **job.reported,
    }
    journal.finished({**done, "header_digest": header_digest, "path": path.name, "sources": _sources_check(job)})
    with output_errors(
        f"{job.output}: cannot get its name ({{}}). What was packed is kept: run the same command again."
    ):
        _copy_permissions(job.output, path)
        os.replace(path, job.output)
        sync_folder(job.output.parent)
    report = report_of(job, read_header(job.output), done)  # While there is a journal: the disk may fail here, too.
    _clean_up(job, [job.part, *(Path(stream.path) for stream in tasks.streams)], journal)
    return report


def _copy_permissions(old: Path, new: Path) -> None:
    """Gives a file the permissions of the file that it replaces, and its group, where that is allowed."""
    with suppress(FileNotFoundError):
        before = os.stat(old)
        with suppress(PermissionError):
            os.chown(new, -1, before.st_gid)
        with suppress(PermissionError):  # as on FAT, which has none
            os.chmod(new, mode_for(old))


def _clean_up(job: PackJob, files: Iterable[Path], journal: Journal) -> None:
    """Removes what only packing needed, the journal last: it says whose the others are. A part's journal stays."""
    parts = [path for part in job.parts for path in (part, journal_path(part))]
    there = [path for path in dict.fromkeys([*files, *parts]) if os.path.lexists(path)]
    for path in there:
        remove(path)
    if there:
        with output_errors(f"{job.output.parent}: cannot be written ({{}}). Run the same command again."):
            sync_folder(job.output.parent)
    if not job.is_part:
        journal.remove()


def finished_report(job: PackJob, journal: Journal, found: JournalContents | None) -> PackReport | None:
    """Returns the report of a pack that was killed between the file's final name and the removal of its journal.

    Of a job with parts these say whether it is the same one: the samples of a file that it replaced are gone.
    """
    if found is None or found.finished is None or not job.output.exists():
        return None
    done = dict(found.finished)
    same_sources, header_digest = done.pop("sources") == _sources_check(job), done.pop("header_digest")
    unpublished = job.output.with_name(done.pop("path")).exists()
    if job.parts:
        same = found.head.get("parts") == [part.name for part in job.parts]
    else:
        same = same_sources and not changed_since(job, found.head, found.sources)
    if unpublished or not same:
        return None
    with suppress(FormatError):
        file = read_header(job.output)
        if file.header_digest == header_digest:
            report = report_of(job, file, done)
            _clean_up(job, own_files(job, found), journal)
            return report
    return None


def _sources_check(job: PackJob) -> int:
    return xxhash.xxh3_64_intdigest(source_table(job.listing).tobytes())


def report_of(job: PackJob, file: PackedFile, done: dict[str, Any]) -> PackReport:
    """Returns the report of a finished file, as if this call had packed nothing; done may have passed through JSON."""
    images = file.fields.get("images")
    hidden = {*_NOT_OF_THE_SAMPLE, *(part for name in file.ragged for part in index_names(name))}
    named = {name: tuple((key, text) for key, text in done.get(name, ())) for name in ("skipped", "warned")}
    return PackReport(
        path=job.output,
        layout=job.listing.layout,
        num_samples=file.num_rows,
        image_shape=images.shape if images else (),
        dtype=str(images.dtype) if images else "",
        fields=tuple(name for name in file.fields if name not in hidden),
        splits={name: len(rows) for name, rows in file.splits.items()},
        file_bytes=file.identity.size,
        seconds=0.0,
        images_per_s=0.0,
        chunks_kept=done["chunks"],
        chunks_decoded=0,
        **{**done, **named, "notes": tuple(done["notes"])},
    )


def _notes(tasks: PackTasks, rows: NDArray[np.void]) -> list[str]:
    """Returns notes about the rows that were made."""
    ragged = [stream for stream in tasks.streams if stream.spec is None]
    large = sum(int(np.sum(rows[stream.name] > stream.chunk_bytes)) for stream in ragged)
    notes = []
    if large:
        size = f"{ragged[0].chunk_bytes:,} bytes"
        notes.append(f"{large} images or masks are larger than a chunk ({size}) and have chunks of their own")
    return notes


def _converted(tasks: PackTasks, rows: NDArray[np.void]) -> dict[str, int]:
    """Returns the conversions of the survey; those that depend on the encoding without samples skipped since."""
    survey, plan, headers = tasks.survey, tasks.survey.plan, tasks.survey.headers
    if plan is None or headers is None:
        return survey.converted
    expected = source_exceptions(plan, survey.samples, headers)
    others = {name: count for name, count in survey.converted.items() if name not in expected}
    return others | source_exceptions(plan, survey.order[rows["row"]], headers)
