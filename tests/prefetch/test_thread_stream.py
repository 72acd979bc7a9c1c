"""Batches filled by threads: order, who holds a slot, when it comes back, what happens when someone keeps many."""

from __future__ import annotations

import os
import threading
import traceback
from contextlib import closing
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.plan import EpochPlan
from fastload.prefetch.coming import coalesced
from fastload.prefetch.fill_threads import FillThreads
from fastload.prefetch.ring import SLACK, Ring, SlotField, private_copy
from fastload.prefetch.thread_stream import GROUP_BYTES, ThreadStream, group_size
from fastload.read.readahead import announced_ahead

B, WIDTH = 4, 100_000
FIELD = SlotField("images", (B, WIDTH), np.dtype(np.uint8))
LABELS = SlotField("labels", (B,), np.dtype(np.int64))


def fill(epoch, planned, arrays):
    arrays["images"][:] = (planned.rows % 251)[:, None]
    if "labels" in arrays:
        arrays["labels"][:] = planned.rows
    return sum(array.nbytes for array in arrays.values())


def plan(steps):
    return EpochPlan(rows=range(steps * B), batch_size=B).batches(0)


def stream(ring, steps=20, *, fill=fill, workers=2, group=1):
    return ThreadStream(coalesced([(0, plan(steps))], group), fill, ring, FillThreads(workers), group=group)


def is_right(batch):
    return (batch.arrays["images"] == (batch.planned.rows % 251)[:, None]).all()


def workers_alive():
    return [thread for thread in threading.enumerate() if thread.name.startswith("fastload-worker")]


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("num_slots", [3, 5])
def test_batches_come_in_the_order_planned_whatever_the_workers_and_slots(workers, num_slots):
    before = workers_alive()  # of loaders of other tests that are not collected yet
    seen = [batch.planned.step for batch in stream(Ring([FIELD], num_slots), 30, workers=workers) if is_right(batch)]
    assert seen == list(range(30))
    assert set(workers_alive()) <= set(before)


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


def test_a_slot_that_is_referenced_is_never_written_to():
    ring = Ring([FIELD], SLACK + 2)
    kept = list(stream(ring, 25))
    assert all(is_right(batch) for batch in kept)
    addresses = {batch.arrays["images"].ctypes.data for batch in kept}
    assert len(addresses) == 25
    inside = sum(any(np.shares_memory(batch.arrays["images"], slot.memory) for slot in ring.slots) for batch in kept)
    assert inside == SLACK


def test_a_loop_that_keeps_one_batch_gets_no_copies_and_small_arrays_hold_no_slot():
    ring, labels, last = Ring([FIELD, LABELS], SLACK + 2), [], None
    for batch in stream(ring, 25):
        labels.append(batch.arrays["labels"])
        assert any(np.shares_memory(batch.arrays["images"], slot.memory) for slot in ring.slots)
        last = batch
    assert is_right(last) and np.array_equal(np.concatenate(labels), np.arange(100))


def test_held_batches_keep_their_slots_through_the_next_stream_of_the_same_ring():
    ring = Ring([FIELD], SLACK + 2)
    with closing(stream(ring, 25)) as batches:
        kept = list(islice(batches, SLACK))
    assert sum(is_right(batch) for batch in stream(ring, 25)) == 25
    assert len(kept) == SLACK and all(is_right(batch) for batch in kept)


@pytest.mark.parametrize("num_bytes", [8, 100_000])  # of arrays so small that they are copied, and of others
@pytest.mark.parametrize("copied", [False, True])
def test_arrays_that_were_made_ready_ahead_hold_their_slot_until_they_are_handed_over(num_bytes, copied):
    ring = Ring([SlotField("images", (B, num_bytes), np.dtype(np.uint8))], 4)

    def present(arrays):
        return {name: array.copy() for name, array in arrays.items()} if copied else arrays

    def batches():
        return ThreadStream(
            coalesced([(0, plan(30))], 1),
            fill,
            ring,
            FillThreads(2),
            present=present,
            tensors=lambda arrays: {"made": 1},
        )

    with closing(batches()) as stream:
        for _ in range(3):
            assert is_right(next(stream))
    assert ring.collect() == 4 and len({slot.number for slot in ring.free}) == 4, "each once"
    with closing(batches()) as stream:
        kept = [next(stream) for _ in range(30)]
    assert all(map(is_right, kept)) and len(kept) == 30, "also those beyond the slots"
    assert [batch.tensors is not None for batch in kept[:2]] == [True, True]
    del kept
    assert ring.collect() == 4 and len({slot.number for slot in ring.free}) == 4


