"""The crop that brings images to one size: of loaders under test, and the same done sample by sample for plain ways."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fastload.inputs import Input, PackedInput
from fastload.transforms import RandomResizedCrop

SIZE = 224
"""Of files whose images differ in size, when nobody says another."""

_SCALE = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
_ATTEMPTS = 10

Window = tuple[int, int, int, int]
"""(top, left, height, width)."""


def crop_for(data: Input, size: int | Sequence[int] | None) -> RandomResizedCrop | None:
    """The crop for these data: of the size asked for, else of 224 where images differ in size; None: no crop.

    Raises:
        OptionError: a size that has no meaning.
    """
    if size is None and isinstance(data, PackedInput) and data.varied:
        size = SIZE
    return None if size is None else RandomResizedCrop(size)


def crop_call(crop: RandomResizedCrop) -> str:
    """As Python writes it: `RandomResizedCrop(224)`."""
    height, width = crop.size
    return f"RandomResizedCrop({height if height == width else (height, width)})"


def crop_words(crop: RandomResizedCrop, size: int | Sequence[int] | None) -> str:
    """What is done to the images; and why, unless its size was asked for."""
    why = "" if size is not None else ", since these images differ in size (--size for another one)"
    return f"{crop_call(crop)} makes them {crop.size[0]} x {crop.size[1]}{why}"


class CropSample:
    """Cuts and resizes the image of one sample, as a plain script's transform does; for worker processes.

    Args:
        size: (height, width) of what comes out.
        more: called with the sample then, if anything.
    """

    def __init__(self, size: tuple[int, int], more: Any = None) -> None:
        self._size, self._more = size, more

    def __call__(self, sample: tuple[Any, ...]) -> tuple[Any, ...]:
        image, *others = sample  # (C, H, W)
        top, left, height, width = random_window(*image.shape[1:])
        part = image[None, :, top : top + height, left : left + width]
        part = part if part.dtype == torch.uint8 else part.to(torch.float32)
        made = torch.nn.functional.interpolate(part, self._size, mode="bilinear", antialias=True)
        if made.dtype != image.dtype:
            made = made.round().to(image.dtype)
        cut = (made[0], *others)
        return cut if self._more is None else self._more(cut)


def random_window(height: int, width: int) -> Window:
    """A window as `RandomResizedCrop` draws it, from torch's generator."""
    for _ in range(_ATTEMPTS):
        area, log_ratio, down, right = torch.rand(4).tolist()
        area = height * width * (_SCALE[0] + area * (_SCALE[1] - _SCALE[0]))
        low, high = map(math.log, _RATIO)
        ratio = math.exp(low + log_ratio * (high - low))
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            return int(down * (height - tall + 1)), int(right * (width - wide + 1)), tall, wide
    # Such proportions do not fit: the largest middle part with the nearest ones that do.
    tall = min(height, max(1, round(width / _RATIO[0])))
    wide = min(width, max(1, round(height * _RATIO[1])))
    return (height - tall) // 2, (width - wide) // 2, tall, wide
