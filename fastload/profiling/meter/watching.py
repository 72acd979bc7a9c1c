"""One pass over a watched loader: marks the times of each step, and passes the batches on unchanged."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from fastload.errors import OptionError
from fastload.profiling.meter.clocks import Clock
from fastload.profiling.meter.loops import Loop, num_samples
from fastload.timing.probe import Probe, is_probed
from fastload.timing.ranges import span
from fastload.timing.results import BatchWork, Step
from fastload.timing.stopwatch import run_delay_reader

_MOST_PENDING = 256  # steps that the device may be behind before the meter waits for it
# A training step evicts the meter's code and data from the CPU's caches: metering then costs ten times as much as in an
# empty loop. So steps are added up 16 at a time, and CPU times (50 us of system calls) are read in some steps only.
_ADD_UP_EVERY = 16
_LOOK_AT_FIRST = 4
_LOOK_EVERY = 16


class _Open(NamedTuple):
    """A step that has not ended yet. `asked`, `ready`, `copied` and `got` are marks of the clock."""

    begin_s: float
    asked: Any
    ready: Any
    copied: Any
    got: Any
    samples: int
    depth: int | None
    work: BatchWork | None
    pauses: list[tuple[Any, Any]]


class Batches:
    """The iterator that a watched loop gets. When it is no longer referenced, the pass ends. For one thread."""

    def __init__(self, one: WatchedPass) -> None:
        self._pass = one

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        return self._pass.next_batch()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _is_finalizing():
            self._pass.close()


class WatchedPass:
    """One pass over a loader, and the times of its steps. Used by one thread.

    Args:
        loader: any iterable.
        loop: gets the figures.
        clock: of the device that computes.
        running: the passes of the meter that are running, innermost last. A watched loop may run inside the body of
            another one; two loops that take turns are refused.
        begun_s: the meter's start on the host's clock.
        callback: called with the number and the times of each step; None: nobody.
    """

    def __init__(
        self, loader: Iterable[Any], loop: Loop, clock: Clock, running: list[WatchedPass], begun_s: float,
        callback: Callable[[int, Step], None] | None,
    ) -> None:  # fmt: skip
        self.loop = loop
        self._clock = clock
        self._running = running
        self._begun_s = begun_s
        self._callback = callback
        self._delay_s = run_delay_reader()
        self._probe = Probe(clock.mark)
        self._step: _Open | None = None
        self._pending: deque[tuple[_Open, Any]] = deque()
        self._paused: Any = None
        self._paused_s = self._pause_began_s = 0.0
        self._asked = 0
        self._got_delay_s: float | None = None  # set during a step whose CPU times are read
        self._cut_short = ""
        self._thread = threading.get_ident()
        self._closed = False
        if running:
            running[-1].pause()
        running.append(self)
        self._process_s = time.process_time()
        self._first: Any = clock.mark()
        self._first_s = time.perf_counter()
        self._thread_s = time.thread_time()
        self._batches: Iterator[Any] = iter(())
        self._is_probed = is_probed(loader)
        try:
            if is_probed(loader):
                loop.probe = self._probe
                self._batches = loader.iterate(self._probe)
            else:
                self._batches = iter(loader)
        except BaseException:
            self.close()
            raise

    def next_batch(self) -> Any:
        """Returns the next batch, or raises StopIteration."""
        if self._closed:
            if self._cut_short:
                raise OptionError(self._cut_short)
            raise StopIteration
        self._end_inner()
        asked, asked_s, thread_s = self._first, self._first_s, self._thread_s
        if self._asked:
            asked = self._clock.mark()
            asked_s = self._end_step(asked)
        self._asked += 1
        first, probe, loop = self._asked == 1, self._probe, self.loop
        probe.clear(looked_at=self._asked <= _LOOK_AT_FIRST or self._asked % _LOOK_EVERY == 0)
        if probe.looked_at and not first:
            thread_s = time.thread_time()
        try:
            if self._is_probed:
                batch = next(self._batches)
            else:
                with span("wait"):
                    batch = next(self._batches)
        except BaseException as error:
            if isinstance(error, StopIteration) and not first:
                loop.epochs[-1] = (loop.epochs[-1][0], time.perf_counter() - asked_s)
            self._clock.drop(asked)
            self.close()
            raise
        got = self._clock.mark()
        ready = got if probe.ready is None else probe.ready
        copied = ready if probe.copied is None else probe.copied
        if first:
            loop.epochs.append((time.perf_counter() - asked_s, 0.0))
        if probe.looked_at:
            got_thread_s = time.thread_time()
            ready_thread_s = got_thread_s if probe.ready_running_s is None else probe.ready_running_s
            if first:
                loop.first_running_s += ready_thread_s - thread_s
            else:
                loop.receive_s.add(ready_thread_s - thread_s)
            loop.transform_running_s.add(got_thread_s - ready_thread_s)
            self._got_delay_s = self._delay_s()
        samples = probe.samples or num_samples(batch)
        # A batch used again (echo) cost nothing to make.
        work = probe.work if probe.work is not None or not probe.worker_info.workers else BatchWork({})
        begin_s, depth = asked_s - self._begun_s, probe.queue_depth
        self._step = _Open(begin_s, asked, ready, copied, got, samples, depth, work, [])
        return batch

    def running_s(self) -> float:
        """Returns the seconds so far, without other loops inside this one's body."""
        if self._closed:
            return 0.0
        return (self._pause_began_s or time.perf_counter()) - self._first_s - self._paused_s

    def pause(self) -> None:
        """Stops the time because another loop begins inside this one's body."""
        if self._step is not None:
            self._paused = self._clock.mark()
            self._got_delay_s = None  # this step's CPU times would include the inner loop's
        self._pause_began_s = time.perf_counter()
        self._pause_process_s = time.process_time()

    def resume(self) -> None:
        """Continues after the inner loop."""
        if self._step is not None and self._paused is not None:
            self._step.pauses.append((self._paused, self._clock.mark()))
        self._paused = None
        self._paused_s += time.perf_counter() - self._pause_began_s
        self._pause_began_s = 0.0
        self._process_s += time.process_time() - self._pause_process_s

    def _end_inner(self) -> None:
        """Ends the passes inside this one, which is asked for a batch: their loops must have been left."""
        while self._running[-1] is not self:
            self._running[-1].close(
                "two loops take turns in one Meter, which therefore cannot separate their steps. Give each loop a "
                "Meter of its own; a loop inside the body of another is fine."
            )

    def close(self, why: str = "") -> None:
        """Ends the pass; its last step ends now. With `why`, asking it for another batch raises an error with that."""
        if self._closed:
            return
        self._cut_short = why
        self._end_inner()
        self._running.pop()
        if self._running:
            self._running[-1].resume()
        self._closed = True
        loop = self.loop
        if self._step is not None:
            self._end_step(self._clock.mark())
        self.add_up(wait=True)
        loop.elapsed_s += time.perf_counter() - self._first_s - self._paused_s
        loop.process_s += time.process_time() - self._process_s
        self._batches = iter(())

    def _end_step(self, end: Any) -> float:
        """Ends the step that is under way; returns the time."""
        step, self._step, ended_s = self._step, None, time.perf_counter()
        if step is not None:
            if self._got_delay_s is not None:
                self.loop.runnable_s.add(self._delay_s() - self._got_delay_s)
                self._got_delay_s = None
            self._pending.append((step, end))
            if self._callback is not None or len(self._pending) >= _ADD_UP_EVERY:
                self.add_up()
        return ended_s

    def add_up(self, *, wait: bool = False) -> None:
        """Adds up the steps that have ended, or waits for all; without waiting in the loop's own thread only."""
        if not wait and threading.get_ident() != self._thread:
            return
        clock, pending = self._clock, self._pending
        while pending and (wait or len(pending) > _MOST_PENDING or clock.is_done(pending[0][1])):
            step, end = pending.popleft()
            clock.wait(end)
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
            for earlier, mark in itertools.pairwise((asked, ready, copied, got)):
                if mark is not earlier:
                    clock.drop(mark)
            for mark in itertools.chain.from_iterable(step.pauses):
                clock.drop(mark)
            if self._callback is not None:
                self._callback(log.totals.steps, Step(*times))
            log.add(times, step.work)
