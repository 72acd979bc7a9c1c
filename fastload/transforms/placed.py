"""What all crops, resizes and flips share: each only says where pixels come from."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from fastload.transforms.buffers import OutputPool
from fastload.transforms.draws import Draws
from fastload.transforms.place import place_images, place_masks
from fastload.transforms.placement import Placement
from fastload.transforms.spec import ImageSpec


class PlacedTransform(ABC):
    """A geometric transform that is a `Placement`; the pipeline joins several of them into one.

    Subclasses define `output` and `place`, and set the flags below if they resize or pad.
    """

    geometric = True
    thread_safe = True
    resizes = False
    """Whether windows change their size."""

    def __init__(self) -> None:
        self._pool, self._mask_pool = OutputPool(), OutputPool()

    @abstractmethod
    def output(self, spec: ImageSpec) -> ImageSpec:
        """The spec of the output. Raises OptionError for images that cannot be transformed."""

    @abstractmethod
    def place(self, spec: ImageSpec, draws: Draws) -> Placement:
        """Where each sample's pixels come from, in images that `output` accepts."""

    def pads(self, spec: ImageSpec) -> bool:
        """Whether windows may leave their images."""
        return False

    def apply(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Images (B, C, H, W) of uint8 or uint16, moved; channels_last memory, never the input's.

        Without resizing, any dtype.
        """
        spec = ImageSpec.of(images)
        self.output(spec)
        return place_images(images, self.place(spec, draws), self._pool)

    def apply_masks(self, masks: torch.Tensor, draws: Draws, fill: int) -> torch.Tensor:
        """Masks (B, H, W) moved as `apply` moves the images; `fill` where no image was."""
        return place_masks(masks, self._place_shape(masks, draws), fill, self._mask_pool)

    def move_points(self, points: torch.Tensor, spec: ImageSpec, draws: Draws) -> torch.Tensor:
        """See `Placement.move_points`; `spec` is that of the images before."""
        return self.place(spec, draws).move_points(points)

    def move_boxes(self, boxes: torch.Tensor, spec: ImageSpec, draws: Draws) -> torch.Tensor:
        """See `Placement.move_boxes`; `spec` is that of the images before."""
        return self.place(spec, draws).move_boxes(boxes)

    def _place_shape(self, masks: torch.Tensor, draws: Draws) -> Placement:
        return self.place(ImageSpec(1, masks.shape[1], masks.shape[2], masks.dtype), draws)
