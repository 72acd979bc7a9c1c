"""The tasks of a pack, and how their rows get into the file: `encode(task) -> locate(lengths) -> write`.

Workers make the rows of a task. Rows of one size know their offsets in the file beforehand as long as none is skipped,
and the worker that made them writes them at once. Of all others it keeps the bytes until the lengths of all earlier
rows are known, this process computes the offsets, and the same worker writes. So the bytes of the file do not depend on
which worker was faster, a skipped sample never gets an offset, and nothing is moved afterwards.

| file | content |
| --- | --- |
| `OUT.h5.part` | rows of images from byte 4096 on, and rows of masks behind them if that place is known beforehand |
| `OUT.h5.masks` | else the rows of masks |
| `OUT.h5.journal` | what is packed, and each task when its rows are written |
| `OUT.h5.meta` | the complete file, where it cannot be made in `OUT.h5.part`, as with compressed chunks |
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format.codecs import NONE
from fastload.format.header import IMAGES_OFFSET
from fastload.format.writer import pixel_offsets
from fastload.pack.coordinates import has_coordinates
from fastload.pack.journal import Journal, TaskRecord, source_table
from fastload.pack.pack_options import KEPT, PackJob
from fastload.pack.pack_worker import PackTask, RowStream, Worker
from fastload.pack.pool import PackPool
from fastload.pack.survey import Survey, unreadable
from fastload.sources.listing import only_arrays
from fastload.system.files import output_errors

TASK_BYTES = 8 * 2**20
COPY_TASK_BYTES = 8 * 2**20
"""Rows that are only copied take less time than a record in the journal, so small chunks are copied together."""

_FEWEST_TASKS = 16  # a small dataset is cut into so many tasks, so that all workers have some
_SAMPLED_TASKS = 4


@dataclass(frozen=True, eq=False)
class PackTasks:
    """The tasks of one pack: task t has the rows from bounds[t] to bounds[t + 1] in the order of the survey.

    `streams` are what rows are written to: images and, where there are any, masks. `sources` is the table SOURCE of the
    whole listing.
    """

    job: PackJob
    survey: Survey
    streams: tuple[RowStream, ...]
    bounds: NDArray[np.int64]
    sources: NDArray[np.void]

    @classmethod
    def of(cls, job: PackJob, survey: Survey, placed: dict[str, tuple[str, int]] | None = None) -> PackTasks:
        """Returns the tasks of a survey; masks lie behind the images if their place there is known beforehand.

        `placed` says where an earlier call has begun: name of each stream -> its file and base.
        """
        plan, sources = survey.plan, source_table(job.listing)
        if plan is None:
            return cls(job, survey, (), np.zeros(1, np.int64), sources)
        specs = survey.pixels(survey.num_samples)
        if placed is None:
            placed = {"images": (job.part.name, IMAGES_OFFSET), "masks": (job.masks.name, 0)}
            linear = all(name in specs and specs[name].codec == NONE for name in placed)
            if linear and not job.may_skip:
                with output_errors(
                    f"{job.output}: cannot be packed ({{}}). Allow larger files, or pack smaller images."
                ):
                    placed["masks"] = job.part.name, pixel_offsets(survey.num_samples, specs)["masks"]
        streams = tuple(
            RowStream(
                name, str(job.part.with_name(placed[name][0])), placed[name][1], plan.chunk_bytes, specs.get(name)
            )
            for name in survey.row_lengths
        )
        task_bytes = COPY_TASK_BYTES if only_arrays(survey.listing) else min(plan.chunk_bytes, TASK_BYTES)
        return cls(job, survey, streams, _bounds(streams, survey.expected, task_bytes), sources)

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
        return self.job.may_skip or not self.fixed

    def chunks_of(self, records: Collection[TaskRecord]) -> int:
        """Returns how many chunks lie whole in these tasks; how many tasks they are where chunks do not count."""
        chunk_rows = self.survey.chunk_rows
        if not chunk_rows:
            return len(records)
        done = np.zeros(self.survey.num_samples, np.bool_)
        for record in records:
            done[record.first : record.first + record.count] = True
        return int(np.logical_and.reduceat(done, np.arange(0, len(done), chunk_rows)).sum())

    def rows(self, number: int) -> slice:
        """Returns the rows of a task."""
        return slice(int(self.bounds[number]), int(self.bounds[number + 1]))

    def task(self, number: int, *, at_once: bool = False) -> PackTask:
        """Returns a task; `at_once`: no row before it is skipped, so rows of one size are written at once."""
        survey, plan, rows = self.survey, self.survey.plan, self.rows(number)
        assert plan is not None and survey.headers is not None, "without images there are no tasks"
        samples, known = survey.order[rows], survey.listing.digests
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
            compress=not self.job.may_skip,  # Else it is known in the end which rows share a chunk.
            strict=self.job.options.strict,
        )

    def starts(self, number: int) -> tuple[int, ...]:
        """Returns where a task's rows of one size begin in each stream if no row before them is skipped."""
        first = int(self.bounds[number])
        return tuple(first * stream.spec.row_bytes for stream in self.streams if stream.spec is not None)

    def ends(self, record: TaskRecord) -> tuple[int, ...]:
        """Returns where a task's rows end in each stream."""
        streams = zip(self.streams, record.starts, strict=True)
        return tuple(stream.offsets(record.rows[stream.name], start)[1] for stream, start in streams)

    def end_of(self, records: Mapping[int, TaskRecord]) -> tuple[int, ...]:
        """Returns where rows end in each stream behind the last of these tasks."""
        return self.ends(records[max(records)]) if records else (0,) * len(self.streams)

    def sources_check(self, number: int) -> int:
        """Returns a number that changes with any source file of a task."""
        return xxhash.xxh3_64_intdigest(self.sources[self.survey.order[self.rows(number)]].tobytes())

    def named(self, reasons: dict[int, str]) -> list[tuple[str, str]]:
        """Returns (key, reason) of skipped rows."""
        return [(self.survey.listing.keys[self.survey.order[row]], reason) for row, reason in sorted(reasons.items())]

    @property
    def known_end(self) -> int:
        """Byte of `OUT.h5.part` at which its rows will end, or at which they begin if that is not known before."""
        plan = self.survey.plan
        if plan is None:
            return IMAGES_OFFSET
        last = [stream for stream in self.streams if stream.path == str(self.job.part)][-1]
        known = not last.compressed
        if last.spec is None:
            known = plan.option.kind in ("raw", "keep") and plan.image_codec == NONE
        return last.base + self.survey.dataset_bytes[last.name] if known else IMAGES_OFFSET

    def bytes_to_come(self, done: Collection[TaskRecord], pool: PackPool) -> int:
        """Returns about how many more bytes the file and the files next to it will need, at most at once.

        Compressed chunks are copied into `OUT.h5.meta` while rows still lie in their streams, as are masks from their
        own file.
        """
        expected, compressed, total = self.survey.expected, self._compressed_bytes(pool), 0.0
        left = 1 - sum(expected[r.first : r.first + r.count].sum() for r in done) / max(expected.sum(), 1)
        for stream in self.streams:
            rows = self.survey.dataset_bytes[stream.name]
            copied = rows if stream.path == str(self.job.masks) else 0
            if stream.compressed:
                copied = compressed[stream.name]
                rows = rows if self.job.may_skip else copied
            total += left * rows + copied
        return int(total)

    def _compressed_bytes(self, pool: PackPool) -> dict[str, int]:
        """Returns for each stream whose chunks are compressed about how many bytes these take, from some tasks."""
        names = [stream.name for stream in self.streams if stream.compressed]
        if not names:
            return {}
        count, some = _unit(self.streams), list[PackTask]()
        for number in sorted({at * self.num_tasks // _SAMPLED_TASKS for at in range(_SAMPLED_TASKS)}):
            task = self.task(number)
            first = {name: getattr(task, name)[:count] for name in ("samples", "headers", "digests")}
            some.append(replace(task, **first, compress=True))
        rows, found = 0, dict.fromkeys(names, 0)
        for made in pool.run(Worker.measure, some):
            if made.reasons:
                continue  # Packing reports it.
            rows += len(made.rows)
            for name in names:
                found[name] += int(made.rows[name].sum())
        return {name: self.survey.num_samples * total // max(rows, 1) for name, total in found.items()}


def _bounds(streams: tuple[RowStream, ...], expected: NDArray[np.int64], task_bytes: int) -> NDArray[np.int64]:
    """Returns where tasks begin and the last one ends, int64 (T + 1,); tasks of rows of one size are whole chunks."""
    unit = _unit(streams)
    if unit * expected[0] > TASK_BYTES and not any(stream.compressed for stream in streams):
        unit = 1  # a part of a chunk
    units = np.add.reduceat(expected, np.arange(0, len(expected), unit))
    return np.minimum(task_bounds(units, task_bytes) * unit, len(expected))


def _unit(streams: tuple[RowStream, ...]) -> int:
    """Returns the number of rows that are whole chunks, compressed ones if there are any; 1 where images vary."""
    specs = [stream.spec for stream in streams if stream.spec is not None]
    compressed = [spec.chunk_rows for spec in specs if spec.codec != NONE]
    return math.lcm(*compressed) if compressed or streams[0].spec is None else streams[0].spec.chunk_rows


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


def make_rows(tasks: PackTasks, journal: Journal, pool: PackPool, records: dict[int, TaskRecord]) -> None:
    """Makes the rows of the tasks that have no record yet: by workers, located, written and journaled; adds records.

    SourceError: a sample cannot be packed and must not be skipped; rows before it stay.
    """
    job, numbers, skipped = tasks.job, range(tasks.num_tasks), any(record.reasons for record in records.values())
    done, total = 0, tasks.survey.num_samples - sum(record.count for record in records.values())

    def check(made: TaskRecord) -> None:
        if made.failed and job.on_error == "fail":
            bad = unreadable(job, tasks.named(made.failed), tasks.survey.num_samples)
            raise SourceError(f"{bad} {KEPT}")

    def written(record: TaskRecord) -> None:
        nonlocal done
        journal.written(record)
        records[record.number] = record
        done += record.count
        if job.on_progress:
            job.on_progress("packing", done, total)

    def at_once() -> Iterator[PackTask]:
        for number in numbers:
            if skipped:
                return
            if number not in records:
                yield tasks.task(number, at_once=True)

    if tasks.fixed and not skipped:
        for made in pool.run(Worker.pack, at_once()):
            if made.reasons:
                check(made)
                skipped = True  # Workers still finish what they have; the tasks before this one count.
            else:
                written(made)
        # Rows behind a task with skipped samples belong elsewhere.
        first = min(set(numbers) - records.keys(), default=tasks.num_tasks)
        for number in [number for number in records if number > first]:
            done -= records.pop(number).count
    ends, located = tasks.end_of(records), dict[int, TaskRecord]()

    def locate(made: TaskRecord) -> tuple[int, tuple[int, ...]]:
        """Returns a task's number and where its rows begin in each stream; called in the order of tasks."""
        nonlocal ends
        check(made)
        record = located[made.number] = replace(made, starts=ends)
        ends = tasks.ends(record)
        return record.number, record.starts

    for number in pool.run(Worker.pack, map(tasks.task, sorted(set(numbers) - records.keys())), locate, Worker.write):
        written(located.pop(number))
