"""The figures of a watched loop: its steps and their sums, and the `Demands` made from them.

Also the clock that times a device's steps, and the time of a step that needs no loader.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fastload.distributed.ranks import cpus_of_rank
from fastload.errors import OptionError
from fastload.profiling.verdict import Demands
from fastload.system.advice import advice
from fastload.timing.clocks import Clock, CudaClock, HostClock
from fastload.timing.probe import Probe, WorkerInfo
from fastload.timing.results import BatchWork, LoopStep, NetworkUse, WorkTime


def num_samples(batch: Any) -> int:
    """Returns the length of the first array or tensor in a batch of any structure; 0 if there is none."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 1
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif isinstance(batch, (str, bytes)) or not isinstance(batch, Sequence):
        inner = getattr(batch, "__dict__", None)  # such as a dataclass
        batch = inner.values() if isinstance(inner, dict) else ()
    return next((count for count in map(num_samples, batch) if count), 0)


MOST_STEPS = 8192

Item = TypeVar("Item")


@dataclass
class Thinned(Generic[Item]):
    """An evenly spaced part of added values, in bounded memory: at first all, then every second, every fourth, ..."""

    most: int = MOST_STEPS  # number of items kept, even
    kept: list[Item] = field(default_factory=list)
    stride: int = 1  # every so many are kept
    count: int = 0  # of all that were added

    def add(self, item: Item) -> None:
        if self.count % self.stride == 0:
            if len(self.kept) == self.most:
                del self.kept[1::2]
                self.stride *= 2
            if self.count % self.stride == 0:
                self.kept.append(item)
        self.count += 1


Times = tuple[float, float, float, float, float, int, int | None]
"""The fields of a `LoopStep`, which takes longer to make."""


@dataclass
class Totals:
    """Sums over all steps so far; times in seconds."""

    steps: int = 0
    samples: int = 0
    wait_s: float = 0.0
    copy_s: float = 0.0
    transform_s: float = 0.0
    compute_s: float = 0.0
    batches: int = 0
    stages: dict[str, WorkTime] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return self.wait_s + self.copy_s + self.transform_s + self.compute_s

    @property
    def stall_share(self) -> float:
        """Share of the time that the loop waited for data, 0 to 1."""
        return self.wait_s / self.duration_s if self.duration_s else 0.0

    def mean_stages(self) -> Mapping[str, WorkTime]:
        return {name: work / self.batches for name, work in self.stages.items()}


