"""Cuts a sequence of positions among ranks, and cuts the rest again when their number changes within an epoch.

A sequence is cut into contiguous shares whose sizes differ by at most one; the longer ones come first. When a
segment (so many ranks, a batch size, so many steps) ends early, each rank leaves the tail of its share unread. The
tails, in rank order, are the next sequence. With 11 positions, 3 ranks, batches of 1 and 2 steps done:

    shares     0 1 2 3 | 4 5 6 7 | 8 9 10
    done       x x       x x       x x
    next           2 3       6 7        10      5 positions, cut among the new ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError, is_whole

Positions = NDArray[np.int64]


class Segment(NamedTuple):
    """A part of an epoch that was read with one number of ranks and one batch size."""

    world_size: int
    batch_size: int
    steps: int


def rank_share(num_rows: int, *, rank: int, world_size: int) -> range:
    """Returns the positions of the epoch's sequence that one rank reads, in reading order.

    The num_rows of the sequence are cut into world_size contiguous shares whose sizes differ by at most one, so ranks
    agree without talking. With 11 rows and 3 ranks: 0..3, 4..7, 8..10. With fewer rows than ranks the last are empty.

    Raises:
        OptionError: rank is outside [0, world_size).
    """
    if not 0 <= rank < world_size:
        raise OptionError(f"rank {rank} is outside 0..{world_size - 1}, the ranks of world size {world_size}")
    short, longer = divmod(num_rows, world_size)
    first = rank * short + min(rank, longer)
    return range(first, first + short + (rank < longer))


def share_ranks(positions: Positions, num_rows: int, world_size: int) -> Positions:
    """Returns the rank whose share each position in [0, num_rows) lies in, int64 (P,)."""
    short, longer = divmod(num_rows, world_size)
    border = longer * (short + 1)
    return np.where(positions < border, positions // (short + 1), longer + (positions - border) // max(short, 1))


def share_bounds(positions: Positions, num_rows: int, world_size: int) -> tuple[Positions, Positions]:
    """Returns first and stop position of the share that each position in [0, num_rows) lies in: two int64 (P,)."""
    if world_size == 1:
        return np.zeros_like(positions), np.full_like(positions, num_rows)
    short, longer = divmod(num_rows, world_size)
    rank = share_ranks(positions, num_rows, world_size)
    first = rank * short + np.minimum(rank, longer)
    return first, first + short + (rank < longer)


def checked_segments(segments: object) -> tuple[Segment, ...]:
    """Returns segments made from tuples or lists of three whole numbers; raises OptionError for anything else."""
    if not isinstance(segments, (tuple, list)):
        raise OptionError(f"segments={segments!r} must be a tuple of (world size, batch size, steps)")
    for segment in segments:
        numbers = isinstance(segment, (tuple, list)) and len(segment) == 3 and all(map(is_whole, segment))
        if not numbers or min(segment[:2]) < 1 or segment[2] < 0:
            raise OptionError(
                f"segment {segment!r} must be (world size, batch size, steps), whole numbers, the first two 1 or more"
            )
    return tuple(Segment(*map(int, segment)) for segment in segments)


def merged(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Returns segments without empty ones, neighbours of the same world and batch size joined."""
    result: list[Segment] = []
    for segment in segments:
        if segment.steps == 0:
            continue
        if result and result[-1][:2] == segment[:2]:
            segment = segment._replace(steps=result.pop().steps + segment.steps)
        result.append(segment)
    return tuple(result)


@dataclass(frozen=True)
class Tails:
    """The positions of a sequence that a finished segment left unread; they are the next sequence, in rank order."""

    num_rows: int  # positions of the sequence that the segment's ranks shared
    segment: Segment

    @property
    def _done(self) -> tuple[int, int]:
        """Positions read of a longer share and of a shorter one."""
        short = self.num_rows // self.segment.world_size
        consumed = self.segment.steps * self.segment.batch_size
        return min(short + 1, consumed), min(short, consumed)

    @property
    def num_left(self) -> int:
        """Positions that no rank has read."""
        longer = self.num_rows % self.segment.world_size
        done_longer, done_short = self._done
        return self.num_rows - longer * done_longer - (self.segment.world_size - longer) * done_short

    def origin(self, positions: Positions) -> Positions:
        """Returns where each position of the tails, in [0, num_left), lies in the sequence that was shared."""
        short, longer = divmod(self.num_rows, self.segment.world_size)
        done_longer, done_short = self._done
        tail_longer, tail_short = short + 1 - done_longer, short - done_short
        border = longer * tail_longer
        # A position moves behind what its own rank and each rank before it read.
        among_longer = (positions // max(tail_longer, 1) + 1) * done_longer
        among_short = longer * done_longer + ((positions - border) // max(tail_short, 1) + 1) * done_short
        return positions + np.where(positions < border, among_longer, among_short)
