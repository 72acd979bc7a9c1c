"""Opens a path as a Tree: walks a folder, lists an archive or a bucket, or takes a single table or array file as it is.

In an object store a Tree is all objects below a URL. An object is known by its ETag: each read asks for that version,
so one that was replaced since the listing is refused. Readers hold the bucket's URL and how it is requested, no
connection and no secret; every process opens its own client.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
import stat
from array import array
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import (
    AccessError,
    ImageError,
    MissingFileError,
    ObjectMissingError,
    PackError,
    RemoteError,
    ReplacedError,
    SourceError,
)
from fastload.remote.backend import ObjectInfo
from fastload.remote.cloud import split
from fastload.remote.ranges import ObjectRange, announce, client_of, read_range
from fastload.remote.urls import ObjectPath, Remote, path_of, remote_in_force
from fastload.sources.archives import list_archive
from fastload.sources.foreign import SHARD_NAME
from fastload.sources.listing import first_few
from fastload.sources.spans import HEAD_BYTES, ListedObject, Paths, changed_ns, without_cache
from fastload.sources.tree import FolderFiles, Tree, hidden_note, is_hidden, is_image, is_library, key_of, walk_order

_WHOLE_BYTES = 2**20  # other images up to this size are fetched whole, as all of them is read for their header
_NEAR = 4  # how far behind the file that was read last the next one may be: an image may lie between annotations
_GUESSED = 64  # files that are fetched ahead where one after another is read
_GUESSED_BYTES = 2**18  # each of at most so many bytes


@dataclass(frozen=True, eq=False)
class BucketFiles:
    """Reads objects whole, as they were listed."""

    url: str  # of the bucket
    remote: Remote
    prefix: str  # of all keys
    paths: Paths  # what follows it in each
    sizes: NDArray[np.int64]  # int64 (F,), bytes of each object
    etags: NDArray[np.bytes_]  # S (F,), "" for none
    _read: list[int] = field(default_factory=list, repr=False)  # of this process: what was read last, and how far ahead

    def read(self, i: int) -> bytes:
        self._guess(i)
        return self.read_head(i, int(self.sizes[i]))

    def read_head(self, i: int, size: int) -> bytes:
        try:
            return read_range(self._range(i, size)) if size and self.sizes[i] else b""
        except ReplacedError as exc:
            raise ImageError("was written to or replaced since it was listed") from exc
        except ObjectMissingError as exc:
            raise ImageError("cannot be read: there is no such object any more") from exc
        except RemoteError as exc:
            raise PackError(str(exc)) from exc  # no fault of the sample: it must not be skipped for it

    def ranges(self, indices: NDArray[np.integer[Any]], *, heads: bool) -> list[ObjectRange]:
        """Returns the ranges read of the files at these indices, or for their headers, for `announce`."""
        found = []
        for i in indices.tolist():
            size = int(self.sizes[i])
            jpeg = self.paths[i][-5:].lower().endswith((b".jpg", b".jpeg"))
            found.append(self._range(i, HEAD_BYTES if heads and (jpeg or size > _WHOLE_BYTES) else size))
        return found

    def take(self, indices: NDArray[np.integer[Any]]) -> BucketFiles:
        paths, sizes, etags = self.paths.take(indices), self.sizes[indices], self.etags[indices]
        return replace(self, paths=paths, sizes=sizes, etags=etags, _read=[])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_read": []}

    def _range(self, i: int, size: int) -> ObjectRange:
        key = self.prefix + self.paths[i].decode()
        etag = bytes(self.etags[i]).decode() or None
        return ObjectRange(self.url, self.remote, key, 0, min(size, int(self.sizes[i])), etag)

    def _guess(self, i: int) -> None:
        """Announces the next small files of the same kind where one is read after another, as annotations are."""
        last, reach = self._read or (i, 0)
        suffix = posixpath.splitext(self.paths[i])[1]
        if not 0 < i - last <= _NEAR or posixpath.splitext(self.paths[last])[1] != suffix:
            reach = 0
        elif i >= reach - _GUESSED // 2:
            first = max(i + 1, reach)
            reach = min(first + _GUESSED, len(self.sizes))
            small = [k for k in range(first, reach) if self.sizes[k] <= _GUESSED_BYTES]
            later = [k for k in small if self.paths[k].endswith(suffix)]
            announce(self.ranges(np.array(later, np.int64), heads=False))
        self._read[:] = i, reach


def open_bucket(path: ObjectPath) -> Tree | ListedObject:
    """Returns all objects below a URL as a tree, without hidden ones; or the object that the URL itself names.

    Raises:
        MissingFileError: there is no such object, and none below it.
        RemoteError: the store was not reached, or refuses.
    """
    client, key = client_of(path)
    if key:
        with suppress(ObjectMissingError):
            return ListedObject.of(path)
    prefix = f"{key}/" if key else ""
    found: dict[str, ObjectInfo] = {}
    folders: set[str] = set()
    hidden: dict[str, None] = {}
    try:
        for info in client.list(prefix):
            name = info.key[len(prefix) :]
            parts = name.split("/")
            if first := next((at for at, part in enumerate(parts, 1) if is_hidden(part)), 0):
                hidden["/".join(parts[:first])] = None
            elif not info.num_bytes and "." not in parts[-1]:  # what consoles make to show an empty folder
                folders.add(name.rstrip("/"))
            else:
                found[name] = info
    except AccessError:
        raise
    except RemoteError as exc:
        if str(path).startswith(("http://", "https://")):
            raise MissingFileError(
                f"{path}: there is no such file, and a web server has no list of a folder. Give the URL of one archive "
                "or table."
            ) from exc
        raise
    if not found and not folders:
        fix = "Check the bucket and the name."
        if re.search(r"[{*?\[]", path.name):
            fix = "Patterns are not expanded. To pack all shards, give the folder that holds them."
        raise MissingFileError(f"{path}: there is no such object, and none below it. {fix}")
    names = sorted(found, key=walk_order)
    for name in names:
        while (name := posixpath.dirname(name)) and name not in folders:
            folders.add(name)
    infos = [found[name] for name in names]
    sizes = np.array([info.num_bytes for info in infos], np.int64)
    etags = np.array([(info.etag or "").encode() for info in infos], "S")
    return Tree(
        path=path,
        names=names,
        folders=sorted(folders - {""}),
        sizes=sizes,
        mtimes_ns=np.array([changed_ns(info) for info in infos], np.int64),
        files=BucketFiles(
            split(str(path))[0], without_cache(remote_in_force()), prefix,
            Paths.of([name.encode() for name in names]), sizes, etags,
        ),
        notes=(hidden_note(list(hidden)),) if hidden else (),
    )  # fmt: skip


def lone_file(path: ObjectPath, listed: ListedObject) -> Tree:
    """Returns the tree of a single table or array file."""
    prefix, name = split(str(path.parent))[1], path.name
    sizes, etags = np.array([listed.num_bytes], np.int64), np.array([(listed.etag or "").encode()], "S")
    prefix = f"{prefix}/" if prefix else ""
    files = BucketFiles(split(listed.path)[0], listed.remote, prefix, Paths.of([name.encode()]), sizes, etags)
    mtimes = np.array([listed.mtime_ns], np.int64)
    return Tree(path=path.parent, names=[name], sizes=sizes, mtimes_ns=mtimes, files=files, file=name)


_TABLES = tuple(".csv .tsv .jsonl .ndjson .json .parquet .npy .npz .h5 .hdf5 .hdf .txt".split())

_SHEETS = (".xlsx", ".xls", ".ods")
_GONE = "is a link to a file that does not exist"
_WHY_BROKEN = {errno.ENOENT: _GONE, errno.ENOTDIR: _GONE, errno.ELOOP: "is a link that leads back to itself"}

_IDX = re.compile(r"idx[123]-(ubyte|int)(\.gz)?$")


def open_tree(path: str | Path | Tree) -> Tree:
    """Returns the files of a folder, a .zip or an uncompressed .tar; for a table or array file, a tree of that file.

    Each may lie in an object store: give its URL. A folder there is all objects whose names begin with it and a slash.

    Archives are recognised by their content. Symbolic links are followed, into folders too, but never in a circle.
    Names that begin with a dot, and `__MACOSX`, are passed over and counted in the notes.

    Args:
        path: the folder, archive or file; a tree is returned as it is.

    Raises:
        MissingFileError: there is nothing at path.
        SourceError: path is neither folder nor archive, is damaged or unreadable, or holds a name twice.
    """
    if not isinstance(path, Tree) and is_library(path):
        # Imported here: no other source needs it.
        from fastload.sources.library import library_tree

        path = library_tree(path)
    if isinstance(path, Tree):
        return path
    path = path_of(path)
    if isinstance(path, ObjectPath):
        return _open_url(path)
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as exc:
        fix = "Give the folder, .zip or .tar that holds the images."
        if re.search(r"[{*?\[]", path.name):
            fix = f"Patterns are not expanded. To pack all shards, give the folder that holds them: {path.parent}"
        raise MissingFileError(f"{path}: there is no such file or folder. {fix}") from exc
    except OSError as exc:
        raise SourceError(f"{path} cannot be read: {exc.strerror}. Check the rights of the folders above it.") from exc
    if stat.S_ISDIR(status.st_mode):
        return _walk(path)
    if stat.S_ISREG(status.st_mode) and _is_table(path):
        name = os.fsdecode(path.name)
        size, mtime = np.array([status.st_size], np.int64), np.array([status.st_mtime_ns], np.int64)
        return Tree(
            path=path.parent,
            names=[name],
            sizes=size,
            mtimes_ns=mtime,
            files=FolderFiles(os.path.abspath(os.fsencode(path.parent)), Paths.of([os.fsencode(name)]), size, mtime),
            file=name,
        )
    if not stat.S_ISREG(status.st_mode):
        raise SourceError(f"{path} is a pipe or device. Give a folder, or a file with the same content.")
    if path.name.lower().endswith(_SHEETS):
        raise SourceError(f"{path} is a spreadsheet, which is not read. Save it as CSV, and give that.")
    return list_archive(path)


def _is_table(path: Path) -> bool:
    name = path.name.lower()
    return name.endswith(_TABLES) or _IDX.search(name) is not None or SHARD_NAME.fullmatch(name) is not None


def _open_url(path: ObjectPath) -> Tree:
    found = open_bucket(path)
    if isinstance(found, Tree):
        return found
    return lone_file(path, found) if _is_table(path) else list_archive(path)


def _walk(root: Path) -> Tree:
    top = os.path.abspath(os.fsencode(root))
    names: list[str] = []
    folders: list[str] = []
    sizes, mtimes = array("q"), array("q")
    broken: list[tuple[str, str]] = []
    passed: list[tuple[str, str]] = []
    hidden: list[str] = []
    circles: list[str] = []
    status = os.stat(top)
    # A folder is not entered below itself; two links to one folder are both followed.
    pending = [("", frozenset([(status.st_dev, status.st_ino)]))]
    while pending:
        prefix, above = pending.pop()
        try:
            # Listed as bytes: names must not depend on the locale of the machine that packs.
            with os.scandir(os.path.join(top, prefix.encode("utf-8", "surrogateescape"))) as found:
                entries = list(found)
        except OSError as exc:
            fix = "Make it readable for this user, or move it out of the dataset."
            raise SourceError(f"{root / key_of(prefix)}: the folder cannot be listed: {exc.strerror}. {fix}") from exc
        for entry in entries:
            part = entry.name.decode("utf-8", "surrogateescape")
            name = prefix + part
            if is_hidden(part):
                hidden.append(key_of(name))
                continue
            try:
                is_folder = entry.is_dir()
                status = entry.stat()
            except OSError as exc:
                why = _WHY_BROKEN.get(exc.errno or 0, f"cannot be read: {exc.strerror}")
                (broken if is_image(name) else passed).append((name, why))
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
    listed = np.array(sizes, np.int64)[order], np.array(mtimes, np.int64)[order]
    notes = [hidden_note(hidden)] if hidden else []
    if passed:
        notes.append(f"NOT READ: {first_few(f'{key_of(name)} {why}' for name, why in sorted(passed))}.")
    if circles:
        notes.append(f"Links that lead back to a folder above them were not followed: {first_few(sorted(circles))}.")
    return Tree(
        path=root,
        names=names,
        folders=sorted(folders),
        sizes=listed[0],
        mtimes_ns=listed[1],
        files=FolderFiles(top, Paths.of([name.encode("utf-8", "surrogateescape") for name in names]), *listed),
        broken=sorted(broken),
        passed=sorted(passed),
        notes=tuple(notes),
    )
