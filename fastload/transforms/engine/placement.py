"""Where the pixels of each output image come from: the numbers that crops, resizes and flips draw, and how they join.

    image (H, W) --window--> (height, width) --resize--> scaled --part from offset on--> size --flip, mirror-->

Source images may differ in size. A placement moves points and boxes as it moves pixels. Several in a row are one, as
long as no more than one of them resizes, or one pads, so that a list such as [Resize(256), RandomCrop(224),
RandomHorizontalFlip()] reads each pixel once and rounds it once. `place.py` moves the pixels; `ImageRows` says which
images of a mapping or a cache they are read from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.transforms.engine.buffers import sent
from fastload.transforms.spec import ImageSpec

PaddingMode = Literal["constant", "edge", "reflect", "symmetric"]
Whole = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Placement:
    """B output images as axis-aligned parts of B source images, each by its own numbers.

    The first column of each array counts rows, the second columns of pixels.

    Attributes:
        first: int64 (B, 2), top and left of the window in the source image; the window lies within the image unless
            `padding` is given.
        window: int64 (B, 2), its height and width.
        scaled: int64 (B, 2), height and width that the window is resized to, by antialiased bilinear interpolation.
        offset: int64 (B, 2), first row and column shown of the resized window.
        sizes: int64 (B, 2), height and width of the outputs; (1, 2) where all have one size.
        turned: bool (B, 2), whether the result is flipped upside down, and mirrored left to right.
        padding: how pixels outside the image are made, for placements that do not resize; None: there are none.
        fill: their value with padding "constant": one number, or one per channel.
    """

    first: Whole
    window: Whole
    scaled: Whole
    offset: Whole
    sizes: Whole
    turned: Flags
    padding: PaddingMode | None = None
    fill: tuple[float, ...] = (0.0,)

    def __len__(self) -> int:
        return len(self.first)

    @property
    def size(self) -> tuple[int, int]:
        """The (height, width) of all outputs, where they have one size."""
        ((height, width),) = self.sizes.tolist()
        return height, width

    @property
    def resized(self) -> bool:
        """Whether any window changes its size, so that pixel values are interpolated."""
        return bool((self.window != self.scaled).any())

    def table(self) -> Whole:
        """Returns all numbers of each sample, int64 (B, 10): first, window, scaled, offset, turned."""
        return np.concatenate([self.first, self.window, self.scaled, self.offset, self.turned], axis=1)

    def part(self, samples: slice) -> Placement:
        """Returns the placement of some of the samples."""
        sizes = self.sizes if len(self.sizes) == 1 else self.sizes[samples]
        names = ("first", "window", "scaled", "offset", "turned")
        return replace(self, sizes=sizes, **{name: getattr(self, name)[samples] for name in names})

    def then(self, after: Placement) -> Placement:
        """Returns one placement that does what this one and then another one, of its output, do.

        At most one of them resizes; none if one pads, and before one that pads there are only turns.
        """
        assert self.padding is None or (after.padding is None and not after.resized), "an image is padded once"
        assert after.padding is None or not (self.first.any() or self.resized), "the image itself is padded"
        # Where `self` turns an image, windows of `after` begin at the other end of the image before the turn.
        first = np.where(self.turned, self.sizes - after.first - after.window, after.first)
        offset = np.where(self.turned, after.scaled - after.offset - after.sizes, after.offset)
        turned = self.turned ^ after.turned
        if after.resized:
            assert not self.resized, "pixel values are interpolated once"
            return replace(after, first=self.first + self.offset + first, offset=offset, turned=turned)
        padded = self if after.padding is None else after
        whole = replace(self, offset=self.offset + first + offset, sizes=after.sizes, turned=turned)
        whole = replace(whole, padding=padded.padding, fill=padded.fill)
        # Windows that are not resized are cut to the part that is shown: less is read.
        same = whole.window == whole.scaled
        return replace(
            whole,
            first=np.where(same, whole.first + whole.offset, whole.first),
            window=np.where(same, whole.sizes, whole.window),
            scaled=np.where(same, whole.sizes, whole.scaled),
            offset=np.where(same, 0, whole.offset),
        )

    def snapped(self, factors: Whole, shapes: NDArray[np.integer[Any]]) -> Placement:
        """Returns the placement with windows whose edges are multiples of each sample's factor, within its image.

        So an image that was decoded at 1/factor of its size, its mask and its boxes share one window. A window keeps at
        least floor(height / factor) multiples, and its edges move by less than a factor. One that reaches its image's
        edge still does if the last multiple is at least half full.

        No factor is larger than a side of its window; `shapes`, (B, 2 or more), are of the source images.
        """
        factors = factors[:, None]
        assert (factors <= self.window).all(), "an image is not decoded so small that its window has no pixel"
        stop = self.first + self.window
        end = stop // factors
        begin = np.minimum((self.first + (factors - 1) // 2) // factors, end - self.window // factors)
        to_edge = (stop == shapes[:, :2]) & (2 * (stop % factors) >= factors)
        first = begin * factors
        return replace(self, first=first, window=np.where(to_edge, stop, end * factors) - first)

    def in_decoded(self, factors: Whole, tops: Whole) -> Placement:
        """Returns the placement for images decoded at 1/factor of their size, from row `tops` of the full image on.

        Windows were snapped to these factors, and the tops are multiples of them.
        """
        factors = factors[:, None]
        first = self.first - np.stack([tops, np.zeros_like(tops)], axis=1)
        # A partial multiple at the edge is one pixel more.
        return replace(self, first=first // factors, window=-(-self.window // factors))

    def move_points(self, points: torch.Tensor) -> torch.Tensor:
        """Returns where points of the source images, float32 (B, P, 2) as (x, y) in pixels, lie in the output.

        Points that are cut off lie outside it. As torchvision's keypoints: resizing multiplies, and mirroring takes x
        to width - 1 - x.
        """
        moved = _scaled_and_shifted(self, points)
        return torch.where(_xy(self.turned, points), _xy(self.sizes - 1.0, points) - moved, moved)

    def move_boxes(self, boxes: torch.Tensor) -> torch.Tensor:
        """Returns boxes of the source images, float32 (B, 4) or (B, M, 4) as x1, y1, x2, y2, as they lie in the output.

        They are not clamped to it. As torchvision's: x2 and y2 are edges and not pixels, so mirroring takes x to
        width - x.
        """
        corners = _scaled_and_shifted(self, boxes.reshape(len(boxes), boxes.shape[1:].numel() // 2, 2))
        swapped = corners.view(*boxes.shape[:-1], 2, 2).flip(-2).view_as(corners)
        return torch.where(_xy(self.turned, boxes), _xy(1.0 * self.sizes, boxes) - swapped, corners).view(boxes.shape)


def moved_coordinates(placement: Placement, fields: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns points and boxes of the source images, in the forms of `as_moved`, as they lie in the output."""
    return {
        name: placement.move_points(values) if values.shape[-1] == 2 else placement.move_boxes(values)
        for name, values in fields.items()
    }


