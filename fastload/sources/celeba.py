"""CelebA as on its site, in torchvision and on Kaggle: aligned faces and up to six text files about them.

    Anno/*.txt, Eval/*.txt, Img/img_align_celeba.zip or Img/img_align_celeba/     the official folders
    celeba/*.txt, celeba/img_align_celeba/                                        torchvision
    *.csv, img_align_celeba/img_align_celeba/                                     Kaggle, without identities

Files are found by their names at any depth, so mixtures of these work. Any text file may be missing.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format.ragged import Column
from fastload.options.pack import SourceOptions
from fastload.sources.assemble import Draft, Samples, Splits, split_path, stem_of
from fastload.sources.folder import find_images
from fastload.sources.listing import SPLIT_ORDER, first_few, require_unique
from fastload.sources.open_tree import open_tree
from fastload.sources.tree import Line, Tree, is_image, key_of, lines_of


class _Text(NamedTuple):
    """The values of one text file for each image."""

    field: str  # name of the column, or "split"
    absence: str  # what the dataset lacks without the file
    width: int | None  # integers in a row; None: as many as in the first row
    names: tuple[str, ...] = ()  # of these, if the file does not say them
    coordinates: str = ""  # the images in whose pixels they are; the aligned ones are packed
    allowed: tuple[int, ...] = ()  # the integers that may occur; (): any
    wanted: str = ""  # these in words


_BBOX = ("x_1", "y_1", "width", "height")
_POINTS = [f"{of}_{axis}" for of in ("lefteye", "righteye", "nose", "leftmouth", "rightmouth") for axis in "xy"]
_ALIGNED, _ORIGINAL = "list_landmarks_align_celeba", "list_landmarks_celeba"  # the latter only without the former
_LANDMARKS = _Text("landmarks", "no landmarks", 10, tuple(_POINTS), "aligned")
_TEXTS = {
    "list_attr_celeba": _Text("labels", "no labels", None, allowed=(-1, 1), wanted="-1 or 1"),
    "identity_celeba": _Text("identity", "no identity", 1),
    "list_eval_partition": _Text(
        "split", "everything is one split, `all`", 1, allowed=(0, 1, 2), wanted="0 (train), 1 (valid) or 2 (test)"
    ),
    "list_bbox_celeba": _Text("bbox", "no bbox", 4, _BBOX, "original"),
    _ALIGNED: _LANDMARKS,
    _ORIGINAL: _LANDMARKS._replace(coordinates="original"),
}

IMAGE_FOLDERS = ("img_align_celeba", "img_align_celeba_png")
_IMAGE_COLUMN = ("image_id", "image", "img", "file", "filename", "file_name")  # names of the column of images
_ARCHIVES = tuple(stem + suffix for stem in IMAGE_FOLDERS for suffix in (".zip", ".tar", ".tar.gz", ".tgz"))


def celeba_evidence(tree: Tree) -> list[str]:
    """Returns the files and folders of a tree, three folders deep at most, that are named as CelebA's."""
    names = [name for _, name in tree.not_images if name.count("/") <= 3]
    known = {stem + suffix for stem in list(_TEXTS)[:3] for suffix in (".txt", ".csv")}
    found = [name for name in names if _base(name) in known]
    archives = [name for name in names if _base(name).startswith(tuple(f"{stem}." for stem in IMAGE_FOLDERS))]
    folders = [f"{name}/" for name in tree.folders if name.count("/") <= 3 and _base(name) in IMAGE_FOLDERS]
    itself = [tree.path.name] if tree.path.name.lower().split(".")[0] in IMAGE_FOLDERS else []
    return [key_of(name) for name in found + archives + folders + itself]


