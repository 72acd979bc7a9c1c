"""Transforms of colour: brightness, contrast, saturation and hue, by each sample's own factors and in its own order.

The draws become `ColourSteps`, a table of operations and factors; `apply_colour` carries it out with plain torch on any
device and is the reference for kernels that fuse colour with other work. The formulas are torchvision's (v2, uint8
tensors): brightness, contrast and saturation blend the image with black, its mean gray level and its gray image,

    clamp(factor * x + (1 - factor) * other, 0, largest), truncated to a whole number,

where gray = floor(0.2989 R + 0.587 G + 0.114 B), and contrast takes the mean of that, as a fraction. Hue turns the
hexagon of HSV by `factor` of a full turn; uint8 results are floor(level * 255.999 / 255) as torchvision has it, uint16
ones are rounded to nearest. Each step gives whole numbers, all in float32, so devices may differ by one level a step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import OptionError
from fastload.transforms.draws import Draws
from fastload.transforms.engine.buffers import OutputPool, as_bits, empty_images, sent
from fastload.transforms.spec import BaseTransform, ImageSpec, is_number, probability

IDENTITY, BRIGHTNESS, CONTRAST, SATURATION, HUE = range(5)

_LARGEST = {torch.uint8: 255, torch.uint16: 65535}

# Samples are worked on in blocks of about so many values on the CPU: float32 temporaries of 1 MB stay in the cache.
BLOCK_VALUES = 1 << 18


@dataclass(frozen=True)
class ColourSteps:
    """Colour operations of B samples, K for each, in the order they are applied.

    Attributes:
        ops: int32 (B, K): IDENTITY, BRIGHTNESS, CONTRAST, SATURATION or HUE.
        factors: float32 (B, K): 0 gives black or gray, 1 leaves the image as it is; for HUE parts of a full turn,
            -0.5 to 0.5.
    """

    ops: NDArray[np.int32]
    factors: NDArray[np.float32]


class ColourTransform(BaseTransform, ABC):
    """A transform that is a table of colour steps."""

    geometric = False
    wrong_dtype = (
        "colour is changed in uint8 or uint16 levels. Put it before Normalize, and leave conversions to float to "
        "Normalize."
    )
    wrong_channels = "colour needs"

    @abstractmethod
    def steps(self, draws: Draws) -> ColourSteps:
        """Returns the steps drawn for each sample."""

    def apply(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Returns images (B, C, H, W) of the same dtype in new channels_last memory."""
        self.output(ImageSpec.of(images))
        return apply_colour(images, self.steps(draws), self._pool)


class ColorJitter(ColourTransform):
    """Changes brightness, contrast, saturation and hue of each image, by factors and in an order drawn for it.

    Takes images (B, C, H, W), uint8 or uint16, of one or three channels, and keeps size and dtype. Of images of one
    channel only brightness and contrast change.

    Args:
        brightness, contrast, saturation: a number v for factors from max(0, 1 - v) to 1 + v, or (min, max) of them. A
            factor of 1 changes nothing.
        hue: a number v up to 0.5 for parts of a full turn from -v to v, or (min, max) within [-0.5, 0.5].

    Raises:
        OptionError: a range that is negative, reversed or out of bounds. Images that do not fit are refused when the
            loader is made, or at `apply`.
    """

    def __init__(
        self,
        brightness: float | Sequence[float] = 0,
        contrast: float | Sequence[float] = 0,
        saturation: float | Sequence[float] = 0,
        hue: float | Sequence[float] = 0,
    ) -> None:
        super().__init__()
        self.brightness = _factor_range("brightness", brightness)
        self.contrast = _factor_range("contrast", contrast)
        self.saturation = _factor_range("saturation", saturation)
        self.hue = _factor_range("hue", hue, centre=0, lowest=-0.5, highest=0.5)

    def steps(self, draws: Draws) -> ColourSteps:
        """Returns the steps drawn for each sample: one for each option whose range is not just "as it is"."""
        ranges = {BRIGHTNESS: self.brightness, CONTRAST: self.contrast, SATURATION: self.saturation, HUE: self.hue}
        varying = {op: ends for op, ends in ranges.items() if set(ends) != {0.0 if op == HUE else 1.0}}
        if not varying:
            return ColourSteps(np.zeros((len(draws), 0), np.int32), np.zeros((len(draws), 0), np.float32))
        # Each operation has its own streams, so that adding another changes neither its factor nor its position.
        factors = [low + (high - low) * draws.stream(op).uniform() for op, (low, high) in varying.items()]
        ranks = [draws.stream(len(ranges) + op).uniform() for op in varying]
        order = np.argsort(np.stack(ranks, axis=1), axis=1, kind="stable")
        ops = np.array(list(varying), dtype=np.int32)[order]
        drawn = np.stack(factors, axis=1).astype(np.float32)
        return ColourSteps(ops, np.take_along_axis(drawn, order, axis=1))


