"""Arrays that are known by their names, wherever they were stored, as one dataset: images, masks, labels, columns.

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

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.memory import available_memory
from fastload.sources.folder import ORDER, SPLITS
from fastload.sources.listing import Arrays, Column, Listing, Masks, first_few, free_name, require_unique
from fastload.sources.named_array import (
    NamedArray,
    image_axes_of,
    label_numbers,
    mask_rows,
    mask_shapes,
    native,
    why_no_images,
)
from fastload.sources.rows import Axes, JoinedRows

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


def list_named_arrays(
    arrays: list[NamedArray], *, layout: str, where: str, notes: tuple[str, ...] = (), masks_wanted: bool = True
) -> Listing:
    """The listing of arrays of equal length, told apart by their names; without the masks where none are wanted.

    Keys: the texts of an array `filenames`, else the split and the number of the row.

    Raises:
        SourceError: unequal lengths, images, labels or masks that are none, no array at all.
    """
    said: list[str] = []
    arrays = _without_names([array for array in arrays if array.shape], where, said)
    groups = _by_split(arrays, said)
    parts = [_Part.of(name, group, where, said) for name, group in groups.items()]
    columns = _columns(parts, where, said)
    shown = [f"{array.name} {array.dtype} {array.shape}" for group in groups.values() for array in group]
    recognised = (
        f"Layout {layout}: arrays of {' + '.join(str(part.num_rows) for part in parts)} rows: {first_few(shown, 8)}."
    )
    keys = [key for part in parts for key in part.keys(len(parts) > 1)]
    require_unique(keys, where)
    split_names, split = tuple(groups), np.repeat(np.arange(len(parts), dtype=np.uint8), [p.num_rows for p in parts])
    by_text = [part.texts["split"] for part in parts if "split" in part.texts]
    if by_text and len(parts) == 1:
        split_names, split = _text_splits(by_text[0])
    files, masks = _images(parts, where), None
    if masks_wanted:
        masks = _masks(parts, where)
    elif left_out := [part.masks.name for part in parts if part.masks is not None]:
        said.append(f"Masks were left alone, as asked for: {first_few(left_out)}.")
    row_bytes = sum(column.values.nbytes for column in columns.values()) // max(1, len(keys))
    if files is not None:
        row_bytes = int(np.prod(files.shape)) * files.dtype.itemsize
    else:
        said.append("There are no images among the arrays.")
    newest = [max(array.mtime_ns for array in part.arrays) for part in parts]
    times = np.repeat(np.array(newest, np.int64), [part.num_rows for part in parts])
    return Listing(
        layout=layout,
        keys=tuple(keys),
        split=split,
        split_names=split_names,
        columns=columns,
        notes=(recognised, *notes, *said),
        sizes=np.full(len(keys), row_bytes, np.int64),
        mtimes_ns=times,
        files=files,
        masks=masks,
    )


def _without_names(arrays: list[NamedArray], where: str, notes: list[str]) -> list[NamedArray]:
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
class _Part:
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
    def of(cls, name: str, arrays: list[NamedArray], where: str, notes: list[str]) -> _Part:
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


def _by_split(arrays: list[NamedArray], notes: list[str]) -> dict[str, list[NamedArray]]:
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
        size = _size_of(images)
        masks = _take(left, LABELS, lambda array: array.dtype.kind in "biu" and array.shape[1:] in mask_shapes(size))
        if masks is not None:
            notes.append(f"{masks.name} {masks.shape} holds a class for each pixel: packed as masks.")
    return masks


def _size_of(images: tuple[NamedArray, Axes, tuple[int, ...]]) -> tuple[int, int]:
    _, axes, stored = images
    height, width = stored[:2] if axes == "HWC" else stored[1:]
    return height, width


def _images(parts: list[_Part], where: str) -> Arrays | None:
    with_images = [part for part in parts if part.images]
    if not with_images:
        return None
    if len(with_images) < len(parts):
        lacking = [part.name for part in parts if not part.images]
        raise SourceError(f"{where}: there are images for {with_images[0].name}, none for {first_few(lacking)}.")
    rows = [
        (array.rows(shape, axes), array.shape[0])
        for part in parts
        if part.images
        for array, axes, shape in [part.images]
    ]
    return rows[0][0] if len(rows) == 1 else JoinedRows.of(rows)


def _masks(parts: list[_Part], where: str) -> Masks | None:
    """The masks of all splits; one without any has none present."""
    given = [part.masks for part in parts if part.masks is not None]
    if not given:
        return None
    rows: list[tuple[Arrays, int]] = []
    for part in parts:
        if part.masks is None or part.images is None:
            raise SourceError(f"{where}: there are masks for some splits, none for {part.name}.")
        rows.append((mask_rows(part.masks, _size_of(part.images)), part.num_rows))
    files = rows[0][0] if len(rows) == 1 else JoinedRows.of(rows)
    return Masks(files, np.ones(sum(count for _, count in rows), np.bool_), given[0].names)


def _columns(parts: list[_Part], where: str, notes: list[str]) -> dict[str, Column]:
    needed = sum(
        array.num_bytes for part in parts for array in (*part.others.values(), part.labels) if array is not None
    )
    if needed > available_memory():
        raise SourceError(
            f"{where}: the arrays beside the images take {needed:,} bytes, more than the memory there is."
        )
    columns: dict[str, Column] = {}
    if any(part.labels is not None for part in parts):
        name, column = _labels(parts, notes)
        columns[name] = column
    for name in dict.fromkeys(name for part in parts for name in part.others):
        lacking = [part.name for part in parts if name not in part.others]
        if lacking:
            raise SourceError(f"{where}: there is no {name} for {first_few(lacking)}, while other splits have it.")
        stored = [part.others[name] for part in parts]
        if len({array.shape[1:] for array in stored}) > 1:
            raise SourceError(f"{where}: {name} has rows of different shapes: {[array.shape for array in stored]}.")
        if name in columns:
            raise SourceError(f"{where}: more than one array would become {name}. Rename one.")
        values = np.concatenate([native(array.values()) for array in stored])
        columns[name] = Column(values, {"names": stored[0].names} if stored[0].names else {})
    return columns


def _labels(parts: list[_Part], notes: list[str]) -> tuple[str, Column]:
    """The column that the labels become, and its name.

    Raises:
        SourceError: NaN, or numbers that no int64 holds.
    """
    given = [part.labels for part in parts if part.labels is not None]
    classes = next((tuple(part.texts["names"].texts()) for part in parts if "names" in part.texts), given[0].names)
    if all(array.is_text for array in given):
        texts = [array.texts() for array in given]
        classes = tuple(sorted({text for some in texts for text in some}))
        place = {text: at for at, text in enumerate(classes)}
        read = [np.array([place[text] for text in some], np.int64) for some in texts]
    else:
        read = [label_numbers(array) for array in given]
    widths = {values.shape[1:] for values in read}
    if len(widths) > 1:
        raise SourceError(f"{given[0].where}: labels of different shapes: {[array.shape for array in given]}.")
    (width,) = widths
    if any(values.dtype.kind == "f" for values in read):
        notes.append(f"{given[0].name} holds numbers that are no classes: packed as targets.")
        if len(given) < len(parts):
            raise SourceError(f"{given[0].where}: there are targets for some splits only.")
        return "targets", Column(np.concatenate(read))
    if width and all(values.min(initial=0) >= 0 and values.max(initial=0) <= 1 for values in read):
        if len(given) < len(parts):
            raise SourceError(f"{given[0].where}: there are vectors of labels for some splits only.")
        values = np.concatenate(read).astype(np.uint8)
        return "labels", Column(values, {"names": classes} if classes else {})
    if width:
        notes.append(f"{given[0].name} holds {width} numbers a row: packed as targets.")
        if len(given) < len(parts):
            raise SourceError(f"{given[0].where}: there are targets for some splits only.")
        return "targets", Column(np.concatenate(read))
    whole, at = [], iter(read)
    for part in parts:
        whole.append(next(at) if part.labels is not None else np.full(part.num_rows, -1, np.int64))
        if part.labels is None:
            notes.append(f"There are no labels for {part.name}: they are -1.")
    return "labels", Column(np.concatenate(whole), {"names": classes} if classes else {})


def _text_splits(array: NamedArray) -> tuple[tuple[str, ...], NDArray[np.uint8]]:
    names = [SPLITS.get(text.lower(), text) for text in array.texts()]
    found = set(names)
    if len(found) > 255:
        raise SourceError(
            f"{array.where}: names {len(found)} splits; 255 can be. Rename the array, if it holds no splits."
        )
    order = [name for name in ORDER if name in found] + sorted(found - set(ORDER))
    place = {name: at for at, name in enumerate(order)}
    return tuple(order), np.array([place[name] for name in names], np.uint8)
