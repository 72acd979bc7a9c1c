"""How fast does FastLoader hand out batches, beside a bare copy of the same rows and beside the usual ways?

    python benchmarks/bench_loader.py                    everything: about ten minutes, 5 GB of disk in .bench
    python benchmarks/bench_loader.py --only take take32 some of it (names below)
    python benchmarks/bench_loader.py --quick            tiny sizes, to see that it runs; the figures mean nothing

`take`, `take-train`, `take-python`: FastLoader over one thread of `np.take(mapped, rows, out=slot)` into a ring of as
many slots, with as many rows, shuffled alike: the bare copy that no loader can beat by much. 1.0 means that plan, ring
and hand-over cost nothing. In `take` the main thread consumes: it touches each page of each batch, in memory order
(`take-untouched`: nothing; `take-read`: it reads every byte, and the base reads what it copied as well). In the other
two a thread consumes while the main thread trains a small net or runs pure Python.
`between-*` is the shape of a training loop instead: the main thread takes a batch, works 3 ms, takes the next;
the base is one thread that copies ahead into a queue.
`h5py`, `jpeg`: FastLoader over the usual ways, `DataLoader(num_workers=2)` of h5py `dset[i]` and of JPEG + Pillow.
`take32`: 32x32x3 rows, batches of 1024, over the same np.take.
`check`: the loader that compares rows with their digests over one with `check=None`: "first" in its first epoch and in
later ones, "always", and the same beside a main thread in pure Python.
`opening`: seconds of `PackedDataset(path)` with its header compared and without, by number of rows.
`first-batch`, `info`, `plan`, `memory`: seconds and bytes, each in fresh processes.

The page cache is warm. Rates are images/s; a figure is the median of paired ratios with its range.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

import harness
from fastload import FastLoader, PackedDataset, inspect_file
from fastload.format.header import read_header
from fastload.format.ragged import Column
from fastload.profiling.bench.benchmark import BareTake
from fastload.transforms import RandomResizedCrop
from sample_files import write_packed

Rows = list[NDArray[np.int64]]


def fill_ahead(ring: BareTake, batches: Rows) -> Iterator[NDArray[Any]]:
    """The bare copy by a thread that stays ahead of the consumer by the ring's size less what both hold."""
    ready: queue.Queue[NDArray[Any] | None] = queue.Queue(ring.num_slots - 2)

    def work() -> None:
        for slot in ring.fill(batches):
            ready.put(slot)
        ready.put(None)

    thread = threading.Thread(target=work)
    thread.start()
    while (slot := ready.get()) is not None:
        yield slot
    thread.join()


def loader_rows(loader: FastLoader) -> Rows:
    """The rows of one epoch of the loader, batch by batch."""
    loader.set_epoch(0)
    return [batch.rows.numpy().copy() for batch in loader]


def loader_pixels(loader: FastLoader, epochs: int) -> Iterator[NDArray[Any]]:
    """Batches of pixels, (B, H, W, C), as they lie in memory, of the next epochs."""
    for _ in range(epochs):
        yield from harness.pixels_of(loader)


