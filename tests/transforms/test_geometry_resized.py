from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fastload.errors import OptionError
from fastload.transforms import Draws, ImageSpec, RandomResizedCrop, RandomVerticalFlip, Resize
from fastload.transforms.spec import ordered_pair


def spec_of(height: int, width: int) -> ImageSpec:
    return ImageSpec(3, height, width, torch.uint8)


sides = st.integers(1, 300)
areas = st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(sorted)
ratios = st.tuples(st.floats(0.2, 5), st.floats(0.2, 5)).map(sorted)


@given(height=sides, width=sides, scale=areas, ratio=ratios)
def test_windows_lie_within_the_image_and_their_bounds(height, width, scale, ratio):
    crop = RandomResizedCrop(16, scale=scale, ratio=ratio)
    placement = crop.place(np.array([[height, width]]), Draws(1, 0, np.arange(40)))
    first, window = placement.first, placement.window
    assert (first >= 0).all() and (first + window <= [height, width]).all() and (window >= 1).all()
    for high, wide in window.tolist():
        fallback = high in (height, max(1, round(width / ratio[0]))) or wide in (
            width,
            max(1, round(height * ratio[1])),
        )
        # Rounding a side moves it by up to half a pixel.
        low, high_area = (high - 0.5) * (wide - 0.5), (high + 0.5) * (wide + 0.5)
        assert fallback or (low <= scale[1] * height * width + 1e-6 and high_area >= scale[0] * height * width - 1e-6)
        assert fallback or (
            (wide - 0.5) / (high + 0.5) <= ratio[1] + 1e-9 and (wide + 0.5) / (high - 0.5) >= ratio[0] - 1e-9
        )


def test_area_and_proportions_are_drawn_evenly():
    placement = RandomResizedCrop(8, scale=(0.1, 0.5), ratio=(0.5, 2)).place(
        np.array([[2000, 2000]]), Draws(7, 0, np.arange(20_000))
    )
    parts = placement.window.prod(axis=1) / 2000**2
    logs = np.log2(placement.window[:, 1] / placement.window[:, 0])
    for values, low, high in ((parts, 0.1, 0.5), (logs, -1, 1)):
        cumulated = np.sort((values - low) / (high - low))
        # Kolmogorov-Smirnov: 1.95 / sqrt(n) is passed by an even distribution but once in a thousand times.
        assert np.abs(cumulated - np.arange(20_000) / 20_000).max() < 1.95 / math.sqrt(20_000)
    places = (placement.first + 0.5) / (2000 - placement.window + 1)
    assert (abs(places.mean(axis=0) - 0.5) < 0.01).all()


def test_images_whose_proportions_never_fit_are_cut_in_the_middle():
    crop = RandomResizedCrop(8, scale=(0.9, 1), ratio=(0.9, 1.1))
    placement = crop.place(np.array([[20, 100]]), Draws(0, 0, np.arange(50)))
    assert (placement.window == [20, 22]).all() and (placement.first == [0, 39]).all()


def test_the_part_that_was_drawn_is_resized_as_pillow_does():
    generator = np.random.default_rng(0)
    noise = generator.integers(0, 256, (12, 60, 50, 3), np.uint8)
    images = torch.from_numpy(noise).permute(0, 3, 1, 2)
    crop, draws = RandomResizedCrop((24, 31)), Draws(3, 0, np.arange(12))
    placement = crop.place(ImageSpec.of(images).sizes, draws)
    for pixels, image, (top, left, height, width, *_) in zip(
        crop.apply(images, draws).permute(0, 2, 3, 1).numpy(), noise, placement.table().tolist(), strict=True
    ):
        part = Image.fromarray(image[top : top + height, left : left + width])
        theirs = np.asarray(part.resize((31, 24), Image.Resampling.BILINEAR))
        assert np.abs(pixels.astype(int) - theirs).max() <= 1


@pytest.mark.parametrize(
    ("resize", "image", "expected"),
    [
        (Resize(20), (40, 60), (20, 30)),
        (Resize(20), (60, 40), (30, 20)),
        (Resize([20]), (33, 50), (20, 30)),  # 30.3 is cut off, as torchvision does
        (Resize((7, 9)), (40, 60), (7, 9)),
        (Resize(20, max_size=25), (40, 60), (16, 25)),
        (Resize(20, max_size=25), (20, 21), (20, 21)),
        (Resize(1), (1, 300), (1, 300)),
    ],
)
def test_one_number_is_the_shorter_side(resize, image, expected):
    assert resize.output(spec_of(*image))[1:3] == expected
    assert resize.place(np.array([image]), Draws(0, 0, np.arange(2))).size == expected


def test_flips_turn_half_of_the_images_upside_down():
    images = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).reshape(2, 3, 4, 5).repeat(500, 1, 1, 1)
    flip, draws = RandomVerticalFlip(), Draws(0, 0, np.arange(1000))
    result, chosen = flip.apply(images, draws), flip.place(ImageSpec.of(images).sizes, draws).turned[:, 0]
    assert 420 < chosen.sum() < 580
    for image, turned, was_turned in zip(images, result, chosen, strict=True):
        assert torch.equal(turned, image.flip(1) if was_turned else image)
    assert torch.equal(RandomVerticalFlip(1).apply(images, draws), images.flip(2))
    assert repr(RandomVerticalFlip(0.25)) == "RandomVerticalFlip(p=0.25)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomResizedCrop(20, scale=(0.5, 0.2)), r"scale=.*larger number comes first.*scale=\(0.2, 0.5\)"),
        (lambda: RandomResizedCrop(20, ratio=(2, 0.5)), r"ratio=.*larger number comes first.*ratio=\(0.5, 2.0\)"),
        (lambda: RandomResizedCrop(20, scale=(0, 1)), "numbers from 0 to 1, 0 not included"),
        (lambda: RandomResizedCrop(20, scale=(0.5, 1.5)), "numbers from 0 to 1"),
        (lambda: RandomResizedCrop(20, ratio=(-1, 1)), "numbers above 0"),
        (lambda: RandomResizedCrop(20, scale=0.5), "give .smallest, largest."),
        (lambda: RandomResizedCrop(20, scale=(0.5, float("nan"))), "scale="),
        (lambda: RandomResizedCrop(20, scale=(float("nan"), 1)), "two numbers from 0 to 1"),
        (lambda: RandomResizedCrop(0), "positive whole number"),
        (lambda: Resize(2.5), "positive whole number"),
        (lambda: Resize((1, 2, 3)), "positive whole number"),
        (lambda: Resize((10, 20), max_size=30), "max_size"),
        (lambda: Resize(20, max_size=20), "above size"),
        (lambda: RandomVerticalFlip(True), "p=True"),
        (lambda: Resize(20).output(ImageSpec(3, 8, 8, torch.float32)), "images are torch.float32.*Put it before"),
        (lambda: RandomResizedCrop(20).apply(torch.zeros(1, 3, 8, 8), Draws(0, 0, np.arange(1))), "torch.float32"),
        (lambda: RandomResizedCrop(20).apply(torch.zeros(3, 8, 8), Draws(0, 0, np.arange(1))), r"shape \(B, C, H, W\)"),
        (lambda: Resize(20).output(spec_of(0, 8)), "no pixels"),
    ],
)
def test_what_has_no_meaning_is_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_a_pair_in_order_is_taken_as_it_is(one, other):
    low, high = sorted((one, other))
    assert ordered_pair("T", "o", (low, high), least=0) == (low, high)
