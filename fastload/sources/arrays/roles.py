"""Decides by name, dtype and shape what each array of a dataset is (images, masks, labels, ...), and of which split."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.arrays.raw_rows import Axes
from fastload.sources.listing import SPLIT_ORDER, SPLITS, Arrays, first_few, free_name
from fastload.system.text import text_of

IMAGES = ("images", "image", "imgs", "img", "pixels", "x", "data", "features")

_ONLY_IMAGES = IMAGES[:5]

MASKS = ("masks", "mask", "segmentation")

LABELS = ("labels", "label", "targets", "target", "y")

_KEYS = ("key", "keys", "filenames", "filename")

_CLASS_NAMES = ("class_names", "label_names", "classes", "names")

_BY_SPLIT = re.compile(
    rf"(?:(?P<first>{'|'.join(SPLITS)})[-_./]+(?P<rest>.+)|(?P<name>.+)[-_.](?P<last>{'|'.join(SPLITS)}))",
    re.IGNORECASE,
)


@dataclass(frozen=True, eq=False)
class NamedArray:
    """An array as its header describes it, and how to read it.

    Attributes:
        name: name of the array in its file.
        where: path of the file, and of the array inside it, for messages.
        shape: (N, ...).
        dtype: as stored.
        values: reads the whole array.
        rows: makes a reader of its rows, given the shape of a row and the order of its axes.
        mtime_ns: time of modification of its file.
        names: names of its classes, if they are stored with it.
        split: the split that its file or folder names; "" for none.
    """

    name: str
    where: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    values: Callable[[], NDArray[Any]]
    rows: Callable[[tuple[int, ...], Axes], Arrays]
    mtime_ns: int
    names: tuple[str, ...] = ()
    split: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of the array in memory."""
        return int(np.prod(self.shape, dtype=np.float64)) * self.dtype.itemsize

    @property
    def is_text(self) -> bool:
        """Whether the elements are texts."""
        return self.dtype.kind in "SU"

    def texts(self) -> list[str]:
        """Returns the elements as str; only for an array of texts."""
        return [text_of(item) for item in self.values().reshape(-1).tolist()]


def with_usual_names(arrays: list[NamedArray], where: str, notes: list[str]) -> list[NamedArray]:
    """Returns the arrays; those that `numpy.savez` named arr_0, arr_1, ... are renamed to images and labels.

    Raises:
        SourceError: one of them may hold images, but it is ambiguous which array is what.
    """
    like_images = [array for array in arrays if len(array.shape) == 4 and array.dtype == np.uint8]
    if not like_images or not all(re.fullmatch(r"arr_\d+", array.name) for array in arrays):
        return arrays
    like_labels = [array for array in arrays if len(array.shape) == 1 and array.dtype.kind in "iu"]
    if len(like_images) > 1 or len(like_labels) > 1 or len(like_images) + len(like_labels) < len(arrays):
        shown = first_few([f"{array.name} {array.dtype} {array.shape}" for array in arrays], 8)
        raise SourceError(
            f"{where}: arrays without names: {shown}. Which is what is not known; save them with "
            "`numpy.savez(path, images=..., labels=...)`."
        )
    meant = {like_images[0].name: "images"} | ({like_labels[0].name: "labels"} if like_labels else {})
    notes.append(f"Arrays without names: {', '.join(f'{one} is taken for {what}' for one, what in meant.items())}.")
    return [replace(array, name=meant[array.name]) for array in arrays]


def by_split(arrays: list[NamedArray], notes: list[str]) -> dict[str, list[NamedArray]]:
    """Returns split -> its arrays, in the order of splits; all arrays as `all` if no name says a split."""
    groups: dict[str, list[NamedArray]] = {}
    shared = []
    for array in arrays:
        match = _BY_SPLIT.fullmatch(array.name)
        split = SPLITS.get(array.split.lower(), "")
        if not split and match is not None:
            split = SPLITS[(match["first"] or match["last"]).lower()]
            array = replace(array, name=match["rest"] or match["name"])
        if split:
            groups.setdefault(split, []).append(array)
        else:
            shared.append(array)
    if not groups:
        return {"all": shared}
    # Some arrays belong to a split, others not: the rows of the latter are unknown.
    known = [array for array in shared if array.is_text and array.name.lower() in _CLASS_NAMES]
    others = [array.name for array in shared if array not in known]
    if others:
        notes.append(f"Ignored, since they belong to no split while others do: {first_few(others)}.")
    return {name: [*groups[name], *known] for name in SPLIT_ORDER if name in groups}


