"""Lists the members of an uncompressed .tar: ustar, GNU and pax."""

from __future__ import annotations

import posixpath
import re
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any, Self

from fastload.errors import SourceError
from fastload.remote.ranges import open_binary
from fastload.sources.archives.members import FoundMembers, Member, cut_short, normal, why_unsafe, with_parents
from fastload.sources.tree import key_of, walk_order

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
        raise SourceError(
            f"{where}: this tar is damaged at byte {stopped}, where a member should begin. Copy or download it again."
        )
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
        raise SourceError(
            f"{where}: this tar is damaged or cut short ({exc}). Copy or download it again; "
            "`tar -tf` shows how far it can be read."
        ) from exc


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
