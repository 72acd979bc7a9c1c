"""The journal of a pack under way: what is being packed, and which rows are done.

It lies beside the output as `OUT.h5.journal` and is only ever appended to. A head (what is packed: release,
decoder, options, the size and modification time of every source) is followed by records of 32 bytes, each with
its own checksum, so that whatever a kill leaves behind is read up to the last whole record. A kill loses nothing. To
disk it is brought before rows are moved, and with its head where the pack is large: what a power failure loses of the
records, rows are decoded again for; a small pack that lost its head is begun again, with `--overwrite`.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import OutputError, PackError
from fastload.pack.tasks import HEADERS

MAGIC = b"fastload journal 1\n"
RECORD = np.dtype([("row", "<i8"), ("kind", "<u4"), ("check", "<u4"), ("digest", "<u8"), ("extra", "<u8")])
SOURCE = np.dtype([("key", "<u8"), ("size", "<i8"), ("mtime_ns", "<i8")])

DONE, SKIPPED, TEXT, CLOSING, FINISHED, CHANGED, NOW = 1, 2, 3, 4, 5, 6, 7
"""Kinds of record: a row written; a row left out; 16 bytes of the reason; every row decided, holes being closed; the
file complete, about to get its final name; the source of a row changed before the row was packed, so that what was said
of it is void: size and time of the source now, then its header, both records or neither."""

_LENGTHS = np.dtype("<u8")


@dataclass
class Claims:
    """What a journal says was done; the packer checks it against the pixels before it believes it.

    Attributes:
        state: uint8 (N,): 0 not done, DONE or SKIPPED.
        digest: uint64 (N,): pixel digest of each DONE row.
        reasons: row -> why it was skipped.
        changed: row -> its source (SOURCE, its key 0) and header (HEADERS) where they are no longer those of the head.
        closing: every row is decided, and rows may already have been moved.
        finished: header digest (its first 16 hex digits) of the complete file, "" before that.
    """

    state: NDArray[np.uint8]
    digest: NDArray[np.uint64]
    reasons: dict[int, str] = field(default_factory=dict)
    changed: dict[int, tuple[NDArray[np.void], NDArray[np.void]]] = field(default_factory=dict)
    closing: bool = False
    finished: str = ""

    @classmethod
    def none(cls, num_rows: int) -> Claims:
        """Nothing done yet."""
        return cls(np.zeros(num_rows, np.uint8), np.zeros(num_rows, np.uint64))


class Journal:
    """An open journal, locked against a second packer for as long as it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = open_locked(path)

    @property
    def fd(self) -> int:
        """Its descriptor, for another kind of journal (`fastload.pack.ordered.log`) under the same name and lock."""
        return self._fd

    def close(self) -> None:
        """Let the lock go; the file stays."""
        os.close(self._fd)

    def begin(self, head: Mapping[str, Any], sources: NDArray[np.void], *, sync: bool = False) -> None:
        """Start over: the head and the source table, on disk when this returns if sync is set."""
        text = json.dumps(dict(head), sort_keys=True).encode()
        body = np.array([len(text), len(sources)], _LENGTHS).tobytes() + text + sources.tobytes()
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        _write_all(self._fd, MAGIC + np.array([xxhash.xxh3_64_intdigest(body)], _LENGTHS).tobytes() + body)
        if sync:
            os.fsync(self._fd)

    def read(self) -> tuple[dict[str, Any], NDArray[np.void], Claims] | None:
        """Head, source table and claims; None when there is no whole head. Cuts a torn record off the end."""
        data = memoryview(_read_all(self._fd))
        start = len(MAGIC) + 8
        if len(data) < start + 16 or data[: len(MAGIC)] != MAGIC:
            return None
        text_bytes, num_sources = (int(n) for n in np.frombuffer(data[start : start + 16], _LENGTHS))
        stop = start + 16 + text_bytes + num_sources * SOURCE.itemsize
        checksum = int(np.frombuffer(data[len(MAGIC) : start], _LENGTHS)[0])
        if len(data) < stop or xxhash.xxh3_64_intdigest(data[start:stop]) != checksum:
            return None
        head = json.loads(bytes(data[start + 16 : start + 16 + text_bytes]))
        sources = np.frombuffer(data[start + 16 + text_bytes : stop], SOURCE)
        records = _whole_records(data[stop:])
        os.ftruncate(self._fd, stop + records.nbytes)
        os.lseek(self._fd, 0, os.SEEK_END)
        return head, sources, _claims(records, int(head["num_rows"]))

    def rows(self, rows: NDArray[np.int64], digests: NDArray[np.uint64], reasons: Mapping[int, str]) -> None:
        """Append one chunk's outcome: the digests of its rows, except those that were skipped for a reason."""
        done = ~np.isin(rows, list(reasons)) if reasons else np.ones(len(rows), np.bool_)
        records = np.zeros(int(done.sum()), RECORD)
        records["row"], records["kind"], records["digest"] = rows[done], DONE, digests[done]
        self._append([records, *(_reason_records(row, reason) for row, reason in reasons.items())])

    def changed(self, rows: NDArray[np.int64], sources: NDArray[np.void], headers: NDArray[np.void]) -> None:
        """Append that the sources of rows not packed yet are others now: SOURCE (n,) and HEADERS (n,)."""
        records = np.zeros((len(rows), 2), RECORD)
        records["row"] = rows[:, None]
        records["kind"] = CHANGED, NOW
        records["digest"][:, 0], records["extra"][:, 0] = sources["size"], sources["mtime_ns"].view("<u8")
        packed = np.zeros((len(rows), 16), np.uint8)
        packed[:, : HEADERS.itemsize] = headers.view(np.uint8).reshape(len(rows), HEADERS.itemsize)
        words = packed.view("<u8")
        records["digest"][:, 1], records["extra"][:, 1] = words[:, 0], words[:, 1]
        self._append([records.reshape(-1)])

    def closing(self) -> None:
        """Append that every row is decided, on disk when this returns."""
        record = np.zeros(1, RECORD)
        record["kind"] = CLOSING
        self._append([record])
        os.fsync(self._fd)

    def finished(self, header_digest: str) -> None:
        """Append that the file is complete and about to get its final name."""
        record = np.zeros(1, RECORD)
        record["kind"], record["digest"] = FINISHED, int(header_digest[:16], 16)
        self._append([record])

    def remove(self) -> None:
        """Delete the file; the lock is held until `close`."""
        self.path.unlink(missing_ok=True)

    def _append(self, parts: Iterable[NDArray[np.void]]) -> None:
        records = np.concatenate(list(parts))
        records["check"] = _checks(records)
        _write_all(self._fd, records.tobytes())


