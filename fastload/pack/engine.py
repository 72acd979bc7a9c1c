"""The tasks of a pack, and how their rows get into the file: `encode(task) -> locate(lengths) -> write`.

Workers make the rows of a task. Rows of one size know their offsets in the file beforehand as long as none is skipped,
and the worker that made them writes them at once. Of all others it keeps the bytes until the lengths of all earlier
rows are known, this process computes the offsets, and the same worker writes. So the bytes of the file do not depend on
which worker was faster, a skipped sample never gets an offset, and nothing is moved afterwards.

| file | content |
| --- | --- |
| `OUT.h5.part` | rows of images from byte 4096 on, and those of masks behind them if that place is known beforehand |
| `OUT.h5.masks` | else the rows of masks |
| `OUT.h5.journal` | what is packed, and each task when its rows are written |
| `OUT.h5.meta` | the file in which HDF5 builds its metadata, and which holds compressed chunks |
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format.codecs import NONE
from fastload.format.header import IMAGES_OFFSET
from fastload.format.writer import pixel_offsets
from fastload.pack.decisions import row_lengths
from fastload.pack.encode import ROW
from fastload.pack.journal import Journal, TaskRecord, source_table
from fastload.pack.pack_options import PackJob
from fastload.pack.pack_worker import PackTask, RowStream, Worker
from fastload.pack.pool import PackPool
from fastload.pack.survey import Survey, has_coordinates, only_arrays, row_order, unreadable

TASK_BYTES = 8 * 2**20
COPY_TASK_BYTES = 8 * 2**20
"""Rows that are only copied take less time than a record in the journal, so small chunks are copied together."""

_FEWEST_TASKS = 16
"""A small dataset is cut into so many tasks, so that all workers have some."""
_SAMPLED_TASKS = 4


@dataclass(frozen=True, eq=False)
class PackTasks:
    """The tasks of one pack: task t has the rows from bounds[t] to bounds[t + 1], each of the sample in `samples`.

    `streams` are what rows are written to: images and, where there are any, masks. `sources` is the table SOURCE of the
    whole listing; `expected` says about how many bytes each row takes.
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
        """Returns the tasks of a survey; masks lie behind the images if their place there is known beforehand.

        `placed` says where an earlier call has begun: name of each stream -> its file and base.
        """
        samples, plan, sources = row_order(survey), survey.plan, source_table(job.listing)
        if plan is None or survey.headers is None:
            return cls(job, survey, samples, (), np.zeros(1, np.int64), sources, np.zeros(len(samples), np.int64))
        specs = survey.pixels(survey.num_samples)
        if placed is None:
            placed = {"images": (job.part.name, IMAGES_OFFSET), "masks": (job.masks.name, 0)}
            linear = all(name in specs and specs[name].codec == NONE for name in placed)
            if linear and job.on_error == "fail":
                placed["masks"] = job.part.name, pixel_offsets(job.meta, survey.num_samples, specs)["masks"]
        streams = tuple(
            RowStream(
                name, str(job.part.with_name(placed[name][0])), placed[name][1], plan.chunk_bytes, specs.get(name)
            )
            for name in (("images",) if plan.masks is None else ("images", "masks"))
        )
        lengths = row_lengths(plan, survey.headers, survey.listing)
        expected = sum(lengths.values(), np.zeros(1, np.int64))[samples]
        copies = only_arrays(survey.listing)
        task_bytes = COPY_TASK_BYTES if copies else min(plan.chunk_bytes, TASK_BYTES)
        bounds = _bounds(streams, expected, task_bytes)
        return cls(job, survey, samples, streams, bounds, sources, expected)

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
        """Returns a task; `at_once`: no row before it is skipped, so rows of one size are written at once."""
        survey, plan, rows = self.survey, self.survey.plan, self.rows(number)
        assert plan is not None and survey.headers is not None, "without images there are no tasks"
        samples, known = self.samples[rows], survey.listing.digests
        resized = plan.max_size is not None or (plan.target is not None and plan.target.fit is not None)
        keeps_pixels = plan.option.kind in ("raw", "keep") and not resized
        # Masks, boxes and points were fitted to the size in the header.
        fitted = survey.listing.masks is not None or has_coordinates(survey.listing)
        must_keep_size = plan.target is not None and plan.target.fit is not None and fitted
        return PackTask(
            number=number,
            first=rows.start,
            samples=samples,
            headers=survey.headers[samples if plan.images == "ragged" or must_keep_size else samples[:0]],
            digests=known[samples] if known is not None and keeps_pixels else np.zeros(0, np.uint64),
            plan=plan,
            streams=self.streams,
            sources=self.sources_check(number),
            starts=self.starts(number) if at_once else None,
            compress=self.job.on_error == "fail",  # Else it is known in the end which rows share a chunk.
        )

    def starts(self, number: int) -> tuple[int, ...]:
        """Returns where a task's rows of one size begin in each stream if no row before them is skipped."""
        first = int(self.bounds[number])
        return tuple(first * stream.spec.row_bytes for stream in self.streams if stream.spec is not None)

    def ends(self, record: TaskRecord) -> tuple[int, ...]:
        """Returns where a task's rows end in each stream."""
        streams = zip(self.streams, record.starts, strict=True)
        return tuple(stream.offsets(record.rows[stream.name], start)[1] for stream, start in streams)

    def sources_check(self, number: int) -> int:
        """Returns a number that changes with any source file of a task."""
        return xxhash.xxh3_64_intdigest(self.sources[self.samples[self.rows(number)]].tobytes())

    def named(self, reasons: dict[int, str]) -> list[tuple[str, str]]:
        """Returns (key, reason) of skipped rows."""
        return [(self.survey.listing.keys[self.samples[row]], reason) for row, reason in sorted(reasons.items())]

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
            first = {name: getattr(task, name)[:count] for name in ("samples", "headers", "digests")}
            some = worker.encode(replace(task, **first, compress=True))
            if some.reasons:
                continue  # Packing reports it.
            rows += len(some.rows)
            for name in names:
                found[name] += int(some.rows[name].sum())
        return {name: len(self.samples) * total // max(rows, 1) for name, total in found.items()}


def _bounds(streams: tuple[RowStream, ...], expected: NDArray[np.int64], task_bytes: int) -> NDArray[np.int64]:
    """Returns where tasks begin and the last one ends, int64 (T + 1,); tasks of rows of one size are whole chunks."""
    compressed = any(stream.compressed for stream in streams)
    if streams[0].spec is None and not compressed:
        return task_bounds(expected, task_bytes)
    unit, row_bytes = _unit(streams), max(1, int(expected.sum()) // len(expected))
    rows = unit * max(1, task_bytes // row_bytes // unit)
    if compressed:
        rows = min(rows, unit * max(1, -(-len(expected) // _FEWEST_TASKS // unit)))
    elif unit * row_bytes > TASK_BYTES:
        rows = max(1, TASK_BYTES // row_bytes)
    return np.append(np.arange(0, len(expected), rows), len(expected))


def _unit(streams: tuple[RowStream, ...]) -> int:
    """Returns the number of rows that are whole chunks, compressed ones if there are any."""
    specs = [stream.spec for stream in streams if stream.spec is not None]
    compressed = [spec.chunk_rows for spec in specs if spec.codec != NONE]
    return math.lcm(*compressed) if compressed else specs[0].chunk_rows


def task_bounds(expected: NDArray[np.int64], task_bytes: int) -> NDArray[np.int64]:
    """Returns where tasks of rows of these lengths begin and the last one ends, int64 (T + 1,).

    A task has as many rows as fit into task_bytes, at least 1; few rows are cut into at least 16 tasks.
    """
    most = max(1, len(expected) // _FEWEST_TASKS)
    ends = np.cumsum(expected)
    bounds = [0]
    while (start := bounds[-1]) < len(expected):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + task_bytes, "right"))
        bounds.append(min(max(stop, start + 1), start + most))
    return np.array(bounds, np.int64)


class PackRun:
    """Runs all tasks but those kept from an earlier call: rows are made by workers, located, written and journaled."""

    def __init__(self, tasks: PackTasks, journal: Journal, kept: list[TaskRecord]) -> None:
        self._tasks, self._journal = tasks, journal
        self._records = {record.number: record for record in kept}
        self._skipped = any(record.reasons for record in kept)
        self._total = len(tasks.samples) - sum(record.count for record in kept)
        self._done = 0
        self._ends: tuple[int, ...] = ()
        self._located: dict[int, TaskRecord] = {}

    def make(self, pool: PackPool) -> int:
        """Makes the rows of the tasks that are not done; returns their number.

        SourceError: a sample cannot be packed and must not be skipped; rows before it stay.
        """
        if self._tasks.fixed and not self._skipped:
            for made in pool.run(Worker.pack, self._to_do(at_once=True)):
                if made.reasons:
                    self._check(made)
                    self._skipped = True  # Workers still finish what they have; the tasks before this one count.
                else:
                    self._written(made)
            # Rows behind a task with skipped samples belong elsewhere.
            first = min(set(range(self._tasks.num_tasks)) - self._records.keys(), default=self._tasks.num_tasks)
            for number in [number for number in self._records if number > first]:
                self._done -= self._records.pop(number).count
        self._ends = self._end_of(self._records)
        for number in pool.run(Worker.pack, self._to_do(at_once=False), self._locate, Worker.write):
            self._written(self._located.pop(number))
        return self._total

    def rows(self) -> tuple[NDArray[np.void], dict[int, str], tuple[int, ...]]:
        """Returns all rows (ROW), row -> why it was skipped, and where the rows of each stream end."""
        if not self._tasks.streams:  # samples without images
            rows = np.zeros(len(self._tasks.samples), ROW)
            rows["row"], rows["digest"] = np.arange(len(rows)), xxhash.xxh3_64_intdigest(b"")
            return rows, {}, ()
        records = [self._records[number] for number in sorted(self._records)]
        reasons = {row: reason for record in records for row, reason in record.reasons.items()}
        return np.concatenate([record.rows for record in records]), reasons, self._end_of(self._records)

    def _to_do(self, *, at_once: bool) -> Iterator[PackTask]:
        """Yields the tasks that are not done; of those written at once no more after one has skipped samples."""
        for number in range(self._tasks.num_tasks):
            if at_once and self._skipped:
                return
            if number not in self._records:
                yield self._tasks.task(number, at_once=at_once)

    def _written(self, record: TaskRecord) -> None:
        self._journal.written(record)
        self._records[record.number] = record
        self._done += record.count
        if self._tasks.job.on_progress:
            self._tasks.job.on_progress("packing", self._done, self._total)

    def _end_of(self, records: dict[int, TaskRecord]) -> tuple[int, ...]:
        """Returns where rows end in each stream behind the last of these tasks."""
        return self._tasks.ends(records[max(records)]) if records else (0,) * len(self._tasks.streams)

    def _locate(self, made: TaskRecord) -> tuple[int, tuple[int, ...]]:
        """Returns a task's number and where its rows begin in each stream; called in the order of tasks."""
        self._check(made)
        record = self._located[made.number] = replace(made, starts=self._ends)
        self._ends = self._tasks.ends(record)
        return record.number, record.starts

    def _check(self, made: TaskRecord) -> None:
        """Raises SourceError if samples failed that must not be skipped."""
        if made.reasons and self._tasks.job.on_error == "fail":
            bad = self._tasks.named(made.reasons)
            kept = "What was packed so far is kept: the same command continues with it."
            raise SourceError(f"{unreadable(self._tasks.job.source, bad, len(self._tasks.samples))} {kept}")
