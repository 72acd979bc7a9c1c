"""Runs the transforms at the head of a list that give images of different sizes one size, a batch at a time.

    flips  ->  RandomResizedCrop | Resize((h, w)) | Resize(n) -> flips -> CenterCrop | RandomCrop

Each draws the numbers that it draws for a batch of images of one size, so a sample is cut alike however it is stored.
What one placement cannot do (padding, two resizes) is done sample by sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import OptionError
from fastload.transforms.boxes_and_points import Coordinates
from fastload.transforms.draws import Draws
from fastload.transforms.engine.pipeline import apply_transforms
from fastload.transforms.engine.place import PlacedTransform
from fastload.transforms.engine.placement import Flags, VariedPlacement, Whole
from fastload.transforms.geometry import (
    CenterCrop,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from fastload.transforms.spec import ImageSpec

_Flip = RandomHorizontalFlip | RandomVerticalFlip


@dataclass(frozen=True)
class SizeHead:
    """The first transforms of a list, up to the one after which all images have one size.

    Attributes:
        transforms: those transforms, in the order they run; transform i draws from stream i.
        rest: the transforms that follow.
        spec: of the images after the head.
        name: of the file or dataset, for errors.
    """

    transforms: tuple[PlacedTransform, ...]
    rest: tuple[Any, ...]
    spec: ImageSpec
    name: str

    @property
    def count(self) -> int:
        """The number of transforms in the head."""
        return len(self.transforms)

    @property
    def size(self) -> tuple[int, int]:
        """The (height, width) of the images after the head."""
        return self.spec.height, self.spec.width

    def with_flips(self) -> SizeHead:
        """Returns the head with the flips that follow it: placed with the same call, they cost no pass of their own."""
        more = next((i for i, transform in enumerate(self.rest) if not isinstance(transform, _Flip)), len(self.rest))
        return replace(self, transforms=(*self.transforms, *self.rest[:more]), rest=self.rest[more:])

    def check(self, shapes: NDArray[np.integer[Any]]) -> None:
        """Raises OptionError if images cannot be transformed, with the size of the first such image.

        Args:
            shapes: (B, 2), height and width of each image.
        """
        heights, widths = _sides(shapes)
        resizes = any(transform.resizes for transform in self.transforms)
        limits = [transform for transform in self.transforms if isinstance(transform, Resize) and transform.max_size]
        for transform in self.transforms:
            for sample in _suspects(transform, heights, widths).tolist():
                try:
                    transform.output(self._spec_of(int(heights[sample]), int(widths[sample])))
                except OptionError as exc:
                    height, width = shapes[sample].tolist()
                    reason, choose, hint = str(exc).partition(" Choose ")
                    hint = choose + hint
                    if choose and limits:
                        (size,), most = limits[0].size, limits[0].max_size
                        hint = f" Resize's max_size={most} leaves a shorter side below {size} here: leave max_size out."
                    elif not resizes:
                        hint += f" Or enlarge small images first, with Resize({max(self.size)}) before it."
                    raise OptionError(f"{self.name}, an image of {height}x{width}: {reason}{hint}") from None
            heights, widths = _after(transform, heights, widths)

    def placement(self, shapes: NDArray[np.integer[Any]], draws: Draws) -> VariedPlacement | None:
        """Returns where each sample's pixels come from; None where one placement cannot say it: see `apply_each`.

        Args:
            shapes: (B, 2), height and width of each source image.
            draws: for the batch's samples.

        Raises:
            OptionError: an image is too small for its crop; the message has its size.
        """
        self.check(shapes)
        heights, widths = _sides(shapes)
        if self.spec.dtype != torch.uint8 or sum(transform.resizes for transform in self.transforms) > 1:
            return None
        zeros, none = np.zeros(len(heights), np.int64), np.zeros(len(heights), np.bool_)
        placed = VariedPlacement(zeros, zeros, heights, widths, heights, widths, zeros, zeros, none, none, self.size)
        for index, transform in enumerate(self.transforms):
            stream = draws.stream(index)
            if isinstance(transform, RandomCrop) and _pads(transform, heights, widths).any():
                return None
            if isinstance(transform, RandomHorizontalFlip):
                placed = placed.flips(mirrored=stream.uniform() < transform.p)
            elif isinstance(transform, RandomVerticalFlip):
                placed = placed.flips(flipped=stream.uniform() < transform.p)
            else:
                placed = _placed(transform, placed, heights, widths, stream)
                heights, widths = _after(transform, heights, widths)
        return _trimmed(placed)

    def apply_each(
        self,
        images: Sequence[torch.Tensor],
        fields: Mapping[str, Sequence[torch.Tensor] | torch.Tensor],
        draws: Draws,
        *,
        ignore_index: int = 0,
        coordinates: Mapping[str, Coordinates] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Returns the batch after the head, which runs sample by sample.

        Args:
            images: B of them, (C, H, W) each.
            fields: of the other fields "masks", B of (H, W), and those in `coordinates`; B of each.
            draws: for the batch's samples.
            ignore_index: what masks hold where padding was added.
            coordinates: how fields hold boxes and points.

        Returns:
            "images", (B, C, h, w) in channels_last memory, and the fields, stacked.

        Raises:
            OptionError: an image is too small for its crop; the message has its size.
        """
        self.check(np.array([image.shape[1:] for image in images]).reshape(-1, 2))
        spec = self.spec
        output = torch.empty((len(images), *self.size, spec.channels), dtype=spec.dtype, device="cpu")
        stacked: dict[str, list[torch.Tensor]] = {name: [] for name in fields}
        for index, image in enumerate(images):
            sample = {name: values[index][None] for name, values in fields.items()}
            done = apply_transforms(
                self.transforms,
                {"images": image[None], **sample},
                draws.of_sample(index),
                ignore_index=ignore_index,
                coordinates=coordinates,
            )
            output[index] = done.pop("images")[0].permute(1, 2, 0)
            for name, value in done.items():
                stacked[name].append(value)
        others = {name: torch.cat(values) for name, values in stacked.items() if values}
        return {"images": output.permute(0, 3, 1, 2), **others}

    def _spec_of(self, height: int, width: int) -> ImageSpec:
        return self.spec._replace(height=height, width=width)


