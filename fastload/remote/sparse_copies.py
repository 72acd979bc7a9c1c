"""The chunks of one dataset that are in the cache: their sparse copies, the records of them, and the locks on them.

`DiskCopies` opens the sparse copies, `ChunkRecords` says which chunks are whole, `CachedDataset` writes and evicts
chunks. Any thread may call them; the locks are the process's, and `in_use` counts its threads.

Where the disk of the cache is full, and to verify objects, copies are in the memory of this process (`MemoryCopies`):
they have no name, end with it, and hold only chunks being read; nothing is kept for later epochs.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.remote.cache import (
    BLOCK,
    Bound,
    ByteLocks,
    CacheFolder,
    CacheLostError,
    MemoryBound,
    leads_to,
    read_few,
    sparse_memory,
    write_few,
)
from fastload.remote.chunks import ChunkTable, Range, joined_ranges, without
from fastload.remote.own_files import Folder
from fastload.system import syscalls
from fastload.system.files import read_bytes, write_at

RECORD = np.dtype([("hash", "<u8"), ("boot", "<u4"), ("check", "<u4")])
_BEGUN = 1  # as `boot`: bytes may be on the disk, and are not to be used


@cache
def boot_number() -> int:
    """Returns a number of this boot of the machine, 2 or more: memory may not have reached the disk at the last end."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        text = b""
    return max(2, xxhash.xxh32_intdigest(text))


