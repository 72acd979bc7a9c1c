"""Writes small packed files from arrays at hand, without a source or a packer: every byte of a row is chosen.

For tests, benchmarks and golden files. `fastload pack` and `fastload.pack_images` pack datasets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.format import CHUNK_BYTES
from fastload.format.digests import pixel_digests
from fastload.format.ragged import JPEG, Column, RaggedIndex, common_shape, ragged_offsets
from fastload.format.writer import PixelSpec, RaggedSpec, chunk_rows_for, create_file


def write_packed(
    path: str | Path,
    images: NDArray[Any],
    columns: Mapping[str, Column] | None = None,
    *,
    masks: NDArray[np.uint8] | None = None,
    chunk_rows: int | None = None,
    splits: Mapping[str, int] | None = None,
    shuffled: bool = True,
    seed: int = 0,
    ignore_index: int | None = None,
) -> Path:
    """Writes arrays that fit in memory as a packed file; rows keep their order.

    Args:
        path: file to write; an existing one is overwritten.
        images: uint8 or uint16 (N, H, W, C).
        columns: `labels` and other datasets by name.
        masks: uint8 (N, H, W).
        chunk_rows: rows of a chunk, by default as many as `pack_images` would choose.
        splits: name -> number of rows, in row order; by default one split `all`.
        shuffled, seed: root attributes of the file.
        ignore_index: attribute of masks.
    """
    path = Path(path)
    num_rows = len(images)
    splits = splits or {"all": num_rows}
    arrays = {"images": np.ascontiguousarray(images)}
    if masks is not None:
        arrays["masks"] = np.ascontiguousarray(masks)
    rows = chunk_rows or chunk_rows_for(arrays["images"][0].nbytes, num_rows)
    mask_attrs = {} if ignore_index is None else {"ignore_index": ignore_index}
    pixels = {
        name: PixelSpec(array.shape[1:], array.dtype, min(rows, num_rows), mask_attrs if name == "masks" else {})
        for name, array in arrays.items()
    }
    everything = dict(columns or {})
    everything["split"] = Column(
        np.repeat(np.arange(len(splits), dtype=np.uint8), list(splits.values())), {"names": tuple(splits)}
    )
    everything.setdefault("key", Column(np.array([f"{i:08d}".encode() for i in range(num_rows)])))
    everything["digest"] = Column(pixel_digests(list(arrays.values())))
    attrs = {"decoder": "none", "source_layout": "arrays", "pack_options": "{}", "seed": seed, "shuffled": shuffled}
    offsets = create_file(path, num_rows=num_rows, pixels=pixels, columns=everything, attrs=attrs)
    with open(path, "r+b") as file:
        for name, array in arrays.items():
            file.seek(offsets[name])
            file.write(array.data)
    return path


def write_ragged(
    path: str | Path,
    rows: Sequence[NDArray[Any] | tuple[bytes, tuple[int, int, int], int]],
    columns: Mapping[str, Column] | None = None,
    *,
    masks: Sequence[NDArray[np.uint8]] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    splits: Mapping[str, int] | None = None,
    ignore_index: int | None = None,
) -> Path:
    """Writes rows that fit in memory as a packed file with ragged fields; rows keep their order.

    Args:
        path: file to write; an existing one is overwritten.
        rows: of each image its pixels (H, W, C), all uint8 or all uint16, or its JPEG file, (H, W, C) of what that
            decodes to, upright, and the EXIF orientation that has still to be applied.
        columns: `labels` and other datasets by name.
        masks: of each image its mask (H, W).
        chunk_bytes: bytes of a chunk of the ragged datasets.
        splits: name -> number of rows, in row order; by default one split `all`.
        ignore_index: attribute of masks.
    """
    path = Path(path)
    splits = splits or {"all": len(rows)}
    plain_rows = [row for row in rows if isinstance(row, np.ndarray)]
    dtype = plain_rows[0].dtype if plain_rows else np.dtype(np.uint8)
    images = [row.astype(dtype.newbyteorder("<")).tobytes() if isinstance(row, np.ndarray) else row[0] for row in rows]
    shapes = np.array([row.shape if isinstance(row, np.ndarray) else row[1] for row in rows], np.int32)
    encoded = {"images": images} | ({} if masks is None else {"masks": [mask.tobytes() for mask in masks]})
    everything, pixels = dict(columns or {}), dict[str, PixelSpec | RaggedSpec]()
    offsets = {}
    for name, data in encoded.items():
        lengths = np.array([len(row) for row in data], np.int64)
        offsets[name], end = ragged_offsets(lengths, chunk_bytes)
        jpeg = [name == "images" and isinstance(row, tuple) for row in rows]
        index = RaggedIndex(
            offsets[name],
            lengths,
            shapes,
            np.where(jpeg, JPEG, 0).astype(np.uint8),
            np.array([row[2] if isinstance(row, tuple) else 1 for row in rows], np.uint8),
        )
        everything |= {key: Column(values, attrs) for key, (values, attrs) in index.datasets(name).items()}
        row_shape = common_shape(shapes)
        attrs = {"ignore_index": ignore_index} if name == "masks" and ignore_index is not None else {}
        pixels[name] = RaggedSpec(
            end, chunk_bytes, row_shape if name == "images" else row_shape[:2],
            dtype if name == "images" else np.dtype(np.uint8), attrs,
        )  # fmt: skip
    everything["split"] = Column(
        np.repeat(np.arange(len(splits), dtype=np.uint8), list(splits.values())), {"names": tuple(splits)}
    )
    everything.setdefault("key", Column(np.array([f"{i:08d}".encode() for i in range(len(rows))])))
    joined = map(b"".join, zip(*encoded.values(), strict=True))
    everything["digest"] = Column(np.fromiter(map(xxhash.xxh3_64_intdigest, joined), np.uint64, len(rows)))
    root = {"decoder": "none", "source_layout": "arrays", "pack_options": "{}", "seed": 0, "shuffled": True}
    bases = create_file(path, num_rows=len(rows), pixels=pixels, columns=everything, attrs=root)
    with open(path, "r+b") as file:
        for name, data in encoded.items():
            for offset, row in zip(offsets[name].tolist(), data, strict=True):
                file.seek(bases[name] + offset)
                file.write(row)
    return path
