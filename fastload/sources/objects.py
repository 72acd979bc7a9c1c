"""Any Python object with a length and samples by number, such as a torch Dataset: what `pack_images(source=...)` takes.

A sample is an image; (image, label); or a dict with "image", perhaps "label" and "mask". An image is a Pillow image, an
array or tensor of uint8 or uint16, (H, W), (H, W, C) or (C, H, W), or the bytes of an image file; a mask is an array,
tensor or Pillow image, (H, W), of the numbers of classes. torch is never imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fastload.errors import ImageError, SourceError
from fastload.image_header import ImageHeader, check_size, pillow_silenced, probe_image
from fastload.sources.listing import Column, Listing, Masks, OnError, first_few

_IMAGE_KEYS = ("image", "img", "pixel_values", "x")
_LABEL_KEYS = ("label", "labels", "target", "y")
_MASK_KEYS = ("mask", "masks", "segmentation", "segmentation_mask")
_PLACES = frozenset("boxes bbox bboxes objects annotations keypoints landmarks points".split())
_ASKED_TWICE = 5  # samples, evenly chosen
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclass(frozen=True, eq=False)
class ObjectPictures:
    """The images of an object's samples, each asked for anew; what was found when they were listed is compared.

    Attributes:
        source: the object; picklable if its samples shall be read in other processes.
        rows: int64 (N,), the numbers of the samples that are meant.
        headers: of each, as listed.
        digests: of each, XXH3-64 of the image as listed.
    """

    source: Any
    rows: NDArray[np.int64]
    headers: tuple[ImageHeader, ...]
    digests: tuple[int, ...]

    def header(self, i: int) -> ImageHeader:
        """What was found when the sample was listed."""
        return self.headers[i]

    def read(self, i: int) -> NDArray[Any]:
        """Its pixels; see Pictures."""
        image = _sample(self.source, int(self.rows[i])).image
        pixels, listed = _pixels(image), self.headers[i]
        found = (*pixels.shape, 1)[:3]
        if found != (listed.height, listed.width, listed.channels) or pixels.itemsize * 8 != listed.bits:
            raise ImageError(
                f"is {pixels.dtype} {pixels.shape} now and was {listed.height}x{listed.width} with {listed.channels} "
                f"channels of {listed.bits} bits at first: it is made anew each time. Leave random transforms out"
            )
        if _digest(image, pixels) != self.digests[i]:
            raise ImageError(
                "has other pixels now than at first: it is made anew each time. Leave random transforms out"
            )
        return pixels

    def take(self, indices: NDArray[np.integer[Any]]) -> ObjectPictures:
        """Those of some samples, in the order of indices."""
        at = indices.tolist()
        headers, digests = tuple([self.headers[i] for i in at]), tuple([self.digests[i] for i in at])
        return replace(self, rows=self.rows[indices], headers=headers, digests=digests)


@dataclass(frozen=True, eq=False)
class ObjectMasks:
    """The masks of an object's samples, each asked for anew.

    Attributes:
        source: as of ObjectPictures.
        rows: likewise.
        sizes: height and width of each, as listed; (0, 0) where there is none.
    """

    source: Any
    rows: NDArray[np.int64]
    sizes: tuple[tuple[int, int], ...]

    def header(self, i: int) -> ImageHeader:
        """What was found when the sample was listed."""
        return ImageHeader(*self.sizes[i], 1, 8, "L", 1)

    def read(self, i: int) -> NDArray[Any]:
        """uint8 (H, W)."""
        mask = _mask(_sample(self.source, int(self.rows[i])).mask)
        if mask is None or mask.shape != self.sizes[i]:
            raise ImageError("is of another size than at first: it is made anew each time. Leave random transforms out")
        return mask

    def take(self, indices: NDArray[np.integer[Any]]) -> ObjectMasks:
        """Those of some samples, in the order of indices."""
        return replace(self, rows=self.rows[indices], sizes=tuple([self.sizes[i] for i in indices.tolist()]))


class _Sample(NamedTuple):
    """What an object gives for a sample; None: it has none."""

    image: Any
    label: Any
    mask: Any
    others: tuple[str, ...] = ()  # keys of what is not packed


def list_objects(source: Any, *, on_error: OnError = "fail") -> Listing:
    """The listing of an object's samples, in their order, keys their numbers; each is made once to look at it.

    Column `labels`: int64 (N,), -1 for None; uint8 (N, A) for vectors of 0 and 1; texts become the index into their
    sorted names. `names` from the object's `classes`, where there are. There is no time of modification: `mtimes_ns`
    holds a digest of each image instead, so that an interrupted pack is not continued with other images.

    Raises:
        SourceError: no length or no samples by number; a sample that fails (unless skipped); labels of several kinds;
            samples that are others when they are asked for again.
    """
    kind = type(source).__name__
    if (
        isinstance(source, (Mapping, str, bytes))
        or not hasattr(source, "__getitem__")
        or not hasattr(source, "__len__")
    ):
        raise SourceError(
            f"{kind}: has no length, or no samples by number, as a list or a torch Dataset has. Give one of these; of "
            "an iterator `list(it)`, if it fits into memory; of files their folder."
        )
    headers: list[ImageHeader] = []
    labels: list[Any] = []
    rows: list[int] = []
    digests: list[int] = []
    marks: list[int] = []  # of image and mask together
    skipped: list[tuple[str, str]] = []
    mask_sizes: list[tuple[int, int]] = []
    in_masks = np.zeros(256, np.bool_)
    others: dict[str, None] = {}
    total = len(source)
    width = max(6, len(str(max(total - 1, 0))))
    for row in range(total):
        try:
            sample = _sample(source, row)
            (header, digest), plain, mask = _looked_at(sample.image), _label(sample.label), _mask(sample.mask)
        except ImageError as exc:
            if on_error == "fail":
                raise SourceError(
                    f"{kind}: sample {row} of {total} {exc}. Mend it, or leave such samples out with on_error='skip'."
                ) from exc
            skipped.append((f"{row:0{width}d}", str(exc)))
            continue
        rows.append(row)
        headers.append(header)
        digests.append(digest)
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
    files = ObjectPictures(source, np.array(rows, np.int64), tuple(headers), tuple(digests))
    _refuse_random(files, kind)
    masks = _masks_of(source, files.rows, mask_sizes, in_masks, kind, notes)
    sizes = [header.height * header.width * header.channels * header.bits // 8 for header in headers]
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


def _refuse_random(files: ObjectPictures, kind: str) -> None:
    """Refuse an object whose samples are others each time, by some of them."""
    for i in np.unique(np.linspace(0, len(files.rows) - 1, _ASKED_TWICE).astype(int)).tolist():
        row = int(files.rows[i])
        try:
            again = _looked_at(_sample(files.source, row).image)[1]
        except ImageError:
            continue  # reading it for the file names it
        if again != files.digests[i]:
            raise SourceError(
                f"{kind}: sample {row} has other pixels when it is asked for again: it is made anew each time. Leave "
                "random transforms out: they come later, in each epoch."
            )


def _masks_of(
    source: Any,
    rows: NDArray[np.int64],
    sizes: list[tuple[int, int]],
    values: NDArray[np.bool_],
    kind: str,
    notes: list[str],
) -> Masks | None:
    """The masks, where there are any; those that are absent become a value that no other holds."""
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


def _mask(mask: Any) -> NDArray[np.uint8] | None:
    """uint8 (H, W) of a mask; None for None.

    Raises:
        ImageError: it is none.
    """
    if mask is None:
        return None
    if isinstance(mask, Image.Image) and mask.mode not in ("1", "L", "P"):
        raise ImageError(f"has a mask of Pillow mode {mask.mode!r}; expected L or P, the number of each pixel's class")
    if hasattr(mask, "detach"):
        mask = mask.detach().cpu().numpy()
    found = np.asarray(mask)
    if found.ndim == 3 and 1 in (found.shape[0], found.shape[2]):
        found = found[0] if found.shape[0] == 1 else found[..., 0]
    if found.ndim != 2 or not found.size or found.dtype.kind not in "iub" or found.min() < 0 or found.max() > 255:
        raise ImageError(f"has a mask that is {found.dtype} {found.shape}; expected integers from 0 to 255, (H, W)")
    return found.astype(np.uint8)


def _sample(source: Any, row: int) -> _Sample:
    """The parts of a sample.

    Raises:
        ImageError: the object raised, or gave something else.
    """
    try:
        sample = source[row]
    except Exception as exc:  # whatever a stranger's code raises is told with its sample
        raise ImageError(f"cannot be had: {type(exc).__name__}: {exc}") from exc
    if isinstance(sample, Mapping):
        image = next((sample[key] for key in _IMAGE_KEYS if key in sample), None)
        label = next((sample[key] for key in _LABEL_KEYS if key in sample), None)
        if image is None:
            raise ImageError(f"is a dict without an image: it has {', '.join(map(str, list(sample)[:8]))}")
        mask = next((key for key in _MASK_KEYS if key in sample), "")
        known = {key for keys in (_IMAGE_KEYS, _LABEL_KEYS) for key in keys} | {mask}
        others = [str(key) for key in sample if key not in known]
        if lost := [key for key in others if key.lower() in _PLACES]:
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


def _looked_at(image: Any) -> tuple[ImageHeader, int]:
    """The header of an image, and XXH3-64 of its file's bytes or of its pixels."""
    data = _encoded(image)
    if data is not None:
        return probe_image(lambda size: data[:size]), xxhash.xxh3_64_intdigest(data)
    pixels = _pixels(image)
    height, width, channels = (*pixels.shape, 1)[:3]
    kind = _MODES[channels] if pixels.itemsize == 1 else {1: "I;16", 3: "RGB;16", 4: "RGBA;16"}[channels]
    header = ImageHeader(height, width, channels, 8 * pixels.itemsize, kind, 1)
    return header, _digest(image, pixels)


