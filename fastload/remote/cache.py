"""The cache on a disk of this machine: sparse copies of remote files, filled chunk by chunk, within a bound.

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
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import posixpath
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import CacheError, FormatError, OptionError
from fastload.remote.byte_locks import ByteLocks
from fastload.remote.chunks import Range, joined_ranges, without
from fastload.system.files import write_at
from fastload.system.text import format_bytes

VERSION = 1
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_BLOCK = mmap.PAGESIZE
OWN_FILES = ("chunks", "locks", "meta.json")
"""Names of the files of a dataset's folder that are no copies."""
_IN_USE = 2**62  # the byte of `locks` on which each user of a dataset has a shared lock
_BOUND, _ALIVE = 0, 1  # bytes of `used`
# Kept free for what file systems allocate by themselves, for records, and while meta.json is written anew: one part in
# so many of the bound, and no less than some blocks.
_SLACK, _LEAST_SLACK = 512, 4 * _BLOCK

RECORD = np.dtype([("hash", "<u8"), ("boot", "<u4"), ("check", "<u4")])
_BEGUN = 1  # as `boot`: bytes may be on the disk, and are not to be used


class DiskFullError(OSError):
    """The disk of the cache is full before its bound is reached."""


@cache
def boot_number() -> int:
    """Returns a number of this boot of the machine, 2 or more: memory may not have reached the disk at the last end."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        text = b""
    return max(2, xxhash.xxh32_intdigest(text))


def check_names(url: str, names: Sequence[str]) -> None:
    """Raises FormatError where a copy of a file would lie where another one does, or a file of the cache's own.

    The names are those of the files of one dataset, relative to its folder.
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


