"""Runs crops, resizes, flips, colour, erasing and Normalize in one pass on a GPU: calls `triton_kernels.py`.

The batch is read once as uint8, where it lies (device memory, or pinned host memory over the bus), and written once,
normalized and channels_last. Triton is imported at the first call: builds of torch for the CPU do not have it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from types import ModuleType

import torch

from fastload.errors import OptionError

# Rows, and values of a row, that one program makes, and its warps. 72 registers per thread with these; more values per
# thread save instructions and cost occupancy.
BLOCK_Y, BLOCK_X, NUM_WARPS = 32, 256, 2

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
    window = torch.zeros((1, 8), dtype=torch.int32, device=device)
    window[:, 2:4] = 1
    fused(pixel, None, window, (1, 1), (1, 1), resampled=False)


def configurations() -> list[tuple[int, int, int]]:
    """Returns block sizes that are worth timing, as (block_y, block_x, num_warps)."""
    return [
        (BLOCK_Y, BLOCK_X, NUM_WARPS),
        (16, 256, 2),
        (64, 256, 2),
        (32, 128, 1),
        (32, 256, 1),
        (32, 64, 1),
        (32, 512, 4),
    ]


def fused(
    source: torch.Tensor,
    rows: torch.Tensor | None,
    windows: torch.Tensor,
    scaled: tuple[int, int],
    size: tuple[int, int],
    *,
    ops: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    has_contrast: bool = False,
    rectangles: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    dtype: torch.dtype = torch.uint8,
    resampled: bool = True,
    block_y: int = BLOCK_Y,
    block_x: int = BLOCK_X,
    num_warps: int = NUM_WARPS,
) -> torch.Tensor:
    """Returns augmented images (B, C, height, width) in channels_last memory, on the device of `windows`.

    Every step rounds as it does alone: to the nearest level after resizing, down after a colour step. So the result is
    within one level of the steps taken one by one, or as near as their factors let a difference of one level grow.
    Nothing waits for the device. All tensors but `source` lie on it.

    Args:
        source: uint8 (N, H, W, C) of 1, 3 or 4 channels with any strides, on the device or in pinned host memory.
        rows: int64 (B,), the image of `source` of each sample; None: sample b is image b.
        windows: int32 (B, 8), as `Placement.table()`: top, left, height, width, offset_y, offset_x, mirrored, flipped;
            within the images. They are not checked: they lie on the device.
        scaled: (height, width) that windows are resized to.
        size: (height, width) of the output.
        ops: int32 (B, K), colour operations as in `ColourSteps`; of 1 or 3 channels, at most one contrast a sample.
        factors: float32 (B, K), of the operations.
        has_contrast: whether `ops` may contain contrast, which takes a pass of its own.
        rectangles: int32 (B, 4): top, left, height, width in the output, filled with `value`.
        value: float32 (C,), whole numbers 0 to 255.
        scale, shift: float32 (C,): the output is level * scale + shift; None: it is uint8.
        dtype: of the output: float32, float16 or bfloat16, uint8 without `scale`.
        resampled: whether any window differs in size from `scaled`; if not, a shorter way is taken.
        block_y, block_x, num_warps: see `configurations`; block sizes are powers of two, block_x at least 32.

    Raises:
        OptionError: another number of channels or dtype, or only one of two arguments that go together.
    """
    _check(source, ops, factors, rectangles, value, scale, shift, dtype)
    (height, width), channels, batch = size, source.shape[3], len(windows)
    output = torch.empty((batch, height, width, channels), dtype=dtype, device=windows.device)
    steps = 0 if ops is None else ops.shape[1]
    if output.numel() == 0:
        return output.permute(0, 3, 1, 2)
    if steps == 0:
        ops = factors = None
    lanes = 4 if steps and channels == 3 else channels
    tiles = (-(-height // block_y), -(-width * lanes // block_x))
    sums = torch.zeros(batch, dtype=torch.int64, device=windows.device) if steps and has_contrast else None
    # Offsets within an image are 32 bits wide; between images they are 64.
    stride_n, stride_y, stride_x, stride_c = source.stride()
    here = torch.cuda.device(windows.device) if windows.is_cuda else contextlib.nullcontext()
    with here:
        for target in ([None] if sums is not None else []) + [output]:
            load_kernels().augment[(batch * tiles[0] * tiles[1],)](
                source, rows, windows, ops, factors, sums, rectangles, value, scale, shift, target,
                stride_n, stride_y, *scaled, height, width, steps, *tiles,
                STRIDE_X=stride_x, STRIDE_C=stride_c, CHANNELS=channels, LANES=lanes, RESAMPLED=resampled,
                BLOCK_Y=block_y, BLOCK_X=block_x, num_warps=num_warps,
                enable_fp_fusion=True,  # given, since Triton 3.9 warns that its default changes
            )  # fmt: skip
    return output.permute(0, 3, 1, 2)


def _check(
    source: torch.Tensor,
    ops: torch.Tensor | None,
    factors: torch.Tensor | None,
    rectangles: torch.Tensor | None,
    value: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    dtype: torch.dtype,
) -> None:
    channels = source.shape[3]
    if source.dtype != torch.uint8 or channels not in CHANNELS:
        raise OptionError(
            f"fused: images are {source.dtype} of {channels} channels, and the kernel reads uint8 of 1, 3 or 4. "
            f"Apply the transforms one by one."
        )
    if ops is not None and ops.shape[1] and channels == 4:
        raise OptionError("fused: colour steps are for 1 or 3 channels, and these images have 4.")
    for name, one, other in (
        ("ops and factors", ops, factors),
        ("rectangles and value", rectangles, value),
        ("scale and shift", scale, shift),
    ):
        if (one is None) != (other is None):
            raise OptionError(f"fused: {name} go together. Give both or neither.")
    accepted = (torch.uint8,) if scale is None else (torch.float32, torch.float16, torch.bfloat16)
    if dtype not in accepted:
        given = "without scale and shift" if scale is None else "with scale and shift"
        raise OptionError(f"fused(dtype={dtype}): {given} the output is {' or '.join(str(d) for d in accepted)}.")
