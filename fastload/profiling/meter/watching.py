"""One pass over a watched loader: marks the times of each step, and passes the batches on unchanged."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

from fastload.errors import OptionError
from fastload.profiling.meter.loops import Loop, num_samples
from fastload.timing.clocks import Clock, HostClock
from fastload.timing.network import NetworkUse
from fastload.timing.probe import Probe, is_probed, span
from fastload.timing.results import BatchWork, Step
from fastload.timing.stopwatch import run_delay_reader

_MOST_PENDING = 256  # steps that the device may be behind before the meter waits for it
# A training step evicts the meter's code and data from the CPU's caches: metering then costs ten times as much as in an
# empty loop. So steps are added up 16 at a time, and CPU times (50 us of system calls) are read in some steps only.
_ADD_UP_EVERY = 16
_LOOK_AT_FIRST = 4
_LOOK_EVERY = 16
_NO_RANGE = nullcontext()


class _Open(NamedTuple):
    """A step that has not ended yet. Marks are the clock's; a moment that did not come has the mark of the next one."""

    begin_s: float
    marks: tuple[Any, Any, Any, Any]  # asked for, ready, copied, received
    samples: int
    depth: int | None
    work: BatchWork | None
    pauses: list[tuple[Any, Any]]
    epoch: int | None  # whose first step it is


