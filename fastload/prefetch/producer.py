"""`Producer`: makes a loader's batches by its recipe, epoch after epoch, ahead of their use, in order, on their device.

    free slot -> pool (threads or processes) -> oldest work -> side stream -> Work

    epoch 0 [batches ...............]                 epoch 1 [batches ...
    made    [...............][first ones of epoch 1]  [...

The choice of what is made next is a guess: the next epoch, as far as the loop will go. A wrong guess wastes reads.

On the CPU a batch is the slot's memory itself. For CUDA each slot (pinned memory, uint8) is copied on a side stream,
and the transforms that need nothing of the loop run behind the copy:

    side stream      [copy 1][1][copy 2][2]      [copy 3][3]
    compute stream              [step 1            ][step 2          ]
    slot                     ^ 1 free   ^ 2 free

- Where threads fill the slots, a thread of its own does this (`DeviceThread`), some batches ahead; where processes do,
  the loop's: the copy of batch n + 1 begins before batch n is handed over, if it is there, else at the next call.
- The compute stream waits for the event behind a batch; the host waits for nothing while slots are free.
- A pinned slot never leaves this module. It goes back to the pool after its event, queried at each batch.
- Device tensors come from torch's caching allocator, on the side stream; `record_stream` tells it that the compute
  stream reads them, so that memory a user lets go is not written to by the next copy while a kernel still reads it.

CUDA is reached through a `Backend`, so that the rules above are tested without a GPU.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from fastload.device import Backend
from fastload.errors import WorkerTimeoutError
from fastload.plan import EpochPlan, PlannedBatch, rank_share
from fastload.prefetch.loader_plan import LoaderPlan, default_workers
from fastload.prefetch.pool import Pool, Run
from fastload.prefetch.process_pool import ProcessPool
from fastload.prefetch.recipe import Recipe
from fastload.prefetch.ring import SLOTS_IN_COPY, Slot
from fastload.prefetch.row_cache import RowCache, empty_cache
from fastload.prefetch.stages.from_cache import FillCache
from fastload.prefetch.stages.gather import GatherRows
from fastload.prefetch.stages.transform import Augmentation
from fastload.prefetch.thread_pool import ThreadPool
from fastload.prefetch.waiting import Patience
from fastload.prefetch.work import Epochs, Where, Work
from fastload.system.threads import ShortSwitchInterval
from fastload.timing.probe import Probe, span

# Read at a time while a cache is filled: three slots of so many bytes, and one a thread, are pinned meanwhile.
_LOAD_BYTES = 16 * 2**20

_log = logging.getLogger("fastload")

READY_ON_DEVICE = 2
"""Batches that are brought to the device ahead of the loop."""

# More than can be waited for at a time.
_EVENTS = SLOTS_IN_COPY + READY_ON_DEVICE + 2


class Producer(Iterator[Work]):
    """The batches of the epoch that was begun last, in order, on their device. An iterator for one thread.

    A pass is expected to take all batches of its epoch, or, if the last two passes were left after the same number of
    batches, as many: then no more of each epoch are made, and the next epoch's first ones follow. If it goes on beyond,
    the rest of its epoch is made from there on.

    Args:
        options: of the loader.
        recipe: of its batches.
        slots_in_copy: most slots kept while copies run, 1 or more. The ring has at least two more, so that it can fill
            one and keep one ready meanwhile.

    Attributes:
        options: of the loader.
        pool: makes the batches; None: it was not opened.
    """

    def __init__(self, options: LoaderPlan, recipe: Recipe, *, slots_in_copy: int = SLOTS_IN_COPY) -> None:
        assert slots_in_copy >= 1, "a batch in copy holds a slot"
        self.options, self._recipe, self._slots_in_copy = options, recipe, slots_in_copy
        self._side = recipe.at(Where.SIDE_STREAM)
        self._used_once = options.echo == 1
        self.pool: Pool | None = None
        self._pool_of_parent: Pool | None = None
        self._pid = os.getpid()
        self._probe: Probe | None = None
        self._run: Run | None = None  # makes one epoch after another; None: nothing is made
        self._ahead: EpochPlan | None = None  # the epoch whose first batch it gives next; None: it is amid one
        self._stop = 0  # batches of each epoch that it gives; 0: all
        self._left_after = 0  # batches after which the last pass was left, and after which the next one will be
        self._usual_end = 0  # 0: at the epoch's end
        self._switches: ShortSwitchInterval | None = None  # while a pass runs
        self._split: deque[Work] = deque()  # left of the work that was taken last
        self._copying: deque[tuple[Any, Slot]] = deque()  # slots that the device may still read, oldest first
        self._begun: deque[Work] = deque()  # with a copy that has begun, not handed over yet: two at most
        self._device: DeviceThread | None = None  # begins the copies; None: the loop does
        # Used in turn, where each is waited for once: by then those before it were.
        self._events: deque[Any] = deque()

    def open(self, workers: int | None = None) -> int:
        """Opens the pool, if there is none that can be used; returns the bytes of a cache that was filled for it.

        `workers`: processes, where they are to be other than in the recipe.
        """
        options, recipe = self.options, self._recipe
        if self._pid != os.getpid():
            # Kept, though of no use: freeing device memory needs the device, which a forked child cannot use.
            self._pool_of_parent = self.pool if options.cache is not None else None
            self._forget()
            self.pool, self._pid = None, os.getpid()
        pool = self.pool
        if pool is not None and (not pool.usable or workers not in (None, pool.number)):
            self.close()
        if self.pool is not None:
            return 0
        cache = load_cache(options) if options.cache is not None else None
        if options.data.runs_python:
            self.pool = ProcessPool(options, replace(recipe, workers=workers or recipe.workers))
        else:
            self.pool = ThreadPool(options, recipe, cache)
        return cache.nbytes if cache is not None else 0

    def begin(self, plan: EpochPlan, probe: Probe | None = None) -> None:
        """Begins a pass over a plan's epoch, or the rest of it, whether it was made ahead or not.

        The probe takes note of when batches are there; None: nobody measures.
        """
        assert self.pool is not None, "it is open"
        is_ahead = self._ahead == plan and (probe is None) == (self._probe is None)
        self._plan, self._probe, self._taken = plan, probe, 0
        if self._run is None or not is_ahead:
            self._read_on(0, self._usual_end)
        self._ahead = None
        if self.pool.short_switches:
            self._switches = ShortSwitchInterval()
        self.pool.begin_pass()

    def read(self, epochs: Epochs) -> None:
        """Begins to make the batches of epochs, and ends what was made before."""
        assert self.pool is not None, "it is open"
        self.stop()
        self._run = run = self.pool.begin(epochs, timed=self._probe is not None)
        if self.options.backend is not None and self.pool.by_threads:
            run.loop_waits = False
            me = weakref.ref(self)
            self._device = DeviceThread(lambda: _begin_of(me), run.end_waits, READY_ON_DEVICE)

    # No generator: its frame would keep the last batch alive, and its memory busy, while the user works on it.
    def __next__(self) -> Work:
        """Returns the next batch; raises the error of whoever made it, with its traceback."""
        if self._stop > 0 and self._taken == self._stop:
            self._read_on(self._taken)
        backend = self.options.backend
        work = self._filled() if backend is None else self._copied(backend)
        self._taken += 1
        return work

    _taken = 0

    def depth(self) -> int | None:
        """Returns how many batches lie ready; None: not known."""
        if self._run is None:
            return None
        return self._ready() + (self._device.ready() if self._device is not None else 0)

    def end(self) -> None:
        """Ends the pass. Unless it took what was expected, nothing more is made."""
        taken, planned = self._taken, self._plan.num_steps
        left_after = taken if taken < planned else 0
        self._usual_end, self._left_after = left_after if left_after == self._left_after else 0, left_after
        if self._switches is not None:
            self._switches.end()
        if taken == planned or taken == self._stop > 0:
            self._ahead = self._plan.following
        else:
            self.stop()

    def stop(self) -> None:
        """Throws away what was made ahead: waits for copies that still run, and gives back all slots."""
        run, backend = self._run, self.options.backend
        self._end_device_thread()
        try:
            if backend is not None and self._pid == os.getpid():  # a forked child has no device
                self._begun.clear()
                self._give_back(backend)
        finally:
            self._forget()
            if run is not None and self.pool is not None:
                self.pool.leave(run)

    def close(self) -> None:
        """Throws away what was made ahead, and closes the pool. Batches handed over stay valid."""
        self.stop()
        if self.pool is not None and self._pid == os.getpid():
            self.pool.close()
            self.pool = None

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # A device thread that waits does not keep this alive, and would wait for ever.
        if (getattr(self, "_copying", None) or getattr(self, "_device", None)) and not _is_finalizing():
            self.stop()

    def _end_device_thread(self) -> None:
        device, self._device = self._device, None
        if device is not None and not device.stop() and self.pool is not None:
            self.pool.leave_behind()  # it hangs in the middle of a copy

    def _forget(self) -> None:
        self._run, self._ahead, self._device, self._stop = None, None, None, 0
        self._split.clear()

    def _read_on(self, done: int, stop: int = 0) -> None:
        """Begins to make the epoch after its first `done` batches, and those after it; `stop`: so many of each."""
        self.read(_epochs_from(self._plan, self.options, done, stop or None))
        self._stop = stop

    def _filled(self) -> Work:
        """Returns the next batch in its slot."""
        if self._split:
            return self._split.popleft()
        run, pool = self._run, self.pool
        if run is None or pool is None or run.closed:
            raise StopIteration
        try:
            pool.ask(run)
            work = pool.first(run)
            if work is not None:
                self._split.extend(pool.hand_over(run, work))
                del work
                return self._split.popleft()
        except BaseException as error:
            self._split.clear()
            pool.fail(run, error)
            raise
        pool.leave(run)
        raise StopIteration

    def _ready(self) -> int:
        """Returns how many batches `_filled` would give without waiting, and without an error."""
        run, pool = self._run, self.pool
        if run is None or pool is None or run.closed:
            return 0
        return len(self._split) + pool.depth(run)

    def _copied(self, backend: Backend) -> Work:
        """Returns the next batch on its device."""
        try:
            return self._next_copied(backend)
        except BaseException as error:
            if isinstance(error, WorkerTimeoutError) and self.pool is not None:
                self.pool.leave_behind()  # whoever makes the batch may hang
            self._end_device_thread()
            self._begun.clear()
            self._give_back(backend)
            raise

    def _next_copied(self, backend: Backend) -> Work:
        probe, run, pool = self._probe, self._run, self.pool
        if self._device is not None and run is not None and pool is not None:
            found = self._device.take(run.patience, lambda: pool.describe(run))
            if found is None:
                raise StopIteration
            self._begun.append(found)
        elif not self._begun:
            self._begin_next(backend)
            if not self._begun:
                raise StopIteration
        if self._device is None and len(self._copying) < self._slots_in_copy and self._ready():
            self._begin_next(backend)
        if probe is not None:
            probe.in_copy = len(self._begun) - 1 if self._device is None else self._device.ready()
            probe.note_ready()
        work = self._begun.popleft()
        backend.hand_over(work.event, work.memory)
        if probe is not None:
            probe.note_copied()
        return work

    def _begin_next(self, backend: Backend) -> None:
        work = self._begin(backend)
        if work is not None:
            self._begun.append(work)

    def _begin(self, backend: Backend) -> Work | None:
        """Begins to bring the next batch to the device; None: there are no more."""
        while self._copying and backend.finished(self._copying[0][0]):
            self._release()
        self._give_back(backend, leave=self._slots_in_copy - 1)  # out of slots: the only wait of the host
        try:
            work = self._filled()
        except StopIteration:
            return None
        try:
            with span("copy"), backend.side_stream():
                for stage in self._side:
                    stage.run(work)
        finally:
            # Also when memory ran out half way: what was begun still reads the slot.
            again = self._events.popleft() if len(self._events) > _EVENTS else None
            work.event = backend.record(again)
            self._copying.append((work.event, work.slot))
            if self._used_once:
                self._events.append(work.event)
        return work

    def _give_back(self, backend: Backend, leave: int = 0) -> None:
        """Waits for copies, the oldest first, until so many are left, and gives back their slots."""
        while len(self._copying) > leave:
            backend.synchronize(self._copying[0][0])
            self._release()

    def _release(self) -> None:
        _, slot = self._copying.popleft()
        if self.pool is not None:
            self.pool.release(slot)


def load_cache(options: LoaderPlan) -> RowCache:
    """Returns a cache of the rows of a rank's share, or of all, with the fields asked for, read in the file's order.

    Raises:
        CacheError: the memory is not there.
        FileChangedError: the file was written to or truncated.
    """
    location, backend = options.cache, options.backend
    assert location is not None and backend is not None, "rows are cached for a device"
    begun_s = time.perf_counter()
    data, positions = options.packed, options.plan.rows
    if options.keeps_share:
        rank, world_size = options.share
        own = rank_share(len(positions), rank=rank, world_size=world_size)
        positions = positions[own.start : own.stop]
    rows = data.rows_in_file(positions)
    cache = empty_cache(data.dataset, rows, location, backend)
    names = ", ".join(data.dataset.fields)
    what = f'cache="{location}": {len(rows):,} rows of {data.name} ({names}; {cache.nbytes:,} bytes)'
    _log.info("%s are being read into memory", what)
    batch_rows = max(1, min(len(rows), _LOAD_BYTES * len(rows) // max(1, cache.nbytes)))
    plan = replace(options.plan, world_size=1, batch_size=batch_rows, shuffle=False, fixed_pieces=0)
    in_file_order = replace(options, plan=plan, cache=None, transforms=(), echo=1)
    parts = (np.asarray(rows[first : first + batch_rows], np.int64) for first in range(0, len(rows), batch_rows))
    planned = (PlannedBatch(part, np.ones(len(part), np.bool_), len(part), n) for n, part in enumerate(parts))
    fill = FillCache(data.dataset, cache, backend, batch_rows)
    gather = GatherRows(data.dataset, [name for name, _, _ in data.dataset.layout()], into_slot=True)
    workers = options.workers or default_workers(data, batch_rows, computing=data.ragged, to_device=True)
    no_transforms = Augmentation((), 0, 0, 0, {})
    recipe = Recipe((gather, fill), no_transforms, workers=workers, threads=workers, ahead=workers)
    producer = Producer(in_file_order, recipe)
    try:
        with closing(producer):
            producer.open()
            producer.read([(0, planned)])
            for _ in producer:
                pass
    except BaseException:
        if cache.pins is not None:
            cache.pins.close()
        raise
    took_s = time.perf_counter() - begun_s
    _log.info("%s were read in %.1f s (%.2f GB/s)", what, took_s, cache.nbytes / max(took_s, 1e-9) / 1e9)
    return replace(cache, damaged=frozenset(fill.damaged))


def _begin_of(reference: weakref.ref[Producer]) -> Callable[[], Work | None] | None:
    """Returns what begins a producer's next copy; None: it is gone."""
    producer = reference()
    backend = producer.options.backend if producer is not None else None
    return functools.partial(producer._begin, backend) if producer is not None and backend is not None else None


