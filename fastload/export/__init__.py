"""Exporting: a packed file back to image files, in class folders or in one folder with a CSV table.

A packed file (or another HDF5 file with images) becomes a folder that `fastload pack` packs to the same
rows. Images become PNG files, those stored as JPEG their own bytes. `fastload.json` and `fields.npz` hold what files
and table cannot say. Every row is checked against its digest. While the work is unfinished, the folder holds the hidden
file `.fastload-export`, and the same call continues it, also after a power failure: it goes when all is on the disk.

Read `plan` first (which file each row becomes), then `write` (threads write the images) and `table` (the CSV table and
the two extra files). Imports `repack` for the listing of a packed file, `read` and below; never the loader or torch.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import numpy as np

from fastload.errors import FormatError, OptionError, OutputError
from fastload.export.plan import MANIFEST, plan_export, plan_format
from fastload.export.table import fields_bytes, metadata_texts, sample_fields, sidecar_text, table_text
from fastload.export.write import KEPT, Job, image_file, write_file, write_images, write_shards
from fastload.format.header import PackedFile
from fastload.format.writer import writer_name
from fastload.options import from_arguments, takes
from fastload.options.keywords import ExportKeywords
from fastload.options.repack import Choice, ExportOptions
from fastload.read.checked import close_readers
from fastload.remote.open_url import open_packed
from fastload.remote.urls import FileName, local_path
from fastload.repack.packed_listing import choose_rows, list_packed, regroup
from fastload.repack.packed_rows import RaggedRows
from fastload.sources.exported import FIELDS, SIDECAR
from fastload.sources.listing import first_few
from fastload.system.files import open_output, output_errors, sync_files_below, sync_folder, write_at
from fastload.system.machine import worker_count

__all__ = ["ExportReport", "export_file"]

SHARD_BYTES = 2**30
JOURNAL = ".fastload-export"
_SAMPLED = 8
_DISK_BLOCK = 4096


@dataclass(frozen=True)
class ExportReport:
    """The result of exporting.

    Attributes:
        folder: the folder with the files.
        layout: "folder" or "csv"; or the format, if it is another than "folder".
        num_images: number of images.
        num_masks: number of masks.
        kept: images that an interrupted call had written.
        splits: name -> number of images.
        notes: what folders and table alone do not say, or say differently; `fastload.json` says it.
        seconds: time this call took.
        images_per_s: images this call wrote over that time.
    """

    folder: Path
    layout: str
    num_images: int
    num_masks: int
    kept: int
    splits: dict[str, int]
    notes: tuple[str, ...]
    seconds: float
    images_per_s: float


@takes(ExportOptions)
def export_file(file: FileName, folder: str | Path, **options: Unpack[ExportKeywords]) -> ExportReport:
    """Writes the images of a packed file as files: those stored as JPEG as they are, all others as PNG.

    Args:
        file: a packed file or its URL, or another HDF5 file with a dataset `images`.
        folder: folder to make; if it exists, it must be empty or hold an unfinished export of the same file.
        {options}

    Raises:
        MissingFileError, FormatError: the file is not there, cannot be read, or holds no images.
        SourceError: rows of the file are damaged; it names them.
        OptionError: an option is not accepted for this file.
        OutputError: the folder holds other files, or cannot be written.
    """
    started = time.perf_counter()
    asked = from_arguments(ExportOptions, options, of="export_file")
    for name, given, of in (
        ("layout", asked.layout != "auto", "folder"),
        ("shard-bytes", asked.shard_bytes, "webdataset"),
    ):
        if given and asked.format != of:
            raise OptionError(f"`--{name}` means nothing to the format {asked.format}; it is for {of}. Leave it out.")
    threads = max(1, worker_count(asked.workers))
    local_path(folder, "is a URL, and images are exported to a folder of this machine. Give its path.")
    with open_packed(file) as header:
        return _export(header, Path(folder), asked, threads, started)


def _export(header: PackedFile, folder: Path, asked: ExportOptions, threads: int, started: float) -> ExportReport:
    split, layout, format = asked.split, asked.layout, asked.format
    listing = list_packed(header)[1]
    if listing.files is None:
        arrays = [name for name in header.fields if name not in ("split", "key", "digest", "digest_fields")]
        raise FormatError(
            f"{header.path}: holds no images to export, only arrays ({first_few(arrays)}). Read these with h5py: "
            f"`h5py.File({header.path.name!r})[{arrays[0]!r}][:]`."
        )
    if split is not None:
        listing = regroup(listing, choose_rows(listing, Choice(splits=(split,)), header.path))
    jpegs = np.flatnonzero(listing.files.is_jpeg).tolist() if isinstance(listing.files, RaggedRows) else []
    try:
        plan = plan_export(listing, layout, jpegs) if format == "folder" else plan_format(listing, format, jpegs)
    except OptionError as exc:
        raise OptionError(f"{header.path}: {exc}") from exc
    job = Job(listing, plan, folder, header.path)
    # What must be the same for an export to be continued.
    same = {"release": writer_name(), "file": header.header_digest, "split": split, "layout": plan.layout}
    identity = json.dumps({**same, "shard_bytes": asked.shard_bytes}, sort_keys=True)
    _check_folder(job.folder, identity)
    notes = [*listing.notes, *plan.notes]
    if jpegs:
        notes.append(
            f"{len(jpegs):,} images are stored as JPEG, and written as they are; `fastload pack --store source` keeps "
            f"them so."
        )
    if format == "imagefolder" and header.fields["images"].dtype.itemsize == 2:
        notes.append("PNGs have 16 bits a channel, which torchvision's default loader does not read: give it another.")
    if format != "folder" and isinstance(listing.files, RaggedRows) and (turned := int(listing.files.is_turned.sum())):
        notes.append(
            f"{turned:,} of these are upright only after their EXIF orientation, which not all readers apply "
            f"(torchvision's ImageFolder does not)."
        )
    try:
        _check_space(job)
        with _locked(job.folder, identity) as resumed:
            if format == "webdataset":
                fields = sample_fields(listing, notes)
                kept = write_shards(job, fields, asked.shard_bytes or SHARD_BYTES, resumed, threads, asked.progress)
            else:
                kept = write_images(job, resumed, threads, asked.progress)
                notes += _write_tables(job)
            with output_errors(f"{job.folder}: cannot be completed ({{}}). {KEPT}"):
                sync_files_below(job.folder)
                (job.folder / JOURNAL).unlink()  # Where a power failure brings it back, the same call ends here again.
    finally:
        close_readers()
    seconds = time.perf_counter() - started
    counts = np.bincount(listing.split, minlength=len(listing.split_names)).tolist()
    return ExportReport(
        job.folder, plan.layout, num_images=len(listing), num_masks=len(plan.masks), kept=kept, notes=tuple(notes),
        splits=dict(zip(listing.split_names, counts, strict=True)), seconds=seconds,
        images_per_s=(len(listing) - kept) / max(seconds, 1e-9),
    )  # fmt: skip


def _write_tables(job: Job) -> list[str]:
    """Writes the files other than images, and returns notes on what a table leaves out."""
    plan, notes, table = job.plan, list[str](), None
    if plan.layout == "hf":
        texts, notes = metadata_texts(job.listing, plan)
        for name, text in texts.items():
            write_file(job.folder / name, text)
    if plan.layout == "csv":
        table, notes = table_text(job.listing, plan)
        write_file(job.folder / MANIFEST, table)
    if plan.layout in ("folder", "csv"):
        write_file(job.folder / FIELDS, fields_bytes(job.listing))
        write_file(job.folder / SIDECAR, sidecar_text(job.listing, plan, table))
    return notes


def _check_space(job: Job) -> None:
    """Raises OutputError for a disk too full, estimated from a few images; files there already count as free space."""
    folder = job.folder if job.folder.is_dir() else job.folder.absolute().parent
    rows = np.unique(np.linspace(0, len(job.listing) - 1, _SAMPLED).astype(np.int64))
    blocks = sum(-(-len(image_file(job, row)) // _DISK_BLOCK) for row in rows.tolist()) / len(rows)
    needed = int(blocks * _DISK_BLOCK * len(job.listing))
    needed += sum(column.values.nbytes for column in job.listing.columns.values())
    there = sum(path.stat().st_size for path in folder.rglob("*.*")) if (folder / JOURNAL).is_file() else 0
    free = shutil.disk_usage(folder).free
    if needed > free + there:
        error = OutputError(
            f"{job.folder}: needs about {needed:,} bytes for {len(job.listing):,} images, {free:,} are free. Free "
            f"some, or choose another disk or one `--split`."
        )
        error.errno = errno.ENOSPC
        raise error


def _check_folder(folder: Path, identity: str) -> bool:
    """Whether an interrupted call of the same export left files there; raises OutputError for anything else in it."""
    journal = folder / JOURNAL
    if not folder.absolute().parent.is_dir():
        raise OutputError(f"{folder}: its folder {folder.absolute().parent} does not exist. Make it first.")
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise OutputError(f"{folder}: is a file. Give a folder.")
    try:
        there = {path.name for path in folder.iterdir()}
        found = None
        if JOURNAL in there:
            with os.fdopen(open_output(journal, os.O_RDONLY), encoding="utf-8", errors="replace") as file:
                found = file.read()
    except OutputError:
        raise
    except OSError as exc:
        raise OutputError(f"{folder}: cannot be read ({exc.strerror}). Choose another folder.") from exc
    if not there or (there == {JOURNAL} and not str(found).endswith("}")):
        return False  # Another call is about to begin, or was killed there.
    if found is None:
        raise OutputError(f"{folder}: is not empty. Give a new folder; nothing is ever written among other files.")
    if found != identity:
        raise OutputError(
            f"{folder}: holds an unfinished export of another file, split or layout. Wait for it if it is in progress, "
            f"finish it by its command, or remove the folder."
        )
    return True


@contextmanager
def _locked(folder: Path, identity: str) -> Iterator[bool]:
    """Creates the folder and locks it for this call; yields whether an interrupted call left files there.

    OutputError: another process exports into it, or it cannot be written.
    """
    journal = folder / JOURNAL
    with output_errors(f"{folder}: cannot be written ({{}}). Choose another folder."):
        folder.mkdir(exist_ok=True)
        fd = open_output(journal, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise OutputError(
                f"{folder}: another process is exporting into it. Wait for it, stop it, or give another folder."
            ) from exc
        except OSError:
            pass  # A file system without locks.
        if os.fstat(fd).st_size == 0 and {path.name for path in folder.iterdir()} != {JOURNAL}:
            with output_errors(f"{journal}: cannot be removed ({{}}). Remove it."):
                journal.unlink(missing_ok=True)
            raise OutputError(f"{folder}: another process has just written there. Give a new folder.")
        resumed = _check_folder(folder, identity)
        if not resumed:
            with output_errors(
                f"{journal}: cannot be written ({{}}). Free some space, then run the same command again."
            ):
                os.ftruncate(fd, 0)
                write_at(fd, identity.encode(), 0)
                os.fsync(fd)
                sync_folder(folder)
        yield resumed
    finally:
        os.close(fd)
