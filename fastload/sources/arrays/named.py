"""Lists named arrays of equal length, from any file, as one dataset: name, dtype and shape give each its meaning.

images or x or data, uint8 or uint16 (N, H, W[, C]) or (N, C, H, W)     the images
masks, or labels that fit the images, integers (N, H, W)                their masks
labels or y or targets                                                  column `labels`
class_names, filenames, split: texts                                    names of classes, keys, splits
anything else that is numeric, such as tokens and attention_mask        a column of its name
x_train, train_images, train/images                                     the same, by split
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format.ragged import Column
from fastload.sources.arrays.raw_rows import Axes, MemoryRows, RawRows, joined_rows
from fastload.sources.assemble import Draft, Samples, Splits
from fastload.sources.listing import SPLITS, Arrays, Masks, SourceOptions, first_few, free_name, in_split_order
from fastload.sources.tables.frame import categories
from fastload.sources.tables.read_table import Values
from fastload.system.machine import available_memory
from fastload.system.text import text_of

IMAGES = ("images", "image", "imgs", "img", "pixels", "x", "data", "features")
_ONLY_IMAGES = IMAGES[:5]
_LEAST_SIDE = 7  # pixels: an array with two longer axes next to its rows may be images
_MASKS = ("masks", "mask", "segmentation")
_LABELS = ("labels", "label", "targets", "target", "y")
_KEYS = ("key", "keys", "filenames", "filename")
_CLASS_NAMES = ("class_names", "label_names", "classes", "names")
_BY_SPLIT = re.compile(
    rf"(?:(?P<first>{'|'.join(SPLITS)})[-_./]+(?P<rest>.+)|(?P<name>.+)[-_.](?P<last>{'|'.join(SPLITS)}))",
    re.IGNORECASE,
)


@dataclass(frozen=True, eq=False)
class NamedArray:
    """An array as its header describes it, and how to read it."""

    name: str  # of the array in its file
    where: str  # path of the file, and of the array inside it, for messages
    shape: tuple[int, ...]  # (N, ...)
    dtype: np.dtype[Any]  # as stored
    values: Callable[[], NDArray[Any]]  # reads the whole array
    mtime_ns: int  # of its file
    in_place: tuple[Path, int] | None = None  # file and byte of row 0, if the rows lie there back to back in C order
    # Makes the reader of its rows from their stored shape and axes, if the array takes more than half of the available
    # memory; None: it must fit.
    too_large: Callable[[tuple[int, ...], Axes], Arrays] | None = None
    names: tuple[str, ...] = ()  # of its classes, if they are stored with it
    split: str = ""  # that its file or folder names
    axes: Axes = "HWC"  # of images (N, H, W); "WHC": they are (N, W, H)

    @property
    def num_bytes(self) -> int:
        """Bytes of the array in memory."""
        return int(np.prod(self.shape, dtype=np.float64)) * self.dtype.itemsize

    def texts(self) -> list[str]:
        """Returns the elements as str; only for an array of texts."""
        try:
            return [text_of(item) for item in self.values().reshape(-1).tolist()]
        except (ValueError, SystemError) as exc:  # a number that is no character, or is far from one
            if isinstance(exc, SourceError):
                raise
            raise SourceError(f"{self.where}: holds texts that are damaged ({exc}). Copy or save it again.") from exc

    def rows(self, shape: tuple[int, ...], axes: Axes) -> Arrays:
        """Returns the reader of its rows, each (stored) of `shape`: in place if possible, else from memory."""
        if self.in_place is not None:
            path, offset = self.in_place
            return RawRows.of(path, offset=offset, num_rows=self.shape[0], shape=shape, dtype=self.dtype, axes=axes)
        if self.too_large is not None and self.num_bytes > available_memory() // 2:
            return self.too_large(shape, axes)
        return MemoryRows.of(self.values().reshape(self.shape[0], *shape), axes)


def samples_of_arrays(draft: Draft, arrays: list[NamedArray], options: SourceOptions) -> Samples:
    """Returns the samples of arrays of equal length, whose names say what they hold.

    Keys are the texts of an array `filenames`, else the split and the number of the row. Notes are added to the draft,
    the first about what was recognised.

    Raises:
        SourceError: lengths differ; images, labels or masks have a wrong type or shape; there is no array at all.
    """
    where, notes = draft.where, draft.notes
    groups = _by_split(_with_usual_names([array for array in arrays if array.shape], where, notes), notes)
    parts = [_part(name, group, where, notes) for name, group in groups.items()]
    columns = _columns(parts, where, notes)
    shown = first_few([f"{array.name} {array.dtype} {array.shape}" for group in groups.values() for array in group], 8)
    counts = [part.num_rows for part in parts]
    draft.title = f"Layout {draft.layout}: arrays of {' + '.join(map(str, counts))} rows: {shown}."
    keys: list[str] = []
    for part in parts:
        width, prefix = max(6, len(str(part.num_rows - 1))), f"{part.name}/" if len(parts) > 1 else ""
        numbered = (f"{prefix}{row:0{width}d}" for row in range(part.num_rows))
        keys += part.roles["keys"].texts() if "keys" in part.roles else numbered
    splits = Splits(np.repeat(np.arange(len(parts), dtype=np.uint8), counts), tuple(groups))
    if len(parts) == 1 and (texts := parts[0].roles.get("split")):
        names = [SPLITS.get(text.lower(), text) for text in texts.texts()]
        if (count := len(set(names))) > 255:
            raise SourceError(f"{texts.where}: names {count} splits; 255 can be. Rename it, if it holds no splits.")
        splits = Splits.of(names)
    files, masks = _images(parts, where), _masks(parts, where) if options.masks != "none" else None
    if options.masks == "none" and (left_out := [part.roles["masks"].name for part in parts if "masks" in part.roles]):
        notes.append(f"Masks were left alone, as asked for: {first_few(left_out)}.")
    row_bytes = sum(column.values.nbytes for column in columns.values()) // max(1, len(keys))
    if files is not None:
        row_bytes = int(np.prod(files.shape)) * files.dtype.itemsize
    else:
        if unknown := [array for part in parts for array in part.others.values() if _looks_like_images(array)]:
            shown = first_few([f"{array.name} {array.dtype} {array.shape}" for array in unknown])
            raise SourceError(
                f"{where}: no array is known to hold the images ({' or '.join(IMAGES[:4])}, and so on), but {shown} "
                "may. Save it as `images`, (N, H, W) or (N, H, W, C) with 1, 3 or 4 channels, N being the samples."
            )
        notes.append("There are no images among the arrays.")
    newest = [max(array.mtime_ns for array in part.arrays) for part in parts]
    mtimes = np.repeat(np.array(newest, np.int64), counts)
    return Samples(keys, files, np.full(len(keys), row_bytes, np.int64), mtimes, splits, columns, masks)


def _with_usual_names(arrays: list[NamedArray], where: str, notes: list[str]) -> list[NamedArray]:
    """Returns the arrays; those that `numpy.savez` named arr_0, arr_1, ... are renamed to images and labels."""
    like_images = [array.name for array in arrays if len(array.shape) == 4 and array.dtype == np.uint8]
    if not like_images or not all(re.fullmatch(r"arr_\d+", array.name) for array in arrays):
        return arrays
    like_labels = [array.name for array in arrays if len(array.shape) == 1 and array.dtype.kind in "iu"]
    if len(like_images) > 1 or len(like_labels) > 1 or len(like_images) + len(like_labels) < len(arrays):
        shown = first_few([f"{array.name} {array.dtype} {array.shape}" for array in arrays], 8)
        raise SourceError(
            f"{where}: arrays without names: {shown}. Which is what is not known; save them with "
            "`numpy.savez(path, images=..., labels=...)`."
        )
    meant = dict.fromkeys(like_images, "images") | dict.fromkeys(like_labels, "labels")
    notes.append(f"Arrays without names: {', '.join(f'{one} is taken for {what}' for one, what in meant.items())}.")
    return [replace(array, name=meant[array.name]) for array in arrays]


def _by_split(arrays: list[NamedArray], notes: list[str]) -> dict[str, list[NamedArray]]:
    """Returns split -> its arrays, in the order of splits; all arrays as `all` if no name says a split."""
    groups: dict[str, list[NamedArray]] = {}
    shared: list[NamedArray] = []
    for array in arrays:
        split = SPLITS.get(array.split.lower(), array.split)
        if not split and (match := _BY_SPLIT.fullmatch(array.name)):
            split = SPLITS[(match["first"] or match["last"]).lower()]
            array = replace(array, name=match["rest"] or match["name"])
        (groups.setdefault(split, []) if split else shared).append(array)
    if not groups:
        return {"all": shared}
    # Some arrays belong to a split, others not: the rows of the latter are unknown.
    known = [array for array in shared if array.dtype.kind in "SU" and array.name.lower() in _CLASS_NAMES]
    if others := [array.name for array in shared if array not in known]:
        notes.append(f"Ignored, since they belong to no split while others do: {first_few(others)}.")
    return {name: [*groups[name], *known] for name in in_split_order(groups)}


@dataclass(frozen=True, eq=False)
class _Part:
    """The arrays of one split."""

    name: str
    num_rows: int
    arrays: list[NamedArray]  # all that are used
    roles: dict[str, NamedArray]  # "images", "masks", "labels"; texts: "keys", "names" (of classes), "split"
    others: dict[str, NamedArray]  # the other numeric arrays, by the name of their column


def _part(split: str, arrays: list[NamedArray], where: str, notes: list[str]) -> _Part:
    """Returns the arrays of a split by their role; refuses unequal lengths, wrong shapes, and a split of none."""
    left, roles = dict[str, NamedArray](), dict[str, NamedArray]()
    for array in arrays:
        if (other := left.setdefault(array.name, array)) is not array:
            raise SourceError(
                f"{where}: {other.where} and {array.where} are both called {array.name!r}, and an array is known by "
                "its name, a row a sample. Where each file is one sample, as of torchvision's DatasetFolder, "
                "pack what reads them: `pack_images([(numpy.load(path), label) for path, label in samples], 'OUT.h5')`."
            )

    def take(role: str, names: tuple[str, ...], fits: Callable[[NamedArray], bool]) -> bool:
        """Gives the role to the first array of one of these names (in any case) that fits."""
        own = next((own for name in names for own in left if own.lower() == name and fits(left[own])), None)
        if own is not None:
            roles[role] = left.pop(own)
        return own is not None

    for role, names in (("keys", _KEYS), ("names", _CLASS_NAMES), ("split", ("split", "splits"))):
        if take(role, names, lambda array: array.dtype.kind in "SU" and len(array.shape) == 1):
            notes.append(f"{roles[role].name}: {'names of classes' if role == 'names' else role}.")
    if take("images", IMAGES, _holds_images):
        size = _form_of(roles["images"])[2]
        like_masks = take("masks", _MASKS, lambda array: array.dtype.kind in "biu" and len(array.shape) in (3, 4))
        if not like_masks and take(
            "masks", _LABELS, lambda array: array.dtype.kind in "biu" and _fits_mask(array, size)
        ):
            masks = roles["masks"]
            notes.append(f"{masks.name} {masks.shape} holds a class for each pixel: packed as masks.")
    if take("labels", _LABELS, lambda array: True):
        labels = roles["labels"]
        if len(labels.shape) > 2 and set(labels.shape[1:]) != {1}:
            raise SourceError(
                f"{labels.where}: the labels are {labels.dtype} {labels.shape}; expected (N,) or (N, A), or integers "
                "of the images' height and width, which are masks. Rename the array to pack it as a column of its own."
            )
    if useless := [name for name, array in left.items() if array.dtype.kind not in "biuf"]:
        notes.append(f"Ignored, since they are not numeric: {first_few(useless)}.")
    others: dict[str, NamedArray] = {}
    for array in [left[name] for name in left if name not in useless]:
        plain = re.sub(r"[^\w-]+", "_", array.name).strip("_") or "array"
        if (column := free_name(plain)) != plain:
            notes.append(f"{array.name} is packed as {column}: its own name means something else here.")
        if column in others:
            raise SourceError(f"{where}: {others[column].name} and {array.name} would both be {column}. Rename one.")
        others[column] = array
    used = [array for role, array in roles.items() if role != "names"] + list(others.values())
    if not used:
        raise SourceError(f"{where}: no numeric array{f' for {split!r}' if split != 'all' else ''}. Is it the file?")
    num_rows = used[0].shape[0]
    if any(array.shape[0] != num_rows for array in used):
        shown = first_few([f"{array.name} {array.shape[0]}" for array in used], 10)
        raise SourceError(
            f"{where}: arrays of unequal length: {shown}. Each row is one sample, so all need the same; remove those "
            "that do not belong."
        )
    if num_rows == 0:
        raise SourceError(f"{where}: the arrays {first_few([array.name for array in used])} hold no row.")
    return _Part(split, num_rows, used, roles, others)


def _holds_images(array: NamedArray) -> bool:
    """Whether an array with a name of images holds some; refuses one that must, but cannot be packed as such."""
    _, shape, _ = _form_of(array)
    if shape and 0 not in shape and array.dtype.newbyteorder("=") in (np.uint8, np.uint16):
        return True
    if array.name.lower() not in _ONLY_IMAGES and not (shape and len(array.shape) == 4):
        return False
    fix = ". Convert them with `images.astype('uint8')`, if their values lie in 0 to 255."
    if not shape:
        fix = " (N, H, W), (N, H, W, C) or (N, C, H, W) with 1, 3 or 4 channels. Reshape or rename the array."
    elif array.dtype.kind == "f":
        fix = (
            ". Convert them, for example `(images * 255).round().astype('uint8')` where they lie in 0 to 1: what they "
            "stand for is not for packing to guess. Normalizing comes later, on the device."
        )
    raise SourceError(f"{array.where}: the images are {array.dtype} {array.shape}; expected uint8 or uint16{fix}")


def _looks_like_images(array: NamedArray) -> bool:
    """Whether an array of no known name may well hold pixels: 8 or 16 bits, and the sides of an image."""
    sides = [length for length in array.shape[1:] if length > _LEAST_SIDE]
    return array.dtype.newbyteorder("=") in (np.uint8, np.uint16) and len(sides) > 1


def _form_of(images: NamedArray) -> tuple[Axes, tuple[int, ...], tuple[int, ...]]:
    """Returns the order of axes of images (N, ...), the stored shape of one and its height and width; () if none."""
    shape = images.shape[1:]
    if len(shape) == 2:
        return images.axes, (*shape, 1), shape if images.axes == "HWC" else shape[::-1]
    if len(shape) == 3 and shape[2] in (1, 3, 4):
        return "HWC", shape, shape[:2]
    return ("CHW", shape, shape[1:]) if len(shape) == 3 and shape[0] in (1, 3, 4) else ("HWC", (), ())


def _fits_mask(masks: NamedArray, size: tuple[int, ...]) -> bool:
    """Whether each row may be a mask of this height and width."""
    return masks.shape[1:] in (size, (*size, 1), (1, *size))


def _of_all(found: list[NamedArray | None], parts: list[_Part], what: str, where: str) -> list[NamedArray]:
    """Returns an array of each split, refused if only some splits have one; [] if none has."""
    lacking = [part.name for part, array in zip(parts, found, strict=True) if array is None]
    if lacking and len(lacking) < len(parts):
        raise SourceError(f"{where}: there is {what} for some splits, none for {first_few(lacking)}.")
    return [array for array in found if array is not None]


def _images(parts: list[_Part], where: str) -> Arrays | None:
    rows = []
    for images in _of_all([part.roles.get("images") for part in parts], parts, "an array of images", where):
        axes, shape, _ = _form_of(images)
        rows.append((images.rows(shape, axes), images.shape[0]))
    return joined_rows(rows) if rows else None


def _masks(parts: list[_Part], where: str) -> Masks | None:
    """Returns the masks of all splits, None if there are none: uint8 in place or, of wider integers, from a copy.

    They are uint16 where they hold numbers above 255.
    """
    found = _of_all([part.roles.get("masks") for part in parts], parts, "an array of masks", where)
    rows: list[tuple[Arrays, int]] = []
    highest = 0
    for part, masks in zip(parts, found, strict=False):
        height, width = size = _form_of(part.roles["images"])[2]
        wanted = f"integers from 0 to 65535, (N, {height}, {width})"
        if not _fits_mask(masks, size):
            said = f"the masks are {masks.dtype} {masks.shape}, the images {height}x{width}; expected {wanted}."
            raise SourceError(f"{masks.where}: {said}")
        if masks.dtype == np.uint8:
            rows.append((masks.rows(size, "HWC"), part.num_rows))
            continue
        if masks.num_bytes > available_memory():
            raise SourceError(
                f"{masks.where}: {masks.num_bytes:,} bytes do not fit into memory, where masks of {masks.dtype} "
                "are copied. Save them as uint8."
            )
        values = masks.values()
        low, high = int(values.min()), int(values.max())
        if low < 0 or high > 65_535:
            raise SourceError(
                f"{masks.where}: the masks hold {low} to {high}; expected {wanted}. Number the classes "
                "from 0, with 255 for none."
            )
        dtype, highest = np.uint8 if high <= 255 else np.uint16, max(highest, high)
        rows.append((MemoryRows.of(values.reshape(len(values), height, width).astype(dtype)), part.num_rows))
    if highest > 255:
        rows = [(_as_uint16(each, count), count) for each, count in rows]
    present = np.ones(sum(count for _, count in rows), np.bool_)
    return Masks(joined_rows(rows), present, found[0].names) if rows else None


def _as_uint16(rows: Arrays, count: int) -> Arrays:
    """Returns so many rows of masks as uint16, from a copy if they are uint8."""
    if rows.dtype == np.uint16:
        return rows
    values = np.empty((count, *rows.shape), rows.dtype)
    rows.read_rows(np.arange(count), values)
    return MemoryRows.of(values.astype(np.uint16))


def _columns(parts: list[_Part], where: str, notes: list[str]) -> dict[str, Column]:
    labels = {part.name: part.roles["labels"] for part in parts if "labels" in part.roles}
    needed = sum(array.num_bytes for array in (*labels.values(), *(a for part in parts for a in part.others.values())))
    if needed > available_memory():
        raise SourceError(f"{where}: arrays other than images take {needed:,} bytes, more than the memory there is.")
    columns = dict([_labels(parts, labels, notes)]) if labels else {}
    for name in dict.fromkeys(name for part in parts for name in part.others):
        stored = _of_all([part.others.get(name) for part in parts], parts, f"an array {name}", where)
        if len({array.shape[1:] for array in stored}) > 1:
            raise SourceError(f"{where}: {name} has rows of different shapes: {[array.shape for array in stored]}.")
        values = np.concatenate([_native(array.values()) for array in stored])
        columns[name] = Column(values, {"names": stored[0].names} if stored[0].names else {})
    return columns


def _labels(parts: list[_Part], labelled: dict[str, NamedArray], notes: list[str]) -> tuple[str, Column]:
    """Returns the column of labels and its name, `labels` or (for numbers that are no classes) `targets`."""
    given = list(labelled.values())
    classes = next((tuple(part.roles["names"].texts()) for part in parts if "names" in part.roles), given[0].names)
    if all(array.dtype.kind in "SU" for array in given):
        texts = np.array([text for array in given for text in array.texts()], object)
        column = categories(Values("text", texts, np.zeros(len(texts), np.bool_)))
        values, classes = column.values, column.attrs["names"]
    else:
        read = [_label_numbers(array) for array in given]
        if len({values.shape[1:] for values in read}) > 1:
            raise SourceError(f"{given[0].where}: labels of different shapes: {[array.shape for array in given]}.")
        values = np.concatenate(read)
    attrs = {"names": classes} if classes else {}
    if values.dtype.kind == "f" or values.ndim > 1:
        is_vector = values.dtype.kind != "f" and values.min(initial=0) >= 0 and values.max(initial=0) <= 1
        if len(given) < len(parts):
            what = "vectors of labels" if is_vector else "targets"
            raise SourceError(f"{given[0].where}: there are {what} for some splits only.")
        if is_vector:
            return "labels", Column(values.astype(np.uint8), attrs)
        held = "numbers that are no classes" if values.dtype.kind == "f" else f"{values.shape[1:]} numbers a row"
        notes.append(f"{given[0].name} holds {held}: packed as targets.")
        return "targets", Column(values)
    labels = np.full(sum(part.num_rows for part in parts), -1, np.int64)
    labels[np.repeat([part.name in labelled for part in parts], [part.num_rows for part in parts])] = values
    notes += [f"There are no labels for {part.name}: they are -1." for part in parts if part.name not in labelled]
    return "labels", Column(labels, attrs)


def _label_numbers(array: NamedArray) -> NDArray[Any]:
    """Returns labels as int64 (n,) or (n, A); as floats (n, ...) if some are not whole numbers."""
    if array.dtype.kind not in "biuf":
        raise SourceError(f"{array.where}: the labels are {array.dtype}; expected integers or texts. Convert them.")
    values = array.values()
    if values.ndim > 1 and set(values.shape[1:]) == {1}:
        values = values.reshape(-1)
    if values.dtype.kind == "f":
        rows = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
        if len(rows):
            shown = first_few([str(row) for row in rows.tolist()])
            raise SourceError(
                f"{array.where}: labels that are NaN or infinite ({len(rows)}), in the rows {shown}. "
                "Give them a class, -1 for none, or remove those rows."
            )
        if np.any(values != np.round(values)) or np.abs(values).max(initial=0) >= 2**53:
            return _native(values)
    if values.dtype == np.uint64 and values.max(initial=0) >= 2**63:
        raise SourceError(f"{array.where}: labels beyond what int64 holds. Number the classes from 0.")
    return values.astype(np.int64)


def _native(values: NDArray[Any]) -> NDArray[Any]:
    """Returns an array in native byte order and C order; booleans become 0 and 1."""
    dtype = np.dtype(np.uint8) if values.dtype == np.bool_ else values.dtype.newbyteorder("=")
    return np.ascontiguousarray(values, dtype=dtype)