def _scaled_and_shifted(placement: Placement, points: torch.Tensor) -> torch.Tensor:
    # (p - first) * factor - offset, with one product and one sum: both constants are rounded once.
    factor = placement.scaled / placement.window
    return points * _xy(factor, points) - _xy(placement.first * factor + placement.offset, points)


def windows(
    first: Whole, size: Whole, *, padding: PaddingMode | None = None, fill: tuple[float, ...] = (0.0,)
) -> Placement:
    """Returns a placement that cuts a window out of each image: first, int64 (B, 2), and size, int64 (B or 1, 2)."""
    return replace(resized(first, np.zeros_like(first) + size, size), padding=padding, fill=fill)


def resized(first: Whole, window: Whole, size: Whole) -> Placement:
    """Returns a placement that resizes each sample's own window, int64 (B, 2), to a size, int64 (B or 1, 2)."""
    zeros, turned = np.zeros_like(first), np.zeros(first.shape, np.bool_)
    return Placement(first, window, zeros + size, zeros, size, turned)


def _xy(numbers: NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    """Returns numbers of rows and columns, (B or 1, 2), as float32 or bool (B or 1, 1, 2), x first, where `like` is."""
    columns = numbers[:, None, ::-1]
    return sent(columns.copy() if columns.dtype == np.bool_ else columns.astype(np.float32), like.device)


@dataclass(frozen=True, eq=False)
class ImageRows:
    """B images of a batch that are not gathered yet: rows of a mapped file, or of a cache on the device or the host.

    A transform that reads every pixel anyway takes them from where they are.

    Attributes:
        source: (N, H, W, C) with any strides, on the device of `samples`.
        samples: int64 (B,), which of the N images each one is.
        gathered: returns the batch, (B, C, H, W) in channels_last memory of its own, for sources that are not simply
            contiguous memory of the CPU.
    """

    source: torch.Tensor
    samples: torch.Tensor
    gathered: Callable[[], torch.Tensor] | None = None

    @property
    def spec(self) -> ImageSpec:
        """The shape and dtype of one image."""
        _, height, width, channels = self.source.shape
        return ImageSpec(channels, height, width, self.source.dtype)

    def gather(self) -> torch.Tensor:
        """Returns the batch, (B, C, H, W) in channels_last memory of its own, on the device of `samples`."""
        if self.gathered is not None:
            return self.gathered()
        # NumPy, and clip: a third of the time of torch's, and the GIL is asked for once.
        out = np.empty((len(self.samples), *self.source.shape[1:]), np.uint8)
        np.take(self.source.numpy(), self.samples.numpy(), axis=0, out=out, mode="clip")
        return torch.from_numpy(out).permute(0, 3, 1, 2)


@dataclass(frozen=True, eq=False)
class PlacedImages:
    """B images of one size that are not made yet: parts of images of their own sizes, in memory of a device.

    A transform that reads every pixel anyway takes them from there.

    Attributes:
        pixels: uint8 (T,), the images one after another, each (C, H, W).
        layout: int64 (B, 3) on the same device: the byte at which an image begins, and the bytes from a row of it to
            the next and from a plane to the next.
        sizes: int64 (B, 2) on the host, their heights and widths.
        channels: of every image.
        placement: where the pixels of the B images come from; nothing is padded.
    """

    pixels: torch.Tensor
    layout: torch.Tensor
    sizes: Whole
    channels: int
    placement: Placement

    @property
    def spec(self) -> ImageSpec:
        """The shape and dtype of one image, when it is made."""
        return ImageSpec(self.channels, *self.placement.size, self.pixels.dtype)

    def __len__(self) -> int:
        return len(self.sizes)

    def then(self, after: Placement) -> PlacedImages | None:
        """Returns the images placed once more; None where these have to be made first."""
        if after.padding is not None or (after.resized and self.placement.resized):
            return None
        return replace(self, placement=self.placement.then(after))

    def whole(self) -> list[torch.Tensor]:
        """Returns the images as they are, (C, H, W) each: views."""
        areas = self.channels * self.sizes.prod(axis=1)
        parts = torch.split(self.pixels, areas.tolist())
        return [part.view(self.channels, *size) for part, size in zip(parts, self.sizes.tolist(), strict=True)]
