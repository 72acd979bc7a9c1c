"""Threads that plan batches and fill slots of the ring with them, or have them filled, for one stream after another."""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import operator
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastload.errors import DamagedRowError
from fastload.plan import PlannedBatch
from fastload.prefetch.ring import INNER, Ring, Slot
from fastload.system.threads import run_as_batch
from fastload.timing.probe import span
from fastload.timing.results import BatchWork
from fastload.timing.stopwatch import Stopwatch

T = TypeVar("T", NDArray[Any], list[Any])


class Group(NamedTuple):
    """Batches of one epoch that are filled at a time."""

    epoch: int
    members: list[PlannedBatch]
    whole: PlannedBatch  # of all their rows


Fill = Callable[[int, PlannedBatch, dict[str, Any]], int]
"""Writes a batch of an epoch into arrays (B, ...) by field, and returns the bytes copied; any thread may call it.

Keys that it adds to the dict, such as lists, which no array of the slot can hold, are passed along with the batch."""

WORDS = f"{INNER}words"
"""The field of a slot, int32, that the numbers of transforms are written to; see `Pipeline.draw`."""

Draw = Callable[[int, PlannedBatch, NDArray[np.int32]], Any]
"""Draws the transforms' numbers for a batch of an epoch, and writes what the device needs of them to the words."""


Texts = Callable[[PlannedBatch], dict[str, list[Any]]]
"""Reads the texts of a batch, by field; called after `Fill`."""

ReplaceDamaged = Callable[[PlannedBatch, Collection[int]], PlannedBatch | None]
"""Returns a batch with damaged rows replaced by others of it; None: none is left. See `PlannedBatch.without`."""


Present = Callable[[dict[str, NDArray[Any]]], dict[str, NDArray[Any]]]
"""Turns arrays as filled into arrays as handed over, views or copies."""

Tensors = Callable[[dict[str, NDArray[Any]]], dict[str, Any]]
"""Makes tensors of arrays, over the same memory."""


class Ready(NamedTuple):
    """A slot that was filled, as it is handed over, made by the thread that filled it."""

    lent: dict[str, NDArray[Any]]  # by `Ring.lend`; they keep the slot lent, also where the parts are copies
    # For each batch of its group, its arrays as handed over, and the same as tensors.
    parts: list[tuple[dict[str, NDArray[Any]], dict[str, Any] | None]]


@dataclass(eq=False)
class Request:
    """A slot that a thread is to fill with the next batches that are planned, and what came of it."""

    coming: Iterator[Group]  # asked for by one thread at a time, in the order of the requests
    slot: Slot
    fill: Callable[[Any, Group, int | None], None]  # is given the request, what was planned, and which part; None: all
    done_one: queue.SimpleQueue[None]  # wakes who waits; not the request itself, which would keep file and slot alive
    draw: Draw | None = None  # None: nothing is drawn beforehand
    make_ready: Callable[[Slot, Group], Ready] | None = None  # None: who takes the batch does it
    read_texts: Texts | None = None  # None: there are none
    ready: Ready | None = None
    group: Group | None = None  # None: not planned yet, or there are no more
    drawn: Any = None
    copied: list[int] = field(default_factory=list)  # bytes that the parts copied into the slot
    extra: dict[str, Any] = field(default_factory=dict)  # its values outside the slot's arrays
    texts: dict[str, list[Any]] = field(default_factory=dict)
    works: list[BatchWork] = field(default_factory=list)  # what the parts cost, if that is measured
    error: BaseException | None = None  # came instead
    thread: int | None = None  # that has it, by its number; the last one of several
    done: bool = False  # whether no thread will write to the slot any more
    parts: int = 1  # in which its rows are filled, each by a thread
    begun_parts: int = 0
    failed: bool = False  # whether a part could not be filled, so that the whole is filled anew, for its error
    _left: list[None] = field(default_factory=list)  # of parts that are not ended, one each

    def __post_init__(self) -> None:
        self._left = [None] * (self.parts - 1)

    @property
    def bytes_read(self) -> int:
        """The bytes copied into the slot."""
        return sum(self.copied)

    @property
    def work(self) -> BatchWork | None:
        """The cost of filling it; None: it was not measured."""
        return functools.reduce(operator.add, self.works) if self.works else None

    def last_part(self) -> bool:
        """Ends a part; returns whether it was the last one. By one call of a list, which no thread comes between."""
        try:
            self._left.pop()
        except IndexError:
            return True
        return False

    def finish(self) -> None:
        """Says that it is done. Set before it is queued: Ctrl-C may lose what a queue gives, and never that."""
        self.done = True
        self.done_one.put(None)


# The interpreter ends daemon threads where they are, and one that is in a call of torch then aborts the process.
_living: weakref.WeakSet[FillThreads] = weakref.WeakSet()
# A thread that hangs cannot be ended.
_CLOSE_S = 10.0

