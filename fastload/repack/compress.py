"""Rows as compressed chunks of an HDF5 file: gzip or zstd.

Threads compress (zlib and zstd let the GIL go) and append to a spill file; when every chunk is there, one HDF5 file is
laid out from it under the name `OUT.h5.meta` and renamed. A call that was killed is continued by the same call: chunks
in the spill are checked by their digests and kept.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.codecs import Codec
from fastload.cpus import available_cpus
from fastload.decode import Target
from fastload.errors import FormatError, OptionError, OutputError, ResumeError, SourceError
from fastload.format import read_header
from fastload.in_threads import in_threads
from fastload.layout import PixelSpec, create_file, writer_name
from fastload.pack import PackOptions, PackReport, check_output
from fastload.pack.chunk_work import Worker, row_digests_of
from fastload.pack.finish import sync_folder
from fastload.pack.options import Progress
from fastload.pack.reserve import disk_full
from fastload.pack.resume import exists, journal_path
from fastload.pack.survey import free_bytes, row_order, survey_listing, unreadable
from fastload.pack.workers import WorkerPool
from fastload.repack.spill import Spill
from fastload.sources.listing import Column, Listing

_SAMPLED_CHUNKS = 4


@dataclass(frozen=True, eq=False)
class _Job:
    """What is compressed, in the order of the file's rows."""

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
    """Write a listing of arrays with compressed chunks; see repack_file.

    Raises:
        OptionError: it has no images.
        SourceError: rows do not have their digest; nothing is left out.
        OutputError, ResumeError, PackError: as pack_images.
    """
    started = time.perf_counter()
    output = Path(output)
    output = output.resolve() if output.is_symlink() else output
    part, meta = output.with_name(f"{output.name}.part"), output.with_name(f"{output.name}.meta")
    _check_output(output, part, overwrite)
    job = _job(listing, options, codec, source_name)
    about = _about(job)
    with closing(Spill(part)) as spill:
        digests = np.zeros(job.num_rows, np.uint64)
        kept = _resume_or_begin(spill, job, about, digests, overwrite)
        if not kept:
            _check_space(job, output, codec, spill)
        todo = [number for number in range(job.num_chunks) if number not in spill]
        threads = max(1, available_cpus() if workers is None else workers)
        begun = time.perf_counter()
        done = job.num_rows - sum(len(job.rows(number)) for number in todo)
        for number, row_digests, body in in_threads(lambda number: _compressed(job, number, codec), todo, threads):
            spill.append(number, body)
            rows = job.rows(number)
            digests[rows.start : rows.stop] = row_digests
            done += len(rows)
            if progress:
                progress("compressing", done, job.num_rows)
        rate = sum(len(job.rows(number)) for number in todo) / max(time.perf_counter() - begun, 1e-9)
        _lay_out(job, spill, meta, digests, progress)
        _publish(meta, output, spill, resumed=bool(kept), overwrite=overwrite)
    file = read_header(output)
    return PackReport(
        path=output,
        layout=listing.layout,
        num_samples=file.num_rows,
        image_shape=file.fields["images"].shape,
        dtype=str(file.fields["images"].dtype),
        fields=tuple(name for name in file.fields if name not in ("images", "split", "key", "digest", "digest_fields")),
        splits={name: len(rows) for name, rows in file.splits.items()},
        converted={},
        skipped=(),
        notes=listing.notes,
        file_bytes=file.identity.size,
        seconds=time.perf_counter() - started,
        images_per_s=rate,
        chunks=job.num_chunks,
        chunks_kept=kept,
        chunks_decoded=len(todo),
    )


def _check_output(output: Path, part: Path, overwrite: bool) -> None:
    check_output(output)
    if journal_path(output).exists():
        if not overwrite:
            raise ResumeError(
                f"{journal_path(output)}: left by an interrupted pack without a codec. Finish that first, or start "
                f"again with `--overwrite`."
            )
        journal_path(output).unlink()
        part.unlink(missing_ok=True)
    if output.exists() and not overwrite and not part.exists():
        raise exists(output)


def _job(listing: Listing, options: PackOptions, codec: Codec, where: str) -> _Job:
    if listing.files is None:
        raise OptionError(f"{where}: holds no images, and only pixels are compressed. Leave `--codec` out.")
    with WorkerPool(0) as pool:
        pool.use(listing)
        survey = survey_listing(listing, options, pool, source=where)
    assert survey.target is not None, "it has images"
    specs = survey.pixels(len(listing))
    rows = specs["images"].chunk_rows
    specs = {name: replace(spec, chunk_rows=rows, codec=codec) for name, spec in specs.items()}
    return _Job(listing, row_order(survey), survey.target, specs, where)


def _about(job: _Job) -> bytes:
    """What must be the same for a spill to be continued."""
    listing = job.listing
    digest = xxhash.xxh3_128("\0".join(listing.keys).encode())
    for name, column in sorted(listing.columns.items()):
        digest.update(f"{name} {column.values.dtype.str} {column.values.shape} {sorted(column.attrs.items())}".encode())
        digest.update(np.ascontiguousarray(column.values).data)
    for array in (listing.split, listing.sizes, listing.mtimes_ns, listing.digests, job.samples):
        if array is not None:
            digest.update(np.ascontiguousarray(array).data)
    specs = {name: [spec.row_shape, spec.dtype.str, spec.chunk_rows] for name, spec in job.specs.items()}
    about = {
        "release": writer_name(),
        "attrs": {name: str(value) for name, value in listing.attrs.items()},
        "splits": listing.split_names,
        "pixels": specs,
        "codec": str(job.specs["images"].codec),
        "rows": digest.hexdigest(),
    }
    return json.dumps(about, sort_keys=True).encode()


