"""Where the pixels of each output image come from: the tables that crops, resizes and flips draw, and how they join.

    image (H, W) --window--> (height, width) --resize--> scaled --part from offset on--> size --mirror, flip-->

`Placement` is for source images of one size, `VariedPlacement` for source images that differ in size; both move points
and boxes as they move pixels. Several in a row are one, as long as no more than one of them resizes and none pads, so
that a list such as [Resize(256), RandomCrop(224), RandomHorizontalFlip()] reads each pixel once and rounds it once.
`place.py` moves the pixels; `ImageRows` says which images of a mapping or a cache they are read from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.transforms.spec import ImageSpec

PaddingMode = Literal["constant", "edge", "reflect", "symmetric"]
Whole = NDArray[np.int64]
Flags = NDArray[np.bool_]


class _MovesCoordinates:
    """Moves points and boxes as a placement moves the pixels of its images; `Placement` describes the attributes."""

    top: Whole
    left: Whole
    height: Whole
    width: Whole
    offset_y: Whole
    offset_x: Whole
    size: tuple[int, int]
    mirrored: Flags
    flipped: Flags

    def _scaled(self) -> tuple[int | Whole, int | Whole]:
        """Returns the height and width that windows are resized to."""
        raise NotImplementedError

    def move_points(self, points: torch.Tensor) -> torch.Tensor:
        """Returns where points of the source images, float32 (B, P, 2) as (x, y) in pixels, lie in the output.

        Points that are cut off lie outside it. As torchvision's keypoints: resizing multiplies, and mirroring takes x
        to width - 1 - x.
        """
        moved = self._scaled_and_shifted(points)
        last = _pair(self.size[1] - 1, self.size[0] - 1, points)
        return torch.where(self._reversed(points)[:, None, :], last - moved, moved)

    def move_boxes(self, boxes: torch.Tensor) -> torch.Tensor:
        """Returns boxes of the source images, float32 (B, 4) or (B, M, 4) as x1, y1, x2, y2, as they lie in the output.

        They are not clamped to it. As torchvision's: x2 and y2 are edges and not pixels, so mirroring takes x to
        width - x.
        """
        corners = self._scaled_and_shifted(boxes.reshape(len(boxes), boxes.shape[1:].numel() // 2, 2))
        swapped = corners.view(*boxes.shape[:-1], 2, 2).flip(-2).view_as(corners)
        other_end = _pair(self.size[1], self.size[0], boxes) - swapped
        return torch.where(self._reversed(boxes)[:, None, :], other_end, corners).view(boxes.shape)

    def _scaled_and_shifted(self, points: torch.Tensor) -> torch.Tensor:
        first = np.stack([self.left, self.top], axis=1)
        scaled_height, scaled_width = self._scaled()
        factor = np.stack([scaled_width / self.width, scaled_height / self.height], axis=1)
        offset = np.stack([self.offset_x, self.offset_y], axis=1)
        # (p - first) * factor - offset, with one product and one sum: both constants are rounded once.
        scale = torch.from_numpy(factor.astype(np.float32)).to(points.device, non_blocking=True)
        shift = torch.from_numpy((first * factor + offset).astype(np.float32)).to(points.device, non_blocking=True)
        return points * scale[:, None, :] - shift[:, None, :]

    def _reversed(self, like: torch.Tensor) -> torch.Tensor:
        chosen = torch.from_numpy(np.stack([self.mirrored, self.flipped], axis=1))
        return chosen.to(like.device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Placement(_MovesCoordinates):
    """B output images as axis-aligned parts of B source images, each by its own numbers.

    Attributes:
        top, left, height, width: int64 (B,), the window in the source image, in pixels; it lies within the image unless
            `padding` is given.
        scaled: (height, width) that the window is resized to, by antialiased bilinear interpolation.
        offset_y, offset_x: int64 (B,), first row and column shown of the resized window.
        size: (height, width) of the output.
        mirrored, flipped: bool (B,), whether the result is mirrored left to right, or flipped upside down.
        padding: how pixels outside the image are made, for placements that do not resize; None: there are none.
        fill: their value with padding "constant": one number, or one per channel.
    """

    top: Whole
    left: Whole
    height: Whole
    width: Whole
    scaled: tuple[int, int]
    offset_y: Whole
    offset_x: Whole
    size: tuple[int, int]
    mirrored: Flags
    flipped: Flags
    padding: PaddingMode | None = None
    fill: tuple[float, ...] = (0.0,)

    @property
    def resized(self) -> bool:
        """Whether any window changes its size, so that pixel values are interpolated."""
        return bool((self.height != self.scaled[0]).any() or (self.width != self.scaled[1]).any())

    def _scaled(self) -> tuple[int, int]:
        return self.scaled

    def table(self) -> Whole:
        """Returns the numbers of each sample, int64 (B, 8): window, offset, mirrored, flipped."""
        columns = (self.top, self.left, self.height, self.width, self.offset_y, self.offset_x)
        return np.stack([*columns, self.mirrored, self.flipped], axis=1)

    def then(self, after: Placement) -> Placement:
        """Returns one placement that does what this one and then another one, of its output, do.

        At most one of them resizes, and neither pads: the caller ensures it.
        """
        assert self.padding is None and after.padding is None, "padded windows are placed one by one"
        # Where `self` flips, windows of `after` begin at the other end of the image before the flip.
        window_top = np.where(self.flipped, self.size[0] - after.top - after.height, after.top)
        window_left = np.where(self.mirrored, self.size[1] - after.left - after.width, after.left)
        offset_y = np.where(self.flipped, after.scaled[0] - after.offset_y - after.size[0], after.offset_y)
        offset_x = np.where(self.mirrored, after.scaled[1] - after.offset_x - after.size[1], after.offset_x)
        mirrored, flipped = self.mirrored ^ after.mirrored, self.flipped ^ after.flipped
        if after.resized:
            assert not self.resized, "pixel values are interpolated once"
            return replace(
                after,
                top=self.top + self.offset_y + window_top,
                left=self.left + self.offset_x + window_left,
                offset_y=offset_y,
                offset_x=offset_x,
                mirrored=mirrored,
                flipped=flipped,
            )
        return replace(
            self,
            offset_y=self.offset_y + window_top + offset_y,
            offset_x=self.offset_x + window_left + offset_x,
            size=after.size,
            mirrored=mirrored,
            flipped=flipped,
        )._trimmed()

    def _trimmed(self) -> Placement:
        """Returns the same placement with windows cut to the part that is shown, where nothing is resized."""
        if self.resized or self.scaled == self.size:
            return self
        batch = len(self.top)
        return replace(
            self,
            top=self.top + self.offset_y,
            left=self.left + self.offset_x,
            height=np.full(batch, self.size[0]),
            width=np.full(batch, self.size[1]),
            scaled=self.size,
            offset_y=np.zeros(batch, np.int64),
            offset_x=np.zeros(batch, np.int64),
        )


def windows(
    top: Whole,
    left: Whole,
    size: tuple[int, int],
    *,
    padding: PaddingMode | None = None,
    fill: tuple[float, ...] = (0.0,),
) -> Placement:
    """Returns a placement that cuts windows of one size, each at its own row and column, int64 (B,)."""
    height, width = (np.full(len(top), side) for side in size)
    return _unflipped(top, left, height, width, size, padding=padding, fill=fill)


def resized(top: Whole, left: Whole, height: Whole, width: Whole, size: tuple[int, int]) -> Placement:
    """Returns a placement that resizes each sample's own window, int64 (B,) each, to one size (height, width)."""
    return _unflipped(top, left, height, width, size)


