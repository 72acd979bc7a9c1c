"""`ChunkSource`: where a chunk lies in its object, its bytes, and whether they are what was packed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fastload.errors import DamagedRowError, FormatError, MissingFileError
from fastload.format.digests import header_digest
from fastload.format.header import PackedFile, open_hdf5
from fastload.remote.agreement import agreed
from fastload.remote.cache import CacheLostError
from fastload.remote.cached import CachedDataset, digest_of
from fastload.remote.chunks import (
    JOINED_BYTES,
    Chunk,
    ChunkTable,
    Range,
    ShardLayout,
    joined_ranges,
    likely_header,
)
from fastload.remote.headers import (
    UNREADABLE,
    HeaderAnswer,
    agreed_header,
    header_answer,
    header_problem,
    header_ranges,
)
from fastload.remote.objects import ShardObjects
from fastload.remote.row_digests import wrong_encoded_rows, wrong_rows
from fastload.system.files import read_bytes
from fastload.system.text import text_of


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
