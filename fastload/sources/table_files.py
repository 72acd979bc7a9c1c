"""The tables of a tree that name its images, each with its header told from its rows and its image column found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from fastload.errors import ImageError, SourceError
from fastload.sources.class_folders import in_class_folders
from fastload.sources.folder import ORDER, SPLITS
from fastload.sources.listing import first_few
from fastload.sources.options import SourceOptions
from fastload.sources.table_columns import LABELS, plain_name
from fastload.sources.table_images import ImageIndex, folder_splits
from fastload.sources.table_reader import DELIMITED, JSON_LINES, PARQUET, Rows, read_rows
from fastload.sources.tree import Tree, is_image, key_of

IMAGE_COLUMNS = (
    "file_name filename image_path img_path filepath file_path path image_file image_name img_name image_id img_id "
    "imageid image img file fname name photo photo_id picture image_index id id_code uuid"
).split()
"""What people call the column that names images, the likeliest first."""

METADATA = "metadata"  # .csv, .jsonl or .parquet, Hugging Face's imagefolder, in the folder that its paths begin in

_HEAD_BYTES = 2**16
_LOOKED_AT = 40  # cells of a column that are looked up before it is taken for the images'
_MOST_TABLES = 50


@dataclass(frozen=True, eq=False)
class Table:
    """One table that names images.

    Attributes:
        name: path in its tree.
        base: the folder that its paths begin in, "" or ending in `/`.
        split: the split that its name or folder says; "" for none.
        rows: its content, with a name for each column.
        image: the column that names the images.
    """

    name: str
    base: str
    split: str
    rows: Rows
    image: str


def is_table(name: str) -> bool:
    """Whether a file in a folder may be a manifest, by its suffix."""
    # By the last letter first: there may be a million other names.
    if name[-1:] in "tT":
        return name.rpartition("/")[2].lower() == METADATA + PARQUET  # any other is a table of its own
    return name[-1:] in "vVlLnN" and name.lower().endswith((".csv", ".tsv", *JSON_LINES))


def manifest_evidence(tree: Tree) -> list[str]:
    """The tables of a tree of which a row names an image that is there, with that row; or the table that was given."""
    if tree.file:
        return [tree.file] if tree.file.lower().endswith((*DELIMITED, *JSON_LINES)) else []
    places = _places(tree)
    if not places or not len(tree.images()):
        return []
    index = ImageIndex(tree)
    found: list[str] = []
    named, usual, by_file = 0, False, False
    for i in places:
        name = tree.names[i]
        table = _heads(tree, i, index.at(_folder(name)))
        if table:
            rows, column, count = table
            cells = list(map(str, rows.columns[rows.names.index(column)]))
            found.append(f"{key_of(name)} (column {column}, e.g. {key_of(cells[0])})")
            named += count
            usual |= plain_name(column) in IMAGE_COLUMNS
            by_file |= any(is_image(cell) for cell in cells[:_LOOKED_AT])
            if _stem(name) == METADATA:
                return found
    # A log or a list of some images may lie beside class folders.
    classed = in_class_folders(tree) if found else 0
    if classed and not usual and (named < classed or not by_file):
        return []
    if named < classed:
        raise SourceError(
            f"{tree.given}: two layouts fit: manifest by {first_few(found)}, which names about {named} images, and "
            f"folder by class folders with {classed}. Say which one it is: `--layout manifest` or `--layout folder`."
        )
    return found


def find_tables(
    tree: Tree, options: SourceOptions, index_of: Callable[[str], ImageIndex]
) -> tuple[list[Table], list[str]]:
    """The tables that make up the dataset, and notes about those that do not.

    The one that was given; or Hugging Face's metadata files; or the only one at the top that names images; or several
    at the top that are called after splits.

    Args:
        tree: what was given.
        options: what the user says.
        index_of: the images, given the folder that a table's paths begin in.

    Raises:
        SourceError: a table is broken, none names images, or several do and are not called after splits.
    """
    if tree.file:
        table = _read(tree, 0, options, index_of(""))
        if table is None:
            raise SourceError(_no_images(tree, key_of(tree.file), index_of("")))
        return [table], []
    notes: list[str] = []
    tables: list[Table] = []
    others: list[str] = []
    for i in _places(tree):
        name = tree.names[i]
        try:
            table = _read(tree, i, options, index_of(_folder(name)))
        except SourceError:
            # A broken table that is none of the dataset's must not stop it; one that may be must.
            if split_of_name(name) or _stem(name) == METADATA or _heads(tree, i, index_of(_folder(name))):
                raise
            others.append(f"{key_of(name)} (broken)")
            continue
        if table is None:
            others.append(key_of(tree.names[i]))
        else:
            tables.append(table)
    metadata = [table for table in tables if _stem(table.name) == METADATA]
    if metadata:
        chosen = metadata
    else:
        samples = [table for table in tables if _stem(table.name).startswith("sample_sub")]
        chosen = [table for table in tables if table not in samples] or samples
        splits = [table.split for table in chosen]
        if len(chosen) > 1 and ("" in splits or len(set(splits)) < len(splits)):
            raise SourceError(
                f"{tree.path}: several tables name its images: {first_few([key_of(table.name) for table in chosen])}. "
                "Give the one that is meant itself, or name them after their splits: train.csv, val.csv, test.csv."
            )
    if not chosen:
        looked = f" (looked at {first_few(others)})" if others else ""
        raise SourceError(
            f"{tree.path}: no table at the top names images that are there{looked}. Give the .csv, .tsv or .jsonl "
            "itself, and the folder of its images with `--root`."
        )
    others += [key_of(table.name) for table in tables if table not in chosen]
    if others:
        notes.append(f"Tables ignored: {first_few(others)}.")
    order = (*ORDER, "")
    return sorted(chosen, key=lambda table: order.index(table.split)), notes


def split_of_name(name: str) -> str:
    """The split that a file is called after, as train_labels.csv, trainLabels.csv and val-00000.parquet are."""
    words = re.sub(r"([a-z])([A-Z])", r"\1 \2", name.rpartition("/")[2].rpartition(".")[0])
    found = {SPLITS[word] for word in re.split(r"[^a-z]+", words.lower()) if word in SPLITS}
    return found.pop() if len(found) == 1 else ""


def text_cells(column: Iterable[Any]) -> list[str]:
    """Cells as names: numbers as they are written, "" for none."""
    return [cell.strip() if isinstance(cell, str) else "" if cell is None else str(cell) for cell in column]


def _places(tree: Tree) -> list[int]:
    """Positions of the tables at the top (below the folder around everything), and of Hugging Face's metadata."""
    around = ""
    while tree.names:
        top = tree.names[0][len(around) :].partition("/")[0]
        if not all(name.startswith(f"{around}{top}/") for name in (tree.names[0], tree.names[-1])):
            break
        if not all(name.startswith(f"{around}{top}/") for name in tree.names):
            break
        around += f"{top}/"
    found = []
    for i, name in enumerate(tree.names):
        if is_table(name):
            below = name[len(around) :]
            if "/" not in below or (_stem(name) == METADATA and below.count("/") <= 2):
                found.append(i)
    return found[:_MOST_TABLES]


