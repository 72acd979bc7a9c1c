"""Sections of `gpu.py`: training from FastLoader and from a DataLoader, beside the same step on one cached batch.

A turn is a segment of some seconds, its first steps not counted, so that batches made ready during the other way's turn
are used up. The counters of the driver and the loader's own stall share come from one long run without turns.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import gpu_data
import gpu_pipelines as pipelines
import harness
from fastload import FastLoader
from gpu_bench import Bench
from gpu_device import Device
from gpu_feed import open_loader, plain_loader
from gpu_meter import counters

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]

TRAININGS = {"resnet50": ("photos", "crop", ">= 0.99"), "resnet18": ("faces", "small_crop", ">= 0.98")}
DISCARDED = 10  # steps at the beginning of a segment


class Trainer:
    """One network with its optimizer: a step is bfloat16 autocast, channels_last, SGD with momentum."""

    def __init__(self, device: Device, net: str, *, tiny: bool, compiled: bool = False) -> None:
        torch.backends.cudnn.benchmark = True
        torch.manual_seed(0)
        self.net: Any = _network(net, tiny=tiny).to(device.torch, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        self._kind, self._loss = device.torch.type, nn.CrossEntropyLoss()
        if compiled:
            # "eager" runs the same graphs without minutes of a compiler.
            self.net = torch.compile(self.net, backend="eager" if tiny else "inductor")

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Forward, backward, update; nothing is waited for."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self._kind, torch.bfloat16):
            loss = self._loss(self.net(images), labels)
        loss.backward()
        self.optimizer.step()


def _network(name: str, *, tiny: bool) -> nn.Module:
    if tiny:
        return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                             nn.Linear(8, gpu_data.CLASSES))  # fmt: skip
    try:
        from torchvision import models
    except ImportError as exc:
        raise pipelines.AbsentError(f"torchvision cannot be imported here ({exc})") from exc
    return getattr(models, name)(weights=None, num_classes=1000)  # type: ignore[no-any-return]


class Segment:
    """What some steps took.

    Attributes:
        step_s: seconds a step.
        next_share: part of them that the host spent asking for batches.
        gap_share: part of them between the end of a step and the beginning of the next on the device: waiting, and
            augmentation.
    """

    def __init__(
        self, device: Device, trainer: Trainer, batches: Batches, steps: int, discard: int = DISCARDED
    ) -> None:
        for _ in range(discard):
            trainer.step(*next(batches))
        device.synchronize()
        marks, next_s, begin = [], 0.0, time.perf_counter()
        for _ in range(steps):
            asked = time.perf_counter()
            images, labels = next(batches)
            next_s += time.perf_counter() - asked
            marks.append((device.event(), device.event()))
            marks[-1][0].record()
            trainer.step(images, labels)
            marks[-1][1].record()
        device.synchronize()
        elapsed = time.perf_counter() - begin
        gaps = [end.elapsed_time(start) / 1e3 for (_, end), (start, _) in itertools.pairwise(marks)]
        self.step_s, self.next_share, self.gap_share = elapsed / steps, next_s / elapsed, sum(gaps) / elapsed


class Endless:
    """A loader's batches, epoch after epoch; adds up what its epochs say of themselves."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.stall_s = self.elapsed_s = 0.0

    def batches(self) -> Batches:
        """Images and labels; never ends."""
        while True:
            yield from self.loader
            stats = self.loader.stats
            self.stall_s, self.elapsed_s = self.stall_s + stats.stall_s, self.elapsed_s + stats.elapsed_s

    def stall_share(self) -> float:
        """The loader's own stall share since it was begun, the running epoch included."""
        stats = self.loader.stats
        elapsed = self.elapsed_s + stats.elapsed_s
        return (self.stall_s + stats.stall_s) / elapsed if elapsed else 0.0


def _same(batch: tuple[torch.Tensor, torch.Tensor]) -> Batches:
    while True:
        yield batch