class WatchedPass:
    """One pass over a loader, and the times of its steps. Used by one thread.

    It is one of the meter's `running` passes, innermost last: a watched loop may run inside the body of another one;
    two loops that take turns are refused. `callback` is called with the number and the times of each step.
    """

    def __init__(
        self, loader: Any, loop: Loop, clock: Clock, running: list[WatchedPass], begun_s: float,
        callback: Callable[[int, Step], None] | None,
    ) -> None:  # fmt: skip
        self.loop = loop
        loop.timed_device = not isinstance(clock, HostClock)
        self._loader = loader
        self._clock = clock
        self._running = running
        self._begun_s = begun_s
        self._callback = callback
        self._delay_s = run_delay_reader()
        self._probe = Probe(clock.mark)
        self._is_probed = is_probed(loader)
        self._batches: Iterator[Any] = iter(())
        self._step: _Open | None = None
        self._pending: deque[tuple[_Open, Any]] = deque()
        self._paused: tuple[Any, float, float] | None = None  # since when: mark, time, CPU time of the process
        self._paused_s = 0.0
        self._asked = 0
        self._got_delay_s: float | None = None  # set during a step whose CPU times are read
        self._used_before = NetworkUse()  # the network, before it began to count
        self._cut_short = ""
        self._thread = threading.get_ident()
        if running:
            running[-1].pause()
        running.append(self)
        self._process_s = time.process_time()
        self._first_s = time.perf_counter()

    def next_batch(self) -> Any:
        """Returns the next batch, or raises StopIteration."""
        if self._cut_short:
            raise OptionError(self._cut_short)
        self._end_inner()
        asked = self._clock.mark()
        asked_s = self._end_step(asked)
        self._asked += 1
        first, probe, loop = self._asked == 1, self._probe, self.loop
        probe.clear(looked_at=self._asked <= _LOOK_AT_FIRST or self._asked % _LOOK_EVERY == 0)
        thread_s = time.thread_time() if probe.looked_at else 0.0
        try:
            with _NO_RANGE if self._is_probed else span("wait"):
                if first:
                    self._batches = self._loader.iterate(probe) if self._is_probed else iter(self._loader)
                    loop.probe = probe if self._is_probed else loop.probe
                batch = next(self._batches)
        except StopIteration:
            if not first and self._clock.is_done(asked):  # else the device is still at work
                loop.epochs[-1] = (loop.epochs[-1][0], time.perf_counter() - asked_s)
            raise
        got = self._clock.mark()
        ready = got if probe.ready is None else probe.ready
        copied = ready if probe.copied is None else probe.copied
        if first:
            loop.epochs.append((time.perf_counter() - asked_s, 0.0))
            loop.begins_s.append(asked_s - self._begun_s)
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
        marks = asked, ready, copied, got
        self._step = _Open(
            asked_s - self._begun_s,
            marks,
            samples,
            probe.queue_depth,
            work,
            [],
            len(loop.epochs) - 1 if first else None,
        )
        return batch

    def network(self) -> NetworkUse | None:
        """Returns what came over the network in this pass so far; None: its data are on this machine."""
        came = self._probe.network
        return None if came is None else came() - self._used_before

    def running_s(self) -> float:
        """Returns the seconds so far, without other loops inside this one's body."""
        until_s = time.perf_counter() if self._paused is None else self._paused[1]
        return until_s - self._first_s - self._paused_s

    def restart(self) -> bool:
        """Begins to count now; only in the first step of the loop, else returns False."""
        step, loop = self._step, self.loop
        if step is None or self._asked != 1 or loop.totals.steps or len(loop.epochs) != 1:
            return False
        now_s, mark = time.perf_counter(), self._clock.mark()
        for earlier, later in itertools.pairwise((*step.marks, mark)):
            if later is not earlier:
                self._clock.drop(earlier)
        self._step = step._replace(begin_s=now_s - self._begun_s, marks=(mark, mark, mark, mark))
        loop.epochs[0], loop.begins_s[0], loop.first_running_s = (0.0, 0.0), now_s - self._begun_s, 0.0
        self._first_s, self._paused_s, self._process_s = now_s, 0.0, time.process_time()
        self._used_before += self.network() or NetworkUse()
        return True

    def pause(self) -> None:
        """Stops the time because another loop begins inside this one's body."""
        self._got_delay_s = None  # this step's CPU times would include the inner loop's
        mark = None if self._step is None else self._clock.mark()
        self._paused = mark, time.perf_counter(), time.process_time()

    def resume(self) -> None:
        """Continues after the inner loop."""
        assert self._paused is not None, "the inner loop has paused this one"
        (mark, paused_s, process_s), self._paused = self._paused, None
        if self._step is not None and mark is not None:
            self._step.pauses.append((mark, self._clock.mark()))
        self._paused_s += time.perf_counter() - paused_s
        self._process_s += time.process_time() - process_s

    def _end_inner(self) -> None:
        """Ends the passes inside this one, which is asked for a batch: their loops must have been left."""
        while self._running[-1] is not self:
            self._running[-1].close(
                "two loops take turns in one Meter, which therefore cannot separate their steps. Give each loop a "
                "Meter of its own; a loop inside the body of another is fine."
            )

    def close(self, why: str = "") -> None:
        """Ends the pass; its last step ends now. With `why`, asking it for another batch raises an error with that."""
        if self not in self._running:
            return
        self._cut_short = why
        self._end_inner()
        self._running.pop()
        if self._running:
            self._running[-1].resume()
        if self._step is not None:
            self._end_step(self._clock.mark())
        self.add_up(wait=True)
        self.loop.elapsed_s += self.running_s()
        if (came := self.network()) is not None:
            self.loop.network = came if self.loop.network is None else came + self.loop.network
        self.loop.process_s += time.process_time() - self._process_s
        self._batches = iter(())

    def _end_step(self, end: Any) -> float:
        """Ends the step that is under way, if any; returns the time."""
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
        clock, pending, loop = self._clock, self._pending, self.loop
        while pending and (wait or len(pending) > _MOST_PENDING or clock.is_done(pending[0][1])):
            step, end = pending.popleft()
            clock.wait(end)
            between_s, got = clock.between_s, step.marks[-1]
            parts_s = []
            for earlier, later in itertools.pairwise(step.marks):
                if later is earlier:
                    parts_s.append(0.0)
                else:
                    parts_s.append(between_s(earlier, later))
                    clock.drop(earlier)
            compute_s = between_s(got, end)
            clock.drop(got)
            for begin, resumed in step.pauses:
                compute_s -= between_s(begin, resumed)
                clock.drop(begin)
                clock.drop(resumed)
            wait_s, copy_s, transform_s = parts_s
            if step.epoch is not None and loop.timed_device:
                # The device may have been at work while the loop waited.
                first_s, end_s = loop.epochs[step.epoch]
                loop.epochs[step.epoch] = min(first_s, wait_s), end_s
            times = step.begin_s, wait_s, copy_s, transform_s, max(0.0, compute_s), step.samples, step.depth
            if self._callback is not None:
                self._callback(loop.totals.steps, Step(*times))
            loop.add(times, step.work)
