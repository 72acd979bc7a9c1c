"""Finds the tables of a tree that name its images: whether each has a header, and which column names the images."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from fastload.errors import ImageError, SourceError
from fastload.sources.assemble import Draft, split_path, stem_of
from fastload.sources.captions import maybe_captions
from fastload.sources.folder import ANNOTATION_FOLDERS, IMAGE_FOLDERS, ClassFolders
from fastload.sources.listing import SPLIT_ORDER, SPLITS, SourceOptions, first_few, split_of_parts
from fastload.sources.tables.boxes import BOX_KEYS, OBJECTS, box_columns
from fastload.sources.tables.frame import LABELS, MASK_COLUMNS, plain_name, usual_names
from fastload.sources.tables.image_index import ImageIndex, folder_splits
from fastload.sources.tables.read_table import (
    DELIMITED,
    JSON_LINES,
    PARQUET,
    ParsedTable,
    read_rows,
    without_escapes,
)
from fastload.sources.tree import Tree, is_image, key_of

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
    if not positions or not len(tree.images()):
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
    images = [tree.names[i] for i in tree.images().tolist()] if splits == {"test"} else []
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
    raise SourceError(
        f"{path} is JSON as a whole, and a table has a row on each line. Write it so, and give that: "
        f"`jq -c '{rows}' {path} > {path.with_suffix('.jsonl')}`."
    )


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
            beside = f" If they lie in {archive}: `--root {images.path / archive}`." if archive else ""
            raise SourceError(
                f"{tree.path / key_of(tree.file)}: no column names images that lie below {images.path}, by path or by "
                "name without suffix. Give the folder of the images with `--root`, or the column with "
                f"`--image-column`; download what only has an address.{beside}"
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
        raise SourceError(
            f"{tree.path}: no table at the top names images that are there{looked}. Give the .csv, .tsv or .jsonl "
            "itself, and the folder of its images with `--root`."
        )
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
            images = [index.tree.names[i] for i in index.tree.images().tolist()]
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
