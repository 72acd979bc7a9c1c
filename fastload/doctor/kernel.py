"""Where the kernel says that threads wait: looked up from outside, so nothing of Python is in the way."""

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

from fastload.doctor.records import Fetch

_LOOK_EVERY_S = 0.03
_MOST = 400_000
_LOCKS = (b"futex", b"lock_inode_wait")  # of threads and processes; of files
# What a thread does that is at work although it sleeps: waits for a disk, a network, a clock.
_AT_WORK = (b"nanosleep", b"io_schedule", b"folio", b"wait_data", b"nfs", b"fuse", b"filemap")


Wait = Literal["lock", "gil", "other"]

_LEAST = 10  # looks that say anything


@dataclass(frozen=True)
class WaitShares:
    """Parts of a time, 0 to 1, that a thread waited for a lock that another process holds, or for the GIL."""

    lock: float = 0.0
    gil: float = 0.0


class KernelLooks:
    """Looks, again and again, in what kernel function the fetching threads of some processes wait. A thread of its own.

    Only the first thread of a process is looked at: in a worker process that is the one that makes batches. `close`
    ends it; what it saw stays.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[list[float], list[Wait]]] = defaultdict(lambda: ([], []))  # times; for what
        self._files: dict[int, int] = {}
        self._count = 0
        self._every_s = _LOOK_EVERY_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastload-kernel", daemon=True)
        self._thread.start()

    def watch(self, pids: Iterable[int]) -> None:
        """Looks at these processes too, as long as they live and the system lets us."""
        for pid in pids:
            if pid not in self._files:
                try:
                    self._files[pid] = os.open(f"/proc/{pid}/wchan", os.O_RDONLY | os.O_CLOEXEC)
                except OSError:
                    self._files[pid] = -1

    def close(self) -> None:
        """Ends the looking."""
        self._stop.set()
        self._thread.join()
        for number in self._files.values():
            if number >= 0:
                os.close(number)
        self._files.clear()

    def shares(self, fetches: Iterable[Fetch]) -> WaitShares:
        """Of the looks in which a fetching thread waited for anything, the parts in which it waited for what.

        Zeros also where the system does not tell, or too few looks fell into a fetch.
        """
        waits: Counter[Wait] = Counter()
        for fetch in fetches:
            times, seen = self._seen.get(fetch.pid, ((), ()))
            first = bisect.bisect_left(times, fetch.begin_s)
            last = bisect.bisect_right(times, fetch.begin_s + fetch.wall_s)
            waits.update(seen[first:last])
        count = waits.total()
        return WaitShares(waits["lock"] / count, waits["gil"] / count) if count >= _LEAST else WaitShares()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            for pid, number in list(self._files.items()):
                if number < 0:
                    continue
                try:
                    where = os.pread(number, 64, 0)
                except OSError:
                    os.close(number)
                    self._files[pid] = -1
                    continue
                if where in (b"0", b""):
                    continue  # it runs, or the system does not tell
                times, seen = self._seen[pid]
                times.append(time.perf_counter())
                seen.append(_others(pid) if any(kind in where for kind in _LOCKS) else "other")
                self._count += 1
            if self._count > _MOST:
                self._every_s *= 2
                self._count //= 2


def _others(pid: int) -> Wait:
    """What the first thread of a process waits for, which stands at a lock: by what the other threads do.

    One that waits for a thread of its own process waits for what that one does: with the GIL, or for something outside
    the process.
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
            if any(kind in where for kind in _AT_WORK):
                return "other"
    except OSError:
        return "other"  # it has ended
    return "lock"
