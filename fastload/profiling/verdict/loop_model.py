"""A loop over a loader, played with known costs: how long its steps take, and how long it waits.

Workers make batches, the loop takes one after another, and all share the machine's CPUs. Time passes from one event to
the next; in between each thread goes on at a constant rate. Where more threads want to run than there are CPUs, all
take longer in proportion. The step itself may take longer still while workers run (`Contention`): each of its parallel
parts ends with its last thread, which had to wait for a CPU. Below it stand costs that no loop has shown, as measured
in trials.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastload.timing.results import WorkTime

# The range in which a step's slowdown is searched, and how often it is halved.
_LEAST_SLOWER, _MOST_SLOWER, _HALVINGS = 0.5, 8.0, 10

_RUN_AHEAD = 3
"""Steps that a loop launches on a device before it waits for the first of them."""

_MOST_STEPS = 160
"""Steps of an epoch that are played. Of more, all later ones are like the second half of these."""

_NONE_LEFT = 1e-9

_ROUNDS = 8  # in which the CPUs are shared out

_UNEVEN = 1.0  # of a loop without workers

_HARDLY = 0.15  # CPUs of workers; a step with less has the machine for itself

# Of `fitted`: how close is close, the least share of waits by which a scale can be found, and part of a step that has
# to change with it, which scales, how precisely.
_CLOSE, _FEW_WAITS, _LITTLE, _SCALES, _HALVINGS = 0.01, 0.02, 0.3, (0.5, 2.5), 10


@dataclass(frozen=True)
class Contention:
    """The slowdown of a step while workers use CPUs."""

    # 0: threads share CPUs in proportion; 1: a step's threads wait for the thread on the CPU with most threads
    uneven: float = 0.0
    drag: float = 0.0  # what it takes longer for each CPU that workers use, whatever the number of CPUs

    def slowdown(self, wanted: float, own_cpus: float, cpus: int) -> float:
        """Returns the time of a step on so many CPUs while workers want so many, over that without them."""
        fair = max(1.0, (own_cpus + wanted) / cpus)
        threads, whole = max(1, round(own_cpus)), math.floor(wanted)
        # Of a number of workers between two whole ones, each is there part of the time.
        less, more = (max(1, math.ceil((threads + count) / cpus)) for count in (whole, whole + 1))
        fullest = less + (wanted - whole) * (more - less)
        return (fair + self.uneven * max(0.0, fullest - fair)) * (1 + self.drag * wanted)


@dataclass(frozen=True)
class LoopModel:
    """The costs of a loop, in seconds."""

    batches: tuple[WorkTime, ...]  # to make each, by one worker that always has a CPU; in turn, again and again
    workers: int = 0  # threads or processes that make them; 0: the loop itself
    ahead: int = 0  # batches that may be in progress or ready at once
    in_turn: bool = True  # whether workers make batches in turn, as in torch, or whoever is free makes the next
    cpus: int = 1
    receive_s: float = 0.0  # CPU time of the loop to take a batch over
    receive_blocked_s: float = 0.0  # time in which it waits for that meanwhile
    own_s: float = 0.0  # time of a step after its batch was received, with the machine for itself
    own_cpus: float = 1.0  # CPUs that it uses meanwhile
    device_s: float = 0.0  # time of a step on a device, which works while the loop goes on; 0: there is none
    contention: Contention = Contention()
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
        batches = tuple(WorkTime(batch.running_s * factor, batch.blocked_s * factor) for batch in self.batches)
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
        host_s = made_s + model.receive_s + model.own_s
        total_s = startup_s + model.end_s + host_s + (model.steps - 1) * max(model.device_s, host_s) + model.device_s
        return Played(total_s, total_s - model.steps * max(model.own_s, model.device_s))
    epoch = _Epoch(model, startup_s)
    shown = min(model.steps, _MOST_STEPS)
    epoch.run(shown // 2)
    half_s, half_wait_s = epoch.now_s, epoch.wait_s
    epoch.run(shown)
    more = (model.steps - shown) / max(1, shown - shown // 2)
    return Played(
        epoch.now_s + more * (epoch.now_s - half_s) + epoch.device_left_s + model.end_s,
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

    @property
    def device_left_s(self) -> float:
        """Time until the device has done all that it was given, for which a loop waits at an epoch's end."""
        return max([0.0, *(end_s - self.now_s for end_s in self._device_ends)])

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
        busy = [(worker, self._cost(number)) for worker, number in enumerate(self._making) if number is not None]
        stretch, slowdown = self._shared([cost for _, cost in busy])
        rates = [1 / max(cost.running_s * stretch + cost.blocked_s, _NONE_LEFT) for _, cost in busy]
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

    def _shared(self, costs: Sequence[WorkTime]) -> tuple[float, float]:
        """Returns how many times as long CPU time of workers takes now, and the loop's own, for want of CPUs."""
        model = self._model
        own_cpus = model.own_cpus if self._stage == "own" else float(self._stage == "receive")
        own, stretch, slowdown = own_cpus, 1.0, 1.0
        for _ in range(_ROUNDS):
            # A worker that waits for a CPU longer waits for other things in a smaller part of its time.
            running_s = [cost.running_s * stretch for cost in costs if cost.total_s]
            blocked_s = [cost.blocked_s for cost in costs if cost.total_s]
            wanted = sum(one / (one + other) for one, other in zip(running_s, blocked_s, strict=True))
            if self._stage == "own":
                slowdown = model.contention.slowdown(wanted, own_cpus, model.cpus)
                own = own_cpus * max(1.0, (wanted + own_cpus) / model.cpus) / slowdown  # threads wait for one another
            before, stretch = stretch, max(1.0, (wanted + own) / model.cpus)
            if stretch < before * (1 + _CLOSE):
                break
        return stretch, stretch if self._stage == "receive" else slowdown

    def _cost(self, number: int) -> WorkTime:
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
    depends = (model.scaled(1.1).played().step_s / now.step_s - 1) / 0.1
    if depends < _LITTLE or not model.scaled(low).played().step_s < step_s < model.scaled(high).played().step_s:
        return model, step_s / now.step_s
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if model.scaled(middle).played().step_s < step_s:
            low = middle
        else:
            high = middle
    found = model.scaled(math.sqrt(low * high))
    return found, step_s / found.played().step_s


