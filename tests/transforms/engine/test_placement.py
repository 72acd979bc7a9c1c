"""Joined placements are the placements one after the other; masks, points and boxes go where the pixels go."""

from __future__ import annotations

from functools import reduce

import numpy as np
import torch
from batches import some_images
from hypothesis import given
from hypothesis import strategies as st
from placement_strategies import varied

from fastload.transforms import Draws, RandomHorizontalFlip, RandomVerticalFlip
from fastload.transforms.boxes_and_points import Coordinates
from fastload.transforms.engine.buffers import OutputPool
from fastload.transforms.engine.place import place_images, place_varied_coordinates, place_varied_masks
from fastload.transforms.engine.placement import Placement, resized, windows


@st.composite
def steps(draw, size, *, resizes):
    """A placement of three images of a size, a window, a turn or (if allowed) a resized window."""
    kind = draw(st.sampled_from(["window", "mirror", "flip", *(["resize"] if resizes else [])]))
    if kind in ("mirror", "flip"):
        flip = (RandomHorizontalFlip if kind == "mirror" else RandomVerticalFlip)(0.5)
        return flip.place(np.array([size]), Draws(draw(st.integers(0, 99)), 0, np.arange(3)))
    windows_of = [[draw(st.integers(1, side)) for side in size] for _ in range(3)]
    firsts = [[draw(st.integers(0, side - part)) for side, part in zip(size, one, strict=True)] for one in windows_of]
    first, window = np.array(firsts), np.array(windows_of)
    if kind == "resize":
        return resized(first, window, np.array([[draw(st.integers(1, 14)), draw(st.integers(1, 14))]]))
    return windows(first, window.min(axis=0, keepdims=True))


@st.composite
def chains(draw):
    size = first = (draw(st.integers(1, 12)), draw(st.integers(1, 12)))
    placements, resizes = [], True
    for _ in range(draw(st.integers(1, 5))):
        placements.append(draw(steps(size, resizes=resizes)))
        resizes = resizes and not placements[-1].resized
        size = placements[-1].size
    return first, placements


def one_after_the_other(images: torch.Tensor, placements: list[Placement]) -> torch.Tensor:
    for placement in placements:
        images = place_images(images, placement, OutputPool())
    return images


@given(chain=chains())
def test_joined_placements_give_what_they_give_one_after_the_other(chain):
    size, placements = chain
    images = some_images(3, *size)
    together = place_images(images, reduce(Placement.then, placements), OutputPool())
    # A turn before a resize and after it round their sums in another order.
    difference = together.to(torch.int16) - one_after_the_other(images, placements).to(torch.int16)
    assert difference.abs().max() <= 1
    if not any(placement.resized for placement in placements):
        assert not difference.any()


def one_pixel_drawn(size, x: int, y: int) -> torch.Tensor:
    images = torch.zeros((3, 1, *size), dtype=torch.uint8)
    images[:, 0, y, x] = 255
    return images


