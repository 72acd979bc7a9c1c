# mypy: disable-error-code="import,untyped-decorator,no-untyped-def,assignment,misc,var-annotated"
# ruff: noqa: ANN001, ANN201, ANN202, RUF005  # all is a `tl.tensor`, a tuple of them or None; Triton knows no (*a, b)
"""The GPU code of `gpu.fused`, in a module of its own since only Triton's users can import it.

One program of `augment` makes BLOCK_Y rows of BLOCK_X pixels of one sample. A thread has neighbouring pixels, so that
its values are stored at once, and a block of numbers for each channel: where a pixel comes from, its weights and its
place count for all channels. Values by column are computed once a program, values by row once a row.

A program walks down the rows of the source, blends each along x once, and keeps what several output rows need: where
images grow, each byte is read twice a program and not four times a value.

Where rows shrink to less than two thirds, the filter of an output row ends at the centres of its neighbours: a source
row is added to the two output rows that it lies between, and then forgotten.

A thread makes up to 7 pixels of a row: 4 neighbours, 2 neighbours and one, as the bits of that number say, so that 32
threads fit rows of any multiple of 32, and values of neighbours are stored together. A thread's values for its 4, 2 or
1 neighbours are a block. A tuple holds the blocks of all channels, channel after channel.

The weights are Pillow's antialiased bilinear filter's. They are zero outside its support, so every run of taps
within the window that covers the support gives the same sum. Runs of ceil(2 * support) taps do: 2 where nothing
shrinks, 3 down to two thirds, 5 along x down to two fifths; beyond, weights along x are computed for each source row.

Colour steps are what `colour.py` does, in registers, with the same formulas and rounding. `gather` is the kernel of
`gpu.gather_rows`.
`benchmarks/kernel_code.py` counts the instructions that a change costs or saves.
"""

from __future__ import annotations

import triton
import triton.language as tl

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


# The bits of a byte, taken as a float32, are the byte times 2**-149, exactly: products with lifted weights are a
# conversion as well, for nothing. GPUs take such (denormal) numbers at full speed.
LIFT = tl.constexpr(2.0**126)
LOWER = tl.constexpr(2.0**23)


@triton.jit
def pixels(THREADS: tl.constexpr, PIXELS: tl.constexpr):
    """Returns the numbers of a tile's pixels in blocks of which each thread has 4, 2 or 1 neighbours, PIXELS in all."""
    thread, pair = tl.arange(0, THREADS), tl.arange(0, 2)
    found = ()
    if PIXELS & 4:
        found = found + ((thread * 4)[:, None, None] + (pair * 2)[None, :, None] + pair[None, None, :],)
    if PIXELS & 2:
        found = found + ((thread * 2 + THREADS * (PIXELS & 4))[:, None] + pair[None, :],)
    if PIXELS & 1:
        found = found + (thread + THREADS * (PIXELS & 6),)
    return found


@triton.jit
def grouped(parts, PIXELS: tl.constexpr):
    """Returns blocks of each thread's values for its pixels, in the order of `parted`."""
    found = ()
    if PIXELS & 4:
        found = found + (tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3])),)
    if PIXELS & 2:
        found = found + (tl.join(parts[PIXELS & 4], parts[(PIXELS & 4) + 1]),)
    if PIXELS & 1:
        found = found + (parts[PIXELS & 6],)
    return found


@triton.jit
def parted(blocks):
    """Returns what each thread has for its first pixel, for its second, and so on."""
    found = ()
    for at in tl.static_range(len(blocks)):
        if len(blocks[at].shape) == 3:
            even, odd = tl.split(blocks[at])
            first, third = tl.split(even)
            second, fourth = tl.split(odd)
            found = found + (first, second, third, fourth)
        elif len(blocks[at].shape) == 2:
            found = found + tl.split(blocks[at])
        else:
            found = found + (blocks[at],)
    return found


