"""The plan of an export: the file of each row, in class folders, in one folder with a table, or in shards.

Names are made from keys and class names, and are valid on Linux, macOS and Windows, inside the folder, and unique.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import xxhash

from fastload.errors import OptionError, check_choice
from fastload.format.ragged import Column
from fastload.options.repack import ExportFormat, ExportLayout
from fastload.sources.exported import FIELDS, SIDECAR
from fastload.sources.listing import SPLIT_ORDER, SPLITS, Listing, first_few

MAX_NAME_BYTES = 200
"""Limit for one name with its suffix: file systems allow 255, and temporary names are longer."""
MAX_DEPTH = 16

_UNSAFE = re.compile(r'[\x00-\x1f\x7f-\x9f<>:"|?*\\/]')
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)

_PNG = ".png"
IMAGES, MASKS, MANIFEST = "images", "masks", "manifest.csv"
TABLE_MASKS = "mask_images"
"""Folder of masks next to a table: `masks` would be recognised as another layout, which ignores the table."""

RENUMBERED = "Packed again without fastload.json, classes are renumbered by their sorted names, without unused ones."


@dataclass(frozen=True)
class ExportPlan:
    """The files of an export: the path of each row's image, with `/`, and of its mask (none without masks).

    `notes` say what the files do not, or say differently.
    """

    layout: Literal["folder", "csv", "imagefolder", "webdataset", "hf"]
    images: tuple[str, ...]
    masks: tuple[str, ...]
    notes: tuple[str, ...]


def plan_export(listing: Listing, layout: ExportLayout, jpegs: Collection[int] = ()) -> ExportPlan:
    """Returns the paths of all rows; rows in `jpegs` have a JPEG as image, all other images and all masks are PNG.

    Raises OptionError where the layout is not known, or cannot hold what the file does.
    """
    check_choice("layout", layout, get_args(ExportLayout))
    why = _no_folders(listing)
    more = listing.masks is not None or bool(set(listing.columns) - {"labels"})
    if layout == "csv" or (layout == "auto" and (why or more)):
        # Not in the folders of the keys: such names as `img_align_celeba/` would be taken for that dataset.
        given, layout, notes = Names(), "csv", list[str]()
        images = [given.path([], safe_name("_".join(safe_parts(key))), _PNG) for key in listing.keys]
        masks = [f"{TABLE_MASKS}/{path}" for path in images]
    elif why:
        raise OptionError(f"class folders cannot hold this file: {why}. Choose `--layout csv`.")
    else:
        layout = "folder"
        images, notes = _folder_names(listing)
        masks = [f"{MASKS}/{path}" for path in images]
    # They stay unique with another suffix, as a mask is named like its image.
    again = {row: f"{images[row].removesuffix(_PNG)}.jpg" for row in jpegs}
    above = f"{IMAGES}/" if layout == "csv" or listing.masks is not None else ""
    images = [above + again.get(row, path) for row, path in enumerate(images)]
    if listing.masks is None:
        return ExportPlan(layout, tuple(images), (), tuple(notes))
    said = [f"classes are {first_few(listing.masks.names)}"] if listing.masks.names else []
    if listing.masks.ignore_index is not None:
        said.append(f"the value {listing.masks.ignore_index} is no class (ignore_index)")
    if said:
        notes.append(f"Masks hold numbers, only fastload.json says what they mean: {'; '.join(said)}.")
    return ExportPlan(layout, tuple(images), tuple(masks), tuple(notes))


def plan_format(listing: Listing, format: ExportFormat, jpegs: Collection[int] = ()) -> ExportPlan:
    """Returns the paths of all rows in a format of others: not "folder"; of "webdataset" the members of shards.

    Raises OptionError where it cannot hold what the file does.
    """
    tops = [f"{folder}/" for folder in class_folders(listing.split_names)] if listing.split_names != ("all",) else [""]
    masks: list[str] = []
    if format == "imagefolder":
        images, notes = _imagefolder_names(listing, tops)
    else:
        given, notes = Names(), []
        stems = [given.path([], safe_name("_".join(safe_parts(key))).replace(".", "_"), "") for key in listing.keys]
        unknown = [name for name in listing.split_names if name not in SPLIT_ORDER and name != "all"]
        if format == "webdataset":
            images, masks = [f"{stem}{_PNG}" for stem in stems], [f"{stem}.seg{_PNG}" for stem in stems]
            if unknown:
                notes.append(f"`fastload pack` reads splits train, val and test from shards, not {first_few(unknown)}.")
        else:
            above = [tops[split] for split in listing.split.tolist()]
            images = [f"{top}{stem}{_PNG}" for top, stem in zip(above, stems, strict=True)]
            masks = [f"{top}{TABLE_MASKS}/{stem}{_PNG}" for top, stem in zip(above, stems, strict=True)]
            if unknown:
                notes.append(f"datasets takes folders named train, validation or test for splits, not {unknown[0]!r}: "
                             f"name them in `load_dataset(..., data_files={{...}})`.")  # fmt: skip
        if listing.masks is not None and (listing.masks.names or listing.masks.ignore_index is not None):
            notes.append("Masks hold numbers: left out are the names of their classes and ignore_index.")
    for row in jpegs:
        images[row] = f"{images[row].removesuffix(_PNG)}.jpg"
    return ExportPlan(format, tuple(images), tuple(masks if listing.masks is not None else ()), tuple(notes))


def _imagefolder_names(listing: Listing, tops: list[str]) -> tuple[list[str], list[str]]:
    """Returns the path of each row for torchvision's ImageFolder, and notes on what it does not say."""
    other = "Choose `--format webdataset` or `--format hf`"
    labels = listing.columns.get("labels")
    if labels is None or labels.values.ndim > 1 or labels.values.dtype.kind not in "iu":
        raise OptionError(f"imagefolder needs one class for each image, and this file has none such. {other}.")
    if (without := np.flatnonzero(labels.values < 0)).size:
        raise OptionError(
            f"imagefolder needs one class for each image: {without.size:,} have none, the first "
            f"{listing.keys[without[0]]}. {other}, or leave them out with `fastload repack --label`."
        )
    names = _class_names(labels)
    folders = dict(zip(names, class_folders(names.values()), strict=True))
    given, paths = Names(), []
    for key, split, number in zip(listing.keys, listing.split.tolist(), labels.values.tolist(), strict=True):
        paths.append(given.path([*tops[split].split("/")[:-1], folders[number]], safe_parts(key)[-1], _PNG))
    left = [*(["masks"] if listing.masks is not None else []), *sorted(set(listing.columns) - {"labels"})]
    notes = [f"Left out, as class folders cannot hold it: {first_few(left)}. {other}."] if left else []
    if renamed := [f"{names[number]} as {folder}" for number, folder in folders.items() if names[number] != folder]:
        notes.append(f"Classes whose names are no names of folders ({len(renamed)}): {first_few(renamed)}.")
    for split, name in enumerate(listing.split_names):
        there = sorted(np.unique(labels.values[listing.split == split]).tolist(), key=lambda number: folders[number])
        if there and there != list(range(len(there))):
            where = "" if name == "all" else f" of {name}"
            notes.append(
                f"ImageFolder gives classes{where} other numbers than the file has: it numbers the sorted folders, "
                f"{len(there)} of {len(names)} classes."
            )
    return paths, notes


