"""What a thread's time went into: on a CPU, wanting one, or waiting for something else. No torch here."""

from __future__ import annotations

import os
import platform
import time
import weakref
from collections.abc import Callable

import psutil

_LINUX = platform.system() == "Linux"
_SCHEDSTAT = "/proc/thread-self/schedstat"


def run_delay_reader() -> Callable[[], float]:
    """A function for the calling thread alone: seconds that it had no CPU although it wanted one, since it began.

    Always 0 where the system does not say (Linux does).
    """
    try:
        fd = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return lambda: 0.0

    def read(pread: Callable[[int, int, int], bytes] = os.pread) -> float:
        return int(pread(fd, 96, 0).split()[1]) / 1e9

    weakref.finalize(read, os.close, fd)
    return read


def process_cpu_s(pid: int) -> float | None:
    """Seconds that a process was on a CPU, all its threads; None when it is gone."""
    if _LINUX:
        try:
            # The clock of a process by its number, as clock_getcpuclockid(3) makes it: nanoseconds, where
            # /proc/PID/stat counts hundredths of a second.
            return time.clock_gettime((~pid << 3) | 2)
        except OSError:
            return None
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)
