"""Which file each row becomes: by class folders, or all in one folder beside a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np

from fastload.errors import OptionError
from fastload.export.names import Names, class_folders, safe_name, safe_parts
from fastload.sources.folder import ORDER, SPLITS
from fastload.sources.listing import Column, Listing, first_few

ExportLayout = Literal["auto", "folder", "csv"]

IMAGES, MASKS, MANIFEST = "images", "masks", "manifest.csv"
TABLE_MASKS = "mask_images"
"""Beside a table: `masks` beside `images` would be a layout of its own, which says less."""

_NONE: Mapping[int, str] = MappingProxyType({})

RENUMBERED = (
    "Packed again without fastload.json, classes get other numbers: those of their sorted names, without unused ones."
)


@dataclass(frozen=True)
class ExportPlan:
    """The files to be.

    Attributes:
        layout: "folder" or "csv".
        images: for each row its path, with `/`.
        masks: likewise for its mask; empty without masks.
        notes: what the files do not say, or say otherwise.
    """

    layout: Literal["folder", "csv"]
    images: tuple[str, ...]
    masks: tuple[str, ...]
    notes: tuple[str, ...]


def plan_export(listing: Listing, layout: ExportLayout, suffix: str, others: Mapping[int, str] = _NONE) -> ExportPlan:
    """The paths of all rows.

    Args:
        suffix: of all images but `others`, and of all masks.
        others: row -> suffix of its image.

    Raises:
        OptionError: the layout is not known, or cannot hold what the file does.
    """
    if layout not in get_args(ExportLayout):
        raise OptionError(f"layout={layout!r} is not known; accepted: {', '.join(get_args(ExportLayout))}.")
    why = _no_folders(listing)
    if layout == "csv" or (layout == "auto" and (why or _more_than_classes(listing))):
        return _with_table(listing, suffix, others)
    if why:
        raise OptionError(f"class folders cannot hold this file: {why}. Choose `--layout csv`.")
    return _by_folders(listing, suffix, others)


def _classes(listing: Listing) -> Column | None:
    """The labels, when each row has one class."""
    column = listing.columns.get("labels")
    return column if column is not None and column.values.ndim == 1 and column.values.dtype.kind in "iu" else None


def _no_folders(listing: Listing) -> str:
    """Why folders of classes would not say what the file does; "" when they can."""
    labels = listing.columns.get("labels")
    if labels is not None and labels.values.ndim > 1:
        return "each row has several labels"
    if labels is not None and labels.values.dtype.kind not in "iu":
        return "its labels are no class numbers"
    for split, name in enumerate(listing.split_names):
        here = listing.split == split
        if len(listing.split_names) > 1 and name not in ORDER:
            return f"its split {name!r} would be taken for a class"
        if labels is not None and len(set((labels.values[here] < 0).tolist())) > 1:
            return f"some rows of the split {name!r} have no label, others have"
    if labels is not None and listing.masks is not None:
        return "it has both labels and masks"
    if labels is not None and len(listing.split_names) == 1:
        names = _class_names(labels)
        mistaken = [name for name in names if name.lower() in SPLITS]
        if mistaken:
            return f"its class {mistaken[0]!r} would be taken for a split"
    return ""


def _more_than_classes(listing: Listing) -> bool:
    return listing.masks is not None or bool(set(listing.columns) - {"labels"})


def _class_names(labels: Column) -> tuple[str, ...]:
    """Names of all classes; where there are none, numbers of equal length, so that sorting keeps their order."""
    names = tuple(labels.attrs.get("names", ()))
    most = int(labels.values.max(initial=0))
    digits = len(str(max(most, len(names) - 1)))
    return names + tuple(f"{number:0{digits}d}" for number in range(len(names), most + 1))


def _by_folders(listing: Listing, suffix: str, others: Mapping[int, str]) -> ExportPlan:
    labels = _classes(listing)
    names = _class_names(labels) if labels is not None else ()
    folders, given, notes = class_folders(names), Names(), []
    several = len(listing.split_names) > 1
    images = []
    for row, key in enumerate(listing.keys):
        above = [listing.split_names[int(listing.split[row])]] if several else []
        if labels is not None and labels.values[row] >= 0:
            above.append(folders[int(labels.values[row])])
        images.append(given.path(above, safe_parts(key)[-1], suffix))
    masks: list[str] = []
    if listing.masks is not None:
        masks = [f"{MASKS}/{path}" for path in images]
        images = [f"{IMAGES}/{path}" for path in images]
    images = _resuffixed(images, suffix, others)
    left = sorted(set(listing.columns) - {"labels"})
    if left:
        notes.append(
            f"Folders cannot say it, only fastload.json and fields.npz do: {first_few(left)}. `--layout csv` does."
        )
    notes += _class_notes(labels, names, folders)
    return ExportPlan("folder", tuple(images), tuple(masks), (*notes, *_mask_notes(listing)))


def _resuffixed(paths: list[str], suffix: str, others: Mapping[int, str]) -> list[str]:
    """The paths, some with another suffix. They were told apart before: a mask is named as its image but for that."""
    return [path.removesuffix(suffix) + others[row] if row in others else path for row, path in enumerate(paths)]


def _class_notes(labels: Column | None, names: tuple[str, ...], folders: list[str]) -> list[str]:
    if labels is None:
        return []
    notes = []
    renamed = [f"{name} as {folder}" for name, folder in zip(names, folders, strict=True) if name != folder]
    if renamed:
        notes.append(f"Classes whose names are no names of folders ({len(renamed)}): {first_few(renamed)}.")
    used = [folders[number] for number in np.unique(labels.values[labels.values >= 0]).tolist()]
    if used != sorted(folders):
        notes.append(RENUMBERED)
    return notes


def _mask_notes(listing: Listing) -> tuple[str, ...]:
    """What files of masks do not say."""
    masks = listing.masks
    if masks is None or (not masks.names and masks.ignore_index is None):
        return ()
    ignored = "" if masks.ignore_index is None else f"the value {masks.ignore_index} is no class (ignore_index)"
    names = f"classes are {first_few(list(masks.names))}" if masks.names else ""
    return (
        f"Masks hold numbers, only fastload.json says what they mean: {'; '.join(filter(None, (names, ignored)))}.",
    )


def _with_table(listing: Listing, suffix: str, others: Mapping[int, str]) -> ExportPlan:
    """Images in one folder, named as their keys are; masks in another, named alike."""
    given = Names()
    # Without the folders of the keys: such names as `img_align_celeba/` would be taken for that dataset.
    images = [given.path([], safe_name("_".join(safe_parts(key))), suffix) for key in listing.keys]
    masks = () if listing.masks is None else tuple(f"{TABLE_MASKS}/{path}" for path in images)
    images = _resuffixed(images, suffix, others)
    return ExportPlan("csv", tuple(f"{IMAGES}/{path}" for path in images), masks, _mask_notes(listing))
