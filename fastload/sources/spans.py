"""Readers of pieces of files: members of archives, images inside tables; and several such readers joined to one.

Nothing stays open: a file is opened for each read, and refused if it is not, or no longer, as it was listed.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import (
    FileChangedError,
    ImageError,
    ObjectMissingError,
    PackError,
    RemoteError,
    ReplacedError,
    SourceError,
)
from fastload.remote.backend import ObjectInfo
from fastload.remote.cloud import split
from fastload.remote.ranges import ObjectRange, client_of, read_range
from fastload.remote.urls import ObjectPath, Remote, remote_in_force
from fastload.sources.listing import Files
from fastload.system.files import read_bytes, write_all

HEAD_BYTES = 2**15
"""Bytes of an object, or of a piece of one, that are fetched ahead for an image's header: with most thumbnails."""

_S = 10**9


def is_as_listed(status: os.stat_result, num_bytes: int, mtime_ns: int) -> bool:
    """Whether a file is unchanged since it was listed, by its size and time of modification.

    A listing keeps the same two of each sample, and an interrupted pack continues with what has the same. What a
    program wrote with both unchanged is not seen.
    """
    return (status.st_size, status.st_mtime_ns) == (num_bytes, mtime_ns)


def without_cache(remote: Remote) -> Remote:
    """Returns how objects are requested: their cached bytes are nobody else's concern."""
    return replace(remote, cache=None, max_bytes=None)


def ranges_of(reader: object, indices: NDArray[np.integer[Any]], *, heads: bool) -> list[ObjectRange]:
    """Returns the ranges of objects that will be read of samples, or for their headers; none for other readers."""
    found: list[ObjectRange] = reader.ranges(indices, heads=heads) if hasattr(reader, "ranges") else []
    return found


