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

Somebody else may remove any of these files, or cut them off, at any time. `used` and `chunks` are not mapped: what is
not in them counts as not there. Who has a dataset open keeps its files, and notices that their names lead to others
(`CachedDataset.is_lost`): then the dataset is removed for all, and made anew by each that uses it.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import CacheError, FormatError, OptionError
from fastload.remote.byte_locks import ByteLocks
from fastload.remote.chunks import Range, joined_ranges, without
from fastload.remote.own_files import Folder, check_own
from fastload.system import syscalls
from fastload.system.files import read_bytes, write_at
from fastload.system.text import format_bytes

VERSION = 1
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_BLOCK = mmap.PAGESIZE
OWN_FILES = ("chunks", "locks", "meta.json")
"""Names of the files of a dataset's folder that are no copies."""
_IN_USE = 2**62  # the byte of `locks` on which each user of a dataset has a shared lock
_BOUND, _ALIVE = 0, 1  # bytes of `used`
_USED_AT = 64  # where the number stands there
# Kept free for what file systems allocate by themselves, for records, and while meta.json is written anew: one part in
# so many of the bound, and no less than some blocks.
_SLACK, _LEAST_SLACK = 512, 4 * _BLOCK

RECORD = np.dtype([("hash", "<u8"), ("boot", "<u4"), ("check", "<u4")])
_BEGUN = 1  # as `boot`: bytes may be on the disk, and are not to be used


class CacheLeftError(OSError):
    """Chunks are to be read from elsewhere than so far."""


class DiskFullError(CacheLeftError):
    """The disk of the cache is full before its bound is reached."""


