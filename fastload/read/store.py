"""`Store`: the files that hold a dataset's rows, each open while it is used: one, or the shards of an index.

A file is opened when one of its rows is asked for, and the least recently used ones are closed. Within `holding` rows
their files are open, are those whose headers were read, and nobody writes to what is mapped. `OpenFile` is one of them,
`OpenFiles` says which are open, how often each is in use, and which one is closed for another.

Images of one size whose rows fill whole pages in each shard are mapped back to back into one reserved range of
addresses (`MappedShards`): there they are one array, as in a single file.
"""

from __future__ import annotations

import errno
import functools
import os
import resource
import sys
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FastloadError
from fastload.format.header import FileIdentity, PackedFile, read_shard
from fastload.format.shards import split_of
from fastload.read.hdf5_chunks import ChunkedRows
from fastload.read.identity import TouchedError, WriteLease, check_open, open_checked, until_untouched
from fastload.read.linear import MappedRows, MappedShards, PreadRows, Read, addresses_of, as_rows, resolve_read_mode
from fastload.read.row_errors import sample_error
from fastload.read.row_table import Located, LocatedIndex, RowTable
from fastload.system import native


class OpenFile:
    """Some fields of an open file. Threads may share it, and it survives a fork.

    Args:
        header: of a file that holds rows itself.
        fields: of any kind; the index of ragged ones among them.
        read: "map" copies from a mapping of the file; "pread" never maps it.
        cache_chunks, windows: as in `ChunkedRows`, for fields that are read chunk by chunk.

    Attributes:
        fd: its descriptor; valid until `close`.
        held: within it a mapping may be touched, after `check_before`.
        held_sparse: the same for a sparse file, which is also written to by who fetches its chunks.
        changed: called with the identity of the file, where only its times are others than before.

    Raises:
        MissingFileError, FileChangedError: the file is gone, or not the one whose header was read.
    """

    def __init__(
        self,
        header: PackedFile,
        fields: Sequence[str],
        read: Literal["map", "pread"],
        *,
        cache_chunks: int = 8,
        windows: bool = False,
        changed: Callable[[FileIdentity], None] = lambda _: None,
    ) -> None:
        self.header, self.changed = header, changed
        self.fd = open_checked(header)
        self._identity, self._is_sparse, self._is_mapped = header.identity, header.identity.mtime_ns < 0, read == "map"
        self.held: WriteLease | nullcontext[None] = nullcontext()
        self.held_sparse: WriteLease | nullcontext[None] = nullcontext()
        self._linear: MappedRows | PreadRows | None = None
        self._sources: dict[str, MappedRows | PreadRows | ChunkedRows] = {}
        try:
            if self._is_mapped and not self._is_sparse:
                self.held = WriteLease(header, self.fd)
            elif self._is_mapped:
                self.held_sparse = WriteLease(header, self.fd, waits=False)
            kinds = {name: header.fields[name] for name in fields}
            self._dtypes = {name: field.dtype.newbyteorder("=") for name, field in kinds.items()}
            chunked = [name for name, field in kinds.items() if field.chunked]
            if linear := [name for name in kinds if name not in chunked]:  # and bytes of ragged fields
                self._linear = (MappedRows if self._is_mapped else PreadRows)(self.fd, header, linear)
                self._sources = dict.fromkeys(linear, self._linear)
            if chunked:
                chunks = ChunkedRows(header, chunked, cache_chunks=cache_chunks, windows=windows)
                self._sources |= dict.fromkeys(chunked, chunks)
        except BaseException:
            self.close()
            raise

    def copy(self, name: str, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copies rows of a field that is not ragged, int64 (n,) in range, into an array (n, ...), C-contiguous.

        Raises:
            FormatError, ReadError: a chunk is damaged, or the system cannot read it.
            FileChangedError: the file is too short.
        """
        if out.dtype == self._dtypes[name]:
            self._sources[name].gather(rows, {name: out})
            return
        values = np.empty(
            (len(rows), *out.shape[1:]), self._dtypes[name]
        )  # texts of an index may be shorter in one shard
        self._sources[name].gather(rows, {name: values})
        out[...] = values

    def mapped(self, name: str) -> NDArray[np.uint8] | None:
        """Returns all rows of a field as mapped, uint8 (N, row_bytes), all bytes of a ragged one, (T,), read-only.

        Valid until `close`, and to be touched within `held`. None where they are not mapped.
        """
        return self._linear.rows.get(name) if isinstance(self._linear, MappedRows) else None

    def read_bytes(
        self, name: str, offsets: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[np.uint8]
    ) -> None:
        """Reads ranges of a ragged field's bytes, int64 (n,), one after another into `out`, uint8 (all bytes,).

        Raises FileChangedError if the file ends before a range does, ReadError if the system cannot read it.
        """
        assert isinstance(self._linear, PreadRows), "not mapped"
        self._linear.read_ranges(name, self.header.fields[name].base + offsets, lengths, out)

    def check_identity(self) -> FileIdentity:
        """Raises FileChangedError if the file was written to or truncated since its header was read.

        Where its header is equal all the same, `changed` is called. Returns its identity.
        """
        # For every batch: 2 us is little against its copy. This sees writes and truncation; another file under the same
        # name leaves the open one as it was.
        identity = check_open(self.header, self.fd)
        if identity != self._identity:
            self.changed(identity)
            self._identity = identity
        return identity

    def check_before(self) -> FileIdentity:
        """Returns the identity of the file, for `check_still`; before a mapping is touched it is looked at first.

        Touching a mapping of a truncated file kills the process. Data read by calls are checked only afterwards.
        """
        return self.check_identity() if self._is_mapped else self._identity

    def check_still(self, before: FileIdentity) -> None:
        """Raises FileChangedError or TouchedError if the file was written to before rows were copied, or meanwhile.

        Rows that were compared before are not when they are copied again, so nobody else would see it.
        """
        # Whoever has the file open for writing can write to it while it is mapped, too; a sparse one others fill.
        if self._is_mapped and (self._is_sparse or (isinstance(self.held, WriteLease) and self.held.holds)):
            return
        if self.check_identity() != before:
            raise TouchedError(f"{self.header.name}: was touched while rows were copied. Read them again.")

    def close(self) -> None:
        """Closes what it opened; no copy may be running. Calling it again does nothing."""
        for source in {*self._sources.values()}:
            source.close()
        self._sources, self._linear = {}, None
        for held in (self.held, self.held_sparse):
            if isinstance(held, WriteLease):
                held.close()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # While the interpreter ends, globals are gone, and the kernel closes the file.
        if getattr(self, "fd", -1) >= 0 and not _is_finalizing():
            self.close()


_MOST_OPEN = 64
"""Shards open at a time, unless the system allows fewer descriptors; a window of 16 chunks needs 32 or fewer."""


class OpenFiles:
    """Open files by number. Threads may share it, and it survives a fork.

    Attributes:
        opened: the files; the least recently used ones first.
        most: so many are open, unless more are in use.
    """

    def __init__(self, owner: Store) -> None:
        self._owner: Store = weakref.proxy(owner)  # whose end is the end of this, too
        self.opened: OrderedDict[int, OpenFile] = OrderedDict()
        self.most = max(4, min(_MOST_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16))
        self._reset()
        self._is_closed = False

    def _reset(self) -> None:
        self._lock, self._pid = threading.RLock(), os.getpid()
        self._users: dict[int, int] = {}
        self._threads = Counter[int]()  # that have taken files, and how often
        self._unused = threading.Condition(self._lock)  # no thread reads from open files
        self._draining = False

    @property
    def is_used_here(self) -> bool:
        """Whether this thread has taken files."""
        return threading.get_ident() in self._threads

    def take(self, numbers: Sequence[int]) -> list[OpenFile]:
        """Returns open files, which stay open until this thread releases them as often as they were taken."""
        with self._lock if self._pid == os.getpid() else self._after_fork():
            # Who has some open already gets others, too: `drain` waits until it has none.
            if not self.is_used_here:
                while self._draining:
                    self._unused.wait()
                self._owner.require_current()
            if self._is_closed:
                raise OSError(errno.EBADF, f"{os.strerror(errno.EBADF)}: the reader was closed")
            found = []
            for number in numbers:
                one = self.opened.get(number)
                if one is None:
                    one = self.opened[number] = self._owner.open_file(number)
                self.opened.move_to_end(number)
                found.append(one)
            for number in numbers:
                self._users[number] = self._users.get(number, 0) + 1
            self._threads[threading.get_ident()] += 1
            if len(self.opened) > self.most:
                idle = [number for number in self.opened if number not in self._users]
                for number in idle[: len(self.opened) - self.most]:
                    self._owner.close_file(number, self.opened.pop(number))
            return found

    def release(self, numbers: Sequence[int]) -> None:
        """Lets files be closed that this thread has taken."""
        with self._lock if self._pid == os.getpid() else self._after_fork():
            thread = threading.get_ident()
            self._threads[thread] -= 1
            if self._threads[thread] <= 0:
                del self._threads[thread]
            for number in numbers:
                left = self._users.get(number, 1) - 1
                if left:
                    self._users[number] = left
                else:
                    self._users.pop(number, None)
            if self._draining:
                self._unused.notify_all()

    def drain(self, then: Callable[[], None]) -> None:
        """Closes all files once no thread uses any, and calls `then`; who takes one meanwhile waits."""
        with self._lock if self._pid == os.getpid() else self._after_fork():
            while self._draining:
                self._unused.wait()
            self._draining = True
            try:
                while self._users:
                    self._unused.wait()
                self._close_all()
                then()
            finally:
                self._draining = False
                self._unused.notify_all()

    def close(self) -> None:
        """Closes all files for good. Calling it again does nothing."""
        with self._lock if self._pid == os.getpid() else self._after_fork():
            self._close_all()
            self._is_closed = True

    def _close_all(self) -> None:
        while self.opened:
            number, one = self.opened.popitem()
            self._owner.close_file(number, one)

    def _after_fork(self) -> threading.RLock:
        """Returns a new lock, as no thread is there to release what it held of the other."""
        self._reset()
        self._owner.forked(self.opened)
        return self._lock


ResultT = TypeVar("ResultT")


class Watcher(Protocol):
    """Is told which of a dataset's files are opened, touched and closed."""

    def opened(self, number: int, header: PackedFile) -> PackedFile: ...
    def begin(self, number: int, identity: FileIdentity) -> None: ...
    def closed(self, number: int) -> None: ...


class Store:
    """The files of a dataset. Threads may share it, and it survives a fork.

    Args:
        file: header of a file or index.
        fields: all that are read, the index of ragged ones among them.
        read: "map" copies from a mapping of the files; "pread" never maps them, so that truncating one cannot kill the
            process (SIGBUS); "auto" is one of them, see `resolve_read_mode`.
        cache_chunks, windows: as in `ChunkedRows`, for fields that are read chunk by chunk.
        watcher: of the files; `opened` returns the header to be used.

    Raises:
        OptionError: unknown `read`.
        MissingFileError, FileChangedError, FormatError: (within `holding`) a file is missing, or is not the one whose
            header was read, or that the index was made of.
    """

    def __init__(
        self,
        file: PackedFile,
        fields: Sequence[str],
        read: Read = "auto",
        *,
        cache_chunks: int = 8,
        windows: bool = False,
        watcher: Watcher | None = None,
    ) -> None:
        self.file, self.table, self.fields = file, RowTable(file), list(dict.fromkeys(fields))
        self.read, self._watcher = resolve_read_mode(file.place, read), watcher
        self._options: dict[str, Any] = {"cache_chunks": cache_chunks, "windows": windows}
        self.files = OpenFiles(self)
        # Of each file that is open, where the first row of a field, or byte of a ragged one, is mapped to: int64 (S,).
        count = len(file.shards.names)
        self._bases = {name: np.zeros(count, np.int64) for name in self.fields if self._is_mapped(name)}
        self.joined: MappedShards | None = None
        if "images" in self.fields and self.read == "map" and not file.holds_rows:
            self.joined = MappedShards.of(file)

    def _is_mapped(self, name: str) -> bool:
        """Whether the rows of a field are mapped in each file, and mean the same in all."""
        field = self.file.fields[name]
        means_same = self.file.holds_rows or (field.dtype.kind != "S" and name != "split")
        return self.read == "map" and means_same and not field.chunked and field.row_bytes > 0

    def holding(self, located: Located, fields: Collection[str] | None = None) -> AbstractContextManager[None]:
        """Returns a context within which rows can be copied; may be nested.

        Of remote shards the chunks of some fields are there, by default of all.

        Raises TouchedError, at its end, where they are to be copied again: see `within`.
        """
        return Held(self, located)

    def within(self, located: Located, work: Callable[[], ResultT], fields: Collection[str] | None = None) -> ResultT:
        """Returns what some work on these rows returns, done within `holding` them.

        It is done again where a file was touched meanwhile.
        """

        def held() -> ResultT:
            with self.holding(located, fields):
                return work()

        return until_untouched(held)

    def copy(self, name: str, located: Located, out: NDArray[Any]) -> None:
        """Copies rows of a field that is not ragged into an array (B, ...), C-contiguous; within `holding` them.

        The numbers of splits are the dataset's, as they may mean others in each shard.
        """
        if name == "split" and self.file.is_index:
            out[...] = split_of(self.file.splits, located.rows)
            return
        if len(located.numbers) == 1:
            self.files.opened[located.numbers[0]].copy(name, located.there, out)
            return
        if len(located) and name in self._bases and native.library() is not None:
            flat = as_rows(out)
            native.gather(self.addresses(name, located), flat)
            return
        for shard, rows, at in located.parts:
            first, stop = int(at[0]), int(at[-1]) + 1
            if stop - first == len(at):
                self.files.opened[shard].copy(name, rows, out[first:stop])
            else:
                values = np.empty((len(at), *out.shape[1:]), out.dtype)
                self.files.opened[shard].copy(name, rows, values)
                out[at] = values

    def columns(self, rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]]) -> None:
        """Copies rows of any number of files, int64 (B,), unchecked, into arrays (B, ...) of fields that are no pixels.

        Raises IndexError, FileChangedError, FormatError and ReadError as reading does.
        """

        def copy(located: Located, arrays: Mapping[str, NDArray[Any]]) -> None:
            for name, out in arrays.items():
                self.copy(name, located, out)

        self.fill(rows, outs, copy, outs)

    def fill(
        self,
        rows: NDArray[np.int64],
        outs: Mapping[str, NDArray[Any]],
        work: Callable[[Located, Mapping[str, NDArray[Any]]], None],
        fields: Collection[str] | None = None,
    ) -> None:
        """Has some work fill arrays (B, ...) for rows of any number of files, int64 (B,), done `within` them.

        If they lie in more files than may be open at a time, it is done for some rows after others.
        """
        located = self.table.locate(rows)
        if len(located.numbers) <= self.files.most:
            return self.within(located, functools.partial(work, located, outs), fields)
        for at in located.groups(self.files.most):
            some = {name: np.empty((len(at), *out.shape[1:]), out.dtype) for name, out in outs.items()}
            part = located.some(at)
            self.within(part, functools.partial(work, part, some), fields)
            for name, values in some.items():
                outs[name][at] = values

    def maps(self, name: str) -> bool:
        """Whether `addresses` knows where the rows of a field lie, or the bytes of a ragged one."""
        return name in self._bases

    def addresses(self, name: str, located: Located) -> NDArray[np.int64]:
        """Returns where mapped rows of a field that is not ragged begin in memory, int64 (B,)."""
        return addresses_of(self._bases[name], located.shard, located.there, self.file.fields[name].row_bytes)

    def encoded(
        self, name: str, index: LocatedIndex, memory: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8] | None]:
        """Returns where the bytes of ragged rows begin in memory, int64 (n,), and the array that has them.

        They lie one after another in the array: the one given, uint8 (all bytes,), or a new one. None: they are mapped.

        Raises FileChangedError if a file ends before a row does, ReadError if the system cannot read one.
        """
        if memory is None and name in self._bases:
            return self._bases[name][index.shard] + index.offset, None
        ends = np.cumsum(index.bytes)
        memory = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8) if memory is None else memory
        begins = ends - index.bytes
        for number in np.unique(index.shard).tolist():
            at = np.flatnonzero(index.shard == number)
            one, lengths = self.files.opened[number], index.bytes[at]
            if (flat := one.mapped(name)) is not None:
                for start, length, begin in zip(index.offset[at], lengths, begins[at], strict=True):
                    memory[begin : begin + length] = flat[start : start + length]
            elif len(at) == len(index):
                one.read_bytes(name, index.offset, lengths, memory)
            else:
                some = np.empty(int(lengths.sum()), np.uint8)
                one.read_bytes(name, index.offset[at], lengths, some)
                for begin, data in zip(begins[at], np.split(some, np.cumsum(lengths)[:-1]), strict=True):
                    memory[begin : begin + len(data)] = data
        return memory.ctypes.data + begins, memory

    def whole(self, name: str) -> NDArray[np.uint8] | None:
        """Returns all rows of a field as one mapped array, uint8 (N, row_bytes), or all bytes of a ragged one, (T,).

        None where they are not one. To be touched within `holding`, and valid until `close`.
        """
        if self.file.holds_rows:
            with self.holding(self.table.of_shard(0, np.empty(0, np.int64))):
                return self.files.opened[0].mapped(name) if name in self._bases else None
        return self.joined.rows if self.joined is not None and name == "images" else None

    def damaged(self, row: int, reason: str) -> FastloadError:
        """Returns the error to raise for a row that is not what was packed, or cannot be decoded."""
        return sample_error(self.file, row, reason)

    def require_current(self) -> None:
        """Raises an error where no file may be opened as things are; files of this machine always may."""

    def open_file(self, number: int) -> OpenFile:
        """Opens a file, within `OpenFiles.take`; one thread at a time does."""
        header = read_shard(self.file, number)
        if (watcher := self._watcher) is None:
            one = OpenFile(header, self.fields, self.read, **self._options)
        else:
            header = watcher.opened(number, header)
            changed = functools.partial(watcher.begin, number)
            one = OpenFile(header, self.fields, self.read, changed=changed, **self._options)
        if self.joined is not None:
            self.joined.join(number, one.fd)
        for name, bases in self._bases.items():
            mapped = one.mapped(name)
            assert mapped is not None, "it lies in one piece in every file"
            bases[number] = mapped.ctypes.data
        return one

    def close_file(self, number: int, file: OpenFile) -> None:
        """Closes a file that nobody uses."""
        file.close()
        if self._watcher is not None:
            self._watcher.closed(number)

    def forked(self, opened: OrderedDict[int, OpenFile]) -> None:
        """Called in a fork: it reads from the files that its parent has open."""

    def close(self) -> None:
        """Closes all files; nothing may be held. Calling it again does nothing."""
        self.files.close()
        self.joined = None


class Held(AbstractContextManager[None]):
    """Within it the files of rows are open, and nobody writes to them; see `Store.holding`."""

    def __init__(self, store: Store, located: Located) -> None:
        self._store, self._located = store, located
        self._held: list[tuple[OpenFile, FileIdentity]] = []  # with the identity of each when it was held

    def __enter__(self) -> None:
        opened = self._store.files.take(self._located.numbers)
        try:
            for one in opened:
                one.held.__enter__()
                self._held.append((one, one.header.identity))
                self._held[-1] = one, one.check_before()
        except BaseException as exc:
            self.__exit__(type(exc))
            raise

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        try:
            for one, before in self._held:
                if kind is None:
                    one.check_still(before)
                elif issubclass(kind, FastloadError):
                    one.check_identity()  # what was damaged may be another file
        finally:
            while self._held:
                self._held.pop()[0].held.__exit__(None, None, None)
            self._store.files.release(self._located.numbers)
