"""What a process and those that it started take of the machine: CPU, memory, disk."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from fastload.stopwatch import process_cpu_s


def family_of(pid: int) -> list[int]:
    """The process and all that descend from it, those alive; empty when it is gone."""
    found, at = [pid], 0
    if not Path(f"/proc/{pid}/task").is_dir():
        try:
            return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        except psutil.Error:
            return []
    while at < len(found):
        # By the kernel's lists of children: psutil looks at every process of the machine, in 1 ms and more.
        for listed in Path(f"/proc/{found[at]}/task").glob("*/children"):
            try:
                found += map(int, listed.read_text().split())
            except OSError:  # the thread or the process has ended
                continue
        at += 1
    return found


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


def family_memory(pids: list[int]) -> int:
    """The memory of processes that share pages with each other and with nobody else; see `process_memory`."""
    if len(pids) > 1:
        return sum(map(process_memory, pids))
    try:  # one alone shares none, and these counts cost 15 us where shares cost 10 ms
        lines = Path(f"/proc/{pids[0]}/status").read_text().splitlines()
    except (OSError, IndexError):
        return 0
    sizes = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem"))
    }
    return sum(sizes.values())


def disk_bytes_read(pid: int) -> int | None:
    """Bytes that the process fetched from a disk so far, not from the page cache; None: not to be known."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


class Rates:
    """How fast counters of several processes rise. A process that was not there at the last look counts from now on."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
        self._at_s = 0.0

    def of(self, now: dict[int, float]) -> dict[int, float]:
        """By process, what its counter rose by a second since the last call; empty the first time."""
        at_s, last = time.perf_counter(), self._last
        taken, self._last, self._at_s = at_s - self._at_s, now, at_s
        return {pid: (value - last[pid]) / taken for pid, value in now.items() if pid in last and taken > 0}


def cpu_seconds(pids: list[int]) -> dict[int, float]:
    """Seconds that each was on a CPU, of those that are alive."""
    found = {pid: process_cpu_s(pid) for pid in pids}
    return {pid: value for pid, value in found.items() if value is not None}
