"""16 bits a channel come out exactly as they are stored, whatever Pillow would keep of them."""

from __future__ import annotations

import struct

import image_bytes
import numpy as np
import pytest
from image_bytes import encode, png_chunk
from numpy.typing import NDArray
from PIL import Image

from fastload.errors import ImageError
from fastload.images.decode import decode_image
from fastload.images.fit import Target
from fastload.images.image_header import probe_image

RNG = np.random.default_rng(16)
RGB = RNG.integers(0, 65536, (23, 31, 3), dtype=np.uint16)
RGBA = RNG.integers(0, 65536, (23, 31, 4), dtype=np.uint16)
GRAY_ALPHA = np.dstack([RGBA[..., 0]] * 3 + [RGBA[..., 3]])
KEY = tuple(RGB[4, 5].tolist())
KEYED = np.dstack([RGB, np.where((RGB[4, 5] == RGB).all(axis=2), 0, 65535).astype(np.uint16)])
GRAY_KEYED = np.dstack([RGB[..., 0]] * 3 + [np.where(RGB[..., 0] == KEY[0], 0, 65535).astype(np.uint16)])


GRAY_IN = ("PNG", "TIFF", "PPM")
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""First column and row, and their steps, of each pass of an interlaced PNG."""


def png(pixels: NDArray[np.uint16], colour: int, *chunks: bytes, interlaced: bool = False) -> bytes:
    passes = [pixels[y::dy, x::dx] for x, y, dx, dy in ADAM7] if interlaced else [pixels]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for part in passes for row in part)
    return image_bytes.png(pixels.shape[1], pixels.shape[0], 16, colour, rows, *chunks, interlaced=interlaced)


def tiff(pixels: NDArray[np.uint16], order: str, orientation: int = 1) -> bytes:
    """An uncompressed TIFF of one strip."""
    height, width, channels = pixels.shape
    data = pixels.astype(f"{order}u2").tobytes()
    bits_at = 8 + len(data)
    extra = [(338, 3, 1, 2)] if channels == 4 else []  # unassociated alpha
    tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, channels, bits_at), (259, 3, 1, 1), (262, 3, 1, 2)]
    tags += [(273, 4, 1, 8), (274, 3, 1, orientation), (277, 3, 1, channels), (278, 4, 1, height)]
    tags += [(279, 4, 1, len(data)), *extra]
    entries = b""
    for tag, kind, count, value in tags:
        packed = struct.pack(f"{order}H2x", value) if kind == 3 and count == 1 else struct.pack(f"{order}I", value)
        entries += struct.pack(f"{order}HHI", tag, kind, count) + packed
    directory = struct.pack(f"{order}H", len(tags)) + entries + bytes(4)
    start = bits_at + 2 * channels
    mark = b"II" if order == "<" else b"MM"
    bits = struct.pack(f"{order}{channels}H", *[16] * channels)
    return mark + struct.pack(f"{order}HI", 42, start) + data + bits + directory


FILES = {
    "png rgb": (png(RGB, 2), RGB, "RGB;16"),
    "png rgba": (png(RGBA, 6), RGBA, "RGBA;16"),
    "png gray alpha": (png(RGBA[..., [0, 3]], 4), GRAY_ALPHA, "RGBA;16"),
    "png rgb tRNS": (png(RGB, 2, png_chunk(b"tRNS", struct.pack(">3H", *KEY))), KEYED, "RGB;16+alpha"),
    "png gray tRNS": (png(RGB[..., :1], 0, png_chunk(b"tRNS", struct.pack(">H", KEY[0]))), GRAY_KEYED, "I;16+alpha"),
    **{f"gray {kind}": (encode(Image.fromarray(RGB[..., 0]), kind), RGB[..., :1], "I;16") for kind in GRAY_IN},
    "png interlaced": (png(RGB, 2, interlaced=True), RGB, "RGB;16"),
    "png gray alpha interlaced": (png(RGBA[..., [0, 3]], 4, interlaced=True), GRAY_ALPHA, "RGBA;16"),
    "png without its end": (png(RGB, 2)[:-12], RGB, "RGB;16"),
    "tiff little-endian": (tiff(RGB, "<"), RGB, "RGB;16"),
    "tiff big-endian": (tiff(RGB, ">"), RGB, "RGB;16"),
    "tiff rgba": (tiff(RGBA, "<"), RGBA, "RGBA;16"),
    "tiff turned": (tiff(RGB, ">", orientation=6), np.rot90(RGB, -1), "RGB;16"),
    "ppm": (b"P6 31 23 65535\n" + RGB.astype(">u2").tobytes(), RGB, "RGB;16"),
}


def decode(data: bytes, shape: tuple[int, ...], dtype: str = "uint16") -> NDArray[np.uint8 | np.uint16]:
    out = np.full(shape, 99, dtype)
    decode_image(data, Target(*shape, out.dtype), out)
    return out


@pytest.mark.parametrize("name", FILES)
def test_every_bit_is_kept_or_the_high_byte_where_8_are_asked_for_and_channels_change_in_16_bits(name):
    data, expected, kind = FILES[name]
    header = probe_image(lambda size: data[:size])
    assert header[:5] == (*expected.shape, 16, kind)
    np.testing.assert_array_equal(decode(data, expected.shape), expected)
    np.testing.assert_array_equal(decode(data, expected.shape, "uint8"), expected >> 8)
    rgb = np.broadcast_to(expected[..., :3], (*expected.shape[:2], 3))
    colour = decode(data, rgb.shape)
    np.testing.assert_array_equal(colour, rgb)
    np.testing.assert_array_equal(decode(data, rgb.shape, "uint8"), rgb >> 8)
    with_alpha = decode(data, (*expected.shape[:2], 4))
    np.testing.assert_array_equal(with_alpha[..., :3], rgb)
    assert expected.shape[2] == 4 or (with_alpha[..., 3] == 65535).all()
    luma = decode(data, (*expected.shape[:2], 1))[..., 0]
    exact = rgb @ np.array([0.299, 0.587, 0.114])
    assert np.abs(luma - exact).max() < 1.5


def test_a_ppm_of_10_bits_spans_the_whole_range_as_its_gray_twin_does():
    ten = RGB % 1024
    found = decode(b"P6 31 23 1023\n" + ten.astype(">u2").tobytes(), RGB.shape)
    gray = decode(b"P5 31 23 1023\n" + np.ascontiguousarray(ten[..., 0]).astype(">u2").tobytes(), (23, 31, 1))
    np.testing.assert_array_equal(found[..., :1], gray)
    assert found.max() == 65535


@pytest.mark.parametrize("compression", [5, 8, 32773])
def test_compressed_tiffs_are_exact_too(compression):
    cv2 = pytest.importorskip("cv2", reason="cv2 is not installed")
    _, data = cv2.imencode(".tif", RGB[..., ::-1], [cv2.IMWRITE_TIFF_COMPRESSION, compression])
    np.testing.assert_array_equal(decode(data.tobytes(), RGB.shape), RGB)


@pytest.mark.parametrize("name", ["png rgb", "png gray alpha", "tiff big-endian", "ppm"])
def test_a_file_cut_short_is_an_error(name):
    data, expected, _ = FILES[name]
    with pytest.raises(ImageError):
        decode(data[: len(data) // 2], expected.shape)
