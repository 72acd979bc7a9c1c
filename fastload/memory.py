"""How much memory of the host processes hold, and how much this one may still take."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")


def available_memory(cgroups: Path = _CGROUPS) -> int:
    """Bytes that can be taken without swapping: what the machine has, capped by what the cgroup's limit leaves.

    Clean pages of files count as available: the kernel gives them up for memory that is asked for.
    """
    available = int(psutil.virtual_memory().available)
    # Version 2, and where the memory controller of version 1 is mounted.
    left = _left(cgroups, "memory.max", "memory.current", "inactive_file")
    left_v1 = _left(cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return max(0, min(value for value in (available, left, left_v1) if value is not None))


def _left(folder: Path, limit_name: str, used_name: str, cached_name: str) -> int | None:
    """Bytes between what the cgroup's processes hold and its limit; None when there is no limit to be read."""
    try:
        limit = int((folder / limit_name).read_text())  # "max": ValueError, there is none
        used = int((folder / used_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - used + int(stat.get(cached_name, 0))
    except (OSError, ValueError):
        return None


def process_memory(pid: int) -> int:
    """Anonymous and shared memory of one process in bytes; mapped files are the kernel's cache and not counted.

    A page that several processes share is counted once, in equal parts (PSS); 0 when the process is gone.
    """
    try:
        fields = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in fields[1:]}
    return sizes.get("Pss_Anon", 0) + sizes.get("Pss_Shmem", 0)


@contextmanager
def peak_memory(pid: int, period_s: float = 0.05) -> Iterator[list[int]]:
    """Samples the anonymous and shared memory of a process and all its children; yields [peak bytes so far]."""
    peak, stop = [0], threading.Event()

    def sample() -> None:
        while True:
            try:
                family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
            except psutil.Error:
                family = [pid]
            peak[0] = max(peak[0], sum(process_memory(member) for member in family))
            if stop.wait(period_s):
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
