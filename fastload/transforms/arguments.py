"""Checks of what transforms are given, each with one clear error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastload.errors import OptionError
from fastload.transforms.spec import ImageSpec


def probability(name: str, p: object) -> float:
    """p as a float.

    Raises:
        OptionError: it is not a number from 0 to 1.
    """
    if not is_number(p) or not 0 <= p <= 1:  # type: ignore[operator]  # is_number has just said that it compares
        raise OptionError(f"{name}(p={p!r}): p is a probability, so give a number from 0 to 1.")
    return float(p)  # type: ignore[arg-type]


def window_size(name: str, size: int | Sequence[int]) -> tuple[int, int]:
    """(height, width) of a size given as such, or as one number for a square.

    Raises:
        OptionError: not one or two positive whole numbers.
    """
    size = as_plain(size)
    sides = tuple(size) if isinstance(size, Sequence) else (size,)
    if len(sides) == 1:
        sides *= 2
    if len(sides) != 2 or not all(is_whole(side) and side > 0 for side in sides):
        raise OptionError(
            f"{name}(size={size!r}): a size is a positive whole number of pixels, or (height, width) of them."
        )
    return int(sides[0]), int(sides[1])


def ordered_pair(name: str, option: str, values: Any, *, least: float, most: float = math.inf) -> tuple[float, float]:
    """Two numbers, the smaller first, within bounds.

    Raises:
        OptionError: anything else.
    """
    bounds = f"from {least:g} to {most:g}" if math.isfinite(most) else f"above {least:g}"
    values = as_plain(values)
    pair = isinstance(values, Sequence) and len(values) == 2 and all(is_number(value) for value in values)
    if not pair or not all(math.isfinite(value) for value in values):
        raise OptionError(f"{name}({option}={values!r}): give (smallest, largest), two numbers {bounds}.")
    low, high = (float(value) for value in values)
    if not low <= high:
        raise OptionError(f"{name}({option}={values!r}): the larger number comes first. Write {option}={(high, low)}.")
    if not least < low or not high <= most:
        raise OptionError(f"{name}({option}={values!r}): both are numbers {bounds}, {least:g} not included.")
    return low, high


def as_values(where: str, values: Any) -> tuple[float, ...]:
    """One number, or one a channel, as floats. Raises OptionError, beginning with `where`, for anything else."""
    values = as_plain(values)
    numbers = tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else (values,)
    if not numbers or not all(is_number(number) and math.isfinite(number) for number in numbers):
        raise OptionError(f"{where}={values!r}): give one number, or one a channel.")
    return tuple(float(number) for number in numbers)


def check_values(where: str, values: tuple[float, ...], spec: ImageSpec) -> None:
    """Raises OptionError, beginning with `where`, unless pixels of such images can hold the values."""
    if len(values) not in (1, spec.channels):
        raise OptionError(
            f"{where}={values}): {len(values)} values for images of {spec.channels} channels. "
            f"Give one value, or one a channel."
        )
    if spec.dtype.is_floating_point:
        return
    limits = torch.iinfo(spec.dtype)
    if any(not limits.min <= value <= limits.max or value != int(value) for value in values):
        raise OptionError(
            f"{where}={values}): the images are {spec.dtype}, so it is a whole number from {limits.min} to "
            f"{limits.max}. Give it in the images' units, for example 255 * mean."
        )


def as_plain(values: Any) -> Any:
    """NumPy's and torch's arrays as numbers and lists; anything else as it is."""
    return values.tolist() if isinstance(values, (np.ndarray, np.generic, torch.Tensor)) else values


def is_number(value: object) -> bool:
    """Whether it is a number; True and False are none."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Whether it is a whole number; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
