from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from late_backend import POISON, LateBackend

from fastload.device import open_backend
from fastload.errors import OptionError
from fastload.plan import PlannedBatch
from fastload.prefetch.device_stage import BatchStream, DeviceStage


@dataclass
class Slot:
    ring: Ring
    arrays: dict[str, np.ndarray]
    number: int
    memory: np.ndarray | None
    released: bool = False

    @property
    def planned(self) -> PlannedBatch:
        rows = np.zeros(len(self.arrays["images"]), np.int64)
        return PlannedBatch(rows, np.ones(len(rows), np.bool_), len(rows), self.number)

    def release(self):
        assert not self.released, "a slot was given back twice"
        self.released = True
        for array in self.arrays.values():
            array.view(np.uint8)[...] = POISON
        self.ring.free.append((self.arrays, self.memory))


@dataclass
class Ring(BatchStream):
    """Slots filled one after another with what `expected` gives; `ready` follows a script."""

    backend: LateBackend
    slots: int
    batches: int
    ready_script: list[bool]
    channels_first: bool = False
    whole: bool = True  # whether a slot is one piece of memory
    fail_at: int | None = None
    free: list[dict[str, np.ndarray]] = field(default_factory=list)
    made: int = 0
    out: list[Slot] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self):
        for _ in range(self.slots):
            memory = np.full(2 * 3 * 4 * 5 + 2 * 8, POISON, np.uint8)
            images = memory[: 2 * 3 * 4 * 5]
            images = (
                images.reshape(2, 3, 4, 5).transpose(0, 2, 3, 1) if self.channels_first else images.reshape(2, 4, 5, 3)
            )
            self.free.append(({"images": images, "labels": memory[2 * 3 * 4 * 5 :].view(np.int64)}, memory))

    def __next__(self):
        if self.made == self.batches:
            raise StopIteration
        if self.made == self.fail_at:
            raise OSError("the disk is gone")
        assert self.free, "the stage waits for a slot that it holds itself"
        arrays, memory = self.free.pop(0)
        for name, values in expected(self.made).items():
            arrays[name][...] = values
        self.out.append(Slot(self, arrays, self.made, memory if self.whole else None))
        self.made += 1
        return self.out[-1]

    def ready(self):
        there = self.made < self.batches and self.made != self.fail_at and bool(self.free)
        return there and self.ready_script[self.made % len(self.ready_script)]

    def close(self):
        self.closed = True


def expected(number: int) -> dict[str, np.ndarray]:
    images = np.random.default_rng(number).integers(0, 200, (2, 4, 5, 3), dtype=np.uint8)
    return {"images": images, "labels": np.array([number, -number], dtype=np.int64)}


def assert_is_batch(fields, number):
    values = expected(number)
    assert torch.equal(fields["images"], torch.from_numpy(values["images"]).permute(0, 3, 1, 2))
    assert fields["images"].permute(0, 2, 3, 1).is_contiguous()
    assert fields["labels"].tolist() == values["labels"].tolist()


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
    patience, slots_in_copy, spare, batches, ready, stop_after, host_runs_ahead
):
    backend = LateBackend(patience)
    ring = Ring(backend, slots_in_copy + spare, batches, ready)
    stage = DeviceStage(ring, backend, slots_in_copy=slots_in_copy)
    kept = []
    for number, batch in zip(range(stop_after), stage, strict=False):
        assert batch.source.number == number
        if not host_runs_ahead:
            backend.compute()
            assert_is_batch(batch.fields, number)
        assert sum(not slot.released for slot in ring.out) <= slots_in_copy
        kept.append(batch)
    stage.close()
    assert len(kept) == min(batches, stop_after)
    assert all(slot.released for slot in ring.out) and ring.closed
    backend.compute()
    for number, batch in enumerate(kept):
        fields = batch.fields
        assert_is_batch(fields, number)
        # What is small is copied out of the copy of the slot; the allocator was told who reads either.
        pieces = [tensor.untyped_storage().data_ptr() for tensor in batch.memory]
        assert [fields[name].untyped_storage().data_ptr() for name in ("images", "labels")] == pieces
        assert set(pieces) <= set(backend.readers)
    assert backend.crossed == ring.made, "one copy a batch"


@pytest.mark.parametrize("ready", [True, False])
def test_the_next_copy_begins_before_a_batch_is_handed_over_unless_it_is_still_being_read(ready):
    backend = LateBackend(patience=1)
    stage = DeviceStage(Ring(backend, 4, 5, [ready]), backend)
    seen = weakref.ref(next(stage).memory[0])
    backend.compute()
    # The second batch is begun, and not waited for; of the first one its labels are copied once more.
    assert (backend.crossed, backend.run) == (2 if ready else 1, 2)
    gc.collect()
    assert seen() is None, "a batch let go is freed while the next is not asked for"


def test_the_host_waits_for_no_copy_while_slots_are_free():
    backend = LateBackend(patience=2)
    for number, batch in enumerate(DeviceStage(Ring(backend, 4, 20, [True, False]), backend, slots_in_copy=3)):
        backend.compute()
        assert_is_batch(batch.fields, number)
    assert backend.host_waits == 0


@pytest.mark.parametrize("whole", [True, False])
def test_images_stored_channels_first_are_copied_densely(whole):
    backend = LateBackend(patience=1)
    ring = Ring(backend, 3, 2, [False], channels_first=True, whole=whole)
    backend_copy, seen = backend.copy, []

    def copy(host):
        seen.append(host.is_contiguous())
        return backend_copy(host)

    backend.copy = copy
    for number, batch in enumerate(DeviceStage(ring, backend)):
        backend.compute()
        assert_is_batch(batch.fields, number)
    assert number == 1 and seen == [True] * (2 if whole else 4)


@pytest.mark.parametrize(("fail_at", "error"), [(3, OSError), (None, torch.OutOfMemoryError)])
def test_an_error_of_the_source_or_of_a_copy_gives_every_slot_back(fail_at, error):
    backend = LateBackend(patience=3)
    ring = Ring(backend, 4, 9, [True], fail_at=fail_at, whole=False)
    backend_copy, numbers = backend.copy, []

    def copy(host):
        if fail_at is None and ring.made == 3 and host.dtype == torch.int64:
            raise torch.OutOfMemoryError("no memory left on the device")
        return backend_copy(host)

    backend.copy = copy
    with pytest.raises(error):
        for batch in DeviceStage(ring, backend):
            numbers.append(batch.source.number)
    assert numbers == ([0, 1, 2] if fail_at else [0, 1]), "what comes before an error of the source is handed over"
    assert len(ring.out) == 3 and all(slot.released for slot in ring.out)


@dataclass
class Plain:
    arrays: dict[str, np.ndarray]
    tensors: None = None

    def release(self):
        raise AssertionError("on the CPU a slot comes back by its references")


class OnCPU(list, BatchStream):
    def __next__(self):
        return Plain(self.pop(0))

    def ready(self):
        raise AssertionError("nothing is copied early")

    def close(self):
        self.clear()


def test_on_the_cpu_tensors_are_the_arrays_memory_and_nothing_else_keeps_them():
    arrays = OnCPU(expected(number) for number in range(3))
    alive = [weakref.ref(fields["images"]) for fields in arrays]
    addresses = [fields["images"].ctypes.data for fields in arrays]
    stage = DeviceStage(arrays)
    for number in range(3):
        fields = next(stage).fields
        assert fields["images"].data_ptr() == addresses[number]
        assert_is_batch(fields, number)
        held = fields["images"][0, 0]
        del fields
        assert alive[number]() is not None
        del held
        assert alive[number]() is None


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
