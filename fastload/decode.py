"""One image file's bytes become one row of pixels: decoded, upright, in the channels and size asked for.

JPEG is decoded by libjpeg-turbo (simplejpeg) straight into the row; what it will not take, and every other
format, by Pillow. Both give the pixels of `ImageOps.exif_transpose(Image.open(file)).convert("RGB")`.

| stored as | becomes |
| --- | --- |
| gray, gray with alpha, 1-bit | 1 channel (1-bit as 0 and 255); replicated for 3 channels |
| 16-bit gray | uint16, or uint8 by its high byte |
| palette, CMYK, YCCK, LAB | RGB |
| alpha channel, transparent colour | the 4th channel, or dropped; absent where asked for: opaque |
| 16-bit colour | 8 bits, by Pillow |
| colour where 1 channel is asked for | luma as in Pillow's `convert("L")` |
| animation, several pages | the first |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import PIL
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, features

from fastload.errors import ImageError
from fastload.image_header import (
    ImageHeader,
    check_size,
    failure_reason,
    kind_of,
    open_image,
    orientation_of,
    pillow_silenced,
    png_without_tail,
    probe_image,
    upright_size,
)
from fastload.jpeg_scan import JpegFrame, scan_jpeg

__all__ = ["Fit", "ImageHeader", "Target", "decode_image", "decoder_versions", "probe_image"]

Fit = Literal["crop", "pad", "stretch"]

_COLORSPACES = {1: "GRAY", 3: "RGB", 4: "RGBA"}
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_UINT8 = np.dtype(np.uint8)


@dataclass(frozen=True)
class Target:
    """The row every image of a dataset is brought to."""

    height: int
    width: int
    channels: int
    """1, 3 or 4."""
    dtype: np.dtype[Any]
    """uint8, or uint16 for images that are 16-bit gray."""
    fit: Fit | None = None
    """How an image of another size is brought to this one, antialiased bilinear in each case: "crop" covers the
    target and cuts off evenly what stands out, "pad" fits inside and leaves the rest 0, "stretch" ignores the
    aspect. None: the size must match. An image of the right size is never resampled."""


def decode_image(data: bytes, target: Target, out: NDArray[Any]) -> None:
    """Decode a whole image file into `out`, upright.

    Safe to call from several threads, with an `out` each; simplejpeg and Pillow free the GIL while they decode.

    Args:
        data: the file's bytes.
        out: (target.height, target.width, target.channels) of target.dtype, C-contiguous; the caller's. It is
            filled in place, and holds anything after an error.

    Raises:
        ImageError: the image is damaged, truncated, too large, not supported, of another size than a target
            without fit, or 8-bit where 16 are asked for. The cause is kept where a library raised it.
    """
    assert out.shape == (target.height, target.width, target.channels), "one row of the target"
    frame = scan_jpeg(data)
    try:
        if frame is None or not _decode_jpeg(data, frame, target, out):
            pixels, orientation = _decode_pillow(data, target)
            _place(_upright(pixels, orientation), target, out)
    except ImageError:
        raise
    except Exception as error:  # a decoder fed with damaged bytes may raise anything
        raise ImageError(failure_reason(error, data)) from error


def decoder_versions() -> str:
    """Names and versions of what decodes, for the file's `decoder` attribute: equal strings, equal pixels."""
    turbo = features.version("libjpeg_turbo") if features.check("libjpeg_turbo") else None
    pillow = f"Pillow {PIL.__version__}" + (f" (libjpeg-turbo {turbo})" if turbo else "")
    return f"simplejpeg {simplejpeg.__version__}; {pillow}"


def _decode_jpeg(data: bytes, frame: JpegFrame, target: Target, out: NDArray[Any]) -> bool:
    """Decode with simplejpeg; False when it is a matter for Pillow."""
    if frame.components == 4:
        return False
    height, width, components, orientation, _ = frame
    luma = components > target.channels
    direct = orientation == 1 and not luma and height == target.height and width == target.width
    check_size(height, width)
    if not direct and target.fit is None:
        _check_match(*upright_size(height, width, orientation), target)
    if target.dtype != _UINT8:
        raise ImageError(_TOO_FEW_BITS)
    colorspace = "RGB" if luma else _COLORSPACES[target.channels]
    try:
        # Strict: what libjpeg only warns of (a truncated or corrupt stream) is left to Pillow's judgement.
        pixels = simplejpeg.decode_jpeg(data, colorspace, buffer=out if direct else None)
    except (ValueError, RuntimeError):
        return False
    if pixels.shape[:2] != (height, width):
        return False
    if not direct:
        if luma:
            pixels = _pixels_of(Image.fromarray(pixels).convert("L"))
        _place(_upright(pixels, orientation), target, out)
    return True


