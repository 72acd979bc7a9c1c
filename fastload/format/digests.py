"""The digests in a packed file, and what they are computed from: rows, and the description of every dataset."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.system import native

DIGEST_FIELDS = ("digest", "digest_fields")
"""The datasets that hold digests of rows."""

MOST_READ = 2000
"""Datasets and links of a root group, and attributes of one object, that are looked at. Each takes 0.1 ms or more."""

_MOST_ATTRIBUTE_BYTES = 64 * 2**20
_BLOCK_BYTES = 2 * 2**20
_MOST_SPLIT_ROWS = 512  # that are compared; a file with more runs is more than damaged here and there
_MOST_SPLIT_ROW_BYTES = 2**20

# xxhash releases the GIL for 100,000 bytes and more, and each time a thread that runs Python may take it, for
# milliseconds. A row is hashed in pieces below that: 2.0 us for 116 KB in cache, 1.4 us in one piece.
_PIECE_BYTES = 96 * 2**10

KEEPS_GIL = 500
"""Elements up to which NumPy loops over an array without releasing the GIL, whose cost `system.syscalls` describes."""

BLOCK_ROWS = 4096
"""Digests of rows that `block_digests` hashes together."""


def row_digests(columns: Mapping[str, NDArray[Any]]) -> NDArray[np.uint64]:
    """Returns XXH3-64 of each row's bytes in these arrays (N, ...), one array after another by name; uint64 (N,)."""
    return pixel_digests([columns[name] for name in sorted(columns)])


