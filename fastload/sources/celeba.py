"""CelebA as on its site, in torchvision and on Kaggle: aligned faces and up to six text files about them.

    Anno/*.txt, Eval/*.txt, Img/img_align_celeba.zip or Img/img_align_celeba/     the official folders
    celeba/*.txt, celeba/img_align_celeba/                                        torchvision
    *.csv, img_align_celeba/img_align_celeba/                                     Kaggle, without identities

Files are found by their names at any depth, so mixtures of these work. Any text file may be missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format.column import Column, Moves
from fastload.sources.assemble import Draft, Samples, Splits
from fastload.sources.folder import find_images
from fastload.sources.listing import SPLIT_ORDER, SourceOptions, first_few, require_unique
from fastload.sources.open_tree import open_tree
from fastload.sources.tables.celeba_text import TextTable, parse_table
from fastload.sources.tree import Tree, is_image, key_of

ATTRIBUTES = "list_attr_celeba"
IDENTITY = "identity_celeba"
PARTITION = "list_eval_partition"
BBOX = "list_bbox_celeba"
ALIGNED_LANDMARKS = "list_landmarks_align_celeba"
LANDMARKS = "list_landmarks_celeba"

KNOWN_TEXTS = (ATTRIBUTES, PARTITION, IDENTITY)
IMAGE_FOLDERS = ("img_align_celeba", "img_align_celeba_png")

BBOX_NAMES = ("x_1", "y_1", "width", "height")
LANDMARK_NAMES = tuple(
    f"{point}_{axis}" for point in ("lefteye", "righteye", "nose", "leftmouth", "rightmouth") for axis in "xy"
)


class _Faces(NamedTuple):
    """The aligned images: their tree, their positions in it, and the folder or archive they lie in."""

    tree: Tree
    rows: NDArray[np.int64]
    where: str


@dataclass(frozen=True)
class _Use:
    """One text file: the note if it is absent, and the integers in a row (None: as many as in the first row)."""

    stem: str
    absent: str
    num_values: int | None


_USES = (
    _Use(ATTRIBUTES, "no labels", None),
    _Use(IDENTITY, "no identity", 1),
    _Use(PARTITION, "everything is one split, `all`", 1),
    _Use(BBOX, "no bbox", 4),
    _Use(ALIGNED_LANDMARKS, "no landmarks", 10),
)


def celeba_evidence(tree: Tree) -> list[str]:
    """Returns the files and folders of a tree, three folders deep at most, that are named as CelebA's."""
    names = [name for name in tree.names if name.count("/") <= 3 and not is_image(name)]
    found = [name for name in names if _stem(name) in KNOWN_TEXTS and name.lower().endswith((".txt", ".csv"))]
    archives = [name for name in names if _base(name).startswith(tuple(f"{stem}." for stem in IMAGE_FOLDERS))]
    folders = [f"{name}/" for name in tree.folders if name.count("/") <= 3 and _base(name) in IMAGE_FOLDERS]
    itself = [tree.path.name] if tree.path.name.lower().split(".")[0] in IMAGE_FOLDERS else []
    return [key_of(name) for name in found + archives + folders + itself]


