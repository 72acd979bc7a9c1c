"""Reads and cuts JPEG files without decoding them (ITU-T T.81): size, components, orientation; some rows alone.

Before the first scan a JPEG is a sequence of segments (annex B). `scan_jpeg` returns None for any file that is not
plain, so that its results are always right.

A baseline JPEG of one scan is a sequence of rows of MCUs (minimum coded units, 8 or 16 pixels high). It may end behind
any of them: a smaller height in the header makes the decoder stop there. It can begin only where the decoder can start
anew: behind a restart marker at the end of a row of MCUs. Files that fastload encodes have one at the end of each row.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError

MAX_SCANS = 500
"""Scans of a JPEG that is decoded; encoders write up to some dozens. Each is a pass over the whole image, and takes a
few bytes: 187 KB with 3,010 of them took minutes. libjpeg-turbo's own fuzzers stop there (native.c has it, too)."""

_SEGMENT = struct.Struct(">BBH")  # 0xFF, marker, length of the segment counted from itself
_FRAME = struct.Struct(">BHHB")  # sample precision, lines, samples per line, components
_ORIENTATION = 0x0112

_COLORSPACES = {1: "GRAY", 3: "RGB", 4: "RGBA"}

# Markers of segments.
_BASELINE = frozenset({0xC0, 0xC1})  # baseline and extended: Huffman coded, each pixel's bits in one place
_PROGRESSIVE = 0xC2
_RESTARTS = 0xDD  # gives the number of MCUs between restart markers
_PLAIN = frozenset({0xC4, 0xDB, 0xFE, *range(0xE0, 0xF0)})  # tables, comments, application segments
_SCAN = 0xDA  # entropy-coded data begins behind it

# Of JPEGs that libjpeg scales: baseline, extended and progressive, Huffman or arithmetic coded. It does not scale
# lossless ones, and releases before 3.1.4 then wrote past memory of the smaller size.
_SCALED = frozenset({0xC0, 0xC1, 0xC2, 0xC9, 0xCA})
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xCC}  # begin a frame; the others here are tables
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})  # have no segment
_MARKER = re.compile(rb"\xff+([^\x00\xff])")

_KINDS = 8  # restart markers count from RST0 to RST7 and begin again
_TAIL = 32  # the last bytes of a file, which usually hold its end marker
_END = b"\xff\xd9"
_SPLIT_AT = re.compile(rb"\xff[\xd0-\xd7]")


class JpegHead(NamedTuple):
    """The segments before the first scan of a plain 8-bit Huffman-coded JPEG."""

    height: int  # rows of pixels, before the orientation is applied
    width: int
    components: int  # 1 gray, 3 YCbCr or RGB, 4 CMYK or YCCK
    orientation: int  # EXIF orientation, 1 to 8
    several_frames: bool  # whether there is a multi-picture (MPF) segment
    scan: _Scan | None  # the scan of a baseline JPEG of one scan; None: rows cannot be cut out of this file
    plain_colours: bool = True  # whether it is gray or YCbCr, and nothing in it says otherwise


class _Scan(NamedTuple):
    """Layout of the entropy-coded data of a baseline JPEG of one scan."""

    height_at: int  # byte at which the height is written, two bytes
    mcu_height: int
    mcu_width: int
    subsampled_rows: bool  # chroma has fewer rows than luma, so that upsampling a row needs its neighbours
    interval: int  # MCUs from a restart marker to the next; 0: there are none
    begins: int  # first byte of the entropy-coded data


class JpegRows(NamedTuple):
    """A JPEG file of full width that decodes to rows [top, stop) of an image, both between rows of MCUs."""

    data: bytearray
    top: int
    stop: int
    ends_early: bool  # whether it holds more data than its height needs, which libjpeg warns of as extraneous


_latest: tuple[bytes, JpegHead | None] = b"", None
"""The head that was scanned last, and the bytes that it is of."""


