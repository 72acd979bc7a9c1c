"""Lists Python objects with a length and indexing, such as a torch Dataset, for `pack_images(source=...)`.

A sample is an image; (image, label); or a dict with "image", and perhaps "label" and "mask". An image is a Pillow
image, an array or tensor of uint8 or uint16, (H, W), (H, W, C) or (C, H, W), or the bytes of an image file. A mask is
an array, tensor or Pillow image of class indices, (H, W). If all images are bytes they count as files, which
`store="source"` keeps as they are. torch is never imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import ImageError, SourceError
from fastload.format.column import Column
from fastload.images.image_header import ImageHeader
from fastload.sources.listing import Listing, Masks, OnError, first_few
from fastload.sources.object_images import examine, file_bytes, image_digest, mask_of, pixels_of

_IMAGE_KEYS = ("image", "img", "pixel_values", "x")
_LABEL_KEYS = ("label", "labels", "target", "y")
_MASK_KEYS = ("mask", "masks", "segmentation", "segmentation_mask")
_COORDINATE_KEYS = frozenset("boxes bbox bboxes objects annotations keypoints landmarks points".split())
_READ_TWICE = 5  # samples, evenly chosen


@dataclass(frozen=True, eq=False)
class ObjectPictures:
    """Reads the images of an object by indexing it again; each must be the same as when it was listed.

    Attributes:
        source: the object; picklable if its samples are to be read in other processes.
        rows: int64 (N,), index of each sample in the object.
        headers: size, channels and bits of each image as listed.
        digests: XXH3-64 of each image as listed.
    """

    source: Any
    rows: NDArray[np.int64]
    headers: tuple[ImageHeader, ...]
    digests: tuple[int, ...]

    def header(self, i: int) -> ImageHeader:
        """Returns size, channels and bits of image i as listed."""
        return self.headers[i]

    def read(self, i: int) -> NDArray[Any]:
        """Returns the pixels of image i.

        Raises:
            ImageError: they cannot be read, or are not the same as when they were listed.
        """
        image = _sample(self.source, int(self.rows[i])).image
        pixels, listed = pixels_of(image), self.headers[i]
        found = (*pixels.shape, 1)[:3]
        if found != (listed.height, listed.width, listed.channels) or pixels.itemsize * 8 != listed.bits:
            raise ImageError(
                f"is {pixels.dtype} {pixels.shape} now and was {listed.height}x{listed.width} with {listed.channels} "
                f"channels of {listed.bits} bits at first: it is made anew each time. Leave random transforms out"
            )
        if image_digest(image, pixels) != self.digests[i]:
            raise ImageError(
                "has other pixels now than at first: it is made anew each time. Leave random transforms out"
            )
        return pixels

    def take(self, indices: NDArray[np.integer[Any]]) -> ObjectPictures:
        """Returns the samples at these indices, in their order."""
        at = indices.tolist()
        headers, digests = tuple([self.headers[i] for i in at]), tuple([self.digests[i] for i in at])
        return replace(self, rows=self.rows[indices], headers=headers, digests=digests)


@dataclass(frozen=True, eq=False)
class ObjectFiles:
    """Reads the image files of an object whose samples all hold the bytes of one.

    Attributes:
        source: the object, as in ObjectPictures.
        rows: int64 (N,), index of each sample in the object.
        digests: XXH3-64 of each file as listed.
    """

    source: Any
    rows: NDArray[np.int64]
    digests: tuple[int, ...]

    def read(self, i: int) -> bytes:
        """Returns all bytes of file i.

        Raises:
            ImageError: they cannot be read, or are not the same as when they were listed.
        """
        data = file_bytes(_sample(self.source, int(self.rows[i])).image)
        if data is None or xxhash.xxh3_64_intdigest(data) != self.digests[i]:
            raise ImageError(
                "has other bytes now than at first: it is made anew each time. Leave random transforms out"
            )
        return data

    def read_head(self, i: int, size: int) -> bytes:
        """Returns the first `size` bytes of file i."""
        return self.read(i)[:size]

    def take(self, indices: NDArray[np.integer[Any]]) -> ObjectFiles:
        """Returns the samples at these indices, in their order."""
        return replace(self, rows=self.rows[indices], digests=tuple([self.digests[i] for i in indices.tolist()]))


@dataclass(frozen=True, eq=False)
class ObjectMasks:
    """Reads the masks of an object by indexing it again.

    Attributes:
        source: the object, as in ObjectPictures.
        rows: int64 (N,), index of each sample in the object.
        sizes: height and width of each mask as listed; (0, 0) for none.
    """

    source: Any
    rows: NDArray[np.int64]
    sizes: tuple[tuple[int, int], ...]

    def header(self, i: int) -> ImageHeader:
        """Returns the size of mask i as listed; 1 channel of 8 bits."""
        return ImageHeader(*self.sizes[i], 1, 8, "L", 1)

    def read(self, i: int) -> NDArray[Any]:
        """Returns mask i, uint8 (H, W).

        Raises:
            ImageError: it cannot be read, or its size is not the same as when it was listed.
        """
        mask = mask_of(_sample(self.source, int(self.rows[i])).mask)
        if mask is None or mask.shape != self.sizes[i]:
            raise ImageError("is of another size than at first: it is made anew each time. Leave random transforms out")
        return mask

    def take(self, indices: NDArray[np.integer[Any]]) -> ObjectMasks:
        """Returns the samples at these indices, in their order."""
        return replace(self, rows=self.rows[indices], sizes=tuple([self.sizes[i] for i in indices.tolist()]))


class _Sample(NamedTuple):
    """The parts of a sample; None for a part that it does not have."""

    image: Any
    label: Any
    mask: Any
    others: tuple[str, ...] = ()  # keys of what is not packed


def list_objects(source: Any, *, on_error: OnError = "fail") -> Listing:
    """Returns the listing of an object's samples, in their order; keys are their numbers. Each sample is read once.

    Column `labels`: int64 (N,), -1 for None; uint8 (N, A) for vectors of 0 and 1; texts become the index into their
    sorted names. Its `names` come from the object's `classes`, if it has any. Instead of a time of modification,
    `mtimes_ns` holds a digest of each image, so that an interrupted pack is not continued with other images.

    Raises:
        SourceError: the object has no length or no indexing; a sample fails (unless skipped); labels are of several
            kinds; samples differ when they are read again.
    """
    kind = type(source).__name__
    if (
        isinstance(source, (Mapping, str, bytes))
        or not hasattr(source, "__getitem__")
        or not hasattr(source, "__len__")
    ):
        raise SourceError(
            f"{kind}: has no length or no indexing, as a list or a torch Dataset has. Give one of these; for an "
            "iterator `list(it)`, if it fits into memory; for files their folder."
        )
    headers: list[ImageHeader] = []
    labels: list[Any] = []
    rows: list[int] = []
    digests: list[int] = []
    marks: list[int] = []  # of image and mask together
    lengths: list[int] = []  # of images given as bytes, 0 of others
    skipped: list[tuple[str, str]] = []
    mask_sizes: list[tuple[int, int]] = []
    in_masks = np.zeros(256, np.bool_)
    others: dict[str, None] = {}
    total = len(source)
    width = max(6, len(str(max(total - 1, 0))))
    for row in range(total):
        try:
            sample = _sample(source, row)
            (header, digest), plain, mask = examine(sample.image), _label(sample.label), mask_of(sample.mask)
        except ImageError as exc:
            if on_error == "fail":
                raise SourceError(
                    f"{kind}: sample {row} of {total} {exc}. Fix it, or leave such samples out with on_error='skip'."
                ) from exc
            skipped.append((f"{row:0{width}d}", str(exc)))
            continue
        rows.append(row)
        headers.append(header)
        digests.append(digest)
        lengths.append(len(file_bytes(sample.image) or b""))
        marks.append(digest)
        labels.append(plain)
        mask_sizes.append((0, 0) if mask is None else (mask.shape[0], mask.shape[1]))
        if mask is not None:
            in_masks[mask] = True
            marks[-1] ^= xxhash.xxh3_64_intdigest(np.ascontiguousarray(mask).data)
        others |= dict.fromkeys(sample.others)
    if not rows:
        raise SourceError(f"{kind}: {f'not one of {total} samples can be read' if total else 'has no sample'}.")
    column, notes = _column(source, labels, rows, kind), [f"Layout objects: {total} samples of a {kind}."]
    if column is None:
        notes.append("There are no labels.")
    if others:
        notes.append(f"Parts of the samples that are not packed: {first_few(list(others))}.")
    numbers = np.array(rows, np.int64)
    files: ObjectFiles | ObjectPictures
    if all(lengths):
        files, sizes = ObjectFiles(source, numbers, tuple(digests)), lengths
    else:
        files = ObjectPictures(source, numbers, tuple(headers), tuple(digests))
        sizes = [header.height * header.width * header.channels * header.bits // 8 for header in headers]
        if given := sum(map(bool, lengths)):
            notes.append(f"Bytes of files ({given:,}) and pixels ({len(rows) - given:,}): all are taken as pixels.")
    _refuse_random(files, kind)
    masks = _list_masks(source, files.rows, mask_sizes, in_masks, kind, notes)
    return Listing(
        layout="objects",
        keys=tuple([f"{row:0{width}d}" for row in rows]),
        split=np.zeros(len(rows), np.uint8),
        split_names=("all",),
        columns={} if column is None else {"labels": column},
        notes=tuple(notes),
        sizes=np.array(sizes, np.int64),
        mtimes_ns=np.array(marks, np.uint64).view(np.int64),
        files=files,
        skipped=tuple(skipped),
        masks=masks,
    )


def _refuse_random(files: ObjectFiles | ObjectPictures, kind: str) -> None:
    """Refuses an object whose samples differ each time, judged by some that are read again."""
    for i in np.unique(np.linspace(0, len(files.rows) - 1, _READ_TWICE).astype(int)).tolist():
        row = int(files.rows[i])
        try:
            again = examine(_sample(files.source, row).image)[1]
        except ImageError:
            continue  # packing reports it when it reads the sample
        if again != files.digests[i]:
            raise SourceError(
                f"{kind}: sample {row} has other pixels when it is read again: it is made anew each time. Leave random "
                "transforms out: they come later, in each epoch."
            )


def _list_masks(
    source: Any,
    rows: NDArray[np.int64],
    sizes: list[tuple[int, int]],
    values: NDArray[np.bool_],
    kind: str,
    notes: list[str],
) -> Masks | None:
    """Returns the masks, None if there are none; absent ones get a value that no other mask holds."""
    present = np.array([height > 0 for height, _ in sizes], np.bool_)
    if not present.any():
        return None
    absent, fill = int((~present).sum()), None
    if absent:
        free = np.flatnonzero(~values)
        if not len(free):
            raise SourceError(f"{kind}: {absent} samples have no mask, and the masks use all values from 0 to 255.")
        fill = int(free[-1])
        notes.append(f"Samples without a mask ({absent}): theirs are {fill} throughout.")
    return Masks(ObjectMasks(source, rows, tuple(sizes)), present, ignore_index=fill)


def _sample(source: Any, row: int) -> _Sample:
    """Returns the parts of a sample.

    Raises:
        ImageError: the object raised, or returned something that is no sample.
    """
    try:
        sample = source[row]
    except Exception as exc:  # the user's code may raise anything
        raise ImageError(f"cannot be read: {type(exc).__name__}: {exc}") from exc
    if isinstance(sample, Mapping):
        image = next((sample[key] for key in _IMAGE_KEYS if key in sample), None)
        label = next((sample[key] for key in _LABEL_KEYS if key in sample), None)
        if image is None:
            raise ImageError(f"is a dict without an image: it has {', '.join(map(str, list(sample)[:8]))}")
        mask = next((key for key in _MASK_KEYS if key in sample), "")
        known = {key for keys in (_IMAGE_KEYS, _LABEL_KEYS) for key in keys} | {mask}
        others = [str(key) for key in sample if key not in known]
        if lost := [key for key in others if key.lower() in _COORDINATE_KEYS]:
            raise ImageError(
                f"has {first_few(lost)}, which is not packed from objects. Leave it out, or write images and boxes as "
                "COCO or a table has them"
            )
        return _Sample(image, label, sample[mask] if mask else None, tuple(others))
    if isinstance(sample, (tuple, list)):
        if not sample:
            raise ImageError("is empty; expected (image, label)")
        if len(sample) > 2:
            raise ImageError(f"has {len(sample)} parts; expected (image, label). Give a dict to name a mask")
        return _Sample(sample[0], sample[1] if len(sample) > 1 else None, None)
    return _Sample(sample, None, None)


def _label(label: Any) -> int | str | tuple[int, ...] | None:
    """Returns a label as an int, a str, a tuple of 0 and 1, or None.

    Raises:
        ImageError: it is something else.
    """
    if hasattr(label, "detach"):
        label = label.detach().cpu().numpy()
    if isinstance(label, (np.ndarray, np.generic)):
        label = label.tolist()
    if label is None or isinstance(label, (str, int)):
        return label if not isinstance(label, bool) else int(label)
    if isinstance(label, float) and label == int(label if label == label and abs(label) < 2**53 else 0.5):
        return int(label)
    if isinstance(label, Sequence) and len(label) and all(value in (0, 1) for value in label):
        return tuple(int(value) for value in label)
    raise ImageError(f"has a label that is no class: {str(label)[:60]} ({type(label).__name__})")


def _column(source: Any, labels: list[Any], rows: list[int], kind: str) -> Column | None:
    kinds = {tuple if isinstance(value, tuple) else type(value) for value in labels if value is not None}
    if not kinds:
        return None
    if len(kinds) > 1 or (tuple in kinds and len(set(map(len, (v for v in labels if v is not None)))) > 1):
        first = next(i for i, v in enumerate(labels) if v is not None)
        other = next(i for i, v in enumerate(labels) if v is not None and _kind(v) != _kind(labels[first]))
        raise SourceError(
            f"{kind}: labels of several kinds: {labels[first]!r} of sample {rows[first]}, {labels[other]!r} of sample "
            f"{rows[other]}. Give all of them as one kind."
        )
    classes = _classes(source)
    if tuple in kinds:
        if None in labels:
            raise SourceError(f"{kind}: sample {rows[labels.index(None)]} has no label, where others have vectors.")
        names = classes if len(classes) == len(labels[0]) else ()
        return Column(np.array(labels, np.uint8), {"names": names} if names else {})
    if str in kinds:
        names = tuple(sorted({value for value in labels if value is not None}))
        index = {name: at for at, name in enumerate(names)}
        return Column(np.array([-1 if v is None else index[v] for v in labels], np.int64), {"names": names})
    try:
        values = np.array([-1 if value is None else value for value in labels], np.int64)
    except OverflowError as exc:
        raise SourceError(f"{kind}: labels beyond what int64 holds. Number the classes from 0.") from exc
    return Column(values, {"names": classes} if int(values.max()) < len(classes) else {})


def _kind(label: Any) -> object:
    return len(label) if isinstance(label, tuple) else type(label)


def _classes(source: Any) -> tuple[str, ...]:
    """Returns the names of classes that datasets of torchvision (also a Subset) and Hugging Face have; () for none."""
    for owner in (source, getattr(source, "dataset", None)):
        names = getattr(owner, "classes", None)
        features = getattr(owner, "features", None)
        if isinstance(features, Mapping):
            names = next((getattr(features[key], "names", None) for key in _LABEL_KEYS if key in features), names)
        if isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names):
            return tuple(names)
    return ()
