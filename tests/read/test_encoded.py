"""Rows of varying length: their index, their bytes, their pixels, and the errors of damaged ones."""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import h5py
import numpy as np
import pytest
from PIL import Image

from fastload.errors import FileChangedError, FormatError
from fastload.format.codecs import Codec
from fastload.format.header import read_header
from fastload.format.ragged import JPEG, RAW, ZSTD, Column, RaggedExtent, RaggedIndex
from fastload.read.encoded import impossible_rows
from fastload.read.reader import open_rows
from fastload.read.row_errors import sample_error
from sample_files import write_ragged

READS = pytest.mark.parametrize("read", ["map", "pread"])
ROWS = np.array([3, 0, 3, 4, 1])


def pixels(height, width, channels=3, dtype=np.uint8):
    rng = np.random.default_rng(height * 100 + width)
    return rng.integers(0, np.iinfo(dtype).max, (height, width, channels), dtype, endpoint=True)


def as_jpeg(image):
    file = io.BytesIO()
    Image.fromarray(image.squeeze()).save(file, "JPEG")
    return file.getvalue(), np.asarray(Image.open(file))


def varied(tmp_path, **options):
    """A file of raw rows and JPEGs of several sizes with masks, and what its rows are."""
    images = [pixels(5, 4), pixels(8, 8), pixels(3, 9), pixels(7, 2), pixels(1, 1)]
    data, images[1] = as_jpeg(images[1])
    rows = [*images[:1], (data, images[1].shape, 1), *images[2:]]
    masks = [np.full(image.shape[:2], i, np.uint8) for i, image in enumerate(images)]
    labels = {"labels": Column(np.arange(5))}
    return write_ragged(tmp_path / "a.h5", rows, labels, masks=masks, **options), images, masks


def uniform(tmp_path):
    """A file whose images have one size, and what its rows are."""
    images = [pixels(6, 4) for _ in range(5)]
    data, images[2] = as_jpeg(images[2])
    return write_ragged(tmp_path / "u.h5", [*images[:2], (data, (6, 4, 3), 1), *images[3:]]), np.stack(images)


@READS
def test_rows_of_several_sizes_come_back_in_any_order_from_a_reader_that_threads_share(tmp_path, read):
    path, images, masks = varied(tmp_path, chunk_bytes=100)
    reader = open_rows(read_header(path), ["images", "masks"], read)
    for name, expected in (("images", images), ("masks", masks)):
        found = reader.decoded(name, ROWS)
        assert [each.shape for each in found] == [expected[row].shape for row in ROWS]
        assert all(np.array_equal(each, expected[row]) for each, row in zip(found, ROWS, strict=True))
        assert all(each.flags.writeable and each.flags.c_contiguous for each in found)
    stored = reader.encoded("images")
    index = stored.index(ROWS)
    assert index.encoding.tolist() == [RAW, RAW, RAW, RAW, JPEG]
    assert index.shape.tolist() == [list(images[row].shape) for row in ROWS]
    assert stored.take(stored.index(ROWS[:0])) == [] and (stored.flat is None) == (read == "pread")
    if stored.flat is not None:
        assert not stored.flat.flags.writeable
        assert stored.flat[index.offset[3] :][: index.bytes[3]].tobytes() == images[4].tobytes()
    with ThreadPoolExecutor(4) as pool:  # threads share a reader
        for found in pool.map(lambda _: reader.decoded("images", ROWS), range(40)):
            assert all(np.array_equal(each, images[row]) for each, row in zip(found, ROWS, strict=True))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(FileChangedError):
        reader.decoded("images", np.arange(5))
    reader.close()


def test_sixteen_bits_and_compressed_rows_come_back(tmp_path):
    images = [pixels(4, 3, 1, np.uint16), pixels(2, 5, 1, np.uint16)]
    path = write_ragged(tmp_path / "a.h5", images)
    frame = Codec("zstd", 3).compress(bytes(24))
    with h5py.File(path, "r+") as file:
        file["images"][: len(frame)] = np.frombuffer(frame, np.uint8)
        file["images_bytes"][0], file["images_encoding"][0] = len(frame), ZSTD
    images[0][:] = 0
    decoded = open_rows(read_header(path), ["images"]).decoded("images", np.arange(2))
    for found, expected in zip(decoded, images, strict=True):
        assert found.dtype == np.uint16 and np.array_equal(found, expected)


