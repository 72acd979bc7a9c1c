"""Datasets in an object store: all objects below a URL as a Tree, and the readers of objects and of pieces of them.

An object is known by its ETag: each read asks for that version, so one that was replaced since the listing is refused.
Readers hold the bucket's URL and how it is requested, no connection and no secret; every process opens its own client.
"""

from __future__ import annotations

import posixpath
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
)
from fastload.remote.backend import ObjectInfo
from fastload.remote.cloud import split
from fastload.remote.ranges import ObjectRange, announce, client_of, read_range
from fastload.remote.urls import ObjectPath, Remote, remote_in_force
from fastload.sources.spans import HEAD_BYTES, ListedObject, Paths, changed_ns, without_cache
from fastload.sources.tree import Tree, hidden_note, is_hidden, walk_order

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
