"""Batches made by worker processes: for datasets and transforms in Python, which threads would run one at a time.

    free slot --thread: plans a batch--> request --worker: writes samples to the slot--> slot number --> training thread

Processes, queues, seeds and shutdown work as in torch's `DataLoader`, but only a slot's number crosses between them,
never a tensor. torch's own hand-over copies a batch into fresh shared memory and maps it anew on the other
side, which takes many times as long as reading it. Batches that do not fit their slot still go that way.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import takewhile
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fastload.device import Pins
from fastload.distributed.ranks import local_world_size
from fastload.errors import WorkerError, WorkerTimeoutError
from fastload.plan import PlannedBatch, batch_seed
from fastload.prefetch.auto_workers import PassMeter
from fastload.prefetch.loader_plan import LoaderPlan, most_pinned
from fastload.prefetch.lookahead import announced
from fastload.prefetch.pool import Coming, FillThreads, Run
from fastload.prefetch.recipe import Recipe
from fastload.prefetch.ring import SLACK, Ring, Slot, SlotField
from fastload.prefetch.sample_layout import SampleLayout, as_array, check_samples, warn_of_change
from fastload.prefetch.sample_worker import (
    TRIED,
    BatchRequest,
    BatchResult,
    Filler,
    control_bytes,
    place_in_batch,
    requested_rows,
    requested_seeds,
    sample_at,
)
from fastload.prefetch.shared_memory import SharedMemory
from fastload.prefetch.stages.gather import fact_fields
from fastload.prefetch.stages.transform import DrawNumbers
from fastload.prefetch.torch_workers import DeadWorkerError, WorkerProcesses, how_ended, start_workers
from fastload.prefetch.waiting import doing, is_stopped, state_of
from fastload.prefetch.work import Epochs, Orders, Stage, Where, Work, coalesced, fields_on_cpu, split
from fastload.system.machine import available_memory, busy_processes_s, which_end
from fastload.timing.probe import WorkerInfo
from fastload.transforms.draws import Draws

# Workers whose stacks a message shows.
_MOST_SHOWN = 4


_USER_CODE = 0x75736572  # a stream of draws that no transform's index reaches


def sample_seeds(planned: PlannedBatch, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns a seed for the Python code that makes each sample, int64 (B,), from 0 to 2**32 - 2.

    As a transform's draws they depend on seed, epoch, row, and how many times the row came before: so a sample is the
    same in whatever batch, on whatever rank. Seeding takes some 8 us a sample, therefore only where batches of any
    number of ranks are to be equal.
    """
    draws = Draws(seed, epoch, planned.rows, times=planned.times)
    return draws.stream(_USER_CODE).integers(0, 2**32 - 1)


NO_SLOT = Slot(-1, np.empty(0, np.uint8), {})
"""The slot of a request for a layout."""