def source_table(keys: Iterable[str], sizes: NDArray[np.int64], mtimes_ns: NDArray[np.int64]) -> NDArray[np.void]:
    """The sources as the journal keeps them: XXH3-64 of the key, size in bytes, modification time."""
    table = np.zeros(len(sizes), SOURCE)
    table["key"] = np.fromiter(map(xxhash.xxh3_64_intdigest, map(str.encode, keys)), np.uint64, len(sizes))
    table["size"], table["mtime_ns"] = sizes, mtimes_ns
    return table


def open_locked(path: Path) -> int:
    """A descriptor of the file, made where it is absent, with a lock that lasts until it is closed.

    Raises:
        OutputError: the file cannot be opened.
        PackError: another process holds the lock.
    """
    while not _same_file(fd := _open_and_lock(path), path):
        os.close(fd)  # Its owner finished and removed it between our open and our lock.
    return fd


def _open_and_lock(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as exc:
        raise OutputError(f"{path}: cannot be written ({exc.strerror}). Choose another folder for the output.") from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(fd)
        raise PackError(f"{path}: another process is packing to this output. Wait for it, or stop it.") from exc
    return fd


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _reason_records(row: int, reason: str) -> NDArray[np.void]:
    text = reason.encode()
    records = np.zeros(1 + -(-len(text) // 16), RECORD)
    records["row"], records["kind"] = row, TEXT
    records[0]["kind"], records[0]["extra"] = SKIPPED, len(text)
    words = np.frombuffer(text.ljust((len(records) - 1) * 16, b"\0"), "<u8").reshape(-1, 2)
    records["digest"][1:], records["extra"][1:] = words[:, 0], words[:, 1]
    return records


def _checks(records: NDArray[np.void]) -> NDArray[np.uint32]:
    """XXH32 of each record with its checksum set to zero.

    Written out in NumPy for records of 32 bytes (xxHash's specification): 60,000 calls took 20 times as long, and a
    third of the time of packing so many small images.
    """
    bare = records.copy()
    bare["check"] = 0
    words = bare.view("<u4").reshape(-1, 8)
    seeds = (606290984, 2246822519, 0, 1640531535)
    lanes: list[NDArray[np.uint32]] = [np.full(len(words), seed, np.uint32) for seed in seeds]
    for half in (words[:, :4], words[:, 4:]):
        mixed = (lane + half[:, i].astype(np.uint32) * _PRIME2 for i, lane in enumerate(lanes))
        lanes = [_rotated(lane, 13) * _PRIME1 for lane in mixed]
    result = np.full(len(words), RECORD.itemsize, np.uint32)
    for lane, by in zip(lanes, (1, 7, 12, 18), strict=True):
        result += _rotated(lane, by)
    for shift, prime in ((15, _PRIME2), (13, _PRIME3)):
        result = (result ^ result >> np.uint32(shift)) * prime
    return np.asarray(result ^ result >> np.uint32(16), np.uint32)


_PRIME1, _PRIME2, _PRIME3 = (np.uint32(prime) for prime in (2654435761, 2246822519, 3266489917))


def _rotated(values: NDArray[np.uint32], by: int) -> NDArray[np.uint32]:
    return values << np.uint32(by) | values >> np.uint32(32 - by)


def _whole_records(data: memoryview) -> NDArray[np.void]:
    """The records up to the first that is torn or damaged."""
    records = np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)
    bad = np.flatnonzero(_checks(records) != records["check"])
    return records[: bad[0]] if len(bad) else records


def _claims(records: NDArray[np.void], num_rows: int) -> Claims:
    claims = Claims.none(num_rows)
    records, claims.changed = _without_void(records, num_rows)
    done = records[records["kind"] == DONE]
    claims.state[done["row"]], claims.digest[done["row"]] = DONE, done["digest"]
    for at in np.flatnonzero(records["kind"] == SKIPPED):
        row, length = int(records[at]["row"]), int(records[at]["extra"])
        text = records[at + 1 : at + 1 + -(-length // 16)]
        if len(text) * 16 < length or np.any(text["kind"] != TEXT):
            continue  # The kill came inside the reason: the row is decoded again.
        words = np.stack([text["digest"], text["extra"]], axis=1)
        claims.state[row] = SKIPPED
        claims.reasons[row] = words.tobytes()[:length].decode(errors="replace")
    claims.closing = bool(np.any(records["kind"] == CLOSING))
    finished = records[records["kind"] == FINISHED]
    claims.finished = f"{int(finished[-1]['digest']):016x}" if len(finished) else ""
    return claims


def _without_void(
    records: NDArray[np.void], num_rows: int
) -> tuple[NDArray[np.void], dict[int, tuple[NDArray[np.void], NDArray[np.void]]]]:
    """The records without those about a row that come before a change of its source, and `Claims.changed`."""
    at = np.flatnonzero((records["kind"][:-1] == CHANGED) & (records["kind"][1:] == NOW))
    if not len(at):
        return records, {}
    last = np.full(num_rows, -1)
    last[records["row"][at]] = at
    changed = {}
    for row in np.flatnonzero(last >= 0).tolist():
        source, words = np.zeros((), SOURCE), records[last[row] + 1]
        source["size"], source["mtime_ns"] = records[last[row]]["digest"], records[last[row]]["extra"].astype("<i8")
        header = np.frombuffer(np.array([words["digest"], words["extra"]], "<u8").tobytes(), HEADERS, count=1)[0]
        changed[row] = source, header
    void = (np.arange(len(records)) < last[records["row"]]) & np.isin(records["kind"], [DONE, SKIPPED, TEXT])
    return records[~void], changed


def _read_all(fd: int) -> bytes:
    os.lseek(fd, 0, os.SEEK_SET)
    parts = []
    while part := os.read(fd, 1 << 24):
        parts.append(part)
    return b"".join(parts)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
