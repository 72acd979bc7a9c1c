"""Times copies of a batch to a device, by the loop's thread within a step, and a GPU's own work."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from .event_file import clock
from .timed_calls import patch, thread, waited_s


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
