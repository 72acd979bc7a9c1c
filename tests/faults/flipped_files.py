"""Small packed files of every kind, in which the tests of this folder flip bits, and what is read of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from ragged_cases import varied_file
from small_files import write_random

from fastload import PackedDataset, pack_images
from fastload.transforms import RandomCrop

ROWS = 24
Row = dict[str, Any]


def _smooth(root: Path, *, varied: bool, masks: bool) -> Path:
    """A folder of PNG images that zstd makes smaller, of several sizes or of one; with masks, as mask-folders."""
    rng = np.random.default_rng(5)
    for i in range(ROWS):
        height, width = (10 + i % 5, 12 + i % 3) if varied else (12, 14)
        values = np.repeat(rng.integers(0, 256, (height, 1, 3), dtype=np.uint8), width, axis=1)
        values[:, : width // 3] //= 2
        image = root / ("images" if masks else "ab"[i % 2]) / f"{i:03d}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(image)
        if masks:
            mask = root / "masks" / f"{i:03d}.png"
            mask.parent.mkdir(exist_ok=True)
            Image.fromarray(values[..., 0] // 64).save(mask)
    return root


def _packed(path: Path, *, varied: bool, masks: bool, codec: str) -> Path:
    source = _smooth(path.with_suffix(""), varied=varied, masks=masks)
    pack_images(source, path, codec=codec, workers=0, chunk_bytes=2048)
    return path


_CODEC = "zstd" if importlib.util.find_spec("zstandard") is not None else "gzip"

KINDS: dict[str, Callable[[Path], Path]] = {
    "raw": lambda path: write_random(path, rows=ROWS, classes="abc", boxes=True, chunk_rows=5),
    "masks": lambda path: write_random(path, rows=ROWS, masks=True, splits={"train": 20, "val": 4}, chunk_rows=7),
    "jpeg": lambda path: varied_file(path),
    "chunks": lambda path: _packed(path, varied=False, masks=False, codec=_CODEC),
    **(
        {
            "zstd": lambda path: _packed(path, varied=True, masks=False, codec="zstd"),
            "zstd-masks": lambda path: _packed(path, varied=True, masks=True, codec="zstd"),
        }
        if _CODEC == "zstd"
        else {}
    ),
}
"""Kind -> writes a file of it."""


def dataset_of(path: Path, **options: Any) -> PackedDataset:
    """All fields of a file that torch has a dtype for, "row" and "valid" among them."""
    known = PackedDataset(path, check=None).file.fields
    fields = [name for name in ("images", "masks", "labels", "bbox") if name in known]
    return PackedDataset(path, fields=[*fields, "row", "valid"], **options)


def transforms_of(dataset: PackedDataset) -> list[Any]:
    """What brings samples to one size, if they differ."""
    return [RandomCrop(8)] if any(0 in shape for _, shape, _ in dataset.layout()) else []


def rows_of(names: Iterable[str], batches: Iterable[Any]) -> dict[int, Row]:
    """Row number -> its other fields as bytes, of all samples that batches hold as valid."""
    found: dict[int, Row] = {}
    for batch in batches:
        fields: Mapping[str, torch.Tensor] = dict(zip(names, batch, strict=True))
        for at, (row, valid) in enumerate(zip(fields["row"].tolist(), fields["valid"].tolist(), strict=True)):
            if valid:
                found[row] = {
                    name: values[at].contiguous().numpy().tobytes()
                    for name, values in fields.items()
                    if name not in ("row", "valid")
                }
    return found


def flip(path: Path, place: int, bit: int) -> None:
    """Flips a bit of a file's byte."""
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ (1 << bit)]))
