"""Where rows that are made in order lie while they are packed: one file for images, one for masks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastload.format import IMAGES_OFFSET
from fastload.pack.store_plan import Form, StorePlan
from fastload.store import place_rows

ROW = np.dtype(
    [
        ("row", "<i8"),
        ("digest", "<u8"),
        ("images", "<i8"),
        ("masks", "<i8"),
        ("shape", "<i4", (3,)),
        ("encoding", "u1"),
        ("orientation", "u1"),
        ("mask_encoding", "u1"),
        ("endless", "u1"),
    ]
)
"""A row that was made: its number in the order of packing, its digest, the bytes stored of its image and mask, and what
`EncodedRow` says of them; endless: 1 for a JPEG that is not `ended`."""


@dataclass(frozen=True)
class Stream:
    """The rows of one pixel dataset under way.

    Attributes:
        name: "images" or "masks"; the column of ROW that has its lengths.
        path: the file that they are written to.
        base: byte of that file at which they begin.
        form: "rows": back to back; "store": each whole inside a chunk.
        chunk_bytes: of a store.
    """

    name: str
    path: str
    base: int
    form: Form
    chunk_bytes: int

    def place(self, rows: NDArray[np.void], start: int) -> tuple[NDArray[np.int64], int]:
        """Offsets from base of these rows (ROW), which follow what ends at start; and where they end."""
        lengths = rows[self.name]
        if self.form == "store":
            return place_rows(lengths, self.chunk_bytes, start)
        ends = start + np.cumsum(lengths)
        return ends - lengths, int(ends[-1]) if len(ends) else start


def streams_of(plan: StorePlan, part: Path, masks: Path) -> tuple[Stream, ...]:
    """The streams of a dataset: images, in their final place where they are not compressed as a whole, and masks."""
    images = Stream("images", str(part), IMAGES_OFFSET, plan.images, plan.chunk_bytes)
    return (images,) if plan.masks is None else (images, Stream("masks", str(masks), 0, plan.masks, plan.chunk_bytes))
