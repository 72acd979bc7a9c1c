"""Slots of a ring: when their memory comes back, what is copied, what is pinned."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from fastload.prefetch.ring import Ring, SlotField, private_copy

B, WIDTH = 4, 100_000
FIELD = SlotField("images", (B, WIDTH), np.dtype(np.uint8))
LABELS = SlotField("labels", (B,), np.dtype(np.int64))


def test_memory_comes_back_when_the_last_view_is_gone():
    ring = Ring([FIELD], 4)
    slot = ring.take()
    arrays = ring.lend(slot)
    view = arrays["images"][1:].T[::2]
    shared = memoryview(view[:1])
    del arrays
    others = [ring.take() for _ in range(3)]
    assert all(others) and ring.take() is None
    del view
    assert ring.take() is None
    del shared
    assert ring.take() is slot


def test_the_memory_of_each_slot_can_be_pinned_and_is_as_large_as_its_fields_on_their_pages():
    given = []
    ring = Ring([FIELD, LABELS], 3, given.append)
    ring.add(np.zeros(ring.slot_bytes, np.uint8))
    assert len(given) == 4 and all(memory.nbytes == ring.slot_bytes == 99 * 4096 for memory in given)
    assert all(np.shares_memory(slot.memory, memory) for slot, memory in zip(ring.slots, given, strict=True))
    slot = ring.take()
    assert all(np.shares_memory(slot.memory, array) for array in slot.arrays.values())
    assert slot.arrays["labels"].ctypes.data % 8 == 0


def test_slots_that_came_back_are_not_taken_for_held_when_no_more_are_taken():
    ring = Ring([FIELD], 6)
    slots = [ring.take() for _ in range(6)]
    for slot in slots:  # as at the end of an epoch: handed over one after another, none filled again
        arrays = ring.hand_over(slot)
        assert np.shares_memory(arrays["images"], slot.memory)
        del arrays


@pytest.mark.parametrize("shape", [(1, 3), (0, 3), (5, 2**20, 2), (1, 2**23)])
def test_a_private_copy_is_whole_and_shares_nothing(shape):
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    before = threading.active_count()
    copy = private_copy(array)
    assert np.array_equal(copy, array) and copy.flags.c_contiguous and not np.shares_memory(copy, array)
    assert threading.active_count() == before
