"""Runs crops, resizes, flips, colour, erasing and Normalize in one pass on a GPU: calls `triton_kernels.py`.

The batch is read once as uint8, where it lies (device memory, or pinned host memory over the bus), and written once,
normalized and channels_last. Triton is imported at the first call: builds of torch for the CPU do not have it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch

from fastload.errors import OptionError


class Blocks(NamedTuple):
    """Rows, and values of a row, that one program makes (powers of two, at least 32 values), and its warps."""

    block_y: int
    block_x: int
    num_warps: int


BLOCKS = Blocks(32, 256, 2)
"""72 registers a thread; more values a thread save instructions and cost occupancy."""

CHANNELS = (1, 3, 4)
"""Numbers of channels that the kernel takes."""


def triton_available() -> bool:
    """Whether Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def load_kernels() -> ModuleType:
    """Returns the module of the kernels, which imports Triton."""
    from fastload.transforms.engine import triton_kernels

    return triton_kernels


def try_out(device: torch.device) -> None:
    """Compiles and launches the kernel for one pixel; raises whatever Triton raises."""
    pixel = torch.zeros((1, 1, 1, 1), dtype=torch.uint8, device=device)
    windows = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 0, 0]], dtype=torch.int32, device=device)
    fused(pixel, None, PassTables(windows), (1, 1), resampled=False)


def configurations() -> list[Blocks]:
    """Returns block sizes that are worth timing."""
    others = [(16, 256, 2), (64, 256, 2), (32, 128, 1), (32, 256, 1), (32, 64, 1), (32, 512, 4)]
    return [BLOCKS, *(Blocks(*other) for other in others)]


@dataclass(frozen=True)
class PassTables:
    """The numbers of a pass, on the device of its output. They are not checked: that would wait for the device.

    Attributes:
        windows: int32 (B, 10), as `Placement.table()`; within the images.
        ops: int32 (B, K), colour operations as in `ColourSteps`; of 1 or 3 channels, at most one contrast a sample.
        factors: float32 (B, K), of the operations.
        rectangles: int32 (B, 4): top, left, height, width in the output, filled with `value`.
        value: float32 (C,), whole numbers 0 to 255.
        scale, shift: float32 (C,): the output is level * scale + shift; None: it is uint8.
    """

    windows: torch.Tensor
    ops: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    rectangles: torch.Tensor | None = None
    value: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None


def fused(
    source: torch.Tensor,
    rows: torch.Tensor | None,
    tables: PassTables,
    size: tuple[int, int],
    *,
    has_contrast: bool = False,
    dtype: torch.dtype = torch.uint8,
    resampled: bool = True,
    blocks: Blocks = BLOCKS,
) -> torch.Tensor:
    """Returns augmented images (B, C, height, width) in channels_last memory, on the device of the tables.

    Every step rounds as it does alone: to the nearest level after resizing, down after a colour step. So the result is
    within one level of the steps taken one by one, or as near as their factors let a difference of one level grow.
    Nothing waits for the device.

    Args:
        source: uint8 (N, H, W, C) of 1, 3 or 4 channels with any strides, on the device or in pinned host memory.
        rows: int64 (B,) on the device, the image of `source` of each sample; None: sample b is image b.
        tables: what is done to each sample.
        size: (height, width) of the output.
        has_contrast: whether the colour operations may contain contrast, which takes a pass of its own.
        dtype: of the output: float32, float16 or bfloat16, uint8 without a scale.
        resampled: whether any window changes its size; if not, a shorter way is taken.
        blocks: of the kernel.

    Raises:
        OptionError: another number of channels or dtype, or only one of two tables that go together.
    """
    _check(source, tables, dtype)
    (height, width), channels, batch, device = size, source.shape[3], len(tables.windows), tables.windows.device
    output = torch.empty((batch, height, width, channels), dtype=dtype, device=device)
    if output.numel() == 0:
        return output.permute(0, 3, 1, 2)
    steps = 0 if tables.ops is None else tables.ops.shape[1]
    ops, factors = (tables.ops, tables.factors) if steps else (None, None)
    lanes = 4 if steps and channels == 3 else channels
    tiles = (-(-height // blocks.block_y), -(-width * lanes // blocks.block_x))
    sums = torch.zeros(batch, dtype=torch.int64, device=device) if steps and has_contrast else None
    # Offsets within an image are 32 bits wide; between images they are 64.
    stride_n, stride_y, stride_x, stride_c = source.stride()
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for target in ([None] if sums is not None else []) + [output]:
            load_kernels().augment[(batch * tiles[0] * tiles[1],)](
                source, rows, tables.windows, ops, factors, sums, tables.rectangles, tables.value,
                tables.scale, tables.shift, target, stride_n, stride_y, height, width, steps, *tiles,
                STRIDE_X=stride_x, STRIDE_C=stride_c, CHANNELS=channels, LANES=lanes, RESAMPLED=resampled,
                BLOCK_Y=blocks.block_y, BLOCK_X=blocks.block_x, num_warps=blocks.num_warps,
                enable_fp_fusion=True,  # given, since Triton 3.9 warns that its default changes
            )  # fmt: skip
    return output.permute(0, 3, 1, 2)


def _check(source: torch.Tensor, tables: PassTables, dtype: torch.dtype) -> None:
    channels = source.shape[3]
    if source.dtype != torch.uint8 or channels not in CHANNELS:
        raise OptionError(
            f"fused: images are {source.dtype} of {channels} channels, and the kernel reads uint8 of 1, 3 or 4. "
            f"Apply the transforms one by one."
        )
    if tables.ops is not None and tables.ops.shape[1] and channels == 4:
        raise OptionError("fused: colour steps are for 1 or 3 channels, and these images have 4.")
    for one, other in (("ops", "factors"), ("rectangles", "value"), ("scale", "shift")):
        if (getattr(tables, one) is None) != (getattr(tables, other) is None):
            raise OptionError(f"fused: {one} and {other} go together. Give both or neither.")
    accepted = (torch.uint8,) if tables.scale is None else (torch.float32, torch.float16, torch.bfloat16)
    if dtype not in accepted:
        given = "without scale and shift" if tables.scale is None else "with scale and shift"
        raise OptionError(f"fused(dtype={dtype}): {given} the output is {' or '.join(str(d) for d in accepted)}.")