def _digest(image: Any, pixels: NDArray[Any]) -> int:
    data = _encoded(image)
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(pixels).data if data is None else data)


def _encoded(image: Any) -> bytes | None:
    """The bytes of an image file; None for anything else."""
    if isinstance(image, Mapping) and isinstance(image.get("bytes"), bytes):  # Hugging Face, undecoded
        image = image["bytes"]
    return bytes(image) if isinstance(image, (bytes, bytearray, memoryview)) else None


def _pixels(image: Any) -> NDArray[Any]:
    """The pixels of any image accepted, uint8 or uint16 (H, W) or (H, W, C).

    Raises:
        ImageError: it is none.
    """
    data = _encoded(image)
    if data is not None:
        return _decoded(data)
    if isinstance(image, Image.Image):
        with pillow_silenced():
            return _of_pillow(image)
    tensor = hasattr(image, "detach")
    if tensor:
        image = image.detach().cpu().numpy()
    if not isinstance(image, np.ndarray):
        what = type(image).__name__
        raise ImageError(f"is a {what}; expected a Pillow image, an array, a tensor or the bytes of an image file")
    return _of_array(image, tensor)


def _decoded(data: bytes) -> NDArray[Any]:
    # Imported here: a listing of arrays needs no decoder.
    from fastload.decode import Target, decode_image

    header = probe_image(lambda size: data[:size])
    dtype = np.dtype(np.uint16 if header.bits == 16 else np.uint8)
    target = Target(height=header.height, width=header.width, channels=header.channels, dtype=dtype, fit=None)
    out = np.empty((header.height, header.width, header.channels), dtype)
    decode_image(data, target, out)
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
    except Exception as exc:  # a lazily opened file may be damaged in any way
        raise ImageError(f"cannot be decoded: {exc}") from exc


