"""Lists Python objects with a length and indexing, such as a torch Dataset, for `pack_images(source=...)`.

A sample is an image; (image, label); or a dict with "image", and perhaps "label", "mask" and "objects" (boxes as
Hugging Face has them: {"bbox": [[x, y, w, h], ...], "category": [...]}). An image is a Pillow image, an array or tensor
of uint8 or uint16, (H, W), (H, W, C) or (C, H, W), the bytes of an image file, or the `Path` of one. A mask is an
array, tensor or Pillow image of class indices, (H, W), or the `Path` of one. If all images are bytes, or paths, they
count as files, which `store="source"` keeps as they are. Several objects are the splits of one dataset:
{"train": ..., "test": ...}. torch is never imported.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
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
from fastload.options.pack import OnError
from fastload.sources.assemble import Draft, Samples, Splits, assemble, fill_value
from fastload.sources.boxes import nested_boxes
from fastload.sources.listing import SPLITS, Listing, Masks, first_few
from fastload.sources.spans import ListedFile, Paths
from fastload.sources.tree import FolderFiles, key_of

_IMAGE_KEYS = ("image", "img", "pixel_values", "x")
_LABEL_KEYS = ("label", "labels", "target", "targets", "class", "cls", "y")
_MASK_KEYS = ("mask", "masks", "segmentation", "segmentation_mask")
_COORDINATE_KEYS = frozenset("boxes bbox bboxes annotations keypoints landmarks points".split())
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


def _file_of(given: Any) -> ListedFile | None:
    """Returns the file of an image or mask that is given as its path; None for any other."""
    if not isinstance(given, os.PathLike):
        return None
    try:
        return ListedFile.of(Path(given))
    except OSError as exc:
        raise ImageError(f"is the path {os.fspath(given)}, which cannot be read: {exc.strerror}") from exc


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


def reads_objects(listing: Listing) -> bool:
    """Whether images or masks of a listing are read by indexing an object."""
    readers = (listing.files, listing.masks and listing.masks.files)
    return any(isinstance(reader, (ObjectPictures, ObjectFiles)) for reader in readers)


def list_objects(source: Any, *, on_error: OnError = "fail") -> Listing:
    """Returns the listing of an object's samples, in their order; keys are their numbers. Each sample is read once.

    Column `labels`: int64 (N,), -1 for None; uint8 (N, A) for vectors of 0 and 1; texts become the index into their
    sorted names. Its `names` come from the object's `classes`, if it has any. Instead of a time of modification,
    `mtimes_ns` holds a digest of each image, so that an interrupted pack is not continued with other images.

    Args:
        source: an object, or a mapping of the name of each split to one.
        on_error: whether samples that cannot be read are an error, or left out.

    Raises:
        SourceError: an object has no length or no indexing; a sample fails (unless skipped); labels are of several
            kinds; samples differ when they are read again.
    """
    kind = type(source).__name__
    parts = _splits_in(source) or {"": source}
    for name, part in parts.items():
        if isinstance(part, (Mapping, str, bytes)) or not all(hasattr(part, at) for at in ("__getitem__", "__len__")):
            raise SourceError(
                f"{kind}{f' {name!r}' if name else ''}: has no length or no indexing, as a list or a torch Dataset "
                "has. Give one of these; for an iterator `list(it)`, if it fits into memory; for files their folder."
            )
    draft = Draft("objects", None, on_error, where=kind)
    total = sum(map(len, parts.values()))
    draft.title = f"Layout objects: {total} samples of a {kind}."
    return assemble(draft, object_samples(draft, parts))


def _splits_in(source: Any) -> dict[str, Any]:
    """Returns the datasets that are the splits in a mapping; {} if its values are no datasets but, say, columns."""
    if not isinstance(source, Mapping) or not source or {*_IMAGE_KEYS, *_LABEL_KEYS} & {*map(str, source)}:
        return {}
    if any(isinstance(part, (np.ndarray, Mapping)) for part in source.values()):
        return {}
    return {str(name): part for name, part in source.items()}


class JoinedObjects:
    """The samples of several objects, one after another."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int) -> Any:
        at = bisect_right(self._ends, i)
        return self.parts[at][i - self._ends[at] + len(self.parts[at])]


