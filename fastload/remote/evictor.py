"""Room for chunks in a full cache: `Evictor` removes those needed last, and waits where all are in use.

`ChunksInUse` says which chunks the threads of this process need, hold and fetch.
"""

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastload.errors import CacheError
from fastload.remote.cache import ByteLocks, CacheFolder, CacheLostError, DiskFullError
from fastload.remote.chunks import Range
from fastload.remote.source import ChunkSource
from fastload.remote.sparse_copies import CachedDataset


class ChunksInUse:
    """Who needs which chunk. What is ready has a shared lock, which ends when the last one lets go of it.

    Whoever reads or changes the attributes holds `lock`. `changed` is notified when a chunk is ready, failed, or given
    up by a thread.

    Args:
        locks: on chunks, of this process.
        most_held: chunks that are held because they were announced; more of them wait.

    Attributes:
        wanted: chunk -> by how many it is needed: announced, or held.
        held: chunk -> by how many it is, or is to be, for reading.
        awaited: chunk -> how many threads wait for it.
        hurried: chunks that worker processes wait for.
        ready, fetching, failed: that are there and locked; that a thread is at; that could not be fetched.
        turn: how often this process stood back for others.
        is_over: whether chunks are no longer fetched here; `is_left`: as they are elsewhere now.
        again: called with a chunk that is needed and was evicted, or was about to be; True: a thread waits for it.
        less: called when fewer chunks may be in use.
    """

    def __init__(self, locks: ByteLocks, most_held: int) -> None:
        self.lock, self._locks, self.most_held = threading.RLock(), locks, most_held
        self.changed = threading.Condition(self.lock)
        self.wanted, self.held, self.awaited = dict[int, int](), dict[int, int](), dict[int, int]()
        self.hurried, self.ready, self.fetching = set[int](), set[int](), set[int]()
        self.failed: dict[int, BaseException] = {}
        self._claimed_ready = set[int]()
        self.turn = 0
        self.is_over = self.is_left = False
        self.again: Callable[[int, bool], None] = lambda chunk, waits: None
        self.less: Callable[[], None] = lambda: None

    def want(self, chunks: Iterable[int]) -> None:
        """Needs chunks, and holds them."""
        count(self.wanted, chunks)
        count(self.held, chunks)

    def let_go(self, chunks: Iterable[int], *, held: bool) -> None:
        """Ends what `want` began; without `held`, what was announced."""
        if held:
            _count_less(self.held, chunks)
        for chunk in _count_less(self.wanted, chunks):
            self.failed.pop(chunk, None)
            if chunk in self.ready:
                self.unready([chunk])
        self.less()

    def unready(self, chunks: Iterable[int]) -> None:
        """Ends the locks on chunks that are ready."""
        for chunk in chunks:
            self.ready.discard(chunk)
            self._locks.unlock(chunk)

    def yield_to_others(self, chunks: Sequence[int]) -> None:
        """Releases chunks that are held, and all that nobody reads: other processes wait for their room, too."""
        self.let_go(chunks, held=True)
        self.unready(self.ready - self.held.keys())
        self.hold_less()
        self.turn += 1

    @contextmanager
    def awaiting(self, chunks: Sequence[int]) -> Iterator[None]:
        """Within it a thread waits for chunks, which are tried again if they failed before."""
        for chunk in chunks:
            self.failed.pop(chunk, None)
        count(self.awaited, chunks)
        try:
            yield
        finally:
            _count_less(self.awaited, chunks)

    def end(self, chunk: int, error: BaseException | None) -> None:
        """Notes that a thread is done with a chunk, which it has locked unless there was an error."""
        self.fetching.discard(chunk)
        self.failed.pop(chunk, None)
        if error is not None:
            if chunk in self.wanted:
                self.failed[chunk] = error
        elif chunk in self.wanted and not self.is_over:
            self.ready.add(chunk)
        elif not self.is_over:
            self._locks.unlock(chunk)
        self.changed.notify_all()

    # For who evicts, and holds no lock.

    def hold_less(self) -> None:
        """Holds fewer chunks that were announced: there is less room than the bound says."""
        with self.lock:
            self.most_held = max(2, min(self.most_held, len(self.ready) // 2))

    def claim(self, victim: int, *, announced: bool) -> bool:
        """Keeps the threads of this process from a chunk, as locks do not; returns False where one uses it."""
        with self.lock:
            ready = victim in self.ready
            used = victim in self.held or victim in self.hurried or (ready and not announced)
            if used or victim in self.fetching:
                return False
            self.fetching.add(victim)
            if ready:
                self.ready.discard(victim)
                self._claimed_ready.add(victim)
            return True

    def unclaim(self, victim: int, *, evicted: bool) -> None:
        """Releases a chunk that `claim` kept, and has it fetched if it is needed."""
        with self.lock:
            ready = victim in self._claimed_ready
            self._claimed_ready.discard(victim)
            self.fetching.discard(victim)
            if ready and not evicted:  # another process holds it, too
                self._locks.unlock(victim)
            if victim in self.awaited:  # another dataset's thread may have evicted it, which fetches nothing here
                self.again(victim, True)
            elif victim in self.wanted and not ready:  # announced meanwhile
                self.again(victim, False)
            self.changed.notify_all()


def _is_awaited(in_use: ChunksInUse, chunk: int) -> bool:
    """Whether a thread or a worker process waits for a chunk."""
    return chunk in in_use.awaited or chunk in in_use.hurried


def count(counts: dict[int, int], chunks: Iterable[int]) -> None:
    """Counts one more of each chunk."""
    for chunk in chunks:
        counts[chunk] = counts.get(chunk, 0) + 1


def _count_less(counts: dict[int, int], chunks: Iterable[int]) -> list[int]:
    """Counts one less of each chunk; returns those of which none is left."""
    gone = []
    for chunk in chunks:
        left = counts[chunk] - 1
        if left:
            counts[chunk] = left
        else:
            del counts[chunk]
            gone.append(chunk)
    return gone


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
    """Makes room for chunks of a dataset in the cache, and removes others for it. Any thread may call it.

    Args:
        cached, source, give_up_after_s: as of `ChunkFetcher`.
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
        give_up_after_s: float,
    ) -> None:
        self._table, self._cached, self._source, self._in_use = cached.table, cached, source, in_use
        self._header_there, self._give_up_after_s = header_there, give_up_after_s
        self.folder, self._pid = cached.folder, os.getpid()
        self._victims: deque[int] = deque()
        self._evicting = threading.Lock()
        self._short: set[int] = set()  # chunks that wait for room
        self._headers, self._warned = frozenset(cached.table.headers.tolist()), False
        self.needed: Needed | None = None
        _living.add(self)

    def allocate(self, number: int, shard: int, ranges: Sequence[Range]) -> None:
        """Allocates a chunk's ranges in its shard's copy; a full cache evicts the chunks needed last.

        Raises:
            DiskFullError: the disk is full, and nothing can be evicted.
            CacheError: all chunks in the cache have been in use for too long.
            AbsentError: nobody waits for the chunk, and this process stands back for others.
        """
        began_s, pause_s, full, awaited_s = time.monotonic(), _FIRST_PAUSE_S, False, math.inf
        in_use, turn, cache, root = self._in_use, self._in_use.turn, self._cached.cache, self.folder.parent
        try:
            while True:
                self._cached.records.begin(number)
                try:
                    with self._cached.copies.opened(shard) as fd:
                        if self._cached.bound.allocate(fd, ranges):
                            return
                except DiskFullError:
                    where = (ranges, []) if number in self._headers else self.place(number)
                    if where is not None:
                        self._cached.free(number, shard, *where)
                    if not full:
                        in_use.hold_less()
                    full = True
                if (
                    self.evict()
                    or (cache is not None and evict_elsewhere(cache, self.folder))
                    or (_is_awaited(in_use, number) and self.evict(announced=True))
                ):
                    continue
                if in_use.is_over:
                    raise RuntimeError("the dataset was closed")
                if full and time.monotonic() - began_s > _FULL_S:
                    raise DiskFullError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(root))
                if time.monotonic() - began_s > self._give_up_after_s:
                    raise self.in_use_error()
                if turn != in_use.turn and not _is_awaited(in_use, number):
                    raise AbsentError
                self._short.add(number)
                awaited_s = min(awaited_s, time.monotonic()) if _is_awaited(in_use, number) else math.inf
                if time.monotonic() - awaited_s > _WARNED_AFTER_S and not self._warned:
                    self._warned = True
                    _log.warning(
                        "%s: %s is reached, and all chunks in it are in use, by this process or others that share it: "
                        "what is needed now waits for room. Give the cache more: Remote(max_bytes=..., cache=...).",
                        root.parent, self._cached.bound,
                    )  # fmt: skip
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self._short.discard(number)

    def is_short_of(self, chunks: Iterable[int]) -> bool:
        """Whether any of these chunks waits for room, or a header."""
        return not (self._short.isdisjoint(chunks) and self._short.isdisjoint(self._headers))

    def in_use_error(self) -> CacheError:
        """Returns the error of a chunk for which there was no room for too long."""
        return CacheError(
            f"{self.folder.parent.parent}: {self._cached.bound} is reached, and all chunks in it have been in use "
            f"for {self._give_up_after_s:g} s. Give the cache more: Remote(max_bytes=..., cache=...), or clear what "
            f"other jobs left: `fastload cache clear`."
        )

    def evict(self, *, announced: bool = False) -> bool:
        """Evicts one chunk that nobody uses; returns whether it did.

        `announced`: one that is held only because it was announced.
        """
        with self._evicting:
            for fresh in (False, True):
                if fresh or announced:
                    self._victims = self._choose_victims(announced=announced)
                while self._victims:
                    victim, done = self._victims.popleft(), False
                    if not self._in_use.claim(victim, announced=announced):
                        continue
                    try:
                        done = self.evict_chunk(victim)
                    finally:
                        self._in_use.unclaim(victim, evicted=done)
                    if done:
                        return True
        return False

    def evict_for_another(self) -> bool:
        """Evicts one chunk that nobody uses, if this process may: not of a parent, whose locks protect them."""
        with suppress(CacheLostError):
            return self._pid == os.getpid() and not self._in_use.is_over and self.evict()
        return False

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
        """Returns chunks to evict, those first whose next use is farthest; headers last. `announced`: as of `evict`."""
        in_use, kept = self._in_use, self._cached.records.kept()
        with in_use.lock:
            used = [*in_use.held, *in_use.hurried] if announced else in_use.ready
            busy = np.array([*used, *in_use.fetching], np.int64)
        kept = kept[~np.isin(kept, busy)]
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
        cache.bound.count()
        if any(cache.remove(other) for other in cache.datasets() if other != folder):
            return True
    others = [one for one in list(_living) if one.folder != folder and one.folder.parent == cache.root]
    return any(one.evict_for_another() for one in others)
