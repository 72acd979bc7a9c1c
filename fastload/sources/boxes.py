"""Boxes by sample, out of tables too; and the form of boxes or points that only a column's name shows.

A format that only names its columns does not say whether four numbers are two corners or a corner and a size. The names
of the numbers decide; else the values, if only one of the two forms lies within the images; else the form is unknown.
Packing can scale those of a known form.

A table holds boxes in four columns, one box in a row and as many rows for an image as it has boxes; or in one cell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError, SourceError
from fastload.format.ragged import Column, Moves
from fastload.images.fit import axis_letter
from fastload.options.pack import BoxForm
from fastload.sources.assemble import Draft, Splits, header_of
from fastload.sources.listing import Arrays, Listing, Reader
from fastload.sources.tables import Frame, as_list, categories, columns_of, plain_name, values_of
from fastload.system.machine import available_memory

CORNERS = ("xmin", "ymin", "xmax", "ymax")
SIZED = ("x", "y", "width", "height")
"""Names of the four numbers of a box, by two corners or by a corner and a size."""

BOXES = ("bbox", "boxes")
POINTS = ("landmarks", "keypoints")

UNKNOWN = "unknown"
"""The attribute `coordinates` of a column that cannot be scaled with the image."""

REACH = 1
"""Pixels by which boxes may reach out of their image: annotations count edges in two ways."""

_LARGE = 2**28  # bytes of boxes by sample from which on their size is looked at
_PROBED = 64  # images whose size is read: those with the largest coordinates


_SIDES = re.compile(r"left|right|(?<![a-z])[lr](?![a-z])", re.IGNORECASE)
_OTHER = {"left": "right", "right": "left", "l": "r", "r": "l"}


@dataclass(frozen=True, eq=False)
class BoxSlots:
    """The places of the B boxes of N samples in columns (N, M, ...); M: the most boxes of any sample, at least 1."""

    sample: NDArray[np.int64]  # int64 (B,), the sample of each box, -1 for a box that is left out
    slot: NDArray[np.int64]  # int64 (B,), number of each box within its sample, in their order
    counts: NDArray[np.int64]  # int64 (N,), number of boxes of each sample
    where: str  # the dataset, for messages

    @classmethod
    def of(cls, sample: NDArray[np.int64], num_samples: int, where: str) -> BoxSlots:
        """Returns where boxes lie, given the sample of each."""
        counts = np.bincount(sample[sample >= 0], minlength=num_samples).astype(np.int64)
        order = np.argsort(sample, kind="stable")[np.count_nonzero(sample < 0) :]
        slot = np.full(len(sample), -1, np.int64)
        slot[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        return cls(sample, slot, counts, where)

    @classmethod
    def without_nan(cls, boxes: NDArray[Any], sample: NDArray[np.int64], num_samples: int, where: str) -> BoxSlots:
        """Returns where boxes, (B, 4), lie, but for those that are NaN or partly NaN: they are left out."""
        return cls.of(np.where(np.isnan(boxes).any(axis=1), -1, sample), num_samples, where)

    def padded(self, values: NDArray[Any], fill: int = 0) -> NDArray[Any]:
        """Returns the values of boxes, (B, ...), by sample, (N, M, ...); `fill` stands behind the last of each."""
        most = max(1, int(self.counts.max(initial=0)))
        shape = len(self.counts), most, *values.shape[1:]
        needed = math.prod(shape) * values.dtype.itemsize
        if needed > _LARGE and (needed > 1000 * values.nbytes or needed > available_memory()):
            raise SourceError(
                f"{self.where}: one sample has {most} boxes, and each of {len(self.counts)} samples would get room for "
                f"as many ({needed:,} bytes). Leave that sample out, or the boxes."
            )
        result = np.full(shape, fill, values.dtype)
        here = self.sample >= 0
        result[self.sample[here], self.slot[here]] = values[here]
        return result

    def columns(
        self, boxes: NDArray[Any], labels: Column | None, form: BoxForm | Moves = "xywh", **marks: NDArray[Any]
    ) -> dict[str, Column]:
        """Returns the columns of B boxes of a form, as x, y, width, height, their labels and marks, and their number.

        Behind the last label of a sample stands -1.
        """
        columns = {"boxes": Column(sized_boxes(self.padded(boxes), form), {"names": SIZED}, "xywh")}
        if labels is not None:
            columns["box_labels"] = Column(self.padded(labels.values, -1), labels.attrs)
        columns |= {name: Column(self.padded(values)) for name, values in marks.items()}
        return columns | {"num_boxes": Column(self.counts)}


def keypoints_column(
    slots: BoxSlots,
    points: NDArray[np.float32],
    names: Sequence[str] = (),
    skeleton: Sequence[tuple[int, int]] = (),
    flip_pairs: Sequence[int] = (),
) -> Column:
    """Returns the column `keypoints`, float32 (N, M, K, 3): x, y and visibility, which is COCO's.

    0: not labelled, and then all three are 0, as behind the last box of a sample; 1: labelled, but hidden; 2: visible.
    Attributes, as far as known: `names` of the K points; `skeleton`, the pairs of points that are joined, one pair
    behind the other; `flip_pairs`, for each point its number in a mirrored image.

    Args:
        slots: where the B objects lie.
        points: (B, K, 3).
        names: K names.
        skeleton: pairs of numbers of points, from 0.
        flip_pairs: K numbers of points; (): by the names, such as left_eye and right_eye.
    """
    flip_pairs = tuple(flip_pairs) or flip_pairs_of(names)
    joined = tuple(number for pair in skeleton for number in pair)
    attrs = {"names": tuple(names), "skeleton": joined, "flip_pairs": flip_pairs}
    return Column(slots.padded(points), {name: value for name, value in attrs.items() if value}, "xyv")


def flip_pairs_of(names: Sequence[str]) -> tuple[int, ...]:
    """Returns for each point the number of the one of the other side, by their names, else its own; () for no sides."""
    number = {name.lower(): at for at, name in enumerate(names)}
    mirrored = [_SIDES.sub(lambda found: _OTHER[found[0].lower()], name.lower()) for name in names]
    pairs = [number.get(name, at) for at, name in enumerate(mirrored)]
    pairs = [other if pairs[other] == at else at for at, other in enumerate(pairs)]
    return () if pairs == list(range(len(pairs))) else tuple(pairs)


def sized_boxes(boxes: NDArray[Any], form: BoxForm | Moves) -> NDArray[Any]:
    """Returns boxes, (..., 4), as x, y, width, height, given as the form says ("auto": they are that already)."""
    if form == "yxyx":
        boxes, form = boxes[..., [1, 0, 3, 2]], "xyxy"
    first, second = boxes[..., :2], boxes[..., 2:]
    if form == "xyxy":
        return np.concatenate([first, second - first], axis=-1)
    return np.concatenate([first - second / 2, second], axis=-1) if form == "cxcywh" else boxes


def in_stored_form(boxes: NDArray[Any], form: BoxForm | Moves) -> tuple[NDArray[Any], Moves, tuple[str, ...]]:
    """Returns boxes, (..., 4), as they are stored, how they move with the image, and the names of their numbers.

    Two corners stay corners, x before y; all others become x, y, width, height.
    """
    if form == "yxyx":
        boxes, form = boxes[..., [1, 0, 3, 2]], "xyxy"
    return (boxes, "xyxy", CORNERS) if form == "xyxy" else (sized_boxes(boxes, form), "xywh", SIZED)


def declared_size(height: object, width: object) -> tuple[int, int]:
    """Returns the height and width that annotations declare, numbers or text; (0, 0) unless both are sizes."""
    if type(height) is int is type(width) or type(height) is str is type(width):
        try:
            whole_numbers = int(height), int(width)
            if min(whole_numbers) > 0 and max(whole_numbers) < 2**31:
                return whole_numbers
        except ValueError:
            pass  # 12.0
    try:
        size = float(str(height)), float(str(width))
    except ValueError:
        return 0, 0
    whole = all(0 < side < 2**31 and side.is_integer() for side in size)
    return (int(size[0]), int(size[1])) if whole else (0, 0)


def box_fits(boxes: NDArray[Any], form: BoxForm | Moves, sizes: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns whether boxes, (..., 4), can be of a form: in images of these sizes (width, height), by a pixel, (...).

    The corner that is given itself, or the middle, is not looked at: it lies as well inside as outside in any form.
    """
    sized = sized_boxes(boxes, form)
    low, size = sized[..., :2], sized[..., 2:]
    ends = boxes[..., 2:] if form == "xyxy" else low + size  # without rounding
    inside = (low >= np.minimum(boxes[..., :2], 0) - REACH) & (ends <= sizes + REACH)
    fits: NDArray[np.bool_] = (inside & (size >= 0)).all(axis=-1)
    return fits


