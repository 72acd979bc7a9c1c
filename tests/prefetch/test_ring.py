"""The ring's memory: slots, what comes back, and copies."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from fastload.prefetch.ring import Ring, SlotField, private_copy

FIELD = SlotField("images", (4, 100_000), np.dtype(np.uint8))
LABELS = SlotField("labels", (4,), np.dtype(np.int64))


def test_memory_can_come_from_outside():
    given = []

    def allocate(num_bytes):
        given.append(np.zeros(num_bytes, np.uint8))
        return given[-1]

    ring = Ring([FIELD, LABELS], 3, allocate)
    assert len(given) == 3 and ring.slot_bytes == len(given[0])
    slot = ring.take()
    assert all(np.shares_memory(slot.memory, array) for array in slot.arrays.values())
    assert slot.arrays["labels"].ctypes.data % 8 == 0


def test_slots_that_came_back_are_not_taken_for_held_when_no_more_are_taken():
    ring = Ring([FIELD], 6)
    slots = [ring.take() for _ in range(6)]
    for slot in slots:  # as at the end of an epoch: handed over one after another, none filled again
        batch = ring.hand_over(slot, None, 0)
        assert np.shares_memory(batch.arrays["images"], slot.memory)
        del batch


@pytest.mark.parametrize("shape", [(1, 3), (0, 3), (5, 2**20, 2), (1, 2**23)])
def test_a_private_copy_is_whole_and_shares_nothing(shape):
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    before = threading.active_count()
    copy = private_copy(array)
    assert np.array_equal(copy, array) and copy.flags.c_contiguous and not np.shares_memory(copy, array)
    assert threading.active_count() == before
