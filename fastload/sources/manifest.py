"""Layout of tables that name images, as CSV, TSV or JSON lines: the table itself is given, or a folder that holds it.

    photos/train.csv, photos/train/0001.jpg             Kaggle: ids without suffix, one table for each split
    photos/labels.csv, photos/images/0001.jpg           one table at the top, with or without a column of splits
    photos/train/metadata.csv, photos/train/0001.jpg    Hugging Face's imagefolder

The meaning of a column is found by its name and cells; notes say how each was understood. If a table names the images,
names of folders are not labels.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError, SourceError
from fastload.options.pack import SourceOptions
from fastload.sources.assemble import Draft, MaskFiles, Samples, Splits, fill_value, split_path, stem_of
from fastload.sources.boxes import (
    BOX_KEYS,
    CORNERS,
    OBJECTS,
    SIZED,
    box_columns,
    columns_with_boxes,
    nested_boxes,
    objects_of_lists,
    spread_boxes,
)
from fastload.sources.captions import caption_column, caption_columns, maybe_captions, texts_in
from fastload.sources.folder import ANNOTATION_FOLDERS, IMAGE_FOLDERS, ClassFolders
from fastload.sources.image_index import ImageIndex, folder_splits
from fastload.sources.listing import SPLIT_ORDER, SPLITS, first_few, split_of_parts
from fastload.sources.open_tree import open_tree
from fastload.sources.tables import (
    DELIMITED,
    JSON_LINES,
    LABELS,
    MASK_COLUMNS,
    PARQUET,
    SPLIT_COLUMNS,
    Frame,
    ParsedTable,
    Values,
    plain_name,
    read_rows,
    splits_by_column,
    usual_names,
    values_of,
    without_escapes,
)
from fastload.sources.tree import Tree, is_image, key_of
from fastload.system.advice import advice

IMAGE_COLUMNS = (
    "file_name filename image_path img_path filepath file_path path image_file image_name img_name image_id img_id "
    "imageid image img file fname name photo photo_id picture image_index id id_code uuid "
    "image_url img_url url"
).split()
"""Usual names of the column that names images, likeliest first."""

NO_HEADER = "column_{}"
"""Name of a column, by its number from 1, in a table without a header."""

METADATA = "metadata"  # stem of Hugging Face's imagefolder tables, in the folder of the images

_HEAD_BYTES = 2**16
_LOOKED_AT = 40  # cells of a column that are looked up to see whether it names images
_MOST_TABLES = 50


@dataclass(frozen=True, eq=False)
class ImageTable:
    """One table that names images."""

    name: str  # path of the table in the tree
    base: str  # folder that its paths are relative to, "" or ending in `/`
    split: str  # split that its name or folder says; "" for none
    rows: ParsedTable  # its content, with a name for each column
    image: str  # the column that names the images


def manifest_evidence(tree: Tree) -> list[str]:
    """Returns the tables of a tree that name images that are there, each with an example; or the table given."""
    if tree.file.lower().endswith(".json"):
        _refuse_json(tree)
    if tree.file:
        return [tree.file] if tree.file.lower().endswith((*DELIMITED, *JSON_LINES)) else []
    positions = [i for i in _table_positions(tree) if not _is_sample(tree.names[i])]
    if not positions or not len(tree.images):
        return []
    index, classed = ImageIndex(tree), in_class_folders(tree)
    index.loose = not classed
    found: list[str] = []
    named, usual, by_file, labelled, splits = 0, False, False, False, set[str]()
    for i in positions:
        name = tree.names[i]
        here = index.at(split_path(name)[0])
        if table := read_head(tree, i, here):
            column, cells, count, columns = table
            labelled |= bool(usual_names(columns, LABELS))
            found.append(f"{key_of(name)} (column {column}, e.g. {key_of(cells[0])})")
            named += count
            usual |= plain_name(column) in IMAGE_COLUMNS
            by_file |= any(map(is_image, cells[:_LOOKED_AT]))
            # Hugging Face's rules over class folders where it says more than one number or word of unknown meaning.
            if _stem(name) == METADATA and (labelled or not classed or _says_more(columns)):
                return found
            splits |= {split_of_name(name)} if split_of_name(name) else _splits_named(here, cells[:_LOOKED_AT])
    # A log or a list of some images may lie next to class folders.
    if classed and not usual and (named < classed or not by_file):
        return []
    if named < classed:
        raise SourceError(
            f"{tree.given}: two layouts fit: manifest by {first_few(found)}, which names about {named} images, and "
            f"folder by class folders with {classed}. Say which one it is: `--layout manifest` or `--layout folder`."
        )
    images = [tree.names[i] for i in tree.images.tolist()] if splits == {"test"} else []
    if rest := [name for name, split in zip(images, folder_splits(images), strict=True) if split in ("train", "val")]:
        raise SourceError(
            f"{tree.given}: {first_few(found)} names images of the test split alone, and there are {len(rest)} others, "
            f"e.g. {key_of(rest[0])}. Say what is meant: `--layout folder` packs all of them by their folders; "
            f"`fastload pack {tree.path / key_of(tree.names[positions[0]])} OUT.h5` the test images alone; or name the "
            "training images in a table, too."
        )
    if classed and not labelled:
        raise SourceError(
            f"{tree.given}: two layouts fit: folder by class folders with {classed} images, and manifest by "
            f"{first_few(found)}, none of whose columns is called label or class. `--layout folder` takes the folders' "
            "names as labels, and does not read the table; `--layout manifest` reads the table alone, with `--labels "
            "COLUMN` for its labels."
        )
    return found


def _says_more(columns: Iterable[str]) -> bool:
    """Whether columns are captions, boxes or masks by their names."""
    names = list(columns)
    usual = {*MASK_COLUMNS, *OBJECTS, *BOX_KEYS}
    return bool(box_columns(names)[1]) or any(maybe_captions(name) or plain_name(name) in usual for name in names)


def _refuse_json(tree: Tree) -> None:
    """Refuses a file of JSON that holds a table, and says how to write it a row a line; others are left to COCO's."""
    try:
        head = tree.files.read_head(0, _HEAD_BYTES).lstrip()
    except ImageError:
        return
    if head[:1] not in (b"[", b"{") or b'"annotations"' in head or b'"images"' in head:
        return
    path = tree.path / key_of(tree.file)
    rows = ".[]" if head[:1] == b"[" else "to_entries[] | {file_name: .key, label: .value}"
    fix = f"Write it so, and give that: `jq -c '{rows}' {path} > {path.with_suffix('.jsonl')}`."
    raise SourceError(f"{path} is JSON as a whole, and a table has a row on each line. {fix}")


