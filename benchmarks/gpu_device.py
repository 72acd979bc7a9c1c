"""The machine under `gpu.py`: a CUDA device, or the CPU in its place, where the plumbing is tried.

Device work is asynchronous: what is timed is waited for, or lies between two events on the device itself.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from PIL import Image

from fastload.device import Backend, DeviceMemory
from fastload.timing.clocks import HostClock
from gpu_meter import PretendNvml

_CALIBRATION_CYCLES = 50_000_000


class Event(Protocol):
    """A point in the device's work."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this point to a later one."""
        ...


class Device(Protocol):
    """What the sections ask of the machine they measure.

    Attributes:
        kind: "cuda", or "cpu" where figures mean nothing.
        torch: where tensors are made.
        loader: what `FastLoader(device=...)` is given.
    """

    kind: str
    torch: torch.device
    loader: Any

    def facts(self) -> dict[str, Any]:
        """Name, memory and what else tells one device from another."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has done all it was given."""
        ...

    def event(self, *, blocking: bool = False) -> Event:
        """An event; a blocking one is waited for without keeping a CPU core busy."""
        ...

    def delay(self, seconds: float) -> None:
        """Keeps the device busy for about so long; returns at once."""
        ...

    def reset_peaks(self) -> None:
        """Begins to look for the most memory in use anew."""
        ...

    def peaks(self) -> dict[str, int]:
        """Most bytes in use since then: of the device, as held by torch's allocator, and pinned ones of the host.

        Pinned ones are those that the loader pins, and apart those of torch's allocator of pinned memory.
        """
        ...

    def nvml(self) -> Any:
        """What reads the device's counters; None: pynvml, if it is there."""
        ...


class Registered:
    """Counts the bytes that a class of backends pins by itself, which torch's allocator of pinned memory does not know.

    Attributes:
        now: bytes that are pinned; `peak` is the most since it was set.
    """

    def __init__(self, backend: type[Backend]) -> None:
        self.now = self.peak = 0
        pin = backend.pin

        def counted(one: Backend, memory: NDArray[np.uint8]) -> Callable[[], None] | None:
            unpin, num_bytes = pin(one, memory), memory.nbytes
            if unpin is None:
                return None
            self.now += num_bytes
            self.peak = max(self.peak, self.now)

            def undo() -> None:
                self.now -= num_bytes
                unpin()

            return undo

        backend.pin = counted  # type: ignore[method-assign]


class CudaDevice:
    """The current CUDA device."""

    kind, loader = "cuda", "cuda"

    def __init__(self) -> None:
        self._registered = Registered(Backend)
        self.torch = torch.device("cuda", torch.cuda.current_device())
        self._cycles_per_s = 0.0

    def facts(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.torch)
        return {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "l2_mib": round(getattr(properties, "L2_cache_size", 0) / 2**20, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "devices": torch.cuda.device_count(),
            "mig": "MIG" in properties.name or "MIG" in os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def event(self, *, blocking: bool = False) -> Event:
        return torch.cuda.Event(enable_timing=True, blocking=blocking)

    def delay(self, seconds: float) -> None:
        if not self._cycles_per_s:
            begin, end = self.event(), self.event()
            for _ in range(3):  # the first ones load the kernel and bring up the clock
                begin.record()
                torch.cuda._sleep(_CALIBRATION_CYCLES)
                end.record()
                end.synchronize()
            self._cycles_per_s = _CALIBRATION_CYCLES / begin.elapsed_time(end) * 1e3
        torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch)
        if hasattr(torch.cuda, "reset_peak_host_memory_stats"):
            torch.cuda.reset_peak_host_memory_stats()
        self._registered.peak = self._registered.now

    def peaks(self) -> dict[str, int]:
        found = {
            "device_bytes": torch.cuda.max_memory_allocated(self.torch),
            "device_held_bytes": torch.cuda.max_memory_reserved(self.torch),
            "pinned_bytes": self._registered.peak,
        }
        if hasattr(torch.cuda, "host_memory_stats"):
            found["pinned_by_torch_bytes"] = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
        return found

    def nvml(self) -> Any:
        return None


class _HostEvent:
    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _HostEvent) -> float:
        return (end.at - self.at) * 1e3


class HostBackend(Backend):
    """What `FastLoader` asks of a device, with memory and no streams: its producer and caches run without one."""

    def __init__(self) -> None:
        self.clock = HostClock()

    def pin(self, memory: NDArray[np.uint8]) -> Callable[[], None]:
        return lambda: None

    def side_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, host: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        return host.clone(memory_format=torch.preserve_format) if into is None else into.copy_(host)

    def decoding(self) -> AbstractContextManager[None]:
        return nullcontext()

    def decode_jpegs(self, files: Sequence[torch.Tensor], channels: int) -> list[torch.Tensor]:
        images = []
        for file in files:
            with Image.open(io.BytesIO(file.numpy().tobytes())) as image:
                pixels = np.array(image.convert({1: "L", 3: "RGB"}[channels]))
            images.append(torch.from_numpy(pixels.reshape(*pixels.shape[:2], channels)).permute(2, 0, 1).contiguous())
        return images

    def memory(self) -> DeviceMemory:
        system = psutil.virtual_memory()
        return DeviceMemory(system.available, system.total)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def fill(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)

    def drain(self) -> None:
        pass

    def note_read(self, tensors: Iterable[torch.Tensor]) -> None:
        pass

    def record(self, again: None = None) -> None:
        return None

    def finished(self, event: None) -> bool:
        return True

    def synchronize(self, event: None) -> None:
        pass

    def hand_over(self, event: None, tensors: Iterable[torch.Tensor]) -> None:
        pass


class CpuDevice:
    """The CPU where a CUDA device is expected: every line of the sections runs, and no figure means anything."""

    kind, loader = "cpu", HostBackend()
    torch = torch.device("cpu")

    def __init__(self) -> None:
        self._registered = Registered(HostBackend)

    def facts(self) -> dict[str, Any]:
        return {"name": "cpu, not a GPU figure"}

    def synchronize(self) -> None:
        pass

    def event(self, *, blocking: bool = False) -> Event:
        return _HostEvent()

    def delay(self, seconds: float) -> None:
        pass

    def reset_peaks(self) -> None:
        self._registered.peak = self._registered.now

    def peaks(self) -> dict[str, int]:
        return {"host_bytes": psutil.Process().memory_info().rss, "pinned_bytes": self._registered.peak}

    def nvml(self) -> Any:
        return PretendNvml()


def open_device(kind: str) -> Device:
    """The device of that kind: "cuda" or "cpu"."""
    if kind == "cpu":
        torch.set_num_threads(1)  # tiny tensors: teams of threads would take a hundred times as long
        return CpuDevice()
    return CudaDevice()
