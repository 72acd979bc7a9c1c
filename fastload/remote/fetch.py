"""Fetches chunks into the cache of this machine, ahead of their use and at once where they are waited for.

    announced rows --chunks--> queue --threads: ranged GET, compared with digests, written, recorded--> held until used

A chunk that is announced or in use is held: this process has a shared lock on it, so that nobody evicts it. Threads of
the process count among themselves, and the last one that needs a chunk no more ends the lock.
"""

from __future__ import annotations

import atexit
import math
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fastload.errors import RemoteError
from fastload.remote.cache import CachedDataset, CacheLostError, digest_of
from fastload.remote.chunks import ChunkTable
from fastload.remote.room import AbsentError, Objects, Room
from fastload.system.files import read_bytes
from fastload.system.threads import run_as_batch

_EXTRA_THREADS = 1
"""One more thread for each so many requests in flight: they write and compare what has come meanwhile."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_CLOSE_S = 5.0
_STANDS_BACK_S = 1.0

_living: weakref.WeakSet[ChunkFetcher] = weakref.WeakSet()


def _end_threads() -> None:
    """Ends all threads: the interpreter aborts the process where one is in a request.

    At its exit, before others wait for threads that wait for chunks; so it is registered after them.
    """
    for fetcher in list(_living):
        if fetcher._pid == os.getpid():  # a fork has its parent's, whose locks may be held for ever there
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


class ChunkFetcher:
    """Holds chunks of a dataset, and fetches those that are not there. Any thread may call it; no forked child.

    Args:
        table: of the dataset's chunks.
        cached: their copies on this machine.
        objects: where they come from.
        threads: requests that may be in flight.
        most_held: chunks that are held because they were announced; more of them wait.
        give_up_after_s: for which a chunk waits for room in the cache.
    """

    def __init__(
        self,
        table: ChunkTable,
        cached: CachedDataset,
        objects: Objects,
        *,
        threads: int,
        most_held: int,
        give_up_after_s: float,
    ) -> None:
        self._table, self._cached, self._objects = table, cached, objects
        self._most_threads, self.most_held = threads + max(2, threads // _EXTRA_THREADS), most_held
        self._give_up_after_s, self._pid = give_up_after_s, os.getpid()
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # a chunk is ready, failed, or given up by a thread
        self._work_to_do = threading.Condition(lock)  # for the threads that fetch
        self._wanted: dict[int, int] = {}  # chunk -> how often it is
        self._held: dict[int, int] = {}  # chunk -> by how many it is held, or is to be, for reading
        self._awaited: dict[int, int] = {}  # chunk -> how many threads wait for it
        self._hurried: set[int] = set()  # that worker processes wait for
        self._ready: set[int] = set()  # with a shared lock
        self._fetching: set[int] = set()
        self._failed: dict[int, BaseException] = {}
        self._urgent: deque[int] = deque()
        self._announced: deque[int] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = self._left = False
        self.turn = 0  # how often this stood back for other processes; see `Room.make`
        self._counts = FetchCounts()
        self._fetched_before = np.zeros(table.num_chunks, np.bool_)
        self._evicting_held: set[int] = set()  # that were held, and are being evicted
        self.room = Room(table, cached, objects, self, give_up_after_s=give_up_after_s)
        _living.add(self)
        atexit.unregister(_end_threads)
        atexit.register(_end_threads)

    @property
    def counts(self) -> FetchCounts:
        """A copy of the counts."""
        with self._changed:
            return replace(self._counts)

    @property
    def is_fetching(self) -> bool:
        """Whether a thread is about to write to the copies."""
        return bool(self._fetching)

    @property
    def in_use(self) -> bool:
        """Whether it is of this process, and not closed."""
        return self._pid == os.getpid() and not self._closed

    def hold(self, chunks: Sequence[int]) -> None:
        """Returns when all of these chunks, each once, are there, and holds them until `release`.

        Raises the error of one that cannot be fetched; then none is held.
        """
        deadline_s = time.monotonic() + self._give_up_after_s
        while not self._hold(chunks):
            if time.monotonic() > deadline_s:
                raise self.room.in_use_error()
            time.sleep(_STANDS_BACK_S * random.uniform(0.2, 1.0))

    def _hold(self, chunks: Sequence[int]) -> bool:
        """Holds chunks as `hold`; False: none is held, as others wait for the room of some, and this for theirs."""
        with self._changed:
            if self._left:
                raise self._end_error()
            self._want(chunks)
            missing = [chunk for chunk in chunks if chunk not in self._ready and not self._take_if_there(chunk)]
            if not missing:
                return True
            for chunk in missing:
                self._failed.pop(chunk, None)  # it is tried again
                self._awaited[chunk] = self._awaited.get(chunk, 0) + 1
            since_s, there, patience_s = time.perf_counter(), -1, 0.0
            try:
                self._urgent.extend(chunk for chunk in missing if chunk not in self._fetching)
                self._start(len(missing))
                while not self._ready.issuperset(missing):
                    if error := next((self._failed[chunk] for chunk in missing if chunk in self._failed), None):
                        raise error
                    if self._closed:
                        raise self._end_error()
                    now_there = len(self._ready.intersection(missing))
                    if now_there != there or not self.room.is_short_of(missing):
                        there, patience_s = now_there, time.monotonic() + _STANDS_BACK_S * random.uniform(1.0, 2.0)
                    elif time.monotonic() > patience_s:
                        self._stand_back(chunks)
                        return False
                    self._changed.wait(_STANDS_BACK_S)
            except BaseException:
                self._release(chunks)
                raise
            finally:
                self._counts.waited_s += time.perf_counter() - since_s
                for chunk in missing:
                    self._awaited[chunk] -= 1
                    if not self._awaited[chunk]:
                        del self._awaited[chunk]
        return True

    def _stand_back(self, chunks: Sequence[int]) -> None:
        """Releases these chunks, and all that nobody reads: other processes wait for their room, too."""
        self._release(chunks)
        for chunk in self._ready - self._held.keys():
            self._ready.discard(chunk)
            self._cached.locks.unlock(chunk)
        self.turn += 1
        self.hold_less()

    def _want(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            self._wanted[chunk] = self._wanted.get(chunk, 0) + 1
            self._held[chunk] = self._held.get(chunk, 0) + 1

    @contextmanager
    def holding(self, chunks: Sequence[int]) -> Iterator[None]:
        """Within it these chunks are there; see `hold`."""
        self.hold(chunks)
        try:
            yield
        finally:
            self.release(chunks)

    def announce(self, chunks: Sequence[int]) -> None:
        """Has chunks fetched, in this order and as far ahead as there is room, and holds each until `withdraw`.

        Where the cache is full, one that is held by this alone makes room for a chunk that a thread waits for.
        """
        with self._changed:
            for chunk in chunks:
                self._wanted[chunk] = self._wanted.get(chunk, 0) + 1
            self._announced.extend(one for one in chunks if one not in self._ready and one not in self._fetching)
            self._take_announced()

    def hurry(self, chunks: Sequence[int]) -> None:
        """Fetches these of the announced chunks first, each once, as worker processes wait for them.

        To be called again and again; raises the error of one that could not be fetched since the first time.
        """
        with self._changed:
            for one in chunks:
                if one in self._failed and one in self._hurried:
                    raise self._failed[one]
                self._failed.pop(one, None)
            self._hurried = {one for one in chunks if one in self._wanted}
            missing = [one for one in chunks if one in self._hurried and one not in self._ready]
            missing = [one for one in missing if one not in self._fetching and one not in self._urgent]
            self._urgent.extend(missing)
            if missing:
                self._start(len(missing))

    def _take_announced(self) -> None:
        """Makes announced chunks ready that are in the cache; from the first one on that is not, threads go on."""
        while not self._closed and self._announced and len(self._ready) + len(self._fetching) < self.most_held:
            chunk = self._announced[0]
            known = chunk not in self._wanted or chunk in self._ready or chunk in self._fetching
            if not known and not self._take_if_there(chunk):
                self._start(min(len(self._announced), self.most_held - len(self._ready) - len(self._fetching)))
                return
            self._announced.popleft()

    def _take_if_there(self, chunk: int) -> bool:
        """Makes a chunk ready that is in the cache, and that neither another process nor a thread is about to fetch.

        Within the lock. Most chunks of later epochs are: no thread is woken for them.
        """
        try:
            if self._closed or chunk in self._fetching or not self._cached.presence(chunk).this_boot:
                return False
            if not self._cached.locks.try_shared(chunk):
                return False
            if not self._cached.presence(chunk).this_boot:  # before it was locked, it may have been evicted
                self._cached.locks.unlock(chunk)
                return False
        except CacheLostError:  # the thread that is to fetch it finds it, too
            return False
        self._ready.add(chunk)
        self._counts.hits += 1
        return True

    def withdraw(self, chunks: Sequence[int]) -> None:
        """Ends what `announce` began."""
        with self._changed:
            self._want_no_more(chunks)

    def release(self, chunks: Sequence[int]) -> None:
        """Ends what `hold` began."""
        with self._changed:
            self._release(chunks)

    def _release(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            self._held[chunk] -= 1
            if not self._held[chunk]:
                del self._held[chunk]
        self._want_no_more(chunks)

    def _want_no_more(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            left = self._wanted[chunk] - 1
            if left:
                self._wanted[chunk] = left
                continue
            del self._wanted[chunk]
            self._failed.pop(chunk, None)
            if chunk in self._ready:
                self._ready.discard(chunk)
                if not self._closed or self._left:
                    self._cached.locks.unlock(chunk)
        self._take_announced()  # others may be held now

    def _start(self, count: int) -> None:
        """Wakes threads for so many chunks, and starts some where too few are idle."""
        for _ in range(min(count - self._idle, self._most_threads - len(self._threads))):
            thread = threading.Thread(target=self._work, name=f"fastload-fetch-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._work_to_do.notify(count)

    def _work(self) -> None:
        """Fetches chunks until the fetcher is closed; the body of a thread."""
        run_as_batch()
        while True:
            with self._changed:
                self._idle += 1
                while (chunk := self._next()) is None and not self._closed:
                    self._work_to_do.wait()
                self._idle -= 1
                if chunk is None or self._closed:
                    return
                self._fetching.add(chunk)
            self._obtain(chunk)

    def _next(self) -> int | None:
        """Returns a chunk to fetch now: one that somebody waits for, or an announced one where there is room."""
        for some in (self._urgent, self._announced):
            while some:
                if some is self._announced and len(self._ready) + len(self._fetching) >= self.most_held:
                    return None
                chunk = some.popleft()
                if chunk in self._wanted and chunk not in self._ready and chunk not in self._fetching:
                    return chunk
        return None

    def _obtain(self, chunk: int, *, fetch: bool = True) -> None:
        """Makes a chunk ready, which this thread has among those being fetched; notes the error where that fails.

        Without `fetch` only one that is in the cache; else a thread that waits for it has it fetched.
        """
        error: BaseException | None = None
        try:
            self._bring(chunk, fetch=fetch)
        except AbsentError:
            with self._changed:
                self._fetching.discard(chunk)
                if chunk in self._awaited:
                    self._urgent.append(chunk)
                    self._start(1)
                self._changed.notify_all()  # others may wait for it in `_header`, and fetch it then
            return
        except BaseException as exc:  # noqa: BLE001  # whoever waits for the chunk has to hear of it
            error = exc
        with self._changed:
            self._fetching.discard(chunk)
            self._failed.pop(chunk, None)
            if error is None and chunk in self._wanted and not self._closed:
                self._ready.add(chunk)
            elif error is None and not self._closed:
                self._cached.locks.unlock(chunk)
            elif error is not None and chunk in self._wanted:
                self._failed[chunk] = error
            self._changed.notify_all()

    def _bring(self, chunk: int, *, fetch: bool) -> None:
        """Returns when a chunk is there and this process has a shared lock on it."""
        locks, pause_s = self._cached.locks, _FIRST_PAUSE_S
        deadline_s = time.monotonic() + self._give_up_after_s if _left_to_others else math.inf
        while not self._closed:
            if locks.try_shared(chunk):
                try:
                    if self._is_there(chunk):
                        with self._changed:
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
            if self._cached.is_lost({}):  # others fetch it into a new copy
                raise CacheLostError(self._cached.folder)
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise self._end_error()

    def _end_error(self) -> Exception:
        return CacheLostError(self._cached.folder) if self._left else RuntimeError("the dataset was closed")

    def _is_there(self, chunk: int) -> bool:
        """Whether a chunk that is locked can be used; one of an earlier boot of the machine is compared first."""
        presence = self._cached.presence(chunk)
        if not presence.complete or presence.this_boot:
            return presence.complete
        found = self._table.chunk(chunk)
        with self._header(found.shard) if found.field else nullcontext():
            ranges = self._objects.ranges(found, self._cached)
            with self._cached.opened(found.shard) as fd:
                parts = [read_bytes(fd, end - begin, begin) for begin, end in ranges]
        if not self._cached.digest_matches(chunk, parts):
            return False
        self._cached.complete(chunk, digest_of(parts))
        return True

    def _fetch(self, number: int) -> None:
        """Fetches a chunk that is locked exclusively."""
        chunk = self._table.chunk(number)
        if not chunk.field:
            parts = self._objects.fetch_header(chunk.shard)
            self.room.make(number, chunk.shard, [one for one, _ in parts])
        else:
            ranges = self._objects.ranges_by_index(chunk)
            if not ranges:
                with self._header(chunk.shard):
                    ranges = self._objects.ranges(chunk, self._cached)
            self.room.make(number, chunk.shard, ranges)
            try:
                parts = self._objects.fetch_chunk(chunk, ranges, self._cached, lambda: self._header(chunk.shard))
            except BaseException:
                self.room.give_back(number)
                raise
        self._cached.write(number, chunk.shard, parts)
        with self._changed:
            self._counts.chunks += 1
            self._counts.again += bool(self._fetched_before[number])
            self._fetched_before[number] = True
            self._counts.bytes += sum(end - begin for (begin, end), _ in parts)

    @contextmanager
    def _header(self, shard: int, *, fetch: bool = True) -> Iterator[None]:
        """Within it the header of a shard is there; made so by this thread, unless another one is about to.

        Without `fetch` it raises AbsentError where it would have to wait for that: whoever fetches the header may wait
        for room that only the caller can make.
        """
        header = int(self._table.headers[shard])
        with self._changed:
            if not fetch and header in self._fetching:
                raise AbsentError
            self._want([header])
            while header in self._fetching:
                self._changed.wait()
            mine = header not in self._ready
            if mine:
                self._fetching.add(header)
        try:
            if mine:
                self._obtain(header, fetch=fetch)
            with self._changed:
                if error := self._failed.get(header):
                    raise error
                if header not in self._ready:
                    raise AbsentError
            yield
        finally:
            self.release([header])

    # What `Room` asks for.

    def busy(self, *, announced: bool) -> NDArray[np.int64]:
        """Returns the chunks that are not to be evicted, int64 (n,); see `Claims`."""
        with self._changed:
            used = [*self._held, *self._hurried] if announced else self._ready
            return np.array([*used, *self._fetching], np.int64)

    def claim(self, victim: int, *, announced: bool) -> bool:
        """Keeps the threads of this process from a chunk, as locks do not; returns False where one uses it."""
        with self._changed:
            ready = victim in self._ready
            used = victim in self._held or victim in self._hurried or (ready and not announced)
            if used or victim in self._fetching:
                return False
            self._fetching.add(victim)
            if ready:
                self._ready.discard(victim)
                self._evicting_held.add(victim)
            return True

    def unclaim(self, victim: int, *, evicted: bool) -> None:
        """Releases a chunk that `claim` kept, and queues it again if a thread needs it."""
        with self._changed:
            ready = victim in self._evicting_held
            self._evicting_held.discard(victim)
            self._fetching.discard(victim)
            if ready and not evicted:  # another process holds it, too
                self._cached.locks.unlock(victim)
            if victim in self._awaited:
                self._urgent.append(victim)
                self._start(1)  # another dataset's thread may have evicted it, which fetches nothing here
            elif victim in self._wanted and not ready:  # announced meanwhile
                self._announced.appendleft(victim)
                self._start(1)
            self._changed.notify_all()

    def is_awaited(self, chunk: int) -> bool:
        """Whether a thread or a worker process waits for a chunk."""
        return chunk in self._awaited or chunk in self._hurried

    def hold_less(self) -> None:
        """Holds fewer chunks that were announced: there is less room than the bound says."""
        with self._changed:
            self.most_held = max(2, min(self.most_held, len(self._ready) // 2))

    @contextmanager
    def header_there(self, shard: int) -> Iterator[None]:
        """Within it the header of a shard is in the cache; LookupError where it is not."""
        with self._header(shard, fetch=False):
            yield

    def leave(self) -> None:
        """Ends fetches in progress, as another fetcher replaces this one; waiting threads get CacheLostError.

        What threads hold they keep until they release it.
        """
        with self._changed:
            self._closed = self._left = True
            for chunk in self._ready - self._held.keys():
                self._ready.discard(chunk)
                self._cached.locks.unlock(chunk)
            self._changed.notify_all()
            self._work_to_do.notify_all()

    def close(self) -> None:
        """Ends the threads, each with the chunk that it is at, and all locks of this process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._work_to_do.notify_all()
        deadline_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._cached.close()
