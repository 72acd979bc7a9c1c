"""Makes the small files that the cases read, each kind once, kept in the work folder: pictures, pixels, HDF5 files."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray
from PIL import Image


def picture(number: int, height: int, width: int) -> NDArray[np.uint8]:
    """A drawn picture (H, W, 3) that compresses like a photo: smooth patches with some grain."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
    grain = rng.normal(0, 7, (height, width, 1))
    return np.clip(np.asarray(coarse) + grain, 0, 255).astype(np.uint8)


def jpegs(work: Path, count: int, height: int, width: int) -> list[str]:
    """Paths of that many JPEG files."""
    folder = work / f"pictures-{height}x{width}"
    paths = [folder / f"{number:04d}.jpg" for number in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(paths):
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}")
            Image.fromarray(picture(number, height, width)).save(part, "JPEG", quality=92)
            part.rename(path)
    return [str(path) for path in paths]


def pixels(work: Path, count: int, height: int, width: int) -> list[str]:
    """Paths of that many files of bare pixels (H, W, 3), the same pictures as `jpegs`, decoded."""
    folder = work / f"pixels-{height}x{width}"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:04d}.bin" for number in range(count)]
    if not all(path.exists() for path in paths):
        for source, path in zip(jpegs(work, count, height, width), paths, strict=True):
            part = path.with_suffix(f".{os.getpid()}")
            np.asarray(Image.open(source)).tofile(part)
            part.rename(path)
    return [str(path) for path in paths]


def rows(work: Path, count: int, height: int, width: int) -> str:
    """An HDF5 file with those pictures as rows, a gzip-compressed chunk each."""
    path = work / f"rows-{count}-{height}x{width}.h5"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        with h5py.File(part, "w") as file:
            shape = (count, height, width, 3)
            kept = file.create_dataset("x", shape, np.uint8, chunks=(1, *shape[1:]), compression="gzip")
            for number in range(count):
                kept[number] = picture(number, height, width)
        part.rename(path)
    return str(path)


def big(work: Path, mebibytes: int) -> str:
    """A file of that many MiB, on the disk and not only in memory."""
    path = work / f"big-{mebibytes}.bin"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        with open(part, "wb") as out:
            for _ in range(mebibytes):
                out.write(os.urandom(1 << 20))
            out.flush()
            os.fsync(out.fileno())
        part.rename(path)
    return str(path)
