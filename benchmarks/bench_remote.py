"""What do remote chunks, their cache on this machine, and a server that is slow, refuses or breaks off cost?

    python benchmarks/bench_remote.py                      all: about 12 minutes, 11 GB of disk in .bench
    python benchmarks/bench_remote.py --only first later   some of: first, later, bytes, cache, kills, refusing, faults,
                                                           sizes
    python benchmarks/bench_remote.py --quick              tiny sizes, to see that it runs; the figures mean nothing

Objects are files that tests/remote/range_server.py serves over HTTP from a process of its own on this machine; its
latency and bandwidth are set, and its processor time is this machine's, too.
`first`: bytes/s of a `FastLoader`'s first epoch over an index that was opened before, with an empty cache, over bare
ranged reads of the same chunks by obstore in as many threads; answers after 50 ms, 20 MB/s a connection, 32
connections. The main thread is idle, or runs pure Python meanwhile (`first-python`).
`later`: images/s of epochs from the cache, over epochs of the plain file; the page cache is warm.
`bytes`: bytes and requests of an epoch over the bytes and chunks that the ranks of a node read: alone, and two nodes of
two ranks with share="node", a process a rank and a cache a node.
`cache`: the part of the chunks that later epochs fetch, above 1 - cache / share; windows of 4 chunks, batches of 16.
`kills`: four processes read through a cache smaller than the data, and are killed in turn: chunks whose records say
that they are there and are wrong, the most bytes on the disk over max_bytes; and through a cache that holds all, chunks
that were fetched twice.
`refusing`: a server that allows a third of full rate and refuses the rest for a minute: what it served over what it
allowed, and the part of the requests that it refused.
`sizes`: bytes/s of the beginning of a first epoch, by latency, bandwidth of a connection, connections and bytes of a
chunk, over what these allow: connections * chunk / (latency + chunk / bandwidth).
`faults`: an epoch with 20 % of requests refused, 10 % of bodies cut and 2 % stalled: rows that are wrong or lost.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import harness
from bench_scale import random_array
from fastload import ChunkWindow, FastLoader, PackedDataset, Remote, pack_images
from fastload.read.reader import open_rows
from fastload.remote.client import open_client
from fastload.remote.open_url import open_remote
from fastload.remote.remote_shards import RemoteShards

ROW_SHAPE = (218, 178, 3)
LATENCY_S, BYTES_PER_S, CONNECTIONS = 0.05, 20e6, 32
SERVER = harness.ROOT / "tests" / "remote" / "range_server.py"


class Server:
    """The server of a folder, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, str(SERVER), str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self._seen = 0

    def set(self, **faults: Any) -> None:
        """Sets what it does wrong; everything else is off."""
        self._ask("control", json.dumps(faults).encode())
        self.log()

    def log(self) -> list[dict[str, Any]]:
        """The requests since the last call."""
        requests: list[dict[str, Any]] = self._ask("log")["requests"]
        new, self._seen = requests[self._seen :], len(requests)
        return new

    def _ask(self, path: str, body: bytes | None = None) -> Any:
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/{path}", data=body)) as answer:
            return json.load(answer)

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Bench:
    """The figures, by name."""

    def __init__(self, options: argparse.Namespace, journal: harness.Journal) -> None:
        self.options, self.journal = options, journal
        self.folder = options.data / "remote"
        self.large = self.packed("large", options.rows, options.chunk_rows, 6)
        # Many small chunks, for what is counted and not timed.
        self.small = self.packed("small", options.small_rows, 8, 4)
        self.server = Server(self.folder)
        self.cache = self.folder / "cache"

    def packed(self, name: str, rows: int, chunk_rows: int, shards: int) -> Path:
        """An index of random images, packed where it is not there."""
        path = self.folder / f"{name}-{rows}" / "data.h5"
        if not path.exists():
            shutil.rmtree(path.parent, ignore_errors=True)
            path.parent.mkdir(parents=True)
            words: dict[str, Any] = {"chunk_bytes": chunk_rows * int(np.prod(ROW_SHAPE)), "workers": 2}
            with random_array(path.with_suffix(".npy"), (rows, *ROW_SHAPE)) as array:
                pack_images(array, path, shards=shards, **words)
        return path

    def url(self, path: Path) -> str:
        """Where the server has a file."""
        return f"{self.server.url}/{path.relative_to(self.folder)}"

    def about(self, path: Path) -> dict[str, Any]:
        """The file, for a record."""
        file = PackedDataset(path).file
        return {"rows": file.num_rows, "row_shape": list(ROW_SHAPE), "chunk_rows": int(file.shards.chunk_rows[0]),
                "shards": len(file.shards.names)}  # fmt: skip

    @contextlib.contextmanager
    def opened(
        self, path: Path, max_bytes: int = 2**40, *, keep: bool = False, **words: Any
    ) -> Iterator[PackedDataset]:
        """A dataset of the images over the server, with an empty cache unless it is kept."""
        if not keep:
            shutil.rmtree(self.cache, ignore_errors=True)
        remote = Remote(cache=self.cache, max_bytes=max_bytes, **({"in_flight": CONNECTIONS} | words))
        dataset = PackedDataset(self.url(path), fields=["images"], remote=remote)
        try:
            yield dataset
        finally:
            remote_of(dataset).close()

    # Figures.

    def first(self) -> None:
        """The first epoch over bare reads, and the same while the main thread runs Python."""
        for kind, target in (("idle", ">= 0.9"), ("python", ">= 0.85")):
            self.server.set(latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S)
            ways = harness.Busy(kind).beside([self.first_epoch, self.bare_reads])
            found = harness.compare(*ways, pairs=self.options.pairs)
            name = "first" if kind == "idle" else f"first-{kind}"
            self.journal.note(name, target=target, file=self.about(self.large), latency_s=LATENCY_S,
                              bytes_per_s=BYTES_PER_S, connections=CONNECTIONS, **found)  # fmt: skip

    def first_epoch(self) -> float:
        """Bytes/s of a loader's first epoch."""
        with self.opened(self.large) as dataset, loader_of(dataset, 256, ends="pad") as loader:
            begin = time.perf_counter()
            count = sum(batch[0].numel() for batch in loader)
            return count / (time.perf_counter() - begin)

    def bare_reads(self) -> float:
        """Bytes/s of ranged reads of the same chunks in the file's order, thrown away."""
        import obstore
        from obstore.store import HTTPStore

        file = PackedDataset(self.large).file
        store = HTTPStore(self.server.url, client_options={"allow_http": True})
        folder = self.large.parent.relative_to(self.folder)
        jobs = []
        for number, name in enumerate(file.shards.names):
            base, row_bytes = int(file.shards.images_offset[number]), int(np.prod(ROW_SHAPE))
            rows, step = int(file.shards.num_rows[number]), int(file.shards.chunk_rows[number])
            for first in range(0, rows, step):
                stop = min(first + step, rows)
                jobs.append((f"{folder}/{name}", base + first * row_bytes, base + stop * row_bytes))

        def read(job: tuple[str, int, int]) -> int:
            return len(obstore.get_range(store, job[0], start=job[1], end=job[2]))

        begin = time.perf_counter()
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            count = sum(pool.map(read, jobs))
        return count / (time.perf_counter() - begin)

    def later(self) -> None:
        """Epochs from the cache over those of the plain file."""
        self.server.set()

        def epochs(loader: FastLoader) -> float:
            several = (batch for _ in range(self.options.epochs) for batch in loader)
            return harness.rate(harness.pixels_of(several))

        local = PackedDataset(self.large, fields=["images"])
        with self.opened(self.large) as dataset, loader_of(dataset, 256) as cached, loader_of(local, 256) as plain:
            for loader in (cached, plain):
                sum(1 for _ in loader)
            found = harness.compare(lambda: epochs(cached), lambda: epochs(plain), pairs=self.options.pairs)
        self.journal.note("later", target=">= 0.95", file=self.about(self.large), page_cache="warm",
                          epochs=self.options.epochs, **found)  # fmt: skip

    def bytes(self) -> None:
        """Bytes and requests of a first epoch, alone and by two nodes."""
        self.server.set()
        with self.opened(self.small) as dataset, loader_of(dataset, 64, ends="pad", window=4) as loader:
            sum(1 for _ in loader)
            remote = remote_of(dataset)
            pixels, chunks = dataset.file.num_rows * int(np.prod(ROW_SHAPE)), remote.table.num_chunks
        asked = self.server.log()
        self.journal.note("bytes", target="<= 1.02, <= 2 a chunk", file=self.about(self.small),
                          bytes_over_share=fetched_bytes(asked) / pixels, requests_a_chunk=len(asked) / chunks,
                          chunks=chunks)  # fmt: skip
        caches = [self.cache.with_name(f"cache-{node}") for node in range(2)]
        for cache in caches:
            shutil.rmtree(cache, ignore_errors=True)
        context, nodes = multiprocessing.get_context("spawn"), []
        for node, cache in enumerate(caches):
            server = Server(self.folder)
            words = f"{server.url}/{self.small.relative_to(self.folder)}", str(cache), node
            ranks = [context.Process(target=read_share, args=(*words, local)) for local in range(2)]
            nodes.append((server, ranks))
            for rank in ranks:
                rank.start()
        for node, (server, ranks) in enumerate(nodes):
            for rank in ranks:
                rank.join()
                assert rank.exitcode == 0, f"a rank of node {node} failed"
            asked = server.log()
            server.close()
            self.journal.note("bytes-of-a-node", target="<= 1.02, <= 1.1 a chunk", file=self.about(self.small),
                              node=node, epochs=2, bytes_over_share=fetched_bytes(asked) / (pixels / 2),
                              requests_a_chunk=len(asked) / (chunks / 2))  # fmt: skip

    def cache_part(self) -> None:
        """What later epochs fetch with a cache of a part of the share."""
        self.server.set()
        size = self.small.stat().st_size
        for part in (0.25, 0.5, 0.75):
            with self.opened(self.small) as dataset:
                chunk_bytes = remote_of(dataset).room.largest
                chunks = remote_of(dataset).table.num_chunks - len(dataset.file.files)
            limit = int(part * chunks * (chunk_bytes + 8192)) + size + 2**20
            fetched = []
            with self.opened(self.small, limit, in_flight=4) as dataset, loader_of(dataset, 16, window=4) as loader:
                for _ in range(2 + self.options.epochs):
                    before = remote_of(dataset).cache.current().counts.chunks
                    sum(1 for _ in loader)
                    fetched.append((remote_of(dataset).cache.current().counts.chunks - before) / chunks)
                held = remote_of(dataset).room.fitting / chunks
            later = fetched[2:]
            self.journal.note(f"cache-{part}", target="<= 0.02", file=self.about(self.small), max_bytes=limit,
                              cache_part=held, fetched=later, above=float(np.mean(later)) - (1 - held))  # fmt: skip

    def kills(self) -> None:
        """Processes that are killed while they fetch."""
        self.server.set()
        total = PackedDataset(self.small).file.shards
        assert total is not None
        for name, limit in (("small", int(total.num_bytes.sum()) // 3), ("large", 2**40)):
            shutil.rmtree(self.cache, ignore_errors=True)
            watch = Watch(self.cache)
            failed = self.kill_readers(self.options.kills, limit)
            most = watch.stop()
            asked = self.server.log()
            with self.opened(self.small, limit, keep=True) as dataset:
                wrong, there = wrong_chunks(remote_of(dataset), self.small.parent)
            ranges = Counter((one["path"], one["range"]) for one in asked if one["method"] == "GET" and one["range"])
            twice = sum(count - 1 for count in ranges.values())
            words: dict[str, Any] = {"fetched_twice": twice} if name == "large" else {"over_max_bytes": most / limit}
            self.journal.note(f"kills-{name}-cache", target="0 wrong, <= 1.00", file=self.about(self.small),
                              kills=self.options.kills, failed=failed, there=there, wrong=wrong, **words)  # fmt: skip

    def kill_readers(self, kills: int, limit: int) -> int:
        """Kills one of four readers after the other, each followed by another; returns how many failed themselves."""
        chance, context, failed = random.Random(0), multiprocessing.get_context("forkserver"), 0
        context.set_forkserver_preload(["bench_remote"])
        words = (self.url(self.small), str(self.cache), limit)
        running = [context.Process(target=read_for_ever, args=(*words, number), daemon=True) for number in range(4)]
        for process in running:
            process.start()
        time.sleep(3)  # so that they read
        for number in range(kills):
            time.sleep(chance.uniform(0.02, 0.3))
            at = chance.randrange(len(running))
            failed += running[at].exitcode is not None
            os.kill(running[at].pid or 0, signal.SIGKILL)
            running[at].join()
            running[at] = context.Process(target=read_for_ever, args=(*words, 10 + number), daemon=True)
            running[at].start()
        time.sleep(1)
        for process in running:
            failed += process.exitcode is not None
            process.kill()
            process.join()
        return failed

    def refusing(self) -> None:
        """A server that allows a third of full rate."""
        allowed = CONNECTIONS / LATENCY_S / 3
        self.server.set(latency_s=LATENCY_S, requests_per_s=allowed)
        client, key = open_client(
            self.url(self.small.with_name("data-00000-of-00004.h5")), Remote(in_flight=CONNECTIONS)
        )
        stop_s = time.perf_counter() + self.options.seconds
        begin = time.perf_counter()

        def read(number: int) -> int:
            chance, done = random.Random(number), 0
            while time.perf_counter() < stop_s:
                first = chance.randrange(2**20)
                client.read(key, first, first + 1000)
                done += 1
            return done

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            served = sum(pool.map(read, range(CONNECTIONS)))
        took_s = time.perf_counter() - begin
        asked = self.server.log()
        client.close()
        refused = sum(one["status"] == 503 for one in asked)
        self.journal.note("refusing", target=">= 0.9, <= 0.25", allowed_per_s=allowed, seconds=took_s,
                          served_over_allowed=served / took_s / allowed, refused_part=refused / len(asked))  # fmt: skip

    def faults(self) -> None:
        """An epoch through every kind of failure."""
        self.server.set(refused=0.2, cut=0.1, stalled=0.02)
        rows, wrong = 0, 0
        plain = PackedDataset(self.small, fields=["images"])
        with self.opened(self.small, timeout=2.0) as dataset, loader_of(dataset, 64, ends="exact", window=4) as loader:
            for batch in loader:
                numbers = batch.rows[batch.valid]
                rows += len(numbers)
                expected = plain.columns(numbers.numpy())[0]
                wrong += int((batch[0][batch.valid].numpy() != expected).any(axis=(1, 2, 3)).sum())
            use = remote_of(dataset).network_use()
        asked = self.server.log()
        self.server.set()
        self.journal.note("faults", target="0", file=self.about(self.small), wrong=wrong,
                          lost=dataset.file.num_rows - rows, requests=len(asked), retries=use.retries)  # fmt: skip

    def sizes(self) -> None:
        """The beginning of a first epoch, for the page on sizes."""
        grid = itertools.product((0.01, 0.05), (20e6, 80e6), (8, 32, 64), (self.small, self.large))
        for latency_s, bytes_per_s, connections, path in list(grid)[: 2 if self.options.quick else None]:
            self.server.set(latency_s=latency_s, bytes_per_s=bytes_per_s)
            with self.opened(path, in_flight=connections) as dataset, loader_of(dataset, 256) as loader:
                chunk_bytes, before = remote_of(dataset).room.largest, remote_of(dataset).cache.current().counts.bytes
                begin, count = time.perf_counter(), 0
                for batch in loader:
                    count += batch[0].numel()
                    if count > 4e8:
                        break
                rate = (remote_of(dataset).cache.current().counts.bytes - before) / (time.perf_counter() - begin)
            allowed = connections * chunk_bytes / (latency_s + chunk_bytes / bytes_per_s)
            self.journal.note("sizes", latency_s=latency_s, bytes_per_s_a_connection=bytes_per_s,
                              connections=connections, chunk_bytes=chunk_bytes, bytes_per_s=rate,
                              over_allowed=rate / allowed)  # fmt: skip

    def close(self) -> None:
        """Ends the server, and removes the cache."""
        self.server.close()
        for path in self.folder.glob("cache*"):
            shutil.rmtree(path, ignore_errors=True)


class Watch:
    """The most bytes that the files of a cache take on the disk, looked at all the time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._most, self._on = folder, 0, True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self._on:
            taken = 0
            for above, _, names in os.walk(self._folder):
                for name in names:
                    with contextlib.suppress(OSError):
                        taken += os.lstat(os.path.join(above, name)).st_blocks * 512
            self._most = max(self._most, taken)
            time.sleep(0.005)

    def stop(self) -> int:
        """Returns the most bytes."""
        self._on = False
        self._thread.join()
        return self._most


def remote_of(dataset: PackedDataset) -> RemoteShards:
    """The shards behind a dataset."""
    remote = dataset.file.remote
    assert isinstance(remote, RemoteShards)
    return remote


@contextlib.contextmanager
def loader_of(dataset: PackedDataset, batch_size: int, *, window: int = 16, **words: Any) -> Iterator[FastLoader]:
    """A loader by chunk windows, all on this rank."""
    loader = FastLoader(dataset, batch_size, **({"shuffle": ChunkWindow(window), "share": None} | words))
    with contextlib.closing(loader):
        yield loader


def fetched_bytes(asked: list[dict[str, Any]]) -> int:
    """The bytes of ranges that a server gave."""
    found = 0
    for one in asked:
        if one["method"] == "GET" and one["range"]:
            first, last = one["range"].removeprefix("bytes=").split("-")
            found += int(last) + 1 - int(first)
    return found


def read_share(url: str, cache: str, node: int, local_rank: int) -> None:
    """Reads two epochs as a rank of two nodes of two ranks; the body of a process."""
    os.environ |= {"RANK": str(2 * node + local_rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(local_rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(node), "GROUP_WORLD_SIZE": "2"}
    dataset = PackedDataset(url, fields=["images"], remote=Remote(cache=cache, max_bytes=2**40))
    with loader_of(dataset, 64, ends="pad", window=4, share="node") as loader:
        for _ in range(2):
            sum(1 for _ in loader)


def read_for_ever(url: str, cache: str, limit: int, seed: int) -> None:
    """Reads random rows until it is killed; the body of a process, which needs no torch."""
    chance = np.random.default_rng(seed)
    file = open_remote(url, Remote(cache=cache, max_bytes=limit, in_flight=8))
    reader = open_rows(file, ["images"], "map", check="always")
    out = {"images": np.empty((64, *ROW_SHAPE), np.uint8)}
    while True:
        first = int(chance.integers(0, file.num_rows - 100))
        reader.gather(first + np.sort(chance.choice(100, 64, replace=False)), out)


def wrong_chunks(remote: RemoteShards, folder: Path) -> tuple[int, int]:
    """How many chunks whose records are complete differ from the file they are of, and how many records are."""
    wrong = there = 0
    cached, names = remote.cache.cached, remote.table.shards.names
    for number in cached.records.kept().tolist():
        if not cached.presence(number).complete:
            continue
        there += 1
        chunk = remote.table.chunk(number)
        with open(cached.copies.path(chunk.shard), "rb") as ours, open(folder / names[chunk.shard], "rb") as served:
            for begin, end in remote.source.ranges(chunk, cached):
                ours.seek(begin)
                served.seek(begin)
                wrong += ours.read(end - begin) != served.read(end - begin)
    return wrong, there


def main() -> None:
    """Measure, and append the records."""
    figures = ("first", "later", "bytes", "cache", "kills", "refusing", "faults", "sizes")
    parser = harness.command_line(__doc__, "remote", figures=figures, pairs=5)
    parser.add_argument("--rows", type=int, default=27_648, help="of 218x178x3, in 6 shards (default: 27,648: 3.2 GB)")
    parser.add_argument("--chunk-rows", type=int, default=64, help="of these (default: 64, 7.5 MB)")
    parser.add_argument("--small-rows", type=int, default=4096, help="in chunks of 8 rows (default: 4,096)")
    parser.add_argument("--epochs", type=int, default=4, help="of `later` and `cache` (default: 4)")
    parser.add_argument("--kills", type=int, default=200, help="with each cache (default: 200)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of `refusing` (default: 60)")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.chunk_rows, options.small_rows, options.epochs = 512, 8, 2048, 1
        options.kills, options.seconds, options.pairs = 2, 0.5, 1
    journal = harness.begin(options, "rows", "chunk_rows", "small_rows", "epochs", "kills", "seconds", "pairs")
    bench = Bench(options, journal)
    try:
        harness.take_figures(bench, ["cache-part" if one == "cache" else one for one in options.only])
    finally:
        bench.close()


if __name__ == "__main__":
    main()
