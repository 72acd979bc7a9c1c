"""Objects as a source of packing: ranges read ahead of time by threads, and an object as a file of bytes.

`announce` says which ranges will be read soon, and threads fetch them; `read_range` returns one. Each process has one
`RangeReader` for a bucket, made when it is first needed: clients cross no fork and are in no pickle.
"""

from __future__ import annotations

import io
import os
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import IO, NamedTuple

from fastload.remote.backend import ObjectInfo
from fastload.remote.client import Client, ObjectFile, open_client
from fastload.remote.cloud import split
from fastload.remote.urls import ObjectPath, Remote, remote_in_force

HELD_BYTES = 64 * 2**20
"""Bytes that are fetched ahead in a process; more are when a single range is larger."""

_KEPT = 64  # announcements; unread ranges of earlier ones, as of a task that another worker took, are dropped
_TOUCHED = 8  # ranges that were read, and stay: a zip reads a member's header and then its bytes


class ObjectRange(NamedTuple):
    """Bytes [first, stop) of an object, which must have this ETag (None: any)."""

    url: str  # of the bucket
    remote: Remote
    key: str
    first: int
    stop: int
    etag: str | None


class _Coming:
    """A range that was announced."""

    def __init__(self, wanted: ObjectRange, announcement: int) -> None:
        self.wanted, self.announcement = wanted, announcement
        self.begun = False
        self.data: Future[memoryview] = Future()


class RangeReader:
    """Reads ranges of the objects of one bucket; threads share it. Those announced are fetched in that order."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._changed = threading.Condition()
        self._queue: deque[_Coming] = deque()
        self._there: dict[str, dict[tuple[int, int, str | None], _Coming]] = {}  # by key, and (first, stop, ETag)
        self._touched: deque[_Coming] = deque()
        self._held = self._announcements = self._threads = self._idle = 0

    def announce(self, ranges: Iterable[ObjectRange]) -> None:
        """Has threads fetch ranges that will be read soon, in this order, as far as `HELD_BYTES` go."""
        with self._changed:
            self._announcements += 1
            oldest = self._announcements - _KEPT
            for one in [one for some in self._there.values() for one in some.values() if one.announcement <= oldest]:
                self._drop(one)
            for wanted in ranges:
                some = self._there.setdefault(wanted.key, {})
                if wanted.stop > wanted.first and wanted[3:] not in some:
                    some[wanted[3:]] = one = _Coming(wanted, self._announcements)
                    self._queue.append(one)
            more = min(len(self._queue) - self._idle, self.client.remote.in_flight - self._threads)
            for _ in range(more):
                self._threads += 1
                threading.Thread(target=self._fetch, name="fastload-ahead", daemon=True).start()
            self._changed.notify_all()

    def read(self, wanted: ObjectRange) -> bytes:
        """Returns the bytes of a range, which may be part of one announced; raises as `Client.read`."""
        with self._changed:
            one = self._announced(wanted)
            if one is not None and not one.begun:  # this thread is faster than to wait for its turn
                self._drop(one)
                one = None
            if one is not None and one not in self._touched:
                self._touched.append(one)
                if len(self._touched) > _TOUCHED:
                    self._drop(self._touched.popleft())
        if one is None:
            return bytes(self.client.read(wanted.key, wanted.first, wanted.stop, etag=wanted.etag))
        begin = one.wanted.first
        return bytes(one.data.result()[wanted.first - begin : wanted.stop - begin])

    def forget(self, key: str) -> None:
        """Forgets what was announced of an object and is not read yet."""
        with self._changed:
            for one in list(self._there.get(key, {}).values()):
                self._drop(one)

    def _announced(self, wanted: ObjectRange) -> _Coming | None:
        """Returns what was announced and holds all bytes of a range; the caller holds the lock."""
        some = self._there.get(wanted.key, {})
        if (found := some.get(wanted[3:])) is not None:
            return found
        for (first, stop, etag), one in some.items():
            if first <= wanted.first and wanted.stop <= stop and etag == wanted.etag:
                return one
        return None

    def _drop(self, one: _Coming) -> None:
        """Forgets a range; the caller holds the lock."""
        some = self._there.get(one.wanted.key, {})
        if some.pop(one.wanted[3:], None) is None:
            return
        if not some:
            del self._there[one.wanted.key]
        if one.begun:
            self._held -= one.wanted.stop - one.wanted.first
            self._changed.notify_all()
        else:
            self._queue.remove(one)

    def _fetch(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._queue and self._held < HELD_BYTES)
                self._idle -= 1
                one = self._queue.popleft()
                one.begun = True
                self._held += one.wanted.stop - one.wanted.first
            wanted = one.wanted
            try:
                one.data.set_result(self.client.read(wanted.key, wanted.first, wanted.stop, etag=wanted.etag))
            except BaseException as exc:  # noqa: BLE001 - raised where the range is read
                one.data.set_exception(exc)


_lock = threading.Lock()
_readers: dict[tuple[str, Remote], RangeReader] = {}
_process = os.getpid()


def reader_of(url: str, remote: Remote) -> RangeReader:
    """Returns this process's reader of the bucket that a URL names."""
    global _process, _lock
    if _process != os.getpid():  # a fork: the lock may be held there for ever, and threads and clients are gone
        _process, _lock = os.getpid(), threading.Lock()
        _readers.clear()
    base = split(url)[0]
    with _lock:
        found = _readers.get((base, remote))
        if found is None:
            found = _readers[base, remote] = RangeReader(open_client(f"{base}/", remote)[0])
        return found


