"""Are chunks of a remote cache better kept as parts of sparse copies of their shards, or each as a file of its own?

    python benchmarks/bench_chunk_store.py             about two minutes, 1.5 GB of disk in .bench
    python benchmarks/bench_chunk_store.py --quick     tiny sizes, to see that it runs; the figures mean nothing

`twins` is the cache as it is (`fastload.remote.cache`): a chunk is allocated within a sparse copy, locked by its byte
while it is used, and a hole is punched where it is evicted. `files` is a prototype: a chunk is written aside, renamed,
mapped where it is used, and unlinked when it is evicted, whoever has it mapped. Nothing is requested from a server.

`shuffle`: rows/s of a full shuffle over all chunks, which are there, in batches of 256 of which the last four stay
held; a file is mapped each time (`files`) or stays mapped (`files-mapped`). `fill`: chunks/s put into an empty cache.
`evict`: chunks/s put into a full one. `two-jobs`: two processes share a cache of a quarter of the chunks; the most
bytes that it takes on the disk, over its bound, where what is unlinked and mapped counts. `kills`: processes that fill
such a cache are killed; chunks that are there and wrong, and bytes that nobody accounts for.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import harness
from fastload.read.linear import _mmap
from fastload.remote.cache import CacheFolder
from fastload.remote.sparse_copies import dataset_on_disk, digest_of
from fastload.system import native

ROW_BYTES, CHUNK_ROWS, SHARDS = 3072, 8, 20
CHUNK_BYTES = ROW_BYTES * CHUNK_ROWS  # six pages
HELD = 4  # batches


def data_of(chunk: int) -> bytes:
    """Returns the bytes of a chunk."""
    return chunk.to_bytes(8, "little") * (CHUNK_BYTES // 8)


class Twins:
    """The cache as it is: chunks within sparse copies."""

    def __init__(self, folder: Path, chunks: int, limit: int) -> None:
        self.chunks, self._a_shard = chunks, chunks // SHARDS
        self._cache = CacheFolder(folder, limit)
        dataset = self._cache.root / "data"
        with self._cache.locked():
            dataset.mkdir(exist_ok=True)
            (dataset / "locks").touch()
        # Of each shard the first chunk counts as its header, as in a `ChunkTable`.
        names, sizes = [f"{n}.h5" for n in range(SHARDS)], np.full(SHARDS, (self._a_shard + 1) * CHUNK_BYTES, np.int64)
        headers = np.arange(SHARDS, dtype=np.int64) * (self._a_shard + 1)
        table: Any = types.SimpleNamespace(
            headers=headers,
            num_chunks=chunks + SHARDS,
            data_of=lambda shard: slice(int(headers[shard]) + 1, int(headers[shard]) + 1 + self._a_shard),
        )
        self._cached = dataset_on_disk(self._cache, dataset, names, sizes, table)
        self._maps, self._bases = list[mmap.mmap](), np.zeros(SHARDS, np.int64)
        for shard in range(SHARDS):
            with self._cached.copies.opened(shard) as fd:
                self._maps.append(mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
            self._bases[shard] = np.frombuffer(self._maps[-1], np.uint8, 1).ctypes.data
        self._held: dict[int, int] = {}

    def _number(self, chunk: int) -> tuple[int, int, int]:
        shard, there = divmod(chunk, self._a_shard)
        return chunk + shard + 1, shard, (there + 1) * CHUNK_BYTES

    def put(self, chunk: int) -> bool:
        """Writes a chunk, unless another process is about to; returns False where there is no room."""
        number, shard, begin = self._number(chunk)
        where, locks = [(begin, begin + CHUNK_BYTES)], self._cached.locks
        if not locks.try_exclusive(number):
            return True
        try:
            if self._cached.presence(number).complete:
                return True
            self._cached.records.begin(number)
            with self._cached.copies.opened(shard) as fd:
                if not self._cache.bound.allocate(fd, where):
                    return False
            self._cached.write(number, shard, [(where[0], data_of(chunk))])
            return True
        finally:
            locks.unlock(number)

    def evict(self, chunk: int) -> bool:
        """Removes a chunk that nobody holds; returns whether it did."""
        number, shard, begin = self._number(chunk)
        if number in self._held or not self._cached.presence(number).complete:
            return False
        return self._cached.evict(number, shard, [(begin, begin + CHUNK_BYTES)], [])

    def hold(self, chunk: int) -> bool:
        """Keeps a chunk from being evicted; returns False where it is not there."""
        number = self._number(chunk)[0]
        if number not in self._held:
            if not self._cached.locks.try_shared(number):
                return False
            if not self._cached.presence(number).complete:
                self._cached.locks.unlock(number)
                return False
        self._held[number] = self._held.get(number, 0) + 1
        return True

    def release(self, chunk: int) -> None:
        """Ends what `hold` began."""
        number = self._number(chunk)[0]
        self._held[number] -= 1
        if not self._held[number]:
            del self._held[number]
            self._cached.locks.unlock(number)

    def addresses(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns where rows lie, whose chunks are held."""
        shard, there = np.divmod(rows, self._a_shard * CHUNK_ROWS)
        found: np.ndarray[Any, Any] = self._bases[shard] + CHUNK_BYTES + there * ROW_BYTES
        return found

    def wrong(self) -> int:
        """Returns how many chunks are there and are not what was put."""
        found = 0
        for chunk in range(self.chunks):
            number, shard, begin = self._number(chunk)
            if self._cached.presence(number).complete:
                found += self._maps[shard][begin : begin + CHUNK_BYTES] != data_of(chunk)
        return found

    def unaccounted(self) -> int:
        """Returns the bytes on the disk that the cache does not know of."""
        with self._cache.locked():
            before = self._cache.use.num_bytes
            self._cache.use.count()
            return self._cache.use.num_bytes - before


