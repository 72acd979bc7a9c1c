"""Named arrays of equal length as one dataset, in NumPy's own, idx and HDF5 files: names and shapes give each its use.

    images or x or data, uint8 or uint16 (N, H, W[, C]) or (N, C, H, W)     the images
    masks, or labels that fit the images, integers (N, H, W)                their masks
    labels or y or targets                                                  column `labels`
    class_names, filenames, split: texts                                    names of classes, keys, splits
    anything else that is numeric, such as tokens and attention_mask        a column of its name
    x_train, train_images, train/images                                     the same, by split

An .npz, an .npy, or a folder of them; nothing is unpickled, and uncompressed arrays are read in place:

    pathmnist.npz           train_images, train_labels, val_images, ...
    mnist.npz               x_train, y_train, x_test, y_test
    images.npy labels.npy   in one folder, or in train/ and test/
    tokens.npy, ...         a dataset without images

MNIST and its relatives as idx files, unpacked ones in place: Fashion-MNIST, KMNIST, EMNIST, QMNIST and the like. MNIST,
Fashion-MNIST and KMNIST have the same file names, so they are recognised by the md5 of a file.

    train-images-idx3-ubyte[.gz]  train-labels-idx1-ubyte[.gz]  t10k-images-...  t10k-labels-...
    train-images.idx3-ubyte                           with a dot, as on Kaggle
    emnist-letters-train-images-idx3-ubyte            transposed images
    qmnist-train-labels-idx2-int                      eight numbers an image, the first its label

HDF5 files that fastload did not write, whose datasets are taken by their names as NumPy's arrays are:

    images, labels                          (N, H, W, C) or (N, C, H, W), at the top or in train/ and test/
    features, targets, attribute `split`    fuel
    ..._train_x.h5, ..._train_y.h5, ...     PatchCamelyon: one file for each split and field

Links to other files, storage outside the file and virtual datasets are refused. A dataset whose rows lie back to back
in the file is read in place. Any other is read through HDF5: as a whole if it fits into half of the available memory,
else by chunks.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import os
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FileChangedError, FormatError, MissingFileError, SourceError, typed
from fastload.format.chunk_filters import FilteredChunks
from fastload.format.digests import linear_offset, plain
from fastload.format.ragged import Column
from fastload.format.valid import check_stored, open_hdf5
from fastload.options.pack import SourceOptions
from fastload.sources.archives import LOCAL_HEADER, content_offset
from fastload.sources.assemble import Draft, Samples, Splits, split_path
from fastload.sources.listing import SPLITS, Arrays, Masks, first_few, free_name, in_split_order, split_of_parts
from fastload.sources.raw_rows import Axes, MemoryRows, RawRows, StoredRows, joined_rows, npy_header, upright
from fastload.sources.spans import ListedFile
from fastload.sources.tables import Values, categories
from fastload.sources.tree import Tree, key_of
from fastload.sources.webdataset import webdataset_evidence
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
        fix = "Which is what is not known; save them with `numpy.savez(path, images=..., labels=...)`."
        raise SourceError(f"{where}: arrays without names: {shown}. {fix}")
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
class _SplitArrays:
    """The arrays of one split."""

    name: str
    num_rows: int
    arrays: list[NamedArray]  # all that are used
    roles: dict[str, NamedArray]  # "images", "masks", "labels"; texts: "keys", "names" (of classes), "split"
    others: dict[str, NamedArray]  # the other numeric arrays, by the name of their column


def _part(split: str, arrays: list[NamedArray], where: str, notes: list[str]) -> _SplitArrays:
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
        fix = "Each row is one sample, so all need the same; remove those that do not belong."
        raise SourceError(f"{where}: arrays of unequal length: {shown}. {fix}")
    if num_rows == 0:
        raise SourceError(f"{where}: the arrays {first_few([array.name for array in used])} hold no row.")
    return _SplitArrays(split, num_rows, used, roles, others)


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


def _of_all(found: list[NamedArray | None], parts: list[_SplitArrays], what: str, where: str) -> list[NamedArray]:
    """Returns an array of each split, refused if only some splits have one; [] if none has."""
    lacking = [part.name for part, array in zip(parts, found, strict=True) if array is None]
    if lacking and len(lacking) < len(parts):
        raise SourceError(f"{where}: there is {what} for some splits, none for {first_few(lacking)}.")
    return [array for array in found if array is not None]


def _images(parts: list[_SplitArrays], where: str) -> Arrays | None:
    rows = []
    for images in _of_all([part.roles.get("images") for part in parts], parts, "an array of images", where):
        axes, shape, _ = _form_of(images)
        rows.append((images.rows(shape, axes), images.shape[0]))
    return joined_rows(rows) if rows else None


def _masks(parts: list[_SplitArrays], where: str) -> Masks | None:
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
            fix = "Number the classes from 0, with 255 for none."
            raise SourceError(f"{masks.where}: the masks hold {low} to {high}; expected {wanted}. {fix}")
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


def _columns(parts: list[_SplitArrays], where: str, notes: list[str]) -> dict[str, Column]:
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


def _labels(parts: list[_SplitArrays], labelled: dict[str, NamedArray], notes: list[str]) -> tuple[str, Column]:
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


if TYPE_CHECKING:
    from zipfile import ZipInfo

_SUFFIXES = (".npy", ".npz")


def arrays_evidence(tree: Tree) -> list[str]:
    """Returns the .npy and .npz files of a tree without images that is no WebDataset shard; none for any other tree."""
    if len(tree.images) or webdataset_evidence(tree):
        return []
    return [key_of(name) for _, name in tree.not_images if name.lower().endswith(_SUFFIXES)]


def list_arrays(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the rows of NumPy arrays; `samples_of_arrays` decides by name what each array is."""
    positions = [i for i, name in enumerate(tree.names) if name.lower().endswith(_SUFFIXES)]
    if not positions:
        raise SourceError(f"{tree.given}: no .npy or .npz file. Give the file, or the folder that holds them.")
    bundles = [tree.names[i] for i in positions if tree.names[i].lower().endswith(".npz")]
    if len(bundles) > 1 and not all(_split_of(name) for name in bundles):
        raise SourceError(
            f"{tree.given} holds several .npz files ({len(bundles)}): {first_few(map(key_of, bundles))}. "
            "Give one of them; or name them train.npz, val.npz and test.npz."
        )
    arrays = [array for i in positions for array in (read_npz if tree.names[i] in bundles else _read_npy)(tree, i)]
    draft.note("Ignored, since they are single values", [array.name for array in arrays if not array.shape])
    tree.known[positions] = True
    return samples_of_arrays(draft, arrays, options)


