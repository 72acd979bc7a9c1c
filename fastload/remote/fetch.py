"""Fetches chunks into the cache of this machine, ahead of their use and at once where they are waited for.

    announced rows --chunks--> queue --threads: ranged GET, compared with digests, written, recorded--> held until used

A chunk that is announced or in use is held: this process has a shared lock on it, so that nobody evicts it. Threads of
the process count among themselves (`ChunksInUse`), and the last one that needs a chunk no more ends the lock.
`FetchQueue` says what is fetched next, and has the threads; `Obtainer` makes one chunk be there; `ChunkFetcher` is what
readers call.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import numpy as np

from fastload.errors import RemoteError
from fastload.remote.cache import CacheLostError
from fastload.remote.evictor import AbsentError, ChunksInUse, Evictor, count
from fastload.remote.source import ChunkSource
from fastload.remote.sparse_copies import CachedDataset
from fastload.system.threads import run_as_batch

_EXTRA_THREADS = 1
"""One more thread for each so many requests in flight: they write and compare what has come meanwhile."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_CLOSE_S = 5.0
_YIELDS_AFTER_S = 1.0

_living: weakref.WeakSet[ChunkFetcher] = weakref.WeakSet()


def _end_threads() -> None:
    """Ends all threads: the interpreter aborts the process where one is in a request.

    At its exit, before others wait for threads that wait for chunks; so it is registered after them.
    """
    for fetcher in list(_living):
        if fetcher.pid == os.getpid():  # a fork has its parent's, whose locks may be held for ever there
            fetcher.close()


_left_to_others = False


def leave_fetching_to_others() -> None:
    """Makes this process, a worker of a loader, wait for chunks that the training process fetches.

    A worker may be a fork, in which a client of an object store would hang; and one that fetches can be throttled.
    """
    global _left_to_others
    _left_to_others = True


def fetches_here() -> bool:
    """Whether this process makes requests itself."""
    return not _left_to_others


@dataclass
class FetchCounts:
    """Counts of a process's fetches for one dataset so far."""

    chunks: int = 0  # fetched
    again: int = 0  # of these, that were fetched and evicted before
    hits: int = 0  # found in the cache when they were needed or announced
    bytes: int = 0  # fetched
    waited_s: float = 0.0  # for which threads that read rows waited for chunks


