"""What a search is asked for. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastload.errors import OptionError
from fastload.plan import Shuffle


@dataclass(frozen=True)
class TuneOptions:
    """What a search is asked for.

    Attributes:
        batch_size: samples in a batch; None: 256, or an eighth of the samples where that is less.
        step: to be kept fed, as `fastload.bench.steps.parse_step` takes it; None: as fast as it can be.
        cpu_budget: share of the CPUs of this rank that loading may take, with a network that trains on the CPU both, 0
            to 1; 1: there is no limit.
        seconds: for the whole search.
        split: of a file.
        device: as in `FastLoader`.
        transform, shuffle, seed: as in `FastLoader`; for benchmarks, the command has no option for them.
        cold: whether the file is dropped from the page cache before each trial.
        size: of a random crop before `transform`, a square's or (height, width); None: 224 where a file's images differ
            in size, else no crop.

    Raises:
        OptionError: a number has no meaning.
    """

    batch_size: int | None = None
    step: str | None = None
    cpu_budget: float = 1.0
    seconds: float = 30.0
    split: str | None = None
    device: str | None = None
    transform: Sequence[Any] = ()
    shuffle: Shuffle = True
    seed: int = 0
    cold: bool = False
    size: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.cpu_budget <= 1:
            raise OptionError(f"cpu_budget={self.cpu_budget!r}: give a share of the CPUs, above 0 and up to 1")
        if not 0 < self.seconds < 86_400:
            raise OptionError(f"seconds={self.seconds!r}: give a number above 0, the time of the whole search")


def parse_share(text: str) -> float:
    """`40%` or `0.4` as a number.

    Raises:
        OptionError: neither, or not above 0 and up to 1.
    """
    number = text.strip()
    try:
        share = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise OptionError(f"--cpu-budget {text}: give a share of the CPUs, such as 40% or 0.4")
    return share