def _resume_or_begin(spill: Spill, job: _Job, about: bytes, digests: NDArray[np.uint64], overwrite: bool) -> int:
    """Chunks that an interrupted call has left, their digests filled in; the spill is begun when there is none."""
    kept = 0

    def note(number: int, body: bytes) -> None:
        nonlocal kept
        if 0 <= number < job.num_chunks:
            rows = job.rows(number)
            digests[rows.start : rows.stop] = np.frombuffer(body[: 8 * len(rows)], "<u8")
            kept += 1

    if spill.size:
        found = spill.resume(about, note)
        if found == about:
            return kept
        if not overwrite:
            why = "it is of another file, option or release" if found else "it is not of this kind, or was cut short"
            raise ResumeError(
                f"{spill.path}: left by an interrupted call that this one cannot continue: {why}. Start again with "
                f"`--overwrite`, or remove {spill.path.name}."
            )
    digests[:] = 0
    spill.begin(about)
    return 0


def _compressed(job: _Job, number: int, codec: Codec) -> tuple[int, NDArray[np.uint64], bytes]:
    """A chunk: its number, its rows' digests, and these digests, lengths and compressed data as one piece of bytes.

    Raises:
        SourceError: a row does not have the digest that it should.
    """
    rows = job.rows(number)
    samples = job.samples[rows.start : rows.stop]
    assert job.listing.files is not None, "checked before"
    arrays, reasons = Worker(job.listing.files, job.listing.masks).decode(samples, job.target)
    digests = row_digests_of(arrays)
    if job.listing.digests is not None:
        for at in np.flatnonzero(digests != job.listing.digests[samples]).tolist():
            reasons.setdefault(at, "its pixels are not those that were packed (their digest differs)")
    if reasons:
        bad = [(job.listing.keys[samples[at]], reason) for at, reason in sorted(reasons.items())]
        raise SourceError(unreadable(job.where, bad, job.num_rows))
    pieces = []
    for array, spec in zip(arrays, job.specs.values(), strict=True):
        # Little-endian on disk, and whole: HDF5 wants all rows of a chunk, those behind the last one are zero.
        data = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).reshape(-1).view(np.uint8)
        whole = bytes(data.data) + bytes((spec.chunk_rows - len(rows)) * spec.row_bytes)
        pieces.append(codec.compress(whole))
    lengths = np.array([len(piece) for piece in pieces], "<u8").tobytes()
    return number, digests, b"".join([digests.astype("<u8").tobytes(), lengths, *pieces])


def _check_space(job: _Job, output: Path, codec: Codec, spill: Spill) -> None:
    """Refuse a disk that is too full for the spill and the file made of it, as far as some chunks tell."""
    sampled = sorted({number * job.num_chunks // _SAMPLED_CHUNKS for number in range(_SAMPLED_CHUNKS)})
    try:
        size = sum(len(_compressed(job, number, codec)[2]) for number in sampled) / len(sampled) * job.num_chunks
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


def _lay_out(job: _Job, spill: Spill, meta: Path, digests: NDArray[np.uint64], progress: Progress | None) -> None:
    """The HDF5 file, whole and on disk when this returns."""
    listing, samples = job.listing, job.samples
    columns = {name: Column(column.values[samples], column.attrs) for name, column in listing.columns.items()}
    columns["split"] = Column(listing.split[samples], {"names": listing.split_names})
    columns["key"] = Column(np.array([listing.keys[i].encode() for i in samples.tolist()]))
    columns["digest"] = Column(digests)
    meta.unlink(missing_ok=True)
    try:
        create_file(meta, num_rows=job.num_rows, pixels=job.specs, columns=columns, attrs=listing.attrs)
        with h5py.File(meta, "r+") as file:
            for number in range(job.num_chunks):
                for name, data in _pieces(job, number, spill.chunk(number)).items():
                    start = (number * job.chunk_rows, *(0 for _ in job.specs[name].row_shape))
                    file[name].id.write_direct_chunk(start, data)
                if progress:
                    progress("writing", number + 1, job.num_chunks)
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


def _pieces(job: _Job, number: int, body: bytes) -> Mapping[str, bytes]:
    """The compressed data of each pixel dataset in a chunk of the spill."""
    at = 8 * len(job.rows(number))
    lengths = np.frombuffer(body[at : at + 8 * len(job.specs)], "<u8").tolist()
    at += 8 * len(job.specs)
    pieces = {}
    for name, length in zip(job.specs, lengths, strict=True):
        pieces[name] = body[at : at + length]
        at += length
    return pieces


def _publish(meta: Path, output: Path, spill: Spill, *, resumed: bool, overwrite: bool) -> None:
    """Give the file its final name, and remove the spill."""
    if output.exists() and not overwrite and not (resumed and _same_header(meta, output)):
        meta.unlink()
        raise exists(output)
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
