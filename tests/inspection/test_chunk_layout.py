from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from fastload.inspection.chunk_layout import CACHE_BYTES, ChunkLayout, chunk_layout, findings

FACE = (3, 218, 178)
FACE_BYTES = 3 * 218 * 178


def examine(tmp_path: Path, shape: tuple[int, ...], dtype: str = "u1", **options: Any) -> tuple[ChunkLayout, list[str]]:
    with h5py.File(tmp_path / "file.h5", "w") as file:
        dataset = file.create_dataset("images", shape, dtype, **options)
        dataset[...] = np.random.default_rng(0).integers(0, 9, shape).astype(dtype)
        layout = chunk_layout("images", dataset, None)
        return layout, findings(dataset, layout)


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "said"),
    [
        ((4, 8, 8, 3), "u1", {}, []),
        ((4, 8, 8, 3), "f4", {}, ["float32, 4 times the bytes of uint8"]),
        ((1100, 8, 8), "u1", {"chunks": (1, 8, 8)}, ["Tiny chunks: 1,100 of 64 B each"]),
        (
            (80, *FACE),
            "u1",
            {"chunks": (80, *FACE), "compression": "lzf"},
            ["and decoded again for each of its images", "Packing again would win"],
        ),
        (
            (20, *FACE),
            "u1",
            {"chunks": (10, *FACE), "compression": "gzip", "compression_opts": 1},
            ["of HDF5 before 2.0 (1 MiB)", "decodes 1.1 MiB, 10 times as much. The packed file is not compressed"],
        ),
        (
            (100, *FACE),
            "u1",
            {"chunks": (100, 3, 217, 178)},
            [
                "cut the images of `images` (3 x 218 x 178): one image lies in 2 chunks, together 22.1 MiB, 199 times",
                "stored in full",
                "larger than HDF5's chunk cache",
                "Packing again would win",
            ],
        ),
    ],
)
def test_what_is_slow_is_named(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, options: Any, said: list[str]
) -> None:
    layout, found = examine(tmp_path, shape, dtype, **options)
    assert len(found) == len(said), found
    assert all(part in text for part, text in zip(said, found, strict=True))
    if layout.compressed and layout.chunk_rows == 10:
        assert layout.decoded_bytes_per_image == 10 * FACE_BYTES
        assert layout.read_bytes_per_image == layout.stored_bytes // 2
    if not options:
        assert layout.read_bytes_per_image == layout.image_bytes


def test_chunks_within_the_cache_are_read_whole_larger_ones_are_bypassed_and_those_never_written_counted(
    tmp_path: Path,
) -> None:
    beyond, within = (examine(tmp_path, (rows, *FACE), chunks=(rows, *FACE))[0] for rows in (80, 8))
    assert beyond.chunk_bytes > CACHE_BYTES > within.chunk_bytes
    assert (beyond.read_bytes_per_image, within.read_bytes_per_image) == (FACE_BYTES, 8 * FACE_BYTES)
    with h5py.File(tmp_path / "file.h5", "w") as file:
        dataset = file.create_dataset("images", (100, 8, 8), "u1", chunks=(10, 8, 8))
        dataset[:30] = 1
        layout = chunk_layout("images", dataset, None)
        assert layout.missing_chunks == 7 and any("7 of 10 chunks" in text for text in findings(dataset, layout))
