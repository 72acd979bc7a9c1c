"""Images and masks moved by a `Placement`, with plain torch: the reference, and the way of the CPU.

CPU: what is resized goes sample by sample through torch's antialiased uint8 resize, in one call that leaves Python once
(`one_call.py`); what is only cut and turned is copied by `windows.py`. Elsewhere, and for other dtypes: two products
with weight matrices, a batch at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.transforms.buffers import OutputPool
from fastload.transforms.one_by_one import place_one
from fastload.transforms.one_call import available, place_in_one_call
from fastload.transforms.placement import Flags, Placement, Whole
from fastload.transforms.spec import as_bits
from fastload.transforms.windows import crop, empty_like, flip, gather

# Samples whose weights and floats are made at a time: images of 256x256x3 are 1.6 MB each as float64.
_DENSE_SAMPLES = 64


def place_images(images: torch.Tensor, placement: Placement, pool: OutputPool) -> torch.Tensor:
    """Images (B, C, H, W) placed: (B, C, h, w) of the same dtype in channels_last memory, never the input's.

    Resized values are rounded to nearest; others are moved as they are.
    """
    if not placement.resized:
        return _cut_and_turned(images, placement, pool)
    if images.device.type != "cpu" or images.dtype != torch.uint8:
        return _placed_by_weights(images, placement)
    batch, channels = images.shape[:2]
    output = pool.empty((batch, *placement.size, channels), images.dtype).permute(0, 3, 1, 2)
    _place_into(images, torch.arange(batch, device="cpu"), placement, output)
    return output


def _place_into(source: torch.Tensor, samples: torch.Tensor, placement: Placement, output: torch.Tensor) -> None:
    """Fills output, uint8 (B, C, h, w) on the CPU, from the images (N, C, H, W) that `samples`, int64 (B,), names.

    Both are views of memory in (.., H, W, C) order; the output's is dense.
    """
    assert placement.padding is None, "padded windows are cut, not resized"
    table = torch.from_numpy(placement.table())
    if available():
        place_in_one_call(source, samples, table, placement.scaled, output)
        return
    for index, row, numbers in zip(output, samples.tolist(), table.tolist(), strict=True):
        place_one(source[row], numbers, placement.scaled, index)


def place_masks(masks: torch.Tensor, placement: Placement, fill: int, pool: OutputPool) -> torch.Tensor:
    """Masks (B, H, W) placed: (B, h, w), each value one of the mask's (nearest), or `fill` outside it.

    As torchvision's nearest: output row y shows row floor(y * window / scaled) of the window.
    """
    if not placement.resized:
        return _cut_and_turned(masks[:, None], placement, pool, fill=(float(fill),))[:, 0]
    device = masks.device
    rows = nearest(
        placement.top,
        placement.height,
        placement.scaled[0],
        placement.offset_y,
        placement.size[0],
        placement.flipped,
        device,
    )
    columns = nearest(
        placement.left,
        placement.width,
        placement.scaled[1],
        placement.offset_x,
        placement.size[1],
        placement.mirrored,
        device,
    )
    if device.type != "cpu":
        return gather(masks[:, None], rows, columns)[:, 0]
    output = pool.empty((len(masks), *placement.size), masks.dtype)
    sources, targets = as_bits(masks).numpy(), as_bits(output).numpy()
    for source, target, down, across in zip(sources, targets, rows.numpy(), columns.numpy(), strict=True):
        np.take(np.take(source, down, axis=0), across, axis=1, out=target, mode="clip")
    return output


def nearest(
    first: Whole, window: Whole, scaled: int | Whole, offset: Whole, size: int, turned: Flags, device: torch.device
) -> torch.Tensor:
    """Rows (or columns) of the image that each sample's output shows, int64 (B, size)."""
    places = torch.arange(size, device=device)
    places = torch.where(_send(turned, device), size - 1 - places, places) + _send(offset, device)
    divisor = _send(scaled, device) if isinstance(scaled, np.ndarray) else scaled
    return _send(first, device) + places * _send(window, device) // divisor


