"""`Work`: a batch on its way from the plan to the training loop, in one object from end to end; and its `Stage`s.

    PlannedBatch --slot--> Work: filled by threads or processes --> on its device --> once for each use --> Batch

Small batches of one epoch are filled several at a time: a work then has members, and is split before it is handed over.
A stage says where it runs, what it makes of the fields of a sample, and what it does to a batch. The list of a loader's
stages is its recipe (`recipe.py`). A new encoding, device or view is another stage.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import queue
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.device import CHANNELS_FIRST, Pins
from fastload.errors import DamagedRowError
from fastload.plan import PlannedBatch
from fastload.prefetch.loader_plan import LoaderPlan, ReplaceDamaged
from fastload.prefetch.ring import INNER, SampleForm, Slot, SlotField
from fastload.prefetch.row_cache import RowCache
from fastload.read.reader import Rows
from fastload.timing.results import BatchWork

T = TypeVar("T", NDArray[Any], list[Any], torch.Tensor)

TRANSFORM_PARAMETERS = f"{INNER}words"
"""The field of a slot, int32, that the numbers of transforms are written to; see `Pipeline.draw`."""

Epochs = Iterable[tuple[int, Iterator[PlannedBatch]]]
"""Epochs one after another: their numbers, and their batches with rows of the file or indices of the dataset."""


@dataclass(frozen=True, eq=False)
class Orders:
    """What threads do with each work of a run: plan it, and run stages on it.

    It is not the run, or the pool, so that threads do not keep these alive.
    """

    coming: Iterator[tuple[int, list[PlannedBatch]]]  # asked by one thread at a time, in the order of the works
    stages: Sequence[Stage]
    by_parts: int = 0  # stages, from the first on, that several threads may run on parts of a batch
    done_one: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)  # wakes who waits for a work
    replace_damaged: ReplaceDamaged | None = None  # None: damaged rows are an error
    views: Mapping[str, torch.dtype] = field(default_factory=dict)  # of fields that a slot holds as another dtype

    def complete(self, work: Work) -> None:
        """Runs the stages, but for those that ran on its parts; anew if rows are damaged, and to be replaced."""
        work.in_slot()
        first = self.by_parts if work.parts.number > 1 and not work.parts.failed else 0
        while True:
            try:
                for stage in self.stages[first:]:
                    stage.run(work)
                return
            except DamagedRowError as error:
                if self.replace_damaged is None or not _replan(work, error.rows, self.replace_damaged):
                    raise
            first = 0
            work.copied.clear()

    def fill_part(self, work: Work, part: int) -> None:
        """Runs the first stages on a part of a batch; damaged rows are an error."""
        first, end = np.linspace(0, len(work.rows), work.parts.number + 1).astype(int).tolist()[part : part + 2]
        if first == end:  # a batch of one row has no more parts
            return
        some = work.part(slice(first, end))
        for stage in self.stages[: self.by_parts]:
            stage.run(some)
        work.copied += some.copied


def _replan(work: Work, damaged: Collection[int], replace: ReplaceDamaged) -> bool:
    """Leaves damaged rows out of a work's batches; False if one has no others, or none of these rows."""
    found = [replace(member, damaged) for member in work.members]
    members = [member for member in found if member is not None]
    if len(members) < len(found) or all(map(operator.is_, members, work.members)):
        return False
    work.plan(work.epoch, members)
    return True


class Parts:
    """The parts in which a work's rows are filled, each by a thread.

    Attributes:
        number: of parts.
        begun: how many were begun.
        failed: whether one could not be filled, so that the whole is filled anew, for its error.
    """

    def __init__(self, number: int) -> None:
        self.number, self.begun, self.failed = number, 0, False
        self._left = [None] * (number - 1)

    def last_ended(self) -> bool:
        """Ends a part; returns whether it was the last one. By one call of a list, which no thread comes between."""
        try:
            self._left.pop()
        except IndexError:
            return True
        return False


