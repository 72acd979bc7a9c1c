"""Batches of images of their own sizes: as lists, padded, and with images of like shape together."""

from __future__ import annotations

import functools
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from late_backend import Device
from PIL import Image

from fastload import FastLoader, List, OptionError, PackedDataset, Pad
from fastload.format.ragged import Column
from fastload.transforms import (
    ColorJitter,
    Draws,
    MixUp,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    apply_transforms,
)
from fastload.transforms.boxes_and_points import coordinates_of
from sample_files import write_ragged

ROWS = 26
FIELDS = ("images", "masks", "boxes", "num_boxes", "row")
VOID = 255


def pixels_of(row: int) -> np.ndarray:
    rng = np.random.default_rng(row)
    height, width = rng.integers(20, 90, 2).tolist()
    small = rng.integers(0, 256, (5, 5, 3), np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def jpeg(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=92)
    return file.getvalue()


def columns(images: list[np.ndarray]) -> dict[str, Column]:
    boxes = np.zeros((len(images), 3, 4), np.float32)
    counts = np.arange(len(images)) % 3 + 1
    for row, image in enumerate(images):
        height, width = image.shape[:2]
        boxes[row, : counts[row]] = [2, 3, width - 5, height - 4]
    return {
        "boxes": Column(boxes, {"names": ("x", "y", "width", "height")}),
        "num_boxes": Column(counts),
        "labels": Column(np.arange(len(images)) % 4),
    }


@pytest.fixture(scope="module")
def images() -> list[np.ndarray]:
    return [pixels_of(row) for row in range(ROWS)]


@pytest.fixture(scope="module")
def raw(images, tmp_path_factory) -> Path:
    masks = [image[..., 0] // 64 for image in images]
    path = tmp_path_factory.mktemp("own") / "raw.h5"
    return write_ragged(path, images, columns(images), masks=masks, chunk_bytes=60_000, ignore_index=VOID)


@pytest.fixture(scope="module")
def stored(images, tmp_path_factory) -> Path:
    rows = [image if row % 5 == 0 else (jpeg(image), image.shape, 1) for row, image in enumerate(images)]
    masks = [image[..., 0] // 64 for image in images]
    return write_ragged(
        tmp_path_factory.mktemp("own") / "jpeg.h5", rows, columns(images), masks=masks, ignore_index=VOID
    )


@functools.cache
def dataset(path: Path, fields: tuple[str, ...] = FIELDS) -> PackedDataset:
    return PackedDataset(path, fields=fields)


def samples(batches) -> dict[int, list[torch.Tensor]]:
    """The samples of batches by row, each as the list of its fields."""
    found = {}
    for batch in batches:
        for at, row in enumerate(batch.rows.tolist()):
            if batch.valid[at]:
                found[row] = [field[at].clone() for field in batch]
    return found


def test_a_list_holds_each_sample_as_the_file_has_it(stored):
    for shuffle in (False, True):
        batches = list(FastLoader(dataset(stored), 4, shuffle=shuffle, ends="exact", batch="list"))
        found = samples(batches)
        assert sorted(found) == list(range(ROWS))
        for row, sample in found.items():
            for value, expected in zip(sample, dataset(stored)[row], strict=True):
                assert value.dtype == expected.dtype and torch.equal(value, expected)
    assert isinstance(batches[0][0], list) and batches[0][2].shape == (4, 3, 4)
    assert batches[0].sizes.tolist() == [list(image.shape[1:]) for image in batches[0][0]]


def test_padded_ones_are_those_of_a_list_with_zeros_around(stored):
    together = [list(FastLoader(dataset(stored), 4, ends="exact", batch=batch)) for batch in (List(), Pad(multiple=16))]
    for listed, padded in zip(*together, strict=True):
        images, masks = padded[0], padded[1]
        height, width = (-(-side // 16) * 16 for side in listed.sizes.amax(0).tolist())
        assert images.shape == (len(listed.rows), 3, height, width) and masks.shape == (len(images), height, width)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(padded.sizes, listed.sizes) and torch.equal(padded.rows, listed.rows)
        for at, (h, w) in enumerate(listed.sizes.tolist()):
            assert torch.equal(images[at, :, :h, :w], listed[0][at])
            assert torch.equal(masks[at, :h, :w], listed[1][at])
            assert padded.pixel_mask[at].sum() == h * w and padded.pixel_mask[at, :h, :w].all()
        outside = ~padded.pixel_mask
        assert not images.permute(0, 2, 3, 1)[outside].any() and (masks[outside] == VOID).all()
        assert torch.equal(padded[2], listed[2])


TRANSFORMS = {
    "none": [],
    "resize": [Resize(32, max_size=48), RandomHorizontalFlip()],
    "colour": [RandomHorizontalFlip(), ColorJitter(0.4), Normalize([0.5] * 3, [0.2] * 3)],
    "crop and back": [RandomResizedCrop(18), Resize(30)],
    "padding": [RandomCrop(95, pad_if_needed=True), RandomHorizontalFlip()],
    "function": [RandomHorizontalFlip(), lambda images: images.float() / 255],
}  # fmt: skip


def by_itself(path: Path, row: int, transform: list[object], epoch: int = 0, echo: int = 0) -> list[torch.Tensor]:
    """A sample as a batch of its own, decoded whole."""
    fields = dict(zip(FIELDS, dataset(path)[row], strict=True))
    known = {"boxes": coordinates_of("boxes", (3, 4), ("x", "y", "width", "height"))}
    draws = Draws(0, epoch, np.array([row]), echo)
    made = apply_transforms(
        transform, {name: value[None] for name, value in fields.items()}, draws, ignore_index=VOID, coordinates=known
    )
    return [made[name][0] for name in FIELDS]


CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("on", ["cpu", "device", pytest.param("cuda", marks=CUDA)])
@pytest.mark.parametrize("form", ["list", "pad"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_each_image_is_transformed_by_itself(raw, name, form, on):
    options = {"cpu": {}, "device": {"device": Device()}, "cuda": {"device": "cuda"}}[on]
    loader = FastLoader(dataset(raw), 4, ends="exact", batch=form, transform=TRANSFORMS[name], **options)
    for batch in loader:
        for at, row in enumerate(batch.rows.tolist()):
            expected = by_itself(raw, row, TRANSFORMS[name])
            height, width = expected[0].shape[1:]
            assert batch.sizes[at].tolist() == [height, width]
            image, mask = batch[0][at][:, :height, :width], batch[1][at][:height, :width]
            image, mask = image.cpu(), mask.cpu()
            assert image.dtype == expected[0].dtype
            # Rounded after each axis where height is lost; a float image is normalized.
            assert (image.float() - expected[0].float()).abs().max() <= (1 if image.dtype == torch.uint8 else 0.05)
            assert torch.equal(mask, expected[1])
            assert torch.allclose(batch[2][at].cpu().float(), expected[2].float(), atol=1e-3)


def test_what_is_decoded_smaller_is_close_and_boxes_and_masks_follow(stored, raw):
    transform = [Resize(10), RandomHorizontalFlip()]
    found, exact = (
        samples(FastLoader(dataset(path), 4, ends="exact", batch="list", transform=transform)) for path in (stored, raw)
    )
    for row, (image, mask, boxes, *_) in found.items():
        assert image.shape == exact[row][0].shape and mask.shape == image.shape[1:]
        assert (image.float() - exact[row][0].float()).abs().mean() < 12
        assert (boxes - exact[row][2]).abs().max() <= 1.5


@pytest.mark.parametrize("form", ["list", "pad"])
def test_each_echo_is_augmented_anew_and_belongs_to_the_user(raw, form):
    transform = [RandomResizedCrop(18), Resize(30), RandomHorizontalFlip()]
    loader = FastLoader(dataset(raw), 4, shuffle=False, ends="exact", batch=form, transform=transform, echo=2)
    for step, batch in enumerate(loader):
        for at, row in enumerate(batch.rows.tolist()):
            assert torch.equal(batch[0][at], by_itself(raw, row, transform, echo=step % 2)[0])
            batch[0][at].zero_()
    untouched = FastLoader(dataset(raw), 4, shuffle=False, ends="exact", batch=form, echo=2)
    for batch in untouched:
        for at, (height, width) in enumerate(batch.sizes.tolist()):
            assert batch[0][at][:, :height, :width].any()
            batch[0][at].zero_()


def test_rows_of_one_size_and_a_mask_of_pixels_as_a_field(tmp_path, images):
    path = write_ragged(tmp_path / "one.h5", [image[:20, :20] for image in images], columns(images))
    batch = next(iter(FastLoader(path, 5, shuffle=False, batch=Pad(multiple=32))))
    assert batch[0].shape == (5, 3, 32, 32) and torch.equal(batch[0][0, :, :20, :20], PackedDataset(path)[0][0])
    asked = PackedDataset(path, fields=("images", "pixel_mask", "valid"))
    assert asked[3][1].all() and asked[3][1].shape == (20, 20)
    batch = next(iter(FastLoader(asked, 5, shuffle=False, batch=Pad(multiple=32))))
    assert torch.equal(batch[1], batch.pixel_mask) and batch[1].sum() == 5 * 400


def test_images_of_a_batch_kept_by_the_user_stay_as_they_are(stored):
    kept = [batch[0] for batch in FastLoader(dataset(stored), 4, shuffle=False, ends="exact", batch="list", workers=2)]
    for step, batch in enumerate(kept):
        for at, image in enumerate(batch[: ROWS - 4 * step]):
            assert torch.equal(image, dataset(stored)[4 * step + at][0])


def test_a_grouped_epoch_is_resumed_and_other_orders_are_refused(stored):
    def make(group_by="aspect"):
        return FastLoader(dataset(stored), 4, ends="exact", batch=Pad(group_by=group_by))

    whole = [batch.rows.tolist() for batch in make()]
    loader = make()
    batches = iter(loader)
    begun = [next(batches).rows.tolist() for _ in range(3)]
    state = loader.state_dict()
    again = make()
    again.load_state_dict(state)
    assert begun + [batch.rows.tolist() for batch in again] == whole
    with pytest.raises(Exception, match="group_by is None here and 'aspect' in the state"):
        make(group_by=None).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": Pad(group_by="aspect"), "shuffle": False}, "shuffled"),
        ({"batch": "list", "cache": "device", "device": Device()}, "one size"),
        ({"batch": "pad", "transform": [MixUp(num_classes=4)]}, "MixUp mixes images of one size"),
        ({"batch": "list", "transform": [RandomCrop(60)]}, "smaller than the window"),
    ],
)
def test_options_without_meaning(stored, options, said):
    with pytest.raises(OptionError, match=said):
        for _ in FastLoader(dataset(stored, ("images", "labels")), 4, **options):
            pass


@pytest.mark.parametrize(
    ("form", "options", "said"),
    [
        (Pad, {"multiple": 0}, "multiple=0: give a whole number"),
        (Pad, {"multiple": 10**6}, r"Pad\(multiple=1000000\): .*no network asks for over 4096"),
        (Pad, {"group_by": "size"}, "group_by='size' is not known; accepted: aspect, None"),
        (List, {"group_by": "size"}, "group_by='size' is not known; accepted: aspect, None"),
    ],
)
def test_forms_of_batches_without_meaning(form, options, said):
    with pytest.raises(OptionError, match=said):
        form(**options)


def test_other_data_and_small_images_are_named(stored):
    with pytest.raises(OptionError, match="made by Python code"):
        FastLoader(PackedDataset(stored, transform=lambda sample: sample), 4, batch="list")
    with pytest.raises(OptionError, match="no others to be like"):
        FastLoader(stored, 1, batch=Pad(group_by="aspect"))
    with pytest.raises(OptionError, match="padded batches"):
        FastLoader(PackedDataset(stored, fields=("images", "pixel_mask")), 2)
    with pytest.raises(OptionError, match="add images"):
        PackedDataset(stored, fields=("labels", "pixel_mask"))
    with pytest.raises(AttributeError, match="batch='pad'"):
        _ = next(iter(FastLoader(stored, 2, batch="list"))).pixel_mask
