# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator,no-untyped-def"
# ruff: noqa: ANN001, ANN201, ANN202  # pointers, numbers and blocks are all a `tl.tensor`, or None
"""The colour steps of `triton_kernels.py`: what `colour.py` does, in registers, with the same formulas and rounding."""

from __future__ import annotations

import triton
import triton.language as tl

# The codes of colour.py; 0 leaves a pixel as it is, 1 is brightness.
CONTRAST = tl.constexpr(2)
SATURATION = tl.constexpr(3)
HUE = tl.constexpr(4)


@triton.jit
def coloured(values, ops, factors, steps, mean):
    """Returns a block for each channel after a sample's colour steps, and the gray levels before contrast."""
    level = tl.zeros_like(values[0])
    for step in range(steps):
        op, factor = tl.load(ops + step), tl.load(factors + step)
        if len(values) == 1:
            if (op > 0) & (op <= CONTRAST):
                if op == CONTRAST:
                    level = values[0]
                values = (_blend(values[0], tl.where(op == CONTRAST, mean, 0.0), factor),)
        else:
            red, green, blue = values
            if op == HUE:
                values = _turned(red, green, blue, factor)
            elif op > 0:
                other = tl.floor(red * 0.2989 + green * 0.587 + blue * 0.114)
                if op == CONTRAST:
                    level = other
                other = tl.where(op == SATURATION, other, tl.where(op == CONTRAST, mean, 0.0))
                values = _blend(red, other, factor), _blend(green, other, factor), _blend(blue, other, factor)
    return values, level


@triton.jit
def _blend(level, other, factor):
    return tl.floor(tl.minimum(tl.maximum(level * factor + other * (1.0 - factor), 0.0), 255.0))


@triton.jit
def _turned(red, green, blue, turns):
    """Returns colours with their hue turned by parts of a full turn, as `colour.py` does it."""
    largest = tl.maximum(tl.maximum(red, green), blue)
    chroma = largest - tl.minimum(tl.minimum(red, green), blue)
    divisor = tl.maximum(chroma, 1.0)
    of_green_or_blue = tl.where(largest == green, 2.0 + (blue - red) / divisor, 4.0 + (red - green) / divisor)
    hue = tl.where(largest == red, (green - blue) / divisor, of_green_or_blue) + 6.0 * turns
    return (
        _channel(hue + 5.0, largest, chroma),
        _channel(hue + 3.0, largest, chroma),
        _channel(hue + 1.0, largest, chroma),
    )


@triton.jit
def _channel(hue, largest, chroma):
    distance = hue - 6.0 * tl.floor(hue / 6.0)
    missing = tl.minimum(tl.maximum(tl.minimum(distance, 4.0 - distance), 0.0), 1.0)
    level = (largest - chroma * missing) * (255.999 / 255)
    return tl.floor(tl.minimum(tl.maximum(level, 0.0), 255.0))
