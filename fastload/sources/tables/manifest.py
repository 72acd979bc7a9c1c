"""Layout of tables that name images, as CSV, TSV or JSON lines: the table itself is given, or a folder that holds it.

    photos/train.csv, photos/train/0001.jpg             Kaggle: ids without suffix, one table for each split
    photos/labels.csv, photos/images/0001.jpg           one table at the top, with or without a column of splits
    photos/train/metadata.csv, photos/train/0001.jpg    Hugging Face's imagefolder

The meaning of a column is found by its name and cells; notes say how each was understood. If a table names the images,
names of folders are not labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.assemble import Draft, MaskFiles, Samples, Splits, fill_value
from fastload.sources.box_forms import CORNERS, SIZED
from fastload.sources.captions import caption_column, caption_columns, texts_in
from fastload.sources.listing import SourceOptions, first_few
from fastload.sources.open_tree import open_tree
from fastload.sources.tables.boxes import (
    OBJECTS,
    box_columns,
    columns_with_boxes,
    nested_boxes,
    objects_of_lists,
    spread_boxes,
)
from fastload.sources.tables.frame import (
    LABELS,
    MASK_COLUMNS,
    SPLIT_COLUMNS,
    Frame,
    plain_name,
    splits_by_column,
    usual_names,
)
from fastload.sources.tables.image_index import ImageIndex, folder_splits
from fastload.sources.tables.image_tables import NO_HEADER, ImageTable, find_tables, in_class_folders, text_cells
from fastload.sources.tables.read_table import Values, values_of
from fastload.sources.tree import Tree, is_image, key_of
from fastload.system.advice import advice

_LOOKED_AT = 40  # cells of a column, to see what it may be


def list_manifest(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the images that a table names, in its order.

    Columns: `labels` (classes, or vectors of 0 and 1), `targets` of floats, boxes, `caption`, and other columns of
    numbers or recurring text by their own names.

    Raises:
        SourceError: a table is broken; a row has no image or no label, or an image has two rows without boxes (unless
            skipped); a path leads out of the folder.
    """
    rows, index = _read_tables(draft, tree, options)
    rows = _find_images(draft, rows, index, options)
    index.tree.known[rows.positions[rows.positions >= 0]] = True
    rows, texts = _take_captions(draft, rows, options)
    rows, sample = _join_boxes(draft, rows)
    first = np.arange(len(rows.lines)) if sample is None else np.unique(sample, return_index=True)[1]
    table = {name: values_of(cells) for name, cells in rows.cells.items()}
    masks = _find_masks(draft, rows, index, sample, table, options)
    for name in _further_images(rows, index, table):
        draft.notes.append(advice("image column", name=name))
        del table[name], rows.cells[name]
    splits = Splits.of([rows.split[row] for row in first.tolist()])
    objects = next((name for name in OBJECTS if name in table and sample is None), "")
    nested = nested_boxes(objects, rows.cells[objects], rows.location, draft, form=options.boxes) if objects else {}
    if nested:
        del table[objects]
    flat = {name: cells for name, cells in rows.cells.items() if name in table and table[name].values.ndim == 1}
    if not nested and sample is None and (found := objects_of_lists(flat))[0]:
        nested = nested_boxes(found[1][0], found[0], rows.location, draft, form=options.boxes)
        table = {name: values for name, values in table.items() if not nested or name not in found[1]}
    frame = Frame(table, draft.where, splits, options.labels, rows.location, sample, options.boxes)
    columns, lost = columns_with_boxes(frame, draft)
    at = rows.positions[first].tolist()
    columns |= caption_columns(draft, [texts.get(i, ()) for i in at], options, lambda i: rows.key(int(first[i])))
    known = {"labels", "targets", "bbox", "boxes", "caption"} & columns.keys()
    if len(rows.cells) > 1 and not known and not options.labels:
        rows.refuse_without_header()
    unlabelled = {int(first[at]): why for at, why in lost.items()}
    rows.leave_out(draft, unlabelled, "rows without a label", "Fill them in, or leave those images out")
    return Samples.in_tree(index.tree, rows.positions[first], splits, nested | columns, masks).without(lost)


