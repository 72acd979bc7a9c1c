"""What samplers draw: the plan of each epoch, where an iteration stands, and rows announced before they are given.

plan -> blocks of rows -> announced to the kernel -> positions of the dataset, as Python's integers
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.dataset import PackedDataset
from fastload.errors import OptionError, StateError
from fastload.inputs import PackedInput
from fastload.plan import (
    ChunkWindow,
    Ends,
    EpochPlan,
    PlanState,
    Shuffle,
    check_state,
    rank_share,
    resolve_ends,
    state_from_dict,
    state_to_dict,
)
from fastload.read.readahead import announced_ahead, has_read_ahead

# Rows planned at a time; see `plan.epoch`.
_BLOCK_ROWS = 8192

# Announced beyond what was drawn: enough for a disk to work on, and not much of the memory. In pieces, so that
# announcing keeps pace with drawing. Of a window whole chunks are announced, at most its own and the next one's.
_AHEAD_BYTES = 64 * 2**20
_AHEAD_PIECES = 8
_MAX_AHEAD = 64


@dataclass
class Drawing:
    """One iteration of a sampler: what it follows, and how far it is.

    Attributes:
        plan: with what is done of its epoch.
        total: samples or batches that the iteration draws.
        skipped: batches left out at its beginning, done before.
        drawn: samples or batches drawn.
    """

    plan: EpochPlan
    total: int
    skipped: int = 0
    drawn: int = 0

    def done(self, given: int | None, name: str) -> int:
        """What the caller says was consumed, or what was drawn; a last batch may be counted as a whole one."""
        if given is None:
            return self.drawn
        check_whole(name, given, least=0)
        if given > self.drawn < self.total:
            raise OptionError(
                f"{name}={given}: only {self.drawn} were drawn since the iteration began; count from there, not from "
                f"the beginning of the epoch"
            )
        return min(int(given), self.total)


class Orders:
    """The epochs of a dataset as a sampler draws them: plans, saved states, announcements. Holds nothing open."""

    def __init__(
        self,
        dataset: PackedDataset,
        shuffle: Shuffle,
        seed: int,
        *,
        ends: Ends,
        world_size: int = 1,
        batch_size: int = 1,
    ) -> None:
        check_dataset(dataset)
        self._data = PackedInput(dataset)
        self._shuffle = self._data.resolve_shuffle(shuffle)
        self._seed = seed
        self._ends = ends
        self._world_size = world_size
        self._batch_size = batch_size
        self.plan(0)
        if isinstance(self._shuffle, ChunkWindow):
            dataset.expect_window(self._shuffle.chunks)

    def plan(self, epoch: int, segments: tuple[Any, ...] = ()) -> EpochPlan:
        """An epoch, or what finished segments leave of it."""
        return EpochPlan(
            rows=self._data.plan_rows,
            chunk_rows=self._data.chunk_rows,
            seed=self._seed,
            epoch=epoch,
            world_size=self._world_size,
            batch_size=self._batch_size,
            shuffle=self._shuffle,
            ends=self._ends,
            segments=segments,
        )

    def state(self, plan: EpochPlan, steps: int) -> dict[str, Any]:
        """The saved form of a plan of which so many steps are done."""
        return state_to_dict(
            PlanState(
                header_digest=self._identity,
                seed=self._seed,
                epoch=plan.epoch,
                shuffle=self._shuffle,
                ends=resolve_ends(plan.ends, self._shuffle),
                segments=plan.segments_after(steps),
            )
        )

    def loaded(self, state: object) -> EpochPlan:
        """What a state leaves of its epoch. Raises StateError for what is not a state, or one of other data."""
        if not isinstance(state, Mapping):
            raise StateError(f"load_state_dict() takes what state_dict() gave, a dict; got {type(state).__name__}.")
        loaded = state_from_dict(dict(state))
        check_state(loaded, header_digest=self._identity, seed=self._seed, shuffle=self._shuffle)
        return self.plan(loaded.epoch, loaded.segments)

    @functools.cached_property
    def _identity(self) -> str:
        return self._data.identity()

    def announced(
        self, plan: EpochPlan, blocks: Iterator[NDArray[np.int64]], piece_rows: int | None = None
    ) -> Iterator[list[int]]:
        """Rows of the plan as positions of the dataset, announced to the kernel some time before they are given.

        Args:
            blocks: int64 (P,) each.
            piece_rows: rows that blocks have at most; None cuts blocks to the pieces that are announced.
        """
        file, rows = self._data.dataset.file, self._data.plan_rows
        fields = [file.fields[name] for name, _, _ in self._data.dataset.layout()]
        row_bytes = sum(field.row_bytes for field in fields if field.offset is not None)
        # In file order the kernel's own read-ahead is better; see `FastLoader`.
        if not row_bytes or self._shuffle is False or not has_read_ahead():
            for block in blocks:
                yield (block - rows.start).tolist()
            return
        if piece_rows is None:
            piece_rows = max(1, min(_BLOCK_ROWS, _AHEAD_BYTES // _AHEAD_PIECES // row_bytes))
            blocks = _cut(blocks, piece_rows)
        selected = None if isinstance(self._data.dataset.rows, range) else self._data.dataset.rows
        window, chunk_rows = 0, 0
        if isinstance(self._shuffle, ChunkWindow):
            # Each worker of a ChunkBatchSampler is in a window of its own.
            window, chunk_rows = self._shuffle.chunks * plan.world_size, self._data.chunk_rows
        # All windows that are read at a time, twice: rows announced now may lie in the next ones.
        read_ahead = self._data.dataset.read_ahead(chunk_rows=chunk_rows, recent_chunks=max(64, 2 * window))
        try:
            depth = min(_MAX_AHEAD, _AHEAD_BYTES // (piece_rows * row_bytes))
            announce = read_ahead.announce

            def announce_rows(block: NDArray[np.int64]) -> None:
                announce(block if selected is None else selected[block])

            for block in announced_ahead(blocks, announce_rows, depth):
                yield (block - rows.start).tolist()
        finally:
            read_ahead.close()


class Epochs:
    """Which epoch a sampler is in, where each iteration is the next one unless something else was asked for.

    Args:
        orders: the plans.
        size: how many samples or batches a sampler draws from a plan.
    """

    def __init__(self, orders: Orders, size: Callable[[EpochPlan], int]) -> None:
        self._orders = orders
        self._size = size
        # The next iteration, when it is already decided; None: the epoch after the last one's, from its beginning.
        self._next: Drawing | None = self._whole(0)
        self._last = self._next
        self._finished: Drawing | None = None

    @property
    def standing(self) -> Drawing:
        """The coming iteration if it is decided, else the running or last one."""
        return self._next or self._last

    def __len__(self) -> int:
        if self._next is not None:
            return self._next.total
        running = self._last.drawn < self._last.total
        return self._last.total if running else self._whole(0).total

    def begin(self) -> Drawing:
        """The next iteration, which is then the last one."""
        begun = self._next or self._whole(self._last.plan.epoch + 1)
        self._next, self._last, self._finished = None, begun, None
        return begun

    def set_epoch(self, epoch: int) -> None:
        check_whole("epoch", epoch, least=0)
        for loaded in (self._next, self._finished):
            if loaded is None or loaded.plan.epoch != epoch:
                continue
            if loaded is self._finished or loaded.plan.segments or loaded.skipped:
                self._next = loaded
                return
        self._next = self._whole(epoch)

    def load(self, plan: EpochPlan, skipped: int = 0) -> None:
        loaded = Drawing(plan, self._size(plan) - skipped, skipped)
        self._last, self._next, self._finished = loaded, loaded, None
        if loaded.total == 0:
            self._finished, self._next = loaded, self._whole(plan.epoch + 1)

    def _whole(self, epoch: int) -> Drawing:
        plan = self._orders.plan(epoch)
        return Drawing(plan, self._size(plan))


def samples(orders: Orders, begun: Drawing, *, rank: int) -> Iterator[int]:
    """Positions of one rank's samples, counted as they are drawn."""
    plan, total = begun.plan, begun.total
    blocks = (
        plan.rows_at(rank, np.arange(first, min(first + _BLOCK_ROWS, total))) for first in range(0, total, _BLOCK_ROWS)
    )
    for piece in orders.announced(plan, blocks):
        for position in piece:
            begun.drawn += 1
            yield position


