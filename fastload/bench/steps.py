"""What a benchmark does with a batch: train a network on it, or hand it to a simulated accelerator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fastload.bench.networks import BLOCKS, network
from fastload.bench.passes import touched
from fastload.bench.simulated import AHEAD, AcceleratorClock, SimulatedAccelerator
from fastload.errors import OptionError

NETWORKS = (*BLOCKS, "tiny")


@dataclass(frozen=True)
class StepChoice:
    """The kind of step that was asked for.

    Attributes:
        name: one of `NETWORKS`, or `sim`.
        rate: of a simulated accelerator: samples a second, or times the loader's own rate.
        relative: whether the rate is that of the loader times `rate`.
    """

    name: str
    rate: float = 0.0
    relative: bool = False

    def __str__(self) -> str:
        return f"sim:{self.rate:g}{'x' if self.relative else ''}" if self.name == "sim" else self.name


def parse_step(text: str) -> StepChoice:
    """`resnet50`, `resnet18`, `tiny`, `sim:20000` (samples a second) or `sim:0.8x` (of the loader's own rate).

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
        name: how reports call it.
        device: what a `Meter` is to time: a device, or a clock.
    """

    name: str
    device: Any

    def __call__(self, batch: Sequence[torch.Tensor]) -> None:
        """Trains on a batch, images first; may return before that is done."""
        ...

    def begin(self) -> None:
        """Counts from now on."""
        ...

    def finish(self) -> None:
        """Waits until all that was begun is done."""
        ...

    @property
    def utilization(self) -> float | None:
        """Part of the time since `begin` that the accelerator was at work, 0 to 1; None: only the driver knows."""
        ...


class SimulatedStep:
    """Hands each batch to a `SimulatedAccelerator`; see `TrainingStep`."""

    def __init__(self, accelerator: SimulatedAccelerator) -> None:
        self.name = f"simulated accelerator, {accelerator.samples_per_s:,.0f} images/s"
        self.accelerator = accelerator
        self.device = AcceleratorClock(accelerator)

    def __call__(self, batch: Sequence[torch.Tensor]) -> None:
        """See `TrainingStep`."""
        self.accelerator.launch(len(batch[0]))

    def begin(self) -> None:
        """See `TrainingStep`."""
        self.accelerator.begin()

    def finish(self) -> None:
        """See `TrainingStep`."""
        self.accelerator.finish()

    @property
    def utilization(self) -> float | None:
        """See `TrainingStep`."""
        return self.accelerator.utilization


class LookingStep:
    """No training: each page of a batch's images is looked at. See `TrainingStep`."""

    name = "no step, each page of a batch looked at"
    device = "cpu"
    utilization = None

    def __call__(self, batch: Sequence[torch.Tensor]) -> None:
        """See `TrainingStep`."""
        touched(batch)

    def begin(self) -> None:
        """See `TrainingStep`."""

    def finish(self) -> None:
        """See `TrainingStep`."""


class NetworkStep:
    """Trains a network: forward, backward, SGD with momentum; bfloat16 on a GPU. See `TrainingStep`.

    Args:
        name: one of `NETWORKS`.
        channels, num_classes: of the data; labels that are no class numbers count as class 0, which takes as long.
        device: where the network is.
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
            torch.backends.cudnn.benchmark = True  # as training scripts do where shapes stay
        self._loss = nn.CrossEntropyLoss()
        self._optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def __call__(self, batch: Sequence[torch.Tensor]) -> None:
        """See `TrainingStep`."""
        # The same either way, so that a plain DataLoader's batch, which is on the host, takes the same step.
        images = batch[0].to(self.device, non_blocking=True)
        labels = self._classes_of(batch).to(self.device, non_blocking=True)
        top = 255 if images.dtype == torch.uint8 else 65535
        images = images.to(torch.float32, memory_format=torch.channels_last).div_(top)
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss: torch.Tensor = self._loss(self._net(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._optimizer.step()

    def begin(self) -> None:
        """See `TrainingStep`."""
        self.finish()

    def finish(self) -> None:
        """See `TrainingStep`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def utilization(self) -> float | None:
        """See `TrainingStep`."""
        return None

    def _classes_of(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
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
    """The step of that kind.

    Args:
        choice: as `parse_step` takes or gives it.
        channels, num_classes: of the data.
        device: of a network; None: the CPU.
        loader_samples_per_s: the loader's own rate, for a simulated accelerator that is to be a part of it.
        ahead: as in `SimulatedAccelerator`.

    Raises:
        OptionError: there is no such step, or no rate of the loader for it.
    """
    choice = parse_step(choice) if isinstance(choice, str) else choice
    if choice.name != "sim":
        return NetworkStep(
            choice.name, channels=channels, num_classes=num_classes, device=torch.device(device or "cpu")
        )
    rate = choice.rate
    if choice.relative:
        if not loader_samples_per_s:
            raise OptionError(f"step {choice}: a part of the loader's own rate, and that has not been measured")
        rate *= loader_samples_per_s
    return SimulatedStep(SimulatedAccelerator(rate, ahead=ahead))
