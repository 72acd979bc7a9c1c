from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from ragged_cases import NUM_ROWS, flip, flip_byte, jpeg_row, varied_file, varied_rows
from small_files import write_random

from fastload.errors import FastloadError, FormatError, OptionError
from fastload.format.header import read_header
from fastload.format.ragged import Column
from fastload.inspection.verify import DamagedRow, verify_file

PACKED = {
    "rows": 40,
    "classes": ("cat", "dog"),
    "columns": {"key": Column(np.array([f"cat/{i:03d}.jpg".encode() for i in range(40)]))},
    "chunk_rows": 7,
}


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_undamaged_file_is_ok_whatever_the_number_of_workers(packed: Path, workers: int) -> None:
    report = verify_file(packed, workers=workers)
    assert report.ok and report.header_ok and report.damaged == ()
    assert (report.num_rows, report.pixel_bytes) == (40, 40 * 16 * 12 * 3)


def set_value(name: str, row: int | str, value: object) -> Callable[[Path], None]:
    """A change of one row, or of one attribute, of a dataset."""

    def change(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            (file[name].attrs if isinstance(row, str) else file[name])[row] = value

    return change


def flip_pixel(path: Path) -> None:
    images = read_header(path).fields["images"]
    assert images.offset is not None
    flip_byte(path, images.offset + 13 * images.row_bytes + 5)


@pytest.mark.parametrize(
    ("change", "header_ok", "damaged"),
    [
        (flip_pixel, True, (DamagedRow(13, "cat/013.jpg", "pixels"),)),
        (set_value("labels", 21, 7), True, (DamagedRow(21, "cat/021.jpg", "fields"),)),
        (set_value("digest", 4, 0), False, (DamagedRow(4, "cat/004.jpg", "pixels"),)),
        (set_value("labels", "names", np.array([b"dog", b"cat"])), False, ()),
    ],
)
def test_what_was_changed_is_named(
    packed_copy: Path, change: Callable[[Path], None], header_ok: bool, damaged: tuple[DamagedRow, ...]
) -> None:
    change(packed_copy)
    report = verify_file(packed_copy)
    assert (report.ok, report.header_ok, report.damaged) == (False, header_ok, damaged)


def test_masks_sixteen_bits_one_row_and_rows_larger_than_a_span_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verify_file(write_random(tmp_path / "b.h5", rows=1, below=2**16, dtype=np.uint16)).ok
    monkeypatch.setattr("fastload.inspection.verify.SPAN_BYTES", 100)
    path = write_random(tmp_path / "a.h5", rows=9, masks=True)
    assert verify_file(path, workers=2).ok
    set_value("masks", 3, np.uint8(99))(path)
    assert [(row.row, row.what) for row in verify_file(path).damaged] == [(3, "pixels")]


def test_files_without_digests_and_a_negative_number_of_workers_are_refused(packed_copy: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="workers=-1"):
        verify_file(packed_copy, workers=-1)
    with h5py.File(packed_copy, "r+") as file:
        del file["digest"]
    with pytest.raises(FormatError, match=r"its digests cannot be read \(missing or of another type: digest\)"):
        verify_file(packed_copy)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = np.zeros((40, 16, 12, 3), np.uint8)
    with pytest.raises(FormatError, match="holds no digests"):
        verify_file(tmp_path / "a.h5")


def test_rows_that_another_tool_compressed_still_have_their_digests(packed_copy: Path) -> None:
    """The header changed, since offsets belong to it; the pixels did not."""
    with h5py.File(packed_copy, "r+") as file:
        values = file["images"][()]
        del file["images"]
        file.create_dataset("images", data=values, chunks=(5, 16, 12, 3), compression="gzip")
    report = verify_file(packed_copy)
    assert report.damaged == () and not report.header_ok
    with h5py.File(packed_copy, "r+") as file:
        file["images"][8, 0, 0, 0] ^= 1
    assert [row.row for row in verify_file(packed_copy).damaged] == [8]


def test_a_row_that_the_disk_does_not_deliver_is_damaged_not_a_crash(
    packed_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = read_header(packed_copy).fields["images"]
    assert images.offset is not None
    bad = range(images.offset + 6 * images.row_bytes, images.offset + 7 * images.row_bytes)
    real = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if max(offset, bad.start) < min(offset + len(buffers[0]), bad.stop):
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr("fastload.read.linear.native.library", lambda: None)  # all reads come here then
    monkeypatch.setattr(os, "preadv", failing)
    report = verify_file(packed_copy)
    assert report.damaged == (DamagedRow(6, "cat/006.jpg", "cannot be read: Input/output error"),)


def test_a_byte_flipped_anywhere_in_the_metadata_is_found_or_harmless(packed_copy: Path, tmp_path: Path) -> None:
    """Never a crash, and never a clean report about other values than were packed."""
    original = packed_copy.read_bytes()
    with h5py.File(packed_copy) as file:
        values = {name: item[()] for name, item in file.items()}
        names = file["labels"].attrs["names"].tolist()
    path = tmp_path / "flipped.h5"
    rng = np.random.default_rng(1)
    images = read_header(packed_copy).fields["images"]
    assert images.offset is not None
    end = images.offset + 42 * images.row_bytes
    places = [*rng.integers(0, images.offset, 60), *rng.integers(end, len(original), 60)]
    for place in places:
        path.write_bytes(original)
        flip_byte(path, int(place))
        try:
            ok = verify_file(path, workers=0).ok
        except FastloadError:
            continue
        if ok:
            with h5py.File(path) as file:
                assert {name: item[()].tolist() for name, item in file.items()} == {
                    name: value.tolist() for name, value in values.items()
                }
                assert file["labels"].attrs["names"].tolist() == names


@pytest.mark.parametrize(("workers", "masks", "size"), [(0, False, None), (2, True, None), (2, True, (16, 20))])
def test_an_undamaged_file_of_ragged_rows_is_ok(
    tmp_path: Path, workers: int, masks: bool, size: tuple[int, int] | None
) -> None:
    report = verify_file(varied_file(tmp_path / "a.h5", varied_rows(size=size), masks=masks), workers=workers)
    assert report.ok and report.num_rows == NUM_ROWS
    with h5py.File(tmp_path / "a.h5") as file:
        stored = file["images_bytes"][()].sum() + (file["masks_bytes"][()].sum() if masks else 0)
    assert report.pixel_bytes == stored


def test_damaged_ragged_rows_are_named_and_a_jpeg_that_does_not_decode_though_its_digest_holds(tmp_path: Path) -> None:
    rows = varied_rows()
    whole, shape, orientation = jpeg_row(30, 40)  # type: ignore[misc]
    rows[5] = (whole[:200], shape, orientation)
    path = varied_file(tmp_path / "a.h5", rows, masks=True)
    flip(path, "images", 3, -30)  # a JPEG
    flip(path, "images", 4, 11)
    flip(path, "masks", 9, 0)
    set_value("images_offset", 7, 2**50)(path)  # damage of fields and of the sample
    seen: list[tuple[int, int]] = []
    report = verify_file(path, progress=lambda done, total: seen.append((done, total)))
    assert not report.ok and seen[-1] == (NUM_ROWS, NUM_ROWS)
    found = [(row.row, row.key, row.what.split(" (")[0]) for row in report.damaged]
    assert [(row, key) for row, key, _ in found] == [(i, f"{i:03d}.jpg") for i in (3, 4, 5, 7, 7, 9)]
    what = [what for *_, what in found]
    assert what[:4] == ["pixels", "pixels", "its stored JPEG cannot be decoded", "fields"]
    assert "lies outside" in report.damaged[4].what and what[5] == "pixels"
