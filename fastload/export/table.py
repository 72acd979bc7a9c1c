"""The table beside exported images, as `fastload pack` reads it back.

    file_name,split,mask,label,...      one row an image; one a box, with x,y,width,height, where images have several

Class numbers are written as names; a vector of 0 and 1 as a column an attribute; a few numbers as a column each. Longer
arrays (token ids) do not fit a table and are left out.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from fastload.export.plan import ExportPlan
from fastload.sources.listing import Column, Listing, first_few

MOST_COLUMNS = 256
_BOXES = ("boxes", "num_boxes", "box_labels")

_Cells = list[str]


def table_text(listing: Listing, plan: ExportPlan) -> tuple[str, list[str]]:
    """The table as CSV, and notes on what it leaves out."""
    columns: dict[str, _Cells] = {"file_name": list(plan.images)}
    notes: list[str] = []
    if listing.split_names != ("all",):
        columns["split"] = [listing.split_names[number] for number in listing.split.tolist()]
    if plan.masks:
        assert listing.masks is not None, "the plan has masks"
        present = listing.masks.present.tolist()
        columns["mask"] = [path if there else "" for path, there in zip(plan.masks, present, strict=True)]
    boxed = _has_boxes(listing)
    left = []
    for name, column in listing.columns.items():
        if boxed and name in _BOXES:
            continue
        if column.values.ndim > 2 or (column.values.ndim == 2 and column.values.shape[1] > MOST_COLUMNS):
            left.append(name)
            continue
        for title, cells in _cells_of(name, column, boxed):
            columns[_free(title, columns)] = cells
    labels = listing.columns.get("labels")
    if labels is not None and labels.values.ndim == 2 and len(listing.columns) > 1:
        titles = [name for name, _ in _cells_of("labels", labels, boxed)]
        notes.append(
            f"Labels are {len(titles)} columns of 0 and 1 ({first_few(titles, 3)}) among others: to pack them as "
            f"labels again, name all with `--labels {','.join(titles[:2])},...`."
        )
    if left:
        notes.append(f"Not written, since a table is no place for arrays: {first_few(left)}.")
    rows = _rows(list(columns.values()), listing) if boxed else zip(*columns.values(), strict=True)
    head = [*columns, *(("x", "y", "width", "height", "label") if boxed else ())]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return out.getvalue(), notes


def _has_boxes(listing: Listing) -> bool:
    """Whether a variable number of boxes, each with a class, is all that is said of an image's objects."""
    return all(name in listing.columns for name in _BOXES) and "labels" not in listing.columns


def _cells_of(name: str, column: Column, boxed: bool) -> Iterator[tuple[str, _Cells]]:
    """The columns of a table that one of the file becomes."""
    names = tuple(column.attrs.get("names", ()))
    title = "label" if name == "labels" else name
    if column.values.ndim == 1:
        yield title, _texts(column, names)
        return
    for number, values in enumerate(column.values.T):
        part = names[number] if number < len(names) else str(number)
        yield part if name == "labels" else f"{name}_{part}", [_text(value) for value in values.tolist()]


def _texts(column: Column, names: tuple[str, ...]) -> _Cells:
    """Names of classes, an empty cell for none; other values as they are."""
    values = column.values.tolist()
    if column.values.dtype.kind == "i" and names and max(values, default=-1) < len(names):
        return [names[value] if value >= 0 else "" for value in values]
    return [_text(value) for value in values]


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="backslashreplace")
    return repr(value) if isinstance(value, float) else str(value)


def _rows(columns: list[_Cells], listing: Listing) -> Iterator[_Cells]:
    """One row a box; one with empty cells for an image without any."""
    boxes, labels = listing.columns["boxes"].values, listing.columns["box_labels"]
    names = tuple(labels.attrs.get("names", ()))
    numbers = listing.columns["num_boxes"].values.tolist()
    for row, cells in enumerate(zip(*columns, strict=True)):
        if not numbers[row]:
            yield [*cells, "", "", "", "", ""]
        texts = _texts(Column(labels.values[row, : numbers[row]]), names)
        for box, text in zip(boxes[row, : numbers[row]].astype(np.float64).tolist(), texts, strict=True):
            yield [*cells, *(_text(value) for value in box), text]


def _free(title: str, columns: dict[str, _Cells]) -> str:
    while title in columns:
        title += "_"
    return title
