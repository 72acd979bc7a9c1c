"""Requests to worker processes, as the training process has them.

training thread: a slot --Asked--> thread of `FillThreads`: plans the batch --BatchRequest--> worker process
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastload.plan import batch_seed
from fastload.prefetch.fill_threads import Group, Request
from fastload.prefetch.resolved import Resolved
from fastload.prefetch.ring import Slot
from fastload.prefetch.sample_layout import SampleLayout
from fastload.prefetch.sample_worker import BatchRequest, BatchResult, requested_rows
from fastload.prefetch.shared_memory import SharedMemory
from fastload.prefetch.torch_workers import Workers


@dataclass(eq=False, kw_only=True)
class Asked(Request):
    """A batch that a worker is asked for."""

    number: int
    stream: int  # number of the stream that asks
    worker: int
    timed: bool  # whether the result says what it cost
    sent: bool = False
    result: BatchResult | None = None  # when it has arrived


NO_SLOT = Slot(-1, np.empty(0, np.uint8), {})
"""That of a request for a layout."""


class Sender:
    """Sends requests to workers; called by a thread, which must not keep the feed alive."""

    def __init__(self, workers: Workers, control: SharedMemory, options: Resolved) -> None:
        self._workers, self._control, self._options = workers, control, options
        self._told: set[int] = set()  # workers that know the layout
        self.layout: SampleLayout | None = None  # of the slots

    def __call__(self, asked: Asked, group: Group) -> None:
        slot, rows, plan = asked.slot.number, group.whole.rows, self._options.plan
        seed = batch_seed(plan.seed, group.epoch, self._options.share.rank, group.whole.step)
        request = BatchRequest(slot, seed, asked.stream, asked.timed)
        if slot < 0:
            # With some more, in case the first one is damaged and is to be skipped.
            request = request._replace(rows=rows[: 16 if self._options.skip_damaged else 1])
        else:
            requested_rows(self._control, slot, plan.batch_size)[:] = rows
            if asked.worker not in self._told:
                request = request._replace(layout=self.layout)
                self._told.add(asked.worker)
        self._workers.ask(asked.worker, asked.number, request)
        asked.sent = True
