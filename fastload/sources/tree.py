"""Every file below a folder or inside a .zip or .tar, listed once and read without unpacking."""

from __future__ import annotations

import errno
import os
import re
import stat
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError, MissingFileError, SourceError
from fastload.sources.listing import Files, first_few

IMAGE_SUFFIXES = tuple(".jpg .jpeg .jpe .jfif .png .ppm .pgm .pbm .bmp .tif .tiff .webp .gif .mpo".split())
"""What makes a file a candidate, in any case; its content decides the format later."""

_TABLES = tuple(".csv .tsv .jsonl .ndjson .json .parquet .npy .npz .h5 .hdf5 .hdf .txt".split())
_IDX = re.compile(r"idx[123]-(ubyte|int)(\.gz)?$")


@dataclass(frozen=True, eq=False)
class Tree:
    """The files of a dataset, without the hidden ones.

    Attributes:
        path: the folder or archive, as given.
        archive: whether it is one.
        names: paths of the files relative to it, with `/`, in walk order: by folder, then by name.
            Undecodable bytes are surrogates (PEP 383).
        folders: paths of the folders below it, empty ones included, sorted.
        sizes: int64 (F,), bytes of each file.
        mtimes_ns: int64 (F,), its time of modification; that of the archive for its members.
        files: reads them by their position in names.
        broken: (name, reason) of images that cannot be read at all: dangling links, encrypted members, ...
        notes: what was passed over, as sentences.
        file: the name of the only file looked at, when one that holds or lists samples was given and not a folder;
            path is then the folder it lies in. "" for a folder or an archive.
    """

    path: Path
    archive: bool
    names: list[str]
    folders: list[str]
    sizes: NDArray[np.int64]
    mtimes_ns: NDArray[np.int64]
    files: Files
    broken: list[tuple[str, str]]
    notes: tuple[str, ...]
    file: str = ""

    @property
    def given(self) -> Path:
        """What the user gave: the folder, the archive, or the one file."""
        return self.path / self.file if self.file else self.path

    def images(self) -> NDArray[np.int64]:
        """Positions of the files that are images by their suffix, in walk order."""
        return np.flatnonzero(np.fromiter(map(is_image, self.names), np.bool_, len(self.names))).astype(np.int64)

    def read_text(self, i: int) -> bytes:
        """The content of a file that the whole dataset depends on.

        Raises:
            SourceError: it cannot be read.
        """
        try:
            return self.files.read(i)
        except ImageError as exc:
            raise SourceError(f"{self.path}: {key_of(self.names[i])} {exc}. Mend or remove that file.") from exc


@dataclass(frozen=True, eq=False)
class FolderFiles:
    """Files below a folder; all names in one bytes object, which pickles at once and stays small.

    Attributes:
        root: absolute path of the folder.
        paths: the relative paths, one after another.
        ends: int64 (F,), where each of them ends.
    """

    root: bytes
    paths: bytes
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, root: bytes, paths: list[bytes]) -> FolderFiles:
        """The files with these paths relative to root."""
        return cls(root, b"".join(paths), np.cumsum([len(path) for path in paths], dtype=np.int64))

    def read(self, i: int) -> bytes:
        """The whole file i."""
        return self._read(i, -1)

    def read_head(self, i: int, size: int) -> bytes:
        """The first bytes of file i."""
        return self._read(i, size)

    def take(self, indices: NDArray[np.integer[Any]]) -> FolderFiles:
        """Some of the files, in the order of indices."""
        return FolderFiles.of(self.root, [self._path(i) for i in indices.tolist()])

    def _path(self, i: int) -> bytes:
        return self.paths[self.ends[i - 1] if i else 0 : self.ends[i]]

    def _read(self, i: int, size: int) -> bytes:
        try:
            with open(os.path.join(self.root, self._path(i)), "rb", buffering=0) as file:
                return file.read(size)
        except OSError as exc:
            raise ImageError(f"cannot be read: {exc.strerror}") from exc


def open_tree(path: str | Path | Tree) -> Tree:
    """List a folder, a .zip or an uncompressed .tar; a single table or array file is a tree of one file.

    Archives are told by their content. Symbolic links are followed, into folders too, but never in a circle.
    Names that begin with a dot and `__MACOSX` are passed over, and counted in the notes.

    Args:
        path: the folder or archive; a tree is returned as it is.

    Raises:
        MissingFileError: there is nothing at path.
        SourceError: it is neither folder nor archive, is damaged, unreadable or holds a name twice.
    """
    if isinstance(path, Tree):
        return path
    path = Path(path)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError) as exc:
        mend = "Give the folder, .zip or .tar that holds the images."
        if re.search(r"[{*?\[]", path.name):
            mend = f"Patterns are not expanded. To pack all shards, give the folder that holds them: {path.parent}"
        raise MissingFileError(f"{path}: there is no such file or folder. {mend}") from exc
    except OSError as exc:
        raise SourceError(
            f"{path} cannot be read: {exc.strerror}. Check the permissions of the folders above it."
        ) from exc
    if stat.S_ISDIR(mode):
        return _walk(path)
    if stat.S_ISREG(mode) and (path.name.lower().endswith(_TABLES) or _IDX.search(path.name.lower())):
        return _single(path)
    # Imported here: whoever only needs a Column (the file format) should not pay for zipfile, tarfile and lzma.
    from fastload.sources.archives import list_archive

    return list_archive(path)


