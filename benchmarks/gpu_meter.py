"""What the driver says of the GPU while it works, summed up; and a driver for machines without one."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastload.profiling.meter import Sampler


class PretendNvml:
    """Answers what a `Sampler` asks pynvml, with readings that rise and fall; for the CPU and the tests."""

    NVML_CLOCK_SM = 1

    def __init__(self) -> None:
        self.asked = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return []

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self.asked += 1
        return type("Rates", (), {"gpu": 90 + self.asked % 3, "memory": 40})

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return type("Memory", (), {"used": 2**30, "total": 2**33})

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 500_000 + 1000 * (self.asked % 3)

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:
        return 1980


@contextmanager
def counters(
    nvml: Any = None, *, skip_s: float = 0.0, every_s: float = 0.1, visible: str | None = None
) -> Iterator[dict[str, Any]]:
    """Reads the counters of this job's GPU until the block ends; then gives mean, lowest, highest and count of each.

    Where the driver says nothing, `error` is why.

    Args:
        nvml, visible, every_s: as in `Sampler`; None: pynvml.
        skip_s: the driver's utilization looks back up to a second: what came before is not counted.
    """
    summary: dict[str, Any] = {}
    with Sampler(nvml=nvml, visible=visible, every_s=every_s) as sampler:
        yield summary
    if "gpu" in sampler.absent:
        summary["error"] = sampler.absent["gpu"]
    values: dict[str, list[float]] = {}
    first = min(
        (name.partition(".")[0] for one in sampler.readings for name in one if name.startswith("gpu")), default=""
    )
    for reading in sampler.readings:
        for name, value in reading.items():
            device, _, counter = name.partition(".")
            if device == first and reading["at_s"] >= skip_s:
                values.setdefault(counter, []).append(value)
    for counter, found in values.items():
        summary[counter] = {
            "mean": statistics.fmean(found), "lowest": min(found), "highest": max(found), "count": len(found),
        }  # fmt: skip
