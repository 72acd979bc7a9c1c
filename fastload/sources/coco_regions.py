"""What an annotation of COCO covers: polygons, or runs of pixels down the columns, as they stand in the JSON."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Regions:
    """What each annotation covers, all of them one after another: polygons, or runs down the columns.

    Attributes:
        ends: int64 (A,), where the rings of each annotation end in `ring_ends`.
        ring_ends: int64, where the numbers of each ring end in `points`.
        points: float32, x, y, x, y, ...
        run_ends: int64 (A,), where the runs of each annotation end in `lengths`.
        lengths: uint32, of background and region in turn.
    """

    ends: NDArray[np.int64]
    ring_ends: NDArray[np.int64]
    points: NDArray[np.float32]
    run_ends: NDArray[np.int64]
    lengths: NDArray[np.uint32]

    def empty(self) -> NDArray[np.bool_]:
        """Whether an annotation has neither polygon nor runs, bool (A,)."""
        without: NDArray[np.bool_] = np.diff(self.ends, prepend=0) + np.diff(self.run_ends, prepend=0) == 0
        return without


def parse_region(value: Any) -> tuple[list[list[float]], list[int], tuple[int, int]]:
    """Polygons, or the lengths of runs and their height and width (0, 0 without); all empty when there is no region.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, dict):
        size, counts = value.get("size"), value.get("counts")
        if not isinstance(size, list) or len(size) != 2 or not all(is_int(side) and 0 < side < 2**31 for side in size):
            raise ValueError(f"has runs of size {size!r:.80}")
        if isinstance(counts, str):
            counts = decode_counts(counts)
        if not isinstance(counts, list) or not all(is_int(length) and 0 <= length < 2**32 for length in counts):
            raise ValueError("has runs with lengths that are none")
        if sum(counts) != size[0] * size[1]:
            raise ValueError(f"has runs of {sum(counts)} pixels for a size of {size[1]}x{size[0]}")
        return [], counts, (size[0], size[1])
    if not isinstance(value, list | None):
        raise ValueError(f"has the region {value!r:.60}")
    for ring in value or []:
        if not isinstance(ring, list) or len(ring) % 2 or not _are_numbers(ring):
            raise ValueError(f"has the polygon {ring!r:.60}")
    return value or [], [], (0, 0)


def decode_counts(counts: str) -> list[int]:
    """The lengths of the runs in COCO's compressed string.

    Each character holds 5 bits, the low ones first, and whether more follow; from the third length on it is the
    difference to the one two before it (as defined by cocoapi's maskApi.c).

    Raises:
        ValueError: it is no such string.
    """
    lengths: list[int] = []
    value = shift = 0
    for code in counts.encode("ascii", "replace"):
        bits = code - 48
        if not 0 <= bits < 64 or shift > 35:
            raise ValueError("has runs in a string that is not COCO's")
        value |= (bits & 0x1F) << shift
        shift += 5
        if bits & 0x20:
            continue
        if bits & 0x10:
            value -= 1 << shift
        lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
        value = shift = 0
    if shift:
        raise ValueError("has runs in a string that is cut short")
    return lengths


def is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_number(value: Any) -> bool:
    # No pixel lies further out; the comparison is False for NaN, and safe for integers beyond any float.
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e9 < value < 1e9


def _are_numbers(ring: list[Any]) -> bool:
    # Some 40 million numbers in train2017: the sum tells NaN and what is no number, the ends what is too far out.
    try:
        return not ring or (isfinite(sum(ring)) and min(ring) > -1e9 and max(ring) < 1e9)
    except (TypeError, OverflowError):
        return False
