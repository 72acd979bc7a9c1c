"""Decodes encoded rows of a packed file: whole, or of an image only the part that is needed. No torch here.

The part of a JPEG: only some rows, and at a smaller scale if enough pixels are left. Measured on photos of 400x533
pixels, each with a window of RandomResizedCrop, us of CPU time an image:

| file | whole | only the rows | smaller, if 224 / 128 pixels are left |
| --- | --- | --- | --- |
| original (29 KB): rows below are left out | 532 | 455 | 453 / 362 |
| encoded by fastload (43 KB): rows above and below are left out | 662 | 445 | 443 / 375 |
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError
from fastload.format.codecs import decompress_zstd
from fastload.format.ragged import JPEG, RAW
from fastload.images.decode import decode_unturned, upright
from fastload.images.image_header import is_large, large_images, upright_size
from fastload.images.jpeg import JpegHead, check_scans, cut_rows, has_libjpeg, run_libjpeg, scan_jpeg

Data = bytes | memoryview
_Scratch = NDArray[np.uint8] | None

OnSuspect = Callable[[], None]
"""Called before Pillow decodes a JPEG that libjpeg refuses or warns of: Pillow accepts many damaged files. It raises
ImageError if the bytes are no longer those that were packed."""

FACTORS = (8, 4, 2)
"""Factors by which JPEGs are decoded smaller; libjpeg's other factors take longer than full size."""

_UINT8 = np.dtype(np.uint8)
_ONLY_EXTRANEOUS = re.compile(r"extraneous bytes before marker 0xd9$")


class DecodedPart(NamedTuple):
    """The decoded part of an image."""

    pixels: NDArray[np.uint8]  # (h, w, C), C-contiguous: rows of the image, in full width, shrunk by the factor
    factor: int
    top: int  # row of the full image, upright, at which pixels begin; a multiple of the factor


def decode_row(
    data: Data,
    encoding: int,
    shape: tuple[int, ...],
    orientation: int,
    dtype: np.dtype[Any],
    out: NDArray[Any] | None = None,
    on_suspect: OnSuspect | None = None,
) -> NDArray[Any]:
    """Decodes the encoded row of an image, upright, or of a mask.

    Safe to call from several threads; JPEG and zstd are decoded without the GIL.

    Args:
        data: encoded bytes.
        encoding: RAW, JPEG or ZSTD; a mask is never a JPEG.
        shape: (H, W, C) of its pixels, upright; (H, W) of a mask. A JPEG may be gray or colour, whatever C is.
        orientation: EXIF orientation that is still to be applied to a JPEG.
        dtype: uint8 or uint16, little-endian; a JPEG is uint8.
        out: C-contiguous array to be filled, of this shape and dtype; after an error its content is undefined.
        on_suspect: see `OnSuspect`.

    Returns:
        out if given, else a new array, or, of raw rows, a view of data.

    Raises:
        ImageError: it cannot be decoded; the reason only.
        MissingExtraError: zstandard is not installed.
    """
    if encoding != JPEG:
        return _decode_plain(data, encoding, shape, dtype, out)
    if len(shape) == 2:
        raise ImageError("a mask is never a JPEG, which blends neighbouring classes")
    if dtype.itemsize != 1:
        raise ImageError("a JPEG has 8 bits a channel where the dataset has 16")
    if out is None:
        out = np.empty(shape, np.uint8)
    head = _head_for_libjpeg(data, shape[2])
    _decode_jpeg(data, head, shape, orientation, 1, out.reshape(-1), on_suspect)
    return out


def decode_part(
    data: Data,
    encoding: int,
    shape: tuple[int, ...],
    orientation: int,
    window: tuple[int, int, int, int],
    factor: int,
    scratch: _Scratch = None,
    on_suspect: OnSuspect | None = None,
) -> DecodedPart:
    """Decodes at least the rows of an 8-bit image that a window shows; of a JPEG no rows far from it, if possible.

    At factor 1 the pixels equal `decode_row`'s exactly. A stream that libjpeg warns of is an error as there, except in
    rows that are left out.

    Args:
        data, encoding, shape, orientation: as in `decode_row`.
        window: top, left, height and width in full, upright pixels; within the image.
        factor: by how much a JPEG is decoded smaller: 1, 2, 4 or 8. What only Pillow decodes keeps its size.
        scratch: uint8, one dimension: memory for the pixels, used if it is large enough; H * W * C bytes always are.
        on_suspect: see `OnSuspect`.

    Raises:
        ImageError: it cannot be decoded; the reason only.
    """
    top, _, height, _ = window
    if encoding != JPEG:
        shown = _decode_plain(data, encoding, shape, _UINT8, None)[top : top + height]
        pixels = _room(shown.shape, scratch)
        pixels[...] = shown
        return DecodedPart(pixels, 1, top)
    head = _head_for_libjpeg(data, shape[2])
    if orientation == 1 and head is not None and has_libjpeg():
        top, stop = top // factor * factor, min(shape[0], -(-(top + height) // factor) * factor)
        part = _decode_rows(data, head, shape, factor, top, stop, scratch)
        if part is not None:
            return part
    return DecodedPart(*_decode_jpeg(data, head, shape, orientation, factor, scratch, on_suspect), 0)


