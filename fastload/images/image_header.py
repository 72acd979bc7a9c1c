"""Reads the header of an image file: size, channels, bits, frames; and opens files with Pillow safely.

Every file of a dataset is probed before packing begins, so ordinary JPEGs are read by a fast scan of their markers. Any
file that the scan does not fully understand is opened by Pillow.
"""

from __future__ import annotations

import ctypes
import io
import re
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import PIL._imaging
from PIL import Image, ImageFile, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from fastload.errors import ImageError
from fastload.images.jpeg import JpegHead, check_scans, scan_jpeg
from fastload.images.sixteen_bit import is_deep_colour, tile_of

KINDS = {8: {1: "L", 3: "RGB", 4: "RGBA"}, 16: {1: "I;16", 3: "RGB;16", 4: "RGBA;16"}}
"""Bits a value -> channels -> the kind of images that need no conversion."""

MAX_PIXELS = 178_956_970
"""Pixels of the largest image accepted unless asked for more: Pillow's default limit against decompression bombs."""

_large_room: ContextVar[int] = ContextVar("large_room", default=0)


@contextmanager
def large_images(room: int) -> Iterator[None]:
    """Within, images above MAX_PIXELS are accepted, whose decoding may take `room` bytes of memory; 0: none is.

    Counts for this thread, and for those that `in_threads` starts within.
    """
    token = _large_room.set(room)
    try:
        yield
    finally:
        _large_room.reset(token)


def large_room() -> int:
    """Returns the bytes of the `large_images` around this call; 0 outside of any."""
    return _large_room.get()


def is_large(height: int, width: int) -> bool:
    """Whether an image has more pixels than are accepted without being asked for."""
    return height * width > MAX_PIXELS


