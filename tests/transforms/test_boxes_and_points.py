"""Boxes and points in the forms that files have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastload.transforms import (
    CenterCrop,
    Draws,
    Normalize,
    RandAugment,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    apply_transforms,
)
from fastload.transforms.boxes_and_points import Coordinates, coordinates_of

FLIP = RandomHorizontalFlip(1)
IMAGES = torch.zeros(2, 3, 10, 20, dtype=torch.uint8)


def moved(transforms, name, values, kind):
    fields = {"images": IMAGES, name: torch.as_tensor(values)}
    draws = Draws(0, 0, np.arange(len(IMAGES)))
    return apply_transforms(transforms, fields, draws, coordinates={name: Coordinates(kind)})[name]


def test_boxes_keep_the_form_they_came_in_are_cut_off_at_the_edges_and_may_vanish():
    corners = moved([FLIP], "bbox", [[2, 3, 6, 9]] * 2, "xyxy")
    sizes = moved([FLIP], "bbox", [[2, 3, 4, 6]] * 2, "xywh")
    assert corners.tolist() == [[14, 3, 18, 9]] * 2 and corners.dtype == torch.float32
    assert sizes.tolist() == [[14, 3, 4, 6]] * 2
    crop = CenterCrop((10, 10))  # columns 5 to 15
    assert moved([crop], "bbox", [[2, 0, 6, 5], [0, 0, 4, 5]], "xyxy").tolist() == [[0, 0, 1, 5], [0, 0, 0, 5]]


@pytest.mark.parametrize("kind", ["xywh", "xyxy"])
@pytest.mark.parametrize(
    "transforms",
    [
        [RandomCrop((8, 12)), RandomHorizontalFlip(), RandomVerticalFlip()],
        [RandomResizedCrop((7, 9)), RandomHorizontalFlip()],
        [Resize((20, 30))],
        [RandAugment(num_ops=3, magnitude=20), RandomHorizontalFlip()],
    ],
)
def test_several_boxes_of_an_image_move_as_each_would_alone_and_padding_stays(transforms, kind):
    boxes = torch.tensor([[[2, 3, 9, 8], [0, 0, 5, 4], [0, 0, 0, 0]], [[11, 1, 14, 7], [0, 0, 0, 0], [0, 0, 0, 0]]])
    together = moved(transforms, "boxes", boxes, kind)
    assert together.shape == (2, 3, 4) and together.dtype == torch.float32
    for place in range(3):
        alone = moved(transforms, "bbox", boxes[:, place], kind)
        filled = (boxes[:, place] != 0).any(dim=1)
        assert torch.equal(together[filled, place], alone[filled])
        assert not together[~filled, place].any()
    assert moved(transforms, "boxes", boxes[:, :0], kind).shape == (2, 0, 4)


@pytest.mark.parametrize("shape", [(2, 4), (2, 2, 2)])
def test_points_keep_their_shape_and_may_leave_the_image(shape):
    points = torch.tensor([[1, 2, 19, 9]] * 2).reshape(shape)
    result = moved([CenterCrop((10, 10)), FLIP], "landmarks", points, "points")
    assert result.shape == shape and result.reshape(2, 4).tolist() == [[13, 2, -5, 9]] * 2


def test_without_a_transform_that_moves_pixels_they_stay_as_they_are():
    result = moved([Normalize([0.5] * 3, [0.5] * 3)], "bbox", [[2, 3, 4, 6]] * 2, "xywh")
    assert result.dtype == torch.int64 and result.tolist() == [[2, 3, 4, 6]] * 2


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        (("x_1", "y_1", "width", "height"), "xywh"),
        (("x", "y", "w", "h"), "xywh"),
        (("xmin", "ymin", "xmax", "ymax"), "xyxy"),
        (("left", "top", "right", "bottom"), "xyxy"),
        (("x1", "y1", "x2", "y2"), "xyxy"),
        (("cx", "cy", "w", "h"), None),
        (("ymin", "xmin", "ymax", "xmax"), None),
        (("a", "b", "c", "d"), None),
        ((), None),
    ],
)
def test_boxes_are_read_by_the_names_of_their_columns_or_not_at_all(columns, kind):
    how = coordinates_of("bbox", (4,), columns)
    assert bool(how.unusable) == (kind is None)
    assert kind is None or how.kind == kind
    assert coordinates_of("bbox", (5,), columns).unusable
    assert coordinates_of("boxes", (7, 4), columns) == how
    assert coordinates_of("boxes", (7, 5), columns).unusable


@pytest.mark.parametrize(
    ("shape", "columns", "usable"),
    [
        ((10,), (), True),
        ((4,), ("lefteye_x", "lefteye_y", "nose_x", "nose_y"), True),
        ((5, 2), (), True),
        ((4,), ("x1", "x2", "y1", "y2"), False),
        ((4, 3), (), False),  # with a visibility
        ((5,), (), False),
        ((3, 3), (), False),
    ],
)
def test_points_are_pairs_or_refused(shape, columns, usable):
    assert bool(coordinates_of("landmarks", shape, columns).unusable) != usable
