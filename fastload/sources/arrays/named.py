"""Lists named arrays of equal length, from whatever file, as one dataset: images, masks, labels and other columns.

images or x or data, uint8 or uint16 (N, H, W[, C]) or (N, C, H, W)     the images
masks, or labels that fit the images, integers (N, H, W)                their masks
labels or y or targets                                                  column `labels`
class_names, filenames, split: texts                                    names of classes, keys, splits
anything else that is numeric, such as tokens and attention_mask        a column of its name
x_train, train_images, train/images                                     the same, by split
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format.column import Column
from fastload.sources.arrays.raw_rows import JoinedRows, MemoryRows
from fastload.sources.arrays.roles import NamedArray, SplitArrays, by_split, mask_shapes, size_of, with_usual_names
from fastload.sources.assemble import Draft, Samples, Splits
from fastload.sources.listing import SPLITS, Arrays, Masks, first_few
from fastload.sources.tables.frame import categories
from fastload.sources.tables.values import Values
from fastload.system.machine import available_memory


def samples_of_arrays(draft: Draft, arrays: list[NamedArray], *, masks_wanted: bool = True) -> Samples:
    """Returns the samples of arrays of equal length, whose names say what they hold.

    Keys are the texts of an array `filenames`, else the split and the number of the row.

    Args:
        draft: notes are added, the first about what was recognised.
        arrays: all arrays of the files.
        masks_wanted: whether masks are packed.

    Raises:
        SourceError: lengths differ; images, labels or masks have a wrong type or shape; there is no array at all.
    """
    where, notes = draft.where, draft.notes
    arrays = with_usual_names([array for array in arrays if array.shape], where, notes)
    groups = by_split(arrays, notes)
    parts = [SplitArrays.of(name, group, where, notes) for name, group in groups.items()]
    columns = _columns(parts, where, notes)
    shown = first_few([f"{array.name} {array.dtype} {array.shape}" for group in groups.values() for array in group], 8)
    counts = [part.num_rows for part in parts]
    draft.title = f"Layout {draft.layout}: arrays of {' + '.join(map(str, counts))} rows: {shown}."
    keys = [key for part in parts for key in part.keys(len(parts) > 1)]
    splits = Splits(np.repeat(np.arange(len(parts), dtype=np.uint8), counts), tuple(groups))
    if len(parts) == 1 and (texts := parts[0].texts.get("split")):
        splits = _text_splits(texts)
    files, masks = _images(parts, where), None
    if masks_wanted:
        masks = _masks(parts, where)
    elif left_out := [part.masks.name for part in parts if part.masks is not None]:
        notes.append(f"Masks were left alone, as asked for: {first_few(left_out)}.")
    row_bytes = sum(column.values.nbytes for column in columns.values()) // max(1, len(keys))
    if files is not None:
        row_bytes = int(np.prod(files.shape)) * files.dtype.itemsize
    else:
        notes.append("There are no images among the arrays.")
    newest = [max(array.mtime_ns for array in part.arrays) for part in parts]
    mtimes = np.repeat(np.array(newest, np.int64), counts)
    return Samples(keys, files, np.full(len(keys), row_bytes, np.int64), mtimes, splits, columns, masks)


def _images(parts: list[SplitArrays], where: str) -> Arrays | None:
    with_images = [part for part in parts if part.images]
    if not with_images:
        return None
    if len(with_images) < len(parts):
        lacking = [part.name for part in parts if not part.images]
        raise SourceError(f"{where}: there are images for {with_images[0].name}, none for {first_few(lacking)}.")
    rows = [
        (array.rows(shape, axes), array.shape[0])
        for part in parts
        if part.images
        for array, axes, shape in [part.images]
    ]
    return rows[0][0] if len(rows) == 1 else JoinedRows.of(rows)


def _masks(parts: list[SplitArrays], where: str) -> Masks | None:
    """Returns the masks of all splits, None if no split has any."""
    given = [part.masks for part in parts if part.masks is not None]
    if not given:
        return None
    rows: list[tuple[Arrays, int]] = []
    for part in parts:
        if part.masks is None or part.images is None:
            raise SourceError(f"{where}: there are masks for some splits, none for {part.name}.")
        rows.append((mask_rows(part.masks, size_of(part.images)), part.num_rows))
    files = rows[0][0] if len(rows) == 1 else JoinedRows.of(rows)
    return Masks(files, np.ones(sum(count for _, count in rows), np.bool_), given[0].names)


def _columns(parts: list[SplitArrays], where: str, notes: list[str]) -> dict[str, Column]:
    needed = sum(
        array.num_bytes for part in parts for array in (*part.others.values(), part.labels) if array is not None
    )
    if needed > available_memory():
        raise SourceError(
            f"{where}: the arrays other than images take {needed:,} bytes, more than the memory there is."
        )
    columns: dict[str, Column] = {}
    if any(part.labels is not None for part in parts):
        name, column = _labels(parts, notes)
        columns[name] = column
    for name in dict.fromkeys(name for part in parts for name in part.others):
        lacking = [part.name for part in parts if name not in part.others]
        if lacking:
            raise SourceError(f"{where}: there is no {name} for {first_few(lacking)}, while other splits have it.")
        stored = [part.others[name] for part in parts]
        if len({array.shape[1:] for array in stored}) > 1:
            raise SourceError(f"{where}: {name} has rows of different shapes: {[array.shape for array in stored]}.")
        if name in columns:
            raise SourceError(f"{where}: more than one array would become {name}. Rename one.")
        values = np.concatenate([native(array.values()) for array in stored])
        columns[name] = Column(values, {"names": stored[0].names} if stored[0].names else {})
    return columns


def _labels(parts: list[SplitArrays], notes: list[str]) -> tuple[str, Column]:
    """Returns the column of labels and its name, `labels` or (for numbers that are no classes) `targets`.

    Raises:
        SourceError: labels are NaN, or do not fit int64.
    """
    given = [part.labels for part in parts if part.labels is not None]
    classes = next((tuple(part.texts["names"].texts()) for part in parts if "names" in part.texts), given[0].names)
    if all(array.is_text for array in given):
        texts = np.array([text for array in given for text in array.texts()], object)
        column = categories(Values("text", texts, np.zeros(len(texts), np.bool_)))
        values, classes = column.values, column.attrs["names"]
    else:
        read = [label_numbers(array) for array in given]
        if len({values.shape[1:] for values in read}) > 1:
            raise SourceError(f"{given[0].where}: labels of different shapes: {[array.shape for array in given]}.")
        values = np.concatenate(read)
    attrs = {"names": classes} if classes else {}
    is_vector = values.ndim > 1 and values.min(initial=0) >= 0 and values.max(initial=0) <= 1
    if values.dtype.kind == "f" or values.ndim > 1:
        what = "targets" if values.dtype.kind == "f" or not is_vector else "vectors of labels"
        if len(given) < len(parts):
            raise SourceError(f"{given[0].where}: there are {what} for some splits only.")
        if what != "targets":
            return "labels", Column(values.astype(np.uint8), attrs)
        held = "numbers that are no classes" if values.dtype.kind == "f" else f"{values.shape[1:]} numbers a row"
        notes.append(f"{given[0].name} holds {held}: packed as targets.")
        return "targets", Column(values)
    labels = np.full(sum(part.num_rows for part in parts), -1, np.int64)
    labels[np.repeat([part.labels is not None for part in parts], [part.num_rows for part in parts])] = values
    notes += [f"There are no labels for {part.name}: they are -1." for part in parts if part.labels is None]
    return "labels", Column(labels, attrs)


def _text_splits(array: NamedArray) -> Splits:
    names = [SPLITS.get(text.lower(), text) for text in array.texts()]
    if (count := len(set(names))) > 255:
        raise SourceError(f"{array.where}: names {count} splits; 255 can be. Rename the array, if it holds no splits.")
    return Splits.of(names)


def label_numbers(array: NamedArray) -> NDArray[Any]:
    """Returns labels as int64 (n,) or (n, A); as floats (n, ...) if some are not whole numbers."""
    values = array.values()
    if values.dtype.kind not in "biuf":
        raise SourceError(f"{array.where}: the labels are {values.dtype}; expected integers or texts. Convert them.")
    if values.ndim > 1 and set(values.shape[1:]) == {1}:
        values = values.reshape(-1)
    if values.dtype.kind == "f":
        rows = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
        if len(rows):
            shown = first_few([str(row) for row in rows.tolist()])
            raise SourceError(
                f"{array.where}: labels that are NaN or infinite ({len(rows)}), in the rows {shown}. "
                "Give them a class, -1 for none, or remove those rows."
            )
        if np.any(values != np.round(values)) or np.abs(values).max(initial=0) >= 2**53:
            return native(values)
    if values.dtype == np.uint64 and values.max(initial=0) >= 2**63:
        raise SourceError(f"{array.where}: labels beyond what int64 holds. Number the classes from 0.")
    return values.astype(np.int64)


def native(values: NDArray[Any]) -> NDArray[Any]:
    """Returns an array in native byte order and C order; booleans become 0 and 1."""
    dtype = np.dtype(np.uint8) if values.dtype == np.bool_ else values.dtype.newbyteorder("=")
    return np.ascontiguousarray(values, dtype=dtype)


def mask_rows(masks: NamedArray, size: tuple[int, int]) -> Arrays:
    """Returns the reader of masks as uint8: in place, or of a copy in memory if they are stored in wider integers.

    Raises:
        SourceError: masks differ from the images in size, or hold values beyond 0 to 255.
    """
    height, width = size
    wanted = f"integers from 0 to 255, (N, {height}, {width})"
    if masks.shape[1:] not in mask_shapes(size):
        raise SourceError(
            f"{masks.where}: the masks are {masks.dtype} {masks.shape}, the images {height}x{width}; expected {wanted}."
        )
    if masks.dtype == np.uint8:
        return masks.rows(size, "HWC")
    if masks.num_bytes > available_memory():
        raise SourceError(
            f"{masks.where}: {masks.num_bytes:,} bytes do not fit into memory, where masks of {masks.dtype} "
            "are made uint8. Save them as uint8."
        )
    values = masks.values()
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 255:
        raise SourceError(
            f"{masks.where}: the masks hold {low} to {high}; expected {wanted}. Number the classes "
            "from 0, with 255 for none."
        )
    return MemoryRows.of(values.reshape(len(values), height, width).astype(np.uint8))
