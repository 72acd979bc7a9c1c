"""Packed files for the four tasks of tools/train.py, made up on the spot.

What is drawn does not matter to the clock, only its shape: the accuracy is nobody's question here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from fastload import pack_images
from fastload.format.ragged import Column
from make_reviews import arrays
from sample_files import write_packed

TASKS = ("classify", "attributes", "segment", "text")
CLASSES = 1000


def packed_tasks(folder: Path, *, quick: bool) -> dict[str, Path]:
    """A packed file for each task; those that are there already are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {"classify": 2000, "attributes": 2000, "segment": 600, "text": 24_000}
    if quick:
        rows = {"classify": 32, "attributes": 48, "segment": 24, "text": 320}
    paths = {task: folder / f"parallel-{task}-{count}.h5" for task, count in rows.items()}
    makers = {"classify": _photos, "attributes": _faces, "segment": _scenes, "text": _reviews}
    for task, path in paths.items():
        if not path.exists():
            makers[task](path, rows[task])
    return paths


def _photos(path: Path, count: int) -> None:
    """Photos of several sizes in CLASSES folders of two, or fewer folders: as an ImageFolder is."""
    rng = np.random.default_rng(0)
    source = path.with_suffix("")
    for row in range(count):
        image = source / f"{row % min(CLASSES, count // 2):04d}" / f"{row:05d}.jpg"
        image.parent.mkdir(parents=True, exist_ok=True)
        height, width = rng.integers(140, 260, 2).tolist()
        coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(image, quality=90)
    pack_images(source, path, store="raw")


def _faces(path: Path, count: int) -> None:
    """Images of CelebA's size with 40 attributes."""
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (count, 218, 178, 3), dtype=np.uint8)
    write_packed(path, images, {"labels": Column(rng.integers(0, 2, (count, 40)).astype(np.uint8))})


def _scenes(path: Path, count: int, classes: int = 32) -> None:
    """Images in small with masks of as many classes as CamVid has, in patches; smaller still where few are wanted."""
    rng = np.random.default_rng(2)
    shape = (144, 192) if count > 100 else (48, 64)
    images = rng.integers(0, 256, (count, *shape, 3), dtype=np.uint8)
    patches = rng.integers(0, classes, (count, shape[0] // 16, shape[1] // 16), dtype=np.uint8)
    write_packed(path, images, masks=patches.repeat(16, axis=1).repeat(16, axis=2), ignore_index=0)


def _reviews(path: Path, count: int) -> None:
    """Token arrays of tools/make_reviews.py."""
    made, _ = arrays(count, count // 6, seed=0)
    source = path.with_suffix(".npz")
    np.savez(source, **made)
    pack_images(source, path)
