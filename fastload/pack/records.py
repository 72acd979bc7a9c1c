"""Records of any length, appended to a file one after another, each with checksums of its own.

A record is a header of 32 bytes (number, length, XXH3-64 of the body, XXH3-64 of these three) and the body. What a kill
leaves behind is read up to the last whole record.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from fastload.errors import OutputError

HEADER = np.dtype([("number", "<i8"), ("length", "<i8"), ("check", "<u8"), ("header_check", "<u8")])


def append_record(fd: int, path: Path, number: int, body: bytes) -> int:
    """Add a record at the descriptor's position; the byte at which its body begins.

    Raises:
        OutputError: the disk is full; what was added before stays.
    """
    at = os.lseek(fd, 0, os.SEEK_CUR)
    header = np.zeros(1, HEADER)
    header["number"], header["length"], header["check"] = number, len(body), xxhash.xxh3_64_intdigest(body)
    header["header_check"] = xxhash.xxh3_64_intdigest(header.tobytes()[:24])
    write_all(fd, path, header.tobytes() + body)
    return at + HEADER.itemsize


def record_at(fd: int, at: int) -> tuple[int, bytes] | None:
    """Number and body of the record at a byte of the file; None when there is no whole one."""
    head = os.pread(fd, HEADER.itemsize, at)
    if len(head) < HEADER.itemsize:
        return None
    header = np.frombuffer(head, HEADER)[0]
    if int(header["header_check"]) != xxhash.xxh3_64_intdigest(head[:24]):
        return None
    length = int(header["length"])
    if at + HEADER.itemsize + length > os.fstat(fd).st_size:
        return None
    body = read_long(fd, length, at + HEADER.itemsize)
    return (int(header["number"]), body) if xxhash.xxh3_64_intdigest(body) == int(header["check"]) else None


def whole_records(fd: int, at: int) -> Iterator[tuple[int, int, bytes]]:
    """Number, first byte of the body and body of each record from a byte of the file on.

    When all are read, a torn one is cut off the end, and the descriptor stands there.
    """
    while (record := record_at(fd, at)) is not None:
        number, body = record
        yield number, at + HEADER.itemsize, body
        at += HEADER.itemsize + len(body)
    os.ftruncate(fd, at)
    os.lseek(fd, 0, os.SEEK_END)


def write_all(fd: int, path: Path, data: bytes) -> None:
    """Write all bytes at the descriptor's position.

    Raises:
        OutputError: they cannot be written.
    """
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError as exc:
        raise OutputError(
            f"{path}: cannot be written ({exc.strerror}). What was done is kept: make room, then run the same command "
            f"again."
        ) from exc


def read_long(fd: int, length: int, at: int) -> bytes:
    """So many bytes from a byte of the file on, fewer at its end."""
    parts = []
    while length > 0 and (part := os.pread(fd, min(length, 1 << 30), at)):
        parts.append(part)
        length, at = length - len(part), at + len(part)
    return b"".join(parts)
