"""The side that uses batches: times waits and steps of the loops over loaders, and copies to a device within them."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

from .code_lines import TIMED, place, user_line
from .dataset_facts import drops_last, facts_of, sampler_of
from .event_file import clock, events, note_fault
from .step_operations import StepRecorder
from .timed_calls import Span, metering, patch, thread, waited_s
from .worker_trial import WorkerTrial, worker_id

_RECORDED = (1, 3, 7, 15)  # steps
_MOST_BETWEEN = 3  # batches of other loaders within one step
_MOST_PARTS = 64  # of a batch are looked at

# Once a step: a template costs a fifth of json.dumps.
_NEXT = '{"e":"next","id":%d,"t":%.6f,"wait":%.7f,"cpu":%.7f,"delay":%.7f,"into":[%.7f,%.7f],"n":%d,"step":%s%s}'
_END = '{"e":"end","id":%d,"t":%.6f,"wait":%.7f,"step":%s}'
_STEP = '{"wall":%.7f,"process_cpu":%.7f,"delay":%.7f,"copy":%.7f,"copy_delay":%.7f,"others":%.7f,"gpu":%s}'


class LoaderState:
    """One loader in the loop's process."""

    known: dict[int, tuple[Any, LoaderState]] = {}  # noqa: RUF012  # (weak reference, state) of all loaders, by id
    # Of all loaders: their number, epochs begun or ended, calls of `next()`, and the seconds in them.
    count = epochs = nexts = 0
    next_s = 0.0

    def __init__(self, loader: Any) -> None:
        LoaderState.count += 1
        self.id = LoaderState.count
        self.returned = 0.0  # when the last batch was handed over; 0: no step is under way
        self.process_cpu = self.delay = self.copy = self.copy_delay = 0.0
        self.gpu_mark: Any = None
        self.seen = (0, 0, 0.0)
        self.trial: WorkerTrial | None = None
        self.probe: Any = None  # records what a FastLoader reports of its batches
        self.shape: tuple[int, ...] = ()  # of the first batch's images
        self.trains = False  # whether a step of its loop ran backward
        self.is_due = False  # whether the operations of a step are to be recorded
        self.training_steps = 0  # that were seen since it is known that they are such
        self.passes = 0  # epochs that began
        self.is_open = False  # whether one of them has not come to its end
        self.iterator: Callable[[], Any] = lambda: None  # a weak reference to the last epoch's iterator
        self.inner = 0  # batches that it took from a loader within it
        batches = getattr(loader, "batch_sampler", None)
        dataset = getattr(loader, "dataset", None)
        data = getattr(getattr(loader, "_options", None), "data", None)  # of a FastLoader
        length, facts = -1, {}
        with suppress(Exception):  # an iterable has none, another one raises what it likes
            length = len(dataset)  # type: ignore[arg-type]
        with suppress(Exception):
            facts = facts_of(dataset)
        events.write({
            "e": "loader",
            "id": self.id,
            "kind": type(loader).__module__.split(".")[0] + "." + type(loader).__name__,
            "workers": getattr(loader, "num_workers", 0) or 0,
            "prefetch": getattr(loader, "prefetch_factor", None) or 2,
            "persistent": bool(getattr(loader, "persistent_workers", False)),
            "pin": bool(getattr(loader, "pin_memory", False)),
            "batch_size": getattr(loader, "batch_size", None) or getattr(batches, "batch_size", None) or 0,
            "dataset": getattr(data, "name", None)
            or place(type(loader if dataset is None else dataset), facts.get("root", "")),
            "length": length,
            "open": [one.id for _, one in LoaderState.known.values() if one.is_open and one.iterator() is not None],
            "sampler": sampler_of(loader),
            "drop_last": drops_last(loader),
            "at": user_line(sys._getframe(1)),
            "collate": place(getattr(loader, "collate_fn", None)),
            **facts,
            "t": clock(),
        })  # fmt: skip

    @staticmethod
    def of(loader: Any) -> LoaderState:
        """Returns the state of a loader; by identity, since a loader may compare by value, or have no hash."""
        known = LoaderState.known.get(id(loader))
        if known is None or known[0]() is not loader:
            known = LoaderState.known[id(loader)] = (weakref.ref(loader), LoaderState(loader))
        return known[1]

    def epoch_begins(self, begin: float, workers: Any = ()) -> None:
        """Records that an epoch's iterator was made, from `begin` on."""
        self.passes += 1
        self.is_open, self.returned = True, 0.0
        StepRecorder.end(None)  # that step may have been left by break
        pids = [worker.pid for worker in workers or ()]
        events.write({"e": "iter", "id": self.id, "t": begin, "s": clock() - begin, "pids": pids})

    def took_from(self, inner: Any) -> None:
        """Counts a batch of an iterator of a DataLoader within this loader, and records whose batches these are."""
        self.inner += 1
        if inner.__dict__.get("_fastload_outer") == self.id:
            return
        inner.__dict__["_fastload_outer"] = self.id
        events.write({
            "e": "inner",
            "id": self.id,
            "pids": [worker.pid for worker in getattr(inner, "_workers", None) or ()],
            "workers": getattr(inner, "_num_workers", 0) or 0,
            "prefetch": getattr(inner, "_prefetch_factor", None) or 2,
            "persistent": bool(getattr(inner, "_persistent_workers", False)),
            "batch_size": getattr(getattr(inner, "_index_sampler", None), "batch_size", None) or 0,
            "dataset": place(type(dataset := getattr(inner, "_dataset", None)), facts_of(dataset)["root"]),
        })  # fmt: skip

    def step_begins(self) -> None:
        """Starts the clocks of a step: its batch is handed over."""
        thread.current = self
        self.copy = self.copy_delay = 0.0
        self.gpu_mark = gpu.mark()
        self.process_cpu, self.delay = time.process_time(), waited_s()
        self.seen = (LoaderState.epochs, LoaderState.nexts, LoaderState.next_s)
        self.returned = clock()

    def step_ends(self) -> str:
        """Returns the times of the step since the last batch as JSON; null before the first, and if not known."""
        now, used = clock(), time.process_time()
        recording_s = StepRecorder.end(self.id)
        epochs, nexts, next_s = self.seen
        if not self.returned or self.epochs != epochs or self.nexts > nexts + _MOST_BETWEEN:
            return "null"  # another loader was iterated meanwhile: no step of this one's
        gpu_s = gpu.step_s(self.gpu_mark)
        return _STEP % (
            max(0.0, now - self.returned - recording_s),
            max(0.0, used - self.process_cpu - recording_s),
            waited_s() - self.delay - self.copy_delay,
            self.copy,
            self.copy_delay,
            self.next_s - next_s,
            "null" if gpu_s is None else repr(gpu_s),
        )

    def note_shape(self, batch: Any) -> None:
        """Records the bytes of each tensor in the first batch, shape and type of the first images, and their masks."""
        images: tuple[int, ...] = (0,)
        dtype, sizes, has_masks = "", [], False
        for thing in _parts(batch):
            shape = getattr(thing, "shape", ())
            if isinstance(shape, tuple) and hasattr(thing, "nbytes"):
                sizes.append(int(thing.nbytes))
                if len(shape) == 4 and not dtype:
                    images, dtype = tuple(map(int, shape)), str(thing.dtype)
                elif dtype and len(shape) > 2 and shape[0] == images[0] and shape[-2:] == images[-2:]:
                    has_masks = has_masks or len(shape) == 3 or shape[1] == 1 != images[1]
        self.shape = images
        found = {"shape": images, "dtype": dtype, "bytes": sizes, "masks": has_masks}
        events.write({"e": "shape", "id": self.id, **found})

    def record_step(self, batch: Any) -> None:
        """Records a few steps of a loop that trains, of which the least disturbed one counts."""
        self.training_steps += self.trains
        self.is_due = self.is_due or self.training_steps in _RECORDED
        if self.is_due and thread.recorder is None:
            self.is_due = False
            StepRecorder.begin(self.id, [one for one in _parts(batch) if hasattr(one, "shape")])

    def extras(self, now: float) -> str:
        """Returns facts of a batch beyond its times, as a member of its event; "" for most loaders.

        A FastLoader reports its own figures; of a loader around another one, it is how many batches it took so far.
        """
        probe = self.probe
        if probe is None:
            return f',"inner":{self.inner}' if self.inner else ""
        ready = now if probe.ready is None else probe.ready
        copied = ready if probe.copied is None else probe.copied
        stages = probe.work.stages if probe.work is not None else {}
        inside = {
            "worker_info": probe.worker_info._asdict(),
            "copy": copied - ready,
            "transform": now - copied,
            "depth": probe.queue_depth,
            "work": {name: [work.running_s, work.blocked_s] for name, work in stages.items()},
        }
        if probe.network is not None:
            inside["network"] = vars(probe.network())
        return ',"inside":' + json.dumps(inside)


