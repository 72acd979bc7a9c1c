"""Section of `gpu.py`: how fast may a training step be before the loader holds it up? A synthetic step tells.

The step is matrix products of a time that is set, so every rate can be tried; it runs on FastLoader's augmented batches
and on one cached batch, in turn. Augmentation shares the device with the step, so it counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

import gpu_pipelines as pipelines
import harness
from gpu_bench import Bench
from gpu_device import Device
from gpu_feed import open_loader
from gpu_train import Endless

KEPT = 0.99


class SyntheticStep:
    """Products of bfloat16 matrices, as many as a time needs, after one look at the batch."""

    def __init__(self, device: Device, side: int) -> None:
        self._device = device
        self._a, self._b = (torch.randn(side, side, device=device.torch, dtype=torch.bfloat16) for _ in range(2))
        self._out = torch.empty_like(self._a)
        for _ in range(2):  # the first time warms up
            self.product_s = self._timed(50)

    def _timed(self, count: int) -> float:
        self._device.synchronize()
        begin = time.perf_counter()
        self._multiply(count)
        self._device.synchronize()
        return (time.perf_counter() - begin) / count

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._a, self._b, out=self._out)

    def products(self, seconds: float) -> int:
        """How many of them take so long."""
        return max(1, round(seconds / self.product_s))

    def __call__(self, images: torch.Tensor, products: int) -> None:
        images[:, :, ::32, ::32].sum()
        self._multiply(products)


def step_rate(bench: Bench) -> None:
    """The highest rate, images/s, that keeps 0.99 of the cached-batch step: page cache, and each cache."""
    for cache in (None, "device", "host"):
        bench.figure(f"highest step rate, cache {cache}", lambda cache=cache: _sweep(bench, cache))


def _sweep(bench: Bench, cache: str | None) -> dict[str, Any]:
    device, sizes = bench.device, bench.sizes
    batch_size = sizes.batches[0]
    loader = open_loader(bench, "photos", batch_size, pipelines.augmentation(sizes.crop), cache=cache)
    try:
        batches = (batch[0] for batch in Endless(loader).batches())
        cached = next(batches).clone(memory_format=torch.preserve_format)
        path = pipelines.void_unless_fused(device.kind)
        step = SyntheticStep(device, 64 if sizes.tiny else 2048)
        points: list[dict[str, Any]] = []
        for rate in sizes.rates:
            points.append(_point(bench, step, batches, cached, batch_size / rate) | {"wished": rate})
            if len(points) > 1 and max(point["ratio"]["median"] for point in points[-2:]) < 0.8:
                break
    finally:
        loader.close()
    highest = highest_kept(points)
    unit = "images/s" if highest else f"images/s: no rate that was tried stayed at {KEPT}"
    return {"value": highest, "unit": unit, **path, "points": points, "batch_size": batch_size}


def highest_kept(points: list[dict[str, Any]]) -> float:
    """The rate of the cached-batch step up to which, without a break, the ratio stays at 0.99 or more; 0: none."""
    best = 0.0
    for point in sorted(points, key=lambda point: float(point["images_per_s"])):
        if point["ratio"]["median"] < KEPT:
            break
        best = point["images_per_s"]
    return best


def _point(
    bench: Bench, step: SyntheticStep, batches: Iterator[torch.Tensor], cached: torch.Tensor, step_s: float
) -> dict[str, Any]:
    products, steps = step.products(step_s), max(16, round(bench.sizes.segment_s / 8 / step_s))

    def same() -> Iterator[torch.Tensor]:
        while True:
            yield cached

    def rate(source: Iterator[torch.Tensor]) -> float:
        for _ in range(8):  # uses up what was made ready in the other's turn
            step(next(source), products)
        bench.device.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            step(next(source), products)
        bench.device.synchronize()
        return steps * len(cached) / (time.perf_counter() - begin)

    result = harness.compare(
        lambda: rate(batches), lambda: rate(same()), pairs=max(1, bench.sizes.pairs - 2), warm_up=0
    )
    return {"ratio": result["ratio"], "images_per_s": result["base"]["median"], "steps": steps, "products": products}
