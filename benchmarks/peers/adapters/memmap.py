"""The best gather one writes by hand: rows of a memory-mapped .npy, by torch or NumPy, in the loop itself.

Nothing is read ahead, so it overlaps with nothing; and there is no transform.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peers.work import Work

REQUIREMENTS = ()
PACKS = False


def versions() -> dict[str, str]:
    """Versions of NumPy and torch."""
    from importlib.metadata import version

    return {name: version(name) for name in ("numpy", "torch")}


def supports(work: Work) -> str:
    """Rows as they are."""
    return "" if work.encoding == "raw" and work.transform is None else "a bare gather has neither codec nor transform"


def settings(work: Work) -> list[dict[str, Any]]:
    """`torch.index_select` in one thread, two and four, and `np.take`."""
    gathers: list[dict[str, Any]] = [{"gather": "torch.index_select", "threads": count} for count in (2, 1, 4)]
    return [*gathers, {"gather": "np.take"}]


class Loader:
    """Gathers each batch when it is asked for, into memory that is used again."""

    def __init__(self, work: Work, path: Path, settings: dict[str, Any], seed: int) -> None:
        import torch

        self.torch, self.work, self.settings, self.seed = torch, work, settings, seed
        self.rows, self.labels = np.load(path, mmap_mode="c"), np.load(work.data.labels)
        self.flat = torch.from_numpy(self.rows.reshape(len(self.rows), -1))
        torch.set_num_threads(settings.get("threads", 1))  # once: OpenMP would start threads anew at each change
        self.out = torch.empty((work.batch_size, self.flat.shape[1]), dtype=torch.uint8)

    def epoch(self, number: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Rows in a new order."""
        size, torch = self.work.batch_size, self.torch
        order = np.random.default_rng((self.seed, number)).permutation(len(self.rows))
        out = self.out.numpy()
        for first in range(0, len(order) - size + 1, size):
            rows = order[first : first + size]
            if self.settings["gather"] == "np.take":
                np.take(self.rows, rows, axis=0, out=out.reshape(size, *self.rows.shape[1:]), mode="clip")
            else:
                torch.index_select(self.flat, 0, torch.from_numpy(rows), out=self.out)
            yield out.reshape(size, *self.rows.shape[1:]), self.labels[rows]

    def close(self) -> None:
        """Nothing runs."""
