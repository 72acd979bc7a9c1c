"""A file's pages in the kernel's cache: dropped, and looked for."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from fastload.read import held

_PROBES = 1000


def drop(path: Path) -> float | None:
    """Asks the kernel to forget a file's pages; the share of them that is in memory nonetheless.

    Pages that any process has mapped stay, and so do all of them on file systems that are memory themselves (tmpfs).
    """
    with open(path, "rb") as file:
        # A page that is not on the disk yet cannot be dropped.
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return resident_share(path)


def resident_share(path: Path) -> float | None:
    """Share of a file that is in memory, 0 to 1, by looking at a thousand places; None: the system does not say."""
    size = path.stat().st_size
    if not size:
        return None
    with open(path, "rb") as file:
        offsets = np.unique(np.linspace(0, size - 1, min(size, _PROBES)).astype(np.int64)).tolist()
        found = [held.is_resident(file.fileno(), offset) for offset in offsets]
    known = [resident for resident in found if resident is not None]
    return sum(known) / len(known) if known else None
