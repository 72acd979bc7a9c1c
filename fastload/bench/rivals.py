"""FastLoader and the plain ways, in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from fastload.bench.loop import LoopFigures
from fastload.bench.passes import Pass, endless, run_for, touched
from fastload.bench.plain import plain_ways
from fastload.bench.subject import Subject
from fastload.pairs import Spread, compare, spread

PAIRS = 3

_MOST_ROWS = 400  # batches that the plain ways go through before they begin again


@dataclass(frozen=True)
class Rival:
    """One plain way beside FastLoader.

    Attributes:
        name: of the way.
        samples_per_s: its rate, pass by pass.
        ours_samples_per_s: FastLoader's, in turn with it.
        ratio: FastLoader's over its, pair by pair.
        cpu_s_per_1000: seconds on a CPU, of all its processes, for 1,000 images.
        loop: what it gave in the training loop, where there is one.
    """

    name: str
    samples_per_s: Spread
    ours_samples_per_s: Spread
    ratio: Spread
    cpu_s_per_1000: float
    loop: LoopFigures | None = None


def measure_rivals(
    subject: Subject,
    found: list[Rival],
    *,
    told: Callable[[int, int], None] = lambda done, total: None,
    beside: Callable[[str, DataLoader[Any]], LoopFigures | None] = lambda name, loader: None,
) -> None:
    """Each plain way in turn with the loader, `seconds` of the options in all.

    Args:
        found: gets a `Rival` as soon as it is measured.
        beside: what else to do with each of them while its workers run; its result becomes `Rival.loop`.
    """
    ways = plain_ways(subject, subject.rows(_MOST_ROWS, subject.options.seconds / 4))
    seconds = subject.options.seconds / (2 * PAIRS + 1) / len(ways)
    for number, (name, loader) in enumerate(ways.items()):
        passes: list[Pass] = []

        def plain(loader: DataLoader[Any] = loader, passes: list[Pass] = passes) -> float:
            subject.make_cold()
            # As many as its workers may have ready before the clock begins.
            ready = min(loader.num_workers, len(loader) - 1)
            epochs = 1 if subject.options.cold else None
            passes.append(run_for(endless(loader, epochs=epochs), seconds, touched, discard=ready))
            return passes[-1].samples_per_s

        def ours() -> float:
            return subject.run(seconds, touched).samples_per_s

        result = compare(ours, plain, pairs=PAIRS, warm_up=0 if subject.options.cold else 1)
        costs = [one.cpu_s / one.samples * 1000 for one in passes[-PAIRS:] if one.samples]
        found.append(
            Rival(name, result["base"], result["way"], result["ratio"], spread(costs)["median"], beside(name, loader))
        )
        told(number + 1, len(ways))
        del loader, plain
