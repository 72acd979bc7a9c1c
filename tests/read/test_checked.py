"""Samples of ragged fields: their encoded bytes and their pixels, checked."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from ragged_cases import flip, varied_file, varied_rows

from fastload.errors import FileChangedError, ImageError
from fastload.format.header import read_header
from fastload.format.ragged import JPEG, RAW
from fastload.read.checked import CheckedSamples


def test_rows_are_what_was_stored(tmp_path: Path) -> None:
    rows = varied_rows()
    samples = CheckedSamples(read_header(varied_file(tmp_path / "a.h5", rows, masks=True)))
    for i, row in enumerate(rows):
        found = samples.checked(i).row
        if isinstance(row, tuple):
            assert (found.image, found.encoding, found.shape, found.orientation) == (row[0], JPEG, *row[1:])
        else:
            assert (bytes(found.image), found.encoding) == (row.tobytes(), RAW)
            assert np.array_equal(samples.pixels("images", i), row)
        assert samples.pixels("images", i).shape == found.shape == samples.shape(i)
        assert samples.pixels("masks", i).shape == found.shape[:2]
    samples.close()


def test_sixteen_bits(tmp_path: Path) -> None:
    rows = [np.full((4 + i, 5, 1), 300 + i, np.uint16) for i in range(6)]
    samples = CheckedSamples(read_header(varied_file(tmp_path / "a.h5", rows)))
    assert all(np.array_equal(samples.pixels("images", i), row) for i, row in enumerate(rows))
    assert samples.encoded(2).shape == (6, 5, 1)
    samples.close()


@pytest.mark.parametrize(("field", "row", "at"), [("images", 0, 3), ("images", 1, -9), ("masks", 4, 0)])
def test_a_flipped_bit_is_told(tmp_path: Path, field: str, row: int, at: int) -> None:
    path = varied_file(tmp_path / "a.h5", masks=True)
    flip(path, field, row, at)
    samples = CheckedSamples(read_header(path))
    with pytest.raises(ImageError, match="digest differs"):
        samples.encoded(row)
    assert samples.encoded(row + 1).digest
    samples.close()


@pytest.mark.parametrize(
    ("dataset", "value", "said"),
    [
        ("images_offset", -8, "lies outside"),
        ("images_offset", 2**40, "lies outside"),
        ("images_bytes", 2**62, "lies outside"),
        ("images_encoding", 9, "number 9, which means nothing"),
        ("images_shape", 0, "0x0"),
        ("images_shape", 3, "its pixels need 27"),
        ("images_shape", 2**31 - 1, "its size is 2147483647x2147483647"),
        ("images_orientation", 9, "orientation is 9"),
        ("masks_encoding", JPEG, "number 1, which means nothing"),
    ],
)
def test_an_impossible_place_is_never_read(tmp_path: Path, dataset: str, value: int, said: str) -> None:
    path = varied_file(tmp_path / "a.h5", masks=True)
    with h5py.File(path, "r+") as file:
        file[dataset][2] = value
    samples = CheckedSamples(read_header(path))
    with pytest.raises(ImageError, match=said):
        samples.encoded(2)
    samples.close()


def test_a_file_that_is_written_to_meanwhile_is_refused(tmp_path: Path) -> None:
    path = varied_file(tmp_path / "a.h5")
    samples = CheckedSamples(read_header(path))
    flip(path, "images", 0, 0)
    with pytest.raises(FileChangedError):
        samples.check_identity()
    samples.close()
