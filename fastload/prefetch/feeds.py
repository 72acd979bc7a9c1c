"""Feeds fill a loader's ring: threads read a packed file, or processes run Python for each sample.

A `Feed` is kept from one epoch to the next and begins a `BatchStream` for each; `factory.py` chooses it. The third one,
`CachedFeed`, gathers rows that are kept in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Protocol

import numpy as np
import torch

from fastload.dataset import PackedDataset, as_handed_over
from fastload.device.backend import Backend
from fastload.device.copy import DeviceBatch, copy_fields
from fastload.format.ragged import RAW
from fastload.plan import PlannedBatch
from fastload.prefetch.augment import Augmentation, use_one_torch_thread
from fastload.prefetch.auto_workers import WorkerStats, WorkerWatch
from fastload.prefetch.inputs import OtherInput, PackedInput
from fastload.prefetch.process_stream import PREFETCH, ProcessStream, SampleWorkers
from fastload.prefetch.ring import SLACK, FilledBatch, Ring, SlotField, split_small
from fastload.prefetch.row_transformer import RowTransformer
from fastload.prefetch.sample_layout import SampleLayout
from fastload.prefetch.thread_stream import Announce, ThreadStream, gathering, group_size
from fastload.read.reader import Read, RowReader
from fastload.system.threads import ShortSwitchInterval
from fastload.timing.probe import WorkerInfo
from fastload.transforms.engine.size_head import SizeHead

SLOTS_IN_COPY = 2
"""Slots that the device stage keeps while their copies run."""

# Announced beyond the batches that have a slot: enough for a disk to work on, and not much of the memory.
_AHEAD_BYTES = 64 * 2**20
_MAX_AHEAD = 64

# A worker process: Python, torch and the dataset; a bare one takes 180 MB.
_PROCESS_BYTES = 256 * 2**20

# Rows that a dataset's compression ratio is taken from.
_RATIO_ROWS = 512


class BatchStream(Protocol):
    """The batches of one pass, filled, in order."""

    def __iter__(self) -> Iterator[FilledBatch]: ...

    def __next__(self) -> FilledBatch: ...

    def depth(self) -> int | None:
        """Returns how many batches lie ready; None: that is not known."""
        ...

    def close(self) -> None:
        """Ends the pass; nothing is written any more when this returns."""
        ...


class Feed(Protocol):
    """Makes a loader's batches; kept by it from one epoch to the next."""

    @property
    def worker_info(self) -> WorkerInfo:
        """The threads or processes that make its batches."""
        ...

    @property
    def views(self) -> Mapping[str, torch.dtype]:
        """The torch dtype of fields whose arrays hold another dtype; see `to_device`."""
        ...

    def stream(
        self, planned: Iterator[PlannedBatch], seed: Callable[[PlannedBatch], int], epoch: int, *, timed: bool = False
    ) -> BatchStream:
        """Begins a pass; one at a time.

        Args:
            planned: batches of an epoch, with rows of the file or indices of the dataset.
            seed: returns the seed of a batch, for random numbers that Python code draws.
            epoch: its number.
            timed: whether batches say what they cost the threads or processes that make them.
        """
        ...

    def begin_copy(self, batch: FilledBatch, backend: Backend) -> DeviceBatch[FilledBatch]:
        """Begins the copy of a batch to the device; see `BeginCopy`."""
        ...

    def close(self) -> None:
        """Closes what the feed opened. Batches handed over stay valid."""
        ...

    @property
    def usable(self) -> bool:
        """Whether another pass can begin; else a new feed is needed."""
        ...

    def worker_stats(self) -> WorkerStats | None:
        """Returns what its processes did in the current pass; None: it has none."""
        ...


