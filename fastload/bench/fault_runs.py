"""How a loop takes faults: the same loop with and without, in turn; and a worker process killed in mid-epoch."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastload.bench.crop import CropSample
from fastload.bench.faults import DelayedDataset, Delays, Fault, signed
from fastload.bench.loop import LoopFigures, Told, run_loop
from fastload.bench.passes import run_for
from fastload.bench.steps import TrainingStep
from fastload.bench.subject import Subject
from fastload.dataset import PackedDataset
from fastload.errors import WorkerError
from fastload.loader import FastLoader
from fastload.pairs import Spread, compare

PAIRS = 3
KILL_STEPS = 24
"""Batches of the epoch in which a worker is killed, at most."""


@dataclass(frozen=True)
class FaultFigures:
    """What a loop made of slow reads.

    Attributes:
        fault: as it was asked for.
        ratio: rate with the fault over that without, pair by pair.
        samples_per_s: with it.
        clean_samples_per_s: without.
        delays: reads that were held up while the loop was metered.
        delayed_s: by how much, all together, in the threads that read.
        loop: the metered loop, with the fault.
    """

    fault: str
    ratio: Spread
    samples_per_s: Spread
    clean_samples_per_s: Spread
    delays: int
    delayed_s: float
    loop: LoopFigures


@dataclass(frozen=True)
class KillFigures:
    """What a loop saw of a worker process that was killed, and how it went on.

    Attributes:
        fault: as it was asked for.
        pid: of the worker.
        steps_before: batches handed over when it was killed, and until the error.
        steps_until_error: of these, batches handed over after the kill, which lay ready.
        error_after_s: from the kill to the error in the loop.
        error: the message.
        names_worker: whether it names the process that was killed.
        resumed_after_s: from `iter()` with the loaded state to the next batch, new workers started.
        steps_after: batches of the rest of the epoch.
        samples: of the epoch, all of them planned.
        each_once: whether every one came once, none twice.
    """

    fault: str
    pid: int
    steps_before: int
    steps_until_error: int
    error_after_s: float
    error: str
    names_worker: bool
    resumed_after_s: float
    steps_after: int
    samples: int
    each_once: bool


def measure_fault(
    subject: Subject,
    step: TrainingStep,
    fault: Fault,
    *,
    title: str,
    command: str,
    told: Told = lambda meter, part: None,
) -> FaultFigures:
    """Slow reads: half of the options' `seconds` in turn with the loop without the fault, half under a meter."""
    seconds = subject.options.seconds / 2
    dataset = DelayedDataset(subject.path, subject.options.split)
    dataset.delays = Delays(fault, subject.batch_size)
    loader = subject.loader(dataset)

    def train(batch: Any) -> int:
        step(batch)
        return len(batch[0])

    def cold() -> None:
        if subject.options.cold:
            loader.close()
            subject.make_cold()

    def rate(one: FastLoader | None) -> float:
        cold()
        batches = subject.batches(one or subject.kept())
        return run_for(batches, seconds / (2 * PAIRS), train, discard=subject.discard, settle=step.finish).samples_per_s

    try:
        step.begin()
        result = compare(lambda: rate(loader), lambda: rate(None), pairs=PAIRS, warm_up=0)
        before = dataset.delays.count, dataset.delays.seconds
        cold()
        epochs = 1 if subject.options.cold else None
        loop = run_loop(loader, step, seconds, title=title, command=command, epochs=epochs, told=told)
    finally:
        loader.close()
    return FaultFigures(
        fault=fault.text,
        ratio=result["ratio"],
        samples_per_s=result["way"],
        clean_samples_per_s=result["base"],
        delays=dataset.delays.count - before[0],
        delayed_s=dataset.delays.seconds - before[1],
        loop=loop,
    )


def measure_kill(subject: Subject, step: TrainingStep, fault: Fault) -> KillFigures:
    """Kills a worker process after a third of a short epoch, and goes on with the rest of it.

    A Python transform that does nothing but the crop makes the loader use processes, on samples that are signed by who
    made them.
    """
    options = subject.options
    transform = signed if subject.crop is None else CropSample(subject.crop.size, signed)
    dataset = PackedDataset(subject.path, options.split, transform=transform)
    dataset = dataset.select(range(min(len(dataset), KILL_STEPS * subject.batch_size)))
    loader = subject.loader(dataset, workers=options.workers or 2)
    rows: list[int] = []

    def train(batch: Any) -> int:
        step(batch)
        rows.extend(batch.rows.cpu().numpy()[batch.valid.cpu().numpy()].tolist())
        return int(batch[-1][0])  # the process that made its first sample

    try:
        loader.set_epoch(0)
        planned = len(loader)
        kill_at, killed, killed_s, steps = max(1, planned // 3), 0, 0.0, 0
        try:
            for steps, batch in enumerate(loader, 1):
                pid = train(batch)
                del batch
                if steps == kill_at:
                    killed, killed_s = pid, time.perf_counter()
                    os.kill(pid, signal.SIGKILL)
            error: WorkerError | None = None
        except WorkerError as exc:
            error = exc
        error_after_s = time.perf_counter() - killed_s
        loader.load_state_dict(loader.state_dict())
        begin, resumed_s, steps_after = time.perf_counter(), 0.0, 0
        for batch in loader if error is not None else ():
            resumed_s = resumed_s or time.perf_counter() - begin
            steps_after += 1
            train(batch)
            del batch
        step.finish()
    finally:
        loader.close()
    return KillFigures(
        fault=fault.text,
        pid=killed,
        steps_before=steps,
        steps_until_error=steps - kill_at,
        error_after_s=error_after_s if error is not None else 0.0,
        error=str(error or ""),
        names_worker=str(killed) in str(error or ""),
        resumed_after_s=resumed_s,
        steps_after=steps_after,
        samples=len(np.unique(rows)),
        each_once=len(np.unique(rows)) == len(rows) and steps + steps_after == planned,
    )
