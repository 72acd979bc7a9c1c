from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from batches import draws_for, in_channels_last_memory
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import OptionError
from fastload.transforms import erasing
from fastload.transforms.draws import Draws
from fastload.transforms.erasing import Cutout, RandomErasing, random_keys, random_pixels
from fastload.transforms.spec import ImageSpec

UINT8 = ImageSpec(3, 32, 24, torch.uint8)


def batch_of(batch, channels, height, width, dtype=np.uint8, seed=0) -> torch.Tensor:
    values = np.random.default_rng(seed).integers(1, 200, (batch, height, width, channels)).astype(dtype)
    return torch.from_numpy(values).permute(0, 3, 1, 2)


def mixed_by_numpy(words: np.ndarray) -> np.ndarray:
    words = words.astype(np.uint32)
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x7FEB352D)
    words = (words ^ (words >> np.uint32(15))) * np.uint32(0x846CA68B)
    return words ^ (words >> np.uint32(16))


TRANSFORMS = st.sampled_from(
    [
        RandomErasing(0.7, value=201),
        RandomErasing(1, (0.1, 0.9), (0.2, 5), value="random"),
        Cutout(3, 0.8, fill=250),
        Cutout(2),
    ]
)


@given(
    transform=TRANSFORMS,
    batch=st.integers(0, 7),
    channels=st.integers(1, 4),
    height=st.integers(3, 14),
    width=st.integers(3, 14),
    dtype=st.sampled_from([np.uint8, np.uint16]),
    epoch=st.integers(0, 99),
    layout=st.sampled_from(["nhwc", "nchw", "strided"]),
)
def test_the_rectangle_is_erased_and_nothing_else(transform, batch, channels, height, width, dtype, epoch, layout):
    images = batch_of(batch, channels, height, width, dtype, epoch)
    if layout == "nchw":
        images = images.contiguous()
    elif layout == "strided":
        images = torch.from_numpy(np.repeat(images.numpy(), 2, axis=3))[..., ::2]
    before, draws = images.numpy().copy(), draws_for(batch, epoch)
    result = transform.apply(images, draws)
    assert np.array_equal(images.numpy(), before)
    assert result.dtype == images.dtype
    assert in_channels_last_memory(result)
    rectangles = transform.rectangles(ImageSpec.of(images), draws)
    assert rectangles.dtype == np.int64
    value = transform.filled
    for i, (top, left, high, wide) in enumerate(rectangles.tolist()):
        assert 0 <= top <= top + high <= height
        assert 0 <= left <= left + wide <= width
        expected = before[i].copy()
        inside = np.s_[:, top : top + high, left : left + wide]
        if value is None:
            places = np.arange(height * width * channels).reshape(height, width, channels)
            keys = random_keys(draws).view(np.uint32)[i]
            bits = 8 * np.dtype(dtype).itemsize
            words = mixed_by_numpy(mixed_by_numpy(places.astype(np.uint32) ^ keys[0]) ^ keys[1]) >> np.uint32(32 - bits)
            expected[inside] = words.astype(dtype).transpose(2, 0, 1)[inside]
        else:
            expected[inside] = value[0]
        assert np.array_equal(result[i].numpy(), expected)
        alone = transform.apply(images[i : i + 1], Draws(3, epoch, np.array([i * 7 + 1])))
        assert np.array_equal(alone[0].numpy(), expected)
    at_once = erasing._erase_at_once(images, rectangles, value or (0.0,), random_keys(draws) if value is None else None)
    assert np.array_equal(at_once.numpy(), result.numpy())  # the way for devices
    assert in_channels_last_memory(at_once)


@pytest.mark.parametrize("transform", [RandomErasing(1, value=(1, 2, 3)), Cutout(9, fill=(1, 2, 3))], ids=repr)
def test_each_channel_may_have_its_value(transform):
    images = torch.full((4, 3, 32, 24), 77, dtype=torch.uint8)
    result = transform.apply(images, draws_for(4))
    for channel in range(3):
        assert set(result[:, channel].unique().tolist()) == {channel + 1, 77}


def test_rectangles_are_torchvisions_given_the_numbers_drawn():
    """The first of ten attempts that fits, by the formulas of torchvision's RandomErasing, sample by sample."""
    spec, draws = ImageSpec(3, 20, 30, torch.uint8), draws_for(400)
    transform = RandomErasing(0.8, (0.3, 1.0), (0.3, 3.3))
    rectangles = transform.rectangles(spec, draws)
    attempts = [[draws.stream(1).stream(2 * i + j).uniform() for j in range(2)] for i in range(10)]
    fitted_late = unfitted = 0
    for sample, (top, left, high, wide) in enumerate(rectangles.tolist()):
        sides = (0, 0)
        for i in range(10):
            area = 20 * 30 * (0.3 + 0.7 * attempts[i][0][sample])
            ratio = math.exp(math.log(0.3) + (math.log(3.3) - math.log(0.3)) * attempts[i][1][sample])
            h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if h < 20 and w < 30:
                sides = (h, w)
                fitted_late += i > 0
                break
        unfitted += sides == (0, 0)
        if draws.stream(0).uniform()[sample] >= 0.8:
            sides = (0, 0)
        assert (high, wide) == sides
        assert high == 0 or (top <= 20 - high and left <= 30 - wide)
    assert fitted_late > 20


