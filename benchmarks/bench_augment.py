"""How fast are batches augmented on the CPU, by the threads that read them?

    python benchmarks/bench_augment.py                  everything: about six minutes, 1 GB of disk in .bench
    python benchmarks/bench_augment.py --only resize    some of it (names below)
    python benchmarks/bench_augment.py --quick          tiny sizes, to see that it runs; the figures mean nothing

256x256x3 photo-like images, RandomResizedCrop 224 and a flip, two threads, page cache warm, batch 256:

`resize`, `resize-train`, `resize-python`: FastLoader, uint8 out, antialiased, over cv2.resize alone (bilinear, which
does not antialias) of the same windows in two threads; while the main thread is idle, trains a small net, or runs pure
Python.
`resize-kernel`: the loop that resizes a batch, by itself, over the same; what the loader adds is left out.
`resize-antialiased`: FastLoader over cv2.resize with INTER_AREA, which averages when it shrinks.
`normalized`: the same with Normalize to float32, over Pillow transforms in a plain `DataLoader(num_workers=2)`.
`normalized-opencv`: the same over OpenCV in a plain `DataLoader(num_workers=2)`, not antialiased.
`jitter`: the same with ColorJitter(0.4, 0.4, 0.4, 0.1) over Pillow's enhancers in a plain `DataLoader(num_workers=2)`.
`window-only`: the crop taken from the mapping over gathering whole rows first.

A figure is the median of paired ratios with its range; rates are images/s.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cv2
import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch.utils.data import DataLoader, Dataset

import fastload
import harness
from fastload import FastLoader, PackedDataset
from fastload.prefetch.stages.gather import MappedImages
from fastload.transforms import ColorJitter, Draws, Normalize, RandomHorizontalFlip, RandomResizedCrop
from fastload.transforms.engine.placement import Placement
from fastload.transforms.engine.resample import place_batch
from fastload.transforms.geometry import joint_placement

BATCH_SIZE, SIDE, THREADS = 256, 224, 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
GEOMETRY = [RandomResizedCrop(SIDE), RandomHorizontalFlip()]
NORMALIZE = Normalize(MEAN, STD)
Window = tuple[int, int, int, int]


def drawn_window(height: int, width: int, scale: tuple[float, float] = (0.08, 1)) -> Window:
    """Top, left, height and width as RandomResizedCrop draws them, from `random`."""
    for _ in range(10):
        area = height * width * random.uniform(*scale)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        high, wide = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < high <= height and 0 < wide <= width:
            return random.randint(0, height - high), random.randint(0, width - wide), high, wide
    return 0, 0, height, width


class Plain(Dataset[torch.Tensor]):
    """The packed images one by one, transformed in Python as scripts do it: by Pillow or by OpenCV."""

    def __init__(self, path: Path, way: str) -> None:
        self.images = PackedDataset(path, fields=("images",))
        self.way = way

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        (image,) = self.images[index]
        pixels = image.permute(1, 2, 0).numpy()
        top, left, height, width = drawn_window(*pixels.shape[:2])
        if self.way == "opencv":
            cv2.setNumThreads(0)
            resized = cv2.resize(pixels[top : top + height, left : left + width], (SIDE, SIDE))
            resized = cv2.flip(resized, 1) if random.random() < 0.5 else resized
        else:
            box = (left, top, left + width, top + height)
            photo = Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)
            if random.random() < 0.5:
                photo = photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            resized = np.array(self.jittered(photo) if self.way == "pillow-jitter" else photo)
        tensor = torch.from_numpy(np.ascontiguousarray(resized.transpose(2, 0, 1))).to(torch.float32).div_(255)
        for channel, mean, std in zip(tensor, MEAN, STD, strict=True):
            channel.sub_(mean).div_(std)
        return tensor

    def jittered(self, photo: Image.Image) -> Image.Image:
        """Brightness, contrast and saturation by Pillow, hue by a shift in its HSV, in an order of the image's own."""
        steps: list[Callable[[Image.Image], Image.Image]] = [
            functools.partial(lambda enhancer, p: enhancer(p).enhance(random.uniform(0.6, 1.4)), enhancer)
            for enhancer in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
        ]
        random.shuffle(steps := [*steps, shifted_hue])
        for step in steps:
            photo = step(photo)
        return photo


