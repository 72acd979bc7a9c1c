from __future__ import annotations

import numpy as np
import pytest
import torch
from batches import draws_for, in_channels_last_memory
from colour_reference import exact_steps, hue_by_colorsys
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fastload.errors import OptionError
from fastload.transforms.colour import (
    BRIGHTNESS,
    CONTRAST,
    HUE,
    SATURATION,
    ColorJitter,
    ColourSteps,
    Grayscale,
    RandomGrayscale,
    apply_colour,
)
from fastload.transforms.spec import ImageSpec

LARGEST = {np.dtype(np.uint8): 255, np.dtype(np.uint16): 65535}
UINT8 = ImageSpec(3, 8, 8, torch.uint8)


def batch_of(batch, channels, height, width, dtype=np.uint8, seed=0) -> torch.Tensor:
    """Noise in even samples, smooth images in odd ones, (B, C, H, W) in channels_last memory."""
    generator = np.random.default_rng(seed)
    values = generator.integers(0, LARGEST[np.dtype(dtype)] + 1, (batch, height, width, channels))
    values[1::2] = values[1::2, :1, :1] // 2 + values[1::2] // 16
    return torch.from_numpy(values.astype(dtype)).permute(0, 3, 1, 2)


def constant_steps(batch: int, op: int, factor: float) -> ColourSteps:
    return ColourSteps(np.full((batch, 1), op, np.int32), np.full((batch, 1), factor, np.float32))


# float32 in place of float64: a result within 2**-12 levels of a whole number may be truncated to the one below.
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize(
    ("op", "factor"),
    [(op, f) for op in (BRIGHTNESS, CONTRAST, SATURATION) for f in (0.0, 0.37, 1.0, 1.61)]
    + [(HUE, f) for f in (-0.5, -0.13, 0.0, 0.071, 0.29, 0.5)],
)
def test_each_operation_is_the_float64_result_but_for_rare_single_levels(op, factor, dtype, channels):
    images = batch_of(6, channels, 13, 17, dtype)
    largest = LARGEST[np.dtype(dtype)]
    steps = constant_steps(6, op, factor)
    result = apply_colour(images, steps).numpy().astype(np.int64)
    expected = np.stack(
        [exact_steps(image, steps.ops[0], steps.factors[0], largest) for image in images.numpy().astype(np.float64)]
    )
    off = np.abs(result - expected)
    assert off.max() <= 1
    assert (off > 0).mean() < (0.01 if dtype == np.uint8 else 0.05)
    if factor == (0 if op == HUE else 1):  # as it is; a channel's part of 65535 is not exact in float32
        changed = np.abs(result - images.numpy().astype(np.int64)).max()
        assert changed <= (1 if (op, dtype) == (HUE, np.uint16) else 0)


def test_all_colours_turn_by_hue_as_colorsys_turns_them():
    levels = np.array([0, 1, 2, 63, 127, 128, 200, 254, 255])
    colours = np.stack(np.meshgrid(levels, levels, levels), axis=0).reshape(3, 27, 27).astype(np.uint8)
    images = torch.from_numpy(colours)[None]
    for factor in (-0.4, -1 / 6, 0.25, 1 / 3):
        result = apply_colour(images, constant_steps(1, HUE, factor))[0].numpy().astype(int)
        expected = np.clip(np.floor(hue_by_colorsys(colours.astype(float), np.float32(factor), 255)), 0, 255)
        assert np.abs(result - expected).max() <= 1
        assert (result != expected).mean() < 0.01


@pytest.mark.parametrize(("dtype", "levels"), [(torch.uint8, (199, 251)), (torch.uint16, (40001, 65535))], ids=str)
def test_the_mean_of_a_large_image_is_exact(dtype, levels):
    """Sums of 200,000 levels do not fit float32: a mean that ends just below a level would be truncated to the next."""
    for level in levels:
        images = torch.full((2, 1, 401, 499), level, dtype=torch.int32).to(dtype)
        assert torch.equal(apply_colour(images, constant_steps(2, CONTRAST, 0.0)), images)


@given(seed=st.integers(0, 99), batch=st.integers(1, 8))
def test_jitter_does_its_steps_in_their_order(seed, batch):
    images, draws = batch_of(batch, 3, 7, 5, seed=seed), draws_for(batch, seed)
    transform = ColorJitter((0.3, 1.7), (0.3, 1.7), (0.3, 1.7), (-0.5, 0.5))
    steps = transform.steps(draws)
    one_by_one = images
    for k in range(4):
        one_by_one = apply_colour(one_by_one, ColourSteps(steps.ops[:, k : k + 1], steps.factors[:, k : k + 1]))
    assert torch.equal(transform.apply(images, draws), one_by_one)


def test_orders_and_factors_are_drawn_evenly():
    steps = ColorJitter(0.4, (0.5, 0.75), 2, 0.1).steps(draws_for(24000))
    assert steps.ops.dtype == np.int32
    assert steps.factors.dtype == np.float32
    orders, counts = np.unique(steps.ops, axis=0, return_counts=True)
    assert len(orders) == 24
    assert np.abs(counts - 1000).max() < 150  # five standard deviations of 1000 are 155
    ranges = {BRIGHTNESS: (0.6, 1.4), CONTRAST: (0.5, 0.75), SATURATION: (0, 3), HUE: (-0.1, 0.1)}
    by_operation = {op: steps.factors[steps.ops == op] for op in ranges}
    for op, (low, high) in ranges.items():
        factors = by_operation[op]
        assert len(factors) == 24000
        histogram = np.histogram(factors, bins=10, range=(low - 1e-6, high + 1e-6))[0]
        assert np.abs(histogram - 2400).max() < 250
    correlations = np.corrcoef([by_operation[op] for op in ranges])
    assert np.abs(correlations - np.eye(4)).max() < 0.03


