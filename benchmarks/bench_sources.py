"""How fast does `pack_images` take datasets that are arrays, or archives in archives?

    python benchmarks/bench_sources.py                      all: a few minutes, 1.5 GB in .bench
    python benchmarks/bench_sources.py --only mnist nested  some of: mnist, mnist-gz, nested, listing
    python benchmarks/bench_sources.py --quick              tiny sizes, to see that it runs; the figures mean nothing

`mnist`, `mnist-gz`: images/s of one whole call of `pack_images` over reading and writing the same bytes with NumPy:
each file of images opened, decompressed (gz), its labels likewise, and both written to one file with `tofile`, in the
order in which they lie, without fsync. The packer also finds out what is there, shuffles, hashes every row, keeps a
journal and calls fsync. Both run in this process,
in turn, imports done, sources in the page cache, to the same folder. `over_synced`: over the same base with an fsync of
its file.
`nested`: `pack_images` of tars in a tar, as ImageNet comes, read in place, over that of the same files extracted.
`listing-2`, `listing-10`: files/s of listing 100,000 images in two and ten class folders, over a walk by `os.walk` and
`os.stat`. The files are links to a few images; what the walks read is in the cache of the system.

The files are generated, of the names, kinds and sizes of the real ones: 60,000 + 10,000 images of 28x28 whose strokes
compress about as digits do. A figure is the median of paired ratios, with its range.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

import fastload
import harness
from fastload.sources.layouts import list_source

MNIST_KINDS = (("train", 6), ("t10k", 1))
"""Names of its parts, and their shares of the images."""


def strokes(count: int) -> NDArray[np.uint8]:
    """(count, 28, 28): bright strokes on black, which deflate to about a fifth."""
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(min(count, 2000)):
        image = Image.new("L", (28, 28))
        points = [tuple(point) for point in rng.integers(5, 23, (4, 2)).tolist()]
        ImageDraw.Draw(image).line(points, fill=255, width=2, joint="curve")
        drawn.append(np.asarray(image.filter(ImageFilter.GaussianBlur(0.6))))
    return np.resize(np.stack(drawn), (count, 28, 28))


def idx(values: NDArray[np.uint8]) -> bytes:
    """An idx file of these bytes: magic, sizes, values."""
    return np.array([0x800 + values.ndim, *values.shape], ">i4").tobytes() + values.tobytes()


def make_mnist(folder: Path, share: int, *, zipped: bool) -> Path:
    """MNIST's four files, `share` images for each seventh."""
    for name, part in MNIST_KINDS:
        count = share * part
        labels = np.random.default_rng(part).integers(0, 10, count, dtype=np.uint8)
        for kind, values in (("images-idx3", strokes(count)), ("labels-idx1", labels)):
            path = folder / f"{name}-{kind}-ubyte"
            if zipped:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(idx(values), 6))
            else:
                path.write_bytes(idx(values))
    return folder


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An idx file's values, flat."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])


def copy_mnist(folder: Path, output: Path) -> None:
    """The base: each file read, unzipped if it is, and written behind the one before."""
    with open(output, "wb", buffering=0) as file:
        for path in sorted(folder.iterdir()):
            read_idx(path).tofile(file)