def find_size_head(transforms: Sequence[Any], channels: int, dtype: torch.dtype, *, name: str) -> SizeHead:
    """Returns the transforms at the head of a list that give all images one size.

    Args:
        transforms: in the order they run.
        channels: of the images.
        dtype: of the images, torch.uint8 or torch.uint16.
        name: of the file or dataset, for errors.

    Raises:
        OptionError: no transform does, or one that is not a flip or a resize stands before it.
    """
    for index, transform in enumerate(transforms):
        size = _size_made(transform)
        if size is not None:
            head, rest = tuple(transforms[: index + 1]), tuple(transforms[index + 1 :])
            return SizeHead(head, rest, ImageSpec(channels, *size, dtype), name)
        if not isinstance(transform, (*_Flip.__args__, Resize)):
            raise OptionError(
                f"{name}: its images differ in size, and transform number {index}, {transform!r}, stands before any "
                f"that gives them one. {_FIX}"
            )
    begins = f"; the list has only {list(transforms)!r}" if transforms else ""
    raise OptionError(
        f"{name}: its images differ in size, so a batch needs a transform that gives them one{begins}. {_FIX}"
    )


_FIX = (
    "Begin the list with one, for training transform=[RandomResizedCrop(224), RandomHorizontalFlip(), ...], for "
    "evaluation transform=[Resize(256), CenterCrop(224), ...], or pack with --size."
)


