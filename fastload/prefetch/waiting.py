"""The wait of a loop for its next batch: an error after the loader's timeout, else a warning when it takes a minute.

Both say which sample is being made, and what the thread or process that makes it is doing: a signal makes a worker
process's `faulthandler` write its Python stack to a file that both have, also while a call in C holds the GIL. No torch
here.
"""

from __future__ import annotations

import faulthandler
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from fastload.errors import OptionError, WorkerTimeoutError
from fastload.prefetch.shared_memory import SharedMemory

WARN_AFTER_S = 60.0
"""Seconds of a wait without a timeout after which a warning names the awaited sample; then twice as many."""

_LONGEST_S = 3600.0
# For the name of a sample, which is read from the file: its disk may be the cause of the wait.
_NAME_S = 0.3
_MOST_ROWS = 8

# No program uses these; by default Linux ends a process for one (so only a worker that answers is asked), macOS ignores
# it.
_SIGNAL: int | None = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else getattr(signal, "SIGINFO", None)
_ANSWER_S, _LOOK_S = 0.5, 0.02

_STATES = {
    psutil.STATUS_STOPPED: "It is stopped (by SIGSTOP or a debugger): `kill -CONT {pid}` lets it go on.",
    psutil.STATUS_TRACING_STOP: "It is stopped by a debugger.",
    psutil.STATUS_DISK_SLEEP: "It waits for a disk or a network file system, and takes no signals.",
}

_BELOW = "/torch/utils/data/_utils/"  # files of the functions that ask a worker for samples

_answering: list[WorkerStacks] = []  # in a worker: keeps the file open


def check_timeout(timeout: object) -> float:
    """Returns the `timeout` of a loader in seconds. Raises OptionError if it is no number of seconds, 0 or more."""
    number = isinstance(timeout, (int, float, np.integer, np.floating)) and not isinstance(timeout, bool)
    if not number or not 0 <= float(timeout) < math.inf:  # type: ignore[arg-type]  # it is a number
        raise OptionError(
            f"timeout={timeout!r}: give the seconds that a batch may be waited for, as a number of 0 or more; 0 waits "
            f"as long as it takes"
        )
    return float(timeout)  # type: ignore[arg-type]  # it is a number


class Patience:
    """The limit for which a loop waits for a batch; one per stream. Used by the thread that waits.

    Args:
        timeout_s: seconds; 0: for ever.
        name_of: returns what messages call a row's sample; may take for ever.
    """

    def __init__(self, timeout_s: float = 0.0, name_of: Callable[[int], str] = "row {}".format) -> None:
        self.timeout_s = timeout_s
        self._name_of = name_of
        self._warn_after_s = WARN_AFTER_S
        self._begun_s = 0.0
        self._warned = False  # in this wait

    def begin(self) -> None:
        """Begins a wait."""
        self._begun_s, self._warned = time.monotonic(), False

    def left(self, describe: Callable[[], str]) -> float:
        """Returns for how many seconds to wait before this is called again.

        Raises WorkerTimeoutError, or warns, when the time is over. `describe` returns sentences on the awaited batch.
        It is not kept, since it may refer to who keeps this.
        """
        waited_s = time.monotonic() - self._begun_s
        limit_s = self.timeout_s or (math.inf if self._warned else self._warn_after_s)
        if waited_s < limit_s:
            return min(limit_s - waited_s, _LONGEST_S)
        if self.timeout_s:
            raise WorkerTimeoutError(
                f"no batch came within timeout={self.timeout_s:g} s. {describe()}\n\nIf a batch may take that "
                f"long (the first one waits for the workers' start, too), give a longer one: "
                f"FastLoader(workers=Workers(timeout=...))."
            )
        self._warned = True
        self._warn_after_s *= 2  # a loop that is that slow hears of it once, and one that hangs later does, too
        warnings.warn(
            f"no batch has come for {waited_s:.0f} s, and the loop waits on. {describe()}\n\n"
            "FastLoader(workers=Workers(timeout=...)) raises an error instead.",
            stacklevel=2,
        )
        return _LONGEST_S

    def get(self, done_one: queue.SimpleQueue[None], describe: Callable[[], str]) -> None:
        """Waits until there is something in a queue, or until it is time to look again."""
        with suppress(queue.Empty):
            done_one.get(timeout=self.left(describe))

    def named(self, row: int) -> str:
        """Returns what messages call a row's sample, or its number alone if that cannot be read at once."""
        found: queue.SimpleQueue[str] = queue.SimpleQueue()
        name_of = self._name_of
        threading.Thread(target=lambda: found.put(name_of(row)), name="fastload-name", daemon=True).start()
        try:
            return found.get(timeout=_NAME_S)
        except queue.Empty:
            return f"row {row}"


def rows_in_words(rows: NDArray[np.int64]) -> str:
    """Returns the first of some rows, and how many they are."""
    first = ", ".join(map(str, rows[:_MOST_ROWS].tolist()))
    return f"{len(rows):,} rows: {first}{', ...' if len(rows) > _MOST_ROWS else ''}"


def doing(ident: int) -> str:
    """Returns what a thread is doing right now: its Python stack, the most recent call last; "" if it has ended."""
    frame, names = sys._current_frames().get(ident), {thread.ident: thread.name for thread in threading.enumerate()}
    if frame is None or ident not in names:
        return ""
    return f"Thread {names[ident]} (most recent call last):\n{''.join(traceback.format_stack(frame)).rstrip()}"


class WorkerStacks:
    """The file that workers write their stacks to. It can be pickled only into a process that is being started."""

    def __init__(self) -> None:
        self._file = SharedMemory()

    def answer(self) -> None:
        """Lets this process write the stack of its main thread whenever it is asked to."""
        if _SIGNAL is not None:
            faulthandler.register(_SIGNAL, self._file.fileno(), all_threads=False)
            _answering.append(self)

    def answered_by(self, pid: int) -> bool:
        """Whether a worker has come to where it answers."""
        return _SIGNAL is not None and _handles(pid, _SIGNAL)

    def of(self, pid: int) -> str:
        """Returns a worker's stack, down to where its sample is asked for; empty if it does not answer at once."""
        if _SIGNAL is None or not self.answered_by(pid):
            return ""
        fd, end = self._file.fileno(), time.monotonic() + _ANSWER_S
        before = size = os.fstat(fd).st_size
        try:
            os.kill(pid, _SIGNAL)
        except ProcessLookupError:  # it has just ended
            return ""
        while time.monotonic() < end:
            time.sleep(_LOOK_S)
            size, last = os.fstat(fd).st_size, size
            if before < size == last:  # written line by line, and the end is not marked
                break
        lines = os.pread(fd, size - before, before).decode(errors="backslashreplace").splitlines()
        own = takewhile(lambda line: _BELOW not in line, lines)
        return "\n".join(own).strip()

    def close(self) -> None:
        """Lets go of the file."""
        self._file.close()


def state_of(pid: int) -> str:
    """Returns a sentence on why a process does not run; empty if it runs, or sleeps as any process does."""
    try:
        return _STATES.get(psutil.Process(pid).status(), "").format(pid=pid)
    except psutil.NoSuchProcess:
        return "It has ended."
    except psutil.Error:
        return ""


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, and so cannot end by itself."""
    return state_of(pid).startswith("It is stopped")


def _handles(pid: int, number: int) -> bool:
    """Whether a process handles a signal."""
    try:
        caught = next(
            line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")
        )
    except (OSError, StopIteration):
        return not Path("/proc/self").exists()  # macOS
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
