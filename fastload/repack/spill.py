"""Compressed chunks of a file under way: appended as they are done, and found again after a kill.

The file `OUT.h5.part` begins with MAGIC. Then come records: a header of 32 bytes (number, length, XXH3-64 of the body,
XXH3-64 of these three) and the body. The first record says what is being written; the others are chunks, in the order
in which they were done. What a kill leaves behind is read up to the last whole record.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from fastload.errors import OutputError
from fastload.pack.journal import open_locked

MAGIC = b"fastload chunks1\n"
HEADER = np.dtype([("number", "<i8"), ("length", "<i8"), ("check", "<u8"), ("header_check", "<u8")])
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
        _write_all(self._fd, MAGIC, self.path)
        self._append(_ABOUT, about)
        os.fsync(self._fd)

    def resume(self, about: bytes, on_chunk: Callable[[int, bytes], None]) -> bytes | None:
        """What the file says it is of; None when it is none of ours. Cuts a torn record off the end.

        Args:
            about: what it should be of; a file of something else is left as it is, and its chunks are not told.
            on_chunk: called with the number and the body of each whole chunk.
        """
        first = self._record(len(MAGIC)) if os.pread(self._fd, len(MAGIC), 0) == MAGIC else None
        if first is None or first[0] != _ABOUT:
            return None
        if first[1] != about:
            return first[1]
        at = len(MAGIC) + HEADER.itemsize + len(about)
        while (record := self._record(at)) is not None:
            number, body = record
            self._places[number] = (at + HEADER.itemsize, len(body))
            on_chunk(number, body)
            at += HEADER.itemsize + len(body)
        os.ftruncate(self._fd, at)
        os.lseek(self._fd, 0, os.SEEK_END)
        return about

    def append(self, number: int, body: bytes) -> None:
        """Add a chunk.

        Raises:
            OutputError: the disk is full; what was added before stays.
        """
        self._append(number, body)

    def chunk(self, number: int) -> bytes:
        """The body of a chunk that was added."""
        at, length = self._places[number]
        return os.pread(self._fd, length, at) if length < 1 << 30 else _read_long(self._fd, length, at)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def _append(self, number: int, body: bytes) -> None:
        at = os.lseek(self._fd, 0, os.SEEK_CUR)
        header = np.zeros(1, HEADER)
        header["number"], header["length"], header["check"] = number, len(body), xxhash.xxh3_64_intdigest(body)
        header["header_check"] = xxhash.xxh3_64_intdigest(header.tobytes()[:24])
        _write_all(self._fd, header.tobytes() + body, self.path)
        if number != _ABOUT:
            self._places[number] = (at + HEADER.itemsize, len(body))

    def _record(self, at: int) -> tuple[int, bytes] | None:
        head = os.pread(self._fd, HEADER.itemsize, at)
        if len(head) < HEADER.itemsize:
            return None
        header = np.frombuffer(head, HEADER)[0]
        if int(header["header_check"]) != xxhash.xxh3_64_intdigest(head[:24]):
            return None
        length = int(header["length"])
        if at + HEADER.itemsize + length > self.size:
            return None
        body = _read_long(self._fd, length, at + HEADER.itemsize)
        return (int(header["number"]), body) if xxhash.xxh3_64_intdigest(body) == int(header["check"]) else None


def _write_all(fd: int, data: bytes, path: Path) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError as exc:
        raise OutputError(
            f"{path}: cannot be written ({exc.strerror}). What was compressed is kept: make room, then run the same "
            f"command again."
        ) from exc


def _read_long(fd: int, length: int, at: int) -> bytes:
    parts = []
    while length > 0 and (part := os.pread(fd, min(length, 1 << 30), at)):
        parts.append(part)
        length, at = length - len(part), at + len(part)
    return b"".join(parts)