def _split_of(name: str) -> str:
    """Returns the split that the stem of a path or a folder of it names; "" for none."""
    return split_of_parts(reversed(name.rpartition(".")[0].split("/")))


def _read_npy(tree: Tree, i: int) -> list[NamedArray]:
    stem = key_of(tree.names[i].rpartition("/")[2].rpartition(".")[0])
    name = "data" if stem.lower() in SPLITS else stem
    if not tree.in_place:
        content = tree.read_text(i)
        return [_described(tree, i, name, "", io.BytesIO(content), len(content), lambda: content)]
    try:
        with open(tree.path / tree.names[i], "rb") as file:
            return [_described(tree, i, name, "", file, os.fstat(file.fileno()).st_size, 0)]
    except OSError as exc:
        raise SourceError(f"{tree.where(i)} cannot be read: {exc.strerror}. Make it readable for this user.") from exc


def read_npz(tree: Tree, i: int) -> list[NamedArray]:
    """Returns the arrays in an .npz, of which only the headers are read.

    Raises:
        SourceError: it is damaged, or holds Python objects or records.
    """
    import zipfile

    where, content = tree.where(i), b"" if tree.in_place else tree.read_text(i)
    damages = zipfile.BadZipFile, OSError, EOFError, RuntimeError, OverflowError, zlib.error, struct.error

    def reopen() -> IO[bytes]:
        return open(tree.path / tree.names[i], "rb") if tree.in_place else io.BytesIO(content)

    def load(member: ZipInfo) -> bytes:
        try:
            # This unpacks no more than the size in the directory, which was compared with the array's header.
            with reopen() as file, zipfile.ZipFile(file) as bundle, bundle.open(member) as data:
                return data.read()
        except (*damages, ValueError) as exc:
            raise SourceError(f"{where}: {key_of(member.filename)}: is damaged ({exc}). Save it again.") from exc

    arrays = []
    try:
        with reopen() as file, zipfile.ZipFile(file) as bundle:
            occurs = Counter(bundle.namelist())
            for member in bundle.infolist():
                if not member.filename.lower().endswith(".npy"):
                    continue
                if occurs[member.filename] > 1:
                    raise SourceError(f"{where}: {key_of(member.filename)} occurs twice. Save the arrays again.")
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise SourceError(f"{where}: {key_of(member.filename)}: not compressed by NumPy. Save it again.")
                source: int | Callable[[], bytes] = partial(load, member)
                if member.compress_type == zipfile.ZIP_STORED and tree.in_place:
                    position = file.tell()
                    file.seek(member.header_offset)
                    header = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
                    source = content_offset(member.header_offset, header)
                    file.seek(position)
                    if source + member.file_size > int(tree.sizes[i]):
                        raise SourceError(f"{where}: {key_of(member.filename)}: is cut short. Copy or save it again.")
                inside, name = f": {key_of(member.filename)}", key_of(member.filename.rpartition(".")[0])
                with bundle.open(member) as head:
                    arrays.append(_described(tree, i, name, inside, head, member.file_size, source))
    except SourceError:
        raise
    except (*damages, ValueError) as exc:  # the latter at a directory that leads out of the file
        raise SourceError(f"{where}: cannot be read as an .npz ({exc}). Copy or save it again.") from exc
    if not arrays:
        raise SourceError(f"{where}: holds no array (a member that ends in .npy). Is it an .npz of NumPy's?")
    return arrays


