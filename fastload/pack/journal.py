"""The journal of an unfinished pack, `OUT.h5.journal`: its source and options, and which rows are written.

After MAGIC come records, which are only appended: XXH3-64 of the body with the number as seed, number, length (8
bytes each), and the body. The first says what is packed, with the table of source files; then comes one for each task
whose rows are written; the last one holds the report of the complete file, which is about to get its final name. After
a kill the file is read up to the last whole record. A task that is done again has a second record, and the last counts.

The head and the last record are synced to disk, the head before any other file is made: after a power failure the same
command continues. Rows whose records are lost by it are made again. A file of that name that is not a journal is never
written to.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import struct
import zlib
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import OutputError, PackError
from fastload.pack.encode import HEADERS, ROW, Headers
from fastload.pack.pack_options import MAKE_ROOM
from fastload.sources.listing import Listing
from fastload.system.files import open_output, output_errors, read_bytes, sync_folder, write_all

MAGIC = b"fastload journal 4\n"
_OURS = b"fastload "
"""Begins the journals of all releases, and the unfinished files of those before MAGIC that had no journal."""
_SECTOR = bytes(512)
"""Begins a journal whose first bytes a power failure lost, while it was being begun."""

SOURCE = np.dtype([("key", "<u8"), ("size", "<i8"), ("mtime_ns", "<i8")])
"""A source file: XXH3-64 of its key, size in bytes, modification time."""

_BY_ROW = ("reasons", "warnings")
_RECORD = struct.Struct("<8sqq")
_HEAD, _FINISHED = -1, -2
_LENGTH = np.dtype("<u8")
_VALUES: dict[int, dict[str, type | tuple[type, ...]]] = {
    _HEAD: {
        **dict.fromkeys(("release", "decoder", "layout", "fields", "plan"), str),
        **{"options": dict, "streams": list, "headers": (dict, type(None))},
    },
    _FINISHED: {
        **dict.fromkeys(("store", "header_digest", "path"), str),
        **dict.fromkeys(("chunks", "pixel_bytes", "sources"), int),
        **{"converted": dict, "encodings": dict, "skipped": list, "notes": list},
    },
}
"""The types of the values that a head and a report hold."""
_NO_RECORD = ValueError, TypeError, KeyError, OverflowError, RecursionError


@dataclass(frozen=True)
class TaskRecord:
    """A task whose rows are made, in the journal once they are written."""

    number: int
    first: int  # of its rows, in the order of packing
    count: int
    sources: int  # XXH3-64 of its samples' part of the table of sources
    starts: tuple[int, ...]  # for each stream, where the rows before it end; () until that is known
    checks: tuple[int, ...]  # for each stream, XXH3-64 over the XXH3-64s of its rows' bytes
    rows: NDArray[np.void]  # ROW (n,), the rows that were made
    reasons: dict[int, str]  # row -> why it was skipped
    warnings: dict[int, str] = field(default_factory=dict)  # row -> what libjpeg warns of in its JPEG

    @property
    def failed(self) -> dict[int, str]:
        """Row -> why it cannot be packed: those that were not skipped for a warning alone."""
        return {row: reason for row, reason in self.reasons.items() if row not in self.warnings}

    def to_bytes(self) -> bytes:
        """Returns the body of its record."""
        values = {**vars(self), **{name: list(getattr(self, name).items()) for name in _BY_ROW}}
        del values["rows"], values["number"]
        return _join_table(values, self.rows)

    @classmethod
    def of_bytes(cls, number: int, body: bytes) -> TaskRecord:
        """Returns the task of a record."""
        values, rows = _split_table(body, ROW)
        for name in _BY_ROW:  # warnings are not in journals of earlier releases
            values[name] = {int(row): str(text) for row, text in values.get(name, ())}
        values["starts"], values["checks"] = tuple(values["starts"]), tuple(values["checks"])
        return cls(number=number, rows=rows, **values)


@dataclass
class JournalContents:
    """The content of a journal: its head, the table SOURCE of when packing began, and the tasks that are written.

    `finished` is the report of the complete file, None before that.
    """

    head: dict[str, Any]
    sources: NDArray[np.void]
    tasks: dict[int, TaskRecord] = field(default_factory=dict)
    finished: dict[str, Any] | None = None


class Journal:
    """An open journal, locked against a second packer while it is open.

    `alone`: nobody else has this output, so that it may lie on a file system without locks. PackError: another process
    holds the lock; OutputError: it cannot be opened, or another file lies there.
    """

    def __init__(self, path: Path, *, alone: bool = False) -> None:
        self.path = path
        while True:
            with output_errors(f"{path}: cannot be written ({{}}). Choose another folder for the output."):
                self._fd = open_output(path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                os.close(self._fd)
                raise PackError(f"{path}: another process is packing to this output. Wait for it, or stop it.") from exc
            except OSError as exc:
                if not alone:
                    if os.fstat(self._fd).st_size == 0:
                        path.unlink(missing_ok=True)
                    os.close(self._fd)
                    raise OutputError(
                        f"{path}: its file system has no locks ({exc.strerror}), and two packers could write to one "
                        f"output. Pack to another disk, and copy the file here; or pack shards by a plan "
                        f"(`fastload pack --plan`), which needs no locks."
                    ) from exc
            try:
                if self._still_there():
                    self._check_ours()
                    return
            except BaseException:
                os.close(self._fd)
                raise
            os.close(self._fd)  # Its owner finished and removed it between our open and our lock.

    def _still_there(self) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        return False

    def _check_ours(self) -> None:
        """Raises OutputError for a file of another kind: what it holds would be lost."""
        with self._reading():
            begin = os.pread(self._fd, len(_SECTOR), 0)
        if not (begin.startswith(_OURS) or _OURS.startswith(begin) or _SECTOR.startswith(begin)):
            raise OutputError(
                f"{self.path}: exists, and is not the journal of a pack, which needs that name until the output is "
                f"complete. Move it away, or choose another output."
            )

    def _reading(self) -> AbstractContextManager[None]:
        return output_errors(
            f"{self.path}: cannot be read ({{}}). Run the same command again; if that does not help, remove it and the "
            f".part next to it, and start again."
        )

    def _writing(self) -> AbstractContextManager[None]:
        return output_errors(f"{self.path}: cannot be written ({{}}). {MAKE_ROOM}")

    def is_empty(self) -> bool:
        """Whether nothing was written to it: it did not exist before, or an earlier call ended there."""
        return os.fstat(self._fd).st_size == 0

    def close(self) -> None:
        """Releases the lock; the file stays."""
        os.close(self._fd)

    def remove(self) -> None:
        """Deletes the file; the lock lasts until `close`."""
        with output_errors(f"{self.path}: cannot be removed ({{}}). Run the same command again, or remove it."):
            self.path.unlink(missing_ok=True)

    def begin(self, head: Mapping[str, Any], sources: NDArray[np.void]) -> None:
        """Starts over with a head and the table of sources, synced to disk, as is its name."""
        with self._writing():
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)
            self._append(_HEAD, _join_table(head, sources), before=MAGIC)
            os.fsync(self._fd)
            sync_folder(self.path.parent)

    def read(self) -> JournalContents | None:
        """Returns its content up to the last whole record, None without a whole head; cuts off what comes behind."""
        with self._reading():
            return self._read()

    def _read(self) -> JournalContents | None:
        at, contents = len(MAGIC), None
        if os.pread(self._fd, at, 0) != MAGIC:
            return None
        size = os.fstat(self._fd).st_size
        while at + _RECORD.size <= size:
            check, number, length = _RECORD.unpack(os.pread(self._fd, _RECORD.size, at))
            if not 0 <= length <= size - at - _RECORD.size:
                break
            body = read_bytes(self._fd, length, at + _RECORD.size)
            if _check(number, body) != check:
                break
            try:
                if contents is None:
                    head, sources = _split_table(body, SOURCE)
                    contents = JournalContents(_checked(_HEAD, head), sources)
                elif number >= 0:
                    contents.tasks[number] = TaskRecord.of_bytes(number, body)
                else:
                    contents.finished = _checked(_FINISHED, dict(json.loads(body)))
            except _NO_RECORD:  # its digest is right, but it is not what a packer writes: as if it were damaged
                break
            at += _RECORD.size + len(body)
        if contents is not None:
            os.ftruncate(self._fd, at)
            os.lseek(self._fd, 0, os.SEEK_END)
        return contents

    def written(self, task: TaskRecord) -> None:
        """Appends that a task's rows are written."""
        self._append(task.number, task.to_bytes())

    def finished(self, report: Mapping[str, Any]) -> None:
        """Appends that the file is complete and about to get its final name; synced to disk."""
        self._append(_FINISHED, json.dumps(dict(report)).encode())
        with self._writing():
            os.fsync(self._fd)

    def _append(self, number: int, body: bytes, *, before: bytes = b"") -> None:
        with self._writing():
            write_all(self._fd, before + _RECORD.pack(_check(number, body), number, len(body)) + body)