def are_there(records: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether records are of chunks that came whole, as far as they say without a look at each: bool (n,)."""
    found: NDArray[np.bool_] = records["boot"] > _BEGUN
    return found


def allocated_below(folder: Path) -> int:
    """Returns the bytes that the files below a folder take on the disk; links are not followed."""
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(above, name)).st_blocks * 512
    return total


class CacheFolder:
    """The folder of a cache, and the bound on what its files take. Threads and processes share it."""

    shared = True
    """Whether other datasets take of the same bound."""

    def __init__(self, folder: Path, limit: int | None) -> None:
        self.root = folder.expanduser().absolute() / str(VERSION)
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._locks = ByteLocks(self.root / "used")
            os.posix_fallocate(self._locks.fd, 0, _BLOCK)
        except OSError as exc:
            raise OptionError(
                f"{folder}: no cache of remote files can be made there ({exc.strerror}). Name another folder: "
                f"Remote(cache=...), or FASTLOAD_CACHE."
            ) from exc
        self._pid, self._thread_lock = os.getpid(), threading.RLock()
        # Of a descriptor of its own: the mapping keeps it, and its locks, as long as there is the array.
        with open(self.root / "used", "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BLOCK)
        self._used = np.frombuffer(self._map, np.int64, 1, 64)
        if self._locks.try_exclusive(_ALIVE):  # nobody else uses it: what killed processes left is counted anew
            with self.locked():
                self.count()
        self._locks.wait_shared(_ALIVE)
        self.is_chosen = limit is not None
        if limit is None:
            system = os.statvfs(self.root)
            limit = int(self._used[0]) + system.f_bavail * system.f_frsize * 9 // 10
        self.limit = limit
        self.room = limit - max(limit // _SLACK, _LEAST_SLACK)

    @property
    def bound(self) -> str:
        """The bound, as messages name it."""
        return f"{'max_bytes' if self.is_chosen else 'nine tenths of what is free'} of {format_bytes(self.limit)}"

    @property
    def used(self) -> int:
        """The bytes that all files of the cache take on the disk."""
        return int(self._used[0])

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within it no other thread or process changes what the cache takes."""
        with self._thread_lock:
            self._locks.wait_exclusive(_BOUND)
            try:
                yield
            finally:
                self._locks.unlock(_BOUND)

    def count(self) -> None:
        """Counts what the files take, within `locked`."""
        self._used[0] = allocated_below(self.root)

    def allocate(self, fd: int, ranges: Sequence[Range]) -> bool:
        """Allocates ranges of a file; returns False where they would pass the bound.

        They are counted before they are there: a process that is killed in between leaves too much counted, never too
        little.
        DiskFullError: no space is left; some of them may be allocated.
        """
        blocks = [(begin // _BLOCK * _BLOCK, -(-end // _BLOCK) * _BLOCK) for begin, end in ranges]
        most = sum(end - begin for begin, end in blocks) + _BLOCK
        with self.locked():
            if self.used + most > self.room:
                return False
            before = _allocated(fd)
            self._used[0] += most
            try:
                for begin, end in ranges:
                    _fallocate(fd, _KEEP_SIZE, begin, end - begin)
            except OSError as exc:
                if exc.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise OptionError(
                        f"{self.root}: its file system cannot allocate parts of sparse files. Put the cache on a local "
                        f"disk with ext4 or XFS, or on tmpfs: Remote(cache=...)."
                    ) from exc
                if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise DiskFullError(exc.errno, exc.strerror) from exc
                raise
            finally:
                self._used[0] += _allocated(fd) - before - most
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
                self._used[0] += _allocated(fd) - before

    def free(self, fd: int, ranges: Sequence[Range]) -> None:
        """Gives the blocks of ranges of a file back, within `locked`; what shares a block with others becomes zeros."""
        before = _allocated(fd)
        for begin, end in ranges:
            _fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, begin, end - begin)
        self._used[0] += _allocated(fd) - before

    def datasets(self) -> list[Path]:
        """Returns the folders of all datasets, those used longest ago first."""
        found = []
        for path in self.root.iterdir():
            with suppress(OSError):  # another process removes it
                if not path.is_symlink() and stat.S_ISREG((meta := (path / "meta.json").lstat()).st_mode):
                    found.append((meta.st_mtime, path))
        return [path for _, path in sorted(found)]

    @staticmethod
    def in_use(folder: Path) -> bool:
        """Whether some process uses a dataset, or makes it."""
        try:
            locks = ByteLocks(folder / "locks")
        except FileNotFoundError:
            return False
        try:
            return locks.is_locked(_IN_USE)
        finally:
            locks.close()

    def remove(self, folder: Path) -> bool:
        """Removes a dataset, unless some process uses it; returns whether it is gone. Within `locked`."""
        assert folder.parent == self.root and not folder.is_symlink(), "only what lies in the cache is removed"
        try:
            locks = ByteLocks(folder / "locks")
        except FileNotFoundError:  # another process was first
            return True
        try:
            if not locks.try_exclusive(_IN_USE):
                return False
            # Under another name first: whoever opens it meanwhile makes a new one.
            going = Path(tempfile.mkdtemp(prefix=".gone-", dir=self.root))
            os.rename(folder, going / folder.name)
            shutil.rmtree(going, ignore_errors=True)
            self.count()
            return True
        finally:
            locks.close()

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
            in_use = keep_in_use(folder)
            assert in_use is not None, "nobody else knows of the new folder"
        try:
            yield folder, in_use
        finally:
            in_use.close()
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        self._locks.close()


class Presence(NamedTuple):
    """The state of a chunk by its record: its bytes can be used; since this boot of the machine."""

    complete: bool
    this_boot: bool


class CachedDataset:
    """The sparse copies of one dataset, the records of their chunks, and the locks on them.

    Any thread may call it. The locks are those of the process; `fetch` counts its threads.

    Args:
        cache: of the folder.
        folder: of the dataset, which is complete but for its chunks.
        names, sizes: name and bytes of each shard.
        headers: number of the first chunk of each, which is its header.
        num_chunks: of all shards.
    """

    def __init__(
        self,
        cache: CacheFolder,
        folder: Path,
        names: Sequence[str],
        sizes: NDArray[np.int64],
        headers: NDArray[np.int64],
        num_chunks: int,
    ) -> None:
        self.cache, self.folder = cache, folder
        self._names, self._sizes = names, sizes
        self._bounds = [*headers.tolist(), num_chunks]
        self._shard_of = {header: shard for shard, header in enumerate(self._bounds[:-1])}
        if (locks := keep_in_use(folder)) is None:
            raise FileNotFoundError(errno.ENOENT, "it is being removed", str(folder))
        self.locks = locks
        fd = os.open(folder / "chunks", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            cache.allocate_whole(fd, num_chunks * RECORD.itemsize)
            self._map = mmap.mmap(fd, num_chunks * RECORD.itemsize)
        except BaseException:
            locks.close()
            raise
        finally:
            os.close(fd)
        self.records: NDArray[Any] = np.frombuffer(self._map, RECORD)

    def path(self, shard: int) -> Path:
        """Returns the sparse copy of a shard."""
        return self.folder / self._names[shard]

    def size(self, shard: int) -> int:
        """Returns the bytes of a shard."""
        return int(self._sizes[shard])

    @contextmanager
    def opened(self, shard: int) -> Iterator[int]:
        """Yields a descriptor for reading and writing a shard's sparse copy, which is made if it is not there."""
        path, flags = self.path(shard), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(path, flags, 0o600)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, flags, 0o600)
        try:
            if os.fstat(fd).st_size != self._sizes[shard]:  # new, or the one before was removed or cut off
                records = self.records[self._bounds[shard] : self._bounds[shard + 1]]
                records[are_there(records)] = (0, 0, 0)
                os.ftruncate(fd, int(self._sizes[shard]))
            yield fd
        finally:
            os.close(fd)

    def presence(self, chunk: int) -> Presence:
        """Returns the state of a chunk, which counts while a lock is held on it."""
        record = self.records[chunk]
        boot = int(record["boot"])
        complete = boot > _BEGUN and int(record["check"]) == _check(chunk, int(record["hash"]), boot)
        if complete and (shard := self._shard_of.get(chunk)) is not None and self._is_cut_off(shard):
            complete = False
        return Presence(complete, complete and boot == boot_number())

    def _is_cut_off(self, shard: int) -> bool:
        """Whether somebody has removed a shard's copy, or cut it off; then nothing of it counts as there any more."""
        with suppress(OSError):
            if self.path(shard).stat().st_size == self._sizes[shard]:
                return False
        with self.opened(shard):
            return True

    def begin(self, chunk: int) -> None:
        """Notes that bytes of a chunk may be on the disk; its lock is held exclusively."""
        self.records[chunk] = (0, _BEGUN, 0)

    def complete(self, chunk: int, digest: int) -> None:
        """Notes that all bytes of a chunk, of this XXH3-64, are there."""
        record = self.records[chunk]
        boot = boot_number()
        record["hash"], record["check"] = digest, _check(chunk, digest, boot)
        record["boot"] = boot

    def forget(self, chunk: int) -> None:
        """Notes that a chunk is not there."""
        self.records[chunk] = (0, 0, 0)

    def kept(self) -> NDArray[np.int64]:
        """Returns the chunks that take space on the disk, int64 (n,)."""
        return np.flatnonzero(self.records["boot"])

    def digest_matches(self, chunk: int, data: Sequence[memoryview | bytes]) -> bool:
        """Whether bytes are those that a chunk's record was written for."""
        return digest_of(data) == int(self.records[chunk]["hash"])

    def evict_shard(self, shard: int, header: int, chunks: slice) -> bool:
        """Removes all of a shard, its header and its other chunks, unless somebody uses any; returns whether it did."""
        taken = list[int]()
        try:
            for chunk in [header, *range(chunks.start, chunks.stop)]:
                if not self.locks.try_exclusive(chunk):
                    return False
                taken.append(chunk)
            with self.cache.locked(), self.opened(shard) as fd:
                for chunk in taken:
                    self.forget(chunk)
                self.cache.free(fd, [(0, self.size(shard) + _BLOCK)])  # the last block is freed whole, too
        finally:
            for chunk in taken:
                self.locks.unlock(chunk)
        return True

    def evict(
        self,
        chunk: int,
        shard: int,
        ranges: Sequence[Range],
        around: Sequence[tuple[int, Range]],
        others: slice = slice(0),
    ) -> bool:
        """Removes a chunk unless somebody uses it, or has one of the others; returns whether it did.

        `around`: chunks whose bytes touch those of this one, with their ranges: the blocks that it shares with them are
        freed with it where they are not there.
        """
        if not self.locks.try_exclusive(chunk):
            return False
        try:
            with self.cache.locked(), self.opened(shard) as fd:
                if self.records["boot"][others].any():
                    return False
                self._free(fd, chunk, ranges, around)
        finally:
            self.locks.unlock(chunk)
        return True

    def free(self, chunk: int, shard: int, ranges: Sequence[Range], around: Sequence[tuple[int, Range]]) -> None:
        """Gives back what is allocated of a chunk, whose lock is held exclusively; `around` as in `evict`."""
        with self.cache.locked(), self.opened(shard) as fd:
            self._free(fd, chunk, ranges, around)

    def _free(self, fd: int, chunk: int, ranges: Sequence[Range], around: Sequence[tuple[int, Range]]) -> None:
        self.forget(chunk)
        # In an index of shards packed with other options, one HDF5 chunk may be part of two of these chunks.
        kept = joined_ranges([other for near, other in around if self.records[near]["boot"]], 0)
        self.cache.free(fd, [self._widened(one, around) for one in without(ranges, kept)])

    def _widened(self, one: Range, around: Sequence[tuple[int, Range]]) -> Range:
        begin, end = one
        first, last = begin // _BLOCK * _BLOCK, -(-end // _BLOCK) * _BLOCK
        for chunk, (other_begin, other_end) in around:
            if self.records[chunk]["boot"]:
                continue
            if other_end == one[0] and other_begin <= first:
                begin = first
            elif other_begin == one[1] and other_end >= last:
                end = last
        return begin, end

    def write(self, shard: int, parts: Sequence[tuple[Range, Any]]) -> None:
        """Writes the bytes of ranges, which were allocated, to a shard's sparse copy."""
        with self.opened(shard) as fd:
            for (begin, _), data in parts:
                write_at(fd, data, begin)

    def close(self) -> None:
        """Ends the locks of this process."""
        self.locks.close()


def keep_in_use(folder: Path) -> ByteLocks | None:
    """Returns locks that keep a dataset from being removed until they are closed; None: it is gone, or about to."""
    try:
        locks = ByteLocks(folder / "locks")
    except FileNotFoundError:
        return None
    if locks.try_shared(_IN_USE) and os.fstat(locks.fd).st_nlink:  # else it was removed before the lock
        return locks
    locks.close()
    return None


def forget_all(folder: Path) -> None:
    """Notes that no chunk of a dataset is there."""
    with suppress(FileNotFoundError), open(folder / "chunks", "r+b") as file:
        file.write(bytes(os.fstat(file.fileno()).st_size))


def digest_of(parts: Sequence[Any]) -> int:
    """Returns XXH3-64 of bytes, one part after another."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return int(digest.intdigest())


def _check(chunk: int, digest: int, boot: int) -> int:
    """Returns the last number of a record: one that is written half, or that lies in another's place, has another."""
    return xxhash.xxh32_intdigest(b"%d/%d/%d" % (chunk, digest, boot))


def _allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def _fallocate(fd: int, mode: int, offset: int, num_bytes: int) -> None:
    function = ctypes.CDLL(None, use_errno=True).fallocate
    if function(fd, ctypes.c_int(mode), ctypes.c_int64(offset), ctypes.c_int64(num_bytes)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def check_room(cache: CacheFolder, needed: int, why: str, or_else: str) -> None:
    """Raises CacheError unless so many bytes fit into the cache at once."""
    if needed > cache.room:
        limit = needed + max(needed // (_SLACK - 1) + 1, _LEAST_SLACK)
        give = f"Give Remote(max_bytes={limit:_}) or more" if cache.is_chosen else "Make room there"
        raise CacheError(
            f"{cache.root.parent}: {cache.bound} is too small: {why} takes {format_bytes(limit)}. {give}{or_else}."
        )
