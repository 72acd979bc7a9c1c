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
def coloured(values, ops, factors, sample, steps, mean, CHANNELS: tl.constexpr):
    """Returns values after all colour steps, and each pixel's gray level before the contrast step, 0 without one."""
    gray = tl.zeros_like(values)
    if CHANNELS == 1:
        for step in range(steps):
            op, factor = tl.load(ops + sample * steps + step), tl.load(factors + sample * steps + step)
            if (op > 0) & (op <= CONTRAST):
                if op == CONTRAST:
                    gray = values
                values = _blend(values, tl.where(op == CONTRAST, mean, 0.0), factor)
        return values, gray
    else:
        PIXELS: tl.constexpr = values.shape[0] * values.shape[1] // 4
        even, odd = tl.split(tl.reshape(values, [PIXELS, 2, 2]))
        red, blue = tl.split(even)
        green, _ = tl.split(odd)
        level = tl.zeros_like(red)
        for step in range(steps):
            op, factor = tl.load(ops + sample * steps + step), tl.load(factors + sample * steps + step)
            if op > 0:
                if op == HUE:
                    red, green, blue = _turned(red, green, blue, factor)
                else:
                    other = tl.floor(red * 0.2989 + green * 0.587 + blue * 0.114)
                    if op == CONTRAST:
                        level = other
                    other = tl.where(op == SATURATION, other, tl.where(op == CONTRAST, mean, 0.0))
                    red, green, blue = (
                        _blend(red, other, factor),
                        _blend(green, other, factor),
                        _blend(blue, other, factor),
                    )
        nothing = tl.zeros_like(red)
        values = tl.reshape(tl.join(tl.join(red, blue), tl.join(green, nothing)), values.shape)
        gray = tl.reshape(tl.join(tl.join(level, nothing), tl.join(nothing, nothing)), values.shape)
        return values, gray


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
