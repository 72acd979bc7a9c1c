"""`HeldRows`: the rows of one shard behind a URL, fetched ahead of whoever checks them and held meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Self, cast

import numpy as np

from fastload.format.header import PIXEL_FIELDS, PackedFile
from fastload.read.checked import CheckedSamples
from fastload.read.remote_store import RemoteStore
from fastload.read.table import Located, index_columns
from fastload.remote.shards import RemoteShards


class HeldRows:
    """The rows of a shard of an index behind a URL; within `with`, the shard's header is in its copy.

    Threads may share it.

    Args:
        index: the header that `open_remote` gave.
        shard: number of the shard.
    """

    def __init__(self, index: PackedFile, shard: int) -> None:
        self._remote, self._shard = cast(RemoteShards, index.remote), shard
        self._fetcher, names = self._remote.cache.current(), self._remote.table.fields
        self._pixels = [name for name in names if name in PIXEL_FIELDS]
        self._others = [name for name in names if name not in PIXEL_FIELDS]
        columns = [one for name in self._pixels for one in index_columns(index, name).values()]
        self._store = RemoteStore(index, [*names, *columns], "pread")
        self._announced: dict[int, list[int]] = {}  # by the first row of a span
        self._depth = max(1, min(self._remote.remote.in_flight, self._remote.room.fitting // 2))
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(self._remote.holding_header(self._shard))
        return self

    def __exit__(self, *_: object) -> None:
        for chunks in self._announced.values():
            self._fetcher.withdraw(chunks)
        self._store.close()
        self._open.close()

    def fields(self, rows: range) -> AbstractContextManager[None]:
        """Returns a context within which the large fields of rows other than pixels are there."""
        return self._store.holding(self._located(rows), self._others)

    def ahead(self, spans: Iterable[range]) -> Iterator[range]:
        """Yields the spans of rows, whose pixels are fetched from some spans before on; each goes to `damaged`."""
        coming = deque[range]()
        for span in spans:
            located = self._located(span)
            with self._store.holding(located, ()):
                chunks = self._store.chunks_of(located, self._pixels)
            self._announced[span.start] = chunks
            self._fetcher.announce(chunks)
            coming.append(span)
            if len(coming) > self._depth:
                yield coming.popleft()
        yield from coming

    def damaged(self, samples: CheckedSamples, rows: range) -> list[tuple[int, str]]:
        """Returns (row, why) of rows that are not what was packed, as `CheckedSamples.damaged` of the shard's copy."""
        try:
            with self._store.holding(self._located(rows), self._pixels):
                return samples.damaged(rows)
        finally:
            self._fetcher.withdraw(self._announced.pop(rows.start, []))

    def _located(self, rows: range) -> Located:
        return self._store.table.of_shard(self._shard, np.arange(rows.start, rows.stop, dtype=np.int64))
