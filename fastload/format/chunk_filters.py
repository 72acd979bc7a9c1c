"""Reads compressed chunks of a dataset from the file and decodes them without HDF5.

libhdf5 holds one lock for the whole process while it decodes; zlib and zstd release even the GIL, so that threads
decode several chunks at once. Decoded here: gzip, zstd, and HDF5's shuffle before either, of any number type. The rest
(lzf, n-bit, checksums, filters of plugins) is left to h5py. Never more is decompressed than a chunk should hold;
libhdf5 takes whatever gzip gives, a thousand times the bytes that lie there (`check_gzip`).

A chunk of one row goes straight into the batch; one of several rows passes through a cache. Masks of 256x256 (64 KiB,
zstd, one thread, rows in windows): 33 us a row in chunks of one row, 62 us in chunks of four, whose rows were not
smaller in the file either.

The HDF5 file format, version 3.0: filter pipelines in section IV.A.2.l; a chunk's filter mask has bit i set if
filter i was skipped.
"""

from __future__ import annotations

import functools
import importlib
import math
import zlib
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5t
from numpy.typing import NDArray

from fastload.errors import FileChangedError, FormatError, typed
from fastload.format.codecs import (
    GZIP_FILTER,
    SHUFFLE_FILTER,
    ZSTD_FILTER,
    Filter,
    decompress_zstd,
    is_decoded_here,
    pipeline,
)
from fastload.system.files import read_bytes
from fastload.timing.stopwatch import lap

_GROUP_BYTES = 2**20
"""Compressed bytes that are read before they are decoded."""

_INFLATED_BYTES = 64 * 2**20
"""Bytes of a chunk that are inflated at once: of large ones there are not two in memory."""

_MOST_AROUND = 1024
"""More bytes than gzip adds to incompressible data (besides one in a thousand) and HDF5's checksum take."""

_MOST_BY_DEFLATE = 1032  # bytes that one byte can stand for (zlib's technical details)

_Undo = Callable[[Any, NDArray[np.uint8]], None]
"""Inverts a filter: fills memory with the bytes before it; raises ValueError if their number differs."""


