"""Lists of transforms are cut into passes where they may be, and a pass gives what its transforms give one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fuse_cases import CASES
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.transforms import (
    CenterCrop,
    ColorJitter,
    CutMix,
    Draws,
    Grayscale,
    ImageSpec,
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
from fastload.transforms.engine import gpu
from fastload.transforms.engine.pipeline import FusedPass, passes_of

RGB = ImageSpec(3, 24, 20, torch.uint8)
FLIP, NORMALIZE = RandomHorizontalFlip(), Normalize([0.5] * 3, [0.25] * 3)


def shape_of(transforms, spec=RGB):
    """The passes as the numbers of the transforms in each; those that run by themselves as bare numbers."""
    shapes = []
    for part in passes_of(transforms, spec):
        if isinstance(part, FusedPass):
            members = [index for index, _ in (*part.moves, *part.colours, *([part.eraser] if part.eraser else []))]
            shapes.append([*members, *(["normalize"] if part.normalize else [])])
        else:
            shapes.append(part[0])
    return shapes


def test_what_one_pass_can_do_is_one_pass():
    whole = [Resize(22), RandomCrop(16), FLIP, ColorJitter(0.4), RandomErasing(), NORMALIZE]
    assert shape_of(whole) == [[0, 1, 2, 3, 4, "normalize"]]
    assert shape_of([ColorJitter(0.4, contrast=0.2), FLIP, NORMALIZE]) == [[1, 0, "normalize"]]
    assert shape_of([NORMALIZE]) == [["normalize"]]
    assert shape_of([FLIP, RandomCrop(24, padding=2), FLIP, CenterCrop(20), NORMALIZE]) == [[0, 1, 2, 3, "normalize"]]


@pytest.mark.parametrize(
    ("transforms", "passes"),
    [
        ([Resize(22), RandomResizedCrop(12)], [[0], [1]]),  # values would be mixed twice
        ([CenterCrop(12), RandomCrop(14, padding=2), FLIP], [[0], [1, 2]]),  # it is the part that is padded
        ([RandomCrop(24, padding=2), RandomCrop(26, padding=2)], [[0], [1]]),
        ([RandomCrop(24, padding=2), Resize(12)], [[0], [1]]),
        ([Resize(12), RandomCrop(14, padding=2)], [[0], [1]]),
        ([ColorJitter(0.4), CenterCrop(12)], [[0], [1]]),  # contrast looks at the whole image
        ([RandomErasing(), FLIP], [[0], [1]]),
        ([ColorJitter(contrast=0.4), ColorJitter(contrast=0.4)], [[0], [1]]),
        ([RandAugment(), NORMALIZE], [0, ["normalize"]]),
        ([RandomErasing(value="random"), NORMALIZE], [0, ["normalize"]]),
        ([Grayscale(1), FLIP], [0, [1]]),
        ([FLIP, CutMix(num_classes=3), NORMALIZE], [[0], 1, ["normalize"]]),
        ([FLIP, lambda images: images, FLIP], [[0], 1, 2]),  # nobody knows what comes out of it
    ],
)
def test_what_does_not_fit_begins_another_pass(transforms, passes):
    assert shape_of(transforms) == passes


def test_uint16_images_are_never_fused():
    assert shape_of([RandomResizedCrop(12), FLIP], ImageSpec(1, 24, 20, torch.uint16)) == [0, 1]


LISTED = [
    RandomResizedCrop(17), Resize((19, 23)), RandomCrop(12), CenterCrop((11, 9)), FLIP, RandomVerticalFlip(0.7),
    ColorJitter(0.3, 0.3, 0.3, 0.1), RandomErasing(p=0.8),
]  # fmt: skip


@settings(max_examples=2 * settings.default.max_examples)
@given(chosen=st.lists(st.sampled_from(range(len(LISTED))), max_size=5), normalize=st.booleans())
def test_passes_give_what_the_transforms_give_one_by_one(chosen, normalize):
    transforms = [LISTED[number] for number in chosen] + ([NORMALIZE] if normalize else [])
    size = (24, 20)
    for number in chosen:
        spec = ImageSpec(3, *size, torch.uint8)
        if isinstance(LISTED[number], (RandomCrop, CenterCrop)) and (size[0] < 12 or size[1] < 12):
            return
        size = LISTED[number].output(spec)[1:3]
    values = np.random.default_rng(1).integers(0, 256, (5, 24, 20, 3), np.uint8)
    images = torch.from_numpy(values).permute(0, 3, 1, 2)
    draws = Draws(4, 0, np.arange(5))
    together = apply_transforms(transforms, {"images": images}, draws)["images"]
    apart = images
    for index, transform in enumerate(transforms):
        apart = transform.apply(apart, draws.stream(index))
    levels = (together.float() - apart.float()).abs() * (255 * 0.25 if normalize else 1)
    # A turn before a resize and after it round otherwise, by a level; further steps may let that grow.
    coloured = sum(isinstance(transform, ColorJitter) for transform in transforms)
    resized = sum(isinstance(transform, (RandomResizedCrop, Resize)) for transform in transforms)
    if not resized:
        assert levels.max() <= 1e-3
    elif not coloured:
        assert levels.max() <= resized + 1e-3
    assert together.dtype == apart.dtype and together.shape == apart.shape
    assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), values)


def test_the_kernel_does_in_the_interpreter_what_torch_does(run_interpreted):
    pytest.importorskip("triton", reason="Triton is not installed")
    assert run_interpreted(Path(__file__).with_name("fuse_cases.py")).split("\n")[:-1] == list(CASES)


@pytest.mark.parametrize(
    ("installed", "message"),
    [(False, "separate torch operations.*Triton is not installed.*pip install triton"), (True, "no C compiler")],
)
def test_a_gpu_where_triton_cannot_run_is_told_of_once(monkeypatch, installed, message):
    def fail(*args, **options):
        raise RuntimeError("there is no C compiler")

    monkeypatch.setattr(gpu, "triton_available", lambda: installed)
    monkeypatch.setattr(gpu, "fused", fail)
    gpu.kernel_runs.cache_clear()
    device = torch.device("cpu")  # nothing is sent there
    with pytest.warns(UserWarning, match=message):
        assert not gpu.kernel_runs(device)
    assert not gpu.kernel_runs(device)  # a second warning would be an error
    gpu.kernel_runs.cache_clear()


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
def test_large_padded_crops_give_in_one_pass_what_they_give_one_by_one(mode):
    images = torch.from_numpy(np.random.default_rng(2).integers(0, 256, (5, 3, 90, 80), np.uint8))
    transforms = [FLIP, RandomCrop((92, 84), padding=7, fill=(3, 80, 200), padding_mode=mode), FLIP, NORMALIZE]
    draws = Draws(3, 1, np.arange(5))
    assert shape_of(transforms, ImageSpec.of(images)) == [[0, 1, 2, "normalize"]]
    masks = images[:, 0].clone()
    found = apply_transforms(transforms, {"images": images, "masks": masks}, draws, ignore_index=9)
    expected = images
    for index, transform in enumerate(transforms):
        expected = transform.apply(expected, draws.stream(index))
        if transform is not NORMALIZE:
            masks = transform.apply_masks(masks, draws.stream(index), 9)
    assert torch.equal(found["images"], expected)
    assert torch.equal(found["masks"], masks)
