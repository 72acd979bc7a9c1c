"""One pass over a watched loader: marks the moments of each step, and hands the batches on untouched."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from fastload.errors import OptionError
from fastload.measured import Step
from fastload.meter.clocks import Clock
from fastload.meter.loops import Loop
from fastload.meter.probe import Probe, tells
from fastload.meter.shapes import num_samples
from fastload.ranges import span
from fastload.stopwatch import run_delay_reader
from fastload.verdict import BatchWork

_MOST_PENDING = 256  # steps that the device may be behind before it is waited for
# A step pushes out of the caches what metering takes, which then costs ten times as much as in an empty loop. So steps
# are added up several at a time, and times on a CPU, 50 us of the system's, are taken of some only.
_SETTLE_EVERY = 16
_LOOK_AT_FIRST = 4
_LOOK_EVERY = 16


class _Open(NamedTuple):
    """A step whose end is not known yet; marks of the clock."""

    begin_s: float
    asked: Any
    ready: Any
    copied: Any
    got: Any
    samples: int
    depth: int | None
    work: BatchWork | None
    pauses: list[tuple[Any, Any]]


class Turns:
    """Whose turn it is: a watched loop may run inside the body of another, but two cannot take turns."""

    def __init__(self) -> None:
        self.running: list[Pass] = []

    def begin(self, one: Pass) -> None:
        """A pass begins, inside the one that runs."""
        if self.running:
            self.running[-1].pause()
        self.running.append(one)

    def ask(self, one: Pass) -> None:
        """A pass is asked for a batch; those inside it were left."""
        while self.running[-1] is not one:
            self.running[-1].cut_short(
                "two loops take turns in one Meter, so that neither's steps can be told apart. Give each loop a Meter "
                "of its own; a loop inside the body of another is fine."
            )

    def end(self, one: Pass) -> None:
        """A pass is over."""
        if one in self.running:
            self.ask(one)
            self.running.pop()
            if self.running:
                self.running[-1].resume()


class Batches:
    """What a loop iterates over: whoever leaves it ends the pass. An iterator for one thread."""

    def __init__(self, one: Pass) -> None:
        self._pass = one

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        return self._pass.ask()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _is_finalizing():
            self._pass.close()


class Pass:
    """One pass, and what its steps took. One thread uses it.

    Args:
        loader: any iterable.
        loop: is told the steps.
        clock: of the device that computes.
        turns: of all passes of a meter.
        begun_s: of the meter, on the host's clock.
        told: called with the number and the times of each step, if anybody wants to know.
    """

    def __init__(
        self, loader: Iterable[Any], loop: Loop, clock: Clock, turns: Turns, begun_s: float,
        told: Callable[[int, Step], None] | None,
    ) -> None:  # fmt: skip
        self.loop = loop
        self._clock = clock
        self._turns = turns
        self._begun_s = begun_s
        self._told = told
        self._delay_s = run_delay_reader()
        self._probe = Probe(clock.mark)
        self._step: _Open | None = None
        self._pending: deque[tuple[_Open, Any]] = deque()
        self._paused: Any = None
        self._paused_s = self._pause_began_s = 0.0
        self._asked = 0
        self._got_delay_s: float | None = None  # while a step is looked at
        self._cut_short = ""
        self._thread = threading.get_ident()
        self._closed = False
        turns.begin(self)
        self._process_s = time.process_time()
        self._first: Any = clock.mark()
        self._first_s = time.perf_counter()
        self._thread_s = time.thread_time()
        self._batches: Iterator[Any] = iter(())
        self._tells = tells(loader)
        try:
            if tells(loader):
                loop.probe = self._probe
                self._batches = loader.iterate(self._probe)
            else:
                self._batches = iter(loader)
        except BaseException:
            self.close()
            raise

    def batches(self) -> Batches:
        """The batches; the pass ends when nobody refers to these any more."""
        return Batches(self)

    def ask(self) -> Any:
        """The next batch. Raises StopIteration."""
        if self._closed:
            if self._cut_short:
                raise OptionError(self._cut_short)
            raise StopIteration
        if self._turns.running[-1] is not self:
            self._turns.ask(self)
        if self._asked:
            asked = self._clock.mark()
            self._end_step(asked)
        else:
            asked = self._first
        self._asked += 1
        probe, loop = self._probe, self.loop
        probe.clear(looked_at=self._asked <= _LOOK_AT_FIRST or self._asked % _LOOK_EVERY == 0)
        thread_s = self._thread_s if self._asked == 1 else time.thread_time() if probe.looked_at else 0.0
        try:
            if self._tells:
                batch = next(self._batches)
            else:
                with span("wait"):
                    batch = next(self._batches)
        except BaseException as error:
            if isinstance(error, StopIteration) and self._asked > 1:
                loop.ends_s.append(time.perf_counter() - self._asked_s)
            self._clock.drop(asked)
            self.close()
            raise
        got = self._clock.mark()
        ready = got if probe.ready is None else probe.ready
        copied = ready if probe.copied is None else probe.copied
        if self._asked == 1:
            loop.first_s.append(time.perf_counter() - self._first_s)
        if probe.looked_at:
            got_thread_s = time.thread_time()
            ready_thread_s = got_thread_s if probe.ready_running_s is None else probe.ready_running_s
            if self._asked == 1:
                loop.first_running_s += ready_thread_s - thread_s
            else:
                loop.receive_s.add(ready_thread_s - thread_s)
            loop.transform_running_s.add(got_thread_s - ready_thread_s)
            self._got_delay_s = self._delay_s()
        begin_s = (self._first_s if self._asked == 1 else self._asked_s) - self._begun_s
        samples = probe.samples or num_samples(batch)
        # What is used again cost nothing to make.
        work = probe.work if probe.work is not None or not probe.crew.workers else BatchWork({})
        self._step = _Open(begin_s, asked, ready, copied, got, samples, probe.queue_depth, work, [])
        return batch

    def settle(self) -> None:
        """Adds up the steps that are over; other threads than the loop's see them later."""
        if threading.get_ident() == self._thread:
            self._settle()

    def running_s(self) -> float:
        """Seconds so far, without what other loops inside took."""
        if self._closed:
            return 0.0
        return (self._pause_began_s or time.perf_counter()) - self._first_s - self._paused_s

    def pause(self) -> None:
        """Another loop begins in the body of this one: what it takes is not this one's."""
        if self._step is not None:
            self._paused = self._clock.mark()
            self._got_delay_s = None  # this step is not looked at after all
        self._pause_began_s = time.perf_counter()
        self._pause_process_s = time.process_time()

    def resume(self) -> None:
        """The other loop is over."""
        if self._step is not None and self._paused is not None:
            self._step.pauses.append((self._paused, self._clock.mark()))
        self._paused = None
        self._paused_s += time.perf_counter() - self._pause_began_s
        self._pause_began_s = 0.0
        self._process_s += time.process_time() - self._pause_process_s

    def cut_short(self, why: str) -> None:
        """Ends the pass; asking it for more is an error from now on."""
        self._cut_short = why
        self.close()

    def close(self) -> None:
        """Ends the pass: the last step ends now."""
        if self._closed:
            return
        self._turns.end(self)  # first: a pass inside this one ends before it
        self._closed = True
        loop = self.loop
        if self._step is not None:
            self._end_step(self._clock.mark())
        self._settle(wait=True)
        loop.elapsed_s += time.perf_counter() - self._first_s - self._paused_s
        loop.process_s += time.process_time() - self._process_s
        self._batches = iter(())

    def _end_step(self, end: Any) -> None:
        step, self._step = self._step, None
        self._asked_s = time.perf_counter()
        if step is None:
            return
        if self._got_delay_s is not None:
            self.loop.runnable_s.add(self._delay_s() - self._got_delay_s)
            self._got_delay_s = None
        self._pending.append((step, end))
        if self._told is not None or len(self._pending) >= _SETTLE_EVERY:
            self._settle()

    def _settle(self, *, wait: bool = False) -> None:
        clock, pending = self._clock, self._pending
        while pending and (wait or len(pending) > _MOST_PENDING or clock.settled(pending[0][1])):
            step, end = pending.popleft()
            clock.settle(end)
            between, log = clock.between_s, self.loop.log
            asked, ready, copied, got = step.asked, step.ready, step.copied, step.got
            paused_s = sum(between(begin, resumed) for begin, resumed in step.pauses) if step.pauses else 0.0
            times = (
                step.begin_s,
                between(asked, ready),
                between(ready, copied) if copied is not ready else 0.0,
                between(copied, got) if got is not copied else 0.0,
                max(0.0, between(got, end) - paused_s),
                step.samples,
                step.depth,
            )
            clock.drop(asked)
            for mark, earlier in ((ready, asked), (copied, ready), (got, copied)):
                if mark is not earlier:
                    clock.drop(mark)
            for mark in (mark for pair in step.pauses for mark in pair):
                clock.drop(mark)
            if self._told is not None:
                self._told(log.totals.steps, Step(*times))
            log.add(times, step.work)
