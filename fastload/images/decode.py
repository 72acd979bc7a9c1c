"""Decodes one image file into one row of pixels: upright, in the channels and size asked for.

JPEG is decoded by libjpeg-turbo (simplejpeg, if installed) straight into the row; what it refuses, and every other
format, by Pillow.
Both give the pixels of `ImageOps.exif_transpose(Image.open(file)).convert("RGB")`.

| the file holds | becomes |
| --- | --- |
| gray, gray with alpha, 1-bit | 1 channel (1-bit as 0 and 255); replicated for 3 channels |
| 16 bits a channel | uint16, or uint8 by its high byte |
| palette, CMYK, YCCK, LAB | RGB |
| alpha channel, transparent colour | the 4th channel, or dropped; opaque if asked for and absent |
| 16-bit CMYK or premultiplied alpha; more than 8 bits in JPEG 2000 and AVIF | 8 bits, by Pillow |
| colour if 1 channel is asked for | luma as in Pillow's `convert("L")` |
| animation, several pages | the first |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image, features
from PIL.JpegImagePlugin import JpegImageFile

from fastload.errors import ImageError
from fastload.images.fit import (
    Shrunk,
    Target,
    resample_for,
    resample_mask,
    resample_pixels,
    shrinking,
    with_channels,
    with_depth,
)
from fastload.images.image_header import (
    KINDS,
    check_size,
    decoding_errors,
    is_large,
    kind_of,
    large_room,
    open_image,
    orientation_of,
    pillow_silenced,
    png_without_tail,
    upright_size,
)
from fastload.images.jpeg import (
    JpegHead,
    check_scans,
    has_libjpeg,
    is_scaled,
    libjpeg_warning,
    run_libjpeg,
    scan_jpeg,
)
from fastload.images.sixteen_bit import deep_gray, deep_pixels, is_gray_alpha, ppm_pixels, read_low_bytes, tile_of
from fastload.system.text import format_bytes

_MODES = KINDS[8]
_UINT8 = np.dtype(np.uint8)

_BYTES_A_PIXEL = {8: 16, 16: 64}
"""Bits a channel -> bytes of memory a pixel that a large image takes until it is resized: measured were 14 and 32."""


def decode_image(data: bytes, target: Target, out: NDArray[Any]) -> str:
    """Decodes a whole image file into `out`, upright; returns what libjpeg warns of in a JPEG, "" for nothing.

    Safe to call from several threads, with an `out` each; simplejpeg and Pillow release the GIL while they decode.

    Within `large_images`, a JPEG above MAX_PIXELS is decoded at 1/2, 1/4 or 1/8 of its size where the target allows it.

    Args:
        data: the file's bytes.
        out: (target.height, target.width, target.channels) of target.dtype, C-contiguous; undefined after an error.

    Raises:
        ImageError: the image is damaged, truncated, too large, not supported, of another size than a target
            without fit, or 8-bit if 16 are asked for. An error of a library is its cause.
    """
    assert out.shape == (target.height, target.width, target.channels), "one row of the target"
    head = scan_jpeg(data)
    with decoding_errors(data):
        if head is not None and _decode_jpeg(data, head, target, out):
            return ""
        with _loaded(data, target) as loaded:
            is_jpeg = loaded.image.format in ("JPEG", "MPO")
            if loaded.bits == 16:
                pixels = _from_16_bits(data, loaded, target)
            else:
                pixels = _pixels_of(_converted(loaded.image, target.channels))
        turned = upright(pixels, loaded.orientation)
        resample_pixels(turned, target, out, _shrunk(turned, loaded.full, loaded.factor, loaded.orientation))
    # Pillow does not pass on warnings of libjpeg, and decodes many a damaged file without a word.
    return libjpeg_warning(data) if is_jpeg else ""


def decode_mask(
    data: bytes, target: Target, out: NDArray[Any], *, fill: int = 0, image_size: tuple[int, int] | None = None
) -> None:
    """Decodes a mask's file into `out`: the indices in the file, never its colours, upright as its image.

    A palette image gives its indices, 1 bit 0 and 1, gray of fewer than 8 bits the numbers in the file (Pillow would
    spread them over 0 to 255). The size is changed as `resample_mask` does.

    Args:
        data: the file's bytes.
        target: the target of the image.
        out: uint8 or uint16 (target.height, target.width); undefined after an error.
        fill: value of pixels that fit "pad" leaves black in the image.
        image_size: (height, width) of the image, upright, before it is resized; None: not compared.

    Raises:
        ImageError: it cannot be decoded, holds colours or numbers that `out` cannot, is of a lossy format, or of
            another size than its image.
    """
    with _loaded(data) as loaded:
        indices = upright(_indices_of(loaded)[..., None], loaded.orientation)[..., 0]
    height, width = indices.shape
    if image_size is not None and image_size != (height, width):
        raise ImageError(
            f"the mask is {width}x{height} pixels (width x height), its image {image_size[1]}x{image_size[0]}"
        )
    resample_mask(as_index_mask(indices, out.dtype), target, out, fill=fill)


def as_index_mask(numbers: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns the numbers in a mask as uint8 or uint16; ImageError for those that this does not hold."""
    low, high, most = int(numbers.min(initial=0)), int(numbers.max(initial=0)), int(np.iinfo(dtype).max)
    if low < 0 or high > most:
        raise ImageError(f"holds the value {low if low < 0 else high}, where masks of this dataset hold 0 to {most}")
    return numbers.astype(dtype, copy=False)