class Bench:
    """The data, the options and the journal of one run; each public method is one figure."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.journal = harness.begin(options, "pairs", "workers", page_cache="warm")

    def made(self, name: str, make: Callable[[Path], object]) -> Path:
        """A folder of the data, generated when it is not there."""
        folder: Path = self.options.data / name
        if not folder.exists():
            shutil.rmtree(part := folder.with_suffix(".part"), ignore_errors=True)
            part.mkdir(parents=True)
            make(part)
            part.rename(folder)
        return folder

    def rate(self, source: Path, output: Path, count: int) -> float:
        """Images a second of one whole pack; the file must hold all images."""
        begin = time.perf_counter()
        report = fastload.pack_images(source, output, workers=self.options.workers, overwrite=True)
        elapsed = time.perf_counter() - begin
        if report.num_samples != count:
            raise RuntimeError(f"{source}: packed {report.num_samples} images, not {count}")
        return count / elapsed

    def against_numpy(self, name: str, source: Path, copy: Callable[[Path, Path], None], count: int) -> None:
        """One figure: pack over the base, without and with fsync of the base's file."""
        with tempfile.TemporaryDirectory(dir=self.options.data) as scratch:
            output = Path(scratch) / "out.h5"

            def base(*, synced: bool) -> float:
                bare = Path(scratch) / "bare"
                bare.unlink(missing_ok=True)
                begin = time.perf_counter()
                copy(source, bare)
                if synced:
                    fd = os.open(bare, os.O_RDWR)
                    os.fsync(fd)
                    os.close(fd)
                return count / (time.perf_counter() - begin)

            def pack() -> float:
                output.unlink(missing_ok=True)
                return self.rate(source, output, count)

            pack()  # imports and page cache
            os.sync()
            result = harness.compare(pack, lambda: base(synced=False), pairs=self.options.pairs)
            synced = harness.compare(pack, lambda: base(synced=True), pairs=self.options.pairs)
            file_bytes = output.stat().st_size
        self.journal.note(
            f"pack-{name}", target=">= 0.3", file={"images": count, "bytes": file_bytes},
            base_is="the same bytes read and written with NumPy", over_synced=synced["ratio"], **result,
        )  # fmt: skip

    def mnist(self) -> None:
        """70,000 images in four plain idx files."""
        self._mnist("mnist", zipped=False)

    def mnist_gz(self) -> None:
        """The same, compressed as they are handed out."""
        self._mnist("mnist-gz", zipped=True)

    def _mnist(self, name: str, *, zipped: bool) -> None:
        share = self.options.mnist // 6
        source = self.made(f"{name}-{share}", lambda folder: make_mnist(folder, share, zipped=zipped))
        self.against_numpy(name, source, copy_mnist, 7 * share)

    def nested(self) -> None:
        """Tars in a tar, in place, over the same files in class folders."""
        faces = harness.drawn_faces(self.options.data / f"faces-{self.options.count}", self.options.count)
        files = sorted((faces / "img_align_celeba").iterdir())
        classes = [f"n{1440764 + 13 * i:08d}" for i in range(min(20, len(files) // 2))]
        taken = {wnid: files[i :: len(classes)] for i, wnid in enumerate(classes)}
        name = f"nested-{self.options.count}"
        source = self.made(name, lambda folder: make_nested(folder, taken))
        with tempfile.TemporaryDirectory(dir=self.options.data) as scratch:
            output = Path(scratch) / "out.h5"

            def pack(form: str) -> float:
                output.unlink(missing_ok=True)
                return self.rate(source / form, output, len(files))

            for form in ("tars", "extracted"):
                pack(form)
            os.sync()
            result = harness.compare(lambda: pack("tars"), lambda: pack("extracted"), pairs=self.options.pairs)
        about = {"images": len(files), "row_shape": [218, 178, 3], "inner_tars": len(classes)}
        self.journal.note("pack-nested", target=">= 0.9", file=about, base_is="the same files extracted", **result)

    def listing(self) -> None:
        """100,000 files in two and ten class folders, over a walk."""
        for classes in (2, 10):
            count = self.options.files // classes * classes
            source = self.made(f"listing-{classes}-{count}", partial(make_classes, classes=classes, count=count))

            def rate(walk: Callable[[Path], int], source: Path = source, count: int = count) -> float:
                begin = time.perf_counter()
                if walk(source) != count:
                    raise RuntimeError(f"{source}: not {count} files")
                return count / (time.perf_counter() - begin)

            result = harness.compare(lambda: rate(listed), lambda: rate(walked), pairs=self.options.pairs)
            about = {"files": count, "classes": classes}
            self.journal.note(f"listing-{classes}", file=about, base_is="os.walk and os.stat", **result)


def listed(folder: Path) -> int:
    """The files that `list_source` lists."""
    return len(list_source(folder))


def walked(folder: Path) -> int:
    """The files that a walk finds."""
    return sum(os.stat(os.path.join(at, name)).st_size > 0 for at, _, names in os.walk(folder) for name in names)


def make_classes(folder: Path, classes: int, count: int) -> None:
    """Links to one image, of other names in each class; an inode takes no more than some ten thousand."""
    for number in range(classes):
        at = _new(folder / f"class{number}")
        for i in range(count // classes):
            path, first = at / f"{number}_{i:06d}.jpg", at / f"{number}_{i - i % 10_000:06d}.jpg"
            if path == first:
                Image.new("RGB", (8, 8), (number, i % 256, 0)).save(path)
            else:
                os.link(first, path)


def make_nested(folder: Path, taken: dict[str, list[Path]]) -> None:
    """`tars/ILSVRC2012_img_train.tar` of one tar a class, and `extracted/train/` of one folder a class."""
    with tarfile.open(_new(folder / "tars") / "ILSVRC2012_img_train.tar", "w") as outer:
        for wnid, files in taken.items():
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as tar:
                for number, path in enumerate(files):
                    tar.add(path, f"{wnid}_{number}.JPEG")
            member = tarfile.TarInfo(f"{wnid}.tar")
            member.size = len(inner.getvalue())
            inner.seek(0)
            outer.addfile(member, inner)
            extracted = _new(folder / "extracted" / "train" / wnid)
            for number, path in enumerate(files):
                shutil.copyfile(path, extracted / f"{wnid}_{number}.JPEG")


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def main() -> None:
    """Measure what the command line asks for."""
    parser = harness.command_line(
        "Measure packing of arrays and of archives in archives.",
        "sources",
        figures=("mnist", "mnist-gz", "nested", "listing"),
        pairs=7,
    )
    parser.add_argument("--mnist", type=int, default=60_000, help="training images of MNIST (default: 60,000)")
    parser.add_argument("--count", type=int, default=5_000, help="images of `nested` (default: 5,000)")
    parser.add_argument("--files", type=int, default=100_000, help="images of `listing` (default: 100,000)")
    parser.add_argument("--workers", type=int, default=2, help="of the packer (default: 2)")
    options = parser.parse_args()
    if options.quick:
        options.mnist, options.count, options.files, options.pairs = 60, 64, 200, 1
    harness.take_figures(Bench(options), options.only)


if __name__ == "__main__":
    main()
