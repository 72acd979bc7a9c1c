"""Opens a packed file or an index behind a URL: `open_remote` returns its header, whose rows are fetched when needed.

The header is that of an index in the cache of this machine, of one shard where the URL is that of a packed file.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import CacheError, DamagedRowError, FastloadError, FormatError, RemoteError, ReplacedError
from fastload.format.digests import pixel_digests
from fastload.format.header import Field, PackedFile, open_hdf5, read_header
from fastload.format.ragged import RaggedExtent
from fastload.format.shards import Shards
from fastload.remote.backend import ObjectInfo
from fastload.remote.byte_locks import ByteLocks
from fastload.remote.cache import CachedDataset, CacheFolder, Meta, check_room, digest_of, keep_in_use
from fastload.remote.chunks import (
    TAIL_BYTES,
    Chunk,
    ChunkTable,
    Range,
    ShardLayout,
    extent_of,
    is_large,
    joined_ranges,
    likely_header,
    without,
)
from fastload.remote.client import Client, open_client
from fastload.remote.fetch import ChunkFetcher, FetchCounts, Needed, evict_elsewhere
from fastload.remote.memory import MemoryDataset, MemoryFolder, sparse_memory
from fastload.remote.options import Remote, shown
from fastload.system.files import read_bytes, write_at
from fastload.system.text import format_bytes, text_of

_WHOLE_BYTES = 16 * 2**20  # objects up to this size are fetched whole, when their header is looked for
_OWN_FILES = ("chunks", "locks", "meta.json")
_log = logging.getLogger("fastload")

_LOOK_BYTES = 256 * 2**10  # fetched at a time while a header is looked for


class RemoteShards:
    """The shards behind a URL, and what of them is in the cache. Threads share it; a fork opens the cache anew.

    Attributes:
        url: of the file or index, without secrets.
        table: of the chunks of all shards.
    """

    def __init__(self, url: str, remote: Remote, file: PackedFile, client: Client, folder_key: str) -> None:
        self.url = shown(url)
        self.remote, self._file, self._client = remote, file, client
        self._folder_key = folder_key  # of the objects' folder in the bucket
        self.table = ChunkTable(file)
        self.ranks = 1  # of this machine, that share the cache
        self._lock, self._pid = threading.RLock(), os.getpid()
        self._least_bytes = 0  # of memory, for what is read at a time
        self._layouts: dict[int, ShardLayout] = {}
        self._etags: dict[str, tuple[int, str | None]] = {}
        self._asking: dict[str, threading.Lock] = {}  # of shards whose ETag is asked for
        self._open()

    def _open(self) -> None:
        shards = self._file.shards
        assert shards is not None, "an index"
        self._cache = CacheFolder(self.remote.cache_folder(), self.remote.limit())
        folder = self._file.path.parent
        self._cached = CachedDataset(self._cache, folder, shards.names, shards.num_bytes, self.table.num_chunks)
        self._meta = Meta(folder / "meta.json")
        self._etags.update(self._meta.read().get(self.url, {}))
        self._of_earlier_runs = set(self._etags) - {self._file.path.name}  # whose ETag was asked for now
        self.fetcher = ChunkFetcher(
            self.table,
            self._cached,
            self,
            threads=self.remote.in_flight,
            most_held=max(1, self.fitting) * max(1, len(self.table.fields)),
            give_up_after_s=self.remote.give_up_after,
        )

    def leave_disk(self) -> None:
        """Has chunks fetched into memory from now on, as the disk of the cache is full; a warning says so."""
        with self._lock:
            if isinstance(self._cached, MemoryDataset):
                return
            folder, chunk = self._cache.root.parent, self.largest + 2 * 4096
            limit = max(self._least_bytes, 4 * chunk) * 3 // 2
            _log.warning(
                "%s: the disk of the cache %s is full, and no chunk there can be evicted: chunks are fetched into %s "
                "of memory from now on, and again in each epoch. Make room there, or name another folder: "
                "Remote(cache=...).",
                self.url, folder, format_bytes(limit),
            )  # fmt: skip
            self._cache = MemoryFolder(limit)
            sizes = self._shards.num_bytes
            self._cached = MemoryDataset(self._cache, self._shards.names, sizes, self.table.num_chunks)
            needed = self.fetcher.needed
            self.fetcher = ChunkFetcher(
                self.table,
                self._cached,
                self,
                threads=self.remote.in_flight,
                most_held=limit // chunk * max(1, len(self.table.fields)),
                give_up_after_s=self.remote.give_up_after,
            )
            self.fetcher.needed = needed

    @property
    def fitting(self) -> int:
        """The chunks of each field that this process may hold at a time, if all ranks of this machine hold as many."""
        return self._cache.room // self.ranks // self.largest - 1

    @property
    def largest(self) -> int:
        """The bytes of the largest chunk of each field, together."""
        sizes = [1]
        for name in self.table.fields:
            field = self._file.fields[name]
            if field.ragged is not None:
                sizes.append(field.ragged.chunk_bytes)
            else:
                sizes.append(int(self.table.rows[name].max()) * field.row_bytes)
        return sum(sizes)

    def current(self) -> ChunkFetcher:
        """Returns the fetcher, which whoever holds chunks keeps until they are released.

        After a fork it is a new one, as the locks of the other are the parent's.
        """
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._lock = threading.RLock()
                    self._open()
                    self._pid = os.getpid()
        return self.fetcher

    @property
    def counts(self) -> FetchCounts:
        """The counts of this process."""
        return self.current().counts

    def holding_header(self, shard: int) -> AbstractContextManager[None]:
        """Returns a context within which the header of a shard is in its sparse copy."""
        return self.current().holding([int(self.table.headers[shard])])

    def note_header(self) -> None:
        """Notes that the header of the only shard is in its sparse copy, where it was looked at."""
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
        fetcher.needed = needed

    def check_room(self, num_chunks: int, why: str) -> None:
        """Raises CacheError where not so many chunks of each field fit into the cache, with their shards' headers.

        For each of the ranks of this machine.
        """
        shards = min(self.ranks * num_chunks, len(self._shards.names))
        num_chunks = min(num_chunks, self.table.num_chunks)
        self._least_bytes = num_chunks * (self.largest + 2 * 4096)
        files = sum(path.stat().st_blocks * 512 for path in self._file.path.parent.iterdir() if path.name in _OWN_FILES)
        headers = int(np.sort(self._shards.num_bytes - self._pixel_bytes())[::-1][:shards].sum())
        check_room(self._cache, self.ranks * num_chunks * (self.largest + 2 * 4096) + headers + files, why)

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
                return _header_ranges(cached.path(chunk.shard))
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
            with open_hdf5(cached.path(shard)) as hdf5:
                found = self._layouts[shard] = ShardLayout(hdf5, self.table, shard)
        return found

    def fetch(self, shard: int, begin: int, end: int) -> Any:
        """Returns bytes of a shard, uint8."""
        name = self._shards.names[shard]
        etag = self._etag(name)
        try:
            return self._client.read(self._key(name), begin, end, etag=etag)
        except ReplacedError:
            if not self._copied_anew(shard, etag):
                raise
        return self._client.read(self._key(name), begin, end, etag=self._etag(name))

    def fetch_header(self, shard: int) -> list[tuple[Range, Any]]:
        """Returns the parts of a shard that hold all but the chunks of its large fields."""
        return self._header_by(shard, lambda begin, end: self.fetch(shard, begin, end))

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
                known = _header_ranges(path)
            if known != joined_ranges(ranges, 0):
                known = _look_for_header(self.url_of(shard), fd, ranges, fetch)
                parts = [((begin, end), read_bytes(fd, end - begin, begin)) for begin, end in known]
            return parts
        finally:
            os.close(fd)

    def check(self, chunk: Chunk, parts: Sequence[tuple[Range, Any]], cached: CachedDataset) -> None:
        """Raises DamagedRowError if rows of one size, which have nothing but images, are not what was packed."""
        field, layout = self._file.fields[chunk.field], self._layout(chunk.shard, cached)
        alone = chunk.field == "images" and "masks" not in self._file.fields and field.in_shards
        if not (self.remote.check and alone and self._file.version is not None and layout.digests is not None):
            return
        rows = self.table.rows_of(chunk)
        ((_, data),) = parts
        with cached.opened(chunk.shard) as fd:
            expected = np.frombuffer(read_bytes(fd, 8 * len(rows), layout.digests + 8 * rows.start), np.uint64)
        wrong = np.flatnonzero(pixel_digests([np.frombuffer(data, np.uint8).reshape(len(rows), -1)]) != expected)
        if len(wrong):
            row = rows.start + int(wrong[0])
            with open_hdf5(cached.path(chunk.shard)) as hdf5:
                name = text_of(bytes(hdf5["key"][row]))
            more = f" (and {len(wrong) - 1} more rows of its chunk)" if len(wrong) > 1 else ""
            raise DamagedRowError(
                f"{self.url_of(chunk.shard)}: sample {name!r} (row {row}): its `images` is not what was packed: the "
                f"digest differs{more}. The object itself is damaged: copy the shard there again."
            )

    @property
    def _shards(self) -> Shards:
        assert self._file.shards is not None, "an index"
        return self._file.shards

    def _key(self, name: str) -> str:
        return f"{self._folder_key}{name}"

    def _etag(self, name: str) -> str | None:
        """Returns the ETag of a shard; asked for once, and kept for all processes of this machine."""
        known = self._etags.get(name)
        if known is not None:
            return known[1]
        with self._asking_for(name):
            if (known := self._etags.get(name)) is not None:
                return known[1]
            info = self._head(name)
            self._note_etag(name, info)
            return info.etag

    def _copied_anew(self, shard: int, etag: str | None) -> bool:
        """Whether a shard that is no longer of this ETag, which is of an earlier run, has the same header and digests.

        So it is where a shard was copied there again. Then its new ETag holds.
        """
        name, header = self._shards.names[shard], int(self.table.headers[shard])
        with self._asking_for(name):
            if self._etags[name][1] != etag:
                return True  # another thread was first
            if name not in self._of_earlier_runs:
                return False
            info = self._head(name)
            key = self._key(name)
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

    def _head(self, name: str) -> ObjectInfo:
        info = self._client.head(self._key(name))
        size = int(self._shards.num_bytes[self._shards.names.index(name)])
        if info.num_bytes != size:
            raise RemoteError(
                f"{self._client.url_of(self._key(name))}: has {info.num_bytes:,} bytes, and {size:,} when the "
                f"index {self.url} was made. Copy the right shard there, or make the index again: `fastload index`."
            )
        return info

    def _note_etag(self, name: str, info: ObjectInfo) -> None:
        self._etags[name] = known = (info.num_bytes, info.etag)
        self._of_earlier_runs.discard(name)
        with suppress(OSError), self._cache.locked():  # whoever opens it next asks again
            self._meta.add(self.url, {name: known})

    def close(self) -> None:
        """Ends the threads that fetch; the cache stays."""
        if self._pid == os.getpid():
            self.fetcher.close()
            self._client.close()


def open_remote(url: str, remote: Remote | None = None) -> PackedFile:
    """Returns the header of a packed file or an index behind a URL; `PackedFile.remote` fetches its rows.

    Raises:
        RemoteError and its kin: the object is missing, refused, or its server is not reached.
        FormatError: it is no HDF5 file.
        OptionError: no cache can be made; a package for such URLs is missing.
    """
    remote = remote or Remote()
    client, key = open_client(url, remote)
    info = client.head(key)
    cache = CacheFolder(remote.cache_folder(), remote.limit())
    folder_key, name = key[: key.rfind("/") + 1], key[key.rfind("/") + 1 :]
    in_use = None
    while in_use is None:  # another process may remove the folder before it is in use
        folder = _known(cache, shown(url), name, info.num_bytes, info.etag)
        if folder is not None:
            in_use = keep_in_use(folder)
            continue
        try:
            folder, in_use = _fetch_index(cache, client, key, shown(url), info.num_bytes, info.etag)
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise CacheError(
                f"{cache.root.parent}: the disk is full, there is no room for the header of {shown(url)}. Make room "
                f"there (`fastload cache clear` removes what no job uses), or name another folder: Remote(cache=...)."
            ) from exc
    try:
        assert folder is not None, "it is in use"
        found = read_header(folder / name)
        if not (is_index := found.shards is not None):
            found = _as_index(found)
        file = replace(found, identity=found.identity._replace(mtime_ns=-1))
        cache.close()
        shards = RemoteShards(url, remote, file, client, folder_key)
    finally:
        in_use.close()
    if not is_index:
        shards.note_header()
    object.__setattr__(file, "remote", shards)
    return file


def _known(cache: CacheFolder, url: str, name: str, size: int, etag: str | None) -> Path | None:
    """Returns the folder of a URL that is in the cache, and has not changed since."""
    for folder in cache.datasets():
        if etag is not None and Meta(folder / "meta.json").read().get(url, {}).get(name) == (size, etag):
            with suppress(OSError):
                os.utime(folder / "meta.json")
                return folder
    return None


def _fetch_index(
    cache: CacheFolder, client: Client, key: str, url: str, size: int, etag: str | None
) -> tuple[Path, ByteLocks | None]:
    """Fetches an index, or what of a packed file is no pixels, into a new folder of the cache.

    Returns the folder and what keeps it in use; None: another process was first, and it may be gone again.
    """
    name = key[key.rfind("/") + 1 :]
    cache.sweep()
    new = Path(tempfile.mkdtemp(prefix=f".new-{os.getpid()}-", dir=cache.root))
    try:
        path = new / name

        def fetch(begin: int, end: int) -> Any:
            return client.read(key, begin, end, etag=etag)

        # By way of memory: pixels that come along are no part of the header, and would take room beyond the bound.
        there = [(0, size)] if size <= _WHOLE_BYTES else [(0, 4096), (size - TAIL_BYTES, size)]
        memory = sparse_memory(size)
        try:
            for begin, end in there:
                write_at(memory, fetch(begin, end), begin)
            ranges = _look_for_header(url, memory, there, fetch)
            with _sparse(path, size) as fd:
                while not cache.allocate(fd, ranges):
                    if not evict_elsewhere(cache):
                        raise CacheError(
                            f"{cache.root.parent}: max_bytes of {format_bytes(cache.limit)} is reached by what is in "
                            f"use, and there is no room for the header of {url}. Give the cache more: "
                            f"Remote(max_bytes=..., cache=...)."
                        )
                for begin, end in ranges:
                    write_at(fd, read_bytes(memory, end - begin, begin), begin)
        finally:
            os.close(memory)
        header = read_header(path)
        in_use = keep_in_use(new)
        with cache.locked():
            Meta(new / "meta.json").add(url, {name: (size, etag)})
            folder = cache.root / header.header_digest
            if header.shards is None:  # whose chunks are those of a file of this name
                folder = folder.with_name(f"{folder.name}-{xxhash.xxh32_hexdigest(name.encode())}")
            try:
                os.rename(new, folder)
            except OSError:  # another process was first, or the same dataset lies at another URL, too
                assert in_use is not None, "nobody else knows of the new folder"
                in_use.close()
                in_use = keep_in_use(folder)
                Meta(folder / "meta.json").add(url, {name: (size, etag)})
                if not (folder / name).exists():
                    os.rename(path, folder / name)
            cache.count()
        return folder, in_use
    finally:
        shutil.rmtree(new, ignore_errors=True)


@contextmanager
def _sparse(path: Path, size: int) -> Iterator[int]:
    """Makes an empty file of that size, and yields its descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size)
        yield fd
    finally:
        os.close(fd)