def _size_made(transform: object) -> tuple[int, int] | None:
    """Returns the size that all images have after a transform, whatever they had before; None if they may differ."""
    if isinstance(transform, (RandomResizedCrop, RandomCrop, CenterCrop)):
        return transform.size
    if isinstance(transform, Resize) and len(transform.size) == 2:
        return transform.size
    return None


def _sides(shapes: NDArray[np.integer[Any]]) -> tuple[Whole, Whole]:
    wide = np.asarray(shapes, dtype=np.int64)
    return wide[:, 0], wide[:, 1]


def _after(transform: PlacedTransform, heights: Whole, widths: Whole) -> tuple[Whole, Whole]:
    """Returns heights and widths of images of these sizes after a transform."""
    if isinstance(transform, Resize):
        return transform.targets(heights, widths)
    size = _size_made(transform)
    return (heights, widths) if size is None else (np.full(len(heights), size[0]), np.full(len(widths), size[1]))


def _pads(transform: RandomCrop, heights: Whole, widths: Whole) -> Flags:
    small = (heights < transform.size[0]) | (widths < transform.size[1])
    return small & transform.pad_if_needed | any(transform.padding)


def _suspects(transform: PlacedTransform, heights: Whole, widths: Whole) -> Whole:
    """Returns the indices of the images that a transform may refuse, one of each size."""
    small = (heights < 1) | (widths < 1)
    if isinstance(transform, (RandomCrop, CenterCrop)):
        small |= (heights < transform.size[0]) | (widths < transform.size[1])
    if isinstance(transform, RandomCrop):
        small |= _pads(transform, heights, widths)
    refused = np.flatnonzero(small)
    _, firsts = np.unique(np.stack([heights[refused], widths[refused]]), axis=1, return_index=True)
    return refused[np.sort(firsts)]


def _placed(
    transform: PlacedTransform, placed: VariedPlacement, heights: Whole, widths: Whole, draws: Draws
) -> VariedPlacement:
    """Returns a placement of whole images, flipped and resized or not, followed by a transform that cuts or resizes."""
    if isinstance(transform, Resize):
        scaled_height, scaled_width = transform.targets(heights, widths)
        return replace(placed, scaled_height=scaled_height, scaled_width=scaled_width)
    size = _size_made(transform)
    assert size is not None, "all others make one size"
    if isinstance(transform, RandomResizedCrop):
        tops, lefts, high, wide = transform.windows(heights, widths, draws)
    else:
        high, wide = (np.full(len(heights), side) for side in size)
        assert isinstance(transform, (RandomCrop, CenterCrop))
        crop = transform
        tops, lefts = (
            crop.corners(heights, widths) if isinstance(crop, CenterCrop) else crop.corners(heights, widths, draws)
        )
    # Where images are flipped, windows begin at the other end of the image before the flip.
    tops = np.where(placed.flipped, heights - tops - high, tops)
    lefts = np.where(placed.mirrored, widths - lefts - wide, lefts)
    if isinstance(transform, RandomResizedCrop):
        scaled_height, scaled_width = (np.full(len(heights), side) for side in size)
        return replace(
            placed,
            top=tops,
            left=lefts,
            height=high,
            width=wide,
            scaled_height=scaled_height,
            scaled_width=scaled_width,
        )
    return replace(placed, offset_y=tops, offset_x=lefts)


def _trimmed(placed: VariedPlacement) -> VariedPlacement:
    """Returns the placement with windows cut to the part that is shown, where they are not resized: less is read."""
    p = placed
    same = (p.height == p.scaled_height) & (p.width == p.scaled_width)
    height, width = p.size
    return replace(
        p,
        top=np.where(same, p.top + p.offset_y, p.top),
        left=np.where(same, p.left + p.offset_x, p.left),
        height=np.where(same, height, p.height),
        width=np.where(same, width, p.width),
        scaled_height=np.where(same, height, p.scaled_height),
        scaled_width=np.where(same, width, p.scaled_width),
        offset_y=np.where(same, 0, p.offset_y),
        offset_x=np.where(same, 0, p.offset_x),
    )
