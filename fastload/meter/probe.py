"""What a `FastLoader` tells a `Meter` from inside, batch by batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from fastload.verdict import BatchWork


class Probe:
    """What is told of the batch that is being asked for. The thread of the loop writes it; no lock.

    Args:
        mark: of a `Clock`.

    Attributes:
        ready: mark of the moment that the batch was there, read and, where workers do it, transformed.
        ready_running_s: `time.thread_time()` then.
        copied: mark of the moment that it was on the device.
        samples: in it.
        queue_depth: batches that lay ready when it was asked for.
        work: what it cost those that made it; None: not known, or nothing, since it is used again.
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        self._mark = mark
        self.workers = 0
        self.ahead = 0
        self.by_threads = False
        self.clear()

    def clear(self) -> None:
        """The next batch is asked for."""
        self.ready: Any = None
        self.ready_running_s: float | None = None
        self.copied: Any = None
        self.samples = 0
        self.queue_depth: int | None = None
        self.work: BatchWork | None = None

    def note_ready(self) -> None:
        """The batch is there; only the first time counts."""
        if self.ready is None:
            self.ready, self.ready_running_s = self._mark(), time.thread_time()

    def note_copied(self) -> None:
        """The batch is on the device."""
        self.copied = self._mark()


@runtime_checkable
class Probed(Protocol):
    """A loader that tells a probe what it does."""

    def iterate(self, probe: Probe | None = None) -> Iterator[Any]:
        """The same as `iter()`, and tells the probe of each batch."""
        ...