def _is_sample(name: str) -> bool:
    """Whether a table is a competition's sample submission, whose labels mean nothing."""
    return re.sub(r"[^a-z]", "", _stem(name)).startswith("samplesub")


def _splits_named(index: ImageIndex, cells: list[str]) -> set[str]:
    """Returns the splits of the folders that images with these names lie in; "" for none."""
    with suppress(SourceError):
        found = index.find(cells, [""] * len(cells)).positions
        return set(folder_splits([index.tree.names[i] for i in found[found >= 0].tolist()]))
    return {""}


def in_class_folders(tree: Tree) -> int:
    """Returns how many images lie in class folders by the folders' names: several siblings, none called images."""
    found, count = ClassFolders.of(tree), 0
    for split, at in found.splits.items():
        classes = {top.lower() for top in found.classes[split]}
        if at not in tree.image_folders and len(classes) > 1 and classes.isdisjoint(IMAGE_FOLDERS | ANNOTATION_FOLDERS):
            count += sum(len(tree.image_folders[at]) for folders in found.classes[split].values() for at in folders)
    return count


def find_tables(
    draft: Draft, tree: Tree, options: SourceOptions, index_of: Callable[[str], ImageIndex]
) -> list[ImageTable]:
    """Returns the tables that make up the dataset, sorted by split.

    These are the table that was given; or Hugging Face's metadata files; or the only table at the top that names
    images; or several at the top that are named after splits. `index_of` returns the index of the images, given the
    folder that a table's paths are relative to.

    Raises:
        SourceError: a table is broken, none names images, or several do without being named after splits.
    """
    if tree.file:
        table = _read(tree, 0, options, index_of(""))
        if table is None:
            images = index_of("").tree
            archive = next((key_of(name) for name in images.names if name.lower().endswith((".zip", ".tar"))), "")
            in_archive = f" If they lie in {archive}: `--root {images.path / archive}`." if archive else ""
            raise SourceError(
                f"{tree.path / key_of(tree.file)}: no column names images that lie below {images.path}, by path or by "
                "name without suffix. Give the folder of the images with `--root`, or the column with "
                f"`--image-column`; download what only has an address.{in_archive}"
            )
        return [table]
    tables: list[ImageTable] = []
    others: list[str] = []
    for i in _table_positions(tree):
        name = tree.names[i]
        index = index_of(split_path(name)[0])
        try:
            if table := _read(tree, i, options, index):
                tables.append(table)
            else:
                others.append(key_of(name))
        except SourceError:
            # Only a broken table that may belong to the dataset is an error.
            if split_of_name(name) or _stem(name) == METADATA or read_head(tree, i, index):
                raise
            others.append(f"{key_of(name)} (broken)")
    chosen = [table for table in tables if _stem(table.name) == METADATA]
    if not chosen:
        samples = [table for table in tables if _is_sample(table.name)]
        chosen = [table for table in tables if table not in samples] or samples
        splits = [table.split for table in chosen]
        if len(chosen) > 1 and ("" in splits or len(set(splits)) < len(splits)):
            strays = [key_of(table.name) for table in chosen if not table.split]
            split = len(set(splits) - {""}) == len(chosen) - len(strays) > 0
            raise SourceError(
                f"{tree.path}: several tables name its images: {first_few([key_of(table.name) for table in chosen])}. "
                f"Give the right table itself, or "
                + (
                    f"move {first_few(strays)} away: the others are called after their splits."
                    if split
                    else "name them after their splits: train.csv, val.csv, test.csv."
                )
            )
    if not chosen:
        looked = f" (looked at {first_few(others)})" if others else ""
        fix = "Give the .csv, .tsv or .jsonl itself, and the folder of its images with `--root`."
        raise SourceError(f"{tree.path}: no table at the top names images that are there{looked}. {fix}")
    if others := [*others, *[key_of(table.name) for table in tables if table not in chosen]]:
        draft.notes.append(f"Tables ignored: {first_few(others)}.")
    order = (*SPLIT_ORDER, "")
    return sorted(chosen, key=lambda table: order.index(table.split))


