"""Headspace: how fast the step is on one batch that is there already, in turn with the loop that loads its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastload.bench.passes import run_for
from fastload.bench.steps import TrainingStep
from fastload.bench.subject import Subject
from fastload.pairs import Spread, compare

PAIRS = 3
HOW_IN_TURN = "measured on one cached batch, in turn with the loop"


def headspace_in_turn(
    subject: Subject, step: TrainingStep, *, told: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Spread]:
    """The loop's rate and the cached batch's, for `seconds` of the options.

    Returns:
        `way`: images a second of the loop; `base`: of the same step on one cached batch, what the loader could at most
        give; `ratio`: of each pair.
    """
    cold = subject.options.cold
    seconds = subject.options.seconds / (2 * PAIRS)
    done = 0

    def train(batch: Any) -> int:
        step(batch)
        return len(batch[0])

    def turn(way: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            nonlocal done
            rate = way()
            done += 1
            told(done, 2 * PAIRS)
            return rate

        return run

    def loop() -> float:
        subject.make_cold()
        batches = subject.batches(subject.kept())
        return run_for(batches, seconds, train, discard=subject.discard, settle=step.finish).samples_per_s

    def cached_steps() -> float:
        return run_for(_again(cached), seconds, train, settle=step.finish).samples_per_s

    cached = [field.clone(memory_format=torch.preserve_format) for field in next(iter(subject.kept()))]
    if cold:
        subject.close()
    step.begin()
    return compare(turn(loop), turn(cached_steps), pairs=PAIRS, warm_up=0)


def _again(batch: Any) -> Iterator[Any]:
    while True:
        yield batch
