"""A thread that reads the counters of GPUs, processes and disks at intervals, and the functions that read them."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import psutil

from fastload.distributed.ranks import local_world_size
from fastload.errors import OptionError
from fastload.format.writer import writer_name
from fastload.system import native
from fastload.system.advice import advice
from fastload.system.machine import available_cpus
from fastload.timing.stopwatch import process_cpu_s

MOST_READINGS = 4096
"""Number of readings kept. When it is exceeded, every second one is dropped and readings are taken half as often."""

_SLOW_EVERY_S = 1.0  # between two looks at disks, and at which GPUs the processes use
_FAMILY_COST = 100  # processes are listed again after this many times the time that it took
_MEMORY_COST = 1000  # memory is read again after this many times the time that reading it took


class Sampler:
    """Reads the counters of the GPUs, and of a process with all its descendants, in a thread.

    Args:
        pid: of the process; None: this one.
        nvml: as in `Meter`.
        visible: CUDA_VISIBLE_DEVICES of the process; None: the value in this process.
        every_s: seconds between two readings. The driver updates its utilization every 1/6 to 1 s.
        begun_s: `time.perf_counter()` at the moment from which `at_s` counts; None: now.
        callback: called with each reading, in the sampler's thread.
    """

    def __init__(
        self,
        pid: int | None = None,
        *,
        nvml: Any = None,
        visible: str | None = None,
        every_s: float = 0.1,
        begun_s: float | None = None,
        callback: Callable[[Mapping[str, float]], None] | None = None,
    ) -> None:
        if not every_s > 0:
            raise OptionError(f"every_s={every_s!r}: give seconds above 0")
        self._every_s = every_s
        self._begun_s = time.perf_counter() if begun_s is None else begun_s
        self._callback = callback
        self._counters = _Counters(os.getpid() if pid is None else pid, Gpus(nvml, visible))
        # What cannot be read here, each with the reason; "gpu": no GPU counter at all; "readings": this one failed.
        self.absent = self._counters.gpus.absent
        self._readings: list[dict[str, float]] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Sampler:
        """Starts the thread, a daemon; returns the sampler."""
        if self._thread is not None:
            raise OptionError("a Sampler is started once")
        self.read()  # rates count from here
        self._thread = threading.Thread(target=self._run, name="fastload-sampler", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Takes a last reading and ends the thread."""
        if self._thread is not None and not self._stopping.is_set():
            self._stopping.set()
            self._thread.join()
            self._counters.gpus.close()

    def __enter__(self) -> Sampler:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def readings(self) -> tuple[Mapping[str, float], ...]:
        """The readings so far; only of those GPUs that the job is known to use, if the driver knows."""
        gpus = self._counters.gpus.indices
        used = self._counters.used or gpus
        others = tuple(f"gpu{index}." for index in gpus if index not in used)
        return tuple(
            {name: value for name, value in one.items() if not name.startswith(others)} for one in list(self._readings)
        )

    def read(self) -> dict[str, float]:
        """Takes a reading, keeps it and returns it."""
        now_s = time.perf_counter()
        reading = {"at_s": now_s - self._begun_s, **self._counters.read(now_s)}
        if len(self._readings) >= MOST_READINGS:
            del self._readings[1::2]
            self._every_s *= 2
        self._readings.append(reading)
        if self._callback is not None:
            self._callback(reading)
        return reading

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._every_s):
                self.read()
            self.read()
        except Exception as error:  # noqa: BLE001  # from the callback: nobody joins this thread to see it
            self.absent["readings"] = reason_of(error)


