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
from PIL import Image, ImageOps

from fastload.errors import ImageError, SourceError
from fastload.format.ragged import Column
from fastload.images.decode import decode_image
from fastload.images.fit import Target
from fastload.images.image_header import KINDS, ImageHeader, check_size, header_of_pixels, pillow_silenced, probe_image
from fastload.sources.assemble import Draft, Samples, Splits, assemble, fill_value
from fastload.sources.listing import Listing, Masks, OnError, first_few

_IMAGE_KEYS = ("image", "img", "pixel_values", "x")
_LABEL_KEYS = ("label", "labels", "target", "y")
_MASK_KEYS = ("mask", "masks", "segmentation", "segmentation_mask")
_COORDINATE_KEYS = frozenset("boxes bbox bboxes objects annotations keypoints landmarks points".split())
_READ_TWICE = 5  # samples, evenly chosen
_MODES = KINDS[8]
_RANDOM = "at first: it is made anew each time. Leave random transforms out"

Content = bytes | NDArray[Any]
"""An image as it is given: the bytes of its file, or its pixels, uint8 or uint16, (H, W) or (H, W, C), contiguous."""


class _Listed(NamedTuple):
    """An image or mask as it was listed, which must stay the same."""

    header: ImageHeader
    digest: int

    @classmethod
    def of(cls, content: Content) -> Self:
        digest = _digest_of(content)
        if isinstance(content, bytes):
            return cls(probe_image(lambda size: content[:size]), digest)
        return cls(header_of_pixels(content.shape, content.dtype), digest)


_NO_MASK = _Listed(ImageHeader(0, 0, 1, 8, "L"), 0)


@dataclass(frozen=True, eq=False)
class ObjectPictures:
    """Reads the images of an object, which is indexed again for each."""

    source: Any  # the object; picklable if its samples are to be read in other processes
    rows: NDArray[np.int64]  # int64 (N,), index of each sample in the object
    listed: tuple[_Listed, ...]

    def header(self, i: int) -> ImageHeader:
        """Returns size, channels and bits of image i as listed."""
        return self.listed[i].header

    def sample(self, i: int) -> _Sample:
        """Returns the parts of sample i, read anew."""
        return _sample(self.source, int(self.rows[i]))

    def read(self, i: int) -> NDArray[Any]:
        """Returns the pixels of image i; ImageError says if they are not the same as when they were listed."""
        content = content_of(self.sample(i).image)
        return self.checked(i, content, _decoded(content) if isinstance(content, bytes) else content)

    def checked(self, i: int, content: Content, pixels: NDArray[Any]) -> NDArray[Any]:
        """Returns the pixels of a content, if they are as they were listed."""
        listed, digest = self.listed[i]
        shape = listed.height, listed.width, listed.channels
        if (*pixels.shape, 1)[:3] != shape or 8 * pixels.itemsize != listed.bits:
            raise ImageError(
                f"is {pixels.dtype} {pixels.shape} now and was {listed.height}x{listed.width} with {listed.channels} "
                f"channels of {listed.bits} bits {_RANDOM}"
            )
        if _digest_of(content) != digest:
            raise ImageError(f"has other pixels now than {_RANDOM}")
        return pixels

    def take(self, indices: NDArray[np.integer[Any]]) -> Self:
        return replace(self, rows=self.rows[indices], listed=tuple([self.listed[i] for i in indices.tolist()]))


class ObjectMasks(ObjectPictures):
    """Reads the masks of an object."""

    def read(self, i: int) -> NDArray[Any]:
        """Returns mask i, uint8 or uint16 (H, W); raises as for an image."""
        mask = _mask_of(self.sample(i).mask)
        if mask is None:
            raise ImageError(f"has no mask now, and had one {_RANDOM}")
        return self.checked(i, mask, mask)


