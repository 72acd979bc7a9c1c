"""Places in images, boxes and points, moved as resizing moves the pixels under them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fastload.decode import Target, moved_points
from fastload.sources.listing import Column, Listing, Moves


def move_columns(listing: Listing, frames: NDArray[np.int32], target: Target) -> Listing:
    """The listing, its places in images (`Column.moves`) as float32 pixels of the packed images.

    Args:
        frames: int32 (N, 2), height and width of each image before; (0, 0) where it is not known, then its places
            become 0.
        target: what each image becomes.
    """
    columns = {
        name: _moved(column, column.moves, frames, target) if column.moves else column
        for name, column in listing.columns.items()
    }
    return replace(listing, columns=columns)


def _moved(column: Column, moves: Moves, frames: NDArray[np.int32], target: Target) -> Column:
    values = column.values.astype(np.float64)
    shape, num_rows = values.shape, len(values)
    known = frames.min(axis=1) > 0
    if moves == "points":
        points = values.reshape(num_rows, -1, 2)
    else:
        boxes = values.reshape(num_rows, -1, 4)
        corner = boxes[..., 2:] + boxes[..., :2] if moves == "xywh" else boxes[..., 2:]
        points = np.stack([boxes[..., :2], corner], axis=2).reshape(num_rows, -1, 2)
    moved = np.zeros(points.shape, np.float32)
    moved[known] = moved_points(points[known], frames[known], target)
    if moves != "points":
        # A box that the crop cuts ends at the image's edge; one that fills a place of padding (all 0) stays 0.
        moved[..., 0] = moved[..., 0].clip(0, target.width)
        moved[..., 1] = moved[..., 1].clip(0, target.height)
        corners = moved.reshape(num_rows, -1, 2, 2)
        other = corners[:, :, 1] - corners[:, :, 0] if moves == "xywh" else corners[:, :, 1]
        moved = np.concatenate([corners[:, :, 0], other], axis=2)
        moved[~boxes.any(axis=2)] = 0
    return replace(column, values=moved.reshape(shape))
