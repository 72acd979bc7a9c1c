"""The order of chunk windows: whole chunks are read, in a permuted sequence, and rows mixed among neighbours in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError, is_whole
from fastload.plan.permutation import BLOCK, blockwise, derive_key, mix64, permute, subkeys, unpermute
from fastload.plan.shares import Positions, share_bounds

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


@dataclass(frozen=True, eq=False)
class ChunkPieces:
    """The rows of an array where cutting into chunks starts anew: the first row of each piece, the rows of one shard.

    Attributes:
        begins: int64 (P,), the first row of each piece, ascending, the first one 0.
        leads: int64 (P,), rows by which a chunk began before the piece, in [0, rows of a chunk): 0 if its first row
            begins one.
    """

    begins: NDArray[np.int64]
    leads: NDArray[np.int64]


ONE_PIECE = ChunkPieces(np.zeros(1, np.int64), np.zeros(1, np.int64))


class ChunkOrder:
    """Chunk windows: permuted chunks one after another, their rows mixed inside windows of whole chunks.

    Every chunk has chunk_rows rows except the first and the last, of which the split may own only a part, and those at
    both ends of a shard. In the sequence every chunk gets chunk_rows *slots*; short chunks leave their last slots
    empty. So a slot is its position and the empty slots before it, which a sorted table of the short chunks tells. With
    chunks of 4 rows, rows 2..10 and the chunks in the order 1, 0, 2:

        slot      0 1 2 3 | 4 5 . . | 8 9 10  .
        position  0 1 2 3 | 4 5     | 6 7  8
        row       4 5 6 7 | 2 3     | 8 9 10

    Windows are counted from the first chunk of a rank's share and end with the share. A window is mixed by a keyed
    bijection over its length, keyed by its first position.
    """

    def __init__(
        self,
        rows: range,
        chunk_rows: int,
        window: ChunkWindow,
        *,
        seed: int,
        epoch: int,
        world_size: int,
        pieces: ChunkPieces | None = None,
    ) -> None:
        self._rows, self._chunk_rows, self._world_size = rows, chunk_rows, world_size
        self._chunk_key, self._window_key = (derive_key(seed, epoch, use) for use in (_CHUNKS, _WINDOWS))
        pieces = pieces or ONE_PIECE
        # The pieces with rows of these, the first row of each that is among them, and where its chunk began.
        first = int(np.searchsorted(pieces.begins, rows.start, "right")) - 1
        some = slice(first, max(first + 1, int(np.searchsorted(pieces.begins, rows.stop))))
        begins = pieces.begins[some]
        self._firsts = np.maximum(begins, rows.start)
        leads = (self._firsts - begins + pieces.leads[some]) % chunk_rows
        stops = np.append(begins[1:], rows.stop)
        counts = -(-(stops - self._firsts + leads) // chunk_rows)
        self._num_chunks = int(counts.sum())
        self._piece_chunks = np.cumsum(counts) - counts  # the number of each piece's first chunk
        self._chunk_begins = self._firsts - leads
        self._window_chunks = min(window.chunks, self._num_chunks)
        self._short_chunks(leads, -(stops - self._firsts + leads) % chunk_rows, counts)

    def _short_chunks(self, leads: Positions, tails: Positions, counts: Positions) -> None:
        """Notes index in the sequence and empty slots of each short chunk, by index.

        The leads and tails are the rows that each piece's first and last chunk, which may be one, have less.
        """
        ends = np.stack([self._piece_chunks, self._piece_chunks + counts - 1], axis=1).ravel()
        missing = np.stack([leads, tails], axis=1).ravel()
        short, at = np.unique(ends[missing > 0], return_inverse=True)
        lacking = np.bincount(at, missing[missing > 0], len(short)).astype(np.int64)
        index = unpermute(short, self._num_chunks, self._chunk_key)
        order = np.argsort(index)
        self._short = index[order]
        self._missing = np.append(0, np.cumsum(lacking[order]))  # empty slots before the first, the second, ...
        # The first position behind each short chunk.
        self._behind = (self._short + 1) * self._chunk_rows - self._missing[1:]

    def __call__(self, positions: Positions) -> NDArray[np.int64]:
        """Returns rows of the file at positions of the epoch's sequence."""
        if not positions.size:
            return positions.copy()
        slots = self._mixed_slots(positions)
        in_sequence = blockwise(lambda part: part // self._chunk_rows, slots)
        chunks = self._chunks(in_sequence)
        rows = np.empty(positions.size, dtype=np.int64)
        for first in range(0, positions.size, BLOCK):
            part = slice(first, first + BLOCK)
            offset, numbers = slots[part] - in_sequence[part] * self._chunk_rows, chunks[part]
            if len(self._firsts) == 1:
                rows[part] = np.maximum(self._chunk_begins + numbers * self._chunk_rows, self._firsts) + offset
                continue
            piece = np.searchsorted(self._piece_chunks, numbers, "right") - 1
            begins = self._chunk_begins[piece] + (numbers - self._piece_chunks[piece]) * self._chunk_rows
            rows[part] = np.maximum(begins, self._firsts[piece]) + offset
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
        piece = np.searchsorted(self._firsts, rows, "right") - 1
        of_piece = (rows - self._chunk_begins[piece]) // self._chunk_rows
        firsts = np.maximum(self._chunk_begins[piece] + of_piece * self._chunk_rows, self._firsts[piece])
        numbers = self._piece_chunks[piece] + of_piece
        index = blockwise(lambda part: unpermute(part, self._num_chunks, self._chunk_key), numbers)
        return self._begins(index), rows - firsts

    def _slots(self, positions: Positions) -> Positions:
        if not len(self._short):
            return positions
        slots: Positions = positions + self._missing[np.searchsorted(self._behind, positions, "right")]
        return slots

    def _begins(self, indices: Positions) -> Positions:
        """Returns the position at which each chunk of the sequence begins; N for indices past the last chunk."""
        indices = np.minimum(indices, self._num_chunks)
        begins = indices * self._chunk_rows
        return begins - self._missing[np.searchsorted(self._short, indices)] if len(self._short) else begins

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
        """Returns the chunk, counted from the first one of the rows, at each index of the sequence of chunks."""

        def permuted(part: Positions) -> Positions:
            return permute(part, self._num_chunks, self._chunk_key)

        lowest, highest = int(indices.min()), int(indices.max())
        if highest - lowest >= indices.size:
            return blockwise(permuted, indices)
        # Neighbouring positions share their chunks: permute each chunk once.
        table = blockwise(permuted, np.arange(lowest, highest + 1))
        return blockwise(lambda part: table[part - lowest], indices)
