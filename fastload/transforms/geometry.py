"""Transforms that move pixels: flip and crops, drawn per sample, the same for images and masks.

Parameters are torchvision's (v2). Values are moved, never mixed, so each takes any dtype and masks as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np
import torch

from fastload.errors import OptionError
from fastload.transforms.buffers import OutputPool
from fastload.transforms.draws import Draws
from fastload.transforms.spec import ImageSpec, as_bits
from fastload.transforms.windows import PaddingMode, crop, empty_like, flip


class RandomHorizontalFlip:
    """Mirrors each image left to right with probability p.

    Args:
        p: probability, 0 to 1.

    Raises:
        OptionError: p is not within [0, 1].
    """

    geometric = True

    def __init__(self, p: float = 0.5) -> None:
        if not (_is_number(p) and 0 <= p <= 1):
            raise OptionError(f"RandomHorizontalFlip(p={p!r}): p is a probability, so give a number from 0 to 1.")
        self.p = float(p)
        self._pool, self._mask_pool = OutputPool(), OutputPool()

    def __repr__(self) -> str:
        return f"RandomHorizontalFlip(p={self.p})"

    def output(self, spec: ImageSpec) -> ImageSpec:
        return spec

    def apply(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Images (B, C, H, W) of any dtype, some mirrored; channels_last memory, never the input's."""
        ImageSpec.of(images)
        return flip(images, draws.uniform() < self.p, self._pool)

    def apply_masks(self, masks: torch.Tensor, draws: Draws, fill: int) -> torch.Tensor:
        """Masks (B, H, W), mirrored where `apply` mirrors the image."""
        return flip(masks[:, None], draws.uniform() < self.p, self._mask_pool)[:, 0]


