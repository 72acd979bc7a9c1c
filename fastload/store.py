"""Rows of different lengths in one byte store: which bytes are a sample's, and how they become its pixels.

Where images differ in size, or are kept encoded, `images` (and `masks`) is a store: uint8 (T,), on disk one linear
array in chunks of `chunk_bytes`. Each row lies whole inside one chunk; one that is larger than a chunk begins at a
chunk's first byte, and what follows it begins at the next one. Beside a store `images` stand plain datasets of N rows:

| dataset | type, shape | what |
| --- | --- | --- |
| `images_offset` | int64 (N,) | the row's first byte, counted from the beginning of the store |
| `images_bytes` | int64 (N,) | its length |
| `images_shape` | int32 (N, 3) | H, W, C of its pixels, decoded and upright |
| `images_encoding` | uint8 (N,), attribute `names` | 0 raw: little-endian pixels; 1 jpeg; 2 zstd: raw, compressed |
| `images_orientation` | uint8 (N,) | EXIF orientation that is still to be applied to a JPEG; else 1 |

Beside a store `masks` stand `masks_offset`, `masks_bytes` and `masks_encoding`; a mask has its image's size. The
store's attributes `row_shape`, (H, W, C) or (H, W) with 0 where rows differ, and `row_dtype` say what its rows are. The
`digest` of a row is that of its pixels, as everywhere; only a JPEG's is that of its bytes, as they are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ENCODINGS = ("raw", "jpeg", "zstd")
RAW, JPEG, ZSTD = range(3)

INDEX_DTYPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "offset": ("<i8", ()),
    "bytes": ("<i8", ()),
    "shape": ("<i4", (3,)),
    "encoding": ("|u1", ()),
    "orientation": ("|u1", ()),
}
"""The datasets beside a store: dtype, and shape of one row."""

_OF_MASKS = ("offset", "bytes", "encoding")


class Store(NamedTuple):
    """How the rows of a field lie in a byte store.

    Attributes:
        base: byte of the file at which the store begins.
        num_bytes: T.
        chunk_bytes: of its HDF5 chunks.
        num_rows: N.
    """

    base: int
    num_bytes: int
    chunk_bytes: int
    num_rows: int

    @property
    def chunk_rows(self) -> int:
        """Rows in a chunk, on average."""
        return max(1, min(self.num_rows, round(self.num_rows * self.chunk_bytes / max(self.num_bytes, 1))))


@dataclass(frozen=True, eq=False)
class EncodedRow:
    """One sample as it is written: a row of `images` and, where there are masks, of `masks`.

    Attributes:
        image: the bytes stored: little-endian pixels (H, W, C), a JPEG file, or a zstd frame of pixels.
        encoding: RAW, JPEG or ZSTD.
        shape: (H, W, C) of the pixels, decoded and upright.
        orientation: EXIF orientation still to be applied to a JPEG; else 1.
        digest: XXH3-64 of its pixels (of a JPEG: of its bytes), then of its mask's.
        mask: its bytes stored, if there are masks.
        mask_encoding: RAW or ZSTD.
        ended: whether a JPEG file that is kept has its end marker; without it, it may lack what was behind some place.
    """

    image: bytes | memoryview
    encoding: int
    shape: tuple[int, int, int]
    orientation: int
    digest: int
    mask: bytes | memoryview | None = None
    mask_encoding: int = RAW
    ended: bool = True


def index_names(field: str) -> tuple[str, ...]:
    """Names of the datasets that stand beside a store of this name."""
    parts = _OF_MASKS if field == "masks" else tuple(INDEX_DTYPES)
    return tuple(f"{field}_{part}" for part in parts)


@dataclass(frozen=True, eq=False)
class StoreIndex:
    """Where rows lie in a store and what they are; arrays of n rows, as the datasets beside it.

    Attributes:
        shape: (n, 3) also for masks, whose last number means nothing.
    """

    offset: NDArray[np.int64]
    bytes: NDArray[np.int64]
    shape: NDArray[np.int32]
    encoding: NDArray[np.uint8]
    orientation: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.offset)

    def part(self, rows: slice) -> StoreIndex:
        """That of some of the rows."""
        return StoreIndex(**{name: values[rows] for name, values in vars(self).items()})

    def datasets(self, field: str) -> dict[str, tuple[NDArray[Any], dict[str, Any]]]:
        """The datasets beside a store of this name: values and attributes."""
        found: dict[str, tuple[NDArray[Any], dict[str, Any]]] = {}
        for name in index_names(field):
            part = name.removeprefix(f"{field}_")
            values = np.ascontiguousarray(getattr(self, part), dtype=INDEX_DTYPES[part][0])
            found[name] = values, {"names": ENCODINGS} if part == "encoding" else {}
        return found


def place_rows(lengths: NDArray[np.int64], chunk_bytes: int, start: int = 0) -> tuple[NDArray[np.int64], int]:
    """Where rows of these lengths lie in a store, one after another, each whole inside a chunk.

    Placing some rows, and then others from the end that this returned, is placing all of them: rows can be placed as
    they come.

    Args:
        lengths: int64 (n,), bytes of each row, 0 allowed.
        chunk_bytes: of the store's chunks.
        start: the store's end so far.

    Returns:
        int64 (n,) offsets, and the store's end.
    """
    offsets = np.empty(len(lengths), np.int64)
    ends = np.cumsum(lengths)
    at, before = 0, 0
    while at < len(lengths):
        room = -start % chunk_bytes  # 0 at a chunk's first byte, where all of it is free
        stop = int(np.searchsorted(ends, before + room, "right")) if room else at
        if stop == at:
            start += room
            stop = int(np.searchsorted(ends, before + chunk_bytes, "right"))
            if stop == at:  # larger than a chunk: the next row begins at another one
                offsets[at] = start
                start += -(-int(lengths[at]) // chunk_bytes) * chunk_bytes
                before, at = int(ends[at]), at + 1
                continue
        offsets[at:stop] = start + np.concatenate(([0], ends[at : stop - 1] - before))
        start += int(ends[stop - 1]) - before
        before, at = int(ends[stop - 1]), stop
    return offsets, start


def common_shape(shapes: NDArray[np.int32]) -> tuple[int, ...]:
    """The shape that all rows share, (H, W, C), with 0 where they differ; C never does."""
    low, high = shapes.min(axis=0), shapes.max(axis=0)
    return tuple(int(a) if a == b else 0 for a, b in zip(low, high, strict=True))