def client_of(path: ObjectPath) -> tuple[Client, str]:
    """Returns this process's client of a path's bucket, and the key there."""
    return reader_of(str(path), remote_in_force()).client, split(str(path))[1]


def announce(ranges: Iterable[ObjectRange]) -> None:
    """Has threads of this process fetch ranges that will be read soon, of any buckets."""
    by_bucket: dict[tuple[str, Remote], list[ObjectRange]] = {}
    for one in ranges:
        by_bucket.setdefault((one.url, one.remote), []).append(one)
    for (url, remote), some in by_bucket.items():
        reader_of(url, remote).announce(some)


def read_range(wanted: ObjectRange) -> bytes:
    """Returns the bytes of a range; raises as `Client.read`."""
    return reader_of(wanted.url, wanted.remote).read(wanted)


class _BlockFile(ObjectFile):
    """An object as a file that is read in blocks; the blocks behind the current one are fetched ahead."""

    def __init__(self, path: ObjectPath, block_bytes: int, ahead: int) -> None:
        self._url, self._remote = str(path), remote_in_force()
        self._base, self._key = split(self._url)
        self._reader = reader_of(self._url, self._remote)
        self.info: ObjectInfo = self._reader.client.head(self._key)
        super().__init__(self.info.num_bytes)
        self._block_bytes, self._ahead = block_bytes, ahead
        self._block: tuple[int, bytes] = (-1, b"")

    def _range(self, first: int, stop: int) -> ObjectRange:
        return ObjectRange(self._base, self._remote, self._key, first, min(stop, self.info.num_bytes), self.info.etag)

    def bytes_at(self, first: int, count: int) -> bytes:
        size = self._block_bytes
        if count >= size and not self._ahead:
            return self._reader.read(self._range(first, first + count))
        number = first // size
        if self._block[0] != number:
            later = range(number + 1, number + 1 + self._ahead)
            if later:
                self._reader.announce(self._range(n * size, n * size + size) for n in (number, *later))
            self._block = number, self._reader.read(self._range(number * size, number * size + size))
        begin = first - number * size
        return self._block[1][begin : begin + count]

    def close(self) -> None:
        if not self.closed and self._ahead:
            self._reader.forget(self._key)
        super().close()


def open_binary(path: Path, *, block_bytes: int = 2**18, ahead: int = 0) -> IO[bytes]:
    """Returns a file to read; an object, where the path is a URL, is read by ranges of at least `block_bytes`.

    `ahead`: how many blocks behind the current one are fetched beforehand: for a caller that reads everything, such as
    the headers of all members of a tar.
    """
    if not isinstance(path, ObjectPath):
        return open(path, "rb")
    return io.BufferedReader(_BlockFile(path, block_bytes, ahead), 2**16)
