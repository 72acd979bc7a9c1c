# mypy: disable-error-code="import,untyped-decorator,no-untyped-def,assignment,misc,var-annotated"
# ruff: noqa: ANN001, ANN201, ANN202, RUF005  # all is a `tl.tensor`, or a tuple of them; Triton knows no (*a, b)
"""The parts of `triton_kernels.py`: the weights that it blends rows and columns by, and its colour steps.

The weights are Pillow's antialiased bilinear filter's. They are zero outside its support, so every run of taps
within the window that covers the support gives the same sum. Runs of ceil(2 * support) taps do: 2 where nothing
shrinks, 3 down to two thirds, 5 along x down to two fifths; beyond, weights along x are computed for each source row.

Colour steps are what `colour.py` does, in registers, with the same formulas and rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastload.transforms.engine.triton_bytes import LIFT, added, grouped

# The codes of colour.py; 0 leaves a pixel as it is, 1 is brightness.
CONTRAST = tl.constexpr(2)
SATURATION = tl.constexpr(3)
HUE = tl.constexpr(4)


@triton.jit
def first_tap(centre, zoom, window, TAPS: tl.constexpr):
    """Returns the first tap of rows or columns: of TAPS within the window, or of all that the filter covers."""
    if TAPS == 2:
        return tl.minimum(tl.maximum(centre - 0.5, 0.0).to(tl.int32), window - 2)
    first = tl.maximum(centre - tl.maximum(zoom, 1.0) + 0.5, 0.0).to(tl.int32)
    if TAPS == 3:
        first = tl.minimum(first, window - 3)
    return first


@triton.jit
def weights_of(centre, zoom, window, SCALE: tl.constexpr, TAPS: tl.constexpr):
    """Returns first tap and weights, times SCALE, of rows or columns, of TAPS taps within a window that has as many."""
    if TAPS == 2:
        # Nothing shrinks, the support is 1: clamping the centre does what normalizing the weights would.
        place = tl.minimum(tl.maximum(centre - 0.5, 0.0), (window - 1).to(tl.float32))
        first = tl.minimum(place.to(tl.int32), window - 2)
        second = (place - first.to(tl.float32)) * SCALE
        return first, (-second + SCALE, second)
    else:
        reach = tl.maximum(zoom, 1.0)
        first = tl.minimum(tl.maximum(centre - reach + 0.5, 0.0).to(tl.int32), window - TAPS)
        distance = first.to(tl.float32) + 0.5 - centre
        weights = ()
        for tap in tl.static_range(TAPS):
            weights = weights + (_triangle(distance + tap, 1.0 / reach),)
        total = weights[0]
        for tap in tl.static_range(1, TAPS):
            total += weights[tap]
        share = 1.0 / total * SCALE
        return first, [weight * share for weight in weights]


@triton.jit
def columns_of(centres, zoom, window, PIXELS: tl.constexpr, TAPS: tl.constexpr):
    """Returns the pixels' first taps, and for each tap blocks of weights; computed in the layout of the loads."""
    found = [weights_of(centre, zoom, window, LIFT, TAPS) for centre in centres]
    weights = ()
    for tap in tl.static_range(TAPS):
        weights = weights + (grouped([one[1][tap] for one in found], PIXELS),)
    return [one[0] for one in found], weights


@triton.jit
def support(centres, zoom, window, PIXELS: tl.constexpr):
    """Returns the pixels' first taps, their distances from the centres, the weights' scale, and how many taps."""
    taps = tl.minimum((2.0 * tl.maximum(zoom, 1.0)).to(tl.int32) + 2, window)
    firsts = [
        tl.minimum(tl.maximum(centre - tl.maximum(zoom, 1.0) + 0.5, 0.0).to(tl.int32), window - taps)
        for centre in centres
    ]
    distances = ()
    for at in tl.static_range(PIXELS):
        distances = distances + (firsts[at].to(tl.float32) + 0.5 - centres[at],)
    totals = [tl.zeros_like(centre) for centre in centres]
    for tap in range(taps):
        weights = [_triangle(distance + tap, 1.0 / tl.maximum(zoom, 1.0)) for distance in distances]
        totals = added(totals, weights, (1.0,))
    return firsts, grouped(distances, PIXELS), grouped([1.0 / total for total in totals], PIXELS), taps


@triton.jit
def _triangle(distance, inverse):
    return tl.maximum(1.0 - tl.abs(distance) * inverse, 0.0)


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
