"""`Column`: the values of one dataset of a packed file other than pixels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from numpy.typing import NDArray

Moves = Literal["", "points", "xywh", "xyxy"]
"""Kind of coordinates in a column, which change when the image is resized: points x, y; boxes as corner and size; boxes
as two corners. "": no coordinates."""


@dataclass(frozen=True, eq=False)
class Column:
    """One dataset of a packed file other than pixels."""

    values: NDArray[Any]  # (N, ...), a fixed-shape numeric array, or S for keys
    # HDF5 attributes as plain Python values, e.g. {"names": ("cat", "dog")}
    attrs: dict[str, Any] = field(default_factory=dict)
    # Kind of coordinates, in pixels of the upright image before any resizing; the last axis holds x, y (or x, y, x, y,
    # ...) or the 4 numbers of a box. The packer scales them with the image
    moves: Moves = ""
