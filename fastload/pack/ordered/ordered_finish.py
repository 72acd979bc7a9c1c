"""The end of an ordered pack: compressed chunks and metadata are made, and the file gets its final name.

Until then rows stay in their own files, so that each step can be repeated after a kill at any instant.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import FormatError, OutputError
from fastload.format.column import Column
from fastload.format.digests import plain
from fastload.format.header import open_hdf5, read_header
from fastload.format.ragged import RaggedIndex, common_shape
from fastload.format.writer import PixelSpec, RaggedSpec, create_file, is_linear
from fastload.pack.begin import identity_of, own_masks_files, what_changed
from fastload.pack.finish import PackReport, copy_bytes, described, report_of, sync_folder
from fastload.pack.journal import Journal, source_table
from fastload.pack.ordered.ordered_tasks import OrderedPack
from fastload.pack.ordered.record_log import RowStream, TaskLog
from fastload.pack.pack_options import PackJob, Progress
from fastload.system.files import read_bytes
from fastload.system.threads import in_order


@dataclass(frozen=True)
class Finished:
    """The report of a complete file, as the journal holds it."""

    header_digest: str
    converted: dict[str, int]
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    store: str
    encodings: dict[str, int]
    tasks: int


def finish(pack: OrderedPack, rows: NDArray[np.void], ends: tuple[int, ...], threads: int) -> tuple[Path, str]:
    """Makes the complete file, all of it synced to disk.

    Args:
        rows: ROW (N,), all rows that were made.
        ends: for each stream, where its rows end.
        threads: number of threads that compress.

    Returns:
        The path of the complete file, which is `OUT.h5.part` or `OUT.h5.meta`, and its header digest.

    Raises:
        OutputError: the disk is full; what was packed stays.
    """
    job = pack.job
    columns, attrs = described(pack.survey, pack.samples[rows["row"]], rows["digest"].copy())
    specs: dict[str, PixelSpec | RaggedSpec] = dict(pack.survey.pixels(len(rows)))
    for stream, end in zip(pack.streams, ends, strict=True):
        if stream.form == "ragged":
            specs[stream.name], index = _ragged_spec(pack, stream, rows, end)
            columns |= index
    specs = {stream.name: specs[stream.name] for stream in pack.streams}
    in_place = is_linear(specs["images"])
    try:
        job.meta.unlink(missing_ok=True)
        bases = create_file(job.meta, num_rows=len(rows), pixels=specs, columns=columns, attrs=attrs)
        for stream in pack.streams:
            spec = specs[stream.name]
            if isinstance(spec, PixelSpec) and not is_linear(spec):
                _compress(job.meta, stream, spec, len(rows), threads, job.on_progress)
        target = job.part if in_place else job.meta
        _join(pack, specs, bases, ends, len(rows), target)
    except OSError as exc:
        job.meta.unlink(missing_ok=True)
        raise OutputError(
            f"{job.output}: cannot be finished ({_reason(exc)}). What was packed is kept: make room, then run "
            f"the same command again."
        ) from exc
    with open_hdf5(job.meta) as file:
        return target, str(plain(file.attrs["header_digest"]))


def _reason(exc: OSError) -> str:
    """Returns why a file cannot be written, cut out of HDF5's long message."""
    found = re.search(r"error message = '([^']*)'", str(exc))
    return found[1] if found else exc.strerror or str(exc)


def _ragged_spec(
    pack: OrderedPack, stream: RowStream, rows: NDArray[np.void], end: int
) -> tuple[RaggedSpec, dict[str, Column]]:
    """Returns the layout of rows of varying length, and the datasets that say where they lie."""
    offsets, _ = stream.offsets(rows, 0)
    images = stream.name == "images"
    index = RaggedIndex(
        offsets, rows[stream.name], rows["shape"], rows["encoding" if images else "mask_encoding"], rows["orientation"]
    )
    shape = common_shape(rows["shape"])
    spec = RaggedSpec(
        end, stream.chunk_bytes, shape if images else shape[:2], pack.plan.dtype if images else np.dtype(np.uint8),
        {} if images else pack.survey.mask_attrs,
    )  # fmt: skip
    return spec, {name: Column(values, attrs) for name, (values, attrs) in index.datasets(stream.name).items()}


