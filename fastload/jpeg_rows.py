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

_SEGMENT = struct.Struct(">BBH")  # 0xFF, marker, length of the segment counted from itself
_SCAN = 0xDA
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # also those kinds that nothing here decodes
_RESTARTS = 8  # markers count from RST0 to RST7 and begin again
_SPLIT_AT = re.compile(rb"\xff[\xd0-\xd7]")


class JpegRows(NamedTuple):
    """Bytes that decode to rows [top, stop) of an image.

    Attributes:
        data: a JPEG file of full width.
        top: a multiple of the height of an MCU.
        stop: likewise, or the image's height.
        ends_early: more data follows than it needs, of which libjpeg warns as extraneous.
    """

    data: bytes | bytearray
    top: int
    stop: int
    ends_early: bool


def frame_components(data: bytes | memoryview) -> int:
    """Number of a JPEG's components: 1 gray, 3 colour, 4 print; 0: its header is odd. The GIL is not given up."""
    position = 2
    try:
        while True:
            prefix, marker, length = _SEGMENT.unpack_from(data, position)
            if prefix != 0xFF or length < 2 or marker == _SCAN:
                return 0
            if marker in _FRAMES:
                return data[position + 9]
            position += 2 + length
    except (struct.error, IndexError):
        return 0


class _Scan(NamedTuple):
    """What the header of a baseline JPEG of one scan says."""

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


def rows_alone(data: bytes, height: int, width: int, top: int, stop: int) -> JpegRows | None:
    """The least that decodes to rows [top, stop), pixel for pixel as the whole file does.

    Args:
        data: a whole JPEG file.
        height: of its image as stored; a file that says otherwise is left alone.
        width: likewise.
        top: first row wanted.
        stop: row behind the last one wanted.

    Returns:
        None where only the whole file will do: it is progressive, of several scans or odd, or next to nothing would be
        saved.
    """
    scan = _scan(data)
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


def _scan(data: bytes) -> _Scan | None:
    if not data.startswith(b"\xff\xd8"):
        return None
    position, interval, frame_at, components = 2, 0, 0, 0
    try:
        while True:
            prefix, marker, length = _SEGMENT.unpack_from(data, position)
            if prefix != 0xFF or length < 2:
                return None
            if marker == _SCAN:
                break
            if marker in (0xC0, 0xC1):
                if frame_at:
                    return None
                frame_at, components = position + 5, data[position + 9]
            elif 0xC0 <= marker <= 0xDF and marker not in (0xC4, 0xDB, 0xDD):
                return None
            elif marker == 0xDD:
                interval = int.from_bytes(data[position + 4 : position + 6], "big")
            position += 2 + length
        if not frame_at or data[position + 4] != components:
            return None
        height, width = struct.unpack_from(">HH", data, frame_at)
        factors = [data[frame_at + 6 + 3 * i] for i in range(components)]
    except (struct.error, IndexError):
        return None
    across, down = [factor >> 4 for factor in factors], [factor & 15 for factor in factors]
    if not height or not width or not min(across + down, default=0):
        return None
    if components == 1:  # a scan of one component has MCUs of one block, whatever its factors say
        across, down = [1], [1]
    return _Scan(
        frame_at, height, width, 8 * max(down), 8 * max(across), min(down) < max(down), interval, position + 2 + length
    )


def _rows_apart(scan: _Scan) -> int:
    """Rows of MCUs from one that begins behind a restart marker to the next such; 0: there are no markers."""
    per_row = -(-scan.width // scan.mcu_width)
    return math.lcm(scan.interval, per_row) // per_row if scan.interval else 0


def _between_markers(data: bytes, scan: _Scan, first: int, last: int, num_rows: int) -> bytearray | None:
    """Header and entropy-coded data of rows of MCUs [first, last), with its markers counted anew; None: not as said."""
    per_row = -(-scan.width // scan.mcu_width)
    before, until = first * per_row // scan.interval, last * per_row // scan.interval
    most = -(-num_rows * per_row // scan.interval) - 1
    begin, end = scan.begins, len(data)
    markers = []
    for number, found in enumerate(_SPLIT_AT.finditer(data, scan.begins), start=1):
        if found[0][1] != 0xD0 + (number - 1) % _RESTARTS:
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
    if missing or data.rfind(b"\xff\xd9", begin) < 0:
        return None
    cut = bytearray(data[: scan.begins])
    cut += data[begin:end]
    if last < num_rows:
        cut += b"\xff\xd9"
    if before % _RESTARTS:
        for number, at in enumerate(markers):
            cut[scan.begins + at - begin + 1] = 0xD0 + number % _RESTARTS
    return cut
