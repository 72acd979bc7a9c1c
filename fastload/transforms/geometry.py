"""Transforms that move pixels without mixing them: flips and crops, drawn per sample.

Parameters are torchvision's (v2). Each takes any dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np

from fastload.errors import OptionError
from fastload.transforms.arguments import as_plain, as_values, check_values, is_whole, probability, window_size
from fastload.transforms.draws import Draws
from fastload.transforms.placed import PlacedTransform
from fastload.transforms.placement import PaddingMode, Placement, Whole, turned, windows
from fastload.transforms.spec import ImageSpec


class RandomHorizontalFlip(PlacedTransform):
    """Mirrors each image left to right with probability p.

    Args:
        p: probability, 0 to 1.

    Raises:
        OptionError: p is not within [0, 1].
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = probability("RandomHorizontalFlip", p)

    def __repr__(self) -> str:
        return f"RandomHorizontalFlip(p={self.p})"

    def output(self, spec: ImageSpec) -> ImageSpec:
        return spec

    def place(self, spec: ImageSpec, draws: Draws) -> Placement:
        return turned((spec.height, spec.width), mirrored=draws.uniform() < self.p)


class RandomVerticalFlip(PlacedTransform):
    """Turns each image upside down with probability p.

    Args:
        p: probability, 0 to 1.

    Raises:
        OptionError: p is not within [0, 1].
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = probability("RandomVerticalFlip", p)

    def __repr__(self) -> str:
        return f"RandomVerticalFlip(p={self.p})"

    def output(self, spec: ImageSpec) -> ImageSpec:
        return spec

    def place(self, spec: ImageSpec, draws: Draws) -> Placement:
        return turned((spec.height, spec.width), flipped=draws.uniform() < self.p)


class RandomCrop(PlacedTransform):
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

    def __init__(
        self,
        size: int | Sequence[int],
        padding: int | Sequence[int] | None = None,
        pad_if_needed: bool = False,
        fill: float | Sequence[float] = 0,
        padding_mode: PaddingMode = "constant",
    ) -> None:
        super().__init__()
        self.size = window_size("RandomCrop", size)
        self.padding = _sides(padding)
        self.pad_if_needed = bool(pad_if_needed)
        self.fill = as_values("RandomCrop(fill", fill)
        if padding_mode not in get_args(PaddingMode):
            modes = ", ".join(repr(mode) for mode in get_args(PaddingMode))
            raise OptionError(f"RandomCrop(padding_mode={padding_mode!r}): no such mode. Choose one of {modes}.")
        self.padding_mode = padding_mode

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
            check_values("RandomCrop(fill", self.fill, spec)
        return spec._replace(height=self.size[0], width=self.size[1])

    def pads(self, spec: ImageSpec) -> bool:
        return any(self._padding(spec.height, spec.width))

    def place(self, spec: ImageSpec, draws: Draws) -> Placement:
        left, top, right, bottom = self._padding(spec.height, spec.width)
        tops, lefts = self.corners(spec.height + top + bottom, spec.width + left + right, draws)
        tops, lefts = tops - top, lefts - left
        padding = self.padding_mode if self.pads(spec) else None
        return windows(tops, lefts, self.size, padding=padding, fill=self.fill)

    def corners(self, heights: int | Whole, widths: int | Whole, draws: Draws) -> tuple[Whole, Whole]:
        """First row and column of each sample's window, int64 (B,), in images (padded ones with their padding)."""
        tops = draws.stream(0).integers(0, heights - self.size[0] + 1)
        lefts = draws.stream(1).integers(0, widths - self.size[1] + 1)
        return tops, lefts

    def _padding(self, height: int, width: int) -> tuple[int, int, int, int]:
        left, top, right, bottom = self.padding
        if self.pad_if_needed:
            # As torchvision does it: both sides by all that is missing, so every place in between can be drawn.
            missing_high = max(0, self.size[0] - (height + top + bottom))
            missing_wide = max(0, self.size[1] - (width + left + right))
            return left + missing_wide, top + missing_high, right + missing_wide, bottom + missing_high
        return left, top, right, bottom


class CenterCrop(PlacedTransform):
    """Cuts a window of a fixed size out of the middle of each image.

    Args:
        size: of the window, (height, width); one number: a square.

    Raises:
        OptionError: a size that has no meaning. Whether images are large enough shows when the loader is made, or at
            `apply`; smaller images are not padded.
    """

    def __init__(self, size: int | Sequence[int]) -> None:
        super().__init__()
        self.size = window_size("CenterCrop", size)

    def __repr__(self) -> str:
        return f"CenterCrop(size={self.size})"

    def output(self, spec: ImageSpec) -> ImageSpec:
        if spec.height < self.size[0] or spec.width < self.size[1]:
            raise OptionError(
                f"CenterCrop(size={self.size}): images of {spec.height}x{spec.width} (height x width) are smaller than "
                f"the window. Choose a smaller size, or pack larger images with --size."
            )
        return spec._replace(height=self.size[0], width=self.size[1])

    def place(self, spec: ImageSpec, draws: Draws) -> Placement:
        zeros = np.zeros(len(draws), np.int64)
        tops, lefts = self.corners(zeros + spec.height, zeros + spec.width)
        return windows(tops, lefts, self.size)

    def corners(self, heights: Whole, widths: Whole) -> tuple[Whole, Whole]:
        """First row and column of each sample's window, int64 (B,), in images of these sizes."""
        # Rounded and not //: torchvision's choice for an odd remainder (half to even).
        tops, lefts = np.rint((heights - self.size[0]) / 2), np.rint((widths - self.size[1]) / 2)
        return tops.astype(np.int64), lefts.astype(np.int64)


def _sides(padding: int | Sequence[int] | None) -> tuple[int, int, int, int]:
    padding = as_plain(padding)
    sides = tuple(padding) if isinstance(padding, Sequence) else (0 if padding is None else padding,)
    if len(sides) not in (1, 2, 4) or not all(is_whole(side) and side >= 0 for side in sides):
        raise OptionError(
            f"RandomCrop(padding={padding!r}): padding is a whole number of pixels, (left and right, top and bottom), "
            f"or (left, top, right, bottom); none is negative."
        )
    left, top, right, bottom = (int(side) for side in sides * (4 // len(sides)))
    return left, top, right, bottom
