"""Moves the pixels of images and masks, and coordinates with them, as a `Placement` says.

On the CPU, images that are large or resized go sample by sample through `resample.py`. Small ones that are only cut and
turned are moved by calls that copy rows of many samples into a reused output, in the calling thread: next to the
loader's readers on 2 cores, torch's own threads mirrored 2,400 images/s (256 x 218x178x3), the calling thread 19,000.

On other devices one `gather` cuts and turns, its indices computed there from B drawn numbers, so that nothing waits for
the stream. There, and for other dtypes, two products with weight matrices resize some samples at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.transforms.boxes_and_points import Coordinates, as_handed_over, as_moved
from fastload.transforms.engine.buffers import (
    SERIAL_VALUES,
    SMALL_SAMPLE_BYTES,
    OutputPool,
    as_bits,
    empty_images,
    sent,
)
from fastload.transforms.engine.placement import Flags, PaddingMode, Placement, moved_coordinates
from fastload.transforms.engine.resample import place_batch

# Samples whose weights and floats are made at a time: images of 256x256x3 are 1.6 MB each as float64.
_DENSE_SAMPLES = 64

# Far above what float64 rounds off, and far below what tells two levels of 16 bits.
_TIE = 1e-6

_Index = TypeVar("_Index", NDArray[np.int64], torch.Tensor)


def place_images(images: torch.Tensor, placement: Placement, pool: OutputPool) -> torch.Tensor:
    """Returns the placed images, (B, C, h, w) of the same dtype in new channels_last memory.

    Resized values are rounded to nearest; others are moved as they are.
    """
    if not placement.resized:
        return _cut_and_flipped(images, placement, placement.fill, pool)
    if images.device.type != "cpu" or images.dtype != torch.uint8:
        return _placed_by_weights(images, placement)
    return _placed_one_by_one(images, placement, pool)


def place_masks(masks: torch.Tensor, placement: Placement, fill: int, pool: OutputPool) -> torch.Tensor:
    """Returns the placed masks, (B, h, w): each value is one of the mask's (nearest), or `fill` outside it.

    As torchvision's nearest: output row y shows row floor(y * window / scaled) of the window.
    """
    if not placement.resized:
        return _cut_and_flipped(masks[:, None], placement, (float(fill),), pool)[:, 0]
    if masks.device.type != "cpu":
        return gather(masks[:, None], placement)[:, 0]
    output = pool.empty((len(masks), *placement.size), masks.dtype)
    place_varied_masks(as_bits(masks).numpy(), placement, output)
    return output


def place_varied_masks(masks: Iterable[NDArray[np.generic]], placement: Placement, output: torch.Tensor) -> None:
    """Places masks that may differ in size, as `place_masks` does, in a contiguous output (B, h, w) on the CPU.

    Each is (H, W) of its image's size, with values of as many bytes as the output's.
    """
    rows, columns = (nearest(placement, axis, output.device).numpy() for axis in (0, 1))
    targets = as_bits(output).numpy()
    for mask, target, down, across in zip(masks, targets, rows, columns, strict=True):
        np.take(np.take(mask.view(targets.dtype), down, axis=0), across, axis=1, out=target, mode="clip")


def place_varied_coordinates(
    fields: Mapping[str, torch.Tensor], placement: Placement, coordinates: Mapping[str, Coordinates]
) -> dict[str, torch.Tensor]:
    """Returns the boxes and points among the fields, float32, moved as the (full) images are, in the form they had."""
    given = dict(fields)
    return as_handed_over(
        moved_coordinates(placement, as_moved(given, coordinates)), given, coordinates, placement.size
    )


def _cut_and_flipped(
    images: torch.Tensor, placement: Placement, fill: tuple[float, ...], pool: OutputPool
) -> torch.Tensor:
    """Returns the placed images where nothing is resized; any dtype, any device."""
    value = torch.tensor(fill, dtype=torch.float64, device="cpu").to(images.dtype).expand(images.shape[1])
    if images.device.type != "cpu":
        return gather(images, placement, value)
    if placement.padding is None and math.prod(images.shape[1:]) * images.dtype.itemsize > SMALL_SAMPLE_BYTES:
        return _placed_one_by_one(images, placement, pool)
    result = images
    if placement.padding is not None or placement.size != images.shape[2:]:
        result = crop(images, placement, value, pool)
    for axis in (0, 1):
        if placement.turned[:, axis].any() or (axis and result is images):
            result = turn(result, placement.turned[:, axis], axis, pool)
    return result


def _placed_one_by_one(images: torch.Tensor, placement: Placement, pool: OutputPool) -> torch.Tensor:
    """Returns the placed images on the CPU, uint8 where they are resized."""
    output = pool.empty((len(images), *placement.size, images.shape[1]), images.dtype).permute(0, 3, 1, 2)
    place_batch(as_bits(images).permute(0, 2, 3, 1), None, placement, as_bits(output))
    return output


def turn(images: torch.Tensor, chosen: Flags, axis: int, pool: OutputPool) -> torch.Tensor:
    """Returns images (B, C, H, W) on the CPU, those chosen upside down (axis 0) or mirrored (1); channels_last."""
    output = empty_images(images, images.shape[1], pool)
    count = max(1, SERIAL_VALUES // max(1, math.prod(images.shape[1:])))
    blocks = (as_bits(images), as_bits(output), torch.from_numpy(chosen))
    for block, copy, picks in zip(*(torch.split(whole, count) for whole in blocks), strict=True):
        lines, target = block.permute(0, 2, 3, 1), copy.permute(0, 2, 3, 1)  # picking without it is half as fast
        target.copy_(lines)
        picked = picks.nonzero()[:, 0]
        target.index_copy_(0, picked, lines.index_select(0, picked).flip(1 + axis))
    return output


def crop(images: torch.Tensor, placement: Placement, fill: torch.Tensor, pool: OutputPool) -> torch.Tensor:
    """Returns the windows of images (B, C, H, W) on the CPU, (B, C, *size) in channels_last memory, not turned.

    The fill, (C,), is of the images' dtype and for padding "constant".
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
    assert padding_mode is not None, "large images without padding are placed one by one"
    rows = _source_index(tops[:, None] + np.arange(size[0]), height, padding_mode)[..., None]
    columns = _source_index(lefts[:, None] + np.arange(size[1]), width, padding_mode)
    for i, (image, window, top, left) in enumerate(zip(source, target, tops.tolist(), lefts.tolist(), strict=True)):
        # The part [y0, y1) x [x0, x1) of the window that shows the image; it may be empty.
        y0, x0 = min(max(-top, 0), size[0]), min(max(-left, 0), size[1])
        y1, x1 = max(min(height - top, size[0]), y0), max(min(width - left, size[1]), x0)
        window[y0:y1, x0:x1] = image[top + y0 : top + y1, left + x0 : left + x1]
        for down, across in np.s_[:y0, :], np.s_[y1:, :], np.s_[y0:y1, :x0], np.s_[y0:y1, x1:]:
            window[down, across] = value if padding_mode == "constant" else image[rows[i, down], columns[i, across]]
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

    The fill, (C,), is of the images' dtype and for padding "constant".
    """
    device, padding = images.device, placement.padding
    rows, columns = (nearest(placement, axis, device) for axis in (0, 1))
    (height, width), batch = images.shape[2:], torch.arange(len(images), device=device)[:, None, None]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    if padding is not None:
        rows, columns = _source_index(rows, height, padding), _source_index(columns, width, padding)
    pixels = as_bits(images).permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]]
    if padding == "constant" and fill is not None:
        pixels = torch.where(inside[..., None], pixels, sent(as_bits(fill.contiguous()), device))
    return pixels.view(images.dtype).permute(0, 3, 1, 2)


def nearest(placement: Placement, axis: int, device: torch.device) -> torch.Tensor:
    """Returns the rows (axis 0) or columns (1) of the image that each sample's output shows, int64 (B, size)."""
    first, window, scaled = (
        _column(numbers[:, axis], device) for numbers in (placement.first, placement.window, placement.scaled)
    )
    return first + shown(placement, axis, device) * window // scaled


