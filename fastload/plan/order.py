"""The order of an epoch's rows, before ranks cut batches from it: file order, full shuffle, or chunk windows.

Each order maps positions of the epoch's sequence, range(N), one to one to the planned rows of the file, and back. It
is arithmetic on each position alone: positions may be any, in any number of calls, and N takes no memory. Orders that
draw rows by weight or class (`weighted`) have rows several times or not at all, and no way back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError, is_whole
from fastload.plan.permutation import BLOCK, blockwise, derive_key, mix64, permute, subkeys, unpermute, window_rows
from fastload.plan.shares import Positions, rank_share, share_bounds, share_ranks
from fastload.plan.weighted import ClassBatches, Weighted
from fastload.system import native


class Order(Protocol):
    """An epoch's rows in sequence, mostly a permutation; each method works row by row, or position by position."""

    def __call__(self, positions: Positions) -> NDArray[np.int64]:
        """Returns rows of the file, int64 (P,), at positions of the sequence, int64 (P,) in [0, N)."""

    def positions_of(self, rows: NDArray[np.int64]) -> Positions:
        """Returns the positions at which planned rows come, int64 (P,): the inverse, of a permutation."""

    def first_positions(self, rows: NDArray[np.int64]) -> Positions:
        """Returns for each planned row the least position, int64 (P,), at which a row of its chunk may come.

        It lies in the share in which the chunk begins. 0 where rows of a chunk lie all over.
        """


# A number for each use of keys, so that no two permutations of an epoch share a key.
_FULL, _CHUNKS, _WINDOWS, _PIECES, _GROUPS = 1, 2, 3, 5, 6  # `epoch` has 4, `weighted` 7, then 8, 9

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


Drawing = Weighted | ClassBatches
"""Shuffles that draw rows, so that a row may come several times in an epoch or not at all."""

Shuffle = Literal["full", "chunk", "auto"] | ChunkWindow | Drawing | bool
ResolvedShuffle = Literal["full", False] | ChunkWindow | Drawing
Ends = Literal["drop", "pad", "exact"]


def is_drawing(shuffle: object) -> TypeGuard[Drawing]:
    """Whether a shuffle draws rows, so that a row may come several times in an epoch or not at all."""
    return isinstance(shuffle, (Weighted, ClassBatches))


def resolve_shuffle(shuffle: Shuffle, file_shuffled: bool) -> ResolvedShuffle:
    """Returns the shuffle that a plan carries out, with all defaults resolved.

    Args:
        shuffle: True or "auto" mean chunk windows if the packer shuffled the file (neighbouring rows are a fair mix
            then), else "full". "chunk" means `ChunkWindow(16)`.
        file_shuffled: whether the packer shuffled the file's rows.

    Raises:
        OptionError: shuffle is not one of the accepted values, which the message lists.
    """
    # `is`, since 1 == True and 0 == False, and a 0 meant as a window would silently switch shuffling off.
    if isinstance(shuffle, (ChunkWindow, Weighted, ClassBatches)) or shuffle is False:
        return shuffle
    given: object = shuffle
    if not isinstance(given, (str, bool)):
        hint = ". To draw samples by weight: Weighted(weights)" if hasattr(given, "__len__") else ""
        raise OptionError(f"shuffle={given!r} is not known; {_ACCEPTED}{hint}")
    if shuffle is True or shuffle == "auto":
        shuffle = "chunk" if file_shuffled else "full"
    if shuffle == "full":
        return "full"
    if shuffle == "chunk":
        return ChunkWindow()
    raise OptionError(f"shuffle={shuffle!r} is not known; {_ACCEPTED}")


_ACCEPTED = (
    'choose True (or "auto"), False, "full", "chunk" or ChunkWindow(chunks), or Weighted(weights) or '
    "ClassBatches(classes, samples)"
)


def resolve_ends(ends: Ends | None, shuffle: object) -> Ends:
    """Returns what happens to shares that do not fill whole batches; None means "drop" when shuffling, else "exact"."""
    if ends is None:
        return "exact" if shuffle is False else "drop"
    if ends not in ("drop", "pad", "exact"):
        raise OptionError(f'ends={ends!r} is not known; choose "drop", "pad", "exact" or None')
    return ends


