"""What is tried: one argument of `FastLoader` after another, each from what was best so far. No torch here.

Left out, since they brought nothing (218x178x3 and 32x32x3 rows, page cache warm, 2 cores; the rates are images/s):
more slots in the ring than workers + 3 (threads: 42,200 with 4 slots, 39,200 with 5, 31,400 with 7, 25,500 with 11,
and beside a simulated accelerator the same stalls from 4 on), more than 2 batches ordered of each process (1,520 with
2, 1,260 with 4, 1,420 with 8), and groups of small batches larger or smaller than 12 MiB (1,165,000; 1,031,000 with 3,
978,000 with 24). The batch size is part of the training and not of the loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastload.plan import ChunkWindow, ResolvedShuffle
from fastload.read import Read

WINDOWS = (1, 4, 16, 64)

_MOST_WORKERS = 16


@dataclass(frozen=True)
class Candidate:
    """Arguments of `FastLoader`.

    Attributes:
        workers: threads or processes.
        shuffle: resolved.
        read: see `FastLoader`.
    """

    workers: int
    shuffle: ResolvedShuffle
    read: Read = "map"

    @property
    def order(self) -> str:
        """The shuffle, as Python writes it."""
        return f'"{self.shuffle}"' if isinstance(self.shuffle, str) else repr_of_window(self.shuffle)

    def arguments(self, default: Candidate) -> dict[str, str]:
        """Those that differ from the default, as Python writes them."""
        given = {}
        if self.workers != default.workers:
            given["workers"] = str(self.workers)
        if self.shuffle != default.shuffle:
            given["shuffle"] = self.order
        if self.read != default.read:
            given["read"] = f'"{self.read}"'
        return given


def repr_of_window(shuffle: ChunkWindow | bool) -> str:
    """`ChunkWindow(16)`, or `False`."""
    return f"ChunkWindow({shuffle.chunks})" if isinstance(shuffle, ChunkWindow) else str(shuffle)


@dataclass(frozen=True)
class Source:
    """What is known of the data, as far as it decides what is worth trying.

    Attributes:
        processes: samples take Python code, and processes run it.
        linear: each row can be read by itself, so that no chunk has to be read whole or decoded.
        num_chunks: of the rows; 0: there are no chunks to make windows of.
        cpus: that this rank may use.
        chunks_kept: decoded chunks that fit in memory; windows of more than half as many decode them again and again.
        cold: whether the file is dropped from the page cache before each trial.
    """

    processes: bool
    linear: bool
    num_chunks: int
    cpus: int
    chunks_kept: int = 2**31
    cold: bool = False


def windows_of(best: Candidate, source: Source) -> list[Candidate]:
    """Orders: where chunks are read whole, or come from the disk; in the page cache rows cost the same in any order."""
    if best.shuffle is False or not source.num_chunks or source.processes or (source.linear and not source.cold):
        return []
    shuffles: list[ResolvedShuffle] = [
        ChunkWindow(chunks) for chunks in WINDOWS if chunks < source.num_chunks and 2 * chunks <= source.chunks_kept
    ]
    return _others(best, [replace(best, shuffle=shuffle) for shuffle in (*shuffles, "full")])


def workers_of(best: Candidate, source: Source) -> list[Candidate]:
    """Numbers of workers, twice as many each time."""
    if source.processes:
        most = max(_MOST_WORKERS, source.cpus)
    elif source.linear:
        most = min(_MOST_WORKERS, max(2, source.cpus))
    else:
        most = 2  # HDF5 has one lock for the process
    numbers = [2**power for power in range(most.bit_length()) if 2**power <= most]
    return _others(best, [replace(best, workers=number) for number in sorted({*numbers, best.workers})])


def reads_of(best: Candidate, source: Source) -> list[Candidate]:
    """Ways to read."""
    if source.processes or not source.linear:
        return []
    return _others(best, [replace(best, read=read) for read in ("map", "pread")])


STAGES = {"windows": windows_of, "workers": workers_of, "read": reads_of}


def _others(best: Candidate, candidates: Sequence[Candidate]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate != best]