def scan_jpeg(data: bytes | memoryview) -> JpegHead | None:
    """Returns the head of a plain JPEG file, from its first bytes up to the first scan, without releasing the GIL.

    Files of a dataset often begin with the same bytes, which are scanned once: 0.3 us instead of 10.

    Returns:
        None if the bytes end before the scan begins, are no JPEG, or hold anything unusual (junk between markers,
        arithmetic coding, 12 bits, odd EXIF): such files are left to Pillow.
    """
    global _latest
    begin, head = _latest
    if head is not None and data[: len(begin)] == begin:
        return head
    if data[:2] != b"\xff\xd8":
        return None
    marker, stop = 0, 2
    frame_at = interval = orientation = 0
    several_frames = has_xmp_orientation = has_exif = progressive = untransformed = False
    try:
        while marker != _SCAN:
            prefix, marker, length = _SEGMENT.unpack_from(data, stop)
            if prefix != 0xFF or length < 2:
                return None
            start, stop = stop + 4, stop + 2 + length
            if marker in _BASELINE or marker == _PROGRESSIVE:
                if frame_at or length != 8 + 3 * data[start + 5]:
                    return None
                frame_at, progressive = start, marker == _PROGRESSIVE
            elif marker == _RESTARTS:
                interval = int.from_bytes(data[start : start + 2], "big")
            elif marker not in _PLAIN and marker != _SCAN:
                return None
            elif marker == 0xE1:
                segment = bytes(data[start:stop])
                if segment.startswith(b"Exif\0\0"):
                    if has_exif:
                        return None
                    has_exif, orientation = True, _exif_orientation(segment[6:])
                elif b"tiff:Orientation" in segment:
                    has_xmp_orientation = True
            elif marker == 0xE2 and data[start : start + 4] == b"MPF\0":
                several_frames = True
            elif marker == 0xEE and data[start : start + 5] == b"Adobe":
                untransformed = data[start + 11] != 1
        precision, height, width, components = _FRAME.unpack_from(data, frame_at)
        if not frame_at or precision != 8 or components not in (1, 3, 4) or (has_xmp_orientation and not orientation):
            return None
        factors = data[frame_at + 7 : frame_at + 6 + 3 * components : 3]
        names = bytes(data[frame_at + 6 : frame_at + 6 + 3 * components : 3])
    except (struct.error, ValueError, IndexError):
        return None
    across, down = [factor >> 4 for factor in factors], [factor & 15 for factor in factors]
    scan = None
    # `start` is at the scan's number of components.
    if not progressive and data[start : start + 1] == bytes([components]) and height and width and min(across + down):
        if components == 1:  # a scan of one component has MCUs of one block, whatever its factors say
            across, down = [1], [1]
        scan = _Scan(frame_at + 1, 8 * max(down), 8 * max(across), min(down) < max(down), interval, stop)
    plain_colours = components == 1 or (components == 3 and not untransformed and names != b"RGB")
    head = JpegHead(height, width, components, orientation or 1, several_frames, scan, plain_colours)
    if stop <= len(data):
        _latest = bytes(data[:stop]), head
    return head


