"""What does using each batch several times give, when the source cannot keep up with training?

    python benchmarks/bench_echo.py             everything: about ten minutes, nothing on disk but the results
    python benchmarks/bench_echo.py --quick     tiny, to see that it runs; the figures mean nothing
    python benchmarks/plot_echo.py              draws results/echo.png

A small network learns ten classes of drawn pictures (32x32x3) on one processor core; few enough that it overfits
without augmentation. The source gives 1/2, 1/4 and 1/8 of the batches that training could take: a worker process
sleeps for each of them, so that no processor is used. Every way has the same wall time, from its first batch on, and
is looked at on held-out pictures a dozen times; ways are run in turn, with several seeds.

`off`: each batch is used once. `batch`: a loop in the user's code takes each augmented batch n times. `echo`: `echo=n`,
augmented anew each time. `mixed`: `MixedEcho(n)`. `auto`: `echo="auto"`. n is 2, 4 and 8, what the source lacks.

A figure is called way-slowness, with the median over the seeds and its range: held-out accuracy at the end; fresh and
consumed samples a second; stall seconds a step; and, where every seed came that far, the share of the time and of the
fresh samples that `off` needed for the accuracy it has at the end. `curves` holds, for each seed, [seconds, fresh
samples, consumed samples, accuracy] at each look. The source sets the pace, so the two shares are much alike; 1 or more
means that the echoes taught nothing. `echoes` are the factors of the epochs begun.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import Dataset

import harness
from fastload import FastLoader, MixedEcho
from fastload.transforms import CenterCrop, Draws, Normalize, RandomCrop, RandomHorizontalFlip, apply_transforms

WAYS = ("off", "batch", "echo", "mixed", "auto")
SLOWNESS = (2, 4, 8)
CLASSES, SIZE, CROP, BATCH_SIZE = 10, 32, 28, 32
LOOKS = 12
LEARNING_RATE = 2e-3
NORMALIZE = Normalize((0.5,) * 3, (0.25,) * 3)


class Look(NamedTuple):
    """The network at one time of a run."""

    seconds: float
    fresh: int
    consumed: int
    weights: dict[str, torch.Tensor]


class Run(NamedTuple):
    """What one way did with one seed."""

    curve: list[list[float]]
    accuracy: float
    fresh_samples_per_s: float
    consumed_samples_per_s: float
    stall_s_per_step: float
    echoes: list[int]


def smooth(rng: np.random.Generator, cells: int) -> NDArray[np.float32]:
    """A pattern without sharp edges, float32 (SIZE, SIZE, 3), of mean 0 and deviation 1."""
    spectrum = rng.normal(size=(cells, cells, 3))
    places = (np.arange(SIZE) + 0.5) * cells / SIZE
    waves = np.cos(np.pi * places[:, None] * np.arange(cells) / cells)
    pattern = np.einsum("hi,wj,ijc->hwc", waves, waves, spectrum)
    return ((pattern - pattern.mean()) / pattern.std()).astype(np.float32)


def draw_pictures(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures uint8 (count, 3, SIZE, SIZE) and classes int64 (count,).

    A class is two patterns. A picture is one of them, shifted, perhaps mirrored, under a pattern of its own and
    noise: what crops and flips undo is what the samples of a class differ by.
    """
    shapes = np.random.default_rng(12)
    patterns = [[smooth(shapes, 6) for _ in range(2)] for _ in range(CLASSES)]
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    pictures = np.empty((count, SIZE, SIZE, 3), np.uint8)
    for picture, label in zip(pictures, labels, strict=True):
        pattern = np.roll(patterns[label][rng.integers(2)], rng.integers(-5, 6, 2), (0, 1))
        if rng.random() < 0.5:
            pattern = pattern[:, ::-1]
        drawn = rng.uniform(0.5, 1.0) * pattern + 0.6 * smooth(rng, 6) + rng.normal(0, 0.5, pattern.shape)
        picture[:] = np.clip(128 + 40 * drawn, 0, 255)
    return torch.from_numpy(pictures).permute(0, 3, 1, 2), torch.from_numpy(labels)


