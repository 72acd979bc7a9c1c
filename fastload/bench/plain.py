"""The usual ways to the same samples: a plain `DataLoader` over the packed file, and over the files it came from."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

from fastload.bench.crop import CropSample, random_window
from fastload.bench.subject import Subject
from fastload.cpus import available_cpus
from fastload.dataset import PackedDataset
from fastload.errors import ImageError, SourceError
from fastload.format import PackedFile
from fastload.read import RowReader
from fastload.sources import Files, list_source
from fastload.torch_workers import worker_context

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


class ImageFiles(Dataset[tuple[torch.Tensor, int]]):
    """Image files opened with Pillow when they are asked for, as a script without fastload does.

    Args:
        files: reads the bytes of each.
        labels: of each.
        shape: (C, H, W) of an image; files of another size are cropped to the ratio and resized.
        at_random: the crop is a random one.
    """

    def __init__(
        self, files: Files, labels: Sequence[int], shape: tuple[int, int, int], *, at_random: bool = False
    ) -> None:
        self._files, self._labels, self._shape, self._at_random = files, labels, shape, at_random

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        channels, height, width = self._shape
        with Image.open(io.BytesIO(self._files.read(index))) as opened:
            image = opened.convert(_MODES[channels])
        if self._at_random:
            top, left, tall, wide = random_window(image.height, image.width)
            box = (left, top, left + wide, top + tall)
            image = image.resize((width, height), Image.Resampling.BILINEAR, box=box)
        elif image.size != (width, height):
            image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image).reshape(height, width, channels))
        return pixels.permute(2, 0, 1), self._labels[index]


def plain_ways(subject: Subject, rows: Sequence[NDArray[np.int64]]) -> dict[str, DataLoader[Any]]:
    """Plain `DataLoader`s of these batches of rows, by what they are called; they crop where the loader crops.

    Args:
        rows: rows of the file, batch by batch.

    Raises:
        SourceError: the image files are not there, or are not those that were packed.
    """
    workers = plain_workers(subject)
    positions = np.concatenate(rows) - subject.first_row
    dataset = subject.dataset
    if subject.crop is not None:
        dataset = PackedDataset(subject.path, subject.options.split, transform=CropSample(subject.crop.size))
    ways = {f"DataLoader(num_workers={workers}), the packed file": _plain(subject, dataset, positions, workers)}
    if subject.options.source is not None:
        files, places = _source_files(subject, np.concatenate(rows))
        ways[f"DataLoader(num_workers={workers}), image files, Pillow"] = _plain(subject, files, places, workers)
    return ways


def plain_workers(subject: Subject) -> int:
    """Worker processes that a plain `DataLoader` gets: as many as asked for, else one for each CPU."""
    return subject.options.workers or available_cpus()


def _plain(subject: Subject, data: Dataset[Any], positions: NDArray[np.int64], workers: int) -> DataLoader[Any]:
    return DataLoader(
        data,
        subject.batch_size,
        sampler=positions.tolist(),
        num_workers=workers,
        # Workers that live have the file mapped, and mapped pages cannot be dropped.
        persistent_workers=not subject.options.cold,
        drop_last=len(positions) >= subject.batch_size,
        pin_memory=subject.device.type == "cuda",
        multiprocessing_context=worker_context(),
    )


def _source_files(subject: Subject, rows: NDArray[np.int64]) -> tuple[ImageFiles, NDArray[np.int64]]:
    """The files of these rows, and for each row its place among them."""
    source = subject.options.source
    assert source is not None, "it was asked for"
    wanted, places = np.unique(rows, return_inverse=True)
    listing = list_source(source)
    where = {key.encode(): place for place, key in enumerate(listing.keys)}
    chosen = []
    for key in _keys(subject.dataset.file, wanted).tolist():
        if key not in where:
            raise SourceError(
                f"{source}: has no {key.decode('utf-8', errors='backslashreplace')}, which is in "
                f"{subject.path.name}. Give the folder or archive that the file was packed from."
            )
        chosen.append(where[key])
    if not isinstance(listing.files, Files):
        raise SourceError(f"{source}: does not hold its images as files, which a plain DataLoader would decode.")
    columns = listing.columns
    one_label = "labels" in columns and columns["labels"].values.ndim == 1
    labels = columns["labels"].values[chosen].tolist() if one_label else [0] * len(chosen)
    shape, crop = subject.image_shape, subject.crop
    shape = shape if crop is None else (shape[0], *crop.size)
    return ImageFiles(listing.files.take(np.asarray(chosen)), labels, shape, at_random=crop is not None), places


def _keys(file: PackedFile, rows: NDArray[np.int64]) -> NDArray[np.bytes_]:
    if "key" not in file.fields:
        raise SourceError(
            f"{file.path}: does not say which file each row came from, since fastload did not pack it. Leave --source "
            f"out."
        )
    keys = np.empty(len(rows), file.fields["key"].dtype)
    reader = RowReader(file, ["key"])
    reader.gather(rows, {"key": keys})
    reader.close()
    return keys


def check_source(subject: Subject) -> None:
    """Looks for the image file of the first sample.

    Raises:
        MissingFileError, SourceError: there is none that can be read, or the source is not that of the file.
    """
    files, _ = _source_files(subject, np.array([subject.first_row]))
    try:
        files[0]
    except (ImageError, OSError) as exc:
        raise SourceError(f"{subject.options.source}: the image of the first sample cannot be read: {exc}") from exc