def _described(
    tree: Tree, i: int, name: str, inside: str, file: IO[bytes], size: int, source: int | Callable[[], bytes]
) -> NamedArray:
    """Returns the array whose .npy content of `size` bytes `file` is positioned at; only the header is read.

    `source` is the byte of file i at which the content begins, or a function that returns the content; `inside` says
    for messages where in file i it lies.

    Raises:
        SourceError: it is damaged, or no array of numbers or texts.
    """
    where, path = f"{tree.where(i)}{inside}", tree.path / tree.names[i]
    try:
        shape, fortran, dtype = npy_header(file)
    except ValueError as exc:
        raise SourceError(f"{where}: not an .npy array, or a damaged one ({exc}). Copy or save it again.") from exc
    if dtype.hasobject:
        raise SourceError(
            f"{where}: an array of Python objects, which only unpickling could read; that could execute anything, so "
            "it is refused. Save it as numbers, or texts of a fixed length, with `astype`."
        )
    if dtype.names or dtype.subdtype or dtype.itemsize == 0:
        raise SourceError(f"{where}: an array of records ({dtype}). Save each of its fields as an array of its own.")
    start, count = file.tell(), math.prod(shape)
    needed = start + count * dtype.itemsize
    if needed != size:
        fix = "The copy was probably cut short; copy or save it again."
        raise SourceError(f"{where}: holds {size:,} bytes, its header promises {needed:,} ({dtype} {shape}). {fix}")
    in_place = None
    if not callable(source) and not (fortran and len(shape) > 1):
        in_place = path, source + start

    def values() -> NDArray[Any]:
        if in_place is None and count * dtype.itemsize > available_memory():
            raise SourceError(
                f"{where}: {count * dtype.itemsize:,} bytes do not fit into memory, and cannot be read in place since "
                "they are compressed or in Fortran order. Save the array uncompressed (`numpy.save`), in C order."
            )
        if callable(source):
            flat = np.frombuffer(source(), dtype, count, start)
        else:
            flat = np.fromfile(path, dtype, count, offset=source + start)
        if len(flat) != count:
            raise SourceError(f"{where}: ended while it was read. Leave it alone, and run again.")
        return flat.reshape(shape, order="F" if fortran else "C")

    mtime_ns, split = int(tree.mtimes_ns[i]), _split_of(tree.names[i])
    return NamedArray(name, where, shape, dtype, values, mtime_ns, in_place, split=split)


_NAME = re.compile(r"(?P<set>.*?)[-_.]?(?P<what>images|labels)[-.]idx[1-4][-.](ubyte|int)(?P<gz>\.gz)?", re.IGNORECASE)
_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

_DIGITS = tuple("0123456789")
_FASHION = tuple("T-shirt/top|Trouser|Pullover|Dress|Coat|Sandal|Shirt|Sneaker|Bag|Ankle boot".split("|"))
_KUZUSHIJI = tuple("o ki su tsu na ha ma ya re wo".split())
_MOST_CLASSES = 1000  # EMNIST has 62
_QMNIST = ("hsf_series", "writer", "image_of_writer", "class_code", "image_of_nist", "duplicate", "reserved")

