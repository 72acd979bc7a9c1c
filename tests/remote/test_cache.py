"""The cache of remote chunks on a disk: its bound, its records, and what may be removed."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import h5py
import numpy as np
import pytest
from child_processes import child_environment, in_a_fork
from hypothesis import given
from hypothesis import strategies as st
from ragged_cases import jpeg_row
from remote_files import bytes_on_disk, holding, write_kind
from small_files import write_random

import fastload.remote.cache
from fastload import PackedDataset
from fastload.errors import CacheError
from fastload.format.header import PackedFile, read_header
from fastload.pack.index import index_files
from fastload.remote.cache import ByteLocks, CacheFolder, DiskFullError, Meta
from fastload.remote.chunks import Chunk, ChunkTable, Range
from fastload.remote.contents import verify_cache
from fastload.remote.fetch import ChunkFetcher
from fastload.remote.headers import header_ranges
from fastload.remote.source import ChunkSource, ShardObjects
from fastload.remote.sparse_copies import RECORD, CachedDataset, boot_number, dataset_on_disk
from fastload.remote.urls import Remote
from fastload.repack import repack_file
from sample_files import write_ragged

BLOCK = 4096
OF_FILE_SYSTEM = BLOCK  # ext4 takes a block of its own for a file in more than four pieces


def dataset_folder(cache: CacheFolder, name: str = "digest") -> Path:
    """A folder of a dataset that has no chunks yet."""
    folder = cache.root / name
    folder.mkdir(mode=0o700)
    (folder / "locks").touch()
    Meta(folder / "meta.json").add("http://host/x.h5", {"x.h5": (10, "etag")})
    return folder


def one_shard(cache: CacheFolder, folder: Path, num_bytes: int, num_chunks: int) -> CachedDataset:
    """A dataset in the cache of one shard, x.h5."""
    data = slice(1, num_chunks)
    table: Any = SimpleNamespace(headers=np.array([0]), num_chunks=num_chunks, data_of=lambda shard: data)
    return dataset_on_disk(cache, folder, ["x.h5"], np.array([num_bytes]), table)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheFolder]:
    made = CacheFolder(tmp_path / "cache", 2 * 2**20)
    yield made
    made.close()


@given(st.lists(st.tuples(st.integers(0, 60_000), st.integers(1, 9_000), st.booleans()), max_size=30))
def test_what_is_allocated_never_passes_the_bound_and_is_counted_exactly(tmp_path_factory, steps):
    cache = CacheFolder(tmp_path_factory.mktemp("cache"), 70_000)
    fd = os.open(cache.root / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 100_000)
    with cache.locked():
        cache.bound.count()
    refused = 0
    for begin, length, add in steps:
        if add:
            before = os.fstat(fd).st_blocks
            if not cache.bound.allocate(fd, [(begin, begin + length)]):
                refused += 1
                assert os.fstat(fd).st_blocks == before
        else:
            with cache.locked():
                cache.bound.free(fd, [(begin, begin + length)])
        assert cache.bound.num_bytes == bytes_on_disk(cache.root) <= 70_000
    if not refused and steps and all(add for _, _, add in steps):
        assert cache.bound.num_bytes > BLOCK
    os.close(fd)
    cache.close()


def test_two_openings_of_a_folder_and_another_process_keep_one_bound(tmp_path):
    first, second = (CacheFolder(tmp_path, 40_000) for _ in range(2))

    def take(cache: CacheFolder, name: str) -> bool:
        fd = os.open(cache.root / name, os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, 2**20)
        try:
            return cache.bound.allocate(fd, [(0, 3 * BLOCK)])
        finally:
            os.close(fd)

    assert take(first, "a") and first.bound.num_bytes == second.bound.num_bytes == 4 * BLOCK
    assert not take(second, "b") or not take(first, "c")
    assert first.bound.num_bytes == second.bound.num_bytes == bytes_on_disk(first.root) <= 40_000

    def in_another() -> None:
        other = CacheFolder(tmp_path, 40_000)
        assert other.bound.num_bytes == first.bound.num_bytes and not take(other, "d")

    in_a_fork(in_another)


def test_the_folder_is_its_users_alone_and_other_files_there_are_left(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    before = os.umask(0)
    try:
        cache = CacheFolder(tmp_path / "new", None)
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.root.stat().st_mode) == 0o700
    assert stat.S_IMODE((cache.root / "used").stat().st_mode) == 0o600
    assert cache.bound.limit > 0
    CacheFolder(tmp_path, 10**6).sweep()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_killed_processes_left_is_swept_and_what_living_ones_make_is_not(cache):
    left = [cache.root / ".new-x", cache.root / ".gone-y"]
    for folder in left:
        folder.mkdir()
        (folder / "file").write_bytes(b"x" * 10_000)
    with cache.new_dataset() as (living, _):
        assert not any(folder.exists() for folder in left)
        CacheFolder(cache.root.parent, None).sweep()
        assert living.exists()
    assert not living.exists()


def test_a_dataset_in_use_is_not_removed_and_one_that_is_not_gives_its_blocks_back(cache):
    folder = dataset_folder(cache)
    cached = one_shard(cache, folder, 100_000, 5)
    with cached.copies.opened(0) as fd:
        assert cache.bound.allocate(fd, [(0, 50_000)])
    with cache.locked():
        assert not cache.remove(folder)
    assert (folder / "x.h5").exists()
    cached.close()
    with cache.locked():
        assert cache.remove(folder)
        assert cache.bound.num_bytes == bytes_on_disk(cache.root)
    assert not folder.exists() and not [*cache.root.glob(".gone*")]


def test_a_dataset_that_is_to_be_used_is_not_removed_in_between(cache):
    folder = dataset_folder(cache)
    held = cache.keep_in_use(folder)
    assert held is not None
    with cache.locked():
        assert not cache.remove(folder)
    held.close()
    other = ByteLocks(os.open(folder / "locks", os.O_RDWR))
    assert other.try_exclusive(2**62)  # as who removes it has
    assert cache.keep_in_use(folder) is None
    other.close()
    with cache.locked():
        assert cache.remove(folder)
    assert cache.keep_in_use(folder) is None


def test_nothing_outside_the_cache_is_removed(cache, tmp_path):
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "meta.json").write_text("{}")
    (outside / "file").write_text("mine")
    with cache.locked(), pytest.raises(AssertionError):
        cache.remove(outside)
    link = cache.root / "link"
    link.symlink_to(outside)
    assert link not in cache.datasets()
    with cache.locked(), pytest.raises(AssertionError):
        cache.remove(link)
    assert sorted(path.name for path in outside.iterdir()) == ["file", "meta.json"]
    inner = dataset_folder(cache)
    (inner / "folder").symlink_to(outside)
    (inner / "shard.h5").symlink_to(outside / "file")
    with cache.locked():
        assert cache.remove(inner)
    assert (outside / "file").read_text() == "mine" and (outside / "meta.json").exists()


def test_a_shard_that_is_a_link_is_not_written_to(cache, tmp_path):
    (tmp_path / "precious").write_bytes(b"mine")
    folder = dataset_folder(cache)
    cached = one_shard(cache, folder, 100, 1)
    (folder / "x.h5").symlink_to(tmp_path / "precious")
    with pytest.raises(CacheError, match=r"x\.h5: is a link.*Remove it, or name another folder"):
        cached.write(0, 0, [((0, 4), b"evil")])
    assert (tmp_path / "precious").read_bytes() == b"mine"


def test_a_record_counts_only_whole_and_in_its_place(cache):
    cached = one_shard(cache, dataset_folder(cache), 100, 4)
    records = cached.records
    with cached.copies.opened(0):
        pass
    records.begin(0)
    assert not cached.presence(0).complete and records.kept().tolist() == [0]
    records.complete(0, [b"data"])
    assert cached.presence(0) == (True, True)
    assert records.fits(0, [b"da", b"ta"]) and not records.fits(0, [b"date"])
    size = RECORD.itemsize
    raw = os.pread(records.fd, size, 0)
    os.pwrite(records.fd, raw, size)  # of another chunk
    assert not cached.presence(1).complete
    for written in range(1, len(raw)):  # a page that reached the disk half
        torn = raw[:written] + bytes(size - written)
        if torn != raw:
            os.pwrite(records.fd, torn, 2 * size)
            assert not cached.presence(2).complete, written
    records.forget(0)
    assert not cached.presence(0).complete and 0 not in records.kept()


class Files:
    """The objects of a fetcher: files of this machine; as `RemoteShards`, without a server."""

    def __init__(self, path: Path, cache: CacheFolder) -> None:
        self.source, self.fetched = path.parent, list[tuple[int, int, int]]()
        header = read_header(path)
        folder = cache.root / header.header_digest
        folder.mkdir(exist_ok=True)
        (folder / "locks").touch()
        (folder / path.name).write_bytes(path.read_bytes())
        Meta(folder / "meta.json").add(f"http://host/{path.name}", {path.name: (path.stat().st_size, "etag")})
        self.file: PackedFile = read_header(folder / path.name)
        self.table = ChunkTable(self.file)
        url, nobody = "http://host/x.h5", cast(ShardObjects, None)
        self._places = ChunkSource(url, self.file, self.table, nobody, check=True)  # and nothing of clients
        names, sizes = self.file.shards.names, self.file.shards.num_bytes
        self.cached = dataset_on_disk(cache, folder, names, sizes, self.table)
        with cache.locked():
            cache.bound.count()
        self.fetcher = ChunkFetcher(self.cached, cast(ChunkSource, self), threads=2, most_held=4, give_up_after_s=5)

    def name(self, shard: int) -> Path:
        return self.source / self.file.shards.names[shard]

    def ranges(self, chunk: Chunk, cached: CachedDataset) -> list[tuple[int, int]]:
        return self._places.ranges(chunk, cached)

    def ranges_by_index(self, chunk: Chunk) -> list[tuple[int, int]]:
        return []

    def fetch(self, shard: int, begin: int, end: int) -> memoryview:
        self.fetched.append((shard, begin, end))
        with open(self.name(shard), "rb") as file:
            file.seek(begin)
            return memoryview(file.read(end - begin))

    def fetch_chunk(self, chunk: Chunk, ranges: Sequence[Range], *_: object) -> list[tuple[Range, memoryview]]:
        return [(one, self.fetch(chunk.shard, *one)) for one in ranges]

    def fetch_header(self, shard: int) -> list[tuple[tuple[int, int], memoryview]]:
        return [((begin, end), self.fetch(shard, begin, end)) for begin, end in header_ranges(self.name(shard))]

    def assert_true(self) -> int:
        """Compares all chunks that are recorded with their file; returns their number."""
        complete = [chunk for chunk in self.cached.records.kept().tolist() if self.cached.presence(chunk).complete]
        for number in complete:
            chunk = self.table.chunk(number)
            with self.fetcher.obtainer.header(chunk.shard):
                ranges = self.ranges(chunk, self.cached)
            whole, copy = self.name(chunk.shard).read_bytes(), self.cached.copies.path(chunk.shard).read_bytes()
            assert all(copy[begin:end] == whole[begin:end] for begin, end in ranges), chunk
        return len(complete)

    def close(self) -> None:
        self.fetcher.close()
        self.cached.close()


def odd_shards(folder: Path) -> Path:
    """Shards whose masks are compressed in different numbers of rows, which is not what `fastload pack` makes."""
    folder.mkdir()
    files = []
    for number, chunk_rows in enumerate((3, 4)):
        plain = folder.parent / f"plain-{number}.h5"
        write_random(plain, rows=90, size=(16, 16, 3), seed=number, masks=True, chunk_rows=chunk_rows, below=9)
        out = folder / f"part-{number}.h5"
        repack_file(plain, out, codec="zstd", chunk_bytes=chunk_rows * 768, workers=0)
        files.append(out)
    index_files(files, folder / "data.h5")
    return folder / "data.h5"


@pytest.mark.parametrize("kind", ["shards", "shards of jpeg", "shards of masks", "odd shards"])
def test_evicting_gives_blocks_back_and_changes_no_neighbour(kind, cache, tmp_path):
    source = tmp_path / "source"
    path = odd_shards(source) if kind == "odd shards" else write_kind(kind, source)
    files = Files(path, cache)
    own = bytes_on_disk(cache.root)
    random = np.random.default_rng(0)
    for _ in range(4):
        some = random.permutation(files.table.num_chunks)[:60].tolist()
        for chunk in some:
            with holding(files.fetcher, [chunk]):
                pass
        assert files.assert_true() >= 60
        for chunk in random.permutation(files.cached.records.kept()).tolist()[::2]:
            if files.table.chunk(chunk).field:
                assert files.fetcher.evictor.evict_chunk(chunk)
                assert not files.cached.presence(chunk).complete
        files.assert_true()
        assert cache.bound.num_bytes >= bytes_on_disk(cache.root) - own
    headers = set(files.table.headers.tolist())
    for chunk in set(files.cached.records.kept().tolist()) - headers:
        assert files.fetcher.evictor.evict_chunk(chunk)
    files.assert_true()
    for header in headers & set(files.cached.records.kept().tolist()):
        assert files.fetcher.evictor.evict_chunk(header)
    assert not len(files.cached.records.kept())
    for shard in range(len(files.file.shards.names)):
        assert files.cached.copies.path(shard).stat().st_blocks * 512 <= OF_FILE_SYSTEM
    with cache.locked():
        before = cache.bound.num_bytes
        cache.bound.count()
    assert abs(cache.bound.num_bytes - before) <= 2 * BLOCK  # the records, which no one allocates
    files.close()


@pytest.mark.parametrize("kind", ["linear", "jpeg"])
def test_evicted_neighbours_give_back_the_blocks_that_they_share(kind, cache, tmp_path):
    random = Random(0)
    (source := tmp_path / "source").mkdir()  # chunks of 10,240 bytes, which begin and end within blocks
    if kind == "linear":
        write_random(source / "a.h5", rows=150, size=(32, 32, 1), chunk_rows=10)
    else:
        rows = [jpeg_row(48, 64, seed=i) for i in range(150)]
        write_ragged(source / "a.h5", rows, {}, chunk_bytes=10_240)
    index_files([source / "a.h5"], source / "data.h5")
    files = Files(source / "data.h5", cache)
    data = [*range(files.table.num_chunks)[files.table.data_of(0)]]
    present = set[int]()
    for _ in range(12):
        for chunk in random.sample(data, 8):
            with holding(files.fetcher, [chunk]):
                present.add(chunk)
        for chunk in random.sample(sorted(present), len(present) // 2):
            assert files.fetcher.evictor.evict_chunk(chunk)
            present.remove(chunk)
        held = [files.ranges(files.table.chunk(chunk), files.cached) for chunk in present]
        ranges = [*header_ranges(files.name(0)), *(one for some in held for one in some)]
        blocks = {block for begin, end in ranges for block in range(begin // BLOCK, -(-end // BLOCK))}
        # One more where the last chunk ends: what is behind it is no chunk's.
        assert files.cached.copies.path(0).stat().st_blocks * 512 <= (len(blocks) + 1) * BLOCK + OF_FILE_SYSTEM
        files.assert_true()
        assert cache.bound.num_bytes >= bytes_on_disk(cache.root) - 2 * BLOCK
    files.close()


def test_neither_a_full_disk_nor_a_wrong_chunk_changes_a_neighbour(cache, tmp_path, monkeypatch):
    files = Files(odd_shards(tmp_path / "source"), cache)
    numbers = range(files.table.data_of(0).start, files.table.data_of(0).stop - 1)
    for shard in range(2):
        files.fetcher.hold([int(files.table.headers[shard])])

    def ranges(number):
        return files.ranges(files.table.chunk(number), files.cached)

    one, other = next((n, n + 1) for n in numbers if ranges(n)[-1][1] > ranges(n + 1)[0][0] > ranges(n)[0][0])
    files.fetcher.hold([one])
    allocate = fastload.remote.cache._fallocate

    def full(fd, mode, *span):
        if mode == 1:
            raise OSError(errno.ENOSPC, "full")
        allocate(fd, mode, *span)

    monkeypatch.setattr(fastload.remote.cache, "_fallocate", full)
    with pytest.raises(DiskFullError):
        files.fetcher.hold([other])
    monkeypatch.undo()
    files.fetcher.release([one])
    assert files.assert_true() >= 2
    with holding(files.fetcher, [one, other]):
        pass
    files.close()
    end = ranges(other)[-1][1]
    with open(files.cached.copies.path(0), "r+b") as copy:
        copy.seek(end - 2)
        copy.write(b"\xff\xff")
    (check,) = verify_cache(None, Remote(cache=cache.root.parent))
    assert (check.wrong, check.removed) == (1, 1)
    assert verify_cache(None, Remote(cache=cache.root.parent))[0].ok


def test_a_folder_that_goes_between_its_opening_and_its_lock_is_not_used(cache, monkeypatch):
    folder, lock = dataset_folder(cache), ByteLocks.try_shared

    def late(self, byte):
        if folder.exists():
            other = CacheFolder(cache.root.parent, None)
            with other.locked():
                assert other.remove(folder)
            other.close()
        return lock(self, byte)

    monkeypatch.setattr(ByteLocks, "try_shared", late)
    assert cache.keep_in_use(folder) is None


def test_datasets_that_others_remove_meanwhile_are_passed_over(cache, monkeypatch):
    folders = [dataset_folder(cache, name) for name in "abc"]
    found, iterdir = list[Path](), Path.iterdir

    def slowly(self):
        for path in [*iterdir(self)]:
            if path == folders[1]:
                shutil.rmtree(path)
            yield path

    monkeypatch.setattr(Path, "iterdir", slowly)
    found = cache.datasets()
    assert sorted(found) == [folders[0], folders[2]]
    shutil.rmtree(folders[0])
    assert not cache.in_use(folders[0])
    with cache.locked():
        assert cache.remove(folders[0])


def test_a_chunk_that_is_held_is_not_evicted(cache, tmp_path):
    files = Files(write_kind("shards", tmp_path / "source"), cache)
    chunk = files.table.data_of(0).start
    with holding(files.fetcher, [chunk]):
        other = Files(tmp_path / "source" / "data.h5", cache)
        assert not other.fetcher.evictor.evict_chunk(chunk)
        assert files.cached.presence(chunk).complete
        header = int(files.table.headers[0])
        assert not other.fetcher.evictor.evict_chunk(header)
        other.close()
    third = Files(tmp_path / "source" / "data.h5", cache)
    files.close()
    assert third.fetcher.evictor.evict_chunk(chunk)
    third.close()


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_chunk_of_an_earlier_boot_is_compared_before_it_is_used(is_whole, cache, tmp_path):
    files = Files(write_kind("shards", tmp_path / "source"), cache)
    chunks = [*range(files.table.num_chunks)[files.table.data_of(0)][:5]]
    with holding(files.fetcher, chunks):
        pass

    def parts_of(number: int) -> list[bytes]:
        return files.cached.read(0, files.ranges(files.table.chunk(number), files.cached))

    for chunk in [*chunks, int(files.table.headers[0])]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fastload.remote.sparse_copies.boot_number", lambda: boot_number() ^ 4 | 2)
            files.cached.records.complete(chunk, parts_of(chunk))
        assert files.cached.presence(chunk) == (True, False)
    files.close()
    ((begin, _),) = files.ranges(files.table.chunk(chunks[2]), files.cached)
    if not is_whole:
        with open(files.cached.copies.path(0), "r+b") as copy:
            copy.seek(begin)
            copy.write(b"\0" * 100)
    again = Files(tmp_path / "source" / "data.h5", cache)
    with holding(again.fetcher, chunks):
        assert all(again.cached.presence(chunk) == (True, True) for chunk in chunks)
        again.assert_true()
    assert [one[1] for one in again.fetched] == ([] if is_whole else [begin])
    again.close()


def test_two_processes_that_open_one_file_at_once_make_one_dataset(range_server, tmp_path):
    write_random(range_server.folder / "data.h5", rows=40, chunk_rows=4)
    script = tmp_path / "open.py"
    script.write_text(
        "import sys\nfrom fastload.remote.urls import Remote\nfrom fastload.remote.open_url import open_remote\n"
        "file = open_remote(sys.argv[1], Remote(cache=sys.argv[2], max_bytes='10MB'))\nprint(file.path)\n"
    )
    command = [sys.executable, str(script), f"{range_server.url}/data.h5", str(tmp_path / "cache")]
    running = [
        subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]  # fmt: skip
    paths = {process.communicate(timeout=100)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0] and len(paths) == 1
    assert len([*(tmp_path / "cache" / "1").glob("*/meta.json")]) == 1
    assert not [*(tmp_path / "cache" / "1").glob(".*")]


def test_a_file_at_two_urls_is_kept_once_and_one_of_another_name_is_another_file(range_server, tmp_path):
    made = write_random(range_server.folder / "data.h5", rows=40, chunk_rows=4)
    for name in ("other.h5", "folder/data.h5"):
        (range_server.folder / name).parent.mkdir(exist_ok=True)
        (range_server.folder / name).write_bytes(made.read_bytes())
    with h5py.File(made) as hdf5:
        images = hdf5["images"][()]
    fetched, folders = [], []
    for name in ("data.h5", "folder/data.h5", "other.h5"):
        dataset = PackedDataset(f"{range_server.url}/{name}", remote=Remote(cache=tmp_path, max_bytes="10MB"))
        assert all(np.array_equal(dataset[i][0].numpy().transpose(1, 2, 0), images[i]) for i in range(40))
        fetched.append(dataset.file.remote.cache.current().counts.chunks)
        folders.append(dataset.path.parent)
        dataset.file.remote.close()
    assert fetched == [10, 0, 10] and folders[0] == folders[1] != folders[2]
