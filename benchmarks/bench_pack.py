"""How fast does `fastload pack` work, beside bare decoding and beside the disk, and in how much memory?

    python benchmarks/bench_pack.py                     all: about five minutes, 5 GB in .bench, 10 GB of /dev/shm
    python benchmarks/bench_pack.py --only bare         some of: bare, decode, disk, memory
    python benchmarks/bench_pack.py --only bare --before CHECKOUT       that checkout's packer, too, in the same turns
    python benchmarks/bench_pack.py --quick             tiny sizes, to see that it runs; the figures mean nothing

`bare`: the command, whole process, over one that lists a folder and lets two forks of it read, decode with simplejpeg
and write each image by pwrite, and syncs the file: 8,000 faces to disk and to tmpfs, 50,000 to disk; images a second,
and the CPU seconds of all processes, which are the better the fewer.
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

BARE = """
import os, sys
import simplejpeg

folder, out = sys.argv[1:]
files = sorted(entry.path for entry in os.scandir(folder))
fd = os.open(out, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
forks = []
for part in range(2):
    process = os.fork()
    if not process:
        for number in range(part * len(files) // 2, (part + 1) * len(files) // 2):
            with open(files[number], "rb", buffering=0) as file:
                pixels = simplejpeg.decode_jpeg(file.read(), "RGB")
            os.pwrite(fd, pixels, number * pixels.nbytes)
        os._exit(0)
    forks.append(process)
if any([os.waitpid(process, 0)[1] for process in forks]):
    sys.exit("a fork failed")
os.fsync(fd)
"""
"""Two processes that decode and write, and a sync: no header pass, digest, journal, metadata or order of rows."""


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


def wall_and_cpu(command: list[str], out: Path, **environment: str) -> tuple[float, float]:
    """Wall time of a command that makes `out`, which is removed, and the CPU seconds of it and of its processes."""
    before, begin = os.times(), time.perf_counter()
    # Not in this folder, whose packages would be imported first.
    subprocess.run(command, check=True, capture_output=True, cwd=out.parent, env=os.environ | environment)
    wall, after = time.perf_counter() - begin, os.times()
    out.unlink()
    os.sync()  # What one way leaves to write would slow the next.
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


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

    def bare(self) -> None:
        """The command over two bare processes that decode, write and sync."""
        few, many = self.options.few, self.options.many
        faces = harness.drawn_faces(self.options.data / f"faces-{few or many}", few or many)
        for images, folder in ((few, self.options.data), (few, self.options.tmpfs), (many, self.options.data)):
            if images:
                self.over_bare(faces if images == few else self.linked(faces, images), images, folder)

    def over_bare(self, source: Path, images: int, folder: Path) -> None:
        """Both ways to one folder, and the packer of `--before`, in the same turns."""
        trees = {"": harness.ROOT, **({"-before": self.options.before.resolve()} if self.options.before else {})}
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            out, drawn = Path(scratch) / "out.h5", source / "img_align_celeba"
            pack = [sys.executable, "-m", "fastload", "pack", str(source), str(out), "--workers", "2"]
            bare = [sys.executable, "-c", BARE, str(drawn if drawn.is_dir() else source), str(out)]
            ways = {name: functools.partial(wall_and_cpu, pack, out, PYTHONPATH=str(tree))
                    for name, tree in trees.items()}  # fmt: skip
            ways["bare"] = functools.partial(wall_and_cpu, bare, out)
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for turn in range(self.options.pairs):
                for name in sorted(ways, reverse=turn % 2 == 1):
                    found[name].append(ways[name]())
        bare_s, bare_cpu_s = np.array(found.pop("bare")).T
        for name, times in found.items():
            wall_s, cpu_s = np.array(times).T
            figures = {
                "way": images / wall_s, "base": images / bare_s, "ratio": bare_s / wall_s,
                "cpu_s": cpu_s, "base_cpu_s": bare_cpu_s, "cpu_ratio": cpu_s / bare_cpu_s,
            }  # fmt: skip
            self.journal.note(
                f"pack-bare{name}",
                target=f">= {0.7 if images == self.options.few else 0.9}, CPU <= 1.3",
                output="disk" if folder == self.options.data else "tmpfs",
                file=self.about | {"images": images},
                packer=harness.commit(trees[name]),
                **{figure: harness.spread(values.tolist()) for figure, values in figures.items()},
            )

    def linked(self, faces: Path, count: int) -> Path:
        """So many files in one folder: each face under several names."""
        drawn, folder = sorted((faces / "img_align_celeba").iterdir()), self.options.data / f"linked-{count}"
        if not folder.exists():
            part = folder.with_suffix(".part")
            part.mkdir()
            for number in range(count):
                face = drawn[number % len(drawn)]
                (part / f"{number // len(drawn)}_{face.name}").hardlink_to(face)
            part.rename(folder)
        return folder

    def decode(self) -> None:
        """The command to tmpfs over bare decoding."""
        images = self.options.count * self.options.repeat  # so many that starting a process does not decide
        source = self.linked(self.faces(), images)
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
    parser = harness.command_line(
        "Measure fastload pack.", "pack", figures=("bare", "decode", "disk", "memory"), pairs=5
    )
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder in memory (/dev/shm)")
    parser.add_argument("--count", type=int, default=20_000, help="faces (default: 20,000)")
    parser.add_argument("--repeat", type=int, default=4, help="names of each face in `decode` (default: 4)")
    parser.add_argument("--few", type=int, default=8_000, help="faces of `bare` (default: 8,000)")
    parser.add_argument("--many", type=int, default=50_000, help="and names of them, to disk (default: 50,000)")
    parser.add_argument("--before", type=Path, help="a checkout whose packer `bare` measures, too")
    parser.add_argument("--small-count", type=int, default=200_000, help="small images (default: 200,000)")
    parser.add_argument("--decode-folder", type=Path, help="only decode that folder with 2 processes: the base itself")
    parser.add_argument("--write-to", type=Path, help="with --decode-folder: write the pixels there")
    options = parser.parse_args()
    options.data, options.tmpfs = options.data.resolve(), options.tmpfs.resolve()
    if options.decode_folder:
        decode_folder(options.decode_folder, options.write_to)
        return
    if options.quick:
        options.count, options.repeat, options.small_count, options.pairs = 64, 1, 200, 1
        options.few, options.many = 64, 128
    if not options.tmpfs.is_dir():
        parser.error(f"--tmpfs {options.tmpfs}: no such folder")
    free = shutil.disk_usage(options.tmpfs).free
    if "decode" in options.only and free < options.count * options.repeat * 218 * 178 * 3 * 1.1:
        parser.error(f"--tmpfs {options.tmpfs}: {free / 1e9:.1f} GB free do not hold the images")
    harness.take_figures(Bench(options), options.only)


if __name__ == "__main__":
    main()
