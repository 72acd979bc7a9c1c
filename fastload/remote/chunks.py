"""Numbers what is fetched of the shards of an index: of each shard its header, then the chunks of each large field.

The numbers follow from the index alone, so that all processes of a machine, and all later runs, agree on them without
having looked at a shard. Where a chunk lies in its shard the shard's header says (`ShardLayout`).

    shard 0: header 0 | images 1 2 3 4 | masks 5 6 7 8    shard 1: header 9 | images 10 11 ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from fastload.errors import FormatError
from fastload.format.digests import linear_offset
from fastload.format.header import PIXEL_FIELDS, PackedFile

LARGE_ROW_BYTES = 1024
"""Fields with rows of so many bytes are fetched by chunks, as pixels are; all others come with their shard's header."""

_CHUNK_BYTES = 8 * 2**20  # of fields without chunks
TAIL_BYTES = 1 << 20
"""The end of a file, in which HDF5 keeps what does not fit into its beginning."""

JOINED_BYTES = 64 * 2**10
"""Ranges with a smaller gap between them are fetched as one; what lies in the gap belongs to other chunks."""

Range = tuple[int, int]
"""The first byte of a range of an object, and the first one behind it."""


def is_large(name: str, row_bytes: int) -> bool:
    """Whether a field is fetched by chunks."""
    return name in PIXEL_FIELDS or row_bytes >= LARGE_ROW_BYTES


class Chunk(NamedTuple):
    """One of the chunks: its shard, the name of its field, "" for the shard's header, and its number within these."""

    shard: int
    field: str
    number: int


