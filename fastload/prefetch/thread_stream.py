"""Batches filled by threads that read a packed file ahead of their use: the feed of a loader, and a stream of it.

    planned batches --coalesce--> requests --threads fill slots of the ring--> results --split--> batches, in order

The threads stay from one stream to the next, and a stream goes on from epoch to epoch.

Small batches are filled several at a time into one slot, and handed over one by one: a batch of a few megabytes is
copied in less time than two threads need to wake each other, so that a thread that reads one batch at a time runs in
turn with the consumer and not at the same time (32x32x3, batches of 1024: 0.6 of a bare copy one at a time, 0.9
coalesced).
"""

from __future__ import annotations

import functools
import os
import queue
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import takewhile
from typing import Any

import numpy as np

from fastload.dataset import as_handed_over
from fastload.device import Backend, Pins
from fastload.errors import WorkerTimeoutError
from fastload.plan import PlannedBatch
from fastload.prefetch.coming import announced, coalesced
from fastload.prefetch.device_decoder import DeviceDecoder
from fastload.prefetch.device_stage import SLOTS_IN_COPY, BatchStream, DeviceBatch, Epochs, fields_on_cpu
from fastload.prefetch.fill_threads import (
    WORDS,
    Draw,
    Fill,
    FillThreads,
    Group,
    Present,
    Ready,
    ReplaceDamaged,
    Request,
    Tensors,
    Texts,
    fill_slot,
    made_ready,
    split,
)
from fastload.prefetch.own_sizes import OwnSizeRows
from fastload.prefetch.resolved import Resolved
from fastload.prefetch.ring import SLACK, FilledBatch, Ring, SlotField
from fastload.prefetch.row_transformer import RowTransformer
from fastload.prefetch.waiting import Patience, doing, rows_in_words
from fastload.timing.probe import WorkerInfo

LEAST_PART = 8
"""Samples of a batch that are worth a part of their own."""

GROUP_BYTES = 12 * 2**20
"""Bytes that are filled at a time, about, where batches are smaller."""