@dataclass(frozen=True, eq=False)
class SplitArrays:
    """The arrays of one split by their role.

    Attributes:
        name: name of the split.
        num_rows: length of its arrays.
        arrays: all arrays that are used.
        images: array of images, order of its axes, and shape of one image as stored; None if there is none.
        masks: array of masks; None if there is none.
        labels: array of labels; None if there is none.
        others: other numeric arrays, by the name of their column.
        texts: arrays of texts, by role: "keys", "names" (of classes) and "split".
    """

    name: str
    num_rows: int
    arrays: list[NamedArray]
    images: tuple[NamedArray, Axes, tuple[int, ...]] | None
    masks: NamedArray | None
    labels: NamedArray | None
    others: dict[str, NamedArray]
    texts: dict[str, NamedArray]

    @classmethod
    def of(cls, name: str, arrays: list[NamedArray], where: str, notes: list[str]) -> SplitArrays:
        """Returns the arrays of a split by their role.

        Raises:
            SourceError: their lengths differ, an array has a wrong shape, or there is none.
        """
        left = {array.name: array for array in arrays}
        texts = _take_texts(left, notes)
        images = _take_images(left)
        masks = _take_masks(left, images, notes) if images else None
        labels = _take(left, LABELS, lambda array: True)
        if labels is not None and len(labels.shape) > 2 and set(labels.shape[1:]) != {1}:
            raise SourceError(
                f"{labels.where}: the labels are {labels.dtype} {labels.shape}; expected (N,) or (N, A), or "
                "integers of the images' height and width, which are masks. Rename the array to "
                "pack it as a column of its own."
            )
        useless = [n for n, array in left.items() if array.dtype.kind not in "biuf"]
        if useless:
            notes.append(f"Ignored, since they are not numeric: {first_few(useless)}.")
        others: dict[str, NamedArray] = {}
        for array in (array for n, array in left.items() if n not in useless):
            column = re.sub(r"[^\w-]+", "_", array.name).strip("_") or "array"
            if free_name(column) != column:
                column = free_name(column)
                notes.append(f"{array.name} is packed as {column}: its own name means something else here.")
            if column in others:
                raise SourceError(
                    f"{where}: {others[column].name} and {array.name} would both become {column}. Rename one."
                )
            others[column] = array
        used = [
            array for array in (images[0] if images else None, masks, labels, *others.values()) if array is not None
        ]
        used += [texts[what] for what in ("keys", "split") if what in texts]
        if not used:
            raise SourceError(
                f"{where}: no numeric array{f' for {name!r}' if name != 'all' else ''}. Is it the right file?"
            )
        lengths = {array.shape[0] for array in used}
        if len(lengths) > 1:
            shown = first_few([f"{array.name} {array.shape[0]}" for array in used], 10)
            raise SourceError(
                f"{where}: arrays of unequal length: {shown}. Each row is one sample, so all need the same; remove "
                "those that do not belong."
            )
        (num_rows,) = lengths
        if num_rows == 0:
            raise SourceError(f"{where}: the arrays {first_few([array.name for array in used])} hold no row.")
        return cls(name, num_rows, used, images, masks, labels, others, texts)

    def keys(self, with_split: bool) -> list[str]:
        """Returns the keys of the rows: the texts of `filenames`, else their numbers, below the split if asked for."""
        if "keys" in self.texts:
            return self.texts["keys"].texts()
        width = max(6, len(str(self.num_rows - 1)))
        return [f"{self.name}/{row:0{width}d}" if with_split else f"{row:0{width}d}" for row in range(self.num_rows)]


