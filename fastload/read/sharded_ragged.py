"""`ShardedRagged`: reads rows of varying length of an index from its shards, each by a `RaggedReader` of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fastload.format.header import PackedFile
from fastload.format.ragged import INDEX_DTYPES, RaggedIndex
from fastload.format.shards import Shards
from fastload.images.decode_part import DecodedPart, offset_in
from fastload.read.ragged_rows import RaggedReader
from fastload.read.reader import RowReader


class ShardPart(NamedTuple):
    """The rows of a batch that lie in one shard: their numbers there, and their positions in the batch, int64 (n,)."""

    shard: int
    rows: NDArray[np.int64]
    at: NDArray[np.int64]


class OpenShards(Protocol):
    """The readers of the shards of an index; a `ShardedReader`."""

    file: PackedFile
    shards: Shards

    def parts(self, rows: NDArray[np.int64]) -> list[ShardPart]: ...
    def reader(self, shard: int) -> RowReader: ...
    def holding(self, rows: NDArray[np.int64], *, columns_only: bool = False) -> AbstractContextManager[None]: ...


class ShardedRagged(RaggedReader):
    """Reads rows of varying length of an index; used like a `RaggedReader`, within `ShardedReader.holding` them.

    Offsets are of all shards' bytes, one shard after another.
    """

    def __init__(self, reader: OpenShards, name: str) -> None:
        self._file, self._field, self._reader, self._name = reader.file, reader.file.fields[name], reader, name
        self.flat = self._view = None
        self._ends = np.cumsum(np.array(reader.file.fields[name].shard_bytes, np.int64))
        self._begins = np.append(0, self._ends[:-1])

    def _of(self, shard: int) -> RaggedReader:
        return self._reader.reader(shard).ragged(self._name)

    def index(self, rows: NDArray[np.int64]) -> RaggedIndex:
        return self._joined(rows, lambda ragged, there: ragged.index(there))

    def look_up(self, rows: NDArray[np.int64]) -> RaggedIndex:
        return self._joined(rows, lambda ragged, there: ragged.look_up(there))

    def _joined(
        self, rows: NDArray[np.int64], found: Callable[[RaggedReader, NDArray[np.int64]], RaggedIndex]
    ) -> RaggedIndex:
        whole = RaggedIndex(*(np.empty((len(rows), *shape), dtype) for dtype, shape in INDEX_DTYPES.values()))
        for part in self._reader.parts(rows):
            some = found(self._of(part.shard), part.rows)
            for name, values in vars(some).items():
                getattr(whole, name)[part.at] = values
            whole.offset[part.at] += self._begins[part.shard]
        return whole

    def part(self, part: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        dtype, shape = INDEX_DTYPES[part]
        whole = np.empty((len(rows), *shape), dtype)
        with self._reader.holding(rows, columns_only=True):
            for some in self._reader.parts(rows):
                whole[some.at] = self._of(some.shard).part(part, some.rows)
                if part == "offset":
                    whole[some.at] += self._begins[some.shard]
        return whole

    def _pieces(self, index: RaggedIndex) -> Iterator[tuple[RaggedReader, NDArray[np.int64], RaggedIndex]]:
        """Yields of each shard its reader, which of the entries are of it, and those, with offsets of the shard."""
        shard = np.minimum(np.searchsorted(self._ends, index.offset, "right"), len(self._ends) - 1)
        for number in np.unique(shard).tolist():
            at = np.flatnonzero(shard == number)
            mine = index.part(at)
            mine.offset[:] -= self._begins[number]
            yield self._of(number), at, mine

    def take(self, index: RaggedIndex, memory: NDArray[np.uint8] | None = None) -> list[memoryview]:
        found: list[Any] = [b""] * len(index)
        for ragged, at, mine in self._pieces(index):
            for place, data in zip(at.tolist(), ragged.take(mine), strict=True):
                found[place] = data
        if memory is None:
            return found
        view, begin = memory.data, 0
        for place, data in enumerate(found):
            view[begin : begin + len(data)] = data
            found[place] = view[begin : begin + len(data)]
            begin += len(data)
        return found

    def make_images(
        self,
        rows: NDArray[np.int64],
        index: RaggedIndex,
        windows: NDArray[np.int64],
        factors: NDArray[np.int64],
        output: NDArray[Any],
        constants: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
    ) -> NDArray[np.bool_]:
        made = np.zeros(len(rows), np.bool_)
        there = self._reader.shards.locate(rows)[1]
        for ragged, at, mine in self._pieces(index):
            whole = len(at) == len(rows)
            out = output if whole else np.empty((len(at), *output.shape[1:]), output.dtype)
            done = ragged.make_images(there[at], mine, windows[at], factors[at], out, constants)
            made[at] = done
            if not whole:
                output[at[done]] = out[done]
        return made

    def decoded(
        self, rows: NDArray[np.int64], outs: NDArray[Any] | Sequence[NDArray[Any]] | None = None
    ) -> list[NDArray[Any]]:
        found: list[Any] = [None] * len(rows)
        for part in self._reader.parts(rows):
            some = None if outs is None else [outs[at] for at in part.at.tolist()]
            for at, image in zip(part.at.tolist(), self._of(part.shard).decoded(part.rows, some), strict=True):
                found[at] = image
        return found

    def parts(
        self,
        rows: NDArray[np.int64],
        index: RaggedIndex,
        windows: NDArray[np.int64],
        factors: NDArray[np.int64],
        memory: NDArray[np.uint8],
    ) -> list[DecodedPart]:
        found: list[Any] = [None] * len(rows)
        there, used = self._reader.shards.locate(rows)[1], 0
        for ragged, at, mine in self._pieces(index):
            some = ragged.parts(there[at], mine, windows[at], factors[at], memory[used:])
            for place, part in zip(at.tolist(), some, strict=True):
                found[place] = part
                begin = offset_in(memory, part.pixels)
                used = used if begin < 0 else max(used, begin + part.pixels.nbytes)
        return found

    def close(self) -> None:
        """Nothing: each shard's reader has its own."""
