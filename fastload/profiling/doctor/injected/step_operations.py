"""The operations of torch that one training step on the CPUs consists of, so that it can be played again elsewhere."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .event_file import clock, events, note_fault
from .timed_calls import thread, waited_s

_MOST = 20_000  # operations; a step of more is not recorded
_DISPATCH_S = 1.5e-5  # that torch takes to give an operation to us; measured: 10 to 25 us
_SKIPPED = ("profiler.",)  # namespaces of operations that compute nothing
_IMAGES = 0  # the number of the batch's images among the tensors
_BY_NAME = ("dtype", "device", "layout", "memory_format")  # types of torch that are written down as names


class _NotWritten(Exception):
    """An argument that is not written down, such as a tensor on a device, or a generator of random numbers."""


class _Tensors:
    """The tensors of a step, numbered; the first are the images.

    Attributes:
        written: [shape, dtype, strides] of each, once for each operation that returned it.
    """

    def __init__(self, *tensors: Any) -> None:
        self.written: list[Any] = []
        self._known: dict[Any, int] = {}  # the latest number of the tensor that lies at an address in such a way
        for tensor in tensors:
            self.number_of(tensor)

    def plain(self, value: Any) -> Any:
        """Returns an argument as JSON has it; tensors as {"tensor": number}."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (list, tuple)):
            return [self.plain(one) for one in value]
        if isinstance(value, dict):
            return {name: self.plain(one) for name, one in value.items()}
        if hasattr(value, "data_ptr"):
            return {"tensor": self.number_of(value)}
        if type(value).__name__ in _BY_NAME:
            return {type(value).__name__: str(value).replace("torch.", "")}
        raise _NotWritten

    def number_of(self, tensor: Any, *, new: bool = False) -> int:
        """Returns the number of a tensor; `new`: an operation has returned it."""
        if tensor.device.type != "cpu":
            raise _NotWritten
        shape, dtype, strides = list(tensor.shape), str(tensor.dtype).replace("torch.", ""), list(tensor.stride())
        place = tensor.data_ptr(), tuple(shape), dtype, tuple(strides)
        if new or place not in self._known:
            if not new and self.written and [shape, dtype, strides] == self.written[_IMAGES]:
                return _IMAGES  # of a loader that reads ahead: the step is of the batch before
            self._known[place] = len(self.written)
            self.written.append([shape, dtype, strides])
        return self._known[place]


class StepRecorder:
    """Records each operation that the calling thread gives to torch: its name, its arguments, the tensors between.

    Of tensors only shape, dtype and strides are kept. What was recorded of a step that the loop left is dropped. One
    step at a time is recorded, without the operations that make a batch of another loader within it.
    """

    def __init__(self, loader: int, images: Any) -> None:
        self.loader = loader
        self._operations: list[Any] = []
        self._failed, self._tensors = False, _Tensors(images)
        self._mode = _mode_class()(self)
        self._mode.__enter__()
        self._begun, self._busy = _now(), 0.0  # seconds in operations, in recording them, and in pauses
        self._cost = 0.0  # of these, those that recording takes
        self._paused: float | None = None  # since when it records nothing

    @staticmethod
    def begin(loader: int, arrays: list[Any]) -> None:
        """Records the step that begins with a batch of such arrays; none without images whose format could change."""
        torch = sys.modules["torch"]
        images = next((one for one in arrays if len(one.shape) == 4), None)
        if not isinstance(images, torch.Tensor) or images.device.type != "cpu" or not images.is_contiguous():
            return
        if getattr(sys.modules.get("torch._dynamo.utils"), "counters", None):
            return  # it would be compiled again
        thread.recorder = StepRecorder(loader, images)

    @staticmethod
    def end(loader: int | None) -> float:
        """Ends the recording of a step, and writes it down; of this loader's only, if there is one.

        None: of any loader's, which was left, and is dropped. Returns the seconds that recording took.
        """
        recorder: StepRecorder | None = thread.recorder
        if recorder is None or loader not in (None, recorder.loader):
            return 0.0
        thread.recorder = None
        if recorder._leave() and loader is not None:
            recorder._write()
        return recorder._cost

    def pause(self) -> None:
        """Records nothing until `go_on`."""
        if self._leave():
            self._paused = _now()

    def go_on(self) -> None:
        """Records again after a pause."""
        if self._paused is not None and thread.recorder is self:
            self._busy, self._paused = self._busy + _now() - self._paused, None
            self._mode.__enter__()

    def _leave(self) -> bool:
        """Leaves torch's mode; returns whether it could."""
        current = importlib.import_module("torch.utils._python_dispatch")._get_current_dispatch_mode()
        if current is not self._mode:  # the script has entered one of its own, and not left it
            self._failed = True
            return False
        self._mode.__exit__(None, None, None)
        return True

    def _write(self) -> None:
        if not self._failed:
            between = _now() - self._begun - self._busy - _DISPATCH_S * len(self._operations)
            events.write({
                "e": "operations", "id": self.loader, "images": _IMAGES, "between": max(0.0, between),
                "tensors": self._tensors.written, "operations": self._operations,
                "threads": sys.modules["torch"].get_num_threads(),
            })  # fmt: skip

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation, and records it."""
        begun = _now()
        result = function(*args, **kwargs)
        ran = _now()
        self._note(function, args, kwargs, result)
        over = _now()
        self._busy += over - begun
        self._cost += over - ran + _DISPATCH_S
        return result

    def _note(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Takes one operation; with a failure recording is over."""
        name = str(function)
        if self._failed or name.startswith(_SKIPPED):
            return
        try:
            given = self._tensors.plain(args), self._tensors.plain(kwargs)
            results = result if isinstance(result, (list, tuple)) else [result]
            returned = [self._tensors.number_of(one, new=True) if hasattr(one, "data_ptr") else None for one in results]
            self._operations.append([name, *given, returned])
            self._failed = len(self._operations) > _MOST
        except _NotWritten:
            self._failed = True
        except Exception:  # noqa: BLE001  # a tensor of another kind, without an address
            note_fault("operations")
            self._failed = True
        if self._failed:
            self._operations, self._tensors = [], _Tensors()


def _now() -> float:
    """Returns the time on a clock that stands still while the calling thread waits for a CPU."""
    return clock() - waited_s()


_modes: list[Any] = []


def _mode_class() -> Any:
    """Returns the class of torch's mode that hands each operation to a recorder; torch is there by then."""
    if not _modes:

        class Mode(importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode):  # type: ignore[misc]
            def __init__(self, recorder: StepRecorder) -> None:
                super().__init__()
                self._recorder = recorder

            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return self._recorder.run(function, args, kwargs or {})

        _modes.append(Mode)
    return _modes[0]