class SlowPictures(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pictures of which a batch takes batch_s seconds, asleep."""

    def __init__(self, pictures: torch.Tensor, labels: torch.Tensor, batch_s: float) -> None:
        self.pictures, self.labels, self.batch_s = pictures, labels, batch_s
        self._free_s = 0.0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        now = time.perf_counter()
        # What a loop costs between two batches is part of their time, unless nobody asked for more.
        begin = self._free_s if now - self._free_s < self.batch_s / 2 else now
        self._free_s = begin + self.batch_s * len(indices) / BATCH_SIZE
        time.sleep(max(0.0, self._free_s - now))
        return [(self.pictures[index], self.labels[index]) for index in indices]


def make_net() -> nn.Module:
    """Three convolutions and a linear layer."""
    layers: list[nn.Module] = []
    for before, channels, stride in ((3, 16, 2), (16, 32, 1), (32, 48, 1)):
        layers += [nn.Conv2d(before, channels, 3, stride, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    layers.insert(6, nn.MaxPool2d(2))
    net = nn.Sequential(*layers, nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, CLASSES))
    return net.to(memory_format=torch.channels_last)  # as the batches are


class Bench:
    """The pictures, the options and the journal of one run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.train = draw_pictures(options.pictures, seed=0)
        images, self.held_out_labels = draw_pictures(options.held_out, seed=1)
        draws = Draws(0, 0, np.arange(len(images)), 0)
        self.held_out = apply_transforms((CenterCrop(CROP), NORMALIZE), {"images": images}, draws, ignore_index=255)
        self.step_s = self._step_seconds()
        self.journal = harness.Journal(
            options.out,
            seconds=options.seconds,
            seeds=options.seeds,
            quick=options.quick,
            batch_size=BATCH_SIZE,
            step_ms=round(1e3 * self.step_s, 2),
        )

    def all_ways(self) -> None:
        """Every slowness, seed and way, the ways in turn."""
        file = {"pictures": len(self.train[1]), "shape": [SIZE, SIZE, 3], "classes": CLASSES}
        for slowness in SLOWNESS:
            runs: dict[str, list[Run]] = {way: [] for way in WAYS}
            for seed in range(self.options.seeds):
                for turn in range(len(WAYS)):
                    way = WAYS[(turn + seed) % len(WAYS)]
                    runs[way].append(self.run(way, slowness, seed))
            for way, done in runs.items():
                values = {name: harness.spread([getattr(run, name) for run in done]) for name in Run._fields[1:5]}
                for name, column in (("share_of_time", 0), ("share_of_fresh", 1)):
                    shares = [_share(run.curve, off.curve, column) for run, off in zip(done, runs["off"], strict=True)]
                    reached = [share for share in shares if share is not None]
                    if len(reached) == len(shares):
                        values[name] = harness.spread(reached)
                echoes, curves = [run.echoes for run in done], [run.curve for run in done]
                self.journal.note(f"{way}-{slowness}", file=file, **values, echoes=echoes, curves=curves)

    def run(self, way: str, slowness: int, seed: int) -> Run:
        """Trains for the wall time of a run, then looks at what the network was meanwhile."""
        options = {"echo": slowness, "mixed": MixedEcho(slowness), "auto": "auto"}
        loader = self._loader(self.step_s * slowness, seed, echo=options.get(way, 1))
        repeats = slowness if way == "batch" else 1
        torch.manual_seed(seed)
        net = make_net()
        optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE)
        looks, steps, stall_s = [Look(0.0, 0, 0, _weights(net))], 0, 0.0
        echoes: list[int] = []
        batches = _endless(loader, echoes)
        begin = 0.0
        fresh = consumed = 0
        while True:
            asked = time.perf_counter()
            (images, labels), fresh_now = next(batches)
            now = time.perf_counter()
            if not begin:
                begin = now  # processes are up
            else:
                stall_s += now - asked
            fresh += fresh_now
            for _ in range(repeats):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(images), labels).backward()
                optimizer.step()
                steps, consumed = steps + 1, consumed + len(labels)
            seconds = time.perf_counter() - begin
            if seconds >= len(looks) * self.options.seconds / LOOKS:
                looks.append(Look(seconds, fresh, consumed, _weights(net)))
            if seconds >= self.options.seconds:
                break
        batches.close()
        loader.close()
        curve = [[round(look.seconds, 3), look.fresh, look.consumed, self._accuracy(look.weights)] for look in looks]
        return Run(curve, curve[-1][3], fresh / seconds, consumed / seconds, stall_s / steps, echoes)

    def _loader(self, batch_s: float, seed: int, *, echo: Any = 1) -> FastLoader:
        return FastLoader(
            SlowPictures(*self.train, batch_s),
            BATCH_SIZE,
            shuffle="full",
            seed=seed,
            workers=1,
            transform=[RandomCrop(CROP), RandomHorizontalFlip(), NORMALIZE],
            echo=echo,
        )

    def _step_seconds(self) -> float:
        """Of training alone: augmentation, forward, backward, update; the median of a few epochs."""
        loader = self._loader(0.0, 0)
        net = make_net()
        optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE)
        found = []
        for _ in range(4):
            for images, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(images), labels).backward()
                optimizer.step()
            stats = loader.stats
            found.append((stats.elapsed_s - stats.stall_s) / stats.steps)
        loader.close()
        return float(np.median(found[1:]))

    def _accuracy(self, weights: dict[str, torch.Tensor]) -> float:
        net = make_net()
        net.load_state_dict(weights)
        net.eval()
        with torch.no_grad():
            found = net(self.held_out["images"]).argmax(1)
        return round((found == self.held_out_labels).double().mean().item(), 4)


def _endless(loader: FastLoader, echoes: list[int]) -> Iterator[tuple[Any, int]]:
    """Batches of one epoch after another, each with the fresh samples that came with it."""
    while True:
        fresh = 0
        for batch in loader:
            stats = loader.stats
            if not fresh:
                echoes.append(stats.echo)
            yield batch, stats.fresh_samples - fresh
            fresh = stats.fresh_samples


def _weights(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def _share(curve: list[list[float]], base: list[list[float]], column: int) -> float | None:
    """Of what the base used (seconds or fresh samples) until it was as good as at its end; None: never as good."""
    goal = base[-1][3]
    own, other = (next((point[column] for point in points if point[3] >= goal), None) for points in (curve, base))
    return None if own is None or not other else own / other


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=11.0, help="wall time of one run (default: 11)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pictures", type=int, default=800)
    parser.add_argument("--held-out", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "echo.jsonl")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.seeds, options.pictures, options.held_out = 0.2, 1, 320, 50
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork")  # nothing but sleep runs there, and a forkserver takes seconds a run
    Bench(options).all_ways()


if __name__ == "__main__":
    main()
