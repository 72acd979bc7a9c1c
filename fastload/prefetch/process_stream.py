"""Batches made by worker processes: for datasets and transforms in Python, which threads would run one at a time.

    free slot --thread: plans a batch--> request --worker: writes samples to the slot--> slot number --> training thread

Processes, queues, seeds and shutdown work as in torch's `DataLoader`, but only a slot's number crosses between them,
never a tensor. torch's own hand-over copies a batch into fresh shared memory and maps it anew on the other
side, which takes many times as long as reading it. Batches that do not fit their slot still go that way.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, takewhile

import numpy as np

from fastload.device import Pins
from fastload.errors import WorkerError, WorkerTimeoutError
from fastload.prefetch.auto_workers import WatchedPass
from fastload.prefetch.coming import announced, coalesced
from fastload.prefetch.device_stage import BatchStream, Epochs
from fastload.prefetch.fill_threads import Draw, FillThreads, Group, split
from fastload.prefetch.inputs import PackedInput
from fastload.prefetch.resolved import Resolved
from fastload.prefetch.ring import SLACK, FilledBatch, Ring
from fastload.prefetch.sample_layout import SampleLayout, as_array, check_samples, warn_of_change
from fastload.prefetch.sample_worker import TRIED, BatchRequest, BatchResult, Filler, control_bytes, sample_at
from fastload.prefetch.shared_memory import SharedMemory
from fastload.prefetch.thread_stream import fact_fields
from fastload.prefetch.torch_workers import DeadWorkerError, Workers, start_workers
from fastload.prefetch.worker_requests import NO_SLOT, Asked, Sender
from fastload.read.fetch_ahead import FetchAhead
from fastload.system.machine import busy_processes_s, which_end
from fastload.timing.probe import WorkerInfo

_log = logging.getLogger("fastload")

_HURRY_S = 1.0  # after which, while a batch is waited for, it is looked at again what the workers lack
PREFETCH = 2
"""Batches requested of each worker at a time, the one in work included."""

# A worker process: Python, torch and the dataset; a bare one takes 180 MB.
_PROCESS_BYTES = 256 * 2**20


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
        self.options = options
        self.num_workers = options.num_workers
        self.watched = options.auto_workers  # whether waits are measured, to choose the number of workers
        self._streams = 0
        self._wanted_from = 0  # streams with lower numbers have ended
        self._num_asked = 0
        self._asked: dict[int, Asked] = {}  # by number, requests without a result, in order
        self._refused: dict[int, str] = {}  # rows that ended a worker, also alone, and how; others take their places
        self.watched_pass: WatchedPass | None = None  # None: none has begun
        self._pins = Pins(options.backend) if options.backend is not None else None
        self._memory = SharedMemory()
        self._control = SharedMemory()  # see `Filler`
        self._control.extend(control_bytes(0, 0))
        self._wanted = self._control.view(0, 8).view(np.int64)
        self._workers: Workers | None = None
        self._sender: Sender | None = None  # when there are workers
        self.threads = FillThreads(1)  # plans batches and sends the requests for them
        self._closed = False
        self._pid = os.getpid()

    @property
    def usable(self) -> bool:
        """Whether an epoch can begin: all workers are alive, or none was started."""
        hangs = self._closed or self.threads.left_behind
        return not hangs and (self._workers is None or self._workers.all_alive())

    @property
    def worker_info(self) -> WorkerInfo:
        """The worker processes, and the batches that they have to do."""
        data, number = self.options.data, self.num_workers
        ratio = data.compression_ratio() if isinstance(data, PackedInput) else 0.0
        return WorkerInfo(number, PREFETCH * number, by_threads=False, compression_ratio=ratio)

    def stream(self, epochs: Epochs, *, timed: bool = False) -> BatchStream:
        """Begins to make batches, see `ThreadFeed`; starts the workers if there are none.

        Raises:
            OptionError: this process may not have workers, or the dataset cannot be sent to them.
            WorkerError: the process that starts them ended.
        """
        options, batch_bytes = self.options, 0
        if isinstance(options.data, PackedInput):
            file, layout = options.data.dataset.file, options.data.dataset.layout()
            batch_bytes = options.plan.batch_size * sum(file.fields[name].row_bytes for name, _, _ in layout)
        self._streams += 1
        with ExitStack() as resources:
            under_way = PREFETCH * self.num_workers
            coming, ahead = announced(options, coalesced(epochs, 1), batch_bytes, resources, under_way=under_way)
            self.skip_before(self._streams)
            try:
                if self._workers is None:
                    self._workers = start_workers(self._filler(), self.num_workers)
                    self._sender = Sender(self._workers, self._control, options)
                self.receive_all()  # so that it is known which workers are idle
                stream = ProcessStream(self, coming, self._streams, timed=timed, ahead=ahead)
            except BaseException:
                self.close(kill=True)
                raise
            stream.resources = resources.pop_all()
            return stream

    def ask(self, stream: ProcessStream) -> Asked | None:
        """Asks a worker for a stream's next batch; while the layout is unknown, for the layout of its first sample.

        Returns None if no slot is free before some results have come.
        """
        assert self._workers is not None and self._sender is not None, "a stream's workers are alive"
        slot = self.ring.take() if self.ring is not None else NO_SLOT
        if slot is None:
            return None
        load, number = [0] * self.num_workers, self._num_asked + 1
        for one in self._asked.values():
            load[one.worker] += 1
        # The idlest; among equals the one asked longest ago.
        worker = min(range(len(load)), key=lambda one: (load[one], (one - number) % len(load)))
        asked = Asked(
            stream.coming, slot, self._sender, stream.done_one, self.draw,
            number=number, stream=stream.number, worker=worker, timed=stream.timed,
        )  # fmt: skip
        self._num_asked, self._asked[number] = number, asked
        self.threads.put(asked)
        return asked

    def leave(self, stream: ProcessStream) -> None:
        """Takes back the slots of batches that a stream requested and will not yield: now, or with their results."""
        for request in self.threads.drop():
            request.done = True
        for asked in stream.under_way if self.threads.settle(stream.under_way, stream.done_one) else ():
            if not asked.sent:
                del self._asked[asked.number]
            if not asked.sent or asked.result is not None:
                self.take_back(asked)

    def receive(self, waits_for: Asked | None = None, left: Callable[[], float] = lambda: math.inf) -> None:
        """Waits for the result of any request; the slots of those that an earlier stream made become free.

        Raises WorkerError if the worker that this waits for died, or None: any of them, unless the rows that ended it
        are to be skipped: then new workers make the missing ones, and nothing was received. `left` as in
        `Workers.result`.
        """
        assert self._workers is not None, "a stream's workers are alive"
        try:
            number, result = self._workers.result(waits_for.worker if waits_for is not None else None, left)
        except DeadWorkerError as error:
            assert self._sender is not None, "it died at a request"
            with self._sender.sending:
                self._succeed(error)
            return
        asked = self._asked.pop(number)
        if isinstance(result, Exception):
            result = BatchResult(asked.slot.number, error=result)
        asked.result = result
        if asked.stream < self._wanted_from:
            self.take_back(asked)

    def _filler(self) -> Filler:
        options, memory = self.options, (self._memory, self._control)
        batch_size, refused = options.plan.batch_size, self._refused
        return Filler(options.data, *memory, batch_size, skip_damaged=options.skip_damaged, refused=refused)

    def _succeed(self, error: DeadWorkerError) -> None:
        """Starts new workers after some died, if those rows are to be skipped that end also a process of their own.

        Raises WorkerError, with the samples that they were at, if they are not, or there are none.
        """
        assert self._workers is not None and self._sender is not None, "a stream's workers died"
        said, found, data = list[str](), dict[int, str](), self.options.data
        dead = [self._sender.latest(self._asked.values(), number) for number in self._workers.dead_numbers]
        self._workers.end(kill=True)
        for asked in dead:
            if asked is None or asked.group is None:
                continue
            place, planned = self._sender.place(asked), asked.group.whole
            rows = ((planned.without(self._refused, world_size=1) if self._refused else None) or planned).rows
            # Up to what it was at; what it had made may have ended it, too, only later.
            until = rows[: place + 1].tolist() if asked.slot is not NO_SLOT else rows[:1].tolist()
            if data.at_once and place < len(rows):
                until = rows.tolist()
            ends = which_end(list(dict.fromkeys(until)), until[-1], self._ended)
            found |= ends
            where = sample_at(place, rows, data.name_of, at_once=data.at_once)
            said.append(f"It was at {where}; that does not end a process by itself." if not ends else "")
            said += [f"{data.name_of(row)}: a process that made nothing else {how}, too." for row, how in ends.items()]
        if not found or not self.options.skip_damaged or found.keys() & self._refused.keys():
            raise WorkerError(" ".join([str(error), *filter(None, said)])) from error
        for row, how in found.items():
            _log.warning(
                f"{data.name_of(row)}: the worker that made it {how}, as did one that made nothing else; counts as "
                f"damaged, so another row of its batch takes its place"
            )
        self._refused |= found
        self._workers = start_workers(self._filler(), self.num_workers)
        self._sender.replace(self._workers, self._asked.values())

    def _ended(self, rows: list[int]) -> str:
        """Returns how a new worker ended that made these samples; "" if it did not."""
        alone = start_workers(self._filler(), 1)
        try:
            alone.ask(0, 0, BatchRequest(TRIED, 0, self._streams, rows=np.array(rows, np.int64)))
            alone.result(0, lambda: math.inf)
        except DeadWorkerError:
            return alone.how_they_ended()
        finally:
            alone.end(kill=True)
        return ""

    def describe(self, waits_for: Asked | None, name_of: Callable[[int], str]) -> str:
        """Returns sentences on what a batch waits for; see `Sender.describe`."""
        assert self._sender is not None, "a stream's workers are alive"
        return self._sender.describe(self._asked, waits_for, name_of)

    def receive_all(self) -> None:
        """Takes note of the results that have arrived."""
        while self._workers is not None and self._workers.waiting():
            self.receive()

    def skip_before(self, stream: int) -> None:
        """Lets the workers skip the batches of streams with lower numbers; they finish the sample they are at."""
        if not self._closed and self._pid == os.getpid():  # a fork's feed has no workers, but the same memory
            self._wanted_from = self._wanted[0] = stream

    def begin_pass(self) -> None:
        """Begins the measurements of a pass."""
        self.watched_pass = WatchedPass(is_first=self.watched_pass is None)

    @property
    def worker_bytes(self) -> int:
        """The memory that one more process would take."""
        return _PROCESS_BYTES + (PREFETCH * self.ring.slot_bytes if self.ring is not None else 0)

    def prepare(self, layout: SampleLayout) -> None:
        """Makes the ring, now that the layout of a sample is known."""
        options = self.options
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
        assert self._sender is not None, "a worker gave the layout"
        self.layout, self.ring, self._sender.layout = layout, ring, layout

    def add_slots(self, ring: Ring, count: int) -> None:
        """Adds slots to the ring: all of them at first, later one in place of one that cannot be used again."""
        num_bytes = max(1, ring.slot_bytes)
        self._control.extend(control_bytes(count, self.options.plan.batch_size) - control_bytes(0, 0))
        first = self._memory.extend(num_bytes * count)
        for offset in range(first, first + num_bytes * count, num_bytes):
            ring.add(self._memory.view(offset, num_bytes))

    def take_back(self, asked: Asked) -> None:
        """Makes the slot free of a batch that is not in it, or not handed over."""
        if asked.result is not None and asked.result.kept and self.ring is not None:
            self.add_slots(self.ring, 1)  # the transform refers to it, and expects no change
        elif asked.slot is not NO_SLOT and self.ring is not None:
            self.ring.give_back(asked.slot)

    def busy_s(self) -> float | None:
        """Returns the seconds that the workers ran or wanted a CPU so far; None: there are none, or one died."""
        return busy_processes_s(self._workers.pids) if self._workers is not None else None

    def close(self, *, kill: bool = False) -> None:
        """Ends the workers; they finish the sample they are at, unless killed. Batches handed over stay valid."""
        self.skip_before(self._streams + 1)
        workers, self._workers, self._sender, self._closed = self._workers, None, None, True
        if workers is not None and self._pid == os.getpid():  # a forked process has none of its own
            self.threads.drop()
            self.threads.close()
            workers.end(kill=kill)
        if self._pins is not None:
            self._pins.close()
        self.layout = self.ring = None
        self._asked.clear()
        self._memory.close()
        self._control.close()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_workers", None) is not None and not _is_finalizing():
            self.close()


class ProcessStream(BatchStream):
    """Batches in the order planned, made ahead of their use by a feed's workers. An iterator for one thread."""

    def __init__(
        self, feed: ProcessFeed, coming: Iterator[Group], number: int, *, timed: bool, ahead: FetchAhead | None
    ) -> None:
        self.resources = ExitStack()  # closed with the stream
        self._feed = feed
        self._ahead = ahead  # of the workers, which do not fetch
        self.coming = coming
        self.number = number
        self.timed = timed
        self._pid = os.getpid()
        self._closed = False
        self._patience = feed.options.patience()
        self.under_way: deque[Asked] = deque()  # what this stream asked for and did not hand over, in order
        self.done_one: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ask()

    def __next__(self) -> FilledBatch:
        """Returns the next batch; raises a worker's error, with the sample's name and the worker's traceback."""
        feed = self._feed
        watch = feed.watched_pass if feed.watched else None
        ready, asked_s = watch is not None and self.ready(), time.perf_counter()
        try:
            if (result := self._result()) is None:
                self.close()
                raise StopIteration
            asked = self.under_way.popleft()
            self._ask()
            batch = self._hand_over(asked, result)
        except StopIteration:
            raise
        except BaseException as error:
            self._give_up(error)
            raise
        if watch is not None:
            watch.note(0.0 if ready else time.perf_counter() - asked_s, feed.busy_s)
        return batch

    def _ask(self) -> None:
        """Asks for batches ahead."""
        while not self.done_one.empty():  # only who waits needs them
            self.done_one.get()
        # Before the layout is known only for that.
        most = PREFETCH * self._feed.num_workers if self._feed.ring is not None else 1
        while not self._closed and len(self.under_way) < most:
            asked = self._feed.ask(self)
            if asked is None:
                return
            self.under_way.append(asked)

    def _result(self) -> BatchResult | None:
        """Waits for the result of the next batch; None: the stream is over. Raises a worker's error."""
        feed, patience = self._feed, self._patience

        def left() -> float:
            seconds = patience.left(self._describe)
            if self._ahead is None:
                return seconds
            groups = [asked.group for asked in self.under_way if asked.group is not None]
            self._ahead.hurry([(group.epoch, group.whole.step) for group in groups])
            return min(seconds, _HURRY_S)

        patience.begin()
        while not self._closed:
            if not self.under_way:
                feed.receive(None, left)
                self._ask()
                continue
            asked = self.under_way[0]
            while not asked.done:
                patience.get(self.done_one, self._describe)
            if asked.error is not None:
                raise asked.error
            if asked.group is None:
                return None
            if (result := asked.result) is None:
                feed.receive(asked, left)
            elif result.error is not None or result.skipped:
                raise result.error or WorkerError("a worker skipped a batch that is waited for: a fault of fastload's")
            elif result.slot >= 0:
                return result
            else:
                assert result.layout is not None, "it was asked for"
                self.under_way.clear()
                self.coming = chain([asked.group], self.coming)
                feed.prepare(result.layout)
            self._ask()
        return None

    def _describe(self) -> str:
        return self._feed.describe(self.under_way[0] if self.under_way else None, self._patience.named)

    def ready(self) -> bool:
        return self.depth() > 0

    def depth(self) -> int:
        if self._closed or self._pid != os.getpid():
            return 0
        try:
            self._feed.receive_all()
            self._ask()
        except BaseException as error:  # Ctrl-C between a result and its slot
            self._give_up(error)
            raise
        return sum(1 for _ in takewhile(_is_made, self.under_way))

    def _give_up(self, error: BaseException) -> None:
        self._closed = True
        if isinstance(error, WorkerTimeoutError):
            self._feed.threads.left_behind = True  # it may hang, too
        self._feed.close(kill=isinstance(error, (WorkerError, KeyboardInterrupt)))

    def close(self) -> None:
        """Ends the stream; the workers skip the rest of it, and stay."""
        closed, self._closed = self._closed, True
        try:
            if not closed and self._pid == os.getpid():
                self._feed.skip_before(self.number + 1)
                self._feed.leave(self)
                self.under_way.clear()
        finally:
            self._feed.threads.close_resources(self.resources)

    def _hand_over(self, asked: Asked, result: BatchResult) -> FilledBatch:
        feed, ring, layout = self._feed, self._feed.ring, self._feed.layout
        assert ring is not None and layout is not None and asked.group is not None, "a batch is made in a slot"
        planned = asked.group.whole
        if result.damaged and (replace_damaged := feed.options.replace_damaged) is not None:
            planned = replace_damaged(planned, result.damaged) or planned
        if result.layout is None:
            batch = ring.hand_over(asked.slot, planned, ring.slot_bytes)
            cut = batch.arrays if batch.memory is not None else split(batch.arrays, asked.group)[0]
            batch.arrays = layout.in_axes_of_sample(cut)
            batch.form, batch.extra, batch.drawn = layout.form, result.fields, asked.drawn
        else:
            feed.take_back(asked)
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
        batch.work = result.work
        return batch


def _is_made(asked: Asked) -> bool:
    """Whether its batch can be handed over, without waiting and without an error."""
    result = asked.result
    return asked.done and asked.error is None and result is not None and result.error is None and result.slot >= 0
