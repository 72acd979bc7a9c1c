"""Finds ImageNet's images in folders, in an archive for each class, or in archives of these; parses their names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.assemble import leave_out_broken
from fastload.sources.imagenet.devkit import DEVKIT, GROUND_TRUTH, META, SOLUTION, SYNSETS, TINY, WNID, WORDS
from fastload.sources.listing import OnError, first_few, split_of_parts
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


def find_parts(tree: Tree, on_error: OnError, notes: list[str], skipped: list[tuple[str, str]]) -> list[ImageOrigin]:
    """Returns the images of the tree itself, of archives of whole splits, and of archives of one class each."""
    skipped += leave_out_broken(tree, on_error)
    own = ImageOrigin("", tree, tree.images(), "", "")
    have: set[str] | None = None
    parts, classes = [own] if len(own.rows) else [], []
    used: set[int] = set()
    unpacked = set(tree.folders)
    for i, name in enumerate(tree.names):
        base = name.rpartition("/")[2]
        if match := CLASS_ARCHIVE.fullmatch(base):
            if name.removesuffix(".tar") in unpacked:
                notes.append(f"Read the images of {match[1]} in its folder, not {key_of(name)}.")
                continue
            classes.append((i, match[1]))
        elif match := ARCHIVE.fullmatch(base):
            split = match[1].lower()
            have = have if have is not None else {image.split for image in named_images(own)}
            if split in have:
                notes.append(f"Read the images of {split!r} in its folder, not {key_of(name)}.")
                continue
            parts += _whole_split(tree, i, split, on_error, skipped)
            notes.append(f"Read the images of {split!r} in {key_of(name)}.")
        elif not (base in (*SYNSETS, SOLUTION, TINY, WORDS, META, GROUND_TRUTH) or DEVKIT.fullmatch(base)):
            continue
        used.add(i)
    itself = ARCHIVE.fullmatch(tree.path.name)
    split = itself[1].lower() if itself and tree.archive else ""
    parts += _class_archives(tree, classes, "", split, on_error, skipped)
    others = [name for i, name in enumerate(tree.names) if i not in used and not is_image(name)]
    if others:
        notes.append(f"Ignored, since they are no images by their suffix ({len(others)}): {first_few(others)}.")
    return parts


def _whole_split(
    tree: Tree, position: int, split: str, on_error: OnError, skipped: list[tuple[str, str]]
) -> list[ImageOrigin]:
    """Returns the images of an original archive of a split, which holds archives of classes (train) or images."""
    from fastload.sources.archives.archive import list_inner_tar

    name = tree.names[position]
    inner = list_inner_tar(tree, position)
    skipped += [(f"{key_of(name)}/{key}", why) for key, why in leave_out_broken(inner, on_error)]
    found = [
        (i, match[1])
        for i, base in enumerate(inner.names)
        if (match := CLASS_ARCHIVE.fullmatch(base.rpartition("/")[2]))
    ]
    own = [ImageOrigin(f"{name}/", inner, inner.images(), split, "")] if len(inner.images()) else []
    return own + _class_archives(inner, found, f"{name}/", split, on_error, skipped)


def _class_archives(
    tree: Tree,
    found: list[tuple[int, str]],
    prefix: str,
    split: str,
    on_error: OnError,
    skipped: list[tuple[str, str]],
) -> list[ImageOrigin]:
    from fastload.sources.archives.archive import list_inner_tar

    parts = []
    for position, wnid in found:
        name = prefix + tree.names[position]
        try:
            inner = list_inner_tar(tree, position)
        except SourceError as exc:
            if on_error == "fail":
                raise
            skipped.append((key_of(name), f"the archive of a whole class cannot be read: {exc}"))
            continue
        skipped += [(f"{key_of(name)}/{key}", why) for key, why in leave_out_broken(inner, on_error)]
        parts.append(
            ImageOrigin(f"{name}/", inner, inner.images(), split or split_of_parts(name.split("/")[:-1]), wnid)
        )
    return parts


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
