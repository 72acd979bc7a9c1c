"""How much memory of the host this process may still take."""

from __future__ import annotations

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
