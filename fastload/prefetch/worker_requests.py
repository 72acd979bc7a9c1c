"""Requests to worker processes, as the training process has them.

training thread: a slot --Work--> thread of `FillThreads`: plans the batch --BatchRequest--> worker process
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from fastload.plan import PlannedBatch, batch_seed
from fastload.prefetch.loader_plan import LoaderPlan
from fastload.prefetch.ring import Slot
from fastload.prefetch.sample_layout import SampleLayout
from fastload.prefetch.sample_worker import (
    BatchRequest,
    place_in_batch,
    requested_rows,
    requested_seeds,
    sample_at,
)
from fastload.prefetch.shared_memory import SharedMemory
from fastload.prefetch.torch_workers import WorkerProcesses
from fastload.prefetch.waiting import doing, is_stopped, state_of
from fastload.prefetch.work import Stage, Where, Work
from fastload.transforms.draws import Draws

# Workers whose stacks a message shows.
_MOST_SHOWN = 4


_USER_CODE = 0x75736572  # a stream of draws that no transform's index reaches


def sample_seeds(planned: PlannedBatch, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns a seed for the Python code that makes each sample, int64 (B,), from 0 to 2**32 - 2.

    As a transform's draws they depend on seed, epoch, row, and how many times the row came before: so a sample is the
    same in whatever batch, on whatever rank. Seeding takes some 8 us a sample, therefore only where batches of any
    number of ranks are to be equal.
    """
    draws = Draws(seed, epoch, planned.rows, times=planned.times)
    return draws.stream(_USER_CODE).integers(0, 2**32 - 1)


NO_SLOT = Slot(-1, np.empty(0, np.uint8), {})
"""The slot of a request for a layout."""


class Sender(Stage):
    """Sends requests to workers; a stage of the thread that plans, which must not keep the pool alive."""

    where = Where.THREAD
    why = "processes make the samples"

    def __init__(self, workers: WorkerProcesses, control: SharedMemory, options: LoaderPlan) -> None:
        self._workers, self._control, self._options = workers, control, options
        self._told: set[int] = set()  # workers that know the layout
        self.sending = threading.RLock()  # held while a request is sent, and while workers are replaced
        self.layout: SampleLayout | None = None  # of the slots

    def replace(self, workers: WorkerProcesses, works: Iterable[Work]) -> None:
        """Sends requests to these workers from now on, and those again that were sent before."""
        with self.sending:
            self._workers = workers
            self._told.clear()
            for one in works:
                if one.sent:
                    self._send(one)

    def latest(self, works: Iterable[Work], worker: int) -> Work | None:
        """Returns which of the requests a worker began last; results of those before may not have arrived."""
        begun = [one for one in works if one.worker == worker and one.sent and self.place(one) >= 0]
        return begun[-1] if begun else None

    def place(self, work: Work) -> int:
        """Returns at which place of a batch its worker is, see `place_in_batch`."""
        return int(place_in_batch(self._control, work.slot.number, self._options.batch_size)[0])

    def run(self, work: Work) -> None:
        """Sends the request for a work that was planned."""
        with self.sending:
            self._send(work)

    def _send(self, work: Work) -> None:
        slot, rows, plan, size = work.slot.number, work.rows, self._options.plan, self._options.batch_size
        place_in_batch(self._control, slot, size)[0] = -1
        seed = batch_seed(plan.seed, work.epoch, self._options.share.rank, work.whole.step)
        request = BatchRequest(slot, seed, work.run, work.timed)
        if slot < 0:
            # With some more, in case the first one is damaged and is to be skipped.
            request = request._replace(rows=rows[: 16 if self._options.skip_damaged else 1])
        else:
            requested_rows(self._control, slot, size)[: len(rows)] = rows
            request = request._replace(num_rows=len(rows), spare=work.whole.spare, seeds=plan.elastic)
            if plan.elastic:
                seeds = sample_seeds(work.whole, plan.seed, work.epoch)
                requested_seeds(self._control, slot, size)[: len(rows)] = seeds
            if work.worker not in self._told:
                request = request._replace(layout=self.layout)
                self._told.add(work.worker)
        self._workers.ask(work.worker, work.number, request)
        work.sent = True

    def describe(self, works: Mapping[int, Work], waits_for: Work | None, name_of: Callable[[int], str]) -> str:
        """Returns sentences on what a batch waits for, of those that were asked for, by number; None: for any of them.

        They name the sample that its worker is at, and say what the worker is doing.
        """
        if waits_for is not None and not waits_for.sent:
            stack = doing(waits_for.thread) if waits_for.thread is not None else ""
            return f"The thread that plans batches has not sent the request for it.\n\n{stack}"
        # A worker carries out its requests in order.
        at_work = {one.worker: one for one in reversed(list(works.values())) if one.result is None and one.sent}
        stopped = [n for n in at_work if is_stopped(self._workers.pids[n])]
        shown = sorted({waits_for.worker, *stopped}) if waits_for is not None else sorted(at_work)
        return "\n\n".join(self._describe(at_work[n], name_of) for n in shown[:_MOST_SHOWN] if n in at_work)

    def _describe(self, work: Work, name_of: Callable[[int], str]) -> str:
        pid, rows, place = self._workers.pids[work.worker], work.rows, self.place(work)
        rows = rows if work.slot is not NO_SLOT else rows[:1]
        state, stacks = state_of(pid), self._workers.stacks
        what = "has not begun the batch."
        if place >= 0:
            where = sample_at(place, rows, name_of, at_once=self._options.data.at_once)
            what = f"is at {where}, {min(place + 1, len(rows))} of {len(rows)} in its batch."
        elif not stacks.answered_by(pid):
            what = "is still starting, and imports its modules."
        said = f"Worker process {pid} {what} {state}".rstrip()
        stack = "" if state else stacks.of(pid)  # who is stopped would answer later
        return f"{said}\n\n{stack}" if stack else said
