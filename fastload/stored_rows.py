"""The bytes of one stored row become its pixels, or those of its pixels that are needed. No torch here.

What is needed of a JPEG is decoded, not all of it: the scale, and the rows. Measured on photos of 400x533 pixels, each
with a window of RandomResizedCrop, us of CPU time an image:

| file | whole | only the rows | smaller where 224 / 128 pixels are left |
| --- | --- | --- | --- |
| as it was (29 KB): ends early | 532 | 455 | 453 / 362 |
| encoded by fastload (43 KB): ends early, begins late | 662 | 445 | 443 / 375 |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from fastload.codecs import decompress_zstd
from fastload.decode import decode_unturned, upright
from fastload.errors import ImageError
from fastload.image_header import check_size
from fastload.jpeg_rows import JpegHead, frame_components, jpeg_head, rows_alone
from fastload.store import JPEG, RAW

Data = bytes | memoryview

Doubt = Callable[[], None]
"""Called when libjpeg refuses or warns of a JPEG, before Pillow, which accepts many damaged ones, has the last word. It
raises ImageError where the bytes are no longer those that were packed."""

FACTORS = (8, 4, 2)
"""By which JPEGs are decoded smaller; libjpeg's other factors take longer than full size."""

_COLORSPACES = {1: "GRAY", 3: "RGB", 4: "RGBA"}
_ONLY_EXTRANEOUS = re.compile(r"extraneous bytes before marker 0xd9$")


class Part(NamedTuple):
    """What was decoded of an image.

    Attributes:
        pixels: uint8 (h, w, C), C-contiguous: rows of the image, in full width, shrunk by the factor.
        factor: 1, 2, 4 or 8.
        top: row of the full image, upright, at which pixels begin; a multiple of the factor.
    """

    pixels: NDArray[np.uint8]
    factor: int
    top: int


def decode_row(
    data: Data,
    encoding: int,
    shape: tuple[int, int, int],
    orientation: int,
    dtype: np.dtype[Any],
    out: NDArray[Any] | None = None,
    doubt: Doubt | None = None,
) -> NDArray[Any]:
    """The pixels of a stored image, upright.

    Safe to call from several threads; JPEG and zstd are decoded without the GIL.

    Args:
        data: the bytes stored.
        encoding: RAW, JPEG or ZSTD.
        shape: (H, W, C) of its pixels, upright. A JPEG may be gray or colour, whatever C is.
        orientation: EXIF orientation that is still to be applied to a JPEG.
        dtype: uint8 or uint16, little-endian; a JPEG is uint8.
        out: C-contiguous array to be filled, of this shape and dtype; it holds anything after an error.
        doubt: see `Doubt`.

    Returns:
        (H, W, C): out where it is given, else an array of its own; of raw rows a view of data.

    Raises:
        ImageError: the reason why it cannot be decoded.
        MissingExtraError: zstandard is not installed.
    """
    if encoding != JPEG:
        return _decode_plain(data, encoding, shape, dtype, out)
    if dtype.itemsize != 1:
        raise ImageError("a JPEG has 8 bits a channel where the dataset has 16")
    height, width, channels = shape
    check_size(height, width)
    if out is None:
        out = np.empty(shape, np.uint8)
    if orientation == 1:
        _decode_jpeg(data, shape, out.reshape(-1), doubt)
    else:
        stored = (width, height, channels) if orientation >= 5 else shape
        out[...] = upright(_decode_jpeg(data, stored, None, doubt), orientation)
    return out