@triton.jit
def by_block(values, CHANNELS: tl.constexpr):
    """Returns blocks in another order: for each place, the blocks of all channels side by side."""
    BLOCKS: tl.constexpr = len(values) // CHANNELS
    found = ()
    for at in tl.static_range(len(values)):
        found = found + (values[at % CHANNELS * BLOCKS + at // CHANNELS],)
    return found


@triton.jit
def times(values, weights):
    """Returns values times weights, which are repeated for as many values as there are."""
    found = ()
    for at in tl.static_range(len(values)):
        found = found + (values[at] * weights[at % len(weights)],)
    return found


@triton.jit
def added(values, others, weights):
    """Returns values to which others were added, times weights, which are repeated for as many as there are."""
    found = ()
    for at in tl.static_range(len(values)):
        found = found + (values[at] + others[at] * weights[at % len(weights)],)
    return found


@triton.jit
def loaded(pointers, stride_c, CHANNELS: tl.constexpr, PIXELS: tl.constexpr):
    """Returns the bytes of pixels, given pointers to their first ones, as float32 of the same bits: see `LIFT`."""
    found = ()
    for channel in tl.static_range(CHANNELS):
        # Pixel by pixel: loads of a block would choose another layout.
        parts = [tl.load(pointer + channel * stride_c) for pointer in pointers]
        found = found + grouped([part.to(tl.int32).to(tl.float32, bitcast=True) for part in parts], PIXELS)
    return found


@triton.jit
def words(line, THREADS: tl.constexpr, CHANNELS: tl.constexpr, STEP: tl.constexpr, last):
    """Returns the aligned words around each thread's 4 pixels, and the bits that the first begins before them.

    Threads beyond the last one read as it does; `line` points to the first one's pixels, and STEP, 1 or -1, is where
    the next one's are. Memory may end with the word that holds the last byte.
    """
    address = line.to(tl.int64)
    begin, end = (address & -4).to(tl.pointer_type(tl.uint32)), ((address + 3) & -4).to(tl.pointer_type(tl.uint32))
    at = tl.minimum(tl.arange(0, THREADS), last) * (STEP * CHANNELS)
    found = ()
    for word in tl.static_range(CHANNELS):
        found = found + (tl.load(begin + (at + word)),)
    return found + (tl.load(end + (at + (CHANNELS - 1))),), (address.to(tl.uint32) & 3) * 8


@triton.jit
def spread(around, skew, others, STEP: tl.constexpr):
    """Returns bytes as `loaded` does: for each channel the bytes of `words`, reversed if STEP is -1, then `others`."""
    CHANNELS: tl.constexpr = len(around) - 1
    OTHERS: tl.constexpr = len(others) // CHANNELS
    FIRST: tl.constexpr = 0 if STEP == 1 else 3 * CHANNELS
    whole = ()
    for word in tl.static_range(CHANNELS):
        both = around[word].to(tl.uint64) | (around[word + 1].to(tl.uint64) << 32)
        whole = whole + ((both >> skew.to(tl.uint64)).to(tl.uint32),)
    found = ()
    for channel in tl.static_range(CHANNELS):
        parts = ()
        for at in tl.static_range(FIRST + channel, FIRST + channel + 4 * STEP * CHANNELS, STEP * CHANNELS):
            part = (whole[at // 4] >> (at % 4 * 8)) & 0xFF
            parts = parts + (part.to(tl.float32, bitcast=True),)
        found = found + grouped(parts, 4) + others[channel * OTHERS : (channel + 1) * OTHERS]
    return found


@triton.jit
def stored(target, values, width, CHANNELS: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr):
    """Stores the values of a tile's pixels, in the order of `by_block`, side by side; no more than `width` pixels."""
    before = 0
    for group in tl.static_range(len(values) // CHANNELS):
        parts = parted(values[group * CHANNELS : (group + 1) * CHANNELS])
        before += _stored_block(target, parts, before, width, CHANNELS, WIDE, FULL)


@triton.jit
def _stored_block(target, parts, before, width, CHANNELS: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr):
    """Stores one block, `before` pixels behind the target, in pieces of up to 4 values; returns its pixels."""
    EACH: tl.constexpr = len(parts) // CHANNELS
    THREADS: tl.constexpr = parts[0].shape[0]
    PIECE: tl.constexpr = 4 if WIDE and len(parts) % 4 == 0 else 2 if WIDE and len(parts) % 2 == 0 else 1
    SIZE: tl.constexpr = PIECE * (target.dtype.element_ty.primitive_bitwidth // 8)
    first = before + tl.arange(0, THREADS) * EACH
    for begin in tl.static_range(0, len(parts), PIECE):
        piece = ()
        for at in tl.static_range(begin, begin + PIECE):
            piece = piece + (parts[at % CHANNELS * EACH + at // CHANNELS],)
        made = tl.reshape(grouped(piece, PIECE)[0], [THREADS, PIECE])
        address = target + (first[:, None] * CHANNELS + begin + tl.arange(0, PIECE)[None, :])
        if PIECE > 1:
            address = tl.max_contiguous(tl.multiple_of(address, [1, SIZE]), [1, PIECE])
        if FULL:
            tl.store(address, made)
        else:
            inside = first + begin // CHANNELS < width
            tl.store(address, made, mask=tl.broadcast_to(inside[:, None], [THREADS, PIECE]))
    return THREADS * EACH


@triton.jit(do_not_specialize="skew batch row_lanes spans pieces".split(), do_not_specialize_on_alignment=["index"])
def gather(
    source, index, out,  # words; int64 (B,); words
    skew, batch, row_lanes, spans, pieces,
    WORDS: tl.constexpr,  # of a lane
    ALIGN: tl.constexpr,  # lanes of a source address that reads begin at
    ROWS: tl.constexpr, SPAN: tl.constexpr,  # rows, and lanes of a row, of a piece
):  # fmt: skip
    """Copies rows `source[index]` to `out`, in pieces that the programs share out."""
    word = tl.arange(0, WORDS)[None, None, :]
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        row = piece // spans * ROWS + tl.arange(0, ROWS)[:, None]
        chosen = tl.load(index + row, mask=row < batch, other=0) * row_lanes
        # A span reads whole lines of memory: the first begins before its row, and reads nothing there.
        lane = piece % spans * SPAN + tl.arange(0, SPAN)[None, :] - ((chosen + skew) % ALIGN).to(tl.int32)
        inside = ((row < batch) & (lane >= 0) & (lane < row_lanes))[:, :, None]
        # The factor WORDS stands last: by it the compiler knows that a lane's words are one access.
        words = tl.load(source + ((chosen + lane)[:, :, None] * WORDS + word), mask=inside)
        there = (row.to(tl.int64) * row_lanes + lane)[:, :, None]
        tl.store(out + (there * WORDS + word), words, mask=inside)


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
    THREADS: tl.constexpr, PIXELS: tl.constexpr,  # of a program, and pixels of each thread: 1 to 7
    FULL: tl.constexpr,  # whether an output row has a program's pixels, or more
    WIDE: tl.constexpr,  # whether rows of the output are a multiple of 4 values, so that several are stored at once
    WORDS: tl.constexpr,  # whether rows of pixels that lie dense are read 4 bytes at a time
    PADDING: tl.constexpr,  # a PaddingMode where windows may leave their images (only of those not resampled), or None
    RESAMPLED: tl.constexpr, BLOCK_Y: tl.constexpr,
    VARIED: tl.constexpr = False,  # each image has strides of its own
):  # fmt: skip
    program = tl.program_id(0)
    sample = program // (tiles_y * tiles_x)
    first_row = program // tiles_x % tiles_y * BLOCK_Y
    first_x = program % tiles_x * (THREADS * PIXELS)
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

    # The last tile of a row begins so early that it is full, where a row is that long: what two programs make is equal.
    # In shorter rows, pixels outside show the last one. So loads need no mask, and stores seldom do.
    made_x = tl.maximum(tl.minimum(first_x, width - THREADS * PIXELS), 0)
    x = [made_x + block for block in pixels(THREADS, PIXELS)]
    inside = [(block >= first_x) & (block < width) for block in x]
    if not FULL:
        x = [tl.minimum(block, width - 1) for block in x]
    window = windows + sample * 10
    mirrored = tl.load(window + 9) != 0
    columns = [tl.load(window + 7) + tl.where(mirrored, width - 1 - block, block) for block in x]
    first_y = first_row + tl.load(window + 6)
    source_part = image, window, columns, first_y, stride_y, stride_c, count

    mean = 0.0
    if output is not None and sums is not None:
        mean = tl.load(sums + sample) / (height * width)
    colours = ops, factors, sample * steps, steps, mean
    erased = ()
    if rectangles is not None:
        left, top = tl.load(rectangles + sample * 4 + 1), tl.load(rectangles + sample * 4)
        right, bottom = left + tl.load(rectangles + sample * 4 + 3), top + tl.load(rectangles + sample * 4 + 2)
        erased = [(block >= left) & (block < right) for block in x], top, bottom, _of_channels(value, CHANNELS)
    normalized = ()
    if scale is not None:
        normalized = _of_channels(scale, CHANNELS), _of_channels(shift, CHANNELS)
    # Rows are taken as they follow each other in the source; turned upside down, they go out from the bottom up.
    flipped = tl.load(window + 8) != 0
    row, step_out = tl.where(flipped, height - 1 - first_row, first_row), tl.where(flipped, -1, 1)
    begin = sample.to(tl.int64) * (height * width)
    output_part = output, begin, made_x, width, row, step_out, inside
    finish = colours, erased, normalized, output_part
    SHAPE: tl.constexpr = (STRIDE_X, CHANNELS, PIXELS, WIDE, FULL, THREADS)

    if RESAMPLED:
        window_height, window_width = tl.load(window + 2), tl.load(window + 3)
        scaled_height, scaled_width = tl.load(window + 4), tl.load(window + 5)
        least = tl.minimum(window_height, window_width)
        if (window_height <= scaled_height) & (window_width <= scaled_width) & (least >= 2):
            total = _resized(source_part, finish, SHAPE, 2)
        elif (2 * window_height <= 3 * scaled_height) & (2 * window_width <= 3 * scaled_width) & (least >= 3):
            total = _resized(source_part, finish, SHAPE, 3)
        elif (2 * window_width <= 5 * scaled_width) & (window_width >= 5):
            total = _resized(source_part, finish, SHAPE, 5)
        else:
            total = _resized(source_part, finish, SHAPE, 0)
    else:
        frame = image_height, image_width, outside
        if not WORDS:
            total = _cropped(source_part, frame, finish, SHAPE, PADDING, 0)
        elif mirrored:
            total = _cropped(source_part, frame, finish, SHAPE, PADDING, -1)
        else:
            total = _cropped(source_part, frame, finish, SHAPE, PADDING, 1)
    if output is None:
        tl.atomic_add(sums + sample, total.to(tl.int64))


@triton.jit
def _of_channels(numbers, CHANNELS: tl.constexpr):
    found = ()
    for channel in tl.static_range(CHANNELS):
        found = found + (tl.load(numbers + channel),)
    return found


@triton.jit
def _resized(
    source_part, finish, SHAPE: tl.constexpr,
    TAPS: tl.constexpr,  # 2 or 3, along each axis; 5, along x; 0: as many as it takes
):  # fmt: skip
    """Makes the rows of a program that is resized."""
    STRIDE_X: tl.constexpr = SHAPE[0]
    CHANNELS: tl.constexpr = SHAPE[1]
    PIXELS: tl.constexpr = SHAPE[2]
    image, window, columns, first_y, stride_y, stride_c, count = source_part
    window_height, window_width = tl.load(window + 2), tl.load(window + 3)
    zoom_y, zoom_x = window_height / tl.load(window + 4), window_width / tl.load(window + 5)
    place_y = first_y.to(tl.float32) + 0.5
    line = image + tl.load(window).to(tl.int64) * stride_y + tl.load(window + 1) * STRIDE_X
    centres_x = [(column.to(tl.float32) + 0.5) * zoom_x for column in parted(columns)]
    if TAPS == 0:
        along_x = support(centres_x, zoom_x, window_width, PIXELS)
    else:
        along_x = columns_of(centres_x, zoom_x, window_width, PIXELS, TAPS)
    nothing = grouped([tl.zeros_like(centre) for centre in centres_x], PIXELS) * CHANNELS
    # Three values and not one three times: Triton (3.9) would not carry such names from row to row.
    upper = [block + 0.0 for block in nothing]
    inner = [block + 0.0 for block in nothing]
    lower = [block + 0.0 for block in nothing]
    unread = first_tap(place_y * zoom_y, zoom_y, window_height, TAPS)
    weight, later = 0.0, 0.0
    total = 0
    for done in range(count):
        centre_y = place_y * zoom_y
        place_y += 1.0
        if TAPS >= 2 and TAPS <= 3:
            begin, along_y = weights_of(centre_y, zoom_y, window_height, LOWER, TAPS)
            # `unread` counts inside: a number carried only as a bound of this loop is lost (Triton 3.6).
            for reading in range(begin + TAPS - unread):  # noqa: B007
                upper, inner = inner, lower
                lower = _line(line + unread * stride_y, stride_c, along_x, STRIDE_X, CHANNELS, PIXELS)
                unread += 1
            values = times(lower, (along_y[TAPS - 1],))
            values = added(values, inner, (along_y[TAPS - 2],))
            if TAPS == 3:
                values = added(values, upper, (along_y[0],))
        else:
            # A row of the source counts for the output row at hand (`upper`) and, where rows shrink, for the next one
            # (`lower`), whose filter begins at the centre of this one's. Where they grow, it is read for each anew.
            inverse = 1.0 / tl.maximum(zoom_y, 1.0)
            handed_on = tl.where(zoom_y < 1.0, 0.0, inverse)
            unread = tl.where(zoom_y < 1.0, first_tap(centre_y, zoom_y, window_height, TAPS), unread)
            end = tl.minimum((centre_y + tl.maximum(zoom_y, 1.0) + 0.5).to(tl.int32), window_height)
            upper, lower = lower, [block + 0.0 for block in nothing]
            weight, later = later, 0.0
            distance = unread.to(tl.float32) + 0.5 - centre_y
            for reading in range(end - unread):  # noqa: B007
                if TAPS == 0:
                    inner = _long_line(line + unread * stride_y, stride_c, along_x, zoom_x, STRIDE_X, CHANNELS, PIXELS)
                else:
                    inner = _line(line + unread * stride_y, stride_c, along_x, STRIDE_X, CHANNELS, PIXELS)
                now, next = tl.maximum(1.0 - tl.abs(distance) * inverse, 0.0), tl.maximum(distance * handed_on, 0.0)
                upper, lower = added(upper, inner, (now,)), added(lower, inner, (next,))
                weight, later = weight + now, later + next
                distance += 1.0
                unread += 1
            values = times(upper, (1.0 / weight * LOWER,))
        total += _finished(values, done, finish, SHAPE, False)
    return total


@triton.jit
def _cropped(
    source_part, frame, finish, SHAPE: tl.constexpr, PADDING: tl.constexpr,
    STEP: tl.constexpr,  # 1, or -1 for mirrored samples, where 4 pixels are read by words; 0: byte by byte
):  # fmt: skip
    """Makes the rows of a program that is not resized."""
    STRIDE_X: tl.constexpr = SHAPE[0]
    CHANNELS: tl.constexpr = SHAPE[1]
    image, window, columns, y, stride_y, stride_c, count = source_part
    image_height, image_width, outside = frame
    y += tl.load(window)
    last_y = y + count - 1
    columns = [tl.load(window + 1) + column for column in columns]
    pointers = [image + _shown(column, image_width, PADDING) * STRIDE_X for column in parted(columns)]
    if outside is not None:
        within_x = [(column >= 0) & (column < image_width) for column in columns]
        filled = [level.to(tl.int32).to(tl.float32, bitcast=True) for level in _of_channels(outside, CHANNELS)]
    made_x, width = finish[3][2], finish[3][3]
    begin = tl.load(window + 1) + tl.load(window + 7) + (made_x if STEP == 1 else width - 4 - made_x)
    line = image + begin * CHANNELS
    reading = line, pointers, (width - made_x) // 4 - 1, stride_c
    ahead = _read(reading, _shown(y, image_height, PADDING) * stride_y, SHAPE, STEP)  # always one row under way
    total = 0
    for done in range(count):
        if STEP == 0:
            values = ahead
        else:
            values = spread(ahead[0], ahead[1], ahead[2], STEP)
        if outside is not None:
            within_y = (y >= 0) & (y < image_height)
            shown = ()
            for at in tl.static_range(len(values)):
                within = within_x[at % len(within_x)] & within_y
                shown = shown + (tl.where(within, values[at], filled[at // len(within_x)]),)
            values = shown
        y = tl.minimum(y + 1, last_y)
        ahead = _read(reading, _shown(y, image_height, PADDING) * stride_y, SHAPE, STEP)
        total += _finished(values, done, finish, SHAPE, True)
    return total


@triton.jit
def _read(reading, offset, SHAPE: tl.constexpr, STEP: tl.constexpr):
    """Returns a row of the source that begins so many bytes behind its image, as `spread` and `loaded` give it."""
    line, pointers, last, stride_c = reading
    CHANNELS: tl.constexpr = SHAPE[1]
    PIXELS: tl.constexpr = SHAPE[2]
    if STEP == 0:
        return loaded([pointer + offset for pointer in pointers], stride_c, CHANNELS, PIXELS)
    else:
        others = [pointer + offset for pointer in pointers[4:PIXELS]]
        around, skew = words(line + offset, SHAPE[5], CHANNELS, STEP, last)
        return around, skew, loaded(others, stride_c, CHANNELS, PIXELS - 4)


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
def _finished(values, done, finish, SHAPE: tl.constexpr, BYTES: tl.constexpr):
    """Stores a row after colour steps, erasing and Normalize; or returns the sum of its gray levels before contrast.

    Its values are BYTES as `loaded` returns them, or levels that have to be rounded.
    """
    CHANNELS: tl.constexpr = SHAPE[1]
    colours, erased, normalized, output_part = finish
    output, begin, made_x, width, row, step_out, inside = output_part
    ops, factors, first_step, steps, mean = colours
    GROUPS: tl.constexpr = len(inside)
    row += done * step_out
    total = 0
    values = by_block(values, CHANNELS)
    # Bytes that only Normalize changes stay lifted: its factors lower them.
    UNIT: tl.constexpr = LOWER if BYTES and ops is None else 1.0
    WHOLE: tl.constexpr = BYTES and ops is None and len(normalized) == 0  # no number is ever made of them
    if ops is not None or len(normalized) > 0:
        if BYTES:
            values = [levels * LIFT * (LOWER / UNIT) for levels in values]
        else:
            values = [(levels + ROUNDER) - ROUNDER for levels in values]
    if ops is not None:
        uncoloured, values = values, ()
        for group in tl.static_range(GROUPS):
            block = uncoloured[group * CHANNELS : (group + 1) * CHANNELS]
            block, gray = coloured(block, ops + first_step, factors + first_step, steps, mean)
            values = values + block
            if output is None:
                total += tl.sum(tl.where(inside[group], gray, 0.0).to(tl.int32))
    if output is not None:
        made = ()
        for at in tl.static_range(len(values)):
            levels = values[at]
            if len(erased) > 0:
                columns, top, bottom, filled = erased
                fill = filled[at % CHANNELS] / UNIT
                if WHOLE:
                    fill = filled[at % CHANNELS].to(tl.int32).to(tl.float32, bitcast=True)
                levels = tl.where(columns[at // CHANNELS] & (row >= top) & (row < bottom), fill, levels)
            if len(normalized) > 0:
                scale, shift = normalized[0][at % CHANNELS] * UNIT, normalized[1][at % CHANNELS]
                levels = levels * scale + shift
            elif WHOLE:
                levels = levels.to(tl.int32, bitcast=True)
            else:
                levels = (levels + ROUNDER).to(tl.int32, bitcast=True)
            made = made + (levels.to(output.dtype.element_ty),)
        stored(output + (begin + row * width + made_x) * CHANNELS, made, width - made_x, CHANNELS, SHAPE[3], SHAPE[4])
    return total


@triton.jit
def _line(line, stride_c, along_x, STRIDE_X: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr):
    """Returns a row of the source blended along x."""
    firsts, weights = along_x
    pointers = [line + first * STRIDE_X for first in firsts]
    found = times(loaded(pointers, stride_c, CHANNELS, PIXELS), weights[0])
    for tap in tl.static_range(1, len(weights)):
        others = loaded([pointer + tap * STRIDE_X for pointer in pointers], stride_c, CHANNELS, PIXELS)
        found = added(found, others, weights[tap])
    return found


@triton.jit
def _long_line(
    line, stride_c, along_x, zoom, STRIDE_X: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr
):  # fmt: skip
    """Returns a row of the source blended along x over any number of taps, whose weights are computed again."""
    firsts, distances, shares, taps = along_x
    inverse = -1.0 / tl.maximum(zoom, 1.0) * LIFT
    found = [tl.zeros_like(distance) for distance in distances] * CHANNELS
    for tap in range(taps):
        weights = [tl.maximum(tl.abs(distance + tap) * inverse + LIFT, 0.0) for distance in distances]
        pointers = [line + tap * STRIDE_X + first * STRIDE_X for first in firsts]
        found = added(found, loaded(pointers, stride_c, CHANNELS, PIXELS), weights)
    return times(found, shares)
