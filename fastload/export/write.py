"""Threads that write the images and masks of an export, as PNG unless they are JPEG; each row is checked first."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError, OutputError, SourceError
from fastload.export.plan import ExportPlan
from fastload.format.digests import pixel_digests
from fastload.format.ragged import JPEG
from fastload.images.decode import decode_image
from fastload.images.fit import Target
from fastload.pack.pack_options import Progress
from fastload.read.checked import CheckedSample
from fastload.repack.packed_rows import RaggedRows
from fastload.sources.listing import Arrays, Listing, first_few
from fastload.system.threads import in_threads

_BLOCK_BYTES = 4 * 2**20
_BLOCK_ROWS = 64


@dataclass(frozen=True, eq=False)
class Job:
    """One export: what is written, and where.

    Attributes:
        listing: the rows.
        plan: their paths, relative to the folder.
        folder: the folder to write to.
        encode: returns the bytes of a file for pixels (H, W, C) or (H, W).
        where: path of the packed file, for messages.
    """

    listing: Listing
    plan: ExportPlan
    folder: Path
    encode: Callable[[NDArray[Any]], bytes]
    where: Path


def write_images(job: Job, resumed: bool, threads: int, progress: Progress | None) -> int:
    """Writes all images and masks that are not there yet; returns how many rows were there.

    Args:
        resumed: an interrupted call may have left files.
        threads: number of threads that write.
    """
    for above in sorted({str(Path(path).parent) for path in (*job.plan.images, *job.plan.masks)}):
        (job.folder / above).mkdir(parents=True, exist_ok=True)
    write_block = _write_ragged_block if isinstance(job.listing.files, RaggedRows) else _write_block
    step = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // max(1, int(job.listing.sizes.mean()))))
    total, done, kept = len(job.listing), 0, 0
    blocks = (np.arange(start, min(total, start + step)) for start in range(0, total, step))
    for count, there in in_threads(lambda rows: write_block(job, rows, resumed), blocks, threads):
        done, kept = done + count, kept + there
        if progress:
            progress("exporting", done, total)
    return kept


def sampled_files(job: Job, rows: NDArray[np.int64]) -> Iterator[bytes]:
    """Yields the bytes of the image files of these rows."""
    files = job.listing.files
    if isinstance(files, RaggedRows):
        for row in rows.tolist():
            sample, found = _ragged_sample(job, files, row)
            yield bytes(sample.image) if sample.encoding == JPEG else job.encode(found["images"])
        return
    assert isinstance(files, Arrays), "rows of an HDF5 file"
    pixels = np.empty((len(rows), *files.shape), files.dtype)
    files.read_rows(rows, pixels)
    yield from map(job.encode, pixels)


def _write_block(job: Job, rows: NDArray[np.int64], resumed: bool) -> tuple[int, int]:
    """Reads, checks and writes rows of one size; returns how many they are, and how many were there."""
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


def _write_ragged_block(job: Job, rows: NDArray[np.int64], resumed: bool) -> tuple[int, int]:
    """Does the same as `_write_block` for rows of varying length; a JPEG is written as it is stored."""
    files = job.listing.files
    assert isinstance(files, RaggedRows), "chosen in write_images"
    there = 0
    for row in rows.tolist():
        sample, pixels = _ragged_sample(job, files, row)
        path = job.folder / job.plan.images[row]
        if sample.encoding == JPEG:
            found = _write_jpeg(path, bytes(sample.image), sample.shape, resumed)
        else:
            found = _write_picture(job, path, pixels["images"], resumed)
        if job.plan.masks:
            found &= _write_picture(job, job.folder / job.plan.masks[row], pixels["masks"], resumed)
        there += found
    return len(rows), there


def _ragged_sample(job: Job, files: RaggedRows, row: int) -> CheckedSample:
    """Returns a sample that matches its digest, with its pixels unless it is a JPEG.

    Raises:
        SourceError: it is damaged; the message names it.
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
    wrong = rows[pixel_digests(arrays) != listing.digests[rows]]
    if len(wrong):
        keys = first_few([listing.keys[row] for row in wrong.tolist()])
        raise SourceError(
            f"{job.where}: pixels of {len(wrong)} rows are not those that were packed: {keys}. List all damage with "
            f"`fastload verify {job.where}`; leave it out with `fastload repack --on-error skip`."
        )


