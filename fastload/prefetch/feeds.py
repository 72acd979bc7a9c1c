"""Feeds fill a loader's ring: threads read a packed file, or processes run Python for each sample.

A feed is kept from one epoch to the next, and begins a stream of filled batches for each; one at a time. The third one,
`CachedFeed`, gathers rows that are kept in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.dataset import PackedDataset, as_handed_over
from fastload.errors import OptionError
from fastload.format.ragged import RAW
from fastload.plan import PlannedBatch, batch_seed
from fastload.prefetch.auto_workers import WorkerStats, WorkerWatch
from fastload.prefetch.device_stage import SLOTS_IN_COPY, BatchStream, copy_fields
from fastload.prefetch.inputs import PackedInput
from fastload.prefetch.process_stream import PREFETCH, ProcessStream, SampleWorkers
from fastload.prefetch.resolved import Resolved
from fastload.prefetch.ring import SLACK, Ring, SlotField
from fastload.prefetch.row_transformer import RowTransformer, use_one_torch_thread
from fastload.prefetch.sample_layout import SampleLayout
from fastload.prefetch.thread_stream import Ahead, ThreadStream, group_size
from fastload.read.readahead import has_read_ahead
from fastload.read.reader import RowReader
from fastload.system.threads import ShortSwitchInterval
from fastload.timing.probe import WorkerInfo
from fastload.transforms import check_pipeline

# Announced beyond the batches that have a slot: enough for a disk to work on, and not much of the memory.
_AHEAD_BYTES = 64 * 2**20
_MAX_AHEAD = 64

# A worker process: Python, torch and the dataset; a bare one takes 180 MB.
_PROCESS_BYTES = 256 * 2**20

# Rows that a dataset's compression ratio is taken from.
_RATIO_ROWS = 512


class ThreadFeed:
    """Threads gather rows of a packed file straight into the slots, or transform them on the way.

    On the CPU they run all transforms, where `Resolved.in_threads` says so; else batches leave as they lie in the file,
    or as the size head made them.

    Args:
        options: of the loader; its dataset has no Python transform.

    Attributes:
        usable: whether another pass can begin; else a new feed is needed.
        views: the torch dtype of fields whose arrays hold another dtype; see `DeviceStage`.
    """

    usable = True
    begin_copy = staticmethod(copy_fields)

    def __init__(self, options: Resolved) -> None:
        self._options, dataset = options, options.packed.dataset
        self._workers = workers = options.num_workers
        window, backend, augmentation = options.window, options.backend, options.augmentation
        # A window's chunks, and those of the next one that it is read into already. Neighbouring batches share a chunk.
        cache_chunks = 2 * window.chunks if window is not None else workers + 1
        self._reader = dataset.open_reader(options.read, cache_chunks=cache_chunks, windows=window is not None)
        self._transformer: RowTransformer | None = None
        if options.size_head is not None or options.in_threads:
            self._transformer = RowTransformer(
                dataset, self._reader, augmentation, head=options.size_head, complete=options.in_threads
            )
        fields = self._transformer.fields if self._transformer else dataset.layout()
        self.views = self._transformer.views if self._transformer else {}
        self._present = None if self._transformer else functools.partial(as_handed_over, dataset.file)
        batch_size = options.plan.batch_size
        batch_bytes = sum(SlotField(name, (batch_size, *shape), dtype).nbytes for name, shape, dtype in fields)
        # To a device each batch is copied by itself, and its slot returns by itself; mixed samples are of one batch.
        # Where HDF5 decodes chunks, that takes the time, and a group would only make its first batch wait for the last.
        linear = all(dataset.file.fields[name].offset is not None for name, _, _ in dataset.layout())
        one_by_one = backend is not None or (options.in_threads and augmentation.mixes) or not linear
        self._group = 1 if one_by_one else group_size(batch_bytes, options.plan.num_steps)
        layout = [SlotField(name, (self._group * batch_size, *shape), dtype) for name, shape, dtype in fields]
        if backend is None:
            self._ring = Ring(layout, SLACK + workers)
        else:
            facts = [SlotField("row", (batch_size,), np.dtype(np.int64))]
            facts.append(SlotField("valid", (batch_size,), np.dtype(np.bool_)))
            num_slots = SLOTS_IN_COPY + 1 + workers
            self._ring = Ring(layout + facts, num_slots, backend.allocate, manual_release=True)

    def stream(self, planned: Iterator[PlannedBatch], epoch: int, *, timed: bool = False) -> BatchStream:
        """Begins a pass of the threads.

        Args:
            planned: batches of an epoch, with rows of the file or indices of the dataset.
            epoch: its number.
            timed: whether batches say what they cost the threads or processes that make them.
        """
        if self._transformer is None:
            fill = functools.partial(_gathered, self._reader)
        else:
            fill = functools.partial(_transformed, self._transformer, epoch)
        with ExitStack() as resources:
            stream = ThreadStream(
                planned,
                fill,
                self._ring,
                workers=self._workers,
                group=self._group,
                present=self._present,
                ahead=_ahead(self._options, self._ring.slot_bytes, resources),
                timed=timed,
            )
            if self._options.decodes or self._transformer is not None:
                resources.callback(ShortSwitchInterval().end)
            stream.resources = resources.pop_all()
        return stream

    @property
    def worker_info(self) -> WorkerInfo:
        """The reading threads, and the batches in the ring."""
        ratio = _compression_ratio(self._options.packed.dataset)
        return WorkerInfo(self._workers, self._group * len(self._ring.slots), by_threads=True, compression_ratio=ratio)

    def close(self) -> None:
        """Closes the file. Batches handed over stay valid."""
        self._reader.close()


def _gathered(reader: RowReader, planned: PlannedBatch, arrays: Mapping[str, NDArray[Any]]) -> int:
    """Fills a slot with a batch's rows as they are; returns their bytes."""
    return reader.gather(planned.rows, arrays)


