"""The table beside exported images, as `fastload pack` reads it back.

    file_name,split,mask,label,...      one row an image; one a box, with x,y,width,height, where images have several

Classes are written by their names. Where `fastload pack` would read other classes from these ("10" is a number, "a|b"
two tags, "nan" no label), numbers are written, and the names in a column beside them. A vector of 0 and 1 becomes a
column an attribute; a few numbers a column each. Longer arrays (token ids) do not fit a table and are left out.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fastload.errors import SourceError
from fastload.export.plan import RENUMBERED, ExportPlan
from fastload.sources.listing import Column, Listing, first_few
from fastload.sources.table_columns import columns_of
from fastload.sources.table_values import values_of

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
        for title, cells in _cells_of(name, column, notes):
            columns[_free(title, columns)] = cells
    labels = listing.columns.get("labels")
    if labels is not None and labels.values.ndim == 2 and len(listing.columns) > 1:
        titles = [name for name, _ in _cells_of("labels", labels, notes)]
        notes.append(
            f"Labels are {len(titles)} columns of 0 and 1 ({first_few(titles, 3)}) among others: to pack them as "
            f"labels without fastload.json, name all with `--labels {','.join(titles[:2])},...`."
        )
    if left:
        notes.append(f"Not in the table, which is no place for arrays, only in fields.npz: {first_few(left)}.")
    rows: Iterator[Sequence[str]] = zip(*columns.values(), strict=True)
    head = list(columns)
    if boxed:
        titles, rows = _rows(list(columns.values()), listing, notes)
        head += titles
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return out.getvalue(), notes


def _has_boxes(listing: Listing) -> bool:
    """Whether a variable number of boxes, each with a class, is all that is said of an image's objects."""
    return all(name in listing.columns for name in _BOXES) and "labels" not in listing.columns


def _cells_of(name: str, column: Column, notes: list[str]) -> Iterator[tuple[str, _Cells]]:
    """The columns of a table that one of the file becomes."""
    names = tuple(column.attrs.get("names", ()))
    title = "label" if name == "labels" else name
    if column.values.ndim == 1:
        yield from _class_cells(title, column, names, notes)
        return
    for number, values in enumerate(column.values.T):
        part = names[number] if number < len(names) else str(number)
        yield part if name == "labels" else f"{name}_{part}", [_text(value) for value in values.tolist()]


def _class_cells(title: str, column: Column, names: tuple[str, ...], notes: list[str]) -> Iterator[tuple[str, _Cells]]:
    """Names of classes, an empty cell for none, or their numbers and these names; other values as they are."""
    values = column.values.tolist()
    if column.values.dtype.kind != "i" or not names or max(values, default=-1) >= len(names):
        yield title, [_text(value) for value in values]
        return
    cells = [names[value] if value >= 0 else "" for value in values]
    if _read_back(title, [names[value] for value in values if value >= 0]):
        if title == "label" and sorted(set(cells) - {""}) != list(names):
            notes.append(RENUMBERED)
        yield title, cells
        return
    notes.append(
        f"Names of classes that a table would say otherwise, such as numbers: `{title}` holds the numbers of the "
        f"classes, `{title}_name` their names. Packed again without fastload.json, the "
        f"numbers are the same, without names."
    )
    yield title, [str(value) if value >= 0 else "" for value in values]
    yield f"{title}_name", cells


def _read_back(title: str, cells: _Cells) -> bool:
    """Whether `fastload pack` reads these very classes from such cells."""
    if not cells:
        return True
    try:
        columns, bad, _ = columns_of(
            {title: values_of(cells)}, wanted=(title,), split=np.zeros(len(cells), np.uint8), split_names=("all",),
            where=title,
        )  # fmt: skip
    except SourceError:
        return False
    found = columns.get("labels")
    if bad or found is None or found.values.ndim != 1:
        return False
    names = found.attrs.get("names", ())
    return bool(names) and [names[value] for value in found.values.tolist()] == cells


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="backslashreplace")
    return repr(value) if isinstance(value, float) else str(value)


def _rows(columns: list[_Cells], listing: Listing, notes: list[str]) -> tuple[list[str], Iterator[_Cells]]:
    """Titles of what a box has; and one row a box, or one with empty cells for an image without any."""
    boxes, labels = listing.columns["boxes"].values, listing.columns["box_labels"]
    numbers = listing.columns["num_boxes"].values
    there = np.arange(boxes.shape[1]) < numbers[:, None]
    names = tuple(labels.attrs.get("names", ()))
    titles, classes = zip(*_class_cells("label", Column(labels.values[there]), names, notes), strict=True)

    def rows() -> Iterator[_Cells]:
        each = zip(boxes[there].astype(np.float64).tolist(), *classes, strict=True)
        for cells, count in zip(zip(*columns, strict=True), numbers.tolist(), strict=True):
            if not count:
                yield [*cells, "", "", "", "", *("" for _ in titles)]
            for box, *texts in itertools.islice(each, count):
                yield [*cells, *(_text(value) for value in box), *texts]

    return ["x", "y", "width", "height", *titles], rows()


def _free(title: str, columns: dict[str, _Cells]) -> str:
    while title in columns:
        title += "_"
    return title
