"""`RemoteShards`: the shards behind a URL, whose rows are fetched into sparse copies when they are needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from fastload.format.header import PackedFile
from fastload.remote.agreement import note
from fastload.remote.byte_locks import ByteLocks
from fastload.remote.cache import CacheLostError
from fastload.remote.chunks import ChunkTable
from fastload.remote.client import Client
from fastload.remote.dataset_cache import DatasetCache
from fastload.remote.evictor import Needed
from fastload.remote.fetch import fetches_here
from fastload.remote.objects import ShardObjects
from fastload.remote.options import Remote, shown
from fastload.remote.room import ChunkRoom
from fastload.remote.source import ChunkSource
from fastload.system.files import write_at
from fastload.timing.results import NetworkUse

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
        fetcher.queue.most_held = most_held * max(1, len(self.table.fields))
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