class RandomCrop:
    """Cuts a window of a fixed size at a random place of each image, after padding if asked for.

    Args:
        size: of the window, (height, width); one number: a square.
        padding: pixels added before cropping: one number for all sides, (left and right, top and bottom), or
            (left, top, right, bottom).
        pad_if_needed: pad an image that is smaller than the window, on both sides by what is missing.
        fill: value of constant padding, for every channel or one a channel, in the images' own units (0..255).
        padding_mode: "constant", "edge" (repeat the last pixel), "reflect" (mirror without repeating it) or
            "symmetric" (mirror and repeat it).

    Raises:
        OptionError: a size, padding or mode that has no meaning. Whether images are large enough shows when the
            loader is made, or at `apply`.
    """

    geometric = True

    def __init__(
        self,
        size: int | Sequence[int],
        padding: int | Sequence[int] | None = None,
        pad_if_needed: bool = False,
        fill: float | Sequence[float] = 0,
        padding_mode: PaddingMode = "constant",
    ) -> None:
        self.size = _window_size("RandomCrop", size)
        self.padding = _sides(padding)
        self.pad_if_needed = bool(pad_if_needed)
        self.fill = tuple(float(value) for value in (fill if isinstance(fill, Sequence) else (fill,)))
        if padding_mode not in get_args(PaddingMode):
            modes = ", ".join(repr(mode) for mode in get_args(PaddingMode))
            raise OptionError(f"RandomCrop(padding_mode={padding_mode!r}): no such mode. Choose one of {modes}.")
        self.padding_mode = padding_mode
        self._pool, self._mask_pool = OutputPool(), OutputPool()

    def __repr__(self) -> str:
        return (
            f"RandomCrop(size={self.size}, padding={self.padding}, pad_if_needed={self.pad_if_needed}, "
            f"fill={self.fill}, padding_mode={self.padding_mode!r})"
        )

    def output(self, spec: ImageSpec) -> ImageSpec:
        left, top, right, bottom = self._padding(spec.height, spec.width)
        if spec.height + top + bottom < self.size[0] or spec.width + left + right < self.size[1]:
            padded = "with their padding " if any(self.padding) else ""
            raise OptionError(
                f"RandomCrop(size={self.size}): images of {spec.height}x{spec.width} (height x width) are {padded}"
                f"smaller than the window. Choose a smaller size, pass pad_if_needed=True, or pack larger images."
            )
        # Mirroring has only the image itself to show; "reflect" cannot use its first pixel again.
        limits = {"reflect": 1, "symmetric": 0}
        if self.padding_mode in limits:
            most_high, most_wide = spec.height - limits[self.padding_mode], spec.width - limits[self.padding_mode]
            if max(top, bottom) > most_high or max(left, right) > most_wide:
                raise OptionError(
                    f"RandomCrop(padding_mode={self.padding_mode!r}): images of {spec.height}x{spec.width} can be "
                    f"mirrored by at most {most_high} rows and {most_wide} columns, the padding is "
                    f"(left, top, right, bottom) = {(left, top, right, bottom)}. Pad less, or use 'edge'."
                )
        if self.padding_mode == "constant" and (any(self.padding) or self.pad_if_needed):
            self._check_fill(spec)
        return spec._replace(height=self.size[0], width=self.size[1])

    def apply(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Windows (B, C, height, width) of images of any dtype; channels_last memory, never the input's."""
        self.output(ImageSpec.of(images))
        fill = torch.tensor(self.fill, dtype=torch.float64).to(images.dtype).expand(images.shape[1])
        return self._cut(images, draws, fill, self._pool)

    def apply_masks(self, masks: torch.Tensor, draws: Draws, fill: int) -> torch.Tensor:
        """Windows (B, height, width) of masks, at the places where `apply` cuts the images."""
        value = torch.tensor([fill], dtype=masks.dtype)
        return self._cut(masks[:, None], draws, value, self._mask_pool)[:, 0]

    def _cut(self, images: torch.Tensor, draws: Draws, fill: torch.Tensor, pool: OutputPool) -> torch.Tensor:
        height, width = images.shape[2:]
        left, top, right, bottom = self._padding(height, width)
        tops = draws.stream(0).integers(0, height + top + bottom - self.size[0] + 1) - top
        lefts = draws.stream(1).integers(0, width + left + right - self.size[1] + 1) - left
        padding_mode = self.padding_mode if left or top or right or bottom else None
        return crop(images, tops, lefts, self.size, padding_mode, fill, pool)

    def _padding(self, height: int, width: int) -> tuple[int, int, int, int]:
        left, top, right, bottom = self.padding
        if self.pad_if_needed:
            # As torchvision does it: both sides by all that is missing, so every place in between can be drawn.
            missing_high = max(0, self.size[0] - (height + top + bottom))
            missing_wide = max(0, self.size[1] - (width + left + right))
            return left + missing_wide, top + missing_high, right + missing_wide, bottom + missing_high
        return left, top, right, bottom

    def _check_fill(self, spec: ImageSpec) -> None:
        if len(self.fill) not in (1, spec.channels):
            raise OptionError(
                f"RandomCrop(fill={self.fill}): {len(self.fill)} values for images of {spec.channels} channels. "
                f"Give one value, or one a channel."
            )
        if not spec.dtype.is_floating_point:
            limits = torch.iinfo(spec.dtype)
            if any(not limits.min <= value <= limits.max or value != int(value) for value in self.fill):
                raise OptionError(
                    f"RandomCrop(fill={self.fill}): the images are {spec.dtype}, so a fill is a whole number from "
                    f"{limits.min} to {limits.max}. Give it in the images' units, for example 255 * mean."
                )


class CenterCrop:
    """Cuts a window of a fixed size out of the middle of each image.

    Args:
        size: of the window, (height, width); one number: a square.

    Raises:
        OptionError: a size that has no meaning. Whether images are large enough shows when the loader is made, or at
            `apply`; smaller images are not padded.
    """

    geometric = True

    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = _window_size("CenterCrop", size)
        self._pool, self._mask_pool = OutputPool(), OutputPool()

    def __repr__(self) -> str:
        return f"CenterCrop(size={self.size})"

    def output(self, spec: ImageSpec) -> ImageSpec:
        if spec.height < self.size[0] or spec.width < self.size[1]:
            raise OptionError(
                f"CenterCrop(size={self.size}): images of {spec.height}x{spec.width} (height x width) are smaller than "
                f"the window. Choose a smaller size, or pack larger images with --size."
            )
        return spec._replace(height=self.size[0], width=self.size[1])

    def apply(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Windows (B, C, height, width) of images of any dtype; channels_last memory, never the input's."""
        self.output(ImageSpec.of(images))
        return self._cut(images, self._pool)

    def apply_masks(self, masks: torch.Tensor, draws: Draws, fill: int) -> torch.Tensor:
        """Windows (B, height, width) of masks."""
        return self._cut(masks[:, None], self._mask_pool)[:, 0]

    def _cut(self, images: torch.Tensor, pool: OutputPool) -> torch.Tensor:
        # round() and not //: torchvision's choice for an odd remainder (half to even).
        top, left = (round((images.shape[2 + axis] - self.size[axis]) / 2.0) for axis in (0, 1))
        window = images[:, :, top : top + self.size[0], left : left + self.size[1]]
        if images.device.type != "cpu":
            return window.clone(memory_format=torch.channels_last)
        output = empty_like(window, pool)
        as_bits(output).numpy()[...] = as_bits(window).numpy()
        return output


def _window_size(name: str, size: int | Sequence[int]) -> tuple[int, int]:
    sides = tuple(size) if isinstance(size, Sequence) else (size,)
    if len(sides) == 1:
        sides *= 2
    if len(sides) != 2 or not all(_is_whole(side) and side > 0 for side in sides):
        raise OptionError(
            f"{name}(size={size!r}): a size is a positive whole number of pixels, or (height, width) of them."
        )
    return int(sides[0]), int(sides[1])


def _sides(padding: int | Sequence[int] | None) -> tuple[int, int, int, int]:
    sides = tuple(padding) if isinstance(padding, Sequence) else (0 if padding is None else padding,)
    if len(sides) not in (1, 2, 4) or not all(_is_whole(side) and side >= 0 for side in sides):
        raise OptionError(
            f"RandomCrop(padding={padding!r}): padding is a whole number of pixels, (left and right, top and bottom), "
            f"or (left, top, right, bottom); none is negative."
        )
    left, top, right, bottom = (int(side) for side in sides * (4 // len(sides)))
    return left, top, right, bottom


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number)


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer)
