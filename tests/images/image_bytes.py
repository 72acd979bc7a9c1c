"""Image files made in memory, for the tests of `fastload.images`."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image


def encode(image: Image.Image, suffix: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, suffix, **options)
    return buffer.getvalue()


def exif_bytes(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def photo(height: int, width: int, channels: int = 3) -> Image.Image:
    """Smooth spots of colour, which JPEG keeps well."""
    rng = np.random.default_rng(height * 1000 + width)
    coarse = rng.integers(0, 256, (height // 6 + 2, width // 6 + 2, channels), np.uint8).squeeze()
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def png_chunk(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def png(
    width: int,
    height: int,
    depth: int,
    colour: int,
    rows: bytes,
    *chunks: bytes,
    tail: bytes = b"",
    interlaced: bool = False,
) -> bytes:
    """A PNG of these filtered rows, with other chunks before and behind the pixels."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced))
    pixels = png_chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + pixels + tail + png_chunk(b"IEND", b"")