# md5 of the files of labels. Hashing the images would take far longer and say no more.
_MD5 = {
    "MNIST": "d53e105ee54ea40749a09fcbcd1e9432 ec29112dd5afa0611ce80d1b7f02629c "  # gzipped
    "a25bea736e30d166cdddb491f175f624 27ae3e4e09519cfbb04c629615203637",  # unpacked
    "Fashion-MNIST": "25c81989df183df01b3e8a0aad5dffbe bb300cfdad3c16e7a12a480ee83cd310 "
    "9018921c3c673c538a1fc5bad174d6f9 15d484375f8d13e6eb1aabb0c3f46965",
    "KMNIST": "e144d726b3acfaa3e44228e80efcd344 7320c461ea6c1c855c0b718fb2a4b134",
}
_TITLES = {md5: title for title, sums in _MD5.items() for md5 in sums.split()}
_CLASSES = {"MNIST": _DIGITS, "Fashion-MNIST": _FASHION, "KMNIST": _KUZUSHIJI, "QMNIST": _DIGITS}


def mnist_evidence(tree: Tree) -> list[str]:
    """Returns the files of a tree that are idx files of images or labels by their names."""
    return [key_of(name) for _, name in tree.not_images if _NAME.fullmatch(name.rpartition("/")[2])]