def _decode_pillow(data: bytes, target: Target) -> tuple[NDArray[Any], int]:
    """(H, W, target.channels) pixels of target.dtype as stored, and the orientation still to be applied."""
    size = ""
    try:
        with pillow_silenced():
            image: Image.Image = open_image(data)
            size = f" of {image.width}x{image.height} pixels"
            _, _, bits = kind_of(image)
            try:
                image.load()
            except Exception:
                pixels_only = png_without_tail(data) if image.format == "PNG" else None
                if pixels_only is None:
                    raise
                # Pillow reads a PNG to its end and does not say whether that or the pixels are damaged.
                image = open_image(pixels_only)
                image.load()
            # After load, which turns a TIFF upright by itself and finds the EXIF that a PNG keeps at its end.
            orientation = orientation_of(image)
            if target.fit is None:
                _check_match(*upright_size(image.height, image.width, orientation), target)
            if bits == 16:
                return _from_16_bits(image, target), orientation
            if target.dtype != _UINT8:
                raise ImageError(_TOO_FEW_BITS)
            return _pixels_of(_converted(image, target.channels)), orientation
    except MemoryError as error:
        raise ImageError(f"not enough memory for its {len(data):,} bytes{size}") from error


_TOO_FEW_BITS = "has 8 bits a channel where the dataset has 16"


def _check_match(height: int, width: int, target: Target) -> None:
    if height != target.height or width != target.width:
        raise ImageError(
            f"is {width}x{height} pixels (width x height) where the dataset is {target.width}x{target.height}"
        )


def _converted(image: Image.Image, channels: int) -> Image.Image:
    mode = image.mode
    if mode in ("RGBa", "La"):  # premultiplied alpha converts only to its plain twin
        image = image.convert(mode.upper())
    if channels < 4:
        # Dropped as Pillow would, but it warns of a palette's alpha and remaps a transparent colour first.
        image.info.pop("transparency", None)
    if image.mode not in ("1", "L", "LA", "RGB") and not (image.has_transparency_data and channels == 4):
        image = image.convert("RGB")  # Pillow knows no direct way from CMYK or LAB to gray
    return image if image.mode == _MODES[channels] else image.convert(_MODES[channels])


def _from_16_bits(image: Image.Image, target: Target) -> NDArray[Any]:
    gray = np.asarray(image).astype(np.uint16)[..., None]  # big-endian or 32-bit in Pillow's hands, by format
    if target.dtype == _UINT8:
        # The high byte keeps the whole range; Pillow's convert("L") would clip everything above 255.
        gray = (gray >> 8).astype(np.uint8)
    pixels = np.repeat(gray, target.channels, axis=2)
    if target.channels == 4:
        pixels[..., 3] = np.iinfo(target.dtype).max
    return pixels


def _pixels_of(image: Image.Image) -> NDArray[Any]:
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _upright(pixels: NDArray[Any], orientation: int) -> NDArray[Any]:
    """A view of (H, W, C) pixels with an EXIF orientation (1 to 8) applied."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels


def _place(pixels: NDArray[Any], target: Target, out: NDArray[Any]) -> None:
    """Copy (H, W, C) pixels into `out`, brought to its size as target.fit says."""
    height, width, _ = pixels.shape
    if (height, width) == (target.height, target.width):
        out[...] = pixels
    elif target.fit is None:
        _check_match(height, width, target)
    elif target.fit == "stretch":
        out[...] = _resized(pixels, target.height, target.width, (0, 0, width, height))
    elif target.fit == "crop":
        # The largest centred part with the target's aspect, cut and resized in one exact operation.
        part_height = min(height, width * target.height / target.width)
        part_width = min(width, height * target.width / target.height)
        left, top = (width - part_width) / 2, (height - part_height) / 2
        box = (left, top, min(width, left + part_width), min(height, top + part_height))
        out[...] = _resized(pixels, target.height, target.width, box)
    else:
        scale = min(target.height / height, target.width / width)
        inner_height = min(target.height, max(1, round(height * scale)))
        inner_width = min(target.width, max(1, round(width * scale)))
        top, left = (target.height - inner_height) // 2, (target.width - inner_width) // 2
        out[...] = 0
        inner = out[top : top + inner_height, left : left + inner_width]
        inner[...] = _resized(pixels, inner_height, inner_width, (0, 0, width, height))


def _resized(pixels: NDArray[Any], height: int, width: int, box: tuple[float, float, float, float]) -> NDArray[Any]:
    """The part `box` (left, top, right, bottom) of (H, W, C) pixels, resized antialiased bilinear."""
    bilinear = Image.Resampling.BILINEAR
    if pixels.dtype == _UINT8:
        flat = np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
        return _pixels_of(Image.fromarray(flat).resize((width, height), bilinear, box))
    # Pillow resamples 16-bit pixels only to the nearest one; float32 holds them exactly and is rounded once.
    planes = [Image.fromarray(np.ascontiguousarray(plane)) for plane in np.moveaxis(pixels.astype(np.float32), 2, 0)]
    resized = np.stack([np.asarray(plane.resize((width, height), bilinear, box)) for plane in planes], axis=2)
    rounded: NDArray[Any] = np.rint(resized).astype(pixels.dtype)
    return rounded
