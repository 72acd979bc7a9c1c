"""A packed file back to files: PNG images in class folders, or in one folder beside a CSV table.

Every row is checked against its digest while it is read. While the work is under way the folder holds the hidden file
`.fastload-export`; a call that was interrupted is continued by the same call.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fastload.cpus import available_cpus
from fastload.decode import Target, decode_image
from fastload.errors import FormatError, ImageError, OptionError, OutputError, SourceError
from fastload.export.plan import MANIFEST, ExportLayout, ExportPlan, plan_export
from fastload.export.png import encode_png
from fastload.export.table import table_text
from fastload.format import PackedFile
from fastload.layout import writer_name
from fastload.pack.chunk_work import row_digests_of
from fastload.repack.choose import Choice, choose_rows
from fastload.repack.listing import list_packed, regroup
from fastload.repack.rows import close_readers
from fastload.sources.listing import Arrays, Listing, first_few

__all__ = ["ExportReport", "export_file"]

Format = Literal["png"]
Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""

JOURNAL = ".fastload-export"
_ENCODERS: dict[str, tuple[str, Callable[[NDArray[Any]], bytes]]] = {"png": (".png", encode_png)}
"""Suffix and encoder of each format. A stored JPEG will be one that takes the row's bytes as they are."""

_BLOCK_BYTES = 4 * 2**20
_BLOCK_ROWS = 64
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
        notes: what the files do not say, or say otherwise.
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


