"""Boxes and points before and after packing: of which image they are, which reach out of it, and where pixels go.

`as_upright` brings them to the pixels of the upright image, or says why it cannot: the annotations declare another size
than the image has, or boxes are two corners where they are said to be a corner and a size. `with_moved_coordinates`
then moves them as resizing moves the pixels under them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError, SourceError
from fastload.images.fit import Target, moved_coordinates, turned_coordinates
from fastload.images.image_header import probe_image
from fastload.options.pack import BoxesOf, BoxForm, PackOptions
from fastload.pack.decisions import fitted_sizes
from fastload.sources.boxes import REACH, box_fits, reaches_out
from fastload.sources.listing import Files, Listing, first_few

REACHES_OUT = "reaches out of its image"
"""Why an image whose boxes do so is refused."""

DECLARED = "its annotation declares"
"""Within the reason of an image that has not the size that boxes were drawn on."""

EITHER_WAY = "its mask fits before and after"
"""Within the reason of an image of which it is not known whether its mask is turned."""

STORED_MASKS = (
    "If masks were drawn on the images as they are stored, which Pillow and torchvision open unturned, `--boxes-of "
    "stored` turns masks, boxes and points along; if on the images as they are shown, say `--boxes-of upright`"
)
"""What to do about masks of images that EXIF turns."""

# Form, in words, and which part of boxes must reach out as corner and size, and fit in this form. Given by two corners,
# most boxes right of or below the middle of an image reach out. Given by their middles, few small ones do; but hardly
# any leaves an image by half its size either, so that all must fit.
_OTHER_FORMS: tuple[tuple[BoxForm, str, float, float], ...] = (
    ("xyxy", "two corners", 0.1, 0.99),
    ("cxcywh", "the middle", 0.01, 1),
)
_SIDES = ("its left side at x", "its top at y", "its right side at x", "its bottom at y")
_TURNED, _SWAPPED = "its size before EXIF turns it", "the two swapped"


def has_coordinates(listing: Listing) -> bool:
    """Whether columns hold boxes or points in pixels."""
    return any(column.moves for column in listing.columns.values())


def as_upright(
    listing: Listing, headers: NDArray[np.void], options: PackOptions, source: str | Path
) -> tuple[Listing, dict[int, str], list[str]]:
    """Returns the listing with coordinates in pixels of the upright images, {sample: why it has none}, and notes.

    Headers are of all samples, zero where unknown.

    Raises:
        OptionError: boxes are said to be of images of a declared size, and none is declared.
    """
    reasons, notes = dict[int, str](), list[str]()
    drawn_on, declared = options.source.boxes_of, listing.declared
    drawn = listing.masks is not None and listing.masks.drawn
    if drawn_on == "declared" and declared is None:
        raise OptionError(f"{source}: `--boxes-of declared`, but nothing in it declares sizes. Leave it out.")
    sizes = _sizes(headers)
    if declared is not None and drawn_on != "upright":
        exactly = drawn and drawn_on == "auto"  # as masks are drawn at the declared size
        reasons = _of_other_size(declared, headers, drawn_on, 0 if exactly else REACH)
        if reasons and not drawn and not has_coordinates(listing):
            which = first_few([f"{listing.keys[at]} {why}" for at, why in reasons.items()], 2)
            notes.append(f"Images have another size than declared, on which nothing depends ({len(reasons)}): {which}.")
            reasons = {}
    known = headers["height"] > 0
    known[list(reasons)] = False
    if drawn_on == "stored":
        listing = _with_each(listing, known, turned_coordinates, sizes, headers["orientation"])
    elif drawn_on == "declared" and declared is not None:
        listing = _with_each(listing, known, partial(moved_coordinates, clip=False), declared, sizes)
    return listing, reasons, notes


def with_boxes_inside(
    listing: Listing, headers: NDArray[np.void], options: PackOptions, source: str | Path, reasons: dict[int, str]
) -> tuple[Listing, dict[int, str], list[str]]:
    """Returns the listing, why samples are left out and notes: boxes within their images, or as `--outside-boxes` says.

    `reasons`: why samples are left out already.

    Raises:
        SourceError: boxes look like two corners, and are said to be a corner and a size.
    """
    store, notes = options.store, list[str]()
    if listing.layout == "exported" or (store is not None and store.kind == "keep"):
        return listing, reasons, notes  # boxes of packed files and exports stay what they were
    outside = {sample: why for sample, why in boxes_outside(listing, headers).items() if sample not in reasons}
    if outside and options.source.boxes == "auto":
        known = headers["height"] > 0
        known[list(reasons)] = False
        _refuse_other_forms(listing, headers, known, source)
    if options.outside_boxes == "clip":
        listing = with_clipped_boxes(listing, headers)  # also by less than a pixel
    if options.outside_boxes == "refuse":
        return listing, outside | reasons, notes
    if outside:
        which = first_few([listing.keys[sample] for sample in outside])
        done = "cut to it" if options.outside_boxes == "clip" else "kept"
        notes.append(f"Boxes that reach out of their image {done} ({len(outside)}): {which}.")
    return listing, reasons, notes


def _sizes(headers: NDArray[np.void]) -> NDArray[np.int64]:
    """Returns height and width of the upright images, int64 (N, 2); 0 if unknown."""
    return np.stack([headers["height"], headers["width"]], 1).astype(np.int64)


def _of_other_size(
    declared: NDArray[np.int64], headers: NDArray[np.void], drawn_on: BoxesOf, tolerance: int
) -> dict[int, str]:
    """Returns {sample: reason} of images that are not of the size that boxes were drawn on, as far as it is declared.

    Boxes on an image of the declared size can be scaled if there is one, and the image was not turned since.
    """
    sizes = _sizes(headers)
    turned: NDArray[np.bool_] = np.asarray(headers["orientation"] >= 5)
    said: NDArray[np.bool_] = np.asarray((declared > 0).all(axis=1))
    stored = np.where(turned[:, None], sizes[:, ::-1], sizes)

    def differ(meant: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.asarray((abs(declared - meant) > tolerance).any(axis=1))

    swapped: NDArray[np.bool_] = np.asarray(said & ~differ(sizes[:, ::-1]))
    other = said & differ(stored if drawn_on == "stored" else sizes)
    wrong = np.asarray(~said | (swapped & other) if drawn_on == "declared" else other)
    found = dict[int, str]()
    for sample in np.flatnonzero(wrong & (sizes > 0).all(axis=1)).tolist():
        (height, width), (rows, columns) = (stored if drawn_on == "stored" else sizes)[sample], declared[sample]
        how = f", {_TURNED if turned[sample] else _SWAPPED}" if swapped[sample] and drawn_on != "stored" else ""
        size = f"{columns}x{rows}{how}" if said[sample] else "no size"
        as_stored = " as it is stored" if drawn_on == "stored" else ""
        found[sample] = f"is {width}x{height} (width x height){as_stored}, {DECLARED} {size}"
    return found


def undecided_masks(listing: Listing, headers: NDArray[np.void]) -> dict[int, str]:
    """Returns {sample: reason} of images that EXIF turns, and whose masks fit before and after that.

    Where one fits only after, all were drawn on the upright images. Packed rows and exports are upright.
    """
    masks, sizes, orientation = listing.masks, _sizes(headers), headers["orientation"]
    made = listing.layout == "exported" or listing.digests is not None or hasattr(listing.files, "encoded")
    if masks is None or masks.drawn or made or not isinstance(listing.files, Files):
        return {}
    turned: NDArray[np.bool_] = np.asarray(masks.present & (orientation > 1) & (sizes > 0).all(axis=1))
    either = turned & ((orientation <= 4) | (sizes[:, 0] == sizes[:, 1]))
    if (turned & ~either).any():
        return {}
    found = np.flatnonzero(either).tolist()
    if isinstance(masks.files, Files):  # a mask that EXIF turns as well is upright
        found = [at for at in found if probe_image(partial(masks.files.read_head, at)).orientation == 1]
    return {at: f"is turned by EXIF (orientation {orientation[at]}), and {EITHER_WAY}" for at in found}


def ways_out(reasons: list[str], drawn_on: BoxesOf) -> str:
    """Returns what to do about images that have not the size that boxes were drawn on, for these reasons."""
    turned, swapped = (sum(reason.endswith(how) for reason in reasons) for how in (_TURNED, _SWAPPED))
    ways = []
    if turned:
        ways.append(
            "Boxes were drawn on the stored, unturned images where EXIF turns them: `--boxes-of stored` turns boxes, "
            "points and polygons along"
        )
    if drawn_on == "auto" and turned + swapped < len(reasons):
        ways.append("If images were resized after boxes were drawn, `--boxes-of declared` scales these")
    if drawn_on == "stored":
        ways.append("Boxes of these were not drawn on the image as it is stored")
    return ". ".join([*ways, "If boxes fit the images as they are shown, say `--boxes-of upright`"])


def _refuse_other_forms(
    listing: Listing, headers: NDArray[np.void], known: NDArray[np.bool_], source: str | Path
) -> None:
    """Raises SourceError where boxes reach out of their images as corner and size, but (nearly) all fit otherwise."""
    # Imported here, as layouts import nothing of packing, but take long.
    from fastload.sources.layouts import LAYOUTS

    if listing.layout not in LAYOUTS or "boxes" not in LAYOUTS[listing.layout].takes:
        return
    sizes = _sizes(headers)[:, None, ::-1]
    for name, column in listing.columns.items():
        if column.moves != "xywh":
            continue
        boxes = column.values.astype(np.float64).reshape(len(listing), -1, 4)
        there = boxes.any(axis=2) & known[:, None]
        out = there & ~box_fits(boxes, "xywh", sizes)
        for form, what, some, nearly_all in _OTHER_FORMS:
            fitting = int(box_fits(boxes, form, sizes)[there].sum())
            if not out.any() or out.sum() < some * there.sum() or fitting < nearly_all * there.sum():
                continue
            sample, box = np.argwhere(out)[0].tolist()
            shown = ", ".join(f"{number:g}" for number in boxes[sample, box].tolist())
            width, height = sizes[sample, 0].tolist()
            size = " and its size" if form == "cxcywh" else ""
            raise SourceError(
                f"{source}: boxes in {name} look like {what} of each{size}: as x, y, width, height {int(out.sum())} "
                f"of {int(there.sum())} reach out of their images (such as {shown} in {listing.keys[sample]}, "
                f"{width}x{height}), read so {fitting} fit. Say `--boxes {form}`; or `--boxes xywh` if they are a "
                "corner and a size."
            )


def boxes_outside(listing: Listing, headers: NDArray[np.void]) -> dict[int, str]:
    """Returns {sample: reason} of images with a box that reaches out of them by more than a pixel."""
    found: dict[int, str] = {}
    known = headers["height"] > 0
    sizes = np.stack([headers["width"], headers["height"]], 1)[:, None]
    for name, column in listing.columns.items():
        if column.moves not in ("xywh", "xyxy"):
            continue
        boxes = column.values.astype(np.float64).reshape(len(listing), -1, 4)
        sides = reaches_out(boxes, column.moves, sizes) & known[:, None, None]
        for sample in np.flatnonzero(sides.any(axis=(1, 2))).tolist():
            number = int(sides[sample].any(axis=1).argmax())
            box = boxes[sample, number]
            ends = np.concatenate([box[:2], box[2:] + (box[:2] if column.moves == "xywh" else 0)]).tolist()
            at = int(sides[sample, number].argmax())
            which = f"{_SIDES[at]} {ends[at]:g}"
            width, height = sizes[sample, 0].tolist()
            shown, key = ", ".join(f"{value:g}" for value in box.tolist()), listing.keys[sample]
            where = f" of {column.origins[key]}" if key in column.origins else ""
            found[sample] = (
                f"has in {name} a box{where} that {REACHES_OUT} ({width}x{height}, width x height): {shown}, with "
                f"{which}"
            )
    return found


def with_clipped_boxes(listing: Listing, headers: NDArray[np.void]) -> Listing:
    """Returns the listing with boxes cut to their images; of unknown ones they stay."""
    columns = dict(listing.columns)
    sizes = np.stack([headers["width"], headers["height"]], 1).astype(np.float64)
    sizes[headers["height"] == 0] = np.inf
    for name, column in listing.columns.items():
        if column.moves not in ("xywh", "xyxy"):
            continue
        boxes = column.values.astype(np.float64).reshape(len(listing), -1, 4)
        sized = column.moves == "xywh"
        corners = boxes[..., :2], boxes[..., 2:] + sized * boxes[..., :2]
        low, high = (np.clip(corner, 0, sizes[:, None]) for corner in corners)
        clipped = np.concatenate([low, high - low if sized else high], axis=-1).reshape(column.values.shape)
        columns[name] = replace(column, values=clipped.astype(column.values.dtype))
    return replace(listing, columns=columns)


def with_moved_coordinates(
    listing: Listing, headers: NDArray[np.void], target: Target | None, max_size: int | None = None
) -> Listing:
    """Returns the listing with boxes and points as float32 pixels of the packed images.

    Images become `target`, or at most max_size on their shorter side; what belongs to unknown headers becomes 0.
    """
    resized = max_size is not None if target is None else target.fit is not None
    if not resized or not has_coordinates(listing):
        return listing
    sizes = _sizes(headers)
    known = sizes.min(axis=1) > 0
    if target is not None:
        return _with_each(listing, known, partial(moved_coordinates, target=target), sizes)
    return _with_each(listing, known, moved_coordinates, sizes, fitted_sizes(sizes, max_size))


def count_lost_boxes(before: Listing, after: Listing, samples: NDArray[np.int64]) -> int:
    """Returns how many boxes of these samples had an area before they were moved, and have none now."""
    lost = 0
    for name, column in before.columns.items():
        if column.moves in ("xywh", "xyxy") and after.columns[name] is not column:
            boxes = (each.values[samples].astype(np.float64) for each in (column, after.columns[name]))
            sides = (b[..., 2:] - b[..., :2] if column.moves == "xyxy" else b[..., 2:] for b in boxes)
            was, now = (np.prod(each, axis=-1) for each in sides)
            lost += int(np.sum((was > 0) & (now <= 0)))
    return lost


def _with_each(
    listing: Listing, known: NDArray[np.bool_], change: Callable[..., NDArray[np.float32]], *by_sample: NDArray[Any]
) -> Listing:
    """Returns the listing with all coordinates as float32: known samples' changed, others' 0.

    `change` is given values, their kind, and the arrays by sample.
    """
    columns, given = dict(listing.columns), [values[known] for values in by_sample]
    for name, column in columns.items():
        if column.moves:
            values = np.zeros(column.values.shape, np.float32)
            values[known] = change(column.values[known], column.moves, *given)
            columns[name] = replace(column, values=values)
    return replace(listing, columns=columns)
