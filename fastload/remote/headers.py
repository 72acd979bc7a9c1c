"""Fetches the HDF5 metadata and the small fields of a remote packed file: all but the pixels, wherever they lie."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import xxhash

from fastload.errors import FastloadError, FormatError
from fastload.format.header import PackedFile, check_header, open_hdf5, read_header
from fastload.remote.cache import sparse_memory
from fastload.remote.chunks import TAIL_BYTES, Range, extent_of, is_large, joined_ranges, without
from fastload.remote.client import Client, ObjectFile, agreed
from fastload.system.files import read_bytes, write_at

_WHOLE_BYTES = 16 * 2**20  # objects up to this size are fetched whole
_LOOK_BYTES = 256 * 2**10  # fetched at a time while a header is looked for
UNREADABLE = (FastloadError, OSError, RuntimeError, KeyError, ValueError, TypeError)  # h5py's of damaged metadata


def fetch_header(client: Client, key: str, size: int, etag: str | None, path: Path) -> PackedFile:
    """Returns the header of a packed file or index that is an object, from a new sparse copy of it at `path`.

    The copy has all but the large fields. FormatError: it is no HDF5 file.
    """
    memory, ranges = fetch_into_memory(client, key, size, etag)
    try:
        with sparse_file(path, size) as fd:
            copy_ranges(memory, fd, ranges)
    finally:
        os.close(memory)
    return read_header(path)


class HeaderAnswer(NamedTuple):
    """All but the large fields of an object as they came once: in a file in memory, to be closed, and their ranges.

    `problem`: with what came, which has that XXH3-64.
    """

    memory: int
    ranges: list[Range]
    problem: Exception | None
    digest: int


def header_answer(url: str, size: int, there: Sequence[Range], read: Callable[[int, int], Any]) -> HeaderAnswer:
    """Returns the header of an object of so many bytes, looked for from what lies in some ranges of it on."""
    digest, memory = xxhash.xxh3_64(), sparse_memory(size)

    def fetch(begin: int, end: int) -> Any:
        data = read(begin, end)
        digest.update(data)
        return data

    try:
        for begin, end in there if size else ():
            write_at(memory, fetch(begin, end), begin)
        return HeaderAnswer(memory, look_for_header(url, memory, there, fetch), None, digest.intdigest())
    except FormatError as exc:
        return HeaderAnswer(memory, [], exc.with_traceback(None), digest.intdigest())
    except BaseException:
        os.close(memory)
        raise


def agreed_header(
    url: str,
    whose: str,
    answer: Callable[[bool], HeaderAnswer],
    problem: Callable[[int], Exception | None],
) -> tuple[HeaderAnswer, Exception | None]:
    """Returns a header that is undamaged, or came twice the same, and the problem with it then, as `agreed`.

    `problem`: returns the problem with a file in memory. FormatError: it is none, or the metadata cannot be read.
    """
    opened, kept = list[int](), -1

    def fetch(anew: bool) -> HeaderAnswer:
        found = answer(anew)
        opened.append(found.memory)
        return found

    try:
        found, wrong = agreed(url, whose, fetch, lambda one: one.problem or problem(one.memory), lambda one: one.digest)
        if found.problem is not None:
            raise found.problem
        kept = found.memory
        return found, wrong
    finally:
        for fd in opened:
            if fd != kept:
                os.close(fd)


def fetch_into_memory(client: Client, key: str, size: int, etag: str | None) -> tuple[int, list[Range]]:
    """Returns a file in memory with all but the large fields of an object, to be closed, and the ranges of these.

    Pixels that come along are no part of them: on a disk they would take room that nobody has accounted for. Where the
    header does not fit its digest, all of it is asked for again.
    """
    url = client.url_of(key)
    there = [(0, size)] if size <= _WHOLE_BYTES else [(0, 4096), (size - TAIL_BYTES, size)]

    def answer(anew: bool) -> HeaderAnswer:
        def read(begin: int, end: int) -> Any:
            return client.read_range(key, begin, end, etag=etag, anew=anew)[0]

        return header_answer(url, size, there, read)

    found, _ = agreed_header(url, url, answer, header_problem)
    return found.memory, found.ranges


def header_problem(memory: int) -> Exception | None:
    """Returns the problem with the header of a packed file or index in memory; None: it fits its digest."""
    path = Path(f"/proc/self/fd/{memory}")
    try:
        file = read_header(path)
        if not file.is_index:
            with open_hdf5(path) as hdf5:
                check_header(file, hdf5)
    except UNREADABLE as exc:
        return exc.with_traceback(None)
    return None


def copy_ranges(source: int, target: int, ranges: Sequence[Range]) -> None:
    """Copies ranges from one open file to another."""
    for begin, end in ranges:
        write_at(target, read_bytes(source, end - begin, begin), begin)


@contextmanager
def sparse_file(path: Path, size: int) -> Iterator[int]:
    """Makes an empty file of that size, and yields its descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size)
        yield fd
    finally:
        os.close(fd)


