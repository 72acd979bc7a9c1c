"""Threads that plan batches and run stages on them, which fill slots of the ring, for one run after another."""

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
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress

from fastload.prefetch.work import Work
from fastload.system.threads import run_as_batch
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
        for _ in range(work.parts):
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
                if work.parts > 1:
                    work.error = RuntimeError("the batch was taken back before all of it was read")
                if work.last_part():
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
        if following is not None and work.parts > 1:
            following.start()
            following = None
        if work.parts > 1 and _measured(work, stopwatch, functools.partial(work.orders.fill_part, work, part)):
            work.failed = True  # for an error that comes again when the whole is filled
        if work.last_part():
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
        part, work.begun_parts = work.begun_parts, work.begun_parts + 1
        if part == 0:
            try:
                if (found := next(work.orders.coming, None)) is not None:
                    work.plan(*found)
            except BaseException as error:  # noqa: BLE001  # as in `_measured`
                work.error = error
    return work, part
