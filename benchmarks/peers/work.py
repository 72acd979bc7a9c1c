"""What every loader has to do: the data, the works, and the sums that show that all did the same.

Imports nothing but the standard library and NumPy: it runs in each loader's own environment.
"""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Transform = Literal["random_resized_crop", "random_resized_crop_flip_normalize"]

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of every RandomResizedCrop here: torchvision's defaults, bilinear
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of every normalization, of pixels from 0 to 1


@dataclass(frozen=True)
class Data:
    """Images that were prepared.

    Attributes:
        folder: class folders of image files, JPEG or PNG.
        num_images: files in it.
        shape: (height, width, channels) where all are of one size.
        rows: .npy of uint8 (N, H, W, C), the same images decoded, in the order of the sorted paths; None where sizes
            vary, and where packing is to read the files.
        labels: .npy of int64 (N,), the place of each image's class folder among the sorted ones.
    """

    name: str
    folder: Path
    num_images: int
    shape: tuple[int, int, int] | None
    rows: Path | None
    labels: Path


@dataclass(frozen=True)
class Work:
    """What is asked of a loader; `crop` is the output's side, and `dtype` that of the batches."""

    name: str
    data: Data
    batch_size: int
    encoding: Literal["raw", "jpeg"]
    transform: Transform | None = None
    crop: int | None = None
    dtype: Literal["uint8", "float32"] = "uint8"

    @property
    def batch_shape(self) -> tuple[int, int, int, int]:
        """(B, H, W, C) of its batches."""
        if self.crop is not None:
            return self.batch_size, self.crop, self.crop, 3
        assert self.data.shape is not None, "images of one size, or a crop"
        return self.batch_size, *self.data.shape

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return self.data.num_images // self.batch_size


def to_json(work: Work) -> dict[str, Any]:
    """The work as plain JSON values."""
    said = asdict(work)
    said["data"] = {key: str(value) if isinstance(value, Path) else value for key, value in said["data"].items()}
    return said


def from_json(said: dict[str, Any]) -> Work:
    """The work that `to_json` told."""
    data = said["data"]
    paths = {name: None if data[name] is None else Path(data[name]) for name in ("folder", "rows", "labels")}
    shape = None if data["shape"] is None else tuple(data["shape"])
    return Work(**{**said, "data": Data(**{**data, **paths, "shape": shape})})


def works_of(sets: dict[str, Data]) -> dict[str, Work]:
    """The works by name, for the data sets "faces", "small", "squares" and "photos"."""
    faces, small, squares, photos = (sets[name] for name in ("faces", "small", "squares", "photos"))
    works = (
        Work("rows_218x178", faces, 256, "raw"),
        Work("rows_32", small, 1024, "raw"),
        Work("rows_256", squares, 128, "raw"),
        Work("raw_augment", squares, 128, "raw", "random_resized_crop_flip_normalize", 224, "float32"),
        Work("jpeg_photos", photos, 64, "jpeg", "random_resized_crop", 224),
        Work("jpeg_faces", faces, 256, "jpeg", "random_resized_crop", 128),
        Work("pack_faces", replace(faces, rows=None), 256, "raw"),
    )
    return {work.name: work for work in works}


def in_memory_order(images: NDArray[Any]) -> NDArray[Any]:
    """The same array with its axes in the order in which it lies in memory; copied only if it has gaps."""
    if images.flags.c_contiguous:
        return images
    turned = images.transpose(sorted(range(images.ndim), key=lambda axis: -images.strides[axis]))
    return turned if turned.flags.c_contiguous else np.ascontiguousarray(images)


def consume(images: NDArray[Any]) -> int:
    """Reads every byte of a batch once, in memory order: a sum of its 8-byte words, 2 to 3 ms for 30 MB."""
    flat = in_memory_order(images).reshape(-1).view(np.uint8)
    return int(flat[: flat.size - flat.size % 8].view(np.uint64).sum())


class Epoch:
    """Sums over the batches of an epoch that do not depend on their order."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.images = self.checksum = 0
        self.distinct = set[int]()
        self.label_counts = np.zeros(1000, np.int64)
        self.total = 0.0
        self.wrong = ""
        self.layout = ""

    def add(self, images: NDArray[Any], labels: NDArray[Any]) -> None:
        """Counts a batch in. Raw images are told apart by a CRC of their pixels and their label."""
        _, height, width, channels = self.work.batch_shape
        first = images.shape[1] == channels and images.shape[3] != channels
        rows = images.transpose(0, 2, 3, 1) if first else images
        if not self.layout:
            at = [images.strides[axis] for axis in range(4)]
            self.layout = "NCHW" if at[1 if first else 3] > images.itemsize else "NHWC"
        if rows.shape[1:] != (height, width, channels) or images.dtype != self.work.dtype:
            self.wrong = f"batches of {images.shape}, {images.dtype}, where the work is {self.work.batch_shape}"
        labels = np.asarray(labels).reshape(-1).astype(np.int64)
        if len(labels) != len(images):
            self.wrong = f"{len(labels)} labels for {len(images)} images"
        self.label_counts += np.bincount(labels, minlength=len(self.label_counts))
        self.images += len(images)
        self.total += float(images.mean(dtype=np.float64)) * len(images)
        if self.work.transform is None:
            for row, label in zip(rows, labels, strict=True):
                crc = zlib.crc32(np.ascontiguousarray(row).reshape(-1).data, int(label))
                self.distinct.add(crc)
                self.checksum = (self.checksum + crc) % 2**64

    def found(self) -> dict[str, Any]:
        """The sums."""
        counts = self.label_counts.tolist()
        found = {
            "images": self.images,
            "labels": zlib.crc32(self.label_counts.tobytes()),
            "classes": sum(1 for count in counts if count),
            "mean": self.total / max(1, self.images),
            "layout": self.layout,
            "wrong": self.wrong,
        }
        if self.work.transform is None:
            found |= {"checksum": self.checksum, "distinct": len(self.distinct)}
        return found


def expected_sums(work: Work) -> dict[str, Any]:
    """The sums of one epoch of a work whose images are not transformed, from its rows alone."""
    assert work.data.rows is not None and work.transform is None
    epoch = Epoch(work)
    rows, labels = np.load(work.data.rows, mmap_mode="r"), np.load(work.data.labels)
    for first in range(0, len(rows), 1024):
        epoch.add(rows[first : first + 1024], labels[first : first + 1024])
    return epoch.found()
