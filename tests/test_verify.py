from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from fastload.errors import FastloadError, FormatError, OptionError
from fastload.format import read_header
from fastload.layout import write_packed
from fastload.sources.listing import Column
from fastload.verify import DamagedRow, verify_file


def pixels(count: int = 40, shape: tuple[int, ...] = (16, 12, 3)) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    columns = {
        "labels": Column(np.arange(40) % 2, {"names": ("cat", "dog")}),
        "key": Column(np.array([f"cat/{i:03d}.jpg".encode() for i in range(40)])),
    }
    return write_packed(tmp_path / "a.h5", pixels(), columns, chunk_rows=7)


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_undamaged_file_is_ok_whatever_the_number_of_workers(packed: Path, workers: int) -> None:
    report = verify_file(packed, workers=workers)
    assert report.ok and report.header_ok and report.damaged == ()
    assert (report.num_rows, report.pixel_bytes) == (40, 40 * 16 * 12 * 3)


def test_the_damaged_row_and_its_key_are_named(packed: Path) -> None:
    images = read_header(packed).fields["images"]
    assert images.offset is not None
    flip(packed, images.offset + 13 * images.row_bytes + 5)
    report = verify_file(packed)
    assert not report.ok and report.header_ok
    assert report.damaged == (DamagedRow(13, "cat/013.jpg", "pixels"),)


def test_a_changed_label_is_named(packed: Path) -> None:
    with h5py.File(packed, "r+") as file:
        file["labels"][21] = 7
    report = verify_file(packed)
    assert report.damaged == (DamagedRow(21, "cat/021.jpg", "fields"),)


def test_a_damaged_mask_counts_as_damaged_pixels(tmp_path: Path) -> None:
    path = write_packed(tmp_path / "a.h5", pixels(), masks=pixels(40, (16, 12)))
    assert verify_file(path).ok
    with h5py.File(path, "r+") as file:
        file["masks"][3, 0, 0] ^= 1
    assert [(row.row, row.what) for row in verify_file(path).damaged] == [(3, "pixels")]


@pytest.mark.parametrize("change", ["digest", "attribute"])
def test_a_changed_header_is_noticed(packed: Path, change: str) -> None:
    with h5py.File(packed, "r+") as file:
        if change == "digest":
            file["digest"][4] = 0
        else:
            file["labels"].attrs["names"] = np.array([b"dog", b"cat"])
    report = verify_file(packed)
    assert not report.ok and not report.header_ok


def test_sixteen_bits_and_one_row_are_verified(tmp_path: Path) -> None:
    assert verify_file(write_packed(tmp_path / "a.h5", pixels(1).astype(np.uint16) * 256)).ok


def test_rows_larger_than_a_span_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.verify.SPAN_BYTES", 100)
    path = write_packed(tmp_path / "a.h5", pixels(9))
    assert verify_file(path, workers=2).ok


def test_rows_that_another_tool_compressed_still_have_their_digests(packed: Path) -> None:
    """The header changed, since offsets belong to it; the pixels did not."""
    with h5py.File(packed, "r+") as file:
        values = file["images"][()]
        del file["images"]
        file.create_dataset("images", data=values, chunks=(5, 16, 12, 3), compression="gzip")
    report = verify_file(packed)
    assert report.damaged == () and not report.header_ok
    with h5py.File(packed, "r+") as file:
        file["images"][8, 0, 0, 0] ^= 1
    assert [row.row for row in verify_file(packed).damaged] == [8]


def test_a_row_that_the_disk_does_not_deliver_is_damaged_not_a_crash(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = read_header(packed).fields["images"]
    assert images.offset is not None
    bad = range(images.offset + 6 * images.row_bytes, images.offset + 7 * images.row_bytes)
    real = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if max(offset, bad.start) < min(offset + len(buffers[0]), bad.stop):
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    report = verify_file(packed)
    assert report.damaged == (DamagedRow(6, "cat/006.jpg", "cannot be read: Input/output error"),)


def test_progress_ends_at_the_number_of_rows(packed: Path) -> None:
    seen: list[tuple[int, int]] = []
    verify_file(packed, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (40, 40)


def test_a_foreign_file_has_no_digests(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = pixels()
    with pytest.raises(FormatError, match="holds no digests"):
        verify_file(tmp_path / "a.h5")


def test_a_packed_file_that_lost_its_digests_is_a_named_error(packed: Path) -> None:
    with h5py.File(packed, "r+") as file:
        del file["digest"]
    with pytest.raises(FormatError, match="digest"):
        verify_file(packed)


def test_a_negative_number_of_workers_is_refused(packed: Path) -> None:
    with pytest.raises(OptionError, match="workers=-1"):
        verify_file(packed, workers=-1)


def test_a_byte_flipped_anywhere_in_the_metadata_is_found_or_harmless(packed: Path, tmp_path: Path) -> None:
    """Never a crash, and never a clean report about other values than were packed."""
    original = packed.read_bytes()
    with h5py.File(packed) as file:
        values = {name: item[()] for name, item in file.items()}
        names = file["labels"].attrs["names"].tolist()
    path = tmp_path / "flipped.h5"
    rng = np.random.default_rng(1)
    images = read_header(packed).fields["images"]
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