def _cut_and_turned(
    images: torch.Tensor, placement: Placement, pool: OutputPool, fill: tuple[float, ...] | None = None
) -> torch.Tensor:
    """Windows and turns without resizing; any dtype, any device."""
    height, width = images.shape[2:]
    result, own = images, False
    if placement.padding is not None or placement.size != (height, width):
        value = (
            torch.tensor(fill or placement.fill, dtype=torch.float64, device="cpu")
            .to(images.dtype)
            .expand(images.shape[1])
        )
        result = crop(images, placement.top, placement.left, placement.size, placement.padding, value, pool)
        own = True
    if placement.mirrored.any():
        result, own = flip(result, placement.mirrored, pool), True
    if placement.flipped.any():
        result, own = _upside_down(result, placement, pool), True
    return result if own else _copy(images, pool)


def _upside_down(images: torch.Tensor, placement: Placement, pool: OutputPool) -> torch.Tensor:
    if images.device.type != "cpu":
        turned = torch.from_numpy(placement.flipped).to(images.device, non_blocking=True)
        source = as_bits(images)
        result = torch.where(turned[:, None, None, None], source.flip(2), source).view(images.dtype)
        return result.contiguous(memory_format=torch.channels_last)
    output = empty_like(images, pool)
    pixels, target = (as_bits(tensor).permute(0, 2, 3, 1).numpy() for tensor in (images, output))
    for image, copy, turned_over in zip(pixels, target, placement.flipped.tolist(), strict=True):
        copy[...] = image[::-1] if turned_over else image
    return output


def _copy(images: torch.Tensor, pool: OutputPool) -> torch.Tensor:
    if images.device.type != "cpu":
        return images.clone(memory_format=torch.channels_last)
    output = empty_like(images, pool)
    as_bits(output).numpy()[...] = as_bits(images).numpy()
    return output


def _placed_by_weights(images: torch.Tensor, placement: Placement) -> torch.Tensor:
    parts = []
    for first in range(0, len(images), _DENSE_SAMPLES):
        part = slice(first, first + _DENSE_SAMPLES)
        p, device = placement, images.device
        rows = _weights(
            p.top[part],
            p.height[part],
            p.scaled[0],
            p.offset_y[part],
            p.size[0],
            p.flipped[part],
            images.shape[2],
            device,
        )
        columns = _weights(
            p.left[part],
            p.width[part],
            p.scaled[1],
            p.offset_x[part],
            p.size[1],
            p.mirrored[part],
            images.shape[3],
            device,
        )
        # float64: autocast and TF32 would take float32 products for ones that may be off by levels.
        placed = rows[:, None] @ images[part].to(torch.float64) @ columns[:, None].transpose(2, 3)
        # Weights sum to 1 but for rounding, so nothing leaves the dtype's range by more than that.
        parts.append(placed.round_().clamp_(0, torch.iinfo(images.dtype).max).to(images.dtype))
    result = torch.cat(parts) if parts else images.new_empty((0, images.shape[1], *placement.size))
    return result.contiguous(memory_format=torch.channels_last)


def _weights(
    first: Whole,
    window: Whole,
    scaled: int,
    offset: Whole,
    size: int,
    turned: Flags,
    image_size: int,
    device: torch.device,
) -> torch.Tensor:
    """The resize along one axis as matrices, float64 (B, size, image size).

    Each output pixel is a mean of the window's pixels, weighted by a triangle around its centre that is as wide as the
    window is larger than the output; what reaches out of the window does not count (Pillow's and torchvision's filter).
    """
    scale = window / scaled
    places = torch.arange(size, device=device)
    places = torch.where(_send(turned, device), size - 1 - places, places) + _send(offset, device)
    centre = (places + 0.5) * _send(scale, device)
    pixels = torch.arange(image_size, device=device) - _send(first, device)
    distance = (pixels[:, None, :] + 0.5 - centre[:, :, None]).abs()
    weights = (1 - distance / _send(np.maximum(scale, 1), device)[:, :, None]).clamp_(min=0)
    weights = weights * ((pixels >= 0) & (pixels < _send(window, device)))[:, None, :]
    return weights / weights.sum(dim=2, keepdim=True)


def _send(drawn: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A number of each sample, (B, 1), on the device."""
    return torch.from_numpy(drawn).to(device, non_blocking=True)[:, None]