@dataclass(eq=False)
class Work:
    """A batch on its way, or several small ones in one slot; stages change it in place.

    A pool's thread plans and fills it, and says so by `done`; from then on it is the producer's.
    """

    slot: Slot
    orders: Orders  # what the threads do with it
    epoch: int = 0
    planned: PlannedBatch | None = None  # all of its rows; None: not planned yet, or there are no more
    members: Sequence[PlannedBatch] = ()  # the batches that it is split into
    # By field, (B, ...): of the slot, cut to its rows; on a device whole, and those beside them that were converted.
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    # By field, as far as stages have made them: tensors (B, ...), images (B, C, H, W) in channels_last memory, lists of
    # tensors of their own sizes, `ImageRows` or `PlacedImages`.
    fields: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # fields that no slot can hold: lists, `PlacedImages`, Python's
    texts: dict[str, list[Any]] = field(default_factory=dict)  # of a packed file, B each; they go to no device
    form: SampleForm | None = None  # of the batch; None: the fields the loader was asked for, in that order
    drawn: Any = None  # by transforms, for the samples, when it was filled; see `Pipeline.draw`
    copied: list[int] = field(default_factory=list)  # bytes that were read for it, by stage or part
    costs: list[BatchWork] = field(default_factory=list)  # what its parts cost, if that is measured
    in_one_piece: bool = True  # whether its arrays lie in the slot, which is copied to a device as a whole
    lent: dict[str, NDArray[Any]] | None = None  # by `Ring.lend`, ahead of the hand-over; they keep the slot
    split: list[Work] = field(default_factory=list)  # its members as they are handed over, over the lent arrays

    # On a device. The slot may be filled again after `event`; its arrays must not be read then.
    inner: dict[str, torch.Tensor] = field(default_factory=dict)  # fields that stay within the loader
    memory: list[torch.Tensor] = field(default_factory=list)  # device tensors that it is read from
    raw: torch.Tensor | None = None  # the slot's copy, where the next batch's takes its place; None: it is its own
    event: Any = None  # behind all that the side stream does for it

    # For one of its uses.
    origin: Work | None = None  # that is used
    echo: int = 0
    last: bool = True  # whether it is not used again; else nothing handed over shares its memory
    facts: dict[str, Any] = field(default_factory=dict)  # about its samples, for `Batch`

    # Of the thread that fills it, and of the process that it asks.
    error: BaseException | None = None  # came instead
    done: bool = False  # whether no thread will touch it any more
    thread: int | None = None  # that has it, by its number; the last one of several
    parts: Parts = field(default_factory=lambda: Parts(1))
    number: int = 0  # of the request to a process
    worker: int = 0  # that is asked
    run: int = 0  # number of the run that asks
    timed: bool = False  # whether the result says what it cost
    sent: bool = False
    result: Any = None  # the process's, when it has arrived

    def plan(self, epoch: int, members: Sequence[PlannedBatch]) -> None:
        """Notes the batches of an epoch that it is to be made of."""
        self.epoch, self.members, self.planned = epoch, members, joined(members)

    @property
    def whole(self) -> PlannedBatch:
        """The plan of all its rows, once it has one."""
        assert self.planned is not None, "it was planned"
        return self.planned

    @property
    def rows(self) -> NDArray[np.int64]:
        """The rows of its samples, int64 (B,)."""
        return self.whole.rows

    @property
    def bytes_read(self) -> int:
        """The bytes read for it."""
        return sum(self.copied)

    @property
    def cost(self) -> BatchWork | None:
        """The cost of making it; None: it was not measured."""
        return functools.reduce(operator.add, self.costs) if self.costs else None

    @cached_property
    def targets(self) -> dict[str, torch.Tensor]:
        """The slot's arrays as tensors, images (B, C, H, W); bfloat16 where the slot holds that as uint16."""
        return fields_on_cpu(self.arrays, self.orders.views)

    def in_slot(self) -> None:
        """Sets `arrays` to the slot's, cut to the rows: the last batch of an epoch may not fill it."""
        count = len(self.rows)
        self.arrays = {name: array[:count] for name, array in self.slot.arrays.items() if name != TRANSFORM_PARAMETERS}
        self.__dict__.pop("targets", None)

    def part(self, some: slice) -> Work:
        """Returns a work for some of its samples, in the same slot."""
        made = Work(self.slot, self.orders, self.epoch, self.whole.part(some))
        made.arrays = {name: array[some] for name, array in self.slot.arrays.items() if name != TRANSFORM_PARAMETERS}
        return made

    def for_use(self, echo: int, *, last: bool) -> Work:
        """Returns the work for one of its uses, which stages change: itself for the last one, else a copy."""
        if last:
            self.echo = echo
            return self
        made = copy.copy(self)
        made.origin, made.echo, made.last = self, echo, False
        made.fields, made.extra, made.facts = dict(self.fields), dict(self.extra), dict(self.facts)
        return made

    def finish(self) -> None:
        """Says that it is done. Set before it is queued: Ctrl-C may lose what a queue gives, and never that."""
        self.done = True
        self.orders.done_one.put(None)


