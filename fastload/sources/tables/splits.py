"""Finds the split of each row of a table: by a column, by the table's name, or by the images' folders."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.listing import SPLITS, SourceOptions, first_few, in_split_order
from fastload.sources.tables.columns import plain_name
from fastload.sources.tables.image_index import folder_splits
from fastload.sources.tables.image_tables import TableRows, text_cells
from fastload.sources.tree import Tree, key_of

SPLIT_COLUMNS = (
    "split data_split dataset_split subset partition set phase fold is_valid is_val is_test is_train"
).split()
MASK_COLUMNS = (
    "mask mask_path mask_file mask_file_name mask_filename mask_name mask_id segmentation_path annotation"
).split()
MOST_SPLITS = 64


def splits_by_column(rows: TableRows, options: SourceOptions, notes: list[str]) -> tuple[list[str], str]:
    """Returns the split of each row by a column or by the table's name ("" if neither says it), and that column.

    Raises:
        SourceError: there is no such column; it is empty for some rows, or names too many splits.
    """
    count = len(rows.lines)
    name = options.split_column
    if name and name not in rows.cells:
        raise SourceError(
            f"{rows.tables[0].rows.path}: there is no column {name!r} for splits. There are {', '.join(rows.cells)}."
        )
    plain = {plain_name(column): column for column in rows.cells}
    for candidate in [plain_name(name)] if name else [known for known in SPLIT_COLUMNS if known in plain]:
        column = name or plain[candidate]
        said = split_cells(text_cells(rows.cells[column]), candidate)
        known = {split for split in said if split}
        if not name and candidate in ("set", "partition", "phase", "fold", "subset") and len(known) > MOST_SPLITS:
            continue
        if len(known) > 255:
            raise SourceError(f"{rows.tables[0].rows.path}: column {column!r} names {len(known)} splits; 255 can be.")
        empty = [row for row, split in enumerate(said) if not split]
        if empty:
            raise SourceError(
                f"{rows.tables[0].rows.path}: rows without a split in column {column!r} ({len(empty)}): "
                f"{first_few([rows.location(row) for row in empty[:6]])}. Fill them in, or name another column with "
                "`--split-column`."
            )
        notes.append(f"Splits by column {column!r}: {', '.join(sorted(known))}.")
        return said, column
    by_table = [table.split for table in rows.tables]
    if any(by_table):
        notes.append(f"Splits by table: {', '.join(f'{t.split} ({key_of(t.name)})' for t in rows.tables if t.split)}.")
    return [by_table[i] for i in rows.table.tolist()] if any(by_table) else [""] * count, ""


def split_cells(cells: list[str], column: str) -> list[str]:
    """Returns the split that each cell means, "" for an empty cell; cells of `is_valid` are true or false."""
    if column.startswith("is_"):
        this, that = {"is_test": ("test", "train"), "is_train": ("train", "val")}.get(column, ("val", "train"))
        truth = {"1": this, "true": this, "1.0": this, "yes": this, "0": that, "false": that, "0.0": that, "no": that}
        return [truth.get(cell.lower(), "") for cell in cells]
    return [SPLITS.get(cell.lower(), "" if cell.lower() == "nan" else cell) for cell in cells]


def splits_of_folders(
    split: list[str], images: Tree, positions: NDArray[np.int64], bad: dict[int, str], notes: list[str]
) -> list[str]:
    """Returns the split of each row by its image's folders, if nothing else says it and all images lie in such."""
    if any(split):
        return split
    good = [row for row in range(len(split)) if row not in bad]
    found = folder_splits([images.names[i] for i in positions[good].tolist()])
    if not found or not all(found):
        return split
    notes.append(f"Splits by the images' folders: {', '.join(sorted(set(found)))}.")
    said = list(split)
    for row, name in zip(good, found, strict=True):
        said[row] = name
    return said


def split_index(split: list[str]) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """Returns the index of each row's split (uint8), and the names of the splits; "" becomes the split `all`."""
    known = set(split) - {""}
    if not known:
        return np.zeros(len(split), np.uint8), ("all",)
    if "" in split:
        known.add("all")
    names = in_split_order(known)
    index = {name: i for i, name in enumerate(names)}
    return np.array([index[name or "all"] for name in split], np.uint8), names