def is_table(name: str) -> bool:
    """Whether a file in a folder may be a table of images, by its suffix."""
    # The last letter rules most names out quickly: there may be a million.
    if name[-1:] in "tT":
        return name.rpartition("/")[2].lower() == METADATA + PARQUET  # any other is of layout parquet
    return name[-1:] in "vVlLnN" and name.lower().endswith((".csv", ".tsv", *JSON_LINES))


def split_of_name(name: str) -> str:
    """Returns the split that a file is named after (train_labels.csv, trainLabels.csv, val-0.parquet); "" if none."""
    words = re.sub(r"([a-z])([A-Z])", r"\1 \2", name.rpartition("/")[2].rpartition(".")[0])
    found = {SPLITS[word] for word in re.split(r"[^a-z]+", words.lower()) if word in SPLITS}
    return found.pop() if len(found) == 1 else ""


def text_cells(column: Iterable[Any]) -> list[str]:
    """Returns cells as text: numbers as they are written, "" for an empty cell."""
    return [cell.strip() if isinstance(cell, str) else "" if cell is None else str(cell) for cell in column]


def _table_positions(tree: Tree) -> list[int]:
    """Returns the positions of tables in the outermost folder that holds more than one, and of metadata tables."""
    around = split_path(os.path.commonprefix(tree.names))[0]  # noqa: RUF071  # it is cut at the last `/`
    tables = [(i, name, name.count("/", len(around))) for i, name in tree.not_images if is_table(name)]
    found = [i for i, name, depth in tables if not depth or (_stem(name) == METADATA and depth <= 2)]
    return found[:_MOST_TABLES]


def _read(tree: Tree, i: int, options: SourceOptions, index: ImageIndex) -> ImageTable | None:
    name = tree.names[i]
    rows = read_rows(tree.read_text(i), str(tree.path / key_of(name)))
    named = _with_image_column(rows, index.at(index.base, rows.legacy), options, len(rows.lines))
    if named is None:
        return None
    # Metadata that are given themselves keep the split of the folder that holds them.
    above = [os.path.basename(os.path.abspath(tree.path))] if tree.file and tree.in_place else []
    folders = [*above, *name.split("/")[:-1]]
    split = split_of_parts(folders) if _stem(name) == METADATA else split_of_name(name)
    return ImageTable(name, index.base, split, named[0], named[1])


def _with_image_column(
    rows: ParsedTable, index: ImageIndex, options: SourceOptions, count: int
) -> tuple[ParsedTable, str] | None:
    """Returns the rows (or the first of about `count`) with names of columns, and the column of images; else None."""
    if not rows.names:
        first = text_cells(column[0] for column in rows.columns)
        # A header names no image. A usual name counts even if there is an image called image.jpg or label.png.
        usual = any(plain_name(cell) in (*IMAGE_COLUMNS, *LABELS) for cell in first)
        if not any(map(is_image, first)) and (usual or not any(index.hits(first))):
            if twice := [name for name, count in Counter(first).items() if name and count > 1]:
                raise SourceError(f"{rows.path}: two columns are called {twice[0]!r}. Rename one.")
            names = [name or "unnamed: 0" for name in first]
            rows = replace(rows, names=tuple(names), columns=[c[1:] for c in rows.columns], lines=rows.lines[1:])
            rows = without_escapes(rows)
        else:
            names = [NO_HEADER.format(i) for i in range(1, len(first) + 1)]
            rows = replace(rows, names=tuple(names), notes=(*rows.notes, f"{rows.path} has no header."))
    if not rows.lines:
        return None
    name = options.image_column or _image_column(rows, index, count)
    if name and name not in rows.names:
        raise SourceError(f"{rows.path}: there is no column {name!r} for images. There are {', '.join(rows.names)}.")
    return (rows, name) if name else None


