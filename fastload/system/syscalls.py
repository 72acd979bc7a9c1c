"""System calls that never wait, made without releasing the GIL.

A thread that releases it, if only for a microsecond, may find the main thread running Python when it wants it back, and
then waits for the interpreter's switch interval, 5 ms: one fstat cost 0.3 ms on average, as long as copying 60 images.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import struct
import sys
from functools import cache
from typing import Any

# struct statx: the inode, the size, ctime and mtime, and the device number, skipping the others.
_STATX, _STATX_BYTES = struct.Struct("=32xQQ48xqI4xqI12xII"), 256
_AT_FDCWD, _AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH, _STATX_BASIC_STATS = -100, 0x100, 0x1000, 0x7FF
_STATFS_BYTES = 256

# include/uapi/asm-generic/fcntl.h and include/uapi/linux/fcntl.h. The third argument is a long.
_F_SETSIG, _F_SETLEASE, _F_GETLEASE = 10, 1024, 1025
_F_RDLCK, _F_UNLCK, _SIGURG, _NO_ARGUMENT = map(ctypes.c_long, (fcntl.F_RDLCK, fcntl.F_UNLCK, signal.SIGURG, 0))


Identity = tuple[int, int, int, int, int]


def identity_of(fd: int) -> Identity:
    """Returns (device, inode, size in bytes, mtime in ns, ctime in ns) of an open file."""
    return _identity(fd, b"", _AT_EMPTY_PATH) or _of_stat(os.fstat(fd))


def identity_at(path: str | os.PathLike[str]) -> Identity | None:
    """Returns the same of what a path names, itself where that is a link; None: nothing."""
    try:
        return _identity(_AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW) or _of_stat(os.lstat(path))
    except OSError:
        return None


def _identity(folder: int, path: bytes, flags: int) -> Identity | None:
    if (statx := _function("statx")) is None:
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(folder, path, flags, _STATX_BASIC_STATS, buffer):
        return None
    inode, size, ctime_s, ctime_ns, mtime_s, mtime_ns, major, minor = _STATX.unpack_from(buffer)
    return os.makedev(major, minor), inode, size, mtime_s * 10**9 + mtime_ns, ctime_s * 10**9 + ctime_ns


def _of_stat(stat: os.stat_result) -> Identity:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def hold_off_writers(fd: int) -> bool:
    """Makes whoever opens the file for writing, or truncates it, wait until `let_writers` or this process's end.

    A read lease (fcntl, F_SETLEASE) on the open file: the kernel breaks it by force after 45 s
    (/proc/sys/fs/lease-break-time). False where there is none: somebody has the file open for writing, it belongs to
    another user, or the system or file system has no leases.
    """
    call = _function("fcntl")
    # By default the kernel tells that somebody waits by SIGIO, which ends a process; SIGURG is ignored.
    return call is not None and call(fd, _F_SETSIG, _SIGURG) == 0 and call(fd, _F_SETLEASE, _F_RDLCK) == 0


def writers_wait(fd: int) -> bool:
    """Whether somebody waits for an end of `hold_off_writers`."""
    return (call := _function("fcntl")) is not None and call(fd, _F_GETLEASE, _NO_ARGUMENT) == fcntl.F_UNLCK


def let_writers(fd: int) -> None:
    """Ends `hold_off_writers`."""
    if (call := _function("fcntl")) is not None:
        call(fd, _F_SETLEASE, _F_UNLCK)


def file_system_of(path: str | os.PathLike[str]) -> int | None:
    """Returns the number of the kind of file system that a file is on, as in statfs(2); None where unknown."""
    if (statfs := _function("statfs")) is None:
        return None
    memory = ctypes.create_string_buffer(_STATFS_BYTES)  # struct statfs begins with f_type, a long
    return ctypes.c_long.from_buffer(memory).value & 0xFFFFFFFF if statfs(os.fsencode(path), memory) == 0 else None


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
