"""A packed file back to files: PNG images in class folders, or in one folder beside a CSV table.

Rows that are stored as JPEG become files as they are.

What these cannot say lies beside them in `fastload.json` and `fields.npz`, so that `fastload pack` makes the same rows.

Every row is checked against its digest while it is read. While the work is under way the folder holds the hidden file
`.fastload-export`; a call that was interrupted is continued by the same call.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fastload.cpus import available_cpus
from fastload.errors import FormatError, OptionError, OutputError
from fastload.export.plan import MANIFEST, ExportLayout, plan_export
from fastload.export.png import encode_png
from fastload.export.sidecar import fields_bytes, sidecar_text
from fastload.export.table import table_text
from fastload.export.write import Job, Progress, sampled_files, unfinished, write_file, write_images
from fastload.format import PackedFile
from fastload.layout import writer_name
from fastload.open_readers import close_readers
from fastload.repack.choose import Choice, choose_rows
from fastload.repack.listing import list_packed, regroup
from fastload.repack.stored import KeptRows
from fastload.sources.exported import FIELDS, SIDECAR
from fastload.sources.listing import Listing, first_few

__all__ = ["ExportReport", "export_file"]

Format = Literal["png"]

JOURNAL = ".fastload-export"
_ENCODERS: dict[str, tuple[str, Callable[[NDArray[Any]], bytes]]] = {"png": (".png", encode_png)}
"""Suffix and encoder of each format."""
_JPEG_SUFFIX = ".jpg"

_SAMPLED = 8
_DISK_BLOCK = 4096


@dataclass(frozen=True)
class ExportReport:
    """What was exported.

    Attributes:
        folder: the folder.
        layout: "folder" or "csv".
        num_images: images in it.
        num_masks: masks in it.
        kept: images that an interrupted call had written.
        splits: name -> number of images.
        notes: what folders and table alone do not say, or say otherwise; `fastload.json` beside them does.
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


