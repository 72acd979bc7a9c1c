"""The candidates of a search: one argument of `FastLoader` varied after another. Needs no torch.

Not varied, because it gained nothing (218x178x3 and 32x32x3 rows, page cache warm, 2 cores; the rates are images/s):
more slots in the ring than workers + 3 (threads: 42,200 with 4 slots, 39,200 with 5, 31,400 with 7, 25,500 with 11, and
with a simulated accelerator the same stalls from 4 on), more than 2 batches ordered of each process (1,520 with 2,
1,260 with 4, 1,420 with 8), and groups of small batches larger or smaller than 12 MiB (1,165,000; 1,031,000 with 3,
978,000 with 24). The batch size is a matter of training, not of loading.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fastload.plan import ChunkWindow, ResolvedShuffle
from fastload.read.linear import Read

WINDOWS = (1, 4, 16, 64)

_MOST_WORKERS = 16


@dataclass(frozen=True)
class Candidate:
    """Arguments of `FastLoader`, and of its `PackedDataset`."""

    workers: int  # threads or processes
    shuffle: ResolvedShuffle  # resolved
    read: Read = "auto"  # as in `PackedDataset`

    @property
    def order(self) -> str:
        """The shuffle as a Python expression: `"full"`, `ChunkWindow(16)`, `False`."""
        if isinstance(self.shuffle, ChunkWindow):
            return f"ChunkWindow({self.shuffle.chunks})"
        return f'"{self.shuffle}"' if isinstance(self.shuffle, str) else str(self.shuffle)

    def arguments(self, default: Candidate) -> dict[str, str]:
        """Returns the arguments that differ from the default, as Python expressions."""
        mine, others = (
            {"workers": str(one.workers), "shuffle": one.order, "read": f'"{one.read}"'} for one in (self, default)
        )
        return {name: value for name, value in mine.items() if value != others[name]}


@dataclass(frozen=True)
class DataTraits:
    """Properties of the data that decide which values are worth trying, and how they are timed."""

    processes: bool  # whether samples need Python code, which processes run
    linear: bool  # whether each row can be read by itself, so that no chunk has to be read or decoded as a whole
    num_chunks: int  # chunks of the rows; 0: no chunks, hence no windows of them
    cpus: int  # that this rank may use
    # Decoded chunks that fit in memory; windows of more than half as many would decode chunks repeatedly
    chunks_kept: int = 2**31
    cold: bool = False  # whether the file is dropped from the page cache before each trial

    @property
    def whole(self) -> bool:
        """Whether threads load whole windows: they decode a window's chunks first, and yield most of its rows then."""
        return not self.linear and not self.processes


STAGES = {"windows": "shuffle", "workers": "workers", "read": "read"}
"""The stages of a search in order, and the argument that each varies."""


def candidates_of(stage: str, best: Candidate, traits: DataTraits) -> list[Candidate]:
    """Returns a stage's candidates to try against the best so far; empty if nothing can be gained."""
    values: list[Any] = []
    if stage == "windows" and best.shuffle is not False and not traits.processes and (traits.cold or traits.whole):
        # Chunks are read whole or from disk; rows that are in the page cache cost the same in every order.
        fitting = (chunks for chunks in WINDOWS if chunks < traits.num_chunks and 2 * chunks <= traits.chunks_kept)
        values = [*map(ChunkWindow, fitting), "full"] if traits.num_chunks else []
    elif stage == "workers":
        # HDF5 has one lock for the whole process.
        most = 2 if traits.whole else min(_MOST_WORKERS, max(2, traits.cpus))
        most = max(_MOST_WORKERS, traits.cpus) if traits.processes else most
        values = [2**power for power in range(most.bit_length())]
    elif stage == "read" and traits.linear and not traits.processes:
        values = ["auto", "pread"]  # not "map" where "auto" avoids it
    argument = STAGES[stage]
    return [replace(best, **{argument: value}) for value in values if value != getattr(best, argument)]
