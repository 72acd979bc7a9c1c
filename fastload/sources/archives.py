"""Zip and uncompressed tar archives as a Tree, read without unpacking: `list_archive`, and `list_inner_tar` in a tar.

The standard library lists the members; they are read by offset, a zip's by `ZipFiles`, a tar's by `spans.FileSpans`.
Members that cannot be read safely are refused: names that point out of the archive, encrypted ones, overlapping ones,
bombs. Nothing here knows a layout.
"""

from __future__ import annotations

import os
import posixpath
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FastloadError, ImageError, SourceError, typed
from fastload.remote.ranges import open_binary
from fastload.remote.urls import ObjectPath, path_of
from fastload.sources.foreign import why_foreign
from fastload.sources.listing import first_few, require_unique
from fastload.sources.spans import HEAD_BYTES, FileSpans, ListedFile, ListedObject
from fastload.sources.tree import Tree, hidden_note, is_hidden, is_image, key_of, walk_order

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
    return f"{path}: member {key_of(name)} reaches beyond the data: the archive is cut short. Fetch it again."


_METHODS = {9: "deflate64", 12: "bzip2", 14: "LZMA", 93: "zstd", 95: "xz"}

_UNIX = (3, 19)  # made where a member's mode means something: Unix, macOS
_DEFLATE_RATIO = 1032  # the most that deflate can shrink anything (zlib's technical details)
_LARGE, _SUSPICIOUS_RATIO = 2**28, 100  # no image that large shrinks that much


def list_zip(path: Path) -> FoundMembers:
    """Returns the members of a zip, by the directory at its end.

    Raises:
        SourceError: the directory is damaged or missing, or names bytes that are not there.
    """
    found = FoundMembers()
    try:
        with open_binary(path) as file, zipfile.ZipFile(file) as archive:
            infos, end = archive.infolist(), archive.start_dir
    except FastloadError:
        raise
    # Values that cannot be make it seek before the file, overflow, or find a version of zip that there is not.
    except (zipfile.BadZipFile, ValueError, OverflowError, OSError, RuntimeError, struct.error, EOFError) as exc:
        raise SourceError(f"{path}: the list at the end of this zip is damaged ({exc}). {_mended(path)}") from exc
    # Some archivers of Windows write `train\\cat\\1.jpg` against the specification; others add to such a zip.
    if turned := [key_of(_zip_name(info)) for info in infos if "\\" in info.filename]:
        found.notes.append(f"Names with backslashes were read as folders ({len(turned)}): {first_few(turned, 2)}.")
    overlapping = _overlapping(infos)
    for info in infos:
        given = _zip_name(info).replace("\\", "/")
        name = normal(given)
        if reason := why_unsafe(given):
            found.refuse(given or "a member", reason)
        elif given.endswith("/"):
            found.folders.append(name)
        elif reason := _why_refused(info) or overlapping.get(info.header_offset, ""):
            found.refuse(name, reason)
        elif info.header_offset < 0 or info.header_offset + LOCAL_HEADER.size + info.compress_size > end:
            raise SourceError(cut_short(path, name))
        else:
            size = (info.compress_size, info.file_size)
            found.members.append(Member(name, info.header_offset, *size, info.compress_type, info.CRC))
    return found


def _mended(path: Path) -> str:
    """Returns how a zip without its list is made whole: joined if it is the last of several parts."""
    first = path.with_suffix(".z01")
    if not isinstance(path, ObjectPath) and first.exists():
        how = f"`zip -s 0 {typed(path)} --out joined.zip`"
        return f"It is the last part of a split archive, for {first.name} lies next to it. Join them: {how}."
    return f"The copy was probably cut short: fetch it again, or try `zip -FF {typed(path)} --out repaired.zip`."


