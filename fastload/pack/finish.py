"""The end of a pack: compressed chunks and metadata are made, the file gets its final name, and a report.

HDF5 itself writes only `OUT.h5.meta`: a sparse file of the same layout, whose bytes other than pixels are then copied
to the rows in `OUT.h5.part`; or the whole file, if rows of images are compressed in chunks or do not lie where they
belong. Until then rows stay where they were written, so that each step can be repeated after a kill at any instant.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import FormatError, OutputError, SourceError
from fastload.format.column import Column
from fastload.format.digests import plain
from fastload.format.header import PIXEL_FIELDS, PackedFile, open_hdf5, read_header
from fastload.format.ragged import ENCODINGS, RaggedIndex, common_shape, index_names
from fastload.format.writer import PixelSpec, RaggedSpec, create_file, dump_options
from fastload.images.decode import decoder_versions
from fastload.pack.begin import changed_since, own_files
from fastload.pack.decisions import source_exceptions
from fastload.pack.encode import ROW
from fastload.pack.engine import PackTasks
from fastload.pack.journal import Journal, JournalContents, TaskRecord, source_table
from fastload.pack.pack_options import PackJob, output_exists
from fastload.pack.pack_worker import RowStream
from fastload.pack.survey import Survey, unreadable
from fastload.system.files import read_bytes
from fastload.system.threads import in_threads

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
        chunks: chunks of the file as planned; where images have no chunks of their own, tasks of the packer.
        chunks_kept: those that an earlier, interrupted call had packed.
        chunks_decoded: those that this call packed.
        store: the encoding of images, such as "raw" or "jpeg:90".
        encodings: number of rows that are "raw", "jpeg" and "zstd".
        pixel_bytes: bytes of all decoded images and masks; 0 without images.
        warned: (key, warning) of each JPEG that was packed though libjpeg warns of it, as of corrupt data. Of those
            kept as they are (store="source") only some are looked at: that lack their end, or hold many zeros.
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
    pixel_bytes: int = 0
    warned: tuple[tuple[str, str], ...] = ()


def finish(tasks: PackTasks, records: Mapping[int, TaskRecord], journal: Journal, threads: int) -> PackReport:
    """Makes the complete file, synced to disk, gives it its final name, removes what only packing needed, and reports.

    The records are those of all tasks; `threads` compress. Raises SourceError if no sample could be packed; OutputError
    if the disk is full, or the output was made meanwhile: what was packed stays.
    """
    job, survey = tasks.job, tasks.survey
    made = [records[number] for number in sorted(records)]
    skipped = tasks.named({row: reason for record in made for row, reason in record.reasons.items()})
    warnings = {row: warning for record in made for row, warning in record.warnings.items()}
    if tasks.streams:
        rows = np.concatenate([record.rows for record in made])
    else:  # samples without images
        rows = np.zeros(survey.num_samples, ROW)
        rows["row"], rows["digest"] = np.arange(len(rows)), xxhash.xxh3_64_intdigest(b"")
    if not len(rows):
        raise SourceError(unreadable(job.source, skipped, survey.num_samples))
    path = _complete(tasks, rows, tasks.end_of(records), threads)
    # Read from the file, as every reader will.
    with open_hdf5(job.meta) as file:
        header_digest = str(plain(file.attrs["header_digest"]))
    if job.output.exists() and not job.overwrite:
        raise output_exists(job.output)
    counts = np.bincount(rows["encoding"], minlength=len(ENCODINGS)).tolist() if tasks.streams else []
    height, width, channels = rows["shape"].astype(np.int64).T
    value_bytes = 0 if survey.plan is None else survey.plan.dtype.itemsize
    # The part of the report that no reader of the file could find out.
    done = {
        "converted": _converted(tasks, rows),
        "skipped": (*survey.skipped, *skipped),
        "warned": tasks.named({row: warnings.get(row, "") for row in rows["row"][rows["warned"] > 0].tolist()}),
        "notes": (*survey.notes, *_notes(tasks, rows)),
        "store": "raw" if survey.plan is None else str(survey.plan.option),
        "encodings": {name: count for name, count in zip(ENCODINGS, counts, strict=False) if count},
        "chunks": tasks.chunks_of(made),
        "pixel_bytes": int((height * width * (channels * value_bytes + len(tasks.streams) - 1)).sum()),
    }
    journal.finished({**done, "header_digest": header_digest, "path": path.name, "sources": _sources_check(job)})
    os.replace(path, job.output)
    fd = os.open(job.output.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    for each in (job.meta, job.part, *(Path(stream.path) for stream in tasks.streams)):
        each.unlink(missing_ok=True)
    journal.remove()
    return _report(job, read_header(job.output), done)


def finished_report(job: PackJob, journal: Journal, found: JournalContents | None) -> PackReport | None:
    """Returns the report of a pack that was killed between the file's final name and the removal of its journal."""
    if found is None or found.finished is None or not job.output.exists():
        return None
    done = dict(found.finished)
    same_sources, header_digest = done.pop("sources") == _sources_check(job), done.pop("header_digest")
    unpublished = job.output.with_name(done.pop("path")).exists()
    if unpublished or not same_sources or changed_since(job, found.head, found.sources):
        return None
    with suppress(FormatError):
        file = read_header(job.output)
        if file.header_digest == header_digest:
            for path in (job.meta, *own_files(job, found)):
                path.unlink(missing_ok=True)
            journal.remove()
            return _report(job, file, done)
    return None


