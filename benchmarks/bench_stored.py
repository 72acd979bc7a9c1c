"""How fast are images of several sizes, stored JPEGs and compressed masks read, and `--store source` packed?

    python benchmarks/bench_stored.py                  everything: about ten minutes, 3 GB of disk in .bench
    python benchmarks/bench_stored.py --only jpeg      some of it (names below)
    python benchmarks/bench_stored.py --quick          tiny sizes, to see that it runs; the figures mean nothing

Photos: the clothing photos of `--photos` (a folder, or a tar; ../shared/data/clothing/clothing.tar by default), and
photos of 1,200 x 1,600 pixels made of nine of them each, JPEG at quality 90. RandomResizedCrop(224) and a flip, uint8
out, two threads, page cache warm, batches of `--batch-size`:

`ragged`: pixels of several sizes, over cv2.resize alone (bilinear, not antialiased) of the same windows from memory, in
two threads; while the main thread is idle, trains a small net, or runs pure Python. `ragged-area`: over INTER_AREA.
`jpeg`: their own JPEGs (`--store source`), over simplejpeg and cv2.resize alone, in two threads, likewise.
`jpeg-made`: JPEGs made by fastload (`--store jpeg:90`, with restart markers), over the same of those very JPEGs.
`jpeg-large`: the large photos, over the same.
`folder`, `folder-large`: their own JPEGs over a plain `DataLoader(num_workers=2)` of the folder with Pillow.
`folder-large-made`: JPEGs made by fastload, over the same.
`pack`: `fastload pack --store source` over `cp -r` of the same files, whole commands.
`masks`: images with masks of `--masks` (CamVid by default) with zstd masks over raw ones: images/s, and size.
`memory`: the most memory a loader takes beyond its ring and what Python and torch take: pixels of several sizes, JPEGs,
pixels read without a mapping, and a crop with padding, which is done image by image.

A figure is the median of paired ratios with its range; rates are images/s.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import h5py
import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import fastload
import harness
from bench_augment import drawn_window
from fastload import FastLoader, PackedDataset
from fastload.transforms import RandomHorizontalFlip, RandomResizedCrop

SIDE, THREADS = 224, 2
GEOMETRY = [RandomResizedCrop(SIDE), RandomHorizontalFlip()]
SHARED = harness.ROOT.parent / "shared" / "data"
Kinds = Sequence[tuple[str, str]]
BUSY: Kinds = (("", "idle"), ("-train", "train"), ("-python", "python"))


class Folder(Dataset[torch.Tensor]):
    """JPEG files, decoded, cropped, resized and mirrored by Pillow as torchvision's transforms do it."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self.files[index]) as file:
            photo = file.convert("RGB")
        top, left, height, width = drawn_window(photo.height, photo.width)
        photo = photo.crop((left, top, left + width, top + height)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            photo = photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(photo)).permute(2, 0, 1).contiguous()


class Alone:
    """Images that lie in memory, as pixels or as JPEG, made into windows by OpenCV in two threads and nothing else."""

    def __init__(self, images: Sequence[Any], sizes: Sequence[tuple[int, int]]) -> None:
        random.seed(0)
        self.images = images
        self.windows = [drawn_window(*size) for size in sizes]

    def rate(self, count: int, interpolation: int = cv2.INTER_LINEAR) -> float:
        """Images/s over so many of them."""
        cv2.setNumThreads(0)
        order = np.random.default_rng(0).permutation(len(self.images))
        parts = np.array_split(np.resize(order, count), THREADS)
        threads = [threading.Thread(target=self._work, args=(part.tolist(), interpolation)) for part in parts]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return count / (time.perf_counter() - begun)

    def _work(self, places: list[int], interpolation: int) -> None:
        output = np.zeros((64, SIDE, SIDE, 3), np.uint8)
        for number, place in enumerate(places):
            image = self.images[place]
            pixels = simplejpeg.decode_jpeg(image) if isinstance(image, bytes) else image
            top, left, height, width = self.windows[place]
            window = pixels[top : top + height, left : left + width]
            cv2.resize(window, (SIDE, SIDE), dst=output[number % 64], interpolation=interpolation)