def iterating(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `__iter__` of a loader, which starts the workers, or `FastLoader.iterate`, which reports to a probe.

    Many loaders are generators around another loader's iterator, which read ahead, move batches to a device or batch
    anew. The loop waits for the outermost one, so that one is timed; those within it are part of its waits.
    """
    takes_probe = original.__name__ == "iterate"

    @functools.wraps(original)
    def begin_epoch(self: Any, probe: Any = None) -> Any:
        is_within = thread.asked is not None or thread.making not in (0, id(self))
        if is_within or not events.folder or worker_id() >= 0:
            return original(self, probe) if takes_probe else original(self)
        metering.active = True
        LoaderState.epochs += 1
        begin = clock()
        state, passes = None, 0
        try:
            if takes_probe:
                probe = probe or sys.modules["fastload.timing.probe"].Probe(clock)
            torch = sys.modules.get("torch")
            if torch is not None:  # not before the first loop: earlier imports have seen torch unchanged
                for name, counts in (("to", moved), ("cuda", moved), ("copy_", copied_in)):
                    time_copy(torch.Tensor, name, counts)
            state = LoaderState.of(self)
            passes = state.passes
            state.trial = WorkerTrial.of(self, state.trial)
        except Exception:  # noqa: BLE001  # a loader that cannot be known is not metered
            note_fault("loader")
        StepRecorder.end(None)  # of a step within which this begins, or that was left by break
        making, thread.making = thread.making, id(self)
        try:
            iterator = original(self, probe) if takes_probe else original(self)
        finally:
            thread.making = making
        if state is None:
            return iterator
        try:
            state.probe = probe
            if state.passes != passes:  # of a subclass that calls `super().__iter__()`, and comes here twice
                return iterator
            if type(iterator).__module__ in ("builtins", "itertools"):  # a generator, a slice of one
                state.epoch_begins(begin)
                watched = _watched(iterator, state)
                state.iterator = weakref.ref(watched)
                return watched
            if any(hasattr(vars(one).get("__next__"), TIMED) for one in type(iterator).mro()):
                iterator.__dict__["_fastload_doctor"] = state
                state.iterator = weakref.ref(iterator)
                state.epoch_begins(begin, getattr(iterator, "_workers", None))
        except Exception:  # noqa: BLE001  # an iterator that takes no attributes is not metered
            note_fault("iter")
        return iterator

    setattr(begin_epoch, TIMED, original)
    return begin_epoch


def _watched(batches: Any, state: LoaderState) -> Generator[Any, None, Any]:
    """Yields what a generator or the like yields, each wait for it timed."""
    try:
        while True:
            try:
                batch = _ask(state, next, batches)
            except StopIteration as end:
                return end.value
            yield batch
    finally:
        getattr(batches, "close", lambda: None)()  # a slice has none


def asking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `__next__` of an iterator whose loader is known."""

    @functools.wraps(original)
    def ask(self: Any) -> Any:
        outer = thread.asked
        if outer is not None:
            try:
                outer.took_from(self)
            except Exception:  # noqa: BLE001
                note_fault("inner")
            return original(self)
        state = self.__dict__.get("_fastload_doctor")
        return original(self) if state is None or not events.folder else _ask(state, original, self)

    setattr(ask, TIMED, original)
    return ask


def asking_itself(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `__next__` of a loader that is its own iterator; its first call, or one after an end, begins an epoch."""

    @functools.wraps(original)
    def ask(self: Any) -> Any:
        if thread.asked is not None or not events.folder:
            return original(self)
        try:
            state = LoaderState.of(self)
            if not state.is_open:
                LoaderState.epochs += 1
                state.iterator = weakref.ref(self)
                state.epoch_begins(clock())
        except Exception:  # noqa: BLE001  # a loader that cannot be known is not metered
            note_fault("loader")
            return original(self)
        return _ask(state, original, self)

    setattr(ask, TIMED, original)
    return ask


def _ask(state: LoaderState, following: Callable[[Any], Any], iterator: Any) -> Any:
    """Returns the next batch, and records the wait for it and the step before it."""
    recorder = None
    try:
        step = state.step_ends()
        if (recorder := thread.recorder) is not None:  # of a step of another loader
            recorder.pause()
    except Exception:  # noqa: BLE001  # another device meanwhile, a CUDA error that is the script's to see
        note_fault("step")
        step = "null"
    thread.asked, thread.current = state, None
    into = tuple(metering.parts.get("into", (0.0, 0.0)))
    if state.probe is not None:
        state.probe.clear()
    span = Span()
    try:
        batch = following(iterator)
    except StopIteration:
        LoaderState.epochs += 1
        events.write(_END % (state.id, span.begin, clock() - span.begin, step))
        state.returned, state.is_open = 0.0, False
        StepRecorder.end(None)  # of a step of another loader, which may not be asked again
        if state.trial is not None:
            state.trial.epoch_ends()
        raise
    finally:
        thread.asked = None
        LoaderState.next_s += clock() - span.begin
        LoaderState.nexts += 1
        if recorder is not None:
            recorder.go_on()
    try:
        wait, cpu, delay = span.taken()
        now = span.begin + wait
        received = [after - before for after, before in zip(metering.parts.get("into", into), into)]
        events.write(
            _NEXT % (state.id, span.begin, wait, cpu, delay, *received, _handed_over(batch), step, state.extras(now))
        )
        if state.trial is not None:
            state.trial.step_begins(state.id, now, wait)
        if not state.shape:
            state.note_shape(batch)
        state.record_step(batch)
        state.step_begins()
    except Exception:  # noqa: BLE001  # the batch is whole, and the script must get it
        note_fault("next")
    return batch


def training(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `torch.autograd.backward`, whose calls distinguish a training loop from a validation loop."""

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        state = thread.current
        if state is not None and not state.trains:
            state.trains = True
            events.write({"e": "trains", "id": state.id})
        return original(*args, **kwargs)

    return backward


def _handed_over(batch: Any) -> int:
    """Returns the samples in a batch: the length of a list of images, else its tensors' first dimension.

    Wraps `to` of classes in it, to time copies.
    """
    most = 0
    for thing in _parts(batch):
        shape = getattr(thing, "shape", None)
        if isinstance(shape, tuple):  # torch.Size is one
            most = max([most, *map(int, shape[:1])])
        elif "to" in vars(type(thing)) and callable(vars(type(thing))["to"]):
            time_copy(type(thing), "to")
    first = batch[0] if isinstance(batch, (list, tuple)) and batch else None
    if isinstance(first, (list, tuple)) and first and all(len(getattr(one, "shape", ())) == 3 for one in first):
        return len(first)
    return most or (len(batch) if isinstance(batch, (list, tuple)) else 0)


def _parts(batch: Any) -> list[Any]:
    """Returns what lies in the dicts, lists and tuples of a batch, the first ones of many."""
    found, leaves = [batch], []
    for thing in found:  # grows
        if isinstance(thing, dict):
            thing = list(thing.values())
        if isinstance(thing, (list, tuple)):
            found += thing[: max(0, _MOST_PARTS - len(found))]
        else:
            leaves.append(thing)
    return leaves


def time_copy(owner: Any, name: str, counts: Callable[..., bool] | None = None) -> None:
    """Wraps a method that copies to a device, to time its calls during a step of the loop's thread."""
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "__fastload__"):
        return

    @functools.wraps(original)
    def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
        if counts is not None and type(self) is not owner:
            return _as_before(owner, name, original, self, args, kwargs)
        state = thread.current
        if state is None:
            return original(self, *args, **kwargs)
        thread.current = None  # what it calls inside is part of it
        begin, delay_begin = clock(), waited_s()
        try:
            result = original(self, *args, **kwargs)
            if counts is None or counts(self, result, args, kwargs):
                delay = waited_s() - delay_begin
                state.copy += clock() - begin - delay
                state.copy_delay += delay
            return result
        finally:
            thread.current = state

    copy.__fastload__ = original  # type: ignore[attr-defined]
    patch(owner, name, copy)


_torch_functions = threading.RLock()


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


def moved(tensor: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of `Tensor.to` or `.cuda` made a copy for a device, and did not only cast."""
    named = "device" in kwargs or any(isinstance(word, str) or type(word).__name__ == "device" for word in args)
    return result is not tensor and bool(named or result.device != tensor.device)


def copied_in(tensor: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `tensor.copy_(source)` crossed to another device."""
    source = args[0] if args else kwargs.get("src")
    return bool(getattr(source, "device", None) != tensor.device)


class _Mark:
    """An event that a forked process never frees: there is no device, and torch would end the process."""

    def __init__(self, event: Any) -> None:
        self.event, self._pid = event, os.getpid()

    def __del__(
        self, pid: Any = os.getpid, keep: Any = ctypes.pythonapi.Py_IncRef, as_object: Any = ctypes.py_object
    ) -> None:
        if self._pid != pid():
            keep(as_object(self.event))


class Gpu:
    """The GPU's own time between two marks, read when it is available; None where CUDA was never initialized."""

    def __init__(self) -> None:
        self.cuda: Any = None
        self._open: list[tuple[_Mark, _Mark]] = []
        self._last: float | None = None

    def mark(self) -> _Mark | None:
        """Records an event on the current stream."""
        if self.cuda is None or not self.cuda.is_initialized():
            return None
        event = self.cuda.Event(enable_timing=True)
        event.record()
        return _Mark(event)

    def step_s(self, begin: _Mark | None) -> float | None:
        """Ends the step that began at a mark; returns the seconds of the latest step that has finished."""
        end = None if begin is None else self.mark()
        if begin is None or end is None:
            return None
        self._open.append((begin, end))
        while self._open and self._open[0][1].event.query():
            first, second = self._open.pop(0)
            self._last = first.event.elapsed_time(second.event) / 1e3
        return self._last


gpu = Gpu()
