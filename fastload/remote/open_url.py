"""Opens a packed file or an index behind a URL: `open_remote` returns its header, whose rows are fetched when needed.

The header describes an index in the cache of this machine; where the URL names a packed file, an index of one shard.
"""

from __future__ import annotations

import errno
import functools
import os
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import xxhash

from fastload.errors import CacheError, FormatError, MissingFileError, OptionError
from fastload.format.header import PackedFile, read_header
from fastload.remote.byte_locks import ByteLocks
from fastload.remote.cache import CacheFolder, CacheLostError, check_names
from fastload.remote.cached import forget_all
from fastload.remote.chunks import Range
from fastload.remote.client import Client, open_client
from fastload.remote.evictor import evict_elsewhere
from fastload.remote.headers import as_index, copy_ranges, fetch_into_memory, sparse_file
from fastload.remote.meta import Meta
from fastload.remote.options import Remote, shown
from fastload.remote.own_files import Folder
from fastload.remote.shards import RemoteShards

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_HEADER = 0  # the chunk of the header of a dataset's first shard


def open_remote(url: str, remote: Remote | None = None) -> PackedFile:
    """Returns the header of a packed file or an index behind a URL; `PackedFile.remote` fetches its rows.

    Raises:
        RemoteError: the object is missing, refused, or its server is not reached.
        FormatError: it is no HDF5 file.
        OptionError: no cache can be made; a package for such URLs is missing.
    """
    remote = remote or Remote()
    if not isinstance(remote, Remote):
        raise OptionError(f"remote={remote!r}: give how URLs are read, such as Remote(cache={str(remote)!r})")
    client, key = open_client(url, remote)
    folder_key, name = key[: key.rfind("/") + 1], key[key.rfind("/") + 1 :]
    if not name:
        raise OptionError(f"{shown(url)}: ends with a slash, which no object's name does. Give a packed file's URL.")
    check_names(shown(url), [name])
    make = functools.partial(_kept, client, key, shown(url), remote)
    in_use, found = make()
    with closing(in_use):
        if found.shards is not None:
            check_names(shown(url), [name, *found.shards.names])
        else:
            found = as_index(found)
        file = replace(found, identity=found.identity._replace(mtime_ns=-1))
        shards = RemoteShards(url, remote, file, client, folder_key, make)
    object.__setattr__(file, "remote", shards)
    return file


