"""The tasks of a pack: how its rows are cut into tasks, which streams they are written to, and where.

Rows of one size know their offsets beforehand unless samples may be skipped. Of all others the offsets of a task's rows
are computed once the lengths of all earlier ones are known, so the bytes of the file do not depend on which worker was
faster, and a skipped sample never gets an offset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.format.codecs import NONE
from fastload.format.header import IMAGES_OFFSET
from fastload.format.writer import pixel_offsets
from fastload.pack.decisions import row_lengths
from fastload.pack.encode import HEADERS
from fastload.pack.journal import TaskRecord, source_table
from fastload.pack.pack_options import PackJob
from fastload.pack.pack_worker import PackTask, RowOffsets, RowStream, Worker
from fastload.pack.survey import Survey, row_order
from fastload.sources.listing import Arrays, Listing

TASK_BYTES = 8 * 2**20
COPY_TASK_BYTES = 8 * 2**20
"""Rows that are only copied take less time than a record in the journal, so small chunks are copied together."""

_FEWEST_TASKS = 16
"""A small dataset is cut into so many tasks, so that all workers have some."""
_SAMPLED_TASKS = 4


@dataclass(frozen=True, eq=False)
class PackTasks:
    """The tasks of one pack.

    Attributes:
        job, survey: what was asked for, and found.
        samples: int64 (N,), the sample of each row.
        streams: the streams that rows are written to: images and, where there are any, masks.
        bounds: int64 (T + 1,): task t has the rows from bounds[t] to bounds[t + 1].
        sources: SOURCE (N of the listing,), size and time of each sample's file.
        expected: int64 (N,), about how many bytes each row takes.
    """

    job: PackJob
    survey: Survey
    samples: NDArray[np.int64]
    streams: tuple[RowStream, ...]
    bounds: NDArray[np.int64]
    sources: NDArray[np.void]
    expected: NDArray[np.int64]

    @classmethod
    def of(cls, job: PackJob, survey: Survey, placed: dict[str, tuple[str, int]] | None = None) -> PackTasks:
        """Returns the tasks of a survey.

        Args:
            placed: name of each stream -> its file and base, where an earlier call has begun.
        """
        samples = row_order(survey)
        expected = np.zeros(len(samples), np.int64)
        if survey.plan is not None and survey.headers is not None:
            lengths = row_lengths(survey.plan, survey.headers, survey.listing)
            expected = sum(lengths.values(), np.zeros(1, np.int64))[samples]
        streams = _streams_of(job, survey, placed)
        bounds = _bounds_of(survey, streams, expected)
        return cls(job, survey, samples, streams, bounds, source_table(job.listing), expected)

    @property
    def num_tasks(self) -> int:
        """Number of tasks, T."""
        return len(self.bounds) - 1

    @property
    def fixed(self) -> bool:
        """Whether all rows have one size, so that their offsets are known beforehand unless some before are skipped."""
        return all(stream.spec is not None and not stream.compressed for stream in self.streams)

    @property
    def ordered(self) -> bool:
        """Whether the offsets of rows may depend on the rows before them."""
        return self.job.on_error == "skip" or not self.fixed

    @property
    def chunks(self) -> int:
        """Number of chunks of images of one size; else of tasks."""
        chunk_rows = self.survey.chunk_rows
        return -(-len(self.samples) // chunk_rows) if chunk_rows else self.num_tasks

    def chunks_of(self, records: list[TaskRecord]) -> int:
        """Returns how many chunks lie whole in these tasks; how many tasks they are where chunks do not count."""
        if not self.survey.chunk_rows:
            return len(records)
        done = np.zeros(len(self.samples), np.bool_)
        for record in records:
            done[record.first : record.first + record.count] = True
        return int(np.logical_and.reduceat(done, np.arange(0, len(done), self.survey.chunk_rows)).sum())

    def rows(self, number: int) -> slice:
        """Returns the rows of a task."""
        return slice(int(self.bounds[number]), int(self.bounds[number + 1]))

    def task(self, number: int, *, at_once: bool = False) -> PackTask:
        """Returns a task for a worker.

        Args:
            at_once: no row before it is skipped, so rows of one size are written at once.
        """
        survey, rows = self.survey, self.rows(number)
        assert survey.plan is not None and survey.headers is not None, "without images there are no tasks"
        samples = self.samples[rows]
        plan, known = survey.plan, survey.listing.digests
        resized = plan.max_size is not None or (plan.target is not None and plan.target.fit is not None)
        keeps_pixels = plan.option.kind in ("raw", "keep") and not resized
        needs_headers = plan.images == "ragged" or survey.must_keep_size
        return PackTask(
            number=number,
            first=rows.start,
            samples=samples,
            headers=survey.headers[samples] if needs_headers else np.zeros(0, HEADERS),
            digests=known[samples] if known is not None and keeps_pixels else np.zeros(0, np.uint64),
            plan=plan,
            streams=self.streams,
            starts=self.starts(number) if at_once else None,
            compress=self.job.on_error == "fail",  # Else it is known in the end which rows share a chunk.
        )

    def starts(self, number: int) -> tuple[int, ...]:
        """Returns where a task's rows of one size begin in each stream if no row before them is skipped."""
        first = int(self.bounds[number])
        return tuple(first * stream.spec.row_bytes for stream in self.streams if stream.spec is not None)

    def locate(
        self, number: int, rows: NDArray[np.void], starts: tuple[int, ...], checks: tuple[int, ...] = ()
    ) -> tuple[RowOffsets, tuple[int, ...]]:
        """Returns the offsets of a task's rows (ROW) after earlier rows that end at starts, and where they end."""
        lengths = tuple(rows[stream.name].copy() for stream in self.streams)
        found = [stream.offsets(each, start) for stream, each, start in zip(self.streams, lengths, starts, strict=True)]
        located = RowOffsets(number, self.streams, tuple(offsets for offsets, _ in found), lengths, checks)
        return located, tuple(end for _, end in found)

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
        """Byte of `OUT.h5.part` at which its rows will end, if that is known before they are made."""
        plan = self.survey.plan
        if plan is None:
            return IMAGES_OFFSET
        last = [stream for stream in self.streams if stream.path == str(self.job.part)][-1]
        if last.spec is not None:
            return None if last.compressed else last.base + last.spec.allocated_bytes(len(self.samples))
        if plan.option.kind not in ("raw", "keep") or plan.image_codec != NONE:
            return None
        return last.base + self.survey.ragged_bytes["images"]

    def bytes_to_come(self, done: list[TaskRecord]) -> int:
        """Returns about how many bytes the file and those beside it will need more than they have, at most at once.

        Compressed chunks are copied into `OUT.h5.meta` while rows still lie in their streams, as are masks from their
        own file.
        """
        left = 1 - sum(self.expected[r.first : r.first + r.count].sum() for r in done) / max(self.expected.sum(), 1)
        compressed = self._compressed_bytes()
        total = 0.0
        for stream in self.streams:
            all_rows = self.survey.ragged_bytes.get(stream.name, 0)
            if stream.spec is not None:
                all_rows = stream.spec.allocated_bytes(len(self.samples))
            if stream.compressed:
                rows = compressed[stream.name] if self.job.on_error == "fail" else all_rows
                total += left * rows + compressed[stream.name]
            else:
                total += left * all_rows + (all_rows if stream.path == str(self.job.masks) else 0)
        return int(total)

    def _compressed_bytes(self) -> dict[str, int]:
        """Returns for each stream whose chunks are compressed about how many bytes these take, from some tasks."""
        names = [stream.name for stream in self.streams if stream.compressed]
        if not names:
            return {}
        assert self.survey.listing.files is not None, "a plan is of images"
        worker = Worker(self.survey.listing.files, self.survey.listing.masks)
        rows, found = 0, dict.fromkeys(names, 0)
        for number in sorted({at * self.num_tasks // _SAMPLED_TASKS for at in range(_SAMPLED_TASKS)}):
            task, count = self.task(number), _unit(self.streams)
            arrays = {name: getattr(task, name)[:count] for name in ("samples", "headers", "digests")}
            some = worker.encode(replace(task, **arrays, compress=True))
            if some.reasons:
                continue  # Packing reports it.
            rows += len(some.rows)
            for name in names:
                found[name] += int(some.rows[name].sum())
        return {name: len(self.samples) * total // max(rows, 1) for name, total in found.items()}


def _streams_of(job: PackJob, survey: Survey, placed: dict[str, tuple[str, int]] | None) -> tuple[RowStream, ...]:
    """Returns the streams of images and masks.

    Masks lie behind the images, if their place there is known beforehand, else in a file of their own.
    """
    if (plan := survey.plan) is None:
        return ()
    specs = survey.pixels(survey.num_samples)
    if placed is None:
        placed = {"images": (job.part.name, IMAGES_OFFSET), "masks": (job.masks.name, 0)}
        linear = all(name in specs and specs[name].codec == NONE for name in placed)
        if linear and job.on_error == "fail":
            placed["masks"] = job.part.name, pixel_offsets(job.meta, survey.num_samples, specs)["masks"]
    names = ("images",) if plan.masks is None else ("images", "masks")
    return tuple(
        RowStream(name, str(job.part.with_name(file)), base, plan.chunk_bytes, specs.get(name))
        for name, (file, base) in ((name, placed[name]) for name in names)
    )


def _bounds_of(survey: Survey, streams: tuple[RowStream, ...], expected: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns where tasks begin and the last one ends, int64 (T + 1,); tasks of rows of one size are whole chunks."""
    if survey.plan is None:
        return np.zeros(1, np.int64)
    copies = only_arrays(survey.listing)
    task_bytes = COPY_TASK_BYTES if copies else min(survey.plan.chunk_bytes, TASK_BYTES)
    unit = _unit(streams)
    compressed = any(stream.compressed for stream in streams)
    if not unit or (survey.plan.images == "ragged" and not compressed):
        return task_bounds(expected, task_bytes)
    row_bytes = max(1, int(expected.sum()) // len(expected))
    rows = unit
    if not compressed and unit * row_bytes > TASK_BYTES:
        rows = max(1, TASK_BYTES // row_bytes)
    elif compressed or copies:
        rows = unit * max(1, task_bytes // row_bytes // unit)
    if compressed:
        rows = min(rows, unit * max(1, -(-len(expected) // _FEWEST_TASKS // unit)))
    return np.append(np.arange(0, len(expected), rows), len(expected))


def _unit(streams: tuple[RowStream, ...]) -> int:
    """Returns the number of rows that are whole chunks, compressed ones if there are any; 0 where lengths vary."""
    specs = [stream.spec for stream in streams if stream.spec is not None]
    compressed = [spec.chunk_rows for spec in specs if spec.codec != NONE]
    return math.lcm(*compressed) if compressed else specs[0].chunk_rows if specs else 0


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


def only_arrays(listing: Listing) -> bool:
    """Whether all pixels of a listing are rows of arrays, which are copied."""
    masks = listing.masks
    return isinstance(listing.files, Arrays) and (masks is None or isinstance(masks.files, Arrays))
