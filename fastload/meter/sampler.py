"""A thread that reads what driver and system say of a job, now and then."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import psutil

from fastload.errors import OptionError
from fastload.meter.family import Rates, cpu_seconds, disk_bytes_read, family_memory, family_of
from fastload.meter.gpus import Gpus, said

MOST_READINGS = 4096
"""Kept. Beyond, every second one is dropped, and readings are taken half as often."""

_FAMILY_EVERY_S = 1.0
_MEMORY_COST = 1000  # memory is read again after so many times as long as reading it took


def _disks() -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = psutil.disk_io_counters(perdisk=True, nowrap=False)
    return found


class Sampler:
    """Readings of the GPUs, and of a process with all that descend from it.

    Args:
        pid: of the process; None: this one.
        nvml: as in `Meter`.
        visible: CUDA_VISIBLE_DEVICES of the process; None: as it is here.
        every_s: between two readings. The driver renews its utilization every 1/6 to 1 s.
        begun_s: `time.perf_counter()` of the moment that `at_s` counts from; None: now.
        told: called with each reading, in the sampler's thread.
        disks: counters by disk, as psutil gives them.

    Attributes:
        absent: what cannot be read here, and why; `gpu`: nothing of it; `readings`: there are none from then on.
    """

    def __init__(
        self,
        pid: int | None = None,
        *,
        nvml: Any = None,
        visible: str | None = None,
        every_s: float = 0.1,
        begun_s: float | None = None,
        told: Callable[[Mapping[str, float]], None] | None = None,
        disks: Callable[[], Mapping[str, Any] | None] = _disks,
    ) -> None:
        if not every_s > 0:
            raise OptionError(f"every_s={every_s!r}: give seconds above 0")
        self._pid = os.getpid() if pid is None else pid
        self._every_s = every_s
        self._begun_s = time.perf_counter() if begun_s is None else begun_s
        self._told = told
        self._disks = disks
        self._gpus = Gpus(nvml, visible)
        self.absent = self._gpus.absent
        self._used: set[int] = set()
        self._family: list[int] = []
        self._family_due_s = self._memory_due_s = 0.0
        self._cpu, self._disk, self._busy = Rates(), Rates(), Rates()
        self._seen: set[str] = set()
        self._readings: list[dict[str, float]] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Sampler:
        """Begins to read, in a daemon thread."""
        if self._thread is not None:
            raise OptionError("a Sampler is started once")
        self.read()  # rates count from here
        self._thread = threading.Thread(target=self._run, name="fastload-sampler", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the thread, after a last reading."""
        if self._thread is not None and not self._stopping.is_set():
            self._stopping.set()
            self._thread.join()
            self._gpus.close()

    def __enter__(self) -> Sampler:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def readings(self) -> tuple[Mapping[str, float], ...]:
        """Those so far; of GPUs only those that the job is known to use, where the driver tells."""
        readings, used = list(self._readings), self._used
        if not used:
            return tuple(readings)
        others = tuple(f"gpu{index}." for index in self._gpus.indices if index not in used)
        return tuple({name: value for name, value in one.items() if not name.startswith(others)} for one in readings)

    def read(self) -> dict[str, float]:
        """One reading, kept."""
        now_s = time.perf_counter()
        reading = {"at_s": now_s - self._begun_s, **self._gpus.read()}
        if now_s >= self._family_due_s:
            self._family_due_s = now_s + _FAMILY_EVERY_S
            self._try("processes", self._read_family, reading)
            self._try("disk_read_bytes_per_s", self._read_bytes, reading)
            self._try("disk_busy_percent", self._read_busy, reading)
        self._try("cpu_percent", self._read_cpu, reading)
        if now_s >= self._memory_due_s:
            begin_s = time.perf_counter()
            self._try("memory_bytes", self._read_memory, reading)
            # Of several processes: it walks the tables of all mapped pages, 10 ms each and more.
            self._memory_due_s = now_s + max(_FAMILY_EVERY_S, _MEMORY_COST * (time.perf_counter() - begin_s))
        if len(self._readings) >= MOST_READINGS:
            del self._readings[1::2]
            self._every_s *= 2
        self._readings.append(reading)
        if self._told is not None:
            self._told(reading)
        return reading

    def _try(self, name: str, read: Callable[[dict[str, float]], None], reading: dict[str, float]) -> None:
        """What cannot be read is left out, and named; what once could be is tried again."""
        if name in self.absent:
            return
        try:
            read(reading)
            self._seen.add(name)
        except Exception as error:  # noqa: BLE001  # psutil's, the system's: a reading is not worth a training
            if name not in self._seen:
                self.absent[name] = said(error)

    def _read_family(self, reading: dict[str, float]) -> None:
        self._family = family_of(self._pid)
        self._used |= self._gpus.used_by(self._family)

    def _read_cpu(self, reading: dict[str, float]) -> None:
        cpu = self._cpu.of(cpu_seconds(self._family))
        if cpu:
            reading["cpu_percent"] = 100 * sum(cpu.values())
            reading |= {f"cpu_percent.{pid}": 100 * rate for pid, rate in cpu.items()}

    def _read_memory(self, reading: dict[str, float]) -> None:
        memory = family_memory(self._family)
        if memory:
            reading["memory_bytes"] = float(memory)

    def _read_bytes(self, reading: dict[str, float]) -> None:
        read = {pid: disk_bytes_read(pid) for pid in self._family}
        rates = self._disk.of({pid: float(value) for pid, value in read.items() if value is not None})
        if rates:
            reading["disk_read_bytes_per_s"] = sum(rates.values())

    def _read_busy(self, reading: dict[str, float]) -> None:
        disks = self._disks() or {}
        busy = {number: getattr(one, "busy_time", None) for number, one in enumerate(disks.values())}
        shares = self._busy.of({number: value / 1e3 for number, value in busy.items() if value is not None})
        if shares:
            reading["disk_busy_percent"] = 100 * min(1.0, max(shares.values()))

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._every_s):
                self.read()
            self.read()
        except Exception as error:  # noqa: BLE001  # of whoever is told: nobody waits for this thread, so it is named
            self.absent["readings"] = said(error)
