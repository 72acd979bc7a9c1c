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


PERSON = [
    [3, 4, 2],
    [15, 4, 1],
    [0, 0, 0],
    [9, 9, 2],
]  # nose, left and right eye (not labelled), middle
PAIRS = (0, 2, 1, 3)


def keypoints(transforms, values=((PERSON, [[0, 0, 0]] * 4),) * 2, pairs=PAIRS):
    fields = {"images": IMAGES, "keypoints": torch.tensor(values, dtype=torch.float32)}
    how = coordinates_of("keypoints", (2, 4, 3), (), "", pairs)
    assert how == Coordinates("xyv", "", pairs)
    draws = Draws(0, 0, np.arange(len(IMAGES)))
    return apply_transforms(transforms, fields, draws, coordinates={"keypoints": how})["keypoints"]


@pytest.mark.parametrize("flip", [FLIP, RandomVerticalFlip(1)])
def test_a_mirror_swaps_left_and_right_keypoints_and_a_half_turn_none(flip):
    def there(x, y):
        return [19 - x, y] if flip is FLIP else [x, 9 - y]

    once = keypoints([flip])
    assert once[0, 0].tolist() == [[*there(3, 4), 2], [0, 0, 0], [*there(15, 4), 1], [*there(9, 9), 2]]
    assert not once[:, 1].any(), "padding stays"
    assert keypoints([flip], pairs=())[0, 0, 1].tolist() == [*there(15, 4), 1]
    assert keypoints([flip, flip])[0, 0].tolist() == PERSON
    turned = keypoints([FLIP, RandomVerticalFlip(1)])
    assert turned[0, 0].tolist() == [[16, 5, 2], [4, 5, 1], [0, 0, 0], [10, 0, 2]]


def test_keypoints_that_are_cropped_away_are_not_labelled_any_more():
    found = keypoints([CenterCrop((10, 10))])  # columns 5 to 15
    assert found[0, 0].tolist() == [[0, 0, 0], [10, 4, 1], [0, 0, 0], [4, 9, 2]]  # a pixel outside is no difference
    assert keypoints([CenterCrop((10, 8))])[0, 0].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 0], [3, 9, 2]]


@pytest.mark.parametrize(
    "transforms",
    [
        [RandomResizedCrop((7, 9)), RandomHorizontalFlip()],
        [RandAugment(num_ops=3, magnitude=20), RandomHorizontalFlip(), RandomVerticalFlip()],
        [RandomHorizontalFlip(), Resize((20, 40)), RandomVerticalFlip()],
    ],
)
def test_keypoints_lie_where_landmarks_would_and_are_swapped_once_for_each_mirror(transforms):
    as_landmarks = moved(transforms, "landmarks", [[point[:2] for point in PERSON]] * 2, "points")
    found = keypoints(transforms)[:, 0]
    for sample in range(2):
        swapped = found[sample][list(PAIRS)]
        fits = []
        for points in (found[sample], swapped):
            seen = points[:, 2] > 0
            fits.append(torch.allclose(points[seen, :2], as_landmarks[sample][seen]))
        assert any(fits)


@pytest.mark.parametrize(
    ("shape", "pairs", "kind"),
    [
        ((5, 17, 3), (), "xyv"), ((17, 3), (), "xyv"), ((17, 2), (), "points"), ((5, 17, 2), (), "points"),
        ((10,), (), "points"), ((51,), (), None), ((6,), (), None), ((17, 4), (), None),
        ((4, 3), (0, 2, 1, 3), "xyv"), ((4, 3), (0, 2, 1), None), ((4, 3), (0, 2, 2, 3), None), ((4, 3), "no", None),
    ],
)  # fmt: skip
def test_keypoints_are_triples_or_pairs_with_whole_flip_pairs_or_refused(shape, pairs, kind):
    how = coordinates_of("keypoints", shape, (), "", pairs)
    assert (None if how.unusable else how.kind) == kind
