"""Draws masks, boxes, landmarks and keypoints over an image of a preview, and makes the label below it."""

from __future__ import annotations

import colorsys
import unicodedata
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from fastload.format.header import Field, PackedFile
from fastload.format.texts import captions_of_row
from fastload.images.fit import axis_letter
from fastload.system.text import share_text, text_of

Colour = tuple[int, int, int]

MAX_LEGEND = 40
BOX_FIELDS = ("boxes", "bbox")
POINT_FIELDS = ("landmarks", "keypoints")

_MASK_STRENGTH = 0.5
_NO_CLASS: Colour = (230, 30, 110)
_HALO: Colour = (20, 20, 20)
_DOT_RADIUS = 2
MAX_ATTRIBUTES = 4

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

_DRAWN = {*map(chr, range(32, 127)), "·"}
"""The characters that Pillow's own font can draw: ASCII and little else."""


@dataclass(frozen=True)
class Marks:
    """The marks on one image, in its pixels."""

    mask: NDArray[Any] | None  # uint8 or uint16 (H, W)
    boxes: NDArray[np.float64]  # (M, 4), two corners each
    classes: NDArray[np.int64]  # (M,), of the boxes; -1: none
    points: NDArray[np.float64]  # (P, 2)
    kinds: NDArray[np.int64]  # (P,), number of each point within its object


class Entry(NamedTuple):
    """One entry of the legend."""

    name: str
    colour: Colour
    kind: str  # "mask", "box" or "more"


def marks_of(
    hdf5: Mapping[str, Any], file: PackedFile, rows: Sequence[int], masks: Sequence[NDArray[Any] | None]
) -> list[Marks]:
    """Returns the marks of each row; without fields that belong to another image, or whose form is not known."""
    box_field = next((name for name in BOX_FIELDS if name in file.fields and _box_form(file.fields[name])), None)
    point_fields = [name for name in POINT_FIELDS if name in file.fields and _numbers_of_point(file.fields[name])]
    result = []
    for row, mask in zip(rows, masks, strict=True):
        boxes, classes = np.zeros((0, 4)), np.zeros(0, np.int64)
        points, kinds = [np.zeros((0, 2))], [np.zeros(0, np.int64)]
        if box_field:
            boxes = np.asarray(hdf5[box_field][row], np.float64).reshape(-1, 4)
            if _box_form(file.fields[box_field]) == "xywh":
                boxes[:, 2:] += boxes[:, :2]
            classes = np.full(len(boxes), -1, np.int64)
            if "box_labels" in file.fields and file.fields["box_labels"].shape == file.fields[box_field].shape[:-1]:
                classes = np.asarray(hdf5["box_labels"][row], np.int64).reshape(-1)
            real = np.isfinite(boxes).all(axis=1) & (boxes[:, :2] <= boxes[:, 2:]).all(axis=1)
            real &= (boxes[:, :2] < boxes[:, 2:]).any(axis=1)  # padding is a point
            boxes, classes = boxes[real], classes[real]
        for name in point_fields:
            field = file.fields[name]
            numbers = np.asarray(hdf5[name][row], np.float64).reshape(-1, _numbers_of_point(field))
            shown = (numbers[:, 2:] > 0).all(axis=1)  # those that are labelled, where that is said
            of_object = field.shape[-2] if len(field.shape) > 2 else len(numbers)
            points.append(numbers[shown, :2])
            kinds.append(np.flatnonzero(shown) % of_object)
        result.append(Marks(mask, boxes, classes, np.concatenate(points), np.concatenate(kinds)))
    return result


