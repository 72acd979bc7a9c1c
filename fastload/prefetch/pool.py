"""A pool: what makes batches ahead, for one run of epochs after another; and threads that plan and fill them.

A run: batches of one epoch after another, made ahead by a pool. `ThreadPool` and `ProcessPool` are the two kinds.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from fastload.prefetch.auto_workers import PassMeter
from fastload.prefetch.lookahead import Planned
from fastload.prefetch.ring import Slot
from fastload.prefetch.waiting import Patience
from fastload.prefetch.work import Epochs, Orders, Work
from fastload.read.fetch_ahead import FetchAhead
from fastload.system.threads import run_as_batch
from fastload.timing.probe import WorkerInfo
from fastload.timing.stopwatch import Stopwatch

# The interpreter ends daemon threads where they are, and one that is in a call of torch then aborts the process.
_living: weakref.WeakSet[FillThreads] = weakref.WeakSet()
# A thread that hangs cannot be ended.
_CLOSE_S = 10.0

_log = logging.getLogger("fastload")


@atexit.register
def _end_threads() -> None:
    """Lets all threads finish their current batch, unless that takes too long."""
    for threads in list(_living):
        for work in threads.drop():
            # So that a later exit handler may close the stream, and nobody takes the slots for filled.
            work.error = RuntimeError("the interpreter is ending: no more batches are read")
            work.finish()
        threads.close()


class FillThreads:
    """Threads that fill slots, for one stream after another; they start with the first work.

    Attributes:
        number: of threads.
        timed: whether they measure what a batch costs.
        left_behind: True after one of them hung: they may write to their slots at any time, which are not used again.
    """

    def __init__(self, number: int, *, timed: bool = False) -> None:
        self.number = number
        self.timed = timed
        self.left_behind = False
        self._requests: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()
        _living.add(self)

    def put(self, work: Work) -> None:
        """Lets a thread fill a slot, or several, a part each."""
        for _ in range(work.parts.number):
            self._requests.put(work)
        if self._threads:
            return
        # The threads know the queue and not this object, so that it can be collected, and end them.
        planning = threading.Lock()
        for i in reversed(range(self.number)):
            following = self._threads[0] if self._threads else None
            arguments = (self._requests, planning, following, self.timed)
            thread = threading.Thread(target=_work, args=arguments, name=f"fastload-worker-{i}", daemon=True)
            self._threads.insert(0, thread)
        # The others are started by one another: a start waits for its thread, with pure Python running for 7 ms.
        self._threads[0].start()

    def drop(self) -> list[Work]:
        """Takes back the works, or parts of them, that no thread has begun; returns those that none is at."""
        dropped: list[Work] = []
        with suppress(queue.Empty):
            while True:
                if (work := self._requests.get_nowait()) is None:
                    continue
                if work.parts.number > 1:
                    work.error = RuntimeError("the batch was taken back before all of it was read")
                if work.parts.last_ended():
                    dropped.append(work)
        return dropped

    def may_wait(self) -> bool:
        """Whether the caller may wait for the threads: it is none of them, where garbage collection may run."""
        return not self.left_behind and threading.current_thread() not in self._threads

    def settle(self, begun: Collection[Work], done_one: queue.SimpleQueue[None]) -> bool:
        """Waits until all of a stream's works are done, and returns whether that is so.

        False: they are left behind, or the caller may not wait.
        """
        end_s = time.monotonic() + _CLOSE_S
        while self.may_wait() and not all(work.done for work in begun):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                self._leave_behind()
            with suppress(queue.Empty):
                done_one.get(timeout=max(0.0, left_s))
        return self.may_wait()

    def close_resources(self, resources: ExitStack) -> None:
        """Closes what a stream used; the disk that a thread was left behind with may hold that up, so nobody waits."""
        if self.left_behind:
            threading.Thread(target=resources.close, name="fastload-close", daemon=True).start()
        else:
            resources.close()

    def _leave_behind(self) -> None:
        self.left_behind = True
        _log.warning("a thread of a loader that was closed did not finish its batch in %.0f s and is left", _CLOSE_S)

    def close(self) -> None:
        """Ends the threads. Returns when none is left, or some seconds later; works put later start new ones."""
        may_wait, threads, self._threads = self.may_wait(), self._threads, []
        if self._pid != os.getpid():  # a forked child has none of them
            return
        for _ in threads:
            self._requests.put(None)
        end_s = time.monotonic() + _CLOSE_S
        for thread in threads:
            if may_wait and thread.ident is not None:
                thread.join(max(0.0, end_s - time.monotonic()))
        if may_wait and any(thread.is_alive() for thread in threads):
            self._leave_behind()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # While the interpreter ends, daemon threads are already frozen and cannot be waited for, and globals are gone.
        if getattr(self, "_threads", None) and not _is_finalizing():
            self.close()


def _work(
    requests: queue.SimpleQueue[Work | None], planning: threading.Lock, following: threading.Thread | None, timed: bool
) -> None:
    """Makes works until None is asked for; the body of a thread, which starts the following one."""
    run_as_batch()
    stopwatch = Stopwatch("reading", by_threads=True).start() if timed else None
    while (taken := _planned(requests, planning)) is not None:
        work, part = taken
        if following is not None and work.parts.number > 1:
            following.start()
            following = None
        if work.parts.number > 1 and _measured(work, stopwatch, functools.partial(work.orders.fill_part, work, part)):
            work.parts.failed = True  # for an error that comes again when the whole is filled
        if work.parts.last_ended():
            work.error = work.error or _measured(work, stopwatch, functools.partial(work.orders.complete, work))
            work.finish()
        del work, taken
        if following is not None:
            following.start()
            following = None


def _measured(work: Work, stopwatch: Stopwatch | None, make: Callable[[], None]) -> BaseException | None:
    """Makes some of a work, if it was planned, and notes what it cost; returns the error that came of it."""
    if work.planned is None:
        return None
    try:
        if stopwatch is not None:
            stopwatch.begin()
        make()
        if stopwatch is not None:
            work.costs.append(stopwatch.end())
    except BaseException as error:  # noqa: BLE001  # whatever it is, the training loop has to hear of it
        return error
    return None


def _planned(requests: queue.SimpleQueue[Work | None], planning: threading.Lock) -> tuple[Work, int] | None:
    """Returns the next work, with its batches, and which part of it; the training thread need not plan them."""
    with planning:
        work = requests.get()
        if work is None:
            return None
        work.thread = threading.get_ident()
        part, work.parts.begun = work.parts.begun, work.parts.begun + 1
        if part == 0:
            try:
                if (found := next(work.orders.coming, None)) is not None:
                    work.plan(*found)
            except BaseException as error:  # noqa: BLE001  # as in `_measured`
                work.error = error
    return work, part


class Coming(Iterator[Planned]):
    """Planned batches, some of which can be put back. One thread asks at a time."""

    def __init__(self, source: Iterator[Planned]) -> None:
        self._source, self._again = source, deque[Planned]()

    def __next__(self) -> Planned:
        return self._again.popleft() if self._again else next(self._source)

    def put_back(self, item: Planned) -> None:
        """Lets it come next, again."""
        self._again.append(item)


@dataclass(eq=False)
class Run:
    """Batches that a pool makes, until it is left."""

    number: int  # runs of a pool count up
    coming: Coming
    orders: Orders
    patience: Patience
    timed: bool = False  # whether works say what they cost
    parts: int = 1  # in which the next work is made
    ahead: FetchAhead | None = None  # fetches for worker processes, which do not
    resources: ExitStack = field(default_factory=ExitStack)  # closed with it
    under_way: deque[Work] = field(default_factory=deque)  # in order; the first is handed over next
    closed: bool = False
    loop_waits: bool = True  # whether who waits for works is the loop, whose waits have a limit
    pid: int = field(default_factory=os.getpid)

    def end_waits(self) -> None:
        """Ends the waits for its works, in whatever thread: it is over."""
        self.closed = True
        self.orders.done_one.put(None)


class Pool(Protocol):
    """Threads, or worker processes, that make works in slots; kept from one epoch and run to the next.

    Attributes:
        number: of threads or processes.
        short_switches: whether threads decode, compute or compare rows, so that they need a `ShortSwitchInterval`.
        by_threads: whether threads fill the slots, and any thread may take works.
        pass_meter: measurements of the pass, to choose the number of workers; None: nobody asks.
    """

    number: int
    by_threads: ClassVar[bool]
    pass_meter: PassMeter | None

    @property
    def usable(self) -> bool:
        """Whether another run can begin: no thread hangs, no process died."""

    @property
    def short_switches(self) -> bool:
        """See above; it changes as rows have been compared."""

    @property
    def worker_info(self) -> WorkerInfo:
        """The workers, and the batches that they have to do."""

    def begin(self, epochs: Epochs, *, timed: bool) -> Run:
        """Begins a run, and ends the one before it."""

    def begin_pass(self) -> None:
        """Begins the measurements of a pass."""

    def ask(self, run: Run) -> None:
        """Has batches made in all slots that are free."""

    def first(self, run: Run) -> Work | None:
        """Waits for the next work, in order; None: there are no more. Raises what came instead, with its traceback."""

    def hand_over(self, run: Run, work: Work) -> list[Work]:
        """Returns the batches of a work: on the CPU as its user gets them, else to be copied."""

    def release(self, slot: Slot) -> None:
        """Makes a slot free that was copied to a device."""

    def depth(self, run: Run) -> int:
        """Returns how many batches `first` would give without waiting, and without an error."""

    def leave(self, run: Run) -> None:
        """Ends a run: when this returns nothing writes to its slots any longer, or nobody looks at them."""

    def describe(self, run: Run) -> str:
        """Returns sentences on what the next work waits for."""

    def leave_behind(self) -> None:
        """Notes that a thread hangs, which uses slots: they are not used again."""

    def fail(self, run: Run, error: BaseException) -> None:
        """Ends a run after an error."""

    def close(self) -> None:
        """Ends the workers, and closes the file. Batches handed over stay valid."""
