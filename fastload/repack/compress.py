"""A listing of rows of one size as an HDF5 file of compressed chunks: gzip or zstd.

Threads compress (zlib and zstd release the GIL) and append chunks to `OUT.h5.part`; when every chunk is there, the HDF5
file is made of them as `OUT.h5.meta` and renamed. A call that was killed is continued by the same call: chunks that are
there are checked by their digests and kept.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import FormatError, OptionError, OutputError, ResumeError, SourceError
from fastload.format.codecs import Codec
from fastload.format.column import Column
from fastload.format.header import read_header
from fastload.format.writer import PixelSpec, create_file, writer_name
from fastload.images.fit import Target
from fastload.pack import PackOptions, PackReport, check_output
from fastload.pack.begin import disk_full, free_bytes
from fastload.pack.fill import row_digests_of
from fastload.pack.finish import report_of, sync_folder
from fastload.pack.journal import open_locked
from fastload.pack.ordered.record_log import RECORD_HEADER, append_record, begin_records, record_at, whole_records
from fastload.pack.pack_options import PackJob, Progress, journal_path, output_exists
from fastload.pack.pack_worker import Worker
from fastload.pack.pool import PackPool
from fastload.pack.survey import row_order, survey_listing, unreadable
from fastload.sources.listing import Listing
from fastload.system.files import read_bytes
from fastload.system.machine import available_cpus
from fastload.system.threads import in_threads

_SAMPLED_CHUNKS = 4

MAGIC = b"fastload chunks1\n"
_IDENTITY = -1
"""Number of the record that says what is being compressed; chunks have numbers from 0."""


@dataclass(frozen=True, eq=False)
class _Chunks:
    """The chunks to compress, in the order of the file's rows."""

    listing: Listing
    samples: NDArray[np.int64]
    target: Target
    specs: dict[str, PixelSpec]
    where: str

    @property
    def num_rows(self) -> int:
        return len(self.samples)

    @property
    def chunk_rows(self) -> int:
        return self.specs["images"].chunk_rows

    @property
    def num_chunks(self) -> int:
        return -(-self.num_rows // self.chunk_rows)

    def rows(self, number: int) -> range:
        return range(number * self.chunk_rows, min(self.num_rows, (number + 1) * self.chunk_rows))


def compress_listing(
    listing: Listing,
    output: str | Path,
    *,
    options: PackOptions,
    source_name: str,
    codec: Codec,
    workers: int | None,
    overwrite: bool,
    progress: Progress | None,
) -> PackReport:
    """Writes a listing of arrays with compressed chunks.

    Args:
        output, options, codec, workers, overwrite, progress: as `repack_file`.
        source_name: name of the source in messages.

    Raises:
        OptionError: it has no images.
        SourceError: rows do not have their digest; none is left out.
        OutputError, ResumeError, PackError: as pack_images.
    """
    started = time.perf_counter()
    output = Path(output)
    output = output.resolve() if output.is_symlink() else output
    job = PackJob(source_name, output, listing, options, "fail", overwrite, progress)
    _check_output(job)
    chunks = _chunks_of(job, codec)
    identity = _identity_of(chunks)
    with closing(SpillFile(job.part)) as spill:
        digests = np.zeros(chunks.num_rows, np.uint64)
        kept = _resume_or_begin(spill, chunks, identity, digests, overwrite)
        if not kept:
            _check_space(chunks, output, codec, spill)
        todo = [number for number in range(chunks.num_chunks) if number not in spill]
        threads = max(1, available_cpus() if workers is None else workers)
        begun = time.perf_counter()
        done = chunks.num_rows - sum(len(chunks.rows(number)) for number in todo)
        for number, row_digests, body in in_threads(lambda number: _compressed(chunks, number, codec), todo, threads):
            spill.append(number, body)
            rows = chunks.rows(number)
            digests[rows.start : rows.stop] = row_digests
            done += len(rows)
            if progress:
                progress("compressing", done, chunks.num_rows)
        rate = sum(len(chunks.rows(number)) for number in todo) / max(time.perf_counter() - begun, 1e-9)
        _make_file(chunks, spill, job.meta, digests, progress)
        _publish(job.meta, output, spill, resumed=bool(kept), overwrite=overwrite)
    return report_of(
        job, read_header(output), {}, (), started=started, images_per_s=rate, chunks=chunks.num_chunks,
        chunks_kept=kept, chunks_decoded=len(todo), notes=listing.notes, encodings={},
    )  # fmt: skip


def _check_output(job: PackJob) -> None:
    output, journal = job.output, journal_path(job.output)
    check_output(output)
    if journal.exists():
        if not job.overwrite:
            raise ResumeError(
                f"{journal}: left by an interrupted pack without a codec. Finish that first, or start again with "
                f"`--overwrite`."
            )
        journal.unlink()
        job.part.unlink(missing_ok=True)
    if output.exists() and not job.overwrite and not job.part.exists():
        raise output_exists(output)


def _chunks_of(job: PackJob, codec: Codec) -> _Chunks:
    listing = job.listing
    if listing.files is None:
        raise OptionError(f"{job.source}: holds no images, and only pixels are compressed. Leave `--codec` out.")
    with PackPool(0) as pool:
        pool.use(listing)
        survey = survey_listing(listing, job.options, pool, source=job.source)
    assert survey.target is not None, "it has images"
    specs = survey.pixels(len(listing))
    rows = specs["images"].chunk_rows
    specs = {name: replace(spec, chunk_rows=rows, codec=codec) for name, spec in specs.items()}
    return _Chunks(listing, row_order(survey), survey.target, specs, job.source)


def _identity_of(chunks: _Chunks) -> bytes:
    """Returns what must be the same for compressing to be continued, as JSON."""
    listing = chunks.listing
    digest = xxhash.xxh3_128("\0".join(listing.keys).encode())
    for name, column in sorted(listing.columns.items()):
        digest.update(f"{name} {column.values.dtype.str} {column.values.shape} {sorted(column.attrs.items())}".encode())
        digest.update(np.ascontiguousarray(column.values).data)
    for array in (listing.split, listing.sizes, listing.mtimes_ns, listing.digests, chunks.samples):
        if array is not None:
            digest.update(np.ascontiguousarray(array).data)
    specs = {name: [spec.row_shape, spec.dtype.str, spec.chunk_rows] for name, spec in chunks.specs.items()}
    identity = {
        "release": writer_name(),
        "attrs": {name: str(value) for name, value in listing.attrs.items()},
        "splits": listing.split_names,
        "pixels": specs,
        "codec": str(chunks.specs["images"].codec),
        "rows": digest.hexdigest(),
    }
    return json.dumps(identity, sort_keys=True).encode()


def _resume_or_begin(
    spill: SpillFile, chunks: _Chunks, identity: bytes, digests: NDArray[np.uint64], overwrite: bool
) -> int:
    """Returns how many chunks an interrupted call has left, their digests filled in; begins the file if it is new."""
    kept = 0

    def on_chunk(number: int, body: bytes) -> None:
        nonlocal kept
        if 0 <= number < chunks.num_chunks:
            rows = chunks.rows(number)
            digests[rows.start : rows.stop] = np.frombuffer(body[: 8 * len(rows)], "<u8")
            kept += 1

    if spill.size:
        found = spill.resume(identity, on_chunk)
        if found == identity:
            return kept
        if not overwrite:
            why = "it is of another file, option or release" if found else "it is not of this kind, or was cut short"
            raise ResumeError(
                f"{spill.path}: left by an interrupted call that this one cannot continue: {why}. Start again with "
                f"`--overwrite`, or remove {spill.path.name}."
            )
    digests[:] = 0
    spill.begin(identity)
    return 0


def _compressed(chunks: _Chunks, number: int, codec: Codec) -> tuple[int, NDArray[np.uint64], bytes]:
    """Returns a chunk's number, its rows' digests, and its record: digests, lengths and compressed data.

    Raises:
        SourceError: a row does not have the expected digest.
    """
    rows = chunks.rows(number)
    samples = chunks.samples[rows.start : rows.stop]
    assert chunks.listing.files is not None, "checked before"
    arrays, reasons = Worker(chunks.listing.files, chunks.listing.masks).decode(samples, chunks.target)
    digests = row_digests_of(arrays)
    if chunks.listing.digests is not None:
        for at in np.flatnonzero(digests != chunks.listing.digests[samples]).tolist():
            reasons.setdefault(at, "its pixels are not those that were packed (their digest differs)")
    if reasons:
        bad = [(chunks.listing.keys[samples[at]], reason) for at, reason in sorted(reasons.items())]
        raise SourceError(unreadable(chunks.where, bad, chunks.num_rows))
    pieces = []
    for array, spec in zip(arrays, chunks.specs.values(), strict=True):
        # Little-endian on disk, and whole: HDF5 expects all rows of a chunk, those behind the last one are zero.
        data = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).reshape(-1).view(np.uint8)
        whole = bytes(data.data) + bytes((spec.chunk_rows - len(rows)) * spec.row_bytes)
        pieces.append(codec.compress(whole))
    lengths = np.array([len(piece) for piece in pieces], "<u8").tobytes()
    return number, digests, b"".join([digests.astype("<u8").tobytes(), lengths, *pieces])


