"""Batches made by worker processes: for datasets and transforms in Python, which threads would run one at a time.

    planned batch --request--> worker: samples, written to a slot of shared memory --slot number--> training process

The processes, their queues, seeds and end are those of torch's `DataLoader`, but what crosses between them is a slot's
number, never a tensor. torch's own hand-over copies a batch into fresh shared memory and maps it anew on the other
side, which takes many times as long as reading it. Batches that do not fit their slot still go that way.
"""

from __future__ import annotations

import logging
import multiprocessing.process
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pickle import PicklingError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from fastload.errors import OptionError, WorkerError
from fastload.plan import PlannedBatch
from fastload.prefetch.auto_workers import WorkerWatch
from fastload.prefetch.inputs import Input
from fastload.prefetch.ring import SLACK, FilledBatch, Ring, Slot
from fastload.prefetch.sample_layout import SampleLayout, as_array
from fastload.prefetch.sample_worker import BatchRequest, BatchResult, Filler
from fastload.prefetch.shared_memory import SharedMemory
from fastload.prefetch.thread_stream import Ahead
from fastload.prefetch.torch_workers import GUARD, WorkerLoader, Workers, end_with_parent, worker_context
from fastload.read.readahead import announced_ahead
from fastload.system.machine import busy_processes_s

_log = logging.getLogger("fastload")

PREFETCH = 2
"""Batches requested of each worker at a time, the one in work included."""

Seed = Callable[[int], int]
"""Returns the seed of the batch of a step, for random numbers that Python code draws."""


@dataclass
class PoolState:
    """The state that the requests of all epochs share; `under_way` are the requested batches, in order."""

    layout: SampleLayout | None = None
    ring: Ring | None = None
    under_way: deque[tuple[PlannedBatch, Slot]] = field(default_factory=deque)


class _Requests(Sampler[BatchRequest]):
    """The sampler of the `DataLoader`: yields the requests that the current epoch put here."""

    def __init__(self) -> None:
        self.coming: Iterator[BatchRequest] = iter(())

    def __iter__(self) -> Iterator[BatchRequest]:
        return self.coming


def _requests(state: PoolState, planned: Iterator[PlannedBatch], seed: Seed, timed: bool) -> Iterator[BatchRequest]:
    """Yields a request for each planned batch; the first ones ask what a slot has to hold."""
    assert not state.under_way, "an epoch that was left early ends its workers"
    asked = False
    for batch in planned:
        while state.ring is None:
            # The batch's first sample says what a slot has to hold; until then other requests only keep their turn.
            yield BatchRequest(-1, batch.rows[:0] if asked else batch.rows[:1], seed(batch.step), None)
            asked = True
        slot = state.ring.take()
        assert slot is not None, "there are more slots than batches under way or in the user's hands"
        state.under_way.append((batch, slot))
        yield BatchRequest(slot.number, batch.rows, seed(batch.step), state.layout, timed)


class SampleWorkers:
    """Worker processes and the ring they fill; they stay from one finished epoch to the next.

    Args:
        source: the data whose samples they make.
        batch_size: samples in a batch.
        workers: processes, 1 or more.
        on_layout: called with what samples are like, before the first batch; may refuse them.
        pin: makes memory readable for a device, when batches go to one, and returns what undoes that.
        warns_of_many: whether torch may warn of more workers than CPUs, which are right where workers wait.

    Attributes:
        number, state: of the processes; of the requests.
        warned: whether it was warned of changing samples.
    """

    def __init__(
        self,
        source: Input,
        batch_size: int,
        *,
        workers: int,
        on_layout: Callable[[SampleLayout], None],
        pin: Callable[[NDArray[np.uint8]], Callable[[], None] | None] | None = None,
        warns_of_many: bool = True,
    ) -> None:
        self.number = workers
        self._batch_size = batch_size
        self._num_slots = SLACK + PREFETCH * workers + 1
        self._on_layout = on_layout
        self._pin = pin
        self._unpin: list[Callable[[], None]] = []
        self._memory = SharedMemory()
        self._requests = _Requests()
        self._workers: Workers | None = None
        with warnings.catch_warnings():
            if not warns_of_many:
                warnings.filterwarnings("ignore", "This DataLoader will create")
            self._loader = WorkerLoader(
                Filler(source, self._memory, batch_size),
                batch_size=None,
                sampler=self._requests,
                num_workers=workers,
                collate_fn=_as_it_is,
                prefetch_factor=PREFETCH,
                worker_init_fn=end_with_parent,
                persistent_workers=True,
                multiprocessing_context=worker_context(),
                generator=torch.Generator(),  # the user's global one is not drawn from
            )
        self.state = PoolState()
        self.warned = False
        self._closed = False
        self._pid = os.getpid()

    def begin(self, planned: Iterator[PlannedBatch], seed: Seed, *, timed: bool = False) -> Workers:
        """Begins an epoch and returns its results; starts the workers if they do not wait from the last one.

        Raises:
            OptionError: this process may not have workers, or the dataset cannot be sent to them.
            WorkerError: the process that starts them ended.
        """
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
        self._requests.coming = _requests(self.state, planned, seed, timed)
        try:
            with warnings.catch_warnings():
                # The error below says it better.
                warnings.filterwarnings("ignore", "Got pickle error")
                workers = iter(self._loader)
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
        assert isinstance(workers, Workers), "WorkerLoader makes them"
        self._workers = workers
        return workers

    def prepare(self, layout: SampleLayout) -> None:
        """Makes the ring, now that the layout of a sample is known."""
        self._on_layout(layout)
        self.state.layout = layout
        self.state.ring = Ring(layout.slot_fields(self._batch_size), 0, manual_release=self._pin is not None)
        self.add_slots(self._num_slots)

    def add_slots(self, count: int) -> None:
        """Adds slots to the ring: all of them at first, later one in place of one that cannot be used again."""
        ring = self.state.ring
        assert ring is not None, "the layout of a slot is known"
        num_bytes = max(1, ring.slot_bytes)
        first = self._memory.extend(num_bytes * count)
        for offset in range(first, first + num_bytes * count, num_bytes):
            memory = self._memory.view(offset, num_bytes)
            if self._pin is not None:
                unpin = self._pin(memory)
                if unpin is None:
                    # Copies are right without, only slower: the driver stages them.
                    _log.warning("%d bytes of shared memory could not be pinned (`ulimit -l`?)", num_bytes)
                else:
                    self._unpin.append(unpin)
            ring.add(memory)

    @property
    def usable(self) -> bool:
        """Whether an epoch can begin: all workers are alive, or none was started."""
        return not self._closed and (self._workers is None or not self._workers.dead())

    def busy_s(self) -> float | None:
        """Returns the seconds that the workers ran or wanted a CPU so far; None: there are none, or one died."""
        return busy_processes_s(self._workers.pids) if self._workers is not None else None

    def close(self, *, kill: bool = False) -> None:
        """Ends the workers; they finish the sample they are at, unless killed. Batches handed over stay valid."""
        workers, self._workers, self._closed = self._workers, None, True
        if workers is not None and self._pid == os.getpid():  # a forked process has none of its own
            if kill or workers.dead():
                workers.kill()
            else:
                workers._shutdown_workers()
        self._loader._iterator = None
        while self._unpin:
            self._unpin.pop()()
        self.state = PoolState()
        self._memory.close()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_workers", None) is not None and not _is_finalizing():
            self.close()


