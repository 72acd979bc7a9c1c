"""The marker scan: what it says equals Pillow, and it gives up on whatever it does not know."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fastload.images.jpeg_markers import JpegFrame, scan_jpeg


def jpeg(mode: str = "RGB", size: tuple[int, int] = (20, 30), **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, 77).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def segment(marker: int, payload: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload


def insert(data: bytes, extra: bytes) -> bytes:
    """Puts segments right behind the start-of-image marker."""
    return data[:2] + extra + data[2:]


def exif(entries: list[tuple[int, int, int, int]], order: str = "<") -> bytes:
    """An EXIF segment from (tag, type, count, value) entries; a value is written as one SHORT."""
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}IH", 8, len(entries))
    return segment(0xE1, b"Exif\0\0" + head + b"".join(struct.pack(f"{order}HHIHxx", *entry) for entry in entries))


@settings(max_examples=30, deadline=None)
@given(
    mode=st.sampled_from(["L", "RGB", "CMYK"]),
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    progressive=st.booleans(),
)
def test_frame_is_the_one_pillow_sees(mode: str, width: int, height: int, progressive: bool) -> None:
    data = jpeg(mode, (width, height), progressive=progressive)
    components = {"L": 1, "RGB": 3, "CMYK": 4}[mode]
    assert scan_jpeg(data) == JpegFrame(height, width, components, 1, False)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(10))
def test_orientation_is_read_in_both_byte_orders(orientation: int, order: str) -> None:
    entries = [(0x0100, 3, 1, 5), (0x0112, 3, 1, orientation), (0x0128, 3, 1, 2)]
    frame = scan_jpeg(insert(jpeg(), exif(entries, order)))
    assert frame is not None
    assert frame.orientation == (orientation if 1 <= orientation <= 8 else 1)


def test_exif_without_orientation_is_upright() -> None:
    frame = scan_jpeg(insert(jpeg(), exif([(0x0100, 3, 1, 5)])))
    assert frame is not None
    assert frame.orientation == 1


def test_exif_between_frame_and_scan_counts() -> None:
    data = jpeg()
    at = data.index(b"\xff\xda")
    frame = scan_jpeg(data[:at] + exif([(0x0112, 3, 1, 6)]) + data[at:])
    assert frame is not None
    assert frame.orientation == 6


def test_header_cut_anywhere_is_not_trusted() -> None:
    data = insert(jpeg(), exif([(0x0112, 3, 1, 6)]))
    scan = data.index(b"\xff\xda")
    assert scan_jpeg(data[: scan + 4]) is not None
    assert all(scan_jpeg(data[:cut]) is None for cut in range(scan + 4))


def test_multi_picture_segment_is_seen() -> None:
    frame = scan_jpeg(insert(jpeg(), segment(0xE2, b"MPF\0rest")))
    assert frame is not None
    assert frame.several_frames


XMP = b'http://ns.adobe.com/xap/1.0/\0<rdf tiff:Orientation="6"/>'


@pytest.mark.parametrize(
    ("why", "data"),
    [
        ("no JPEG", b"\x89PNG\r\n\x1a\n"),
        ("empty", b""),
        ("junk between markers", insert(jpeg(), b"\0\0\0\0")),
        ("fill bytes", insert(jpeg(), b"\xff")),
        ("segment of length 0", insert(jpeg(), b"\xff\xe0\0\0")),
        ("lossless", jpeg().replace(b"\xff\xc0", b"\xff\xc3")),
        ("arithmetic coding", jpeg().replace(b"\xff\xc0", b"\xff\xc9")),
        ("12 bits", jpeg().replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c")),
        ("two frames", insert(jpeg(), segment(0xC0, b"\x08\0\x05\0\x05\x01\x01\x11\0"))),
        ("frame length does not fit", insert(jpeg(), segment(0xC0, b"\x08\0\x05\0\x05\x03\x01\x11\0"))),
        ("two EXIF blocks", insert(jpeg(), 2 * exif([(0x0112, 3, 1, 6)]))),
        ("EXIF without TIFF header", insert(jpeg(), segment(0xE1, b"Exif\0\0MM\x13*\0\0\0\x08"))),
        ("EXIF directory cut short", insert(jpeg(), segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0\x09\0aa"))),
        ("EXIF offset outside", insert(jpeg(), segment(0xE1, b"Exif\0\0II*\0\xff\xff\xff\xff"))),
        ("orientation as LONG", insert(jpeg(), exif([(0x0112, 4, 1, 6)]))),
        ("orientation only in XMP", insert(jpeg(), segment(0xE1, XMP))),
    ],
)
def test_what_is_odd_is_left_to_pillow(why: str, data: bytes) -> None:
    assert scan_jpeg(data) is None, why


def test_exif_orientation_goes_before_xmp() -> None:
    frame = scan_jpeg(insert(jpeg(), segment(0xE1, XMP) + exif([(0x0112, 3, 1, 3)])))
    assert frame is not None
    assert frame.orientation == 3


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 700), value=st.integers(0, 255), length=st.integers(0, 900))
def test_damaged_headers_never_raise(position: int, value: int, length: int) -> None:
    data = bytearray(insert(jpeg(), exif([(0x0112, 3, 1, 6)])))
    data[position % len(data)] = value
    frame = scan_jpeg(bytes(data[:length]))
    assert frame is None or frame.components in (1, 3, 4)


def test_real_pixels_do_not_confuse_it() -> None:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 48, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", exif=exif([(0x0112, 3, 1, 8)])[4:])
    assert scan_jpeg(buffer.getvalue()) == JpegFrame(64, 48, 3, 8, False)
