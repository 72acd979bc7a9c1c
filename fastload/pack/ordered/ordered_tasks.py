"""The tasks of the ordered engine: how rows are cut into tasks, and what a worker does with one.

`OrderedPack` cuts the rows into tasks of about 8 MiB and computes the offsets of a task's rows once all earlier lengths
are known. A worker encodes a task (`encode_rows`), then writes it at those offsets (`write_rows`); `check_rows`
compares what is there already.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import ImageError
from fastload.format.codecs import NONE
from fastload.format.ragged import EncodedRow
from fastload.pack.decisions import row_lengths, row_sizes
from fastload.pack.encode import RowEncoder
from fastload.pack.encoding import RaggedPlan
from fastload.pack.fill import reason_of
from fastload.pack.journal import source_table
from fastload.pack.ordered.record_log import ROW, RowStream, TaskRecord, streams_of
from fastload.pack.pack_options import PackJob
from fastload.pack.pack_worker import Worker, write_failed
from fastload.pack.survey import Survey, row_order
from fastload.system.files import read_into, write_at

_TASK_BYTES = 8 * 2**20
_FEWEST_TASKS = 16
"""A small dataset is cut into so many tasks, so that all workers have some."""
_READ_BYTES = 8 * 2**20
_MAX_BUFFERS = 512
"""Rows written by one call; the kernel's limit is 1,024."""


@dataclass(frozen=True)
class EncodeTask:
    """Consecutive rows to make.

    Attributes:
        number: number of the task, from 0.
        rows: int64 (k,), ascending.
        samples: int64 (k,), the sample of the listing for each row.
        headers: HEADERS (k,) of the samples.
        digests: uint64 (k,), the expected digest of each row; empty where it is not known.
        plan: how rows are made.
        streams: the streams that they belong to.
    """

    number: int
    rows: NDArray[np.int64]
    samples: NDArray[np.int64]
    headers: NDArray[np.void]
    digests: NDArray[np.uint64]
    plan: RaggedPlan
    streams: tuple[RowStream, ...]


@dataclass(frozen=True)
class EncodedTask:
    """The description of encoded rows that a worker holds: ROW (n,), and row -> why it was skipped."""

    number: int
    rows: NDArray[np.void]
    reasons: dict[int, str]