def _decode_rows(
    data: Data, head: JpegHead, shape: tuple[int, ...], factor: int, top: int, stop: int, scratch: _Scratch
) -> DecodedPart | None:
    """Decodes rows [top, stop) alone; returns None if the whole file has to be decoded."""
    height, width, channels = shape
    rows = cut_rows(data, head, height, width, top, stop) if 8 * (stop - top) <= 7 * height else None
    if rows is None:
        return None
    small = _smaller((rows.stop - rows.top, width, channels), factor)
    pixels = _room(small, scratch)
    try:
        run_libjpeg(rows.data, small, factor=factor, out=pixels.reshape(-1))
    except (ValueError, RuntimeError) as error:
        # The error names libjpeg's first warning. If that is about bytes behind the rows, these were decoded well.
        if not (rows.ends_early and _ONLY_EXTRANEOUS.search(str(error))):
            return None
    first = (top - rows.top) // factor
    return DecodedPart(pixels[first : first + -(-(stop - top) // factor)], factor, top)


def _decode_jpeg(
    data: Data,
    head: JpegHead | None,
    shape: tuple[int, ...],
    orientation: int,
    factor: int,
    scratch: _Scratch,
    on_suspect: OnSuspect | None,
) -> tuple[NDArray[np.uint8], int]:
    """Returns the pixels of a whole JPEG, upright, and by how much they are smaller: by the factor, or not."""
    for shrunk in dict.fromkeys((factor, 1)) if head is not None else ():
        small = _smaller(shape, shrunk)
        pixels = _room(small, scratch)
        try:
            if orientation == 1:
                run_libjpeg(data, small, factor=shrunk, out=pixels.reshape(-1))
            else:
                as_encoded = (*upright_size(*small[:2], orientation), small[2])
                pixels[...] = upright(run_libjpeg(data, as_encoded, factor=shrunk), orientation)
            return pixels, shrunk
        except (ValueError, RuntimeError):
            continue
    if on_suspect is not None and has_libjpeg():
        on_suspect()
    # A row's size is bounded by what a row may take; what its bytes claim, only by it.
    with large_images(sys.maxsize if is_large(*shape[:2]) else 0):
        pixels, found = _room(shape, scratch), upright(decode_unturned(bytes(data), shape[2]), orientation)
    if found.shape != shape:
        raise ImageError(
            f"is {found.shape[1]}x{found.shape[0]} pixels (width x height) where {shape[1]}x{shape[0]} are expected"
        )
    pixels[...] = found
    return pixels, 1


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
        pixels = out if out is not None and out.dtype == little_endian else np.empty(shape, little_endian)
        try:
            decompress_zstd(data, pixels.reshape(-1).view(np.uint8))
        except ValueError as error:
            raise ImageError(f"zstd: {error}") from error
    if out is not None and out is not pixels:
        out[...] = pixels
    return pixels if out is None else out


def offset_in(memory: NDArray[np.uint8], pixels: NDArray[np.uint8]) -> int:
    """Returns the byte of memory at which pixels begin; -1 if they lie elsewhere."""
    offset: int = pixels.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
    return offset if 0 <= offset < memory.nbytes else -1


def _head_for_libjpeg(data: Data, channels: int) -> JpegHead | None:
    """Returns the head of a JPEG; None if Pillow has to decode it: odd ones, CMYK, colour that is to become gray.

    Raises ImageError for one of too many scans.
    """
    head = scan_jpeg(data)
    if head is not None and head.scan is None:
        check_scans(data)
    return None if head is None or head.components == 4 or head.components > channels else head


def _smaller(shape: tuple[int, ...], factor: int) -> tuple[int, int, int]:
    return -(-shape[0] // factor), -(-shape[1] // factor), shape[2]


def _room(shape: tuple[int, ...], scratch: _Scratch) -> NDArray[np.uint8]:
    size = math.prod(shape)
    if scratch is None or len(scratch) < size:
        return np.empty(shape, np.uint8)
    return scratch[:size].reshape(shape)
