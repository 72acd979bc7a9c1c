"""Makes room in a cache that is full: evicts the chunks that are needed last, and waits where all are in use."""

from __future__ import annotations

import errno
import functools
import logging
import math
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fastload.errors import CacheError
from fastload.remote.cache import CachedDataset, CacheFolder, CacheLostError, DiskFullError
from fastload.remote.chunks import Chunk, ChunkTable, Range

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_FULL_S = 0.5  # for which a full disk may be full only until chunks are evicted
_VICTIMS = 64  # chosen at a time
_WARNED_AFTER_S = 5.0

_log = logging.getLogger("fastload")

_living: weakref.WeakSet[Room] = weakref.WeakSet()

Needed = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""Returns how far off the next use of each chunk is, float64 (n,): those with the largest numbers are evicted first."""


class AbsentError(LookupError):
    """A chunk is not in the cache, and was not to be fetched."""


class Objects(Protocol):
    """The objects that chunks are fetched from, and the known facts of their bytes."""

    def ranges(self, chunk: Chunk, cached: CachedDataset) -> list[Range]:
        """Returns where a chunk lies in its shard, whose header is in the cache; [] where that is damaged."""
        ...

    def ranges_by_index(self, chunk: Chunk) -> list[Range]:
        """Returns where a chunk lies in its shard if the index says it; else []."""
        ...

    def fetch_chunk(
        self,
        chunk: Chunk,
        ranges: Sequence[Range],
        cached: CachedDataset,
        header_there: Callable[[], AbstractContextManager[None]],
    ) -> list[tuple[Range, Any]]:
        """Returns the bytes of a chunk's ranges. Raises DamagedRowError if they are not what was packed.

        Within `header_there` the header of the shard is in the cache.
        """
        ...

    def fetch_header(self, shard: int) -> list[tuple[Range, Any]]:
        """Returns the parts of a shard that its header consists of."""
        ...


class Claims(Protocol):
    """The chunks that this process uses; a `ChunkFetcher`."""

    turn: int

    @property
    def in_use(self) -> bool: ...
    def busy(self, *, announced: bool) -> NDArray[np.int64]: ...
    def claim(self, victim: int, *, announced: bool) -> bool: ...
    def unclaim(self, victim: int, *, evicted: bool) -> None: ...
    def is_awaited(self, chunk: int) -> bool: ...
    def hold_less(self) -> None: ...
    def header_there(self, shard: int) -> AbstractContextManager[None]: ...


class Room:
    """The room that a dataset has in a cache. Any thread may call it.

    Args:
        table, cached, objects: as of `ChunkFetcher`.
        claims: says which chunks this process uses.
        give_up_after_s: for which a chunk waits for room.

    Attributes:
        needed: says which chunks are needed last; None: upcoming chunks are not known.
    """

    def __init__(
        self, table: ChunkTable, cached: CachedDataset, objects: Objects, claims: Claims, *, give_up_after_s: float
    ) -> None:
        self._table, self._cached, self._objects, self._claims = table, cached, objects, claims
        self._give_up_after_s = give_up_after_s
        self._victims: deque[int] = deque()
        self._evicting = threading.Lock()
        self.needed: Needed | None = None
        self._warned = False
        self._short: set[int] = set()  # chunks that wait for room
        self._headers = frozenset(table.headers.tolist())
        _living.add(self)

    @property
    def folder(self) -> Path:
        """The folder of the dataset."""
        return self._cached.folder

    @property
    def cache_root(self) -> Path:
        """The folder of the cache."""
        return self._cached.cache.root

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
        turn = self._claims.turn
        while True:
            self._cached.begin(number)
            try:
                with self._cached.opened(shard) as fd:
                    if self._cached.cache.allocate(fd, ranges):
                        return
            except DiskFullError:
                is_header = number == self._table.headers[shard]
                if (where := (ranges, []) if is_header else self._where(number)) is not None:
                    self._cached.free(number, shard, *where)
                if not full:
                    self._claims.hold_less()
                full = True
            if self._evict() or (self._claims.is_awaited(number) and self.evict_own(announced=True)):
                continue
            if not self._claims.in_use:
                raise RuntimeError("the dataset was closed")
            if full and time.monotonic() - began_s > _FULL_S:
                raise DiskFullError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.cache_root))
            if time.monotonic() - began_s > self._give_up_after_s:
                raise self.in_use_error()
            if turn != self._claims.turn and not self._claims.is_awaited(number):
                raise AbsentError
            self._short.add(number)
            awaited_s = min(awaited_s, time.monotonic()) if self._claims.is_awaited(number) else math.inf
            if time.monotonic() - awaited_s > _WARNED_AFTER_S and not self._warned:
                self._warned = True
                _log.warning(
                    "%s: %s is reached, and all chunks in it are in use, by this process or others that share it: what "
                    "is needed now waits for room. Give the cache more: Remote(max_bytes=..., cache=...).",
                    self.cache_root.parent, self._cached.cache.bound,
                )  # fmt: skip
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def is_short_of(self, chunks: Iterable[int]) -> bool:
        """Whether any of these chunks waits for room, or a header."""
        return not (self._short.isdisjoint(chunks) and self._short.isdisjoint(self._headers))

    def in_use_error(self) -> CacheError:
        """Returns the error of a chunk for which there was no room for too long."""
        return CacheError(
            f"{self.cache_root.parent}: {self._cached.cache.bound} is reached, and all chunks in it have been in use "
            f"for {self._give_up_after_s:g} s. Give the cache more: Remote(max_bytes=..., cache=...), or clear what "
            f"other jobs left: `fastload cache clear`."
        )

    def _evict(self) -> bool:
        """Evicts one chunk that nobody uses, else something of another dataset; returns whether it did."""
        return self.evict_own() or evict_elsewhere(self._cached.cache, self.folder)

    def evict_own(self, *, announced: bool = False) -> bool:
        """Evicts one chunk of this dataset that nobody uses; returns whether it did.

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
        """Evicts one chunk that nobody uses, if this process may."""
        # Not chunks of a parent process that forked this one: its locks protect them.
        with suppress(CacheLostError):
            return self._claims.in_use and self.evict_own()
        return False

    def _evict_unless_used(self, victim: int, *, announced: bool) -> bool:
        """Evicts a chunk that neither this process nor another one holds; one that only waits to be held may go."""
        if not self._claims.claim(victim, announced=announced):
            return False
        done = False
        try:
            done = self._evict_chunk(victim)
        finally:
            self._claims.unclaim(victim, evicted=done)
        return done

    def _evict_chunk(self, number: int) -> bool:
        chunk = self._table.chunk(number)
        if not chunk.field:
            whole = [(0, int(self._cached.size(chunk.shard)) + mmap.PAGESIZE)]  # the last block is freed whole, too
            return self._cached.evict(number, chunk.shard, whole, [], self._table.data_of(chunk.shard))
        where = self._where(number)
        return where is not None and self._cached.evict(number, chunk.shard, *where)

    def _where(self, number: int) -> tuple[list[Range], list[tuple[int, Range]]] | None:
        """Returns the ranges of a chunk of a field, and those around it as `CachedDataset.evict` takes them.

        None: the index does not say it, and the header of the shard is not there.
        """
        chunk = self._table.chunk(number)
        if ranges := self._objects.ranges_by_index(chunk):
            return ranges, self._table.around(number, self._objects.ranges_by_index)
        with suppress(AbsentError), self._claims.header_there(chunk.shard):
            find = functools.partial(self._objects.ranges, cached=self._cached)
            return find(chunk), self._table.around(number, find)
        return None

    def give_back(self, number: int) -> None:
        """Frees what was allocated for a chunk of a field that did not come; its lock is held exclusively, and ends."""
        with suppress(OSError, RuntimeError):  # it was closed
            self._evict_chunk(number)

    def _choose_victims(self, *, announced: bool) -> deque[int]:
        """Returns chunks to evict, those first whose next use is farthest; headers last."""
        kept = self._cached.kept()
        kept = kept[~np.isin(kept, self._claims.busy(announced=announced))]
        shard, column, _ = self._table.placed(kept)
        data, headers = kept[column > 0], kept[column == 0]
        # Of a shard with chunks here its header says where they lie.
        spare = headers[~np.isin(shard[column == 0], shard[column > 0])]
        needed = self.needed(data) if self.needed is not None else np.random.default_rng().random(len(data))
        # Few of a small cache, where others are soon needed later than the last of many.
        order = np.argsort(-needed, kind="stable")[: max(1, min(_VICTIMS, len(data) // 16))]
        return deque([*data[order].tolist(), *spare[: _VICTIMS if not len(order) else 0].tolist()])


def evict_elsewhere(cache: CacheFolder, folder: Path | None = None) -> bool:
    """Evicts a dataset that nobody uses, or a chunk of one that this process uses, too; returns whether it did.

    Args:
        cache: to make room in.
        folder: of the dataset that the room is for.
    """
    with cache.locked():
        cache.count()
        if any(cache.remove(other) for other in cache.datasets() if other != folder):
            return True
    others = [one for one in list(_living) if one.folder != folder and one.cache_root == cache.root]
    return cache.shared and any(one.evict_for_another() for one in others)
