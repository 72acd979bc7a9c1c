"""Draws a plan's rows for samplers: as positions of the dataset, announced to the kernel in advance.

plan -> blocks of rows -> announced to the kernel -> positions of the dataset, as Python's integers
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fastload.dataset import PackedDataset
from fastload.errors import OptionError
from fastload.plan import ChunkWindow, Ends, EpochPlan, Shuffle
from fastload.plan.cursor import EpochCursor, Position, drawn
from fastload.prefetch.inputs import PackedInput
from fastload.read.readahead import announced_ahead, has_read_ahead

# Rows planned at a time; see `plan.epoch`.
_BLOCK_ROWS = 8192

# Bytes of rows announced beyond what was drawn: enough for a disk to work on, and little of the memory. In pieces, so
# that announcing keeps pace with drawing. Of a window whole chunks are announced, at most its own and the next one's.
_AHEAD_BYTES = 64 * 2**20
_AHEAD_PIECES = 8
_MAX_AHEAD = 64


class SamplerFeed:
    """Yields the positions that a sampler draws. Holds nothing open.

    Args:
        dataset: the dataset whose positions are drawn.
        shuffle: as in `FastLoader`.
    """

    def __init__(self, dataset: PackedDataset, shuffle: Shuffle) -> None:
        check_dataset(dataset)
        self._data = PackedInput(dataset)
        self._shuffle = self._data.resolve_shuffle(shuffle)

    def cursor(
        self, seed: int, *, ends: Ends, world_size: int = 1, batch_size: int = 1, workers: int = 1
    ) -> EpochCursor:
        """Returns the cursor of a sampler, at the beginning of the first epoch.

        Args:
            seed, ends, world_size, batch_size: as in `EpochPlan`.
            workers: as in `Position`.
        """
        plan = EpochPlan(
            rows=self._data.plan_rows,
            chunk_rows=self._data.chunk_rows,
            seed=seed,
            world_size=world_size,
            batch_size=batch_size,
            shuffle=self._shuffle,
            ends=ends,
        )
        if isinstance(self._shuffle, ChunkWindow):
            self._data.dataset.expect_window(self._shuffle.chunks)
        return EpochCursor(plan, self._data.identity, functools.partial(drawn, workers=workers))

    def announced(
        self, plan: EpochPlan, blocks: Iterator[NDArray[np.int64]], piece_rows: int | None = None
    ) -> Iterator[list[int]]:
        """Yields blocks of planned rows as positions of the dataset; announces them to the kernel some time before.

        Args:
            plan: plan of the epoch.
            blocks: rows of the plan, int64 (P,) each.
            piece_rows: most rows of a block; None cuts blocks into pieces of the size to be announced at once.
        """
        file, rows = self._data.dataset.file, self._data.plan_rows
        fields = [file.fields[name] for name, _, _ in self._data.dataset.layout()]
        row_bytes = sum(field.row_bytes for field in fields if field.offset is not None)
        # In file order the kernel's own read-ahead is better.
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
        # Twice the windows that are read at a time: rows announced now may lie in the next ones.
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

    def samples(self, begun: Position, *, rank: int) -> Iterator[int]:
        """Yields the positions of one rank's samples, and counts them as they are drawn."""
        plan, total = begun.plan, begun.length
        blocks = (
            plan.rows_at(rank, np.arange(first, min(first + _BLOCK_ROWS, total)))
            for first in range(0, total, _BLOCK_ROWS)
        )
        for piece in self.announced(plan, blocks):
            for position in piece:
                begun.steps += 1
                yield position


def _cut(blocks: Iterator[NDArray[np.int64]], piece_rows: int) -> Iterator[NDArray[np.int64]]:
    for block in blocks:
        for first in range(0, len(block), piece_rows):
            yield block[first : first + piece_rows]


def check_dataset(dataset: object) -> None:
    """Raises OptionError if samplers cannot draw from it: it is no `PackedDataset`."""
    if not isinstance(dataset, PackedDataset):
        advice = (
            "For a subset of a PackedDataset use its select(rows)"
            if isinstance(getattr(dataset, "dataset", None), PackedDataset)
            else "Make one of the packed file, PackedDataset(path), or use torch's own samplers for other datasets"
        )
        raise OptionError(
            f"dataset: chunk samplers draw from a PackedDataset, not from a {type(dataset).__name__}. {advice}."
        )
