"""Finds the file that each cell of a table names: by a path, by the end of a path, or by a name without suffix.

Separators may be `/` or `\\`; upper and lower case, and zeros before a number, may differ where that leaves one file.
"""

from __future__ import annotations

import copy
import os
import posixpath
import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.remote.urls import ObjectPath
from fastload.sources.listing import split_of_parts
from fastload.sources.tree import IMAGE_SUFFIXES, Tree, is_image, key_of

_MASK_FOLDER = re.compile(r"mask|annot|segment|label", re.IGNORECASE)
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_MANY = 100  # from so many rows on, a beginning and end that they lack alike are looked for
_ADDRESS = re.compile(r"[a-z][a-z0-9+]*://")


_Lookups = dict[Callable[[str], str], tuple[dict[str, int], dict[str, list[int]]]]
_TABLES: WeakKeyDictionary[Tree, tuple[dict[str, int], _Lookups, str]] = WeakKeyDictionary()
"""The images of a tree by path, and by the compared part of a name, and its `_top`; for all indexes of the tree."""


class FoundFiles(NamedTuple):
    """The files of R cells."""

    positions: NDArray[np.int64]  # (R,), position of each file in the tree; -1 for none
    reasons: dict[int, str]  # row -> why there is no file, if more is known than that it is absent
    renamed: int  # number of rows whose file has another suffix than they say
    loosely: int  # number of rows whose file is written in another case, or with zeros before its number


