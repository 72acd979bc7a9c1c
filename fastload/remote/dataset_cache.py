"""`DatasetCache`: where a dataset's chunks are kept: on the disk, made anew where that is lost, or in memory."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from types import MappingProxyType

from fastload.errors import CacheError, FastloadError, ReplacedError
from fastload.format.header import PackedFile
from fastload.remote.byte_locks import ByteLocks
from fastload.remote.cache import CacheFolder
from fastload.remote.cached import CachedDataset, dataset_in_memory, dataset_on_disk
from fastload.remote.chunks import ChunkTable
from fastload.remote.fetch import ChunkFetcher, fetches_here
from fastload.remote.meta import Meta
from fastload.remote.objects import ShardObjects
from fastload.remote.options import Remote
from fastload.remote.room import ChunkRoom
from fastload.remote.source import ChunkSource
from fastload.system.text import format_bytes

_log = logging.getLogger("fastload")


class DatasetCache:
    """The chunks of a dataset that are cached, and who fetches them. Threads share it; a fork opens the cache anew.

    Args:
        url: of the dataset, without secrets.
        remote: names the cache, and its bound.
        file: the header, in the cache.
        table, room, objects, source: of its chunks.
        make: returns what keeps the dataset in use, which is in the cache then, and its header there.

    Attributes:
        cached, fetcher: those now; whoever holds chunks keeps the fetcher until they are released.
        fetchers: this one, and those before it in this process, whose counts go on.
        pid: the process that they are of.
        in_memory: whether chunks are fetched into memory, as the disk is full.
    """

    fetcher: ChunkFetcher
    cached: CachedDataset
    in_memory: bool

    def __init__(
        self,
        url: str,
        remote: Remote,
        file: PackedFile,
        table: ChunkTable,
        room: ChunkRoom,
        objects: ShardObjects,
        source: ChunkSource,
        make: Callable[[], tuple[ByteLocks, PackedFile]],
    ) -> None:
        self._url, self._remote, self._file, self._table = url, remote, file, table
        self._room, self._objects, self._source, self._make = room, objects, source, make
        self.pid, self._locks = os.getpid(), dict[int, threading.RLock]()
        self._said_lost = False
        self.fetchers = list[ChunkFetcher]()
        self._folders = list[CacheFolder]()
        self._open()
        _note_header(file, table, source, self.cached)

    def current(self) -> ChunkFetcher:
        """Returns the fetcher; after a fork it is a new one, as the locks of the other are the parent's."""
        if self.pid != os.getpid():
            with _lock_of(self._locks):
                if self.pid != os.getpid():
                    self._objects.begin()
                    self.fetchers, self._folders = [], []  # without the parent's
                    try:
                        self._open()
                    except FileNotFoundError:  # it is gone: the parent makes it anew
                        self._make_dataset()
                    self.pid = os.getpid()
        return self.fetcher

    def is_lost(self, copies: Mapping[int, int] = MappingProxyType({})) -> bool:
        """Whether somebody removed the dataset from the cache, or copies of shards, or cut them off.

        `copies`: descriptors of those that are open for reading.
        """
        return self.cached.copies.is_lost(copies)

    def open_anew(self, lost: ChunkFetcher) -> None:
        """Makes the dataset in the cache anew, replacing a fetcher's copy, and has chunks fetched again.

        Files of it were removed or cut off. Who reads from those that are open may go on with them.

        Raises:
            ReplacedError: the object is another one now.
            CacheError: somebody keeps removing the new copies.
        """
        with _lock_of(self._locks):
            if self.fetcher is not lost or self.in_memory:
                return
            folder = self._folders[-1]
            if not self._said_lost:
                self._said_lost = True
                _log.warning(
                    "%s: files of the cache %s were removed or cut off while in use: what was there is fetched again.",
                    self._url, folder.root.parent,
                )  # fmt: skip
            lost.leave()
            folder.remove_lost(self.cached.folder, self._in_use)
            most_held = lost.queue.most_held
            self._make_dataset()
            self.fetcher.queue.most_held = most_held

    def _make_dataset(self) -> None:
        deadline_s, pause_s = time.monotonic() + self._remote.give_up_after, 0.01
        while True:
            try:
                if not fetches_here():  # the training process makes it
                    return self._open()
                in_use, found = self._make()
                with closing(in_use):
                    if (found.header_digest, found.path) != (self._file.header_digest, self._file.path):
                        raise ReplacedError(f"{self._url}: the object was replaced while in use. Open it again.")
                    self._open()
                return _note_header(self._file, self._table, self._source, self.cached)
            except OSError as exc:  # it is not there, or was removed again
                if isinstance(exc, FastloadError):
                    raise
                if time.monotonic() > deadline_s:
                    raise CacheError(
                        f"{self._remote.cache_folder()}: the cache is removed again and again while it is used. End "
                        f"what does that, or name another folder: Remote(cache=...), FASTLOAD_CACHE."
                    ) from exc
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    def leave_disk(self) -> None:
        """Has chunks fetched into memory from now on, as the disk of the cache is full; a warning says so."""
        with _lock_of(self._locks):
            if self.in_memory:
                return
            limit = max(self._room.least_bytes, 4 * self._room.chunk_bytes) * 3 // 2
            _log.warning(
                "%s: the disk of the cache %s is full, and no chunk there can be evicted: chunks are fetched into %s "
                "of memory from now on, and again in each epoch. Make room there, or name another folder: "
                "Remote(cache=...).",
                self._url, self._folders[-1].root.parent, format_bytes(limit),
            )  # fmt: skip
            self.to_memory(limit)

    def to_memory(self, limit: int) -> None:
        """Fetches into so many bytes of memory from now on."""
        self.in_memory = True
        self._objects.note_in(None)
        sizes, spare = self._table.shards.num_bytes, self._room.chunk_bytes
        self._use(dataset_in_memory(limit, spare, sizes, self._table), limit // spare)

    def _open(self) -> None:
        """Opens the cache on the disk, and what it has of the dataset."""
        self.in_memory = False
        shards, remote, folder = self._table.shards, self._remote, self._file.path.parent
        cache = CacheFolder(remote.cache_folder(), remote.limit(), others=remote.shared)
        self._folders.append(cache)
        cached = dataset_on_disk(cache, folder, shards.names, shards.num_bytes, self._table)
        assert isinstance(cached.locks, ByteLocks), "of a file"
        self._in_use = cached.locks
        self._objects.note_in(Meta(folder / "meta.json"), cache.locked)
        self._room.bound = cached.bound
        self._use(cached, max(1, self._room.fitting))

    def _use(self, cached: CachedDataset, most_held: int) -> None:
        """Keeps chunks in a dataset from now on, and holds so many announced ones of each field."""
        needed = self.fetchers[-1].evictor.needed if self.fetchers else None
        self.cached, self._room.bound = cached, cached.bound
        self.fetcher = ChunkFetcher(
            cached,
            self._source,
            threads=self._remote.in_flight,
            most_held=most_held * max(1, len(self._table.fields)),
            give_up_after_s=self._remote.give_up_after,
        )
        self.fetcher.evictor.needed = needed
        self.fetchers.append(self.fetcher)

    def close(self) -> None:
        """Ends the threads that fetch; the cache stays."""
        for fetcher in self.fetchers:
            fetcher.close()
        for folder in self._folders:
            folder.close()


def _lock_of(locks: dict[int, threading.RLock]) -> threading.RLock:
    """Returns the lock of this process: at a fork a thread may hold the parent's, which nobody here releases."""
    return locks.setdefault(os.getpid(), threading.RLock())


def _note_header(file: PackedFile, table: ChunkTable, source: ChunkSource, cached: CachedDataset) -> None:
    """Notes of a file that is no index that its header is in its sparse copy, where it was looked at."""
    header = int(table.headers[0])
    if file.path != cached.copies.path(0) or cached.presence(header).complete:
        return
    if cached.locks.try_exclusive(header):
        ranges = source.ranges(table.chunk(header), cached)
        if ranges and not cached.presence(header).complete:
            cached.records.complete(header, cached.read(0, ranges))
        cached.locks.unlock(header)
