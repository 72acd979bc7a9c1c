"""Batches placed on any device: against a float64 reference and against Pillow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batches import LAYOUTS, some_images
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from resize_cases import reference

from fastload.transforms.engine import place
from fastload.transforms.engine.buffers import OutputPool
from fastload.transforms.engine.place import gather, place_images, place_masks
from fastload.transforms.engine.placement import Placement, resized, windows


@st.composite
def placements(draw, size=(23, 19), batch=3):
    """Windows of images of a size, resized, a part of that, flipped."""
    windows_of = np.array([[draw(st.integers(1, side)) for side in size] for _ in range(batch)])
    first = np.array([[draw(st.integers(0, s - part)) for s, part in zip(size, w, strict=True)] for w in windows_of])
    scaled = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    size = draw(st.sampled_from([scaled, tuple(draw(st.integers(1, side)) for side in scaled)]))
    offset = np.array([[draw(st.integers(0, s - part)) for s, part in zip(scaled, size, strict=True)] for _ in first])
    turned = np.array(draw(st.lists(st.booleans(), min_size=2 * batch, max_size=2 * batch))).reshape(batch, 2)
    return Placement(first, windows_of, np.array([scaled] * batch), offset, np.array([size]), turned)


def images_of(channels=3, dtype=np.uint8, layout="nhwc") -> torch.Tensor:
    return some_images(3, 23, 19, dtype, channels=channels, layout=layout)


def assert_close(result: torch.Tensor, images: torch.Tensor, placement: Placement, levels: float) -> None:
    assert result.shape == (len(images), images.shape[1], *placement.size) and result.dtype == images.dtype
    assert result.permute(0, 2, 3, 1).is_contiguous()
    pairs = zip(images.permute(0, 2, 3, 1).numpy(), result.permute(0, 2, 3, 1).numpy(), strict=True)
    for sample, (image, pixels) in enumerate(pairs):
        assert np.abs(pixels - reference(image, placement, sample)).max() <= levels


@given(placement=placements(), channels=st.sampled_from([1, 3, 4]), layout=st.sampled_from(LAYOUTS))
def test_resized_images_are_within_a_level_of_the_exact_mean(placement, channels, layout):
    # torch's uint8 resize rounds once after each axis, with 8-bit fractions at least: 1.0 of 255 in all.
    images = images_of(channels, layout=layout)
    before = images.clone()
    assert_close(place_images(images, placement, OutputPool()), images, placement, 1.02)
    assert torch.equal(images, before)


@given(placement=placements(), dtype=st.sampled_from([np.uint8, np.uint16]), channels=st.sampled_from([1, 3]))
def test_weight_matrices_round_the_exact_mean(placement, dtype, channels):
    images = images_of(channels, dtype)
    assert_close(place._placed_by_weights(images, placement), images, placement, 0.5 + 1e-9)
    with torch.autocast("cpu", torch.bfloat16):  # as around a whole training loop
        assert_close(place._placed_by_weights(images, placement), images, placement, 0.5 + 1e-9)


@pytest.mark.parametrize("size", [(10, 12), (23, 40), (7, 5), (46, 38)])
def test_a_whole_image_is_resized_as_pillow_does(size):
    images = images_of()
    zeros = np.zeros((3, 2), np.int64)
    result = place_images(images, resized(zeros, zeros + np.array([23, 19]), np.array([size])), OutputPool())
    for image, pixels in zip(images.permute(0, 2, 3, 1).numpy(), result.permute(0, 2, 3, 1).numpy(), strict=True):
        theirs = np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR))
        assert np.abs(pixels.astype(int) - theirs).max() <= 1


@given(placement=placements())
def test_masks_are_placed_alike_by_taking_lines_and_by_one_gather(placement):
    masks = torch.from_numpy(np.random.default_rng(5).integers(0, 250, (3, 23, 19), np.uint8))
    assert torch.equal(place_masks(masks, placement, 255, OutputPool()), gather(masks[:, None], placement)[:, 0])


def test_masks_are_filled_outside_the_image():
    masks = torch.full((2, 4, 4), 7, dtype=torch.uint8)
    placement = windows(np.array([[-2, 0], [3, 3]]), np.array([[3, 4]]), padding="constant", fill=(99.0,))
    assert place_masks(masks, placement, 255, OutputPool()).tolist() == [
        [[255] * 4, [255] * 4, [7] * 4],
        [[7, 255, 255, 255], [255] * 4, [255] * 4],
    ]


def test_no_images_stay_none():
    none = np.zeros((0, 2), np.int64)
    placement = resized(none, none, np.array([[5, 6]]))
    assert place_images(images_of()[:0], placement, OutputPool()).shape == (0, 3, 5, 6)
    assert place._placed_by_weights(images_of()[:0], placement).shape == (0, 3, 5, 6)
