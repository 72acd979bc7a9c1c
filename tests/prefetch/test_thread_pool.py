"""Batches filled by threads: order, who holds a slot, when it comes back, what happens when someone keeps many.

The pool, its threads and the producer are the real ones; the recipe has a stage of the test's own.
"""

from __future__ import annotations

import os
import threading
import traceback
from contextlib import closing
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from late_backend import Device

import fastload.prefetch.lookahead
from fastload import FastLoader, PackedDataset
from fastload.plan import EpochPlan
from fastload.prefetch.loader_plan import GROUP_BYTES, group_size
from fastload.prefetch.producer import Producer
from fastload.prefetch.recipe import make_recipe
from fastload.prefetch.ring import SLACK, SLOTS_IN_COPY
from fastload.prefetch.stages.gather import ToUserLayout
from fastload.prefetch.thread_pool import ThreadPool
from fastload.prefetch.work import Stage, Where, coalesced
from fastload.read.readahead import has_read_ahead

B, WIDTH = 4, 100_000
PACKED = {"rows": 48, "size": (6, 5, 3), "seed": 3, "chunk_rows": 8}


class Fill(Stage):
    """Writes the numbers of its rows; `note` is called first. With `alone` each batch has a slot of its own."""

    where = Where.THREAD

    def __init__(self, note=lambda work: None, *, alone=True, divisible=False, width=WIDTH, labels=False):
        self.note, self.alone, self.divisible, self.width, self.labels = note, alone, divisible, width, labels

    def output(self, given):
        made = {"values": ((self.width,), np.dtype(np.uint8))}
        return given | made | ({"labels": ((), np.dtype(np.int64))} if self.labels else {})

    def run(self, work):
        self.note(work)
        work.arrays["values"][:] = (work.rows % 251)[:, None]
        if self.labels:
            work.arrays["labels"][:] = work.rows
        work.copied.append(sum(array.nbytes for array in work.arrays.values()))


class Batches(Producer):
    """What threads make of rows that count up, by one stage."""

    def __init__(self, packed, stage, *, steps=20, batch_size=B, workers=2, **options):
        options = FastLoader(packed, batch_size, shuffle=False, workers=workers, **options)._options
        self.plan = EpochPlan(range(steps * batch_size), batch_size=batch_size, shuffle=False)
        options = replace(options, plan=self.plan)
        stages = (stage,) if options.backend is not None else (stage, ToUserLayout(None))
        recipe = replace(make_recipe(options), stages=stages, computes=stage.divisible)
        super().__init__(options, recipe)
        self.pool = ThreadPool(options, recipe)

    def read_epoch(self):
        self.read([(0, self.plan.batches(0))])
        return self


def is_right(batch):
    return bool((batch.fields["values"] == torch.from_numpy(batch.rows % 251)[:, None]).all())


def workers_alive():
    return [thread for thread in threading.enumerate() if thread.name.startswith("fastload-worker")]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_batches_come_in_the_order_planned_whatever_the_workers_and_groups(packed, workers, alone):
    before = workers_alive()  # of loaders of other tests that are not collected yet
    with closing(Batches(packed, Fill(alone=alone), steps=30, workers=workers)) as batches:
        assert len(batches.pool.ring.slots) == SLACK + workers
        assert [batch.whole.step for batch in batches.read_epoch() if is_right(batch)] == list(range(30))
    assert set(workers_alive()) <= set(before)


def test_a_slot_that_is_referenced_is_never_written_to(packed):
    with closing(Batches(packed, Fill(), steps=25)) as batches:
        kept = list(batches.read_epoch())
        assert all(is_right(batch) for batch in kept)
        arrays = [batch.fields["values"].numpy() for batch in kept]
        assert len({array.ctypes.data for array in arrays}) == 25
        slots = batches.pool.ring.slots
        assert sum(any(np.shares_memory(array, slot.memory) for slot in slots) for array in arrays) == SLACK