class ImageIndex:
    """The images of a tree by path, by name, and by name without suffix."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.base = ""  # folder of the table in the tree ("" or ending in `/`), which its paths are relative to
        self.legacy = ""  # 8-bit encoding the table was read with, in which file names may be written
        self.loose = False  # whether numbers without zeros, or names in another case, show which column names images
        self._loosely = 0  # cells since `find` began that only `_LOOSELY` finds
        if tree not in _TABLES:
            paths = {tree.names[i]: i for i in tree.images.tolist()}
            _TABLES[tree] = paths, {}, _top(tree, paths)
        self._paths, self._lookups, self._top = _TABLES[tree]

    def at(self, base: str, legacy: str = "") -> ImageIndex:
        """Returns the index of the same images for a table in another folder or encoding."""
        other = copy.copy(self)  # shares the look-up tables
        other.base, other.legacy = base, legacy
        return other

    def find(self, cells: list[str], split: list[str], *, masks: bool = False) -> FoundFiles:
        """Returns the file of each of R cells ("" for none), given the split of each row ("" if unknown).

        A path is relative to the table's folder, else to the top of the tree. Otherwise the file counts whose path ends
        with the cell, with or without suffix; of several, the one in a folder named after the row's split, and the one
        outside of (if masks: inside) a folder of masks.

        Raises:
            SourceError: a cell leads out of the tree.
        """
        cells = [cell.removeprefix(self._top) for cell in cells]
        positions = np.fromiter((self._paths.get(self.base + cell, -1) for cell in cells), np.int64, len(cells))
        reasons: dict[int, str] = {}

        def search(rows: list[int], names: list[str]) -> None:
            for row, name in zip(rows, names, strict=True):
                found = self._search(name, split[row], masks)
                if isinstance(found, str):
                    reasons[row] = found
                else:
                    positions[row] = found

        if np.count_nonzero(positions < 0) > _MANY:
            self._find_alike(cells, split, masks, positions)
        rows = [row for row in np.flatnonzero(positions < 0).tolist() if cells[row]]
        search(rows, [cells[row] for row in rows])
        # Rows may say 000001.jpg while the files are 000001.png. This counts only if it is so for all rows: else a
        # missing file would silently be replaced by one of the same stem.
        rows = [row for row in rows if is_image(cells[row])] if (positions < 0).all() and not reasons else []
        search(rows, [cells[row].rpartition(".")[0] for row in rows])
        loosely, self._loosely = self._loosely, 0
        return FoundFiles(positions, reasons, int((positions[rows] >= 0).sum()), loosely)

    def hits(self, cells: list[str]) -> tuple[int, int]:
        """Returns how many cells name an image by path or whole name, and how many by name without suffix."""
        whole = stem = 0
        for cell in (cell.removeprefix(self._top) for cell in cells):
            path = _plain(cell)
            if not path or _ADDRESS.match(path):
                continue
            if self.base + cell in self._paths:
                whole += 1
                continue
            below = _below(self.tree, path) if path.startswith("/") or _DRIVE.match(path) else path
            if below is None:
                whole += is_image(cell)  # it names an image outside of the tree, which `find` reports
            elif any(self._candidates(variant, _whole) for variant in _variants(below, self.legacy)) or (
                is_image(below) and self._candidates(below, _whole_loosely)
            ):
                whole += 1
            elif any(self._candidates(bare, _bare) for bare in _variants(_stem(below), self.legacy)) or (
                self.loose and any(self._candidates(_stem(below), how) for how in _LOOSELY)
            ):
                stem += 1
        return whole, stem

    def _find_alike(self, cells: list[str], split: list[str], masks: bool, positions: NDArray[np.int64]) -> None:
        """Finds all cells at once that lack the same beginning and end of the path as the first of them does."""
        lost = np.flatnonzero(positions < 0).tolist()
        cell = cells[lost[0]]
        # Only if no name recurs: else a match might not be the only one.
        found = self._search(cell, split[lost[0]], masks) if cell and not self._lookup(_bare)[1] else -1
        if isinstance(found, int) and found >= 0 and cell in self.tree.names[found]:
            before, _, after = self.tree.names[found].partition(cell)
            theirs = split_of_parts(before.split("/")[:-1])
            rows = [row for row in lost if cells[row] and (not theirs or split[row] in ("", theirs))]
            positions[rows] = [self._paths.get(before + cells[row] + after, -1) for row in rows]

    def _search(self, cell: str, split: str, masks: bool) -> int | str:
        """Returns the position of a cell's file; -1 if there is none; or why it is ambiguous or not a file."""
        if _ADDRESS.match(cell):
            return "is an address: download it first"
        path = _plain(cell)
        wrong = ""
        if path.startswith("/") or _DRIVE.match(path):
            if (below := _below(self.tree, path)) is not None:
                return self._paths.get(below, -1)
            wrong = "lies outside"
        elif posixpath.normpath(self.base + path).startswith("../") or posixpath.normpath(self.base + path) == "..":
            wrong = "leads out of the folder"
        if wrong:
            names = path.split("/")
            end = next((names[at:] for at in range(1, len(names)) if "/".join(names[at:]) in self._paths), [])
            fix = "Write paths relative to the folder of the images, and give that: as `--root`, if it lies elsewhere."
            if end:
                fix = f"Write {'/'.join(end)!r}, which is there, and all paths so: relative to the folder."
            raise SourceError(f"{self.tree.path}: a table names {cell!r}, which {wrong}. {fix}")
        for start in (self.base,) if ".." in path else (self.base, ""):
            inside = posixpath.normpath(start + path)
            if inside in self._paths:
                return self._paths[inside]
        for ways in (_EXACTLY, _LOOSELY):
            for variant in _variants(path, self.legacy):
                for how in ways:
                    if candidates := self._candidates(variant, how):
                        self._loosely += ways is _LOOSELY
                        return self._choose(candidates, split, masks)
        return -1

    def _candidates(self, path: str, how: Callable[[str], str]) -> list[int]:
        """Returns the images whose name (by `how`) equals a path's, and whose folder ends with the path's folder."""
        folder, _, base = path.rpartition("/")
        one, many = self._lookup(how)
        base = base if how in _EXACTLY else how(f"{base}." if how is _bare_loosely else base)
        found = sorted(many.get(base) or [one[base]]) if base in one else []
        if not folder or not found:
            return found
        names = self.tree.names
        if how in _LOOSELY:
            return [i for i in found if f"/{names[i].rpartition('/')[0]}".lower().endswith(f"/{folder}".lower())]
        return [i for i in found if f"/{names[i].rpartition('/')[0]}".endswith(f"/{folder}")]

    def _lookup(self, how: Callable[[str], str]) -> tuple[dict[str, int], dict[str, list[int]]]:
        """Returns the last image of each name, as `how` returns it, and all images of each name that recurs."""
        if how not in self._lookups:
            parts = [how(name.rpartition("/")[2]) for name in self._paths]
            one, many = dict(zip(parts, self._paths.values(), strict=True)), dict[str, list[int]]()
            if len(one) < len(parts):
                for part, i in zip(parts, self._paths.values(), strict=True):
                    if one[part] != i:
                        many.setdefault(part, [one[part]]).append(i)
            self._lookups[how] = one, many
        return self._lookups[how]

    def _choose(self, candidates: list[int], split: str, masks: bool) -> int | str:
        names = self.tree.names
        folders = {i: names[i].rpartition("/")[0] for i in candidates}
        splits = {i: split_of_parts(folders[i].split("/")) for i in candidates}
        if split:
            # The same ids may occur in train/ and test/: a row of train never means a file below test/.
            candidates = [i for i in candidates if splits[i] in ("", split)]
            if not candidates:
                return -1
            candidates = [i for i in candidates if splits[i]] or candidates
        candidates = [i for i in candidates if bool(_MASK_FOLDER.search(folders[i])) == masks] or candidates
        candidates = [i for i in candidates if folders[i] == self.base.rstrip("/")] or candidates
        if len(candidates) == 1:
            return candidates[0]
        shown = " and ".join(key_of(names[i]) for i in candidates[:3])
        return f"may be {shown}: say which folder paths begin in with `--root`"


