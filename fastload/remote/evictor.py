"""Room for chunks in a full cache: `Evictor` removes those needed last, `Allocator` waits where all are in use."""

from __future__ import annotations

import errno
import functools
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastload.errors import CacheError
from fastload.remote.cache import CacheFolder, CacheLostError, DiskFullError
from fastload.remote.cached import CachedDataset
from fastload.remote.chunks import Range
from fastload.remote.in_use import ChunksInUse
from fastload.remote.source import ChunkSource

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_FULL_S = 0.5  # for which a full disk may be full only until chunks are evicted
_VICTIMS = 64  # chosen at a time
_WARNED_AFTER_S = 5.0

_log = logging.getLogger("fastload")

_living: weakref.WeakSet[Evictor] = weakref.WeakSet()

Needed = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""Returns how far off the next use of each chunk is, float64 (n,): those with the largest numbers are evicted first."""


class AbsentError(LookupError):
    """A chunk is not in the cache, and was not to be fetched."""


class Evictor:
    """Removes chunks of a dataset from the cache. Any thread may call it.

    Args:
        cached, source: as of `ChunkFetcher`.
        in_use: the chunks that this process needs.
        header_there: returns a context within which the header of a shard is in the cache; it raises AbsentError where
            it is not.

    Attributes:
        needed: says which chunks are needed last; None: upcoming chunks are not known.
        folder: of the dataset.
    """

    def __init__(
        self,
        cached: CachedDataset,
        source: ChunkSource,
        in_use: ChunksInUse,
        header_there: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        self._table, self._cached, self._source, self._in_use = cached.table, cached, source, in_use
        self._header_there, self.folder, self._pid = header_there, cached.folder, os.getpid()
        self._victims: deque[int] = deque()
        self._evicting = threading.Lock()
        self.needed: Needed | None = None
        _living.add(self)

    def evict(self, *, announced: bool = False) -> bool:
        """Evicts one chunk that nobody uses; returns whether it did.

        `announced`: one that is held only because it was announced.
        """
        with self._evicting:
            for fresh in (False, True):
                if fresh or announced:
                    self._victims = self._choose_victims(announced=announced)
                while self._victims:
                    if self._evict_unless_used(self._victims.popleft(), announced=announced):
                        return True
        return False

    def evict_for_another(self) -> bool:
        """Evicts one chunk that nobody uses, if this process may: not of a parent, whose locks protect them."""
        with suppress(CacheLostError):
            return self._pid == os.getpid() and not self._in_use.is_over and self.evict()
        return False

    def _evict_unless_used(self, victim: int, *, announced: bool) -> bool:
        """Evicts a chunk that neither this process nor another one holds; one that only waits to be held may go."""
        if not self._in_use.claim(victim, announced=announced):
            return False
        done = False
        try:
            done = self.evict_chunk(victim)
        finally:
            self._in_use.unclaim(victim, evicted=done)
        return done

    def evict_chunk(self, number: int) -> bool:
        """Evicts a chunk, which this process has claimed, unless another one uses it; returns whether it did."""
        chunk = self._table.chunk(number)
        where = self.place(number)
        others = slice(0) if chunk.field else self._table.data_of(chunk.shard)
        return where is not None and self._cached.evict(number, chunk.shard, *where, others)

    def place(self, number: int) -> tuple[list[Range], list[tuple[int, Range]]] | None:
        """Returns the ranges of a chunk, and those around it, as `CachedDataset.evict` takes them.

        None: the index does not say it, and the header of the shard is not there.
        """
        chunk = self._table.chunk(number)
        if not chunk.field:
            return self._cached.whole(chunk.shard), []
        if ranges := self._source.ranges_by_index(chunk):
            return ranges, self._table.around(number, self._source.ranges_by_index)
        with suppress(AbsentError), self._header_there(chunk.shard):
            find = functools.partial(self._source.ranges, cached=self._cached)
            return find(chunk), self._table.around(number, find)
        return None

    def _choose_victims(self, *, announced: bool) -> deque[int]:
        """Returns chunks to evict, those first whose next use is farthest; headers last."""
        kept = self._cached.records.kept()
        kept = kept[~np.isin(kept, self._in_use.busy(announced=announced))]
        shard, column, _ = self._table.placed(kept)
        data, headers = kept[column > 0], kept[column == 0]
        # Of a shard with chunks here its header says where they lie.
        spare = headers[~np.isin(shard[column == 0], shard[column > 0])]
        needed = self.needed(data) if self.needed is not None else np.random.default_rng().random(len(data))
        # Few of a small cache, where others are soon needed later than the last of many.
        order = np.argsort(-needed, kind="stable")[: max(1, min(_VICTIMS, len(data) // 16))]
        return deque([*data[order].tolist(), *spare[: _VICTIMS if not len(order) else 0].tolist()])


class Allocator:
    """Allocates room for chunks of a dataset, and waits for it. Any thread may call it.

    Args:
        cached: as of `ChunkFetcher`.
        in_use: the chunks that this process needs.
        evictor: of the dataset.
        hold_less: called where there is less room than the bound says.
        give_up_after_s: for which a chunk waits for room.
    """

    def __init__(
        self,
        cached: CachedDataset,
        in_use: ChunksInUse,
        evictor: Evictor,
        hold_less: Callable[[], None],
        give_up_after_s: float,
    ) -> None:
        self._cached, self._in_use, self._evictor, self._hold_less = cached, in_use, evictor, hold_less
        self._cache, self._root = cached.cache, cached.folder.parent
        self._give_up_after_s, self._warned = give_up_after_s, False
        self._short: set[int] = set()  # chunks that wait for room
        self._headers = frozenset(cached.table.headers.tolist())

    def make(self, number: int, shard: int, ranges: Sequence[Range]) -> None:
        """Allocates a chunk's ranges in its shard's copy; a full cache evicts the chunks needed last.

        Raises:
            DiskFullError: the disk is full, and nothing can be evicted.
            CacheError: all chunks in the cache have been in use for too long.
            AbsentError: nobody waits for the chunk, and this process stands back for others.
        """
        try:
            self._make(number, shard, ranges)
        finally:
            self._short.discard(number)

    def _make(self, number: int, shard: int, ranges: Sequence[Range]) -> None:
        began_s, pause_s, full, awaited_s = time.monotonic(), _FIRST_PAUSE_S, False, math.inf
        turn = self._in_use.turn
        while True:
            self._cached.records.begin(number)
            try:
                with self._cached.copies.opened(shard) as fd:
                    if self._cached.bound.allocate(fd, ranges):
                        return
            except DiskFullError:
                where = (ranges, []) if number in self._headers else self._evictor.place(number)
                if where is not None:
                    self._cached.free(number, shard, *where)
                if not full:
                    self._hold_less()
                full = True
            if self._evict() or (self._is_awaited(number) and self._evictor.evict(announced=True)):
                continue
            if self._in_use.is_over:
                raise RuntimeError("the dataset was closed")
            if full and time.monotonic() - began_s > _FULL_S:
                raise DiskFullError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._root))
            if time.monotonic() - began_s > self._give_up_after_s:
                raise self.in_use_error()
            if turn != self._in_use.turn and not self._is_awaited(number):
                raise AbsentError
            self._short.add(number)
            awaited_s = min(awaited_s, time.monotonic()) if self._is_awaited(number) else math.inf
            if time.monotonic() - awaited_s > _WARNED_AFTER_S and not self._warned:
                self._warned = True
                _log.warning(
                    "%s: %s is reached, and all chunks in it are in use, by this process or others that share it: what "
                    "is needed now waits for room. Give the cache more: Remote(max_bytes=..., cache=...).",
                    self._root.parent, self._cached.bound,
                )  # fmt: skip
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def is_short_of(self, chunks: Iterable[int]) -> bool:
        """Whether any of these chunks waits for room, or a header."""
        return not (self._short.isdisjoint(chunks) and self._short.isdisjoint(self._headers))

    def in_use_error(self) -> CacheError:
        """Returns the error of a chunk for which there was no room for too long."""
        return CacheError(
            f"{self._root.parent}: {self._cached.bound} is reached, and all chunks in it have been in use "
            f"for {self._give_up_after_s:g} s. Give the cache more: Remote(max_bytes=..., cache=...), or clear what "
            f"other jobs left: `fastload cache clear`."
        )

    def give_back(self, number: int) -> None:
        """Frees what was allocated for a chunk of a field that did not come; its lock is held exclusively, and ends."""
        with suppress(OSError, RuntimeError):  # it was closed
            self._evictor.evict_chunk(number)

    def _evict(self) -> bool:
        """Evicts one chunk that nobody uses, else something of another dataset; returns whether it did."""
        return self._evictor.evict() or (self._cache is not None and evict_elsewhere(self._cache, self._evictor.folder))

    def _is_awaited(self, chunk: int) -> bool:
        """Whether a thread or a worker process waits for a chunk."""
        return chunk in self._in_use.awaited or chunk in self._in_use.hurried


def evict_elsewhere(cache: CacheFolder, folder: Path | None = None) -> bool:
    """Evicts a dataset that nobody uses, or a chunk of one that this process uses, too; returns whether it did.

    Args:
        cache: to make room in.
        folder: of the dataset that the room is for.
    """
    with cache.locked():
        cache.use.count()
        if any(cache.remove(other) for other in cache.datasets() if other != folder):
            return True
    others = [one for one in list(_living) if one.folder != folder and one.folder.parent == cache.root]
    return any(one.evict_for_another() for one in others)
