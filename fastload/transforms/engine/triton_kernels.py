# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator,no-untyped-def"
# ruff: noqa: ANN001, ANN201, ANN202  # pointers, numbers and blocks are all a `tl.tensor`, or None
"""The GPU code of `gpu.fused`: one Triton kernel, in a module of its own since only Triton's users can import it.

One program makes BLOCK_Y rows of BLOCK_X values of one sample. Its lanes run over the values of an output row as they
lie in memory, x * C + c, so that stores are whole. What depends on the column is computed once a program, what depends
on the row once a row. It walks down the rows of the resized image and keeps the source rows that it has blended along
x, since neighbours need the same ones: where images grow, each byte is read twice a program and not four times a value.

Weights of the antialiased filter are zero outside its support, so every run of taps within the window that covers the
support gives the same sum. Runs of ceil(2 * support) taps do: 2 where nothing shrinks, 3 down to two thirds.

Colour steps do what `colour.py` does, in registers, with the same formulas and rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The codes of colour.py; 0 leaves a pixel as it is, 1 is brightness.
CONTRAST = tl.constexpr(2)
SATURATION = tl.constexpr(3)
HUE = tl.constexpr(4)

# Added to a value in 0..255, it leaves the nearest whole number in the low bits: 1.5 * 2**23.
ROUNDER = tl.constexpr(12582912.0)
RAISED_BY = tl.constexpr(8388608.0)  # 2**23


# Compiled once, whatever the numbers and addresses of a batch are: what Triton would make of them is of no use here.
@triton.jit(
    do_not_specialize=("stride_n stride_y height width steps tiles_y tiles_x".split()),
    do_not_specialize_on_alignment=("source rows windows ops factors sums rectangles value scale shift output".split()),
)
def augment(
    source,  # uint8: the images
    rows,  # int64 (B,) or None: which image each sample is; VARIED: int64 (B, 3), as in `PlacedImages`
    windows,  # int32 (B, 10)
    ops,  # int32 (B, steps) or None
    factors,  # float32 (B, steps) or None
    sums,  # int64 (B,) or None: sum of the gray levels before the contrast step
    rectangles,  # int32 (B, 4) or None
    value,  # float32 (C,) or None
    scale,  # float32 (C,) or None: uint8 output
    shift,  # float32 (C,) or None
    output,  # (B, height, width, C), or None: only `sums` are made
    stride_n, stride_y, height, width, steps, tiles_y, tiles_x,
    STRIDE_X: tl.constexpr, STRIDE_C: tl.constexpr, CHANNELS: tl.constexpr,
    LANES: tl.constexpr,  # lanes a pixel: CHANNELS, or 4 where three channels get colour steps
    RESAMPLED: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr,
    VARIED: tl.constexpr = False,  # each image has strides of its own
):  # fmt: skip
    program = tl.program_id(0)
    sample = program // (tiles_y * tiles_x)
    tile_y = program // tiles_x % tiles_y
    lanes = (program % tiles_x) * BLOCK_X + tl.arange(0, BLOCK_X)[None, :]
    x, channel = lanes // LANES, lanes % LANES
    inside = x < width
    if LANES != CHANNELS:
        inside = inside & (channel < CHANNELS)
    # Lanes outside work on a neighbour's value and do not store it: so their loads need no mask.
    x, channel = tl.minimum(x, width - 1), tl.minimum(channel, CHANNELS - 1)
    window = windows + sample * 10
    window_height, window_width = tl.load(window + 2), tl.load(window + 3)
    image = sample.to(tl.int64)
    if VARIED:
        image, stride_y = tl.load(rows + sample * 3), tl.load(rows + sample * 3 + 1).to(tl.int32)
        # A pointer for each lane: what follows then adds nothing for the channel (STRIDE_C is 0).
        image += channel * tl.load(rows + sample * 3 + 2)
    elif rows is not None:
        image = tl.load(rows + sample)
    corner = source + image * stride_n + tl.load(window).to(tl.int64) * stride_y + tl.load(window + 1) * STRIDE_X
    column = tl.load(window + 7) + tl.where(tl.load(window + 9) != 0, width - 1 - x, x)
    count = tl.minimum(height - tile_y * BLOCK_Y, BLOCK_Y)
    if output is None:
        target = sums + sample
        contrasts = 0
        for step in range(steps):
            contrasts += (tl.load(ops + sample * steps + step) == CONTRAST).to(tl.int32)
        count = tl.where(contrasts > 0, count, 0)
    else:
        target = output + sample.to(tl.int64) * (height * width * CHANNELS)
        if LANES == CHANNELS:
            # The hint: neighbours are not known to be adjacent. Else stores become wide, in a layout other than
            # that of the loads, and every row goes through shared memory to change it.
            target += tl.max_contiguous(lanes, [1, 1])
        else:
            target += lanes // LANES * CHANNELS + lanes % LANES

    # Each call by itself: Triton 3.2 passes no tuples on, and one call in a loop takes other registers.
    if RESAMPLED:
        scaled_height, scaled_width = tl.load(window + 4), tl.load(window + 5)
        least = tl.minimum(window_height, window_width)
        kept = (window_height <= scaled_height) & (window_width <= scaled_width) & (least >= 2)
        near = (2 * window_height <= 3 * scaled_height) & (2 * window_width <= 3 * scaled_width) & (least >= 3)
        if kept:
            _paint(
                corner, column, x, channel, inside, sample, window, tile_y * BLOCK_Y, count, target, ops, factors, sums,
                rectangles, value, scale, shift, output, stride_y, height, width, steps,
                STRIDE_X, STRIDE_C, CHANNELS, BLOCK_X, 2,
            )  # fmt: skip
        elif near:
            _paint(
                corner, column, x, channel, inside, sample, window, tile_y * BLOCK_Y, count, target, ops, factors, sums,
                rectangles, value, scale, shift, output, stride_y, height, width, steps,
                STRIDE_X, STRIDE_C, CHANNELS, BLOCK_X, 3,
            )  # fmt: skip
        else:
            _paint(
                corner, column, x, channel, inside, sample, window, tile_y * BLOCK_Y, count, target, ops, factors, sums,
                rectangles, value, scale, shift, output, stride_y, height, width, steps,
                STRIDE_X, STRIDE_C, CHANNELS, BLOCK_X, 0,
            )  # fmt: skip
    else:
        _paint(
            corner, column, x, channel, inside, sample, window, tile_y * BLOCK_Y, count, target, ops, factors, sums,
            rectangles, value, scale, shift, output, stride_y, height, width, steps,
            STRIDE_X, STRIDE_C, CHANNELS, BLOCK_X, 1,
        )  # fmt: skip


@triton.jit
def _paint(
    corner,  # pointer to the window's first pixel, or (1, BLOCK_X): to the value of each lane's channel there
    column, x,  # (1, BLOCK_X): columns of the resized window and of the output
    channel, inside, sample, window, first_row, count, target,  # target: pointers into the first row, or to the sum
    ops, factors, sums, rectangles, value, scale, shift, output, stride_y, height, width, steps,
    STRIDE_X: tl.constexpr, STRIDE_C: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_X: tl.constexpr,
    TAPS: tl.constexpr,  # along each axis: 1 (nothing is resized), 2, 3, or 0 for as many as it takes
):  # fmt: skip
    """Makes the rows of one program, each through all its steps."""
    offset_y, flipped = tl.load(window + 6), tl.load(window + 8) != 0
    window_height, window_width = tl.load(window + 2), tl.load(window + 3)
    scaled_height, scaled_width = tl.load(window + 4), tl.load(window + 5)
    zoom_y, zoom_x = window_height / scaled_height, window_width / scaled_width
    if TAPS == 1:
        line = corner + (offset_y * stride_y + column * STRIDE_X + channel * STRIDE_C)
        ahead = _raised(line + first_row * stride_y)  # always one row under way
    elif TAPS == 0:
        first_x, distance_x, taps_x, total_x = _support(column, zoom_x, window_width, scaled_width)
        line = corner + (first_x * STRIDE_X + channel * STRIDE_C)
    else:
        first_x, left, middle, right = _taps(column, zoom_x, window_width, TAPS)
        line = corner + (first_x * STRIDE_X + channel * STRIDE_C)
        # Three values and not one three times: Triton (3.9) would not carry such names from row to row.
        upper = tl.zeros_like(left)
        inner = tl.zeros_like(left)
        lower = tl.zeros_like(left)
        unread = _taps(first_row + offset_y, zoom_y, window_height, TAPS)[0]

    mean = 0.0
    if output is not None and sums is not None:
        mean = tl.load(sums + sample) / (height * width)
    if rectangles is not None:
        box_top, box_left = tl.load(rectangles + sample * 4), tl.load(rectangles + sample * 4 + 1)
        box_bottom = box_top + tl.load(rectangles + sample * 4 + 2)
        in_box = (x >= box_left) & (x < box_left + tl.load(rectangles + sample * 4 + 3))
        fill = tl.load(value + channel)
    if scale is not None:
        factor, constant = tl.load(scale + channel), tl.load(shift + channel)
    total = tl.zeros([1, BLOCK_X], dtype=tl.int32)

    # Rows are taken as they follow each other in the source; turned upside down, they go out from the bottom up.
    first_out, step_out = tl.where(flipped, height - 1 - first_row, first_row), tl.where(flipped, -1, 1)
    for done in range(count):
        if TAPS == 1:
            values = ahead - RAISED_BY
            ahead = _raised(line + tl.minimum(first_row + done + 1, height - 1) * stride_y)
        elif TAPS == 0:
            centre_y = ((first_row + done + offset_y).to(tl.float32) + 0.5) * zoom_y
            values = _mean(
                line, distance_x, taps_x, total_x, zoom_x, centre_y, zoom_y, window_height, stride_y, STRIDE_X
            )
        else:
            first_y, top, centre, bottom = _taps(first_row + done + offset_y, zoom_y, window_height, TAPS)
            # `unread` counts inside: a number carried only as a bound of this loop is lost (Triton 3.6).
            for reading in range(first_y + TAPS - unread):  # noqa: B007
                upper, inner = inner, lower
                lower = _line(line + unread * stride_y, left, middle, right, STRIDE_X, TAPS)
                unread += 1
            if TAPS == 2:
                values = inner + (lower - inner) * centre
            else:
                values = upper * top + inner * centre + lower * bottom
        if TAPS != 1 and (ops is not None or scale is not None):
            values = (values + ROUNDER) - ROUNDER

        row = first_out + done * step_out
        if ops is not None:
            values, gray = coloured(values, ops, factors, sample, steps, mean, CHANNELS)
            if output is None:
                total += tl.where(inside, gray, 0.0).to(tl.int32)
        if rectangles is not None:
            values = tl.where(in_box & (row >= box_top) & (row < box_bottom), fill, values)
        if output is not None:
            address = target + row * (width * CHANNELS)
            if scale is not None:
                tl.store(address, (values * factor + constant).to(output.dtype.element_ty), mask=inside)
            else:
                tl.store(address, (values + ROUNDER).to(tl.int32, bitcast=True).to(tl.uint8), mask=inside)
    if output is None:
        tl.atomic_add(target, tl.sum(tl.sum(total, 1), 0).to(tl.int64))


@triton.jit
def _support(column, zoom_x, window_width, scaled_width):
    """Returns the first tap of columns, its distance from their centres, how many taps there are, and their weight."""
    taps_x = tl.minimum((2 * window_width + scaled_width - 1) // scaled_width + 1, window_width)
    centre_x, support_x = (column.to(tl.float32) + 0.5) * zoom_x, tl.maximum(zoom_x, 1.0)
    first_x = tl.minimum(tl.maximum(centre_x - support_x + 0.5, 0.0).to(tl.int32), window_width - taps_x)
    distance_x = first_x.to(tl.float32) + 0.5 - centre_x
    total_x = tl.zeros_like(distance_x)
    for tap in range(taps_x):
        total_x += _triangle(distance_x + tap, 1.0 / support_x)
    return first_x, distance_x, taps_x, total_x


@triton.jit
def _mean(line, distance_x, taps_x, total_x, zoom_x, centre_y, zoom_y, window_height, stride_y, STRIDE_X: tl.constexpr):
    """Returns an output row as the mean of all pixels that the filter's support covers."""
    support_x, support_y = tl.maximum(zoom_x, 1.0), tl.maximum(zoom_y, 1.0)
    first_y = tl.maximum(centre_y - support_y + 0.5, 0.0).to(tl.int32)
    last_y = tl.minimum((centre_y + support_y + 0.5).to(tl.int32), window_height)
    total_y = 0.0
    for tap_y in range(first_y, last_y):
        total_y += _triangle(tap_y + 0.5 - centre_y, 1.0 / support_y)
    values = tl.zeros_like(distance_x)
    for tap in range(taps_x):
        blended = tl.zeros_like(distance_x)
        for tap_y in range(first_y, last_y):
            weight = _triangle(tap_y + 0.5 - centre_y, 1.0 / support_y)
            blended += _level(line + (tap_y * stride_y + tap * STRIDE_X)) * weight
        values += blended * _triangle(distance_x + tap, 1.0 / support_x)
    return values * (1.0 / (total_x * total_y))


