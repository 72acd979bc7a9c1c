"""Opens a packed file or an index behind a URL: `open_remote` returns its header, whose rows are fetched when needed.

The header is that of an index in the cache of this machine, of one shard where the URL is that of a packed file.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import xxhash

from fastload.errors import CacheError, FormatError, MissingFileError, OptionError
from fastload.format.header import PackedFile, read_header
from fastload.remote.byte_locks import ByteLocks
from fastload.remote.cache import CacheFolder, forget_all, keep_in_use
from fastload.remote.chunks import Range
from fastload.remote.client import Client, open_client
from fastload.remote.headers import as_index, copy_ranges, fetch_into_memory, sparse_file
from fastload.remote.meta import Meta
from fastload.remote.options import Remote, shown
from fastload.remote.room import evict_elsewhere
from fastload.remote.shards import RemoteShards

_PAUSE_S = 0.05
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
    info = client.head(key)
    cache = CacheFolder(remote.cache_folder(), remote.limit())
    folder_key, name = key[: key.rfind("/") + 1], key[key.rfind("/") + 1 :]
    if not name:
        raise OptionError(
            f"{shown(url)}: ends with a slash, as the name of no object does. Give that of a packed file."
        )
    found = in_use = None
    deadline_s = time.monotonic() + remote.give_up_after
    while found is None or in_use is None:  # another process may remove the folder before it is in use, or repair it
        folder = _known(cache, shown(url), name, info.num_bytes, info.etag)
        if folder is not None:
            if (in_use := keep_in_use(folder)) is None:
                continue
            with suppress(FormatError, MissingFileError):  # the copy is damaged, or its header was evicted
                found = read_header(folder / name)
                continue
            in_use.close()
        try:
            folder, in_use = _fetch_index(cache, client, key, shown(url), info.num_bytes, info.etag)
            if in_use is not None and (time.monotonic() > deadline_s or _is_readable(folder / name)):
                found = read_header(folder / name)
            elif in_use is not None:
                in_use.close()
                time.sleep(_PAUSE_S)
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise CacheError(
                f"{cache.root.parent}: the disk is full, there is no room for the header of {shown(url)}. Make room "
                f"there (`fastload cache clear` removes what no job uses), or name another folder: Remote(cache=...)."
            ) from exc
    try:
        assert folder is not None, "it is in use"
        if not (is_index := found.shards is not None):
            found = as_index(found)
        file = replace(found, identity=found.identity._replace(mtime_ns=-1))
        cache.close()
        shards = RemoteShards(url, remote, file, client, folder_key)
    finally:
        in_use.close()
    if not is_index:
        shards.note_header()
    object.__setattr__(file, "remote", shards)
    return file


def _known(cache: CacheFolder, url: str, name: str, size: int, etag: str | None) -> Path | None:
    """Returns the folder of a URL that is in the cache, and has not changed since."""
    for folder in cache.datasets():
        if etag is not None and Meta(folder / "meta.json").read().get(url, {}).get(name) == (size, etag):
            with suppress(OSError):
                os.utime(folder / "meta.json")
                return folder
    return None


def _fetch_index(
    cache: CacheFolder, client: Client, key: str, url: str, size: int, etag: str | None
) -> tuple[Path, ByteLocks | None]:
    """Fetches an index, or what of a packed file is no pixels, into a new folder of the cache.

    Returns the folder and what keeps it in use; None: another process was first, and it may be gone again.
    """
    name = key[key.rfind("/") + 1 :]
    memory, ranges = fetch_into_memory(client, key, size, etag)
    try:
        with cache.new_dataset() as (new, new_in_use):
            path, in_use = new / name, None
            with sparse_file(path, size) as fd:
                _fill(cache, url, memory, fd, ranges)
            header = read_header(path)
            folder, is_index = cache.root / _folder_name(header, name, etag), header.shards is not None
            with cache.locked():
                Meta(new / "meta.json").add(url, {name: (size, etag)})
                try:
                    os.rename(new, folder)
                    in_use = new_in_use
                except OSError:  # another process was first, it lies at another URL, too, or its copy is damaged
                    new_in_use.close()
                    if (in_use := keep_in_use(folder)) is not None:
                        Meta(folder / "meta.json").add(url, {name: (size, etag)})
                        if not (folder / name).exists() or (folder / name).stat().st_size != size:
                            if not is_index:  # its chunks are gone with it
                                forget_all(folder)
                            os.replace(path, folder / name)
                cache.count()
            if in_use is not None and not _is_readable(folder / name):
                _repair(cache, url, memory, folder / name, ranges, in_use)
            return folder, in_use
    finally:
        os.close(memory)


def _folder_name(header: PackedFile, name: str, etag: str | None) -> str:
    """Returns the name of a dataset's folder in the cache; see `cache`."""
    parts = [header.header_digest]
    if header.shards is None:
        # Chunks are those of a file of this name, and where it has no digests of its rows, of this version of it.
        parts.append(xxhash.xxh32_hexdigest(f"{name}{etag if header.version is None else ''}".encode()))
    return "-".join(parts)


def _fill(cache: CacheFolder, url: str, memory: int, fd: int, ranges: Sequence[Range]) -> None:
    """Copies ranges of a file in memory to a file in the cache, for which there has to be room."""
    while not cache.allocate(fd, ranges):
        if not evict_elsewhere(cache):
            raise CacheError(
                f"{cache.root.parent}: {cache.bound} is reached by what is in use, and there is no room for the header "
                f"of {url}. Give the cache more: Remote(max_bytes=..., cache=...)."
            )
    copy_ranges(memory, fd, ranges)
    os.fsync(fd)  # there is no record to compare it with when the machine was started anew


def _is_readable(path: Path) -> bool:
    with suppress(FormatError, MissingFileError):
        read_header(path)
        return True
    return False


def _repair(cache: CacheFolder, url: str, memory: int, path: Path, ranges: Sequence[Range], in_use: ByteLocks) -> None:
    """Writes the header of a file into its copy again, unless another process uses that."""
    if not in_use.try_exclusive(_HEADER):
        return
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _fill(cache, url, memory, fd, ranges)
        finally:
            os.close(fd)
    finally:
        in_use.unlock(_HEADER)
