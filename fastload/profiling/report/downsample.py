"""Reduces a long run to the number of columns a plot has room for, and keeps what stands out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastload.timing.results import Step

PARTS = ("wait", "copy", "transform", "compute")
"""The parts of a step in stacking order: fields of `Step` without their unit."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Columns:
    """Successive steps, grouped into columns."""

    edges_s: Floats  # (columns + 1,) start of each, and the end of the last
    parts_s: Floats  # (4, columns) mean seconds of each of `PARTS`
    slowest_s: Floats  # (columns,) duration of the slowest step in each
    samples_per_s: Floats  # (columns,) over the time of the steps in each
    mean_s: Floats  # (columns,) mean duration of a step
    steps_each: int  # largest number of steps in a column


@dataclass(frozen=True)
class Series:
    """One reading over time, grouped into columns; each array is (columns,)."""

    at_s: Floats
    mean: Floats
    low: Floats
    high: Floats


def parts_of(steps: Sequence[Step]) -> Floats:
    """Returns (4, steps) seconds of each of `PARTS`; values that are negative or not finite become 0."""
    values = np.array([[getattr(step, f"{part}_s") for step in steps] for part in PARTS], dtype=np.float64)
    return np.maximum(np.nan_to_num(values, posinf=0.0), 0.0)


def into_columns(steps: Sequence[Step], count: int) -> Columns:
    """Groups steps, at least one, into at most `count` columns of about equally many successive steps."""
    steps = sorted(steps, key=lambda step: step.begin_s)
    parts = parts_of(steps)
    begins = np.array([step.begin_s for step in steps])
    samples = np.array([step.samples for step in steps], dtype=np.float64)
    first = _firsts(len(steps), count)
    sizes = np.diff(np.append(first, len(steps)))
    duration = parts.sum(axis=0)
    taken = np.add.reduceat(duration, first)
    rates = np.divide(np.add.reduceat(samples, first), taken, out=np.zeros_like(taken), where=taken > 0)
    parts_s = np.add.reduceat(parts, first, axis=1) / sizes
    return Columns(
        edges_s=np.append(begins[first], begins[-1] + duration[-1]),
        parts_s=parts_s,
        slowest_s=np.maximum.reduceat(duration, first),
        samples_per_s=rates,
        mean_s=parts_s.sum(axis=0),
        steps_each=int(sizes.max()),
    )


def _firsts(length: int, count: int) -> NDArray[np.intp]:
    """Returns the first index of each of at most `count` columns; their sizes differ by at most one."""
    columns = min(count, length)
    return np.arange(columns) * length // columns


def names_of(readings: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns the names of all readings in alphabetical order, without the time and those that were never finite."""
    return sorted({name for reading in readings for name, value in reading.items() if math.isfinite(value)} - {"at_s"})


def into_series(readings: Sequence[Mapping[str, float]], name: str, count: int) -> Series | None:
    """Groups one reading into at most `count` columns; None if it never occurs."""
    found = np.array([(one["at_s"], one[name]) for one in readings if name in one and "at_s" in one], dtype=np.float64)
    found = found.reshape(-1, 2)
    found = found[np.isfinite(found).all(axis=1)]
    if not len(found):
        return None
    first = _firsts(len(found), count)
    sizes = np.diff(np.append(first, len(found)))
    at_s, values = found.T
    return Series(
        at_s=np.add.reduceat(at_s, first) / sizes,
        mean=np.add.reduceat(values, first) / sizes,
        low=np.minimum.reduceat(values, first),
        high=np.maximum.reduceat(values, first),
    )


def ceiling(columns: Columns) -> float:
    """Returns the height for the plot of steps: the tallest, unless a few tall ones would make the others flat."""
    tallest = float(columns.slowest_s.max())
    usual = float(np.percentile(columns.mean_s, 95))
    return (tallest * 1.06 if tallest <= 5 * usual or usual <= 0 else 3 * usual) or 1.0
