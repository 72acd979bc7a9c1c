"""Sections of `gpu.py` whose batches cost the CPU something: JPEGs in the packed file, and transforms in Python."""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import fastload
import gpu_data
import gpu_pipelines as pipelines
import harness
from fastload import FastLoader, PackedDataset
from fastload.device import Backend
from gpu_bench import Bench
from gpu_feed import epochs_for
from gpu_train import trained


def stored(bench: Bench) -> None:
    """ResNet-50 from JPEGs as the packed file has them: decoded by so many threads, by the device; and that alone."""
    path, batch = bench.data / "stored.h5", bench.sizes.batches[0]
    if not path.exists():
        fastload.pack_images(bench.data / "photos", path, store="source")
    bench.figure("decoding JPEG on the device, torchvision", lambda: _decoded_on_device(bench))
    bench.figure("training resnet50, stored JPEG, device", lambda: _trained_on_device(bench))
    for threads in bench.sizes.decoders:

        def measure(threads: int = threads) -> dict[str, Any]:
            loader = FastLoader(
                PackedDataset(path, fields=["images", "labels"]), batch, workers=threads, device=bench.device.loader,
                transform=pipelines.augmentation(bench.sizes.crop),
            )  # fmt: skip
            found = trained(bench, loader, "resnet50", batch, long=False)
            # The threads that decode also cut: what is left for the device is Normalize, which is not the fused kernel.
            return {name: value for name, value in found.items() if name != "void"}

        bench.figure(f"training resnet50, stored JPEG, threads {threads}", measure)


def _trained_on_device(bench: Bench) -> dict[str, Any]:
    """The same training with `decode="device"`: threads hand over bytes, and the fused kernel cuts."""
    data = PackedDataset(bench.data / "stored.h5", fields=["images", "labels"], decode="device")
    batch, transform = bench.sizes.batches[0], pipelines.augmentation(bench.sizes.crop)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            loader = FastLoader(data, batch, device=bench.device.loader, transform=transform)
        except UserWarning as exc:
            raise pipelines.AbsentError(str(exc)) from exc
    return trained(bench, loader, "resnet50", batch, long=False)


def _decoded_on_device(bench: Bench) -> dict[str, Any]:
    """Images/s of `torchvision.io.decode_jpeg(device="cuda")`, a batch of files' bytes at a time, nothing else done."""
    device, batch = bench.device, bench.sizes.batches[0]
    try:
        from torchvision.io import decode_jpeg
    except ImportError as exc:
        raise pipelines.AbsentError(f"torchvision cannot be imported here ({exc})") from exc
    files = gpu_data.jpeg_files(bench.data / "photos")[:batch]
    encoded = [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files]
    images = decode_jpeg(encoded, device=device.torch)
    from PIL import Image

    with Image.open(io.BytesIO(encoded[0].numpy().tobytes())) as image:
        levels = np.abs(images[0].permute(1, 2, 0).cpu().numpy().astype(int) - np.asarray(image.convert("RGB"))).max()
    rates = []
    for _ in range(max(3, bench.sizes.pairs)):
        device.synchronize()
        begin = time.perf_counter()
        decode_jpeg(encoded, device=device.torch)
        device.synchronize()
        rates.append(len(encoded) / (time.perf_counter() - begin))
    spread = harness.spread(rates)
    return {"value": spread["median"], "unit": "images/s", "images_per_s": spread, "levels_from_pillow": int(levels)}


def workers(bench: Bench) -> None:
    """A Python transform in worker processes, whose batches lie in pinned shared memory, and in memory that is not."""
    for name, pinned in (("pinned", True), ("not pinned", False)):
        bench.figure(f"worker processes to device, {name}", lambda pinned=pinned: _processes(bench, pinned=pinned))


def mirrored(sample: Any) -> Any:
    """A cheap transform in Python, as a user may have one."""
    return (sample[0].flip(-1),)


@contextmanager
def _watched_pin(backend: type[Backend], *, allowed: bool) -> Iterator[list[bool]]:
    """Gives whether each slot was pinned; where that is not allowed none is, as where `ulimit -l` forbids it."""
    pin, done = backend.pin, list[bool]()

    def watched(self: Backend, memory: Any) -> Any:
        unpin = pin(self, memory) if allowed else None
        done.append(unpin is not None)
        return unpin

    backend.pin = watched  # type: ignore[method-assign]
    try:
        yield done
    finally:
        backend.pin = pin  # type: ignore[method-assign]


def _processes(bench: Bench, *, pinned: bool) -> dict[str, Any]:
    device, sizes = bench.device, bench.sizes
    dataset = PackedDataset(bench.data / "photos.h5", fields=["images"], transform=mirrored)
    loader = FastLoader(dataset, sizes.batches[0], workers=sizes.plain_workers, device=device.loader)
    kind = type(device.loader) if isinstance(device.loader, Backend) else Backend
    with _watched_pin(kind, allowed=pinned) as slots:
        try:
            for _ in loader:  # processes started, slots pinned
                pass
            found = [epochs_for(device, loader, sizes.segment_s / 2) for _ in range(sizes.pairs)]
        finally:
            loader.close()
    rates = harness.spread([one["samples_per_s"] for one in found])
    void = (
        {}
        if slots and all(done == pinned for done in slots)
        else {"void": f"of {len(slots)} slots {sum(slots)} pinned"}
    )
    return {"value": rates["median"], "unit": "images/s", **void, "images_per_s": rates, "workers": sizes.plain_workers,
            "stall_share": loader.stats.stall_share}  # fmt: skip
