"""The networks that a benchmark trains: ResNet-18 and ResNet-50, and a tiny one for machines without a GPU.

The residual networks of He et al. (2015, https://arxiv.org/abs/1512.03385), table 1, with the stride in the 3x3
convolution of a bottleneck, as is usual since. Written out here since torchvision is no dependency: one definition on
every machine, so that figures compare.
"""

from __future__ import annotations

import torch
from torch import nn

BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}
"""Residual blocks in each of the four stages."""

_WIDTHS = (64, 128, 256, 512)


def network(name: str, *, channels: int, num_classes: int) -> nn.Module:
    """An untrained network that takes images float (B, channels, H, W) and gives logits (B, num_classes).

    Args:
        name: `resnet18`, `resnet50` or `tiny`.
    """
    if name == "tiny":
        return _tiny(channels, num_classes)
    block, expansion = (_bottleneck, 4) if name == "resnet50" else (_basic, 1)
    layers: list[nn.Module] = [_convolution(channels, 64, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    wide = 64
    for stage, (width, count) in enumerate(zip(_WIDTHS, BLOCKS[name], strict=True)):
        for place in range(count):
            layers.append(block(wide, width, 2 if stage and not place else 1))
            wide = width * expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, num_classes))


class _Residual(nn.Module):
    """Layers that are added to their input, which is projected where its shape changes."""

    def __init__(self, layers: nn.Module, wide: int, out: int, stride: int) -> None:
        super().__init__()
        self.layers = layers
        self.short = nn.Identity() if wide == out and stride == 1 else _convolution(wide, out, 1, stride=stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(images) + self.short(images))


def _basic(wide: int, width: int, stride: int) -> nn.Module:
    """Two 3x3 convolutions, of ResNet-18."""
    layers = nn.Sequential(
        _convolution(wide, width, 3, stride=stride), nn.ReLU(inplace=True), _convolution(width, width, 3)
    )
    return _Residual(layers, wide, width, stride)


def _bottleneck(wide: int, width: int, stride: int) -> nn.Module:
    """1x1, 3x3 and 1x1 convolutions, of ResNet-50."""
    layers = nn.Sequential(
        _convolution(wide, width, 1), nn.ReLU(inplace=True),
        _convolution(width, width, 3, stride=stride), nn.ReLU(inplace=True),
        _convolution(width, 4 * width, 1),
    )  # fmt: skip
    return _Residual(layers, wide, 4 * width, stride)


def _convolution(channels: int, out: int, size: int, stride: int = 1) -> nn.Module:
    """A convolution and its batch normalization."""
    return nn.Sequential(nn.Conv2d(channels, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out))


def _tiny(channels: int, num_classes: int) -> nn.Module:
    """A few convolutions with long strides: some tenths of a millisecond an image on one core."""
    return nn.Sequential(
        nn.Conv2d(channels, 8, 5, 4, 2), nn.ReLU(inplace=True), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes),
    )  # fmt: skip