def test_areas_ratios_and_places_follow_their_distributions():
    spec = ImageSpec(3, 1000, 1000, torch.uint8)
    top, left, high, wide = RandomErasing().rectangles(spec, draws_for(20000)).T
    assert 9600 < (high > 0).sum() < 10400
    erased = high > 0
    areas = (high * wide)[erased] / 1e6
    assert areas.min() > 0.0195
    assert areas.max() < 0.331
    assert abs(areas.mean() - 0.175) < 0.003
    ratios = np.log((high / np.maximum(wide, 1))[erased])
    assert np.abs(ratios).max() < math.log(3.4)
    assert abs(ratios.mean() - (math.log(0.3) + math.log(3.3)) / 2) < 0.03
    for start, side in ((top, high), (left, wide)):
        place = start[erased] / (1000 - side[erased])
        histogram = np.histogram(place, bins=10, range=(0, 1.0001))[0] / erased.sum()
        assert np.abs(histogram - 0.1).max() < 0.015


def test_nothing_is_erased_where_no_rectangle_fits():
    images = batch_of(30, 3, 1, 9)
    assert torch.equal(RandomErasing(1).apply(images, draws_for(30)), images)
    assert torch.equal(RandomErasing(0).apply(batch_of(9, 1, 8, 8), draws_for(9)), batch_of(9, 1, 8, 8))


def test_squares_are_centred_anywhere_and_cut_off_at_borders():
    spec, size = ImageSpec(1, 6, 9, torch.uint8), 4
    rectangles = Cutout(size).rectangles(spec, draws_for(20000))
    found, counts = np.unique(rectangles, axis=0, return_counts=True)
    expected = set()
    for y in range(6):
        for x in range(9):
            top, bottom, left, right = max(y - 2, 0), min(y + 2, 6), max(x - 2, 0), min(x + 2, 9)
            expected.add((top, left, bottom - top, right - left))
    assert {tuple(row) for row in found.tolist()} == expected
    assert len(found) == 54
    assert np.abs(counts - 20000 / 54).max() < 100  # five standard deviations of 370 are 96
    assert 15700 < (Cutout(3, p=0.8).rectangles(spec, draws_for(20000))[:, 2] > 0).sum() < 16300


def test_an_odd_square_reaches_as_far_to_either_side():
    top, left, high, wide = Cutout(5).rectangles(ImageSpec(1, 99, 99, torch.uint8), draws_for(300)).T
    inside = (top > 0) & (left > 0) & (top + high < 99) & (left + wide < 99)
    assert inside.sum() > 100
    assert (high[inside] == 5).all()
    assert (wide[inside] == 5).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_random_pixels_are_spread_evenly_and_differ_between_samples(dtype):
    keys = torch.from_numpy(random_keys(draws_for(2)))[:, None]
    places = torch.arange(1 << 17, dtype=torch.int32)
    pixels = random_pixels(keys, places, dtype).view(dtype).numpy().astype(np.int64)
    levels = 1 << (8 * dtype.itemsize)
    for values in pixels:
        histogram = np.histogram(values, bins=64, range=(0, levels))[0]
        assert np.abs(histogram - 2048).max() < 230  # five standard deviations
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.015
    assert abs(np.corrcoef(pixels)[0, 1]) < 0.015
    assert 0 <= pixels.min() <= levels // 1000
    assert levels - levels // 1000 - 1 <= pixels.max() < levels
    again = random_pixels(keys[1], places[1000:1010], dtype).view(dtype)
    assert np.array_equal(again.numpy(), pixels[1, 1000:1010])  # a place has its value, whatever else is asked for


def test_random_pixels_are_drawn_anew_for_each_epoch():
    images = torch.zeros((1, 3, 64, 64), dtype=torch.uint8)
    transform = RandomErasing(1, (0.9, 0.9), (1, 1), "random")
    first, second = (transform.apply(images, draws_for(1, epoch)) for epoch in (0, 1))
    both = (first > 0) & (second > 0)
    assert both.sum() > 3000
    assert (first[both] == second[both]).float().mean() < 0.02


@pytest.mark.parametrize(
    "options",
    [
        {"scale": (0.3, 0.1)},
        {"scale": (-0.1, 0.1)},
        {"scale": (0.1, 1.1)},
        {"scale": 0.3},
        {"scale": (0.1, 0.2, 0.3)},
        {"scale": (0.1, float("nan"))},
        {"ratio": (3, 0.3)},
        {"ratio": (0, 1)},
        {"ratio": (0.3, float("inf"))},
        {"ratio": ("a", "b")},
        {"value": "noise"},
        {"value": None},
        {"value": ()},
        {"value": (1, "2")},
        {"value": float("nan")},
    ],
    ids=repr,
)
def test_options_without_a_meaning_are_named(options):
    with pytest.raises(OptionError, match=next(iter(options))):
        RandomErasing(**options)


@pytest.mark.parametrize("size", [0, -2, 2.5, "4", None, True, (4, 4)])
def test_squares_have_a_whole_positive_side(size):
    with pytest.raises(OptionError, match="size"):
        Cutout(size)


def test_a_square_larger_than_the_image_is_refused():
    assert Cutout(32).output(UINT8) == UINT8
    with pytest.raises(OptionError, match=r"32x24.*smaller than the square"):
        Cutout(33).output(UINT8)


@pytest.mark.parametrize("value", [256, -1, 0.5, (1, 2), (0, 0, 300)])
def test_values_the_images_cannot_hold_are_refused(value):
    for transform in (RandomErasing(value=value), Cutout(4, fill=value)):
        with pytest.raises(OptionError, match="channels" if value == (1, 2) else "whole number from 0 to 255"):
            transform.output(UINT8)
    assert RandomErasing(value=256).output(UINT8._replace(dtype=torch.uint16)).channels == 3


def test_floats_are_refused():
    for transform in (RandomErasing(), RandomErasing(value="random"), Cutout(2)):
        with pytest.raises(OptionError, match=r"float32.*before Normalize"):
            transform.apply(torch.zeros(1, 3, 4, 4), draws_for(1))
