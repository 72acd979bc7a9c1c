"""What does the end of an epoch cost? The first batch of the next one, epochs broken off, an accelerator that waits.

    python benchmarks/bench_epochs.py              about four minutes, 3 GB of disk in .bench
    python benchmarks/bench_epochs.py --only wait  some of it (names below)
    python benchmarks/bench_epochs.py --quick      tiny sizes, to see that it runs; the figures mean nothing

`wait`: milliseconds that the loop waits for the first batch of epochs 2 and later, `set_epoch` called before each, the
loop at 0.8 of the loader's own rate; and with an epoch of another loader (validation) between.
`utilization`: of a simulated accelerator at 0.8 of the loader's own rate over many epochs, of all rows
and of a tenth of them.
Both for reading threads (`raw`), two worker processes that return samples as they are (`processes`), and JPEGs in the
file, cut to 160x160 by the threads that decode (`jpeg`).
`break`: seconds of 50 epochs of two worker processes that are left after their first batch, over those of 50 epochs
that have but one batch. Four whole epochs come before: where a process reads a row of its mapping for the first time,
that takes four times as long (256 rows 5.3 ms, later 1.4), wherever its epoch ends.

The page cache is warm.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from typing import Any

import fastload
import harness
from fastload import FastLoader, PackedDataset
from fastload.profiling.bench.training_loop import SimulatedAccelerator
from fastload.transforms import RandomResizedCrop

BATCH_SIZE = 256
SHARE = 0.8
KINDS = ("raw", "processes", "jpeg")


def as_it_is(sample: Any) -> Any:
    """The transform that costs nothing."""
    return sample


class Bench:
    """The figures, over one file of drawn faces."""

    def __init__(self, options: argparse.Namespace, journal: harness.Journal) -> None:
        self.options, self.journal = options, journal
        rows = options.rows
        self.raw = harness.packed_faces(options.data, rows)
        self.jpeg = options.data / f"faces-{rows}-jpeg.h5"
        self.batch_size = min(BATCH_SIZE, rows // 40)
        self.about = {"rows": rows, "row_shape": [218, 178, 3], "batch_size": self.batch_size}

    def loader(self, kind: str, *, rows: int | None = None) -> FastLoader:
        """A loader of that kind, of the first rows."""
        if kind == "jpeg" and not self.jpeg.exists():
            fastload.pack_images(self.options.data / f"faces-{self.options.rows}", self.jpeg, store="source")
        dataset = PackedDataset(
            self.jpeg if kind == "jpeg" else self.raw,
            fields=["images"],
            transform=as_it_is if kind == "processes" else None,
        )
        return FastLoader(
            dataset.select(range(rows)) if rows else dataset, self.batch_size, workers=2, share=None,
            transform=[RandomResizedCrop(160)] if kind == "jpeg" else [],
        )  # fmt: skip

    def own_rate(self, loader: FastLoader) -> float:
        """Images a second of the loader alone, warm: over so many epochs that what was read ahead does not count."""
        rates = []
        for _ in range(2):
            begin, count = time.perf_counter(), 0
            while count < self.options.rows - self.batch_size:
                for batch in loader:
                    harness.touch(batch[0].permute(0, 2, 3, 1).numpy())
                    count += len(batch[0])
            rates.append(count / (time.perf_counter() - begin))
        return max(rates)

    def wait(self) -> None:
        """The first batch of later epochs."""
        for kind, between in itertools.product(self.options.kinds, (False, True)):
            loader = self.loader(kind, rows=self.options.rows // 10)
            other = self.loader("raw", rows=self.options.rows // 10)
            step_s = self.batch_size / (SHARE * self.own_rate(loader))
            waits, later = [], []
            for epoch in range(self.options.epochs):
                loader.set_epoch(epoch + 2)
                for number, waited_s in enumerate(timed(loader, step_s)):
                    if epoch:
                        (later if number else waits).append(1e3 * waited_s)
                if between:
                    for _ in other:
                        pass
            loader.close()
            other.close()
            self.journal.note(
                f"wait-{kind}{'-validation' if between else ''}", target="<= 0.3", file=self.about,
                ms=harness.spread(waits), later_batches_ms=harness.spread(later), step_ms=1e3 * step_s,
            )  # fmt: skip

    def utilization(self) -> None:
        """A simulated accelerator, three steps behind the loop at most."""
        for kind, share in itertools.product(self.options.kinds, (1, 10)):
            loader = self.loader(kind, rows=self.options.rows // share)
            found, stalls, rates = [], [], []
            for _ in range(self.options.pairs):
                rates.append(self.own_rate(loader))
                step = SimulatedAccelerator(SHARE * rates[-1])
                begin, stall_s, elapsed_s = time.perf_counter(), 0.0, 0.0
                step.begin()
                while time.perf_counter() - begin < self.options.seconds:
                    for batch in loader:
                        step(batch)
                    stall_s, elapsed_s = stall_s + loader.stats.stall_s, elapsed_s + loader.stats.elapsed_s
                step.finish()
                found.append(step.utilization or 0.0)
                stalls.append(stall_s / elapsed_s)
            loader.close()
            self.journal.note(
                f"utilization-{kind}-{self.options.rows // share}", target=">= 0.99", file=self.about,
                value=harness.spread(found), stall_share=harness.spread(stalls),
                alone_images_per_s=harness.spread(rates),
            )  # fmt: skip

    def broken(self) -> None:
        """Epochs that are left after their first batch, over epochs that have only one."""
        long, short = self.loader("processes"), self.loader("processes", rows=self.batch_size)
        for _ in range(4):
            for _ in long:
                pass

        def left() -> float:
            return _epochs(long, self.options.breaks)

        def whole() -> float:
            return _epochs(short, self.options.breaks)

        # A rate each, so that the ratio is that of times the other way round.
        found = harness.compare(whole, left, pairs=min(3, self.options.pairs))
        self.journal.note("break", target="<= 1.5", file=self.about, ratio=found["ratio"], way=found["base"],
                          base=found["way"], epochs=self.options.breaks)  # fmt: skip
        long.close()
        short.close()


def _epochs(loader: FastLoader, count: int) -> float:
    """Epochs a second of which one batch is taken each."""
    begin = time.perf_counter()
    for _ in range(count):
        for _ in loader:
            break
    return count / (time.perf_counter() - begin)


def timed(loader: FastLoader, step_s: float) -> Iterator[float]:
    """Takes a step of that time for each batch, and yields the seconds that the batch was waited for."""
    begin = time.perf_counter()
    for _ in loader:
        yield time.perf_counter() - begin
        time.sleep(step_s)
        begin = time.perf_counter()


def main() -> None:
    """Measure, and append the records."""
    figures = {"wait": Bench.wait, "utilization": Bench.utilization, "break": Bench.broken}
    parser = harness.command_line(__doc__, "epochs", figures=figures, pairs=3)
    parser.add_argument("--rows", type=int, default=20_000, help="faces of 218x178x3 (default: 20,000)")
    parser.add_argument("--epochs", type=int, default=12, help="of each `wait` (default: 12)")
    parser.add_argument("--breaks", type=int, default=50, help="epochs that are broken off (default: 50)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each `utilization` (default: 6)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of loaders (default: all)")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.epochs, options.breaks, options.seconds, options.pairs = 400, 3, 2, 0.2, 1
    journal = harness.begin(options, "rows", "epochs", "breaks", "seconds", "pairs")
    bench = Bench(options, journal)
    for figure in options.only:
        figures[figure](bench)


if __name__ == "__main__":
    main()