@given(chain=chains(), where=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_a_point_goes_where_its_pixel_goes(chain, where):
    size, placements = chain
    placements = [placement for placement in placements if not placement.resized]
    x, y = round(where[0] * (size[1] - 1)), round(where[1] * (size[0] - 1))
    images, points = one_pixel_drawn(size, x, y), torch.tensor([[[x, y]]] * 3, dtype=torch.float32)
    for placement in placements:
        if (placement.first.max(axis=0) + placement.size > images.shape[2:]).any():
            return  # it was made for what a left out resize gives
        images = place_images(images, placement, OutputPool())
        points = placement.move_points(points)
    for image, point in zip(images[:, 0].numpy(), points[:, 0].tolist(), strict=True):
        at = [round(point[1]), round(point[0])]
        inside = 0 <= at[0] < image.shape[0] and 0 <= at[1] < image.shape[1]
        assert inside == bool(image.any())
        assert not inside or image[at[0], at[1]] == 255


@given(chain=chains())
def test_boxes_and_points_of_joined_placements_are_those_of_one_after_the_other(chain):
    size, placements = chain
    boxes = torch.tensor([[1.0, 2.0, 4.0, 8.0], [0, 0, size[1], size[0]], [3, 3, 3, 3]])
    apart = boxes
    for placement in placements:
        apart = placement.move_boxes(apart)
    assert torch.allclose(reduce(Placement.then, placements).move_boxes(boxes), apart, rtol=1e-4, atol=1e-3)
    assert (apart[:, 2] >= apart[:, 0] - 1e-3).all() and (apart[:, 3] >= apart[:, 1] - 1e-3).all()


def test_a_box_around_the_image_is_around_the_resized_and_mirrored_one():
    none = np.zeros((1, 2), np.int64)
    larger = resized(none, np.array([[10, 20]]), np.array([[30, 40]]))
    placement = larger.then(RandomHorizontalFlip(1).place(larger.sizes, Draws(0, 0, np.arange(1))))
    assert placement.move_boxes(torch.tensor([[0.0, 0, 20, 10]])).tolist() == [[0, 0, 40, 30]]
    assert placement.move_boxes(torch.tensor([[0.0, 0, 5, 5]])).tolist() == [[30, 0, 40, 15]]
    # torchvision's keypoints: resizing multiplies, mirroring counts from the last pixel.
    assert placement.move_points(torch.tensor([[[0.0, 0.0], [5.0, 2.0]]])).tolist() == [[[39, 0], [29, 6]]]


@given(case=varied(factors=(1, 2, 4, 8)))
def test_snapped_windows_are_whole_blocks_or_end_with_their_images(case):
    shapes, placement, factors = case
    snapped = placement.snapped(factors, shapes)
    begin, size, blocks = snapped.first, snapped.window, factors[:, None]
    rest = size % blocks
    assert not (begin % blocks).any()
    assert ((rest == 0) | ((begin + size == shapes) & (2 * rest >= blocks))).all()
    assert (begin >= 0).all() and (begin + size <= shapes).all()
    assert (size // blocks >= placement.window // blocks).all() and (size > 0).all()
    assert (abs(begin - placement.first) < blocks).all()
    assert (abs(begin + size - placement.first - placement.window) < blocks).all()
    single = factors == 1
    assert np.array_equal(snapped.table()[single], placement.table()[single])


def cut(image: np.ndarray, placement: Placement, sample: int) -> np.ndarray:
    (top, left), (height, width) = placement.first[sample], placement.window[sample]
    return image[top : top + height, left : left + width]


@given(case=varied(factors=(1, 2, 4)))
def test_a_part_shows_the_window_that_the_full_image_shows(case):
    shapes, placement, factors = case
    snapped = placement.snapped(factors, shapes)
    tops = snapped.first[:, 0] // (2 * factors) * factors
    parts = snapped.in_decoded(factors, tops)
    for i, (height, width) in enumerate(shapes.tolist()):
        image = np.arange(height * width).reshape(height, width)
        shrunk = image[tops[i] :: factors[i], :: factors[i]]
        assert np.array_equal(cut(shrunk, parts, i), cut(image, snapped, i)[:: factors[i], :: factors[i]])
    assert np.array_equal(parts.table()[:, 4:], snapped.table()[:, 4:])  # nothing but the windows changes


@given(case=varied(), dtype=st.sampled_from([np.uint8, np.uint16, np.int32]))
def test_mask_values_are_those_of_the_nearest_pixel(case, dtype):
    shapes, p, _ = case
    generator = np.random.default_rng(3)
    masks = [generator.integers(0, 250, shape).astype(dtype) for shape in shapes]
    output = torch.from_numpy(np.zeros((len(masks), *p.size), dtype))
    place_varied_masks(masks, p, output)
    for i, (mask, placed) in enumerate(zip(masks, output.numpy(), strict=True)):
        rows, columns = (
            [p.first[i, axis] + (p.offset[i, axis] + y) * p.window[i, axis] // p.scaled[i, axis] for y in range(size)]
            for axis, size in enumerate(p.size)
        )
        expected = mask[rows][:, columns]
        expected = expected[:, ::-1] if p.turned[i, 1] else expected
        assert np.array_equal(placed, expected[::-1] if p.turned[i, 0] else expected)


def test_boxes_and_points_are_scaled_by_each_samples_own_factor():
    scaled, offset = np.array([[30, 40], [30, 80]]), np.array([[0, 0], [5, 10]])
    turned = np.array([[False, False], [False, True]])
    first, window = np.array([[0, 0], [2, 4]]), np.array([[10, 20], [10, 10]])
    placement = Placement(first, window, scaled, offset, np.array([[20, 40]]), turned)
    fields = {
        "boxes": torch.tensor([[[0.0, 0, 5, 5], [0, 0, 0, 0]], [[5, 4, 2, 3], [5, 4, 90, 90]]]),
        "landmarks": torch.tensor([[5.0, 2.0], [6, 4]]),
        "labels": torch.tensor([1, 2]),
    }
    how = {"boxes": Coordinates("xywh"), "landmarks": Coordinates("points")}
    moved = place_varied_coordinates(fields, placement, how)
    assert sorted(moved) == ["boxes", "landmarks"]
    # The second sample: x' = 40 - ((x - 4) * 8 - 10), y' = (y - 2) * 3 - 5; boxes are cut off at 40 x 20.
    assert moved["boxes"].tolist() == [[[0, 0, 10, 15], [0, 0, 0, 0]], [[26, 1, 14, 9], [0, 1, 40, 19]]]
    assert moved["landmarks"].tolist() == [[10, 6], [39 - 6, 1]]
