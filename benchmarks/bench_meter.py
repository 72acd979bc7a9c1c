"""What does a `Meter` cost?

    python benchmarks/bench_meter.py            everything: about three minutes
    python benchmarks/bench_meter.py --quick    tiny, to see that it runs; the figures mean nothing

`a step of ... ms` compares a loop under a `Meter` with the same loop without one, in pairs of segments in turn. Steps
are a fixed piece of work of 5 ms or so: pure Python, or training a small network. Loaders are a list that holds one
batch, `FastLoader` that copies, that augments in threads, and that runs a Python transform in a process, on faces of
218x178x3. `wall` is the ratio of the wall times (with / without), `cpu` that of the seconds on a CPU of this process,
which neighbours on the machine move less; 1.01 and less is the aim. The Meter begins before the segment.

`the loop's own thread, us a step` is what a step costs it beyond an empty loop, in microseconds on a CPU; `recorded`:
with every step appended to a file. `us a step of 5 ms`: what `next` takes more under a Meter when each step has filled
the caches with something else; 50 is 1 %. `the sampler's thread` is its share of one core, in percent, at ten readings
a second.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import harness
from fastload import FastLoader, Meter, PackedDataset
from fastload.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop

STEP_S = 5e-3
SKIPPED = 4  # steps at the beginning of a segment


def as_it_is(sample: Any) -> Any:
    """A transform in Python that does nothing."""
    return sample


class Bench:
    """The figures.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.journal = harness.begin(options, "pairs", "steps", "faces")
        self.path = harness.packed_faces(options.data, options.faces)

    def loaders(self) -> dict[str, Iterable[Any]]:
        """What is iterated over, by name."""
        batch_size = max(1, self.options.faces // (self.options.steps + SKIPPED + 1))
        augmented = [RandomResizedCrop(112), RandomHorizontalFlip(), Normalize((0.5,) * 3, (0.25,) * 3)]
        return {
            "a list": [torch.zeros(32, 3, 218, 178, dtype=torch.uint8)] * (self.options.steps + SKIPPED),
            "FastLoader": FastLoader(self.path, batch_size),
            "FastLoader, augmenting": FastLoader(self.path, batch_size, transform=augmented),
            "FastLoader, a process": FastLoader(PackedDataset(self.path, transform=as_it_is), batch_size, workers=1),
        }

    def step(self, kind: str) -> Callable[[], None]:
        """A piece of work that takes about STEP_S here."""
        piece = harness.Busy(kind).slice
        taken = []
        for _ in range(20):
            begin = time.thread_time()
            piece()
            taken.append(time.thread_time() - begin)
        count = max(1, round(STEP_S / statistics.median(taken)))

        def step() -> None:
            for _ in range(count):
                piece()

        return step

    def segment(self, loader: Iterable[Any], step: Callable[[], None], *, metered: bool) -> tuple[float, float, float]:
        """Seconds of the segment: on the wall, on a CPU, and on a CPU by this thread."""
        meter = Meter() if metered else None
        with meter or nullcontext():
            batches = iter(meter.watch(loader) if meter else loader)
            for _ in range(SKIPPED):
                next(batches)
                step()
            begins = time.perf_counter(), time.process_time(), time.thread_time()
            for _ in range(self.options.steps):
                next(batches)
                step()
            ends = time.perf_counter(), time.process_time(), time.thread_time()
            del batches
        return ends[0] - begins[0], ends[1] - begins[1], ends[2] - begins[2]

    def overhead(self) -> None:
        """Loops with and without a Meter, in turn."""
        for kind in ("python", "train"):
            step = self.step(kind)
            for name, loader in self.loaders().items():
                self.segment(loader, step, metered=True)
                found: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
                for turn in range(self.options.pairs):
                    for metered in (True, False) if turn % 2 else (False, True):
                        found[metered].append(self.segment(loader, step, metered=metered))
                if isinstance(loader, FastLoader):
                    loader.close()
                ratios = {
                    clock: harness.spread([one[at] / other[at] for one, other in zip(*found.values(), strict=True)])
                    for at, clock in enumerate(("wall", "cpu", "loop"))
                }
                step_ms = 1e3 * statistics.median(one[2] for one in found[False]) / self.options.steps
                figure = f"{name}, a step of {step_ms:.1f} ms, {kind}"
                self.journal.note(figure, target="<= 1.01", **ratios)

    def own_thread(self) -> None:
        """What a step costs the thread of the loop."""
        batches = [torch.zeros(4, 3)] * self.options.many

        def cost_us(meter: Meter | None) -> float:
            loop = meter.watch(batches) if meter else batches
            begin = time.thread_time()
            for _ in loop:
                pass
            return 1e6 * (time.thread_time() - begin) / len(batches)

        found: dict[str, list[float]] = {"metered": [], "recorded": []}
        with tempfile.TemporaryDirectory() as folder:
            for turn in range(self.options.pairs):
                bare = cost_us(None)
                with Meter() as meter:
                    found["metered"].append(cost_us(meter) - bare)
                with Meter() as meter:
                    meter.record(Path(folder) / f"{turn}.jsonl")
                    found["recorded"].append(cost_us(meter) - bare)
        spreads = {name: harness.spread(values) for name, values in found.items()}
        self.journal.note("the loop's own thread, us a step", target="<= 30", **spreads)

    def after_a_step(self) -> None:
        """The same when each step has filled the caches with something else: the time inside `next` alone."""
        step = self.step("train")

        def cost_us(loader: Iterable[Any], *, metered: bool) -> float:
            meter = Meter() if metered else None
            with meter or nullcontext():
                batches = iter(meter.watch(loader) if meter else loader)
                for _ in range(SKIPPED):
                    next(batches)
                taken = []
                for _ in range(self.options.steps):
                    step()
                    begin = time.thread_time()
                    next(batches)
                    taken.append(time.thread_time() - begin)
                del batches
            return 1e6 * statistics.fmean(taken)

        for name, loader in self.loaders().items():
            pairs = [(cost_us(loader, metered=True), cost_us(loader, metered=False)) for _ in range(self.options.pairs)]
            if isinstance(loader, FastLoader):
                loader.close()
            self.journal.note(
                f"{name}: the loop's own thread, us a step of 5 ms", target="<= 50",
                more=harness.spread([metered - bare for metered, bare in pairs]),
                bare=harness.spread([bare for _, bare in pairs]),
            )  # fmt: skip

    def sampler(self) -> None:
        """What readings cost the thread that takes them."""
        shares = []
        with Meter():
            thread = next(one for one in threading.enumerate() if one.name == "fastload-sampler")
            assert thread.ident is not None, "it runs"
            clock = time.pthread_getcpuclockid(thread.ident)
            for _ in range(self.options.pairs):
                begin_s, begin_cpu_s = time.perf_counter(), time.clock_gettime(clock)
                time.sleep(self.options.watch_s)
                shares.append(100 * (time.clock_gettime(clock) - begin_cpu_s) / (time.perf_counter() - begin_s))
        self.journal.note("the sampler's thread, % of a core", target="<= 1", mean=statistics.fmean(shares),
                          share=harness.spread(shares))  # fmt: skip


def main() -> None:
    """Parse and run."""
    parser = harness.command_line(__doc__, "meter", pairs=21)
    parser.add_argument("--faces", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=50, help="of a segment (default: 50)")
    parser.add_argument("--many", type=int, default=20_000, help="steps that do nothing")
    parser.add_argument("--watch-s", type=float, default=1.0)
    options = parser.parse_args()
    if options.quick:
        options.faces, options.pairs, options.steps, options.many, options.watch_s = 60, 2, 5, 500, 0.1
    torch.set_num_threads(1)
    bench = Bench(options)
    bench.own_thread()
    bench.after_a_step()
    bench.sampler()
    bench.overhead()


if __name__ == "__main__":
    main()