def _cut(blocks: Iterator[NDArray[np.int64]], piece_rows: int) -> Iterator[NDArray[np.int64]]:
    for block in blocks:
        for first in range(0, len(block), piece_rows):
            yield block[first : first + piece_rows]


def num_steps(plan: EpochPlan) -> int:
    """Samples of one rank, where a batch is one sample."""
    return plan.num_steps


def num_batches(plan: EpochPlan, *, turns: int) -> int:
    """Batches of one rank, whose share is cut into `turns`. Each rank has as many, and none is empty."""
    batches = turns * plan.num_steps
    if not batches or plan.ends == "drop" or plan.world_size != turns:
        return batches
    # Alone, shares without a row of the last step end before it; they are the last ones.
    first = (plan.steps_done + plan.num_steps - 1) * plan.batch_size
    shares = [len(rank_share(len(plan.rows), rank=turn, world_size=turns)) for turn in range(turns)]
    return batches - sum(share <= first for share in shares)


def check_dataset(dataset: object) -> None:
    if not isinstance(dataset, PackedDataset):
        mend = (
            "For a subset of a PackedDataset use its select(rows)"
            if isinstance(getattr(dataset, "dataset", None), PackedDataset)
            else "Make one of the packed file, PackedDataset(path), or use torch's own samplers for other datasets"
        )
        raise OptionError(
            f"dataset: chunk samplers draw from a PackedDataset, not from a {type(dataset).__name__}. {mend}."
        )


def check_rank(rank: int, num_replicas: int) -> None:
    check_whole("num_replicas", num_replicas, least=1)
    check_whole("rank", rank, least=0)
    if rank >= num_replicas:
        raise OptionError(f"rank={rank!r} is outside 0..{num_replicas - 1}, the ranks of num_replicas={num_replicas!r}")


def check_whole(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise OptionError(f"{name}={value!r}: give a whole number, {least} or more")
