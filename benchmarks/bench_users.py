"""What a user meets: batches of images in their own sizes, a folder that is not packed yet, masks of another size.

    python benchmarks/bench_users.py                     all: a few minutes, 0.3 GB in .bench
    python benchmarks/bench_users.py --only list pad     some of: list, pad, padding, first-epoch, second-epoch, pairs,
                                                         pack-rate
    python benchmarks/bench_users.py --quick             few images, to see that it runs; the figures mean nothing

Photos of clothing (400x533 and 255 other sizes), or drawn ones without them; stored as their JPEG files.

`list`, `pad`: images/s of `FastLoader(batch=...)`, batches of 16, shuffled, over decoding alone with as many threads:
the same rows by the same reader, each batch into new arrays. `-resized`: [Resize(320), RandomHorizontalFlip()], over
decoding alone at full size; `-grouped`: group_by="aspect".
`padding`: part of padded batches of 16 that is no image, with group_by="aspect" and without.
`first-epoch`: a whole first epoch of `FastLoader(FOLDER)`, made, listed, its headers read, and packed meanwhile, over
one of a plain `DataLoader(num_workers=2)` that opens the files by Pillow; both cut 224x224 at random and flip. From
nothing to the last batch: what starts, starts within it.
`second-epoch`: the next epoch of that loader, when the packed file is there, over one of a loader of a file that
`fastload pack --store source` made beforehand.
`pairs`: 290 photos, 198 of their masks 0.43 times as wide and high: how many `--mask-size image` packs.
`pack-rate`: the rate that packing reports over images by the time that the call took, by an outer clock.
"""

from __future__ import annotations

import argparse
import builtins
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import harness
from fastload import FastLoader, List, PackedDataset, Pad, pack_images
from fastload.transforms import RandomHorizontalFlip, RandomResizedCrop, Resize

BATCH, SIDE, THREADS = 16, 224, 2
CUT = [RandomResizedCrop(SIDE), RandomHorizontalFlip()]


class PillowFolder(Dataset[tuple[torch.Tensor, int]]):
    """What many write: class folders, each file opened by Pillow, cut, resized and mirrored at random."""

    def __init__(self, folder: Path) -> None:
        classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [(path, at) for at, name in enumerate(classes) for path in sorted((folder / name).iterdir())]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        width, height = image.size
        for _ in range(10):
            area = width * height * float(torch.empty(1).uniform_(0.08, 1))
            ratio = float(torch.exp(torch.empty(1).uniform_(np.log(3 / 4), np.log(4 / 3))))
            w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
            if 0 < w <= width and 0 < h <= height:
                break
        else:
            w = h = min(width, height)
        left, top = int(torch.randint(0, width - w + 1, ())), int(torch.randint(0, height - h + 1, ()))
        cut = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=(left, top, left + w, top + h))
        pixels = torch.from_numpy(np.array(cut)).permute(2, 0, 1)
        return (pixels.flip(2) if torch.rand(()) < 0.5 else pixels).contiguous(), label