def make_order(
    rows: range,
    chunk_rows: int,
    shuffle: ResolvedShuffle,
    *,
    seed: int,
    epoch: int,
    world_size: int,
    fixed_pieces: int = 0,
    groups: NDArray[np.int64] | None = None,
    batch_size: int = 1,
) -> Order:
    """Returns the order of rows of the file in one epoch.

    Chunk c of the file begins at row c * chunk_rows. The ranks, and with groups the batches, are those that first share
    the sequence: without fixed pieces only windows and groups depend on them, since none crosses a share. The fixed
    pieces, 0 for none, divide the ranks; see `PieceOrder`.
    """
    if groups is not None:
        order = make_order(
            rows, chunk_rows, shuffle, seed=seed, epoch=epoch, world_size=world_size, fixed_pieces=fixed_pieces
        )  # fmt: skip
        number = shuffle.num_positions(len(rows)) if isinstance(shuffle, Weighted) else len(rows)
        return GroupedOrder(
            order, rows.start, groups, number, batch_size, seed=seed, epoch=epoch, world_size=world_size
        )
    if fixed_pieces > 1:
        return PieceOrder(rows, chunk_rows, shuffle, seed, epoch, world_size, fixed_pieces)
    if shuffle is False:
        return FileOrder(rows, chunk_rows)
    if shuffle == "full":
        return FullOrder(rows, derive_key(seed, epoch, _FULL))
    if isinstance(shuffle, (Weighted, ClassBatches)):
        return shuffle.order(rows, seed, epoch)
    return ChunkOrder(rows, chunk_rows, shuffle, seed=seed, epoch=epoch, world_size=world_size)


@dataclass(frozen=True)
class FileOrder:
    """The order of the file."""

    rows: range
    chunk_rows: int  # 0: each row is a chunk

    def __call__(self, positions: Positions) -> NDArray[np.int64]:
        return positions + self.rows.start

    def positions_of(self, rows: NDArray[np.int64]) -> Positions:
        return rows - self.rows.start

    def first_positions(self, rows: NDArray[np.int64]) -> Positions:
        return self.positions_of(np.maximum(rows - rows % max(1, self.chunk_rows), self.rows.start))


@dataclass(frozen=True)
class FullOrder:
    """Full shuffle: a keyed permutation of all rows."""

    rows: range
    key: int

    def __call__(self, positions: Positions) -> NDArray[np.int64]:
        return blockwise(lambda part: permute(part, len(self.rows), self.key) + self.rows.start, positions)

    def positions_of(self, rows: NDArray[np.int64]) -> Positions:
        return blockwise(lambda part: unpermute(part - self.rows.start, len(self.rows), self.key), rows)

    def first_positions(self, rows: NDArray[np.int64]) -> Positions:
        return np.zeros_like(rows)