def _steps_for(device: Device, trainer: Trainer, batch: tuple[torch.Tensor, torch.Tensor], seconds: float) -> int:
    """Steps that fill so many seconds, after warming up."""
    Segment(device, trainer, _same(batch), 3, discard=5)
    return max(4, round(seconds / Segment(device, trainer, _same(batch), 5, discard=0).step_s))


def train(bench: Bench, net: str, *, compiled: bool = False) -> None:
    """FastLoader with augmentation on the device, over the same step on one cached batch; then the long runs."""
    kind, size_name, target = TRAININGS[net]
    size, words = getattr(bench.sizes, size_name), f"training {net}{', compiled' if compiled else ''}"
    usual, large = bench.sizes.batches[:2]
    # A small step has the least time to hide anything in, and at a large batch the most bytes a second.
    cases: list[tuple[str | None, int]] = [(None, usual)] if compiled else [(None, usual), ("device", usual)]
    if net == "resnet18" and not compiled:
        cases.insert(1, (None, large))
    for cache, batch in cases:
        name = words + (f", batch {batch}" if batch != usual else "") + (f", cache {cache}" if cache else "")

        def measure(cache: str | None = cache, batch: int = batch) -> dict[str, Any]:
            loader = open_loader(
                bench, kind, batch, pipelines.augmentation(size), fields=("images", "labels"), cache=cache
            )
            return trained(bench, loader, net, batch, compiled=compiled, long=cache is None)

        found = bench.figure(name, measure, target=target)
        _note_watched(bench, name, found)


def _note_watched(bench: Bench, name: str, found: dict[str, Any]) -> None:
    """Utilization and stall share of a training as figures of their own, beside the ratio that they belong to."""
    beside = f"while {name} is at {found.get('value', 0):.3f} of the cached-batch step"
    void = {"void": found["void"]} if "void" in found else {}
    if bench.device.kind == "cpu":
        void = {"void": "there is no GPU; its readings are made up to try the plumbing"}
    busy, base = (found.get(key, {}).get("utilization_percent") for key in ("counters", "cached_counters"))
    if busy:
        there = f", which has {base['mean']:.1f} %" if base else ""
        bench.note(f"GPU utilization, {name}", value=busy["mean"], unit=f"%, {beside}{there}", target=">= 99", **void)
    if "stall_share" in found:
        share = 100 * found["stall_share"]
        bench.note(f"stall share, {name}", value=share, unit=f"%, {beside}", target="<= 1", **void)