def _read(tree: Tree, i: int, options: SourceOptions, index: ImageIndex) -> Table | None:
    name = tree.names[i]
    shown = str(tree.path / key_of(name))
    rows = read_rows(tree.read_text(i), shown)
    named = _named(rows, index.at(index.base, rows.legacy), options, len(rows.lines))
    if named is None:
        return None
    split = split_of_name(name)
    if _stem(name) == METADATA:
        split = next((SPLITS[part.lower()] for part in name.split("/")[:-1] if part.lower() in SPLITS), "")
    return Table(name, index.base, split, named[0], named[1])


def _named(rows: Rows, index: ImageIndex, options: SourceOptions, count: int) -> tuple[Rows, str] | None:
    """The rows with a name for each column, and that of the images' column; None where no column names images.

    Args:
        rows: of the table, or the first of them.
        index: the images.
        options: what the user says.
        count: of rows in all of the table, about.
    """
    if not rows.names:
        first = text_cells(column[0] for column in rows.columns)
        if _is_header(first, index):
            twice = [name for name in first if name and first.count(name) > 1]
            if twice:
                raise SourceError(f"{rows.path}: two columns are called {twice[0]!r}. Rename one.")
            names = [name or "unnamed: 0" for name in first]
            rows = replace(rows, names=tuple(names), columns=[c[1:] for c in rows.columns], lines=rows.lines[1:])
        else:
            names = [f"column_{i}" for i in range(1, len(first) + 1)]
            rows = replace(rows, names=tuple(names), notes=(*rows.notes, f"{rows.path} has no header."))
    if not rows.lines:
        return None
    if options.image_column:
        if options.image_column not in rows.names:
            raise SourceError(
                f"{rows.path}: there is no column {options.image_column!r} for images. "
                f"There are {', '.join(rows.names)}."
            )
        return rows, options.image_column
    name = _image_column(rows, index, count)
    return (rows, name) if name else None


