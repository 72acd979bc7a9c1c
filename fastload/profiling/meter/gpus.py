"""Reads the counters of the GPUs that a job uses from NVIDIA's driver (NVML)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from fastload.system.advice import advice

GPU_EXTRA = advice("nvidia-ml-py")

_COUNTERS: dict[str, Callable[[Any, Any], float]] = {
    "utilization_percent": lambda nvml, one: nvml.nvmlDeviceGetUtilizationRates(one).gpu,
    "memory_bytes": lambda nvml, one: nvml.nvmlDeviceGetMemoryInfo(one).used,
    "power_w": lambda nvml, one: nvml.nvmlDeviceGetPowerUsage(one) / 1000,
    "sm_mhz": lambda nvml, one: nvml.nvmlDeviceGetClockInfo(one, nvml.NVML_CLOCK_SM),
}
_T = TypeVar("_T")


class Gpus:
    """Reads the counters of the GPUs that a job may use.

    `utilization_percent` is a duty cycle: the share of the driver's last sampling period (1/6 to 1 s) in which at least
    one kernel ran, however little of the GPU it used. 97 % means that the GPU was seldom idle, not that it was used
    well.

    Args:
        nvml: the module pynvml, or an object with the same functions; None: pynvml if it is installed.
        visible: in the form of CUDA_VISIBLE_DEVICES: numbers or UUIDs, of whole GPUs or MIG slices; None: the value of
            that variable. GPUs are numbered as by `nvidia-smi`; CUDA numbers them differently on machines with several
            kinds of GPU, unless CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """

    def __init__(self, nvml: Any = None, visible: str | None = None) -> None:
        # Counters that cannot be read, each with the reason; "gpu": all of them; the name of a MIG slice: that slice.
        self.absent: dict[str, str] = {}
        self._seen: set[str] = set()  # readings that succeeded once
        self._devices: dict[int, Any] = {}  # handles by index
        self._nvml = nvml
        try:
            if nvml is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
            self._find(os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible)
        except ImportError:
            self.absent["gpu"] = GPU_EXTRA
        except Exception as error:  # noqa: BLE001  # NVMLError by the module's own name: no driver, no device
            self.absent["gpu"] = reason_of(error)

    def _find(self, visible: str | None) -> None:
        nvml = self._nvml
        count, handle_of = int(nvml.nvmlDeviceGetCount()), nvml.nvmlDeviceGetHandleByIndex
        for word in map(str, range(count)) if visible is None else map(str.strip, visible.split(",")):
            found: dict[int, Any] = {}
            if word.isdigit() and int(word) < count:
                found = {int(word): handle_of(int(word))}
            elif word.startswith("MIG-"):
                handle = nvml.nvmlDeviceGetHandleByUUID(word)
                parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
                found = {int(nvml.nvmlDeviceGetIndex(parent)): handle}
                if not found.keys().isdisjoint(self._devices):
                    # CUDA uses only the first of several MIG slices (MIG user guide, "CUDA Device Enumeration").
                    self.absent[word] = f"another slice of GPU {min(found)} is read"
            elif word.startswith("GPU-"):  # CUDA accepts the beginning of a UUID
                for index in range(count):
                    uuid = nvml.nvmlDeviceGetUUID(handle_of(index))  # older releases of pynvml give bytes
                    if (uuid.decode() if isinstance(uuid, bytes) else uuid).startswith(word):
                        found[index] = handle_of(index)
            elif word:
                break  # as CUDA does: the first invalid entry ends the list
            for index, handle in found.items():
                self._devices.setdefault(index, handle)
        if not self._devices:
            self.absent["gpu"] = "CUDA_VISIBLE_DEVICES names no GPU" if count else "there is no GPU"

    def take(self, name: str, read: Callable[..., _T], *args: Any) -> _T | None:
        """Returns a reading, the driver's or another; None if it fails. One that never succeeded is not tried again."""
        if name in self.absent:
            return None
        try:
            found = read(*args)
        except Exception as error:  # noqa: BLE001  # the driver's or the system's: no reading is worth a training
            if name not in self._seen:
                self.absent[name] = reason_of(error)
            return None
        self._seen.add(name)
        return found

    @property
    def indices(self) -> list[int]:
        """Indices of the GPUs that are read, as `nvidia-smi` counts them."""
        return list(self._devices)

    def read(self) -> dict[str, float]:
        """Returns one reading: `gpuN.utilization_percent` and so on, without the counters that cannot be read."""
        return {
            name: float(value)
            for index, handle in self._devices.items()
            for counter, ask in _COUNTERS.items()
            if (value := self.take(name := f"gpu{index}.{counter}", ask, self._nvml, handle)) is not None
        }

    def used_by(self, pids: Sequence[int]) -> set[int]:
        """Returns the indices of the GPUs on which one of these processes computes, as far as the driver knows."""
        found = set()
        for index, handle in self._devices.items():
            with suppress(Exception):  # NVMLError: not supported here
                if any(one.pid in pids for one in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)):
                    found.add(index)
        return found

    def close(self) -> None:
        with suppress(Exception):  # NVMLError, or an object without it: nothing depends on it
            if "gpu" not in self.absent:
                self._nvml.nvmlShutdown()


def reason_of(error: BaseException) -> str:
    """Returns an error as text: its class and message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