class _Counters:
    """The counters of the GPUs, and of a process with all its descendants, some of which are not read each time.

    Attributes:
        used: the GPUs that the processes are known to use.
    """

    def __init__(self, pid: int, gpus: Gpus) -> None:
        self.gpus, self.used, self._pid = gpus, set[int](), pid
        self._family: list[int] = []
        self._family_due_s = self._slow_due_s = self._memory_due_s = 0.0
        self._cpu, self._disk, self._busy, self._others = Rates(), Rates(), Rates(), Rates()

    def read(self, now_s: float) -> dict[str, float]:
        """Returns the counters that are due."""
        reading, take = self.gpus.read(), self.gpus.take
        if now_s >= self._family_due_s:
            found = take("processes", family_of, self._pid)
            self._family = self._family if found is None else found
            reading |= take("others_cpu_percent", self._read_others) or {}
            self._family_due_s = now_s + _FAMILY_COST * (time.perf_counter() - now_s)
        if now_s >= self._slow_due_s:
            self._slow_due_s = now_s + _SLOW_EVERY_S
            self.used |= self.gpus.used_by(self._family)
            reading |= take("disk_read_bytes_per_s", self._read_bytes) or {}
            reading |= take("disk_busy_percent", self._read_busy) or {}
        reading |= take("cpu_percent", self._read_cpu) or {}
        if now_s >= self._memory_due_s:
            begin_s = time.perf_counter()
            reading |= take("memory_bytes", self._read_memory) or {}
            # For several processes the kernel walks the page tables of each: 10 ms and more.
            self._memory_due_s = now_s + max(_SLOW_EVERY_S, _MEMORY_COST * (time.perf_counter() - begin_s))
        return reading

    def _read_cpu(self) -> dict[str, float]:
        cpu = self._cpu.of(cpu_seconds(self._family))
        if not cpu:
            return {}
        return {"cpu_percent": 100 * sum(cpu.values())} | {f"cpu_percent.{pid}": 100 * cpu[pid] for pid in cpu}

    def _read_others(self) -> dict[str, float]:
        others_s = others_cpu_seconds(self._family)
        rates = self._others.of({} if others_s is None else {0: others_s})
        return {"others_cpu_percent": 100 * max(0.0, rates[0])} if rates else {}

    def _read_memory(self) -> dict[str, float]:
        if len(self._family) == 1:
            # A single process shares no pages, and these counters cost 15 us where PSS costs 10 ms.
            memory = 1024 * sum(_proc_numbers(self._family[0], "status", "RssAnon:", "RssShmem:"))
        else:
            memory = process_memory(*self._family)
        return {"memory_bytes": float(memory)} if memory else {}

    def _read_bytes(self) -> dict[str, float]:
        # From the disk, not from the page cache.
        read = {pid: numbers[0] for pid in self._family if (numbers := _proc_numbers(pid, "io", "read_bytes:"))}
        rates = self._disk.of(read)
        return {"disk_read_bytes_per_s": sum(rates.values())} if rates else {}

    def _read_busy(self) -> dict[str, float]:
        disks = enumerate((psutil.disk_io_counters(perdisk=True, nowrap=False) or {}).values())
        shares = self._busy.of({number: one.busy_time / 1e3 for number, one in disks if hasattr(one, "busy_time")})
        return {"disk_busy_percent": 100 * min(1.0, max(shares.values()))} if shares else {}


def family_of(pid: int) -> list[int]:
    """Returns the ids of a process and all its descendants that are alive; empty if the process has ended."""
    found = [pid]
    if not Path(f"/proc/{pid}/task").is_dir():
        try:
            return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        except psutil.Error:
            return []
    for member in found:  # grows
        # From the kernel's lists of children: psutil looks at every process of the machine, which takes 1 ms and more.
        for listed in Path(f"/proc/{member}/task").glob("*/children"):
            with suppress(OSError):  # the thread or the process has ended
                found += map(int, listed.read_text().split())
    return found