def shown(placement: Placement, axis: int, device: torch.device) -> torch.Tensor:
    """Returns the rows (axis 0) or columns (1) of the resized window that each output shows, int64 (B, size)."""
    size = placement.size[axis]
    places = torch.arange(size, device=device)
    places = torch.where(_column(placement.turned[:, axis], device), size - 1 - places, places)
    return places + _column(placement.offset[:, axis], device)


def _column(numbers: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Returns numbers of the samples, (B,), as a tensor (B, 1) on the device."""
    return sent(numbers.copy(), device)[:, None]


def _placed_by_weights(images: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Returns the placed images by products with weight matrices; any device."""
    parts = []
    for first in range(0, len(images), _DENSE_SAMPLES):
        some = slice(first, first + _DENSE_SAMPLES)
        rows, columns = (_weights(placement.part(some), axis, images) for axis in (0, 1))
        # float64: autocast and TF32 would take float32 products for ones that may be off by levels.
        placed = rows[:, None] @ images[some].to(torch.float64) @ columns[:, None].transpose(2, 3)
        # Weights sum to 1 but for rounding, so nothing leaves the dtype's range by more than that. A mean halfway
        # between two levels, as small numbers make them, is rounded down: products of other batches differ in the last
        # bits.
        parts.append(placed.sub_(_TIE).round_().clamp_(0, torch.iinfo(images.dtype).max).to(images.dtype))
    result = torch.cat(parts) if parts else images.new_empty((0, images.shape[1], *placement.size))
    return result.contiguous(memory_format=torch.channels_last)


def _weights(placement: Placement, axis: int, images: torch.Tensor) -> torch.Tensor:
    """Returns the resize of images (., C, H, W) along one axis as matrices, float64 (B, size, image size).

    Each output pixel is a mean of the window's pixels, weighted by a triangle around its centre that is as wide as the
    window is larger than the output; what reaches out of the window does not count (Pillow's and torchvision's filter).
    """
    device = images.device
    window = _column(placement.window[:, axis], device)
    scale = _column(placement.window[:, axis] / placement.scaled[:, axis], device)
    centre = (shown(placement, axis, device) + 0.5) * scale
    pixels = torch.arange(images.shape[2 + axis], device=device) - _column(placement.first[:, axis], device)
    distance = (pixels[:, None, :] + 0.5 - centre[:, :, None]).abs()
    weights = (1 - distance / scale.clamp(min=1)[:, :, None]).clamp_(min=0)
    weights = weights * ((pixels >= 0) & (pixels < window))[:, None, :]
    return weights / weights.sum(dim=2, keepdim=True)
