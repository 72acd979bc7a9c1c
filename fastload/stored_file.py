"""Writing a file with byte stores from rows that are at hand, without a source or a packer.

For tests and benchmarks, which so choose every byte of a row; `fastload pack` writes stores by `fastload.pack.ordered`,
and no code of the library calls this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.layout import CHUNK_BYTES, PixelSpec, StoreSpec, create_file
from fastload.sources.listing import Column
from fastload.store import JPEG, StoreIndex, common_shape, place_rows


def write_stored(
    path: str | Path,
    rows: Sequence[NDArray[Any] | tuple[bytes, tuple[int, int, int], int]],
    columns: Mapping[str, Column] | None = None,
    *,
    masks: Sequence[NDArray[np.uint8]] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    splits: Mapping[str, int] | None = None,
    ignore_index: int | None = None,
) -> Path:
    """Write rows that fit in memory as a packed file with stores; rows keep their order.

    Args:
        path: file to write; one that exists is overwritten.
        rows: of each image its pixels (H, W, C), all uint8 or all uint16, or its JPEG file, (H, W, C) of what that
            decodes to, upright, and the EXIF orientation that has still to be applied.
        columns: `labels` and other datasets by name.
        masks: of each image its mask (H, W).
        chunk_bytes: of the stores.
        splits: name -> number of rows, in row order; by default one split `all`.
        ignore_index: attribute of masks.
    """
    path = Path(path)
    splits = splits or {"all": len(rows)}
    plain_rows = [row for row in rows if isinstance(row, np.ndarray)]
    dtype = plain_rows[0].dtype if plain_rows else np.dtype(np.uint8)
    images = [row.astype(dtype.newbyteorder("<")).tobytes() if isinstance(row, np.ndarray) else row[0] for row in rows]
    shapes = np.array([row.shape if isinstance(row, np.ndarray) else row[1] for row in rows], np.int32)
    stores = {"images": images} | ({} if masks is None else {"masks": [mask.tobytes() for mask in masks]})
    everything, pixels = dict(columns or {}), dict[str, PixelSpec | StoreSpec]()
    offsets = {}
    for name, data in stores.items():
        lengths = np.array([len(row) for row in data], np.int64)
        offsets[name], end = place_rows(lengths, chunk_bytes)
        jpeg = [name == "images" and isinstance(row, tuple) for row in rows]
        index = StoreIndex(
            offsets[name],
            lengths,
            shapes,
            np.where(jpeg, JPEG, 0).astype(np.uint8),
            np.array([row[2] if isinstance(row, tuple) else 1 for row in rows], np.uint8),
        )
        everything |= {key: Column(values, attrs) for key, (values, attrs) in index.datasets(name).items()}
        row_shape = common_shape(shapes)
        attrs = {"ignore_index": ignore_index} if name == "masks" and ignore_index is not None else {}
        pixels[name] = StoreSpec(
            end, chunk_bytes, row_shape if name == "images" else row_shape[:2],
            dtype if name == "images" else np.dtype(np.uint8), attrs,
        )  # fmt: skip
    everything["split"] = Column(
        np.repeat(np.arange(len(splits), dtype=np.uint8), list(splits.values())), {"names": tuple(splits)}
    )
    everything.setdefault("key", Column(np.array([f"{i:08d}".encode() for i in range(len(rows))])))
    joined = map(b"".join, zip(*stores.values(), strict=True))
    everything["digest"] = Column(np.fromiter(map(xxhash.xxh3_64_intdigest, joined), np.uint64, len(rows)))
    root = {"decoder": "none", "source_layout": "arrays", "pack_options": "{}", "seed": 0, "shuffled": True}
    bases = create_file(path, num_rows=len(rows), pixels=pixels, columns=everything, attrs=root)
    with open(path, "r+b") as file:
        for name, data in stores.items():
            for offset, row in zip(offsets[name].tolist(), data, strict=True):
                file.seek(bases[name] + offset)
                file.write(row)
    return path