class CacheLostError(CacheLeftError):
    """Somebody has removed files of the cache that are in use, or cut them off."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.ESTALE, "it was removed or cut off while in use", str(path))


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

    def __init__(self, folder: Path, limit: int | None, *, others: bool = False) -> None:
        self.root, self.others = folder.expanduser().absolute() / str(VERSION), others
        for tries_left in (2, 1, 0):
            try:
                self._locks = ByteLocks(self._opened_root())
                os.posix_fallocate(self._locks.fd, 0, _BLOCK)
                break
            except OSError as exc:
                if tries_left and isinstance(exc, FileNotFoundError):  # somebody removes it
                    continue
                raise OptionError(
                    f"{folder}: no cache of remote files can be made there ({exc.strerror}). Name another folder: "
                    f"Remote(cache=...), or FASTLOAD_CACHE."
                ) from exc
        self._thread_lock, self._depth = threading.RLock(), 0
        if self._locks.try_exclusive(_ALIVE):  # nobody else uses it: what killed processes left is counted anew
            with self.locked():
                self.count()
        self._locks.wait_shared(_ALIVE)
        self.is_chosen = limit is not None
        if limit is None:
            system = os.statvfs(self.root)
            limit = self.used + system.f_bavail * system.f_frsize * 9 // 10
        self.limit = limit
        self.room = limit - max(limit // _SLACK, _LEAST_SLACK)

    def _opened_root(self) -> int:
        """Returns the descriptor of `used` in the folder, which is made if it is not there."""
        self.root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.others:
            check_own(self.root.parent, is_root=False)
        with suppress(FileExistsError):
            self.root.mkdir(mode=0o700)
            if self.others:
                os.chmod(self.root, os.stat(self.root.parent).st_mode & 0o2777)
        if not self.others:
            check_own(self.root, is_root=True)
        with closing(Folder(self.root, shared=self.others)) as opened:
            return opened.open("used", os.O_RDWR | os.O_CREAT)

    @property
    def bound(self) -> str:
        """The bound, as messages name it."""
        return f"{'max_bytes' if self.is_chosen else 'nine tenths of what is free'} of {format_bytes(self.limit)}"

    @property
    def used(self) -> int:
        """The bytes that all files of the cache take on the disk."""
        data = _read_few(self._locks.fd, 8, _USED_AT)
        return int.from_bytes(data, "little") if len(data) == 8 else allocated_below(self.root)  # it was cut off

    @used.setter
    def used(self, num_bytes: int) -> None:
        _write_few(self._locks.fd, num_bytes.to_bytes(8, "little"), _USED_AT)

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
                if not leads_to(self.root / "used", self._locks.fd):
                    raise CacheLostError(self.root)
                yield
            finally:
                self._depth -= 1
                self._locks.unlock(_BOUND)

    def count(self) -> None:
        """Counts what the files take, within `locked`."""
        self.used = allocated_below(self.root)

    def allocate(self, fd: int, ranges: Sequence[Range]) -> bool:
        """Allocates ranges of a file; returns False where they would pass the bound.

        They are counted before they are there: a process that is killed in between leaves too much counted, never too
        little.
        DiskFullError: no space is left; some of them may be allocated.
        """
        blocks = [(begin // _BLOCK * _BLOCK, -(-end // _BLOCK) * _BLOCK) for begin, end in ranges]
        most = sum(end - begin for begin, end in blocks) + _BLOCK
        with self.locked():
            used = self.used
            if used + most > self.room:
                return False
            before = _allocated(fd)
            self.used = used + most
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
                self.used = used + _allocated(fd) - before
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
                self.used += _allocated(fd) - before

    def free(self, fd: int, ranges: Sequence[Range]) -> None:
        """Gives the blocks of ranges of a file back, within `locked`; what shares a block with others becomes zeros."""
        before = _allocated(fd)
        for begin, end in ranges:
            _fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, begin, end - begin)
        self.used += _allocated(fd) - before

    def datasets(self) -> list[Path]:
        """Returns the folders of all datasets, those used longest ago first."""
        found = []
        for path in self.root.iterdir():
            with suppress(OSError):  # another process removes it
                if not path.is_symlink() and stat.S_ISREG((meta := (path / "meta.json").lstat()).st_mode):
                    found.append((meta.st_mtime, path))
        return [path for _, path in sorted(found)]

    def _locks_of(self, folder: Path) -> ByteLocks | None:
        """Returns the locks of a dataset, to be closed; None: it is gone.

        Also where only they are: who made others would not keep those away who use the dataset still.
        """
        try:
            with closing(Folder(folder, shared=self.others)) as opened:
                return ByteLocks(opened.open("locks", os.O_RDWR))
        except FileNotFoundError:
            return None

    def is_usable(self, folder: Path) -> bool:
        """Whether a dataset is there, and can be kept in use. CacheError: it is a link, or somebody else's."""
        if (locks := self._locks_of(folder)) is None:
            return False
        locks.close()
        return True

    def keep_in_use(self, folder: Path) -> ByteLocks | None:
        """Returns locks that keep a dataset from being removed until they are closed; None: it is gone, or about to."""
        if (locks := self._locks_of(folder)) is None:
            return None
        if locks.try_shared(_IN_USE) and os.fstat(locks.fd).st_nlink:  # else it was removed before the lock
            return locks
        locks.close()
        return None

    def in_use(self, folder: Path) -> bool:
        """Whether some process uses a dataset, or makes it."""
        if (locks := self._locks_of(folder)) is None:
            return False
        try:
            return locks.is_locked(_IN_USE)
        finally:
            locks.close()

    def remove(self, folder: Path) -> bool:
        """Removes a dataset, unless some process uses it; returns whether it is gone. Within `locked`."""
        assert folder.parent == self.root and not folder.is_symlink(), "only what lies in the cache is removed"
        if (locks := self._locks_of(folder)) is None:  # another process was first, or somebody removed its locks
            if folder.is_dir():
                self._remove(folder)
            return True
        try:
            if not locks.try_exclusive(_IN_USE):
                return False
            self._remove(folder)
            return True
        finally:
            locks.close()

    def _remove(self, folder: Path) -> None:
        # Under another name first: whoever opens it meanwhile makes a new one.
        going = Path(tempfile.mkdtemp(prefix=".gone-", dir=self.root))
        os.rename(folder, going / folder.name)
        shutil.rmtree(going, ignore_errors=True)
        self.count()

    def remove_lost(self, folder: Path, locks: ByteLocks) -> None:
        """Removes a dataset of which some files are lost, unless its name leads to another one already.

        Whoever uses it, which these locks are of, has its files open, and makes a new one when it notices.
        """
        with suppress(OSError), self.locked():
            if folder.is_dir() and (leads_to(folder / "locks", locks.fd) or not (folder / "locks").exists()):
                self._remove(folder)

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