def joined(members: Sequence[PlannedBatch]) -> PlannedBatch:
    """Returns the plan of all rows of some batches of an epoch."""
    if len(members) == 1:
        return members[0]
    known = [batch.times is not None for batch in members]
    times = None
    if any(known):
        zeros = [np.zeros(len(batch.rows), np.int64) if batch.times is None else batch.times for batch in members]
        times = np.concatenate(zeros)
    return PlannedBatch(
        rows=np.concatenate([batch.rows for batch in members]),
        valid=np.concatenate([batch.valid for batch in members]),
        global_valid=sum(batch.global_valid for batch in members),
        step=members[0].step,
        times=times,
    )


def coalesced(epochs: Epochs, group: int) -> Iterator[tuple[int, list[PlannedBatch]]]:
    """Yields so many batches of an epoch at a time, with its number; the last ones of each may be fewer."""
    for epoch, planned in epochs:
        while members := list(islice(planned, group)):
            yield epoch, members


def split(arrays: Mapping[str, T], members: Sequence[PlannedBatch]) -> list[dict[str, T]]:
    """Returns the part of arrays, or lists, that belongs to each batch; they may have room for more."""
    ends = list(itertools.accumulate((len(member.rows) for member in members), initial=0))
    if len(ends) == 2 and all(len(array) == ends[1] for array in arrays.values()):
        return [dict(arrays)]
    pairs = itertools.pairwise(ends)
    return [{name: array[first:end] for name, array in arrays.items()} for first, end in pairs]


def fields_on_cpu(arrays: Mapping[str, NDArray[Any]], views: Mapping[str, torch.dtype] | None = None) -> dict[str, Any]:
    """Returns the arrays as tensors of the same memory, which they keep alive; "images" permuted to (B, C, H, W).

    `views` gives the torch dtype of fields whose arrays hold another dtype of the same size.
    """
    # Permuted by NumPy: torch gives up the GIL in permute, and waits 0.5 ms on average to get it back while another
    # thread runs pure Python.
    fields = {
        name: torch.from_numpy(array.transpose(CHANNELS_FIRST) if name == "images" else array)
        for name, array in arrays.items()
    }
    for name, dtype in (views or {}).items():
        if name in fields:
            fields[name] = fields[name].view(dtype)
    return fields


Layout = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and dtype of the fields of a sample, by name, as they lie in a slot: images (H, W, C)."""


class Where(Enum):
    """Where a stage runs."""

    THREAD = "reading thread"
    PROCESS = "worker process"
    SIDE_STREAM = "side stream of the device"
    USE = "next(), once for each use"


class Opened:
    """What the stages of a pool share while it is open.

    Attributes:
        pins: pins memory for a device; None: batches stay on the CPU.
        cache: rows that are in memory; None: all are read from the file.
    """

    def __init__(self, options: LoaderPlan, workers: int, cache: RowCache | None = None) -> None:
        self.options, self.cache = options, cache
        self.pins = Pins(options.backend) if options.backend is not None else None
        self._workers = workers

    @cached_property
    def reader(self) -> Rows:
        """Reads the dataset's fields; opened for the first stage that asks."""
        window = self.options.window
        # A window's chunks, and the next window's, which is read ahead. Neighbouring batches share a chunk.
        chunks = 2 * window.chunks if window is not None else self._workers + 1
        packed = self.options.packed
        return packed.dataset.open_reader(packed.read_mode, cache_chunks=chunks, windows=window is not None)

    def close(self) -> None:
        """Closes the file, and unpins memory when the device has done with it."""
        if "reader" in self.__dict__:
            self.reader.close()
        if self.pins is not None:
            self.pins.close()
        if self.cache is not None and self.cache.pins is not None:
            self.cache.pins.close()
        self.cache = None


class Stage:
    """A step on a batch's way. Any thread may run it, on several works at a time.

    Attributes:
        where: it runs.
        why: it is there, for `describe`.
        divisible: whether several threads may make parts of a batch at a time.
        views: torch dtype of fields that a slot holds as another dtype of the same size; known after `output`.
        alone: whether it makes one batch at a time, never several small ones in one slot.
    """

    where: Where
    why: str = ""
    views: Mapping[str, torch.dtype] = MappingProxyType({})
    divisible: bool = False
    alone: bool = False

    def open(self, opened: Opened) -> None:
        """Takes what it needs of an open file and its device; called once before it runs."""

    def output(self, given: Layout) -> Layout:
        """Returns the fields of a slot after it, given those before it."""
        return given

    def own_fields(self, batch_size: int) -> list[SlotField]:
        """Returns fields of a slot that it writes, further ones than the samples'."""
        return []

    def run(self, work: Work) -> None:
        """Does its part of a batch, in place."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of what it took."""

    def steps(self) -> Sequence[Stage]:
        """Returns the stages that it consists of, for `describe`: itself."""
        return [self]