def read_mask(data: bytes, *, colours: bool = False) -> NDArray[Any]:
    """Returns the numbers in a mask's file, (H, W), upright, or its `colours`, uint8 (H, W, 3).

    Gray stored as RGB counts as numbers.

    Raises:
        ImageError: it cannot be decoded, is of a lossy format, or holds colours where numbers are wanted.
    """
    with _loaded(data) as loaded:
        if not colours and loaded.image.mode not in ("LA", "RGB", "RGBA"):
            return upright(_indices_of(loaded)[..., None], loaded.orientation)[..., 0]
        _refuse_lossy(loaded.image)
        if loaded.bits == 16:
            raise ImageError("a mask of 16 bits a channel holds no colours that a palette could name")
        pixels = upright(_pixels_of(_converted(loaded.image, 3)), loaded.orientation)
    if colours:
        return pixels
    if (pixels != pixels[..., :1]).any():
        raise ImageError(f"a mask holds colours, not the numbers of classes; {_BY_PALETTE}")
    return pixels[..., 0]


def decode_unturned(data: bytes, channels: int) -> NDArray[np.uint8]:
    """Returns Pillow's 8-bit pixels of an image file, (H, W, channels), not turned. Raises ImageError without them."""
    with _loaded(data) as loaded:
        if loaded.bits == 16:
            raise ImageError("has 16 bits a channel where the dataset has 8")
        return np.asarray(_pixels_of(_converted(loaded.image, channels)), np.uint8)


def decoder_versions() -> str:
    """Returns names and versions of the decoders, for the file's attribute `decoder`: equal strings, equal pixels."""
    turbo = features.version("libjpeg_turbo") if features.check("libjpeg_turbo") else None
    pillow = f"Pillow {PIL.__version__}" + (f" (libjpeg-turbo {turbo})" if turbo else "")
    return f"simplejpeg {version('simplejpeg')}; {pillow}" if has_libjpeg() else pillow