def header_ranges(path: Path) -> list[Range]:
    """Returns the ranges of a file that hold all but its large fields, from the metadata that is there."""
    with open_hdf5(path) as file:
        return _ranges_of(file, path.stat().st_size)


def _ranges_of(file: h5py.File, size: int) -> list[Range]:
    """Returns the ranges of a packed file that hold all but its large fields; of an index all of it."""
    return [(0, size)] if "fastload_index" in file.attrs else _around_large(file, size)


def _around_large(file: h5py.File, size: int) -> list[Range]:
    large: list[Range] = []
    for name in file:
        item = file[name]
        if not isinstance(item, h5py.Dataset) or item.is_virtual or not item.shape:
            continue
        extent = extent_of(item)
        if is_large(name, extent.row_bytes):
            large += extent.whole()
    return without([(0, size)], joined_ranges(large, 0))


class _FetchingFile(ObjectFile):
    """A sparse copy as a file that HDF5 reads: ranges that are not in it yet are fetched, some at a time."""

    def __init__(self, fd: int, size: int, there: Sequence[Range], fetch: Any) -> None:
        super().__init__(size)
        self._fd, self._size, self.there, self._fetch = fd, size, list(there), fetch

    def bytes_at(self, first: int, count: int) -> bytes:
        for begin, stop in without([(first, first + count)], self.there):
            look = begin // _LOOK_BYTES * _LOOK_BYTES, min(-(-stop // _LOOK_BYTES) * _LOOK_BYTES, self._size)
            for some in without([look], self.there):
                write_at(self._fd, self._fetch(*some), some[0])
            self.there = joined_ranges([*self.there, look], 0)
        return read_bytes(self._fd, count, first)


def look_for_header(url: str, fd: int, there: Sequence[Range], fetch: Any) -> list[Range]:
    """Fetches all but the large fields of an object into its sparse copy; returns the ranges of that.

    Of an index, all of it.
    """
    size = os.fstat(fd).st_size
    with suppress(*UNREADABLE):  # faster, where all of it is there
        if (ranges := header_ranges(Path(f"/proc/self/fd/{fd}"))) and not without(ranges, there):
            return ranges
    looked, problem = _FetchingFile(fd, size, there, fetch), None
    try:
        with h5py.File(looked, "r") as file:
            for item in (file, *(file[name] for name in file)):
                for name in item.attrs:
                    item.attrs.get_id(name)
            ranges = _ranges_of(file, size)
    except UNREADABLE as exc:
        problem = (
            exc
            if isinstance(exc, FastloadError)
            else FormatError(
                f"{url}: not an HDF5 file, or its metadata is damaged ({exc}). Upload it again, or name a file that "
                f"`fastload pack` made."
            )
        )
    if problem is not None:  # out here: h5py's frames, kept by a traceback, would crash the interpreter when it ends
        raise problem.with_traceback(None)
    for begin, end in without(ranges, looked.there):
        write_at(fd, fetch(begin, end), begin)
    return ranges
