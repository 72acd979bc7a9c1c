"""Which file of a tree each cell of a table means: a path, a path from elsewhere in the tree, or a name alone."""

from __future__ import annotations

import copy
import os
import posixpath
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.folder import SPLITS
from fastload.sources.tree import IMAGE_SUFFIXES, Tree, is_image, key_of

_MASK_FOLDER = re.compile(r"mask|annot|segment|label", re.IGNORECASE)
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_MANY = 100  # rows that are worth a look at what they have in common
_ADDRESS = re.compile(r"[a-z][a-z0-9+]*://")


class _Lookup(NamedTuple):
    """Positions of images by a part of their path: the only one, or all that share it."""

    one: dict[str, int]
    many: dict[str, list[int]]


class Found(NamedTuple):
    """Where the files of R cells are.

    Attributes:
        positions: int64 (R,), in the tree; -1 where there is none.
        reasons: row -> why it is none, where more can be said than that.
        renamed: how many rows name another suffix than their file has.
    """

    positions: NDArray[np.int64]
    reasons: dict[int, str]
    renamed: int


@dataclass(eq=False)
class ImageIndex:
    """The images of a tree by path, by name and by name without suffix.

    Attributes:
        tree: whose images they are.
        base: path of the table's folder in it, "" or ending in `/`: where its paths begin.
        legacy: encoding in which a table's names may be meant byte by byte; "" for none.
    """

    tree: Tree
    base: str = ""
    legacy: str = ""
    _paths: dict[str, int] = field(init=False)
    _lookups: dict[bool, _Lookup] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        names = self.tree.names
        self._paths = {names[i]: i for i in self.tree.images().tolist()}

    def at(self, base: str, legacy: str = "") -> ImageIndex:
        """The same images for a table in another folder or encoding."""
        other = copy.copy(self)  # what was looked up once is shared
        other.base, other.legacy = base, legacy
        return other

    def find(self, cells: list[str], split: list[str], *, masks: bool = False) -> Found:
        """The file of each cell.

        A path counts from the table's folder, then from the tree's top. Else the one file counts whose path ends like
        it, with or without its suffix; of several, the one in a folder named after the row's split, and the one in no
        folder of masks (masks: in one).

        Args:
            cells: R cells; "" means none.
            split: R names of splits as far as known, else "".
            masks: files of masks are looked for.

        Raises:
            SourceError: a cell leads out of the tree.
        """
        paths, base = self._paths, self.base
        positions = np.fromiter((paths.get(base + cell, -1) for cell in cells), np.int64, len(cells))
        reasons: dict[int, str] = {}
        lost = np.flatnonzero(positions < 0)
        if len(lost) > _MANY:
            self._find_alike(cells, split, lost, masks, positions)
            lost = lost[positions[lost] < 0]
        for row in lost.tolist():
            if cells[row]:
                found = self._search(cells[row], split[row], masks)
                if isinstance(found, str):
                    reasons[row] = found
                else:
                    positions[row] = found
        lost = np.flatnonzero(positions < 0)
        renamed = 0
        # Rows may say 000001.jpg where the files are 000001.png. Only if that is so for all of them: else a file that
        # is missing would quietly be replaced by its namesake.
        if len(cells) and len(lost) == len(cells) and not reasons:
            for row in lost.tolist():
                if is_image(cells[row]):
                    found = self._search(cells[row].rpartition(".")[0], split[row], masks)
                    if isinstance(found, str):
                        reasons[row] = found
                    else:
                        positions[row] = found
                        renamed += found >= 0
        return Found(positions, reasons, renamed)

    def hits(self, cells: list[str]) -> tuple[int, int]:
        """How many of some cells name an image by a path or whole name, and how many by its name without suffix."""
        whole = stem = 0
        for cell in cells:
            path = _plain(cell)
            if not path or _ADDRESS.match(path):
                continue
            below = self._below(path) if path.startswith("/") or _DRIVE.match(path) else path
            if below is None:
                whole += is_image(cell)  # it names an image, though none that may be read: `find` says so
            elif any(self._candidates(variant, stems=False) for variant in self._variants(below)):
                whole += 1
            elif any(self._candidates(bare, stems=True) for bare in self._variants(_stem(below))):
                stem += 1
        return whole, stem

    def _find_alike(
        self, cells: list[str], split: list[str], lost: NDArray[np.int64], masks: bool, positions: NDArray[np.int64]
    ) -> None:
        """Find the many cells that lack the same beginning and end as the first of them, at once."""
        if self._lookup(stems=True).many:
            return  # a match might not be the only one
        cell = cells[lost[0]]
        found = self._search(cell, split[lost[0]], masks) if cell else -1
        if isinstance(found, str) or found < 0:
            return
        before, middle, after = self.tree.names[found].partition(cell)
        if not middle:
            return
        theirs = _split_of(before)
        rows = [row for row in lost.tolist() if cells[row] and (not theirs or split[row] in ("", theirs))]
        positions[rows] = [self._paths.get(before + cells[row] + after, -1) for row in rows]

    def _search(self, cell: str, split: str, masks: bool) -> int | str:
        """Position of a cell's file, -1 if there is none, or why it cannot be told."""
        if _ADDRESS.match(cell):
            return "is an address: download it first"
        path = _plain(cell)
        if path.startswith("/") or _DRIVE.match(path):
            below = self._below(path)
            if below is None:
                raise SourceError(
                    f"{self.tree.path}: a table names {cell!r}, which lies outside. Give the folder that holds the "
                    "images, or write paths relative to it."
                )
            found = self._paths.get(below)
            return -1 if found is None else found
        for start in (self.base, ""):
            inside = posixpath.normpath(start + path)
            if inside == ".." or inside.startswith("../"):
                raise SourceError(
                    f"{self.tree.path}: a table names {cell!r}, which leads out of the folder. Give the folder that "
                    "holds the images, or write paths relative to it."
                )
            if inside in self._paths:
                return self._paths[inside]
            if ".." in path:
                break
        for variant in self._variants(path):
            for stems in (False, True):
                if candidates := self._candidates(variant, stems=stems):
                    return self._choose(candidates, split, masks)
        return -1

    def _below(self, path: str) -> str | None:
        if self.tree.archive:
            return None
        top = os.path.abspath(self.tree.path)
        path = posixpath.normpath(path)
        return path[len(top) + 1 :] if path.startswith(top + "/") else None

    def _variants(self, path: str) -> list[str]:
        if path.isascii():
            # pandas writes whole numbers as 1.0 in a column where one is missing.
            return [path, path[:-2]] if path.endswith(".0") and path[:-2].isdecimal() else [path]
        variants = [
            path,
            unicodedata.normalize("NFC", path),
            unicodedata.normalize("NFD", path),
        ]  # macOS splits accents
        if self.legacy:
            raw = path.encode(self.legacy, "ignore").decode("utf-8", "surrogateescape")
            variants.append(raw)
        return variants

    def _candidates(self, path: str, *, stems: bool) -> list[int]:
        folder, _, base = path.rpartition("/")
        one, many = self._lookup(stems=stems)
        if base not in one:
            return []
        found = sorted(many.get(base) or [one[base]])
        if not folder:
            return found
        names = self.tree.names
        return [i for i in found if f"/{names[i].rpartition('/')[0]}".endswith(f"/{folder}")]

    def _lookup(self, *, stems: bool) -> _Lookup:
        if stems not in self._lookups:
            parts = [name.rpartition("/")[2] for name in self._paths]
            if stems:
                parts = [part.rpartition(".")[0] for part in parts]
            one, many = dict(zip(parts, self._paths.values(), strict=True)), dict[str, list[int]]()
            if len(one) < len(parts):
                for part, i in zip(parts, self._paths.values(), strict=True):
                    if one[part] != i:  # the last of them is the one
                        many.setdefault(part, [one[part]]).append(i)
            self._lookups[stems] = _Lookup(one, many)
        return self._lookups[stems]

    def _choose(self, candidates: list[int], split: str, masks: bool) -> int | str:
        names = self.tree.names

        def keep(positions: list[int], wanted: list[bool]) -> list[int]:
            return [i for i, good in zip(positions, wanted, strict=True) if good] or positions

        if split:
            # Ids begin anew in train/ and test/: a row of train never means a file below test/.
            theirs = [_split_of(names[i]) for i in candidates]
            candidates = [i for i, name in zip(candidates, theirs, strict=True) if name in ("", split)]
            if not candidates:
                return -1
            candidates = keep(candidates, [_split_of(names[i]) == split for i in candidates])
        if len(candidates) > 1:
            masked = [bool(_MASK_FOLDER.search(names[i].rpartition("/")[0])) for i in candidates]
            candidates = keep(candidates, [here == masks for here in masked])
        if len(candidates) > 1:
            here = [posixpath.dirname(names[i]) == self.base.rstrip("/") for i in candidates]
            candidates = keep(candidates, here)
        if len(candidates) > 1:
            shown = " and ".join(key_of(names[i]) for i in candidates[:3])
            return f"may be {shown}: say which folder paths begin in with `--root`"
        return candidates[0]


def _plain(cell: str) -> str:
    """A cell as a path with `/`."""
    path = cell.strip()
    if "\\" in path and "/" not in path:
        path = path.replace("\\", "/")
    return path.removeprefix("./")


def _stem(name: str) -> str:
    low = name.lower()
    for suffix in IMAGE_SUFFIXES:
        if low.endswith(suffix):
            return name[: -len(suffix)]
    return name


def _split_of(name: str) -> str:
    """The split that a folder above a file is called after, "" for none."""
    return next((SPLITS[part.lower()] for part in name.split("/")[:-1] if part.lower() in SPLITS), "")


def folder_splits(names: list[str]) -> list[str]:
    """The split whose folder each file lies in, "" for none."""
    known: dict[str, str] = {}
    found = []
    for name in names:
        folder = name.rpartition("/")[0]
        if folder not in known:
            known[folder] = _split_of(name)
        found.append(known[folder])
    return found


def common_folders(names: list[str]) -> list[tuple[str, int]]:
    """The folders that some files lie in with their numbers, the fullest first."""
    return Counter(key_of(name.rpartition("/")[0]) for name in names).most_common()
