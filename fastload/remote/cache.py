"""The cache on a disk of this machine: its folders, the locks there, and the bound on what the files take.

    CACHE/1/used                    bytes that the files below take; locks for updating them
    CACHE/1/<header_digest>/        of a file that is no index: <header_digest>-<xxh32 of its name>/
        index.h5, out-00017-of-00100.h5, ...
                                    sparse copies: the same offsets as the remote file; filled, the same bytes
        chunks                      16 bytes a chunk: XXH3-64 of its bytes, boot, check
        locks                       byte c stands for chunk c
        meta.json                   version, URLs without secrets, size and ETag of each shard

All ranks and jobs of a machine share it, without a process that serves them. A chunk is written, then its record; a
record counts once its writer has let go of the lock on its byte. Whoever is killed in between leaves a chunk without a
record, which takes its place on the disk until it is fetched again or evicted. Only files below CACHE/1 are removed.

Somebody else may remove any of these files, or cut them off, at any time. `used` and `chunks` are not mapped: what is
not in them counts as not there. Who has a dataset open keeps its files, and notices that their names lead to others
(`DiskCopies.is_lost`): then the dataset is removed for all, and made anew by each that uses it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import posixpath
import shutil
import stat
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

from fastload.errors import CacheError, FormatError, OptionError
from fastload.remote.chunks import Range
from fastload.remote.own_files import Folder, check_own
from fastload.system import syscalls
from fastload.system.files import read_bytes, write_at
from fastload.system.text import format_bytes

_FLOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, pid, which is 0 for such a lock
_BUSY = (errno.EAGAIN, errno.EACCES)


@cache
def _keeping_gil() -> Any:
    return ctypes.PyDLL(None, use_errno=True)


class ByteLocks:
    """Locks on single bytes of an open file, shared or exclusive, among all processes; it closes the file.

    They are locks of an open file description (fcntl, F_OFD_SETLK): the kernel ends them when the last process that has
    the description dies, however it dies, and threads of one process count among themselves (`ChunksInUse`). A forked
    child shares the description of its parent, so it has to open a file of its own. Any thread may call it.

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


VERSION = 1
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
BLOCK = mmap.PAGESIZE
OWN_FILES = ("chunks", "locks", "meta.json")
"""Names of the files of a dataset's folder that are no copies."""
_IN_USE = 2**62  # the byte of `locks` on which each user of a dataset has a shared lock
_BOUND, _ALIVE = 0, 1  # bytes of `used`
_USED_AT = 64  # where the number stands there
# Kept free for what file systems allocate by themselves, for records, and while meta.json is written anew: one part in
# so many of the bound, and no less than some blocks.
_SLACK, _LEAST_SLACK = 512, 4 * BLOCK


class CacheLeftError(OSError):
    """Chunks are to be read from elsewhere than so far."""


class DiskFullError(CacheLeftError):
    """The disk of the cache is full before its bound is reached."""


