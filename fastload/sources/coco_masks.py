"""Masks drawn from COCO's polygons and runs, in whichever process asks for them.

A pixel belongs to a polygon when its centre lies inside it, by the even-odd rule; an annotation covers what any of its
polygons covers. That is what cocoapi does, apart from its rounding to a fifth of a pixel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError
from fastload.sources.coco_regions import Regions

if TYPE_CHECKING:
    from fastload.image_header import ImageHeader


@dataclass(frozen=True, eq=False)
class DrawnMasks:
    """One mask an image, (H, W): 0 = background, and the values of its annotations, later ones over earlier ones.

    Attributes:
        heights: int64 (N,), of each image.
        widths: int64 (N,).
        first: int64 (N,), where the annotations of each image begin in `drawn`.
        last: int64 (N,), where they end.
        drawn: int64, annotations in the order of drawing.
        values: uint8 (A,), of each annotation.
        regions: what each annotation covers.
    """

    heights: NDArray[np.int64]
    widths: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    drawn: NDArray[np.int64]
    values: NDArray[np.uint8]
    regions: Regions

    def header(self, i: int) -> ImageHeader:
        """Height and width of image i as its file of annotations says; 1 channel of 8 bits."""
        from fastload.image_header import ImageHeader, check_size

        height, width = int(self.heights[i]), int(self.widths[i])
        check_size(height, width)
        return ImageHeader(height, width, channels=1, bits=8, kind="L", frames=1)

    def read(self, i: int) -> NDArray[np.uint8]:
        """The mask of image i, uint8 (H, W).

        Raises:
            ImageError: no size, or one beyond that of any image.
        """
        header = self.header(i)
        mask = np.zeros((header.height, header.width), np.uint8)
        for a in self.drawn[self.first[i] : self.last[i]].tolist():
            self._draw(mask, a)
        return mask

    def take(self, indices: NDArray[np.integer[Any]]) -> DrawnMasks:
        """Those of some images, in the order of indices."""
        return replace(
            self,
            heights=self.heights[indices],
            widths=self.widths[indices],
            first=self.first[indices],
            last=self.last[indices],
        )

    def _draw(self, mask: NDArray[np.uint8], a: int) -> None:
        regions, value = self.regions, self.values[a]
        lengths = regions.lengths[regions.run_ends[a - 1] if a else 0 : regions.run_ends[a]]
        if len(lengths):
            if int(lengths.sum(dtype=np.int64)) != mask.size:
                raise ImageError("has runs of another size than its image")
            inside = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
            mask[inside.reshape(mask.shape[::-1]).T] = value
        for ring in range(regions.ends[a - 1] if a else 0, regions.ends[a]):
            start = regions.ring_ends[ring - 1] if ring else 0
            fill_polygon(mask, regions.points[start : regions.ring_ends[ring]].reshape(-1, 2), value)


def fill_polygon(mask: NDArray[np.uint8], points: NDArray[np.floating[Any]], value: int | np.uint8) -> None:
    """Set the pixels of mask whose centres lie inside a polygon; what reaches beyond the mask is cut off.

    Args:
        mask: uint8 (H, W); pixel (0, 0) is the square from 0 to 1.
        points: (P, 2), x and y of its corners; fewer than 3 cover nothing.
        value: what to set.
    """
    height, width = mask.shape
    if len(points) < 3:
        return
    x0, y0 = points.T.astype(np.float64)
    x1, y1 = np.roll(x0, -1), np.roll(y0, -1)
    # Rows whose centre line an edge crosses, its upper end counted and its lower end not.
    first = np.clip(np.ceil(np.minimum(y0, y1) - 0.5), 0, height).astype(np.int64)
    counts = np.clip(np.ceil(np.maximum(y0, y1) - 0.5), 0, height).astype(np.int64) - first
    total = int(counts.sum())
    if total == 0:
        return
    edge = np.repeat(np.arange(len(points)), counts)
    row = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts) + first[edge]
    x = x0[edge] + (row + 0.5 - y0[edge]) * ((x1 - x0)[edge] / (y1 - y0)[edge])
    # The first pixel of the row whose centre is not left of the crossing: from here on, in is out and out is in.
    column = np.clip(np.ceil(x - 0.5), 0, width).astype(np.int64)
    top, left = int(row.min()), int(column.min())
    size = int(row.max()) + 1 - top, int(column.max()) + 1 - left
    crossings = np.bincount((row - top) * size[1] + column - left, minlength=size[0] * size[1])
    # Only odd or even counts, which 8 bits keep: four times as fast as sums of 64.
    odd = np.cumsum(crossings.astype(np.uint8).reshape(size), axis=1, dtype=np.uint8)[:, :-1] & 1
    np.copyto(mask[top : top + size[0], left : left + size[1] - 1], value, where=odd.view(np.bool_), casting="unsafe")