@dataclass
class Mean:
    """The mean of the values added so far; 0 when there are none."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(eq=False)  # two loops are never equal, even over the same loader
class Loop:
    """The figures of one loader's loop, sums over all its steps; times in seconds. "Its thread" is the loop's."""

    loader: Callable[[], Any]  # returns the watched loader, None when it no longer exists
    # Steps, and what their batches cost
    kept: Thinned[tuple[Times, BatchWork | None]] = field(default_factory=Thinned)
    totals: Totals = field(default_factory=Totals)
    elapsed_s: float = 0.0  # of all passes, without other watched loops inside the loop's body
    epochs: list[tuple[float, float]] = field(default_factory=list)  # as in `Demands`
    begins_s: list[float] = field(default_factory=list)  # of these, since the measurement began
    receive_s: Mean = field(default_factory=Mean)  # CPU time of its thread in a wait, except the first of each pass
    first_running_s: float = 0.0  # CPU time of its thread in the first waits, summed
    # Time in a step, outside its wait, in which its thread was ready to run but had no CPU.
    runnable_s: Mean = field(default_factory=Mean)
    process_s: float = 0.0  # CPU time of the process, all threads, during the passes
    transform_running_s: Mean = field(default_factory=Mean)  # CPU time of its thread for transforming a received batch
    probe: Probe | None = None  # of the last pass; None: the loader is not a FastLoader
    timed_device: bool = False  # whether a device's clock timed the last pass
    network: NetworkUse | None = None  # in the passes that have ended; None: the data are on this machine

    @classmethod
    def of(cls, loader: Any) -> Loop:
        """Returns the figures of a loader, without keeping the loader alive if it allows weak references."""
        try:
            return cls(weakref.ref(loader))
        except TypeError:
            return cls(lambda: loader)

    def add(self, step: Times, work: BatchWork | None) -> None:
        """Adds a step, and the cost of its batch if known."""
        _, wait_s, copy_s, transform_s, compute_s, samples, _ = step
        self.kept.add((step, work))
        totals = self.totals
        totals.steps += 1
        totals.samples += samples
        totals.wait_s += wait_s
        totals.copy_s += copy_s
        totals.transform_s += transform_s
        totals.compute_s += compute_s
        if work is not None and work.stages:
            totals.batches += 1
            stages = totals.stages
            for name, cost in work.stages.items():
                stages[name] = stages[name] + cost if name in stages else cost

    @property
    def numbered(self) -> list[tuple[int, LoopStep]]:
        """The steps that were kept, with their numbers from 0."""
        stride = self.kept.stride
        return [(stride * index, LoopStep(*times)) for index, (times, _) in enumerate(list(self.kept.kept))]

    @property
    def steps(self) -> tuple[LoopStep, ...]:
        """The steps that were kept, in order."""
        return tuple(step for _, step in self.numbered)

    @property
    def works(self) -> tuple[BatchWork, ...]:
        """The costs of their batches in the same order, where known."""
        return tuple(work for _, work in list(self.kept.kept) if work is not None)


def demands_of(
    loop: Loop,
    *,
    alone_samples_per_s: float | None = None,
    others_cpus: float = 0.0,
    network: NetworkUse | None = None,
) -> Demands:
    """Returns the measurements of a loop so far as the input of a verdict.

    `alone_samples_per_s` is the rate of its step on one cached batch, if that was measured in this process;
    `others_cpus` and `network` as in `Demands`.
    """
    totals, source = loop.totals, loop.loader()
    if loop.probe is not None:
        info = loop.probe.worker_info
    else:
        workers = int(getattr(source, "num_workers", 0) or 0)
        info = WorkerInfo(workers, workers * int(getattr(source, "prefetch_factor", None) or 2), by_threads=False)
    working_s = sum(work.running_s for work in totals.stages.values()) if info.by_threads else 0.0
    waits = max(0, totals.steps - len(loop.epochs))
    in_wait_s = waits * loop.receive_s.value + loop.first_running_s + totals.steps * loop.transform_running_s.value
    return Demands(
        batches=loop.works,
        steps=loop.steps,
        workers=info.workers,
        ahead=max(1, info.ahead) if info.workers else 0,
        cpus=cpus_of_rank(),
        num_steps=totals.steps,
        epochs=tuple(loop.epochs),
        receive_s=loop.receive_s.value,
        step_running_s=max(0.0, loop.process_s - working_s - in_wait_s) / max(1, totals.steps),
        step_runnable_s=loop.runnable_s.value,
        by_threads=info.by_threads,
        is_fastload=loop.probe is not None,
        timed_device=loop.timed_device,
        alone_s=totals.samples / totals.steps / alone_samples_per_s if alone_samples_per_s and totals.steps else 0.0,
        others_cpus=others_cpus,
        network=network,
        waits_only="" if loop.probe is not None else advice("diagnose"),
        compression_ratio=info.compression_ratio,
    )


def open_clock(device: Any) -> Clock:
    """Returns the clock for a device; None: CUDA's if this process has used CUDA, else the host's.

    Raises:
        OptionError: not a device, or one that cannot be timed.
    """
    if isinstance(device, Clock):
        return device
    torch: Any = sys.modules.get("torch")
    if device is None:
        return CudaClock() if torch is not None and torch.cuda.is_initialized() else HostClock()
    kind, _, number = str(device).partition(":")
    if kind == "cpu":
        return HostClock()
    if kind != "cuda" or not (number.isdigit() or not number):
        raise OptionError(
            f"device={str(device)!r}: a Meter times the CPU or CUDA. Give None, 'cpu', 'cuda' or 'cuda:1'; for other "
            f"devices give 'cpu' if the loop waits for each step, as loss.item() does."
        )
    import torch as torch_module

    if not torch_module.cuda.is_available() or int(number or 0) >= torch_module.cuda.device_count():
        raise OptionError(
            f"device={str(device)!r}: there are {torch_module.cuda.device_count()} CUDA devices, counted from 0. "
            f"Leave out device=, and the Meter finds the one in use."
        )
    return CudaClock(int(number) if number else None)


HOW = "measured on one cached batch"


def measure_headspace(
    step: Callable[[Any], object], batch: Any, seconds: float = 1.0, *, device: Any = None, samples: int | None = None
) -> float:
    """Returns the samples per second of `step(batch)` on one batch that is ready: transformed, and on the device.

    This is an upper bound for what a better loader could gain. The step runs on the same batch again and again. The
    first run does not count; the result is from the median of the others, so that another process on the machine, or a
    compiler at work, changes it little. The step changes the model as it always does.

    Args:
        step: what the loop does with a batch.
        batch: as the loop gets it.
        seconds: approximate time to measure; at least 3 steps are run.
        device: what computes, as in `Meter`.
        samples: in the batch; None: the length of its first array.

    Raises:
        OptionError: `seconds` is not above 0, or the number of samples in the batch is not known.
    """
    if not seconds > 0:
        raise OptionError(f"seconds={seconds!r}: give a time above 0")
    count = num_samples(batch) if samples is None else samples
    if not count:
        raise OptionError("batch: it has no array or tensor that says how many samples there are. Give samples=.")
    step(batch)
    clock = open_clock(device)  # after a step: if that used CUDA, CUDA's clock is chosen
    marks = [clock.mark()]
    while len(marks) < 5 or clock.between_s(marks[0], marks[-2]) < seconds:
        step(batch)
        marks.append(clock.mark())
        clock.wait(marks[-2])  # as in a training loop, the host may be one step ahead of the device, but not more
    clock.wait(marks[-1])
    return count / statistics.median(itertools.starmap(clock.between_s, itertools.pairwise(marks)))
