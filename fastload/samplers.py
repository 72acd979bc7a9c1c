"""Samplers for a plain `DataLoader` over a `PackedDataset`: the orders of `plan` as torch's samplers.

plan -> blocks of rows -> announced to the kernel -> positions of the dataset, as Python's integers

`ChunkSampler` is for one process, `DistributedChunkSampler` gives one rank's share, and `ChunkBatchSampler` gives each
worker of a `DataLoader` windows of its own. An `EpochCursor` knows their epochs and states, a `_Feed` draws.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, Sampler

from fastload.dataset import PackedDataset
from fastload.distributed.ranks import resolve_share
from fastload.errors import OptionError, ShareError, StateError, check_whole
from fastload.plan import ChunkWindow, ClassBatches, Ends, EpochPlan, Shuffle
from fastload.plan.cursor import EpochCursor, Position, drawn
from fastload.prefetch.inputs import PackedInput, shuffle_of
from fastload.prefetch.lookahead import AHEAD_BYTES, MAX_AHEAD
from fastload.read.readahead import announced_ahead, has_read_ahead

Drawn = TypeVar("Drawn", int, list[int])

# Rows planned at a time; see `plan.epoch`.
_BLOCK_ROWS = 8192

# Rows are announced in pieces, so that announcing keeps pace with drawing. Of a window whole chunks are announced, at
# most its own and the next one's.
_AHEAD_PIECES = 8


class _Feed:
    """Yields the positions of a dataset that a sampler draws. Holds nothing open.

    Raises:
        OptionError: samplers cannot draw from the dataset, or the shuffle is invalid.
    """

    def __init__(self, dataset: PackedDataset, shuffle: Shuffle, *, batches: bool = False) -> None:
        given: object = dataset
        if not isinstance(given, PackedDataset):
            advice = (
                "For a subset of a PackedDataset use its select(rows)"
                if isinstance(getattr(given, "dataset", None), PackedDataset)
                else "Make one of the packed file, PackedDataset(path), or use torch's own samplers for other datasets"
            )
            raise OptionError(
                f"dataset: chunk samplers draw from a PackedDataset, not from a {type(given).__name__}. {advice}."
            )
        if isinstance(shuffle, ClassBatches) and not batches:
            raise OptionError(
                f"shuffle={shuffle!r} makes whole batches, and this sampler draws samples one by one. "
                f"ChunkBatchSampler and FastLoader take it."
            )
        self._data = PackedInput(dataset)
        self._shuffle = shuffle_of(self._data, shuffle)

    def cursor(
        self, seed: int, *, ends: Ends, world_size: int = 1, batch_size: int = 1, workers: int = 1
    ) -> EpochCursor:
        """Returns the cursor of a sampler, at the beginning of the first epoch; arguments as in `EpochPlan`."""
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
        """Yields blocks of planned rows as positions of the dataset, announced to the kernel ahead of reading.

        Args:
            plan: plan of the epoch.
            blocks: rows of the plan, int64 (P,) each.
            piece_rows: most rows of a block; None cuts blocks into pieces of the size to be announced at once.
        """
        dataset, file, first_row = self._data.dataset, self._data.dataset.file, self._data.plan_rows.start
        dataset.check_unchanged()
        fields = [file.fields[name] for name, _, _ in dataset.layout()]
        row_bytes = sum(field.row_bytes for field in fields if field.linear)
        with ExitStack() as resources:
            # In file order the kernel's own read-ahead is better; chunks behind a URL the reading processes fetch.
            if row_bytes and self._shuffle is not False and has_read_ahead() and file.remote is None:
                if piece_rows is None:
                    size = piece_rows = max(1, min(_BLOCK_ROWS, AHEAD_BYTES // _AHEAD_PIECES // row_bytes))
                    blocks = (block[at : at + size] for block in blocks for at in range(0, len(block), size))
                window, chunk_rows = 0, 0
                if isinstance(self._shuffle, ChunkWindow):
                    # Each worker of a ChunkBatchSampler is in a window of its own.
                    window, chunk_rows = self._shuffle.chunks * plan.world_size, self._data.chunk_rows
                # Twice the windows that are read at a time: rows announced now may lie in the next ones.
                read_ahead = dataset.read_ahead(chunk_rows=chunk_rows, recent_chunks=max(64, 2 * window))
                resources.callback(read_ahead.close)
                selected = self._data.selected
                depth = min(MAX_AHEAD, AHEAD_BYTES // (piece_rows * row_bytes))
                blocks = announced_ahead(
                    blocks, lambda block: read_ahead.announce(block if selected is None else selected[block]), depth
                )
            for block in blocks:
                yield (block - first_row).tolist()

    def samples(self, begun: Position, *, rank: int) -> Iterator[int]:
        """Returns the positions of one rank's samples, which are counted as they are drawn."""
        plan, total = begun.plan, begun.length
        blocks = (
            plan.rows_at(rank, np.arange(first, min(first + _BLOCK_ROWS, total)))
            for first in range(0, total, _BLOCK_ROWS)
        )
        return _counted(begun, chain.from_iterable(self.announced(plan, blocks)))


