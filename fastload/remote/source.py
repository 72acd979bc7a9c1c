"""`ChunkSource`: where a chunk lies in its object, its bytes, and whether they are what was packed.

`ShardObjects` makes the requests, each as long as the object is the same one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from fastload.errors import DamagedRowError, FormatError, MissingFileError, RemoteError, ReplacedError
from fastload.format.codecs import decompress_zstd
from fastload.format.digests import header_digest, pixel_digests, row_digest
from fastload.format.header import Field, PackedFile, open_hdf5
from fastload.format.ragged import INDEX_DTYPES, ZSTD
from fastload.format.shards import Shards
from fastload.remote.backend import ObjectInfo
from fastload.remote.cache import CacheLostError, Meta
from fastload.remote.chunks import (
    JOINED_BYTES,
    Chunk,
    ChunkTable,
    Range,
    ShardLayout,
    joined_ranges,
    likely_header,
)
from fastload.remote.client import Client, ShortObjectError, agreed
from fastload.remote.headers import (
    UNREADABLE,
    HeaderAnswer,
    agreed_header,
    header_answer,
    header_problem,
    header_ranges,
)
from fastload.remote.sparse_copies import CachedDataset, digest_of
from fastload.system.files import read_bytes
from fastload.system.text import text_of


def wrong_rows(layout: ShardLayout, fd: int, images: Field, rows: range, data: Any) -> NDArray[np.int64]:
    """Returns the rows of a shard, of a chunk of images of one size, that are not what was packed: int64 (n,).

    Args:
        layout: of the shard, whose header is in its copy `fd`.
        images: how the index describes them.
        rows: of the chunk.
        data: their bytes, one row after another.
    """
    expected = _column(layout, fd, "digest", np.dtype("<u8"), rows)
    found = pixel_digests([np.frombuffer(data, np.uint8).reshape(len(rows), images.row_bytes)])
    return rows.start + np.flatnonzero(found != expected)


def wrong_encoded_rows(
    layout: ShardLayout, fd: int, images: Field, num_rows: int, begin: int, data: Any
) -> NDArray[np.int64]:
    """Returns the same of a chunk of images of varying length; those that lie in several chunks are passed over.

    Args:
        layout, fd, images: as above.
        num_rows: of the shard.
        begin: the byte of the shard's encoded rows at which the chunk begins.
        data: its bytes.
    """
    every, index = range(num_rows), {}
    for part in ("offset", "bytes", "encoding", "shape"):
        dtype, shape = INDEX_DTYPES[part]
        index[part] = _column(layout, fd, f"images_{part}", np.dtype((dtype, shape)), every)
    first, stop = index["offset"] - begin, index["offset"] - begin + index["bytes"]
    here = np.flatnonzero((first >= 0) & (stop <= len(data)))
    expected = _column(layout, fd, "digest", np.dtype("<u8"), every)
    wrong, view = [], memoryview(data)
    for row in here.tolist():
        encoded: Any = view[int(first[row]) : int(stop[row])]
        if index["encoding"][row] == ZSTD:
            pixels = np.empty(int(index["shape"][row].prod()) * images.dtype.itemsize, np.uint8)
            try:
                decompress_zstd(encoded, pixels)
            except ValueError:
                wrong.append(row)
                continue
            encoded = pixels
        if row_digest([encoded]) != expected[row]:
            wrong.append(row)
    return np.array(wrong, np.int64)


def _column(layout: ShardLayout, fd: int, name: str, dtype: np.dtype[Any], rows: range) -> NDArray[Any]:
    """Returns rows of a small field of a shard from its copy."""
    data = os.pread(fd, len(rows) * dtype.itemsize, layout.columns[name] + rows.start * dtype.itemsize)
    return np.frombuffer(data, dtype)


class ShardObjects:
    """The objects behind a URL. Threads share it.

    The first answer of a shard, or an earlier run, says its ETag; from then on it has to be the same. One that was
    copied there again, with the same header, is the same.

    Args:
        url: of the file or index, without secrets.
        index_name, shards: of the index.
        client: makes the requests.
        folder_key: of the objects' folder in the bucket.
        has_other_header: whether a shard is in the cache, whose header the object with an ETag has not any more.
    """

    def __init__(
        self,
        url: str,
        index_name: str,
        shards: Shards,
        client: Client,
        folder_key: str,
        has_other_header: Callable[[int, Callable[[int, int], Any]], bool],
    ) -> None:
        self._url, self._index_name, self._shards = url, index_name, shards
        self._client, self._folder_key, self._has_other_header = client, folder_key, has_other_header
        self._etags: dict[str, str | None] = {}
        self._of_earlier_runs = set[str]()  # names of shards whose ETag is
        self._noted: tuple[Meta, Callable[[], AbstractContextManager[None]]] | None = None
        self.begin()

    def begin(self) -> None:
        """Begins in a new process: at a fork a thread may hold locks, which nobody here releases."""
        self._asking: dict[str, threading.Lock] = {}  # of shards whose ETag is asked for

    def note_in(self, meta: Meta | None, locked: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Takes the ETags of earlier runs from a file of the cache, and notes others there, within `locked`.

        None: they are noted no more.
        """
        self._noted = None if meta is None else (meta, locked)
        if meta is not None:
            self._etags.update({name: etag for name, (_, etag) in meta.read().get(self._url, {}).items()})
            self._of_earlier_runs = set(self._etags) - {self._index_name}  # whose ETag was asked for now

    def forget(self) -> None:
        """Asks for all ETags again."""
        self._etags, self._of_earlier_runs = {}, set()

    def url_of(self, shard: int) -> str:
        """Returns the URL of a shard, as messages show it."""
        return self._client.url_of(self._key(self._shards.names[shard]))

    def _key(self, name: str) -> str:
        return f"{self._folder_key}{name}"

    def read(self, shard: int, begin: int, end: int, *, anew: bool = False) -> Any:
        """Returns bytes of a shard, uint8; `anew`: by another connection than those so far. Raises as `Client`."""
        name = self._shards.names[shard]
        key, etag = self._key(name), self._etags.get(name)
        try:
            data, info = self._client.read_range(key, begin, end, etag=etag, anew=anew)
        except ReplacedError:
            if etag is None or not self._is_copied_anew(shard, etag):
                raise
            return self.read(shard, begin, end)
        except ShortObjectError:
            self._check_size(name, self._client.head(key))
            raise
        if etag is None:
            self._check_size(name, info)
            with self._asking.setdefault(name, threading.Lock()):
                if (known := self._etags.get(name)) is None:
                    self._note(name, info)
            if known not in (None, info.etag):
                return self.read(shard, begin, end)  # replaced between these answers: now one that is too old fails
        return data

    def _is_copied_anew(self, shard: int, etag: str) -> bool:
        """Whether a shard that is no longer of this ETag, which is of an earlier run, has the same header and digests.

        So it is where a shard was copied there again. Then its new ETag holds.
        """
        name = self._shards.names[shard]
        with self._asking.setdefault(name, threading.Lock()):
            if self._etags[name] != etag:
                return True  # another thread was first
            if name not in self._of_earlier_runs:
                return False
            key = self._key(name)
            self._check_size(name, info := self._client.head(key))
            if self._has_other_header(shard, lambda begin, end: self._client.read(key, begin, end, etag=info.etag)):
                return False
            self._note(name, info)
            return True

    def _check_size(self, name: str, info: ObjectInfo) -> None:
        size = int(self._shards.num_bytes[self._shards.names.index(name)])
        if info.num_bytes != size:
            raise RemoteError(
                f"{self._client.url_of(self._key(name))}: has {info.num_bytes:,} bytes, and {size:,} when the "
                f"index {self._url} was made. Copy the right shard there, or make the index again: `fastload index`."
            )

    def _note(self, name: str, info: ObjectInfo) -> None:
        self._etags[name] = info.etag
        self._of_earlier_runs.discard(name)
        if self._noted is None:
            return
        meta, locked = self._noted
        with suppress(OSError), locked():  # whoever opens it next asks again
            meta.add(self._url, {name: (info.num_bytes, info.etag)})


