"""Files of records that are only appended to, and the ordered engine's journal as one of them.

A record is a header of 32 bytes (number, length, XXH3-64 of the body, XXH3-64 of these three) and the body. After a
kill the file is read up to the last whole record.

`TaskLog` is `OUT.h5.journal` of the ordered engine, with the same lock as any journal: TASK_LOG_MAGIC, then the head
(what is packed, and the table of its sources), the tasks, and at last the report of the complete file, which is about
to get its final name. A task that is done again has a second record, and the last one counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import OutputError
from fastload.format.header import IMAGES_OFFSET
from fastload.format.ragged import ragged_offsets
from fastload.pack.encoding import Form, RaggedPlan
from fastload.pack.journal import SOURCE, TASK_LOG_MAGIC, Journal
from fastload.system.files import read_bytes, write_all

RECORD_HEADER = np.dtype([("number", "<i8"), ("length", "<i8"), ("check", "<u8"), ("header_check", "<u8")])

_HEAD, _FINISHED = -1, -2
_LENGTH = np.dtype("<u8")


@dataclass(frozen=True)
class TaskRecord:
    """A task whose rows are written.

    Attributes:
        number: number of the task.
        first, count: its rows, in the order of packing.
        sources: XXH3-64 of its samples' part of the table of sources.
        starts: for each stream, where the rows before it end.
        checks: for each stream, XXH3-64 of its rows' bytes.
        rows: ROW (n,), the rows that were made.
        reasons: row -> why it was skipped.
    """

    number: int
    first: int
    count: int
    sources: int
    starts: tuple[int, ...]
    checks: tuple[int, ...]
    rows: NDArray[np.void]
    reasons: dict[int, str]

    def to_bytes(self) -> bytes:
        """Returns the body of its record."""
        values = {**vars(self), "reasons": list(self.reasons.items())}
        del values["rows"], values["number"]
        return _join_table(values, self.rows)

    @classmethod
    def of_bytes(cls, number: int, body: bytes) -> TaskRecord:
        """Returns the task of a record."""
        values, rows = _split_table(body, ROW)
        values["reasons"] = {int(row): str(reason) for row, reason in values["reasons"]}
        values["starts"], values["checks"] = tuple(values["starts"]), tuple(values["checks"])
        return cls(number=number, rows=rows, **values)


@dataclass(frozen=True)
class LogContents:
    """The content of a `TaskLog`.

    Attributes:
        head: what is packed.
        sources: SOURCE (N,), each sample's file when packing began.
        tasks: number -> a task that is written.
        finished: the report of the complete file; None before that.
    """

    head: dict[str, Any]
    sources: NDArray[np.void]
    tasks: dict[int, TaskRecord]
    finished: dict[str, Any] | None


class TaskLog:
    """The ordered engine's journal, in the file of an open `Journal`."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._fd, self._path = journal.fd, journal.path

    def names(self, path: Path) -> bool:
        """Whether the file is such a journal and says that this other file was made by the pack."""
        found = self.read()
        return found is not None and path.name in found.head["files"]

    def begin(self, head: Mapping[str, Any], sources: NDArray[np.void], *, sync: bool = False) -> None:
        """Starts over with a head and the table of sources, synced to disk if sync is set."""
        begin_records(self._fd, self._path, TASK_LOG_MAGIC)
        append_record(self._fd, self._path, _HEAD, _join_table(head, sources))
        if sync:
            os.fsync(self._fd)

    def read(self) -> LogContents | None:
        """Returns its content up to the last whole record; None if it is another journal, or has no whole head."""
        first = record_at(self._fd, len(TASK_LOG_MAGIC)) if self.journal.is_task_log else None
        if first is None or first[0] != _HEAD:
            return None
        head, sources = _split_table(first[1], SOURCE)
        tasks: dict[int, TaskRecord] = {}
        finished: dict[str, Any] | None = None
        for number, _, body in whole_records(self._fd, len(TASK_LOG_MAGIC)):
            if number >= 0:
                tasks[number] = TaskRecord.of_bytes(number, body)
            elif number == _FINISHED:
                finished = json.loads(body)
        return LogContents(head, sources, tasks, finished)

    def written(self, task: TaskRecord) -> None:
        """Appends that a task's rows are written."""
        append_record(self._fd, self._path, task.number, task.to_bytes())

    def finished(self, report: Mapping[str, Any]) -> None:
        """Appends that the file is complete and about to get its final name."""
        append_record(self._fd, self._path, _FINISHED, json.dumps(dict(report)).encode())


def _join_table(values: Mapping[str, Any], table: NDArray[np.void]) -> bytes:
    text = json.dumps(dict(values), sort_keys=True).encode()
    return np.array([len(text)], _LENGTH).tobytes() + text + table.tobytes()