class Bench:
    """The figures, each a method that measures and notes it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.journal = harness.begin(options, "pairs", "batch_size")
        self.data: Path = options.data
        self.loaders: dict[Path, FastLoader] = {}

    @functools.cached_property
    def photos(self) -> list[Path]:
        """The clothing photos as files."""
        found = sorted(harness.unpacked_photos(self.options.photos, self.data).rglob("*.jpg"))
        step = max(1, len(found) // self.options.rows)
        return found[::step][: self.options.rows]

    @functools.cached_property
    def chosen(self) -> Path:
        """A folder of those photos."""
        return self._folder(f"photos-{len(self.photos)}", lambda folder: self._linked(folder, self.photos))

    @functools.cached_property
    def large(self) -> Path:
        """A folder of photos of 1,200 x 1,600 pixels, nine of the clothing photos each."""
        count = max(8, len(self.photos) // 6)

        def make(folder: Path) -> None:
            choice = random.Random(0)
            for number in range(count):
                sheet = Image.new("RGB", (1200, 1600))
                for place, path in enumerate(choice.choices(self.photos, k=9)):
                    with Image.open(path) as file:
                        photo = file.convert("RGB").resize((400, 534))
                    sheet.paste(photo, (400 * (place % 3), 533 * (place // 3)))
                sheet.save(folder / f"{number:05d}.jpg", quality=90)

        return self._folder(f"large-{count}", make)

    def _folder(self, name: str, make: Callable[[Path], None]) -> Path:
        folder = self.data / name
        if not folder.exists():
            part = folder.with_name(f"{name}.part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            make(part)
            part.rename(folder)
        return folder

    def _linked(self, folder: Path, files: Sequence[Path]) -> None:
        for number, path in enumerate(files):
            (folder / f"{number:05d}.jpg").hardlink_to(path)

    def packed(self, folder: Path, store: str) -> Path:
        """The folder packed in that way."""
        path = self.data / f"{folder.name}-{store.replace(':', '')}.h5"
        if not path.exists():
            fastload.pack_images(folder, path, store=store)
        return path

    def epoch(self, path: Path) -> float:
        """Images/s of FastLoader over an epoch that is not its first, from its first batch to its last."""
        loader = self.loaders.get(path)
        if loader is None:
            images = PackedDataset(path, fields=("images",))
            loader = FastLoader(
                images, min(self.options.batch_size, len(images) // 4), workers=THREADS, transform=GEOMETRY
            )
            for _ in loader:
                pass
            self.loaders = {path: loader}
        batches = iter(loader)
        next(batches)
        begun, count = time.perf_counter(), 0
        for (images,) in batches:
            count += len(images)
            harness.touch(images.permute(0, 2, 3, 1).numpy())
        return count / (time.perf_counter() - begun)

    def plain(self, folder: Path) -> float:
        """Images/s of a plain DataLoader of the folder with two workers, from its second batch on."""
        files = sorted(folder.glob("*.jpg"))
        files = files[: self.options.plain_rows]
        loader = DataLoader(
            Folder(files), batch_size=min(64, len(files) // 4), shuffle=True, num_workers=2, drop_last=True
        )
        batches = iter(loader)
        next(batches)
        begun = time.perf_counter()
        done = sum(len(images) for images in batches)
        return done / (time.perf_counter() - begun)

    def note(self, figure: str, way: harness.Way, base: harness.Way, *, target: str = "", **said: Any) -> None:
        """Measure a pair and write it down."""
        self.journal.note(figure, target=target, **said, **harness.compare(way, base, pairs=self.options.pairs))

    def ragged(self) -> None:
        path = self.packed(self.chosen, "raw")
        images = [row[0].permute(1, 2, 0).numpy() for row in PackedDataset(path, fields=("images",))]  # type: ignore[attr-defined]
        alone = Alone(images, [image.shape[:2] for image in images])
        self._beside("ragged", path, alone, ">= 0.7", "cv2.resize alone, bilinear, 2 threads")
        self.note(
            "ragged-area",
            functools.partial(self.epoch, path),
            functools.partial(alone.rate, len(images), cv2.INTER_AREA),
            file=_described(path),
            base_name="cv2.resize alone, INTER_AREA, 2 threads",
        )

    def _jpeg(self, figure: str, path: Path, target: str, kinds: Kinds = BUSY) -> None:
        with h5py.File(path) as file:
            places = zip(file["images_offset"][()].tolist(), file["images_bytes"][()].tolist(), strict=True)
            images = [file["images"][at : at + size].tobytes() for at, size in places]
            sizes = [tuple(shape[:2]) for shape in file["images_shape"][()].tolist()]
        base_name = "simplejpeg and cv2.resize alone, bilinear, 2 threads"
        self._beside(figure, path, Alone(images, sizes), target, base_name, kinds)

    def _beside(self, figure: str, path: Path, alone: Alone, target: str, base_name: str, kinds: Kinds = BUSY) -> None:
        """Notes a file's rate over that of the libraries alone, each beside a main thread that is busy in some way."""
        for end, kind in kinds:
            busy = harness.Busy(kind)
            self.note(
                f"{figure}{end}",
                functools.partial(busy.rate_beside, functools.partial(self.epoch, path)),
                functools.partial(busy.rate_beside, functools.partial(alone.rate, len(alone.images))),
                target=target if kind == "idle" else "",
                file=_described(path),
                base_name=base_name,
            )

    def jpeg(self) -> None:
        self._jpeg("jpeg", self.packed(self.chosen, "source"), ">= 0.9")

    def jpeg_made(self) -> None:
        self._jpeg("jpeg-made", self.packed(self.chosen, "jpeg:90"), "", BUSY[:1])

    def jpeg_large(self) -> None:
        self._jpeg("jpeg-large", self.packed(self.large, "source"), "> 1", BUSY[:1])

    def folder(self) -> None:
        for figure, folder, store, target in (
            ("folder", self.chosen, "source", ">= 1.6"),
            ("folder-large", self.large, "source", ">= 2.5"),
            ("folder-large-made", self.large, "jpeg:90", ">= 2.5"),
        ):
            path = self.packed(folder, store)
            self.note(
                figure,
                functools.partial(self.epoch, path),
                functools.partial(self.plain, folder),
                target=target,
                file=_described(path),
                base_name="JPEG folder, Pillow, DataLoader(num_workers=2)",
            )

    def pack(self) -> None:
        def make(folder: Path) -> None:
            for copy in range(self.options.copies):
                (folder / f"{copy:02d}").mkdir()
                self._linked(folder / f"{copy:02d}", self.photos)

        folder = self._folder(f"copies-{self.options.copies}-{len(self.photos)}", make)
        files = list(folder.rglob("*.jpg"))
        num_bytes = sum(path.stat().st_size for path in files)
        scratch = self.data / "scratch"

        def rate(command: list[str]) -> float:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            begun = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - begun
            shutil.rmtree(scratch)
            return num_bytes / seconds

        out = str(scratch / "out.h5")
        ours = harness.cli("pack", folder, out, "--store", "source")
        synced = f"cp -r {folder} {scratch}/copy && sync -f {scratch}"
        for figure, command, base_name in (
            ("pack", ["cp", "-r", str(folder), str(scratch / "copy")], "cp -r"),
            ("pack-synced", ["sh", "-c", synced], "cp -r and sync"),
        ):
            self.note(
                figure,
                functools.partial(rate, ours),
                functools.partial(rate, command),
                target=">= 0.5" if figure == "pack" else "",
                file={"files": len(files), "bytes": num_bytes},
                base_name=base_name,
            )

    def masks(self) -> None:
        source = self.options.masks
        if not source.exists():
            raise SystemExit(f"{source}: not there; name a dataset with masks by --masks")
        paths = {}
        for codec in ("none", "auto"):
            paths[codec] = self.data / f"masks-{codec}.h5"
            if not paths[codec].exists():
                fastload.pack_images(source, paths[codec], size=(360, 480), codec=codec)
        loaders = {
            codec: FastLoader(PackedDataset(path, fields=("images", "masks")), 32, workers=THREADS)
            for codec, path in paths.items()
        }

        def rate(codec: str) -> float:
            begun, count = time.perf_counter(), 0
            for _ in range(self.options.epochs):  # CamVid is small
                for images, masks in loaders[codec]:
                    count += len(images)
                    harness.touch(images.permute(0, 2, 3, 1).numpy())
                    harness.touch(masks.numpy())
            return count / (time.perf_counter() - begun)

        sizes = {}
        for codec, path in paths.items():
            with h5py.File(path) as file:
                sizes[codec] = int(file["masks"].id.get_storage_size())
        self.note(
            "masks",
            functools.partial(rate, "auto"),
            functools.partial(rate, "none"),
            target=">= 0.5",
            base_name="raw masks",
            size_over_raw=sizes["auto"] / sizes["none"],
            file=_described(paths["auto"]),
        )

    def memory(self) -> None:
        batch = str(min(self.options.batch_size, len(self.photos) // 4))
        for figure, store, read, way in (
            ("memory", "raw", "map", "crops"),
            ("memory-jpeg", "source", "map", "crops"),
            ("memory-pread", "raw", "pread", "crops"),
            ("memory-padding", "raw", "map", "padding"),
        ):
            path = self.packed(self.chosen, store)
            values = [harness.run_python(_MEMORY, str(path), batch, read, way)["beyond"] for _ in range(3)]
            self.journal.note(
                figure,
                target="<= 150 MB beyond the ring",
                file=_described(path),
                beyond_ring_bytes=harness.spread(values),
            )


_MEMORY = """
import json, os, sys, torch
import fastload.loader.loader
from fastload import FastLoader, PackedDataset
from fastload.profiling.meter.sampler import peak_memory
from fastload.profiling.meter.sampler import process_memory
from fastload.transforms import RandomCrop, RandomHorizontalFlip, RandomResizedCrop
path, batch, read, way = sys.argv[1:]
before = process_memory(os.getpid())
crop = RandomResizedCrop(224) if way == "crops" else RandomCrop(448, pad_if_needed=True)
images = PackedDataset(path, fields=("images",), read=read)
loader = FastLoader(images, int(batch), workers=2, transform=[crop, RandomHorizontalFlip()])
with peak_memory(os.getpid(), 0.01) as peak:
    for _ in range(2):
        for (images,) in loader:
            pass
ring = loader._producer.pool.ring
print(json.dumps({"beyond": peak[0] - before - len(ring.slots) * ring.slot_bytes}))
"""


def _described(path: Path) -> dict[str, Any]:
    with h5py.File(path) as file:
        rows = file["key"].shape[0]
    return {"rows": rows, "bytes": path.stat().st_size}


FIGURES = ("ragged", "jpeg", "jpeg-made", "jpeg-large", "folder", "pack", "masks", "memory")


def main() -> None:
    """Measure what the command line asks for."""
    parser = harness.command_line("Measure stores and codecs.", "stored", figures=FIGURES, pairs=7)
    parser.add_argument("--photos", type=Path, default=SHARED / "clothing" / "clothing.tar", help="folder or tar")
    parser.add_argument("--masks", type=Path, default=SHARED / "camvid" / "camvid.tar", help="dataset with masks")
    parser.add_argument("--rows", type=int, default=2530, help="clothing photos (default: 2,530)")
    parser.add_argument("--plain-rows", type=int, default=1024, help="photos an epoch of the plain DataLoader")
    parser.add_argument("--copies", type=int, default=8, help="times that each photo is packed by `pack`")
    parser.add_argument("--epochs", type=int, default=16, help="of `masks`, in one measurement")
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    if options.quick:
        options.rows, options.plain_rows, options.copies, options.pairs, options.epochs = 64, 32, 2, 1, 2
    multiprocessing.set_start_method("forkserver")  # for both ways: a plain loader would settle it otherwise
    torch.set_num_threads(1)  # the trained net must not occupy the core that reads
    harness.take_figures(Bench(options), options.only)


if __name__ == "__main__":
    main()
