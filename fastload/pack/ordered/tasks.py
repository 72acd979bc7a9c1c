"""One pack in order: its rows, cut into tasks by what is known of them before the first one is made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.codecs import NONE
from fastload.pack.decided import row_sizes, stored_lengths
from fastload.pack.journal import source_table
from fastload.pack.ordered.log import TaskRecord
from fastload.pack.ordered.streams import Stream, streams_of
from fastload.pack.ordered.work import EncodeTask, Placed
from fastload.pack.resume import PackJob
from fastload.pack.store_plan import StorePlan
from fastload.pack.survey import Survey, row_order

_TASK_BYTES = 8 * 2**20
_FEWEST_TASKS = 16
"""A small dataset is cut into so many tasks, so that all workers have some."""


@dataclass(frozen=True, eq=False)
class OrderedPack:
    """What is packed in order.

    Attributes:
        job, survey, plan: as asked for, as found, as decided.
        samples: int64 (N,), the sample of each row.
        bounds: int64 (T + 1,): task t has the rows from bounds[t] to bounds[t + 1].
        streams: where rows are written.
        sources: SOURCE (N,), what is known of each sample's file.
        expected: int64 (N,), about how many bytes each row takes.
    """

    job: PackJob
    survey: Survey
    plan: StorePlan
    samples: NDArray[np.int64]
    bounds: NDArray[np.int64]
    streams: tuple[Stream, ...]
    sources: NDArray[np.void]
    expected: NDArray[np.int64]

    @classmethod
    def of(cls, job: PackJob, survey: Survey, plan: StorePlan) -> OrderedPack:
        """The pack of a survey."""
        samples = row_order(survey)
        listing = survey.listing
        held = _expected_bytes(survey, plan)[samples]
        return cls(
            job, survey, plan, samples, task_bounds(held, min(plan.chunk_bytes, _TASK_BYTES)),
            streams_of(plan, job.part, job.masks), source_table(listing.keys, listing.sizes, listing.mtimes_ns), held,
        )  # fmt: skip

    @property
    def num_tasks(self) -> int:
        """T."""
        return len(self.bounds) - 1

    def rows(self, number: int) -> slice:
        """The rows of a task."""
        return slice(int(self.bounds[number]), int(self.bounds[number + 1]))

    def task(self, number: int) -> EncodeTask:
        """A task as a worker gets it."""
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
        """Whether rows are those of the source, whose digests may be known."""
        plan = self.plan
        resized = plan.max_size is not None or (plan.target is not None and plan.target.fit is not None)
        return plan.option.kind in ("raw", "keep") and not resized

    def place(
        self, number: int, rows: NDArray[np.void], starts: tuple[int, ...], checks: tuple[int, ...] = ()
    ) -> tuple[Placed, tuple[int, ...]]:
        """Where a task's rows (ROW) lie when those before it end at starts, and where they end then."""
        found = [stream.place(rows, start) for stream, start in zip(self.streams, starts, strict=True)]
        lengths = tuple(rows[stream.name].copy() for stream in self.streams)
        placed = Placed(number, self.streams, tuple(offsets for offsets, _ in found), lengths, checks)
        return placed, tuple(end for _, end in found)

    def part_of(self, tasks: int) -> float:
        """About what part of all bytes the rows of the first tasks are, 0 to 1."""
        return float(self.expected[: self.bounds[tasks]].sum() / max(int(self.expected.sum()), 1))

    def sources_check(self, number: int) -> int:
        """A number that changes with any source of a task."""
        return xxhash.xxh3_64_intdigest(self.sources[self.samples[self.rows(number)]].tobytes())

    def is_of(self, record: TaskRecord) -> bool:
        """Whether a record in the journal is of the task of its number as it would be done now."""
        rows = self.rows(record.number)
        same = (record.first, record.count) == (rows.start, rows.stop - rows.start)
        return same and record.sources == self.sources_check(record.number)

    @property
    def known_end(self) -> int | None:
        """Byte of `OUT.h5.part` at which rows of images will end, where that is known before they are made."""
        plan = self.plan
        if plan.option.kind not in ("raw", "keep") or (plan.images == "store" and plan.image_codec != NONE):
            return None
        if plan.images == "store":
            return self.streams[0].base + self.survey.stores["images"]
        num_rows = len(self.samples)
        return self.streams[0].base + num_rows * self.survey.pixels(num_rows)["images"].row_bytes

    @property
    def masks_bytes(self) -> int:
        """Bytes of the rows of masks, which lie in two files for a moment."""
        assert self.survey.headers is not None, "a plan is of images"
        sizes = row_sizes(self.plan, self.survey.headers[self.samples])
        return 0 if self.plan.masks is None else int(np.prod(sizes, axis=1).sum())


def task_bounds(held: NDArray[np.int64], task_bytes: int) -> NDArray[np.int64]:
    """Where tasks begin and the last one ends, int64 (T + 1,).

    A task has as many rows as fit task_bytes, at least 1; of few rows there are at least 16 tasks.

    Args:
        held: int64 (N,), bytes that a worker holds of each row.
    """
    most = max(1, len(held) // _FEWEST_TASKS)
    ends = np.cumsum(held)
    bounds = [0]
    while (start := bounds[-1]) < len(held):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + task_bytes, "right"))
        bounds.append(min(max(stop, start + 1), start + most))
    return np.array(bounds, np.int64)


def _expected_bytes(survey: Survey, plan: StorePlan) -> NDArray[np.int64]:
    """About how many bytes of each sample a worker holds until they are written, int64 (samples of the listing,)."""
    assert survey.headers is not None, "a plan is of images"
    lengths = stored_lengths(plan, survey.headers, survey.listing)
    return lengths["images"] + lengths["masks"] if plan.masks is not None else lengths["images"]