def shifted_hue(photo: Image.Image) -> Image.Image:
    """The photo with its hue turned by up to a tenth, either way."""
    hue, saturation, value = photo.convert("HSV").split()
    turned = (np.asarray(hue) + np.uint8(round(random.uniform(-0.1, 0.1) * 255) % 256)).astype(np.uint8)
    return Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")


class Bench:
    """The figures, each a method that measures and notes it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.journal = harness.Journal(options.out, quick=options.quick, pairs=options.pairs, batch_size=BATCH_SIZE)
        self.path = options.data / f"photos-{options.rows}.h5"
        if not self.path.exists():
            faces = harness.drawn_faces(options.data / f"faces-{max(256, options.rows)}", max(256, options.rows))
            fastload.pack_images(faces, self.path, size=256, limit=options.rows)
        self.file = {"rows": options.rows, "shape": [256, 256, 3]}
        self.images = PackedDataset(self.path, fields=("images",))
        self.loaders: dict[tuple[str, bool], FastLoader] = {}

    def epoch(self, transform: list[Any], *, windows: bool = True) -> float:
        """Images/s of FastLoader over an epoch that is not its first, from its first batch to its last.

        In the first one the slots' memory is touched for the first time, which a page fault each pays for.
        """
        loader = self.loaders.get((str(transform), windows))
        if loader is None:
            mapped = MappedImages.open
            with patch.object(MappedImages, "open", mapped if windows else lambda *_: False):
                loader = FastLoader(
                    self.images, min(BATCH_SIZE, self.options.rows // 4), workers=THREADS, transform=transform
                )
                for _ in loader:
                    pass
            self.loaders = {(str(transform), windows): loader} | dict(list(self.loaders.items())[:1])
        batches = iter(loader)
        next(batches)
        begun, count = time.perf_counter(), 0
        for (images,) in batches:
            count += len(images)
            harness.touch(images.permute(0, 2, 3, 1).view(torch.uint8).numpy())
        return count / (time.perf_counter() - begun)

    def by_threads(self, work: Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], None]) -> float:
        """Images/s of two threads that resize windows, drawn beforehand, of images that lie in memory."""
        count = min(self.options.rows, 4 * BATCH_SIZE)
        rows = np.random.default_rng(0).permutation(self.options.rows)[:count]
        parts = np.array_split(np.arange(count), THREADS)
        threads = [threading.Thread(target=work, args=(rows[part], part)) for part in parts]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return count / (time.perf_counter() - begun)

    @functools.cached_property
    def source(self) -> np.ndarray[Any, Any]:
        """All images in memory, (N, 256, 256, 3)."""
        rows = np.arange(self.options.rows)
        return np.stack([sample[0].permute(1, 2, 0).numpy() for sample in self.images.__getitems__(rows.tolist())])

    @functools.cached_property
    def placement(self) -> Placement:
        """Windows and flips as the transforms draw them, of some of the images."""
        draws = Draws(0, 0, np.arange(min(self.options.rows, 4 * BATCH_SIZE)))
        return joint_placement(enumerate(GEOMETRY), np.array([[256, 256]]), draws)

    def opencv(self, interpolation: int = cv2.INTER_LINEAR) -> float:
        """Images/s of cv2.resize, nothing else, in two threads, each into memory that is used again."""
        cv2.setNumThreads(0)

        def work(rows: np.ndarray[Any, Any], places: np.ndarray[Any, Any]) -> None:
            output = np.zeros((64, SIDE, SIDE, 3), np.uint8)
            windows = self.placement.table()[places, :4].tolist()
            for number, (row, (top, left, height, width)) in enumerate(zip(rows.tolist(), windows, strict=True)):
                window = self.source[row, top : top + height, left : left + width]
                cv2.resize(window, (SIDE, SIDE), dst=output[number % 64], interpolation=interpolation)

        return self.by_threads(work)

    def one_loop(self) -> float:
        """Images/s of the loop that places a batch, in two threads."""

        def work(rows: np.ndarray[Any, Any], places: np.ndarray[Any, Any]) -> None:
            output = torch.zeros((64, SIDE, SIDE, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
            begin = int(places[0])
            for first in range(0, len(rows), 64):
                part = rows[first : first + 64]
                placement = self.placement.part(slice(begin + first, begin + first + len(part)))
                place_batch(torch.from_numpy(self.source), part, placement, output[: len(part)])

        return self.by_threads(work)

    def plain(self, way: str) -> float:
        """Images/s of a plain DataLoader with two workers, from its second batch on."""
        count = min(self.options.rows, self.options.plain_rows)
        loader = DataLoader(
            torch.utils.data.Subset(Plain(self.path, way), range(count)),
            batch_size=min(64, count // 4), shuffle=True, num_workers=2, drop_last=True,
        )  # fmt: skip
        batches = iter(loader)
        next(batches)
        begun = time.perf_counter()
        done = sum(len(images) for images in batches)
        return done / (time.perf_counter() - begun)

    def note(self, figure: str, way: harness.Way, base: harness.Way, *, target: str = "", base_name: str) -> None:
        """Measure a pair and write it down."""
        result = harness.compare(way, base, pairs=self.options.pairs)
        self.journal.note(figure, target=target, file=self.file, base_name=base_name, **result)

    def resize(self) -> None:
        for figure, kind in (("resize", "idle"), ("resize-train", "train"), ("resize-python", "python")):
            busy = harness.Busy(kind)
            self.note(
                figure,
                functools.partial(busy.rate_beside, functools.partial(self.epoch, GEOMETRY)),
                functools.partial(busy.rate_beside, self.opencv),
                target=">= 0.8" if kind == "idle" else "",
                base_name="cv2.resize alone, bilinear, 2 threads",
            )
        self.note("resize-kernel", self.one_loop, self.opencv, base_name="cv2.resize alone, bilinear, 2 threads")
        self.note(
            "resize-antialiased",
            functools.partial(self.epoch, GEOMETRY),
            functools.partial(self.opencv, cv2.INTER_AREA),
            base_name="cv2.resize alone, INTER_AREA, 2 threads",
        )

    def normalized(self) -> None:
        way = functools.partial(self.epoch, [*GEOMETRY, NORMALIZE])
        plain = "in DataLoader(num_workers=2)"
        self.note(
            "normalized", way, functools.partial(self.plain, "pillow"), target=">= 8", base_name=f"Pillow {plain}"
        )
        self.note("normalized-opencv", way, functools.partial(self.plain, "opencv"), base_name=f"OpenCV {plain}")
        self.note(
            "jitter",
            functools.partial(self.epoch, [*GEOMETRY, ColorJitter(0.4, 0.4, 0.4, 0.1), NORMALIZE]),
            functools.partial(self.plain, "pillow-jitter"),
            base_name=f"Pillow {plain}",
        )

    def window_only(self) -> None:
        self.note(
            "window-only",
            functools.partial(self.epoch, GEOMETRY),
            functools.partial(self.epoch, GEOMETRY, windows=False),
            base_name="whole rows gathered first",
        )


FIGURES = ("resize", "normalized", "window-only")


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description="Measure augmentation on the CPU.")
    parser.add_argument(
        "--only", nargs="+", choices=FIGURES, default=FIGURES, metavar="FIGURE", help=", ".join(FIGURES)
    )
    parser.add_argument("--data", type=Path, default=harness.ROOT / ".bench", help="folder for the data (.bench)")
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "augment.jsonl", help="JSON lines to append to")
    parser.add_argument("--rows", type=int, default=4096, help="images of 256x256x3 (default: 4,096)")
    parser.add_argument("--plain-rows", type=int, default=1536, help="images an epoch of the plain DataLoader")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.plain_rows, options.pairs = 64, 64, 1
    multiprocessing.set_start_method("forkserver")  # for both ways: a plain loader would settle it otherwise
    # Imported once, and not by each worker of each epoch, which takes 10 s an epoch and is not measured.
    multiprocessing.set_forkserver_preload(["fastload.prefetch.sample_worker", "cv2"])
    torch.set_num_threads(1)  # the trained net must not occupy the core that reads
    bench = Bench(options)
    for name in options.only:
        getattr(bench, name.replace("-", "_"))()


if __name__ == "__main__":
    main()