def list_celeba(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns CelebA's images in the order of their names.

    Columns, each if its file is there: `labels` uint8 (N, 40), 0 and 1 for -1 and 1 in the file; `identity` int64
    (N,), from 1; `bbox` int32 (N, 4), in pixels of the original images; `landmarks` int32 (N, 10), in pixels of the
    aligned images, or of the original ones if only their file is there (attribute `coordinates`).
    """
    faces, rows, where = _find_faces(tree, draft)
    draft.trees.append(faces)
    draft.leave_out_broken(faces)
    names = [faces.names[i] for i in rows.tolist()]
    folder, images = split_path(names[0])[0], [split_path(name)[1] for name in names]
    require_unique(images, f"{tree.path}: {where}")
    texts = _find_texts(tree, draft)
    columns: dict[str, Column] = {}
    splits = Splits.one(len(images))
    no_file, no_row = defaultdict[str, list[str]](list), defaultdict[int, list[str]](list)
    unused = _ALIGNED if _ALIGNED not in texts and _ORIGINAL in texts else _ORIGINAL
    for stem, text in _TEXTS.items():
        if stem == unused:
            continue
        if stem not in texts:
            draft.notes.append(f"There is no {stem} (.txt or .csv): {text.absence}.")
            continue
        path, base = tree.where(texts[stem]), key_of(split_path(tree.names[texts[stem]])[1])
        table = parse_table(tree.read_text(texts[stem]), path, text.width)
        if table.count not in (None, len(table.images)):
            draft.notes.append(f"{path} promises {table.count} rows and has {len(table.images)}.")
        if text.allowed:
            table.require(text.allowed, text.wanted)
        row_of, absent = table.rows_of(images)
        for image in absent:
            if stem_of(image) not in draft.unreadable:
                no_file[key_of(folder + image)].append(base)
        for row in np.flatnonzero(row_of < 0).tolist():
            no_row[row].append(base)
        values = table.values[row_of]
        if text.field == "split":
            present = np.unique(values[row_of >= 0])
            index = np.searchsorted(present, values[:, 0]).astype(np.uint8)
            splits = Splits(index, tuple(SPLIT_ORDER[i] for i in present))
        elif text.field == "identity":
            columns["identity"] = Column(values[:, 0].astype(np.int64))
        elif text.field == "labels":
            if not table.header:
                fix = "Fetch the original file, or remove it to pack without it."
                raise SourceError(f"{path} has no line with the names of its {values.shape[1]} attributes. {fix}")
            columns["labels"] = Column((values == 1).astype(np.uint8), {"names": table.header})
        else:
            attrs = {"names": table.header or text.names, "coordinates": text.coordinates}
            columns[text.field] = Column(values, attrs, "points" if text.coordinates == "aligned" else "")
    if not texts:
        draft.notes.append("Not one of CelebA's text files was found: give the folder that holds them and the images.")
    draft.leave_out_all(
        [(key, f"is listed in {' and '.join(files)}, but has no file") for key, files in no_file.items()],
        "images that are listed, but not there",
        "Fetch or unpack the images again",
        len(names) + len(no_file),
    )
    draft.leave_out_all(
        [(key_of(names[row]), f"has no row in {' and '.join(files)}") for row, files in sorted(no_row.items())],
        "images that a text file does not list",
        "Fetch the text files again, or remove the incomplete one",
        len(names),
    )
    return Samples.in_tree(faces, rows, splits, columns).without(no_row)


def _find_texts(tree: Tree, draft: Draft) -> dict[str, int]:
    """Returns stem -> position of the text files; a .txt is preferred to a .csv, then the outermost."""
    found = defaultdict[str, list[int]](list)
    for i, name in tree.not_images:
        if name.lower().endswith((".txt", ".csv")) and (stem := stem_of(name).lower()) in _TEXTS:
            found[stem].append(i)
    for positions in found.values():
        positions.sort(key=lambda i: (not tree.names[i].lower().endswith(".txt"), tree.names[i].count("/")))
        first, *others = [key_of(tree.names[i]) for i in positions]
        if others:
            draft.notes.append(f"Read {first}, not {first_few(others)}.")
    return {stem: positions[0] for stem, positions in found.items()}


def _find_faces(tree: Tree, draft: Draft) -> tuple[Tree, NDArray[np.int64], str]:
    """Returns the tree and positions of the aligned images, and the folder or archive they lie in.

    They are taken from their folder, else from their archive, else from the only folder with images.
    """
    by_folder = defaultdict[str, list[int]](list)
    for i in tree.images.tolist():
        by_folder[tree.names[i].rpartition("/")[0]].append(i)
    packed = [name for _, name in tree.not_images if _base(name).startswith(IMAGE_FOLDERS)]
    archive = next((name for name in packed if _base(name) in _ARCHIVES), "")
    folders = [folder for folder in by_folder if _base(folder) in IMAGE_FOLDERS]
    if archive and not folders:
        if tree.archive:
            raise SourceError(
                f"{tree.path}: the images are in an archive inside it, {key_of(archive)}, which cannot be read one by "
                f"one. Unpack {tree.path} (not {key_of(archive)}) and pack the folder."
            )
        draft.notes.append(f"Read the images in {key_of(archive)}.")
        inner = open_tree(tree.path / archive)
        return inner, find_images(inner), key_of(archive)
    folders = folders or list(by_folder)
    if len(folders) > 1:
        raise SourceError(
            f"{tree.path}: there are images in more than one folder: {first_few(map(key_of, sorted(folders)))}. "
            "Keep the aligned ones in img_align_celeba and move the others away, or give their folder."
        )
    if packed and not folders:
        raise SourceError(
            f"{tree.path}: the images are packed in {first_few(map(key_of, packed))}, which cannot be read "
            "one by one. Unpack it next to the text files, or fetch img_align_celeba.zip."
        )
    if not folders:
        Draft("celeba", tree).leave_out_broken(tree)  # its reason is better than that there is no image
        find_images(tree)
    (folder,) = folders
    if archive:
        draft.notes.append(f"Read the images in {key_of(folder)}, not {key_of(archive)}.")
    return tree, np.array(by_folder[folder], np.int64), key_of(folder) or "the folder itself"


def _base(name: str) -> str:
    return split_path(name)[1].lower()


@dataclass(frozen=True, eq=False)
class TextTable:
    """The rows of one text file, in its order."""

    images: list[str]  # name of each row's image, all different; undecodable bytes are surrogates
    values: NDArray[np.int32]  # (R, V)
    header: tuple[str, ...]  # names of the V columns; empty if the file has none
    count: int | None  # the number of rows that the first line states; None without such a line
    lines: list[Line]  # of the rows

    def require(self, allowed: tuple[int, ...], wanted: str) -> None:
        """Refuses other values than those `allowed`; `wanted` describes these, and SourceError names the first."""
        good = np.isin(self.values, allowed)
        if not good.all():
            row, column = np.argwhere(~good)[0].tolist()
            name = f" ({self.header[column]})" if self.header else ""
            found = f"{self.images[row]} has the value {self.values[row, column]}{name}, expected {wanted}"
            raise self.lines[row].error(f"{found}{_FIX}")

    def rows_of(self, images: list[str]) -> tuple[NDArray[np.int64], list[str]]:
        """Returns the row of each image (-1 for none), and the images of the table that are not among `images`.

        Names are compared as a whole; if no name agrees, without suffix (rows say 000001.jpg, files are 000001.png).
        """
        if self.images == images:
            return np.arange(len(images), dtype=np.int64), []
        bare: Callable[[str], str] = str if set(self.images).intersection(images) else stem_of
        row = {bare(name): i for i, name in enumerate(self.images)}
        wanted = [bare(name) for name in images]
        absent = set(row).difference(wanted)
        there = np.array([row.get(name, -1) for name in wanted], np.int64)
        return there, [name for name in self.images if bare(name) in absent]


_FIX = ". Fix the line, or remove the file to pack without it."


def parse_table(data: bytes, path: str, num_values: int | None = None) -> TextTable:
    """Returns the rows of a text file: its content and path, and the integers in a row.

    Values are separated by any number of spaces or tabs, in a .csv by commas; lines end with LF or CRLF. A line with
    the number of rows and one with the names of the columns may come first, the latter with or without a name for the
    column of images. If `num_values` is None there are as many as the header names, else as in the first row.

    Raises:
        SourceError: a row has too few or too many values, or one that is no integer of 32 bits; an image occurs twice;
            there is no row.
    """
    comma, lines = path.lower().endswith(".csv"), lines_of(data, path)

    def split(line: Line) -> list[str]:
        return [token.strip().strip('"') for token in line.text.split(",")] if comma else line.text.split()

    count, header = None, tuple[str, ...]()
    if lines and len(first := split(lines[0])) == 1 and first[0].isdigit() and len(first[0]) < 19:
        count, lines = int(first[0]), lines[1:]
    name, *tokens = split(lines[0]) if lines else ["", "0"]
    # A first row with a wrong value is no header: no column is called 000001.jpg.
    if not is_image(name) and not (tokens and all(token.removeprefix("-").isdigit() for token in tokens)):
        above, *lines = lines
        unnamed = not (comma or len(tokens) == num_values or name.lower() in _IMAGE_COLUMN)
        header = tuple(map(key_of, [name, *tokens] if unnamed else tokens))
    if not lines:
        raise SourceError(f"{path} holds no rows. Fetch it again, or remove it to pack without it.")
    width = num_values or len(header) or max(1, len(split(lines[0])) - 1)
    if header and len(header) != width:
        fix = "Fetch the file again, or remove it to pack without it."
        raise above.error(f"{len(header)} names of columns over rows of {width} values. {fix}")
    seen: dict[str, int] = {}
    twice, values = list[str](), array("i")
    for line in lines:
        image, *tokens = split(line)
        shown = key_of(image)
        if len(tokens) != width:
            raise line.error(f"{shown} has {len(tokens)} values, expected {width}{_FIX}")
        try:
            values.extend(map(int, tokens))
        except (ValueError, OverflowError) as exc:
            bad = key_of(tokens[len(values) % width])  # those before it were taken
            raise line.error(f"{shown} has the value {bad!r}, expected an integer of 32 bits{_FIX}") from exc
        if seen.setdefault(image, line.number) != line.number:
            twice.append(f"{image} (lines {seen[image]} and {line.number})")
    if twice:
        raise SourceError(f"{path}: images with two rows or more ({len(twice)}): {first_few(twice)}. Remove the wrong.")
    return TextTable(list(seen), np.frombuffer(values, np.int32).reshape(-1, width), header, count, lines)
