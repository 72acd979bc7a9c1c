"""Places and normalizes the samples of a CPU batch one after the other, from where they lie into the output.

Each sample has a window of its own, so torch's antialiased resize takes them one by one; this is the only loop over
them. A call into torch gives up the GIL, and beside a main thread that runs pure Python it comes back only after the
interpreter's switch interval. So there are few calls a sample, one where it is only resized, and loaders keep the
interval short while their threads run this (`ShortSwitchInterval`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.transforms.engine.buffers import SERIAL_VALUES
from fastload.transforms.engine.placement import Placement
from fastload.transforms.normalize import normalize_in_blocks

Constants = tuple[torch.Tensor, torch.Tensor]
"""Scale and shift of a Normalize, float32 (C,) each: level * scale + shift."""

# Samples that are normalized at a time, while they are in the core's cache.
_GROUP = 4

# Values of a window that lose height at a time; larger windows go in blocks of columns, so that an image of 100
# megapixels asks for a few megabytes. Of 0.5, 1, 2, 4 Mi and no limit, this was the fastest for 3000x4000 (1 MiB of L2
# a core).
_BLOCK_VALUES = 1 << 21


def place_samples(
    images: Iterable[NDArray[Any]], placement: Placement, output: torch.Tensor, constants: Constants | None = None
) -> None:
    """Fills the output with windows of images, resized, turned and, with constants, normalized.

    Windows that lose height are resized down before across, so that the dearer of the two runs over fewer rows:
    RandomResizedCrop(224) of 400x533 at 0.98 of the rate of OpenCV's cut and resize, which averages nothing, against
    0.69 (one thread). Values are rounded after each axis, so a pixel is within a level of the exact mean.

    Args:
        images: B of them, (H, W, C) each with any strides; they may differ in size. uint8 if they are resized.
        placement: of the B samples; every window lies within its image.
        output: (B, C, h, w), a view of dense (B, h, w, C) memory; uint8, or with constants a float dtype.
        constants: of a Normalize; None: levels stay as they are.
    """
    samples = zip(images, placement.table().tolist(), strict=True)
    memory = None if constants is None else _memory(_GROUP, *placement.size, output.shape[1])
    for finals in torch.split(output, _GROUP):
        levels = finals if memory is None else memory[: len(finals)]
        for target, (pixels, numbers) in zip(torch.split(levels, 1), samples, strict=False):
            _place(pixels, numbers, target)
        if constants is not None:
            normalize_in_blocks(levels, finals, constants)


def _place(pixels: NDArray[Any], numbers: list[int], target: torch.Tensor) -> None:
    """Places one image (H, W, C) into an output (1, C, h, w), by its row of `Placement.table`."""
    top, left, height, width, down, across, y, x, flipped, mirrored = numbers
    part = pixels[top : top + height, left : left + width]
    # Everything is channels_last: what is not, torch (2.13) resizes into such a target beyond its end. So the first
    # dimension is torch's own, since NumPy's has a stride of 0; and results get memory here (`_memory`).
    part = part if part.strides[2] == part.itemsize else np.ascontiguousarray(part)
    window = torch.from_numpy(part)[None].permute(0, 3, 1, 2)
    turns = [axis for axis, turned in ((2, flipped), (3, mirrored)) if turned]
    if (height, width) != (down, across):
        whole = (down, across) == target.shape[2:]
        # Turned before it is resized, if it may be: torch copies a window for that anyway.
        window = _turned(window, turns if whole else [])
        if down < height:
            window = _shrunk_down(window, down)
            if down != target.shape[2]:
                window, down, y = window[:, :, y : y + target.shape[2]], target.shape[2], 0
        resized = _resize(window, target if whole else _memory(1, down, across, pixels.shape[2]))
        if whole:
            return
        window = resized
    _copy(window[:, :, y : y + target.shape[2], x : x + target.shape[3]], turns, target)


def _turned(window: torch.Tensor, turns: list[int]) -> torch.Tensor:
    """Returns a window (1, C, h, w) turned about axes, in such memory that torch resizes it in this thread."""
    if torch.get_num_threads() == 1:
        return window.flip(turns) if turns else window
    batch, channels, height, width = window.shape
    copy = _memory(batch, height, width, channels)
    _copy(window, turns, copy)
    return copy


def _copy(source: torch.Tensor, turns: list[int], target: torch.Tensor) -> None:
    """Fills the target with an image (1, C, h, w) turned about axes, in strips that torch copies in this thread."""
    if torch.get_num_threads() == 1:
        target.copy_(source.flip(turns) if turns else source)
        return
    height, rows = source.shape[2], max(1, SERIAL_VALUES // (source.shape[1] * source.shape[3]))
    for first, strip in zip(range(0, height, rows), torch.split(source, rows, dim=2), strict=True):
        begin = height - first - strip.shape[2] if 2 in turns else first
        target[:, :, begin : begin + strip.shape[2]].copy_(strip.flip(turns) if turns else strip)


def _shrunk_down(window: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns a window (1, C, H, W) resized to (1, C, rows, W), some columns at a time if it is large."""
    channels, height, width = window.shape[1:]
    columns = max(1, _BLOCK_VALUES // (height * channels))
    if columns >= width:
        return _resize(window, _memory(1, rows, width, channels))
    blocks = torch.split(window, columns, dim=3)
    return torch.cat([_resize(block, _memory(1, rows, block.shape[3], channels)) for block in blocks], dim=3)


def _resize(window: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Fills the target (1, C, h, w) with a window (1, C, H, W), resized and antialiased; returns it."""
    channels, height, size = window.shape[1], window.shape[2], target.shape[2:]
    if size[1] == 1 and size[0] != height:
        # torch's loop for CPUs without AVX2 fills such a column with its first value: lay it down as a row.
        column = _resize(window, _memory(1, height, 1, channels))
        row = _resize(column.transpose(2, 3), _memory(1, 1, size[0], channels))
        return target.copy_(row.transpose(2, 3))
    # What `interpolate(mode="bilinear", antialias=True)` calls, which lacks `out`: that saves an allocation and a copy.
    resize: Any = torch._C._nn._upsample_bilinear2d_aa
    resize(window, size, False, None, None, out=target)
    return target


def _memory(batch: int, height: int, width: int, channels: int) -> torch.Tensor:
    """Returns uninitialised memory for images, uint8 (B, C, H, W), channels_last."""
    return torch.empty((batch, height, width, channels), dtype=torch.uint8, device="cpu").permute(0, 3, 1, 2)
