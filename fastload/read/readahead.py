"""Announces rows that come next to the kernel, from a thread of its own, so that a cold file is read in advance.

A page fault on a cold file stops a worker for as long as the disk takes, one row after another. Announced rows are
requested all at once: on one NVMe-backed disk a cold batch of 256 images took 15 ms against 257 ms.

One `process_madvise` announces up to 1,024 ranges and so releases the GIL once; `posix_fadvise`, used if the kernel
refuses that, releases it once a range.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import queue
import resource
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FastloadError, FileChangedError
from fastload.format.header import Field, PackedFile, RaggedField, read_shard
from fastload.format.ragged import index_names
from fastload.read.identity import open_checked
from fastload.read.linear import PreadRows
from fastload.read.row_table import RowTable
from fastload.system import syscalls

# The kernel cuts one call to the device's read-ahead window, by default 128 KiB.
_SLICE_BYTES = 128 * 2**10
_MAX_RANGES = 1024  # UIO_MAXIOV
_PAGE = mmap.PAGESIZE
_MADV_WILLNEED = 3
_SYS_PROCESS_MADVISE = 440  # the same number on every architecture

# Fields up to this size are announced whole, once: that costs less than computing the ranges of rows.
_SMALL_FIELD_BYTES = 16 * 2**20

# Ragged rows with a smaller gap between them are announced as one range.
_JOINED_BYTES = 4096

# Rows probed in a batch; batches without a miss after which only every so many is probed. Announcing rows that are in
# memory costs 4 us a row of 116 kB.
_PROBES = 8
_QUIET_BATCHES = 16
_QUIET_EVERY = 8

_MOST_SHARDS = 32  # of an index that are announced at a time

# For the thread to end. A call that waits for a disk that does not answer cannot be ended.
_CLOSE_S = 10.0

_log = logging.getLogger("fastload")

Item = TypeVar("Item")


class ReadAhead:
    """Announces the rows of coming batches. Threads may share it; `announce` never waits.

    It probes a few rows of each batch, and announces nothing while all of them are in memory. It opens the files that
    were used last itself, and leaves out one that cannot be opened: whoever reads it gets the error.

    Args:
        names: fields to announce; those read through HDF5 are left out.
        rows: rows of the dataset that are read at all; of a file, only small fields are announced beyond them.
        chunk_rows: rows of a chunk: whole chunks are announced, since a window soon reads all of them; 0: row by row.
        recent_chunks: chunks remembered as announced.
    """

    def __init__(
        self, file: PackedFile, names: Sequence[str], rows: range, *, chunk_rows: int = 0, recent_chunks: int = 64
    ) -> None:
        self._file, self._names, self._rows, self._table = file, names, rows, RowTable(file)
        self._options = {"chunk_rows": chunk_rows, "recent_chunks": recent_chunks}
        self._chunk_rows = max(1, chunk_rows)
        # By shard, and by the rows of the first chunk that lie before it: pieces of it where chunks begin anew.
        self.opened: dict[tuple[int, int], FileReadAhead] = {}
        self._most = max(2, min(_MOST_SHARDS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 32))
        self._probed = self._quiet = 0
        self._closed = False

    def announce(self, rows: NDArray[np.int64]) -> None:
        """Announces rows of the dataset, int64 (B,), that will be read soon; calls come in the order of reading."""
        self._probed += 1
        if self._closed or (self._quiet >= _QUIET_BATCHES and self._probed % _QUIET_EVERY):
            return
        located = self._table.locate(rows)
        leads = (located.rows - located.there) % self._chunk_rows
        keys = located.shard * self._chunk_rows + leads
        found = np.unique(keys).tolist()
        for key in found:
            number, lead = place = divmod(key, self._chunk_rows)
            one = self.opened.pop(place, None)
            if one is None:
                try:
                    shard = read_shard(self._file, number)
                    read = self._rows if self._file.holds_rows else range(shard.num_rows)
                    one = FileReadAhead(shard, self._names, read, lead=lead, **self._options)
                except (FastloadError, OSError):
                    continue  # whoever reads it gets the error
            self.opened[place] = one  # at the end: the first ones were used least recently
            one.announce(located.there[keys == key], max(1, _PROBES // len(found)))
            while len(self.opened) > self._most:
                self.opened.pop(next(iter(self.opened))).close()
        in_memory = not any(one.announces for one in self.opened.values())
        self._quiet = self._quiet + 1 if in_memory else 0

    def close(self) -> None:
        """Ends the threads, dropping rows not announced yet."""
        self._closed = True
        while self.opened:
            self.opened.popitem()[1].close()


class FileReadAhead:
    """Announces rows of one file, which it opens itself; it reads the index of ragged fields without a mapping.

    Args: as for `ReadAhead`, of a file that holds its rows itself, and
        lead: rows of the first chunk that lie before the file, in the shard before.

    Raises:
        MissingFileError, FileChangedError: the file is gone, or not the one whose header was read.
    """

    def __init__(
        self,
        file: PackedFile,
        names: Sequence[str],
        rows: range,
        *,
        chunk_rows: int = 0,
        lead: int = 0,
        recent_chunks: int = 64,
    ) -> None:
        self._closed = False
        self._orders: queue.SimpleQueue[NDArray[np.int64] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._small: list[Extents] = []
        self._large: list[Extents] = []
        self._fd = fd = open_checked(file)
        ragged = [name for name in names if name in file.ragged]
        for name in dict.fromkeys([*ragged, *names, *chain(*map(index_names, ragged))]):
            if not file.fields[name].chunked:
                extents = RaggedExtents(fd, file, file.ragged[name]) if name in ragged else Extents(file.fields[name])
                is_small = extents.num_bytes(rows.stop) <= _SMALL_FIELD_BYTES
                (self._small if is_small else self._large).append(extents)
        self._rows = rows
        self._chunk_rows, self._lead = chunk_rows, lead
        self._recent: dict[int, None] = {}
        self._max_recent = recent_chunks
        self._advise = KernelAdvice(fd, file.identity.size)
        self._hold = 0

    def announce(self, rows: NDArray[np.int64], probes: int = _PROBES) -> None:
        """Announces rows of the file, int64 (B,), after so many of them were probed."""
        if self._closed or not self._wanted(rows, probes):
            return
        if self._thread is None:
            # Started only now: for a file in memory there is no thread that competes for the GIL.
            self._thread = threading.Thread(target=self._run, name="fastload-readahead", daemon=True)
            self._thread.start()
        self._orders.put(rows)

    @property
    def announces(self) -> bool:
        """Whether some of the last rows were likely not in memory."""
        return self._hold > 0

    def close(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Ends the thread, dropping rows not announced yet."""
        if _is_finalizing():
            return  # daemon threads no longer run, so waiting would never end; the kernel closes the file
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            while not self._orders.empty():
                self._orders.get()
            self._orders.put(None)
            if thread is not threading.current_thread():
                thread.join(_CLOSE_S)
                if thread.is_alive():
                    return  # its disk does not answer; it may still use what would be closed
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def _run(self) -> None:
        try:
            for field in self._small:
                self._advise(sliced(np.array([[field.base, field.num_bytes(self._rows.stop)]])))
            while (rows := self._orders.get()) is not None:
                first, stop = self._row_ranges(rows)
                for field in self._large if len(first) else ():
                    self._advise(sliced(field.ranges(first, stop)))
        except (OSError, FileChangedError):
            # Reading goes on without it: a worker that meets a bad disk raises in the training loop.
            self._closed = True
            _log.warning("read-ahead stopped", exc_info=True)

    def _wanted(self, rows: NDArray[np.int64], probes: int) -> bool:
        """Whether some of these rows are likely not in memory."""
        if not self._large:
            return False
        field = self._large[0]
        probed = rows[:: max(1, len(rows) // probes)]
        # Of the last byte: a row's first page may be in memory because of the row before.
        ends = map(field.last_byte, probed.tolist())
        if all(end is not None and syscalls.is_resident(self._fd, end) for end in ends):
            self._hold = max(0, self._hold - 1)
        else:
            # Goes on for a while: of a file partly in memory, eight rows show few misses.
            self._hold = _QUIET_BATCHES
        return self._hold > 0

    def _row_ranges(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns first rows and stop rows of ranges that hold these rows and were not announced yet."""
        if self._chunk_rows:
            wanted = np.unique((rows + self._lead) // self._chunk_rows).tolist()
            new = np.array([chunk for chunk in wanted if chunk not in self._recent], np.int64)
            first = new * self._chunk_rows - self._lead
            for chunk in wanted:
                self._recent.pop(chunk, None)
                self._recent[chunk] = None  # at the end: the first ones were wanted least recently
            for chunk in list(self._recent)[: max(0, len(self._recent) - self._max_recent)]:
                del self._recent[chunk]
            stop = np.minimum(first + self._chunk_rows, self._rows.stop)
            first = np.maximum(first, self._rows.start)
        else:
            first = np.unique(rows)
            stop = first + 1
        if not len(first):
            return first, first
        begins = np.concatenate(([True], first[1:] != stop[:-1]))
        return first[begins], stop[np.append(np.flatnonzero(begins)[1:] - 1, len(stop) - 1)]


def announced_ahead(
    items: Iterator[Item], announce: Callable[[Item], None], depth: int, *, gradually: bool = False
) -> Iterator[Item]:
    """Yields the same items, each announced when the one `depth` before it is asked for.

    `gradually`: the first ones are not held up by that; two are announced for each that is asked for, until so many are
    ahead.
    """
    coming: deque[Item] = deque()
    ahead = 0 if gradually else depth
    for item in items:
        announce(item)
        coming.append(item)
        if len(coming) > ahead:
            ahead = min(ahead + 1, depth)
            yield coming.popleft()
    yield from coming


def sliced(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the ranges, int64 (R, 2), (offset, length), widened to whole pages and cut every 128 KiB."""
    begin = ranges[:, 0] // _PAGE * _PAGE
    end = -(-(ranges[:, 0] + ranges[:, 1]) // _PAGE) * _PAGE
    counts = -(-(end - begin) // _SLICE_BYTES)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = np.repeat(begin, counts) + within * _SLICE_BYTES
    length = np.minimum(np.repeat(end, counts) - offset, _SLICE_BYTES)
    return np.stack([offset, length], axis=1)


class Extents:
    """Byte ranges of a field's rows in the file."""

    def __init__(self, field: Field) -> None:
        self.base, self._row_bytes = field.base, field.row_bytes

    def num_bytes(self, stop: int) -> int:
        """Returns the bytes of the rows before `stop`; of all ragged rows, which may lie in any order."""
        return self._row_bytes * stop

    def last_byte(self, row: int) -> int | None:
        """Returns the last byte of a row; None if its index entry is not in memory."""
        return self.base + (row + 1) * self._row_bytes - 1

    def ranges(self, first: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the ranges, int64 (R, 2), (offset, length), that hold rows first[i] to stop[i] - 1 for each i.

        Ranges of ragged rows are sorted; neighbours are joined.
        """
        return np.stack([self.base + first * self._row_bytes, (stop - first) * self._row_bytes], axis=1)


class RaggedExtents(Extents):
    """Byte ranges of a ragged field's rows, read from its index in the open file, whose descriptor stays open."""

    def __init__(self, fd: int, file: PackedFile, field: RaggedField) -> None:
        super().__init__(field)
        self._fd, self._all_bytes = fd, field.ragged.num_bytes
        self._names = (f"{field.name}_offset", f"{field.name}_bytes")
        self._index = PreadRows(fd, file, self._names)
        self._bases = [file.fields[name].base for name in self._names]

    def num_bytes(self, stop: int) -> int:
        return self._all_bytes

    def last_byte(self, row: int) -> int | None:
        found = [syscalls.read_resident(self._fd, base + 8 * row, 8) or b"" for base in self._bases]
        if min(map(len, found)) < 8:
            return None
        begin, length = (int.from_bytes(number, "little") for number in found)
        return self.base + begin + max(length, 1) - 1

    def ranges(self, first: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int64]:
        counts, num_bytes = stop - first, self._all_bytes
        rows = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
        offset, length = (np.empty(len(rows), np.int64) for _ in range(2))
        self._index.gather(rows, dict(zip(self._names, (offset, length), strict=True)))
        # The index may be damaged, which reading the row will report; here ranges only must stay within the dataset.
        offset = offset.clip(0, num_bytes)
        end = (offset + length.clip(0, num_bytes)).clip(max=num_bytes)
        order = np.argsort(offset, kind="stable")
        offset, end = offset[order], np.maximum.accumulate(end[order])
        begins = np.flatnonzero(np.concatenate(([True], offset[1:] > end[:-1] + _JOINED_BYTES)))
        ends = end[np.append(begins[1:] - 1, len(end) - 1)]
        return np.stack([self.base + offset[begins], ends - offset[begins]], axis=1)


class KernelAdvice:
    """Asks the kernel to read ranges of a file into memory; waits only for room in the disk's queue.

    Ranges are int64 (R, 2), (offset, length) each, none longer than 128 KiB.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._fd = fd
        # Only its addresses are used, its memory is never touched, so truncation cannot hurt.
        self._map = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data
        self._end = -(-num_bytes // _PAGE) * _PAGE
        self._vectored = hasattr(os, "pidfd_open")

    def __call__(self, ranges: NDArray[np.int64]) -> None:
        for first in range(0, len(ranges), _MAX_RANGES):
            part = ranges[first : first + _MAX_RANGES]
            self._vectored = self._vectored and self._announce_at_once(part)
            if not self._vectored:
                for offset, length in part.tolist():
                    os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_WILLNEED)

    def _announce_at_once(self, ranges: NDArray[np.int64]) -> bool:
        vector = ranges.copy()
        vector[:, 1] = np.minimum(vector[:, 0] + vector[:, 1], self._end) - vector[:, 0]
        vector[:, 0] += self._address
        try:
            process = os.pidfd_open(os.getpid())
        except OSError:
            return False
        numbers = (_SYS_PROCESS_MADVISE, process, vector.ctypes.data, len(vector), _MADV_WILLNEED, 0)
        try:
            return int(ctypes.CDLL(None, use_errno=True).syscall(*map(ctypes.c_long, numbers))) >= 0
        finally:
            os.close(process)


def has_read_ahead() -> bool:
    """Whether this system can read ahead on request; macOS has no posix_fadvise."""
    return sys.platform == "linux"