class Sender(Stage):
    """Sends requests to workers; a stage of the thread that plans, which must not keep the pool alive."""

    where = Where.THREAD
    why = "processes make the samples"

    def __init__(self, workers: WorkerProcesses, control: SharedMemory, options: LoaderPlan) -> None:
        self._workers, self._control, self._options = workers, control, options
        self._told: set[int] = set()  # workers that know the layout
        self.sending = threading.RLock()  # held while a request is sent, and while workers are replaced
        self.layout: SampleLayout | None = None  # of the slots

    def replace(self, workers: WorkerProcesses, works: Iterable[Work]) -> None:
        """Sends requests to these workers from now on, and those again that were sent before."""
        with self.sending:
            self._workers = workers
            self._told.clear()
            for one in works:
                if one.sent:
                    self._send(one)

    def latest(self, works: Iterable[Work], worker: int) -> Work | None:
        """Returns which of the requests a worker began last; results of those before may not have arrived."""
        begun = [one for one in works if one.worker == worker and one.sent and self.place(one) >= 0]
        return begun[-1] if begun else None

    def place(self, work: Work) -> int:
        """Returns at which place of a batch its worker is, see `place_in_batch`."""
        return int(place_in_batch(self._control, work.slot.number, self._options.batch_size)[0])

    def run(self, work: Work) -> None:
        """Sends the request for a work that was planned."""
        with self.sending:
            self._send(work)

    def _send(self, work: Work) -> None:
        slot, rows, plan, size = work.slot.number, work.rows, self._options.plan, self._options.batch_size
        place_in_batch(self._control, slot, size)[0] = -1
        seed = batch_seed(plan.seed, work.epoch, self._options.share.rank, work.whole.step)
        request = BatchRequest(slot, seed, work.run, work.timed)
        if slot < 0:
            # With some more, in case the first one is damaged and is to be skipped.
            request = request._replace(rows=rows[: 16 if self._options.skip_damaged else 1])
        else:
            requested_rows(self._control, slot, size)[: len(rows)] = rows
            request = request._replace(num_rows=len(rows), spare=work.whole.spare, seeds=plan.elastic)
            if plan.elastic:
                seeds = sample_seeds(work.whole, plan.seed, work.epoch)
                requested_seeds(self._control, slot, size)[: len(rows)] = seeds
            if work.worker not in self._told:
                request = request._replace(layout=self.layout)
                self._told.add(work.worker)
        self._workers.ask(work.worker, work.number, request)
        work.sent = True

    def describe(self, works: Mapping[int, Work], waits_for: Work | None, name_of: Callable[[int], str]) -> str:
        """Returns sentences on what a batch waits for, of those that were asked for, by number; None: for any of them.

        They name the sample that its worker is at, and say what the worker is doing.
        """
        if waits_for is not None and not waits_for.sent:
            stack = doing(waits_for.thread) if waits_for.thread is not None else ""
            return f"The thread that plans batches has not sent the request for it.\n\n{stack}"
        # A worker carries out its requests in order.
        at_work = {one.worker: one for one in reversed(list(works.values())) if one.result is None and one.sent}
        stopped = [n for n in at_work if is_stopped(self._workers.pids[n])]
        shown = sorted({waits_for.worker, *stopped}) if waits_for is not None else sorted(at_work)
        return "\n\n".join(self._describe(at_work[n], name_of) for n in shown[:_MOST_SHOWN] if n in at_work)

    def _describe(self, work: Work, name_of: Callable[[int], str]) -> str:
        pid, rows, place = self._workers.pids[work.worker], work.rows, self.place(work)
        rows = rows if work.slot is not NO_SLOT else rows[:1]
        state, stacks = state_of(pid), self._workers.stacks
        what = "has not begun the batch."
        if place >= 0:
            where = sample_at(place, rows, name_of, at_once=self._options.data.at_once)
            what = f"is at {where}, {min(place + 1, len(rows))} of {len(rows)} in its batch."
        elif not stacks.answered_by(pid):
            what = "is still starting, and imports its modules."
        said = f"Worker process {pid} {what} {state}".rstrip()
        stack = "" if state else stacks.of(pid)  # who is stopped would answer later
        return f"{said}\n\n{stack}" if stack else said


_log = logging.getLogger("fastload")

_HURRY_S = 1.0  # after which, while a batch is waited for, it is looked at again what the workers lack
PREFETCH = 2
"""Batches requested of each worker at a time, the one in work included."""

# A worker process: Python, torch and the dataset; a bare one takes 180 MB.
_PROCESS_BYTES = 256 * 2**20


