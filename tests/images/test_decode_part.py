"""Stored bytes become the pixels that they were made of."""

from __future__ import annotations

import io

import numpy as np
import pytest
from image_bytes import encode, exif_bytes, photo
from PIL import Image, ImageOps

from fastload.errors import ImageError
from fastload.format.codecs import Codec
from fastload.format.ragged import JPEG, RAW, ZSTD
from fastload.images.decode_part import decode_part, decode_row, offset_in

UINT8 = np.dtype(np.uint8)


def jpeg(image: Image.Image, **options) -> bytes:
    return encode(image, **({"quality": 90} | options))


def turned(image: Image.Image, orientation: int) -> tuple[bytes, np.ndarray]:
    """A JPEG file that tells an orientation, and its pixels upright."""
    data = jpeg(image, exif=exif_bytes(orientation))
    return data, np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("dtype", ["<u1", "<u2"])
@pytest.mark.parametrize("encoding", [RAW, ZSTD])
@pytest.mark.parametrize("shape", [(7, 5, 3), (7, 5)], ids=["image", "mask"])
def test_raw_and_compressed_pixels_come_back(dtype, encoding, shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape).astype(dtype)
    data = Codec("zstd", 3).compress(pixels.tobytes()) if encoding == ZSTD else pixels.tobytes()
    found = decode_row(memoryview(data), encoding, shape, 1, np.dtype(dtype))
    assert found.dtype == np.dtype(dtype) and np.array_equal(found, pixels)
    out = np.empty_like(pixels)
    assert decode_row(data, encoding, shape, 1, np.dtype(dtype), out) is out
    assert np.array_equal(out, pixels)
    raw = np.frombuffer(data, np.uint8)
    assert encoding == ZSTD or np.shares_memory(decode_row(raw.data, RAW, shape, 1, np.dtype(dtype)), raw)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("factor", [1, 4])
def test_a_jpeg_lies_upright_in_the_memory_given(orientation, factor):
    data, upright = turned(photo(80, 64), orientation)
    out = np.empty(upright.shape, np.uint8)
    assert decode_row(data, JPEG, upright.shape, orientation, UINT8, out) is out and np.array_equal(out, upright)
    assert np.array_equal(decode_row(data, JPEG, upright.shape, orientation, UINT8), upright)
    scratch = np.empty(upright.size, np.uint8)
    part = decode_part(data, JPEG, upright.shape, orientation, (0, 0, *upright.shape[:2]), factor, scratch)
    assert np.shares_memory(part.pixels, scratch) and part.pixels.flags.c_contiguous
    assert (part.factor, part.top) == (factor, 0)
    if factor == 1:
        assert np.array_equal(part.pixels, upright)
    else:
        shape = part.pixels.shape[1::-1]
        small = np.asarray(Image.fromarray(upright).resize(shape, Image.Resampling.BOX), np.int16)
        assert np.abs(small - part.pixels).mean() < 4


def test_gray_becomes_colour_and_colour_gray():
    gray, colour = photo(20, 30, 1), photo(20, 30)
    assert np.array_equal(
        decode_row(jpeg(gray), JPEG, (20, 30, 3), 1, UINT8),
        decode_row(jpeg(gray), JPEG, (20, 30, 1), 1, UINT8).repeat(3, 2),
    )
    luma = np.asarray(Image.open(io.BytesIO(jpeg(colour))).convert("L"))[..., None]
    assert np.array_equal(decode_row(jpeg(colour), JPEG, (20, 30, 1), 1, UINT8), luma)
    part = decode_part(jpeg(colour), JPEG, (20, 30, 1), 1, (0, 0, 8, 30), 1)
    assert np.array_equal(part.pixels, luma[part.top : part.top + len(part.pixels)])
    assert decode_row(jpeg(colour), JPEG, (20, 30, 4), 1, UINT8)[..., 3].min() == 255