@dataclass(frozen=True)
class TaskOffsets:
    """Where a task's rows lie: for each stream int64 (n,), offsets from its base.

    Attributes:
        lengths: for each stream int64 (n,), bytes of each row.
        checks: for each stream XXH3-64 of its rows' bytes; empty while it is not known.
    """

    number: int
    streams: tuple[RowStream, ...]
    offsets: tuple[NDArray[np.int64], ...]
    lengths: tuple[NDArray[np.int64], ...]
    checks: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class OrderedPack:
    """One pack of the ordered engine.

    Attributes:
        job, survey, plan: what was asked for, found and decided.
        samples: int64 (N,), the sample of each row.
        bounds: int64 (T + 1,): task t has the rows from bounds[t] to bounds[t + 1].
        streams: the streams that rows are written to.
        sources: SOURCE (N,), size and time of each sample's file.
        expected: int64 (N,), about how many bytes each row takes.
    """

    job: PackJob
    survey: Survey
    plan: RaggedPlan
    samples: NDArray[np.int64]
    bounds: NDArray[np.int64]
    streams: tuple[RowStream, ...]
    sources: NDArray[np.void]
    expected: NDArray[np.int64]

    @classmethod
    def of(cls, job: PackJob, survey: Survey, plan: RaggedPlan) -> OrderedPack:
        """Returns the pack of a survey."""
        samples = row_order(survey)
        listing = survey.listing
        expected = _expected_bytes(survey, plan)[samples]
        return cls(
            job, survey, plan, samples, task_bounds(expected, min(plan.chunk_bytes, _TASK_BYTES)),
            streams_of(plan, job.part, job.masks), source_table(listing.keys, listing.sizes, listing.mtimes_ns),
            expected,
        )  # fmt: skip

    @property
    def num_tasks(self) -> int:
        """Number of tasks, T."""
        return len(self.bounds) - 1

    def rows(self, number: int) -> slice:
        """Returns the rows of a task."""
        return slice(int(self.bounds[number]), int(self.bounds[number + 1]))

    def task(self, number: int) -> EncodeTask:
        """Returns a task for a worker."""
        assert self.survey.headers is not None, "a plan is of images"
        rows = self.rows(number)
        samples = self.samples[rows]
        digests = np.zeros(0, np.uint64)
        if self.survey.listing.digests is not None and self._keeps_pixels:
            digests = self.survey.listing.digests[samples]
        headers = self.survey.headers[samples]
        return EncodeTask(number, np.arange(rows.start, rows.stop), samples, headers, digests, self.plan, self.streams)

    @property
    def _keeps_pixels(self) -> bool:
        """Whether rows have the pixels of the source, whose digests may be known."""
        plan = self.plan
        resized = plan.max_size is not None or (plan.target is not None and plan.target.fit is not None)
        return plan.option.kind in ("raw", "keep") and not resized

    def locate(
        self, number: int, rows: NDArray[np.void], starts: tuple[int, ...], checks: tuple[int, ...] = ()
    ) -> tuple[TaskOffsets, tuple[int, ...]]:
        """Returns the offsets of a task's rows (ROW) after earlier rows that end at starts, and where they end."""
        found = [stream.offsets(rows, start) for stream, start in zip(self.streams, starts, strict=True)]
        lengths = tuple(rows[stream.name].copy() for stream in self.streams)
        located = TaskOffsets(number, self.streams, tuple(offsets for offsets, _ in found), lengths, checks)
        return located, tuple(end for _, end in found)

    def fraction_of(self, tasks: int) -> float:
        """Returns about what fraction of all bytes the rows of the first tasks have, 0 to 1."""
        return float(self.expected[: self.bounds[tasks]].sum() / max(int(self.expected.sum()), 1))

    def sources_check(self, number: int) -> int:
        """Returns a number that changes with any source file of a task."""
        return xxhash.xxh3_64_intdigest(self.sources[self.samples[self.rows(number)]].tobytes())

    def is_of(self, record: TaskRecord) -> bool:
        """Whether a record in the journal is of the task of its number as it would be done now."""
        rows = self.rows(record.number)
        same = (record.first, record.count) == (rows.start, rows.stop - rows.start)
        return same and record.sources == self.sources_check(record.number)

    @property
    def known_end(self) -> int | None:
        """Byte of `OUT.h5.part` at which rows of images will end, if it is known before they are made."""
        plan = self.plan
        if plan.option.kind not in ("raw", "keep") or (plan.images == "ragged" and plan.image_codec != NONE):
            return None
        if plan.images == "ragged":
            return self.streams[0].base + self.survey.ragged_bytes["images"]
        num_rows = len(self.samples)
        return self.streams[0].base + num_rows * self.survey.pixels(num_rows)["images"].row_bytes

    @property
    def masks_bytes(self) -> int:
        """Bytes of all rows of masks."""
        assert self.survey.headers is not None, "a plan is of images"
        sizes = row_sizes(self.plan, self.survey.headers[self.samples])
        return 0 if self.plan.masks is None else int(np.prod(sizes, axis=1).sum())


def task_bounds(expected: NDArray[np.int64], task_bytes: int) -> NDArray[np.int64]:
    """Returns where tasks begin and the last one ends, int64 (T + 1,).

    A task has as many rows as fit into task_bytes, at least 1; few rows are cut into at least 16 tasks.

    Args:
        expected: int64 (N,), bytes of each row.
    """
    most = max(1, len(expected) // _FEWEST_TASKS)
    ends = np.cumsum(expected)
    bounds = [0]
    while (start := bounds[-1]) < len(expected):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + task_bytes, "right"))
        bounds.append(min(max(stop, start + 1), start + most))
    return np.array(bounds, np.int64)


