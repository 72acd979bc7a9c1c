"""Drops a file from the kernel's page cache, or tells how much of it is there."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import sys
from pathlib import Path

import numpy as np

from fastload.system import syscalls

_CACHESTAT = 451  # its number on x86-64 and aarch64, from Linux 6.5 on
_RANGE, _COUNTS = struct.Struct("=QQ"), struct.Struct("=QQQQQ")
_PROBES = 256


def drop(path: Path) -> float | None:
    """Asks the kernel to drop a file's pages; returns the share of them that is still in memory, as `resident_share`.

    Pages that some process has mapped stay, and so do all pages on file systems in memory (tmpfs).
    """
    with open(path, "rb") as file:
        # A page that is not on the disk yet cannot be dropped.
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return resident_share(path)


def resident_share(path: Path) -> float | None:
    """Returns the share of a file that is in memory, 0 to 1; None if the file is empty or the system does not say."""
    size = path.stat().st_size
    if not size:
        return None
    with open(path, "rb") as file:
        share = _counted(file.fileno(), size)
        return _probed(file.fileno(), size) if share is None else share


def _counted(fd: int, size: int) -> float | None:
    """Returns the share by cachestat(2); None where the kernel lacks it, or does not tell this user."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return None
    counts = ctypes.create_string_buffer(_COUNTS.size)
    whole = ctypes.create_string_buffer(_RANGE.pack(0, 0))
    if ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(_CACHESTAT), fd, whole, counts, 0) != 0:
        return None
    pages = -(-size // mmap.PAGESIZE)
    return min(1.0, float(_COUNTS.unpack(counts.raw)[0]) / pages)


def _probed(fd: int, size: int) -> float | None:
    """Returns the share of some pages, evenly spread over the file, that are in memory."""
    if hasattr(os, "posix_fadvise"):
        # Otherwise probing a page that is not there would make the kernel read its neighbours as well.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    offsets = np.unique(np.linspace(0, size - 1, min(size, _PROBES)).astype(np.int64)).tolist()
    found = [syscalls.is_resident(fd, offset) for offset in offsets]
    known = [resident for resident in found if resident is not None]
    return sum(known) / len(known) if known else None
