"""Batches made by worker processes: for datasets and transforms in Python, which threads would run one at a time.

    planned batch --request--> worker: samples, written to a slot of shared memory --slot number--> training process

The processes, their queues, seeds and end are those of torch's `DataLoader`, but what crosses between them is a slot's
number, never a tensor. torch's own hand-over copies a batch into fresh shared memory and maps it anew on the other
side, which takes many times as long as reading it. Batches that do not fit their slot still go that way.
"""

from __future__ import annotations

import multiprocessing.process
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pickle import PicklingError
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import Sampler

from fastload.device import Pins
from fastload.errors import OptionError, WorkerError
from fastload.plan import PlannedBatch, batch_seed
from fastload.prefetch.auto_workers import MeasuredPass
from fastload.prefetch.device_stage import BatchStream, Epochs
from fastload.prefetch.inputs import PackedInput
from fastload.prefetch.resolved import Resolved
from fastload.prefetch.ring import SLACK, FilledBatch, Ring, Slot
from fastload.prefetch.sample_layout import SampleLayout, as_array, check_samples
from fastload.prefetch.sample_worker import BatchRequest, BatchResult, Filler
from fastload.prefetch.shared_memory import SharedMemory
from fastload.prefetch.thread_stream import announced
from fastload.prefetch.torch_workers import GUARD, WorkerLoader, Workers, end_with_parent, worker_context
from fastload.system.machine import busy_processes_s
from fastload.timing.probe import WorkerInfo

PREFETCH = 2
"""Batches requested of each worker at a time, the one in work included."""

# A worker process: Python, torch and the dataset; a bare one takes 180 MB.
_PROCESS_BYTES = 256 * 2**20


class Planned(NamedTuple):
    """A batch that is to be made."""

    batch: PlannedBatch
    seed: int  # for random numbers that Python code draws
    stream: int  # number of the stream that asks for it


class Requests(Sampler[BatchRequest]):
    """The sampler of the `DataLoader`: yields a request for each batch, from one epoch and stream to the next."""

    def __init__(self) -> None:
        self.coming: Iterator[Planned] = iter(())
        self.timed = False
        # Of the slots; None: not known yet.
        self.layout: SampleLayout | None = None
        self.ring: Ring | None = None
        self.under_way: deque[tuple[Planned, Slot]] = deque()  # the requested batches, in order

    def __iter__(self) -> Iterator[BatchRequest]:
        while (planned := next(self.coming, None)) is not None:
            (rows, *_), seed, stream = planned
            asked = False
            while self.ring is None:
                # The batch's first sample says what a slot has to hold; until then other requests only keep their turn.
                yield BatchRequest(-1, rows[:0] if asked else rows[:1], seed, None, stream)
                asked = True
            slot = self.ring.take()
            assert slot is not None, "there are more slots than batches under way or in the user's hands"
            self.under_way.append((planned, slot))
            yield BatchRequest(slot.number, rows, seed, self.layout, stream, self.timed)


