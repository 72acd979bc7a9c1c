"""The order of an epoch's rows, before ranks cut batches from it: that of the file, full shuffle, or chunk windows.

Each order maps positions of the epoch's sequence, range(N), one to one to the planned rows of the file. It is
arithmetic on each position alone: positions may be any, in any number of calls, and N takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError, is_whole
from fastload.plan.permutation import BLOCK, blockwise, derive_key, mix64, permute, subkeys, unpermute
from fastload.plan.shares import Positions, rank_share, share_bounds, share_ranks

RowsAt = Callable[[Positions], NDArray[np.int64]]

# A number for each use of keys, so that no two permutations of an epoch share a key.
_FULL, _CHUNKS, _WINDOWS = 1, 2, 3
_PIECES, _GROUPS = 5, 6  # 4 is `epoch`'s: user code

# Batches whose rows are put together by likeness: more of them have batches more alike, and mix as much of the file.
_GROUPED_BATCHES = 64

# Steps from one aspect ratio, and one area, to the double. Batches of 8 of 4,000 sizes like COCO's are padded by 6 %
# with them, by 7 % with 16 steps of aspect, and by 30 % without any; batches of sizes drawn evenly by 19, 31 and 51 %.
_ASPECTS = _AREAS = 4


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


Shuffle = Literal["full", "chunk", "auto"] | ChunkWindow | bool
ResolvedShuffle = Literal["full", False] | ChunkWindow
Ends = Literal["drop", "pad", "exact"]


def resolve_shuffle(shuffle: Shuffle, file_shuffled: bool) -> ResolvedShuffle:
    """Returns the shuffle that a plan carries out, with all defaults resolved.

    Args:
        shuffle: True or "auto" mean chunk windows if the packer shuffled the file (neighbouring rows are a fair mix
            then), else "full". "chunk" means `ChunkWindow(16)`.
        file_shuffled: whether the packer shuffled the file's rows.

    Raises:
        OptionError: shuffle is none of the accepted values, which the message lists.
    """
    # `is`, since 1 == True and 0 == False, and a 0 meant as a window would silently switch shuffling off.
    if isinstance(shuffle, ChunkWindow) or shuffle is False:
        return shuffle
    if shuffle is True or shuffle == "auto":
        shuffle = "chunk" if file_shuffled else "full"
    if shuffle == "full":
        return "full"
    if shuffle == "chunk":
        return ChunkWindow()
    raise OptionError(
        f'shuffle={shuffle!r} is not known; choose True (or "auto"), False, "full", "chunk" or ChunkWindow(chunks)'
    )


def resolve_ends(ends: Ends | None, shuffle: ResolvedShuffle) -> Ends:
    """Returns what happens to shares that do not fill whole batches; None means "drop" when shuffling, else "exact"."""
    if ends is None:
        return "exact" if shuffle is False else "drop"
    if ends not in ("drop", "pad", "exact"):
        raise OptionError(f'ends={ends!r} is not known; choose "drop", "pad", "exact" or None')
    return ends


@dataclass(frozen=True, eq=False)
class ChunkPieces:
    """Where the rows of an array are cut into chunks anew: at the first row of each piece, the rows of one shard.

    Attributes:
        begins: int64 (P,), the first row of each piece, ascending, the first one 0.
        leads: int64 (P,), rows by which a chunk began before the piece, in [0, rows of a chunk): 0 if its first row
            begins one.
    """

    begins: NDArray[np.int64]
    leads: NDArray[np.int64]


_ONE_PIECE = ChunkPieces(np.zeros(1, np.int64), np.zeros(1, np.int64))


def make_order(
    rows: range,
    chunk_rows: int,
    shuffle: ResolvedShuffle,
    *,
    seed: int,
    epoch: int,
    world_size: int,
    fixed_shares: bool = False,
    groups: NDArray[np.int64] | None = None,
    batch_size: int = 1,
    pieces: ChunkPieces | None = None,
) -> RowsAt:
    """Returns the function from positions, int64 (P,) in [0, len(rows)), to rows of the file, int64 (P,).

    Chunk c of the file begins at row c * chunk_rows, or each of the pieces is cut into chunks. The ranks, and with
    groups the batches, are those that first share the sequence: without fixed shares only windows and groups depend on
    them, since none crosses a share.
    """
    if groups is not None:
        order = make_order(rows, chunk_rows, shuffle, seed=seed, epoch=epoch, world_size=world_size, pieces=pieces)
        return GroupedOrder(order, rows.start, groups, batch_size, seed=seed, epoch=epoch, world_size=world_size)
    if fixed_shares and world_size > 1:
        return PieceOrder(rows, chunk_rows, shuffle, seed, epoch, world_size, pieces)
    if shuffle is False:
        return partial(np.add, rows.start)
    if shuffle == "full":
        return partial(_full_order, rows, derive_key(seed, epoch, _FULL))
    return ChunkOrder(rows, chunk_rows, shuffle, seed=seed, epoch=epoch, world_size=world_size, pieces=pieces)


def _full_order(rows: range, key: int, positions: Positions) -> NDArray[np.int64]:
    return blockwise(lambda part: permute(part, len(rows), key) + rows.start, positions)


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
        pieces = pieces or _ONE_PIECE
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


@dataclass(frozen=True)
class PieceOrder:
    """Fixed shares: the rows cut into one contiguous piece a rank, each piece in an order of its own.

    The pieces are the shares of the sequence, so cutting it among the same number of ranks gives every rank the rows of
    its own piece, in every epoch. With rows 0..6 and 2 ranks, two epochs of full shuffle:

        position  0 1 2 3 | 4 5 6
        epoch 0   1 0 3 2 | 6 4 5
        epoch 1   3 2 1 0 | 5 4 6
    """

    rows: range
    chunk_rows: int
    shuffle: ResolvedShuffle
    seed: int
    epoch: int
    world_size: int
    pieces: ChunkPieces | None = None  # of the file
    _orders: dict[int, RowsAt] = field(init=False, default_factory=dict)

    def __call__(self, positions: Positions) -> NDArray[np.int64]:
        if not positions.size:
            return positions.copy()
        ends = np.array([positions.min(), positions.max()])
        first, last = share_ranks(ends, len(self.rows), self.world_size).tolist()
        if first == last:  # positions of one rank, as always when it plans its batches
            return self._rows_of(first, positions)
        rows = np.empty(positions.size, np.int64)
        ranks = share_ranks(positions, len(self.rows), self.world_size)
        for rank in set(ranks.tolist()):
            rows[ranks == rank] = self._rows_of(rank, positions[ranks == rank])
        return rows

    def _rows_of(self, rank: int, positions: Positions) -> NDArray[np.int64]:
        """Returns rows of the file at positions of one rank's piece."""
        share = rank_share(len(self.rows), rank=rank, world_size=self.world_size)
        if rank not in self._orders:
            piece = self.rows[share.start : share.stop]
            # A seed for each rank, since pieces of one length would else be permuted alike.
            seed = derive_key(self.seed, _PIECES, rank)
            self._orders[rank] = make_order(
                piece, self.chunk_rows, self.shuffle, seed=seed, epoch=self.epoch, world_size=1, pieces=self.pieces
            )
        return self._orders[rank](blockwise(lambda part: part - share.start, positions))


