"""A pool of threads: they run the stages of a recipe, which fill slots ahead of their use.

    planned batches --coalesce--> works --threads fill slots of the ring--> works, in order --split--> batches

Small batches are filled several at a time into one slot, and handed over one by one: a batch of a few megabytes is
copied in less time than two threads need to wake each other, so that a thread that reads one batch at a time runs in
turn with the consumer and not at the same time (32x32x3, batches of 1024: 0.6 of a bare copy one at a time, 0.9
coalesced).
"""

from __future__ import annotations

import functools
import os
from contextlib import ExitStack
from itertools import takewhile
from typing import ClassVar

from fastload.errors import OptionError, WorkerTimeoutError
from fastload.prefetch.auto_workers import PassMeter
from fastload.prefetch.loader_plan import LoaderPlan, group_size
from fastload.prefetch.lookahead import announced
from fastload.prefetch.pool import Coming, FillThreads, Run
from fastload.prefetch.recipe import Recipe
from fastload.prefetch.ring import SLACK, SLOTS_IN_COPY, Ring, Slot, SlotField, slot_bytes
from fastload.prefetch.row_cache import RowCache
from fastload.prefetch.stages.gather import ToUserLayout, WhileHeld
from fastload.prefetch.waiting import doing, rows_in_words
from fastload.prefetch.work import Epochs, Layout, Opened, Orders, Parts, Where, Work, coalesced
from fastload.timing.probe import WorkerInfo

LEAST_PART = 8
"""Samples of a batch that are worth a part of their own."""


