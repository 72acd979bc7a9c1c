"""Parses CelebA's text files, .txt or Kaggle's .csv: one row for each image, its name and then integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.listing import first_few
from fastload.sources.tree import is_image

BLOCK_LINES = 4096  # lines parsed together: few for little memory, enough to make NumPy's overhead small

_IMAGE_COLUMN = ("image_id", "image", "img", "file", "filename", "file_name")  # names of the column of images


@dataclass(frozen=True, eq=False)
class TextTable:
    """The rows of one text file, in its order.

    Attributes:
        path: path of the file, for messages.
        images: name of each row's image, all different; undecodable bytes are surrogates.
        values: int32 (R, V).
        header: names of the V columns; empty if the file has none.
        count: the number of rows that the first line states; None without such a line.
        lines: int64 (R,), line number of each row, from 1.
    """

    path: str
    images: list[str]
    values: NDArray[np.int32]
    header: tuple[str, ...]
    count: int | None
    lines: NDArray[np.int64]

    def refuse_unless(self, good: NDArray[np.bool_], wanted: str) -> None:
        """Refuses values for which `good`, bool (R, V), is False; `wanted` describes the allowed ones.

        Raises:
            SourceError: there are some; the message names the first, with its line.
        """
        if good.all():
            return
        row, column = np.argwhere(~good)[0].tolist()
        name = f" ({self.header[column]})" if self.header else ""
        raise SourceError(
            f"{self.path}, line {self.lines[row]}: {self.images[row]} has the value {self.values[row, column]}{name}, "
            f"expected {wanted}. Fix the line, or remove the file to pack without it."
        )


def parse_table(data: bytes, path: str, num_values: int | None = None) -> TextTable:
    """Returns the rows of a text file.

    Values are separated by any number of spaces or tabs, in a .csv by commas; lines end with LF or CRLF. A line with
    the number of rows and one with the names of the columns may come first, the latter with or without a name for the
    column of images.

    Args:
        data: content of the file.
        path: its path, for messages; with the suffix `.csv` commas separate values.
        num_values: integers in a row; None: as many as the header names, else as in the first row.

    Raises:
        SourceError: a row has too few or too many values, or one that is no integer of 32 bits; an image occurs twice;
            there is no row.
    """
    comma = path.lower().endswith(".csv")
    text = data.removeprefix(b"\xef\xbb\xbf").splitlines()
    numbers = [n for n, line in enumerate(text, 1) if line.strip()]
    lines = [text[n - 1] for n in numbers]
    del data, text  # to hold the file in memory only once

    def split(line: bytes) -> list[bytes]:
        return [token.strip().strip(b'"') for token in line.split(b",")] if comma else line.split()

    count: int | None = None
    header: tuple[str, ...] = ()
    start = 0
    if lines and len(first := split(lines[0])) == 1 and first[0].isdigit():
        count, start = int(first[0]), 1
    if len(lines) > start and _is_header(first := split(lines[start])):
        header, start = tuple(name.decode("utf-8", "backslashreplace") for name in first), start + 1
        if comma or len(header) - 1 == num_values or header[0].lower() in _IMAGE_COLUMN:
            header = header[1:]
    if len(lines) <= start:
        raise SourceError(f"{path} holds no rows. Fetch it again, or remove it to pack without it.")
    width = num_values or len(header) or max(1, len(split(lines[start])) - 1)
    if header and len(header) != width:
        raise SourceError(
            f"{path}, line {numbers[start - 1]}: {len(header)} names of columns over rows of {width} values. "
            "Fetch the file again, or remove it to pack without it."
        )
    images: list[str] = []
    values = np.empty((len(lines) - start, width), np.int32)
    for at in range(start, len(lines), BLOCK_LINES):
        rows = list(map(split, lines[at : at + BLOCK_LINES]))
        try:
            if set(map(len, rows)) != {width + 1}:
                raise ValueError
            flat = np.array([int(token) for row in rows for token in row[1:]], np.int64)
            # Checked here, since NumPy 1 wraps what does not fit 32 bits.
            if flat.min() < -(2**31) or flat.max() >= 2**31:
                raise ValueError
        except (ValueError, OverflowError) as exc:
            raise _bad_row(path, numbers[at : at + BLOCK_LINES], rows, width) from exc
        values[at - start : at - start + len(rows)] = flat.reshape(len(rows), width)
        images += [row[0].decode("utf-8", "surrogateescape") for row in rows]
    table = TextTable(path, images, values, header, count, np.array(numbers[start:], np.int64))
    _refuse_twice(table)
    return table


def _is_header(tokens: list[bytes]) -> bool:
    # A first row with a wrong value is no header: no column is called 000001.jpg.
    return not is_image(tokens[0].decode("latin-1")) and not (
        len(tokens) > 1 and all(token.removeprefix(b"-").isdigit() for token in tokens[1:])
    )


def _bad_row(path: str, numbers: list[int], rows: list[list[bytes]], width: int) -> SourceError:
    def is_good(token: bytes) -> bool:
        try:
            return -(2**31) <= int(token) < 2**31
        except ValueError:
            return False

    for number, row in zip(numbers, rows, strict=True):
        if len(row) != width + 1:
            found = f"{len(row) - 1} values, expected {width}"
        elif (bad := next((token for token in row[1:] if not is_good(token)), None)) is not None:
            found = f"the value {bad.decode('utf-8', 'backslashreplace')!r}, expected an integer of 32 bits"
        else:
            continue
        name = row[0].decode("utf-8", "backslashreplace")
        return SourceError(
            f"{path}, line {number}: {name} has {found}. Fix the line, or remove the file to pack without it."
        )
    raise AssertionError("the block was refused, so one of its rows is bad")


def _refuse_twice(table: TextTable) -> None:
    if len(set(table.images)) == len(table.images):
        return
    first: dict[str, int] = {}
    twice = [
        f"{image} (lines {first[image]} and {line})"
        for image, line in zip(table.images, table.lines.tolist(), strict=True)
        if first.setdefault(image, line) != line
    ]
    raise SourceError(
        f"{table.path}: images with more than one row ({len(twice)}): {first_few(twice)}. Remove the wrong rows."
    )


def row_of_images(table: TextTable, images: list[str]) -> tuple[NDArray[np.int64], list[str]]:
    """Returns the row of each image (-1 for none), and the images of the table that are not among `images`.

    Names are compared as a whole; if no name agrees, without suffix (rows say 000001.jpg, files are 000001.png).
    """
    if table.images == images:
        return np.arange(len(images), dtype=np.int64), []
    bare: Callable[[str], str] = str
    if not set(table.images).intersection(images):
        bare = _without_suffix
    row = {bare(name): i for i, name in enumerate(table.images)}
    wanted = [bare(name) for name in images]
    rows = np.array([row.get(name, -1) for name in wanted], np.int64)
    known = set(wanted)
    return rows, [name for name in table.images if bare(name) not in known]


def _without_suffix(name: str) -> str:
    return name.rpartition(".")[0] or name
