"""Compares FastLoader with plain `DataLoader`s: over the packed file, and over the image files it was packed from."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

from fastload.dataset import PackedDataset
from fastload.errors import ImageError, SourceError
from fastload.prefetch.torch_workers import end_with_parent, worker_context
from fastload.profiling.bench.passes import Show, Spread, compare, counting, repeat_epochs, run_for, touch_batch
from fastload.profiling.bench.subject import CropSample, Subject, random_window
from fastload.profiling.bench.training_loop import LoopFigures
from fastload.read.reader import open_rows
from fastload.remote.urls import short_name
from fastload.sources.layouts import list_source
from fastload.sources.listing import Files
from fastload.system.machine import available_cpus
from fastload.system.text import text_of

PAIRS = 3

_MOST_BATCHES = 400  # that the plain loaders go through before they begin again


@dataclass(frozen=True)
class Rival:
    """Figures of one plain `DataLoader`, measured in turn with FastLoader."""

    name: str  # what it is
    samples_per_s: Spread  # its rate, of each pass
    ours_samples_per_s: Spread  # FastLoader's rate, in turn with it
    ratio: Spread  # FastLoader's rate divided by its rate, for each pair
    cpu_s_per_1000: float  # CPU seconds of all its processes for 1,000 images
    loop: LoopFigures | None = None  # the training loop on its batches, if one was run


def measure_rivals(
    subject: Subject, show: Show, train: Callable[[str, DataLoader[Any]], LoopFigures | None]
) -> Iterator[Rival]:
    """Measures each plain `DataLoader` in turn with FastLoader, `options.seconds` in all, and yields its figures.

    `train` is called with the name of each and the loader, while its workers run; its result becomes `Rival.loop`.
    """
    ways = plain_loaders(subject, subject.rows(_MOST_BATCHES, subject.options.seconds / 4))
    tick = counting(show, "the plain ways", len(ways))
    seconds = subject.options.seconds / (2 * PAIRS + 1) / len(ways)

    def ours() -> float:
        return subject.run(seconds, touch_batch).samples_per_s

    def plain(loader: DataLoader[Any], costs: list[float]) -> float:
        subject.make_cold()
        # The workers may have that many batches ready before the clock starts.
        ready = min(loader.num_workers, len(loader) - 1)
        found = run_for(repeat_epochs(loader, epochs=subject.epochs), seconds, touch_batch, discard=ready)
        costs.append(1000 * found.cpu_s / found.samples)
        return found.samples_per_s

    for name, loader in ways.items():
        costs = list[float]()
        result = compare(ours, partial(plain, loader, costs), pairs=PAIRS, warm_up=0 if subject.options.cold else 1)
        cost = statistics.median(costs[-PAIRS:])
        yield Rival(name, result["base"], result["way"], result["ratio"], cost, train(name, loader))
        tick()


class ImageFiles(Dataset[tuple[torch.Tensor, int]]):
    """A dataset of image files opened with Pillow, as a training script without fastload would have it.

    Args:
        shape: (C, H, W) of an image; files of another size are cropped to this ratio and resized.
        at_random: whether to cut a random window, as `RandomResizedCrop` does, rather than the central one.
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
            image = opened.convert({1: "L", 3: "RGB", 4: "RGBA"}[channels])
        if self._at_random:
            top, left, tall, wide = random_window(image.height, image.width)
            box = (left, top, left + wide, top + tall)
            image = image.resize((width, height), Image.Resampling.BILINEAR, box=box)
        elif image.size != (width, height):
            image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image).reshape(height, width, channels))
        return pixels.permute(2, 0, 1), self._labels[index]


def plain_loaders(subject: Subject, rows: Sequence[NDArray[np.int64]]) -> dict[str, DataLoader[Any]]:
    """Returns plain `DataLoader`s over these rows, batch by batch, by name; they crop as the FastLoader does.

    Raises:
        SourceError: the image files are missing, or are not those that were packed.
    """
    workers = subject.options.workers or available_cpus()
    name = f"DataLoader(num_workers={workers})"
    together = np.concatenate(rows)
    dataset = subject.dataset
    if subject.crop is not None:
        dataset = PackedDataset(subject.path, subject.options.split, transform=CropSample(subject.crop.size))
    data: dict[str, tuple[Dataset[Any], NDArray[np.int64]]]
    data = {f"{name}, the packed file": (dataset, together - subject.first_row)}
    if subject.options.source is not None:
        data[f"{name}, image files, Pillow"] = _source_files(subject, subject.options.source, together)
    return {
        name: DataLoader(
            samples,
            subject.batch_size,
            sampler=positions.tolist(),
            num_workers=workers,
            # Persistent workers keep the file mapped, and mapped pages cannot be dropped from the page cache.
            persistent_workers=not subject.options.cold,
            drop_last=len(positions) >= subject.batch_size,
            pin_memory=subject.device.type == "cuda",
            multiprocessing_context=worker_context(),
            worker_init_fn=end_with_parent,
        )
        for name, (samples, positions) in data.items()
    }


def _source_files(subject: Subject, source: Path, rows: NDArray[np.int64]) -> tuple[ImageFiles, NDArray[np.int64]]:
    """Returns a dataset of the image files of these rows, and for each row its index in that dataset."""
    file = subject.dataset.file
    wanted, indices = np.unique(rows, return_inverse=True)
    listing = list_source(source)
    if "key" not in file.fields:
        raise SourceError(
            f"{file.path}: does not say which file each row came from, because fastload did not pack it. Leave out "
            f"--source."
        )
    keys = np.empty(len(wanted), file.fields["key"].dtype)
    with closing(open_rows(file, ["key"])) as reader:
        reader.gather(wanted, {"key": keys})
    where = {key.encode(): index for index, key in enumerate(listing.keys)}
    missing = next((key for key in keys.tolist() if key not in where), None)
    if missing is not None:
        raise SourceError(
            f"{source}: has no {text_of(missing)}, which is in "
            f"{short_name(subject.path)}. Give the folder or archive that the file was packed from."
        )
    if not isinstance(listing.files, Files):
        raise SourceError(f"{source}: does not hold its images as files, which a plain DataLoader would decode.")
    chosen = np.array([where[key] for key in keys.tolist()])
    column = listing.columns.get("labels")
    labels = [0] * len(chosen) if column is None or column.values.ndim > 1 else column.values[chosen].tolist()
    shape, crop = subject.image_shape, subject.crop
    shape = shape if crop is None else (shape[0], *crop.size)
    return ImageFiles(listing.files.take(chosen), labels, shape, at_random=crop is not None), indices


def check_source(subject: Subject, source: Path) -> None:
    """Reads the image file of the first sample, so that a wrong `--source` fails before anything is measured.

    Raises:
        MissingFileError, SourceError: the image cannot be read, or the source is not what the file was packed from.
    """
    files, _ = _source_files(subject, source, np.array([subject.first_row]))
    try:
        files[0]
    except (ImageError, OSError) as exc:
        raise SourceError(f"{source}: the image of the first sample cannot be read: {exc}") from exc
