"""Objects of a bucket or a web server, read and written by many threads: `open_client` and `Client`.

Every request is repeated until it succeeds, cannot succeed, or has failed for `Remote.give_up_after` seconds; together
they are as many at once as the server bears. `agreed` asks again, from another connection, for bytes that are not what
was packed: a bit that flips on the way, in a proxy, or in a server's memory is another one the next time; an object
that is damaged gives the same bytes again.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self, TypeVar
from urllib.parse import quote

from fastload.errors import (
    AccessError,
    FastloadError,
    ForkError,
    ObjectExistsError,
    ObjectMissingError,
    OptionError,
    RemoteError,
    ReplacedError,
)
from fastload.remote.backend import Data, Failure, ObjectInfo, PartialUpload, Service
from fastload.remote.cloud import SCHEMES, CloudBackend, split
from fastload.remote.filesystems import FsspecBackend
from fastload.remote.throttle import Throttle, backoff_s
from fastload.remote.urls import Remote, is_url, shown
from fastload.system.text import counted, seconds_text

ResultT = TypeVar("ResultT")

_MOST_ANSWERS = 4

_log = logging.getLogger("fastload")
_warned: set[str] = set()  # servers and datasets of which it was said in this process


def agreed(
    url: str,
    whose: str,
    fetch: Callable[[bool], ResultT],
    problem: Callable[[ResultT], Exception | None],
    digest: Callable[[ResultT], int],
) -> tuple[ResultT, Exception | None]:
    """Returns an undamaged answer; or an answer that came twice the same, and the problem with it.

    Args:
        url: of the object, as messages show it.
        whose: URL of the dataset, of which the log says it once.
        fetch: returns an answer; True: by another connection than those so far.
        problem: returns the problem with an answer.
        digest: returns a number that two answers share if their bytes are the same.

    Raises:
        RemoteError: each answer is another one, and none is right.
    """
    seen = set[int]()
    for _ in range(_MOST_ANSWERS):
        found = fetch(bool(seen))
        wrong = problem(found)
        if wrong is None:
            if seen:
                note(whose)
            return found, None
        if (number := digest(found)) in seen:
            return found, wrong
        seen.add(number)
    raise RemoteError(
        f"{url}: was asked for {_MOST_ANSWERS} times, and each answer was another one; none is what was packed. The "
        f"network, a proxy or a server changes bytes: read it over https://, or from another machine."
    ) from wrong


def note(whose: str) -> None:
    """Says once that bytes changed on their way, and came right when they were asked for again."""
    if whose not in _warned:
        _warned.add(whose)
        _log.warning(
            "%s: bytes came changed, and right when they were asked for again: the network, a proxy or a server flips "
            "bits. Nothing of it was used. This is said once.", whose,
        )  # fmt: skip


PART_BYTES = 16 * 2**20  # S3 takes 10,000 parts: objects of up to 156 GiB

# Of a host that never answered: a name that is misspelt, a port that nobody serves. One that did answer may come back.
FIRST_ANSWER_S = 10.0

WARNED_AFTER_S = 5.0  # and not again within a minute

_RETRIED = ("throttled", "timeout", "unreachable", "broken")

_process: int | None = None  # the one in which obstore made requests


class ShortObjectError(RemoteError):
    """An object ends before the bytes that were asked for."""


@dataclasses.dataclass
class Counts:
    """Counts of a client's requests so far. `bytes`: received and sent in bodies.

    `busy_s`: seconds of all requests together, from sending each to the end of its answer.
    """

    requests: int = 0
    retries: int = 0
    throttled: int = 0
    bytes: int = 0
    busy_s: float = 0.0


def in_use() -> bool:
    """Whether obstore was used in this process, which must not be forked any more: a fork could not use it."""
    return _process == os.getpid()


def open_client(url: str, remote: Remote | None = None) -> tuple[Client, str]:
    """Returns a client of the bucket or host that an object is in, and the key of the object there.

    s3://, gs://, az:// and http(s):// go through obstore, every other scheme through fsspec. Nothing is sent yet.

    Raises:
        OptionError: this is no URL, or no scheme that is known.
        MissingExtraError: the package for this scheme is not installed.
        AccessError: the profile that AWS_PROFILE names has no credentials.
        ForkError: this process is a fork of one in which obstore was used.
    """
    if not is_url(url):
        raise OptionError(f"{url!r} is no URL: give one such as s3://bucket/file.h5 or https://host/file.h5")
    if not url.lower().startswith("http") and re.search(r"\?.*\b(sig|signature|x-[a-z]+-signature|token)=", url, re.I):
        raise OptionError(
            f"{shown(url)}: this URL comes with a signature, which only https:// takes. Give the https:// URL, or this "
            f"one without it and credentials where the provider's own tools look for them (a SAS token of Azure: in "
            f"AZURE_STORAGE_SAS_TOKEN)"
        )
    base, key = split(url)
    return Client(base, remote or Remote()), key


class Client:
    """Requests to one bucket, or one web server; threads share it, forks and pickles do not.

    A bucket is opened by `open_client`. Credentials are looked for where the provider's tools do (AWS_* variables,
    ~/.aws by boto3, ...), again after they expired, and are part of no message, `repr` or pickle.

    Attributes:
        url: of the bucket, as messages show it.
        counts: requests so far; a copy is made by `dataclasses.replace(client.counts)`.

    Every method may raise, in messages that name the object, what was tried and for how long:
        ObjectMissingError: there is no such object or bucket.
        AccessError: the server refuses the credentials.
        ReplacedError: the object is no longer the one of that ETag.
        RemoteError: the server was not reached, or did not answer as it should, for `Remote.give_up_after` seconds.
        ForkError: this is a fork of the process that opened the client.
    """

    def __init__(self, url: str, remote: Remote) -> None:
        global _process
        self.url = shown(url)
        self.remote = remote
        self.counts = Counts()
        self._lock = threading.Lock()
        self._throttle = Throttle(remote.in_flight)
        self._answered = False
        self._closed = False
        self._process = os.getpid()
        self._renewed_s = self._warned_s = 0.0
        self._backend: Service
        if url.split("://")[0] in SCHEMES:
            if _process not in (None, os.getpid()):
                self._process = _process or 0
                self._check_process()
            self._backend = CloudBackend(url, remote)
            _process = os.getpid()
        else:
            self._backend = FsspecBackend(url)

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} holds connections: it cannot be pickled. Pickle the URL, and open it there.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def url_of(self, key: str) -> str:
        """Returns the URL of an object, without query and user: for messages, and to open it again."""
        return f"{self.url}/{quote(key) if self.url.startswith('http') else key}"

    def head(self, key: str) -> ObjectInfo:
        """Returns size, ETag and time of an object."""
        return self._repeat("asked for", key, lambda: self._backend.head(key))

    def read(self, key: str, first: int, stop: int, *, etag: str | None = None) -> memoryview:
        """Returns bytes [first, stop) of an object, all of them, by one request; a read-only view, uint8.

        Args:
            key: of the object.
            first: the first byte.
            stop: the byte after the last; ShortObjectError if the object is shorter.
            etag: of the object as it was before; ReplacedError if it has another one now.
        """
        return self.read_range(key, first, stop, etag=etag)[0] if first != stop else memoryview(b"")

    def read_range(
        self, key: str, first: int, stop: int, *, etag: str | None = None, anew: bool = False
    ) -> tuple[memoryview, ObjectInfo]:
        """Returns bytes of an object as `read`, of which there are some, and what the object is.

        `anew`: from another connection than those so far.
        """
        if not 0 <= first < stop:
            raise OptionError(f"{self.url_of(key)}: bytes {first} to {stop} are no range")
        what = f"asked for bytes {first:,} to {stop - 1:,} of"
        data, info = self._repeat(what, key, lambda: self._backend.get(key, (first, stop), etag, anew=anew))
        self._count(bytes=stop - first)
        return memoryview(data).toreadonly(), info

    def holding(self, key: str, data: Data) -> ObjectInfo | None:
        """Returns what an object is if its bytes are these; None: they are others, of which none but as many are read.

        ObjectMissingError: there is none.
        """
        info = self.head(key)
        if info.num_bytes != len(data):
            return None
        try:
            return info if self.read(key, 0, len(data), etag=info.etag) == memoryview(data) else None
        except ReplacedError:
            return None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yields the objects whose keys begin with a prefix, in order of their keys; a page is fetched when needed."""
        first, last, pages = "", "", None  # type: str, str, Iterator[list[ObjectInfo]] | None

        def next_page() -> list[ObjectInfo] | None:
            nonlocal pages
            pages = pages or self._backend.pages(prefix, last)
            try:
                return next(pages, None)
            except Failure:
                pages = None  # continues behind the last key
                raise

        while (page := self._repeat("listed", prefix, next_page)) is not None:
            if page and page[0].key == first:
                raise RemoteError(f"{self.url_of(prefix)}: the server lists the same objects again and again.")
            yield from page
            first, last = (page[0].key, page[-1].key) if page else (first, last)

    def put(self, key: str, data: Data, *, only_if: str | None = None) -> str | None:
        """Writes an object at once and returns its ETag; whoever reads sees all of it or nothing.

        A request whose answer was lost is repeated; if the object is then the very bytes given, it was written by us
        (or by somebody with the same bytes).

        Args:
            key: of the object.
            data: its bytes.
            only_if: "absent": only if there is no such object, else ObjectExistsError; an ETag: only if the object has
                it, else ReplacedError.
        """
        tries = 0

        def put() -> str | None:
            nonlocal tries
            tries += 1
            return self._backend.put(key, data, only_if)

        try:
            etag = self._repeat("wrote", key, put)
        except (ObjectExistsError, ReplacedError):
            if tries == 1:
                raise
            if (there := self.holding(key, data)) is None:
                raise
            etag = there.etag
        self._count(bytes=len(data))
        return etag

    def upload(self, key: str, *, part_bytes: int = PART_BYTES) -> Upload:
        """Returns an upload in parts, a context manager: nothing of the object is visible before its `finish`."""
        self._check_process()
        return Upload(self, key, self._backend.upload(key, part_bytes))

    def delete(self, key: str) -> None:
        """Deletes an object; one that is not there is deleted already."""
        try:
            self._repeat("deleted", key, lambda: self._backend.delete(key))
        except ObjectMissingError:
            pass

    @property
    def allowed(self) -> float:
        """Requests that may be in flight now: `Remote.in_flight`, or less where the server refused some."""
        return min(float(self.remote.in_flight), self._throttle.limit)

    def close(self) -> None:
        """Ends the waits of threads that repeat requests; every later request raises RemoteError."""
        self._closed = True
        self._throttle.close()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ForkError(
                f"{self.url}: this process ({os.getpid()}) is a fork of process {self._process}, in which a client of "
                "an object store was used, and its connections would hang here for ever. Start processes with the "
                "method spawn or forkserver (DataLoader(..., multiprocessing_context='forkserver')), or use "
                "FastLoader, which reads by threads."
            )

    def _count(self, **more: float) -> None:
        with self._lock:
            for name, value in more.items():
                setattr(self.counts, name, getattr(self.counts, name) + value)

    def _repeat(self, what: str, key: str, request: Callable[[], ResultT]) -> ResultT:
        """Returns the result of a request, repeated while that may help."""
        self._check_process()
        began_s = time.monotonic()
        failures, failed_s, renewed = 0, 0.0, False
        while True:
            with self._throttle.slot() as slot:
                if self._closed:
                    raise RemoteError(f"{self.url_of(key)}: this client was closed")
                begun_s = time.monotonic()
                self._count(requests=1)
                try:
                    result = request()
                    slot.outcome = "answered"
                    self._answered = True
                    return result
                except Failure as error:
                    failure = error
                    slot.outcome = "refused" if error.kind in ("throttled", "timeout") else ""
                finally:
                    self._count(busy_s=time.monotonic() - begun_s)
            now_s = time.monotonic()
            failures += 1
            failed_s = failed_s or now_s
            if failure.kind not in ("timeout", "unreachable", "credentials"):
                self._answered = True
            if failure.kind == "expired" and not renewed:
                renewed = True
                self._renew()
                continue
            limit_s = self.remote.give_up_after
            if not self._answered:
                limit_s = min(limit_s, FIRST_ANSWER_S)
            wait_s = backoff_s(failures)
            # A machine's role may be late to answer once; without any credentials nothing was ever answered.
            may_help = failure.kind in _RETRIED or (failure.kind == "credentials" and self._answered)
            if not may_help or now_s + wait_s - failed_s > limit_s:
                raise self._error(failure, what, key, failures, now_s - began_s)
            if now_s - failed_s > WARNED_AFTER_S and now_s - self._warned_s > 60:
                self._warned_s = now_s
                _log.warning(
                    "%s: a request fails for %s: %s", self.url_of(key), seconds_text(now_s - failed_s), failure
                )
            self._count(retries=1, throttled=failure.kind == "throttled")
            self._throttle.sleep(wait_s)

    def _renew(self) -> None:
        with self._lock:
            if time.monotonic() - self._renewed_s > 1.0:
                self._backend.renew()
                self._renewed_s = time.monotonic()

    def _error(self, failure: Failure, what: str, key: str, tries: int, took_s: float) -> FastloadError:
        """Returns the error for a request that is not repeated any more."""
        url, why = self.url_of(key), failure.reason
        names = _CREDENTIALS.get(self.url.split("://")[0], "the credentials in use")
        if failure.kind == "missing":
            return ObjectMissingError(f"{url}: there is no such object ({why}). Check bucket and name.")
        if failure.kind in ("access", "credentials"):
            return AccessError(
                f"{url}: access was refused ({why}). Check that {names} may do this, and have not expired, and "
                "that the clock of this machine is right."
            )
        if failure.kind == "clock":
            return AccessError(
                f"{url}: access was refused ({why}): the clock of this machine differs too much from the "
                "server's. Set the time (`timedatectl` says whether it is synchronized), and start again."
            )
        if failure.kind == "expired":
            return AccessError(f"{url}: the credentials have expired ({why}). Renew {names}, and start again.")
        if failure.kind == "replaced":
            return ReplacedError(
                f"{url}: the object was replaced while in use ({why}). Open it again; give a new version a new name, "
                "and nothing that is being read changes."
            )
        if failure.kind == "exists":
            return ObjectExistsError(f"{url}: there is an object of that name already ({why}).")
        if failure.kind in ("short", "invalid", "moved"):
            error = ShortObjectError if failure.kind == "short" else RemoteError
            return error(f"{url}: {what} it without success: {why}.")
        return RemoteError(
            f"{url}: {what} it {counted(tries, 'time')} in {seconds_text(took_s)}, without success. Last: {why}. "
            f"{_FIXES[failure.kind]} Remote(give_up_after=seconds) sets for how long."
        )