def _decode_jpeg(data: bytes, head: JpegHead, target: Target, out: NDArray[Any]) -> bool:
    """Decodes with simplejpeg; returns False if Pillow has to do it."""
    height, width, components = head[:3]
    if components == 4:
        return False
    check_size(height, width)
    if head.scan is None:
        check_scans(data)
    luma = components > target.channels
    direct = head.orientation == 1 and not luma and (height, width, out.dtype) == (*out.shape[:2], _UINT8)
    if not direct and target.fit is None:
        resample_for(*upright_size(height, width, head.orientation), target)
    factor = _shrinking(height, width, head.orientation, target)
    shape = (-(-height // factor), -(-width // factor), 3 if luma else target.channels)
    _check_room((height, width), shape[:2], target.channels if direct else _BYTES_A_PIXEL[8])
    try:
        pixels = run_libjpeg(data, shape, factor=factor, out=out if direct else None)
    except (ValueError, RuntimeError):
        return False
    if not direct:
        if luma:
            pixels = _pixels_of(Image.fromarray(pixels).convert("L"))
        turned = upright(pixels, head.orientation)
        resample_pixels(turned, target, out, _shrunk(turned, (height, width), factor, head.orientation))
    return True


def _shrinking(height: int, width: int, orientation: int, target: Target) -> int:
    """Returns by how much a JPEG of this size, not turned upright, is decoded smaller: only a large one is."""
    return shrinking(*upright_size(height, width, orientation), target) if is_large(height, width) else 1


def _shrunk(turned: NDArray[Any], size: tuple[int, int], factor: int, orientation: int) -> Shrunk | None:
    """Returns where the image of this size, not turned upright, lies in upright pixels that a decoder made smaller."""
    if factor == 1:
        return None
    height, width = upright_size(*size, orientation)
    # The last row and column may be incomplete; turning may have made them the first.
    top = turned.shape[0] - height / factor if orientation in (3, 4, 7, 8) else 0.0
    left = turned.shape[1] - width / factor if orientation in (2, 3, 6, 7) else 0.0
    return Shrunk(height, width, factor, top, left)


def _check_room(size: tuple[int, int], decoded: tuple[int, ...], bytes_a_pixel: int) -> None:
    """Raises ImageError where so many pixels of a large image of this size take more memory than there is."""
    needed, room = decoded[0] * decoded[1] * bytes_a_pixel, large_room()
    if is_large(*size) and needed > room:
        raise ImageError(
            f"takes about {format_bytes(needed)} of memory to decode its {size[1]}x{size[0]} pixels (width x height), "
            f"which `--allow-large-images` lets in, and each worker may use {format_bytes(room)}: choose fewer "
            f"`--workers`, a JPEG also a smaller `--size` or `--max-size`"
        )


class _Loaded(NamedTuple):
    """Pillow's image of a file, its pixels decoded, with the orientation that is still to be applied."""

    image: Image.Image
    bits: int
    orientation: int
    largest: int  # as `_largest_value`
    full: tuple[int, int]  # height and width of the image, not turned upright
    factor: int = 1  # by how much a large JPEG was decoded smaller


@contextmanager
def _loaded(data: bytes, target: Target | None = None) -> Iterator[_Loaded]:
    """Opens a file with Pillow; within, Pillow's warnings are off, and whatever is raised becomes an ImageError.

    With a target, a large JPEG is decoded smaller where that allows it.
    """
    size = ""
    with decoding_errors(data), pillow_silenced():
        try:
            image: Image.Image = open_image(data)
            size = f" of {image.width}x{image.height} pixels"
            _, _, bits = kind_of(image, data)
            largest, full, factor = _largest_value(image), (image.height, image.width), 1
            if target is not None and is_large(*full) and isinstance(image, JpegImageFile) and is_scaled(data):
                wanted = _shrinking(*full, orientation_of(image), target)
                if wanted > 1 and image.draft(image.mode, (full[1] // wanted, full[0] // wanted)) is not None:
                    factor = wanted
            _check_room(full, (image.height, image.width), _BYTES_A_PIXEL[bits])
            image = _load(data, image)
            # After load: that turns a TIFF upright, and finds the EXIF block at a PNG's end.
            yield _Loaded(image, bits, orientation_of(image), largest, full, factor)
        except MemoryError as error:
            raise ImageError(f"not enough memory for its {len(data):,} bytes{size}") from error


def _load(data: bytes, image: Image.Image | None = None, *, low_bytes: bool = False) -> Image.Image:
    """Returns the image with its pixels decoded, opened if not given; with low_bytes, the low bytes of 16-bit ones."""
    image = image or open_image(data)
    if low_bytes:
        read_low_bytes(image)
    try:
        image.load()
    except Exception:
        pixels_only = png_without_tail(data) if image.format == "PNG" else None
        if pixels_only is None:
            raise
        # Pillow reads a PNG to its end, and does not say whether the pixels are damaged or what follows them.
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
        # Pillow would drop it, too, but warns of a palette's alpha and first remaps a transparent colour.
        image.info.pop("transparency", None)
    if image.mode not in ("1", "L", "LA", "RGB") and not (image.has_transparency_data and channels == 4):
        image = image.convert("RGB")  # Pillow cannot convert CMYK or LAB to gray directly
    return image if image.mode == _MODES[channels] else image.convert(_MODES[channels])


def _from_16_bits(data: bytes, loaded: _Loaded, target: Target) -> NDArray[Any]:
    """Returns pixels (H, W, target.channels) of target.dtype of a loaded image of 16 bits a channel."""
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
_BY_PALETTE = "`--palette FILE` says which class each colour is"


def _refuse_lossy(image: Image.Image) -> None:
    """Raises ImageError for a file whose format blends neighbouring pixels."""
    if image.format in _LOSSY or image.info.get("compression") in ("jpeg", "tiff_jpeg", "webp"):
        raise ImageError(
            f"a mask in {image.format}, which blends neighbouring classes, is refused. Store the index of each pixel's "
            f"class as gray (of 8 or 16 bits) or palette PNG"
        )


def _indices_of(loaded: _Loaded) -> NDArray[Any]:
    """Returns the numbers in the file, uint8, uint16 or int (H, W)."""
    image, top = loaded.image, loaded.largest
    _refuse_lossy(image)
    if image.mode not in ("1", "L", "P", "I") and not image.mode.startswith("I;16"):
        raise ImageError(
            f"a mask holds colours (Pillow mode {image.mode!r}), not the numbers of classes; {_BY_PALETTE}, and "
            f"`--mask-values 0,255` what gray ones are"
        )
    values = np.asarray(image)
    if top:
        full = 255 if values.dtype == np.uint8 else 65535
        values = (values.astype(np.int64) * top + full // 2) // full
    return values.astype(np.uint8) if values.dtype == np.bool_ else values


def _largest_value(image: Image.Image) -> int:
    """Returns the largest number of a gray file whose values Pillow spreads over all bits; 0 for other files."""
    codec, _, args = tile_of(image)
    if codec.startswith("ppm") and len(args) > 1:
        return int(args[1])
    return {"L;2": 3, "L;4": 15}.get(str(args[0])[:3], 0)


def _pixels_of(image: Image.Image) -> NDArray[Any]:
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def upright(pixels: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Returns a view of (H, W, C) pixels with an EXIF orientation (1 to 8) applied."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels
