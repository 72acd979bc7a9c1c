"""Some rows of a JPEG decoded alone: what of its bytes that takes (ITU-T T.81), where the file permits it.

A baseline JPEG of one scan is a sequence of rows of MCUs (8 or 16 pixels high). Below, it may end at any of them: a
smaller height in its header makes the decoder stop there. Above, it can begin only where the decoder may start afresh:
behind a restart marker at the end of a row of MCUs. Files that fastload encodes have one there for each row.
"""

from __future__ import annotations

import math
import re
import struct
from typing import NamedTuple

from fastload.jpeg_scan import BASELINE, FRAMES, PLAIN, RESTARTS, SCAN, segments

_SIZE = struct.Struct(">HHB")  # lines, samples per line, components
_KINDS = 8  # markers count from RST0 to RST7 and begin again
_TAIL = 32  # bytes in which a file's end marker stands, as a rule
_END = b"\xff\xd9"
_SPLIT_AT = re.compile(rb"\xff[\xd0-\xd7]")


class JpegRows(NamedTuple):
    """Bytes that decode to rows [top, stop) of an image.

    Attributes:
        data: a JPEG file of full width.
        top: a multiple of the height of an MCU.
        stop: likewise, or the image's height.
        ends_early: more data follows than it needs, of which libjpeg warns as extraneous.
    """

    data: bytearray
    top: int
    stop: int
    ends_early: bool


class JpegHead(NamedTuple):
    """What the segments before the first scan say, as far as it decides about decoding."""

    components: int
    """1 gray, 3 colour, 4 print."""
    alone: _Scan | None
    """Of a plain baseline JPEG of one scan; None: its rows cannot be decoded alone."""


class _Scan(NamedTuple):
    """How the entropy-coded data of a baseline JPEG of one scan lies."""

    height_at: int
    """Byte at which its height stands, two bytes."""
    height: int
    width: int
    mcu_height: int
    mcu_width: int
    samples_rows_apart: bool
    """Chroma has fewer rows than luma, and its neighbours are needed to bring it to size."""
    interval: int
    """MCUs from a restart marker to the next; 0: there are none."""
    begins: int
    """First byte of the entropy-coded data."""


def frame_components(data: bytes | memoryview) -> int:
    """Number of a JPEG's components, without reading on behind its frame; 0: its header is odd."""
    try:
        return next((data[position + 9] for marker, position, _ in segments(data) if marker in FRAMES), 0)
    except (ValueError, IndexError):
        return 0


def jpeg_head(data: bytes | memoryview) -> JpegHead | None:
    """What the head of a JPEG says, in one pass; None: it is odd. The GIL is not given up."""
    frame_at = interval = ends = 0
    plain = True
    try:
        for marker, position, length in segments(data):
            ends = position + 2 + length
            if marker in FRAMES:
                plain &= marker in BASELINE and not frame_at
                frame_at = frame_at or position + 5
            elif marker == RESTARTS:
                interval = int.from_bytes(data[position + 4 : position + 6], "big")
            elif marker == SCAN:
                plain &= bool(frame_at) and data[position + 4] == data[frame_at + 4]
            else:
                plain &= marker in PLAIN
        if not frame_at:
            return None
        components = data[frame_at + 4]
        return JpegHead(components, _scan(data, frame_at, interval, ends) if plain else None)
    except (ValueError, IndexError, struct.error):
        return None


def _scan(data: bytes | memoryview, frame_at: int, interval: int, begins: int) -> _Scan | None:
    height, width, components = _SIZE.unpack_from(data, frame_at)
    factors = data[frame_at + 6 : frame_at + 6 + 3 * components : 3]
    across, down = [factor >> 4 for factor in factors], [factor & 15 for factor in factors]
    if not height or not width or not min(across + down, default=0):
        return None
    if components == 1:  # a scan of one component has MCUs of one block, whatever its factors say
        across, down = [1], [1]
    return _Scan(frame_at, height, width, 8 * max(down), 8 * max(across), min(down) < max(down), interval, begins)


def rows_alone(
    data: bytes | memoryview, head: JpegHead, height: int, width: int, top: int, stop: int
) -> JpegRows | None:
    """The least that decodes to rows [top, stop), pixel for pixel as the whole file does.

    Args:
        data: a whole JPEG file.
        head: what `jpeg_head` says of it.
        height: of its image as stored; a file that says otherwise is left alone.
        width: likewise.
        top: first row wanted.
        stop: row behind the last one wanted.

    Returns:
        None where only the whole file will do: it is progressive, of several scans or odd, or next to nothing would be
        saved.
    """
    scan = head.alone
    if scan is None or (scan.height, scan.width) != (height, width):
        return None
    num_rows = -(-height // scan.mcu_height)
    # libjpeg's smooth upsampling of chroma looks at the row above and the one below.
    first = (max(0, top - 1) if scan.samples_rows_apart else top) // scan.mcu_height
    last = min(num_rows, -(-(stop + 1 if scan.samples_rows_apart else stop) // scan.mcu_height))
    step = _rows_apart(scan)
    first, last = (first // step * step, min(num_rows, -(-last // step) * step)) if step else (0, last)
    if 8 * (last - first) > 7 * num_rows:
        return None
    # With markers it ends where one was: libjpeg would warn of those that follow, and a cut costs no more.
    cut = _between_markers(data, scan, first, last, num_rows) if step else bytearray(data)
    if cut is None:
        return None
    rows_top, rows_stop = first * scan.mcu_height, min(height, last * scan.mcu_height)
    cut[scan.height_at : scan.height_at + 2] = (rows_stop - rows_top).to_bytes(2, "big")
    return JpegRows(cut, rows_top, rows_stop, ends_early=not step and last < num_rows)


def _rows_apart(scan: _Scan) -> int:
    """Rows of MCUs from one that begins behind a restart marker to the next such; 0: there are no markers."""
    per_row = -(-scan.width // scan.mcu_width)
    return math.lcm(scan.interval, per_row) // per_row if scan.interval else 0


def _between_markers(data: bytes | memoryview, scan: _Scan, first: int, last: int, num_rows: int) -> bytearray | None:
    """Header and entropy-coded data of rows of MCUs [first, last), with its markers counted anew; None: not as said."""
    per_row = -(-scan.width // scan.mcu_width)
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
    # A file cut short has no end marker, whatever rows of it are there; within entropy-coded data there is none.
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
