"""A small machine on which a training loop runs: cores, time slices, workers, a step of several threads.

It knows nothing of `fastload`: what the verdict predicts is compared with the same loop run again with the change made.
Times are seconds of the simulated clock, so that a run takes milliseconds and is the same on every machine.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

QUANTUM_S = 0.003
_LEAST_S = 1e-12


@dataclass(frozen=True)
class World:
    """A machine and a training loop on it."""

    cores: int = 2
    workers: int = 2  # 0: the loop makes its batches itself
    prefetch: int = 2  # batches that each may be ahead
    stages: tuple[tuple[str, float, float], ...] = (("decoding", 0.02, 0.0),)  # of a batch: on a core, blocked
    samples: int = 16  # of a batch; each goes through all stages but the collation of all
    spread: float = 0.0  # standard deviation of the logarithm of a batch's cost
    receive_s: float = 0.0002  # on a core, to take a batch over
    own_s: float = 0.01  # of a step with the machine for itself
    threads: int = 1  # that a step runs in
    parts: int = 20  # of a step, each of which ends with its last thread
    device_s: float = 0.0  # of a step on a device, beside the loop; 0: there is none
    run_ahead: int = 3  # steps that may wait for it
    startup_s: float = 0.0  # on a core, of each worker before its first batch
    steps: int = 50  # of an epoch
    epochs: int = 2
    persistent: bool = False  # whether workers live on
    seed: int = 0


@dataclass
class Made:
    """A batch while it is made."""

    begin_s: float
    end_s: float
    stages: dict[str, tuple[float, float]]  # on a core, blocked
    runnable_s: float  # without a core


@dataclass
class Trace:
    """What happened."""

    # Of each step: when its batch was asked for, the wait for it, the time after it, and how long the loop's thread
    # was ready and had no core then
    steps: list[tuple[float, float, float, float]] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    asked_s: list[float] = field(default_factory=list)  # when each epoch's first batch was asked for
    first_s: list[float] = field(default_factory=list)  # wait for it

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return sum(wait_s + own_s for _, wait_s, own_s, _ in self.steps) / len(self.steps)


Act = tuple[str, Any]
"""("run", seconds on a core), ("block", seconds) or ("wait", a function of the thread: whether it may go on at once,
else it was noted by whoever wakes it)."""


class _Thread:
    def __init__(self, acts: Iterator[Act]) -> None:
        self.acts = acts
        self.left_s = self.ran_s = self.ready_at_s = self.begun_at_s = self.runnable_s = 0.0
        self.has_core = False
        self.piece = 0  # counts its turns on a core, so that the end of one that was cut short is known


class _Machine:
    """Cores that run threads in turn: who ran least comes next, and takes the core of who ran more when it wakes."""

    def __init__(self, cores: int) -> None:
        self.now_s = 0.0
        self._cores = cores
        self._running: list[_Thread] = []
        self._ready: list[_Thread] = []
        self._least_s = 0.0  # that any thread ran which wants a core
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0

    def at(self, moment_s: float, call: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._events, (moment_s, self._count, call))

    def begin(self, make: Callable[[_Thread], Iterator[Act]], thread: _Thread | None = None) -> _Thread:
        """Begins a thread, or one that has ended again."""
        thread = thread or _Thread(iter(()))
        thread.acts = make(thread)
        self.at(self.now_s, lambda: self.go_on(thread))
        return thread

    def wake(self, thread: _Thread) -> None:
        self.at(self.now_s, lambda: self.go_on(thread))

    def run(self) -> None:
        while self._events:
            self.now_s, _, call = heapq.heappop(self._events)
            call()

    def go_on(self, thread: _Thread) -> None:
        """Lets a thread act until it wants time on a core, or to wait."""
        for kind, value in thread.acts:
            if kind == "wait":
                if value(thread):
                    continue
                break
            if value <= 0:
                continue
            if kind == "block":
                self.at(self.now_s + value, lambda: self.go_on(thread))
                break
            thread.left_s, thread.ready_at_s = value, self.now_s
            if not thread.has_core:  # it wakes: what it ran less while it slept counts for no more than a slice
                thread.ran_s = max(thread.ran_s, self._least_s - QUANTUM_S)
                self._ready.append(thread)
                self._dispatch()
            else:
                self._turn(thread)
            return
        if thread.has_core:
            thread.has_core = False
            self._running.remove(thread)
            self._dispatch()

    def _dispatch(self) -> None:
        while self._ready:
            thread = min(self._ready, key=lambda one: one.ran_s)
            self._least_s = max(self._least_s, thread.ran_s)
            if len(self._running) >= self._cores:
                most = max(self._running, key=self._ran_s)
                if self._ran_s(most) - thread.ran_s < QUANTUM_S / 3:
                    return
                self._stop(most)
            self._ready.remove(thread)
            thread.runnable_s += self.now_s - thread.ready_at_s
            thread.has_core = True
            self._running.append(thread)
            self._turn(thread)

    def _ran_s(self, thread: _Thread) -> float:
        return thread.ran_s + self.now_s - thread.begun_at_s

    def _turn(self, thread: _Thread) -> None:
        """Lets a thread run for a slice, or for what is left."""
        thread.piece += 1
        thread.begun_at_s = self.now_s
        piece = thread.piece
        self.at(self.now_s + min(QUANTUM_S, thread.left_s), lambda: self._has_run(thread, piece))

    def _stop(self, thread: _Thread) -> None:
        """Takes the core from a thread."""
        self._note(thread)
        thread.piece += 1
        thread.has_core, thread.ready_at_s = False, self.now_s
        self._running.remove(thread)
        self._ready.append(thread)

    def _note(self, thread: _Thread) -> None:
        ran_s = self.now_s - thread.begun_at_s
        thread.ran_s += ran_s
        thread.left_s -= ran_s
        thread.begun_at_s = self.now_s

    def _has_run(self, thread: _Thread, piece: int) -> None:
        if thread.piece != piece:
            return
        self._note(thread)
        if thread.left_s <= _LEAST_S:
            self.go_on(thread)
        elif self._ready and min(one.ran_s for one in self._ready) < thread.ran_s:
            self._stop(thread)
            self._dispatch()
        else:
            self._turn(thread)


class _Run:
    """A loop and its workers on a machine."""

    def __init__(self, world: World) -> None:
        self.world, self.machine, self.trace = world, _Machine(world.cores), Trace()
        draw = random.Random(world.seed)
        self._factors = [
            [draw.lognormvariate(-(world.spread**2) / 2, world.spread) for _ in range(world.steps)]
            for _ in range(world.epochs)
        ]
        self._epoch, self._sent = -1, 0
        self._ready: set[int] = set()
        self._asked: list[deque[int]] = []
        self._sleeping: list[_Thread | None] = [None] * world.workers
        self._waiting: tuple[int, _Thread] | None = None  # the loop, and the batch that it waits for
        self._launched: deque[float] = deque()
        self._helpers = [_Thread(iter(())) for _ in range(world.threads - 1)]
        self.machine.begin(self._loop)
        self.machine.run()
        assert len(self.trace.steps) == world.steps * world.epochs, "the loop ran to its end"

    def _loop(self, thread: _Thread) -> Iterator[Act]:
        world, machine = self.world, self.machine
        for epoch in range(world.epochs):
            asked_s = machine.now_s
            self.trace.asked_s.append(asked_s)
            self._epoch, self._sent, self._ready = epoch, 0, set()
            self._asked = [deque() for _ in range(world.workers)]
            for _ in range(world.workers * world.prefetch):
                self._send()
            if epoch == 0 or not world.persistent:
                self._sleeping = [None] * world.workers
                for worker in range(world.workers):
                    machine.begin(lambda me, worker=worker, epoch=epoch: self._work(me, worker, epoch))
            for number in range(world.steps):
                begin_s = machine.now_s
                if world.workers:
                    yield "wait", lambda me, number=number: self._has(number, me)
                    yield "run", world.receive_s
                    self._send()
                else:
                    yield from self._make(thread, epoch, number)
                if number == 0:
                    self.trace.first_s.append(machine.now_s - asked_s)
                got_s, runnable_s = machine.now_s, thread.runnable_s
                yield from self._step()
                if number == world.steps - 1 and self._launched:  # who prints an epoch's loss waits for the device
                    yield "block", self._launched[-1] - machine.now_s
                    self._launched.clear()
                times = begin_s, got_s - begin_s, machine.now_s - got_s, thread.runnable_s - runnable_s
                self.trace.steps.append(times)
        self._epoch = world.epochs
        for worker in range(world.workers):
            self._wake(worker)

    def _send(self) -> None:
        if self._sent < self.world.steps and self.world.workers:
            worker = self._sent % self.world.workers
            self._asked[worker].append(self._sent)
            self._sent += 1
            self._wake(worker)

    def _wake(self, worker: int) -> None:
        thread, self._sleeping[worker] = self._sleeping[worker], None
        if thread is not None:
            self.machine.wake(thread)

    def _has(self, number: int, thread: _Thread) -> bool:
        if number not in self._ready:
            self._waiting = number, thread
            return False
        return True

    def _work(self, thread: _Thread, worker: int, epoch: int) -> Iterator[Act]:
        world = self.world
        yield "run", world.startup_s

        def has_work(me: _Thread) -> bool:
            if self._asked[worker] or self._is_over(epoch):
                return True
            self._sleeping[worker] = me
            return False

        while True:
            yield "wait", has_work
            if self._is_over(epoch):
                return
            if not self._asked[worker]:
                continue
            number = self._asked[worker].popleft()
            yield from self._make(thread, self._epoch, number)
            self._ready.add(number)
            if self._waiting is not None and self._waiting[0] == number:
                self.machine.wake(self._waiting[1])
                self._waiting = None

    def _is_over(self, epoch: int) -> bool:
        return self._epoch >= self.world.epochs or (self._epoch != epoch and not self.world.persistent)

    def _make(self, thread: _Thread, epoch: int, number: int) -> Iterator[Act]:
        begin_s, runnable_s, factor = self.machine.now_s, thread.runnable_s, self._factors[epoch][number]
        *of_each, of_all = self.world.stages
        parts = [(one, self.world.samples) for one in of_each] * self.world.samples + [(of_all, 1)]
        for (_, running_s, blocked_s), count in parts:
            yield "run", running_s * factor / count
            yield "block", blocked_s * factor / count
        stages = {name: (running_s * factor, blocked_s * factor) for name, running_s, blocked_s in self.world.stages}
        self.trace.made.append(Made(begin_s, self.machine.now_s, stages, thread.runnable_s - runnable_s))

    def _step(self) -> Iterator[Act]:
        world, machine = self.world, self.machine
        if world.device_s:
            if len(self._launched) >= world.run_ahead:
                yield "block", self._launched.popleft() - machine.now_s
            yield "run", world.own_s
            self._launched.append(max([machine.now_s, *self._launched]) + world.device_s)
            return
        for _ in range(world.parts):
            part = _Part(world.own_s / world.parts, machine, self._helpers)
            yield from part.acts()


class _Part:
    """A part of a step that several threads do; it ends when the last of them has."""

    def __init__(self, seconds: float, machine: _Machine, helpers: list[_Thread]) -> None:
        self._seconds, self._machine = seconds, machine
        self._left, self._waiting = 1 + len(helpers), list[_Thread]()
        for helper in helpers:
            machine.begin(lambda _: self._help(), helper)

    def _help(self) -> Iterator[Act]:
        yield "run", self._seconds
        self._left -= 1
        if not self._left:
            for thread in self._waiting:
                self._machine.wake(thread)

    def acts(self) -> Iterator[Act]:
        yield "run", self._seconds
        self._left -= 1
        yield "wait", self._all_done

    def _all_done(self, thread: _Thread) -> bool:
        if self._left:
            self._waiting.append(thread)
        return not self._left


def run(world: World) -> Trace:
    """Returns what happens in a world."""
    return _Run(world).trace
