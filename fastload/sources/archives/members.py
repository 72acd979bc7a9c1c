"""Members of archives: where they lie, which names are refused, and the reader of a zip's members."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError
from fastload.sources.spans import HEAD_BYTES, FileSpans, ListedFile
from fastload.sources.tree import is_image, key_of

if TYPE_CHECKING:
    from fastload.remote.ranges import ObjectRange

STORED, DEFLATED = 0, 8
"""The compression methods of zip that are supported."""

LOCAL_HEADER = struct.Struct("<4s22xHH")
"""The header before a zip member's bytes: signature, ..., lengths of the name and of the extra field that follow."""


_NAME_BYTES = 512  # of a name and an extra field, as a rule

# Longer names than any file system takes are kept out: each folder in a name takes as much memory as the name itself.
_MOST_CHARACTERS, _MOST_FOLDERS = 4096, 128


class Member(NamedTuple):
    """Where a file lies in its archive. `offset`: of the bytes in a tar, of the local header in a zip."""

    name: str
    offset: int
    stored_size: int
    size: int
    method: int = STORED
    crc: int = 0


@dataclass
class FoundMembers:
    """Everything that listing an archive found, in the archive's order."""

    members: list[Member] = field(default_factory=list)  # the files
    folders: list[str] = field(default_factory=list)  # names of the folders
    broken: list[tuple[str, str]] = field(default_factory=list)  # (name, reason) of images that cannot be read
    passed: list[tuple[str, str]] = field(default_factory=list)  # the same of other files, which are passed over
    notes: list[str] = field(default_factory=list)  # sentences about the names

    def refuse(self, name: str, reason: str) -> None:
        """Notes a member that cannot be read: as broken if it is an image, else as passed over."""
        shown = name if len(name) <= _MOST_CHARACTERS else f"{name[:100]} [...]"
        (self.broken if is_image(name) else self.passed).append((shown, reason))


@dataclass(frozen=True, eq=False)
class ZipFiles:
    """Reads the members of one zip."""

    stored: FileSpans  # from the local header on; its sizes are those in the archive
    sizes: NDArray[np.int64]  # int64 (F,), bytes of each file
    methods: NDArray[np.uint8]  # uint8 (F,), STORED or DEFLATED
    crcs: NDArray[np.uint32]  # uint32 (F,), CRC-32 of each file

    def read(self, i: int) -> bytes:
        """Returns all bytes of member i, checked by its CRC."""
        size = int(self.sizes[i])
        with self.stored.file.open() as fd:
            data = self.stored.file.read(fd, int(self.stored.sizes[i]), self._start(fd, i))
        if self.methods[i] == DEFLATED:
            data = _inflated(data, size + 1)
        if len(data) > size:
            raise ImageError(f"is damaged in the archive: it inflates to more than the {size} bytes stated there")
        if len(data) != size or zlib.crc32(data) != int(self.crcs[i]):
            raise ImageError("is damaged in the archive: its CRC-32 does not match")
        return data

    def read_head(self, i: int, size: int) -> bytes:
        """Returns the first `size` bytes of member i, unchecked; never more than its size is said to be."""
        size, stored = min(size, int(self.sizes[i])), int(self.stored.sizes[i])
        with self.stored.file.open() as fd:
            start = self._start(fd, i)
            if self.methods[i] != DEFLATED:
                return self.stored.file.read(fd, min(size, stored), start)
            # So many bytes mostly inflate to the wanted ones; else all of them are read.
            some = min(stored, size + 512)
            head = _inflated(self.stored.file.read(fd, some, start), size)
            if len(head) < size and some < stored:
                head = _inflated(self.stored.file.read(fd, stored, start), size)
            return head

    def ranges(self, indices: NDArray[np.integer[Any]], *, heads: bool) -> list[ObjectRange]:
        """Returns the ranges read for members of a zip behind a URL, local headers too, as `BucketFiles.ranges`."""
        spans, found = self.stored, list[Any]()
        if not isinstance(spans.file, ListedFile):
            for i in indices.tolist():
                size = min(HEAD_BYTES, int(spans.sizes[i])) if heads else int(spans.sizes[i])
                found.append(spans.file.range(int(spans.offsets[i]), size + LOCAL_HEADER.size + _NAME_BYTES))
        return found

    def take(self, indices: NDArray[np.integer[Any]]) -> ZipFiles:
        return ZipFiles(self.stored.take(indices), self.sizes[indices], self.methods[indices], self.crcs[indices])

    def _start(self, fd: int, i: int) -> int:
        # The central directory does not say how long the local header's extra field is.
        offset = int(self.stored.offsets[i])
        header = LOCAL_HEADER.unpack(self.stored.file.read(fd, LOCAL_HEADER.size, offset))
        if header[0] != b"PK\x03\x04":
            raise ImageError("is damaged in the archive: there is no member at its offset")
        return content_offset(offset, header)


def _inflated(data: bytes, most: int) -> bytes:
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, most)
    except zlib.error as exc:
        raise ImageError(f"is damaged in the archive: {exc}") from exc


def content_offset(offset: int, header: tuple[bytes, int, int]) -> int:
    """Returns where the bytes of a zip member begin, given where its local header lies, and that header."""
    return offset + LOCAL_HEADER.size + header[1] + header[2]


def why_unsafe(name: str) -> str:
    """Returns why a member's name is refused (it is empty, too long, or points out of the archive); "" if it is not."""
    if not name:
        return "has no name"
    if len(name) > _MOST_CHARACTERS or name.count("/") > _MOST_FOLDERS:
        return f"has a name of {len(name)} characters in {name.count('/')} folders, more than file systems take"
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