def object_samples(draft: Draft, parts: Mapping[str, Any], root: Path | None = None) -> Samples:
    """Returns the samples of the objects that are the splits of a dataset ("": it has none); notes what it leaves out.

    Images that are given as paths are files, known by their path relative to `root` or to what holds all of them.
    """
    kind = draft.where
    source = next(iter(parts.values())) if len(parts) == 1 else JoinedObjects(list(parts.values()))
    ends = list(accumulate(map(len, parts.values())))
    names = [SPLITS.get(name.lower(), name) for name in parts]
    total = ends[-1]
    digits = f"%0{max(6, len(str(max(total - 1, 0))))}d"
    keys = [digits % row for row in range(total)]
    if names != [""]:
        keys = [f"{name}/{digits % row}" for name, part in zip(names, parts.values(), strict=True)
                for row in range(len(part))]  # fmt: skip
    rows, labels, others = list[int](), list[Any](), dict[str, None]()
    images, masks, objects = list[_Listed | ListedFile](), list[_Listed | ListedFile | None](), list[Any]()
    file_bytes, in_masks = list[int](), np.zeros(1 << 16, np.bool_)
    for row in range(total):
        try:
            sample = _sample(source, row)
            image, mask, label = _file_of(sample.image), _file_of(sample.mask), _label(sample.label)
            content = b"" if image else content_of(sample.image)
            drawn = None if mask else _mask_of(sample.mask)
            images.append(image or _Listed.of(content))
        except ImageError as exc:
            if draft.on_error == "fail":
                raise SourceError(
                    f"{kind}: sample {row} of {total} {exc}. Fix it, or leave such samples out with on_error='skip'."
                ) from exc
            draft.leave_out(keys[row], str(exc))
            continue
        if drawn is not None:
            in_masks[drawn] = True
        rows.append(row)
        labels.append(label)
        masks.append(mask if drawn is None else _Listed.of(drawn))
        objects.append(sample.objects)
        file_bytes.append(len(content) if isinstance(content, bytes) else 0)
        others |= dict.fromkeys(sample.others)
    if not rows:
        raise SourceError(f"{kind}: {f'not one of {total} samples can be read' if total else 'has no sample'}.")
    splits = Splits.of([names[bisect_right(ends, row)] for row in rows])
    column = _column(parts, labels, rows, kind)
    columns = {} if column is None else {"labels": column}
    if any(cell is not None for cell in objects):
        boxes = nested_boxes("objects", objects, lambda i: f"sample {rows[i]}", draft)
        if not boxes:
            raise SourceError(f'{kind}: "objects" of its samples are no boxes: {str(objects[0])[:60]}.')
        columns |= boxes
    if column is None:
        draft.notes.append("There are no labels.")
    draft.note("NOT READ: parts of the samples that are not packed", others)
    present = np.array([mask is not None for mask in masks])
    at = np.array(rows, np.int64)
    if files := _files_at(images, root, kind, "images"):
        reader, paths = files
        samples = Samples(list(map(key_of, paths)), reader, reader.sizes, reader.mtimes_ns, splits, columns)
    else:
        pixels = [image for image in images if isinstance(image, _Listed)]
        given = len(rows) - file_bytes.count(0)
        if 0 < given < len(rows):
            of_both = f"Bytes of files ({given:,}) and pixels ({len(rows) - given:,})"
            draft.notes.append(f"{of_both}: all are taken as pixels.")
        pictures = ObjectPictures(source, at, tuple(pixels))
        _refuse_random(pictures, kind)
        headers = [image.header for image in pixels]
        held = file_bytes if given == len(rows) else [h.height * h.width * h.channels * h.bits // 8 for h in headers]
        samples = Samples(
            keys=[keys[row] for row in rows],
            files=ObjectFiles(pictures) if given == len(rows) else pictures,
            sizes=np.array(held, np.int64),
            mtimes_ns=np.array([image.digest for image in pixels], np.uint64).view(np.int64),
            splits=splits,
            columns=columns,
        )
    if not present.any():
        return samples
    a_mask = next(mask for mask in masks if mask is not None)  # stands for the absent ones, and is not read there
    if files := _files_at([mask or a_mask for mask in masks], root, kind, "masks"):
        reader, _ = files
        samples = samples.made_also_of(np.where(present, reader.sizes, 0), np.where(present, reader.mtimes_ns, 0))
        return replace(samples, masks=Masks(reader, present, ignore_index=fill_value(draft, reader, present)))
    masks_listed = tuple([mask if isinstance(mask, _Listed) else _NO_MASK for mask in masks])
    digests = np.array([mask.digest for mask in masks_listed], np.uint64).view(np.int64)
    fill = fill_value(draft, np.flatnonzero(in_masks), present)
    large = max(int(np.flatnonzero(in_masks)[-1]), fill or 0) > 255
    dtype = np.dtype(np.uint16 if large else np.uint8)
    drawn_masks = Masks(ObjectMasks(source, at, masks_listed), present, ignore_index=fill, dtype=dtype)
    return replace(samples, mtimes_ns=samples.mtimes_ns ^ digests, masks=drawn_masks)


def _files_at(
    listed: Sequence[_Listed | ListedFile], root: Path | None, kind: str, what: str
) -> tuple[FolderFiles, list[str]] | None:
    """Returns the reader of files, and their paths relative to root or to what holds all; None if they are pixels."""
    files = [one for one in listed if isinstance(one, ListedFile)]
    if not files:
        return None
    if len(files) < len(listed):
        raise SourceError(f"{kind}: some {what} are paths of files, others are not. Give all of them as one kind.")
    sizes, mtimes = (np.array([getattr(file, name) for file in files], np.int64) for name in ("num_bytes", "mtime_ns"))
    paths = [os.fsencode(file.path) for file in files]
    top = os.fsencode(os.path.abspath(root)) if root else os.path.commonpath([os.path.dirname(p) for p in paths])
    paths = [os.path.relpath(path, top) for path in paths]
    return FolderFiles(top, Paths.of(paths), sizes, mtimes), [p.decode("utf-8", "surrogateescape") for p in paths]


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
    objects: Any = None
    others: tuple[str, ...] = ()  # keys that are not packed


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
        known = {*_IMAGE_KEYS, *_LABEL_KEYS, mask, "objects"}
        others = [str(key) for key in sample if key not in known]
        if lost := [key for key in others if key.lower() in _COORDINATE_KEYS]:
            raise ImageError(
                f"has {first_few(lost)}, which is not packed from objects. Leave it out, or give boxes as "
                '"objects": {"bbox": [[x, y, w, h], ...], "category": [...]}'
            )
        return _Sample(image, label, sample[mask] if mask else None, sample.get("objects"), tuple(others))
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
    number = label[0] if isinstance(label, Sequence) and len(label) and not isinstance(label, str) else label
    advice = ""
    if isinstance(number, float):
        advice = ". Numbers to be predicted are `targets`: pack a table (CSV, Parquet) of paths of images and numbers"
    raise ImageError(f"has a label that is no class: {str(label)[:60]} ({type(label).__name__}){advice}")


def _column(parts: Mapping[str, Any], labels: list[Any], rows: list[int], kind: str) -> Column | None:
    """Returns the column of the labels; None if no sample has any."""
    first: dict[object, str] = {}  # of each kind; vectors of another length are another kind
    for label, row in zip(labels, rows, strict=True):
        if label is not None:
            first.setdefault(len(label) if isinstance(label, tuple) else type(label), f"{label!r} of sample {row}")
    if not first:
        return None
    if len(first) > 1:
        raise SourceError(f"{kind}: labels of several kinds: {', '.join(list(first.values())[:2])}. Give one kind.")
    named = [_classes(part) for part in parts.values()]
    classes = next((names for names in named if names), ())
    if len({names for names in named if names}) > 1 and int in first:
        # Splits may number their classes separately, where one has a class that another lacks: their names decide.
        ends = list(accumulate(map(len, parts.values())))
        try:
            labels = [None if label is None else named[bisect_right(ends, row)][label]
                      for label, row in zip(labels, rows, strict=True)]  # fmt: skip
        except (IndexError, TypeError) as exc:
            raise SourceError(
                f"{kind}: the splits {', '.join(parts)} have different `classes`, and labels without a name in them, "
                "so equal labels may mean different classes. Give labels as names, or pack the splits one by one."
            ) from exc
        first = {str: ""}
    given = set(labels) - {None}
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
        if isinstance(names, (list, tuple)):
            # ImageNet's are tuples of synonyms.
            names = [", ".join(n) if isinstance(n, tuple) and all(isinstance(w, str) for w in n) else n for n in names]
            if all(isinstance(name, str) for name in names):
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
