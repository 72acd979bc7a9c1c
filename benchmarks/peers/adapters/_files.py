"""What the adapters share that have no need of torch when they pack."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peers.work import RATIO, SCALE, Data


def versions_of(*packages: str) -> dict[str, str]:
    """Versions of packages and of what is beneath each adapter."""
    return {name: version(name) for name in (*packages, "torch", "numpy")}


def worker_settings(*counts: int) -> list[dict[str, Any]]:
    """Candidates for `num_workers`; workers stay from epoch to epoch, as the manual of torch advises."""
    return [{"num_workers": count} for count in counts]


def image_files(data: Data) -> tuple[list[Path], NDArray[np.int64]]:
    """The files of a folder in the order of their rows, and their labels."""
    return sorted(data.folder.glob("*/*")), np.load(data.labels)


def decoded_rows(data: Data) -> Iterator[NDArray[np.uint8]]:
    """The images that a packer has to store: rows, where there are any, else the decoded files."""
    if data.rows is not None:
        yield from np.load(data.rows, mmap_mode="r")
        return
    from PIL import Image

    for path in image_files(data)[0]:
        with Image.open(path) as file:
            yield np.asarray(file.convert("RGB"))


def in_each_process(open_it: Callable[[], Any]) -> Callable[[], Any]:
    """What `open_it` opens, opened again in each process: its handles must not cross a fork."""
    opened: dict[int, Any] = {}

    def get() -> Any:
        pid = os.getpid()
        if pid not in opened:
            opened[pid] = open_it()
        return opened[pid]

    return get


def random_crop(rng: np.random.Generator, height: int, width: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random part, drawn as torchvision does."""
    for _ in range(10):
        area, ratio = height * width * rng.uniform(*SCALE), np.exp(rng.uniform(*np.log(RATIO)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            return int(rng.integers(0, height - h + 1)), int(rng.integers(0, width - w + 1)), h, w
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    return (height - h) // 2, (width - w) // 2, h, w
