from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from ragged_cases import NUM_ROWS, jpeg_row, varied_file, varied_rows
from ragged_cases import flip as flip_row
from small_files import write_random

from fastload.errors import FastloadError, FormatError, OptionError
from fastload.format.column import Column
from fastload.format.header import read_header
from fastload.inspection.verify import DamagedRow, verify_file

PACKED = {
    "rows": 40,
    "classes": ("cat", "dog"),
    "columns": {"key": Column(np.array([f"cat/{i:03d}.jpg".encode() for i in range(40)]))},
    "chunk_rows": 7,
}


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_undamaged_file_is_ok_whatever_the_number_of_workers(packed_copy: Path, workers: int) -> None:
    report = verify_file(packed_copy, workers=workers)
    assert report.ok and report.header_ok and report.damaged == ()
    assert (report.num_rows, report.pixel_bytes) == (40, 40 * 16 * 12 * 3)


def test_the_damaged_row_and_its_key_are_named(packed_copy: Path) -> None:
    images = read_header(packed_copy).fields["images"]
    assert images.offset is not None
    flip(packed_copy, images.offset + 13 * images.row_bytes + 5)
    report = verify_file(packed_copy)
    assert not report.ok and report.header_ok
    assert report.damaged == (DamagedRow(13, "cat/013.jpg", "pixels"),)


def test_a_changed_label_is_named(packed_copy: Path) -> None:
    with h5py.File(packed_copy, "r+") as file:
        file["labels"][21] = 7
    report = verify_file(packed_copy)
    assert report.damaged == (DamagedRow(21, "cat/021.jpg", "fields"),)


def test_a_damaged_mask_counts_as_damaged_pixels(tmp_path: Path) -> None:
    path = write_random(tmp_path / "a.h5", masks=True)
    assert verify_file(path).ok
    with h5py.File(path, "r+") as file:
        file["masks"][3, 0, 0] ^= 1
    assert [(row.row, row.what) for row in verify_file(path).damaged] == [(3, "pixels")]


@pytest.mark.parametrize("change", ["digest", "attribute"])
def test_a_changed_header_is_noticed(packed_copy: Path, change: str) -> None:
    with h5py.File(packed_copy, "r+") as file:
        if change == "digest":
            file["digest"][4] = 0
        else:
            file["labels"].attrs["names"] = np.array([b"dog", b"cat"])
    report = verify_file(packed_copy)
    assert not report.ok and not report.header_ok


def test_sixteen_bits_and_one_row_are_verified(tmp_path: Path) -> None:
    assert verify_file(write_random(tmp_path / "a.h5", rows=1, below=2**16, dtype=np.uint16)).ok


def test_rows_larger_than_a_span_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.inspection.verify.SPAN_BYTES", 100)
    path = write_random(tmp_path / "a.h5", rows=9)
    assert verify_file(path, workers=2).ok


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

    monkeypatch.setattr("fastload.read.pread._SYSCALLS", {})  # without io_submit all reads come here
    monkeypatch.setattr(os, "preadv", failing)
    report = verify_file(packed_copy)
    assert report.damaged == (DamagedRow(6, "cat/006.jpg", "cannot be read: Input/output error"),)


def test_a_foreign_file_has_no_digests(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = np.zeros((40, 16, 12, 3), np.uint8)
    with pytest.raises(FormatError, match="holds no digests"):
        verify_file(tmp_path / "a.h5")


def test_a_packed_file_that_lost_its_digests_is_a_named_error(packed_copy: Path) -> None:
    with h5py.File(packed_copy, "r+") as file:
        del file["digest"]
    with pytest.raises(FormatError, match="digest"):
        verify_file(packed_copy)


def test_a_negative_number_of_workers_is_refused(packed_copy: Path) -> None:
    with pytest.raises(OptionError, match="workers=-1"):
        verify_file(packed_copy, workers=-1)


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
        flip(path, int(place))
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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("size", [None, (16, 20)])
def test_an_undamaged_file_of_ragged_rows_is_ok(
    tmp_path: Path, workers: int, masks: bool, size: tuple[int, int] | None
) -> None:
    report = verify_file(varied_file(tmp_path / "a.h5", varied_rows(size=size), masks=masks), workers=workers)
    assert report.ok and report.num_rows == NUM_ROWS
    with h5py.File(tmp_path / "a.h5") as file:
        stored = file["images_bytes"][()].sum() + (file["masks_bytes"][()].sum() if masks else 0)
    assert report.pixel_bytes == stored


def test_damaged_ragged_rows_are_named(tmp_path: Path) -> None:
    path = varied_file(tmp_path / "a.h5", masks=True)
    flip_row(path, "images", 3, -30)  # a JPEG
    flip_row(path, "images", 4, 11)
    flip_row(path, "masks", 9, 0)
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