def _take(left: dict[str, NamedArray], names: tuple[str, ...], fits: Callable[[NamedArray], bool]) -> NamedArray | None:
    """Returns the first array of one of these names (in any case) that fits, and removes it from `left`."""
    for name in names:
        for own in left:
            if own.lower() == name and fits(left[own]):
                return left.pop(own)
    return None


def _take_texts(left: dict[str, NamedArray], notes: list[str]) -> dict[str, NamedArray]:
    texts = {}
    for what, names in (("keys", _KEYS), ("names", _CLASS_NAMES), ("split", ("split", "splits"))):
        found = _take(left, names, lambda array: array.is_text and len(array.shape) == 1)
        if found is not None:
            texts[what] = found
            notes.append(f"{found.name}: {'names of classes' if what == 'names' else what}.")
    return texts


def _take_images(left: dict[str, NamedArray]) -> tuple[NamedArray, Axes, tuple[int, ...]] | None:
    """Returns the array of images, the order of its axes, and the shape of one image as stored; removes it from `left`.

    Raises:
        SourceError: an array holds images by its name, but cannot be packed as such.
    """
    for name in IMAGES:
        for own, array in left.items():
            if own.lower() != name:
                continue
            axes, shape = image_axes_of(array.shape)
            if axes and array.dtype.newbyteorder("=") in (np.uint8, np.uint16):
                del left[own]
                return array, axes, shape
            if name in _ONLY_IMAGES or (axes and len(array.shape) == 4):
                raise SourceError(why_no_images(array, bool(axes)))
    return None


def image_axes_of(shape: tuple[int, ...]) -> tuple[Axes | None, tuple[int, ...]]:
    """Returns the order of axes of an array of images (N, ...) and the shape of one image; None, () if it is none."""
    if len(shape) == 3:
        return "HWC", (*shape[1:], 1)
    if len(shape) == 4 and shape[3] in (1, 3, 4):
        return "HWC", shape[1:]
    if len(shape) == 4 and shape[1] in (1, 3, 4):
        return "CHW", shape[1:]
    return None, ()


def why_no_images(array: NamedArray, shape_fits: bool) -> str:
    """Returns the error message about an array that holds images by its name, but not by dtype or shape."""
    found = f"{array.where}: the images are {array.dtype} {array.shape}; expected uint8 or uint16"
    if not shape_fits:
        return f"{found} (N, H, W), (N, H, W, C) or (N, C, H, W) with 1, 3 or 4 channels. Reshape or rename the array."
    if array.dtype.kind == "f":
        return (
            f"{found}. Convert them, for example `(images * 255).round().astype('uint8')` where they lie in 0 to 1: "
            "what they stand for is not for packing to guess. Normalizing comes later, on the device."
        )
    return f"{found}. Convert them with `images.astype('uint8')`, if their values lie in 0 to 255."


def _take_masks(
    left: dict[str, NamedArray], images: tuple[NamedArray, Axes, tuple[int, ...]], notes: list[str]
) -> NamedArray | None:
    """Returns the array of masks, or that of labels if it holds an integer for each pixel; removes it from `left`."""
    masks = _take(left, MASKS, lambda array: array.dtype.kind in "biu" and len(array.shape) in (3, 4))
    if masks is None:
        size = size_of(images)
        masks = _take(left, LABELS, lambda array: array.dtype.kind in "biu" and array.shape[1:] in mask_shapes(size))
        if masks is not None:
            notes.append(f"{masks.name} {masks.shape} holds a class for each pixel: packed as masks.")
    return masks


def size_of(images: tuple[NamedArray, Axes, tuple[int, ...]]) -> tuple[int, int]:
    """Returns height and width of the images."""
    _, axes, stored = images
    height, width = stored[:2] if axes == "HWC" else stored[1:]
    return height, width


def mask_shapes(size: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes in which a mask of this height and width may be stored."""
    return size, (*size, 1), (1, *size)
