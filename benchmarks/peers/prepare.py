"""Makes the images that all loaders read: folders of files by class, and the same decoded as one .npy each.

faces     8,192 faces of 218x178 as JPEG, drawn by tools/make_faces.py
small     24,576 of 32x32 as PNG, half of CIFAR: those faces thinned out to three sets of pixels
squares   2,048 of 256x256 as JPEG, cut from the photos
photos    2,496 clothing photos of about 400x533 as JPEG, as their owners took them; drawn where they are absent
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import harness
from peers.work import Data

PHOTOS = harness.ROOT.parent / "shared" / "data" / "clothing" / "clothing.tar"
FULL = {"faces": 8192, "small": 24576, "squares": 2048, "photos": 2496}
QUICK = {"faces": 128, "small": 384, "squares": 64, "photos": 32}
CLASSES = 10


def data_sets(folder: Path, *, quick: bool = False, photos: Path = PHOTOS) -> dict[str, Data]:
    """The data sets by name, in `folder`; those that are there already stay."""
    counts = QUICK if quick else FULL
    faces = _made(folder / f"faces-{counts['faces']}", lambda out: _faces(out, folder, counts["faces"]), rows=True)
    rows = faces.rows
    assert rows is not None, "faces have one size"
    small = _made(folder / f"small-{counts['small']}", lambda out: _small(out, rows, counts["small"]), rows=True)
    own = _made(folder / f"photos-{counts['photos']}", lambda out: _photos(out, folder, photos, counts["photos"]))
    name = f"squares-{counts['squares']}"
    squares = _made(folder / name, lambda out: _squares(out, own.folder, counts["squares"]), rows=True)
    return {"faces": faces, "small": small, "squares": squares, "photos": own}


def _made(folder: Path, make: Callable[[Path], None], *, rows: bool = False) -> Data:
    """Calls `make` with a folder for the files, and writes beside it their labels and, if wanted, their pixels."""
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        (part / "files").mkdir(parents=True)
        make(part / "files")
        files = sorted((part / "files").glob("*/*"))
        classes = sorted({file.parent.name for file in files})
        np.save(part / "labels.npy", np.array([classes.index(file.parent.name) for file in files], np.int64))
        if rows:
            first = _pixels(files[0])
            array = np.lib.format.open_memmap(part / "rows.npy", "w+", np.uint8, (len(files), *first.shape))
            for at, file in enumerate(files):
                array[at] = _pixels(file)
            array.flush()
            del array
        part.rename(folder)
    shape = tuple(np.load(folder / "rows.npy", mmap_mode="r").shape[1:]) if rows else None
    count = len(np.load(folder / "labels.npy"))
    return Data(
        folder.name, folder / "files", count, shape, folder / "rows.npy" if rows else None, folder / "labels.npy"
    )  # type: ignore[arg-type]


def _pixels(file: Path) -> NDArray[np.uint8]:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"))


def _place(folder: Path, number: int, suffix: str) -> Path:
    place = folder / f"class{number % CLASSES}" / f"{number:06}.{suffix}"
    place.parent.mkdir(exist_ok=True)
    return place


def _faces(out: Path, folder: Path, count: int) -> None:
    drawn = harness.drawn_faces(folder / f"drawn-{count}", count)
    for number, file in enumerate(sorted((drawn / "img_align_celeba").glob("*.jpg"))):
        _place(out, number, "jpg").hardlink_to(file)


def _small(out: Path, rows: Path, count: int) -> None:
    faces = np.load(rows, mmap_mode="r")
    for number in range(count):
        at, shift = number % len(faces), number // len(faces)
        Image.fromarray(faces[at, shift : shift + 192 : 6, shift : shift + 160 : 5]).save(
            _place(out, number, "png"), compress_level=1
        )


def _photos(out: Path, folder: Path, photos: Path, count: int) -> None:
    if photos.exists():
        found = sorted(harness.unpacked_photos(photos, folder).rglob("*.jpg"))[:count]
        for number, file in enumerate(found):
            place = out / file.parent.name / f"{number:06}.jpg"
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, place)
        return
    rng = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (14, 10, 3), np.uint8))
        coarse.resize((400, 533), Image.Resampling.BICUBIC).save(_place(out, number, "jpg"), quality=90)


def _squares(out: Path, photos: Path, count: int) -> None:
    files = sorted(photos.glob("*/*"))
    for number, image in zip(range(count), _again(files), strict=False):
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        square = image.resize((256, 256), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
        square.save(_place(out, number, "jpg"), quality=90)


def _again(files: list[Path]) -> Iterator[Image.Image]:
    while True:
        for file in files:
            with Image.open(file) as image:
                yield image.convert("RGB")
