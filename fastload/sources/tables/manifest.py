"""Layout of tables that name images, as CSV, TSV or JSON lines: the table itself is given, or a folder that holds it.

    photos/train.csv, photos/train/0001.jpg             Kaggle: ids without suffix, one table for each split
    photos/labels.csv, photos/images/0001.jpg           one table at the top, with or without a column of splits
    photos/train/metadata.csv, photos/train/0001.jpg    Hugging Face's imagefolder

The meaning of a column is found by its name and cells; notes say how each was understood. If a table names the images,
names of folders are not labels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.assemble import fill_value
from fastload.sources.listing import Files, Listing, Masks, OnError, SourceOptions, first_few
from fastload.sources.open_tree import open_tree
from fastload.sources.tables.boxes import OBJECTS, box_columns, columns_with_boxes, nested_boxes, spread_boxes
from fastload.sources.tables.columns import missing_labels, plain_name
from fastload.sources.tables.image_index import ImageIndex, common_folders
from fastload.sources.tables.image_tables import TableRows, find_tables, join_rows, manifest_evidence, text_cells
from fastload.sources.tables.splits import MASK_COLUMNS, split_index, splits_by_column, splits_of_folders
from fastload.sources.tables.values import Values, values_of
from fastload.sources.tree import Tree, key_of

__all__ = ["list_manifest", "manifest_evidence"]


def list_manifest(
    source: str | Path | Tree, *, on_error: OnError = "fail", options: SourceOptions | None = None
) -> Listing:
    """Returns the listing of the images that a table names, in its order.

    Columns: `labels` (classes, or vectors of 0 and 1), `targets` of floats, boxes, and other columns of numbers or
    recurring text by their own names.

    Raises:
        SourceError: a table is broken; a row has no image or no label, or an image has two rows without boxes (unless
            skipped); a path leads out of the folder.
    """
    options = options or SourceOptions()
    tree = open_tree(source)
    outside = tree.file or options.root is not None
    images = open_tree(options.root or tree.path) if outside else tree
    index = ImageIndex(images)
    tables, notes = find_tables(tree, options, lambda base: index.at("" if outside else base))
    where = str(tree.given)
    rows = join_rows(tables)
    notes = [
        f"Layout manifest, recognised by {first_few([key_of(table.name) for table in tables])}; images by column "
        f"{' and '.join(dict.fromkeys(repr(table.image) for table in tables))}.",
        *[note for table in tables for note in table.rows.notes],
        *notes,
    ]
    split, split_column = splits_by_column(rows, options, notes)
    names, positions, bad = _positions(rows, images, index, split, notes)
    if not split_column:
        split = splits_of_folders(split, images, positions, bad, notes)
    skipped = _leave_out(bad, names, rows, where, on_error)
    left = {name: cells for name, cells in rows.cells.items() if name != split_column}
    left, spread = spread_boxes(left)
    if spread:
        notes.append(f"Column {spread!r} holds boxes in one cell, taken for x, y, width, height.")
    kept = np.array([row for row in range(len(names)) if row not in bad], np.int64)
    if len(kept) == 0:
        raise SourceError(f"{where}: not one row names an image that is there, e.g. {names[0]!r} ({rows.location(0)}).")
    sample_rows, sample = _samples_of(positions[kept], names, rows, kept, left, where, on_error, skipped)
    kept = kept[sample_rows >= 0] if sample is None else kept
    first = kept if sample is None else kept[sample_rows]
    table = {name: values_of([cells[row] for row in kept.tolist()]) for name, cells in left.items()}
    _refuse_two_splits(split, kept, first, sample, names, rows, where)
    masks, mask_positions = _masks(table, rows, names, kept, sample, split, images, index, options, notes, where)
    split_rows, split_names = split_index([split[row] for row in first.tolist()])
    nested = None
    if sample is None and (name := next((name for name in OBJECTS if name in table), "")):
        nested = nested_boxes(
            [left[name][row] for row in kept.tolist()], lambda k: f"{where}: {rows.location(int(kept[k]))}"
        )
        if nested:
            notes.append(f"Boxes by column {name!r}, taken for x, y, width, height.")
            del table[name]
    columns, lost, said = columns_with_boxes(
        table, sample, split_rows, split_names, options, where, lambda row: rows.location(int(kept[row])), on_error
    )
    notes += said
    columns = (nested or {}) | columns
    if lost and on_error == "fail":
        raise missing_labels(lost, lambda row: f"{names[first[row]]} ({rows.location(int(first[row]))})", where)
    skipped += [(key_of(names[first[i]]), f"{why} ({rows.location(int(first[i]))})") for i, why in sorted(lost.items())]
    at = positions[first]
    used = np.union1d(positions, mask_positions)
    unused = [key_of(images.names[i]) for i in np.setdiff1d(images.images(), used).tolist()]
    if unused:
        notes.append(f"Images that no row names were left alone ({len(unused)}): {first_few(unused)}.")
    sizes, mtimes = images.sizes[at], images.mtimes_ns[at]
    if masks is not None:
        # A resumed pack must notice a changed mask as well as a changed image.
        mask_rows = np.maximum(mask_positions, 0)
        sizes = sizes + np.where(masks.present, images.sizes[mask_rows], 0)
        mtimes = np.where(masks.present, np.maximum(mtimes, images.mtimes_ns[mask_rows]), mtimes)
    listing = Listing(
        layout="manifest",
        keys=tuple([key_of(images.names[i]) for i in at.tolist()]),
        split=split_rows,
        split_names=split_names,
        columns=columns,
        notes=(*notes, *dict.fromkeys((*tree.notes, *images.notes))),
        sizes=sizes,
        mtimes_ns=mtimes,
        files=images.files.take(at),
        skipped=tuple(skipped),
        masks=masks,
    )
    good = np.delete(np.arange(len(first)), list(lost))
    if len(good) == 0:
        raise missing_labels(lost, lambda row: f"{names[first[row]]} ({rows.location(int(first[row]))})", where)
    return listing.take(good) if lost else listing


def _positions(
    rows: TableRows, images: Tree, index: ImageIndex, split: list[str], notes: list[str]
) -> tuple[list[str], NDArray[np.int64], dict[int, str]]:
    """Returns the name of each row's image, its position in the tree (-1 for none), and row -> why it has none."""
    names = rows.images
    broken = dict(images.broken)
    broken |= {name.rpartition("/")[2]: reason for name, reason in images.broken}
    positions = np.full(len(names), -1, np.int64)
    bad: dict[int, str] = {}
    for i, table in enumerate(rows.tables):
        these = np.flatnonzero(rows.table == i)
        here = index.at(table.base, table.rows.legacy)
        found = here.find([names[row] for row in these.tolist()], [split[row] for row in these.tolist()])
        positions[these] = found.positions
        for k in np.flatnonzero(found.positions < 0).tolist():
            row = int(these[k])
            reason = found.reasons.get(k) or broken.get(names[row]) or broken.get(table.base + names[row])
            bad[row] = reason or ("there is no such image" if names[row] else "names no image")
        if found.renamed:
            notes.append(f"Rows of {key_of(table.name)} name another suffix than the files have ({found.renamed}).")
    good = positions[positions >= 0]
    folders = common_folders([images.names[i] for i in good.tolist()])
    shown = first_few([f"{folder or 'the top'} ({count})" for folder, count in folders], 4)
    notes.append(f"Images that rows name lie in {shown}. Names of folders are not labels here.")
    return names, positions, bad


