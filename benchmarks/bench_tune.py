"""What does `fastload tune` find beyond the default arguments, and what does `workers="auto"` find by itself?

    python benchmarks/bench_tune.py                  everything: about ten minutes, 3 GB of disk in .bench
    python benchmarks/bench_tune.py --only gzip      some of it (names below)
    python benchmarks/bench_tune.py --quick          tiny sizes, to see that it runs; the figures mean nothing

`raw`: 218x178x3 rows. `small`: 32x32x3 rows, batches of 1024. `augmented`: 256x256, RandomResizedCrop and flip by the
threads. `gzip`: 218x178x3 in gzip chunks of 64 rows, a file that fastload did not write. `blocked`: a dataset in Python
whose samples sleep 2 ms each, as those of a network do. For each: what was chosen, then three ways in turn, round by
round: the default arguments, the tuned ones, and workers="auto" after it has had epochs to adapt to. A ratio is one
round's; 1.0 means that there was nothing to find. In `gzip` the default order decodes a chunk for each row, and a batch
of it takes minutes: there the ratio is that of the search, which tries it in batches of two; auto changes no order.

The page cache is warm, and nothing is done with a batch but to touch each page of it: rates are images/s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import Dataset

import harness
from fastload import FastLoader, PackedDataset
from fastload.format.header import read_header
from fastload.options.measure import TuneOptions
from fastload.prefetch.process_pool import ProcessPool
from fastload.profiling.bench.passes import repeat_epochs, run_for, touch_batch
from fastload.profiling.tune.candidates import Candidate
from fastload.profiling.tune.search import Search
from fastload.transforms import RandomHorizontalFlip, RandomResizedCrop
from sample_files import write_packed

CHUNK = 64


class Blocked(Dataset[torch.Tensor]):
    """Each sample takes 2 ms without a CPU."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.zeros(3, 32, 32, dtype=torch.uint8)


class Case:
    """One kind of data: a loader of it with any arguments."""

    def __init__(self, source: Any, batch_size: int, **options: Any) -> None:
        self.source, self.batch_size, self.options = source, batch_size, options

    def loader(self, candidate: Candidate | None = None, **more: Any) -> FastLoader:
        """With the candidate's arguments, or the default ones."""
        source = self.source
        if candidate is not None:
            more = {"workers": candidate.workers, "shuffle": candidate.shuffle} | more
            source = PackedDataset(source, read=candidate.read) if isinstance(source, Path) else source
        return FastLoader(source, self.batch_size, share=None, **(self.options | more))


