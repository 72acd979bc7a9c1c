"""Where the pixels of each output image come from: what crops, resizes and flips are made of, and how they join.

    image (H, W)  --window-->  (height, width)  --resize-->  scaled  --part from offset on-->  size  --mirror, flip-->

Several in a row are one, as long as no more than one of them resizes and none pads, so that a list such as
[Resize(256), RandomCrop(224), RandomHorizontalFlip()] reads each pixel once and rounds it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

PaddingMode = Literal["constant", "edge", "reflect", "symmetric"]
Whole = NDArray[np.int64]
Flags = NDArray[np.bool_]


class MovesPlaces:
    """Moves places in the images as a placement moves their pixels; its attributes are described there."""

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
        """Height and width that windows are resized to."""
        raise NotImplementedError

    def move_points(self, points: torch.Tensor) -> torch.Tensor:
        """Pixel positions of the source, float32 (B, P, 2) as (x, y), in the output; outside it where they are cut off.

        As torchvision's keypoints: resizing multiplies, and mirroring takes x to width - 1 - x.
        """
        moved = self._scaled_and_shifted(points)
        last = _pair(self.size[1] - 1, self.size[0] - 1, points)
        return torch.where(self._turned(points)[:, None, :], last - moved, moved)

    def move_boxes(self, boxes: torch.Tensor) -> torch.Tensor:
        """Boxes of the source, float32 (B, 4) or (B, M, 4) as x1, y1, x2, y2, in the output; not clamped to it.

        As torchvision's: x2 and y2 are edges and not pixels, so mirroring takes x to width - x.
        """
        corners = self._scaled_and_shifted(boxes.reshape(len(boxes), boxes.shape[1:].numel() // 2, 2))
        swapped = corners.view(*boxes.shape[:-1], 2, 2).flip(-2).view_as(corners)
        other_end = _pair(self.size[1], self.size[0], boxes) - swapped
        return torch.where(self._turned(boxes)[:, None, :], other_end, corners).view(boxes.shape)

    def _scaled_and_shifted(self, points: torch.Tensor) -> torch.Tensor:
        first = np.stack([self.left, self.top], axis=1)
        scaled_height, scaled_width = self._scaled()
        factor = np.stack([scaled_width / self.width, scaled_height / self.height], axis=1)
        offset = np.stack([self.offset_x, self.offset_y], axis=1)
        # (p - first) * factor - offset, with one product and one sum: both constants are rounded once.
        scale = torch.from_numpy(factor.astype(np.float32)).to(points.device, non_blocking=True)
        shift = torch.from_numpy((first * factor + offset).astype(np.float32)).to(points.device, non_blocking=True)
        return points * scale[:, None, :] - shift[:, None, :]

    def _turned(self, like: torch.Tensor) -> torch.Tensor:
        turned = torch.from_numpy(np.stack([self.mirrored, self.flipped], axis=1))
        return turned.to(like.device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Placement(MovesPlaces):
    """B output images as parts of B source images, each by its own numbers; axis-aligned.

    Attributes:
        top, left, height, width: int64 (B,), the window of the source, in pixels; it lies within the image unless
            `padding` says what is seen outside.
        scaled: (height, width) that the window is resized to, by antialiased bilinear interpolation.
        offset_y, offset_x: int64 (B,), first row and column shown of the resized window.
        size: (height, width) of the output.
        mirrored, flipped: bool (B,), then mirrored left to right, or turned upside down.
        padding: None where windows lie within their images. Only where nothing is resized.
        fill: value seen outside the image with padding "constant", one or one a channel.
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
        """Whether any window changes its size, so that values are mixed."""
        return bool((self.height != self.scaled[0]).any() or (self.width != self.scaled[1]).any())

    def _scaled(self) -> tuple[int, int]:
        return self.scaled

    @property
    def partial(self) -> bool:
        """Whether only a part of the resized window is shown."""
        return self.scaled != self.size

    def table(self) -> Whole:
        """The numbers of each sample, int64 (B, 8): window, offset, mirrored, flipped."""
        columns = (self.top, self.left, self.height, self.width, self.offset_y, self.offset_x)
        return np.stack([*columns, self.mirrored, self.flipped], axis=1)

    def then(self, after: Placement) -> Placement:
        """This placement and then another one of its output, as one.

        At most one of them resizes, and neither pads: the caller has seen to that.
        """
        assert self.padding is None and after.padding is None, "padded windows are placed one by one"
        # Seen from before the turns of `self`, windows of `after` begin at the other end.
        window_top = np.where(self.flipped, self.size[0] - after.top - after.height, after.top)
        window_left = np.where(self.mirrored, self.size[1] - after.left - after.width, after.left)
        offset_y = np.where(self.flipped, after.scaled[0] - after.offset_y - after.size[0], after.offset_y)
        offset_x = np.where(self.mirrored, after.scaled[1] - after.offset_x - after.size[1], after.offset_x)
        mirrored, flipped = self.mirrored ^ after.mirrored, self.flipped ^ after.flipped
        if after.resized:
            assert not self.resized, "values are mixed once"
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
        )._unresized_windows_shown_whole()

    def _unresized_windows_shown_whole(self) -> Placement:
        """The same with windows cut down to what is shown of them, where nothing is resized."""
        if self.resized or not self.partial:
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
    """Windows of one size at each sample's own place, (B,) rows and columns, nothing resized."""
    height, width = (np.full(len(top), side) for side in size)
    return _unturned(top, left, height, width, size, padding=padding, fill=fill)


def resized(top: Whole, left: Whole, height: Whole, width: Whole, size: tuple[int, int]) -> Placement:
    """Windows of each sample's own place and size, all (B,), resized to one size."""
    return _unturned(top, left, height, width, size)


def turned(image: tuple[int, int], *, mirrored: Flags | None = None, flipped: Flags | None = None) -> Placement:
    """Whole images (height, width), those that are True, (B,), mirrored left to right or turned upside down."""
    given = mirrored if mirrored is not None else flipped
    assert given is not None, "one of the two says how many samples there are"
    zeros, none = np.zeros(len(given), np.int64), np.zeros(len(given), np.bool_)
    return replace(
        windows(zeros, zeros, image),
        mirrored=none if mirrored is None else mirrored,
        flipped=none if flipped is None else flipped,
    )


def joined(placements: Sequence[Placement]) -> Placement:
    """Placements, one or more, one after the other, as one; see `Placement.then`."""
    first, *others = placements
    for other in others:
        first = first.then(other)
    return first


def _unturned(
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


def _pair(x: int, y: int, like: torch.Tensor) -> torch.Tensor:
    # Made on the host and sent: eight bytes, which no stream waits for.
    return torch.tensor([x, y], dtype=torch.float32).to(like.device, non_blocking=True)
