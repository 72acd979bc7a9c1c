"""The complete file of a pack: HDF5 makes metadata around the rows that workers wrote, and compressed chunks.

HDF5 itself writes only into memory: a sparse file of the same layout, whose bytes other than pixels are then copied to
the rows in `OUT.h5.part`; or with all rows into `OUT.h5.meta`, if images are compressed in chunks or do not lie where
they belong. Until then rows stay where they were written, so that this can be repeated.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from fastload.errors import FastloadError, OutputError
from fastload.format.digests import plain
from fastload.format.ragged import Column, RaggedIndex, common_shape
from fastload.format.writer import (
    PixelSpec,
    RaggedSpec,
    check_size_limit,
    create_file,
    dump_options,
    forget,
    scratch_file,
)
from fastload.images.decode import decoder_versions
from fastload.pack.begin import remove
from fastload.pack.engine import PackTasks
from fastload.pack.pack_options import MAKE_ROOM
from fastload.pack.pack_worker import RowStream
from fastload.pack.survey import Survey
from fastload.system.files import mode_for, open_output, output_errors, read_bytes, sync, write_at
from fastload.system.threads import in_threads

_COPY_BYTES = 1 << 24


def complete_file(tasks: PackTasks, rows: NDArray[np.void], ends: tuple[int, ...], threads: int) -> tuple[Path, str]:
    """Makes the complete file of rows (ROW), synced to disk.

    Returns its path, `OUT.h5.part` or `OUT.h5.meta`, and its `header_digest`.
    """
    job, plan, mask_attrs = tasks.job, tasks.survey.plan, tasks.survey.mask_attrs
    columns, attrs = _described(tasks.survey, rows)
    of_one_size = tasks.survey.pixels(len(rows))
    specs: dict[str, PixelSpec | RaggedSpec] = {}
    for stream, end in zip(tasks.streams, ends, strict=True):
        if stream.spec is not None:
            specs[stream.name] = of_one_size[stream.name]
            continue
        assert plan is not None, "there are streams"
        shape, offsets = common_shape(rows["shape"]), stream.offsets(rows[stream.name], 0)[0]
        encoding, row_shape, dtype, more = "mask_encoding", shape[:2], plan.mask_dtype, mask_attrs
        if stream.name == "images":
            encoding, row_shape, dtype, more = "encoding", shape, plan.dtype, {}
        index = RaggedIndex(offsets, rows[stream.name], rows["shape"], rows[encoding], rows["orientation"])
        columns |= {name: Column(values, about) for name, (values, about) in index.datasets(stream.name).items()}
        specs[stream.name] = RaggedSpec(end, stream.chunk_bytes, row_shape, dtype, more)
    try:
        remove(job.meta)
        with scratch_file() as (memory, name):
            bases = create_file(name, num_rows=len(rows), pixels=specs, columns=columns, attrs=attrs)
            # `OUT.h5.part` becomes the file if what lies in it has no codec, and lies where HDF5 will look for it.
            # Masks behind the images do not, where samples were skipped that a first call was not to skip.
            in_part = [stream for stream in tasks.streams if stream.path == str(job.part)]
            target = job.part if all(bases.get(stream.name) == stream.base for stream in in_part) else job.meta
            with _Target.open(target, mode_for(job.output), new=target == job.meta) as file:
                for stream, end in zip(tasks.streams, ends, strict=True):
                    if stream.compressed:
                        _write_chunks(tasks, stream, of_one_size[stream.name], rows, threads, (memory, name), file)
                    else:
                        file.copy_rows(stream, end, bases[stream.name])
                with h5py.File(name, "r", driver="stdio") as done:
                    digest = str(plain(done.attrs["header_digest"]))
                file.copy_rest(memory)
    except FastloadError:
        raise
    except OSError as exc:
        raise OutputError(f"{job.output}: cannot be finished ({exc.strerror or exc}). {MAKE_ROOM}") from exc
    return target, digest


def _described(survey: Survey, rows: NDArray[np.void]) -> tuple[dict[str, Column], dict[str, Any]]:
    """Returns the datasets of a file of these rows (ROW) other than its pixels, and its root attributes."""
    listing, samples = survey.listing, survey.order[rows["row"]]
    columns = {name: Column(column.values[samples], column.attrs) for name, column in listing.columns.items()}
    columns["split"] = Column(listing.split[samples], {"names": listing.split_names})
    try:
        keys = np.array(listing.keys, "S")  # ASCII, six times as fast
    except UnicodeEncodeError:
        keys = np.array([key.encode() for key in listing.keys])
    columns["key"] = Column(keys[samples].astype(f"S{max(keys.dtype.itemsize, survey.key_bytes)}", copy=False))
    columns["digest"] = Column(rows["digest"].copy())
    attrs = {
        "decoder": decoder_versions(),
        "source_layout": listing.layout,
        "pack_options": dump_options(survey.options.to_dict()),
        "seed": survey.options.seed,
        "shuffled": survey.options.shuffle,
        **listing.attrs,
    }
    return columns, attrs


def _write_chunks(
    tasks: PackTasks,
    stream: RowStream,
    spec: PixelSpec,
    rows: NDArray[np.void],
    threads: int,
    memory: tuple[int, str],
    target: _Target,
) -> None:
    """Writes the rows of a stream as compressed chunks, in order; those that are not compressed yet are.

    HDF5 gets each one in `memory`, a descriptor and path, to say where it belongs; it is forgotten there at once.
    """
    offsets, end = stream.offsets(rows[stream.name], 0)
    begins = [*offsets[:: spec.chunk_rows].tolist(), end]
    chunked = rows["chunked"][:: spec.chunk_rows]
    check_size_limit(os.fstat(memory[0]).st_size + (end if chunked.all() else 2 * spec.allocated_bytes(len(rows))))
    with h5py.File(memory[1], "r+", driver="stdio") as file, open(stream.path, "rb", buffering=0) as source:
        dataset, fd = file[stream.name].id, source.fileno()

        def chunk(number: int) -> bytes:
            data = read_bytes(fd, begins[number + 1] - begins[number], stream.base + begins[number])
            return data if chunked[number] else spec.compressed_chunk(data)

        numbers = range(len(chunked))
        for number, data in zip(numbers, in_threads(chunk, numbers, threads, ordered=True), strict=True):
            where = (number * spec.chunk_rows, *(0 for _ in spec.row_shape))
            dataset.write_direct_chunk(where, data)
            at = dataset.get_chunk_info_by_coord(where).byte_offset
            target.write(data, at)
            forget(memory[0], at, at + len(data))
            if tasks.job.on_progress:
                tasks.job.on_progress(f"writing compressed {stream.name}", number + 1, len(numbers))


@dataclass
class _Target:
    """The file that is being completed, and the ranges (first byte, end) in which its rows lie already."""

    path: Path
    fd: int
    rows: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    @contextmanager
    def open(cls, path: Path, mode: int, *, new: bool) -> Iterator[_Target]:
        """Opens the file, a new one with no more permissions than these, and syncs it to disk at the end."""
        mode |= stat.S_IRUSR | stat.S_IWUSR
        fd = open_output(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if new else 0), mode)
        try:
            yield cls(path, fd)
            sync(fd)
        finally:
            os.close(fd)

    def write(self, data: bytes, at: int) -> None:
        """Writes rows at a byte of the file."""
        self._write(data, at)
        self._holds(at, at + len(data))

    def _holds(self, start: int, stop: int) -> None:
        if self.rows and self.rows[-1][1] == start:
            start = self.rows.pop()[0]
        self.rows.append((start, stop))

    def copy_rows(self, stream: RowStream, end: int, base: int) -> None:
        """Copies the rows of a stream, `end` bytes, to byte `base`, unless they lie there."""
        if stream.path != str(self.path):
            with open(stream.path, "rb", buffering=0) as source:
                self._copy(source.fileno(), stream.base, stream.base + end, base)
        self._holds(base, base + end)

    def copy_rest(self, memory: int) -> None:
        """Copies all bytes that are no rows; behind the last row of a dataset they become zero."""
        at, size = 0, os.fstat(memory).st_size
        for start, stop in [*sorted(self.rows), (size, size)]:
            self._copy(memory, at, start, at)
            at = stop
        os.ftruncate(self.fd, size)

    def _copy(self, source: int, start: int, stop: int, to: int) -> None:
        while start < stop and (data := read_bytes(source, min(_COPY_BYTES, stop - start), start)):
            self._write(data, to)
            start, to = start + len(data), to + len(data)

    def _write(self, data: bytes, at: int) -> None:
        with output_errors(f"{self.path}: {len(data):,} bytes cannot be written at byte {at:,} ({{}}). {MAKE_ROOM}"):
            write_at(self.fd, data, at)
