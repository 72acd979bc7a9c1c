"""Listing an uncompressed .tar: ustar, GNU and pax."""

from __future__ import annotations

import posixpath
import tarfile
from pathlib import Path

from fastload.errors import SourceError
from fastload.sources.members import PLAIN, Found, Member, cut_short, normal, with_parents
from fastload.sources.tree import key_of, walk_order


def list_tar(path: Path, archive_size: int) -> Found:
    """The members of a tar, header by header; links inside it resolved.

    Raises:
        SourceError: it is damaged, cut short, or more than one archive in a row.
    """
    found = Found()
    links: list[tuple[str, str]] = []
    try:
        with tarfile.open(path, "r:", encoding="utf-8", errors="surrogateescape") as archive:
            while (info := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # or all headers stay in memory
                name = normal(info.name)
                if info.isdir():
                    found.folders.append(name)
                elif info.issym():
                    links.append(
                        (name, normal(posixpath.normpath(posixpath.join(posixpath.dirname(name), info.linkname))))
                    )
                elif info.islnk():
                    links.append((name, normal(posixpath.normpath(info.linkname))))
                elif not info.isfile() or info.issparse():
                    found.refuse(name, "is not a plain file; unpack the archive")
                elif info.offset_data + info.size > archive_size:
                    raise SourceError(cut_short(path, name))
                else:
                    found.members.append(Member(name, info.offset_data, info.size, info.size, PLAIN, 0))
            end = archive.offset  # where the listing stopped
    except tarfile.TarError as exc:
        raise SourceError(
            f"{path}: this tar is damaged or cut short ({exc}). Copy or download it again; "
            f"`tar -tf {path}` shows how far it can be read."
        ) from exc
    _check_end(path, end)
    _follow_links(found, links)
    return found


def _check_end(path: Path, end: int) -> None:
    # tarfile ends quietly at a damaged header, at a missing end mark and at the first of several archives in a row.
    with open(path, "rb") as file:
        file.seek(end)
        rest = file.read(2**20)
    if len(rest) < 512:
        raise SourceError(
            f"{path}: this tar has no end mark behind its last member (byte {end}); the copy or download was probably "
            f"cut short. Fetch it again; if it is whole after all, unpack it with `tar -xf {path}` and pack the folder."
        )
    if any(rest[:512]):
        raise SourceError(
            f"{path}: this tar is damaged at byte {end}, where a member should begin. Copy or download it again."
        )
    if any(rest):
        raise SourceError(
            f"{path}: there is more data behind the end of this tar (byte {end}), perhaps a second one written behind "
            f"the first. Unpack both with `tar --ignore-zeros -xf {path}` and pack the folder."
        )


def _follow_links(found: Found, links: list[tuple[str, str]]) -> None:
    if not links:
        return
    targets = dict(links)
    members = {member.name: member for member in found.members}
    folders = {folder for name in members for folder in with_parents(walk_order(name)[0])}.union(found.folders)
    for name, target in links:
        for _ in range(40):  # as many links in a row as Linux follows
            target = targets.get(target, target)
        if target in members:
            found.members.append(members[target]._replace(name=name))
        elif target in folders:
            found.broken.append((name, "is a link to a folder; unpack the archive to follow it"))
        else:
            found.refuse(name, f"is a link to {key_of(target)}, which is not in the archive")
