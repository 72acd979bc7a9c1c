"""torchdata.nodes: a sampler of batches, a ParallelMapper of threads that gather from a memmap, a Prefetcher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from peers.adapters import _torch
from peers.work import Work

REQUIREMENTS = ("torchdata==0.11.0", "torchvision==0.28.0", "pillow==13.0.0")
PACKS = False
ANTIALIASED = True


def versions() -> dict[str, str]:
    """Versions of torchdata and torchvision."""
    return _torch.versions_of("torchdata", "torchvision")


def supports(work: Work) -> str:
    """All: its nodes run whatever function one gives them."""
    return ""


def settings(work: Work) -> list[dict[str, Any]]:
    """Threads of the mapper; processes copy each batch once more, and are tried for what Python does most of."""
    threads: list[dict[str, Any]] = [{"num_workers": count, "method": "thread"} for count in (2, 4, 1)]
    if work.transform is None:
        return threads
    return [*threads, {"num_workers": 2, "method": "process"}, {"num_workers": 4, "method": "process"}]


class ShuffledBatches:
    """Sampler of batches of rows, in a new order each epoch; `torchdata.nodes` calls `set_epoch`."""

    def __init__(self, rows: int, batch_size: int, seed: int) -> None:
        self.rows, self.batch_size, self.seed, self.epoch = rows, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next `iter()`."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.rows)
        for first in range(0, len(order) - self.batch_size + 1, self.batch_size):
            yield order[first : first + self.batch_size]


class Loader:
    """`nodes.Loader` over those nodes."""

    def __init__(self, work: Work, path: Path, settings: dict[str, Any], seed: int) -> None:
        from torchdata import nodes

        self.work, labels = work, np.load(work.data.labels)
        self.sampler = ShuffledBatches(len(labels), work.batch_size, seed)
        if work.transform is None:
            rows = np.load(path, mmap_mode="r")

            def make(batch: NDArray[np.int64]) -> Any:
                return np.take(rows, batch, axis=0, mode="clip"), labels[batch]

        else:
            dataset = _torch.Batches(work, fetcher(work, path), labels)

            def make(batch: NDArray[np.int64]) -> Any:
                images, chosen = dataset.__getitems__(batch.tolist())
                return images.numpy(), chosen.numpy()

        workers, method = settings["num_workers"], settings["method"]
        more = {"multiprocessing_context": "fork"} if method == "process" else {}
        source = nodes.SamplerWrapper(self.sampler)
        mapped = nodes.ParallelMapper(source, make, num_workers=workers, method=method, **more)
        self.loader: Any = nodes.Loader(nodes.Prefetcher(mapped, prefetch_factor=2), restart_on_stop_iteration=True)
        torch.set_num_threads(1)  # in the mapper's threads: they are the parallel ones

    def epoch(self, number: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """The next pass of the nodes."""
        yield from self.loader

    def state(self) -> object:
        """What the nodes tell."""
        return self.loader.state_dict()

    def load_state(self, state: Any) -> None:
        """Goes on where it was taken."""
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """Lets go of the nodes, whose threads end."""
        self.loader = None


def fetcher(work: Work, path: Path) -> Any:
    """A function from a row to its pixels: of the .npy, or of the JPEG file."""
    if work.encoding == "raw":
        return np.load(path, mmap_mode="c").__getitem__
    files = _torch.image_files(work.data)[0]
    return lambda row: _torch.decode(torch.from_numpy(np.fromfile(files[row], np.uint8)))
