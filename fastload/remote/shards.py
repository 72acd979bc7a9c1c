"""`RemoteShards`: the shards behind a URL; where their chunks lie, how they are requested, and who fetches them."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import (
    CacheError,
    DamagedRowError,
    FastloadError,
    FormatError,
    MissingFileError,
    RemoteError,
    ReplacedError,
)
from fastload.format.digests import header_digest
from fastload.format.header import PackedFile, open_hdf5
from fastload.format.shards import Shards
from fastload.remote.agreement import agreed, note
from fastload.remote.backend import ObjectInfo
from fastload.remote.byte_locks import ByteLocks
from fastload.remote.cache import OWN_FILES, CachedDataset, CacheFolder, CacheLostError, check_room, digest_of
from fastload.remote.chunks import (
    JOINED_BYTES,
    Chunk,
    ChunkTable,
    Range,
    ShardLayout,
    joined_ranges,
    likely_header,
)
from fastload.remote.client import Client, ShortObjectError
from fastload.remote.fetch import ChunkFetcher, fetches_here
from fastload.remote.headers import header_problem, header_ranges, look_for_header
from fastload.remote.memory import MemoryDataset, MemoryFolder, sparse_memory
from fastload.remote.meta import Meta
from fastload.remote.options import Remote, shown
from fastload.remote.room import Needed
from fastload.remote.row_digests import wrong_encoded_rows, wrong_rows
from fastload.system.files import read_bytes, write_at
from fastload.system.text import format_bytes, text_of
from fastload.timing.network import NetworkUse

_ANEW_BYTES = 256 * 2**20  # of chunks that `read_anew` fetches ahead
_log = logging.getLogger("fastload")


class RemoteShards:
    """The shards behind a URL, and what of them is in the cache. Threads share it; a fork opens the cache anew.

    Attributes:
        url: of the file or index, without secrets.
        table: of the chunks of all shards.
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
        self.url = shown(url)
        self.remote, self._file, self._client = remote, file, client
        self._folder_key = folder_key  # of the objects' folder in the bucket
        self._make = make  # the dataset in the cache, which is then in use
        # Chunks that were written again, and those that are damaged in the object itself.
        self._repairing, self._repaired, self._unrepaired = threading.Lock(), set[int](), set[int]()
        self._damaged_headers = set[int]()  # shards whose header is
        self._said_lost = False
        self.table = ChunkTable(file)
        self.ranks = 1  # of this machine, that share the cache
        self.lets_damage_pass = False  # whether rows are compared by the reader only, not when their chunk comes
        self._locks, self._pid = dict[int, threading.RLock](), os.getpid()
        self._least_bytes = 0  # of memory, for chunks read at a time
        self._layouts: dict[int, ShardLayout] = {}
        self._earlier: list[ChunkFetcher] = []  # whose counts go on
        self._disks: list[CacheFolder] = []  # of these
        self._etags: dict[str, str | None] = {}
        self._asking: dict[str, threading.Lock] = {}  # of shards whose ETag is asked for
        self._open()

    def _open(self) -> None:
        shards = self._file.shards
        self._cache = CacheFolder(self.remote.cache_folder(), self.remote.limit(), others=self.remote.shared)
        folder = self._file.path.parent
        self._cached = CachedDataset(
            self._cache, folder, shards.names, shards.num_bytes, self.table.headers, self.table.num_chunks
        )
        self._meta = Meta(folder / "meta.json")
        self._etags.update({name: etag for name, (_, etag) in self._meta.read().get(self.url, {}).items()})
        self._of_earlier_runs = set(self._etags) - {self._file.path.name}  # whose ETag was asked for now
        self.fetcher = self._new_fetcher(max(1, self.fitting))

    def is_lost(self, copies: Mapping[int, int] = MappingProxyType({})) -> bool:
        """Whether somebody removed the dataset from the cache, or copies of shards, or cut them off.

        `copies`: descriptors of those that are open for reading.
        """
        return self._cached.is_lost(copies)

    def has_lost_header(self, shard: int) -> bool:
        """Whether the header of a shard, which is held and cannot be read, is no longer in its copy.

        Where this process cannot ask for it again, it is not: what came was compared with its digest.
        """
        return not fetches_here() or not self._cached.presence(int(self.table.headers[shard])).complete

    def open_anew(self, lost: ChunkFetcher) -> None:
        """Makes the dataset in the cache anew, replacing a fetcher's copy, and has chunks fetched again.

        Files of it were removed or cut off. Who reads from those that are open may go on with them.

        Raises:
            ReplacedError: the object is another one now.
            CacheError: somebody keeps removing the new copies.
        """
        with self._lock:
            if self.fetcher is not lost or self.in_memory:
                return
            if not self._said_lost:
                self._said_lost = True
                _log.warning(
                    "%s: files of the cache %s were removed or cut off while in use: what was there is fetched again.",
                    self.url, self._cache.root.parent,
                )  # fmt: skip
            lost.leave()
            self._earlier.append(lost)
            self._disks.append(self._cache)
            self._cache.remove_lost(self._cached.folder, self._cached.locks)
            needed, most_held = lost.room.needed, lost.most_held
            self._make_dataset()
            self.fetcher.room.needed, self.fetcher.most_held = needed, most_held

    def _make_dataset(self) -> None:
        deadline_s, pause_s = time.monotonic() + self.remote.give_up_after, 0.01
        while True:
            try:
                if not fetches_here():  # the training process makes it
                    return self._open()
                in_use, found = self._make()
                with closing(in_use):
                    if (found.header_digest, found.path) != (self._file.header_digest, self._file.path):
                        raise ReplacedError(f"{self.url}: the object was replaced while in use. Open it again.")
                    self._open()
                return self.note_header()
            except OSError as exc:  # it is not there, or was removed again
                if isinstance(exc, FastloadError):
                    raise
                if time.monotonic() > deadline_s:
                    raise CacheError(
                        f"{self.remote.cache_folder()}: the cache is removed again and again while it is used. End "
                        f"what does that, or name another folder: Remote(cache=...), FASTLOAD_CACHE."
                    ) from exc
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    def leave_disk(self) -> None:
        """Has chunks fetched into memory from now on, as the disk of the cache is full; a warning says so."""
        with self._lock:
            if self.in_memory:
                return
            folder, limit = self._cache.root.parent, max(self._least_bytes, 4 * self._chunk_bytes) * 3 // 2
            _log.warning(
                "%s: the disk of the cache %s is full, and no chunk there can be evicted: chunks are fetched into %s "
                "of memory from now on, and again in each epoch. Make room there, or name another folder: "
                "Remote(cache=...).",
                self.url, folder, format_bytes(limit),
            )  # fmt: skip
            self._to_memory(limit)

    def read_anew(self, num_bytes: int) -> None:
        """Fetches everything again, and into memory, also damaged rows: to compare what the objects hold.

        Before anything is read; so many bytes are read at a time.
        """
        headers = int((self._shards.num_bytes - self._pixel_bytes()).max())
        chunks = max(4, min(self.remote.in_flight, _ANEW_BYTES // self._chunk_bytes))
        self._to_memory(headers + 2 * num_bytes + 2 * chunks * self._chunk_bytes)
        self._etags, self._of_earlier_runs, self.lets_damage_pass = {}, set(), True

    def _to_memory(self, limit: int) -> None:
        """Fetches into so many bytes of memory from now on."""
        self._disks.append(self._cache)
        self._cache = MemoryFolder(limit)
        self._cached = MemoryDataset(self._cache, self._shards.names, self._shards.num_bytes, self.table.num_chunks)
        needed = self.fetcher.room.needed
        self._earlier.append(self.fetcher)
        self.fetcher = self._new_fetcher(limit // self._chunk_bytes)
        self.fetcher.room.needed = needed

    def _new_fetcher(self, most_held: int) -> ChunkFetcher:
        """Returns a fetcher that holds so many announced chunks of each field."""
        return ChunkFetcher(
            self.table,
            self._cached,
            self,
            threads=self.remote.in_flight,
            most_held=most_held * max(1, len(self.table.fields)),
            give_up_after_s=self.remote.give_up_after,
        )

    @property
    def _chunk_bytes(self) -> int:
        """The bytes that the largest chunk of each field takes, with the blocks that it begins and ends in."""
        return self.largest + 2 * 4096

    @property
    def in_memory(self) -> bool:
        """Whether chunks are fetched into memory, as the disk of the cache is full."""
        return isinstance(self._cached, MemoryDataset)

    @property
    def fitting(self) -> int:
        """The chunks of each field that this process may hold at a time, if all ranks of this machine hold as many."""
        return self._cache.room // self.ranks // self.largest - 1

    @functools.cached_property
    def largest(self) -> int:
        """The bytes of the largest chunk of each field, together."""
        return 1 + sum(map(self._bytes_of, self.table.fields))

    def _bytes_of(self, name: str) -> int:
        """Returns the bytes of the largest chunk of a field."""
        field = self._file.fields[name]
        if field.ragged is not None:
            return field.ragged.chunk_bytes
        return int(self.table.rows[name].max()) * field.row_bytes

    def current(self) -> ChunkFetcher:
        """Returns the fetcher, which whoever holds chunks keeps until they are released.

        After a fork it is a new one, as the locks of the other are the parent's.
        """
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._asking = {}
                    try:
                        self._open()
                    except FileNotFoundError:  # it is gone: the parent makes it anew
                        self._make_dataset()
                    self._pid = os.getpid()
        return self.fetcher

    @property
    def _lock(self) -> threading.RLock:
        """The lock of this process: at a fork a thread may hold the parent's, which nobody here releases."""
        return self._locks.setdefault(os.getpid(), threading.RLock())

    def network_use(self) -> NetworkUse:
        """Returns what this process fetched so far."""
        asked, now = replace(self._client.counts), self.current()
        fetched = [one.counts for one in (*self._earlier, now)]
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
            dataset_bytes=int(self._shards.num_bytes.sum()),
            room_bytes=self._cache.room,
        )

    def holding_header(self, shard: int) -> AbstractContextManager[None]:
        """Returns a context within which the header of a shard is in its sparse copy."""
        return self._holding([int(self.table.headers[shard])])

    @contextmanager
    def _holding(self, chunks: list[int]) -> Iterator[None]:
        """Within it these chunks are there, in the files that their names lead to as it begins."""
        while True:
            fetcher = self.current()
            if self.is_lost():
                self.open_anew(fetcher)
                continue
            try:
                fetcher.hold(chunks)
                break
            except CacheLostError:
                self.open_anew(fetcher)
        try:
            yield
        finally:
            fetcher.release(chunks)

    def holding_rows(self, shard: int, name: str, first: int, stop: int) -> AbstractContextManager[None]:
        """Returns a context within which rows of a field that is not ragged are in the sparse copy of a shard."""
        chunks = [int(self.table.headers[shard])]
        if name in self.table.rows and first < stop:
            begin, last = self.table.of_rows(name, np.full(2, shard), np.array([first, stop - 1])).tolist()
            chunks += range(begin, last + 1)
        return self._holding(chunks)

    def note_header(self) -> None:
        """Notes of a file that is no index that its header is in its sparse copy, where it was looked at."""
        if self._file.path.name not in self._shards.names:
            return
        locks, header = self._cached.locks, int(self.table.headers[0])
        if self._cached.presence(header).complete or not locks.try_exclusive(header):
            return
        if not self._cached.presence(header).complete and (
            ranges := self.ranges(self.table.chunk(header), self._cached)
        ):
            with self._cached.opened(0) as fd:
                parts = [read_bytes(fd, end - begin, begin) for begin, end in ranges]
            self._cached.complete(header, digest_of(parts))
        locks.unlock(header)

    def path(self, shard: int) -> Path:
        """Returns the sparse copy of a shard."""
        return self._cached.path(shard)

    def url_of(self, shard: int) -> str:
        """Returns the URL of a shard, as messages show it."""
        return self._client.url_of(self._key(self._shards.names[shard]))

    def expect(self, most_held: int, needed: Needed) -> None:
        """Says how many announced chunks of each field are fetched ahead, and which chunks are needed last."""
        fetcher = self.current()
        fetcher.most_held = most_held * max(1, len(self.table.fields))
        fetcher.room.needed = needed

    def check_held(self, chunks: Sequence[int]) -> None:
        """Raises CacheError where these chunks, which are needed at the same time, do not fit into the cache."""
        if (len(chunks) + 1) * self._chunk_bytes <= self._cache.room:
            return
        _, column, _ = self.table.placed(np.array(chunks, np.int64))
        sizes = np.array([0, *(self._bytes_of(name) + 4096 for name in self.table.fields)])
        needed = int(sizes[column].sum())
        if isinstance(self._cache, MemoryFolder):
            self._cache.make_room(needed + self._chunk_bytes)
            return
        or_else = ", or read rows that lie in fewer chunks: FastLoader, or a DataLoader with a ChunkSampler"
        check_room(self._cache, needed, f"reading rows of {len(chunks)} chunks at a time", or_else)

    def check_room(self, num_chunks: int, why: str, or_else: str) -> None:
        """Raises CacheError where not so many chunks of each field fit into the cache, with their shards' headers.

        For each of the ranks of this machine. `or_else`: what to do else than to give the cache more.
        """
        shards = min(self.ranks * num_chunks, len(self._shards.names))
        num_chunks = min(num_chunks, self.table.num_chunks)
        self._least_bytes = num_chunks * self._chunk_bytes
        files = sum(path.stat().st_blocks * 512 for path in self._file.path.parent.iterdir() if path.name in OWN_FILES)
        headers = int(np.sort(self._shards.num_bytes - self._pixel_bytes())[::-1][:shards].sum())
        check_room(self._cache, self.ranks * num_chunks * self._chunk_bytes + headers + files, why, or_else)

    def _pixel_bytes(self) -> NDArray[np.int64]:
        """Returns the bytes of the large fields of each shard, without what HDF5 allocated behind them; int64 (S,)."""
        found = np.zeros_like(self._shards.num_bytes)
        for name in self.table.fields:
            field = self._file.fields[name]
            if field.ragged is not None:
                found += np.array(field.shard_bytes, np.int64)
            else:
                found += self._shards.num_rows * field.row_bytes
        return np.minimum(found, self._shards.num_bytes)

    # What `ChunkFetcher` asks for.

    def ranges(self, chunk: Chunk, cached: CachedDataset) -> list[Range]:
        """Returns where a chunk lies in its shard, whose header is in its copy; [] where that is damaged."""
        if not chunk.field:
            with suppress(FastloadError, OSError, RuntimeError, KeyError):
                return header_ranges(cached.path(chunk.shard))
            return []
        return self._layout(chunk.shard, cached).ranges(chunk)

    def ranges_by_index(self, chunk: Chunk) -> list[Range]:
        """Returns where a chunk of images lies that are back to back, which the index says; else []."""
        begin, field = int(self._shards.images_offset[chunk.shard]), self._file.fields[chunk.field]
        if chunk.field != "images" or not field.in_shards or begin < 0:
            return []
        rows = self.table.rows_of(chunk)
        return [(begin + rows.start * field.row_bytes, begin + rows.stop * field.row_bytes)]

    def _layout(self, shard: int, cached: CachedDataset) -> ShardLayout:
        found = self._layouts.get(shard)
        if found is None:
            with self._open_header(shard, cached) as hdf5:
                found = self._layouts[shard] = ShardLayout(hdf5, self.table, shard)
        return found

    @contextmanager
    def _open_header(self, shard: int, cached: CachedDataset) -> Iterator[h5py.File]:
        """Yields the copy of a shard, whose header is held and could be read when it came.

        CacheLostError: it no longer can be.
        """
        try:
            opened = open_hdf5(cached.path(shard))
        except (FormatError, MissingFileError) as exc:
            raise CacheLostError(cached.path(shard)) from exc
        with opened as hdf5:
            yield hdf5

    def fetch(self, shard: int, begin: int, end: int, *, anew: bool = False) -> Any:
        """Returns bytes of a shard, uint8. Its first answers, of several threads maybe, also say its ETag."""
        name = self._shards.names[shard]
        key, etag = self._key(name), self._etags.get(name)
        try:
            data, info = self._client.read_range(key, begin, end, etag=etag, anew=anew)
        except ReplacedError:
            if etag is None or not self._copied_anew(shard, etag):
                raise
            return self.fetch(shard, begin, end)
        except ShortObjectError:
            self._check_size(name, self._client.head(key))
            raise
        if etag is None:
            self._check_size(name, info)
            with self._asking_for(name):
                if (known := self._etags.get(name)) is None:
                    self._note_etag(name, info)
            if known not in (None, info.etag):
                return self.fetch(shard, begin, end)  # replaced between these answers: now one that is too old fails
        return data

    def fetch_header(self, shard: int) -> list[tuple[Range, Any]]:
        """Returns the parts of a shard that hold all but the chunks of its large fields."""
        url = self.url_of(shard)
        (parts, problem, _), wrong = agreed(
            url,
            self.url,
            lambda anew: self._header_answer(shard, anew),
            lambda found: found[1] or self._header_problem(shard, found[0]),
            lambda found: found[2],
        )
        if problem is not None:
            raise problem
        if wrong is not None:
            self._damaged_headers.add(shard)
        return parts

    def _header_answer(self, shard: int, anew: bool) -> tuple[list[tuple[Range, Any]], Exception | None, int]:
        """Returns the parts of a shard's header, or the problem with them; and a digest of all that came."""
        digest = xxhash.xxh3_64()

        def read(begin: int, end: int) -> Any:
            data = self.fetch(shard, begin, end, anew=anew)
            digest.update(data)
            return data

        try:
            return self._header_by(shard, read), None, digest.intdigest()
        except FormatError as exc:
            return [], exc.with_traceback(None), digest.intdigest()

    def _header_problem(self, shard: int, parts: Sequence[tuple[Range, Any]]) -> Exception | None:
        """Returns the problem with the parts of a shard's header, if something may have changed on the way."""
        if not self.remote.check:
            return None
        fd = sparse_memory(int(self._shards.num_bytes[shard]))
        try:
            for (begin, _), data in parts:
                write_at(fd, data, begin)
            return header_problem(fd)
        finally:
            os.close(fd)

    def _header_by(self, shard: int, fetch: Callable[[int, int], Any]) -> list[tuple[Range, Any]]:
        ranges = likely_header(self._file, shard)
        parts = [(one, fetch(*one)) for one in ranges]
        size = int(self._shards.num_bytes[shard])
        fd = sparse_memory(size)
        try:
            for (begin, _), data in parts:
                write_at(fd, data, begin)
            path, known = Path(f"/proc/self/fd/{fd}"), None
            with suppress(FastloadError, OSError, RuntimeError, KeyError):
                known = header_ranges(path)
            if known != joined_ranges(ranges, 0):
                known = look_for_header(self.url_of(shard), fd, ranges, fetch)
                parts = [((begin, end), read_bytes(fd, end - begin, begin)) for begin, end in known]
            return parts
        finally:
            os.close(fd)

    def fetch_chunk(
        self,
        chunk: Chunk,
        ranges: Sequence[Range],
        cached: CachedDataset,
        header_there: Callable[[], AbstractContextManager[None]],
    ) -> list[tuple[Range, Any]]:
        """Returns the bytes of a chunk's ranges. Raises DamagedRowError if they are not what was packed."""

        def fetch(anew: bool) -> list[tuple[Range, Any]]:
            return self._parts(chunk.shard, ranges, anew=anew)

        def problem(parts: list[tuple[Range, Any]]) -> Exception | None:
            with header_there():
                return self._problem(chunk, parts, cached)

        parts, wrong = agreed(
            self.url_of(chunk.shard), self.url, fetch, problem, lambda parts: digest_of([data for _, data in parts])
        )
        if wrong is not None and not self.lets_damage_pass:
            raise wrong
        return parts

    def _parts(self, shard: int, ranges: Sequence[Range], *, anew: bool) -> list[tuple[Range, Any]]:
        """Returns the bytes of ranges of a shard, those that are near one another by one request."""
        parts = list[tuple[Range, Any]]()
        for first, last in joined_ranges(ranges, JOINED_BYTES):
            data = self.fetch(shard, first, last, anew=anew)
            mine = [(begin, end) for begin, end in ranges if first <= begin < last]
            parts += [((begin, end), data[begin - first : end - first]) for begin, end in mine]
        return parts

    def _compares(self, chunk: Chunk) -> bool:
        """Whether a chunk is compared with the digests of its rows when it comes.

        It is one of images that a digest is of alone: where there are masks, it is of both, and where HDF5 compressed
        the chunks, of what is decoded; such rows are compared when they are read, by `PackedDataset(check=...)`.
        """
        field = self._file.fields[chunk.field]
        plain = chunk.field == "images" and (field.in_shards or field.ragged is not None)
        return plain and self.remote.check and "masks" not in self._file.fields and self._file.version is not None

    def _problem(
        self, chunk: Chunk, parts: Sequence[tuple[Range, Any]], cached: CachedDataset
    ) -> DamagedRowError | None:
        """Returns the problem with a chunk's rows, as far as they are compared; the shard's header is there."""
        if not self._compares(chunk):
            return None
        images, layout = self._file.fields[chunk.field], self._layout(chunk.shard, cached)
        (((begin, _), data),) = parts
        with cached.opened(chunk.shard) as fd:
            if images.ragged is None:
                wrong = wrong_rows(layout, fd, images, self.table.rows_of(chunk), data)
            else:
                num_rows, begin = int(self._shards.num_rows[chunk.shard]), chunk.number * images.ragged.chunk_bytes
                wrong = wrong_encoded_rows(layout, fd, images, num_rows, begin, data)
        if not len(wrong):
            return None
        row = int(wrong[0])
        with self._open_header(chunk.shard, cached) as hdf5:
            if chunk.shard not in self._damaged_headers and header_digest(hdf5) != self._shards.digests[chunk.shard]:
                raise CacheLostError(cached.path(chunk.shard))
            name = text_of(bytes(hdf5["key"][row]))
        more = f" (and {len(wrong) - 1} more rows of its chunk)" if len(wrong) > 1 else ""
        there, here = self._shards.rows_of(chunk.shard)
        return DamagedRowError(
            f"{self.url_of(chunk.shard)}: sample {name!r} (row {row}): its `images` is not what was packed: the "
            f"digest differs{more}, and it came so twice. The object itself is damaged: copy the shard there again.",
            tuple(here[np.isin(there, wrong)].tolist()),
        )

    @property
    def _shards(self) -> Shards:
        return self._file.shards

    def _key(self, name: str) -> str:
        return f"{self._folder_key}{name}"

    def repaired(self, chunks: Sequence[int]) -> bool:
        """Fetches chunks that are there again, from another connection; returns whether any of them was another one.

        Bytes that differ are written, so that each chunk is what came last: rows of it were not what was packed. One
        that came the same is not asked for again.
        """
        with self._repairing:
            found = [self._is_repaired(number) for number in chunks]
        if any(found):
            note(self.url)
        return any(found)

    def _is_repaired(self, number: int) -> bool:
        chunk = self.table.chunk(number)
        if number in self._unrepaired or not self.remote.check or not fetches_here():
            return False
        if not self._cached.presence(number).complete:  # as it came damaged twice
            return False
        with self._holding(list({int(self.table.headers[chunk.shard]), number})):
            ranges = self.ranges(chunk, self._cached)
            parts = self._parts(chunk.shard, ranges, anew=True)
            with self._cached.opened(chunk.shard) as fd:
                if all(read_bytes(fd, end - begin, begin) == bytes(data) for (begin, end), data in parts):
                    is_others = number in self._repaired  # what this thread could not read, another one has repaired
                    self._repaired.discard(number)
                    if not is_others:
                        self._unrepaired.add(number)
                    return is_others
                for (begin, _), data in parts:
                    write_at(fd, data, begin)
                self._cached.complete(number, digest_of([data for _, data in parts]))
        self._layouts.pop(chunk.shard, None)
        self._repaired.add(number)
        return True

    def _copied_anew(self, shard: int, etag: str | None) -> bool:
        """Whether a shard that is no longer of this ETag, which is of an earlier run, has the same header and digests.

        So it is where a shard was copied there again. Then its new ETag holds.
        """
        name, header = self._shards.names[shard], int(self.table.headers[shard])
        with self._asking_for(name):
            if self._etags[name] != etag:
                return True  # another thread was first
            if name not in self._of_earlier_runs:
                return False
            key = self._key(name)
            self._check_size(name, info := self._client.head(key))
            parts = self._header_by(shard, lambda begin, end: self._client.read(key, begin, end, etag=info.etag))
            data = [data for _, data in parts]
            # One that is not in the cache is compared with the index when it is used.
            if self._cached.presence(header).complete and not self._cached.digest_matches(header, data):
                return False
            self._note_etag(name, info)
            return True

    def _asking_for(self, name: str) -> threading.Lock:
        with self._lock:
            return self._asking.setdefault(name, threading.Lock())

    def _check_size(self, name: str, info: ObjectInfo) -> None:
        size = int(self._shards.num_bytes[self._shards.names.index(name)])
        if info.num_bytes != size:
            raise RemoteError(
                f"{self._client.url_of(self._key(name))}: has {info.num_bytes:,} bytes, and {size:,} when the "
                f"index {self.url} was made. Copy the right shard there, or make the index again: `fastload index`."
            )

    def _note_etag(self, name: str, info: ObjectInfo) -> None:
        self._etags[name] = info.etag
        self._of_earlier_runs.discard(name)
        if self.in_memory:
            return
        with suppress(OSError), self._cache.locked():  # whoever opens it next asks again
            self._meta.add(self.url, {name: (info.num_bytes, info.etag)})

    def close(self) -> None:
        """Ends the threads that fetch; the cache stays."""
        if self._pid == os.getpid():
            self._client.close()  # first: a thread may be about to repeat a request
            for fetcher in (*self._earlier, self.fetcher):
                fetcher.close()
            for cache in (*self._disks, self._cache):
                cache.close()
