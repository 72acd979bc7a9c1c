"""Runs crops, resizes, flips, colour, erasing and Normalize in one pass on a GPU: calls `triton_kernels.py`.

The batch is read once as uint8, where it lies (device memory, or pinned host memory over the bus), and written once,
normalized and channels_last. Triton is imported at the first call: builds of torch for the CPU do not have it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """Rows, and values of a row, that one program makes (powers of two, at least 32 values), and its warps."""

    block_y: int
    block_x: int
    num_warps: int


BLOCKS = Blocks(32, 256, 2)
"""72 registers a thread; more values a thread save instructions and cost occupancy."""

CONFIGURATIONS = [BLOCKS, Blocks(16, 256, 2), Blocks(64, 256, 2), Blocks(32, 128, 1), Blocks(32, 256, 1)]
CONFIGURATIONS += [Blocks(32, 64, 1), Blocks(32, 512, 4)]
"""Block sizes that are worth timing."""

CHANNELS = (1, 3, 4)
"""Numbers of channels that the kernel takes."""


def triton_available() -> bool:
    """Whether Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def kernel_runs(device: torch.device) -> bool:
    """Whether batches on a device go through the kernel, tried out with one pixel; warns, once, if they do not."""
    why = "Triton is not installed; CUDA builds of torch bring it along, else `pip install triton`"
    if triton_available():
        pixel = torch.zeros((1, 1, 1, 1), dtype=torch.uint8, device=device)
        windows = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 0, 0]], dtype=torch.int32, device=device)
        try:
            fused(pixel, None, PassTables(windows), (1, 1), resampled=False)
            return True
        # Triton fails to compile or launch in many ways: no C compiler, a driver too old, a card too old.
        except Exception as error:  # noqa: BLE001
            why = f"Triton does not run here ({type(error).__name__}: {error})"
    warnings.warn(
        f"Augmentation on {device} runs as separate torch operations, each of which reads and writes the whole batch: "
        f"{why}.",
        stacklevel=2,
    )
    return False


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
    channels: int | None = None,
    blocks: Blocks = BLOCKS,
) -> torch.Tensor:
    """Returns augmented images (B, C, *size) in channels_last memory, on the device of the tables; it never waits.

    Every step rounds as it does alone: to the nearest level after resizing, down after a colour step. So the result is
    within one level of the steps taken one by one, or as near as their factors let a difference of one level grow.

    Args:
        source: uint8 (N, H, W, C) of 1, 3 or 4 channels with any strides, on the device or in pinned host memory; or
            (T,), images that may differ in size.
        rows: int64 (B,) on the device, the image of `source` of each sample; None: sample b is image b. Of images that
            differ in size int64 (B, 3), `layout` of `PlacedImages`.
        tables: what is done to each sample.
        size: of the output.
        has_contrast: whether the colour operations may contain contrast, which takes a pass of its own.
        dtype: of the output: float32, float16 or bfloat16, uint8 without a scale.
        resampled: whether any window changes its size; if not, a shorter way is taken.
        channels: of images that differ in size.
        blocks: of the kernel.
    """
    varied = source.ndim == 1
    channels = channels if varied and channels is not None else source.shape[3]
    assert source.dtype == torch.uint8 and channels in CHANNELS, "images that the kernel reads"
    (height, width), batch, device = size, len(tables.windows), tables.windows.device
    output = torch.empty((batch, height, width, channels), dtype=dtype, device=device)
    if output.numel() == 0:
        return output.permute(0, 3, 1, 2)
    steps = 0 if tables.ops is None else tables.ops.shape[1]
    ops, factors = (tables.ops, tables.factors) if steps else (None, None)
    lanes = 4 if steps and channels == 3 else channels
    tiles = (-(-height // blocks.block_y), -(-width * lanes // blocks.block_x))
    sums = torch.zeros(batch, dtype=torch.int64, device=device) if steps and has_contrast else None
    # Offsets within an image are 32 bits wide; between images they are 64.
    stride_n, stride_y, stride_x, stride_c = (1, 0, 1, 0) if varied else source.stride()
    from fastload.transforms.engine.triton_kernels import augment  # imports Triton

    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for target in ([None] if sums is not None else []) + [output]:
            augment[(batch * tiles[0] * tiles[1],)](
                source, rows, tables.windows, ops, factors, sums, tables.rectangles, tables.value,
                tables.scale, tables.shift, target, stride_n, stride_y, height, width, steps, *tiles,
                STRIDE_X=stride_x, STRIDE_C=stride_c, CHANNELS=channels, LANES=lanes, RESAMPLED=resampled,
                BLOCK_Y=blocks.block_y, BLOCK_X=blocks.block_x, VARIED=varied, num_warps=blocks.num_warps,
                enable_fp_fusion=True,  # given, since Triton 3.9 warns that its default changes
            )  # fmt: skip
    return output.permute(0, 3, 1, 2)
