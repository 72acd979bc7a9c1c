"""Checks that a packed file still holds what was packed: every digest, and on request every source image.

Rows are read with `pread`, not from a mapping: if the disk fails, that is an error with a row number, not a SIGBUS that
ends the process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import FileChangedError, FormatError, ImageError
from fastload.format.digests import DIGEST_FIELDS, header_digest, row_digests
from fastload.format.header import PIXEL_FIELDS, Field, FileIdentity, PackedFile, open_hdf5, read_header
from fastload.read.checked import CHANGED, CheckedSamples, has_ragged
from fastload.read.hdf5_chunks import ChunkedRows
from fastload.system.files import read_into
from fastload.system.machine import worker_count
from fastload.system.text import text_of
from fastload.system.threads import in_threads

if TYPE_CHECKING:
    from fastload.inspection.compare import SourceReport

SPAN_BYTES = 8 * 2**20
FIELD_ROWS = 65_536
Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""


@dataclass(frozen=True)
class DamagedRow:
    """A row whose bytes have changed since packing: `what` is "pixels", "fields", or why the row cannot be read."""

    row: int
    key: str
    what: str


@dataclass(frozen=True)
class VerifyReport:
    """Result of `verify_file`.

    Attributes:
        path: as given.
        num_rows: rows checked.
        pixel_bytes: bytes of pixels hashed; of ragged rows, as they are in the file.
        header_ok: whether shapes, attributes and digests are those that were packed.
        damaged: rows whose bytes have changed.
        source: the comparison with the source, if asked for.
    """

    path: Path
    num_rows: int
    pixel_bytes: int
    header_ok: bool
    damaged: tuple[DamagedRow, ...]
    source: SourceReport | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged and, if a source was given, every row is still what its image decodes to."""
        return (
            self.header_ok and not self.damaged and not (self.source and (self.source.changed or self.source.missing))
        )

    @property
    def equal(self) -> int:
        """Number of rows that are what their source image decodes to; 0 without a source."""
        if self.source is None:
            return 0
        missing = set(self.source.missing)
        wrong = {row.row for row in self.source.changed}
        wrong |= {row.row for row in self.damaged if row.what != "fields" and row.key not in missing}
        return self.source.compared - len(wrong)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings and numbers, for `json.dumps`."""
        return {"ok": self.ok, **asdict(self), "path": str(self.path)}


def verify_file(
    path: str | Path,
    *,
    source: str | Path | None = None,
    root: str | Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Hashes every row again and, with a source, decodes every image again. JPEGs in the file are decoded in any case.

    Args:
        path: a packed file.
        source: what it was packed from.
        root: folder that a table's paths are relative to, if one was given to pack it.
        workers: threads that hash, and processes that decode; None: one per CPU, 0: this thread only.
        progress: called with (rows done, rows in all) from this thread; with a source each row counts twice.

    Raises:
        MissingFileError: there is no such file, or no such source.
        FormatError: not a packed file, or one whose header cannot be read.
        FileChangedError: the file was written to meanwhile.
        SourceError, OptionError: the source cannot be listed, or is not what the file was packed from.
    """
    path = Path(path)
    workers = worker_count(workers)
    file = read_header(path)
    _require_digests(file)
    total = file.num_rows * (2 if source is not None else 1)
    done = 0

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        if progress:
            progress(done, total)

    try:
        with open_hdf5(path) as hdf5:
            header_ok = header_digest(hdf5) == file.attrs.get("header_digest")
            keys = _keys(hdf5, file)
            damaged = [DamagedRow(row, keys[row], "fields") for row in _damaged_fields(hdf5, file)]
            check = _damaged_samples if has_ragged(file) else _damaged_pixels
            damaged += [DamagedRow(row, keys[row], what) for row, what in check(hdf5, file, workers, advance)]
            pixel_bytes = _pixel_bytes(hdf5, file)
    except (OSError, RuntimeError, KeyError) as exc:
        raise FormatError(f"{path}: its fields cannot be read ({exc}). Copy it again, or pack it again.") from exc
    compared = _compare(file, Path(source), root, keys, workers, advance) if source is not None else None
    if FileIdentity.of(os.stat(path)) != file.identity:
        raise FileChangedError(f"{path}: the file was written to or replaced while it was checked. Check it again.")
    return VerifyReport(
        path=path,
        num_rows=file.num_rows,
        pixel_bytes=pixel_bytes,
        header_ok=header_ok,
        damaged=tuple(sorted(damaged, key=lambda found: found.row)),
        source=compared,
    )


def _compare(
    file: PackedFile,
    source: Path,
    root: str | Path | None,
    keys: list[str],
    workers: int,
    advance: Callable[[int], None],
) -> SourceReport:
    # Imported here, because it imports the decoders, which hashing does not need.
    from fastload.inspection.compare import compare_source

    return compare_source(file, source, keys, workers, advance, root=None if root is None else Path(root))


def _require_digests(file: PackedFile) -> None:
    if file.version is None:
        raise FormatError(
            f"{file.path}: fastload did not write this file, so it holds no digests to check it against. "
            f"`fastload info {file.path}` describes it."
        )
    # Any other missing dataset changes the header digest. A file without images has row digests too.
    missing = [name for name in DIGEST_FIELDS if name not in file.fields]
    if missing or any(file.fields[name].dtype != np.uint64 or file.fields[name].shape for name in DIGEST_FIELDS):
        raise FormatError(
            f"{file.path}: its digests cannot be read (missing or of another type: "
            f"{', '.join(missing) or ', '.join(DIGEST_FIELDS)}). The file was changed after packing; pack it again."
        )


def _pixel_fields(file: PackedFile) -> list[Field]:
    return [file.fields[name] for name in PIXEL_FIELDS if name in file.fields]


