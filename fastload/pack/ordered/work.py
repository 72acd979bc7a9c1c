"""What a worker does for a pack in order: encode a task's rows, write them where they belong, check them there."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import ImageError, OutputError
from fastload.pack.chunk_work import Worker, read_at, reason_of
from fastload.pack.encode import RowEncoder
from fastload.pack.ordered.streams import ROW, Stream
from fastload.pack.store_plan import StorePlan
from fastload.store import EncodedRow

_READ_BYTES = 8 * 2**20
_MOST_BUFFERS = 512
"""Rows written by one call; the kernel takes 1,024."""


@dataclass(frozen=True)
class EncodeTask:
    """Consecutive rows to make.

    Attributes:
        number: of the task, from 0.
        rows: int64 (k,), ascending.
        samples: int64 (k,), the sample of the listing that each holds.
        headers: HEADERS (k,), what was found in their headers.
        digests: uint64 (k,), what each row must have; empty where that is not known.
        plan: how rows are made.
        streams: where they will go.
    """

    number: int
    rows: NDArray[np.int64]
    samples: NDArray[np.int64]
    headers: NDArray[np.void]
    digests: NDArray[np.uint64]
    plan: StorePlan
    streams: tuple[Stream, ...]


@dataclass(frozen=True)
class Encoded:
    """What a worker made of a task and keeps until its place is known: ROW (n,), and row -> why it was left out."""

    number: int
    rows: NDArray[np.void]
    reasons: dict[int, str]


@dataclass(frozen=True)
class Placed:
    """Where a task's rows lie: for each stream int64 (n,) offsets from its base.

    Attributes:
        lengths: for each stream int64 (n,), bytes of each row.
        checks: for each stream XXH3-64 of its rows' bytes, where they are to be checked.
    """

    number: int
    streams: tuple[Stream, ...]
    offsets: tuple[NDArray[np.int64], ...]
    lengths: tuple[NDArray[np.int64], ...]
    checks: tuple[int, ...] = ()


def encode_rows(worker: Worker, task: EncodeTask) -> tuple[Encoded, list[EncodedRow]]:
    """The rows of a task, but for those that cannot be made."""
    if worker.encoder is None:
        worker.encoder = RowEncoder(worker.images, worker.masks, task.plan)
    for stream in task.streams:
        worker.open(stream.path)  # Its lock tells the next packer that this one still lives.
    made: list[EncodedRow] = []
    table = np.zeros(len(task.rows), ROW)
    reasons: dict[int, str] = {}
    for at, (row, sample) in enumerate(zip(task.rows.tolist(), task.samples.tolist(), strict=True)):
        try:
            encoded = worker.encoder.encode(sample, task.headers[at])
        except (ImageError, OSError) as exc:
            reasons[row] = reason_of(exc)
            continue
        if len(task.digests) and encoded.digest != task.digests[at]:
            reasons[row] = "its pixels are not those that were packed (their digest differs)"
            continue
        table[len(made)] = _described(row, encoded)
        made.append(encoded)
    return Encoded(task.number, table[: len(made)], reasons), made


def _described(row: int, encoded: EncodedRow) -> tuple[object, ...]:
    images, masks = (0 if data is None else memoryview(data).nbytes for data in (encoded.image, encoded.mask))
    return (
        row, encoded.digest, images, masks, encoded.shape, encoded.encoding, encoded.orientation,
        encoded.mask_encoding, not encoded.ended,
    )  # fmt: skip


def write_rows(worker: Worker, placed: Placed, made: list[EncodedRow]) -> tuple[int, tuple[int, ...]]:
    """Bring a task's rows to their places; its number, and the checks of `Placed`."""
    checks = []
    for stream, offsets in zip(placed.streams, placed.offsets, strict=True):
        data = [row.image if stream.name == "images" else row.mask for row in made]
        digest = xxhash.xxh3_64()
        for some in data:
            assert some is not None, "a sample of a dataset with masks has one, be it empty"
            digest.update(some)
        checks.append(digest.intdigest())
        try:
            _write_runs(worker.open(stream.path), data, stream.base + offsets)
        except OSError as exc:
            raise OutputError(
                f"{stream.path}: cannot be written ({exc.strerror}). What was packed is kept: make room, then run the "
                f"same command again."
            ) from exc
    return placed.number, tuple(checks)


def _write_runs(fd: int, data: list[bytes | memoryview | None], offsets: NDArray[np.int64]) -> None:
    """Write pieces at their offsets, those that follow one another together."""
    pieces = [memoryview(piece or b"").cast("B") for piece in data]
    start = 0
    while start < len(pieces):
        stop, end = start + 1, int(offsets[start]) + len(pieces[start])
        while stop < len(pieces) and stop - start < _MOST_BUFFERS and offsets[stop] == end:
            end += len(pieces[stop])
            stop += 1
        _write_all(fd, pieces[start:stop], int(offsets[start]))
        start = stop


def _write_all(fd: int, pieces: list[memoryview], offset: int) -> None:
    written = os.pwritev(fd, pieces, offset)
    if written < sum(map(len, pieces)):  # at 2 GiB, or where the disk ends
        rest = memoryview(b"".join(pieces))[written:]
        while rest:
            offset += written
            written = os.pwrite(fd, rest, offset)
            rest = rest[written:]


def check_rows(worker: Worker, placed: Placed) -> tuple[int, bool]:
    """A task's number, and whether its rows lie in the file as they were written."""
    for at, stream in enumerate(placed.streams):
        digest = xxhash.xxh3_64()
        fd = worker.open(stream.path)
        for offset, length in _runs(placed.offsets[at], placed.lengths[at]):
            for start in range(0, length, _READ_BYTES):
                data = np.zeros(min(_READ_BYTES, length - start), np.uint8)
                read_at(fd, data, stream.base + offset + start)
                digest.update(data.data)
        if digest.intdigest() != placed.checks[at]:
            return placed.number, False
    return placed.number, True


def _runs(offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Offset and length of each piece of the file that rows which follow one another make up."""
    begins = np.flatnonzero(np.concatenate(([True], offsets[1:] != (offsets + lengths)[:-1])))[: len(offsets)]
    ends = np.append(begins[1:], len(offsets)) - 1
    return [(int(offsets[a]), int(offsets[b] + lengths[b] - offsets[a])) for a, b in zip(begins, ends, strict=False)]
