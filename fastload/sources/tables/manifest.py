"""Layout of tables that name images, as CSV, TSV or JSON lines: the table itself is given, or a folder that holds it.

    photos/train.csv, photos/train/0001.jpg             Kaggle: ids without suffix, one table for each split
    photos/labels.csv, photos/images/0001.jpg           one table at the top, with or without a column of splits
    photos/train/metadata.csv, photos/train/0001.jpg    Hugging Face's imagefolder

The meaning of a column is found by its name and cells; notes say how each was understood. If a table names the images,
names of folders are not labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.assemble import Draft, MaskFiles, Samples, Splits, fill_value
from fastload.sources.listing import SourceOptions, first_few
from fastload.sources.open_tree import open_tree
from fastload.sources.tables.boxes import OBJECTS, box_columns, columns_with_boxes, nested_boxes, spread_boxes
from fastload.sources.tables.frame import MASK_COLUMNS, SPLIT_COLUMNS, Frame, plain_name, splits_by_column
from fastload.sources.tables.image_index import ImageIndex, common_folders, folder_splits
from fastload.sources.tables.image_tables import TableRows, find_tables, join_rows, manifest_evidence
from fastload.sources.tables.values import Values, values_of
from fastload.sources.tree import Tree, key_of

__all__ = ["list_manifest", "manifest_evidence"]


def list_manifest(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the images that a table names, in its order.

    Columns: `labels` (classes, or vectors of 0 and 1), `targets` of floats, boxes, and other columns of numbers or
    recurring text by their own names.

    Raises:
        SourceError: a table is broken; a row has no image or no label, or an image has two rows without boxes (unless
            skipped); a path leads out of the folder.
    """
    rows, index = _read_tables(draft, tree, options)
    named = _find_images(draft, rows, index, options)
    named = _join_boxes(draft, named)
    table = {name: values_of(cells) for name, cells in named.rows.cells.items()}
    masks = _find_masks(draft, named, table, options)
    splits = Splits.of([named.split[row] for row in named.first.tolist()])
    nested = {}
    if named.sample is None and (objects := next((name for name in OBJECTS if name in table), "")):
        nested = nested_boxes(objects, named.rows.cells[objects], named.rows.location, draft)
        if nested:
            del table[objects]
    frame = Frame(table, draft.where, splits, options.labels, named.rows.location, named.sample)
    columns, lost, notes = columns_with_boxes(frame, draft.on_error)
    draft.notes += notes
    named.leave_out(
        draft,
        {int(named.first[sample]): why for sample, why in lost.items()},
        "rows without a label",
        "Fill them in, or leave those images out",
    )
    at = named.positions[named.first]
    used = np.union1d(named.all_positions, masks.positions if masks else [])
    if unused := [key_of(index.tree.names[i]) for i in np.setdiff1d(index.tree.images(), used).tolist()]:
        draft.notes.append(f"Images that no row names were left alone ({len(unused)}): {first_few(unused)}.")
    return Samples.in_tree(index.tree, at, splits, nested | columns, masks).without(lost)


@dataclass(frozen=True, eq=False)
class _NamedImages:
    """R rows with their images.

    Attributes:
        rows: the rows.
        split: split of each row, "" if unknown.
        index: the images.
        positions: int64 (R,), position of each row's image in the tree.
        all_positions: int64, those of all rows, also of such as were left out.
        first: int64 (N,), the first row of each sample.
        sample: int64 (R,), the sample of each row, if several rows are the boxes of an image; None: each is one.
    """

    rows: TableRows
    split: list[str]
    index: ImageIndex
    positions: NDArray[np.int64]
    all_positions: NDArray[np.int64]
    first: NDArray[np.int64]
    sample: NDArray[np.int64] | None = None

    def key(self, row: int) -> str:
        """Returns how a row is called: as its image."""
        return key_of(self.rows.images[row]) or "a row"

    def leave_out(self, draft: Draft, reasons: dict[int, str], which: str, fix: str) -> None:
        """Leaves out rows for a reason, which is an error unless such may be skipped."""
        found = [(self.key(row), self.rows.location(row), why) for row, why in sorted(reasons.items())]
        shown = [f"{key} ({location}): {why}" for key, location, why in found]
        draft.leave_out_all([(key, f"{why} ({location})") for key, location, why in found], which, fix, shown)

    def without(self, left_out: set[int]) -> _NamedImages:
        """Returns the rows other than those left out."""
        if not left_out:
            return self
        kept = np.array([row for row in range(len(self.split)) if row not in left_out], np.int64)
        split = [self.split[row] for row in kept.tolist()]
        first, positions = np.arange(len(kept)), self.positions[kept]
        return replace(self, rows=self.rows.take(kept), split=split, positions=positions, first=first)


