"""Small datasets of every layout in many chunks, for tests that read them behind a URL: `write_kind`; and watchers."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from ragged_cases import Row, jpeg_row
from small_files import labels_in_turn, random_pixels, write_foreign, write_random

from fastload.format.ragged import Column
from fastload.pack.index import index_files
from fastload.remote.fetch import ChunkFetcher
from fastload.repack import repack_file
from sample_files import write_ragged

KINDS = ("linear", "masks", "jpeg", "zstd", "foreign", "shards", "shards of jpeg", "shards of masks")
ROWS = 480
SIZE = (16, 16, 3)
CHUNK_ROWS = 4


@contextmanager
def holding(fetcher: ChunkFetcher, chunks: Sequence[int]) -> Iterator[None]:
    """Within it these chunks are there."""
    fetcher.hold(chunks)
    try:
        yield
    finally:
        fetcher.release(chunks)


def write_kind(kind: str, folder: Path) -> Path:
    """Writes ROWS rows in chunks of few into a folder; returns the file to open.

    Rows have labels; those of "shards" are in several files of different lengths, which the file that is returned is
    the index of.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if kind.startswith("shards"):
        counts, of = (130, 7, 200, 143), kind.removeprefix("shards of ")
        names = [folder / f"part-{number}.h5" for number in range(len(counts))]
        seeds = range(1, len(names) + 1)
        files = [_write(of, name, n, seed) for name, n, seed in zip(names, counts, seeds, strict=True)]
        index_files(files, folder / "data.h5")
        return folder / "data.h5"
    return _write(kind, folder / "data.h5", ROWS, 0)


def _write(kind: str, path: Path, rows: int, seed: int) -> Path:
    options: dict[str, Any] = {"rows": rows, "size": SIZE, "seed": seed, "classes": "abc", "chunk_rows": CHUNK_ROWS}
    keys = Column(np.array([f"{path.stem}/{i:04}".encode() for i in range(rows)]))
    if kind == "jpeg":
        images: list[Row] = [jpeg_row(48, 64, seed=1000 * seed + i) for i in range(rows)]
        return write_ragged(path, images, {"labels": labels_in_turn(rows, "abc"), "key": keys}, chunk_bytes=4096)
    if kind == "foreign":
        labels = np.arange(rows, dtype=np.int64) % 3
        return write_foreign(path, random_pixels(rows, SIZE, seed=seed), chunk_rows=CHUNK_ROWS, labels=labels)
    if kind in ("zstd", "masks"):  # one size, through a filter; masks of few values, which compress well
        plain = path.with_suffix(".plain.h5")
        write_random(plain, columns={"key": keys}, masks=kind == "masks", below=4, **options)
        repack_file(plain, path, codec="zstd", chunk_bytes=CHUNK_ROWS * int(np.prod(SIZE)), workers=0)
        plain.unlink()
        return path
    return write_random(path, columns={"key": keys}, **options)


def bytes_on_disk(folder: Path) -> int:
    """Returns what the files of a folder take on the disk, also of those that go away meanwhile."""
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(above, name)).st_blocks * 512
            except OSError:
                continue
    return total


class Most:
    """The most bytes that a folder took while it was watched, and how often it was looked at."""

    num_bytes = 0
    looks = 0


@contextmanager
def watched(folder: Path) -> Iterator[Most]:
    """Looks at a folder again and again, from a thread, and notes the most bytes that its files took."""
    most, done = Most(), threading.Event()

    def look() -> None:
        while True:
            most.num_bytes, most.looks = max(most.num_bytes, bytes_on_disk(folder)), most.looks + 1
            if done.wait(0.005):
                return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def serve(source: Path, folder: Path, name: str = "data") -> str:
    """Copies the folder of a dataset below that of a server; returns the path of its file there."""
    shutil.copytree(source.parent, folder / name)
    return f"{name}/{source.name}"


def spans(log: Sequence[dict[str, Any]], path: str = "") -> list[tuple[str, int, int]]:
    """Returns path, first byte, and the one behind the last, of each range that was served."""
    found = []
    for one in log:
        if one["method"] == "GET" and one["status"] in (200, 206) and path in one["path"]:
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", one["range"] or "")
            assert span is not None, f"a GET without a range: {one}"
            found.append((one["path"], int(span[1]), int(span[2]) + 1))
    return found


def fetched_bytes(log: Sequence[dict[str, Any]], path: str = "") -> int:
    """Returns the bytes of all ranges that were served."""
    return sum(stop - begin for _, begin, stop in spans(log, path))


def counted_bytes(log: Sequence[dict[str, Any]], path: str, size: int) -> np.ndarray:
    """Returns how often each byte of an object was fetched, int64 (size,)."""
    steps = Counter[int]()
    for _, begin, stop in spans(log, path):
        steps[begin] += 1
        steps[stop] -= 1
    change = np.zeros(size + 1, np.int64)
    for place, step in steps.items():
        change[place] += step
    return np.cumsum(change)[:size]
