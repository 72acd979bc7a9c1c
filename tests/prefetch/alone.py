"""Runs stages on one batch, by themselves: no pool, no threads, no producer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from fastload import FastLoader
from fastload.plan import PlannedBatch
from fastload.prefetch.ring import Ring, SlotField
from fastload.prefetch.stages.transform import Augmentation
from fastload.prefetch.work import Layout, Opened, Orders, Stage, Where, Work

UNTOUCHED = 0xA5


@contextmanager
def opened(source: Any, **options: Any) -> Iterator[Opened]:
    """A context with what stages share of a loader's data and options."""
    shared = Opened(FastLoader(source, 4, workers=1, **options)._options, 1)
    try:
        yield shared
    finally:
        shared.close()


def augmentation(shared: Opened, transforms: Sequence[Any], done: int = 0) -> Augmentation:
    """Transforms with the options of a loader's data."""
    data = shared.options.packed
    return Augmentation(tuple(transforms), 0, 0, data.ignore_index, data.dataset.coordinates(), done)


def run_alone(
    shared: Opened,
    stages: Sequence[Stage],
    rows: Sequence[int],
    *,
    given: Layout | None = None,
    members: int = 1,
    epoch: int = 0,
    prepare: Callable[[Work], None] = lambda _: None,
) -> Work:
    """Returns the work of a batch of rows after these stages.

    Args:
        given: layout of a slot before the first of them.
        members: batches that the rows are.
        prepare: changes the work before the first.
    """
    for stage in stages:
        stage.open(shared)
    layout = dict(given or {})
    for stage in stages:
        layout = stage.output(layout)
    fields = [SlotField(name, (len(rows), *shape), dtype) for name, (shape, dtype) in layout.items()]
    fields += [field for stage in stages for field in stage.own_fields(len(rows))]
    backend = shared.options.backend
    ring = Ring(fields, 4, manual_release=backend is not None)
    for stage in stages:
        if hasattr(stage, "ring"):
            stage.ring = ring
    slot = ring.take()
    assert slot is not None
    slot.memory.fill(UNTOUCHED)
    views = {name: dtype for stage in stages for name, dtype in stage.views.items()}
    work = Work(slot, Orders(iter(()), stages, views=views))
    parts = np.split(np.asarray(rows, np.int64), members)
    work.plan(epoch, [PlannedBatch(part, np.ones(len(part), np.bool_), len(part), n) for n, part in enumerate(parts)])
    work.in_slot()
    prepare(work)
    handed_over = not work.in_one_piece
    for stage in stages:
        if stage.where is Where.SIDE_STREAM and not handed_over:
            work.arrays, handed_over = dict(slot.arrays), True  # as the pool of threads does: the slot is cut there
        if stage.where is Where.SIDE_STREAM:
            with backend.side_stream():
                stage.run(work)
        else:
            if stage.where is Where.USE and backend is not None:
                backend.drain()  # the stream that uses a batch waits for it
            stage.run(work)
    return work


def untouched(array: Any) -> bool:
    """Whether nobody wrote to an array of the slot."""
    return bool((np.ascontiguousarray(array).view(np.uint8) == UNTOUCHED).all())