def decode_mask_row(
    data: Data, encoding: int, shape: tuple[int, int], out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """The values of a stored mask, uint8 (H, W); otherwise as `decode_row`.

    Args:
        data: the bytes stored.
        encoding: RAW or ZSTD.
        shape: (H, W).
        out: C-contiguous array to be filled.
    """
    if encoding == JPEG:
        raise ImageError("a mask is never a JPEG, which blends neighbouring classes")
    return _decode_plain(data, encoding, shape, np.dtype(np.uint8), out)


def shrink_factor(window: tuple[int, int, int, int], least: tuple[int, int]) -> int:
    """The largest factor by which a JPEG may be decoded smaller.

    Args:
        window: top, left, height and width of what is needed, in full pixels.
        least: rows and columns that it shall have at least.
    """
    for factor in FACTORS:
        if window[2] >= factor * least[0] and window[3] >= factor * least[1]:
            return factor
    return 1


def decode_part(
    data: Data,
    shape: tuple[int, int, int],
    orientation: int,
    window: tuple[int, int, int, int],
    least: tuple[int, int],
    scratch: NDArray[np.uint8] | None = None,
    doubt: Doubt | None = None,
) -> Part:
    """What is needed of a JPEG: decoded smaller where a window still has enough pixels, without rows far from it.

    At factor 1 these are exactly the pixels of `decode_row`. What libjpeg warns of is an error as it is there, except
    in rows that are left out.

    Args:
        data: a JPEG file.
        shape: (H, W, C) of its pixels, upright.
        orientation: EXIF orientation that is still to be applied.
        window: top, left, height and width in full, upright pixels; within the image.
        least: (h, w) that the window will be resized to: it keeps at least as many rows and columns.
        scratch: uint8, one dimension, in which the pixels shall lie if it has room for them: H * W * C bytes always do.
        doubt: see `Doubt`.

    Raises:
        ImageError: the reason why it cannot be decoded.
    """
    check_size(*shape[:2])
    head = jpeg_head(data)
    if head is not None and not _is_pillows(head.components, shape[2]):
        factor = shrink_factor(window, least)
        if orientation == 1:
            top, stop = window[0] // factor * factor, min(shape[0], -(-(window[0] + window[2]) // factor) * factor)
            part = _rows_part(data, head, shape, factor, top, stop, scratch)
            if part is not None:
                return part
        if factor > 1:
            try:
                return Part(_decode_smaller(data, shape, orientation, factor, scratch), factor, 0)
            except (ValueError, RuntimeError):
                pass  # Pillow has the last word, at full size
    return Part(decode_row(data, JPEG, shape, orientation, np.dtype(np.uint8), _room(shape, scratch), doubt), 1, 0)


def _rows_part(
    data: Data,
    head: JpegHead,
    shape: tuple[int, int, int],
    factor: int,
    top: int,
    stop: int,
    scratch: NDArray[np.uint8] | None,
) -> Part | None:
    """Rows [top, stop) alone; None where the whole file has to be decoded."""
    height, width, channels = shape
    rows = None if 8 * (stop - top) > 7 * height else rows_alone(data, head, height, width, top, stop)
    if rows is None:
        return None
    small = _smaller((rows.stop - rows.top, width, channels), factor)
    pixels = _room(small, scratch)
    try:
        _run_decoder(rows.data, small, factor, pixels.reshape(-1))
    except (ValueError, RuntimeError) as error:
        # libjpeg names the first of its warnings: there was none before it had all that it was told to decode, and the
        # file goes on to its end as it should.
        if not (rows.ends_early and _ONLY_EXTRANEOUS.search(str(error))):
            return None
    first = (top - rows.top) // factor
    return Part(pixels[first : first + -(-(stop - top) // factor)], factor, top)


def _decode_smaller(
    data: Data, shape: tuple[int, int, int], orientation: int, factor: int, scratch: NDArray[np.uint8] | None
) -> NDArray[np.uint8]:
    """The whole image shrunk, upright; raises ValueError or RuntimeError for what libjpeg warns of."""
    small = _smaller(shape, factor)
    pixels = _room(small, scratch)
    if orientation == 1:
        return _run_decoder(data, small, factor, pixels.reshape(-1))
    stored = (small[1], small[0], small[2]) if orientation >= 5 else small
    pixels[...] = upright(_run_decoder(data, stored, factor, None), orientation)
    return pixels


def _decode_plain(
    data: Data, encoding: int, shape: tuple[int, ...], dtype: np.dtype[Any], out: NDArray[Any] | None
) -> NDArray[Any]:
    num_bytes = math.prod(shape) * dtype.itemsize
    stored = dtype.newbyteorder("<")
    if encoding == RAW:
        if len(data) != num_bytes:
            raise ImageError(f"{len(data):,} bytes where its shape takes {num_bytes:,}")
        pixels = np.frombuffer(data, stored).reshape(shape)
    else:
        direct = out is not None and out.dtype == stored
        pixels = out if direct and out is not None else np.empty(shape, stored)
        try:
            decompress_zstd(data, pixels.reshape(-1).view(np.uint8))
        except ValueError as error:
            raise ImageError(f"zstd: {error}") from error
    if out is not None and out is not pixels:
        out[...] = pixels
    return pixels if out is None else out


def _decode_jpeg(
    data: Data, stored: tuple[int, int, int], out: NDArray[np.uint8] | None, doubt: Doubt | None
) -> NDArray[np.uint8]:
    """Pixels (H, W, C) as stored, in the memory of out where it is given: one dimension, of as many bytes."""
    if not _is_pillows(frame_components(data), stored[2]):
        try:
            # Strict: what libjpeg only warns of (a truncated or corrupt stream) is left to Pillow's judgement.
            return _run_decoder(data, stored, 1, out)
        except (ValueError, RuntimeError):
            if doubt is not None:
                doubt()
    pixels = decode_unturned(bytes(data), stored[2])
    if pixels.shape != stored:
        raise ImageError(
            f"is {pixels.shape[1]}x{pixels.shape[0]} pixels (width x height) where {stored[1]}x{stored[0]} are expected"
        )
    if out is None:
        return pixels
    filled = out[: pixels.size].reshape(stored)
    filled[...] = pixels
    return filled


def _run_decoder(
    data: Data | bytearray, small: tuple[int, ...], factor: int, out: NDArray[np.uint8] | None
) -> NDArray[np.uint8]:
    """libjpeg-turbo's pixels of this shape, that of the image shrunk by a factor.

    Raises ValueError or RuntimeError for anything else, and for what libjpeg warns of.
    """
    least = small[:2] if factor > 1 else (0, 0)
    pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
        data, _COLORSPACES[small[2]], min_height=least[0], min_width=least[1], min_factor=factor, buffer=out
    )
    if pixels.shape != small:
        raise ValueError(f"an image of {pixels.shape} where {small} is expected")
    return pixels


def _is_pillows(components: int, channels: int) -> bool:
    """Whether a JPEG's colours become others by Pillow's rules: those of print, and colour that is to become gray."""
    return components not in (1, 3) or (channels == 1 and components == 3)


def _smaller(stored: tuple[int, int, int], factor: int) -> tuple[int, int, int]:
    return -(-stored[0] // factor), -(-stored[1] // factor), stored[2]


def _room(shape: tuple[int, ...], scratch: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    size = math.prod(shape)
    if scratch is None or len(scratch) < size:
        return np.empty(shape, np.uint8)
    return scratch[:size].reshape(shape)
