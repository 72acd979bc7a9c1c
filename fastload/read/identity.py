"""Checks that a file is still the one whose header was read, and keeps it so while rows are copied."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from fastload.errors import FastloadError, FileChangedError, MissingFileError, ReadError
from fastload.format.digests import header_digest
from fastload.format.header import FileIdentity, PackedFile, open_hdf5, read_header
from fastload.system import syscalls

# Time that a held-off writer has for its change, before rows are copied without a lease.
_LET_IN_S = 0.1

Result = TypeVar("Result")


def open_checked(file: PackedFile) -> int:
    """Opens the file whose header was read, or raises MissingFileError, FileChangedError or ReadError."""
    with _opening(file):
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        check_open(file, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_path(file: PackedFile) -> None:
    """Raises MissingFileError, FileChangedError or ReadError unless the path still leads to what was read.

    Of a packed file other times are no difference where its header is the same, see `is_unchanged`.

    One call of the system, since it is done between two epochs. What other machines write to a network file system it
    sees when their client does: as late as the pages it keeps, a minute by default for NFS. An index that is in no file
    has nothing to be written to: its shards are compared when they are opened.
    """
    if file.listed:
        return
    with _opening(file):
        found = os.stat(file.path)
    _check(file, FileIdentity.of(found))


@contextmanager
def _opening(file: PackedFile) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as exc:
        raise MissingFileError(f"{file.name}: the file is gone since its header was read.") from exc
    except OSError as exc:
        raise ReadError(
            f"{file.name}: cannot be opened any more ({exc.strerror}). Its header was read before: look at the disk or "
            f"network, its mount, and the permissions of the file and its folders."
        ) from exc


def check_open(file: PackedFile, fd: int) -> FileIdentity:
    """Raises FileChangedError unless an open file is the one whose header was read, and was not written to since.

    Returns the identity of that file; another one where only the times differ, see `is_unchanged`.
    """
    return _check(file, syscalls.status_of(fd).identity, fd)


class TouchedError(FileChangedError):
    """The times of a file changed while rows were copied, and its header did not: they are to be copied again."""


def until_untouched(work: Callable[[], Result]) -> Result:
    """Returns what some work does, done again where it ends with a TouchedError; the tenth time that is raised."""
    for _ in range(9):
        try:
            return work()
        except TouchedError:
            continue
    return work()


class WriteLease:
    """Within it nobody writes to the open file or truncates it: who tries waits until the rows are copied.

    Touching a mapping of a truncated file ends the process (SIGBUS), and comparing sizes before each copy is too early:
    of 12 truncations under a loader that copied all the time 11 came during a copy. This costs 5 us. It may be entered
    again by the thread that is in it, by any number of threads, and after a fork. Where the kernel has no such lease
    for the file (`hold_off_writers`), it does nothing.

    `waits`: lets writers in that have waited, before it is entered again.
    """

    def __init__(self, file: PackedFile, fd: int, *, waits: bool = True) -> None:
        self._file, self._fd, self._waits = file, fd, waits
        self._own_fd = -1
        self._reset()

    def _reset(self) -> None:
        self._pid, self._users = os.getpid(), 0
        # Whether the lease is held, so that nobody can write; whether somebody waited when it was ended.
        self.holds = self._let_in = False
        self._all_out, self._local = threading.Condition(), threading.local()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            # A lease belongs to the open file, which a fork shares: the child would end its parent's.
            self._reset()
            self._fd = self._own_fd = open_checked(self._file)
        depth = getattr(self._local, "depth", 0)
        if not depth:
            self._enter()
        self._local.depth = depth + 1  # last: Ctrl-C may come at any time

    def _enter(self) -> None:
        with self._all_out:
            # Threads that copy in turn would else hold a writer off for ever. The check that follows sees what it does.
            while self._waits and self._users and self.holds and syscalls.writers_wait(self._fd):
                self._all_out.wait()
            if not self._users:
                self.holds = syscalls.hold_off_writers(self._fd)
                until = time.monotonic() + _LET_IN_S
                while (
                    self._waits and self._let_in and not self.holds and time.monotonic() < until and self._unchanged()
                ):
                    time.sleep(0.001)
                    self.holds = syscalls.hold_off_writers(self._fd)
                self._let_in = False
            self._users += 1

    def __exit__(self, *_: object) -> None:
        self._local.depth -= 1
        if self._local.depth:
            return
        with self._all_out:
            self._users -= 1
            if not self._users:
                if self.holds:
                    self._let_in = syscalls.writers_wait(self._fd)
                    syscalls.let_writers(self._fd)
                    self.holds = False
                self._all_out.notify_all()

    def let_go(self) -> None:
        """Lets writers in, though threads may be within."""
        with self._all_out:
            if self.holds:
                syscalls.let_writers(self._fd)
                self.holds = False

    def _unchanged(self) -> bool:
        return is_unchanged(self._file, FileIdentity(*syscalls.status_of(self._fd).identity), self._fd)

    def close(self) -> None:
        """Closes what it opened in a forked child; the descriptor that was given stays open."""
        fd, self._own_fd = self._own_fd, -1
        if fd >= 0 and self._pid == os.getpid():
            os.close(fd)


_equal: dict[FileIdentity, set[FileIdentity]] = {}
"""Identities of files as they were read, and those with headers that this process compared, and that are equal."""


def is_unchanged(file: PackedFile, now: FileIdentity, fd: int = -1) -> bool:
    """Whether the path's file, or an open one, is the one whose header was read, or one with its size and its header.

    `touch`, `chmod`, another hard link, or a copy that takes its place, changes no byte. That costs one look at the
    header, with the digests of all rows, and a warning. Store without digests (other programs') have to be the same.
    """
    then = file.identity
    if then.fits(now) or now in _equal.get(then, ()):
        return True
    if file.version is None or then.mtime_ns < 0 or now.size != then.size or not _has_header(file, now, fd):
        return False
    is_new = then not in _equal
    _equal.setdefault(then, set()).add(now)
    if is_new and (fd < 0 or os.fstat(fd).st_nlink):  # else another has its name: no matter
        warnings.warn(
            f"{file.name}: it was touched or copied anew while in use, or got another name, link or permissions. Its "
            f"size and its header, with the digests of all rows, are equal, so reading goes on; rows are compared with "
            f"their digests again unless check=None.",
            stacklevel=3,
        )
    return True


def _has_header(file: PackedFile, now: FileIdentity, fd: int) -> bool:
    """Whether the path leads to a file of that identity with the header that was read, or the descriptor does."""
    # By its descriptor, as the file may have lost its name: another file got it, which is no change of this one.
    path = Path(f"/proc/self/fd/{fd}") if fd >= 0 and sys.platform == "linux" else file.path
    try:
        if FileIdentity.of(os.stat(path)) != now:
            return False
        if file.is_index:
            digest = read_header(path).header_digest  # which compares it
        else:
            with open_hdf5(path, anew=True) as hdf5:
                digest = header_digest(hdf5)
        return digest == file.header_digest and FileIdentity.of(os.stat(path)) == now
    except (FastloadError, OSError, RuntimeError, ValueError, KeyError, TypeError):  # half of a header
        return False


def _check(file: PackedFile, found: tuple[int, int, int, int, int], fd: int = -1) -> FileIdentity:
    then = file.identity
    if then.fits(found):
        return then
    now = FileIdentity(*found)
    if is_unchanged(file, now, fd):
        return now
    if now[:2] != then[:2]:
        what = "it was replaced by another file"
    elif now.size < then.size:
        what = f"it was truncated from {then.size:,} to {now.size:,} bytes"
    elif now[:4] != then[:4]:
        before = f"{then.size:,} bytes and mtime {then.mtime_ns} ns"
        what = f"it was written to: {before}, now {now.size:,} and {now.mtime_ns}"
    else:
        what = f"it was written to and its mtime set back: its ctime was {then.ctime_ns} ns, now {now.ctime_ns}"
        if file.version is None:
            what = (
                f"its ctime was {then.ctime_ns} ns, now {now.ctime_ns}. Whoever writes to it and sets its mtime back "
                f"does that, also `chmod` and hard links, and it has no digests to tell by: `fastload repack` adds them"
            )
    raise FileChangedError(
        f"{file.name}: changed while in use: {what}. Make a new PackedDataset or FastLoader of it to use the new "
        f"content, and write new files under a new name while training."
    )
