"""The journal of a pack in order: what is packed, and each task when its rows are written.

It is `OUT.h5.journal`, as any pack's, locked in the same way: MAGIC, then records (`fastload.pack.records`): the head
(what is packed, and the table of its sources), tasks, and at last what is said of the complete file, which is about to
get its final name. A task that is done again has a second record, and the last one counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.pack.journal import SOURCE, Journal
from fastload.pack.ordered.streams import ROW
from fastload.pack.records import append_record, record_at, whole_records, write_all

MAGIC = b"fastload ordered1\n"
_HEAD, _FINISHED = -1, -2
_LENGTH = np.dtype("<u8")


@dataclass(frozen=True)
class TaskRecord:
    """A task whose rows are written.

    Attributes:
        number: of the task.
        first, count: its rows, in the order of packing.
        sources: XXH3-64 of what the journal's table says of its samples' sources.
        starts: for each stream, where the rows before it end.
        checks: for each stream, XXH3-64 of its rows' bytes.
        rows: ROW (n,), those that were made.
        reasons: row -> why it was left out.
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
        """The body of its record."""
        told = {**vars(self), "reasons": list(self.reasons.items())}
        del told["rows"], told["number"]
        return _with_table(told, self.rows)

    @classmethod
    def of_bytes(cls, number: int, body: bytes) -> TaskRecord:
        """The task of a record."""
        told, rows = _and_table(body, ROW)
        told["reasons"] = {int(row): str(reason) for row, reason in told["reasons"]}
        told["starts"], told["checks"] = tuple(told["starts"]), tuple(told["checks"])
        return cls(number=number, rows=rows, **told)


@dataclass(frozen=True)
class Found:
    """What a journal of this kind says.

    Attributes:
        head: what is packed.
        sources: SOURCE (N,), each sample's file when packing began.
        tasks: by number, those written.
        finished: what was said of the complete file; None before that.
    """

    head: dict[str, Any]
    sources: NDArray[np.void]
    tasks: dict[int, TaskRecord]
    finished: dict[str, Any] | None


class TaskLog:
    """The journal of a pack in order, in the file of an open `Journal`."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._fd, self._path = journal.fd, journal.path

    def is_one(self) -> bool:
        """Whether the file is a journal of this kind."""
        return os.pread(self._fd, len(MAGIC), 0) == MAGIC

    def names(self, path: Path) -> bool:
        """Whether the file is such a journal, and says that this one is of the pack."""
        found = self.read()
        return found is not None and path.name in found.head["files"]

    def begin(self, head: Mapping[str, Any], sources: NDArray[np.void], *, sync: bool = False) -> None:
        """Start over; on disk when this returns if sync is set."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        write_all(self._fd, self._path, MAGIC)
        append_record(self._fd, self._path, _HEAD, _with_table(head, sources))
        if sync:
            os.fsync(self._fd)

    def read(self) -> Found | None:
        """What it says, up to the last whole record; None when it is none of this kind, or without a whole head."""
        first = record_at(self._fd, len(MAGIC)) if self.is_one() else None
        if first is None or first[0] != _HEAD:
            return None
        head, sources = _and_table(first[1], SOURCE)
        tasks: dict[int, TaskRecord] = {}
        finished: dict[str, Any] | None = None
        for number, _, body in whole_records(self._fd, len(MAGIC)):
            if number >= 0:
                tasks[number] = TaskRecord.of_bytes(number, body)
            elif number == _FINISHED:
                finished = json.loads(body)
        return Found(head, sources, tasks, finished)

    def written(self, task: TaskRecord) -> None:
        """Append that a task's rows are written."""
        append_record(self._fd, self._path, task.number, task.to_bytes())

    def finished(self, told: Mapping[str, Any]) -> None:
        """Append that the file is complete and about to get its final name."""
        append_record(self._fd, self._path, _FINISHED, json.dumps(dict(told)).encode())


def _with_table(told: Mapping[str, Any], table: NDArray[np.void]) -> bytes:
    text = json.dumps(dict(told), sort_keys=True).encode()
    return np.array([len(text)], _LENGTH).tobytes() + text + table.tobytes()


def _and_table(body: bytes, dtype: np.dtype[Any]) -> tuple[dict[str, Any], NDArray[np.void]]:
    stop = 8 + int(np.frombuffer(body, _LENGTH, 1)[0])
    return json.loads(body[8:stop]), np.frombuffer(body, dtype, offset=stop)
