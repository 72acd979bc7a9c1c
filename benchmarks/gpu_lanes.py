# ruff: noqa: ANN001, ANN202  # Triton looks up what a kernel's annotations name, and refuses `Any`
"""Copies by a kernel whose lanes read 1, 4 or 16 bytes at a time: what the width is worth over the bus."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

WARPS = 4
LANES = {1: (torch.uint8, 1), 4: (torch.int32, 1), 16: (torch.int32, 4)}
"""Bytes that a lane reads at a time -> the type of a value, and the values that each lane has."""


@triton.jit
def _copy(source, target, BLOCK: tl.constexpr):
    # No mask: the width of a read is what the block leaves each lane.
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + offset, tl.load(source + offset))


def copy(source: torch.Tensor, target: torch.Tensor, lane_bytes: int) -> None:
    """Copies pinned host memory, or device memory, to a tensor of the same size by the current stream.

    Args:
        source, target: uint8 (N,), N a multiple of 2,048 and below 2^31.
        lane_bytes: 1, 4 or 16, what a lane reads at a time.
    """
    dtype, values = LANES[lane_bytes]
    block = 32 * WARPS * values
    read, written = source.view(dtype), target.view(dtype)
    assert not len(read) % block, "a whole number of blocks"
    with torch.cuda.device(target.device) if target.device.type == "cuda" else contextlib.nullcontext():
        _copy[(len(read) // block,)](read, written, BLOCK=block, num_warps=WARPS)
