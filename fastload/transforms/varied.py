"""Where the pixels of each output image come from when the source images differ in size: `Placement` without one size.

Made by `size_making.py`, a batch at a time; images are placed by `one_call.place_varied_in_one_call`, masks, boxes and
points here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.transforms.coordinates import Coordinates, as_handed_over, as_moved
from fastload.transforms.place import nearest
from fastload.transforms.placement import Flags, MovesPlaces, Whole
from fastload.transforms.spec import as_bits


@dataclass(frozen=True, eq=False)
class VariedPlacement(MovesPlaces):
    """B output images of one size as parts of B source images, each of its own size.

    Attributes:
        top, left, height, width: int64 (B,), the window of the source, in pixels; it lies within the image.
        scaled_height, scaled_width: int64 (B,), what the window is resized to, by antialiased bilinear interpolation.
        offset_y, offset_x: int64 (B,), first row and column shown of the resized window.
        mirrored, flipped: bool (B,), then mirrored left to right, or turned upside down.
        size: (height, width) of the output.
    """

    top: Whole
    left: Whole
    height: Whole
    width: Whole
    scaled_height: Whole
    scaled_width: Whole
    offset_y: Whole
    offset_x: Whole
    mirrored: Flags
    flipped: Flags
    size: tuple[int, int]

    def _scaled(self) -> tuple[Whole, Whole]:
        return self.scaled_height, self.scaled_width

    def table(self) -> Whole:
        """The numbers of each sample, int64 (B, 10): window, offset, mirrored, flipped, scaled height and width."""
        window = (self.top, self.left, self.height, self.width)
        shown = (self.offset_y, self.offset_x, self.mirrored, self.flipped)
        return np.stack([*window, *shown, self.scaled_height, self.scaled_width], axis=1)

    def part(self, samples: slice) -> VariedPlacement:
        """That of some of the samples."""
        values = {name: value[samples] for name, value in vars(self).items() if name != "size"}
        return VariedPlacement(**values, size=self.size)

    def turned(self, *, mirrored: Flags | None = None, flipped: Flags | None = None) -> VariedPlacement:
        """This placement, and those that are True, (B,), then mirrored or turned upside down."""
        return replace(
            self,
            mirrored=self.mirrored if mirrored is None else self.mirrored ^ mirrored,
            flipped=self.flipped if flipped is None else self.flipped ^ flipped,
        )

    def snapped(self, factors: Whole, shapes: NDArray[np.integer[Any]]) -> VariedPlacement:
        """The same with windows whose edges are multiples of each sample's factor, int64 (B,), within its image.

        So an image that was decoded at 1/factor of its size, its mask and its boxes are all seen through one window. It
        has at least floor(height / factor) such multiples, and its edges are less than a factor off. A window that
        reaches its image's edge goes on to it where the last multiple is at least half full.

        Args:
            factors: int64 (B,), none larger than a side of its window.
            shapes: (B, 2 or more), height and width of each source image.
        """
        top, height = _snapped(self.top, self.height, factors, shapes[:, 0])
        left, width = _snapped(self.left, self.width, factors, shapes[:, 1])
        return replace(self, top=top, left=left, height=height, width=width)

    def in_parts(self, factors: Whole, tops: Whole) -> VariedPlacement:
        """The same for images that were decoded at 1/factor of their size, from row `tops` of the full image on.

        Args:
            factors: int64 (B,), those that the placement was snapped to.
            tops: int64 (B,), multiples of them.
        """
        return replace(
            self,
            top=(self.top - tops) // factors,
            left=self.left // factors,
            height=-(-self.height // factors),  # what is left of a multiple at the edge is one pixel more
            width=-(-self.width // factors),
        )


def place_varied_masks(
    masks: Sequence[NDArray[np.generic]], placement: VariedPlacement, output: torch.Tensor | None = None
) -> torch.Tensor:
    """Masks, each (H, W) of its image's size, placed: (B, h, w), values never mixed, as `place_masks` does it.

    Args:
        masks: B of them, of one dtype.
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
    """The boxes and points among the fields, float32, moved as the images are; in the form that they had.

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


def _snapped(first: Whole, length: Whole, factors: Whole, sides: NDArray[np.integer[Any]]) -> tuple[Whole, Whole]:
    """First and length of a window that begins at a multiple of the factors, and ends at one or with its image."""
    assert (factors <= length).all(), "an image is not decoded so small that its window has no pixel"
    stop = first + length
    end = stop // factors
    begin = np.minimum((first + (factors - 1) // 2) // factors, end - length // factors)
    to_edge = (stop == sides) & (2 * (stop % factors) >= factors)
    return begin * factors, np.where(to_edge, stop, end * factors) - begin * factors