def test_a_cmyk_jpeg_is_pillows():
    data = jpeg(photo(24, 16).convert("CMYK"))
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(decode_row(data, JPEG, (24, 16, 3), 1, UINT8), expected)
    part = decode_part(data, JPEG, (24, 16, 3), 1, (0, 0, 24, 16), 4)
    assert part.factor == 1 and np.array_equal(part.pixels, expected)


@pytest.mark.parametrize("encoding", [RAW, ZSTD])
def test_of_pixels_only_the_rows_shown_lie_in_the_memory_given(encoding):
    pixels = np.random.default_rng(0).integers(0, 256, (9, 5, 3), dtype=np.uint8)
    data = Codec("zstd", 3).compress(pixels.tobytes()) if encoding == ZSTD else pixels.tobytes()
    scratch = np.empty(60, np.uint8)
    part = decode_part(data, encoding, (9, 5, 3), 1, (2, 1, 4, 3), 1, scratch)
    assert (part.factor, part.top) == (1, 2) and np.array_equal(part.pixels, pixels[2:6])
    assert offset_in(scratch, part.pixels) == 0 and offset_in(scratch, pixels) == -1
    small = decode_part(data, encoding, (9, 5, 3), 1, (2, 1, 4, 3), 1, scratch[:50])
    assert np.array_equal(small.pixels, part.pixels) and offset_in(scratch, small.pixels) == -1, "too small to be used"


def test_what_libjpeg_refuses_is_doubted_before_pillow_decodes_it():
    def doubt():
        raise ImageError("not what was packed")

    data, shape = jpeg(photo(20, 30)), (20, 30, 3)
    assert decode_row(data, JPEG, shape, 1, UINT8, None, doubt).shape == shape, "no doubt of a whole one"
    for suspect in (data[: len(data) // 2], data[:100], b"12345"):
        with pytest.raises(ImageError, match="not what was packed"):
            decode_row(suspect, JPEG, shape, 1, UINT8, None, doubt)
        with pytest.raises(ImageError, match="not what was packed"):
            decode_part(suspect, JPEG, shape, 1, (0, 0, 20, 30), 2, None, doubt)


@pytest.mark.parametrize("options", [{}, {"restart_marker_rows": 1}], ids=str)
def test_a_jpeg_cut_short_is_an_error_wherever_the_part_lies(options):
    data = jpeg(photo(200, 150), **options)
    for kept in (len(data) // 2, len(data) - 40):
        with pytest.raises(ImageError, match="truncated"):
            decode_row(data[:kept], JPEG, (200, 150, 3), 1, UINT8)
        for top in (0, 100, 180):
            with pytest.raises(ImageError, match="truncated"):
                decode_part(data[:kept], JPEG, (200, 150, 3), 1, (top, 0, 16, 150), 1)


@pytest.mark.parametrize(
    ("data", "encoding", "dtype", "reason"),
    [
        (b"12345", RAW, "u1", "5 bytes where its shape takes 18"),
        (b"12345", ZSTD, "u1", "zstd"),
        (Codec("zstd", 3).compress(b"1234"), ZSTD, "u1", "4 bytes where 18"),
        (b"12345", JPEG, "u1", "not an image"),
        (jpeg(photo(8, 8)), JPEG, "u1", "8x8 pixels .* where 3x2"),
        (jpeg(photo(2, 3)), JPEG, "u2", "8 bits a channel"),
    ],
    ids=["short", "no-frame", "small-frame", "no-jpeg", "other-size", "too-few-bits"],
)
def test_what_cannot_be_decoded_says_why(data, encoding, dtype, reason):
    with pytest.raises(ImageError, match=reason):
        decode_row(data, encoding, (2, 3, 3), 1, np.dtype(dtype), np.empty((2, 3, 3), dtype))
    if encoding == JPEG and dtype == "u1":
        with pytest.raises(ImageError, match=reason):
            decode_part(data, JPEG, (2, 3, 3), 1, (0, 0, 1, 3), 1)
    with pytest.raises(ImageError, match="a mask is never a JPEG"):
        decode_row(b"", JPEG, (3, 4), 1, UINT8)