class Files:
    """A prototype: each chunk a file, with its digest at the end.

    The count of bytes is what `CacheFolder` keeps. `keep`: how many files stay mapped.
    """

    def __init__(self, folder: Path, chunks: int, limit: int, *, keep: int = 0) -> None:
        self.chunks, self._keep = chunks, keep
        self._cache = CacheFolder(folder, limit)
        self._folder = self._cache.root / "data"
        self._folder.mkdir(exist_ok=True)
        self._at = np.zeros(chunks, np.int64)
        self._users: dict[int, int] = {}  # of what is mapped
        self._idle: OrderedDict[int, None] = OrderedDict()

    def _path(self, chunk: int) -> str:
        return f"{self._folder}/{chunk}"

    def put(self, chunk: int) -> bool:
        """Writes a chunk; returns False where there is no room."""
        path, data = self._path(chunk), data_of(chunk)
        if os.path.exists(path):
            return True
        part, size = f"{path}.part-{os.getpid()}", CHUNK_BYTES + mmap.PAGESIZE
        with self._cache.locked():
            if self._cache.use.num_bytes + size > self._cache.bound.room:
                return False
            self._cache.use.num_bytes += size
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.writev(fd, [data, digest_of([data]).to_bytes(8, "little")])
        finally:
            os.close(fd)
        with self._cache.locked():
            if os.path.exists(path):  # another process was first
                os.unlink(part)
                self._cache.use.num_bytes -= size
            else:
                os.rename(part, path)
        return True

    def evict(self, chunk: int) -> bool:
        """Unlinks a chunk; returns whether it did."""
        with self._cache.locked():
            try:
                os.unlink(self._path(chunk))
            except FileNotFoundError:
                return False
            self._cache.use.num_bytes -= CHUNK_BYTES + mmap.PAGESIZE
        return True

    def hold(self, chunk: int) -> bool:
        """Maps a chunk; returns False where it is not there."""
        if (users := self._users.get(chunk)) is not None:
            self._users[chunk] = users + 1
            self._idle.pop(chunk, None)
            return True
        try:
            fd = os.open(self._path(chunk), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        # Not `mmap.mmap`, which keeps a descriptor of its own.
        self._at[chunk] = _mmap(0, CHUNK_BYTES, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        os.close(fd)
        self._users[chunk] = 1
        return True

    def release(self, chunk: int) -> None:
        """Ends what `hold` began."""
        self._users[chunk] -= 1
        if self._users[chunk]:
            return
        self._idle[chunk] = None
        if len(self._idle) > self._keep:
            oldest, _ = self._idle.popitem(last=False)
            del self._users[oldest]
            _munmap(ctypes.c_void_p(int(self._at[oldest])), ctypes.c_size_t(CHUNK_BYTES))

    def addresses(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns where rows lie, whose chunks are held."""
        chunk, there = np.divmod(rows, CHUNK_ROWS)
        found: np.ndarray[Any, Any] = self._at[chunk] + there * ROW_BYTES
        return found

    def wrong(self) -> int:
        """Returns how many chunks are there and are not what was put."""
        found = 0
        for chunk in range(self.chunks):
            with contextlib.suppress(FileNotFoundError):
                data = Path(self._path(chunk)).read_bytes()
                found += xxhash.xxh3_64_digest(data[:-8])[::-1] != data[-8:] or data[:-8] != data_of(chunk)
        return found

    def unaccounted(self) -> int:
        """Returns the bytes of parts that killed processes left: a later run has to look for them."""
        return sum(path.stat().st_blocks * 512 for path in self._folder.glob("*.part-*"))


_munmap = ctypes.CDLL(None, use_errno=True).munmap

Store = Twins | Files
WAYS: dict[str, Callable[[Path, int, int], Store]] = {
    "twins": Twins,
    "files": Files,
    "files-mapped": lambda folder, chunks, limit: Files(folder, chunks, limit, keep=30_000),
}


def read_batches(store: Store, order: np.ndarray[Any, Any], *, batch: int = 256, fetch: bool = False) -> float:
    """Returns rows/s of reading rows in batches; `fetch`: puts what is not there, evicting others at random."""
    out, held = np.empty((batch, ROW_BYTES), np.uint8), deque[list[int]]()
    chance, begin = random.Random(os.getpid()), time.perf_counter()
    for first in range(0, len(order) - batch + 1, batch):
        rows = order[first : first + batch]
        chunks = np.unique(rows // CHUNK_ROWS).tolist()
        for chunk in chunks:
            while not store.hold(chunk):
                if not fetch:
                    raise LookupError(f"chunk {chunk} is not there")
                while not store.put(chunk):
                    store.evict(chance.randrange(store.chunks))
        held.append(chunks)
        native.gather(store.addresses(rows), out)
        if (out[:, :8].copy().view("<u8")[:, 0] != rows // CHUNK_ROWS).any():
            raise ValueError("wrong rows")
        if len(held) > HELD:
            for chunk in held.popleft():
                store.release(chunk)
    took_s = time.perf_counter() - begin
    for some in held:
        for chunk in some:
            store.release(chunk)
    return len(order) // batch * batch / took_s


def read_for(way: str, folder: Path, chunks: int, limit: int, seconds: float, seed: int) -> None:
    """Reads at random through a small cache; the body of a process."""
    store, stop_s, rng = WAYS[way](folder, chunks, limit), time.monotonic() + seconds, np.random.default_rng(seed)
    while time.monotonic() < stop_s:
        read_batches(store, rng.permutation(chunks * CHUNK_ROWS)[:512], batch=16, fetch=True)


def taken(folder: Path, processes: Sequence[int]) -> int:
    """Returns the bytes that files of a cache take, and what is unlinked but mapped by processes."""
    total, gone = 0, set[str]()
    for above, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(above, name)).st_blocks * 512
    for process in processes:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process}/maps").read_text().splitlines()
            gone |= {line.split()[4] for line in lines if "(deleted)" in line and str(folder) in line}
    return total + len(gone) * (CHUNK_BYTES + mmap.PAGESIZE)


class Bench:
    """The figures, by name."""

    def __init__(self, options: argparse.Namespace, journal: harness.Journal) -> None:
        self.options, self.journal = options, journal
        self.folder, self.chunks = options.data / "chunk-store", options.chunks
        self.large = 4 * self.chunks * (CHUNK_BYTES + mmap.PAGESIZE)
        self.small = self.chunks * (CHUNK_BYTES + mmap.PAGESIZE) // 4
        self.about = {"chunks": self.chunks, "chunk_bytes": CHUNK_BYTES, "row_bytes": ROW_BYTES}

    def emptied(self, way: str) -> Path:
        """Returns the folder of a way's cache, which is empty."""
        shutil.rmtree(self.folder / way, ignore_errors=True)
        return self.folder / way

    def filled(self, way: str) -> tuple[Store, float]:
        """Returns a store with all chunks, and the chunks/s of filling it."""
        store, begin = WAYS[way](self.emptied(way), self.chunks, self.large), time.perf_counter()
        for chunk in range(self.chunks):
            assert store.put(chunk), "there is room"
        return store, self.chunks / (time.perf_counter() - begin)

    def fill(self) -> None:
        """Puts all chunks into an empty cache."""
        ways = [lambda way=way: self.filled(way)[1] for way in ("files", "twins")]
        self.journal.note("fill", about=self.about, **harness.compare(*ways, pairs=self.options.pairs))

    def shuffle(self) -> None:
        """Reads all rows in random order, all chunks being there."""
        stores = {way: self.filled(way)[0] for way in WAYS}
        rng = np.random.default_rng(0)
        for store in stores.values():
            read_batches(store, rng.permutation(self.chunks * CHUNK_ROWS))
        for way in ("files", "files-mapped"):
            ways = [
                lambda way=way: read_batches(stores[way], rng.permutation(self.chunks * CHUNK_ROWS))
                for way in (way, "twins")
            ]
            self.journal.note(f"shuffle-{way}", about=self.about, **harness.compare(*ways, pairs=self.options.pairs))

    def evict(self) -> None:
        """Puts chunks into a full cache, each for another one."""

        def rate(way: str) -> float:
            store = WAYS[way](self.emptied(way), self.chunks, self.small)
            there = deque[int]()
            for chunk in range(self.chunks):
                if not store.put(chunk):
                    break
                there.append(chunk)
            begin, count = time.perf_counter(), 0
            for new in range(chunk, min(chunk + 1000, self.chunks)):
                while not store.put(new):
                    assert store.evict(there.popleft()), "nobody holds it"
                there.append(new)
                count += 1
            return count / (time.perf_counter() - begin)

        ways = [lambda way=way: rate(way) for way in ("files", "twins")]
        self.journal.note("evict", about=self.about, **harness.compare(*ways, pairs=self.options.pairs))

    def shared(self) -> None:
        """Two jobs on a small cache; and four of which one after another is killed."""
        context = multiprocessing.get_context("fork")
        for way in WAYS:
            folder, most, done = self.emptied(way), 0, threading.Event()
            words = (way, folder, self.chunks, self.small)
            jobs = [context.Process(target=read_for, args=(*words, self.options.seconds, n)) for n in range(2)]
            for job in jobs:
                job.start()
            while any(job.is_alive() for job in jobs):
                most = max(most, taken(folder, [job.pid or 0 for job in jobs]))
                done.wait(0.005)
            failed = sum(job.exitcode != 0 for job in jobs)
            self.journal.note("two-jobs", way=way, about=self.about, over_bound=most / self.small, failed=failed)
            chance, folder = random.Random(0), self.emptied(way)
            jobs = [context.Process(target=read_for, args=(*words, 3600.0, n), daemon=True) for n in range(4)]
            for job in jobs:
                job.start()
            for number in range(self.options.kills):
                time.sleep(chance.uniform(0.02, 0.2))
                at = number % len(jobs)
                os.kill(jobs[at].pid or 0, signal.SIGKILL)
                jobs[at].join()
                jobs[at] = context.Process(target=read_for, args=(*words, 3600.0, 10 + number), daemon=True)
                jobs[at].start()
            failed = sum(job.exitcode is not None for job in jobs)
            for job in jobs:
                job.kill()
                job.join()
            store = WAYS[way](folder, self.chunks, self.small)
            self.journal.note("kills", way=way, about=self.about, kills=self.options.kills, failed=failed,
                              wrong=store.wrong(), unaccounted_bytes=store.unaccounted())  # fmt: skip


def main() -> None:
    """Measure, and append the records."""
    parser = harness.command_line(__doc__, "chunk_store", figures=("fill", "shuffle", "evict", "shared"), pairs=5)
    parser.add_argument("--chunks", type=int, default=20_000, help="of 24 KiB (default: 20,000)")
    parser.add_argument("--kills", type=int, default=60, help="of each way (default: 60)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of `two-jobs` (default: 8)")
    options = parser.parse_args()
    if options.quick:
        options.chunks, options.kills, options.seconds, options.pairs = 2000, 4, 1.0, 1
    bench = Bench(options, harness.begin(options, "chunks", "kills", "seconds", "pairs"))
    try:
        harness.take_figures(bench, options.only)
    finally:
        shutil.rmtree(bench.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
