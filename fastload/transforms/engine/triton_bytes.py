# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator,no-untyped-def"
# ruff: noqa: ANN001, ANN201  # pointers, numbers and blocks are all a `tl.tensor`, or None
"""How `triton_kernels.py` reads bytes as numbers, one a lane or four, and the kernel of `gpu.gather_rows`."""

from __future__ import annotations

import triton
import triton.language as tl

# The bits of a byte, taken as a float32, are the byte times 2**-149, exactly: products with lifted weights are a
# conversion as well, for nothing. GPUs take such (denormal) numbers at full speed.
LIFT = tl.constexpr(2.0**126)
LOWER = tl.constexpr(2.0**23)


@triton.jit
def bits(pointer):
    return tl.load(pointer).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def words(line, row, stride_y, word, APART: tl.constexpr):
    """Returns the aligned words in which 4 bytes begin and end, and the bits between; memory may end behind those."""
    if APART == 4:
        address = line.to(tl.int64)
        ahead = word + row * (stride_y // 4)
    else:
        address = (line + row * stride_y).to(tl.int64)
        ahead = word
    begin, end = (address & -4).to(tl.pointer_type(tl.uint32)), ((address + 3) & -4).to(tl.pointer_type(tl.uint32))
    return tl.load(begin + ahead), tl.load(end + ahead), (address.to(tl.uint32) & 3) * 8


@triton.jit
def levels(begin, end, skew):
    """Returns the 4 bytes, (1, N, 2, 2), that begin in one word and end in another, times 2**-23."""
    word = ((begin.to(tl.uint64) | (end.to(tl.uint64) << 32)) >> skew.to(tl.uint64)).to(tl.uint32)
    first = (word & 0xFF).to(tl.float32, bitcast=True) * LIFT
    second = (word & 0xFF00).to(tl.float32, bitcast=True) * (LIFT * 2.0**-8)
    third = (word & 0xFF0000).to(tl.float32, bitcast=True) * (LIFT * 2.0**-16)
    fourth = (word >> 24).to(tl.float32, bitcast=True) * LIFT
    return tl.join(tl.join(first, third), tl.join(second, fourth))


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
