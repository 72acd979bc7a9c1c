"""Contact sheets of files with byte stores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from ragged_cases import NUM_ROWS, flip, varied_file, varied_rows

from fastload.errors import FormatError
from fastload.inspection.preview import make_preview


@pytest.mark.parametrize("size", [None, (120, 130)])
def test_the_sheet_shows_every_row_in_its_own_size(tmp_path: Path, size: tuple[int, int] | None) -> None:
    rows = varied_rows(size=size)
    rows[0] = np.full((130, 120, 3) if size is None else (*size, 3), (1, 200, 100), np.uint8)
    rows[2] = np.full((113, 180, 3) if size is None else (*size, 3), (99, 7, 50), np.uint8)
    path = varied_file(tmp_path / "a.h5", rows, chunk_bytes=1 << 20)
    assert make_preview(path, tmp_path / "a.png") == tuple(range(NUM_ROWS))
    sheet = np.asarray(Image.open(tmp_path / "a.png").convert("RGB"))
    for row in (rows[0], rows[2]):
        assert isinstance(row, np.ndarray)
        shown = np.argwhere((sheet == row[0, 0]).all(axis=2))
        assert tuple(shown.max(axis=0) - shown.min(axis=0) + 1) == row.shape[:2] and len(shown) == row.size // 3


def test_masks_lie_over_their_images(tmp_path: Path) -> None:
    rows = [np.full((112 + 8 * i, 120, 3), 200, np.uint8) for i in range(6)]
    bare, masked = (varied_file(tmp_path / f"{masks}.h5", rows, masks=masks, chunk_bytes=1 << 20) for masks in (0, 1))
    for path in (bare, masked):
        make_preview(path, path.with_suffix(".png"))
    plain, coloured = (np.asarray(Image.open(path.with_suffix(".png"))) for path in (bare, masked))
    assert (plain == 200).all(axis=2).sum() >= sum(row.size // 3 for row in rows)
    assert not (coloured == 200).all(axis=2).any()


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    rows = varied_rows()
    path = varied_file(tmp_path / "a.h5", rows)
    flip(path, "images", 5, 0)  # no JPEG any more
    with pytest.raises(FormatError, match=r"a\.h5: sample '005\.jpg' \(row 5\): its stored JPEG"):
        make_preview(path, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
