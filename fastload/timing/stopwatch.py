"""Splits a thread's time into stages, and each into running on a CPU and being blocked. No torch here.

Nothing here releases the GIL: a thread that does, if only for a microsecond, may wait 5 ms to get it back from a main
thread that runs Python (see `fastload.system.syscalls`), so that measuring would change what is measured.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import platform
import statistics
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from fastload.timing.results import NETWORK, BatchWork, WorkTime

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_LINUX = platform.system() == "Linux"
_SHORT_S = 20e-6  # off the CPU for less, a lap is not looked into
_SLOW = 3.0  # a sample that takes so many times the usual is a slow one


def run_delay_reader() -> Callable[[], float]:
    """Returns a function that returns the seconds for which the calling thread has waited for a CPU so far.

    For this thread only. Always 0 where the system does not say; Linux does, in /proc/thread-self/schedstat.
    """
    return _ProcFile("/proc/thread-self/schedstat").delay_s


class Stopwatch:
    """Measures the stages of the batch that the calling thread makes. Each thread has its own; `current` finds it.

    A thread that is off the CPU and does not wait for one is blocked. If this process read files meanwhile, blocked
    time counts as reading: pages of a mapped file are read wherever they are first touched, and a user's dataset may
    read anywhere. (Not in the stage "transform", if another stage is known to read, and waits for the network stay what
    they are.) If it did not read, and workers are threads, blocked time is waiting for a lock of another thread, first
    of all the GIL.

    Args:
        rest: the stage that gets the time behind the last lap.
        by_threads: whether the work is done by threads of one process.
    """

    def __init__(self, rest: str, *, by_threads: bool) -> None:
        self._rest = rest
        self._by_threads = by_threads
        self._delays = _ProcFile("/proc/thread-self/schedstat")
        self._counters = _ProcFile("/proc/self/io")
        self._faults = getattr(resource, "RUSAGE_THREAD", None)
        self._was_read = self._read_so_far()
        self.begin()

    def start(self) -> Stopwatch:
        """Makes this the calling thread's `current` stopwatch, as long as the thread lives."""
        _local.stopwatch = self
        return self

    def begin(self) -> None:
        self._running: dict[str, float] = defaultdict(float)
        self._blocked: dict[str, float] = defaultdict(float)
        self._lock_s = 0.0
        self._samples: list[float] = []
        if not self._by_threads:  # receiving the request for the batch was a read, too
            self._was_read = self._read_so_far()
        self._begun_waited_s = self._waited_s = self._delays.delay_s()
        self._spent_s = self._sample_s = 0.0
        self._wall_s = time.perf_counter()
        self._thread_s = time.thread_time()

    def lap(self, stage: str, *, for_lock: bool = False, decoding_s: float = 0.0) -> None:
        """Adds the time since the last lap to a stage; `for_lock`: its blocked part is waiting for a lock.

        `decoding_s`: how much of the time it ran was decoding, which is a stage of its own.
        """
        wall_s, thread_s = time.perf_counter(), time.thread_time()
        ran_s = thread_s - self._thread_s
        off_s = wall_s - self._wall_s - ran_s
        self._wall_s, self._thread_s = wall_s, thread_s
        decoding_s = min(decoding_s, ran_s)
        self._running[stage] += ran_s - decoding_s
        if decoding_s:
            self._running["decoding"] += decoding_s
        self._spent_s += ran_s
        if off_s > _SHORT_S:
            before_s, self._waited_s = self._waited_s, self._delays.delay_s()
            blocked_s = max(0.0, off_s - (self._waited_s - before_s))
            self._spent_s += blocked_s
            if for_lock:
                self._lock_s += blocked_s
            else:
                self._blocked[stage] += blocked_s

    def sample_begins(self) -> None:
        """Begins a sample at the last lap."""
        self._sample_s = self._spent_s

    def sample(self) -> None:
        """Ends a sample at the last lap."""
        self._samples.append(self._spent_s - self._sample_s)
        self._sample_s = self._spent_s

    def end(self) -> BatchWork:
        """Ends the batch and returns its cost."""
        self.lap(self._rest)
        running, blocked, lock_s = self._running, self._blocked, self._lock_s
        # Threads also count what was read between batches: read-ahead works while they wait for the next one.
        was_read, self._was_read = self._was_read, self._read_so_far()
        if was_read != self._was_read:
            kept = {"reading", NETWORK}
            if not self._by_threads and {"reading", "decoding"} & set(running):
                kept.add("transform")
            blocked["reading"] += sum(blocked.pop(stage) for stage in set(blocked) - kept)
        elif self._by_threads:
            lock_s += sum(seconds for stage, seconds in blocked.items() if stage != NETWORK)
        if self._lock_s:
            blocked["reading"] += self._lock_s
        stages = {name: WorkTime(running[name], blocked[name]) for name in {**running, **blocked}}
        runnable_s = max(0.0, self._delays.delay_s() - self._begun_waited_s)
        return BatchWork(stages, lock_s, beyond_usual_s(self._samples), runnable_s)

    def _read_so_far(self) -> tuple[int, ...]:
        """Returns numbers that change when this process reads files, or this thread waits for pages of one."""
        faults = resource.getrusage(self._faults).ru_majflt if self._faults is not None else 0
        content = self._counters.read()
        if not content:
            return (faults,)
        fields = content.split()
        from_disk = int(fields[9])
        if self._by_threads:  # reads of other threads say nothing about this one
            return faults, from_disk
        own = self._counters.num_bytes + self._delays.num_bytes
        return faults, from_disk, int(fields[1]) - own + len(content)