def _transformed(
    transformer: RowTransformer, epoch: int, planned: PlannedBatch, arrays: Mapping[str, NDArray[Any]]
) -> int:
    """Fills a slot with a transformed batch; returns the bytes of its rows."""
    use_one_torch_thread()
    return transformer.fill(epoch, planned, arrays)


class ProcessFeed:
    """Worker processes make the samples of any map-style dataset, or run a packed one's Python transform.

    Args:
        options: of the loader.
    """

    begin_copy = staticmethod(copy_fields)

    def __init__(self, options: Resolved) -> None:
        self.views: Mapping[str, torch.dtype] = {}
        self._options = options
        self._passes = 0
        self._watch = WorkerWatch(lambda: None)  # of the last pass
        self._workers = SampleWorkers(
            options.data,
            options.plan.batch_size,
            workers=options.num_workers,
            on_layout=functools.partial(_check_samples, options.augmentation.transforms, options.data.name),
            pin=options.backend.pin if options.backend is not None else None,
            warns_of_many=not options.auto_workers,
        )

    @property
    def usable(self) -> bool:
        """Whether no worker process has died."""
        return self._workers.usable

    @property
    def worker_info(self) -> WorkerInfo:
        """The worker processes, and the batches that they have to do."""
        data, number = self._options.data, self._workers.number
        ratio = _compression_ratio(data.dataset) if isinstance(data, PackedInput) else 0.0
        return WorkerInfo(number, PREFETCH * number, by_threads=False, compression_ratio=ratio)

    def stream(self, planned: Iterator[PlannedBatch], epoch: int, *, timed: bool = False) -> BatchStream:
        """Begins a pass, see `ThreadFeed`; starts the workers if they do not wait from the last one."""
        options, batch_bytes = self._options, 0
        if isinstance(options.data, PackedInput):
            file, layout = options.data.dataset.file, options.data.dataset.layout()
            batch_bytes = options.plan.batch_size * sum(file.fields[name].row_bytes for name, _, _ in layout)
        with ExitStack() as resources:
            watch = WorkerWatch(self._workers.busy_s) if options.auto_workers else None
            stream = ProcessStream(
                self._workers,
                planned,
                functools.partial(batch_seed, options.plan.seed, epoch, options.share.rank),
                ahead=_ahead(options, batch_bytes, resources),
                watch=watch,
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
            self._workers.number,
            self._watch.busy_s,
            self._watch.starved_s,
            were_started=self._passes == 1,
            worker_bytes=_PROCESS_BYTES + (PREFETCH * ring.slot_bytes if ring is not None else 0),
        )

    def close(self) -> None:
        """Ends the worker processes. Batches handed over stay valid."""
        self._workers.close()


def _check_samples(transforms: Sequence[Any], name: str, layout: SampleLayout) -> None:
    """Raises OptionError if transforms do not fit the samples. No method, since the workers' owner keeps it."""
    if not transforms:
        return
    leaf = dict(zip(layout.form.names, layout.leaves, strict=True)).get("images")
    if leaf is None:
        raise OptionError(
            f"transform: {name}: the samples have no image, a tensor (C, H, W) that comes first in a tuple or is "
            f"called 'image' or 'images' in a dict. Leave transform out, or transform in the loop."
        )
    if leaf.shape[0] not in (1, 3, 4) and leaf.shape[2] in (1, 3, 4):
        raise OptionError(
            f"transform: {name}: the samples' image is {leaf.shape}, as (height, width, channels), and transforms take "
            f"(C, H, W). Give torch.from_numpy(image).permute(2, 0, 1) as the sample's image."
        )
    dtype = torch.from_numpy(np.empty(0, leaf.dtype)).dtype
    check_pipeline(transforms, (leaf.shape[0], leaf.shape[1], leaf.shape[2]), dtype, layout.form.names)


def _ahead(options: Resolved, batch_bytes: int, resources: ExitStack) -> Ahead | None:
    """Returns what announces a packed dataset's rows to the kernel until the resources are closed; None: nothing."""
    # In file order the kernel's own read-ahead is better: cold, 19,500 images/s against 11,300 with ours.
    announces = has_read_ahead() and options.plan.shuffle is not False
    if not announces or not isinstance(options.data, PackedInput):
        return None
    read_ahead = options.data.dataset.read_ahead(chunk_rows=options.data.chunk_rows if options.window else 0)
    resources.callback(read_ahead.close)
    return Ahead(read_ahead.announce, min(_MAX_AHEAD, max(1, _AHEAD_BYTES // max(1, batch_bytes))))


def _compression_ratio(dataset: PackedDataset) -> float:
    """Returns how many times as many bytes a dataset's images would take as raw pixels; 0.0 if none is encoded.

    Taken from some of the rows.
    """
    field = dataset.file.fields.get("images")
    if "images" not in dataset.fields or field is None or field.ragged is None or not len(dataset):
        return 0.0
    rows = np.asarray(dataset.rows[:: max(1, len(dataset) // _RATIO_ROWS)], np.int64)
    with closing(RowReader(dataset.file, ["images"])) as reader:
        index = reader.ragged("images").index(rows)
    if (index.encoding == RAW).all():
        return 0.0
    pixels = index.shape.prod(axis=1, dtype=np.int64).sum() * field.dtype.itemsize
    return float(pixels / max(1, index.bytes.sum()))
