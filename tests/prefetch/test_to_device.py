"""The copy of a slot to a device, run alone. The device copies when it is told to; its memory is garbage until then."""

from __future__ import annotations

import gc
import weakref

import h5py
import numpy as np
import pytest
import torch
from alone import augmentation, opened, run_alone
from late_backend import NOT_YET_COPIED, LateBackend

from fastload import PackedDataset
from fastload.format.ragged import Column
from fastload.prefetch.stages.gather import GatherRows, WriteFacts
from fastload.prefetch.stages.to_device import CopySlot
from fastload.prefetch.stages.transform import DrawNumbers
from fastload.prefetch.work import TRANSFORM_PARAMETERS
from fastload.transforms import ImageSpec, RandomHorizontalFlip
from fastload.transforms.engine.placement import PlacedImages, windows
from sample_files import write_packed

N, ROWS = 20, [7, 3, 19, 3]


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(1).integers(0, 256, (N, 9, 7, 3), np.uint8)


@pytest.fixture(scope="module")
def files(images, tmp_path_factory):
    """Of images (H, W, C) with labels of 64 and 16 bits, and of others (C, H, W) or without channels."""
    folder = tmp_path_factory.mktemp("files")
    made = {
        dtype: write_packed(folder / f"{dtype}.h5", images, {"labels": Column(np.arange(N, dtype=dtype))})
        for dtype in ("int64", "int16")
    }
    for name, array in (("planar", images.transpose(0, 3, 1, 2)), ("gray", images[..., 0])):
        made[name] = folder / f"{name}.h5"
        with h5py.File(made[name], "w") as file:
            file["images"] = array
    return made


def copied(path, rows=ROWS, *, fields=None, prepare=lambda work: None):
    """The work of a batch behind its copy, and the device, which has copied nothing yet."""
    backend = LateBackend(patience=1)
    with opened(PackedDataset(path, fields=fields), device=backend) as shared:
        dataset = shared.options.packed.dataset
        names = [name for name, _, _ in dataset.layout()]
        stages = [
            WriteFacts(),
            GatherRows(dataset, names, into_slot=True),
            CopySlot(backend, dataset.file, again=False),
        ]
        work = run_alone(shared, stages, rows, prepare=prepare)
        assert {one.untyped_storage().data_ptr() for one in work.fields.values()} <= {
            one.untyped_storage().data_ptr() for one in work.memory
        }, "the allocator is told of all memory that the loop reads"
        return work, backend


def test_a_slot_crosses_in_one_copy_and_images_are_a_view_of_it(files, images):
    work, backend = copied(files["int64"])
    assert backend.crossed == 1
    found = work.fields["images"]
    assert (found == NOT_YET_COPIED).all(), "nothing has waited for the copy"
    assert found.untyped_storage().nbytes() == work.slot.memory.nbytes
    backend.drain()
    assert torch.equal(found, torch.from_numpy(images[ROWS]).permute(0, 3, 1, 2))
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert work.fields["labels"].tolist() == work.fields["row"].tolist() == ROWS and work.fields["valid"].all()
    assert work.fields["labels"].untyped_storage().nbytes() < 4096 * 2, "who keeps labels does not keep images"


def test_each_field_is_a_tensor_by_itself_for_autograd(files):
    work, backend = copied(files["int64"])
    backend.drain()
    versions = {name: tensor._version for name, tensor in work.fields.items()}
    work.fields["labels"].add_(1)
    assert {name for name, tensor in work.fields.items() if tensor._version != versions[name]} == {"labels"}


def test_labels_that_are_widened_cross_by_themselves(files):
    work, backend = copied(files["int16"])
    assert backend.crossed == 2
    backend.drain()
    assert work.fields["labels"].dtype == torch.int64 and work.fields["labels"].tolist() == ROWS


@pytest.mark.parametrize("kind", ["planar", "gray"])
def test_images_of_other_axes_cross_as_they_are_stored_and_are_turned_there(files, images, kind):
    work, backend = copied(files[kind])
    assert backend.crossed == 1
    backend.drain()
    right = images[ROWS] if kind == "planar" else images[ROWS][..., :1]
    found = work.fields["images"]
    assert torch.equal(found, torch.from_numpy(right).permute(0, 3, 1, 2))
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_a_short_batch_crosses_with_its_whole_slot_and_is_cut_there(files, images):
    def shortened(work):
        work.plan(0, [work.whole.part(slice(0, 3))])
        work.in_slot()

    work, backend = copied(files["int64"], prepare=shortened)
    backend.drain()
    assert torch.equal(work.fields["images"], torch.from_numpy(images[ROWS[:3]]).permute(0, 3, 1, 2))
    assert work.fields["row"].tolist() == ROWS[:3] and len(work.fields["valid"]) == 3
    assert backend.crossed == 1 and work.memory[0].nbytes == work.slot.memory.nbytes


