"""`HeldRows`: the rows of one shard behind a URL, fetched ahead of whoever checks them and held meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Self, cast

import numpy as np
from numpy.typing import NDArray

from fastload.errors import DamagedRowError
from fastload.format.header import PIXEL_FIELDS, PackedFile
from fastload.read.checked import CHANGED, CheckedSamples
from fastload.read.sharded import ShardedReader
from fastload.remote.shards import RemoteShards

_COPY = (
    "its copy in the cache is not what the object holds: `fastload cache verify` removes such copies, and the next "
    "read fetches them again"
)


class HeldRows:
    """The rows of a shard of an index behind a URL; within `with`, the shard's header is in its copy.

    Threads may share it.

    Args:
        index: the header that `open_remote` gave.
        shard: number of the shard.
    """

    def __init__(self, index: PackedFile, shard: int) -> None:
        self._remote, self._shard = cast(RemoteShards, index.remote), shard
        assert index.shards is not None, "an index"
        there, here = index.shards.rows_of(shard)
        self._there = dict(zip(here.tolist(), there.tolist(), strict=True))
        self._fetcher, names = self._remote.current(), self._remote.table.fields
        self._pixels = ShardedReader(index, [name for name in names if name in PIXEL_FIELDS], "pread")
        self._others = ShardedReader(index, [name for name in names if name not in PIXEL_FIELDS], "pread")
        self._announced: dict[int, list[int]] = {}  # by the first row of a span
        self._depth = max(1, min(self._remote.remote.in_flight, self._remote.fitting // 2))
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(self._remote.holding_header(self._shard))
        return self

    def __exit__(self, *_: object) -> None:
        for chunks in self._announced.values():
            self._fetcher.withdraw(chunks)
        self._pixels.close()
        self._others.close()
        self._open.close()

    def fields(self, rows: range) -> AbstractContextManager[None]:
        """Returns a context within which the large fields of rows other than pixels are there."""
        if not self._remote.table.fields or set(self._remote.table.fields) <= set(PIXEL_FIELDS):
            return nullcontext()
        return self._others.holding_of(self._shard, _numbers(rows))

    def ahead(self, spans: Iterable[range]) -> Iterator[range]:
        """Yields the spans of rows, whose pixels are fetched from some spans before on; each goes to `damaged`."""
        coming = deque[range]()
        for span in spans:
            numbers = _numbers(span)
            with self._pixels.holding_of(self._shard, numbers[:0]):
                chunks = self._pixels.chunks_of(np.full(len(numbers), self._shard), numbers)
            self._announced[span.start] = chunks
            self._fetcher.announce(chunks)
            coming.append(span)
            if len(coming) > self._depth:
                yield coming.popleft()
        yield from coming

    def damaged(self, samples: CheckedSamples, rows: range) -> list[tuple[int, str]]:
        """Returns (row, why) of rows that are not what was packed, as `CheckedSamples.damaged` of the shard's copy."""
        try:
            return self._damaged(samples, list(rows))
        finally:
            self._fetcher.withdraw(self._announced.pop(rows.start, []))

    def _damaged(self, samples: CheckedSamples, rows: list[int]) -> list[tuple[int, str]]:
        if not rows:
            return []
        try:
            with self._pixels.holding_of(self._shard, np.array(rows, np.int64)):
                return [(row, self._why(row, why)) for row, why in samples.damaged(rows)]
        except DamagedRowError as exc:
            # A chunk that came is not what was packed, and so is not in the cache: the error names all of its damage.
            wrong = sorted({self._there[row] for row in exc.rows if row in self._there} & {*rows})
            if not wrong:
                raise
        chunk, places = self._chunks_of(wrong[0])[0], {row: self._chunks_of(row) for row in rows}
        found = [(row, CHANGED) for row in wrong if places[row] == [chunk]]
        # An image that lies in other chunks, too, was not compared, and cannot be read from the cache.
        across = [row for row in rows if chunk in places[row] and len(places[row]) > 1]
        found += [(row, CHANGED) for row in across if self._is_damaged(row)]
        return found + self._damaged(samples, [row for row in rows if chunk not in places[row]])

    def _is_damaged(self, row: int) -> bool:
        there = np.array([row])
        with self._pixels.holding_of(self._shard, there[:0]):
            index = self._pixels.reader(self._shard).ragged("images").look_up(there)
        first, size = int(index.offset[0]), int(index.bytes[0])
        return self._remote.is_damaged(self._shard, row, first, first + size)

    def _chunks_of(self, row: int) -> list[int]:
        shard, there = np.array([self._shard]), np.array([row])
        with self._pixels.holding_of(self._shard, there[:0]):
            return self._pixels.chunks_of(shard, there)

    def _why(self, row: int, why: str) -> str:
        """Returns why a row is damaged whose chunk is in the cache: the object is, or only its copy."""
        return why if all(map(self._remote.is_copied, self._chunks_of(row))) else _COPY


def _numbers(rows: range) -> NDArray[np.int64]:
    return np.arange(rows.start, rows.stop, dtype=np.int64)
