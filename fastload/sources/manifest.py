"""Tables that name images: CSV, TSV or JSON lines, given themselves or found beside the images.

    photos/train.csv, photos/train/0001.jpg             Kaggle: ids without suffix, a table a split
    photos/labels.csv, photos/images/0001.jpg           one table at the top, with or without a column of splits
    photos/train/metadata.csv, photos/train/0001.jpg    Hugging Face's imagefolder

What the columns mean is told by their names and cells; the notes say how each was understood. Where a table names the
images, names of folders are not labels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.listing import Column, Files, Listing, Masks, OnError, first_few
from fastload.sources.options import SourceOptions
from fastload.sources.table_boxes import box_columns, boxes_of, many_each, one_each
from fastload.sources.table_columns import columns_of, missing_labels, plain_name
from fastload.sources.table_files import find_tables, manifest_evidence, text_cells
from fastload.sources.table_images import ImageIndex, common_folders
from fastload.sources.table_rows import JoinedRows, join_rows
from fastload.sources.table_splits import MASK_COLUMNS, split_index, splits_of_folders, splits_said
from fastload.sources.table_values import Values, values_of
from fastload.sources.tree import Tree, key_of, open_tree

__all__ = ["list_manifest", "manifest_evidence"]

IGNORE = 255  # where only some samples have a mask


def list_manifest(
    source: str | Path | Tree, *, on_error: OnError = "fail", options: SourceOptions | None = None
) -> Listing:
    """The listing of the images that a table names, in its order.

    Columns: `labels` (classes, or vectors of 0 and 1), `targets` of floats, boxes, and the table's other columns of
    numbers and of recurring text under their own names.

    Raises:
        SourceError: a broken table; a row without its image, without its label or beside another of the same image
            (unless skipped); a path that leads out of the folder.
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
        f"Layout manifest, told by {first_few([key_of(table.name) for table in tables])}; images by column "
        f"{' and '.join(dict.fromkeys(repr(table.image) for table in tables))}.",
        *[note for table in tables for note in table.rows.notes],
        *notes,
    ]
    split, split_column = splits_said(rows, options, notes)
    names, positions, bad = _positions(rows, images, index, split, notes)
    if not split_column:
        split = splits_of_folders(split, images, positions, bad, notes)
    skipped = _leave_out(bad, names, rows, where, on_error)
    left = {name: cells for name, cells in rows.cells.items() if name != split_column}
    kept = np.array([row for row in range(len(names)) if row not in bad], np.int64)
    if len(kept) == 0:
        raise SourceError(f"{where}: not one row names an image that is there, e.g. {names[0]!r} ({rows.place(0)}).")
    sample_rows, sample = _samples(positions[kept], names, rows, kept, left, where, on_error, skipped)
    kept = kept[sample_rows >= 0] if sample is None else kept
    first = kept if sample is None else kept[sample_rows]
    table = {name: values_of([cells[row] for row in kept.tolist()]) for name, cells in left.items()}
    masks = _masks(table, rows, kept, first, split, images, index, options, notes, where) if table else None
    split_rows, split_names = split_index([split[row] for row in first.tolist()])
    columns, lost, said = _columns(table, sample, split_rows, split_names, options, where)
    notes += said
    if lost and on_error == "fail":
        raise missing_labels(lost, lambda row: f"{names[first[row]]} ({rows.place(int(first[row]))})", where)
    skipped += [(key_of(names[first[i]]), f"{why} ({rows.place(int(first[i]))})") for i, why in sorted(lost.items())]
    at = positions[first]
    unused = len(images.images()) - len(set(positions[positions >= 0].tolist()))
    if unused > 0:
        notes.append(f"Images that no row names were left alone ({unused}): {first_few(_unused(images, positions))}.")
    listing = Listing(
        layout="manifest",
        keys=tuple([key_of(images.names[i]) for i in at.tolist()]),
        split=split_rows,
        split_names=split_names,
        columns=columns,
        notes=(*notes, *dict.fromkeys((*tree.notes, *images.notes))),
        sizes=images.sizes[at],
        mtimes_ns=images.mtimes_ns[at],
        files=images.files.take(at),
        skipped=tuple(skipped),
        masks=masks,
    )
    good = np.delete(np.arange(len(first)), list(lost))
    if len(good) == 0:
        raise missing_labels(lost, lambda row: f"{names[first[row]]} ({rows.place(int(first[row]))})", where)
    return listing.take(good) if lost else listing


def _positions(
    rows: JoinedRows, images: Tree, index: ImageIndex, split: list[str], notes: list[str]
) -> tuple[list[str], NDArray[np.int64], dict[int, str]]:
    """What each row calls its image, where that is in the tree, and why some have none."""
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
    bad: dict[int, str], names: list[str], rows: JoinedRows, where: str, on_error: OnError
) -> list[tuple[str, str]]:
    def named(row: int) -> str:
        return key_of(names[row]) or "a row"

    if bad and on_error == "fail":
        shown = first_few([f"{named(row)} ({rows.place(row)}): {reason}" for row, reason in sorted(bad.items())])
        raise SourceError(
            f"{where}: rows without their image ({len(bad)}): {shown}. Put the images back, or leave those rows out "
            "with `--on-error skip`."
        )
    return [(named(row), f"{reason} ({rows.place(row)})") for row, reason in sorted(bad.items())]


