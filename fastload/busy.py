"""How long workers wanted a CPU: what tells one that computes from one that waits for a disk, a network or a lock.

No torch here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fastload.plan import PlannedBatch
from fastload.stopwatch import process_cpu_s, run_delay_reader
from fastload.threads import Fill


class BusyThreads:
    """Counts the seconds that the threads of a feed were on a CPU, or had none although they wanted one.

    Attributes:
        busy_s: so far, of batches that are done.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._lock = threading.Lock()
        self._local = threading.local()

    def counting(self, fill: Fill) -> Fill:
        """The same, counted; called by any thread."""

        def counted(planned: PlannedBatch, arrays: Mapping[str, NDArray[Any]]) -> int:
            delay_s = self._delay_reader()
            begun_s = time.thread_time() + delay_s()
            try:
                return fill(planned, arrays)
            finally:
                taken_s = time.thread_time() + delay_s() - begun_s
                with self._lock:
                    self.busy_s += taken_s

        return counted

    def _delay_reader(self) -> Callable[[], float]:
        reader: Callable[[], float] | None = getattr(self._local, "reader", None)
        if reader is None:
            reader = self._local.reader = run_delay_reader()
        return reader


def busy_processes_s(pids: Iterable[int]) -> float | None:
    """Seconds that processes were on a CPU or wanted one, since each began; None when one of them is gone."""
    total_s = 0.0
    for pid in pids:
        running_s = process_cpu_s(pid)
        if running_s is None:
            return None
        total_s += running_s + _runnable_s(pid)
    return total_s


def _runnable_s(pid: int) -> float:
    """Of the first thread, which makes the samples; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
