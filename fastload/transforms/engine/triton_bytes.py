# mypy: disable-error-code="import,untyped-decorator,no-untyped-def,assignment,misc,var-annotated"
# ruff: noqa: ANN001, ANN201, ANN202, RUF005  # all is a `tl.tensor`, a tuple of them or None; Triton knows no (*a, b)
"""Loads, keeps and stores the pixels of a tile for `triton_kernels.py`; and the kernel of `gpu.gather_rows`.

A thread makes up to 7 pixels of a row: 4 neighbours, 2 neighbours and one, as the bits of that number say, so that 32
threads fit rows of any multiple of 32, and values of neighbours are stored together. A thread's values for its 4, 2 or
1 neighbours are a block. A tuple holds the blocks of all channels, channel after channel.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
