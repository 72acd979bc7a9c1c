"""Batches made by worker processes: for datasets and transforms in Python, which threads would make one at a time.

    plan --order--> worker: samples, laid into a slot of shared memory --slot number--> training process

The processes, their queues, seeds and end are those of torch's `DataLoader`; what crosses between them is a slot's
number, never a tensor. torch's own hand-over copies a batch into fresh shared memory and maps it anew on the other
side, which takes many times as long as reading it. Batches that do not fit their slot still go that way.
"""

from __future__ import annotations

import logging
import multiprocessing.process
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pickle import PicklingError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from fastload.busy import busy_processes_s
from fastload.errors import OptionError, WorkerError
from fastload.inputs import Input
from fastload.plan import PlannedBatch
from fastload.read.readahead import announced_ahead
from fastload.ring import LOOSE_BYTES, SLACK, FilledBatch, Ring, Slot
from fastload.samples import SampleLayout, as_array
from fastload.shared_memory import SharedMemory
from fastload.threads import Announce
from fastload.torch_workers import GUARD, WorkerLoader, Workers, end_with_parent, worker_context
from fastload.worker import Beside, Failure, Filler, Loose, Order, Timed

_log = logging.getLogger("fastload")

PREFETCH = 2
"""Batches that each worker has to do, the one in work included."""

Seed = Callable[[PlannedBatch], int]


@dataclass
class _Desk:
    """What the orders of all epochs share."""

    layout: SampleLayout | None = None
    ring: Ring | None = None
    under_way: deque[tuple[PlannedBatch, Slot]] = field(default_factory=deque)


class _Orders(Sampler[Order]):
    """The sampler of the `DataLoader`: hands out what the current epoch put here."""

    def __init__(self) -> None:
        self.coming: Iterator[Order] = iter(())

    def __iter__(self) -> Iterator[Order]:
        return self.coming


def _orders(desk: _Desk, planned: Iterator[PlannedBatch], seed: Seed, timed: bool) -> Iterator[Order]:
    assert not desk.under_way, "an epoch that was left early ends its pool"
    asked = False
    for batch in planned:
        while desk.ring is None:
            # Its first sample says what a slot has to hold; until then the other orders only keep their places.
            yield Order(-1, batch.rows[:0] if asked else batch.rows[:1], seed(batch), None)
            asked = True
        slot = desk.ring.take()
        assert slot is not None, "there are more slots than batches under way or in the user's hands"
        desk.under_way.append((batch, slot))
        yield Order(slot.number, batch.rows, seed(batch), desk.layout, timed)


class WorkerPool:
    """Worker processes and the ring they fill; they stay from one finished epoch to the next.

    Args:
        source: what makes samples.
        batch_size: samples in a batch.
        workers: processes, 1 or more.
        names: of the fields, when the dataset names them.
        on_layout: told what samples are like, before the first batch; may refuse.
        pin: makes memory readable for a device, when batches go to one, and returns what undoes that.
        warns_of_many: whether torch may warn of more workers than CPUs, which are right where workers wait.
    """

    def __init__(
        self,
        source: Input,
        batch_size: int,
        *,
        workers: int,
        names: Sequence[str] | None,
        on_layout: Callable[[SampleLayout], None],
        pin: Callable[[NDArray[np.uint8]], Callable[[], None] | None] | None = None,
        warns_of_many: bool = True,
    ) -> None:
        self.workers = workers
        self._batch_size = batch_size
        self._num_slots = SLACK + PREFETCH * workers + 1
        self._on_layout = on_layout
        self._pin = pin
        self._unpin: list[Callable[[], None]] = []
        self._memory = SharedMemory()
        self._orders = _Orders()
        self._workers: Workers | None = None
        with warnings.catch_warnings():
            if not warns_of_many:
                warnings.filterwarnings("ignore", "This DataLoader will create")
            self._loader = WorkerLoader(
                Filler(source, self._memory, batch_size, names),
                batch_size=None,
                sampler=self._orders,
                num_workers=workers,
                collate_fn=_as_it_is,
                prefetch_factor=PREFETCH,
                worker_init_fn=end_with_parent,
                persistent_workers=True,
                multiprocessing_context=worker_context(),
                generator=torch.Generator(),  # the user's global one is not drawn from
            )
        self.desk = _Desk()
        self.warned = False
        self._closed = False
        self._pid = os.getpid()

    def begin(self, planned: Iterator[PlannedBatch], seed: Seed, *, timed: bool = False) -> Workers:
        """Begins an epoch; starts the workers if they do not wait from the last one."""
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
        self._orders.coming = _orders(self.desk, planned, seed, timed)
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
        """Makes the ring, now that it is known what a sample is."""
        self._on_layout(layout)
        self.desk.layout = layout
        self.desk.ring = Ring(layout.slot_fields(self._batch_size), 0)
        self.add_slots(self._num_slots)

    def add_slots(self, count: int) -> None:
        """More slots, at first and in place of one that cannot be used again."""
        ring = self.desk.ring
        assert ring is not None, "it is known what a slot holds"
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
        """Whether an epoch can begin: all workers are there, or none was started."""
        return not self._closed and (self._workers is None or not self._workers.dead())

    def busy_s(self) -> float | None:
        """Seconds that the workers were on a CPU or wanted one, since they began; None: there are none, or one died."""
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
        self.desk = _Desk()
        self._memory.close()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_workers", None) is not None and not _is_finalizing():
            self.close()


