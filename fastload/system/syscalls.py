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
from typing import Any, NamedTuple

# struct statx: links, owner, mode, inode, size, blocks, ctime, mtime and device number, skipping the others.
_STATX, _STATX_BYTES = struct.Struct("=16xII4xH2xQQQ40xqI4xqI12xII"), 256
_AT_FDCWD, _AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH, _STATX_BASIC_STATS = -100, 0x100, 0x1000, 0x7FF
_STATFS_BYTES = 256

# include/uapi/asm-generic/fcntl.h and include/uapi/linux/fcntl.h. The third argument is a long.
_F_SETSIG, _F_SETLEASE, _F_GETLEASE = 10, 1024, 1025
_F_RDLCK, _F_UNLCK, _SIGURG, _NO_ARGUMENT = map(ctypes.c_long, (fcntl.F_RDLCK, fcntl.F_UNLCK, signal.SIGURG, 0))


class Status(NamedTuple):
    """A file's status from the system: sizes in bytes, times in nanoseconds, `mode` and `owner` as `os.stat_result`."""

    device: int
    inode: int
    size: int
    mtime: int
    ctime: int
    mode: int
    owner: int
    links: int
    allocated: int

    @property
    def identity(self) -> tuple[int, int, int, int, int]:
        """(device, inode, size, mtime, ctime)."""
        return self[:5]


def status_of(fd: int) -> Status:
    """Returns the status of an open file."""
    return _status(fd, b"", _AT_EMPTY_PATH) or _of_stat(os.fstat(fd))


def status_at(path: str | os.PathLike[str]) -> Status | None:
    """Returns the status of the file at a path, of the link itself where it is one; None: nothing is there."""
    try:
        return _status(_AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW) or _of_stat(os.lstat(path))
    except OSError:
        return None


def _status(folder: int, path: bytes, flags: int) -> Status | None:
    if (statx := _function("statx")) is None:
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(folder, path, flags, _STATX_BASIC_STATS, buffer):
        return None
    links, owner, mode, inode, size, blocks, ctime_s, ctime_ns, mtime_s, mtime_ns, *device = _STATX.unpack_from(buffer)
    mtime, ctime = mtime_s * 10**9 + mtime_ns, ctime_s * 10**9 + ctime_ns
    return Status(os.makedev(*device), inode, size, mtime, ctime, mode, owner, links, blocks * 512)


def _of_stat(stat: os.stat_result) -> Status:
    return Status(
        stat.st_dev,
        stat.st_ino,
        stat.st_size,
        stat.st_mtime_ns,
        stat.st_ctime_ns,
        stat.st_mode,
        stat.st_uid,
        stat.st_nlink,
        stat.st_blocks * 512,
    )


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


def write_resident(fd: int, data: bytes, offset: int) -> bool:
    """Writes some bytes over others that are in memory; False: not all were, and `os.pwrite` can say why.

    It may wait as a store to a mapping does, while the system has too much to write to its disks.
    """
    if (pwrite := _function("pwrite")) is None or len(read_resident(fd, offset, len(data)) or b"") < len(data):
        return False
    return bool(pwrite(fd, data, ctypes.c_size_t(len(data)), ctypes.c_int64(offset)) == len(data))


@cache
def _function(name: str) -> Any:
    """Returns a function of the C library, called without releasing the GIL; None where there is none."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return None
    function = getattr(ctypes.PyDLL(None, use_errno=True), name, None)
    if function is not None:
        function.restype = ctypes.c_ssize_t if name in ("preadv2", "pwrite") else ctypes.c_int
    return function