class ObjectFile(io.RawIOBase):
    """An object of so many bytes as a file that is read, from anywhere in it."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self._at = num_bytes, 0

    def bytes_at(self, first: int, count: int) -> bytes:
        """Returns bytes of the object from `first` on, which has so many: one or more of them."""
        raise NotImplementedError

    def readinto(self, memory: Any) -> int:
        view = memoryview(memory).cast("B")
        count = max(0, min(len(view), self._num_bytes - self._at))
        data = self.bytes_at(self._at, count) if count else b""
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        if self._at < 0:
            raise ValueError(f"negative seek position {self._at}")
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


class Upload:
    """An object on its way in parts. Leaving the context by an exception, or without `finish`, aborts it."""

    def __init__(self, client: Client, key: str, parts: PartialUpload) -> None:
        self._client, self._key, self._parts = client, key, parts
        self._ended = False
        self._began_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def write(self, data: Data) -> None:
        """Adds bytes; they may be changed afterwards. Waits where the network is slower than the caller."""
        self._try(lambda: self._parts.write(bytes(data)))
        self._client._count(bytes=len(data))

    def finish(self) -> str | None:
        """Makes the object visible, whole, and returns its ETag."""
        etag = self._try(self._parts.finish)
        self._ended = True
        return etag

    def abort(self) -> None:
        """Drops what was written, unless it is finished."""
        if not self._ended:
            self._ended = True
            try:
                self._parts.abort()
            except Failure as failure:
                _log.warning("%s: parts of an upload may be left (%s)", self._client.url_of(self._key), failure.reason)

    def _try(self, request: Callable[[], ResultT]) -> ResultT:
        self._client._check_process()
        if self._ended:
            raise RemoteError(f"{self._client.url_of(self._key)}: this upload has ended")
        try:
            return request()
        except Failure as error:
            failure = error
        self.abort()
        raise self._client._error(failure, "uploaded", self._key, 1, time.monotonic() - self._began_s)


_CREDENTIALS = {
    "s3": "the credentials in use (AWS_ACCESS_KEY_ID and AWS_SESSION_TOKEN, AWS_PROFILE, or the machine's role; "
    "AWS_SKIP_SIGNATURE=true for a public bucket)",
    "gs": "the credentials in use (GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth`, or the machine's account)",
    "az": "the credentials in use (AZURE_STORAGE_ACCOUNT_NAME with a key, a token or the machine's identity)",
}

_FIXES = {
    "throttled": "The server asks for fewer requests: set Remote(in_flight=) lower, or read fewer ranges.",
    "timeout": "Is the network this slow? Then set Remote(timeout=seconds) higher.",
    "unreachable": "Check the name of the host, AWS_ENDPOINT_URL where it is set, the network and its proxies.",
    "broken": "The server, or something on the way to it, fails.",
}