@dataclass(frozen=True, eq=False)
class _Job:
    listing: Listing
    plan: ExportPlan
    folder: Path
    encode: Callable[[NDArray[Any]], bytes]
    where: Path


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
    """Write the images of a packed file as files that `fastload pack` reads back to the same pixels and labels.

    Args:
        file: a packed file, or another HDF5 file with a dataset `images`.
        folder: folder to make; one that exists has to be empty, or hold an unfinished export of the same.
        split: only this split.
        layout: "folder": class folders, below folders of splits where there are several; "csv": the folder `images`,
            `masks` where there are any, and the table `manifest.csv` with all the rest; "auto": folders where they say
            everything.
        format: "png", which loses nothing.
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
    plan = plan_export(listing, layout, suffix)
    job = _Job(listing, plan, Path(folder), encode, header.path)
    about = _about(header, split, plan.layout, format)
    _check_space(job)
    resumed = _begin(job.folder, about)
    try:
        kept = _write_images(job, resumed, max(1, available_cpus() if workers is None else workers), progress)
    finally:
        close_readers()
    notes = list(plan.notes)
    if plan.layout == "csv":
        text, left_out = table_text(listing, plan)
        _write_file(job.folder / MANIFEST, text.encode("utf-8", errors="backslashreplace"))
        notes += left_out
    (job.folder / JOURNAL).unlink()
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


def _check_pixels(header: PackedFile, listing: Listing) -> None:
    if not isinstance(listing.files, Arrays):
        arrays = [name for name in header.fields if name not in ("split", "key", "digest", "digest_fields")]
        raise FormatError(
            f"{header.path}: holds no images to export, only arrays ({first_few(arrays)}). Read these with h5py: "
            f"`h5py.File({header.path.name!r})[{arrays[0]!r}][:]`."
        )


def _about(header: PackedFile, split: str | None, layout: str, format: str) -> str:
    """What must be the same for an export to be continued."""
    about = {"release": writer_name(), "file": header.header_digest, "split": split, "layout": layout, "format": format}
    return json.dumps(about, sort_keys=True)


def _check_space(job: _Job) -> None:
    """Refuse a disk that is too full, as far as a few images tell; what is there already counts as free."""
    folder = job.folder if job.folder.is_dir() else job.folder.absolute().parent
    if not folder.is_dir():
        return  # said better where the folder is made
    assert isinstance(job.listing.files, Arrays), "checked before"
    rows = np.unique(np.linspace(0, len(job.listing) - 1, _SAMPLED).astype(np.int64))
    pixels = np.empty((len(rows), *job.listing.files.shape), job.listing.files.dtype)
    job.listing.files.read_rows(rows, pixels)
    blocks = sum(-(-len(job.encode(image)) // _DISK_BLOCK) for image in pixels) / len(rows)
    needed = int(blocks * _DISK_BLOCK * len(job.listing))
    there = sum(path.stat().st_size for path in folder.rglob("*.*")) if (folder / JOURNAL).is_file() else 0
    free = shutil.disk_usage(folder).free
    if needed > free + there:
        raise OutputError(
            errno.ENOSPC,
            f"needs about {needed:,} bytes for {len(job.listing):,} images, {free:,} are free. Free some, or choose "
            f"another disk or one `--split`",
            str(job.folder),
        )


def _begin(folder: Path, about: str) -> bool:
    """Make the folder, or find what an interrupted call of the same export has left there: then True.

    Raises:
        OutputError: it holds something else, or cannot be made.
    """
    journal = folder / JOURNAL
    try:
        if folder.is_dir() and {path.name for path in folder.iterdir()} - {_unfinished(journal).name}:
            if not journal.is_file():
                raise OutputError(
                    f"{folder}: is not empty. Give a new folder; nothing is ever written among other files."
                )
            if journal.read_text(errors="replace") != about:
                raise OutputError(
                    f"{folder}: holds an unfinished export of another file, split or layout. Finish that one, or "
                    f"remove the folder."
                )
            return True
        folder.mkdir(exist_ok=True)
        _write_file(journal, about.encode())
    except FileExistsError as exc:
        raise OutputError(f"{folder}: is a file. Give a folder.") from exc
    except FileNotFoundError as exc:
        raise OutputError(f"{folder}: its folder {folder.absolute().parent} does not exist. Make it first.") from exc
    except OSError as exc:
        if isinstance(exc, OutputError):
            raise
        raise OutputError(f"{folder}: cannot be written ({exc.strerror}). Choose another folder.") from exc
    return False


def _write_images(job: _Job, resumed: bool, threads: int, progress: Progress | None) -> int:
    """Write all images and masks that are not there yet; how many were."""
    for above in sorted({str(Path(path).parent) for path in (*job.plan.images, *job.plan.masks)}):
        (job.folder / above).mkdir(parents=True, exist_ok=True)
    assert isinstance(job.listing.files, Arrays), "checked before"
    row_bytes = int(np.prod(job.listing.files.shape, dtype=np.int64)) * job.listing.files.dtype.itemsize
    step = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // max(1, row_bytes)))
    total, done, kept = len(job.listing), 0, 0
    with ThreadPoolExecutor(threads) as pool:
        pending: set[Future[tuple[int, int]]] = set()
        starts = iter(range(0, total, step))
        try:
            while True:
                while len(pending) < 2 * threads and (start := next(starts, None)) is not None:
                    pending.add(pool.submit(_write_block, job, np.arange(start, min(total, start + step)), resumed))
                if not pending:
                    return kept
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in finished:
                    count, there = future.result()
                    done, kept = done + count, kept + there
                    if progress:
                        progress("exporting", done, total)
        finally:
            pool.shutdown(cancel_futures=True)


def _write_block(job: _Job, rows: NDArray[np.int64], resumed: bool) -> tuple[int, int]:
    """Read, check and write these rows; how many they are, and how many were there."""
    listing = job.listing
    parts = [(listing.files, job.plan.images)]
    if listing.masks is not None and job.plan.masks:
        parts.append((listing.masks.files, job.plan.masks))
    arrays = []
    for files, _ in parts:
        assert isinstance(files, Arrays), "rows of an HDF5 file"
        pixels = np.empty((len(rows), *files.shape), files.dtype)
        files.read_rows(rows, pixels)
        arrays.append(pixels)
    _check_digests(job, rows, arrays)
    there = 0
    for at, row in enumerate(rows.tolist()):
        found = [
            _write_picture(job, job.folder / paths[row], pixels[at], resumed)
            for pixels, (_, paths) in zip(arrays, parts, strict=True)
        ]
        there += all(found)
    return len(rows), there


def _check_digests(job: _Job, rows: NDArray[np.int64], arrays: list[NDArray[Any]]) -> None:
    listing = job.listing
    if listing.digests is None or (listing.masks is not None and len(arrays) == 1):
        return
    wrong = rows[row_digests_of(arrays) != listing.digests[rows]]
    if len(wrong):
        keys = first_few([listing.keys[row] for row in wrong.tolist()])
        raise SourceError(
            f"{job.where}: pixels of {len(wrong)} rows are not those that were packed: {keys}. List all damage with "
            f"`fastload verify {job.where}`; leave it out with `fastload repack --on-error skip`."
        )


def _write_picture(job: _Job, path: Path, pixels: NDArray[Any], resumed: bool) -> bool:
    """Write one file, unless it is there; whether it was.

    Raises:
        OutputError: a whole image of that name shows something else, or the disk is full.
    """
    if resumed and path.exists():
        found = _decoded(path, pixels)
        if found is not None:
            if not np.array_equal(found.reshape(-1), pixels.reshape(-1)):
                raise OutputError(f"{path}: was changed since it was exported; it is not overwritten. Move it away.")
            return True
    _write_file(path, job.encode(pixels))
    return False


def _decoded(path: Path, like: NDArray[Any]) -> NDArray[Any] | None:
    """The pixels of an image file, in the shape that was written; None where it is torn, as a power cut leaves it."""
    height, width, *rest = like.shape
    channels = (rest or [1])[0]
    out = np.empty((height, width, channels), like.dtype)
    try:
        decode_image(path.read_bytes(), Target(height, width, channels, like.dtype), out)
    except (OSError, ImageError):
        return None
    return out


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _write_file(path: Path, data: bytes) -> None:
    """Write a file under another name first, so that whoever finds it finds all of it."""
    part = _unfinished(path)
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as exc:
        raise OutputError(
            f"{path}: cannot be written ({exc.strerror}). What was exported is kept: the same command continues."
        ) from exc
