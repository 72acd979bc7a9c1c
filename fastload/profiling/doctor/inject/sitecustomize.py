"""Runs inside the user's Python, before their script: times its DataLoaders and writes events to a file.

`fastload doctor` puts this folder on PYTHONPATH, so that every Python of the job (ranks, workers, whatever a shell
script starts) imports this module as its sitecustomize. It needs the standard library only and works from Python 3.9
and torch 2.0 on. It changes nothing that a script can see but the clock: functions of torch, Pillow, h5py and a few
decoders are wrapped when they are imported, each call goes through, and any failure of this module is caught and
recorded.

Each process appends lines of JSON to a file of its own as things happen, so a kill loses nothing. All times are seconds
of CLOCK_MONOTONIC, the same clock in every process. Events (key `e`):

    process  pid, ppid, argv, rank, world, cpus, python           once, at the first further event
    torch    version, cuda                                       torch was imported
    loader   id, workers, prefetch, persistent, batch_size, ...  a DataLoader is iterated for the first time
    iter     id, t, s, pids                                      an epoch's iterator was made in s seconds; its workers
    next     id, t, wait, ...                                    a batch was received; the times of the step before it;
                                                                 of a FastLoader's batch, its own figures too
    end      id, t, wait                                         the loader had no more batches
    fetch    id, worker, t, wall, cpu, delay, parts, ...         a batch was made; id: by the loop itself, for a loader
    line     places, count                                       lines of code in which workers were seen, with counts
    trial    id, t, limit, steps, s                              steps taken while `limit` workers could work; 0: all
    fault    what                                                this module failed; the script went on
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

_clock = time.perf_counter
_cpu_clock = time.thread_time
_MOST_BETWEEN = 3  # batches of other loaders within one step
_MAX_TOP = 16  # slowest samples of a batch that are written down one by one
_LOOK_EVERY_S = 0.05

READING, DECODING, LOCK, H5, COLLATE, REST = "reading", "decoding", "lock", "h5py", "collate", "rest"

# What is timed by name when its module is imported: module -> (attribute, as what).
_CALLS: dict[str, list[tuple[str, str]]] = {
    "PIL.Image": [("open", DECODING), ("Image.convert", DECODING), ("Image.tobytes", DECODING)],
    "PIL.ImageFile": [("ImageFile.load", DECODING)],
    "cv2": [("imread", DECODING), ("imdecode", DECODING)],
    "simplejpeg": [("decode_jpeg", DECODING)],
    "turbojpeg": [("TurboJPEG.decode", DECODING)],
    "torchvision.io.image": [(n, DECODING) for n in ("read_image", "decode_image", "decode_jpeg", "decode_png")],
    "imageio.v2": [("imread", DECODING)],
    "imageio.v3": [("imread", DECODING)],
    "zlib": [("decompress", DECODING)],
    "bz2": [("decompress", DECODING)],
    "lzma": [("decompress", DECODING)],
    "numpy.lib.npyio": [("load", READING), ("fromfile", READING)],
    "numpy": [("load", READING), ("fromfile", READING)],
    "h5py._hl.dataset": [
        ("Dataset." + name, H5)
        for name in ("__getitem__", "__setitem__", "read_direct", "write_direct", "resize", "flush")
    ],
    "multiprocessing.synchronize": [("SemLock.__enter__", LOCK)],
    "fcntl": [("flock", LOCK), ("lockf", LOCK)],
}


class _Out:
    """The file of this process; a forked child opens its own. Without a folder nothing is recorded."""

    def __init__(self) -> None:
        self.folder = os.environ.get("FASTLOAD_DOCTOR", "")
        self.fd = -1
        self.pid = 0
        self.file = (0, 0)  # device and inode

    def write(self, event: dict[str, Any] | str) -> None:
        pid = os.getpid()
        if pid != self.pid or not self.is_ours():
            self.pid = pid
            name = f"{pid}-{time.monotonic_ns()}.jsonl"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
            self.fd = os.open(os.path.join(self.folder, name), flags, 0o600)
            self.file = _identity(self.fd)
            self.write(_process())
        # One write, so that a line is there as a whole or not at all.
        line = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"))
        os.write(self.fd, (line + "\n").encode("utf-8", "backslashreplace"))

    def is_ours(self) -> bool:
        """Whether the descriptor is still the one we opened: a daemon closes all its descriptors, and opens others."""
        try:
            return _identity(self.fd) == self.file
        except OSError:
            return False

    def close(self) -> None:
        """Closes the file; the next event opens another one."""
        if self.pid == os.getpid() and self.is_ours():
            os.close(self.fd)
        self.pid = 0


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


_out = _Out()


def _write(event: dict[str, Any] | str) -> None:
    if not _out.folder:
        return
    try:
        _out.write(event)
    except (OSError, ValueError, TypeError):
        pass  # the folder is gone, the disk is full: the script goes on


def _process() -> dict[str, Any]:
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environ = os.environ
    return {
        "e": "process",
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "argv": [str(word)[:200] for word in getattr(sys, "argv", [])][:20],
        "rank": environ.get("RANK", ""),
        "local_world": environ.get("LOCAL_WORLD_SIZE", ""),
        "cpus": affinity,
        "python": ".".join(map(str, sys.version_info[:3])),
        "t": _clock(),
    }


def _fault(where: str) -> None:
    kind, error, _ = sys.exc_info()
    _write({"e": "fault", "what": f"{where}: {getattr(kind, '__name__', '')}: {str(error)[:300]}"})


class _Scheduled:
    """Seconds that the calling thread was ready to run and had no CPU; 0 where the system does not say."""

    def __init__(self) -> None:
        self.local = threading.local()

    def waited(self) -> float:
        local = self.local
        try:
            if getattr(local, "pid", 0) != os.getpid():
                local.pid = os.getpid()
                task = f"/proc/self/task/{threading.get_native_id()}/schedstat"
                local.fd = _Descriptor(os.open(task, os.O_RDONLY | os.O_CLOEXEC))
            return int(os.pread(local.fd.number, 96, 0).split()[1]) * 1e-9
        except (OSError, AttributeError, IndexError, ValueError):
            local.pid = 0
            return 0.0


class _Descriptor:
    """A file descriptor that is closed with its thread, unless the number belongs to another file by then."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.file = _identity(number)

    def __del__(self, _close: Callable[[int], None] = os.close, _identity: Any = _identity) -> None:
        try:
            if _identity(self.number) == self.file:
                _close(self.number)
        except OSError:
            pass


