"""One pass over a watched loader: marks the moments of each step, and hands the batches on untouched."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastload.errors import OptionError
from fastload.measured import Step
from fastload.meter.clocks import Clock
from fastload.meter.probe import Probe, Probed
from fastload.meter.shapes import num_samples
from fastload.meter.steps import StepLog
from fastload.stopwatch import run_delay_reader
from fastload.verdict import BatchWork

_MOST_PENDING = 256  # steps that the device may be behind before it is waited for


@dataclass
class Loop:
    """What is known of one loader's loop; times in seconds.

    Attributes:
        loader: what is watched; gives None when it is gone.
        log: its steps.
        elapsed_s: of all passes, without what other watched loops inside took.
        startups_s: of each pass, until the first batch.
        receive_s: on a CPU, in the waits, by the thread of the loop.
        runnable_s: outside the waits, that this thread had no CPU although it wanted one.
        process_s: that the process was on a CPU, all threads, during the passes.
        transform_running_s: on a CPU, by the thread of the loop, for what is done at the hand-over.
        probe: of the last pass; None: the loader tells nothing.
    """

    loader: Callable[[], Any]
    log: StepLog = field(default_factory=StepLog)
    elapsed_s: float = 0.0
    startups_s: list[float] = field(default_factory=list)
    receive_s: float = 0.0
    runnable_s: float = 0.0
    process_s: float = 0.0
    transform_running_s: float = 0.0
    probe: Probe | None = None

    @classmethod
    def of(cls, loader: Any) -> Loop:
        """A loop that does not keep its loader alive, if that can be."""
        try:
            return cls(weakref.ref(loader))
        except TypeError:
            return cls(lambda: loader)


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
            self.running[-1].displaced = True
            self.running[-1].close()

    def end(self, one: Pass) -> None:
        """A pass is over."""
        if one in self.running:
            self.ask(one)
            self.running.pop()
            if self.running:
                self.running[-1].resume()


class Pass:
    """The batches of one pass, and what its steps took. An iterator for one thread.

    Args:
        loader: any iterable.
        loop: is told the steps.
        clock: of the device that computes.
        turns: of all passes of a meter.
        begun_s: of the meter, on the host's clock.
        told: called with each step.
    """

    def __init__(
        self, loader: Iterable[Any], loop: Loop, clock: Clock, turns: Turns, begun_s: float,
        told: Callable[[Step], None] | None = None,
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
        self._got_delay_s = 0.0
        self.displaced = False
        self._closed = False
        turns.begin(self)
        self._process_s = time.process_time()
        self._first: Any = clock.mark()
        self._first_s = time.perf_counter()
        self._thread_s = time.thread_time()
        loop.probe = self._probe if isinstance(loader, Probed) else None
        try:
            self._batches: Iterator[Any] = loader.iterate(self._probe) if isinstance(loader, Probed) else iter(loader)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        if self._closed:
            if self.displaced:
                raise OptionError(
                    "two loops take turns in one Meter, so that neither's steps can be told apart. Give each loop a "
                    "Meter of its own; a loop inside the body of another is fine."
                )
            raise StopIteration
        if self._turns.running[-1] is not self:
            self._turns.ask(self)
        if self._asked:
            asked, thread_s = self._clock.mark(), time.thread_time()
            self._end_step(asked)
        else:
            asked, thread_s = self._first, self._thread_s
        probe, loop = self._probe, self.loop
        probe.clear()
        self._asked += 1
        try:
            batch = next(self._batches)
        except BaseException:
            self._clock.drop(asked)
            self.close()
            raise
        got, got_thread_s = self._clock.mark(), time.thread_time()
        self._got_delay_s = self._delay_s()
        ready = got if probe.ready is None else probe.ready
        copied = ready if probe.copied is None else probe.copied
        ready_thread_s = got_thread_s if probe.ready_running_s is None else probe.ready_running_s
        if self._asked > 1:
            loop.receive_s += ready_thread_s - thread_s
        else:
            loop.startups_s.append(time.perf_counter() - self._first_s)
        loop.transform_running_s += got_thread_s - ready_thread_s
        begin_s = (self._first_s if self._asked == 1 else self._asked_s) - self._begun_s
        samples = probe.samples or num_samples(batch)
        self._step = _Open(begin_s, asked, ready, copied, got, samples, probe.queue_depth, probe.work, [])
        return batch

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def running_s(self) -> float:
        """Seconds so far, without what other loops inside took."""
        if self._closed:
            return 0.0
        return (self._pause_began_s or time.perf_counter()) - self._first_s - self._paused_s

    def pause(self) -> None:
        """Another loop begins in the body of this one: what it takes is not this one's."""
        if self._step is not None:
            self._paused = self._clock.mark()
            self.loop.runnable_s += self._delay_s() - self._got_delay_s
        self._pause_began_s = time.perf_counter()
        self._pause_process_s = time.process_time()

    def resume(self) -> None:
        """The other loop is over."""
        if self._step is not None and self._paused is not None:
            self._step.pauses.append((self._paused, self._clock.mark()))
            self._got_delay_s = self._delay_s()
        self._paused = None
        self._paused_s += time.perf_counter() - self._pause_began_s
        self._pause_began_s = 0.0
        self._process_s += time.process_time() - self._pause_process_s

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
        self.loop.runnable_s += self._delay_s() - self._got_delay_s
        self._pending.append((step, end))
        self._settle()

    def _settle(self, *, wait: bool = False) -> None:
        clock, pending = self._clock, self._pending
        while pending and (wait or len(pending) > _MOST_PENDING or clock.settled(pending[0][1])):
            step, end = pending.popleft()
            clock.settle(end)
            between = clock.between_s
            paused_s = sum(between(begin, resumed) for begin, resumed in step.pauses)
            done = Step(
                step.begin_s,
                between(step.asked, step.ready),
                between(step.ready, step.copied) if step.copied is not step.ready else 0.0,
                between(step.copied, step.got) if step.got is not step.copied else 0.0,
                max(0.0, between(step.got, end) - paused_s),
                step.samples,
                step.depth,
            )
            for mark in {id(mark): mark for mark in (step.asked, step.ready, step.copied, step.got)}.values():
                clock.drop(mark)
            for pair in step.pauses:
                for mark in pair:
                    clock.drop(mark)
            self.loop.log.add(done, step.work)
            if self._told is not None:
                self._told(done)
