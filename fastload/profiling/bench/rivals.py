"""Compares FastLoader with plain `DataLoader`s: over the packed file, and over the image files it was packed from."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

from fastload.dataset import PackedDataset
from fastload.errors import ImageError, SourceError
from fastload.format.header import PackedFile
from fastload.prefetch.torch_workers import worker_context
from fastload.profiling.bench.passes import Spread, TimedPass, compare, repeat_epochs, run_for, spread, touch_batch
from fastload.profiling.bench.subject import CropSample, Subject, random_window
from fastload.profiling.bench.training_loop import LoopFigures
from fastload.read.reader import RowReader
from fastload.sources import Files, list_source
from fastload.system.machine import available_cpus
from fastload.system.text import text_of

PAIRS = 3

_MOST_BATCHES = 400  # that the plain loaders go through before they begin again


@dataclass(frozen=True)
class Rival:
    """Figures of one plain `DataLoader`, measured in turn with FastLoader.

    Attributes:
        name: what it is.
        samples_per_s: its rate, of each pass.
        ours_samples_per_s: FastLoader's rate, in turn with it.
        ratio: FastLoader's rate divided by its rate, for each pair.
        cpu_s_per_1000: CPU seconds of all its processes for 1,000 images.
        loop: the training loop on its batches, if one was run.
    """

    name: str
    samples_per_s: Spread
    ours_samples_per_s: Spread
    ratio: Spread
    cpu_s_per_1000: float
    loop: LoopFigures | None = None


def measure_rivals(
    subject: Subject,
    found: list[Rival],
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    train: Callable[[str, DataLoader[Any]], LoopFigures | None] = lambda name, loader: None,
) -> None:
    """Measures each plain `DataLoader` in turn with FastLoader, `options.seconds` in all.

    Args:
        found: each `Rival` is appended as soon as it is measured.
        on_progress: called with the number of loaders that are done and of all.
        train: called with the name of each loader and the loader, while its workers run; its result becomes
            `Rival.loop`.
    """
    ways = plain_loaders(subject, subject.rows(_MOST_BATCHES, subject.options.seconds / 4))
    seconds = subject.options.seconds / (2 * PAIRS + 1) / len(ways)
    for number, (name, loader) in enumerate(ways.items()):
        passes: list[TimedPass] = []

        def plain(loader: DataLoader[Any] = loader, passes: list[TimedPass] = passes) -> float:
            subject.make_cold()
            # The workers may have that many batches ready before the clock starts.
            ready = min(loader.num_workers, len(loader) - 1)
            epochs = 1 if subject.options.cold else None
            passes.append(run_for(repeat_epochs(loader, epochs=epochs), seconds, touch_batch, discard=ready))
            return passes[-1].samples_per_s

        def ours() -> float:
            return subject.run(seconds, touch_batch).samples_per_s

        result = compare(ours, plain, pairs=PAIRS, warm_up=0 if subject.options.cold else 1)
        costs = [one.cpu_s / one.samples * 1000 for one in passes[-PAIRS:] if one.samples]
        found.append(
            Rival(name, result["base"], result["way"], result["ratio"], spread(costs)["median"], train(name, loader))
        )
        on_progress(number + 1, len(ways))
        del loader, plain


_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


class ImageFiles(Dataset[tuple[torch.Tensor, int]]):
    """A dataset of image files opened with Pillow, as a training script without fastload would have it.

    Args:
        files: reads the bytes of each file.
        labels: of each file.
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
            image = opened.convert(_MODES[channels])
        if self._at_random:
            top, left, tall, wide = random_window(image.height, image.width)
            box = (left, top, left + wide, top + tall)
            image = image.resize((width, height), Image.Resampling.BILINEAR, box=box)
        elif image.size != (width, height):
            image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image).reshape(height, width, channels))
        return pixels.permute(2, 0, 1), self._labels[index]


def plain_loaders(subject: Subject, rows: Sequence[NDArray[np.int64]]) -> dict[str, DataLoader[Any]]:
    """Returns plain `DataLoader`s over these rows by name; they crop as the FastLoader does.

    Args:
        rows: rows of the file, batch by batch.

    Raises:
        SourceError: the image files are missing, or are not those that were packed.
    """
    workers = plain_workers(subject)
    positions = np.concatenate(rows) - subject.first_row
    dataset = subject.dataset
    if subject.crop is not None:
        dataset = PackedDataset(subject.path, subject.options.split, transform=CropSample(subject.crop.size))
    ways = {f"DataLoader(num_workers={workers}), the packed file": _plain(subject, dataset, positions, workers)}
    if subject.options.source is not None:
        files, indices = _source_files(subject, np.concatenate(rows))
        ways[f"DataLoader(num_workers={workers}), image files, Pillow"] = _plain(subject, files, indices, workers)
    return ways


def plain_workers(subject: Subject) -> int:
    """Returns the number of worker processes of a plain `DataLoader`: as asked for, else one per CPU."""
    return subject.options.workers or available_cpus()


def _plain(subject: Subject, data: Dataset[Any], positions: NDArray[np.int64], workers: int) -> DataLoader[Any]:
    return DataLoader(
        data,
        subject.batch_size,
        sampler=positions.tolist(),
        num_workers=workers,
        # Persistent workers keep the file mapped, and mapped pages cannot be dropped from the page cache.
        persistent_workers=not subject.options.cold,
        drop_last=len(positions) >= subject.batch_size,
        pin_memory=subject.device.type == "cuda",
        multiprocessing_context=worker_context(),
    )


def _source_files(subject: Subject, rows: NDArray[np.int64]) -> tuple[ImageFiles, NDArray[np.int64]]:
    """Returns a dataset of the image files of these rows, and for each row its index in that dataset."""
    source = subject.options.source
    assert source is not None, "it was asked for"
    wanted, indices = np.unique(rows, return_inverse=True)
    listing = list_source(source)
    where = {key.encode(): index for index, key in enumerate(listing.keys)}
    chosen = []
    for key in _keys(subject.dataset.file, wanted).tolist():
        if key not in where:
            raise SourceError(
                f"{source}: has no {text_of(key)}, which is in "
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
    return ImageFiles(listing.files.take(np.asarray(chosen)), labels, shape, at_random=crop is not None), indices


def _keys(file: PackedFile, rows: NDArray[np.int64]) -> NDArray[np.bytes_]:
    """Returns the keys of these rows of the file."""
    if "key" not in file.fields:
        raise SourceError(
            f"{file.path}: does not say which file each row came from, because fastload did not pack it. Leave out "
            f"--source."
        )
    keys = np.empty(len(rows), file.fields["key"].dtype)
    reader = RowReader(file, ["key"])
    reader.gather(rows, {"key": keys})
    reader.close()
    return keys


def check_source(subject: Subject) -> None:
    """Reads the image file of the first sample, so that a wrong `--source` fails before anything is measured.

    Raises:
        MissingFileError, SourceError: the image cannot be read, or the source is not what the file was packed from.
    """
    files, _ = _source_files(subject, np.array([subject.first_row]))
    try:
        files[0]
    except (ImageError, OSError) as exc:
        raise SourceError(f"{subject.options.source}: the image of the first sample cannot be read: {exc}") from exc
