"""Exporting: a packed file back to image files, in class folders or in one folder with a CSV table.

A packed file (or another HDF5 file with images) becomes a folder that `fastload pack` packs to the same
rows. Images become PNG files, those stored as JPEG their own bytes. `fastload.json` and `fields.npz` hold what files
and table cannot say. Every row is checked against its digest. While the work is unfinished, the folder holds the hidden
file `.fastload-export`, and the same call continues it, also after a power failure: it goes when all is on the disk.

Read `plan` first (which file each row becomes), then this module (threads write the images) and `table` (the CSV table
and the two extra files). Imports `repack` for the listing of a packed file, `read` and below; never the loader or
torch.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import struct
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FormatError, ImageError, OptionError, OutputError, SourceError, typed
from fastload.export.plan import (
    MANIFEST,
    ExportPlan,
    class_folders,
    plan_export,
    plan_format,
)
from fastload.export.table import fields_bytes, metadata_texts, sample_fields, sidecar_text, table_text
from fastload.format.digests import row_digest
from fastload.format.header import PackedFile
from fastload.format.ragged import JPEG
from fastload.format.writer import writer_name
from fastload.images.decode import decode_image
from fastload.images.fit import Target
from fastload.options import from_arguments, takes
from fastload.options.keywords import ExportKeywords
from fastload.options.pack import Progress
from fastload.options.repack import Choice, ExportOptions
from fastload.read.checked import CHANGED, close_readers
from fastload.remote.open_url import open_packed
from fastload.remote.urls import FileName, local_path
from fastload.repack.packed_listing import choose_rows, list_packed, regroup
from fastload.repack.packed_rows import RaggedRows, RowByRow
from fastload.sources.exported import FIELDS, SIDECAR
from fastload.sources.listing import Arrays, Listing, first_few
from fastload.system.files import open_output, output_errors, sync_files_below, sync_folder, write_all, write_at
from fastload.system.machine import worker_count
from fastload.system.threads import in_threads

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