class Bench:
    """The figures by their names."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.journal = harness.begin(options, "pairs")
        self.photos = self._photos()
        self.count = sum(1 for _ in self.photos.rglob("*.jpg"))
        self.packed = options.data / f"users-{self.count}.h5"
        if not self.packed.exists():
            pack_images(self.photos, self.packed, store="source")
        self.about = {"images": self.count, "store": "source"}

    def _photos(self) -> Path:
        if self.options.photos.exists() and not self.options.quick:
            return harness.unpacked_photos(self.options.photos, self.options.data) / "clothing" / "train"
        folder = self.options.data / "users-photos"
        if not folder.exists():
            rng = np.random.default_rng(0)
            for number in range(self.options.count):
                height, width = rng.integers(240, 420, 2).tolist()
                small = Image.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8))
                path = folder / f"class {number % 3}" / f"{number:04}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                small.resize((width, height), Image.Resampling.BICUBIC).save(path, quality=90)
        return folder

    def list(self) -> None:
        """Lists of images over decoding alone."""
        self._own_sizes(List(), [])
        self._own_sizes(List(), [Resize(320), RandomHorizontalFlip()])

    def pad(self) -> None:
        """Padded images over decoding alone."""
        self._own_sizes(Pad(), [])
        self._own_sizes(Pad(group_by="aspect"), [])
        self._own_sizes(Pad(), [Resize(320), RandomHorizontalFlip()])

    def _own_sizes(self, form: List | Pad, transform: builtins.list[object]) -> None:
        with_loader = FastLoader(self.packed, BATCH, batch=form, transform=transform, workers=THREADS)

        def loaded() -> float:
            begin, images = time.perf_counter(), 0
            for batch in with_loader:
                images += len(batch.rows)
            return images / (time.perf_counter() - begin)

        alone = DecodingAlone(self.packed, len(with_loader))
        for way in (loaded, alone.rate):
            way()
        result = harness.compare(loaded, alone.rate, pairs=self.options.pairs)
        name = type(form).__name__.lower() + ("-resized" if transform else "-grouped" if form.group_by else "")
        base = "decoding alone, as many threads"
        self.journal.note(name, target="" if transform else ">= 0.85", file=self.about, base_is=base, **result)
        with_loader.close()

    def padding(self) -> None:
        """The part of padded batches that is no image."""
        found = {}
        for form in (Pad(), Pad(group_by="aspect")):
            loader = FastLoader(self.packed, BATCH, batch=form)
            padded = image = 0
            for batch in loader:
                padded += batch[0][:, 0].numel()
                image += int(batch.sizes.prod(1).sum())
            found["grouped" if form.group_by else "alone"] = 1 - image / padded
            loader.close()
        self.journal.note("padding", file=self.about, **found)

    def first_epoch(self) -> None:
        """A first epoch from the folder over a plain DataLoader's."""

        def ours() -> float:
            cache = self._no_cache()
            begin = time.perf_counter()
            loader = FastLoader(PackedDataset.from_folder(self.photos, cache_dir=cache), BATCH, transform=CUT)
            images = sum(len(batch.rows) for batch in loader)
            seconds = time.perf_counter() - begin
            loader.close()
            return images / seconds

        def plain() -> float:
            begin = time.perf_counter()
            loader = DataLoader(PillowFolder(self.photos), BATCH, shuffle=True, num_workers=2, drop_last=True)
            images = sum(len(labels) for _, labels in loader)
            return images / (time.perf_counter() - begin)

        for way in (ours, plain):
            way()
        result = harness.compare(ours, plain, pairs=self.options.pairs)
        base = "a plain DataLoader(num_workers=2), Pillow"
        self.journal.note("first-epoch", target=">= 1.3", file=self.about, base_is=base, **result)

    def second_epoch(self) -> None:
        """An epoch after packing in the background over one of a file that was packed beforehand."""
        folder = PackedDataset.from_folder(self.photos, cache_dir=self._no_cache())
        loader = FastLoader(folder, BATCH, transform=CUT)
        for _ in loader:
            pass
        output = loader.dataset.output  # type: ignore[attr-defined]
        while not output.exists():
            time.sleep(0.1)
        before = FastLoader(self.packed, BATCH, transform=CUT)

        def rate(of: FastLoader) -> float:
            begin = time.perf_counter()
            return sum(len(batch.rows) for batch in of) / (time.perf_counter() - begin)

        for one in (loader, before):
            rate(one)
        result = harness.compare(lambda: rate(loader), lambda: rate(before), pairs=self.options.pairs)
        self.journal.note("second-epoch", target=">= 1.0", file=self.about, base_is="packed beforehand", **result)

    def pairs(self) -> None:
        """How many pairs of images and masks of another size are packed."""
        folder = self.options.data / "users-pairs"
        shutil.rmtree(folder, ignore_errors=True)
        rng, total, smaller = np.random.default_rng(0), 290, 198
        for number in range(total):
            height, width = rng.integers(400, 700, 2).tolist()
            for name in ("images", "masks"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            small = Image.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8))
            small.resize((width, height)).save(folder / "images" / f"{number:03}.jpg")
            mask = np.zeros((height, width), np.uint8)
            mask[height // 4 : height // 2, width // 4 : width // 2] = 255
            size = (round(0.43 * width), round(0.43 * height)) if number < smaller else (width, height)
            Image.fromarray(mask).resize(size, Image.Resampling.NEAREST).save(folder / "masks" / f"{number:03}.png")
        output, said = self.options.data / "users-pairs.h5", ""
        try:
            pack_images(folder, output, overwrite=True)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is what the user reads
            said = str(error)
        report = pack_images(folder, output, mask_size="image", overwrite=True)
        values = {"packed": report.num_samples, "option_named": "--mask-size image" in said}
        self.journal.note("pairs", target="290", file={"pairs": total, "smaller_masks": smaller}, **values)

    def pack_rate(self) -> None:
        """The reported rate over images by an outer clock."""
        ratios = []
        for store in ("raw", "source"):
            for _ in range(self.options.pairs):
                output = self.options.data / "users-rate.h5"
                output.unlink(missing_ok=True)
                begin = time.perf_counter()
                report = pack_images(self.photos, output, store=store, size=SIDE if store == "raw" else None)
                seconds = time.perf_counter() - begin
                ratios.append(report.images_per_s / (report.num_samples / seconds))
        spread = {"lowest": min(ratios), "median": float(np.median(ratios)), "highest": max(ratios)}
        self.journal.note("pack-rate", target="0.98 to 1.02", file=self.about, ratio={**spread, "count": len(ratios)})

    def _no_cache(self) -> Path:
        cache = self.options.data / "users-cache"
        shutil.rmtree(cache, ignore_errors=True)
        return cache


class DecodingAlone:
    """Threads that decode the rows of a packed file, batch by batch, into new arrays, and hand nothing over."""

    def __init__(self, path: Path, batches: int) -> None:
        self.reader = PackedDataset(path, fields=["images"]).open_reader("map", cache_chunks=1, windows=False)
        self.rows = np.random.default_rng(0).permutation(self.reader.file.num_rows)[: batches * BATCH].astype(np.int64)

    def rate(self) -> float:
        """Images a second."""
        coming, turn = iter(np.split(self.rows, len(self.rows) // BATCH)), threading.Lock()

        def next_rows() -> NDArray[np.int64] | None:
            with turn:
                return next(coming, None)

        def work() -> None:
            while (rows := next_rows()) is not None:
                self.reader.decoded("images", rows)

        begin = time.perf_counter()
        in_parallel(work, THREADS)
        return len(self.rows) / (time.perf_counter() - begin)


def in_parallel(work: Callable[[], None], count: int) -> None:
    """Calls a function in so many threads, and waits for them."""
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


FIGURES = ("list", "pad", "padding", "first_epoch", "second_epoch", "pairs", "pack_rate")


def main() -> None:
    """Measure what the command line asks for."""
    parser = harness.command_line("Measure what a user meets.", "users", figures=FIGURES, pairs=7)
    default = harness.ROOT.parent / "shared" / "data" / "clothing" / "clothing.tar"
    parser.add_argument("--photos", type=Path, default=default, help="the clothing photos, a folder or their tar")
    parser.add_argument("--count", type=int, default=1800, help="drawn photos, where those are absent (default: 1,800)")
    options = parser.parse_args()
    if options.quick:
        options.count, options.pairs = 60, 1
    bench = Bench(options)
    harness.take_figures(bench, [figure.replace("-", "_") for figure in options.only])


if __name__ == "__main__":
    main()
