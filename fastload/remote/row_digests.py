"""Compares the rows of a chunk that was fetched with their digests, before it counts as there."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.format.codecs import decompress_zstd
from fastload.format.digests import pixel_digests, row_digest
from fastload.format.header import Field
from fastload.format.ragged import INDEX_DTYPES, ZSTD
from fastload.remote.chunks import ShardLayout


def wrong_rows(layout: ShardLayout, fd: int, images: Field, rows: range, data: Any) -> NDArray[np.int64]:
    """Returns the rows of a shard, of a chunk of images of one size, that are not what was packed: int64 (n,).

    Args:
        layout: of the shard, whose header is in its copy `fd`.
        images: how the index describes them.
        rows: of the chunk.
        data: their bytes, one row after another.
    """
    expected = _column(layout, fd, "digest", np.dtype("<u8"), rows)
    found = pixel_digests([np.frombuffer(data, np.uint8).reshape(len(rows), images.row_bytes)])
    return rows.start + np.flatnonzero(found != expected)


def wrong_encoded_rows(
    layout: ShardLayout, fd: int, images: Field, num_rows: int, begin: int, data: Any
) -> NDArray[np.int64]:
    """Returns the same of a chunk of images of varying length; those that lie in several chunks are passed over.

    Args:
        layout, fd, images: as above.
        num_rows: of the shard.
        begin: the byte of the shard's encoded rows at which the chunk begins.
        data: its bytes.
    """
    every, index = range(num_rows), {}
    for part in ("offset", "bytes", "encoding", "shape"):
        dtype, shape = INDEX_DTYPES[part]
        index[part] = _column(layout, fd, f"images_{part}", np.dtype((dtype, shape)), every)
    first, stop = index["offset"] - begin, index["offset"] - begin + index["bytes"]
    here = np.flatnonzero((first >= 0) & (stop <= len(data)))
    expected = _column(layout, fd, "digest", np.dtype("<u8"), every)
    wrong, view = [], memoryview(data)
    for row in here.tolist():
        encoded: Any = view[int(first[row]) : int(stop[row])]
        if index["encoding"][row] == ZSTD:
            pixels = np.empty(int(index["shape"][row].prod()) * images.dtype.itemsize, np.uint8)
            try:
                decompress_zstd(encoded, pixels)
            except ValueError:
                wrong.append(row)
                continue
            encoded = pixels
        if row_digest([encoded]) != expected[row]:
            wrong.append(row)
    return np.array(wrong, np.int64)


def _column(layout: ShardLayout, fd: int, name: str, dtype: np.dtype[Any], rows: range) -> NDArray[Any]:
    """Returns rows of a small field of a shard from its copy."""
    data = os.pread(fd, len(rows) * dtype.itemsize, layout.columns[name] + rows.start * dtype.itemsize)
    return np.frombuffer(data, dtype)
