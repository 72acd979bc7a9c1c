"""How fast does `fastload pack` work, beside bare decoding and beside the disk, and in how much memory?

    python benchmarks/bench_pack.py                     all: about five minutes, 5 GB in .bench, 10 GB of /dev/shm
    python benchmarks/bench_pack.py --only decode       one of: decode, disk, memory
    python benchmarks/bench_pack.py --quick             tiny sizes, to see that it runs; the figures mean nothing

`decode`: the command, whole process, writing to tmpfs, over a process that reads each file and decodes it with
simplejpeg in 2 workers and drops the pixels. 1.0 means that listing, hashing, writing and finishing cost nothing.
`pack-bound`, measured along: the same bare decoding with each image written to tmpfs by one pwrite, over itself
without: about what a packer that writes pixels can reach.
`disk`: the command writing to the disk of `--data` (it fsyncs), beside one sequential write and fsync of as many bytes
there: megabytes a second of both. A ratio near 1 means that the disk binds, not the packer.
`memory`: the peak of anonymous and shared memory, all processes together, while 200,000 small images are packed.

The sources are in the page cache. A figure is the median of paired ratios, in turn, with its range.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

import harness

CLASSES = 10


@functools.cache
def opened(path: str) -> int:
    """A descriptor of that file, once a process."""
    return os.open(path, os.O_RDWR)


def decode_one(number: int, path: str, out: str) -> None:
    """One file read and decoded as the packer would, without a header pass; written in place to `out`, or dropped."""
    import simplejpeg

    with open(path, "rb") as file:
        data = file.read()
    pixels = simplejpeg.decode_jpeg(data, colorspace="RGB")
    if out:
        os.pwrite(opened(out), pixels, number * pixels.nbytes)


def decode_folder(folder: Path, out: Path | None) -> None:
    """Every JPEG of a folder, by 2 processes; the pixels written to `out` or dropped."""
    files = [entry.path for entry in os.scandir(folder)]
    if out is not None:
        out.unlink(missing_ok=True)  # memory that tmpfs holds already would cost nothing
        out.touch()
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(decode_one, range(len(files)), files, [str(out or "")] * len(files), chunksize=64))


def seconds(command: list[str]) -> float:
    """Wall time of a whole process."""
    begin = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command} failed:\n{done.stderr}")
    return time.perf_counter() - begin


def small_images(folder: Path, count: int) -> Path:
    """A folder of ten classes with that many 32x32 JPEGs; a thousand different pictures, written over and over."""
    done = folder / "complete"
    if done.exists():
        return folder / "images"
    rng = np.random.default_rng(0)
    scratch = folder / "one.jpg"
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for _ in range(min(count, 1000)):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(scratch)
        pictures.append(scratch.read_bytes())
    scratch.unlink()
    for label in range(CLASSES):
        (folder / "images" / f"class{label}").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        name = folder / "images" / f"class{number % CLASSES}" / f"{number:06d}.jpg"
        name.write_bytes(pictures[number % len(pictures)])
    done.touch()
    return folder / "images"


class Bench:
    """The data, the options and the journal of one run; each public method is one figure."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.journal = harness.begin(options, "pairs", "count", workers=2, page_cache="warm")
        self.about = {"images": options.count, "row_shape": [218, 178, 3]}

    def faces(self) -> Path:
        """The faces that `decode` and `disk` pack."""
        return harness.drawn_faces(self.options.data / f"faces-{self.options.count}", self.options.count)

    def linked_faces(self) -> Path:
        """Many more files: each face under several names, so that starting a process does not decide."""
        drawn = self.faces() / "img_align_celeba"
        folder: Path = self.options.data / f"linked-{self.options.count}x{self.options.repeat}"
        if not folder.exists():
            part = folder.with_suffix(".part")
            part.mkdir()
            for copy in range(self.options.repeat):
                for face in sorted(drawn.iterdir()):
                    (part / f"{copy}_{face.name}").hardlink_to(face)
            part.rename(folder)
        return folder

    def decode(self) -> None:
        """The command to tmpfs over bare decoding."""
        source = self.linked_faces()
        images = self.options.count * self.options.repeat
        bare = [sys.executable, str(Path(__file__).resolve()), "--decode-folder", str(source)]
        with tempfile.TemporaryDirectory(dir=self.options.tmpfs) as scratch:
            command = harness.cli("pack", source, Path(scratch) / "out.h5", "--workers", "2", "--overwrite")
            result = harness.compare(
                lambda: images / seconds(command),
                lambda: images / seconds(bare),
                pairs=self.options.pairs,
            )
            about = self.about | {"images": images}
            self.journal.note("pack", target=">= 0.85", file=about, output="tmpfs", **result)
            self.write(images, Path(scratch))
            written = [*bare, "--write-to", str(Path(scratch) / "written")]
            bound = harness.compare(
                lambda: images / seconds(written), lambda: images / seconds(bare), pairs=self.options.pairs
            )
            self.journal.note("pack-bound", file=about, way_is="bare decoding that writes the pixels", **bound)

    def write(self, images: int, scratch: Path) -> None:
        """What putting as many bytes on tmpfs costs by itself, beside decoding them: the base does neither."""
        block = memoryview(np.random.default_rng(0).bytes(218 * 178 * 3 * 4))
        begin = time.perf_counter()
        with open(scratch / "bare", "wb", buffering=0) as file:
            for _ in range(images // 4):
                file.write(block)
        us = (time.perf_counter() - begin) / (images // 4 * 4) * 1e6
        (scratch / "bare").unlink()
        self.journal.note("write-tmpfs", file=self.about, us_an_image_one_process=us)

    def disk(self) -> None:
        """The command to disk beside the disk's own write rate, both with fsync, in MB/s."""
        source = self.faces()
        num_bytes = self.options.count * 218 * 178 * 3
        with tempfile.TemporaryDirectory(dir=self.options.data) as scratch:
            out, bare = Path(scratch) / "out.h5", Path(scratch) / "bare"
            command = harness.cli("pack", source, out, "--workers", "2")
            block = np.random.default_rng(0).bytes(8 * 2**20)

            def pack() -> float:
                rate = num_bytes / 1e6 / seconds(command)
                out.unlink()
                return rate

            def write() -> float:
                begin = time.perf_counter()
                with open(bare, "wb", buffering=0) as file:
                    for first in range(0, num_bytes, len(block)):
                        file.write(block[: num_bytes - first])
                    os.fsync(file.fileno())
                rate = num_bytes / 1e6 / (time.perf_counter() - begin)
                bare.unlink()
                return rate

            result = harness.compare(pack, write, pairs=self.options.pairs)
        images_per_s = {
            name: value if name == "count" else value * 1e6 / (num_bytes / self.options.count)
            for name, value in result["way"].items()
        }
        self.journal.note("pack-disk", file=self.about, output="disk", unit="MB/s", images_per_s=images_per_s, **result)

    def memory(self) -> None:
        """Peak anonymous and shared memory of all processes while many small images are packed."""
        source = small_images(self.options.data / f"small-{self.options.small_count}", self.options.small_count)
        with tempfile.TemporaryDirectory(dir=self.options.data) as scratch:
            process = subprocess.Popen(
                harness.cli("pack", source, Path(scratch) / "out.h5", "--workers", "2"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            begin = time.perf_counter()
            with harness.peak_memory(process.pid) as peak:
                _, errors = process.communicate()
            elapsed = time.perf_counter() - begin
        if process.returncode:
            raise RuntimeError(f"packing failed:\n{errors}")
        about = {"images": self.options.small_count, "row_shape": [32, 32, 3]}
        self.journal.note(
            "pack-memory", target="< 500 MB", file=about, peak_mb=peak[0] / 1e6,
            images_per_s=self.options.small_count / elapsed,
        )  # fmt: skip


def main() -> None:
    """Measure what the command line asks for."""
    parser = harness.command_line("Measure fastload pack.", "pack", figures=("decode", "disk", "memory"), pairs=5)
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder in memory (/dev/shm)")
    parser.add_argument("--count", type=int, default=20_000, help="faces (default: 20,000)")
    parser.add_argument("--repeat", type=int, default=4, help="names of each face in `decode` (default: 4)")
    parser.add_argument("--small-count", type=int, default=200_000, help="small images (default: 200,000)")
    parser.add_argument("--decode-folder", type=Path, help="only decode that folder with 2 processes: the base itself")
    parser.add_argument("--write-to", type=Path, help="with --decode-folder: write the pixels there")
    options = parser.parse_args()
    if options.decode_folder:
        decode_folder(options.decode_folder, options.write_to)
        return
    if options.quick:
        options.count, options.repeat, options.small_count, options.pairs = 64, 1, 200, 1
    if not options.tmpfs.is_dir():
        parser.error(f"--tmpfs {options.tmpfs}: no such folder")
    free = shutil.disk_usage(options.tmpfs).free
    if "decode" in options.only and free < options.count * options.repeat * 218 * 178 * 3 * 1.1:
        parser.error(f"--tmpfs {options.tmpfs}: {free / 1e9:.1f} GB free do not hold the images")
    harness.take_figures(Bench(options), options.only)


if __name__ == "__main__":
    main()
