"""Images that keep their own sizes, by each stage that makes them, alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from alone import augmentation, opened, run_alone
from late_backend import Device
from ragged_cases import jpeg_row

from fastload import OptionError, PackedDataset, Pad
from fastload.format.ragged import Column
from fastload.prefetch.loader_plan import BatchForm
from fastload.prefetch.stages.gather import GatherRows, StoreInSlot
from fastload.prefetch.stages.variable_size import (
    DecodeVariableSize,
    JoinPixels,
    PadImages,
    SaySizes,
    SendPixels,
    TransformEach,
    padded,
    padded_by_mask,
    sizes_of,
)
from fastload.prefetch.work import Where
from fastload.transforms import ColorJitter, Draws, RandomCrop, RandomResizedCrop, Resize, apply_transforms
from fastload.transforms.engine.decode_time_resize import find_placed_head
from sample_files import write_packed, write_ragged

N, VOID, ROWS = 12, 255, [7, 3, 10, 3]
FIELDS = ("images", "masks", "boxes", "labels")
CROP, COLOUR = RandomResizedCrop(16), ColorJitter(0.4)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """JPEGs and raw rows, with masks, and boxes that are their images' whole area."""
    rng = np.random.default_rng(2)
    sizes = [(20 + 3 * row, 70 - 4 * row) for row in range(N)]
    rows = [
        jpeg_row(*size, seed=row) if row % 2 else rng.integers(0, 256, (*size, 3), np.uint8)
        for row, size in enumerate(sizes)
    ]
    masks = [rng.integers(0, 9, size, np.uint8) for size in sizes]
    boxes = np.array([[0, 0, width, height] for height, width in sizes], np.int16)[:, None]
    columns = {
        "boxes": Column(boxes, {"names": ("xmin", "ymin", "xmax", "ymax")}),
        "labels": Column(np.arange(N)),
    }
    return write_ragged(tmp_path_factory.mktemp("own") / "a.h5", rows, columns, masks=masks, ignore_index=VOID)


def as_they_are(file, rows=ROWS):
    dataset = PackedDataset(file, fields=FIELDS)
    return [dict(zip(FIELDS, dataset[row], strict=True)) for row in rows]


def decoded(file, transforms=(), rows=ROWS, *, leaves=False, behind=(), form="list", **options):
    """The work of a batch behind its decoding, and other stages if `behind` gives them."""
    with opened(PackedDataset(file, fields=FIELDS), batch=form, **options) as shared:
        data = shared.options.packed
        head = find_placed_head(tuple(transforms), 3, torch.uint8, name="it")
        every = augmentation(shared, transforms, head.count)
        gather = GatherRows(data.dataset, ["boxes", "labels"], into_slot=False)
        stage = DecodeVariableSize(data, every, head, leaves=leaves)
        more = behind(data, every) if callable(behind) else behind
        work = run_alone(shared, [gather, stage, *more], rows)
        if shared.options.backend is not None:
            shared.options.backend.drain()
        return work


def assert_is(found, expected):
    assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_images_and_masks_are_decoded_each_in_its_size_beside_the_slot(file):
    work = decoded(file)
    assert set(work.arrays) == {"boxes", "labels"}
    for at, sample in enumerate(as_they_are(file)):
        for name in ("images", "masks"):
            assert_is(work.fields[name][at], sample[name])
        assert_is(work.fields["boxes"][at], sample["boxes"])
    assert work.bytes_read > 0


