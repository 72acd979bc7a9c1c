"""Samples what threads wait for, as the kernel reports it (`/proc/PID/wchan`), without slowing the processes down."""

from __future__ import annotations

import bisect
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastload.profiling.doctor.injected.code_lines import OUTWARD
from fastload.profiling.doctor.loader_records import Fetch

_SAMPLE_EVERY_S = 0.03
_MOST_SAMPLES = 400_000
_LEAST_SAMPLES = 10  # fewer say nothing
# Kernel functions in which a thread waits for a lock: between threads and processes; on a file.
_LOCKS = (b"futex", b"lock_inode_wait")
# Kernel functions in which a thread waits for a disk.
_DISKS = (b"io_schedule", b"folio", b"nfs", b"fuse", b"filemap")

Wait = Literal["lock", "gil", "outward", "other"]


@dataclass(frozen=True)
class WaitShares:
    """Shares of a waiting time, 0 to 1: for a lock that another process holds, for the GIL, asleep or for a socket."""

    lock: float = 0.0
    gil: float = 0.0
    outward: float = 0.0


class WaitSampler:
    """Samples, in a thread, the kernel function in which the first thread of some processes waits.

    In a worker process the first thread makes the batches. `close` ends the sampling; the samples are kept.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[list[float], list[Wait]]] = defaultdict(lambda: ([], []))  # times; for what
        self.pids: list[int] = []  # sampled as long as they live and the system allows it
        self._count = 0
        self._every_s = _SAMPLE_EVERY_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastload-kernel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def shares(self, fetches: Iterable[Fetch]) -> WaitShares:
        """Returns how the waits of fetching threads divide into kinds; zeros where the system reports (too) few."""
        waits: Counter[Wait] = Counter()
        for fetch in fetches:
            times, seen = self._seen.get(fetch.pid, ((), ()))
            first = bisect.bisect_left(times, fetch.begin_s)
            last = bisect.bisect_right(times, fetch.begin_s + fetch.wall_s)
            waits.update(seen[first:last])
        count = waits.total()
        if count < _LEAST_SAMPLES:
            return WaitShares()
        return WaitShares(waits["lock"] / count, waits["gil"] / count, waits["outward"] / count)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            for pid in self.pids:
                try:
                    where = Path(f"/proc/{pid}/wchan").read_bytes()
                except OSError:
                    continue
                if where in (b"0", b""):
                    continue  # it runs, or the system does not say
                times, seen = self._seen[pid]
                times.append(time.perf_counter())
                seen.append(_behind_lock(pid) if any(kind in where for kind in _LOCKS) else _outside(where) or "other")
                self._count += 1
            if self._count > _MOST_SAMPLES:
                self._every_s *= 2
                self._count //= 2


def _outside(where: bytes) -> Wait | None:
    """Returns the kind of a wait for something outside the process; None: it is no such wait."""
    if any(kind in where for kind in OUTWARD):
        return "outward"
    return "other" if any(kind in where for kind in _DISKS) else None


def _behind_lock(pid: int) -> Wait:
    """Returns what a process whose first thread waits at a lock is waiting for, judged by its other threads.

    If another thread of the process runs, it holds the GIL; if it waits for something outside the process, so does the
    first thread; otherwise another process holds the lock.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        for thread in threads[:64]:
            if int(thread) == pid:
                continue
            stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
            state = stat.rpartition(")")[2].split()[0]
            if state in "RD":
                return "gil" if state == "R" else "other"
            where = Path(f"/proc/{pid}/task/{thread}/wchan").read_bytes()
            if (outside := _outside(where)) is not None:
                return outside
    except OSError:
        return "other"  # it has ended
    return "lock"