@dataclass(frozen=True)
class PieceOrder:
    """Fixed pieces: the rows cut into one contiguous piece a group of ranks, each piece in an order of its own.

    Each piece is the union of the shares of as many neighbouring ranks, so cutting the sequence among the same number
    of ranks gives a group the rows of its own piece in every epoch. Inside the piece the order is as in a plan for
    these ranks alone: with several, each gets other rows of the piece in each epoch, and windows end with a share. A
    group is a rank, or the ranks of a node. With rows 0..6, 2 ranks and 2 pieces, two epochs of full shuffle:

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
    num_pieces: int  # divides world_size
    _orders: dict[int, Order] = field(init=False, default_factory=dict)

    def __call__(self, positions: Positions) -> NDArray[np.int64]:
        return self._by_piece(
            positions, positions, lambda order, first, part: order(blockwise(lambda some: some - first, part))
        )

    def positions_of(self, rows: NDArray[np.int64]) -> Positions:
        return self._by_piece(rows - self.rows.start, rows, lambda order, first, part: order.positions_of(part) + first)

    def first_positions(self, rows: NDArray[np.int64]) -> Positions:
        return self._by_piece(
            rows - self.rows.start, rows, lambda order, first, part: order.first_positions(part) + first
        )

    def _by_piece(
        self, offsets: Positions, values: Positions, work: Callable[[Order, int, Positions], Positions]
    ) -> Positions:
        """Returns what the order of its piece makes of each value, given the order and the piece's first position.

        The offset of a value, in [0, N), says which piece that is: a piece has the same positions and rows.
        """
        if not values.size:
            return values.copy()

        def on(piece: int, part: Positions) -> Positions:
            return work(self._order(piece), self._positions(piece).start, part)

        of_piece = self.world_size // self.num_pieces
        ends = np.array([offsets.min(), offsets.max()])
        first, last = (share_ranks(ends, len(self.rows), self.world_size) // of_piece).tolist()
        if first == last:  # positions of one rank, as always when it plans its batches
            return on(first, values)
        result = np.empty(values.size, np.int64)
        numbers = share_ranks(offsets, len(self.rows), self.world_size) // of_piece
        for piece in set(numbers.tolist()):
            result[numbers == piece] = on(piece, values[numbers == piece])
        return result

    def _positions(self, piece: int) -> range:
        """Returns the positions of a piece."""
        of_piece = self.world_size // self.num_pieces
        first, last = (
            rank_share(len(self.rows), rank=rank, world_size=self.world_size)
            for rank in (piece * of_piece, (piece + 1) * of_piece - 1)
        )
        return range(first.start, last.stop)

    def _order(self, piece: int) -> Order:
        if piece not in self._orders:
            own = self._positions(piece)
            # A seed for each piece: pieces of one length would otherwise be permuted alike.
            self._orders[piece] = make_order(
                self.rows[own.start : own.stop],
                self.chunk_rows,
                self.shuffle,
                seed=derive_key(self.seed, _PIECES, piece),
                epoch=self.epoch,
                world_size=self.world_size // self.num_pieces,
            )
        return self._orders[piece]


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
        num_positions: of the epoch's sequence.
        batch_size, world_size: those that the epoch began with.
        seed, epoch: of the plan.
    """

    def __init__(
        self,
        order: Order,
        first_row: int,
        groups: NDArray[np.int64],
        num_positions: int,
        batch_size: int,
        *,
        seed: int,
        epoch: int,
        world_size: int,
    ) -> None:
        self._order, self._first_row, self._groups = order, first_row, groups
        self._num_positions, self._batch_size, self._world_size = num_positions, batch_size, world_size
        self._key = derive_key(seed, epoch, _GROUPS)
        self._last: tuple[int, NDArray[np.int64]] | None = None  # position at which a block begins, and its rows

    def __call__(self, positions: Positions) -> NDArray[np.int64]:
        """Returns rows of the file at positions of the epoch's sequence."""
        firsts, stops = self._blocks(positions)
        rows = np.empty(positions.size, np.int64)
        for first in np.unique(firsts).tolist():
            here = np.flatnonzero(firsts == first)
            rows[here] = self._block(first, int(stops[here[0]]))[positions[here] - first]
        return rows

    def positions_of(self, rows: NDArray[np.int64]) -> Positions:
        ungrouped = self._order.positions_of(rows)
        firsts, stops = self._blocks(ungrouped)
        positions = np.empty_like(rows)
        for first in np.unique(firsts).tolist():
            here = np.flatnonzero(firsts == first)
            block = self._block(first, int(stops[here[0]]))
            order = np.argsort(block)
            positions[here] = first + order[np.searchsorted(block, rows[here], sorter=order)]
        return positions

    def first_positions(self, rows: NDArray[np.int64]) -> Positions:
        return self._blocks(self._order.first_positions(rows))[0]

    def _blocks(self, positions: Positions) -> tuple[Positions, Positions]:
        """Returns first and stop position of the block that each position lies in."""
        share_first, share_stop = share_bounds(positions, self._num_positions, self._world_size)
        length = _GROUPED_BATCHES * self._batch_size
        firsts = positions - (positions - share_first) % length
        return firsts, np.minimum(firsts + length, share_stop)

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
