from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from fastload.errors import ImageError
from fastload.estimate.rates import PASSES, _timed, pixel_rate
from fastload.store import JPEG, RAW, EncodedRow

UINT8 = np.dtype(np.uint8)


def raw(height: int, width: int, dtype: str = "u1", *, mask: bool = False) -> EncodedRow:
    pixels = np.random.default_rng(height).integers(0, 200, (height, width, 3)).astype(dtype)
    masked = pixels[..., 0].astype("u1").tobytes() if mask else None
    return EncodedRow(pixels.tobytes(), RAW, pixels.shape, 1, 0, masked)


def jpeg(height: int, width: int) -> EncodedRow:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "JPEG")
    return EncodedRow(file.getvalue(), JPEG, (height, width, 3), 1, 0)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        ([raw(8, 9), raw(8, 9)], "u1"),
        ([raw(8, 9, "u2")], "u2"),
        ([raw(8, 9, mask=True), raw(9, 8, mask=True)], "u1"),
        ([raw(8, 9, "u2"), raw(7, 5, "u2")], "u2"),
        ([jpeg(20, 30), raw(8, 9), jpeg(16, 16)], "u1"),
    ],
)
def test_rows_of_every_kind_have_a_rate(rows: list[EncodedRow], dtype: str) -> None:
    assert pixel_rate(rows, np.dtype(dtype), threads=2, seconds=0.01) > 0


def test_a_row_that_cannot_be_decoded_is_no_rate() -> None:
    with pytest.raises(ImageError):
        pixel_rate([EncodedRow(b"\xff\xd8\xff", JPEG, (4, 4, 3), 1, 0)], UINT8, threads=1)


@pytest.mark.parametrize(("seconds", "steps"), [(60.0, PASSES), (0.0, 3)])
def test_each_step_is_done_once_and_at_least_one_a_thread(seconds: float, steps: int) -> None:
    done: list[int] = []

    def make() -> Callable[[int], int]:
        return lambda turn: done.append(turn) or 1  # type: ignore[func-returns-value]  # append: None

    _timed(make, PASSES, 3, seconds)
    assert sorted(done[1:]) == list(range(steps))
