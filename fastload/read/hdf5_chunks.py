"""Reads rows of datasets that are not one linear array on disk: chunk by chunk, with a cache of decoded chunks.

Chunks in gzip or zstd are decoded by the thread that wants them (`chunk_filters`); others are read through h5py, where
one lock for the whole process keeps threads from gaining anything. The cache helps both, since the rows of a batch, and
of a window of batches, share chunks. Unfiltered chunks are cached whole if rows come in windows, else read in pieces.

HDF5's own chunk cache (rdcc) is switched off: it would hold a second copy, and costs a call into HDF5 for each row or
piece. Measured on unfiltered chunks of 8 MiB that do not lie back to back, room for two windows of 4 chunks, rows/s:

| | rows of 116 kB, warm / cold | rows of 3 kB, warm / cold |
| --- | --- | --- |
| windows: whole chunks kept here | 17,600 / 5,400 | 480,000 / 264,000 |
| windows: rows or pieces out of HDF5's cache | 8,900 / 5,000 | 20,000 / 16,000 |
| full shuffle: pieces, HDF5's cache off / on | 10,400 / 6,500 (warm) | 11,700 / 15,400 (warm) |
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from fastload.errors import FastloadError, FormatError, typed
from fastload.format.chunk_filters import FilteredChunks
from fastload.format.codecs import load_filters
from fastload.format.header import PackedFile
from fastload.format.valid import damaged, is_of_hdf5, open_hdf5
from fastload.read.identity import check_path, open_checked
from fastload.read.row_errors import read_error
from fastload.system.text import format_bytes
from fastload.timing.stopwatch import lap

CACHE_BYTES = 512 * 2**20
"""Most bytes that the decoded chunks of one reader take, for windows of any size."""

# Bytes read at once from datasets without chunks: about as long as a seek takes.
_PLAIN_BYTES = 256 * 2**10
_LARGE_ROW_BYTES = 4 * 2**10


class ChunkedRows:
    """Gathers rows of any dataset. Threads may share it; each process opens the file itself, at its first read.

    Warns, once, if a decoded chunk is larger than the whole cache, or if a window does not fit.

    Args:
        fields: of any layout and with any filter that fastload or HDF5 can decode.
        cache_chunks: chunks of the images that stay decoded; the least recently used goes first. Enough for two
            windows: the one being read and the next. Other fields keep as many rows.
        windows: whether rows come in windows of chunks, so that all rows of a chunk are wanted soon.
        cache_bytes: most bytes of cached chunks of all fields together; the chunk in use is always kept.
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
        self._fd = -1
        self._filtered: dict[str, FilteredChunks | None] = {}
        # Rows read at once: a chunk's, or a piece's if whole chunks do not help.
        self._units: dict[str, int] = {}
        max_units: dict[str, int] = {}
        whole = []  # fields read by whole chunks
        windowed = file.fields.get("images", file.fields[fields[0]]).chunk_rows
        for name in fields:
            field = file.fields[name]
            pieces = max(1, _PLAIN_BYTES // max(1, field.row_bytes))
            self._units[name] = min(field.chunk_rows or pieces, pieces)
            max_units[name] = max(1, cache_chunks)
            # Filtered chunks are read whole always, others if they can stay cached until used up.
            fits = field.chunk_rows * field.row_bytes <= cache_bytes
            if field.chunks is not None and (field.filters or (windows and fits)):
                self._units[name] = field.chunk_rows
                whole.append(name)
                if field.chunk_rows < windowed:
                    # They may begin at other rows than chunks of images: one more for each chunk of images.
                    max_units[name] *= -(-windowed // field.chunk_rows) + 1
        unit_bytes = {name: unit * file.fields[name].row_bytes for name, unit in self._units.items()}
        self._cache = DecodedUnits(max_units, unit_bytes, cache_bytes)
        self._reset()
        self._warn_of_misses(whole, -(-cache_chunks // 2) if windows else 0)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._hdf5: h5py.File | None = None
        self._datasets: dict[str, h5py.Dataset] = {}
        self._cache.reset(self._lock)

    def gather(self, rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]]) -> None:
        """Copies rows, checked to be in range, into arrays (B, ...), in native byte order.

        FormatError: a chunk or HDF5's index of them is damaged; MissingExtraError: its filter is not installed;
        ReadError: the disk fails, or HDF5 cannot decode a chunk.
        """
        if self._pid != os.getpid():
            # An HDF5 handle must not cross a fork, nor a lock that another thread held at that moment.
            self._reset()
        for name, out in outs.items():
            try:
                filtered = self._chunks_of(name)
                if filtered is not None and filtered.one_row:
                    # Straight into the batch: no two rows share a chunk, so a cache would not help.
                    lap("reading")
                    filtered.rows_into(self._fd, rows, out)
                else:
                    self._copy_rows(name, rows, out)
            except Exception as exc:
                if isinstance(exc, FastloadError) or not is_of_hdf5(exc):
                    raise
                raise self._error(name, rows, exc) from exc

    def _error(self, name: str, rows: NDArray[np.int64], error: Exception) -> FastloadError:
        """Returns the error to raise where rows cannot be read: by the disk, by HDF5, or for want of memory."""
        path, unit = self._file.path, format_bytes(self._cache.unit_bytes[name])
        if isinstance(error, MemoryError):
            return FormatError(
                f"{path}: not enough memory to decode a chunk of `{name}`, {unit}. Write the file with smaller chunks: "
                f"`fastload repack {typed(path)} OUT.h5 --codec none` on a machine with more."
            )
        if not isinstance(error, OSError):
            return damaged(path, error)
        for row in rows.tolist() if len(rows) > 1 else ():  # which of them it is
            try:
                self.gather(np.array([row]), {name: self._file.fields[name].empty(1)})
            except FastloadError as exc:
                return exc
        return read_error(self._file, name, int(rows[0]), error)

    def _copy_rows(self, name: str, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        unit = self._units[name]
        later = []
        units = rows // unit
        order = np.argsort(units, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(units[order])) + 1)
        # In the order of the batch, not of the file: a batch that spans several windows is then done with the chunks of
        # the first window before the last one's push them out of the cache.
        for at in sorted(groups, key=lambda positions: positions[:1].tolist()) if len(rows) else ():
            number = int(units[at[0]])
            coming = self._cache.get(name, number, functools.partial(self._read, name, number, unit))
            if not coming.done():
                # Another thread is decoding it. This one goes on with others, or threads in the same window would wait
                # for one another at each of its chunks.
                later.append((number, at, coming))
            else:
                _copy(coming.result(), rows[at] - number * unit, out, at)
        for number, at, coming in later:
            lap("reading")
            chunk = coming.result()
            lap("reading", for_lock=True)
            _copy(chunk, rows[at] - number * unit, out, at)

    def close(self) -> None:
        """Closes the file and drops the cache."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self._filtered = {}
        if self._pid == os.getpid():
            if self._hdf5 is not None:
                self._hdf5.close()
            self._reset()

    def _warn_of_misses(self, names: Sequence[str], window_chunks: int) -> None:
        """Warns if a chunk of one of these fields, or with windows a window of them, is larger than the cache."""
        unit_bytes, most = self._cache.unit_bytes, self._cache.max_bytes
        window = sum(unit_bytes[name] * -(-self._cache.max_units[name] // 2) for name in names)
        cache = format_bytes(most)
        chunk_bytes, largest = max(((unit_bytes[name], name) for name in names), default=(0, ""))
        if chunk_bytes > most:
            what = (
                f"one chunk of {largest} is {format_bytes(chunk_bytes)} decoded, larger than the cache of {cache}: "
                f"each is decoded again for nearly every batch that has a row of it."
            )
        elif window_chunks and window > most:
            fitting = max(1, window_chunks * most // window)
            what = (
                f"a window of {window_chunks} chunks is {format_bytes(window)} decoded and does not fit into the cache "
                f"of {cache}: chunks are decoded several times an epoch. Shuffle with ChunkWindow({fitting}) or less."
            )
        else:
            return
        warnings.warn(
            f"{self._file.name}: {what} Pack the original files with `fastload pack`; "
            f"`fastload info {typed(self._file.path)}` shows the chunks.",
            stacklevel=3,
        )

    def _read(self, name: str, number: int, unit: int) -> NDArray[Any]:
        field = self._file.fields[name]
        filtered = self._chunks_of(name)
        if filtered is not None:
            return filtered.rows(self._fd, number)
        first = number * unit
        last = min(first + unit, self._file.num_rows)
        chunk = field.empty(last - first)
        with self._lock:
            dataset = self._dataset(name)
        dataset.read_direct(chunk, np.s_[first:last])
        lap("decoding" if field.filters else "reading")
        return chunk

    def _chunks_of(self, name: str) -> FilteredChunks | None:
        """Returns the chunks of a dataset whose filters are decoded without HDF5; None if h5py has to decode them."""
        if not self._file.fields[name].filters:
            return None
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
            # Set for the dataset: the file's settings were chosen by whoever opened it first in this process.
            access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
            access.set_chunk_cache(1, 0, 1.0)  # slots, bytes, preemption
            self._datasets[name] = h5py.Dataset(h5py.h5d.open(self._hdf5.id, name.encode(), access))
        return self._datasets[name]


def _copy(chunk: NDArray[Any], sources: NDArray[np.int64], out: NDArray[Any], at: NDArray[np.int64]) -> None:
    if chunk[:1].nbytes < _LARGE_ROW_BYTES:
        out[at] = chunk[sources]
        return
    # Row by row: NumPy's indexing would copy large rows twice.
    for i, source in zip(at.tolist(), sources.tolist(), strict=True):
        out[i] = chunk[source]


class DecodedUnits:
    """Rows of units that stay decoded; the least recently used goes first. Threads share it.

    Args:
        max_units: most units of each field.
        unit_bytes: of a unit of each field.
        max_bytes: of all fields together; the unit in use is always kept.
    """

    def __init__(self, max_units: dict[str, int], unit_bytes: dict[str, int], max_bytes: int) -> None:
        self.max_units, self.unit_bytes, self.max_bytes = max_units, unit_bytes, max_bytes

    def reset(self, lock: threading.Lock) -> None:
        """Drops all of them; `lock` is held while there is a look at them."""
        self._lock = lock
        # Rows of each unit, or those to come if a thread is reading them.
        self.units: OrderedDict[tuple[str, int], Future[NDArray[Any]]] = OrderedDict()
        self._counts = dict.fromkeys(self.max_units, 0)

    def get(self, name: str, number: int, read: Callable[[], NDArray[Any]]) -> Future[NDArray[Any]]:
        """Returns the rows of a unit, which this thread reads unless another has read or is reading them."""
        key = (name, number)
        lap("reading")
        with self._lock:
            lap("reading", for_lock=True)
            if key in self.units:
                self.units.move_to_end(key)
                return self.units[key]
            unit = self.units[key] = Future()
            self._counts[name] += 1
            if self._counts[name] > self.max_units[name]:
                self._drop(next(other for other in self.units if other[0] == name))
            while len(self.units) > 1 and self.num_bytes > self.max_bytes:
                self._drop(next(iter(self.units)))
        try:
            unit.set_result(read())
        except BaseException as exc:
            with self._lock:
                if self.units.get(key) is unit:
                    self._drop(key)
            unit.set_exception(exc)
            raise
        return unit

    def _drop(self, key: tuple[str, int]) -> None:
        self._counts[key[0]] -= 1
        del self.units[key]

    @property
    def num_bytes(self) -> int:
        """The bytes of all of them."""
        return sum(count * self.unit_bytes[name] for name, count in self._counts.items())
