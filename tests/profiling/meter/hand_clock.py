"""A clock that the test moves by hand, and loaders and a device that take time on it."""

from __future__ import annotations

import time

import numpy as np
from late_backend import LateBackend

BATCH = np.zeros(2)


class HandClock:
    """A `Clock` moved by hand; `behind` marks wait only when waited for, like a device at work."""

    def __init__(self, *, behind=False):
        self.now = 0.0
        self.behind = behind
        self.dropped = []
        self.waited_for = []

    def mark(self):
        return [self.now]

    def is_done(self, mark):
        return not self.behind

    def wait(self, mark):
        self.waited_for.append(mark)

    def between_s(self, earlier, later):
        return later[0] - earlier[0]

    def drop(self, mark):
        self.dropped.append(mark)


class SlowLoader:
    """Batches that take `wait_s` each on the clock; to find that there are no more takes `end_s` of the real time."""

    def __init__(self, clock, count=4, wait_s=1.0, end_s=0.0):
        self.clock, self.count, self.wait_s, self.end_s = clock, count, wait_s, end_s

    def __iter__(self):
        for _ in range(self.count):
            self.clock.now += self.wait_s
            yield BATCH
        time.sleep(self.end_s)

    def __len__(self):
        return self.count


def times(step):
    return step.wait_s, step.copy_s, step.transform_s, step.compute_s


class Device(LateBackend):
    """A device without a GPU: being waited for takes a second on the clock."""

    def __init__(self, clock):
        super().__init__(patience=1)
        self.clock = clock

    def hand_over(self, event, tensors):
        super().hand_over(event, tensors)
        self.compute()
        self.clock.now += 1
