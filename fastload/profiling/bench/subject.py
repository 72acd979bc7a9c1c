"""The file under test: makes loaders of it, with a warm or a cold page cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.dataset import PackedDataset
from fastload.errors import OptionError
from fastload.loader.loader import FastLoader
from fastload.options.measure import BenchOptions
from fastload.prefetch.inputs import Input, PackedInput
from fastload.profiling.bench.passes import TimedPass, repeat_epochs, run_for
from fastload.remote.urls import is_url
from fastload.system import native
from fastload.system.advice import advice
from fastload.system.files import drop
from fastload.transforms import RandomResizedCrop

SIZE = 224
"""Side of the crop for images that differ in size, by default."""


class Subject:
    """The file under test (any that `FastLoader` reads) with the options to load it. Call `close` at the end.

    Attributes:
        crop: the loader's only transform; None: it has none.
        image_shape: (C, H, W) of the file's images, 0 where they differ.
        why_slow: why its loader decodes or crops slowly on this machine; empty if it does not.

    Raises:
        MissingFileError, FormatError: the file is missing or cannot be read.
        OptionError: it has no images, or an option does not fit it or this machine.
    """

    def __init__(self, path: Path | str, options: BenchOptions) -> None:
        if not 0 < options.seconds < 86_400:
            raise OptionError(f"--seconds {options.seconds:g}: give a number above 0, the seconds for each part")
        if is_url(path) and (options.cold or options.compare or options.faults):
            raise OptionError(
                f"{path}: --cold, --compare and --inject are for files of this machine. Leave them out; an empty cache "
                f"is as cold as it gets (FASTLOAD_CACHE=FOLDER, or `fastload cache clear {path}`)."
            )
        self.dataset = PackedDataset(path, options.split)
        if "images" not in (fields := self.dataset.file.fields):
            raise OptionError(
                f"{path}: has no dataset `images`, only {', '.join(fields) or 'none'}, and bench loads images. "
                f"FastLoader can still load this file; time your own loop over it."
            )
        self.path, self.options = path, options
        self.batch_size = options.batch_size or default_batch_size(len(self.dataset))
        self.left_in_cache: list[float] = []
        data = PackedInput(self.dataset)
        self.crop = crop_for(data, options.size)
        # The loader checks its options, so wrong ones fail before anything is measured.
        self._loader: FastLoader | None = self.loader()
        self.device = torch.device(options.device or "cpu")
        on_cpu = data.ragged or (self.crop is not None and self.device.type == "cpu")
        self.why_slow = native.why_slow(data.seems_to_have_jpegs) if on_cpu else ""
        self.image_shape = data.image_spec()[0]

    @property
    def first_row(self) -> int:
        """Row in the file of the dataset's first sample."""
        return int(self.dataset.rows[0])

    def loader(self, dataset: PackedDataset | None = None, *, workers: int | None = None) -> FastLoader:
        """Returns a new loader of the file, or of another dataset, optionally with another number of workers."""
        options = self.options
        with native.said_elsewhere():  # the results say it
            return FastLoader(
                dataset or self.dataset,
                self.batch_size,
                shuffle=options.shuffle,
                seed=options.seed,
                share=None,
                workers=workers or options.workers,
                device=options.device,
                # A dataset with a Python transform crops in that transform.
                transform=() if self.crop is None or (dataset is not None and dataset.transform) else (self.crop,),
            )

    def shared_loader(self) -> FastLoader:
        """Returns the loader that all warm passes use."""
        if self._loader is None:
            self._loader = self.loader()
        return self._loader

    def make_cold(self) -> None:
        """With `options.cold`, drops the file from the page cache and records how much of it stayed."""
        if self.options.cold:
            self.close()  # mapped pages cannot be dropped
            left = [share for path in self.dataset.file.files if (share := drop(path)) is not None]
            if left:
                self.left_in_cache.append(max(left))

    @property
    def epochs(self) -> int | None:
        """Epochs of a pass or a loop: one if cold, since a second would be warm; None: no limit."""
        return 1 if self.options.cold else None

    def run(
        self,
        seconds: float,
        work: Callable[[Any], int],
        *,
        loader: FastLoader | None = None,
        finish: Callable[[], object] | None = None,
        multiple: int = 1,
    ) -> TimedPass:
        """Runs one pass over the next epochs of a loader, by default the shared one, cold if that was asked for.

        `work` is called with each batch, and returns its number of samples. `finish` waits until all of it is done. The
        pass ends after a multiple of so many batches, when its time is over.
        """
        self.make_cold()
        loader = loader or self.shared_loader()
        batches = repeat_epochs(loader, epochs=self.epochs)
        return run_for(
            batches, seconds, work, discard=int(len(loader) > 1), synchronize=finish or self.synchronize,
            enough=lambda batches, samples, taken_s: batches >= 2 and batches % multiple == 0,
        )  # fmt: skip

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rows(self, most: int, seconds: float) -> list[NDArray[np.int64]]:
        """Returns the rows of the first batches of an epoch: at most `most` batches, or those loaded in `seconds`."""
        found, loader = list[NDArray[np.int64]](), self.shared_loader()
        loader.set_epoch(0)
        begin = time.perf_counter()
        for batch in loader:
            found.append(batch.rows.cpu().numpy().copy())
            if len(found) >= most or (len(found) > 1 and time.perf_counter() - begin > seconds):
                break
        return found

    def close(self) -> None:
        """Closes the shared loader; the next pass makes another one."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None


def default_batch_size(num_samples: int) -> int:
    return max(1, min(256, num_samples // 8))


def crop_for(data: Input, size: int | Sequence[int] | None) -> RandomResizedCrop | None:
    """Returns the crop for these data: of the size asked for, else 224 if images differ in size, else None."""
    if size is None and data.varied:
        size = SIZE
    return None if size is None else RandomResizedCrop(size)


def crop_call(crop: RandomResizedCrop) -> str:
    """Returns the Python expression for a crop, such as `RandomResizedCrop(224)`."""
    height, width = crop.size
    return f"RandomResizedCrop({height if height == width else (height, width)})"


def crop_text(crop: RandomResizedCrop, size: int | Sequence[int] | None) -> str:
    """Returns a sentence on what the crop does to the images, and why there is one unless its size was asked for."""
    why = "" if size is not None else f", {advice('another size')}"
    return f"{crop_call(crop)} makes them {crop.size[0]} x {crop.size[1]}{why}"


class CropSample:
    """A transform for a plain `DataLoader`'s workers: crops and resizes a sample's image, and calls `then`."""

    def __init__(self, size: tuple[int, int], then: Any = None) -> None:
        self._size, self._then = size, then

    def __call__(self, sample: tuple[Any, ...]) -> tuple[Any, ...]:
        image, *others = sample  # (C, H, W)
        top, left, height, width = random_window(*image.shape[1:])
        part = image[None, :, top : top + height, left : left + width]
        part = part if part.dtype == torch.uint8 else part.to(torch.float32)
        resized = torch.nn.functional.interpolate(part, self._size, mode="bilinear", antialias=True)
        if resized.dtype != image.dtype:
            resized = resized.round().to(image.dtype)
        cropped = (resized[0], *others)
        return cropped if self._then is None else self._then(cropped)


def random_window(height: int, width: int) -> tuple[int, int, int, int]:
    """Draws a window (top, left, height, width) as `RandomResizedCrop` does, from torch's generator."""
    for _ in range(10):
        area, log_ratio, down, right = torch.rand(4).tolist()
        area = height * width * (0.08 + 0.92 * area)
        ratio = (4 / 3) ** (2 * log_ratio - 1)  # 3 / 4 to 4 / 3
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            return int(down * (height - tall + 1)), int(right * (width - wide + 1)), tall, wide
    # No such window fits: take the largest central window with the nearest ratio that fits, as torchvision does.
    tall, wide = min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))
    return (height - tall) // 2, (width - wide) // 2, tall, wide