def pixel_digests(arrays: Sequence[NDArray[Any]]) -> NDArray[np.uint64]:
    """Returns XXH3-64 of each row's bytes in arrays (N, ...), in their order, hashed as little-endian; uint64 (N,).

    The GIL is held meanwhile, for up to 2 MiB or where the loops were not compiled.
    """
    parts = []
    for array in arrays:
        little_endian = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
        parts.append(little_endian.reshape(len(array), -1).view(np.uint8))
    count, row_bytes = len(parts[0]), sum(part.shape[1] for part in parts)
    if row_bytes > native.SHORT_BYTES and native.library() is not None:
        return native.digests_in_memory(parts)
    # In blocks that stay in the CPU's cache; short rows of several arrays are joined.
    step = max(1, _BLOCK_BYTES // max(row_bytes, 1))
    digests = np.empty(count, np.uint64)
    for first in range(0, count, step):
        block = [part[first : first + step] for part in parts]
        if row_bytes <= _PIECE_BYTES:
            rows = block[0] if len(block) == 1 else np.concatenate(block, axis=1)
            found = map(xxhash.xxh3_64_intdigest, rows)
        else:
            pieces = [part[:, at : at + _PIECE_BYTES] for part in block for at in range(0, part.shape[1], _PIECE_BYTES)]
            states = list(map(xxhash.xxh3_64, pieces[0]))
            for piece in pieces[1:]:
                list(map(xxhash.xxh3_64.update, states, piece))
            found = map(xxhash.xxh3_64.intdigest, states)
        digests[first : first + step] = np.fromiter(found, np.uint64, len(block[0]))
    return digests


def row_digest(parts: Sequence[Any]) -> int:
    """Returns XXH3-64 of one row: of bytes, or of C-contiguous little-endian arrays, one after another."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return int(digest.intdigest())


def block_digests(digests: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns XXH3-64 of each `BLOCK_ROWS` of the digests of rows, uint64 (blocks,).

    Whoever keeps these 2 bytes for 1,000 rows knows of digests that are read later whether they are the same.
    """
    parts = (digests[first : first + BLOCK_ROWS] for first in range(0, len(digests), BLOCK_ROWS))
    return np.fromiter((xxhash.xxh3_64_intdigest(np.ascontiguousarray(part).data) for part in parts), np.uint64)


def header_digest(file: h5py.File, digests: dict[str, NDArray[np.uint64]] | None = None) -> str:
    """Returns XXH3-128 in hex over the description of every dataset and attribute, and over both digest arrays.

    `digests`: gets these arrays, by name.
    """
    datasets = {}
    for name in sorted(name for name in islice(file, MOST_READ) if isinstance(name, str)):  # bytes are not UTF-8
        item = None if isinstance(file.get(name, getlink=True), h5py.ExternalLink) else file.get(name)
        if not isinstance(item, h5py.Dataset):
            continue
        dtype = dtype_of(item)
        datasets[name] = {
            "shape": None if item.shape is None else list(item.shape),
            "dtype": None if dtype is None else dtype.str,
            "chunks": list(item.chunks) if item.chunks else None,
            "offset": None if dtype is None else linear_offset(item),
            "attrs": attributes(item),
        }
    attrs = {key: value for key, value in attributes(file).items() if key != "header_digest"}
    text = json.dumps({"datasets": datasets, "attrs": attrs}, sort_keys=True, ensure_ascii=True, default=str)
    digest = xxhash.xxh3_128(text.encode())
    for name in DIGEST_FIELDS:
        if name in datasets and datasets[name]["dtype"] == "<u8" and not (file[name].external or file[name].is_virtual):
            values = np.ascontiguousarray(file[name][()])
            digest.update(values.data)
            if digests is not None:
                digests[name] = values
    return digest.hexdigest()


def dtype_of(item: h5py.Dataset) -> np.dtype[Any] | None:
    """Returns the type of a dataset's elements; None for one that NumPy lacks."""
    try:
        dtype: np.dtype[Any] = item.dtype
    except (TypeError, ValueError, RuntimeError):
        return None
    return dtype


def attributes(item: h5py.HLObject) -> dict[str, Any]:
    """Returns the first `MOST_READ` attributes of a file or dataset, by name, as plain Python values.

    Attributes of types that NumPy lacks, or of more than 64 MiB, are left out.
    """
    found = {}
    for name in islice(item.attrs, MOST_READ):
        if item.attrs.get_id(name).get_storage_size() <= _MOST_ATTRIBUTE_BYTES:
            with suppress(TypeError, ValueError):
                found[name] = plain(item.attrs[name])
    return found


def plain(value: Any) -> Any:
    """Returns the value of an HDF5 attribute as str, int, float, bool or a tuple of these."""
    if isinstance(value, np.ndarray):
        return tuple(plain(item) for item in value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def linear_offset(item: h5py.Dataset) -> int | None:
    """Returns the byte at which row 0 begins if all rows lie back to back, native and unfiltered; else None."""
    if not item.dtype.isnative or item.external or item.is_virtual:
        return None
    if item.chunks is None:
        offset = item.id.get_offset()
        return None if offset is None else int(offset)
    if tuple(item.chunks[1:]) != tuple(item.shape[1:]) or item.id.get_create_plist().get_nfilters():
        return None
    chunk_rows = int(item.chunks[0])
    num_chunks = -(-int(item.shape[0]) // max(chunk_rows, 1))
    if not num_chunks or item.id.get_num_chunks() != num_chunks:
        return None
    offsets: dict[int, int] = {}
    item.id.chunk_iter(lambda chunk: offsets.update({chunk.chunk_offset[0] // chunk_rows: chunk.byte_offset}))
    chunk_bytes = math.prod(map(int, item.chunks)) * item.dtype.itemsize
    base = offsets.get(0, -1)
    return int(base) if offsets == {i: base + i * chunk_bytes for i in range(num_chunks)} else None


def repaired_splits(columns: Mapping[str, h5py.Dataset], digests: h5py.Dataset, num_splits: int) -> NDArray[np.uint8]:
    """Returns the number of each row's split, (N,), as it was packed: `split` decides which rows are a split's.

    A split is one run of rows. So whatever changed, the first and the last row of some run have changed values: those
    rows are compared with their digests. Where a digest fits with another number of a split, that one was packed.
    A row that does not fit its digest with any number is left as it is: another of its columns is damaged.

    Args:
        columns: what the digests are of, by name, `split` among them; (N, ...).
        digests: uint64 (N,); of another type they say nothing.
        num_splits: so many there are.
    """
    found: NDArray[np.uint8] = columns["split"][()]
    if found.dtype != np.uint8 or digests.dtype != np.uint64 or digests.ndim != 1:
        return found
    compared: set[int] = set()
    while rows := set(_ends_of_runs(found)) - compared:
        if len(compared) + len(rows) > _MOST_SPLIT_ROWS:
            return found
        compared |= rows
        for row in sorted(rows):
            cells = {name: column[row : row + 1] for name, column in columns.items()}
            if sum(cell.nbytes for cell in cells.values()) > _MOST_SPLIT_ROW_BYTES:
                return found
            for number in (int(found[row]), *range(num_splits)):
                cells["split"] = np.array([number], found.dtype)
                if row_digests(cells)[0] == digests[row]:
                    found[row] = number
                    break
    return found


def _ends_of_runs(values: NDArray[np.uint8]) -> list[int]:
    """Returns the first and the last row of each run of equal values, of the first runs of many."""
    changes = np.flatnonzero(values[1:] != values[:-1])[:_MOST_SPLIT_ROWS]
    return [0, *changes.tolist(), *(changes + 1).tolist(), len(values) - 1]