_scheduled = _Scheduled()


class _Thread(threading.local):
    """State of one thread."""

    def __init__(self) -> None:
        self.stack: list[list[float]] = []  # [seconds, CPU seconds] of the calls inside each open call
        self.fetch: _Fetch | None = None
        self.asked: _Loader | None = None  # whose batch this thread waits for


_thread = _Thread()


class _Totals:
    """Seconds by part of all threads of this process outside a fetch of their own, and the use of h5py's lock."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.guard = threading.Lock()  # whoever held it is not in a forked child
        self.parts: dict[str, list[float]] = {}
        self.h5_in = 0
        self.h5_since = 0.0
        self.h5_busy = 0.0  # seconds in which at least one thread was in h5py
        self.h5_waits = 0.0  # thread-seconds beyond the first
        self.h5_threads: dict[int, float] = {}
        self.out = [0.0, 0.0]  # pickling and sending batches: seconds, CPU seconds
        self.into = [0.0, 0.0]  # receiving and unpickling

    def add(self, part: str, wall: float, cpu: float) -> None:
        with self.guard:
            total = self.parts.setdefault(part, [0.0, 0.0])
            total[0] += wall
            total[1] += cpu

    def h5_move(self, step: int) -> None:
        now = _clock()
        with self.guard:
            if self.h5_in:
                self.h5_busy += now - self.h5_since
                self.h5_waits += (now - self.h5_since) * (self.h5_in - 1)
            self.h5_since = now
            self.h5_in = max(0, self.h5_in + step)
            self.h5_threads[threading.get_ident()] = now


_totals = _Totals()


class _Fetch:
    """One batch while it is made."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {}
        self.samples: list[float] = []

    def add(self, part: str, wall: float, cpu: float) -> None:
        total = self.parts.setdefault(part, [0.0, 0.0])
        total[0] += wall
        total[1] += cpu


def _timed(call: Callable[..., Any], part: str) -> Callable[..., Any]:
    """Wraps a function to time its calls, without timed calls inside them, while a loader works in this process."""

    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        thread = _thread
        if not _State.active:
            return call(*args, **kwargs)
        inner = [0.0, 0.0]
        stack = thread.stack
        stack.append(inner)
        if part == H5:
            _totals.h5_move(1)
        begin, cpu_begin = _clock(), _cpu_clock()
        try:
            return call(*args, **kwargs)
        finally:
            wall, cpu = _clock() - begin, _cpu_clock() - cpu_begin
            stack.pop()
            if part == H5:
                _totals.h5_move(-1)
            if stack:
                stack[-1][0] += wall
                stack[-1][1] += cpu
            own = _packed(args) if part == H5 else part
            (thread.fetch or _totals).add(own, wall - inner[0], cpu - inner[1])

    timed.__fastload__ = call  # type: ignore[attr-defined]
    return timed


def _packed(args: tuple[Any, ...]) -> str:
    """Returns the part that a read through h5py counts as: reading a dataset with filters also decodes."""
    try:
        return H5 + "-filtered" if args[0].compression is not None else H5
    except Exception:  # noqa: BLE001  # a closed file, another class
        return H5


class _State:
    active = False  # a loader is at work in this process
    loaders: dict[int, Any]
    current: Any = None  # the loader state that the loop's thread works for
    next_s = 0.0  # spent in all loaders' next()
    nexts = 0
    epochs = 0  # begun or ended, of all loaders
    last_loop_ident = 0


_State.loaders = {}