def _check_space(chunks: _Chunks, output: Path, codec: Codec, spill: SpillFile) -> None:
    """Raises OutputError if the disk has too little space for all chunks twice, estimated from some of them."""
    sampled = sorted({number * chunks.num_chunks // _SAMPLED_CHUNKS for number in range(_SAMPLED_CHUNKS)})
    try:
        size = sum(len(_compressed(chunks, number, codec)[2]) for number in sampled) / len(sampled) * chunks.num_chunks
    except SourceError:
        spill.remove()
        raise
    needed, free = int(2 * size), free_bytes(output)
    if needed > free:
        spill.remove()
        raise disk_full(
            f"{output}: needs about {needed:,} bytes until it is finished, half of that then; {free:,} are free. Free "
            f"some, or choose another disk."
        )


def _make_file(
    chunks: _Chunks, spill: SpillFile, meta: Path, digests: NDArray[np.uint64], progress: Progress | None
) -> None:
    """Makes the HDF5 file of all chunks, synced to disk."""
    listing, samples = chunks.listing, chunks.samples
    columns = {name: Column(column.values[samples], column.attrs) for name, column in listing.columns.items()}
    columns["split"] = Column(listing.split[samples], {"names": listing.split_names})
    columns["key"] = Column(np.array([listing.keys[i].encode() for i in samples.tolist()]))
    columns["digest"] = Column(digests)
    meta.unlink(missing_ok=True)
    try:
        create_file(meta, num_rows=chunks.num_rows, pixels=chunks.specs, columns=columns, attrs=listing.attrs)
        with h5py.File(meta, "r+") as file:
            for number in range(chunks.num_chunks):
                for name, data in _pieces(chunks, number, spill.chunk(number)).items():
                    start = (number * chunks.chunk_rows, *(0 for _ in chunks.specs[name].row_shape))
                    file[name].id.write_direct_chunk(start, data)
                if progress:
                    progress("writing", number + 1, chunks.num_chunks)
    except OSError as exc:
        meta.unlink(missing_ok=True)
        raise OutputError(
            f"{meta}: cannot be written ({exc.strerror or exc}). What was compressed is kept: make room, then run the "
            f"same command again."
        ) from exc
    fd = os.open(meta, os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _pieces(chunks: _Chunks, number: int, body: bytes) -> Mapping[str, bytes]:
    """Returns the compressed data of each pixel dataset in a chunk's record."""
    at = 8 * len(chunks.rows(number))
    lengths = np.frombuffer(body[at : at + 8 * len(chunks.specs)], "<u8").tolist()
    at += 8 * len(chunks.specs)
    pieces = {}
    for name, length in zip(chunks.specs, lengths, strict=True):
        pieces[name] = body[at : at + length]
        at += length
    return pieces


def _publish(meta: Path, output: Path, spill: SpillFile, *, resumed: bool, overwrite: bool) -> None:
    """Gives the file its final name and removes the chunks."""
    if output.exists() and not overwrite and not (resumed and _same_header(meta, output)):
        meta.unlink()
        raise output_exists(output)
    os.replace(meta, output)
    sync_folder(output.parent)
    spill.remove()
    sync_folder(output.parent)


def _same_header(meta: Path, output: Path) -> bool:
    """Whether a call that was killed right after the rename has left this very output."""
    try:
        return read_header(meta).header_digest == read_header(output).header_digest
    except FormatError:
        return False


class SpillFile:
    """The file of compressed chunks, locked against a second writer for as long as it is open.

    After MAGIC come records: the first says what is being compressed, the others are chunks in the order in which they
    were done, and are found again after a kill.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._extents: dict[int, tuple[int, int]] = {}
        self._fd = open_locked(path)

    def close(self) -> None:
        """Releases the lock; the file stays."""
        os.close(self._fd)

    def remove(self) -> None:
        """Deletes the file; the lock lasts until `close`."""
        self.path.unlink(missing_ok=True)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._fd).st_size

    def begin(self, identity: bytes) -> None:
        """Starts over with a record of what is compressed, and no chunk."""
        self._extents = {}
        begin_records(self._fd, self.path, MAGIC)
        append_record(self._fd, self.path, _IDENTITY, identity)
        os.fsync(self._fd)

    def resume(self, identity: bytes, on_chunk: Callable[[int, bytes], None]) -> bytes | None:
        """Returns what the file says is compressed in it; None if it is no such file. Cuts an incomplete record off.

        Args:
            identity: what should be compressed in it; if the file says something else, it is left as it is.
            on_chunk: called with the number and the record of each whole chunk.
        """
        first = record_at(self._fd, len(MAGIC)) if os.pread(self._fd, len(MAGIC), 0) == MAGIC else None
        if first is None or first[0] != _IDENTITY:
            return None
        if first[1] != identity:
            return first[1]
        for number, at, body in whole_records(self._fd, len(MAGIC) + RECORD_HEADER.itemsize + len(identity)):
            self._extents[number] = (at, len(body))
            on_chunk(number, body)
        return identity

    def append(self, number: int, body: bytes) -> None:
        """Adds a chunk.

        Raises:
            OutputError: the disk is full; earlier chunks stay.
        """
        self._extents[number] = (append_record(self._fd, self.path, number, body), len(body))

    def chunk(self, number: int) -> bytes:
        """Returns the record of a chunk."""
        at, length = self._extents[number]
        return read_bytes(self._fd, length, at)

    def __contains__(self, number: int) -> bool:
        return number in self._extents
