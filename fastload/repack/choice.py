"""The choice of rows of a packed file: by split, label, pattern of keys, or a list of rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import MissingFileError, OptionError
from fastload.sources.listing import Listing, first_few


@dataclass(frozen=True)
class Choice:
    """The conditions on rows to keep: a row must meet every condition given, and any value of each.

    Attributes:
        splits: names of splits.
        labels: names of classes, or their numbers.
        keys: patterns of keys as in a shell: `*` any characters including `/`, `?` one character, `[ab]`.
        rows: a file of row numbers, text (one on a line) or .npy; they also set the order within each split.
    """

    splits: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    rows: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the conditions given, as plain JSON values and without paths."""
        given: dict[str, Any] = {name: list(getattr(self, name)) for name in ("splits", "labels", "keys")}
        return {name: values for name, values in given.items() if values}


def choose_rows(listing: Listing, choice: Choice, where: str | Path) -> NDArray[np.int64]:
    """Returns the rows that meet all conditions, in the order that they should have; int64.

    OptionError: an unknown split or label, a pattern that no key fits, rows not in the file, or no row left.
    """
    fits = np.ones(len(listing), dtype=bool)
    if choice.splits:
        if unknown := [name for name in choice.splits if name not in listing.split_names]:
            raise OptionError(f"{where}: no split {unknown[0]!r}; it has {', '.join(listing.split_names)}.")
        fits &= np.isin(listing.split, [listing.split_names.index(name) for name in choice.splits])
    if choice.labels:
        fits &= _with_labels(listing, choice.labels, where)
    if choice.keys:
        found = np.zeros((len(choice.keys), len(listing)), dtype=bool)
        for pattern, row in zip(choice.keys, found, strict=True):
            match = re.compile(translate(pattern)).match
            row[:] = [match(key) is not None for key in listing.keys]
            if not row.any():
                seen = first_few(list(listing.keys[:3]))
                raise OptionError(f"{where}: no key fits {pattern!r}; keys look like {seen}.")
        fits &= found.any(axis=0)
    rows = np.arange(len(listing)) if choice.rows is None else _rows_in(choice.rows, len(listing), where)
    rows = rows[fits[rows]]
    if not len(rows):
        asked = [f"{name} {first_few(list(values))}" for name, values in choice.to_dict().items()]
        asked += [f"rows in {choice.rows}"] if choice.rows else []
        raise OptionError(f"{where}: no row fits all that was asked for ({'; '.join(asked)}). Ask for less.")
    return rows[np.argsort(listing.split[rows], kind="stable")]


def _with_labels(listing: Listing, wanted: Sequence[str], where: str | Path) -> NDArray[np.bool_]:
    """Returns bool (N,): rows with one of these labels; with attribute vectors, with one of these attributes."""
    if "labels" not in listing.columns:
        raise OptionError(f"{where}: it has no labels, so rows cannot be chosen by them.")
    column = listing.columns["labels"]
    names: tuple[str, ...] = tuple(column.attrs.get("names", ()))
    vectors = column.values.ndim == 2
    numbers = column.values.shape[1] if vectors else max(len(names), int(column.values.max()) + 1)
    chosen = []
    for label in wanted:
        if label in names:
            chosen.append(names.index(label))
        elif re.fullmatch(r"-?\d+", label) and (-1 if not vectors else 0) <= int(label) < numbers:
            chosen.append(int(label))
        else:
            known = f"among them {first_few(list(names))}" if names else "it has no names of classes"
            raise OptionError(f"{where}: no label {label!r}: give a name or a number below {numbers}; {known}.")
    if vectors:
        found: NDArray[np.bool_] = np.any(column.values[:, chosen] != 0, axis=1)
        return found
    return np.isin(column.values, chosen)


def _rows_in(path: Path, num_rows: int, where: str | Path) -> NDArray[np.int64]:
    """Returns the row numbers in a file, int64."""
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file; --rows wants a text file with a row number a line, or .npy.")
    rows = _read_npy(path) if path.suffix.lower() == ".npy" else _read_lines(path)
    if not len(rows):
        raise OptionError(f"{path}: holds no row number.")
    outside = rows[(rows < 0) | (rows >= num_rows)]
    if len(outside):
        raise OptionError(f"{path}: row {outside[0]} is not in {where}, whose rows are 0 to {num_rows - 1}.")
    values, counts = np.unique(rows, return_counts=True)
    if len(values) < len(rows):
        twice = [str(row) for row in values[counts > 1].tolist()]
        raise OptionError(f"{path}: {len(twice)} rows stand there more than once: {first_few(twice)}. Remove repeats.")
    return rows


def _read_npy(path: Path) -> NDArray[np.int64]:
    try:
        found = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as exc:
        raise OptionError(f"{path}: not an array that can be read ({exc}).") from exc
    if isinstance(found, np.ndarray) and found.dtype == bool and found.ndim == 1:
        raise OptionError(f"{path}: holds True and False; give row numbers, as numpy.flatnonzero makes them.")
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or found.ndim != 1:
        raise OptionError(f"{path}: needs one dimension of integers.")
    if found.dtype == np.uint64 and len(found) and found.max() > np.iinfo(np.int64).max:
        raise OptionError(f"{path}: row {found.max()} is no row of any file.")
    return found.astype(np.int64)


def _read_lines(path: Path) -> NDArray[np.int64]:
    rows = []
    for number, line in enumerate(path.read_bytes().decode("utf-8-sig", errors="replace").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if not re.fullmatch(r"-?\d{1,18}", text):
            raise OptionError(f"{path}, line {number}: {text[:40]!r} is not a row number; expected one a line.")
        rows.append(int(text))
    return np.array(rows, np.int64)