@dataclass(frozen=True, eq=False)
class _Rows:
    """The R rows of all tables, one table behind the other."""

    tables: list[ImageTable]
    table: NDArray[np.int64]  # (R,), index of each row's table
    images: list[str]  # the cell of each row that names its image
    cells: dict[str, list[Any]]  # column -> R cells, for the other columns
    lines: list[int]  # line number of each row in its table
    split: list[str]  # split of each row, "" if unknown
    positions: NDArray[np.int64]  # (R,), position of each row's image in the tree, -1 for none

    @property
    def where(self) -> str:
        return self.tables[0].rows.path

    @property
    def names(self) -> list[str]:
        return list(self.cells)

    def location(self, row: int) -> str:
        """Returns the line and table of a row, for messages."""
        return f"line {self.lines[row]} of {key_of(self.tables[int(self.table[row])].name)}"

    def texts(self, name: str) -> list[str]:
        """Returns the cells of a column as they are written: 007 is no 7."""
        return text_cells(self.cells[name])

    def key(self, row: int) -> str:
        """Returns how a row is called: as its image."""
        return key_of(self.images[row]) or "a row"

    def refuse_without_header(self) -> None:
        """Refuses a table that has no header, and says which one it may lack."""
        table = self.tables[0]
        if table.rows.names[0] != NO_HEADER.format(1):
            return
        kinds = {name: values_of(cells[:_LOOKED_AT]) for name, cells in self.cells.items()}
        names = [name if name in kinds else "image" for name in table.rows.names]
        numbers = [kinds[name].kind in ("int", "float") if name in kinds else False for name in names]
        at = next((at for at in range(len(names) - 3) if all(numbers[at : at + 4])), -1)
        if at >= 0:
            names[at : at + 4] = CORNERS
        words = [name for name in names if name in kinds and kinds[name].kind == "text"]
        names = ["label" if words == [name] else name for name in names]
        first = ",".join(str(column[0]) for column in table.rows.columns)
        raise SourceError(
            f"{self.where}: it has no line of names, so the meaning of its {len(names)} columns is not known. The "
            f"first line is `{first}`. Put a line before it that names them, perhaps `{','.join(names)}` (boxes by a "
            f"corner and a size are {','.join(SIZED)}), or name the labels with `--labels`."
        )

    def leave_out(self, draft: Draft, reasons: dict[int, str], which: str, fix: str) -> None:
        """Leaves out rows for a reason, which is an error unless such may be skipped."""
        found = [(self.key(row), self.location(row), why) for row, why in sorted(reasons.items())]
        shown = [f"{key} ({location}): {why}" for key, location, why in found]
        draft.leave_out_all([(key, f"{why} ({location})") for key, location, why in found], which, fix, shown)

    def without(self, left_out: Collection[int]) -> _Rows:
        """Returns the rows other than those left out."""
        if not left_out:
            return self
        kept = np.delete(np.arange(len(self.lines)), list(left_out))

        def some(column: list[Any]) -> list[Any]:
            return [column[row] for row in kept.tolist()]

        cells = {name: some(column) for name, column in self.cells.items()}
        images, lines, split = some(self.images), some(self.lines), some(self.split)
        return _Rows(self.tables, self.table[kept], images, cells, lines, split, self.positions[kept])


def _read_tables(draft: Draft, tree: Tree, options: SourceOptions) -> tuple[_Rows, ImageIndex]:
    """Returns the rows of all tables, and the images below the root. A column that a table lacks is empty there."""
    outside = bool(tree.file) or options.root is not None
    images = open_tree(options.root or tree.path) if outside else tree
    draft.trees.append(images)
    index = ImageIndex(images)
    index.loose = bool(tree.file) or (len(images.images()) > 0 and not in_class_folders(images))
    tables = find_tables(draft, tree, options, lambda base: index.at("" if outside else base))
    by = " and ".join(dict.fromkeys(repr(table.image) for table in tables))
    shown = first_few([key_of(table.name) for table in tables])
    draft.title = f"Layout manifest, recognised by {shown}; images by column {by}."
    draft.notes[:0] = [note for table in tables for note in table.rows.notes]
    cells: dict[str, list[Any]] = {name: [] for table in tables for name in table.rows.names if name != table.image}
    named: list[str] = []
    for table in tables:
        columns = dict(zip(table.rows.names, table.rows.columns, strict=True))
        named += text_cells(columns.pop(table.image))
        for name in cells:
            cells[name] += columns.get(name) or [None] * len(table.rows.lines)
    whose = np.repeat(np.arange(len(tables)), [len(table.rows.lines) for table in tables])
    lines = [line for table in tables for line in table.rows.lines]
    return _Rows(tables, whose, named, cells, lines, [""] * len(named), np.full(len(named), -1, np.int64)), index


