"""Draws a contact sheet of a packed file: some of its images with labels, masks, boxes and landmarks.

`make_preview` chooses and reads the rows, the rest arranges the page: title, facts, a grid of thumbnails with labels, a
legend. `drawn_over` draws marks over an image, `labels_of` makes its label.
"""

from __future__ import annotations

import colorsys
import io
import itertools
import unicodedata
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from fastload.errors import FormatError, ImageError, OptionError, check_split, check_whole, typed
from fastload.format.header import PIXEL_FIELDS, Field, PackedFile
from fastload.format.texts import captions_of_row
from fastload.images.fit import axis_letter
from fastload.inspection.shuffle_quality import one_from_each_part
from fastload.read.checked import CheckedSamples
from fastload.read.reader import open_columns
from fastload.read.row_errors import sample_error
from fastload.remote.open_url import open_packed
from fastload.remote.urls import FileName
from fastload.system.files import check_new_file, save_bytes
from fastload.system.text import format_bytes, share_text, text_of

COLUMNS = 8
LARGEST_SIDE = 224
SMALLEST_SIDE = 112
MAX_LABEL_LINES = 4

_MOST_CHUNK_BYTES = 256 * 2**20
_MOST_DECODED_BYTES = 2**30  # about a second

_PAPER, _INK, _FADED, _FRAME = (250, 249, 246), (32, 33, 36), (138, 138, 134), (218, 216, 210)
_GAP, _MARGIN, _PADDING = 18, 28, 6


@dataclass(frozen=True)
class Thumbnail:
    """One image of the sheet: uint8 (H, W, 1, 3 or 4), its marks, its label, and its split and row."""

    pixels: NDArray[np.uint8]
    marks: Marks
    label: str
    row_text: str


def make_preview(
    path: FileName,
    output: str | Path,
    *,
    count: int = 40,
    split: str | None = None,
    seed: int = 0,
    rows: Sequence[int] = (),
    overwrite: bool = False,
) -> tuple[int, ...]:
    """Draws a contact sheet as a PNG and returns the rows it shows.

    The rows are spread evenly over the file (or one split): one is drawn at random from each of `count` equal parts. Of
    compressed files that take long to decode they come from fewer chunks, 1 GiB in all.
    Small images are enlarged by whole factors, large ones reduced; transparency shows a checkerboard; masks are drawn
    half-transparent; boxes (`boxes`, `bbox`) and landmarks are drawn if the names of their columns define their form;
    16 bits are scaled to the largest value shown.

    Args:
        path: a packed file or its URL, or any HDF5 file with a dataset `images` of uint8 or uint16.
        output: .png to write; it appears complete or not at all.
        rows: of the file, to be shown instead, in this order: as `batch.rows` has them.

    Raises:
        MissingFileError, FormatError, RemoteError: as `open_packed`; or images lie in compressed chunks of more
            than 256 MiB.
        OptionError: the file holds no images, or count, split, rows or the output's suffix is invalid.
        OutputError: the output exists or cannot be written.
    """
    output = Path(output)
    if output.suffix.lower() != ".png":
        raise OptionError(f"{output}: a preview is a PNG; give it a name that ends in .png.")
    check_new_file(output, force=overwrite)
    check_whole("count", count, least=1)
    check_whole("seed", seed, least=0)
    with open_packed(path) as file:
        return _draw(file, output, count=count, split=split, seed=seed, chosen=rows)


def _draw(
    file: PackedFile, output: Path, *, count: int, split: str | None, seed: int, chosen: Sequence[int]
) -> tuple[int, ...]:
    name = file.name
    if "images" not in file.fields:
        raise OptionError(
            f"{name}: holds no images, so there is nothing to draw. `fastload info {typed(name)}` lists what it holds."
        )
    if split is not None:
        check_split(name, split, file.splits)
    among = file.splits[split] if split is not None else range(file.num_rows)
    rows = tuple(map(int, chosen)) or _few_chunks(file, among, _spread(among, count, seed))
    if absent := [row for row in rows if row not in among]:
        of = f"the split {split!r}" if split is not None else "the file"
        shown = ", ".join(map(str, absent[:5]))
        raise OptionError(f"{name}: {of} has no row {shown}; it has {among[0]} to {among[-1]}.")
    with open_columns(file) as hdf5:
        pixels = defaultdict[str, list[NDArray[Any]]](list)
        with closing(CheckedSamples(file)) as samples:
            for name, row in itertools.product(samples.names, rows):
                try:
                    pixels[name].append(samples.pixels(name, row))
                except ImageError as exc:
                    raise sample_error(file, row, str(exc)) from exc
        thumbnails = _thumbnails(hdf5, file, rows, pixels)
    picture = io.BytesIO()
    draw_sheet(file, thumbnails, split).save(picture, format="PNG", optimize=False)
    save_bytes(picture.getvalue(), output, force=True)
    return rows


