"""Batches of one pass, filled by threads that read a packed file ahead of their use. No torch here.

    planned batches --coalesce--> requests --threads fill slots of the ring--> results --split--> batches, in order

Small batches are filled several at a time into one slot, and handed over one by one: a batch of a few megabytes is
copied in less time than two threads need to wake each other, so that a thread that reads one batch at a time runs in
turn with the consumer and not at the same time (32x32x3, batches of 1024: 0.6 of a bare copy one at a time, 0.9
coalesced).
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.plan import PlannedBatch
from fastload.prefetch.ring import FilledBatch, Ring, Slot
from fastload.timing.ranges import span
from fastload.timing.results import BatchWork
from fastload.timing.stopwatch import Stopwatch

GROUP_BYTES = 12 * 2**20
"""Bytes that are filled at a time, about, where batches are smaller."""

Fill = Callable[[PlannedBatch, Mapping[str, NDArray[Any]]], int]
"""Writes a batch into arrays (B, ...) by field, and returns the bytes copied; any thread may call it."""

Present = Callable[[dict[str, NDArray[Any]]], dict[str, NDArray[Any]]]
"""Turns arrays as filled into arrays as handed over, views or copies."""


class Ahead(NamedTuple):
    """How coming rows are announced to the kernel.

    Attributes:
        announce: called with the rows of each batch, int64 (B,), before they are read.
        depth: requests announced beyond those that have a slot.
    """

    announce: Callable[[NDArray[np.int64]], None]
    depth: int


class _Planned(NamedTuple):
    """Batches that are filled at a time, and one of all their rows."""

    members: list[PlannedBatch]
    whole: PlannedBatch


class _Request(NamedTuple):
    """Batches that a thread is to fill a slot with."""

    number: int
    planned: _Planned
    slot: Slot


class _Result(NamedTuple):
    """The bytes copied into a batch, or the error that came instead; and what it cost, if that is measured."""

    number: int
    bytes_read: int
    error: BaseException | None
    work: BatchWork | None = None


class ThreadStream:
    """Batches in the order planned, filled ahead of their use by threads. An iterator for one thread; `close` ends it.

    Args:
        planned: batches of equal size to read, in order.
        fill: writes a batch; called by the threads.
        ring: the slots, each with room for `group` batches; nobody else takes from it meanwhile.
        workers: threads, 1 or more.
        group: batches that are filled at a time; see `group_size`. The last ones may be fewer.
        present: what becomes of the arrays when they are handed over; None: nothing.
        ahead: announces coming rows; None: nobody does.
        timed: whether batches say what they cost.

    Attributes:
        resources: closed with the stream.
    """

    def __init__(
        self,
        planned: Iterator[PlannedBatch],
        fill: Fill,
        ring: Ring,
        *,
        workers: int,
        group: int = 1,
        present: Present | None = None,
        ahead: Ahead | None = None,
        timed: bool = False,
    ) -> None:
        self.resources = ExitStack()
        self._planned: Iterator[PlannedBatch] | None = planned
        self._group = group
        self._ring = ring
        self._present = present
        self._ahead = ahead
        self._coming: deque[_Planned] = deque()  # announced, without a slot
        self._begun: deque[_Request] = deque()  # with a slot, in order; the first is handed over next
        self._done: dict[int, _Result] = {}
        self._split: deque[FilledBatch] = deque()  # left of the request that was taken last
        self._number = 0
        self._stopped = False
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._pid = os.getpid()
        # The threads know the queues and not this object, so that it can be collected, and end them.
        self._threads: list[threading.Thread] = []
        for i in reversed(range(workers)):
            following = self._threads[0] if self._threads else None
            args = (self._requests, self._results, fill, following, timed)
            thread = threading.Thread(target=_work, args=args, name=f"fastload-worker-{i}", daemon=True)
            self._threads.insert(0, thread)
        self._begin()
        # The others are started by one another: a start waits for its thread, with pure Python running for 7 ms.
        self._threads[0].start()

    def __iter__(self) -> ThreadStream:
        return self

    # No generator: its frame would keep the last batch alive, and its slot busy, while the user works on it.
    def __next__(self) -> FilledBatch:
        """Returns the next batch; raises the error of the thread that read it, with its traceback."""
        if self._split:
            return self._split.popleft()
        try:
            self._begin()
            if not self._begun:
                assert self._planned is None and not self._coming, "no slot is left that could ever be filled"
                raise StopIteration
            while self._begun[0].number not in self._done:
                self._take_result()
            return self._hand_over()
        except BaseException:
            self.close()
            raise

    def ready(self) -> bool:
        """Whether next() would return a batch without waiting."""
        while not self._results.empty():
            self._take_result()
        if self._split:
            return True
        if not self._begun:
            return False
        done = self._done.get(self._begun[0].number)
        return done is not None and done.error is None

    def depth(self) -> int:
        """Returns how many batches next() would give without waiting, one after the other."""
        self.ready()
        count = 0
        for request in self._begun:
            if request.number not in self._done:
                break
            count += 1
        return len(self._split) + self._group * count

    def close(self) -> None:
        """Ends the threads and takes back every slot that is not lent. Returns when no thread writes any more."""
        try:
            self._end()
        finally:
            self.resources.close()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # While the interpreter ends, daemon threads are already frozen and cannot be waited for, and globals are gone.
        if getattr(self, "_threads", None) and not _is_finalizing():
            self.close()

    def _end(self) -> None:
        self._planned = None
        self._coming.clear()
        if self._pid != os.getpid():
            return  # a forked child has neither the threads nor their results
        self._drop_requests()
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
        self._split.clear()

    def _begin(self) -> None:
        """Gives every free slot to a thread, and announces the requests after those."""
        for _ in range(self._ring.collect()):
            planned = self._coming.popleft() if self._coming else self._plan_next()
            if planned is None:
                break
            request = _Request(self._number, planned, self._ring.free.popleft())
            self._number += 1
            self._begun.append(request)
            self._requests.put(request)
        depth = self._ahead.depth if self._ahead is not None else 0
        while len(self._coming) < depth and (planned := self._plan_next()) is not None:
            self._coming.append(planned)
        if self._planned is None and not self._coming:
            # Asked to end now, the threads are gone when the last batch is handed over, and nobody waits for them.
            self._stop_workers()

    def _plan_next(self) -> _Planned | None:
        """Returns the batches of the next request, announced; None at the end."""
        members = list(islice(self._planned, self._group)) if self._planned is not None else []
        if not members:
            self._planned = None
            return None
        whole = coalesced(members)
        if self._ahead is not None:
            self._ahead.announce(whole.rows)
        return _Planned(members, whole)

    def _take_result(self) -> None:
        done = self._results.get()
        self._done[done.number] = done

    def _hand_over(self) -> FilledBatch:
        done = self._done[self._begun[0].number]
        if done.error is not None:
            raise done.error
        request = self._begun.popleft()
        del self._done[request.number]
        members, whole = request.planned
        batch = self._ring.hand_over(request.slot, whole, done.bytes_read, done.work)
        if self._present is not None:
            batch.arrays = self._present(batch.arrays)
        if self._group > 1:
            self._split.extend(split(batch, members))
            batch = self._split.popleft()
        return batch

    def _stop_workers(self) -> None:
        if not self._stopped:
            self._stopped = True
            for _ in self._threads:
                self._requests.put(None)

    def _drop_requests(self) -> None:
        while True:
            try:
                self._requests.get_nowait()
            except queue.Empty:
                return


def _work(
    requests: queue.SimpleQueue[_Request | None],
    results: queue.SimpleQueue[_Result],
    fill: Fill,
    following: threading.Thread | None,
    timed: bool,
) -> None:
    """Fills requested batches until None is requested; the body of a thread, which starts the following one."""
    stopwatch = Stopwatch("reading", by_threads=True).start() if timed else None
    while (request := requests.get()) is not None:
        try:
            if stopwatch is not None:
                stopwatch.begin()
            with span("read"):
                num_bytes = _filled(fill, request)
            done = _Result(request.number, num_bytes, None, stopwatch.end() if stopwatch is not None else None)
        except BaseException as error:  # noqa: BLE001  # whatever it is, the training loop has to hear of it
            done = _Result(request.number, 0, error)
        results.put(done)
        del request, done
        if following is not None:
            following.start()
            following = None


def _filled(fill: Fill, request: _Request) -> int:
    """Fills a request's arrays, with the plan's rows and valid flags where the slot has fields for them."""
    planned = request.planned.whole
    count = len(planned.rows)
    # The last request of a pass may not fill its slot.
    arrays = {name: array[:count] for name, array in request.slot.arrays.items()}
    if "row" in arrays:
        arrays["row"][:], arrays["valid"][:] = planned.rows, planned.valid
    return fill(planned, arrays)


def gathering(gather: Callable[[NDArray[np.int64], Mapping[str, NDArray[Any]]], int]) -> Fill:
    """Returns a `Fill` that only gathers a batch's rows, by a reader's `gather(rows, arrays) -> bytes copied`."""
    return lambda planned, arrays: gather(planned.rows, arrays)


def group_size(batch_bytes: int, num_steps: int) -> int:
    """Returns how many batches to fill at a time.

    About GROUP_BYTES, and an eighth of the epoch at most, so that reading stays ahead.
    """
    return max(1, min(GROUP_BYTES // max(1, batch_bytes), num_steps // 8))


def coalesced(members: Sequence[PlannedBatch]) -> PlannedBatch:
    """Returns one batch of all members' rows, in order; a single member as it is."""
    if len(members) == 1:
        return members[0]
    return PlannedBatch(
        rows=np.concatenate([batch.rows for batch in members]),
        valid=np.concatenate([batch.valid for batch in members]),
        global_valid=sum(batch.global_valid for batch in members),
        step=members[0].step,
    )


def split(group: FilledBatch, members: Sequence[PlannedBatch]) -> Iterator[FilledBatch]:
    """Yields the members of a coalesced batch, each with its part of the arrays.

    The slot returns when all parts are gone. All members but the last have equal sizes.
    """
    size, count = len(members[0].rows), len(members)
    work = group.work / count if group.work is not None else None
    for at, planned in enumerate(members):
        arrays = {name: array[at * size : (at + 1) * size] for name, array in group.arrays.items()}
        yield FilledBatch(arrays, planned, group.bytes_read // count, work=work)
