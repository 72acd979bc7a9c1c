"""Opens a packed file or an index behind a URL: `open_remote` returns its header, whose rows are fetched when needed.

The header is that of an index in the cache of this machine, of one shard where the URL is that of a packed file.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import xxhash

from fastload.errors import CacheError
from fastload.format.header import PackedFile, read_header
from fastload.remote.byte_locks import ByteLocks
from fastload.remote.cache import CacheFolder, keep_in_use
from fastload.remote.client import Client, open_client
from fastload.remote.headers import as_index, copy_ranges, fetch_into_memory, sparse_file
from fastload.remote.meta import Meta
from fastload.remote.options import Remote, shown
from fastload.remote.room import evict_elsewhere
from fastload.remote.shards import RemoteShards
from fastload.system.text import format_bytes


def open_remote(url: str, remote: Remote | None = None) -> PackedFile:
    """Returns the header of a packed file or an index behind a URL; `PackedFile.remote` fetches its rows.

    Raises:
        RemoteError: the object is missing, refused, or its server is not reached.
        FormatError: it is no HDF5 file.
        OptionError: no cache can be made; a package for such URLs is missing.
    """
    remote = remote or Remote()
    client, key = open_client(url, remote)
    info = client.head(key)
    cache = CacheFolder(remote.cache_folder(), remote.limit())
    folder_key, name = key[: key.rfind("/") + 1], key[key.rfind("/") + 1 :]
    in_use = None
    while in_use is None:  # another process may remove the folder before it is in use
        folder = _known(cache, shown(url), name, info.num_bytes, info.etag)
        if folder is not None:
            in_use = keep_in_use(folder)
            continue
        try:
            folder, in_use = _fetch_index(cache, client, key, shown(url), info.num_bytes, info.etag)
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise CacheError(
                f"{cache.root.parent}: the disk is full, there is no room for the header of {shown(url)}. Make room "
                f"there (`fastload cache clear` removes what no job uses), or name another folder: Remote(cache=...)."
            ) from exc
    try:
        assert folder is not None, "it is in use"
        found = read_header(folder / name)
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
    cache.sweep()
    new = Path(tempfile.mkdtemp(prefix=f".new-{os.getpid()}-", dir=cache.root))
    try:
        path = new / name
        memory, ranges = fetch_into_memory(client, key, size, etag)
        try:
            with sparse_file(path, size) as fd:
                while not cache.allocate(fd, ranges):
                    if not evict_elsewhere(cache):
                        raise CacheError(
                            f"{cache.root.parent}: max_bytes of {format_bytes(cache.limit)} is reached by what is in "
                            f"use, and there is no room for the header of {url}. Give the cache more: "
                            f"Remote(max_bytes=..., cache=...)."
                        )
                copy_ranges(memory, fd, ranges)
        finally:
            os.close(memory)
        header = read_header(path)
        in_use = keep_in_use(new)
        with cache.locked():
            Meta(new / "meta.json").add(url, {name: (size, etag)})
            folder = cache.root / header.header_digest
            if header.shards is None:  # whose chunks are those of a file of this name
                folder = folder.with_name(f"{folder.name}-{xxhash.xxh32_hexdigest(name.encode())}")
            try:
                os.rename(new, folder)
            except OSError:  # another process was first, or the same dataset lies at another URL, too
                assert in_use is not None, "nobody else knows of the new folder"
                in_use.close()
                in_use = keep_in_use(folder)
                Meta(folder / "meta.json").add(url, {name: (size, etag)})
                if not (folder / name).exists():
                    os.rename(path, folder / name)
            cache.count()
        return folder, in_use
    finally:
        shutil.rmtree(new, ignore_errors=True)
