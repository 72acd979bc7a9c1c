"""Boxes in a table: four columns of it, one box a row, and as many rows an image as it has boxes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.listing import Column, Moves
from fastload.sources.table_columns import categories, plain_name
from fastload.sources.table_values import Values, values_of

OBJECTS = ("objects", "annotations")
_BOX_KEYS = ("bbox", "bboxes", "boxes", "box")
_LABEL_KEYS = ("category", "categories", "category_id", "label", "labels", "class")

CORNERS = ("xmin", "ymin", "xmax", "ymax")
SIZED = ("x", "y", "width", "height")

_NAMES: dict[Moves, tuple[str, ...]] = {"xyxy": CORNERS, "xywh": SIZED}
_NUMBER = r"\s*(-?[\d.]+(?:[eE][-+]?\d+)?|nan|inf)\s*"
_FOUR = re.compile(rf"\s*[\[(]{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}[\])]\s*")

_FORMS: tuple[tuple[Moves, tuple[str, str, str, str]], ...] = (
    ("xyxy", CORNERS),
    ("xyxy", ("x_min", "y_min", "x_max", "y_max")),
    ("xyxy", ("x1", "y1", "x2", "y2")),
    ("xyxy", ("x_1", "y_1", "x_2", "y_2")),
    ("xyxy", ("left", "top", "right", "bottom")),
    ("xywh", ("x", "y", "w", "h")),
    ("xywh", SIZED),
    ("xywh", ("bbox_x", "bbox_y", "bbox_w", "bbox_h")),
    ("xywh", ("bbox_x", "bbox_y", "bbox_width", "bbox_height")),
    ("xywh", ("x_1", "y_1", "width", "height")),
)


def box_columns(names: Iterable[str]) -> tuple[Moves, tuple[str, ...]]:
    """How the boxes of a table are given and by which four of its columns; "" and () when by none."""
    known = {plain_name(name).removeprefix("bbox_"): name for name in names}
    known |= {plain_name(name): name for name in names}
    for moves, form in _FORMS:
        if all(name in known for name in form):
            return moves, tuple(known[name] for name in form)
    return "", ()


def boxes_of(values: list[Values]) -> NDArray[np.float32] | None:
    """float32 (R, 4), NaN where a cell is empty: a row without a box; None where they are no numbers."""
    if any(column.kind not in ("int", "float") or column.values.ndim > 1 for column in values):
        return None
    boxes = np.stack([np.where(column.missing, np.nan, column.values) for column in values], axis=1)
    return boxes.astype(np.float32)


def wrong_boxes(boxes: NDArray[np.float32], moves: Moves) -> dict[int, str]:
    """Row -> why its box is none: infinite, partly empty, a negative size, corners the wrong way round."""
    empty = np.isnan(boxes)
    reasons: dict[int, str] = {}
    sizes = boxes[:, 2:] - boxes[:, :2] if moves == "xyxy" else boxes[:, 2:]
    said = "which ends before it begins" if moves == "xyxy" else "of a negative size"
    for row in np.flatnonzero(~empty.all(axis=1) & (empty | ~np.isfinite(boxes)).any(axis=1)).tolist():
        reasons[row] = f"has the box {_shown(boxes[row])}, which is not four numbers"
    for row in np.flatnonzero((sizes < 0).any(axis=1)).tolist():
        reasons.setdefault(row, f"has the box {_shown(boxes[row])} ({', '.join(_NAMES[moves])}), {said}")
    return reasons


def _shown(box: NDArray[np.float32]) -> str:
    return ", ".join(f"{number:g}" for number in box.tolist())


def spread_boxes(cells: dict[str, list[Any]]) -> tuple[dict[str, list[Any]], str]:
    """The columns of a table with one whose cells are "[x, y, w, h]" as four, and its name; else unchanged and ""."""
    for name, column in cells.items():
        given = [cell for cell in column if cell not in (None, "")]
        if plain_name(name) not in _BOX_KEYS or not given or {"x", "y", "w", "h"} & set(cells):
            continue
        found = [_four(cell) for cell in given]
        if not all(found):
            continue
        rows = iter(found)
        four = [(None,) * 4 if cell in (None, "") else next(rows) for cell in column]
        rest = {other: values for other, values in cells.items() if other != name}
        return rest | {f"bbox_{part}": [row[at] for row in four] for at, part in enumerate("xywh")}, name
    return cells, ""


def _four(cell: Any) -> tuple[Any, ...]:
    """The four numbers of a cell as text; () where it is anything else."""
    match = _FOUR.fullmatch(cell) if isinstance(cell, str) else None
    return match.groups() if match else ()


def one_each(boxes: NDArray[np.float32], moves: Moves) -> dict[str, Column]:
    """Column `bbox`, float32 (N, 4), of images with one box each."""
    return {"bbox": Column(boxes, {"names": CORNERS if moves == "xyxy" else SIZED}, moves)}


def many_each(
    boxes: NDArray[np.float32], moves: Moves, sample: NDArray[np.int64], count: int, labels: Column | None
) -> dict[str, Column]:
    """Columns `boxes` (N, M, 4) as x, y, width, height, `num_boxes` (N,) and, given labels, `box_labels` (N, M).

    Args:
        boxes: float32 (R, 4), one a row of the table; NaN: none.
        moves: how they are given.
        sample: int64 (R,), which of the `count` samples each belongs to.
        count: N.
        labels: int64 (R,) of the boxes.
    """
    rows = np.flatnonzero(~np.isnan(boxes).any(axis=1))
    rows = rows[np.argsort(sample[rows], kind="stable")]
    owner = sample[rows]
    numbers = np.bincount(owner, minlength=count)
    most = max(1, int(numbers.max(initial=0)))
    place = np.arange(len(rows)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    padded = np.zeros((count, most, 4), np.float32)
    padded[owner, place] = boxes[rows]
    if moves == "xyxy":
        padded[..., 2:] -= padded[..., :2]
    columns = {
        "boxes": Column(padded, {"names": SIZED}, "xywh"),
        "num_boxes": Column(numbers.astype(np.int64)),
    }
    if labels is not None:
        classes = np.full((count, most), -1, np.int64)
        classes[owner, place] = labels.values[rows]
        columns["box_labels"] = Column(classes, labels.attrs)
    return columns


def nested_boxes(
    cells: Sequence[Any], place: Callable[[int], str], names: tuple[str, ...] = ()
) -> dict[str, Column] | None:
    """Columns of boxes from cells of objects, as Hugging Face writes them: x, y, width, height.

    Args:
        cells: N of {"bbox": [[x, y, w, h], ...], "category": [...]}, or lists of {"bbox": [...], "category": ...}.
        place: what a row is called in messages.
        names: of the classes that the categories stand for.

    Returns:
        As `many_each`; None where the cells are something else.

    Raises:
        SourceError: a row with more boxes than categories, or fewer.
    """
    owners: list[int] = []
    boxes: list[Any] = []
    labels: list[Any] = []
    for i, cell in enumerate(cells):
        several = isinstance(cell, dict)
        for part in [cell] if several else cell or []:
            if not isinstance(part, dict):
                return None
            box = next((part[key] for key in _BOX_KEYS if key in part), None)
            label = next((part[key] for key in _LABEL_KEYS if key in part), None)
            box = (box or []) if several else [box]
            label = label if several else [label]
            if not isinstance(box, list) or (label is not None and (not isinstance(label, list))):
                return None
            if label is not None and len(label) != len(box):
                raise SourceError(
                    f"{place(i)}: {len(box)} boxes and {len(label)} categories. Each box needs one; mend the row."
                )
            owners += [i] * len(box)
            boxes += box
            labels += label or [None] * len(box)
    array = np.zeros((0, 4), np.float32)
    if boxes:
        with contextlib.suppress(ValueError, TypeError):
            array = np.array(boxes, np.float32)
        if array.shape != (len(boxes), 4):
            return None
    classes = values_of(labels) if boxes else None
    column = None
    if classes is not None and classes.kind == "int" and not classes.missing.any():
        column = Column(classes.values, {"names": names} if names else {})
    elif classes is not None and classes.kind == "text":
        column = categories(classes)
    return many_each(array, "xywh", np.array(owners, np.int64), len(cells), column)