def _why_refused(info: zipfile.ZipInfo) -> str:
    """Returns why a member is not read; "" if it is."""
    kind = stat.S_IFMT(info.external_attr >> 16) if info.create_system in _UNIX else 0
    if kind == stat.S_IFLNK:
        return "is a symbolic link, which is not followed in a zip; unpack the archive"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is a device or a pipe, not a plain file"
    if info.flag_bits & 0x1:
        return "is encrypted; unpack the archive with its password"
    if info.compress_type not in (STORED, DEFLATED):
        method = _METHODS.get(info.compress_type, "unknown")
        return f"is compressed with method {info.compress_type} ({method}); only stored and deflate are read"
    if info.compress_type == STORED:
        same = info.file_size == info.compress_size
        return "" if same else f"claims {info.file_size} bytes, of which {info.compress_size} are stored"
    if info.file_size > _DEFLATE_RATIO * info.compress_size + 1024:
        return f"claims {info.file_size} bytes, more than {info.compress_size} compressed ones can hold"
    if info.file_size > _LARGE and info.file_size > _SUSPICIOUS_RATIO * info.compress_size:
        sizes = f"{info.compress_size} bytes to {info.file_size}"
        return f"would inflate {sizes}, as a decompression bomb does; unpack the archive if it is none"
    return ""


def _overlapping(infos: list[zipfile.ZipInfo]) -> dict[int, str]:
    """Returns offset -> reason to refuse it, for each member that shares bytes with another.

    Small zips that inflate to terabytes use the same bytes again and again.
    """
    found: dict[int, str] = {}
    before: zipfile.ZipInfo | None = None
    reach = 0  # the least end that `before` can have: name and extra field come on top
    for info in sorted(infos, key=lambda info: info.header_offset):
        if before is not None and info.header_offset < reach:
            for one, other in ((info, before), (before, info)):
                shown = key_of(_zip_name(other))
                found.setdefault(one.header_offset, f"overlaps {shown} in the zip, as in a decompression bomb")
        end = info.header_offset + LOCAL_HEADER.size + info.compress_size
        if end > reach:
            before, reach = info, end
    return found


def _zip_name(info: zipfile.ZipInfo) -> str:
    if info.flag_bits & 0x800 or info.filename.isascii():
        return info.filename
    # Without the flag the specification says cp437, but many archivers write UTF-8 all the same.
    try:
        return info.filename.encode("cp437").decode("utf-8")
    except UnicodeError:
        return info.filename


# A header that only describes the next one (a long name, pax) is read whole, and real ones are small.
_DESCRIBING, _MOST_DESCRIBED = (b"L", b"K", b"x", b"g", b"X"), 2**20
_BLOCK_BYTES, _AHEAD = 2**22, 8  # of a tar behind a URL: headers lie between all its members
_MOST_DIGITS = re.compile(rb"[0-9]{256}")