def _sources_check(job: PackJob) -> int:
    return xxhash.xxh3_64_intdigest(source_table(job.listing).tobytes())


def _report(job: PackJob, file: PackedFile, done: dict[str, Any]) -> PackReport:
    """Returns the report of a finished file, as if this call had packed nothing; done may have passed through JSON."""
    images = file.fields.get("images")
    ragged = [name for name in PIXEL_FIELDS if name in file.fields and file.fields[name].ragged is not None]
    hidden = {*_NOT_OF_THE_SAMPLE, *(part for name in ragged for part in index_names(name))}
    named = {name: tuple((key, text) for key, text in done.get(name, ())) for name in ("skipped", "warned")}
    return PackReport(
        path=job.output,
        layout=job.listing.layout,
        num_samples=file.num_rows,
        image_shape=images.shape if images else (),
        dtype=str(images.dtype) if images else "",
        fields=tuple(name for name in file.fields if name not in hidden),
        splits={name: len(rows) for name, rows in file.splits.items()},
        file_bytes=file.identity.size,
        seconds=0.0,
        images_per_s=0.0,
        chunks_kept=done["chunks"],
        chunks_decoded=0,
        **{**done, **named, "notes": tuple(done["notes"])},
    )


def _notes(tasks: PackTasks, rows: NDArray[np.void]) -> list[str]:
    """Returns notes about the rows that were made."""
    ragged = [stream for stream in tasks.streams if stream.spec is None]
    large = sum(int(np.sum(rows[stream.name] > stream.chunk_bytes)) for stream in ragged)
    notes = []
    if large:
        size = f"{ragged[0].chunk_bytes:,} bytes"
        notes.append(f"{large} images or masks are larger than a chunk ({size}) and have chunks of their own")
    return notes


def _converted(tasks: PackTasks, rows: NDArray[np.void]) -> dict[str, int]:
    """Returns the conversions of the survey; those that depend on the encoding without samples skipped since."""
    survey, plan, headers = tasks.survey, tasks.survey.plan, tasks.survey.headers
    if plan is None or headers is None:
        return survey.converted
    expected = source_exceptions(plan, survey.samples, headers)
    others = {name: count for name, count in survey.converted.items() if name not in expected}
    return others | source_exceptions(plan, survey.order[rows["row"]], headers)


