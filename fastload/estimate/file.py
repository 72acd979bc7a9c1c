"""What the samples of a packed file would be in each store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.estimate.sample import Encode, Encoders
from fastload.estimate.stores import StoreEstimates, estimate_stores, stores_of
from fastload.format import PackedFile, read_header
from fastload.image_header import ImageHeader
from fastload.pack.options import Progress
from fastload.pack.store_plan import StoreOption, StorePlan
from fastload.pack.tasks import HEADERS
from fastload.repack.rows import close_readers, mask_rows_of, rows_of
from fastload.sources.listing import Arrays, Masks, Pictures
from fastload.store import RAW, EncodedRow
from fastload.stored_samples import StoredSamples, has_stores

_KEEP = StoreOption("keep")


def estimate_file(
    path: str | Path, *, threads: int | None = None, progress: Progress | None = None
) -> StoreEstimates | None:
    """What the samples of a file are as they lie there, and would be in each other store.

    The disk is measured with a temporary file beside it; nothing that is in memory is dropped from there. Takes about
    4 seconds at most.

    Args:
        path: a packed file, or another HDF5 file that can be read as one.
        threads: that decode at once, by default one per CPU.
        progress: called with (stage, done, total).

    Returns:
        None where the file holds no images.

    Raises:
        MissingFileError, FormatError: the file is not there, or cannot be read as a packed one.
    """
    file = read_header(path)
    if "images" not in file.fields:
        return None
    with _opened(file) as rows:
        shape = rows.shapes[0]
        bits = 8 * file.fields["images"].dtype.itemsize
        headers = np.zeros(file.num_rows, HEADERS)
        headers["height"], headers["width"] = rows.shapes[:, 0], rows.shapes[:, 1]
        headers["channels"], headers["bits"] = shape[2], bits
        dtype = np.dtype(f"uint{bits}")
        plan = StorePlan(int(shape[2]), dtype, StoreOption(), None, None, "store", "store" if rows.masks else None)
        encode, kept = Encoders(rows.images, rows.masks, headers, plan), rows.kept
        stores = stores_of(plan, source=False)
        return estimate_stores(
            encode if kept is None else _with_kept(encode, kept),
            np.arange(file.num_rows),
            int(rows.shapes[:, :2].astype(np.int64).prod(axis=1).sum()),
            stores if kept is None else [_KEEP, *stores],
            dtype,
            file.path.absolute().parent,
            threads=threads,
            progress=progress,
        )


@dataclass(frozen=True, eq=False)
class _Rows:
    """A file's rows as a source. `shapes` (N, 3); `kept` where they are stored otherwise than as plain pixels."""

    images: Pictures | Arrays
    masks: Masks | None
    shapes: NDArray[np.int32]
    kept: StoredSamples | None = None


@contextmanager
def _opened(file: PackedFile) -> Iterator[_Rows]:
    if has_stores(file):
        samples = StoredSamples(file)
        try:
            index = samples.index.get("images")
            shapes = _same_shapes(file, samples.shape(0)) if index is None else index.shape
            plain = index is None or bool((index.encoding == RAW).all())
            masks = _masks(file, _Pictures(samples, "masks")) if "masks" in file.fields else None
            yield _Rows(_Pictures(samples, "images"), masks, shapes, None if plain else samples)
        finally:
            samples.close()
        return
    try:
        images = rows_of(file, "images")
        masks = _masks(file, mask_rows_of(file)) if "masks" in file.fields else None
        yield _Rows(images, masks, _same_shapes(file, (*images.shape, 1)[:3]))
    finally:
        close_readers()


def _same_shapes(file: PackedFile, shape: tuple[int, ...]) -> NDArray[np.int32]:
    return np.broadcast_to(np.int32(shape), (file.num_rows, 3))


def _masks(file: PackedFile, rows: Pictures | Arrays) -> Masks:
    return Masks(rows, np.ones(file.num_rows, np.bool_))


def _with_kept(encode: Encode, kept: StoredSamples) -> Encode:
    def either(sample: int, option: StoreOption) -> EncodedRow:
        return kept.encoded(sample) if option.kind == "keep" else encode(sample, option)

    return either


@dataclass(frozen=True)
class _Pictures:
    """Decoded images or masks of a file with stores, as `Pictures`."""

    samples: StoredSamples
    name: str

    def header(self, i: int) -> ImageHeader:
        """Of row i."""
        height, width, channels = self.samples.shape(i)
        return ImageHeader(height, width, channels, 8 * self.samples.file.fields[self.name].dtype.itemsize, "", 1)

    def read(self, i: int) -> NDArray[Any]:
        """Pixels of row i."""
        return self.samples.pixels(self.name, i)

    def take(self, indices: NDArray[np.integer[Any]]) -> Pictures:
        """Never asked for."""
        raise NotImplementedError
