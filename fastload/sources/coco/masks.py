"""Regions of COCO's annotations, polygons or run lengths: parsed from JSON, and drawn into masks when one is read.

A pixel belongs to a polygon if its centre lies inside, by the even-odd rule; an annotation covers what any of its
polygons covers. cocoapi does the same, except that it rounds to a fifth of a pixel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError

if TYPE_CHECKING:
    from fastload.images.image_header import ImageHeader


def parse_region(value: Any) -> tuple[list[list[float]], list[int], tuple[int, int]]:
    """Returns polygons, or run lengths and their height and width (else 0, 0); all are empty for no segmentation.

    ValueError says what is wrong; the message continues "annotation 7 ...".
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
    """Returns the run lengths in COCO's compressed string; raises ValueError for any other.

    Each character holds 5 bits, low ones first, and a bit for whether more follow; from the third length on, the value
    is the difference to the length two before (as defined by maskApi.c of cocoapi).
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
    # No coordinate is larger; the comparison is False for NaN, and safe for integers beyond any float.
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e9 < value < 1e9


def _are_numbers(ring: list[Any]) -> bool:
    # Fast, for the 40 million numbers of train2017: NaN and non-numbers show in the sum, others in minimum and maximum.
    try:
        return not ring or (isfinite(sum(ring)) and min(ring) > -1e9 and max(ring) < 1e9)
    except (TypeError, OverflowError):
        return False


@dataclass(frozen=True, eq=False)
class DrawnMasks:
    """Draws the mask of an image, (H, W), when it is read: 0 = background, later annotations over earlier ones."""

    sizes: NDArray[np.int64]  # (N, 2), height and width of each image
    spans: NDArray[np.int64]  # (N, 2), where the annotations of each image begin and end in `drawn`
    drawn: NDArray[np.int64]  # annotations in the order of drawing
    values: NDArray[np.uint8]  # (A,), value in the mask of each annotation
    ends: NDArray[np.int64]  # (A,), where the polygons (rings) of each annotation end in `ring_ends`
    ring_ends: NDArray[np.int64]  # where the numbers of each ring end in `points`
    points: NDArray[np.float32]  # x, y, x, y, ...
    run_ends: NDArray[np.int64]  # (A,), where the runs of each annotation end in `lengths`
    lengths: NDArray[np.uint32]  # pixels of background and region in turn, down the columns

    def header(self, i: int) -> ImageHeader:
        """Returns the header of mask i: height and width of the image by the annotations, 1 channel of 8 bits."""
        from fastload.images.image_header import ImageHeader, check_size

        height, width = self.sizes[i].tolist()
        check_size(height, width)
        return ImageHeader(height, width, channels=1, bits=8, kind="L", frames=1)

    def read(self, i: int) -> NDArray[np.uint8]:
        """Returns the mask of image i, uint8 (H, W); ImageError says if its size is unknown, too large or another."""
        header, (first, last) = self.header(i), self.spans[i].tolist()
        mask = np.zeros((header.height, header.width), np.uint8)
        for a in self.drawn[first:last].tolist():
            value = self.values[a]
            lengths = self.lengths[self.run_ends[a - 1] if a else 0 : self.run_ends[a]]
            if len(lengths):
                if int(lengths.sum(dtype=np.int64)) != mask.size:
                    raise ImageError("has runs of another size than its image")
                inside = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
                mask[inside.reshape(mask.shape[::-1]).T] = value
            for ring in range(self.ends[a - 1] if a else 0, self.ends[a]):
                start = self.ring_ends[ring - 1] if ring else 0
                fill_polygon(mask, self.points[start : self.ring_ends[ring]].reshape(-1, 2), value)
        return mask

    def take(self, indices: NDArray[np.integer[Any]]) -> DrawnMasks:
        """Returns the masks of the images at these indices, in their order."""
        return replace(self, sizes=self.sizes[indices], spans=self.spans[indices])


def fill_polygon(mask: NDArray[np.uint8], points: NDArray[np.floating[Any]], value: int | np.uint8) -> None:
    """Sets the pixels of a mask whose centres lie inside a polygon, as far as they lie in the mask.

    Args:
        mask: uint8 (H, W); pixel (0, 0) is the square from 0 to 1.
        points: (P, 2), x and y of the corners; fewer than 3 cover nothing.
        value: the value to set.
    """
    height, width = mask.shape
    if len(points) < 3:
        return
    x0, y0 = points.T.astype(np.float64)
    x1, y1 = np.roll(x0, -1), np.roll(y0, -1)
    # The rows whose centre line an edge crosses; the upper end counts, the lower does not.
    first = np.clip(np.ceil(np.minimum(y0, y1) - 0.5), 0, height).astype(np.int64)
    counts = np.clip(np.ceil(np.maximum(y0, y1) - 0.5), 0, height).astype(np.int64) - first
    total = int(counts.sum())
    if total == 0:
        return
    edge = np.repeat(np.arange(len(points)), counts)
    row = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts) + first[edge]
    x = x0[edge] + (row + 0.5 - y0[edge]) * ((x1 - x0)[edge] / (y1 - y0)[edge])
    # The first pixel whose centre is not left of the crossing: from it on, inside and outside change.
    column = np.clip(np.ceil(x - 0.5), 0, width).astype(np.int64)
    top, left = int(row.min()), int(column.min())
    size = int(row.max()) + 1 - top, int(column.max()) + 1 - left
    crossings = np.bincount((row - top) * size[1] + column - left, minlength=size[0] * size[1])
    # Only odd or even matters, which 8 bits keep: four times as fast as sums of 64 bits.
    odd = np.cumsum(crossings.astype(np.uint8).reshape(size), axis=1, dtype=np.uint8)[:, :-1] & 1
    np.copyto(mask[top : top + size[0], left : left + size[1] - 1], value, where=odd.view(np.bool_), casting="unsafe")
