"""The table of exported images, as `fastload pack` reads it, and the files `fastload.json` and `fields.npz`.

    file_name,split,mask,label,...      one row for each image, or for each box with x,y,width,height

Classes are written by their names. Where `fastload pack` would read other classes from these ("10" is a number, "a|b"
two tags, "nan" no label), numbers are written, and the names in an extra column. A vector of 0 and 1 becomes a column
for each attribute, a few numbers a column each. Text that a spreadsheet would run as a formula gets an apostrophe
before it, and the table a last column that says so (`ESCAPED`). Longer arrays (token ids) do not fit a table and are
left out; `fields.npz` has every column, and `fastload.json` what neither says. `sources/exported.py` reads both.
Captions are one column: a text, or a list of texts as JSON where an image has none or several.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.export.plan import RENUMBERED, ExportPlan
from fastload.format.ragged import Column, Moves
from fastload.format.texts import CAPTION, count_name, text_lists
from fastload.format.writer import writer_name
from fastload.sources.assemble import Splits
from fastload.sources.boxes import BOXES, POINTS, form_by_names
from fastload.sources.exported import FORMAT, VERSION
from fastload.sources.listing import Listing, first_few
from fastload.sources.tables import ESCAPED, Frame, columns_of, escape_formula, values_of
from fastload.system.text import text_of

MOST_COLUMNS = 256
_BOXES = ("boxes", "num_boxes", "box_labels")


_TIMESTAMP = (1980, 1, 1, 0, 0, 0)  # Always the same, so that the same rows give the same bytes.

_Cells = list[str]


def table_text(listing: Listing, plan: ExportPlan) -> tuple[bytes, list[str]]:
    """Returns the table as CSV in UTF-8, and notes on what it leaves out."""
    columns: dict[str, _Cells] = {"file_name": list(plan.images)}
    notes: list[str] = []
    listing, captions = _without_captions(listing)
    if captions:
        columns[CAPTION] = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in captions]
    if listing.split_names != ("all",):
        columns["split"] = [listing.split_names[number] for number in listing.split.tolist()]
    if plan.masks:
        assert listing.masks is not None, "the plan has masks"
        present = listing.masks.present.tolist()
        columns["mask"] = [path if there else "" for path, there in zip(plan.masks, present, strict=True)]
    # Images have a varying number of boxes with a class each, and no labels.
    boxed = all(name in listing.columns for name in _BOXES) and "labels" not in listing.columns
    left = []
    for name, column in listing.columns.items():
        if boxed and name in _BOXES:
            continue
        if column.values.ndim > 2 or (column.values.ndim == 2 and column.values.shape[1] > MOST_COLUMNS):
            left.append(name)
            continue
        for title, cells in _cells_of(name, column, notes):
            while title in columns:
                title += "_"
            columns[title] = cells
    labels = listing.columns.get("labels")
    if labels is not None and labels.values.ndim == 2 and len(listing.columns) > 1:
        titles = [name for name, _ in _cells_of("labels", labels, notes)]
        notes.append(
            f"Labels are {len(titles)} columns of 0 and 1 ({first_few(titles, 3)}) among others: to pack them as "
            f"labels without fastload.json, name all with `--labels {','.join(titles[:2])},...`."
        )
    if left:
        notes.append(f"Not in the table, which is no place for arrays, only in fields.npz: {first_few(left)}.")
    of_boxes = _box_cells(listing, notes) if boxed else {}
    head = [*columns, *of_boxes]
    plain: list[_Cells] = [*columns.values(), *of_boxes.values()]
    safe_head, *safe = (list(map(escape_formula, each)) for each in (head, *plain))
    rows: Iterator[Sequence[str]] = zip(*safe, strict=True)
    if boxed:
        rows = _rows(safe[: len(columns)], safe[len(columns) :], listing.columns["num_boxes"].values.tolist())
    if [safe_head, *safe] != [head, *plain]:
        safe_head.append(ESCAPED)
        rows = ([*row, "1"] for row in rows)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(safe_head)
    writer.writerows(rows)
    return out.getvalue().encode("utf-8", errors="backslashreplace"), notes


def metadata_texts(listing: Listing, plan: ExportPlan) -> tuple[dict[str, bytes], list[str]]:
    """Returns path -> content of each metadata.jsonl, as Hugging Face's imagefolder has them, and notes.

    One lies in each folder of a split, with a line for each image: `file_name`, `mask_file_name`, `label` and the other
    columns; boxes are `objects`, arrays lists.
    """
    notes: list[str] = []
    listing, captions = _without_captions(listing)
    columns: dict[str, list[Any]] = {CAPTION: captions} if captions else {}
    boxed = all(name in listing.columns for name in _BOXES)
    for name, column in listing.columns.items():
        if boxed and name in _BOXES:
            continue
        wide = column.values.ndim > 2 or (column.values.ndim == 2 and column.values.shape[1] > MOST_COLUMNS)
        for title, values in [(name, column.values.tolist())] if wide else _json_cells(name, column, notes):
            while title in columns:
                title += "_"
            columns[title] = values
    if boxed:
        boxes, labels = listing.columns["boxes"].values, listing.columns["box_labels"]
        counts = listing.columns["num_boxes"].values
        flat = Column(labels.values[np.arange(boxes.shape[1]) < counts[:, None]], labels.attrs)
        ((_, classes), *_) = _json_cells("category", flat, notes)
        ends = np.cumsum(counts).tolist()
        columns["objects"] = [
            {"bbox": boxes[row, : stop - start].tolist(), "category": classes[start:stop]}
            for row, (start, stop) in enumerate(itertools.pairwise([0, *ends]))
        ]
    present = [False] * len(listing) if listing.masks is None or not plan.masks else listing.masks.present.tolist()
    lines: dict[str, list[str]] = {}
    for row, path in enumerate(plan.images):
        top = f"{path.split('/')[0]}/" if listing.split_names != ("all",) else ""
        values = {"file_name": path.removeprefix(top)}
        if listing.masks is not None and plan.masks:
            values["mask_file_name"] = plan.masks[row].removeprefix(top) if present[row] else ""
        values |= {title: column[row] for title, column in columns.items()}
        lines.setdefault(f"{top}metadata.jsonl", []).append(json.dumps(values))
    texts = {path: "".join(f"{line}\n" for line in found).encode() for path, found in lines.items()}
    return texts, [note.replace(" without fastload.json", "") for note in notes]


def _without_captions(listing: Listing) -> tuple[Listing, list[Any]]:
    """Returns a listing without its captions, and these: a text for each sample if all have one, else lists of texts.

    [] where there are none. A text that a table would read otherwise, such as an empty one, makes lists of them all.
    """
    columns = dict(listing.columns)
    values, counts = columns.pop(CAPTION, None), columns.pop(count_name(CAPTION), None)
    if values is None or counts is None or values.values.dtype.kind != "S" or values.values.ndim != 2:
        return listing, []
    rows = text_lists(values.values, counts.values)
    plain = all(len(row) == 1 and row[0] == row[0].strip() and row[0][:1] not in ("", "[") for row in rows)
    return replace(listing, columns=columns), [row[0] for row in rows] if plain else rows


def _json_cells(name: str, column: Column, notes: list[str]) -> Iterator[tuple[str, list[Any]]]:
    """Yields what `_cells_of` does as JSON values: numbers, null for none, or text."""
    for title, cells in _cells_of(name, column, notes):
        values: list[Any] = list(cells)
        if column.values.dtype.kind in "iuf" and all(map(_is_number, cells)):
            convert = float if column.values.dtype.kind == "f" else int
            values = [convert(cell) if cell not in ("", "nan", "inf", "-inf") else None for cell in cells]
        elif column.values.dtype.kind in "iu":  # names of classes
            values = [cell or None for cell in cells]
        yield title, values


def _is_number(cell: str) -> bool:
    try:
        return cell == "" or float(cell) is not None
    except ValueError:
        return False


def sample_fields(listing: Listing, notes: list[str]) -> Callable[[int], list[tuple[str, bytes]]]:
    """Returns a function row -> (suffix, content) of a sample's fields in a shard, without image and mask.

    `cls` is its class, `json` its key, its captions and all single values, `txt` its first caption, `NAME.npy` an
    array. Adds to notes.
    """
    listing, captions = _without_captions(listing)
    labels = listing.columns.get("labels")
    has_class = labels is not None and labels.values.ndim == 1 and labels.values.dtype.kind in "iu"
    arrays, single = dict[str, NDArray[Any]](), dict[str, list[Any]]()
    for name, column in listing.columns.items():
        if column.values.ndim > 1:
            suffix = name.lower().replace(".", "_").replace("/", "_")
            while suffix in arrays:
                suffix += "_"
            arrays[suffix] = column.values.astype(column.values.dtype.newbyteorder("<"), copy=False)
            continue
        if name != "labels" or not has_class:
            values = column.values.tolist()
            if column.values.dtype.kind == "f":
                values = [value if math.isfinite(value) else None for value in values]
            single[name] = [text_of(value) if isinstance(value, bytes) else value for value in values]
        if column.attrs.get("names") and column.values.dtype.kind in "iu":
            names = dict(enumerate(map(str, column.attrs["names"])))
            title = "label" if name == "labels" else name
            single[f"{title}_name"] = [names.get(value) for value in column.values.tolist()]
            notes.append(
                f"`{name}` are numbers in the shards; names of classes are texts in the json (`{title}_name`), which "
                f"`fastload pack` leaves out."
            )
    if vectors := [
        name for name, column in listing.columns.items() if column.values.ndim > 1 and "names" in column.attrs
    ]:
        notes.append(f"Left out are the names of the numbers in {first_few(vectors)}.")

    def of_row(row: int) -> list[tuple[str, bytes]]:
        found = [("cls", str(int(labels.values[row])).encode())] if labels is not None and has_class else []
        said: dict[str, Any] = {"key": listing.keys[row], **{name: values[row] for name, values in single.items()}}
        if captions:
            said[CAPTION] = texts = captions[row]
            found += [("txt", text.encode()) for text in ([texts] if isinstance(texts, str) else texts[:1])]
        found.append(("json", json.dumps(said).encode()))
        for suffix, values in arrays.items():
            out = io.BytesIO()
            np.lib.format.write_array(out, np.ascontiguousarray(values[row]), allow_pickle=False)
            found.append((f"{suffix}.npy", out.getvalue()))
        return found

    return of_row


def _cells_of(name: str, column: Column, notes: list[str]) -> Iterator[tuple[str, _Cells]]:
    """Yields the table columns (title, cells) for one column of the file."""
    names = tuple(column.attrs.get("names", ()))
    title = "label" if name == "labels" else name
    if column.values.ndim == 1:
        yield from _class_cells(title, column, names, notes)
        return
    for number, values in enumerate(column.values.T):
        part = names[number] if number < len(names) else str(number)
        yield part if name == "labels" else f"{name}_{part}", [_text(value) for value in values.tolist()]


def _class_cells(title: str, column: Column, names: tuple[str, ...], notes: list[str]) -> Iterator[tuple[str, _Cells]]:
    """Yields class names (an empty cell for none), or class numbers and then names; other values as they are."""
    values = column.values.tolist()
    if column.values.dtype.kind != "i" or not names or not set(values) <= {-1, *range(len(names))}:
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
    """Whether `fastload pack` would read exactly these classes from the cells."""
    if not cells:
        return True
    try:
        columns, bad = columns_of(Frame({title: values_of(cells)}, title, Splits.one(len(cells)), (title,)), [])
    except SourceError:
        return False
    found = columns.get("labels")
    if bad or found is None or found.values.ndim != 1:
        return False
    names = found.attrs.get("names", ())
    return bool(names) and [names[value] for value in found.values.tolist()] == cells


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return text_of(value)
    return repr(value) if isinstance(value, float) else str(value)


def _box_cells(listing: Listing, notes: list[str]) -> dict[str, _Cells]:
    """Returns title -> cells of the columns of boxes, with a cell for each box."""
    boxes, labels = listing.columns["boxes"].values, listing.columns["box_labels"]
    there = np.arange(boxes.shape[1]) < listing.columns["num_boxes"].values[:, None]
    sides = zip(("x", "y", "width", "height"), boxes[there].astype(np.float64).T.tolist(), strict=True)
    found = {title: [_text(value) for value in values] for title, values in sides}
    names = tuple(labels.attrs.get("names", ()))
    return found | dict(_class_cells("label", Column(labels.values[there]), names, notes))


def _rows(columns: list[_Cells], of_boxes: list[_Cells], counts: list[int]) -> Iterator[_Cells]:
    """Yields a row for each box, or one with empty cells for an image without any."""
    each = zip(*of_boxes, strict=True)
    for cells, count in zip(zip(*columns, strict=True), counts, strict=True):
        if not count:
            yield [*cells, *("" for _ in of_boxes)]
        for box in itertools.islice(each, count):
            yield [*cells, *box]


def sidecar_text(listing: Listing, plan: ExportPlan, table: bytes | None) -> bytes:
    """Returns the content of fastload.json; table is the content of manifest.csv, if there is one."""
    masks = listing.masks
    of_masks = None
    if masks is not None and plan.masks:
        of_masks = {"names": list(masks.names), "ignore_index": masks.ignore_index, "attrs": masks.attrs}
        if masks.dtype == np.uint16:
            of_masks["bits"] = 16
    present = [] if masks is None else masks.present.tolist()
    paths = [path if there else "" for path, there in zip(plan.masks, present, strict=True)] or [""] * len(listing)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "writer": writer_name(),
        "manifest": None if table is None else xxhash.xxh3_128_hexdigest(table),
        "split_names": list(listing.split_names),
        "masks": of_masks,
        "columns": [
            {
                "name": name,
                "dtype": column.values.dtype.str,
                "shape": list(column.values.shape[1:]),
                "attrs": column.attrs,
                "moves": _moves(name, column),
            }
            for name, column in listing.columns.items()
        ],
        "rows": [list(row) for row in zip(listing.keys, plan.images, paths, strict=True)],
    }
    return json.dumps(content, separators=(",", ":")).encode()


def fields_bytes(listing: Listing) -> bytes:
    """Returns the content of fields.npz: `split` and every column, for `np.load`."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        columns = {name: column.values for name, column in listing.columns.items()}
        for name, values in {"split": listing.split, **columns}.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy", _TIMESTAMP), "w", force_zip64=True) as file:
                # Without the metadata that h5py adds to the dtype of texts.
                bare = np.ascontiguousarray(values).view(values.dtype.str)
                np.lib.format.write_array(file, bare, allow_pickle=False)
    return out.getvalue()


def _moves(name: str, column: Column) -> Moves:
    """Returns how a column moves with its image: "points", "xyv" or a form of boxes by its name and axes; else ""."""
    values = column.values
    if "coordinates" in column.attrs or values.dtype.kind not in "iuf" or values.ndim < 2:
        return ""
    if name == "keypoints" and values.ndim > 2 and values.shape[-1] == 3:
        return "xyv"
    if values.shape[-1] % 2:
        return ""
    if name.lower() in BOXES and values.shape[-1] == 4:
        return form_by_names(column.attrs.get("names", ()))
    return "points" if name.lower() in POINTS else ""
