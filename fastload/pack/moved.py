"""Places in images, boxes and points, moved as resizing moves the pixels under them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fastload.fitting import Target, moved_places
from fastload.sources.listing import Column, Listing


def move_columns(listing: Listing, frames: NDArray[np.int32], target: Target | NDArray[np.int64]) -> Listing:
    """The listing, its places in images (`Column.moves`) as float32 pixels of the packed images.

    Args:
        frames: int32 (N, 2), height and width of each image before; (0, 0) where it is not known, then its places
            become 0.
        target: what each image becomes; or int64 (N, 2), the height and width to which it is resized.
    """
    known = frames.min(axis=1) > 0
    columns = dict(listing.columns)
    for name, column in columns.items():
        if column.moves:
            values = np.zeros(column.values.shape, np.float32)
            goal = target if isinstance(target, Target) else target[known]
            values[known] = moved_places(column.values[known], column.moves, frames[known], goal)
            columns[name] = Column(values, column.attrs, column.moves)
    return replace(listing, columns=columns)


def boxes_gone(before: Listing, after: Listing, samples: NDArray[np.int64]) -> int:
    """How many boxes of these samples had an area before they were moved, and have none now."""
    gone = 0
    for name, column in before.columns.items():
        if column.moves in ("xywh", "xyxy") and after.columns[name] is not column:
            was, now = (_areas(each.columns[name], samples) for each in (before, after))
            gone += int(np.sum((was > 0) & (now <= 0)))
    return gone


def _areas(column: Column, samples: NDArray[np.int64]) -> NDArray[np.float64]:
    boxes = column.values[samples].astype(np.float64)
    sides = boxes[..., 2:] - boxes[..., :2] if column.moves == "xyxy" else boxes[..., 2:]
    area: NDArray[np.float64] = sides[..., 0] * sides[..., 1]
    return area
