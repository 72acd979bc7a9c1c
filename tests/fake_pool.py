"""A pool that tests pass to a producer: the test makes its works, one after the other, as they are asked for."""

from __future__ import annotations

import numpy as np

from fastload.prefetch.pool import Coming, Run
from fastload.prefetch.ring import Slot
from fastload.prefetch.waiting import Patience
from fastload.prefetch.work import Orders, Work, coalesced
from fastload.timing.probe import WorkerInfo


class FakePool:
    """Batches of what is planned; `make` gives one its arrays or fields.

    A work has a slot of its own that is never filled again, unless the test has others.
    """

    number, pass_meter, by_threads = 1, None, False  # the loop brings its works to a device, in turn with the test
    usable, short_switches = True, False
    worker_info = WorkerInfo(1, 1, by_threads=True)

    def begin(self, epochs, *, timed):
        coming = Coming(coalesced(epochs, 1))
        return Run(1, coming, Orders(coming, []), Patience(0.0, str), timed=timed)

    def begin_pass(self):
        pass

    def ask(self, run):
        pass

    def first(self, run):
        if (found := next(run.coming, None)) is None:
            return None
        work = Work(Slot(0, np.empty(0, np.uint8), {}), run.orders)
        work.plan(*found)
        self.make(work)
        return work

    def make(self, work):
        raise NotImplementedError

    def hand_over(self, run, work):
        return [work]

    def release(self, slot):
        pass

    def depth(self, run):
        return 0

    def leave(self, run):
        run.closed = True

    def fail(self, run, error):
        self.leave(run)

    def close(self):
        pass