def _find_images(draft: Draft, rows: _Rows, index: ImageIndex, options: SourceOptions) -> _Rows:
    """Returns the rows that have an image. Splits are by a column, else by table, else by the folders of all images."""
    split, split_column = splits_by_column(rows, options.split_column, SPLIT_COLUMNS, draft.notes)
    if not split:
        split = [rows.tables[i].split for i in rows.table.tolist()]
        if said := [f"{table.split} ({key_of(table.name)})" for table in rows.tables if table.split]:
            draft.notes.append(f"Splits by table: {', '.join(said)}.")
    broken = dict(index.tree.broken)
    broken |= {name.rpartition("/")[2]: reason for name, reason in index.tree.broken}
    positions: list[int] = []
    bad: dict[int, str] = {}
    for table in rows.tables:
        start = len(positions)
        these = slice(start, start + len(table.rows.lines))
        files = index.at(table.base, table.rows.legacy).find(rows.images[these], split[these])
        positions += files.positions.tolist()
        for k in np.flatnonzero(files.positions < 0).tolist():
            name = rows.images[start + k]
            reason = files.reasons.get(k) or broken.get(name) or broken.get(table.base + name)
            bad[start + k] = reason or ("there is no such image" if name else "names no image")
        if files.renamed:
            whose = key_of(table.name)
            draft.notes.append(f"Rows of {whose} name another suffix than the files have ({files.renamed}).")
        if files.loosely:
            draft.notes.append(
                f"Rows of {key_of(table.name)} name files in another case, or without the zeros before their number "
                f"({files.loosely}): one file has each name."
            )
    cells = {name: cells for name, cells in rows.cells.items() if name != split_column}
    rows = replace(rows, cells=cells, split=split, positions=np.array(positions, np.int64))
    rows.leave_out(draft, bad, "rows without their image", "Put the images back, or leave those rows out")
    if len(bad) == len(split):
        raise SourceError(
            f"{draft.where}: not one row names an image that is there, e.g. {rows.images[0]!r} ({rows.location(0)})."
        )
    rows = rows.without(bad)
    names = [index.tree.names[i] for i in rows.positions.tolist()]
    folders = Counter(key_of(name.rpartition("/")[0]) for name in names).most_common()
    shown = first_few([f"{folder or 'the top'} ({count})" for folder, count in folders], 4)
    draft.notes.append(f"Images that rows name lie in {shown}. Names of folders are not labels here.")
    if any(rows.split) or not all(found := folder_splits(names)):
        return rows
    draft.notes.append(f"Splits by the images' folders: {', '.join(sorted(set(found)))}.")
    return replace(rows, split=found)


def _take_captions(draft: Draft, rows: _Rows, options: SourceOptions) -> tuple[_Rows, dict[int, list[str]]]:
    """Returns the rows without the column of captions, and position of an image -> its captions; none without any.

    Several rows of an image that differ in their captions only, or in what numbers these, become one.
    """
    name = "" if options.captions == "none" else caption_column(rows.cells, options.labels)
    if not name:
        return rows, {}
    draft.notes.append(f"Captions by column {name!r}.")
    texts: dict[int, list[str]] = {}
    for position, cell in zip(rows.positions.tolist(), rows.cells[name], strict=True):
        texts.setdefault(position, []).extend(texts_in(cell))
    rows = replace(rows, cells={other: cells for other, cells in rows.cells.items() if other != name})
    if box_columns(spread_boxes(rows.cells)[0])[1]:  # each row of an image is a box, and says its captions again
        return rows, {position: list(dict.fromkeys(found)) for position, found in texts.items()}
    _, first, inverse = np.unique(rows.positions, return_index=True, return_inverse=True)
    begins = first[inverse].tolist()  # the first row of each row's image
    differ = [
        other
        for other, cells in {**rows.cells, "split": rows.split}.items()
        if any(cells[begin] != cell for begin, cell in zip(begins, cells, strict=True))
    ]
    if len(first) == len(begins) or any(plain_name(other) in (*LABELS, "split", *options.labels) for other in differ):
        return rows, texts
    draft.note("Several rows of an image are its captions; columns that differ among them were left out", differ)
    rows = replace(rows, cells={other: cells for other, cells in rows.cells.items() if other not in differ})
    return rows.without([row for row, begin in enumerate(begins) if row != begin]), texts


