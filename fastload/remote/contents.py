"""Lists, verifies and clears the cache of this machine: `list_cache`, `verify_cache` and `clear_cache`.

They make no request. Only files below CACHE/1 are removed, which are copies of objects; links there are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastload.errors import OptionError
from fastload.format.header import PackedFile, open_hdf5, read_header
from fastload.format.joined import as_index
from fastload.remote.cache import VERSION, CacheFolder, Meta, allocated_below, check_names
from fastload.remote.chunks import ChunkTable, Range, ShardLayout
from fastload.remote.headers import UNREADABLE, header_ranges
from fastload.remote.sparse_copies import RECORD, CachedDataset, are_there, dataset_on_disk
from fastload.remote.urls import Remote, shown

Progress = Callable[[int, int], None]
"""Called with (chunks done, chunks in all)."""


@dataclass(frozen=True)
class CachedContent:
    """One dataset in the cache."""

    folder: Path  # of its files, in the cache
    urls: tuple[str, ...]  # that it was read from, without what may be secret in them
    bytes: int  # that its files take on the disk
    chunks: int  # that are there, the headers of shards included
    num_chunks: int  # of all shards
    used_s: float  # when it was last opened, in seconds since 1970
    in_use: bool  # whether some process has it open

    @property
    def name(self) -> str:
        """The URL that it was read from first."""
        return self.urls[0] if self.urls else str(self.folder)


@dataclass(frozen=True)
class CacheContents:
    """Result of `list_cache`."""

    cache: Path  # its folder
    datasets: tuple[CachedContent, ...]  # those used last come first
    bytes: int  # that all files of the cache take
    limit_bytes: int  # bound on that, where `Remote(max_bytes=...)` says nothing else

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings and numbers, for `json.dumps`."""
        datasets = [{"name": one.name, **asdict(one), "folder": str(one.folder)} for one in self.datasets]
        return {**asdict(self), "cache": str(self.cache), "datasets": datasets}


@dataclass(frozen=True)
class CacheCheck:
    """Result of `verify_cache` for one dataset; counts are of chunks."""

    name: str  # its URL
    checked: int  # that were read and hashed
    wrong: int  # of these, whose bytes differ from what was downloaded
    removed: int  # of these, that were removed: the next read fetches them again
    skipped: int  # that another process was fetching
    unreadable: bool = False  # whether its header cannot be read, so that nothing was checked

    @property
    def ok(self) -> bool:
        return not self.wrong and not self.unreadable

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings and numbers, for `json.dumps`."""
        return {"ok": self.ok, **asdict(self)}


@dataclass(frozen=True)
class Cleared:
    """Result of `clear_cache`."""

    removed: tuple[CachedContent, ...]
    in_use: tuple[CachedContent, ...]  # that were left, since some process has them open
    bytes: int  # that all files of the cache take now

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings and numbers, for `json.dumps`: of datasets their names."""
        names = {name: [one.name for one in getattr(self, name)] for name in ("removed", "in_use")}
        return {**names, "bytes": self.bytes}


def list_cache(remote: Remote | None = None) -> CacheContents:
    """Returns what the cache holds; nothing where there is none.

    Raises:
        OptionError: CACHE/1 is a link.
        CacheError: others can write to the cache.
    """
    remote = remote or Remote()
    with _opened(remote) as cache:
        if cache is None:
            return CacheContents(remote.cache_folder(), (), 0, 0)
        found = tuple(content for _, content in _contents(cache))
        return CacheContents(remote.cache_folder(), found, cache.bound.num_bytes, cache.bound.limit)


def verify_cache(
    url: str | None = None, remote: Remote | None = None, *, progress: Progress | None = None
) -> list[CacheCheck]:
    """Hashes all chunks in the cache, or one URL's, and removes chunks that differ from what came.

    Without a request: a chunk is compared with what was noted when it came. Others may use the cache meanwhile; a wrong
    chunk that somebody has in use stays.

    Raises:
        OptionError: CACHE/1 is a link, or the URL is not in the cache.
        CacheError: others can write to the cache.
    """
    with _opened(remote or Remote()) as cache:
        if cache is None:
            return []
        chosen = _chosen(cache, url)
        total, done = sum(content.chunks for _, content in chosen), 0

        def advance() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(min(done, total), total)

        return [_verified(cache, folder, content, advance) for folder, content in chosen]


def clear_cache(url: str | None = None, remote: Remote | None = None) -> Cleared:
    """Removes the datasets of the cache that nobody has open, or one URL's, and what killed processes left.

    Raises:
        OptionError: CACHE/1 is a link, or the URL is not in the cache.
        CacheError: others can write to the cache.
    """
    with _opened(remote or Remote()) as cache:
        if cache is None:
            return Cleared((), (), 0)
        removed, left = list[CachedContent](), list[CachedContent]()
        for folder, content in _chosen(cache, url):
            with cache.locked():
                (removed if cache.remove(folder) else left).append(content)
        cache.sweep()
        with cache.locked():
            cache.bound.count()
        return Cleared(tuple(removed), tuple(left), cache.bound.num_bytes)


