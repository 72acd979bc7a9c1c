"""Creates a packed file: all HDF5 metadata and small datasets; pixel datasets are allocated, not written.

Pixels are written afterwards by plain `pwrite` at the offsets that `create_file` returns. The packer has HDF5 write
into memory only (`scratch_file`) and writes those bytes to the disk itself: HDF5 2.0 ends the process with a
segmentation fault where a write fails while it closes a file.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import resource
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5f, h5p, h5s, h5t, h5z

from fastload.errors import FormatError
from fastload.format import CHUNK_BYTES
from fastload.format.codecs import NONE, Codec
from fastload.format.digests import header_digest, linear_offset, row_digests
from fastload.format.header import IMAGES_OFFSET
from fastload.format.ragged import Column

DISTRIBUTION = "fastload-hdf5"  # on the package index; `fastload` there is another project


@dataclass(frozen=True)
class PixelSpec:
    """A pixel dataset to be created: rows of (H, W, C) or (H, W), K of them a chunk."""

    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int
    attrs: dict[str, Any] = field(default_factory=dict)
    # If not "none", chunks pass through its HDF5 filter, and are not allocated before they are written
    codec: Codec = NONE

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize

    def allocated_bytes(self, num_rows: int) -> int:
        """Returns the bytes of all its chunks, the last one whole, if it is uncompressed."""
        return -(-num_rows // self.chunk_rows) * self.chunk_rows * self.row_bytes

    def compressed_chunk(self, rows: bytes) -> bytes:
        """Returns the chunk with the bytes of these rows; HDF5 expects all its rows, those behind the last are zero."""
        return self.codec.compress(rows.ljust(self.chunk_rows * self.row_bytes, b"\0"))


@dataclass(frozen=True)
class RaggedSpec:
    """A ragged dataset to be created, see `fastload.format`; its index is passed as columns."""

    num_bytes: int
    chunk_bytes: int
    row_shape: tuple[int, ...]  # (H, W, C) or (H, W) of its rows, 0 where they differ
    row_dtype: np.dtype[Any]
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def chunk(self) -> int:
        """Bytes of a chunk of the HDF5 dataset: never more than the whole dataset."""
        return min(self.chunk_bytes, self.num_bytes)

    def allocated_bytes(self, num_rows: int) -> int:
        """Returns the bytes of all its chunks, the last one whole, for any number of rows."""
        return -(-self.num_bytes // self.chunk) * self.chunk


def chunk_rows_for(row_bytes: int, num_rows: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Returns the rows of a chunk: as many whole ones as fit in chunk_bytes, at least 1, at most num_rows."""
    return max(1, min(num_rows, chunk_bytes // row_bytes))


def writer_name() -> str:
    """Returns the attribute `fastload_writer` of files that this release writes."""
    try:
        return f"fastload {version(DISTRIBUTION)}"
    except PackageNotFoundError:
        return "fastload (from a source tree)"


def create_file(
    path: str | Path,
    *,
    num_rows: int,
    pixels: Mapping[str, PixelSpec | RaggedSpec],
    columns: Mapping[str, Column],
    attrs: Mapping[str, Any],
) -> dict[str, int]:
    """Writes a packed file without its pixels, and returns the byte offset of each linear pixel dataset.

    The file is sparse: pixel chunks are allocated back to back and never touched. `digest_fields` and
    `header_digest` are computed here, so columns must hold `split`, `key` and `digest`.

    Args:
        path: an existing file is overwritten; it may be a link in /proc/self/fd.
        pixels: `images`, and `masks` where there are any, in this order.
        columns: every other dataset but `digest_fields`, each with N rows.
        attrs: root attributes besides `fastload_version`, `fastload_writer` and `header_digest`.

    Raises:
        FormatError: this HDF5 library does not lay the chunks back to back.
        OSError: the file may be larger than the limit of this process on the size of files.
    """
    check_size_limit(_most_bytes(num_rows, pixels, columns, attrs))
    with new_file(path) as file:
        offsets = _create_pixels(file, path, num_rows, pixels)
        for name, column in columns.items():
            _create_column(file, name, column)
        hashed = {name: column.values for name, column in columns.items() if name != "digest"}
        _create_column(file, "digest_fields", Column(row_digests(hashed)))
        set_attrs(file, {"fastload_version": _version(pixels), "fastload_writer": writer_name(), **attrs})
        set_attrs(file, {"header_digest": header_digest(file)})
    return offsets


def _version(pixels: Mapping[str, PixelSpec | RaggedSpec]) -> int:
    """Returns the oldest format version that holds these pixel datasets."""
    masks = pixels.get("masks")
    dtype = masks.row_dtype if isinstance(masks, RaggedSpec) else masks.dtype if masks else np.dtype(np.uint8)
    return 2 if dtype.itemsize > 1 else 1  # masks of 16 bits, which some readers of version 1 cut to 8


def pixel_offsets(num_rows: int, pixels: Mapping[str, PixelSpec | RaggedSpec]) -> dict[str, int]:
    """Returns the offsets that `create_file` will return, by creating the pixel datasets alone.

    Later datasets do not move the pixels. Raises as `create_file`.
    """
    check_size_limit(_most_bytes(num_rows, pixels, {}, {}))
    with scratch_file() as (_, path), new_file(path) as file:
        return _create_pixels(file, path, num_rows, pixels)


def _most_bytes(
    num_rows: int,
    pixels: Mapping[str, PixelSpec | RaggedSpec],
    columns: Mapping[str, Column],
    attrs: Mapping[str, Any],
) -> int:
    """Returns a few bytes more than a file needs at most, without chunks that are compressed."""
    total, described = 2**20 + 16 * num_rows, [attrs, *(each.attrs for each in (*pixels.values(), *columns.values()))]
    for values in (value for each in described for value in each.values()):
        texts = [repr(text) for text in values] if isinstance(values, (tuple, list)) else [str(values)]
        total += 16 * len(texts) * max(map(len, texts), default=0)  # each as long as the longest
    for spec in pixels.values():
        linear = isinstance(spec, RaggedSpec) or spec.codec == NONE
        num_bytes = spec.allocated_bytes(num_rows)
        chunk = spec.chunk if isinstance(spec, RaggedSpec) else spec.chunk_rows * spec.row_bytes
        total += linear * num_bytes + 64 * (num_bytes // max(chunk, 1))
    return total + sum(2 * column.values.nbytes for column in columns.values())


def new_file(path: str | Path) -> h5py.File:
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
    access.set_alignment(4096, 4096)
    # The first block of metadata fills the file up to the pixels, also if those are too few bytes for HDF5 to align.
    access.set_meta_block_size(IMAGES_OFFSET)
    access.set_fapl_stdio()  # The same bytes as by default, whose driver cannot open a file by its descriptor.
    creation = h5p.create(h5p.FILE_CREATE)
    creation.set_obj_track_times(False)
    return h5py.File(h5f.create(os.fsencode(path), h5f.ACC_TRUNC, creation, access))


def dump_options(options: Mapping[str, Any]) -> str:
    """Returns the attribute `pack_options`: JSON in canonical form, so that equal options are equal bytes."""
    return json.dumps(dict(options), sort_keys=True, separators=(",", ":"))


def _create_pixels(
    file: h5py.File, path: str | Path, num_rows: int, pixels: Mapping[str, PixelSpec | RaggedSpec]
) -> dict[str, int]:
    """Creates the pixel datasets; returns the offsets of those that plain pwrite can fill: they have no filter."""
    offsets = {}
    for name, spec in pixels.items():
        plist = h5p.create(h5p.DATASET_CREATE)
        attrs, codec_filter = spec.attrs, None
        if isinstance(spec, RaggedSpec):
            shape: tuple[int, ...] = (spec.num_bytes,)
            element = np.dtype(np.uint8)
            plist.set_chunk((spec.chunk,))
            attrs = attrs | {"row_shape": np.array(spec.row_shape), "row_dtype": spec.row_dtype.newbyteorder("=").name}
        else:
            shape, element, codec_filter = (num_rows, *spec.row_shape), spec.dtype, spec.codec.filter
            plist.set_chunk((spec.chunk_rows, *spec.row_shape))
        if codec_filter is None:
            plist.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        else:
            # Optional, so that HDF5 creates the dataset without having the filter: fastload compresses the chunks.
            plist.set_filter(codec_filter[0], h5z.FLAG_OPTIONAL, codec_filter[1])
        plist.set_fill_time(h5d.FILL_TIME_NEVER)
        plist.set_obj_track_times(False)
        dtype = h5t.py_create(element.newbyteorder("<"))
        h5d.create(file.id, name.encode(), dtype, h5s.create_simple(shape, shape), plist)
        set_attrs(file[name], attrs)
        if codec_filter is None:
            offset = linear_offset(file[name])
            if offset is None or (name == "images" and offset != IMAGES_OFFSET):
                raise FormatError(
                    f"{path}: HDF5 {h5py.version.hdf5_version} did not lay the chunks of {name} back to back from "
                    f"byte {IMAGES_OFFSET}. Install h5py 3.16, whose wheels carry an HDF5 that does."
                )
            offsets[name] = offset
    return offsets


def _create_column(file: h5py.File, name: str, column: Column) -> None:
    values = np.ascontiguousarray(column.values, column.values.dtype.newbyteorder("<"))
    if values.dtype.kind == "S":
        # A plain NumPy S is ASCII to h5py, and HDF5 does not convert between that and UTF-8.
        values = values.view(h5py.string_dtype("utf-8", values.dtype.itemsize))
    set_attrs(file.create_dataset(name, data=values, track_times=False), column.attrs)


def set_attrs(item: Any, attrs: Mapping[str, Any]) -> None:
    for name, value in attrs.items():
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, (tuple, list)) and texts and isinstance(texts[0], str):
            encoded = np.array([text.encode("utf-8", errors="backslashreplace") for text in texts])
            encoded = encoded.view(h5py.string_dtype("utf-8", max(encoded.dtype.itemsize, 1)))
            value = encoded if texts is value else encoded[0]
        item.attrs[name] = value


# The memory in which HDF5 builds a file, whose bytes the packer then writes to the disk itself.


@contextmanager
def scratch_file() -> Iterator[tuple[int, str]]:
    """Yields an empty sparse file, gone afterwards: its descriptor and a path to it. In memory, so that no disk fills.

    Where the system has no such files (macOS), it lies in the folder for temporary files.
    """
    fd = -1
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            fd = os.memfd_create("fastload")
    path = f"/proc/self/fd/{fd}"
    try:
        if os.path.exists(path):  # /proc may not be mounted.
            yield fd, path
            return
    finally:
        if fd >= 0:
            os.close(fd)
    with tempfile.NamedTemporaryFile(prefix="fastload-") as named:
        yield named.fileno(), named.name


def check_size_limit(num_bytes: int) -> None:
    """Raises OSError (EFBIG) where this process may not write so large a file (`ulimit -f`)."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit not in (resource.RLIM_INFINITY, -1) and num_bytes > limit:
        raise OSError(errno.EFBIG, f"the file needs up to {num_bytes:,} bytes, `ulimit -f` allows {limit:,}")


def forget(fd: int, start: int, stop: int) -> None:
    """Frees the memory of a part of a `scratch_file`, which then reads as zeros where whole pages lie in it."""
    stop = min(stop, os.fstat(fd).st_size)  # The last bytes may not have been written yet.
    first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end and hasattr(mmap, "MADV_REMOVE"):
        with suppress(OSError), mmap.mmap(fd, end - first, offset=first) as pages:
            pages.madvise(mmap.MADV_REMOVE)
