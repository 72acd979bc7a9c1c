"""Boxes in a table: in four columns, one box in a row and as many rows for an image as it has boxes; or in one cell."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format.ragged import Column, Moves
from fastload.options.pack import BoxForm
from fastload.sources.assemble import Draft, Splits
from fastload.sources.box_forms import CORNERS, SIZED, BoxSlots, in_stored_form
from fastload.sources.tables.frame import Frame, as_list, categories, columns_of, plain_name, values_of

OBJECTS = ("objects", "annotations")
"""Usual names of a column of objects, whose fields are boxes and labels."""

BOX_KEYS = ("bbox", "bboxes", "boxes", "box")
_LABEL_KEYS = ("category", "categories", "category_id", "label", "labels", "class")
_SAID = {
    "auto": "x, y, width, height",
    "xywh": "x, y, width, height",
    "xyxy": "two corners",
    "cxcywh": "the middle, width, height",
    "yxyx": "two corners, each y before x",
}
_NUMBER = r"(-?[\d.]+(?:[eE][-+]?\d+)?|nan|inf)"
_FOUR = re.compile(rf"\s*[\[(]?\s*{_NUMBER}[\s,;]+{_NUMBER}[\s,;]+{_NUMBER}[\s,;]+{_NUMBER}\s*[\])]?\s*")

_FORMS: tuple[tuple[BoxForm, tuple[str, str, str, str]], ...] = (
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
    ("cxcywh", ("x_center", "y_center", "width", "height")),
    ("cxcywh", ("center_x", "center_y", "width", "height")),
    ("cxcywh", ("xc", "yc", "w", "h")),
    ("cxcywh", ("cx", "cy", "w", "h")),
)


def box_columns(names: Iterable[str]) -> tuple[BoxForm, tuple[str, ...]]:
    """Returns the form of the boxes in a table and the four columns that hold them; () if there are none."""
    known = {plain_name(name).removeprefix("bbox_"): name for name in names}
    known |= {plain_name(name): name for name in names}
    for moves, form in _FORMS:
        if all(name in known for name in form):
            return moves, tuple(known[name] for name in form)
    return "auto", ()


def _wrong_boxes(boxes: NDArray[np.float32], moves: Moves, names: tuple[str, ...]) -> dict[int, str]:
    """Returns row -> why its box is wrong: infinite, partly empty, of negative size, or with swapped corners."""
    partly = np.asarray(~np.isnan(boxes).all(axis=1) & ~np.isfinite(boxes).all(axis=1))
    sizes = boxes[:, 2:] - boxes[:, :2] if moves == "xyxy" else boxes[:, 2:]
    said = "which ends before it begins" if moves == "xyxy" else "of a negative size"
    reasons: dict[int, str] = {}
    for row in np.flatnonzero(partly | (sizes < 0).any(axis=1)).tolist():
        shown = ", ".join(f"{number:g}" for number in boxes[row].tolist())
        why = ", which is not four numbers" if partly[row] else f" ({', '.join(names)}), {said}"
        reasons[row] = f"has the box {shown}{why}"
    return reasons


def spread_boxes(cells: dict[str, list[Any]]) -> tuple[dict[str, list[Any]], str]:
    """Returns the columns of a table with a column of "[x, y, w, h]" spread to four, and its name ("" if none)."""
    for name, column in cells.items():
        given = [cell for cell in column if cell not in (None, "")]
        if plain_name(name) not in BOX_KEYS or not given or {"x", "y", "w", "h"} & set(cells):
            continue
        found = [_FOUR.fullmatch(cell) if isinstance(cell, str) else None for cell in column]
        if sum(map(bool, found)) == len(given):
            four = zip(*[match.groups() if match else (None,) * 4 for match in found], strict=True)
            rest = {other: values for other, values in cells.items() if other != name}
            return rest | {f"bbox_{part}": list(side) for part, side in zip("xywh", four, strict=True)}, name
    return cells, ""


def objects_of_lists(cells: dict[str, list[Any]]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Returns the objects of each row by a column of lists of boxes, as `nested_boxes` takes them, and columns used.

    Lists may be written as text. A column of labels counts if each of its cells has as many as there are boxes. ([],
    ()) if there is no column of boxes.
    """

    def lists(name: str) -> list[list[Any]]:
        """Returns the cells of a column, [] for empty ones; [] if they are no lists."""
        parsed = [[] if cell in (None, "") else as_list(cell) for cell in cells[name]]
        return parsed if all(isinstance(cell, list) for cell in parsed) else []

    plain = {plain_name(name): name for name in reversed(list(cells))}
    for name in [plain[key] for key in BOX_KEYS if key in plain]:
        boxes = lists(name)
        if not any(boxes) or any(not isinstance(box, list) or len(box) != 4 for cell in boxes for box in cell):
            continue
        for other in [plain[key] for key in (*_LABEL_KEYS, "labels", "classes", "category_ids") if key in plain]:
            labels = lists(other)
            if labels and all(len(box) == len(label) for box, label in zip(boxes, labels, strict=True)):
                pairs = zip(boxes, labels, strict=True)
                return [{"bbox": box, "category": label} for box, label in pairs], (name, other)
        return [{"bbox": box} for box in boxes], (name,)
    return [], ()


def label_column(labels: list[Any], classes: tuple[str, ...] = ()) -> Column | None:
    """Returns whole numbers, which `classes` may name, or texts as a column; None for no labels, and for others."""
    values = values_of(labels) if labels else None
    if values is not None and values.kind == "int" and not values.missing.any():
        return Column(values.values, {"names": classes} if classes else {})
    return categories(values) if values is not None and values.kind == "text" else None