class Bench:
    """The data, the options and the journal of one run; each public method is one figure."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.dir: Path = options.data
        self.journal = harness.begin(options, "pairs", "rows", "workers", page_cache="warm")
        self.path = harness.packed_faces(self.dir, options.rows)
        self.about = {"rows": options.rows, "row_shape": list(inspect_file(self.path).fields["images"].shape[1:])}
        self.batch_size = min(256, options.rows // 4)

    def loader(self, path: Path, batch_size: int) -> FastLoader:
        """A shuffling loader of the images alone."""
        return FastLoader(PackedDataset(path, fields=["images"]), batch_size, workers=self.options.workers)

    def ring_slots(self, loader: FastLoader) -> int:
        """Slots of the loader's ring, so that the base gets as many; after an epoch, when there is one."""
        ring = loader._producer.pool.ring  # no public name: a user has no use for it
        assert ring is not None, "the loader has run an epoch"
        return len(ring.slots)

    def _over_take(
        self,
        path: Path,
        batch_size: int,
        *,
        work: Callable[[NDArray[Any]], object] | None = harness.touch,
        base_work: Callable[[NDArray[Any]], object] | None = None,
        busy: str = "idle",
        epochs: int = 1,
    ) -> dict[str, dict[str, float]]:
        loader = self.loader(path, batch_size)
        rows = loader_rows(loader) * epochs
        ring = BareTake(read_header(path), ["images"], batch_size, self.ring_slots(loader))
        ways: list[harness.Way] = [
            lambda: harness.rate(loader_pixels(loader, epochs), work),
            lambda: harness.rate(ring.fill(rows), base_work),
        ]
        return harness.compare(*harness.Busy(busy).beside(ways), pairs=self.options.pairs)

    def take(self) -> None:
        """Main thread idle but for what the consumer does with each batch."""
        result = self._over_take(self.path, self.batch_size)
        self.journal.note("take", target=">= 0.9", file=self.about, state="idle, touching each page", **result)
        result = self._over_take(self.path, self.batch_size, work=None)
        self.journal.note("take-untouched", file=self.about, state="idle, batches only handed over", **result)
        result = self._over_take(self.path, self.batch_size, work=harness.read_all, base_work=harness.read_all)
        self.journal.note("take-read", file=self.about, state="idle, both read every byte of each batch", **result)

    def take_train(self) -> None:
        """A thread consumes; the main thread trains."""
        result = self._over_take(self.path, self.batch_size, busy="train")
        self.journal.note("take-train", target=">= 0.8", file=self.about, state="training a small net", **result)

    def take_python(self) -> None:
        """A thread consumes; the main thread runs pure Python."""
        result = self._over_take(self.path, self.batch_size, busy="python")
        self.journal.note("take-python", target=">= 0.8", file=self.about, state="pure Python", **result)

    def between(self) -> None:
        """The main thread takes a batch, works about 3 ms, takes the next."""
        for kind in ("train", "python"):
            load = harness.Busy(kind)
            slices = calibrated(load.slice, seconds=0.003)

            def work(batch: NDArray[Any], load: harness.Busy = load, slices: int = slices) -> None:
                harness.touch(batch)
                for _ in range(slices):
                    load.slice()

            loader = self.loader(self.path, self.batch_size)
            rows = loader_rows(loader)
            ring = BareTake(read_header(self.path), ["images"], self.batch_size, self.ring_slots(loader))
            result = harness.compare(
                lambda work=work, loader=loader: harness.rate(loader_pixels(loader, 1), work),  # type: ignore[misc]
                lambda work=work, ring=ring, rows=rows: harness.rate(fill_ahead(ring, rows), work),  # type: ignore[misc]
                pairs=self.options.pairs,
            )
            self.journal.note(f"between-{kind}", file=self.about, state=f"{slices} slices of {kind} a batch", **result)

    def small_rows(self) -> Path:
        """A file of rows of 32x32x3."""
        path = self.dir / f"small-{self.options.small_rows}.h5"
        if not path.exists():
            rng = np.random.default_rng(0)
            write_packed(path, rng.integers(0, 256, (self.options.small_rows, 32, 32, 3), dtype=np.uint8))
        return path

    def take32(self) -> None:
        """Small rows in large batches: what a batch costs beside its bytes."""
        about = {"rows": self.options.small_rows, "row_shape": [32, 32, 3]}
        batch_size = min(1024, self.options.small_rows // 4)
        result = self._over_take(self.small_rows(), batch_size, epochs=self.options.small_epochs)
        self.journal.note("take32", target=">= 0.7", file=about, state="idle, touching each page", **result)

    def check(self) -> None:
        """With `check` over without it: touching each page of each batch, and beside pure Python."""
        jpegs = harness.packed_faces(self.dir, self.options.rows, store="source")
        cut: dict[str, Any] = {"transform": [RandomResizedCrop(128)]}
        for name, path, batch_size, words, states in (
            ("", self.path, self.batch_size, {}, ("idle", "python")),
            ("32", self.small_rows(), min(1024, self.options.small_rows // 4), {}, ("idle",)),
            ("jpeg", jpegs, self.batch_size, cut, ("idle",)),
        ):
            self._check(f"-{name}" if name else "", path, batch_size, words, states)

    def _check(self, name: str, path: Path, batch_size: int, words: dict[str, Any], states: tuple[str, ...]) -> None:
        def new(check: Any) -> FastLoader:
            data = PackedDataset(path, fields=["images"], check=check)
            return FastLoader(data, batch_size, workers=self.options.workers, **words)

        def first_epoch(check: Any) -> float:
            with closing(new(check)) as loader:
                return harness.rate(loader_pixels(loader, 1))

        def later_epoch(loader: FastLoader) -> harness.Way:
            for _ in loader_pixels(loader, 2):  # which reads what the first epoch left out at its end, too
                pass
            return lambda: harness.rate(loader_pixels(loader, 1))

        images = PackedDataset(path).file.fields["images"]
        stored = "pixels" if images.ragged is None else "JPEG"
        about = {"rows": len(PackedDataset(path)), "row_shape": list(images.shape), "stored": stored}
        for busy in states:
            state, suffix = ("idle, touching each page", name) if busy == "idle" else ("pure Python", f"{name}-python")
            targets = (
                [">= 0.9"] * 3 if name else [">= 0.95", ">= 0.99", ">= 0.93"] if busy == "idle" else [">= 0.85"] * 3
            )
            ways: list[harness.Way] = [lambda: first_epoch("first"), lambda: first_epoch(None)]
            pairs = self.options.pairs
            result = harness.compare(*harness.Busy(busy).beside(ways), pairs=pairs)
            self.journal.note(f"check-first{suffix}", target=targets[0], file=about, state=state, **result)
            for check, kind, target in (("first", "later", targets[1]), ("always", "always", targets[2])):
                with closing(new(check)) as checking, closing(new(None)) as plain:
                    ways = [later_epoch(checking), later_epoch(plain)]
                    result = harness.compare(*harness.Busy(busy).beside(ways), pairs=pairs)
                self.journal.note(f"check-{kind}{suffix}", target=target, file=about, state=state, **result)

    def opening(self) -> None:
        """`PackedDataset(path)`, with the header's digest and without; rows of 4x4x3 with labels and keys."""
        for rows in self.options.opening_rows:
            path = self.dir / f"opening-{rows}.h5"
            if not path.exists():
                labels = Column(np.arange(rows, dtype=np.int64) % 1000, {"names": [f"class {i}" for i in range(1000)]})
                write_packed(path, np.zeros((rows, 4, 4, 3), np.uint8), {"labels": labels})
            seconds: dict[str, list[float]] = {"with": [], "without": []}
            for _ in range(self.options.pairs):
                for name, check in (("with", "first"), ("without", None)):
                    begin = time.perf_counter()
                    PackedDataset(path, check=check)  # type: ignore[arg-type]
                    seconds[name].append(time.perf_counter() - begin)
            spreads = {name: harness.spread(values) for name, values in seconds.items()}
            self.journal.note(f"opening-{rows}", file={"rows": rows, "row_shape": [4, 4, 3]}, **spreads)

    def h5py(self) -> None:
        """`dset[i]` of a file chunked by 64 rows, in the plain DataLoader with two workers, shuffled."""
        path = self.dir / f"chunked64-{self.options.rows}.h5"
        if not path.exists():
            part = path.with_suffix(".part")
            with h5py.File(self.path) as source, h5py.File(part, "w") as out:
                images = source["images"]
                chunks = (min(64, len(images)), *images.shape[1:])
                copy = out.create_dataset("images", images.shape, images.dtype, chunks=chunks)
                for first in range(0, len(images), 1024):
                    copy[first : first + 1024] = images[first : first + 1024]
            part.rename(path)
        self._over_plain("h5py", H5pyRows(path), ">= 25", "h5py dset[i], 64-row chunks, DataLoader(num_workers=2)")

    def jpeg(self) -> None:
        """The folder of JPEG files, Pillow, the plain DataLoader with two workers."""
        files = sorted((self.dir / f"faces-{self.options.rows}").rglob("*.jpg"))
        self._over_plain("jpeg", JpegFiles(files), ">= 20", "JPEG files, Pillow, DataLoader(num_workers=2)")

    def _over_plain(self, figure: str, data: Dataset[torch.Tensor], target: str, base: str) -> None:
        # Part of the rows in random order is enough to know the plain way's rate, and keeps the pairs close in time.
        order = np.random.default_rng(0).permutation(self.options.rows)[: self.options.plain_rows].tolist()
        plain = DataLoader(
            data, self.batch_size, sampler=SubsetRandomSampler(order), num_workers=2, persistent_workers=True
        )
        loader = self.loader(self.path, self.batch_size)
        result = harness.compare(
            lambda: harness.rate(loader_pixels(loader, 1)),
            lambda: harness.rate(batch.numpy() for batch in plain),
            pairs=self.options.pairs,
        )
        self.journal.note(figure, target=target, file=self.about, base_is=base, **result)

    def first_batch(self) -> None:
        """From construction to the first batch in hand, imports done, in fresh processes."""
        code = (
            "import json, sys, time, fastload\n"
            "from fastload import FastLoader\n"
            "begin = time.perf_counter()\n"
            "batches = iter(FastLoader(sys.argv[1], int(sys.argv[2])))\n"
            "next(batches)\n"
            "print(json.dumps({'seconds': time.perf_counter() - begin}))\n"
        )
        words = (str(self.path), str(self.batch_size))
        seconds = [harness.run_python(code, *words)["seconds"] for _ in range(self.options.processes)]
        self.journal.note("first-batch", target="< 0.1 s", file=self.about, seconds=harness.spread(seconds))

    def info(self) -> None:
        """`fastload info FILE`, the whole process."""
        command = harness.cli("info", self.path)
        seconds = []
        for _ in range(self.options.processes + 1):
            begin = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - begin)
        about = self.about | {"bytes": self.path.stat().st_size}
        self.journal.note("info", target="< 0.4 s", file=about, seconds=harness.spread(seconds[1:]))

    def plan(self) -> None:
        """The first batch of one rank of 1,024 out of 10^9 rows: seconds, and memory at its peak, either shuffle."""
        for shuffle in ("chunk", "full"):
            # The memory is traced in a process of its own, since tracing slows it down.
            runs = [harness.run_python(PLAN_CODE, "time", shuffle) for _ in range(self.options.processes)]
            traced = harness.run_python(PLAN_CODE, "memory", shuffle)
            seconds = harness.spread([run["seconds"] for run in runs])
            self.journal.note(
                f"plan-{shuffle}", target="< 0.02 s, < 20 MB", seconds=seconds, peak_mb=traced["peak_bytes"] / 1e6
            )

    def memory(self) -> None:
        """Anonymous and shared memory beyond `import torch` and the ring, over an epoch with every batch dropped."""
        runs = [
            harness.run_python(MEMORY_CODE, str(self.path), str(self.batch_size), str(Path(__file__).parent))
            for _ in range(self.options.processes)
        ]
        ring_mb = runs[0]["ring_bytes"] / 1e6
        beyond = harness.spread([run["beyond_bytes"] / 1e6 for run in runs])
        self.journal.note("memory", target="< 150 MB", file=self.about, beyond_mb=beyond, ring_mb=ring_mb)


PLAN_CODE = """
import json, sys, time, tracemalloc
from fastload.plan import EpochPlan
if sys.argv[1] == "memory":
    tracemalloc.start()
begin = time.perf_counter()
plan = EpochPlan(
    range(1_000_000_000), chunk_rows=72, seed=1, epoch=3, world_size=1024, batch_size=256, shuffle=sys.argv[2]
)
first = next(plan.batches(517))
seconds = time.perf_counter() - begin
assert len(first.rows) == 256
peak = tracemalloc.get_traced_memory()[1] if sys.argv[1] == "memory" else 0
print(json.dumps({"seconds": seconds, "peak_bytes": peak}))
"""

MEMORY_CODE = """
import json, os, sys
import torch
torch.ones(8, 8) @ torch.ones(8, 8)
sys.path.insert(0, sys.argv[3])
from harness import process_memory
before = process_memory(os.getpid())
from fastload import FastLoader
loader = FastLoader(sys.argv[1], int(sys.argv[2]))
peak = 0
for step, batch in enumerate(loader):
    if step % 8 == 0:
        peak = max(peak, process_memory(os.getpid()))
ring_bytes = loader._producer.pool.ring.slot_bytes * len(loader._producer.pool.ring.slots)
print(json.dumps({"beyond_bytes": peak - before - ring_bytes, "ring_bytes": ring_bytes}))
"""


class H5pyRows(Dataset[torch.Tensor]):
    """One `dset[i]` an item; the file opened in the worker, as h5py's manual asks."""

    def __init__(self, path: Path) -> None:
        self.path, self.images = path, None
        with closing(h5py.File(path)) as file:
            self.num_rows = len(file["images"])

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.images is None:
            self.images = h5py.File(self.path)["images"]
        return torch.from_numpy(self.images[index])


class JpegFiles(Dataset[torch.Tensor]):
    """One file decoded by Pillow an item."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self.files[index]) as image:
            return torch.from_numpy(np.array(image.convert("RGB")))


def calibrated(work: Callable[[], None], seconds: float) -> int:
    """How often `work` fits into that time, at least once."""
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return max(1, round(seconds / statistics.median(times)))


FIGURES = ("take", "take_train", "take_python", "between", "take32", "check", "opening", "h5py", "jpeg", "first_batch",
           "info", "plan", "memory")  # fmt: skip


def main() -> None:
    """Measure what the command line asks for."""
    parser = harness.command_line("Measure FastLoader.", "loader", figures=FIGURES, pairs=7)
    parser.add_argument("--rows", type=int, default=20_000, help="faces of 218x178x3 (default: 20,000)")
    parser.add_argument("--small-rows", type=int, default=100_000, help="rows of 32x32x3 (default: 100,000)")
    parser.add_argument("--small-epochs", type=int, default=4, help="epochs of them a run (default: 4)")
    parser.add_argument("--plain-rows", type=int, default=3_000, help="rows of the plain ways a run (default: 3,000)")
    parser.add_argument("--processes", type=int, default=7, help="fresh processes for first-batch, info, plan, memory")
    parser.add_argument(
        "--opening-rows", type=int, nargs="+", default=[20_000, 100_000, 1_000_000], help="of `opening`"
    )
    parser.add_argument("--workers", type=int, help="FastLoader's; default: its own choice")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.small_rows, options.small_epochs, options.plain_rows = 64, 256, 1, 32
        options.pairs = options.processes = 1
        options.opening_rows = [100]
    torch.set_num_threads(1)  # the trained net must not occupy the core that reads
    harness.take_figures(Bench(options), options.only)


if __name__ == "__main__":
    main()