class ThreadPool:
    """Threads that make batches of a packed file, or of its rows in memory; see `Pool`."""

    by_threads: ClassVar[bool] = True
    pass_meter: PassMeter | None = None

    def __init__(self, options: LoaderPlan, recipe: Recipe, cache: RowCache | None = None) -> None:
        self._options, self._recipe, self.number = options, recipe, recipe.workers
        self._is_cached = cache is not None
        self._opened = Opened(options, recipe.workers, cache)
        self._stages, layout = recipe.at(Where.THREAD), Layout()
        for stage in recipe.stages:
            stage.open(self._opened)
        for stage in self._stages:
            layout = stage.output(layout)
        dataset, size, backend = options.packed.dataset, options.batch_size, options.backend
        batch_bytes = sum(SlotField(name, (size, *shape), dtype).nbytes for name, (shape, dtype) in layout.items())
        # To a device each batch is copied by itself, and its slot returns by itself. Where HDF5 decodes chunks, that
        # takes the time, and a group would only make its first batch wait for the last.
        linear = all(dataset.file.fields[name].linear for name, _, _ in dataset.layout())
        alone = backend is not None or not linear or any(stage.alone for stage in self._stages)
        self._group = 1 if alone else group_size(batch_bytes, options.plan.num_steps)
        # Several threads make the first batch, so it comes sooner. All batches cut like that took 1.1 to 1.2 times as
        # long, since a thread that waits for another one's part is idle.
        self._by_parts = len(list(takewhile(lambda stage: stage.divisible, self._stages)))
        cut = recipe.computes and all(stage.divisible for stage in self._stages if isinstance(stage, WhileHeld))
        self._parts = max(1, min(self.number, size // LEAST_PART)) if cut else 1
        fields = [SlotField(name, (self._group * size, *shape), dtype) for name, (shape, dtype) in layout.items()]
        pins, slots = self._opened.pins, SLACK + self.number
        if pins is not None:
            fields += [field for stage in self._stages for field in stage.own_fields(size)]
            slots = SLOTS_IN_COPY + 1 + recipe.ahead
        try:
            self.ring = Ring(fields, slots, pins.add_if_possible if pins else None, manual_release=pins is not None)
        except MemoryError as error:
            raise OptionError(
                f"batch_size={size:,}: {slots} batches of {slot_bytes(fields):,} bytes are read ahead, and the memory "
                f"for them is not there. Choose a smaller batch_size or fewer workers."
            ) from error
        self._present = next((stage for stage in self._stages if isinstance(stage, ToUserLayout)), None)
        if self._present is not None:
            self._present.ring = self.ring
        # Images of their own sizes lie in no slot.
        own_bytes = dataset.file.fields["images"].row_bytes if recipe.variable_size else 0
        self._item_bytes = self.ring.slot_bytes + size * own_bytes
        self.threads = FillThreads(recipe.threads)
        self._runs = 0
        self._run: Run | None = None  # the last one

    @property
    def usable(self) -> bool:
        """Whether another run can begin: no thread hangs."""
        return not self.threads.left_behind

    @property
    def short_switches(self) -> bool:
        """Whether the threads decode, compute or compare rows."""
        if self._is_cached:
            return False
        return self._recipe.decodes or self._recipe.computes or self._opened.reader.compares

    @property
    def worker_info(self) -> WorkerInfo:
        """The reading threads, and the batches in the ring."""
        if self._is_cached:
            return WorkerInfo(0, 0, by_threads=False)
        ratio = self._options.packed.compression_ratio()
        return WorkerInfo(self.number, self._group * len(self.ring.slots), by_threads=True, compression_ratio=ratio)

    def begin(self, epochs: Epochs, *, timed: bool) -> Run:
        """Begins to read batches of rows of the file, and ends the run before it."""
        options = self._options
        if timed != self.threads.timed:
            self.threads.close()
            self.threads = FillThreads(self.threads.number, timed=timed)
        if self._run is not None:
            self.leave(self._run)  # which may still wait for a thread, if it was collected by one
        with ExitStack() as resources:
            groups = coalesced(epochs, self._group)
            if not self._is_cached:
                groups, _ = announced(options, groups, self._item_bytes, resources, under_way=self.number)
            coming = Coming(groups)
            views = {name: dtype for stage in self._stages for name, dtype in stage.views.items()}
            orders = Orders(coming, self._stages, self._by_parts, replace_damaged=options.replace_damaged, views=views)
            self._runs += 1
            run = self._run = Run(self._runs, coming, orders, options.patience(), timed=timed, parts=self._parts)
            run.resources = resources.pop_all()
        self.ask(run)
        return run

    def begin_pass(self) -> None:
        """Does nothing: nobody asks how long threads wait."""

    def ask(self, run: Run) -> None:
        """Gives every free slot to a thread."""
        while not run.orders.done_one.empty():  # only who waits needs them
            run.orders.done_one.get()
        for _ in range(0 if run.closed else self.ring.collect()):
            work = Work(self.ring.free.popleft(), run.orders, parts=Parts(run.parts))
            run.parts = 1
            run.under_way.append(work)
            self.threads.put(work)

    def first(self, run: Run) -> Work | None:
        """Waits for the next work; see `Pool`."""
        if not run.under_way:
            return None  # it was left
        self._wait_for(run, run.under_way[0])
        if not run.under_way[0].done:
            return None  # the run is over
        if (error := run.under_way[0].error) is not None:
            raise error
        return run.under_way.popleft() if run.under_way[0].planned is not None else None

    def _wait_for(self, run: Run, work: Work) -> None:
        """Waits until a work is done; raises WorkerTimeoutError when that takes too long."""
        while not run.loop_waits and not (work.done or run.closed):
            run.orders.done_one.get()
        if work.done or run.closed:
            return
        run.patience.begin()
        try:
            while not work.done:
                run.patience.get(run.orders.done_one, functools.partial(self.describe, run))
        except WorkerTimeoutError:
            self.threads.left_behind = True
            raise

    def hand_over(self, run: Run, work: Work) -> list[Work]:
        """Returns the batches of a work: on the CPU as tensors, each with its part; else it, with all of its slot."""
        if self._present is None:
            work.arrays = dict(work.slot.arrays)  # copied as a whole, and cut there
            return [work]
        arrays = self.ring.hand_over(work.slot, work.lent)
        if arrays is not work.lent:
            self._present.split(work, arrays)
        if (cost := work.cost) is not None:  # that of presenting it, too
            for one in work.split:
                one.costs = [cost / len(work.split)]
        return work.split

    def describe(self, run: Run) -> str:
        """Returns sentences on what the next work waits for."""
        work = next(iter(list(run.under_way)), None)
        if work is None or work.thread is None:
            return "No thread has begun to read it: all are still at earlier batches."
        what = "plans the next batch."
        if work.planned is not None:
            rows = work.rows
            what = f"makes the batch that begins with {run.patience.named(int(rows[0]))} ({rows_in_words(rows)})."
        return f"A thread {what}\n\n{doing(work.thread)}"

    def leave_behind(self) -> None:
        """Notes that a thread hangs."""
        self.threads.left_behind = True

    def release(self, slot: Slot) -> None:
        """Makes a slot free that was copied to a device."""
        self.ring.give_back(slot)

    def depth(self, run: Run) -> int:
        """Returns how many batches are ready, one after the other."""
        filled = takewhile(lambda work: work.done and work.error is None, list(run.under_way))
        return sum(len(work.members) for work in filled)

    def leave(self, run: Run) -> None:
        """Takes back every slot that is not lent.

        Returns when no thread writes for this run any longer, or without waiting for one that hangs: then its slots
        are not used again, and stay its own.
        """
        run.closed = True
        try:
            if run.pid == os.getpid():  # a forked child has neither the threads nor their results
                for work in self.threads.drop():
                    work.done = True
                if self.threads.settle(run.under_way, run.orders.done_one):  # else when the next run begins
                    while run.under_way:
                        work = run.under_way.popleft()  # which has the arrays, until its slot is not lent any more
                        self.ring.give_back(work.slot)
        finally:
            self.threads.close_resources(run.resources)

    def fail(self, run: Run, error: BaseException) -> None:
        """Ends a run after an error."""
        self.leave(run)

    def close(self) -> None:
        """Ends the run and the threads, and closes the file; frees a cache. Batches handed over stay valid."""
        if self._run is not None:
            self.leave(self._run)
            self._run = None
        self.threads.close()
        if self.threads.left_behind:
            return  # they may still read the file, and write to slots
        for stage in self._recipe.stages:
            stage.close()
        self._opened.close()