def _kept(client: Client, key: str, url: str, remote: Remote) -> tuple[ByteLocks, PackedFile]:
    """Returns what keeps the dataset of a URL in the cache in use, and its header; it is made where it is not there.

    Of a cache that others may write to, the header is one that was fetched now.
    """
    name, info = key[key.rfind("/") + 1 :], client.head(key)
    deadline_s, pause_s = time.monotonic() + remote.give_up_after, _FIRST_PAUSE_S
    while True:
        with closing(CacheFolder(remote.cache_folder(), remote.limit(), others=remote.shared)) as cache:
            try:
                folder = None if remote.shared else _known(cache, url, name, info.num_bytes, info.etag)
                used = (_use(cache, folder / name) if folder is not None else None) or _fetch_index(
                    cache, client, key, url, info.num_bytes, info.etag
                )
            except CacheLostError:  # somebody removes it all
                used = None
            except OSError as exc:
                if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise CacheError(
                    f"{cache.root.parent}: the disk is full, there is no room for the header of {url}. Make room "
                    f"there (`fastload cache clear` removes what no job uses), or name another folder: "
                    f"Remote(cache=...)."
                ) from exc
        if used is not None:
            return used
        if time.monotonic() > deadline_s:
            raise CacheError(
                f"{cache.root.parent}: the copy of {url} there is damaged, and another process uses it. End that "
                f"process, or name another folder: Remote(cache=...)."
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _known(cache: CacheFolder, url: str, name: str, size: int, etag: str | None) -> Path | None:
    """Returns the folder of a URL that is in the cache, and has not changed since."""
    for folder in cache.datasets():
        if etag is not None and Meta(folder / "meta.json").read().get(url, {}).get(name) == (size, etag):
            with suppress(OSError):
                os.utime(folder / "meta.json", follow_symlinks=False)
                return folder
    return None


def _use(cache: CacheFolder, path: Path) -> tuple[ByteLocks, PackedFile] | None:
    """Returns the locks that keep a cached dataset in use, and its header, which is of a file there.

    None: another process removes it, or the file is damaged, or its header was evicted.
    """
    if (in_use := cache.keep_in_use(path.parent)) is None:
        return None
    with suppress(FormatError, MissingFileError):
        return in_use, read_header(path)
    in_use.close()
    return None


def _fetch_index(
    cache: CacheFolder, client: Client, key: str, url: str, size: int, etag: str | None
) -> tuple[ByteLocks, PackedFile] | None:
    """Fetches an index, or what of a packed file is no pixels, into a folder of the cache; returns what `_use` does.

    None also where another process uses the damaged copy that is there.
    """
    name = key[key.rfind("/") + 1 :]
    memory, ranges = fetch_into_memory(client, key, size, etag)
    try:
        with cache.new_dataset() as (new, new_in_use):
            path = new / name
            with sparse_file(path, size) as fd:
                os.fchmod(fd, os.stat(new).st_mode & 0o666)  # others may share the cache
                _fill(cache, url, memory, fd, ranges)
            header = read_header(path)
            folder = cache.root / _folder_name(header, name, etag)
            with cache.locked():
                Meta(new / "meta.json").add(url, {name: (size, etag)})
                try:
                    os.rename(new, folder)
                except OSError:  # another process was first, it lies at another URL, too, or its copy is damaged
                    new_in_use.close()
                    if (others := cache.locks_of(folder)) is not None:
                        others.close()
                    if others is None:
                        cache.remove(folder)
                        os.rename(new, folder)
                    else:
                        Meta(folder / "meta.json").add(url, {name: (size, etag)})
                        if not (folder / name).exists() or (folder / name).stat().st_size != size:
                            if header.shards is None:  # its chunks are gone with it
                                with closing(Folder(folder, shared=cache.others)) as opened:
                                    forget_all(opened)
                            os.replace(path, folder / name)
                cache.use.count()
            if (used := _use(cache, folder / name)) is None:
                _repair(cache, url, memory, folder / name, ranges)
                used = _use(cache, folder / name)
            if used is not None and cache.others:
                used = used[0], replace(header, path=used[1].path, identity=used[1].identity)
            return used
    finally:
        os.close(memory)


def _folder_name(header: PackedFile, name: str, etag: str | None) -> str:
    """Returns the name of a dataset's folder in the cache; see `cache`."""
    parts = [header.header_digest]
    if header.shards is None:
        # Chunks belong to a file of this name, and where it has no digests of its rows, to this version of it.
        parts.append(xxhash.xxh32_hexdigest(f"{name}{etag if header.version is None else ''}".encode()))
    return "-".join(parts)


def _fill(cache: CacheFolder, url: str, memory: int, fd: int, ranges: Sequence[Range]) -> None:
    """Copies ranges of a file in memory to a file in the cache, for which there has to be room."""
    while not cache.bound.allocate(fd, ranges):
        if not evict_elsewhere(cache):
            raise CacheError(
                f"{cache.root.parent}: {cache.bound} is reached by what is in use, and there is no room for the header "
                f"of {url}. Give the cache more: Remote(max_bytes=..., cache=...)."
            )
    copy_ranges(memory, fd, ranges)
    os.fsync(fd)  # there is no record to compare it with when the machine was started anew


def _repair(cache: CacheFolder, url: str, memory: int, path: Path, ranges: Sequence[Range]) -> None:
    """Writes the header of a file into its copy again, unless another process uses that, or it is gone."""
    if (locks := cache.keep_in_use(path.parent)) is None:
        return
    with closing(locks), closing(Folder(path.parent, shared=cache.others)) as folder:
        if locks.try_exclusive(_HEADER):
            fd = folder.open(path.name, os.O_RDWR)
            try:
                _fill(cache, url, memory, fd, ranges)
            finally:
                os.close(fd)
