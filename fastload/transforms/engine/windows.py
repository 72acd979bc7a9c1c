"""Moves whole batches by windows and turns, each sample by its own numbers, without changing a value.

On the CPU, calls that copy rows of many small samples fill a reused output in the calling thread. torch's own threads
are avoided on purpose: next to the loader's readers on 2 cores, a team of threads waits for its slowest member at each
call, and mirroring fell from 78,000 to 2,400 images/s, in the calling thread from 52,000 to 19,000 (256 x 218x178x3;
`torch.where` on the whole batch: 4,000 to 6,500). On CUDA one `gather` does it, its indices computed on the device from
B drawn numbers, so nothing waits for the stream.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.transforms.engine.buffers import SERIAL_VALUES, SMALL_SAMPLE_BYTES, OutputPool, as_bits, empty_images
from fastload.transforms.engine.placement import Flags, PaddingMode, Placement

_Index = TypeVar("_Index", NDArray[np.int64], torch.Tensor)


def turn(images: torch.Tensor, chosen: Flags, axis: int, pool: OutputPool) -> torch.Tensor:
    """Returns images (B, C, H, W) on the CPU, those chosen upside down (axis 0) or mirrored (1); channels_last."""
    output = empty_images(images, images.shape[1], pool)
    count = max(1, SERIAL_VALUES // max(1, math.prod(images.shape[1:])))
    blocks = (as_bits(images), as_bits(output), torch.from_numpy(chosen))
    for block, copy, picks in zip(*(torch.split(whole, count) for whole in blocks), strict=True):
        lines, target = (
            block.permute(0, 2, 3, 1),
            copy.permute(0, 2, 3, 1),
        )  # picking through (B, C, H, W) is half as fast
        target.copy_(lines)
        picked = picks.nonzero()[:, 0]
        target.index_copy_(0, picked, lines.index_select(0, picked).flip(1 + axis))
    return output


def crop(images: torch.Tensor, placement: Placement, fill: torch.Tensor, pool: OutputPool) -> torch.Tensor:
    """Returns the windows of images (B, C, H, W) on the CPU, (B, C, *size) in channels_last memory, not turned.

    Args:
        images: of any dtype.
        placement: which resizes nothing; its padding may be needed.
        fill: (C,), of the images' dtype, for padding "constant".
        pool: whose memory the result uses.
    """
    size, padding_mode = placement.size, placement.padding
    tops, lefts = (placement.first + placement.offset).T
    batch, channels, height, width = images.shape
    output = pool.empty((batch, *size, channels), images.dtype)
    # NumPy, since a call costs a fifth of torch's, which decides for small images.
    source, target = as_bits(images).permute(0, 2, 3, 1).numpy(), as_bits(output).numpy()
    value = as_bits(fill.contiguous()).numpy()
    if (value == value[0]).all():
        value = value[:1]  # spread over whole rows at once, not three values at a time
    if math.prod(images.shape[1:]) * images.dtype.itemsize <= SMALL_SAMPLE_BYTES:
        _crop_small(source, target, tops, lefts, padding_mode, value)
        return output.permute(0, 3, 1, 2)
    for image, window, top, left in zip(source, target, tops.tolist(), lefts.tolist(), strict=True):
        if 0 <= top <= height - size[0] and 0 <= left <= width - size[1]:
            window[...] = image[top : top + size[0], left : left + size[1]]
        else:
            assert padding_mode is not None, "a window outside its image, without padding"
            _cut_padded(image, window, top, left, padding_mode, value)
    return output.permute(0, 3, 1, 2)


def _crop_small(
    source: NDArray[np.generic],
    target: NDArray[np.generic],
    tops: NDArray[np.int64],
    lefts: NDArray[np.int64],
    padding_mode: PaddingMode | None,
    fill: NDArray[np.generic],
) -> None:
    """Cuts all windows (B, h, w, C) out of the images (B, H, W, C) at once, padding whole images where needed."""
    (batch, height, width, channels), size = source.shape, target.shape[1:3]
    if batch == 0:
        return
    if padding_mode is not None:
        top, left = max(0, -int(tops.min())), max(0, -int(lefts.min()))
        bottom, right = max(0, int(tops.max()) + size[0] - height), max(0, int(lefts.max()) + size[1] - width)
        sides = ((0, 0), (top, bottom), (left, right), (0, 0))
        if padding_mode == "constant":
            padded = np.empty((batch, height + top + bottom, width + left + right, channels), dtype=source.dtype)
            padded[...] = fill
            padded[:, top : top + height, left : left + width] = source
            source = padded
        else:
            source = np.pad(source, sides, mode=padding_mode)
        tops, lefts = tops + top, lefts + left
    # Rows of bytes, so that each window is copied in runs of whole rows.
    lines = np.ascontiguousarray(source).reshape(batch, source.shape[1], -1)
    windows = np.lib.stride_tricks.sliding_window_view(lines, (size[0], size[1] * channels), axis=(1, 2))
    target.reshape(batch, size[0], -1)[...] = windows[np.arange(batch), tops, lefts * channels]


def _cut_padded(
    image: NDArray[np.generic],
    window: NDArray[np.generic],
    top: int,
    left: int,
    padding_mode: PaddingMode,
    fill: NDArray[np.generic],
) -> None:
    """Fills one window (h, w, C) from an image (H, W, C) that it does not lie within."""
    (height, width), (window_height, window_width) = image.shape[:2], window.shape[:2]
    # The part [y0, y1) x [x0, x1) of the window that shows the image; it may be empty.
    y0, x0 = min(max(-top, 0), window_height), min(max(-left, 0), window_width)
    y1, x1 = max(min(height - top, window_height), y0), max(min(width - left, window_width), x0)
    window[y0:y1, x0:x1] = image[top + y0 : top + y1, left + x0 : left + x1]
    if padding_mode == "constant":
        window[:y0], window[y1:] = fill, fill
        window[y0:y1, :x0], window[y0:y1, x1:] = fill, fill
        return
    rows = np.concatenate([np.arange(y0), np.arange(y1, window_height)])
    columns = np.concatenate([np.arange(x0), np.arange(x1, window_width)])
    source_rows = _source_index(np.arange(top, top + window_height), height, padding_mode)
    source_columns = _source_index(np.arange(left, left + window_width), width, padding_mode)
    window[y0:y1, columns] = image[source_rows[y0:y1, None], source_columns[columns]]
    window[rows] = image[source_rows[rows, None], source_columns]


def _source_index(positions: _Index, size: int, padding_mode: PaddingMode) -> _Index:
    """Returns the row (or column) of an image of `size` rows that each position shows, inside it or outside."""
    last = size - 1
    if padding_mode == "reflect":
        return last - abs(last - abs(positions))
    if padding_mode == "symmetric":
        # "reflect" about the borders instead of the border pixels' centres: in half pixels, each centre is odd.
        halves = 2 * size - abs(2 * size - abs(2 * positions + 1))
        return (halves - 1) // 2
    return positions.clip(0, last)  # "edge"; with "constant" the caller replaces what is outside


def gather(images: torch.Tensor, placement: Placement, fill: torch.Tensor | None = None) -> torch.Tensor:
    """Returns placed images (B, C, h, w) in channels_last memory, each value the nearest of its window; any device.

    Args:
        images: (B, C, H, W) of any dtype.
        placement: of them.
        fill: (C,), of the images' dtype, for padding "constant".
    """
    device, padding = images.device, placement.padding
    rows, columns = (nearest(placement, axis, device) for axis in (0, 1))
    (height, width), batch = images.shape[2:], torch.arange(len(images), device=device)[:, None, None]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    if padding is not None:
        rows, columns = _source_index(rows, height, padding), _source_index(columns, width, padding)
    pixels = as_bits(images).permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]]
    if padding == "constant" and fill is not None:
        pixels = torch.where(inside[..., None], pixels, as_bits(fill.contiguous()).to(device, non_blocking=True))
    return pixels.view(images.dtype).permute(0, 3, 1, 2)


def nearest(placement: Placement, axis: int, device: torch.device) -> torch.Tensor:
    """Returns the rows (axis 0) or columns (1) of the image that each sample's output shows, int64 (B, size)."""
    first, window, scaled = (
        sent(numbers[:, axis], device) for numbers in (placement.first, placement.window, placement.scaled)
    )
    return first + shown(placement, axis, device) * window // scaled


def shown(placement: Placement, axis: int, device: torch.device) -> torch.Tensor:
    """Returns the rows (axis 0) or columns (1) of the resized window that each output shows, int64 (B, size)."""
    size = placement.size[axis]
    places = torch.arange(size, device=device)
    places = torch.where(sent(placement.turned[:, axis], device), size - 1 - places, places)
    return places + sent(placement.offset[:, axis], device)


def sent(numbers: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Returns numbers of the samples, (B,), as a tensor (B, 1) on the device."""
    # B numbers: the driver stages so small a copy at once and returns, so pageable memory does no harm here.
    return torch.from_numpy(numbers.copy()).to(device, non_blocking=True)[:, None]