def nested_boxes(
    name: str,
    cells: Sequence[Any],
    location: Callable[[int], str],
    draft: Draft,
    classes: tuple[str, ...] = (),
    form: BoxForm = "auto",
) -> dict[str, Column]:
    """Returns the columns of `BoxSlots.columns` from a column of objects, as Hugging Face writes them; else {}.

    The N cells are {"bbox": [[x, y, w, h], ...], "category": [...]}, or lists of {"bbox": [...], "category": ...};
    `classes` are names for the categories, `form` is what the user says of the boxes.

    Raises:
        SourceError: a row has not as many boxes as categories.
    """
    owners: list[int] = []
    boxes: list[Any] = []
    labels: list[Any] = []
    for i, cell in enumerate(cells):
        several = isinstance(cell, dict)
        if not isinstance(cell, (dict, list, type(None))):
            return {}
        for part in [cell] if several else cell or []:
            if not isinstance(part, dict):
                return {}
            box = next((part[key] for key in BOX_KEYS if key in part), None)
            label = next((part[key] for key in _LABEL_KEYS if key in part), None)
            box, label = (box or [], label) if several else ([box], [label])
            if not isinstance(box, list) or not isinstance(label, (list, type(None))):
                return {}
            if label is not None and len(label) != len(box):
                fix = "Each box needs one; fix the row."
                raise SourceError(f"{draft.where}: {location(i)}: {len(box)} boxes and {len(label)} categories. {fix}")
            owners += [i] * len(box)
            boxes += box
            labels += label or [None] * len(box)
    try:
        array = np.array(boxes, np.float32) if boxes else np.zeros((0, 4), np.float32)
    except (ValueError, TypeError, OverflowError):
        return {}
    if array.shape != (len(boxes), 4):
        return {}
    draft.notes.append(f"Boxes by column {name!r}, taken for {_SAID[form]}.")
    slots = BoxSlots.without_nan(array, np.array(owners, np.int64), len(cells), draft.where)
    return slots.columns(array, label_column(labels, classes), form)


def columns_with_boxes(frame: Frame, draft: Draft) -> tuple[dict[str, Column], dict[int, str]]:
    """Returns the columns of boxes and, by `columns_of`, all others; sample -> reason of unusable ones. Adds notes.

    Raises:
        SourceError: a box is wrong (unless skipped), or box columns of images with several rows hold no numbers; for
            the reasons of `columns_of`.
    """
    form, four = box_columns(frame.columns)
    form = form if frame.boxes == "auto" else frame.boxes
    sides = [frame.columns[name] for name in four]
    if not four or any(side.kind not in ("int", "float") or side.values.ndim > 1 for side in sides):
        if frame.sample is not None:
            shown = ", ".join(four)
            raise SourceError(f"{frame.where}: images with several rows, whose box columns {shown} are no numbers.")
        return columns_of(frame, draft.notes)
    # (R, 4), NaN for empty cells: a row without a box
    boxes = np.stack([np.where(side.missing, np.nan, side.values) for side in sides], axis=1).astype(np.float32)
    boxes, moves, names = in_stored_form(boxes, form)
    wrong = _wrong_boxes(boxes, moves, names)
    if draft.on_error == "fail":
        found = [(frame.location(row), why) for row, why in wrong.items()]
        draft.leave_out_all(found, f"boxes in {', '.join(four)} that cannot be", "Fix the rows", len(boxes))
    asked = f", taken for {_SAID[form]}" if frame.boxes != "auto" else ""
    draft.notes.append(f"Boxes by the columns {', '.join(four)}{asked}.")
    rest = replace(frame, columns={name: values for name, values in frame.columns.items() if name not in four})
    if frame.sample is None:
        boxes[list(wrong)] = 0
        boxed = {"bbox": Column(boxes, {"names": names}, moves)}
        if np.isnan(boxes).any():
            slots = BoxSlots.without_nan(boxes, np.arange(len(boxes)), len(boxes), frame.where)
            boxed = slots.columns(boxes, None, moves)
        columns, bad = columns_of(rest, draft.notes)
        return boxed | columns, bad | wrong
    # The label of a row is its box's. Any other column counts if it is the same for all boxes of an image.
    boxes[list(wrong)] = np.nan
    sample = frame.sample
    empty: NDArray[np.bool_] = np.asarray(np.isnan(boxes).any(axis=1))
    draft.notes.append("Several rows of an image are its boxes.")
    made, bad = columns_of(replace(rest, splits=Splits.one(len(sample))), draft.notes)
    labels = made.pop("labels") if "labels" in made and made["labels"].values.ndim == 1 else None
    slots = BoxSlots.without_nan(boxes, sample, len(frame.splits.index), frame.where)
    columns = slots.columns(boxes, labels, moves)
    first = np.unique(sample, return_index=True)[1]
    alike = {name for name, column in made.items() if np.array_equal(column.values, column.values[first][sample])}
    columns |= {name: Column(made[name].values[first], made[name].attrs) for name in made if name in alike}
    varying = [name for name in made if name not in alike]
    if varying:
        way = "" if labels else " `--labels` says which one is the boxes' labels."
        draft.note(f"NOT READ:{way} Columns that differ among the boxes of an image", varying)
    bad = {row: why for row, why in bad.items() if not empty[row]} | wrong
    return columns, {int(sample[row]): why for row, why in bad.items()}
