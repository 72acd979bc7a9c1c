"""Columns that by their names hold places in the image, boxes or landmarks: in which form, so that packing moves them.

A format that only names its columns does not say whether four numbers are two corners or a corner and a size. Names of
the numbers say it; else the numbers do, where only one of the two lies within the images. Otherwise it is not guessed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError
from fastload.fitting import axis_letter
from fastload.sources.listing import Arrays, Column, Files, Listing, Moves, Pictures
from fastload.sources.table_boxes import CORNERS, SIZED

BOXES = ("bbox", "boxes")
POINTS = ("landmarks", "keypoints")

UNKNOWN = "unknown"
"""The attribute `coordinates` of a column whose places cannot be moved as the image is resized."""

_PROBED = 64  # images whose size is looked up, those of the largest numbers


def with_places(listing: Listing) -> Listing:
    """The listing, its columns of boxes and points with what they are, or marked as of unknown form; notes say which.

    Columns that say already what they are, in pixels, and datasets without images, stay as they are.
    """
    if listing.files is None:
        return listing
    columns, notes = dict(listing.columns), list(listing.notes)
    for name, column in listing.columns.items():
        if column.moves and _are_fractions(column.values):
            columns[name] = replace(column, attrs=column.attrs | {"coordinates": UNKNOWN}, moves="")
            notes.append(f"Column {name!r} holds places that seem to be fractions of the image: not moved with it.")
            continue
        if column.moves or "coordinates" in column.attrs or column.values.dtype.kind not in "iuf":
            continue
        if name.lower() in BOXES:
            moves, why = _box_form(listing.files, column)
        elif name.lower() in POINTS:
            moves, why = _point_form(name.lower(), column)
        else:
            continue
        if moves:
            said = {} if moves == "points" else {"names": CORNERS if moves == "xyxy" else SIZED}
            columns[name] = replace(column, attrs=said | column.attrs, moves=moves)
            notes.append(f"Column {name!r} holds {_SAID[moves]}, {why}.")
        else:
            columns[name] = replace(column, attrs=column.attrs | {"coordinates": UNKNOWN})
            notes.append(f"Column {name!r} holds places in the image in an unknown form: {why}.")
    return replace(listing, columns=columns, notes=tuple(notes))


_SAID = {"points": "points x, y", "xywh": "boxes x, y, width, height", "xyxy": "boxes by two corners"}


def _point_form(name: str, column: Column) -> tuple[Moves, str]:
    last = column.values.shape[-1] if column.values.ndim > 1 else 1
    if last % 2 or (name == "keypoints" and last != 2 and last % 3 == 0):
        return "", f"{last} numbers in a row are no pairs x, y, or may be triples"
    if _are_fractions(column.values):
        return "", "they seem to be fractions of its size"
    return "points", "by its name"


def _box_form(files: Files | Pictures | Arrays, column: Column) -> tuple[Moves, str]:
    values = column.values
    if values.ndim not in (2, 3) or values.shape[-1] != 4:
        return "", f"a row is {values.shape[1:]}, not 4 numbers or (M, 4)"
    if names := column.attrs.get("names"):
        letters = "".join(map(axis_letter, names))
        if letters == "xyxy":
            return "xyxy", "by the names of its numbers"
        return ("xywh", "by the names of its numbers") if letters == "xywh" else ("", f"named {', '.join(names)}")
    if _are_fractions(values):
        return "", "they seem to be fractions of its size"
    boxes = values.reshape(len(values), -1, 4).astype(np.float64)
    if (boxes == -1).all(axis=2).any():
        return "", "some are -1 throughout"
    boxes[np.isnan(boxes).any(axis=2)] = 0  # a box of zeros is none
    corners = bool((boxes[..., 2:] >= boxes[..., :2]).all())
    sized = bool((boxes[..., 2:] >= 0).all())
    if corners and sized:
        rows, sizes = _sizes(files, boxes)
        ends = boxes[rows]
        # Numbers of annotators end up to a pixel outside.
        corners = bool((ends[..., 2:] <= sizes + 1).all())
        sized = bool((ends[..., :2] + ends[..., 2:] <= sizes + 1).all())
    if corners == sized:
        return "", f"{'both' if corners else 'neither'} two corners and a corner with a size would fit"
    return ("xyxy" if corners else "xywh"), "as only those lie within the images"


def _sizes(files: Files | Pictures | Arrays, boxes: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows whose boxes reach furthest if they are sized, and width and height of their images, (R, 1, 2)."""
    if isinstance(files, Arrays):
        height, width = files.shape[:2]
        return np.arange(len(boxes)), np.full((len(boxes), 1, 2), (width, height))
    from fastload.image_header import probe_image

    reach = (boxes[..., :2] + boxes[..., 2:]).max(axis=1, initial=0)
    rows, sizes = [], []
    for row in np.unique(np.argsort(-reach, axis=0, kind="stable")[:_PROBED]).tolist():
        try:
            if isinstance(files, Files):
                header = probe_image(lambda size, row=row: files.read_head(row, size))  # type: ignore[misc]
            else:
                header = files.header(row)
        except ImageError:
            continue  # packing says which images cannot be read
        rows.append(row)
        sizes.append((header.width, header.height))
    return np.array(rows, np.int64), np.array(sizes, np.int64).reshape(-1, 1, 2)


def _are_fractions(values: NDArray[Any]) -> bool:
    if values.dtype.kind != "f" or not values.size:
        return False
    known = values[np.isfinite(values)]
    return bool(known.any() and known.min() >= 0 and known.max() <= 1)
