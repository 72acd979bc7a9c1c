"""`ChunksInUse`: the chunks that the threads of this process need, hold and fetch, and the locks on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from fastload.remote.byte_locks import ByteLocks, NoLocks


class ChunksInUse:
    """Who needs which chunk. What is ready has a shared lock, which ends when the last one lets go of it.

    Whoever reads or changes the attributes holds `lock`. `changed` is notified when a chunk is ready, failed, or given
    up by a thread.

    Args:
        locks: on chunks, of this process.

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

    def __init__(self, locks: ByteLocks | NoLocks) -> None:
        self.lock, self._locks = threading.RLock(), locks
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

    def busy(self, *, announced: bool) -> NDArray[np.int64]:
        """Returns the chunks that are not to be evicted, int64 (n,); `announced`: those only announced may be."""
        with self.lock:
            used = [*self.held, *self.hurried] if announced else self.ready
            return np.array([*used, *self.fetching], np.int64)

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