# Formats that are recognized by their first bytes. Pillow's others are left out: some run programs (EPS calls
# Ghostscript), some accept any bytes as an image (TGA). MPO is opened by the JPEG plugin.
_PLUGINS = {
    "JPEG": "JpegImagePlugin",
    "PNG": "PngImagePlugin",
    "WEBP": "WebPImagePlugin",
    "GIF": "GifImagePlugin",
    "BMP": "BmpImagePlugin",
    "TIFF": "TiffImagePlugin",
    "PPM": "PpmImagePlugin",
    "AVIF": "AvifImagePlugin",
    "JPEG2000": "Jpeg2KImagePlugin",
    "QOI": "QoiImagePlugin",
}
_MAGIC = {b"\xff\xd8": "JPEG", b"\x89PNG": "PNG", b"GIF8": "GIF", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF"}
# How files begin that are often called .jpg or .png, and what they are.
_NOT_READ = (
    (rb"(?s).{4}ftyp(hei|hev|mif|msf)", "HEIC by its content, which `pip install pillow-heif` adds"),
    (rb"(?s).{4}ftypavi", "AVIF by its content, which `pip install 'pillow>=11.3'` adds"),
    (rb"(?s).{4}ftyp|\x1aE\xdf\xa3|RIFF.{4}AVI", "a video by its content"),
    (rb"\xff\x0a|\0\0\0\x0cJXL ", "JPEG XL by its content; turn it into PNG with `djxl`"),
    (rb"version https://git-lfs", "a pointer of Git LFS to a file that was not fetched; run `git lfs pull`"),
    (
        rb"(?i)\s*(\xef\xbb\xbf)?<(!doctype html|html)",
        "a web page, as servers send instead of a file; download it again",
    ),
    (rb"(?is)\s*(<\?xml.{0,300}?)?<svg", "a vector drawing (SVG); draw it as PNG"),
    (rb"\s*[{\[]", "JSON, perhaps the error of a download; fetch it again"),
    (rb"%PDF", "a PDF"),
    (rb"(?s).{128}DICM", "DICOM; pydicom reads it"),
    (rb"PK\x03\x04|\x1f\x8b|Rar!|7z\xbc\xaf", "an archive"),
    (rb"\0+\Z", "zeros alone, as a copy that was cut short leaves them; copy it again"),
)
_LARGER = "; `fastload pack --allow-large-images` accepts it, best with `--size` or `--max-size`"
_CHANNELS = {"1": 1, "L": 1, "RGB": 3, "RGBX": 3, "YCbCr": 3, "LAB": 3, "HSV": 3, "CMYK": 3, "P": 3}
_ORIENTATION = 0x0112

_SHORT = 2**10  # bytes of a compressed text that cannot inflate to more than Pillow takes
_TEXTS = (b"iCCP", b"tEXt", b"zTXt", b"iTXt")
_TELLING = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")  # how texts begin that may tell the orientation


class ImageHeader(NamedTuple):
    """The header of one image file."""

    height: int  # rows in pixels, after the EXIF orientation has been applied
    width: int  # columns in pixels, likewise
    channels: int  # 1 gray, 3 colour, 4 when there is any transparency (gray with alpha too). CMYK is 3.
    bits: int  # bits a channel that decoding yields: 16 or 8
    # Pillow's mode of the pixels; with ";16": more than 8 bits, with "+alpha": transparency that the mode lacks.
    kind: str
    frames: int = 1  # frames or pages; only the first is used. Some may be damaged.
    orientation: int = 1  # EXIF orientation, 1 to 8, which has been applied to height and width
    # EXIF orientation, 1 to 8, of a plain gray or colour JPEG (`scan_jpeg`), which can be packed as it is; else 0.
    jpeg: int = 0


def probe_image(read_head: Callable[[int], bytes]) -> ImageHeader:
    """Returns the header of one image file; reads as little of the file as is certain to suffice.

    An ordinary JPEG takes its first 4 KiB and about 5 us. Other files are read whole, because orientation and frames
    may be at their end; pixels are not decoded, except of a PNG whose orientation is in a text chunk or behind the
    pixels.

    Args:
        read_head: returns the first n bytes of the file, fewer only when the file is shorter.
            Its errors are not caught.

    Raises:
        ImageError: not an image, a damaged header, no or too many pixels, or a kind that is not supported.
    """
    size = 4096
    data = read_head(size)
    while (head := scan_jpeg(data)) is None and len(data) >= size:
        # 64 KiB hold an EXIF block with its thumbnail. Then grow fast, but not far beyond the file's size, since
        # read(n) often allocates n bytes first.
        size *= 16
        data = read_head(size)
    if head is not None and not head.several_frames:
        check_size(head.height, head.width)
        height, width = upright_size(head.height, head.width, head.orientation)
        channels, kind = (1, "L") if head.components == 1 else (3, "RGB" if head.components == 3 else "CMYK")
        return ImageHeader(height, width, channels, 8, kind, 1, head.orientation, plain_jpeg(head))
    while len(data) >= size:
        size *= 16
        data = read_head(size)
    with decoding_errors(data), pillow_silenced():
        image = open_image(data)
        kind, channels, bits = kind_of(image, data)
        width, height = image.size
        if isinstance(image, TiffImageFile):
            width, height = image.tag_v2[256], image.tag_v2[257]  # Pillow's size of a TIFF is upright since 11
        # Pillow looks for a PNG's orientation behind the pixels too, and decodes them to get there.
        said = any(kind == b"eXIf" or data.startswith(_TELLING, start + 8) for kind, start, _ in _png_chunks(data))
        orientation = orientation_of(image) if said or image.format != "PNG" else 1
        try:
            frames = int(getattr(image, "n_frames", 1))
        except Exception:  # noqa: BLE001 - a damaged later frame may raise anything; the first is good
            frames = 1
        height, width = upright_size(height, width, orientation)
        return ImageHeader(height, width, channels, bits, kind, frames, orientation, plain_jpeg(head))


def header_of_pixels(shape: tuple[int, ...], dtype: np.dtype[Any]) -> ImageHeader:
    """Returns the header of decoded pixels, (H, W) or (H, W, C) of uint8 or uint16."""
    height, width, channels = (*shape, 1)[:3]
    bits = 8 * dtype.itemsize
    return ImageHeader(height, width, channels, bits, KINDS[bits][channels])


def plain_jpeg(head: JpegHead | None) -> int:
    """Returns `ImageHeader.jpeg` of a JPEG with this head."""
    return head.orientation if head is not None and head.components in (1, 3) else 0


def open_image(data: bytes) -> ImageFile.ImageFile:
    """Opens a file's bytes with Pillow and checks the size, and a JPEG's scans; pixels are not loaded.

    Call within `pillow_silenced`. Raises ImageError or whatever the plugin raises.
    """
    if large_room():
        Image.MAX_IMAGE_PIXELS = None  # `pillow_silenced` restores it
    try:
        image = Image.open(io.BytesIO(data), formats=_formats())
    except ValueError:  # of a PNG whose profile or texts are larger than Pillow inflates
        without = _without_texts(data)
        if without is None:
            raise
        image = Image.open(io.BytesIO(without), formats=_formats())
    check_size(image.height, image.width)
    if image.format in ("JPEG", "MPO"):
        check_scans(data)
    return image


def _without_texts(data: bytes) -> bytes | None:
    """Returns a PNG without its profile and texts, which change no pixel, but for short ones of its orientation.

    None if it is no PNG, or has none of these.
    """
    kept = [data[:8]]
    for kind, start, end in _png_chunks(data):
        tells = data.startswith(_TELLING, start + 8) and end - start <= _SHORT
        if kind not in _TEXTS or tells:
            kept.append(data[start:end])
    without = b"".join(kept)
    return without if 8 < len(without) < len(data) else None


@cache
def _formats() -> tuple[str, ...]:
    for module in _PLUGINS.values():
        with suppress(ImportError):  # Pillow before 11.3 has no AVIF
            import_module(f"PIL.{module}")
    with suppress(ImportError):  # an optional package, which adds HEIF to Pillow
        import_module("pillow_heif").register_heif_opener()
    return tuple(name for name in (*_PLUGINS, "HEIF") if name in Image.OPEN)


def looks_like_image(head: bytes) -> bool:
    """Whether a file that begins with these bytes (16 are enough) may be an image of a format that is decoded."""
    return any((accept := Image.OPEN[name][1]) is not None and accept(head) is True for name in _formats())


def kind_of(image: Image.Image, data: bytes) -> tuple[str, int, int]:
    """Returns kind, channels and bits of an image opened from data, as in `ImageHeader`.

    Raises ImageError for 32-bit or other pixels that 8 or 16 bits cannot represent.
    """
    mode = image.mode
    # "I" usually is 32-bit, but is Pillow's mode of 16-bit PGM, too (before version 11 also of 16-bit PNG).
    if mode.startswith("I;16") or (mode == "I" and image.format in ("PNG", "PPM")):
        alpha = "transparency" in image.info
        return ("I;16+alpha", 4, 16) if alpha else ("I;16", 1, 16)
    alpha = image.has_transparency_data  # also a palette with alpha, and PNG's tRNS
    if mode not in _CHANNELS and not (alpha and mode in ("LA", "La", "PA", "RGBA", "RGBa")):
        what = {"I": "32-bit integer", "F": "32-bit floating-point"}.get(mode, f"Pillow mode {mode!r}")
        raise ImageError(f"{what} pixels are not supported; convert the image to 8 or 16 bits")
    channels = 4 if alpha else _CHANNELS[mode]
    if _stored_bits(image, data) > 8:
        if isinstance(image, TiffImageFile) and image.tag_v2.get(284) == 2:  # planar: Pillow takes bytes for samples
            raise ImageError("a TIFF of 16-bit colours stored plane by plane is not supported; store it interleaved")
        mode += ";16"
    bits = 16 if is_deep_colour(image) else 8
    return (f"{mode}+alpha" if alpha and image.mode in _CHANNELS else mode), channels, bits


def _stored_bits(image: Image.Image, data: bytes) -> int:
    """Returns bits a channel in the file, as far as they can be found: Pillow itself gives 8 for all colour images."""
    if isinstance(image, TiffImageFile):
        bits = image.tag_v2.get(258, (1,))
        return max(bits) if isinstance(bits, tuple) else int(bits)
    if image.format == "JPEG2000":
        size = data.find(b"\xff\x4f\xff\x51")  # ISO/IEC 15444-1, A.5.1: the depth of the first component, less 1
        return (data[size + 42] & 0x7F) + 1 if 0 <= size < len(data) - 42 else 8
    if image.format == "HEIF":
        return int(image.info.get("bit_depth", 8))
    if image.format == "AVIF":
        configuration = data.find(b"av1C")  # AV1 in ISOBMFF, 2.3.3: the flags high_bitdepth and twelve_bit
        flags = data[configuration + 6] if 0 <= configuration < len(data) - 6 else 0
        return 8 if not flags & 0x40 else 12 if flags & 0x20 else 10
    _, _, args = tile_of(image)
    if image.format == "PPM":
        return 16 if isinstance(args[-1], int) and args[-1] > 255 else 8  # the largest value, as the file says
    return 16 if image.format == "PNG" and str(args[0]).endswith(";16B") else 8


def orientation_of(image: Image.Image) -> int:
    """Returns the EXIF (or else XMP) orientation of an image, 1 to 8, as `PIL.ImageOps.exif_transpose` finds it.

    A damaged block counts as 1: the pixels may be fine.
    """
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 - Pillow raises a dozen kinds here, SyntaxError among them
        return 1
    return int(value) if value in range(1, 9) else 1


def upright_size(height: int, width: int, orientation: int) -> tuple[int, int]:
    """Returns (height, width) after the orientation has been applied: 5 to 8 swap them."""
    return (width, height) if orientation >= 5 else (height, width)


def check_size(height: int, width: int) -> None:
    """Raises ImageError for an empty image, and for one that is too large outside of `large_images`."""
    if is_large(height, width) and not large_room():
        raise ImageError(
            f"claims {width}x{height} pixels, more than the {MAX_PIXELS:,} accepted (a decompression bomb?){_LARGER}"
        )
    if height < 1 or width < 1:
        raise ImageError(f"claims {width}x{height} pixels")


@contextmanager
def decoding_errors(data: bytes) -> Iterator[None]:
    """Turns whatever is raised within into an ImageError: given damaged bytes, a decoder may raise anything."""
    try:
        yield
    except ImageError:
        raise
    except Exception as error:
        magic = next((name for begin, name in _MAGIC.items() if data.startswith(begin)), "")
        if isinstance(error, MemoryError):
            reason = f"not enough memory to decode it ({len(data):,} bytes of file)"
        elif isinstance(error, Image.DecompressionBombError):
            reason = f"too large: {str(error).rstrip('.')}{_LARGER}"
        elif not isinstance(error, UnidentifiedImageError):
            reason = f"cannot be decoded: {str(error) or type(error).__name__}"
        elif magic:
            reason = f"cannot be decoded: its {magic} header is damaged or of an unsupported kind"
        else:
            reason = f"not an image: starts with {data[:8]!r}" if data else "not an image (0 bytes)"
            if known := next((what for begin, what in _NOT_READ if re.match(begin, data)), ""):
                reason = f"not an image that is read: {known}"
        raise ImageError(reason) from error


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yields (type, start, end) of every whole chunk of a PNG, in order."""
    start = 8 if data.startswith(b"\x89PNG") else len(data)
    while start + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, start)
        end = start + 12 + length
        if end <= len(data):
            yield kind, start, end
        start = end


def png_without_tail(data: bytes) -> bytes | None:
    """Returns the PNG cut behind its last whole pixel chunk and properly ended; None if it has no such chunk."""
    pixels_end = max((end for kind, _, end in _png_chunks(data) if kind == b"IDAT"), default=0)
    return data[:pixels_end] + b"\0\0\0\0IEND\xaeB`\x82" if pixels_end else None


# libtiff's handlers are null pointers where it says nothing.
_LIBTIFF_HANDLERS = ("TIFFSetWarningHandler", "TIFFSetErrorHandler")


@cache
def _libtiff() -> ctypes.CDLL | None:
    """Returns the libtiff that Pillow decodes with; None where it has none, or keeps it to itself.

    A symbol asked of Pillow's extension is also looked for in the libraries it is linked with (dlsym).
    """
    try:
        library = ctypes.CDLL(PIL._imaging.__file__)
        for name in _LIBTIFF_HANDLERS:
            function = getattr(library, name)
            function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_void_p
    except (OSError, AttributeError, TypeError):  # TypeError: an extension inside the interpreter has no file
        return None
    return library


def _set_libtiff_handlers(handlers: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Exchanges what libtiff calls with warnings and with errors; returns what it called before."""
    library = _libtiff()
    if library is None:
        return handlers
    return tuple(getattr(library, name)(new) for name, new in zip(_LIBTIFF_HANDLERS, handlers, strict=True))


_silence_lock = threading.Lock()
_silence_depth = 0
_silence = warnings.catch_warnings()
_handlers: tuple[int | None, ...] = (None, None)
_pillow_limit: int | None = None


@contextmanager
def pillow_silenced() -> Iterator[None]:
    """Silences Pillow's own warnings (bombs, damaged EXIF, odd tags), not its errors; and all lines of libtiff.

    libtiff writes warnings and errors to file descriptor 2, without the name of the image; its errors reach us through
    Pillow as exceptions.

    Several threads may be inside at once: the filter is installed by the first and removed by the last, since
    `warnings.catch_warnings` restores in the wrong order when threads interleave.
    """
    global _silence, _silence_depth, _handlers, _pillow_limit
    with _silence_lock:
        if _silence_depth == 0:
            _silence = warnings.catch_warnings()
            _silence.__enter__()
            warnings.filterwarnings("ignore", module=r"PIL\.")
            _handlers, _pillow_limit = _set_libtiff_handlers((None, None)), Image.MAX_IMAGE_PIXELS
        _silence_depth += 1
    try:
        yield
    finally:
        with _silence_lock:
            _silence_depth -= 1
            if _silence_depth == 0:
                _set_libtiff_handlers(_handlers)
                Image.MAX_IMAGE_PIXELS = _pillow_limit
                _silence.__exit__(None, None, None)
