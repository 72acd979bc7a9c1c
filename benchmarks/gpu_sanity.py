"""Section `sanity` of `gpu.py`, the first: does each path run here, is it right, and what does it cost the host?

It makes a small file of its own, so that it says something even where the data of the other sections cannot be made.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import gpu_data
import gpu_pipelines as pipelines
import harness
from fastload import FastLoader, PackedDataset
from fastload import transforms as fast
from fastload.device import Backend, open_backend
from fastload.prefetch.ring import allocate_aligned
from fastload.prefetch.row_cache import RowCache
from fastload.transforms import Draws, apply_transforms
from gpu_bench import Bench
from gpu_device import Device
from gpu_meter import counters

NEEDED = ("h5py", "PIL", "xxhash", "psutil", "fastload.loader", "fastload.pack", "fastload.profiling.meter")
WELCOME = ("triton", "pynvml", "torchvision", "simplejpeg", "zstandard", "hdf5plugin", "matplotlib")
SLEEP_S = 0.05
LATE_S = 0.01  # that the device is behind with each batch: the host lets go of batches that it has not read yet


def sanity(bench: Bench) -> None:
    """All of it, in the order of what a failure would cost the other sections."""
    sizes, device = bench.sizes, bench.device
    bench.figure("imports that fail", _imports, target="<= 0")
    path = bench.data / "sanity.h5"
    pixels = np.random.default_rng(0).integers(0, 256, (sizes.sanity_rows, sizes.photo, sizes.photo, 3), np.uint8)
    gpu_data.write_repeated(path, pixels, len(pixels), 4)
    # Kernels that read the host's memory come after what needs none: a wrong address ends all work of this process.
    processes = PackedDataset(path, fields=["images"], transform=_as_it_is)
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "threads": (path, {}), "pread": (PackedDataset(path, fields=["images"], read="pread"), {}),
        "device cache": (path, {"cache": "device"}),
        "processes": (processes, {}), "host cache": (path, {"cache": "host"}),
    }  # fmt: skip
    for name, (source, options) in ways.items():
        if name == "host cache":
            bench.figure("wrong bytes of memory that the loader pins", lambda: _registered(bench), target="<= 0")
        bench.figure(
            f"wrong bytes of a batch, {name}",
            lambda source=source, options=options: _wrong_bytes(bench, source, pixels, **options), target="<= 0",
        )  # fmt: skip
    bench.figure("wrong bytes of rows beyond 2^31", lambda: _far_rows(bench), target="<= 0")
    for batch, target in zip(sizes.batches, ("<= 150", "<= 200"), strict=True):
        bench.figure(f"host time of next(), batch {batch}", lambda batch=batch: _next_us(bench, path, batch),
                     target=target)  # fmt: skip
    bench.figure("time that a pageable copy waits", lambda: _copy_wait_ms(device, pinned=False))
    bench.figure("time that a pinned copy waits", lambda: _copy_wait_ms(device, pinned=True))
    for threads in sizes.gather_threads:
        bench.figure(
            f"gather to pinned memory, threads {threads}", lambda threads=threads: _gather(bench, path, threads)
        )
    for lane_bytes in (1, 4, 16):
        bench.figure(f"zero-copy, lanes of {lane_bytes}", lambda lane_bytes=lane_bytes: _zero_copy(bench, lane_bytes))
    bench.figure("zero-copy, rows by gather_rows", lambda: _rows_over_bus(bench))
    bench.figure("counters of the driver that can be read", lambda: _counters(device), target=">= 4")
    bench.figure("JPEG files that the device decodes, of two", lambda: _jpegs(device), target=">= 2")
    path.unlink()


def _as_it_is(sample: Any) -> Any:
    return sample


def _imports() -> dict[str, Any]:
    """How long each import took; those that the other sections cannot do without must not fail."""
    found: dict[str, Any] = {}
    failed = 0
    for name in (*NEEDED, *WELCOME):
        begin = time.perf_counter()
        try:
            import_module(name)
            found[name] = round(time.perf_counter() - begin, 3)
        except Exception as exc:  # noqa: BLE001  # whatever it raises is what is to be known
            found[name] = f"{type(exc).__name__}: {exc}"[:300]
            failed += name in NEEDED
    return {"value": failed, "unit": f"of {len(NEEDED)} that are needed", "seconds": found}


def _loader(bench: Bench, source: Any, batch: int, transform: Sequence[Any] = (), **options: Any) -> FastLoader:
    data = PackedDataset(source, fields=["images"]) if isinstance(source, Path) else source
    return FastLoader(data, batch, device=bench.device.loader, transform=list(transform), **options)


def _wrong_bytes(bench: Bench, source: Any, pixels: NDArray[np.uint8], **options: Any) -> dict[str, Any]:
    """Bytes of two epochs that are not those of the file; the second one is read ahead, or gathered from a cache.

    The device reads each batch when the host is some batches ahead: memory that is used again too early is seen.
    """
    loader = _loader(bench, source, bench.sizes.batches[0], **options)
    wrong = count = 0
    try:
        for _ in range(2):
            read = []
            for images, rows in ((batch[0], batch.rows) for batch in loader):
                bench.device.delay(LATE_S)
                read.append((images.clone(), rows.clone()))
                del images, rows
            for images, rows in read:
                found = images.permute(0, 2, 3, 1).cpu().numpy()
                wrong += int(np.count_nonzero(found != pixels[rows.cpu().numpy()]))
                count += len(found)
    finally:
        loader.close()
    return {"value": wrong, "unit": f"bytes of {count:,} images"}


def _registered(bench: Bench) -> dict[str, Any]:
    """Wrong bytes of memory pinned as the loader pins its own, brought to the device by a copy and by a kernel.

    Memory is refused that is pinned already; a launch after that fails for no reason of its own.
    """
    device, cuda = bench.device, bench.device.kind == "cuda"
    with _triton(bench):
        from gpu_lanes import copy
    backend = _backend(device)
    memory = allocate_aligned(bench.sizes.lane_bytes)
    memory[:] = np.random.default_rng(3).integers(0, 256, len(memory), np.uint8)
    host = torch.from_numpy(memory)
    begin = time.perf_counter()
    unpin = backend.pin(memory)
    seconds = time.perf_counter() - begin
    if unpin is None:
        raise RuntimeError(f"the system does not let {memory.nbytes:,} bytes be pinned")
    try:
        again = backend.pin(memory) if cuda else None
        copied, read = (torch.empty_like(host, device=device.torch) for _ in range(2))
        copied.copy_(host, non_blocking=True)
        copy(host, read, 16)
        wrong = sum(int(np.count_nonzero(one.cpu().numpy() != memory)) for one in (copied, read))
        told = {"is_pinned": host.is_pinned(), "pinned_twice": again is not None}
    finally:
        unpin()
    told |= {"is_pinned_afterwards": host.is_pinned(), "pin_gb_per_s": memory.nbytes / seconds / 1e9}
    if cuda and (told["is_pinned"], told["pinned_twice"], told["is_pinned_afterwards"]) != (True, False, False):
        raise AssertionError(f"pinned once, then, not again, and not afterwards: {told}")
    return {"value": wrong, "unit": f"bytes of {memory.nbytes:,}, twice", **told}


def _backend(device: Device) -> Backend:
    backend = open_backend(device.loader)
    assert backend is not None, "it is no CPU"
    return backend


def _counters(device: Device) -> dict[str, Any]:
    """What the driver (NVML) says while the device is busy."""
    with counters(device.nvml(), every_s=0.05, visible="0" if device.kind == "cpu" else None) as found:
        device.delay(0.5)
        time.sleep(0.5)
    device.synchronize()
    absent = found.pop("error", "")
    return {"value": len(found), "unit": f"counters{absent and ': '}{absent}", "counters": found}


def _jpegs(device: Device) -> dict[str, Any]:
    """Whether `decode="device"` would be taken; why not."""
    reason = _backend(device).why_no_jpegs()
    return {"value": 0 if reason else 2, "unit": f"files{reason and ': '}{reason}"}


def _far_rows(bench: Bench) -> dict[str, Any]:
    """Rows at the beginning, about 2^31 and 2^32, and at the end of a cache of CelebA's size against `np.take`."""
    device, (height, width) = bench.device, bench.sizes.face
    row_bytes = height * width * 3
    rows = bench.sizes.face_rows[0]
    store = torch.empty((rows, height, width, 3), dtype=torch.uint8, device=device.torch)
    around = [border // row_bytes for border in (2**31, 2**32)]
    starts = [0, *(start for start in around if start + 8 < rows), rows - 8]
    asked = np.concatenate([np.arange(start, start + 8) for start in starts])
    random = np.random.default_rng(1)
    known = random.integers(0, 256, (len(asked), height, width, 3), np.uint8)
    for number, row in zip(asked, known, strict=True):
        store[number] = torch.from_numpy(row).to(device.torch)
    order = random.permutation(len(asked))
    index = torch.from_numpy(asked[order]).to(device.torch)
    cache = RowCache(range(rows), "device", {"images": store}, store.nbytes)
    expected = np.take(known, order, axis=0)
    wrong = 0
    # Gathered as they are, and cut by the kernel that augments.
    side = min(height, width) // 2
    top, left = (height - side) // 2, (width - side) // 2
    for pipeline, truth in (
        ([], expected),
        ([fast.CenterCrop(side)], expected[:, top : top + side, left : left + side]),
    ):
        fields = apply_transforms(pipeline, cache.gather(index), Draws(0, 0, asked[order]))
        images = fields["images"]
        found = images if isinstance(images, torch.Tensor) else images.gather()
        wrong += int(np.count_nonzero(found.permute(0, 2, 3, 1).cpu().numpy() != truth))
    if device.kind == "cuda" and pipelines.gpu.kernel_runs(device.torch):
        wrong += int(np.count_nonzero(pipelines.gpu.gather_rows(store, index).cpu().numpy() != expected))
    return {"value": wrong, "unit": f"bytes; the last row begins at {(rows - 1) * row_bytes:,}", **_path(device)}


def _path(device: Device) -> dict[str, Any]:
    return pipelines.void_unless_fused(device.kind)


def _next_us(bench: Bench, path: Path, batch: int) -> dict[str, Any]:
    """Microseconds of the training thread in `next()`, where the batch lies ready and the device is idle."""
    device = bench.device
    loader = _loader(bench, path, batch, pipelines.augmentation(bench.sizes.crop), ends="exact")
    times: list[float] = []
    try:
        for number in range(3):
            for images in _timed(loader, times if number else []):
                device.synchronize()
                time.sleep(0.002 if bench.sizes.tiny else 0.02)  # the readers fill the ring meanwhile
                del images
    finally:
        loader.close()
    spread = harness.spread([1e6 * one for one in times])
    return {"value": spread["median"], "unit": "us", **_path(device), "us": spread}


def _timed(loader: FastLoader, times: list[float]) -> Iterator[Any]:
    batches = iter(loader)
    while True:
        begin = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        times.append(time.perf_counter() - begin)
        yield batch


def _copy_wait_ms(device: Device, *, pinned: bool) -> dict[str, Any]:
    """Milliseconds that the host waits in a small copy to the device while the compute stream is busy for 50 ms."""
    host = torch.zeros(4096)
    host = host.pin_memory() if pinned and device.kind == "cuda" else host
    host.to(device.torch, non_blocking=True)
    device.delay(0.001)
    times = []
    for _ in range(3):
        device.synchronize()
        device.delay(SLEEP_S)
        begin = time.perf_counter()
        host.to(device.torch, non_blocking=True)
        times.append(1e3 * (time.perf_counter() - begin))
    device.synchronize()
    return {"value": statistics.median(times), "unit": f"ms, behind {1e3 * SLEEP_S:.0f} ms of work", "ms": times}


def _gather(bench: Bench, path: Path, threads: int) -> dict[str, Any]:
    """GB/s of threads that copy shuffled rows from the page cache to pinned memory, a batch at a time each."""
    device, sizes = bench.device, bench.sizes
    dataset, batch = PackedDataset(path, fields=["images"]), sizes.batches[0]
    order = np.random.default_rng(2).permutation(len(dataset))[: len(dataset) // batch * batch].reshape(-1, batch)
    shape = (batch, sizes.photo, sizes.photo, 3)
    slots = [torch.empty(shape, dtype=torch.uint8, pin_memory=device.kind == "cuda").numpy() for _ in range(threads)]
    with contextlib.closing(dataset.open_reader("map", cache_chunks=threads + 1, windows=False)) as reader:

        def work(number: int) -> int:
            return sum(reader.gather(rows, {"images": slots[number]}) for rows in np.roll(order, number, axis=0))

        rates = []
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))  # pages mapped
            for _ in range(sizes.pairs):
                begin = time.perf_counter()
                moved = sum(pool.map(work, range(threads)))
                rates.append(moved / (time.perf_counter() - begin) / 1e9)
    spread = harness.spread(rates)
    return {"value": spread["median"], "unit": "GB/s", "gb_per_s": spread}


