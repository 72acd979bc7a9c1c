"""The end of a pack: the complete file is made, gets its final name, and a report.

HDF5 makes metadata around the rows that workers wrote, and compressed chunks. It writes only into memory: a sparse file
of the same layout, whose bytes other than pixels are then copied to the rows in `OUT.h5.part`; or with all rows into
`OUT.h5.meta`, if images are compressed in chunks or do not lie where they belong. Until then rows stay where they were
written. So each step can be repeated after a kill or a power failure at any instant.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import FastloadError, FormatError, OutputError, SourceError
from fastload.format.digests import plain
from fastload.format.header import PackedFile, read_header
from fastload.format.ragged import ENCODINGS, Column, RaggedIndex, common_shape, index_names
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
from fastload.pack.begin import changed_since, own_files, remove
from fastload.pack.decisions import source_exceptions
from fastload.pack.encode import ROW
from fastload.pack.engine import PackTasks
from fastload.pack.journal import Journal, JournalContents, TaskRecord, source_table
from fastload.pack.pack_options import MAKE_ROOM, PackJob, journal_path, output_exists
from fastload.pack.pack_worker import RowStream
from fastload.pack.survey import Survey, unreadable
from fastload.system.files import mode_for, open_output, output_errors, read_bytes, sync, sync_folder, write_at
from fastload.system.text import counted, format_bytes, object_text, seconds_text
from fastload.system.threads import in_threads

_NOT_OF_THE_SAMPLE = ("images", "split", "key", "digest", "digest_fields")
_COPY_BYTES = 1 << 24


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
        images_per_s: images this call packed over `seconds`: listing, headers and finishing are part of it.
        chunks: chunks of the file as planned; where images have no chunks of their own, tasks of the packer.
        chunks_kept: those that an earlier, interrupted call had packed.
        chunks_decoded: those that this call packed.
        store: the encoding of images, such as "raw" or "jpeg:90".
        encodings: number of rows that are "raw", "jpeg" and "zstd".
        pixel_bytes: bytes of all decoded images and masks; 0 without images.
        decoded_per_s: `images_per_s` over the time that decoding and writing them took.
        warned: (key, warning) of each JPEG that was packed though libjpeg warns of it, as of corrupt data. Of those
            kept as they are (store="source") only some are looked at: that lack their end, or hold many zeros.
        num_shards: shards of the file, which is their index; None for one that holds its rows itself.
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
    decoded_per_s: float = 0.0
    warned: tuple[tuple[str, str], ...] = ()
    num_shards: int | None = None

    def __repr__(self) -> str:
        what = [str(self.path), counted(self.num_samples, "sample")]
        what += (
            [f"{self.dtype} ({', '.join(str(side or '?') for side in self.image_shape)})"] if self.image_shape else []
        )
        what += [format_bytes(self.file_bytes)]
        what += [] if self.num_shards is None else [counted(self.num_shards, "shard")]
        how = [f"layout {self.layout}", *self.fields, *(f"{name} {rows:,}" for name, rows in self.splits.items())]
        how += [f"{len(self.skipped):,} skipped"] if self.skipped else []
        how += [counted(len(self.warned), "warning")] if self.warned else []
        how += [f"{self.images_per_s:,.0f} images/s, {seconds_text(self.seconds)}", counted(len(self.notes), "note")]
        return object_text("PackReport", what, how)


@dataclass(frozen=True)
class PackFacts:
    """The part of a report that no reader of the file could find out; attributes are those of `PackReport`."""

    converted: dict[str, int]
    skipped: tuple[tuple[str, str], ...]
    warned: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    store: str
    encodings: dict[str, int]
    chunks: int
    pixel_bytes: int

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> PackFacts:
        """Returns the facts that a journal holds; those of earlier releases have no `warned`."""
        named = {name: tuple((key, text) for key, text in values.get(name, ())) for name in ("skipped", "warned")}
        return cls(**{**values, **named, "notes": tuple(values["notes"])})


def finish(tasks: PackTasks, records: Mapping[int, TaskRecord], journal: Journal, threads: int) -> PackReport:
    """Makes the complete file, synced to disk, gives it its final name, removes what only packing needed, and reports.

    The records are of all tasks; `threads` compress. Raises SourceError if no sample could be packed; OutputError
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
        raise SourceError(unreadable(job, skipped, survey.num_samples))
    path, header_digest = _complete_file(tasks, rows, tasks.end_of(records), threads)
    if job.output.exists() and not job.overwrite:
        raise output_exists(job.output)
    counts = np.bincount(rows["encoding"], minlength=len(ENCODINGS)).tolist() if tasks.streams else []
    height, width, channels = rows["shape"].astype(np.int64).T
    value_bytes = 0 if survey.plan is None else survey.plan.dtype.itemsize
    mask_bytes = 0 if survey.plan is None or len(tasks.streams) < 2 else survey.plan.mask_dtype.itemsize
    before = job.of_parts
    facts = PackFacts(
        converted=_converted(tasks, rows) if before is None else before.converted,
        skipped=(*survey.skipped, *skipped),
        warned=tuple(tasks.named({row: warnings.get(row, "") for row in rows["row"][rows["warned"] > 0].tolist()}))
        if before is None
        else before.warned,
        notes=(*survey.notes, *_notes(tasks, rows)),
        store="raw" if survey.plan is None else str(survey.plan.option),
        encodings={name: count for name, count in zip(ENCODINGS, counts, strict=False) if count},
        chunks=tasks.chunks_of(made),
        pixel_bytes=int((height * width * (channels * value_bytes + mask_bytes)).sum()),
    )
    journal.finished({**vars(facts), "header_digest": header_digest, "path": path.name, "sources": _sources_check(job)})
    with output_errors(
        f"{job.output}: cannot get its name ({{}}). What was packed is kept: run the same command again."
    ):
        _copy_permissions(job.output, path)
        os.replace(path, job.output)
        sync_folder(job.output.parent)
    report = report_of(job, read_header(job.output), facts)  # While there is a journal: the disk may fail here, too.
    _clean_up(job, [job.part, *(Path(stream.path) for stream in tasks.streams)], journal)
    return report