class GroupedOrder:
    """Another order with rows that are alike next to each other, so that each batch holds such rows.

    Each share is cut into blocks of 64 batches. The rows of a block are sorted by a number, cut into batches, and the
    batches shuffled. Rows that fill no batch, at the end of the last block, stay where they are: which rows they are
    does not depend on the numbers, so no kind of them is left out more often. Batches of 2, with the numbers of rows:

        order     5 3 9 1 | 4 4 8        (blocks of 2 batches here)
        sorted    1 3 5 9 | 4 4 8
        batches   5 9 1 3 | 4 4 8

    Args:
        order: from positions to rows, which decides what a block holds.
        first_row: the first of the planned rows.
        groups: int64 (N,), the number of each planned row.
        batch_size, world_size: those that the epoch began with.
        seed, epoch: of the plan.
    """

    def __init__(
        self,
        order: RowsAt,
        first_row: int,
        groups: NDArray[np.int64],
        batch_size: int,
        *,
        seed: int,
        epoch: int,
        world_size: int,
    ) -> None:
        self._order, self._first_row, self._groups = order, first_row, groups
        self._batch_size, self._world_size = batch_size, world_size
        self._key = derive_key(seed, epoch, _GROUPS)
        self._last: tuple[int, NDArray[np.int64]] | None = None  # position at which a block begins, and its rows

    def __call__(self, positions: Positions) -> NDArray[np.int64]:
        """Returns rows of the file at positions of the epoch's sequence."""
        share_first, share_stop = share_bounds(positions, len(self._groups), self._world_size)
        length = _GROUPED_BATCHES * self._batch_size
        firsts = positions - (positions - share_first) % length
        rows = np.empty(positions.size, np.int64)
        for first in np.unique(firsts).tolist():
            here = np.flatnonzero(firsts == first)
            stop = min(first + length, int(share_stop[here[0]]))
            rows[here] = self._block(first, stop)[positions[here] - first]
        return rows

    def _block(self, first: int, stop: int) -> NDArray[np.int64]:
        """Returns the rows of a block at positions from first to stop."""
        last = self._last
        if last is not None and last[0] == first:
            return last[1]
        rows = self._order(np.arange(first, stop))
        batches = len(rows) // self._batch_size
        whole = rows[: batches * self._batch_size]
        by_group = whole[np.argsort(self._groups[whole - self._first_row], kind="stable")]
        order = permute(np.arange(batches), batches, mix64(self._key + first)) if batches else np.arange(0)
        grouped = by_group.reshape(batches, self._batch_size)[order].reshape(-1)
        rows = np.concatenate([grouped, rows[len(whole) :]])
        self._last = first, rows
        return rows


def likeness(sizes: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Returns a number for each image, int64 (N,), of heights and widths (N, 2): close ones are of like shape.

    The aspect ratio counts in steps of 19 %, and within a step the area.
    """
    height, width = sizes.astype(np.float64).T
    aspect, area = _ASPECTS * np.log2(width / height), _AREAS * np.log2(height * width)
    steps: NDArray[np.int64] = np.rint(aspect).astype(np.int64)
    found: NDArray[np.int64] = steps * 2**8 + np.rint(area).astype(np.int64)
    return found
