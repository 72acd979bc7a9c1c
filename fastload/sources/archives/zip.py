"""Lists the members of a .zip, and refuses those that cannot be read safely: encrypted, overlapping, bombs."""

from __future__ import annotations

import stat
import struct
import zipfile
from pathlib import Path

from fastload.errors import FastloadError, SourceError, typed
from fastload.remote.paths import ObjectPath
from fastload.remote.ranges import open_binary
from fastload.sources.archives.members import (
    DEFLATED,
    LOCAL_HEADER,
    STORED,
    FoundMembers,
    Member,
    cut_short,
    normal,
    why_unsafe,
)
from fastload.sources.listing import first_few
from fastload.sources.tree import key_of

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
        raise SourceError(
            f"{path}: the list of members at the end of this zip is damaged or missing ({exc}). {_mended(path)}"
        ) from exc
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
    return (
        "The copy or download was probably cut short: fetch it again, or try "
        f"`zip -FF {typed(path)} --out repaired.zip`."
    )


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
        return (
            f"would inflate {info.compress_size} bytes to {info.file_size}, as a decompression bomb does; "
            "unpack the archive if it is none"
        )
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