class ProcessFeed:
    """Worker processes make the samples of any map-style dataset, or run a packed one's Python transform.

    The processes and the ring they fill stay from one epoch and stream to the next. What is left of a stream that was
    closed early they skip.
    """

    short_switches = False  # see `ThreadFeed`

    def __init__(self, options: Resolved) -> None:
        self.requests = Requests()
        self.warned = False  # of changing samples
        self._options = options
        self.num_workers = options.num_workers
        self.watched = options.auto_workers  # whether waits are measured
        self._streams = 0
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
        with warnings.catch_warnings():
            if options.auto_workers:  # more workers than CPUs are right where they wait
                warnings.filterwarnings("ignore", "This DataLoader will create")
            self._loader = WorkerLoader(
                Filler(options.data, self._memory, self._wanted, options.plan.batch_size),
                batch_size=None,
                sampler=self.requests,
                num_workers=self.num_workers,
                collate_fn=_as_it_is,
                prefetch_factor=PREFETCH,
                worker_init_fn=end_with_parent,
                persistent_workers=True,
                multiprocessing_context=worker_context(),
                generator=torch.Generator(device="cpu"),  # the user's global one is not drawn from
            )
        self._closed = False
        self.exhausted = False  # whether the last stream came to an end
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
        number, seed, rank = self._streams, options.plan.seed, options.share.rank
        planned = (
            Planned(batch, batch_seed(seed, epoch, rank, batch.step), number)
            for epoch, batches in epochs
            for batch in batches
        )
        with ExitStack() as resources:
            self.requests.coming = announced(options, planned, lambda one: one.batch.rows, batch_bytes, resources)
            self.requests.timed = timed
            self.skip_before(number)
            try:
                if self._workers is None or self.exhausted:
                    self.exhausted = False
                    self._workers = self._begin()
            except BaseException:
                self.close(kill=True)
                raise
            return ProcessStream(self, self._workers, resources.pop_all(), number)

    def skip_before(self, stream: int) -> None:
        """Lets the workers skip the batches of streams with lower numbers; they finish the sample they are at."""
        if not self._closed and self._pid == os.getpid():  # a fork's feed has no workers, but the same memory
            self._wanted.view(0, 8).view(np.int64)[0] = stream

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
        ring = self.requests.ring
        return _PROCESS_BYTES + (PREFETCH * ring.slot_bytes if ring is not None else 0)

    def _begin(self) -> Workers:
        """Begins the requests of the `DataLoader`, and returns the workers with their results."""
        process = multiprocessing.process.current_process()
        if process.daemon:
            raise OptionError(
                "a FastLoader with worker processes cannot run in a worker of another loader, which may not have "
                "processes of its own. Use the dataset itself there, or a FastLoader without Python transforms."
            )
        if getattr(process, "_inheriting", False):
            raise OptionError(
                f"this process is importing the main script only to start a worker, and the script makes workers of "
                f"its own. {GUARD}"
            )
        try:
            # torch draws a seed, and would on the user's default device.
            with torch.device("cpu"), warnings.catch_warnings():
                # The error below says it better.
                warnings.filterwarnings("ignore", "Got pickle error")
                return cast(Workers, iter(self._loader))
        except ChildProcessError as error:
            raise OptionError(
                "this process was forked from one that had started a forkserver, which it cannot use. Call "
                'multiprocessing.set_start_method("fork", force=True) here, or make the loader where the server is.'
            ) from error
        except (EOFError, ConnectionError) as error:
            raise WorkerError(f"the process that starts the workers ended; what it wrote is above. {GUARD}") from error
        except (PicklingError, AttributeError, TypeError) as error:
            raise OptionError(
                f"the dataset or its transform cannot be sent to worker processes: {error}. Define functions and "
                f"classes at the top level of a module (no lambda), open files in the worker and not before, or call "
                f'multiprocessing.set_start_method("fork") first.'
            ) from error

    def prepare(self, layout: SampleLayout) -> None:
        """Makes the ring, now that the layout of a sample is known."""
        options = self._options
        if options.augmentation.transforms:
            check_samples(options.augmentation.transforms, options.data.name, layout)
        fields = layout.slot_fields(options.plan.batch_size)
        self.requests.layout = layout
        pin = self._pins.add_if_possible if self._pins is not None else None
        self.requests.ring = ring = Ring(fields, 0, pin, manual_release=pin is not None)
        self.add_slots(ring, SLACK + PREFETCH * self.num_workers + 1)

    def add_slots(self, ring: Ring, count: int) -> None:
        """Adds slots to the ring: all of them at first, later one in place of one that cannot be used again."""
        num_bytes = max(1, ring.slot_bytes)
        first = self._memory.extend(num_bytes * count)
        for offset in range(first, first + num_bytes * count, num_bytes):
            ring.add(self._memory.view(offset, num_bytes))

    def take_back(self, ring: Ring, slot: Slot, *, kept: bool) -> None:
        """Makes a slot free whose batch is not handed over; `kept`: the transform refers to it, expecting no change."""
        if kept:
            self.add_slots(ring, 1)
        else:
            ring.give_back(slot)

    def busy_s(self) -> float | None:
        """Returns the seconds that the workers ran or wanted a CPU so far; None: there are none, or one died."""
        return busy_processes_s(self._workers.pids) if self._workers is not None else None

    def close(self, *, kill: bool = False) -> None:
        """Ends the workers; they finish the sample they are at, unless killed. Batches handed over stay valid."""
        self.skip_before(self._streams + 1)
        workers, self._workers, self._closed = self._workers, None, True
        if workers is not None and self._pid == os.getpid():  # a forked process has none of its own
            workers.end(kill=kill)
        self._loader._iterator = None
        if self._pins is not None:
            self._pins.close()
        self.requests.layout = self.requests.ring = None
        self.requests.under_way.clear()
        self._memory.close()
        self._wanted.close()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_workers", None) is not None and not _is_finalizing():
            self.close()


