"""Creating a packed file: all HDF5 metadata and small datasets, with the pixel datasets allocated but unwritten.

Pixels are written afterwards by plain `pwrite` at the offsets that `create_file` returns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5f, h5p, h5s, h5t, h5z
from numpy.typing import NDArray

from fastload.codecs import NONE, Codec
from fastload.errors import FormatError
from fastload.format import FORMAT_VERSION, IMAGES_OFFSET, header_digest, row_digests
from fastload.sources.listing import Column

CHUNK_BYTES = 8 * 2**20
"""Size at which chunks aim: large enough for any disk, small enough for 16 of them to be read at once."""

ALIGNMENT = 4096


@dataclass(frozen=True)
class PixelSpec:
    """A pixel dataset to lay out: rows of (H, W, C) or (H, W), K of them a chunk."""

    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int
    attrs: dict[str, Any] = field(default_factory=dict)
    codec: Codec = NONE
    """Other than none: chunks pass through its HDF5 filter, and are not allocated before they are written."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize

    def allocated_bytes(self, num_rows: int) -> int:
        """Bytes of all its chunks, the last one whole, where it lies in one piece."""
        return -(-num_rows // self.chunk_rows) * self.chunk_rows * self.row_bytes


@dataclass(frozen=True)
class StoreSpec:
    """A byte store to lay out, see `fastload.store`; the datasets beside it are columns."""

    num_bytes: int
    chunk_bytes: int
    row_shape: tuple[int, ...]
    """(H, W, C) or (H, W) of its rows, 0 where they differ."""
    row_dtype: np.dtype[Any]
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def chunk(self) -> int:
        """Bytes of a chunk of the HDF5 dataset, which is never larger than all of it."""
        return min(self.chunk_bytes, self.num_bytes)

    def allocated_bytes(self, num_rows: int) -> int:
        """Bytes of all its chunks, the last one whole, however many rows they hold."""
        return -(-self.num_bytes // self.chunk) * self.chunk


def chunk_rows_for(row_bytes: int, num_rows: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Rows a chunk holds: as many whole ones as fit chunk_bytes, at least 1, at most num_rows."""
    return max(1, min(num_rows, chunk_bytes // row_bytes))


def writer_name() -> str:
    """The attribute `fastload_writer` of files that this release writes."""
    try:
        return f"fastload {version('fastload')}"
    except PackageNotFoundError:
        return "fastload (from a source tree)"


def create_file(
    path: str | Path,
    *,
    num_rows: int,
    pixels: Mapping[str, PixelSpec | StoreSpec],
    columns: Mapping[str, Column],
    attrs: Mapping[str, Any],
) -> dict[str, int]:
    """Write a packed file without its pixels, and return the byte offset of each linear pixel dataset.

    The file is sparse: pixel chunks are allocated back to back and never touched. `digest_fields` and
    `header_digest` are computed here, so columns must hold `split`, `key` and `digest`.

    Args:
        path: file to create; one that exists is overwritten.
        num_rows: N.
        pixels: `images`, and `masks` where there are any, in this order.
        columns: every other dataset but `digest_fields`, each with N rows.
        attrs: root attributes besides `fastload_version`, `fastload_writer` and `header_digest`.

    Raises:
        FormatError: this HDF5 library does not lay the chunks back to back.
    """
    with _new_file(path) as file:
        for name, spec in pixels.items():
            _create_pixels(file, name, num_rows, spec)
        for name, column in columns.items():
            _create_column(file, name, column)
        hashed = {name: column.values for name, column in columns.items() if name != "digest"}
        _create_column(file, "digest_fields", Column(row_digests(hashed)))
        _set_attrs(file, {"fastload_version": FORMAT_VERSION, "fastload_writer": writer_name(), **attrs})
        _set_attrs(file, {"header_digest": header_digest(file)})
        return {name: _pixel_offset(path, file[name]) for name, spec in pixels.items() if is_linear(spec)}


def is_linear(spec: PixelSpec | StoreSpec) -> bool:
    """Whether the dataset lies in one piece, and is written by plain pwrite."""
    return isinstance(spec, StoreSpec) or spec.codec == NONE


def pixel_offsets(path: str | Path, num_rows: int, pixels: Mapping[str, PixelSpec | StoreSpec]) -> dict[str, int]:
    """Where `create_file` will put each pixel dataset, found by creating them alone.

    Args:
        path: a file that may be written for it, and is removed again.
        num_rows: N.
        pixels: as `create_file`; what comes behind them does not move them.
    """
    try:
        with _new_file(path) as file:
            for name, spec in pixels.items():
                _create_pixels(file, name, num_rows, spec)
            return {name: _pixel_offset(path, file[name]) for name, spec in pixels.items() if is_linear(spec)}
    finally:
        Path(path).unlink(missing_ok=True)


def _new_file(path: str | Path) -> h5py.File:
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
    access.set_alignment(ALIGNMENT, ALIGNMENT)
    # The first block of metadata fills the file up to where the pixels begin, also when they are too few to be aligned.
    access.set_meta_block_size(IMAGES_OFFSET)
    creation = h5p.create(h5p.FILE_CREATE)
    creation.set_obj_track_times(False)
    return h5py.File(h5f.create(os.fsencode(path), h5f.ACC_TRUNC, creation, access))


def write_packed(
    path: str | Path,
    images: NDArray[Any],
    columns: Mapping[str, Column] | None = None,
    *,
    masks: NDArray[np.uint8] | None = None,
    chunk_rows: int | None = None,
    splits: Mapping[str, int] | None = None,
    shuffled: bool = True,
    seed: int = 0,
    ignore_index: int | None = None,
) -> Path:
    """Write arrays that fit in memory as a packed file; rows keep their order.

    Args:
        path: file to write; one that exists is overwritten.
        images: uint8 or uint16 (N, H, W, C).
        columns: `labels` and other datasets by name.
        masks: uint8 (N, H, W).
        chunk_rows: rows a chunk holds, by default as many as `pack_images` would choose.
        splits: name -> number of rows, in row order; by default one split `all`.
        shuffled: what the file says about the order of its rows.
        seed: likewise.
        ignore_index: attribute of masks.
    """
    path = Path(path)
    num_rows = len(images)
    splits = splits or {"all": num_rows}
    arrays = {"images": np.ascontiguousarray(images)}
    if masks is not None:
        arrays["masks"] = np.ascontiguousarray(masks)
    rows = chunk_rows or chunk_rows_for(arrays["images"][0].nbytes, num_rows)
    mask_attrs = {} if ignore_index is None else {"ignore_index": ignore_index}
    pixels = {
        name: PixelSpec(array.shape[1:], array.dtype, min(rows, num_rows), mask_attrs if name == "masks" else {})
        for name, array in arrays.items()
    }
    everything = dict(columns or {})
    everything["split"] = Column(
        np.repeat(np.arange(len(splits), dtype=np.uint8), list(splits.values())), {"names": tuple(splits)}
    )
    everything.setdefault("key", Column(np.array([f"{i:08d}".encode() for i in range(num_rows)])))
    everything["digest"] = Column(pixel_digests(list(arrays.values())))
    attrs = {"decoder": "none", "source_layout": "arrays", "pack_options": "{}", "seed": seed, "shuffled": shuffled}
    offsets = create_file(path, num_rows=num_rows, pixels=pixels, columns=everything, attrs=attrs)
    with open(path, "r+b") as file:
        for name, array in arrays.items():
            file.seek(offsets[name])
            file.write(array.data)
    return path


def pixel_digests(arrays: list[NDArray[Any]]) -> NDArray[np.uint64]:
    """XXH3-64 of each row's bytes, those of several arrays one after another; uint64 (N,)."""
    return row_digests({str(i): array for i, array in enumerate(arrays)})


def dump_options(options: Mapping[str, Any]) -> str:
    """The attribute `pack_options`: JSON in one spelling, so that equal options are equal bytes."""
    return json.dumps(dict(options), sort_keys=True, separators=(",", ":"))


def _create_pixels(file: h5py.File, name: str, num_rows: int, spec: PixelSpec | StoreSpec) -> None:
    plist = h5p.create(h5p.DATASET_CREATE)
    attrs = spec.attrs
    if isinstance(spec, StoreSpec):
        shape: tuple[int, ...] = (spec.num_bytes,)
        stored_dtype = np.dtype(np.uint8)
        plist.set_chunk((spec.chunk,))
        attrs = attrs | {"row_shape": np.array(spec.row_shape), "row_dtype": spec.row_dtype.newbyteorder("=").name}
    else:
        shape, stored_dtype = (num_rows, *spec.row_shape), spec.dtype
        plist.set_chunk((spec.chunk_rows, *spec.row_shape))
    if is_linear(spec):
        plist.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    elif isinstance(spec, PixelSpec) and (found := spec.codec.filter) is not None:
        # Optional: HDF5 then creates the dataset also where the filter is not there; chunks are written past it.
        plist.set_filter(found[0], h5z.FLAG_OPTIONAL, found[1])
    plist.set_fill_time(h5d.FILL_TIME_NEVER)
    plist.set_obj_track_times(False)
    dtype = h5t.py_create(stored_dtype.newbyteorder("<"))
    h5d.create(file.id, name.encode(), dtype, h5s.create_simple(shape, shape), plist)
    _set_attrs(file[name], attrs)


def _create_column(file: h5py.File, name: str, column: Column) -> None:
    values = np.ascontiguousarray(column.values)
    if values.dtype.kind == "S":
        # A plain NumPy S is ASCII to h5py, and HDF5 does not convert between that and UTF-8.
        values = values.view(h5py.string_dtype("utf-8", values.dtype.itemsize))
    else:
        values = values.astype(values.dtype.newbyteorder("<"), copy=False)
    dataset = file.create_dataset(name, data=values, track_times=False)
    _set_attrs(dataset, column.attrs)


def _set_attrs(item: Any, attrs: Mapping[str, Any]) -> None:
    for name, value in attrs.items():
        if isinstance(value, str):
            item.attrs[name] = _text([value])[0]
        elif isinstance(value, (tuple, list)) and value and isinstance(value[0], str):
            item.attrs[name] = _text(value)
        else:
            item.attrs[name] = value


def _text(values: tuple[str, ...] | list[str]) -> NDArray[np.bytes_]:
    text = np.array([value.encode("utf-8", errors="backslashreplace") for value in values])
    return text.view(h5py.string_dtype("utf-8", max(text.dtype.itemsize, 1)))


def _pixel_offset(path: str | Path, dataset: h5py.Dataset) -> int:
    chunk_bytes = int(np.prod(dataset.chunks, dtype=np.int64)) * dataset.dtype.itemsize
    offsets: list[int] = []
    dataset.id.chunk_iter(lambda chunk: offsets.append(chunk.byte_offset))
    expected = offsets[0] + np.arange(len(offsets)) * chunk_bytes
    if not np.array_equal(np.sort(offsets), expected) or (dataset.name == "/images" and offsets[0] != IMAGES_OFFSET):
        raise FormatError(
            f"{path}: HDF5 {h5py.version.hdf5_version} did not lay the chunks of {dataset.name[1:]} back to back from "
            f"byte {IMAGES_OFFSET}. Install h5py 3.16, whose wheels carry an HDF5 that does."
        )
    return int(offsets[0])
