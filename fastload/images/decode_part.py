"""Decodes encoded rows of a packed file: whole, or of a JPEG only the part that is needed. No torch here.

The part: only some rows, and at a smaller scale if enough pixels are left. Measured on photos of 400x533 pixels, each
with a window of RandomResizedCrop, us of CPU time an image:

| file | whole | only the rows | smaller, if 224 / 128 pixels are left |
| --- | --- | --- | --- |
| original (29 KB): rows below are left out | 532 | 455 | 453 / 362 |
| encoded by fastload (43 KB): rows above and below are left out | 662 | 445 | 443 / 375 |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from fastload.errors import ImageError
from fastload.format.codecs import decompress_zstd
from fastload.format.ragged import JPEG, RAW
from fastload.images.decode import decode_unturned, upright
from fastload.images.image_header import check_size
from fastload.images.jpeg_cut import JpegHead, cut_rows, frame_components, jpeg_head

Data = bytes | memoryview

OnSuspect = Callable[[], None]
"""Called if libjpeg refuses or warns of a JPEG, before Pillow decodes it, which accepts many damaged files. It raises
ImageError if the bytes are no longer those that were packed."""

FACTORS = (8, 4, 2)
"""Factors by which JPEGs are decoded smaller; libjpeg's other factors take longer than full size."""

_COLORSPACES = {1: "GRAY", 3: "RGB", 4: "RGBA"}
_ONLY_EXTRANEOUS = re.compile(r"extraneous bytes before marker 0xd9$")


class DecodedPart(NamedTuple):
    """The decoded part of an image.

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
    on_suspect: OnSuspect | None = None,
) -> NDArray[Any]:
    """Decodes the encoded row of an image, upright.

    Safe to call from several threads; JPEG and zstd are decoded without the GIL.

    Args:
        data: encoded bytes.
        encoding: RAW, JPEG or ZSTD.
        shape: (H, W, C) of its pixels, upright. A JPEG may be gray or colour, whatever C is.
        orientation: EXIF orientation that is still to be applied to a JPEG.
        dtype: uint8 or uint16, little-endian; a JPEG is uint8.
        out: C-contiguous array to be filled, of this shape and dtype; after an error its content is undefined.
        on_suspect: see `OnSuspect`.

    Returns:
        (H, W, C): out if given, else a new array, or, of raw rows, a view of data.

    Raises:
        ImageError: it cannot be decoded; the reason only.
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
        _decode_jpeg(data, shape, out.reshape(-1), on_suspect)
    else:
        encoded_shape = (width, height, channels) if orientation >= 5 else shape
        out[...] = upright(_decode_jpeg(data, encoded_shape, None, on_suspect), orientation)
    return out