class CacheLostError(CacheLeftError):
    """Somebody has removed files of the cache that are in use, or cut them off."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.ESTALE, "it was removed or cut off while in use", str(path))


def check_names(url: str, names: Sequence[str]) -> None:
    """Raises FormatError where a copy of a file would lie where another one does, or a file of the cache's own.

    The names are of one dataset's files, relative to its folder.
    """
    taken, found = set(OWN_FILES), [posixpath.normpath(name) for name in names]
    for name, path in zip(names, found, strict=True):
        if path in taken:
            why = "as a file that the cache keeps beside its copy" if path in OWN_FILES else "twice"
            raise FormatError(
                f"{url}: has a file called {name!r}, {why}. Give it another name, and make the index again."
            )
        taken.add(path)
    for name, path in zip(names, found, strict=True):
        while path := posixpath.dirname(path):
            if path in taken:
                raise FormatError(
                    f"{url}: has a file {name!r} in a folder {path!r}, which is the name of a file in the cache. Give "
                    f"it another name, and make the index again."
                )


def allocated_below(folder: Path) -> int:
    """Returns the bytes that the files below a folder take on the disk; links are not followed."""
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(above, name)).st_blocks * 512
    return total


class Bound:
    """The bound on what the files of a cache take, at every instant, and what they take. All processes share it.

    Args:
        root: of the cache.
        locks: of its `used`, which says what they take.
        limit: most bytes; None: nine tenths of what is free on the disk.
        in_memory: whether it is of one process, and its `used` a file in memory.
    """

    def __init__(self, root: Path, locks: ByteLocks, limit: int | None, *, in_memory: bool = False) -> None:
        self.root, self._locks, self.is_chosen = root, locks, limit is not None
        self._thread_lock, self._depth = threading.RLock(), 0
        self._in_memory = in_memory
        if not in_memory and locks.try_exclusive(
            _ALIVE
        ):  # nobody else uses it: what killed processes left is counted anew
            with self.locked():
                self.count()
        locks.wait_shared(_ALIVE)
        if limit is None:
            system = os.statvfs(root)
            limit = self.num_bytes + system.f_bavail * system.f_frsize * 9 // 10
        self.limit, self.room = limit, limit - max(limit // _SLACK, _LEAST_SLACK)

    def __str__(self) -> str:
        return f"{'max_bytes' if self.is_chosen else 'nine tenths of what is free'} of {format_bytes(self.limit)}"

    @property
    def num_bytes(self) -> int:
        """The bytes that the files take."""
        data = read_few(self._locks.fd, 8, _USED_AT)
        return int.from_bytes(data, "little") if len(data) == 8 else allocated_below(self.root)  # it was cut off

    @num_bytes.setter
    def num_bytes(self, num_bytes: int) -> None:
        write_few(self._locks.fd, num_bytes.to_bytes(8, "little"), _USED_AT)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within it no other thread or process changes what the cache takes. CacheLostError: the cache was removed."""
        with self._thread_lock:
            if self._depth:
                yield
                return
            self._locks.wait_exclusive(_BOUND)
            self._depth += 1
            try:
                if not self._in_memory and not leads_to(self.root / "used", self._locks.fd):
                    raise CacheLostError(self.root)
                yield
            finally:
                self._depth -= 1
                self._locks.unlock(_BOUND)

    def count(self) -> None:
        """Counts what the files take, within `locked`."""
        self.num_bytes = allocated_below(self.root)

    def allocate(self, fd: int, ranges: Sequence[Range]) -> bool:
        """Allocates ranges of a file; returns False where they would pass the bound.

        They are counted before they are there: a process that is killed in between leaves too much counted, never too
        little.
        DiskFullError: no space is left; some of them may be allocated.
        """
        blocks = [(begin // BLOCK * BLOCK, -(-end // BLOCK) * BLOCK) for begin, end in ranges]
        most = sum(end - begin for begin, end in blocks) + BLOCK
        with self.locked():
            used = self.num_bytes
            if used + most > self.room:
                return False
            before = _allocated(fd)
            self.num_bytes = used + most
            try:
                for begin, end in ranges:
                    _fallocate(fd, _KEEP_SIZE, begin, end - begin)
            except OSError as exc:
                if exc.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise OptionError(
                        f"{self.root}: its file system cannot allocate parts of sparse files. Put the cache on a "
                        f"local disk with ext4 or XFS, or on tmpfs: Remote(cache=...)."
                    ) from exc
                if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise DiskFullError(exc.errno, exc.strerror) from exc
                raise
            finally:
                self.num_bytes = used + _allocated(fd) - before
        return True

    def allocate_whole(self, fd: int, num_bytes: int) -> None:
        """Allocates all of a file that is mapped: where the disk is full, to write to a hole of it ends the process.

        Raises CacheError where there is no space.
        """
        with self.locked():
            before = _allocated(fd)
            try:
                if os.fstat(fd).st_size < num_bytes or before < num_bytes:
                    os.posix_fallocate(fd, 0, num_bytes)
            except OSError as exc:
                raise CacheError(
                    f"{self.root.parent}: there is no room for the records of what is cached ({exc.strerror}). Make "
                    f"room there (`fastload cache clear` removes what no job uses), or name another folder: "
                    f"Remote(cache=...)."
                ) from exc
            finally:
                self.num_bytes += _allocated(fd) - before

    def free(self, fd: int, ranges: Sequence[Range]) -> None:
        """Gives the blocks of ranges of a file back, within `locked`; what shares a block with others becomes zeros."""
        before = _allocated(fd)
        for begin, end in ranges:
            _fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, begin, end - begin)
        self.num_bytes += _allocated(fd) - before

    def check(self, needed: int, why: str, or_else: str) -> None:
        """Raises CacheError unless so many bytes fit into the cache at once."""
        if needed > self.room:
            limit = needed + max(needed // (_SLACK - 1) + 1, _LEAST_SLACK)
            give = f"Give Remote(max_bytes={limit:_}) or more" if self.is_chosen else "Make room there"
            raise CacheError(
                f"{self.root.parent}: {self} is too small: {why} takes {format_bytes(limit)}. {give}{or_else}."
            )


class MemoryBound(Bound):
    """The bound on what sparse copies in memory take, all of which may be taken.

    Args:
        locks: of a file in memory of one block or more.
        limit: bytes; more where what is needed at a time, and `spare` bytes, do not fit in.
    """

    def __init__(self, locks: ByteLocks, limit: int, spare: int) -> None:
        super().__init__(Path("memory/1"), locks, limit, in_memory=True)
        self.room, self._spare = limit, spare

    def check(self, needed: int, why: str, or_else: str) -> None:
        """Has so many bytes fit in, if there is not more room already."""
        self.limit = self.room = max(self.limit, needed + self._spare)


class CacheFolder:
    """The folder of a cache. Threads and processes share it.

    Attributes:
        root: CACHE/1.
        others: whether other users may write there.
        bound: on what its files take.
        locked: as of `bound`.
    """

    def __init__(self, folder: Path, limit: int | None, *, others: bool = False) -> None:
        self.root, self.others = folder.expanduser().absolute() / str(VERSION), others
        for tries_left in (2, 1, 0):
            try:
                self._locks = ByteLocks(_opened_root(self.root, others=others))
                os.posix_fallocate(self._locks.fd, 0, BLOCK)
                break
            except OSError as exc:
                if tries_left and isinstance(exc, FileNotFoundError):  # somebody removes it
                    continue
                raise OptionError(
                    f"{folder}: no cache of remote files can be made there ({exc.strerror}). Name another folder: "
                    f"Remote(cache=...), or FASTLOAD_CACHE."
                ) from exc
        self.bound = Bound(self.root, self._locks, limit)
        self.locked = self.bound.locked

    def datasets(self) -> list[Path]:
        """Returns the folders of all datasets, those used longest ago first."""
        found = []
        for path in self.root.iterdir():
            with suppress(OSError):  # another process removes it
                if not path.is_symlink() and stat.S_ISREG((meta := (path / "meta.json").lstat()).st_mode):
                    found.append((meta.st_mtime, path))
        return [path for _, path in sorted(found)]

    def locks_of(self, folder: Path) -> ByteLocks | None:
        """Returns the locks of a dataset, to be closed; None: it is gone. CacheError: it is a link, or somebody else's.

        It is gone, too, where only they are: who made others would not keep those away who use the dataset still.
        """
        try:
            with closing(Folder(folder, shared=self.others)) as opened:
                return ByteLocks(opened.open("locks", os.O_RDWR))
        except FileNotFoundError:
            return None

    def keep_in_use(self, folder: Path) -> ByteLocks | None:
        """Returns locks that keep a dataset from being removed until they are closed; None: it is gone, or about to."""
        if (locks := self.locks_of(folder)) is None:
            return None
        if locks.try_shared(_IN_USE) and os.fstat(locks.fd).st_nlink:  # else it was removed before the lock
            return locks
        locks.close()
        return None

    def in_use(self, folder: Path) -> bool:
        """Whether some process uses a dataset, or makes it."""
        if (locks := self.locks_of(folder)) is None:
            return False
        try:
            return locks.is_locked(_IN_USE)
        finally:
            locks.close()

    def remove(self, folder: Path) -> bool:
        """Removes a dataset, unless some process uses it; returns whether it is gone. Within `locked`."""
        assert folder.parent == self.root and not folder.is_symlink(), "only what lies in the cache is removed"
        locks = self.locks_of(folder)  # None: another process was first, or somebody removed them
        with closing(locks) if locks is not None else nullcontext():
            if locks is not None and not locks.try_exclusive(_IN_USE):
                return False
            if folder.is_dir():
                _remove(self.bound, folder)
            return True

    def remove_lost(self, folder: Path, locks: ByteLocks) -> None:
        """Removes a dataset of which some files are lost, unless its name leads to another one already.

        Whoever uses it, which these locks are of, has its files open, and makes a new one when it notices.
        """
        with suppress(OSError), self.locked():
            if folder.is_dir() and (leads_to(folder / "locks", locks.fd) or not (folder / "locks").exists()):
                _remove(self.bound, folder)

    def sweep(self) -> None:
        """Removes what killed processes left: datasets that were never complete, and those half removed."""
        with self.locked():
            for path in self.root.glob(".*"):
                if path.name.startswith(".gone-") or (path.name.startswith(".new-") and not self.in_use(path)):
                    shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def new_dataset(self) -> Iterator[tuple[Path, ByteLocks]]:
        """Yields a new folder for a dataset, and what keeps it in use; it is removed unless it is renamed meanwhile."""
        self.sweep()
        with self.locked():
            folder = Path(tempfile.mkdtemp(prefix=".new-", dir=self.root))
            if self.others:
                os.chmod(folder, os.stat(self.root).st_mode & 0o2777)
            with closing(Folder(folder, shared=self.others)) as opened:
                os.close(opened.open("locks", os.O_RDWR | os.O_CREAT))
            in_use = self.keep_in_use(folder)
            assert in_use is not None, "nobody else knows of the new folder"
        try:
            yield folder, in_use
        finally:
            in_use.close()
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        self._locks.close()


def _opened_root(root: Path, *, others: bool) -> int:
    """Returns the descriptor of `used` in the folder of a cache, which is made if it is not there."""
    root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not others:
        check_own(root.parent, is_root=False)
    with suppress(FileExistsError):
        root.mkdir(mode=0o700)
        if others:
            os.chmod(root, os.stat(root.parent).st_mode & 0o2777)
    if not others:
        check_own(root, is_root=True)
    with closing(Folder(root, shared=others)) as opened:
        return opened.open("used", os.O_RDWR | os.O_CREAT)


def _remove(bound: Bound, folder: Path) -> None:
    """Removes a dataset of a cache; under another name first: whoever opens it meanwhile makes a new one."""
    going = Path(tempfile.mkdtemp(prefix=".gone-", dir=bound.root))
    os.rename(folder, going / folder.name)
    shutil.rmtree(going, ignore_errors=True)
    bound.count()


def leads_to(path: str | Path, fd: int, size: int | None = None) -> bool:
    """Whether a path leads to an open file, through no link at its end; and that has so many bytes."""
    there, here = syscalls.status_at(path), syscalls.status_of(fd)
    return there is not None and there[:2] == here[:2] and size in (None, here.size)


def sparse_memory(num_bytes: int) -> int:
    """Returns the descriptor of a file in memory, all zeros, of which only what is written takes memory."""
    fd = os.memfd_create("fastload-remote", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


# What follows is done for each chunk, by threads that must not wait for the GIL again.


def read_few(fd: int, num_bytes: int, offset: int) -> bytes:
    """Returns some bytes of a file, without releasing the GIL where they are in memory."""
    return syscalls.read_resident(fd, offset, num_bytes) or read_bytes(fd, num_bytes, offset)


def write_few(fd: int, data: bytes, offset: int) -> None:
    """Writes some bytes to a file, without releasing the GIL where it can."""
    if not syscalls.write_resident(fd, data, offset):
        write_at(fd, data, offset)


def _allocated(fd: int) -> int:
    return syscalls.status_of(fd).allocated


def _fallocate(fd: int, mode: int, offset: int, num_bytes: int) -> None:
    function = ctypes.CDLL(None, use_errno=True).fallocate
    if function(fd, ctypes.c_int(mode), ctypes.c_int64(offset), ctypes.c_int64(num_bytes)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Meta:
    """The file meta.json of a dataset: for each URL that it was read from, size and ETag of each object, by name."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, dict[str, tuple[int, str | None]]]:
        """Returns by URL, and by name, size and ETag."""
        try:
            found = json.loads(self._path.read_text())
            if found["version"] != VERSION:
                return {}
            return {
                url: {name: (int(size), etag) for name, (size, etag) in objects.items()}
                for url, objects in found["urls"].items()
            }
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def add(self, url: str, objects: dict[str, tuple[int, str | None]]) -> None:
        """Adds objects of a URL, replacing objects of the same names; within the cache's `locked`."""
        urls = self.read()
        urls[url] = urls.get(url, {}) | objects
        fd, part = tempfile.mkstemp(prefix=".meta-", dir=self._path.parent)  # a new file, through no link
        with open(fd, "w") as file:
            file.write(json.dumps({"version": VERSION, "urls": urls}))
            os.fchmod(fd, os.stat(self._path.parent).st_mode & 0o666)  # others may share the cache
        os.replace(part, self._path)
