"""Trials while the script runs: would fewer workers do better, and how long does a step take with none at work?

While a loop waits for data with more workers than CPUs, only some may work, in turn with all of them. And in an epoch
whose end does not come soon, where workers would have nothing left to do, all of them rest for a few steps now and
then, with batches that lie ready. Order and content of the batches stay.

Loop and workers share a file of 64-bit numbers: how many batches may be made at once (0: any, -1: none), for each
worker how many of this epoch's it has made, and then for each whether it makes one. Batches are dealt out in turn: a
worker's n-th is number `worker + n * workers` of the epoch.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from typing import Any

from .event_file import available_cpus, clock, events

VARIABLE = "FASTLOAD_DOCTOR_TRIAL"

_NONE = -1
_LOOK_S = 0.0005


def worker_id() -> int:
    """Returns the number of this worker of a `DataLoader`; -1 in any other process."""
    info = getattr(sys.modules.get("torch.utils.data._utils.worker"), "_worker_info", None)
    return info.id if info is not None else -1


class _Turns:
    """A worker's side: it waits to make its batch until few enough batches before it are unfinished."""

    longest_s = 0.5  # whoever was counted wrong goes on after that
    longest_rest_s = 2.0

    def __init__(self) -> None:
        self._path = ""
        self._numbers: Any = None

    def wait(self, fetcher: Any) -> int:
        """Waits for the turn of the batch that this worker makes next; returns its slot, 0: no trial."""
        worker, path = worker_id(), os.environ.get(VARIABLE, "")
        if path != self._path and worker >= 0:
            self._path, self._numbers = path, None
            with suppress(OSError, ValueError):
                self._numbers = _mapped(path, os.O_RDWR)
        numbers = self._numbers
        workers = len(numbers) // 2 if numbers is not None else 0
        if not 0 <= worker < workers:
            return 0
        made = getattr(fetcher, "_fastload_made", 0)
        fetcher._fastload_made = made + 1
        if made == 0:
            numbers[worker + 1] = 0
        number, since = worker + made * workers, clock()
        numbers[workers + worker + 1] = 1  # before it looks, so that a rest is not taken for complete
        while (limit := numbers[0]) and (limit == _NONE or number >= sum(numbers[1 : workers + 1]) + limit):
            if clock() - since > (self.longest_rest_s if limit == _NONE else self.longest_s):
                break
            numbers[workers + worker + 1] = 0
            time.sleep(_LOOK_S)
            numbers[workers + worker + 1] = 1
        return worker + 1

    def done(self, slot: int) -> None:
        """Counts the batch as made."""
        if slot and self._numbers is not None:
            self._numbers[slot] += 1
            self._numbers[len(self._numbers) // 2 + slot] = 0


turns = _Turns()


class WorkerTrial:
    """The loop's side.

    Each turn of fewer workers, or of all, lasts for the steps that fill `turn_s`, after as many as there are workers,
    whose batches were made before it. A rest lasts for as many steps as there are workers, each of which has just made
    a batch; there is none once enough steps were taken while no worker was at work.
    """

    settle_s = 0.7
    turn_s = 0.8
    turns = 6
    enough_alone = 6
    rests_after_s = 2.0  # of the loop
    rest_share = 0.04  # of the loop's time, that rests may take
    longest_wait_s = 1.0  # until the workers have made their batches

    def __init__(self, workers: int, limit: int) -> None:
        self.workers, self.limit = workers, limit  # 0: no trial of fewer
        self.path = os.path.join(events.folder, f"{os.getpid()}-{time.monotonic_ns()}.trial")
        self.numbers = _mapped(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, bytes(8 * (2 * workers + 1)))
        self.left = self.turns if limit else 0
        self.alone = 0  # steps that began and ended while no worker was at work
        self._looped_s = self._rested_s = 0.0
        self.epoch_ends()

    @staticmethod
    def of(loader: Any, before: WorkerTrial | None) -> WorkerTrial | None:
        """Returns the trial of a loader with workers, about to be started; None where there can be none."""
        os.environ.pop(VARIABLE, None)
        if before is not None:
            before.epoch_ends()  # it may have been left by break
        workers = getattr(loader, "num_workers", 0) or 0
        if _start_method(loader) == "forkserver":
            return None  # its environment is the first loader's
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
        limit = available_cpus() // (int(ranks) if ranks.isdigit() and int(ranks) else 1)
        if not (type(workers) is int and workers > 0 and limit > 0):
            return None
        try:
            trial = before or WorkerTrial(workers, limit if limit < workers else 0)
        except (OSError, ValueError):
            return None
        os.environ[VARIABLE] = trial.path
        return trial

    def epoch_ends(self) -> None:
        """Lets all workers work until the next epoch waits for them."""
        self.numbers[0] = 0
        self._last, self._was_idle = 0.0, False
        self._course = self._take_turns()
        next(self._course)

    def step_begins(self, loader: int, now: float, waited: float) -> None:
        """Notes that a batch was received, `waited` seconds after it was asked for. Waits where a rest begins."""
        if self._last:
            self._looped_s += now - self._last
        is_idle, self._last = self._is_idle(), now
        self.alone += is_idle and self._was_idle
        self._was_idle = is_idle
        if self.left or self.numbers[0] or self.alone < self.enough_alone:
            self._course.send((loader, now, waited))

    def _is_idle(self) -> bool:
        return not any(self.numbers[self.workers + 1 :])

    def _take_turns(self) -> Generator[None, tuple[int, float, float], None]:
        """Takes the arguments of `step_begins` for each step of an epoch, and says how many workers may work."""
        _, begun, _ = yield
        now, waited_s, steps = begun, 0.0, 1
        # Workers making the first batches wait for one another. Does the loop wait for data?
        while now - begun <= self.settle_s or steps < 3 * self.workers or waited_s <= 0.2 * (now - begun):
            _, now, waited = yield
            waited_s, steps = waited_s + waited, steps + 1
        while True:
            if self._rest_is_due():
                yield from self._rest()
            elif self.left:
                yield from self._turn()
            else:
                yield

    def _turn(self) -> Generator[None, tuple[int, float, float], None]:
        for _ in range(self.workers):
            _, since, _ = yield
        steps, now = 0, since
        while now - since < self.turn_s or steps < min(8, self.workers):
            loader, now, _ = yield
            steps += 1
        limit, self.left = self.numbers[0], self.left - 1
        events.write({"e": "trial", "id": loader, "t": now, "limit": limit, "steps": steps, "s": now - since})
        self.numbers[0] = 0 if limit or not self.left else self.limit

    def _rest_is_due(self) -> bool:
        return (
            self.alone < self.enough_alone
            and self._looped_s >= self.rests_after_s
            and self._rested_s <= self.rest_share * self._looped_s
        )

    def _rest(self) -> Generator[None, tuple[int, float, float], None]:
        before, since, waited_until = self.numbers[0], self._last, clock() + self.longest_wait_s
        self.numbers[0] = _NONE
        while not self._is_idle() and clock() < waited_until:
            time.sleep(_LOOK_S)
        self._was_idle = self._is_idle()  # the step that begins now
        for _ in range(self.workers):
            _, now, _ = yield
        self.numbers[0] = before
        self._rested_s += now - since
        for _ in range(3 * self.workers):  # until they are as far ahead as before
            yield


def _start_method(loader: Any) -> str:
    """Returns how its workers are started, without fixing multiprocessing's start method."""
    context = getattr(loader, "multiprocessing_context", None) or sys.modules["multiprocessing"]
    chosen = context.get_start_method(allow_none=True)
    if chosen is not None:
        return str(chosen)
    return "spawn" if sys.platform == "darwin" else "forkserver" if sys.version_info >= (3, 14) else "fork"


def _mapped(path: str, flags: int, content: bytes = b"") -> Any:
    """Returns the 64-bit numbers of a file, shared with other processes; `content` is written to it first."""
    fd = os.open(path, flags, 0o600)
    try:
        os.write(fd, content)
        return memoryview(mmap.mmap(fd, 0)).cast("q")
    finally:
        os.close(fd)
