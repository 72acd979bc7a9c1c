"""The file under test: makes loaders of it, warm or cold."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.bench.crop import crop_for
from fastload.bench.faults import Fault
from fastload.bench.passes import Pass, endless, run_for
from fastload.bench.steps import StepChoice
from fastload.dataset import PackedDataset
from fastload.errors import OptionError
from fastload.format import read_header
from fastload.inputs import PackedInput
from fastload.loader import FastLoader
from fastload.page_cache import drop
from fastload.plan import Shuffle

BATCH_SIZE = 256
_LEAST_BATCHES = 8


@dataclass(frozen=True)
class BenchOptions:
    """What `fastload bench` is asked for.

    Attributes:
        batch_size: samples in a batch; None: 256, or an eighth of the samples where that is less.
        seconds: of each part: the loader alone, the training loop, each comparison and each fault.
        workers, shuffle, device, seed: as in `FastLoader`.
        split: of the file; None: all rows.
        step: of a training loop; None: only the loader is measured.
        compare: whether a plain `DataLoader` is measured too.
        source: folder or archive that the file was packed from, for `compare` on its image files.
        cold: whether the file is dropped from the page cache before each pass.
        faults: to be injected, one after another.
        size: of a random crop at the head of the loader's transforms, a square's or (height, width); None: 224 where
            images differ in size, else no crop.
    """

    batch_size: int | None = None
    seconds: float = 5.0
    workers: int | None = None
    shuffle: Shuffle = True
    device: str | None = None
    seed: int = 0
    split: str | None = None
    step: StepChoice | None = None
    compare: bool = False
    source: Path | None = None
    cold: bool = False
    faults: tuple[Fault, ...] = ()
    size: int | tuple[int, int] | None = None

    @property
    def total_s(self) -> float:
        """How long all of it takes, more or less."""
        ways = (1 + (self.source is not None)) * self.compare
        loops = 2 + ways if self.step is not None else 0
        return self.seconds * (1 + bool(ways) + loops + len(self.faults))


class Subject:
    """The file under test and how it is to be loaded. `close` it.

    Args:
        path: a packed file, or another HDF5 file that `FastLoader` reads.
        options: of the benchmark.

    Attributes:
        crop: of the loader's transforms; None: it has no transforms.
        image_shape: (C, H, W) of the file's images, 0 where they differ.

    Raises:
        MissingFileError, FormatError: the file is not there, or cannot be read.
        OptionError: it has no images, or an option does not fit it or this machine.
    """

    def __init__(self, path: Path, options: BenchOptions) -> None:
        if not 0 < options.seconds < 86_400:
            raise OptionError(f"--seconds {options.seconds:g}: give a number above 0, the seconds that each part takes")
        file = read_header(path)
        if "images" not in file.fields:
            raise OptionError(
                f"{path}: has no dataset `images`, only {', '.join(file.fields) or 'none'}, and it is images that "
                f"bench loads. FastLoader gives what the file holds all the same; time your own loop over it."
            )
        self.path, self.options = path, options
        self.dataset = PackedDataset(path, options.split)
        self.batch_size = options.batch_size or max(1, min(BATCH_SIZE, len(self.dataset) // _LEAST_BATCHES))
        self.left_in_cache: list[float] = []
        data = PackedInput(self.dataset)
        self.crop = crop_for(data, options.size)
        # It looks at every option before anything is measured.
        self._loader: FastLoader | None = self.loader()
        self.device = torch.device(options.device or "cpu")
        self.image_shape = data.image_spec()[0]

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample, as read."""
        return sum(self.dataset.file.fields[name].row_bytes for name in self.dataset.fields)

    @property
    def first_row(self) -> int:
        """Row of the file that is the dataset's first sample."""
        return int(self.dataset.rows[0])

    @property
    def num_classes(self) -> int:
        """As the labels name them; 10 where they do not."""
        return len(self.dataset.classes) or 10

    def loader(self, dataset: PackedDataset | None = None, *, workers: int | None = None) -> FastLoader:
        """A new loader of the file, or of another dataset, with the options asked for, or so many workers."""
        options = self.options
        return FastLoader(
            dataset or self.dataset,
            self.batch_size,
            shuffle=options.shuffle,
            seed=options.seed,
            share=None,
            workers=workers or options.workers,
            device=options.device,
            # A Python transform makes the size itself.
            transform=() if self.crop is None or (dataset is not None and dataset.transform) else (self.crop,),
        )

    def kept(self) -> FastLoader:
        """The loader that warm passes share."""
        if self._loader is None:
            self._loader = self.loader()
        return self._loader

    def make_cold(self) -> None:
        """Drops the file from the page cache, where that is asked for, and remembers how much of it stayed."""
        if not self.options.cold:
            return
        self.close()  # mapped pages cannot be dropped
        left = drop(self.path)
        if left is not None:
            self.left_in_cache.append(left)

    def batches(self, loader: FastLoader) -> Iterator[Any]:
        """The batches of a pass: the first epoch again and again; cold only once, since a second one is warm."""
        return endless(loader, epochs=1 if self.options.cold else None, same=lambda: loader.set_epoch(0))

    def run(self, seconds: float, work: Callable[[Any], int]) -> Pass:
        """One pass of the loader, cold if that is asked for."""
        self.make_cold()
        return run_for(self.batches(self.kept()), seconds, work, discard=self.discard, settle=self.settle)

    @property
    def discard(self) -> int:
        """Batches of a pass that are not counted: one, unless an epoch has no more."""
        return 1 if len(self.kept()) > 1 else 0

    def settle(self) -> None:
        """Waits until the device has what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def first_batch(self) -> float:
        """Seconds from nothing to the first batch in hand: the file's header, a loader, threads, one batch."""
        self.make_cold()
        begin = time.perf_counter()
        loader = self.loader(PackedDataset(self.path, self.options.split))
        batch = next(iter(loader))
        self.settle()
        seconds = time.perf_counter() - begin
        del batch
        loader.close()
        return seconds

    def rows(self, most: int, seconds: float) -> list[NDArray[np.int64]]:
        """Rows of the file in the first batches of an epoch, at most so many or as come in so many seconds."""
        found: list[NDArray[np.int64]] = []
        loader = self.kept()
        loader.set_epoch(0)
        begin = time.perf_counter()
        for batch in loader:
            found.append(batch.rows.cpu().numpy().copy())
            if len(found) >= most or (len(found) > 1 and time.perf_counter() - begin > seconds):
                break
        return found

    def close(self) -> None:
        """Closes the loader; another pass opens it again."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None
