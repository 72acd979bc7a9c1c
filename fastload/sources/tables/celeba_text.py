"""Parses CelebA's text files, .txt or Kaggle's .csv: one row for each image, its name and then integers."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.assemble import stem_of
from fastload.sources.listing import first_few
from fastload.sources.tree import is_image
from fastload.system.text import text_of

_IMAGE_COLUMN = ("image_id", "image", "img", "file", "filename", "file_name")  # names of the column of images


@dataclass(frozen=True, eq=False)
class TextTable:
    """The rows of one text file, in its order."""

    path: str  # of the file, for messages
    images: list[str]  # name of each row's image, all different; undecodable bytes are surrogates
    values: NDArray[np.int32]  # (R, V)
    header: tuple[str, ...]  # names of the V columns; empty if the file has none
    count: int | None  # the number of rows that the first line states; None without such a line
    lines: list[int]  # line number of each row, from 1

    def require(self, allowed: tuple[int, ...], wanted: str) -> None:
        """Refuses other values than those `allowed`; `wanted` describes these, and the message names the first.

        Raises:
            SourceError: there are some.
        """
        good = np.zeros(self.values.shape, np.bool_)
        for value in allowed:
            good |= self.values == value
        if not good.all():
            row, column = np.argwhere(~good)[0].tolist()
            name = f" ({self.header[column]})" if self.header else ""
            found = f"{self.images[row]} has the value {self.values[row, column]}{name}, expected {wanted}"
            raise _bad_line(self.path, self.lines[row], found)

    def rows_of(self, images: list[str]) -> tuple[NDArray[np.int64], list[str]]:
        """Returns the row of each image (-1 for none), and the images of the table that are not among `images`.

        Names are compared as a whole; if no name agrees, without suffix (rows say 000001.jpg, files are 000001.png).
        """
        if self.images == images:
            return np.arange(len(images), dtype=np.int64), []
        bare: Callable[[str], str] = str if set(self.images).intersection(images) else stem_of
        row = {bare(name): i for i, name in enumerate(self.images)}
        wanted = [bare(name) for name in images]
        known = set(wanted)
        absent = [name for name in self.images if bare(name) not in known]
        return np.array([row.get(name, -1) for name in wanted], np.int64), absent


def parse_table(data: bytes, path: str, num_values: int | None = None) -> TextTable:
    """Returns the rows of a text file: its content and path, and the integers in a row.

    Values are separated by any number of spaces or tabs, in a .csv by commas; lines end with LF or CRLF. A line with
    the number of rows and one with the names of the columns may come first, the latter with or without a name for the
    column of images. If `num_values` is None there are as many as the header names, else as in the first row.

    Raises:
        SourceError: a row has too few or too many values, or one that is no integer of 32 bits; an image occurs twice;
            there is no row.
    """
    comma = path.lower().endswith(".csv")

    def split(line: bytes) -> list[bytes]:
        return [token.strip().strip(b'"') for token in line.split(b",")] if comma else line.split()

    text = data.removeprefix(b"\xef\xbb\xbf").splitlines()
    lines = [number for number, line in enumerate(text, 1) if line.strip()]
    count: int | None = None
    header: tuple[str, ...] = ()
    if lines and len(first := split(text[lines[0] - 1])) == 1 and first[0].isdigit():
        count = int(first[0])
        del lines[0]
    if lines and _is_header(first := split(text[lines[0] - 1])):
        header_line = lines.pop(0)
        header = tuple(name.decode("utf-8", "backslashreplace") for name in first)
        if comma or len(header) - 1 == num_values or header[0].lower() in _IMAGE_COLUMN:
            header = header[1:]
    if not lines:
        raise SourceError(f"{path} holds no rows. Fetch it again, or remove it to pack without it.")
    width = num_values or len(header) or max(1, len(split(text[lines[0] - 1])) - 1)
    if header and len(header) != width:
        raise SourceError(
            f"{path}, line {header_line}: {len(header)} names of columns over rows of {width} values. "
            "Fetch the file again, or remove it to pack without it."
        )
    seen: dict[str, int] = {}
    twice: list[str] = []
    values = array("i")
    for line in lines:
        name, *tokens = split(text[line - 1])
        image = name.decode("utf-8", "surrogateescape")
        if len(tokens) != width:
            raise _bad_line(path, line, f"{text_of(name)} has {len(tokens)} values, expected {width}")
        try:
            values.extend(map(int, tokens))
        except (ValueError, OverflowError) as exc:
            bad = text_of(tokens[len(values) % width])  # those before it were taken
            found = f"{text_of(name)} has the value {bad!r}, expected an integer of 32 bits"
            raise _bad_line(path, line, found) from exc
        if seen.setdefault(image, line) != line:
            twice.append(f"{image} (lines {seen[image]} and {line})")
    if twice:
        raise SourceError(
            f"{path}: images with more than one row ({len(twice)}): {first_few(twice)}. Remove the wrong rows."
        )
    return TextTable(path, list(seen), np.frombuffer(values, np.int32).reshape(-1, width), header, count, lines)


def _is_header(tokens: list[bytes]) -> bool:
    # A first row with a wrong value is no header: no column is called 000001.jpg.
    return not is_image(tokens[0].decode("latin-1")) and not (
        len(tokens) > 1 and all(token.removeprefix(b"-").isdigit() for token in tokens[1:])
    )


def _bad_line(path: str, line: int, found: str) -> SourceError:
    return SourceError(f"{path}, line {line}: {found}. Fix the line, or remove the file to pack without it.")
