"""Threads that write the images and masks of an export, as PNG unless they are JPEG; each row is checked first."""

from __future__ import annotations

import os
import struct
import tarfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError, OptionError, OutputError, SourceError, typed
from fastload.export.plan import ExportPlan, class_folders
from fastload.format.digests import row_digest
from fastload.format.ragged import JPEG
from fastload.images.decode import decode_image
from fastload.images.fit import Target
from fastload.options.pack import Progress
from fastload.read.checked import CHANGED
from fastload.repack.packed_rows import RaggedRows, RowByRow
from fastload.sources.listing import Arrays, Listing
from fastload.system.files import open_output, output_errors, write_all
from fastload.system.threads import in_threads

KEPT = "What was exported is kept: make room, then run the same command again."

_SECTOR_BYTES = 512
_TAR_END = bytes(2 * tarfile.BLOCKSIZE)
_BLOCK_BYTES = 4 * 2**20
_BLOCK_ROWS = 64


@dataclass(frozen=True, eq=False)
class Job:
    """One export: rows of `listing` become files of `plan` in `folder`; `where` is the packed file, for messages."""

    listing: Listing
    plan: ExportPlan
    folder: Path
    where: Path


class _Row(NamedTuple):
    """One sample to be written: the JPEG that its image is stored as, if it is; its pixels; its mask, if it has one."""

    jpeg: bytes
    image: NDArray[Any]  # (H, W, C); without content if there is a JPEG
    mask: NDArray[Any] | None


def write_images(job: Job, resumed: bool, threads: int, progress: Progress | None) -> int:
    """Writes all images and masks that are not there yet, by so many threads; returns how many rows were there.

    `resumed`: an interrupted call may have left files.
    """
    for above in sorted({str(Path(path).parent) for path in (*job.plan.images, *job.plan.masks)}):
        with output_errors(f"{job.folder / above}: cannot be made ({{}}). {KEPT}"):
            (job.folder / above).mkdir(parents=True, exist_ok=True)
    step = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // max(1, int(job.listing.sizes.mean()))))
    total, done, kept = len(job.listing), 0, 0
    blocks = (range(start, min(total, start + step)) for start in range(0, total, step))

    def write_row(row: int) -> bool:  # whether all its files were there
        found = _read(job, row)
        there = _write(job, job.plan.images[row], found.image, found.jpeg, resumed=resumed)
        if found.mask is not None:
            there &= _write(job, job.plan.masks[row], found.mask, resumed=resumed)
        return there

    for found in in_threads(lambda rows: [write_row(row) for row in rows], blocks, threads):
        done, kept = done + len(found), kept + sum(found)
        if progress:
            progress("exporting", done, total)
    return kept


def write_shards(
    job: Job,
    fields: Callable[[int], list[tuple[str, bytes]]],
    shard_bytes: int,
    resumed: bool,
    threads: int,
    progress: Progress | None,
) -> int:
    """Writes tar shards of at most so many bytes each, split by split; returns how many rows were in shards before.

    A shard gets its name when it is whole and on the disk.

    Args:
        fields: returns (suffix, content) of a row's members besides image and mask.
    """
    total, kept = len(job.listing), 0
    step = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // max(1, int(job.listing.sizes.mean()))))
    tops = class_folders(job.listing.split_names) if job.listing.split_names != ("all",) else ["shard"]
    done = 0

    def samples(rows: range) -> list[bytes]:
        return [_shard_part(job, fields, row) for row in rows]

    for split, top in enumerate(tops):
        rows = np.flatnonzero(job.listing.split == split)
        number, stop = 0, int(rows[-1]) + 1 if len(rows) else 0  # splits are contiguous
        first = int(rows[0]) if len(rows) else 0
        while resumed and (path := job.folder / f"{top}-{number:06d}.tar").exists():
            there = _rows_of_shard(job, path, first)
            first, kept, done, number = first + there, kept + there, done + there, number + 1
        parts, size = list[bytes](), 0
        blocks = (range(start, min(stop, start + step)) for start in range(first, stop, step))
        row = first
        for made in in_threads(samples, blocks, threads, ordered=True):
            for part in made:
                if len(part) + len(_TAR_END) > shard_bytes:
                    raise OptionError(
                        f"shard_bytes={shard_bytes:,}: the sample {job.listing.keys[row]} alone takes "
                        f"{len(part) + len(_TAR_END):,}. Give at least as many with `--shard-bytes`."
                    )
                if size + len(part) + len(_TAR_END) > shard_bytes:
                    _write_shard(job.folder / f"{top}-{number:06d}.tar", parts)
                    parts, size, number = [], 0, number + 1
                parts.append(part)
                size, row = size + len(part), row + 1
            done += len(made)
            if progress:
                progress("exporting", done, total)
        if parts:
            _write_shard(job.folder / f"{top}-{number:06d}.tar", parts)
    return kept


def _shard_part(job: Job, fields: Callable[[int], list[tuple[str, bytes]]], row: int) -> bytes:
    """Returns the bytes of a shard that are one sample: a header and the content, padded, of each member."""
    found, image = _read(job, row), job.plan.images[row]
    stem, _, suffix = image.rpartition(".")
    members = [(suffix, found.jpeg or encode_png(found.image))]
    if found.mask is not None:
        members.append((job.plan.masks[row].removeprefix(f"{stem}."), encode_png(found.mask)))
    out = []
    for suffix, data in [*members, *fields(row)]:
        info = tarfile.TarInfo(f"{stem}.{suffix}")  # Owner and time are always the same, so the bytes are, too.
        info.size = len(data)
        out += [info.tobuf(tarfile.GNU_FORMAT), data, bytes(-len(data) % tarfile.BLOCKSIZE)]
    return b"".join(out)


