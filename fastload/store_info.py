"""What a byte store holds and how well: encodings, sizes, bytes against raw pixels, filled share of its chunks."""

from __future__ import annotations

from dataclasses import dataclass

import h5py
import numpy as np

from fastload.format import PackedFile
from fastload.store import ENCODINGS


@dataclass(frozen=True)
class EncodingInfo:
    """The rows of a store that have one encoding.

    Attributes:
        name: "raw", "jpeg" or "zstd".
        rows: how many.
        row_bytes: of one, on average.
        share_of_raw: their bytes over those of their pixels.
    """

    name: str
    rows: int
    row_bytes: int
    share_of_raw: float


@dataclass(frozen=True)
class StoreInfo:
    """One store.

    Attributes:
        encodings: those that occur, most rows first.
        num_sizes: different (height, width) of its rows.
        smallest, largest: (height, width) of the rows with fewest and most pixels.
        row_bytes: of one row as it is stored, on average.
        pixel_bytes: of all rows, decoded.
        stored_bytes: of all rows as they are stored.
        allocated_bytes: of its chunks, the last one whole.
        chunk_bytes: of one chunk.
        num_chunks: how many.
        beyond_chunk: rows larger than a chunk, which have chunks of their own.
    """

    encodings: tuple[EncodingInfo, ...]
    num_sizes: int
    smallest: tuple[int, int]
    largest: tuple[int, int]
    row_bytes: int
    pixel_bytes: int
    stored_bytes: int
    allocated_bytes: int
    chunk_bytes: int
    num_chunks: int
    beyond_chunk: int

    @property
    def share_of_raw(self) -> float:
        """Bytes stored over those of the pixels."""
        return self.stored_bytes / max(self.pixel_bytes, 1)

    @property
    def filled(self) -> float:
        """Share of the chunks that rows fill; what is between rows is empty."""
        return self.stored_bytes / max(self.allocated_bytes, 1)


def describe_store(hdf5: h5py.File, file: PackedFile, name: str) -> StoreInfo:
    """The store of a field, as the datasets beside it tell."""
    field = file.fields[name]
    store = field.store
    assert store is not None, f"{name} has no store"
    lengths = hdf5[f"{name}_bytes"][()]
    kinds = hdf5[f"{name}_encoding"][()]
    if "images_shape" in file.fields:
        sizes = hdf5["images_shape"][()].astype(np.int64)[:, :2]
    else:
        sizes = np.tile(np.array(file.fields["images"].shape[:2], np.int64), (len(lengths), 1))
    areas = sizes.prod(axis=1)
    channels = field.shape[2] if len(field.shape) == 3 else 1
    raw = areas * (channels * field.dtype.itemsize)
    encodings = []
    for number in np.unique(kinds).tolist():
        here = kinds == number
        known = ENCODINGS[number] if number < len(ENCODINGS) else f"unknown ({number})"
        share = float(lengths[here].sum() / max(int(raw[here].sum()), 1))
        encodings.append(EncodingInfo(known, int(here.sum()), int(lengths[here].mean()), share))
    smallest, largest = (tuple(sizes[at].tolist()) for at in (areas.argmin(), areas.argmax()))
    num_chunks = -(-store.num_bytes // store.chunk_bytes)
    return StoreInfo(
        encodings=tuple(sorted(encodings, key=lambda found: -found.rows)),
        num_sizes=len(np.unique(sizes, axis=0)),
        smallest=smallest,
        largest=largest,
        row_bytes=int(lengths.mean()),
        pixel_bytes=int(raw.sum()),
        stored_bytes=int(lengths.sum()),
        allocated_bytes=num_chunks * store.chunk_bytes,
        chunk_bytes=store.chunk_bytes,
        num_chunks=num_chunks,
        beyond_chunk=int(np.count_nonzero(lengths > store.chunk_bytes)),
    )