def _no_folders(listing: Listing) -> str:
    """Returns why folders of classes cannot say what the file does; "" if they can."""
    labels = listing.columns.get("labels")
    if labels is not None and labels.values.ndim > 1:
        return "each row has several labels"
    if labels is not None and labels.values.dtype.kind not in "iu":
        return "its labels are no class numbers"
    if labels is not None and (least := int(labels.values.min(initial=0))) < -1:
        return f"its label {least} is no class number, nor -1 for none"
    for split, name in enumerate(listing.split_names):
        here = listing.split == split
        if len(listing.split_names) > 1 and name not in SPLIT_ORDER:
            return f"its split {name!r} would be taken for a class"
        if labels is not None and len(set((labels.values[here] < 0).tolist())) > 1:
            return f"some rows of the split {name!r} have no label, others have"
    if labels is not None and listing.masks is not None:
        return "it has both labels and masks"
    if labels is not None and len(listing.split_names) == 1:
        mistaken = [name for name in _class_names(labels).values() if name.lower() in SPLITS]
        if mistaken:
            return f"its class {mistaken[0]!r} would be taken for a split"
    return ""


def _folder_names(listing: Listing) -> tuple[list[str], list[str]]:
    """Returns the path of each row in folders of splits and classes, and notes on what these do not say."""
    labels = listing.columns.get("labels")
    names = _class_names(labels) if labels is not None else {}
    folders, given, notes = dict(zip(names, class_folders(names.values()), strict=True)), Names(), []
    several = len(listing.split_names) > 1
    paths = []
    for row, key in enumerate(listing.keys):
        above = [listing.split_names[int(listing.split[row])]] if several else []
        if labels is not None and labels.values[row] >= 0:
            above.append(folders[int(labels.values[row])])
        paths.append(given.path(above, safe_parts(key)[-1], _PNG))
    left = sorted(set(listing.columns) - {"labels"})
    if left:
        notes.append(
            f"Folders cannot say it, only fastload.json and fields.npz do: {first_few(left)}. `--layout csv` does."
        )
    renamed = [f"{names[number]} as {folder}" for number, folder in folders.items() if names[number] != folder]
    if renamed:
        notes.append(f"Classes whose names are no names of folders ({len(renamed)}): {first_few(renamed)}.")
    if labels is not None:
        used = np.unique(labels.values[labels.values >= 0]).tolist()
        if used != list(range(len(used))) or [folders[number] for number in used] != sorted(folders.values()):
            notes.append(RENUMBERED)
    return paths, notes


def _class_names(labels: Column) -> dict[int, str]:
    """Returns number -> name of all classes that have a name or a row.

    Without a name it is the number, all of equal length, so that sorting keeps their order.
    """
    names = tuple(labels.attrs.get("names", ()))
    used = np.unique(labels.values).tolist()
    digits = len(str(max([len(names) - 1, *used])))
    return dict(enumerate(names)) | {number: f"{number:0{digits}d}" for number in used if number >= len(names)}


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