@READS
def test_rows_of_one_size_are_gathered_like_any_others_and_none_of_another_size(tmp_path, read):
    path, images = uniform(tmp_path)
    reader = open_rows(read_header(path), ["images"], read)
    out = np.empty((len(ROWS), 6, 4, 3), np.uint8)
    assert reader.gather(ROWS, {"images": out}) == out.nbytes
    assert np.array_equal(out, images[ROWS])
    with h5py.File(path, "r+") as file:
        file["images_shape"][1] = (4, 6, 3)
    reader = open_rows(read_header(path), ["images"])
    with pytest.raises(FormatError, match="row 1 of 'images' cannot be"):
        reader.gather(np.arange(3), {"images": np.empty((3, 6, 4, 3), np.uint8)})


@READS
@pytest.mark.parametrize(("dataset", "row", "value"), [("images_bytes", 0, 2**62), ("images_encoding", 3, 9)])
def test_an_index_that_cannot_be_is_refused_with_its_row(tmp_path, read, dataset, row, value):
    path, _, _ = varied(tmp_path)
    with h5py.File(path, "r+") as file:
        file[dataset][row] = value
    reader = open_rows(read_header(path), ["images"], read)
    with pytest.raises(FormatError, match=rf"a\.h5: row {row} of 'images' cannot be: .* pack it again"):
        reader.decoded("images", np.array([1, row, 2]))
    assert len(reader.decoded("images", np.array([1, 2]))) == 2, "the others are read"


@READS
def test_a_jpeg_and_a_mask_damaged_after_packing_are_named(tmp_path, read):
    path, _, _ = varied(tmp_path)
    with h5py.File(path, "r+") as file:
        begin, length = int(file["images_offset"][1]), int(file["images_bytes"][1])
        file["images"][begin + length // 3 : begin + length] = 0
        file["masks_encoding"][3] = ZSTD
    reader = open_rows(read_header(path), ["images"], read)
    with pytest.raises(
        FormatError, match=r"a\.h5: sample '00000001' \(row 1\): its stored JPEG cannot be decoded \(.* verify"
    ):
        reader.decoded("images", np.arange(5))
    message = r"'00000003' \(row 3\): its mask's stored zstd frame cannot be decoded \(zstd"
    with pytest.raises(FormatError, match=message):
        open_rows(read_header(path), ["masks"], read).decoded("masks", np.arange(5))
    with h5py.File(path, "r+") as file:
        del file["key"]
    assert "a.h5: row 1: why. " in str(sample_error(read_header(path), 1, "why"))


END = np.full(3, 54)


def index_of(**changed):
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


def field(tmp_path, name="images"):
    found = read_header(varied(tmp_path)[0]).fields[name]
    return replace(found, ragged=RaggedExtent(base=4096, num_bytes=54, chunk_bytes=64, num_rows=3))


def test_rows_that_can_be_have_no_reason_and_a_mask_is_neither_a_jpeg_nor_has_it_channels(tmp_path):
    images = field(tmp_path)
    for changed in ({}, {"encoding": JPEG, "bytes": 7}, {"encoding": ZSTD, "bytes": 0}, {"orientation": 8}):
        assert impossible_rows(index_of(**changed), images, END) == {}
    # A row may be above the limit of images that are packed unasked, up to 4 GiB of pixels.
    assert impossible_rows(index_of(shape=(37_000, 38_000, 3), encoding=JPEG), images, END) == {}
    assert impossible_rows(index_of(shape=(38_000, 38_000, 3), encoding=JPEG), images, END) != {}
    found = impossible_rows(index_of(bytes=6, encoding=JPEG), field(tmp_path, "masks"), END)
    assert list(found) == [0, 1, 2] and "its pixels need 6" in found[0]
    assert "number 1, which means nothing" in found[1], "a mask is no JPEG"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"offset": 37}, "lies outside of its 54 bytes"),
        ({"offset": -8}, "lies outside"),
        ({"offset": 2**63 - 1}, "lies outside"),
        ({"bytes": -1}, "lies outside"),
        ({"encoding": 3}, "number 3, which means nothing"),
        ({"shape": (2, 0, 3)}, "its size is 0x2"),
        ({"shape": (-5, -4, 3)}, "its size is -4x-5"),
        ({"shape": (2**24, 2**24, 3), "encoding": JPEG}, "its size is 16777216x16777216"),
        ({"shape": (2, 3, 4)}, "its shape is (2, 3, 4)"),
        ({"bytes": 17}, "it has 17 bytes in `images`, its pixels need 18"),
        ({"orientation": 9, "encoding": JPEG}, "its EXIF orientation is 9"),
        ({"orientation": 0}, "its EXIF orientation is 0"),
    ],
)
def test_a_row_that_cannot_be_has_one(tmp_path, changed, reason):
    found = impossible_rows(index_of(**changed), field(tmp_path), END)
    assert list(found) == [1] and reason in found[1]
