"""The plan of an export: the file of each row, in class folders or all in one folder with a table.

Names are made from keys and class names, and are valid on Linux, macOS and Windows, inside the folder, and unique.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np
import xxhash

from fastload.errors import OptionError
from fastload.format.column import Column
from fastload.pack.pack_options import check_choice
from fastload.sources.exported import FIELDS, SIDECAR
from fastload.sources.listing import SPLIT_ORDER, SPLITS, Listing, first_few

MAX_NAME_BYTES = 200
"""Limit for one name with its suffix: file systems allow 255, and temporary names are longer."""
MAX_DEPTH = 16

_UNSAFE = re.compile(r'[\x00-\x1f\x7f-\x9f<>:"|?*\\/]')
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)

ExportLayout = Literal["auto", "folder", "csv"]

IMAGES, MASKS, MANIFEST = "images", "masks", "manifest.csv"
TABLE_MASKS = "mask_images"
"""Folder of masks next to a table: `masks` would be recognised as another layout, which ignores the table."""

_NONE: Mapping[int, str] = MappingProxyType({})

RENUMBERED = (
    "Packed again without fastload.json, classes get other numbers: those of their sorted names, without unused ones."
)


@dataclass(frozen=True)
class ExportPlan:
    """The files of an export.

    Attributes:
        layout: "folder" or "csv".
        images: path of each row's image, with `/`.
        masks: path of each row's mask; empty without masks.
        notes: what the files do not say, or say differently.
    """

    layout: Literal["folder", "csv"]
    images: tuple[str, ...]
    masks: tuple[str, ...]
    notes: tuple[str, ...]


def plan_export(listing: Listing, layout: ExportLayout, suffix: str, others: Mapping[int, str] = _NONE) -> ExportPlan:
    """Returns the paths of all rows.

    Args:
        suffix: suffix of all images except `others`, and of all masks.
        others: row -> suffix of its image.

    Raises:
        OptionError: the layout is not known, or cannot hold what the file does.
    """
    check_choice("layout", layout, get_args(ExportLayout))
    why = _no_folders(listing)
    if layout == "csv" or (layout == "auto" and (why or _more_than_classes(listing))):
        return _with_table(listing, suffix, others)
    if why:
        raise OptionError(f"class folders cannot hold this file: {why}. Choose `--layout csv`.")
    return _by_folders(listing, suffix, others)


def _no_folders(listing: Listing) -> str:
    """Returns why folders of classes cannot say what the file does; "" if they can."""
    labels = listing.columns.get("labels")
    if labels is not None and labels.values.ndim > 1:
        return "each row has several labels"
    if labels is not None and labels.values.dtype.kind not in "iu":
        return "its labels are no class numbers"
    for split, name in enumerate(listing.split_names):
        here = listing.split == split
        if len(listing.split_names) > 1 and name not in SPLIT_ORDER:
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


def _with_table(listing: Listing, suffix: str, others: Mapping[int, str]) -> ExportPlan:
    """Plans images in one folder, named after their keys, and masks of the same names in another."""
    given = Names()
    # Without the folders of the keys: such names as `img_align_celeba/` would be taken for that dataset.
    images = [given.path([], safe_name("_".join(safe_parts(key))), suffix) for key in listing.keys]
    masks = () if listing.masks is None else tuple(f"{TABLE_MASKS}/{path}" for path in images)
    images = _resuffixed(images, suffix, others)
    return ExportPlan("csv", tuple(f"{IMAGES}/{path}" for path in images), masks, _mask_notes(listing))


def _resuffixed(paths: list[str], suffix: str, others: Mapping[int, str]) -> list[str]:
    """Returns the paths, some with another suffix; they were unique before, as a mask is named like its image."""
    return [path.removesuffix(suffix) + others[row] if row in others else path for row, path in enumerate(paths)]


def _classes(listing: Listing) -> Column | None:
    """Returns the labels, if each row has one class."""
    column = listing.columns.get("labels")
    return column if column is not None and column.values.ndim == 1 and column.values.dtype.kind in "iu" else None


def _class_names(labels: Column) -> tuple[str, ...]:
    """Returns the names of all classes; numbers of equal length without names, so that sorting keeps their order."""
    names = tuple(labels.attrs.get("names", ()))
    most = int(labels.values.max(initial=0))
    digits = len(str(max(most, len(names) - 1)))
    return names + tuple(f"{number:0{digits}d}" for number in range(len(names), most + 1))


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
    """Returns notes on what files of masks do not say."""
    masks = listing.masks
    if masks is None or (not masks.names and masks.ignore_index is None):
        return ()
    ignored = "" if masks.ignore_index is None else f"the value {masks.ignore_index} is no class (ignore_index)"
    names = f"classes are {first_few(list(masks.names))}" if masks.names else ""
    return (
        f"Masks hold numbers, only fastload.json says what they mean: {'; '.join(filter(None, (names, ignored)))}.",
    )


class Names:
    """Hands out unique paths, also for file systems that ignore upper and lower case."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = {_folded(name) for name in taken}
        self._last: dict[str, int] = {}  # The highest number of each path: without it, equal names take quadratic time.

    def path(self, folders: list[str], name: str, suffix: str) -> str:
        """Returns `folders/name.suffix`; the name gets `_2`, `_3`, ... if the path is taken."""
        # A folder whose name ends like a file's could meet a file of that name.
        above = "/".join(f"{folder}_" if folder.lower().endswith(suffix) else folder for folder in folders)
        start = f"{above}/" if above else ""
        path = f"{start}{name}{suffix}"
        plain = folded = _folded(path)
        number = self._last.get(plain, 1)
        while folded in self._taken:
            number += 1
            path = f"{start}{name}_{number}{suffix}"
            folded = _folded(path)
        self._last[plain] = number
        self._taken.add(folded)
        return path


def class_folders(names: Iterable[str]) -> list[str]:
    """Returns a unique folder name for each class, none of which export needs for itself."""
    given = Names((SIDECAR, FIELDS))
    return [given.path([], safe_name(name), "") for name in names]


def safe_parts(key: str) -> list[str]:
    """Returns the folders and the name without suffix for a key; folders deeper than MAX_DEPTH are joined."""
    parts = [part for part in key.split("/") if part not in ("", ".", "..")]
    parts = parts or ["_"]
    if len(parts) > MAX_DEPTH:
        parts = [*parts[: MAX_DEPTH - 1], "_".join(parts[MAX_DEPTH - 1 :])]
    stem, dot, suffix = parts[-1].rpartition(".")
    if stem and dot and re.fullmatch(r"[A-Za-z0-9]{1,5}", suffix):
        parts[-1] = stem
    return [safe_name(part) for part in parts]


def safe_name(text: str) -> str:
    """Returns a name of a file or folder that resembles the text and is valid on Linux, macOS and Windows.

    `..`, separators, control characters, names of Windows devices, leading dots (hidden), trailing dots and spaces are
    replaced or removed; a text that is too long is cut and ends in a hash of all of it.
    """
    name = _UNSAFE.sub("_", unicodedata.normalize("NFC", text)).strip(" ").rstrip(". ")
    name = name.encode("utf-8", errors="replace").decode()
    if name.startswith("."):
        name = f"_{name[1:]}"
    if not name or _RESERVED.fullmatch(name):
        name = f"_{name}"
    if len(name.encode()) > MAX_NAME_BYTES:
        cut = name.encode()[: MAX_NAME_BYTES - 17].decode(errors="ignore").rstrip(". ")
        name = f"{cut}-{xxhash.xxh3_64_hexdigest(text.encode(errors='backslashreplace'))}"
    return name


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", path).casefold())
