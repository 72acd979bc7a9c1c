"""Rows of datasets that do not lie on disk as one linear array: chunk by chunk, each chunk once.

Chunks in gzip or zstd are decoded by the thread that wants them (`filtered.py`); the rest is read through h5py, where
one lock for the whole process makes threads gain nothing. A cache of decoded chunks helps both, since the rows of a
batch, and of a window of batches, share them. Unfiltered chunks are kept whole when rows come in windows, and are else
read in pieces.

HDF5's own cache of chunks (rdcc) stays switched off: it would hold a second copy, and costs a call into HDF5 a row or
piece. Measured on unfiltered chunks of 8 MiB that do not lie back to back, room for two windows of 4 chunks, rows/s:

| | rows of 116 kB, warm / cold | rows of 3 kB, warm / cold |
| --- | --- | --- |
| windows: whole chunks kept here | 17,600 / 5,400 | 480,000 / 264,000 |
| windows: rows or pieces out of HDF5's cache | 8,900 / 5,000 | 20,000 / 16,000 |
| full shuffle: pieces, HDF5's cache off / on | 10,400 / 6,500 (warm) | 11,700 / 15,400 (warm) |
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from fastload.filters import load_filters
from fastload.format import PackedFile, open_hdf5
from fastload.stopwatch import lap

from .filtered import FilteredChunks
from .identity import check_path, open_checked

CACHE_BYTES = 512 * 2**20
"""Most memory the decoded chunks of one reader take, whatever window they were asked for."""

# Stretches in which datasets are read whose storage sets no unit: one seek's worth.
_PLAIN_BYTES = 256 * 2**10
_LARGE_ROW_BYTES = 4 * 2**10


class ChunkedRows:
    """Gathers rows of any dataset. Threads may share it; each process opens the file for itself, at its first read.

    Warns, once, when a decoded chunk is larger than the whole cache, or when a window does not fit.

    Args:
        file: header.
        fields: names of fields, of any layout and with any filter that fastload or HDF5 can decode.
        cache_chunks: chunks of the images whose rows are kept decoded, least recently used first to go: those of two
            windows, the one that is read and the one that comes next. Other fields keep as many rows.
        windows: rows come in windows of chunks, so that all of a chunk is wanted soon.
        cache_bytes: most bytes of them for all fields together; the one in use is always kept.
    """

    def __init__(
        self,
        file: PackedFile,
        fields: Sequence[str],
        *,
        cache_chunks: int = 8,
        windows: bool = False,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._file = file
        self._fields = tuple(fields)
        self._windows = windows
        self._cache_bytes = cache_bytes
        self._fd = -1
        self._filtered: dict[str, FilteredChunks | None] = {}
        self._max_chunks = {name: self._kept(name, max(1, cache_chunks)) for name in self._fields}
        self._reset()
        self._warn_of_misses(cache_chunks)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._hdf5: h5py.File | None = None
        self._datasets: dict[str, h5py.Dataset] = {}
        self._cache: OrderedDict[tuple[str, int], NDArray[Any]] = OrderedDict()
        self._under_way: dict[tuple[str, int], Future[NDArray[Any]]] = {}
        self._cached = dict.fromkeys(self._fields, 0)
        self._cached_bytes = 0

    def gather(self, rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]]) -> None:
        """See `Rows.gather`. Values are converted to the native byte order.

        Raises:
            FormatError: a chunk is damaged.
            MissingExtraError: its filter is not installed.
            OSError: HDF5 cannot read.
        """
        if self._pid != os.getpid():
            # An HDF5 handle must not cross a fork, nor a lock that another thread held at that moment.
            self._reset()
        for name, out in outs.items():
            filtered = self._chunks_of(name) if self._file.fields[name].filters else None
            if filtered is not None and filtered.one_row:
                # Straight to where they are wanted: in no order do two rows share a chunk.
                lap("reading")
                filtered.rows_into(self._fd, rows, out)
            else:
                self._copy_rows(name, rows, out)

    def _copy_rows(self, name: str, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        unit = self._unit_rows(name)
        later = []
        for number, places in _by_unit(rows // unit):
            chunk = self._chunk(name, number, unit)
            if isinstance(chunk, Future):
                # Another thread is at it. This one goes on: else threads at the same window would wait for one another
                # at each of its chunks, and decode them one after the other.
                later.append((number, places, chunk))
            else:
                _copy(chunk, rows[places] - number * unit, out, places)
        for number, places, coming in later:
            lap("reading")
            chunk = coming.result()
            lap("reading", for_lock=True)
            _copy(chunk, rows[places] - number * unit, out, places)

    def close(self) -> None:
        """Closes the file and drops the cache."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self._filtered = {}
        if self._pid == os.getpid():
            with self._lock:
                hdf5 = self._hdf5
                self._hdf5, self._datasets, self._cached_bytes = None, {}, 0
                self._cache.clear()
                self._cached = dict.fromkeys(self._fields, 0)
                if hdf5 is not None:
                    hdf5.close()

    def _unit_rows(self, name: str) -> int:
        """Rows read at once: those of a chunk, or of a piece where that does not help."""
        field = self._file.fields[name]
        pieces = max(1, _PLAIN_BYTES // max(1, field.row_bytes))
        return field.chunk_rows if self._by_chunk(name) else min(field.chunk_rows or pieces, pieces)

    def _by_chunk(self, name: str) -> bool:
        """Filtered chunks can only be had whole; others are worth it where they are kept until all of them was used."""
        field = self._file.fields[name]
        fits = field.chunk_rows * field.row_bytes <= self._cache_bytes
        return field.chunks is not None and (bool(field.filters) or (self._windows and fits))

    def _kept(self, name: str, cache_chunks: int) -> int:
        """Units of a field to keep: as many rows as there are in so many chunks of the images."""
        windowed = self._file.fields.get("images", self._file.fields[self._fields[0]]).chunk_rows
        unit = self._unit_rows(name)
        if unit >= windowed or not self._by_chunk(name):
            return cache_chunks
        # Where chunks are smaller they may also begin elsewhere, and a window's chunks lie anywhere in the file.
        return cache_chunks * (-(-windowed // unit) + 1)

    def _warn_of_misses(self, cache_chunks: int) -> None:
        # Decoded, of each field: one chunk, and the window that cache_chunks holds twice.
        chunk = {
            name: self._unit_rows(name) * self._file.fields[name].row_bytes
            for name in self._fields
            if self._by_chunk(name)
        }
        window = sum(num_bytes * -(-self._max_chunks[name] // 2) for name, num_bytes in chunk.items())
        mend = f"Pack the original files with `fastload pack`; `fastload info {self._file.path}` shows the chunks."
        largest = max(chunk, key=chunk.__getitem__, default="")
        if largest and chunk[largest] > self._cache_bytes:
            warnings.warn(
                f"{self._file.path}: one chunk of {largest} is {_mib(chunk[largest])} decoded, larger than the cache "
                f"of {_mib(self._cache_bytes)}: each is decoded again for nearly every batch that has a row of it. "
                f"{mend}",
                stacklevel=3,
            )
        elif self._windows and window > self._cache_bytes:
            chunks = -(-cache_chunks // 2)
            fitting = max(1, chunks * self._cache_bytes // window)
            warnings.warn(
                f"{self._file.path}: a window of {chunks} chunks is {_mib(window)} decoded and does not fit into the "
                f"cache of {_mib(self._cache_bytes)}: chunks are decoded several times an epoch. Shuffle with "
                f"ChunkWindow({fitting}) or less. {mend}",
                stacklevel=3,
            )

    def _chunk(self, name: str, number: int, unit: int) -> NDArray[Any] | Future[NDArray[Any]]:
        """The rows of a unit; what another thread will deliver where it is reading them already."""
        key = (name, number)
        lap("reading")
        with self._lock:
            lap("reading", for_lock=True)
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
            if key in self._under_way:
                return self._under_way[key]
            mine = self._under_way[key] = Future()
        try:
            chunk = self._read(name, number, unit)
        except BaseException as exc:
            with self._lock:
                del self._under_way[key]
            mine.set_exception(exc)
            raise
        with self._lock:
            del self._under_way[key]
            self._keep(key, chunk)
        mine.set_result(chunk)
        return chunk

    def _read(self, name: str, number: int, unit: int) -> NDArray[Any]:
        field = self._file.fields[name]
        filtered = self._chunks_of(name) if field.filters else None
        if filtered is not None:
            return filtered.rows(self._fd, number)
        first = number * unit
        last = min(first + unit, self._file.num_rows)
        chunk = np.empty((last - first, *field.shape), field.dtype.newbyteorder("="))
        with self._lock:
            dataset = self._dataset(name)
        dataset.read_direct(chunk, np.s_[first:last])
        lap("decoding" if field.filters else "reading")
        return chunk

    def _keep(self, key: tuple[str, int], chunk: NDArray[Any]) -> None:
        self._cache[key] = chunk
        self._cached_bytes += chunk.nbytes
        self._cached[key[0]] += 1
        if self._cached[key[0]] > self._max_chunks[key[0]]:
            self._drop(next(other for other in self._cache if other[0] == key[0]))
        while len(self._cache) > 1 and self._cached_bytes > self._cache_bytes:
            self._drop(next(iter(self._cache)))

    def _drop(self, key: tuple[str, int]) -> None:
        self._cached[key[0]] -= 1
        self._cached_bytes -= self._cache.pop(key).nbytes

    def _chunks_of(self, name: str) -> FilteredChunks | None:
        """The chunks of a dataset with filters that are decoded here; None where h5py has to."""
        if name not in self._filtered:
            with self._lock:
                if name not in self._filtered:
                    dataset = self._dataset(name)
                    filtered = FilteredChunks.of(self._file.path, name, dataset)
                    if filtered is None:
                        load_filters(self._file.path, name, dataset)
                    elif self._fd < 0:
                        self._fd = open_checked(self._file)
                    self._filtered[name] = filtered
        return self._filtered[name]

    def _dataset(self, name: str) -> h5py.Dataset:
        if self._hdf5 is None:
            check_path(self._file)
            self._hdf5 = open_hdf5(self._file.path)
        if name not in self._datasets:
            # For this dataset alone: the settings of a file are those of whoever opened it first in this process.
            access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
            access.set_chunk_cache(1, 0, 1.0)  # slots, bytes, preemption
            self._datasets[name] = h5py.Dataset(h5py.h5d.open(self._hdf5.id, name.encode(), access))
        return self._datasets[name]


def _by_unit(units: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The different units, and where each is wanted.

    In the order of the batch, not of the file: one that spans several windows is then done with the chunks of the first
    before those of the last push them out of the cache.
    """
    order = np.argsort(units, kind="stable")
    borders = np.flatnonzero(np.diff(units[order])) + 1
    for places in sorted(np.split(order, borders), key=lambda places: places[:1].tolist()):
        if len(places):
            yield int(units[places[0]]), places


def _copy(chunk: NDArray[Any], sources: NDArray[np.int64], out: NDArray[Any], places: NDArray[np.int64]) -> None:
    if chunk[:1].nbytes < _LARGE_ROW_BYTES:
        out[places] = chunk[sources]
        return
    # NumPy would copy them twice.
    for place, source in zip(places.tolist(), sources.tolist(), strict=True):
        out[place] = chunk[source]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
