"""Two ways compared in pairs, in turn (A B, B A, A B, ...), so that a machine that slows down or speeds up moves both.

Each pair gives one ratio; the median of the ratios is reported with the lowest, the highest and the count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

Way = Callable[[], float]
"""Runs once and returns a rate: more is better."""

Spread = dict[str, float]
"""`median`, `lowest`, `highest` and `count` of a figure."""


def spread(values: Sequence[float]) -> Spread:
    """Median, lowest, highest and count: never a lone best run."""
    return {
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
        "count": len(values),
    }


def compare(way: Way, base: Way, *, pairs: int, warm_up: int = 1) -> dict[str, Spread]:
    """Both ways in interleaved pairs: their rates, and the ratio way / base of each pair.

    Returns:
        `way`, `base` and `ratio`, each a spread.
    """
    for _ in range(warm_up):
        base()
        way()
    ways, bases = [], []
    for turn in range(pairs):
        if turn % 2 == 0:
            ways.append(way())
            bases.append(base())
        else:
            bases.append(base())
            ways.append(way())
    ratios = [a / b for a, b in zip(ways, bases, strict=True)]
    return {"way": spread(ways), "base": spread(bases), "ratio": spread(ratios)}
