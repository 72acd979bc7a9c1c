"""Opens a path as a Tree: walks a folder, lists an archive, or takes a single table or array file as it is."""

from __future__ import annotations

import errno
import os
import re
import stat
from array import array
from pathlib import Path

import numpy as np

from fastload.errors import MissingFileError, SourceError
from fastload.remote.urls import ObjectPath, path_of
from fastload.sources.archives import list_archive
from fastload.sources.bucket import lone_file, open_bucket
from fastload.sources.foreign import SHARD_NAME
from fastload.sources.listing import first_few
from fastload.sources.spans import Paths
from fastload.sources.tree import FolderFiles, Tree, hidden_note, is_hidden, is_image, is_library, key_of, walk_order

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
