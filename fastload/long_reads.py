"""Reads of any length: one system call brings at most 2 GiB, and may bring less."""

from __future__ import annotations

import os


def read_bytes(fd: int, length: int, offset: int) -> bytes:
    """So many bytes from a byte of the file on, fewer at its end."""
    data = os.pread(fd, length, offset)
    while len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
        data += more
    return data


def read_into(fd: int, view: memoryview, offset: int) -> int:
    """Fills memory from a byte of the file on; how many bytes were read, fewer at its end.

    Args:
        fd: open for reading.
        view: writable bytes in one dimension.
        offset: of the file.
    """
    total = 0
    while total < len(view) and (count := os.preadv(fd, [view[total:]], offset + total)):
        total += count
    return total
