"""Where the rows of a pack lie, and its end: metadata built, the file under its final name.

Each step can be repeated after a kill at any instant. HDF5 itself writes only the sparse twin `OUT.h5.meta`, whose
non-pixel bytes are then copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.decode import decoder_versions
from fastload.format import IMAGES_OFFSET, open_hdf5, plain
from fastload.layout import create_file, dump_options, pixel_offsets
from fastload.pack.journal import Journal
from fastload.pack.survey import Survey
from fastload.pack.tasks import ChunkTask, Place, Places
from fastload.sources.listing import Column

_COPY_BYTES = 1 << 24


def planned_places(survey: Survey, num_rows: int, scratch: Path) -> Places | None:
    """Where HDF5 will put the pixel rows of a file of so many of these rows; None without images.

    Args:
        scratch: a file that may be written to find out, and is removed again.
    """
    specs = survey.pixels(num_rows)
    if not specs:
        return None
    images = Place(IMAGES_OFFSET, specs["images"].row_bytes)
    if "masks" not in specs:
        return Places(images)
    offsets = pixel_offsets(scratch, num_rows, specs)
    return Places(images, Place(offsets["masks"], specs["masks"].row_bytes))


def end_of(survey: Survey, num_rows: int, places: Places) -> int:
    """Byte behind the last pixel chunk of a file of so many rows."""
    last, spec = places.all[-1], list(survey.pixels(num_rows).values())[-1]
    return last.offset(-(-num_rows // spec.chunk_rows) * spec.chunk_rows)


def chunk_tasks(
    survey: Survey,
    part: Path,
    places: Places,
    num_rows: int,
    chunks: NDArray[np.int64],
    *,
    task_bytes: int = 0,
    **arrays: NDArray[Any],
) -> Iterator[ChunkTask]:
    """A task for each of these chunks of a file of num_rows rows, with its rows' part of each array.

    Args:
        chunks: int64, ascending.
        task_bytes: neighbouring chunks are one task as long as they have no more bytes than that.
    """
    assert survey.target is not None, "without images there are no chunks"
    chunk_bytes = survey.chunk_rows * sum(place.row_bytes for place in places.all)
    most = max(1, task_bytes // chunk_bytes)
    runs = np.split(chunks, np.flatnonzero(np.diff(chunks) != 1) + 1)
    for some in (run[at : at + most] for run in runs for at in range(0, len(run), most)):
        rows = np.arange(some[0] * survey.chunk_rows, min(num_rows, (some[-1] + 1) * survey.chunk_rows))
        parts = {name: array[rows] for name, array in arrays.items()}
        yield ChunkTask(str(part), places, rows, survey.target, **parts)


def write_metadata(
    survey: Survey,
    part: Path,
    meta: Path,
    places: Places | None,
    *,
    samples: NDArray[np.int64],
    digests: NDArray[np.uint64],
) -> str:
    """Give the pixels in `part` their HDF5 metadata, all on disk when this returns; the header digest.

    Args:
        places: where the rows of the finished file lie; None without images.
        samples: int64 (N,): the sample of each row of the finished file.
        digests: uint64 (N,): its pixel digest.
    """
    num_rows = len(samples)
    pixels = survey.pixels(num_rows)
    columns, attrs = described(survey, samples, digests)
    offsets = create_file(meta, num_rows=num_rows, pixels=pixels, columns=columns, attrs=attrs)
    assert places is None or list(offsets.values()) == [place.base for place in places.all], "rows lie as planned"
    with open(meta, "rb") as twin, open(part, "r+b") as file:
        end = os.fstat(twin.fileno()).st_size
        start = 0
        for name, spec in pixels.items():
            copy_bytes(twin, file, start, offsets[name])
            written = offsets[name] + num_rows * spec.row_bytes
            start = offsets[name] + -(-num_rows // spec.chunk_rows) * spec.chunk_rows * spec.row_bytes
            file.seek(written)
            file.write(bytes(start - written))
        copy_bytes(twin, file, start, end)
        file.truncate(end)
        file.flush()
        os.fsync(file.fileno())
    # The identity is what a reader will find in the file itself, so it is read from there.
    with open_hdf5(meta) as file:
        return str(plain(file.attrs["header_digest"]))


def described(
    survey: Survey, samples: NDArray[np.int64], digests: NDArray[np.uint64]
) -> tuple[dict[str, Column], dict[str, Any]]:
    """The datasets of a file beside its pixels, and its root attributes; the arguments of `write_metadata`."""
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
    """Give the complete file its final name and remove what only packing needed."""
    journal.finished(header_digest)
    os.replace(part, output)
    sync_folder(output.parent)
    meta.unlink(missing_ok=True)
    journal.remove()


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def copy_bytes(source: Any, target: Any, start: int, stop: int, to: int | None = None) -> None:
    """Copy a piece of one file into another, by default to the same place."""
    source.seek(start)
    target.seek(start if to is None else to)
    while start < stop and (data := source.read(min(_COPY_BYTES, stop - start))):
        target.write(data)
        start += len(data)