class ChunkSource:
    """The chunks of an index's shards, from their objects. Threads share it.

    Args:
        url: of the index, without secrets.
        file: its header.
        table: of its chunks.
        objects: the shards.
        check: whether what came is compared with digests.

    Attributes:
        lets_damage_pass: whether rows are compared by the reader only, not when their chunk comes.
        layouts: of shards whose header was looked at.
    """

    def __init__(self, url: str, file: PackedFile, table: ChunkTable, objects: ShardObjects, *, check: bool) -> None:
        self._url, self._file, self._shards, self._table = url, file, table.shards, table
        self._objects, self._check = objects, check
        self.lets_damage_pass = False
        self.layouts: dict[int, ShardLayout] = {}
        self._damaged_headers = set[int]()  # shards whose header came damaged twice
        # A chunk of images is compared with digests when it comes if a digest is of that image alone. Where there are
        # masks, it is of both, and where HDF5 compressed the chunks, of what is decoded: such rows are compared when
        # they are read, by `PackedDataset(check=...)`.
        images = file.fields.get("images")
        plain = images is not None and not images.chunked
        self._compares_images = plain and check and "masks" not in file.fields and file.version is not None

    def ranges(self, chunk: Chunk, cached: CachedDataset) -> list[Range]:
        """Returns where a chunk lies in its shard, whose header is in its copy; [] where that is damaged."""
        if not chunk.field:
            with suppress(*UNREADABLE):
                return header_ranges(cached.copies.path(chunk.shard))
            return []
        return self._layout(chunk.shard, cached).ranges(chunk)

    def ranges_by_index(self, chunk: Chunk) -> list[Range]:
        """Returns where a chunk of images lies that are back to back, which the index says; else []."""
        begin, field = int(self._shards.images_offset[chunk.shard]), self._file.fields[chunk.field]
        if chunk.field != "images" or not field.in_shards or begin < 0:
            return []
        rows = self._table.rows_of(chunk)
        return [(begin + rows.start * field.row_bytes, begin + rows.stop * field.row_bytes)]

    def _layout(self, shard: int, cached: CachedDataset) -> ShardLayout:
        found = self.layouts.get(shard)
        if found is None:
            with _open_header(shard, cached) as hdf5:
                found = self.layouts[shard] = ShardLayout(hdf5, self._table, shard)
        return found

    def fetch_header(self, shard: int) -> list[tuple[Range, Any]]:
        """Returns the parts of a shard that hold all but the chunks of its large fields."""

        def answer(anew: bool) -> HeaderAnswer:
            return self._header(shard, lambda begin, end: self._objects.read(shard, begin, end, anew=anew))

        def problem(memory: int) -> Exception | None:
            if not self._check:
                return None
            with suppress(*UNREADABLE), open_hdf5(Path(f"/proc/self/fd/{memory}")) as hdf5:
                if header_digest(hdf5) == self._shards.digests[shard]:  # a third of the time that a whole look takes
                    return None
            return header_problem(memory)

        found, wrong = agreed_header(self._objects.url_of(shard), self._url, answer, problem)
        if wrong is not None:
            self._damaged_headers.add(shard)
        return _parts_of(found)

    def _header(self, shard: int, read: Callable[[int, int], Any]) -> HeaderAnswer:
        there, size = likely_header(self._file, shard), int(self._shards.num_bytes[shard])
        return header_answer(self._objects.url_of(shard), size, there, read)

    def has_other_header(self, shard: int, read: Callable[[int, int], Any], cached: CachedDataset) -> bool:
        """Whether the header of a shard in the cache is not what `read` gives; one that is not there may be."""
        found = self._header(shard, read)
        parts = [data for _, data in _parts_of(found)]
        if found.problem is not None:
            raise found.problem
        header = int(self._table.headers[shard])
        return cached.presence(header).complete and not cached.records.fits(header, parts)

    def fetch_chunk(
        self,
        chunk: Chunk,
        ranges: Sequence[Range],
        cached: CachedDataset,
        header_there: Callable[[], AbstractContextManager[None]],
    ) -> list[tuple[Range, Any]]:
        """Returns the bytes of a chunk's ranges. Raises DamagedRowError if they are not what was packed."""

        def problem(parts: list[tuple[Range, Any]]) -> Exception | None:
            if chunk.field != "images" or not self._compares_images:
                return None
            with header_there():
                return self._problem(chunk, parts, cached)

        parts, wrong = agreed(
            self._objects.url_of(chunk.shard),
            self._url,
            lambda anew: self.read(chunk.shard, ranges, anew=anew),
            problem,
            lambda parts: digest_of([data for _, data in parts]),
        )
        if wrong is not None and not self.lets_damage_pass:
            raise wrong
        return parts

    def read(self, shard: int, ranges: Sequence[Range], *, anew: bool) -> list[tuple[Range, Any]]:
        """Returns the bytes of ranges of a shard, those that are near one another by one request."""
        parts = list[tuple[Range, Any]]()
        for first, last in joined_ranges(ranges, JOINED_BYTES):
            data = self._objects.read(shard, first, last, anew=anew)
            mine = [(begin, end) for begin, end in ranges if first <= begin < last]
            parts += [((begin, end), data[begin - first : end - first]) for begin, end in mine]
        return parts

    def _problem(
        self, chunk: Chunk, parts: Sequence[tuple[Range, Any]], cached: CachedDataset
    ) -> DamagedRowError | None:
        """Returns the problem with the rows of a chunk of images; the shard's header is there."""
        images, layout = self._file.fields[chunk.field], self._layout(chunk.shard, cached)
        (((begin, _), data),) = parts
        with cached.copies.opened(chunk.shard) as fd:
            if chunk.field in self._table.rows:
                wrong = wrong_rows(layout, fd, images, self._table.rows_of(chunk), data)
            else:
                num_rows, begin = int(self._shards.num_rows[chunk.shard]), chunk.number * self._table.largest["images"]
                wrong = wrong_encoded_rows(layout, fd, images, num_rows, begin, data)
        if not len(wrong):
            return None
        row = int(wrong[0])
        with _open_header(chunk.shard, cached) as hdf5:
            if chunk.shard not in self._damaged_headers and header_digest(hdf5) != self._shards.digests[chunk.shard]:
                raise CacheLostError(cached.copies.path(chunk.shard))
            name = text_of(bytes(hdf5["key"][row]))
        more = f" (and {len(wrong) - 1} more rows of its chunk)" if len(wrong) > 1 else ""
        there, here = self._shards.rows_of(chunk.shard)
        return DamagedRowError(
            f"{self._objects.url_of(chunk.shard)}: sample {name!r} (row {row}): its `images` is not what was packed: "
            f"the digest differs{more}, and it came so twice. The object itself is damaged: copy the shard there "
            f"again.",
            tuple(here[np.isin(there, wrong)].tolist()),
        )


@contextmanager
def _open_header(shard: int, cached: CachedDataset) -> Iterator[h5py.File]:
    """Yields the copy of a shard, whose header is held and could be read when it came.

    CacheLostError: it no longer can be.
    """
    try:
        opened = open_hdf5(cached.copies.path(shard))
    except (FormatError, MissingFileError) as exc:
        raise CacheLostError(cached.copies.path(shard)) from exc
    with opened as hdf5:
        yield hdf5


def _parts_of(found: HeaderAnswer) -> list[tuple[Range, Any]]:
    """Returns the parts of a header, and closes what it lies in."""
    try:
        return [((begin, end), read_bytes(found.memory, end - begin, begin)) for begin, end in found.ranges]
    finally:
        os.close(found.memory)
