"""The candidates of a search, and the choice among them by their figures. Needs no torch.

Candidates vary one argument of `FastLoader` after another.

Not varied, because it gained nothing (218x178x3 and 32x32x3 rows, page cache warm, 2 cores; the rates are images/s):
more slots in the ring than workers + 3 (threads: 42,200 with 4 slots, 39,200 with 5, 31,400 with 7, 25,500 with 11, and
with a simulated accelerator the same stalls from 4 on), more than 2 batches ordered of each process (1,520 with 2,
1,260 with 4, 1,420 with 8), and groups of small batches larger or smaller than 12 MiB (1,165,000; 1,031,000 with 3,
978,000 with 24). The batch size is a matter of training, not of loading.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from fastload.plan import ChunkWindow, ResolvedShuffle
from fastload.read.linear import Read

WINDOWS = (1, 4, 16, 64)

_MOST_WORKERS = 16


@dataclass(frozen=True)
class Candidate:
    """Arguments of `FastLoader`, and of its `PackedDataset`."""

    workers: int  # threads or processes
    shuffle: ResolvedShuffle  # resolved
    read: Read = "auto"  # as in `PackedDataset`

    @property
    def order(self) -> str:
        """The shuffle as a Python expression: `"full"`, `ChunkWindow(16)`, `False`."""
        if isinstance(self.shuffle, ChunkWindow):
            return f"ChunkWindow({self.shuffle.chunks})"
        return f'"{self.shuffle}"' if isinstance(self.shuffle, str) else str(self.shuffle)

    def arguments(self, default: Candidate) -> dict[str, str]:
        """Returns the arguments that differ from the default, as Python expressions."""
        mine, others = (
            {"workers": str(one.workers), "shuffle": one.order, "read": f'"{one.read}"'} for one in (self, default)
        )
        return {name: value for name, value in mine.items() if value != others[name]}


@dataclass(frozen=True)
class DataTraits:
    """Properties of the data that decide which values are worth trying, and how they are timed."""

    processes: bool  # whether samples need Python code, which processes run
    linear: bool  # whether each row can be read by itself, so that no chunk has to be read or decoded as a whole
    num_chunks: int  # chunks of the rows; 0: no chunks, hence no windows of them
    cpus: int  # that this rank may use
    # Decoded chunks that fit in memory; windows of more than half as many would decode chunks repeatedly
    chunks_kept: int = 2**31
    cold: bool = False  # whether the file is dropped from the page cache before each trial

    @property
    def whole(self) -> bool:
        """Whether threads load whole windows: they decode a window's chunks first, and yield most of its rows then."""
        return not self.linear and not self.processes


STAGES = {"windows": "shuffle", "workers": "workers", "read": "read"}
"""The stages of a search in order, and the argument that each varies."""


def candidates_of(stage: str, best: Candidate, traits: DataTraits) -> list[Candidate]:
    """Returns a stage's candidates to try against the best so far; empty if nothing can be gained."""
    values: list[Any] = []
    if stage == "windows" and best.shuffle is not False and not traits.processes and (traits.cold or traits.whole):
        # Chunks are read whole or from disk; rows that are in the page cache cost the same in every order.
        fitting = (chunks for chunks in WINDOWS if chunks < traits.num_chunks and 2 * chunks <= traits.chunks_kept)
        values = [*map(ChunkWindow, fitting), "full"] if traits.num_chunks else []
    elif stage == "workers":
        # HDF5 has one lock for the whole process.
        most = 2 if traits.whole else min(_MOST_WORKERS, max(2, traits.cpus))
        most = max(_MOST_WORKERS, traits.cpus) if traits.processes else most
        values = [2**power for power in range(most.bit_length())]
    elif stage == "read" and traits.linear and not traits.processes:
        values = ["auto", "pread"]  # not "map" where "auto" avoids it
    argument = STAGES[stage]
    return [replace(best, **{argument: value}) for value in values if value != getattr(best, argument)]


TIE = 0.95
"""Candidates at this share of the best rate are as good as the best: repeated runs differ by more."""

