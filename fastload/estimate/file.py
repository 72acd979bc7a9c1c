"""What the samples of a packed file would be in each store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastload.estimate.sample import Encoders
from fastload.estimate.stores import StoreEstimates, estimate_stores, stores_of
from fastload.format import PackedFile, open_hdf5, read_header
from fastload.open_readers import close_readers
from fastload.pack.options import Progress
from fastload.pack.store_plan import StoreOption, StorePlan
from fastload.pack.tasks import HEADERS
from fastload.repack.rows import mask_rows_of, rows_of
from fastload.sources.listing import Arrays, Masks
from fastload.store import RAW


def estimate_file(
    path: str | Path, *, threads: int | None = None, progress: Progress | None = None
) -> StoreEstimates | None:
    """What the samples of a file are as they lie there, and would be in each other store.

    The disk is measured with a temporary file beside it; nothing that is in memory is dropped from there. Takes about
    5 seconds.

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
    images, masks = rows_of(file, "images"), None
    if "masks" in file.fields:
        masks = Masks(mask_rows_of(file), np.ones(file.num_rows, np.bool_))
    if isinstance(images, Arrays):
        shapes, kept = np.tile(np.array([*images.shape, 1][:3], np.int32), (file.num_rows, 1)), False
    else:
        shapes, kept = _stored(file)
    dtype = np.dtype(file.fields["images"].dtype.newbyteorder("="))
    headers = np.zeros(file.num_rows, HEADERS)
    headers["height"], headers["width"], headers["channels"] = shapes.T
    headers["bits"] = 8 * dtype.itemsize
    plan = StorePlan(int(shapes[0, 2]), dtype, StoreOption(), None, None, "store", "store" if masks else None)
    others = stores_of(plan, source=False)
    try:
        return estimate_stores(
            Encoders(images, masks, headers, plan),
            np.arange(file.num_rows),
            int(shapes[:, :2].astype(np.int64).prod(axis=1).sum()),
            [StoreOption("keep"), *others] if kept else others,
            dtype,
            file.path.absolute().parent,
            threads=threads,
            progress=progress,
        )
    finally:
        close_readers()


def _stored(file: PackedFile) -> tuple[NDArray[np.int32], bool]:
    """The shape of each image in a store, and whether any is kept otherwise than as pixels."""
    with open_hdf5(file.path) as hdf5:
        return hdf5["images_shape"][()], bool((hdf5["images_encoding"][()] != RAW).any())
