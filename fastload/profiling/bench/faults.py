"""Faults injected on purpose, and how a training loop takes them.

    slow-disk=MS       every batch takes MS milliseconds longer to read
    stall=MS@EVERY     one batch of EVERY takes MS milliseconds longer
    kill-worker        a worker process is killed with SIGKILL in mid-epoch

The delay happens in the threads that read; the loader's options stay as they are.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.dataset import PackedDataset
from fastload.errors import OptionError, WorkerError
from fastload.loader.loader import FastLoader
from fastload.profiling.bench.passes import Spread, TimedPass, compare
from fastload.profiling.bench.subject import CropSample, Subject
from fastload.profiling.bench.training_loop import LoopFigures, TrainingStep
from fastload.read.linear import Read
from fastload.read.reader import Rows

KILL_WORKER = "kill-worker"
PAIRS = 3
KILL_STEPS = 24
"""Largest number of batches in the epoch in which a worker is killed."""


@dataclass(frozen=True)
class Fault:
    """One fault to inject."""

    text: str  # of the option
    delay_s: float = 0.0  # added to the read of a batch
    every: int = 0  # one batch of this many is delayed; 0: none, a worker is killed instead


def parse_fault(text: str) -> Fault:
    """Returns the fault that `slow-disk=20`, `stall=300@50` or `kill-worker` asks for, or raises OptionError."""
    words = text.strip()
    if words == KILL_WORKER:
        return Fault(words)
    found = re.fullmatch(r"(?:slow-disk=(\d+(?:\.\d+)?)|stall=(\d+(?:\.\d+)?)@(\d+))", words)
    if not found or (found[3] is not None and int(found[3]) < 1):
        raise OptionError(
            f"--inject {text}: choose slow-disk=MS (every batch takes MS milliseconds longer to read), "
            f"stall=MS@EVERY (one batch of EVERY does, such as stall=300@50) or {KILL_WORKER}."
        )
    delay_ms, every = float(found[1] or found[2]), int(found[3] or 1)
    return Fault(words, delay_ms / 1000, every)


class Delays:
    """Decides which reads are delayed, and counts them (`count`, `seconds` in all). Thread-safe."""

    def __init__(self, fault: Fault, batch_size: int) -> None:
        self._delay_s, self._period = fault.delay_s, fault.every * batch_size
        self._lock = threading.Lock()
        self._rows = self.count = 0
        self.seconds = 0.0

    def begin_pass(self) -> None:
        """Begins to count in the middle of a period: so many batches have one delay, also when more are read ahead."""
        with self._lock:
            self._rows = self._period // 2

    def before(self, num_rows: int) -> None:
        """Sleeps if a batch that is to be delayed is among the next `num_rows` rows."""
        with self._lock:
            # Counted in rows, not in calls: several small batches are read at once, and an epoch's last may be short.
            first, self._rows = self._rows, self._rows + num_rows
            times = self._rows // self._period - first // self._period
            self.count += times
            self.seconds += times * self._delay_s
        if times:
            time.sleep(times * self._delay_s)


class DelayedDataset(PackedDataset):
    """A `PackedDataset` whose reads are delayed, when threads of this process read it."""

    delays: Delays

    def open_reader(self, read: Read, *, cache_chunks: int, windows: bool) -> Rows:
        reader = super().open_reader(read, cache_chunks=cache_chunks, windows=windows)
        gather = reader.gather

        def delayed(rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]]) -> int:
            self.delays.before(len(rows))
            return gather(rows, outs)

        reader.gather = delayed  # type: ignore[method-assign]
        return reader


def signed(sample: tuple[Any, ...]) -> tuple[Any, ...]:
    """A transform that appends the id of its process to the sample."""
    return (*sample, os.getpid())


@dataclass(frozen=True)
class FaultFigures:
    """Figures of a loop with slow reads."""

    fault: str  # text of the option
    ratio: Spread  # rate with the fault divided by the rate without, for each pair
    samples_per_s: Spread  # rate with the fault
    clean_samples_per_s: Spread  # rate without
    delays: int  # reads that were delayed during the metered loop
    delayed_s: float  # sum of these delays, in the reading threads
    loop: LoopFigures  # the metered loop, with the fault


@dataclass
class KillFigures:
    """Figures of a loop one of whose worker processes was killed, and that then resumed."""

    fault: str  # text of the option
    pid: int = 0  # of the worker
    steps_before: int = 0  # batches received before the error
    steps_until_error: int = 0  # of these, batches received after the kill, which were ready by then
    error_after_s: float = 0.0  # from the kill to the error in the loop
    error: str = ""  # the message; empty: all batches were made by then
    names_worker: bool = False  # whether the message names the process that was killed
    resumed_after_s: float = 0.0  # from `iter()` on the restored loader to its next batch; this starts new workers
    steps_after: int = 0  # batches of the rest of the epoch
    samples: int = 0  # distinct samples received in the epoch
    each_once: bool = False  # whether the epoch was complete and no sample came twice
    others_cpus: float | None = None  # CPUs that other programs used meanwhile; None: not known


def measure_fault(
    subject: Subject, step: TrainingStep, fault: Fault, train: Callable[[FastLoader, float], LoopFigures]
) -> FaultFigures:
    """Measures a loop with slow reads, half of `options.seconds` in turn with the loop without, half under a meter.

    Each pass is as long as one batch of `fault.every` takes to be delayed, or a multiple; if that takes long, there are
    fewer pairs. `train` is called under the meter, with the loader and the seconds.
    """
    seconds = subject.options.seconds / 2
    dataset = DelayedDataset(subject.path, subject.options.split)
    delays = dataset.delays = Delays(fault, subject.batch_size)
    loader = subject.loader(dataset)

    def timed(one: FastLoader | None) -> TimedPass:
        if subject.options.cold:
            loader.close()
        delays.begin_pass()
        return subject.run(seconds / (2 * PAIRS), step, loader=one, finish=step.finish, multiple=fault.every)

    try:
        step.begin()
        pairs = max(1, min(PAIRS, round(seconds / 2 / max(timed(None).seconds, 1e-9))))
        result = compare(lambda: timed(loader).samples_per_s, lambda: timed(None).samples_per_s, pairs=pairs, warm_up=0)
        before = delays.count, delays.seconds
        if subject.options.cold:
            loader.close()
        loop = train(loader, seconds)
    finally:
        loader.close()
    return FaultFigures(
        fault=fault.text,
        ratio=result["ratio"],
        samples_per_s=result["way"],
        clean_samples_per_s=result["base"],
        delays=delays.count - before[0],
        delayed_s=delays.seconds - before[1],
        loop=loop,
    )


def measure_kill(subject: Subject, step: TrainingStep, fault: Fault) -> KillFigures:
    """Kills a worker process after a third of a short epoch, restores the loader's state, and finishes the epoch.

    The worker is known by a Python transform, which also makes the loader use processes.
    """
    options = subject.options
    transform = signed if subject.crop is None else CropSample(subject.crop.size, signed)
    dataset = PackedDataset(subject.path, options.split, transform=transform)
    dataset = dataset.select(range(min(len(dataset), KILL_STEPS * subject.batch_size)))
    loader = subject.loader(dataset, workers=options.workers or 2)
    found, rows = KillFigures(fault.text), list[int]()

    def train(batch: Any) -> int:
        step(batch)
        rows.extend(batch.rows.cpu()[batch.valid.cpu()].tolist())
        return int(batch[-1][0])  # the process that made its first sample

    try:
        loader.set_epoch(0)
        planned = len(loader)
        kill_at, killed_s = max(1, planned // 3), 0.0
        try:
            for found.steps_before, batch in enumerate(loader, 1):
                pid = train(batch)
                del batch
                if found.steps_before == kill_at:
                    found.pid, killed_s = pid, time.perf_counter()
                    os.kill(pid, signal.SIGKILL)
        except WorkerError as exc:
            found.error_after_s = time.perf_counter() - killed_s
            found.error = str(exc).replace(dataset.file.name, dataset.file.path.name)  # figures name no folder
        loader.load_state_dict(loader.state_dict())
        begin = time.perf_counter()
        for batch in loader if found.error else ():
            found.resumed_after_s = found.resumed_after_s or time.perf_counter() - begin
            found.steps_after += 1
            train(batch)
            del batch
        step.finish()
    finally:
        loader.close()
    found.steps_until_error = found.steps_before - kill_at
    found.names_worker = str(found.pid) in found.error
    found.samples = len(np.unique(rows))
    found.each_once = found.samples == len(rows) and found.steps_before + found.steps_after == planned
    return found
