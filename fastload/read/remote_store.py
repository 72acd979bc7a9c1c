"""`RemoteStore`: the files of a dataset behind a URL: sparse copies in the cache, with the chunks of held rows.

`HeldRows` fetches the rows of one shard ahead of whoever checks them, and holds them meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Self, cast

import numpy as np

from fastload.errors import FastloadError, FileChangedError, FormatError, MissingFileError
from fastload.format.header import PIXEL_FIELDS, PackedFile
from fastload.read.identity import WriteLease
from fastload.read.linear import Read
from fastload.read.row_table import Located, index_columns
from fastload.read.store import Held, OpenFile, ResultT, Store
from fastload.remote.cache import CacheLeftError, CacheLostError, DiskFullError
from fastload.remote.fetch import ChunkFetcher
from fastload.remote.remote_shards import RemoteShards
from fastload.timing.results import NETWORK
from fastload.timing.stopwatch import lap

_MOST_LOSSES = 10  # of the cache, one after another, before that is an error
_MOST_AGAIN = 4


class RemoteStore(Store):
    """The files of a dataset behind a URL. Threads may share it; after a fork copies are opened anew.

    Args: as for `Store`.
    """

    def __init__(self, file: PackedFile, fields: Sequence[str], read: Read = "auto", **options: Any) -> None:
        super().__init__(file, fields, read, **options)
        self.remote = cast(RemoteShards, file.remote)
        self.fetcher = self.remote.cache.current()  # that open files are held by
        self.chunked = [name for name in self.fields if name in self.remote.table.fields]  # fetched when rows are read

    def holding(self, located: Located, fields: Collection[str] | None = None) -> AbstractContextManager[None]:
        return _HeldCopies(self, located, self.chunked if fields is None else [f for f in self.chunked if f in fields])

    def chunks_of(self, located: Located, fields: Sequence[str] | None = None) -> list[int]:
        """Returns the chunks that rows lie in, each once, of some or all fields; within `holding` their files."""
        found: dict[int, None] = {}
        table = self.remote.table
        for name in self.chunked if fields is None else fields:
            if name in table.rows:
                chunks = table.of_rows(name, located.shard, located.there)
                low = int(chunks.min())
                found |= dict.fromkeys((np.flatnonzero(np.bincount(chunks - low)) + low).tolist())
                continue
            for number, rows, _ in located.parts:
                offset, length = (np.empty(len(rows), np.int64) for _ in range(2))
                self.files.opened[number].copy(f"{name}_offset", rows, offset)
                self.files.opened[number].copy(f"{name}_bytes", rows, length)
                found |= dict.fromkeys(table.of_bytes(name, number, offset, length).tolist())
        return list(found)

    def within(self, located: Located, work: Callable[[], ResultT], fields: Collection[str] | None = None) -> ResultT:
        """Returns what some work on these rows returns, done within `holding` them.

        It is done again where a file was touched, where copies were lost, and where what came had changed on its way.
        """
        for left in range(_MOST_AGAIN, -1, -1):
            try:
                return super().within(located, work, fields)
            except (FastloadError, OSError) as exc:
                if not left or not self._may_help(exc, located):
                    raise
        raise AssertionError("the last try returned or raised")

    def _may_help(self, exc: Exception, located: Located) -> bool:
        """Whether rows that could not be read can be now, as what was lost or changed on its way is fetched again."""
        is_nested = self.files.is_used_here
        if not is_nested and self.remote.cache.is_lost({number: one.fd for number, one in self.files.opened.items()}):
            self.leave(CacheLostError(self.file.path))
            return True
        if not isinstance(exc, FormatError):  # DamagedRowError is one
            return False
        damaged = located
        if rows := getattr(exc, "rows", ()):
            damaged = self.table.locate(np.array(rows, np.int64))
        with self.holding(damaged, ()):
            chunks = [self._header(number) for number in damaged.numbers] + self.chunks_of(damaged)
            for number in damaged.numbers:  # a writer of this process would wait for this thread
                if isinstance(held := self.files.opened[number].held_sparse, WriteLease):
                    held.let_go()
            repaired = self.remote.repairs.repaired(chunks)
        if repaired and not is_nested:
            self._reopen()
        return repaired

    def leave(self, why: CacheLeftError) -> None:
        """Has rows read from memory, where the disk is full, or else from copies that are made anew.

        It waits until no thread reads from the open files, and closes them.
        """
        if isinstance(why, DiskFullError):
            self.remote.cache.leave_disk()
        elif self.fetcher is self.remote.cache.current():
            self.remote.cache.open_anew(self.fetcher)
        if self.fetcher is not self.remote.cache.current():
            self._reopen()

    def _reopen(self) -> None:
        """Closes all files when no thread reads from them, so that they are opened as they are then."""
        self.files.drain(self._begin_anew)

    def _begin_anew(self) -> None:
        self.fetcher = self.remote.cache.current()
        if self.joined is not None:
            self.joined.forget()

    def require_current(self) -> None:
        """Raises CacheLostError where another thread has left the cache."""
        if self.remote.cache.current() is not self.fetcher:
            raise CacheLostError(self.file.path)

    def forked(self, opened: OrderedDict[int, OpenFile]) -> None:
        """Opens files anew: the parent holds the headers of these, this process has to hold them itself."""
        opened.clear()
        self._begin_anew()

    def _header(self, number: int) -> int:
        return int(self.remote.table.headers[number])

    def open_file(self, number: int) -> OpenFile:
        lap("reading")
        self.fetcher.hold([self._header(number)])
        lap(NETWORK)
        try:
            return super().open_file(number)
        except BaseException as exc:
            self.fetcher.release([self._header(number)])
            if isinstance(exc, FormatError | MissingFileError) and self.remote.has_lost_header(number):
                raise CacheLostError(self.file.path) from exc
            raise

    def close_file(self, number: int, file: OpenFile) -> None:
        super().close_file(number, file)
        self.fetcher.release([self._header(number)])


class _HeldCopies(Held):
    """Within it the chunks of rows are in the copies of their files, and stay there."""

    def __init__(self, store: RemoteStore, located: Located, chunked: list[str]) -> None:
        super().__init__(store, located)
        self._copies, self._chunked = store, chunked
        self._sparse: list[WriteLease | nullcontext[None]] = []  # of copies
        self._fetcher: ChunkFetcher | None = None  # that holds the chunks
        self._chunks: list[int] = []

    def __enter__(self) -> None:
        for left in range(_MOST_LOSSES, -1, -1):
            try:
                return self._enter()
            except CacheLeftError as exc:
                if self._copies.files.is_used_here or not left:
                    raise
                self._copies.leave(exc)

    def _enter(self) -> None:
        is_nested = self._copies.files.is_used_here
        opened = self._copies.files.take(self._located.numbers)
        try:
            self._hold(opened, is_nested)
        except BaseException as exc:
            self.__exit__(type(exc))
            raise

    def _hold(self, opened: Sequence[OpenFile], is_nested: bool) -> None:
        """Holds the chunks; and their copies, as long as nobody is about to write to these."""
        store, table = self._copies, self._copies.remote.table
        if len(self._located) and self._chunked:
            if not is_nested and any(name not in table.rows for name in self._chunked):  # only the copies say which
                self._require_copies(opened)
            chunks = store.chunks_of(self._located, self._chunked)
            store.remote.room.check_held(chunks)
            lap("reading")
            store.fetcher.hold(chunks)
            lap(NETWORK)
            self._fetcher, self._chunks = store.fetcher, chunks
        if is_nested:  # its data were there before, in files that are open
            return
        try:
            for one in opened if not store.fetcher.is_fetching else ():
                one.held_sparse.__enter__()
                self._sparse.append(one.held_sparse)
        except (FileChangedError, MissingFileError) as exc:  # in a fork, which opens it by its name
            raise CacheLostError(store.file.path) from exc
        self._require_copies(opened)

    def _require_copies(self, opened: Sequence[OpenFile]) -> None:
        """Raises CacheLostError where copies are no longer the open files."""
        numbers = self._located.numbers
        if self._copies.remote.cache.is_lost({number: one.fd for number, one in zip(numbers, opened, strict=True)}):
            raise CacheLostError(self._copies.file.path)

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if self._fetcher is not None:
            self._fetcher.release(self._chunks)
            self._fetcher = None
        while self._sparse:
            self._sparse.pop().__exit__(None, None, None)
        super().__exit__(kind)


class HeldRows:
    """The rows of a shard of an index behind a URL; within `with`, the shard's header is in its copy.

    Threads may share it.

    Args:
        index: the header that `open_remote` gave.
        shard: number of the shard.
    """

    def __init__(self, index: PackedFile, shard: int) -> None:
        self._remote, self._shard = cast(RemoteShards, index.remote), shard
        self._fetcher, names = self._remote.cache.current(), self._remote.table.fields
        self._pixels = [name for name in names if name in PIXEL_FIELDS]
        self._others = [name for name in names if name not in PIXEL_FIELDS]
        columns = [one for name in self._pixels for one in index_columns(index, name).values()]
        self._store = RemoteStore(index, [*names, *columns], "pread")
        self._announced: dict[int, list[int]] = {}  # by the first row of a span
        self._depth = max(1, min(self._remote.remote.in_flight, self._remote.room.fitting // 2))
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(self._remote.holding_header(self._shard))
        return self

    def __exit__(self, *_: object) -> None:
        for chunks in self._announced.values():
            self._fetcher.withdraw(chunks)
        self._store.close()
        self._open.close()

    def fields(self, rows: range) -> AbstractContextManager[None]:
        """Returns a context within which the large fields of rows other than pixels are there."""
        return self._store.holding(self._located(rows), self._others)

    def ahead(self, spans: Iterable[range]) -> Iterator[range]:
        """Yields the spans of rows, whose pixels are fetched from some spans before on; each goes to `damaged`."""
        coming = deque[range]()
        for span in spans:
            located = self._located(span)
            with self._store.holding(located, ()):
                chunks = self._store.chunks_of(located, self._pixels)
            self._announced[span.start] = chunks
            self._fetcher.announce(chunks)
            coming.append(span)
            if len(coming) > self._depth:
                yield coming.popleft()
        yield from coming

    @contextmanager
    def pixels(self, rows: range) -> Iterator[None]:
        """Within it the pixels of a span of rows that `ahead` yielded are there; afterwards they are released."""
        try:
            with self._store.holding(self._located(rows), self._pixels):
                yield
        finally:
            self._fetcher.withdraw(self._announced.pop(rows.start, []))

    def _located(self, rows: range) -> Located:
        return self._store.table.of_shard(self._shard, np.arange(rows.start, rows.stop, dtype=np.int64))
