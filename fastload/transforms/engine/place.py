"""Moves the pixels of images and masks, and coordinates with them, as a `Placement` says.

On the CPU, images that are resized go sample by sample through torch's antialiased uint8 resize, in one call that
leaves Python once (`cpu_program.py`); what is only cut and flipped is copied by `windows.py`. On other devices, and for
other dtypes, two products with weight matrices resize some samples at a time. `PlacedTransform` is the base of the
transforms that do nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.transforms.boxes_and_points import Coordinates, as_handed_over, as_moved
from fastload.transforms.draws import Draws
from fastload.transforms.engine.buffers import OutputPool, as_bits, empty_images
from fastload.transforms.engine.cpu_program import available, place_in_one_call, place_one
from fastload.transforms.engine.placement import Flags, Placement, VariedPlacement, Whole
from fastload.transforms.engine.windows import crop, flip, gather
from fastload.transforms.spec import ImageSpec

# Samples whose weights and floats are made at a time: images of 256x256x3 are 1.6 MB each as float64.
_DENSE_SAMPLES = 64


class PlacedTransform(ABC):
    """A geometric transform that only says where pixels come from: a crop, a resize or a flip.

    The pipeline joins several of them into one placement. Subclasses define `output` and `place`, set `resizes` if they
    resize and override `pads` if windows may leave their images.
    """

    geometric = True
    thread_safe = True
    resizes = False
    """Whether windows may change their size."""

    def __init__(self) -> None:
        self._pool, self._mask_pool = OutputPool(), OutputPool()

    @abstractmethod
    def output(self, spec: ImageSpec) -> ImageSpec:
        """Returns the spec of the output. Raises OptionError for images that cannot be transformed."""

    @abstractmethod
    def place(self, spec: ImageSpec, draws: Draws) -> Placement:
        """Returns where each sample's pixels come from, in images that `output` accepts."""

    def pads(self, spec: ImageSpec) -> bool:
        """Whether windows may leave their images."""
        return False

    def apply(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Returns the transformed images, (B, C, h, w) of the same dtype in new channels_last memory.

        Args:
            images: (B, C, H, W), uint8 or uint16; of any dtype if the transform does not resize.
            draws: for the batch's samples.

        Raises:
            OptionError: such images cannot be transformed.
        """
        spec = ImageSpec.of(images)
        self.output(spec)
        return place_images(images, self.place(spec, draws), self._pool)

    def apply_masks(self, masks: torch.Tensor, draws: Draws, fill: int) -> torch.Tensor:
        """Returns masks (B, H, W) moved as `apply` moves the images, with `fill` where no image was."""
        return place_masks(masks, self._mask_placement(masks, draws), fill, self._mask_pool)

    def move_points(self, points: torch.Tensor, spec: ImageSpec, draws: Draws) -> torch.Tensor:
        """Returns points float32 (B, P, 2), (x, y) in images of `spec`, where `apply` moves them; some end outside."""
        return self.place(spec, draws).move_points(points)

    def move_boxes(self, boxes: torch.Tensor, spec: ImageSpec, draws: Draws) -> torch.Tensor:
        """Returns boxes float32 (B, 4) or (B, M, 4) of images of `spec` where `apply` moves them, not clamped."""
        return self.place(spec, draws).move_boxes(boxes)

    def _mask_placement(self, masks: torch.Tensor, draws: Draws) -> Placement:
        return self.place(ImageSpec(1, masks.shape[1], masks.shape[2], masks.dtype), draws)


def place_images(images: torch.Tensor, placement: Placement, pool: OutputPool) -> torch.Tensor:
    """Returns the placed images, (B, C, h, w) of the same dtype in new channels_last memory.

    Resized values are rounded to nearest; others are moved as they are.
    """
    if not placement.resized:
        return _cut_and_flipped(images, placement, pool)
    if images.device.type != "cpu" or images.dtype != torch.uint8:
        return _placed_by_weights(images, placement)
    batch, channels = images.shape[:2]
    output = pool.empty((batch, *placement.size, channels), images.dtype).permute(0, 3, 1, 2)
    _place_into(images, torch.arange(batch, device="cpu"), placement, output)
    return output


def _place_into(source: torch.Tensor, samples: torch.Tensor, placement: Placement, output: torch.Tensor) -> None:
    """Fills output, uint8 (B, C, h, w) on the CPU, from source images (N, C, H, W), sample i from image samples[i].

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
    """Returns the placed masks, (B, h, w): each value is one of the mask's (nearest), or `fill` outside it.

    As torchvision's nearest: output row y shows row floor(y * window / scaled) of the window.
    """
    if not placement.resized:
        return _cut_and_flipped(masks[:, None], placement, pool, fill=(float(fill),))[:, 0]
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


def place_varied_masks(
    masks: Sequence[NDArray[np.generic]], placement: VariedPlacement, output: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns masks that differ in size placed, (B, h, w): values are never mixed, as in `place_masks`.

    Args:
        masks: B of them, of one dtype, each (H, W) of its image's size.
        placement: of the full images.
        output: (B, h, w), contiguous, on the CPU, memory for the result.
    """
    p, cpu = placement, torch.device("cpu")
    rows = nearest(p.top, p.height, p.scaled_height, p.offset_y, p.size[0], p.flipped, cpu).numpy()
    columns = nearest(p.left, p.width, p.scaled_width, p.offset_x, p.size[1], p.mirrored, cpu).numpy()
    if output is None:
        dtype = torch.from_numpy(np.empty(0, masks[0].dtype)).dtype if len(masks) else torch.uint8
        output = torch.empty((len(masks), *p.size), dtype=dtype, device="cpu")
    targets = as_bits(output).numpy()
    for mask, target, down, across in zip(masks, targets, rows, columns, strict=True):
        np.take(np.take(mask.view(targets.dtype), down, axis=0), across, axis=1, out=target, mode="clip")
    return output


def place_varied_coordinates(
    fields: Mapping[str, torch.Tensor],
    placement: VariedPlacement,
    coordinates: Mapping[str, Coordinates],
) -> dict[str, torch.Tensor]:
    """Returns the boxes and points among the fields, float32, moved as the images are, in the form that they had.

    Args:
        fields: by name; those without an entry in `coordinates` are left out of the result.
        placement: of the full images.
        coordinates: how fields hold places in the image.
    """
    given = dict(fields)
    moved = as_moved(given, coordinates)
    for name, values in moved.items():
        moved[name] = placement.move_points(values) if values.shape[-1] == 2 else placement.move_boxes(values)
    return as_handed_over(moved, given, coordinates, placement.size)


def nearest(
    first: Whole, window: Whole, scaled: int | Whole, offset: Whole, size: int, reverse: Flags, device: torch.device
) -> torch.Tensor:
    """Returns the rows (or columns) of the image that each sample's output shows, int64 (B, size)."""
    places = torch.arange(size, device=device)
    places = torch.where(_send(reverse, device), size - 1 - places, places) + _send(offset, device)
    divisor = _send(scaled, device) if isinstance(scaled, np.ndarray) else scaled
    return _send(first, device) + places * _send(window, device) // divisor


def _cut_and_flipped(
    images: torch.Tensor, placement: Placement, pool: OutputPool, fill: tuple[float, ...] | None = None
) -> torch.Tensor:
    """Returns the placed images where nothing is resized; any dtype, any device."""
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
    """Returns the images, those that the placement flips upside down."""
    if images.device.type != "cpu":
        flipped = torch.from_numpy(placement.flipped).to(images.device, non_blocking=True)
        source = as_bits(images)
        result = torch.where(flipped[:, None, None, None], source.flip(2), source).view(images.dtype)
        return result.contiguous(memory_format=torch.channels_last)
    output = empty_images(images, images.shape[1], pool)
    pixels, target = (as_bits(tensor).permute(0, 2, 3, 1).numpy() for tensor in (images, output))
    for image, copy, flipped in zip(pixels, target, placement.flipped.tolist(), strict=True):
        copy[...] = image[::-1] if flipped else image
    return output


def _copy(images: torch.Tensor, pool: OutputPool) -> torch.Tensor:
    if images.device.type != "cpu":
        return images.clone(memory_format=torch.channels_last)
    output = empty_images(images, images.shape[1], pool)
    as_bits(output).numpy()[...] = as_bits(images).numpy()
    return output


def _placed_by_weights(images: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Returns the placed images by products with weight matrices; any device."""
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
    reverse: Flags,
    image_size: int,
    device: torch.device,
) -> torch.Tensor:
    """Returns the resize along one axis as matrices, float64 (B, size, image size).

    Each output pixel is a mean of the window's pixels, weighted by a triangle around its centre that is as wide as the
    window is larger than the output; what reaches out of the window does not count (Pillow's and torchvision's filter).
    """
    scale = window / scaled
    places = torch.arange(size, device=device)
    places = torch.where(_send(reverse, device), size - 1 - places, places) + _send(offset, device)
    centre = (places + 0.5) * _send(scale, device)
    pixels = torch.arange(image_size, device=device) - _send(first, device)
    distance = (pixels[:, None, :] + 0.5 - centre[:, :, None]).abs()
    weights = (1 - distance / _send(np.maximum(scale, 1), device)[:, :, None]).clamp_(min=0)
    weights = weights * ((pixels >= 0) & (pixels < _send(window, device)))[:, None, :]
    return weights / weights.sum(dim=2, keepdim=True)


def _send(drawn: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns numbers of the samples, (B,), as a tensor (B, 1) on the device."""
    return torch.from_numpy(drawn).to(device, non_blocking=True)[:, None]