def own_time(
    own_s: Sequence[float], contending: Sequence[float], running_s: float, cpus: int, alone_s: float = 0.0
) -> tuple[float, Contention]:
    """Returns how long a step takes with the machine for itself, and how workers slow it down, from measured steps.

    Args:
        own_s: seconds of each step after its batch was received.
        contending: CPUs that workers wanted meanwhile.
        running_s: mean CPU time of a step, of all its threads.
        cpus: of the machine.
        alone_s: how long one takes with the machine for itself, where that was measured; 0: it was not.
    """
    alone = sorted(seconds for seconds, wanted in zip(own_s, contending, strict=True) if wanted < _HARDLY)
    least = sorted(own_s)
    # Without steps that had the machine for themselves, the shortest ones; their CPU time has to fit in.
    free_s = alone_s or (alone[len(alone) // 2] if alone else max(least[len(least) // 10], running_s / cpus))
    mean = sum(contending) / len(contending)
    if not free_s or mean < _HARDLY / 2:
        return sum(own_s) / len(own_s), Contention(_UNEVEN)
    own_cpus = min(running_s / free_s, float(cpus))
    slower = sum(own_s) / len(own_s) / free_s
    fair, fullest = (
        sum(Contention(uneven).slowdown(wanted, own_cpus, cpus) for wanted in contending) / len(contending)
        for uneven in (0, 1)
    )
    uneven = min(1.0, max(0.0, (slower - fair) / (fullest - fair))) if fullest > fair else 0.0
    expected = fair + uneven * (fullest - fair)
    return free_s, Contention(uneven, max(0.0, (slower / expected - 1) / mean))


@dataclass(frozen=True)
class WorkerCosts:
    """The cost of making batches in another process, as `DataLoader` does, in seconds."""

    batch: WorkTime  # of the worker, to hand a batch over
    receive_s: float = 0.0  # of the loop, to take it over
    touch_s: float = 0.0  # in the step, until the memory that it lies in is mapped
    unmap_s: float = 0.0  # in the next step, until that memory is given back
    start_s: float = 0.0  # until a worker begins

    @property
    def mapping_s(self) -> float:
        """Time of the loop's process in which memory with a batch is mapped, and given back."""
        return self.touch_s + self.unmap_s


@dataclass(frozen=True)
class FormatCosts:
    """The cost of a step's operations on the CPUs, by the memory format of the images, in seconds."""

    contiguous_s: float
    channels_last_s: float
    convert_s: float  # to bring a batch's images from the first format into the second
    between_s: float = math.inf  # of the step, between its operations; infinite: not known
    left_out: int = 0  # operations that could not be played again, and cost nothing here


@dataclass(frozen=True)
class FastLoaderCosts:
    """The cost of a `FastLoader` in place of the loader, in seconds."""

    batch: WorkTime  # to make one, with the machine for itself
    # How many times as long a step takes while it runs, CPUs shared in proportion left out; less than 1: the loop's
    # steps follow pauses, from which they begin with cold caches, and would follow one another.
    slows: float = 1.0
    begin_s: float = 0.0  # that the begin of an epoch takes beyond its batches

    def loop(self, own_s: float, own_cpus: float, cpus: int) -> LoopModel:
        """Returns a long epoch over it, of steps that take so long alone, on so many CPUs."""
        return LoopModel(
            batches=(self.batch,),
            workers=cpus,
            ahead=cpus + 3,
            in_turn=False,
            cpus=cpus,
            own_s=self.slows * own_s,
            own_cpus=own_cpus,
            steps=100,
        )

    def fitted(self, step_s: float, own_s: float, own_cpus: float, cpus: int) -> FastLoaderCosts:
        """Returns these with the slowdown by which such a step takes `step_s`."""
        low, high = _LEAST_SLOWER, _MOST_SLOWER
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if replace(self, slows=middle).loop(own_s, own_cpus, cpus).played().step_s < step_s:
                low = middle
            else:
                high = middle
        return replace(self, slows=low)