@pytest.mark.parametrize("planar", [True, False])
def test_what_does_not_lie_in_a_slot_is_copied_array_by_array_and_densely(images, planar):
    backend = LateBackend(patience=1)
    seen, copy = [], backend.copy
    backend.copy = lambda host: seen.append(host.is_contiguous()) or copy(host)

    def apart(work):
        given = images[ROWS].transpose(0, 3, 1, 2).copy().transpose(0, 2, 3, 1) if planar else images[ROWS]
        work.arrays, work.in_one_piece = {"images": given, "labels": np.arange(8)[::2]}, False

    with opened(torch.utils.data.TensorDataset(torch.arange(9)), device=backend) as shared:
        work = run_alone(shared, [CopySlot(backend, None, again=False)], ROWS, prepare=apart)
    backend.drain()
    assert seen == [True, True] and work.fields["labels"].tolist() == [0, 2, 4, 6]
    assert torch.equal(work.fields["images"], torch.from_numpy(images[ROWS]).permute(0, 3, 1, 2))
    assert work.fields["images"].is_contiguous(memory_format=torch.channels_last)


def test_numbers_that_were_drawn_cross_with_the_slot_and_stay_within_the_loader(files):
    backend = LateBackend(patience=1)
    with opened(files["int64"], device=backend, transform=[RandomHorizontalFlip()]) as shared:
        dataset = shared.options.packed.dataset
        draw = DrawNumbers(augmentation(shared, [RandomHorizontalFlip()]), 1, ImageSpec(3, 9, 7, torch.uint8))
        stages = [WriteFacts(), GatherRows(dataset, ["images", "labels"], into_slot=True), draw]
        work = run_alone(shared, [*stages, CopySlot(backend, dataset.file, again=False)], ROWS)
    backend.drain()
    assert TRANSFORM_PARAMETERS not in work.fields and backend.crossed == 1
    assert torch.equal(work.inner[TRANSFORM_PARAMETERS], torch.from_numpy(work.slot.arrays[TRANSFORM_PARAMETERS]))


def test_for_kernels_of_the_side_stream_all_slots_are_copied_to_the_same_memory(files, images):
    backend = LateBackend(patience=1)
    with opened(files["int64"], device=backend) as shared:
        dataset = shared.options.packed.dataset
        copy = CopySlot(backend, dataset.file, again=True)
        stages = [WriteFacts(), GatherRows(dataset, ["images", "labels"], into_slot=True), copy]
        first = run_alone(shared, stages, ROWS)
        backend.drain()
        assert torch.equal(first.fields["images"], torch.from_numpy(images[ROWS]).permute(0, 3, 1, 2))
        second = run_alone(shared, stages, ROWS[::-1])
        backend.drain()
    assert first.raw is second.raw and first.fields["images"].data_ptr() == second.fields["images"].data_ptr()
    assert not any(one is first.raw for one in first.memory), "the loop's stream does not read it"
    assert torch.equal(first.fields["images"], torch.from_numpy(images[ROWS[::-1]]).permute(0, 3, 1, 2))
    assert (first.fields["labels"].tolist(), second.fields["labels"].tolist()) == (ROWS, ROWS[::-1])
    held = weakref.ref(first.raw)
    copy.close()
    del first, second
    gc.collect()
    assert held() is None


def test_what_is_on_the_device_already_is_not_copied_and_not_freed_before_it_is_used(files):
    there, layout, listed = torch.zeros(9), torch.zeros(3), [torch.zeros(2), torch.zeros(2)]
    placement = windows(np.zeros((1, 2), np.int64), np.ones((1, 2), np.int64))

    def prepare(work):
        work.extra = {"images": PlacedImages(there, layout, np.ones((1, 2), np.int64), 1, placement), "masks": listed}

    work, _ = copied(files["int64"], fields=["labels"], prepare=prepare)
    assert any(one is there for one in work.memory) and any(one is layout for one in work.memory)
    assert any(one is listed[0] for one in work.memory) and not any(one is listed[1] for one in work.memory)
    assert set(work.extra) == {"images", "masks"} and "images" not in work.fields