def _single(path: Path) -> Tree:
    status = os.stat(path)
    name = os.fsdecode(path.name)
    return Tree(
        path=path.parent,
        archive=False,
        names=[name],
        folders=[],
        sizes=np.array([status.st_size], np.int64),
        mtimes_ns=np.array([status.st_mtime_ns], np.int64),
        files=FolderFiles.of(os.path.abspath(os.fsencode(path.parent)), [os.fsencode(name)]),
        broken=[],
        notes=(),
        file=name,
    )


def is_image(name: str) -> bool:
    """Whether a file is an image by its suffix, in any case."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def is_hidden(part: str) -> bool:
    """Whether a file or folder is passed over: .DS_Store, .ipynb_checkpoints, ._photo.jpg, __MACOSX, ..."""
    return part.startswith(".") or part == "__MACOSX"


def walk_order(name: str) -> tuple[str, str]:
    """Sort key of a path: folder by folder, as torchvision's ImageFolder walks."""
    folder, _, base = name.rpartition("/")
    return folder, base


def key_of(name: str) -> str:
    """A name as text that UTF-8 can hold: undecodable bytes become `\\xNN`."""
    return name if name.isascii() else name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def hidden_note(hidden: list[str]) -> str:
    """The sentence about what was passed over."""
    return f"Passed over as hidden ({len(hidden)}): {first_few(sorted(hidden))}."


def _walk(root: Path) -> Tree:
    top = os.path.abspath(os.fsencode(root))
    names: list[str] = []
    folders: list[str] = []
    sizes, mtimes = array("q"), array("q")
    broken: list[tuple[str, str]] = []
    hidden: list[str] = []
    circles: list[str] = []
    status = os.stat(top)
    # A folder is not entered below itself; two links to one folder are both followed.
    pending = [("", frozenset([(status.st_dev, status.st_ino)]))]
    while pending:
        prefix, above = pending.pop()
        for entry in _entries(root, top, prefix):
            part = entry.name.decode("utf-8", "surrogateescape")
            name = prefix + part
            if is_hidden(part):
                hidden.append(key_of(name))
                continue
            try:
                is_folder = entry.is_dir()
                status = entry.stat()
            except OSError as exc:
                if is_image(name):
                    broken.append((name, _why_broken(exc)))
                continue
            if is_folder:
                identity = (status.st_dev, status.st_ino)
                if identity in above:
                    circles.append(key_of(name))
                else:
                    folders.append(name)
                    pending.append((name + "/", above | {identity}))
            elif stat.S_ISREG(status.st_mode):
                names.append(name)
                sizes.append(status.st_size)
                mtimes.append(status.st_mtime_ns)
            elif is_image(name):
                broken.append((name, "is not a regular file"))
    order = sorted(range(len(names)), key=[walk_order(name) for name in names].__getitem__)
    names = [names[i] for i in order]
    notes = [hidden_note(hidden)] if hidden else []
    if circles:
        notes.append(f"Links that lead back to a folder above them were not followed: {first_few(sorted(circles))}.")
    return Tree(
        path=root,
        archive=False,
        names=names,
        folders=sorted(folders),
        sizes=np.array(sizes, dtype=np.int64)[order],
        mtimes_ns=np.array(mtimes, dtype=np.int64)[order],
        files=FolderFiles.of(top, [name.encode("utf-8", "surrogateescape") for name in names]),
        broken=sorted(broken),
        notes=tuple(notes),
    )


def _entries(root: Path, top: bytes, prefix: str) -> list[os.DirEntry[bytes]]:
    # Listed as bytes: what a name means must not depend on the locale of whoever packs.
    try:
        with os.scandir(os.path.join(top, prefix.encode("utf-8", "surrogateescape"))) as entries:
            return list(entries)
    except OSError as exc:
        raise SourceError(
            f"{root / key_of(prefix)}: the folder cannot be listed: {exc.strerror}. "
            "Make it readable for this user, or move it out of the dataset."
        ) from exc


def _why_broken(exc: OSError) -> str:
    if exc.errno in (errno.ENOENT, errno.ENOTDIR):
        return "is a link to a file that does not exist"
    if exc.errno == errno.ELOOP:
        return "is a link that leads back to itself"
    return f"cannot be read: {exc.strerror}"