class ProcessStream(BatchStream):
    """Batches in the order planned, made ahead of their use by a feed's workers. An iterator for one thread."""

    def __init__(self, feed: ProcessFeed, results: Workers, resources: ExitStack, number: int) -> None:
        self._feed = feed
        self._results: Workers | None = results
        self._resources = resources
        self._number = number
        self._watched = feed.watched
        self._pid = os.getpid()

    def __next__(self) -> FilledBatch:
        """Returns the next batch; raises a worker's error, with the sample's name and the worker's traceback."""
        if self._results is None:
            raise StopIteration
        feed = self._feed
        ready = self._watched and self.ready()
        asked_s = time.perf_counter()
        try:
            while True:
                self._skip_stale()
                result: BatchResult = next(self._results)
                if result.error is not None:
                    raise result.error
                if result.slot >= 0:
                    assert not result.skipped, "only what an earlier stream asked for is skipped"
                    break
                if result.layout is not None:
                    feed.prepare(result.layout)
            batch = self._hand_over(result)
        except StopIteration:
            feed.exhausted = True
            self.close()
            raise
        except BaseException as error:
            self._results = None
            feed.close(kill=isinstance(error, (WorkerError, KeyboardInterrupt)))
            raise
        if self._watched and not feed.has_begun:
            feed.busy_before_s = feed.busy_s()
        elif self._watched and not ready:
            feed.starved_s += time.perf_counter() - asked_s
        feed.has_begun = True
        return batch

    def _skip_stale(self, *, waiting: bool = True) -> None:
        """Takes back the slots of batches that an earlier stream asked for; `waiting`: also of those not done yet."""
        under_way, ring = self._feed.requests.under_way, self._feed.requests.ring
        while self._results is not None and under_way and under_way[0][0].stream != self._number:
            if not waiting and not self._results.waiting():
                return
            result: BatchResult = next(self._results)
            assert ring is not None, "a batch is made in a slot"
            self._feed.take_back(ring, under_way.popleft()[1], kept=result.kept)

    def ready(self) -> bool:
        try:
            self._skip_stale(waiting=False)
        except BaseException:  # a dead worker, or Ctrl-C between a result and its slot
            self._results = None
            self._feed.close(kill=True)
            raise
        return self._results is not None and self._results.waiting()

    def depth(self) -> int | None:
        return self._results.num_waiting() if self._results is not None else 0

    def close(self) -> None:
        """Ends the stream; the workers skip what is left of it, and stay."""
        results, self._results = self._results, None
        try:
            if results is not None and self._pid == os.getpid():
                self._feed.skip_before(self._number + 1)
                if self._feed.requests.ring is None:  # nobody knows yet what a slot has to hold
                    self._feed.close()
        finally:
            self._resources.close()

    def _hand_over(self, result: BatchResult) -> FilledBatch:
        requests = self._feed.requests
        ring, layout = requests.ring, requests.layout
        assert ring is not None and layout is not None, "a batch is made in a slot"
        (planned, _, _), slot = requests.under_way.popleft()
        assert slot.number == result.slot, "results come in order"
        if result.layout is None:
            batch = ring.hand_over(slot, planned, ring.slot_bytes)
            batch.arrays = layout.in_axes_of_sample(batch.arrays)
            batch.form, batch.extra = layout.form, result.fields
        else:
            self._feed.take_back(ring, slot, kept=result.kept)
            if not self._feed.warned and not result.layout.fits(layout):
                self._feed.warned = True
                expected = ", ".join(f"{leaf.dtype} {leaf.shape}" if leaf else "other" for leaf in layout.leaves)
                warnings.warn(
                    f"the samples' shapes or dtypes change from batch to batch: ({expected}) at first, now "
                    f"{result.found}. Such batches go through torch's own shared memory, as in a plain DataLoader: "
                    f"collated, copied and mapped anew each time (0.4 times the images/s for images of 116 kB). One "
                    f"shape for all samples avoids it.",
                    stacklevel=2,
                )
            known = {name: as_array(value) for name, value in result.fields.items()}
            arrays = {name: array for name, array in known.items() if array is not None}
            extra = {name: value for name, value in result.fields.items() if name not in arrays}
            num_bytes = sum(array.nbytes for array in arrays.values())
            batch = FilledBatch(arrays, planned, num_bytes, result.layout.form, extra)
        if "images" in batch.arrays:  # as every batch has them: (B, H, W, C)
            batch.arrays["images"] = batch.arrays["images"].transpose(0, 2, 3, 1)
        for name, fact in (("row", planned.rows), ("valid", planned.valid)):
            if ring.manual_release or name in batch.arrays:
                batch.arrays[name] = fact
        batch.work = result.work
        return batch


def _as_it_is(item: Any) -> Any:
    return item