def _header_ranges(path: Path) -> list[Range]:
    """Returns the ranges of a file that hold all but its large fields, from the metadata that is there."""
    with open_hdf5(path) as file:
        return _around_large(file, path.stat().st_size)


def _around_large(file: h5py.File, size: int) -> list[Range]:
    large: list[Range] = []
    for name in file:
        item = file[name]
        if not isinstance(item, h5py.Dataset) or item.is_virtual or not item.shape:
            continue
        extent = extent_of(item)
        if is_large(name, extent.row_bytes):
            large += extent.whole()
    return without([(0, size)], joined_ranges(large, 0))


class _Looked(io.RawIOBase):
    """A file of which HDF5 reads what it needs: what is not in the sparse copy yet is fetched, some at a time."""

    def __init__(self, fd: int, size: int, there: Sequence[Range], fetch: Any) -> None:
        self._fd, self._size, self.there, self._fetch, self._at = fd, size, list(there), fetch, 0

    def readinto(self, memory: Any) -> int:
        view = memoryview(memory).cast("B")
        end = min(self._at + len(view), self._size)
        for begin, stop in without([(self._at, end)], self.there):
            first = begin // _LOOK_BYTES * _LOOK_BYTES
            last = min(-(-stop // _LOOK_BYTES) * _LOOK_BYTES, self._size)
            for some in without([(first, last)], self.there):
                write_at(self._fd, self._fetch(*some), some[0])
            self.there = joined_ranges([*self.there, (first, last)], 0)
        data = read_bytes(self._fd, end - self._at, self._at)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _look_for_header(url: str, fd: int, there: Sequence[Range], fetch: Any) -> list[Range]:
    """Fetches all but the large fields of an object into its sparse copy; returns the ranges of that.

    Of an index, all of it.
    """
    size = os.fstat(fd).st_size
    looked = _Looked(fd, size, there, fetch)
    try:
        with h5py.File(looked, "r") as file:
            for item in (file, *(file[name] for name in file)):
                for name in item.attrs:
                    item.attrs.get_id(name)
            ranges = [(0, size)] if "fastload_index" in file.attrs else _around_large(file, size)
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as exc:
        if isinstance(exc, FastloadError):
            raise
        raise FormatError(
            f"{url}: not an HDF5 file, or its metadata is damaged ({exc}). Upload it again, or name a file that "
            f"`fastload pack` made."
        ) from exc
    for begin, end in without(ranges, looked.there):
        write_at(fd, fetch(begin, end), begin)
    return ranges


def _as_index(file: PackedFile) -> PackedFile:
    """Returns the header of a packed file as that of an index with one shard, the file itself."""
    images = file.fields.get("images")
    numbers = {
        "num_rows": file.num_rows,
        "num_bytes": file.identity.size,
        "images_offset": -1 if images is None or images.offset is None else images.offset,
        "chunk_rows": 0 if images is None else images.chunk_rows,
        "shard": 0,
        "first": 0,
        "rows": file.num_rows,
    }
    shards = Shards((file.path.name,), (file.header_digest,), **{k: np.array([v]) for k, v in numbers.items()})
    return replace(file, shards=shards, fields={name: _in_shard(one) for name, one in file.fields.items()})


def _in_shard(field: Field) -> Field:
    """Returns a field of a file as that of an index."""
    if field.ragged is not None:
        extent = RaggedExtent(0, *field.ragged[1:])
        return replace(field, ragged=extent, shard_bytes=(field.ragged.num_bytes,))
    return replace(field, offset=None, in_shards=field.offset is not None)
