"""Wraps functions to time their calls, by part of making a batch, in whichever thread they are made."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .code_lines import user_line
from .event_file import clock, events, identity

READING, DECODING, LOCK, H5, COLLATE, REST = "reading", "decoding", "lock", "h5py", "collate", "rest"
WAITING = "waiting"

cpu_clock = time.thread_time


class _Schedule:
    """The schedstat file of the calling thread, closed with it, unless the number belongs to another file by then."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.number = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self.identity = identity(self.number)

    def __del__(self, _close: Callable[[int], None] = os.close, _identity: Any = identity) -> None:
        with suppress(OSError, AttributeError):
            if _identity(self.number) == self.identity:
                _close(self.number)


_local = threading.local()


def waited_s() -> float:
    """Returns the seconds that this thread was ready to run and had no CPU; 0 where the system does not say."""
    try:
        schedule = getattr(_local, "schedule", None)
        if schedule is None or schedule.pid != os.getpid():
            schedule = _local.schedule = _Schedule()
        return int(os.pread(schedule.number, 96, 0).split()[1]) * 1e-9
    except (OSError, AttributeError, IndexError, ValueError):
        _local.schedule = None
        return 0.0


class Span:
    """Time of the calling thread from here on: on the clock, on a CPU, and ready to run without a CPU."""

    __slots__ = ("begin", "cpu_begin", "delay_begin")

    def __init__(self) -> None:
        self.begin, self.cpu_begin, self.delay_begin = clock(), cpu_clock(), waited_s()

    def taken(self) -> tuple[float, float, float]:
        """Returns the seconds of each so far."""
        return clock() - self.begin, cpu_clock() - self.cpu_begin, waited_s() - self.delay_begin


class OpenFetch:
    """One batch while it is made: [seconds, CPU seconds] by part, and the seconds of each sample.

    Of samples that were asked for at once, `at_once`: their number, and their seconds together. Of images that were
    decoded, `decoded`: their number, their heights and their widths together. `waits`: seconds by the user's line of
    code that slept or waited for a socket. Of one that is `whole` no calls are timed but waits.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self.whole, self.calls = whole, 0  # timed ones
        self.parts: dict[str, list[float]] = {}
        self.samples: list[float] = []
        self.at_once = (0, 0.0)
        self.decoded = [0, 0, 0]
        self.waits: dict[str, float] = {}
        self.first_wait: tuple[float, float] | None = None  # when it began, and its seconds

    @property
    def count(self) -> int:
        """Samples, if it is known."""
        return len(self.samples) or self.at_once[0]

    def add(self, part: str, wall: float, cpu: float) -> None:
        total = self.parts.setdefault(part, [0.0, 0.0])
        total[0] += wall
        total[1] += cpu
        self.calls += 1


class ProcessTotals(OpenFetch):
    """Times of all threads of this process outside a fetch of their own.

    Besides the parts of making a batch there are `into` and `out`, receiving and unpickling batches and pickling and
    sending them, and `inside h5py`: seconds in which at least one thread was, and thread-seconds beyond the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active = False  # whether a loader is at work in this process
        self.guard = threading.Lock()
        self._h5_in = 0
        self._h5_since = 0.0
        self.h5_threads: set[int] = set()  # that were in h5py
        self.handed_over = 0.0  # CPU seconds of part `out` when the last batch was made

    def reset(self) -> None:
        """Begins anew, in a forked process too: it has no loop, no threads and no locks of its parent."""
        vars(self).update(vars(ProcessTotals()))

    def add(self, part: str, wall: float, cpu: float) -> None:
        with self.guard:
            super().add(part, wall, cpu)

    def h5_move(self, step: int) -> None:
        """Notes that this thread goes into h5py (1), or comes out (-1)."""
        now = clock()
        with self.guard:
            if self._h5_in:
                since_s = now - self._h5_since
                super().add("inside h5py", since_s, since_s * (self._h5_in - 1))
            self._h5_since = now
            self._h5_in = max(0, self._h5_in + step)
            self.h5_threads.add(threading.get_ident())


class _Thread(threading.local):
    """State of one thread."""

    def __init__(self) -> None:
        self.stack: list[list[float]] = []  # [seconds, CPU seconds] of the calls inside each open call
        self.fetch: OpenFetch | None = None  # the batch that it makes
        self.asked: Any = None  # state of the loader whose batch it waits for
        self.current: Any = None  # state of the loader whose batch it works on
        self.making = 0  # id of the loader whose iterator it makes
        self.recorder: Any = None  # records the operations of the step that it is in


metering = ProcessTotals()
thread = _Thread()