FED = 0.01
"""A step that waits less than this share of its time counts as fed."""

WORSE_MIX = 1.25
"""An order that mixes worse than full shuffle must be this many times as fast to be chosen."""


@dataclass(frozen=True)
class Trial:
    """One run of one candidate."""

    samples_per_s: float  # its rate
    cpu_s_per_1000: float  # CPU seconds of all threads and processes for 1,000 samples
    cpu_share: float  # share of the CPUs that this rank may use, 0 to 1, including a network that trains on the CPU
    stall_share: float | None = None  # share of the time that the step waited for data; None: there is no step


@dataclass(frozen=True)
class Row:
    """A candidate and its measurements."""

    candidate: Candidate  # the arguments
    trials: tuple[Trial, ...]  # at least one
    first_batch_s: float = 0.0  # time to its first batch, without imports
    memory_bytes: int = 0  # anonymous and shared memory that it added
    mixing: str = ""  # how well its order mixes, in words; empty: not measured
    mixes_worse: bool = False  # whether it mixes worse than full shuffle
    others_cpus: float | None = None  # CPUs that other programs used during all of its trials; None: not known

    @property
    def samples_per_s(self) -> float:
        """Median over the trials, as the next three are."""
        return statistics.median(trial.samples_per_s for trial in self.trials)

    @property
    def cpu_s_per_1000(self) -> float:
        return statistics.median(trial.cpu_s_per_1000 for trial in self.trials)

    @property
    def cpu_share(self) -> float:
        return statistics.median(trial.cpu_share for trial in self.trials)

    @property
    def stall_share(self) -> float | None:
        """Share of the time that the step waited; None: there is no step."""
        shares = [trial.stall_share for trial in self.trials if trial.stall_share is not None]
        return statistics.median(shares) if shares else None

    @property
    def fed(self) -> bool:
        """Whether the step hardly ever waited."""
        return self.stall_share is not None and self.stall_share < FED

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {name: getattr(self, name) for name in Trial.__dataclass_fields__}


class Chosen(NamedTuple):
    """The row to take, and the reason in one sentence."""

    row: Row
    reason: str


def choose(rows: Sequence[Row], *, cpu_budget: float) -> Chosen:
    """Returns the fastest row within the budget, or the cheapest as fast; with a step, the cheapest that keeps it fed.

    Of rows with the same speed and CPU time the one with fewer workers is taken. An order that mixes worse than full
    shuffle is taken only if no other order feeds the step and it is 1.25 times as fast. If no row is within the budget
    (a share of the CPUs, 0 to 1; 1: no limit), the one with the least CPU time is taken. The order of rows is all one.
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
    """Whether a row is within the budget. With a budget of 100 % every row is, also one that was measured at 102 %."""
    return cpu_budget >= 1 or row.cpu_share <= cpu_budget / slack


def can_still_win(rows: Sequence[Row], *, cpu_budget: float, slack: float = 0.8) -> list[Row]:
    """Returns the rows that further trials might show to be the best."""
    chosen = choose(rows, cpu_budget=cpu_budget).row
    enough = slack * chosen.samples_per_s
    if chosen.fed:
        return [row for row in rows if row.fed or (row.stall_share or 0.0) < 5 * FED]
    return [
        row
        for row in rows
        if row == chosen
        or (row.samples_per_s >= enough and fits(row, cpu_budget, slack=slack))
        # An order that mixes better may win although it is slower.
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
    """Returns the row with the least CPU time; of rows within a few per cent of it, the one with the fewest workers."""
    least = min(row.cpu_s_per_1000 for row in rows)

    def simplicity(row: Row) -> tuple[int, bool, int, bool, float, float]:
        """Sort key: fewer workers, a better mix, reading through the mapping; then whatever distinguishes two rows."""
        one = row.candidate
        window = -one.shuffle.chunks if isinstance(one.shuffle, ChunkWindow) else -(2**31)
        return one.workers, row.mixes_worse, window, one.read == "pread", row.cpu_s_per_1000, -row.samples_per_s

    return min((row for row in rows if row.cpu_s_per_1000 * TIE <= least), key=simplicity)
