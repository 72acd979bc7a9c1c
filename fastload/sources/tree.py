"""The files of a dataset: all below a folder or inside a .zip or .tar, listed once, read without unpacking.

`open_tree` makes a Tree from a path; the layouts look only at its names and read only through its `files`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError, SourceError
from fastload.remote.urls import ObjectPath
from fastload.sources.listing import Files, first_few
from fastload.sources.spans import Paths, is_as_listed
from fastload.system.files import read_bytes


def _optional_suffixes() -> list[str]:
    """Returns the suffixes of images that not every installation decodes, if this one does; Pillow is not imported."""
    pillow = find_spec("PIL")
    folders = pillow.submodule_search_locations or [] if pillow else []
    avif = any(name.startswith("_avif.") for folder in folders for name in os.listdir(folder))
    return [*[".avif"] * avif, *[".heic", ".heif", ".hif"] * (find_spec("pillow_heif") is not None)]


_SUFFIXES = (
    ".jpg .jpeg .jpe .jfif .png .apng .ppm .pgm .pbm .pnm .bmp .tif .tiff .webp .gif .mpo .qoi "
    ".jp2 .j2k .j2c .jpc .jpf .jpx"
)
IMAGE_SUFFIXES = (*_SUFFIXES.split(), *_optional_suffixes())
"""Suffixes, in any case, of files that are taken for images; their content decides the format later."""


TORCHVISION, HUGGING_FACE = "torchvision:", "hf:"
"""Prefixes of a source that names a dataset of a library."""


def is_library(path: str | Path) -> bool:
    """Whether a source is the name of a dataset of a library, and no file."""
    return str(path).startswith((TORCHVISION, HUGGING_FACE)) and not os.path.lexists(path)


class Line(NamedTuple):
    """A line of a text file that is not blank."""

    where: str  # path of the file
    number: int  # number of the line, from 1
    text: str  # the line without spaces around it; undecodable bytes are surrogates

    def error(self, what: str) -> SourceError:
        """Returns the error that says what is wrong with the line."""
        return SourceError(f"{self.where}, line {self.number}: {what}")


def lines_of(data: bytes, where: str) -> list[Line]:
    """Returns the lines of a text, the content of the file at `where`, that are not blank."""
    text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    lines = ((number, line.strip()) for number, line in enumerate(text.split("\n"), 1))
    return [Line(where, number, line) for number, line in lines if line]


@dataclass(frozen=True, eq=False, kw_only=True)
class Tree:
    """The F files of a dataset, without hidden ones."""

    path: Path  # the folder or archive, as given
    archive: bool = False  # whether path is an archive
    # Paths relative to `path`, with `/`, in walk order: by folder, then by name. Undecodable bytes are surrogates
    # (PEP 383).
    names: list[str]
    folders: list[str] = field(default_factory=list)  # paths of the folders below `path`, empty ones included, sorted
    sizes: NDArray[np.int64]  # int64 (F,), bytes of each file
    mtimes_ns: NDArray[np.int64]  # int64 (F,), modification of each file; for members of an archive, of the archive
    files: Files  # reads the files by their position in names
    # (name, reason) of images that cannot be read at all: dangling links, encrypted, ...
    broken: list[tuple[str, str]] = field(default_factory=list)
    passed: list[tuple[str, str]] = field(default_factory=list)  # the same of other files and folders
    notes: tuple[str, ...] = ()  # sentences about what was passed over
    file: str = ""  # name of the table or array file that was given, which lies in `path`; "" for folder or archive

    @property
    def given(self) -> Path:
        """The path that the user gave: the folder, the archive, or the single file."""
        return self.path / self.file if self.file else self.path

    @property
    def in_place(self) -> bool:
        """Whether the files can be opened by their paths: they lie in no archive and behind no URL."""
        return not self.archive and not isinstance(self.path, ObjectPath)

    @cached_property
    def images(self) -> NDArray[np.int64]:
        """The positions in names of the files that are images by their suffix, in walk order."""
        found = np.flatnonzero(np.fromiter(map(is_image, self.names), np.bool_, len(self.names))).astype(np.int64)
        found.flags.writeable = False
        return found

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        """The begin and end in `names` of the files directly in each folder; folders end in `/`, "" is the top."""
        found: dict[str, tuple[int, int]] = {}
        begin, folder = 0, ""
        for i, name in enumerate(self.names):
            if not name.startswith(folder) or "/" in name[len(folder) :]:
                found[folder] = begin, i
                begin, folder = i, name[: name.rfind("/") + 1]
        found[folder] = begin, len(self.names)
        return {folder: span for folder, span in found.items() if span[0] < span[1]}

    @cached_property
    def image_folders(self) -> dict[str, NDArray[np.int64]]:
        """The positions in names of the images directly in each folder that has any, in walk order."""
        ends = np.searchsorted(self.images, list(self.spans.values()))
        places = zip(self.spans, ends.tolist(), strict=True)
        return {folder: self.images[first:last] for folder, (first, last) in places if first < last}

    @cached_property
    def not_images(self) -> list[tuple[int, str]]:
        """Positions and names of the other files, in walk order: layouts look for their own files only among these."""
        return [(i, self.names[i]) for i in np.setdiff1d(np.arange(len(self.names)), self.images).tolist()]

    @cached_property
    def known(self) -> NDArray[np.bool_]:
        """bool (F,), which files a layout has read or spoken of; whatever else it has passed over. For it to set."""
        return np.zeros(len(self.names), np.bool_)

    def read_text(self, i: int) -> bytes:
        """Returns the content of file i, which the whole dataset depends on; SourceError says why it cannot be read."""
        self.known[i] = True
        try:
            return self.files.read(i)
        except ImageError as exc:
            raise SourceError(f"{self.path}: {key_of(self.names[i])} {exc}. Fix or remove that file.") from exc

    def lines(self, i: int) -> list[Line]:
        """Returns the lines of text file i that are not blank; raises as `read_text` does."""
        return lines_of(self.read_text(i), self.where(i))

    def where(self, i: int) -> str:
        """Returns the path of file i, for messages."""
        return str(self.path / key_of(self.names[i]))


@dataclass(frozen=True, eq=False)
class FolderFiles:
    """Reads files below a folder, as they were listed."""

    root: bytes  # absolute path of the folder
    paths: Paths  # relative to it
    sizes: NDArray[np.int64]  # int64 (F,), bytes of each file
    mtimes_ns: NDArray[np.int64]  # int64 (F,), time of modification of each file

    def read(self, i: int) -> bytes:
        return self.read_head(i, int(self.sizes[i]))

    def read_head(self, i: int, size: int) -> bytes:
        try:
            fd = os.open(os.path.join(self.root, self.paths[i]), os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = read_bytes(fd, size, 0)
                # Behind the read: so it also sees who writes meanwhile, and one call is enough.
                status = os.fstat(fd)
            finally:
                os.close(fd)
        except OSError as exc:
            raise ImageError(f"cannot be read: {exc.strerror}") from exc
        if not is_as_listed(status, int(self.sizes[i]), int(self.mtimes_ns[i])):
            raise ImageError("was written to or replaced since it was listed")
        return data

    def take(self, indices: NDArray[np.integer[Any]]) -> FolderFiles:
        return FolderFiles(self.root, self.paths.take(indices), self.sizes[indices], self.mtimes_ns[indices])


def is_image(name: str) -> bool:
    """Whether a file is an image by its suffix, in upper or lower case."""
    return name.lower().endswith(IMAGE_SUFFIXES)


_OF_SYSTEMS = frozenset(
    "__macosx @eadir #recycle #snapshot $recycle.bin recycler lost+found __pycache__ thumbs.db desktop.ini".split()
) | {"system volume information"}
"""Names, in lower case, of files that operating systems, file servers and Python leave among a user's files."""


def is_hidden(part: str) -> bool:
    """Whether a file or folder is passed over by its name: .DS_Store, ._photo.jpg, __MACOSX, @eaDir, Thumbs.db, ..."""
    return part.startswith(".") or part.lower() in _OF_SYSTEMS


def walk_order(name: str) -> tuple[str, str]:
    """Returns the key by which paths are sorted: folder by folder, as torchvision's ImageFolder walks."""
    folder, _, base = name.rpartition("/")
    return folder, base


def key_of(name: str) -> str:
    """Returns a name as text that UTF-8 can hold: undecodable bytes become `\\xNN`."""
    return name if name.isascii() else name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def hidden_note(hidden: list[str]) -> str:
    """Returns the note about hidden files that were passed over."""
    return f"Passed over as hidden ({len(hidden)}): {first_few(sorted(hidden))}."
