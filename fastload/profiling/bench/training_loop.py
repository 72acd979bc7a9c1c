"""The training steps of a benchmark, a network or a simulated accelerator, and a loop of them.

The loop is measured with a `Meter`: how long its steps wait, and how busy the accelerator is.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Protocol

import torch
from torch import nn

from fastload.errors import OptionError
from fastload.profiling.bench.passes import Show, Spread, compare, counting, repeat_epochs, run_for, touch_batch
from fastload.profiling.bench.subject import Subject
from fastload.profiling.meter import Meter
from fastload.profiling.meter.sampler import OthersCpus
from fastload.profiling.verdict import judge
from fastload.timing.clocks import Clock
from fastload.timing.results import Measured

BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}
"""Residual blocks in each of the four stages."""

NETWORKS = (*BLOCKS, "tiny")
"""Networks that can be trained on."""

_WIDTHS = (64, 128, 256, 512)


@dataclass(frozen=True)
class StepChoice:
    """A kind of training step, as asked for."""

    name: str  # one of `NETWORKS`, or `sim`
    rate: float = 0.0  # of a simulated accelerator: samples per second, or a multiple of the loader's own rate
    relative: bool = False  # whether `rate` is such a multiple

    def __str__(self) -> str:
        return f"sim:{self.rate:g}{'x' if self.relative else ''}" if self.name == "sim" else self.name


def parse_step(text: str) -> StepChoice:
    """Parses `resnet50`, `resnet18`, `tiny`, `sim:20000` (samples per second) or `sim:0.8x` (of the loader's own rate).

    Raises OptionError for anything else.
    """
    name, colon, number = text.strip().partition(":")
    if name in NETWORKS and not colon:
        return StepChoice(name)
    try:
        rate = float(number.removesuffix("x"))
    except ValueError:
        rate = 0.0
    if name != "sim" or not 0 < rate < math.inf:
        raise OptionError(
            f"--step {text}: choose {', '.join(NETWORKS)}, sim:RATE (samples a second, such as sim:20000) or "
            f"sim:SHAREx (of the loader's own rate, such as sim:0.8x)."
        )
    return StepChoice("sim", rate, relative=number.endswith("x"))


class TrainingStep(Protocol):
    """One optimizer step, real or simulated. `device` is what a `Meter` times: a device, or a clock."""

    name: str
    device: Any

    def __call__(self, batch: Sequence[torch.Tensor]) -> int:
        """Trains on a batch, images first, and returns its number of samples, maybe before the training is done."""
        ...

    def begin(self) -> None:
        """Starts the measurement of `utilization`, with an idle device."""
        self.finish()

    def finish(self) -> None:
        """Waits until all steps are done."""
        return

    @property
    def utilization(self) -> float | None:
        """Share of the time since `begin` that the accelerator was at work, 0 to 1; None: only the driver knows."""
        return None


class TouchStep(TrainingStep):
    """A `TrainingStep` without training: reads one byte of each memory page of a batch."""

    name = "no step, each page of a batch looked at"
    device = "cpu"

    def __call__(self, batch: Sequence[torch.Tensor]) -> int:
        return touch_batch(batch)


class NetworkStep(TrainingStep):
    """A `TrainingStep` that trains one of `NETWORKS`: forward, backward, SGD with momentum; in bfloat16 on a GPU.

    Labels that are not class numbers count as class 0, which takes as long.
    """

    def __init__(self, name: str, *, channels: int, num_classes: int, device: torch.device) -> None:
        self.name = f"{name} on {device.type}"
        self.device = device
        self._num_classes = max(2, num_classes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = network(name, channels=channels, num_classes=self._num_classes)
        self._net: nn.Module = net.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # as training scripts do when shapes are fixed
        self._loss = nn.CrossEntropyLoss()
        self._optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def __call__(self, batch: Sequence[torch.Tensor]) -> int:
        labels = batch[1] if len(batch) > 1 else None
        if labels is None or labels.ndim != 1 or labels.is_floating_point():
            labels = torch.zeros(len(batch[0]))
        # A FastLoader's batch may be on the device already, a plain DataLoader's never is: both get the same step.
        labels = labels.to(torch.int64).clamp(0, self._num_classes - 1).to(self.device, non_blocking=True)
        images = batch[0].to(self.device, non_blocking=True)
        top = 255 if images.dtype == torch.uint8 else 65535
        images = images.to(torch.float32, memory_format=torch.channels_last).div_(top)
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss: torch.Tensor = self._loss(self._net(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        self._optimizer.step()
        return len(images)

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class SimulatedAccelerator(Clock):
    """Does to a training loop what a GPU of a given speed would do, and leaves the CPU free. For one thread.

    A step is launched and the loop goes on at once; it runs at most a few steps ahead of the accelerator and then
    sleeps until the oldest of them is done. A step starts when the one before it ends, or when it is launched, if that
    is later: in between the accelerator is idle. All of this is arithmetic on deadlines, so a sleep that takes too long
    makes no step longer.

    It is a `TrainingStep`, and the meter's `Clock` of that step, as CUDA events are one of a GPU: with it a `Meter`
    counts the time that the accelerator waited, not the host, which runs ahead.

    Args:
        ahead: steps that may be launched and not finished. PyTorch runs ahead of a GPU by a thousand kernels, one to
            three steps of ResNet-50.
        clock: returns seconds and never goes back.
        sleep: sleeps for a number of seconds, or longer.

    Attributes:
        samples: launched since `begin`.
        busy_s, idle_s: seconds at work and idle since `begin`.
    """

    def __init__(
        self,
        samples_per_s: float,
        *,
        ahead: int = 3,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = f"simulated accelerator, {samples_per_s:,.0f} images/s"
        self.device = self
        self._samples_per_s, self._ahead = samples_per_s, ahead
        self._clock, self._sleep = clock, sleep
        self._ends: deque[float] = deque()  # of the steps that are not done, in order
        self._busy_until = 0.0
        self.begin()

    def begin(self) -> None:
        """Resets the counters; work that is still to be done counts as work."""
        now = self._clock()
        self._busy_until = max(self._busy_until, now)
        self.samples = 0
        self.busy_s = self._busy_until - now
        self.idle_s = 0.0

    def __call__(self, batch: Sequence[Any]) -> int:
        """Launches a step on a batch and returns before it ends; waits while `ahead` steps are unfinished."""
        samples = len(batch[0])
        while len(self._ends) >= self._ahead:
            self.wait(self._ends.popleft())
        now = self._clock()
        step_s = samples / self._samples_per_s
        self.idle_s += max(0.0, now - self._busy_until)
        self._busy_until = max(now, self._busy_until) + step_s
        self._ends.append(self._busy_until)
        self.samples += samples
        self.busy_s += step_s
        return samples

    def finish(self) -> None:
        self.wait(self._busy_until)
        self._ends.clear()

    @property
    def utilization(self) -> float:
        """Share of the time at work, from `begin` to the end of the last step launched, 0 to 1."""
        total_s = self.busy_s + self.idle_s
        return self.busy_s / total_s if total_s else 0.0

    def mark(self) -> float:
        """Returns the time at which everything launched so far is done, or the current time if that is later."""
        return max(self._clock(), self._busy_until)

    def is_done(self, mark: float) -> bool:
        return self._clock() >= mark

    def wait(self, mark: float) -> None:
        """Sleeps until that time, again if it wakes too early."""
        while (left_s := mark - self._clock()) > 0:
            self._sleep(left_s)


def make_step(
    choice: StepChoice | str,
    *,
    channels: int = 3,
    num_classes: int = 10,
    device: torch.device | str | None = None,
    loader_samples_per_s: float | None = None,
) -> TrainingStep:
    """Returns the training step that `parse_step` takes or returns; a network is by default on the CPU.

    Raises:
        OptionError: there is no such step, or its rate is a multiple of the loader's, which is missing.
    """
    choice = parse_step(choice) if isinstance(choice, str) else choice
    if choice.name != "sim":
        device = torch.device(device or "cpu")
        return NetworkStep(choice.name, channels=channels, num_classes=num_classes, device=device)
    if not choice.relative:
        return SimulatedAccelerator(choice.rate)
    if not loader_samples_per_s:
        raise OptionError(f"step {choice}: a multiple of the loader's own rate, which was not measured")
    return SimulatedAccelerator(choice.rate * loader_samples_per_s)


def network(name: str, *, channels: int, num_classes: int) -> nn.Module:
    """Returns one of `NETWORKS`, untrained, from images float (B, channels, H, W) to logits (B, num_classes).

    The residual networks are from He et al. (2015, https://arxiv.org/abs/1512.03385), table 1, with the stride in the
    3x3 convolution of a bottleneck, as is usual since. They are written out here because torchvision is not a
    dependency, and so that figures of different machines compare.
    """
    if name == "tiny":  # a few convolutions with large strides: some tenths of a millisecond per image on one core
        return nn.Sequential(
            nn.Conv2d(channels, 8, 5, 4, 2), nn.ReLU(inplace=True), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes),
        )  # fmt: skip
    layers: list[nn.Module] = [_convolution(channels, 64, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    wide = 64
    for stage, (width, count) in enumerate(zip(_WIDTHS, BLOCKS[name], strict=True)):
        for number in range(count):
            block = _Residual(wide, width, 2 if stage and not number else 1, bottleneck=name == "resnet50")
            layers.append(block)
            wide = block.out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, num_classes))


class _Residual(nn.Module):
    """Two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1, whose output (`out` channels) is added to their input.

    The input is projected where the shape changes.
    """

    def __init__(self, wide: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        self.out = 4 * width if bottleneck else width
        strided = _convolution(width if bottleneck else wide, width, 3, stride=stride)
        layers = [strided, nn.ReLU(inplace=True), _convolution(width, self.out, 1 if bottleneck else 3)]
        if bottleneck:
            layers = [_convolution(wide, width, 1), nn.ReLU(inplace=True), *layers]
        self.layers = nn.Sequential(*layers)
        same = wide == self.out and stride == 1
        self.short = nn.Identity() if same else _convolution(wide, self.out, 1, stride=stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(images) + self.short(images))


def _convolution(channels: int, out: int, size: int, stride: int = 1) -> nn.Module:
    """Returns a convolution followed by batch normalization."""
    return nn.Sequential(nn.Conv2d(channels, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out))


UTILIZATION_SIMULATED = "part of the time that the simulated accelerator was at work"
UTILIZATION_NVML = "NVML's duty cycle: part of the time in which any kernel ran, however small"

_SHOW_EVERY_S = 0.2


@dataclass(frozen=True)
class LoopFigures:
    """Figures of a training loop."""

    step: str  # name of the training step
    samples_per_s: float  # from the first batch received to the end of the last step
    stall_share: float  # share of the time that steps waited for data, 0 to 1, as in the verdict
    longest_wait_s: float  # for one batch
    utilization: float | None  # of the accelerator, 0 to 1; None: not known
    utilization_is: str  # how `utilization` is defined
    others_cpus: float | None  # CPUs that other programs used meanwhile; None: not known
    measured: Measured  # everything else, for reports


def run_loop(
    loader: Any,
    step: TrainingStep,
    seconds: float,
    *,
    title: str,
    epochs: int | None = None,
    part: str = "",
    show: Show = lambda figures: None,
    alone_samples_per_s: float | None = None,
) -> LoopFigures:
    """Trains on a loader's batches for some seconds, epoch after epoch, at most `epochs` of them.

    The clock starts when the first batch is there. `title` is the reports' title; `show` gets the current
    rates, not too often, under the name `part`; `alone_samples_per_s` is the rate of the step on one
    cached batch, if that was measured in turn with such a loop.
    """
    begin, shown_s, others = 0.0, 0.0, OthersCpus()
    with others.measured(), Meter(device=step.device) as meter:
        for batch in repeat_epochs(meter.watch(loader), epochs=epochs):
            if not begin:
                step.begin()
                begin = time.perf_counter()
                meter.restart()
            step(batch)
            del batch  # so that the loader can reuse its memory
            now = time.perf_counter()
            if now - shown_s >= _SHOW_EVERY_S:
                shown_s, totals = now, meter.totals
                rate = totals.samples / totals.duration_s if totals.duration_s else 0.0
                passed = f"{part}, {min(1.0, (now - begin) / seconds):.0%}"
                show({"part": passed, "images/s": rate, "stall share": f"{totals.stall_share:.1%}"})
            if now - begin >= seconds:
                break
        step.finish()
    demands = replace(meter.demands(loader), others_cpus=others.cpus or 0.0)
    if alone_samples_per_s:
        samples = statistics.fmean(one.samples for one in demands.steps)
        demands = replace(demands, alone_s=samples / alone_samples_per_s)
    verdict = judge(demands)
    measured = meter.measured(title, loader=loader, verdict=verdict)
    begun_s = measured.epochs_s[0]
    measured = replace(
        measured,
        headspace_samples_per_s=alone_samples_per_s,
        headspace_how=HOW_IN_TURN if alone_samples_per_s else "",
        steps=tuple(replace(one, begin_s=one.begin_s - begun_s) for one in measured.steps),
        epochs_s=tuple(at_s - begun_s for at_s in measured.epochs_s),
        readings=tuple({**one, "at_s": one["at_s"] - begun_s} for one in measured.readings if one["at_s"] >= begun_s),
    )
    busy, busy_is = step.utilization, UTILIZATION_SIMULATED
    if busy is None:
        readings = (reading.items() for reading in measured.readings)
        percents = [value for one in readings for name, value in one if name.endswith(".utilization_percent")]
        busy, busy_is = (statistics.fmean(percents) / 100, UTILIZATION_NVML) if percents else (None, "")
    return LoopFigures(
        step=step.name,
        samples_per_s=measured.samples_per_s,
        stall_share=verdict.stall_share,
        longest_wait_s=max(one.wait_s for one in measured.steps),
        utilization=busy,
        utilization_is=busy_is,
        others_cpus=others.cpus,
        measured=measured,
    )


PAIRS = 3
HOW_IN_TURN = "measured on one cached batch, in turn with the loop"


def headspace_in_turn(subject: Subject, step: TrainingStep, show: Show) -> dict[str, Spread]:
    """Measures the step on one cached batch, in turn with the loop that loads its batches, for `options.seconds`.

    Returns spreads: `way`, images/s of the loop; `base`, of the same step on a cached batch, an upper bound for any
    loader; `ratio` of each pair.
    """
    seconds = subject.options.seconds / (2 * PAIRS)
    tick = counting(show, "headspace", 2 * PAIRS)

    def loop() -> float:
        rate = subject.run(seconds, step, finish=step.finish).samples_per_s
        tick()
        return rate

    def cached_steps() -> float:
        rate = run_for(repeat(cached), seconds, step, synchronize=step.finish).samples_per_s
        tick()
        return rate

    cached = [field.clone(memory_format=torch.preserve_format) for field in next(iter(subject.shared_loader()))]
    if subject.options.cold:
        subject.close()
    step.begin()
    return compare(loop, cached_steps, pairs=PAIRS, warm_up=0)