def are_there(records: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether records are of chunks that came whole, as far as they say without a look at each: bool (n,)."""
    found: NDArray[np.bool_] = records["boot"] > _BEGUN
    return found


class Presence(NamedTuple):
    """The state of a chunk by its record: its bytes can be used; since this boot of the machine."""

    complete: bool
    this_boot: bool


class ChunkRecords:
    """The records of chunks: which are whole, and of which digest. They count while a lock is held on the chunk.

    What was cut off of their file counts as zeros.

    Args:
        fd: of the file of records, which it closes.
        count: of the chunks.
    """

    def __init__(self, fd: int, count: int) -> None:
        self.fd, self._count = fd, count

    def presence(self, chunk: int) -> Presence:
        """Returns the state of a chunk."""
        record = self._record(chunk)
        boot = int(record["boot"])
        complete = boot > _BEGUN and int(record["check"]) == _check(chunk, int(record["hash"]), boot)
        return Presence(complete, complete and boot == boot_number())

    def begin(self, chunk: int) -> None:
        """Notes that bytes of a chunk may be on the disk; its lock is held exclusively."""
        self._write(chunk, 0, _BEGUN, 0)

    def complete(self, chunk: int, parts: Sequence[Any]) -> None:
        """Notes that all bytes of a chunk, one part after another, are there."""
        digest, boot = digest_of(parts), boot_number()
        self._write(chunk, digest, boot, _check(chunk, digest, boot))

    def forget(self, chunk: int) -> None:
        """Notes that a chunk is not there."""
        self._write(chunk, 0, 0, 0)

    def kept(self, chunks: slice = slice(None), *, whole: bool = False) -> NDArray[np.int64]:
        """Returns which of these chunks take space on the disk, int64 (n,); `whole`: which came whole."""
        first, stop, _ = chunks.indices(self._count)
        size = max(0, stop - first) * RECORD.itemsize
        records = np.frombuffer(read_bytes(self.fd, size, first * RECORD.itemsize).ljust(size, b"\0"), RECORD)
        found: NDArray[np.int64] = first + np.flatnonzero(are_there(records) if whole else records["boot"])
        return found

    def fits(self, chunk: int, parts: Sequence[Any]) -> bool:
        """Whether bytes are those that a chunk's record was written for."""
        return digest_of(parts) == int(self._record(chunk)["hash"])

    def _record(self, chunk: int) -> Any:
        size = RECORD.itemsize
        return np.frombuffer(read_few(self.fd, size, chunk * size).ljust(size, b"\0"), RECORD)[0]

    def _write(self, chunk: int, *record: int) -> None:
        write_few(self.fd, np.array([record], RECORD).tobytes(), chunk * RECORD.itemsize)

    def close(self) -> None:
        """Closes the file."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class DiskCopies:
    """Sparse copies in a folder of the cache, where the files of their records and locks are, too.

    Args:
        folder: of the dataset, opened; closed with this.
        names, sizes: name and bytes of each shard.
        own: the names of records and locks there, and their descriptors.
        cache: of the folder.
        forget: called with a shard of which a new copy is made, which holds no chunk.
    """

    def __init__(
        self,
        folder: Folder,
        names: Sequence[str],
        sizes: NDArray[np.int64],
        own: Sequence[tuple[str, int]],
        cache: CacheFolder,
        forget: Callable[[int], None],
    ) -> None:
        self._folder, self._names, self._sizes, self._cache, self._forget = folder, names, sizes, cache, forget
        self._paths = [f"{folder.path}/{name}" for name in names]
        self._own = [(f"{folder.path}/{name}", fd) for name, fd in own]

    def path(self, shard: int) -> Path:
        """Returns the copy of a shard."""
        return Path(self._paths[shard])

    @contextmanager
    def opened(self, shard: int) -> Iterator[int]:
        """Yields the descriptor of a shard's copy. CacheLostError: the folder was removed."""
        try:
            if (fd := self._found(shard)) is None:
                with self._cache.locked():  # another process may be first
                    if (fd := self._found(shard)) is None:
                        fd = self._made(shard)
        except FileNotFoundError as exc:
            raise CacheLostError(self._folder.path) from exc
        try:
            yield fd
        finally:
            os.close(fd)

    def _found(self, shard: int) -> int | None:
        """Returns the descriptor of a shard's copy; None: it is not there, or was cut off."""
        with suppress(FileNotFoundError):
            fd = self._folder.open(self._names[shard], os.O_RDWR)
            if syscalls.status_of(fd).size == self._sizes[shard]:
                return fd
            os.close(fd)
        return None

    def _made(self, shard: int) -> int:
        """Returns the descriptor of a new copy of a shard, of which no chunk is there any more.

        A new file in any case: who has the one before mapped sees that the name leads to another one.
        """
        new = f"{self._names[shard]}.new-{os.getpid()}-{threading.get_ident()}"
        fd = self._folder.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.ftruncate(fd, int(self._sizes[shard]))
            self._forget(shard)
            self._folder.rename(new, self._names[shard])
        except BaseException:
            os.close(fd)
            raise
        return fd

    def is_lost(self, copies: Mapping[int, int] | None = None) -> bool:
        """Whether names of the dataset lead to other files than are open, or to cut ones."""
        return not all(leads_to(path, fd) for path, fd in self._own) or any(
            not leads_to(self._paths[shard], fd, int(self._sizes[shard])) for shard, fd in (copies or {}).items()
        )

    def close(self) -> None:
        """Closes the folder."""
        self._folder.close()


class MemoryCopies:
    """Sparse copies in memory.

    Args:
        sizes: bytes of each shard.
    """

    def __init__(self, sizes: NDArray[np.int64]) -> None:
        self._sizes, self._lock = sizes, threading.Lock()
        self._fds: dict[int, int] = {}

    def path(self, shard: int) -> Path:
        """Returns a path by which this process can open the copy of a shard."""
        with self.opened(shard) as fd:
            return Path(f"/proc/self/fd/{fd}")

    @contextmanager
    def opened(self, shard: int) -> Iterator[int]:
        """Yields the descriptor of a shard's copy, which is made if it is not there."""
        with self._lock:
            fd = self._fds.get(shard)
            if fd is None:
                fd = self._fds[shard] = sparse_memory(int(self._sizes[shard]))
        yield fd

    def is_lost(self, copies: Mapping[int, int] | None = None) -> bool:
        """Returns False: nobody else can remove it."""
        return False

    def close(self) -> None:
        """Gives the memory back."""
        with self._lock:
            while self._fds:
                os.close(self._fds.popitem()[1])


class CachedDataset:
    """The chunks of one dataset that are kept; the caller locks each that it uses.

    Args:
        folder: of the dataset, for messages, and to tell datasets apart.
        table: of the chunks.
        sizes: bytes of each shard.
        copies, records, locks: of the chunks; closed with this.
        bound: on what the copies take.
        cache: that other datasets share; None: of memory.
    """

    def __init__(
        self,
        folder: Path,
        table: ChunkTable,
        sizes: NDArray[np.int64],
        copies: DiskCopies | MemoryCopies,
        records: ChunkRecords,
        locks: ByteLocks,
        bound: Bound,
        cache: CacheFolder | None = None,
    ) -> None:
        self.folder, self.table, self.copies, self.records, self.locks = folder, table, copies, records, locks
        self.bound, self.cache = bound, cache
        self._sizes = sizes
        self._shard_of = {header: shard for shard, header in enumerate(table.headers.tolist())}

    def presence(self, chunk: int) -> Presence:
        """Returns the state of a chunk, which counts while a lock is held on it."""
        found = self.records.presence(chunk)
        if found.complete and (shard := self._shard_of.get(chunk)) is not None:
            with self.copies.opened(shard):  # of one that was removed or cut off nothing counts as there any more
                found = self.records.presence(chunk)
        return found

    def write(self, chunk: int, shard: int, parts: Sequence[tuple[Range, Any]]) -> None:
        """Writes a chunk's bytes, whose ranges were allocated, to a shard's sparse copy, and notes that it is there.

        Its lock is held exclusively. CacheLostError: the copy was removed meanwhile; it is not there.
        """
        with self.copies.opened(shard) as fd:
            for (begin, _), data in parts:
                write_at(fd, data, begin)
            self.records.complete(chunk, [data for _, data in parts])
            if self.copies.is_lost({shard: fd}):
                self.records.forget(chunk)
                raise CacheLostError(self.copies.path(shard))

    def read(self, shard: int, ranges: Sequence[Range]) -> list[bytes]:
        """Returns the bytes of ranges of a shard's copy."""
        with self.copies.opened(shard) as fd:
            return [read_bytes(fd, end - begin, begin) for begin, end in ranges]

    def whole(self, shard: int) -> list[Range]:
        """Returns the range of all of a shard; with its last block, which is freed whole, too."""
        return [(0, int(self._sizes[shard]) + BLOCK)]

    def evict_shard(self, shard: int, header: int, chunks: slice) -> bool:
        """Removes all of a shard, its header and its other chunks, unless somebody uses any; returns whether it did."""
        taken = list[int]()
        try:
            for chunk in [header, *range(chunks.start, chunks.stop)]:
                if not self.locks.try_exclusive(chunk):
                    return False
                taken.append(chunk)
            with self.bound.locked(), self.copies.opened(shard) as fd:
                for chunk in taken:
                    self.records.forget(chunk)
                self.bound.free(fd, self.whole(shard))
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
            with self.bound.locked():
                if len(self.records.kept(others)):
                    return False
                self.free(chunk, shard, ranges, around)
        finally:
            self.locks.unlock(chunk)
        return True

    def free(self, chunk: int, shard: int, ranges: Sequence[Range], around: Sequence[tuple[int, Range]]) -> None:
        """Gives back what is allocated of a chunk, whose lock is held exclusively; `around` as in `evict`."""
        with self.bound.locked(), self.copies.opened(shard) as fd:
            self.records.forget(chunk)
            is_there = {near: len(self.records.kept(slice(near, near + 1))) > 0 for near, _ in around}
            # In an index of shards packed with other options, one HDF5 chunk may be part of two of these chunks.
            kept = joined_ranges([other for near, other in around if is_there[near]], 0)
            absent = [other for near, other in around if not is_there[near]]
            self.bound.free(fd, [_widened(one, absent) for one in without(ranges, kept)])

    def close(self) -> None:
        """Ends the locks of this process."""
        self.locks.close()
        self.copies.close()
        self.records.close()


def dataset_on_disk(
    cache: CacheFolder, folder: Path, names: Sequence[str], sizes: NDArray[np.int64], table: ChunkTable
) -> CachedDataset:
    """Returns what the cache has of a dataset, whose folder is complete but for its chunks; it is kept in use.

    `names`, `sizes`: name and bytes of each shard. FileNotFoundError: it is being removed.
    """
    opened, locks = Folder(folder, shared=cache.others), cache.keep_in_use(folder)
    try:
        if locks is None:
            raise FileNotFoundError(errno.ENOENT, "it is being removed", str(folder))
        records = ChunkRecords(opened.open("chunks", os.O_RDWR | os.O_CREAT), table.num_chunks)
        try:
            cache.bound.allocate_whole(records.fd, table.num_chunks * RECORD.itemsize)
        except BaseException:
            records.close()
            raise
    except BaseException:
        opened.close()
        if locks is not None:
            locks.close()
        raise

    def forget(shard: int) -> None:
        for chunk in records.kept(slice(int(table.headers[shard]), table.data_of(shard).stop), whole=True).tolist():
            records.forget(chunk)

    copies = DiskCopies(opened, names, sizes, [("locks", locks.fd), ("chunks", records.fd)], cache, forget)
    return CachedDataset(folder, table, sizes, copies, records, locks, cache.bound, cache)


def dataset_in_memory(limit: int, spare: int, sizes: NDArray[np.int64], table: ChunkTable) -> CachedDataset:
    """Returns a dataset whose chunks are kept in memory, as `MemoryBound` says; `sizes`: bytes of each shard."""
    records = ChunkRecords(sparse_memory(table.num_chunks * RECORD.itemsize), table.num_chunks)
    locks = ByteLocks(sparse_memory(BLOCK))
    bound = MemoryBound(locks, limit, spare)
    return CachedDataset(bound.root / "copies", table, sizes, MemoryCopies(sizes), records, locks, bound)


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


def _widened(one: Range, absent: Sequence[Range]) -> Range:
    """Returns a range with the blocks at its ends that it shares only with absent neighbours."""
    begin, end = one
    first, last = begin // BLOCK * BLOCK, -(-end // BLOCK) * BLOCK
    for other_begin, other_end in absent:
        if other_end == one[0] and other_begin <= first:
            begin = first
        elif other_begin == one[1] and other_end >= last:
            end = last
    return begin, end
