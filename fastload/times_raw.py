"""How many times as many bytes a dataset's images would take as raw pixels."""

from __future__ import annotations

import numpy as np

from fastload.dataset import PackedDataset
from fastload.read import RowReader
from fastload.store import RAW

_LOOKED_AT = 512


def times_raw(dataset: PackedDataset) -> float:
    """Bytes of the pixels over those that the file keeps of them, by some of the rows; 0.0 where none is encoded."""
    field = dataset.file.fields.get("images")
    if "images" not in dataset.fields or field is None or field.store is None or not len(dataset):
        return 0.0
    rows = np.asarray(dataset.rows[:: max(1, len(dataset) // _LOOKED_AT)], np.int64)
    reader = RowReader(dataset.file, ["images"])
    try:
        index = reader.stored("images").index(rows)
    finally:
        reader.close()
    if (index.encoding == RAW).all():
        return 0.0
    pixels = index.shape.prod(axis=1, dtype=np.int64).sum() * field.dtype.itemsize
    return float(pixels / max(1, index.bytes.sum()))
