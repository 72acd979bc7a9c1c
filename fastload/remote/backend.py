"""The interface of a storage service, without retries: `Service`; and its failures: `Failure`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol, TypeAlias

Data: TypeAlias = "bytes | bytearray | memoryview[int]"

Kind = Literal[
    "missing",  # no such object or bucket
    "access",  # credentials missing or not sufficient
    "credentials",  # none were found, or where they come from does not answer
    "expired",  # credentials that were valid
    "clock",  # this machine's time is not the server's
    "moved",  # the server redirects to another one
    "replaced",  # the ETag is another one
    "exists",  # and was to be written only if it does not
    "throttled",  # the server asks for fewer requests
    "timeout",
    "unreachable",  # no connection
    "broken",  # the server failed, or the body broke off; worth another try
    "short",  # the object ends before what was asked for
    "invalid",  # no try will help
]


class ObjectInfo(NamedTuple):
    """An object: its key, its size, its ETag (None where the server has none), and when it was written."""

    key: str
    num_bytes: int
    etag: str | None
    modified_ns: int


class Failure(Exception):
    """One request failed. `reason` holds no URL, no answer's body and no secret, so that messages may show it."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind: Kind = kind
        self.reason = reason


class PartialUpload(Protocol):
    """An object on its way to the server in parts; nothing of it is visible before `finish`."""

    def write(self, data: Data) -> None: ...
    def finish(self) -> str | None: ...
    def abort(self) -> None: ...


class Service(Protocol):
    """Requests to one kind of server. Each raises Failure, and returns before its timeout; threads share it."""

    def head(self, key: str) -> ObjectInfo: ...
    # Returns the ETag of the object that the bytes are of. It takes no more into memory than was asked for, whatever
    # the server sends; `anew`: by another connection than those so far.
    def get(
        self, key: str, span: tuple[int, int], etag: str | None, *, anew: bool = False
    ) -> tuple[Data, ObjectInfo]: ...
    def pages(self, prefix: str, after: str) -> Iterator[list[ObjectInfo]]: ...  # in order of keys, behind one
    def put(self, key: str, data: Data, only_if: str | None) -> str | None: ...
    def upload(self, key: str, part_bytes: int) -> PartialUpload: ...
    def delete(self, key: str) -> None: ...
    def renew(self) -> None: ...  # looks for credentials again