def _write_picture(job: Job, path: Path, pixels: NDArray[Any], resumed: bool) -> bool:
    """Writes one image file, unless it is there; returns whether it was.

    Raises:
        OutputError: a whole image of that name has other pixels, or the disk is full.
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
    """Writes one JPEG file, unless it is there; returns whether it was."""
    if resumed and path.exists():
        if path.read_bytes() == data:
            return True
        if _decoded(path, np.empty(shape, np.uint8)) is not None:
            raise OutputError(f"{path}: was changed since it was exported; it is not overwritten. Move it away.")
    write_file(path, data)
    return False


def _decoded(path: Path, like: NDArray[Any]) -> NDArray[Any] | None:
    """Returns the pixels of an image file in the shape of like; None if it is cut off, as a power failure leaves it."""
    height, width, *rest = like.shape
    channels = (rest or [1])[0]
    out = np.empty((height, width, channels), like.dtype)
    try:
        decode_image(path.read_bytes(), Target(height, width, channels, like.dtype), out)
    except (OSError, ImageError):
        return None
    return out


def unfinished(path: Path) -> Path:
    """Returns the name of a file until it is complete."""
    return path.with_name(f".{path.name}.part")


def write_file(path: Path, data: bytes) -> None:
    """Writes a file under another name and renames it, so that it is never seen incomplete."""
    part = unfinished(path)
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as exc:
        raise OutputError(
            f"{path}: cannot be written ({exc.strerror}). What was exported is kept: the same command continues."
        ) from exc


# Encodes arrays as PNG, fit for threads: NumPy and zlib release the GIL, Pillow's encoder keeps it.
#
# PNG (Portable Network Graphics), third edition, W3C 2025: chunks in section 11, filters in section 9. Each line
# takes the filter with the least sum of absolute differences, as section 12.7 advises.


LEVEL = 4
_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}


def encode_png(pixels: NDArray[Any]) -> bytes:
    """Returns a PNG file that holds exactly these pixels.

    Args:
        pixels: uint8 or uint16, (H, W) or (H, W, C) with 1, 3 or 4 channels; all but uint8 in native byte order.
    """
    height, width = pixels.shape[:2]
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    depth = pixels.dtype.itemsize
    # Samples of 16 bits are big-endian in a PNG.
    lines = np.ascontiguousarray(pixels, dtype=pixels.dtype.newbyteorder(">")).reshape(-1).view(np.uint8)
    filtered = _filtered(lines.reshape(height, -1), channels * depth)
    compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, 15, 9, zlib.Z_FILTERED)
    data = compressor.compress(filtered.data) + compressor.flush()
    head = struct.pack(">IIBBBBB", width, height, 8 * depth, _COLOUR_TYPES[channels], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _filtered(lines: NDArray[np.uint8], step: int) -> NDArray[np.uint8]:
    """Returns filtered lines (H, 1 + bytes), each with its filter's number first: 0, sub (1), up (2).

    A pixel has `step` bytes.
    """
    sub, up = lines.copy(), lines.copy()
    sub[:, step:] -= lines[:, :-step]
    up[1:] -= lines[:-1]
    choices = np.stack([lines, sub, up])
    costs = np.minimum(choices, 0 - choices).sum(axis=2, dtype=np.int64)
    best = costs.argmin(axis=0)
    out = np.empty((len(lines), 1 + lines.shape[1]), np.uint8)
    out[:, 0] = best
    out[:, 1:] = np.take_along_axis(choices, best[None, :, None], axis=0)[0]
    return out


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
