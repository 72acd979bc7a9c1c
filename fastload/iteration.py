"""One pass of a loader over what is left of an epoch: the stages after the plan, running."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.device import Backend, DeviceBatch, to_device
from fastload.errors import OptionError
from fastload.groups import Groups
from fastload.meter import LoaderStats
from fastload.plan import EpochPlan, PlannedBatch
from fastload.read import RowReader
from fastload.read.readahead import ReadAhead
from fastload.ring import BatchStream, FilledBatch, Ring, SlotField
from fastload.transforms import Draws, apply_transforms

# Announced beyond the batches that have a slot: enough for a disk to work on, and not much of the memory.
_AHEAD_BYTES = 64 * 2**20
_MAX_AHEAD = 64

SLOTS_IN_COPY = 2
"""Slots that the device stage keeps while their copies run."""


class Batch(tuple[torch.Tensor, ...]):
    """The fields asked for, in order, with the plan's facts beside them.

    Attributes:
        rows: int64 (B,), row of the file of each sample.
        valid: bool (B,), False for a repeat that only fills the last batch (ends="exact").
        global_valid: rows that count in this step over all ranks.
    """

    rows: torch.Tensor
    valid: torch.Tensor
    global_valid: int

    @classmethod
    def of(cls, fields: Iterable[torch.Tensor], facts: Mapping[str, Any]) -> Batch:
        """A batch with its facts: rows, valid, global_valid; arrays become tensors when they are asked for."""
        batch = cls(fields)
        batch.__dict__["_facts"] = facts
        return batch

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("_facts", {})
        if name in facts:
            # Not before: freeing a tensor gives up the GIL, and beside pure Python waits 0.5 ms to get it back.
            value = facts[name]
            self.__dict__[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            return self.__dict__[name]
        if name in ("rows", "valid", "global_valid"):
            raise AttributeError(
                f"this batch has no {name!r}: a framework built the tuple anew. Ask for 'row' or 'valid' in the fields "
                f"of PackedDataset, then they travel as ordinary tensors."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


@dataclass
class Position:
    """How far an epoch is; what a state saves.

    Attributes:
        plan: of the epoch, or of what was left of it when it was resumed.
        steps: of the plan's steps, those done.
        echoes: times the next step's batch was used already.
    """

    plan: EpochPlan
    steps: int = 0
    echoes: int = 0

    def batches_left(self, echo: int) -> int:
        """Batches still to be handed over, echoes included."""
        return max(0, (self.plan.num_steps - self.steps) * echo - self.echoes)


@dataclass
class Counter:
    """The numbers behind `LoaderStats`, while they change."""

    fresh: int = 0
    consumed: int = 0
    steps: int = 0
    stall_s: float = 0.0
    bytes_read: int = 0
    begun_s: float = 0.0
    last_s: float = 0.0

    def snapshot(self) -> LoaderStats:
        """The numbers now."""
        return LoaderStats(
            self.fresh, self.consumed, self.steps, self.last_s - self.begun_s, self.stall_s, self.bytes_read
        )


@dataclass(frozen=True)
class Stages:
    """What a pass runs on, kept by the loader from one epoch to the next.

    Attributes:
        fields: names in the order of a batch.
        reader, ring, loose: see `ring`; `loose` are the fields without a slot.
        present: gathered arrays as users get them.
        backend: of the device, None for the CPU.
        transforms, seed, ignore_index, echo: see `FastLoader` and `apply_transforms`.
        group: batches read at a time.
        workers: threads that read.
        read_ahead: makes the announcer of a pass; None where there is none.
    """

    fields: tuple[str, ...]
    reader: RowReader
    ring: Ring
    loose: Sequence[SlotField]
    present: Callable[[dict[str, NDArray[Any]]], dict[str, NDArray[Any]]]
    backend: Backend | None
    transforms: tuple[Any, ...]
    seed: int
    ignore_index: int
    echo: int
    group: int
    workers: int
    read_ahead: Callable[[], ReadAhead] | None


class Iteration:
    """The batches from a position on. Owns the threads that read: exhaustion, an error, `close` or its end stop them.

    Args:
        stages: what to run.
        planned: batches in order, with rows of the file.
        position: moved on as batches are handed over.
        counter: counts them.
    """

    def __init__(self, stages: Stages, planned: Iterator[PlannedBatch], position: Position, counter: Counter) -> None:
        self._stages = stages
        self._position = position
        self._counter = counter
        self._batch: DeviceBatch[FilledBatch] | None = None  # in use, when it will be used again
        # Two threads may ask the same iteration, and a new iter() in one may end it while another waits in it.
        self._lock = threading.RLock()
        self._displaced = False
        self._num_valid = 0  # of its samples, those that are no mere filling
        self.num_batches = position.batches_left(stages.echo)
        self.running = True
        self._read_ahead = stages.read_ahead() if stages.read_ahead else None
        groups = Groups(planned, stages.group) if stages.group > 1 else None
        self._stream = BatchStream(
            groups or planned,
            _Filler(stages.reader),
            stages.ring,
            workers=stages.workers,
            loose=stages.loose,
            present=stages.present,
            announce=self._read_ahead.announce if self._read_ahead else None,
            ahead=min(_MAX_AHEAD, max(1, _AHEAD_BYTES // max(1, stages.ring.slot_bytes))),
            manual_release=stages.backend is not None,
        )
        filled = groups.apart(self._stream) if groups else self._stream
        self._batches = to_device(filled, stages.backend, slots_in_copy=SLOTS_IN_COPY)
        counter.begun_s = counter.last_s = time.perf_counter()

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Batch:
        with self._lock:
            return self._next()

    def displace(self) -> None:
        """Ends the pass because the loader begins another one; asking for more batches is an error from now on."""
        with self._lock:
            self._displaced = self.running
            self.close()

    def _next(self) -> Batch:
        if self._displaced:
            raise OptionError(
                "this iteration was ended by a newer iter() of the same FastLoader, or its close(): a loader has one "
                "epoch under way. To look at a batch beside the loop, or to iterate twice at once, make another "
                "FastLoader of the same file."
            )
        if not self.running:
            raise StopIteration
        asked_s = time.perf_counter()
        counter = self._counter
        try:
            if self._batch is None:
                self._batch = next(self._batches)
                source = self._batch.source
                self._num_valid = self._count_valid(source.planned)
                counter.fresh += self._num_valid
                counter.bytes_read += source.bytes_read
                del source
            counter.stall_s += time.perf_counter() - asked_s
            return self._hand_over()
        except BaseException:
            self.close()
            raise
        finally:
            counter.last_s = time.perf_counter()

    def close(self) -> None:
        """Ends the pass: its threads are gone when this returns. Batches handed over stay as they are."""
        if not self.running:
            return
        self.running = False
        self._batch = None
        device_stage, self._batches = self._batches, iter(())
        if isinstance(device_stage, Generator):
            device_stage.close()  # gives back the slots whose copies still run
        self._stream.close()
        if self._read_ahead is not None:
            self._read_ahead.close()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # While the interpreter ends, daemon threads are already frozen and cannot be waited for, and globals are gone.
        if getattr(self, "_batches", None) is not None and not _is_finalizing():
            self.close()

    def _count_valid(self, planned: PlannedBatch) -> int:
        return int(np.count_nonzero(planned.valid)) if self._position.plan.ends == "exact" else len(planned.rows)

    def _hand_over(self) -> Batch:
        stages, position, counter = self._stages, self._position, self._counter
        device_batch = self._batch
        assert device_batch is not None, "there is no batch to hand over"
        planned, fields, echo = device_batch.source.planned, device_batch.fields, position.echoes
        # On the CPU they come from the plan, and so hold no slot.
        facts: dict[str, Any] = {"rows": planned.rows, "valid": planned.valid, "global_valid": planned.global_valid}
        if "row" in fields:
            facts |= {"rows": fields["row"], "valid": fields["valid"]}
        else:
            plan_fields = {"row": planned.rows, "valid": planned.valid}
            fields = fields | {
                name: torch.from_numpy(plan_fields[name]) for name in stages.fields if name in plan_fields
            }
        result = fields
        if stages.transforms:
            draws = Draws(stages.seed, position.plan.epoch, planned.rows, echo)
            result = apply_transforms(stages.transforms, fields, draws, ignore_index=stages.ignore_index)
        if echo + 1 < stages.echo:
            # The user may write to a batch, and the next echo must not see it.
            result = {name: _own(tensor, fields.get(name)) for name, tensor in result.items()}
            facts |= {name: facts[name].copy() for name in ("rows", "valid") if isinstance(facts[name], np.ndarray)}
            position.echoes += 1
        else:
            self._batch = None
            position.steps, position.echoes = position.steps + 1, 0
        counter.consumed += self._num_valid
        counter.steps += 1
        return Batch.of([result[name] for name in stages.fields], facts)


class _Filler:
    """Fills the arrays of a batch: what the file holds, and what only the plan knows."""

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader

    def __call__(self, planned: PlannedBatch, arrays: Mapping[str, NDArray[Any]]) -> int:
        count = len(planned.rows)
        arrays = {name: array[:count] for name, array in arrays.items()}  # the last group may not fill its slot
        if "row" in arrays:
            arrays["row"][:], arrays["valid"][:] = planned.rows, planned.valid
        return self._reader.gather(planned.rows, arrays)


def _own(tensor: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
    """The tensor, or a copy if it shares memory with the field it was made from."""
    shared = source is not None and tensor.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return tensor.clone() if shared else tensor
