"""`ShardedReader`: reads the rows of an index from its shards, each by a `RowReader` of its own.

A shard is opened when one of its rows is asked for; the least recently used ones are closed. Images of one size whose
rows fill whole pages in each shard are mapped back to back into one reserved range of addresses (`MappedShards`): there
they are one array, as in a single file.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from fastload.errors import (
    DamagedRowError,
    FastloadError,
    FileChangedError,
    FormatError,
    MissingFileError,
    OptionError,
)
from fastload.format.header import PIXEL_FIELDS, FileIdentity, PackedFile, read_shard
from fastload.format.shards import split_of
from fastload.read.identity import HeldOffWriters, until_untouched
from fastload.read.linear import MappedShards, Read, addresses_of, as_rows, chosen
from fastload.read.reader import RowReader, check_rows
from fastload.read.row_check import Check, RowCheck, can_hash, fields_needed
from fastload.read.sharded_ragged import ShardedRagged, ShardPart
from fastload.remote.cache import CacheLeftError, CacheLostError, DiskFullError
from fastload.remote.fetch import ChunkFetcher
from fastload.remote.shards import RemoteShards
from fastload.system import native
from fastload.timing.results import NETWORK
from fastload.timing.stopwatch import lap

ResultT = TypeVar("ResultT")

_MOST_LOSSES = 10  # of the cache, one after another, before that is an error
_MOST_AGAIN = 4
_MOST_OPEN = 64
"""Shards open at a time, unless the system allows fewer descriptors; a window of 16 chunks needs 32 or fewer."""


class ShardedReader(RowReader):
    """Reads any rows of some fields of an index. Threads may share it, it survives a fork, and it cannot be pickled.

    Args: as for `RowReader`.

    Raises:
        OptionError: unknown field or `read`.
        MissingFileError, FileChangedError, FormatError: (while reading) a shard is missing, or is not the file that the
            index was made of.
    """

    def __init__(
        self,
        file: PackedFile,
        fields: Sequence[str],
        read: Read = "auto",
        *,
        cache_chunks: int = 8,
        windows: bool = False,
        verify: Callable[[PackedFile, int], None] | None = None,
        check: Check | None = None,
    ) -> None:
        for name in fields:
            if name not in file.fields:
                raise OptionError(f"{file.name}: no field {name!r}; it has {', '.join(file.fields)}")
        assert file.shards is not None, "an index"
        self.file, self.fd, self.held = file, -1, nullcontext()
        self.shards = file.shards
        self._fields, self._read, self._check_option = list(fields), chosen(file.place, read), check
        self._options: dict[str, Any] = {"cache_chunks": cache_chunks, "windows": windows, "verify": verify}
        self._checks: dict[int, RowCheck] = {}
        self._lock, self._pid = threading.RLock(), os.getpid()
        self._idle = threading.Condition(self._lock)  # no thread reads from open shards
        self._open: OrderedDict[int, RowReader] = OrderedDict()
        self._users: dict[int, int] = {}
        self._threads = Counter[int]()  # that have taken shards, and how often
        self._most_open = max(4, min(_MOST_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16))
        self._joined: MappedShards | None = None
        if "images" in fields and self._read == "map":
            self._joined = MappedShards.of(file)
        # Of each shard that is open, where the first row of a field is mapped to: int64 (S,) of each field.
        self._addresses = {name: np.zeros(len(self.shards.names), np.int64) for name in filter(self._maps, fields)}
        self._ragged = {name: ShardedRagged(self, name) for name in fields if file.fields[name].ragged is not None}
        # Of remote shards: fields fetched by chunks when rows are read.
        self._remote = cast("RemoteShards | None", file.remote)
        self.fetcher = self._remote.current() if self._remote is not None else None  # that open shards are held by
        self._reopening = False
        needed = fields_needed(file, fields) if check is not None else fields
        self._chunked = [name for name in needed if self._remote is not None and name in self._remote.table.fields]
        # Fields that are copied and hashed for all shards at once when rows are compared.
        pixels = [name for name in needed if name in PIXEL_FIELDS]
        together = self._addresses.keys() >= {*pixels} and can_hash([file.fields[name] for name in pixels])
        self._hashed = pixels if check is not None and together else []

    def parts(self, rows: NDArray[np.int64]) -> list[ShardPart]:
        """Returns the rows of a batch shard by shard."""
        shard, there = self.shards.locate(rows)
        order = np.argsort(shard, kind="stable")
        cuts = np.flatnonzero(np.diff(shard[order])) + 1
        return [ShardPart(int(shard[at[0]]), there[at], at) for at in np.split(order, cuts) if len(at)]

    def reader(self, shard: int) -> RowReader:
        """Returns the reader of a shard, within `holding` a row of it."""
        return self._open[shard]

    @contextmanager
    def holding(self, rows: NDArray[np.int64], *, columns_only: bool = False) -> Iterator[None]:
        """Opens the shards of these rows, and keeps them open inside the block, as `RowReader.holding`.

        `columns_only`: fields fetched by chunks need not be there.
        """
        check_rows(rows, self.file.num_rows, self.file.name)
        shard, there = self.shards.locate(rows)
        with _Holding(self, np.unique(shard).tolist(), shard, there[:0] if columns_only else there):
            yield

    def holding_of(self, shard: int, there: NDArray[np.int64]) -> AbstractContextManager[None]:
        """Returns the context of `holding` for rows of one shard, by their numbers there, int64 (B,)."""
        return _Holding(self, [shard], np.full(len(there), shard, np.int64), there)

    def chunks_of(self, shard: NDArray[np.int64], there: NDArray[np.int64]) -> list[int]:
        """Returns the chunks of remote shards that rows lie in, each once; within `holding` their shards."""
        assert self._remote is not None, "the shards are remote"
        found: dict[int, None] = {}
        for name in self._chunked:
            if name in self._remote.table.rows:
                chunks = self._remote.table.of_rows(name, shard, there)
                low = int(chunks.min())
                found |= dict.fromkeys((np.flatnonzero(np.bincount(chunks - low)) + low).tolist())
                continue
            for number in np.flatnonzero(np.bincount(shard)).tolist():
                index = self._open[number].ragged(name).look_up(there[shard == number])
                found |= dict.fromkeys(self._remote.table.of_bytes(name, number, index.offset, index.bytes).tolist())
        return list(found)

    def require_copies(self, numbers: Sequence[int], readers: Sequence[RowReader]) -> None:
        """Raises CacheLostError where the copies of remote shards are no longer the open files."""
        if self._remote is not None and self._remote.is_lost({n: r.fd for n, r in zip(numbers, readers, strict=True)}):
            raise CacheLostError(self.file.path)

    @property
    def looks_up_chunks(self) -> bool:
        """Whether only the headers of remote shards say in which chunks rows lie."""
        return self._remote is not None and any(name not in self._remote.table.rows for name in self._chunked)

    @property
    def is_used_here(self) -> bool:
        """Whether this thread has taken shards."""
        return threading.get_ident() in self._threads

    def check_held(self, chunks: Sequence[int]) -> None:
        """Raises CacheError where the cache can never hold so many chunks at a time."""
        if self._remote is not None:
            self._remote.check_held(chunks)

    def taken(self, numbers: Sequence[int]) -> list[RowReader]:
        """Returns the open readers of shards, which stay open until they are released as often as they were taken."""
        with self._locked():
            # Who has some open already gets others, too: `leave_disk` waits until it has none.
            is_user = self.is_used_here
            while self._reopening and not is_user:
                self._idle.wait()
            if self._remote is not None and self._remote.current() is not self.fetcher and not is_user:
                raise CacheLostError(self.file.path)  # another thread has left it
            found = []
            for number in numbers:
                reader = self._open.get(number)
                if reader is None:
                    reader = self._open[number] = self._opened(number)
                self._open.move_to_end(number)
                found.append(reader)
            for number in numbers:
                self._users[number] = self._users.get(number, 0) + 1
            self._threads[threading.get_ident()] += 1
            if len(self._open) > self._most_open:
                idle = [number for number in self._open if number not in self._users]
                for number in idle[: len(self._open) - self._most_open]:
                    self._closed(self._open.pop(number), number)
            return found

    def _closed(self, reader: RowReader, number: int) -> None:
        """Closes the reader of a shard."""
        reader.close()
        if number in self._checks:
            self._checks[number].drop()
        if self.fetcher is not None:
            self.fetcher.release(self._header(number))

    def released(self, numbers: Sequence[int], thread: int) -> None:
        """Lets shards be closed that a thread has taken."""
        with self._locked():
            self._threads[thread] -= 1
            if self._threads[thread] <= 0:
                del self._threads[thread]
            for number in numbers:
                left = self._users.get(number, 1) - 1
                if left:
                    self._users[number] = left
                else:
                    self._users.pop(number, None)
            if self._reopening:
                self._idle.notify_all()

    def leave(self, why: CacheLeftError) -> None:
        """Has remote shards read from memory, where the disk is full, or else from copies that are made anew.

        It waits until no thread reads from the open files, and closes them.
        """
        assert self._remote is not None and self.fetcher is not None, "only copies of remote shards are left"
        if isinstance(why, DiskFullError):
            self._remote.leave_disk()
        elif self.fetcher is self._remote.current():
            self._remote.open_anew(self.fetcher)
        if self.fetcher is not self._remote.current():
            self._reopen()

    def _reopen(self) -> None:
        """Closes all shards when no thread reads from them, so that they are opened as they are then."""
        assert self._remote is not None, "the shards are remote"
        with self._locked():
            while self._reopening:
                self._idle.wait()
            self._reopening = True
            try:
                while self._users:
                    self._idle.wait()
                while self._open:
                    number, reader = self._open.popitem()
                    self._closed(reader, number)
                self.fetcher, self._joined = self._remote.current(), None
            finally:
                self._reopening = False
                self._idle.notify_all()

    def _locked(self) -> threading.RLock:
        """Returns the lock; after a fork a new one, as no thread is there to release what it held."""
        if self._pid != os.getpid():
            self._lock, self._pid, self._users = threading.RLock(), os.getpid(), {}
            self._threads = Counter()
            self._idle = threading.Condition(self._lock)
            if self._remote is not None:
                self.fetcher = self._remote.current()
                self._open = OrderedDict()  # the parent holds their headers, this process has to hold them itself
        return self._lock

    def _opened(self, number: int) -> RowReader:
        if self.fetcher is None:
            return self._opened_here(number)
        lap("reading")
        self.fetcher.hold(self._header(number))
        lap(NETWORK)
        try:
            return self._opened_here(number)
        except BaseException as exc:
            self.fetcher.release(self._header(number))
            assert self._remote is not None, "the shards are remote"
            if isinstance(exc, FormatError | MissingFileError) and self._remote.has_lost_header(number):
                raise CacheLostError(self.file.path) from exc
            raise

    def _header(self, number: int) -> list[int]:
        assert self._remote is not None, "the shards are remote"
        return [int(self._remote.table.headers[number])]

    def _opened_here(self, number: int) -> RowReader:
        header = read_shard(self.file, number)
        if self._check_option is not None and number not in self._checks:
            self._checks[number] = RowCheck(header, self._fields, self._check_option)
        reader = RowReader(header, self._fields, self._read, check=self._checks.get(number), **self._options)
        if self._joined is not None:
            self._joined.join(number, reader.fd)
        for name, addresses in self._addresses.items():
            mapped = reader.mapped(name)
            assert mapped is not None, "it lies in one piece in every shard"
            addresses[number] = mapped.ctypes.data
        return reader

    def gather(self, rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]]) -> int:
        """Copies rows into the arrays given, as `RowReader.gather`; messages name shards and their rows."""
        check_rows(rows, self.file.num_rows, self.file.name)
        return self._read_again(rows, lambda: until_untouched(lambda: self._gather_shards(rows, outs)))

    def _read_again(self, rows: NDArray[np.int64], read: Callable[[], ResultT]) -> ResultT:
        """Returns the result of a read, repeated for remote shards whose copies were lost, or came changed."""
        for left in range(_MOST_AGAIN, -1, -1):
            try:
                return read()
            except (FastloadError, OSError) as exc:
                if self._remote is None or not left or not self._may_help(exc, rows):
                    raise
        raise AssertionError("the last try returned or raised")

    def _may_help(self, exc: Exception, rows: NDArray[np.int64]) -> bool:
        """Whether rows that could not be read can be now, as what was lost or changed on its way is fetched again."""
        assert self._remote is not None, "the shards are remote"
        is_nested = self.is_used_here
        if not is_nested and self._remote.is_lost({number: one.fd for number, one in self._open.items()}):
            self.leave(CacheLostError(self.file.path))
            return True
        if not isinstance(exc, FormatError):  # DamagedRowError is one
            return False
        damaged = np.array(getattr(exc, "rows", ()) or rows, np.int64)
        with self.holding(damaged, columns_only=True):
            shard, there = self.shards.locate(damaged)
            numbers = np.unique(shard).tolist()
            chunks = [*(chunk for number in numbers for chunk in self._header(number)), *self.chunks_of(shard, there)]
            for number in numbers:  # a writer of this process would wait for this thread
                if isinstance(held := self._open[number].held_sparse, HeldOffWriters):
                    held.let_go()
            repaired = self._remote.repaired(chunks)
        if repaired and not is_nested:
            self._reopen()
        return repaired

    def _gather_shards(self, rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]]) -> int:
        copied, most = 0, self._most_open
        known = {name: out for name, out in outs.items() if name in self.file.fields}
        shard, there = self.shards.locate(rows)
        numbers: list[int] = np.flatnonzero(np.bincount(shard)).tolist()
        if not len(rows) or len(numbers) > most:
            parts = self.parts(rows)
            for some in (parts[first : first + most] for first in range(0, len(parts), most)):
                at = np.concatenate([part.at for part in some])
                with _Holding(self, [part.shard for part in some], shard[at], there[at]):
                    copied += sum(self._gather_part(part, rows, known) for part in some)
            return copied
        with _Holding(self, numbers, shard, there):
            due = self._are_due(rows, numbers)
            if not due and native.library() is not None:
                for name in [name for name in known if name in self._addresses]:
                    flat = as_rows(known.pop(name))
                    native.gather(addresses_of(self._addresses[name], shard, there, flat.shape[1]), flat)
                    copied += flat.nbytes
            elif not due and self._joined is not None and "images" in known:
                flat = as_rows(known.pop("images"))
                np.take(self._joined.rows, rows, axis=0, out=flat, mode="clip")
                copied += flat.nbytes
            hashed = None
            if due and self._hashed and known.keys() >= {*self._hashed}:
                flats = {name: as_rows(known.pop(name)) for name in self._hashed}
                hashed = self._hash_pixels(shard, there, flats)
                copied += sum(flat.nbytes for flat in flats.values())
            for part in self.parts(rows) if known or due else ():
                copied += self._gather_part(part, rows, known, None if hashed is None else hashed[part.at])
            return copied

    def _hash_pixels(
        self, shard: NDArray[np.int64], there: NDArray[np.int64], flats: Mapping[str, NDArray[np.uint8]]
    ) -> NDArray[np.uint64]:
        """Copies rows of shards to arrays (B, row_bytes); returns their digests, uint64 (B,)."""
        sizes = [flat.shape[1] for flat in flats.values()]
        bases = (self._addresses[name] for name in flats)
        addresses = [addresses_of(base, shard, there, size) for base, size in zip(bases, sizes, strict=True)]
        return native.digests(addresses, sizes, [*flats.values()])

    def _maps(self, name: str) -> bool:
        """Whether the rows of a field are mapped in each shard, and mean the same in all."""
        field = self.file.fields[name]
        plain = field.ragged is None and field.dtype.kind != "S" and name != "split" and field.row_bytes > 0
        return self._read == "map" and field.in_shards and plain

    def _are_due(self, rows: NDArray[np.int64], numbers: Sequence[int]) -> bool:
        """Whether rows of a batch, which lie in these shards, are to be compared with their digests."""
        if all(number not in self._checks or self._checks[number].all_seen for number in numbers):
            return False
        return any(len(self._checks[part.shard].due(part.rows)) > 0 for part in self.parts(rows))

    def _gather_part(
        self,
        part: ShardPart,
        rows: NDArray[np.int64],
        outs: Mapping[str, NDArray[Any]],
        hashed: NDArray[np.uint64] | None = None,
    ) -> int:
        """Copies the rows of one shard to where they belong in the arrays of a batch.

        `hashed`: the digests of their pixels, if these were copied before.
        """
        reader = self._open[part.shard]
        first, stop = int(part.at[0]), int(part.at[-1]) + 1
        in_a_row = stop - first == len(part.at)
        into, scattered = dict[str, NDArray[Any]](), set[str]()
        for name, out in outs.items():
            dtype = reader.file.fields[name].dtype.newbyteorder("=")  # texts may be shorter in one shard
            if in_a_row and dtype == out.dtype:
                into[name] = out[first:stop]
            else:
                into[name] = np.empty((len(part.at), *out.shape[1:]), dtype)
                scattered.add(name)
        try:
            copied = reader._gather_hashed(part.rows, into, hashed)
        except DamagedRowError as error:
            there = dict(zip(part.rows.tolist(), rows[part.at].tolist(), strict=True))
            error.rows = tuple(there[row] for row in error.rows if row in there)
            raise
        if "split" in outs:  # whose numbers mean other splits in each shard
            into["split"][...] = split_of(self.file.splits, rows[part.at])
        for name in scattered:
            outs[name][part.at] = into[name]
        return copied

    @property
    def compares(self) -> bool:
        """Whether there are rows that `gather` compares with their digests."""
        if self._check_option is None:
            return False
        return len(self._checks) < len(self.shards.names) or not all(one.all_seen for one in self._checks.values())

    def decoded(self, name: str, rows: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Decodes rows of a ragged field, unchecked; returns an array for each: (H, W, C), masks (H, W)."""
        return self._read_again(rows, lambda: self.within(rows, lambda: self._ragged[name].decoded(rows)))

    def texts(self, name: str, rows: NDArray[np.int64]) -> list[Any]:
        """Returns the texts of rows, unchecked, as `RowReader.texts`."""
        check_rows(rows, self.file.num_rows, self.file.name)
        found: list[Any] = [None] * len(rows)
        for part in self.parts(rows):
            for at, texts in zip(part.at.tolist(), self._texts_of(part, name, rows[part.at]), strict=True):
                found[at] = texts
        return found

    def _texts_of(self, part: ShardPart, name: str, rows: NDArray[np.int64]) -> list[Any]:
        return self.within(rows, lambda: self._open[part.shard].texts(name, part.rows))

    def mapped(self, name: str) -> NDArray[np.uint8] | None:
        """Returns all rows of a field as one array, uint8 (N, row_bytes), read-only; None where they are not one."""
        return self._joined.rows if self._joined is not None and name == "images" else None

    def check_identity(self) -> FileIdentity:
        """Raises FileChangedError if an open shard is not what it was when its header was read."""
        with self._locked():
            for reader in self._open.values():
                reader.check_identity()
        return self.file.identity

    def close(self) -> None:
        """Closes what it opened; no gather may be running. Calling it again does nothing."""
        with self._locked():
            while self._open:
                number, reader = self._open.popitem()
                self._closed(reader, number)
            self._joined = None