def _read_tables(draft: Draft, tree: Tree, options: SourceOptions) -> tuple[TableRows, ImageIndex]:
    """Returns the rows of all tables, and the images below the root."""
    outside = bool(tree.file) or options.root is not None
    images = open_tree(options.root or tree.path) if outside else tree
    draft.trees.append(images)
    index = ImageIndex(images)
    tables = find_tables(draft, tree, options, lambda base: index.at("" if outside else base))
    by = " and ".join(dict.fromkeys(repr(table.image) for table in tables))
    named = first_few([key_of(table.name) for table in tables])
    draft.title = f"Layout manifest, recognised by {named}; images by column {by}."
    draft.notes[:0] = [note for table in tables for note in table.rows.notes]
    return join_rows(tables), index


def _find_images(draft: Draft, rows: TableRows, index: ImageIndex, options: SourceOptions) -> _NamedImages:
    """Returns the rows that have an image, without the column of splits; others are left out.

    Splits are found by a column, else by the names of the tables, else by the folders of all images.

    Raises:
        SourceError: a row has no image (unless skipped), or none has.
    """
    split, split_column = splits_by_column(rows, options.split_column, SPLIT_COLUMNS, draft.notes)
    if not split:
        split = [rows.tables[i].split for i in rows.table.tolist()]
        if said := [f"{table.split} ({key_of(table.name)})" for table in rows.tables if table.split]:
            draft.notes.append(f"Splits by table: {', '.join(said)}.")
    positions, bad = _positions(draft, rows, index, split)
    rows = replace(rows, cells={name: cells for name, cells in rows.cells.items() if name != split_column})
    named = _NamedImages(rows, split, index, positions, positions, np.arange(len(split)))
    fix = "Put the images back, or leave those rows out"
    named.leave_out(draft, bad, "rows without their image", fix)
    if len(bad) == len(split):
        raise SourceError(
            f"{draft.where}: not one row names an image that is there, e.g. {rows.images[0]!r} ({rows.location(0)})."
        )
    named = named.without(set(bad))
    names = [index.tree.names[i] for i in named.positions.tolist()]
    shown = first_few([f"{folder or 'the top'} ({count})" for folder, count in common_folders(names)], 4)
    draft.notes.append(f"Images that rows name lie in {shown}. Names of folders are not labels here.")
    if any(named.split) or not all(found := folder_splits(names)):
        return named
    draft.notes.append(f"Splits by the images' folders: {', '.join(sorted(set(found)))}.")
    return replace(named, split=found)


def _positions(
    draft: Draft, rows: TableRows, index: ImageIndex, split: list[str]
) -> tuple[NDArray[np.int64], dict[int, str]]:
    """Returns the position of each row's image in the tree (-1 for none), and row -> why it has none."""
    names = rows.images
    broken = dict(index.tree.broken)
    broken |= {name.rpartition("/")[2]: reason for name, reason in index.tree.broken}
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
            whose = key_of(table.name)
            draft.notes.append(f"Rows of {whose} name another suffix than the files have ({found.renamed}).")
    return positions, bad


