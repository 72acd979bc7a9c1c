"""The datasets of a packed file by their rows: `Column`, values of one shape; and rows of varying length.

Of the latter: their index, and where rows are written in a ragged dataset. `fastload.format` defines how they lie in
the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Moves = Literal["", "points", "xyv", "xywh", "xyxy"]
"""Kind of coordinates in a column, which change when the image is resized: points x, y; points with their visibility,
COCO's 0, 1 or 2; boxes as corner and size; boxes as two corners. "": no coordinates."""


@dataclass(frozen=True, eq=False)
class Column:
    """One dataset of a packed file other than pixels."""

    values: NDArray[Any]  # (N, ...), a fixed-shape numeric array, or S for keys
    # HDF5 attributes as plain Python values, e.g. {"names": ("cat", "dog")}
    attrs: dict[str, Any] = field(default_factory=dict)
    # Kind of coordinates, in pixels of the upright image before any resizing; the last axis holds x, y (or x, y, x, y,
    # ...) or the 4 numbers of a box. The packer scales them with the image
    moves: Moves = ""
    # Where values that may be refused stand, by the key of their sample, for messages; not packed
    origins: dict[str, str] = field(default_factory=dict)


ENCODINGS = ("raw", "jpeg", "zstd")
RAW, JPEG, ZSTD = range(3)

MAX_ROW_BYTES = 2**32 - 1
"""The limit for the pixels of one row, decoded."""

INDEX_DTYPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "offset": ("<i8", ()),
    "bytes": ("<i8", ()),
    "shape": ("<i4", (3,)),
    "encoding": ("|u1", ()),
    "orientation": ("|u1", ()),
}
"""The datasets of an index: dtype, and shape of one row."""


class RaggedExtent(NamedTuple):
    """The extent of a ragged dataset of N rows in the file: the byte at which it begins, and its length T."""

    base: int
    num_bytes: int
    chunk_bytes: int
    num_rows: int
    of_one_file: int = 0  # of an index: `chunk_rows` of one file of all of its rows

    @property
    def chunk_rows(self) -> int:
        """Rows in a chunk, on average."""
        return self.of_one_file or max(
            1, min(self.num_rows, round(self.num_rows * self.chunk_bytes / max(self.num_bytes, 1)))
        )


@dataclass(frozen=True, eq=False)
class EncodedRow:
    """One sample as it is written: a row of ragged `images` and, if there are masks, of `masks`."""

    image: bytes | memoryview  # encoded bytes: little-endian pixels (H, W, C), a JPEG file, or a zstd frame of pixels
    encoding: int  # RAW, JPEG or ZSTD
    shape: tuple[int, int, int]  # (H, W, C) of the pixels, decoded and upright
    orientation: int  # EXIF orientation still to be applied to a JPEG; else 1
    digest: int  # XXH3-64 of the pixels (of a JPEG: of its bytes), then of the mask's
    mask: bytes | memoryview | None = None  # encoded bytes of the mask, if there are masks
    mask_encoding: int = RAW  # RAW or ZSTD
    warning: str = ""  # what libjpeg warns of in the JPEG that it was decoded from or is, if that is known


def index_names(field: str) -> tuple[str, ...]:
    """Returns the names of the datasets that are the index of ragged `images` or `masks`."""
    parts = ("offset", "bytes", "encoding") if field == "masks" else INDEX_DTYPES
    return tuple(f"{field}_{part}" for part in parts)


@dataclass(frozen=True, eq=False)
class RaggedIndex:
    """Index entries of n rows of a ragged dataset: an array for each dataset of the index."""

    offset: NDArray[np.int64]
    bytes: NDArray[np.int64]
    shape: NDArray[np.int32]  # (n, 3) also for masks, whose last number means nothing
    encoding: NDArray[np.uint8]
    orientation: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.offset)

    def part(self, rows: slice | NDArray[Any]) -> Self:
        return type(self)(**{name: values[rows] for name, values in vars(self).items()})

    def datasets(self, field: str) -> dict[str, tuple[NDArray[Any], dict[str, Any]]]:
        """Returns the datasets of the index of "images" or "masks" by name: values and attributes."""
        found: dict[str, tuple[NDArray[Any], dict[str, Any]]] = {}
        for name in index_names(field):
            part = name.removeprefix(f"{field}_")
            values = np.ascontiguousarray(getattr(self, part), dtype=INDEX_DTYPES[part][0])
            found[name] = values, {"names": ENCODINGS} if part == "encoding" else {}
        return found


def ragged_offsets(lengths: NDArray[np.int64], chunk_bytes: int, start: int = 0) -> tuple[NDArray[np.int64], int]:
    """Returns where rows of these lengths are written, one after another, each whole inside a chunk, and the new end.

    Lengths, 0 allowed, and offsets are int64 (n,). Rows may come in several calls: each continues at the end that the
    one before returned, with the same result.
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
    """Returns the shape that all rows share, (H, W, C), with 0 where they differ; C never does."""
    low, high = shapes.min(axis=0), shapes.max(axis=0)
    return tuple(int(a) if a == b else 0 for a, b in zip(low, high, strict=True))
