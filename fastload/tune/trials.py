"""Tries candidates: loaders of the same data with other arguments, run for a moment each."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

from fastload.bench.passes import cpu_seconds, endless, touched
from fastload.bench.steps import TrainingStep
from fastload.loader import FastLoader
from fastload.meter import Meter
from fastload.meter.family import family_of, process_memory
from fastload.tune.candidates import Candidate
from fastload.tune.choose import Row, Trial

MakeLoader = Callable[[Candidate], FastLoader]

# Batches that a fresh ring is filled with: its memory is given out by the system while the first ones are read.
_WARM_UP = 6
# Counted at least, however long they take.
_LEAST_BATCHES = 2
# A trial that has to give whole windows may take so many times as long as was meant.
_PATIENCE = 4


@dataclass(frozen=True)
class Way:
    """How trials of some data are run.

    Attributes:
        continues: they are slices of one pass, since beginning another one starts processes; what lay ready is not
            counted.
        whole: a pass is counted from its beginning, and by whole windows: those decode their chunks first, and give
            most of their rows after that.
        before: done before each trial, which must not find the file in use, such as to drop it from the page cache;
            None: the loader stays open from one trial to the next.
    """

    continues: bool = False
    whole: bool = False
    before: Callable[[], object] | None = None


class Runner:
    """One candidate's loader, open, and what was measured of it. `close` it.

    Args:
        make: the loader.
        candidate: tried.
        way: how.
        cpus: that this rank may use.
        least_rows: of a trial, where passes are counted whole: those of a window, if there are windows.
        step: trained on; None: each page of a batch is looked at.
    """

    def __init__(
        self,
        make: MakeLoader,
        candidate: Candidate,
        way: Way,
        *,
        cpus: int,
        least_rows: int = 0,
        step: TrainingStep | None = None,
    ) -> None:
        self._make = make
        self._way = way
        self._cpus = cpus
        self._least_rows = least_rows if way.whole else 0
        self._step = step
        self._loader: FastLoader | None = None
        self._stack = ExitStack()
        self._meter: Meter | None = None
        self._batches: Iterator[Any] | None = None
        self.candidate = candidate
        self.trials: list[Trial] = []
        self.first_batch_s = 0.0
        self.memory_bytes = 0

    def row(self, since: int = 0) -> Row:
        """The trials from a number on; at least one."""
        return Row(self.candidate, tuple(self.trials[since:]), self.first_batch_s, self.memory_bytes)

    def run(self, seconds: float) -> Trial:
        """One trial, kept: so many seconds of batches, at least a few."""
        if self._way.before is not None:
            self.close()
            self._way.before()
        if self._loader is None:
            self._open(seconds)
        trial = self._trial(seconds)
        self.trials.append(trial)
        return trial

    def close(self) -> None:
        """Closes the loader; another trial opens it again."""
        self._end_pass()
        self._stack.close()
        self._meter = None
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def _open(self, seconds: float) -> None:
        held = _memory()
        begin = time.perf_counter()
        with warnings.catch_warnings():
            # What is tried is not what is recommended: torch warns of more processes than CPUs.
            warnings.simplefilter("ignore")
            loader = self._loader = self._make(self.candidate)
            batches = iter(loader)
            batch: Any = next(batches)
        first_s = time.perf_counter() - begin
        self.first_batch_s = min(self.first_batch_s or first_s, first_s)
        if self._way.before is None and not self._way.whole:
            for _ in range(_WARM_UP + self.candidate.workers):
                if batch is None or time.perf_counter() - begin > seconds:
                    break
                touched(batch)
                batch = next(batches, None)
        self.memory_bytes = max(self.memory_bytes, _memory() - held)
        if self._step is not None:
            self._meter = self._stack.enter_context(Meter(device=self._step.device, sample_every_s=0))
        if self._way.continues:
            self._batches = chain(batches, endless(loader)) if self._meter is None else None
        else:
            del batches, batch

    def _pass(self) -> Iterator[Any]:
        """The batches to come. Cold, an epoch is read once: what it read is in the page cache then."""
        if self._batches is None or not self._way.continues:
            self._end_pass()
            assert self._loader is not None, "it was opened"
            watched = self._meter.watch(self._loader) if self._meter is not None else self._loader
            self._batches = endless(watched, epochs=1 if self._way.before else None)
        return self._batches

    def _end_pass(self) -> None:
        batches, self._batches = self._batches, None
        if isinstance(batches, Generator):
            batches.close()

    def _trial(self, seconds: float) -> Trial:
        step, batches = self._step, self._pass()
        # What lay ready, or was read before the clock began, does not count. Cold, an epoch may have one batch.
        ready = 2 * self.candidate.workers if self._way.continues else 0 if self._way.whole or self._way.before else 1
        for _ in range(ready):
            next(batches)
        if step is not None:
            step.begin()
        waited = self._waited()
        begin, cpu_s = time.perf_counter(), cpu_seconds()
        samples = 0
        for count, batch in enumerate(batches, 1):
            if step is not None:
                step(batch)
                samples += len(batch[0])
            else:
                samples += touched(batch)
            del batch  # its slot may be filled again
            taken_s = time.perf_counter() - begin
            enough = count >= _LEAST_BATCHES and samples >= self._least_rows
            if taken_s >= seconds and (enough or taken_s >= _PATIENCE * seconds):
                break
        if step is not None:
            step.finish()
        taken_s, spent_s = time.perf_counter() - begin, cpu_seconds() - cpu_s
        stall_share = self._stall_share(waited) if step is not None else None
        assert samples, "a loader has one batch at least"
        return Trial(samples / taken_s, 1000 * spent_s / samples, spent_s / taken_s / self._cpus, stall_share)

    def _waited(self) -> tuple[float, float]:
        """Seconds that steps waited so far, and took in all."""
        if self._meter is None:
            return 0.0, 0.0
        totals = self._meter.totals
        return totals.wait_s, totals.duration_s

    def _stall_share(self, before: tuple[float, float]) -> float:
        """By the accelerator if it tells, else by the waits."""
        assert self._step is not None and self._meter is not None, "there is a step"
        if self._step.utilization is not None:
            return min(1.0, max(0.0, 1 - self._step.utilization))
        now = self._waited()
        waited_s, taken_s = now[0] - before[0], now[1] - before[1]
        return min(1.0, max(0.0, waited_s / max(1e-9, taken_s)))


def _memory() -> int:
    return sum(map(process_memory, family_of(os.getpid())))
