"""Zarr 3, uncompressed, one image a chunk in shards of 256, read by zarr-python or by tensorstore, one batch ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peers.adapters import _files
from peers.work import Data, Work

REQUIREMENTS = ("zarr==3.1.6", "tensorstore==0.1.86", "pillow==13.0.0")
PACKS = True
SHARD_ROWS = 256
AHEAD = 2  # batches asked for before the one in hand


def versions() -> dict[str, str]:
    """Versions of both readers."""
    return _files.versions_of("zarr", "tensorstore")


def supports(work: Work) -> str:
    """Arrays as they are."""
    return "" if work.encoding == "raw" and work.transform is None else "arrays have neither JPEG nor transforms"


def settings(work: Work) -> list[dict[str, Any]]:
    """Both readers; tensorstore's threads are a resource of its context."""
    found: list[dict[str, Any]] = [{"reader": "tensorstore", "threads": count} for count in (2, 4, 1)]
    return [*found, {"reader": "zarr", "threads": 2}]


def pack(data: Data, out: Path, *, encoding: str, workers: int) -> None:
    """One shard's rows at a time."""
    import zarr

    array, buffer, done = None, [], 0
    count = data.num_images
    for row in _files.decoded_rows(data):
        if array is None:
            shards = (SHARD_ROWS, *row.shape)
            array = zarr.create_array(
                str(out), shape=(count, *row.shape), dtype="uint8", chunks=(1, *row.shape), shards=shards,
                compressors=None, filters=None, overwrite=True,
            )  # fmt: skip
        buffer.append(row)
        if len(buffer) == SHARD_ROWS or done + len(buffer) == count:
            array[done : done + len(buffer)] = np.stack(buffer)
            done, buffer = done + len(buffer), []


class Loader:
    """Batches of rows as one selection each."""

    def __init__(self, work: Work, path: Path, settings: dict[str, Any], seed: int) -> None:
        self.work, self.seed, self.labels = work, seed, np.load(work.data.labels)
        self.pool: ThreadPoolExecutor | None = None
        if settings["reader"] == "tensorstore":
            import tensorstore

            limit = {"limit": settings["threads"]}
            context = tensorstore.Context({"data_copy_concurrency": limit, "file_io_concurrency": limit})
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
            array = tensorstore.open(spec, context=context, read=True).result()
            self.ask: Any = lambda rows: array[rows].read()
        else:
            import zarr

            zarr.config.set({"threading.max_workers": settings["threads"]})
            stored = zarr.open_array(str(path), mode="r")
            self.pool = ThreadPoolExecutor(1)
            pool = self.pool
            self.ask = lambda rows: pool.submit(stored.get_orthogonal_selection, rows)

    def epoch(self, number: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Batches, those after it under way."""
        size = self.work.batch_size
        order = np.random.default_rng((self.seed, number)).permutation(len(self.labels))
        coming = deque[tuple[Any, Any]]()
        for first in range(0, len(order) - size + 1, size):
            rows = order[first : first + size]
            coming.append((rows, self.ask(rows)))
            if len(coming) > AHEAD:
                yield self.finished(coming.popleft())
        while coming:
            yield self.finished(coming.popleft())

    def finished(self, asked: tuple[Any, Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Waits for a batch."""
        rows, future = asked
        return np.asarray(future.result()), self.labels[rows]

    def close(self) -> None:
        """Ends the thread that asks."""
        if self.pool is not None:
            self.pool.shutdown()
