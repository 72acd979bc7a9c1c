"""Locks on single bytes of a file, shared or exclusive, among all processes of a machine.

They are locks of an open file description (fcntl, F_OFD_SETLK): the kernel ends them when the last process that has the
description dies, however it dies, and threads of one process count among themselves, which `fetch` does. A forked child
shares the description of its parent, so it has to open a file of its own.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import sys
from functools import cache
from typing import Any

from fastload.errors import OptionError

_FLOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, pid, which is 0 for such a lock
_BUSY = (errno.EAGAIN, errno.EACCES)


@cache
def _keeping_gil() -> Any:
    return ctypes.PyDLL(None, use_errno=True)


class ByteLocks:
    """The locks of one open file, which it closes. Any thread may call it.

    A byte need not exist to be locked. Hold tens of them: to lock and unlock one takes 5 us where 64 others are held,
    and 439 us where 10,000 are.
    """

    def __init__(self, fd: int) -> None:
        if sys.platform != "linux":
            os.close(fd)
            raise OptionError("chunks of remote files are cached on Linux only: other systems lack the locks for it.")
        self._fd = fd

    @property
    def fd(self) -> int:
        return self._fd

    def try_shared(self, byte: int) -> bool:
        """Takes a shared lock, also instead of an own exclusive one; returns False where another process has it."""
        return self._set(fcntl.F_RDLCK, byte)

    def try_exclusive(self, byte: int) -> bool:
        """Takes an exclusive lock, also instead of an own shared one; returns False where another process has any."""
        return self._set(fcntl.F_WRLCK, byte)

    def wait_exclusive(self, byte: int) -> None:
        """Takes an exclusive lock as soon as no other process has any."""
        if not self.try_exclusive(byte):
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLKW, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))

    def wait_shared(self, byte: int) -> None:
        """Takes a shared lock, also instead of an own exclusive one, once no other process has an exclusive one."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLKW, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0))

    def is_locked(self, byte: int) -> bool:
        """Whether anybody else has a lock on it; takes none."""
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def unlock(self, byte: int) -> None:
        if self._fd >= 0:  # else `close` has ended them
            self._set(fcntl.F_UNLCK, byte)

    def _set(self, kind: int, byte: int) -> bool:
        # Without releasing the GIL, which this thread might not get back soon; the call never waits.
        request = ctypes.create_string_buffer(_FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        if _keeping_gil().fcntl(self._fd, fcntl.F_OFD_SETLK, request) == 0:
            return True
        if ctypes.get_errno() in _BUSY:
            return False
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def close(self) -> None:
        """Ends all of its locks; in a forked child's copy the parent's locks stay."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class NoLocks:
    """Locks of memory that no other process sees: `in_use` counts this process's threads."""

    def try_shared(self, byte: int) -> bool:
        return True

    def try_exclusive(self, byte: int) -> bool:
        return True

    def unlock(self, byte: int) -> None:
        pass

    def close(self) -> None:
        pass
