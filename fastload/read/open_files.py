"""`OpenFiles`: which files of a dataset are open, how often each is in use, and which one is closed for another."""

from __future__ import annotations

import errno
import os
import resource
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from fastload.read.open_file import OpenFile

_MOST_OPEN = 64
"""Shards open at a time, unless the system allows fewer descriptors; a window of 16 chunks needs 32 or fewer."""


class Owner(Protocol):
    """Opens and closes files; called by one thread at a time."""

    def require_current(self) -> None:
        """Raises an error where no file may be opened as things are."""
        ...

    def open_file(self, number: int) -> OpenFile: ...
    def close_file(self, number: int, file: OpenFile) -> None: ...
    def forked(self, opened: OrderedDict[int, OpenFile]) -> None:
        """Is told that this process is a fork of the one that opened these files."""
        ...


class OpenFiles:
    """Open files by number. Threads may share it, and it survives a fork.

    Attributes:
        opened: the files; the least recently used ones first.
        most: so many are open, unless more are in use.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner: Owner = weakref.proxy(owner)  # whose end is the end of this, too
        self.opened: OrderedDict[int, OpenFile] = OrderedDict()
        self.most = max(4, min(_MOST_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16))
        self._reset()
        self._is_closed = False

    def _reset(self) -> None:
        self._lock, self._pid = threading.RLock(), os.getpid()
        self._users: dict[int, int] = {}
        self._threads = Counter[int]()  # that have taken files, and how often
        self._unused = threading.Condition(self._lock)  # no thread reads from open files
        self._draining = False

    @property
    def is_used_here(self) -> bool:
        """Whether this thread has taken files."""
        return threading.get_ident() in self._threads

    def take(self, numbers: Sequence[int]) -> list[OpenFile]:
        """Returns open files, which stay open until this thread releases them as often as they were taken."""
        with self._lock if self._pid == os.getpid() else self._after_fork():
            # Who has some open already gets others, too: `drain` waits until it has none.
            if not self.is_used_here:
                while self._draining:
                    self._unused.wait()
                self._owner.require_current()
            if self._is_closed:
                raise OSError(errno.EBADF, f"{os.strerror(errno.EBADF)}: the reader was closed")
            found = []
            for number in numbers:
                one = self.opened.get(number)
                if one is None:
                    one = self.opened[number] = self._owner.open_file(number)
                self.opened.move_to_end(number)
                found.append(one)
            for number in numbers:
                self._users[number] = self._users.get(number, 0) + 1
            self._threads[threading.get_ident()] += 1
            if len(self.opened) > self.most:
                idle = [number for number in self.opened if number not in self._users]
                for number in idle[: len(self.opened) - self.most]:
                    self._owner.close_file(number, self.opened.pop(number))
            return found

    def release(self, numbers: Sequence[int]) -> None:
        """Lets files be closed that this thread has taken."""
        with self._lock if self._pid == os.getpid() else self._after_fork():
            thread = threading.get_ident()
            self._threads[thread] -= 1
            if self._threads[thread] <= 0:
                del self._threads[thread]
            for number in numbers:
                left = self._users.get(number, 1) - 1
                if left:
                    self._users[number] = left
                else:
                    self._users.pop(number, None)
            if self._draining:
                self._unused.notify_all()

    def drain(self, then: Callable[[], None]) -> None:
        """Closes all files once no thread uses any, and calls `then`; who takes one meanwhile waits."""
        with self._lock if self._pid == os.getpid() else self._after_fork():
            while self._draining:
                self._unused.wait()
            self._draining = True
            try:
                while self._users:
                    self._unused.wait()
                self._close_all()
                then()
            finally:
                self._draining = False
                self._unused.notify_all()

    def close(self) -> None:
        """Closes all files for good. Calling it again does nothing."""
        with self._lock if self._pid == os.getpid() else self._after_fork():
            self._close_all()
            self._is_closed = True

    def _close_all(self) -> None:
        while self.opened:
            number, one = self.opened.popitem()
            self._owner.close_file(number, one)

    def _after_fork(self) -> threading.RLock:
        """Returns a new lock, as no thread is there to release what it held of the other."""
        self._reset()
        self._owner.forked(self.opened)
        return self._lock
