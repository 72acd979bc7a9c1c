from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from batches import draws_for, in_channels_last_memory, some_images
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import OptionError
from fastload.transforms import erasing
from fastload.transforms.erasing import Cutout, RandomErasing, random_keys, random_pixels
from fastload.transforms.spec import ImageSpec

UINT8 = ImageSpec(3, 32, 24, torch.uint8)


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
)
def test_the_rectangle_is_erased_and_nothing_else(transform, batch, channels, height, width, dtype, epoch):
    images, draws = some_images(batch, height, width, dtype, channels=channels, seed=epoch), draws_for(batch, epoch)
    result = transform.apply(images, draws)
    rectangles = transform.rectangles(ImageSpec.of(images), draws)
    assert rectangles.dtype == np.int64
    value = transform.filled
    for i, (top, left, high, wide) in enumerate(rectangles.tolist()):
        assert 0 <= top <= top + high <= height
        assert 0 <= left <= left + wide <= width
        expected = images[i].numpy().copy()
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
    tops, lefts = (draws.stream(2 + i).integers(0, side - rectangles[:, 2 + i] + 1) for i, side in ((0, 20), (1, 30)))
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
        assert (top, left) == ((tops[sample], lefts[sample]) if high else (0, 0))
    assert fitted_late > 20


def test_nothing_is_erased_where_no_rectangle_fits():
    for p, images in ((1, some_images(30, 1, 9)), (0, some_images(30, 8, 8))):
        assert torch.equal(RandomErasing(p).apply(images, draws_for(30)), images)


@pytest.mark.parametrize(("size", "behind"), [(4, 2), (5, 3)])
def test_squares_are_centred_anywhere_and_cut_off_at_borders(size, behind):
    spec = ImageSpec(1, 6, 9, torch.uint8)
    rectangles = Cutout(size).rectangles(spec, draws_for(20000))
    found, counts = np.unique(rectangles, axis=0, return_counts=True)
    expected = set()
    for y in range(6):
        for x in range(9):
            top, bottom, left, right = max(y - 2, 0), min(y + behind, 6), max(x - 2, 0), min(x + behind, 9)
            expected.add((top, left, bottom - top, right - left))
    assert {tuple(row) for row in found.tolist()} == expected
    assert len(found) == 54
    assert np.abs(counts - 20000 / 54).max() < 100  # five standard deviations of 370 are 96
    assert 15700 < (Cutout(3, p=0.8).rectangles(spec, draws_for(20000))[:, 2] > 0).sum() < 16300


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


@pytest.mark.parametrize(
    "options",
    [{"size": v} for v in (0, -2, 2.5, "4", None, True, (4, 4))]
    + [{"scale": v} for v in ((0.3, 0.1), (-0.1, 0.1), (0.1, 1.1), 0.3, (0.1, 0.2, 0.3), (0.1, float("nan")))]
    + [{"ratio": v} for v in ((3, 0.3), (0, 1), (0.3, float("inf")), ("a", "b"))]
    + [{"value": v} for v in ("noise", None, (), (1, "2"), float("nan"))],
    ids=repr,
)
def test_options_without_a_meaning_are_named(options):
    with pytest.raises(OptionError, match=next(iter(options))):
        (Cutout if "size" in options else RandomErasing)(**options)


@pytest.mark.parametrize("value", [256, -1, 0.5, (1, 2), (0, 0, 300)])
def test_values_and_squares_the_images_cannot_hold_and_floats_are_refused(value):
    for transform in (RandomErasing(value=value), Cutout(4, fill=value)):
        with pytest.raises(OptionError, match="channels" if value == (1, 2) else "whole number from 0 to 255"):
            transform.output(UINT8)
    assert RandomErasing(value=256).output(UINT8._replace(dtype=torch.uint16)).channels == 3
    for transform in (RandomErasing(), RandomErasing(value="random"), Cutout(2)):
        with pytest.raises(OptionError, match=r"float32.*before Normalize"):
            transform.apply(torch.zeros(1, 3, 4, 4), draws_for(1))
    assert Cutout(32).output(UINT8) == UINT8
    with pytest.raises(OptionError, match=r"32x24.*smaller than the square"):
        Cutout(33).output(UINT8)