def trained(
    bench: Bench, loader: FastLoader, net: str, batch_size: int, *, compiled: bool = False, long: bool = True
) -> dict[str, Any]:
    """Trains from a loader, in turn with the same step on one of its batches; closes the loader.

    Args:
        long: whether two long runs follow, from the loader and on the one batch: the driver's counters are theirs.
    """
    device, sizes = bench.device, bench.sizes
    trainer = Trainer(device, net, tiny=sizes.tiny, compiled=compiled)
    device.reset_peaks()
    try:
        batches = Endless(loader).batches()
        images, labels = next(batches)
        cached = images.clone(memory_format=torch.preserve_format), labels.clone()
        path = pipelines.void_unless_fused(device.kind)
        steps = _steps_for(device, trainer, cached, sizes.segment_s)
        Segment(device, trainer, batches, 2)
        segments: dict[str, list[Segment]] = {"loader": [], "cached": []}

        def turn(name: str, source: Batches) -> float:
            segments[name].append(Segment(device, trainer, source, steps))
            return batch_size / segments[name][-1].step_s

        result = harness.compare(
            lambda: turn("loader", batches), lambda: turn("cached", _same(cached)),
            pairs=sizes.pairs if long else max(1, sizes.pairs // 2), warm_up=0,
        )  # fmt: skip
        peaks, watched = device.peaks(), {}
        if long:
            endless = Endless(loader)
            watched = _metered(bench, trainer, endless.batches(), steps) | {"stall_share": endless.stall_share()}
            base = _metered(bench, trainer, _same(cached), steps)
            watched |= {"cached_counters": base["counters"], "cached_watched_step_s": base["watched_step_s"]}
    finally:
        loader.close()
    return {
        "value": result["ratio"]["median"], "unit": "of the cached-batch step", **path, "ratio": result["ratio"],
        "images_per_s": result["way"], "cached_images_per_s": result["base"], "batch_size": batch_size,
        "size": images.shape[-1], "steps_a_segment": steps, "peaks": peaks,
        "gap_share": statistics.median(one.gap_share for one in segments["loader"]),
        "gap_share_cached": statistics.median(one.gap_share for one in segments["cached"]),
        "next_share": statistics.median(one.next_share for one in segments["loader"]),
        **watched,
    }  # fmt: skip


def _metered(bench: Bench, trainer: Trainer, batches: Batches, steps: int) -> dict[str, Any]:
    """A long run without turns, and what the driver's counters say of it."""
    device, sizes = bench.device, bench.sizes
    steps = max(4, round(steps * sizes.watch_s / sizes.segment_s))
    skip_s = 0.0 if sizes.tiny else min(1.5, sizes.watch_s / 4)  # a tiny run may be over before that
    with counters(device.nvml(), skip_s=skip_s, visible="0" if device.kind == "cpu" else None) as found:
        run = Segment(device, trainer, batches, steps, discard=0)
    return {"counters": found, "watched_gap_share": run.gap_share, "watched_step_s": run.step_s,
            "watched_next_share": run.next_share}  # fmt: skip


def train_plain(bench: Bench, net: str) -> None:
    """The same training from JPEG files, torchvision's transforms and a DataLoader, over the cached-batch step."""
    kind, size_name, _ = TRAININGS[net]
    bench.figure(
        f"training {net}, JPEG and DataLoader", lambda: _train_plain(bench, net, kind, getattr(bench.sizes, size_name))
    )


def _train_plain(bench: Bench, net: str, kind: str, size: int) -> dict[str, Any]:
    device, sizes = bench.device, bench.sizes
    trainer, batch_size = Trainer(device, net, tiny=sizes.tiny), sizes.batches[0]
    loader = plain_loader(bench, kind, batch_size, size, 1000 * batch_size)  # long epochs

    def moved() -> Batches:
        for images, labels in itertools.chain.from_iterable(itertools.repeat(loader)):
            yield (images.to(device.torch, memory_format=torch.channels_last, non_blocking=True),
                   labels.to(device.torch, non_blocking=True))  # fmt: skip

    batches = moved()
    images, labels = next(batches)
    cached = images.clone(memory_format=torch.preserve_format), labels.clone()
    steps = _steps_for(device, trainer, cached, sizes.segment_s)
    # What lay ready is used up first: its workers hold two batches each.
    ready = 2 * sizes.plain_workers + DISCARDED if not sizes.tiny else 2
    Segment(device, trainer, batches, 2, discard=ready)
    before = Segment(device, trainer, _same(cached), steps)
    Segment(device, trainer, batches, 2, discard=ready)
    begin = time.perf_counter()
    first = _metered(bench, trainer, batches, steps if steps < 60 else steps // 2)
    elapsed = time.perf_counter() - begin
    after = Segment(device, trainer, _same(cached), steps)
    cached_step_s = statistics.median([before.step_s, after.step_s])
    return {
        "value": cached_step_s / first["watched_step_s"] if "watched_step_s" in first else None,
        "unit": "of the cached-batch step", "images_per_s": batch_size / first.get("watched_step_s", float("nan")),
        "cached_images_per_s": batch_size / cached_step_s, "batch_size": batch_size, "size": size,
        "workers": sizes.plain_workers, "watched_s": elapsed, **first,
    }  # fmt: skip