@triton.jit
def _taps(position, zoom, window, TAPS: tl.constexpr):
    """Returns first tap and weights of a row or column, of 2 or 3 taps within a window that has as many."""
    centre = (position.to(tl.float32) + 0.5) * zoom
    if TAPS == 2:
        # Nothing shrinks, the support is 1: clamping the centre does what normalizing the weights would.
        place = tl.minimum(tl.maximum(centre - 0.5, 0.0), (window - 1).to(tl.float32))
        first = tl.minimum(place.to(tl.int32), window - 2)
        second = place - first.to(tl.float32)
        return first, 1.0 - second, second, second
    else:
        support = tl.maximum(zoom, 1.0)
        first = tl.minimum(tl.maximum(centre - support + 0.5, 0.0).to(tl.int32), window - 3)
        distance = first.to(tl.float32) + 0.5 - centre
        a = _triangle(distance, 1.0 / support)
        b = _triangle(distance + 1.0, 1.0 / support)
        c = _triangle(distance + 2.0, 1.0 / support)
        share = 1.0 / (a + b + c)
        return first, a * share, b * share, c * share


@triton.jit
def _triangle(distance, inverse):
    return tl.maximum(1.0 - tl.abs(distance) * inverse, 0.0)


@triton.jit
def _level(pointer):
    return _raised(pointer) - RAISED_BY


@triton.jit
def _raised(pointer):
    # The bits of RAISED_BY + level. Triton 3.6 makes a plain conversion one from 16 bits, at a quarter of the rate.
    return (tl.load(pointer).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _line(first, a, b, c, STRIDE_X: tl.constexpr, TAPS: tl.constexpr):
    """Returns a row of the source blended along x, from pointers to the first taps and their weights."""
    if TAPS == 2:
        line = _raised(first)
        return line - RAISED_BY + (_raised(first + STRIDE_X) - line) * b
    else:
        return _level(first) * a + _level(first + STRIDE_X) * b + _level(first + 2 * STRIDE_X) * c


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