class _TimedDataset:
    """A map-style dataset for a fetcher: each sample is timed."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._cheap = 0  # batches in a row whose samples are too short for more than one clock

    def __getitem__(self, index: Any) -> Any:
        fetch = _thread.fetch
        if fetch is None:
            return self._dataset[index]
        if self._cheap > 3:
            begin = _clock()
            sample = self._dataset[index]
            fetch.samples.append(_clock() - begin)
            return sample
        begin, delay = _clock(), _scheduled.waited()
        try:
            return self._dataset[index]
        finally:
            fetch.samples.append(_clock() - begin - (_scheduled.waited() - delay))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)  # __getitems__ is there if the dataset has it

    def looked_at(self, samples: list[float]) -> None:
        self._cheap = self._cheap + 1 if samples and sum(samples) < 3e-5 * len(samples) else 0


def _fetching(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fetch(self: Any, possibly_batched_index: Any) -> Any:
        outer = _thread.fetch
        if outer is not None or not _out.folder:
            return original(self, possibly_batched_index)
        _State.active = True
        turn = _turns.wait(self)
        dataset = getattr(self, "dataset", None)
        mine = _thread.fetch = _Fetch()
        stack, _thread.stack = _thread.stack, [[0.0, 0.0]]
        before = _snapshot()
        begin, cpu_begin, delay_begin = _clock(), _cpu_clock(), _scheduled.waited()
        _look(begin)
        samples = 0
        try:
            if type(self).__name__ == "_MapDatasetFetcher" and type(dataset) is not _TimedDataset:
                self.dataset = dataset = _TimedDataset(dataset)
            if not hasattr(self.collate_fn, "__fastload__"):
                self.collate_fn = _timed(self.collate_fn, COLLATE)
            data = original(self, possibly_batched_index)
            samples = len(possibly_batched_index) if isinstance(possibly_batched_index, (list, tuple)) else 0
            return data
        finally:
            wall, cpu = _clock() - begin, _cpu_clock() - cpu_begin
            delay = _scheduled.waited() - delay_begin
            _look(0.0)
            _turns.done(turn)
            inner = _thread.stack[0]
            _thread.fetch, _thread.stack = None, stack
            mine.add(REST, wall - inner[0], cpu - inner[1])
            try:
                _write(_fetched(mine, before, begin, wall, cpu, delay, samples))
                if type(dataset) is _TimedDataset:
                    dataset.looked_at(mine.samples)
            except Exception:  # noqa: BLE001  # the batch is whole, and the script must get it
                _fault("fetch")

    return fetch


def _snapshot() -> dict[str, Any]:
    with _totals.guard:
        _totals.h5_threads.clear()
        return {
            "others": {part: list(value) for part, value in _totals.parts.items()},
            "busy": _totals.h5_busy,
            "waits": _totals.h5_waits,
            "out": list(_totals.out),
        }


def _fetched(
    fetch: _Fetch, before: dict[str, Any], begin: float, wall: float, cpu: float, delay: float, samples: int
) -> dict[str, Any]:
    durations = sorted(fetch.samples)
    if durations:
        # Samples timed by one clock: a wait for a CPU falls into one of them, most of the time.
        durations[-1] = max(durations[len(durations) // 2], durations[-1] - _unseen(durations, wall, delay))
    with _totals.guard:
        others = {
            part: [value[i] - before["others"].get(part, (0.0, 0.0))[i] for i in (0, 1)]
            for part, value in _totals.parts.items()
        }
        event = {
            "e": "fetch",
            "worker": _worker_id(),
            "id": _thread.asked.id if _thread.asked is not None else 0,
            "t": begin,
            "wall": wall,
            "cpu": cpu,
            "delay": delay,
            "n": samples,
            "parts": fetch.parts,
            "others": {part: value for part, value in others.items() if value[0] > 0},
            "out": [_totals.out[i] - before["out"][i] for i in (0, 1)],
        }
        if _totals.h5_threads:
            event["h5"] = [
                _totals.h5_busy - before["busy"],
                _totals.h5_waits - before["waits"],
                len(_totals.h5_threads),
            ]
    if durations:
        middle = durations[len(durations) // 2]
        event["samples"] = [len(durations), sum(durations), middle]
        event["slow"] = [value for value in durations[-_MAX_TOP:] if value > 3 * middle]
    return event


def _unseen(durations: list[float], wall: float, delay: float) -> float:
    """Returns the part of a fetch's waits for a CPU that is contained in its samples' times."""
    return max(0.0, min(delay, sum(durations) - (wall - delay)))


def _worker_id() -> int:
    info = getattr(sys.modules.get("torch.utils.data._utils.worker"), "_worker_info", None)
    return info.id if info is not None else -1


# --- the loop's side -------------------------------------------------------------------------------------------------


class _Loader:
    """State of one loader in the loop's process."""

    count = 0

    def __init__(self, loader: Any) -> None:
        _Loader.count += 1
        self.id = _Loader.count
        self.iter_begin = 0.0
        self.returned = 0.0  # when the last batch was handed over; 0: no step is under way
        self.cpu = self.process_cpu = self.delay = self.copy = self.copy_delay = 0.0
        self.events: Any = None
        self.seen = (0, 0, 0.0)
        self.trial: _Trial | None = None
        self.probe: Any = None  # what a FastLoader tells of its batches
        sampler = getattr(loader, "batch_sampler", None)
        dataset = getattr(loader, "dataset", None)
        _write({
            "e": "loader",
            "id": self.id,
            "kind": type(loader).__module__.split(".")[0] + "." + type(loader).__name__,
            "workers": getattr(loader, "num_workers", 0) or 0,
            "prefetch": getattr(loader, "prefetch_factor", None) or 2,
            "persistent": bool(getattr(loader, "persistent_workers", False)),
            "pin": bool(getattr(loader, "pin_memory", False)),
            "batch_size": getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None) or 0,
            "dataset": getattr(getattr(loader, "_data", None), "name", None) or _place(type(dataset)),
            "length": _length(dataset),
            "sampler": type(getattr(loader, "sampler", None)).__name__,
            "collate": _place(getattr(loader, "collate_fn", None)),
            "t": _clock(),
        })  # fmt: skip


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except Exception:  # noqa: BLE001  # an iterable has none, another one raises what it likes
        return -1


