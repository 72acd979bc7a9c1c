"""What fills a loader's ring: threads that read a packed file, or processes that run Python for each sample."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.augment import Augmentation, Augmenter
from fastload.auto_workers import Workforce
from fastload.backend import Backend
from fastload.dataset import PackedDataset, as_handed_over
from fastload.device import DeviceBatch, copy_fields
from fastload.groups import Apart, Groups, group_size
from fastload.inputs import OtherInput, PackedInput
from fastload.meter import Crew
from fastload.plan import PlannedBatch
from fastload.processes import PREFETCH, ProcessStream, WorkerPool
from fastload.read import Read, RowReader
from fastload.read.readahead import ReadAhead
from fastload.ring import SLACK, FilledBatch, Ring, SlotField, split_loose
from fastload.samples import SampleLayout
from fastload.sizer import Sizer
from fastload.threads import BatchStream
from fastload.times_raw import times_raw
from fastload.transforms.size_making import SizeMaking
from fastload.turns import ShortTurns

SLOTS_IN_COPY = 2
"""Slots that the device stage keeps while their copies run."""

# Announced beyond the batches that have a slot: enough for a disk to work on, and not much of the memory.
_AHEAD_BYTES = 64 * 2**20
_MAX_AHEAD = 64

# A worker process: Python, torch and the dataset; what one of ours takes by itself (180 MB), and some.
_PROCESS_BYTES = 256 * 2**20


class Stream(Protocol):
    """The batches of one pass, filled, in order."""

    def __iter__(self) -> Iterator[FilledBatch]: ...

    def __next__(self) -> FilledBatch: ...

    def depth(self) -> int | None:
        """Batches that lie ready; None: that is not known."""
        ...

    def close(self) -> None:
        """Ends the pass; nothing is written any more when this returns."""
        ...


class Feed(Protocol):
    """Kept by a loader from one epoch to the next."""

    @property
    def crew(self) -> Crew:
        """Who makes its batches."""
        ...

    @property
    def views(self) -> Mapping[str, torch.dtype]:
        """Fields whose arrays hold another dtype than they are of, with what they are; see `to_device`."""
        ...

    def stream(
        self, planned: Iterator[PlannedBatch], seed: Callable[[PlannedBatch], int], epoch: int, *, timed: bool = False
    ) -> Stream:
        """Begins a pass; one at a time.

        Args:
            planned: batches of an epoch, with rows of the file or indices of the dataset.
            seed: of a batch, for what Python draws at random.
            timed: whether batches say what they cost those who make them.
        """
        ...

    def begin_copy(self, batch: FilledBatch, backend: Backend) -> DeviceBatch[FilledBatch]:
        """What the device stage does with its batches; see `BeginCopy`."""
        ...

    def close(self) -> None:
        """Closes what it opened. Batches handed over stay valid."""
        ...

    @property
    def usable(self) -> bool:
        """Whether another pass can begin; else a new feed is needed."""
        ...

    def workforce(self) -> Workforce | None:
        """Its processes, and what they did in the current pass; None: it has none."""
        ...


class ThreadFeed:
    """Threads gather rows of a packed file straight into the slots.

    Args:
        dataset: without a transform.
        batch_size: rows in a batch.
        num_steps: batches of an epoch, more or less.
        read, workers: as in `FastLoader`.
        chunk_rows: of the chunks that a window is made of; 0: rows are read one by one.
        cache_chunks: decoded chunks kept of a field that is read through h5py.
        backend: of the device; None for the CPU.
        announces: whether the kernel is told ahead.
        augmentation: done by the threads, on the CPU; None: batches leave as they lie in the file, or as `sizing` made
            them.
        sizing: of images that lie in a store, with the augmentation that it is part of: the transforms that make one
            size of them, done by the threads wherever the batch goes.
    """

    usable = True
    begin_copy = staticmethod(copy_fields)

    def __init__(
        self,
        dataset: PackedDataset,
        batch_size: int,
        *,
        num_steps: int,
        read: Read,
        workers: int,
        chunk_rows: int,
        cache_chunks: int,
        backend: Backend | None,
        announces: bool,
        augmentation: Augmentation | None = None,
        sizing: tuple[SizeMaking, Augmentation] | None = None,
    ) -> None:
        self._dataset = dataset
        self._workers = workers
        self._backend = backend
        self._chunk_rows = chunk_rows
        self._announces = announces
        self._reader = dataset.open_reader(read, cache_chunks=cache_chunks, windows=chunk_rows > 0)
        self._augmenter: Augmenter | Sizer | None = None
        if sizing is not None:
            self._augmenter = Sizer(dataset, self._reader, *sizing, complete=augmentation is not None)
        elif augmentation is not None:
            self._augmenter = Augmenter(dataset, self._reader, augmentation)
        self._decodes = any(dataset.file.fields[name].store is not None for name, _, _ in dataset.layout())
        fields = self._augmenter.fields if self._augmenter else dataset.layout()
        self.views = self._augmenter.views if self._augmenter else {}
        batch_bytes = sum(SlotField(name, (batch_size, *shape), dtype).nbytes for name, shape, dtype in fields)
        # On the device each batch is copied by itself, and its slot returns by itself; mixed samples are of one batch.
        # Where HDF5 decodes chunks, that takes the time, and a group would only make its first batch wait for the last.
        linear = all(dataset.file.fields[name].offset is not None for name, _, _ in dataset.layout())
        alone = backend is not None or (augmentation is not None and augmentation.mixes) or not linear
        self._group = 1 if alone else group_size(batch_bytes, num_steps)
        layout = [SlotField(name, (self._group * batch_size, *shape), dtype) for name, shape, dtype in fields]
        self._loose: list[SlotField] = []
        if backend is None:
            in_slots, self._loose = split_loose(layout)
            self._ring = Ring(in_slots, SLACK + workers)
        else:
            facts = [SlotField("row", (batch_size,), np.dtype(np.int64))]
            facts.append(SlotField("valid", (batch_size,), np.dtype(np.bool_)))
            self._ring = Ring(layout + facts, SLOTS_IN_COPY + 1 + workers, backend.allocate)

    def stream(
        self, planned: Iterator[PlannedBatch], seed: Callable[[PlannedBatch], int], epoch: int, *, timed: bool = False
    ) -> Stream:
        """See `Feed.stream`."""
        read_ahead = self._dataset.read_ahead(chunk_rows=self._chunk_rows) if self._announces else None
        groups = Groups(planned, self._group) if self._group > 1 else None
        augment = functools.partial(self._augmenter.fill, epoch) if self._augmenter else None
        stream = BatchStream(
            groups or planned,
            augment or functools.partial(_fill, self._reader),
            self._ring,
            workers=self._workers,
            loose=self._loose,
            present=None if augment else functools.partial(as_handed_over, self._dataset.file),
            announce=read_ahead.announce if read_ahead else None,
            ahead=_batches_ahead(self._ring.slot_bytes),
            manual_release=self._backend is not None,
            timed=timed,
        )
        turns = ShortTurns() if self._decodes else None
        return _Announced(stream, groups.apart(stream) if groups else None, self._group, read_ahead, turns=turns)

    @property
    def crew(self) -> Crew:
        """See `Feed.crew`."""
        ahead = self._group * len(self._ring.slots)
        return Crew(self._workers, ahead, by_threads=True, times_raw=times_raw(self._dataset))

    def workforce(self) -> None:
        """See `Feed.workforce`."""

    def close(self) -> None:
        """See `Feed.close`."""
        self._reader.close()


class ProcessFeed:
    """Worker processes make the samples of any map-style dataset, or run a packed one's Python transform.

    Args:
        data: what makes samples.
        batch_size: samples in a batch.
        workers: processes.
        on_layout: told what samples are like, before the first batch.
        backend: of the device; None for the CPU.
        announces: whether the kernel is told ahead which rows of a packed file come.
        chunk_rows: as in `ThreadFeed`.
        auto: whether the number of workers is chosen by what is measured; else nothing is.
    """

    begin_copy = staticmethod(copy_fields)

    def __init__(
        self,
        data: PackedInput | OtherInput,
        batch_size: int,
        *,
        workers: int,
        on_layout: Callable[[SampleLayout], None],
        backend: Backend | None,
        announces: bool,
        chunk_rows: int,
        auto: bool,
    ) -> None:
        self.views: Mapping[str, torch.dtype] = {}
        self._data = data
        self._chunk_rows = chunk_rows
        self._backend = backend
        self._batch_size = batch_size
        self._workers = workers
        self._passes = 0
        self._auto = auto
        self._watch = _Watch(lambda: None)  # of the last pass
        self._dataset = data.dataset if announces and isinstance(data, PackedInput) else None
        self._pool = WorkerPool(
            data,
            batch_size,
            workers=workers,
            names=data.fields,
            on_layout=on_layout,
            pin=backend.pin if backend is not None else None,
            warns_of_many=not auto,
        )

    @property
    def usable(self) -> bool:
        """See `Feed.usable`."""
        return self._pool.usable

    @property
    def crew(self) -> Crew:
        """See `Feed.crew`."""
        times = times_raw(self._data.dataset) if isinstance(self._data, PackedInput) else 0.0
        return Crew(self._pool.workers, PREFETCH * self._pool.workers, by_threads=False, times_raw=times)

    def stream(
        self, planned: Iterator[PlannedBatch], seed: Callable[[PlannedBatch], int], epoch: int, *, timed: bool = False
    ) -> Stream:
        """See `Feed.stream`."""
        read_ahead, batch_bytes = None, 1
        if self._dataset is not None:
            read_ahead = self._dataset.read_ahead(chunk_rows=self._chunk_rows)
            file = self._dataset.file
            batch_bytes = self._batch_size * sum(file.fields[name].row_bytes for name, _, _ in self._dataset.layout())
        stream = ProcessStream(
            self._pool,
            planned,
            seed,
            announce=read_ahead.announce if read_ahead else None,
            ahead=_batches_ahead(batch_bytes),
            manual_release=self._backend is not None,
            timed=timed,
        )
        self._passes += 1
        if not self._auto:
            return _Announced(stream, None, 1, read_ahead)
        self._watch = _Watch(self._pool.busy_s)
        return _Announced(stream, None, 1, read_ahead, self._watch)

    def workforce(self) -> Workforce:
        """See `Feed.workforce`."""
        ring = self._pool.desk.ring
        return Workforce(
            self._workers,
            self._watch.busy_s,
            self._watch.starved_s,
            were_started=self._passes == 1,
            worker_bytes=_PROCESS_BYTES + (PREFETCH * ring.slot_bytes if ring is not None else 0),
        )

    def close(self) -> None:
        """See `Feed.close`."""
        self._pool.close()


class _Watch:
    """What a pass asks of its workers, from its first batch on: what they did before, such as imports, is no batch.

    Attributes:
        starved_s: waited for batches that were not ready when they were asked for.
    """

    def __init__(self, busy_s: Callable[[], float | None]) -> None:
        self.starved_s = 0.0
        self._busy_s = busy_s
        self._before_s: float | None = None
        self._begun = False

    def note(self, *, ready: bool, waited_s: float) -> None:
        """A batch was handed over; the first one begins the pass."""
        if not self._begun:
            self._begun, self._before_s = True, self._busy_s()
        elif not ready:
            self.starved_s += waited_s

    @property
    def busy_s(self) -> float | None:
        """Seconds that workers were on a CPU or wanted one; None: not known."""
        now_s = self._busy_s()
        return None if now_s is None or self._before_s is None else now_s - self._before_s


class _Announced:
    """A stream, of groups taken apart if there are any, with the announcer that ends with it."""

    def __init__(
        self,
        stream: BatchStream | ProcessStream,
        apart: Apart | None,
        group: int,
        read_ahead: ReadAhead | None,
        watch: _Watch | None = None,
        turns: ShortTurns | None = None,
    ) -> None:
        self._stream = stream
        self._turns = turns
        self._apart = apart
        self._group = group
        self._batches: Iterator[FilledBatch] = apart or stream
        self._read_ahead = read_ahead
        self._watch = watch

    def __iter__(self) -> Iterator[FilledBatch]:
        return self

    def __next__(self) -> FilledBatch:
        if self._watch is None:
            return next(self._batches)
        ready = self._stream.ready()
        asked_s = time.perf_counter()
        batch = next(self._batches)
        self._watch.note(ready=ready, waited_s=time.perf_counter() - asked_s)
        return batch

    def ready(self) -> bool:
        """Whether next() would give a batch without waiting."""
        return self._stream.ready()

    def depth(self) -> int | None:
        """See `Stream.depth`."""
        depth = self._stream.depth()
        if self._apart is None or depth is None:
            return depth
        return self._apart.in_hand + self._group * depth

    def close(self) -> None:
        """Ends the pass."""
        self._stream.close()
        if self._turns is not None:
            self._turns.end()
        if self._read_ahead is not None:
            self._read_ahead.close()


def _batches_ahead(batch_bytes: int) -> int:
    return min(_MAX_AHEAD, max(1, _AHEAD_BYTES // max(1, batch_bytes)))


def _fill(reader: RowReader, planned: PlannedBatch, arrays: Mapping[str, NDArray[Any]]) -> int:
    """What the file holds, and what only the plan knows, into the arrays of a batch."""
    count = len(planned.rows)
    arrays = {name: array[:count] for name, array in arrays.items()}  # the last group may not fill its slot
    if "row" in arrays:
        arrays["row"][:], arrays["valid"][:] = planned.rows, planned.valid
    return reader.gather(planned.rows, arrays)
