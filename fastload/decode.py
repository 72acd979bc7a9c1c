"""One image file's bytes become one row of pixels: decoded, upright, in the channels and size asked for.

JPEG is decoded by libjpeg-turbo (simplejpeg) straight into the row; what it will not take, and every other
format, by Pillow. Both give the pixels of `ImageOps.exif_transpose(Image.open(file)).convert("RGB")`.

| stored as | becomes |
| --- | --- |
| gray, gray with alpha, 1-bit | 1 channel (1-bit as 0 and 255); replicated for 3 channels |
| 16 bits a channel | uint16, or uint8 by its high byte |
| palette, CMYK, YCCK, LAB | RGB |
| alpha channel, transparent colour | the 4th channel, or dropped; absent where asked for: opaque |
| 16-bit CMYK or premultiplied alpha; more than 8 bits in JPEG 2000 and AVIF | 8 bits, by Pillow |
| colour where 1 channel is asked for | luma as in Pillow's `convert("L")` |
| animation, several pages | the first |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import PIL
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageFile, features

from fastload.errors import ImageError
from fastload.fitting import (
    TOO_FEW_BITS,
    Fit,
    Target,
    moved_places,
    place_mask,
    place_pixels,
    placement,
    with_channels,
    with_depth,
)
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
from fastload.sixteen_bits import deep_gray, deep_pixels, is_gray_alpha, ppm_pixels, read_low_bytes

__all__ = [
    "Fit",
    "ImageHeader",
    "Target",
    "decode_image",
    "decode_mask",
    "decode_unturned",
    "decoder_versions",
    "moved_places",
    "place_mask",
    "place_pixels",
    "probe_image",
    "upright",
]

_COLORSPACES = {1: "GRAY", 3: "RGB", 4: "RGBA"}
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_UINT8 = np.dtype(np.uint8)


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
            place_pixels(upright(pixels, orientation), target, out)
    except ImageError:
        raise
    except Exception as error:  # a decoder fed with damaged bytes may raise anything
        raise ImageError(failure_reason(error, data)) from error


def decode_mask(
    data: bytes,
    target: Target,
    out: NDArray[np.uint8],
    *,
    fill: int = 0,
    image_size: tuple[int, int] | None = None,
) -> None:
    """Decode a mask's file into `out`: its indices as they are stored, never its colours, upright as its image.

    A palette gives the index, 1 bit 0 and 1, gray of fewer than 8 bits the number stored (Pillow would spread them
    over 0 to 255). It is brought to size as `place_mask` does.

    Args:
        data: the file's bytes.
        target: what the image becomes.
        out: uint8 (target.height, target.width), filled in place; it holds anything after an error.
        fill: the value where "pad" leaves the image black.
        image_size: (height, width) of the image, upright, before it is resized; None: not compared.

    Raises:
        ImageError: it cannot be decoded, holds colours or numbers above 255, is of a lossy format, or of another size
            than its image.
    """
    try:
        with _loaded(data) as loaded:
            indices = upright(_indices_of(loaded)[..., None], loaded.orientation)[..., 0]
    except ImageError:
        raise
    except Exception as error:  # a decoder fed with damaged bytes may raise anything
        raise ImageError(failure_reason(error, data)) from error
    height, width = indices.shape
    if image_size is not None and image_size != (height, width):
        raise ImageError(
            f"the mask is {width}x{height} pixels (width x height), its image {image_size[1]}x{image_size[0]}"
        )
    place_mask(indices, target, out, fill=fill)


def decode_unturned(data: bytes, channels: int) -> NDArray[np.uint8]:
    """Pillow's 8-bit pixels of an image file as they are stored, (H, W, channels), whatever orientation it tells.

    Raises:
        ImageError: it cannot be decoded, or has more bits.
    """
    try:
        with _loaded(data) as loaded:
            if loaded.bits == 16:
                raise ImageError("has 16 bits a channel where the dataset has 8")
            return np.asarray(_pixels_of(_converted(loaded.image, channels)), np.uint8)
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
        placement(*upright_size(height, width, orientation), target)
    if target.dtype != _UINT8:
        raise ImageError(TOO_FEW_BITS)
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
        place_pixels(upright(pixels, orientation), target, out)
    return True


def _decode_pillow(data: bytes, target: Target) -> tuple[NDArray[Any], int]:
    """(H, W, target.channels) pixels of target.dtype as stored, and the orientation still to be applied."""
    with _loaded(data) as loaded:
        image, bits, orientation, _ = loaded
        if target.fit is None:
            placement(*upright_size(image.height, image.width, orientation), target)
        if bits == 16:
            return _from_16_bits(data, loaded, target), orientation
        if target.dtype != _UINT8:
            raise ImageError(TOO_FEW_BITS)
        return _pixels_of(_converted(image, target.channels)), orientation


class _Loaded(NamedTuple):
    image: Image.Image
    """Its pixels decoded."""
    bits: int
    orientation: int
    """Still to be applied."""
    largest: int
    """As `_largest_stored`."""


@contextmanager
def _loaded(data: bytes) -> Iterator[_Loaded]:
    """Pillow's image of a file; Pillow is silent within, and what memory does not suffice for is an ImageError."""
    size = ""
    try:
        with pillow_silenced():
            image: Image.Image = open_image(data)
            size = f" of {image.width}x{image.height} pixels"
            _, _, bits = kind_of(image, data)
            largest = _largest_stored(image)
            image = _load(data, image)
            # After load, which turns a TIFF upright by itself and finds the EXIF that a PNG keeps at its end.
            yield _Loaded(image, bits, orientation_of(image), largest)
    except MemoryError as error:
        raise ImageError(f"not enough memory for its {len(data):,} bytes{size}") from error