def reaches_out(boxes: NDArray[Any], form: Moves, sizes: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns which sides of boxes, (..., 4), lie outside of images of these sizes (width, height) by over a pixel.

    Of the (..., 4) result the first two are the left and top side, the others the right and bottom one.
    """
    low, high = boxes[..., :2], boxes[..., 2:] + (boxes[..., :2] if form == "xywh" else 0)
    found: NDArray[np.bool_] = np.concatenate([low < -REACH, high > sizes + REACH], axis=-1)
    return found


def with_box_forms(listing: Listing, form: BoxForm = "auto") -> Listing:
    """Returns the listing with the form of its columns of boxes and points, or with a mark that it is unknown.

    `form` is what the user says of boxes whose column does not say it.

    Also with the sizes that its columns declare for the images. Notes say which. Columns whose form is known, in
    pixels, and datasets without images remain as they are.
    """
    if listing.files is None:
        return listing
    columns, notes = dict(listing.columns), list(listing.notes)
    for name, column in listing.columns.items():
        if column.moves and _are_fractions(column.values):
            columns[name] = replace(column, attrs=column.attrs | {"coordinates": UNKNOWN}, moves="")
            notes.append(f"Column {name!r} seems to hold fractions of the image, not pixels: not scaled with it.")
            continue
        known = column.moves or "coordinates" in column.attrs or column.values.dtype.kind not in "iuf"
        if known or name.lower() not in BOXES + POINTS:
            continue
        is_box = name.lower() in BOXES
        if is_box and form != "auto" and column.values.ndim > 1 and column.values.shape[-1] == 4:
            values, moves, numbers = in_stored_form(column.values, form)
            columns[name] = replace(column, values=values, attrs={"names": numbers} | column.attrs, moves=moves)
            middle = " (by their middle)" * (form == "cxcywh")
            notes.append(f"Column {name!r} holds {_SHOWN[moves]}, as asked for{middle}.")
            continue
        moves, why = _box_form(listing.files, column) if is_box else _point_form(name.lower(), column)
        if moves:
            named = {} if moves == "points" else {"names": CORNERS if moves == "xyxy" else SIZED}
            columns[name] = replace(column, attrs=named | column.attrs, moves=moves)
            notes.append(f"Column {name!r} holds {_SHOWN[moves]}, {why}.")
        else:
            columns[name] = replace(column, attrs=column.attrs | {"coordinates": UNKNOWN})
            notes.append(f"Column {name!r} holds coordinates in an unknown form: {why}.")
    declared = listing.declared
    if declared is None and (found := _declared_by(columns)) is not None:
        declared, names = found
        notes.append(f"Columns {names} are taken for the size of the image that boxes were drawn on.")
    return replace(listing, columns=columns, notes=tuple(notes), declared=declared)


def _declared_by(columns: dict[str, Column]) -> tuple[NDArray[np.int64], str] | None:
    """Returns the sizes of images, int64 (N, 2), by columns such as image_height and image_width, and their names.

    None: there are none next to boxes. Columns of a plain name, height and width, may be sizes of something else, and
    count only if all boxes lie within.
    """
    boxes = [column for column in columns.values() if column.moves in ("xywh", "xyxy")]
    known = {name.lower(): name for name, column in columns.items() if column.values.ndim == 1}
    for prefix, short in [(prefix, short) for prefix in ("image_", "img_", "") for short in (False, True)]:
        names = [f"{prefix}{side[0] if short else side}" for side in ("height", "width")]
        if not boxes or not known.keys() >= set(names) or (short and not prefix):
            continue
        height, width = (columns[known[name]].values for name in names)
        if height.dtype.kind not in "iu" or width.dtype.kind not in "iu":
            continue
        sizes = np.stack([height, width], axis=1).astype(np.int64)
        limits = np.where(sizes > 0, sizes, np.iinfo(np.int64).max)[:, None, ::-1]
        four = [np.nan_to_num(box.values.astype(np.float64)).reshape(len(sizes), -1, 4) for box in boxes]
        if prefix or all(box_fits(each, box.moves, limits).all() for each, box in zip(four, boxes, strict=True)):
            return sizes, " and ".join(known[name] for name in names)
    return None


_SHOWN = {"points": "points x, y", "xywh": "boxes x, y, width, height", "xyxy": "boxes by two corners"}


def form_by_names(names: Sequence[str]) -> Moves:
    """Returns the form of boxes whose numbers have these names; "" if they are of neither form."""
    forms: dict[str, Moves] = {"xyxy": "xyxy", "xywh": "xywh"}
    return forms.get("".join(map(axis_letter, names)), "")


def _point_form(name: str, column: Column) -> tuple[Moves, str]:
    last = column.values.shape[-1] if column.values.ndim > 1 else 1
    if last % 2 or (name == "keypoints" and last != 2 and last % 3 == 0):
        return "", f"{last} numbers in a row are no pairs x, y, or may be triples"
    if _are_fractions(column.values):
        return "", "they seem to be fractions of its size"
    return "points", "by its name"


def _box_form(files: Reader, column: Column) -> tuple[Moves, str]:
    values = column.values
    if values.ndim not in (2, 3) or values.shape[-1] != 4:
        return "", f"a row is {values.shape[1:]}, not 4 numbers or (M, 4)"
    if names := column.attrs.get("names"):
        moves = form_by_names(names)
        return moves, "by the names of its numbers" if moves else f"named {', '.join(names)}"
    if _are_fractions(values):
        return "", "they seem to be fractions of its size"
    boxes = values.reshape(len(values), -1, 4).astype(np.float64)
    if (boxes == -1).all(axis=2).any():
        return "", "some are -1 throughout"
    boxes[np.isnan(boxes).any(axis=2)] = 0  # an absent box fits both forms as zeros
    corners, sized = (bool(box_fits(boxes, form, np.array(np.inf)).all()) for form in ("xyxy", "xywh"))
    if corners and sized:
        rows, sizes = _sizes(files, boxes)
        corners, sized = (bool(box_fits(boxes[rows], form, sizes).all()) for form in ("xyxy", "xywh"))
    if corners == sized:
        return "", f"{'both' if corners else 'neither'} two corners and a corner with a size would fit"
    return ("xyxy" if corners else "xywh"), "as only those lie within the images"


def _sizes(files: Reader, boxes: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the rows whose boxes reach furthest (as x, y, w, h), and width and height of their images, (R, 1, 2)."""
    if isinstance(files, Arrays):
        height, width = files.shape[:2]
        return np.arange(len(boxes)), np.full((len(boxes), 1, 2), (width, height))
    reach = (boxes[..., :2] + boxes[..., 2:]).max(axis=1, initial=0)
    rows, sizes = [], []
    for row in np.unique(np.argsort(-reach, axis=0, kind="stable")[:_PROBED]).tolist():
        try:
            header = header_of(files, row)
        except ImageError:
            continue  # packing reports the images that cannot be read
        rows.append(row)
        sizes.append((header.width, header.height))
    return np.array(rows, np.int64), np.array(sizes, np.int64).reshape(-1, 1, 2)


def _are_fractions(values: NDArray[Any]) -> bool:
    if values.dtype.kind != "f" or not values.size:
        return False
    known = values[np.isfinite(values)]
    return bool(known.any() and known.min() >= 0 and known.max() <= 1)


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
