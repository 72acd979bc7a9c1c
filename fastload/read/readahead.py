"""Tells the kernel which rows come next, from a thread of its own, so that a cold file is read before it is needed.

A fault on a page that is not in memory stops a worker for as long as the disk takes, one row after another. Announced
rows are all requested at once: on one NVMe-backed disk a cold batch of 256 images took 15 ms against 257 ms.

One `process_madvise` announces up to 1,024 ranges and so leaves the GIL once; `posix_fadvise`, the way out where the
kernel refuses that, leaves it once a range.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import queue
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FileChangedError
from fastload.format import Field

from . import held
from .announced import Announced, LinearRows, RowsInStore

# One call is cut short at the device's read-ahead window, 128 KiB unless someone changed it.
_SLICE_BYTES = 128 * 2**10
_MAX_RANGES = 1024  # UIO_MAXIOV
_PAGE = mmap.PAGESIZE
_MADV_WILLNEED = 3
_SYS_PROCESS_MADVISE = 440  # the same number on every architecture

# Fields that small are announced whole, once: asking about their rows costs more than they do.
_SMALL_FIELD_BYTES = 16 * 2**20

# Rows looked at in a batch; batches without a miss before they are looked at less often, and how often then. Announcing
# what is in memory is not free: 4 us a row of 116 kB.
_PROBES = 8
_QUIET_BATCHES = 16
_QUIET_EVERY = 8

_log = logging.getLogger("fastload")

Item = TypeVar("Item")

Advise = Callable[[NDArray[np.int64]], None]
"""Takes ranges of the file, int64 (R, 2), (offset, length) each, none longer than 128 KiB."""


class ReadAhead:
    """Announces the rows of coming batches. Threads may share it; `announce` never waits.

    It looks whether pages are in memory already (a few rows a batch), and stays silent while all of them are.

    Args:
        fd: of the file, open for reading as long as this lives.
        fields: linear fields to announce.
        stores: fields in byte stores to announce; what stands beside them belongs to the fields.
        rows: rows of the file that are read at all; nothing outside is announced, small fields apart.
        chunk_rows: rows of the chunks, announced whole since a window reads all of a chunk soon; 0: row by row.
        recent_chunks: chunks remembered as announced.
        advise: what announces ranges; by default the kernel.
        resident: whether the byte at an offset is in memory, None where the kernel does not say.
        owns_fd: `close` closes the descriptor, too.
    """

    def __init__(
        self,
        fd: int,
        fields: Sequence[Field],
        rows: range,
        *,
        stores: Sequence[RowsInStore] = (),
        chunk_rows: int = 0,
        recent_chunks: int = 64,
        advise: Advise | None = None,
        resident: Callable[[int], bool | None] | None = None,
        owns_fd: bool = False,
    ) -> None:
        self._closed = False
        self._orders: queue.SimpleQueue[NDArray[np.int64] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        num_bytes = os.fstat(fd).st_size
        linear = [LinearRows(field.offset, field.row_bytes) for field in fields if field.offset is not None]
        self._stores = stores
        announced: list[Announced] = [*stores, *linear]
        self._small = [field for field in announced if field.num_bytes(rows.stop) <= _SMALL_FIELD_BYTES]
        self._large = [field for field in announced if field not in self._small]
        self._rows = rows
        self._chunk_rows = chunk_rows
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._max_recent = recent_chunks
        self._advise = advise or KernelAdvice(fd, num_bytes)
        self._resident = resident or (lambda offset: held.is_resident(fd, offset))
        self._probed = 0
        self._quiet = 0
        self._hold = 0
        # Last: whoever made the descriptor closes it where this failed.
        self._owned_fd = fd if owns_fd else -1

    def announce(self, rows: NDArray[np.int64]) -> None:
        """Rows of the file, int64 (B,), that will be read soon; in the order of reading over calls."""
        if self._closed or not self._wanted(rows):
            return
        if self._thread is None:
            # Not before something is to be announced: for a file in memory there is no thread to wait for the GIL.
            self._thread = threading.Thread(target=self._run, name="fastload-readahead", daemon=True)
            self._thread.start()
        self._orders.put(rows)

    def close(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Ends the thread, leaving out what it has not announced yet."""
        if _is_finalizing():
            return  # its thread stands still, so that there is nothing to wait for, and the kernel closes what is left
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            while not self._orders.empty():
                self._orders.get()
            self._orders.put(None)
            if thread is not threading.current_thread():
                thread.join()
        for store in self._stores:
            store.close()
        fd, self._owned_fd = self._owned_fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_owned_fd", -1) >= 0:
            self.close()

    def _run(self) -> None:
        try:
            for field in self._small:
                self._advise(sliced(field.whole(self._rows.stop)))
            while (rows := self._orders.get()) is not None:
                first, stop = self._row_ranges(rows)
                for field in self._large if len(first) else ():
                    self._advise(sliced(field.ranges(first, stop)))
        except (OSError, FileChangedError):
            # Reading goes on without: a worker that meets a bad disk raises in the training loop.
            self._closed = True
            _log.warning("read-ahead stopped", exc_info=True)

    def _wanted(self, rows: NDArray[np.int64]) -> bool:
        """Whether some of these rows are likely not in memory."""
        if not self._large:
            return False
        self._probed += 1
        if self._quiet >= _QUIET_BATCHES and self._probed % _QUIET_EVERY:
            return False
        field = self._large[0]
        probed = rows[:: max(1, len(rows) // _PROBES)]
        # The last byte of a row: the page that the row before it has not brought in.
        ends = map(field.last_byte, probed.tolist())
        if all(end is not None and self._resident(end) for end in ends):
            self._quiet += 1
            self._hold = max(0, self._hold - 1)
        else:
            # Announcing goes on for a while: a file that is in memory in part shows few misses in eight rows.
            self._quiet, self._hold = 0, _QUIET_BATCHES
        return self._hold > 0

    def _row_ranges(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First rows, and rows one past the last, of ranges that hold these rows and were not announced yet."""
        if self._chunk_rows:
            chunks = [chunk for chunk in np.unique(rows // self._chunk_rows).tolist() if self._is_new(chunk)]
            first = np.array(chunks, dtype=np.int64) * self._chunk_rows
            stop = np.minimum(first + self._chunk_rows, self._rows.stop)
            first = np.maximum(first, self._rows.start)
        else:
            first = np.unique(rows)
            stop = first + 1
        if not len(first):
            return first, first
        new = np.concatenate(([True], first[1:] != stop[:-1]))
        return first[new], stop[np.append(np.flatnonzero(new)[1:] - 1, len(stop) - 1)]

    def _is_new(self, chunk: int) -> bool:
        known = chunk in self._recent
        self._recent[chunk] = None
        self._recent.move_to_end(chunk)
        if len(self._recent) > self._max_recent:
            self._recent.popitem(last=False)
        return not known


def announced_ahead(items: Iterator[Item], announce: Callable[[Item], None], depth: int) -> Iterator[Item]:
    """The same items, each announced when the one `depth` before it is asked for."""
    coming: deque[Item] = deque()
    for item in items:
        announce(item)
        coming.append(item)
        if len(coming) > depth:
            yield coming.popleft()
    yield from coming


def sliced(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same ranges, int64 (R, 2), (offset, length), widened to whole pages and cut every 128 KiB."""
    begin = ranges[:, 0] // _PAGE * _PAGE
    end = -(-(ranges[:, 0] + ranges[:, 1]) // _PAGE) * _PAGE
    counts = -(-(end - begin) // _SLICE_BYTES)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = np.repeat(begin, counts) + within * _SLICE_BYTES
    length = np.minimum(np.repeat(end, counts) - offset, _SLICE_BYTES)
    return np.stack([offset, length], axis=1)


class KernelAdvice:
    """Asks the kernel to read ranges of a file into memory; waits for nothing but room in the disk's queue.

    Args:
        fd: of the file.
        num_bytes: its size.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._fd = fd
        # Only its addresses are used, never its memory, so truncation cannot hurt.
        self._map = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data
        self._end = -(-num_bytes // _PAGE) * _PAGE
        self._vectored = hasattr(os, "pidfd_open")

    def __call__(self, ranges: NDArray[np.int64]) -> None:
        for first in range(0, len(ranges), _MAX_RANGES):
            part = ranges[first : first + _MAX_RANGES]
            if not (self._vectored and self._announce_at_once(part)):
                self._vectored = False
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
        try:
            syscall = ctypes.CDLL(None, use_errno=True).syscall
            done = syscall(
                ctypes.c_long(_SYS_PROCESS_MADVISE),
                ctypes.c_int(process),
                ctypes.c_void_p(vector.ctypes.data),
                ctypes.c_size_t(len(vector)),
                ctypes.c_int(_MADV_WILLNEED),
                ctypes.c_uint(0),
            )
        finally:
            os.close(process)
        return int(done) >= 0


def has_read_ahead() -> bool:
    """Whether this system can be told; macOS has no posix_fadvise."""
    return sys.platform == "linux"