def _write_shard(path: Path, parts: list[bytes]) -> None:
    part = unfinished(path)
    with output_errors(f"{path}: cannot be written ({{}}). {KEPT}"):
        with os.fdopen(open_output(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb", buffering=0) as file:
            for data in [*parts, _TAR_END]:
                write_all(file.fileno(), data)
            os.fsync(file.fileno())
        os.replace(part, path)


def _rows_of_shard(job: Job, path: Path, first: int) -> int:
    """Returns how many rows, from this one on, an interrupted call wrote into a shard; OutputError: it was changed."""
    try:
        with tarfile.open(path, "r:") as shard:
            names = [member.name for member in shard]
    except (tarfile.TarError, OSError):
        names = [""]
    stems = list(dict.fromkeys(name.partition(".")[0] for name in names))
    if stems != [name.partition(".")[0] for name in job.plan.images[first : first + len(stems)]]:
        raise OutputError(f"{path}: was changed since it was exported; it is not overwritten. Move it away.")
    return len(stems)


def image_file(job: Job, row: int) -> bytes:
    """Returns the bytes of the image file of a row; raises SourceError for a damaged one."""
    found = _read(job, row)
    return found.jpeg or encode_png(found.image)


def _read(job: Job, row: int) -> _Row:
    """Returns a row that matches its digest; raises SourceError, which names it, for a damaged one."""
    files, masks = job.listing.files, job.listing.masks
    try:
        if isinstance(files, RaggedRows):
            sample, pixels = files.checked(row, jpeg=False)
            jpeg = bytes(sample.image) if sample.encoding == JPEG else b""
            image = np.empty(sample.shape, np.uint8) if jpeg else pixels["images"]
            return _Row(jpeg, image, pixels["masks"] if job.plan.masks else None)
        assert isinstance(files, Arrays), "rows of an HDF5 file"
        parts = [RowByRow(files).read(row)]
        if masks is not None:
            assert isinstance(masks.files, Arrays), "rows of the same file"
            parts.append(RowByRow(masks.files).read(row))
        digests = job.listing.digests
        if digests is not None and row_digest(parts) != digests[row]:
            raise ImageError(CHANGED)
        return _Row(b"", parts[0], parts[1] if job.plan.masks else None)
    except ImageError as exc:
        raise SourceError(
            f"{job.where}: {job.listing.keys[row]} is damaged: {exc}. List all damage with `fastload verify "
            f"{typed(job.where)}`; leave it out with `fastload repack {typed(job.where)} OUT.h5 --on-error skip`."
        ) from exc


def _write(job: Job, name: str, pixels: NDArray[Any], jpeg: bytes = b"", *, resumed: bool) -> bool:
    """Writes an image unless it is there, as returned; OutputError: another image is, or the disk is full."""
    path = job.folder / name
    if resumed and path.exists():
        height, width, *rest = pixels.shape
        found = np.empty((height, width, *(rest or [1])), pixels.dtype)
        with output_errors(f"{path}: cannot be read ({{}}). Move it away, then run the same command again."):
            data = path.read_bytes()
        if jpeg and data == jpeg:
            return True
        with suppress(ImageError):
            decode_image(data, Target(height, width, found.shape[2], found.dtype), found)
            if not jpeg and np.array_equal(found.reshape(-1), pixels.reshape(-1)) and _sound_png(data):
                return True
        # Decoders also take files with holes, as a power failure leaves them: these are written again.
        if not _left_of(jpeg or encode_png(pixels), data):
            raise OutputError(f"{path}: was changed since it was exported; it is not overwritten. Move it away.")
    write_file(path, jpeg or encode_png(pixels))
    return False


def _left_of(whole: bytes, found: bytes) -> bool:
    """Whether a power failure may have left this of a file: its begin, and sectors of zeros in it."""
    starts = range(0, len(found), _SECTOR_BYTES)
    return len(found) <= len(whole) and all(
        whole.startswith(found[at : at + _SECTOR_BYTES].rstrip(b"\0"), at) for at in starts
    )


def _sound_png(data: bytes) -> bool:
    """Whether all chunks of a PNG are whole up to its end, which decoders do not insist on."""
    at = 8
    while at + 12 <= len(data):
        stop = at + 8 + int.from_bytes(data[at : at + 4], "big")
        if zlib.crc32(data[at + 4 : stop]) != int.from_bytes(data[stop : stop + 4], "big"):
            return False
        if data[at + 4 : at + 8] == b"IEND":
            return True
        at = stop + 4
    return False


def unfinished(path: Path) -> Path:
    """Returns the name of a file until it is complete."""
    return path.with_name(f".{path.name}.part")


def write_file(path: Path, data: bytes) -> None:
    """Writes a file under another name and renames it, so that it is never seen incomplete."""
    part = unfinished(path)
    with output_errors(f"{path}: {len(data):,} bytes cannot be written ({{}}). {KEPT}"):
        with os.fdopen(open_output(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb", buffering=0) as file:
            write_all(file.fileno(), data)
        os.replace(part, path)


LEVEL = 4
_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}


def encode_png(pixels: NDArray[Any]) -> bytes:
    """Returns a PNG file that holds exactly these pixels, uint8 or uint16, (H, W) or (H, W, C) with 1, 3 or 4 channels.

    For threads: NumPy and zlib release the GIL, Pillow's encoder keeps it. PNG, third edition, W3C 2025: chunks are in
    section 11, filters in 9; each line takes the one with the least sum of absolute differences, as 12.7 advises.
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
