"""How fast is the ring when processes fill it, when ranks share the machine, and when the page cache is cold?

    python benchmarks/bench_workers.py                  everything: about eight minutes, 3 GB of disk in .bench
    python benchmarks/bench_workers.py --only workers   some of it (names below)
    python benchmarks/bench_workers.py --quick          tiny sizes, to see that it runs; the figures mean nothing

`workers`, `workers-train`, `workers-python`: FastLoader with a Python transform that returns its sample as it is, over
the same dataset and transform in a plain `DataLoader`; two persistent workers each, the same rows. The main thread
consumes (touches each page), or trains a small net, or runs pure Python while a thread consumes.
`workers-bound`: `workers` over two processes that do nothing but copy the same rows into memory of their own with
np.take: what two processes can reach here at all, with nobody to hand batches to.
`workers-new`: the same as `workers` with a transform that returns a new image of the same size.
`workers-changing`: batches whose shape is not that of the slots, which go through torch's shared memory, over those of
one shape (a column cropped off in both): what the warning of changing shapes speaks of.
`workers-list`: every batch is kept, as in `list(loader)`.
`folder`: FastLoader over the plain `DataLoader`, both on the same unpacked JPEG files opened with Pillow.
`cold`, `cold-small`: shuffle in windows of chunks over full shuffle, the file's pages dropped before each run, rows of
218x178x3 and of 32x32x3; threads; `-128`: with the disk's read-ahead set to 128 KiB meanwhile, where that is allowed.
`two-ranks`: images/s of two processes with a share each, together, over one process with all rows; threads.
`elastic`: images/s of two processes together with share="elastic", in which both read rows of every chunk, over those
with shares of their own; threads. `elastic-cold` with the file's pages dropped before each epoch, `elastic-gzip` of the
same rows compressed.
`state-dict`: microseconds of `state_dict()` in mid-epoch.

Unless it says cold, the page cache is warm. A figure is the median of paired ratios with its range.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import harness
from fastload import FastLoader, PackedDataset, inspect_file
from fastload.plan import ChunkWindow
from fastload.repack import repack_file
from fastload.system.files import drop
from sample_files import write_packed

BATCH_SIZE = 256


def as_it_is(sample: Any) -> Any:
    """The transform that costs nothing."""
    return sample


def inverted(sample: Any) -> Any:
    """A transform that costs one pass over the image."""
    return (255 - sample[0], *sample[1:])


def cropped(sample: Any, *, first: int) -> Any:
    """The last column cropped off; not of the first rows of the file."""
    image, row = sample
    return (image, row) if row < first else (image[:, :, :-1], row)


class JpegFiles(Dataset[tuple[torch.Tensor, int]]):
    """The folder as it is: each file opened and decoded by Pillow when it is asked for."""

    def __init__(self, files: list[Path]) -> None:
        self.files = [str(file) for file in files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.files[index]) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1), index % 10


def rate(batches: Iterable[Any], *, keep: bool = False) -> float:
    """Images a second while the consumer touches each page of each batch, and keeps all of them or none."""
    kept: list[NDArray[Any]] = []

    def work(pixels: NDArray[Any]) -> None:
        harness.touch(pixels)
        if keep:
            kept.append(pixels)

    return harness.rate(harness.pixels_of(batches), work)


class Bench:
    """The data, the options and the journal of one run; each public method is one figure."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.dir: Path = options.data
        self.journal = harness.begin(options, "pairs", "rows", workers=2)
        self.path = harness.packed_faces(self.dir, options.rows)
        self.batch_size = min(BATCH_SIZE, options.rows // 8)
        shape = list(inspect_file(self.path).fields["images"].shape[1:])
        self.about = {"rows": options.rows, "row_shape": shape, "batch_size": self.batch_size}

    def _pair(
        self, data: Dataset[Any], *, busy: str = "idle", keep: bool = False, warm_up: int = 2
    ) -> dict[str, dict[str, float]]:
        """Both loaders on one dataset, two processes each, and as many rows, shuffled alike."""
        ours = FastLoader(data, self.batch_size, workers=2)
        rows = [row for batch in ours for row in batch.rows.tolist()]
        # DataLoader gives positions to the dataset, and here all rows are positions.
        plain = DataLoader(data, self.batch_size, sampler=rows, num_workers=2, persistent_workers=True)
        ways: list[harness.Way] = [lambda: rate(ours, keep=keep), lambda: rate(plain, keep=keep)]
        result = harness.compare(*harness.Busy(busy).beside(ways), pairs=self.options.pairs, warm_up=warm_up)
        ours.close()
        return result

    def workers(self) -> None:
        """A transform that does nothing; the main thread consumes."""
        data = PackedDataset(self.path, fields=["images"], transform=as_it_is)
        result = self._pair(data)
        self.journal.note("workers", target=">= 10", file=self.about, state="idle, touching each page", **result)

    def workers_bound(self) -> None:
        """Over the bare copy in two processes."""
        loader = FastLoader(PackedDataset(self.path, fields=["images"], transform=as_it_is), self.batch_size, workers=2)
        bare = two_children(TAKE_CODE, self.path, self.batch_size)
        try:
            result = harness.compare(lambda: rate(loader), lambda: together(bare), pairs=self.options.pairs, warm_up=2)
        finally:
            loader.close()
            for child in bare:
                child.end()
        self.journal.note("workers-bound", file=self.about, state="idle, touching each page", **result)

    def workers_train(self) -> None:
        """A thread consumes; the main thread trains."""
        data = PackedDataset(self.path, fields=["images"], transform=as_it_is)
        result = self._pair(data, busy="train")
        self.journal.note("workers-train", file=self.about, state="training a small net", **result)

    def workers_python(self) -> None:
        """A thread consumes; the main thread runs pure Python."""
        data = PackedDataset(self.path, fields=["images"], transform=as_it_is)
        result = self._pair(data, busy="python")
        self.journal.note("workers-python", file=self.about, state="pure Python", **result)

    def workers_new(self) -> None:
        """A transform that makes a new image."""
        data = PackedDataset(self.path, fields=["images"], transform=inverted)
        self.journal.note("workers-new", file=self.about, state="idle, touching each page", **self._pair(data))

    def workers_changing(self) -> None:
        """All batches but the first have another shape than the slots, over all of one shape."""
        loaders = [
            FastLoader(
                PackedDataset(self.path, fields=["images", "row"], transform=functools.partial(cropped, first=first)),
                self.batch_size, shuffle=False, ends="drop", workers=2,
            )
            for first in (self.batch_size, 0)
        ]  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = harness.compare(
                lambda: rate(loaders[0]), lambda: rate(loaders[1]), pairs=self.options.pairs, warm_up=2
            )
        for loader in loaders:
            loader.close()
        self.journal.note("workers-changing", file=self.about, state="idle, touching each page", **result)

    def workers_list(self) -> None:
        """Half of the rows, every batch kept."""
        data = PackedDataset(self.path, fields=["images"], transform=as_it_is)
        part = data.select(range(self.options.rows // 2))
        result = self._pair(part, keep=True)
        self.journal.note("workers-list", target=">= 1", file=self.about, state="idle, every batch kept", **result)

    def folder(self) -> None:
        """Unpacked files, some of them."""
        faces = harness.drawn_faces(self.dir / f"faces-{self.options.rows}", self.options.rows)
        files = sorted(faces.rglob("*.jpg"))[: self.options.folder_rows]
        result = self._pair(JpegFiles(files), warm_up=1)
        about = self.about | {"rows": len(files)}
        self.journal.note("folder", target=">= 1", file=about, state="JPEG files, Pillow", **result)

    def cold(self) -> None:
        """Window of chunks against full shuffle, from the disk; also with the kernel's usual read-ahead."""
        small = self.dir / f"small-{15 * self.options.rows}.h5"
        if not small.exists():
            rng = np.random.default_rng(0)
            write_packed(small, rng.integers(0, 256, (15 * self.options.rows, 32, 32, 3), dtype=np.uint8))
        files = (("cold", self.path, self.batch_size), ("cold-small", small, 4 * self.batch_size))
        for figure, path, batch_size in files:
            self._cold(figure, path, batch_size)
        setting = read_ahead_file(self.path)
        before = setting.read_text() if setting else ""
        if self.options.quick or setting is None or before.strip() == "128" or not os.access(setting, os.W_OK):
            return
        setting.write_text("128")
        try:
            for figure, path, batch_size in files:
                self._cold(f"{figure}-128", path, batch_size)
        finally:
            setting.write_text(before)

    def _cold(self, figure: str, path: Path, batch_size: int) -> None:
        left: list[float] = []

        def run(shuffle: ChunkWindow | Literal["full"]) -> float:
            left.append(drop(path) or 0.0)  # before anything maps it: mapped pages stay
            loader = FastLoader(PackedDataset(path, fields=["images"]), batch_size, shuffle=shuffle)
            found = rate(loader)
            loader.close()
            return found

        pairs = self.options.pairs
        result = harness.compare(lambda: run(ChunkWindow()), lambda: run("full"), pairs=pairs, warm_up=0)
        setting = read_ahead_file(path)
        info = inspect_file(path)
        about = {"rows": info.num_samples, "row_shape": list(info.fields["images"].shape[1:]), "batch_size": batch_size}
        self.journal.note(
            figure, target=">= 1.5", file=about, page_cache="cold", still_cached=max(left),
            read_ahead_kb=int(setting.read_text()) if setting else None, **result,
        )  # fmt: skip

    def two_ranks(self) -> None:
        """Two processes against one; threads, each with the default of its share of the cores."""
        one = [Child(LOADER_CODE, self.path, self.batch_size, (0, 1))]
        self._ranks("two-ranks", two_children(LOADER_CODE, self.path, self.batch_size), one, target=">= 0.95")

    def elastic(self) -> None:
        """Ranks that share each step against ranks that share the epoch."""
        packed = self.path.with_name(f"{self.path.stem}-gzip.h5")
        if not packed.exists():
            repack_file(self.path, packed, codec="gzip:1")
        ways = {"": (self.path, LOADER_CODE), "-cold": (self.path, COLD_CODE), "-gzip": (packed, LOADER_CODE)}
        if self.options.quick:  # two processes, which import torch, and not twelve: two-ranks runs the other code
            ways = {"-cold": ways["-cold"]}
        for way, (path, code) in ways.items():
            shared = two_children(code.replace("share=share", 'share="elastic"'), path, self.batch_size)
            others = shared if self.options.quick else two_children(code, path, self.batch_size)
            self._ranks(f"elastic{way}", shared, others)

    def _ranks(self, figure: str, ours: list[Child], others: list[Child], **about: Any) -> None:
        """Notes the images/s of some processes together over those of others, and ends them all."""
        try:
            result = harness.compare(lambda: together(ours), lambda: together(others), pairs=self.options.pairs)
        finally:
            for child in (*ours, *others):
                child.end()
        self.journal.note(figure, file=self.about, **about, **result)

    def state_dict(self) -> None:
        """In mid-epoch, with a history of other world sizes."""
        loader = FastLoader(PackedDataset(self.path, fields=["labels"]), self.batch_size, share=(0, 2))
        state = loader.state_dict()
        state["segments"] = [[3, 8, 2], [1, 8, 2]]
        loader.load_state_dict(state)
        batches = iter(loader)
        next(batches)
        times = []
        for _ in range(1000):
            begin = time.perf_counter()
            loader.state_dict()
            times.append((time.perf_counter() - begin) * 1e6)
        self.journal.note("state-dict", target="< 100 us", microseconds=harness.spread(times))


def read_ahead_file(path: Path) -> Path | None:
    """Where the system keeps the read-ahead, in KiB, of the disk that a file lies on; None where it does not say."""
    device = os.stat(path).st_dev
    disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    # A partition has its disk's.
    found = (disk / "queue" / "read_ahead_kb", disk.resolve().parent / "queue" / "read_ahead_kb")
    return next((setting for setting in found if setting.exists()), None)


LOADER_CODE = """
loader = FastLoader(PackedDataset(path, fields=["images"]), batch_size, share=share)

def epoch():
    loader.set_epoch(0)
    return map(harness.touch, harness.pixels_of(loader))
"""

COLD_CODE = """
from fastload.system.files import drop

def epoch():
    drop(path)  # before it is mapped: mapped pages stay
    loader = FastLoader(PackedDataset(path, fields=["images"]), batch_size, share=share)
    yield from map(harness.touch, harness.pixels_of(loader))
    loader.close()
"""

TAKE_CODE = """
plan = FastLoader(PackedDataset(path, fields=["images"]), batch_size, share=share)
rows = [batch.rows.numpy().copy() for batch in plan]
field = read_header(path).fields["images"]
mapped = np.memmap(path, field.dtype, "r", field.offset, (read_header(path).num_rows, *field.shape))
slots = np.zeros((4, batch_size, *field.shape), field.dtype)

def epoch():
    for number, chosen in enumerate(rows):
        yield np.take(mapped, chosen, axis=0, out=slots[number % 4], mode="clip")
"""

CHILD_CODE = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[4])
import numpy as np
import harness
from fastload import FastLoader, PackedDataset
from fastload.format.header import read_header
path, batch_size, share = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
{code}
for _ in sys.stdin:
    begin = time.monotonic()
    count = sum(batch_size for _ in epoch())
    print(json.dumps([begin, time.monotonic(), count]), flush=True)
"""


class Child:
    """A process that runs an epoch of its share each time it is told to."""

    def __init__(self, code: str, path: Path, batch_size: int, share: tuple[int, int]) -> None:
        rank, world_size = map(str, share)
        env = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "PYTHONWARNINGS": "ignore"}
        words = [str(path), str(batch_size), json.dumps(share), str(Path(__file__).parent)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD_CODE.replace("{code}", code), *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | env,
        )  # fmt: skip

    def begin(self) -> None:
        """Starts an epoch."""
        assert self.process.stdin is not None, "it was given a pipe"
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def result(self) -> tuple[float, float, int]:
        """When the epoch began and ended, and how many images it had."""
        assert self.process.stdout is not None, "it was given a pipe"
        begin, end, count = json.loads(self.process.stdout.readline())
        return begin, end, count

    def end(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None, "it was given a pipe"
        self.process.stdin.close()
        self.process.wait()


def two_children(code: str, path: Path, batch_size: int) -> list[Child]:
    """Two processes, a rank each."""
    return [Child(code, path, batch_size, (rank, 2)) for rank in range(2)]


def together(ranks: list[Child]) -> float:
    """Images a second of all ranks, from the first begin to the last end."""
    for rank in ranks:
        rank.begin()
    results = [rank.result() for rank in ranks]
    return sum(count for _, _, count in results) / (max(end for _, end, _ in results) - min(b for b, _, _ in results))


FIGURES = ("workers", "workers_bound", "workers_train", "workers_python", "workers_new",
           "workers_changing", "workers_list", "folder", "cold", "two_ranks", "elastic",
           "state_dict")  # fmt: skip


def main() -> None:
    """Measure what the command line asks for."""
    parser = harness.command_line(
        "Measure worker processes, ranks and cold reads.", "workers", figures=FIGURES, pairs=7
    )
    parser.add_argument("--rows", type=int, default=20_000, help="faces of 218x178x3 (default: 20,000)")
    parser.add_argument("--folder-rows", type=int, default=6_000, help="JPEG files an epoch (default: 6,000)")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.folder_rows, options.pairs = 256, 128, 1
    # For both: else the plain loader, begun first, would settle it for the other.
    multiprocessing.set_start_method("forkserver")
    torch.set_num_threads(1)  # the trained net must not occupy the core that reads
    harness.take_figures(Bench(options), options.only)


if __name__ == "__main__":
    main()
