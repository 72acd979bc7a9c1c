"""What the driver (NVML) says of the GPUs that a job uses."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

GPU_EXTRA = "pynvml is not installed: pip install 'fastload[gpu]'"


class Gpus:
    """Reads the counters of the GPUs that a job may use.

    `utilization_percent` is a duty cycle: the part of the driver's last 1/6 to 1 s in which at least one kernel ran,
    however little of the GPU it used. 97 % says that the GPU was seldom idle, not that it was used well.

    Args:
        nvml: the module pynvml, or an object with the same functions; None: pynvml, if it is there.
        visible: as CUDA_VISIBLE_DEVICES: numbers or UUIDs, of whole GPUs or MIG slices; None: that variable. Numbers
            are those of `nvidia-smi`; CUDA's own differ on machines with several kinds of GPU, unless
            CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Attributes:
        absent: by counter, or `gpu` for all, why it cannot be read; by name, slices that are not read.
    """

    def __init__(self, nvml: Any = None, visible: str | None = None) -> None:
        self.absent: dict[str, str] = {}
        self._devices: dict[int, Any] = {}  # handles by index
        self._seen: set[str] = set()
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
            self.absent["gpu"] = said(error)

    def _find(self, visible: str | None) -> None:
        nvml = self._nvml
        count = int(nvml.nvmlDeviceGetCount())
        if visible is None:
            self._devices = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)}
        for word in (visible or "").split(","):
            word = word.strip()
            if word.isdigit() and int(word) < count:
                self._add(int(word), nvml.nvmlDeviceGetHandleByIndex(int(word)), word)
            elif word.startswith("MIG-"):
                handle = nvml.nvmlDeviceGetHandleByUUID(word)
                parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
                self._add(int(nvml.nvmlDeviceGetIndex(parent)), handle, word)
            elif word.startswith("GPU-"):  # its beginning is enough for CUDA
                every = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)}
                for index, one in every.items():
                    if self._uuid(one).startswith(word):
                        self._add(index, one, word)
            elif word:
                break  # as CUDA does: the first that is none ends the list
        if not self._devices:
            self.absent["gpu"] = "CUDA_VISIBLE_DEVICES names no GPU" if count else "there is no GPU"

    def _add(self, index: int, handle: Any, word: str) -> None:
        # Of several slices CUDA uses one (MIG user guide, "CUDA Device Enumeration"): the first.
        if index not in self._devices:
            self._devices[index] = handle
        elif word.startswith("MIG-"):
            self.absent[word] = f"another slice of GPU {index} is read"

    def _uuid(self, handle: Any) -> str:
        uuid = self._nvml.nvmlDeviceGetUUID(handle)
        return uuid.decode() if isinstance(uuid, bytes) else str(uuid)  # older releases of pynvml give bytes

    @property
    def indices(self) -> list[int]:
        """Of the GPUs that are read, as `nvidia-smi` counts them."""
        return list(self._devices)

    def read(self) -> dict[str, float]:
        """One reading, `gpuN.utilization_percent` and so on; what cannot be read is left out, and named in `absent`."""
        reading: dict[str, float] = {}
        nvml = self._nvml
        for index, handle in self._devices.items():
            asked: dict[str, Callable[[Any], float]] = {
                "utilization_percent": lambda one: float(nvml.nvmlDeviceGetUtilizationRates(one).gpu),
                "memory_bytes": lambda one: float(nvml.nvmlDeviceGetMemoryInfo(one).used),
                "power_w": lambda one: nvml.nvmlDeviceGetPowerUsage(one) / 1000,
                "sm_mhz": lambda one: float(nvml.nvmlDeviceGetClockInfo(one, nvml.NVML_CLOCK_SM)),
            }
            for counter, ask in asked.items():
                name = f"gpu{index}.{counter}"
                if name in self.absent:
                    continue
                try:
                    reading[name] = ask(handle)
                    self._seen.add(name)
                except Exception as error:  # noqa: BLE001  # NVMLError: not supported here, or lost
                    if name not in self._seen:
                        self.absent[name] = said(error)
        return reading

    def used_by(self, pids: Sequence[int]) -> set[int]:
        """The GPUs on which one of these processes computes, as far as the driver tells."""
        found = set()
        for index, handle in self._devices.items():
            try:
                running = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except Exception:  # noqa: BLE001  # NVMLError: not told here
                continue
            if any(process.pid in pids for process in running):
                found.add(index)
        return found

    def close(self) -> None:
        """Lets the driver go."""
        try:
            if "gpu" not in self.absent:
                self._nvml.nvmlShutdown()
        except Exception:  # noqa: BLE001  # NVMLError, or an object without it: nothing depends on it
            pass


def said(error: BaseException) -> str:
    """An error as a reason: its name and what it says."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
