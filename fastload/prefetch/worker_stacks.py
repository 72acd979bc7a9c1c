"""What a worker process is doing, as the training process can find out: its state, and its Python stack. No torch here.

A signal makes the worker's `faulthandler` write the stack to a file that both have, also while a call in C holds the
GIL.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from itertools import takewhile
from pathlib import Path

import psutil

from fastload.prefetch.shared_memory import SharedMemory

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