def _counted(begun: Position, items: Iterator[Drawn]) -> Iterator[Drawn]:
    """Yields the drawn items, and counts them as steps of the iteration."""
    for one in items:
        begun.steps += 1
        yield one


class _Epochwise(Sampler[Drawn]):
    """Base of samplers whose every iteration is an epoch of its own."""

    _epochs: EpochCursor

    def __len__(self) -> int:
        """Returns the samples or batches of this rank in the next iteration, or in all of the running one."""
        last = self._epochs.last
        return self._epochs.coming(running=not last.finished).length

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration; a loaded state of that very epoch stays loaded."""
        self._epochs.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration if it is decided, else of the last one."""
        return self._epochs.standing.plan.epoch


class _SampleStates:
    """The states of samplers whose steps are samples."""

    _epochs: EpochCursor

    def _standing(self) -> Position:
        return self._epochs.standing

    def _load(self, rest: Position) -> None:
        self._epochs.load(rest)

    def state_dict(self, samples_done: int | None = None) -> dict[str, Any]:
        """Returns the position in training, the same on every rank, as numbers, strings and lists.

        `FastLoader` reads it, too.

        Args:
            samples_done: samples of the running or last iteration that the loop has consumed on this rank; of a
                `ChunkSampler` that a framework shards, over all ranks. None: all that were drawn, which is more if the
                `DataLoader` has workers.

        Raises:
            OptionError: more than were drawn of an unfinished iteration.
        """
        return self._epochs.state(self._standing().after(samples_done, "samples_done"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration the rest of the saved epoch, also with another number of ranks.

        A finished epoch is followed by the next one, unless `set_epoch` names the finished one: then nothing is left.

        Raises:
            StateError: the state belongs to another file, split, seed or shuffle, or is damaged.
        """
        self._load(self._epochs.rest(state))


class ChunkSampler(_SampleStates, _Epochwise[int]):
    """Draws every position once an epoch, in the plan's order: for one process, or a framework that shards.

    Each `iter()` after the first begins the next epoch, unless `set_epoch` or `load_state_dict` was called before.
    Upcoming rows are announced to the kernel as positions are drawn.

    Args:
        dataset: of a packed file; the sampler yields positions of its items.
        shuffle, seed: as in `FastLoader`, but for `ClassBatches`; True chooses by how the file was packed.

    Raises:
        OptionError: an argument is invalid.
    """

    def __init__(self, dataset: PackedDataset, shuffle: Shuffle = True, seed: int = 0) -> None:
        self._feed = _Feed(dataset, shuffle)
        self._epochs = self._feed.cursor(seed, ends="pad")

    def __iter__(self) -> Iterator[int]:
        return self._feed.samples(self._epochs.begin(self._epochs.coming()), rank=0)


class DistributedChunkSampler(_SampleStates, DistributedSampler[Any]):
    """A `torch.utils.data.DistributedSampler` in the plan's order: one rank's share, as many samples on every rank.

    Signature and meaning are torch's: without `set_epoch` each iteration repeats the same order, drop_last=False
    repeats a few samples if the ranks do not divide the dataset, drop_last=True leaves a few out. Unlike torch's, a
    share is contiguous in the shuffled order, so that at most num_replicas - 1 chunks are read by two ranks.

    Args:
        dataset: of a packed file; the sampler yields positions of its items.
        num_replicas, rank: None takes the process group's.
        shuffle: as in `FastLoader`, but for `ClassBatches`; True chooses by how the file was packed.

    Raises:
        OptionError: an argument is invalid, or fewer samples than ranks and drop_last.
        ShareError: num_replicas or rank is None and there is no process group.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: Shuffle = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self._feed = _Feed(dataset, shuffle)
        if num_replicas is not None and rank is not None:
            _check_rank(rank, num_replicas)
        try:
            super().__init__(dataset, num_replicas, rank, bool(shuffle), seed, drop_last)
        except (RuntimeError, ValueError) as exc:
            raise ShareError(
                f"which share of {dataset.file.name} to draw cannot be known with num_replicas={num_replicas!r} and "
                f"rank={rank!r}: {exc} Call torch.distributed.init_process_group first, or give both."
            ) from exc
        ends: Ends = "drop" if drop_last else "pad"
        self._epochs = self._feed.cursor(seed, ends=ends, world_size=self.num_replicas)
        number = self._epochs.plan.num_positions
        if drop_last and 0 < number < self.num_replicas:
            raise OptionError(
                f"{dataset.file.name}: {number} samples over {self.num_replicas} ranks leave none for each with "
                f"drop_last=True. Use fewer ranks, or drop_last=False, which repeats samples."
            )
        self.shuffle = shuffle  # type: ignore[assignment]  # torch has only two
        self.num_samples = self._epochs.plan.num_steps
        self.total_size = self.num_samples * self.num_replicas
        # The rest of an epoch, from a state. Kept until it is drawn to its end, since a framework may begin an
        # iteration only to look at a batch.
        self._rest: Position | None = None
        self._begun: Position | None = None

    def __iter__(self) -> Iterator[int]:
        self._rest = self._loaded()
        self._begun = self._coming()
        return self._feed.samples(self._begun, rank=self.rank)

    def __len__(self) -> int:
        """Returns the samples of this rank in the next iteration."""
        return self._coming().length

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iterations; a loaded state of that very epoch stays loaded."""
        check_whole("epoch", epoch, least=0)
        self._rest = self._loaded()
        self._begun = None
        super().set_epoch(epoch)

    def _standing(self) -> Position:
        begun = self._begun
        return begun if begun is not None and begun.plan.epoch == self.epoch else self._coming()

    def _load(self, rest: Position) -> None:
        self._rest, self._begun = rest, None
        self.epoch = rest.plan.epoch + rest.finished

    def _coming(self) -> Position:
        rest = self._loaded()
        here = rest is not None and rest.plan.epoch == self.epoch
        return replace(rest) if rest is not None and here else self._epochs.whole(self.epoch)

    def _loaded(self) -> Position | None:
        """Returns the loaded rest of an epoch, unless it was drawn since."""
        rest, begun = self._rest, self._begun
        if rest is None or begun is None or begun.plan is not rest.plan:
            return rest
        return None if begun.finished and begun.length else rest


class ChunkBatchSampler(_Epochwise[list[int]]):
    """Draws batches for `DataLoader(batch_sampler=...)` that keep each worker in chunk windows of its own.

    A `DataLoader` gives batch k to worker k % num_workers, so the share of a rank is cut once more, among the workers,
    and their batches alternate. In compressed and foreign files each chunk is then decoded by one worker only, and at
    most num_replicas * num_workers - 1 chunks by two. So the order depends on num_workers, which is in the state.

    Each `iter()` after the first begins the next epoch, unless `set_epoch` or `load_state_dict` was called before.

    Args:
        dataset: of a packed file; the sampler yields positions of its items.
        batch_size: samples in a batch.
        num_workers: workers of the `DataLoader`; 0 and 1 give the same batches.
        shuffle, seed: as in `FastLoader`; True chooses by how the file was packed. The batches of `ClassBatches` stay
            whole.
        drop_last: True leaves out samples that do not fill a batch of every worker. False makes each worker's last
            batch short; with several ranks, fewer than num_replicas * num_workers samples then come twice, so that
            all ranks take the same number of steps.
        num_replicas, rank: ranks that share the dataset, and which of them this is. None asks the process group, or
            the environment, as `FastLoader` does.

    Raises:
        OptionError: an argument is invalid, or there is not one batch with drop_last.
        ShareError: rank and world size cannot be known.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        batch_size: int,
        *,
        num_workers: int,
        shuffle: Shuffle = True,
        seed: int = 0,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self._feed = _Feed(dataset, shuffle, batches=True)
        if num_replicas is None and rank is None:
            rank, num_replicas = resolve_share("auto")
        elif num_replicas == 1 and rank is None:
            rank = 0
        if num_replicas is None or rank is None:
            raise OptionError(f"num_replicas={num_replicas!r}, rank={rank!r}: give both or neither")
        _check_rank(rank, num_replicas)
        check_whole("num_workers", num_workers, least=0)
        check_whole("batch_size", batch_size, least=1)
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.drop_last = drop_last
        self.num_replicas = num_replicas
        self.rank = rank
        self._num_shares = max(1, num_workers)
        # Values that a state's batches depend on, besides the plan.
        self._cut = {"num_workers": self._num_shares, "num_replicas": num_replicas, "batch_size": batch_size}
        ends: Ends = "drop" if drop_last else "pad"
        world_size = num_replicas * self._num_shares
        self._epochs = self._feed.cursor(
            seed, ends=ends, world_size=world_size, batch_size=batch_size, workers=self._num_shares
        )
        if len(dataset) and not len(self):
            raise OptionError(
                f"{dataset.file.name}: {self._epochs.plan.num_positions:,} samples do not make one batch of "
                f"{batch_size} for each of {self._num_shares} workers on {num_replicas} ranks. Use a smaller "
                f"batch_size, fewer workers, or drop_last=False."
            )

    def __iter__(self) -> Iterator[list[int]]:
        begun = self._epochs.begin(self._epochs.coming())
        return _counted(begun, self._feed.announced(begun.plan, self._batches(begun), self.batch_size))

    def state_dict(self, batches_done: int | None = None) -> dict[str, Any]:
        """Returns the position in training, the same on every rank, as numbers, strings and lists.

        Args:
            batches_done: batches of the running or last iteration that the loop has consumed on this rank. None: all
                that were drawn, which is more if the `DataLoader` has workers.

        Raises:
            OptionError: more than were drawn of an unfinished iteration.
        """
        position = self._epochs.standing.after(batches_done, "batches_done")
        return self._epochs.state(position) | self._cut | {"batches_in_round": position.steps % self._num_shares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration the rest of the saved epoch.

        A finished epoch is followed by the next one, unless `set_epoch` names the finished one: then nothing is left.

        Raises:
            StateError: the state belongs to another file, split, seed, shuffle, number of workers or of ranks, or
                batch size, or is damaged.
        """
        own, of_plan = (*self._cut, "batches_in_round"), state
        if isinstance(state, Mapping):
            of_plan = {name: value for name, value in state.items() if name not in own}
        rest = self._epochs.rest(of_plan)
        plan = rest.plan
        if missing := [name for name in own if name not in state]:
            raise StateError(
                f"the state has no {', '.join(missing)}: it is not what a ChunkBatchSampler's state_dict() gave"
            )
        if differing := [
            f"{name} is {here!r} here and {state[name]!r} in the state"
            for name, here in self._cut.items()
            if state[name] != here
        ]:
            raise StateError(
                f"the state's batches differ from this sampler's: {'; '.join(differing)}. Make the sampler with the "
                f"state's values, or begin the epoch anew without the state."
            )
        in_round = state["batches_in_round"]
        foreign = any(segment[:2] != (plan.world_size, plan.batch_size) for segment in plan.segments)
        if foreign or in_round not in range(self._num_shares) or in_round > rest.length:
            raise StateError(f"the state is damaged: batches_in_round={in_round!r}, segments={list(plan.segments)}")
        self._epochs.load(replace(rest, steps=in_round))

    def _batches(self, begun: Position) -> Iterator[NDArray[np.int64]]:
        """Yields the rows of each batch, int64 (B,), or fewer in the last ones: one batch of each worker in turn."""
        plan, workers = begun.plan, self._num_shares
        shares = [plan.batches(self.rank * workers + worker) for worker in range(workers)]
        for worker in range(begun.first):
            next(shares[worker])
        # Rows of the longest share: shorter ones repeat rows up to it, see drop_last.
        most = -(-plan.num_positions // plan.unit // plan.world_size) * plan.unit
        for number in range(begun.first, begun.uses.num_steps):
            batch = next(shares[number % workers])
            own = self.num_replicas == 1 or self.drop_last
            size = int(batch.valid.sum()) if own else most - batch.step * self.batch_size
            yield batch.rows[:size]


def _check_rank(rank: int, num_replicas: int) -> None:
    check_whole("num_replicas", num_replicas, least=1)
    check_whole("rank", rank, least=0)
    if rank >= num_replicas:
        raise OptionError(f"rank={rank!r} is outside 0..{num_replicas - 1}, the ranks of num_replicas={num_replicas!r}")
