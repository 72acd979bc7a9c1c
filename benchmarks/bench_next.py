"""What does `next()` cost the training thread where batches go to a device? Microseconds of Python, no GPU needed.

    python benchmarks/bench_next.py                     four minutes, 160 MB of disk in .bench
    python benchmarks/bench_next.py --against OLD       this checkout and another one in turn, `--pairs` times
    python benchmarks/bench_next.py --quick             tiny sizes, to see that it runs; the figures mean nothing

The device's tensors are `meta`: they have shapes and no memory, a copy to them moves nothing, and the launch of the
fused kernel is left out. What is measured is thus all that happens before and between the calls of CUDA: a lower bound.
The list is RandomResizedCrop(224), RandomHorizontalFlip(), Normalize(...), over small images. Each call waits until a
batch lies ready, as it does where steps take longer than reading, and begins in one of three states, `--pauses`:

warm: at once, in caches that hold the call before: no training loop is so good to it.
slept: after 10 ms of sleep, as where the thread waits for its device. The core slept as well, or did others' work.
spun: after 10 ms of adding to 4 MB over and over, as where a step computes: twice a core's cache of the second level on
    the machine of the figures, so that the call's code and data come from the third.

`us` is the processor time of the calling thread (`time.thread_time_ns`): reading threads, and waits for them, do not
count. `us_mean` has in it the planning of some thousand rows every few batches. `raw`: rows read by threads. `cached`:
rows kept on the device. `echo`: each batch used twice in turn, fresh (`echo-0`) and again (`echo-1`). `draw`: of a
reading thread and not of `next()`, the planning of a batch of rows in full shuffle and the numbers that its transforms
draw; most of it holds the GIL.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import harness
from fastload import FastLoader
from fastload.device import Backend, DeviceMemory
from fastload.plan import EpochPlan
from fastload.transforms import Draws, ImageSpec, Normalize, RandomHorizontalFlip, RandomResizedCrop
from fastload.transforms.engine import gpu
from fastload.transforms.engine.pipeline import Pipeline
from sample_files import write_packed

KINDS: dict[str, dict[str, Any]] = {"raw": {}, "cached": {"cache": "device"}, "echo": {"echo": 2}}
BATCH_SIZES = (256, 1024)
PAUSE_S = 0.01
TARGETS = {"warm": "<= 50", "slept": "<= 200", "spun": "<= 200"}  # of 256 images, no echoes
TARGET_DRAWN = "<= 300"
TRANSFORM = [RandomResizedCrop(224), RandomHorizontalFlip(), Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.2))]


class MetaClock:
    """Marks of a device that does all at once; of its own, since older checkouts have no such class."""

    mark = staticmethod(time.perf_counter)

    def is_done(self, mark: float) -> bool:
        return True

    def wait(self, mark: float) -> None:
        pass

    def between_s(self, earlier: float, later: float) -> float:
        return later - earlier

    def drop(self, mark: float) -> None:
        pass


class MetaBackend(Backend):
    """A device whose tensors have no memory."""

    clock: Any = MetaClock()

    def __init__(self) -> None:
        self.device = torch.device("meta")

    def pin(self, memory: Any) -> Any:
        return lambda: None

    def drain(self) -> None:
        pass

    def allocate(self, num_bytes: int) -> Any:
        return np.zeros(num_bytes, np.uint8)

    def side_stream(self) -> Any:
        return contextlib.nullcontext()

    def copy(self, host: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        return torch.empty_like(host, device="meta")

    def memory(self) -> DeviceMemory:
        return DeviceMemory(2**40, 2**40)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def fill(self, destination: torch.Tensor, host: torch.Tensor) -> None:
        pass

    def record(self, again: Any = None) -> Any:
        return None

    def finished(self, event: Any) -> bool:
        return True

    def synchronize(self, event: Any) -> None:
        pass

    def hand_over(self, event: Any, tensors: Any) -> None:
        for _ in tensors:
            pass


class NoLaunch:
    """In place of the kernel."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: None


def without_kernel() -> None:
    """Lets passes go the kernel's way on the device without memory, up to its launch."""
    from fastload.transforms.engine import triton_kernels

    triton_kernels.augment = NoLaunch()  # type: ignore[assignment]
    gpu.kernel_runs = lambda device: device.type == "meta"  # type: ignore[assignment]


_memory = np.zeros(2**22, np.uint8)[::64]


def spin() -> None:
    """Adds to more memory than a core's own cache has."""
    end = time.perf_counter() + PAUSE_S
    while time.perf_counter() < end:
        np.add(_memory, 1, out=_memory)


PAUSES: dict[str, Callable[[], None]] = {"warm": lambda: None, "slept": lambda: time.sleep(PAUSE_S), "spun": spin}


