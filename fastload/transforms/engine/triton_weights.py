# mypy: disable-error-code="import,untyped-decorator,no-untyped-def,assignment,misc,var-annotated"
# ruff: noqa: ANN001, ANN201, ANN202, RUF005  # all is a `tl.tensor`, or a tuple of them; Triton knows no (*a, b)
"""The weights that `triton_kernels.py` blends rows and columns by: those of Pillow's antialiased bilinear filter.

They are zero outside its support, so every run of taps within the window that covers the support gives the same sum.
Runs of ceil(2 * support) taps do: 2 where nothing shrinks, 3 down to two thirds, 5 along x down to two fifths; beyond,
weights along x are computed for each source row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastload.transforms.engine.triton_bytes import LIFT, added, grouped


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
