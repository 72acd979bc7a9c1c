import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.sources.coco import decode_counts, fill_polygon


def inside(points: np.ndarray, height: int, width: int) -> np.ndarray:
    """Even-odd by a ray to the left of each centre, one pixel at a time."""
    mask = np.zeros((height, width), np.uint8)
    for row in range(height):
        for column in range(width):
            x, y, odd = column + 0.5, row + 0.5, False
            for (x0, y0), (x1, y1) in zip(points, np.roll(points, -1, axis=0), strict=True):
                if (y0 <= y) != (y1 <= y) and x0 + (y - y0) * ((x1 - x0) / (y1 - y0)) <= x:
                    odd = not odd
            mask[row, column] = odd
    return mask


quarter = st.integers(-20, 60).map(lambda n: n / 4)


@given(st.lists(st.tuples(quarter, quarter), min_size=3, max_size=9))
def test_a_pixel_is_covered_when_its_centre_lies_inside(points: list[tuple[float, float]]) -> None:
    corners = np.array(points)
    mask = np.zeros((8, 11), np.uint8)
    fill_polygon(mask, corners, 1)
    assert (mask == inside(corners, 8, 11)).all()


FAR = [(-1e8, -1e8), (1e8, -1e8), (1e8, 1e8), (-1e8, 1e8)]


@pytest.mark.parametrize("points", [[], [(1, 1)], [(1, 1), (5, 5)], [(1, 1), (5, 1), (3, 1)], [(2, 2)] * 4, FAR])
def test_a_polygon_without_area_covers_nothing_and_one_far_beyond_the_image_all(points: list) -> None:
    mask = np.zeros((8, 11), np.uint8)
    fill_polygon(mask, np.array(points, np.float32).reshape(-1, 2), 7)
    assert (mask == (7 if points is FAR else 0)).all()


def encode(lengths: list[int]) -> str:
    """COCO's string of runs."""
    text = ""
    for i, length in enumerate(lengths):
        value = length - (lengths[i - 2] if i > 2 else 0)
        while True:
            bits = value & 0x1F
            value >>= 5
            more = value != (-1 if bits & 0x10 else 0)
            text += chr((bits | 0x20 if more else bits) + 48)
            if not more:
                break
    return text


@given(st.lists(st.integers(0, 2**28), max_size=12))
def test_runs_in_a_string_come_back(lengths: list[int]) -> None:
    assert decode_counts(encode(lengths)) == lengths
    last = 100_000 + (lengths[-2] if len(lengths) > 2 else 0)  # of several characters, also as a difference
    with pytest.raises(ValueError, match="cut short"):
        decode_counts(encode([*lengths, last])[:-1])
