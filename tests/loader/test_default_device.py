"""Loaders under `torch.set_default_device`: what they make themselves stays where it belongs."""

from __future__ import annotations

import contextlib

import pytest
import torch
from late_backend import Device
from ragged_cases import varied_file, varied_rows, write_ragged

from fastload import FastLoader, PackedDataset
from fastload.transforms import (
    CenterCrop,
    ColorJitter,
    CutMix,
    Cutout,
    Grayscale,
    MixUp,
    Normalize,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)

PACKED = {"rows": 24, "size": (40, 36, 3), "seed": 5, "classes": "abc", "masks": True, "boxes": True, "chunk_rows": 8}
RGB = ([0.5, 0.4, 0.3], [0.2, 0.25, 0.3])
PIPELINES = {
    "nothing": [],
    "moved": [RandomResizedCrop(24), RandomHorizontalFlip(), RandomVerticalFlip(), RandAugment(), Normalize(*RGB)],
    "padded": [RandomCrop(32, padding=4, fill=(1, 2, 3)), CenterCrop(30), Cutout(4), Resize((20, 22))],
    "coloured": [ColorJitter(0.3, 0.3, 0.3, 0.1), RandomGrayscale(), RandomErasing(value="random"), Normalize(*RGB)],
    "erased": [RandomErasing(value=[1, 2, 3]), Grayscale(3), Normalize(*RGB)],
}
MIXES = {"mixup": [Normalize(*RGB), MixUp(num_classes=3)], "cutmix": [CutMix(num_classes=3)]}


@contextlib.contextmanager
def default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def batches(source, **options):
    loader = FastLoader(source, 6, seed=4, **options)
    found = []
    for _ in range(2):
        found += [[*(tensor.clone() for tensor in batch), batch.rows, batch.valid] for batch in loader]
    state = loader.state_dict()
    loader.load_state_dict(state)
    loader.close()
    return found


def assert_the_same(source, make_device=lambda: None, **options):
    plain = batches(source, device=make_device(), **options)
    with default_device("meta"):
        assert torch.zeros(1).is_meta
        there = batches(source, device=make_device(), **options)
    assert len(plain) == len(there) > 0
    for one, other in zip(plain, there, strict=True):
        assert all(torch.equal(tensor, same) for tensor, same in zip(one, other, strict=True))


@pytest.mark.parametrize("where", ["cpu", "device", "cache device", "cache host"])
@pytest.mark.parametrize("name", PIPELINES)
def test_batches_are_the_same_under_another_default_device(packed, name, where):
    options = {"cache": where.removeprefix("cache ")} if where.startswith("cache") else {}
    make_device = (lambda: None) if where == "cpu" else Device
    assert_the_same(packed, make_device, transform=PIPELINES[name], **options)


@pytest.mark.parametrize("make_device", [lambda: None, Device])
@pytest.mark.parametrize("name", MIXES)
def test_mixed_batches_and_batches_used_again_are_the_same_too(packed, name, make_device):
    source = PackedDataset(packed, fields=["images", "labels"])
    assert_the_same(source, make_device, transform=MIXES[name])
    assert_the_same(source, make_device, transform=MIXES[name], echo=2)


@pytest.mark.parametrize("make_device", [lambda: None, Device])
def test_images_of_several_sizes_are_the_same_too(tmp_path, make_device):
    path = tmp_path / "a.h5"
    write_ragged(path, varied_rows())
    assert_the_same(path, make_device, transform=[RandomResizedCrop(16), RandomHorizontalFlip(), Normalize(*RGB)])


@pytest.mark.parametrize(
    "transform", [[Normalize(*RGB)], [RandomResizedCrop(16), RandomHorizontalFlip(), Normalize(*RGB)]]
)
def test_jpegs_that_the_device_decodes_are_the_same_too(tmp_path, transform):
    path = varied_file(tmp_path / "a.h5", varied_rows(size=(22, 26)))
    source = PackedDataset(path, fields=["images", "labels"], decode="device")
    assert_the_same(source, Device, transform=transform)
    assert_the_same(source, Device, transform=transform, echo=2)


def first_two(sample):
    return sample[0], sample[1]


@pytest.mark.parametrize("make_device", [lambda: None, Device])
def test_batches_of_processes_are_the_same_too(packed, make_device):
    source = PackedDataset(packed, fields=["images", "labels"], transform=first_two)
    assert_the_same(source, make_device, transform=PIPELINES["coloured"], workers=1)
