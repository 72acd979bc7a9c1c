"""Transforms that resize: the whole image, or a random part of each.

Antialiased bilinear interpolation, as Pillow's and torchvision's (v2), whose parameters these are; results are rounded
to nearest. Masks are resized by nearest neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import OptionError
from fastload.transforms.arguments import as_plain, is_whole, ordered_pair, window_size
from fastload.transforms.draws import Draws
from fastload.transforms.placed import PlacedTransform
from fastload.transforms.placement import Placement, Whole, resized
from fastload.transforms.spec import ImageSpec

_ATTEMPTS = 10


class Resize(PlacedTransform):
    """Resizes each image.

    Args:
        size: (height, width), or one number for the shorter side, the other keeping the proportions.
        max_size: most pixels of the longer side; only with one number for size.

    Raises:
        OptionError: a size that has no meaning.
    """

    resizes = True

    def __init__(self, size: int | Sequence[int], max_size: int | None = None) -> None:
        super().__init__()
        window_size("Resize", size)
        size = as_plain(size)
        self.size = (int(size),) if not isinstance(size, Sequence) else tuple(int(side) for side in size)
        if max_size is not None and (not is_whole(max_size) or len(self.size) != 1 or max_size <= self.size[0]):
            raise OptionError(
                f"Resize(size={size!r}, max_size={max_size!r}): max_size is a whole number above size, and size then "
                f"one number, that of the shorter side."
            )
        self.max_size = max_size

    def __repr__(self) -> str:
        return f"Resize(size={self.size}, max_size={self.max_size})"

    def output(self, spec: ImageSpec) -> ImageSpec:
        _check_dtype("Resize", spec)
        height, width = self._target(spec)
        return spec._replace(height=height, width=width)

    def place(self, spec: ImageSpec, draws: Draws) -> Placement:
        zeros = np.zeros(len(draws), np.int64)
        return resized(zeros, zeros, zeros + spec.height, zeros + spec.width, self._target(spec))

    def targets(self, heights: Whole, widths: Whole) -> tuple[Whole, Whole]:
        """Heights and widths, int64 (B,), of what images of these sizes become."""
        if len(self.size) == 2:
            return np.full(len(heights), self.size[0]), np.full(len(heights), self.size[1])
        short, long = np.minimum(heights, widths), np.maximum(heights, widths)
        new_short, new_long = np.full(len(heights), self.size[0]), (self.size[0] * long / short).astype(np.int64)
        if self.max_size is not None:
            over = new_long > self.max_size
            new_short = np.where(over, (self.max_size * new_short / new_long).astype(np.int64), new_short)
            new_long = np.where(over, self.max_size, new_long)
        new_short = np.maximum(1, new_short)
        upright = heights <= widths
        return np.where(upright, new_short, new_long), np.where(upright, new_long, new_short)

    def _target(self, spec: ImageSpec) -> tuple[int, int]:
        heights, widths = self.targets(np.array([spec.height]), np.array([spec.width]))
        return int(heights[0]), int(widths[0])


class RandomResizedCrop(PlacedTransform):
    """Cuts a part of random size, proportions and place out of each image, and resizes it to one size.

    The area is drawn evenly from `scale`, the logarithm of width / height evenly from `ratio`; where ten such parts
    did not fit into the image, the largest central part with proportions in `ratio` is taken. As torchvision's, and
    introduced by Szegedy et al., "Going deeper with convolutions", 2015.

    Args:
        size: of the output, (height, width); one number: a square.
        scale: (smallest, largest) part of the image's area.
        ratio: (smallest, largest) width / height.

    Raises:
        OptionError: a size that has no meaning, or bounds that are reversed or not positive.
    """

    resizes = True

    def __init__(
        self,
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
    ) -> None:
        super().__init__()
        self.size = window_size("RandomResizedCrop", size)
        self.scale = ordered_pair("RandomResizedCrop", "scale", scale, least=0, most=1)
        self.ratio = ordered_pair("RandomResizedCrop", "ratio", ratio, least=0)

    def __repr__(self) -> str:
        return f"RandomResizedCrop(size={self.size}, scale={self.scale}, ratio={self.ratio})"

    def output(self, spec: ImageSpec) -> ImageSpec:
        _check_dtype("RandomResizedCrop", spec)
        return spec._replace(height=self.size[0], width=self.size[1])

    def place(self, spec: ImageSpec, draws: Draws) -> Placement:
        zeros = np.zeros(len(draws), np.int64)
        return resized(*self.windows(zeros + spec.height, zeros + spec.width, draws), self.size)

    def windows(self, image_heights: Whole, image_widths: Whole, draws: Draws) -> tuple[Whole, Whole, Whole, Whole]:
        """First row and column, height and width of each sample's part, int64 (B,), in images of these sizes."""
        heights, widths = self._fallback(image_heights, image_widths)
        found = np.zeros(len(draws), np.bool_)
        log_ratios = math.log(self.ratio[0]), math.log(self.ratio[1])
        for attempt in range(_ATTEMPTS):
            area = image_heights * image_widths * _between(*self.scale, draws.stream(2 * attempt).uniform())
            log_ratio = _between(*log_ratios, draws.stream(2 * attempt + 1).uniform())
            # Numbers whose logarithm and square root are the same on every machine are not promised by IEEE 754:
            # numpy's differ by one unit in the last place between processors, which only counts at a rounding tie.
            ratio = np.exp(log_ratio)
            width = np.rint(np.sqrt(area * ratio)).astype(np.int64)
            height = np.rint(np.sqrt(area / ratio)).astype(np.int64)
            fits = (width > 0) & (width <= image_widths) & (height > 0) & (height <= image_heights) & ~found
            heights, widths = np.where(fits, height, heights), np.where(fits, width, widths)
            found |= fits
            if found.all():
                break
        tops = draws.stream(2 * _ATTEMPTS).integers(0, image_heights - heights + 1)
        lefts = draws.stream(2 * _ATTEMPTS + 1).integers(0, image_widths - widths + 1)
        tops = np.where(found, tops, (image_heights - heights) // 2)
        lefts = np.where(found, lefts, (image_widths - widths) // 2)
        return tops, lefts, heights, widths

    def _fallback(self, image_heights: Whole, image_widths: Whole) -> tuple[Whole, Whole]:
        """Heights and widths of the central part, int64 (B,)."""
        ratios = image_widths / image_heights
        heights = np.where(ratios < self.ratio[0], np.rint(image_widths / self.ratio[0]), image_heights)
        widths = np.where(ratios > self.ratio[1], np.rint(image_heights * self.ratio[1]), image_widths)
        return np.maximum(1, heights.astype(np.int64)), np.maximum(1, widths.astype(np.int64))


def _between(low: float, high: float, uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    return low + (high - low) * uniform


def _check_dtype(name: str, spec: ImageSpec) -> None:
    if spec.dtype not in (torch.uint8, torch.uint16):
        raise OptionError(
            f"{name}: images are {spec.dtype}, and it resizes uint8 and uint16 as they lie in the file. "
            f"Put it before what makes them {spec.dtype}."
        )
    if min(spec.height, spec.width) < 1:
        raise OptionError(f"{name}: images of {spec.height}x{spec.width} have no pixels to resize.")