def _markers(data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Yields each marker that has a segment, and the byte behind it, as libjpeg finds them: up to the image's end."""
    stop = 2 if data[:2] == b"\xff\xd8" else len(data)
    while found := _MARKER.search(data, stop):
        marker, stop = found[1][0], found.end()
        if marker in _ALONE:
            continue
        length = int.from_bytes(data[stop : stop + 2], "big")
        if marker in (0xD8, 0xD9) or length < 2:
            return
        yield marker, stop
        stop += length


def is_scaled(data: bytes | memoryview) -> bool:
    """Whether libjpeg may be asked to decode a JPEG smaller, by its first frame: an 8-bit one of a process with a DCT.

    Of any other it writes more than it was asked for, or refuses it.
    """
    first = next(((marker, at) for marker, at in _markers(data) if marker in _FRAMES or marker == _SCAN), (0, 0))
    return first[0] in _SCALED and data[first[1] + 2 : first[1] + 3] == b"\x08"


def check_scans(data: bytes | memoryview) -> None:
    """Raises ImageError for a JPEG of more than MAX_SCANS scans; not needed where `JpegHead.scan` is known."""
    levels = np.frombuffer(data, np.uint8)
    behind = np.flatnonzero(levels[:-1] == 0xFF) + 1  # a tenth of the time of bytes.count
    if np.count_nonzero(levels[behind] == _SCAN) <= MAX_SCANS:
        return
    # Now without what follows the image, or is in other segments.
    scans = sum(marker == _SCAN for marker, _ in _markers(data))
    if scans > MAX_SCANS:
        raise ImageError(
            f"has {scans:,} scans, more than the {MAX_SCANS} accepted: each is a pass over the whole image, so that "
            f"decoding it takes minutes. Made to do that? Else write it anew with fewer: `jpegtran -copy all IN > OUT`"
        )


def has_end(data: bytes | memoryview) -> bool:
    """Whether the end marker is among the last bytes of a JPEG file; one without it may be cut short."""
    return _END in bytes(data[-_TAIL:])


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


def cut_rows(data: bytes | memoryview, head: JpegHead, height: int, width: int, top: int, stop: int) -> JpegRows | None:
    """Returns the smallest JPEG that decodes to rows [top, stop), with the same pixels as the whole file.

    Args:
        data: a whole JPEG file.
        head: `scan_jpeg(data)`.
        height, width: size of its image, not turned upright; a file that says otherwise is not cut.
        top: first row wanted.
        stop: row behind the last one wanted.

    Returns:
        None if the whole file has to be decoded: it is progressive, of several scans or odd, or too little would be
        saved.
    """
    scan = head.scan
    if scan is None or (head.height, head.width) != (height, width):
        return None
    num_rows = -(-height // scan.mcu_height)
    # libjpeg's smooth upsampling of chroma looks at the row above and the one below.
    first = (max(0, top - 1) if scan.subsampled_rows else top) // scan.mcu_height
    last = min(num_rows, -(-(stop + 1 if scan.subsampled_rows else stop) // scan.mcu_height))
    # Rows of MCUs from one that begins behind a restart marker to the next; 0: there are no markers.
    per_row = -(-width // scan.mcu_width)
    step = math.lcm(scan.interval, per_row) // per_row if scan.interval else 0
    first, last = (first // step * step, min(num_rows, -(-last // step) * step)) if step else (0, last)
    if 8 * (last - first) > 7 * num_rows:
        return None
    # With restart markers the data is cut at the end, too: libjpeg would warn of the markers behind it.
    cut = _between_markers(data, scan, per_row, first, last, num_rows) if step else bytearray(data)
    if cut is None:
        return None
    rows_top, rows_stop = first * scan.mcu_height, min(height, last * scan.mcu_height)
    cut[scan.height_at : scan.height_at + 2] = (rows_stop - rows_top).to_bytes(2, "big")
    return JpegRows(cut, rows_top, rows_stop, ends_early=not step and last < num_rows)


def _between_markers(
    data: bytes | memoryview, scan: _Scan, per_row: int, first: int, last: int, num_rows: int
) -> bytearray | None:
    """Returns header and data of rows of MCUs [first, last), its markers renumbered; None if markers are missing."""
    before, until = first * per_row // scan.interval, last * per_row // scan.interval
    most = -(-num_rows * per_row // scan.interval) - 1
    begin, end = scan.begins, len(data)
    markers = []
    for number, found in enumerate(_SPLIT_AT.finditer(data, scan.begins), start=1):
        if found[0][1] != 0xD0 + (number - 1) % _KINDS:
            return None
        if number == before:
            begin = found.end()
        elif last < num_rows and number == until:
            end = found.start()
            break
        elif number > before:
            markers.append(found.start())
        if number == most:
            break
    missing = (last < num_rows and end == len(data)) or (before and begin == scan.begins)
    # A truncated file has no end marker; entropy-coded data never contains one.
    if missing or not (_END in bytes(data[max(begin, len(data) - _TAIL) :]) or _END in bytes(data[begin:])):
        return None
    cut = bytearray(data[: scan.begins])
    cut += data[begin:end]
    if last < num_rows:
        cut += _END
    if before % _KINDS:
        for number, at in enumerate(markers):
            cut[scan.begins + at - begin + 1] = 0xD0 + number % _KINDS
    return cut


@functools.cache
def has_libjpeg() -> bool:
    """Whether simplejpeg is installed, which calls libjpeg-turbo; without it Pillow decodes every JPEG."""
    return importlib.util.find_spec("simplejpeg") is not None


def libjpeg_warning(data: bytes) -> str:
    """Returns the first thing that libjpeg warns of in a JPEG that it can decode, such as corrupt data; "" for nothing.

    Decodes gray pixels at an eighth of the size: that passes through all of the data, and takes 0.8 of a decode. So of
    JPEGs that are not scaled nothing is known.
    """
    if not has_libjpeg() or not is_scaled(data):
        return ""
    import simplejpeg

    for colours in ("GRAY", "CMYK"):
        for strict in (True, False):
            try:
                simplejpeg.decode_jpeg(data, colours, min_height=1, min_width=1, min_factor=8, strict=strict)
            except (ValueError, RuntimeError) as exc:
                warning = str(exc)
            else:
                return "" if strict else warning
    return ""


def run_libjpeg(
    data: bytes | bytearray | memoryview, shape: tuple[int, ...], *, factor: int = 1, out: NDArray[Any] | None = None
) -> NDArray[np.uint8]:
    """Decodes a gray or colour JPEG with libjpeg-turbo, not turned upright; what it refuses is left to Pillow.

    Args:
        data: a JPEG file of which `scan_jpeg` returns a head: others are not always scaled.
        shape: (H, W, C) of the pixels, shrunk by the factor; C is not 1 if the file has colours.
        factor: 1, 2, 4 or 8.
        out: C-contiguous memory of so many bytes.

    Raises:
        ValueError, RuntimeError: the image has another shape, or libjpeg refuses it or warns of it (strict: of a
            truncated or corrupt stream it only warns).
    """
    if not has_libjpeg():
        raise RuntimeError("simplejpeg is not installed")
    import simplejpeg

    height, width = shape[:2] if factor > 1 else (0, 0)
    pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
        data, _COLORSPACES[shape[2]], min_height=height, min_width=width, min_factor=factor, buffer=out
    )
    if pixels.shape != shape:
        raise ValueError(f"an image of {pixels.shape} where {shape} is expected")
    return pixels
