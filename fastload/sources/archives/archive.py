"""Lists a .zip or an uncompressed .tar as a Tree; the standard library lists the members, they are read by offset."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.remote.paths import ObjectPath, path_of
from fastload.sources.archives.members import FoundMembers, ZipFiles, with_parents
from fastload.sources.archives.tar import list_tar
from fastload.sources.archives.zip import list_zip
from fastload.sources.foreign import why_foreign
from fastload.sources.listing import first_few, require_unique
from fastload.sources.spans import FileSpans, ListedFile, ListedObject
from fastload.sources.tree import Tree, hidden_note, is_hidden, is_image, key_of, walk_order

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
        raise SourceError(
            f"{tree.path}: {name} lies in a zip, where it cannot be read in place. "
            f"Unpack {tree.path} (not {name}) and pack the folder."
        )
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
