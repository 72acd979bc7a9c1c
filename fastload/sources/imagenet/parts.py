"""Finds ImageNet's images in folders, in an archive for each class, or in archives of these; parses their names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.assemble import Draft, split_path
from fastload.sources.imagenet.devkit import DEVKIT, TABLES, WNID
from fastload.sources.listing import first_few, split_of_parts
from fastload.sources.tree import Tree, is_image, key_of

ARCHIVE = re.compile(r"ILSVRC2012_img_(train|val|test)(_v10102019)?\.tar", re.IGNORECASE)
CLASS_ARCHIVE = re.compile(r"(n\d{8})\.tar")
NUMBERED = re.compile(r"((?:ILSVRC2012_)?(val|test)_\d+)\.\w+")
PREFIXED = re.compile(r"(n\d{8})_[^/]*")


class ImageOrigin(NamedTuple):
    """Images of the tree given, or of one archive in it.

    Attributes:
        prefix: prefix of their keys.
        tree: the tree they are read from.
        rows: int64, positions of the images in the tree.
        split: split of all of them; "" if their folders say it.
        wnid: class of all of them; "" if their folders or names say it.
    """

    prefix: str
    tree: Tree
    rows: NDArray[np.int64]
    split: str
    wnid: str


class NamedImage(NamedTuple):
    """Split and class of an image by its path.

    Attributes:
        split: its split.
        wnid: its class; "" if the path does not say it.
        stem: without a class: its name in tables of classes; "" if it is not named like the images in these.
    """

    split: str
    wnid: str
    stem: str


def find_parts(draft: Draft, tree: Tree) -> list[ImageOrigin]:
    """Returns the images of the tree itself, of archives of whole splits, and of archives of one class each."""
    draft.leave_out_broken(tree)
    own = ImageOrigin("", tree, tree.images(), "", "")
    parts = [own] if len(own.rows) else []
    files = [(i, name, split_path(name)[1]) for i, name in enumerate(tree.names) if not is_image(name)]
    unpacked, classes, others = set(tree.folders), list[int](), list[str]()
    have = {image.split for image in named_images(own)} if any(_of_split(base) for _, _, base in files) else set()
    for i, name, base in files:
        match, split = CLASS_ARCHIVE.fullmatch(base), _of_split(base)
        if (match and name.removesuffix(".tar") in unpacked) or split in have:
            draft.notes.append(
                f"Read the images of {match[1] if match else repr(split)} in its folder, not {key_of(name)}."
            )
            others.append(name)
        elif match:
            classes.append(i)
        elif split:
            parts += _whole_split(draft, tree, i, split)
            draft.notes.append(f"Read the images of {split!r} in {key_of(name)}.")
        elif base not in TABLES and not DEVKIT.fullmatch(base):
            others.append(name)
    parts += _class_archives(draft, tree, classes, "", _of_split(tree.path.name) if tree.archive else "")
    if others:
        draft.notes.append(f"Ignored, since they are no images by their suffix ({len(others)}): {first_few(others)}.")
    return parts


def _of_split(base: str) -> str:
    """Returns the split that ImageNet's original archive of this name holds; "" for any other file."""
    match = ARCHIVE.fullmatch(base)
    return match[1].lower() if match else ""


def _whole_split(draft: Draft, tree: Tree, position: int, split: str) -> list[ImageOrigin]:
    """Returns the images of an original archive of a split, which holds archives of classes (train) or images."""
    own = _opened(draft, tree, position, "", split, "")
    inside = [i for i, name in enumerate(own.tree.names) if CLASS_ARCHIVE.fullmatch(split_path(name)[1])]
    return [own] * bool(len(own.rows)) + _class_archives(draft, own.tree, inside, own.prefix, split)


def _class_archives(draft: Draft, tree: Tree, positions: list[int], prefix: str, split: str) -> list[ImageOrigin]:
    """Returns the images of archives of one class each."""
    parts = []
    for position in positions:
        wnid = split_path(tree.names[position])[1].removesuffix(".tar")
        try:
            parts.append(_opened(draft, tree, position, prefix, split, wnid))
        except SourceError as exc:
            if draft.on_error == "fail":
                raise
            name = key_of(prefix + tree.names[position])
            draft.leave_out(name, f"the archive of a whole class cannot be read: {exc}")
    return parts


def _opened(draft: Draft, tree: Tree, position: int, prefix: str, split: str, wnid: str) -> ImageOrigin:
    """Returns the images of an archive inside a tree."""
    from fastload.sources.archives.archive import list_inner_tar

    inner, name = list_inner_tar(tree, position), prefix + tree.names[position]
    draft.leave_out_broken(inner, f"{key_of(name)}/")
    split = split or split_of_parts(name.split("/")[:-1])
    return ImageOrigin(f"{name}/", inner, inner.images(), split, wnid)


def named_images(part: ImageOrigin) -> Iterator[NamedImage]:
    """Yields split and class of each image by its path, in order."""
    by_folder: dict[str, NamedImage] = {}
    for i in part.rows.tolist():
        folder, _, base = part.tree.names[i].rpartition("/")
        if (image := by_folder.get(folder)) is None:
            steps = folder.split("/")
            wnid = part.wnid or next((step for step in reversed(steps) if WNID.fullmatch(step)), "")
            image = by_folder[folder] = NamedImage(part.split or split_of_parts(steps) or "all", wnid, "")
        if image.wnid:
            yield image
        elif match := NUMBERED.fullmatch(base):
            yield NamedImage(match[2], "", match[1])
        elif match := PREFIXED.fullmatch(base):
            yield NamedImage(image.split, match[1], "")
        else:
            yield image
