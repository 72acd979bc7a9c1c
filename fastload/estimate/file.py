"""What the samples of a packed file would be in each store."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.codecs import NONE, has_zstd, parse_codec
from fastload.cpus import available_cpus
from fastload.estimate.sample import Encoders, spread
from fastload.estimate.stores import Stored, StoreEstimates, estimate_stores, stores_of
from fastload.format import PIXEL_FIELDS, PackedFile, open_hdf5, read_header
from fastload.open_readers import close_readers
from fastload.pack.options import Progress
from fastload.pack.store_plan import Form, StoreOption, StorePlan
from fastload.pack.tasks import HEADERS
from fastload.read import RowReader
from fastload.repack.rows import mask_rows_of, rows_of
from fastload.sources.listing import Arrays, Masks
from fastload.store import RAW

_READ_SECONDS = 0.25


def estimate_file(
    path: str | Path, *, threads: int | None = None, progress: Progress | None = None
) -> StoreEstimates | None:
    """What the samples of a file are as they lie there, and would be in each other store.

    What lies there is known, not estimated; masks stay as they are stored.

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
    threads = threads or available_cpus()
    stored, small_masks = _known(file, threads)
    codec = parse_codec("zstd") if small_masks and has_zstd() else NONE
    form: Form | None = "store" if masks else None
    plan = StorePlan(int(shapes[0, 2]), dtype, StoreOption(), None, None, "store", form, mask_codec=codec)
    others = stores_of(plan, source=False)
    try:
        return estimate_stores(
            Encoders(images, masks, headers, plan),
            np.arange(file.num_rows),
            int(shapes[:, :2].astype(np.int64).prod(axis=1).sum()),
            [StoreOption("keep"), *others] if kept else others,
            dtype,
            file.path.absolute().parent,
            stored=stored,
            threads=threads,
            progress=progress,
        )
    finally:
        close_readers()


def _known(file: PackedFile, threads: int) -> tuple[Stored, bool]:
    """What a file is known to hold, and whether its masks are compressed."""
    num_bytes, small = dict.fromkeys(PIXEL_FIELDS, 0), False
    with open_hdf5(file.path) as hdf5:
        for name in PIXEL_FIELDS:
            if name not in file.fields:
                continue
            field = file.fields[name]
            if field.store is not None:
                num_bytes[name] = int(hdf5[f"{name}_bytes"][()].sum())
                small |= name == "masks" and bool((hdf5["masks_encoding"][()] != RAW).any())
            else:
                compressed = bool(field.filters)
                num_bytes[name] = hdf5[name].id.get_storage_size() if compressed else file.num_rows * field.row_bytes
                small |= name == "masks" and compressed
    filters = tuple(file.fields["images"].filters)
    rate = (lambda samples: _chunks_per_s(file, samples, threads)) if filters else None
    return Stored(num_bytes["images"], num_bytes["masks"], filters, rate), small


def _chunks_per_s(file: PackedFile, samples: Sequence[int], threads: int) -> float:
    """Images a second, with their masks, from compressed chunks that are in memory; each decompresses its chunk."""
    names = [name for name in PIXEL_FIELDS if name in file.fields]
    reader = RowReader(file, names, read="pread", cache_chunks=1)
    order = [samples[at] for at in spread(len(samples), len(samples))]
    turn, end = itertools.count(), 0.0

    def memory() -> dict[str, NDArray[Any]]:
        fields = [file.fields[name] for name in names]
        return {field.name: np.empty((1, *field.shape), field.dtype.newbyteorder("=")) for field in fields}

    def read_some(_: int) -> int:
        outs, done = memory(), 0
        while not done or time.perf_counter() < end:
            reader.gather(np.array([order[next(turn) % len(order)]]), outs)
            done += 1
        return done

    try:
        for sample in order:  # what is not in memory comes there
            reader.gather(np.array([sample]), memory())
        with ThreadPoolExecutor(threads) as pool:
            started = time.perf_counter()
            end = started + _READ_SECONDS
            return sum(pool.map(read_some, range(threads))) / (time.perf_counter() - started)
    finally:
        reader.close()


def _stored(file: PackedFile) -> tuple[NDArray[np.int32], bool]:
    """The shape of each image in a store, and whether any is kept otherwise than as pixels."""
    with open_hdf5(file.path) as hdf5:
        return hdf5["images_shape"][()], bool((hdf5["images_encoding"][()] != RAW).any())
