"""Batches in memory that is allocated once: a fixed set of slots, filled by threads, lent to the user, used again.

    free --worker--> filled --next()--> lent --last reference gone--> free

A batch belongs to the user for as long as any view of it lives: a slot that is referenced is never written to. The
user's loop variable still holds the last batch while the next is asked for; who keeps more than a few gets private
copies from then on, so that nobody ever waits for the user. No torch here.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.plan import PlannedBatch

SLACK = 3
"""Slots that users may hold: the batch being handed over, the last one, which the loop variable still has, and one."""

# From where on starting a thread pays.
_SPLIT_BYTES = 4 * 2**20

Allocate = Callable[[int], NDArray[np.uint8]]
Fill = Callable[[PlannedBatch, Mapping[str, NDArray[Any]]], int]
Announce = Callable[[NDArray[np.int64]], None]

_ALIGNMENT = 4096

# Arrays so small are made anew for each batch: labels that a user collects over an epoch must not hold slots.
LOOSE_BYTES = 64 * 2**10


class SlotField(NamedTuple):
    """What a slot holds of one field: an array of this shape, B first, and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class SampleForm(NamedTuple):
    """How the fields of a batch are put together for the user, where the dataset decides it and not the loader.

    Attributes:
        names: of all fields, in order, as ring and transforms know them.
        keys: of a dict, in the same order; None: a tuple.
    """

    names: tuple[str, ...]
    keys: tuple[Any, ...] | None


class _Loan:
    """A slot's memory, alive exactly as long as something refers to the batch in it.

    NumPy shortens chains of views to the array that they began with, so no array could tell; it stops at other objects.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__


class Slot:
    """Memory for one batch, and arrays (B, ...) over it by field, for whoever fills it."""

    __slots__ = ("arrays", "loan", "memory", "number")

    def __init__(self, number: int, memory: NDArray[np.uint8], arrays: dict[str, NDArray[Any]]) -> None:
        self.number = number
        self.memory = memory
        self.arrays = arrays  # the workers' views
        self.loan: weakref.ref[Any] | None = None


class Ring:
    """The slots. One thread takes and lends them; they come back from whatever thread drops the last reference.

    Args:
        fields: what a slot holds.
        num_slots: batches in memory.
        allocate: bytes -> uint8 array that begins on a cache line; by default ordinary memory.
    """

    def __init__(self, fields: Sequence[SlotField], num_slots: int, allocate: Allocate | None = None) -> None:
        self.fields = tuple(fields)
        self.slot_bytes = slot_bytes(self.fields)
        self.slots: list[Slot] = []
        for number in range(num_slots):
            memory = (allocate or allocate_aligned)(max(1, self.slot_bytes))
            self.slots.append(Slot(number, memory, slot_arrays(self.fields, memory)))
        self._free = deque(self.slots)
        # put() is reentrant: it may be called by the garbage collector in the middle of a get().
        self._returned: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.num_lent = 0

    def add(self, memory: NDArray[np.uint8]) -> None:
        """One more slot, free, over memory of `slot_bytes`; in place of one that cannot be given back."""
        self.slots.append(Slot(len(self.slots), memory, slot_arrays(self.fields, memory)))
        self._free.append(self.slots[-1])

    def take(self) -> Slot | None:
        """A slot that nobody refers to, or None."""
        self.collect()
        return self._free.popleft() if self._free else None

    def give_back(self, slot: Slot) -> None:
        """Returns a slot that nobody refers to any more."""
        # The most recently used first, since its memory is the most likely to be in a cache: up to 1.4 times the
        # images/s of taking the slots in turn (218x178x3, batch 256; it varied with the machine).
        self._free.appendleft(slot)

    def lend(self, slot: Slot) -> dict[str, NDArray[Any]]:
        """Arrays over a slot that was taken; it returns by itself when no reference to any of them is left."""
        loan = _Loan(slot.memory)
        put, number = self._returned.put, slot.number
        slot.loan = weakref.ref(loan, lambda _: put(number))
        self.num_lent += 1
        return slot_arrays(self.fields, np.asarray(loan))

    def lend_or_copy(self, slot: Slot) -> dict[str, NDArray[Any]]:
        """Arrays for the user: the slot's, or copies when they hold so many that filling would have to wait."""
        self.collect()
        if self.num_lent < min(SLACK, len(self.slots) - 1):
            return self.lend(slot)
        arrays = {name: private_copy(array) for name, array in slot.arrays.items()}
        self.give_back(slot)
        return arrays

    def collect(self) -> None:
        """Takes note of the slots that have come back."""
        while True:
            try:
                slot = self.slots[self._returned.get_nowait()]
            except queue.Empty:
                return
            slot.loan = None
            self.num_lent -= 1
            self.give_back(slot)


