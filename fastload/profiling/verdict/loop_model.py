"""A loop over a loader, played with known costs: how long its steps take, and how long it waits.

Workers make batches, the loop takes one after another, and all share the machine's CPUs. Time passes from one event to
the next; in between each thread goes on at a constant rate. Where more threads want to run than there are CPUs, all
take longer in proportion. The step itself may take longer still beside workers (`drag`): each of its parallel parts
ends with its last thread, which had to wait for a CPU.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastload.timing.results import Work

_RUN_AHEAD = 3
"""Steps that a loop launches on a device before it waits for the first of them."""

_MOST_STEPS = 160
"""Steps of an epoch that are played. Of more, all later ones are like the second half of these."""

_NONE_LEFT = 1e-9

_HARDLY = 0.15  # CPUs of workers beside which a step counts as alone

# Of `fitted`: how close is close, the least share of waits by which a scale can be found, which scales, how precisely.
_CLOSE, _FEW_WAITS, _SCALES, _HALVINGS = 0.01, 0.02, (0.5, 2.5), 10


@dataclass(frozen=True)
class LoopModel:
    """The costs of a loop, in seconds."""

    batches: tuple[Work, ...]  # to make each, by one worker that always has a CPU; in turn, again and again
    workers: int = 0  # threads or processes that make them; 0: the loop itself
    ahead: int = 0  # batches that may be in progress or ready at once
    in_turn: bool = True  # whether workers make batches in turn, as those of torch do, or whoever is free the next
    cpus: int = 1
    receive_s: float = 0.0  # CPU time of the loop to take a batch over
    receive_blocked_s: float = 0.0  # time in which it waits for that meanwhile
    own_s: float = 0.0  # time of a step after its batch was received, with the machine for itself
    own_cpus: float = 1.0  # CPUs that it uses meanwhile
    device_s: float = 0.0  # time of a step on a device, which works while the loop goes on; 0: there is none
    drag: float = 0.0  # part of `own_s` that it takes longer for each CPU that workers use
    startup_s: float = 0.0  # time until workers begin in the first epoch
    restart_s: float = 0.0  # in later ones
    end_s: float = 0.0  # wait at an epoch's end
    steps: int = 1  # of an epoch
    epochs: int = 1

    def played(self) -> Played:
        """Returns what comes of these costs."""
        total = _epoch(self, self.startup_s)
        if self.epochs > 1:
            later = total if self.restart_s == self.startup_s else _epoch(self, self.restart_s)
            total = Played(total.step_s + (self.epochs - 1) * later.step_s,
                           total.wait_s + (self.epochs - 1) * later.wait_s)  # fmt: skip
        count = max(1, self.steps) * self.epochs
        return Played(total.step_s / count, total.wait_s / count)

    def scaled(self, factor: float) -> LoopModel:
        """Returns the loop whose batches cost so many times as much."""
        batches = tuple(Work(batch.running_s * factor, batch.blocked_s * factor) for batch in self.batches)
        return replace(self, batches=batches)


@dataclass(frozen=True)
class Played:
    """Mean seconds of a step with the waits at its epochs' starts and ends; of these, those that it waited."""

    step_s: float
    wait_s: float