def _join_boxes(draft: Draft, named: _NamedImages) -> _NamedImages:
    """Returns the rows by sample: several rows of an image are its boxes, if the table has columns of boxes.

    Boxes in one cell are spread to four columns.

    Raises:
        SourceError: images have several rows without boxes (unless skipped), or rows in two splits.
    """
    cells, spread = spread_boxes(named.rows.cells)
    if spread:
        draft.notes.append(f"Column {spread!r} holds boxes in one cell, taken for x, y, width, height.")
        named = replace(named, rows=replace(named.rows, cells=cells))
    unique, first, inverse, counts = np.unique(
        named.positions, return_index=True, return_inverse=True, return_counts=True
    )
    if len(unique) == len(inverse):
        return named
    rows = named.rows
    if not box_columns(cells)[1]:
        by_image = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
        several = [by_image[k] for k in np.flatnonzero(counts > 1).tolist()]
        twice = []
        for these in several:
            lines = " and ".join(rows.location(int(row)) for row in these[:4])
            twice.append((named.key(int(these[0])), f"has {len(these)} rows: {lines}"))
        fix = "Remove the wrong rows, or leave those images out"
        draft.leave_out_all(twice, "images with more than one row", fix)
        return named.without(set(np.concatenate(several).tolist()))
    order = np.argsort(first)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    first, sample, split = first[order], rank[inverse], named.split
    for row, begin in enumerate(first[sample].tolist()):
        if split[row] != split[begin]:
            raise SourceError(
                f"{draft.where}: {named.key(row)} is in two splits: {split[begin]} ({rows.location(begin)}) and "
                f"{split[row]} ({rows.location(row)}). An image can be in one."
            )
    return replace(named, first=first, sample=sample)


def _find_masks(
    draft: Draft, named: _NamedImages, table: dict[str, Values], options: SourceOptions
) -> MaskFiles | None:
    """Returns the masks of samples that a column names; removes the column from the table.

    Raises:
        SourceError: a mask has no file, or rows of one image name different masks.
    """
    rows, notes = named.rows, draft.notes
    plain = {plain_name(name): name for name in table}
    name = next((plain[known] for known in MASK_COLUMNS if known in plain), "")
    if not name or table[name].kind not in ("text", "int"):
        return None
    cells = rows.texts(name)
    if table[name].kind == "int" and len(set(cells)) < len(cells):
        return None  # for example 0 and 1 for whether there is a mask
    base = named.index.at(rows.tables[0].base, rows.tables[0].rows.legacy)
    if sum(base.hits(cells[:50])) == 0:
        return None  # for example run lengths
    del table[name]
    if options.masks == "none":
        notes.append(f"Masks in column {name!r} were left alone, as asked for.")
        return None
    found = base.find(cells, named.split, masks=True).positions
    lost = [row for row in np.flatnonzero(found < 0).tolist() if cells[row]]
    if lost:
        shown = first_few([f"{cells[row]} ({rows.location(row)})" for row in lost[:6]])
        raise SourceError(
            f"{draft.where}: masks that rows name in column {name!r} have no file ({len(lost)}): {shown}. Put them "
            "back, empty those cells, or pack without masks: `--masks none`."
        )
    positions = found
    if named.sample is not None:  # any row of an image may name its mask
        positions = np.full(len(named.first), -1, np.int64)
        np.maximum.at(positions, named.sample, found)
        other = np.flatnonzero((found >= 0) & (found != positions[named.sample])).tolist()
        if other:
            shown = first_few([f"{named.key(row)} ({rows.location(row)})" for row in other[:6]])
            raise SourceError(
                f"{draft.where}: rows of one image name different masks in column {name!r} ({len(other)}): {shown}. "
                "One mask an image can be packed: join them to one, or pack without masks: `--masks none`."
            )
    if not (positions >= 0).any():
        notes.append(f"Column {name!r} names no mask.")
        return None
    notes.append(f"Masks by column {name!r}.")
    files = named.index.tree.files.take(np.maximum(positions, 0))
    fill, filled = fill_value(files, positions >= 0, draft.where)
    notes += filled
    return MaskFiles(positions, ignore_index=fill)