class Bench:
    """The data, the options and the journal of one run; each public method is one figure."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.dir: Path = options.data
        self.journal = harness.begin(options, "seconds", "search", "rounds")

    def raw(self) -> None:
        """218x178x3 rows of a packed file."""
        self._measure("raw", Case(harness.packed_faces(self.dir, self.options.rows), self._batch(256)))

    def small(self) -> None:
        """32x32x3 rows of a packed file."""
        path = self._random_file(f"small-{self.options.small_rows}.h5", self.options.small_rows, 32)
        self._measure("small", Case(path, self._batch(1024)))

    def augmented(self) -> None:
        """256x256 images, cropped and flipped by the threads that read."""
        path = self._random_file(f"photos-{self.options.photos}.h5", self.options.photos, 256)
        transform = [RandomResizedCrop(224), RandomHorizontalFlip()]
        self._measure("augmented", Case(path, self._batch(128), transform=transform))

    def gzip(self) -> None:
        """The same faces as another program would have written them: compressed, in the order of the source."""
        path = self.dir / f"gzip-{self.options.gzip_rows}.h5"
        if not path.exists():
            packed = harness.packed_faces(self.dir, self.options.rows)
            part = path.with_suffix(".part")
            with h5py.File(packed) as file, h5py.File(part, "w") as out:
                images = file["images"]
                shape = (self.options.gzip_rows, *images.shape[1:])
                copy = out.create_dataset(
                    "images", shape, "u1", chunks=(CHUNK, *shape[1:]), compression="gzip", compression_opts=1
                )
                for first in range(0, len(copy), CHUNK):
                    copy[first : first + CHUNK] = images[first : first + CHUNK]
                out["labels"] = np.arange(len(copy)) % 10
            part.rename(path)
        self._measure("gzip", Case(path, self._batch(256)))

    def blocked(self) -> None:
        """Samples made by Python in processes, which wait and do not compute."""
        self._measure("blocked", Case(Blocked(self.options.blocked_rows), self._batch(64)))

    def _measure(self, name: str, case: Case) -> None:
        options = TuneOptions(
            batch_size=case.batch_size, seconds=self.options.search, transform=case.options.get("transform", ())
        )
        search = Search(case.source, options)
        found = search.run()
        assert found.chosen is not None, "nobody pressed Ctrl-C"
        chosen = found.chosen.row.candidate
        record = {"call": found.call, "reason": found.chosen.reason, "search_s": found.elapsed_s}
        record["table"] = found.to_dict()["rows"]
        if not search.traits.linear and not search.traits.processes:
            gain = {"tuned_over_default": harness.spread(found.gain)} if found.gain else {}
            self.journal.note(name, medians_over_default=_over_default(found), **record, **gain)
            return
        base, auto = search.default, case.loader(workers="auto")
        for _ in range(self.options.epochs):
            for batch in auto:
                touch_batch(batch)
                del batch
        ways = {"base": case.loader(base), "auto": auto}
        if chosen != base:
            ways["tuned"] = case.loader(chosen)
        rates = self._in_turn(ways)
        values: dict[str, Any] = {"base_rate": harness.spread(rates["base"])}
        for way in ways:
            if way != "base":
                pairs = zip(rates[way], rates["base"], strict=True)
                values[f"{way}_over_base"] = harness.spread([one / other for one, other in pairs])
        if "tuned" in rates:
            pairs = zip(rates["auto"], rates["tuned"], strict=True)
            values["auto_over_tuned"] = harness.spread([one / other for one, other in pairs])
        pool = auto._producer.pool
        auto_workers = pool.number if isinstance(pool, ProcessPool) else base.workers
        self.journal.note(name, auto_workers=auto_workers, **record, **values)
        for loader in ways.values():
            loader.close()

    def _in_turn(self, ways: dict[str, FastLoader]) -> dict[str, list[float]]:
        """Rates of each, round by round, back and forth; passes go on, since beginning one starts processes."""
        running: dict[str, Iterator[Any]] = {name: repeat_epochs(loader) for name, loader in ways.items()}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(self.options.rounds + 1):
            for name in list(ways) if turn % 2 == 0 else list(ways)[::-1]:
                done = run_for(running[name], self.options.seconds, touch_batch, discard=8)
                if turn:  # the first one fills rings and starts processes
                    rates[name].append(done.samples_per_s)
        return rates

    def _batch(self, size: int) -> int:
        return 4 if self.options.quick else size

    def _random_file(self, name: str, num_rows: int, size: int) -> Path:
        path = self.dir / name
        if not path.exists() or read_header(path).num_rows != num_rows:
            pixels = np.random.default_rng(0).integers(0, 256, (num_rows, size, size, 3), np.uint8)
            write_packed(path, pixels)
        return path


def _over_default(found: Any) -> float:
    """Of the medians of all trials; 0 where the default was not tried in time."""
    rates = {row.candidate: row.samples_per_s for row in found.rows}
    return float(rates[found.chosen.row.candidate] / rates[found.default]) if found.default in rates else 0.0


FIGURES = ("raw", "small", "augmented", "gzip", "blocked")


def main() -> None:
    """Measure what the command line asks for."""
    parser = harness.command_line('Measure `fastload tune` and workers="auto".', "tune", figures=FIGURES)
    parser.add_argument("--rows", type=int, default=20_000, help="faces of 218x178x3 (default: 20,000)")
    parser.add_argument("--small-rows", type=int, default=100_000, help="rows of 32x32x3 (default: 100,000)")
    parser.add_argument("--photos", type=int, default=4096, help="images of 256x256x3 (default: 4,096)")
    parser.add_argument("--gzip-rows", type=int, default=4096, help="compressed faces (default: 4,096)")
    parser.add_argument("--blocked-rows", type=int, default=4096, help="samples that sleep (default: 4,096)")
    parser.add_argument("--search", type=float, default=30.0, help="seconds of each search (default: 30)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each way in each round (default: 1)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=3, help="epochs that auto adapts in (default: 3)")
    options = parser.parse_args()
    if options.quick:
        options.rows = options.photos = options.gzip_rows = 64
        options.small_rows = options.blocked_rows = 128
        options.search, options.seconds, options.rounds, options.epochs = 0.5, 0.05, 1, 1
    torch.set_num_threads(1)
    harness.take_figures(Bench(options), options.only)


if __name__ == "__main__":
    main()
