"""Checks of what transforms are given, each with one clear error."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fastload.errors import OptionError


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
    sides = tuple(size) if isinstance(size, Sequence) else (size,)
    if len(sides) == 1:
        sides *= 2
    if len(sides) != 2 or not all(is_whole(side) and side > 0 for side in sides):
        raise OptionError(
            f"{name}(size={size!r}): a size is a positive whole number of pixels, or (height, width) of them."
        )
    return int(sides[0]), int(sides[1])


def ordered_pair(
    name: str, option: str, values: object, *, least: float, most: float = math.inf
) -> tuple[float, float]:
    """Two numbers, the smaller first, within bounds.

    Raises:
        OptionError: anything else.
    """
    bounds = f"from {least:g} to {most:g}" if math.isfinite(most) else f"above {least:g}"
    if not isinstance(values, (Sequence, np.ndarray)) or len(values) != 2 or not all(is_number(v) for v in values):
        raise OptionError(f"{name}({option}={values!r}): give (smallest, largest), two numbers {bounds}.")
    low, high = (float(value) for value in values)
    if not low <= high:
        raise OptionError(f"{name}({option}={values!r}): the larger number comes first. Write {option}={(high, low)}.")
    if not least < low or not high <= most or not math.isfinite(high):
        raise OptionError(f"{name}({option}={values!r}): both are numbers {bounds}, {least:g} not included.")
    return low, high


def is_number(value: object) -> bool:
    """Whether it is a number; True and False are none."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Whether it is a whole number; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
