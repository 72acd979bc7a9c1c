"""What a `FastLoader` tells a `Meter` from inside, batch by batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

from fastload.verdict import BatchWork


class Crew(NamedTuple):
    """Who makes batches.

    Attributes:
        workers: threads or processes.
        ahead: batches that may be under way or ready at once.
        by_threads: whether they are threads.
        times_raw: of images that a packed file keeps encoded: how many times their bytes the pixels take; 0: it does
            not, so that nobody decodes them.
    """

    workers: int
    ahead: int
    by_threads: bool
    times_raw: float = 0.0


class Probe:
    """What is told of the batch that is being asked for. The thread of the loop writes it; no lock.

    Args:
        mark: of a `Clock`.

    Attributes:
        crew: of the loader; told once.
        in_copy: batches handed to the device ahead of their use.
        ready: mark of the moment that the batch was there, read and, where workers do it, transformed.
        looked_at: whether times on a CPU are wanted too.
        ready_running_s: `time.thread_time()` when it was ready, if they are.
        copied: mark of the moment that it was on the device.
        samples: in it.
        queue_depth: batches that lay ready when it was asked for.
        work: what it cost those that made it; None: not known, or nothing, since it is used again.
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        self._mark = mark
        self.in_copy = 0
        self.crew = Crew(0, 0, by_threads=False)
        self.clear()

    def clear(self, *, looked_at: bool = False) -> None:
        """The next batch is asked for."""
        self.looked_at = looked_at
        self.ready: Any = None
        self.ready_running_s: float | None = None
        self.copied: Any = None
        self.samples = 0
        self.queue_depth: int | None = None
        self.work: BatchWork | None = None

    def note_depth(self, in_host_memory: int | None) -> None:
        """So many batches lie ready, beside those on the device."""
        self.queue_depth = None if in_host_memory is None else in_host_memory + self.in_copy

    def note_work(self, work: BatchWork | None) -> None:
        """A batch was taken from those that made it. With echoes kept apart several are taken at first."""
        self.work = work if self.work is None or work is None else self.work + work

    def note_ready(self) -> None:
        """The batch is there; only the first time counts."""
        if self.ready is None:
            self.ready = self._mark()
            if self.looked_at:
                self.ready_running_s = time.thread_time()

    def note_copied(self) -> None:
        """The batch is on the device."""
        self.copied = self._mark()


@runtime_checkable
class Probed(Protocol):
    """A loader that tells a probe what it does."""

    def iterate(self, probe: Probe | None = None) -> Iterator[Any]:
        """The same as `iter()`, and tells the probe of each batch."""
        ...


def tells(loader: object) -> TypeGuard[Probed]:
    """Whether a loader tells probes: its `iter()` is that of the class that defines `iterate`, not another on top."""
    for kind in type(loader).__mro__:
        if "__iter__" in vars(kind) or "iterate" in vars(kind):
            return isinstance(loader, Probed) and {"__iter__", "iterate"} <= vars(kind).keys()
    return False