def test_a_loop_that_keeps_one_batch_gets_no_copies_and_small_arrays_hold_no_slot(packed):
    with closing(Batches(packed, Fill(labels=True), steps=25)) as batches:
        labels, last = [], None
        for batch in batches.read_epoch():
            labels.append(batch.fields["labels"])
            values = batch.fields["values"].numpy()
            assert any(np.shares_memory(values, slot.memory) for slot in batches.pool.ring.slots)
            last = batch
    assert is_right(last) and torch.cat(labels).tolist() == list(range(100))


def test_held_batches_keep_their_slots_through_the_next_run_of_the_same_pool(packed):
    with closing(Batches(packed, Fill(), steps=25)) as batches:
        kept = list(islice(batches.read_epoch(), SLACK))
        assert sum(is_right(batch) for batch in batches.read_epoch()) == 25
        assert len(kept) == SLACK and all(is_right(batch) for batch in kept)


@pytest.mark.parametrize("width", [8, WIDTH])  # arrays so small that they are copied, and others
def test_arrays_that_were_lent_ahead_hold_their_slot_until_they_are_handed_over(packed, width):
    with closing(Batches(packed, Fill(width=width), steps=30, workers=1)) as batches:
        ring = batches.pool.ring
        for batch in islice(batches.read_epoch(), 3):
            assert is_right(batch)
        del batch
        batches.stop()
        assert ring.collect() == 4 and len({slot.number for slot in ring.free}) == 4, "each once"
        kept = list(batches.read_epoch())
        assert all(map(is_right, kept)) and len(kept) == 30, "also those beyond the slots"
        del kept
        assert ring.collect() == 4 and len({slot.number for slot in ring.free}) == 4


@pytest.mark.parametrize("alone", [True, False])
def test_once_left_no_thread_writes_and_all_slots_are_back_and_the_threads_serve_the_next_run(packed, alone):
    others = set(workers_alive())
    batches = Batches(packed, Fill(alone=alone), steps=1000)
    for _ in range(3):
        next(batches.read_epoch())
        before = workers_alive()
        batches.stop()
        batches.stop()
        assert list(batches) == [] and batches.pool.ring.collect() == SLACK + 2
        assert set(before) <= set(workers_alive())
    assert len(set(workers_alive()) - others) <= 2
    batches.close()
    assert set(workers_alive()) <= others


def test_epochs_follow_one_another_and_no_group_has_batches_of_two(packed):
    def plan(steps):
        return EpochPlan(range(steps * B), batch_size=B, shuffle=False).batches(0)

    groups = list(coalesced([(4, plan(5)), (5, plan(2))], 3))
    assert [(epoch, [batch.step for batch in members]) for epoch, members in groups] == [
        (4, [0, 1, 2]), (4, [3, 4]), (5, [0, 1]),
    ]  # fmt: skip
    seen = []
    fill = Fill(lambda work: seen.append((work.epoch, len(work.members))), alone=False)
    with closing(Batches(packed, fill, steps=24, workers=1)) as batches:  # three at a time
        batches.read([(4, plan(5)), (5, plan(2))])
        found = list(batches)
    assert [(batch.epoch, batch.whole.step) for batch in found] == [*((4, n) for n in range(5)), (5, 0), (5, 1)]
    assert seen == [(4, 3), (4, 2), (5, 2)] and all(is_right(batch) for batch in found)


def test_the_next_batches_are_read_while_the_user_works_on_one(packed):
    begun = [threading.Event() for _ in range(10)]
    with closing(Batches(packed, Fill(lambda work: begun[work.whole.step].set()), steps=10, workers=1)) as batches:
        first = next(batches.read_epoch())
        # Nobody asks for another batch: if reading waited for that, these would never be set.
        assert begun[1].wait(600) and begun[2].wait(600)
        assert is_right(first)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")
def test_threads_do_not_interrupt_the_loop_and_the_loop_stays_as_it_is(packed):
    before, policies = os.sched_getscheduler(0), set()
    fill = Fill(lambda work: policies.add(os.sched_getscheduler(0)))
    with closing(Batches(packed, fill, workers=1)) as batches:
        next(batches.read_epoch())
    # Another policy is the user's choice.
    assert policies == {os.SCHED_BATCH if before == os.SCHED_OTHER else before}
    assert os.sched_getscheduler(0) == before