def _split_table(body: bytes, dtype: np.dtype[Any]) -> tuple[dict[str, Any], NDArray[np.void]]:
    stop = 8 + int(np.frombuffer(body, _LENGTH, 1)[0])
    return json.loads(body[8:stop]), np.frombuffer(body, dtype, offset=stop)


def begin_records(fd: int, path: Path, magic: bytes) -> None:
    """Empties a file and writes its first bytes.

    Raises:
        OutputError: it cannot be written.
    """
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)
    _write(fd, path, magic)


def append_record(fd: int, path: Path, number: int, body: bytes) -> int:
    """Adds a record at the descriptor's position; returns the byte at which its body begins.

    Raises:
        OutputError: the disk is full; earlier records stay.
    """
    at = os.lseek(fd, 0, os.SEEK_CUR)
    header = np.zeros(1, RECORD_HEADER)
    header["number"], header["length"], header["check"] = number, len(body), xxhash.xxh3_64_intdigest(body)
    header["header_check"] = xxhash.xxh3_64_intdigest(header.tobytes()[:24])
    _write(fd, path, header.tobytes() + body)
    return at + RECORD_HEADER.itemsize


def record_at(fd: int, at: int) -> tuple[int, bytes] | None:
    """Returns number and body of the record at a byte of the file; None if there is no whole one."""
    head = os.pread(fd, RECORD_HEADER.itemsize, at)
    if len(head) < RECORD_HEADER.itemsize:
        return None
    header = np.frombuffer(head, RECORD_HEADER)[0]
    if int(header["header_check"]) != xxhash.xxh3_64_intdigest(head[:24]):
        return None
    length = int(header["length"])
    if at + RECORD_HEADER.itemsize + length > os.fstat(fd).st_size:
        return None
    body = read_bytes(fd, length, at + RECORD_HEADER.itemsize)
    return (int(header["number"]), body) if xxhash.xxh3_64_intdigest(body) == int(header["check"]) else None


def whole_records(fd: int, at: int) -> Iterator[tuple[int, int, bytes]]:
    """Yields number, first byte of the body, and body of each record from a byte of the file on.

    In the end an incomplete record is cut off, and the descriptor stands behind the last whole one.
    """
    while (record := record_at(fd, at)) is not None:
        number, body = record
        yield number, at + RECORD_HEADER.itemsize, body
        at += RECORD_HEADER.itemsize + len(body)
    os.ftruncate(fd, at)
    os.lseek(fd, 0, os.SEEK_END)


def _write(fd: int, path: Path, data: bytes) -> None:
    try:
        write_all(fd, data)
    except OSError as exc:
        raise OutputError(
            f"{path}: cannot be written ({exc.strerror}). What was done is kept: make room, then run the same command "
            f"again."
        ) from exc


# The streams of rows that the ordered engine writes, images and masks, and the offsets of their rows.


ROW = np.dtype(
    [
        ("row", "<i8"),
        ("digest", "<u8"),
        ("images", "<i8"),
        ("masks", "<i8"),
        ("shape", "<i4", (3,)),
        ("encoding", "u1"),
        ("orientation", "u1"),
        ("mask_encoding", "u1"),
        ("missing_eoi", "u1"),
    ]
)
"""A row that was made: its number in the order of packing, its digest, the bytes of its image and its mask, and the
values of its `EncodedRow`; missing_eoi is 1 for a JPEG without an end marker."""


@dataclass(frozen=True)
class RowStream:
    """The rows of one pixel dataset being packed.

    Attributes:
        name: "images" or "masks"; the column of ROW with its lengths.
        path: the file that they are written to.
        base: byte of that file at which they begin.
        form: "rows": back to back; "ragged": each whole inside a chunk.
        chunk_bytes: size of a chunk of the form "ragged".
    """

    name: str
    path: str
    base: int
    form: Form
    chunk_bytes: int

    def offsets(self, rows: NDArray[np.void], start: int) -> tuple[NDArray[np.int64], int]:
        """Returns the offsets from base of these rows (ROW), written after what ends at start; and where they end."""
        lengths = rows[self.name]
        if self.form == "ragged":
            return ragged_offsets(lengths, self.chunk_bytes, start)
        ends = start + np.cumsum(lengths)
        return ends - lengths, int(ends[-1]) if len(ends) else start


def streams_of(plan: RaggedPlan, part: Path, masks: Path) -> tuple[RowStream, ...]:
    """Returns the streams of a dataset: images and, where there are any, masks."""
    images = RowStream("images", str(part), IMAGES_OFFSET, plan.images, plan.chunk_bytes)
    if plan.masks is None:
        return (images,)
    return images, RowStream("masks", str(masks), 0, plan.masks, plan.chunk_bytes)