def _epochs_from(
    plan: EpochPlan | None, options: LoaderPlan, done: int, stop: int | None
) -> Iterator[tuple[int, Iterator[PlannedBatch]]]:
    """Yields the epochs' numbers, and their batches. No method: who reads ahead must not keep who is read for."""
    while plan is not None:
        planned = plan.batches(options.share.rank, done, stop)
        if (selected := options.data.selected) is not None:
            planned = (batch.selected(selected, options.data.mentions) for batch in planned)
        yield plan.epoch, planned
        plan, done = plan.following, 0


_CLOSE_S = 10.0

_living: weakref.WeakSet[DeviceThread] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """Ends all threads: a daemon thread that the interpreter ends within a call of torch aborts the process."""
    for thread in list(_living):
        thread.stop()


class DeviceThread:
    """Calls a function for work after work, up to some ahead of those that were taken.

    Args:
        make: returns the function, or None if its owner is gone; the function returns a work, None at the end. So the
            thread does not keep the owner alive while it waits.
        end_waits: lets a call that waits return, and all that come.
        ahead: most works that were made and not taken.
    """

    def __init__(
        self, make: Callable[[], Callable[[], Work | None] | None], end_waits: Callable[[], None], ahead: int
    ) -> None:
        self._end_waits, self._pid = end_waits, os.getpid()
        self._made: queue.SimpleQueue[Work | BaseException | None] = queue.SimpleQueue()
        self._room, self._stopping = threading.Semaphore(ahead), threading.Event()
        arguments = (make, self._made, self._room, self._stopping)
        self._thread = threading.Thread(target=_work, args=arguments, name="fastload-device", daemon=True)
        self._thread.start()
        _living.add(self)

    def take(self, patience: Patience, describe: Callable[[], str]) -> Work | None:
        """Waits for the next work and takes it; None: there are no more. Raises what came instead.

        Raises WorkerTimeoutError when that takes too long.
        """
        patience.begin()
        while True:
            with suppress(queue.Empty):
                found = self._made.get(timeout=patience.left(describe))
                break
        self._room.release()
        if not isinstance(found, BaseException):
            return found
        try:
            raise found
        finally:
            del found  # else the error would keep this frame, and the frame the error

    def ready(self) -> int:
        """Returns how many works can be taken without waiting."""
        return self._made.qsize()

    def stop(self) -> bool:
        """Ends the thread, and returns whether it ended: not if it hangs, or is the caller."""
        if self._pid != os.getpid():  # a forked process has no such thread, which may have held a lock
            return True
        self._stopping.set()
        self._end_waits()
        self._room.release()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)
        return not self._thread.is_alive()


def _work(
    make: Callable[[], Callable[[], Work | None] | None],
    made: queue.SimpleQueue[Work | BaseException | None],
    room: threading.Semaphore,
    stopping: threading.Event,
) -> None:
    """Makes works until there are no more; the body of the thread."""
    while True:
        room.acquire()
        function = make()
        if stopping.is_set() or function is None:
            return
        try:
            work = function()
        except BaseException as error:  # noqa: BLE001  # whatever it is, the training loop has to hear of it
            made.put(error)
            return
        made.put(work)
        if work is None:
            return
        del work, function