def _keys(hdf5: h5py.File, file: PackedFile) -> list[str]:
    if "key" not in file.fields:
        return [f"row {row}" for row in range(file.num_rows)]
    return [text_of(key) for key in hdf5["key"][()].tolist()]


def _damaged_fields(hdf5: h5py.File, file: PackedFile) -> Iterator[int]:
    """Yields the rows whose values other than pixels do not match their digest."""
    names = [name for name in file.fields if name not in PIXEL_FIELDS and name != "digest" and name != "digest_fields"]
    for start in range(0, file.num_rows, FIELD_ROWS):
        stop = min(start + FIELD_ROWS, file.num_rows)
        expected = hdf5["digest_fields"][start:stop]
        found = row_digests({name: hdf5[name][start:stop] for name in names})
        yield from (start + np.flatnonzero(found != expected)).tolist()


def _damaged_pixels(
    hdf5: h5py.File, file: PackedFile, workers: int, advance: Callable[[int], None]
) -> list[tuple[int, str]]:
    """Returns (row, what) for rows whose pixels do not match their digest, or cannot be read."""
    if not _pixel_fields(file):
        advance(file.num_rows)
        return []
    expected = hdf5["digest"][()]
    row_bytes = sum(field.row_bytes for field in _pixel_fields(file))
    step = max(1, SPAN_BYTES // row_bytes)
    spans = [range(start, min(start + step, file.num_rows)) for start in range(0, file.num_rows, step)]
    reader = _FieldReader(file)
    found: list[tuple[int, str]] = []
    try:
        # Several threads are for reading: hashing is faster than memory anyway.
        for rows, wrong in in_threads(lambda rows: (rows, _check_span(reader, rows, expected)), spans, workers):
            found += wrong
            advance(len(rows))
    finally:
        reader.close()
    return found


def _damaged_samples(
    _: h5py.File, file: PackedFile, workers: int, advance: Callable[[int], None]
) -> list[tuple[int, str]]:
    """Like `_damaged_pixels`, for a ragged file: the bytes of each row also have to decode to an image."""
    step = max(1, SPAN_BYTES // sum(field.row_bytes for field in _pixel_fields(file)))
    spans = [range(start, min(start + step, file.num_rows)) for start in range(0, file.num_rows, step)]
    samples = CheckedSamples(file)

    def check(rows: range) -> tuple[int, list[tuple[int, str]]]:
        wrong = []
        for row in rows:
            try:
                samples.checked(row)
            except ImageError as exc:
                wrong.append((row, "pixels" if str(exc) == CHANGED else str(exc)))
        return len(rows), wrong

    found: list[tuple[int, str]] = []
    try:
        for count, wrong in in_threads(check, spans, workers):
            found += wrong
            advance(count)
    finally:
        samples.close()
    return found


def _pixel_bytes(hdf5: h5py.File, file: PackedFile) -> int:
    return sum(
        file.num_rows * field.row_bytes if field.ragged is None else int(hdf5[f"{field.name}_bytes"][()].sum())
        for field in _pixel_fields(file)
    )


def _check_span(reader: _FieldReader, rows: range, expected: NDArray[np.uint64]) -> list[tuple[int, str]]:
    """Returns (row, what) for the damaged rows of a span."""
    try:
        parts = reader.read(rows)
    except OSError as exc:
        if len(rows) == 1:
            return [(rows.start, f"cannot be read: {exc.strerror or exc}")]
        # A bad sector makes the read of a whole span fail: read row by row to find the rows it affects.
        return [found for row in rows for found in _check_span(reader, range(row, row + 1), expected)]
    hash_row = xxhash.xxh3_64_intdigest
    wrong = []
    for at, row in enumerate(rows):
        pieces = [part[at] for part in parts]
        digest = hash_row(pieces[0].data if len(pieces) == 1 else np.concatenate(pieces).data)
        if digest != expected[row]:
            wrong.append((row, "pixels"))
    return wrong


class _FieldReader:
    """Reads the bytes of rows of the pixel datasets. Owns a file descriptor, and a buffer for each thread."""

    def __init__(self, file: PackedFile) -> None:
        self._fields = _pixel_fields(file)
        not_linear = [field.name for field in self._fields if field.offset is None and field.ragged is None]
        self._chunked = ChunkedRows(file, not_linear)
        self._fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        self._local = threading.local()

    def close(self) -> None:
        os.close(self._fd)
        self._chunked.close()

    def read(self, rows: range) -> list[NDArray[np.uint8]]:
        """Returns uint8 (rows, bytes) of each pixel dataset, valid until this thread reads again.

        Raises:
            OSError: the disk fails, or the file is shorter than it was.
        """
        return [self._read_field(field, rows) for field in self._fields]

    def _read_field(self, field: Field, rows: range) -> NDArray[np.uint8]:
        if field.offset is None:
            # Another tool compressed it or changed its chunks; the digests are of the values and still apply.
            values = np.empty((len(rows), *field.shape), field.dtype.newbyteorder("="))
            try:
                self._chunked.gather(np.arange(rows.start, rows.stop), {field.name: values})
            except FormatError as exc:  # its cause is the bare reason
                raise OSError(str(exc.__cause__ or exc)) from exc
            values = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<"), copy=False))
            return values.reshape(len(rows), -1).view(np.uint8)
        buffers: dict[str, NDArray[np.uint8]] = self._local.__dict__
        if field.name not in buffers or len(buffers[field.name]) < len(rows):
            buffers[field.name] = np.empty((len(rows), field.row_bytes), np.uint8)
        out = buffers[field.name][: len(rows)]
        view = out.data.cast("B")
        if read_into(self._fd, view, field.offset + rows.start * field.row_bytes) < len(view):
            raise OSError("the file ends before this row")
        return out
