"""`ShardObjects`: requests for the bytes of an index's shards, each as long as the object is the same one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from fastload.errors import RemoteError, ReplacedError
from fastload.format.shards import Shards
from fastload.remote.backend import ObjectInfo
from fastload.remote.client import Client, ShortObjectError
from fastload.remote.meta import Meta


class ShardObjects:
    """The objects behind a URL. Threads share it.

    The first answer of a shard, or an earlier run, says its ETag; from then on it has to be the same. One that was
    copied there again, with the same header, is the same.

    Args:
        url: of the file or index, without secrets.
        index_name, shards: of the index.
        client: makes the requests.
        folder_key: of the objects' folder in the bucket.
        has_other_header: whether a shard is in the cache, whose header the object with an ETag has not any more.
    """

    def __init__(
        self,
        url: str,
        index_name: str,
        shards: Shards,
        client: Client,
        folder_key: str,
        has_other_header: Callable[[int, Callable[[int, int], Any]], bool],
    ) -> None:
        self._url, self._index_name, self._shards = url, index_name, shards
        self._client, self._folder_key, self._has_other_header = client, folder_key, has_other_header
        self._etags: dict[str, str | None] = {}
        self._of_earlier_runs = set[str]()  # names of shards whose ETag is
        self._noted: tuple[Meta, Callable[[], AbstractContextManager[None]]] | None = None
        self.begin()

    def begin(self) -> None:
        """Begins in a new process: at a fork a thread may hold locks, which nobody here releases."""
        self._asking: dict[str, threading.Lock] = {}  # of shards whose ETag is asked for

    def note_in(self, meta: Meta | None, locked: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Takes the ETags of earlier runs from a file of the cache, and notes others there, within `locked`.

        None: they are noted no more.
        """
        self._noted = None if meta is None else (meta, locked)
        if meta is not None:
            self._etags.update({name: etag for name, (_, etag) in meta.read().get(self._url, {}).items()})
            self._of_earlier_runs = set(self._etags) - {self._index_name}  # whose ETag was asked for now

    def forget(self) -> None:
        """Asks for all ETags again."""
        self._etags, self._of_earlier_runs = {}, set()

    def url_of(self, shard: int) -> str:
        """Returns the URL of a shard, as messages show it."""
        return self._client.url_of(self._key(self._shards.names[shard]))

    def _key(self, name: str) -> str:
        return f"{self._folder_key}{name}"

    def read(self, shard: int, begin: int, end: int, *, anew: bool = False) -> Any:
        """Returns bytes of a shard, uint8; `anew`: by another connection than those so far. Raises as `Client`."""
        name = self._shards.names[shard]
        key, etag = self._key(name), self._etags.get(name)
        try:
            data, info = self._client.read_range(key, begin, end, etag=etag, anew=anew)
        except ReplacedError:
            if etag is None or not self._is_copied_anew(shard, etag):
                raise
            return self.read(shard, begin, end)
        except ShortObjectError:
            self._check_size(name, self._client.head(key))
            raise
        if etag is None:
            self._check_size(name, info)
            with self._asking.setdefault(name, threading.Lock()):
                if (known := self._etags.get(name)) is None:
                    self._note(name, info)
            if known not in (None, info.etag):
                return self.read(shard, begin, end)  # replaced between these answers: now one that is too old fails
        return data

    def _is_copied_anew(self, shard: int, etag: str) -> bool:
        """Whether a shard that is no longer of this ETag, which is of an earlier run, has the same header and digests.

        So it is where a shard was copied there again. Then its new ETag holds.
        """
        name = self._shards.names[shard]
        with self._asking.setdefault(name, threading.Lock()):
            if self._etags[name] != etag:
                return True  # another thread was first
            if name not in self._of_earlier_runs:
                return False
            key = self._key(name)
            self._check_size(name, info := self._client.head(key))
            if self._has_other_header(shard, lambda begin, end: self._client.read(key, begin, end, etag=info.etag)):
                return False
            self._note(name, info)
            return True

    def _check_size(self, name: str, info: ObjectInfo) -> None:
        size = int(self._shards.num_bytes[self._shards.names.index(name)])
        if info.num_bytes != size:
            raise RemoteError(
                f"{self._client.url_of(self._key(name))}: has {info.num_bytes:,} bytes, and {size:,} when the "
                f"index {self._url} was made. Copy the right shard there, or make the index again: `fastload index`."
            )

    def _note(self, name: str, info: ObjectInfo) -> None:
        self._etags[name] = info.etag
        self._of_earlier_runs.discard(name)
        if self._noted is None:
            return
        meta, locked = self._noted
        with suppress(OSError), locked():  # whoever opens it next asks again
            meta.add(self._url, {name: (info.num_bytes, info.etag)})
