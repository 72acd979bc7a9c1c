"""Compressed chunks of a file under way: appended as they are done, and found again after a kill.

The file `OUT.h5.part` begins with MAGIC. Then come records, see `fastload.pack.records`: the first says what is being
written; the others are chunks, in the order in which they were done.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fastload.pack.journal import open_locked
from fastload.pack.records import HEADER, append_record, read_long, record_at, whole_records, write_all

MAGIC = b"fastload chunks1\n"
_ABOUT = -1


class Spill:
    """An open spill file, locked against a second writer for as long as it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[int, tuple[int, int]] = {}
        self._fd = open_locked(path)

    def close(self) -> None:
        """Let the lock go; the file stays."""
        os.close(self._fd)

    def remove(self) -> None:
        """Delete the file; the lock is held until `close`."""
        self.path.unlink(missing_ok=True)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._fd).st_size

    def begin(self, about: bytes) -> None:
        """Start over: the file says what it is of, and holds no chunk."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self._places = {}
        write_all(self._fd, self.path, MAGIC)
        append_record(self._fd, self.path, _ABOUT, about)
        os.fsync(self._fd)

    def resume(self, about: bytes, on_chunk: Callable[[int, bytes], None]) -> bytes | None:
        """What the file says it is of; None when it is none of ours. Cuts a torn record off the end.

        Args:
            about: what it should be of; a file of something else is left as it is, and its chunks are not told.
            on_chunk: called with the number and the body of each whole chunk.
        """
        first = record_at(self._fd, len(MAGIC)) if os.pread(self._fd, len(MAGIC), 0) == MAGIC else None
        if first is None or first[0] != _ABOUT:
            return None
        if first[1] != about:
            return first[1]
        for number, at, body in whole_records(self._fd, len(MAGIC) + HEADER.itemsize + len(about)):
            self._places[number] = (at, len(body))
            on_chunk(number, body)
        return about

    def append(self, number: int, body: bytes) -> None:
        """Add a chunk.

        Raises:
            OutputError: the disk is full; what was added before stays.
        """
        self._places[number] = (append_record(self._fd, self.path, number, body), len(body))

    def chunk(self, number: int) -> bytes:
        """The body of a chunk that was added."""
        at, length = self._places[number]
        return read_long(self._fd, length, at)

    def __contains__(self, number: int) -> bool:
        return number in self._places
