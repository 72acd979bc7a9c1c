"""Windows of images of different sizes: snapped to decoded blocks, masks and boxes through the same window."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastload.transforms.boxes_and_points import Coordinates
from fastload.transforms.engine.place import place_varied_coordinates, place_varied_masks
from fastload.transforms.engine.placement import VariedPlacement


@st.composite
def varied(draw, batch=3, factors=(1,)):
    """The shapes of images, a placement of them, and a factor for each that is no larger than its window."""
    shapes, numbers, shrunk = [], [], []
    size = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    for _ in range(batch):
        factor = draw(st.sampled_from(factors))
        window = draw(st.integers(factor, 40)), draw(st.integers(factor, 40))
        first = draw(st.integers(0, 20)), draw(st.integers(0, 20))
        beyond = draw(st.integers(0, 9)), draw(st.integers(0, 9))
        scaled = draw(st.integers(size[0], 20)), draw(st.integers(size[1], 20))
        offset = draw(st.integers(0, scaled[0] - size[0])), draw(st.integers(0, scaled[1] - size[1]))
        shapes.append([sum(side) for side in zip(first, window, beyond, strict=True)])
        numbers.append([*first, *window, *scaled, *offset])
        shrunk.append(factor)
    flags = np.array(draw(st.lists(st.booleans(), min_size=2 * batch, max_size=2 * batch)))
    placement = VariedPlacement(*np.array(numbers).T, flags[:batch], flags[batch:], size)
    return np.array(shapes), placement, np.array(shrunk)


@given(case=varied(factors=(1, 2, 4, 8)))
def test_snapped_windows_are_whole_blocks_or_end_with_their_images(case):
    shapes, placement, factors = case
    snapped = placement.snapped(factors, shapes)
    for axis, (first, length) in enumerate((("top", "height"), ("left", "width"))):
        begin, size = getattr(snapped, first), getattr(snapped, length)
        old_begin, old_size = getattr(placement, first), getattr(placement, length)
        rest = size % factors
        assert not (begin % factors).any()
        assert ((rest == 0) | ((begin + size == shapes[:, axis]) & (2 * rest >= factors))).all()
        assert (begin >= 0).all() and (begin + size <= shapes[:, axis]).all()
        assert (size // factors >= old_size // factors).all() and (size > 0).all()
        assert (abs(begin - old_begin) < factors).all()
        assert (abs(begin + size - old_begin - old_size) < factors).all()
    single = factors == 1
    assert np.array_equal(snapped.table()[single], placement.table()[single])


@given(case=varied(factors=(1, 2, 4)))
def test_a_part_shows_the_window_that_the_full_image_shows(case):
    shapes, placement, factors = case
    snapped = placement.snapped(factors, shapes)
    tops = snapped.top // (2 * factors) * factors
    parts = snapped.in_decoded(factors, tops)
    for i, (height, width) in enumerate(shapes.tolist()):
        image = np.arange(height * width).reshape(height, width)
        shown = image[snapped.top[i] :][: snapped.height[i], snapped.left[i] :][:, : snapped.width[i]]
        shrunk = image[tops[i] :: factors[i], :: factors[i]]
        part = shrunk[parts.top[i] :][: parts.height[i], parts.left[i] :][:, : parts.width[i]]
        assert np.array_equal(part, shown[:: factors[i], :: factors[i]])
    assert np.array_equal(parts.table()[:, 4:], snapped.table()[:, 4:])


@given(case=varied(), dtype=st.sampled_from([np.uint8, np.uint16, np.int32]))
def test_mask_values_are_those_of_the_nearest_pixel(case, dtype):
    shapes, p, _ = case
    generator = np.random.default_rng(3)
    masks = [generator.integers(0, 250, shape).astype(dtype) for shape in shapes]
    result = place_varied_masks(masks, p).numpy()
    assert result.dtype == dtype
    for i, mask in enumerate(masks):
        rows = [p.top[i] + (p.offset_y[i] + y) * p.height[i] // p.scaled_height[i] for y in range(p.size[0])]
        columns = [p.left[i] + (p.offset_x[i] + x) * p.width[i] // p.scaled_width[i] for x in range(p.size[1])]
        expected = mask[rows][:, columns]
        expected = expected[:, ::-1] if p.mirrored[i] else expected
        assert np.array_equal(result[i], expected[::-1] if p.flipped[i] else expected)


def test_masks_are_written_where_asked():
    ones, none = np.ones(1, np.int64), np.zeros(1, np.bool_)
    placement = VariedPlacement(
        ones, ones, 2 * ones, 2 * ones, 2 * ones, 2 * ones, 0 * ones, 0 * ones, none, none, (2, 2)
    )
    slot = torch.zeros((1, 2, 2), dtype=torch.uint8)
    assert place_varied_masks([np.arange(12, dtype=np.uint8).reshape(3, 4)], placement, slot) is slot
    assert slot.tolist() == [[[5, 6], [9, 10]]]


def test_boxes_and_points_are_scaled_by_each_samples_own_factor():
    numbers = np.array([[0, 0, 10, 20, 30, 40, 0, 0], [2, 4, 10, 10, 30, 80, 5, 10]])
    none = np.zeros(2, np.bool_)
    placement = VariedPlacement(*numbers.T, np.array([False, True]), none, (20, 40))
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
