"""What a thread's time went into: running on a CPU, wanting one, or blocked by something else. No torch here.

Nothing here gives up the GIL: a thread that does, if only for a microsecond, may wait 5 ms to get it back beside a main
thread that runs Python (see `fastload.read.held`), and what is measured would not be what happens unmeasured.
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import psutil

from fastload.measured import Work
from fastload.verdict import BatchWork

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_LINUX = platform.system() == "Linux"
_SHORT_S = 20e-6  # off the CPU for less, a lap is not looked into
_SLOW = 3.0  # a sample that takes so many times the usual is a slow one


def run_delay_reader() -> Callable[[], float]:
    """A function for the calling thread alone: seconds that it had no CPU although it wanted one, since it began.

    Always 0 where the system does not say; Linux does, in /proc/thread-self/schedstat.
    """
    file = _ProcFile.open("/proc/thread-self/schedstat")
    return (lambda: 0.0) if file is None else lambda: int(file.read().split()[1]) / 1e9


class Stopwatch:
    """Splits what the calling thread does to a batch into stages. Each thread has its own; `current` finds it.

    A thread that is off the CPU without wanting it is blocked. Where this process has read anything meanwhile, that is
    reading, unless a stage of its own read and this is another: pages of a mapped file come in wherever they are looked
    at, and a dataset that nobody looks into may read anywhere. Where it has not, and workers are threads, one that is
    blocked waits for a lock that another holds, first of all the GIL.

    Args:
        rest: the stage of whatever no lap claims.
        by_threads: whether the work is done by threads of one process.
    """

    def __init__(self, rest: str, *, by_threads: bool) -> None:
        self._rest = rest
        self._by_threads = by_threads
        self._delays = _ProcFile.open("/proc/thread-self/schedstat")
        self._counters = _ProcFile.open("/proc/self/io")
        self._faults = getattr(resource, "RUSAGE_THREAD", None)
        self._was_read = self._read_so_far()
        self.begin()

    def start(self) -> Stopwatch:
        """Makes it the calling thread's `current` one, as long as the thread lives."""
        _local.stopwatch = self
        return self

    def begin(self) -> None:
        """A batch begins."""
        self._running: dict[str, float] = {}
        self._blocked: dict[str, float] = {}
        self._lock_s = 0.0
        self._samples: list[float] = []
        if not self._by_threads:  # the order itself was read, too
            self._was_read = self._read_so_far()
        self._begun_waited_s = self._waited_s = self._delay_s()
        self._spent_s = self._sample_s = 0.0
        self._wall_s = time.perf_counter()
        self._thread_s = time.thread_time()

    def lap(self, stage: str) -> None:
        """What was done since the last lap is of this stage."""
        wall_s, thread_s = time.perf_counter(), time.thread_time()
        ran_s = thread_s - self._thread_s
        off_s = wall_s - self._wall_s - ran_s
        self._wall_s, self._thread_s = wall_s, thread_s
        self._running[stage] = self._running.get(stage, 0.0) + ran_s
        self._spent_s += ran_s
        if off_s > _SHORT_S:
            waited_s = self._delay_s()
            blocked_s = max(0.0, off_s - (waited_s - self._waited_s))
            self._waited_s = waited_s
            self._blocked[stage] = self._blocked.get(stage, 0.0) + blocked_s
            self._spent_s += blocked_s

    def lap_for_lock(self, stage: str) -> None:
        """What was done since the last lap was to wait for a lock."""
        before_s = self._blocked.get(stage, 0.0)
        self.lap(stage)
        self._lock_s += self._blocked.get(stage, 0.0) - before_s
        self._blocked[stage] = before_s

    def sample_begins(self) -> None:
        """What came before the last lap is no part of a sample."""
        self._sample_s = self._spent_s

    def sample(self) -> None:
        """With the last lap, a sample was done."""
        self._samples.append(self._spent_s - self._sample_s)
        self._sample_s = self._spent_s

    def end(self) -> BatchWork:
        """What the batch cost."""
        self.lap(self._rest)
        blocked, lock_s = self._blocked, self._lock_s
        # Of threads between batches too: what is announced is read while they wait for the next order.
        was_read, self._was_read = self._was_read, self._read_so_far()
        if was_read != self._was_read:
            apart = set() if self._by_threads or not {"reading", "decoding"} & set(self._running) else {"transform"}
            elsewhere = [stage for stage in blocked if stage not in {"reading", *apart}]
            blocked["reading"] = blocked.get("reading", 0.0) + sum(map(blocked.pop, elsewhere))
        elif self._by_threads:
            lock_s += sum(blocked.values())
        if self._lock_s:
            blocked["reading"] = blocked.get("reading", 0.0) + self._lock_s
        names = {**self._running, **blocked}
        stages = {name: Work(self._running.get(name, 0.0), blocked.get(name, 0.0)) for name in names}
        runnable_s = max(0.0, self._delay_s() - self._begun_waited_s)
        return BatchWork(stages, lock_s, beyond_usual_s(self._samples), runnable_s)

    def _delay_s(self) -> float:
        return int(self._delays.read().split()[1]) / 1e9 if self._delays is not None else 0.0

    def _read_so_far(self) -> tuple[int, ...]:
        """Something that changes when this process reads files, or this thread waits for pages of one."""
        faults = resource.getrusage(self._faults).ru_majflt if self._faults is not None else 0
        if self._counters is None:
            return (faults,)
        content = self._counters.read()
        fields = content.split()
        from_disk = int(fields[9])
        if self._by_threads:  # what other threads get by calls says nothing of this one
            return faults, from_disk
        own = self._counters.num_bytes + (self._delays.num_bytes if self._delays is not None else 0)
        return faults, from_disk, int(fields[1]) - own + len(content)