def _zero_copy(bench: Bench, lane_bytes: int) -> dict[str, Any]:
    """GB/s of a kernel that reads pinned memory over the bus, so many bytes a lane at a time."""
    with _triton(bench):
        from gpu_lanes import copy
    host = _pinned(bench, bench.sizes.lane_bytes)
    target = torch.empty_like(host, device=bench.device.torch)
    return _over_bus(bench, partial(copy, host, target, lane_bytes), target, host)


def _rows_over_bus(bench: Bench) -> dict[str, Any]:
    """GB/s of the kernel that gathers shuffled rows of pinned memory, for `cache="host"`."""
    row_bytes = bench.sizes.photo**2 * 3
    count = max(2, bench.sizes.lane_bytes // row_bytes)
    with _triton(bench):
        import_module("triton")
    host = _pinned(bench, count * row_bytes).view(count, row_bytes)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    index, target = order.to(bench.device.torch), torch.empty_like(host, device=bench.device.torch)
    return _over_bus(bench, partial(pipelines.gpu.gather_rows, host, index, out=target), target, host[order])


@contextlib.contextmanager
def _triton(bench: Bench) -> Iterator[None]:
    """Within, Triton is imported for the first time; on the CPU it interprets."""
    if bench.device.kind == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before its import: no program is compiled
    try:
        yield
    except ImportError as exc:
        raise pipelines.AbsentError(f"Triton cannot be imported here ({exc})") from exc


def _pinned(bench: Bench, count: int) -> torch.Tensor:
    host = torch.randint(0, 256, (count,), dtype=torch.uint8)
    return host.pin_memory() if bench.device.kind == "cuda" else host


def _over_bus(bench: Bench, work: Callable[[], object], target: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    """GB/s of work that brings the expected bytes into a tensor of the device."""
    work()
    bench.device.synchronize()
    wrong = int((target.cpu() != expected).sum())
    if wrong:
        raise AssertionError(f"{wrong:,} of {expected.nbytes:,} bytes are wrong")
    rates = []
    for _ in range(bench.sizes.pairs):
        begin = time.perf_counter()
        work()
        bench.device.synchronize()
        rates.append(expected.nbytes / (time.perf_counter() - begin) / 1e9)
    spread = harness.spread(rates)
    return {"value": spread["median"], "unit": "GB/s", "gb_per_s": spread}