class ProcessStream:
    """Batches in the order planned, made ahead of their use by worker processes. An iterator for one thread.

    Args:
        workers: nobody else uses them meanwhile.
        planned: batches to make, in order.
        seed: returns the seed of a step's batch.
        ahead: announces rows of batches before they are requested; None: nobody does.
        watch: measures the workers; None: nobody does.
        timed: whether batches say what they cost.

    Attributes:
        resources: closed with the stream.
    """

    def __init__(
        self,
        workers: SampleWorkers,
        planned: Iterator[PlannedBatch],
        seed: Seed,
        *,
        ahead: Ahead | None = None,
        watch: WorkerWatch | None = None,
        timed: bool = False,
    ) -> None:
        self.resources = ExitStack()
        self._workers = workers
        self._watch = watch
        self._exhausted = False
        self._results: Workers | None = None
        self._pid = os.getpid()
        try:
            if ahead is not None:
                planned = announced_ahead(planned, lambda batch: ahead.announce(batch.rows), ahead.depth)
            self._results = workers.begin(planned, seed, timed=timed)
        except BaseException:
            workers.close(kill=True)
            raise

    def __iter__(self) -> ProcessStream:
        return self

    def __next__(self) -> FilledBatch:
        """Returns the next batch; raises a worker's error, with the sample's name and the worker's traceback."""
        if self._results is None:
            raise StopIteration
        ready = self._watch is not None and self.ready()
        asked_s = time.perf_counter()
        try:
            while True:
                result: BatchResult = next(self._results)
                if result.error is not None:
                    raise result.error
                if result.slot >= 0:
                    break
                if result.layout is not None:
                    self._workers.prepare(result.layout)
            batch = self._hand_over(result)
        except StopIteration:
            self._exhausted = True
            self.close()
            raise
        except BaseException as error:
            self._results = None
            self._workers.close(kill=isinstance(error, (WorkerError, KeyboardInterrupt)))
            raise
        if self._watch is not None:
            self._watch.note(ready=ready, waited_s=time.perf_counter() - asked_s)
        return batch

    def ready(self) -> bool:
        """Whether next() would most likely return a batch without waiting."""
        return self._results is not None and self._results.waiting()

    def depth(self) -> int | None:
        """Returns how many batches have arrived, or None where the system does not say."""
        return self._results.num_waiting() if self._results is not None else 0

    def close(self) -> None:
        """Ends the epoch; the workers stay for the next one only if this one was finished."""
        results, self._results = self._results, None
        try:
            if results is not None and not self._exhausted and self._pid == os.getpid():
                self._workers.close()
        finally:
            self.resources.close()

    def _hand_over(self, result: BatchResult) -> FilledBatch:
        ring, layout = self._workers.state.ring, self._workers.state.layout
        assert ring is not None and layout is not None, "a batch is made in a slot"
        planned, slot = self._workers.state.under_way.popleft()
        assert slot.number == result.slot, "results come in order"
        if result.layout is None:
            batch = ring.hand_over(slot, planned, ring.slot_bytes)
            batch.arrays = layout.in_axes_of_sample(batch.arrays)
            batch.form, batch.extra = layout.form, result.fields
        else:
            if result.kept:
                # The transform holds a part of the slot, and expects that to stay as it is.
                self._workers.add_slots(1)
            else:
                ring.give_back(slot)
            if not result.layout.fits(layout):
                self._warn(result, layout)
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

    def _warn(self, result: BatchResult, layout: SampleLayout) -> None:
        if self._workers.warned:
            return
        self._workers.warned = True
        expected = ", ".join(f"{leaf.dtype} {leaf.shape}" if leaf else "other" for leaf in layout.leaves)
        warnings.warn(
            f"the samples' shapes or dtypes change from batch to batch: ({expected}) at first, now {result.found}. "
            f"Such batches go through torch's own shared memory, as in a plain DataLoader: collated, copied and mapped "
            f"anew each time (0.4 times the images/s for images of 116 kB). One shape for all samples avoids it.",
            stacklevel=2,
        )


def _as_it_is(item: Any) -> Any:
    return item
