"""Fitting: a pixel, its mask and the numbers that point at it land at the same place of the row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fastload.errors import ImageError
from fastload.images.fit import Fit, Target, moved_coordinates, resample_mask, resample_pixels

FITS: list[Fit] = ["crop", "pad", "stretch"]
SIDE = st.integers(1, 40)
UINT8, UINT16 = np.dtype(np.uint8), np.dtype(np.uint16)


def placed(pixels: np.ndarray, size: tuple[int, int], channels: int, fit: Fit | None, dtype: str = "uint8"):
    out = np.full((*size, channels), 99, dtype)
    resample_pixels(pixels, Target(*size, channels, out.dtype, fit), out)
    return out


def placed_mask(mask: np.ndarray, size: tuple[int, int], fit: Fit | None, fill: int = 0):
    out = np.full(size, 99, np.uint8)
    resample_mask(mask, Target(*size, 3, UINT8, fit), out, fill=fill)
    return out


@settings(max_examples=6 * settings.default.max_examples)
@given(height=SIDE, width=SIDE, size=st.tuples(SIDE, SIDE), fit=st.sampled_from(FITS), data=st.data())
def test_a_box_encloses_exactly_its_pixels_in_the_mask(height, width, size, fit, data):
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    bottom, right = data.draw(st.integers(top + 1, height)), data.draw(st.integers(left + 1, width))
    mask = np.zeros((height, width), np.uint8)
    mask[top:bottom, left:right] = 7
    found = placed_mask(mask, size, fit, fill=255)
    target = Target(*size, 3, UINT8, fit)
    box = moved_coordinates(np.array([[left, top, right, bottom]]), "xyxy", np.array([[height, width]]), target)
    x0, y0, x1, y1 = box[0].tolist()
    y, x = np.mgrid[: size[0], : size[1]] + 0.5
    inside = (x > x0 - 1e-3) & (x < x1 + 1e-3) & (y > y0 - 1e-3) & (y < y1 + 1e-3)
    well_inside = (x > x0 + 1e-3) & (x < x1 - 1e-3) & (y > y0 + 1e-3) & (y < y1 - 1e-3)
    assert not (found[~inside] == 7).any()
    assert (found[well_inside] == 7).all()
    xywh = moved_coordinates(
        np.array([[left, top, right - left, bottom - top]]), "xywh", np.array([[height, width]]), target
    )
    np.testing.assert_allclose(xywh[0], [x0, y0, x1 - x0, y1 - y0], atol=1e-4)


@settings(max_examples=4 * settings.default.max_examples)
@given(factor=st.integers(1, 5), height=st.integers(1, 12), width=st.integers(1, 12), data=st.data())
def test_a_bright_pixel_is_where_its_point_says(factor, height, width, data):
    row, column = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    size, fit = (height * factor, data.draw(st.integers(width, 60))), data.draw(st.sampled_from(FITS))
    pixels = np.zeros((height, width), np.uint8)
    pixels[row, column] = 255
    found = placed(pixels, size, 1, fit)[..., 0].astype(float)
    point = moved_coordinates(
        np.array([[column + 0.5, row + 0.5]]), "points", np.array([[height, width]]), Target(*size, 1, UINT8, fit)
    )[0]
    if 0 < point[0] < size[1] and 0 < point[1] < size[0]:
        assert found[int(point[1]), int(point[0])] >= 0.5 * found.max() > 0


@settings(max_examples=2 * settings.default.max_examples)
@given(height=SIDE, width=SIDE, size=st.tuples(SIDE, SIDE), fit=st.sampled_from(FITS))
def test_a_mask_is_fitted_like_its_image(height, width, size, fit):
    inside = np.full((height, width), 200, np.uint8)
    np.testing.assert_array_equal(placed_mask(inside, size, fit) > 0, placed(inside, size, 1, fit)[..., 0] > 0)
    mask = np.random.default_rng(0).integers(0, 255, (height, width), dtype=np.uint8)
    found = placed_mask(mask, size, fit, fill=255)
    assert set(np.unique(found)) <= {*np.unique(mask), 255}
    if fit == "stretch":
        expected = np.asarray(Image.fromarray(mask).resize(size[::-1], Image.Resampling.NEAREST))
        # The middle of a step may fall on the edge of two pixels; then either is the nearest.
        if size[0] % 2 and size[1] % 2 and height % 2 and width % 2:
            np.testing.assert_array_equal(found, expected)


def test_many_places_move_each_by_the_size_of_its_image():
    target = Target(10, 10, 3, UINT8, "crop")
    sizes = np.array([[10, 20], [20, 10], [10, 10], [10, 20]])
    points = np.tile(np.array([[5.0, 0.0, 15.0, 10.0]]), (4, 1))
    found = moved_coordinates(points, "points", sizes, target)
    np.testing.assert_array_equal(found, [[0, 0, 10, 10], [5, -5, 15, 5], [5, 0, 15, 10], [0, 0, 10, 10]])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(
        moved_coordinates(points.reshape(4, 2, 2), "points", sizes, target)[1], [[5, -5], [15, 5]]
    )
    boxes = np.zeros((4, 3, 4))
    boxes[:, 0] = (5, 0, 10, 10)  # x, y, width, height
    boxes[:, 1] = (0, 0, 4, 10)
    moved = moved_coordinates(boxes, "xywh", sizes, target)
    np.testing.assert_array_equal(moved[0], [[0, 0, 10, 10], [0, 0, 0, 10], [0, 0, 0, 0]])
    np.testing.assert_array_equal(moved[1], [[5, 0, 5, 5], [0, 0, 4, 5], [0, 0, 0, 0]])
    assert moved_coordinates(np.zeros((0, 3, 4)), "xywh", np.zeros((0, 2)), target).shape == (0, 3, 4)
    padded = Target(20, 20, 3, UINT8, "pad")
    moved = moved_coordinates(np.array([[[0, 0, 0, 0], [0, 0, 20, 10]]]), "xyxy", np.array([[10, 20]]), padded)
    np.testing.assert_array_equal(moved, [[[0, 0, 0, 0], [0, 5, 20, 15]]])


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("found", [1, 3, 4])
@pytest.mark.parametrize("wanted", [1, 3, 4])
def test_channels_are_those_of_pillow(dtype, found, wanted):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, found)).astype(dtype)
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[wanted]
    eight = Image.fromarray(pixels.astype(np.uint8)[..., 0] if found == 1 else pixels.astype(np.uint8))
    expected = np.asarray((eight.convert("RGB") if found == 4 and wanted == 1 else eight).convert(mode))
    result = placed(pixels, (5, 7), wanted, None, dtype).squeeze()
    if dtype == "uint16" and wanted == 4 and found < 4:
        assert (result[..., 3] == 65535).all()
        result[..., 3] = 255
    np.testing.assert_array_equal(result, expected)


def test_sixteen_bits_lose_nothing_but_what_is_asked_for():
    pixels = np.random.default_rng(0).integers(0, 65536, (6, 8, 3), dtype=np.uint16)
    np.testing.assert_array_equal(placed(pixels, (6, 8), 3, None, "uint16"), pixels)
    np.testing.assert_array_equal(placed(pixels, (6, 8), 3, None), pixels >> 8)
    ramp = np.tile(np.arange(8, dtype=np.uint16)[None, :, None] * 9000, (6, 1, 4))
    ramp[..., 3] = 65535
    found = placed(ramp, (3, 4), 4, "stretch", "uint16")
    eight = placed((ramp // 257).astype(np.uint8), (3, 4), 4, "stretch")
    assert np.abs(found / 257 - eight).max() <= 1
    with pytest.raises(ImageError, match="8 bits a channel where the dataset has 16"):
        placed(np.zeros((6, 8), np.uint8), (6, 8), 1, None, "uint16")


@pytest.mark.parametrize(("dtype", "full"), [("uint8", 255), ("uint16", 65535)])
def test_what_is_transparent_lends_no_colour(dtype, full):
    pixels = np.zeros((4, 4, 4), dtype)
    pixels[:, :2] = (full, 0, 0, full)
    pixels[:, 2:] = (0, full, 0, 0)
    found = placed(pixels, (3, 3), 4, "stretch", dtype)
    assert not found[..., 1].any() and (found[..., 0] == full * (found[..., 3] > 0)).all()


def test_arrays_of_another_kind_are_refused():
    with pytest.raises(ImageError, match=r"\(4, 4, 2\), not \(H, W\)"):
        placed(np.zeros((4, 4, 2), np.uint8), (4, 4), 3, "crop")
    with pytest.raises(ImageError, match="float64, not uint8 or uint16"):
        placed(np.zeros((4, 4, 3)), (4, 4), 3, None)
    with pytest.raises(ImageError, match="is 5x4 pixels"):
        placed(np.zeros((4, 5, 3), np.uint8), (4, 4), 3, None)
    with pytest.raises(ImageError, match="a mask is uint8"):
        placed_mask(np.zeros((4, 4), np.int64), (4, 4), None)


def test_places_move_to_a_size_of_each_images_own():
    sizes, goals = np.array([[100, 200], [50, 50], [0, 0]]), np.array([[50, 100], [50, 50], [0, 0]])
    points = np.tile(np.array([[[30.0, 90.0]]]), (3, 1, 1))
    np.testing.assert_array_equal(moved_coordinates(points, "points", sizes, goals)[:2, 0], [[15, 45], [30, 90]])
    boxes = np.tile(np.array([[[10.0, 20, 400, 40], [0, 0, 0, 0]]]), (3, 1, 1))
    np.testing.assert_array_equal(moved_coordinates(boxes, "xywh", sizes, goals)[0], [[5, 10, 95, 20], [0, 0, 0, 0]])