def drawn_over(image: Image.Image, marks: Marks, size: tuple[int, int], file: PackedFile) -> Image.Image:
    """Returns an RGB thumbnail with its marks; `size` is (height, width) of the image that it shows."""
    if marks.mask is not None:
        mask = Image.fromarray(np.ascontiguousarray(marks.mask)).resize(image.size, Image.Resampling.NEAREST)
        classes, pixels = np.asarray(mask), np.asarray(image)
        shown, at = np.unique(classes, return_inverse=True)
        colours = np.array([class_colour(index) for index in shown.tolist()], dtype=np.float32)[
            at.reshape(classes.shape)
        ]
        blended = pixels * (1 - _MASK_STRENGTH) + colours * _MASK_STRENGTH
        bare = np.isin(classes, _bare_classes(file))[..., None]
        image = Image.fromarray(np.where(bare, pixels, blended).astype(np.uint8))
    if len(marks.boxes) or len(marks.points):
        image = image.copy()
    draw = ImageDraw.Draw(image)
    scale = np.array([image.width / size[1], image.height / size[0]])
    for corners, index in zip(marks.boxes, marks.classes.tolist(), strict=True):
        left, top, right, bottom = np.rint(corners.reshape(2, 2) * scale).astype(int).reshape(-1).tolist()
        right, bottom = max(left, right - 1), max(top, bottom - 1)  # the box includes its edges
        draw.rectangle((left - 1, top - 1, right + 1, bottom + 1), outline=_HALO)
        thick = min(right - left, bottom - top) > 12
        colour = class_colour(index) if index >= 0 else _NO_CLASS
        draw.rectangle((left, top, right, bottom), outline=colour, width=2 if thick else 1)
    for number, (x, y) in zip(marks.kinds.tolist(), (marks.points * scale).tolist(), strict=True):
        if np.isfinite((x, y)).all():
            around = (x - _DOT_RADIUS, y - _DOT_RADIUS, x + _DOT_RADIUS, y + _DOT_RADIUS)
            draw.ellipse(around, fill=class_colour(number), outline=_HALO)
    return image


def legend_of(file: PackedFile, marks: Sequence[Marks]) -> list[Entry]:
    """Returns the classes shown: masks' first, then boxes', by number; if too many, the most frequent."""
    of_masks = [each.mask.ravel() for each in marks if each.mask is not None]
    of_boxes = [each.classes[each.classes >= 0] for each in marks]
    bare = _bare_classes(file) if "masks" in file.fields else []
    entries, more = list[Entry](), 0
    for kind, name, shown in (("mask", "masks", of_masks), ("box", "box_labels", of_boxes)):
        found, counts = np.unique(np.concatenate(shown) if shown else np.zeros(0, np.int64), return_counts=True)
        total = max(1, counts.sum())
        if kind == "mask":
            counts, found = counts[~np.isin(found, bare)], found[~np.isin(found, bare)]
        names = file.fields[name].names if name in file.fields else ()
        most = found[np.argsort(-counts, kind="stable")][: MAX_LEGEND - len(entries)]
        shares = dict(zip(found.tolist(), (counts / total).tolist(), strict=True))
        for i in sorted(most.tolist()):
            share = f" {share_text(shares[i])}" if kind == "mask" else ""
            entries.append(Entry(class_name(i, names) + share, class_colour(i), kind))
        more += len(found) - len(most)
    return [*entries, Entry(f"and {more} more", (0, 0, 0), "more")] if more else entries