class FilteredChunks:
    """Reads and decodes the chunks of one dataset; any number of threads may, also in a forked child.

    `one_row` says whether each chunk is one row, so that `rows_into` may be used.
    """

    def __init__(self, path: Path, name: str, item: h5py.Dataset, undo: list[_Undo]) -> None:
        self._path = path
        self._name = name
        self._undo = undo
        self._shape: tuple[int, ...] = tuple(map(int, item.shape))
        self._chunks: tuple[int, ...] = tuple(map(int, item.chunks))
        self._dtype: np.dtype[Any] = item.dtype
        self._fill = item.fillvalue
        self._grid = tuple(-(-size // chunk) for size, chunk in zip(self._shape, self._chunks, strict=True))
        self._whole_rows = self._chunks[1:] == self._shape[1:]
        self.one_row = self._whole_rows and self._chunks[0] == 1 and self._dtype.isnative
        # Offset, compressed bytes and filter mask of each chunk, int64 (chunks, 3); offset -1: never written.
        self._table = np.full((math.prod(self._grid), 3), -1, np.int64)
        entries = _entries(item)
        if (entries[:, : item.ndim] >= self._shape).any():
            raise FormatError(
                f"{path}: `{name}` has a chunk outside its {self._shape[0]:,} rows: its HDF5 metadata is damaged. "
                f"Copy the file again."
            )
        numbers = np.ravel_multi_index(tuple((entries[:, : item.ndim] // self._chunks).T), self._grid)
        self._table[numbers] = entries[:, [item.ndim + 1, item.ndim + 2, item.ndim]]

    @classmethod
    def of(cls, path: Path, name: str, item: h5py.Dataset) -> FilteredChunks | None:
        """Returns the chunks of a dataset; None if they are not compressed, or h5py has to decode them.

        FormatError: its metadata is damaged, or h5py would make far more of a chunk than it should hold.
        """
        filters = pipeline(item)
        found = cls._of(path, name, item, filters)
        if found is None:
            check_gzip(path, name, item)
        return found

    @classmethod
    def _of(cls, path: Path, name: str, item: h5py.Dataset, filters: Sequence[Filter]) -> FilteredChunks | None:
        codecs = [one for one in filters if one.number != SHUFFLE_FILTER]
        # With two codecs the number of bytes between them is not known.
        if not filters or not all(map(is_decoded_here, filters)) or len(codecs) > 1:
            return None
        if item.dtype.kind not in "uif" or 0 in item.shape:
            return None
        # Only types that are NumPy's own, as any tool writes them today; not 12 bits in 16, for example.
        if not h5t.py_create(item.dtype).equal(item.id.get_type()):
            return None
        if any(one.number == SHUFFLE_FILTER and one.parameters[0] < 1 for one in filters):
            raise FormatError(
                f"{path}: `{name}` is shuffled by elements of no bytes: its HDF5 metadata is damaged. Copy the file "
                f"again."
            )
        undo = {GZIP_FILTER: _inflate, ZSTD_FILTER: decompress_zstd}
        inverses: list[_Undo] = [
            undo.get(one.number) or functools.partial(_unshuffle, size=one.parameters[0]) for one in filters
        ]
        return cls(path, name, item, inverses)

    def rows(self, fd: int, number: int) -> NDArray[Any]:
        """Returns the rows of the chunks with this number along the first axis: (rows, ...), native byte order.

        FormatError: a chunk cannot be decoded, its cause says why; FileChangedError: the file ends inside it.
        """
        count = min(self._chunks[0], self._shape[0] - number * self._chunks[0])
        chunk = np.empty(self._chunks, self._dtype)
        native = self._dtype.newbyteorder("=")
        if self._whole_rows:
            self._fetch(fd, number, chunk)
            return chunk[:count].astype(native, copy=False)
        rows = np.empty((count, *self._shape[1:]), native)
        for i, at in enumerate(np.ndindex(self._grid[1:])):
            self._fetch(fd, number * math.prod(self._grid[1:]) + i, chunk)
            places = [slice(n * size, (n + 1) * size) for n, size in zip(at, self._chunks[1:], strict=True)]
            part = rows[:, *places]
            part[...] = chunk[tuple(map(slice, part.shape))]
        return rows

    def rows_into(self, fd: int, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Decodes rows, each of which is a chunk, into `out`, (B, ...) of the dataset's type; otherwise like `rows`."""
        # In groups: reading the clock twice for each chunk would take a tenth of the time of small ones.
        borders = np.flatnonzero(np.diff(np.cumsum(self._table[rows, 1]) // _GROUP_BYTES)) + 1
        for positions in np.split(np.arange(len(rows)), borders):
            group = rows[positions].tolist()
            read = {row: self._read(fd, row) for row in group}
            lap("reading")
            first: dict[int, int] = {}
            for i, row in zip(positions.tolist(), group, strict=True):
                if row in first:
                    out[i] = out[first[row]]
                else:
                    first[row] = i
                    self._decode(row, read[row], out[i : i + 1])
            lap("decoding")

    def _fetch(self, fd: int, number: int, out: NDArray[Any]) -> None:
        data = self._read(fd, number)
        lap("reading")
        self._decode(number, data, out)
        lap("decoding")

    def _decode(self, number: int, data: Any, out: NDArray[Any]) -> None:
        if data is None:
            out[...] = self._fill
            return
        mask = int(self._table[number, 2])
        undo = [one for i, one in enumerate(self._undo) if not mask >> i & 1][::-1] or [_copy]
        target = out.reshape(-1).view(np.uint8)
        try:
            for one in undo[:-1]:
                made = np.empty_like(target)
                one(data, made)
                data = made
            undo[-1](data, target)
        except ValueError as exc:
            raise FormatError(
                f"{self._path}: {self._rows_of(number)} of `{self._name}` cannot be decoded ({exc}). List all damage "
                f"with `fastload verify {typed(self._path)}`; copy the file again, or pack it again."
            ) from exc

    def _read(self, fd: int, number: int) -> Any:
        """Returns the compressed bytes of a chunk; None if it was never written."""
        offset, length, _ = self._table[number].tolist()
        if offset < 0:
            return None
        data = read_bytes(fd, length, offset)
        if len(data) < length:
            raise FileChangedError(
                f"{self._path}: ends at byte {offset + len(data):,}, inside {self._rows_of(number)} of "
                f"`{self._name}`: it was truncated. Copy it again."
            )
        return data

    def _rows_of(self, number: int) -> str:
        first = number // math.prod(self._grid[1:]) * self._chunks[0]
        last = min(first + self._chunks[0], self._shape[0]) - 1
        return f"row {first}" if first == last else f"the chunk of rows {first} to {last}"


def check_gzip(path: Path, name: str, item: h5py.Dataset) -> None:
    """Raises FormatError for a chunk in gzip of more bytes than it should hold: no more than a bomb, for libhdf5."""
    if not item.chunks or GZIP_FILTER not in [one.number for one in pipeline(item)]:
        return
    chunk_bytes = math.prod(map(int, item.chunks)) * item.dtype.itemsize
    longest = int(_entries(item)[:, item.ndim + 2].max(initial=0))
    if longest > chunk_bytes + chunk_bytes // 1000 + _MOST_AROUND:
        raise FormatError(
            f"{path}: `{name}` has a chunk of {longest:,} compressed bytes, which should stand for {chunk_bytes:,}: it "
            f"is damaged, or made to fill the memory. Copy the file again."
        )


def _entries(item: h5py.Dataset) -> NDArray[np.int64]:
    """Returns of each chunk that was written its first element, filter mask, offset and bytes, int64 (C, ndim + 3)."""
    found = array("q")
    item.id.chunk_iter(lambda chunk: found.extend((*chunk.chunk_offset, *chunk[1:])))
    return np.frombuffer(found, np.int64).reshape(-1, item.ndim + 3)


def _copy(data: Any, out: NDArray[np.uint8]) -> None:
    if len(data) != len(out):
        raise ValueError(f"{len(data):,} bytes where {len(out):,} are expected")
    out[:] = np.frombuffer(data, np.uint8)


@functools.cache
def _inflater() -> Any:
    """Returns zlib-ng's module where it is installed, else zlib, which has the same functions and formats.

    Masks (CamVid's; drawn polygons, gzip:6): 580 and 310 MB/s with zlib, 2,760 and 4,910 with zlib-ng, of the same
    bytes as zstd 1,460 and 2,770.
    """
    with suppress(ImportError):
        return importlib.import_module("zlib_ng.zlib_ng")
    return zlib


def _inflate(data: Any, out: NDArray[np.uint8]) -> None:
    module = _inflater()
    if len(data) * _MOST_BY_DEFLATE <= _INFLATED_BYTES:
        # At once, into memory of the right size: 1.1 to 1.25 times as fast (masks of CamVid) as piece by piece.
        with suppress(module.error):  # what follows says what is wrong
            whole = module.decompress(data, bufsize=len(out) + 1)
            if len(whole) == len(out):
                out[:] = np.frombuffer(whole, np.uint8)
                return
    inflating, found = module.decompressobj(), 0
    try:
        while not inflating.eof and found <= len(out):
            # One byte more than expected is enough to see that there are too many.
            part = inflating.decompress(data, min(len(out) + 1 - found, _INFLATED_BYTES))
            data = inflating.unconsumed_tail
            if not part and not inflating.eof:
                raise ValueError("the compressed data is cut short")
            fits = part[: len(out) - found]
            out[found : found + len(fits)] = np.frombuffer(fits, np.uint8)
            found += len(part)
    except module.error as exc:
        raise ValueError(str(exc)) from exc
    if found != len(out):
        raise ValueError(f"{found:,} bytes where {len(out):,} are expected")


def _unshuffle(data: Any, out: NDArray[np.uint8], size: int) -> None:
    """Inverts HDF5's shuffle: first bytes of all elements, then all second bytes, ...; bytes left over come last."""
    if len(data) != len(out):
        raise ValueError(f"{len(data):,} bytes where {len(out):,} are expected")
    mixed = np.frombuffer(data, np.uint8)
    whole = len(out) // size * size
    out[:whole].reshape(-1, size)[:] = mixed[:whole].reshape(size, -1).T
    out[whole:] = mixed[whole:]