class _Header(tarfile.TarInfo):
    """A tar header of which only what a listing needs is parsed: twice tarfile's speed for plain files."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> Self:  # type: ignore[override]  # typeshed: bytearray
        """Returns the header in a block of 512 bytes, with the same values as tarfile's."""
        size = buf[124:136].rstrip(b" \0")
        stated = buf[148:156].strip(b" \0")
        plain = len(buf) == 512 and buf[156:157] == tarfile.REGTYPE and not buf[345] and size.isdigit()
        if not plain or not stated.isdigit() or b"8" in size + stated or b"9" in size + stated:
            other = super().frombuf(buf, encoding, errors)
            if other.type in _DESCRIBING and not 0 <= other.size <= _MOST_DESCRIBED:
                raise tarfile.ReadError(f"a header of {other.size} bytes")
            return other
        if int(stated, 8) != sum(buf) - sum(buf[148:156]) + 256:
            return super().frombuf(buf, encoding, errors)
        header = cls(buf[:100].partition(b"\0")[0].decode(encoding, errors))
        header.size = int(size, 8)
        return header

    def _proc_pax(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        """Refuses numbers for which tarfile takes time with the square of their length (CVE-2024-6232)."""
        file = archive.fileobj
        assert file is not None, "the archive is open"
        start = file.tell()
        if _MOST_DIGITS.search(file.read(self.size)):
            raise tarfile.ReadError("a pax header with a number of more than 256 digits")
        file.seek(start)
        parent: Any = super()
        return parent._proc_pax(archive)  # type: ignore[no-any-return]  # typeshed lacks it


def list_tar(
    path: Path, archive_size: int, *, start: int = 0, size: int | None = None, inner: str = ""
) -> FoundMembers:
    """Returns the members of a tar, read header by header, with links between members resolved.

    Offsets count from the start of the file at `path`, of `archive_size` bytes, also if the tar is itself a member of
    that file, called `inner`, and begins at `start`.

    Raises:
        SourceError: the tar is damaged, cut short, or followed by a second one.
    """
    found = FoundMembers()
    links: list[tuple[str, str]] = []
    where = f"{path}: {key_of(inner)}" if inner else str(path)
    end, stopped = archive_size if size is None else start + size, start
    with open_binary(path, block_bytes=_BLOCK_BYTES, ahead=_AHEAD) as file:
        for info, offset in headers(file, where, start):
            stopped = offset
            if info.offset + 512 > end:
                raise SourceError(_no_end_mark(where, info.offset))
            if info.isfile() and info.offset_data + info.size > end:
                raise SourceError(cut_short(where, info.name))
            _take(found, info, links)
        # tarfile ends quietly at a damaged header, at a missing end mark and at the first of several archives in a row.
        file.seek(stopped)
        rest = file.read(min(2**20, max(0, end - stopped)))
    if len(rest) < 512:
        raise SourceError(_no_end_mark(where, stopped))
    if any(rest[:512]):
        raise SourceError(f"{where}: this tar is damaged at byte {stopped}, where a member should be. Fetch it again.")
    if any(rest):
        raise SourceError(
            f"{where}: there is more data behind the end of this tar (byte {stopped}), perhaps a second one written "
            "behind the first. Unpack both with `tar --ignore-zeros -xf` and pack the folder."
        )
    _follow_links(found, links)
    return found


def first_names(path: Path, count: int) -> list[str]:
    """Returns the names of the first `count` files in a tar, in its order; none if it is no tar."""
    names: list[str] = []
    with (
        suppress(SourceError, OSError),
        open_binary(path, block_bytes=_BLOCK_BYTES) as file,
    ):  # list_tar reports what is wrong
        files = (info for info, _ in headers(file, str(path)) if info.isfile())
        names += (normal(info.name) for info in islice(files, count))
    return names


def headers(file: IO[bytes], where: str, start: int = 0) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Yields the header of each member of a tar that begins at `start`, and where the next header should begin.

    Raises:
        SourceError: a header is damaged; the message begins with `where`.
    """
    reached = start
    file.seek(start)
    try:
        with tarfile.open(
            fileobj=file, mode="r:", tarinfo=_Header, encoding="utf-8", errors="surrogateescape"
        ) as archive:
            while (info := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # or all headers stay in memory
                # A size below 0 leads back to headers that were read already, for ever (CVE-2025-8194).
                if info.size < 0 or archive.offset <= reached:
                    raise tarfile.ReadError(f"{key_of(info.name)[:100]} has the size {info.size}")
                reached = archive.offset
                yield info, reached
    # Headers without sense raise the latter four; many long names in a row recurse.
    except (tarfile.TarError, ValueError, IndexError, OverflowError, OSError, RecursionError) as exc:
        if isinstance(exc, SourceError):
            raise
        fix = "Copy or download it again; `tar -tf` shows how far it can be read."
        raise SourceError(f"{where}: this tar is damaged or cut short ({exc}). {fix}") from exc


def _take(found: FoundMembers, info: tarfile.TarInfo, links: list[tuple[str, str]]) -> None:
    name = normal(info.name)
    if reason := why_unsafe(info.name):
        found.refuse(info.name or "a member", reason)
    elif info.isdir():
        found.folders.append(name)
    elif info.issym() or info.islnk():
        # A symbolic link is relative to its folder, a hard link to the archive.
        base = posixpath.dirname(name) if info.issym() else ""
        target = posixpath.normpath(posixpath.join(base, info.linkname))
        if target.startswith(("/", "../")) or target == "..":
            found.refuse(name, f"is a link to {key_of(info.linkname)}, which points out of the archive")
        else:
            links.append((name, normal(target)))
    elif info.ischr() or info.isblk() or info.isfifo():
        found.refuse(name, f"is a {'pipe' if info.isfifo() else 'device'}, which is never read")
    elif not info.isfile() or info.issparse():
        found.refuse(name, "is not a plain file; unpack the archive")
    else:
        found.members.append(Member(name, info.offset_data, info.size, info.size))


def _no_end_mark(where: str, end: int) -> str:
    return (
        f"{where}: this tar has no end mark behind its last member (byte {end}); the copy or download was probably "
        "cut short. Fetch it again; if it is whole after all, unpack it with `tar -xf` and pack the folder."
    )


def _follow_links(found: FoundMembers, links: list[tuple[str, str]]) -> None:
    if not links:
        return
    targets = dict(links)
    refused = dict(found.broken + found.passed)
    members = {member.name: member for member in found.members}
    folders = {folder for name in members for folder in with_parents(walk_order(name)[0])}.union(found.folders)
    for name, target in links:
        for _ in range(40):  # as many links in a row as Linux follows
            target = targets.get(target, target)
        if target in members:
            found.members.append(members[target]._replace(name=name))
        elif target in folders:
            found.broken.append((name, "is a link to a folder; unpack the archive to follow it"))
        elif target in refused:
            found.refuse(name, f"is a link to {key_of(target)}, which {refused[target]}")
        elif target in targets:
            found.refuse(name, "is a link that leads back to itself")
        else:
            found.refuse(name, f"is a link to {key_of(target)}, which is not in the archive")


# Compressors whose output cannot be read at random: first bytes -> name, and the command that unpacks it.
_PACKERS = {
    b"\x1f\x8b": ("gzip", "gunzip {path}"),
    b"BZh": ("bzip2", "bunzip2 {path}"),
    b"\xfd7zXZ\x00": ("xz", "unxz {path}"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd {path}"),
    b"7z\xbc\xaf\x27\x1c": ("7-Zip", "7z x {path}"),
    b"Rar!": ("RAR", "unrar x {path}"),
}


def list_archive(path: Path) -> Tree:
    """Returns the tree of a .zip or an uncompressed .tar, recognised by its content.

    Raises:
        SourceError: the file is neither, is compressed as a whole, damaged, truncated, or holds a name twice.
    """
    archive: ListedFile | ListedObject
    if isinstance(path, ObjectPath):
        archive = ListedObject.of(path)
        with archive.open() as fd:
            head = archive.read(fd, min(512, archive.num_bytes), 0)
    else:
        try:
            with open(path, "rb") as file:
                head = file.read(512)
            archive = ListedFile.of(path, os.stat(path))
        except OSError as exc:
            raise SourceError(f"{path} cannot be read: {exc.strerror}. Make it readable for this user.") from exc
    suffix = path.suffix.lower()
    if why := why_foreign(path, head):
        raise SourceError(why)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")) or (suffix == ".zip" and not _packer(head)):
        return _tree(path, archive, list_zip(path), zipped=True)
    if head[257:262] == b"ustar" or (suffix == ".tar" and not _packer(head)):
        return _tree(path, archive, list_tar(path, archive.num_bytes))
    raise SourceError(_not_an_archive(path, head))


def tar_order(tree: Tree) -> NDArray[np.int64]:
    """Returns the positions of a tar's members in the order in which they lie in it; none for any other tree."""
    if not isinstance(tree.files, FileSpans):
        return np.zeros(0, np.int64)
    return np.argsort(tree.files.offsets, kind="stable").astype(np.int64)


def list_inner_tar(tree: Tree, position: int) -> Tree:
    """Returns the tree of a tar that is itself a file of a tree (of a folder or a tar); nothing is unpacked.

    Raises:
        SourceError: the file is no tar, is damaged, cut short or holds a name twice; or it lies in a zip.
    """
    name = key_of(tree.names[position])
    if not tree.archive:
        return list_archive(tree.path / Path(tree.names[position]))
    files = tree.files
    if not isinstance(files, FileSpans):
        fix = f"Unpack {tree.path} (not {name}) and pack the folder."
        raise SourceError(f"{tree.path}: {name} lies in a zip, where it cannot be read in place. {fix}")
    head, inner = files.read_head(position, 512), tree.path / name
    if head[257:262] != b"ustar" and (_packer(head) or not head):
        raise SourceError(_not_an_archive(inner, head))
    file = path_of(files.file.path)
    archive = ListedObject.of(file) if isinstance(file, ObjectPath) else ListedFile.of(file)
    offset, size = int(files.offsets[position]), int(files.sizes[position])
    found = list_tar(file, archive.num_bytes, start=offset, size=size, inner=name)
    return _tree(inner, archive, found)


def _tree(path: Path, archive: ListedFile | ListedObject, found: FoundMembers, *, zipped: bool = False) -> Tree:
    """Returns the tree of the members found; `path` is shown to the user, `archive` is the file that is read."""
    require_unique([key_of(member.name) for member in found.members], str(path))
    members = sorted((m for m in found.members if not _hidden(m.name)), key=lambda m: walk_order(m.name))
    folders = {name for name in found.folders if not _hidden(name)}
    for folder in {walk_order(member.name)[0] for member in members}:
        folders.update(with_parents(folder))

    def column(name: str, dtype: type[np.generic]) -> NDArray[Any]:
        return np.fromiter((getattr(member, name) for member in members), dtype, len(members))

    sizes = column("size", np.int64)
    spans = FileSpans(archive, column("offset", np.int64), column("stored_size", np.int64))
    files = ZipFiles(spans, sizes, column("method", np.uint8), column("crc", np.uint32)) if zipped else spans
    hidden = [key_of(member.name) for member in found.members if _hidden(member.name)]
    passed = sorted((name, reason) for name, reason in found.passed if not _hidden(name))
    notes = [*found.notes, *([hidden_note(hidden)] if hidden else [])]
    if passed:
        shown = first_few(f"{key_of(name)} {reason}" for name, reason in passed)
        notes.append(f"Passed over in the archive ({len(passed)}): {shown}.")
    return Tree(
        path=path,
        archive=True,
        names=[member.name for member in members],
        folders=sorted(folders),
        sizes=sizes,
        mtimes_ns=np.full(len(members), archive.mtime_ns, dtype=np.int64),
        files=files,
        broken=sorted((name, reason) for name, reason in found.broken if not _hidden(name)),
        passed=passed,
        notes=tuple(notes),
    )


def _hidden(name: str) -> bool:
    some = name[:1] == "." or "/." in name or "__MACOSX" in name  # rules most names out quickly
    return some and any(is_hidden(part) for part in name.split("/") if part != "..")


def _packer(head: bytes) -> tuple[str, str] | None:
    return next((packer for magic, packer in _PACKERS.items() if head.startswith(magic)), None)


def _not_an_archive(path: Path, head: bytes) -> str:
    packer = _packer(head)
    if packer:
        return (
            f"{path} is compressed as a whole ({packer[0]}), so its images cannot be read one by one. "
            f"Unpack it first (`{packer[1].format(path=path)}`) and pack what comes out."
        )
    if not head:
        return f"{path} is an empty file. Copy or download it again."
    if is_image(path.name):
        return f"{path} is a single image. Give the folder, .zip or .tar that holds the images."
    return f"{path} is neither a folder nor a .zip or .tar: its content is none of these. Give one of them."