def flips(image: tuple[int, int], *, mirrored: Flags | None = None, flipped: Flags | None = None) -> Placement:
    """Returns a placement of whole images (height, width) that mirrors or flips those marked True, bool (B,)."""
    given = mirrored if mirrored is not None else flipped
    assert given is not None, "one of the two says how many samples there are"
    zeros, none = np.zeros(len(given), np.int64), np.zeros(len(given), np.bool_)
    return replace(
        windows(zeros, zeros, image),
        mirrored=none if mirrored is None else mirrored,
        flipped=none if flipped is None else flipped,
    )


def joined(placements: Sequence[Placement]) -> Placement:
    """Returns one placement that does what one or more, one after the other, do; see `Placement.then`."""
    first, *others = placements
    for other in others:
        first = first.then(other)
    return first


def _unflipped(
    top: Whole,
    left: Whole,
    height: Whole,
    width: Whole,
    size: tuple[int, int],
    *,
    padding: PaddingMode | None = None,
    fill: tuple[float, ...] = (0.0,),
) -> Placement:
    zeros, none = np.zeros(len(top), np.int64), np.zeros(len(top), np.bool_)
    return Placement(top, left, height, width, size, zeros, zeros, size, none, none, padding, fill)


@dataclass(frozen=True, eq=False)
class VariedPlacement(_MovesCoordinates):
    """B output images of one size as parts of B source images, each of its own size; `size_head.py` makes them.

    Attributes:
        top, left, height, width: int64 (B,), the window in the source image, in pixels; it lies within the image.
        scaled_height, scaled_width: int64 (B,), what the window is resized to, by antialiased bilinear interpolation.
        offset_y, offset_x: int64 (B,), first row and column shown of the resized window.
        mirrored, flipped: bool (B,), whether the result is mirrored left to right, or flipped upside down.
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
        """Returns the numbers of each sample, int64 (B, 10): window, offset, mirrored, flipped, scaled size."""
        window = (self.top, self.left, self.height, self.width)
        shown = (self.offset_y, self.offset_x, self.mirrored, self.flipped)
        return np.stack([*window, *shown, self.scaled_height, self.scaled_width], axis=1)

    def part(self, samples: slice) -> VariedPlacement:
        """Returns the placement of some of the samples."""
        values = {name: value[samples] for name, value in vars(self).items() if name != "size"}
        return VariedPlacement(**values, size=self.size)

    def flips(self, *, mirrored: Flags | None = None, flipped: Flags | None = None) -> VariedPlacement:
        """Returns this placement with the samples marked True, bool (B,), mirrored or flipped afterwards."""
        return replace(
            self,
            mirrored=self.mirrored if mirrored is None else self.mirrored ^ mirrored,
            flipped=self.flipped if flipped is None else self.flipped ^ flipped,
        )

    def snapped(self, factors: Whole, shapes: NDArray[np.integer[Any]]) -> VariedPlacement:
        """Returns the placement with windows whose edges are multiples of each sample's factor, within its image.

        So an image that was decoded at 1/factor of its size, its mask and its boxes share one window. A window keeps at
        least floor(height / factor) multiples, and its edges move by less than a factor. One that reaches its image's
        edge still does if the last multiple is at least half full.

        Args:
            factors: int64 (B,), none larger than a side of its window.
            shapes: (B, 2 or more), height and width of each source image.
        """
        top, height = _snapped(self.top, self.height, factors, shapes[:, 0])
        left, width = _snapped(self.left, self.width, factors, shapes[:, 1])
        return replace(self, top=top, left=left, height=height, width=width)

    def in_decoded(self, factors: Whole, tops: Whole) -> VariedPlacement:
        """Returns the placement for images decoded at 1/factor of their size, from row `tops` of the full image on.

        Args:
            factors: int64 (B,), those that windows were snapped to.
            tops: int64 (B,), multiples of them.
        """
        return replace(
            self,
            top=(self.top - tops) // factors,
            left=self.left // factors,
            height=-(-self.height // factors),  # what is left of a multiple at the edge is one pixel more
            width=-(-self.width // factors),
        )


def _snapped(first: Whole, length: Whole, factors: Whole, sides: NDArray[np.integer[Any]]) -> tuple[Whole, Whole]:
    """Returns first and length of windows that begin at a multiple of the factors, and end at one or at the edge."""
    assert (factors <= length).all(), "an image is not decoded so small that its window has no pixel"
    stop = first + length
    end = stop // factors
    begin = np.minimum((first + (factors - 1) // 2) // factors, end - length // factors)
    to_edge = (stop == sides) & (2 * (stop % factors) >= factors)
    return begin * factors, np.where(to_edge, stop, end * factors) - begin * factors


def _pair(x: int, y: int, like: torch.Tensor) -> torch.Tensor:
    """Returns (x, y), float32 (2,), on the device of a tensor."""
    # Made on the host and sent: eight bytes, which no stream waits for.
    return torch.tensor([x, y], dtype=torch.float32).to(like.device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class ImageRows:
    """B images of a batch that are not gathered yet: rows of a mapped file, or of a cache on the device or the host.

    A transform that reads every pixel anyway takes them from where they are.

    Attributes:
        source: (N, H, W, C) with any strides, on the CPU (pinned or not) or on the device of `samples`.
        samples: int64 (B,), which of the N images each one is, on the device where the batch is wanted.
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
