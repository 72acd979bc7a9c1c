"""Measures what the layers of a network cost on this machine's CPUs, by the memory format of the images."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastload.profiling.doctor.loader_trials import torch_threads
from fastload.profiling.verdict.demands import FormatCosts

if TYPE_CHECKING:  # torch takes seconds to import
    import torch

_SECONDS = 5.0  # that all layers may take together
_ROUNDS, _WARM_UP = 3, 1
_MOST_S = _SECONDS / 2 / (_ROUNDS + _WARM_UP)  # of a step; of a longer one a part of its batch is tried


@dataclass(frozen=True)
class Layer:
    """A layer as a training step called it: a class of `torch.nn`, its arguments, the shape that it got."""

    kind: str
    arguments: Mapping[str, Any]
    shape: tuple[int, ...]  # (B, C, H, W)
    backward: bool  # whether its input needs a gradient
    count: int  # calls in a step


def measure_formats(layers: Sequence[Layer], own_s: float, own_cpus: float) -> FormatCosts:
    """Returns what layers cost forward and backward in a step of `own_s`, that has so many CPUs, by memory format."""
    import torch

    share = min(1.0, _MOST_S / max(own_s, 1e-9))
    contiguous_s = channels_last_s = 0.0
    begun_s = time.perf_counter()
    with torch_threads(max(1, round(own_cpus))):
        for layer in layers:
            batch, *rest = layer.shape
            part = max(1, round(share * batch))
            calls = [_called(layer, _images((part, *rest), last=last)) for last in (False, True)]
            taken_s = [_least_s(call) for call in calls]
            contiguous_s += layer.count * taken_s[0] * batch / part
            channels_last_s += layer.count * taken_s[1] * batch / part
            if time.perf_counter() - begun_s > 2 * _SECONDS:
                break  # of the others nothing is known
        images = _images(layers[0].shape, last=False)
        convert_s = _least_s(lambda: images.contiguous(memory_format=torch.channels_last))
    return FormatCosts(contiguous_s, channels_last_s, convert_s)


def _images(shape: Sequence[int], *, last: bool) -> torch.Tensor:
    import torch

    batch, channels, height, width = shape
    return (
        torch.rand(batch, height, width, channels).permute(0, 3, 1, 2)
        if last
        else torch.rand(batch, channels, height, width)
    )


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


def _least_s(call: Callable[[], Any]) -> float:
    """Returns the seconds of the shortest of a few calls."""
    taken_s = []
    for _ in range(_WARM_UP + _ROUNDS):
        begun_s = time.perf_counter()
        call()
        taken_s.append(time.perf_counter() - begun_s)
    return min(taken_s[_WARM_UP:])
