"""Images and masks of a file: their encoded bytes and their pixels, checked."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from ragged_cases import flip, varied_file, varied_rows

from fastload.errors import FileChangedError, ImageError
from fastload.format.header import read_header
from fastload.format.ragged import JPEG, RAW
from fastload.read.checked import CHANGED, CheckedSamples, close_readers, open_samples
from sample_files import write_packed


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
    wide = [np.full((4 + i, 5, 1), 300 + i, np.uint16) for i in range(6)]
    samples = CheckedSamples(read_header(varied_file(tmp_path / "b.h5", wide)))
    assert all(np.array_equal(samples.pixels("images", i), row) for i, row in enumerate(wide))
    assert samples.shape(2) == (6, 5, 1)
    samples.close()


@pytest.mark.parametrize(("field", "row", "at"), [("images", 0, 3), ("images", 1, -9), ("masks", 4, 0)])
def test_a_flipped_bit_is_told_and_a_write_meanwhile(tmp_path: Path, field: str, row: int, at: int) -> None:
    path = varied_file(tmp_path / "a.h5", masks=True)
    before = CheckedSamples(read_header(path))
    flip(path, field, row, at)
    with pytest.warns(UserWarning, match="its header.* equal"), pytest.raises(ImageError, match="digest differs"):
        before.checked(row)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(FileChangedError):
        before.checked(row)
    before.close()
    path = varied_file(path, masks=True)
    flip(path, field, row, at)
    samples = CheckedSamples(read_header(path))
    with pytest.raises(ImageError, match="digest differs"):
        samples.checked(row)
    assert samples.checked(row + 1).row.digest
    samples.close()


@pytest.mark.parametrize(
    ("dataset", "value", "said"),
    [
        ("images_bytes", 2**62, "lies outside"),
        ("images_shape", 2**31 - 1, "its size is 2147483647x2147483647"),
        ("masks_encoding", JPEG, "number 1, which means nothing"),
    ],
)
def test_an_impossible_place_is_never_read(tmp_path: Path, dataset: str, value: int, said: str) -> None:
    path = varied_file(tmp_path / "a.h5", masks=True)
    with h5py.File(path, "r+") as file:
        file[dataset][2] = value
    samples = CheckedSamples(read_header(path))
    with pytest.raises(ImageError, match=said):
        samples.checked(2)
    samples.close()


@pytest.mark.parametrize("compressed", [False, True])
def test_rows_of_one_size_are_read_and_checked_alike(tmp_path: Path, compressed: bool) -> None:
    images = np.random.default_rng(0).integers(0, 256, (9, 4, 5, 3), dtype=np.uint8)
    path = write_packed(tmp_path / "a.h5", images, chunk_rows=2)
    if compressed:
        with h5py.File(path, "r+") as file:
            del file["images"]
            file.create_dataset("images", data=images, chunks=(2, 4, 5, 3), compression="gzip")
    samples = CheckedSamples(read_header(path))
    assert samples.damaged(range(9)) == [] and not (samples.part("images", "encoding") == JPEG).any()
    for row, image in enumerate(images):
        found = samples.checked(row)
        assert np.array_equal(samples.pixels("images", row), image) and np.array_equal(found.pixels["images"], image)
        assert (found.row.image, found.row.encoding, found.row.shape) == (image.tobytes(), RAW, (4, 5, 3))
    samples.close()
    with h5py.File(path, "r+") as file:
        file["digest"][3] ^= 1
    samples = CheckedSamples(read_header(path))
    assert samples.damaged(range(9)) == [(3, CHANGED)]
    with pytest.raises(ImageError, match="digest differs"):
        samples.checked(3)
    samples.close()


def test_a_reader_stays_open_for_its_file_and_its_process_until_readers_are_closed(tmp_path: Path) -> None:
    path = varied_file(tmp_path / "a.h5")
    first = open_samples(read_header(path))
    assert open_samples(read_header(path)) is first
    pid = os.fork()
    if pid == 0:
        os._exit(open_samples(read_header(path)) is first)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    close_readers()
    first.checked(1)  # still in use
    second = open_samples(first.file)
    assert second is not first
    flip(path, "images", 0, 0)
    assert open_samples(read_header(path)) is not second
