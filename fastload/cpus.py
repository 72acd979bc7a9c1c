"""How many CPUs this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def available_cpus() -> int:
    """CPUs this process may run on at once: its affinity, capped by the cgroup's quota; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = _CGROUP_LIMIT.read_text().split()
    except (OSError, ValueError):
        return count
    if quota != "max":
        count = min(count, -(-int(quota) // int(period)))
    return max(1, count)