class _ProcFile:
    """A file of /proc that is read again and again without releasing the GIL."""

    def __init__(self, path: str) -> None:
        self.num_bytes = 0  # read so far; the system counts them among those that this process reads
        self._fd = -1
        with suppress(OSError):  # only Linux has them
            self._fd = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._fd)
            self._buffer = ctypes.create_string_buffer(512)
            self._pread = ctypes.PyDLL(None).pread  # PyDLL keeps the GIL
            self._pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
            self._pread.restype = ctypes.c_ssize_t

    def read(self) -> bytes:
        """Returns its present content, at most 512 bytes; nothing where there is no such file, or it is refused."""
        count = max(0, self._pread(self._fd, self._buffer, 512, 0)) if self._fd >= 0 else 0
        self.num_bytes += count
        content: bytes = self._buffer[:count] if count else b""  # type: ignore[assignment]  # typeshed says a list
        return content

    def delay_s(self) -> float:
        """Returns the seconds that a thread waited for a CPU, out of its schedstat; 0 if that is not there."""
        content = self.read()
        return int(content.split()[1]) / 1e9 if content else 0.0


_local = threading.local()


def current() -> Stopwatch | None:
    """Returns the stopwatch of this thread, if any."""
    return getattr(_local, "stopwatch", None)


def lap(stage: str, *, for_lock: bool = False, decoding_s: float = 0.0) -> None:
    """Ends a lap of this thread's stopwatch, if it has one."""
    if (stopwatch := current()) is not None:
        stopwatch.lap(stage, for_lock=for_lock, decoding_s=decoding_s)


def beyond_usual_s(samples_s: Sequence[float]) -> float:
    """Returns the seconds that a batch's slow samples took beyond the median; 0 for fewer than three samples."""
    usual_s = statistics.median(samples_s) if len(samples_s) >= 3 else math.inf
    return sum(taken_s - usual_s for taken_s in samples_s if taken_s > _SLOW * usual_s)


def process_cpu_s(pid: int) -> float | None:
    """Returns the seconds that all threads of a process ran on a CPU; None when the process is gone."""
    if _LINUX:
        try:
            # The clock of a process by its number, as clock_getcpuclockid(3) makes it: nanoseconds, where
            # /proc/PID/stat counts hundredths of a second.
            return time.clock_gettime((~pid << 3) | 2)
        except OSError:
            return None
    import psutil  # not where only a lap is taken: `fastload info` starts without it

    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


_TORCHVISION = ("decode_image", "decode_jpeg", "decode_png", "read_image")
_DECODERS = {
    "simplejpeg": ("decode_jpeg",),
    "cv2": ("imdecode", "imread"),
    "torchvision.io": _TORCHVISION,
    "torchvision.io.image": _TORCHVISION,
}


def watch_decoders() -> None:
    """Wraps the decoders of Pillow, and of other packages imported so far, so that each call is a lap of the stopwatch.

    It times the decoding within a user's dataset, in a worker process that is measured. A function that a module
    imported by name before is not wrapped; what it decodes counts as transform.
    """
    from PIL import ImageFile

    found = [(sys.modules.get(module), name) for module, names in _DECODERS.items() for name in names]
    for owner, name in [(ImageFile.ImageFile, "load"), *found]:
        decode = getattr(owner, name, None)
        if decode is not None and not hasattr(decode, "_fastload_lap"):
            setattr(owner, name, _timed(decode))


def _timed(decode: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(decode)
    def timed(*words: Any, **options: Any) -> Any:
        stopwatch = current()
        # An image of Pillow's that is decoded has no tiles left; to load it again is no work.
        if stopwatch is None or (words and not getattr(words[0], "tile", True)):
            return decode(*words, **options)
        stopwatch.lap("reading")
        try:
            return decode(*words, **options)
        finally:
            stopwatch.lap("decoding")

    timed._fastload_lap = True  # type: ignore[attr-defined]
    return timed