class Grayscale(ColourTransform):
    """Turns images gray, floor(0.2989 R + 0.587 G + 0.114 B), with one channel or three equal ones.

    Takes images (B, C, H, W), uint8 or uint16, of one or three channels, and keeps size and dtype.

    Args:
        num_output_channels: 1 or 3.

    Raises:
        OptionError: another number of channels. Images that do not fit are refused when the loader is made, or at
            `apply`.
    """

    def __init__(self, num_output_channels: int = 1) -> None:
        if isinstance(num_output_channels, bool) or num_output_channels not in (1, 3):
            raise OptionError(
                f"Grayscale(num_output_channels={num_output_channels!r}): gray images have 1 channel, or 3 equal ones."
            )
        super().__init__()
        self.num_output_channels = int(num_output_channels)

    def output(self, spec: ImageSpec) -> ImageSpec:
        return super().output(spec)._replace(channels=self.num_output_channels)

    def steps(self, draws: Draws) -> ColourSteps:
        """Returns steps of saturation 0 for each sample: they do what `apply` does with three output channels."""
        return _desaturate(np.ones(len(draws), dtype=np.bool_))

    def apply(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Returns gray images (B, 1 or 3, H, W) of the same dtype in new channels_last memory."""
        spec = self.output(ImageSpec.of(images))
        output = empty_images(images, spec.channels, self._pool)
        if images.shape[1] == 1:
            return output.copy_(images)
        for part in sample_blocks(images):
            output[part].copy_(_gray(_pixels(images[part])).permute(0, 3, 1, 2))
        return output


class RandomGrayscale(ColourTransform):
    """Turns each image gray with probability p; its three channels are then equal.

    Takes images (B, C, H, W), uint8 or uint16, of one or three channels, and keeps size and dtype.

    Args:
        p: probability, 0 to 1.

    Raises:
        OptionError: p is not within [0, 1]. Images that do not fit are refused when the loader is made, or at `apply`.
    """

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.p = probability("RandomGrayscale", p)

    def steps(self, draws: Draws) -> ColourSteps:
        """Returns steps of saturation 0 for the samples drawn, none for the others."""
        return _desaturate(draws.uniform() < self.p)


def apply_colour(images: torch.Tensor, steps: ColourSteps, pool: OutputPool | None = None) -> torch.Tensor:
    """Returns images after their steps, (B, C, H, W) of the same dtype in new channels_last memory.

    They are such as `ColourTransform.output` accepts; with one channel, saturation and hue change nothing.
    """
    output = empty_images(images, images.shape[1], pool)
    ops = steps.ops if images.shape[1] == 3 else np.where(steps.ops > CONTRAST, IDENTITY, steps.ops)
    changed = (ops != IDENTITY).any(axis=1)
    if not changed.all():
        output.copy_(images)
    for rows in row_blocks(np.flatnonzero(changed), images):
        factors = sent(steps.factors[rows], images.device)
        coloured = _coloured(picked(images, rows), ops[rows], factors)
        put(output, rows, coloured.permute(0, 3, 1, 2))
    return output


def row_blocks(rows: NDArray[np.int64], images: torch.Tensor) -> list[NDArray[np.int64]]:
    """Returns some samples of a batch in blocks that are worked on at once: all on a device, few on the CPU."""
    if len(rows) == 0 or images[0].numel() == 0:
        return []
    count = len(rows) if images.device.type != "cpu" else max(1, BLOCK_VALUES // images[0].numel())
    return [rows[first : first + count] for first in range(0, len(rows), count)]


def picked(images: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
    """Returns some samples of a batch: a view if they follow one another, else a copy in the same memory order."""
    index = _index(images, rows)
    if isinstance(index, slice):
        return images[index]
    return as_bits(images).permute(0, 2, 3, 1).index_select(0, index).view(images.dtype).permute(0, 3, 1, 2)


def put(images: torch.Tensor, rows: NDArray[np.int64], values: torch.Tensor) -> None:
    """Writes values, cast to the images' dtype, over some images of a batch."""
    index = _index(images, rows)
    if isinstance(index, slice):
        images[index].copy_(values)
    else:
        cast = as_bits(values.to(images.dtype)).permute(0, 2, 3, 1)
        as_bits(images).permute(0, 2, 3, 1).index_copy_(0, index, cast)


def _index(images: torch.Tensor, rows: NDArray[np.int64]) -> slice | torch.Tensor:
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return sent(rows, images.device)


def sample_blocks(images: torch.Tensor) -> list[slice]:
    """Returns all samples of a batch in such blocks, as slices."""
    blocks = row_blocks(np.arange(len(images)), images)
    return [slice(int(rows[0]), int(rows[-1]) + 1) for rows in blocks]


def _coloured(images: torch.Tensor, ops: NDArray[np.int32], factors: torch.Tensor) -> torch.Tensor:
    """Returns whole numbers, float32 (B, H, W, C), of images (B, C, H, W) after steps `ops` and `factors`, (B, K)."""
    pixels, dtype = _pixels(images), images.dtype
    # Each step runs once per operation, on the samples whose turn it is: known on the host, so nothing waits.
    order = np.argsort(ops, axis=0, kind="stable")
    members = sent(order.T.copy(), images.device)
    for k in range(ops.shape[1]):
        counts = np.bincount(ops[:, k], minlength=HUE + 1)
        first = int(counts[IDENTITY])
        for op in (BRIGHTNESS, CONTRAST, SATURATION, HUE):
            count = int(counts[op])
            if count == len(ops):
                pixels = _adjusted(pixels, op, factors[:, k], dtype)
            elif count:
                rows = members[k, first : first + count]
                group = _adjusted(pixels.index_select(0, rows), op, factors[:, k].index_select(0, rows), dtype)
                pixels.index_copy_(0, rows, group)
            first += count
    return pixels


def _adjusted(pixels: torch.Tensor, op: int, factors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns pixels (B, H, W, C), which it may overwrite, after one operation by factors (B,)."""
    if op == HUE:
        return _turned(pixels, factors[:, None, None], dtype)
    factors = factors[:, None, None, None]
    if op == BRIGHTNESS:
        return pixels.mul_(factors).clamp_(max=_LARGEST[dtype]).floor_()
    other = _gray(pixels)
    if op == CONTRAST:
        # A sum of whole numbers, exact in float64: a float32 mean depends on the number of samples in the batch.
        other = other.mean(dim=(1, 2, 3), keepdim=True, dtype=torch.float64).to(torch.float32)
    # Not other + factor * (x - other): with a factor of 1 that may end just below x, and be truncated to x - 1.
    return pixels.mul_(factors).add_(other * (1 - factors)).clamp_(0, _LARGEST[dtype]).floor_()


def _gray(pixels: torch.Tensor) -> torch.Tensor:
    """Returns gray levels (B, H, W, 1) of pixels (B, H, W, C)."""
    if pixels.shape[3] == 1:
        return pixels
    gray = pixels[..., 0:1] * 0.2989
    return gray.add_(pixels[..., 1:2], alpha=0.587).add_(pixels[..., 2:3], alpha=0.114).floor_()


def _turned(pixels: torch.Tensor, turns: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns pixels (B, H, W, 3), their hue turned by parts of a full turn (B, 1, 1), value and saturation kept."""
    # Planes: reading every third value is slow. A clone, since for a single pixel the planes would be `pixels` itself.
    red, green, blue = pixels.permute(3, 0, 1, 2).clone(memory_format=torch.contiguous_format)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    # Levels are whole, so 1 keeps gray pixels from a division by zero and changes no other, and a channel's distance
    # from the greatest says, as exactly 1 or 0, whether it is that: lerp chooses in a quarter of the time of where.
    per_level = chroma.clamp(min=1).reciprocal_()
    is_red, is_green = ((channel - value).add_(1).clamp_(min=0) for channel in (red, green))
    # Hue in sixths of a turn, from red.
    hue = (red - green).mul_(per_level).add_(4)
    hue.lerp_((blue - red).mul_(per_level).add_(2), is_green).lerp_((green - blue).mul_(per_level), is_red)
    hue.add_(6 * turns)
    # A channel is full within one sixth of its own hue, empty beyond two (Smith, "Color gamut transform pairs", 1978).
    for channel, offset in enumerate((5, 3, 1)):
        distance = hue + offset
        distance.sub_((distance / 6).floor_(), alpha=6)
        missing = torch.minimum(distance, 4 - distance).clamp_(0, 1)
        pixels[..., channel] = value - missing.mul_(chroma)
    if dtype == torch.uint8:
        return pixels.mul_(255.999 / 255).clamp_(0, 255).floor_()
    return pixels.round_().clamp_(0, _LARGEST[dtype])


def _pixels(images: torch.Tensor) -> torch.Tensor:
    """Returns a float32 copy (B, H, W, C) of images (B, C, H, W), in memory order."""
    return images.permute(0, 2, 3, 1).to(torch.float32, memory_format=torch.contiguous_format)


def _desaturate(chosen: NDArray[np.bool_]) -> ColourSteps:
    ops = np.where(chosen, SATURATION, IDENTITY).astype(np.int32)
    return ColourSteps(ops[:, None], np.zeros((len(chosen), 1), dtype=np.float32))


def _factor_range(
    name: str, value: Any, centre: float = 1, lowest: float = 0, highest: float = math.inf
) -> tuple[float, float]:
    where = f"ColorJitter({name}={value!r})"
    if is_number(value):
        if not 0 <= value < math.inf:
            raise OptionError(f"{where}: a number says how far factors go from {centre:g}, so it is not negative.")
        low, high = max(centre - value, lowest) if lowest == 0 else centre - value, centre + value
    elif isinstance(value, Sequence) and len(value) == 2 and all(map(is_number, value)):
        low, high = float(value[0]), float(value[1])
    else:
        raise OptionError(f"{where}: give a number, or the lowest and highest factor as (min, max).")
    if not (lowest <= low <= high <= highest and high < math.inf):
        bounds = "from -0.5 to 0.5, parts of a turn" if name == "hue" else "finite and not negative"
        raise OptionError(
            f"{where}: factors would go from {low:g} to {high:g}. They are {bounds}, and the lowest comes first."
        )
    return float(low), float(high)
