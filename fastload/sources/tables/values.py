"""Turns the cells of a table's column into one type: integers, floats, text or lists, with a mark of missing ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["int", "float", "text", "list", "other"]

_EMPTY = {"", "nan"}  # in any column; "none" and "NA" may well be classes
_NO_NUMBER = _EMPTY | {"na", "n/a", "null", "none", "-"}  # in a column that is otherwise numbers


@dataclass(frozen=True, eq=False)
class Values:
    """One column of R cells."""

    kind: Kind  # of all cells that are not missing; "other" for what a packed file cannot hold (nested objects, dates)
    # (R,) of int64, float64, str objects or list objects; lists of numbers of one length are (R, ...) of any numeric
    # dtype. Missing cells are 0, NaN, "" or [].
    values: NDArray[Any]
    missing: NDArray[np.bool_]  # (R,), True for cells without a value
    names: tuple[str, ...] = ()  # of the classes that integers stand for, if the table itself has them

    def __len__(self) -> int:
        return len(self.missing)

    def texts(self) -> list[str]:
        """Returns every cell as text; "" for missing ones."""
        return ["" if gone else str(value) for value, gone in zip(self.values.tolist(), self.missing, strict=True)]

    def is_binary(self, rows: NDArray[np.int64] | slice = slice(None)) -> bool:
        """Whether no cell (of some rows) is missing and all are 0 or 1, or all are -1 or 1."""
        values = self.values[rows]
        if self.kind != "int" or values.ndim > 1 or bool(self.missing[rows].any()) or self.names:
            return False
        return bool(np.isin(values, (-1 if values.min(initial=0) < 0 else 0, 1)).all())


def values_of(cells: Sequence[Any]) -> Values:
    """Returns the values of a column of JSON values, or of text as in CSV. None is missing.

    Text becomes numbers if all cells can be read as such; "1_000", which Python would read, stays text.
    """
    every = set(map(type, cells))
    kinds = every - {type(None)}
    if kinds == {str}:
        if every == kinds:
            with suppress(ValueError, OverflowError):
                found = np.array(list(map(int, cells)), np.int64)
                if not any("_" in cell for cell in cells):
                    return Values("int", found, np.zeros(len(cells), np.bool_))
        return _numbers_or_text(cells)
    if kinds <= {bool, int}:
        return _integers(cells)
    if kinds <= {bool, int, float}:
        missing = np.fromiter((cell is None or math.isnan(cell) for cell in cells), np.bool_, len(cells))
        return Values("float", np.array([math.nan if cell is None else cell for cell in cells], np.float64), missing)
    if kinds == {list}:
        return _lists(cells)
    if kinds & {list, dict}:
        return other(len(cells))
    return _numbers_or_text([None if cell is None else str(cell) for cell in cells])


def other(rows: int) -> Values:
    """Returns the values of a column that cannot be packed."""
    return Values("other", np.zeros(rows, np.int64), np.zeros(rows, np.bool_))


def nothing(rows: int) -> Values:
    """Returns the values of a column whose cells are all missing."""
    return Values("int", np.zeros(rows, np.int64), np.ones(rows, np.bool_))


def _integers(cells: Sequence[Any]) -> Values:
    missing = np.fromiter((cell is None for cell in cells), np.bool_, len(cells))
    try:
        return Values("int", np.array([0 if cell is None else int(cell) for cell in cells], np.int64), missing)
    except OverflowError:  # integers beyond 64 bits are ids
        return _text(["" if cell is None else str(cell) for cell in cells], missing)


def _numbers_or_text(cells: Sequence[str | None]) -> Values:
    plain = ["" if cell is None else cell.strip() for cell in cells]
    low = [cell.lower() for cell in plain]
    empty = np.fromiter((cell in _EMPTY for cell in low), np.bool_, len(cells))
    if empty.all():
        return nothing(len(cells))
    if set(low) <= {"true", "false"}:
        return _integers([cell == "true" for cell in low])
    missing = np.fromiter((cell in _NO_NUMBER for cell in low), np.bool_, len(cells))
    given = [cell for cell, gone in zip(plain, missing.tolist(), strict=True) if not gone]
    if not given or any("_" in cell for cell in given):
        return _text(plain, empty)
    for cast, dtype, fill in ((int, np.int64, 0), (float, np.float64, math.nan)):
        values = np.full(len(cells), fill, dtype)
        try:
            values[~missing] = list(map(cast, given))
        except (ValueError, OverflowError):
            continue
        return Values("int" if cast is int else "float", values, missing)
    return _text(plain, empty)


def _text(cells: list[str], missing: NDArray[np.bool_]) -> Values:
    values = np.empty(len(cells), object)
    values[:] = cells
    values[missing] = ""
    return Values("text", values, missing)


def _lists(cells: Sequence[Any]) -> Values:
    missing = np.fromiter((cell is None for cell in cells), np.bool_, len(cells))
    with suppress(ValueError, OverflowError):  # of different lengths, or with None among them
        array = np.array(cells)
        if array.ndim > 1 and array.size and array.dtype.kind in "iufb":
            return Values("list", array.astype(np.uint8) if array.dtype.kind == "b" else array, missing)
    values = np.empty(len(cells), object)
    for i, cell in enumerate(cells):
        values[i] = [] if cell is None else cell
    return Values("list", values, missing)
