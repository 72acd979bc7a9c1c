"""Which of the candidates measured is taken: a pure function of the figures. No torch here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastload.plan import ChunkWindow
from fastload.tune.candidates import Candidate

TIE = 0.95
"""Candidates this close to the best are as good as that: runs of the same arguments differ by more."""

FED = 0.01
"""A step that waits less than this share of its time is fed."""

WORSE_MIX = 1.25
"""An order that mixes worse than full shuffle has to be so much faster."""


@dataclass(frozen=True)
class Trial:
    """One run of one candidate.

    Attributes:
        samples_per_s: handed over.
        cpu_s_per_1000: seconds on a CPU, of all threads and processes, for 1,000 samples.
        cpu_share: of the CPUs that this rank may use, 0 to 1; a network that trains on the CPU is part of it.
        stall_share: part of the time that the step waited for data; None: there is no step.
    """

    samples_per_s: float
    cpu_s_per_1000: float
    cpu_share: float
    stall_share: float | None = None


@dataclass(frozen=True)
class Row:
    """A candidate with what was measured of it.

    Attributes:
        trials: at least one.
        first_batch_s: from nothing to the first batch, imports done.
        memory_bytes: anonymous and shared, that came with it.
        mixing: how well its order mixes, in words; empty: not measured.
        mixes_worse: than full shuffle.
    """

    candidate: Candidate
    trials: tuple[Trial, ...]
    first_batch_s: float = 0.0
    memory_bytes: int = 0
    mixing: str = ""
    mixes_worse: bool = False

    @property
    def samples_per_s(self) -> float:
        """The median."""
        return statistics.median(trial.samples_per_s for trial in self.trials)

    @property
    def cpu_s_per_1000(self) -> float:
        """The median."""
        return statistics.median(trial.cpu_s_per_1000 for trial in self.trials)

    @property
    def cpu_share(self) -> float:
        """The median."""
        return statistics.median(trial.cpu_share for trial in self.trials)

    @property
    def stall_share(self) -> float | None:
        """The median; None: there is no step."""
        shares = [trial.stall_share for trial in self.trials if trial.stall_share is not None]
        return statistics.median(shares) if shares else None

    @property
    def fed(self) -> bool:
        """Whether the step never had to wait, or hardly."""
        return self.stall_share is not None and self.stall_share < FED


class Chosen(NamedTuple):
    """The row to take, and a sentence why."""

    row: Row
    reason: str


def choose(rows: Sequence[Row], *, cpu_budget: float) -> Chosen:
    """The fastest row within the budget, the cheapest of those as fast; with a step the cheapest that keeps it fed.

    What is as good by speed and CPU seconds is taken with fewer workers. An order that mixes worse than full shuffle
    is taken only where no other feeds the step, and if it is 1.25 times as fast. Where nothing fits the budget, the row
    with the fewest CPU seconds.

    Args:
        rows: at least one, in any order.
        cpu_budget: share of the CPUs, 0 to 1; 1: there is no limit.
    """
    fitting = [row for row in rows if fits(row, cpu_budget)]
    if not fitting:
        row = _cheapest(rows)
        least = min(row.cpu_share for row in rows)
        reason = f"all take more than {cpu_budget:.0%} of the CPU, {least:.0%} and more; this takes the fewest seconds"
        return Chosen(row, reason)
    mixing, worse = ([row for row in fitting if row.mixes_worse is flag] for flag in (False, True))
    if not mixing or not worse:
        return _best(fitting)
    good, other = _best(mixing), _best(worse)
    gain = other.row.samples_per_s / good.row.samples_per_s
    if good.row.fed or gain < WORSE_MIX:
        return good
    return Chosen(other.row, f"{other.reason}; its order mixes worse than full shuffle and is {gain:.3g} times as fast")


def fits(row: Row, cpu_budget: float, *, slack: float = 1.0) -> bool:
    """Whether a row is within the budget; all are within 100 %, which clocks read a moment apart make 102 % of."""
    return cpu_budget >= 1 or row.cpu_share <= cpu_budget / slack


def can_still_win(rows: Sequence[Row], *, cpu_budget: float, slack: float = 0.8) -> list[Row]:
    """The rows that further trials might show to be the one to choose."""
    chosen = choose(rows, cpu_budget=cpu_budget).row
    enough = slack * chosen.samples_per_s
    if chosen.fed:
        return [row for row in rows if row.fed or (row.stall_share or 0.0) < 5 * FED]
    return [
        row
        for row in rows
        if row == chosen
        or (row.samples_per_s >= enough and fits(row, cpu_budget, slack=slack))
        # A better order wins over a faster one.
        or (chosen.mixes_worse and not row.mixes_worse and row.samples_per_s * WORSE_MIX >= enough)
    ]


def _best(rows: Sequence[Row]) -> Chosen:
    fed = [row for row in rows if row.fed]
    if fed:
        row = _cheapest(fed)
        few = "the only one that keeps" if len(fed) == 1 else f"the cheapest in CPU seconds of the {len(fed)} that keep"
        return Chosen(row, f"{few} the step fed (it waits {row.stall_share:.1%} of the time)")
    best = max(row.samples_per_s for row in rows)
    tied = [row for row in rows if row.samples_per_s >= TIE * best]
    row = _cheapest(tied)
    if len(tied) == 1:
        reason = f"the fastest of {len(rows)}" if len(rows) > 1 else "the only one measured"
    else:
        reason = f"the cheapest of the {len(tied)} that are within {1 - TIE:.0%} of the fastest"
    if row.stall_share is not None:
        reason += f", though the step waits {row.stall_share:.0%} of the time with it"
    return Chosen(row, reason)


def _cheapest(rows: Sequence[Row]) -> Row:
    """By CPU seconds; of those within a few per cent the one with the fewest workers."""
    least = min(row.cpu_s_per_1000 for row in rows)
    return min((row for row in rows if row.cpu_s_per_1000 * TIE <= least), key=_simplicity)


def _simplicity(row: Row) -> tuple[int, bool, int, bool, float, float]:
    """Fewer workers, a better mix, the mapping of the file; then whatever tells two rows apart."""
    one = row.candidate
    window = -one.shuffle.chunks if isinstance(one.shuffle, ChunkWindow) else -(2**31)
    return one.workers, row.mixes_worse, window, one.read != "map", row.cpu_s_per_1000, -row.samples_per_s
