"""Transforms that erase rectangles: RandomErasing (Zhong et al., AAAI 2020) and Cutout (DeVries and Taylor, 2017).

Both draw one rectangle per sample, `rectangles(spec, draws)`, and fill it; masks, boxes and points stay as they are,
as in torchvision. Random pixels are a hash of (sample, position in the image), so equal on every device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import OptionError, is_whole
from fastload.transforms.draws import Draws, rectangle_sides
from fastload.transforms.engine.buffers import as_bits, empty_images, sent
from fastload.transforms.spec import BaseTransform, ImageSpec, as_values, check_values, ordered_pair, probability


class Eraser(BaseTransform, ABC):
    """A transform that fills one rectangle of each image."""

    geometric = False
    wrong_dtype = "it erases in uint8 or uint16 images. Put it before Normalize."
    filled: tuple[float, ...] | None
    """Value of erased pixels, one or one per channel; None: random values."""
    option: str
    """The option that says so."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = probability(type(self).__name__, p)

    def output(self, spec: ImageSpec) -> ImageSpec:
        super().output(spec)
        if self.filled is not None:
            check_values(f"{type(self).__name__}({self.option}", self.filled, spec)
        return spec

    @abstractmethod
    def rectangles(self, spec: ImageSpec, draws: Draws) -> NDArray[np.int64]:
        """Returns top, left, height and width of each sample's rectangle, int64 (B, 4); height 0: nothing is erased."""

    def apply(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Returns images (B, C, H, W) of the same dtype in new channels_last memory."""
        spec = self.output(ImageSpec.of(images))
        rectangles, values = self.rectangles(spec, draws), self.filled or (0.0,)
        keys = random_keys(draws) if self.filled is None else None
        if images.device.type != "cpu":
            return _erase_at_once(images, rectangles, values, keys)
        output = empty_images(images, spec.channels, self._pool).copy_(images)
        target, fill = as_bits(output).permute(0, 2, 3, 1).numpy(), as_bits(_fill(values, images)).numpy()
        indices = None if keys is None else _value_indices(spec.height, spec.width, spec.channels, images.device)
        for sample in np.flatnonzero(rectangles[:, 2]).tolist():
            top, left, high, wide = rectangles[sample].tolist()
            window = np.s_[top : top + high, left : left + wide]
            if keys is not None and indices is not None:
                fill = random_pixels(torch.from_numpy(keys[sample]), indices[window], images.dtype).numpy()
            target[sample][window] = fill
        return output


class RandomErasing(Eraser):
    """Erases a rectangle of random area, aspect ratio and position from each image, with probability p.

    Takes images (B, C, H, W), uint8 or uint16, and keeps size and dtype; it stands before Normalize. Masks, boxes and
    points stay as they are. As in torchvision ten rectangles are tried, and only those smaller than the image in both
    directions count.

    Args:
        p: probability, 0 to 1.
        scale: (smallest, largest) area, as parts of the image's, 0 to 1.
        ratio: (smallest, largest) height / width, above 0.
        value: of erased pixels, in the images' own units (0 is black): one number, one per channel, or "random" for
            values drawn evenly from 0 to the largest of the dtype (torchvision: from a normal distribution, meant for
            normalized images).

    Raises:
        OptionError: p, scale or ratio out of bounds or reversed, or another value. Images that do not fit are refused
            when the loader is made, or at `apply`.
    """

    option = "value"

    def __init__(
        self,
        p: float = 0.5,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: float | Sequence[float] | Literal["random"] = 0,
    ) -> None:
        if isinstance(value, str) and value != "random":
            raise OptionError(f"RandomErasing(value={value!r}): give a number, one per channel, or 'random'.")
        super().__init__(p)
        self.filled = None if isinstance(value, str) else as_values("RandomErasing(value", value)
        self.value = "random" if self.filled is None else self.filled
        self.scale = ordered_pair("RandomErasing", "scale", scale, least=0, most=1, closed=True)
        self.ratio = ordered_pair("RandomErasing", "ratio", ratio, least=0)

    def rectangles(self, spec: ImageSpec, draws: Draws) -> NDArray[np.int64]:
        (size,) = spec.sizes
        sides, _ = rectangle_sides(draws.stream(1), size.prod(), self.scale, self.ratio, least=0, most=size - 1)
        erased = (draws.stream(0).uniform() < self.p) & sides.all(axis=1)
        corners = [draws.stream(2 + axis).integers(0, size[axis] - sides[:, axis] + 1) for axis in (0, 1)]
        return np.column_stack([*corners, sides]) * erased[:, None]


class Cutout(Eraser):
    """Erases a square from each image, its centre anywhere in the image, so that borders may cut some of it off.

    Takes images (B, C, H, W), uint8 or uint16, and keeps size and dtype; it stands before Normalize. Masks, boxes and
    points stay as they are.

    Args:
        size: side of the square in pixels.
        p: probability, 0 to 1.
        fill: value of erased pixels in the images' own units (0 is black): one number, or one per channel.

    Raises:
        OptionError: a size that is not a positive whole number, or p out of bounds. Images that are smaller than the
            square, or do not fit otherwise, are refused when the loader is made, or at `apply`.
    """

    option = "fill"

    def __init__(self, size: int, p: float = 1.0, fill: float | Sequence[float] = 0) -> None:
        if not (is_whole(size) and size > 0):
            raise OptionError(f"Cutout(size={size!r}): the side of a square is a positive whole number of pixels.")
        super().__init__(p)
        self.size = int(size)
        self.fill = self.filled = as_values("Cutout(fill", fill)

    def output(self, spec: ImageSpec) -> ImageSpec:
        super().output(spec)
        if self.size > max(spec.height, spec.width):
            raise OptionError(
                f"Cutout(size={self.size}): images of {spec.height}x{spec.width} (height x width) are smaller than the "
                f"square. Choose a smaller size: the paper uses 16 for images of 32x32."
            )
        return spec

    def rectangles(self, spec: ImageSpec, draws: Draws) -> NDArray[np.int64]:
        erased = draws.stream(0).uniform() < self.p
        starts, sides = [], []  # each side at least 1: the centre is a pixel of the image
        for stream, length in ((1, spec.height), (2, spec.width)):
            first = draws.stream(stream).integers(0, length) - self.size // 2
            start = np.maximum(first, 0)
            starts.append(start)
            sides.append(np.minimum(first + self.size, length) - start)
        return np.stack([*starts, *sides], axis=1) * erased[:, None]


def _erase_at_once(
    images: torch.Tensor, rectangles: NDArray[np.int64], values: tuple[float, ...], keys: NDArray[np.int32] | None
) -> torch.Tensor:
    """Returns images with rectangles filled by values, one or one per channel; with keys, (B, 2), by random pixels."""
    (batch, channels, height, width), device = images.shape, images.device
    corners = sent(rectangles, device)
    top, left, high, wide = (corners[:, i, None] for i in range(4))
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    inside_rows, inside_columns = (rows >= top) & (rows < top + high), (columns >= left) & (columns < left + wide)
    inside = (inside_rows[:, :, None] & inside_columns[:, None, :])[..., None]
    if keys is None:
        fill = sent(as_bits(_fill(values, images)), device)
    else:
        words = sent(keys, device).view(batch, 1, 1, 1, 2)
        fill = random_pixels(words, _value_indices(height, width, channels, device), images.dtype)
    pixels = as_bits(images).permute(0, 2, 3, 1)
    return torch.where(inside, fill, pixels).contiguous().view(images.dtype).permute(0, 3, 1, 2)


def random_keys(draws: Draws) -> NDArray[np.int32]:
    """Returns two random 32-bit words per sample, int32 (B, 2), that its random pixels are made of."""
    words = draws.stream(4)
    halves = [words.stream(i).integers(0, (1 << 32) - 1).astype(np.uint32) for i in range(2)]
    return np.stack(halves, axis=1).view(np.int32)


def random_pixels(keys: torch.Tensor, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns random values, in the bits of `dtype` (see `as_bits`), evenly from 0 to its largest.

    They are the upper bits of mix(mix(index ^ key 0) ^ key 1), where mix is the 32-bit finalizer "lowbias32" (Wellons,
    "Prospecting for hash functions", 2018) and index = (row * W + column) * C + channel: whatever shape is asked for,
    a value of a sample is the same.

    Args:
        keys: int32 (..., 2), broadcast against `indices` without its last dimension.
        indices: int32 (...).
        dtype: torch.uint8 or torch.uint16.
    """
    words = _mix(_mix(indices ^ keys[..., 0]) ^ keys[..., 1])
    bits = 8 * dtype.itemsize
    return ((words >> (32 - bits)) & ((1 << bits) - 1)).to(torch.uint8 if bits == 8 else torch.int16)


def _mix(words: torch.Tensor) -> torch.Tensor:
    # int32 products wrap on every device; >> carries the sign along, so what comes in from above is masked off.
    words = (words ^ ((words >> 16) & 0xFFFF)) * 0x7FEB352D
    words = (words ^ ((words >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return words ^ ((words >> 16) & 0xFFFF)


def _value_indices(height: int, width: int, channels: int, device: torch.device) -> torch.Tensor:
    return torch.arange(height * width * channels, dtype=torch.int32, device=device).view(height, width, channels)


def _fill(values: tuple[float, ...], images: torch.Tensor) -> torch.Tensor:
    # torch fills uint16 from whole numbers only, so by way of float64 and int64.
    filled = torch.tensor(values, dtype=torch.float64, device="cpu").to(torch.int64).expand(images.shape[1])
    return filled.to(images.dtype).contiguous()
