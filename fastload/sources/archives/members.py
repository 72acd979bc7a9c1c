"""Members of archives: where they lie, which names are refused, and the reader of their bytes."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FileChangedError, ImageError
from fastload.sources.tree import is_image, key_of
from fastload.system.files import read_bytes

STORED, DEFLATED = 0, 8
"""The compression methods of zip that are supported."""

PLAIN = 255
"""The method given to members of a tar: their bytes lie at the offset itself, without a local header."""

LOCAL_HEADER = struct.Struct("<4s22xHH")
"""The header before a zip member's bytes: signature, ..., lengths of the name and of the extra field that follow."""


class Member(NamedTuple):
    """Where a file lies in its archive. `offset` is that of the bytes in a tar, of the local header in a zip."""

    name: str
    offset: int
    stored_size: int
    size: int
    method: int
    crc: int


class FoundMembers:
    """Everything that listing an archive found, in the archive's order.

    Attributes:
        members: the files.
        folders: names of the folders.
        broken: (name, reason) of images that cannot be read.
        passed: (name, reason) of other files that cannot be read, which are passed over.
    """

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.folders: list[str] = []
        self.broken: list[tuple[str, str]] = []
        self.passed: list[tuple[str, str]] = []

    def refuse(self, name: str, reason: str) -> None:
        """Notes a member that cannot be read: as broken if it is an image, else as passed over."""
        (self.broken if is_image(name) else self.passed).append((name, reason))


@dataclass(frozen=True, eq=False)
class ArchiveFiles:
    """Reads the members of one archive, which is opened anew for each read: nothing to share or to close.

    Attributes:
        path: absolute path of the archive.
        archive_size: bytes of the archive when it was listed.
        archive_mtime_ns: its time of modification then.
        offsets: int64 (F,), offset of each member's bytes (tar) or local header (zip).
        stored_sizes: int64 (F,), bytes each member takes in the archive.
        sizes: int64 (F,), bytes of each file.
        methods: uint8 (F,), PLAIN, STORED or DEFLATED.
        crcs: uint32 (F,), CRC-32 of each file; unused in a tar.
    """

    path: str
    archive_size: int
    archive_mtime_ns: int
    offsets: NDArray[np.int64]
    stored_sizes: NDArray[np.int64]
    sizes: NDArray[np.int64]
    methods: NDArray[np.uint8]
    crcs: NDArray[np.uint32]

    def read(self, i: int) -> bytes:
        """Returns all bytes of member i; the CRC is checked if the archive has one."""
        method, size = int(self.methods[i]), int(self.sizes[i])
        with self._open() as fd:
            data = _pread(fd, int(self.stored_sizes[i]), self._start(fd, i))
        if method == PLAIN:
            return data
        if method == DEFLATED:
            try:
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
            except zlib.error as exc:
                raise ImageError(f"is damaged in the archive: {exc}") from exc
        if len(data) > size:
            raise ImageError(f"is damaged in the archive: it inflates to more than the {size} bytes stated there")
        if len(data) != size or zlib.crc32(data) != int(self.crcs[i]):
            raise ImageError("is damaged in the archive: its CRC-32 does not match")
        return data

    def read_head(self, i: int, size: int) -> bytes:
        """Returns the first `size` bytes of member i, unchecked."""
        stored = int(self.stored_sizes[i])
        with self._open() as fd:
            start = self._start(fd, i)
            if self.methods[i] != DEFLATED:
                return _pread(fd, min(size, stored), start)
            inflate, head, done = zlib.decompressobj(-zlib.MAX_WBITS), b"", 0
            while len(head) < size and done < stored and not inflate.eof:
                step = _pread(fd, min(max(size - len(head), 512), stored - done), start + done)
                done += len(step)
                try:
                    head += inflate.decompress(inflate.unconsumed_tail + step, size - len(head))
                except zlib.error as exc:
                    raise ImageError(f"is damaged in the archive: {exc}") from exc
            return head

    def take(self, indices: NDArray[np.integer[Any]]) -> ArchiveFiles:
        """Returns the members at these indices, in their order."""
        return replace(
            self,
            offsets=self.offsets[indices],
            stored_sizes=self.stored_sizes[indices],
            sizes=self.sizes[indices],
            methods=self.methods[indices],
            crcs=self.crcs[indices],
        )

    @contextmanager
    def _open(self) -> Iterator[int]:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise FileChangedError(
                f"{self.path}: the archive can no longer be opened: {exc.strerror}. Put it back and run again."
            ) from exc
        try:
            status = os.fstat(fd)
            if (status.st_size, status.st_mtime_ns) != (self.archive_size, self.archive_mtime_ns):
                raise FileChangedError(
                    f"{self.path}: the archive was written to or replaced since it was listed. "
                    "Leave it alone while it is read, and run again."
                )
            yield fd
        finally:
            os.close(fd)

    def _start(self, fd: int, i: int) -> int:
        offset = int(self.offsets[i])
        if self.methods[i] == PLAIN:
            return offset
        # The central directory does not say how long the local header's extra field is.
        signature, name_size, extra_size = LOCAL_HEADER.unpack(_pread(fd, LOCAL_HEADER.size, offset))
        if signature != b"PK\x03\x04":
            raise ImageError("is damaged in the archive: there is no member at its offset")
        return offset + LOCAL_HEADER.size + int(name_size) + int(extra_size)


def _pread(fd: int, size: int, offset: int) -> bytes:
    try:
        data = read_bytes(fd, size, offset)
    except OSError as exc:
        raise ImageError(f"cannot be read from the archive: {exc.strerror}") from exc
    if len(data) < size:
        raise ImageError("is damaged in the archive: it reaches beyond the end")
    return data


def why_unsafe(name: str) -> str:
    """Returns why a member's name is refused (it is empty, or points out of the archive); "" if it is not."""
    if not name:
        return "has no name"
    if name[:1] == "/" or (name[1:3] in (":/", ":\\") and name[0].isalpha()):
        return "has an absolute name, which points out of the archive"
    if ".." in name and ".." in name.split("/"):
        return "has `..` in its name, which may point out of the archive"
    return ""


def normal(name: str) -> str:
    """Returns a member's name without `./`, a doubled `/`, or one at either end."""
    if name[:1] not in ("/", ".") and "//" not in name and "/." not in name and name[-1:] != "/":
        return name
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def with_parents(folder: str) -> list[str]:
    """Returns a folder and those above it, outermost first; nothing for the archive itself."""
    parts = folder.split("/") if folder else []
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]


def cut_short(path: Path | str, name: str) -> str:
    """Returns the error message about a member that reaches beyond the end of its archive."""
    return (
        f"{path}: member {key_of(name)} reaches beyond the data: the archive is damaged or cut short. "
        "Copy or download it again."
    )
