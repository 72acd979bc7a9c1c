"""The journal of an unfinished pack: what is being packed, and which rows are done.

`OUT.h5.journal` is only ever appended to. A head (release, decoder, options, the survey, and the size and modification
time of every source file) is followed by records of 32 bytes, each with its own checksum. After a kill it is read up to
the last whole record, and nothing is lost. It is synced to disk before rows are moved, and after its head if the pack
is large. Rows whose records a power failure loses are decoded again; a small pack whose head is lost starts over, with
`--overwrite`.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import OutputError, PackError
from fastload.images.fit import Target
from fastload.pack.fill import HEADERS
from fastload.pack.pack_options import PackOptions
from fastload.pack.survey import Survey, all_but, row_order, with_moved_coordinates
from fastload.sources.listing import Listing
from fastload.system.files import write_all

MAGIC = b"fastload journal 1\n"
TASK_LOG_MAGIC = b"fastload ordered1\n"
"""First bytes of the ordered engine's journal (`pack.ordered.record_log`), which has the same name and lock."""

RECORD = np.dtype([("row", "<i8"), ("kind", "<u4"), ("check", "<u4"), ("digest", "<u8"), ("extra", "<u8")])
SOURCE = np.dtype([("key", "<u8"), ("size", "<i8"), ("mtime_ns", "<i8")])

DONE, SKIPPED, TEXT, CLOSING, FINISHED, CHANGED, NOW = 1, 2, 3, 4, 5, 6, 7
"""Kinds of record. DONE: a row is written. SKIPPED: a row is left out, TEXT: 16 bytes of the reason. CLOSING: every row
is decided, holes are being closed. FINISHED: the file is complete and about to get its final name. CHANGED: the source
file of a row changed before the row was packed, so that earlier records about it are void; holds the size and time of
the source now, NOW its header; one without the other does not count."""

_LENGTHS = np.dtype("<u8")


@dataclass
class PackProgress:
    """The rows that a journal says are done; the packer checks it against the pixels in the file.

    Attributes:
        state: uint8 (N,): 0 not done, DONE or SKIPPED.
        digest: uint64 (N,): pixel digest of each DONE row.
        reasons: row -> why it was skipped.
        changed: row -> its source (SOURCE, its key 0) and header (HEADERS) where they differ from those in the head.
        closing: every row is decided, and rows may already have been moved.
        finished: first 16 hex digits of the complete file's header digest, "" before that.
    """

    state: NDArray[np.uint8]
    digest: NDArray[np.uint64]
    reasons: dict[int, str] = field(default_factory=dict)
    changed: dict[int, tuple[NDArray[np.void], NDArray[np.void]]] = field(default_factory=dict)
    closing: bool = False
    finished: str = ""

    @classmethod
    def none(cls, num_rows: int) -> PackProgress:
        """Returns the progress of a pack that has just begun."""
        return cls(np.zeros(num_rows, np.uint8), np.zeros(num_rows, np.uint64))


class Journal:
    """An open journal, locked against a second packer for as long as it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = open_locked(path)

    @property
    def is_task_log(self) -> bool:
        """Whether the file is the ordered engine's journal."""
        return os.pread(self.fd, len(TASK_LOG_MAGIC), 0) == TASK_LOG_MAGIC

    def close(self) -> None:
        """Releases the lock; the file stays."""
        os.close(self.fd)

    def begin(self, head: Mapping[str, Any], sources: NDArray[np.void], *, sync: bool = False) -> None:
        """Starts over with the head and the source table, synced to disk if sync is set."""
        text = json.dumps(dict(head), sort_keys=True).encode()
        body = np.array([len(text), len(sources)], _LENGTHS).tobytes() + text + sources.tobytes()
        os.ftruncate(self.fd, 0)
        os.lseek(self.fd, 0, os.SEEK_SET)
        write_all(self.fd, MAGIC + np.array([xxhash.xxh3_64_intdigest(body)], _LENGTHS).tobytes() + body)
        if sync:
            os.fsync(self.fd)

    def read(self) -> tuple[dict[str, Any], NDArray[np.void], PackProgress] | None:
        """Returns head, source table and progress, None without a whole head; cuts an incomplete record off the end."""
        data = memoryview(_read_all(self.fd))
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
        os.ftruncate(self.fd, stop + records.nbytes)
        os.lseek(self.fd, 0, os.SEEK_END)
        return head, sources, _progress_of(records, int(head["num_rows"]))

    def rows(self, rows: NDArray[np.int64], digests: NDArray[np.uint64], reasons: Mapping[int, str]) -> None:
        """Appends a chunk's result: the digests of its rows, and the reasons of those skipped."""
        done = ~np.isin(rows, list(reasons)) if reasons else np.ones(len(rows), np.bool_)
        records = np.zeros(int(done.sum()), RECORD)
        records["row"], records["kind"], records["digest"] = rows[done], DONE, digests[done]
        self._append([records, *(_reason_records(row, reason) for row, reason in reasons.items())])

    def changed(self, rows: NDArray[np.int64], sources: NDArray[np.void], headers: NDArray[np.void]) -> None:
        """Appends that source files of rows not packed yet changed: now SOURCE (n,) and HEADERS (n,)."""
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
        """Appends that every row is decided; on disk when this returns."""
        record = np.zeros(1, RECORD)
        record["kind"] = CLOSING
        self._append([record])
        os.fsync(self.fd)

    def finished(self, header_digest: str) -> None:
        """Appends that the file is complete and about to get its final name."""
        record = np.zeros(1, RECORD)
        record["kind"], record["digest"] = FINISHED, int(header_digest[:16], 16)
        self._append([record])

    def remove(self) -> None:
        """Deletes the file; the lock lasts until `close`."""
        self.path.unlink(missing_ok=True)

    def _append(self, parts: Iterable[NDArray[np.void]]) -> None:
        records = np.concatenate(list(parts))
        records["check"] = _checks(records)
        write_all(self.fd, records.tobytes())