def times(data: Path, kind: str, pause: str, batch_size: int, count: int) -> dict[str, dict[str, float]]:
    """Microseconds of next() in a loop of so many batches: by use, medians and 90th percentiles."""
    without_kernel()
    options = KINDS[kind]
    loader = FastLoader(data, batch_size, transform=TRANSFORM, device=MetaBackend(), share=None, **options)
    echo = options.get("echo", 1)
    found: dict[int, list[float]] = {use: [] for use in range(echo)}
    batches, step = iter(loader), 0
    for number in range((count + 10) * echo):
        # A look inside; of checkouts in which it had another name, too.
        ahead: Any = getattr(loader, "_producer", None) or loader._batches  # type: ignore[attr-defined]
        while ahead is not None and ahead.depth() == 0:
            time.sleep(1e-4)
        PAUSES[pause]()
        began = time.thread_time_ns()
        batch = next(batches, None)
        spent = time.thread_time_ns() - began
        if batch is None:
            batches, step = iter(loader), 0
            continue
        if number >= 10 * echo:
            found[step % echo].append(spent / 1e3)
        step += 1
    loader.close()
    return {f"{kind}-{use}" if echo > 1 else kind: summary(values) for use, values in found.items()}


def drawing(pause: str, batch_size: int, count: int) -> dict[str, dict[str, float]]:
    """Microseconds of planning a batch and drawing its numbers, of so many batches of an epoch."""
    plan = EpochPlan(range((count + 10) * batch_size), batch_size=batch_size, shuffle="full", seed=1)
    pipeline = Pipeline(TRANSFORM, ImageSpec(3, 256, 256, torch.uint8))
    words = np.empty(pipeline.num_words(batch_size), np.int32)
    found: list[float] = []
    batches = plan.batches(0)
    for _ in range(count + 10):
        PAUSES[pause]()
        began = time.thread_time_ns()
        pipeline.draw(Draws(1, 0, next(batches).rows), 1, words)
        found.append((time.thread_time_ns() - began) / 1e3)
    return {"draw": summary(found[10:])}


def summary(values: list[float]) -> dict[str, float]:
    """The median, the 90th percentile and the mean."""
    return {
        "us": float(np.median(values)), "us_p90": float(np.percentile(values, 90)), "us_mean": float(np.mean(values))
    }  # fmt: skip


def visited(checkout: Path, words: list[str]) -> dict[str, dict[str, float]]:
    """The same of another checkout, in a process of its own."""
    path = os.pathsep.join([str(checkout), str(Path(__file__).parent)])
    said = subprocess.run(
        [sys.executable, __file__, "--one", *words], env=os.environ | {"PYTHONPATH": path}, cwd=checkout,
        check=True, text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    return json.loads(said.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    """Measure, and append the records."""
    parser = harness.command_line(__doc__, "next", figures=[*KINDS, "draw"], pairs=3)
    parser.add_argument("--pauses", nargs="+", choices=PAUSES, default=list(PAUSES), help="before each call")
    parser.add_argument("--rows", type=int, default=50_000, help="images of 32x32x3 (default: 50,000)")
    parser.add_argument("--batches", type=int, default=100, help="of each figure (default: 100)")
    parser.add_argument("--against", type=Path, help="another checkout, measured in turn with this one")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        data, kind, pause, batch_size, count = options.one
        if kind == "draw":
            print(json.dumps(drawing(pause, int(batch_size), int(count))))
        else:
            print(json.dumps(times(Path(data), kind, pause, int(batch_size), int(count))))
        return
    if options.quick:
        options.rows, options.batches, options.pairs = 400, 3, 1
    checkouts = {"us": harness.ROOT} | ({"before": options.against.resolve()} if options.against else {})
    journal = harness.begin(options, "rows", "batches", "pairs", **{
        "before": harness.commit(options.against) if options.against else None,
    })  # fmt: skip
    path = options.data / f"noise-{options.rows}.h5"
    if not path.exists():
        write_packed(path, np.random.default_rng(0).integers(0, 256, (options.rows, 32, 32, 3), np.uint8))
    batch_sizes = (8,) if options.quick else BATCH_SIZES
    for kind, batch_size, pause in itertools.product(options.only, batch_sizes, options.pauses):
        runs: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in checkouts}
        for pair in range(options.pairs):
            for name in sorted(checkouts, reverse=bool(pair % 2)):
                words = [str(path), kind, pause, str(batch_size), str(options.batches)]
                runs[name].append(visited(checkouts[name], words))
        for figure in runs["us"][0]:
            values = {
                f"{key}{'' if name == 'us' else '_before'}": harness.spread([run[figure][key] for run in runs[name]])
                for name in checkouts
                for key in ("us", "us_p90", "us_mean")
            }
            about = {"rows": options.rows, "row_shape": [32, 32, 3], "batch_size": batch_size}
            target = TARGET_DRAWN if kind == "draw" else TARGETS[pause]
            target = target if batch_size == 256 and kind != "echo" else ""
            journal.note(f"{figure}-{batch_size}-{pause}", target=target, file=about, **values)


if __name__ == "__main__":
    main()