@pytest.mark.parametrize("group", [1, 3])
def test_after_close_no_thread_writes_and_all_slots_are_back_and_the_threads_serve_the_next_stream(group):
    ring = Ring([SlotField("images", (group * B, WIDTH), np.dtype(np.uint8))], 5)
    threads, others = FillThreads(2), set(workers_alive())
    for _ in range(3):
        batches = ThreadStream(coalesced([(0, plan(1000))], group), fill, ring, threads, group=group)
        next(batches)
        before = workers_alive()
        batches.close()
        batches.close()
        assert list(batches) == [] and ring.collect() == 5
        assert set(before) <= set(workers_alive())
    assert len(set(workers_alive()) - others) <= 2
    threads.close()
    assert set(workers_alive()) <= others


def test_epochs_follow_one_another_and_no_group_has_batches_of_two():
    groups = list(coalesced([(4, plan(5)), (5, plan(2))], 3))
    assert [(group.epoch, [batch.step for batch in group.members]) for group in groups] == [
        (4, [0, 1, 2]), (4, [3, 4]), (5, [0, 1]),
    ]  # fmt: skip
    seen = []

    def noting(epoch, planned, arrays):
        seen.append(epoch)
        return fill(epoch, planned, arrays)

    ring = Ring([SlotField("images", (3 * B, WIDTH), np.dtype(np.uint8))], 5)
    batches = list(ThreadStream(iter(groups), noting, ring, FillThreads(1), group=3))
    assert [batch.planned.step for batch in batches] == [0, 1, 2, 3, 4, 0, 1] and seen == [4, 4, 5]
    assert all(is_right(batch) for batch in batches)


def test_the_next_batches_are_read_while_the_user_works_on_one():
    begun = [threading.Event() for _ in range(10)]

    def noting(epoch, planned, arrays):
        begun[planned.step].set()
        return fill(epoch, planned, arrays)

    batches = stream(Ring([FIELD], SLACK + 2), 10, fill=noting, workers=1)
    first = next(batches)
    # Nobody asks for another batch: if reading waited for that, these would never be set.
    assert begun[1].wait(600) and begun[2].wait(600)
    assert is_right(first)
    batches.close()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")
def test_threads_do_not_interrupt_the_loop_and_the_loop_stays_as_it_is():
    before, policies = os.sched_getscheduler(0), set()

    def noting(epoch, planned, arrays):
        policies.add(os.sched_getscheduler(0))
        return fill(epoch, planned, arrays)

    with closing(stream(Ring([FIELD], 4), fill=noting)) as batches:
        next(batches)
    # Another policy is the user's choice.
    assert policies == {os.SCHED_BATCH if before == os.SCHED_OTHER else before}
    assert os.sched_getscheduler(0) == before


def test_coming_rows_are_announced_before_they_are_read_and_not_too_far_ahead():
    log = []
    ring = Ring([FIELD], 3)

    def noting(epoch, planned, arrays):
        log.append(("read", planned.step))
        return fill(epoch, planned, arrays)

    coming = coalesced([(0, plan(12))], 1)
    groups = announced_ahead(coming, lambda group: log.append(("say", group.whole.step)), 2)
    batches = ThreadStream(groups, noting, ring, FillThreads(1))
    for number, _ in enumerate(batches):
        said = [step for what, step in log if what == "say"]
        assert said == list(range(min(12, len(said)))) and len(said) <= number + 1 + 3 + 2
    assert [step for what, step in log if what == "read"] == list(range(12))
    for step in range(12):
        assert log.index(("say", step)) < log.index(("read", step))


@pytest.mark.parametrize("group", [1, 3])
def test_what_a_worker_raises_reaches_the_loop_in_its_turn_with_its_traceback(group):
    def failing(epoch, planned, arrays):
        if planned.step == 3:
            raise LookupError("row 12 is cursed")
        return fill(epoch, planned, arrays)

    ring = Ring([SlotField("images", (group * B, WIDTH), np.dtype(np.uint8))], 5)
    batches = stream(ring, 20, fill=failing, group=group)
    seen = []
    with pytest.raises(LookupError, match="cursed") as caught:
        for batch in batches:
            seen.append(batch.planned.step)
    assert seen == [0, 1, 2]
    assert "in failing" in "".join(traceback.format_tb(caught.value.__traceback__))
    del batch
    assert list(batches) == [] and ring.collect() == 5


def test_manual_release_hands_over_slots_and_reuses_only_those_released():
    ring, held = Ring([FIELD], 4, manual_release=True), []
    for batch in stream(ring, 12):
        assert is_right(batch)
        held.append(batch)
        if len(held) == 3:
            assert all(is_right(one) for one in held)
            held.pop(0).release()
    for batch in held:
        batch.release()
        batch.release()
    assert len({ring.take().number for _ in range(4)}) == 4