def _image_column(rows: ParsedTable, index: ImageIndex, count: int) -> str:
    """Returns the column whose cells name images: a usual name is preferred, then most hits; "" for none."""
    step = max(1, len(rows.lines) // _LOOKED_AT)
    scores = []
    for at, (name, column) in enumerate(zip(rows.names, rows.columns, strict=True)):
        plain, some = plain_name(name), column[::step][:_LOOKED_AT]
        cells = [cell for cell in text_cells(some) if cell]
        if not cells or "mask" in plain or any(isinstance(cell, (list, dict)) for cell in some):
            continue
        whole, stem = index.hits(cells)
        known = "file_name" if plain.endswith("_file_name") else plain
        usual = IMAGE_COLUMNS.index(known) if known in IMAGE_COLUMNS else len(IMAGE_COLUMNS)
        # Labels 0 to 9 or the epochs of a log may equal stems such as 0.jpg to 9.jpg by chance. Then cells recur, or
        # they name only part of the images.
        if not whole and stem < len(cells) / 2:
            stem = 0
        if not whole and stem and usual == len(IMAGE_COLUMNS):
            named = count * stem / len(some)
            images = [index.tree.names[i] for i in index.tree.images.tolist()]
            split = split_of_name(rows.path)
            # A table that is named after a split may name only the images in folders of that.
            nameable = (folder_splits(images).count(split) if split else 0) or len(images)
            if len(set(cells)) < len(cells) or 2 * named < nameable:
                stem = 0
        if whole or stem:
            scores.append((whole == 0, usual, -whole - stem, at, name))
    return min(scores)[-1] if scores else ""


def read_head(tree: Tree, i: int, index: ImageIndex) -> tuple[str, list[str], int, tuple[str, ...]] | None:
    """Returns the column of images of a table, its first cells, about how many it has, and all columns; else None."""
    try:
        name, size = key_of(tree.names[i]), int(tree.sizes[i])
        data = tree.files.read(i) if name.lower().endswith(PARQUET) else tree.files.read_head(i, _HEAD_BYTES)
        rows = read_rows(data, name, head=len(data) < size)
        count = len(rows.lines) * size // max(1, len(data))
        found = _with_image_column(rows, index, SourceOptions(), count)
    except (SourceError, ImageError):
        return None
    if found is None:
        return None
    rows, column = found
    cells = list(map(str, rows.columns[rows.names.index(column)]))
    # The number of different cells if the whole table was read; else a tenth more than estimated.
    return column, cells, len(set(cells)) if len(data) >= size else count * 11 // 10, tuple(rows.names)


def _stem(name: str) -> str:
    return stem_of(name).lower()


def list_manifest(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the images that a table names, in its order.

    Columns: `labels` (classes, or vectors of 0 and 1), `targets` of floats, boxes, `caption`, and other columns of
    numbers or recurring text by their own names.
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
    rows.leave_out(draft, unlabelled, "rows without a label", "Fill them in")
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
        found = [(self.key(row), f"{why} ({self.location(row)})") for row, why in sorted(reasons.items())]
        draft.leave_out_all(found, which, fix, len(self.lines))

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
    index.loose = bool(tree.file) or (len(images.images) > 0 and not in_class_folders(images))
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
            bad[start + k] = reason or ("is not there" if name else "names no image")
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
    rows.leave_out(draft, bad, "rows without their image", "Put the images back")
    if len(bad) == len(split):
        first = f"{rows.images[0]!r} ({rows.location(0)})"
        raise SourceError(f"{draft.where}: not one row names an image that is there, e.g. {first}.")
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

        def differs(column: list[Any]) -> bool:
            return any(column[row] != column[these[0]] for these in several for row in these)

        differ = [name for name, column in cells.items() if differs(column)]
        fix = (
            f"{f'They differ in {first_few(differ)}. ' if differ else ''}Write one row for each image (several "
            "classes as `cat|dog`, masks of run lengths as images)"
        )
        draft.leave_out_all(twice, "images with more than one row", fix, len(unique))
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
