"""Sections of `gpu.py`: how fast batches reach the device, from the page cache and from caches, for what CPU time."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import gpu_data
import gpu_pipelines as pipelines
import harness
from fastload import FastLoader, PackedDataset
from fastload.format.header import read_header
from gpu_bench import Bench
from gpu_device import Device
from gpu_timing import InFlight


class JpegFiles(Dataset[tuple[torch.Tensor, int]]):
    """JPEG files in class folders, opened with Pillow and transformed when they are asked for, over and over.

    Args:
        folder: of class folders.
        length: samples; the files are repeated.
        transform: of an opened image.
    """

    def __init__(self, folder: Path, length: int, transform: Callable[[Image.Image], torch.Tensor]) -> None:
        self.files = [str(file) for file in gpu_data.jpeg_files(folder)]
        self.length, self.transform = length, transform

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.files[index % len(self.files)]) as image:
            return self.transform(image.convert("RGB")), index % gpu_data.CLASSES


def open_loader(
    bench: Bench, kind: str, batch: int, transform: Sequence[Any] = (), *, fields: Sequence[str] = ("images",),
    workers: int | None = None, cache: str | None = None,
) -> FastLoader:  # fmt: skip
    """FastLoader of the packed photos or faces."""
    options: dict[str, Any] = {"workers": workers} if workers else {}
    if cache is not None:
        options["cache"] = cache
    data = PackedDataset(bench.data / f"{kind}.h5", fields=list(fields))
    return FastLoader(data, batch, device=bench.device.loader, transform=list(transform), **options)


def plain_loader(bench: Bench, kind: str, batch: int, size: int, length: int) -> DataLoader[Any]:
    """JPEG files, torchvision's transforms and worker processes, as a usual training script has them."""
    transform = pipelines.torchvision_pipeline(size, of_files=True)
    files = JpegFiles(bench.data / kind, length, transform)
    return DataLoader(files, batch, shuffle=True, drop_last=True, num_workers=bench.sizes.plain_workers,
                      pin_memory=bench.device.kind == "cuda", persistent_workers=True)  # fmt: skip


@contextmanager
def cpu_seconds_of() -> Iterator[dict[str, float]]:
    """Seconds by the clock, and of CPU, of this process with all its threads and of its children that have ended."""
    found: dict[str, float] = {}

    def now() -> tuple[float, float]:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.perf_counter(), time.process_time() + children.ru_utime + children.ru_stime

    begin = now()
    yield found
    end = now()
    found |= {"wall_s": end[0] - begin[0], "cpu_s": end[1] - begin[1]}


def num_workers(loader: FastLoader) -> int:
    """Threads or processes that read, where none were asked for, too."""
    return loader._recipe.workers


def epoch(device: Device, loader: FastLoader) -> int:
    """Runs an epoch to its end on the device, three batches ahead of it at most; samples."""
    flight, count = InFlight(device), 0
    for batch in loader:
        count += len(batch[0])
        flight.step()
    flight.finish()
    return count


def epochs_for(device: Device, loader: FastLoader, seconds: float) -> dict[str, float]:
    """Whole epochs until so much time has passed: samples/s and CPU cores in use."""
    with cpu_seconds_of() as used:
        begin, count = time.perf_counter(), 0
        while not count or time.perf_counter() - begin < seconds:
            count += epoch(device, loader)
    return {"samples_per_s": count / used["wall_s"], "cpu_cores": used["cpu_s"] / used["wall_s"],
            "cpu_s_per_1000": 1000 * used["cpu_s"] / count}  # fmt: skip


def row_bytes(bench: Bench, kind: str) -> int:
    """Bytes of one packed image."""
    return read_header(bench.data / f"{kind}.h5").fields["images"].row_bytes


def host_to_device(bench: Bench) -> None:
    """Plain uint8 batches from the page cache into device memory, over a pinned copy of batches of that size."""
    sizes = bench.sizes
    usual = sizes.batches[0]
    tries = [(usual, workers) for workers in sizes.workers] + [(batch, None) for batch in sizes.batches[1:]]
    for batch, workers in tries:
        name = f"page cache to device, batch {batch}, workers {workers or 'default'}"
        bench.figure(name, lambda batch=batch, workers=workers: _over_pinned(bench, batch, workers=workers),
                     target=">= 0.7" if workers is None else "")  # fmt: skip


def host_cache(bench: Bench) -> None:
    """Pinned rows that the device fetches itself: bytes/s over a pinned copy, CPU cores in use."""
    for batch in bench.sizes.batches:
        found = bench.figure(f"host cache to device, batch {batch}",
                             lambda batch=batch: _over_pinned(bench, batch, cache="host"), target=">= 0.8")  # fmt: skip
        if "cpu_cores" in found:
            cores = found["cpu_cores"]["median"]
            bench.note(f"CPU cores of that, batch {batch}", value=cores, unit="cores", target="<= 0.1")
    bench.figure("host cache, augmented", lambda: _augmented(bench, "photos", bench.sizes.crop, cache="host"))


