"""Plans which rows each batch of an epoch holds, on every rank: a pure function of its options, in O(1) memory.

    rows --order--> sequence --segments done--> what is left --shares--> one rank's share --cut--> batches

Nothing here depends on workers, threads, prefetch or free memory, and every rank can compute every other's batches,
so ranks agree without communication on the number of steps, on who reads which rows and on how many rows count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError, StateError, is_whole
from fastload.plan.order import (
    ChunkWindow,
    Drawing,
    Ends,
    Order,
    ResolvedShuffle,
    Shuffle,
    is_drawing,
    make_order,
    resolve_ends,
    resolve_shuffle,
)
from fastload.plan.permutation import MAX_POSITIONS, blockwise, derive_key
from fastload.plan.shares import (
    Positions,
    Segment,
    Tails,
    checked_segments,
    merged,
    rank_share,
    share_bounds,
    share_ranks,
)
from fastload.plan.weighted import ClassBatches

# Rows planned at a time: the batches cut from one block share the cost of Python. 0.1 MB. The first blocks of an epoch
# are smaller, so that its first batch is there sooner, and little is planned in vain where a loop leaves it.
_BLOCK_ROWS = 8192
_FIRST_ROWS = 512

# Number of this use of keys; `order` has the others.
_USER_CODE = 4


_BOUNDS = {
    "chunk_rows": (0, MAX_POSITIONS),
    "seed": (0, 2**64 - 1),
    "epoch": (0, 2**64 - 1),
    "world_size": (1, 2**31),
    "fixed_pieces": (0, 2**31),
    "batch_size": (1, 2**31),
}


class PlannedBatch(NamedTuple):
    """The rows of one batch on one rank.

    Attributes:
        rows: int64, (B,), rows of the file, in the order of the batch. B is the batch size; with ends "exact" the last
            batch of an epoch has the remaining rows, at least one.
        valid: bool, (B,), False for a repeat that is only there to fill the batch, and must not count.
        global_valid: rows that count in this step, over all ranks.
        step: number of the step within the epoch, from 0, finished segments included.
        damaged: valid rows that were planned, and replaced because they are damaged; see `without`.
        times: int64, (B,), a number for each of the times that a row comes in an epoch, 0 for the first (or, where rows
            are drawn, the position in the epoch), so that random transforms draw anew; None: each comes once.
        spare: int64, (S,), other rows that may replace damaged ones of a short batch; None: none.
    """

    rows: NDArray[np.int64]
    valid: NDArray[np.bool_]
    global_valid: int
    step: int
    damaged: tuple[int, ...] = ()
    times: NDArray[np.int64] | None = None
    spare: NDArray[np.int64] | None = None

    def part(self, some: slice) -> PlannedBatch:
        """Returns the plan of some of the samples."""
        times = None if self.times is None else self.times[some]
        return self._replace(rows=self.rows[some], valid=self.valid[some], times=times)

    def selected(self, rows: NDArray[np.int64], mentions: NDArray[np.int64] | None) -> PlannedBatch:
        """Returns the batch of a selection, given the row of the file that each planned position stands for.

        `mentions`: how many times each position's row was selected before; None: each row is selected once.
        """
        times = self.times
        if mentions is not None:
            again = 0 if times is None else times * len(rows)
            times = mentions[self.rows] + again
        spare = None if self.spare is None else rows[self.spare]
        return self._replace(rows=rows[self.rows], times=times, spare=spare)

    def without(self, damaged: Collection[int], *, world_size: int) -> PlannedBatch | None:
        """Returns the batch with rows replaced by others, which are then not valid; None if none is left.

        In the place of a damaged row comes the next one of the batch that is not, behind the last one the first; if all
        are damaged, a spare one. Other ranks do not know of it, so with several global_valid stays what was planned,
        the same on all of them.
        """
        bad = np.isin(self.rows, list(damaged))
        if not bad.any():
            return self
        rows, spare, places = self.rows, self.spare, np.arange(len(bad))
        if spare is not None:
            spare = spare[~np.isin(spare, list(damaged))]
        if not bad.all():
            good = np.flatnonzero(~bad)
            places[bad] = good[np.searchsorted(good, places[bad]) % len(good)]
        elif spare is not None and len(spare):
            rows = np.full(len(bad), spare[0])  # the same, whether damaged ones are found one by one or at once
        else:
            return None
        lost = int(np.count_nonzero(bad & self.valid)) if world_size == 1 else 0
        replaced = dict.fromkeys([*self.damaged, *self.rows[bad & self.valid].tolist()])
        return PlannedBatch(
            rows[places],
            self.valid & ~bad,
            self.global_valid - lost,
            self.step,
            tuple(replaced),
            None if self.times is None else self.times[places],
            spare,
        )


@dataclass(frozen=True)
class EpochPlan:
    """The batches of one epoch for all ranks.

    Rows are put in order (`shuffle`), cut into one contiguous share a rank (sizes differ by at most one), and each
    share into batches. With chunk windows at most world_size - 1 chunks are read by two ranks. The order depends
    on the world size; which rows are covered does not.

    Ends: "drop" leaves out rows that do not fill a batch on every rank; "exact" has each row once, and a last batch of
    what is left of the share, so that ranks may have one row more or less in it, and one that has none left repeats a
    row, with `valid` False: all take as many steps. "pad" fills the last batch with repeats, which have `valid` False.
    Repeats are taken from the start of the share. If that is empty, rank r's repeats begin at row r of what is left of
    the epoch, counted round: 103 rows over 110 ranks are each there once or twice.

    Segments: finished parts of this epoch, one for each change of world or batch size; see `shares`. The rows that each
    rank has not read, in rank order, are cut again among the ranks of this plan. A last segment with this plan's own
    world and batch size is continued as if it had never been interrupted.

    >>> plan = EpochPlan(range(10), world_size=2, batch_size=2)
    >>> [batch.rows.tolist() for batch in plan.batches(rank=1)]
    [[5, 6], [7, 8], [9]]
    >>> padded = replace(plan, ends="pad").batch(1, 2)
    >>> padded.rows.tolist(), padded.valid.tolist(), padded.global_valid
    ([9, 5], [True, False], 2)

    Fixed pieces: the rows are cut into contiguous pieces, the same in every epoch, each for as many neighbouring ranks,
    and each epoch's order permutes within the pieces. A piece a rank is for ranks that cache their rows in memory where
    not all fit, a piece a node for nodes that read the same chunks in every epoch. Where the world size changes within
    an epoch, the rest of its order is cut among the new ranks as it is: some rows then come from other pieces, until
    the next epoch.

    Elastic: a step takes the next world_size * batch_size rows of one sequence that does not depend on the ranks, and
    each rank a part of them. So any number of ranks gives the same steps where this product is the same, and goes on
    with the very next row where others stopped. Each rank then reads some rows of every chunk.

    Attributes:
        rows: rows of the file to plan, contiguous: a split, or all. At most 2**48.
        chunk_rows: rows of a chunk of the file; 0: the file has no chunks, so "chunk" is an error.
        seed: 0 to 2**64 - 1; the same seed and epoch give the same order on every machine.
        epoch: 0 to 2**64 - 1.
        world_size: number of ranks, 1 or more.
        batch_size: rows of a batch on each rank, 1 or more.
        shuffle: "full", "chunk", ChunkWindow(w), Weighted(weights), ClassBatches(classes, samples, labels) or False.
            The attribute is resolved: ChunkWindow(16) for "chunk". True depends on the file: call `resolve_shuffle`
            first.
        ends: "drop", "pad", "exact", or None for "drop" when shuffling, else "exact". The attribute is never None.
        segments: (world_size, batch_size, steps) of the finished parts, first to last. The attribute is merged.
        fixed_pieces: number of pieces, each of the same rows in every epoch; 0: none. It divides the world size. Then
            every rank needs a row, unless ends is "drop".
        elastic: whether ranks share each step, and not the epoch; without fixed pieces.
        begun_pieces: `fixed_pieces` of the plan that began the epoch, as segments are of it; None: this plan's.
        groups: int64 (N,), a number for each of the rows: batches hold rows whose numbers are close; see
            `GroupedOrder`. None: any rows. Only where rows are shuffled.

    Raises:
        OptionError: an argument is invalid.
        StateError: the segments hold more steps than the epoch, or cannot have begun it with these pieces.
    """

    rows: range
    _: KW_ONLY
    chunk_rows: int = 0
    seed: int = 0
    epoch: int = 0
    world_size: int = 1
    batch_size: int = 1
    shuffle: Shuffle = False
    ends: Ends | None = None
    segments: tuple[Segment, ...] = ()
    fixed_pieces: int = 0
    begun_pieces: int | None = None
    elastic: bool = False
    groups: NDArray[np.int64] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        rows: object = self.rows
        if not isinstance(rows, range) or rows.step != 1 or rows.start < 0:
            raise OptionError(f"rows={rows!r}: a plan takes a range of rows with step 1, such as range(0, 1000)")
        if rows.stop > MAX_POSITIONS:
            raise OptionError(f"rows={rows!r}: fastload plans at most 2**48 rows")
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if not is_whole(value) or not least <= value <= most:
                raise OptionError(f"{name}={value!r} must be a whole number from {least} to {most}")
            object.__setattr__(self, name, int(value))  # NumPy's integers would overflow where Python's do not
        if self.shuffle is True or self.shuffle == "auto":
            raise OptionError(
                f"shuffle={self.shuffle!r} depends on whether the file was shuffled when packed: "
                "call resolve_shuffle(shuffle, file_shuffled) first"
            )
        shuffle = resolve_shuffle(self.shuffle, file_shuffled=False)
        if isinstance(shuffle, ChunkWindow) and self.chunk_rows == 0:
            raise OptionError('shuffle="chunk" needs a file with chunks, this one has none; use shuffle="full"')
        if self.groups is not None and (shuffle is False or len(self.groups) != len(self.rows)):
            raise OptionError("groups: give a number for each of the rows, which are shuffled")
        object.__setattr__(self, "shuffle", shuffle)
        object.__setattr__(self, "ends", resolve_ends(self.ends, shuffle))
        object.__setattr__(self, "segments", merged(checked_segments(self.segments)))
        if is_drawing(shuffle):
            self._check_drawing(shuffle)
        left = self._num_units
        if self.elastic:
            self._check_elastic()
        if self.fixed_pieces and self.world_size % self.fixed_pieces:
            raise OptionError(
                f"fixed_pieces={self.fixed_pieces}: {self.world_size} ranks do not make as many groups of one size"
            )
        if self.fixed_pieces and self.ends != "drop" and left < self.world_size:
            raise OptionError(
                f"fixed pieces: {left} rows do not give each of {self.world_size} ranks a row of its own to repeat "
                f"(ends={self.ends!r}). Use fewer ranks, or ends='drop'."
            )
        if not self.segments:
            object.__setattr__(self, "begun_pieces", None)
        elif self.epoch_pieces and self.segments[0].world_size % self.epoch_pieces:
            raise StateError(
                f"an epoch of {self.epoch_pieces} fixed pieces was not begun by {self.segments[0].world_size} ranks: "
                f"they do not make as many groups of one size. The state is damaged, or of other nodes than it says."
            )
        for whole in () if self.elastic else self.segments:
            segment = self._in_units(whole)
            # For any ends of the segment: "drop" has no more steps than the others.
            most = -(-left // segment.world_size)
            if (segment.steps - 1) * segment.batch_size >= most:
                raise StateError(
                    f"segment {tuple(whole)} (world size, batch size, steps) does not fit this epoch: at most "
                    f"{most * self.unit} rows a rank were left of {self.num_positions}. The state is of "
                    f"another split or selection."
                )
            left = Tails(left, segment).num_left

    def _check_elastic(self) -> None:
        if self.fixed_pieces or self.begun_pieces:
            raise OptionError("elastic shares take the next rows whatever ranks there are, and fixed pieces do not")
        before = replace(self, segments=self.segments[:-1])._elastic_done if self.segments else 0
        taken = [segment.world_size * segment.batch_size * (segment.steps - 1) for segment in self.segments[-1:]]
        if any(before + rows >= self.num_positions for rows in taken):
            raise StateError(
                f"segments {list(map(tuple, self.segments))} (world size, batch size, steps) do not fit this epoch of "
                f"{self.num_positions} rows. The state is of another split or selection."
            )

    @property
    def _elastic_done(self) -> int:
        """Positions of the sequence that elastic segments have taken."""
        done = sum(segment.world_size * segment.batch_size * segment.steps for segment in self.segments)
        return min(done, self.num_positions)

    def _check_drawing(self, shuffle: Drawing) -> None:
        """Raises OptionError where a shuffle that draws rows does not fit the rest of the plan."""
        if isinstance(shuffle.field, str):
            raise OptionError(
                f"shuffle={shuffle!r} names a field of a dataset, which FastLoader and samplers read. Give a plan the "
                f"numbers themselves."
            )
        shuffle.check(len(self.rows))
        if self.fixed_pieces:
            raise OptionError(
                f"shuffle={shuffle!r} draws from all rows, and fixed pieces give each rank or node some of them. Leave "
                f"one of them out."
            )
        if shuffle.unit > 1 and self.groups is not None:
            raise OptionError(
                f"shuffle={shuffle!r} says what each batch holds, and so do groups (group_by). Leave one."
            )
        if isinstance(shuffle, ClassBatches) and self.batch_size != shuffle.unit:
            raise OptionError(
                f"batch_size={self.batch_size}: with {shuffle!r} a batch has classes * samples = {shuffle.unit} "
                f"samples. Say batch_size={shuffle.unit}."
            )
        for segment in self.segments:
            if shuffle.unit > 1 and segment.batch_size != shuffle.unit:
                raise StateError(f"segment {tuple(segment)}: {shuffle!r} has batches of {shuffle.unit}, and no others")

    @cached_property
    def num_positions(self) -> int:
        """The samples of the epoch's sequence, of all ranks; as many as rows unless the shuffle draws others."""
        shuffle = self.resolved_shuffle
        return shuffle.num_positions(len(self.rows)) if is_drawing(shuffle) else len(self.rows)

    @property
    def unit(self) -> int:
        """The number of neighbouring positions that one rank reads in one batch; shares are cut between such units."""
        shuffle = self.resolved_shuffle
        return shuffle.unit if is_drawing(shuffle) else 1

    @property
    def _num_units(self) -> int:
        return self.num_positions // self.unit

    def _in_units(self, segment: Segment) -> Segment:
        return segment._replace(batch_size=segment.batch_size // self.unit)

    @property
    def resolved_shuffle(self) -> ResolvedShuffle:
        """The attribute `shuffle`."""
        return resolve_shuffle(self.shuffle, file_shuffled=False)

    @property
    def epoch_pieces(self) -> int:
        """The number of fixed pieces of this epoch's order; the following epochs have `fixed_pieces`."""
        return self.fixed_pieces if self.begun_pieces is None else self.begun_pieces

    @cached_property
    def num_steps(self) -> int:
        """Steps to come in this epoch, the same on every rank; 0 if "drop" leaves no whole batch."""
        if self.elastic:
            left, taken = self.num_positions - self._elastic_done, self.world_size * self.batch_size
            return left // taken if self.ends == "drop" else -(-left // taken)
        fewest, more = divmod(self._num_left, self.world_size)
        batch = self.batch_size // self.unit
        steps = fewest // batch if self.ends == "drop" else -(-(fewest + (more > 0)) // batch)
        return max(0, steps - self._skipped_steps)

    @property
    def steps_done(self) -> int:
        """Steps of the finished segments; the number of the first step to come."""
        return sum(segment.steps for segment in self.segments)

    def batches(self, rank: int, start_step: int = 0, stop_step: int | None = None) -> Iterator[PlannedBatch]:
        """Returns an iterator over the batches of one rank; their arrays are new and belong to the caller.

        Args:
            rank: in [0, world_size).
            start_step: steps to skip of the num_steps to come.
            stop_step: steps to come before it ends, those skipped included; no more are planned. None: all.

        Raises:
            OptionError: rank or start_step is out of range (raised at once, not at the first batch).
        """
        self._check_rank_and_step(rank, start_step, last_step=self.num_steps)
        return self._iterate(rank, start_step, self.num_steps if stop_step is None else min(stop_step, self.num_steps))

    def batch(self, rank: int, step: int) -> PlannedBatch:
        """Returns the batch that `batches(rank)` yields as number `step`, computed alone.

        Args:
            rank: in [0, world_size).
            step: in [0, num_steps).

        Raises:
            OptionError: rank or step is out of range.
        """
        self._check_rank_and_step(rank, step, last_step=self.num_steps - 1)
        return next(self._iterate(rank, step, step + 1))

    def rows_at(self, rank: int, positions: Positions) -> NDArray[np.int64]:
        """Returns rows of the file at positions of the rest that one rank has to read: int64, (P,), a new array.

        Args:
            rank: in [0, world_size).
            positions: int64, (P,), at least 0, in any order. Position p is row p % batch_size of the batch
                p // batch_size; past the end of the share they begin again at its start.

        Raises:
            OptionError: rank or a position is out of range, or there is no row left to repeat.
        """
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and positions.min() < 0:
            raise OptionError(f"position {positions.min()} is negative: positions count from 0, the next row to come")
        return self._planned(rank, positions)

    @cached_property
    def following(self) -> EpochPlan | None:
        """The plan of the whole next epoch, one object, which works its order out once; None after the last number."""
        is_last = self.epoch == _BOUNDS["epoch"][1]
        return None if is_last else replace(self, epoch=self.epoch + 1, segments=(), begun_pieces=None)

    def places_of(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns for each planned row the rank that reads it in this epoch, and in which step: two int64 (P,).

        As if this plan's ranks had begun the epoch. A row that "drop" leaves out has a step that does not come.
        """
        return self._places(self._order.positions_of(rows))

    def chunk_places(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns for each chunk the rank that reads it in this epoch, and the step at which it may first be read.

        The step is where the chunk's window begins, or its first row if rows are not shuffled. A chunk of which two
        ranks read a part counts for the rank whose part comes first in the sequence. Where segments of other
        ranks or batch sizes began the epoch, places are those in its whole sequence, had this plan's ranks shared it:
        near the places where the rest is read, and no more. Takes no memory for other chunks than these.

        Args:
            rows: int64 (P,): for each chunk any row of the file in it.

        Returns:
            Two int64 (P,). Ranks in [0, world_size), -1 for any of them and any step (step 0), with shuffle "full",
            those that draw rows and elastic shares, -2 for rows that are not planned (step 0). Steps of the epoch, as
            `PlannedBatch.step`.
        """
        rows = np.asarray(rows, dtype=np.int64)
        ranks, steps = np.full(rows.shape, -2, np.int64), np.zeros(rows.shape, np.int64)
        planned = np.flatnonzero((rows >= self.rows.start) & (rows < self.rows.stop))
        if self.shuffle == "full" or self.elastic or is_drawing(self.resolved_shuffle):
            ranks[planned] = -1
        elif planned.size:
            ranks[planned], steps[planned] = self._places(self._order.first_positions(rows[planned]))
        return ranks, steps

    def _places(self, positions: Positions) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns rank and step of positions of the sequence, were it shared by this plan's ranks."""
        if self.elastic:
            steps, within = np.divmod(positions, self.world_size * self.batch_size)
            return within // self.batch_size, steps
        firsts, _ = share_bounds(positions, self.num_positions, self.world_size)
        return share_ranks(positions, self.num_positions, self.world_size), (positions - firsts) // self.batch_size

    def segments_after(self, steps: int) -> tuple[Segment, ...]:
        """Returns the segments of a state saved after `steps` of this plan's steps, merged.

        A plan made with them, of any world and batch size, holds exactly the rows that are unread then.
        """
        return merged((*self.segments, Segment(self.world_size, self.batch_size, steps)))

    def _share(self, rank: int) -> range:
        """Returns one rank's positions in the sequence of the remaining rows, including rows that it has read."""
        units = rank_share(self._num_left, rank=rank, world_size=self.world_size)
        return range(units.start * self.unit, units.stop * self.unit)

    def _planned(self, rank: int, positions: Positions) -> NDArray[np.int64]:
        return self._order(self._in_sequence(rank, positions))

    def _in_sequence(self, rank: int, positions: Positions) -> Positions:
        """Returns positions of the rest that one rank has to read as positions of the epoch's whole sequence."""
        if self.elastic:
            steps, within = np.divmod(positions, self.batch_size)
            taken = (steps * self.world_size + rank) * self.batch_size + within
            return self._elastic_done + taken % max(1, self.num_positions - self._elastic_done)
        share, begin = self._share(rank), self._skipped_steps * self.batch_size
        if not self._num_left:
            raise OptionError("no row of this epoch is left to be planned")
        if not share:  # or all ranks without one would repeat the same row
            share, begin = range(self._num_left * self.unit), begin + rank % self._num_left * self.unit

        def sequence_positions(part: Positions) -> Positions:
            part = part + begin
            if part.size and part.max() >= len(share):
                part %= len(share)
            part += share.start
            if self._tails and self.unit > 1:
                units, within = np.divmod(part, self.unit)
                for tails in reversed(self._tails):
                    units = tails.origin(units)
                return units * self.unit + within
            for tails in reversed(self._tails):
                part = tails.origin(part)
            return part

        return blockwise(sequence_positions, positions)

    def _elastic_batches(self, rank: int, start_step: int, stop_step: int) -> Iterator[PlannedBatch]:
        """Yields batches of elastic shares: the rank's part of each step, in the last step of the remaining rows."""
        batch_size, taken, done = self.batch_size, self.world_size * self.batch_size, self._elastic_done
        drawn = is_drawing(self.resolved_shuffle) and self.resolved_shuffle.repeats
        left, step = self.num_positions - done, start_step
        while step < stop_step:
            whole = min(step + max(1, _FIRST_ROWS // batch_size), stop_step, left // taken)
            if step < whole:
                positions = self._in_sequence(rank, np.arange(step * batch_size, whole * batch_size))
                parts = list(zip(range(step, whole), positions.reshape(-1, batch_size), strict=True))
                step = whole
            else:
                units = rank_share((left - step * taken) // self.unit, rank=rank, world_size=self.world_size)
                parts = [(step, done + step * taken + np.arange(units.start * self.unit, units.stop * self.unit))]
                step = stop_step
            rows = self._order(np.concatenate([part for _, part in parts]))
            for number, (at, own) in enumerate(parts):
                some, times = rows[number * batch_size : number * batch_size + len(own)], own if drawn else None
                repeats = batch_size - len(own) if self.ends == "pad" else int(not len(own))
                if repeats:
                    again = done + (np.arange(repeats) + (0 if len(own) else rank * self.unit)) % left
                    some = np.concatenate([some, self._order(again)])
                    of_repeats = again + self.num_positions if drawn else 1 + np.arange(repeats)
                    times = np.concatenate([own if drawn else np.zeros(len(own), np.int64), of_repeats])
                yield PlannedBatch(
                    some,
                    np.arange(len(some)) < len(own),
                    min(taken, left - at * taken),
                    self.steps_done + at,
                    times=times,
                    spare=self._order(done + np.arange(min(batch_size, left))) if len(some) < batch_size else None,
                )

    def _iterate(self, rank: int, start_step: int, stop_step: int) -> Iterator[PlannedBatch]:
        if self.elastic:
            yield from self._elastic_batches(rank, start_step, stop_step)
            return
        batch_size, steps_done = self.batch_size, self.steps_done
        share = self._share(rank)
        others = min(batch_size, len(share) or self._num_left * self.unit)  # further ones would come again
        drawn = is_drawing(self.resolved_shuffle) and self.resolved_shuffle.repeats
        block_step, block_rows = start_step, _FIRST_ROWS
        while block_step < stop_step:
            block_stop = min(block_step + max(1, block_rows // batch_size), stop_step)
            own = len(share) - (self._skipped_steps + block_step) * batch_size  # rows of the rank from here on
            count = (block_stop - block_step) * batch_size
            if self.ends == "exact":  # a batch of one row where it has none left
                count = min(count, max(own, count - batch_size + 1))
            positions = self._in_sequence(rank, block_step * batch_size + np.arange(count))
            rows = self._order(positions)
            valid = np.ones(rows.size, dtype=np.bool_)
            times = None
            if self.ends != "drop" and own < count:
                valid[max(0, own) :] = False
                own_positions = np.arange(len(share) - own, len(share) - own + count)
                if share:
                    times = np.maximum(~valid, own_positions // len(share))
                else:
                    times = rank // self._num_left + own_positions // (self._num_left * self.unit)
            if drawn:
                times = positions if times is None else positions + times * self.num_positions
            for step in range(block_step, block_stop):
                part = slice((step - block_step) * batch_size, (step - block_step + 1) * batch_size)
                yield PlannedBatch(
                    rows[part],
                    valid[part],
                    self._global_valid(step),
                    steps_done + step,
                    times=None if times is None or (not drawn and valid[part].all()) else times[part],
                    spare=self._planned(rank, np.arange(others)) if len(rows[part]) < batch_size else None,
                )
            block_step, block_rows = block_stop, min(2 * block_rows, _BLOCK_ROWS)

    def _global_valid(self, step: int) -> int:
        if self.ends == "drop":
            return self.world_size * self.batch_size
        size, longer = divmod(self._num_left, self.world_size)
        batch = self.batch_size // self.unit
        first = (self._skipped_steps + step) * batch
        in_longer = min(max(size + 1 - first, 0), batch)
        in_short = min(max(size - first, 0), batch)
        return (longer * in_longer + (self.world_size - longer) * in_short) * self.unit

    def _check_rank_and_step(self, rank: int, step: int, *, last_step: int) -> None:
        if not 0 <= rank < self.world_size:
            raise OptionError(f"rank {rank} is outside 0..{self.world_size - 1}")
        if not 0 <= step <= last_step:
            raise OptionError(f"step {step} is outside 0..{last_step}: {self.num_steps} steps of this epoch are left")

    @cached_property
    def _skipped_steps(self) -> int:
        """Steps of the last segment if this plan continues it: same world and batch size, so the same shares."""
        last = self.segments[-1] if self.segments else None
        return last.steps if last and last[:2] == (self.world_size, self.batch_size) else 0

    @cached_property
    def _tails(self) -> tuple[Tails, ...]:
        """The sequences that segments left unread, each cut from the one before."""
        finished = self.segments[:-1] if self._skipped_steps else self.segments
        tails: list[Tails] = []
        for segment in finished:
            tails.append(Tails(tails[-1].num_left if tails else self._num_units, self._in_units(segment)))
        return tuple(tails)

    @cached_property
    def _num_left(self) -> int:
        """Units of the sequence that this plan's ranks share, those they have already read included."""
        return self._tails[-1].num_left if self._tails else self._num_units

    @cached_property
    def _order(self) -> Order:
        # The ranks and batches that began the epoch decide windows and groups; later ones take over their order.
        world_size, batch_size = self.segments[0][:2] if self.segments else (self.world_size, self.batch_size)
        if self.elastic:
            world_size, batch_size = 1, world_size * batch_size
        return make_order(
            self.rows,
            self.chunk_rows,
            self.resolved_shuffle,
            seed=self.seed,
            epoch=self.epoch,
            world_size=world_size,
            fixed_pieces=self.epoch_pieces,
            groups=self.groups,
            batch_size=batch_size,
        )


def batch_seed(seed: int, epoch: int, rank: int, step: int) -> int:
    """Returns the seed of one batch for user code in Python: 64 bits, the same in any worker."""
    return derive_key(seed, epoch, _USER_CODE, rank, step)
