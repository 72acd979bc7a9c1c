"""What a producer makes of a pool's works: right batches on a device that is as slow as the rules allow, each slot back
once; on the CPU they stay where they are. By the loop itself, and by the thread that brings batches to a device."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from contextlib import closing
from itertools import islice

import numpy as np
import pytest
import torch
from fake_pool import FakePool
from hypothesis import given
from hypothesis import strategies as st
from late_backend import POISON, LateBackend

from fastload import FastLoader
from fastload.device import open_backend
from fastload.errors import OptionError, WorkerTimeoutError
from fastload.plan import EpochPlan
from fastload.prefetch.producer import READY_ON_DEVICE, Producer
from fastload.prefetch.recipe import make_recipe
from fastload.prefetch.ring import SLOTS_IN_COPY, Slot
from fastload.prefetch.work import Work


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return torch.tensor(index)


class Slots(FakePool):
    """Slots filled one after another with what `expected` gives; `ready` follows a script.

    Args:
        by_threads: whether the producer has a thread of its own for the device.
        whole: whether a slot is one piece of memory.
        fail_at: batch that an error comes for instead.
        hang_at: batch that nobody makes until the run is over.
    """

    def __init__(
        self, slots, batches, ready=(True,), *, by_threads=False, channels_first=False, whole=True, fail_at=None,
        hang_at=None, timeout_s=0.0,
    ):  # fmt: skip
        self.batches, self.ready, self.by_threads = batches, ready, by_threads
        self.whole, self.fail_at, self.hang_at, self.timeout_s = whole, fail_at, hang_at, timeout_s
        self.made, self.out, self.left, self.left_hanging = 0, [], 0, False
        self.awake = threading.Event()
        self.free = [self.slot(number, channels_first) for number in range(slots)]
        self.slots = list(self.free)

    def slot(self, number, channels_first):
        memory = np.full(2 * 3 * 4 * 5 + 2 * 8, POISON, np.uint8)
        images = memory[: 2 * 3 * 4 * 5]
        images = images.reshape(2, 3, 4, 5).transpose(0, 2, 3, 1) if channels_first else images.reshape(2, 4, 5, 3)
        return Slot(number, memory, {"images": images, "labels": memory[2 * 3 * 4 * 5 :].view(np.int64)})

    def begin(self, epochs, *, timed):
        run = super().begin(epochs, timed=timed)
        run.patience.timeout_s = self.timeout_s
        end_waits = run.end_waits

        def end() -> None:
            end_waits()
            self.awake.set()

        run.end_waits = end
        return run

    def first(self, run):
        if self.made == self.batches or run.closed or (found := next(run.coming, None)) is None:
            return None
        if self.made == self.fail_at:
            raise OSError("the disk is gone")
        if self.made == self.hang_at:
            self.awake.wait()
            return None
        assert self.free, "the producer waits for a slot that it holds itself"
        slot = self.free.pop(0)
        for name, values in expected(self.made).items():
            slot.arrays[name][...] = values
        work = Work(slot, run.orders, number=self.made)
        work.plan(*found)
        work.arrays, work.in_one_piece = dict(slot.arrays), self.whole
        self.out.append(slot.number)
        self.made += 1
        return work

    def release(self, slot):
        assert slot not in self.free, "a slot was given back twice"
        slot.memory.fill(POISON)
        self.free.append(slot)

    def depth(self, run):
        there = self.made < self.batches and self.made != self.fail_at and bool(self.free)
        return int(there and self.ready[self.made % len(self.ready)])

    def leave(self, run):
        super().leave(run)
        self.left += 1

    def describe(self, run):
        return "Nobody makes it."

    def leave_behind(self):
        self.left_hanging = True


def expected(number: int) -> dict[str, np.ndarray]:
    images = np.random.default_rng(number).integers(0, 200, (2, 4, 5, 3), dtype=np.uint8)
    return {"images": images, "labels": np.array([number, -number], dtype=np.int64)}


def assert_is_batch(fields, number):
    values = expected(number)
    assert torch.equal(fields["images"], torch.from_numpy(values["images"]).permute(0, 3, 1, 2))
    assert fields["images"].permute(0, 2, 3, 1).is_contiguous()
    assert fields["labels"].tolist() == values["labels"].tolist()


def producing(pool, backend=None, slots_in_copy=SLOTS_IN_COPY):
    """A producer that has begun to make batches of a pool."""
    options = FastLoader(Numbers(), 2, shuffle=False, device=backend)._options
    producer = Producer(options, make_recipe(options), slots_in_copy=slots_in_copy)
    producer.pool = pool
    producer.read([(0, EpochPlan(range(1000), batch_size=2, shuffle=False).batches(0))])
    return producer


def wait_until(condition):
    while not condition():
        time.sleep(0.001)


BY = pytest.mark.parametrize("by_threads", [False, True], ids=["by the loop", "by a thread"])


@BY
@given(
    patience=st.integers(1, 9),
    slots_in_copy=st.integers(1, 4),
    spare=st.integers(0, 3),
    batches=st.integers(0, 12),
    ready=st.lists(st.booleans(), min_size=1, max_size=5),
    stop_after=st.integers(0, 13),
    host_runs_ahead=st.booleans(),
)
def test_batches_are_right_and_every_slot_comes_back_once(
    patience, slots_in_copy, spare, batches, ready, stop_after, host_runs_ahead, by_threads
):
    backend = LateBackend(patience)
    pool = Slots(slots_in_copy + spare, batches, ready, by_threads=by_threads)
    producer = producing(pool, backend, slots_in_copy)
    kept = []
    for number, batch in zip(range(stop_after), producer, strict=False):
        assert batch.number == number
        if not host_runs_ahead:
            backend.compute()
            assert_is_batch(batch.fields, number)
        assert len(pool.slots) - len(pool.free) <= slots_in_copy
        kept.append(batch)
    producer.stop()
    assert len(kept) == min(batches, stop_after)
    assert len(pool.free) == len(pool.slots) and pool.left
    backend.compute()
    for number, batch in enumerate(kept):
        fields = batch.fields
        assert_is_batch(fields, number)
        # What is small is copied out of the copy of the slot; the allocator was told who reads either.
        pieces = [tensor.untyped_storage().data_ptr() for tensor in batch.memory]
        assert [fields[name].untyped_storage().data_ptr() for name in ("images", "labels")] == pieces
        assert set(pieces) <= set(backend.readers)
    assert backend.crossed == pool.made, "one copy a batch"
    producer.close()


@pytest.mark.parametrize("ready", [True, False])
def test_the_next_copy_begins_before_a_batch_is_handed_over_unless_it_is_still_being_read(ready):
    backend = LateBackend(patience=1)
    with closing(producing(Slots(4, 5, [ready]), backend)) as producer:
        seen = weakref.ref(next(producer).memory[0])
        backend.compute()
        # The second batch is begun, and not waited for; of the first one its labels are copied once more.
        assert (backend.crossed, backend.run) == (2 if ready else 1, 2)
        gc.collect()
        assert seen() is None, "a batch let go is freed while the next is not asked for"


def test_a_thread_brings_some_batches_to_the_device_while_nobody_asks_and_no_more():
    backend, pool = LateBackend(patience=1), Slots(6, 20, by_threads=True)
    with closing(producing(pool, backend)) as producer:
        wait_until(lambda: backend.crossed == READY_ON_DEVICE)
        first = next(producer)
        wait_until(lambda: backend.crossed == READY_ON_DEVICE + 1)
        time.sleep(0.02)  # it would begin another by now
        assert backend.crossed == pool.made == READY_ON_DEVICE + 1
        backend.compute()
        assert_is_batch(first.fields, 0)
        seen = weakref.ref(first.memory[0])
        del first
        gc.collect()
        assert seen() is None, "a batch let go is freed while the next is not asked for"
        assert [batch.number for batch in producer] == list(range(1, 20))
    assert not [thread for thread in threading.enumerate() if thread.name == "fastload-device"]


@BY
def test_the_host_waits_for_no_copy_while_slots_are_free(by_threads):
    backend = LateBackend(patience=2)
    pool = Slots(8, 20, [True, False], by_threads=by_threads)
    with closing(producing(pool, backend, slots_in_copy=6 if by_threads else 3)) as producer:
        for number, batch in enumerate(producer):
            backend.compute()
            assert_is_batch(batch.fields, number)
    assert backend.host_waits == 0 and number == 19


@BY
@pytest.mark.parametrize("whole", [True, False])
def test_images_stored_channels_first_are_copied_densely(whole, by_threads):
    backend = LateBackend(patience=1)
    pool = Slots(3, 2, [False], channels_first=True, whole=whole, by_threads=by_threads)
    backend_copy, seen = backend.copy, []

    def copy(host, into=None):
        seen.append(host.is_contiguous())
        return backend_copy(host, into)

    backend.copy = copy
    with closing(producing(pool, backend)) as producer:
        for number, batch in enumerate(producer):
            backend.compute()
            assert_is_batch(batch.fields, number)
    assert number == 1 and seen == [True] * (2 if whole else 4)


@BY
@pytest.mark.parametrize(("fail_at", "error"), [(3, OSError), (None, torch.OutOfMemoryError)])
def test_an_error_of_the_pool_or_of_a_copy_comes_in_its_turn_and_gives_every_slot_back(fail_at, error, by_threads):
    backend = LateBackend(patience=3)
    pool = Slots(4, 9, fail_at=fail_at, whole=False, by_threads=by_threads)
    backend_copy, numbers = backend.copy, []

    def copy(host, into=None):
        if fail_at is None and pool.made == 3 and host.dtype == torch.int64:
            raise torch.OutOfMemoryError("no memory left on the device")
        return backend_copy(host, into)

    backend.copy = copy
    producer = producing(pool, backend)
    with pytest.raises(error):
        for batch in producer:
            numbers.append(batch.number)
    # What comes before an error is handed over; but the loop itself begins a copy ahead of the batch that it returns.
    assert numbers == ([0, 1, 2] if fail_at else [0, 1])
    assert len(pool.out) == 3 and len(pool.free) == 4
    producer.close()


def test_a_batch_that_nobody_makes_is_an_error_after_the_timeout_and_the_pool_is_told():
    backend, pool, numbers = LateBackend(patience=1), Slots(4, 9, hang_at=2, timeout_s=0.2, by_threads=True), []
    producer = producing(pool, backend)
    with pytest.raises(WorkerTimeoutError, match=r"Nobody makes it\."):
        for batch in producer:
            numbers.append(batch.number)
    assert numbers == [0, 1] and pool.left_hanging and len(pool.free) == 4
    producer.close()


def test_a_producer_that_is_dropped_ends_its_thread():
    pool = Slots(4, 9, by_threads=True)
    producer = producing(pool, LateBackend(patience=1))
    next(producer)
    gone = weakref.ref(producer)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "fastload-device"]
    del producer
    wait_until(lambda: gc.collect() is not None and gone() is None)
    thread.join(600)
    assert len(pool.free) == 4


class Arrays(FakePool):
    """On the CPU: arrays that the test made, as tensors."""

    def __init__(self, arrays):
        self.arrays = arrays

    def make(self, work):
        images, labels = self.arrays.pop(0).values()
        work.fields = {"images": torch.from_numpy(images.transpose(0, 3, 1, 2)), "labels": torch.from_numpy(labels)}

    def first(self, run):
        return super().first(run) if self.arrays else None

    def release(self, slot):
        raise AssertionError("on the CPU a slot comes back by its references")

    def depth(self, run):
        raise AssertionError("nothing is copied early")


def test_on_the_cpu_tensors_are_the_arrays_memory_and_nothing_else_keeps_them():
    arrays = [expected(number) for number in range(3)]
    alive = [weakref.ref(fields["images"]) for fields in arrays]
    addresses = [fields["images"].ctypes.data for fields in arrays]
    producer = producing(Arrays(arrays))
    for number in range(3):
        fields = next(producer).fields
        assert fields["images"].data_ptr() == addresses[number]
        assert_is_batch(fields, number)
        held = fields["images"][0, 0]
        del fields
        assert alive[number]() is not None
        del held
        assert alive[number]() is None
    assert list(producer) == []


def test_a_pass_goes_on_with_what_was_made_ahead_of_it_and_else_makes_the_rest():
    class Epochs(FakePool):
        def __init__(self):
            self.begun, self.made = 0, []

        def begin(self, epochs, *, timed):
            self.begun += 1
            return super().begin(epochs, timed=timed)

        def make(self, work):
            self.made.append((work.epoch, work.whole.step))

    options = FastLoader(Numbers(), 2, shuffle=False)._options
    producer, pool = Producer(options, make_recipe(options)), Epochs()
    producer.pool, plan = pool, EpochPlan(range(8), batch_size=2, shuffle=False)

    def take(plan, count):
        producer.begin(plan)
        found = [(work.epoch, work.whole.step) for work in islice(producer, count)]
        producer.end()
        return found

    assert take(plan, 4) == [(0, step) for step in range(4)]
    second = plan.following
    assert take(second, 4) == [(1, step) for step in range(4)] and pool.begun == 1, "one run of both"
    assert take(plan, 1) == [(0, 0)] and pool.begun == 2, "another epoch than the one made ahead"
    # After as many batches twice, no more of an epoch is made, and the next one follows.
    assert take(plan, 1) == [(0, 0)] and pool.begun == 3
    assert take(plan, 1) == [(0, 0)] and pool.begun == 4
    assert take(second, 1) == [(1, 0)] and pool.begun == 4
    # Who goes on beyond gets the rest.
    assert take(second.following, 4) == [(2, step) for step in range(4)] and pool.begun == 5
    producer.close()


WITHOUT = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "torch knows no such device"),
        (3.5, "torch knows no such device"),
        ("meta", "batches go to the CPU or to CUDA"),
        pytest.param("cuda", "device='cuda'.*no CUDA device.*nvidia-smi", marks=WITHOUT),
        pytest.param("cuda:7", "device='cuda:7'.*no CUDA device.*nvidia-smi", marks=WITHOUT),
    ],
)
def test_devices_that_cannot_be_fed_are_refused_and_the_cpu_needs_no_backend(device, message):
    assert open_backend(None) is open_backend("cpu") is open_backend(torch.device("cpu")) is None
    with pytest.raises(OptionError, match=message):
        open_backend(device)
