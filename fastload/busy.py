"""How long processes wanted a CPU: what tells one that computes from one that waits for a disk, a network or a lock.

No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fastload.stopwatch import process_cpu_s


def busy_processes_s(pids: Iterable[int]) -> float | None:
    """Seconds that processes were on a CPU or wanted one, since each began; None when one of them is gone."""
    total_s = 0.0
    for pid in pids:
        running_s = process_cpu_s(pid)
        if running_s is None:
            return None
        total_s += running_s + _runnable_s(pid)
    return total_s


def _runnable_s(pid: int) -> float:
    """Of the first thread, which makes the samples; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
