"""What a packed file holds, against what it would hold as plain pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fastload.format import PIXEL_FIELDS, open_hdf5, read_header


def pixel_bytes(path: str | Path) -> int:
    """Bytes of all images and masks of a packed file, decoded; 0 without images."""
    file, total = read_header(path), 0
    fields = [file.fields[name] for name in PIXEL_FIELDS if name in file.fields]
    with open_hdf5(Path(path)) as opened:
        for field in fields:
            if not field.varied:
                total += file.num_rows * int(np.prod(field.shape, dtype=np.int64)) * field.dtype.itemsize
                continue
            shapes = opened["images_shape"][()].astype(np.int64)
            total += int(np.prod(shapes[:, : len(field.shape)], axis=1).sum()) * field.dtype.itemsize
    return total