class ThreadFeed:
    """Threads gather rows of a packed file straight into the slots, or transform them on the way.

    On the CPU they run all transforms, where `Resolved.in_threads` says so; else batches leave as they lie in the file,
    or as the size head made them; JPEGs that a device decodes are on it then.

    Args:
        options: of the loader; its dataset has no Python transform.

    Attributes:
        usable: whether another stream can begin; else a new feed is needed.
    """

    def __init__(self, options: Resolved) -> None:
        self._options, dataset = options, options.packed.dataset
        workers = options.num_workers
        window, backend, augmentation = options.window, options.backend, options.augmentation
        # A window's chunks, and the next window's, which is read ahead. Neighbouring batches share a chunk.
        cache_chunks = 2 * window.chunks if window is not None else workers + 1
        self._reader = dataset.open_reader(options.read, cache_chunks=cache_chunks, windows=window is not None)
        self._transformer: RowTransformer | DeviceDecoder | OwnSizeRows | None = None
        self._pins = Pins(backend) if backend is not None else None
        if options.own_sizes:
            self._transformer = OwnSizeRows(options, self._reader, self._pins)
        elif options.decodes_on_device:
            assert self._pins is not None, "there is a device"
            self._transformer = DeviceDecoder(options, self._reader, self._pins)
        elif options.size_head is not None or options.in_threads:
            self._transformer = RowTransformer(
                dataset, self._reader, augmentation, head=options.size_head, complete=options.in_threads
            )
        fields = self._transformer.fields if self._transformer else dataset.layout()
        self._present = None if self._transformer else functools.partial(as_handed_over, dataset.file)
        batch_size = options.plan.batch_size
        batch_bytes = sum(SlotField(name, (batch_size, *shape), dtype).nbytes for name, shape, dtype in fields)
        # To a device each batch is copied by itself, and its slot returns by itself; mixed samples are of one batch.
        # Where HDF5 decodes chunks, that takes the time, and a group would only make its first batch wait for the last.
        linear = all(dataset.file.fields[name].linear for name, _, _ in dataset.layout())
        one_by_one = backend is not None or (options.in_threads and augmentation.mixes) or not linear
        one_by_one = one_by_one or options.own_sizes
        self._group = 1 if one_by_one else group_size(batch_bytes, options.plan.num_steps)
        # Several threads make the first batch, so it comes sooner. All batches cut like that took 1.1 to 1.2 times as
        # long, since a thread that waits for another one's part is idle.
        cut = isinstance(self._transformer, RowTransformer) and not (options.in_threads and augmentation.mixes)
        self._parts = max(1, min(workers, batch_size // LEAST_PART)) if cut else 1
        layout = [SlotField(name, (self._group * batch_size, *shape), dtype) for name, shape, dtype in fields]
        if self._pins is None:
            self._ring = Ring(layout, SLACK + workers)
        else:
            layout += [*options.words_field(), *fact_fields(batch_size)]
            self._ring = Ring(layout, SLOTS_IN_COPY + 1 + workers, self._pins.add_if_possible, manual_release=True)
        # Images of their own sizes lie in no slot.
        own_bytes = dataset.file.fields["images"].row_bytes if options.own_sizes else 0
        self._item_bytes = self._ring.slot_bytes + batch_size * own_bytes
        self._threads = FillThreads(workers)
        self._stream: ThreadStream | None = None  # the last one

    @property
    def usable(self) -> bool:
        """Whether another stream can begin: no thread hangs."""
        return not self._threads.left_behind

    @property
    def short_switches(self) -> bool:
        """Whether the threads decode, compute or compare rows, so that they need a `ShortSwitchInterval`."""
        return self._options.decodes or self._transformer is not None or self._reader.compares

    def stream(self, epochs: Epochs, *, timed: bool = False) -> BatchStream:
        """Begins to read batches of rows of the file, and ends the stream before it.

        `timed`: whether batches say what they cost to make.
        """
        reader, transformer, group, options = self._reader, self._transformer, self._group, self._options
        views = transformer.views if transformer is not None else {}
        if timed != self._threads.timed:
            self._threads.close()
            self._threads = FillThreads(self._threads.number, timed=timed)

        def fill(epoch: int, planned: PlannedBatch, arrays: dict[str, Any]) -> int:
            if transformer is None:
                return reader.gather(planned.rows, arrays)
            return reader.within(planned.rows, lambda: transformer.fill(epoch, planned, arrays))

        dataset = options.packed.dataset
        texts = (lambda planned: dataset.texts(reader, planned.rows)) if dataset.text_fields else None
        if self._stream is not None:
            self._stream.close()  # which may still wait for a thread, if it was collected by one
        with ExitStack() as resources:
            groups = coalesced(epochs, group)
            groups, _ = announced(self._options, groups, self._item_bytes, resources, under_way=options.num_workers)
            stream = ThreadStream(
                groups,
                fill,
                self._ring,
                self._threads,
                group=group,
                parts=self._parts,
                present=self._present,
                tensors=functools.partial(fields_on_cpu, views=views) if options.backend is None else None,
                draw=self._options.draw if WORDS in self._ring.slots[0].arrays else None,
                patience=self._options.patience(),
                replace_damaged=self._options.replace_damaged,
                texts=texts,
            )
            stream.views, stream.resources = views, resources.pop_all()
        self._stream = stream
        return stream

    @property
    def worker_info(self) -> WorkerInfo:
        """The reading threads, and the batches in the ring."""
        ratio = self._options.packed.compression_ratio()
        return WorkerInfo(
            self._threads.number, self._group * len(self._ring.slots), by_threads=True, compression_ratio=ratio
        )

    def close(self) -> None:
        """Ends the stream and the threads, and closes the file. Batches handed over stay valid."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._threads.close()
        if self._threads.left_behind:
            return  # they may still read the file, and write to slots
        self._reader.close()
        if self._pins is not None:
            self._pins.close()


class ThreadStream(BatchStream):
    """Batches in the order planned, filled ahead of their use by threads. An iterator for one thread; `close` ends it.

    Args:
        coming: batches to read, in order, `group` at a time; the last ones of an epoch may be fewer, and the last of
            them shorter. The threads take them, one at a time.
        fill: writes a batch; called by the threads.
        ring: the slots, each with room for `group` batches; nobody else takes from it meanwhile.
        threads: fill the slots; no other stream uses them meanwhile.
        group: batches that are filled at a time; see `group_size`.
        parts: in which the first one is filled, each by a thread.
        present: turns arrays as filled into arrays as handed over, views or copies; None: they stay as they are.
        tensors: makes tensors of arrays as handed over, in the thread that filled them; None: whoever takes the batch.
        draw: called by the threads after `fill`, for rings with the field WORDS; None: nothing is drawn beforehand.
        patience: limit of the wait for a batch; None: no limit.
        replace_damaged: lets a batch with damaged rows be filled without them; None: they are an error.
        texts: reads the texts of a batch that was filled, in the thread that filled it; None: there are none.
    """

    def __init__(
        self,
        coming: Iterator[Group],
        fill: Fill,
        ring: Ring,
        threads: FillThreads,
        *,
        group: int = 1,
        parts: int = 1,
        present: Present | None = None,
        tensors: Tensors | None = None,
        draw: Draw | None = None,
        patience: Patience | None = None,
        replace_damaged: ReplaceDamaged | None = None,
        texts: Texts | None = None,
    ) -> None:
        self.resources = ExitStack()  # closed with the stream
        self._coming = coming
        self._fill = functools.partial(fill_slot, fill, replace_damaged)
        self._ring = ring
        self._threads = threads
        self._group, self._parts = group, parts
        self._present = present
        self._make_ready = functools.partial(made_ready, ring, present, tensors) if tensors is not None else None
        self._draw, self._texts = draw, texts
        self._patience = patience or Patience()
        self._begun: deque[Request] = deque()  # with a slot, in order; the first is handed over next
        self._split: deque[FilledBatch] = deque()  # left of the request that was taken last
        self._done_one: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._closed = False
        self._begin()

    # No generator: its frame would keep the last batch alive, and its slot busy, while the user works on it.
    def __next__(self) -> FilledBatch:
        """Returns the next batch; raises the error of the thread that read it, with its traceback."""
        if self._split:
            return self._split.popleft()
        try:
            self._begin()
            if not self._begun:
                raise StopIteration  # it was closed
            self._wait_for(self._begun[0])
            if (error := self._begun[0].error) is not None:
                raise error
            if (group := self._begun[0].group) is None:
                raise StopIteration
            request = self._begun.popleft()
            ready, lent = request.ready, request.ready and request.ready.lent
            batch = self._ring.hand_over(request.slot, group.whole, request.bytes_read, request.work, lent=lent)
            batch.extra, batch.drawn = request.extra, request.drawn
            if ready is None or batch.arrays is not lent:  # on a device, or copied
                arrays = self._present(batch.arrays) if self._present is not None else batch.arrays
                # A slot is copied to a device as a whole, and cut there.
                parts = [arrays] if batch.memory is not None else split(arrays, group)
                ready = Ready(arrays, [(part, None) for part in parts])
        except BaseException:
            self.close()
            raise
        if self._group == 1:
            batch.arrays, batch.tensors = ready.parts[0]
            batch.texts = request.texts
            return batch
        # Each member has its part of the arrays, and the slot returns when all parts are gone.
        count = len(group.members)
        work = request.work / count if request.work is not None else None
        texts = split(request.texts, group)
        for (arrays, tensors), planned, said in zip(ready.parts, group.members, texts, strict=True):
            num_bytes = request.bytes_read * len(planned.rows) // len(group.whole.rows)
            self._split.append(FilledBatch(arrays, planned, num_bytes, work=work, tensors=tensors, texts=said))
        return self._split.popleft()

    def _wait_for(self, request: Request) -> None:
        """Waits until a request is done; raises WorkerTimeoutError when that takes too long."""
        if request.done:
            return
        self._patience.begin()
        try:
            while not request.done:
                self._patience.get(self._done_one, functools.partial(self._describe, request))
        except WorkerTimeoutError:
            self._threads.left_behind = True
            raise

    def _describe(self, request: Request) -> str:
        """Returns sentences on what a request waits for."""
        if request.thread is None:
            return "No thread has begun to read it: all are still at earlier batches."
        what = "plans the next batch."
        if request.group is not None:
            rows = request.group.whole.rows
            what = f"makes the batch that begins with {self._patience.named(int(rows[0]))} ({rows_in_words(rows)})."
        return f"A thread {what}\n\n{doing(request.thread)}"

    def begin_copy(self, batch: FilledBatch, backend: Backend) -> DeviceBatch:
        """Copies the fields in the slot to the device; images that nvJPEG decoded are there already."""
        device_batch = super().begin_copy(batch, backend)
        # Taken out of the batch: that one is kept until its slot's copy is over, and the pixels need not be.
        pixels, batch.extra = dict(batch.extra), {}
        if not pixels:
            return device_batch
        device_batch.gather = lambda: pixels
        for images in pixels.values():
            # All tensors of a list lie in one piece of memory.
            device_batch.memory += images[:1] if isinstance(images, list) else (images.pixels, images.layout)
        return device_batch

    def ready(self) -> bool:
        """Whether next() would return a batch without waiting."""
        return self.depth() > 0

    def depth(self) -> int:
        """Returns how many batches next() would give without waiting, one after the other."""
        filled = takewhile(lambda request: request.done and request.error is None, self._begun)
        return len(self._split) + sum(len(request.group.members) if request.group else 0 for request in filled)

    def close(self) -> None:
        """Takes back every slot that is not lent.

        Returns when no thread writes for this stream any longer, or without waiting for one that hangs: then its slots
        are not used again, and stay its own.
        """
        self._closed = True
        try:
            if self._pid == os.getpid():  # a forked child has neither the threads nor their results
                for request in self._threads.drop():
                    request.done = True
                self._split.clear()
                if self._threads.settle(self._begun, self._done_one):  # else the feed does before its next stream
                    while self._begun:
                        request = self._begun.popleft()  # which has the arrays, until its slot is not lent any more
                        self._ring.give_back(request.slot)
        finally:
            self._threads.close_resources(self.resources)

    def _begin(self) -> None:
        """Gives every free slot to a thread."""
        while not self._done_one.empty():  # only who waits needs them
            self._done_one.get()
        for _ in range(0 if self._closed else self._ring.collect()):
            slot = self._ring.free.popleft()
            parts, self._parts = self._parts, 1
            request = Request(
                self._coming, slot, self._fill, self._done_one, self._draw, self._make_ready, self._texts, parts=parts
            )
            self._begun.append(request)
            self._threads.put(request)


def fact_fields(batch_size: int) -> list[SlotField]:
    """Returns the fields of a slot for what the plan says of each sample."""
    return [SlotField("row", (batch_size,), np.dtype(np.int64)), SlotField("valid", (batch_size,), np.dtype(np.bool_))]


def group_size(batch_bytes: int, num_steps: int) -> int:
    """Returns how many batches to fill at a time.

    About GROUP_BYTES, and an eighth of the epoch at most, so that reading stays ahead.
    """
    return max(1, min(GROUP_BYTES // max(1, batch_bytes), num_steps // 8))
