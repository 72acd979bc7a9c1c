"""Has the chunks of coming batches fetched from a remote store, and says which chunks of the cache are needed last."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from fastload.errors import CacheError, FastloadError
from fastload.plan import ChunkWindow, EpochPlan
from fastload.read.remote_store import RemoteStore
from fastload.remote.cache import CacheLostError, DiskFullError
from fastload.remote.fetch import ChunkFetcher

_CLOSE_S = 10.0


class FetchAhead:
    """Announces the rows of coming batches, in order, and keeps the chunks of the last ones held.

    `announce` never waits: rows of varying length, whose chunks only the headers of their shards tell, are looked up by
    a thread of its own. Threads may share it.

    Args:
        store: opened for the fields that are read; closed with this.
        plan: of any whole epoch.
        local_ranks: the ranks that share the cache of this machine.
        kept: batches announced last whose chunks are held, since they may not have been read yet.
        most_held: chunks that are fetched before they are read.
    """

    def __init__(self, store: RemoteStore, plan: EpochPlan, local_ranks: range, *, kept: int, most_held: int) -> None:
        self._store, self._remote, self._kept = store, store.remote, kept
        # Only the headers of the shards say in which chunks rows of varying length lie.
        self._ragged = bool(store.file.ragged)
        self._use = _NextUse(store, plan, local_ranks)
        # Of the batches announced last, who holds which chunks, epoch and step: the first one may still be read.
        self._held: deque[tuple[ChunkFetcher, list[int], int, int]] = deque()
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[tuple[NDArray[np.int64], int, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._error: Exception | None = None  # of the order before
        self._remote.expect(most_held, self._use.steps_until)

    def announce(self, rows: NDArray[np.int64], epoch: int, step: int) -> None:
        """Announces rows of the index, int64 (B,), of a step of an epoch; calls come in the order of reading."""
        if not self._ragged:
            self._announce(rows, epoch, step)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fastload-fetch-ahead", daemon=True)
            self._thread.start()
        self._orders.put((rows, epoch, step))

    def _announce(self, rows: NDArray[np.int64], epoch: int, step: int) -> None:
        located = self._store.table.locate(rows)
        headers: list[int] = self._remote.table.headers[located.numbers].tolist()
        with self._store.holding(located, ()) if self._ragged else nullcontext():
            chunks = headers + self._store.chunks_of(located)
        with self._lock:
            if self._closed:
                return
            fetcher = self._remote.cache.current()
            self._held.append((fetcher, chunks, epoch, step))
            self._use.now = self._held[0][2:]
            fetcher.announce(chunks)
            self._announce_again(fetcher)
            while len(self._held) > self._kept:
                self._release_first()

    def hurry(self, places: Collection[tuple[int, int]]) -> None:
        """Fetches first what batches need that worker processes are asked for, by epoch and step.

        To be called again and again while this process waits for one.

        Raises:
            FastloadError, ...: the error of a chunk that cannot be fetched.
            CacheError: the disk is full; only this process could read what it fetches into its memory.
        """
        if self._remote.cache.is_lost():  # worker processes wait until it is made anew
            self._remote.cache.open_anew(self._remote.cache.current())
        fetcher = self._remote.cache.current()
        try:
            with self._lock:
                if not self._remote.cache.in_memory:
                    self._announce_again(fetcher)
                held = [chunks for by, chunks, *place in self._held if by is fetcher and tuple(place) in places]
            fetcher.hurry(list(dict.fromkeys(chain.from_iterable(held))))
            if self._remote.cache.in_memory:
                raise DiskFullError
            if len(held) < len(places) and (error := self._error) is not None:
                raise error
        except CacheLostError:
            self._remote.cache.open_anew(fetcher)
        except DiskFullError as exc:
            raise CacheError(
                f"{self._remote.url}: the disk of the cache is full, and worker processes read only from it. Make "
                f"room (`fastload cache clear` removes what no job uses), name another folder: Remote(cache=...), or "
                f"read without worker processes."
            ) from exc

    def _announce_again(self, fetcher: ChunkFetcher) -> None:
        """Announces to the fetcher what was announced to one whose place it took."""
        for at, (by, chunks, epoch, step) in enumerate(self._held):
            if by is not fetcher:
                by.withdraw(chunks)
                fetcher.announce(chunks)
                self._held[at] = (fetcher, chunks, epoch, step)

    def _release_first(self) -> None:
        fetcher, chunks, _, _ = self._held.popleft()
        fetcher.withdraw(chunks)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            if self._closed:
                continue
            try:
                self._announce(*order)
                self._error = None
            except (FastloadError, OSError, RuntimeError) as error:
                self._error = error  # reading goes on without it, and whoever reads the rows gets the error

    def close(self) -> None:
        """Ends the holding of chunks that were announced; a later call does nothing."""
        with self._lock:
            self._closed = True
            while self._held:
                self._release_first()
        if self._thread is not None:
            self._orders.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(_CLOSE_S)
                if self._thread.is_alive():
                    return  # it waits for a header, and uses the store
        self._store.close()


class _NextUse:
    """Says when the ranks of this machine need the chunks of a remote dataset next, by the plan. Threads share it.

    Attributes:
        now: epoch and step of the first batch that may still be read.
    """

    def __init__(self, store: RemoteStore, plan: EpochPlan, local_ranks: range) -> None:
        self.now = (plan.epoch, 0)
        self._table, self._shards, self._plan, self._local_ranks = (
            store.remote.table,
            store.file.shards,
            plan,
            local_ranks,
        )
        self._plans: dict[int, EpochPlan] = {}
        # In the order of shards, and of the rows there.
        self._pieces = np.lexsort((self._shards.first, self._shards.shard))

    def steps_until(self, chunks: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the steps until each chunk is needed next by a rank of this machine, inf for never: float64 (n,).

        Where any chunk may be needed at any time, a random number.
        """
        first, last = self._rows_of(chunks)
        found = self._needed(first)
        # A chunk of a shard may lie in two chunks of the plan, or more between which any will do.
        chunk_rows = max(1, self._plan.chunk_rows)
        if len(also := np.flatnonzero(first // chunk_rows != last // chunk_rows)):
            found[also] = np.minimum(found[also], self._needed(last[also]))
        return found

    def _needed(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the steps until the chunk of the plan that each row lies in is needed next, float64 (n,)."""
        epoch, step = self.now
        plan = self._plan_of(epoch)
        ranks, steps = plan.chunk_places(rows)
        window, chunk_rows = plan.shuffle, max(1, plan.chunk_rows)
        begun = window.chunks * chunk_rows // plan.batch_size + 1 if isinstance(window, ChunkWindow) else 1
        soon = self._is_here(ranks) & (steps > step - begun)
        found = np.where(soon, np.maximum(steps - step, 0), np.inf).astype(np.float64)
        later = np.flatnonzero(~soon & (ranks > -2))
        if len(later):
            ranks_then, steps_then = self._plan_of(epoch + 1).chunk_places(rows[later])
            then = plan.num_steps - step + steps_then
            found[later] = np.where(self._is_here(ranks_then), then, np.inf)
        anywhere = np.flatnonzero(ranks == -1)
        found[anywhere] = np.random.default_rng().random(len(anywhere))
        return found

    def _is_here(self, ranks: NDArray[np.int64]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (ranks >= self._local_ranks.start) & (ranks < self._local_ranks.stop)
        return found

    def _plan_of(self, epoch: int) -> EpochPlan:
        plans = self._plans  # several threads may evict, of two fetchers
        if (found := plans.get(epoch)) is None:
            found = replace(self._plan, epoch=epoch, segments=())
            self._plans = {number: plan for number, plan in plans.items() if number == epoch - 1} | {epoch: found}
        return found

    def _rows_of(self, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the first and the last row of the index in each chunk, of a ragged field near it: int64 (2, n)."""
        table, shards = self._table, self._shards
        shard, column, number = table.placed(chunks)
        there = np.zeros((2, len(chunks)), np.int64)
        for at, name in enumerate(table.fields):
            mine = np.flatnonzero(column == 1 + at)
            size = table.rows_near[name][shard[mine]]
            firsts = number[mine] * size
            there[:, mine] = np.minimum([firsts, firsts + size - 1], shards.num_rows[shard[mine]] - 1)
        order = self._pieces
        keys = shards.shard[order] * 2**40 + shards.first[order]
        piece = order[np.searchsorted(keys, shard * 2**40 + there, "right") - 1]
        found: NDArray[np.int64] = shards.begins[piece] + np.clip(
            there - shards.first[piece], 0, shards.rows[piece] - 1
        )
        return found
