"""The transforms at the head of a list that give images of different sizes one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import OptionError
from fastload.transforms.boxes_and_points import Coordinates
from fastload.transforms.draws import Draws
from fastload.transforms.engine.pipeline import apply_transforms
from fastload.transforms.engine.placement import Placement
from fastload.transforms.geometry import PlacedTransform, RandomFlip, Resize, joint_placement
from fastload.transforms.spec import ImageSpec


@dataclass(frozen=True)
class DecodeTimeResize:
    """The first transforms of a list, up to the one after which all images have one size.

        flips  ->  RandomResizedCrop | Resize((h, w)) | Resize(n) -> flips -> CenterCrop | RandomCrop

    Each draws the numbers that it draws for a batch of images of one size, so a sample is cut alike however it is
    stored. What one placement cannot do (padding, two resizes) is done sample by sample.

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

    @property
    def resizes(self) -> int:
        """The number of transforms that resize."""
        return sum(transform.resizes for transform in self.transforms)

    @property
    def pads(self) -> bool:
        """Whether any of the transforms pads, or would pad a small image."""
        return any(transform.pads(np.ones((1, 2), np.int64)) for transform in self.transforms)

    def with_flips(self) -> DecodeTimeResize:
        """Returns the head with the flips that follow it: placed with the same call, they cost no pass of their own."""
        flips = tuple(takewhile(lambda transform: isinstance(transform, RandomFlip), self.rest))
        return replace(self, transforms=(*self.transforms, *flips), rest=self.rest[len(flips) :])

    def check(self, shapes: NDArray[np.integer[Any]]) -> None:
        """Raises OptionError if images of shapes (B, 2) cannot be transformed, with the size of one of them."""
        sizes = np.asarray(shapes, np.int64)
        for transform in self.transforms:
            # Whatever is too small for a transform, the lowest or the narrowest image is.
            for sample in {*sizes.argmin(axis=0).tolist()} if len(shapes) else ():
                height, width = sizes[sample].tolist()
                try:
                    transform.output(self.spec._replace(height=height, width=width))
                except OptionError as exc:
                    reason = f"{self.name}, an image of {shapes[sample][0]}x{shapes[sample][1]}: {exc}"
                    raise OptionError(self._with_hint(reason)) from None
            sizes = np.broadcast_to(transform.target(sizes), shapes.shape)

    def _with_hint(self, reason: str) -> str:
        """Returns a message about a crop that is larger than its image, with what this list can do about it."""
        limits = [transform for transform in self.transforms if isinstance(transform, Resize) and transform.max_size]
        said, choose, hint = reason.partition(" Choose ")
        if choose and limits:
            (size,), most = limits[0].size, limits[0].max_size
            return f"{said} Resize's max_size={most} leaves a shorter side below {size} here: leave max_size out."
        if not any(transform.resizes for transform in self.transforms):
            hint += f" Or enlarge small images first, with Resize({max(self.size)}) before it."
        return said + choose + hint

    def placement(self, shapes: NDArray[np.integer[Any]], draws: Draws) -> Placement | None:
        """Returns where pixels of images of shapes (B, 2) come from; None: no one placement says it, see `apply_each`.

        Raises:
            OptionError: an image is too small for its crop; the message has its size.
        """
        self.check(shapes)
        sizes = whole = np.asarray(shapes, np.int64)
        if self.spec.dtype != torch.uint8 or self.resizes > 1:
            return None
        for transform in self.transforms:
            if transform.pads(sizes):
                return None
            sizes = transform.target(sizes)
        return joint_placement(enumerate(self.transforms), whole, draws)

    def apply_each(
        self,
        images: Sequence[torch.Tensor],
        fields: Mapping[str, Sequence[torch.Tensor] | torch.Tensor],
        draws: Draws,
        *,
        ignore_index: int = 0,
        coordinates: Mapping[str, Coordinates] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Returns "images", (B, C, h, w) in channels_last memory, and the fields after the head, run sample by sample.

        Args:
            images: B of them, (C, H, W) each.
            fields: of the other fields "masks", B of (H, W), and those in `coordinates`; B of each.
            draws: for the batch's samples.
            ignore_index: what masks hold where padding was added.
            coordinates: how fields hold boxes and points.
        """
        output = torch.empty((len(images), *self.size, self.spec.channels), dtype=self.spec.dtype, device="cpu")
        made = []
        for index, image in enumerate(images):
            sample = {"images": image[None]} | {name: values[index][None] for name, values in fields.items()}
            drawn = draws.of_samples(slice(index, index + 1))
            made.append(
                apply_transforms(self.transforms, sample, drawn, ignore_index=ignore_index, coordinates=coordinates)
            )
            output[index] = made[-1].pop("images")[0].permute(1, 2, 0)
        others = {name: torch.cat([one[name] for one in made]) for name in fields if made}
        return {"images": output.permute(0, 3, 1, 2), **others}


def find_decode_time_resize(
    transforms: Sequence[Any], channels: int, dtype: torch.dtype, *, name: str
) -> DecodeTimeResize:
    """Returns the transforms at the head of a list that give images of some channels and dtype one size.

    The name, of the file or dataset, is for errors.

    Raises:
        OptionError: no transform does, or one that is not a flip or a resize stands before it.
    """
    for index, transform in enumerate(transforms):
        if isinstance(transform, PlacedTransform) and len(transform.size) == 2:
            head, rest = tuple(transforms[: index + 1]), tuple(transforms[index + 1 :])
            return DecodeTimeResize(head, rest, ImageSpec(channels, *transform.size, dtype), name)
        if not isinstance(transform, (RandomFlip, Resize)):
            raise OptionError(
                f"{name}: its images differ in size, and transform number {index}, {transform!r}, stands before any "
                f"that gives them one. {_FIX}"
            )
    begins = f"; the list has only {list(transforms)!r}" if transforms else ""
    raise OptionError(
        f"{name}: its images differ in size, so a batch needs a transform that gives them one{begins}. {_FIX}"
    )


def find_placed_head(transforms: Sequence[Any], channels: int, dtype: torch.dtype, *, name: str) -> DecodeTimeResize:
    """Returns the first transforms that one placement describes, maybe none; images keep sizes of their own after them.

    They are crops, flips and at most one resize of uint8 images, without padding.
    """
    head: list[PlacedTransform] = []
    for transform in transforms if dtype == torch.uint8 else ():
        placed = isinstance(transform, PlacedTransform) and not transform.pads(np.ones((1, 2), np.int64))
        if not placed or sum(one.resizes for one in (*head, transform)) > 1:
            break
        head.append(transform)
    sizes = [transform.size for transform in head if len(transform.size) == 2]
    size = sizes[-1] if sizes else (0, 0)
    return DecodeTimeResize(tuple(head), tuple(transforms[len(head) :]), ImageSpec(channels, *size, dtype), name)


_FIX = (
    "Begin the list with one, for training transform=[RandomResizedCrop(224), RandomHorizontalFlip(), ...], for "
    "evaluation transform=[Resize(256), CenterCrop(224), ...], or pack with --size."
)
