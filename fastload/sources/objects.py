"""Lists Python objects with a length and indexing, such as a torch Dataset, for `pack_images(source=...)`.

A sample is an image; (image, label); or a dict with "image", and perhaps "label" and "mask". An image is a Pillow
image, an array or tensor of uint8 or uint16, (H, W), (H, W, C) or (C, H, W), or the bytes of an image file. A mask is
an array, tensor or Pillow image of class indices, (H, W). If all images are bytes they count as files, which
`store="source"` keeps as they are. torch is never imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import ImageError, SourceError
from fastload.format.column import Column
from fastload.images.image_header import ImageHeader
from fastload.sources.assemble import Draft, Samples, Splits, assemble, fill_value
from fastload.sources.listing import Listing, Masks, OnError, first_few
from fastload.sources.object_images import examine, file_bytes, header_of, image_digest, mask_of, pixels_of

_IMAGE_KEYS = ("image", "img", "pixel_values", "x")
_LABEL_KEYS = ("label", "labels", "target", "y")
_MASK_KEYS = ("mask", "masks", "segmentation", "segmentation_mask")
_COORDINATE_KEYS = frozenset("boxes bbox bboxes objects annotations keypoints landmarks points".split())
_READ_TWICE = 5  # samples, evenly chosen


class _Sample(NamedTuple):
    """The parts of a sample; None for a part that it does not have."""

    image: Any
    label: Any = None
    mask: Any = None
    others: tuple[str, ...] = ()  # keys of what is not packed


@dataclass(frozen=True, eq=False)
class _Parts:
    """One part of each sample of an object, which is indexed again to read it."""

    source: Any  # the object; picklable if its samples are to be read in other processes
    rows: NDArray[np.int64]  # int64 (N,), index of each sample in the object
    listed: tuple[tuple[ImageHeader, int], ...]  # header and digest, which must stay the same

    def sample(self, i: int) -> _Sample:
        return _sample(self.source, int(self.rows[i]))

    def take(self, indices: NDArray[np.integer[Any]]) -> Self:
        """Returns the parts of the samples at these indices, in their order."""
        return replace(self, rows=self.rows[indices], listed=tuple([self.listed[i] for i in indices.tolist()]))


_RANDOM = "at first: it is made anew each time. Leave random transforms out"


class ObjectPictures(_Parts):
    """Reads the images of an object."""

    def header(self, i: int) -> ImageHeader:
        """Returns size, channels and bits of image i as listed."""
        return self.listed[i][0]

    def read(self, i: int) -> NDArray[Any]:
        """Returns the pixels of image i.

        Raises:
            ImageError: they cannot be read, or are not the same as when they were listed.
        """
        image = self.sample(i).image
        pixels = pixels_of(image)
        return self.checked(i, pixels, image_digest(image, pixels))

    def checked(self, i: int, pixels: NDArray[Any], digest: int) -> NDArray[Any]:
        """Returns pixels, if they are as they were listed."""
        listed, first = self.listed[i]
        shape = listed.height, listed.width, listed.channels
        if (*pixels.shape, 1)[:3] != shape or 8 * pixels.itemsize != listed.bits:
            raise ImageError(
                f"is {pixels.dtype} {pixels.shape} now and was {listed.height}x{listed.width} with {listed.channels} "
                f"channels of {listed.bits} bits {_RANDOM}"
            )
        if digest != first:
            raise ImageError(f"has other pixels now than {_RANDOM}")
        return pixels


class ObjectMasks(ObjectPictures):
    """Reads the masks of an object."""

    def read(self, i: int) -> NDArray[Any]:
        """Returns mask i, uint8 (H, W); raises as for an image."""
        mask = mask_of(self.sample(i).mask)
        if mask is None:
            raise ImageError(f"has no mask now, and had one {_RANDOM}")
        return self.checked(i, mask, image_digest(None, mask))


class ObjectFiles(_Parts):
    """Reads the image files of an object whose samples all hold the bytes of one."""

    def read(self, i: int) -> bytes:
        """Returns all bytes of file i.

        Raises:
            ImageError: they cannot be read, or are not the same as when they were listed.
        """
        data = file_bytes(self.sample(i).image)
        if data is None or xxhash.xxh3_64_intdigest(data) != self.listed[i][1]:
            raise ImageError(f"has other bytes now than {_RANDOM}")
        return data

    def read_head(self, i: int, size: int) -> bytes:
        """Returns the first `size` bytes of file i."""
        return self.read(i)[:size]


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
    if isinstance(source, (Mapping, str, bytes)) or not all(hasattr(source, at) for at in ("__getitem__", "__len__")):
        raise SourceError(
            f"{kind}: has no length or no indexing, as a list or a torch Dataset has. Give one of these; for an "
            "iterator `list(it)`, if it fits into memory; for files their folder."
        )
    draft = Draft("objects", None, on_error, where=kind)
    draft.title = f"Layout objects: {len(source)} samples of a {kind}."
    key = f"%0{max(6, len(str(max(len(source) - 1, 0))))}d"
    in_masks = np.zeros(256, np.bool_)
    seen = _examine_all(draft, source, key, in_masks)
    rows = np.array([each.row for each in seen], np.int64)
    column = _column(source, [each.label for each in seen], rows.tolist(), kind)
    if column is None:
        draft.notes.append("There are no labels.")
    draft.note("Parts of the samples that are not packed", dict.fromkeys(name for each in seen for name in each.others))
    given = sum(each.file_bytes > 0 for each in seen)
    if 0 < given < len(seen):
        draft.notes.append(f"Bytes of files ({given:,}) and pixels ({len(seen) - given:,}): all are taken as pixels.")
    reader = ObjectFiles if given == len(seen) else ObjectPictures
    files = reader(source, rows, tuple([each.image for each in seen]))
    _refuse_random(files, kind)
    pixel_bytes = [h.height * h.width * h.channels * h.bits // 8 for h, _ in files.listed]
    masks, present = [each.mask or _NO_MASK for each in seen], np.array([each.mask is not None for each in seen])
    digests = [each.image[1] ^ mask[1] for each, mask in zip(seen, masks, strict=True)]
    fill, filled = fill_value(np.flatnonzero(in_masks), present, kind) if present.any() else (None, [])
    draft.notes += filled
    samples = Samples(
        keys=[key % row for row in rows.tolist()],
        files=files,
        sizes=np.array([each.file_bytes for each in seen] if given == len(seen) else pixel_bytes, np.int64),
        mtimes_ns=np.array(digests, np.uint64).view(np.int64),
        splits=Splits.one(len(seen)),
        columns={} if column is None else {"labels": column},
        masks=Masks(ObjectMasks(source, rows, tuple(masks)), present, ignore_index=fill) if present.any() else None,
    )
    return assemble(draft, samples)


class _Seen(NamedTuple):
    """A sample as it was listed."""

    row: int  # its index in the object
    label: Any  # as `_label` returns it
    image: tuple[ImageHeader, int]  # header and digest of its image
    file_bytes: int  # bytes of its image if it is given as those of a file, else 0
    mask: tuple[ImageHeader, int] | None  # header and digest of its mask, None for none
    others: tuple[str, ...]  # names of the parts that are not packed


_NO_MASK = (ImageHeader(0, 0, 1, 8, "L", 1), 0)


def _examine_all(draft: Draft, source: Any, key: str, in_masks: NDArray[np.bool_]) -> list[_Seen]:
    """Returns the samples of an object that can be read, at least one; marks the values in their masks."""
    seen, total = list[_Seen](), len(source)
    for row in range(total):
        try:
            sample = _sample(source, row)
            image, label, mask = examine(sample.image), _label(sample.label), mask_of(sample.mask)
        except ImageError as exc:
            if draft.on_error == "fail":
                raise SourceError(
                    f"{draft.where}: sample {row} of {total} {exc}. Fix it, or leave such samples out with "
                    "on_error='skip'."
                ) from exc
            draft.leave_out(key % row, str(exc))
            continue
        num_bytes, listed_mask = len(file_bytes(sample.image) or b""), None
        if mask is not None:
            in_masks[mask] = True
            listed_mask = header_of(mask), image_digest(None, mask)
        seen.append(_Seen(row, label, image, num_bytes, listed_mask, sample.others))
    if not seen:
        raise SourceError(f"{draft.where}: {f'not one of {total} samples can be read' if total else 'has no sample'}.")
    return seen


def _refuse_random(files: ObjectFiles | ObjectPictures, kind: str) -> None:
    """Refuses an object whose samples differ each time, judged by some that are read again."""
    for i in np.unique(np.linspace(0, len(files.rows) - 1, _READ_TWICE).astype(int)).tolist():
        try:
            again = examine(files.sample(i).image)[1]
        except ImageError:
            continue  # packing reports it when it reads the sample
        if again != files.listed[i][1]:
            raise SourceError(
                f"{kind}: sample {files.rows[i]} has other pixels when it is read again: it is made anew each time. "
                "Leave random transforms out: they come later, in each epoch."
            )


def _sample(source: Any, row: int) -> _Sample:
    """Returns the parts of a sample."""
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
        return _Sample(*sample)
    return _Sample(sample)


def _label(label: Any) -> int | str | tuple[int, ...] | None:
    """Returns a label as an int, a str, a tuple of 0 and 1, or None."""
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
    """Returns the column of the labels; None if no sample has any."""
    first: dict[object, str] = {}  # of each kind; vectors of another length are another kind
    for label, row in zip(labels, rows, strict=True):
        if label is not None:
            first.setdefault(len(label) if isinstance(label, tuple) else type(label), f"{label!r} of sample {row}")
    if not first:
        return None
    if len(first) > 1:
        raise SourceError(
            f"{kind}: labels of several kinds: {', '.join(list(first.values())[:2])}. Give all of them as one kind."
        )
    classes, given = _classes(source), set(labels) - {None}
    if all(isinstance(label, tuple) for label in given):
        if None in labels:
            raise SourceError(f"{kind}: sample {rows[labels.index(None)]} has no label, where others have vectors.")
        names = classes if len(classes) == len(labels[0]) else ()
        return Column(np.array(labels, np.uint8), {"names": names} if names else {})
    if str in first:
        names = tuple(sorted(given))
        index = {name: at for at, name in enumerate(names)} | {None: -1}
        return Column(np.array([index[label] for label in labels], np.int64), {"names": names})
    try:
        values = np.array([-1 if value is None else value for value in labels], np.int64)
    except OverflowError as exc:
        raise SourceError(f"{kind}: labels beyond what int64 holds. Number the classes from 0.") from exc
    return Column(values, {"names": classes} if int(values.max()) < len(classes) else {})


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