def _load(data: bytes, image: Image.Image | None = None, *, low_bytes: bool = False) -> Image.Image:
    """The image, opened if it is not given, with its pixels decoded: the low bytes of 16-bit ones if asked for."""
    image = image or open_image(data)
    if low_bytes:
        read_low_bytes(image)
    try:
        image.load()
    except Exception:
        pixels_only = png_without_tail(data) if image.format == "PNG" else None
        if pixels_only is None:
            raise
        # Pillow reads a PNG to its end and does not say whether that or the pixels are damaged.
        image = open_image(pixels_only)
        if low_bytes:
            read_low_bytes(image)
        image.load()
    return image


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


def _from_16_bits(data: bytes, loaded: _Loaded, target: Target) -> NDArray[Any]:
    """(H, W, target.channels) of target.dtype of a loaded image of 16 bits a channel."""
    if loaded.image.mode not in _MODES.values():
        pixels = deep_gray(loaded.image)
    else:
        again = open_image(data)
        in_ppm, gray_alpha = ppm_pixels(again, data), is_gray_alpha(again)
        if in_ppm is not None:
            pixels = in_ppm
        elif target.dtype == _UINT8 and "transparency" not in loaded.image.info:
            pixels = deep_pixels(loaded.image, None, gray_alpha=gray_alpha)
        else:
            low = _load(data, low_bytes=True)
            pixels = deep_pixels(loaded.image, low, gray_alpha=gray_alpha)
    return with_channels(with_depth(pixels, target.dtype), target.channels)


_LOSSY = {"JPEG", "MPO", "JPEG2000", "WEBP", "AVIF"}
_MEND = "Store the index of each pixel's class as 8-bit gray or palette PNG"


def _indices_of(loaded: _Loaded) -> NDArray[np.uint8]:
    """uint8 (H, W), the numbers stored in the file."""
    image, top = loaded.image, loaded.largest
    if image.format in _LOSSY or image.info.get("compression") in ("jpeg", "tiff_jpeg", "webp"):
        raise ImageError(f"a mask in {image.format}, which blends neighbouring classes, is refused. {_MEND}")
    if image.mode not in ("1", "L", "P", "I") and not image.mode.startswith("I;16"):
        raise ImageError(f"a mask of Pillow mode {image.mode!r} holds colours, not the index of a class. {_MEND}")
    stored = np.asarray(image)
    if top:
        full = 255 if stored.dtype == np.uint8 else 65535
        stored = (stored.astype(np.int64) * top + full // 2) // full
    if stored.max(initial=0) > 255:
        raise ImageError(f"a mask of 16 bits with values up to {stored.max()}, more than the 256 of a mask. {_MEND}")
    return stored.astype(np.uint8)


def _largest_stored(image: Image.Image) -> int:
    """The largest number that an opened gray file can hold where Pillow spreads 0 to it over all bits; else 0."""
    if not isinstance(image, ImageFile.ImageFile) or not image.tile:
        return 0
    tile: Any = image.tile[0]  # a plain tuple before Pillow 11
    layout = tile[3] if isinstance(tile[3], tuple) else (tile[3],)
    if tile[0].startswith("ppm") and len(layout) > 1:
        return int(layout[1])
    return {"L;2": 3, "L;4": 15}.get(str(layout[0])[:3], 0)


def _pixels_of(image: Image.Image) -> NDArray[Any]:
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def upright(pixels: NDArray[Any], orientation: int) -> NDArray[Any]:
    """A view of (H, W, C) pixels with an EXIF orientation (1 to 8) applied."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels
