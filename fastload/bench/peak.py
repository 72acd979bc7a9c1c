"""The most memory that a process and its children held meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fastload.meter.family import family_of, process_memory


@contextmanager
def peak_memory(pid: int, period_s: float = 0.05) -> Iterator[list[int]]:
    """Samples the anonymous and shared memory of a process and all its children; yields [peak bytes so far]."""
    peak, stop = [0], threading.Event()

    def sample() -> None:
        while True:
            peak[0] = max(peak[0], sum(map(process_memory, family_of(pid))))
            if stop.wait(period_s):
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