def _top(tree: Tree, paths: Iterable[str]) -> str:
    """Returns what a cell relative to the folder above the tree, or the URL of an object in it, begins with; or "".

    A folder in the tree that has the tree's own name counts first.
    """
    if isinstance(tree.path, ObjectPath):
        return f"{tree.path}/"
    own = f"{tree.path.absolute().name}/"
    return "" if tree.archive or any(path.startswith(own) for path in paths) else own


def _below(tree: Tree, path: str) -> str | None:
    """Returns an absolute path relative to the folder of the tree, or None if it is not in there."""
    if not tree.in_place:
        return None
    top = os.path.abspath(tree.path)
    path = posixpath.normpath(path)
    return path[len(top) + 1 :] if path.startswith(top + "/") else None


def _variants(path: str, legacy: str) -> list[str]:
    """Returns the ways in which the path of a cell may be written; `legacy` as in `ImageIndex`."""
    if path.isascii():
        # pandas writes whole numbers as 1.0 if the column has missing ones.
        return [path, path[:-2]] if path.endswith(".0") and path[:-2].isdecimal() else [path]
    # macOS splits accents
    variants = [path, unicodedata.normalize("NFC", path), unicodedata.normalize("NFD", path)]
    raw = [path.encode(legacy, "ignore").decode("utf-8", "surrogateescape")] if legacy else []
    return variants + raw


def _plain(cell: str) -> str:
    """Returns a cell as a path with `/`, without `./`."""
    return cell.strip().replace("\\", "/").removeprefix("./")


def _whole(base: str) -> str:
    return base


def _bare(base: str) -> str:
    return base.rpartition(".")[0]


def _whole_loosely(base: str) -> str:
    return base.lower()


def _bare_loosely(base: str) -> str:
    stem = base.rpartition(".")[0].lower()
    return stem.lstrip("0") or "0" if stem.isdecimal() else stem


_EXACTLY = (_whole, _bare)
_LOOSELY = (_whole_loosely, _bare_loosely)
"""Functions by which names of files and cells are compared: by the second of each, names may lack the suffix."""


def _stem(name: str) -> str:
    suffix = next((suffix for suffix in IMAGE_SUFFIXES if name.lower().endswith(suffix)), "")
    return name[: len(name) - len(suffix)]


def folder_splits(names: list[str]) -> list[str]:
    """Returns the split of each file by the folders above it; "" for none."""
    folders = [name.rpartition("/")[0] for name in names]
    known = {folder: split_of_parts(folder.split("/")) for folder in set(folders)}
    return [known[folder] for folder in folders]
