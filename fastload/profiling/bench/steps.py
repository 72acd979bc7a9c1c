"""The training steps of a benchmark: a network, or a simulated accelerator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fastload.errors import OptionError
from fastload.profiling.bench.passes import touch_batch
from fastload.profiling.bench.simulated import AHEAD, AcceleratorClock, SimulatedAccelerator

BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}
"""Residual blocks in each of the four stages."""

NETWORKS = (*BLOCKS, "tiny")
"""Networks that can be trained on."""

_WIDTHS = (64, 128, 256, 512)


@dataclass(frozen=True)
class StepChoice:
    """A kind of training step, as asked for.

    Attributes:
        name: one of `NETWORKS`, or `sim`.
        rate: of a simulated accelerator: samples per second, or a multiple of the loader's own rate.
        relative: whether `rate` is such a multiple.
    """

    name: str
    rate: float = 0.0
    relative: bool = False

    def __str__(self) -> str:
        return f"sim:{self.rate:g}{'x' if self.relative else ''}" if self.name == "sim" else self.name


def parse_step(text: str) -> StepChoice:
    """Parses `resnet50`, `resnet18`, `tiny`, `sim:20000` (samples per second) or `sim:0.8x` (of the loader's own rate).

    Raises:
        OptionError: none of these.
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
    """One optimizer step, real or simulated.

    Attributes:
        name: for reports.
        device: what a `Meter` times: a device, or a clock.
    """

    name: str
    device: Any

    def __call__(self, batch: Sequence[torch.Tensor]) -> int:
        """Trains on a batch, images first, and returns its number of samples, maybe before the training is done."""
        ...

    def begin(self) -> None:
        """Starts the measurement of `utilization`."""
        ...

    def finish(self) -> None:
        """Waits until all steps are done."""
        ...

    @property
    def utilization(self) -> float | None:
        """Share of the time since `begin` that the accelerator was at work, 0 to 1; None: only the driver knows."""
        ...


class SimulatedStep:
    """A `TrainingStep` that hands each batch to a `SimulatedAccelerator`."""

    def __init__(self, accelerator: SimulatedAccelerator) -> None:
        self.name = f"simulated accelerator, {accelerator.samples_per_s:,.0f} images/s"
        self.accelerator = accelerator
        self.device = AcceleratorClock(accelerator)

    def __call__(self, batch: Sequence[torch.Tensor]) -> int:
        """Launches a step on the batch."""
        self.accelerator.launch(len(batch[0]))
        return len(batch[0])

    def begin(self) -> None:
        """Resets the accelerator's counters."""
        self.accelerator.begin()

    def finish(self) -> None:
        """Waits until the accelerator is done."""
        self.accelerator.finish()

    @property
    def utilization(self) -> float | None:
        """Share of the time that the accelerator was at work, 0 to 1."""
        return self.accelerator.utilization


class TouchStep:
    """A `TrainingStep` without training: reads one byte of each memory page of a batch."""

    name = "no step, each page of a batch looked at"
    device = "cpu"
    utilization = None

    def __call__(self, batch: Sequence[torch.Tensor]) -> int:
        """Reads the batch."""
        return touch_batch(batch)

    def begin(self) -> None:
        """Does nothing."""

    def finish(self) -> None:
        """Does nothing: the batch was read when the call returned."""


class NetworkStep:
    """A `TrainingStep` that trains a network: forward, backward, SGD with momentum; in bfloat16 on a GPU.

    Args:
        name: one of `NETWORKS`.
        channels, num_classes: of the data. Labels that are not class numbers count as class 0, which takes as long.
        device: of the network.
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
        """Trains on the batch."""
        # A FastLoader's batch may be on the device already, a plain DataLoader's never is: both get the same step.
        images = batch[0].to(self.device, non_blocking=True)
        labels = self._classes_of(batch).to(self.device, non_blocking=True)
        top = 255 if images.dtype == torch.uint8 else 65535
        images = images.to(torch.float32, memory_format=torch.channels_last).div_(top)
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss: torch.Tensor = self._loss(self._net(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        self._optimizer.step()
        return len(images)

    def begin(self) -> None:
        """Waits until the device is idle."""
        self.finish()

    def finish(self) -> None:
        """Waits until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def utilization(self) -> float | None:
        """None: only the driver knows."""
        return None

    def _classes_of(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns class numbers int64 (B,) within the network's classes."""
        labels = batch[1] if len(batch) > 1 else None
        if labels is None or labels.ndim != 1 or labels.is_floating_point():
            return torch.zeros(len(batch[0]), dtype=torch.int64)
        return labels.to(torch.int64).clamp(0, self._num_classes - 1)


def make_step(
    choice: StepChoice | str,
    *,
    channels: int = 3,
    num_classes: int = 10,
    device: torch.device | str | None = None,
    loader_samples_per_s: float | None = None,
    ahead: int = AHEAD,
) -> TrainingStep:
    """Returns the training step of the given kind.

    Args:
        choice: as `parse_step` takes or returns it.
        channels, num_classes: of the data.
        device: of a network; None: the CPU.
        loader_samples_per_s: the loader's own rate; needed for a simulated accelerator whose rate is a multiple of it.
        ahead: as in `SimulatedAccelerator`.

    Raises:
        OptionError: there is no such step, or the loader's rate is needed and missing.
    """
    choice = parse_step(choice) if isinstance(choice, str) else choice
    if choice.name != "sim":
        return NetworkStep(
            choice.name, channels=channels, num_classes=num_classes, device=torch.device(device or "cpu")
        )
    rate = choice.rate
    if choice.relative:
        if not loader_samples_per_s:
            raise OptionError(f"step {choice}: a multiple of the loader's own rate, which was not measured")
        rate *= loader_samples_per_s
    return SimulatedStep(SimulatedAccelerator(rate, ahead=ahead))


def network(name: str, *, channels: int, num_classes: int) -> nn.Module:
    """Returns an untrained network from images float (B, channels, H, W) to logits (B, num_classes).

    The residual networks are those of He et al. (2015, https://arxiv.org/abs/1512.03385), table 1, with the stride in
    the 3x3 convolution of a bottleneck, as is usual since. They are written out here because torchvision is not a
    dependency, and so that figures of different machines compare.

    Args:
        name: `resnet18`, `resnet50`, or `tiny` for machines without a GPU.
    """
    if name == "tiny":
        return _tiny(channels, num_classes)
    block, expansion = (_bottleneck, 4) if name == "resnet50" else (_basic, 1)
    layers: list[nn.Module] = [_convolution(channels, 64, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    wide = 64
    for stage, (width, count) in enumerate(zip(_WIDTHS, BLOCKS[name], strict=True)):
        for number in range(count):
            layers.append(block(wide, width, 2 if stage and not number else 1))
            wide = width * expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, num_classes))


class _Residual(nn.Module):
    """Layers whose output is added to their input; the input is projected where the shape changes."""

    def __init__(self, layers: nn.Module, wide: int, out: int, stride: int) -> None:
        super().__init__()
        self.layers = layers
        self.short = nn.Identity() if wide == out and stride == 1 else _convolution(wide, out, 1, stride=stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(images) + self.short(images))


def _basic(wide: int, width: int, stride: int) -> nn.Module:
    """Returns a block of two 3x3 convolutions, as in ResNet-18."""
    layers = nn.Sequential(
        _convolution(wide, width, 3, stride=stride), nn.ReLU(inplace=True), _convolution(width, width, 3)
    )
    return _Residual(layers, wide, width, stride)


def _bottleneck(wide: int, width: int, stride: int) -> nn.Module:
    """Returns a block of 1x1, 3x3 and 1x1 convolutions, as in ResNet-50."""
    layers = nn.Sequential(
        _convolution(wide, width, 1), nn.ReLU(inplace=True),
        _convolution(width, width, 3, stride=stride), nn.ReLU(inplace=True),
        _convolution(width, 4 * width, 1),
    )  # fmt: skip
    return _Residual(layers, wide, 4 * width, stride)


def _convolution(channels: int, out: int, size: int, stride: int = 1) -> nn.Module:
    """Returns a convolution followed by batch normalization."""
    return nn.Sequential(nn.Conv2d(channels, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out))


def _tiny(channels: int, num_classes: int) -> nn.Module:
    """Returns a few convolutions with large strides: some tenths of a millisecond per image on one core."""
    return nn.Sequential(
        nn.Conv2d(channels, 8, 5, 4, 2), nn.ReLU(inplace=True), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes),
    )  # fmt: skip
