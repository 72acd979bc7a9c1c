"""What the driver says of the GPU while it works: utilization, power, clock."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class PretendNvml:
    """Answers what `Meter` asks pynvml, with readings that rise and fall; for the CPU and the tests."""

    NVML_CLOCK_SM = 1

    def __init__(self) -> None:
        self.asked = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self.asked += 1
        return type("Rates", (), {"gpu": 90 + self.asked % 3, "memory": 40})

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 500_000 + 1000 * (self.asked % 3)

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:
        return 1980


class Meter:
    """Reads utilization, power and clock of device 0 beside the work, in a thread.

    Args:
        nvml: the module pynvml, or an object with the same functions.
        period_s: between two readings. The driver renews its utilization every 1/6 to 1 s.
    """

    def __init__(self, nvml: Any, period_s: float = 0.1) -> None:
        nvml.nvmlInit()
        self._nvml, self._handle, self.period_s = nvml, nvml.nvmlDeviceGetHandleByIndex(0), period_s

    def read(self) -> dict[str, float]:
        """One reading; a counter that the driver does not have is left out."""
        nvml, handle = self._nvml, self._handle
        asked: dict[str, Callable[[], float]] = {
            "utilization_percent": lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "sm_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        }
        reading = {}
        for name, ask in asked.items():
            try:
                reading[name] = ask()
            except Exception:  # noqa: BLE001  # NVMLError by the module's own name: not supported here
                continue
        return reading

    @contextmanager
    def sampling(self, *, skip_s: float = 0.0) -> Iterator[dict[str, Any]]:
        """Reads until the block ends; the dict then holds mean, lowest, highest and count of each counter.

        Args:
            skip_s: the driver's utilization looks back up to a second: what came before is not counted.
        """
        summary: dict[str, Any] = {}
        readings: list[dict[str, float]] = []
        stop = threading.Event()

        def sample() -> None:
            if stop.wait(skip_s):
                return
            readings.append(self.read())
            while not stop.wait(self.period_s):
                readings.append(self.read())

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield summary
        finally:
            stop.set()
            thread.join()
            for name in ("utilization_percent", "power_w", "sm_mhz"):
                values = [reading[name] for reading in readings if name in reading]
                if values:
                    summary[name] = {
                        "mean": statistics.fmean(values), "lowest": min(values), "highest": max(values),
                        "count": len(values),
                    }  # fmt: skip
