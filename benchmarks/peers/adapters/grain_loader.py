"""Grain: a MapDataset over a memory-mapped array or the files, read by threads of one process, or by processes.

`MapDataset.shuffle` is a full one, by an index that is computed and not stored; `seed` and the epoch give its order.
For rows without a transform a batch is one element: the shuffled row numbers are batched, and `map` gathers them. JPEGs
are decoded and cropped by OpenCV, whose bilinear resize is not antialiased.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peers.adapters import _files
from peers.work import MEAN, STD, Work

REQUIREMENTS = ("grain==0.2.18", "opencv-python-headless==5.0.0.93")
PACKS = False
ANTIALIASED = False


def versions() -> dict[str, str]:
    """Versions of Grain and OpenCV."""
    return {name: version(name) for name in ("grain", "opencv-python-headless", "numpy")}


def supports(work: Work) -> str:
    """All works."""
    return ""


def settings(work: Work) -> list[dict[str, Any]]:
    """Threads and elements ahead, or processes."""
    ahead = 4 if work.transform is None else 4 * work.batch_size
    threads = [{"threads": count, "ahead": ahead, "processes": 0} for count in (2, 1, 4)]
    return [*threads, {"threads": 1, "ahead": ahead, "processes": 2}]


class Gather:
    """The rows of a batch and their labels."""

    def __init__(self, path: Path, work: Work) -> None:
        self.rows, self.labels = np.load(path, mmap_mode="r"), np.load(work.data.labels)

    def __call__(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        return np.take(self.rows, rows, axis=0), self.labels[rows]


class Augmented:
    """An image that is read, cropped and, if asked for, flipped and normalized."""

    def __init__(self, path: Path, work: Work) -> None:
        self.work, self.labels = work, np.load(work.data.labels)
        self.rows = np.load(path, mmap_mode="r") if work.encoding == "raw" else None
        self.files = [str(file) for file in sorted(path.glob("*/*"))] if work.encoding == "jpeg" else []
        self.scale = (1 / (255 * np.array(STD))).astype(np.float32)
        self.shift = (-np.array(MEAN) / np.array(STD)).astype(np.float32)

    def __call__(self, row: int, rng: np.random.Generator) -> tuple[NDArray[Any], int]:
        import cv2

        cv2.setNumThreads(1)
        image = self.rows[row] if self.rows is not None else cv2.imread(self.files[row], cv2.IMREAD_COLOR_RGB)
        top, left, height, width = _files.random_crop(rng, *image.shape[:2])
        assert self.work.crop is not None, "every transform here begins with a crop"
        size = (self.work.crop, self.work.crop)
        image = cv2.resize(image[top : top + height, left : left + width], size, interpolation=cv2.INTER_LINEAR)
        if self.work.transform == "random_resized_crop_flip_normalize":
            if rng.random() < 0.5:
                image = cv2.flip(image, 1)
            image = image * self.scale
            image += self.shift
        return image, int(self.labels[row])


class Loader:
    """One iterator an epoch, with a seed of its own."""

    def __init__(self, work: Work, path: Path, settings: dict[str, Any], seed: int) -> None:
        self.work, self.settings, self.seed = work, settings, seed
        self.make = Gather(path, work) if work.transform is None else Augmented(path, work)
        self.running: Any = None
        self.saved: Any = None

    def iterator(self, number: int) -> Any:
        """The batches of an epoch, by Grain."""
        import grain

        threads, ahead, processes = (self.settings[name] for name in ("threads", "ahead", "processes"))
        numbers = grain.MapDataset.range(self.work.data.num_images).seed(1000 * self.seed + number).shuffle()
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
        if isinstance(self.make, Gather):
            dataset = numbers.batch(self.work.batch_size, drop_remainder=True).map(self.make).to_iter_dataset(options)
        else:
            dataset = numbers.random_map(self.make).to_iter_dataset(options)
            dataset = dataset.batch(self.work.batch_size, drop_remainder=True)
        if processes:
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=processes, per_worker_buffer_size=2))
        elif self.work.transform is not None:
            from grain.experimental import ThreadPrefetchIterDataset

            dataset = ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=2)
        return iter(dataset)

    def epoch(self, number: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """One epoch, or the rest of the one that a state told."""
        self.running = self.iterator(number)
        if self.saved is not None:
            self.running.set_state(self.saved)
            self.saved = None
        yield from self.running

    def state(self) -> Any:
        """The iterator's state."""
        return self.running.get_state()

    def load_state(self, state: Any) -> None:
        """The next epoch goes on from a state."""
        self.saved = state

    def close(self) -> None:
        """Its threads end with the iterator."""
        self.running = None