def test_images_of_one_size_that_are_no_ragged_rows_are_read_too(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (N, 9, 7, 3), np.uint8)
    path = write_packed(tmp_path / "a.h5", pixels, {"labels": Column(np.arange(N))}, masks=pixels[..., 0] // 32)
    with opened(PackedDataset(path, fields=["images", "masks"]), batch="list") as shared:
        data = shared.options.packed
        head = find_placed_head((), 3, torch.uint8, name="it")
        work = run_alone(shared, [DecodeVariableSize(data, augmentation(shared, ()), head, leaves=False)], ROWS)
    for at, row in enumerate(ROWS):
        assert_is(work.fields["images"][at], torch.from_numpy(pixels[row]).permute(2, 0, 1))
        assert_is(work.fields["masks"][at], torch.from_numpy(pixels[row, ..., 0] // 32))


def test_the_first_crop_is_placed_while_they_are_decoded_and_masks_and_boxes_move_with_it(file):
    work = decoded(file, [CROP])
    for at, (row, sample) in enumerate(zip(ROWS, as_they_are(file), strict=True)):
        assert work.fields["images"][at].shape == (3, 16, 16) and work.fields["masks"][at].shape == (16, 16)
        if row % 2 == 0:  # JPEGs may be decoded smaller, whose windows are whole pixels of that
            one = {"images": sample["images"][None], "masks": sample["masks"][None], "boxes": sample["boxes"][None]}
            with opened(PackedDataset(file, fields=FIELDS), batch="list") as shared:
                coordinates = shared.options.packed.dataset.coordinates()
            right = apply_transforms([CROP], one, Draws(0, 0, np.array([row])), coordinates=coordinates)
            assert (work.fields["images"][at].int() - right["images"][0].int()).abs().max() <= 1
            assert torch.equal(work.fields["masks"][at], right["masks"][0])
            assert torch.allclose(work.fields["boxes"][at], right["boxes"][0], atol=1e-4)
    assert work.fields["boxes"].dtype == torch.float32 and work.arrays["boxes"].dtype == np.float32


def test_memory_of_a_thread_is_used_again_only_where_images_leave_it(file):
    def addresses(leaves):
        with opened(PackedDataset(file, fields=FIELDS), batch="list") as shared:
            data = shared.options.packed
            head = find_placed_head((), 3, torch.uint8, name="it")
            stage = DecodeVariableSize(data, augmentation(shared, ()), head, leaves=leaves)
            gather = GatherRows(data.dataset, ["boxes", "labels"], into_slot=False)
            kept = [run_alone(shared, [gather, stage], rows).fields["images"] for rows in (ROWS, ROWS[:2])]
            return [images[0].data_ptr() for images in kept]

    assert len(set(addresses(True))) == 1 and len(set(addresses(False))) == 2


def test_an_image_that_does_not_fit_its_crop_is_named(file):
    with pytest.raises(OptionError, match=r"\(row 11\)"):
        decoded(file, [RandomCrop(40)], [7, 11])


def test_each_sample_is_transformed_by_itself_by_its_row(file):
    def behind(data, every):
        return [TransformEach(data, every, Where.THREAD)]

    head = [Resize(24)]
    work = decoded(file, [*head, COLOUR], behind=behind)
    plain = decoded(file, head)
    for at, row in enumerate(ROWS):
        one = {name: plain.fields[name][at][None] for name in ("images", "masks")}
        right = apply_transforms([*head, COLOUR], one, Draws(0, 0, np.array([row])), done=1)
        assert torch.equal(work.fields["images"][at], right["images"][0])
        assert torch.equal(work.fields["masks"][at], right["masks"][0])
        assert not torch.equal(work.fields["images"][at], plain.fields["images"][at])
    with pytest.raises(OptionError, match=r"\(row 11\), an image of 53x26"):
        decoded(file, [COLOUR, RandomCrop(40)], [11], behind=behind)


def test_padded_samples_lie_at_the_top_left_with_masks_that_count_for_nothing_around(file):
    work = decoded(
        file, form=Pad(16), leaves=True,
        behind=lambda data, every: [PadImages(BatchForm("pad", 16), VOID, Where.THREAD)],
    )  # fmt: skip
    images, masks, samples = work.fields["images"], work.fields["masks"], as_they_are(file)
    sizes = [tuple(sample["masks"].shape) for sample in samples]
    assert images.shape == (4, 3, 64, 64) and masks.shape == (4, 64, 64), "multiples of 16"
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert work.facts["sizes"].tolist() == [list(size) for size in sizes]
    for at, (height, width) in enumerate(sizes):
        assert torch.equal(images[at, :, :height, :width], samples[at]["images"])
        assert torch.equal(masks[at, :height, :width], samples[at]["masks"])
        assert int(images[at].count_nonzero()) == int(samples[at]["images"].count_nonzero())
        assert int((masks[at] == VOID).sum()) == 64 * 64 - height * width


def test_pixels_go_beside_the_fields_of_the_slot_and_join_them_for_each_use(file):
    work = decoded(file, behind=[StoreInSlot()])
    assert not work.fields and set(work.arrays) == {"boxes", "labels"} and set(work.extra) == {"images", "masks"}
    for echo in range(2):
        used = work.for_use(echo, last=echo == 1)
        JoinPixels().run(used)
        assert set(used.fields) == {"images", "masks"} and not used.extra
        assert used is work or set(work.extra) == {"images", "masks"}, "the next use finds them"


def test_sizes_of_padded_ones_go_along_and_become_facts_of_the_batch(file):
    work = decoded(
        file, form=Pad(), behind=lambda data, every: [PadImages(BatchForm("pad"), VOID, Where.THREAD), StoreInSlot()]
    )
    used = work.for_use(0, last=True)
    JoinPixels().run(used)
    SaySizes(BatchForm("pad")).run(used)
    sizes = [list(sample["masks"].shape) for sample in as_they_are(file)]
    assert used.facts["sizes"]().tolist() == sizes
    inside = used.facts["pixel_mask"]()
    assert inside.dtype == torch.bool and inside.shape == used.fields["masks"].shape
    assert [int(one.sum()) for one in inside] == [height * width for height, width in sizes]
    assert all(one[:height, :width].all() for one, (height, width) in zip(inside, sizes, strict=True))


@pytest.mark.parametrize("last", [True, False])
def test_images_of_a_list_that_are_used_again_get_memory_of_their_own(file, last):
    work = decoded(file, behind=[StoreInSlot()])
    before, used = dict(work.extra), work.for_use(0, last=last)
    JoinPixels().run(used)
    SaySizes(BatchForm("list")).run(used)
    assert used.facts["sizes"]().tolist() == sizes_of(before["images"]).tolist() and "pixel_mask" not in used.facts
    for name in ("images", "masks"):
        for new, old in zip(used.fields[name], before[name], strict=True):
            assert torch.equal(new, old) and (new.data_ptr() == old.data_ptr()) == last


def test_pixels_are_sent_to_the_device_each_field_in_one_piece(file):
    backend = Device()
    work = decoded(file, behind=[SendPixels(None, VOID), StoreInSlot()], device=backend, leaves=True)
    for name in ("images", "masks"):
        sent = work.extra[name]
        assert len({one.untyped_storage().data_ptr() for one in sent}) == 1
        for one, sample in zip(sent, as_they_are(file), strict=True):
            assert_is(one, sample[name])
    assert backend.pinned == 0, "given back when what the stages share was closed"


def test_pixels_that_no_transform_changes_there_are_padded_on_their_way(file):
    form, backend = BatchForm("pad", 16), Device()
    work = decoded(file, form=Pad(16), behind=[SendPixels(form, VOID), StoreInSlot()], device=backend, leaves=True)
    here = decoded(file, form=Pad(16), behind=[PadImages(form, VOID, Where.THREAD)])
    for name in ("images", "masks"):
        assert_is(work.extra[name], here.fields[name])
    assert work.extra["images"].is_contiguous(memory_format=torch.channels_last)
    assert work.facts["sizes"].tolist() == here.facts["sizes"].tolist() and backend.pinned == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.float32])
@pytest.mark.parametrize("multiple", [1, 8])
def test_a_device_pads_a_batch_in_some_launches_as_the_cpu_does_sample_by_sample(dtype, multiple):
    form, generator = BatchForm("pad", multiple), torch.Generator().manual_seed(0)
    sizes = [(3, 9), (11, 2), (5, 5), (1, 1)]
    images = [torch.randint(0, 256, (3, *size), generator=generator).to(dtype) for size in sizes]
    pixels = {"images": images, "masks": [torch.randint(0, 9, size, generator=generator).byte() for size in sizes]}
    right = padded(pixels, form, VOID)
    for name, found in padded_by_mask(pixels, form, VOID).items():
        assert found.shape == right[name].shape and found.dtype == right[name].dtype
        assert found.stride() == right[name].stride()
        assert torch.equal(found.float(), right[name].float()), name
