"""The members of a .zip or an uncompressed .tar: listed with the standard library, read by their offsets."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FileChangedError, ImageError, SourceError
from fastload.sources.listing import first_few, require_unique
from fastload.sources.members import DEFLATED, LOCAL_HEADER, PLAIN, Found, with_parents
from fastload.sources.tars import list_tar
from fastload.sources.tree import Tree, hidden_note, is_hidden, is_image, key_of, walk_order
from fastload.sources.zips import list_zip

# What begins like this cannot be read at random; the command makes something that can.
_PACKERS = {
    b"\x1f\x8b": ("gzip", "gunzip {path}"),
    b"BZh": ("bzip2", "bunzip2 {path}"),
    b"\xfd7zXZ\x00": ("xz", "unxz {path}"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd {path}"),
    b"7z\xbc\xaf\x27\x1c": ("7-Zip", "7z x {path}"),
    b"Rar!": ("RAR", "unrar x {path}"),
}


@dataclass(frozen=True, eq=False)
class ArchiveFiles:
    """Members of one archive, which is opened anew for each read: nothing to share between processes or close.

    Attributes:
        path: absolute path of the archive.
        archive_size: its bytes when it was listed.
        archive_mtime_ns: its time of modification then.
        offsets: int64 (F,), of the bytes (tar) or of the local header (zip).
        stored_sizes: int64 (F,), bytes in the archive.
        sizes: int64 (F,), bytes of the file.
        methods: uint8 (F,), PLAIN, STORED or DEFLATED.
        crcs: uint32 (F,), CRC-32 of the file; unused in a tar.
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
        """The whole member i; its CRC is checked where the archive has one."""
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
        """The first bytes of member i, without a check."""
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
        """Some of the members, in the order of indices."""
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


def list_archive(path: Path) -> Tree:
    """List a .zip or an uncompressed .tar, told by its content.

    Raises:
        SourceError: it is neither, is compressed as a whole, damaged, truncated or holds a name twice.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(512)
        status = os.stat(path)
    except OSError as exc:
        raise SourceError(f"{path} cannot be read: {exc.strerror}. Make it readable for this user.") from exc
    suffix = path.suffix.lower()
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")) or (suffix == ".zip" and not _packer(head)):
        found = list_zip(path)
    elif head[257:262] == b"ustar" or (suffix == ".tar" and not _packer(head)):
        found = list_tar(path, status.st_size)
    else:
        raise SourceError(_not_an_archive(path, head))
    return _tree(path, path, status, found)


def tar_order(tree: Tree) -> NDArray[np.int64]:
    """Positions of a tar's members in the order in which they lie there; none for anything else."""
    files = tree.files
    if not isinstance(files, ArchiveFiles) or not (files.methods == PLAIN).all():
        return np.zeros(0, np.int64)
    return np.argsort(files.offsets, kind="stable").astype(np.int64)


def list_inner_tar(tree: Tree, position: int) -> Tree:
    """List a tar that is a member of the tar behind a tree, or a file of the folder behind it; nothing is unpacked.

    Args:
        tree: of a folder or a .tar.
        position: of the inner tar in tree.names.

    Raises:
        SourceError: it is no tar, is damaged, cut short or holds a name twice; or it lies in a zip.
    """
    name = key_of(tree.names[position])
    if not tree.archive:
        return list_archive(tree.path / Path(tree.names[position]))
    files = tree.files
    if not isinstance(files, ArchiveFiles) or files.methods[position] != PLAIN:
        raise SourceError(
            f"{tree.path}: {name} lies in a zip, where it cannot be read in place. "
            f"Unpack {tree.path} (not {name}) and pack the folder."
        )
    head, inner = files.read_head(position, 512), tree.path / name
    if head[257:262] != b"ustar" and (_packer(head) or not head):
        raise SourceError(_not_an_archive(inner, head))
    status = os.stat(files.path)
    offset, size = int(files.offsets[position]), int(files.sizes[position])
    found = list_tar(Path(files.path), status.st_size, start=offset, size=size, inner=name)
    return _tree(inner, Path(files.path), status, found)


def _tree(path: Path, archive: Path, status: os.stat_result, found: Found) -> Tree:
    """The tree of what was found; path: as told to the user, archive: the file that is read."""
    require_unique([key_of(member.name) for member in found.members], str(path))
    members = sorted((m for m in found.members if not _hidden(m.name)), key=lambda m: walk_order(m.name))
    folders = {name for name in found.folders if not _hidden(name)}
    for folder in {walk_order(member.name)[0] for member in members}:
        folders.update(with_parents(folder))

    def column(name: str, dtype: type[np.generic]) -> NDArray[Any]:
        return np.fromiter((getattr(member, name) for member in members), dtype, len(members))

    files = ArchiveFiles(
        path=os.path.abspath(archive),
        archive_size=status.st_size,
        archive_mtime_ns=status.st_mtime_ns,
        offsets=column("offset", np.int64),
        stored_sizes=column("stored_size", np.int64),
        sizes=column("size", np.int64),
        methods=column("method", np.uint8),
        crcs=column("crc", np.uint32),
    )
    hidden = [key_of(member.name) for member in found.members if _hidden(member.name)]
    passed = [f"{key_of(name)} {reason}" for name, reason in found.passed if not _hidden(name)]
    notes = [hidden_note(hidden)] if hidden else []
    if passed:
        notes.append(f"Passed over in the archive ({len(passed)}): {first_few(passed)}.")
    return Tree(
        path=path,
        archive=True,
        names=[member.name for member in members],
        folders=sorted(folders),
        sizes=files.sizes,
        mtimes_ns=np.full(len(members), status.st_mtime_ns, dtype=np.int64),
        files=files,
        broken=sorted((name, reason) for name, reason in found.broken if not _hidden(name)),
        notes=tuple(notes),
    )


def _hidden(name: str) -> bool:
    if name[:1] != "." and "/." not in name and "__MACOSX" not in name:
        return False
    return any(is_hidden(part) for part in name.split("/") if part != "..")


def _packer(head: bytes) -> tuple[str, str] | None:
    return next((packer for magic, packer in _PACKERS.items() if head.startswith(magic)), None)


def _not_an_archive(path: Path, head: bytes) -> str:
    packer = _packer(head)
    if packer is not None:
        name, unpack = packer
        return (
            f"{path} is compressed as a whole ({name}), so its images cannot be read one by one. "
            f"Unpack it first (`{unpack.format(path=path)}`) and pack what comes out."
        )
    if not head:
        return f"{path} is an empty file. Copy or download it again."
    if is_image(path.name):
        return f"{path} is a single image. Give the folder, .zip or .tar that holds the images."
    return f"{path} is neither a folder nor a .zip or .tar: its content is none of these. Give one of them."


def _pread(fd: int, size: int, offset: int) -> bytes:
    try:
        data = os.pread(fd, size, offset)
        while len(data) < size:  # one call gives at most 2 GiB
            more = os.pread(fd, size - len(data), offset + len(data))
            if not more:
                raise ImageError("is damaged in the archive: it reaches beyond the end")
            data += more
    except OSError as exc:
        raise ImageError(f"cannot be read from the archive: {exc.strerror}") from exc
    return data