class Presence(NamedTuple):
    """The state of a chunk by its record: its bytes can be used; since this boot of the machine."""

    complete: bool
    this_boot: bool


class CachedDataset:
    """The sparse copies of one dataset, the records of their chunks, and the locks on them.

    Any thread may call it. The locks are the process's; `fetch` counts its threads.

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
        self._paths = [f"{folder}/{name}" for name in names]
        self._locks_path, self._chunks_path = f"{folder}/locks", f"{folder}/chunks"
        self._shard_of = {header: shard for shard, header in enumerate(self._bounds[:-1])}
        self._folder, locks = Folder(folder, shared=cache.others), cache.keep_in_use(folder)
        try:
            if locks is None:
                raise FileNotFoundError(errno.ENOENT, "it is being removed", str(folder))
            self.locks = locks
            self._chunks_fd = self._folder.open("chunks", os.O_RDWR | os.O_CREAT)
            self.records: Records | NDArray[Any] = Records(self._chunks_fd, num_chunks, cache)
        except BaseException:
            self._folder.close()
            if locks is not None:
                locks.close()
            raise

    def path(self, shard: int) -> Path:
        """Returns the sparse copy of a shard."""
        return self.folder / self._names[shard]

    def size(self, shard: int) -> int:
        """Returns the bytes of a shard."""
        return int(self._sizes[shard])

    @contextmanager
    def opened(self, shard: int) -> Iterator[int]:
        """Yields a descriptor for reading and writing a shard's sparse copy, which is made if it is not there.

        CacheLostError: the folder was removed.
        """
        name, size = self._names[shard], int(self._sizes[shard])
        try:
            if (fd := self._open_copy(name, size)) is None:
                with self.cache.locked():  # another process may be first
                    if (fd := self._open_copy(name, size)) is None:
                        fd = self._made(shard, name, size)
        except FileNotFoundError as exc:
            raise CacheLostError(self.folder) from exc
        try:
            yield fd
        finally:
            os.close(fd)

    def _open_copy(self, name: str, size: int) -> int | None:
        """Returns the descriptor of a shard's copy; None: it is not there, or was cut off."""
        with suppress(FileNotFoundError):
            fd = self._folder.open(name, os.O_RDWR)
            if syscalls.status_of(fd).size == size:
                return fd
            os.close(fd)
        return None

    def _made(self, shard: int, name: str, size: int) -> int:
        """Returns the descriptor of a new copy of a shard, of which no chunk is there any more.

        A new file in any case: who has the one before mapped sees that the name leads to another one.
        """
        new = f"{name}.new-{os.getpid()}-{threading.get_ident()}"
        fd = self._folder.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.ftruncate(fd, size)
            first, records = self._bounds[shard], self.records[self._bounds[shard] : self._bounds[shard + 1]]
            for chunk in (first + np.flatnonzero(are_there(records))).tolist():
                self.forget(chunk)
            self._folder.rename(new, name)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def is_lost(self, copies: Mapping[int, int]) -> bool:
        """Whether the names of the dataset, and of copies of shards, lead to other files than are open, or cut ones.

        `copies`: the descriptor of each.
        """
        own = [(self._locks_path, self.locks.fd), (self._chunks_path, self._chunks_fd)]
        return not all(leads_to(path, fd) for path, fd in own) or any(
            not leads_to(self._paths[shard], fd, int(self._sizes[shard])) for shard, fd in copies.items()
        )

    def presence(self, chunk: int) -> Presence:
        """Returns the state of a chunk, which counts while a lock is held on it."""
        record = self.records[chunk]
        boot = int(record["boot"])
        complete = boot > _BEGUN and int(record["check"]) == _check(chunk, int(record["hash"]), boot)
        if complete and (shard := self._shard_of.get(chunk)) is not None:
            with self.opened(shard):  # of one that was removed or cut off nothing counts as there any more
                complete = int(self.records[chunk]["boot"]) == boot
        return Presence(complete, complete and boot == boot_number())

    def begin(self, chunk: int) -> None:
        """Notes that bytes of a chunk may be on the disk; its lock is held exclusively."""
        self.records[chunk] = (0, _BEGUN, 0)

    def complete(self, chunk: int, digest: int) -> None:
        """Notes that all bytes of a chunk, of this XXH3-64, are there."""
        boot = boot_number()
        self.records[chunk] = (digest, boot, _check(chunk, digest, boot))

    def forget(self, chunk: int) -> None:
        """Notes that a chunk is not there."""
        self.records[chunk] = (0, 0, 0)

    def kept(self) -> NDArray[np.int64]:
        """Returns the chunks that take space on the disk, int64 (n,)."""
        return np.flatnonzero(self.records[:]["boot"])

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

        `around`: chunks whose bytes touch this one's, with their ranges: disk blocks that it shares with them are freed
        with it where these chunks are absent.
        """
        if not self.locks.try_exclusive(chunk):
            return False
        try:
            with self.cache.locked(), self.opened(shard) as fd:
                if self.records[others]["boot"].any():
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

    def write(self, chunk: int, shard: int, parts: Sequence[tuple[Range, Any]]) -> None:
        """Writes a chunk's bytes, whose ranges were allocated, to a shard's sparse copy, and notes that it is there.

        Its lock is held exclusively. CacheLostError: the copy was removed meanwhile; it is not there.
        """
        with self.opened(shard) as fd:
            for (begin, _), data in parts:
                write_at(fd, data, begin)
            self.complete(chunk, digest_of([data for _, data in parts]))
            if self.is_lost({shard: fd}):
                self.forget(chunk)
                raise CacheLostError(self.path(shard))

    def close(self) -> None:
        """Ends the locks of this process."""
        self.locks.close()
        self._folder.close()
        if isinstance(self.records, Records):
            self.records.close()


class Records:
    """The records of chunks in a file of its own, as an array of `RECORD`; what was cut off of it is zeros.

    Args:
        fd: of the file, which it closes.
        count: of the records.
        cache: allocates all of it.
    """

    def __init__(self, fd: int, count: int, cache: CacheFolder) -> None:
        self._fd, self._count = fd, count
        try:
            cache.allocate_whole(fd, count * RECORD.itemsize)
        except BaseException:
            os.close(fd)
            raise

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, which: int | slice) -> Any:
        first, stop, _ = which.indices(self._count) if isinstance(which, slice) else (which, which + 1, 1)
        size, offset = max(0, stop - first) * RECORD.itemsize, first * RECORD.itemsize
        if not isinstance(which, slice):
            return np.frombuffer(_read_few(self._fd, size, offset).ljust(size, b"\0"), RECORD)[0]
        return np.frombuffer(read_bytes(self._fd, size, offset).ljust(size, b"\0"), RECORD)

    def __setitem__(self, which: int, record: Any) -> None:
        _write_few(self._fd, np.array([record], RECORD).tobytes(), which * RECORD.itemsize)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def leads_to(path: str | Path, fd: int, size: int | None = None) -> bool:
    """Whether a path leads to an open file, through no link at its end; and that has so many bytes."""
    there, here = syscalls.status_at(path), syscalls.status_of(fd)
    return there is not None and there[:2] == here[:2] and size in (None, here.size)


def forget_all(folder: Folder) -> None:
    """Notes that no chunk of a dataset is there."""
    with suppress(FileNotFoundError), open(folder.open("chunks", os.O_RDWR), "r+b") as file:
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


# What follows is done for each chunk, by threads that must not wait for the GIL again.


def _read_few(fd: int, num_bytes: int, offset: int) -> bytes:
    return syscalls.read_resident(fd, offset, num_bytes) or read_bytes(fd, num_bytes, offset)


def _write_few(fd: int, data: bytes, offset: int) -> None:
    if not syscalls.write_resident(fd, data, offset):
        write_at(fd, data, offset)


def _allocated(fd: int) -> int:
    return syscalls.status_of(fd).allocated


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