def decode_mask_row(
    data: Data, encoding: int, shape: tuple[int, int], out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """Decodes the encoded row of a mask, uint8 (H, W); otherwise like `decode_row`.

    Args:
        data: encoded bytes.
        encoding: RAW or ZSTD.
        shape: (H, W).
        out: C-contiguous array to be filled.
    """
    if encoding == JPEG:
        raise ImageError("a mask is never a JPEG, which blends neighbouring classes")
    return _decode_plain(data, encoding, shape, np.dtype(np.uint8), out)


def shrink_factor(window: tuple[int, int, int, int], least: tuple[int, int]) -> int:
    """Returns the largest factor by which a JPEG may be decoded smaller.

    Args:
        window: top, left, height and width of the window needed, in pixels of the full image.
        least: rows and columns that the window must keep.
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
    on_suspect: OnSuspect | None = None,
) -> DecodedPart:
    """Decodes a window of a JPEG: smaller if the window keeps enough pixels, without rows far from it.

    At factor 1 the pixels are exactly those of `decode_row`. A stream that libjpeg warns of is an error as there,
    except in rows that are left out.

    Args:
        data: a JPEG file.
        shape: (H, W, C) of its pixels, upright.
        orientation: EXIF orientation that is still to be applied.
        window: top, left, height and width in full, upright pixels; within the image.
        least: (h, w) to which the window will be resized: it keeps at least as many rows and columns.
        scratch: uint8, one dimension: memory for the pixels, used if it is large enough; H * W * C bytes always are.
        on_suspect: see `OnSuspect`.

    Raises:
        ImageError: it cannot be decoded; the reason only.
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
                return DecodedPart(_decode_smaller(data, shape, orientation, factor, scratch), factor, 0)
            except (ValueError, RuntimeError):
                pass  # decode_row tries again, in the end with Pillow
    return DecodedPart(
        decode_row(data, JPEG, shape, orientation, np.dtype(np.uint8), _room(shape, scratch), on_suspect), 1, 0
    )


def _rows_part(
    data: Data,
    head: JpegHead,
    shape: tuple[int, int, int],
    factor: int,
    top: int,
    stop: int,
    scratch: NDArray[np.uint8] | None,
) -> DecodedPart | None:
    """Decodes rows [top, stop) alone; returns None if the whole file has to be decoded."""
    height, width, channels = shape
    rows = None if 8 * (stop - top) > 7 * height else cut_rows(data, head, height, width, top, stop)
    if rows is None:
        return None
    small = _smaller((rows.stop - rows.top, width, channels), factor)
    pixels = _room(small, scratch)
    try:
        _run_decoder(rows.data, small, factor, pixels.reshape(-1))
    except (ValueError, RuntimeError) as error:
        # The error names libjpeg's first warning. If that is about bytes behind the rows, these were decoded well.
        if not (rows.ends_early and _ONLY_EXTRANEOUS.search(str(error))):
            return None
    first = (top - rows.top) // factor
    return DecodedPart(pixels[first : first + -(-(stop - top) // factor)], factor, top)


def _decode_smaller(
    data: Data, shape: tuple[int, int, int], orientation: int, factor: int, scratch: NDArray[np.uint8] | None
) -> NDArray[np.uint8]:
    """Decodes the whole image shrunk, upright; raises ValueError or RuntimeError for what libjpeg warns of."""
    small = _smaller(shape, factor)
    pixels = _room(small, scratch)
    if orientation == 1:
        return _run_decoder(data, small, factor, pixels.reshape(-1))
    encoded_shape = (small[1], small[0], small[2]) if orientation >= 5 else small
    pixels[...] = upright(_run_decoder(data, encoded_shape, factor, None), orientation)
    return pixels


def _decode_plain(
    data: Data, encoding: int, shape: tuple[int, ...], dtype: np.dtype[Any], out: NDArray[Any] | None
) -> NDArray[Any]:
    num_bytes = math.prod(shape) * dtype.itemsize
    little_endian = dtype.newbyteorder("<")
    if encoding == RAW:
        if len(data) != num_bytes:
            raise ImageError(f"{len(data):,} bytes where its shape takes {num_bytes:,}")
        pixels = np.frombuffer(data, little_endian).reshape(shape)
    else:
        direct = out is not None and out.dtype == little_endian
        pixels = out if direct and out is not None else np.empty(shape, little_endian)
        try:
            decompress_zstd(data, pixels.reshape(-1).view(np.uint8))
        except ValueError as error:
            raise ImageError(f"zstd: {error}") from error
    if out is not None and out is not pixels:
        out[...] = pixels
    return pixels if out is None else out


def _decode_jpeg(
    data: Data, shape: tuple[int, int, int], out: NDArray[np.uint8] | None, on_suspect: OnSuspect | None
) -> NDArray[np.uint8]:
    """Decodes pixels (H, W, C), not turned upright, into out if given: one dimension, of as many bytes."""
    if not _is_pillows(frame_components(data), shape[2]):
        try:
            # Strict: what libjpeg only warns of (a truncated or corrupt stream) is left to Pillow's judgement.
            return _run_decoder(data, shape, 1, out)
        except (ValueError, RuntimeError):
            if on_suspect is not None:
                on_suspect()
    pixels = decode_unturned(bytes(data), shape[2])
    if pixels.shape != shape:
        raise ImageError(
            f"is {pixels.shape[1]}x{pixels.shape[0]} pixels (width x height) where {shape[1]}x{shape[0]} are expected"
        )
    if out is None:
        return pixels
    filled = out[: pixels.size].reshape(shape)
    filled[...] = pixels
    return filled


def _run_decoder(
    data: Data | bytearray, small: tuple[int, ...], factor: int, out: NDArray[np.uint8] | None
) -> NDArray[np.uint8]:
    """Decodes with libjpeg-turbo; `small` is the shape of the image shrunk by the factor.

    Raises ValueError or RuntimeError if the image has another shape, or libjpeg warns.
    """
    least = small[:2] if factor > 1 else (0, 0)
    pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
        data, _COLORSPACES[small[2]], min_height=least[0], min_width=least[1], min_factor=factor, buffer=out
    )
    if pixels.shape != small:
        raise ValueError(f"an image of {pixels.shape} where {small} is expected")
    return pixels


def _is_pillows(components: int, channels: int) -> bool:
    """Whether Pillow has to convert a JPEG's colours: CMYK and YCCK, and colour that is to become gray."""
    return components not in (1, 3) or (channels == 1 and components == 3)


def _smaller(shape: tuple[int, int, int], factor: int) -> tuple[int, int, int]:
    return -(-shape[0] // factor), -(-shape[1] // factor), shape[2]


def _room(shape: tuple[int, ...], scratch: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    size = math.prod(shape)
    if scratch is None or len(scratch) < size:
        return np.empty(shape, np.uint8)
    return scratch[:size].reshape(shape)
