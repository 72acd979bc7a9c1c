"""Tries candidates: opens a loader with their arguments and times short runs of it."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

from fastload.loader.loader import FastLoader
from fastload.profiling.bench.passes import repeat_epochs, run_for, touch_batch
from fastload.profiling.bench.steps import TouchStep, TrainingStep
from fastload.profiling.meter import Meter
from fastload.profiling.meter.sampler import OthersCpus, family_of, process_memory
from fastload.profiling.tune.candidates import Candidate, DataTraits
from fastload.profiling.tune.selection import Row, Trial

# Batches before the clock starts: the system allocates the memory of a new ring while the first ones are read.
_WARM_UP = 6
_LEAST_BATCHES = 2  # in a trial, however long they take
# A trial that has to load whole windows may take this many times the time given for it.
_PATIENCE = 4


class Runner:
    """The open loader of one candidate, and its measurements. Call `close` at the end.

    With processes, trials are slices of one pass, because starting a pass starts them. With whole windows, a trial
    counts a pass from its start, and at least `least_rows` rows. From a cold page cache, `drop` is called before each
    trial, with the loader closed, which else stays open. Without a step, a byte of each memory page of a batch is read.
    """

    def __init__(
        self,
        candidate: Candidate,
        make: Callable[[Candidate], FastLoader],
        traits: DataTraits,
        *,
        drop: Callable[[], object] = lambda: None,
        step: TrainingStep | None = None,
        least_rows: int = 0,
    ) -> None:
        self.candidate = candidate
        self._make, self._traits, self._drop, self._metered = make, traits, drop, step is not None
        self._least_rows = least_rows if traits.whole else 0
        self._step: TrainingStep = step or TouchStep()
        self._loader: FastLoader | None = None
        self._stack = ExitStack()
        self._meter: Meter | None = None
        self._batches: Iterator[Any] | None = None
        self._others = OthersCpus()
        self.trials: list[Trial] = []
        self.first_batch_s = 0.0
        self.memory_bytes = 0

    def row(self, since: int = 0) -> Row:
        trials = tuple(self.trials[since:])
        return Row(self.candidate, trials, self.first_batch_s, self.memory_bytes, others_cpus=self._others.cpus)

    def run(self, seconds: float) -> Trial:
        """Runs a trial of about so many seconds, keeps it and returns it."""
        traits, step = self._traits, self._step
        if traits.cold:
            self.close()
            self._drop()
        if self._loader is None:
            self._open(seconds)
        # Batches that were ready when the clock started do not count. From a cold cache an epoch may have only one.
        batches = self._pass()
        ready = 2 * self.candidate.workers if traits.processes else 0 if traits.whole or traits.cold else 1
        for _ in range(ready):
            next(batches)
        step.begin()
        waited_s, taken_s = self._waited()

        def enough(batches: int, samples: int, taken_s: float) -> bool:
            return (batches >= _LEAST_BATCHES and samples >= self._least_rows) or taken_s >= _PATIENCE * seconds

        with self._others.measured():
            found = run_for(batches, seconds, step, discard=0, synchronize=step.finish, enough=enough)
        assert found.samples, "a loader has one batch at least"
        stall_share = None
        if self._meter is not None:  # from the accelerator if it knows, else from the meter
            waited_s, taken_s = (now - before for now, before in zip(self._waited(), (waited_s, taken_s), strict=True))
            stalled = waited_s / max(1e-9, taken_s) if step.utilization is None else 1 - step.utilization
            stall_share = min(1.0, max(0.0, stalled))
        cost_s, share = 1000 * found.cpu_s / found.samples, found.cpu_s / found.seconds / traits.cpus
        self.trials.append(Trial(found.samples_per_s, cost_s, share, stall_share))
        return self.trials[-1]

    def close(self) -> None:
        """Closes the loader; the next trial opens it again."""
        self._end_pass()
        self._stack.close()  # the meter and the loader
        self._meter = self._loader = None

    def _open(self, seconds: float) -> None:
        before = process_memory(*family_of(os.getpid()))
        begin = time.perf_counter()
        with warnings.catch_warnings():
            # torch warns of more processes than CPUs; here that is only a candidate.
            warnings.simplefilter("ignore")
            loader = self._loader = self._make(self.candidate)
            self._stack.callback(loader.close)
            batches: Iterator[Any] = iter(loader)
            batch = next(batches)
        first_s = time.perf_counter() - begin
        self.first_batch_s = min(self.first_batch_s or first_s, first_s)
        if not self._traits.cold and not self._traits.whole:
            for _ in range(_WARM_UP + self.candidate.workers):
                if batch is None or time.perf_counter() - begin > seconds:
                    break
                touch_batch(batch)
                batch = next(batches, None)
        self.memory_bytes = max(self.memory_bytes, process_memory(*family_of(os.getpid())) - before)
        if self._metered:
            self._meter = self._stack.enter_context(Meter(device=self._step.device, sample_every_s=0))
        elif self._traits.processes:
            self._batches = chain(batches, repeat_epochs(loader))

    def _pass(self) -> Iterator[Any]:
        """Returns the batches to come. From a cold cache only one epoch: a second would come from the page cache."""
        if self._batches is None or not self._traits.processes:
            self._end_pass()
            assert self._loader is not None, "it was opened"
            watched = self._meter.watch(self._loader) if self._meter is not None else self._loader
            self._batches = repeat_epochs(watched, epochs=1 if self._traits.cold else None)
        return self._batches

    def _waited(self) -> tuple[float, float]:
        """Returns the seconds that steps have waited so far, and their duration so far."""
        return (0.0, 0.0) if self._meter is None else (self._meter.totals.wait_s, self._meter.totals.duration_s)

    def _end_pass(self) -> None:
        batches, self._batches = self._batches, None
        if isinstance(batches, Generator):
            batches.close()