def _is_header(first: list[str], index: ImageIndex) -> bool:
    """Whether a first row names columns: none of its cells is an image that is there, or is called like one."""
    if any(map(is_image, first)):
        return False
    if any(plain_name(cell) in (*IMAGE_COLUMNS, *LABELS) for cell in first):
        return True  # though some image may be called image.jpg or label.png
    return not any(any(index.hits([cell])) for cell in first)


def _image_column(rows: Rows, index: ImageIndex, count: int) -> str:
    """The column whose cells name images: one with a usual name first, then by how many do; "" for none."""
    step = max(1, len(rows.lines) // _LOOKED_AT)
    scores = []
    for place, (name, column) in enumerate(zip(rows.names, rows.columns, strict=True)):
        plain = plain_name(name)
        cells = [cell for cell in text_cells(column[::step][:_LOOKED_AT]) if cell]
        if not cells or "mask" in plain or any(isinstance(cell, (list, dict)) for cell in column[::step][:_LOOKED_AT]):
            continue
        whole, stem = index.hits(cells)
        usual = IMAGE_COLUMNS.index(plain) if plain in IMAGE_COLUMNS else len(IMAGE_COLUMNS)
        if plain.endswith("_file_name"):
            usual = 0
        # Labels 0 to 9 or the epochs of a log may be called like 0.jpg to 9.jpg by chance: then they recur, or only
        # part of the images is.
        if not whole and stem < len(cells) / 2:
            stem = 0
        if not whole and stem and usual == len(IMAGE_COLUMNS):
            named = count * stem / len(column[::step][:_LOOKED_AT])
            if len(set(cells)) < len(cells) or 2 * named < _images_of(rows.path, index):
                stem = 0
        if whole or stem:
            scores.append((whole == 0, usual, -whole - stem, place, name))
    return min(scores)[-1] if scores else ""


def _images_of(table: str, index: ImageIndex) -> int:
    """How many images a table may name: those in the folders of its split, if it is called after one; else all."""
    names = [index.tree.names[i] for i in index.tree.images().tolist()]
    split = split_of_name(table)
    return (folder_splits(names).count(split) if split else 0) or len(names)


def _heads(tree: Tree, i: int, index: ImageIndex) -> tuple[Rows, str, int] | None:
    """The first rows of a table, its column of images and about how many rows it has.

    None if there is no such column, or not even these rows can be read.
    """
    try:
        name, size = key_of(tree.names[i]), int(tree.sizes[i])
        data = tree.files.read(i) if name.lower().endswith(PARQUET) else tree.files.read_head(i, _HEAD_BYTES)
        rows = read_rows(data, name, head=len(data) < size)
        count = len(rows.lines) * size // max(1, len(data))
        named = _named(rows, index, SourceOptions(), count)
        if named is None:
            return None
        # As many as it has different cells, where all of it was read; else a tenth more than estimated.
        cells = named[0].columns[named[0].names.index(named[1])]
        return *named, len(set(map(str, cells))) if len(data) >= size else count * 11 // 10
    except (SourceError, ImageError):
        return None


def _no_images(tree: Tree, name: str, index: ImageIndex) -> str:
    where = index.tree.path
    return (
        f"{tree.path / name}: no column names images that lie below {where}, by path or by name without suffix. "
        "Give the folder of the images with `--root`, or the column with `--image-column`."
    )


def _folder(name: str) -> str:
    return name.rpartition("/")[0] + "/" if "/" in name else ""


def _stem(name: str) -> str:
    return name.rpartition("/")[2].rpartition(".")[0].lower()
