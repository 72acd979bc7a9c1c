"""Batches made by worker processes: for datasets and transforms in Python, which threads would run one at a time.

    planned batch --request--> worker: samples, written to a slot of shared memory --slot number--> training process

The processes, their queues, seeds and end are those of torch's `DataLoader`, but what crosses between them is a slot's
number, never a tensor. torch's own hand-over copies a batch into fresh shared memory and maps it anew on the other
side, which takes many times as long as reading it. Batches that do not fit their slot still go that way.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from fastload.device import Pins
from fastload.errors import WorkerError
from fastload.plan import PlannedBatch, batch_seed
from fastload.prefetch.auto_workers import MeasuredPass
from fastload.prefetch.device_stage import BatchStream, Epochs
from fastload.prefetch.fill_threads import WORDS, Draw
from fastload.prefetch.inputs import PackedInput
from fastload.prefetch.resolved import Resolved
from fastload.prefetch.ring import SLACK, FilledBatch, Ring, Slot
from fastload.prefetch.sample_layout import SampleLayout, as_array, check_samples, warn_of_change
from fastload.prefetch.sample_worker import BatchRequest, BatchResult, Filler
from fastload.prefetch.shared_memory import SharedMemory
from fastload.prefetch.thread_stream import announced, fact_fields
from fastload.prefetch.torch_workers import Workers, start_workers
from fastload.system.machine import busy_processes_s
from fastload.timing.probe import WorkerInfo

PREFETCH = 2
"""Batches requested of each worker at a time, the one in work included."""

# With those that earlier streams left, which are soon skipped.
_MOST = 2 * PREFETCH

# A worker process: Python, torch and the dataset; a bare one takes 180 MB.
_PROCESS_BYTES = 256 * 2**20


Planned = tuple[PlannedBatch, int]
"""A batch that is to be made, and its epoch."""


@dataclass(slots=True, eq=False)
class Asked:
    """A request that a worker was sent."""

    planned: Planned
    stream: int  # number of the stream that asked
    worker: int
    slot: Slot | None  # None: there is none yet, or it was passed on to a later request of the same worker
    result: BatchResult | None = None  # when it has arrived


class ProcessFeed:
    """Worker processes make the samples of any map-style dataset, or run a packed one's Python transform.

    The processes and the ring they fill stay from one epoch and stream to the next. What is left of a stream that was
    closed early they skip.
    """

    short_switches = False  # see `ThreadFeed`

    def __init__(self, options: Resolved) -> None:
        # Of the slots; None: not known yet.
        self.layout: SampleLayout | None = None
        self.ring: Ring | None = None
        self.draw: Draw | None = None  # for batches that go to a device in a slot; None: nothing is drawn beforehand
        self.warned = False  # of changing samples
        self._options = options
        self.num_workers = options.num_workers
        self.watched = options.auto_workers  # whether waits are measured
        self._streams = 0
        self._wanted_from = 0  # of streams with lower numbers nothing is wanted any more
        self._num_asked = 0
        self._asked: dict[int, Asked] = {}  # by number, requests without a result, in order
        self._load = [0] * self.num_workers  # how many of them each worker has
        self.passes = 0
        self.has_begun = False  # whether a batch of this pass was handed over
        # Seconds of this pass that batches were waited for that were not ready when they were asked for, and that the
        # workers had run or wanted a CPU when it gave its first batch, if that is known and asked for: what came before
        # that one, such as imports, does not count.
        self.starved_s = 0.0
        self.busy_before_s: float | None = None
        self._pins = Pins(options.backend) if options.backend is not None else None
        self._memory = SharedMemory()
        self._wanted = SharedMemory()
        self._wanted.extend(8)
        self._workers: Workers | None = None
        self._closed = False
        self._pid = os.getpid()

    @property
    def usable(self) -> bool:
        """Whether an epoch can begin: all workers are alive, or none was started."""
        return not self._closed and (self._workers is None or not self._workers.dead())

    @property
    def worker_info(self) -> WorkerInfo:
        """The worker processes, and the batches that they have to do."""
        data, number = self._options.data, self.num_workers
        ratio = data.compression_ratio() if isinstance(data, PackedInput) else 0.0
        return WorkerInfo(number, PREFETCH * number, by_threads=False, compression_ratio=ratio)

    def stream(self, epochs: Epochs, *, timed: bool = False) -> BatchStream:
        """Begins to make batches, see `ThreadFeed`; starts the workers if there are none.

        Raises:
            OptionError: this process may not have workers, or the dataset cannot be sent to them.
            WorkerError: the process that starts them ended.
        """
        options, batch_bytes = self._options, 0
        if isinstance(options.data, PackedInput):
            file, layout = options.data.dataset.file, options.data.dataset.layout()
            batch_bytes = options.plan.batch_size * sum(file.fields[name].row_bytes for name, _, _ in layout)
        self._streams += 1
        number = self._streams
        planned = ((batch, epoch) for epoch, batches in epochs for batch in batches)
        with ExitStack() as resources:
            coming = announced(options, planned, lambda one: one[0].rows, batch_bytes, resources)
            self.skip_before(number)
            try:
                if self._workers is None:
                    filler = Filler(options.data, self._memory, self._wanted, options.plan.batch_size)
                    self._workers = start_workers(filler, self.num_workers)
                self.receive_all()  # so that it is known which workers are idle
                stream = ProcessStream(self, coming, number, timed=timed)
            except BaseException:
                self.close(kill=True)
                raise
            stream.resources = resources.pop_all()
            return stream

    def ask(self, stream: int, planned: Planned, *, timed: bool) -> Asked | None:
        """Asks a worker for a batch; until the layout of a sample is known, for that of the first one.

        Returns None if there is no slot, or all workers have too much to do, before some results have come.
        """
        (batch, epoch), slot, ring, load = planned, None, self.ring, self._load
        # The idlest first; among equals the one that was asked longest ago.
        latest = self._num_asked % self.num_workers
        for worker in sorted(range(self.num_workers), key=lambda one: (load[one], (one - latest) % self.num_workers)):
            if load[worker] < _MOST and (ring is None or (slot := self._slot_for(ring, worker, stream))):
                break
        else:
            return None
        self._num_asked += 1
        asked = self._asked[self._num_asked] = Asked(planned, stream, worker, slot)
        load[worker] += 1
        rows, plan = batch.rows, self._options.plan
        python_seed = batch_seed(plan.seed, epoch, self._options.share.rank, batch.step)
        request = BatchRequest(-1, rows[:1], python_seed, None, stream)
        if slot is not None:
            request = BatchRequest(slot.number, rows, python_seed, self.layout, stream, timed)
        assert self._workers is not None, "a stream's workers are alive"
        self._workers.ask(worker, self._num_asked, request)
        return asked

    def _slot_for(self, ring: Ring, worker: int, stream: int) -> Slot | None:
        """Returns a free slot, or that of a batch of an earlier stream that the same worker has not begun or skips."""
        if (slot := ring.take()) is not None:
            return slot
        for asked in self._asked.values():
            if asked.worker == worker and asked.stream != stream and asked.slot is not None:
                slot, asked.slot = asked.slot, None
                return slot
        return None

    def receive(self) -> None:
        """Waits for the result of any request; the slots of those that an earlier stream made become free."""
        assert self._workers is not None, "a stream's workers are alive"
        number, result = self._workers.result()
        asked = self._asked.pop(number)
        self._load[asked.worker] -= 1
        if asked.stream >= self._wanted_from:
            asked.result = result
        elif asked.slot is not None:
            self.take_back(asked.slot, kept=result.kept)

    def receive_all(self) -> None:
        """Takes note of the results that have arrived."""
        while self._workers is not None and self._workers.waiting():
            self.receive()

    def skip_before(self, stream: int) -> None:
        """Lets the workers skip the batches of streams with lower numbers; they finish the sample they are at."""
        if not self._closed and self._pid == os.getpid():  # a fork's feed has no workers, but the same memory
            self._wanted_from = self._wanted.view(0, 8).view(np.int64)[0] = stream

    def begin_pass(self) -> None:
        """Begins the measurements of a pass."""
        self.passes += 1
        self.has_begun, self.starved_s, self.busy_before_s = False, 0.0, None

    def measured(self, batches: int, elapsed_s: float, first_s: float) -> MeasuredPass:
        """Returns the measurements of the current pass, whose first batch was waited for `first_s`."""
        before_s, now_s = self.busy_before_s, self.busy_s()
        busy_s = None if before_s is None or now_s is None else now_s - before_s
        return MeasuredPass(batches, elapsed_s, self.starved_s, busy_s, first_s if self.passes == 1 else 0.0)

    @property
    def worker_bytes(self) -> int:
        """The memory that one more process would take."""
        return _PROCESS_BYTES + (PREFETCH * self.ring.slot_bytes if self.ring is not None else 0)

    def prepare(self, layout: SampleLayout) -> None:
        """Makes the ring, now that the layout of a sample is known."""
        options = self._options
        if options.augmentation.transforms:
            check_samples(options.augmentation.transforms, options.data.name, layout)
        if options.backend is not None:
            options = replace(options, images=layout.images)
            words, facts = options.words_field(), fact_fields(options.plan.batch_size)
            self.draw = options.draw if words else None
            layout = layout._replace(beside=(*words, *(one for one in facts if one.name not in layout.form.names)))
        fields = layout.slot_fields(options.plan.batch_size)
        pin = self._pins.add_if_possible if self._pins is not None else None
        ring = Ring(fields, 0, pin, manual_release=pin is not None)
        self.add_slots(ring, SLACK + PREFETCH * self.num_workers + 1)
        self.layout, self.ring = layout, ring

    def add_slots(self, ring: Ring, count: int) -> None:
        """Adds slots to the ring: all of them at first, later one in place of one that cannot be used again."""
        num_bytes = max(1, ring.slot_bytes)
        first = self._memory.extend(num_bytes * count)
        for offset in range(first, first + num_bytes * count, num_bytes):
            ring.add(self._memory.view(offset, num_bytes))

    def take_back(self, slot: Slot, *, kept: bool) -> None:
        """Makes a slot free whose batch is not handed over; `kept`: the transform refers to it, expecting no change."""
        if self.ring is not None and kept:
            self.add_slots(self.ring, 1)
        elif self.ring is not None:
            self.ring.give_back(slot)

    def busy_s(self) -> float | None:
        """Returns the seconds that the workers ran or wanted a CPU so far; None: there are none, or one died."""
        return busy_processes_s(self._workers.pids) if self._workers is not None else None

    def close(self, *, kill: bool = False) -> None:
        """Ends the workers; they finish the sample they are at, unless killed. Batches handed over stay valid."""
        self.skip_before(self._streams + 1)
        workers, self._workers, self._closed = self._workers, None, True
        if workers is not None and self._pid == os.getpid():  # a forked process has none of its own
            workers.end(kill=kill)
        if self._pins is not None:
            self._pins.close()
        self.layout = self.ring = None
        self._asked.clear()
        self._memory.close()
        self._wanted.close()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_workers", None) is not None and not _is_finalizing():
            self.close()


class ProcessStream(BatchStream):
    """Batches in the order planned, made ahead of their use by a feed's workers. An iterator for one thread."""

    def __init__(self, feed: ProcessFeed, coming: Iterator[Planned], number: int, *, timed: bool) -> None:
        self.resources = ExitStack()  # closed with the stream
        self._feed = feed
        self._coming: Iterator[Planned] | None = coming  # None: the stream is closed
        self._number = number
        self._timed = timed
        self._watched = feed.watched
        self._pid = os.getpid()
        self._under_way: deque[Asked] = deque()  # what this stream asked for and did not hand over, in order
        self._next: Planned | None = next(coming, None)  # is asked for next
        self._ask()

    def __next__(self) -> FilledBatch:
        """Returns the next batch; raises a worker's error, with the sample's name and the worker's traceback."""
        feed = self._feed
        ready = self._watched and self.ready()
        asked_s = time.perf_counter()
        try:
            if (result := self._result()) is None:
                self.close()
                raise StopIteration
            asked = self._under_way.popleft()
            self._ask()
            batch = self._hand_over(asked, result)
        except StopIteration:
            raise
        except BaseException as error:
            self._coming = None
            feed.close(kill=isinstance(error, (WorkerError, KeyboardInterrupt)))
            raise
        if self._watched and not feed.has_begun:
            feed.busy_before_s = feed.busy_s()
        elif self._watched and not ready:
            feed.starved_s += time.perf_counter() - asked_s
        feed.has_begun = True
        return batch

    def _ask(self) -> None:
        """Asks for batches ahead."""
        feed = self._feed
        # Before the layout is known only for that.
        most = PREFETCH * feed.num_workers if feed.ring is not None else 1
        while self._next is not None and len(self._under_way) < most:
            asked = feed.ask(self._number, self._next, timed=self._timed)
            if asked is None:
                return
            self._under_way.append(asked)
            if feed.ring is not None and self._coming is not None:
                self._next = next(self._coming, None)

    def _result(self) -> BatchResult | None:
        """Waits for the result of the next batch; None: the stream is over. Raises a worker's error."""
        feed = self._feed
        while self._coming is not None and (self._under_way or self._next is not None):
            result = self._under_way[0].result if self._under_way else None
            if result is None:
                feed.receive()
            elif result.error is not None or result.skipped:
                raise result.error or WorkerError("a worker skipped a batch that is waited for: a fault of fastload's")
            elif result.slot >= 0:
                return result
            else:
                assert result.layout is not None, "it was asked for"
                self._under_way.clear()
                feed.prepare(result.layout)
            self._ask()
        return None

    def ready(self) -> bool:
        self._receive_all()
        result = self._under_way[0].result if self._under_way else None
        return result is not None and result.error is None and result.slot >= 0

    def depth(self) -> int:
        self._receive_all()
        return sum(1 for _ in takewhile(lambda asked: asked.result is not None, self._under_way))

    def _receive_all(self) -> None:
        """Takes note of results that have arrived."""
        if self._coming is None or self._pid != os.getpid():
            return
        try:
            self._feed.receive_all()
            self._ask()
        except BaseException:  # a dead worker, or Ctrl-C between a result and its slot
            self._coming = None
            self._feed.close(kill=True)
            raise

    def close(self) -> None:
        """Ends the stream; the workers skip what is left of it, and stay."""
        coming, self._coming, self._next = self._coming, None, None
        try:
            if coming is not None and self._pid == os.getpid():
                self._feed.skip_before(self._number + 1)
                while self._under_way:
                    asked = self._under_way.popleft()
                    if asked.result is not None and asked.slot is not None:
                        self._feed.take_back(asked.slot, kept=asked.result.kept)
        finally:
            self.resources.close()

    def _hand_over(self, asked: Asked, result: BatchResult) -> FilledBatch:
        feed, ring, layout = self._feed, self._feed.ring, self._feed.layout
        (planned, epoch), slot = asked.planned, asked.slot
        assert ring is not None and layout is not None and slot is not None, "a batch is made in a slot"
        if result.layout is None:
            batch = ring.hand_over(slot, planned, ring.slot_bytes)
            batch.arrays = layout.in_axes_of_sample(batch.arrays)
            batch.form, batch.extra = layout.form, result.fields
        else:
            feed.take_back(slot, kept=result.kept)
            if not feed.warned and not result.layout.fits(layout):
                feed.warned = True
                warn_of_change(layout, result.found)
            known = {name: as_array(value) for name, value in result.fields.items()}
            arrays = {name: array for name, array in known.items() if array is not None}
            extra = {name: value for name, value in result.fields.items() if name not in arrays}
            num_bytes = sum(array.nbytes for array in arrays.values())
            batch = FilledBatch(arrays, planned, num_bytes, result.layout.form, extra)
        if "images" in batch.arrays:  # as every batch has them: (B, H, W, C)
            batch.arrays["images"] = batch.arrays["images"].transpose(0, 2, 3, 1)
        batch.add_facts(always=ring.manual_release)
        if feed.draw is not None and batch.memory is not None:
            batch.drawn = feed.draw(epoch, planned, batch.arrays[WORDS])
        batch.work = result.work
        return batch