def slot_bytes(fields: Sequence[SlotField]) -> int:
    """Bytes of a slot that holds these fields, each from a page of its own."""
    return sum(_aligned(field.nbytes) for field in fields)


def slot_arrays(fields: Sequence[SlotField], memory: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """The fields as arrays over a slot's memory, uint8 (slot_bytes,)."""
    arrays, offset = {}, 0
    for field in fields:
        arrays[field.name] = np.ndarray(field.shape, field.dtype, buffer=memory, offset=offset)
        offset += _aligned(field.nbytes)
    return arrays


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def private_copy(array: NDArray[Any]) -> NDArray[Any]:
    """A C-contiguous copy in memory of its own; of a large array by two threads.

    What it costs is pages that the system has not given out yet, one fault each, and two threads fault side by side.
    """
    copy = np.empty(array.shape, array.dtype)
    half = len(array) // 2 if array.nbytes >= _SPLIT_BYTES else 0
    if not half:
        np.copyto(copy, array)
        return copy
    helper = threading.Thread(target=np.copyto, args=(copy[:half], array[:half]), name="fastload-copy")
    helper.start()
    np.copyto(copy[half:], array[half:])
    helper.join()
    return copy


def split_loose(fields: Sequence[SlotField]) -> tuple[list[SlotField], list[SlotField]]:
    """The fields that need a slot, and those so small that each batch has arrays of its own."""
    loose = [field for field in fields if field.nbytes <= LOOSE_BYTES]
    return [field for field in fields if field not in loose], loose


def allocate_aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Uninitialised memory that begins on a page: whole cache lines, and huge pages where the system gives them."""
    raw = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes]


@dataclass(eq=False)
class FilledBatch:
    """A batch as it leaves the ring.

    Attributes:
        arrays: field -> (B, ...); they keep the slot lent. With manual release they must not be used after `release`.
        planned: its rows and what the plan says about them.
        bytes_read: copied from the file.
        form: of the batch; None: the fields the loader was asked for, in that order.
        beside: fields that no array holds, such as lists of text; as they are handed over.
    """

    arrays: dict[str, NDArray[Any]]
    planned: PlannedBatch
    bytes_read: int
    form: SampleForm | None = None
    beside: Mapping[str, Any] = dataclass_field(default_factory=dict)
    _ring: Ring | None = None
    _slot: Slot | None = None

    def release(self) -> None:
        """Gives the slot back; only for streams with manual release, where nothing else does."""
        ring, slot = self._ring, self._slot
        self._ring = self._slot = None
        if ring is not None and slot is not None:
            ring.give_back(slot)


class _Order(NamedTuple):
    """What a worker is asked to do; the loose arrays are the batch's own, the others the slot's."""

    number: int
    planned: PlannedBatch
    slot: Slot
    loose: dict[str, NDArray[Any]]


class _Done(NamedTuple):
    """What a worker did: bytes copied, or why not."""

    number: int
    bytes_read: int
    error: BaseException | None


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
            args = (self._orders, self._reports, fill, self._threads[0] if self._threads else None)
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
            return FilledBatch(arrays, order.planned, done.bytes_read, _ring=ring, _slot=slot)
        return FilledBatch(self._present(ring.lend_or_copy(slot) | order.loose), order.planned, done.bytes_read)

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
) -> None:
    while (order := orders.get()) is not None:
        try:
            done = _Done(order.number, fill(order.planned, order.slot.arrays | order.loose), None)
        except BaseException as error:  # noqa: BLE001  # whatever it is, the training loop has to hear of it
            done = _Done(order.number, 0, error)
        reports.put(done)
        del order, done
        if following is not None:
            following.start()
            following = None
