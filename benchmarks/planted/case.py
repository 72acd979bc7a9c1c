"""A training script with a hold-up somewhere: `python case.py PLANT SEED --work FOLDER --out FILE [--cured]`.

One dataset class, one collate and one loop for all cases; which parts of them do anything comes from `drawn.draw(plant,
seed)`. Names here say nothing of what a case is for. FILE gets one JSON object: steps, seconds of the loop over all
epochs (the iterators' begin included), and their quotient. `--workers N` overrides the loader's number.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import io
import json
import mmap
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import cv2
import h5py
import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate

import files
from drawn import Setting, draw

NUM_FILES = 96
BIG_MIB = 256


def turn(count: int) -> int:
    """A loop in plain Python."""
    total = 0
    for number in range(count):
        total = (total + number * number) & 0xFFFF
    return total


class Held(io.RawIOBase):
    """A file each of whose larger reads takes `seconds` longer."""

    def __init__(self, path: str, seconds: float) -> None:
        self.inner = open(path, "rb", buffering=0)  # noqa: SIM115  # closed with this
        self.seconds = seconds

    def close(self) -> None:
        """Closes what it wraps, too."""
        self.inner.close()
        super().close()

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """As any file's."""
        return self.inner.seek(offset, whence)

    def tell(self) -> int:
        """As any file's."""
        return self.inner.tell()

    def readall(self) -> bytes:
        """Waits once, then reads the rest."""
        time.sleep(self.seconds)
        return self.inner.read()

    def readinto(self, buffer: Any) -> int:
        """Waits, then reads."""
        if len(buffer) >= 1000:
            time.sleep(self.seconds)
        return self.inner.readinto(buffer)


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Pictures and labels."""

    def __init__(self, setting: Setting, work: Path, address: str) -> None:
        self.setting, self.address = setting, address
        height, width = setting.height, setting.width
        if setting.kind in ("rows", "chunks"):
            self.path = files.rows(work, NUM_FILES, height, width)
        elif setting.kind in ("pixels", "mapped"):
            self.paths = files.pixels(work, NUM_FILES, height, width)
        else:
            self.paths = files.jpegs(work, NUM_FILES, height, width)
        if setting.every_size:
            self.other = files.jpegs(work, 1, setting.every_size, setting.every_size * 4 // 3)[0]
        self.big = files.big(work, BIG_MIB) if setting.way == "direct" or setting.kind == "mapped" else ""
        context = multiprocessing.get_context(setting.context)
        self.guard = context.Lock() if setting.guard == "lock" else None
        self.guard_path = str(work / f"guard-{os.getpid()}")
        self.free_at = context.Array("d", 2) if setting.way == "lane" else None
        self.opened = False

    def __len__(self) -> int:
        return self.setting.steps * self.setting.batch

    def open(self) -> None:
        """What a process needs, when it needs it."""
        setting = self.setting
        self.opened = True
        turn(setting.first_loops)
        if setting.way == "socket":
            self.line = socket.socket(socket.AF_UNIX)
            self.line.connect(self.address)
            self.stream = self.line.makefile("rb")
        if setting.way == "direct":
            self.fd = os.open(self.big, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
            self.block = mmap.mmap(-1, 1 << 20)
        if setting.kind == "rows":
            source = Held(self.path, setting.way_s) if setting.way_s else self.path
            self.rows = h5py.File(source, "r", rdcc_nbytes=0)["x"]
        if setting.kind == "chunks":
            with h5py.File(self.path, "r") as file:
                spots = file["x"].id
                self.spots = [spots.get_chunk_info(number) for number in range(NUM_FILES)]
        if setting.guard == "flock":
            self.guard_fd = os.open(self.guard_path, os.O_RDWR | os.O_CREAT, 0o600)
        if setting.guard == "pool":
            self.pool = ThreadPoolExecutor(setting.guard_size)

    @contextmanager
    def turns(self) -> Iterator[None]:
        """One at a time, where that is asked for."""
        if self.guard is not None:
            with self.guard:
                yield
        elif self.setting.guard == "flock":
            fcntl.flock(self.guard_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self.guard_fd, fcntl.LOCK_UN)
        else:
            yield

    def bytes_of(self, path: str) -> bytes:
        """A file's bytes."""
        setting = self.setting
        if setting.way == "socket":
            self.line.sendall(path.encode() + b"\n")
            return self.stream.read(int.from_bytes(self.stream.read(8), "little"))
        if setting.way == "nap":
            with Held(path, setting.way_s) as file:
                return file.read()
        if self.free_at is not None:
            with self.free_at.get_lock():
                self.free_at[1] += 1
                until = max(time.monotonic(), self.free_at[0]) + setting.way_s * (
                    1 + setting.crowd * (self.free_at[1] - 1)
                )
                self.free_at[0] = until
            time.sleep(max(0.0, until - time.monotonic()))
            with self.free_at.get_lock():
                self.free_at[1] -= 1
        if setting.blocks:
            for _ in range(setting.blocks):
                os.preadv(self.fd, [self.block], random.randrange(BIG_MIB) << 20)
        return Path(path).read_bytes()

    def array_of(self, index: int) -> np.ndarray[Any, Any]:
        """A picture (H, W, 3)."""
        setting, number = self.setting, index % NUM_FILES
        shape = (setting.height, setting.width, 3)
        if setting.kind == "rows":
            with self.turns():
                return self.rows[number]
        if setting.kind == "chunks":
            spot = self.spots[number]
            with Held(self.path, setting.way_s) as file:
                file.seek(spot.byte_offset)
                return np.frombuffer(zlib.decompress(file.read(spot.size)), np.uint8).reshape(shape)
        path = self.paths[number]
        if setting.every_size and index % setting.every == setting.every - 1:
            path = self.other
        if setting.kind == "mapped":
            return np.memmap(path, np.uint8, "r", shape=shape)
        data = self.bytes_of(path)
        if setting.kind == "pillow":
            return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        if setting.kind == "simplejpeg":
            return simplejpeg.decode_jpeg(data)
        if setting.kind == "cv2":
            return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        return np.frombuffer(data, np.uint8).reshape(shape)

    def changed(self, picture: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A picture as the network is to see it."""
        setting = self.setting
        if setting.crop:
            picture = picture[: setting.crop, : setting.crop]
        turn(setting.loops)
        if setting.passes:
            values = picture.astype(np.float32)
            for _ in range(setting.passes):
                values = np.sqrt(values * values + np.float32(1))
            picture = values.astype(np.uint8)
        if setting.resize:
            big = Image.fromarray(picture).resize((setting.resize, setting.resize), Image.Resampling.LANCZOS)
            picture = np.asarray(big)[: setting.height, : setting.width]
        if setting.ops:
            values = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float()[None] / 255
            for _ in range(setting.ops):
                values = torch.nn.functional.avg_pool2d(values, 3, 1, 1) * 1.01
            picture = (values[0] * 255).byte().permute(1, 2, 0).numpy()
        if setting.products:
            flat = picture.reshape(288, 96).astype(np.float32)
            for _ in range(setting.products):
                flat = flat @ (flat.T @ flat) / np.float32(1e6)
        return picture

    def sample(self, index: int) -> tuple[torch.Tensor, int]:
        """Picture (H, W, 3) and label."""
        picture = self.changed(self.array_of(index))
        if self.setting.every_s and not self.setting.every_size and index % self.setting.every == 7:
            time.sleep(self.setting.every_s)
        return torch.from_numpy(np.array(picture)), index % 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not self.opened:
            self.open()
        return self.sample(index)


class Together(Samples):
    """The same, a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        if not self.opened:
            self.open()
        if self.setting.guard == "pool":
            return list(self.pool.map(self.sample, indices))
        return [self.sample(index) for index in indices]


class Bundle:
    """A batch with a way to the device of its own."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, move_s: float) -> None:
        self.images, self.labels, self.move_s = images, labels, move_s

    def to(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels there."""
        kept = torch.empty_like(self.images)
        parts = max(1, len(self.images) // 4)
        for source, target in zip(self.images.chunk(parts), kept.chunk(parts), strict=True):
            target.copy_(source)
            time.sleep(self.move_s / parts)
        return kept, self.labels.to(device)


class Gather:
    """Batches from samples."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        size = setting.gather_size
        if setting.gather in ("arrays", "tensors"):
            self.extra = np.ones(size, np.float32)
        if setting.gather in ("objects", "columns"):
            self.rows = [{"name": f"n{n}", "box": [n * 1.0, n * 2.0], "area": n * 0.25} for n in range(size)]
            self.boxes = torch.tensor([row["box"] for row in self.rows])
            self.areas = torch.tensor([row["area"] for row in self.rows])
        if setting.gather == "sorted":
            self.extra = np.random.default_rng(0).random(size, np.float32)

    def __call__(self, samples: list[tuple[torch.Tensor, int]]) -> Any:
        setting, size = self.setting, self.setting.gather_size
        images, labels = default_collate(samples)
        if setting.gather == "spans":
            spans = [turn(size // len(samples)) for _ in samples]
            return images, labels, torch.tensor(spans)
        if setting.gather == "sorted":
            return images, labels, torch.from_numpy(np.sort(self.extra)[:: max(1, size // 100)].copy())
        if setting.gather == "arrays":
            return images, labels, self.extra
        if setting.gather == "tensors":
            return images, labels, torch.from_numpy(self.extra)
        if setting.gather == "objects":
            return images, labels, self.rows
        if setting.gather == "columns":
            return images, labels, self.boxes, self.areas
        if setting.gather == "own":
            return Bundle(images, labels, setting.move_s)
        return images, labels


class Begin:
    """What a worker does first."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def __call__(self, worker: int) -> None:
        if self.setting.threads:
            torch.set_num_threads(self.setting.threads)
        turn(self.setting.begin_loops)
        if self.setting.beside:
            threading.Thread(target=self.look, daemon=True).start()

    def look(self) -> None:
        """Looks whether there is anything new, again and again."""
        while True:
            begin = time.thread_time()
            turn(10_000)
            took = time.thread_time() - begin
            time.sleep(took * (1 / self.setting.beside - 1))


class Accelerator:
    """Computes for `step_s` a batch and leaves the CPU free; the loop waits for it every `late` steps."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.free_at, self.count = setting, 0.0, 0
        if setting.trains:
            width = setting.trains
            self.net = torch.nn.Sequential(
                torch.nn.Conv2d(3, width, 3), torch.nn.ReLU(), torch.nn.Conv2d(width, width, 3), torch.nn.ReLU(),
                torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width, 10),
            )  # fmt: skip
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Trains on a batch."""
        if self.setting.trains:
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.net(images.permute(0, 3, 1, 2).float() / 255), labels).backward()
            self.optimizer.step()
            return
        self.count += 1
        self.free_at = max(time.perf_counter(), self.free_at) + self.setting.step_s
        if self.count % self.setting.late == 0:
            time.sleep(max(0.0, self.free_at - time.perf_counter()))


def arrived(batch: Any, setting: Setting, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels of a batch on the device."""
    if setting.move == "bus":
        return batch.to(device)
    if setting.move == "cast":
        images = batch[0].permute(0, 3, 1, 2)
        return images.to(device, torch.float32, memory_format=torch.contiguous_format), batch[1].to(device)
    return batch[0].to(device), batch[1].to(device)


def fast_loader(setting: Setting, work: Path) -> Any:
    """A FastLoader over the same pictures, packed."""
    from fastload import FastLoader, PackedDataset, pack_images

    count = setting.steps * setting.batch
    path = work / f"packed-{count}-{setting.height}x{setting.width}.h5"
    if not path.exists():
        paths = files.jpegs(work, NUM_FILES, setting.height, setting.width)
        folder = work / f"classes-{count}-{setting.height}x{setting.width}"
        for name in ("a", "b"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            link = folder / "ab"[number % 2] / f"{number:05d}.jpg"
            if not link.exists():
                os.link(paths[number % NUM_FILES], link)
        pack_images(folder, path)
    if setting.loops:
        dataset = PackedDataset(path, transform=Turned(setting.loops))
        return FastLoader(dataset, setting.batch, workers=setting.workers)
    return FastLoader(path, setting.batch, workers=setting.workers)


class Turned:
    """A transform."""

    def __init__(self, loops: int) -> None:
        self.loops = loops

    def __call__(self, sample: Any) -> Any:
        turn(self.loops)
        return sample


def plain_loader(setting: Setting, work: Path, address: str, steps: int) -> DataLoader[Any]:
    """A DataLoader over the pictures."""
    kind = Together if setting.together else Samples
    dataset = kind(dataclasses.replace(setting, steps=steps), work, address)
    return DataLoader(
        dataset, setting.batch, shuffle=False, num_workers=setting.workers, collate_fn=Gather(setting),
        persistent_workers=setting.persistent and setting.workers > 0, worker_init_fn=Begin(setting),
        multiprocessing_context=setting.context if setting.workers else None,
    )  # fmt: skip


def write_all_the_time(setting: Setting, work: Path) -> Callable[[], None]:
    """Writes HDF5 in a thread until what it returns is called."""
    stop = threading.Event()
    values = np.random.default_rng(0).integers(0, 64, setting.guard_size << 20, dtype=np.uint8)
    path = work / f"log-{os.getpid()}.h5"

    def target() -> None:
        with h5py.File(path, "w") as file:
            kept = file.create_dataset("x", values.shape, np.uint8, chunks=(1 << 20,), compression="gzip")
            while not stop.is_set():
                kept[:] = values

    thread = threading.Thread(target=target)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()
        path.unlink()

    return end


def run(setting: Setting, work: Path, address: str) -> dict[str, float]:
    """Trains, and tells how long the steps took."""
    device = torch.device("cpu")
    loader: Any = fast_loader(setting, work) if setting.fast else plain_loader(setting, work, address, setting.steps)
    lighter = dataclasses.replace(setting, loops=0, workers=1)
    checked = plain_loader(lighter, work, address, max(2, setting.steps // 5)) if setting.second else None
    accelerator = Accelerator(setting)
    end = write_all_the_time(setting, work) if setting.guard == "writer" else None
    steps, seconds = 0, 0.0
    for epoch in range(setting.epochs):
        if setting.fast:
            loader.set_epoch(epoch)
        begin = time.perf_counter()
        for batch in loader:
            images, labels = arrived(batch, setting, device)
            accelerator.step(images, labels)
            steps += 1
        seconds += time.perf_counter() - begin
        for batch in checked or ():
            images, labels = arrived(batch, setting, device)
            accelerator.step(images, labels)
    if end:
        end()
    return {"steps": steps, "seconds": seconds, "step_s": seconds / steps}


def main() -> None:
    """Run the case that the command line names."""
    parser = argparse.ArgumentParser(description="A training script with a hold-up somewhere.")
    parser.add_argument("plant", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--work", type=Path, required=True, help="folder for the files that it makes")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--cured", action="store_true", help="without the hold-up")
    parser.add_argument("--workers", type=int, help="so many instead of the number drawn")
    parser.add_argument("--part", type=float, default=1.0, help="this part of the steps of long epochs (default: 1)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    setting = draw(options.plant, options.seed)[options.cured]
    if options.workers is not None:
        setting = dataclasses.replace(setting, workers=options.workers)
    # Threads that wait for one another in each operation make any time of a step where other programs want the cores.
    # Only a network that is trained on the CPU keeps them.
    if not setting.trains:
        torch.set_num_threads(1)
    # Epochs that are short on purpose stay as they are, and so do those of rare events.
    if setting.steps > 25 and not setting.every:
        setting = dataclasses.replace(setting, steps=max(25, round(setting.steps * options.part)))
    options.work.mkdir(parents=True, exist_ok=True)
    server = None
    with tempfile.TemporaryDirectory() if setting.way == "socket" else nullcontext("") as folder:
        address = f"{folder}/store"
        if setting.way == "socket":
            words = [str(Path(__file__).with_name("store.py")), address, str(setting.way_s), str(setting.lanes)]
            server = subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE)
            while not os.path.exists(address):
                time.sleep(0.01)
        try:
            result = run(setting, options.work, address)
        finally:
            if server and server.stdin:
                server.stdin.close()
                server.wait()
    options.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
