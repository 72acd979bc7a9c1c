"""What each of some named arrays is: images, masks, labels, texts or a column, and of which split."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fastload.errors import SourceError
from fastload.sources.folder import ORDER, SPLITS
from fastload.sources.listing import first_few, free_name
from fastload.sources.named_array import NamedArray, image_axes_of, mask_shapes, why_no_images
from fastload.sources.rows import Axes

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


def with_usual_names(arrays: list[NamedArray], where: str, notes: list[str]) -> list[NamedArray]:
    """The arrays, of those that `numpy.savez` named arr_0 and so on the images and the labels by what they are.

    Raises:
        SourceError: one may be images, and which array is what is not known.
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


@dataclass(frozen=True, eq=False)
class Part:
    """The arrays of one split.

    Attributes:
        name: of the split.
        num_rows: length of its arrays.
        arrays: all of them that are used.
        images: of the images, its axes and the shape of one as stored; None.
        masks: None where there are none.
        labels: None where there are none.
        others: numeric ones by the name of their column.
        texts: "keys", "names" and "split", as far as they are there.
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
    def of(cls, name: str, arrays: list[NamedArray], where: str, notes: list[str]) -> Part:
        """The arrays of a split by what they are.

        Raises:
            SourceError: they are of unequal length.
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
        """Names of the rows."""
        if "keys" in self.texts:
            return self.texts["keys"].texts()
        width = max(6, len(str(self.num_rows - 1)))
        return [f"{self.name}/{row:0{width}d}" if with_split else f"{row:0{width}d}" for row in range(self.num_rows)]


def by_split(arrays: list[NamedArray], notes: list[str]) -> dict[str, list[NamedArray]]:
    """The arrays of each split, in the order of splits; `all` when none is named."""
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
    # Some arrays by split, others not: which rows these would belong to is not known.
    known = [array for array in shared if array.is_text and array.name.lower() in _CLASS_NAMES]
    others = [array.name for array in shared if array not in known]
    if others:
        notes.append(f"Ignored, since they belong to no split while others do: {first_few(others)}.")
    return {name: [*groups[name], *known] for name in ORDER if name in groups}


def _take(left: dict[str, NamedArray], names: tuple[str, ...], fits: Callable[[NamedArray], bool]) -> NamedArray | None:
    """The first array of one of these names, in any case, that fits, taken from those that are left."""
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
    """The array of images, the order of its axes, and the shape of one image as stored.

    Raises:
        SourceError: an array by its name holds images, and cannot be packed as such.
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


def _take_masks(
    left: dict[str, NamedArray], images: tuple[NamedArray, Axes, tuple[int, ...]], notes: list[str]
) -> NamedArray | None:
    """The array of masks; or that of labels, where it holds an integer for each pixel of the images."""
    masks = _take(left, MASKS, lambda array: array.dtype.kind in "biu" and len(array.shape) in (3, 4))
    if masks is None:
        size = size_of(images)
        masks = _take(left, LABELS, lambda array: array.dtype.kind in "biu" and array.shape[1:] in mask_shapes(size))
        if masks is not None:
            notes.append(f"{masks.name} {masks.shape} holds a class for each pixel: packed as masks.")
    return masks


def size_of(images: tuple[NamedArray, Axes, tuple[int, ...]]) -> tuple[int, int]:
    _, axes, stored = images
    height, width = stored[:2] if axes == "HWC" else stored[1:]
    return height, width