_log = logging.getLogger("fastload")


@atexit.register
def _end_threads() -> None:
    """Lets all threads finish their current batch, unless that takes too long."""
    for threads in list(_living):
        for request in threads.drop():
            # So that a later exit handler may close the stream, and nobody takes the slots for filled.
            request.error = RuntimeError("the interpreter is ending: no more batches are read")
            request.finish()
        threads.close()


class FillThreads:
    """Threads that fill slots, for one stream after another; they start with the first request.

    Attributes:
        number: of threads.
        timed: whether they measure what a batch costs.
        left_behind: True after one of them hung: they may write to their slots at any time, which are not used again.
    """

    def __init__(self, number: int, *, timed: bool = False) -> None:
        self.number = number
        self.timed = timed
        self.left_behind = False
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()
        _living.add(self)

    def put(self, request: Request) -> None:
        """Lets a thread fill a slot, or several, a part each."""
        for _ in range(request.parts):
            self._requests.put(request)
        if self._threads:
            return
        # The threads know the queue and not this object, so that it can be collected, and end them.
        turn = threading.Lock()
        for i in reversed(range(self.number)):
            following = self._threads[0] if self._threads else None
            arguments = (self._requests, turn, following, self.timed)
            thread = threading.Thread(target=_work, args=arguments, name=f"fastload-worker-{i}", daemon=True)
            self._threads.insert(0, thread)
        # The others are started by one another: a start waits for its thread, with pure Python running for 7 ms.
        self._threads[0].start()

    def drop(self) -> list[Request]:
        """Takes back the requests, or parts of them, that no thread has begun; returns those that none is at."""
        dropped: list[Request] = []
        with suppress(queue.Empty):
            while True:
                if (request := self._requests.get_nowait()) is None:
                    continue
                if request.parts > 1:
                    request.error = RuntimeError("the batch was taken back before all of it was read")
                if request.last_part():
                    dropped.append(request)
        return dropped

    def may_wait(self) -> bool:
        """Whether the caller may wait for the threads: it is none of them, where garbage collection may run."""
        return not self.left_behind and threading.current_thread() not in self._threads

    def settle(self, begun: Collection[Request], done_one: queue.SimpleQueue[None]) -> bool:
        """Waits until all of a stream's requests are done, and returns whether that is so.

        False: they are left behind, or the caller may not wait.
        """
        end_s = time.monotonic() + _CLOSE_S
        while self.may_wait() and not all(request.done for request in begun):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                self._leave_behind()
            with suppress(queue.Empty):
                done_one.get(timeout=max(0.0, left_s))
        return self.may_wait()

    def close_resources(self, resources: ExitStack) -> None:
        """Closes what a stream used; the disk that a thread was left behind with may hold that up, so nobody waits."""
        if self.left_behind:
            threading.Thread(target=resources.close, name="fastload-close", daemon=True).start()
        else:
            resources.close()

    def _leave_behind(self) -> None:
        self.left_behind = True
        _log.warning("a thread of a loader that was closed did not finish its batch in %.0f s and is left", _CLOSE_S)

    def close(self) -> None:
        """Ends the threads. Returns when none is left, or some seconds later; requests put later start new ones."""
        may_wait, threads, self._threads = self.may_wait(), self._threads, []
        if self._pid != os.getpid():  # a forked child has none of them
            return
        for _ in threads:
            self._requests.put(None)
        end_s = time.monotonic() + _CLOSE_S
        for thread in threads:
            if may_wait and thread.ident is not None:
                thread.join(max(0.0, end_s - time.monotonic()))
        if may_wait and any(thread.is_alive() for thread in threads):
            self._leave_behind()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # While the interpreter ends, daemon threads are already frozen and cannot be waited for, and globals are gone.
        if getattr(self, "_threads", None) and not _is_finalizing():
            self.close()


def _work(
    requests: queue.SimpleQueue[Request | None], turn: threading.Lock, following: threading.Thread | None, timed: bool
) -> None:
    """Fills requested slots until None is requested; the body of a thread, which starts the following one."""
    run_as_batch()
    stopwatch = Stopwatch("reading", by_threads=True).start() if timed else None
    while (taken := _planned(requests, turn)) is not None:
        request, part = taken
        if following is not None and request.parts > 1:
            following.start()
            following = None
        if request.parts > 1 and _measured(request, stopwatch, functools.partial(_fill_part, request, part)):
            request.failed = True  # for an error that comes again when the whole is filled
        if request.last_part():
            request.error = request.error or _measured(request, stopwatch, functools.partial(_complete, request))
            request.finish()
        del request, taken
        if following is not None:
            following.start()
            following = None


def _measured(request: Request, stopwatch: Stopwatch | None, work: Callable[[], None]) -> BaseException | None:
    """Does some of a request's work, and notes what it cost; returns the error that came of it."""
    try:
        if stopwatch is not None:
            stopwatch.begin()
        work()
        if stopwatch is not None:
            request.works.append(stopwatch.end())
    except BaseException as error:  # noqa: BLE001  # whatever it is, the training loop has to hear of it
        return error
    return None


