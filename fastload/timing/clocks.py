"""Clocks with marks: the host's, or events on a CUDA stream; and the times in which a stream waited for its batches."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

MOST_IN_FLIGHT = 4
"""Most batches handed to a stream that it has not begun to use.

A training loop without graphs is two or three steps of a ResNet-50 ahead, when the driver's queue of 1,024 launches is
full: so much was always enough to hide the host."""


@runtime_checkable
class Clock(Protocol):
    """Marks on a time line, made by one thread. The time between two marks is known once the later one is done.

    A clock whose marks are times can inherit all but `mark`.
    """

    def mark(self) -> Any:
        """Returns a mark after everything done so far."""
        ...

    def is_done(self, mark: Any) -> bool:
        """Whether everything before the mark is done; does not wait."""
        return True

    def wait(self, mark: Any) -> None:
        """Waits until everything before the mark is done."""
        return None

    def between_s(self, earlier: Any, later: Any) -> float:
        """Returns the seconds between two marks that are done."""
        seconds: float = later - earlier
        return seconds

    def drop(self, mark: Any) -> None:
        """Gives a mark back that is no longer needed."""
        return None


class HostClock(Clock):
    """The host's clock: a mark is a time."""

    mark = staticmethod(time.perf_counter)


@functools.cache
def _kept_in_forks(event_class: Any) -> Any:
    class Event(event_class):  # type: ignore[misc]
        pid = 0

        def __del__(
            self, pid: Any = os.getpid, keep: Any = ctypes.pythonapi.Py_IncRef, as_object: Any = ctypes.py_object
        ) -> None:
            if self.pid != pid():
                keep(as_object(self))

    return Event


def cuda_event(**options: bool) -> Any:
    """Returns a `torch.cuda.Event` that a forked process never frees: there is no device, and torch would end it."""
    import torch

    event = _kept_in_forks(torch.cuda.Event)(**options)
    event.pid = os.getpid()
    return event


class CudaClock(Clock):
    """CUDA events on the current stream of a device: they time the device, not the host, which runs ahead of it.

    Args:
        index: of the device; None: the current one.
        blocking: whether the host sleeps while it waits for a mark, and takes no CPU; it then wakes some 50 us late.
    """

    def __init__(self, index: int | None = None, *, blocking: bool = False) -> None:
        import torch

        self._torch: Any = torch
        self._blocking = blocking
        self.index: int = torch.cuda.current_device() if index is None else index
        self._free: list[Any] = []

    def mark(self) -> Any:
        # Events are reused: making one takes 3 times as long as recording it.
        event = self._free.pop() if self._free else self._new()
        event.record(self._torch.cuda.current_stream(self.index))
        return event

    def is_done(self, mark: Any) -> bool:
        return bool(mark.query())

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def between_s(self, earlier: Any, later: Any) -> float:
        return float(earlier.elapsed_time(later)) / 1e3

    def drop(self, mark: Any) -> None:
        self._free.append(mark)

    def _new(self) -> Any:
        return cuda_event(enable_timing=True, blocking=self._blocking)


@dataclass
class StreamWaits:
    """The times in which a device's stream waited for the batches of one pass, as far as they are known; in seconds."""

    batches: int = 0  # whose wait is known; one that is used again counts once
    steps: int = 0  # uses of batches from the first of these to the last one
    stall_s: float = 0.0  # all waits
    first_s: float = 0.0  # the wait for the first batch, part of stall_s
    work_s: float = 0.0  # of the steps between the first batch and the last one
    first_step: int = 0  # number of the first use
    last: Any = None  # mark of the moment at which the last of these batches was there


class _Use(NamedTuple):
    """A batch that was handed to a stream."""

    waits: StreamWaits
    step: int  # uses in its pass up to this one
    asked: Any  # mark of the moment at which it was asked for; None: it was used before, and nothing is waited for
    begun: Any  # mark of the moment at which it was there, and the stream had done all work given before


class InFlight:
    """The batches that a loader handed to a device's stream and that the stream has not begun to use, in order.

    The stream has nothing to do between two marks: one recorded when a batch is asked for, which happens when all
    earlier work is done, and one recorded after the stream was made to wait for the batch's copy. If it is still busy
    when the batch is there, both happen at the same time.

    So that there are never many, the host waits before it hands over another one. Each holds memory of the device, and
    a loop that launches a captured graph a step could be a thousand batches ahead.

    Used by the thread of the loop; `read` by any. A forked process, where there is no device, finds nothing. The clock
    marks the stream that is current where a batch is asked for.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._uses: deque[_Use] = deque()
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def ask(self, *, fresh: bool) -> Any:
        """Marks that a batch is asked for, and waits on the host until there is room for it; None if not `fresh`."""
        asked = self.clock.mark() if fresh else None
        self._read(MOST_IN_FLIGHT - 1)
        return asked

    def add(self, waits: StreamWaits, step: int, asked: Any) -> None:
        """Marks that the batch is there that was asked for: the use of that number in its pass."""
        self._uses.append(_Use(waits, step, asked, self.clock.mark()))

    def read(self, *, wait: bool = False) -> None:
        """Takes note of the waits that are over, or waits until all are; without that it never waits."""
        self._read(0 if wait else None)

    def _read(self, leave: int | None) -> None:
        clock, uses = self.clock, self._uses
        if self._pid != os.getpid() or not self._lock.acquire(blocking=leave is not None):
            return
        try:
            while uses and (clock.is_done(uses[0].begun) or (leave is not None and len(uses) > leave)):
                clock.wait(uses[0].begun)
                self._take_note(uses.popleft())
        finally:
            self._lock.release()

    def _take_note(self, use: _Use) -> None:
        clock, waits = self.clock, use.waits
        if use.asked is None:
            clock.drop(use.begun)
            return
        wait_s = clock.between_s(use.asked, use.begun)
        if waits.batches:
            waits.work_s += clock.between_s(waits.last, use.asked)
            clock.drop(waits.last)
        else:
            waits.first_s, waits.first_step = wait_s, use.step
        clock.drop(use.asked)
        waits.last = use.begun
        waits.stall_s += wait_s
        waits.steps = use.step - waits.first_step
        waits.batches += 1
