"""Joined placements are the placements one after the other; points and boxes go where the pixels go."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastload.transforms.engine.buffers import OutputPool
from fastload.transforms.engine.place import place_images
from fastload.transforms.engine.placement import Placement, flips, joined, resized, windows


@st.composite
def steps(draw, size, *, resizes):
    """A placement of three images of a size, a window, a turn or (if allowed) a resized window."""
    kind = draw(st.sampled_from(["window", "mirror", "flip", *(["resize"] if resizes else [])]))
    flags = np.array(draw(st.lists(st.booleans(), min_size=3, max_size=3)))
    if kind == "mirror":
        return flips(size, mirrored=flags)
    if kind == "flip":
        return flips(size, flipped=flags)
    numbers = []
    for _ in range(3):
        height, width = draw(st.integers(1, size[0])), draw(st.integers(1, size[1]))
        numbers.append((draw(st.integers(0, size[0] - height)), draw(st.integers(0, size[1] - width)), height, width))
    top, left, height, width = np.array(numbers).T
    if kind == "resize":
        return resized(top, left, height, width, (draw(st.integers(1, 14)), draw(st.integers(1, 14))))
    shared = (int(height.min()), int(width.min()))
    return windows(top, left, shared)


@st.composite
def chains(draw):
    size = first = (draw(st.integers(1, 12)), draw(st.integers(1, 12)))
    placements, resizes = [], True
    for _ in range(draw(st.integers(1, 5))):
        placements.append(draw(steps(size, resizes=resizes)))
        resizes = resizes and not placements[-1].resized
        size = placements[-1].size
    return first, placements


def images_of(size, channels=3, dtype=np.uint8) -> torch.Tensor:
    values = np.random.default_rng(size[0] * 31 + size[1]).integers(0, 256, (3, *size, channels), dtype)
    return torch.from_numpy(values).permute(0, 3, 1, 2)


def one_after_the_other(images: torch.Tensor, placements: list[Placement]) -> torch.Tensor:
    for placement in placements:
        images = place_images(images, placement, OutputPool())
    return images


@given(chain=chains())
def test_joined_placements_give_what_they_give_one_after_the_other(chain):
    size, placements = chain
    images = images_of(size)
    together = place_images(images, joined(placements), OutputPool())
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
        if placement.top.max() + placement.size[0] > images.shape[2]:
            return  # it was made for what a left out resize gives
        if placement.left.max() + placement.size[1] > images.shape[3]:
            return
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
    assert torch.allclose(joined(placements).move_boxes(boxes), apart, rtol=1e-4, atol=1e-3)
    assert (apart[:, 2] >= apart[:, 0] - 1e-3).all() and (apart[:, 3] >= apart[:, 1] - 1e-3).all()


def test_a_box_around_the_image_is_around_the_resized_and_mirrored_one():
    placement = joined(
        [
            resized(np.zeros(1, int), np.zeros(1, int), np.array([10]), np.array([20]), (30, 40)),
            flips((30, 40), mirrored=np.array([True])),
        ]
    )
    assert placement.move_boxes(torch.tensor([[0.0, 0, 20, 10]])).tolist() == [[0, 0, 40, 30]]
    assert placement.move_boxes(torch.tensor([[0.0, 0, 5, 5]])).tolist() == [[30, 0, 40, 15]]
    # torchvision's keypoints: resizing multiplies, mirroring counts from the last pixel.
    assert placement.move_points(torch.tensor([[[0.0, 0.0], [5.0, 2.0]]])).tolist() == [[[39, 0], [29, 6]]]
