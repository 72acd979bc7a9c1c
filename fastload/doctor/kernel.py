"""Where the kernel says that threads wait: looked up from outside, so nothing of Python is in the way."""

from __future__ import annotations

import bisect
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from fastload.doctor.records import Fetch

_LOOK_EVERY_S = 0.01
_MOST = 400_000
_LOCKS = (b"futex", b"lock_inode_wait")  # of threads and processes; of files
# What a thread does that is at work although it sleeps: waits for a disk, a network, a clock.
_AT_WORK = (b"nanosleep", b"io_schedule", b"folio", b"wait_data", b"nfs", b"fuse", b"filemap")


class KernelLooks:
    """Looks, again and again, in what kernel function the fetching threads of some processes wait. A thread of its own.

    Only the first thread of a process is looked at: in a worker process that is the one that makes batches. `close`
    ends it; what it saw stays.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[list[float], list[bool]]] = defaultdict(lambda: ([], []))  # times; in a lock?
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

    def lock_share(self, fetches: Iterable[Fetch]) -> float:
        """Of the looks in which a fetching thread waited for anything, the part in which it waited for a lock; 0 to 1.

        0.0 also where the system does not tell, or too few looks fell into a fetch.
        """
        waiting = locked = 0
        for fetch in fetches:
            times, in_lock = self._seen.get(fetch.pid, ((), ()))
            first = bisect.bisect_left(times, fetch.begin_s)
            last = bisect.bisect_right(times, fetch.begin_s + fetch.wall_s)
            waiting += last - first
            locked += sum(in_lock[first:last])
        return locked / waiting if waiting >= 10 else 0.0

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
                times, in_lock = self._seen[pid]
                times.append(time.perf_counter())
                # A thread that waits for another one of its own process waits for what that one does.
                in_lock.append(any(kind in where for kind in _LOCKS) and not _another_works(pid))
                self._count += 1
            if self._count > _MOST:
                self._every_s *= 2
                self._count //= 2


def _another_works(pid: int) -> bool:
    """Whether any thread but the first is on a CPU, wants one, or waits for something outside the process."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        for thread in threads[:64]:
            if int(thread) == pid:
                continue
            stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
            if stat.rpartition(")")[2].split()[0] in "RD":
                return True
            where = Path(f"/proc/{pid}/task/{thread}/wchan").read_bytes()
            if any(kind in where for kind in _AT_WORK):
                return True
    except OSError:
        return False  # it has ended
    return False
