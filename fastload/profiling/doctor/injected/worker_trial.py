"""A trial while the script runs: would fewer workers do better?

While a loop waits for data with more workers than CPUs, only some may work, in turn with all of them. Order and content
of the batches stay. Loop and workers share a file of 64-bit numbers: how many batches may be made at once (0: any), and
for each worker how many of this epoch's it has made. Batches are dealt out in turn: a worker's n-th is number
`worker + n * workers` of the epoch.
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


def worker_id() -> int:
    """Returns the number of this worker of a `DataLoader`; -1 in any other process."""
    info = getattr(sys.modules.get("torch.utils.data._utils.worker"), "_worker_info", None)
    return info.id if info is not None else -1


class _Turns:
    """A worker's side: it waits to make its batch until few enough batches before it are unfinished."""

    longest_s = 0.5  # whoever was counted wrong goes on after that

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
        if numbers is None or not 0 < worker + 1 < len(numbers):
            return 0
        made = getattr(fetcher, "_fastload_made", 0)
        fetcher._fastload_made = made + 1
        if made == 0:
            numbers[worker + 1] = 0
        number, until = worker + made * (len(numbers) - 1), clock() + self.longest_s
        while numbers[0] and number >= sum(numbers[1:]) + numbers[0] and clock() < until:
            time.sleep(0.0005)
        return worker + 1

    def done(self, slot: int) -> None:
        """Counts the batch as made."""
        if slot and self._numbers is not None:
            self._numbers[slot] += 1


turns = _Turns()


class WorkerTrial:
    """The loop's side.

    Each turn lasts for the steps that fill `turn_s`, after as many as there are workers, whose batches were made before
    it.
    """

    settle_s = 0.7
    turn_s = 0.8
    turns = 6

    def __init__(self, workers: int, limit: int) -> None:
        self.workers, self.limit = workers, limit
        self.path = os.path.join(events.folder, f"{os.getpid()}-{time.monotonic_ns()}.trial")
        self.numbers = _mapped(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, bytes(8 * (workers + 1)))
        self.left = self.turns
        self.epoch_ends()

    @staticmethod
    def of(loader: Any, before: WorkerTrial | None) -> WorkerTrial | None:
        """Returns the trial of a loader with more workers than CPUs, about to be started; None for others."""
        os.environ.pop(VARIABLE, None)
        if before is not None:
            before.epoch_ends()  # it may have been left by break
        workers = getattr(loader, "num_workers", 0) or 0
        if _start_method(loader) == "forkserver":
            return None  # its environment is that of the first loader
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
        limit = available_cpus() // (int(ranks) if ranks.isdigit() and int(ranks) else 1)
        if not 0 < limit < workers:
            return None
        try:
            trial = before or WorkerTrial(workers, limit)
        except (OSError, ValueError):
            return None
        os.environ[VARIABLE] = trial.path
        return trial

    def epoch_ends(self) -> None:
        """Lets all workers work until the next epoch waits for them."""
        self.numbers[0] = 0
        self._course = self._take_turns()
        next(self._course)

    def step_begins(self, loader: int, now: float, waited: float) -> None:
        """Notes that a batch was received, `waited` seconds after it was asked for."""
        if self.left:
            self._course.send((loader, now, waited))

    def _take_turns(self) -> Generator[None, tuple[int, float, float], None]:
        """Takes the arguments of `step_begins` for each step of an epoch, and says how many workers may work."""
        _, begun, _ = yield
        now, waited_s, steps = begun, 0.0, 1
        # Those of the first batches wait for one another. Does the loop wait for data?
        while now - begun <= self.settle_s or steps < 3 * self.workers or waited_s <= 0.2 * (now - begun):
            _, now, waited = yield
            waited_s, steps = waited_s + waited, steps + 1
        while True:
            for _ in range(self.workers):
                _, since, _ = yield
            steps = 0
            while now - since < self.turn_s or steps < min(8, self.workers):
                loader, now, _ = yield
                steps += 1
            limit, self.left = self.numbers[0], self.left - 1
            events.write({"e": "trial", "id": loader, "t": now, "limit": limit, "steps": steps, "s": now - since})
            self.numbers[0] = 0 if limit or not self.left else self.limit


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