class FetchQueue:
    """The chunks that are to be fetched, those first that somebody waits for, and the threads that fetch them.

    The caller holds the lock of `ChunksInUse`, but for `end`.

    Args:
        in_use: the chunks that this process needs.
        obtain: makes a chunk ready, or notes why it cannot be.
        take_if_there: makes a chunk ready that is in the cache; returns whether it did.
        most_threads: that are started.

    Attributes:
        owner: kept as long as there are threads, which it ends when the interpreter does.
    """

    owner: object = None

    def __init__(
        self,
        in_use: ChunksInUse,
        obtain: Callable[[int], None],
        take_if_there: Callable[[int], bool],
        most_threads: int,
    ) -> None:
        self._in_use, self._obtain, self._take_if_there = in_use, obtain, take_if_there
        self._most_threads = most_threads
        self.work_to_do = threading.Condition(in_use.lock)
        self._urgent, self._announced = deque[int](), deque[int]()
        self._threads, self._idle = list[threading.Thread](), 0

    def put_first(self, chunks: Sequence[int]) -> None:
        """Has chunks fetched before any other, as somebody waits for them."""
        queued = self._in_use.fetching.union(self._urgent)
        self._urgent.extend(one for one in chunks if one not in queued)
        self._start(len(chunks))

    def put(self, chunks: Iterable[int]) -> None:
        """Has chunks fetched after those that were put before, as far ahead as there is room."""
        ready, fetching = self._in_use.ready, self._in_use.fetching
        self._announced.extend([one for one in chunks if one not in ready and one not in fetching])
        self.advance()

    def again(self, chunk: int, waits: bool) -> None:
        """Has a chunk fetched that was evicted; `waits`: a thread does for it."""
        (self._urgent.append if waits else self._announced.appendleft)(chunk)
        self._start(1)

    def advance(self) -> None:
        """Makes announced chunks ready that are in the cache; from the first one on that is not, threads go on."""
        while (
            not self._in_use.is_over and self._announced and (more := self._in_use.most_held - _taken(self._in_use)) > 0
        ):
            chunk = self._announced[0]
            if chunk in self._in_use.wanted and not _is_known(self._in_use, chunk) and not self._take_if_there(chunk):
                self._start(min(len(self._announced), more))
                return
            self._announced.popleft()

    def _start(self, count: int) -> None:
        """Wakes threads for so many chunks, and starts some where too few are idle."""
        for _ in range(min(count - self._idle, self._most_threads - len(self._threads))):
            thread = threading.Thread(target=self._work, name=f"fastload-fetch-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self.work_to_do.notify(count)

    def _work(self) -> None:
        """Fetches chunks until it is over; the body of a thread."""
        run_as_batch()
        while True:
            with self._in_use.lock:
                self._idle += 1
                while (chunk := self._next()) is None and not self._in_use.is_over:
                    self.work_to_do.wait()
                self._idle -= 1
                if chunk is None or self._in_use.is_over:
                    return
                self._in_use.fetching.add(chunk)
            self._obtain(chunk)

    def _next(self) -> int | None:
        """Returns a chunk to fetch now: one that somebody waits for, or an announced one where there is room."""
        for some in (self._urgent, self._announced):
            while some and (some is self._urgent or _taken(self._in_use) < self._in_use.most_held):
                chunk = some.popleft()
                if chunk in self._in_use.wanted and not _is_known(self._in_use, chunk):
                    return chunk
        return None

    def end(self) -> bool:
        """Waits for the threads, which end as it is over, without the lock; returns whether all have ended."""
        deadline_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _is_known(in_use: ChunksInUse, chunk: int) -> bool:
    """Whether a chunk is there, or a thread is at it."""
    return chunk in in_use.ready or chunk in in_use.fetching


def _taken(in_use: ChunksInUse) -> int:
    """Returns how many chunks are."""
    return len(in_use.ready) + len(in_use.fetching)


class Obtainer:
    """Makes chunks be there, each locked: found in the cache, or fetched. Any thread may call it.

    Args:
        cached, source, give_up_after_s: as of `ChunkFetcher`.
        in_use: the chunks that this process needs.
        counts: of what it did.

    Attributes:
        evictor: makes room for what is fetched.
    """

    def __init__(
        self,
        cached: CachedDataset,
        source: ChunkSource,
        in_use: ChunksInUse,
        counts: FetchCounts,
        give_up_after_s: float,
    ) -> None:
        self._table, self._cached, self._source, self._in_use = cached.table, cached, source, in_use
        self._counts, self._give_up_after_s = counts, give_up_after_s
        header_there = functools.partial(self.header, fetch=False)
        self.evictor = Evictor(cached, source, in_use, header_there, give_up_after_s)
        self._fetched_before = np.zeros(cached.table.num_chunks, np.bool_)

    def take_if_there(self, chunk: int) -> bool:
        """Makes a chunk ready that is in the cache, and that neither another process nor a thread is about to fetch.

        Within the lock. Most chunks of later epochs are: no thread is woken for them.
        """
        in_use, cached = self._in_use, self._cached
        try:
            if in_use.is_over or chunk in in_use.fetching or not cached.presence(chunk).this_boot:
                return False
            if not cached.locks.try_shared(chunk):
                return False
            if not cached.presence(chunk).this_boot:  # before it was locked, it may have been evicted
                cached.locks.unlock(chunk)
                return False
        except CacheLostError:  # the thread that is to fetch it finds it, too
            return False
        in_use.ready.add(chunk)
        self._counts.hits += 1
        return True

    def obtain(self, chunk: int, *, fetch: bool = True) -> None:
        """Makes a chunk ready, which this thread has among those being fetched; notes the error where that fails.

        Without `fetch` only one that is in the cache; else a thread that waits for it has it fetched.
        """
        error: BaseException | None = None
        try:
            self._bring(chunk, fetch=fetch)
        except AbsentError:
            with self._in_use.lock:
                self._in_use.fetching.discard(chunk)
                if chunk in self._in_use.awaited:
                    self._in_use.again(chunk, True)
                self._in_use.changed.notify_all()  # others may wait for it in `header`, and fetch it then
            return
        except BaseException as exc:  # noqa: BLE001  # whoever waits for the chunk has to hear of it
            error = exc
        with self._in_use.lock:
            self._in_use.end(chunk, error)

    def _bring(self, chunk: int, *, fetch: bool) -> None:
        """Returns when a chunk is there and this process has a shared lock on it."""
        locks, pause_s = self._cached.locks, _FIRST_PAUSE_S
        deadline_s = time.monotonic() + self._give_up_after_s if _left_to_others else math.inf
        while not self._in_use.is_over:
            if locks.try_shared(chunk):
                try:
                    if self._is_there(chunk):
                        with self._in_use.lock:
                            self._counts.hits += 1
                        return
                    if not fetch:
                        raise AbsentError
                    if time.monotonic() > deadline_s:
                        raise RemoteError(
                            f"chunk {chunk} of {self._cached.folder} was not fetched by the training process within "
                            f"{self._give_up_after_s:g} s. Look there for the reason."
                        )
                    if not _left_to_others and locks.try_exclusive(chunk):
                        self._fetch(chunk)
                        locks.try_shared(chunk)
                        return
                except BaseException:
                    locks.unlock(chunk)
                    raise
                locks.unlock(chunk)  # two processes may want to fetch it, and each hinder the other
            elif not fetch:
                raise AbsentError
            if self._cached.copies.is_lost({}):  # others fetch it into a new copy
                raise CacheLostError(self._cached.folder)
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise self.end_error()

    def end_error(self) -> Exception:
        """Returns the error of who waits for a chunk when it is over."""
        return CacheLostError(self._cached.folder) if self._in_use.is_left else RuntimeError("the dataset was closed")

    def _is_there(self, chunk: int) -> bool:
        """Whether a chunk that is locked can be used; one of an earlier boot of the machine is compared first."""
        presence = self._cached.presence(chunk)
        if not presence.complete or presence.this_boot:
            return presence.complete
        found = self._table.chunk(chunk)
        with self.header(found.shard) if found.field else nullcontext():
            parts = self._cached.read(found.shard, self._source.ranges(found, self._cached))
        if not self._cached.records.fits(chunk, parts):
            return False
        self._cached.records.complete(chunk, parts)
        return True

    def _fetch(self, number: int) -> None:
        """Fetches a chunk that is locked exclusively."""
        chunk = self._table.chunk(number)
        if not chunk.field:
            parts = self._source.fetch_header(chunk.shard)
            self.evictor.allocate(number, chunk.shard, [one for one, _ in parts])
        else:
            ranges = self._source.ranges_by_index(chunk)
            if not ranges:
                with self.header(chunk.shard):
                    ranges = self._source.ranges(chunk, self._cached)
            self.evictor.allocate(number, chunk.shard, ranges)
            try:
                parts = self._source.fetch_chunk(chunk, ranges, self._cached, lambda: self.header(chunk.shard))
            except BaseException:
                with suppress(OSError, RuntimeError):  # it was closed
                    self.evictor.evict_chunk(number)  # which ends the lock
                raise
        self._cached.write(number, chunk.shard, parts)
        with self._in_use.lock:
            self._counts.chunks += 1
            self._counts.again += bool(self._fetched_before[number])
            self._fetched_before[number] = True
            self._counts.bytes += sum(end - begin for (begin, end), _ in parts)

    @contextmanager
    def header(self, shard: int, *, fetch: bool = True) -> Iterator[None]:
        """Within it the header of a shard is there; made so by this thread, unless another one is about to.

        Without `fetch` it raises AbsentError where it would have to wait for that: whoever fetches the header may wait
        for room that only the caller can make.
        """
        in_use, header = self._in_use, int(self._table.headers[shard])
        with in_use.lock:
            if not fetch and header in in_use.fetching:
                raise AbsentError
            in_use.want([header])
            while header in in_use.fetching:
                in_use.changed.wait()
            mine = header not in in_use.ready
            if mine:
                in_use.fetching.add(header)
        try:
            if mine:
                self.obtain(header, fetch=fetch)
            with in_use.lock:
                if error := in_use.failed.get(header):
                    raise error
                if header not in in_use.ready:
                    raise AbsentError
            yield
        finally:
            with in_use.lock:
                in_use.let_go([header], held=True)


class ChunkFetcher:
    """Holds chunks of a dataset, and fetches those that are not there. Any thread may call it; no forked child.

    Args:
        cached: the chunks of a dataset on this machine.
        source: where they come from.
        threads: requests that may be in flight.
        most_held: chunks that are held because they were announced; more of them wait.
        give_up_after_s: for which a chunk waits for room in the cache.

    Attributes:
        counts: of what was done so far.
        queue, evictor: what is fetched next, and what goes.
    """

    def __init__(
        self,
        cached: CachedDataset,
        source: ChunkSource,
        *,
        threads: int,
        most_held: int,
        give_up_after_s: float,
    ) -> None:
        self._cached, self._give_up_after_s, self.pid = cached, give_up_after_s, os.getpid()
        self.counts, self.in_use = FetchCounts(), ChunksInUse(cached.locks, most_held)
        self.obtainer = Obtainer(cached, source, self.in_use, self.counts, give_up_after_s)
        self.evictor = self.obtainer.evictor
        obtain, take = self.obtainer.obtain, self.obtainer.take_if_there
        self.queue = FetchQueue(self.in_use, obtain, take, threads + max(2, threads // _EXTRA_THREADS))
        self.queue.owner = self
        self.in_use.again, self.in_use.less = self.queue.again, self.queue.advance
        _living.add(self)
        atexit.unregister(_end_threads)
        atexit.register(_end_threads)

    @property
    def is_fetching(self) -> bool:
        """Whether a thread is about to write to the copies."""
        return bool(self.in_use.fetching)

    def hold(self, chunks: Sequence[int]) -> None:
        """Returns when all of these chunks, each once, are there, and holds them until `release`.

        Raises the error of one that cannot be fetched; then none is held.
        """
        deadline_s = time.monotonic() + self._give_up_after_s
        while not self._hold(chunks):
            if time.monotonic() > deadline_s:
                raise self.evictor.in_use_error()
            time.sleep(_YIELDS_AFTER_S * random.uniform(0.2, 1.0))

    def _hold(self, chunks: Sequence[int]) -> bool:
        """Holds chunks as `hold`; False: none is held, as others wait for the room of some, and this for theirs."""
        in_use = self.in_use
        with in_use.lock:
            if in_use.is_left:
                raise self.obtainer.end_error()
            in_use.want(chunks)
            missing = [one for one in chunks if one not in in_use.ready and not self.obtainer.take_if_there(one)]
            if not missing:
                return True
            since_s, there, patience_s = time.perf_counter(), -1, 0.0
            try:
                with in_use.awaiting(missing):
                    self.queue.put_first(missing)
                    while not in_use.ready.issuperset(missing):
                        if error := next((in_use.failed[one] for one in missing if one in in_use.failed), None):
                            raise error
                        if in_use.is_over:
                            raise self.obtainer.end_error()
                        now_there = len(in_use.ready.intersection(missing))
                        if now_there != there or not self.evictor.is_short_of(missing):
                            there, patience_s = now_there, time.monotonic() + _YIELDS_AFTER_S * random.uniform(1.0, 2.0)
                        elif time.monotonic() > patience_s:
                            in_use.yield_to_others(chunks)
                            return False
                        in_use.changed.wait(_YIELDS_AFTER_S)
            except BaseException:
                in_use.let_go(chunks, held=True)
                raise
            finally:
                self.counts.waited_s += time.perf_counter() - since_s
        return True

    def announce(self, chunks: Sequence[int]) -> None:
        """Has chunks fetched, in this order and as far ahead as there is room, and holds each until `withdraw`.

        Where the cache is full, one that is held by this alone makes room for a chunk that a thread waits for.
        """
        with self.in_use.lock:
            count(self.in_use.wanted, chunks)
            self.queue.put(chunks)

    def hurry(self, chunks: Sequence[int]) -> None:
        """Fetches these of the announced chunks first, each once, as worker processes wait for them.

        To be called again and again; raises the error of one that could not be fetched since the first time.
        """
        in_use = self.in_use
        with in_use.lock:
            for one in chunks:
                if one in in_use.failed and one in in_use.hurried:
                    raise in_use.failed[one]
                in_use.failed.pop(one, None)
            in_use.hurried = {one for one in chunks if one in in_use.wanted}
            if missing := [one for one in chunks if one in in_use.hurried and one not in in_use.ready]:
                self.queue.put_first(missing)

    def withdraw(self, chunks: Sequence[int]) -> None:
        """Ends what `announce` began."""
        with self.in_use.lock:
            self.in_use.let_go(chunks, held=False)

    def release(self, chunks: Sequence[int]) -> None:
        """Ends what `hold` began."""
        with self.in_use.lock:
            self.in_use.let_go(chunks, held=True)

    def leave(self) -> None:
        """Ends fetches in progress, as another fetcher replaces this one; waiting threads get CacheLostError.

        What threads hold they keep until they release it.
        """
        with self.in_use.lock:
            self.in_use.is_over = self.in_use.is_left = True
            self.in_use.unready(self.in_use.ready - self.in_use.held.keys())
            self.in_use.changed.notify_all()
            self.queue.work_to_do.notify_all()

    def close(self) -> None:
        """Ends the threads, each with the chunk that it is at, and all locks of this process."""
        with self.in_use.lock:
            self.in_use.is_over = True
            self.in_use.changed.notify_all()
            self.queue.work_to_do.notify_all()
        if self.queue.end():
            self._cached.close()