def _place(thing: Any) -> str:
    """Returns `name (file:line)` of a class or function, as far as it is known."""
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    code = getattr(thing, "__code__", None)
    if code is None and hasattr(thing, "__getitem__"):
        code = getattr(getattr(thing, "__getitem__", None), "__code__", None)
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else str(name)


def _known(loader: Any) -> _Loader:
    # By identity: a loader may compare by value, or have no hash.
    pid, same, state = _State.loaders.get(id(loader), (0, None, None))
    if pid != os.getpid() or same is None or same() is not loader:
        state = _Loader(loader)
        _State.loaders[id(loader)] = (os.getpid(), weakref.ref(loader), state)
    return state  # type: ignore[no-any-return]


def _iterating(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `DataLoader.__iter__`, which starts the workers."""

    @functools.wraps(original)
    def begin_epoch(self: Any, *args: Any) -> Any:
        if _thread.asked is not None or not _out.folder:
            return original(self, *args)  # a loader within a loader: the outer one is what the loop waits for
        _State.active = True
        _State.epochs += 1
        begin = _clock()
        state = None
        try:
            _wrap_tensors()
            state = _known(self)
            state.trial = _Trial.of(self, state.trial)
        except Exception:  # noqa: BLE001  # a loader that cannot be known is not metered
            _fault("loader")
        iterator = original(self, *args)
        if state is None:
            return iterator
        try:
            state.iter_begin, state.returned = begin, 0.0
            iterator.__dict__["_fastload_doctor"] = state
            workers = [worker.pid for worker in getattr(iterator, "_workers", None) or ()]
            _write({"e": "iter", "id": state.id, "t": begin, "s": _clock() - begin, "pids": workers})
        except Exception:  # noqa: BLE001  # an iterator that takes no attributes is not metered
            _fault("iter")
        return iterator

    return begin_epoch


def _asking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `__next__` of an iterator whose loader is known."""

    @functools.wraps(original)
    def ask(self: Any) -> Any:
        state = self.__dict__.get("_fastload_doctor")
        if state is None or _thread.asked is not None or not _out.folder:
            return original(self)
        event = _step_over(state)
        _thread.asked = state
        _State.current = None
        into = list(_totals.into)
        if state.probe is not None:
            state.probe.clear()
        begin, cpu_begin, delay_begin = _clock(), _cpu_clock(), _scheduled.waited()
        try:
            batch = original(self)
        except StopIteration:
            wait = _clock() - begin
            _State.epochs += 1
            _write(f'{{"e":"end","id":{state.id},"t":{begin:.6f},"wait":{wait:.7f},"step":{event}}}')
            state.returned = 0.0
            if state.trial is not None:
                state.trial.epoch_ends()
            raise
        finally:
            _thread.asked = None
            _State.next_s += _clock() - begin
            _State.nexts += 1
        try:
            now = _clock()
            times = (
                state.id, begin, now - begin, _cpu_clock() - cpu_begin, _scheduled.waited() - delay_begin,
                _totals.into[0] - into[0], _totals.into[1] - into[1], _handed_over(batch),
            )  # fmt: skip
            inside = "" if state.probe is None else ',"inside":' + json.dumps(_told(state.probe, now))
            _write(_NEXT % times + event + inside + "}")
            if state.trial is not None:
                state.trial.step_begins(state.id, now, now - begin)
            _step_begins(state)
        except Exception:  # noqa: BLE001  # the batch is whole, and the script must get it
            _fault("next")
        return batch

    return ask


def _told(probe: Any, now: float) -> dict[str, Any]:
    """Returns the figures that a FastLoader reports with a batch."""
    ready = now if probe.ready is None else probe.ready
    copied = ready if probe.copied is None else probe.copied
    stages = probe.work.stages if probe.work is not None else {}
    return {
        "worker_info": probe.worker_info._asdict(),
        "copy": copied - ready,
        "transform": now - copied,
        "depth": probe.queue_depth,
        "work": {name: [work.running_s, work.blocked_s] for name, work in stages.items()},
    }


def _step_begins(state: _Loader) -> None:
    _State.current = state
    _State.last_loop_ident = threading.get_ident()
    state.copy = state.copy_delay = 0.0
    state.events = _gpu.mark()
    state.cpu, state.process_cpu, state.delay = _cpu_clock(), time.process_time(), _scheduled.waited()
    state.seen = (_State.epochs, _State.nexts, _State.next_s)
    state.returned = _clock()


# Once a step: a template costs a fifth of json.dumps.
_NEXT = (
    '{"e":"next","id":%d,"t":%.6f,"wait":%.7f,"cpu":%.7f,"delay":%.7f,"into":[%.7f,%.7f],"n":%d,"step":'  # and so on
)
_STEP = '{"wall":%.7f,"cpu":%.7f,"process_cpu":%.7f,"delay":%.7f,"copy":%.7f,"copy_delay":%.7f,"gpu":%s}'


def _step_over(state: _Loader) -> str:
    """Returns the times of the step since the last batch as JSON; null before the first, and if not known."""
    try:
        return _step_taken(state)
    except Exception:  # noqa: BLE001  # another device meanwhile, a CUDA error that is the script's to see
        _fault("step")
        return "null"


def _step_taken(state: _Loader) -> str:
    epochs, nexts, next_s = state.seen
    if not state.returned or _State.epochs != epochs or _State.nexts > nexts + _MOST_BETWEEN:
        return "null"  # another loader was iterated meanwhile: no step of this one's
    # Loaders that take turns, as in zip(a, b): each has its own waits only.
    others_s = _State.next_s - next_s
    gpu_s = _gpu.step_s(state.events)
    return _STEP % (
        _clock() - state.returned - others_s,
        _cpu_clock() - state.cpu,
        time.process_time() - state.process_cpu,
        _scheduled.waited() - state.delay - state.copy_delay,
        state.copy,
        state.copy_delay,
        "null" if gpu_s is None else repr(gpu_s),
    )


class _Gpu:
    """The GPU's own time between two marks, read when it is available; None where CUDA was never initialized."""

    def __init__(self) -> None:
        self.cuda: Any = None
        self.open: list[tuple[Any, Any]] = []
        self.last: float | None = None

    def mark(self) -> Any:
        if self.cuda is None or not self.cuda.is_initialized():
            return None
        event = self.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step_s(self, begin: Any) -> float | None:
        """Ends the step that began at a mark; returns the seconds of the latest step that has finished."""
        if begin is None:
            return None
        end = self.mark()
        self.open.append((begin, end))
        while self.open and self.open[0][1].query():
            first, second = self.open.pop(0)
            self.last = first.elapsed_time(second) / 1e3
        return self.last


_gpu = _Gpu()


def _leaves(batch: Any, found: list[Any], depth: int = 0) -> list[Any]:
    if len(found) < 32 and depth < 4:
        if isinstance(batch, dict):
            for value in batch.values():
                _leaves(value, found, depth + 1)
        elif isinstance(batch, (list, tuple)):
            for value in batch[:32]:
                _leaves(value, found, depth + 1)
        else:
            found.append(batch)
    return found


def _handed_over(batch: Any) -> int:
    """Returns the samples in a batch, by its tensors' first dimension; wraps `to` of classes in it, to time copies."""
    most = 0
    for leaf in _leaves(batch, []):
        shape = getattr(leaf, "shape", None)
        if isinstance(shape, tuple):  # torch.Size is one
            most = max([most, *map(int, shape[:1])])
        elif "to" in vars(type(leaf)) and callable(vars(type(leaf))["to"]):
            _time_copy(type(leaf), "to")
    return most or (len(batch) if isinstance(batch, (list, tuple)) else 0)


def _time_copy(owner: Any, name: str, counts: Callable[..., bool] | None = None) -> None:
    """Wraps a method that copies to a device, to time its calls during a step of the loop's thread."""
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "__fastload__"):
        return

    @functools.wraps(original)
    def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
        if counts is not None and type(self) is not owner:
            return _as_before(owner, name, original, self, args, kwargs)
        state = _State.current
        if state is None or _State.last_loop_ident != threading.get_ident():
            return original(self, *args, **kwargs)
        _State.current = None  # what it calls inside is part of it
        begin, delay_begin = _clock(), _scheduled.waited()
        try:
            result = original(self, *args, **kwargs)
            if counts is None or counts(self, result, args, kwargs):
                delay = _scheduled.waited() - delay_begin
                state.copy += _clock() - begin - delay
                state.copy_delay += delay
            return result
        finally:
            _State.current = state

    copy.__fastload__ = original  # type: ignore[attr-defined]
    _replace(owner, name, copy)