def _spread(rows: range, count: int, seed: int) -> tuple[int, ...]:
    """Returns `count` different rows (all if there are fewer), ascending, one from each of as many equal parts."""
    return tuple(rows[int(at)] for at in one_from_each_part(np.random.default_rng(seed), len(rows), count))


def _few_chunks(file: PackedFile, among: range, rows: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the rows, or about as many of fewer chunks where those that they lie in take long to decode.

    FormatError: a single chunk is too large.
    """
    fields = [file.fields[name] for name in PIXEL_FIELDS if name in file.fields and file.fields[name].filters]
    field = max(fields, key=lambda field: field.chunk_rows * field.row_bytes, default=None)
    if field is None or not field.chunk_rows:
        return rows
    chunk_bytes, chunk_rows = field.chunk_rows * field.row_bytes, field.chunk_rows
    if chunk_bytes > _MOST_CHUNK_BYTES:
        raise FormatError(
            f"{file.path}: one image of `{field.name}` cannot be shown without decoding a whole chunk of "
            f"{field.chunk_rows:,} rows, {format_bytes(chunk_bytes)}; a preview decodes at most "
            f"{format_bytes(_MOST_CHUNK_BYTES)} at once. Make smaller chunks: "
            f"`fastload repack {typed(file.path)} OUT.h5`."
        )
    chunks = sorted({row // chunk_rows for row in rows})
    kept = max(1, _MOST_DECODED_BYTES // chunk_bytes)
    if len(chunks) <= kept:
        return rows
    chosen = set(chunks[:: -(-len(chunks) // kept)])
    found = list[int]()
    for chunk in sorted(chosen):
        inside = range(max(among.start, chunk * chunk_rows), min(among.stop, (chunk + 1) * chunk_rows))
        found += inside[:: max(1, len(inside) * len(chosen) // len(rows))][: -(-len(rows) // len(chosen))]
    return tuple(found[: len(rows)])


def _thumbnails(
    hdf5: Mapping[str, Any], file: PackedFile, rows: Sequence[int], pixels: Mapping[str, Sequence[NDArray[Any]]]
) -> list[Thumbnail]:
    images = [_channels_last(image) for image in pixels["images"]]
    if images[0].dtype.itemsize > 1:
        top = max(1, *(int(image.max(initial=0)) for image in images))
        images = [(image.astype(np.uint32) * 255 // top).astype(np.uint8) for image in images]
    masks: list[NDArray[Any] | None] = [None] * len(rows)
    if "masks" in pixels:
        # A mask of another size, as other tools may write it, cannot be drawn over the image.
        fitting = zip(pixels["masks"], images, strict=True)
        masks = [mask if mask.shape == image.shape[:2] else None for mask, image in fitting]
    split_of = {row: f"{name} · " for name, run in file.splits.items() for row in rows if row in run}
    row_texts = [f"{split_of.get(row, ' · ') if len(file.splits) > 1 else ''}row {row}" for row in rows]
    parts = zip(images, marks_of(hdf5, file, rows, masks), labels_of(hdf5, file, rows), row_texts, strict=True)
    return [Thumbnail(*each) for each in parts]


def _channels_last(image: NDArray[Any]) -> NDArray[Any]:
    if image.ndim == 2:
        return image[..., None]
    if image.shape[2] in (1, 3, 4):
        return image
    return image.transpose(1, 2, 0) if image.shape[0] in (1, 3, 4) else image[..., :1]


def draw_sheet(file: PackedFile, thumbnails: list[Thumbnail], split: str | None) -> Image.Image:
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
    legend = [
        entry._replace(name=" ".join(wrap(entry.name, font, inner - 38, 1)))
        for entry in legend_of(file, [thumbnail.marks for thumbnail in thumbnails])
    ]

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
    """Returns a colour unlike neighbouring indices' colours: hues at steps of a golden angle, in three brightnesses."""
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
