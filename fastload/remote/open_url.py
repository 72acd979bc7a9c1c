"""Opens a packed file or an index behind a URL: `open_remote` returns its header, whose rows are fetched when needed.

`open_packed` opens one by its path or its URL, for what reads either of them once. The header describes an index in the
cache of this machine; where the URL names a packed file, an index of one shard.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import xxhash

from fastload.errors import CacheError, FastloadError, FormatError, MissingFileError, OptionError
from fastload.format.header import PackedFile, read_header
from fastload.format.joined import as_index, join_files, require_written
from fastload.remote.cache import (
    ByteLocks,
    CacheFolder,
    CacheLostError,
    DiskFullError,
    Meta,
    check_names,
    sparse_memory,
)
from fastload.remote.chunks import Range
from fastload.remote.client import Client, open_client
from fastload.remote.evictor import evict_elsewhere
from fastload.remote.headers import copy_ranges, fetch_header, fetch_into_memory, sparse_file
from fastload.remote.own_files import Folder
from fastload.remote.remote_shards import RemoteShards
from fastload.remote.sparse_copies import forget_all
from fastload.remote.urls import FileName, Remote, is_url, shown
from fastload.system.files import write_at
from fastload.system.text import first_few
from fastload.system.threads import in_threads


@contextmanager
def open_packed(name: FileName, remote: Remote | None = None) -> Iterator[PackedFile]:
    """Yields the header of a file, read from its path or its URL; for a URL everything is closed afterwards.

    Errors raised within it name URLs where they would name a copy in the cache.

    Raises:
        MissingFileError, FormatError: as `read_header`.
        RemoteError, OptionError: as `open_remote`.
    """
    if not is_url(name):
        yield read_header(Path(name))
        return
    url, remote = str(name), remote or Remote()
    try:
        file = open_remote(url, remote)
        with closing(cast(Any, file.remote)) as shards:
            shards.source.lets_damage_pass = True  # commands compare each row
            yield file
    except DiskFullError as exc:
        raise CacheError(
            f"{remote.cache_folder()}: the disk of the cache is full. Make room there (`fastload cache clear` removes "
            f"what no job uses), or name another folder: FASTLOAD_CACHE, Remote(cache=...)."
        ) from exc
    except FastloadError as exc:
        exc.args = (_with_urls(str(exc), url, remote), *exc.args[1:])
        raise


def _with_urls(text: str, url: str, remote: Remote) -> str:
    """Returns a message that names the objects of a URL instead of their copies in the cache."""
    cache = re.escape(str(remote.cache_folder().absolute()))
    folder = shown(url).rpartition("/")[0] + "/"
    return re.sub(rf"{cache}/1/[^/\s]+/", lambda _: folder, text)


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
Fetch = Callable[[int, str | None], tuple[int, list[Range]]]
_HEADER = 0  # the chunk of the header of a dataset's first shard


Found = tuple[ByteLocks, PackedFile]  # what keeps a dataset of the cache in use, and its header


def open_remote(url: str | Sequence[str], remote: Remote | None = None) -> PackedFile:
    """Returns the header of a packed file or an index behind a URL; `PackedFile.remote` fetches its rows.

    Of several URLs, in one bucket or of one host, that of the index of them, which is made in the cache.

    Raises:
        SourceError: several files cannot be one dataset, see `join_files`.
        RemoteError: the object is missing, refused, or its server is not reached.
        FormatError: it is no HDF5 file.
        OptionError: no cache can be made; a package for such URLs is missing.
    """
    remote = remote or Remote()
    if not isinstance(remote, Remote):
        raise OptionError(f"remote={remote!r}: give how URLs are read, such as Remote(cache={str(remote)!r})")
    if not isinstance(url, str):
        return _open_list(url, remote)
    client, key = _open_client(url, remote)
    folder_key, name = key[: key.rfind("/") + 1], key[key.rfind("/") + 1 :]

    def head() -> tuple[int, str | None]:
        info = client.head(key)
        return info.num_bytes, info.etag

    fetch = functools.partial(fetch_into_memory, client, key)
    return _opened(
        url, client, folder_key, name, remote, functools.partial(_kept, head, fetch, name, shown(url), remote)
    )


def _open_client(url: str, remote: Remote) -> tuple[Client, str]:
    """Returns the client of an object, and its key; raises OptionError for a URL that names none."""
    client, key = open_client(url, remote)
    if not (name := key[key.rfind("/") + 1 :]):
        raise OptionError(f"{shown(url)}: ends with a slash, which no object's name does. Give a packed file's URL.")
    check_names(shown(url), [name])
    return client, key


def _open_list(urls: Sequence[str], remote: Remote) -> PackedFile:
    """Returns the header of the index of several URLs, see `open_remote`."""
    if wrong := [one for one in urls if not is_url(one)]:
        raise OptionError(
            f"{wrong[0]}: is a file of this machine, and {shown(next(filter(is_url, urls)))} is behind a URL: files "
            f"that are read as one lie in one place. Copy one of them to where the other is."
        )
    opened = [_open_client(url, remote) for url in urls]
    (client, _), keys = opened[0], [key for _, key in opened]
    for url, (other, _) in zip(urls, opened, strict=True):
        if other.url != client.url or "?" in url:
            raise OptionError(
                f"{shown(url)}: files that are read as one are all in one bucket or of one host, here {client.url}, "
                f"and have URLs without a query. Copy them to one place, or make one file of copies: `fastload merge`."
            )
    folders = [key.rpartition("/")[0] for key in keys]
    folder_key = f"{os.path.commonpath(folders)}/" if all(folders) else ""
    folder_key = "" if folder_key == "/" else folder_key
    about = repr([key.removeprefix(folder_key) for key in keys])
    name = f"{xxhash.xxh3_64_hexdigest(about.encode())}.h5"  # in the cache
    url = f"{client.url_of(folder_key)}[{first_few([key.rpartition('/')[2] for key in keys], 3)}]"
    infos = functools.partial(in_threads, client.head, keys, remote.in_flight, ordered=True)

    def head() -> tuple[int, str | None]:
        found = list(infos())
        etags = repr([one.etag for one in found]).encode()
        known = all(one.etag is not None for one in found)
        return sum(one.num_bytes for one in found), xxhash.xxh3_64_hexdigest(etags) if known else None

    def fetch(_size: int, _etag: str | None) -> tuple[int, list[Range]]:
        found = list(infos())
        with tempfile.TemporaryDirectory(prefix="fastload-list-") as copies:

            def copy(number: int) -> PackedFile:
                key, info, path = keys[number], found[number], Path(copies) / str(number)
                header = fetch_header(client, key, info.num_bytes, info.etag, path)
                return replace(require_written(header, client.url_of(key)), given=client.url_of(key))

            headers = list(in_threads(copy, range(len(keys)), remote.in_flight, ordered=True))
            data = join_files(
                headers, [_shard_names(*one, folder_key) for one in zip(headers, keys, strict=True)]
            ).index()
        memory = sparse_memory(len(data))
        write_at(memory, data, 0)
        return memory, [(0, len(data))]

    make = functools.partial(_kept, head, fetch, name, url, remote)
    return _opened(url, client, folder_key, name, remote, make, listed=tuple(map(shown, urls)))


def _shard_names(header: PackedFile, key: str, folder_key: str) -> list[str]:
    """Returns the keys of a file, or of the shards of an index, relative to a folder of the bucket."""
    if not header.is_index:
        return [key.removeprefix(folder_key)]
    folder = key[: key.rfind("/") + 1].removeprefix(folder_key)
    return [folder + name for name in header.shards.names]


def _opened(
    url: str,
    client: Client,
    folder_key: str,
    name: str,
    remote: Remote,
    make: Callable[[], Found],
    *,
    listed: tuple[str, ...] = (),
) -> PackedFile:
    """Returns the header of a dataset that `make` has in the cache, with what fetches its rows."""
    in_use, found = make()
    with closing(in_use):
        if found.is_index:
            check_names(shown(url), [name, *found.shards.names])
        else:
            found = as_index(found)
        file = replace(found, identity=found.identity._replace(mtime_ns=-1), url=shown(url), listed=listed)
        shards = RemoteShards(url, remote, file, client, folder_key, make)
    object.__setattr__(file, "remote", shards)
    return file


def _kept(head: Callable[[], tuple[int, str | None]], fetch: Fetch, name: str, url: str, remote: Remote) -> Found:
    """Returns what keeps the dataset of a URL in the cache in use, and its header; it is made where it is not there.

    Of a cache that others may write to, the header is one that was fetched now.

    Args:
        head: returns size and ETag of the object, or of several, by which a later one tells whether they are the same.
        fetch: as `fetch_into_memory`, given these.
        name: of the file in the cache.
    """
    size, etag = head()
    deadline_s, pause_s = time.monotonic() + remote.give_up_after, _FIRST_PAUSE_S
    while True:
        with closing(CacheFolder(remote.cache_folder(), remote.limit(), others=remote.shared)) as cache:
            try:
                folder = None if remote.shared else _known(cache, url, name, size, etag)
                used = (_use(cache, folder / name) if folder is not None else None) or _fetch_index(
                    cache, fetch, name, url, size, etag
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


def _fetch_index(cache: CacheFolder, fetch: Fetch, name: str, url: str, size: int, etag: str | None) -> Found | None:
    """Fetches an index, or what of a packed file is no pixels, into a folder of the cache; returns what `_use` does.

    None also where another process uses the damaged copy that is there.
    """
    memory, ranges = fetch(size, etag)
    try:
        with cache.new_dataset() as (new, new_in_use):
            path, file_bytes = new / name, os.fstat(memory).st_size
            with sparse_file(path, file_bytes) as fd:
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
                        if not (folder / name).exists() or (folder / name).stat().st_size != file_bytes:
                            if not header.is_index:  # its chunks are gone with it
                                with closing(Folder(folder, shared=cache.others)) as opened:
                                    forget_all(opened)
                            os.replace(path, folder / name)
                cache.bound.count()
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
    if not header.is_index:
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
