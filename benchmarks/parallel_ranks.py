"""The ranks of bench_parallel.py: how they start, agree, take turns, and what one of them writes down."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import ProcessGroup

import harness
from ranks import group

SETTLE_S = 0.15


class Way(NamedTuple):
    """Something that the first so many ranks do again and again, each round as long as a step of training."""

    ranks: int
    step: Callable[[], Any]


class Ranks:
    """This process among all ranks of a run.

    Attributes:
        rank, size: its number and how many there are.
        device: its device.
        groups: the process group of the first so many ranks, by their number.
        options: the command line.
        threads: of torch while nothing else is asked for.
    """

    def __init__(self, rank: int, size: int, kind: str, options: argparse.Namespace) -> None:
        self.rank, self.size, self.options = rank, size, options
        self.device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
        self.threads = 1 if kind == "cpu" else torch.get_num_threads()
        # Ranks that have nothing to do wait through gloo: nccl's waiting would take the GPU's time.
        self._talk = dist.new_group(backend="gloo")
        worlds = sorted({world for world in (1, *options.worlds[kind]) if world <= size})
        # Each rank makes every group, its own or not.
        self.groups: dict[int, ProcessGroup] = {world: dist.new_group(list(range(world))) for world in worlds}
        self.worlds = [world for world in worlds if world in options.worlds[kind]]
        self._journal: harness.Journal | None = None
        if rank == 0:
            said = {"pairs": options.pairs, "seconds": options.seconds, "quick": options.quick}
            self._journal = harness.Journal(options.out, **said, ranks=options.worlds[kind], waiting=options.waiting)

    def note(self, figure: str, **values: Any) -> None:
        """Write a figure down, on rank 0; its name ends with the kind of device."""
        if self._journal is not None:
            self._journal.note(f"{figure}-{self.device.type}", **values)

    def way(self, world: int, made: Callable[[], Callable[[], Any]]) -> Way:
        """A way that the first so many ranks take; what they need for it is made on these alone."""
        return Way(world, made() if self.rank < world else _nothing)

    def meet(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self._talk)

    def gathered(self, value: Any) -> list[Any]:
        """What each rank says."""
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self._talk)
        return values

    def count(self, way: Way, share: float, least: int) -> int:
        """Warms up, and says how many steps take a share of a turn's time, at least so many; all ranks agree."""
        if self.options.quick:
            self.seconds(way, 1)
            return 1
        self.seconds(way, 3)
        per_step = self.gathered(self.seconds(way, 2))[0]
        return max(least, round(share * self.options.seconds / max(per_step, 1e-6)))

    def seconds(self, way: Way, steps: int, *, fed: bool = False) -> float:
        """Seconds a step; 0 on a rank that stands by meanwhile.

        Where a loader feeds a way, what it reads ahead after its visit must not take the time of the next one, nor must
        a visit live on what was read before it: a pause, and two steps that do not count, go before.
        """
        self.meet()
        if fed:
            time.sleep(SETTLE_S)
        if self.rank >= way.ranks:
            return 0.0
        for _ in range(2 if fed else 0):
            way.step()
        self._finish()
        begin = time.perf_counter()
        for _ in range(steps):
            way.step()
        self._finish()
        return (time.perf_counter() - begin) / steps

    def in_turn(
        self,
        ways: dict[str, Way],
        after: Callable[[str], None] | None = None,
        *,
        share: float = 1.0,
        pairs: int | None = None,
        visits: int = 1,
        fed: bool = False,
    ) -> dict[str, list[float]]:
        """Seconds a step of each way, once a turn: A B C, C B A, A B C, as often as there are pairs.

        Args:
            ways: by name, the same on all ranks.
            after: called with a way's name after each of its visits, and once after its warm-up.
            share: of the time that a turn has.
            pairs: how many turns; as many as the command line asks for by default.
            visits: parts into which a way's turn is cut, taken there and back: A B B A, then B A A B, where there are
                2. The speed of a machine that drifts is then nearly the same for all ways of a turn.
            fed: a loader feeds at least one of them.
        """
        counts = {}
        for name, way in ways.items():
            counts[name] = self.count(way, share / visits, max(1, 2 // visits))
            if after is not None:
                after(name)
        found: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(pairs or self.options.pairs):
            of_visits: dict[str, list[float]] = {name: [] for name in ways}
            for visit in range(visits):
                for name in list(ways) if (turn + visit) % 2 == 0 else reversed(ways):
                    of_visits[name].append(self.seconds(ways[name], counts[name], fed=fed))
                    if after is not None:
                        after(name)
            for name, seconds in of_visits.items():  # a way's visits have the same number of steps
                found[name].append(sum(seconds) / visits)
        self.meet()
        return found

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _nothing() -> None:
    """What a rank does in a way that it does not take."""


def ratios(values: list[float], base: list[float]) -> harness.Spread:
    """The spread of values / base, pair by pair."""
    return harness.spread([value / other for value, other in zip(values, base, strict=True)])


def start(section: Callable[..., None], size: int, kind: str, options: argparse.Namespace, *words: Any) -> None:
    """Runs `section(ranks, *words)` in so many new processes; the first that fails ends all, with its traceback."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (size, kind, folder, section, options, words), nprocs=size)


def _rank(
    rank: int,
    size: int,
    kind: str,
    folder: str,
    section: Callable[..., None],
    options: argparse.Namespace,
    words: tuple[Any, ...],
) -> None:
    if kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    meeting = f"file://{Path(folder) / 'meeting'}"
    with group(torch.device(kind), rank, size, init_method=meeting, timeout=timedelta(minutes=10)):
        section(Ranks(rank, size, kind, options), *words)
