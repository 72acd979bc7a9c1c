"""System calls that never wait, made without releasing the GIL.

A thread that releases it, if only for a microsecond, may find the main thread running Python when it wants it back, and
then waits for the interpreter's switch interval, 5 ms: one fstat cost 0.3 ms on average, as long as copying 60 images.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from functools import cache
from typing import Any

# struct statx, skipping nlink and ids before the inode, and other times before the device number.
_STATX, _STATX_BYTES = struct.Struct("=32xQQ64xqI12xII"), 256
_AT_EMPTY_PATH, _STATX_BASIC_STATS = 0x1000, 0x7FF


def identity_of(fd: int) -> tuple[int, int, int, int]:
    """Returns (device, inode, size in bytes, mtime in ns) of an open file."""
    if (statx := _function("statx")) is not None:
        buffer = ctypes.create_string_buffer(_STATX_BYTES)
        if statx(fd, b"", _AT_EMPTY_PATH, _STATX_BASIC_STATS, buffer) == 0:
            inode, size, mtime_s, mtime_ns, major, minor = _STATX.unpack_from(buffer)
            return os.makedev(major, minor), inode, size, mtime_s * 10**9 + mtime_ns
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def is_resident(fd: int, offset: int) -> bool | None:
    """Whether a byte of the file is in memory; None when this system does not say.

    Not mincore: it calls every page resident in a file that the process could not write to.
    """
    return None if (found := read_resident(fd, offset, 1)) is None else bool(found)


def read_resident(fd: int, offset: int, num_bytes: int) -> bytes | None:
    """Returns the bytes that are in memory from `offset` on, maybe b""; None when this system does not say."""
    if (preadv2 := _function("preadv2")) is None:
        return None
    memory = ctypes.create_string_buffer(num_bytes)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(memory), num_bytes)
    count = int(preadv2(fd, vector, 1, ctypes.c_int64(offset), os.RWF_NOWAIT))
    if count >= 0:
        return memory.raw[:count]
    return b"" if ctypes.get_errno() == errno.EAGAIN else None  # the disk would have to be waited for


@cache
def _function(name: str) -> Any:
    """Returns a function of the C library, called without releasing the GIL; None where there is none."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return None
    function = getattr(ctypes.PyDLL(None, use_errno=True), name, None)
    if function is not None:
        function.restype = ctypes.c_ssize_t if name == "preadv2" else ctypes.c_int
    return function