def _as_before(owner: Any, name: str, original: Any, tensor: Any, args: Any, kwargs: Any) -> Any:
    """Calls a method for a subclass of Tensor whose `__torch_function__` must see the unwrapped method of Tensor."""
    with _torch_functions:
        wrapped = vars(owner).get(name)
        if wrapped is not None:
            delattr(owner, name)
        try:
            return original(tensor, *args, **kwargs)
        finally:
            if wrapped is not None:
                setattr(owner, name, wrapped)


_torch_functions = threading.RLock()


def _moved(tensor: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of `Tensor.to` or `.cuda` made a copy for a device, and did not only cast."""
    if result is tensor:
        return False
    if result.device != tensor.device:
        return True
    named = "device" in kwargs or any(isinstance(word, str) or type(word).__name__ == "device" for word in args)
    return bool(named)


def _copied_in(tensor: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `tensor.copy_(source)` crossed to another device."""
    source = args[0] if args else kwargs.get("src")
    return bool(getattr(source, "device", None) != tensor.device)


# --- hand-over between processes -------------------------------------------------------------------------------------


def _passing(original: Callable[..., Any], into: bool) -> Callable[..., Any]:
    """Wraps a function of multiprocessing that sends or receives a batch."""

    @functools.wraps(original)
    def passing(*args: Any, **kwargs: Any) -> Any:
        if not _State.active or _thread.fetch is not None:
            return original(*args, **kwargs)
        begin, cpu_begin, delay_begin = _clock(), _cpu_clock(), _scheduled.waited()
        try:
            return original(*args, **kwargs)
        finally:
            total = _totals.into if into else _totals.out
            total[0] += _clock() - begin - (_scheduled.waited() - delay_begin)
            total[1] += _cpu_clock() - cpu_begin

    passing.__fastload__ = original  # type: ignore[attr-defined]
    return passing


# --- would fewer workers do better? ---------------------------------------------------------------------------------


class _Turns:
    """A worker's side of a trial: it waits to make its batch until few enough batches before it are unfinished.

    The file has 64-bit numbers: how many batches may be made at once (0: any), and for each worker how many of this
    epoch's it has made. Batches are dealt out in turn: a worker's n-th is number `worker + n * workers` of the epoch.
    """

    longest_s = 0.5  # whoever was counted wrong goes on after that

    def __init__(self) -> None:
        self.name = ""
        self.file: Any = None

    def numbers(self) -> Any:
        name = os.environ.get("FASTLOAD_DOCTOR_TRIAL", "")
        if name != self.name:
            self.name, self.file = name, None
            try:
                number = os.open(name, os.O_RDWR | os.O_CLOEXEC)
                try:
                    self.file = memoryview(mmap.mmap(number, 0)).cast("q")
                finally:
                    os.close(number)
            except (OSError, ValueError):
                pass
        return self.file

    def wait(self, fetcher: Any) -> int:
        """Waits for the turn of the batch that this worker makes next; returns its slot, 0: no trial."""
        worker = _worker_id()
        numbers = self.numbers() if worker >= 0 else None
        if numbers is None or worker + 1 >= len(numbers):
            return 0
        made = getattr(fetcher, "_fastload_made", 0)
        fetcher._fastload_made = made + 1
        if made == 0:
            numbers[worker + 1] = 0
        number, until = worker + made * (len(numbers) - 1), _clock() + self.longest_s
        while numbers[0] and number >= sum(numbers[1:]) + numbers[0] and _clock() < until:
            time.sleep(0.0005)
        return worker + 1

    def done(self, slot: int) -> None:
        if slot and self.file is not None:
            self.file[slot] += 1


def _start_method(loader: Any) -> str:
    """Returns how its workers are started, without fixing multiprocessing's start method."""
    context = getattr(loader, "multiprocessing_context", None)
    if context is not None:
        return str(context.get_start_method())
    chosen = sys.modules["multiprocessing"].get_start_method(allow_none=True)
    if chosen is not None:
        return str(chosen)
    return "spawn" if sys.platform == "darwin" else "forkserver" if sys.version_info >= (3, 14) else "fork"


class _Trial:
    """The loop's side of a trial: while the loop waits with more workers than CPUs, only some may work, in turn.

    Order and content of the batches stay. Each turn lasts for the steps that fill `turn_s`, after as many as there are
    workers, whose batches were made before it.
    """

    settle_s = 2.0
    turn_s = 0.8
    turns = 6

    def __init__(self, path: str, workers: int, limit: int) -> None:
        self.workers, self.limit = workers, limit
        self.numbers = _map_new(path, workers + 1)
        self.path = path
        self.left = self.turns
        self.epoch_ends()

    @staticmethod
    def of(loader: Any, before: _Trial | None) -> _Trial | None:
        """Returns the trial of a loader with more workers than CPUs, about to be started; None for others."""
        os.environ.pop("FASTLOAD_DOCTOR_TRIAL", None)
        if before is not None:
            before.epoch_ends()  # it may have been left by break
        workers = getattr(loader, "num_workers", 0) or 0
        if _start_method(loader) == "forkserver":
            return None  # its environment is that of the first loader
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
        limit = affinity // (int(ranks) if ranks.isdigit() and int(ranks) else 1)
        if not 0 < limit < workers:
            return None
        try:
            name = f"{os.getpid()}-{time.monotonic_ns()}.trial"
            trial = before or _Trial(os.path.join(_out.folder, name), workers, limit)
        except (OSError, ValueError):
            return None
        os.environ["FASTLOAD_DOCTOR_TRIAL"] = trial.path
        return trial

    def epoch_ends(self) -> None:
        self.numbers[0] = 0
        self.begun = self.since = 0.0
        self.waited = 0.0
        self.skip = self.steps = 0

    def step_begins(self, loader: int, now: float, waited: float) -> None:
        """Notes that a batch was received, `waited` seconds after it was asked for."""
        if not self.left:
            return
        if not self.begun:
            self.begun = now
            return
        self.waited += waited
        if not self.since:
            # Until it is known that the loop waits for data, and at the beginning of each turn.
            if now - self.begun > self.settle_s and self.waited > 0.2 * (now - self.begun):
                self.since, self.skip, self.steps = now, self.workers, 0
            return
        if self.skip:
            self.skip -= 1
            self.since, self.steps = now, 0
            return
        self.steps += 1
        if now - self.since >= self.turn_s and self.steps >= min(8, self.workers):
            limit = self.numbers[0]
            turn_s = now - self.since
            _write({"e": "trial", "id": loader, "t": now, "limit": limit, "steps": self.steps, "s": turn_s})
            self.left -= 1
            self.numbers[0] = 0 if limit or not self.left else self.limit
            self.since, self.skip, self.steps = now, self.workers, 0


def _map_new(path: str, count: int) -> Any:
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(number, struct.pack(f"{count}q", *([0] * count)))
        return memoryview(mmap.mmap(number, 0)).cast("q")
    finally:
        os.close(number)


_turns = _Turns()


# --- where workers are, by line --------------------------------------------------------------------------------------


class _Looker:
    """A thread that looks every 50 ms at the line of code a worker process is in.

    Only in workers: an extra thread in the main process would be noticed by a script that forks.
    """

    def __init__(self) -> None:
        self.pid = 0
        self.since = 0.0
        self.ident = 0
        self.places: dict[str, int] = {}

    def run(self) -> None:
        looks = 0
        never = threading.Event()  # a wait for it does not look like work from outside, as a sleep does
        while not never.wait(_LOOK_EVERY_S):
            if not self.since:
                continue
            frame = sys._current_frames().get(self.ident)
            place = _user_line(frame)
            if place:
                self.places[place] = self.places.get(place, 0) + 1
                looks += 1
                if looks % 20 == 0:
                    best = sorted(self.places.items(), key=lambda item: -item[1])[:5]
                    _write({"e": "line", "places": best, "count": looks})


def _user_line(frame: Any) -> str:
    """`function (file:line)` of the innermost frame that is not of an installed package."""
    while frame is not None:
        name = frame.f_code.co_filename
        if "site-packages" not in name and "dist-packages" not in name and not name.startswith(_STDLIB) and (
            name != __file__ and not name.startswith("<frozen")
        ):  # fmt: skip
            return f"{frame.f_code.co_name} ({os.path.basename(name)}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


_STDLIB = os.path.dirname(os.__file__) + os.sep
_looker = _Looker()


def _look(since: float) -> None:
    _looker.since, _looker.ident = since, threading.get_ident()
    if since and _looker.pid != os.getpid():
        _looker.pid = os.getpid()
        if _worker_id() >= 0:
            threading.Thread(target=_looker.run, name="fastload-doctor", daemon=True).start()


# --- putting it in ---------------------------------------------------------------------------------------------------


_changed: list[tuple[Any, str, Any]] = []  # owner, attribute, what was there (_NOTHING: it was inherited)
_NOTHING = object()


def _replace(owner: Any, name: str, new: Any) -> None:
    """Sets an attribute of a module or class, and remembers what was there."""
    _changed.append((owner, name, vars(owner).get(name, _NOTHING)))
    setattr(owner, name, new)


def _wrap_attribute(module: Any, path: str, part: str) -> None:
    owner = module
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    original = getattr(owner, name, None)
    if original is not None and not hasattr(original, "__fastload__"):
        _replace(owner, name, _timed(original, part))


def _on_calls(module: Any) -> None:
    for path, part in _CALLS.get(module.__name__, ()):
        _wrap_attribute(module, path, part)
    if module.__name__ == "multiprocessing.synchronize":
        _time_acquire(module)


def _time_acquire(module: Any) -> None:
    original = module.SemLock._make_methods

    @functools.wraps(original)
    def make_methods(self: Any) -> None:
        original(self)
        self.acquire = _timed(self._semlock.acquire, LOCK)

    _replace(module.SemLock, "_make_methods", make_methods)


def _on_fetch(module: Any) -> None:
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        fetcher = getattr(module, name)
        _replace(fetcher, "fetch", _fetching(fetcher.fetch))


def _on_dataloader(module: Any) -> None:
    _replace(module.DataLoader, "__iter__", _iterating(module.DataLoader.__iter__))
    _replace(module._BaseDataLoaderIter, "__next__", _asking(module._BaseDataLoaderIter.__next__))
    torch = sys.modules["torch"]
    _gpu.cuda = getattr(torch, "cuda", None) if getattr(torch.version, "cuda", None) else None
    _write({"e": "torch", "version": str(torch.__version__), "cuda": str(getattr(torch.version, "cuda", None) or "")})


def _wrap_tensors() -> None:
    """Wraps the tensors' methods when the first loader is iterated; earlier imports have seen torch unchanged."""
    torch = sys.modules.get("torch")
    if torch is not None:
        _time_copy(torch.Tensor, "to", _moved)
        _time_copy(torch.Tensor, "cuda", _moved)
        _time_copy(torch.Tensor, "copy_", _copied_in)


def _on_fastload(module: Any) -> None:
    original = module.FastLoader.iterate

    @functools.wraps(original)
    def iterate(self: Any, probe: Any = None) -> Any:
        if probe is None and _out.folder and _thread.asked is None:
            from fastload.timing.probe import Probe

            probe = Probe(_clock)
        iterator = begin_epoch(self, probe)
        state = iterator.__dict__.get("_fastload_doctor")
        if state is not None:
            state.probe = probe
        return iterator

    begin_epoch = _iterating(original)
    _replace(module.FastLoader, "iterate", iterate)


def _on_fastload_iteration(module: Any) -> None:
    _replace(module.Iteration, "__next__", _asking(module.Iteration.__next__))


def _on_reduction(module: Any) -> None:
    pickler = module.ForkingPickler
    _replace(pickler, "loads", staticmethod(_passing(pickler.loads, into=True)))
    _replace(pickler, "dumps", classmethod(_passing(vars(pickler)["dumps"].__func__, into=False)))


def _on_connection(module: Any) -> None:
    base = module._ConnectionBase
    _replace(base, "recv_bytes", _passing(base.recv_bytes, into=True))
    _replace(base, "send_bytes", _passing(base.send_bytes, into=False))


_HOOKS: dict[str, Callable[[Any], None]] = dict.fromkeys(_CALLS, _on_calls)
_HOOKS.update(
    {
        "torch.utils.data._utils.fetch": _on_fetch,
        "torch.utils.data.dataloader": _on_dataloader,
        "multiprocessing.reduction": _on_reduction,
        "multiprocessing.connection": _on_connection,
        "fastload.loader.loader": _on_fastload,
        "fastload.loader.iteration": _on_fastload_iteration,
    }
)


def _run_hook(module: Any) -> None:
    try:
        _HOOKS[module.__name__](module)
    except Exception:  # noqa: BLE001  # another version of that package: not metered, and said
        _fault("hook of " + module.__name__)


class _Finder:
    """Finds modules as the others on sys.meta_path do, and has those of `_HOOKS` changed right after they ran."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _HOOKS:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
            if spec is None:
                continue
            loader = spec.loader
            # A class loads all modules that are built in; those are wrapped by `install`.
            if hasattr(loader, "exec_module") and not isinstance(loader, type):
                execute = loader.exec_module

                def run(module: Any, _execute: Callable[[Any], None] = execute) -> None:
                    _execute(module)
                    _run_hook(module)

                try:
                    loader.exec_module = run
                except (AttributeError, TypeError):
                    pass  # a loader of builtin modules
            return spec
        return None


def uninstall() -> None:
    """Puts everything back as it was before `install`."""
    while _changed:
        owner, name, before = _changed.pop()
        if before is _NOTHING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def meter_into(folder: str) -> str:
    """Records into this folder from now on, or stops with an empty name; returns the folder used until now."""
    _out.close()
    before, _out.folder = _out.folder, folder
    _State.active = False
    _State.loaders.clear()
    return before


_finder: Any = _Finder()


def _in_child() -> None:
    """Resets a forked process: it has no loop, no threads and no locks of its parent."""
    _totals.reset()
    _thread.__init__()  # type: ignore[misc]
    _State.active = False
    _State.current = None
    _looker.since = 0.0


def install() -> None:
    """Wraps functions of modules that are imported already, and of the others when they are imported."""
    for name in list(_HOOKS):
        if name in sys.builtin_module_names:
            __import__(name)
        if name in sys.modules:
            _run_hook(sys.modules[name])
    sys.meta_path.insert(0, _finder)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_in_child)


def _run_shadowed() -> None:
    """Imports the sitecustomize that would have run without us, and leaves sys.path as it would have been."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    mine = sys.modules.pop("sitecustomize", None)
    sys.modules["fastload_doctor_injected"] = mine  # type: ignore[assignment]
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = mine  # type: ignore[assignment]


if __name__ == "sitecustomize" and _out.folder:
    try:
        install()
        _write({"e": "begin", "t": _clock()})
    except Exception:  # noqa: BLE001  # the script runs all the same
        _fault("install")
    _run_shadowed()