def _epoch(model: LoopModel, startup_s: float) -> Played:
    """Returns the seconds of an epoch, and those that its loop waited."""
    if not model.workers:
        # What the loop does while the device is at work takes no time of its own.
        made_s = sum(batch.total_s for batch in model.batches) / max(1, len(model.batches))
        step_s = max(model.device_s, made_s + model.receive_s + model.own_s)
        waits_s = startup_s + model.end_s
        return Played(
            waits_s + model.steps * step_s, waits_s + model.steps * (step_s - max(model.own_s, model.device_s))
        )
    epoch = _Epoch(model, startup_s)
    shown = min(model.steps, _MOST_STEPS)
    epoch.run(shown // 2)
    half_s, half_wait_s = epoch.now_s, epoch.wait_s
    epoch.run(shown)
    more = (model.steps - shown) / max(1, shown - shown // 2)
    return Played(
        epoch.now_s + more * (epoch.now_s - half_s) + model.end_s,
        epoch.wait_s + more * (epoch.wait_s - half_wait_s) + model.end_s,
    )


class _Epoch:
    """An epoch with workers, from event to event."""

    def __init__(self, model: LoopModel, startup_s: float) -> None:
        self.now_s = self.wait_s = 0.0
        self._model, self._startup_s = model, startup_s
        self._making: list[int | None] = [None] * model.workers  # the number of the batch that each worker makes
        self._left = [0.0] * model.workers  # part of it that is still to be done, 1 to 0
        count = model.workers if model.in_turn else 1
        self._asked: list[deque[int]] = [deque() for _ in range(count)]
        self._sent, self._step = 0, 0
        self._done: set[int] = set()
        self._stage, self._stage_left_s = "wait", 0.0
        self._device_ends: deque[float] = deque()  # of the steps that are launched
        for _ in range(model.ahead):
            self._ask()

    def run(self, steps: int) -> None:
        """Goes on until so many steps are over."""
        while self._step < steps:
            if self._now_may_work():
                for worker, number in enumerate(self._making):
                    asked = self._asked[worker % len(self._asked)]
                    if number is None and asked:
                        self._making[worker], self._left[worker] = asked.popleft(), 1.0
            if self._stage == "wait" and self._step in self._done:
                self._begin("receive", self._model.receive_s)
            self._pass_time()

    def _now_may_work(self) -> bool:
        return self.now_s >= self._startup_s - _NONE_LEFT

    def _ask(self) -> None:
        if self._sent < self._model.steps:
            self._asked[self._sent % len(self._asked)].append(self._sent)
            self._sent += 1

    def _begin(self, stage: str, seconds: float) -> None:
        self._stage, self._stage_left_s = stage, seconds

    def _pass_time(self) -> None:
        """Goes to the next event: a batch is made, a stage of the loop is over, workers begin."""
        model = self._model
        busy = [(worker, self._cost(number)) for worker, number in enumerate(self._making) if number is not None]
        wanted = sum(cost.running_s / cost.total_s for _, cost in busy if cost.total_s)
        own = model.own_cpus if self._stage == "own" else float(self._stage == "receive")
        stretch = max(1.0, (wanted + own) / model.cpus)
        rates = [1 / max(cost.running_s * stretch + cost.blocked_s, _NONE_LEFT) for _, cost in busy]
        slowdown = {"own": max(stretch, 1 + model.drag * wanted), "receive": stretch}.get(self._stage, 1.0)
        spans = [self._left[worker] / rate for (worker, _), rate in zip(busy, rates, strict=True)]
        if not self._now_may_work():
            spans.append(self._startup_s - self.now_s)
        if self._stage != "wait":
            spans.append(self._stage_left_s * slowdown)
        span_s = min(spans)
        self.now_s += span_s
        for (worker, _), rate in zip(busy, rates, strict=True):
            self._left[worker] -= span_s * rate
            if self._left[worker] <= _NONE_LEFT:
                self._done.add(self._making[worker] or 0)
                self._making[worker] = None
        if self._stage == "wait":
            self.wait_s += span_s
            return
        self._stage_left_s -= span_s / slowdown
        if self._stage_left_s <= _NONE_LEFT * 1e-3:
            self._end_stage()

    def _end_stage(self) -> None:
        if self._stage == "receive":
            self._begin("blocked", self._model.receive_blocked_s)
        elif self._stage == "blocked":
            self._done.discard(self._step)
            self._ask()
            full = len(self._device_ends) >= _RUN_AHEAD
            self._begin("device", max(0.0, self._device_ends.popleft() - self.now_s) if full else 0.0)
        elif self._stage == "device":
            self._begin("own", self._model.own_s)
        else:
            if self._model.device_s:
                busy_until_s = max([self.now_s, *self._device_ends])
                self._device_ends.append(busy_until_s + self._model.device_s)
            self._step += 1
            self._begin("wait", 0.0)

    def _cost(self, number: int) -> Work:
        return self._model.batches[number % len(self._model.batches)]


def fitted(model: LoopModel, step_s: float) -> tuple[LoopModel, float]:
    """Returns the model with its batches' costs scaled so that a step takes as long as was measured.

    Where that is not enough, or nothing is waited for, so that no scale could be right, the second value is the
    measured time over the model's.
    """
    now = model.played()
    if not now.step_s or abs(step_s / now.step_s - 1) < _CLOSE or now.wait_s < _FEW_WAITS * now.step_s:
        return model, step_s / now.step_s if now.step_s else 1.0
    low, high = _SCALES
    if not model.scaled(low).played().step_s < step_s < model.scaled(high).played().step_s:
        return model, step_s / now.step_s
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if model.scaled(middle).played().step_s < step_s:
            low = middle
        else:
            high = middle
    found = model.scaled(math.sqrt(low * high))
    return found, step_s / found.played().step_s


def own_time(own_s: Sequence[float], beside: Sequence[float], alone_s: float = 0.0) -> tuple[float, float]:
    """Returns how long a step takes with the machine for itself, and its `drag`, from measured steps.

    Args:
        own_s: seconds of each step after its batch was received.
        beside: CPUs that workers used meanwhile.
        alone_s: how long one takes with the machine for itself, where that was measured; 0: it was not.
    """
    alone = sorted(seconds for seconds, cpus in zip(own_s, beside, strict=True) if cpus < _HARDLY)
    least = sorted(own_s)
    free_s = alone_s or (alone[len(alone) // 2] if alone else least[len(least) // 10])
    cpus = sum(beside)
    if not free_s or cpus < _HARDLY:
        return sum(own_s) / len(own_s), 0.0
    return free_s, max(0.0, (sum(own_s) - free_s * len(own_s)) / (free_s * cpus))