class ProcessPool:
    """Worker processes make the samples of any map-style dataset, or run a packed one's Python transform; see `Pool`.

    The processes and the ring they fill stay from one epoch and run to the next. What is left of a run that was closed
    early they skip.
    """

    by_threads: ClassVar[bool] = False  # their results come to the thread that asks for them
    short_switches = False

    def __init__(self, options: LoaderPlan, recipe: Recipe) -> None:
        # Of the slots; None: not known yet.
        self.layout: SampleLayout | None = None
        self.ring: Ring | None = None
        self._warned = False  # of changing samples
        self.options, self._recipe, self.number = options, recipe, recipe.workers
        self._draws = next((stage for stage in recipe.stages if isinstance(stage, DrawNumbers)), None)
        self._runs = 0
        self._wanted_from = 0  # runs with lower numbers have ended
        self._num_asked = 0
        self._asked: dict[int, Work] = {}  # by number, works without a result, in order
        self._refused: dict[int, str] = {}  # rows that ended a worker, also alone, and how; others take their places
        self.pass_meter: PassMeter | None = None  # None: none has begun
        self._pins = Pins(options.backend) if options.backend is not None else None
        self._memory = SharedMemory()
        self._control = SharedMemory()  # see `Filler`
        self._control.extend(control_bytes(0, 0))
        self._wanted = self._control.view(0, 8).view(np.int64)
        self._workers: WorkerProcesses | None = None
        self._sender: Sender | None = None  # when there are workers
        self.threads = FillThreads(1)  # plans batches and sends the requests for them
        self._closed = False
        self._pid = os.getpid()

    @property
    def usable(self) -> bool:
        """Whether a run can begin: all workers are alive, or none was started."""
        hangs = self._closed or self.threads.left_behind
        return not hangs and (self._workers is None or self._workers.all_alive())

    @property
    def worker_info(self) -> WorkerInfo:
        """The worker processes, and the batches that they have to do."""
        number, ratio = self.number, self.options.data.compression_ratio()
        return WorkerInfo(number, PREFETCH * number, by_threads=False, compression_ratio=ratio)

    def begin(self, epochs: Epochs, *, timed: bool) -> Run:
        """Begins to make batches; starts the workers if there are none.

        Raises:
            OptionError: this process may not have workers, or the dataset cannot be sent to them.
            WorkerError: the process that starts them ended.
        """
        options = self.options
        batch_bytes = options.batch_size * options.data.stored_bytes
        self._runs += 1
        with ExitStack() as resources:
            under_way = PREFETCH * self.number
            groups, ahead = announced(options, coalesced(epochs, 1), batch_bytes, resources, under_way=under_way)
            coming = Coming(groups)
            self.skip_before(self._runs)
            try:
                if self._workers is None:
                    self._workers = start_workers(self._filler(), self.number)
                    self._sender = Sender(self._workers, self._control, options)
                assert self._sender is not None, "there are workers"
                self._receive_all()  # so that it is known which workers are idle
                draws = [self._draws] if self._draws is not None else []
                orders = Orders(coming, [self._sender, *draws])
                run = Run(self._runs, coming, orders, options.patience(), timed=timed, ahead=ahead)
                self.ask(run)
            except BaseException:
                self.close(kill=True)
                raise
            run.resources = resources.pop_all()
            return run

    def ask(self, run: Run) -> None:
        """Asks the workers for batches ahead."""
        while not run.orders.done_one.empty():  # only who waits needs them
            run.orders.done_one.get()
        # Before the layout is known only for that.
        most = PREFETCH * self.number if self.ring is not None else 1
        while not run.closed and len(run.under_way) < most:
            work = self._ask_one(run)
            if work is None:
                return
            run.under_way.append(work)

    def _ask_one(self, run: Run) -> Work | None:
        """Asks a worker for a run's next batch; while the layout is unknown, for the layout of its first sample.

        Returns None if no slot is free before some results have come.
        """
        slot = self.ring.take() if self.ring is not None else NO_SLOT
        if slot is None:
            return None
        load, number = [0] * self.number, self._num_asked + 1
        for one in self._asked.values():
            load[one.worker] += 1
        # The idlest; among equals the one asked longest ago.
        worker = min(range(len(load)), key=lambda one: (load[one], (one - number) % len(load)))
        work = Work(slot, run.orders, number=number, run=run.number, worker=worker, timed=run.timed)
        self._num_asked, self._asked[number] = number, work
        self.threads.put(work)
        return work

    def first(self, run: Run) -> Work | None:
        """Waits for the next work; raises a worker's error, with the sample's name and the worker's traceback."""
        watch = self.pass_meter if self.options.auto_workers else None
        ready, asked_s = watch is not None and self.depth(run) > 0, time.perf_counter()
        work = self._finished(run)
        if work is None:
            return None
        run.under_way.popleft()
        self.ask(run)
        if watch is not None:
            watch.note(0.0 if ready else time.perf_counter() - asked_s, self.busy_s)
        return work

    def _finished(self, run: Run) -> Work | None:
        """Waits until the next work is finished; None: the run is over."""
        patience, describe = run.patience, functools.partial(self.describe, run)

        def left() -> float:
            seconds = patience.left(describe)
            if run.ahead is None:
                return seconds
            planned = [(work.epoch, work.planned.step) for work in run.under_way if work.planned is not None]
            run.ahead.hurry(planned)
            return min(seconds, _HURRY_S)

        patience.begin()
        while not run.closed:
            if not run.under_way:
                self._receive(None, left)
                self.ask(run)
                continue
            work = run.under_way[0]
            while not work.done:
                patience.get(run.orders.done_one, describe)
            if work.error is not None:
                raise work.error
            if work.planned is None:
                return None
            if (result := work.result) is None:
                self._receive(work, left)
            elif result.error is not None or result.skipped:
                raise result.error or WorkerError("a worker skipped a batch that is waited for: a fault of fastload's")
            elif result.slot >= 0:
                return work
            else:
                assert result.layout is not None, "it was asked for"
                run.under_way.clear()
                run.coming.put_back((work.epoch, list(work.members)))
                self._prepare(result.layout)
            self.ask(run)
        return None

    def hand_over(self, run: Run, work: Work) -> list[Work]:
        """Returns the batch of a work whose result has arrived, with row numbers and valid flags."""
        ring, layout, result, backend = self.ring, self.layout, work.result, self.options.backend
        assert ring is not None and layout is not None, "a batch is made in a slot"
        planned = work.whole
        if result.damaged and (replace_damaged := self.options.replace_damaged) is not None:
            work.planned = planned = replace_damaged(planned, result.damaged) or planned
        if result.layout is None:
            arrays = dict(work.slot.arrays) if backend is not None else ring.hand_over(work.slot)
            arrays = arrays if backend is not None else split(arrays, [planned])[0]
            work.arrays = layout.in_axes_of_sample(arrays)
            work.form, work.extra, work.copied = layout.form, dict(result.fields), [ring.slot_bytes]
        else:
            self._take_back(work)
            work.slot, work.in_one_piece, work.drawn = NO_SLOT, False, None
            if not self._warned and not result.layout.fits(layout):
                self._warned = True
                warn_of_change(layout, result.found)
            known = {name: as_array(value) for name, value in result.fields.items()}
            work.arrays = {name: array for name, array in known.items() if array is not None}
            work.extra = {name: value for name, value in result.fields.items() if name not in work.arrays}
            work.form, work.copied = result.layout.form, [sum(array.nbytes for array in work.arrays.values())]
        if "images" in work.arrays:  # as every batch has them: (B, H, W, C)
            work.arrays["images"] = work.arrays["images"].transpose(0, 2, 3, 1)
        _add_facts(work, always=backend is not None)
        work.costs = [result.work] if result.work is not None else []
        if backend is None:
            work.fields, work.arrays = fields_on_cpu(work.arrays), {}
        return [work]

    def describe(self, run: Run) -> str:
        """Returns sentences on what the next work waits for; see `Sender.describe`."""
        assert self._sender is not None, "a run's workers are alive"
        return self._sender.describe(self._asked, run.under_way[0] if run.under_way else None, run.patience.named)

    def leave_behind(self) -> None:
        """Notes that a thread hangs."""
        self.threads.left_behind = True

    def release(self, slot: Slot) -> None:
        """Makes a slot free that was copied to a device."""
        if slot is not NO_SLOT and self.ring is not None:
            self.ring.give_back(slot)

    def depth(self, run: Run) -> int:
        """Returns how many batches have been made, one after the other."""
        if run.closed or run.pid != os.getpid():
            return 0
        try:
            self._receive_all()
            self.ask(run)
        except BaseException as error:  # Ctrl-C between a result and its slot
            self.fail(run, error)
            raise
        return sum(1 for _ in takewhile(_is_made, run.under_way))

    def leave(self, run: Run) -> None:
        """Ends a run; the workers skip the rest of it, and stay. Slots are taken back now, or with their results."""
        closed, run.closed = run.closed, True
        try:
            if not closed and run.pid == os.getpid():
                self.skip_before(run.number + 1)
                for work in self.threads.drop():
                    work.done = True
                settled = self.threads.settle(run.under_way, run.orders.done_one)
                for work in run.under_way if settled else ():
                    if not work.sent:
                        del self._asked[work.number]
                    if not work.sent or work.result is not None:
                        self._take_back(work)
                run.under_way.clear()
        finally:
            self.threads.close_resources(run.resources)

    def fail(self, run: Run, error: BaseException) -> None:
        """Ends a run after an error, and the workers with it."""
        run.closed = True
        if isinstance(error, WorkerTimeoutError):
            self.threads.left_behind = True  # it may hang, too
        self.close(kill=isinstance(error, (WorkerError, KeyboardInterrupt)))
        self.threads.close_resources(run.resources)

    def _receive(self, waits_for: Work | None = None, left: Callable[[], float] = lambda: math.inf) -> None:
        """Waits for the result of any request; the slots of those that an earlier run made become free.

        Raises WorkerError if the worker that this waits for died, or None: any of them, unless the rows that ended it
        are to be skipped: then new workers make the missing ones, and nothing was received. `left` as in
        `WorkerProcesses.result`.
        """
        assert self._workers is not None, "a run's workers are alive"
        try:
            number, result = self._workers.result(waits_for.worker if waits_for is not None else None, left)
        except DeadWorkerError as error:
            assert self._sender is not None, "it died at a request"
            with self._sender.sending:
                self._succeed(error)
            return
        work = self._asked.pop(number)
        if isinstance(result, Exception):
            result = BatchResult(work.slot.number, error=result)
        work.result = result
        if work.run < self._wanted_from:
            self._take_back(work)

    def _filler(self) -> Filler:
        options, memory = self.options, (self._memory, self._control)
        batch_size, refused = options.batch_size, self._refused
        return Filler(options.data, *memory, batch_size, skip_damaged=options.skip_damaged, refused=refused)

    def _succeed(self, error: DeadWorkerError) -> None:
        """Starts new workers after some died, if those rows are to be skipped that end also a process of their own.

        Raises WorkerError, with the samples that they were at, if they are not, or there are none.
        """
        assert self._workers is not None and self._sender is not None, "a run's workers died"
        said, found, data = list[str](), dict[int, str](), self.options.data
        dead = [self._sender.latest(self._asked.values(), number) for number in self._workers.dead_numbers]
        self._workers.end(kill=True)
        for work in dead:
            if work is None:
                continue
            place, planned = self._sender.place(work), work.whole
            rows = ((planned.without(self._refused, world_size=1) if self._refused else None) or planned).rows
            # Up to what it was at; what it had made may have ended it, too, only later.
            until = rows[: place + 1].tolist() if work.slot is not NO_SLOT else rows[:1].tolist()
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
        self._workers = start_workers(self._filler(), self.number)
        self._sender.replace(self._workers, self._asked.values())

    def _ended(self, rows: list[int]) -> str:
        """Returns how a new worker ended that made these samples; "" if it did not."""
        alone = start_workers(self._filler(), 1)
        try:
            alone.ask(0, 0, BatchRequest(TRIED, 0, self._runs, rows=np.array(rows, np.int64)))
            alone.result(0, lambda: math.inf)
        except DeadWorkerError:
            return how_ended(alone.dead[0])
        finally:
            alone.end(kill=True)
        return ""

    def _receive_all(self) -> None:
        """Takes note of the results that have arrived."""
        while self._workers is not None and self._workers.waiting():
            self._receive()

    def skip_before(self, run: int) -> None:
        """Lets the workers skip the batches of runs with lower numbers; they finish the sample they are at."""
        if not self._closed and self._pid == os.getpid():  # a fork's pool has no workers, but the same memory
            self._wanted_from = self._wanted[0] = run

    def begin_pass(self) -> None:
        """Begins the measurements of a pass."""
        self.pass_meter = PassMeter(is_first=self.pass_meter is None)

    @property
    def worker_bytes(self) -> int:
        """The memory that one more process would take."""
        return _PROCESS_BYTES + (PREFETCH * self.ring.slot_bytes if self.ring is not None else 0)

    def _prepare(self, layout: SampleLayout) -> None:
        """Makes the ring, now that the layout of a sample is known."""
        options, transforms = self.options, self._recipe.augmentation.transforms
        if transforms:
            check_samples(transforms, options.data.name, layout)
        if options.backend is not None:
            words = list[SlotField]()
            if self._draws is not None:
                self._draws.spec = layout.images
                words = self._draws.own_fields(options.batch_size)
            facts = fact_fields(options.batch_size)
            layout = layout._replace(more=(*words, *(one for one in facts if one.name not in layout.form.names)))
        fields = layout.slot_fields(options.batch_size)
        pin = self._pins.add_if_possible if self._pins is not None else None
        ring = Ring(fields, 0, pin, manual_release=pin is not None)
        slots = SLACK + PREFETCH * self.number + 1
        if pin is not None:
            # Fewer batches are under way where that many would pin too much memory; one a process, at least.
            fitting = most_pinned(available_memory() // local_world_size()) // max(1, ring.slot_bytes)
            slots = max(SLACK + self.number + 1, min(slots, fitting))
        self._add_slots(ring, slots)
        assert self._sender is not None, "a worker gave the layout"
        self.layout, self.ring, self._sender.layout = layout, ring, layout

    def _add_slots(self, ring: Ring, count: int) -> None:
        """Adds slots to the ring: all of them at first, later one in place of one that cannot be used again."""
        num_bytes = max(1, ring.slot_bytes)
        self._control.extend(control_bytes(count, self.options.batch_size) - control_bytes(0, 0))
        first = self._memory.extend(num_bytes * count)
        for offset in range(first, first + num_bytes * count, num_bytes):
            ring.add(self._memory.view(offset, num_bytes))

    def _take_back(self, work: Work) -> None:
        """Makes the slot free of a batch that is not in it, or not handed over."""
        if work.result is not None and work.result.kept and self.ring is not None:
            self._add_slots(self.ring, 1)  # the transform refers to it, and expects no change
        elif work.slot is not NO_SLOT and self.ring is not None:
            self.ring.give_back(work.slot)

    def busy_s(self) -> float | None:
        """Returns the seconds that the workers ran or wanted a CPU so far; None: there are none, or one died."""
        return busy_processes_s(self._workers.pids) if self._workers is not None else None

    def close(self, *, kill: bool = False) -> None:
        """Ends the workers; they finish the sample they are at, unless killed. Batches handed over stay valid."""
        self.skip_before(self._runs + 1)
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


def _add_facts(work: Work, *, always: bool) -> None:
    """Writes row numbers and valid flags to their places in the slot, or adds them: `always`, or if it has others.

    In the slot they go to a device with the samples, in one copy.
    """
    for name, fact in (("row", work.whole.rows), ("valid", work.whole.valid)):
        place = work.arrays.get(name)
        fits = place is not None and (place.ndim, place.dtype) == (1, fact.dtype) and len(place) >= len(fact)
        if place is not None and fits and always and work.in_one_piece:
            place[: len(fact)] = fact
        elif always or place is not None:
            work.arrays[name] = fact


def _is_made(work: Work) -> bool:
    """Whether its batch can be handed over, without waiting and without an error."""
    result = work.result
    return work.done and work.error is None and result is not None and result.error is None and result.slot >= 0