def list_celeba(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns CelebA's images in the order of their names.

    Columns, each if its file is there: `labels` uint8 (N, 40), 0 and 1 for -1 and 1 in the file; `identity` int64
    (N,), from 1; `bbox` int32 (N, 4), in pixels of the original images; `landmarks` int32 (N, 10), in pixels of the
    aligned images, or of the original ones if only their file is there (attribute `coordinates`).

    Raises:
        SourceError: an image has no row or a row no image (unless skipped); a value is not allowed.
    """
    faces = _find_faces(tree, draft.notes)
    draft.trees.append(faces.tree)
    draft.leave_out_broken(faces.tree)
    names = [faces.tree.names[i] for i in faces.rows.tolist()]
    images = [name.rpartition("/")[2] for name in names]
    require_unique(images, f"{tree.path}: {faces.where}")
    texts = _find_texts(tree, draft.notes)
    columns: dict[str, Column] = {}
    splits = Splits.one(len(images))
    folder = key_of(names[0].rpartition("/")[0] + "/").lstrip("/")
    no_file: dict[str, list[str]] = {}
    no_row: dict[int, list[str]] = {}
    for use in _USES:
        stem = LANDMARKS if use.stem == ALIGNED_LANDMARKS and use.stem not in texts else use.stem
        if stem not in texts:
            draft.notes.append(f"There is no {use.stem} (.txt or .csv): {use.absent}.")
            continue
        path = str(tree.path / key_of(tree.names[texts[stem]]))
        table = parse_table(tree.read_text(texts[stem]), path, use.num_values)
        if table.count is not None and table.count != len(table.images):
            draft.notes.append(f"{path} promises {table.count} rows and has {len(table.images)}.")
        rows, absent = table.rows_of(images)
        for image in absent:
            no_file.setdefault(folder + key_of(image), []).append(Path(path).name)
        for row in np.flatnonzero(rows < 0).tolist():
            no_row.setdefault(row, []).append(Path(path).name)
        if stem == PARTITION:
            table.refuse_unless((table.values >= 0) & (table.values <= 2), "0 (train), 1 (valid) or 2 (test)")
            present = np.unique(table.values[rows[rows >= 0], 0])
            index = np.searchsorted(present, table.values[rows, 0]).astype(np.uint8)
            splits = Splits(index, tuple(SPLIT_ORDER[i] for i in present))
        else:
            name, values, attrs = _column(stem, table)
            # Boxes are in pixels of the original images, while the aligned ones are packed.
            moves: Moves = "points" if attrs.get("coordinates") == "aligned" else ""
            columns[name] = Column(values[rows], attrs, moves)
    if not texts:
        draft.notes.append("Not one of CelebA's text files was found: give the folder that holds them and the images.")
    unreadable = {key for key, _ in draft.skipped}
    no_file = {key: files for key, files in no_file.items() if key not in unreadable}
    draft.leave_out_all(
        [(key, f"is listed in {' and '.join(files)}, but has no file") for key, files in no_file.items()],
        "images that are listed have no file",
        "Fetch or unpack the images again, or leave those out",
        [f"{key} ({' and '.join(files)})" for key, files in no_file.items()],
    )
    unlisted = {key_of(names[row]): " and ".join(files) for row, files in sorted(no_row.items())}
    draft.leave_out_all(
        [(key, f"has no row in {files}") for key, files in unlisted.items()],
        "images have no row in a text file",
        "Fetch the text files again, remove the incomplete one, or leave those images out",
        [f"{key} ({files})" for key, files in unlisted.items()],
    )
    return Samples.in_tree(faces.tree, faces.rows, splits, columns).without(no_row)


def _column(stem: str, table: TextTable) -> tuple[str, NDArray[Any], dict[str, Any]]:
    """Returns name, values and attributes of the column made of a text file, in the order of its rows."""
    if stem == IDENTITY:
        return "identity", table.values[:, 0].astype(np.int64), {}
    if stem == ATTRIBUTES:
        if not table.header:
            raise SourceError(
                f"{table.path} has no line with the names of its {table.values.shape[1]} attributes. "
                "Fetch the original file, or remove it to pack without it."
            )
        table.refuse_unless((table.values == 1) | (table.values == -1), "-1 or 1")
        return "labels", (table.values == 1).astype(np.uint8), {"names": table.header}
    if stem == BBOX:
        return "bbox", table.values, {"names": table.header or BBOX_NAMES, "coordinates": "original"}
    coordinates = "aligned" if stem == ALIGNED_LANDMARKS else "original"
    attrs = {"names": table.header or LANDMARK_NAMES, "coordinates": coordinates}
    return "landmarks", table.values, attrs


def _find_texts(tree: Tree, notes: list[str]) -> dict[str, int]:
    """Returns stem -> position of the text files; a .txt is preferred to a .csv, then the outermost."""
    stems = {use.stem for use in _USES} | {LANDMARKS}
    found: dict[str, list[int]] = {}
    for i, name in enumerate(tree.names):
        if name.lower().endswith((".txt", ".csv")) and _stem(name) in stems:
            found.setdefault(_stem(name), []).append(i)
    texts: dict[str, int] = {}
    for stem, positions in found.items():
        first, *others = sorted(
            positions, key=lambda i: (not tree.names[i].lower().endswith(".txt"), tree.names[i].count("/"))
        )
        texts[stem] = first
        if others:
            unused = first_few([key_of(tree.names[i]) for i in others])
            notes.append(f"Read {key_of(tree.names[first])}, not {unused}.")
    return texts


def _find_faces(tree: Tree, notes: list[str]) -> _Faces:
    """Returns the aligned images: from their folder, else their archive, else the only folder with images."""
    by_folder: dict[str, list[int]] = {}
    for i in tree.images().tolist():
        by_folder.setdefault(tree.names[i].rpartition("/")[0], []).append(i)
    archives = [i for i, name in enumerate(tree.names) if _base(name) in _archive_names()]
    named = [folder for folder in by_folder if _base(folder) in IMAGE_FOLDERS]
    if not named and archives:
        inner = _open_archive(tree, archives[0], notes)
        rows, _ = find_images(inner)
        return _Faces(inner, rows, key_of(tree.names[archives[0]]))
    folders = named or list(by_folder)
    if len(folders) > 1:
        raise SourceError(
            f"{tree.path}: there are images in more than one folder: {first_few(list(map(key_of, sorted(folders))))}. "
            "Keep the aligned ones in img_align_celeba and move the others away, or give their folder."
        )
    if not folders:
        packed = [key_of(name) for name in tree.names if _base(name).startswith(IMAGE_FOLDERS)]
        if packed:
            raise SourceError(
                f"{tree.path}: the images are packed in {first_few(packed)}, which cannot be read one by one. "
                "Unpack it next to the text files, or fetch img_align_celeba.zip."
            )
        Draft("celeba", tree).leave_out_broken(tree)  # its reason is better than that there is no image
        find_images(tree)
    folder = folders[0]
    ignored = len(tree.images()) - len(by_folder[folder])
    if ignored:
        notes.append(f"Ignored {ignored} images outside {key_of(folder)}.")
    if archives:
        notes.append(f"Read the images in {key_of(folder)}, not {key_of(tree.names[archives[0]])}.")
    return _Faces(tree, np.array(by_folder[folder], np.int64), key_of(folder) or "the folder itself")


def _open_archive(tree: Tree, position: int, notes: list[str]) -> Tree:
    name = key_of(tree.names[position])
    if tree.archive:
        raise SourceError(
            f"{tree.path}: the images are in an archive inside it, {name}, which cannot be read one by one. "
            f"Unpack {tree.path} (not {name}) and pack the folder."
        )
    notes.append(f"Read the images in {name}.")
    return open_tree(tree.path / Path(tree.names[position]))


def _archive_names() -> set[str]:
    return {stem + suffix for stem in IMAGE_FOLDERS for suffix in (".zip", ".tar", ".tar.gz", ".tgz")}


def _base(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _stem(name: str) -> str:
    return _base(name).rpartition(".")[0]