def _expected_bytes(survey: Survey, plan: RaggedPlan) -> NDArray[np.int64]:
    """Returns about how many bytes of each sample a worker holds until they are written, int64 (N of the listing,)."""
    assert survey.headers is not None, "a plan is of images"
    lengths = row_lengths(plan, survey.headers, survey.listing)
    return lengths["images"] + lengths["masks"] if plan.masks is not None else lengths["images"]


def encode_rows(worker: Worker, task: EncodeTask) -> tuple[EncodedTask, list[EncodedRow]]:
    """Makes the rows of a task; those that cannot be made are left out."""
    if worker.encoder is None:
        worker.encoder = RowEncoder(worker.images, worker.masks, task.plan)
    for stream in task.streams:
        worker.open(stream.path)  # Its lock tells the next packer that this worker still lives.
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
    return EncodedTask(task.number, table[: len(made)], reasons), made


def _described(row: int, encoded: EncodedRow) -> tuple[object, ...]:
    """Returns the values of ROW."""
    images, masks = (0 if data is None else memoryview(data).nbytes for data in (encoded.image, encoded.mask))
    return (
        row, encoded.digest, images, masks, encoded.shape, encoded.encoding, encoded.orientation,
        encoded.mask_encoding, not encoded.ended,
    )  # fmt: skip


def write_rows(worker: Worker, located: TaskOffsets, made: list[EncodedRow]) -> tuple[int, tuple[int, ...]]:
    """Writes a task's rows at their offsets; returns its number, and the checks of `TaskOffsets`."""
    checks = []
    for stream, offsets in zip(located.streams, located.offsets, strict=True):
        data = [row.image if stream.name == "images" else row.mask for row in made]
        digest = xxhash.xxh3_64()
        for piece in data:
            assert piece is not None, "a sample of a dataset with masks has one, be it empty"
            digest.update(piece)
        checks.append(digest.intdigest())
        try:
            _write_runs(worker.open(stream.path), data, stream.base + offsets)
        except OSError as exc:
            raise write_failed(stream.path, exc) from exc
    return located.number, tuple(checks)


def _write_runs(fd: int, data: list[bytes | memoryview | None], offsets: NDArray[np.int64]) -> None:
    """Writes pieces at their offsets, adjacent ones together."""
    pieces = [memoryview(piece or b"").cast("B") for piece in data]
    start = 0
    while start < len(pieces):
        stop, end = start + 1, int(offsets[start]) + len(pieces[start])
        while stop < len(pieces) and stop - start < _MAX_BUFFERS and offsets[stop] == end:
            end += len(pieces[stop])
            stop += 1
        _write_run(fd, pieces[start:stop], int(offsets[start]))
        start = stop


def _write_run(fd: int, pieces: list[memoryview], offset: int) -> None:
    written = os.pwritev(fd, pieces, offset)
    if written < sum(map(len, pieces)):  # At 2 GiB, or where the disk is full.
        write_at(fd, memoryview(b"".join(pieces))[written:], offset + written)


def check_rows(worker: Worker, located: TaskOffsets) -> tuple[int, bool]:
    """Returns a task's number, and whether its rows lie in the file as they were written."""
    for at, stream in enumerate(located.streams):
        digest = xxhash.xxh3_64()
        fd = worker.open(stream.path)
        for offset, length in _runs(located.offsets[at], located.lengths[at]):
            for start in range(0, length, _READ_BYTES):
                data = np.zeros(min(_READ_BYTES, length - start), np.uint8)
                read_into(fd, data.data, stream.base + offset + start)
                digest.update(data.data)
        if digest.intdigest() != located.checks[at]:
            return located.number, False
    return located.number, True


def _runs(offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Returns offset and length of each piece of the file that adjacent rows make up."""
    begins = np.flatnonzero(np.concatenate(([True], offsets[1:] != (offsets + lengths)[:-1])))[: len(offsets)]
    ends = np.append(begins[1:], len(offsets)) - 1
    return [(int(offsets[a]), int(offsets[b] + lengths[b] - offsets[a])) for a, b in zip(begins, ends, strict=False)]
