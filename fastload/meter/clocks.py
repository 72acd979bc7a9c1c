"""What the times of a step are read from: the host's clock, or events on the stream that computes."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol, runtime_checkable

from fastload.errors import OptionError


@runtime_checkable
class Clock(Protocol):
    """Marks on a time line. One thread makes them; what lies between two is known once the later one has settled."""

    name: str

    def mark(self) -> Any:
        """A mark behind all that was done so far."""
        ...

    def settled(self, mark: Any) -> bool:
        """Whether everything before the mark is done, without waiting."""
        ...

    def settle(self, mark: Any) -> None:
        """Waits until everything before the mark is done."""
        ...

    def between_s(self, earlier: Any, later: Any) -> float:
        """Seconds between two settled marks."""
        ...

    def drop(self, mark: Any) -> None:
        """The mark is not needed any more."""
        ...


class HostClock:
    """The host's clock: a mark is a time."""

    name = "cpu"
    mark = staticmethod(time.perf_counter)

    def settled(self, mark: float) -> bool:
        """See `Clock.settled`."""
        return True

    def settle(self, mark: float) -> None:
        """See `Clock.settle`."""

    def between_s(self, earlier: float, later: float) -> float:
        """See `Clock.between_s`."""
        return later - earlier

    def drop(self, mark: float) -> None:
        """See `Clock.drop`."""


class CudaClock:
    """Events on the current stream of a CUDA device: what the device did and waited for, not the host that runs ahead.

    Args:
        index: of the device; None: the current one.
    """

    def __init__(self, index: int | None = None) -> None:
        import torch

        self._torch: Any = torch
        self.index: int = torch.cuda.current_device() if index is None else index
        self.name = f"cuda:{self.index}"
        self._free: list[Any] = []

    def mark(self) -> Any:
        """See `Clock.mark`."""
        # Making an event takes 3 times as long as recording one.
        event = self._free.pop() if self._free else self._torch.cuda.Event(enable_timing=True)
        event.record(self._torch.cuda.current_stream(self.index))
        return event

    def settled(self, mark: Any) -> bool:
        """See `Clock.settled`."""
        return bool(mark.query())

    def settle(self, mark: Any) -> None:
        """See `Clock.settle`."""
        mark.synchronize()

    def between_s(self, earlier: Any, later: Any) -> float:
        """See `Clock.between_s`."""
        return float(earlier.elapsed_time(later)) / 1e3

    def drop(self, mark: Any) -> None:
        """See `Clock.drop`."""
        self._free.append(mark)


def open_clock(device: Any) -> Clock:
    """The clock for a device; None: CUDA's if this process computes on it, else the host's.

    Raises:
        OptionError: not a device, or one that cannot be timed.
    """
    if isinstance(device, Clock):
        return device
    torch: Any = sys.modules.get("torch")
    if device is None:
        return CudaClock() if torch is not None and torch.cuda.is_initialized() else HostClock()
    kind, _, number = str(device).partition(":")
    if kind == "cpu":
        return HostClock()
    if kind != "cuda" or not (number.isdigit() or not number):
        raise OptionError(
            f"device={str(device)!r}: a Meter times the CPU or CUDA. Give None, 'cpu', 'cuda' or 'cuda:1'; on other "
            f"devices 'cpu' is right if the loop waits for each step, as loss.item() does."
        )
    import torch as torch_module

    if not torch_module.cuda.is_available() or int(number or 0) >= torch_module.cuda.device_count():
        raise OptionError(
            f"device={str(device)!r}: there are {torch_module.cuda.device_count()} CUDA devices, counted from 0. "
            f"Leave device out, and a Meter finds out what is computed on."
        )
    return CudaClock(int(number) if number else None)