@contextmanager
def _opened(remote: Remote) -> Iterator[CacheFolder | None]:
    """Yields the cache, None where there is none; OptionError where a link would lead out of it."""
    root = remote.cache_folder().absolute() / str(VERSION)
    if root.is_symlink():
        raise OptionError(f"{root}: is a link, and nothing is removed through one. Name the folder itself.")
    if not root.is_dir():
        yield None
        return
    with closing(CacheFolder(remote.cache_folder(), remote.limit(), others=remote.shared)) as cache:
        yield cache


def _chosen(cache: CacheFolder, url: str | None) -> list[tuple[Path, CachedContent]]:
    found = _contents(cache)
    if url is None:
        return found
    chosen = [(folder, content) for folder, content in found if shown(url) in content.urls]
    if not chosen:
        known = ", ".join(content.name for _, content in found) or "it is empty"
        raise OptionError(f"{shown(url)}: is not in the cache {cache.root.parent}: {known}.")
    return chosen


def _contents(cache: CacheFolder) -> list[tuple[Path, CachedContent]]:
    """Returns the datasets of a cache, those used last first."""
    found = list[tuple[Path, CachedContent]]()
    for folder in cache.datasets()[::-1]:
        with suppress(FileNotFoundError):  # another process removes it
            found.append((folder, _content(cache, folder)))
    return found


def _content(cache: CacheFolder, folder: Path) -> CachedContent:
    meta, records = folder / "meta.json", np.zeros(0, RECORD)
    with suppress(OSError):
        records = np.fromfile(folder / "chunks", RECORD)
    return CachedContent(
        folder=folder,
        urls=tuple(Meta(meta).read()),
        bytes=allocated_below(folder),
        chunks=int(np.count_nonzero(are_there(records))),
        num_chunks=len(records),
        used_s=meta.stat().st_mtime,
        in_use=cache.in_use(folder),
    )


def _verified(cache: CacheFolder, folder: Path, content: CachedContent, advance: Callable[[], None]) -> CacheCheck:
    index = _header(folder)
    if index is None:
        return CacheCheck(content.name, 0, 0, 0, 0, unreadable=bool(content.chunks) or content.num_chunks == 0)
    table = ChunkTable(index)
    try:
        cached = dataset_on_disk(cache, folder, index.shards.names, index.shards.num_bytes, table)
    except FileNotFoundError:  # it is being removed
        return CacheCheck(content.name, 0, 0, 0, 0)
    with closing(cached):
        checks = [_ShardCheck(cached, table, shard, advance) for shard in range(len(index.shards.names))]
        for check in checks:
            check.run()
    counts = (sum(getattr(one, name) for one in checks) for name in ("checked", "wrong", "removed", "skipped"))
    return CacheCheck(content.name, *counts)


def _header(folder: Path) -> PackedFile | None:
    """Returns the header of a dataset's index, or its only file's as an index's; None: it is damaged."""
    for names in Meta(folder / "meta.json").read().values():
        for name in names:
            with suppress(*UNREADABLE):
                found = read_header(folder / name)
                if found.is_index:
                    check_names(name, [name, *found.shards.names])
                if found.header_digest == folder.name.partition("-")[0]:
                    return found if found.is_index else as_index(found)
    return None


class _ShardCheck:
    """The check of one shard's copy; counts as in `CacheCheck`."""

    def __init__(self, cached: CachedDataset, table: ChunkTable, shard: int, advance: Callable[[], None]) -> None:
        self._cached, self._table, self._shard, self._advance = cached, table, shard, advance
        self.checked = self.wrong = self.removed = self.skipped = 0

    def run(self) -> None:
        header, data = int(self._table.headers[self._shard]), self._table.data_of(self._shard)
        if not len(self._cached.records.kept(slice(header, header + 1), whole=True)):
            return  # without it none of its chunks is there
        if not self._cached.locks.try_shared(header):
            self.skipped += 1
            return
        layout, is_there = None, self._cached.presence(header).complete
        try:
            path = self._cached.copies.path(self._shard)
            with suppress(*UNREADABLE):
                if is_there and self._is_right(header, header_ranges(path)):
                    with open_hdf5(path) as hdf5:
                        layout = ShardLayout(hdf5, self._table, self._shard)
        finally:
            self._cached.locks.unlock(header)
        if layout is None:  # where the other chunks lie, nobody knows then
            if is_there:
                self.wrong += 1
                self.removed += self._cached.evict_shard(self._shard, header, data)
            return
        for chunk in self._cached.records.kept(data, whole=True).tolist():
            ranges = layout.ranges(self._table.chunk(chunk))
            if not self._cached.locks.try_shared(chunk):
                self.skipped += 1
                continue
            right = self._is_right(chunk, ranges)
            self._cached.locks.unlock(chunk)
            if right is False:
                self.wrong += 1
                around = self._table.around(chunk, layout.ranges)
                self.removed += self._cached.evict(chunk, self._shard, ranges, around)

    def _is_right(self, chunk: int, ranges: Sequence[Range]) -> bool | None:
        """Whether a chunk is what came; None: its record does not count."""
        if not self._cached.presence(chunk).complete:
            return None
        self._advance()
        self.checked += 1
        return self._cached.records.fits(chunk, self._cached.read(self._shard, ranges))
