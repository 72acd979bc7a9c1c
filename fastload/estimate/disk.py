"""How fast this disk is read, by a file that is written for it, dropped from memory and read again.

Read in random order, in pieces of 1 MiB, several at once: the loader shuffles, and has what comes next read ahead.
In order, one virtual disk gave twice as much.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from fastload.page_cache import drop

LEAST_BYTES, MOST_BYTES = 16 * 2**20, 256 * 2**20

_PIECE_BYTES = 2**20
_BLOCK_BYTES = 16 * 2**20
_THREADS = 8
_MOST_LEFT = 0.1
"""Share of the file that may stay in memory when it is dropped."""


class DiskRate(NamedTuple):
    """What reading from a disk gives."""

    bytes_per_s: float | None
    """None where it cannot be measured."""
    told: str
    """How it was measured, or why it cannot be."""


def measure_disk(folder: Path, num_bytes: int, *, seconds: float = 1.4) -> DiskRate:
    """How fast files in a folder are read while they are not in memory.

    The file for it has no name (O_TMPFILE) where the system knows such, so that nothing of it is left even by a kill.

    Args:
        folder: where to look.
        num_bytes: to write and read, brought to between LEAST_BYTES and MOST_BYTES, and to at most a tenth of what is
            free.
        seconds: after which it ends with what was written and read by then; half of it for each.
    """
    try:
        room = shutil.disk_usage(folder).free // 10
        num_bytes = min(max(num_bytes, LEAST_BYTES), MOST_BYTES, room)
        if num_bytes < LEAST_BYTES:
            return DiskRate(None, "cannot be measured: too little room for a file to be read")
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            written = _write(file.fileno(), num_bytes, seconds / 2)
            opened = Path(f"/proc/self/fd/{file.fileno()}")
            left = drop(opened) if opened.exists() else None
            if left is None:
                return DiskRate(None, "cannot be measured: this system does not say what is in memory")
            if left > _MOST_LEFT:
                return DiskRate(None, "cannot be measured: its files stay in memory (as on tmpfs)")
            return _read(file.fileno(), written, seconds / 2)
    except OSError as exc:
        return DiskRate(None, f"cannot be measured: {exc.strerror or exc}")


def _write(fd: int, num_bytes: int, seconds: float) -> int:
    """Bytes written to the disk itself, at least one block."""
    # Random: some disks and file systems compress.
    block = os.urandom(_PIECE_BYTES) * (_BLOCK_BYTES // _PIECE_BYTES)
    written, end = 0, time.perf_counter() + seconds
    while written + _BLOCK_BYTES <= num_bytes and (not written or time.perf_counter() < end):
        written += os.pwrite(fd, block, written)
        # One by one: a slow disk would take a minute for what it is only handed at the end.
        os.fsync(fd)
    return written


def _read(fd: int, num_bytes: int, seconds: float) -> DiskRate:
    pieces = list(range(0, num_bytes, _PIECE_BYTES))
    random.Random(0).shuffle(pieces)
    turn = iter(pieces)
    started = time.perf_counter()

    def read_some(_: int) -> int:
        buffer, count = bytearray(_PIECE_BYTES), 0
        for offset in turn:
            count += os.preadv(fd, [buffer], offset)
            if time.perf_counter() - started > seconds:
                break
        return count

    with ThreadPoolExecutor(_THREADS) as pool:
        count = sum(pool.map(read_some, range(_THREADS)))
    rate = count / (time.perf_counter() - started)
    return DiskRate(rate, f"measured with {count / 2**20:,.0f} MiB in random order, not in memory before")
