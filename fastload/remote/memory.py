"""Sparse copies in the memory of this process, in place of the cache when its disk is full, and to verify objects.

They have no name and end with the process. They hold only chunks being read: nothing is kept for later epochs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastload.remote.cache import RECORD, CachedDataset, CacheFolder


class MemoryFolder(CacheFolder):
    """The bound on what sparse copies in memory take."""

    shared = False
    used = 0

    def __init__(self, limit: int) -> None:
        self.root, self.limit, self.room, self.is_chosen = Path("memory/1"), limit, limit, True
        self._thread_lock, self.used = threading.RLock(), 0

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within it no other thread changes what the copies take."""
        with self._thread_lock:
            yield

    def make_room(self, num_bytes: int) -> None:
        """Has so many bytes fit in, if there is not more room already."""
        self.limit = self.room = max(self.limit, num_bytes)

    def count(self) -> None:
        """Does nothing: this memory is private to the process, so no other one can change what it holds."""

    def datasets(self) -> list[Path]:
        """Returns none: there is nothing else to remove."""
        return []

    def close(self) -> None:
        """Nothing: it owns nothing."""


class _NoLocks:
    """Locks of memory that no other process sees; `ChunkFetcher` counts this process's threads."""

    def try_shared(self, byte: int) -> bool:
        return True

    def try_exclusive(self, byte: int) -> bool:
        return True

    def unlock(self, byte: int) -> None:
        pass

    def close(self) -> None:
        pass


class MemoryDataset(CachedDataset):
    """The sparse copies of one dataset in memory.

    Args: as for `CachedDataset`.
    """

    def __init__(self, cache: MemoryFolder, names: Sequence[str], sizes: NDArray[np.int64], num_chunks: int) -> None:
        self.cache, self.folder = cache, cache.root
        self._names, self._sizes, self._shard_of = names, sizes, {}
        self.locks = _NoLocks()  # type: ignore[assignment]  # has what is used of `ByteLocks`
        self.records = np.zeros(num_chunks, RECORD)
        self._fds: dict[int, int] = {}
        self._lock = threading.Lock()

    def path(self, shard: int) -> Path:
        """Returns a path by which this process can open the copy of a shard."""
        with self.opened(shard) as fd:
            return Path(f"/proc/self/fd/{fd}")

    @contextmanager
    def opened(self, shard: int) -> Iterator[int]:
        """Yields the descriptor of a shard's copy, which is made if it is not there."""
        with self._lock:
            fd = self._fds.get(shard)
            if fd is None:
                fd = self._fds[shard] = sparse_memory(self.size(shard))
        yield fd

    def is_lost(self, copies: Mapping[int, int]) -> bool:
        """Returns False: nobody else can remove it."""
        return False

    def close(self) -> None:
        """Gives the memory back."""
        with self._lock:
            while self._fds:
                os.close(self._fds.popitem()[1])


def sparse_memory(num_bytes: int) -> int:
    """Returns the descriptor of a file in memory, all zeros, of which only what is written takes memory."""
    fd = os.memfd_create("fastload-remote", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd
