"""The extents of a file's rows, the tasks that fill them, and the end of a pack: metadata, final name, report.

HDF5 itself writes only `OUT.h5.meta`, a sparse file of the same layout; its bytes other than pixels are then copied
into the packed file. Each step can be repeated after a kill at any instant.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.format.column import Column
from fastload.format.digests import plain
from fastload.format.header import IMAGES_OFFSET, PIXEL_FIELDS, PackedFile, open_hdf5, read_header
from fastload.format.ragged import index_names
from fastload.format.writer import create_file, dump_options, pixel_offsets
from fastload.images.decode import decoder_versions
from fastload.pack.journal import Journal
from fastload.pack.pack_options import PackJob
from fastload.pack.pack_worker import ChunkTask, Extent, Extents
from fastload.pack.survey import Survey

_COPY_BYTES = 1 << 24

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
        images_per_s: images this call decoded over the time that decoding and writing them took.
        chunks: chunks of the file as planned; tasks of the ordered engine.
        chunks_kept: chunks that an earlier, interrupted call had packed.
        chunks_decoded: chunks that this call decoded.
        store: the encoding of images, such as "raw" or "jpeg:90".
        encodings: number of rows that are "raw", "jpeg" and "zstd".
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


def planned_extents(survey: Survey, num_rows: int, scratch: Path) -> Extents | None:
    """Returns where HDF5 will put the pixels of a file of so many rows; None without images.

    Args:
        scratch: path of a file that is written to find out, and removed.
    """
    specs = survey.pixels(num_rows)
    if not specs:
        return None
    images = Extent(IMAGES_OFFSET, specs["images"].row_bytes)
    if "masks" not in specs:
        return Extents(images)
    offsets = pixel_offsets(scratch, num_rows, specs)
    return Extents(images, Extent(offsets["masks"], specs["masks"].row_bytes))


def end_of_pixels(survey: Survey, num_rows: int, extents: Extents) -> int:
    """Returns the byte after the last pixel chunk of a file of so many rows."""
    last, spec = extents.all[-1], list(survey.pixels(num_rows).values())[-1]
    return last.offset(-(-num_rows // spec.chunk_rows) * spec.chunk_rows)


def chunk_tasks(
    survey: Survey,
    part: Path,
    extents: Extents,
    num_rows: int,
    chunks: NDArray[np.int64],
    *,
    task_bytes: int = 0,
    **arrays: NDArray[Any],
) -> Iterator[ChunkTask]:
    """Yields a task for each of these chunks of a file of num_rows rows.

    Args:
        chunks: int64, ascending.
        task_bytes: consecutive chunks of at most so many bytes together become one task.
        arrays: attributes of `ChunkTask`, each with an item for every row of the file.
    """
    assert survey.target is not None, "without images there are no chunks"
    chunk_bytes = survey.chunk_rows * sum(extent.row_bytes for extent in extents.all)
    most = max(1, task_bytes // chunk_bytes)
    runs = np.split(chunks, np.flatnonzero(np.diff(chunks) != 1) + 1)
    for some in (run[at : at + most] for run in runs for at in range(0, len(run), most)):
        rows = np.arange(some[0] * survey.chunk_rows, min(num_rows, (some[-1] + 1) * survey.chunk_rows))
        parts = {name: array[rows] for name, array in arrays.items()}
        yield ChunkTask(str(part), extents, rows, survey.target, **parts)


def write_metadata(
    survey: Survey,
    part: Path,
    meta: Path,
    extents: Extents | None,
    *,
    samples: NDArray[np.int64],
    digests: NDArray[np.uint64],
) -> str:
    """Adds the HDF5 metadata to the pixels in `part`, all synced to disk; returns the header digest.

    Args:
        extents: where the rows of the finished file lie; None without images.
        samples: int64 (N,): the sample of each row of the finished file.
        digests: uint64 (N,): its pixel digest.
    """
    num_rows = len(samples)
    pixels = survey.pixels(num_rows)
    columns, attrs = described(survey, samples, digests)
    offsets = create_file(meta, num_rows=num_rows, pixels=pixels, columns=columns, attrs=attrs)
    assert extents is None or list(offsets.values()) == [extent.base for extent in extents.all], "rows lie as planned"
    with open(meta, "rb") as source, open(part, "r+b") as file:
        end = os.fstat(source.fileno()).st_size
        start = 0
        for name, spec in pixels.items():
            copy_bytes(source, file, start, offsets[name])
            written = offsets[name] + num_rows * spec.row_bytes
            start = offsets[name] + -(-num_rows // spec.chunk_rows) * spec.chunk_rows * spec.row_bytes
            file.seek(written)
            file.write(bytes(start - written))
        copy_bytes(source, file, start, end)
        file.truncate(end)
        file.flush()
        os.fsync(file.fileno())
    # Read from the file, as every reader will.
    with open_hdf5(meta) as file:
        return str(plain(file.attrs["header_digest"]))


def described(
    survey: Survey, samples: NDArray[np.int64], digests: NDArray[np.uint64]
) -> tuple[dict[str, Column], dict[str, Any]]:
    """Returns the datasets of a file other than its pixels, and its root attributes.

    Args:
        samples, digests: as `write_metadata`.
    """
    listing = survey.listing
    columns = {name: Column(column.values[samples], column.attrs) for name, column in listing.columns.items()}
    columns["split"] = Column(listing.split[samples], {"names": listing.split_names})
    columns["key"] = Column(_encoded(listing.keys)[samples])
    columns["digest"] = Column(digests)
    attrs = {
        "decoder": decoder_versions(),
        "source_layout": listing.layout,
        "pack_options": dump_options(survey.options.to_dict()),
        "seed": survey.options.seed,
        "shuffled": survey.options.shuffle,
        **listing.attrs,
    }
    return columns, attrs


def _encoded(keys: tuple[str, ...]) -> NDArray[np.bytes_]:
    try:
        return np.array(keys, "S")  # ASCII, six times as fast
    except UnicodeEncodeError:
        return np.array([key.encode() for key in keys])


def publish(part: Path, meta: Path, output: Path, journal: Journal, header_digest: str) -> None:
    """Gives the complete file its final name and removes the files that only packing needed."""
    journal.finished(header_digest)
    os.replace(part, output)
    sync_folder(output.parent)
    meta.unlink(missing_ok=True)
    journal.remove()


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder to disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def copy_bytes(source: Any, target: Any, start: int, stop: int, to: int | None = None) -> None:
    """Copies bytes start to stop of one file into another, by default to the same offset."""
    source.seek(start)
    target.seek(start if to is None else to)
    while start < stop and (data := source.read(min(_COPY_BYTES, stop - start))):
        target.write(data)
        start += len(data)


def report_of(
    job: PackJob,
    file: PackedFile,
    converted: dict[str, int],
    skipped: tuple[tuple[str, str], ...],
    *,
    started: float,
    images_per_s: float,
    chunks: int,
    chunks_kept: int,
    chunks_decoded: int,
    notes: tuple[str, ...],
    store: str = "raw",
    encodings: dict[str, int] | None = None,
) -> PackReport:
    """Returns the report of a finished file.

    Args:
        started: time.perf_counter() when the call began.
        encodings: as in `PackReport`; by default all rows are raw.
    """
    images = file.fields.get("images")
    return PackReport(
        path=job.output,
        layout=job.listing.layout,
        num_samples=file.num_rows,
        image_shape=images.shape if images else (),
        dtype=str(images.dtype) if images else "",
        fields=tuple(name for name in file.fields if name not in _NOT_OF_THE_SAMPLE and not _is_index(name, file)),
        splits={name: len(rows) for name, rows in file.splits.items()},
        converted=converted,
        skipped=skipped,
        notes=notes,
        file_bytes=file.identity.size,
        seconds=time.perf_counter() - started,
        images_per_s=images_per_s,
        chunks=chunks,
        chunks_kept=chunks_kept,
        chunks_decoded=chunks_decoded,
        store=store,
        encodings={"raw": file.num_rows} if encodings is None and images else encodings or {},
    )


def _is_index(name: str, file: PackedFile) -> bool:
    """Whether a dataset only says where rows of varying length lie."""
    return any(
        field is not None and field.ragged is not None and name in index_names(field.name)
        for field in map(file.fields.get, PIXEL_FIELDS)
    )


def pixel_bytes(path: str | Path) -> int:
    """Returns the bytes of all decoded images and masks of a packed file; 0 without images."""
    file, total = read_header(path), 0
    fields = [file.fields[name] for name in PIXEL_FIELDS if name in file.fields]
    with open_hdf5(Path(path)) as opened:
        for field in fields:
            if not field.varied:
                total += file.num_rows * int(np.prod(field.shape, dtype=np.int64)) * field.dtype.itemsize
                continue
            shapes = opened["images_shape"][()].astype(np.int64)
            total += int(np.prod(shapes[:, : len(field.shape)], axis=1).sum()) * field.dtype.itemsize
    return total
