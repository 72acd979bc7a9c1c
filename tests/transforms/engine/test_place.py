"""Resizing against a float64 reference and against Pillow; each way of doing it against the others."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from resize_cases import resize_matrix

from fastload.transforms.engine import cpu_program, place
from fastload.transforms.engine.buffers import OutputPool
from fastload.transforms.engine.cpu_program import place_in_one_call
from fastload.transforms.engine.place import place_images, place_masks
from fastload.transforms.engine.placement import Placement, flips, joined, resized, windows


def reference(image: np.ndarray, placement: Placement, sample: int) -> np.ndarray:
    """One image (C, H, W) placed, as float64, before it is rounded."""
    p, i = placement, sample
    window = image[:, p.top[i] : p.top[i] + p.height[i], p.left[i] : p.left[i] + p.width[i]].astype(np.float64)
    rows, columns = resize_matrix(p.height[i], p.scaled[0]), resize_matrix(p.width[i], p.scaled[1])
    whole = rows @ window @ columns.T
    shown = whole[:, p.offset_y[i] : p.offset_y[i] + p.size[0], p.offset_x[i] : p.offset_x[i] + p.size[1]]
    shown = shown[:, :, ::-1] if p.mirrored[i] else shown
    return shown[:, ::-1] if p.flipped[i] else shown


@st.composite
def placements(draw, size=(23, 19), batch=3):
    """Windows of images of a size, resized, a part of that, flipped."""
    numbers = []
    for _ in range(batch):
        height, width = draw(st.integers(1, size[0])), draw(st.integers(1, size[1]))
        numbers.append((draw(st.integers(0, size[0] - height)), draw(st.integers(0, size[1] - width)), height, width))
    scaled = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    shown = draw(st.integers(1, scaled[0])), draw(st.integers(1, scaled[1]))
    part = windows(
        np.array([draw(st.integers(0, scaled[0] - shown[0])) for _ in range(batch)]),
        np.array([draw(st.integers(0, scaled[1] - shown[1])) for _ in range(batch)]),
        shown,
    )
    flags = np.array(draw(st.lists(st.booleans(), min_size=2 * batch, max_size=2 * batch)))
    turns = [flips(shown, mirrored=flags[:batch]), flips(shown, flipped=flags[batch:])]
    chain = [resized(*np.array(numbers).T, scaled), *([part] if draw(st.booleans()) else [])]
    return joined([*chain, *turns] if shown == scaled or len(chain) > 1 else chain)


def images_of(channels=3, dtype=np.uint8, memory="nhwc", size=(23, 19), batch=3) -> torch.Tensor:
    values = np.random.default_rng(channels).integers(0, np.iinfo(dtype).max, (batch, *size, channels), dtype, True)
    if memory == "nchw":
        return torch.from_numpy(np.ascontiguousarray(values.transpose(0, 3, 1, 2)))
    return torch.from_numpy(values).permute(0, 3, 1, 2)


def assert_close(result: torch.Tensor, images: torch.Tensor, placement: Placement, levels: float) -> None:
    assert result.shape == (len(images), images.shape[1], *placement.size) and result.dtype == images.dtype
    assert result.permute(0, 2, 3, 1).is_contiguous()
    for sample, (image, pixels) in enumerate(zip(images.numpy(), result.numpy(), strict=True)):
        assert np.abs(pixels - reference(image, placement, sample)).max() <= levels


@given(placement=placements(), channels=st.sampled_from([1, 3, 4]), memory=st.sampled_from(["nhwc", "nchw"]))
def test_resized_images_are_within_a_level_of_the_exact_mean(placement, channels, memory):
    # torch's uint8 resize rounds once after each axis, with 8-bit fractions at least: 1.0 of 255 in all.
    images = images_of(channels, memory=memory)
    before = images.clone()
    assert_close(place_images(images, placement, OutputPool()), images, placement, 1.02)
    assert torch.equal(images, before)


@given(placement=placements(), dtype=st.sampled_from([np.uint8, np.uint16]), channels=st.sampled_from([1, 3]))
def test_weight_matrices_round_the_exact_mean(placement, dtype, channels):
    images = images_of(channels, dtype)
    assert_close(place._placed_by_weights(images, placement), images, placement, 0.5 + 1e-9)
    with torch.autocast("cpu", torch.bfloat16):  # as around a whole training loop
        assert_close(place._placed_by_weights(images, placement), images, placement, 0.5 + 1e-9)


@given(placement=placements())
def test_the_way_without_torchscript_gives_the_same(placement):
    images = images_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, "available", lambda: False)
        patch.setitem(sys.modules, "cv2", None)
        cpu_program.opencv.cache_clear()
        apart = place_images(images, placement, OutputPool())
    cpu_program.opencv.cache_clear()
    difference = apart.to(torch.int16) - place_images(images, placement, OutputPool()).to(torch.int16)
    assert difference.abs().max() <= 1  # windows are flipped before the resize there, and after it here


def test_the_way_without_torchscript_uses_opencv_where_it_is_installed():
    pytest.importorskip("cv2", reason="the extra [cpu-aug] is not installed")
    windows_of = [(2, 1, 20, 17), (0, 0, 23, 19), (5, 3, 9, 9)]
    placement = resized(*np.array(windows_of).T, (31, 29))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, "available", lambda: False)
        for channels in (1, 3):
            images = images_of(channels)
            # OpenCV's bilinear resize has 11-bit weights.
            assert_close(place_images(images, placement, OutputPool()), images, placement, 1.02)


@pytest.mark.parametrize("size", [(10, 12), (23, 40), (7, 5), (46, 38)])
def test_a_whole_image_is_resized_as_pillow_does(size):
    images = images_of()
    zeros = np.zeros(3, np.int64)
    result = place_images(images, resized(zeros, zeros, zeros + 23, zeros + 19, size), OutputPool())
    for image, pixels in zip(images.permute(0, 2, 3, 1).numpy(), result.permute(0, 2, 3, 1).numpy(), strict=True):
        theirs = np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR))
        assert np.abs(pixels.astype(int) - theirs).max() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pixels_are_normalized_on_their_way_into_the_output(dtype):
    images, samples = images_of(), torch.tensor([2, 0, 0, 1])
    placement = resized(
        np.array([0, 3, 1, 0]), np.array([2, 0, 1, 0]), np.array([20, 8, 21, 23]), np.array([9, 19, 13, 19]), (23, 19)
    )
    pixels = torch.empty((4, 23, 19, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    floats = torch.empty((4, 23, 19, 3), dtype=dtype).permute(0, 3, 1, 2)
    scale, shift = torch.tensor([0.01, 0.02, 0.03]), torch.tensor([-1.0, 0.5, 0.0])
    table = torch.from_numpy(placement.table())
    place_in_one_call(images, samples, table, placement.scaled, pixels)
    place_in_one_call(images, samples, table, placement.scaled, floats, scale, shift)
    exact = torch.addcmul(shift[:, None, None], pixels.float(), scale[:, None, None])
    assert torch.allclose(floats.float(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert_close(pixels, images[samples], placement, 1.02)


@given(placement=placements())
def test_mask_values_are_those_of_the_nearest_pixel(placement):
    masks = torch.from_numpy(np.random.default_rng(5).integers(0, 250, (3, 23, 19), np.uint8))
    result = place_masks(masks, placement, 255, OutputPool())
    p = placement
    for i, (mask, placed) in enumerate(zip(masks.numpy(), result.numpy(), strict=True)):
        rows = [p.top[i] + (p.offset_y[i] + y) * p.height[i] // p.scaled[0] for y in range(p.size[0])]
        columns = [p.left[i] + (p.offset_x[i] + x) * p.width[i] // p.scaled[1] for x in range(p.size[1])]
        expected = mask[rows][:, columns]
        expected = expected[:, ::-1] if p.mirrored[i] else expected
        assert np.array_equal(placed, expected[::-1] if p.flipped[i] else expected)


def test_masks_are_filled_outside_the_image():
    masks = torch.full((2, 4, 4), 7, dtype=torch.uint8)
    placement = windows(np.array([-2, 3]), np.array([0, 3]), (3, 4), padding="constant", fill=(99.0,))
    assert place_masks(masks, placement, 255, OutputPool()).tolist() == [
        [[255] * 4, [255] * 4, [7] * 4],
        [[7, 255, 255, 255], [255] * 4, [255] * 4],
    ]


def test_no_images_stay_none():
    none = np.zeros(0, np.int64)
    placement = resized(none, none, none, none, (5, 6))
    assert place_images(images_of()[:0], placement, OutputPool()).shape == (0, 3, 5, 6)
    assert place._placed_by_weights(images_of()[:0], placement).shape == (0, 3, 5, 6)