@dataclass(frozen=True, eq=False)
class ObjectFiles:
    """Reads the image files of an object whose samples all hold the bytes of one."""

    pictures: ObjectPictures

    def read(self, i: int) -> bytes:
        """Returns all bytes of file i; raises as ObjectPictures does."""
        data = _file_bytes(self.pictures.sample(i).image)
        if data is None or _digest_of(data) != self.pictures.listed[i].digest:
            raise ImageError(f"has other bytes now than {_RANDOM}")
        return data

    def read_head(self, i: int, size: int) -> bytes:
        return self.read(i)[:size]

    def take(self, indices: NDArray[np.integer[Any]]) -> ObjectFiles:
        return ObjectFiles(self.pictures.take(indices))


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
    key, total = f"%0{max(6, len(str(max(len(source) - 1, 0))))}d", len(source)
    rows, labels, images, masks = list[int](), list[Any](), list[_Listed](), list[_Listed]()
    file_bytes, others = list[int](), dict[str, None]()
    in_masks = np.zeros(1 << 16, np.bool_)
    for row in range(total):
        try:
            sample = _sample(source, row)
            content = content_of(sample.image)
            image, label, mask = _Listed.of(content), _label(sample.label), _mask_of(sample.mask)
        except ImageError as exc:
            if draft.on_error == "fail":
                raise SourceError(
                    f"{kind}: sample {row} of {total} {exc}. Fix it, or leave such samples out with on_error='skip'."
                ) from exc
            draft.leave_out(key % row, str(exc))
            continue
        if mask is not None:
            in_masks[mask] = True
        rows.append(row)
        labels.append(label)
        images.append(image)
        masks.append(_NO_MASK if mask is None else _Listed.of(mask))
        file_bytes.append(len(content) if isinstance(content, bytes) else 0)
        others |= dict.fromkeys(sample.others)
    if not rows:
        raise SourceError(f"{kind}: {f'not one of {total} samples can be read' if total else 'has no sample'}.")
    column = _column(source, labels, rows, kind)
    if column is None:
        draft.notes.append("There are no labels.")
    draft.note("Parts of the samples that are not packed", others)
    given = len(rows) - file_bytes.count(0)
    if 0 < given < len(rows):
        draft.notes.append(f"Bytes of files ({given:,}) and pixels ({len(rows) - given:,}): all are taken as pixels.")
    pictures = ObjectPictures(source, np.array(rows, np.int64), tuple(images))
    _refuse_random(pictures, kind)
    headers = [image.header for image in images]
    sizes = file_bytes if given == len(rows) else [h.height * h.width * h.channels * h.bits // 8 for h in headers]
    present = np.array([mask is not _NO_MASK for mask in masks])
    digests = [image.digest ^ mask.digest for image, mask in zip(images, masks, strict=True)]
    samples = Samples(
        keys=[key % row for row in rows],
        files=ObjectFiles(pictures) if given == len(rows) else pictures,
        sizes=np.array(sizes, np.int64),
        mtimes_ns=np.array(digests, np.uint64).view(np.int64),
        splits=Splits.one(len(rows)),
        columns={} if column is None else {"labels": column},
    )
    if present.any():
        fill = fill_value(draft, np.flatnonzero(in_masks), present)
        large = max(int(np.flatnonzero(in_masks)[-1]), fill or 0) > 255
        dtype = np.dtype(np.uint16 if large else np.uint8)
        drawn = Masks(ObjectMasks(source, pictures.rows, tuple(masks)), present, ignore_index=fill, dtype=dtype)
        samples = replace(samples, masks=drawn)
    return assemble(draft, samples)


def _refuse_random(pictures: ObjectPictures, kind: str) -> None:
    """Refuses an object whose samples differ each time, judged by some that are read again."""
    for i in np.unique(np.linspace(0, len(pictures.rows) - 1, _READ_TWICE).astype(int)).tolist():
        try:
            again = _Listed.of(content_of(pictures.sample(i).image))
        except ImageError:
            continue  # packing reports it when it reads the sample
        if again.digest != pictures.listed[i].digest:
            raise SourceError(
                f"{kind}: sample {pictures.rows[i]} has other pixels when it is read again: it is made anew each time. "
                "Leave random transforms out: they come later, in each epoch."
            )


class _Sample(NamedTuple):
    """The parts of a sample; None for a part that it does not have."""

    image: Any
    label: Any = None
    mask: Any = None
    others: tuple[str, ...] = ()  # keys of what is not packed


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
    label = _in_memory(label)
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


def _in_memory(value: Any) -> Any:
    """Returns a tensor as an array, and anything else as it is."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def _digest_of(content: Content) -> int:
    """Returns XXH3-64 of the bytes of a file, or of pixels."""
    return xxhash.xxh3_64_intdigest(content if isinstance(content, bytes) else content.data)


def _file_bytes(image: Any) -> bytes | None:
    """Returns the bytes of an image that is given as a file's bytes; None for any other image."""
    if isinstance(image, Mapping) and isinstance(image.get("bytes"), bytes):  # Hugging Face, undecoded
        image = image["bytes"]
    return bytes(image) if isinstance(image, (bytes, bytearray, memoryview)) else None


def content_of(image: Any) -> Content:
    """Returns an image of any accepted type as the bytes of its file, or its pixels; ImageError refuses any other."""
    data = _file_bytes(image)
    if data is not None:
        return data
    if isinstance(image, Image.Image):
        with pillow_silenced():
            return _of_pillow(image)
    pixels = _in_memory(image)
    if not isinstance(pixels, np.ndarray):
        what = type(pixels).__name__
        raise ImageError(f"is a {what}; expected a Pillow image, an array, a tensor or the bytes of an image file")
    return _of_array(pixels, tensor=pixels is not image)


def _mask_of(mask: Any) -> NDArray[Any] | None:
    """Returns a mask as uint8 or, with numbers above 255, uint16 (H, W), None for None.

    ImageError refuses all but integers from 0 to 65,535.
    """
    if mask is None:
        return None
    if isinstance(mask, Image.Image) and mask.mode not in ("1", "L", "P") and not mask.mode.startswith("I"):
        raise ImageError(f"has a mask of Pillow mode {mask.mode!r}; expected L or P, the number of each pixel's class")
    found = np.asarray(_in_memory(mask))
    if found.ndim == 3 and 1 in (found.shape[0], found.shape[2]):
        found = found[0] if found.shape[0] == 1 else found[..., 0]
    if found.ndim != 2 or not found.size or found.dtype.kind not in "iub" or found.min() < 0 or found.max() > 65_535:
        raise ImageError(f"has a mask that is {found.dtype} {found.shape}; expected integers from 0 to 65535, (H, W)")
    return np.ascontiguousarray(found, np.uint8 if found.max() <= 255 else np.uint16)


def _decoded(data: bytes) -> NDArray[Any]:
    header = probe_image(lambda size: data[:size])
    shape = header.height, header.width, header.channels
    out = np.empty(shape, np.uint16 if header.bits == 16 else np.uint8)
    decode_image(data, Target(*shape, out.dtype), out)
    return out


def _of_pillow(image: Image.Image) -> NDArray[Any]:
    try:
        check_size(image.height, image.width)
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I;16"):
            return np.asarray(upright).astype(np.uint16)
        if upright.mode in ("I", "F"):
            raise ImageError("has 32 bits a pixel, which are not supported; convert it to 8 or 16 bits")
        channels = 4 if upright.has_transparency_data else 1 if upright.mode in ("1", "L") else 3
        return np.array(upright.convert(_MODES[channels]))
    except ImageError:
        raise
    except Exception as exc:  # Pillow opens files lazily, and raises anything if one is damaged
        raise ImageError(f"cannot be decoded: {exc}") from exc


def _of_array(pixels: NDArray[Any], tensor: bool) -> NDArray[Any]:
    shape = pixels.shape
    if pixels.dtype.newbyteorder("=") not in (np.dtype(np.uint8), np.dtype(np.uint16)):
        fix = "convert it with `(image * 255).round().astype('uint8')` where it lies in 0 to 1"
        if tensor:
            fix = "leave ToTensor and Normalize out (PILToTensor keeps uint8): normalizing comes later, on the device"
        raise ImageError(f"is {pixels.dtype} {shape}; expected uint8 or uint16: {fix}")
    first, last = (len(shape) == 3 and shape[at] in _MODES for at in (0, -1))
    if len(shape) != 2 and not first and not last:
        raise ImageError(f"has the shape {shape}; expected (H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 channels")
    if first and (tensor or not last):  # in doubt, a tensor's channels come first, an array's last
        pixels = pixels.transpose(1, 2, 0)
    check_size(*pixels.shape[:2])
    return np.ascontiguousarray(pixels, dtype=pixels.dtype.newbyteorder("="))
