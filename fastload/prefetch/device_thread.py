"""A thread that brings batches to the device ahead of the loop: the loop only takes what is there.

    filled slots, in order --this thread: side stream--> [copied][copied] --next()--> the loop

After a step the training thread finds nothing of this in its core's caches, and would take most of a millisecond for
what takes a tenth of one here.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

from fastload.prefetch.waiting import Patience
from fastload.prefetch.work import Work

_CLOSE_S = 10.0

_living: weakref.WeakSet[DeviceThread] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """Ends all threads: a daemon thread that the interpreter ends within a call of torch aborts the process."""
    for thread in list(_living):
        thread.stop()


class DeviceThread:
    """Calls a function for work after work, up to some ahead of those that were taken.

    Args:
        make: returns the function, or None if its owner is gone; the function returns a work, None at the end. So the
            thread does not keep the owner alive while it waits.
        end_waits: lets a call that waits return, and all that come.
        ahead: most works that were made and not taken.
    """

    def __init__(
        self, make: Callable[[], Callable[[], Work | None] | None], end_waits: Callable[[], None], ahead: int
    ) -> None:
        self._end_waits, self._pid = end_waits, os.getpid()
        self._made: queue.SimpleQueue[Work | BaseException | None] = queue.SimpleQueue()
        self._room, self._stopping = threading.Semaphore(ahead), threading.Event()
        arguments = (make, self._made, self._room, self._stopping)
        self._thread = threading.Thread(target=_work, args=arguments, name="fastload-device", daemon=True)
        self._thread.start()
        _living.add(self)

    def take(self, patience: Patience, describe: Callable[[], str]) -> Work | None:
        """Waits for the next work and takes it; None: there are no more. Raises what came instead.

        Raises WorkerTimeoutError when that takes too long.
        """
        patience.begin()
        while True:
            with suppress(queue.Empty):
                found = self._made.get(timeout=patience.left(describe))
                break
        self._room.release()
        if not isinstance(found, BaseException):
            return found
        try:
            raise found
        finally:
            del found  # else the error would keep this frame, and the frame the error

    def ready(self) -> int:
        """Returns how many works can be taken without waiting."""
        return self._made.qsize()

    def stop(self) -> bool:
        """Ends the thread, and returns whether it ended: not if it hangs, or is the caller."""
        if self._pid != os.getpid():  # a forked process has no such thread, which may have held a lock
            return True
        self._stopping.set()
        self._end_waits()
        self._room.release()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)
        return not self._thread.is_alive()


def _work(
    make: Callable[[], Callable[[], Work | None] | None],
    made: queue.SimpleQueue[Work | BaseException | None],
    room: threading.Semaphore,
    stopping: threading.Event,
) -> None:
    """Makes works until there are no more; the body of the thread."""
    while True:
        room.acquire()
        function = make()
        if stopping.is_set() or function is None:
            return
        try:
            work = function()
        except BaseException as error:  # noqa: BLE001  # whatever it is, the training loop has to hear of it
            made.put(error)
            return
        made.put(work)
        if work is None:
            return
        del work, function
