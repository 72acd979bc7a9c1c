"""The images and masks of an export, written by threads: each row checked against its digest on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.decode import Target, decode_image
from fastload.errors import ImageError, OutputError, SourceError
from fastload.export.plan import ExportPlan
from fastload.pack.chunk_work import row_digests_of
from fastload.repack.stored import KeptRows
from fastload.sources.listing import Arrays, Listing, first_few
from fastload.store import JPEG
from fastload.stored_samples import CheckedSample

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""

_BLOCK_BYTES = 4 * 2**20
_BLOCK_ROWS = 64


@dataclass(frozen=True, eq=False)
class Job:
    """What is written, and where.

    Attributes:
        listing: the rows.
        plan: their paths, relative to the folder.
        folder: that folder.
        encode: makes the bytes of a file from (H, W, C) or (H, W).
        where: the packed file, for messages.
    """

    listing: Listing
    plan: ExportPlan
    folder: Path
    encode: Callable[[NDArray[Any]], bytes]
    where: Path


def write_images(job: Job, resumed: bool, threads: int, progress: Progress | None) -> int:
    """Write all images and masks that are not there yet; how many were."""
    for above in sorted({str(Path(path).parent) for path in (*job.plan.images, *job.plan.masks)}):
        (job.folder / above).mkdir(parents=True, exist_ok=True)
    write_block = _write_stored if isinstance(job.listing.files, KeptRows) else _write_block
    step = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // max(1, int(job.listing.sizes.mean()))))
    total, done, kept = len(job.listing), 0, 0
    with ThreadPoolExecutor(threads) as pool:
        pending: set[Future[tuple[int, int]]] = set()
        starts = iter(range(0, total, step))
        try:
            while True:
                while len(pending) < 2 * threads and (start := next(starts, None)) is not None:
                    pending.add(pool.submit(write_block, job, np.arange(start, min(total, start + step)), resumed))
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


def sampled_files(job: Job, rows: NDArray[np.int64]) -> Iterator[bytes]:
    """The files that the images of these rows become."""
    files = job.listing.files
    if isinstance(files, KeptRows):
        for row in rows.tolist():
            sample, found = _stored_sample(job, files, row)
            yield bytes(sample.image) if sample.encoding == JPEG else job.encode(found["images"])
        return
    assert isinstance(files, Arrays), "rows of an HDF5 file"
    pixels = np.empty((len(rows), *files.shape), files.dtype)
    files.read_rows(rows, pixels)
    yield from map(job.encode, pixels)


def _write_block(job: Job, rows: NDArray[np.int64], resumed: bool) -> tuple[int, int]:
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


def _write_stored(job: Job, rows: NDArray[np.int64], resumed: bool) -> tuple[int, int]:
    """As `_write_block`, of a file with stores: a JPEG as it is stored."""
    files = job.listing.files
    assert isinstance(files, KeptRows), "rows of a file with stores"
    there = 0
    for row in rows.tolist():
        sample, pixels = _stored_sample(job, files, row)
        path = job.folder / job.plan.images[row]
        if sample.encoding == JPEG:
            found = _write_jpeg(path, bytes(sample.image), sample.shape, resumed)
        else:
            found = _write_picture(job, path, pixels["images"], resumed)
        if job.plan.masks:
            found &= _write_picture(job, job.folder / job.plan.masks[row], pixels["masks"], resumed)
        there += found
    return len(rows), there


def _stored_sample(job: Job, files: KeptRows, row: int) -> CheckedSample:
    """A sample with its pixels, apart from those of a JPEG, found to be what was packed.

    Raises:
        SourceError: it is damaged; names it.
    """
    try:
        return files.checked(row, jpeg=False)
    except ImageError as exc:
        raise SourceError(
            f"{job.where}: {job.listing.keys[row]} is damaged: {exc}. List all damage with `fastload verify "
            f"{job.where}`; leave it out with `fastload repack --on-error skip`."
        ) from exc


def _check_digests(job: Job, rows: NDArray[np.int64], arrays: list[NDArray[Any]]) -> None:
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


def _write_picture(job: Job, path: Path, pixels: NDArray[Any], resumed: bool) -> bool:
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
    write_file(path, job.encode(pixels))
    return False


def _write_jpeg(path: Path, data: bytes, shape: tuple[int, int, int], resumed: bool) -> bool:
    """As `_write_picture`, of a JPEG file."""
    if resumed and path.exists():
        if path.read_bytes() == data:
            return True
        if _decoded(path, np.empty(shape, np.uint8)) is not None:
            raise OutputError(f"{path}: was changed since it was exported; it is not overwritten. Move it away.")
    write_file(path, data)
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


def unfinished(path: Path) -> Path:
    """What a file is called until it is whole."""
    return path.with_name(f".{path.name}.part")


def write_file(path: Path, data: bytes) -> None:
    """Write a file under another name first, so that whoever finds it finds all of it."""
    part = unfinished(path)
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as exc:
        raise OutputError(
            f"{path}: cannot be written ({exc.strerror}). What was exported is kept: the same command continues."
        ) from exc
