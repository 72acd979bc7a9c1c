"""`workers="auto"`: how many processes the next epoch gets, by what the last one waited for.

What a batch holds is decided in `plan`, which knows no workers, so that their number may change between epochs. What
is measured is decided upon in `choose_workers`, a pure function. No torch here.

Threads keep the default number, since no other was better: 1, 2, 3, 4 threads gave 19,400, 22,600, 24,100, 26,700
images/s of 218x178x3 (each between 1,000 and 50,000: neighbours on the machine), augmented 1,520, 1,190, 1,560, 970, in
gzip 690, 740, 660, and cold from the disk 1, 2 and 4 gave 6,100, 6,600, 6,800. Whether a thread waits for a disk or for
the GIL, its clock does not tell: raised to 4 for their waits, threads gave 0.65 times the images/s (0.24 to 1.22, 7
pairs) of 2 on 32x32x3 rows.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import NamedTuple

from fastload.cpus import available_cpus
from fastload.memory import available_memory
from fastload.share import local_world_size

_log = logging.getLogger("fastload")

MOST_WORKERS = 16
"""Of one loader, unless it has more CPUs; each holds a batch or two in memory."""

# Workers that want a CPU for more of their time than this are not tried to be more.
_BUSY = 0.5
# A loop that waits less than this share of its time is fed.
_FED = 0.02
# The first batches are made while nobody works; fewer, or a shorter time, say nothing.
_LEAST_BATCHES = 8
_LEAST_S = 1.0
# More workers than the last time have to make the loop so much faster, or they go again.
_LEAST_GAIN = 1.1
# What workers of a source need, and one more for the times when a sample takes longer.
_MARGIN = 1.1
EPOCHS_TO_PAY = 4
"""Starting processes takes time that has to be won back within so many epochs: nobody knows how many will come."""

_FIRST_REST, _LONGEST_REST = 4, 64
# Of the memory that is free, what more workers may take.
_MEMORY_SHARE = 0.25


class Epoch(NamedTuple):
    """What a pass measured, from its first batch on.

    Attributes:
        batches: fresh ones.
        elapsed_s: up to its end.
        starved_s: of these, that the loop waited for batches that were not ready when it asked for them. Taking over
            one that is ready takes its time too, which no number of workers changes.
        busy_s: that all workers were on a CPU or wanted one; None: not known.
        start_s: what the first batch was waited for, with the start of the workers if they were started for it; 0:
            they were there, or cost nothing to start.
    """

    batches: int
    elapsed_s: float
    starved_s: float
    busy_s: float | None
    start_s: float = 0.0


class Limits(NamedTuple):
    """What there is.

    Attributes:
        cpus: that this rank may use.
        memory_bytes: that are free.
        worker_bytes: that one more worker takes.
        most: workers that can be of use whatever is measured.
    """

    cpus: int
    memory_bytes: int
    worker_bytes: int
    most: int


@dataclass(frozen=True)
class History:
    """What is known of earlier epochs.

    Attributes:
        before: the number that the last epoch's is a trial against; 0: it is none.
        rate: batches a second with that number.
        start_s: what starting a worker takes, as measured.
        rest: epochs for which nothing is tried.
        next_rest: how long the next rest is: twice as long after each trial in vain.
    """

    before: int = 0
    rate: float = 0.0
    start_s: float = 0.0
    rest: int = 0
    next_rest: int = _FIRST_REST


class Choice(NamedTuple):
    """The number for the coming epoch, why, and what to remember."""

    workers: int
    reason: str
    history: History


def choose_workers(
    epoch: Epoch, workers: int, limits: Limits, history: History, *, epochs_to_pay: float = EPOCHS_TO_PAY
) -> Choice:
    """What an epoch's waits make of the number of workers it ran with.

    A loop that waits a share w of its time asks for n / (1 - w) workers if n make what it gets. They help as long as
    they wait themselves: if each wants a CPU for a share b of the time, more than cpus / b are of no use. The number
    rises at once to the smaller of the two, and falls again where the loop did not become faster by that. It never
    falls below what it was at first: workers that wait cost memory and no time.

    Args:
        epoch: measured.
        workers: that it ran with.
        limits: of the machine.
        history: of the choice before; the first time an empty one.
        epochs_to_pay: within which the start of processes has to be won back.
    """
    if not tells_enough(epoch, workers):
        return Choice(workers, "the epoch was too short to tell", history)
    rate = epoch.batches / epoch.elapsed_s
    start_s = max(history.start_s, epoch.start_s / workers)
    known = History(start_s=start_s, rest=max(0, history.rest - 1), next_rest=history.next_rest)
    if history.before:
        gain = rate / history.rate
        if gain < _LEAST_GAIN:
            rest = History(start_s=start_s, rest=known.next_rest, next_rest=min(2 * known.next_rest, _LONGEST_REST))
            return Choice(history.before, f"{workers} made the loop {gain:.2f} times as fast", rest)
        known = History(start_s=start_s)
    wait_share = min(1.0, epoch.starved_s / epoch.elapsed_s)
    if wait_share < _FED:
        return Choice(workers, "the loop does not wait", known)
    if known.rest or epoch.busy_s is None:
        return Choice(workers, "nothing is tried", known)
    busy_share = min(1.0, epoch.busy_s / epoch.elapsed_s / workers)
    if busy_share > _BUSY:
        return Choice(workers, f"the workers want a CPU {busy_share:.0%} of the time, and more would not help", known)
    room = int(limits.memory_bytes * _MEMORY_SHARE) // max(1, limits.worker_bytes)
    useful = min(limits.most, workers + room, math.floor(limits.cpus / max(busy_share, 0.01)))
    needed = math.ceil(_MARGIN * workers / max(1 - wait_share, 0.01))
    target = min(useful, needed)
    if target <= workers:
        return Choice(workers, "there is no room for more", known)
    won_s = epoch.starved_s * (1 - workers / target)
    if won_s * epochs_to_pay < start_s * target:
        return Choice(workers, f"starting {target} would take longer than it saves", known)
    reason = f"the loop waited {wait_share:.0%} of the time, and the workers wanted a CPU {busy_share:.0%} of it"
    return Choice(target, reason, History(workers, rate, start_s, next_rest=known.next_rest))


def tells_enough(epoch: Epoch, workers: int) -> bool:
    """Whether it was long enough to judge so many workers by."""
    return epoch.batches >= max(_LEAST_BATCHES, 2 * workers) and epoch.elapsed_s >= _LEAST_S


class Workforce(NamedTuple):
    """The processes of a feed, and what they did in its current pass.

    Attributes:
        number: processes.
        busy_s, starved_s: since the first batch of the pass, as in `Epoch`.
        were_started: whether they were started for this pass.
        worker_bytes: of memory that one more would take.
    """

    number: int
    busy_s: float | None
    starved_s: float
    were_started: bool
    worker_bytes: int


class AutoWorkers:
    """The number of workers of one loader; `ended` may change it.

    Args:
        epochs_to_pay: as in `choose_workers`.

    Attributes:
        number: for the coming epoch; None: as many as by default.
    """

    def __init__(self, epochs_to_pay: float = EPOCHS_TO_PAY) -> None:
        self.number: int | None = None
        self._epochs_to_pay = epochs_to_pay
        self._history = History()
        self._so_far = Epoch(0, 0.0, 0.0, 0.0)

    def ended(self, force: Workforce, *, batches: int, elapsed_s: float, first_s: float) -> None:
        """Takes note of the end of a pass; never waits.

        Args:
            force: that made its batches.
            batches, elapsed_s: as in `Epoch`.
            first_s: that the first batch was waited for.
        """
        cpus = max(1, available_cpus() // local_world_size())
        limits = Limits(cpus, available_memory(), force.worker_bytes, max(MOST_WORKERS, cpus))
        # Short epochs are seen together, until they are long enough to tell.
        so_far = self._so_far
        busy_s = None if force.busy_s is None or so_far.busy_s is None else so_far.busy_s + force.busy_s
        epoch = Epoch(
            so_far.batches + batches,
            so_far.elapsed_s + elapsed_s,
            so_far.starved_s + force.starved_s,
            busy_s,
            max(so_far.start_s, first_s if force.were_started else 0.0),
        )
        if tells_enough(epoch, force.number):
            self._so_far = Epoch(0, 0.0, 0.0, 0.0)
        else:
            self._so_far = epoch
        self.number, reason, self._history = choose_workers(
            epoch, force.number, limits, self._history, epochs_to_pay=self._epochs_to_pay
        )
        if self.number != force.number:
            _log.info('workers="auto": %d from now on, not %d: %s', self.number, force.number, reason)