def _join_boxes(draft: Draft, rows: _Rows) -> tuple[_Rows, NDArray[np.int64] | None]:
    """Returns the rows, boxes in one cell spread to four columns, and the sample of each; None if each row is one.

    Several rows of an image are its boxes if there are columns of boxes, else an error (unless skipped).
    """
    cells, spread = spread_boxes(rows.cells)
    if spread:
        draft.notes.append(advice("boxes in a cell", name=spread))
        rows = replace(rows, cells=cells)
    unique, first, inverse, counts = np.unique(
        rows.positions, return_index=True, return_inverse=True, return_counts=True
    )
    if len(unique) == len(inverse):
        return rows, None
    if not box_columns(cells)[1]:
        rows.refuse_without_header()
        by_image = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
        several = [by_image[k].tolist() for k in np.flatnonzero(counts > 1).tolist()]
        twice = [
            (rows.key(these[0]), f"has {len(these)} rows: {' and '.join(map(rows.location, these[:4]))}")
            for these in several
        ]
        differ = [
            name
            for name, column in cells.items()
            if any(column[row] != column[these[0]] for these in several for row in these)
        ]
        fix = (
            f"{f'They differ in {first_few(differ)}. ' if differ else ''}Write one row for each image (several "
            "classes as `cat|dog`, masks of run lengths as images), or leave all those images out"
        )
        draft.leave_out_all(twice, "images with more than one row", fix)
        return rows.without([row for these in several for row in these]), None
    begins = first[inverse]  # the first row of each row's image
    sample = np.unique(begins, return_inverse=True)[1]
    for row, begin in enumerate(begins.tolist()):
        if rows.split[row] != rows.split[begin]:
            raise SourceError(
                f"{draft.where}: {rows.key(row)} is in two splits: {rows.split[begin]} ({rows.location(begin)}) and "
                f"{rows.split[row]} ({rows.location(row)}). An image can be in one."
            )
    return rows, sample


def _further_images(rows: _Rows, index: ImageIndex, table: dict[str, Values]) -> list[str]:
    """Returns the columns that name images of the tree, too."""
    base = index.at(rows.tables[0].base, rows.tables[0].rows.legacy)
    some = {name: rows.texts(name)[:_LOOKED_AT] for name, values in table.items() if values.kind == "text"}
    return [name for name, cells in some.items() if all(map(is_image, cells)) and base.hits(cells)[0]]


def _find_masks(
    draft: Draft,
    rows: _Rows,
    index: ImageIndex,
    sample: NDArray[np.int64] | None,
    table: dict[str, Values],
    options: SourceOptions,
) -> MaskFiles | None:
    """Returns the masks of samples that a column names; removes the column from the table."""
    notes = draft.notes
    name = next(iter(usual_names(table, MASK_COLUMNS)), "")
    if not name or table[name].kind not in ("text", "int"):
        return None
    cells = rows.texts(name)
    if table[name].kind == "int" and len(set(cells)) < len(cells):
        return None  # for example 0 and 1 for whether there is a mask
    base = index.at(rows.tables[0].base, rows.tables[0].rows.legacy)
    if not any(base.hits(cells[:50])):
        return None  # for example run lengths
    del table[name]
    if options.masks == "none":
        notes.append(f"Masks in column {name!r} were left alone, as asked for.")
        return None
    found = base.find(cells, rows.split, masks=True).positions
    if lost := [row for row in np.flatnonzero(found < 0).tolist() if cells[row]]:
        shown = first_few([f"{cells[row]} ({rows.location(row)})" for row in lost[:6]])
        raise SourceError(
            f"{draft.where}: masks that rows name in column {name!r} have no file ({len(lost)}): {shown}. Put them "
            "back, empty those cells, or pack without masks: `--masks none`."
        )
    positions = found
    if sample is not None:  # any row of an image may name its mask
        positions = np.full(sample.max() + 1, -1, np.int64)
        np.maximum.at(positions, sample, found)
        if other := np.flatnonzero((found >= 0) & (found != positions[sample])).tolist():
            shown = first_few([f"{rows.key(row)} ({rows.location(row)})" for row in other[:6]])
            raise SourceError(
                f"{draft.where}: rows of one image name different masks in column {name!r} ({len(other)}): {shown}. "
                "One mask an image can be packed: join them to one, or pack without masks: `--masks none`."
            )
    if not (positions >= 0).any():
        notes.append(f"Column {name!r} names no mask.")
        return None
    notes.append(f"Masks by column {name!r}.")
    files = index.tree.files.take(np.maximum(positions, 0))
    return MaskFiles(positions, ignore_index=fill_value(draft, files, positions >= 0))