@dataclass(frozen=True)
class ListedFile:
    """A file as it was when it was listed.

    Where pieces of it lie was found out then. So another ctime, which whoever writes to it cannot set back, is a
    change, too, unlike for an image that is a file of its own.
    """

    path: str  # absolute path of the file
    num_bytes: int  # bytes of the file
    mtime_ns: int  # its time of modification
    ctime_ns: int = -1  # -1: not known, as on another machine, which has a copy

    @classmethod
    def of(cls, path: str | Path, status: os.stat_result | None = None) -> ListedFile:
        """Returns the file as it is now, or as it was at an earlier `os.stat`."""
        status = status or os.stat(path)
        return cls(os.path.abspath(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def compact(self) -> ListedFile:
        """Returns the file for another machine."""
        return replace(self, ctime_ns=-1)

    def require_unchanged(self, fd: int | None = None) -> None:
        """Refuses the file (by its descriptor, if it is open already) if it is gone or its size or time has changed.

        Raises:
            FileChangedError: it has.
        """
        try:
            status = os.stat(self.path if fd is None else fd)
        except OSError as exc:
            raise self.gone(exc) from exc
        if not is_as_listed(status, self.num_bytes, self.mtime_ns) or self.ctime_ns not in (-1, status.st_ctime_ns):
            raise FileChangedError(
                f"{self.path}: was written to or replaced since it was listed, or got other permissions or a link. "
                f"Leave it alone while it is read, and run again."
            )

    @contextmanager
    def open(self) -> Iterator[int]:
        """Opens the file for reading, and gives its descriptor.

        Raises:
            FileChangedError: it has changed or is gone, or changed before the end.
        """
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise self.gone(exc) from exc
        try:
            self.require_unchanged(fd)
            yield fd
            self.require_unchanged(fd)
        finally:
            os.close(fd)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Returns bytes of the open file.

        Raises:
            ImageError: they cannot be read, or reach beyond its end.
        """
        try:
            data = read_bytes(fd, size, offset)
        except OSError as exc:
            raise ImageError(f"cannot be read from {self.path}: {exc.strerror}") from exc
        if len(data) < size:
            raise ImageError(f"reaches beyond the end of {self.path}")
        return data

    def gone(self, exc: OSError) -> FileChangedError:
        """Returns the error about a file that can no longer be opened."""
        return FileChangedError(f"{self.path}: can no longer be opened: {exc.strerror}. Put it back, or list again.")


def changed_ns(info: ObjectInfo) -> int:
    """Returns what stands for an object's time of modification in listings, plans and journals.

    It is the second in which it was written, and a digest of its ETag as the fraction: S3 gives whole seconds only.
    """
    return info.modified_ns // _S * _S + xxhash.xxh3_64_intdigest((info.etag or "").encode()) % _S


@dataclass(frozen=True)
class ListedObject:
    """An object that is read in pieces, as it was when it was listed; used like a `ListedFile`."""

    path: str  # its URL
    num_bytes: int
    mtime_ns: int  # see `changed_ns`
    etag: str | None
    remote: Remote

    @classmethod
    def of(cls, path: ObjectPath) -> ListedObject:
        """Returns the object as it is now; raises as `Client.head`."""
        client, key = client_of(path)
        info = client.head(key)
        return cls(str(path), info.num_bytes, changed_ns(info), info.etag, without_cache(remote_in_force()))

    @contextmanager
    def open(self) -> Iterator[int]:
        """Gives what `read` takes for a descriptor. FileChangedError: the object was replaced or is gone."""
        try:
            yield -1
        except (ReplacedError, ObjectMissingError) as exc:
            fix = "Leave it alone while it is read, and run again."
            raise FileChangedError(f"{self.path}: was replaced or removed since it was listed. {fix}") from exc
        except RemoteError as exc:
            raise PackError(str(exc)) from exc  # no fault of the sample that is read

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Returns bytes of the object; ImageError: they reach beyond its end."""
        if offset + size > self.num_bytes:
            raise ImageError(f"reaches beyond the end of {self.path}")
        return read_range(self.range(offset, size)) if size else b""

    def range(self, offset: int, size: int) -> ObjectRange:
        """Returns so many bytes, at most to the object's end, for `announce`."""
        url, key = split(self.path)
        return ObjectRange(url, self.remote, key, offset, min(offset + size, self.num_bytes), self.etag)


@dataclass(frozen=True, eq=False)
class FileSpans:
    """Reads pieces of one file as they lie in it: the members of a tar, the images in an Arrow file."""

    file: ListedFile | ListedObject  # the file
    offsets: NDArray[np.int64]  # int64 (F,), where each piece begins
    sizes: NDArray[np.int64]  # int64 (F,), bytes of each piece
    owner: object = field(default=None, repr=False)  # keeps a temporary file alive; not pickled

    def read(self, i: int) -> bytes:
        return self.read_head(i, int(self.sizes[i]))

    def read_head(self, i: int, size: int) -> bytes:
        with self.file.open() as fd:
            return self.file.read(fd, min(size, int(self.sizes[i])), int(self.offsets[i]))

    def ranges(self, indices: NDArray[np.integer[Any]], *, heads: bool) -> list[ObjectRange]:
        """Returns the ranges that are read for pieces of an object, as `BucketFiles.ranges`; none for a local file."""
        if isinstance(self.file, ListedFile):
            return []
        sizes = np.minimum(self.sizes[indices], HEAD_BYTES) if heads else self.sizes[indices]
        spans = zip(self.offsets[indices].tolist(), sizes.tolist(), strict=True)
        return [self.file.range(offset, size) for offset, size in spans]

    def take(self, indices: NDArray[np.integer[Any]]) -> FileSpans:
        return replace(self, offsets=self.offsets[indices], sizes=self.sizes[indices])

    def compact(self) -> FileSpans | HeldFiles:
        """Returns the reader for another machine, which sees no temporary file: what lies in one goes along."""
        if self.owner is None:
            return self
        return HeldFiles.of([self.read(i) for i in range(len(self.sizes))])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "owner": None}


class UnpackedImages:
    """A temporary file that images are unpacked to. It has no name, so it vanishes however the process ends.

    Other processes open it through /proc. On systems without /proc it has a name, and is removed with this object.
    """

    def __init__(self, num_bytes: int, dataset_folder: Path) -> None:
        """Creates the file in the first folder with room for it; the last that is tried is the dataset's."""
        last = remote_in_force().cache_folder() if isinstance(dataset_folder, ObjectPath) else dataset_folder
        folders = [os.environ.get("TMPDIR", ""), "/var/tmp", tempfile.gettempdir(), str(last)]
        folder = next((folder for folder in folders if folder and _has_room(folder, num_bytes)), None)
        if folder is None:
            raise SourceError(
                f"{dataset_folder}: its images are unpacked to a temporary file of {num_bytes / 1e9:.2f} GB first, for "
                f"which there is no room in {', '.join(dict.fromkeys(filter(None, folders)))}. Name a folder with room "
                "in the environment variable TMPDIR."
            )
        self._fd, self._path = tempfile.mkstemp(prefix="fastload-", dir=folder)
        self._end = 0
        if os.path.isdir("/proc/self/fd"):
            os.unlink(self._path)
            self._path = f"/proc/{os.getpid()}/fd/{self._fd}"
        weakref.finalize(self, _let_go, self._fd, self._path, os.getpid())

    def write(self, data: memoryview) -> int:
        """Appends data, and returns the offset at which it begins."""
        start = self._end
        try:
            write_all(self._fd, data)
        except OSError as exc:
            fix = "Name a folder with room in the environment variable TMPDIR."
            raise SourceError(f"the temporary file for its images cannot be written: {exc.strerror}. {fix}") from exc
        self._end += len(data)
        return start

    def spans(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> FileSpans:
        """Returns the reader of written pieces. Nothing may be written afterwards."""
        return FileSpans(ListedFile.of(self._path, os.fstat(self._fd)), offsets, sizes, self)


def _let_go(fd: int, path: str, pid: int) -> None:
    os.close(fd)
    if not path.startswith("/proc/") and os.getpid() == pid:  # not in a child that was forked
        os.unlink(path)


def _has_room(folder: str, num_bytes: int) -> bool:
    try:
        status = os.statvfs(folder)
        return os.access(folder, os.W_OK) and status.f_bavail * status.f_frsize > num_bytes + 2**26
    except OSError:
        return False


@dataclass(frozen=True, eq=False)
class Paths:
    """Many paths as one bytes object, small and quick to pickle."""

    joined: bytes  # one after another
    ends: NDArray[np.int64]  # int64 (F,), where each ends

    @classmethod
    def of(cls, paths: Sequence[bytes]) -> Paths:
        """Returns these paths."""
        return cls(b"".join(paths), np.cumsum([len(path) for path in paths], dtype=np.int64))

    def __getitem__(self, i: int) -> bytes:
        return self.joined[self.ends[i - 1] if i else 0 : self.ends[i]]

    def take(self, indices: NDArray[np.integer[Any]]) -> Paths:
        return Paths.of([self[i] for i in indices.tolist()])


@dataclass(frozen=True, eq=False)
class HeldFiles:
    """Files whose bytes are in memory."""

    data: NDArray[np.uint8]  # uint8 (bytes of all,), one file after another
    ends: NDArray[np.int64]  # int64 (F,), where each ends

    @classmethod
    def of(cls, files: Sequence[bytes]) -> HeldFiles:
        """Returns the reader of files with these bytes."""
        return cls(np.frombuffer(b"".join(files), np.uint8), np.cumsum([len(file) for file in files], dtype=np.int64))

    def read(self, i: int) -> bytes:
        return self.data[self.ends[i - 1] if i else 0 : self.ends[i]].tobytes()

    def read_head(self, i: int, size: int) -> bytes:
        return self.read(i)[:size]

    def take(self, indices: NDArray[np.integer[Any]]) -> HeldFiles:
        return HeldFiles.of([self.read(i) for i in indices.tolist()])


Part = TypeVar("Part")


@dataclass(frozen=True, eq=False)
class Joined(Generic[Part]):
    """Several readers as one sequence: shards, train and val archives, images and masks."""

    parts: tuple[Part, ...]  # the readers
    part: NDArray[np.int32]  # int32 (N,), the part that each sample belongs to
    index: NDArray[np.int64]  # int64 (N,), the index of each sample in its part

    @classmethod
    def of(cls, parts: Sequence[tuple[Part, int]]) -> Self:
        """Returns all parts, one behind the other; each is given with its number of samples."""
        counts = [count for _, count in parts]
        return cls(
            parts=tuple(reader for reader, _ in parts),
            part=np.repeat(np.arange(len(parts), dtype=np.int32), counts),
            index=np.concatenate([np.zeros(0, np.int64), *(np.arange(count) for count in counts)]),
        )

    def take(self, indices: NDArray[np.integer[Any]]) -> Self:
        return replace(self, part=self.part[indices], index=self.index[indices])

    def compact(self) -> Self:
        """Returns the reader of the same samples without what only others need."""
        parts, index = [], np.zeros_like(self.index)
        used, part = np.unique(self.part, return_inverse=True)
        for number in used.tolist():
            reader: Any = self.parts[number]
            here = self.part == number
            rows, index[here] = np.unique(self.index[here], return_inverse=True)
            parts.append(reader.take(rows))
        return type(self)(parts=tuple(parts), part=part.astype(np.int32), index=index)


class JoinedFiles(Joined[Files]):
    """Reads the files of several folders or archives as one sequence."""

    def read(self, i: int) -> bytes:
        return self.parts[int(self.part[i])].read(int(self.index[i]))

    def read_head(self, i: int, size: int) -> bytes:
        return self.parts[int(self.part[i])].read_head(int(self.index[i]), size)

    def ranges(self, indices: NDArray[np.integer[Any]], *, heads: bool) -> list[ObjectRange]:
        """Returns the ranges that are read of files behind URLs, as `BucketFiles.ranges`."""
        if not any(hasattr(part, "ranges") for part in self.parts):
            return []
        return [
            one
            for i in indices.tolist()
            for one in ranges_of(self.parts[int(self.part[i])], self.index[i : i + 1], heads=heads)
        ]
