"""What does a dataset in thousands of shards cost a rank, reading several shards, and packing them on a Ray cluster?

    python benchmarks/bench_scale.py                    all: about ten minutes, 7 GB of disk in .bench
    python benchmarks/bench_scale.py --only scale       some of: scale, shards, ray, remote
    python benchmarks/bench_scale.py --only scale --cut odd       shards of any number of rows, which are not joined
    python benchmarks/bench_scale.py --quick            tiny sizes, to see that it runs; the figures mean nothing

`scale`: an index of `--shards` shards, `--rows` rows of 32x32x3 in all, and `--world` ranks, 8 a node, in batches of
256. Shards that a measured rank reads are files as fastload writes them, of black images that take no disk; of the
others the index has the header alone. Each measurement is a fresh process that has imported torch and fastload; its
times are milliseconds (`cpu_ms`: of the processor, all threads), its memory what is resident at most beyond that
(`peak_bytes`, with the pages of mapped files, which all processes of a machine share) and what is its own in the end
(`own_bytes`). The page cache is warm.
    index: seconds to write the index, and its bytes.
    start: `PackedDataset` opens the index; an `EpochPlan` is made, with the first rows of a rank (`planned_ms`,
        `planned_bytes` until there); the first batch is read.
    resume: the same plan from the middle of the epoch on, and with half as many ranks (`resume-half`).
    loader, loader-resume: a `FastLoader` until its first batch, and with `load_state_dict` of the middle of an epoch.
    balance: of some nodes, the rows, shards and chunks that each reads in an epoch, and the most rows of one shard.
`shards`: images/s of a `FastLoader` over an index of 4 shards, over that of one file with the same rows in the same
order; shards that are mapped back to back (`joined`), and shards of odd numbers of rows, which are not (`odd`); by
chunk windows, as by default, and in full shuffle. `-second`: the second epoch of a loader, which reads rows that the
first one compared with their digests.
`ray`: images/s of `pack_images(shards=8, size=128, engine="ray")` on a Ray cluster of two CPUs on this machine, whose
processes run already, over the same with `workers=2` instead; faces of tools/make_faces.py, each under many names.

`remote`: of the plan of a billion faces (218x178x3) in an object store, computed and not measured: chunks and bytes
that a node reads in an epoch, alone and with share="node"; requests a second at `--rate` images/s a rank, and how many
prefixes of a bucket that takes, at 5,500 requests/s each. And the part of a node's chunks that later epochs fetch, by
the rule that evicts and the part of its share that its cache holds: what is needed last, and what was used longest ago,
with share="node" and with shares that change in each epoch.

A figure is the median of paired ratios, or of the measured ranks, with its range.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import heapq
import itertools
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import harness
from fastload import FastLoader, PackedDataset, pack_images
from fastload.format.digests import pixel_digests
from fastload.format.header import PackedFile, read_header
from fastload.format.joined import AlikeFiles, as_index
from fastload.format.ragged import Column
from fastload.format.shards import Shards
from fastload.format.writer import PixelSpec, chunk_rows_for, create_file, dump_options
from fastload.pack.index import index_files
from fastload.pack.plan import shard_path, whole_pages
from fastload.plan import ChunkWindow, EpochPlan
from fastload.read.reader import open_rows
from fastload.system.files import save_bytes

ROW_SHAPE = (32, 32, 3)
BATCH_SIZE = 256
RANKS_A_NODE = 8
TARGET = "planned <= 50 ms, 20 MB"
SPLIT = "train"


class Scale:
    """An index of many shards, of which those that some ranks read are files."""

    def __init__(self, options: argparse.Namespace, journal: harness.Journal) -> None:
        self.options, self.journal, self.world = options, journal, options.world
        self.folder = options.data / f"scale-{options.shards}-{options.rows}-{options.cut}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "index.h5"
        row_bytes = int(np.prod(ROW_SHAPE))
        most = options.rows // options.shards
        self.chunk_rows, step = chunk_rows_for(row_bytes, most), 1
        if options.cut == "pages":  # as `pack_images(shards=...)` cuts
            self.chunk_rows, step = whole_pages(self.chunk_rows, row_bytes, most)
        even = np.arange(options.shards + 1) * options.rows // options.shards
        bounds = np.append((even[:-1] + step // 2) // step * step, options.rows)
        self.begins, self.counts = bounds[:-1], np.diff(bounds)
        self.ranks = np.unique(np.linspace(0, self.world - 1, options.ranks).astype(int)).tolist()
        self.middle = self.plan().num_steps // 2
        self.about = {"shards": options.shards, "rows": options.rows, "row_shape": list(ROW_SHAPE),
                      "chunk_rows": self.chunk_rows, "cut": options.cut, "world_size": self.world}  # fmt: skip

    def plan(self, **words: Any) -> EpochPlan:
        """The plan of a `FastLoader` over the index; it needs none of the files."""
        given: dict[str, Any] = {"world_size": self.world, "batch_size": BATCH_SIZE, "shuffle": ChunkWindow()} | words
        return EpochPlan(range(self.options.rows), chunk_rows=self.chunk_rows, **given)

    def shard_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The shard that each row lies in."""
        return np.searchsorted(self.begins, rows, "right") - 1

    def run(self) -> None:
        """All figures."""
        self.write()
        self.measure("start", target=TARGET)
        self.measure("loader-resume", steps=self.middle)
        if not self.options.quick:  # each is some seconds of importing torch
            self.measure("resume", target=TARGET, steps=self.middle)
            self.measure("resume-half", target=TARGET, steps=self.middle, now=self.world // 2)
            self.measure("loader")
        self.balance()

    def write(self) -> None:
        """Writes the shards that will be read, and the index."""
        segments = ((self.world, BATCH_SIZE, self.middle),)
        plans = [self.plan(), self.plan(segments=segments), self.plan(segments=segments, world_size=self.world // 2)]
        some = np.arange(3 * ChunkWindow().chunks * self.chunk_rows)  # of three windows
        found = [self.shard_of(plan.rows_at(rank % plan.world_size, some)) for plan in plans for rank in self.ranks]
        read = np.unique(np.concatenate(found)).tolist()
        begin = time.perf_counter()
        headers = {number: read_header(self.written(number)) for number in read}
        shards_s = time.perf_counter() - begin
        every = [headers.get(number) or self.made_up(headers[read[0]], number) for number in range(self.options.shards)]
        shards = Shards(
            names=tuple(header.path.name for header in every),
            digests=tuple(header.header_digest for header in every),
            num_rows=self.counts,
            num_bytes=np.array([header.identity.size for header in every]),
            images_offset=np.array([header.fields["images"].offset for header in every]),
            chunk_rows=np.full(len(every), self.chunk_rows),
            shard=np.arange(len(every)),
            first=np.zeros(len(every), np.int64),
            rows=self.counts,
        )
        begin = time.perf_counter()
        joined = AlikeFiles(tuple(map(as_index, every)), shards, {SPLIT: self.options.rows})
        save_bytes(joined.index(), self.path, force=True)
        index_s = time.perf_counter() - begin
        self.journal.note("scale-index", file=self.about, write_s=index_s, index_bytes=self.path.stat().st_size,
                          shards_written=len(read), shards_s=shards_s)  # fmt: skip

    def written(self, number: int) -> Path:
        """The file of that shard, written if it is not there: black images, which are holes in the file."""
        path, count = shard_path(self.path, number, self.options.shards, 0), int(self.counts[number])
        if path.exists():
            return path
        black = pixel_digests([np.zeros((1, *ROW_SHAPE), np.uint8)])
        first = int(self.begins[number])
        columns = {
            "labels": Column(np.zeros(count, np.int64), {"names": ("black",)}),
            "split": Column(np.zeros(count, np.uint8), {"names": (SPLIT,)}),
            "key": Column(np.array([b"%010d" % key for key in range(first, first + count)])),
            "digest": Column(np.repeat(black, count)),
        }
        options = {"chunk_bytes": self.chunk_rows * int(np.prod(ROW_SHAPE))}  # by which the index is cut into windows
        attrs = {"seed": 0, "shuffled": True, "pack_options": dump_options(options)}
        pixels = {"images": PixelSpec(ROW_SHAPE, np.dtype(np.uint8), self.chunk_rows)}
        part = path.with_suffix(".part")
        create_file(part, num_rows=count, pixels=pixels, columns=columns, attrs=attrs)
        part.rename(path)
        return path

    def made_up(self, like: PackedFile, number: int) -> PackedFile:
        """The header of a shard that nobody reads."""
        path = shard_path(self.path, number, self.options.shards, 0)
        return replace(like, path=path, num_rows=int(self.counts[number]), header_digest=f"{number:032x}")

    def measure(self, what: str, *, target: str = "", steps: int = 0, now: int = 0) -> None:
        """One figure: a fresh process for each of some ranks."""
        code = _LOADER if what.startswith("loader") else _PLAN
        found = []
        for rank in self.ranks:
            words = (self.path, rank % (now or self.world), self.world, now or self.world, BATCH_SIZE, steps)
            found.append(harness.run_python(_MEASURE + code, *map(str, words)))
        values = {name: harness.spread([each[name] for each in found]) for name in found[0]}
        self.journal.note(f"scale-{what}", target=target, file=self.about, steps_done=steps,
                          ranks_now=now or self.world, **values)  # fmt: skip

    def balance(self) -> None:
        """What some nodes read in an epoch, counted by the rows that the plan gives their ranks."""
        plan = self.plan()
        num_rows = plan.num_steps * BATCH_SIZE
        nodes = max(1, self.world // RANKS_A_NODE)
        firsts = np.concatenate([[0], np.cumsum(-(-self.counts // self.chunk_rows))])  # the first chunk of each shard
        found = []
        for node in np.unique(np.linspace(0, nodes - 1, self.options.nodes).astype(int)).tolist():
            in_shard, in_chunk = np.zeros(len(self.begins), np.int64), np.zeros(firsts[-1], np.int64)
            for rank in range(node * RANKS_A_NODE, min((node + 1) * RANKS_A_NODE, self.world)):
                rows = plan.rows_at(rank, np.arange(num_rows))
                shard = self.shard_of(rows)
                in_shard += np.bincount(shard, minlength=len(in_shard))
                in_chunk += np.bincount(
                    firsts[shard] + (rows - self.begins[shard]) // self.chunk_rows, minlength=len(in_chunk)
                )
            read = in_shard[in_shard > 0]
            found.append(
                {"rows": int(read.sum()), "shards": len(read), "chunks": int((in_chunk > 0).sum()),
                 "most_rows_of_a_shard": int(read.max())}
            )  # fmt: skip
        values = {f"{name}_a_node": harness.spread([each[name] for each in found]) for name in found[0]}
        self.journal.note("scale-balance", file=self.about, nodes=nodes, **values)


_MEASURE = """
import json, os, sys, time
import torch
import fastload.loader.loader
from fastload import FastLoader, PackedDataset
from fastload.plan import ChunkWindow, EpochPlan
from fastload.prefetch.inputs import as_input
from fastload.profiling.meter.sampler import process_memory
path, (rank, began, world, batch_size, steps) = sys.argv[1], map(int, sys.argv[2:])

def resident(name):
    with open("/proc/self/status") as lines:
        return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")  # the peak is counted from here on
resident_before, own_before = resident("VmRSS"), process_memory(os.getpid())
cpu_before, marks = time.process_time(), [time.perf_counter()]

def mark():
    marks.append(time.perf_counter())

def say(*names, **more):
    times = {f"{name}_ms": 1e3 * (end - begin) for name, begin, end in zip(names, marks, marks[1:])}
    total = {"all_ms": 1e3 * (marks[-1] - marks[0]), "all_cpu_ms": 1e3 * (time.process_time() - cpu_before)}
    memory = {"peak_bytes": resident("VmHWM") - resident_before, "own_bytes": process_memory(os.getpid()) - own_before}
    print(json.dumps({**times, **total, **memory, **more}))
"""
_PLAN = """
data = as_input(path)
mark()
segments = ((began, batch_size, steps),) if steps else ()
plan = EpochPlan(data.plan_rows, chunk_rows=data.chunk_rows, world_size=world,
                 batch_size=batch_size, shuffle=ChunkWindow(), segments=segments)
batch = next(plan.batches(rank))
mark()
planned = {"planned_ms": 1e3 * (marks[-1] - marks[0]), "planned_bytes": resident("VmHWM") - resident_before,
           "planned_cpu_ms": 1e3 * (time.process_time() - cpu_before)}
marks[-1] = time.perf_counter()
images, labels = data.dataset.columns(batch.rows)
mark()
assert images.shape == (batch_size, 3, 32, 32) and not images.any()
say("open", "plan", "read", **planned)
"""
_LOADER = """
loader = FastLoader(path, batch_size, share=(rank, world))
mark()
if steps:
    loader.load_state_dict(loader.state_dict() | {"segments": [[began, batch_size, steps]]})
batches = iter(loader)
images, labels = next(batches)
mark()
assert images.shape == (batch_size, 3, 32, 32) and not images.any()
say("make", "first_batch")
loader.close()
"""


class SomeShards:
    """One file, and the same rows in 4 shards that are joined, and in 4 that are not."""

    def __init__(self, options: argparse.Namespace, journal: harness.Journal) -> None:
        self.options, self.journal = options, journal
        # Rows, chunk rows and batch size by shape. 16 windows or more of a file; whole batches, so that none is left.
        self.shapes = {(218, 178, 3): (8192, 64, 256), (32, 32, 3): (131_072, 2048, 1024)}
        if options.quick:
            self.shapes = {(32, 32, 3): (256, 8, 16)}

    def run(self) -> None:
        """All figures."""
        for (shape, (rows, chunk_rows, batch_size)), shuffle in itertools.product(self.shapes.items(), WINDOWS):
            one, ways = self.files(shape, rows, chunk_rows)
            for name, path in ways.items():
                with contextlib.ExitStack() as stack:
                    loaders = [stack.enter_context(opened(file, batch_size, shuffle)) for file in (path, one)]
                    found = harness.compare(
                        *(functools.partial(self.rate, loader) for loader in loaders), pairs=self.options.pairs
                    )
                seconds = (functools.partial(self.second, file, batch_size, shuffle) for file in (path, one))
                second = harness.compare(*seconds, pairs=self.options.pairs)
                said = "x".join(map(str, shape))
                for which, figures in (("", found), ("-second", second)):
                    self.journal.note(
                        f"shards-{name}-{said}-{shuffle}{which}", target=">= 0.95" if name == "joined" else ">= 0.75",
                        file={"rows": rows, "row_shape": list(shape), "chunk_rows": chunk_rows, "shards": 4},
                        batch_size=batch_size, epochs=self.options.epochs, page_cache="warm", **figures,
                    )  # fmt: skip

    def rate(self, loader: FastLoader) -> float:
        """Images a second over some epochs, each page of a batch touched."""
        epochs = itertools.chain.from_iterable(loader for _ in range(self.options.epochs))
        return harness.rate(harness.pixels_of(epochs))

    def second(self, path: Path, batch_size: int, shuffle: str) -> float:
        """Images a second of the second epoch of a new loader, whose first one compared all rows."""
        with opened(path, batch_size, shuffle) as loader:
            for _ in loader:
                pass
            return harness.rate(harness.pixels_of(loader))

    def files(self, shape: tuple[int, ...], rows: int, chunk_rows: int) -> tuple[Path, dict[str, Path]]:
        """The paths of the one file and of both indexes, packed of random pixels where they are not there."""
        folder = self.options.data / f"some-shards-{'x'.join(map(str, shape))}-{rows}"
        one, joined, odd = (folder / f"{name}.h5" for name in ("one", "joined", "odd"))
        if not odd.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            # In the order of the array, so that a row is the same in all of them; the plan shuffles.
            words: dict[str, Any] = {"shuffle": False, "chunk_bytes": chunk_rows * int(np.prod(shape)), "workers": 2}
            with random_array(folder / "images.npy", (rows, *shape)) as array:
                pack_images(array, one, **words)
                pack_images(array, joined, shards=4, **words)
            counts, parts = [rows // 4 + more for more in (-1, 1, -3, 3)], []
            for number, count in enumerate(counts):
                parts.append(folder / f"part-{number}.h5")
                with random_array(folder / "images.npy", (count, *shape), first=sum(counts[:number])) as array:
                    pack_images(array, parts[-1], **words)
            index_files(parts, odd)
        for path, wanted in ((joined, True), (odd, False)):
            with contextlib.closing(open_rows(read_header(path), ["images"], "map")) as reader:
                assert (reader.mapped("images") is not None) == wanted, f"{path}: joined: {not wanted}"
        return one, {"joined": joined, "odd": odd}


WINDOWS: dict[str, ChunkWindow | str] = {"chunk": ChunkWindow(), "full": "full"}


@contextlib.contextmanager
def opened(path: Path, batch_size: int, shuffle: str) -> Iterator[FastLoader]:
    """A loader of the images, all on this rank."""
    loader = FastLoader(PackedDataset(path, fields=["images"]), batch_size, shuffle=WINDOWS[shuffle], share=None)
    with contextlib.closing(loader):
        yield loader


@contextlib.contextmanager
def random_array(path: Path, shape: Sequence[int], *, first: int = 0) -> Iterator[Path]:
    """An .npy of random pixels: each row depends on its number alone, counted from `first`."""
    array = np.lib.format.open_memmap(path, "w+", np.uint8, tuple(shape))
    for row in range(len(array)):
        array[row] = np.frombuffer(np.random.default_rng(first + row).bytes(array[row].size), np.uint8).reshape(
            shape[1:]
        )
    array.flush()
    del array
    yield path
    path.unlink()


class OnRay:
    """Packing on a Ray cluster of this machine."""

    def __init__(self, options: argparse.Namespace, journal: harness.Journal) -> None:
        self.options, self.journal = options, journal
        self.made = set[tuple[int, str]]()  # number of images and digest of what was packed

    def run(self) -> None:
        """The only figure."""
        if find_spec("ray") is None:
            print("ray: left out, the package ray is not installed (pip install 'fastload-hdf5[ray]')", flush=True)
            return
        import ray

        images, shards = self.options.images, self.options.packed_shards
        few, many = self.faces(16), self.faces(images)
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            for _ in range(2):
                self.rate(few, 16, shards=4, engine="ray")  # starts the processes, which stay
            on_ray = functools.partial(self.rate, many, images, shards=shards, engine="ray")
            here = functools.partial(self.rate, many, images, shards=shards, workers=2)
            found = harness.compare(on_ray, here, pairs=self.options.pairs, warm_up=0)
        finally:
            ray.shutdown()
        assert len({made for made in self.made if made[0] == images}) == 1, "both ways pack the same"
        about = {"images": images, "shards": shards, "size": 128}
        self.journal.note("ray", target=">= 0.9", file=about, ray=ray.__version__, cpus=2, **found)

    def rate(self, source: Path, images: int, **words: Any) -> float:
        """Images a second of a pack, whose files are removed."""
        folder = self.options.data / "packed-on-ray"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        begin = time.perf_counter()
        pack_images(source, folder / "out.h5", size=128, **words)
        taken_s = time.perf_counter() - begin
        self.made.add((images, read_header(folder / "out.h5").header_digest))
        shutil.rmtree(folder)
        os.sync()  # What one way leaves to write would slow the next.
        return images / taken_s

    def faces(self, count: int) -> Path:
        """A folder of that many files: some faces, each under several names."""
        drawn = harness.drawn_faces(self.options.data / f"faces-{self.options.drawn}", self.options.drawn)
        files, folder = sorted((drawn / "img_align_celeba").iterdir()), self.options.data / f"faces-named-{count}"
        if not folder.exists():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            for number in range(count):
                name = part / f"class-{number % 10}" / f"{number:06d}.jpg"
                name.parent.mkdir(parents=True, exist_ok=True)
                name.hardlink_to(files[number % len(files)])
            part.rename(folder)
        return folder


class InStore:
    """What the nodes ask of an object store, by the plan."""

    def __init__(self, options: argparse.Namespace, journal: harness.Journal) -> None:
        self.options, self.journal = options, journal
        self.row_bytes = int(np.prod((218, 178, 3)))
        self.chunk_rows = chunk_rows_for(self.row_bytes, options.rows)

    def plan(self, rows: int, world: int, *, by_nodes: bool, epoch: int = 0) -> EpochPlan:
        """Windows of 16 chunks, batches of 256."""
        pieces = world // RANKS_A_NODE if by_nodes else 0
        return EpochPlan(range(rows), chunk_rows=self.chunk_rows, epoch=epoch, world_size=world, batch_size=BATCH_SIZE,
                         shuffle=ChunkWindow(), fixed_pieces=pieces)  # fmt: skip

    def run(self) -> None:
        """All figures."""
        rows, world = self.options.rows, self.options.world
        nodes = world // RANKS_A_NODE
        for by_nodes in (False, True):
            plan = self.plan(rows, world, by_nodes=by_nodes)
            some = np.unique(np.linspace(0, nodes - 1, self.options.nodes).astype(int)).tolist()
            chunks = [self.chunks_of(plan, node) for node in some]
            requests_per_s = world * self.options.rate / self.chunk_rows
            self.journal.note(
                "remote-node" if by_nodes else "remote", nodes=nodes, rows=rows, chunk_rows=self.chunk_rows,
                chunks_a_node=harness.spread([float(count) for count in chunks]),
                over_share=harness.spread([count * nodes * self.chunk_rows / rows for count in chunks]),
                bytes_a_node=float(np.median(chunks)) * self.chunk_rows * self.row_bytes,
                images_per_s_a_rank=self.options.rate, requests_per_s=requests_per_s, prefixes=requests_per_s / 5500,
                bytes_per_s_a_node=RANKS_A_NODE * self.options.rate * self.row_bytes,
            )  # fmt: skip
        chunks = 512 if self.options.quick else 8 * 4096
        for by_nodes, rule, part in itertools.product((True, False), ("needed last", "LRU"), (0.25, 0.5, 0.75)):
            fetched = self.fetched(chunks * self.chunk_rows, by_nodes=by_nodes, rule=rule, part=part)
            self.journal.note("remote-cache", share="node" if by_nodes else "auto", rule=rule, nodes=8, chunks=chunks,
                              cache_part=part, fetched_part=fetched)  # fmt: skip

    def chunks_of(self, plan: EpochPlan, node: int) -> int:
        """How many chunks the ranks of a node read in an epoch."""
        found = []
        for rank in range(node * RANKS_A_NODE, (node + 1) * RANKS_A_NODE):
            rows = plan.rows_at(rank, np.arange(0, plan.num_steps * BATCH_SIZE))
            found.append(np.unique(rows // self.chunk_rows))
        return len(np.unique(np.concatenate(found)))

    def fetched(self, rows: int, *, by_nodes: bool, rule: str, part: float) -> float:
        """The part of its chunks that the first of 8 nodes fetches in the third and fourth epoch, by chunks alone."""
        world, firsts = 8 * RANKS_A_NODE, np.arange(0, rows, self.chunk_rows)
        uses = []  # of each epoch: the chunks in the order in which the node needs them
        for epoch in range(5):
            ranks, steps = self.plan(rows, world, by_nodes=by_nodes, epoch=epoch).chunk_places(firsts)
            mine = np.flatnonzero(ranks < RANKS_A_NODE)
            uses.append(mine[np.argsort(steps[mine], kind="stable")].tolist())
        size, never = int(part * len(uses[0])), 2 * rows
        following = [{chunk: at for at, chunk in enumerate(order)} for order in uses]
        cached: dict[int, int] = {}  # chunk -> when it is needed next, or was used last
        waiting: list[tuple[int, int]] = []  # the same as a heap, the first to go at its head
        fetched = 0
        for epoch, order in enumerate(uses[:4]):
            for at, chunk in enumerate(order):
                time_now = epoch * rows + at
                if chunk not in cached:
                    fetched += epoch >= 2
                    while len(cached) >= size:
                        key, victim = heapq.heappop(waiting)
                        if cached.get(victim) == (-key if rule == "needed last" else key):
                            del cached[victim]
                place = following[epoch + 1].get(chunk)
                needed = never if place is None else (epoch + 1) * rows + place
                cached[chunk] = needed if rule == "needed last" else time_now
                heapq.heappush(waiting, (-needed if rule == "needed last" else time_now, chunk))
        return fetched / (len(uses[2]) + len(uses[3]))


def main() -> None:
    """Measure, and append the records."""
    figures = {"scale": Scale, "shards": SomeShards, "ray": OnRay, "remote": InStore}
    parser = harness.command_line(__doc__, "scale", figures=figures, pairs=5)
    parser.add_argument("--shards", type=int, default=13_600, help="of `scale` (default: 13,600)")
    parser.add_argument("--rows", type=int, default=10**9, help="of `scale`, in all shards (default: a billion)")
    parser.add_argument("--world", type=int, default=4096, help="ranks of `scale` (default: 4,096)")
    parser.add_argument("--ranks", type=int, default=5, help="that are measured (default: 5)")
    parser.add_argument("--nodes", type=int, default=32, help="of which `balance` counts the rows (default: 32)")
    parser.add_argument("--cut", choices=("pages", "odd"), default="pages", help="of shards: whole pages, or any rows")
    parser.add_argument("--epochs", type=int, default=16, help="of `shards`, in one measurement (default: 16)")
    parser.add_argument("--images", type=int, default=30_000, help="that `ray` packs (default: 30,000)")
    parser.add_argument("--drawn", type=int, default=2048, help="faces that are drawn for it (default: 2,048)")
    parser.add_argument("--packed-shards", type=int, default=8, help="that `ray` packs (default: 8)")
    parser.add_argument("--rate", type=float, default=2500, help="images/s a rank, of `remote` (default: 2,500)")
    options = parser.parse_args()
    if options.quick:
        options.shards, options.rows, options.world, options.ranks, options.nodes = 40, 40_000, 16, 1, 2
        options.epochs, options.images, options.drawn, options.packed_shards, options.pairs = 1, 64, 16, 4, 1
    journal = harness.begin(options, "shards", "rows", "world", "ranks", "cut", "epochs", "images", "pairs")
    for figure in options.only:
        figures[figure](options, journal).run()


if __name__ == "__main__":
    main()
