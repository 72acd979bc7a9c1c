"""Rows of a JPEG decoded alone are those of the whole."""

from __future__ import annotations

import io

import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fastload.format.ragged import JPEG
from fastload.images.decode_part import decode_part, decode_row
from fastload.images.jpeg_cut import JpegRows, cut_rows, frame_components, jpeg_head

UINT8 = np.dtype(np.uint8)


def photo(height: int, width: int, channels: int = 3) -> Image.Image:
    rng = np.random.default_rng(height * 1000 + width)
    coarse = rng.integers(0, 256, (height // 6 + 2, width // 6 + 2, channels), np.uint8).squeeze()
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def jpeg(height: int, width: int, channels: int = 3, **options) -> bytes:
    file = io.BytesIO()
    photo(height, width, channels).save(file, "JPEG", **({"quality": 90} | options))
    return file.getvalue()


def cut(data: bytes, *asked: int) -> JpegRows | None:
    """Returns what `cut_rows` makes of a file; None also if its head is odd."""
    head = jpeg_head(data)
    assert (head.components if head else 0) in (0, frame_components(data))
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
    part = decode_part(data, shape, 1, (top, 0, rows, width), (rows, width))
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
    part = decode_part(data, (height, width, 3), 1, (top, 0, rows, width), (rows // factor, 1))
    first = top // factor
    assert (part.factor, part.top) == (factor, first * factor) or len(part.pixels) == len(whole)
    first = part.top // factor
    assert (first + len(part.pixels)) * factor >= top + rows
    assert np.array_equal(part.pixels, whole[first : first + len(part.pixels)])


@pytest.mark.parametrize("sampling", ["440", "411"])
def test_rarer_samplings_are_cut_rightly_too(sampling):
    pixels = np.asarray(photo(150, 60))
    data = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), colorsubsampling=sampling)
    whole = simplejpeg.decode_jpeg(data)
    for top, rows in ((0, 9), (0, 64), (31, 65)):
        part = decode_part(data, (150, 60, 3), 1, (top, 0, rows, 60), (rows, 60))
        assert len(part.pixels) == rows, "it is cut"
        assert np.array_equal(part.pixels, whole[top : top + rows])


def test_only_the_rows_between_two_markers_are_left_in_the_file():
    data = jpeg(320, 160, restart_marker_rows=1)
    rows = cut(data, 320, 160, 100, 160)
    assert (rows.top, rows.stop, rows.ends_early) == (96, 176, False)
    assert len(rows.data) < len(data) / 2 and rows.data.endswith(b"\xff\xd9")
    assert simplejpeg.decode_jpeg(rows.data).shape == (80, 160, 3), "a file that libjpeg does not warn of"


def test_without_markers_rows_above_stay():
    data = jpeg(320, 160)
    rows = cut(data, 320, 160, 100, 160)
    assert (rows.top, rows.stop, rows.ends_early) == (0, 176, True)


def test_a_file_is_left_whole_where_cutting_it_would_not_do():
    assert cut(jpeg(320, 160, progressive=True), 320, 160, 0, 16) is None
    assert cut(jpeg(320, 160), 320, 160, 10, 310) is None, "next to nothing would be saved"
    assert cut(jpeg(320, 160), 160, 320, 0, 16) is None, "of another size than is said"
    for damaged in (b"", b"\xff\xd8", b"\xff\xd8\xff", jpeg(320, 160)[:150], b"\x89PNG" + bytes(100)):
        assert cut(damaged, 320, 160, 0, 16) is None


def test_components_are_those_of_the_frame():
    assert frame_components(jpeg(20, 30)) == 3
    assert frame_components(memoryview(jpeg(20, 30, 1, progressive=True))) == 1
    assert frame_components(jpeg(20, 30)[:100]) == frame_components(b"") == frame_components(b"\x89PNG") == 0


def test_markers_out_of_order_are_not_relied_on():
    data = bytearray(jpeg(320, 160, restart_marker_rows=1))
    at = data.index(b"\xff\xd2")
    data[at + 1] = 0xD5
    assert cut(bytes(data), 320, 160, 200, 220) is None


@given(junk=st.binary(max_size=60), at=st.integers(0, 700))
def test_no_header_makes_it_raise(junk, at):
    data = bytearray(jpeg(64, 48))
    data[at : at + len(junk)] = junk
    cut(bytes(data), 64, 48, 20, 30)
