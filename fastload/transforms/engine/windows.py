"""Copies windows of images and mirrors images, each sample by its own numbers, without changing a value.

On the CPU, calls that copy whole rows of a sample (of small images: of many samples) fill a reused output in the
calling thread. torch's own threads are avoided on purpose: next to the loader's readers on 2 cores, a team of threads
waits for its slowest member at each call, and mirroring fell from 78,000 to 2,400 images/s, this way from 52,000 to
19,000 (256 x 218x178x3; `torch.where` on the whole batch: 4,000 to 6,500). On CUDA one gather does it, its indices
computed on the device from B drawn numbers, so nothing waits for the stream.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.transforms.engine.buffers import SMALL_SAMPLE_BYTES, OutputPool, as_bits, empty_images
from fastload.transforms.engine.cpu_program import SERIAL_VALUES
from fastload.transforms.engine.placement import PaddingMode

_Index = TypeVar("_Index", NDArray[np.int64], torch.Tensor)


def flip(images: torch.Tensor, chosen: NDArray[np.bool_], pool: OutputPool) -> torch.Tensor:
    """Returns images (B, C, H, W), those chosen, bool (B,), mirrored left to right; channels_last memory."""
    if images.device.type != "cpu":
        return _flip_by_gather(images, chosen)
    output = empty_images(images, images.shape[1], pool)
    source, target = as_bits(images), as_bits(output).permute(0, 2, 3, 1)
    sample_values = max(1, math.prod(images.shape[1:]))
    if sample_values * images.dtype.itemsize <= SMALL_SAMPLE_BYTES:
        count = SERIAL_VALUES // sample_values
        for block, copy, mirror in zip(
            torch.split(source, count),
            torch.split(target, count),
            torch.split(torch.from_numpy(chosen), count),
            strict=True,
        ):
            in_memory_order = block.permute(0, 2, 3, 1)  # picking through the (B, C, H, W) view is half as fast
            copy.copy_(in_memory_order)
            picked = mirror.nonzero()[:, 0]
            copy.index_copy_(0, picked, in_memory_order.index_select(0, picked).flip(2))
        return output
    height, width, channels = target.shape[1:]
    strip_rows = max(1, SERIAL_VALUES // (width * channels))
    samples = zip(source, source.permute(0, 2, 3, 1).numpy(), target.numpy(), chosen.tolist(), strict=True)
    for image, pixels, copy, mirror in samples:
        if not mirror:
            copy[...] = pixels
            continue
        # torch has a fast path for mirroring (C, H, W) in channels_last memory; the copy then reads it from cache.
        for top, strip in zip(range(0, height, strip_rows), torch.split(image, strip_rows, dim=1), strict=True):
            copy[top : top + strip_rows] = strip.flip(2).permute(1, 2, 0).numpy()
    return output


def _flip_by_gather(images: torch.Tensor, chosen: NDArray[np.bool_]) -> torch.Tensor:
    batch, _, height, width = images.shape
    columns = torch.arange(width, device=images.device)
    columns = torch.where(_send(chosen, images.device)[:, None], columns.flip(0), columns)
    rows = torch.arange(height, device=images.device).expand(batch, height)
    return gather(images, rows, columns)


def crop(
    images: torch.Tensor,
    tops: NDArray[np.int64],
    lefts: NDArray[np.int64],
    size: tuple[int, int],
    padding_mode: PaddingMode | None,
    fill: torch.Tensor,
    pool: OutputPool,
) -> torch.Tensor:
    """Returns windows of images (B, C, H, W), each at its own row and column, (B, C, *size) in channels_last memory.

    Args:
        images: of any dtype.
        tops, lefts: int64 (B,), row and column of the window's first pixel in the image; negative: in the padding.
        size: (height, width) of the windows.
        padding_mode: how pixels outside the image are made; None: no window reaches out of its image.
        fill: (C,), of the images' dtype, for "constant".
        pool: whose memory the result uses on the CPU.
    """
    if images.device.type != "cpu":
        return _crop_by_gather(images, tops, lefts, size, padding_mode, fill)
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


def _crop_by_gather(
    images: torch.Tensor,
    tops: NDArray[np.int64],
    lefts: NDArray[np.int64],
    size: tuple[int, int],
    padding_mode: PaddingMode | None,
    fill: torch.Tensor,
) -> torch.Tensor:
    height, width = images.shape[2:]
    device = images.device
    rows = _send(tops, device)[:, None] + torch.arange(size[0], device=device)
    columns = _send(lefts, device)[:, None] + torch.arange(size[1], device=device)
    if padding_mode is None:
        return gather(images, rows, columns)
    windows = gather(images, _source_index(rows, height, padding_mode), _source_index(columns, width, padding_mode))
    if padding_mode != "constant":
        return windows
    inside = ((rows >= 0) & (rows < height))[:, None, :, None] & ((columns >= 0) & (columns < width))[:, None, None, :]
    value = as_bits(fill.contiguous()).to(device, non_blocking=True)[:, None, None]
    return torch.where(inside, as_bits(windows), value).view(images.dtype)


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


def gather(images: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Returns pixels of images (B, C, H, W) at rows (B, h) and columns (B, w): (B, C, h, w), channels_last memory."""
    batch = torch.arange(len(images), device=images.device)[:, None, None]
    pixels = as_bits(images).permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]]
    return pixels.view(images.dtype).permute(0, 3, 1, 2)


def _send(drawn: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    # B numbers: the driver stages so small a copy at once and returns, so pageable memory does no harm here.
    return torch.from_numpy(drawn).to(device, non_blocking=True)