class _Holding(AbstractContextManager[None]):
    """Within it shards are open, and nobody writes to them; see `RowReader.holding`.

    Of remote ones, the chunks of these rows of them, int64 (B,) from `Shards.locate`, are there and stay.
    """

    def __init__(
        self, reader: ShardedReader, numbers: list[int], shard: NDArray[np.int64], there: NDArray[np.int64]
    ) -> None:
        self._reader, self._numbers = reader, numbers
        self._rows = shard[: len(there)], there
        self._held: list[tuple[RowReader, FileIdentity]] = []  # with the identity of its file when it was held
        self._sparse: list[HeldOffWriters | nullcontext[None]] = []  # of copies of remote shards
        self._fetcher: ChunkFetcher | None = None  # that holds the chunks
        self._chunks: list[int] = []
        self._thread = 0

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        for left in range(_MOST_LOSSES, -1, -1):
            try:
                return self._enter()
            except CacheLeftError as exc:
                if self._reader.is_used_here or not left:
                    raise
                self._reader.leave(exc)

    def _enter(self) -> None:
        is_nested = self._reader.is_used_here
        readers = self._reader.taken(self._numbers)
        try:
            if (fetcher := self._reader.fetcher) is not None:
                self._hold_remote(fetcher, readers, is_nested)
                return
            for one in readers:
                one.held.__enter__()
                self._held.append((one, one.file.identity))
                self._held[-1] = one, one.check_before()
        except BaseException as exc:
            self.__exit__(type(exc))
            raise

    def _hold_remote(self, fetcher: ChunkFetcher, readers: Sequence[RowReader], is_nested: bool) -> None:
        """Holds the chunks; and their copies, as long as nobody is about to write to these."""
        if len(self._rows[1]):
            if self._reader.looks_up_chunks and not is_nested:  # in the copies
                self._reader.require_copies(self._numbers, readers)
            chunks = self._reader.chunks_of(*self._rows)
            self._reader.check_held(chunks)
            lap("reading")
            fetcher.hold(chunks)
            lap(NETWORK)
            self._fetcher, self._chunks = fetcher, chunks
        if is_nested:  # its data were there before, in files that are open
            return
        try:
            for one in readers if not fetcher.is_fetching else ():
                one.held_sparse.__enter__()
                self._sparse.append(one.held_sparse)
        except (FileChangedError, MissingFileError) as exc:  # in a fork, which opens it by its name
            raise CacheLostError(self._reader.file.path) from exc
        self._reader.require_copies(self._numbers, readers)

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        try:
            for one, before in self._held:
                if kind is None:
                    one.check_still(before)
                elif issubclass(kind, FastloadError):
                    one.check_identity()  # what was damaged may be another file
        finally:
            if self._fetcher is not None:
                self._fetcher.release(self._chunks)
                self._fetcher = None
            while self._sparse:
                self._sparse.pop().__exit__(None, None, None)
            while self._held:
                self._held.pop()[0].held.__exit__(None, None, None)
            self._reader.released(self._numbers, self._thread)


def open_rows(file: PackedFile, fields: Sequence[str], read: Read = "auto", **options: Any) -> RowReader:
    """Returns a reader of a file or of an index, with the options of `RowReader`; the caller closes it."""
    return (RowReader if file.shards is None else ShardedReader)(file, fields, read, **options)
