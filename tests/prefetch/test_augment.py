"""What the threads make of a batch is what its transforms make of its rows, whoever reads, and however many."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import h5py
import numpy as np
import pytest
import torch

from fastload.dataset import PackedDataset
from fastload.errors import OptionError
from fastload.format.ragged import Column
from fastload.loader.loader import FastLoader
from fastload.prefetch.work import Where
from fastload.read.reader import Rows
from fastload.system.threads import SWITCH_INTERVAL_S
from fastload.transforms import (
    CenterCrop,
    ColorJitter,
    CutMix,
    Draws,
    Grayscale,
    MixUp,
    Normalize,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    apply_transforms,
)
from fastload.transforms.boxes_and_points import Coordinates
from sample_files import write_packed

N, SHAPE = 50, (30, 26, 3)
PACKED = {
    "rows": N,
    "size": SHAPE,
    "seed": 5,
    "classes": "abcdefg",
    "columns": {
        "bbox": Column(np.tile(np.array([[3, 4, 10, 12]], np.int32), (N, 1)), {"names": ("x", "y", "width", "height")}),
        "landmarks": Column(np.tile(np.array([[5, 6, 20, 9]], np.int32), (N, 1)), {"coordinates": "aligned"}),
        "origin": Column(np.arange(N, dtype=np.int32)),
    },
    "masks": True,
    "chunk_rows": 8,
}
NORMALIZE = Normalize([0.5, 0.4, 0.3], [0.2, 0.25, 0.3])
HALF = Normalize([0.5, 0.4, 0.3], [0.2, 0.25, 0.3], dtype=torch.bfloat16)

PIPELINES = {
    "resized crop": [RandomResizedCrop(20), RandomHorizontalFlip()],
    "imagenet": [RandomResizedCrop((20, 17)), RandomHorizontalFlip(), ColorJitter(0.3, 0.3, 0.3, 0.1), NORMALIZE],
    "bfloat16": [Resize(28), RandomCrop(24), RandomVerticalFlip(), HALF],
    "padded": [RandomCrop(26, padding=4, fill=(9, 8, 7)), RandomHorizontalFlip(), NORMALIZE],
    "erased": [CenterCrop(24), RandomErasing(p=1), NORMALIZE],
    "random pixels": [RandomErasing(p=1, value="random")],
    "gray": [Grayscale(1), RandomHorizontalFlip(), Normalize([0.5], [0.25])],
    "policy": [RandAugment(), NORMALIZE],
    "only normalized": [NORMALIZE],
    "resized twice": [Resize(40), RandomResizedCrop(20)],
}


def by_hand(packed, transforms, batch, *, epoch=0, step=0, echo=0, names=("images", "labels"), coordinates=None):
    """The transforms on the rows of a batch, taken out of the file."""
    rows = batch.rows.numpy()
    with h5py.File(packed) as file:
        fields = {name: torch.from_numpy(file[name][()][rows]) for name in names}
    fields["images"] = fields["images"].permute(0, 3, 1, 2)
    draws, of_batch = Draws(3, epoch, rows, echo), Draws.of_batch(3, epoch, step, 0, echo)
    return apply_transforms(transforms, fields, draws, batch_draws=of_batch, coordinates=coordinates)


@pytest.mark.parametrize("read", ["map", "pread"])
@pytest.mark.parametrize("name", PIPELINES)
def test_threads_augment_as_the_transforms_do(packed, name, read):
    transforms = PIPELINES[name]
    loader = FastLoader(PackedDataset(packed, read=read), 8, seed=3, transform=transforms)
    assert not loader._recipe.at(Where.USE)
    for epoch in range(2):
        for step, batch in enumerate(loader):
            expected = by_hand(packed, transforms, batch, epoch=epoch, step=step)
            images, labels = batch
            assert images.dtype == expected["images"].dtype and labels.dtype == torch.int64
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(images, expected["images"]) and torch.equal(labels, expected["labels"])
        assert step == 5


@pytest.mark.parametrize("transforms", [PIPELINES["imagenet"], [*PIPELINES["resized crop"], MixUp(num_classes=7)]])
def test_a_batch_does_not_depend_on_who_augments_it(packed, transforms):
    def batches(**options):
        return [(images.clone(), labels.clone()) for images, labels in FastLoader(packed, 8, seed=3, **options)]

    threads = batches(transform=transforms, workers=1)
    for others in (
        batches(transform=transforms, workers=3),
        batches(transform=transforms, echo=2)[::2],  # in the main thread, at the hand-over
        batches(transform=[*transforms, lambda images: images]),  # a function of the user's: there as well
    ):
        assert len(threads) == len(others)
        for here, there in zip(threads, others, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))


@pytest.mark.parametrize("mix", [MixUp(num_classes=7), CutMix(num_classes=7)])
@pytest.mark.parametrize("place", ["before", "after"])
def test_mixed_batches_come_out_of_the_threads_with_soft_labels(packed, mix, place):
    transforms = [RandomHorizontalFlip(), *([mix, NORMALIZE] if place == "before" else [NORMALIZE, mix])]
    loader = FastLoader(packed, 8, seed=3, transform=transforms)
    for step, batch in enumerate(loader):
        expected = by_hand(packed, transforms, batch, step=step)
        assert torch.equal(batch[0], expected["images"]) and torch.equal(batch[1], expected["labels"])
        assert batch[1].shape == (8, 7) and torch.allclose(batch[1].sum(1), torch.ones(8))
    assert step == 5


def test_masks_boxes_and_points_follow_the_pixels(packed):
    names = ("images", "masks", "bbox", "landmarks", "origin")
    transforms = [RandomResizedCrop(20), RandomHorizontalFlip(), Resize((30, 40))]
    dataset = PackedDataset(packed, fields=names)
    how = {"bbox": Coordinates("xywh"), "landmarks": Coordinates("points")}
    for step, batch in enumerate(FastLoader(dataset, 8, seed=3, transform=transforms)):
        expected = by_hand(packed, transforms, batch, step=step, names=names, coordinates=how)
        for name, tensor in zip(names, batch, strict=True):
            assert torch.equal(tensor, expected[name]), name
        _, masks, boxes, points, _ = batch
        assert masks.shape == (8, 30, 40) and boxes.dtype == points.dtype == torch.float32
        assert (
            (boxes >= 0).all() and (boxes[:, 0] + boxes[:, 2] <= 40).all() and (boxes[:, 1] + boxes[:, 3] <= 30).all()
        )
    assert step == 5


def test_the_switch_interval_is_short_while_threads_transform_or_compare_rows(packed):
    before_s = sys.getswitchinterval()
    assert before_s > 2 * SWITCH_INTERVAL_S, "an earlier loader has left it short"
    crop = PIPELINES["resized crop"]
    for transforms, check, short in ((crop, None, True), ([], None, False), ([], "first", True), ([], "always", True)):
        batches = iter(FastLoader(PackedDataset(packed, check=check), 8, transform=transforms))
        next(batches)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S if short else before_s)
        del batches
        assert sys.getswitchinterval() == pytest.approx(before_s)
    loader = FastLoader(packed, 8)
    for _ in range(9):  # after one all rows were compared, and it is known to epochs that are planned from then on
        short = [sys.getswitchinterval() < before_s / 2 for _ in loader]
        if not any(short):
            break
    else:
        pytest.fail("rows that were compared keep it short")
    loader.close()


def test_small_batches_read_in_groups_and_files_compressed_by_others_are_augmented_alike(packed, compressed):
    for path, batch_size, name, shuffle in ((packed, 2, "padded", True), (compressed, 8, "imagenet", "chunk")):
        loader = FastLoader(path, batch_size, seed=3, shuffle=shuffle, transform=PIPELINES[name])
        for batch in loader:
            assert torch.equal(batch[0], by_hand(packed, PIPELINES[name], batch)["images"])
        assert (loader._producer.pool._group > 1) == (path == packed) and loader.stats.steps == N // batch_size


def test_gray_images_stored_without_channels_are_augmented_in_place(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (N, 20, 22), np.uint8)
    with h5py.File(tmp_path / "gray.h5", "w") as file:
        file["images"] = pixels
    transforms = [RandomResizedCrop(16), Normalize([0.5], [0.25])]
    loader = FastLoader(tmp_path / "gray.h5", 8, seed=3, shuffle="full", transform=transforms)
    batches = list(loader)
    assert len(batches) == N // 8
    for (images,), rows in ((batch, batch.rows.numpy()) for batch in batches):
        raw = {"images": torch.from_numpy(pixels[rows])[:, None]}
        assert torch.equal(images, apply_transforms(transforms, raw, Draws(3, 0, rows))["images"])


def test_a_crop_is_taken_from_the_mapping_without_copying_the_images_first(packed, monkeypatch):
    copied = []
    loader = FastLoader(packed, 8, seed=3, transform=PIPELINES["resized crop"])
    gather = Rows.gather
    monkeypatch.setattr(Rows, "gather", lambda *args: copied.append(set(args[2])) or gather(*args))
    list(loader)
    assert copied and all("images" not in names for names in copied)
    assert loader.stats.bytes_read == 48 * (np.prod(SHAPE) + 8)


@pytest.mark.parametrize(
    ("transforms", "fields", "message"),
    [
        ([RandomResizedCrop(20)], ("images", "bbox", "origin"), None),
        ([NORMALIZE, Resize(20)], None, "Resize stands after Normalize"),
        ([RandomCrop(40)], None, "smaller than the window"),
        ([Normalize([0.5], [0.2])], None, "1 values, the images 3 channels"),
        ([MixUp(num_classes=7)], ("images", "labels", "masks"), "masks"),
        ([CutMix(num_classes=7)], ("images", "labels", "bbox"), "bbox"),
        ([MixUp()], None, "num_classes"),
    ],
)
def test_pipelines_that_cannot_work_are_refused_when_the_loader_is_made(packed, transforms, fields, message):
    with pytest.raises(OptionError, match=message) if message else nullcontext():
        next(iter(FastLoader(PackedDataset(packed, fields=fields), 8, transform=transforms)))


@pytest.mark.parametrize("frame", ["original", "aligned, before it was resized"])
def test_boxes_that_are_not_pixels_of_the_packed_images_are_not_moved(tmp_path, frame):
    pixels = np.zeros((8, 20, 20, 3), np.uint8)
    boxes = Column(np.ones((8, 4), np.int32), {"names": ("x_1", "y_1", "width", "height"), "coordinates": frame})
    write_packed(tmp_path / "a.h5", pixels, {"bbox": boxes}, chunk_rows=4)
    dataset = PackedDataset(tmp_path / "a.h5", fields=("images", "bbox"))
    with pytest.raises(OptionError, match="coordinates in bbox cannot follow: they are pixels of the"):
        FastLoader(dataset, 4, transform=[RandomHorizontalFlip()])
    assert len(list(FastLoader(dataset, 4, transform=[NORMALIZE]))) == 2


def test_several_boxes_an_image_follow_a_flip_from_file_to_batch(tmp_path):
    pixels = np.zeros((8, 20, 30, 3), np.uint8)
    values = np.zeros((8, 3, 4), np.float32)
    values[:, 0] = 3, 4, 10, 12
    values[::2, 1] = 0, 1, 5, 2
    boxes = Column(values, {"names": ("x", "y", "width", "height")})
    write_packed(tmp_path / "a.h5", pixels, {"boxes": boxes}, chunk_rows=4)
    dataset = PackedDataset(tmp_path / "a.h5", fields=("images", "boxes"))
    batches = list(FastLoader(dataset, 4, transform=[RandomHorizontalFlip(1)]))
    assert len(batches) == 2
    for batch in batches:
        expected = torch.from_numpy(values[batch.rows.numpy()])
        expected[..., 0] = torch.where(expected.any(dim=2), 30 - expected[..., 0] - expected[..., 2], 0)
        assert torch.equal(batch[1], expected)


def test_a_default_device_elsewhere_changes_nothing(packed):
    expected = [images for images, _ in FastLoader(packed, 8, seed=3, transform=PIPELINES["imagenet"])]
    with torch.device("meta"):  # as torch.set_default_device() does for a whole script
        for options in ({}, {"echo": 2}):
            batches = list(FastLoader(packed, 8, seed=3, transform=PIPELINES["imagenet"], **options))
            for images, batch in zip(expected, batches[:: len(batches) // len(expected)], strict=True):
                assert torch.equal(batch[0], images)


def test_a_transform_that_raises_stop_iteration_does_not_end_the_epoch(packed):
    def tired(images):
        raise StopIteration

    with pytest.raises(RuntimeError, match="a transform raised StopIteration"):
        list(FastLoader(packed, 8, transform=[tired]))


def test_a_function_must_not_write_to_a_batch_that_is_used_again(packed):
    def inverted(images):
        return images.bitwise_not_()

    once = [images.clone() for images, _ in FastLoader(packed, 8, seed=3, transform=[inverted])]
    assert len(once) == 6
    with pytest.raises(OptionError, match=r"inverted, number 0 of the list, wrote to the images.*clone"):
        list(FastLoader(packed, 8, seed=3, transform=[inverted], echo=2))
    assert len(list(FastLoader(packed, 8, seed=3, transform=[RandomHorizontalFlip(), inverted], echo=2))) == 12


def test_a_function_that_changes_the_size_leaves_no_mask_behind(packed):
    def halved(images):
        return images[:, :, ::2, ::2]

    assert next(iter(FastLoader(packed, 8, transform=[halved])))[0].shape == (8, 3, 15, 13)
    with pytest.raises(OptionError, match=r"halved.*made images of \(15, 13\) out of \(30, 26\).*masks cannot follow"):
        list(FastLoader(PackedDataset(packed, fields=("images", "masks")), 8, transform=[halved]))


class Pictures(torch.utils.data.Dataset):
    def __init__(self, as_dict=False, hwc=False):
        self.as_dict, self.hwc = as_dict, hwc

    def __len__(self):
        return 16

    def __getitem__(self, index):
        image = np.full((20, 24, 3) if self.hwc else (3, 20, 24), index, np.uint8)
        return {"image": torch.from_numpy(image), "label": index % 7} if self.as_dict else (image, index % 7)


def test_samples_of_other_datasets_are_mixed_with_their_labels_and_refused_with_channels_last():
    for as_dict in (False, True):
        loader = FastLoader(Pictures(as_dict), 8, workers=1, transform=[RandomHorizontalFlip(), MixUp(num_classes=7)])
        batches = list(loader)
        assert len(batches) == 2
        for batch in batches:
            labels = batch["label"] if as_dict else batch[1]
            assert labels.shape == (8, 7) and torch.allclose(labels.sum(1), torch.ones(8))
    with pytest.raises(OptionError, match=r"\(20, 24, 3\), as \(height, width, channels\).*permute"):
        list(FastLoader(Pictures(hwc=True), 8, workers=1, transform=[RandomHorizontalFlip()]))


def test_what_scripts_pass_on_is_taken(packed):
    first = next(iter(FastLoader(packed, 8, seed=3, transform=PIPELINES["imagenet"])))[0]
    assert torch.equal(next(iter(FastLoader(packed, 8, seed=np.int64(3), transform=PIPELINES["imagenet"])))[0], first)
    assert next(iter(FastLoader(packed, 8, transform=None)))[0].dtype == torch.uint8
    assert RandomCrop(np.array([20, 18])).size == (20, 18)
    assert RandomResizedCrop(torch.tensor(20), scale=np.array([0.2, 1])).scale == (0.2, 1)


@pytest.mark.parametrize("transform", [[RandomHorizontalFlip()], RandomHorizontalFlip(), RandomHorizontalFlip])
def test_a_batch_transform_is_no_transform_of_a_sample(packed, transform):
    with pytest.raises(OptionError, match=r"to FastLoader\(transform="):
        PackedDataset(packed, transform=transform)
