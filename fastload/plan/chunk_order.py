"""The order of chunk windows: whole chunks are read, in a permuted sequence, and rows mixed among neighbours in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError, is_whole
from fastload.plan.permutation import BLOCK, blockwise, derive_key, mix64, permute, subkeys, unpermute, window_rows
from fastload.plan.shares import Positions, share_bounds
from fastload.system import native

_CHUNKS, _WINDOWS = 2, 3  # numbers of these uses of keys; `order` has the others


@dataclass(frozen=True)
class ChunkWindow:
    """A shuffle that reads whole chunks: permutes the chunks, then mixes rows inside windows of them.

    Attributes:
        chunks: chunks of a window, at least 1. More of them mix better, and read more of the file at once.
    """

    chunks: int = 16

    def __post_init__(self) -> None:
        if not is_whole(self.chunks) or self.chunks < 1:
            raise OptionError(
                f"ChunkWindow(chunks={self.chunks!r}): a window holds a whole number of chunks, 1 or more"
            )
        object.__setattr__(self, "chunks", int(self.chunks))  # NumPy's integers do not go into JSON


class ChunkOrder:
    """Chunk windows: permuted chunks one after another, their rows mixed inside windows of whole chunks.

    Every chunk has chunk_rows rows except the first and the last, of which the split may own only a part. Of an index
    chunks are counted through all of its rows, wherever shards begin, so that it has the order of one file of them. In
    the sequence every chunk gets chunk_rows *slots*; short chunks leave their last slots empty. So slots are plain
    arithmetic, and a position is its slot less the empty slots before it, of which there are at most two runs. With
    chunks of 4 rows, rows 2..10 and the chunks in the order 1, 0, 2:

        slot      0 1 2 3 | 4 5 . . | 8 9 10  .
        position  0 1 2 3 | 4 5     | 6 7  8
        row       4 5 6 7 | 2 3     | 8 9 10

    Windows are counted from the first chunk of a rank's share and end with the share. A window is mixed by a keyed
    bijection over its length, keyed by its first position.
    """

    def __init__(
        self, rows: range, chunk_rows: int, window: ChunkWindow, *, seed: int, epoch: int, world_size: int
    ) -> None:
        self._rows, self._chunk_rows, self._world_size = rows, chunk_rows, world_size
        self._chunk_key, self._window_key = (derive_key(seed, epoch, use) for use in (_CHUNKS, _WINDOWS))
        self._first_chunk = rows.start // chunk_rows
        self._num_chunks = max(1, -(-rows.stop // chunk_rows) - self._first_chunk)
        self._window_chunks = min(window.chunks, self._num_chunks)
        last = self._num_chunks - 1
        missing = {0: rows.start % chunk_rows}
        missing[last] = missing.get(last, 0) + -rows.stop % chunk_rows
        # (index in the sequence, empty slots) of each short chunk, in order of index.
        self._short_chunks = sorted(
            (int(unpermute(np.array([chunk]), self._num_chunks, self._chunk_key)[0]), n)
            for chunk, n in missing.items()
            if n
        )
        # The slot at which empty ones begin, and how many, of each.
        self._gaps = np.array([((at + 1) * chunk_rows - n, n) for at, n in self._short_chunks], np.int64).reshape(-1, 2)

    def __call__(self, positions: Positions) -> NDArray[np.int64]:
        """Returns rows of the file at positions of the epoch's sequence."""
        if not positions.size:
            return positions.copy()
        done, rows = 0, np.empty(positions.size, np.int64)
        if native.library() is not None:
            done = self._in_windows(np.ascontiguousarray(positions, np.int64), rows)
        if done < positions.size:
            rows[done:] = self._by_numpy(positions[done:])
        return rows

    def _in_windows(self, positions: Positions, rows: NDArray[np.int64]) -> int:
        """Writes the rows of positions, window by window; returns of how many, as this is slow where each has its own.

        A block that is planned at a time is of one or two windows, and NumPy would take some twenty small steps for
        each `BLOCK` of it, twice the time of the permutation.
        """
        done, gaps = 0, self._gaps
        for _ in range(2 + positions.size // BLOCK):
            if done == positions.size:
                break
            first, length = (int(bound[0]) for bound in self._windows(positions[done : done + 1]))
            ends = self._slots(np.array([first, first + length - 1])) // self._chunk_rows
            chunks = self._chunks(np.arange(ends[0], ends[1] + 1))
            begins = np.maximum(chunks * self._chunk_rows, self._rows.start)
            key = mix64(self._window_key + first)
            done += window_rows(
                positions[done:], rows[done:], (first, length), key, gaps, self._chunk_rows, int(ends[0]), begins
            )
        return done

    def _by_numpy(self, positions: Positions) -> NDArray[np.int64]:
        """Returns rows of the file at positions."""
        slots = self._mixed_slots(positions)
        in_sequence = blockwise(lambda part: part // self._chunk_rows, slots)
        chunks = self._chunks(in_sequence)
        rows = np.empty(positions.size, dtype=np.int64)
        for first in range(0, positions.size, BLOCK):
            part = slice(first, first + BLOCK)
            offset = slots[part] - in_sequence[part] * self._chunk_rows
            rows[part] = np.maximum(chunks[part] * self._chunk_rows, self._rows.start) + offset
        return rows

    def positions_of(self, rows: NDArray[np.int64]) -> Positions:
        begins, offsets = self._unmixed(rows)
        unmixed = begins + offsets
        firsts, lengths = self._windows(unmixed)
        keys = subkeys(self._window_key, firsts)
        positions = np.empty_like(rows)
        for n in set(lengths.tolist()):
            here = np.flatnonzero(lengths == n)
            positions[here] = firsts[here] + unpermute(unmixed[here] - firsts[here], n, keys[here])
        return positions

    def first_positions(self, rows: NDArray[np.int64]) -> Positions:
        return self._windows(self._unmixed(rows)[0])[0]

    def _unmixed(self, rows: NDArray[np.int64]) -> tuple[Positions, Positions]:
        """Returns where the chunk of each row would begin, were no window mixed, and where in the chunk the row is."""
        chunks = rows // self._chunk_rows
        firsts = np.maximum(chunks * self._chunk_rows, self._rows.start)
        index = blockwise(lambda part: unpermute(part - self._first_chunk, self._num_chunks, self._chunk_key), chunks)
        return self._begins(index), rows - firsts

    def _slots(self, positions: Positions) -> Positions:
        for begin, missing in self._gaps.tolist():
            positions = positions + (positions >= begin) * missing
        return positions

    def _begins(self, indices: Positions) -> Positions:
        """Returns the position at which each chunk of the sequence begins; N for indices past the last chunk."""
        indices = np.minimum(indices, self._num_chunks)
        begins = indices * self._chunk_rows
        for index, missing in self._short_chunks:
            begins = begins - (indices > index) * missing
        return begins

    def _windows(self, positions: Positions) -> tuple[Positions, Positions]:
        """Returns first position and length of the window that each position lies in."""
        share_first, share_stop = share_bounds(positions, len(self._rows), self._world_size)
        index = self._slots(positions) // self._chunk_rows
        share_index = self._slots(share_first) // self._chunk_rows
        index = index - (index - share_index) % self._window_chunks
        first = np.maximum(self._begins(index), share_first)
        return first, np.minimum(self._begins(index + self._window_chunks), share_stop) - first

    def _mixed_slots(self, positions: Positions) -> Positions:
        """Returns the slot that each position's row comes from."""
        slots = np.empty(positions.size, dtype=np.int64)
        first = length = 0  # of a window
        for begin in range(0, positions.size, BLOCK):
            part = positions[begin : begin + BLOCK]
            lowest, highest = int(part.min()), int(part.max())
            if not first <= lowest < first + length:
                first, length = (int(bound[0]) for bound in self._windows(part[:1]))
            # Windows of small rows are far longer than a block: one key for all halves the cost.
            if first <= lowest and highest < first + length:
                mixed = permute(part - first, length, mix64(self._window_key + first)) + first
            else:
                firsts, lengths = self._windows(part)
                keys = subkeys(self._window_key, firsts)
                mixed = np.empty_like(part)
                # All windows of a share have one length, except its last one and those with a short chunk.
                for n in set(lengths.tolist()):
                    here = np.flatnonzero(lengths == n)
                    mixed[here] = firsts[here] + permute(part[here] - firsts[here], n, keys[here])
            slots[begin : begin + BLOCK] = self._slots(mixed)
        return slots

    def _chunks(self, indices: Positions) -> NDArray[np.int64]:
        """Returns the chunk of the file at each index of the sequence of chunks."""

        def permuted(part: Positions) -> Positions:
            return permute(part, self._num_chunks, self._chunk_key) + self._first_chunk

        lowest, highest = int(indices.min()), int(indices.max())
        if highest - lowest >= indices.size:
            return blockwise(permuted, indices)
        # Neighbouring positions share their chunks: permute each chunk once.
        table = blockwise(permuted, np.arange(lowest, highest + 1))
        return blockwise(lambda part: table[part - lowest], indices)
