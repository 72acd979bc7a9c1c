"""`ChunkRoom`: whether the chunks that are needed at a time fit into the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fastload.format.header import PackedFile
from fastload.remote.cache import BLOCK, OWN_FILES, Bound
from fastload.remote.chunks import ChunkTable


class ChunkRoom:
    """The sizes of an index's chunks, and how many of them fit in.

    Args:
        file: header of the index.
        table: of its chunks.

    Attributes:
        largest: the bytes of the largest chunk of each field, together.
        chunk_bytes: the same with the blocks that it begins and ends in.
        ranks: of this machine, that share the cache.
        least_bytes: of memory, for chunks read at a time.
        bound: on what the chunks take.
    """

    bound: Bound

    def __init__(self, file: PackedFile, table: ChunkTable) -> None:
        self._file, self._table, self._shards = file, table, table.shards
        large = sum(file.fields[name].bytes_in(self._shards) for name in table.fields)
        # What HDF5 allocated behind the large fields counts as header.
        self.header_bytes: NDArray[np.int64] = self._shards.num_bytes - np.minimum(large, self._shards.num_bytes)
        self.largest = 1 + sum(table.largest.values())
        self.chunk_bytes = self.largest + 2 * BLOCK
        self.ranks, self.least_bytes = 1, 0

    @property
    def fitting(self) -> int:
        """The chunks of each field that this process may hold at a time, if all ranks of this machine hold as many."""
        return self.bound.room // self.ranks // self.largest - 1

    def check_held(self, chunks: Sequence[int]) -> None:
        """Raises CacheError where these chunks, which are needed at the same time, do not fit into the cache."""
        if (len(chunks) + 1) * self.chunk_bytes <= self.bound.room:
            return
        _, column, _ = self._table.placed(np.array(chunks, np.int64))
        needed = int(np.array([0, *(one + BLOCK for one in self._table.largest.values())])[column].sum())
        or_else = ", or read rows that lie in fewer chunks: FastLoader, or a DataLoader with a ChunkSampler"
        self.bound.check(needed, f"reading rows of {len(chunks)} chunks at a time", or_else)

    def check(self, num_chunks: int, why: str, or_else: str) -> None:
        """Raises CacheError where not so many chunks of each field fit into the cache, with their shards' headers.

        For each of the ranks of this machine. `or_else`: what to do else than to give the cache more.
        """
        shards = min(self.ranks * num_chunks, len(self._shards.names))
        num_chunks = min(num_chunks, self._table.num_chunks)
        self.least_bytes = num_chunks * self.chunk_bytes
        files = sum(path.stat().st_blocks * 512 for path in self._file.path.parent.iterdir() if path.name in OWN_FILES)
        headers = int(np.sort(self.header_bytes)[::-1][:shards].sum())
        self.bound.check(self.ranks * num_chunks * self.chunk_bytes + headers + files, why, or_else)