def _fill_part(request: Request, part: int) -> None:
    if request.group is not None:
        request.fill(request, request.group, part)


def _complete(request: Request) -> None:
    """Fills what the parts have not, draws the transforms' numbers, and makes the arrays ready."""
    if request.group is None:
        return
    if request.parts == 1 or request.failed:
        request.copied.clear()
        request.fill(request, request.group, None)
    if request.read_texts is not None:
        with span("read"):
            request.texts = request.read_texts(request.group.whole)
    if request.draw is not None:
        with span("draw"):
            request.drawn = request.draw(request.group.epoch, request.group.whole, request.slot.arrays[WORDS])
    if request.make_ready is not None:
        request.ready = request.make_ready(request.slot, request.group)


def _planned(requests: queue.SimpleQueue[Request | None], turn: threading.Lock) -> tuple[Request, int] | None:
    """Returns the next request, with its batches, and which part of it; the training thread need not plan them."""
    with turn:
        request = requests.get()
        if request is None:
            return None
        request.thread = threading.get_ident()
        part, request.begun_parts = request.begun_parts, request.begun_parts + 1
        if part == 0:
            try:
                request.group = next(request.coming, None)
            except BaseException as error:  # noqa: BLE001  # as in `_measured`
                request.error = error
    return request, part


def fill_slot(
    fill: Fill, replace_damaged: ReplaceDamaged | None, request: Request, group: Group, part: int | None
) -> None:
    """Fills the slot of a request with a group of batches, anew if rows of them are damaged and to be replaced.

    With a part: only so much of it, and damaged rows are an error.
    """
    if part is not None:
        first, end = np.linspace(0, len(group.whole.rows), request.parts + 1).astype(int).tolist()[part : part + 2]
        if first < end:  # a batch of one row has no more parts
            _fill_slot(fill, request, group, slice(first, end))
        return
    while True:
        try:
            _fill_slot(fill, request, group, slice(0, len(group.whole.rows)))
            return
        except DamagedRowError as error:
            found = [replace_damaged(member, error.rows) for member in group.members] if replace_damaged else []
            members = [member for member in found if member is not None]
            if len(members) < len(group.members) or all(map(operator.is_, members, group.members)):
                raise
            request.group = group = joined(group.epoch, members)


def joined(epoch: int, members: list[PlannedBatch]) -> Group:
    """Returns batches of an epoch as a group."""
    if len(members) == 1:
        return Group(epoch, members, members[0])
    known = [batch.times is not None for batch in members]
    whole = PlannedBatch(
        rows=np.concatenate([batch.rows for batch in members]),
        valid=np.concatenate([batch.valid for batch in members]),
        global_valid=sum(batch.global_valid for batch in members),
        step=members[0].step,
        times=None
        if not any(known)
        else np.concatenate(
            [np.zeros(len(batch.rows), np.int64) if batch.times is None else batch.times for batch in members]
        ),
    )
    return Group(epoch, members, whole)


def made_ready(ring: Ring, present: Present | None, tensors: Tensors, slot: Slot, group: Group) -> Ready:
    """Returns the arrays of a slot that was filled, as they are handed over, and as tensors.

    For the thread that filled it: the training loop has nothing of this in its core's caches after a step, and would
    take 0.2 ms for it.
    """
    try:
        lent = ring.lend(slot)
        arrays = present(lent) if present is not None else lent
        return Ready(lent, [(part, tensors(part)) for part in split(arrays, group)])
    except BaseException:
        slot.loan = None  # it was not lent
        raise


def split(arrays: dict[str, T], group: Group) -> list[dict[str, T]]:
    """Returns the part of the arrays, or lists, that belongs to each batch of a group; they may have room for more."""
    ends = list(itertools.accumulate((len(member.rows) for member in group.members), initial=0))
    if len(ends) == 2 and all(len(array) == ends[1] for array in arrays.values()):
        return [arrays]
    pairs = itertools.pairwise(ends)
    return [{name: array[first:end] for name, array in arrays.items()} for first, end in pairs]


def _fill_slot(fill: Fill, request: Request, group: Group, some: slice) -> None:
    planned = group.whole
    if some != slice(0, len(planned.rows)):
        planned = planned.part(some)
    with span("read"):
        # The last batch of an epoch may not fill its slot.
        arrays = {name: array[some] for name, array in request.slot.arrays.items() if name != WORDS}
        if "row" in arrays:
            arrays["row"][:], arrays["valid"][:] = planned.rows, planned.valid
        request.copied.append(fill(group.epoch, planned, arrays))
        request.extra |= {name: arrays[name] for name in arrays.keys() - request.slot.arrays.keys()}
