"""Runs crops (padded or not), resizes, flips, colour, erasing and Normalize in one pass on a GPU, and gathers rows.

Calls `triton_kernels.py`, which takes Triton 3.5 (torch 2.9) or newer: it passes tuples on.

The batch is read once as uint8, from device memory (rows of a cache in host memory are brought there by `gather_rows`
first), and written once, normalized and channels_last. Triton is imported at the first call: builds of torch for the
CPU do not have it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fastload.transforms.engine.placement import PaddingMode


class Blocks(NamedTuple):
    """Rows that one program makes, the pixels of a row that one of its threads makes (1 to 7), and its warps."""

    rows: int
    pixels: int
    num_warps: int


BLOCKS = Blocks(32, 7, 1)
"""224 pixels of a row, with 168 registers a thread: 12 warps a multiprocessor, 42 loads of each under way."""

CONFIGURATIONS = [BLOCKS, Blocks(16, 7, 1), Blocks(56, 7, 1), Blocks(16, 4, 1), Blocks(32, 4, 1), Blocks(32, 4, 2)]
"""Block sizes that are worth timing; of narrow images, threads make fewer pixels."""

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
            version = importlib.import_module("triton").__version__
            if tuple(map(int, version.split(".")[:2])) < (3, 5):
                raise ImportError(f"Triton {version} is installed, 3.5 is needed: torch 2.9 brings it along")
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
        windows: int32 (B, 10), as `Placement.table()`; within the images, unless there is a padding.
        ops: int32 (B, K), colour operations as in `ColourSteps`; of 1 or 3 channels, at most one contrast a sample.
        factors: float32 (B, K), of the operations.
        rectangles: int32 (B, 4): top, left, height, width in the output, filled with `value`.
        value: float32 (C,), whole numbers 0 to 255.
        scale, shift: float32 (C,): the output is level * scale + shift; None: it is uint8.
        outside: float32 (C,), levels outside the images with padding "constant".
        padding: how pixels outside the images are made, where nothing is resampled; None: there are none.
    """

    windows: torch.Tensor
    ops: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    rectangles: torch.Tensor | None = None
    value: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    outside: torch.Tensor | None = None
    padding: PaddingMode | None = None


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
        tables: the operations and numbers of each sample.
        size: of the output.
        has_contrast: whether the colour operations may contain contrast, which takes a pass of its own.
        dtype: of the output: float32, float16 or bfloat16, uint8 without a scale.
        resampled: whether any window changes its size; if not, a shorter way is taken.
        channels: of images that differ in size.
        blocks: of the kernel.
    """
    varied = source.ndim == 1
    channels = channels if varied and channels is not None else source.shape[3]
    assert tables.padding is None or not (resampled or varied), "windows of these lie within their images"
    assert (tables.padding == "constant") == (tables.outside is not None), "what constant padding consists of"
    assert source.dtype == torch.uint8 and channels in CHANNELS, "images that the kernel reads"
    image_size = (0, 0) if varied else source.shape[1:3]  # which only padding asks for
    (height, width), batch, device = size, tables.windows.shape[0], tables.windows.device
    # One call of torch's where two would do: calls that the caches have forgotten take 30 to 70 us each.
    strides = (height * width * channels, 1, width * channels, channels)
    output = torch.empty_strided((batch, channels, height, width), strides, dtype=dtype, device=device)
    if 0 in output.shape:
        return output
    steps = 0 if tables.ops is None else tables.ops.shape[1]
    ops, factors = (tables.ops, tables.factors) if steps else (None, None)
    threads = 32 * blocks.num_warps
    pixels = _pixels(width, threads, blocks.pixels)
    tiles = (-(-height // blocks.rows), -(-width // (threads * pixels)))
    sums = torch.zeros(batch, dtype=torch.int64, device=device) if steps and has_contrast else None
    # Offsets within an image are 32 bits wide; between images they are 64.
    stride_n, stride_y, stride_x, stride_c = (1, 0, 1, 0) if varied else source.stride()
    dense = not varied and stride_x == channels and (channels == 1 or stride_c == 1)
    plain = dense and not resampled and tables.padding is None and width % 4 == 0
    augment = _kernels().augment
    with _current(device):
        for target in ([None] if sums is not None else []) + [output]:
            augment[(batch * tiles[0] * tiles[1],)](
                source, rows, tables.windows, ops, factors, sums, tables.rectangles, tables.value, tables.scale,
                tables.shift, target, tables.outside, stride_n, stride_y, *image_size, height, width, steps,
                *tiles, STRIDE_X=stride_x, STRIDE_C=stride_c, CHANNELS=channels, THREADS=threads, PIXELS=pixels,
                FULL=width >= threads * pixels, WIDE=width * channels % 4 == 0, WORDS=plain and pixels >= 4,
                PADDING=tables.padding, RESAMPLED=resampled, BLOCK_Y=blocks.rows, VARIED=varied,
                num_warps=blocks.num_warps,
                enable_fp_fusion=True,  # given, since Triton 3.9 warns that its default changes
            )  # fmt: skip
    return output


@functools.cache
def _pixels(width: int, threads: int, most: int) -> int:
    """Returns how many pixels each thread makes: few threads shall be idle at the end of a row, and programs be few."""
    programs = {pixels: -(-width // (threads * pixels)) for pixels in range(1, most + 1)}
    return min(programs, key=lambda pixels: programs[pixels] * (pixels + 1))


_LINE_BYTES = 128  # what a warp asks the bus for at a time, at a multiple of as many
_PIECE_LANES = 512  # of a program: 4 reads a thread
_BUS_BYTES = 1 << 19


def gather_rows(source: torch.Tensor, index: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns `source[index]`, (B, ...), on the index's device, copied by the current stream; it never waits.

    Rows of a multiple of 16, 8 or 4 bytes are read in such pieces a lane, others byte by byte. No more programs read
    host memory than have 512 KB under way together: a bus carries less (PCIe 5: 55 GB/s x 2 us), and programs that
    wait for it keep the kernels of other streams from the multiprocessors.

    Args:
        source: (N, ...) of any dtype, contiguous, on the device or in pinned host memory.
        index: int64 (B,) on the device, contiguous, within 0 to N - 1; not checked, which would wait for the device.
        out: memory for the result, contiguous, of its shape and dtype on the index's device.
    """
    device = index.device
    if out is None:
        out = torch.empty((len(index), *source.shape[1:]), dtype=source.dtype, device=device)
    assert out.shape == (len(index), *source.shape[1:]) and out.dtype == source.dtype, "memory for these rows"
    assert source.is_contiguous() and out.is_contiguous() and index.is_contiguous(), "whole rows, one after another"
    row_bytes = source[0].nbytes if len(source) else 0
    if out.nbytes == 0:
        return out
    common = math.gcd(row_bytes, source.data_ptr(), out.data_ptr(), 16)
    lane_bytes = common if common >= 4 else 1
    word = torch.int32 if common >= 4 else torch.uint8
    read, written = (rows.view(-1).view(torch.uint8).view(word) for rows in (source, out))
    row_lanes = row_bytes // lane_bytes
    # Rows shorter than a piece share one; there, no read begins before its row.
    span = min(1 << (row_lanes - 1).bit_length(), _PIECE_LANES)
    align = _LINE_BYTES // lane_bytes if row_lanes >= _PIECE_LANES else 1
    spans = -(-(row_lanes + align - 1) // span)
    pieces = -(-len(index) // (_PIECE_LANES // span)) * spans
    on_bus = source.device.type == "cpu"
    programs = min(pieces, _BUS_BYTES // (_PIECE_LANES * lane_bytes)) if on_bus else pieces
    from fastload.transforms.engine.triton_kernels import gather  # imports Triton

    with _current(device):
        gather[(programs,)](
            read, index, written, source.data_ptr() % _LINE_BYTES // lane_bytes,
            len(index), row_lanes, spans, pieces,
            WORDS=max(1, lane_bytes // 4), ALIGN=align, ROWS=_PIECE_LANES // span, SPAN=span, num_warps=4,
        )  # fmt: skip
    return out


@functools.cache
def _kernels() -> Any:
    """Returns the module, which imports Triton; once, since an import within a function takes 20 us in cold caches."""
    return importlib.import_module("fastload.transforms.engine.triton_kernels")


def _current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes `device` the current one: Triton launches there, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
