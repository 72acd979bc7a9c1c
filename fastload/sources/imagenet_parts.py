"""Where ImageNet's images lie: in folders, in archives of a class each, in archives of those; and what names tell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.folder import SPLITS, leave_out_broken
from fastload.sources.ilsvrc_truth import DEVKIT, GROUND_TRUTH, META, SOLUTION, SYNSETS, TINY, WNID, WORDS
from fastload.sources.listing import OnError, first_few
from fastload.sources.tree import Tree, is_image, key_of

ARCHIVE = re.compile(r"ILSVRC2012_img_(train|val|test)(_v10102019)?\.tar", re.IGNORECASE)
CLASS_ARCHIVE = re.compile(r"(n\d{8})\.tar")
NUMBERED = re.compile(r"((?:ILSVRC2012_)?(val|test)_\d+)\.\w+")
PREFIXED = re.compile(r"(n\d{8})_[^/]*")


class Part(NamedTuple):
    """Images of one origin: the tree given, or an archive in it."""

    prefix: str  # of their keys
    tree: Tree
    rows: NDArray[np.int64]
    split: str  # of all of them; "" when their folders tell
    wnid: str  # likewise


class NamedImage(NamedTuple):
    """What the name of an image says."""

    split: str
    wnid: str  # "" when it does not tell its class
    stem: str  # then: what it is called in tables; "" when they do not know such names


def find_parts(tree: Tree, on_error: OnError, notes: list[str], skipped: list[tuple[str, str]]) -> list[Part]:
    """Where the images are: in the tree itself, in archives of whole splits, in archives of a class each."""
    skipped += leave_out_broken(tree, on_error)
    own = Part("", tree, tree.images(), "", "")
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
            have = have if have is not None else {image.split for image in tell(own)}
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
) -> list[Part]:
    """The parts of one of the original archives: of classes' archives (train), or of images."""
    from fastload.sources.archives import list_inner_tar

    name = tree.names[position]
    inner = list_inner_tar(tree, position)
    skipped += [(f"{key_of(name)}/{key}", why) for key, why in leave_out_broken(inner, on_error)]
    found = [
        (i, match[1])
        for i, base in enumerate(inner.names)
        if (match := CLASS_ARCHIVE.fullmatch(base.rpartition("/")[2]))
    ]
    own = [Part(f"{name}/", inner, inner.images(), split, "")] if len(inner.images()) else []
    return own + _class_archives(inner, found, f"{name}/", split, on_error, skipped)


def _class_archives(
    tree: Tree,
    found: list[tuple[int, str]],
    prefix: str,
    split: str,
    on_error: OnError,
    skipped: list[tuple[str, str]],
) -> list[Part]:
    from fastload.sources.archives import list_inner_tar

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
        parts.append(Part(f"{name}/", inner, inner.images(), split or _split_of(name.split("/")[:-1]), wnid))
    return parts


def tell(part: Part) -> Iterator[NamedImage]:
    """What the names of a part's images say, one by one."""
    told: dict[str, NamedImage] = {}
    for i in part.rows.tolist():
        folder, _, base = part.tree.names[i].rpartition("/")
        if (image := told.get(folder)) is None:
            steps = folder.split("/")
            wnid = part.wnid or next((step for step in reversed(steps) if WNID.fullmatch(step)), "")
            image = told[folder] = NamedImage(part.split or _split_of(steps) or "all", wnid, "")
        if image.wnid:
            yield image
        elif match := NUMBERED.fullmatch(base):
            yield NamedImage(match[2], "", match[1])
        elif match := PREFIXED.fullmatch(base):
            yield NamedImage(image.split, match[1], "")
        else:
            yield image


def _split_of(folders: list[str]) -> str:
    return next((SPLITS[folder.lower()] for folder in folders if folder.lower() in SPLITS), "")