def _samples(
    positions: NDArray[np.int64],
    names: list[str],
    rows: JoinedRows,
    kept: NDArray[np.int64],
    left: dict[str, list[Any]],
    where: str,
    on_error: OnError,
    skipped: list[tuple[str, str]],
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Which rows are samples. Several rows of an image are its boxes where the table has such columns, else an error.

    Returns:
        Without such boxes: int64 (R,), -1 where a row is left out; and None. With them: int64 (N,), the first row of
        each sample; and int64 (R,), the sample of each row.
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
    for k in np.flatnonzero(counts > 1)[: 2**31].tolist():
        these = np.flatnonzero(inverse == k) if len(twice) < 5 or on_error == "skip" else np.zeros(0, np.int64)
        result[these] = -1
        places = " and ".join(rows.place(int(kept[row])) for row in these[:4])
        twice.append((key_of(names[kept[first[k]]]), f"has {counts[k]} rows: {places}"))
    if on_error == "fail":
        shown = first_few([f"{key} {reason}" for key, reason in twice])
        raise SourceError(
            f"{where}: images with more than one row ({len(twice)}): {shown}. Remove the wrong rows, or leave those "
            "images out with `--on-error skip`."
        )
    skipped += twice
    return result, None


def _masks(
    table: dict[str, Values],
    rows: JoinedRows,
    kept: NDArray[np.int64],
    first: NDArray[np.int64],
    split: list[str],
    images: Tree,
    index: ImageIndex,
    options: SourceOptions,
    notes: list[str],
    where: str,
) -> Masks | None:
    """The masks that a column names; it is taken out of the table."""
    plain = {plain_name(name): name for name in table}
    name = next((plain[known] for known in MASK_COLUMNS if known in plain), "")
    if not name or table[name].kind not in ("text", "int"):
        return None
    cells = text_cells(rows.cells[name][row] for row in kept.tolist())  # as written: 007 is no 7
    if table[name].kind == "int" and len(set(cells)) < len(cells):
        return None  # whether there is a mask, say
    base = index.at(rows.tables[0].base, rows.tables[0].rows.legacy)
    if sum(base.hits(cells[:50])) == 0:
        return None  # run lengths, say
    del table[name]
    if options.masks == "none":
        notes.append(f"Masks in column {name!r} were left alone, as asked for.")
        return None
    found = base.find(cells, [split[row] for row in kept.tolist()], masks=True)
    lost = [i for i in np.flatnonzero(found.positions < 0).tolist() if cells[i]]
    if lost:
        shown = first_few([f"{cells[i]} ({rows.place(int(kept[i]))})" for i in lost[:6]])
        raise SourceError(
            f"{where}: masks that rows name in column {name!r} have no file ({len(lost)}): {shown}. Put them back, "
            "empty those cells, or pack without masks: `--masks none`."
        )
    row_of = {row: i for i, row in enumerate(kept.tolist())}
    positions = found.positions[[row_of[row] for row in first.tolist()]]
    present = positions >= 0
    notes.append(f"Masks by column {name!r}.")
    if not present.all():
        notes.append(f"Images without a mask ({int((~present).sum())}): theirs are {IGNORE} throughout.")
    files: Files = images.files.take(np.where(present, positions, positions[present][0]))
    return Masks(files, present, ignore_index=None if present.all() else IGNORE)


def _columns(
    table: dict[str, Values],
    sample: NDArray[np.int64] | None,
    split: NDArray[np.uint8],
    split_names: tuple[str, ...],
    options: SourceOptions,
    where: str,
) -> tuple[dict[str, Column], dict[int, str], list[str]]:
    """All columns: boxes first, then what `columns_of` makes of the others."""
    moves, four = box_columns(table)
    boxes = boxes_of([table[name] for name in four], moves) if four else None
    if boxes is None and sample is not None:
        raise SourceError(
            f"{where}: images with more than one row, whose box columns {', '.join(four)} are no numbers."
        )
    if boxes is None:
        return columns_of(table, wanted=options.labels, split=split, split_names=split_names, where=where)
    rest = {name: values for name, values in table.items() if name not in four}
    said = f"Boxes by the columns {', '.join(four)}."
    if sample is None:
        if np.isnan(boxes).any():
            boxed = many_each(boxes, moves, np.arange(len(boxes)), len(boxes), None)
        else:
            boxed = one_each(boxes, moves)
        columns, bad, notes = columns_of(rest, wanted=options.labels, split=split, split_names=split_names, where=where)
        return boxed | columns, bad, [said, *notes]
    count = len(split)
    every = np.zeros(len(sample), np.uint8)
    empty: NDArray[np.bool_] = np.asarray(np.isnan(boxes).any(axis=1))
    made, bad, notes = columns_of(rest, wanted=options.labels, split=every, split_names=("all",), where=where)
    labels = made.pop("labels", None)
    if labels is not None and labels.values.ndim > 1:
        made["labels"], labels = labels, None
    columns = many_each(boxes, moves, sample, count, labels)
    first = np.full(count, -1, np.int64)
    first[sample[::-1]] = np.arange(len(sample))[::-1]
    varying = []
    for name, column in made.items():
        if np.array_equal(column.values, column.values[first][sample]):
            columns[name] = Column(column.values[first], column.attrs)
        else:
            varying.append(name)
    notes = [said, "Several rows of an image are its boxes.", *notes]
    if varying:
        notes.append(f"Columns ignored, since they differ among the boxes of an image: {first_few(varying)}.")
    lost = {int(sample[row]): why for row, why in bad.items() if not empty[row]}
    return columns, lost, notes


def _unused(images: Tree, positions: NDArray[np.int64]) -> list[str]:
    used = set(positions.tolist())
    return [key_of(images.names[i]) for i in images.images().tolist() if i not in used]