def _leave_out(
    bad: dict[int, str], names: list[str], rows: TableRows, where: str, on_error: OnError
) -> list[tuple[str, str]]:
    def named(row: int) -> str:
        return key_of(names[row]) or "a row"

    if bad and on_error == "fail":
        shown = first_few([f"{named(row)} ({rows.location(row)}): {reason}" for row, reason in sorted(bad.items())])
        raise SourceError(
            f"{where}: rows without their image ({len(bad)}): {shown}. Put the images back, or leave those rows out "
            "with `--on-error skip`."
        )
    return [(named(row), f"{reason} ({rows.location(row)})") for row, reason in sorted(bad.items())]


def _samples_of(
    positions: NDArray[np.int64],
    names: list[str],
    rows: TableRows,
    kept: NDArray[np.int64],
    left: dict[str, list[Any]],
    where: str,
    on_error: OnError,
    skipped: list[tuple[str, str]],
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Returns which rows make one sample: several rows of an image are its boxes, if the table has columns of boxes.

    Returns:
        Without several rows of boxes: int64 (R,), -1 for rows that are left out, and None. With them: int64 (N,), the
        first row of each sample, and int64 (R,), the sample of each row.

    Raises:
        SourceError: images have several rows without boxes (unless skipped).
    """
    unique, first, inverse, counts = np.unique(positions, return_index=True, return_inverse=True, return_counts=True)
    if len(unique) == len(positions):
        return np.arange(len(positions)), None
    if box_columns(left)[1]:
        order = np.argsort(first)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        return first[order], rank[inverse]
    twice: list[tuple[str, str]] = []
    result = np.arange(len(positions))
    by_image = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
    for k in np.flatnonzero(counts > 1).tolist():
        these = by_image[k]
        result[these] = -1
        lines = " and ".join(rows.location(int(kept[row])) for row in these[:4])
        twice.append((key_of(names[kept[first[k]]]), f"has {counts[k]} rows: {lines}"))
    if on_error == "fail":
        shown = first_few([f"{key} {reason}" for key, reason in twice])
        raise SourceError(
            f"{where}: images with more than one row ({len(twice)}): {shown}. Remove the wrong rows, or leave those "
            "images out with `--on-error skip`."
        )
    skipped += twice
    return result, None


def _refuse_two_splits(
    split: list[str],
    kept: NDArray[np.int64],
    first: NDArray[np.int64],
    sample: NDArray[np.int64] | None,
    names: list[str],
    rows: TableRows,
    where: str,
) -> None:
    if sample is None:
        return
    for row, begin in zip(kept.tolist(), first[sample].tolist(), strict=True):
        if split[row] != split[begin]:
            raise SourceError(
                f"{where}: {key_of(names[row])} is in two splits: {split[begin]} ({rows.location(begin)}) and "
                f"{split[row]} ({rows.location(row)}). An image can be in one."
            )


def _masks(
    table: dict[str, Values],
    rows: TableRows,
    names: list[str],
    kept: NDArray[np.int64],
    sample: NDArray[np.int64] | None,
    split: list[str],
    images: Tree,
    index: ImageIndex,
    options: SourceOptions,
    notes: list[str],
    where: str,
) -> tuple[Masks | None, NDArray[np.int64]]:
    """Returns the masks that a column names, and their positions in the tree; removes the column from the table.

    Raises:
        SourceError: a mask has no file, or rows of one image name different masks.
    """
    nowhere = np.zeros(0, np.int64)
    plain = {plain_name(name): name for name in table}
    name = next((plain[known] for known in MASK_COLUMNS if known in plain), "")
    if not name or table[name].kind not in ("text", "int"):
        return None, nowhere
    cells = text_cells(rows.cells[name][row] for row in kept.tolist())  # as written: 007 is no 7
    if table[name].kind == "int" and len(set(cells)) < len(cells):
        return None, nowhere  # for example 0 and 1 for whether there is a mask
    base = index.at(rows.tables[0].base, rows.tables[0].rows.legacy)
    if sum(base.hits(cells[:50])) == 0:
        return None, nowhere  # for example run lengths
    del table[name]
    if options.masks == "none":
        notes.append(f"Masks in column {name!r} were left alone, as asked for.")
        return None, nowhere
    found = base.find(cells, [split[row] for row in kept.tolist()], masks=True)
    lost = [i for i in np.flatnonzero(found.positions < 0).tolist() if cells[i]]
    if lost:
        shown = first_few([f"{cells[i]} ({rows.location(int(kept[i]))})" for i in lost[:6]])
        raise SourceError(
            f"{where}: masks that rows name in column {name!r} have no file ({len(lost)}): {shown}. Put them back, "
            "empty those cells, or pack without masks: `--masks none`."
        )
    positions = found.positions
    if sample is not None:  # any row of an image may name its mask
        positions = np.full(int(sample.max()) + 1, -1, np.int64)
        np.maximum.at(positions, sample, found.positions)
        other = np.flatnonzero((found.positions >= 0) & (found.positions != positions[sample]))
        if len(other):
            shown = first_few([f"{key_of(names[kept[i]])} ({rows.location(int(kept[i]))})" for i in other[:6]])
            raise SourceError(
                f"{where}: rows of one image name different masks in column {name!r} ({len(other)}): {shown}. One mask "
                "an image can be packed: join them to one, or pack without masks: `--masks none`."
            )
    present = positions >= 0
    if not present.any():
        notes.append(f"Column {name!r} names no mask.")
        return None, nowhere
    notes.append(f"Masks by column {name!r}.")
    files: Files = images.files.take(np.where(present, positions, positions[present][0]))
    fill, filled = fill_value(files, present, where)
    notes += filled
    return Masks(files, present, ignore_index=fill), positions
