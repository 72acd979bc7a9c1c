"""Threads whose work releases the GIL: a function mapped over a stream, and a shorter switch interval meanwhile.

And how a process ends with its parent; and whether processes may be forks.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from itertools import islice
from typing import TypeVar

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

_F_SETSIG = 10  # of Linux; the module fcntl does not have it

_forking: ContextVar[bool] = ContextVar("forking", default=False)


def in_threads(
    work: Callable[[TaskT], ResultT], tasks: Iterable[TaskT], threads: int, *, ordered: bool = False
) -> Iterator[ResultT]:
    """Yields results in the order in which they are done; with 0 threads, in the order of the tasks.

    At most two tasks a thread are in progress. What a task raises is raised here, and tasks not begun are dropped. With
    `ordered` the order of the tasks is kept.
    """
    if threads == 0:
        yield from map(work, tasks)
        return
    with ThreadPoolExecutor(threads) as pool:
        left, pending = iter(tasks), list[Future[ResultT]]()
        try:
            while True:
                pending += [
                    pool.submit(copy_context().run, work, task) for task in islice(left, 2 * threads - len(pending))
                ]
                if not pending:
                    return
                done = set(pending[:1]) if ordered else wait(pending, return_when=FIRST_COMPLETED).done
                pending = [future for future in pending if future not in done]
                yield from (future.result() for future in done)
        finally:
            pool.shutdown(cancel_futures=True)


# A thread that comes back from a decoder waits for the GIL until its owner's switch interval is over: 5 ms by
# default, in which ten JPEGs of 400x533 could be decoded. Measured on two cores, with two threads that decode such
# JPEGs and a main thread in pure Python: 155 images/s at 5 ms, 500 at 1 ms, 920 at 0.1 ms, and the main thread lost
# nothing by it. `sys.setswitchinterval` is one setting for the whole process: it is lowered while anybody asks for
# it, and restored afterwards unless somebody else changed it meanwhile.
SWITCH_INTERVAL_S = 1e-4

_lock = threading.Lock()
_users = 0
_before_s = 0.0


class ShortSwitchInterval:
    """Keeps the switch interval at `SWITCH_INTERVAL_S` or below until `end`; several may be active at once."""

    def __init__(self) -> None:
        global _users, _before_s
        self._ended = False
        with _lock:
            _users += 1
            if _users == 1:
                _before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(_before_s, SWITCH_INTERVAL_S))

    def end(self) -> None:
        """Restores the interval once no other instance is active. Calling it again does nothing."""
        global _users
        with _lock:
            if self._ended:
                return
            self._ended = True
            _users -= 1
            # CPython keeps whole microseconds.
            is_ours = abs(sys.getswitchinterval() - min(_before_s, SWITCH_INTERVAL_S)) < 2e-6
            if not _users and is_ours:
                sys.setswitchinterval(_before_s)


def run_as_batch() -> None:
    """Lets the calling thread, and those that it starts, not interrupt others when they wake, as on Linux.

    A thread that works ahead can wait until a core is idle. Else the kernel lets it have the core of the training loop,
    which woke it, for some milliseconds, whether or not another one is idle. Measured on two cores, with steps of 10 ms
    on a device: the loop waited 1.0 to 1.3 ms for a batch that lay ready, and 0.4 ms with this.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_OTHER:  # else the user chose
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextmanager
def forked_workers() -> Iterator[None]:
    """Within, packing processes are forks of this one, so that none imports a module: for programs of our own."""
    token = _forking.set(sys.platform == "linux")
    try:
        yield
    finally:
        _forking.reset(token)


def may_fork() -> bool:
    """Whether this is within `forked_workers`, and this process has no other thread, whose locks a fork would keep."""
    return _forking.get() and threading.active_count() == 1


def end_with(pipe: int) -> None:
    """Ends this process at once when the other end of a pipe is closed: with who holds that, however that one ends.

    Nothing is ever written into the pipe, and no other process has this end of it open. On Linux the kernel kills this
    process, also while it is stopped or hangs. Elsewhere a thread ends it, which a stopped process does not run.
    """
    closed = select.poll()
    closed.register(pipe, select.POLLIN)
    try:
        if not sys.platform.startswith("linux"):
            raise OSError("only Linux lets a process choose the signal")
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:

        def until_closed() -> None:
            closed.poll()
            os._exit(1)

        threading.Thread(target=until_closed, name="fastload-parent", daemon=True).start()
        return
    if closed.poll(0):  # it was closed already
        os._exit(1)