class ChunkTable:
    """The numbers of all chunks of an index.

    Attributes:
        shards: of the index.
        fields: names of the large fields.
        num_chunks: of all shards, headers included.
        headers: int64 (S,), the number of each shard's header.
        rows: of each large field that is not ragged, the rows of a chunk in each shard, int64 (S,).
        rows_near: the same of all large fields, of ragged ones about as many.
        largest: of each large field, the bytes of the largest chunk.
    """

    def __init__(self, file: PackedFile) -> None:
        shards = file.shards
        self.shards = shards
        self.fields = tuple(name for name, field in file.fields.items() if is_large(name, field.row_bytes))
        of_images = "images" in file.fields and "images" not in file.ragged
        by_images = shards.chunk_rows if of_images else np.zeros_like(shards.num_rows)
        self.rows: dict[str, NDArray[np.int64]] = {}
        self.rows_near: dict[str, NDArray[np.int64]] = {}
        self.largest: dict[str, int] = {}
        counts = [np.ones_like(shards.num_rows)]
        for name in self.fields:
            field = file.fields[name]
            if (ragged := file.ragged.get(name)) is not None:
                self.largest[name] = ragged.ragged.chunk_bytes
                self.rows_near[name] = np.full_like(shards.num_rows, ragged.chunk_rows)
                counts.append(-(-ragged.bytes_in(shards) // ragged.ragged.chunk_bytes))
            else:
                alone = max(1, _CHUNK_BYTES // max(1, field.row_bytes))
                # Whole chunks of HDF5, each of which is read at once; masks' may hold other rows than the images'.
                least = 1 if field.linear or name == "images" else max(1, field.chunk_rows)
                self.rows[name] = -(-np.where(by_images > 0, by_images, alone) // least) * least
                self.rows_near[name] = self.rows[name]
                self.largest[name] = int(self.rows[name].max()) * field.row_bytes
                counts.append(-(-shards.num_rows // self.rows[name]))
        # Columns: headers, and each field; the first number of each in each shard.
        table = np.array(counts, np.int64).T
        self._firsts = (np.cumsum(table.ravel()) - table.ravel()).reshape(table.shape)
        self.headers: NDArray[np.int64] = self._firsts[:, 0]
        self.num_chunks = int(table.sum())

    def of_rows(self, name: str, shard: NDArray[np.int64], there: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the chunk of each row of a field that is not ragged, int64 (B,), from `Shards.locate`."""
        first = self._firsts[:, 1 + self.fields.index(name)]
        found: NDArray[np.int64] = first[shard] + there // self.rows[name][shard]
        return found

    def of_bytes(
        self, name: str, shard: int, offset: NDArray[np.int64], num_bytes: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Returns the chunks that hold these bytes of a ragged field in a shard, ascending, each once."""
        first = int(self._firsts[shard, 1 + self.fields.index(name)])
        begin = offset // self.largest[name]
        last = (offset + np.maximum(num_bytes, 1) - 1) // self.largest[name]
        found = [np.unique(begin), *(np.arange(a, b + 1) for a, b in zip(begin, last, strict=True) if b > a)]
        return first + np.unique(np.concatenate(found))

    def chunk(self, number: int) -> Chunk:
        """Returns where a chunk belongs."""
        shard = int(np.searchsorted(self.headers, number, "right")) - 1
        column = int(np.searchsorted(self._firsts[shard], number, "right")) - 1
        # Of fields without a chunk in this shard the numbers are equal: the last of them has it.
        return Chunk(shard, ("", *self.fields)[column], number - int(self._firsts[shard, column]))

    def data_of(self, shard: int) -> slice:
        """Returns the numbers of all chunks of a shard but its header."""
        stop = int(self.headers[shard + 1]) if shard + 1 < len(self.headers) else self.num_chunks
        return slice(int(self.headers[shard]) + 1, stop)

    def rows_of(self, chunk: Chunk) -> range:
        """Returns the rows of its shard that a chunk of a field that is not ragged holds."""
        size, count = int(self.rows[chunk.field][chunk.shard]), int(self.shards.num_rows[chunk.shard])
        return range(chunk.number * size, min((chunk.number + 1) * size, count))

    def around(self, number: int, ranges_of: Callable[[Chunk], list[Range]]) -> list[tuple[int, Range]]:
        """Returns the ranges of the chunks before and behind one of the same field and shard, each with its number."""
        chunk, found = self.chunk(number), list[tuple[int, Range]]()
        for near in (number - 1, number + 1):
            if 0 <= near < self.num_chunks and self.chunk(near)[:2] == chunk[:2]:
                found += [(near, one) for one in ranges_of(self.chunk(near))]
        return found

    def placed(self, chunks: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Returns of chunks their shards, their columns (0: a header, else field 1, 2, ...) and numbers, int64 (n,)."""
        shard = np.searchsorted(self.headers, chunks, "right") - 1
        firsts = self._firsts[shard]
        column = (firsts <= chunks[:, None]).sum(axis=1) - 1
        return shard, column, chunks - firsts[np.arange(len(chunks)), column]


class ShardLayout:
    """The places of a shard's chunks in its file, from its HDF5 metadata, which has to be there.

    Attributes:
        columns: the byte at which the rows of each small field begin, where they are back to back.
    """

    def __init__(self, file: h5py.File, table: ChunkTable, shard: int) -> None:
        self._table, self._shard = table, shard
        small = [name for name in file if name not in table.fields and isinstance(file[name], h5py.Dataset)]
        offsets = {name: linear_offset(file[name]) for name in small}
        self.columns = {name: offset for name, offset in offsets.items() if offset is not None}
        self._extents = {name: extent_of(file[name]) for name in table.fields if name in file}

    def ranges(self, chunk: Chunk) -> list[Range]:
        """Returns the ranges of the shard's file that hold a chunk of a large field, mostly one."""
        extent = self._extents[chunk.field]
        if chunk.field in self._table.rows:
            return extent.of_rows(self._table.rows_of(chunk))
        first, num_bytes = chunk.number * self._table.largest[chunk.field], self._table.largest[chunk.field]
        return extent.of_rows(range(first, min(first + num_bytes, extent.num_rows)))  # of a row each byte


class Extent(NamedTuple):
    """The places of a dataset's rows in its file: back to back from `base` on, or in HDF5's chunks.

    `begins`, `ends`: int64 (n,), of HDF5's chunks in the order of their rows; `chunk_rows` of them in each.
    """

    num_rows: int
    row_bytes: int
    base: int = 0
    chunk_rows: int = 0
    first_rows: NDArray[np.int64] | None = None
    begins: NDArray[np.int64] | None = None
    ends: NDArray[np.int64] | None = None

    def of_rows(self, rows: range) -> list[Range]:
        if self.first_rows is None or self.begins is None or self.ends is None:
            return [(self.base + rows.start * self.row_bytes, self.base + rows.stop * self.row_bytes)]
        first = rows.start // self.chunk_rows * self.chunk_rows
        begin, stop = np.searchsorted(self.first_rows, [first, rows.stop]).tolist()
        pairs = zip(self.begins[begin:stop].tolist(), self.ends[begin:stop].tolist(), strict=True)
        return joined_ranges(pairs, 0)

    def whole(self) -> list[Range]:
        """Returns the ranges of all of its rows, with what HDF5 allocated behind them."""
        if self.begins is None or self.ends is None:
            rows = -(-self.num_rows // max(1, self.chunk_rows)) * max(1, self.chunk_rows)
            return [(self.base, self.base + rows * self.row_bytes)]
        return joined_ranges(zip(self.begins.tolist(), self.ends.tolist(), strict=True), 0)


def extent_of(item: h5py.Dataset) -> Extent:
    """Returns where the rows of a dataset lie."""
    row_bytes = math.prod(map(int, item.shape[1:])) * item.dtype.itemsize
    num_rows = int(item.shape[0])
    if item.chunks is None:
        offset = item.id.get_offset()
        if offset is None:
            raise FormatError(f"{item.file.filename}: `{item.name[1:]}` has no data in the file. Pack it again.")
        return Extent(num_rows, row_bytes, base=int(offset))
    chunk_rows = int(item.chunks[0])
    found: list[tuple[int, int, int]] = []
    item.id.chunk_iter(lambda one: found.append((one.chunk_offset[0], one.byte_offset, one.byte_offset + one.size)))
    table = np.array(sorted(found), np.int64).reshape(-1, 3)
    first_rows, begins, ends = table.T
    size = chunk_rows * row_bytes
    linear = (
        len(begins) and (begins == begins[0] + np.arange(len(begins)) * size).all() and (ends - begins == size).all()
    )
    if linear and len(begins) == -(-num_rows // chunk_rows):
        return Extent(num_rows, row_bytes, int(begins[0]), chunk_rows)
    return Extent(num_rows, row_bytes, 0, chunk_rows, first_rows, begins, ends)


def joined_ranges(ranges: Sequence[Range] | zip[Range], gap: int) -> list[Range]:
    """Returns ranges sorted, those joined that touch or have at most so many bytes between them."""
    found: list[Range] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > begin:
            found.append((begin, end))
    return found


def without(ranges: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """Returns the parts of ranges, sorted and disjoint, that lie in none of the others, which are so, too."""
    found: list[Range] = []
    for begin, end in ranges:
        for first, last in others:
            if last <= begin or first >= end:
                continue
            if first > begin:
                found.append((begin, first))
            begin = max(begin, last)
        if begin < end:
            found.append((begin, end))
    return found


def likely_header(file: PackedFile, shard: int) -> list[Range]:
    """Returns ranges of a shard to look for its header in: where it has no large field but images, all of the header.

    The first 4,096 bytes, and what lies behind the images; where the index does not say that, the last MiB.
    """
    shards = file.shards
    size, images = int(shards.num_bytes[shard]), file.fields.get("images")
    first = (0, min(size, 4096))
    pixels = 0
    if images is not None and not any(
        is_large(name, field.row_bytes) for name, field in file.fields.items() if name != "images"
    ):
        pixels = _pixel_bytes(file, shard)
    behind = first[1] + pixels if 0 < pixels < size - first[1] else size - TAIL_BYTES
    return joined_ranges([first, (max(first[1], behind), size)], 0)


def _pixel_bytes(file: PackedFile, shard: int) -> int:
    """Returns the bytes that HDF5 allocated for the images of a shard; 0 where only its header says it."""
    images, num_bytes = file.fields["images"], int(file.fields["images"].bytes_in(file.shards)[shard])
    if (ragged := file.ragged.get("images")) is not None:
        chunk_bytes = min(ragged.ragged.chunk_bytes, num_bytes)
    else:
        chunk_bytes = 0 if images.chunked else int(file.shards.chunk_rows[shard]) * images.row_bytes
    return -(-num_bytes // chunk_bytes) * chunk_bytes if chunk_bytes else 0
