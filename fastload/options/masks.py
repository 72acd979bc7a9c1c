"""What the options for masks say in text or in a file: the values or colours of classes, and their names."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from fastload.errors import OptionError
from fastload.system.text import first_few

_MOST_CLASSES = 65_535

_VALUE = re.compile(r"([0-9]{1,5})(?:=(.+))?")
_COLOUR_FIRST = re.compile(r"([0-9]+)[\s,;]+([0-9]+)[\s,;]+([0-9]+)[\s,;]+(\S.*)")
_NAME_FIRST = re.compile(r"(\S.*?)[\s,;]+([0-9]+)[\s,;]+([0-9]+)[\s,;]+([0-9]+)")
_CVAT = re.compile(r"(\S.*?):([0-9]+),([0-9]+),([0-9]+):[^:]*:[^:]*")
_HEADINGS = {"r": "r", "red": "r", "g": "g", "green": "g", "b": "b", "blue": "b"} | dict.fromkeys(
    ("name", "class", "class_name", "label"), "name"
)


Palette = tuple[tuple[int, int, int, str], ...]
"""Red, green, blue and name of each class."""


@dataclass(frozen=True)
class Classes:
    """The code of each class in a mask: a value 0 to 65,535, or a colour as red << 16 | green << 8 | blue."""

    codes: tuple[int, ...]  # one for each class
    names: tuple[str, ...]
    ignored: tuple[int, ...] = ()  # codes that stand for no class
    colours: bool = False
    guessed: bool = False  # whether the values were found by looking at some masks

    @property
    def nothing(self) -> int:
        """The value of masks of these classes, 0 to K - 1, for no class: the largest of 8 bits, or of 16."""
        return 255 if len(self.codes) <= 255 else 65_535

    def written(self, code: int) -> str:
        """Returns a code as a user would write it."""
        return f"{code >> 16},{code >> 8 & 255},{code & 255}" if self.colours else str(code)


def classes_of_palette(palette: Palette, ignore: str) -> Classes:
    """Returns the classes of a palette, but for one that is to be ignored."""
    codes, ignored = dict[str, int](), tuple[int, ...]()
    for red, green, blue, name in palette:
        code = red << 16 | green << 8 | blue
        if name == ignore:
            ignored = (code,)
        else:
            codes[name] = code
    if ignore and not ignored:
        raise OptionError(f"ignore_index={ignore!r}: the palette names {first_few(codes, 12)}. Choose one of them.")
    return Classes(tuple(codes.values()), tuple(codes), ignored, colours=True)


def classes_of_values(text: str, ignore: str) -> Classes:
    """Returns the classes that `--mask-values` names, such as `0=background,255=person`."""
    found: dict[int, str] = {}
    for part in text.split(","):
        match = _VALUE.fullmatch(part.strip())
        if match is None or int(match[1]) > 65_535:
            raise OptionError(
                f"mask_values={text!r}: {part.strip()!r} is no value of a mask. Give the values, such as 0,255, with "
                f"names if you like, such as 0=background,255=person; or auto, or keep."
            )
        if int(match[1]) in found:
            raise OptionError(f"mask_values={text!r}: {match[1]} stands for two classes. Name each value once.")
        found[int(match[1])] = (match[2] or match[1]).strip()
    if len(set(found.values())) < len(found):
        raise OptionError(f"mask_values={text!r}: two classes have one name. Give each its own.")
    ignored = tuple[int, ...]()
    if ignore:
        value = next((value for value, name in found.items() if name == ignore), ignore)
        if not str(value).isdigit() or int(value) > 65_535:
            raise OptionError(
                f"ignore_index={ignore!r} is neither a value, such as 255, nor a name in `--mask-values`."
            )
        ignored = (int(value),)
        found.pop(int(value), None)
    if not 1 <= len(found) <= _MOST_CLASSES:
        raise OptionError(f"mask_values={text!r}: {len(found)} classes; a mask has 1 to {_MOST_CLASSES}.")
    return Classes(tuple(found), tuple(found.values()), ignored)


def read_palette(path: Path) -> Palette:
    """Returns red, green, blue and name of each class in a palette file, in its order.

    A line is a class: three numbers and a name in either order, between commas, semicolons or spaces. A first line may
    name the columns (r, g, b, name); others are passed over then. Or it is CVAT's labelmap.txt: lines of
    `name:r,g,b:parts:actions`.

    Raises:
        OptionError: it cannot be read, a line is no class, or a colour or a name stands for two.
    """
    try:
        return parse_palette(path.read_bytes(), path)
    except OSError as exc:
        raise OptionError(f"{path}: the palette cannot be read: {exc}") from exc


def parse_palette(content: bytes, path: str | Path) -> Palette:
    """Returns the classes of a palette file with this content, as `read_palette` does."""
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as exc:
        raise OptionError(f"{path}: the palette cannot be read: {exc}") from exc
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip() and line[:1] != "#"]
    columns: dict[str, int] = {}
    separator = max(",;\t", key=(numbered[0][1] if numbered else "").count)
    if numbered and not re.search(r"[0-9]", numbered[0][1]):
        words = [_HEADINGS.get(word.strip().lower(), "") for word in numbered[0][1].split(separator)]
        columns = {word: at for at, word in enumerate(words) if word}
        if columns.keys() != {"r", "g", "b", "name"}:
            raise OptionError(f"{path}:1: {numbered[0][1]!r}: a palette's columns are r, g, b and name.")
        numbered = numbered[1:]
    found: list[tuple[int, int, int, str]] = []
    for number, line in numbered:
        parts = _palette_parts(line, columns, separator)
        if parts is None or max(parts[:3]) > 255:
            raise OptionError(f"{path}:{number}: {line!r}: expected red, green and blue (0 to 255) and a name.")
        if twice := [row for row in found if row[:3] == parts[:3] or row[3] == parts[3]]:
            raise OptionError(f"{path}:{number}: {line!r}: {twice[0][3]!r} already has its colour or name.")
        found.append(parts)
    if not 1 <= len(found) <= _MOST_CLASSES:
        raise OptionError(f"{path}: {len(found)} classes; a mask has 1 to {_MOST_CLASSES}.")
    return tuple(found)


def _palette_parts(line: str, columns: dict[str, int], separator: str) -> tuple[int, int, int, str] | None:
    if columns:
        cells = next(csv.reader([line], delimiter=separator))
        try:
            red, green, blue = (int(cells[columns[name]]) for name in "rgb")
            name = cells[columns["name"]].strip()
        except (IndexError, ValueError):
            return None
        return (red, green, blue, name) if name and min(red, green, blue) >= 0 else None
    if match := _CVAT.fullmatch(line):
        return int(match[2]), int(match[3]), int(match[4]), match[1]
    if match := _COLOUR_FIRST.fullmatch(line):
        return int(match[1]), int(match[2]), int(match[3]), match[4].strip()
    if match := _NAME_FIRST.fullmatch(line):
        return int(match[2]), int(match[3]), int(match[4]), match[1].strip()
    return None
