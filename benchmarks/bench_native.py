"""How much faster is FastLoader with its compiled loops (`fastload/system/native.c`) than without them?

    python benchmarks/bench_native.py                  about three minutes, 3 GB in .bench
    python benchmarks/bench_native.py --only rows      one of: rows, small-rows, augment, faces, photos
    python benchmarks/bench_native.py --quick          tiny sizes, to see that it runs; the figures mean nothing

`rows`: shuffled pixels of 218x178x3, batches of 256; `small-rows`: of 32x32x3, batches of 1,024. `augment`: pixels of
256x256x3, RandomResizedCrop(224), flip, Normalize to float32, batches of 128. `faces`: stored JPEGs of 178x218,
RandomResizedCrop(128), batches of 256. `photos`: stored JPEGs of `--photos`, RandomResizedCrop(224), batches of 64.

The same loader of the same file in the same process, in turn with the loops and without; page cache warm, default
options; each byte of a batch is read. A figure is the median of paired ratios with its range; rates are images/s.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np

import fastload
import harness
from fastload import FastLoader
from fastload.system import native
from fastload.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop

SHARED = harness.ROOT.parent / "shared" / "data"
NORMALIZE = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
WITH = native.library, native.decodes_jpeg


def rate(path: Path, batch_size: int, transform: Iterable[object], *, compiled: bool) -> float:
    """Images/s of a loader's second epoch, with the compiled loops or without."""
    native.library, native.decodes_jpeg = WITH if compiled else (lambda: None, lambda: False)
    try:
        with closing(FastLoader(path, batch_size, transform=tuple(transform))) as loader:
            for _ in loader:
                pass
            loader.set_epoch(1)
            return harness.rate(harness.pixels_of(loader), harness.read_all)
    finally:
        native.library, native.decodes_jpeg = WITH


class Bench:
    """The figures, each a method that measures and notes it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.data = options, options.data
        self.journal = harness.begin(options, "pairs", page_cache="warm")

    def compare(self, figure: str, path: Path, batch_size: int, transform: Iterable[object] = ()) -> None:
        """Notes a file's loader with the loops over the same without."""
        ways = (functools.partial(rate, path, batch_size, transform, compiled=on) for on in (True, False))
        self.journal.note(figure, file={"path": path.name}, **harness.compare(*ways, pairs=self.options.pairs))

    def drawn(self, count: int, side: int) -> Path:
        """A packed file of noise."""
        path: Path = self.data / f"noise-{side}-{count}.h5"
        if not path.exists():
            images = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), np.uint8)
            arrays = path.with_suffix(".npz")
            np.savez(arrays, images=images, labels=np.arange(count) % 10)
            fastload.pack_images(arrays, path)
            arrays.unlink()
        return path

    def kept(self, folder: Path, name: str) -> Path:
        """A packed file of a folder's own JPEGs."""
        path: Path = self.data / f"{name}.h5"
        if not path.exists():
            fastload.pack_images(folder, path, store="source")
        return path

    def rows(self) -> None:
        """Pixels of 116 KB."""
        self.compare("rows", harness.packed_faces(self.data, self.options.count), 256)

    def small_rows(self) -> None:
        """Pixels of 3 KB."""
        self.compare("small-rows", self.drawn(8 * self.options.count, 32), 1024)

    def augment(self) -> None:
        """Pixels cropped, resized, turned and normalized."""
        transform = [RandomResizedCrop(224), RandomHorizontalFlip(), NORMALIZE]
        self.compare("augment", self.drawn(self.options.count // 2, 256), 128, transform)

    def faces(self) -> None:
        """Small JPEGs."""
        folder = harness.drawn_faces(self.data / f"faces-{self.options.count}", self.options.count)
        self.compare("faces", self.kept(folder, f"faces-jpeg-{self.options.count}"), 256, [RandomResizedCrop(128)])

    def photos(self) -> None:
        """JPEGs of photos."""
        folder = harness.unpacked_photos(self.options.photos, self.data)
        self.compare("photos", self.kept(folder, "photos-jpeg"), 64, [RandomResizedCrop(224)])


def main() -> None:
    """Measure what the command line asks for."""
    figures = ("rows", "small_rows", "augment", "faces", "photos")
    parser = harness.command_line("Measure the compiled loops.", "native", figures=figures, pairs=5)
    parser.add_argument("--count", type=int, default=8192, help="faces (default: 8,192)")
    parser.add_argument("--photos", type=Path, default=SHARED / "clothing" / "clothing.tar", help="a folder or a tar")
    options = parser.parse_args()
    if native.library() is None:
        parser.error("the compiled loops were not built: python tools/build_native.py")
    if options.quick:
        options.count, options.pairs = 2048, 1
    harness.take_figures(Bench(options), options.only)


if __name__ == "__main__":
    main()