def test_a_further_operation_changes_neither_factors_nor_order_of_the_others():
    images = batch_of(3, 3, 4, 4)
    assert torch.equal(ColorJitter(brightness=(1, 1)).apply(images, draws_for(3)), images)
    few, many = (ColorJitter(0.4, hue=hue, contrast=0.2).steps(draws_for(50)) for hue in (0, 0.3))
    assert few.ops.shape == (50, 2)
    kept = many.ops != HUE
    assert np.array_equal(many.ops[kept].reshape(50, 2), few.ops)
    assert np.array_equal(many.factors[kept].reshape(50, 2), few.factors)


def test_gray_levels_are_the_weighted_sum_rounded_down():
    images = batch_of(5, 3, 9, 7)
    red, green, blue = images.numpy().astype(np.float64).transpose(1, 0, 2, 3)
    exact = 0.2989 * red + 0.587 * green + 0.114 * blue
    one, three = (Grayscale(n).apply(images, draws_for(5)) for n in (1, 3))
    assert one.shape == (5, 1, 9, 7)
    assert in_channels_last_memory(one)
    assert in_channels_last_memory(three)
    off = np.floor(exact + 1e-6) - one[:, 0].numpy()
    assert off.min() >= 0
    assert off.max() <= 1
    assert (off > 0).mean() < 0.01
    assert torch.equal(three, one.expand(5, 3, 9, 7))
    assert torch.equal(apply_colour(images, Grayscale(3).steps(draws_for(5))), three)
    pillow = np.stack([np.asarray(Image.fromarray(i).convert("L")) for i in images.permute(0, 2, 3, 1).numpy()])
    assert np.abs(pillow.astype(int) - one[:, 0].numpy()).max() <= 1  # Pillow's weights sum to 1 and it rounds


def test_gray_images_become_one_or_three_equal_channels():
    images = batch_of(2, 1, 3, 5)
    for channels in (1, 3):
        result = Grayscale(channels).apply(images, draws_for(2))
        assert torch.equal(result, images.expand(2, channels, 3, 5))
        assert Grayscale(channels).output(ImageSpec.of(images)) == ImageSpec.of(result)


def test_grayscale_happens_as_often_as_asked():
    draws = draws_for(20000)
    for p, low, high in ((0, 0, 0), (0.1, 1800, 2200), (1, 20000, 20000)):
        assert low <= (RandomGrayscale(p).steps(draws).ops == SATURATION).sum() <= high
    images = batch_of(40, 3, 5, 6)
    transform, gray = RandomGrayscale(0.5), Grayscale(3).apply(images, draws_for(40))
    chosen = transform.steps(draws_for(40)).ops[:, 0] == SATURATION
    assert 5 < chosen.sum() < 35
    for i, result in enumerate(transform.apply(images, draws_for(40))):
        assert torch.equal(result, gray[i] if chosen[i] else images[i])


TRANSFORMS = [ColorJitter(0.4, 0.4, 0.4, 0.1), Grayscale(1), Grayscale(3), RandomGrayscale(0.5)]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
def test_other_images_are_refused_before_they_come_and_those_without_pixels_pass(transform):
    for channels in (2, 4):
        with pytest.raises(OptionError, match=f"{channels} channels"):
            transform.output(UINT8._replace(channels=channels))
    with pytest.raises(OptionError, match=r"float32.*before Normalize"):
        transform.apply(torch.zeros(1, 3, 4, 4), draws_for(1))
    assert transform.output(UINT8._replace(dtype=torch.uint16)).dtype == torch.uint16
    none = torch.zeros((2, 3, 0, 5), dtype=torch.uint8)
    assert transform.apply(none, draws_for(2)).shape == (2, *transform.output(ImageSpec.of(none))[:3])


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation", "hue"])
@pytest.mark.parametrize(
    "value", [-0.1, (0.4, 0.2), (1, 2, 3), "high", None, (None, 1), float("nan"), float("inf"), (0, float("inf")), True]
)
def test_ranges_without_a_meaning_are_named(name, value):
    with pytest.raises(OptionError, match=name):
        ColorJitter(**{name: value})


def test_ranges_out_of_bounds_are_named():
    for hue in (0.6, (-0.6, 0), (0, 0.51)):
        with pytest.raises(OptionError, match=r"hue.*-0\.5 to 0\.5"):
            ColorJitter(hue=hue)
    with pytest.raises(OptionError, match=r"contrast.*not negative"):
        ColorJitter(contrast=(-0.5, 1))
    for channels in (0, 2, 4, True, "1", None):
        with pytest.raises(OptionError, match="num_output_channels"):
            Grayscale(channels)
    assert ColorJitter(brightness=1.5).brightness == (0, 2.5)
    assert ColorJitter(hue=0.5).hue == (-0.5, 0.5)
