"""The readers that this process keeps open, shared by its threads: opening one anew would lose decoded chunks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from fastload.format import PackedFile
from fastload.read import RowReader
from fastload.stored_samples import StoredSamples

_CACHE_CHUNKS = 32
_MAX_OPEN = 64

ReaderT = TypeVar("ReaderT")


class OpenReaders(Generic[ReaderT]):
    """Readers by file and dataset.

    Args:
        open_one: opens one; it closes itself when its last user lets it go.
    """

    def __init__(self, open_one: Callable[[PackedFile, str], ReaderT]) -> None:
        self._open_one = open_one
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._open: dict[tuple[str, str, int, int], ReaderT] = {}

    def of(self, file: PackedFile, name: str = "") -> ReaderT:
        """The reader of this very file, as its header says; opened where it is not."""
        key = (str(file.path), name, file.identity.inode, file.identity.mtime_ns)
        if self._pid != os.getpid():
            self.__init__(self._open_one)  # type: ignore[misc]  # neither locks nor HDF5 handles cross a fork
        with self._lock:
            reader = self._open.pop(key, None)
            if reader is None:
                while len(self._open) >= _MAX_OPEN:
                    self._open.pop(next(iter(self._open)))
                reader = self._open_one(file, name)
            self._open[key] = reader  # behind all others: the first one is that least recently used
            return reader

    def close(self) -> None:
        """Let all of them go."""
        with self._lock:
            self._open.clear()


READERS = OpenReaders(lambda file, name: RowReader(file, [name], read="pread", cache_chunks=_CACHE_CHUNKS))
SAMPLES = OpenReaders(lambda file, _: StoredSamples(file))


def close_readers() -> None:
    """Let the files go that this process keeps open, once their rows are read."""
    READERS.close()
    SAMPLES.close()
