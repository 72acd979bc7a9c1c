"""Small files of random images, for tests that need one and do not care what the images show.

A test module gets its file from the fixtures of conftest.py; this is for what these cannot say.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import DTypeLike, NDArray

from fastload.format.ragged import Column
from fastload.format.writer import create_file
from sample_files import write_packed


def random_pixels(
    rows: int = 20, size: tuple[int, ...] = (16, 12, 3), *, seed: int = 0, below: int = 256, dtype: DTypeLike = np.uint8
) -> NDArray[Any]:
    """Returns uniform noise, (rows, *size) of dtype in [0, below); equal arguments give equal pixels."""
    return np.random.default_rng(seed).integers(0, below, (rows, *size), dtype=dtype)


def labels_in_turn(rows: int, classes: Sequence[str]) -> Column:
    """Returns the column `labels`, int64 (rows,): 0, 1, 2, ... and again 0 after the last of the classes."""
    return Column(np.arange(rows, dtype=np.int64) % len(classes), {"names": tuple(classes)})


def write_random(
    path: Path,
    *,
    rows: int = 20,
    size: tuple[int, int, int] = (16, 12, 3),
    seed: int = 0,
    below: int = 256,
    dtype: DTypeLike = np.uint8,
    classes: Sequence[str] = (),
    columns: Mapping[str, Column] | None = None,
    boxes: bool = False,
    masks: bool = False,
    **layout: Any,
) -> Path:
    """Writes a packed file of `random_pixels` (rows, size, seed, below, dtype) and returns its path.

    Args:
        classes: names for `labels_in_turn`, "abc" for "a", "b" and "c"; none for a file without labels.
        columns: other datasets by name, each of `rows` rows.
        boxes: whether each image has a box, `bbox`, int32 (4,): the numbers 0, 1, 2, ... through all rows.
        masks: whether each image has a mask, (H, W) uint8: its first channel.
        layout: chunk_rows, splits, ignore_index, as `write_packed` takes them.
    """
    pixels = random_pixels(rows, size, seed=seed, below=below, dtype=dtype)
    written = {"labels": labels_in_turn(rows, classes)} if classes else {}
    if boxes:
        written["bbox"] = Column(np.arange(rows * 4, dtype=np.int32).reshape(rows, 4))
    drawn = pixels[..., 0].astype(np.uint8) if masks else None
    return write_packed(path, pixels, written | dict(columns or {}), masks=drawn, **layout)


def write_tokens(path: Path, rows: int = 20) -> Path:
    """Writes a packed file without images, whose keys are "0", "1", ...; `tokens` are 0, 1, 2, ... in rows of three."""
    columns = {
        "tokens": Column(np.arange(rows * 3).reshape(rows, 3)),
        "split": Column(np.zeros(rows, np.uint8), {"names": ("all",)}),
        "key": Column(np.array([b"%d" % i for i in range(rows)])),
        "digest": Column(np.zeros(rows, np.uint64)),
    }
    create_file(path, num_rows=rows, pixels={}, columns=columns, attrs={})
    return path


def rows_by_key(path: Path) -> dict[str, dict[str, Any]]:
    """Returns key -> each field of a row: the name of its split and of its class ("" for none), all others as bytes."""
    with h5py.File(path) as file:
        fields = {name: item[()] for name, item in file.items() if name not in ("key", "digest_fields")}
        for name in fields.keys() & {"split", "labels"}:
            if fields[name].ndim == 1 and "names" in file[name].attrs:
                fields[name] = np.array([*file[name].attrs["names"].astype(str), ""])[fields[name]]
        plain = {name: [v if isinstance(v, str) else v.tobytes() for v in values] for name, values in fields.items()}
        rows = [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]
        return dict(zip(file["key"].asstr()[()].tolist(), rows, strict=True))


def pages_in_memory(path: Path) -> NDArray[np.uint8]:
    """Returns for each page of a file whether it is in memory; asking does not make the kernel fetch any."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        pages, view = np.zeros(-(-len(mapping) // mmap.PAGESIZE), np.uint8), np.frombuffer(mapping, np.uint8)
        mincore, address, found = ctypes.CDLL(None, use_errno=True).mincore, view.ctypes.data, pages.ctypes.data
        assert mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapping)), ctypes.c_void_p(found)) == 0
        del view
    return pages & 1


def write_foreign(path: Path, images: NDArray[Any], *, chunk_rows: int, **columns: NDArray[Any]) -> Path:
    """Writes an HDF5 file that is not packed by fastload: images in chunks that pass through gzip, columns plainly."""
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, chunks=(chunk_rows, *images.shape[1:]), compression="gzip")
        for name, values in columns.items():
            file[name] = values
    return path
