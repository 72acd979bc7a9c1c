"""`workers="auto"`: chooses how many processes the next epoch gets, from the waits of the last one.

What a batch holds is decided in `plan`, which knows no workers, so that their number may change between epochs.
`choose_workers` decides, as a pure function of what was measured. No torch here.

Threads keep the default number, since on two CPUs no other was better: 1, 2, 3, 4 gave 19,400, 22,600, 24,100, 26,700
images/s of 218x178x3 (each between 1,000 and 50,000: neighbours on the machine), augmented 1,520, 1,190, 1,560, 970, in
gzip 690, 740, 660, and cold from the disk 1, 2 and 4 gave 6,100, 6,600, 6,800. Its clock does not show whether a
thread waits for a disk or for the GIL: raised to 4 for their waits, threads gave 0.65 times the images/s (0.24 to 1.22,
7 pairs) of 2 on 32x32x3 rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from fastload.distributed.ranks import cpus_of_rank
from fastload.system.machine import available_memory

_log = logging.getLogger("fastload")

MOST_WORKERS = 16
"""Most workers of one loader, unless it has more CPUs; each holds a batch or two in memory."""

# Where workers want a CPU for more of their time than this, more of them are not tried.
_BUSY = 0.5
# A loop that waits less than this share of its time is fed.
_FED = 0.02
# The first batches are made while nobody trains; fewer, or a shorter time, say nothing.
_LEAST_BATCHES = 8
_LEAST_S = 1.0
# More workers than before have to make the loop so much faster, or they are given up.
_LEAST_GAIN = 1.1
# Workers beyond those that suffice on average, for the times when a sample takes longer.
_MARGIN = 1.1
# Starting processes takes time that has to be won back within so many epochs: nobody knows how many will come.
_EPOCHS_TO_PAY = 4

_FIRST_REST, _LONGEST_REST = 4, 64
# The part of the free memory that more workers may take.
_MEMORY_SHARE = 0.25


class MeasuredPass(NamedTuple):
    """The measurements of a pass, from its first batch on."""

    batches: int  # batches read; echoes do not count
    elapsed_s: float  # seconds up to the end of the pass
    # Seconds of these that the loop waited for batches that were not ready when it asked for them. Taking over one that
    # is ready takes its time too, which no number of workers changes.
    starved_s: float
    busy_s: float | None  # seconds that all workers together ran or wanted a CPU; None: not known
    start_s: float = 0.0  # seconds that the first batch was waited for, if workers were started for it; else 0

    def followed_by(self, other: MeasuredPass) -> MeasuredPass:
        """Returns the measurements of both passes together."""
        return MeasuredPass(
            self.batches + other.batches,
            self.elapsed_s + other.elapsed_s,
            self.starved_s + other.starved_s,
            None if self.busy_s is None or other.busy_s is None else self.busy_s + other.busy_s,
            max(self.start_s, other.start_s),
        )


_NOTHING = MeasuredPass(0, 0.0, 0.0, 0.0)


class PassMeter:
    """Measures a pass while it runs; what comes before its first batch, such as imports, does not count.

    Args:
        is_first: whether workers were started for it.
    """

    def __init__(self, *, is_first: bool) -> None:
        self.starved_s = 0.0
        self._is_first = is_first
        self._has_begun = False
        self._busy_before_s: float | None = None

    def note(self, starved_s: float, busy_s: Callable[[], float | None]) -> None:
        """Takes note of a batch: how long it was waited for, if it was not ready, and the workers' time so far."""
        if self._has_begun:
            self.starved_s += starved_s
        else:
            self._has_begun, self._busy_before_s = True, busy_s()

    def measured(self, batches: int, elapsed_s: float, first_s: float, busy_s: float | None) -> MeasuredPass:
        """Returns the measurements, now that it is over; `first_s`: how long the first batch was waited for."""
        before_s = self._busy_before_s
        busy_s = None if before_s is None or busy_s is None else busy_s - before_s
        return MeasuredPass(batches, elapsed_s, self.starved_s, busy_s, first_s if self._is_first else 0.0)


