# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator,no-untyped-def"
# ruff: noqa: ANN001, ANN201, ANN202  # pointers, numbers and blocks are all a `tl.tensor`, or None
"""The GPU code of `gpu.fused`, in a module of its own since only Triton's users can import it.

One program of `augment` makes BLOCK_Y rows of BLOCK_X values of one sample. Its lanes run over the values of an output
row as they lie in memory, x * C + c, so that stores are whole. What depends on the column is computed once a program,
what depends on the row once a row. It walks down the rows of the source, blends each along x once, and keeps what
several output rows need: where images grow, each byte is read twice a program and not four times a value.

Weights of the antialiased filter are zero outside its support, so every run of taps within the window that covers the
support gives the same sum. Runs of ceil(2 * support) taps do: 2 where nothing shrinks, 3 down to two thirds, 5 along x
down to two fifths; beyond, weights along x are computed for each source row. There, the filter of an output row ends at
the centres of its neighbours: a source row is added to the two output rows that it lies between, and then forgotten.

Crops whose pixels lie dense are read 4 bytes at a time, unless they are mirrored, and stored 4 values at a time.

Colour steps are in `triton_colour.py`, what reads bytes as numbers, and copies them, in `triton_bytes.py`.
`benchmarks/kernel_code.py` counts the instructions that a change costs or saves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastload.transforms.engine.triton_bytes import LIFT, LOWER, bits, levels, words
from fastload.transforms.engine.triton_colour import CONTRAST, coloured

# Added to a value in 0..255, it leaves the nearest whole number in the low bits: 1.5 * 2**23.
ROUNDER = tl.constexpr(12582912.0)


# Compiled once, whatever the numbers and addresses of a batch are: what Triton would make of them is of no use here.
@triton.jit(
    do_not_specialize=("stride_n stride_y image_height image_width height width steps tiles_y tiles_x".split()),
    do_not_specialize_on_alignment=(
        "source rows windows ops factors sums rectangles value scale shift output outside".split()
    ),
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
    outside,  # float32 (C,) or None: levels where windows leave their images
    stride_n, stride_y, image_height, image_width, height, width, steps, tiles_y, tiles_x,
    STRIDE_X: tl.constexpr, STRIDE_C: tl.constexpr, CHANNELS: tl.constexpr,
    LANES: tl.constexpr,  # lanes a pixel: CHANNELS, or 4 where three channels get colour steps
    FULL: tl.constexpr,  # whether an output row has BLOCK_X lanes, or more
    WORDS: tl.constexpr,  # 4, or 1: rows a multiple of so many bytes apart are read 4 bytes at a time; 0: they are not
    PADDING: tl.constexpr,  # a PaddingMode where windows may leave their images (only of those not resampled), or None
    RESAMPLED: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr,
    VARIED: tl.constexpr = False,  # each image has strides of its own
):  # fmt: skip
    program = tl.program_id(0)
    sample = program // (tiles_y * tiles_x)
    first_row = program // tiles_x % tiles_y * BLOCK_Y
    first_lane = program % tiles_x * BLOCK_X
    count = tl.minimum(height - first_row, BLOCK_Y)
    image = sample.to(tl.int64)
    stride_c = STRIDE_C
    if VARIED:
        image = tl.load(rows + sample * 3)
        stride_y, stride_c = tl.load(rows + sample * 3 + 1).to(tl.int32), tl.load(rows + sample * 3 + 2).to(tl.int32)
    elif rows is not None:
        image = tl.load(rows + sample)
    image = source + image * stride_n
    if output is None:
        contrasts = 0
        for step in range(steps):
            contrasts += (tl.load(ops + sample * steps + step) == CONTRAST).to(tl.int32)
        count = tl.where(contrasts > 0, count, 0)

    # Each call by itself: Triton 3.2 passes no tuples on, and one call in a loop takes other registers.
    if RESAMPLED:
        window = windows + sample * 10
        window_height, window_width = tl.load(window + 2), tl.load(window + 3)
        scaled_height, scaled_width = tl.load(window + 4), tl.load(window + 5)
        least = tl.minimum(window_height, window_width)
        kept = (window_height <= scaled_height) & (window_width <= scaled_width) & (least >= 2)
        near = (2 * window_height <= 3 * scaled_height) & (2 * window_width <= 3 * scaled_width) & (least >= 3)
        # What shrinks most takes most registers a value, and is made in halves.
        HALF: tl.constexpr = BLOCK_X // 2
        halves = tl.minimum((width * LANES - first_lane + HALF - 1) // HALF, 2)
        if kept:
            _paint(
                image, windows, ops, factors, sums, rectangles, value, scale, shift, output, outside,
                sample, first_row, count, first_lane, stride_y, stride_c, image_height, image_width, height, width,
                steps, STRIDE_X, CHANNELS, LANES, FULL, 0, None, BLOCK_X, 2,
            )  # fmt: skip
        elif near:
            _paint(
                image, windows, ops, factors, sums, rectangles, value, scale, shift, output, outside,
                sample, first_row, count, first_lane, stride_y, stride_c, image_height, image_width, height, width,
                steps, STRIDE_X, CHANNELS, LANES, FULL, 0, None, BLOCK_X, 3,
            )  # fmt: skip
        elif (2 * window_width <= 5 * scaled_width) & (window_width >= 5):
            _paint(
                image, windows, ops, factors, sums, rectangles, value, scale, shift, output, outside,
                sample, first_row, count, first_lane, stride_y, stride_c, image_height, image_width, height, width,
                steps, STRIDE_X, CHANNELS, LANES, FULL, 0, None, BLOCK_X, 5,
            )  # fmt: skip
        else:
            for half in range(halves):
                _paint(
                    image, windows, ops, factors, sums, rectangles, value, scale, shift, output, outside,
                    sample, first_row, count, first_lane + half * HALF, stride_y, stride_c, image_height, image_width,
                    height, width, steps, STRIDE_X, CHANNELS, LANES, FULL, 0, None, HALF, 0,
                )  # fmt: skip
    elif WORDS:
        if tl.load(windows + sample * 10 + 9) == 0:
            _paint(
                image, windows, ops, factors, sums, rectangles, value, scale, shift, output, outside,
                sample, first_row, count, first_lane, stride_y, stride_c, image_height, image_width, height, width,
                steps, STRIDE_X, CHANNELS, LANES, FULL, WORDS, PADDING, BLOCK_X, 1,
            )  # fmt: skip
        else:
            _paint(
                image, windows, ops, factors, sums, rectangles, value, scale, shift, output, outside,
                sample, first_row, count, first_lane, stride_y, stride_c, image_height, image_width, height, width,
                steps, STRIDE_X, CHANNELS, LANES, FULL, -WORDS, PADDING, BLOCK_X, 1,
            )  # fmt: skip
    else:
        _paint(
            image, windows, ops, factors, sums, rectangles, value, scale, shift, output, outside,
            sample, first_row, count, first_lane, stride_y, stride_c, image_height, image_width, height, width, steps,
            STRIDE_X, CHANNELS, LANES, FULL, 0, PADDING, BLOCK_X, 1,
        )  # fmt: skip


@triton.jit
def _paint(
    image, windows, ops, factors, sums, rectangles, value, scale, shift, output, outside,
    sample, first_row, count, first_lane, stride_y, stride_c, image_height, image_width, height, width, steps,
    STRIDE_X: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr, FULL: tl.constexpr,
    WORDS: tl.constexpr,  # negative: written so, but not read
    PADDING: tl.constexpr, BLOCK_X: tl.constexpr,
    TAPS: tl.constexpr,  # 1: nothing is resized; 2 or 3, along each axis; 5, along x; 0: as many as it takes
):  # fmt: skip
    """Makes the rows of one program, each through all its steps."""
    # The last tile of a row begins so early that it is full, where a row is that long: what two programs make is equal.
    # In shorter rows, lanes outside make a neighbour's value. So loads need no mask, and stores seldom do.
    first_lane_made = tl.maximum(tl.minimum(first_lane, width * LANES - BLOCK_X), 0)
    lane = tl.arange(0, BLOCK_X)[None, :]
    # Bytes that only Normalize changes stay lifted bits: their factor lowers them.
    UNIT: tl.constexpr = LOWER if TAPS == 1 and ops is None else 1.0
    lanes = first_lane_made + lane
    x, channel = lanes // LANES, lanes % LANES
    inside = (lanes >= first_lane) & (x < width) & (channel < CHANNELS)
    if not FULL:
        x = tl.minimum(x, width - 1)
    channel = tl.minimum(channel, CHANNELS - 1)
    if WORDS:
        inside = tl.max_constancy(inside, [1, 4])
    window = windows + sample * 10
    window_height, window_width = tl.load(window + 2), tl.load(window + 3)
    zoom_y, zoom_x = window_height / tl.load(window + 4), window_width / tl.load(window + 5)
    flipped = tl.load(window + 8) != 0
    column = tl.load(window + 7) + tl.where(tl.load(window + 9) != 0, width - 1 - x, x)
    first_y = first_row + tl.load(window + 6)
    place_y = first_y.to(tl.float32) + 0.5
    if TAPS == 1:
        column += tl.load(window + 1)
        first_y += tl.load(window)
        last_y = first_y + count - 1
    if WORDS > 0:
        # The row of the window, and each lane's 4 bytes of it; lanes beyond a short row take its last ones.
        line = image + ((tl.load(window + 1) + tl.load(window + 7)) * CHANNELS + first_lane_made)
        word = tl.arange(0, BLOCK_X // 4)[None, :]
        if not FULL:
            word = tl.minimum(word, width * CHANNELS // 4 - 1)
        begin, end, skew = words(line, first_y, stride_y, word, WORDS)
    elif TAPS == 1:
        within_x = (column >= 0) & (column < image_width)
        line = image + (_shown(column, image_width, PADDING) * STRIDE_X + channel * stride_c)
        ahead = bits(line + _shown(first_y, image_height, PADDING) * stride_y)  # always one row under way
        if outside is not None:
            level_outside = tl.load(outside + channel) / LOWER
    else:
        line = image + tl.load(window).to(tl.int64) * stride_y + tl.load(window + 1) * STRIDE_X
        centre_x = (column.to(tl.float32) + 0.5) * zoom_x
        if TAPS == 0:
            first_x, a, b, taps_x = _support(centre_x, zoom_x, window_width)
        else:
            first_x, a, b, c, d, e = _weights(centre_x, zoom_x, window_width, LIFT, TAPS)
        line += first_x * STRIDE_X + channel * stride_c
        # Three values and not one three times: Triton (3.9) would not carry such names from row to row.
        upper = tl.zeros_like(a)
        inner = tl.zeros_like(a)
        lower = tl.zeros_like(a)
        unread = _first(place_y * zoom_y, zoom_y, window_height, TAPS)
        weight, later = 0.0, 0.0

    mean = 0.0
    if output is not None and sums is not None:
        mean = tl.load(sums + sample) / (height * width)
    if rectangles is not None:
        box_top, box_left = tl.load(rectangles + sample * 4), tl.load(rectangles + sample * 4 + 1)
        box_bottom = box_top + tl.load(rectangles + sample * 4 + 2)
        in_box = (x >= box_left) & (x < box_left + tl.load(rectangles + sample * 4 + 3))
        fill = tl.load(value + channel) / UNIT
    if scale is not None:
        factor, constant = tl.load(scale + channel) * UNIT, tl.load(shift + channel)
    total = tl.zeros([1, BLOCK_X], dtype=tl.int32)

    # Rows are taken as they follow each other in the source; turned upside down, they go out from the bottom up.
    row, step_out = tl.where(flipped, height - 1 - first_row, first_row), tl.where(flipped, -1, 1)
    if output is not None:
        # A number that the lanes share, and what each adds: so one address serves all stores of a thread.
        target = output + (sample.to(tl.int64) * (height * width) + first_lane_made // LANES) * CHANNELS
        if WORDS:
            target += first_lane_made % LANES + lane
        elif LANES == CHANNELS:
            # The hint: neighbours are not known to be adjacent. Else stores become wide, in a layout other than that
            # of the loads, and every row goes through shared memory to change it.
            target += first_lane_made % LANES + tl.max_contiguous(lane, [1, 1])
        else:
            target += lane // LANES * CHANNELS + lane % LANES
    for done in range(count):  # noqa: B007
        centre_y = place_y * zoom_y
        place_y += 1.0
        if WORDS > 0:
            values = tl.reshape(levels(begin, end, skew), [1, BLOCK_X])
            first_y = tl.minimum(first_y + 1, last_y)
            begin, end, skew = words(line, first_y, stride_y, word, WORDS)
        elif TAPS == 1:
            values = ahead * LIFT
            if outside is not None:
                within = within_x & (first_y >= 0) & (first_y < image_height)
                values = tl.where(within, values, level_outside)
            first_y = tl.minimum(first_y + 1, last_y)
            ahead = bits(line + _shown(first_y, image_height, PADDING) * stride_y)
        elif TAPS >= 2 and TAPS <= 3:
            begin, top, middle, bottom, _, _ = _weights(centre_y, zoom_y, window_height, LOWER, TAPS)
            # `unread` counts inside: a number carried only as a bound of this loop is lost (Triton 3.6).
            for reading in range(begin + TAPS - unread):  # noqa: B007
                upper, inner = inner, lower
                lower = _line(line + unread * stride_y, a, b, c, d, e, STRIDE_X, TAPS)
                unread += 1
            if TAPS == 2:
                values = inner * top + lower * middle
            else:
                values = upper * top + inner * middle + lower * bottom
        else:
            # A row of the source counts for the output row at hand (`upper`) and, where rows shrink, for the next one
            # (`lower`), whose filter begins at the centre of this one's. Where they grow, it is read for each anew.
            inverse = 1.0 / tl.maximum(zoom_y, 1.0)
            handed_on = tl.where(zoom_y < 1.0, 0.0, inverse)
            unread = tl.where(zoom_y < 1.0, _first(centre_y, zoom_y, window_height, TAPS), unread)
            end = tl.minimum((centre_y + tl.maximum(zoom_y, 1.0) + 0.5).to(tl.int32), window_height)
            upper, lower = lower, tl.zeros_like(lower)
            weight, later = later, 0.0
            distance = unread.to(tl.float32) + 0.5 - centre_y
            for reading in range(end - unread):  # noqa: B007
                if TAPS == 0:
                    inner = _long_line(line + unread * stride_y, a, b, zoom_x, taps_x, STRIDE_X)
                else:
                    inner = _line(line + unread * stride_y, a, b, c, d, e, STRIDE_X, TAPS)
                now, next = tl.maximum(1.0 - tl.abs(distance) * inverse, 0.0), tl.maximum(distance * handed_on, 0.0)
                upper, lower = upper + inner * now, lower + inner * next
                weight, later = weight + now, later + next
                distance += 1.0
                unread += 1
            values = upper * (1.0 / weight * LOWER)
        if TAPS != 1 and (ops is not None or scale is not None):
            values = (values + ROUNDER) - ROUNDER

        if ops is not None:
            if TAPS == 1:
                values *= LOWER
            values, gray = coloured(values, ops, factors, sample, steps, mean, CHANNELS)
            if output is None:
                total += tl.where(inside, gray, 0.0).to(tl.int32)
        if rectangles is not None:
            values = tl.where(in_box & (row >= box_top) & (row < box_bottom), fill, values)
        if output is not None:
            address = target + row * (width * CHANNELS)
            if WORDS:  # a thread's 4 values are one store
                SIZE: tl.constexpr = output.dtype.element_ty.primitive_bitwidth // 8
                address = tl.max_contiguous(tl.multiple_of(address, [1, 4 * SIZE]), [1, 4])
            if scale is not None:
                made = (values * factor + constant).to(output.dtype.element_ty)
            else:
                made = (values * UNIT + ROUNDER).to(tl.int32, bitcast=True).to(tl.uint8)
            if FULL and LANES == CHANNELS:
                tl.store(address, made)
            else:
                tl.store(address, made, mask=inside)
        row += step_out
    if output is None:
        tl.atomic_add(sums + sample, tl.sum(tl.sum(total, 1), 0).to(tl.int64))


@triton.jit
def _shown(position, size, PADDING: tl.constexpr):
    """Returns the row or column of an image that a position inside or outside it shows; as `place._source_index`."""
    if PADDING is None:
        return position
    else:
        if PADDING == "reflect":
            position = size - 1 - tl.abs(size - 1 - tl.abs(position))
        elif PADDING == "symmetric":
            position = (2 * size - tl.abs(2 * size - tl.abs(2 * position + 1)) - 1) // 2
        return tl.minimum(tl.maximum(position, 0), size - 1)


@triton.jit
def _first(centre, zoom, window, TAPS: tl.constexpr):
    """Returns the first tap of rows or columns: of TAPS within the window, or of all that the filter covers."""
    if TAPS == 2:
        return tl.minimum(tl.maximum(centre - 0.5, 0.0).to(tl.int32), window - 2)
    first = tl.maximum(centre - tl.maximum(zoom, 1.0) + 0.5, 0.0).to(tl.int32)
    if TAPS == 3:
        first = tl.minimum(first, window - 3)
    return first


@triton.jit
def _weights(centre, zoom, window, SCALE: tl.constexpr, TAPS: tl.constexpr):
    """Returns first tap and weights, times SCALE, of rows or columns, of TAPS taps within a window that has as many."""
    if TAPS == 2:
        # Nothing shrinks, the support is 1: clamping the centre does what normalizing the weights would.
        place = tl.minimum(tl.maximum(centre - 0.5, 0.0), (window - 1).to(tl.float32))
        first = tl.minimum(place.to(tl.int32), window - 2)
        second = (place - first.to(tl.float32)) * SCALE
        return first, -second + SCALE, second, second, second, second
    else:
        support = tl.maximum(zoom, 1.0)
        first = tl.minimum(tl.maximum(centre - support + 0.5, 0.0).to(tl.int32), window - TAPS)
        distance = first.to(tl.float32) + 0.5 - centre
        inverse = 1.0 / support
        a = _triangle(distance, inverse)
        b = _triangle(distance + 1.0, inverse)
        c = _triangle(distance + 2.0, inverse)
        if TAPS == 3:
            share = 1.0 / (a + b + c) * SCALE
            return first, a * share, b * share, c * share, share, share
        else:
            d = _triangle(distance + 3.0, inverse)
            e = _triangle(distance + 4.0, inverse)
            share = 1.0 / (a + b + c + d + e) * SCALE
            return first, a * share, b * share, c * share, d * share, e * share


@triton.jit
def _support(centre, zoom, window):
    """Returns the first tap of columns, its distance from their centres, the weights' scale, and how many taps."""
    taps = tl.minimum((2.0 * tl.maximum(zoom, 1.0)).to(tl.int32) + 2, window)
    first = tl.minimum(tl.maximum(centre - tl.maximum(zoom, 1.0) + 0.5, 0.0).to(tl.int32), window - taps)
    distance = first.to(tl.float32) + 0.5 - centre
    total = tl.zeros_like(distance)
    for tap in range(taps):
        total += _triangle(distance + tap, 1.0 / tl.maximum(zoom, 1.0))
    return first, distance, 1.0 / total, taps


@triton.jit
def _triangle(distance, inverse):
    return tl.maximum(1.0 - tl.abs(distance) * inverse, 0.0)


@triton.jit
def _line(first, a, b, c, d, e, STRIDE_X: tl.constexpr, TAPS: tl.constexpr):
    """Returns a row of the source blended along x, from pointers to the first taps and their weights."""
    line = bits(first) * a + bits(first + STRIDE_X) * b
    if TAPS >= 3:
        line += bits(first + 2 * STRIDE_X) * c
    if TAPS >= 5:
        line += bits(first + 3 * STRIDE_X) * d + bits(first + 4 * STRIDE_X) * e
    return line


@triton.jit
def _long_line(first, distance, share, zoom, taps, STRIDE_X: tl.constexpr):
    """Returns a row of the source blended along x over any number of taps, whose weights are computed again."""
    inverse = -1.0 / tl.maximum(zoom, 1.0) * LIFT
    line = tl.zeros_like(distance)
    for tap in range(taps):
        line += bits(first + tap * STRIDE_X) * tl.maximum(tl.abs(distance + tap) * inverse + LIFT, 0.0)
    return line * share
