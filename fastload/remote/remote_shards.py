"""`RemoteShards`: the shards behind a URL, whose rows are fetched into sparse copies when they are needed.

`DatasetCache` says where the copies are: on the disk, made anew where they are lost, or in memory; `ChunkRoom` whether
the chunks that are needed at a time fit there; `Repairs` fetches again what was not what was packed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from fastload.errors import CacheError, FastloadError, ReplacedError
from fastload.format.header import PackedFile
from fastload.remote.cache import BLOCK, OWN_FILES, Bound, ByteLocks, CacheFolder, CacheLostError, Meta
from fastload.remote.chunks import ChunkTable
from fastload.remote.client import Client, note
from fastload.remote.evictor import Needed
from fastload.remote.fetch import ChunkFetcher, fetches_here
from fastload.remote.source import ChunkSource, ShardObjects
from fastload.remote.sparse_copies import CachedDataset, dataset_in_memory, dataset_on_disk
from fastload.remote.urls import Remote, shown
from fastload.system.files import write_at
from fastload.system.text import format_bytes
from fastload.timing.results import NetworkUse


class ChunkRoom:
    """The sizes of an index's chunks, and how many of them fit in.

    Args:
        file: header of the index.
        table: of its chunks.

    Attributes:
        largest: the bytes of the largest chunk of each field, together.
        chunk_bytes: the same with the blocks that it begins and ends in.
        ranks: of this machine, that share the cache.
        least_bytes: of memory, for chunks read at a time.
        bound: on what the chunks take.
    """

    bound: Bound

    def __init__(self, file: PackedFile, table: ChunkTable) -> None:
        self._file, self._table, self._shards = file, table, table.shards
        large = sum(file.fields[name].bytes_in(self._shards) for name in table.fields)
        # What HDF5 allocated behind the large fields counts as header.
        self.header_bytes: NDArray[np.int64] = self._shards.num_bytes - np.minimum(large, self._shards.num_bytes)
        self.largest = 1 + sum(table.largest.values())
        self.chunk_bytes = self.largest + 2 * BLOCK
        self.ranks, self.least_bytes = 1, 0

    @property
    def fitting(self) -> int:
        """The chunks of each field that this process may hold at a time, if all ranks of this machine hold as many."""
        return self.bound.room // self.ranks // self.largest - 1

    def check_held(self, chunks: Sequence[int]) -> None:
        """Raises CacheError where these chunks, which are needed at the same time, do not fit into the cache."""
        if (len(chunks) + 1) * self.chunk_bytes <= self.bound.room:
            return
        _, column, _ = self._table.placed(np.array(chunks, np.int64))
        needed = int(np.array([0, *(one + BLOCK for one in self._table.largest.values())])[column].sum())
        or_else = ", or read rows that lie in fewer chunks: FastLoader, or a DataLoader with a ChunkSampler"
        self.bound.check(needed, f"reading rows of {len(chunks)} chunks at a time", or_else)

    def check(self, num_chunks: int, why: str, or_else: str) -> None:
        """Raises CacheError where not so many chunks of each field fit into the cache, with their shards' headers.

        For each of the ranks of this machine. `or_else`: what to do else than to give the cache more.
        """
        shards = min(self.ranks * num_chunks, len(self._shards.names))
        num_chunks = min(num_chunks, self._table.num_chunks)
        self.least_bytes = num_chunks * self.chunk_bytes
        files = sum(path.stat().st_blocks * 512 for path in self._file.path.parent.iterdir() if path.name in OWN_FILES)
        headers = int(np.sort(self.header_bytes)[::-1][:shards].sum())
        self.bound.check(self.ranks * num_chunks * self.chunk_bytes + headers + files, why, or_else)


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
            most_held = lost.in_use.most_held
            self._make_dataset()
            self.fetcher.in_use.most_held = most_held

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


_ANEW_BYTES = 256 * 2**20  # of chunks that `read_anew` fetches ahead


class RemoteShards:
    """The shards behind a URL, and what of them is in the cache. Threads share it; a fork opens the cache anew.

    Args:
        url: of the file or index.
        remote: how it is read.
        file: its header, in the cache, as an index's.
        client: makes the requests.
        folder_key: of the objects' folder in the bucket.
        make: as of `DatasetCache`.

    Attributes:
        url: without secrets.
        table: of the chunks of all shards.
        cache: what of them is there, and who fetches it.
        room: their sizes, and whether they fit in.
        source: their bytes, from the objects.
        repairs: fetches again what was not what was packed.
    """

    def __init__(
        self,
        url: str,
        remote: Remote,
        file: PackedFile,
        client: Client,
        folder_key: str,
        make: Callable[[], tuple[ByteLocks, PackedFile]],
    ) -> None:
        self.url, self.remote, self._client, self.table = shown(url), remote, client, ChunkTable(file)
        self.room = ChunkRoom(file, self.table)
        self._objects = ShardObjects(
            self.url, file.path.name, self.table.shards, client, folder_key,
            lambda shard, read: self.source.has_other_header(shard, read, self.cache.cached),
        )  # fmt: skip
        self.source = ChunkSource(self.url, file, self.table, self._objects, check=remote.check)
        self.cache = DatasetCache(self.url, remote, file, self.table, self.room, self._objects, self.source, make)
        self.repairs = Repairs(self)

    def has_lost_header(self, shard: int) -> bool:
        """Whether the header of a shard, which is held and cannot be read, is no longer in its copy.

        Where this process cannot ask for it again, it is not: what came was compared with its digest.
        """
        return not fetches_here() or not self.cache.cached.presence(int(self.table.headers[shard])).complete

    def path(self, shard: int) -> Path:
        """Returns the sparse copy of a shard."""
        return self.cache.cached.copies.path(shard)

    def url_of(self, shard: int) -> str:
        """Returns the URL of a shard, without secrets."""
        return self._objects.url_of(shard)

    def expect(self, most_held: int, needed: Needed) -> None:
        """Says how many announced chunks of each field are fetched ahead, and which chunks are needed last."""
        fetcher = self.cache.current()
        fetcher.in_use.most_held = most_held * max(1, len(self.table.fields))
        fetcher.evictor.needed = needed

    def read_anew(self, num_bytes: int) -> None:
        """Fetches everything again, and into memory, also damaged rows: to compare what the objects hold.

        Before anything is read; so many bytes are read at a time.
        """
        chunk_bytes = self.room.chunk_bytes
        chunks = max(4, min(self.remote.in_flight, _ANEW_BYTES // chunk_bytes))
        self.cache.to_memory(int(self.room.header_bytes.max()) + 2 * num_bytes + 2 * chunks * chunk_bytes)
        self._objects.forget()
        self.source.lets_damage_pass = True

    def network_use(self) -> NetworkUse:
        """Returns what this process fetched so far."""
        self.cache.current()
        asked, fetched = replace(self._client.counts), [one.counts for one in self.cache.fetchers]
        return NetworkUse(
            bytes=sum(one.bytes for one in fetched),
            chunks=sum(one.chunks for one in fetched),
            again=sum(one.again for one in fetched),
            hits=sum(one.hits for one in fetched),
            requests=asked.requests,
            retries=asked.retries,
            refused=asked.throttled,
            busy_s=asked.busy_s,
            waited_s=sum(one.waited_s for one in fetched),
            url=self.url,
            in_flight=self.remote.in_flight,
            allowed=self._client.allowed,
            dataset_bytes=int(self.table.shards.num_bytes.sum()),
            room_bytes=self.room.bound.room,
        )

    def holding_header(self, shard: int) -> AbstractContextManager[None]:
        """Returns a context within which the header of a shard is in its sparse copy."""
        return self.holding([int(self.table.headers[shard])])

    @contextmanager
    def holding(self, chunks: list[int]) -> Iterator[None]:
        """Within it these chunks are there, in the files that their names lead to as it begins."""
        while True:
            fetcher = self.cache.current()
            if self.cache.is_lost():
                self.cache.open_anew(fetcher)
                continue
            try:
                fetcher.hold(chunks)
                break
            except CacheLostError:
                self.cache.open_anew(fetcher)
        try:
            yield
        finally:
            fetcher.release(chunks)

    def close(self) -> None:
        """Ends the threads that fetch; the cache stays."""
        if self.cache.pid == os.getpid():
            self._client.close()  # first: a thread may be about to repeat a request
            self.cache.close()


class Repairs:
    """Fetches chunks again of which rows were not what was packed. Threads share it."""

    def __init__(self, shards: RemoteShards) -> None:
        self._shards, self._lock = shards, threading.Lock()
        # Chunks that were written again, and those that are damaged in the object itself.
        self._repaired, self._unrepaired = set[int](), set[int]()

    def repaired(self, chunks: Sequence[int]) -> bool:
        """Fetches chunks that are there again, from another connection; returns whether any of them was another one.

        Bytes that differ are written, so that each chunk is what came last. One that came the same is not asked for
        again.
        """
        with self._lock:
            found = [self._is_repaired(number) for number in chunks]
        if any(found):
            note(self._shards.url)
        return any(found)

    def _is_repaired(self, number: int) -> bool:
        shards, cached = self._shards, self._shards.cache.cached
        chunk = shards.table.chunk(number)
        if number in self._unrepaired or not shards.remote.check or not fetches_here():
            return False
        if not cached.presence(number).complete:  # as it came damaged twice
            return False
        with shards.holding(list({int(shards.table.headers[chunk.shard]), number})):
            cached = shards.cache.cached
            parts = shards.source.read(chunk.shard, shards.source.ranges(chunk, cached), anew=True)
            if cached.read(chunk.shard, [one for one, _ in parts]) == [bytes(data) for _, data in parts]:
                is_others = number in self._repaired  # what this thread could not read, another one has repaired
                self._repaired.discard(number)
                if not is_others:
                    self._unrepaired.add(number)
                return is_others
            with cached.copies.opened(chunk.shard) as fd:
                for (begin, _), data in parts:
                    write_at(fd, data, begin)
            cached.records.complete(number, [data for _, data in parts])
        shards.source.layouts.pop(chunk.shard, None)
        self._repaired.add(number)
        return True