def _copy_permissions(old: Path, new: Path) -> None:
    """Gives a file the permissions of the file that it replaces, and its group, where that is allowed."""
    with suppress(FileNotFoundError):
        before = os.stat(old)
        with suppress(PermissionError):
            os.chown(new, -1, before.st_gid)
        with suppress(PermissionError):  # as on FAT, which has none
            os.chmod(new, mode_for(old))


def _clean_up(job: PackJob, files: Iterable[Path], journal: Journal) -> None:
    """Removes what only packing needed, the journal last: it says whose the others are. A part's journal stays."""
    parts = [path for part in job.parts for path in (part, journal_path(part))]
    there = [path for path in dict.fromkeys([*files, *parts]) if os.path.lexists(path)]
    for path in there:
        remove(path)
    if there:
        with output_errors(f"{job.output.parent}: cannot be written ({{}}). Run the same command again."):
            sync_folder(job.output.parent)
    if not job.is_part:
        journal.remove()


def finished_report(job: PackJob, journal: Journal, found: JournalContents | None) -> PackReport | None:
    """Returns the report of a pack that was killed between the file's final name and the removal of its journal.

    Of a job with parts these say whether it is the same one: the samples of a file that it replaced are gone.
    """
    if found is None or found.finished is None or not job.output.exists():
        return None
    done = dict(found.finished)
    same_sources, header_digest = done.pop("sources") == _sources_check(job), done.pop("header_digest")
    unpublished = job.output.with_name(done.pop("path")).exists()
    if job.parts:
        same = found.head.get("parts") == [part.name for part in job.parts]
    else:
        same = same_sources and not changed_since(job, found.head, found.sources)
    if unpublished or not same:
        return None
    with suppress(FormatError):
        file = read_header(job.output)
        if file.header_digest == header_digest:
            report = report_of(job, file, PackFacts.of_json(done))
            _clean_up(job, own_files(job, found), journal)
            return report
    return None


def _sources_check(job: PackJob) -> int:
    return xxhash.xxh3_64_intdigest(source_table(job.listing).tobytes())


def report_of(job: PackJob, file: PackedFile, facts: PackFacts) -> PackReport:
    """Returns the report of a finished file, as if this call had packed nothing."""
    images = file.fields.get("images")
    hidden = {*_NOT_OF_THE_SAMPLE, *(part for name in file.ragged for part in index_names(name))}
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
        chunks_kept=facts.chunks,
        chunks_decoded=0,
        **vars(facts),
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


def _complete_file(tasks: PackTasks, rows: NDArray[np.void], ends: tuple[int, ...], threads: int) -> tuple[Path, str]:
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