def source_table(keys: Iterable[str], sizes: NDArray[np.int64], mtimes_ns: NDArray[np.int64]) -> NDArray[np.void]:
    """Returns the table of source files, SOURCE (N,): XXH3-64 of the key, size in bytes, modification time."""
    table = np.zeros(len(sizes), SOURCE)
    table["key"] = np.fromiter(map(xxhash.xxh3_64_intdigest, map(str.encode, keys)), np.uint64, len(sizes))
    table["size"], table["mtime_ns"] = sizes, mtimes_ns
    return table


def survey_to_json(survey: Survey) -> dict[str, Any]:
    """Returns the part of a survey that is not in the listing as JSON values, so that headers are read only once."""
    target = survey.target
    left_out = all_but(len(survey.listing), survey.samples)
    return {
        "left_out": left_out.tolist(),
        "target": target and [target.height, target.width, target.channels, target.dtype.str, target.fit],
        "headers": "" if survey.headers is None else _headers_to_text(survey.headers),
        "sizes": [[h, w, n] for (h, w), n in survey.sizes.items()],
        "converted": survey.converted,
        "skipped": [list(pair) for pair in survey.skipped],
        **({"said": survey.more_notes} if survey.more_notes else {}),
    }


def survey_from_json(
    values: Mapping[str, Any], listing: Listing, options: PackOptions, progress: PackProgress
) -> Survey:
    """Returns the survey of a journal, with the headers that changed since.

    Args:
        values: result of `survey_to_json`.
        listing: the source as it is now.
    """
    target = headers = None
    if values["target"]:
        height, width, channels, dtype, fit = values["target"]
        target = Target(height=height, width=width, channels=channels, dtype=np.dtype(dtype), fit=fit)
    if values["headers"]:
        headers = _headers_of_text(values["headers"], len(listing))
    survey = Survey(
        listing=listing,
        samples=all_but(len(listing), values["left_out"]),
        options=options,
        target=target,
        headers=headers,
        sizes={(h, w): n for h, w, n in values["sizes"]},
        converted=values["converted"],
        skipped=tuple((key, reason) for key, reason in values["skipped"]),
        more_notes=tuple(values.get("said", ())),
    )
    if headers is None or target is None:
        return survey
    rows = row_order(survey)
    for row, (_, header) in progress.changed.items():
        headers[rows[row]] = header
    return replace(survey, listing=with_moved_coordinates(listing, headers, target))


def _headers_to_text(headers: NDArray[np.void]) -> str:
    """Returns the headers, or the one that all have in common, compressed."""
    data, first = headers.tobytes(), headers[:1].tobytes()
    return base64.b64encode(zlib.compress(first if data == first * len(headers) else data, 1)).decode()


def _headers_of_text(text: str, count: int) -> NDArray[np.void]:
    headers = np.empty(count, HEADERS)
    headers[:] = np.frombuffer(zlib.decompress(base64.b64decode(text)), HEADERS)
    return headers


def open_locked(path: Path) -> int:
    """Opens a file, made if it is absent, with a lock that lasts until it is closed; returns the descriptor.

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


def _whole_records(data: memoryview) -> NDArray[np.void]:
    """Returns the records up to the first that is incomplete or damaged."""
    records = np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)
    bad = np.flatnonzero(_checks(records) != records["check"])
    return records[: bad[0]] if len(bad) else records


def _progress_of(records: NDArray[np.void], num_rows: int) -> PackProgress:
    progress = PackProgress.none(num_rows)
    records, progress.changed = _without_void(records, num_rows)
    done = records[records["kind"] == DONE]
    progress.state[done["row"]], progress.digest[done["row"]] = DONE, done["digest"]
    for at in np.flatnonzero(records["kind"] == SKIPPED):
        row, length = int(records[at]["row"]), int(records[at]["extra"])
        text = records[at + 1 : at + 1 + -(-length // 16)]
        if len(text) * 16 < length or np.any(text["kind"] != TEXT):
            continue  # A kill cut the reason off: the row is decoded again.
        words = np.stack([text["digest"], text["extra"]], axis=1)
        progress.state[row] = SKIPPED
        progress.reasons[row] = words.tobytes()[:length].decode(errors="replace")
    progress.closing = bool(np.any(records["kind"] == CLOSING))
    finished = records[records["kind"] == FINISHED]
    progress.finished = f"{int(finished[-1]['digest']):016x}" if len(finished) else ""
    return progress


def _without_void(
    records: NDArray[np.void], num_rows: int
) -> tuple[NDArray[np.void], dict[int, tuple[NDArray[np.void], NDArray[np.void]]]]:
    """Returns the records without those made void by a later change of their source, and `PackProgress.changed`."""
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


def _checks(records: NDArray[np.void]) -> NDArray[np.uint32]:
    """Returns XXH32 of each record with its checksum set to zero.

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


def _read_all(fd: int) -> bytes:
    os.lseek(fd, 0, os.SEEK_SET)
    parts = []
    while part := os.read(fd, 1 << 24):
        parts.append(part)
    return b"".join(parts)
