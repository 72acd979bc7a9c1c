"""Arranges the sheet of a preview: title, facts, a grid of thumbnails with labels, a legend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from fastload.format.header import PackedFile
from fastload.inspection.preview.overlay import Entry, Font, Marks, drawn_over, legend_of, wrap

COLUMNS = 8
LARGEST_SIDE = 224
SMALLEST_SIDE = 112
MAX_LABEL_LINES = 4

_PAPER, _INK, _FADED, _FRAME = (250, 249, 246), (32, 33, 36), (138, 138, 134), (218, 216, 210)
_GAP, _MARGIN, _PADDING = 18, 28, 6


@dataclass(frozen=True)
class Thumbnail:
    """One image of the sheet: uint8 (H, W, 1, 3 or 4), its marks, its label, and its split and row."""

    pixels: NDArray[np.uint8]
    marks: Marks
    label: str
    row_text: str


def draw_sheet(file: PackedFile, thumbnails: list[Thumbnail], split: str | None) -> Image.Image:
    """Returns the sheet: title, grid, legend."""
    title_font, font, small = (ImageFont.load_default(size) for size in (24, 14, 12))
    sizes = [_shown_size(*thumbnail.pixels.shape[:2]) for thumbnail in thumbnails]
    width, height = max(size[0] for size in sizes), max(size[1] for size in sizes)
    cell = max(width, SMALLEST_SIDE)
    columns = _columns(len(thumbnails))
    # A title needs room even above a single small image.
    inner = max(columns * cell + (columns - 1) * _GAP, 360)

    title = wrap(file.path.name, title_font, inner, 2)
    facts = wrap(_facts(file, thumbnails, split), font, inner, 4)
    labels = [wrap(thumbnail.label, font, cell, MAX_LABEL_LINES) for thumbnail in thumbnails]
    row_texts = [wrap(thumbnail.row_text, small, cell, 2) for thumbnail in thumbnails]
    legend = legend_of(file, [thumbnail.marks for thumbnail in thumbnails])

    line, small_line, title_line = (round(each.getbbox("Áyg|")[3] + 4) for each in (font, small, title_font))
    head = _MARGIN + len(title) * title_line + len(facts) * line + _GAP
    tops, top = [], head
    for first in range(0, len(thumbnails), columns):
        row = range(first, min(first + columns, len(thumbnails)))
        tops.append(top)
        words = max(len(labels[i]) * line + len(row_texts[i]) * small_line for i in row)
        top += height + _PADDING + words + _GAP
    entry_positions, bottom = _legend_positions(legend, font, inner, top)

    sheet = Image.new("RGB", (inner + 2 * _MARGIN, bottom + _MARGIN - _GAP // 2), _PAPER)
    draw = ImageDraw.Draw(sheet)
    at = _write(draw, _MARGIN, _MARGIN, title, title_font, _INK, title_line)
    _write(draw, _MARGIN, at, facts, font, _FADED, line)
    for i, thumbnail in enumerate(thumbnails):
        left = _MARGIN + i % columns * (cell + _GAP)
        top = tops[i // columns]
        # The images of one row are aligned at the bottom, above their labels.
        image_left, image_top = left + (cell - sizes[i][0]) // 2, top + height - sizes[i][1]
        draw.rectangle((image_left - 1, image_top - 1, image_left + sizes[i][0], top + height), outline=_FRAME)
        sheet.paste(_thumbnail_image(thumbnail, file, sizes[i]), (image_left, image_top))
        at = _write(draw, left, top + height + _PADDING, labels[i], font, _INK, line)
        _write(draw, left, at, row_texts[i], small, _FADED, small_line)
    for (x, y), (name, colour, kind) in zip(entry_positions, legend, strict=True):
        if kind != "more":
            filled = kind == "mask"
            draw.rectangle(
                (x, y + 3, x + 12, y + 15), fill=colour if filled else None, outline=_FRAME if filled else colour,
                width=1 if filled else 2,
            )  # fmt: skip
        draw.text((x + 18, y), name, font=font, fill=_INK)
    return sheet


def _columns(count: int) -> int:
    """Returns the columns of the grid: as many as fit, or a few fewer if that fills the last row better."""
    return count if count <= COLUMNS else min(range(COLUMNS, COLUMNS // 2, -1), key=lambda columns: -count % columns)


def _facts(file: PackedFile, thumbnails: list[Thumbnail], split: str | None) -> str:
    channels = thumbnails[0].pixels.shape[2]
    kind = {1: "gray", 3: "RGB", 4: "RGBA"}[channels] + (" 16-bit" if file.fields["images"].dtype.itemsize > 1 else "")
    sizes = sorted({thumbnail.pixels.shape[:2] for thumbnail in thumbnails})
    size = f"of {sizes[0][0]} x {sizes[0][1]}"
    if file.fields["images"].varied:
        low, high = (chosen(sizes, key=lambda size: size[0] * size[1]) for chosen in (min, max))
        size = f"of several sizes (shown: {low[0]} x {low[1]} to {high[0]} x {high[1]})"
    parts = [f"{file.num_rows:,} {kind} {'image' if file.num_rows == 1 else 'images'} {size}"]
    if len(file.splits) > 1:
        parts.append(", ".join(f"{name} {len(rows):,}" for name, rows in file.splits.items()))
    names = file.fields["labels"].names if "labels" in file.fields else ()
    if names:
        parts.append(f"{len(names):,} {'attributes' if file.fields['labels'].shape else 'classes'}")
    if split is not None:
        parts.append(f"shown: {split}")
    return " · ".join(parts)


def _shown_size(height: int, width: int) -> tuple[int, int]:
    """Returns (width, height) of a thumbnail: enlarged by a whole factor, or reduced to fit."""
    longest = max(height, width)
    if longest > LARGEST_SIDE:
        return max(1, width * LARGEST_SIDE // longest), max(1, height * LARGEST_SIDE // longest)
    factor = max(1, -(-SMALLEST_SIDE // longest))
    return width * factor, height * factor


def _thumbnail_image(thumbnail: Thumbnail, file: PackedFile, size: tuple[int, int]) -> Image.Image:
    pixels = np.ascontiguousarray(thumbnail.pixels)
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    larger = size[0] > image.width or size[1] > image.height
    image = image.resize(size, Image.Resampling.NEAREST if larger else Image.Resampling.LANCZOS)
    if image.mode == "RGBA":
        y, x = np.mgrid[: size[1], : size[0]] // 8
        gray = np.where((x + y) % 2, 255, 215).astype(np.uint8)
        checkerboard = Image.fromarray(np.dstack([gray, gray, gray, np.full_like(gray, 255)]))
        image = Image.alpha_composite(checkerboard, image)
    image = image.convert("RGB")
    return drawn_over(image, thumbnail.marks, (pixels.shape[0], pixels.shape[1]), file)


def _legend_positions(legend: list[Entry], font: Font, width: int, top: int) -> tuple[list[tuple[int, int]], int]:
    """Returns the position of each entry, row after row, and the bottom of the last."""
    positions, x, y = [], _MARGIN, top
    for name, _, _ in legend:
        needed = 18 + int(font.getlength(name)) + 20
        if x > _MARGIN and x + needed > _MARGIN + width:
            x, y = _MARGIN, y + 22
        positions.append((x, y))
        x += needed
    return positions, y + 22 if legend else y


def _write(
    draw: ImageDraw.ImageDraw, x: int, y: int, lines: list[str], font: Font, colour: tuple[int, int, int], step: int
) -> int:
    """Writes lines from (x, y) down; returns the y below the last."""
    for line in lines:
        draw.text((x, y), line, font=font, fill=colour)
        y += step
    return y