def _proc_numbers(pid: int, file: str, *names: str) -> list[int]:
    """Returns the numbers on the lines of /proc/PID/file that begin with these names; none if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) for line in lines if line.startswith(names)]


def process_memory(*pids: int) -> int:
    """Returns the anonymous and shared memory of processes in bytes, 0 for those that have ended.

    Mapped files do not count: they are the kernel's page cache. A page shared by n processes counts as 1/n in each
    (PSS).
    """
    return 1024 * sum(sum(_proc_numbers(pid, "smaps_rollup", "Pss_Anon:", "Pss_Shmem:")) for pid in pids)


class Rates:
    """Rates at which counters of several processes rise. A process that is new counts from its first value."""

    def __init__(self) -> None:
        self._last: Mapping[int, float] = {}
        self._at_s = 0.0

    def of(self, now: Mapping[int, float]) -> dict[int, float]:
        """Returns for each process the increase of its counter per second since the last call; empty the first time."""
        at_s, last = time.perf_counter(), self._last
        taken, self._last, self._at_s = at_s - self._at_s, now, at_s
        return {pid: (value - last[pid]) / taken for pid, value in now.items() if pid in last and taken > 0}


def cpu_seconds(pids: list[int]) -> dict[int, float]:
    return {pid: seconds for pid in pids if (seconds := process_cpu_s(pid)) is not None}


def others_cpu_seconds(family: list[int]) -> float | None:
    """Returns the seconds that the CPUs which a process may use were busy with neither its family nor this process.

    The family is a process with its descendants, as `family_of` lists them. Children that have ended count too, and in
    a DDP job the ranks that the same launcher started. Other machines in the same hardware, which take time from this
    one, are others. None: only Linux says it.
    """
    if not Path("/proc/stat").exists() or not family:
        return None
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    allowed = os.sched_getaffinity(family[0])
    times = [one for cpu, one in enumerate(psutil.cpu_times(percpu=True)) if cpu in allowed]
    busy_s: float = sum(getattr(one, name) for one in times for name in names)
    ranks = family_of(os.getppid()) if local_world_size() > 1 else []
    ticks = 0
    for pid in {*family, *ranks, os.getpid()}:
        with suppress(OSError, IndexError):  # it has ended
            # After the name, which may have any character: 11 others, then ticks of it and of children it waited for.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return busy_s - ticks / os.sysconf("SC_CLK_TCK")


class OthersCpus:
    """Measures how many CPUs other programs use while `with` blocks run, all blocks of one object together.

    The kernel counts in ticks of 10 ms, so blocks of less than a second in all say little. For one process with its
    descendants, this one.
    """

    def __init__(self) -> None:
        self._used_s: float | None = 0.0
        self._elapsed_s = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        before_s, begin_s = others_cpu_seconds(family_of(os.getpid())), time.perf_counter()
        yield
        after_s = others_cpu_seconds(family_of(os.getpid()))
        self._elapsed_s += time.perf_counter() - begin_s
        known = None not in (self._used_s, before_s, after_s)
        self._used_s = (self._used_s or 0.0) + (after_s or 0.0) - (before_s or 0.0) if known else None

    @property
    def cpus(self) -> float | None:
        """Mean number of CPUs, of those that this process may use; None: not measured, or only Linux says it."""
        return None if self._used_s is None or not self._elapsed_s else taken_cpus(self._used_s / self._elapsed_s)


def mean_others(readings: Sequence[Mapping[str, float]], spans_s: Iterable[tuple[float, float]]) -> float:
    """Returns how many CPUs, of those that this process may use, others used in these spans; 0.0 where nobody looked.

    Spans are counted as the readings' `at_s`.
    """
    return taken_cpus(mean_cpus(readings, spans_s, "others_cpu_percent"))


def mean_cpus(
    readings: Sequence[Mapping[str, float]], spans_s: Iterable[tuple[float, float]], name: str = "cpu_percent"
) -> float:
    """Returns how many CPUs the sampled processes used in these spans, or whoever `name` counts; see `mean_others`.

    Each reading is the mean since the one before it.
    """
    known = [(one["at_s"], one[name] / 100) for one in readings if name in one]
    used_s = elapsed_s = 0.0
    for begin_s, end_s in spans_s:
        before_s = 0.0
        for at_s, cpus in known:
            together_s = max(0.0, min(at_s, end_s) - max(before_s, begin_s))
            used_s, elapsed_s, before_s = used_s + cpus * together_s, elapsed_s + together_s, at_s
    return used_s / elapsed_s if elapsed_s else 0.0


def taken_cpus(others: float) -> float:
    """Returns how many CPUs others take from those that this process may use, of those that they use.

    A cgroup's quota may be less than there are CPUs: then they use those first that this process may not.
    """
    spare = len(os.sched_getaffinity(0)) - available_cpus() if hasattr(os, "sched_getaffinity") else 0
    return max(0.0, others - spare)


def environment() -> dict[str, str]:
    """Returns the machine and the versions that figures depend on, as text; the GPU only if CUDA is in use already."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    found = {
        "CPU": next(iter(named), platform.processor() or platform.machine()),
        "CPUs for this process": str(available_cpus()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "load (1 min)": f"{os.getloadavg()[0]:.2f}",
        "Python": platform.python_version(),
        "fastload": writer_name().removeprefix("fastload "),
        "its compiled loops": native.described(),
    }
    for package in ("torch", "numpy", "h5py", "pillow", "simplejpeg"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found["GPU"] = f"{torch.cuda.get_device_name()}, one of {torch.cuda.device_count()}, CUDA {torch.version.cuda}"
    return found


@contextmanager
def peak_memory(pid: int, period_s: float = 0.05) -> Iterator[list[int]]:
    """Measures anonymous and shared memory of a process and its children in a thread; yields [peak bytes so far]."""
    peak, stop = [0], threading.Event()

    def sample() -> None:
        while True:
            peak[0] = max(peak[0], process_memory(*family_of(pid)))
            if stop.wait(period_s):
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


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