def class_colour(index: int) -> Colour:
    """Returns a colour unlike neighbouring indices' colours: hues a golden angle apart, in three brightnesses."""
    hue = index * 0.61803398875 % 1.0
    red, green, blue = colorsys.hsv_to_rgb(hue, (0.85, 0.65, 0.95)[index % 3], (0.95, 0.8, 0.65)[index // 3 % 3])
    return round(red * 255), round(green * 255), round(blue * 255)


def _bare_classes(file: PackedFile) -> list[int]:
    """Returns the mask values that are not drawn: the ignored index, and the background."""
    field = file.fields["masks"]
    ignored = field.attrs.get("ignore_index")
    # Without names, or with names that are the values of the source's masks, 0 means not marked.
    unmarked = ("background", "__background__", "bg", "unlabeled", "unlabelled", "0")
    background = [i for i, name in enumerate(field.names or ("0",)) if name.lower() in unmarked]
    return [*background, *([int(ignored)] if isinstance(ignored, int) and 0 <= ignored < 65536 else [])]


def _numbers_of_point(field: Field) -> int:
    """Returns how many numbers each point has, 2 or, with its visibility, 3; 0 if unknown, or of another image."""
    shape = field.shape
    if field.attrs.get("coordinates", "aligned") != "aligned" or not shape:
        return 0
    if len(shape) == 1:
        return 2 if shape[0] % 2 == 0 and (field.name == "landmarks" or shape[0] % 3) else 0
    return shape[-1] if shape[-1] == 2 or (shape[-1] == 3 and field.name == "keypoints") else 0


def _box_form(field: Field) -> Literal["xywh", "xyxy"] | None:
    """Returns the form of boxes by the names of their columns; None if unknown, or if they refer to another image."""
    if field.shape[-1:] != (4,) or len(field.shape) > 2 or field.attrs.get("coordinates", "aligned") != "aligned":
        return None
    letters = "".join(axis_letter(name.lower()) for name in field.names)
    return letters if letters in ("xywh", "xyxy") else None  # type: ignore[return-value]  # just compared


def labels_of(hdf5: Mapping[str, Any], file: PackedFile, rows: Sequence[int]) -> list[str]:
    """Returns the text below each image: class name, names of the attributes that are set, first caption, or key."""
    field = file.fields.get("labels")
    if field is None or len(field.shape) > 1 or field.dtype.kind not in "iu":
        captions = ["".join(captions_of_row(hdf5, row)[:1]) for row in rows]
        if "key" not in file.fields:
            return captions
        keys = (text_of(bytes(hdf5["key"][row])).rsplit("/")[-1] for row in rows)
        return [caption or key for caption, key in zip(captions, keys, strict=True)]
    values = np.stack([hdf5["labels"][row] for row in rows]).astype(np.int64)
    if not field.shape:
        return [class_name(int(value), field.names) for value in values]
    names = [class_name(i, field.names) for i in range(field.shape[0])]
    # The rarest first: "Eyeglasses" tells more about a face than "No Beard".
    commonness = np.count_nonzero(hdf5["labels"][:20_000], axis=0)
    order = np.argsort(commonness, kind="stable").tolist()
    return [attributes_of([names[i] for i in order if value[i]]) for value in values]


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
    """Returns the text in ASCII, `é` as `e` and `_` as a space; "" if impossible. Pillow's own font is ASCII."""
    letters = unicodedata.normalize("NFKD", text.replace("_", " "))
    result = "".join(letter for letter in letters if not unicodedata.combining(letter)).strip()
    return result if result.isascii() else ""


def wrap(text: str, font: Font, width: int, max_lines: int) -> list[str]:
    """Returns lines no wider than `width` pixels, broken between words if possible, cut with an ellipsis at the end."""
    lines: list[str] = []
    most = 2 * width  # letters of a line: none is narrower than half a pixel
    text = text[: most * max_lines]
    rest = " ".join("".join(c if c in _DRAWN else "?" for c in text).split())
    while rest:
        lengths = range(1, min(len(rest), most) + 1)
        fits = max(1, bisect_right(lengths, width, key=lambda length: ceil(font.getlength(rest[:length]))))
        if fits < len(rest):
            # At a space, else after `_`, `-`, `/`, else there.
            space = rest.rfind(" ", 1, fits + 1)
            mark = max(rest.rfind(mark, 1, fits) for mark in "_-/") + 1
            fits = space if space > 0 else mark or fits
        line, rest = rest[:fits].rstrip(), rest[fits:].lstrip()
        if rest and len(lines) == max_lines - 1:
            while line and font.getlength(f"{line}...") > width:
                line = line[:-1]
            return [*lines, f"{line.rstrip(' ,')}..."]
        lines.append(line)
    return lines
