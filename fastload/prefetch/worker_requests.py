"""Requests to worker processes, as the training process has them.

training thread: a slot --Asked--> thread of `FillThreads`: plans the batch --BatchRequest--> worker process
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastload.plan import PlannedBatch, batch_seed
from fastload.prefetch.fill_threads import Group, Request
from fastload.prefetch.resolved import Resolved
from fastload.prefetch.ring import Slot
from fastload.prefetch.sample_layout import SampleLayout
from fastload.prefetch.sample_worker import (
    BatchRequest,
    BatchResult,
    place_in_batch,
    requested_rows,
    requested_seeds,
    sample_at,
)
from fastload.prefetch.shared_memory import SharedMemory
from fastload.prefetch.torch_workers import Workers
from fastload.prefetch.waiting import doing, is_stopped, state_of
from fastload.transforms.draws import Draws

# Workers whose stacks a message shows.
_MOST_SHOWN = 4


@dataclass(eq=False, kw_only=True)
class Asked(Request):
    """A batch that a worker is asked for."""

    number: int
    stream: int  # number of the stream that asks
    worker: int
    timed: bool  # whether the result says what it cost
    sent: bool = False
    result: BatchResult | None = None  # when it has arrived


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


class Sender:
    """Sends requests to workers; called by a thread, which must not keep the feed alive."""

    def __init__(self, workers: Workers, control: SharedMemory, options: Resolved) -> None:
        self._workers, self._control, self._options = workers, control, options
        self._told: set[int] = set()  # workers that know the layout
        self.sending = threading.RLock()  # held while a request is sent, and while workers are replaced
        self.layout: SampleLayout | None = None  # of the slots

    def replace(self, workers: Workers, asked: Iterable[Asked]) -> None:
        """Sends requests to these workers from now on, and those again that were sent before."""
        with self.sending:
            self._workers = workers
            self._told.clear()
            for one in asked:
                if one.sent and one.group is not None:
                    self._send(one, one.group)

    def latest(self, asked: Iterable[Asked], worker: int) -> Asked | None:
        """Returns which of the requests a worker began last; results of those before may not have arrived."""
        begun = [one for one in asked if one.worker == worker and one.sent and self.place(one) >= 0]
        return begun[-1] if begun else None

    def place(self, asked: Asked) -> int:
        """Returns at which place of a batch its worker is, see `place_in_batch`."""
        return int(place_in_batch(self._control, asked.slot.number, self._options.plan.batch_size)[0])

    def __call__(self, asked: Asked, group: Group, _: int | None) -> None:
        with self.sending:
            self._send(asked, group)

    def _send(self, asked: Asked, group: Group) -> None:
        slot, rows, plan = asked.slot.number, group.whole.rows, self._options.plan
        place_in_batch(self._control, slot, plan.batch_size)[0] = -1
        seed = batch_seed(plan.seed, group.epoch, self._options.share.rank, group.whole.step)
        request = BatchRequest(slot, seed, asked.stream, asked.timed)
        if slot < 0:
            # With some more, in case the first one is damaged and is to be skipped.
            request = request._replace(rows=rows[: 16 if self._options.skip_damaged else 1])
        else:
            requested_rows(self._control, slot, plan.batch_size)[: len(rows)] = rows
            request = request._replace(num_rows=len(rows), spare=group.whole.spare, seeds=plan.elastic)
            if plan.elastic:
                seeds = sample_seeds(group.whole, plan.seed, group.epoch)
                requested_seeds(self._control, slot, plan.batch_size)[: len(rows)] = seeds
            if asked.worker not in self._told:
                request = request._replace(layout=self.layout)
                self._told.add(asked.worker)
        self._workers.ask(asked.worker, asked.number, request)
        asked.sent = True

    def describe(self, asked: Mapping[int, Asked], waits_for: Asked | None, name_of: Callable[[int], str]) -> str:
        """Returns sentences on what a batch waits for, of those that were asked for, by number; None: for any of them.

        They name the sample that its worker is at, and say what the worker is doing.
        """
        if waits_for is not None and not waits_for.sent:
            stack = doing(waits_for.thread) if waits_for.thread is not None else ""
            return f"The thread that plans batches has not sent the request for it.\n\n{stack}"
        # A worker carries out its requests in order.
        at_work = {one.worker: one for one in reversed(list(asked.values())) if one.result is None and one.sent}
        stopped = [n for n in at_work if is_stopped(self._workers.pids[n])]
        shown = sorted({waits_for.worker, *stopped}) if waits_for is not None else sorted(at_work)
        return "\n\n".join(self._describe(at_work[n], name_of) for n in shown[:_MOST_SHOWN] if n in at_work)

    def _describe(self, asked: Asked, name_of: Callable[[int], str]) -> str:
        assert asked.group is not None, "it was sent"
        pid, rows, place = self._workers.pids[asked.worker], asked.group.whole.rows, self.place(asked)
        rows = rows if asked.slot is not NO_SLOT else rows[:1]
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
