"""The data of `gpu.py`, made on the spot: drawn faces as JPEG files, 178x218 and 256x256, and packed files of them.

The packed files repeat the drawn pictures until they are as long as a real set (CelebA: 202,599 rows, 24 GB): which
pixels they hold makes no difference to how fast they move. `fastload pack` packs the pictures where simplejpeg is
installed, else Pillow decodes them; the same functions lay out the file.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray
from PIL import Image

import make_faces  # tools/make_faces.py
from fastload.format.digests import row_digests
from fastload.format.ragged import Column
from fastload.format.writer import PixelSpec, chunk_rows_for, create_file

CLASSES = 10
QUALITY = 90


def draw(number: int, *, folder: Path, side: int) -> None:
    """One face as two JPEG files: in CelebA's size, and as a square photo of that side."""
    picture, _ = make_faces.draw_face(0, number, identities=400)
    name = f"{number % CLASSES}/{number:06d}.jpg"
    picture.save(folder / "faces" / name, quality=QUALITY)
    grain = np.random.default_rng(number).normal(0, 4, (side, side, 1))
    pixels = np.asarray(picture.resize((side, side), Image.Resampling.BICUBIC), dtype=np.float32) + grain
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / "photos" / name, quality=QUALITY)


def draw_all(folder: Path, count: int, side: int, workers: int) -> None:
    """All of them, by processes, in class folders."""
    for kind in ("faces", "photos"):
        for label in range(CLASSES):
            (folder / kind / str(label)).mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(partial(draw, folder=folder, side=side), range(count), chunksize=16))


def jpeg_files(folder: Path) -> list[Path]:
    """The JPEG files of class folders, in order of their names."""
    return sorted(folder.glob("*/*.jpg"), key=lambda file: file.name)


def decoded(folder: Path, scratch: Path, workers: int) -> tuple[NDArray[np.uint8], str]:
    """Pixels of those files, uint8 (N, H, W, 3), and what decoded them."""
    try:
        import simplejpeg  # noqa: F401  # what `fastload pack` needs

        import fastload
    except ImportError:
        with ThreadPoolExecutor(workers) as pool:
            return np.stack(list(pool.map(_decode, jpeg_files(folder)))), "Pillow (no simplejpeg here)"
    fastload.pack_images(folder, scratch)
    with h5py.File(scratch) as file:
        pixels: NDArray[np.uint8] = file["images"][:]
    scratch.unlink()
    return pixels, "fastload pack"


def _decode(file: Path) -> NDArray[np.uint8]:
    with Image.open(file) as image:
        return np.array(image.convert("RGB"))


def write_repeated(path: Path, pixels: NDArray[np.uint8], rows: int, workers: int) -> None:
    """A packed file of so many rows: the pictures, over and over. It has its name when it is whole."""
    part = path.with_suffix(".part")
    number = np.arange(rows)
    row_bytes = pixels[0].nbytes
    spec = PixelSpec(pixels.shape[1:], pixels.dtype, chunk_rows_for(row_bytes, rows))
    columns = {
        "labels": Column((number % len(pixels) % CLASSES).astype(np.int64)),
        "split": Column(np.zeros(rows, np.uint8), {"names": ("all",)}),
        "key": Column(np.char.mod("%08d", number).astype("S8")),
        "digest": Column(row_digests({"images": pixels})[number % len(pixels)]),
    }
    attrs: dict[str, Any] = {"decoder": "none", "source_layout": "arrays", "pack_options": "{}", "seed": 0}
    offset = create_file(
        part, num_rows=rows, pixels={"images": spec}, columns=columns, attrs=attrs | {"shuffled": True}
    )["images"]
    block = min(256, len(pixels))
    assert len(pixels) % block == 0, "blocks do not cross the end of the pictures"

    def write(fd: int, first: int) -> None:
        at = first % len(pixels)
        some = pixels[at : at + min(block, rows - first)]
        if os.pwrite(fd, some.data, offset + first * row_bytes) != some.nbytes:
            raise OSError(f"{path}: the file system is full")

    with open(part, "r+b") as file, ThreadPoolExecutor(workers) as pool:
        list(pool.map(partial(write, file.fileno()), range(0, rows, block)))
    part.rename(path)


def build(folder: Path, *, pictures: int, side: int, photo_rows: int, face_rows: Iterable[int]) -> dict[str, Any]:
    """Everything, into `folder`: faces/, photos/, photos.h5 and faces.h5.

    Args:
        folder: on a file system that stays in memory, such as /dev/shm: the page cache is to be warm.
        face_rows: of the packed faces, the count wished first, then the one to be content with where that does not
            fit, or where writing is slow.

    Returns:
        What was made, and in how many seconds.
    """
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    begin = time.perf_counter()
    draw_all(folder, pictures, side, workers)
    facts: dict[str, Any] = {"pictures": pictures, "draw_s": time.perf_counter() - begin}
    for kind in ("photos", "faces"):
        begin = time.perf_counter()
        pixels, decoder = decoded(folder / kind, folder / "scratch.h5", workers)
        facts[f"{kind}_decode_s"], facts["decoder"] = time.perf_counter() - begin, decoder
        rows = photo_rows
        if kind == "faces":
            wished, modest = face_rows
            room = shutil.disk_usage(folder).free
            rows = wished if wished * pixels[0].nbytes * 1.5 < room and facts["write_gb_per_s"] > 1 else modest
        begin = time.perf_counter()
        write_repeated(folder / f"{kind}.h5", pixels, rows, workers)
        seconds = time.perf_counter() - begin
        facts[kind] = {"rows": rows, "row_shape": list(pixels.shape[1:]), "write_s": seconds}
        facts["write_gb_per_s"] = rows * pixels[0].nbytes / seconds / 1e9
    sizes = [file.stat().st_size for file in jpeg_files(folder / "photos")]
    facts["jpeg_kb"] = sum(sizes) / len(sizes) / 1000
    return facts
