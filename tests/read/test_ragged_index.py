"""Impossible entries in the index of a ragged field are found, with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ragged_cases import varied_file

from fastload.format.header import Field, read_header
from fastload.format.ragged import JPEG, RAW, ZSTD, RaggedExtent, RaggedIndex
from fastload.read.ragged_rows import impossible_rows


def index(**changed: object) -> RaggedIndex:
    """Three raw rows of 2x3 pixels, the second one changed."""
    parts = {
        "offset": np.array([0, 18, 36]),
        "bytes": np.array([18, 18, 18]),
        "shape": np.array([[2, 3, 3]] * 3, np.int32),
        "encoding": np.array([RAW] * 3, np.uint8),
        "orientation": np.ones(3, np.uint8),
    }
    for part, value in changed.items():
        parts[part][1] = value
    return RaggedIndex(**parts)


def field(tmp_path: Path, name: str = "images") -> Field:
    found = read_header(varied_file(tmp_path / "a.h5", masks=True)).fields[name]
    return replace(found, ragged=RaggedExtent(base=4096, num_bytes=54, chunk_bytes=64, num_rows=3))


def test_rows_that_can_be_have_no_reason(tmp_path: Path) -> None:
    images = field(tmp_path)
    for changed in ({}, {"encoding": JPEG, "bytes": 7}, {"encoding": ZSTD, "bytes": 0}, {"orientation": 8}):
        assert impossible_rows(index(**changed), images) == {}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"offset": 37}, "lies outside of its 54 bytes"),
        ({"offset": 2**63 - 1}, "lies outside"),
        ({"bytes": -1}, "lies outside"),
        ({"encoding": 3}, "number 3, which means nothing"),
        ({"shape": (2, 0, 3)}, "its size is 0x2"),
        ({"shape": (2**24, 2**24, 3), "encoding": JPEG}, "its size is 16777216x16777216"),
        ({"shape": (2, 3, 4)}, "its shape is (2, 3, 4)"),
        ({"bytes": 17}, "it has 17 bytes in `images`, its pixels need 18"),
        ({"orientation": 9, "encoding": JPEG}, "its EXIF orientation is 9"),
    ],
)
def test_a_row_that_cannot_be_has_one(tmp_path: Path, changed: dict[str, object], reason: str) -> None:
    found = impossible_rows(index(**changed), field(tmp_path))
    assert list(found) == [1] and reason in found[1]


def test_a_mask_is_neither_a_jpeg_nor_has_it_channels(tmp_path: Path) -> None:
    rows = index(bytes=6, encoding=JPEG)
    found = impossible_rows(rows, field(tmp_path, "masks"))
    assert list(found) == [0, 1, 2] and "number 1, which means nothing" in found[1]
    assert "its pixels need 6" in found[0]
