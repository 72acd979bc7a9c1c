"""Small files with ragged fields, for the tests of code that reads them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

from fastload.format.header import read_header
from fastload.format.ragged import Column
from sample_files import write_ragged

NUM_ROWS = 12
TURNED = 6
"""EXIF: to be turned by 90 degrees clockwise."""

Row = np.ndarray | tuple[bytes, tuple[int, int, int], int]


def jpeg_row(height: int, width: int, *, gray: bool = False, turned: bool = False, seed: int = 0) -> Row:
    """A JPEG of these upright sizes, as a row of a ragged field of three channels."""
    rng = np.random.default_rng(seed)
    stored = (width, height) if turned else (height, width)
    pixels = rng.integers(0, 256, (2, 2, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize(stored[::-1], Image.Resampling.BICUBIC)
    exif = Image.Exif()
    if turned:
        exif[0x0112] = TURNED
    out = io.BytesIO()
    image.convert("L" if gray else "RGB").save(out, "JPEG", quality=90, exif=exif)
    return out.getvalue(), (height, width, 3), TURNED if turned else 1


def varied_rows(*, jpeg: bool = True, size: tuple[int, int] | None = None) -> list[Row]:
    """NUM_ROWS rows: every second a JPEG, one of them turned by EXIF, one gray; of several sizes, or of one."""
    rng = np.random.default_rng(3)
    rows: list[Row] = []
    for i in range(NUM_ROWS):
        height, width = size or (9 + 2 * i, 31 - i)
        if jpeg and i % 2:
            rows.append(jpeg_row(height, width, turned=i == 5, gray=i == 7, seed=i))
        else:
            rows.append(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    return rows


def shape_of(row: Row) -> tuple[int, ...]:
    """(H, W, C) of a row, upright."""
    return row[1] if isinstance(row, tuple) else row.shape


def varied_file(
    path: Path, rows: list[Row] | None = None, *, masks: bool = False, prefix: str = "", **more: Any
) -> Path:
    """A file of `varied_rows` with labels and two splits."""
    rows = rows or varied_rows()
    rng = np.random.default_rng(4)
    columns = {
        "labels": Column(np.arange(len(rows)) % 3, {"names": ("ant", "bee", "cat")}),
        "key": Column(np.array([f"{prefix}{i:03d}.jpg".encode() for i in range(len(rows))])),
    }
    drawn = [rng.integers(0, 5, shape_of(row)[:2], dtype=np.uint8) for row in rows] if masks else None
    more = {"chunk_bytes": 4096, "splits": {"train": len(rows) - 4, "val": 4}, **more}
    return write_ragged(path, rows, columns, masks=drawn, ignore_index=255 if masks else None, **more)


def flip(path: Path, field: str, row: int, at: int) -> None:
    """Change one bit of a stored row; a negative `at` counts from its end."""
    extent = read_header(path).fields[field].ragged
    assert extent is not None
    with h5py.File(path) as file:
        first, length = int(file[f"{field}_offset"][row]), int(file[f"{field}_bytes"][row])
    flip_byte(path, extent.base + first + at % length)


def flip_byte(path: Path, place: int) -> None:
    """Change one bit of a file's byte."""
    with open(path, "r+b") as out:
        out.seek(place)
        byte = out.read(1)[0]
        out.seek(place)
        out.write(bytes([byte ^ 0x40]))
