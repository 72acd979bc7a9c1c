"""Words on a preview: names of classes and attributes, broken into lines of Pillow's own font, which is ASCII."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import h5py
import numpy as np
from PIL import ImageFont

from fastload.format import PackedFile

MAX_ATTRIBUTES = 4

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

_DRAWN = {*map(chr, range(32, 127)), "·"}
"""What Pillow's own font can draw: ASCII and little else."""


def labels_of(hdf5: h5py.File, file: PackedFile, rows: Sequence[int]) -> list[str]:
    """The words under each image: class name, names of the attributes that are set, or its key."""
    field = file.fields.get("labels")
    if field is None or len(field.shape) > 1 or field.dtype.kind not in "iu":
        return _keys(hdf5, file, rows)
    values = np.stack([hdf5["labels"][row] for row in rows]).astype(np.int64)
    if not field.shape:
        return [class_name(int(value), field.names) for value in values]
    names = [class_name(i, field.names) for i in range(field.shape[0])]
    # The rarest first: "Eyeglasses" tells more about a face than "No Beard".
    commonness = np.count_nonzero(hdf5["labels"][:20_000], axis=0)
    order = np.argsort(commonness, kind="stable").tolist()
    return [attributes_of([names[i] for i in order if value[i]]) for value in values]


def _keys(hdf5: h5py.File, file: PackedFile, rows: Sequence[int]) -> list[str]:
    if "key" not in file.fields:
        return [""] * len(rows)
    return [bytes(hdf5["key"][row]).decode("utf-8", errors="backslashreplace").rsplit("/")[-1] for row in rows]


def class_name(value: int, names: tuple[str, ...]) -> str:
    if value == -1:
        return "no label"
    if 0 <= value < len(names):
        return plain(names[value]) or f"class {value}"
    return str(value)


def attributes_of(names: list[str]) -> str:
    if not names:
        return "none"
    more = f" +{len(names) - MAX_ATTRIBUTES}" if len(names) > MAX_ATTRIBUTES else ""
    return ", ".join(names[:MAX_ATTRIBUTES]) + more


def plain(text: str) -> str:
    """The text with `é` as `e` and `_` as a space; "" when Pillow's own font, which is ASCII, lacks a character."""
    letters = unicodedata.normalize("NFKD", text.replace("_", " "))
    result = "".join(letter for letter in letters if not unicodedata.combining(letter)).strip()
    return result if result.isascii() else ""


def wrap(text: str, font: Font, width: int, max_lines: int) -> list[str]:
    """Lines no wider than `width` pixels, broken between words where possible; an ellipsis ends what does not fit."""
    lines: list[str] = []
    rest = " ".join("".join(c if c in _DRAWN else "?" for c in text).split())
    while rest:
        fits = len(rest)
        while fits > 1 and font.getlength(rest[:fits]) > width:
            fits -= 1
        if fits < len(rest):
            fits = _break_before(rest, fits)
        line, rest = rest[:fits].rstrip(), rest[fits:].lstrip()
        if rest and len(lines) == max_lines - 1:
            while line and font.getlength(f"{line}...") > width:
                line = line[:-1]
            return [*lines, f"{line.rstrip(' ,')}..."]
        lines.append(line)
    return lines


def _break_before(text: str, end: int) -> int:
    """Where to break a line of at most `end` characters: at a space, else behind `_`, `-` or `/`, else at the end."""
    space = text.rfind(" ", 1, end + 1)
    mark = max(text.rfind(mark, 1, end) for mark in "_-/") + 1
    return space if space > 0 else mark or end