def list_mnist(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the images of idx files, (H, W, 1), in the order of the files; splits by file names.

    Columns: `labels` int64 (N,), -1 for the images of a file without labels; for QMNIST also `qmnist` int32 (N, 7).
    """
    family, sets = _find_idx(draft, tree)
    title = _idx_title(draft, tree, family, [there["labels"] for _, there in sets if "labels" in there])
    arrays, keys = list[NamedArray](), list[str]()
    for split, there in sets:
        if "images" not in there:
            continue
        images, name = _read_idx(tree, there["images"]), key_of(tree.names[there["images"]])
        if len(images.shape) != 3 or images.dtype != np.uint8 or 0 in images.shape:
            raise SourceError(f"{images.where}: holds {_kind_of(images)}; expected images, uint8 (n, height, width).")
        arrays.append(replace(images, name="images", split=split, axes="WHC" if "EMNIST" in title else "HWC"))
        keys += [f"{name}/{row:05d}" for row in range(images.shape[0])]
        if "labels" in there:
            arrays += _idx_labels(replace(_read_idx(tree, there["labels"]), split=split), images.shape[0], name)
    if "EMNIST" in title:
        draft.notes.append("EMNIST's images lie transposed in the files; they are packed upright.")
    largest = max([int(array.values().max(initial=0)) for array in arrays if array.name == "labels"], default=0)
    classes = _idx_classes(tree, family, title, largest)
    arrays = [replace(array, names=classes) if array.name == "labels" else array for array in arrays]
    used = sorted({i for _, there in sets for i in there.values()})
    tree.known[used] = True
    if [array.name for array in arrays].count("qmnist") < sum("images" in there for _, there in sets):
        arrays = [array for array in arrays if array.name != "qmnist"]
    samples = samples_of_arrays(draft, arrays, options)
    draft.title = f"Layout mnist: {title}, recognised by {first_few([key_of(tree.names[i]) for i in used])}."
    return replace(samples, keys=keys)


def _idx_labels(file: NamedArray, count: int, images: str) -> list[NamedArray]:
    """Returns the label of each image, and its further numbers if it has QMNIST's."""
    if len(file.shape) not in (1, 2) or file.dtype.kind not in "iu" or 0 in file.shape[1:]:
        raise SourceError(f"{file.where}: holds {_kind_of(file)}; expected labels, integers (n,). Is it the file?")
    if file.shape[0] != count:
        raise SourceError(f"{file.where}: {file.shape[0]} labels for the {count} images of {images}. Fetch both again.")
    numbers = file.values().reshape(count, -1)
    labels, more = numbers[:, 0], numbers[:, 1:].astype(np.int32)
    found = [replace(file, name="labels", shape=labels.shape, values=lambda: labels)]
    if more.shape[1] == len(_QMNIST):
        found.append(replace(file, name="qmnist", shape=more.shape, values=lambda: more, names=_QMNIST))
    return found


def _kind_of(file: NamedArray) -> str:
    return f"{file.dtype} {file.shape}"


def _find_idx(draft: Draft, tree: Tree) -> tuple[str, list[tuple[str, dict[str, int]]]]:
    """Returns the family, such as `emnist-letters`, and by split the positions of its `images` and `labels`."""
    families: dict[str, dict[str, dict[str, int]]] = {}
    doubled = []
    # Unpacked files first, so that they are preferred to gzipped ones of the same name.
    for i in sorted(range(len(tree.names)), key=lambda i: tree.names[i].lower().endswith(".gz")):
        folder, base = split_path(tree.names[i])
        if match := _NAME.fullmatch(base):
            family, _, part = match["set"].rpartition("-")
            there = families.setdefault(folder + family, {}).setdefault(part or "all", {})
            if there.setdefault(match["what"].lower(), i) != i:
                doubled.append(key_of(tree.names[i]))
    if doubled:
        draft.notes.append(f"Read the unpacked files, not {first_few(doubled)}.")
    with_images = [path for path, sets in families.items() if any("images" in there for there in sets.values())]
    if not with_images:
        raise SourceError(
            f"{tree.given}: no idx file with images, such as train-images-idx3-ubyte or train-images-idx3-ubyte.gz. "
            "Labels alone are no dataset; fetch the images."
        )
    if len(with_images) > 1:
        datasets = [key_of(path.strip("/")) or "the folder itself" for path in with_images]
        raise SourceError(
            f"{tree.given} holds more than one dataset of idx files: {first_few(sorted(datasets))}. Give the folder of "
            "one of them, or move its files to a folder of their own."
        )
    found = list[tuple[str, dict[str, int]]]()
    for part, there in families[with_images[0]].items():
        found.append(("test" if part.lower() == "t10k" else SPLITS.get(part.lower(), part), there))
        if "images" not in there:
            labels = key_of(tree.names[there["labels"]])
            draft.notes.append(f"Ignored {labels}: the images that its labels belong to are not there.")
    order = in_split_order(split for split, _ in found)
    return split_path(with_images[0])[1], sorted(found, key=lambda each: order.index(each[0]))


def _idx_title(draft: Draft, tree: Tree, family: str, labels: list[int]) -> str:
    if "emnist" in family.lower():
        return f"EMNIST ({family})"
    if "qmnist" in family.lower():
        return "QMNIST"
    for i in labels:
        for content in (tree.read_text(i), _idx_content(tree, i)[3]):
            if title := _TITLES.get(hashlib.md5(content, usedforsecurity=False).hexdigest()):
                draft.notes.insert(0, f"{key_of(tree.names[i])} has the md5 of {title}'s.")
                return title
    draft.notes.insert(0, "No file has the md5 of MNIST's, Fashion-MNIST's or KMNIST's: the classes have no names.")
    return "idx files like MNIST's"


def _read_idx(tree: Tree, i: int) -> NamedArray:
    """Returns an idx file, whose values are in place if it is not packed."""
    dtype, shape, start, content = _idx_content(tree, i)

    def values() -> NDArray[Any]:
        return np.frombuffer(content or tree.read_text(i), dtype, offset=start).reshape(shape)

    at = None if content else (tree.path / tree.names[i], start)
    return NamedArray("", tree.where(i), shape, dtype, values, int(tree.mtimes_ns[i]), at)


def _idx_content(tree: Tree, i: int) -> tuple[np.dtype[Any], tuple[int, ...], int, bytes]:
    """Returns dtype, shape and first byte of the values of an idx file, and all of it, b"" if it can be read in place.

    A gzipped one is unpacked no further than one byte behind what its header promises.
    """
    where, packed = tree.where(i), tree.files.read_head(i, 2) == b"\x1f\x8b"
    in_place = not packed and tree.in_place
    data = io.BytesIO(tree.files.read_head(i, 32) if in_place else tree.read_text(i))
    try:
        with gzip.GzipFile(fileobj=data) if packed else data as file:
            head = file.read(32)
            kind, rank = head[2:4] if len(head) >= 4 else (0, 0)
            if head[:2] != b"\0\0" or kind not in _TYPES or not 1 <= rank <= 4 or len(head) < 4 + 4 * rank:
                raise SourceError(
                    f"{where}: not an idx file: it begins with {head[:4]!r}, where two zero bytes, a type and a number "
                    "of dimensions are expected. Fetch it again."
                )
            shape = tuple(int(n) for n in np.frombuffer(head, ">u4", rank, 4))
            dtype, start = np.dtype(_TYPES[kind]), 4 + 4 * rank
            promised = start + math.prod(shape) * dtype.itemsize
            if packed and promised > available_memory():
                raise SourceError(
                    f"{where}: unpacks to {promised:,} bytes by its header, more than the memory there is. "
                    "Unpack it with gunzip: an unpacked file is read in place."
                )
            pieces, left = [head], 0 if in_place else promised + 1 - len(head)
            # In pieces: file.read(n) reserves n bytes before it knows whether the file has as many.
            while left > 0 and (piece := file.read(min(left, 1 << 26))):
                pieces.append(piece)
                left -= len(piece)
    except (OSError, EOFError, zlib.error) as exc:
        raise SourceError(f"{where}: damaged gzip ({exc}). Fetch it again.") from exc
    content = b"" if in_place else b"".join(pieces)
    if (found := len(content) if packed else int(tree.sizes[i])) != promised:
        fix = f"{'The copy was probably cut short; fetch' if found < promised else 'Fetch'} it again."
        raise SourceError(f"{where}: holds {found:,} bytes, its header promises {promised:,} ({shape}). {fix}")
    return dtype, shape, start, content


def _idx_classes(tree: Tree, family: str, title: str, largest: int) -> tuple[str, ...]:
    """Returns the names of the classes; EMNIST's from its mapping file, lines of a label and character codes."""
    mapping = next((i for i, name in enumerate(tree.names) if name.endswith(f"{family}-mapping.txt")), -1)
    if not title.startswith("EMNIST") or mapping < 0:
        return _CLASSES.get(title, ())
    names: dict[int, str] = {}
    for line in tree.read_text(mapping).split(b"\n"):
        numbers = line.split()
        if len(numbers) >= 2 and all(number.isdigit() and len(number) < 10 for number in numbers):
            names[int(numbers[0])] = "".join(chr(int(code)) for code in numbers[1:] if 32 < int(code) < 127)
    # A label far beyond all others is none of EMNIST's, and would take a name for each number below it.
    if largest not in names or largest >= _MOST_CLASSES:
        return ()
    return tuple(names.get(label, "") for label in range(largest + 1))


_HDF5_SUFFIXES = (".h5", ".hdf5", ".hdf")
_FUEL = ("split", "split_array")


def hdf5_evidence(tree: Tree) -> list[str]:
    """Returns the HDF5 files of a tree without images; none for any other tree."""
    if len(tree.images):
        return []
    return [key_of(name) for _, name in tree.not_images if name.lower().endswith(_HDF5_SUFFIXES)]


def list_hdf5(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the rows of HDF5 datasets; `samples_of_arrays` decides by name what each dataset is."""
    positions = [i for i, name in tree.not_images if name.lower().endswith(_HDF5_SUFFIXES)]
    tree.known[positions], names = True, [tree.names[i] for i in positions]
    if not names:
        raise SourceError(f"{tree.given}: no HDF5 file (.h5, .hdf5). Give the file, or the folder that holds it.")
    if tree.archive:
        raise SourceError(f"{tree.given}: HDF5 in an archive cannot be read in place. Unpack it, and pack the folder.")
    if not tree.in_place:
        raise SourceError(f"{tree.given}: HDF5 behind a URL cannot be read in place. Copy it here, and pack the copy.")
    arrays: list[NamedArray] = []
    splits: dict[str, NDArray[np.int64]] = {}
    hidden: dict[str, NDArray[np.int64]] = {}
    for name in names:
        path = tree.path / name
        split = next((part for part in re.split(r"[-_./]", name.lower()) if part in SPLITS), "")
        try:
            with open_hdf5(path) as file:
                if "fastload_version" in file.attrs:
                    fix = f"Change its chunks, order or rows with `fastload repack {typed(path)} OUT.h5`."
                    raise SourceError(f"{path}: fastload packed this file. {fix}")
                found = list(_datasets(path, file, draft.notes))
                arrays += [replace(array, split=split if len(names) > 1 else "") for array in found]
                if len(names) == 1:
                    splits, hidden, lists = _fuel_splits(path, file)
                    arrays = [array for array in arrays if array.name not in lists]
        except (FormatError, MissingFileError) as exc:
            raise SourceError(str(exc)) from exc
    counts = Counter((array.name, array.split) for array in arrays)
    if twice := sorted({name for (name, _), count in counts.items() if count > 1}):
        raise SourceError(f"{tree.given}: several files hold {first_few(twice)}. Give one of them.")
    samples = samples_of_arrays(draft, arrays, options)
    return _with_splits(draft, samples, splits, hidden) if splits else samples


@contextmanager
def _dataset(path: str | Path, name: str) -> Iterator[Any]:
    """Opens a dataset of a file; what HDF5 raises when it is read names the file."""
    try:
        with open_hdf5(Path(path)) as file:
            yield file[name]
    except (FormatError, MissingFileError) as exc:
        raise SourceError(f"{path}: {name} cannot be read ({exc}). Copy the file again.") from exc


@dataclass(frozen=True, eq=False)
class _Hdf5Rows(StoredRows):
    """Rows that only HDF5 can read, compressed or scattered; each batch decodes the chunks that it needs."""

    file: ListedFile
    name: str  # of the dataset
    chunk_rows: int  # rows that are decoded together
    chunks: FilteredChunks | None  # decodes them; None: HDF5 does

    def read_rows(self, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        rows = self.rows[indices]
        self.file.require_unchanged()
        with _reading(self.file.path, self.name, self.chunks) as read:
            chunk = rows // self.chunk_rows
            for number in np.unique(chunk).tolist():
                where, first = np.flatnonzero(chunk == number), number * self.chunk_rows
                block = read(number, self.chunk_rows)
                block = block.reshape(len(block), *self.stored_shape)
                out[where] = upright(block, self.axes)[rows[where] - first]
        self.file.require_unchanged()


@contextmanager
def _reading(
    path: str | Path, name: str, chunks: FilteredChunks | None
) -> Iterator[Callable[[int, int], NDArray[Any]]]:
    """Gives what reads the rows of a chunk, by its number and the rows of a chunk."""
    if chunks is None:
        with _dataset(path, name) as item:
            yield lambda number, rows: np.asarray(item[number * rows : (number + 1) * rows])
        return
    try:
        with open(path, "rb") as file:
            yield lambda number, rows: chunks.rows(file.fileno(), number)
    except (FormatError, FileChangedError) as exc:
        raise SourceError(str(exc)) from exc
    except OSError as exc:
        raise SourceError(f"{path}: {name} cannot be read ({exc.strerror or exc}). Copy the file again.") from exc


def _datasets(path: Path, file: Any, notes: list[str]) -> Iterator[NamedArray]:
    """Yields every dataset of a file, also those in groups. If one group holds all, names omit it."""
    import h5py

    found = dict(_walk(path, file, file, "", set()))
    tops = {name.partition("/")[0] for name in found}
    around = f"{tops.pop()}/" if len(tops) == 1 and all("/" in name for name in found) else ""
    if around.rstrip("/").lower() in SPLITS:
        around = ""
    file_bytes = os.path.getsize(path)
    for name, item in found.items():
        if item.shape and item.dtype.kind != "O":
            check_stored(path, name, item, file_bytes, pixels=len(item.shape) > 2)
        if not item.shape:
            notes.append(f"Ignored {name}: a single value.")
            continue
        short, is_text = name.removeprefix(around), h5py.check_string_dtype(item.dtype) is not None
        is_text &= item.dtype.kind == "O" and len(item.shape) == 1
        if item.dtype.kind in "biufS" or is_text:
            yield _named(path, short, name, item, is_text)
        elif short.rpartition("/")[2].lower() in IMAGES:
            raise SourceError(
                f"{path}: {name}: rows of different length (or of type {item.dtype}), which have no one shape. Export "
                "the images to files, and pack those with --size."
            )
        else:
            notes.append(f"Ignored {name}: of type {item.dtype}.")


def _named(path: Path, short: str, name: str, item: Any, is_text: bool) -> NamedArray:
    """Returns a dataset under a shorter name; the file is opened anew for each read."""
    dtype, shape, chunk_rows = item.dtype, tuple(map(int, item.shape)), int(item.chunks[0]) if item.chunks else 1
    offset = None
    if dtype.kind in "biufS":  # the rows may lie back to back, in any byte order
        contiguous = item.chunks is None and not item.id.get_create_plist().get_nfilters()
        offset = item.id.get_offset() if contiguous else linear_offset(item)

    chunks = FilteredChunks.of(path, name, item)

    def values() -> NDArray[Any]:
        if chunks is not None:
            every = np.empty(shape, dtype.newbyteorder("="))
            with _reading(path, name, chunks) as read:
                for first in range(0, shape[0], chunk_rows):
                    every[first : first + chunk_rows] = read(first // chunk_rows, chunk_rows)
            return every
        with _dataset(path, name) as item:
            return np.array(item.asstr(errors="backslashreplace")[()].tolist()) if is_text else np.asarray(item[()])

    def by_chunks(row_shape: tuple[int, ...], axes: Axes) -> Arrays:
        rows = np.arange(shape[0], dtype=np.int64)
        return _Hdf5Rows(rows, row_shape, dtype, axes, ListedFile.of(path), name, chunk_rows, chunks)

    classes = plain(item.attrs["names"]) if "names" in item.attrs else ()
    classes = tuple(map(str, classes)) if isinstance(classes, tuple) else (str(classes),)
    at, mtime_ns = None if offset is None else (path, int(offset)), os.stat(path).st_mtime_ns
    kind = np.dtype("U1") if is_text else dtype
    return NamedArray(short, f"{path}: {name}", shape, kind, values, mtime_ns, at, by_chunks, classes)


def _walk(path: Path, file: Any, group: Any, prefix: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields (name, dataset) of all below a group. Groups in `seen` are not entered: links may form a circle."""
    import h5py

    seen.add(h5py.h5o.get_info(group.id).addr)
    for name in group:
        where = f"{path}: `{prefix}{name}`"
        link = group.get(name, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise SourceError(f"{where} is a link into another file ({link.filename}); refused as unsafe.")
        try:
            item = group[name]
        except KeyError as exc:
            raise SourceError(f"{where} leads nowhere; refused. Copy the file again, or remove the link.") from exc
        if Path(item.file.filename) != Path(file.filename):
            raise SourceError(f"{where} leads into another file ({item.file.filename}); refused as unsafe.")
        if isinstance(item, h5py.Group):
            if h5py.h5o.get_info(item.id).addr not in seen:
                yield from _walk(path, file, item, f"{prefix}{name}/", seen)
        elif isinstance(item, h5py.Dataset):
            if item.external:
                raise SourceError(f"{where} keeps its data in another file ({item.external[0][0]}); refused as unsafe.")
            if item.is_virtual:
                raise SourceError(f"{where} is a virtual dataset over other files; refused as unsafe.")
            yield f"{prefix}{name}", item


def _fuel_splits(path: Path, file: Any) -> tuple[dict[str, NDArray[np.int64]], dict[str, NDArray[np.int64]], set[str]]:
    """Returns fuel's split -> rows, source -> rows whose values are withheld, and the datasets that list rows."""
    import h5py

    name = next((name for name in _FUEL if name in file.attrs), "")
    table = file.attrs[name] if name else None
    fields = table.dtype.names if isinstance(table, np.ndarray) else None
    if table is None or not fields:
        return {}, {}, set()
    if not {"split", "source", "start", "stop"} <= set(fields):
        raise SourceError(f"{path}: attribute `{name}` is not fuel's table of splits. Remove it to pack without.")
    splits, hidden, lists = dict[str, NDArray[np.int64]](), dict[str, NDArray[np.int64]](), set[str]()
    for line in table:
        split, source = (str(plain(line[key])) for key in ("split", "source"))
        rows = np.arange(int(line["start"]), int(line["stop"]), dtype=np.int64)
        indices = line["indices"] if "indices" in fields else None
        if isinstance(indices, h5py.Reference) and indices:
            target = file[indices]
            if not isinstance(target, h5py.Dataset) or target.dtype.kind not in "iu" or len(target.shape) != 1:
                raise SourceError(f"{path}: the indices of the split {split!r} are no list of rows.")
            rows = target[()].astype(np.int64)
            lists.add(str(target.name).lstrip("/"))
        if "available" in fields and not line["available"]:
            hidden[source] = np.append(hidden.get(source, rows[:0]), rows)
        elif not np.array_equal(splits.setdefault(split, rows), rows):
            raise SourceError(f"{path}: the split {split!r} has other rows for {source} than for what is before it.")
    return splits, hidden, lists


def _with_splits(
    draft: Draft, samples: Samples, splits: dict[str, NDArray[np.int64]], hidden: dict[str, NDArray[np.int64]]
) -> Samples:
    """Returns the samples with fuel's splits. Rows in no split form the split `other`; withheld labels become -1."""
    by_name = {SPLITS.get(name.lower(), name): rows for name, rows in splits.items()}
    names, count = list(in_split_order(by_name)), len(samples.keys)
    split = np.full(count, 255, np.uint8)
    for number, name in enumerate(names):
        rows = by_name[name]
        if rows.min(initial=0) < 0 or rows.max(initial=-1) >= count:
            raise SourceError(f"{draft.where}: the split {name!r} names rows that are not there, of {count}.")
        taken = np.unique(split[rows])
        if len(taken) and taken[0] != 255:
            fix = "Each sample is in one split; remove one of them from the attribute."
            raise SourceError(f"{draft.where}: the splits {names[taken[0]]!r} and {name!r} share rows. {fix}")
        split[rows] = number
    draft.notes.append(f"Splits as fuel's attribute has them: {', '.join(names)}.")
    if others := np.count_nonzero(split == 255):
        draft.notes.append(f"Rows in no split ({others}) are the split 'other'.")
        split[split == 255] = len(names)
        names.append("other")
    columns = dict(samples.columns)
    for source, rows in hidden.items():
        if source in ("targets", "labels") and "labels" in columns and columns["labels"].values.ndim == 1:
            labels = columns["labels"].values.copy()
            labels[rows] = -1
            columns["labels"] = replace(columns["labels"], values=labels)
            draft.notes.append(f"{source} are withheld for {len(rows)} rows: their labels are -1.")
    return replace(samples, splits=Splits(split, tuple(names)), columns=columns)
