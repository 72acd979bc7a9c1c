"""The transforms on a GPU give what they give on the CPU: the same pixels, the same bound for floats; nothing waits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from batches import EVERY, applied, in_channels_last_memory, nothing_waits, some_images

from fastload.transforms import ColorJitter, CutMix, Draws, MixUp, Normalize, RandAugment, RandomCrop, apply_transforms
from fastload.transforms.colour import ColourTransform
from fastload.transforms.geometry import PlacedTransform

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FILL = RandomCrop((20, 18), padding=6, fill=(9, 8, 7))
MODES = [RandomCrop((20, 18), padding=6, padding_mode=mode) for mode in ("edge", "reflect", "symmetric")]
JITTERS = [ColorJitter(0.4), ColorJitter(0, 0.4), ColorJitter(0, 0, 0.4), ColorJitter(hue=0.3)]
ALONE = [t for t in EVERY if not isinstance(t, (ColorJitter, RandAugment, Normalize))]


def made_on_both(make, *given: torch.Tensor) -> zip:
    """Pairs of results, here and there, where nothing waits."""
    there = [tensor.cuda() for tensor in given]
    make(*there)  # what is set up once may wait
    with nothing_waits():
        results = make(*there)
    assert in_channels_last_memory(results[0])
    return zip(make(*given), results, strict=True)


@pytest.mark.parametrize(
    ("transform", "dtype"),
    [*itertools.product([*ALONE, FILL, *MODES, *JITTERS], [np.uint8, np.uint16]), (RandAugment(1, 17), np.uint8)],
    ids=repr,
)
def test_a_device_gives_the_same_levels_but_one(transform, dtype):
    draws = Draws(5, 1, np.arange(64))
    resizes = isinstance(transform, PlacedTransform) and transform.resizes
    rounded = resizes or isinstance(transform, (ColourTransform, RandAugment))
    pairs = made_on_both(lambda images: applied(transform, images, draws), some_images(64, 24, 22, dtype))
    for number, (here, there) in enumerate(pairs):
        assert (there.dtype, there.shape, there.is_cuda) == (here.dtype, here.shape, True)
        tolerance = (1 if rounded else 0) if number == 0 else 0 if number == 1 else 1e-4
        assert (there.cpu().double() - here.double()).abs().max() <= tolerance


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.uint16, torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("transform", [MixUp(0.7, 5), CutMix(0.7, 5)], ids=repr)
def test_a_device_mixes_as_the_cpu_does(transform, dtype):
    def mixed(images: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        made = transform.apply_batch({"images": images, "labels": labels}, Draws(11, 2, np.array([3])))
        return [made["images"], made["labels"]]

    images = some_images(8, 31, 45)
    images = (images / 64 - 2).to(dtype) if dtype.is_floating_point else images.to(dtype)
    tolerance = 4 * torch.finfo(dtype).eps if dtype.is_floating_point else int(dtype == torch.uint16)
    for (here, there), most in zip(made_on_both(mixed, images, torch.arange(8) % 5), (tolerance, 1e-6), strict=True):
        assert (there.cpu().double() - here.double()).abs().max() <= most


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("output", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_agree_to_rounding(dtype, output):
    normalize = Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225], dtype=output)
    for here, there in made_on_both(lambda images: [normalize.apply(images)], some_images(32, 24, 22, dtype)):
        assert there.dtype == output
        assert torch.allclose(there.cpu().float(), here.float(), rtol=2 * torch.finfo(output).eps, atol=2e-6)


def test_a_whole_list_waits_for_nothing():
    transforms = [EVERY[0], FILL, Normalize([0.5] * 3, [0.5] * 3)]

    def made(images: torch.Tensor) -> list[torch.Tensor]:
        fields = {"images": images, "masks": images[:, 0].contiguous()}
        return list(apply_transforms(transforms, fields, Draws(0, 0, np.arange(32)), ignore_index=255).values())

    for here, there in made_on_both(made, some_images(32, 24, 22)):
        assert torch.allclose(there.cpu().float(), here.float(), rtol=1e-6, atol=2e-6)
