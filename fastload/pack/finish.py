"""The end of a pack: holes closed, metadata built, the file under its final name.

Each step can be repeated after a kill at any instant. Rows are moved by what their digests say, not by what should
have happened; HDF5 itself writes only the sparse twin `OUT.h5.meta`, whose non-pixel bytes are then copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.decode import decoder_versions
from fastload.errors import PackError
from fastload.format import IMAGES_OFFSET, read_header
from fastload.layout import PixelSpec, chunk_rows_for, create_file, dump_options
from fastload.pack.journal import Journal
from fastload.pack.survey import Progress, Survey
from fastload.pack.workers import ChunkTask, Worker, WorkerPool, read_at, write_at
from fastload.sources.listing import Column

_COPY_BYTES = 1 << 24


def chunk_tasks(
    survey: Survey, part: Path, num_rows: int, chunks: NDArray[np.int64], **arrays: NDArray[Any]
) -> Iterator[ChunkTask]:
    """A task for each of these chunks of a file of num_rows rows, with its rows' part of each array."""
    for chunk in chunks.tolist():
        rows = np.arange(chunk * survey.chunk_rows, min(num_rows, (chunk + 1) * survey.chunk_rows))
        parts = {name: array[rows] for name, array in arrays.items()}
        yield ChunkTask(str(part), row_offset(survey, int(rows[0])), rows, survey.target, **parts)


def row_offset(survey: Survey, row: int) -> int:
    """Byte at which a row lies."""
    return IMAGES_OFFSET + row * survey.row_bytes


def settle_rows(
    survey: Survey,
    part: Path,
    pool: WorkerPool,
    *,
    sources: NDArray[np.int64],
    samples: NDArray[np.int64],
    digests: NDArray[np.uint64],
    again: bool,
    progress: Progress | None,
) -> None:
    """Bring every row of the finished file to its place, by its digest.

    Args:
        sources: int64 (n,): the row at which each row of the finished file was packed.
        samples: int64 (n,): its sample.
        digests: uint64 (n,): its pixel digest.
        again: an earlier run was stopped in here, so that any row may or may not have been moved.
    """
    moved = sources != np.arange(len(sources))
    wrong = _wrong_rows(survey, part, pool, digests, progress) if again else np.flatnonzero(moved)
    row = np.zeros(survey.row_bytes, np.uint8)
    fd = os.open(part, os.O_RDWR)
    try:
        for at, place in enumerate(wrong.tolist()):
            expected = int(digests[place])
            read_at(fd, row, row_offset(survey, int(sources[place])))
            if xxhash.xxh3_64_intdigest(row.data) == expected:
                write_at(fd, row, row_offset(survey, place))
            else:
                _decode_again(survey, part, pool, place, int(samples[place]), expected)
            if progress:
                progress("closing holes", at + 1, len(wrong))
        os.fdatasync(fd)
    finally:
        os.close(fd)


def write_metadata(
    survey: Survey, part: Path, meta: Path, *, samples: NDArray[np.int64], digests: NDArray[np.uint64]
) -> str:
    """Give the pixels in `part` their HDF5 metadata, all on disk when this returns; the header digest.

    Args:
        samples: int64 (N,): the sample of each row of the finished file.
        digests: uint64 (N,): its pixel digest.
    """
    num_rows, row_bytes, target, listing = len(samples), survey.row_bytes, survey.target, survey.listing
    chunk_rows = chunk_rows_for(row_bytes, num_rows, survey.options.chunk_bytes)
    pixels = {"images": PixelSpec((target.height, target.width, target.channels), target.dtype, chunk_rows)}
    columns = {name: Column(column.values[samples], column.attrs) for name, column in listing.columns.items()}
    columns["split"] = Column(listing.split[samples], {"names": listing.split_names})
    columns["key"] = Column(np.array([listing.keys[i].encode() for i in samples.tolist()]))
    columns["digest"] = Column(digests)
    attrs = {
        "decoder": decoder_versions(),
        "source_layout": listing.layout,
        "pack_options": dump_options(survey.options.to_dict()),
        "seed": survey.options.seed,
        "shuffled": survey.options.shuffle,
    }
    create_file(meta, num_rows=num_rows, pixels=pixels, columns=columns, attrs=attrs)
    pixels_end = IMAGES_OFFSET + -(-num_rows // chunk_rows) * chunk_rows * row_bytes
    with open(meta, "rb") as twin, open(part, "r+b") as file:
        file.seek(row_offset(survey, num_rows))
        file.write(bytes(pixels_end - file.tell()))
        _copy(twin, file, 0, IMAGES_OFFSET)
        end = os.fstat(twin.fileno()).st_size
        _copy(twin, file, pixels_end, end)
        file.truncate(end)
        file.flush()
        os.fsync(file.fileno())
    # The identity is what a reader will find in the file itself, so it is read from there.
    return read_header(meta).header_digest


def publish(part: Path, meta: Path, output: Path, journal: Journal, header_digest: str) -> None:
    """Give the complete file its final name and remove what only packing needed."""
    journal.finished(header_digest)
    os.replace(part, output)
    sync_folder(output.parent)
    meta.unlink(missing_ok=True)
    journal.remove()
    sync_folder(output.parent)


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _wrong_rows(
    survey: Survey, part: Path, pool: WorkerPool, digests: NDArray[np.uint64], progress: Progress | None
) -> NDArray[np.int64]:
    """Rows of the finished file that are not yet what they should be, ascending."""
    num_chunks = -(-len(digests) // survey.chunk_rows)
    tasks = chunk_tasks(survey, part, len(digests), np.arange(num_chunks), digests=digests)
    wrong = [np.zeros(0, np.int64)]
    for done, (rows, right) in enumerate(pool.run(Worker.check, tasks)):
        wrong.append(rows[~right])
        if progress:
            progress("checking rows", done + 1, num_chunks)
    return np.sort(np.concatenate(wrong))


def _decode_again(survey: Survey, part: Path, pool: WorkerPool, place: int, sample: int, expected: int) -> None:
    task = ChunkTask(str(part), row_offset(survey, place), np.array([place]), survey.target, np.array([sample]))
    for result in pool.run(Worker.pack, [task]):
        if result.reasons or int(result.digests[0]) != expected:
            raise PackError(
                f"{survey.listing.keys[sample]}: decodes to other pixels than when it was packed first. Its file or "
                f"the decoder changed; start again with `--overwrite`."
            )


def _copy(source: Any, target: Any, start: int, stop: int) -> None:
    source.seek(start)
    target.seek(start)
    while start < stop:
        data = source.read(min(_COPY_BYTES, stop - start))
        target.write(data)
        start += len(data)
