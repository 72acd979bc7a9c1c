"""Runs the layers of a network on this machine's CPUs: in the place of its steps, and to compare memory formats."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastload.profiling.verdict.demands import FormatCosts

if TYPE_CHECKING:  # torch takes seconds to import
    import torch

_SECONDS = 5.0  # that all layers may take together
_ROUNDS, _WARM_UP = 3, 1
_SMALL = 32
_WITH_FORMAT = 4  # dimensions of what has a memory format
_MOST_S = _SECONDS / 2 / (_ROUNDS + _WARM_UP)  # of a step; of a longer one a part of its batch is tried


@dataclass(frozen=True)
class Layer:
    """A layer as a training step called it: a class of `torch.nn`, its arguments, the shape that it got."""

    kind: str
    arguments: Mapping[str, Any]
    shape: tuple[int, ...]  # with the batch first; of images (B, C, H, W)
    backward: bool  # whether its input needs a gradient
    count: int  # calls in a step


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Lets torch use so many threads for a step, as the loop's does."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def usual_layers(shape: tuple[int, int, int, int]) -> tuple[Layer, ...]:
    """Returns those of a small network for images (B, C, H, W)."""
    batch, channels, height, width = shape
    stride = 4 if min(height, width) > _SMALL else 1
    first = {"in_channels": channels, "out_channels": 8, "kernel_size": 5, "stride": stride, "padding": 2}
    then = {"in_channels": 8, "out_channels": 16, "kernel_size": 3, "stride": 2, "padding": 1}
    inner = (batch, 8, -(-height // stride), -(-width // stride))
    return (
        Layer("Conv2d", first, shape, False, 1),
        Layer("ReLU", {}, inner, True, 1),
        Layer("Conv2d", then, inner, True, 1),
    )


class LayersStep:
    """A training step that takes about so long after a pause: layers one after another, then steps of a small network.

    The pause is what the loop does meanwhile, and from which a step begins with cold caches and sleeping threads. The
    layers run forward and backward. Without any, those of a small network for images run again and again, so that all
    of the step is like them.
    """

    def __init__(
        self, layers: Sequence[Layer], seconds: float, shape: tuple[int, int, int, int], pause_s: float = 0.0
    ) -> None:
        share, self._rounds, self._more = min(1.0, _MOST_S / max(seconds, 1e-9)), 1, 0
        self._calls = _calls_of(layers or usual_layers(shape), share)
        self._small_step = _small_step()
        took_s = _least_s(self, pause_s)
        if took_s > seconds:
            self._calls = _calls_of(layers or usual_layers(shape), share * seconds / took_s)
        elif layers and share == 1:
            self._more = round((seconds - took_s) / _least_s(self._small_step))
        else:
            self._rounds = round(seconds / took_s)

    def __call__(self) -> None:
        for _ in range(self._rounds):
            for call, count in self._calls:
                for _ in range(count):
                    call()
        for _ in range(self._more):
            self._small_step()


def _small_step() -> Callable[[], None]:
    """Returns a training step that one thread takes in less than a millisecond: much Python, little arithmetic."""
    import torch

    network = torch.nn.Sequential(torch.nn.Linear(_SMALL, _SMALL), torch.nn.ReLU(), torch.nn.Linear(_SMALL, _SMALL))
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    samples, labels = torch.rand(_SMALL // 2, _SMALL), torch.zeros(_SMALL // 2, dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(torch.nn.functional.cross_entropy(network(samples), labels))
        optimizer.step()

    return step


def _calls_of(layers: Sequence[Layer], share: float) -> list[tuple[Callable[[], None], int]]:
    """Returns what calls each layer with so large a share of its batch, and how often a step does."""
    return [
        (_called(layer, _images((max(1, round(share * layer.shape[0])), *layer.shape[1:]), last=False)), layer.count)
        for layer in layers
    ]


def has_format(layers: Sequence[Layer]) -> bool:
    """Returns whether any of them works on images, which have a memory format."""
    return any(len(layer.shape) == _WITH_FORMAT for layer in layers)


def measure_formats(layers: Sequence[Layer], own_s: float, own_cpus: float) -> FormatCosts:
    """Returns what layers of images cost in a step of `own_s`, that has so many CPUs, by memory format.

    At least one of them has to be of images.
    """
    import torch

    share = min(1.0, _MOST_S / max(own_s, 1e-9))
    contiguous_s = channels_last_s = 0.0
    begun_s = time.perf_counter()
    with torch_threads(max(1, round(own_cpus))):
        of_images = [layer for layer in layers if len(layer.shape) == _WITH_FORMAT]
        for layer in of_images:
            batch, *rest = layer.shape
            part = max(1, round(share * batch))
            calls = [_called(layer, _images((part, *rest), last=last)) for last in (False, True)]
            taken_s = [_least_s(call) for call in calls]
            contiguous_s += layer.count * taken_s[0] * batch / part
            channels_last_s += layer.count * taken_s[1] * batch / part
            if time.perf_counter() - begun_s > 2 * _SECONDS:
                break  # of the others nothing is known
        images = _images(of_images[0].shape, last=False)
        convert_s = _least_s(lambda: images.contiguous(memory_format=torch.channels_last))
    return FormatCosts(contiguous_s, channels_last_s, convert_s)


def _images(shape: Sequence[int], *, last: bool) -> torch.Tensor:
    import torch

    if not last:
        return torch.rand(*shape)
    batch, channels, height, width = shape
    return torch.rand(batch, height, width, channels).permute(0, 3, 1, 2)


def _called(layer: Layer, images: torch.Tensor) -> Callable[[], None]:
    """Returns what calls a layer with such images, forward and backward."""
    import torch

    module = getattr(torch.nn, layer.kind)(**layer.arguments)
    images.requires_grad_(layer.backward)

    def call() -> None:
        result = module(images)
        if result.requires_grad:
            result.backward(torch.ones_like(result))

    return call


def _least_s(call: Callable[[], Any], pause_s: float = 0.0) -> float:
    """Returns the seconds of the shortest of a few calls, each after a pause."""
    taken_s = []
    for _ in range(_WARM_UP + _ROUNDS):
        begun_s = pause(pause_s)
        call()
        taken_s.append(time.perf_counter() - begun_s)
    return min(taken_s[_WARM_UP:])


def pause(seconds: float) -> float:
    """Keeps the calling thread busy for so long, and returns the time then."""
    end_s = time.perf_counter() + seconds
    while (now_s := time.perf_counter()) < end_s:
        pass
    return now_s
