"""Does training wait for its data? A simulated accelerator beside FastLoader, and beside the plain DataLoader.

    python benchmarks/bench_accelerator.py             about three minutes, 5 GB of disk in .bench
    python benchmarks/bench_accelerator.py --quick     tiny sizes, to see that it runs; the figures mean nothing

The accelerator takes a batch, works on it for as long as its rate says, and leaves the CPU free; the loop runs three
steps ahead of it, as it does of a GPU. Everything is measured by what `fastload bench` runs.

`utilization`: part of the time that the accelerator was at work, at 0.8 of the rate that the loader had just reached
alone; rounds, each with its own rate. Epochs' beginnings are part of it.
`headspace`: images/s of the loop over the same steps on one cached batch, in turn.
`plain-packed`, `plain-jpeg`: the same accelerator fed by `DataLoader(num_workers=2)`, on the packed file and on its
JPEG files with Pillow; and how many times as fast FastLoader alone is, in turn with them.

The page cache is warm. `others` is what other processes took of the CPUs during each round, 0 to 1: on a shared machine
`--wait 600` begins each round when they take less than a tenth, or after so many seconds. Every round counts.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import psutil

import harness
from fastload.options.measure import BenchOptions
from fastload.profiling.bench.benchmark import BenchResult, run_bench
from fastload.profiling.bench.passes import cpu_seconds

SHARE = 0.8
QUIET = 0.1


class Others:
    """What other processes take of the CPUs, from now on; 0 to 1."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._busy_s = self._all_busy_s() - cpu_seconds()

    def _all_busy_s(self) -> float:
        times = psutil.cpu_times()
        return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))

    def share(self) -> float:
        """Since this was made."""
        taken = self._all_busy_s() - cpu_seconds() - self._busy_s
        return max(0.0, taken / (time.perf_counter() - self._began) / psutil.cpu_count())


def wait_for_quiet(most_s: float) -> None:
    """Returns when others have left the CPUs alone for five seconds, or after so many."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < most_s:
        others = Others()
        time.sleep(5)
        if others.share() < QUIET:
            return


def round_of(options: argparse.Namespace, path: Path, *, compare: bool) -> BenchResult:
    """One run of the benchmark behind `fastload bench --step sim:0.8x`."""
    return run_bench(
        path,
        BenchOptions(
            batch_size=min(256, options.rows // 8),
            seconds=options.seconds,
            workers=options.workers,
            step=f"sim:{SHARE}x",
            compare=compare,
            source=options.data / f"faces-{options.rows}" if compare else None,
        ),
    )


def main() -> None:
    """Measure, and append the records."""
    parser = harness.command_line("Measure what a simulated accelerator waits for.", "accelerator")
    parser.add_argument("--rows", type=int, default=20_000, help="faces of 218x178x3 (default: 20,000)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each part of a round (default: 8)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to wait at most for quiet, before each round")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.rounds, options.seconds = 64, 1, 0.2
    journal = harness.begin(options, "rows", "workers", "seconds", pairs=options.rounds, share=SHARE)
    path = harness.packed_faces(options.data, options.rows)
    about = {"rows": options.rows, "row_shape": [218, 178, 3], "batch_size": min(256, options.rows // 8)}
    found, shares = [], []
    for number in range(options.rounds):
        wait_for_quiet(options.wait)
        others = Others()
        found.append(round_of(options, path, compare=number == options.rounds - 1))
        shares.append(others.share())
    note(journal, about, found, shares)


def note(journal: harness.Journal, about: dict[str, Any], found: list[BenchResult], others: list[float]) -> None:
    """The records of all rounds; the plain ways are part of the last."""
    loops = [result.loop for result in found if result.loop is not None]
    alone = [result.alone for result in found if result.alone is not None]
    journal.note(
        "utilization",
        target=">= 0.99",
        file=about,
        value=harness.spread([loop.utilization or 0.0 for loop in loops]),
        stall_share=harness.spread([loop.stall_share for loop in loops]),
        longest_wait_ms=harness.spread([1000 * loop.longest_wait_s for loop in loops]),
        loop_images_per_s=harness.spread([loop.samples_per_s for loop in loops]),
        alone_images_per_s=harness.spread([one.samples_per_s["median"] for one in alone]),
        others=harness.spread(others),
        rounds=[
            {"utilization": loop.utilization, "others": share, "alone_images_per_s": one.samples_per_s["median"]}
            for loop, share, one in zip(loops, others, alone, strict=True)
        ],
    )
    journal.note(
        "headspace",
        file=about,
        ratio=harness.spread([result.headspace["ratio"]["median"] for result in found if result.headspace]),
    )
    for figure, rival in zip(("plain-packed", "plain-jpeg"), found[-1].rivals, strict=True):
        journal.note(
            figure,
            file=about,
            base_is=rival.name,
            ratio=rival.ratio,
            way=rival.ours_samples_per_s,
            base=rival.samples_per_s,
            utilization=rival.loop.utilization if rival.loop else None,
            stall_share=rival.loop.stall_share if rival.loop else None,
            cpu_s_per_1000=rival.cpu_s_per_1000,
        )


if __name__ == "__main__":
    main()