@pytest.mark.skipif(not has_read_ahead(), reason="this system reads no file ahead")
def test_coming_rows_are_announced_before_they_are_read_and_not_too_far_ahead(packed, monkeypatch):
    log = []

    class Noting:
        def announce(self, rows):
            log.append(("say", rows.tolist()))

        def close(self):
            log.append(("closed", []))

    monkeypatch.setattr(PackedDataset, "read_ahead", lambda self, *, chunk_rows: Noting())
    fill = Fill(lambda work: log.append(("read", work.rows.tolist())))
    options = FastLoader(packed, B, shuffle="full", workers=1)._options
    recipe = replace(make_recipe(options), stages=(fill, ToUserLayout(None)))
    producer = Producer(options, recipe)
    pool = producer.pool = ThreadPool(options, recipe)
    monkeypatch.setattr(fastload.prefetch.lookahead, "AHEAD_BYTES", 2 * pool.ring.slot_bytes)
    planned = [batch.rows.tolist() for batch in options.plan.batches(0)]
    with closing(producer):
        producer.read([(0, options.plan.batches(0))])
        for number, _ in enumerate(producer):
            said = [rows for what, rows in log if what == "say"]
            assert said == planned[: len(said)] and len(said) <= number + 1 + len(pool.ring.slots) + 2
        assert log[-1] == ("closed", []), "with the run"
    assert [rows for what, rows in log if what == "read"] == planned and len(planned) == 12
    for rows in planned:
        assert log.index(("say", rows)) < log.index(("read", rows))


@pytest.mark.parametrize("alone", [True, False])
def test_what_a_stage_raises_reaches_the_loop_in_its_turn_with_its_traceback(packed, alone):
    def failing(work):
        if 12 in work.rows:
            raise LookupError("row 12 is cursed")

    with closing(Batches(packed, Fill(failing, alone=alone), steps=24)) as batches:  # three at a time, if not alone
        seen = []
        with pytest.raises(LookupError, match="cursed") as caught:
            for batch in batches.read_epoch():
                seen.append(batch.whole.step)
        assert seen == [0, 1, 2]
        assert "in failing" in "".join(traceback.format_tb(caught.value.__traceback__))
        del batch
        assert list(batches) == [] and batches.pool.ring.collect() == SLACK + 2


def test_for_a_device_slots_are_handed_over_whole_and_used_again_when_they_are_released(packed):
    batches = Batches(packed, Fill(), steps=12, device=Device(), workers=2)
    pool, held = batches.pool, []
    run = pool.begin([(0, batches.plan.batches(0))], timed=False)
    assert len(pool.ring.slots) == SLOTS_IN_COPY + 1 + 2
    for step in range(12):
        pool.ask(run)
        (work,) = pool.hand_over(run, pool.first(run))
        assert work.whole.step == step and work.arrays["values"].base is not None
        held.append(work)
        for one in held:
            assert (one.slot.arrays["values"] == (one.rows % 251)[:, None]).all()
        if len(held) == 3:
            pool.release(held.pop(0).slot)
    pool.ask(run)
    assert pool.first(run) is None
    for work in held:
        pool.release(work.slot)
    pool.leave(run)
    assert len({pool.ring.take().number for _ in range(5)}) == 5
    batches.close()


@pytest.mark.parametrize("alone", [True, False])
def test_depth_tells_what_waits_with_the_rest_of_a_group(packed, alone):
    go, number = threading.Event(), 24  # three at a time, if not alone

    def waiting(work):
        assert go.wait(600)

    with closing(Batches(packed, Fill(waiting, alone=alone), steps=number, workers=1)) as batches:
        of_each, slots = (1 if alone else 3), len(batches.pool.ring.slots)
        batches.read([(0, islice(batches.plan.batches(0), of_each * slots))])
        assert batches.depth() == 0
        batches.pool.ask(batches.pool._run)
        assert batches.depth() == 0
        go.set()
        for left in range(of_each * slots, 0, -1):
            while batches.depth() < left:
                pass
            assert is_right(next(batches)) and batches.depth() == left - 1
        assert next(batches, None) is None and batches.depth() == 0


