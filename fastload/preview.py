"""A contact sheet of a packed file: what is in it, with its labels, at one glance."""

from __future__ import annotations

import colorsys
import os
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from fastload.errors import OptionError, OutputError
from fastload.format import PackedFile, open_hdf5, read_header
from fastload.new_file import check_new_file

COLUMNS = 8
LARGEST_SIDE = 224
SMALLEST_SIDE = 112
MAX_LABEL_LINES = 4
MAX_ATTRIBUTES = 4
MAX_LEGEND = 40

_PAPER, _INK, _FADED, _FRAME = (250, 249, 246), (32, 33, 36), (138, 138, 134), (218, 216, 210)
_GAP, _MARGIN, _PADDING = 18, 28, 6
_MASK_STRENGTH = 0.5

_DRAWN = {*map(chr, range(32, 127)), "·"}
"""What Pillow's own font can draw: ASCII and little else."""

_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True)
class _Thumbnail:
    """One image of the sheet: uint8 (H, W, 1, 3 or 4), its mask (H, W) if any, and the words under it."""

    pixels: NDArray[np.uint8]
    mask: NDArray[np.uint8] | None
    label: str
    place: str


def make_preview(
    path: str | Path,
    output: str | Path,
    *,
    count: int = 40,
    split: str | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> tuple[int, ...]:
    """Draw a contact sheet as a PNG and return the rows it shows.

    Images are spread evenly over the file (or one split), one drawn at random from each of `count` equal stretches.
    Small images are enlarged by whole factors, large ones reduced; transparency shows a checkerboard, masks lie
    half-transparent over their image, 16 bits are scaled to the largest value shown.

    Args:
        path: a packed file, or any HDF5 file with a dataset `images` of uint8 or uint16.
        output: .png to write; it appears complete or not at all.
        count: images to show.
        split: name of the split to show; None for all rows.
        seed: chooses other images.
        overwrite: replace an output that exists.

    Raises:
        MissingFileError, FormatError: as `read_header`.
        OptionError: count, split or the output's suffix has no meaning.
        OutputError: the output exists or cannot be written.
    """
    path, output = Path(path), Path(output)
    _check_output(output, overwrite)
    if count < 1:
        raise OptionError(f"count={count}: needs at least 1.")
    file = read_header(path)
    if split is not None and split not in file.splits:
        known = ", ".join(file.splits) or "it has no splits"
        raise OptionError(f"{path}: no split {split!r}; accepted: {known}.")
    if seed < 0:
        raise OptionError(f"seed={seed}: needs at least 0.")
    rows = _spread(file.splits[split] if split is not None else range(file.num_rows), count, seed)
    with open_hdf5(path) as hdf5:
        thumbnails = list(_thumbnails(hdf5, file, rows))
    sheet = _draw(file, thumbnails, split)
    _save(sheet, output)
    return rows


def _check_output(output: Path, overwrite: bool) -> None:
    if output.suffix.lower() != ".png":
        raise OptionError(f"{output}: a preview is a PNG; give it a name that ends in .png.")
    check_new_file(output, force=overwrite, option="--overwrite")


def _save(sheet: Image.Image, output: Path) -> None:
    """Write beside the output and rename, so that nobody ever sees half a picture."""
    unfinished = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        sheet.save(unfinished, format="PNG", optimize=False)
        os.replace(unfinished, output)
    except OSError as exc:
        raise OutputError(f"{output}: cannot be written ({exc.strerror or exc}).") from exc
    finally:
        unfinished.unlink(missing_ok=True)


def _spread(rows: range, count: int, seed: int) -> tuple[int, ...]:
    """`count` different rows (all, when there are fewer), ascending, one from each of as many equal stretches."""
    count = min(count, len(rows))
    edges = np.arange(count + 1) * len(rows) // count
    return tuple(rows[int(at)] for at in np.random.default_rng(seed).integers(edges[:-1], edges[1:]))


def _thumbnails(hdf5: h5py.File, file: PackedFile, rows: Sequence[int]) -> Iterator[_Thumbnail]:
    images = hdf5["images"]
    pixels = [_channels_last(images[row]) for row in rows]
    if images.dtype.itemsize > 1:
        top = max(1, *(int(image.max(initial=0)) for image in pixels))
        pixels = [(image.astype(np.uint32) * 255 // top).astype(np.uint8) for image in pixels]
    masked = "masks" in file.fields and file.fields["masks"].shape == pixels[0].shape[:2]
    labels = _labels(hdf5, file, rows)
    for row, image, label in zip(rows, pixels, labels, strict=True):
        split = next((name for name, run in file.splits.items() if row in run), "")
        place = f"{split} · row {row}" if len(file.splits) > 1 else f"row {row}"
        yield _Thumbnail(image, hdf5["masks"][row] if masked else None, label, place)


def _channels_last(image: NDArray[Any]) -> NDArray[Any]:
    if image.ndim == 2:
        return image[..., None]
    if image.shape[2] not in (1, 3, 4) and image.shape[0] in (1, 3, 4):
        return image.transpose(1, 2, 0)
    return image if image.shape[2] in (1, 3, 4) else image[..., :1]


def _labels(hdf5: h5py.File, file: PackedFile, rows: Sequence[int]) -> list[str]:
    """The words under each image: class name, names of the attributes that are set, or its key."""
    field = file.fields.get("labels")
    if field is None or len(field.shape) > 1 or field.dtype.kind not in "iu":
        return _keys(hdf5, file, rows)
    values = np.stack([hdf5["labels"][row] for row in rows]).astype(np.int64)
    if not field.shape:
        return [_class_name(int(value), field.names) for value in values]
    names = [_class_name(i, field.names) for i in range(field.shape[0])]
    # The rarest first: "Eyeglasses" tells more about a face than "No Beard".
    commonness = np.count_nonzero(hdf5["labels"][:20_000], axis=0)
    order = np.argsort(commonness, kind="stable").tolist()
    return [_attributes([names[i] for i in order if value[i]]) for value in values]


def _keys(hdf5: h5py.File, file: PackedFile, rows: Sequence[int]) -> list[str]:
    if "key" not in file.fields:
        return [""] * len(rows)
    return [bytes(hdf5["key"][row]).decode("utf-8", errors="backslashreplace").rsplit("/")[-1] for row in rows]


def _class_name(value: int, names: tuple[str, ...]) -> str:
    if value == -1:
        return "no label"
    if 0 <= value < len(names):
        return _plain(names[value]) or f"class {value}"
    return str(value)


def _attributes(names: list[str]) -> str:
    if not names:
        return "none"
    more = f" +{len(names) - MAX_ATTRIBUTES}" if len(names) > MAX_ATTRIBUTES else ""
    return ", ".join(names[:MAX_ATTRIBUTES]) + more


def _plain(text: str) -> str:
    """The text with `é` as `e` and `_` as a space; "" when Pillow's own font, which is ASCII, lacks a character."""
    letters = unicodedata.normalize("NFKD", text.replace("_", " "))
    result = "".join(letter for letter in letters if not unicodedata.combining(letter)).strip()
    return result if result.isascii() else ""


def _draw(file: PackedFile, thumbnails: list[_Thumbnail], split: str | None) -> Image.Image:
    """The sheet: title, grid, legend of the mask classes."""
    title_font, font, small = (ImageFont.load_default(size) for size in (24, 14, 12))
    width, height = _shown_size(*thumbnails[0].pixels.shape[:2])
    cell = max(width, SMALLEST_SIDE)
    columns = _columns(len(thumbnails))
    # A title needs room even above a single small image.
    inner = max(columns * cell + (columns - 1) * _GAP, 360)

    title = _wrap(file.path.name, title_font, inner, 2)
    facts = _wrap(_facts(file, thumbnails, split), font, inner, 4)
    labels = [_wrap(thumbnail.label, font, cell, MAX_LABEL_LINES) for thumbnail in thumbnails]
    places = [_wrap(thumbnail.place, small, cell, 2) for thumbnail in thumbnails]
    legend = _legend(file, thumbnails)

    line, small_line, title_line = (_line_height(each) for each in (font, small, title_font))
    head = _MARGIN + len(title) * title_line + len(facts) * line + _GAP
    tops, top = [], head
    for first in range(0, len(thumbnails), columns):
        row = range(first, min(first + columns, len(thumbnails)))
        tops.append(top)
        words = max(len(labels[i]) * line + len(places[i]) * small_line for i in row)
        top += height + _PADDING + words + _GAP
    legend_places, bottom = _place_legend(legend, font, inner, top)

    sheet = Image.new("RGB", (inner + 2 * _MARGIN, bottom + _MARGIN - _GAP // 2), _PAPER)
    draw = ImageDraw.Draw(sheet)
    at = _write(draw, _MARGIN, _MARGIN, title, title_font, _INK, title_line)
    _write(draw, _MARGIN, at, facts, font, _FADED, line)
    for i, thumbnail in enumerate(thumbnails):
        left = _MARGIN + i % columns * (cell + _GAP)
        top = tops[i // columns]
        image_left = left + (cell - width) // 2
        draw.rectangle((image_left - 1, top - 1, image_left + width, top + height), outline=_FRAME)
        sheet.paste(_thumbnail_image(thumbnail, file, (width, height)), (image_left, top))
        at = _write(draw, left, top + height + _PADDING, labels[i], font, _INK, line)
        _write(draw, left, at, places[i], small, _FADED, small_line)
    for (x, y), (name, colour) in zip(legend_places, legend, strict=True):
        draw.rectangle((x, y + 3, x + 12, y + 15), fill=colour, outline=_FRAME)
        draw.text((x + 18, y), name, font=font, fill=_INK)
    return sheet


def _columns(count: int) -> int:
    """Columns of the grid: as many as fit, or a few fewer when the last row is fuller that way."""
    return count if count <= COLUMNS else min(range(COLUMNS, COLUMNS // 2, -1), key=lambda columns: -count % columns)


def _facts(file: PackedFile, thumbnails: list[_Thumbnail], split: str | None) -> str:
    height, width, channels = thumbnails[0].pixels.shape
    kind = {1: "gray", 3: "RGB", 4: "RGBA"}[channels] + (" 16-bit" if file.fields["images"].dtype.itemsize > 1 else "")
    parts = [f"{file.num_rows:,} {kind} {'image' if file.num_rows == 1 else 'images'} of {height} x {width}"]
    if len(file.splits) > 1:
        parts.append(", ".join(f"{name} {len(rows):,}" for name, rows in file.splits.items()))
    names = file.fields["labels"].names if "labels" in file.fields else ()
    if names:
        parts.append(f"{len(names):,} {'attributes' if file.fields['labels'].shape else 'classes'}")
    if split is not None:
        parts.append(f"shown: {split}")
    return " · ".join(parts)


def _shown_size(height: int, width: int) -> tuple[int, int]:
    """(width, height) of a thumbnail: enlarged by a whole factor, or reduced to fit."""
    longest = max(height, width)
    if longest > LARGEST_SIDE:
        return max(1, width * LARGEST_SIDE // longest), max(1, height * LARGEST_SIDE // longest)
    factor = max(1, -(-SMALLEST_SIDE // longest))
    return width * factor, height * factor


def _thumbnail_image(thumbnail: _Thumbnail, file: PackedFile, size: tuple[int, int]) -> Image.Image:
    pixels = np.ascontiguousarray(thumbnail.pixels)
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    larger = size[0] > image.width or size[1] > image.height
    image = image.resize(size, Image.Resampling.NEAREST if larger else Image.Resampling.LANCZOS)
    if image.mode == "RGBA":
        image = Image.alpha_composite(_checkerboard(size), image)
    image = image.convert("RGB")
    if thumbnail.mask is None:
        return image
    mask = np.asarray(Image.fromarray(np.ascontiguousarray(thumbnail.mask)).resize(size, Image.Resampling.NEAREST))
    colours = np.array([_mask_colour(index) for index in range(256)], dtype=np.float32)
    blended = np.asarray(image) * (1 - _MASK_STRENGTH) + colours[mask] * _MASK_STRENGTH
    bare = np.isin(mask, _bare_classes(file))[..., None]
    return Image.fromarray(np.where(bare, np.asarray(image), blended).astype(np.uint8))


def _checkerboard(size: tuple[int, int]) -> Image.Image:
    y, x = np.mgrid[: size[1], : size[0]] // 8
    gray = np.where((x + y) % 2, 255, 215).astype(np.uint8)
    return Image.fromarray(np.dstack([gray, gray, gray, np.full_like(gray, 255)]))


def _mask_colour(index: int) -> tuple[int, int, int]:
    """Colours far apart for neighbouring indices: hues a golden angle apart, in three brightnesses."""
    hue = index * 0.61803398875 % 1.0
    red, green, blue = colorsys.hsv_to_rgb(hue, (0.85, 0.65, 0.95)[index % 3], (0.95, 0.8, 0.65)[index // 3 % 3])
    return round(red * 255), round(green * 255), round(blue * 255)


def _bare_classes(file: PackedFile) -> list[int]:
    """Mask values that are left undrawn: what is ignored, and the background."""
    field = file.fields["masks"]
    ignored = field.attrs.get("ignore_index")
    background = [i for i, name in enumerate(field.names) if name.lower() in ("background", "__background__")]
    return [*background, *([int(ignored)] if isinstance(ignored, int) else [])]


def _legend(file: PackedFile, thumbnails: list[_Thumbnail]) -> list[tuple[str, tuple[int, int, int]]]:
    """(name, colour) of the mask classes shown, those of most pixels first."""
    masks = [thumbnail.mask for thumbnail in thumbnails if thumbnail.mask is not None]
    if not masks:
        return []
    counts = sum(np.bincount(mask.ravel(), minlength=256) for mask in masks)
    counts = np.asarray(counts)
    counts[_bare_classes(file)] = 0
    order = [int(i) for i in np.argsort(-counts, kind="stable") if counts[i]]
    shown = [(_class_name(i, file.fields["masks"].names), _mask_colour(i)) for i in order[:MAX_LEGEND]]
    more = [(f"and {len(order) - MAX_LEGEND} more", _PAPER)] if len(order) > MAX_LEGEND else []
    return shown + more


def _place_legend(
    legend: list[tuple[str, tuple[int, int, int]]], font: _Font, width: int, top: int
) -> tuple[list[tuple[int, int]], int]:
    """Where each entry goes, row after row, and the bottom of the last."""
    places, x, y = [], _MARGIN, top
    for name, _ in legend:
        needed = 18 + int(font.getlength(name)) + 20
        if x > _MARGIN and x + needed > _MARGIN + width:
            x, y = _MARGIN, y + 22
        places.append((x, y))
        x += needed
    return places, y + 22 if legend else y


def _wrap(text: str, font: _Font, width: int, max_lines: int) -> list[str]:
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


def _line_height(font: _Font) -> int:
    box = font.getbbox("Áyg|")
    return round(box[3] + 4)


def _write(
    draw: ImageDraw.ImageDraw, x: int, y: int, lines: list[str], font: _Font, colour: tuple[int, int, int], step: int
) -> int:
    """Write lines from (x, y) down; the y below the last."""
    for line in lines:
        draw.text((x, y), line, font=font, fill=colour)
        y += step
    return y