def _of_array(pixels: NDArray[Any], tensor: bool) -> NDArray[Any]:
    shape = pixels.shape
    if pixels.dtype.newbyteorder("=") not in (np.dtype(np.uint8), np.dtype(np.uint16)):
        mend = "convert it with `(image * 255).round().astype('uint8')` where it lies in 0 to 1"
        if tensor:
            mend = "leave ToTensor and Normalize out (PILToTensor keeps uint8): normalizing comes later, on the device"
        raise ImageError(f"is {pixels.dtype} {shape}; expected uint8 or uint16: {mend}")
    first, last = (len(shape) == 3 and shape[at] in _MODES for at in (0, -1))
    if len(shape) != 2 and not first and not last:
        raise ImageError(f"has the shape {shape}; expected (H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 channels")
    if first and (tensor or not last):  # a tensor's channels come first, an array's last
        pixels = pixels.transpose(1, 2, 0)
    check_size(*pixels.shape[:2])
    return np.ascontiguousarray(pixels, dtype=pixels.dtype.newbyteorder("="))


def _label(label: Any) -> int | str | tuple[int, ...] | None:
    """A label as a plain value.

    Raises:
        ImageError: it is none.
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
        place = {name: at for at, name in enumerate(names)}
        return Column(np.array([-1 if v is None else place[v] for v in labels], np.int64), {"names": names})
    try:
        values = np.array([-1 if value is None else value for value in labels], np.int64)
    except OverflowError as exc:
        raise SourceError(f"{kind}: labels beyond what int64 holds. Number the classes from 0.") from exc
    return Column(values, {"names": classes} if int(values.max()) < len(classes) else {})


def _kind(label: Any) -> object:
    return len(label) if isinstance(label, tuple) else type(label)


def _classes(source: Any) -> tuple[str, ...]:
    """Names of classes, as torchvision's datasets, subsets of them, and Hugging Face's have them."""
    for owner in (source, getattr(source, "dataset", None)):
        names = getattr(owner, "classes", None)
        features = getattr(owner, "features", None)
        if isinstance(features, Mapping):
            names = next((getattr(features[key], "names", None) for key in _LABEL_KEYS if key in features), names)
        if isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names):
            return tuple(names)
    return ()