class _ProcFile:
    """A file of /proc, read from its beginning again and again without giving up the GIL.

    Attributes:
        num_bytes: read so far, which the system counts among what this process reads.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = ctypes.create_string_buffer(512)
        self._pread = _pread()
        self.num_bytes = 0
        weakref.finalize(self, os.close, fd)

    @classmethod
    def open(cls, path: str) -> _ProcFile | None:
        """The file; None where there is none."""
        try:
            file = cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) if _LINUX else None
        except OSError:
            return None
        return file if file is not None and file.read() else None  # some sandboxes open it and then refuse

    def read(self) -> bytes:
        """All of it."""
        count: int = self._pread(self._fd, self._buffer, 512, 0)
        if count <= 0:
            return b""
        self.num_bytes += count
        content: bytes = self._buffer[:count]  # type: ignore[assignment]  # of c_char, typeshed says a list
        return content


_local = threading.local()


def current() -> Stopwatch | None:
    """The stopwatch that runs in this thread, if any."""
    return getattr(_local, "stopwatch", None)


def lap(stage: str, *, for_lock: bool = False) -> None:
    """A lap of the stopwatch that runs in this thread, if any."""
    stopwatch = current()
    if stopwatch is not None:
        (stopwatch.lap_for_lock if for_lock else stopwatch.lap)(stage)


def beyond_usual_s(samples_s: Sequence[float]) -> float:
    """What the slow ones of a batch's samples took beyond the median; 0 of two, which tell nothing."""
    if len(samples_s) < 3:
        return 0.0
    usual_s = statistics.median(samples_s)
    return sum(taken_s - usual_s for taken_s in samples_s if taken_s > _SLOW * usual_s)


def part_of(work: BatchWork, parts: int) -> BatchWork:
    """The mean of so many equal parts."""
    stages = {name: Work(one.running_s / parts, one.blocked_s / parts) for name, one in work.stages.items()}
    return BatchWork(stages, work.lock_s / parts, work.slow_s / parts, work.runnable_s / parts)


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


@cache
def _pread() -> Any:
    pread = ctypes.PyDLL(None).pread
    pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
    pread.restype = ctypes.c_ssize_t
    return pread
