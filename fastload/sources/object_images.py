"""Turns the image or mask of a Python sample into an array: from Pillow images, arrays, tensors and file bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fastload.errors import ImageError
from fastload.images.image_header import ImageHeader, check_size, pillow_silenced, probe_image

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def file_bytes(image: Any) -> bytes | None:
    """Returns the bytes of an image that is given as a file's bytes; None for any other image."""
    if isinstance(image, Mapping) and isinstance(image.get("bytes"), bytes):  # Hugging Face, undecoded
        image = image["bytes"]
    return bytes(image) if isinstance(image, (bytes, bytearray, memoryview)) else None


def examine(image: Any) -> tuple[ImageHeader, int]:
    """Returns the header of an image, and its digest: XXH3-64 of its file's bytes, else of its pixels."""
    data = file_bytes(image)
    if data is not None:
        return probe_image(lambda size: data[:size]), xxhash.xxh3_64_intdigest(data)
    pixels = pixels_of(image)
    return header_of(pixels), image_digest(image, pixels)


def header_of(pixels: NDArray[Any]) -> ImageHeader:
    """Returns size, channels and bits of the pixels of an image or mask."""
    height, width, channels = (*pixels.shape, 1)[:3]
    kind = _MODES[channels] if pixels.itemsize == 1 else {1: "I;16", 3: "RGB;16", 4: "RGBA;16"}[channels]
    return ImageHeader(height, width, channels, 8 * pixels.itemsize, kind, 1)


def image_digest(image: Any, pixels: NDArray[Any]) -> int:
    """Returns XXH3-64 of an image's file bytes, or, if it is not given as such, of its pixels."""
    data = file_bytes(image)
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(pixels).data if data is None else data)


def pixels_of(image: Any) -> NDArray[Any]:
    """Returns the pixels of an image of any accepted type, uint8 or uint16, (H, W) or (H, W, C).

    Raises:
        ImageError: the image has no accepted type, dtype or shape, or cannot be decoded.
    """
    data = file_bytes(image)
    if data is not None:
        return _decoded(data)
    if isinstance(image, Image.Image):
        with pillow_silenced():
            return _of_pillow(image)
    tensor = hasattr(image, "detach")
    if tensor:
        image = image.detach().cpu().numpy()
    if not isinstance(image, np.ndarray):
        what = type(image).__name__
        raise ImageError(f"is a {what}; expected a Pillow image, an array, a tensor or the bytes of an image file")
    return _of_array(image, tensor)


def mask_of(mask: Any) -> NDArray[np.uint8] | None:
    """Returns a mask as uint8 (H, W); None for None.

    Raises:
        ImageError: it does not hold one integer from 0 to 255 for each pixel.
    """
    if mask is None:
        return None
    if isinstance(mask, Image.Image) and mask.mode not in ("1", "L", "P"):
        raise ImageError(f"has a mask of Pillow mode {mask.mode!r}; expected L or P, the number of each pixel's class")
    if hasattr(mask, "detach"):
        mask = mask.detach().cpu().numpy()
    found = np.asarray(mask)
    if found.ndim == 3 and 1 in (found.shape[0], found.shape[2]):
        found = found[0] if found.shape[0] == 1 else found[..., 0]
    if found.ndim != 2 or not found.size or found.dtype.kind not in "iub" or found.min() < 0 or found.max() > 255:
        raise ImageError(f"has a mask that is {found.dtype} {found.shape}; expected integers from 0 to 255, (H, W)")
    return found.astype(np.uint8)


def _decoded(data: bytes) -> NDArray[Any]:
    # Imported here: a listing of arrays needs no decoder.
    from fastload.images.decode import decode_image
    from fastload.images.fit import Target

    header = probe_image(lambda size: data[:size])
    dtype = np.dtype(np.uint16 if header.bits == 16 else np.uint8)
    target = Target(height=header.height, width=header.width, channels=header.channels, dtype=dtype, fit=None)
    out = np.empty((header.height, header.width, header.channels), dtype)
    decode_image(data, target, out)
    return out


def _of_pillow(image: Image.Image) -> NDArray[Any]:
    try:
        check_size(image.height, image.width)
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I;16"):
            return np.asarray(upright).astype(np.uint16)
        if upright.mode in ("I", "F"):
            raise ImageError("has 32 bits a pixel, which are not supported; convert it to 8 or 16 bits")
        channels = 4 if upright.has_transparency_data else 1 if upright.mode in ("1", "L") else 3
        return np.array(upright.convert(_MODES[channels]))
    except ImageError:
        raise
    except Exception as exc:  # Pillow opens files lazily, and raises anything if one is damaged
        raise ImageError(f"cannot be decoded: {exc}") from exc


def _of_array(pixels: NDArray[Any], tensor: bool) -> NDArray[Any]:
    shape = pixels.shape
    if pixels.dtype.newbyteorder("=") not in (np.dtype(np.uint8), np.dtype(np.uint16)):
        fix = "convert it with `(image * 255).round().astype('uint8')` where it lies in 0 to 1"
        if tensor:
            fix = "leave ToTensor and Normalize out (PILToTensor keeps uint8): normalizing comes later, on the device"
        raise ImageError(f"is {pixels.dtype} {shape}; expected uint8 or uint16: {fix}")
    first, last = (len(shape) == 3 and shape[at] in _MODES for at in (0, -1))
    if len(shape) != 2 and not first and not last:
        raise ImageError(f"has the shape {shape}; expected (H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 channels")
    if first and (tensor or not last):  # in doubt, a tensor's channels come first, an array's last
        pixels = pixels.transpose(1, 2, 0)
    check_size(*pixels.shape[:2])
    return np.ascontiguousarray(pixels, dtype=pixels.dtype.newbyteorder("="))
