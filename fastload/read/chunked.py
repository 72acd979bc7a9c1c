"""Rows of datasets that do not lie on disk as one linear array: read through h5py, chunk by chunk, each chunk once.

HDF5 holds one lock for the whole process, so threads gain nothing here; a cache of decoded chunks does, since the rows
of a batch, and of a window of batches, share them.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from fastload.format import PackedFile, open_hdf5

from .identity import check_path

CACHE_BYTES = 512 * 2**20
"""Most memory the decoded chunks of one reader take, whatever window they were asked for."""

# Stretches in which datasets are read whose storage sets no unit: one seek's worth.
_PLAIN_BYTES = 256 * 2**10


class ChunkedRows:
    """Gathers rows of any dataset. Threads may share it; each process opens the file for itself, at its first read.

    Args:
        file: header.
        fields: names of fields, of any layout and with any filter that HDF5 can decode.
        cache_chunks: decoded chunks kept for each field, least recently used first to go.
        cache_bytes: most bytes of them for all fields together; the one in use is always kept.
    """

    def __init__(
        self, file: PackedFile, fields: Sequence[str], *, cache_chunks: int = 8, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._file = file
        self._fields = tuple(fields)
        self._max_chunks = max(1, cache_chunks) * len(self._fields)
        self._cache_bytes = cache_bytes
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._hdf5: h5py.File | None = None
        self._cache: OrderedDict[tuple[str, int], NDArray[Any]] = OrderedDict()
        self._cached_bytes = 0

    def gather(self, rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]]) -> None:
        """See `Rows.gather`. Values are converted to the native byte order."""
        if self._pid != os.getpid():
            # An HDF5 handle must not cross a fork, nor a lock that another thread held at that moment.
            self._reset()
        for name, out in outs.items():
            unit = self._unit_rows(name)
            units = rows // unit
            order = np.argsort(units, kind="stable")
            borders = np.flatnonzero(np.diff(units[order])) + 1
            for places in np.split(order, borders):
                if len(places):
                    number = int(units[places[0]])
                    out[places] = self._chunk(name, number, unit)[rows[places] - number * unit]

    def close(self) -> None:
        """Closes the file and drops the cache."""
        if self._pid == os.getpid():
            with self._lock:
                hdf5, self._hdf5 = self._hdf5, None
                self._cache.clear()
                self._cached_bytes = 0
                if hdf5 is not None:
                    hdf5.close()

    def _unit_rows(self, name: str) -> int:
        """Rows read at once: a filtered chunk can only be had whole, anything else in pieces."""
        field = self._file.fields[name]
        plain = max(1, _PLAIN_BYTES // max(1, field.row_bytes))
        if field.chunks is None:
            return plain
        return field.chunk_rows if field.filters else min(field.chunk_rows, max(plain, 1))

    def _chunk(self, name: str, number: int, unit: int) -> NDArray[Any]:
        key = (name, number)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
            if self._hdf5 is None:
                check_path(self._file)
                self._hdf5 = open_hdf5(self._file.path)
            field = self._file.fields[name]
            first = number * unit
            last = min(first + unit, self._file.num_rows)
            chunk = np.empty((last - first, *field.shape), field.dtype.newbyteorder("="))
            self._hdf5[name].read_direct(chunk, np.s_[first:last])
            self._cache[key] = chunk
            self._cached_bytes += chunk.nbytes
            while len(self._cache) > 1 and (
                len(self._cache) > self._max_chunks or self._cached_bytes > self._cache_bytes
            ):
                self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
            return chunk