def export_file(
    file: str | Path,
    folder: str | Path,
    *,
    split: str | None = None,
    layout: ExportLayout = "auto",
    format: Format = "png",
    workers: int | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the images of a packed file as files that `fastload pack` reads back to the same rows.

    Args:
        file: a packed file, or another HDF5 file with a dataset `images`.
        folder: folder to make; one that exists has to be empty, or hold an unfinished export of the same.
        split: only this split.
        layout: "folder": class folders, below folders of splits where there are several; "csv": the folder `images`,
            `masks` where there are any, and the table `manifest.csv` with all the rest; "auto": folders where they say
            everything.
        format: of what is not stored as JPEG: "png", which loses nothing.
        workers: threads that encode, by default one per CPU.
        progress: called with (stage, done, total).

    Raises:
        MissingFileError, FormatError: the file is not there, cannot be read, or holds no images.
        SourceError: rows of the file are damaged; it names them.
        OptionError: an option has no meaning for this file.
        OutputError: the folder holds other files, or cannot be written.
    """
    started = time.perf_counter()
    if format not in get_args(Format):
        raise OptionError(f"format={format!r} is not known; accepted: {', '.join(get_args(Format))}.")
    if workers is not None and workers < 0:
        raise OptionError(f"workers={workers}: needs at least 0.")
    header, listing = list_packed(file)
    _check_pixels(header, listing)
    if split is not None:
        listing = regroup(listing, choose_rows(listing, Choice(splits=(split,)), header.path))
    suffix, encode = _ENCODERS[format]
    jpegs = np.flatnonzero(listing.files.is_jpeg).tolist() if isinstance(listing.files, KeptRows) else []
    plan = plan_export(listing, layout, suffix, dict.fromkeys(jpegs, _JPEG_SUFFIX))
    job = Job(listing, plan, Path(folder), encode, header.path)
    about = _about(header, split, plan.layout, format)
    _check_folder(job.folder, about)
    notes = [*listing.notes, *plan.notes]
    if jpegs:
        notes.append(
            f"{len(jpegs):,} images are stored as JPEG, and written as they are; `fastload pack --store source` keeps "
            f"them so."
        )
    try:
        _check_space(job)
        with _locked(job.folder, about) as resumed:
            kept = write_images(job, resumed, max(1, available_cpus() if workers is None else workers), progress)
            notes += _write_words(job)
            (job.folder / JOURNAL).unlink()
    finally:
        close_readers()
    seconds = time.perf_counter() - started
    counts = np.bincount(listing.split, minlength=len(listing.split_names)).tolist()
    return ExportReport(
        folder=job.folder,
        layout=plan.layout,
        num_images=len(listing),
        num_masks=len(plan.masks),
        kept=kept,
        splits=dict(zip(listing.split_names, counts, strict=True)),
        notes=tuple(notes),
        seconds=seconds,
        images_per_s=(len(listing) - kept) / max(seconds, 1e-9),
    )


def _write_words(job: Job) -> list[str]:
    """Write what the images do not say; notes on what the table leaves out."""
    table, left_out = None, list[str]()
    if job.plan.layout == "csv":
        text, left_out = table_text(job.listing, job.plan)
        table = text.encode("utf-8", errors="backslashreplace")
        write_file(job.folder / MANIFEST, table)
    write_file(job.folder / FIELDS, fields_bytes(job.listing))
    write_file(job.folder / SIDECAR, sidecar_text(job.listing, job.plan, table))
    return left_out


def _check_pixels(header: PackedFile, listing: Listing) -> None:
    if listing.files is None:
        arrays = [name for name in header.fields if name not in ("split", "key", "digest", "digest_fields")]
        raise FormatError(
            f"{header.path}: holds no images to export, only arrays ({first_few(arrays)}). Read these with h5py: "
            f"`h5py.File({header.path.name!r})[{arrays[0]!r}][:]`."
        )


def _about(header: PackedFile, split: str | None, layout: str, format: str) -> str:
    """What must be the same for an export to be continued."""
    about = {"release": writer_name(), "file": header.header_digest, "split": split, "layout": layout, "format": format}
    return json.dumps(about, sort_keys=True)


def _check_space(job: Job) -> None:
    """Refuse a disk that is too full, as far as a few images tell; what is there already counts as free."""
    folder = job.folder if job.folder.is_dir() else job.folder.absolute().parent
    rows = np.unique(np.linspace(0, len(job.listing) - 1, _SAMPLED).astype(np.int64))
    blocks = sum(-(-len(data) // _DISK_BLOCK) for data in sampled_files(job, rows)) / len(rows)
    needed = int(blocks * _DISK_BLOCK * len(job.listing))
    needed += sum(column.values.nbytes for column in job.listing.columns.values())
    there = sum(path.stat().st_size for path in folder.rglob("*.*")) if (folder / JOURNAL).is_file() else 0
    free = shutil.disk_usage(folder).free
    if needed > free + there:
        raise OutputError(
            errno.ENOSPC,
            f"needs about {needed:,} bytes for {len(job.listing):,} images, {free:,} are free. Free some, or choose "
            f"another disk or one `--split`",
            str(job.folder),
        )


def _check_folder(folder: Path, about: str) -> bool:
    """Whether an interrupted call of the same export has left its work there; makes nothing.

    Raises:
        OutputError: it holds something else, or cannot be made.
    """
    journal = folder / JOURNAL
    if folder.is_dir():
        try:
            there = {path.name for path in folder.iterdir()} - {unfinished(journal).name}
            found = journal.read_text(errors="replace") if journal.name in there else None
        except OSError as exc:
            raise OutputError(f"{folder}: cannot be read ({exc.strerror}). Choose another folder.") from exc
        if there and found is None:
            raise OutputError(f"{folder}: is not empty. Give a new folder; nothing is ever written among other files.")
        if found == "" and there == {journal.name}:
            return False  # another call is about to begin, or was killed there
        if there and found != about:
            raise OutputError(
                f"{folder}: holds an unfinished export of another file, split or layout. Finish that one, or remove "
                f"the folder."
            )
        return bool(there)
    if folder.exists():
        raise OutputError(f"{folder}: is a file. Give a folder.")
    if not folder.absolute().parent.is_dir():
        raise OutputError(f"{folder}: its folder {folder.absolute().parent} does not exist. Make it first.")
    return False


@contextmanager
def _locked(folder: Path, about: str) -> Iterator[bool]:
    """The folder, made where it is absent, for this call alone; whether an interrupted call left its work there.

    Raises:
        OutputError: another process exports into it, or it cannot be written.
    """
    journal = folder / JOURNAL
    try:
        folder.mkdir(exist_ok=True)
        fd = os.open(journal, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as exc:
        raise OutputError(f"{folder}: cannot be written ({exc.strerror}). Choose another folder.") from exc
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise OutputError(
                f"{folder}: another process is exporting into it. Wait for it, stop it, or give another folder."
            ) from exc
        except OSError:
            pass  # a file system without locks
        if not journal.exists() or not os.path.samestat(os.fstat(fd), os.stat(journal)):
            raise OutputError(f"{folder}: another process has just finished an export there. Give a new folder.")
        new = os.fstat(fd).st_size == 0
        if new and {path.name for path in folder.iterdir()} != {JOURNAL}:
            journal.unlink()
            raise OutputError(f"{folder}: another process has just written there. Give a new folder.")
        resumed = _check_folder(folder, about)
        if not resumed:
            try:
                os.pwrite(fd, about.encode(), 0)
                os.fsync(fd)
            except OSError as exc:
                raise OutputError(f"{journal}: cannot be written ({exc.strerror}). Free some space.") from exc
        yield resumed
    finally:
        os.close(fd)