@dataclass(frozen=True)
class History:
    """Measurements of earlier epochs."""

    before: int = 0  # number of workers that the last epoch's is tried against; 0: nothing is being tried
    rate: float = 0.0  # batches a second with that number
    start_s: float = 0.0  # seconds that starting a worker takes, as measured
    rest: int = 0  # epochs for which nothing is tried
    next_rest: int = _FIRST_REST  # length of the next rest: twice as long after each trial in vain


class WorkerChoice(NamedTuple):
    """The number for the coming epoch, why, and what to remember."""

    workers: int
    reason: str
    history: History


def choose_workers(epoch: MeasuredPass, workers: int, history: History, *, cpus: int, room: int) -> WorkerChoice | None:
    """Returns the number of workers for the next epoch, from the waits of the last one.

    A loop that waits a share w of its time asks for n / (1 - w) workers if n make what it gets. They help as long as
    they wait themselves: if each wants a CPU for a share b of the time, more than cpus / b are of no use. The number
    rises at once to the smaller of the two, and falls again where the loop did not become faster by that. It never
    falls below what it was at first: workers that wait cost memory and no time. None: the epoch was too short to tell.
    `cpus` are those that this rank may use, `room` is how many more workers the memory has room for.
    """
    if epoch.batches < max(_LEAST_BATCHES, 2 * workers) or epoch.elapsed_s < _LEAST_S:
        return None
    rate = epoch.batches / epoch.elapsed_s
    start_s = max(history.start_s, epoch.start_s / workers)
    known = History(start_s=start_s, rest=max(0, history.rest - 1), next_rest=history.next_rest)
    if history.before:
        gain = rate / history.rate
        if gain < _LEAST_GAIN:
            rest = History(start_s=start_s, rest=known.next_rest, next_rest=min(2 * known.next_rest, _LONGEST_REST))
            return WorkerChoice(history.before, f"{workers} made the loop {gain:.2f} times as fast", rest)
        known = History(start_s=start_s)
    wait_share = min(1.0, epoch.starved_s / epoch.elapsed_s)
    if wait_share < _FED:
        return WorkerChoice(workers, "the loop does not wait", known)
    if known.rest or epoch.busy_s is None:
        return WorkerChoice(workers, "nothing is tried", known)
    busy_share = min(1.0, epoch.busy_s / epoch.elapsed_s / workers)
    if busy_share > _BUSY:
        return WorkerChoice(
            workers, f"the workers want a CPU {busy_share:.0%} of the time, and more would not help", known
        )
    useful = min(max(MOST_WORKERS, cpus), workers + room, math.floor(cpus / max(busy_share, 0.01)))
    needed = math.ceil(_MARGIN * workers / max(1 - wait_share, 0.01))
    target = min(useful, needed)
    if target <= workers:
        return WorkerChoice(workers, "there is no room for more", known)
    won_s = epoch.starved_s * (1 - workers / target)
    if won_s * _EPOCHS_TO_PAY < start_s * target:
        return WorkerChoice(workers, f"starting {target} would take longer than it saves", known)
    reason = f"the loop waited {wait_share:.0%} of the time, and the workers wanted a CPU {busy_share:.0%} of it"
    return WorkerChoice(target, reason, History(workers, rate, start_s, next_rest=known.next_rest))


class AutoWorkers:
    """Chooses the number of workers of one loader, whenever a pass has ended."""

    def __init__(self) -> None:
        self.number: int | None = None  # for the coming epoch; None: as many as by default
        self._history = History()
        self._so_far = _NOTHING

    def ended(self, measured: MeasuredPass, workers: int, *, worker_bytes: int) -> None:
        """Takes note of the end of a pass of so many workers; one more would take `worker_bytes`. Never waits."""
        cpus = cpus_of_rank()
        room = int(available_memory() * _MEMORY_SHARE) // max(1, worker_bytes)
        epoch = self._so_far.followed_by(measured)
        self.number, choice = workers, choose_workers(epoch, workers, self._history, cpus=cpus, room=room)
        if choice is None:
            self._so_far = epoch  # short epochs are taken together, until they are long enough to tell
            return
        self.number, reason, self._history = choice
        self._so_far = _NOTHING
        if self.number != workers:
            _log.info('workers="auto": %d from now on, not %d: %s', self.number, workers, reason)