class ProcessStream:
    """Batches in the order planned, made ahead of their use by the pool's workers. An iterator for one thread.

    Args:
        pool: of workers; nobody else uses it meanwhile.
        planned: batches to make, in order.
        seed: of a batch.
        announce: is told the rows of batches before they are read.
        ahead: batches announced beyond those that workers have to do.
        manual_release: slots return by `FilledBatch.release`, not by reference counts, and are never copied.
        timed: whether batches say what they cost.
    """

    def __init__(
        self,
        pool: WorkerPool,
        planned: Iterator[PlannedBatch],
        seed: Seed,
        *,
        announce: Announce | None = None,
        ahead: int = 0,
        manual_release: bool = False,
        timed: bool = False,
    ) -> None:
        self._pool = pool
        self._manual = manual_release
        self._exhausted = False
        self._results: Workers | None = None
        self._pid = os.getpid()
        try:
            if announce is not None:
                planned = announced_ahead(planned, lambda batch: announce(batch.rows), ahead)
            self._results = pool.begin(planned, seed, timed=timed)
        except BaseException:
            pool.close(kill=True)
            raise

    def __iter__(self) -> ProcessStream:
        return self

    def __next__(self) -> FilledBatch:
        """The next batch; raises what a worker met, with the sample's name and the worker's traceback."""
        if self._results is None:
            raise StopIteration
        try:
            while True:
                result, work = next(self._results), None
                if isinstance(result, Timed):
                    result, work = result
                if isinstance(result, Failure):
                    raise result.error
                if isinstance(result, SampleLayout):
                    self._pool.prepare(result)
                elif result is not None:
                    batch = self._hand_over(result)
                    batch.work = work
                    return batch
        except StopIteration:
            self._exhausted = True
            self.close()
            raise
        except BaseException as error:
            self._results = None
            self._pool.close(kill=isinstance(error, (WorkerError, KeyboardInterrupt)))
            raise

    def ready(self) -> bool:
        """Whether next() would most likely give a batch without waiting."""
        return self._results is not None and self._results.waiting()

    def depth(self) -> int | None:
        """Batches that have arrived, or None where the system does not say."""
        return self._results.num_waiting() if self._results is not None else 0

    def close(self) -> None:
        """Ends the epoch; the workers stay for the next one only if this one was finished."""
        results, self._results = self._results, None
        if results is not None and not self._exhausted and self._pid == os.getpid():
            self._pool.close()

    def _hand_over(self, result: int | Beside | Loose) -> FilledBatch:
        ring, layout = self._pool.desk.ring, self._pool.desk.layout
        assert ring is not None and layout is not None, "a batch is made in a slot"
        planned, slot = self._pool.desk.under_way.popleft()
        if isinstance(result, Loose):
            if result.kept:
                # The transform holds a part of it, and expects that to stay as it is.
                self._pool.add_slots(1)
            else:
                ring.give_back(slot)
            if not result.layout.fits(layout):
                self._warn(result, layout)
            return self._with_facts(_from_loose(result, planned))
        assert slot.number == (result if isinstance(result, int) else result.slot), "results come in order"
        beside = result.fields if isinstance(result, Beside) else {}
        num_bytes = ring.slot_bytes
        if self._manual:
            arrays = _as_presented(layout.in_axes_of_sample(slot.arrays))
            batch = FilledBatch(arrays, planned, num_bytes, layout.form, beside, _ring=ring, _slot=slot)
            return self._with_facts(batch)
        # Labels that a user collects over an epoch must not hold slots.
        arrays = {name: _own(array) for name, array in ring.lend_or_copy(slot).items()}
        arrays = _as_presented(layout.in_axes_of_sample(arrays))
        return self._with_facts(FilledBatch(arrays, planned, num_bytes, layout.form, beside))

    def _with_facts(self, batch: FilledBatch) -> FilledBatch:
        """What only the plan knows, where it is asked for; on a device, always."""
        facts = {"row": batch.planned.rows, "valid": batch.planned.valid}
        batch.arrays.update({name: fact for name, fact in facts.items() if self._manual or name in batch.arrays})
        return batch

    def _warn(self, result: Loose, layout: SampleLayout) -> None:
        if self._pool.warned:
            return
        self._pool.warned = True
        expected = ", ".join(f"{leaf.dtype} {leaf.shape}" if leaf else "other" for leaf in layout.leaves)
        warnings.warn(
            f"the samples' shapes or dtypes change from batch to batch: ({expected}) at first, now {result.found}. "
            f"Such batches go through torch's own shared memory, as in a plain DataLoader: collated, copied and mapped "
            f"anew each time (0.4 times the images/s for images of 116 kB). One shape for all samples avoids it.",
            stacklevel=2,
        )


def _from_loose(result: Loose, planned: PlannedBatch) -> FilledBatch:
    arrays, beside = {}, {}
    for name, value in zip(result.layout.form.names, result.fields, strict=True):
        array = as_array(value)
        if array is None:
            beside[name] = value
        else:
            arrays[name] = array
    num_bytes = sum(array.nbytes for array in arrays.values())
    return FilledBatch(_as_presented(arrays), planned, num_bytes, result.layout.form, beside)


def _as_presented(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Images as (B, H, W, C), as every `HostBatch` has them."""
    return {name: array.transpose(0, 2, 3, 1) if name == "images" else array for name, array in arrays.items()}


def _own(array: NDArray[Any]) -> NDArray[Any]:
    return array.copy() if array.nbytes <= LOOSE_BYTES else array


def _as_it_is(item: Any) -> Any:
    return item