class ThreadFeed:
    """Threads gather rows of a packed file straight into the slots.

    Args:
        dataset: without a Python transform.
        batch_size: rows in a batch.
        num_steps: batches of an epoch, more or less.
        read, workers: as in `FastLoader`.
        chunk_rows: of the chunks that a shuffle window is made of; 0: rows are read one by one.
        cache_chunks: decoded chunks kept of a field that is read through h5py.
        backend: of the device; None for the CPU.
        announces: whether coming rows are announced to the kernel.
        augmentation: done by the threads, on the CPU; None: batches leave as they lie in the file, or as `head` made
            them.
        head: for ragged images, the transforms that give them one size, done by the threads wherever the batch goes,
            and the augmentation that these are part of.
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
        head: tuple[SizeHead, Augmentation] | None = None,
    ) -> None:
        self._dataset = dataset
        self._workers = workers
        self._backend = backend
        self._chunk_rows = chunk_rows
        self._announces = announces
        self._reader = dataset.open_reader(read, cache_chunks=cache_chunks, windows=chunk_rows > 0)
        self._transformer: RowTransformer | None = None
        if head is not None:
            complete = augmentation is not None
            self._transformer = RowTransformer(dataset, self._reader, head[1], head=head[0], complete=complete)
        elif augmentation is not None:
            self._transformer = RowTransformer(dataset, self._reader, augmentation)
        self._decodes = any(dataset.file.fields[name].ragged is not None for name, _, _ in dataset.layout())
        fields = self._transformer.fields if self._transformer else dataset.layout()
        self.views = self._transformer.views if self._transformer else {}
        batch_bytes = sum(SlotField(name, (batch_size, *shape), dtype).nbytes for name, shape, dtype in fields)
        # To a device each batch is copied by itself, and its slot returns by itself; mixed samples are of one batch.
        # Where HDF5 decodes chunks, that takes the time, and a group would only make its first batch wait for the last.
        linear = all(dataset.file.fields[name].offset is not None for name, _, _ in dataset.layout())
        one_by_one = backend is not None or (augmentation is not None and augmentation.mixes) or not linear
        self._group = 1 if one_by_one else group_size(batch_bytes, num_steps)
        layout = [SlotField(name, (self._group * batch_size, *shape), dtype) for name, shape, dtype in fields]
        self._small: list[SlotField] = []
        if backend is None:
            in_slots, self._small = split_small(layout)
            self._ring = Ring(in_slots, SLACK + workers)
        else:
            facts = [SlotField("row", (batch_size,), np.dtype(np.int64))]
            facts.append(SlotField("valid", (batch_size,), np.dtype(np.bool_)))
            self._ring = Ring(layout + facts, SLOTS_IN_COPY + 1 + workers, backend.allocate)

    def stream(
        self, planned: Iterator[PlannedBatch], seed: Callable[[PlannedBatch], int], epoch: int, *, timed: bool = False
    ) -> BatchStream:
        """Begins a pass of the threads; they draw no seeds."""
        if self._transformer is None:
            fill, present = gathering(self._reader.gather), functools.partial(as_handed_over, self._dataset.file)
        else:
            fill, present = functools.partial(self._transformer.fill, epoch), None
        with ExitStack() as resources:
            stream = ThreadStream(
                planned,
                fill,
                self._ring,
                workers=self._workers,
                group=self._group,
                small=self._small,
                present=present,
                announce=_announcer(self._dataset, self._chunk_rows, resources) if self._announces else None,
                ahead=_batches_ahead(self._ring.slot_bytes),
                prepare=use_one_torch_thread if self._transformer else None,
                manual_release=self._backend is not None,
                timed=timed,
            )
            if self._decodes or self._transformer is not None:
                resources.callback(ShortSwitchInterval().end)
            stream.resources = resources.pop_all()
        return stream

    @property
    def worker_info(self) -> WorkerInfo:
        """The reading threads, and the batches in the ring."""
        ahead = self._group * len(self._ring.slots)
        return WorkerInfo(self._workers, ahead, by_threads=True, compression_ratio=compression_ratio(self._dataset))

    def worker_stats(self) -> None:
        """Returns None: the feed has no processes."""

    def close(self) -> None:
        """Closes the file."""
        self._reader.close()


class ProcessFeed:
    """Worker processes make the samples of any map-style dataset, or run a packed one's Python transform.

    Args:
        data: the dataset.
        batch_size: samples in a batch.
        workers: processes.
        on_layout: called with what samples are like, before the first batch; may refuse it.
        backend: of the device; None for the CPU.
        announces: whether coming rows of a packed file are announced to the kernel.
        chunk_rows: as in `ThreadFeed`.
        auto: whether the number of workers is chosen by measurements; else nothing is measured.
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
        self._num_workers = workers
        self._passes = 0
        self._auto = auto
        self._watch = WorkerWatch(lambda: None)  # of the last pass
        self._dataset = data.dataset if announces and isinstance(data, PackedInput) else None
        self._workers = SampleWorkers(
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
        """Whether no worker process has died."""
        return self._workers.usable

    @property
    def worker_info(self) -> WorkerInfo:
        """The worker processes, and the batches that they have to do."""
        ratio = compression_ratio(self._data.dataset) if isinstance(self._data, PackedInput) else 0.0
        return WorkerInfo(
            self._workers.number, PREFETCH * self._workers.number, by_threads=False, compression_ratio=ratio
        )

    def stream(
        self, planned: Iterator[PlannedBatch], seed: Callable[[PlannedBatch], int], epoch: int, *, timed: bool = False
    ) -> BatchStream:
        """Begins a pass; starts the workers if they do not wait from the last one."""
        batch_bytes = 1
        if self._dataset is not None:
            file = self._dataset.file
            batch_bytes = self._batch_size * sum(file.fields[name].row_bytes for name, _, _ in self._dataset.layout())
        with ExitStack() as resources:
            watch = WorkerWatch(self._workers.busy_s) if self._auto else None
            stream = ProcessStream(
                self._workers,
                planned,
                seed,
                announce=_announcer(self._dataset, self._chunk_rows, resources) if self._dataset is not None else None,
                ahead=_batches_ahead(batch_bytes),
                watch=watch,
                manual_release=self._backend is not None,
                timed=timed,
            )
            stream.resources = resources.pop_all()
        self._passes += 1
        self._watch = watch or self._watch
        return stream

    def worker_stats(self) -> WorkerStats:
        """Returns what the processes did in the current pass."""
        ring = self._workers.state.ring
        return WorkerStats(
            self._num_workers,
            self._watch.busy_s,
            self._watch.starved_s,
            were_started=self._passes == 1,
            worker_bytes=_PROCESS_BYTES + (PREFETCH * ring.slot_bytes if ring is not None else 0),
        )

    def close(self) -> None:
        """Ends the worker processes."""
        self._workers.close()


def _announcer(dataset: PackedDataset, chunk_rows: int, resources: ExitStack) -> Announce:
    """Returns what announces a dataset's rows to the kernel, until the resources are closed."""
    read_ahead = dataset.read_ahead(chunk_rows=chunk_rows)
    resources.callback(read_ahead.close)
    return read_ahead.announce


def _batches_ahead(batch_bytes: int) -> int:
    return min(_MAX_AHEAD, max(1, _AHEAD_BYTES // max(1, batch_bytes)))


def compression_ratio(dataset: PackedDataset) -> float:
    """Returns how many times as many bytes a dataset's images would take as raw pixels; 0.0 if none is encoded.

    Taken from some of the rows.
    """
    field = dataset.file.fields.get("images")
    if "images" not in dataset.fields or field is None or field.ragged is None or not len(dataset):
        return 0.0
    rows = np.asarray(dataset.rows[:: max(1, len(dataset) // _RATIO_ROWS)], np.int64)
    reader = RowReader(dataset.file, ["images"])
    try:
        index = reader.ragged("images").index(rows)
    finally:
        reader.close()
    if (index.encoding == RAW).all():
        return 0.0
    pixels = index.shape.prod(axis=1, dtype=np.int64).sum() * field.dtype.itemsize
    return float(pixels / max(1, index.bytes.sum()))
