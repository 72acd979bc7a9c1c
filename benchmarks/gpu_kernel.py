"""Sections of `gpu.py`: what a copy reaches here, and the fused kernel beside it and beside the usual ways."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import gpu_pipelines as pipelines
import harness
from gpu_bench import Bench
from gpu_device import Device
from gpu_timing import call_ms, device_ms, kernel_ms

INPUTS = 4  # batches in turn, so that the L2 cache (60 MB) does not hold the next one


def copy_rates(bench: Bench) -> None:
    """The yardsticks: GB/s of plain copies. One on the device counts what it reads and what it writes."""
    device, size, pinned = bench.device, bench.sizes.copy_bytes, bench.device.kind == "cuda"
    batch_bytes = bench.sizes.batches[0] * bench.sizes.photo**2 * 3
    on_device = [_noise(device, size) for _ in range(2)]
    ways: dict[str, tuple[int, Callable[[], Any]]] = {}
    for name, count in (("", size), (" of one batch", batch_bytes)):
        host, page_locked = _noise(None, count), _noise(None, count)
        page_locked = page_locked.pin_memory() if pinned else page_locked
        inner = on_device[0][:count], on_device[1][:count]
        ways[f"device to device{name}"] = 2 * count, lambda to=inner[1], of=inner[0]: to.copy_(of)
        ways[f"pinned to device{name}"] = count, lambda to=inner[0], of=page_locked: to.copy_(of, non_blocking=True)
        ways[f"pageable to device{name}"] = count, lambda to=inner[0], of=host: to.copy_(of)
        ways[f"device to pinned{name}"] = count, lambda to=page_locked, of=inner[0]: to.copy_(of, non_blocking=True)
        ways[f"host to host{name}"] = count, lambda to=page_locked, of=host: to.copy_(of)
    for name, (moved, copy) in ways.items():

        def measure(name: str = name, moved: int = moved, copy: Callable[[], Any] = copy) -> dict[str, Any]:
            if name.startswith("host"):
                times = call_ms(device, copy, bench.sizes.repeats, 1)
            else:
                times = device_ms(device, copy, bench.sizes.repeats)["ms"]
            rates = {key: moved / times[other] / 1e6 for key, other in _SWAPPED.items()}
            return {"value": rates["median"], "unit": "GB/s", "gb_per_s": rates, "bytes": moved}

        bench.figure(f"copy {name}", measure)


_SWAPPED = {"median": "median", "lowest": "highest", "highest": "lowest"}


def fused_kernel(bench: Bench) -> None:
    """256x256 -> RandomResizedCrop 224, flip, Normalize to bfloat16; with colour; and Resize 512 -> 224."""
    sizes = bench.sizes
    cases = [(f"crop, batch {batch}", batch, sizes.photo, {}) for batch in sizes.batches]
    cases += [
        ("crop and colour", sizes.batches[0], sizes.photo, {"jitter": True}),
        (f"resize {sizes.large}", sizes.batches[0], sizes.large, {"resize_only": True}),
    ]
    for name, batch, side, options in cases:
        _case(bench, name, batch, side, options)
    bench.figure("kernel configurations", lambda: _configurations(bench))


def _case(bench: Bench, name: str, batch: int, side: int, options: dict[str, bool]) -> None:
    device, sizes = bench.device, bench.sizes
    inputs = itertools.cycle([_photos(device, batch, side, seed) for seed in range(INPUTS)])
    epochs = itertools.count()
    resize_only, jitter = options.get("resize_only", False), options.get("jitter", False)

    def ours(dtype: torch.dtype = torch.bfloat16) -> list[Any]:
        if resize_only:
            return pipelines.plain_resize(sizes.crop, dtype=dtype)
        return pipelines.augmentation(sizes.crop, jitter=jitter, dtype=dtype)

    bench.figure(
        f"fused {name}", lambda: _against_copy(bench, ours(), inputs, epochs), target="" if options else ">= 0.5"
    )
    bench.figure(
        f"correct {name}",
        lambda: _difference(device, ours(torch.float32), next(inputs)),
        target="" if jitter else "<= 1",  # colour factors let a difference of one level grow
    )
    if batch != sizes.batches[0]:
        return  # the slow ways once
    pipeline = _made(ours)

    def fused() -> torch.Tensor:
        return pipelines.apply(pipeline(), next(inputs), next(epochs))

    def torch_ops() -> torch.Tensor:
        return pipelines.apply_one_by_one(pipeline(), next(inputs), next(epochs))

    judged = not options  # the targets are for the plain crop
    ways: dict[str, tuple[Callable[[], Callable[[], Any]], str]] = {
        "plain torch": (lambda: torch_ops, ">= 3"),
        "torchvision one by one": (lambda: torchvision(one_by_one=True), ">= 20"),
        "torchvision batched": (lambda: torchvision(one_by_one=False), ""),
    }
    if judged:
        ways["grid_sample"] = (lambda: _grid_sample(device, pipeline(), sizes.crop, inputs), "")

    def torchvision(*, one_by_one: bool) -> Callable[[], torch.Tensor]:
        composed = pipelines.torchvision_pipeline(sizes.crop, jitter=jitter, resize_only=resize_only)
        return lambda: _torchvision(composed, next(inputs), one_by_one=one_by_one)

    for way, (make, target) in ways.items():
        bench.figure(
            f"{name}, over {way}",
            lambda make=make: _over(bench, fused, make()),
            target=target if judged else "",
        )


def _made(make: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    """The pipeline, made when it is first asked for: what is absent is then told where the figure is."""
    kept: list[list[Any]] = []

    def get() -> list[Any]:
        if not kept:
            kept.append(make())
        return kept[0]

    return get


def _torchvision(composed: Any, images: torch.Tensor, *, one_by_one: bool) -> torch.Tensor:
    """What v2 makes of a batch: each image by its own numbers, or all by the same."""
    result = torch.stack([composed(image) for image in images]) if one_by_one else composed(images)
    return result.contiguous(memory_format=torch.channels_last)


def _grid_sample(
    device: Device, pipeline: Sequence[Any], size: int, inputs: Iterator[torch.Tensor]
) -> Callable[[], torch.Tensor]:
    images = next(inputs)
    mean, std = (torch.tensor(values, device=device.torch)[:, None, None] * 255
                 for values in (pipelines.MEAN, pipelines.STD))  # fmt: skip
    relative = pipelines.windows_of(pipeline, images) / images.shape[2]
    windows = torch.from_numpy(relative).to(device.torch, torch.float32)
    return lambda: pipelines.grid_sampled(next(inputs), windows, size, mean, std)


def _against_copy(
    bench: Bench, pipeline: Sequence[Any], inputs: Iterator[torch.Tensor], epochs: Iterator[int]
) -> dict[str, Any]:
    """GB/s of what must move, over those of a copy on the device that moves as many bytes: timed in turn."""
    device, repeats = bench.device, bench.sizes.repeats
    moved = pipelines.bytes_to_move(pipeline, next(inputs), bench.sizes.crop)

    def run() -> torch.Tensor:
        return pipelines.apply(pipeline, next(inputs), next(epochs))

    halves = itertools.cycle([(_noise(device, moved // 2), _noise(device, moved // 2)) for _ in range(2)])

    def copy() -> torch.Tensor:
        to, of = next(halves)
        return to.copy_(of)

    ours, base, ratios = [], [], []
    for _ in range(max(3, bench.sizes.pairs)):
        ours.append(device_ms(device, run, repeats))
        base.append(device_ms(device, copy, repeats))
        ratios.append(base[-1]["ms"]["median"] / ours[-1]["ms"]["median"])
    path = pipelines.void_unless_fused(device.kind)
    kernels, copied = kernel_ms(device, run, repeats), kernel_ms(device, copy, repeats)
    hidden = all(one["host_hidden"] for one in ours)
    by_kernels = copied["ms"] / kernels["ms"] if kernels["ms"] else None
    # Where the host could not stay ahead, events have the gaps between its launches in them; the profiler has not.
    value = harness.spread(ratios)["median"] if hidden or by_kernels is None else by_kernels
    batch = len(next(inputs))
    by_clock = call_ms(device, run, 5, repeats)
    return {
        "value": value, "unit": "of a device copy", **path, "ratio": harness.spread(ratios),
        "ratio_of_kernels": by_kernels,
        "ratio_of_largest_kernel": copied["ms"] / max(kernels["largest"].values()) if kernels["largest"] else None,
        "kernels": kernels, "copy_kernel_ms": copied["ms"],
        "timed_by": "events" if hidden else "profiler", "bytes": moved,
        "device_ms": harness.spread([one["ms"]["median"] for one in ours]),
        "copy_ms": harness.spread([one["ms"]["median"] for one in base]),
        "gb_per_s": moved / harness.spread([one["ms"]["median"] for one in ours])["median"] / 1e6,
        "call_ms": by_clock, "images_per_s": batch / by_clock["median"] * 1e3,
    }  # fmt: skip


def _over(bench: Bench, way: Callable[[], Any], base: Callable[[], Any]) -> dict[str, Any]:
    """How many times as fast by the clock, a call after another; pairs in turn."""
    device, calls = bench.device, max(1, bench.sizes.repeats // 4)
    way()
    path = pipelines.void_unless_fused(device.kind)

    def rate(work: Callable[[], Any], calls: int) -> Callable[[], float]:
        return lambda: 1e3 / call_ms(device, work, 1, calls)["median"]

    result = harness.compare(rate(way, 4 * calls), rate(base, calls), pairs=min(3, bench.sizes.pairs))
    return {"value": result["ratio"]["median"], "unit": "times as fast", **path, "ratio": result["ratio"],
            "calls_per_s": result["way"], "base_calls_per_s": result["base"]}  # fmt: skip


def _difference(device: Device, pipeline: Sequence[Any], images: torch.Tensor) -> dict[str, Any]:
    """Largest difference from the transforms one by one, in levels of 255, on float32 results of the same draws."""
    result = pipelines.apply(pipeline, images, 7)
    path = pipelines.void_unless_fused(device.kind)
    expected = pipelines.apply_one_by_one(pipeline, images, 7)
    std = torch.tensor(pipelines.STD, device=device.torch)[:, None, None]
    levels = (result.float() - expected.float()).abs() * std * 255
    return {
        "value": round(float(levels.max()), 3), "unit": "levels", **path,
        "share_above_half_a_level": float((levels > 0.5).float().mean()),
        "finite": bool(torch.isfinite(result).all()), "shape": list(result.shape),
    }  # fmt: skip


def _configurations(bench: Bench) -> dict[str, Any]:
    """Milliseconds of the crop in each way that the kernel can be launched: block_y x block_x x num_warps."""
    device, times = bench.device, {}
    for batch in bench.sizes.batches:
        inputs = itertools.cycle([_photos(device, batch, bench.sizes.photo, seed) for seed in range(INPUTS)])
        pipeline, epochs = pipelines.augmentation(bench.sizes.crop), itertools.count()
        for blocks in pipelines.kernel_configurations():
            name = " x ".join(map(str, blocks))
            with pipelines.launches.using(blocks=blocks):
                run = lambda: pipelines.apply(pipeline, next(inputs), next(epochs))  # noqa: B023, E731
                try:
                    times[f"{name}, batch {batch}"] = device_ms(device, run, bench.sizes.repeats)["ms"]["median"]
                except Exception as exc:  # noqa: BLE001  # one that the device refuses is told among the others
                    times[f"{name}, batch {batch}"] = f"{type(exc).__name__}: {exc}"[:200]
    best = min((value, name) for name, value in times.items() if isinstance(value, float))
    return {"value": best[0], "unit": f"ms: {best[1]}", **pipelines.void_unless_fused(device.kind), "device_ms": times}


def _photos(device: Device, batch: int, side: int, seed: int = 0) -> torch.Tensor:
    """Photo-like images, uint8 (B, 3, side, side) in channels_last memory: smooth colours and fine grain."""
    generator = torch.Generator(device.torch).manual_seed(seed)
    coarse = torch.rand(batch, 3, 8, 8, device=device.torch, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (side, side), mode="bilinear")
    grain = torch.rand(batch, 3, side, side, device=device.torch, generator=generator)
    return (smooth * 220 + grain * 30).to(torch.uint8).contiguous(memory_format=torch.channels_last)


def _noise(device: Device | None, count: int) -> torch.Tensor:
    where = device.torch if device is not None else torch.device("cpu")
    some = torch.randint(0, 256, (min(count, 1 << 20),), dtype=torch.uint8, device=where)
    return some.repeat(-(-count // len(some)))[:count].clone()
