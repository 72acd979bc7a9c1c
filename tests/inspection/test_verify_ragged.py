"""`fastload verify` of files with byte stores."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest
from ragged_cases import NUM_ROWS, flip, jpeg_row, varied_file, varied_rows

from fastload.format.header import read_header
from fastload.inspection.verify import DamagedRow, verify_file


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("size", [None, (16, 20)])
def test_an_undamaged_file_is_ok(tmp_path: Path, workers: int, masks: bool, size: tuple[int, int] | None) -> None:
    report = verify_file(varied_file(tmp_path / "a.h5", varied_rows(size=size), masks=masks), workers=workers)
    assert report.ok and report.num_rows == NUM_ROWS
    with h5py.File(tmp_path / "a.h5") as file:
        stored = file["images_bytes"][()].sum() + (file["masks_bytes"][()].sum() if masks else 0)
    assert report.pixel_bytes == stored


def test_damaged_rows_are_named(tmp_path: Path) -> None:
    path = varied_file(tmp_path / "a.h5", masks=True)
    flip(path, "images", 3, -30)  # a JPEG
    flip(path, "images", 4, 11)
    flip(path, "masks", 9, 0)
    seen: list[tuple[int, int]] = []
    report = verify_file(path, progress=lambda done, total: seen.append((done, total)))
    assert report.damaged == tuple(DamagedRow(i, f"{i:03d}.jpg", "pixels") for i in (3, 4, 9))
    assert not report.ok and seen[-1] == (NUM_ROWS, NUM_ROWS)


def test_a_jpeg_that_does_not_decode_is_named_though_its_digest_holds(tmp_path: Path) -> None:
    rows = varied_rows()
    whole, shape, orientation = jpeg_row(30, 40)  # type: ignore[misc]
    rows[5] = (whole[:200], shape, orientation)
    report = verify_file(varied_file(tmp_path / "a.h5", rows))
    (found,) = report.damaged
    assert found.row == 5 and found.what.startswith("its stored JPEG cannot be decoded (")


def test_a_changed_index_is_damage_of_fields_and_of_the_sample(tmp_path: Path) -> None:
    path = varied_file(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file["images_offset"][7] = 2**50
    what = [found.what for found in verify_file(path).damaged if found.row == 7]
    assert what[0] == "fields" and "lies outside" in what[1] and len(what) == 2


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    from fastload.errors import FormatError

    path = varied_file(tmp_path / "a.h5")
    store = read_header(path).fields["images"].ragged
    assert store is not None
    with open(path, "r+b") as file:
        file.truncate(store.base + store.num_bytes // 2)
    with pytest.raises(FormatError, match="truncated"):
        verify_file(path)