def _checked(number: int, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a head or report; ValueError if one is missing, or of another type than a packer writes."""
    for name, kind in _VALUES[number].items():
        if not isinstance(values.get(name, ...), kind):
            raise ValueError(f"{name} is missing, or of another type")
    for stream in values.get("streams", ()):
        if not isinstance(stream, list) or [type(value) for value in stream] != [str, str, int]:
            raise ValueError("a stream is no name, file and first byte")
    return values


def _check(number: int, body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(body, seed=number % 2**64)


def of_another_release(path: Path) -> bool:
    """Whether a journal, or a file being packed, is in a form of another release of fastload."""
    try:
        with open(path, "rb") as file:
            begin = file.read(len(MAGIC))
    except OSError:
        return False
    return begin.startswith(_OURS) and begin != MAGIC


def source_table(listing: Listing) -> NDArray[np.void]:
    """Returns the table of source files, SOURCE (N,)."""
    table = np.zeros(len(listing), SOURCE)
    keys = map(xxhash.xxh3_64_intdigest, map(str.encode, listing.keys))
    table["key"] = np.fromiter(keys, np.uint64, len(listing))
    table["size"], table["mtime_ns"] = listing.sizes, listing.mtimes_ns
    return table


def headers_to_json(found: Headers | None) -> dict[str, Any] | None:
    """Returns the headers of all images as JSON values, so that they are read only once."""
    if found is None:
        return None
    text = base64.b64encode(zlib.compress(found.table.tobytes(), 1)).decode()
    return {"table": text, "kinds": dict(found.kinds), "reasons": list(found.reasons.items())}


def headers_from_json(values: Mapping[str, Any] | None) -> Headers | None:
    """Returns the headers of images, read-only; None if there are none, or they are damaged."""
    if values is None:
        return None
    try:
        table = np.frombuffer(zlib.decompress(base64.b64decode(values["table"])), HEADERS)
        return Headers(table, Counter(values["kinds"]), {int(sample): str(why) for sample, why in values["reasons"]})
    except (*_NO_RECORD, zlib.error):
        return None


def _join_table(values: Mapping[str, Any], table: NDArray[np.void]) -> bytes:
    text = json.dumps(dict(values), sort_keys=True).encode()
    return np.array([len(text)], _LENGTH).tobytes() + text + table.tobytes()


def _split_table(body: bytes, dtype: np.dtype[Any]) -> tuple[dict[str, Any], NDArray[np.void]]:
    stop = 8 + int(np.frombuffer(body, _LENGTH, 1)[0])
    values = json.loads(body[8:stop])
    if not isinstance(values, dict):
        raise ValueError(f"{type(values).__name__} where names and values are expected")
    return values, np.frombuffer(body, dtype, offset=stop)
