"""A clock that the test moves by hand, and loaders whose batches take time on it."""

from __future__ import annotations

import numpy as np

BATCH = np.zeros(2)


class HandClock:
    """See `fastload.meter.clocks.Clock`; `behind` marks settle only when waited for, like a device at work."""

    name = "by hand"

    def __init__(self, *, behind=False):
        self.now = 0.0
        self.behind = behind
        self.dropped = []
        self.settled_marks = []

    def mark(self):
        return [self.now]

    def settled(self, mark):
        return not self.behind

    def settle(self, mark):
        self.settled_marks.append(mark)

    def between_s(self, earlier, later):
        return later[0] - earlier[0]

    def drop(self, mark):
        self.dropped.append(mark)


class SlowLoader:
    """Batches that take `wait_s` each on the clock."""

    def __init__(self, clock, count=4, wait_s=1.0, batch=BATCH):
        self.clock, self.count, self.wait_s, self.batch = clock, count, wait_s, batch

    def __iter__(self):
        for _ in range(self.count):
            self.clock.now += self.wait_s
            yield self.batch

    def __len__(self):
        return self.count


def times(step):
    return step.wait_s, step.copy_s, step.transform_s, step.compute_s
