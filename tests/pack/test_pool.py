"""How much of arrays workers hold at once, and which of them hold it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from fastload.pack import PackOptions, pack_listing
from fastload.sources.arrays.raw_rows import MemoryRows
from fastload.sources.listing import Arrays, Listing


def listing_of(files: Arrays, count: int) -> Listing:
    keys = tuple(f"{i:05d}" for i in range(count))
    zeros = np.zeros(count, np.int64)
    return Listing("arrays", keys, zeros.astype(np.uint8), ("all",), {}, (), zeros, zeros, files)


@dataclass(frozen=True)
class Counted:
    """Rows of noise that remember how many were asked for at once."""

    shape: tuple[int, ...] = (300, 300, 3)
    dtype: np.dtype[Any] = np.dtype(np.uint8)  # noqa: RUF009 - a dtype is not mutable
    asked: list[int] = field(default_factory=list)

    def read_rows(self, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        self.asked.append(len(indices))
        out[...] = indices.reshape(-1, 1, 1, 1)

    def take(self, indices: NDArray[np.integer[Any]]) -> Counted:
        raise AssertionError("not asked for")


def test_large_arrays_are_made_small_a_few_at_a_time(tmp_path: Path) -> None:
    files = Counted()
    pack_listing(listing_of(files, 50), tmp_path / "a.h5", options=PackOptions((8, 8)), source_name="S", workers=0)
    assert max(files.asked) * 300 * 300 * 3 <= 2 * 2**20 and sum(files.asked) == 50


def test_large_arrays_in_memory_are_shared_by_threads_and_not_copied_to_processes(tmp_path: Path) -> None:
    values = np.zeros((80, 600, 500, 3), np.uint8)
    values[:, 100, 100] = np.arange(80).reshape(-1, 1)
    children: list[int] = []

    def count(stage: str, done: int, total: int) -> None:
        children.append(len(psutil.Process().children()))

    before = len(psutil.Process().children())
    for workers in (0, 2):
        pack_listing(
            listing_of(MemoryRows.of(values), 80), tmp_path / f"{workers}.h5", source_name="S", workers=workers,
            options=PackOptions((60, 50), chunk_bytes=9000), progress=count,
        )  # fmt: skip
    assert max(children) == before
    assert (tmp_path / "0.h5").read_bytes() == (tmp_path / "2.h5").read_bytes()