def timed(call: Callable[..., Any], part: str) -> Callable[..., Any]:
    """Wraps a function to time its calls, without timed calls inside them, while a loader works in this process."""

    @functools.wraps(call)
    def timed_call(*args: Any, **kwargs: Any) -> Any:
        fetch = thread.fetch
        if not metering.active or (fetch is not None and fetch.whole and part != WAITING):
            return call(*args, **kwargs)
        inner = [0.0, 0.0]
        stack = thread.stack
        stack.append(inner)
        if part == H5:
            metering.h5_move(1)
        begin, cpu_begin = clock(), cpu_clock()
        try:
            return call(*args, **kwargs)
        finally:
            wall, cpu = clock() - begin, cpu_clock() - cpu_begin
            stack.pop()
            if stack:
                stack[-1][0] += wall
                stack[-1][1] += cpu
            own = part
            if part == H5:
                metering.h5_move(-1)
                try:
                    own = H5 + "-filtered" if args[0].compression is not None else H5  # such a read decodes, too
                except Exception:  # noqa: BLE001  # a closed file, another class
                    pass
            (fetch or metering).add(own, wall - inner[0], cpu - inner[1])

    timed_call.__fastload__ = call  # type: ignore[attr-defined]
    return timed_call


def decoding(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that decodes an image, its first argument or what it returns, to time it and note its size."""
    timed_call = timed(call, DECODING)

    @functools.wraps(call)
    def decode(*args: Any, **kwargs: Any) -> Any:
        result = timed_call(*args, **kwargs)
        fetch = thread.fetch
        if fetch is not None:
            size: Any = getattr(args[0], "size", None) if args else None  # of an image of Pillow: (W, H)
            shape: Any = getattr(result, "shape", ())
            if isinstance(size, tuple) and len(size) == 2:
                height, width = size[1], size[0]
            elif len(shape) == 3:
                height, width = shape[-2:] if shape[0] in (1, 3, 4) else shape[:2]
            else:
                return result
            fetch.decoded = [fetch.decoded[0] + 1, fetch.decoded[1] + int(height), fetch.decoded[2] + int(width)]
        return result

    decode.__fastload__ = call  # type: ignore[attr-defined]
    return decode


_LONG_WAIT_S = 5e-4  # whose line of code is noted


def waiting(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that sleeps or waits for a socket, to time its calls from the code that makes a batch.

    Those inside another timed call, such as reading a slow file by h5py, are part of that.
    """
    timed_call = timed(call, WAITING)

    @functools.wraps(call)
    def waiting_call(*args: Any, **kwargs: Any) -> Any:
        fetch = thread.fetch
        if fetch is None or len(thread.stack) != 1:
            return call(*args, **kwargs)
        begin = clock()
        try:
            return timed_call(*args, **kwargs)
        finally:
            wall = clock() - begin
            if wall > _LONG_WAIT_S:
                line = user_line(sys._getframe(1))
                fetch.waits[line] = fetch.waits.get(line, 0.0) + wall
                fetch.first_wait = fetch.first_wait or (begin, wall)

    waiting_call.__fastload__ = call  # type: ignore[attr-defined]
    return _Unbound(waiting_call) if isinstance(call, types.BuiltinFunctionType) else waiting_call


class _Unbound:
    """A function that does not become a method as a class attribute, like functions in C; pickled by its name."""

    def __init__(self, call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, call)
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> str:
        return str(self.__name__)  # type: ignore[attr-defined]


def passing(call: Callable[..., Any], part: str) -> Callable[..., Any]:
    """Wraps a function of multiprocessing that sends batches (part `out`) or receives them (`into`)."""

    @functools.wraps(call)
    def passing_call(*args: Any, **kwargs: Any) -> Any:
        if not metering.active or thread.fetch is not None:
            return call(*args, **kwargs)
        span = Span()
        try:
            return call(*args, **kwargs)
        finally:
            wall, cpu, delay = span.taken()
            metering.add(part, wall - delay, cpu)

    passing_call.__fastload__ = call  # type: ignore[attr-defined]
    return passing_call


def noted(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that a script calls between its loops, to note when it did; not in worker processes."""

    @functools.wraps(call)
    def noted_call(*args: Any, **kwargs: Any) -> Any:
        begin = clock()
        try:
            return call(*args, **kwargs)
        finally:
            if thread.fetch is None and events.folder:
                name = f"torch.{call.__name__}"
                events.write({"e": "call", "name": name, "t": begin, "s": clock() - begin})

    return noted_call


_patched: list[tuple[Any, str, Any]] = []  # owner, attribute, what was there
_INHERITED = object()


def patch(owner: Any, name: str, new: Any) -> None:
    """Sets an attribute of a module or class, and remembers what was there."""
    _patched.append((owner, name, vars(owner).get(name, _INHERITED)))
    setattr(owner, name, new)


def unpatch() -> None:
    """Puts all such attributes back as they were."""
    while _patched:
        owner, name, before = _patched.pop()
        if before is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
