"""The options of `fastload bench` and `fastload tune`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastload.errors import OptionError
from fastload.options import check_options, option
from fastload.options.parse import parse_size

if TYPE_CHECKING:
    from fastload.plan.order import Shuffle

ShuffleName = Literal["auto", "chunk", "full", "none"]

SHUFFLES: dict[str, Shuffle] = {"auto": True, "chunk": "chunk", "full": "full", "none": False}
"""Orders by the names that the command has for them."""


def parse_share(text: str) -> float:
    """Parses `40%` or `0.4`; raises OptionError for anything else, and unless it is above 0 and up to 1."""
    number = text.strip()
    try:
        share = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise OptionError(f"--cpu-budget {text}: give a share of the CPUs, such as 40% or 0.4")
    return share


@dataclass(frozen=True)
class _MeasureOptions:
    """Options of both commands, which say more of some."""

    step: str | None = None
    batch_size: int | None = option(None, "Samples in a batch; by default 256, or an eighth of a small file.", least=1)
    seconds: float = 0.0
    workers: int | None = None
    shuffle: Shuffle = True
    split: str | None = option(None, "Load this split only.")
    device: str | None = option(None, "Where batches go: cpu, cuda, cuda:1.")
    size: int | tuple[int, int] | None = option(
        None,
        "Begin the loader's transforms with RandomResizedCrop to this height x width; by default 224 for images that "
        "differ in size, else no crop.",
        parser=parse_size, metavar="S|HxW",
    )  # fmt: skip
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class BenchOptions(_MeasureOptions):
    """The options of `fastload bench`."""

    step: str | None = option(
        None,
        "Train too: resnet50, resnet18, tiny, or sim:RATE, a simulated accelerator that takes RATE images/s and leaves "
        "the CPU free; sim:0.8x takes 0.8 of what the loader gives.",
        metavar="STEP",
    )  # fmt: skip
    seconds: float = option(5.0, "Time for each part.")
    workers: int | None = option(None, "Threads or processes that load.", least=1)
    shuffle: Shuffle = option(
        True, "Order of the samples.", accepts="ShuffleName", convert=SHUFFLES.__getitem__, shown="auto"
    )
    seed: int = option(0, "Seed of the order.")
    compare: bool = option(False, "Compare with a plain DataLoader of the same samples.", names=("--compare",))
    source: Path | None = option(
        None, "What FILE was packed from; --compare then also measures a plain DataLoader of the image files."
    )
    cold: bool = option(
        False,
        "Drop FILE from the page cache before each pass, and say whether it worked.",
        names=("--cold",),
    )  # fmt: skip
    faults: tuple[str, ...] = option(
        (),
        "Show how the loop takes a fault: slow-disk=MS, stall=MS@EVERY, kill-worker; may be repeated.",
        name="inject", metavar="FAULT", accepts="list[str] | None", convert=lambda faults: tuple(faults or ()),
    )  # fmt: skip

    @property
    def total_s(self) -> float:
        """Approximate time of the whole benchmark."""
        ways = (1 + (self.source is not None)) * self.compare
        loops = 2 + ways if self.step is not None else 0
        return self.seconds * (1 + bool(ways) + loops + len(self.faults))


@dataclass(frozen=True)
class TuneOptions(_MeasureOptions):
    """The options of `fastload tune`, a search.

    Raises:
        OptionError: an invalid number.
    """

    step: str | None = option(
        None,
        "Find the cheapest arguments with which this step does not wait: resnet50, resnet18, tiny, or sim:RATE, a "
        "simulated accelerator that takes RATE images/s. By default, find the fastest.",
        metavar="STEP",
    )  # fmt: skip
    seconds: float = option(30.0, "Time for the whole search.")
    cpu_budget: float = option(
        1.0,
        "Share of this job's CPUs that loading may use, such as 40%, so that some is left to launch kernels; includes "
        "a network that trains on the CPU.",
        metavar="SHARE", accepts="str", convert=parse_share, shown="100%",
    )  # fmt: skip
    cold: bool = option(False, "Drop FILE from the page cache before each trial.", names=("--cold",))
    transform: Sequence[Any] = ()
    """As in `FastLoader`, after the crop of `size`; for benchmarks: the command has no option for it, nor for
    `shuffle` and `seed`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.cpu_budget <= 1:
            raise OptionError(f"cpu_budget={self.cpu_budget!r}: give a share of the CPUs, above 0 and up to 1")
        if not 0 < self.seconds < 86_400:
            raise OptionError(f"seconds={self.seconds!r}: give a number above 0, the time of the whole search")
