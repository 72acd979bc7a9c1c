"""The marker scan equals Pillow's, or gives up; rows cut out of a JPEG are those of the whole."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from image_bytes import encode, photo
from jpeg_processes import all_names, made, with_scans
from PIL import Image

from fastload.errors import ImageError
from fastload.format.ragged import JPEG
from fastload.images.decode import decode_image
from fastload.images.decode_part import decode_part, decode_row
from fastload.images.fit import Target
from fastload.images.image_header import open_image
from fastload.images.jpeg import (
    MAX_SCANS,
    JpegHead,
    JpegRows,
    check_scans,
    cut_rows,
    is_scaled,
    libjpeg_warning,
    scan_jpeg,
)

UINT8 = np.dtype(np.uint8)


def flat(mode: str = "RGB", size: tuple[int, int] = (20, 30), **options: object) -> bytes:
    """A JPEG of one colour."""
    return encode(Image.new(mode, size, 77), **options)


def segment(marker: int, payload: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload


def insert(data: bytes, extra: bytes) -> bytes:
    """Puts segments right behind the start-of-image marker."""
    return data[:2] + extra + data[2:]


def exif(entries: list[tuple[int, int, int, int]], order: str = "<") -> bytes:
    """An EXIF segment from (tag, type, count, value) entries; a value is written as one SHORT."""
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}IH", 8, len(entries))
    return segment(0xE1, b"Exif\0\0" + head + b"".join(struct.pack(f"{order}HHIHxx", *entry) for entry in entries))


@given(
    mode=st.sampled_from(["L", "RGB", "CMYK"]),
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    progressive=st.booleans(),
)
def test_frame_is_the_one_pillow_sees(mode: str, width: int, height: int, progressive: bool) -> None:
    data = flat(mode, (width, height), progressive=progressive)
    components = {"L": 1, "RGB": 3, "CMYK": 4}[mode]
    assert scan_jpeg(data)[:5] == (height, width, components, 1, False)


XMP = b'http://ns.adobe.com/xap/1.0/\0<rdf tiff:Orientation="6"/>'
UPRIGHT = JpegHead(30, 20, 3, 1, False, None)


@pytest.mark.parametrize(
    ("data", "frame"),
    [
        (insert(flat(), exif([(0x0100, 3, 1, 5), (0x0112, 3, 1, n), (0x0128, 3, 1, 2)], order)),
         UPRIGHT._replace(orientation=n if 1 <= n <= 8 else 1))
        for order in "<>" for n in range(10)
    ]
    + [
        (insert(flat(), exif([(0x0100, 3, 1, 5)])), UPRIGHT),
        (flat().replace(b"\xff\xda", exif([(0x0112, 3, 1, 6)]) + b"\xff\xda"), UPRIGHT._replace(orientation=6)),
        (insert(flat(), segment(0xE1, XMP) + exif([(0x0112, 3, 1, 3)])), UPRIGHT._replace(orientation=3)),
        (insert(flat(), segment(0xE2, b"MPF\0rest")), UPRIGHT._replace(several_frames=True)),
    ],
)  # fmt: skip
def test_orientation_and_further_frames_are_seen(data: bytes, frame: JpegHead) -> None:
    assert scan_jpeg(data)._replace(scan=None) == frame


def test_header_cut_anywhere_is_not_trusted() -> None:
    data = insert(flat(), exif([(0x0112, 3, 1, 6)]))
    scan = data.index(b"\xff\xda")
    assert scan_jpeg(data[: scan + 4]) is not None
    assert all(scan_jpeg(data[:cut]) is None for cut in range(scan + 4))


@pytest.mark.parametrize(
    ("why", "data"),
    [
        ("no JPEG", b"\x89PNG\r\n\x1a\n"),
        ("empty", b""),
        ("junk between markers", insert(flat(), b"\0\0\0\0")),
        ("fill bytes", insert(flat(), b"\xff")),
        ("segment of length 0", insert(flat(), b"\xff\xe0\0\0")),
        ("lossless", flat().replace(b"\xff\xc0", b"\xff\xc3")),
        ("arithmetic coding", flat().replace(b"\xff\xc0", b"\xff\xc9")),
        ("12 bits", flat().replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c")),
        ("two frames", insert(flat(), segment(0xC0, b"\x08\0\x05\0\x05\x01\x01\x11\0"))),
        ("frame length does not fit", insert(flat(), segment(0xC0, b"\x08\0\x05\0\x05\x03\x01\x11\0"))),
        ("two EXIF blocks", insert(flat(), 2 * exif([(0x0112, 3, 1, 6)]))),
        ("EXIF without TIFF header", insert(flat(), segment(0xE1, b"Exif\0\0MM\x13*\0\0\0\x08"))),
        ("EXIF directory cut short", insert(flat(), segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0\x09\0aa"))),
        ("EXIF offset outside", insert(flat(), segment(0xE1, b"Exif\0\0II*\0\xff\xff\xff\xff"))),
        ("orientation as LONG", insert(flat(), exif([(0x0112, 4, 1, 6)]))),
        ("orientation only in XMP", insert(flat(), segment(0xE1, XMP))),
    ],
)
def test_what_is_odd_is_left_to_pillow(why: str, data: bytes) -> None:
    assert scan_jpeg(data) is None, why


def jpeg(height: int, width: int, channels: int = 3, **options) -> bytes:
    return encode(photo(height, width, channels), **({"quality": 90} | options))


def cut(data: bytes, *asked: int) -> JpegRows | None:
    """Returns what `cut_rows` makes of a file; None also if its head is odd."""
    head = scan_jpeg(data)
    return None if head is None else cut_rows(memoryview(data), head, *asked)


MARKERS = [{}, {"restart_marker_rows": 1}, {"restart_marker_rows": 2}, {"restart_marker_blocks": 3}]
SAMPLINGS = ["4:4:4", "4:2:2", "4:2:0"]


@given(
    height=st.integers(1, 200),
    width=st.integers(1, 70),
    sampling=st.sampled_from(SAMPLINGS),
    markers=st.sampled_from(MARKERS),
    gray=st.booleans(),
    progressive=st.sampled_from([False, False, False, True]),
    draw=st.data(),
)
def test_a_part_at_full_size_is_that_of_the_whole(height, width, sampling, markers, gray, progressive, draw):
    top = draw.draw(st.integers(0, height - 1), "top")
    rows = draw.draw(st.integers(1, height - top), "rows")
    data = jpeg(height, width, 1 if gray else 3, subsampling=sampling, progressive=progressive, **markers)
    shape = (height, width, 3)
    whole = decode_row(data, JPEG, shape, 1, UINT8)
    part = decode_part(data, JPEG, shape, 1, (top, 0, rows, width), 1)
    assert part.factor == 1 and part.top <= top and part.pixels.flags.c_contiguous
    assert np.array_equal(part.pixels, whole[part.top : part.top + len(part.pixels)])
    assert part.top + len(part.pixels) >= top + rows


@given(
    size=st.tuples(st.integers(16, 200), st.integers(16, 70)),
    factor=st.sampled_from([2, 4, 8]),
    sampling=st.sampled_from(SAMPLINGS),
    markers=st.sampled_from(MARKERS),
    draw=st.data(),
)
def test_a_part_decoded_smaller_is_that_of_the_whole_decoded_smaller(size, factor, sampling, markers, draw):
    height, width = size
    rows = draw.draw(st.integers(factor, height), "rows")
    top = draw.draw(st.integers(0, height - rows), "top")
    data = jpeg(height, width, subsampling=sampling, **markers)
    small = (-(-height // factor), -(-width // factor))
    whole = simplejpeg.decode_jpeg(data, min_height=small[0], min_width=small[1], min_factor=factor)
    part = decode_part(data, JPEG, (height, width, 3), 1, (top, 0, rows, width), factor)
    assert (part.factor, part.top) in ((factor, top // factor * factor), (factor, 0))
    first = part.top // factor
    assert (first + len(part.pixels)) * factor >= top + rows
    assert np.array_equal(part.pixels, whole[first : first + len(part.pixels)])


@pytest.mark.parametrize("sampling", ["440", "411", "gray"])
def test_rarer_samplings_are_cut_rightly_too(sampling):
    pixels, colours = np.asarray(photo(150, 60)), "RGB"
    if sampling == "gray":  # whatever its factors say
        data, colours = bytearray(jpeg(150, 60, 1, restart_marker_rows=1)), "GRAY"
        data[data.index(b"\xff\xc0") + 11] = 0x22
    else:
        data = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), colorsubsampling=sampling)
    whole = simplejpeg.decode_jpeg(bytes(data), colours)
    for top, rows in ((0, 9), (0, 64), (31, 65)):
        part = decode_part(bytes(data), JPEG, whole.shape, 1, (top, 0, rows, 60), 1)
        shown = part.pixels[top - part.top :][:rows]
        assert len(part.pixels) < 100, "it is cut"
        assert np.array_equal(shown, whole[top : top + rows])


def test_only_the_rows_between_two_markers_are_left_in_the_file_and_without_markers_rows_above_stay():
    data = jpeg(320, 160, restart_marker_rows=1)
    rows = cut(data, 320, 160, 100, 160)
    assert (rows.top, rows.stop, rows.ends_early) == (96, 176, False)
    assert len(rows.data) < len(data) / 2 and rows.data.endswith(b"\xff\xd9")
    assert simplejpeg.decode_jpeg(rows.data).shape == (80, 160, 3), "a file that libjpeg does not warn of"
    assert cut(jpeg(320, 160), 320, 160, 100, 160)[1:] == (0, 176, True)


def test_a_file_is_left_whole_where_cutting_it_would_not_do():
    out_of_order = jpeg(320, 160, restart_marker_rows=1).replace(b"\xff\xd2", b"\xff\xd5", 1)
    assert cut(out_of_order, 320, 160, 200, 220) is None
    assert cut(jpeg(320, 160, progressive=True), 320, 160, 0, 16) is None
    assert cut(jpeg(320, 160), 320, 160, 10, 310) is None, "next to nothing would be saved"
    assert cut(jpeg(320, 160), 160, 320, 0, 16) is None, "of another size than is said"
    for damaged in (b"", b"\xff\xd8", b"\xff\xd8\xff", jpeg(320, 160)[:150], b"\x89PNG" + bytes(100)):
        assert cut(damaged, 320, 160, 0, 16) is None


@settings(max_examples=8 * settings.default.max_examples)
@given(junk=st.binary(max_size=60), at=st.integers(0, 700), length=st.integers(0, 2000))
def test_no_header_makes_it_raise(junk, at, length):
    data = bytearray(insert(jpeg(64, 48), exif([(0x0112, 3, 1, 6)])))
    data[at : at + len(junk)] = junk
    cut(bytes(data[:length]), 64, 48, 20, 30)


def test_only_jpegs_of_8_bits_with_a_dct_are_scaled():
    for name in all_names()[::17]:
        process, precision, _ = name.split("-")
        assert is_scaled(made(name)) == (process in ("sof0", "sof1", "sof2", "sof9", "sof10") and precision == "8"), (
            name
        )
        assert is_scaled(made(name)) or libjpeg_warning(made(name)) == ""


def test_the_first_frame_is_found_where_libjpeg_finds_it():
    lossless, plain = made("sof3-8-11"), made("sof0-8-11")
    hidden = segment(0xFE, segment(0xC0, b"\x08"))
    for junk in (hidden, b"\xff\xff\xff", b"\0ab", b"\xff\x01", b"\xff\xd0", b"\xff\0", segment(0xEC, b"")):
        assert not is_scaled(insert(lossless, junk))
        assert is_scaled(insert(plain, junk))
    for nothing in (b"", b"\xff\xd8", b"\x89PNG", plain[:20], insert(plain, b"\xff\xd9"), insert(plain, b"\xff\xd8")):
        assert not is_scaled(nothing)


def test_more_scans_than_any_encoder_writes_are_an_error_wherever_they_are_decoded():
    shape, out = (16, 16, 1), np.empty((16, 16, 1), np.uint8)
    target = Target(*shape, UINT8)
    for data in (
        most := with_scans(MAX_SCANS),
        most + b"\xff\xda" * 900,
        insert(most, segment(0xE5, b"\xff\xda" * 900)),
    ):
        check_scans(data)
        decode_image(data, target, out)
        decode_row(data, JPEG, shape, 1, UINT8)
    for data in (with_scans(MAX_SCANS + 1), insert(with_scans(MAX_SCANS + 1), b"\xff\xff")):
        for decode in (
            lambda data=data: decode_image(data, target, out),
            lambda data=data: decode_row(data, JPEG, shape, 1, UINT8),
            lambda data=data: decode_part(data, JPEG, shape, 1, (0, 0, 8, 16), 2),
            lambda data=data: open_image(data),
        ):
            with pytest.raises(ImageError, match=f"has {MAX_SCANS + 1} scans, more than the {MAX_SCANS} accepted"):
                decode()
