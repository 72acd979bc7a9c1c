"""Decodes 16 bits a channel exactly: Pillow itself keeps only the high bytes of colours.

Pillow's decoders read 16-bit colours whole and its unpackers then drop half of each. A second pass over the file with
the other byte order gets the other half. On a PNG of 640x480 that took 25 ms against 12 ms for OpenCV, which would be
one more dependency, writes to stderr if a file is damaged, and gives the same pixels.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

from fastload.errors import ImageError

# Suffix of a rawmode -> suffix of the rawmode that reads the low bytes instead of the high ones.
_NATIVE = "B" if sys.byteorder == "big" else "L"
_OTHER_ORDER = {"B": "L", "L": "B", "N": "L" if _NATIVE == "B" else "B"}
_GRAY_ALPHA = "LA;16B"


def is_deep_colour(image: Image.Image) -> bool:
    """Whether an opened image, not yet loaded, has 16-bit colours (or gray with alpha) that can be decoded exactly."""
    return _low_rawmode(image) is not None or _is_deep_ppm(image)


def read_low_bytes(image: Image.Image) -> None:
    """Makes an opened image of 16-bit colours load the low bytes instead of the high ones.

    Gray with alpha, which Pillow opens as RGBA, loads as its four bytes a pixel instead.
    """
    rawmode = _low_rawmode(image)
    if rawmode is None:
        return
    assert isinstance(image, ImageFile.ImageFile)
    tiles: list[Any] = []
    for tile in image.tile:
        args: Any = (rawmode, *tile[3][1:]) if isinstance(tile[3], tuple) else rawmode
        fields = (*tile[:3], args)
        tiles.append(fields if type(tile) is tuple else type(tile)(*fields))  # a named one from Pillow 11 on
    image.tile = tiles


def is_gray_alpha(image: Image.Image) -> bool:
    """Whether an opened image is 16-bit gray with alpha."""
    return bool(tile_of(image)[2][0] == _GRAY_ALPHA)


def deep_pixels(high: Image.Image, low: Image.Image | None, *, gray_alpha: bool) -> NDArray[np.uint16]:
    """Returns uint16 (H, W, 3 or 4) from images loaded with high and with low bytes; None: low bytes are not needed.

    Gray with alpha (`is_gray_alpha`) has its four bytes in `low`.
    """
    if gray_alpha and low is not None:
        gray, alpha = np.moveaxis(np.asarray(low).view(">u2"), 2, 0)
        return np.stack([gray, gray, gray, alpha], axis=2).astype(np.uint16)
    pixels: NDArray[np.uint16] = np.asarray(high).astype(np.uint16) << np.uint16(8)
    if low is not None:
        pixels |= np.asarray(low)
    key = high.info.get("transparency")
    if pixels.shape[2] == 3 and isinstance(key, tuple):
        # Pillow compares the key's 16 bits with the high bytes, and so finds nothing transparent.
        opaque = (pixels != np.array(key, np.uint16)).any(axis=2)
        pixels = np.dstack([pixels, np.where(opaque, 65535, 0).astype(np.uint16)])
    return pixels


def ppm_pixels(image: Image.Image, data: bytes) -> NDArray[np.uint16] | None:
    """Returns uint16 (H, W, 3) of a binary PPM of more than 8 bits, its maximum scaled to 65535; None for others."""
    if not _is_deep_ppm(image):
        return None
    _, begin, (_, largest, *_) = tile_of(image)
    count = image.height * image.width * 3
    if len(data) < begin + 2 * count:
        raise ImageError("cannot be decoded: image file is truncated")
    values = np.frombuffer(data, ">u2", count, begin).reshape(image.height, image.width, 3)
    if largest == 65535:
        return values.astype(np.uint16)
    scaled = (values.astype(np.uint32) * 65535 + largest // 2) // largest  # values * 65535 stays below 2**32
    whole: NDArray[np.uint16] = np.minimum(scaled, 65535).astype(np.uint16)
    return whole


def deep_gray(image: Image.Image) -> NDArray[np.uint16]:
    """Returns uint16 (H, W, 1 or 4) of a loaded image of 16-bit gray, 4 channels if it has a transparent level."""
    # By format, Pillow gives big-endian or 32-bit integers.
    gray = np.asarray(image).astype(np.uint16)[..., None]
    key = image.info.get("transparency")
    if not isinstance(key, int):
        return gray
    return np.dstack([gray, gray, gray, np.where(gray == key, 0, 65535).astype(np.uint16)])


def tile_of(image: Image.Image) -> tuple[str, int, tuple[Any, ...]]:
    """Returns codec, first byte and arguments (rawmode first) of the tile that Pillow will decode; empty if none."""
    if not isinstance(image, ImageFile.ImageFile) or not image.tile:
        return "", 0, ("",)
    codec, _, begin, args = image.tile[0]  # a plain tuple before Pillow 11
    return codec, begin, args if isinstance(args, tuple) else (args,)


def _is_deep_ppm(image: Image.Image) -> bool:
    codec, _, args = tile_of(image)
    return image.format == "PPM" and image.mode == "RGB" and codec == "ppm" and args[1] > 255


def _low_rawmode(image: Image.Image) -> str | None:
    rawmode = str(tile_of(image)[2][0])
    if image.format not in ("PNG", "TIFF"):
        return None
    if rawmode == _GRAY_ALPHA and image.mode == "RGBA":
        return "RGBA"
    if rawmode[:-1] == f"{image.mode};16" and image.mode in ("RGB", "RGBA") and rawmode[-1] in _OTHER_ORDER:
        return rawmode[:-1] + _OTHER_ORDER[rawmode[-1]]
    return None
