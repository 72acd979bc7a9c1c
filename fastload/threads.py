"""The ring filled by threads: they read batches of a packed file ahead of their use. No torch here."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.plan import PlannedBatch
from fastload.ranges import span
from fastload.ring import FilledBatch, Ring, Slot, SlotField
from fastload.stopwatch import Stopwatch
from fastload.verdict import BatchWork

Fill = Callable[[PlannedBatch, Mapping[str, NDArray[Any]]], int]
Announce = Callable[[NDArray[np.int64]], None]


class _Order(NamedTuple):
    """What a worker is asked to do; the loose arrays are the batch's own, the others the slot's."""

    number: int
    planned: PlannedBatch
    slot: Slot
    loose: dict[str, NDArray[Any]]


class _Done(NamedTuple):
    """What a worker did: bytes copied, or why not; and what it cost, if that is measured."""

    number: int
    bytes_read: int
    error: BaseException | None
    work: BatchWork | None = None


class BatchStream:
    """Batches in the order planned, read ahead of their use by threads. An iterator for one thread; `close` ends it.

    Args:
        planned: batches to read, in order.
        fill: writes a batch into arrays (B, ...) by field and returns the bytes copied; any thread calls it.
        ring: the slots, for the fields that need one; nobody else takes from it meanwhile.
        loose: further fields, whose arrays are made anew for each batch.
        workers: threads, 1 or more.
        present: arrays as filled -> arrays as handed over, views or copies.
        announce: is told the rows of batches before they are read.
        ahead: batches announced beyond those that have a slot.
        manual_release: slots return by `FilledBatch.release`, not by reference counts, and are never copied.
        timed: whether batches say what they cost.
    """

    def __init__(
        self,
        planned: Iterator[PlannedBatch],
        fill: Fill,
        ring: Ring,
        *,
        workers: int,
        loose: Sequence[SlotField] = (),
        present: Callable[[dict[str, NDArray[Any]]], dict[str, NDArray[Any]]] | None = None,
        announce: Announce | None = None,
        ahead: int = 0,
        manual_release: bool = False,
        timed: bool = False,
    ) -> None:
        self._planned: Iterator[PlannedBatch] | None = planned
        self._ring = ring
        self._loose = tuple(loose)
        self._present = present or (lambda arrays: arrays)
        self._announce = announce
        self._ahead = ahead
        self._manual = manual_release
        self._coming: deque[PlannedBatch] = deque()  # announced, without a slot
        self._begun: deque[_Order] = deque()  # with a slot, in order; the first is handed over next
        self._done: dict[int, _Done] = {}
        self._number = 0
        self._stopped = False
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        self._pid = os.getpid()
        # The threads know the queues and not this object, so that it can be collected, and end them.
        self._threads: list[threading.Thread] = []
        for i in reversed(range(workers)):
            args = (self._orders, self._reports, fill, self._threads[0] if self._threads else None, timed)
            thread = threading.Thread(target=_work, args=args, name=f"fastload-worker-{i}", daemon=True)
            self._threads.insert(0, thread)
        self._begin()
        # The others are started by one another: a start waits for its thread, beside pure Python for 7 ms.
        self._threads[0].start()

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> FilledBatch:
        """The next batch; raises what a worker met when it read this one, with the worker's traceback."""
        try:
            self._begin()
            if not self._begun:
                assert self._planned is None and not self._coming, "no slot is left that could ever be filled"
                raise StopIteration
            while self._begun[0].number not in self._done:
                self._note(self._reports.get())
            return self._hand_over()
        except BaseException:
            self.close()
            raise

    def ready(self) -> bool:
        """Whether next() would give a batch without waiting."""
        while not self._reports.empty():
            self._note(self._reports.get())
        if not self._begun:
            return False
        done = self._done.get(self._begun[0].number)
        return done is not None and done.error is None

    def depth(self) -> int:
        """Batches that next() would give without waiting, one after the other."""
        self.ready()
        count = 0
        for order in self._begun:
            if order.number not in self._done:
                break
            count += 1
        return count

    def close(self) -> None:
        """Ends the threads and takes back every slot that is not lent. Returns when no thread writes any more."""
        self._planned = None
        self._coming.clear()
        if self._pid != os.getpid():
            return  # a forked child has neither the threads nor their promises
        self._drop_orders()
        self._stopped = False
        self._stop_workers()
        threads, self._threads = self._threads, []
        for thread in threads:
            if thread.ident is None:
                break  # never started, and so nor were those after it
            if thread is not threading.current_thread():
                thread.join()
        while self._begun:
            self._ring.give_back(self._begun.popleft().slot)
        self._done.clear()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # While the interpreter ends, daemon threads are already frozen and cannot be waited for, and globals are gone.
        if getattr(self, "_threads", None) and not _is_finalizing():
            self.close()

    def _begin(self) -> None:
        """Gives every free slot to a worker, and announces what comes after."""
        while (slot := self._ring.take()) is not None:
            planned = self._coming.popleft() if self._coming else self._plan_next()
            if planned is None:
                self._ring.give_back(slot)
                break
            loose = {field.name: np.empty(field.shape, field.dtype) for field in self._loose}
            order = _Order(self._number, planned, slot, loose)
            self._number += 1
            self._begun.append(order)
            self._orders.put(order)
        while len(self._coming) < self._ahead and (planned := self._plan_next()) is not None:
            self._coming.append(planned)
        if self._planned is None and not self._coming:
            # Told now, the threads are gone when the last batch is handed over, and nobody waits for them.
            self._stop_workers()

    def _plan_next(self) -> PlannedBatch | None:
        planned = next(self._planned, None) if self._planned is not None else None
        if planned is None:
            self._planned = None
        elif self._announce is not None:
            self._announce(planned.rows)
        return planned

    def _note(self, done: _Done) -> None:
        self._done[done.number] = done

    def _hand_over(self) -> FilledBatch:
        done = self._done[self._begun[0].number]
        if done.error is not None:
            raise done.error
        order = self._begun.popleft()
        del self._done[order.number]
        ring, slot = self._ring, order.slot
        if self._manual:
            arrays = self._present(slot.arrays | order.loose)
            return FilledBatch(arrays, order.planned, done.bytes_read, work=done.work, _ring=ring, _slot=slot)
        arrays = self._present(ring.lend_or_copy(slot) | order.loose)
        return FilledBatch(arrays, order.planned, done.bytes_read, work=done.work)

    def _stop_workers(self) -> None:
        if not self._stopped:
            self._stopped = True
            for _ in self._threads:
                self._orders.put(None)

    def _drop_orders(self) -> None:
        while True:
            try:
                self._orders.get_nowait()
            except queue.Empty:
                return


def _work(
    orders: queue.SimpleQueue[_Order | None],
    reports: queue.SimpleQueue[_Done],
    fill: Fill,
    following: threading.Thread | None,
    timed: bool,
) -> None:
    stopwatch = Stopwatch("reading", by_threads=True).start() if timed else None
    while (order := orders.get()) is not None:
        try:
            if stopwatch is not None:
                stopwatch.begin()
            with span("read"):
                num_bytes = fill(order.planned, order.slot.arrays | order.loose)
            done = _Done(order.number, num_bytes, None, stopwatch.end() if stopwatch is not None else None)
        except BaseException as error:  # noqa: BLE001  # whatever it is, the training loop has to hear of it
            done = _Done(order.number, 0, error)
        reports.put(done)
        del order, done
        if following is not None:
            following.start()
            following = None
