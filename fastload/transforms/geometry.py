"""Transforms that move pixels: flips, crops and resizes, drawn for each sample.

Names and parameters are torchvision's (v2). Masks, points and boxes move with the images. Flips and crops move values
as they are, of any dtype. Resizing is antialiased bilinear interpolation, as Pillow's and torchvision's (v2), rounded
to nearest; masks are resized by nearest neighbour.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import OptionError, is_whole
from fastload.system import native
from fastload.transforms.draws import Draws, rectangle_sides
from fastload.transforms.engine.place import place_images, place_masks
from fastload.transforms.engine.placement import PaddingMode, Placement, Whole, resized, windows
from fastload.transforms.spec import (
    BaseTransform,
    ImageSpec,
    as_plain,
    as_values,
    check_values,
    ordered_pair,
    probability,
    whole_sides,
    window_size,
)

_ONLY_LEVELS = "it resizes uint8 and uint16 as they lie in the file. Put it before what makes them {}."


class PlacedTransform(BaseTransform, ABC):
    """A geometric transform that only says where pixels come from: a crop, a resize or a flip.

    The pipeline joins several of them into one placement. Subclasses define `place`, extend `check` if images may not
    fit, set `resizes` if they resize, `size` if they give all images one size, and override `pads` if windows may leave
    their images.
    """

    geometric = True
    resizes = False
    """Whether windows may change their size."""
    size: tuple[int, ...] = ()
    """The (height, width) of all outputs; another length: it depends on the image."""

    def __init__(self) -> None:
        super().__init__()
        self._packed: dict[int, bytes] = {}  # by stream of random numbers, as `packed_move` returns it

    def output(self, spec: ImageSpec) -> ImageSpec:
        """Returns the spec of the output. Raises OptionError for images that cannot be transformed."""
        self.check(super().output(spec))
        height, width = self.target(spec.sizes)[0].tolist()
        return spec._replace(height=height, width=width)

    def check(self, spec: ImageSpec) -> None:
        """Raises OptionError for sizes that cannot be transformed."""
        if self.resizes and min(spec.height, spec.width) < 1:
            raise OptionError(f"{type(self).__name__}: images of {spec.height}x{spec.width} have no pixels to resize.")

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


def joint_placement(
    moves: Iterable[tuple[int, PlacedTransform]],
    sizes: Whole,
    draws: Draws,
    table: NDArray[np.int32] | None = None,
) -> Placement:
    """Returns one placement for transforms that run one after the other; each draws from the stream of its index.

    Its `table` is written to one of int32, (B * 10,), if that is given.
    """
    moves = list(moves)
    if native.library() is not None and (drawn := _drawn_natively(moves, sizes, draws, table)) is not None:
        return drawn
    placement = windows(np.zeros((len(draws), 2), np.int64), sizes)
    for index, transform in moves:
        placement = placement.then(transform.place(placement.sizes, draws.stream(index)))
    if table is not None:
        table[:] = placement.table().reshape(-1)
    return placement


class RandomFlip(PlacedTransform):
    """Turns each image about an axis with probability p."""

    axis: Literal[0, 1]

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = probability(type(self).__name__, p)

    def place(self, sizes: Whole, draws: Draws) -> Placement:
        placement = windows(np.zeros((len(draws), 2), np.int64), sizes)
        placement.turned[:, self.axis] = draws.uniform() < self.p
        return placement


class RandomHorizontalFlip(RandomFlip):
    """Mirrors each image left to right with probability p, with its masks, points and boxes.

    Takes images (B, C, H, W) of any dtype, and keeps size and dtype.

    Args:
        p: probability, 0 to 1.

    Raises:
        OptionError: p is not within [0, 1].
    """

    axis = 1


class RandomVerticalFlip(RandomFlip):
    """Flips each image upside down with probability p, with its masks, points and boxes.

    Takes images (B, C, H, W) of any dtype, and keeps size and dtype.

    Args:
        p: probability, 0 to 1.

    Raises:
        OptionError: p is not within [0, 1].
    """

    axis = 0


class RandomCrop(PlacedTransform):
    """Cuts a window of a fixed size at a random position out of each image, after padding it if asked for.

    Takes images (B, C, H, W) of any dtype, and returns (B, C, height, width) of the same dtype. Masks are cut alike,
    points and boxes shifted.

    Args:
        size: of the window in pixels, (height, width); one number for a square.
        padding: pixels added before cropping: one number for all sides, (left and right, top and bottom), or
            (left, top, right, bottom).
        pad_if_needed: whether an image that is smaller than the window is padded, on both sides by the difference.
        fill: value of constant padding in the images' own units (0 to 255 for uint8): one number, or one per channel.
        padding_mode: "constant", "edge" (repeats the last pixel), "reflect" (mirrors without repeating it) or
            "symmetric" (mirrors and repeats it).

    Raises:
        OptionError: an invalid size, padding or mode. Images that are too small, or cannot hold the fill,
            are refused when the loader is made, or at `apply`.
    """

    size: tuple[int, int]

    def __init__(
        self,
        size: int | Sequence[int],
        padding: int | Sequence[int] | None = None,
        pad_if_needed: bool = False,
        fill: float | Sequence[float] = 0,
        padding_mode: PaddingMode = "constant",
    ) -> None:
        super().__init__()
        self.size = window_size("RandomCrop", size)
        expected = (
            "padding is a whole number of pixels, (left and right, top and bottom), or (left, top, right, bottom); "
            "none is negative."
        )
        self.padding = whole_sides(
            "RandomCrop(padding", 0 if padding is None else padding, (1, 2, 4), expected, least=0
        )
        self.pad_if_needed = bool(pad_if_needed)
        self.fill = as_values("RandomCrop(fill", fill)
        if padding_mode not in get_args(PaddingMode):
            modes = ", ".join(repr(mode) for mode in get_args(PaddingMode))
            raise OptionError(f"RandomCrop(padding_mode={padding_mode!r}): no such mode. Choose one of {modes}.")
        self.padding_mode = padding_mode

    def check(self, spec: ImageSpec) -> None:
        (top, left), (bottom, right) = (sides[0].tolist() for sides in self._padding(spec.sizes))
        if spec.height + top + bottom < self.size[0] or spec.width + left + right < self.size[1]:
            padded = "with their padding " if any(self.padding) else ""
            raise OptionError(
                f"RandomCrop(size={self.size}): images of {spec.height}x{spec.width} (height x width) are {padded}"
                f"smaller than the window. Choose a smaller size, pass pad_if_needed=True, or pack larger images."
            )
        # Mirroring has only the image itself to show; "reflect" cannot use its first pixel again.
        reused = {"reflect": 1, "symmetric": 0}.get(self.padding_mode, -math.inf)
        most_high, most_wide = spec.height - reused, spec.width - reused
        if max(top, bottom) > most_high or max(left, right) > most_wide:
            raise OptionError(
                f"RandomCrop(padding_mode={self.padding_mode!r}): images of {spec.height}x{spec.width} can be "
                f"mirrored by at most {most_high} rows and {most_wide} columns, the padding is "
                f"(left, top, right, bottom) = {(left, top, right, bottom)}. Pad less, or use 'edge'."
            )
        if self.padding_mode == "constant" and (any(self.padding) or self.pad_if_needed):
            check_values("RandomCrop(fill", self.fill, spec)

    def pads(self, sizes: Whole) -> bool:
        return any(self.padding) or (self.pad_if_needed and bool((sizes < self.size).any()))

    def place(self, sizes: Whole, draws: Draws) -> Placement:
        before, after = self._padding(sizes)
        room = (sizes + before + after - self.size + 1).T
        first = np.stack([draws.stream(axis).integers(0, room[axis]) for axis in (0, 1)], axis=1) - before
        padding = self.padding_mode if self.pads(sizes) else None
        return windows(first, self.target(sizes), padding=padding, fill=self.fill)

    def _padding(self, sizes: Whole) -> tuple[Whole, Whole]:
        """Returns the rows and columns added before and behind images of these sizes, int64 (B or 1, 2) each."""
        left, top, right, bottom = self.padding
        before, after = np.array([top, left]), np.array([bottom, right])
        # As torchvision does it: both sides by all that is missing, so every position in between can be drawn.
        missing = np.maximum(0, self.size - (sizes + before + after)) if self.pad_if_needed else np.zeros_like(sizes)
        return before + missing, after + missing


class CenterCrop(PlacedTransform):
    """Cuts a window of a fixed size out of the middle of each image.

    Takes images (B, C, H, W) of any dtype, and returns (B, C, height, width) of the same dtype. Masks are cut alike,
    points and boxes shifted. Smaller images are not padded.

    Args:
        size: of the window in pixels, (height, width); one number for a square.

    Raises:
        OptionError: an invalid size. Images that are too small are refused when the loader is made, or at
            `apply`.
    """

    size: tuple[int, int]

    def __init__(self, size: int | Sequence[int]) -> None:
        super().__init__()
        self.size = window_size("CenterCrop", size)

    def check(self, spec: ImageSpec) -> None:
        if spec.height < self.size[0] or spec.width < self.size[1]:
            raise OptionError(
                f"CenterCrop(size={self.size}): images of {spec.height}x{spec.width} (height x width) are smaller than "
                f"the window. Choose a smaller size, or pack larger images with --size."
            )

    def place(self, sizes: Whole, draws: Draws) -> Placement:
        # Rounded and not //: torchvision's choice for an odd remainder (half to even).
        first = np.rint((sizes - self.size) / 2).astype(np.int64)
        return windows(np.zeros((len(draws), 2), np.int64) + first, self.target(sizes))


class Resize(PlacedTransform):
    """Resizes each image.

    Takes images (B, C, H, W), uint8 or uint16, and returns (B, C, height, width) of the same dtype. Masks are resized
    by nearest neighbour, points and boxes scaled.

    Args:
        size: (height, width) in pixels, or one number for the shorter side; the other then keeps the proportions.
        max_size: most pixels of the longer side; only with one number for size.

    Raises:
        OptionError: an invalid size. Images of other dtypes are refused when the loader is made, or at
            `apply`.
    """

    resizes = True
    wrong_dtype = _ONLY_LEVELS

    def __init__(self, size: int | Sequence[int], max_size: int | None = None) -> None:
        super().__init__()
        window_size("Resize", size)
        size = as_plain(size)
        self.size = tuple(map(int, size if isinstance(size, Sequence) else (size,)))
        if max_size is not None and (not is_whole(max_size) or len(self.size) != 1 or max_size <= self.size[0]):
            raise OptionError(
                f"Resize(size={size!r}, max_size={max_size!r}): max_size is a whole number above size, and size then "
                f"one number, the length of the shorter side."
            )
        self.max_size = max_size

    def target(self, sizes: Whole) -> Whole:
        if len(self.size) == 2:
            return super().target(sizes)
        short, long = sizes.min(axis=1), sizes.max(axis=1)
        new_short, new_long = np.full(len(sizes), self.size[0]), (self.size[0] * long / short).astype(np.int64)
        if self.max_size is not None:
            over = new_long > self.max_size
            new_short = np.where(over, (self.max_size * new_short / new_long).astype(np.int64), new_short)
            new_long = np.where(over, self.max_size, new_long)
        new_short = np.maximum(1, new_short)
        upright = sizes[:, :1] <= sizes[:, 1:]
        return np.where(upright, np.stack([new_short, new_long], axis=1), np.stack([new_long, new_short], axis=1))

    def place(self, sizes: Whole, draws: Draws) -> Placement:
        first = np.zeros((len(draws), 2), np.int64)
        return resized(first, first + sizes, self.target(sizes))


class RandomResizedCrop(PlacedTransform):
    """Cuts a part of random area, proportions and position out of each image, and resizes it to one size.

    Takes images (B, C, H, W), uint8 or uint16, and returns (B, C, height, width) of the same dtype. Masks are resized
    by nearest neighbour, points and boxes shifted and scaled.

    The area is drawn evenly from `scale`, the logarithm of width / height evenly from `ratio`; where ten such parts
    did not fit into the image, the largest central part with proportions in `ratio` is taken. As torchvision's, and
    introduced by Szegedy et al., "Going deeper with convolutions", 2015.

    Args:
        size: of the output in pixels, (height, width); one number for a square.
        scale: (smallest, largest) part of the image's area, above 0 to 1.
        ratio: (smallest, largest) width / height, above 0.

    Raises:
        OptionError: an invalid size, or bounds that are reversed or not positive. Images of other dtypes
            are refused when the loader is made, or at `apply`.
    """

    resizes = True
    wrong_dtype = _ONLY_LEVELS
    size: tuple[int, int]

    def __init__(
        self, size: int | Sequence[int], scale: Sequence[float] = (0.08, 1.0), ratio: Sequence[float] = (3 / 4, 4 / 3)
    ) -> None:
        super().__init__()
        self.size = window_size("RandomResizedCrop", size)
        self.scale = ordered_pair("RandomResizedCrop", "scale", scale, least=0, most=1)
        self.ratio = ordered_pair("RandomResizedCrop", "ratio", ratio, least=0)

    def place(self, sizes: Whole, draws: Draws) -> Placement:
        whole = np.zeros((len(draws), 2), np.int64) + sizes
        sides, found = rectangle_sides(draws, whole.prod(axis=1), self.scale, self.ratio, least=1, most=whole[:, ::-1])
        # Of images where no attempt fits: the largest central part.
        heights, widths = whole.T
        ratios = widths / heights
        high = np.where(ratios < self.ratio[0], np.rint(widths / self.ratio[0]), heights)
        wide = np.where(ratios > self.ratio[1], np.rint(heights * self.ratio[1]), widths)
        central = np.maximum(1, np.stack([high, wide], axis=1).astype(np.int64))
        window = np.where(found[:, None], sides[:, ::-1], central)
        room = whole - window
        drawn = np.stack([draws.stream(20 + axis).integers(0, room[:, axis] + 1) for axis in (0, 1)], axis=1)
        return resized(np.where(found[:, None], drawn, room // 2), window, self.target(sizes))


def _drawn_natively(
    moves: list[tuple[int, PlacedTransform]], sizes: Whole, draws: Draws, table: NDArray[np.int32] | None
) -> Placement | None:
    """Returns the joint placement as native.c draws it; None where NumPy has to."""
    packed = [packed_move(transform, index) for index, transform in moves]
    if not len(draws) or not all(packed) or sum(transform.resizes for _, transform in moves) > 1:
        return None
    found = native.draw_placement(draws.keys, sizes, packed, table)
    if found is None:
        return None
    (first, window, scaled, offset), turned = found
    padding: PaddingMode | None = None
    fill: tuple[float, ...] = (0.0,)
    for _, transform in moves:
        if isinstance(transform, RandomCrop) and transform.pads(sizes):
            padding, fill = transform.padding_mode, transform.fill
        sizes = transform.target(sizes)
    return Placement(first, window, scaled, offset, sizes, turned, padding, fill)


def packed_move(transform: PlacedTransform, stream: int) -> bytes:
    """Returns a transform as native.c takes it, drawing from a stream; empty: only `place` knows what it does."""
    if stream not in transform._packed:  # packed once: no option changes
        pack = _NATIVE.get(type(transform))
        transform._packed[stream] = pack(stream, transform) if pack is not None else b""
    return transform._packed[stream]


def _move(
    kind: str,
    stream: int,
    size: Sequence[int] = (0, 0),
    padding: Sequence[int] = (0, 0, 0, 0),
    option: int = 0,
    p: float = 0.0,
    scale: Sequence[float] = (0, 0),
    ratio: Sequence[float] = (1, 1),
) -> bytes:
    log_ratio = (math.log(end) for end in ratio)
    return native.MOVE.pack(
        native.MOVES.index(kind), stream, *size, *padding, option, p, *scale, *log_ratio, *ratio
    )  # as the struct Move of native.c


_NATIVE: dict[type, Callable[[int, Any], bytes]] = {
    RandomHorizontalFlip: lambda stream, flip: _move("flip", stream, option=1, p=flip.p),
    RandomVerticalFlip: lambda stream, flip: _move("flip", stream, option=0, p=flip.p),
    RandomCrop: lambda stream, crop: _move(
        "random crop", stream, crop.size, [crop.padding[side] for side in (1, 0, 3, 2)], crop.pad_if_needed
    ),
    CenterCrop: lambda stream, crop: _move("center crop", stream, crop.size),
    Resize: lambda stream, resize: _move("resize", stream, (*resize.size, 0)[:2], option=resize.max_size or 0),
    RandomResizedCrop: lambda stream, crop: _move(
        "random resized crop", stream, crop.size, scale=crop.scale, ratio=crop.ratio
    ),
}
"""How native.c draws transforms of exactly these classes: a derived one may place in another way."""
