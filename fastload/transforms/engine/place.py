"""Moves the pixels of images and masks, and coordinates with them, as a `Placement` says.

On the CPU, images that are large or resized go sample by sample through `resample.py`; small ones that are only cut and
turned are moved all at once by `windows.py`. On other devices, and for other dtypes, two products with weight matrices
resize some samples at a time. `PlacedTransform` is the base of the transforms that do nothing else.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.transforms.boxes_and_points import Coordinates, as_handed_over, as_moved
from fastload.transforms.draws import Draws
from fastload.transforms.engine.buffers import SMALL_SAMPLE_BYTES, OutputPool, as_bits
from fastload.transforms.engine.placement import Placement, Whole, windows
from fastload.transforms.engine.resample import place_batch
from fastload.transforms.engine.windows import crop, gather, nearest, sent, shown, turn
from fastload.transforms.spec import ImageSpec

# Samples whose weights and floats are made at a time: images of 256x256x3 are 1.6 MB each as float64.
_DENSE_SAMPLES = 64


class PlacedTransform(ABC):
    """A geometric transform that only says where pixels come from: a crop, a resize or a flip.

    The pipeline joins several of them into one placement. Subclasses define `output` and `place`, set `resizes` if they
    resize, `size` if they give all images one size, and override `pads` if windows may leave their images.
    """

    geometric = True
    thread_safe = True
    resizes = False
    """Whether windows may change their size."""
    size: tuple[int, ...] = ()
    """The (height, width) of all outputs; another length: it depends on the image."""

    def __init__(self) -> None:
        self._pool, self._mask_pool = OutputPool(), OutputPool()

    @abstractmethod
    def output(self, spec: ImageSpec) -> ImageSpec:
        """Returns the spec of the output. Raises OptionError for images that cannot be transformed."""

    @abstractmethod
    def place(self, sizes: Whole, draws: Draws) -> Placement:
        """Returns where each sample's pixels come from, in images that `output` accepts.

        Args:
            sizes: int64 (B, 2), height and width of the images; (1, 2) where all have one size.
            draws: for the batch's samples.
        """

    def target(self, sizes: Whole) -> Whole:
        """Returns height and width of the outputs, int64 (B or 1, 2), of images of these sizes."""
        return np.array([self.size]) if len(self.size) == 2 else sizes

    def pads(self, sizes: Whole) -> bool:
        """Whether windows may leave images of these sizes, int64 (B or 1, 2)."""
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
        return place_images(images, self.place(spec.sizes, draws), self._pool)

    def apply_masks(self, masks: torch.Tensor, draws: Draws, fill: int) -> torch.Tensor:
        """Returns masks (B, H, W) moved as `apply` moves the images, with `fill` where no image was."""
        return place_masks(masks, self.place(np.array([masks.shape[1:]]), draws), fill, self._mask_pool)

    def move_points(self, points: torch.Tensor, spec: ImageSpec, draws: Draws) -> torch.Tensor:
        """Returns points float32 (B, P, 2), (x, y) in images of `spec`, where `apply` moves them; some end outside."""
        return self.place(spec.sizes, draws).move_points(points)

    def move_boxes(self, boxes: torch.Tensor, spec: ImageSpec, draws: Draws) -> torch.Tensor:
        """Returns boxes float32 (B, 4) or (B, M, 4) of images of `spec` where `apply` moves them, not clamped."""
        return self.place(spec.sizes, draws).move_boxes(boxes)


def joint_placement(moves: Iterable[tuple[int, PlacedTransform]], sizes: Whole, draws: Draws) -> Placement:
    """Returns one placement for transforms that run one after the other; each draws from the stream of its index."""
    placement = windows(np.zeros((len(draws), 2), np.int64), sizes)
    for index, transform in moves:
        placement = placement.then(transform.place(placement.sizes, draws.stream(index)))
    return placement


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
    """Places masks that may differ in size, as `place_masks` does.

    Args:
        masks: B of them, each (H, W) of its image's size, with values of as many bytes as the output's.
        placement: of the images.
        output: (B, h, w), contiguous, on the CPU.
    """
    rows, columns = (nearest(placement, axis, output.device).numpy() for axis in (0, 1))
    targets = as_bits(output).numpy()
    for mask, target, down, across in zip(masks, targets, rows, columns, strict=True):
        np.take(np.take(mask.view(targets.dtype), down, axis=0), across, axis=1, out=target, mode="clip")


def place_varied_coordinates(
    fields: Mapping[str, torch.Tensor],
    placement: Placement,
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


def _placed_by_weights(images: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Returns the placed images by products with weight matrices; any device."""
    parts = []
    for first in range(0, len(images), _DENSE_SAMPLES):
        some = slice(first, first + _DENSE_SAMPLES)
        rows, columns = (_weights(placement.part(some), axis, images) for axis in (0, 1))
        # float64: autocast and TF32 would take float32 products for ones that may be off by levels.
        placed = rows[:, None] @ images[some].to(torch.float64) @ columns[:, None].transpose(2, 3)
        # Weights sum to 1 but for rounding, so nothing leaves the dtype's range by more than that.
        parts.append(placed.round_().clamp_(0, torch.iinfo(images.dtype).max).to(images.dtype))
    result = torch.cat(parts) if parts else images.new_empty((0, images.shape[1], *placement.size))
    return result.contiguous(memory_format=torch.channels_last)


def _weights(placement: Placement, axis: int, images: torch.Tensor) -> torch.Tensor:
    """Returns the resize of images (., C, H, W) along one axis as matrices, float64 (B, size, image size).

    Each output pixel is a mean of the window's pixels, weighted by a triangle around its centre that is as wide as the
    window is larger than the output; what reaches out of the window does not count (Pillow's and torchvision's filter).
    """
    device = images.device
    window = sent(placement.window[:, axis], device)
    scale = sent(placement.window[:, axis] / placement.scaled[:, axis], device)
    centre = (shown(placement, axis, device) + 0.5) * scale
    pixels = torch.arange(images.shape[2 + axis], device=device) - sent(placement.first[:, axis], device)
    distance = (pixels[:, None, :] + 0.5 - centre[:, :, None]).abs()
    weights = (1 - distance / scale.clamp(min=1)[:, :, None]).clamp_(min=0)
    weights = weights * ((pixels >= 0) & (pixels < window))[:, None, :]
    return weights / weights.sum(dim=2, keepdim=True)
