"""CPUs and memory that this process may use; how busy other processes are, and how they ended. No torch here."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from fastload.errors import check_whole
from fastload.timing.stopwatch import process_cpu_s

_LINUX = sys.platform == "linux"
_CGROUPS = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_cpus() -> int:
    """Returns how many CPUs this process may use at once: its affinity, capped by the cgroup's quota; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = (_CGROUPS / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return count
    if quota != "max":
        count = min(count, -(-int(quota) // int(period)))
    return max(1, count)


def worker_count(workers: int | None) -> int:
    """Returns how many threads or processes to work with: by default one for each CPU. OptionError: not 0 or more."""
    if workers is None:
        return available_cpus()
    check_whole("workers", workers, least=0)
    return workers


def how_it_ended(exit_code: int | None) -> str:
    """Returns how a process ended, as the end of a sentence about it; below 0: the number of a signal."""
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
    why = " (often the system, out of memory: look at `dmesg`)" if -exit_code == signal.SIGKILL else ""
    return f"was killed by {name}{why}"


def process_exists(pid: int) -> bool:
    """Whether a process of this machine has a number."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        pass
    return True


def which_end(samples: list[int], first: int, ended: Callable[[list[int]], str]) -> dict[int, str]:
    """Returns which samples end a process that reads nothing else, and how; one died that was reading some of these.

    Args:
        samples: what it had to read.
        first: what it was at; where that ends a process, the others are not tried. Of none of them: it was not known.
        ended: has samples read by a new process; returns how that ended, "" if it did not.
    """
    if first in samples and (how := ended([first])):
        return {first: how}
    found, parts = dict[int, str](), [samples] if samples else []
    while parts:
        some = parts.pop()
        how = ended(some)
        if how and len(some) == 1:
            found[some[0]] = how
        elif how:
            parts += [some[len(some) // 2 :], some[: len(some) // 2]]
    return found


def available_memory(cgroups: Path = _CGROUPS, meminfo: Path = _MEMINFO) -> int:
    """Returns the bytes that can be allocated without swapping: free on the machine, and within the cgroup's limit.

    Clean pages of files count as available: the kernel drops them when memory is asked for.
    """
    available = _available_on_machine(meminfo)
    # Version 2, and where the memory controller of version 1 is mounted.
    left = _left(cgroups, "memory.max", "memory.current", "inactive_file")
    left_v1 = _left(cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return max(0, min(value for value in (available, left, left_v1) if value is not None))


def _available_on_machine(meminfo: Path) -> int:
    if _LINUX:
        kib = {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB$", meminfo.read_text(), re.MULTILINE)}
        # Kernels before 3.14, and what some containers show in its place, have no MemAvailable.
        return 1024 * kib.get("MemAvailable", kib.get("MemFree", 0) + kib.get("Cached", 0))
    import psutil  # packing on Linux does without it (tools/requirements-pack.txt)

    return int(psutil.virtual_memory().available)


def _left(folder: Path, limit_name: str, used_name: str, cached_name: str) -> int | None:
    """Returns the bytes between what the cgroup's processes use and its limit; None when no limit can be read."""
    try:
        limit = int((folder / limit_name).read_text())  # "max", which is no number: there is no limit
        used = int((folder / used_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - used + int(stat.get(cached_name, 0))
    except (OSError, ValueError):
        return None


def busy_processes_s(pids: Iterable[int]) -> float | None:
    """Returns the seconds that processes ran on a CPU or waited for one, since each began; None when one is gone.

    The difference of two calls shows whether they compute, or wait for a disk, a network or a lock.
    """
    total_s = 0.0
    for pid in pids:
        if (running_s := process_cpu_s(pid)) is None:
            return None
        total_s += running_s
        with suppress(OSError, ValueError, IndexError):  # the system does not say
            # How long the first thread, which makes the samples, waited for a CPU.
            total_s += int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return total_s