@pytest.mark.parametrize("group", [1, 3])
def test_ready_and_depth_tell_what_waits_with_the_rest_of_a_group(group):
    go = threading.Event()

    def waiting(epoch, planned, arrays):
        assert go.wait(600)
        return fill(epoch, planned, arrays)

    field = SlotField("images", (group * B, WIDTH), np.dtype(np.uint8))
    batches = stream(Ring([field], 4), 2 * group, fill=waiting, workers=1, group=group)
    assert not batches.ready() and batches.depth() == 0
    go.set()
    for left in range(2 * group, 0, -1):
        while batches.depth() < left:
            pass
        assert batches.ready() and is_right(next(batches)) and batches.depth() == left - 1
    assert not batches.ready()
    assert next(batches, None) is None


# Small batches, filled several at a time


def test_small_batches_are_coalesced_and_large_ones_are_not():
    assert group_size(GROUP_BYTES // 4, 1000) == 4
    assert group_size(GROUP_BYTES * 4, 1000) == 1
    assert group_size(1, 64) == 8, "an eighth of the epoch at most"
    assert group_size(0, 0) == 1


@given(
    num_rows=st.integers(1, 300),
    batch_size=st.integers(1, 20),
    size=st.integers(2, 9),
    ends=st.sampled_from(["drop", "pad", "exact"]),
)
def test_what_comes_out_of_a_group_is_what_was_planned(num_rows, batch_size, size, ends):
    plan = EpochPlan(range(num_rows), batch_size=batch_size, shuffle="full", ends=ends)
    filled = []

    def fill(epoch, planned, arrays):
        filled.append(len(planned.rows))
        arrays["images"][:] = planned.rows * 10
        return 8 * len(planned.rows)

    ring = Ring([SlotField("images", (size * batch_size,), np.dtype(np.int64))], SLACK + 1)
    found = list(ThreadStream(coalesced([(0, plan.batches(0))], size), fill, ring, FillThreads(1), group=size))
    assert filled[:-1] == [batch_size * size] * (len(filled) - 1)
    expected = list(plan.batches(0))
    assert len(found) == len(expected) == plan.num_steps
    for batch, planned in zip(found, expected, strict=True):
        np.testing.assert_array_equal(batch.arrays["images"], planned.rows * 10)
        np.testing.assert_array_equal(batch.planned.rows, planned.rows)
        np.testing.assert_array_equal(batch.planned.valid, planned.valid)
        assert (batch.planned.step, batch.planned.global_valid) == (planned.step, planned.global_valid)
        assert batch.bytes_read == 8 * len(planned.rows)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_first_batch_is_cut_among_the_threads_and_the_others_are_not(workers):
    filled = []

    def noting(epoch, planned, arrays):
        filled.append((planned.step, len(planned.rows)))
        return fill(epoch, planned, arrays)

    ring = Ring([FIELD, LABELS], 4)
    batches = ThreadStream(coalesced([(0, plan(5))], 1), noting, ring, FillThreads(workers), parts=3)
    steps, labels, num_bytes = [], [], []
    for batch in batches:
        assert is_right(batch)
        steps.append(batch.planned.step)
        labels += batch.arrays["labels"].tolist()
        num_bytes.append(batch.bytes_read)
    assert steps == list(range(5)) and labels == list(range(5 * B))
    assert sorted(filled) == [(0, 1), (0, 1), (0, 2), *((step, B) for step in range(1, 5))]
    assert num_bytes == [FIELD.nbytes + LABELS.nbytes] * 5


def test_an_error_in_a_part_is_that_of_the_whole_batch():
    def failing(epoch, planned, arrays):
        if 2 in planned.rows:
            raise ValueError(f"{len(planned.rows)} rows")
        return fill(epoch, planned, arrays)

    batches = ThreadStream(coalesced([(0, plan(5))], 1), failing, Ring([FIELD], 4), FillThreads(2), parts=4)
    with pytest.raises(ValueError, match=f"{B} rows"):
        next(batches)


def test_a_stream_that_is_closed_while_a_part_is_filled_gives_back_its_slots():
    begun, go_on, ring = threading.Event(), threading.Event(), Ring([FIELD], 4)

    def waiting(epoch, planned, arrays):
        begun.set()
        go_on.wait()
        return fill(epoch, planned, arrays)

    batches = ThreadStream(coalesced([(0, plan(9))], 1), waiting, ring, FillThreads(1), parts=2)
    begun.wait()
    threading.Timer(0.1, go_on.set).start()
    batches.close()
    assert go_on.is_set() and len(ring.free) == 4