def _complete(tasks: PackTasks, rows: NDArray[np.void], ends: tuple[int, ...], threads: int) -> Path:
    """Makes the complete file of rows (ROW), synced to disk; returns its path, `OUT.h5.part` or `OUT.h5.meta`."""
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
        encoding, spec = "mask_encoding", RaggedSpec(end, stream.chunk_bytes, shape[:2], np.dtype("u1"), mask_attrs)
        if stream.name == "images":
            encoding, spec = "encoding", RaggedSpec(end, stream.chunk_bytes, shape, plan.dtype, {})
        index = RaggedIndex(offsets, rows[stream.name], rows["shape"], rows[encoding], rows["orientation"])
        columns |= {name: Column(values, more) for name, (values, more) in index.datasets(stream.name).items()}
        specs[stream.name] = spec
    try:
        job.meta.unlink(missing_ok=True)
        bases = create_file(job.meta, num_rows=len(rows), pixels=specs, columns=columns, attrs=attrs)
        for stream in tasks.streams:
            if stream.compressed:
                _copy_chunks(tasks, stream, of_one_size[stream.name], rows, threads)
        # `OUT.h5.part` becomes the file if what lies in it has no codec, and lies where HDF5 will look for it. Masks
        # behind the images do not, where samples were skipped that a first call was not to skip.
        in_part = [stream for stream in tasks.streams if stream.path == str(job.part)]
        target = job.part if all(bases.get(stream.name) == stream.base for stream in in_part) else job.meta
        _join(tasks, bases, ends, target)
    except OSError as exc:
        job.meta.unlink(missing_ok=True)
        found = re.search(r"error message = '([^']*)'", str(exc))  # in HDF5's long message
        reason = found[1] if found else exc.strerror or str(exc)
        raise OutputError(
            f"{job.output}: cannot be finished ({reason}). What was packed is kept: make room, then run "
            f"the same command again."
        ) from exc
    return target


def _described(survey: Survey, rows: NDArray[np.void]) -> tuple[dict[str, Column], dict[str, Any]]:
    """Returns the datasets of a file of these rows (ROW) other than its pixels, and its root attributes."""
    listing, samples = survey.listing, survey.order[rows["row"]]
    columns = {name: Column(column.values[samples], column.attrs) for name, column in listing.columns.items()}
    columns["split"] = Column(listing.split[samples], {"names": listing.split_names})
    try:
        keys = np.array(listing.keys, "S")  # ASCII, six times as fast
    except UnicodeEncodeError:
        keys = np.array([key.encode() for key in listing.keys])
    columns["key"] = Column(keys[samples])
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


def _copy_chunks(tasks: PackTasks, stream: RowStream, spec: PixelSpec, rows: NDArray[np.void], threads: int) -> None:
    """Writes the rows of a stream as compressed chunks, in order; those that are not compressed yet are."""
    offsets, end = stream.offsets(rows[stream.name], 0)
    begins = [*offsets[:: spec.chunk_rows].tolist(), end]
    chunked = rows["chunked"][:: spec.chunk_rows]
    with h5py.File(tasks.job.meta, "r+") as file, open(stream.path, "rb", buffering=0) as source:
        dataset, fd = file[stream.name].id, source.fileno()

        def chunk(number: int) -> bytes:
            data = read_bytes(fd, begins[number + 1] - begins[number], stream.base + begins[number])
            return data if chunked[number] else spec.compressed_chunk(data)

        numbers = range(len(chunked))
        for number, data in zip(numbers, in_threads(chunk, numbers, threads, ordered=True), strict=True):
            dataset.write_direct_chunk((number * spec.chunk_rows, *(0 for _ in spec.row_shape)), data)
            if tasks.job.on_progress:
                tasks.job.on_progress(f"writing compressed {stream.name}", number + 1, len(numbers))


def _join(tasks: PackTasks, bases: dict[str, int], ends: tuple[int, ...], target: Path) -> None:
    """Copies what HDF5 wrote and what workers wrote into one file.

    Behind the last row of a dataset it becomes zero, as the sparse file is that HDF5 wrote.
    """
    meta, at, size = tasks.job.meta, 0, tasks.job.meta.stat().st_size
    with open(target, "r+b") as file:
        for stream, end in zip(tasks.streams, ends, strict=True):
            if stream.name in bases:
                base = bases[stream.name]
                _copy_bytes(meta, at, base, file, at)
                _copy_bytes(Path(stream.path), stream.base, stream.base + end, file, base)
                at = base + end
        _copy_bytes(meta, at, size, file, at)
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())


def _copy_bytes(path: Path, start: int, stop: int, target: Any, to: int) -> None:
    """Copies bytes start to stop of a file to byte `to` of another one; of a file to itself: nothing."""
    if path == Path(target.name):
        return
    target.seek(to)
    with open(path, "rb") as source:
        source.seek(start)
        while start < stop and (data := source.read(min(_COPY_BYTES, stop - start))):
            target.write(data)
            start += len(data)