def _compress(
    meta: Path, stream: RowStream, spec: PixelSpec, num_rows: int, threads: int, progress: Progress | None
) -> None:
    """Writes the rows of a stream as compressed chunks, in order."""
    numbers = range(-(-num_rows // spec.chunk_rows))
    with h5py.File(meta, "r+") as file, open(stream.path, "rb", buffering=0) as raw:
        dataset = file[stream.name].id
        work = partial(_compressed, raw.fileno(), stream.base, spec, num_rows)
        for number, data in zip(numbers, in_order(work, numbers, threads), strict=True):
            dataset.write_direct_chunk((number * spec.chunk_rows, *(0 for _ in spec.row_shape)), data)
            if progress:
                progress(f"compressing {stream.name}", number + 1, len(numbers))


def _compressed(fd: int, base: int, spec: PixelSpec, num_rows: int, number: int) -> bytes:
    """Returns a compressed chunk; HDF5 expects all its rows, those behind the last are zero."""
    first = number * spec.chunk_rows
    count = min(spec.chunk_rows, num_rows - first)
    data = read_bytes(fd, count * spec.row_bytes, base + first * spec.row_bytes)
    return spec.codec.compress(data.ljust(spec.chunk_rows * spec.row_bytes, b"\0"))


def _join(
    pack: OrderedPack,
    specs: dict[str, PixelSpec | RaggedSpec],
    bases: dict[str, int],
    ends: tuple[int, ...],
    num_rows: int,
    target: Path,
) -> None:
    """Copies what HDF5 wrote and what workers wrote into one file."""
    meta = pack.job.meta
    with open(meta, "rb") as source, open(target, "r+b") as file:
        size = os.fstat(source.fileno()).st_size
        if target != meta:
            start = 0
            for name, base in bases.items():
                copy_bytes(source, file, start, base)
                start = base + specs[name].allocated_bytes(num_rows)
            copy_bytes(source, file, start, size)
        for stream, end in zip(pack.streams, ends, strict=True):
            if stream.name in bases and stream.path != str(target):
                with open(stream.path, "rb") as rows:
                    copy_bytes(rows, file, stream.base, stream.base + end, bases[stream.name])
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())


def publish(job: PackJob, journal: Journal, log: TaskLog, path: Path, done: Finished) -> None:
    """Gives the complete file its final name and removes the files that only packing needed."""
    log.finished({**asdict(done), "path": path.name, "sources": _sources_check(job)})
    os.replace(path, job.output)
    sync_folder(job.output.parent)
    _clean_up(job, journal)


def _sources_check(job: PackJob) -> int:
    table = source_table(job.listing.keys, job.listing.sizes, job.listing.mtimes_ns)
    return xxhash.xxh3_64_intdigest(table.tobytes())


def _clean_up(job: PackJob, journal: Journal) -> None:
    for path in (job.meta, *own_masks_files(job, journal), job.part):
        path.unlink(missing_ok=True)
    journal.remove()


def finished_report(job: PackJob, journal: Journal, started: float) -> PackReport | None:
    """Returns the report of a pack that was killed between the file's final name and the removal of its journal."""
    log = TaskLog(journal)
    found = log.read()
    if found is None or found.finished is None or not job.output.exists():
        return None
    values = dict(found.finished)
    same_sources = values.pop("sources") == _sources_check(job)
    if job.output.with_name(values.pop("path")).exists() or not same_sources:
        return None
    if what_changed(identity_of(job), found.sources, found.head, found.sources, job):
        return None
    done = Finished(**values)
    with suppress(FormatError):
        file = read_header(job.output)
        if file.header_digest == done.header_digest:
            _clean_up(job, journal)
            skipped = tuple((key, reason) for key, reason in done.skipped)
            return report_of(
                job, file, done.converted, skipped, started=started, images_per_s=0.0, chunks=done.tasks,
                chunks_kept=done.tasks, chunks_decoded=0, notes=tuple(done.notes), store=done.store,
                encodings=done.encodings,
            )  # fmt: skip
    return None
