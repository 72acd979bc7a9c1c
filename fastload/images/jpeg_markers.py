"""Scans a JPEG's markers (ITU-T T.81, annex B) for size, components and orientation, without decoding.

`scan_jpeg` returns None for any file that is not plain, so that its results are always right.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_SEGMENT = struct.Struct(">BBH")  # 0xFF, marker, length of the segment counted from itself
_FRAME = struct.Struct(">BHHB")  # sample precision, lines, samples per line, components
_ORIENTATION = 0x0112

FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of frames of any kind, supported or not."""
BASELINE = frozenset({0xC0, 0xC1})
"""Baseline and extended: Huffman coded, each pixel's bits in one place."""
_HUFFMAN = BASELINE | {0xC2}  # progressive
RESTARTS = 0xDD
"""Marker of the segment that gives the number of MCUs between restart markers."""
PLAIN = frozenset({0xC4, 0xDB, RESTARTS, 0xFE, *range(0xE0, 0xF0)})
"""Markers of tables, comments and application segments."""
SCAN = 0xDA
"""Marker of the segment behind which entropy-coded data begins."""


class JpegFrame(NamedTuple):
    """The header of a plain 8-bit Huffman-coded JPEG."""

    height: int
    """Rows of pixels, before the orientation is applied."""
    width: int
    components: int
    """1 gray, 3 YCbCr or RGB, 4 CMYK or YCCK."""
    orientation: int
    """EXIF orientation, 1 to 8."""
    several_frames: bool
    """Whether there is a multi-picture (MPF) segment."""


def segments(data: bytes | memoryview) -> Iterator[tuple[int, int, int]]:
    """Yields marker, position and length of each segment of a JPEG, up to and including the first scan's.

    The length counts from position + 2, behind the marker, and includes the two bytes that hold it.

    Raises:
        ValueError: the bytes end before a scan begins, are no JPEG, or there is junk between segments.
    """
    if data[:2] != b"\xff\xd8":
        raise ValueError("no JPEG")
    position, marker = 2, 0
    try:
        while marker != SCAN:
            prefix, marker, length = _SEGMENT.unpack_from(data, position)
            if prefix != 0xFF or length < 2:
                raise ValueError("no segment")
            yield marker, position, length
            position += 2 + length
    except struct.error as error:
        raise ValueError("cut short") from error


def scan_jpeg(data: bytes) -> JpegFrame | None:
    """Returns the frame of a plain JPEG file, from its first bytes up to the first scan.

    Returns:
        None if the bytes end before the scan begins, are no JPEG, or hold anything unusual (junk between markers,
        arithmetic coding, 12 bits, odd EXIF): such files are left to Pillow.
    """
    frame: tuple[int, int, int, int] | None = None
    orientation = 0
    several_frames = has_xmp_orientation = has_exif = False
    try:
        for marker, position, length in segments(data):
            if marker in _HUFFMAN:
                if frame is not None:
                    return None
                frame = _FRAME.unpack_from(data, position + 4)
                if length != 8 + 3 * frame[3]:
                    return None
            elif marker not in PLAIN and marker != SCAN:
                return None
            elif marker == 0xE1:
                segment = data[position + 4 : position + 2 + length]
                if segment.startswith(b"Exif\0\0"):
                    if has_exif:
                        return None
                    has_exif = True
                    orientation = _exif_orientation(segment[6:])
                elif b"tiff:Orientation" in segment:
                    has_xmp_orientation = True
            elif marker == 0xE2 and data.startswith(b"MPF\0", position + 4):
                several_frames = True
        if frame is None or (has_xmp_orientation and orientation == 0):
            return None
    except (struct.error, ValueError):
        return None
    precision, height, width, components = frame
    if precision != 8 or components not in (1, 3, 4):
        return None
    return JpegFrame(height, width, components, orientation or 1, several_frames)


def _exif_orientation(tiff: bytes) -> int:
    """Returns the orientation in the first directory of an EXIF block (a TIFF header and its directory), 0 if absent.

    Raises ValueError or struct.error when the block is not laid out plainly.
    """
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        raise ValueError("no TIFF header")
    (start,) = struct.unpack_from(f"{order}I", tiff, 4)
    (count,) = struct.unpack_from(f"{order}H", tiff, start)
    entries = tiff[start + 2 : start + 2 + 12 * count]
    if len(entries) != 12 * count:
        raise ValueError("directory cut short")
    orientation = 0
    for tag, kind, number, value in struct.iter_unpack(f"{order}HHIH2x", entries):
        if tag == _ORIENTATION:
            if kind != 3 or number != 1:
                raise ValueError("orientation is not one SHORT")
            orientation = value if 1 <= value <= 8 else 1
    return orientation
