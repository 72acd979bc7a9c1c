"""A disk that fails: each way of reading says which file, row and key."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import pytest
from ragged_cases import varied_file
from small_files import random_pixels, write_foreign, write_random

from fastload.errors import FormatError, ReadError
from fastload.format.header import read_header
from fastload.inspection.verify import verify_file
from fastload.read.reader import open_rows


@pytest.fixture
def bad_disk(monkeypatch: pytest.MonkeyPatch):
    """Call it with a range of bytes: whoever reads one of them gets EIO, as from a bad sector."""
    bad = range(0)
    reads = {"pread": os.pread, "preadv": os.preadv}

    def pread(fd: int, count: int, offset: int) -> bytes:
        check(offset, count)
        return reads["pread"](fd, count, offset)

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        check(offset, len(buffers[0]))
        return reads["preadv"](fd, buffers, offset)

    def check(offset: int, count: int) -> None:
        if max(offset, bad.start) < min(offset + count, bad.stop):
            raise OSError(5, "Input/output error")

    def spoil(where: range) -> None:
        nonlocal bad
        bad = where

    monkeypatch.setattr("fastload.read.linear.native.library", lambda: None)  # all reads come here then
    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(os, "preadv", preadv)
    return spoil


def _keys(count: int) -> np.ndarray:
    return np.array([b"cat/%03d.jpg" % i for i in range(count)])


def test_a_bad_sector_under_pixels_is_named_with_file_row_and_key(tmp_path: Path, bad_disk) -> None:
    path = write_random(tmp_path / "a.h5", rows=12)
    images = read_header(path).fields["images"]
    assert images.offset is not None
    bad_disk(range(images.offset + 6 * images.row_bytes + 5, images.offset + 6 * images.row_bytes + 6))
    reader = open_rows(read_header(path), ["images"], "pread")
    for rows in (np.arange(4, 9), np.array([9, 6, 2])):  # read at once, and one by one
        with pytest.raises(ReadError, match=r"a\.h5: sample '00000006' \(row 6\): `images` cannot be read \(Input/out"):
            reader.gather(rows, {"images": np.empty((len(rows), 16, 12, 3), np.uint8)})
    reader.close()
    assert [(row.row, row.what) for row in verify_file(path).damaged] == [(6, "cannot be read: Input/output error")]


def test_a_bad_sector_under_a_row_of_its_own_length_is_named_as_well(tmp_path: Path, bad_disk) -> None:
    file = read_header(varied_file(tmp_path / "a.h5"))
    reader = open_rows(file, ["images"], "pread")
    every = np.arange(file.num_rows)
    index = reader.within(every, lambda: reader.encoded("images").index(every))
    extent = file.fields["images"].ragged
    assert extent is not None
    at = extent.base + int(index.offset[3]) + 1
    bad_disk(range(at, at + 1))
    with pytest.raises(ReadError, match=r"a\.h5: sample '.*' \(row 3\): `images` cannot be read"):
        reader.decoded("images", np.arange(file.num_rows))
    reader.close()


@pytest.mark.parametrize("chunk_rows", [1, 4])
def test_a_bad_sector_under_a_compressed_chunk_is_named_as_well(tmp_path: Path, bad_disk, chunk_rows: int) -> None:
    path = write_foreign(tmp_path / "a.h5", random_pixels(12), chunk_rows=chunk_rows, key=_keys(12))
    with h5py.File(path) as file:
        found = file["images"].id.get_chunk_info_by_coord((8, 0, 0, 0))
    reader = open_rows(read_header(path), ["images"])
    bad_disk(range(found.byte_offset + 9, found.byte_offset + 10))
    rows = np.array([1, 9, 8]) if chunk_rows > 1 else np.array([1, 8, 3])
    first = 9 if chunk_rows > 1 else 8  # the first of the batch that lies there
    with pytest.raises(ReadError, match=rf"a\.h5: sample 'cat/00{first}.jpg' \(row {first}\): `images` cannot be read"):
        reader.gather(rows, {"images": np.empty((3, 16, 12, 3), np.uint8)})
    reader.close()


def test_a_damaged_index_of_chunks_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", libver="earliest") as file:
        file.create_dataset("images", data=random_pixels(12), chunks=(4, 16, 12, 3), compression="gzip")
    good = read_header(tmp_path / "a.h5")
    data = (tmp_path / "a.h5").read_bytes()
    assert data.count(b"TREE\x01") == 1  # the B-tree of the chunks
    for damaged in (b"TREX\x01", b"TREE\x07"):
        path = tmp_path / "b.h5"
        path.write_bytes(data.replace(b"TREE\x01", damaged))
        out, error = {"images": np.empty((1, 16, 12, 3), np.uint8)}, r"b\.h5: its HDF5 metadata is damaged"
        with closing(open_rows(read_header(path), ["images"])) as reader, pytest.raises(FormatError, match=error):
            reader.gather(np.array([0]), out)
    assert good.num_rows == 12