@pytest.mark.parametrize("alone", [True, False])
def test_what_batches_cost_is_shared_out_among_those_of_a_slot_where_it_is_measured(packed, alone):
    with closing(Batches(packed, Fill(alone=alone), steps=24)) as batches:  # three at a time, if not alone
        assert all(batch.cost is None for batch in batches.read_epoch())
        run = batches.pool.begin([(0, batches.plan.batches(0))], timed=True)
        batches.pool.ask(run)
        work = batches.pool.first(run)
        whole, found = work.cost, batches.pool.hand_over(run, work)
        assert len(found) == (1 if alone else 3) and "reading" in whole.stages
        assert all(one.cost == whole / len(found) for one in found)
        del found, work


# Small batches, filled several at a time


def test_small_batches_are_coalesced_and_large_ones_are_not():
    assert group_size(GROUP_BYTES // 4, 1000) == 4
    assert group_size(GROUP_BYTES * 4, 1000) == 1
    assert group_size(1, 64) == 8, "an eighth of the epoch at most"
    assert group_size(0, 0) == 1


@given(
    num_rows=st.integers(1, 300),
    batch_size=st.integers(1, 20),
    ends=st.sampled_from(["drop", "pad", "exact"]),
)
def test_what_comes_out_of_a_group_is_what_was_planned(packed, num_rows, batch_size, ends):
    plan, filled = EpochPlan(range(num_rows), batch_size=batch_size, shuffle="full", ends=ends), []
    fill = Fill(lambda work: filled.append(len(work.rows)), alone=False, width=8)
    with closing(Batches(packed, fill, steps=plan.num_steps, batch_size=batch_size, workers=1)) as batches:
        size = group_size(8 * batch_size, plan.num_steps)
        batches.read([(0, plan.batches(0))])
        found = list(batches)
    assert filled[:-1] == [batch_size * size] * (len(filled) - 1)
    expected = list(plan.batches(0))
    assert len(found) == len(expected) == plan.num_steps
    for batch, planned in zip(found, expected, strict=True):
        assert is_right(batch)
        np.testing.assert_array_equal(batch.rows, planned.rows)
        np.testing.assert_array_equal(batch.whole.valid, planned.valid)
        assert (batch.whole.step, batch.whole.global_valid) == (planned.step, planned.global_valid)
        assert batch.bytes_read == 8 * len(planned.rows)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_first_batch_is_cut_among_the_threads_and_the_others_are_not(packed, workers):
    filled, size = [], 26
    fill = Fill(lambda work: filled.append((work.whole.step, len(work.rows))), divisible=True, labels=True)
    batches = Batches(packed, fill, steps=5, batch_size=size, workers=workers)
    steps, labels, num_bytes = [], [], []
    with closing(batches):
        for batch in batches.read_epoch():
            assert is_right(batch)
            steps.append(batch.whole.step)
            labels += batch.fields["labels"].tolist()
            num_bytes.append(batch.bytes_read)
    assert steps == list(range(5)) and labels == list(range(5 * size))
    parts = {1: [26], 2: [13, 13], 3: [8, 9, 9]}[workers]
    assert sorted(filled) == [*((0, part) for part in parts), *((step, size) for step in range(1, 5))]
    assert num_bytes == [size * (WIDTH + 8)] * 5


def test_an_error_in_a_part_is_that_of_the_whole_batch(packed):
    def failing(work):
        if 2 in work.rows:
            raise ValueError(f"{len(work.rows)} rows")

    batches = Batches(packed, Fill(failing, divisible=True), steps=5, batch_size=24)
    with closing(batches), pytest.raises(ValueError, match="24 rows"):
        next(batches.read_epoch())


def test_a_run_that_is_left_while_a_part_is_filled_gives_back_its_slots(packed):
    begun, go_on = threading.Event(), threading.Event()

    def waiting(work):
        begun.set()
        go_on.wait()

    with closing(Batches(packed, Fill(waiting, divisible=True), steps=9, batch_size=24, workers=2)) as batches:
        batches.read_epoch()
        batches.pool.ask(batches.pool._run)
        begun.wait()
        threading.Timer(0.1, go_on.set).start()
        batches.stop()
        assert go_on.is_set() and len(batches.pool.ring.free) == SLACK + 2