def _over_pinned(bench: Bench, batch: int, *, workers: int | None = None, cache: str | None = None) -> dict[str, Any]:
    device, sizes = bench.device, bench.sizes
    image_bytes = row_bytes(bench, "photos")
    loader = open_loader(bench, "photos", batch, workers=workers, cache=cache)
    try:
        epoch(device, loader)  # pages mapped, slots pinned, rows cached
        host = torch.randint(0, 256, (batch * image_bytes,), dtype=torch.uint8)
        host = host.pin_memory() if device.kind == "cuda" else host
        to = torch.empty_like(host, device=device.torch)
        cores: list[float] = []

        def ours() -> float:
            found = epochs_for(device, loader, sizes.segment_s / 4)
            cores.append(found["cpu_cores"])
            return found["samples_per_s"] * image_bytes / 1e9

        def pinned() -> float:
            flight, begin, count = InFlight(device), time.perf_counter(), max(2, sizes.photo_rows // batch)
            for _ in range(count):
                to.copy_(host, non_blocking=True)
                flight.step()
            flight.finish()
            return count * len(host) / (time.perf_counter() - begin) / 1e9

        result = harness.compare(ours, pinned, pairs=sizes.pairs)
        path = pipelines.void_unless_gathered(device.kind) if cache else {"workers": num_workers(loader)}
        return {"value": result["ratio"]["median"], "unit": "of a pinned copy", "ratio": result["ratio"], **path,
                "gb_per_s": result["way"], "pinned_gb_per_s": result["base"],
                "cpu_cores": harness.spread(cores), "stall_share": loader.stats.stall_share}  # fmt: skip
    finally:
        loader.close()


def device_cache(bench: Bench) -> None:
    """Epochs of rows that stay on the device, augmented to bfloat16."""
    sizes = bench.sizes
    cases = [("faces", sizes.small_crop, batch) for batch in sizes.batches]
    for kind, size, batch in [*cases, ("photos", sizes.crop, sizes.batches[0])]:
        bench.figure(
            f"device cache, {kind} to {size}, batch {batch}",
            lambda kind=kind, size=size, batch=batch: _augmented(bench, kind, size, cache="device", batch=batch),
            target=">= 1000000" if kind == "faces" else "",
        )


def _augmented(bench: Bench, kind: str, size: int, *, cache: str | None, batch: int = 0) -> dict[str, Any]:
    """Images/s into augmented bfloat16 batches; the first epoch, which fills a cache, apart."""
    device, sizes = bench.device, bench.sizes
    loader = open_loader(bench, kind, batch or sizes.batches[0], pipelines.augmentation(size), cache=cache)
    try:
        begin = time.perf_counter()
        samples = epoch(device, loader)
        first_s = time.perf_counter() - begin
        path = pipelines.void_unless_fused(device.kind)
        if cache == "host":
            path |= pipelines.void_unless_gathered(device.kind)
        if cache:  # all rows read into it, and one epoch of them used
            path |= {"filled_gb_per_s": loader.stats.bytes_read / first_s / 1e9, "workers": num_workers(loader)}
        found = [epochs_for(device, loader, sizes.segment_s / 4) for _ in range(sizes.pairs)]
        rates = harness.spread([one["samples_per_s"] for one in found])
        return {"value": rates["median"], "unit": "images/s", **path, "images_per_s": rates, "epoch_samples": samples,
                "first_epoch_s": first_s, "row_bytes": row_bytes(bench, kind),
                "cpu_cores": harness.spread([one["cpu_cores"] for one in found])}  # fmt: skip
    finally:
        loader.close()


def cpu_seconds(bench: Bench) -> None:
    """CPU seconds for 1,000 augmented images: ours with each cache, and torchvision's in worker processes."""
    for cache in (None, "host", "device"):
        bench.figure(f"CPU seconds per 1,000, fastload, cache {cache}", lambda cache=cache: _our_seconds(bench, cache))
    bench.figure("CPU seconds per 1,000, JPEG and torchvision", lambda: _plain_seconds(bench))


def _our_seconds(bench: Bench, cache: str | None) -> dict[str, Any]:
    device, sizes = bench.device, bench.sizes
    loader = open_loader(bench, "photos", sizes.batches[0], pipelines.augmentation(sizes.crop), cache=cache)
    try:
        epoch(device, loader)
        path = pipelines.void_unless_fused(device.kind)
        found = [epochs_for(device, loader, sizes.segment_s / 4) for _ in range(sizes.pairs)]
    finally:
        loader.close()
    seconds = harness.spread([one["cpu_s_per_1000"] for one in found])
    return {"value": seconds["median"], "unit": "s", **path, "cpu_s_per_1000": seconds,
            "images_per_s": harness.spread([one["samples_per_s"] for one in found])}  # fmt: skip


def _plain_seconds(bench: Bench) -> dict[str, Any]:
    """Processes are started and ended within the measurement, since CPU time of children counts when they end."""
    sizes = bench.sizes
    length, count = sizes.photo_rows, 0
    with cpu_seconds_of() as used:
        loader = plain_loader(bench, "photos", sizes.batches[0], sizes.crop, length)
        batches = iter(loader)
        for images, _ in batches:
            count += len(images)
        del batches, loader  # joins the processes
    return {"value": 1000 * used["cpu_s"] / count, "unit": "s", "images_per_s": count / used["wall_s"],
            "cpu_cores": used["cpu_s"] / used["wall_s"], "images": count}  # fmt: skip
