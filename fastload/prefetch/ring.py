"""A ring of batch slots: memory that is allocated once, filled, lent to the user, and used again.

    free --worker--> filled --next()--> lent --last reference gone--> free

A batch belongs to the user for as long as any view of it lives: a slot that is referenced is never written to. The
user's loop variable still refers to the last batch while the next is asked for; who keeps more than a few gets private
copies from then on, so that nobody ever waits for the user. No torch here.
"""

from __future__ import annotations

import functools
import math
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SLACK = 3
"""Slots that the user may hold: the batch being handed over, the last one, which the loop variable has, and one."""

SLOTS_IN_COPY = 2
"""Slots that are kept while their copies to a device run."""

# From where on starting a thread pays.
_SPLIT_BYTES = 4 * 2**20

_ALIGNMENT = 4096
_SMALL_ALIGNMENT = 64  # of small arrays, which share pages

SMALL_BYTES = 64 * 2**10
"""Arrays so small are copied when they are lent: labels that a user collects over an epoch must not keep slots."""

INNER = "fastload/"
"""Prefix of the names of fields that stay within the loader; no field of a file can have such a name."""


class SlotField(NamedTuple):
    """The array of one field in a slot, B first in its shape."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def small(self) -> bool:
        """Whether it lies with others at the end of a slot: small, and neither images nor the loader's own."""
        return self.nbytes <= SMALL_BYTES and self.name != "images" and not self.name.startswith(INNER)


class SampleForm(NamedTuple):
    """The structure of batches for the user, where the dataset's samples decide it."""

    names: tuple[str, ...]  # of all fields, in order, as ring and transforms know them
    keys: tuple[Any, ...] | None  # of a dict, in the same order; None: a tuple


class _Loan:
    """Owns a slot's memory on behalf of a batch: alive exactly as long as something refers to the batch.

    NumPy shortens chains of views to the array that they began with, so an array could not do it; it stops at other
    objects.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__


@dataclass(slots=True, eq=False)
class Slot:
    """Memory for one batch."""

    number: int
    memory: NDArray[np.uint8]
    arrays: dict[str, NDArray[Any]]  # over the memory, (B, ...) by field, for the worker that fills it
    loan: weakref.ref[Any] | None = None


class Ring:
    """A set of slots. One thread takes and lends them; they come back from whatever thread drops the last reference.

    `pin` is called with the memory of each slot before it is used. With `manual_release` slots come back by
    `give_back`, not by reference counts, and are never lent: for batches that go to a device.
    """

    def __init__(
        self,
        fields: Sequence[SlotField],
        num_slots: int,
        pin: Callable[[NDArray[np.uint8]], object] | None = None,
        *,
        manual_release: bool = False,
    ) -> None:
        self.fields = tuple(fields)
        self.manual_release = manual_release
        # Laid out once, and not for each batch.
        offsets, self.slot_bytes = _offsets(self.fields)
        self._places = [(*field, offsets[field.name], field.nbytes <= SMALL_BYTES) for field in self.fields]
        self._all_small = all(field.nbytes <= SMALL_BYTES for field in self.fields)
        self.slots: list[Slot] = []
        self._pin = pin
        self.free: deque[Slot] = deque()  # those that nobody refers to, as far as `collect` knows; the first is next
        for _ in range(num_slots):
            self.add(allocate_aligned(max(1, self.slot_bytes)))
        # put() is reentrant: it may be called by the garbage collector in the middle of a get().
        self._returned: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.num_lent = 0

    def add(self, memory: NDArray[np.uint8]) -> None:
        """Adds a free slot over memory of `slot_bytes`."""
        if self._pin is not None:
            self._pin(memory)
        self.slots.append(Slot(len(self.slots), memory, slot_arrays(self.fields, memory)))
        self.free.append(self.slots[-1])

    def take(self) -> Slot | None:
        """Returns a slot that nobody refers to, or None."""
        self.collect()
        return self.free.popleft() if self.free else None

    def give_back(self, slot: Slot) -> None:
        """Returns a slot that nobody refers to, except by arrays of `lend` that were not handed over."""
        slot.loan = None  # the end of those arrays means nothing
        # The most recently used first, since its memory is the most likely to be in a cache: up to 1.4 times the
        # images/s of taking the slots in turn (218x178x3, batch 256; it varied with the machine).
        self.free.appendleft(slot)

    def lend(self, slot: Slot) -> dict[str, NDArray[Any]]:
        """Returns arrays over a slot that was taken; it comes back when no reference to any of them is left.

        Any thread may call it, ahead of `hand_over`. If all are small they are copies, and nothing is lent.
        """
        if self._all_small:
            return {name: array.copy() for name, array in slot.arrays.items()}
        loan = _Loan(slot.memory)
        put, number = self._returned.put, slot.number
        # No Python code runs in the callback (put takes the reference for `block`): Ctrl-C cannot get lost in it.
        slot.loan = weakref.ref(loan, functools.partial(put, number))
        memory = np.asarray(loan)
        arrays: dict[str, NDArray[Any]] = {}
        for name, shape, dtype, offset, copied in self._places:
            array: NDArray[Any] = np.ndarray(shape, dtype, memory, offset)
            arrays[name] = array.copy() if copied else array
        return arrays

    def hand_over(self, slot: Slot, lent: dict[str, NDArray[Any]] | None = None) -> dict[str, NDArray[Any]]:
        """Returns the arrays of a slot that was filled; copies, if the user holds so many that filling would wait.

        `lent`: the arrays of `lend`, if it was called already. If they are not returned, nobody may use them any more.
        """
        self.collect()
        lends = not self._all_small and self.num_lent < min(SLACK, len(self.slots) - 1)
        if lends or self._all_small:
            arrays = self.lend(slot) if lent is None else lent
        else:
            arrays = {name: private_copy(array) for name, array in slot.arrays.items()}
        if lends:
            self.num_lent += 1
        else:
            self.give_back(slot)
        return arrays

    def collect(self) -> int:
        """Takes note of the slots that have come back, and returns how many are free."""
        while True:
            try:
                slot = self.slots[self._returned.get_nowait()]
            except queue.Empty:
                return len(self.free)
            self.num_lent -= 1
            self.give_back(slot)


def slot_bytes(fields: Sequence[SlotField]) -> int:
    """Returns the bytes of a slot of these fields: whole pages."""
    return _offsets(tuple(fields))[1]


def slot_arrays(fields: Sequence[SlotField], memory: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """Returns the fields as arrays over a slot's memory, uint8 (slot_bytes,).

    Each has pages of its own, in order; the small ones share the last pages, so that they can be copied at once.
    """
    offsets, _ = _offsets(tuple(fields))
    return {
        field.name: np.ndarray(field.shape, field.dtype, buffer=memory, offset=offsets[field.name]) for field in fields
    }


@functools.lru_cache
def _offsets(fields: tuple[SlotField, ...]) -> tuple[dict[str, int], int]:
    """Returns where each field begins in a slot, and the bytes of a slot."""
    offsets, offset = {}, 0
    for field in sorted(fields, key=lambda field: field.small):
        offsets[field.name] = offset
        offset += _aligned(field.nbytes, _SMALL_ALIGNMENT if field.small else _ALIGNMENT)
    return offsets, _aligned(offset, _ALIGNMENT)


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


def private_copy(array: NDArray[Any]) -> NDArray[Any]:
    """Returns a C-contiguous copy in memory of its own; two threads copy a large array.

    Most of its time goes into faults of pages that the system has not given out yet, and two threads take them at once.
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


def allocate_aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Returns uninitialised memory that begins on a page: whole cache lines, huge pages where the system gives them."""
    raw = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes]
