"""Listing a .zip."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

from fastload.errors import SourceError
from fastload.sources.members import DEFLATED, LOCAL_HEADER, STORED, Found, Member, cut_short, normal

_METHODS = {9: "deflate64", 12: "bzip2", 14: "LZMA", 93: "zstd", 95: "xz"}


def list_zip(path: Path) -> Found:
    """The members of a zip, from the list at its end.

    Raises:
        SourceError: that list is damaged or missing, or promises bytes that are not there.
    """
    found = Found()
    try:
        with zipfile.ZipFile(path) as archive:
            infos, end = archive.infolist(), archive.start_dir
    except (zipfile.BadZipFile, UnicodeDecodeError, struct.error, EOFError) as exc:
        raise SourceError(
            f"{path}: the list of members at the end of this zip is damaged or missing ({exc}). "
            f"The copy or download was probably cut short: fetch it again, or try `zip -FF {path} --out mended.zip`."
        ) from exc
    # Some archivers of Windows write `train\\cat\\1.jpg` against the specification.
    backslashes = any("\\" in info.filename for info in infos) and not any("/" in info.filename for info in infos)
    for info in infos:
        name = normal(_zip_name(info).replace("\\", "/") if backslashes else _zip_name(info))
        if info.is_dir():
            found.folders.append(name)
        elif info.flag_bits & 0x1:
            found.refuse(name, "is encrypted; unpack the archive with its password")
        elif info.compress_type not in (STORED, DEFLATED):
            kind = _METHODS.get(info.compress_type, "unknown")
            found.refuse(
                name, f"is compressed with method {info.compress_type} ({kind}); only stored and deflate are read"
            )
        elif info.header_offset < 0 or info.header_offset + LOCAL_HEADER.size + info.compress_size > end:
            raise SourceError(cut_short(path, name))
        else:
            size = (info.compress_size, info.file_size)
            found.members.append(Member(name, info.header_offset, *size, info.compress_type, info.CRC))
    return found


def _zip_name(info: zipfile.ZipInfo) -> str:
    if info.flag_bits & 0x800 or info.filename.isascii():
        return info.filename
    # Without the flag the specification says cp437, but many archivers write UTF-8 all the same.
    try:
        return info.filename.encode("cp437").decode("utf-8")
    except UnicodeError:
        return info.filename
