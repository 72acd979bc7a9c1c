"""Applies a list of transforms to a batch, and checks beforehand that they fit it and one another.

A `SizeHead` runs those at the head of a list that give images of different sizes one size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import OptionError
from fastload.transforms.boxes_and_points import COORDINATE_FIELDS, Coordinates, as_handed_over, as_moved
from fastload.transforms.draws import Draws
from fastload.transforms.engine.buffers import OutputPool
from fastload.transforms.engine.fuse import FusedPass, Images, gathered, passes_of, run_pass
from fastload.transforms.engine.place import place_masks
from fastload.transforms.engine.placement import ImageRows, PlacedImages, Placement
from fastload.transforms.geometry import PlacedTransform, RandomFlip, Resize, joint_placement
from fastload.transforms.normalize import Normalize
from fastload.transforms.spec import (
    BatchTransform,
    CheckedTransform,
    GeometricTransform,
    ImageSpec,
    MovesCoordinates,
    Transform,
)

ImageFunction = Callable[[torch.Tensor], torch.Tensor]
"""A function of the user's that takes and returns an image batch (B, C, H, W)."""

_mask_pool = OutputPool()


def check_pipeline(
    transforms: Sequence[Transform | BatchTransform | ImageFunction],
    image_shape: tuple[int, int, int],
    dtype: torch.dtype,
    fields: Iterable[str],
    coordinates: Mapping[str, Coordinates] | None = None,
    *,
    done: int = 0,
) -> ImageSpec | None:
    """Returns the spec of the images that the transforms make; None after a function whose output is not known.

    Args:
        transforms: in the order they run.
        image_shape: (C, H, W), as an image arrives in a batch.
        dtype: of the images, torch.uint8 or torch.uint16.
        fields: names of all fields of the batch.
        coordinates: how fields hold boxes and points, as far as it is known.
        done: how many transforms have run when an image has that shape: the size head.

    Raises:
        OptionError: a transform that is none, does not fit the images or stands after Normalize; one that moves pixels
            where a field holds coordinates that cannot follow, or that cannot move the masks.
    """
    if not isinstance(transforms, Sequence):
        raise OptionError(
            f"transform: expected a list of transforms in the order they run, got {type(transforms).__name__}. "
            f"Write transform=[...], also around a single one."
        )
    names = list(fields)
    spec: ImageSpec | None = ImageSpec(*image_shape, dtype)
    normalized = False
    for index, transform in enumerate(transforms):
        known = isinstance(transform, (Transform, BatchTransform))
        if isinstance(transform, type) or not (known or callable(transform)):
            raise OptionError(
                f"transform: {transform!r} is not a transform. Give an object such as RandomHorizontalFlip() (with its "
                f"parentheses), or a function that takes and returns an image batch (B, C, H, W)."
            )
        if isinstance(transform, BatchTransform):
            transform.check_fields(names)
        elif isinstance(transform, Transform):
            if normalized:
                raise OptionError(
                    f"transform: {_name(transform)} stands after Normalize. Normalize comes last, so that all others "
                    f"move bytes and not floats: put it at the end of the list (only MixUp and CutMix may follow)."
                )
            if transform.geometric:
                _check_moved_fields(transform, names, coordinates or {})
        normalized |= isinstance(transform, Normalize)
        if index >= done and not isinstance(transform, BatchTransform):
            maker: object = transform
            spec = maker.output(spec) if spec is not None and isinstance(maker, CheckedTransform) else None
    return spec


def apply_transforms(
    transforms: Sequence[Transform | BatchTransform | ImageFunction],
    fields: Mapping[str, torch.Tensor | ImageRows | PlacedImages],
    draws: Draws,
    *,
    ignore_index: int = 0,
    batch_draws: Draws | None = None,
    coordinates: Mapping[str, Coordinates] | None = None,
    output: torch.Tensor | None = None,
    kept: bool = False,
    done: int = 0,
) -> dict[str, torch.Tensor]:
    """Returns the batch's fields with "images" transformed, and masks, boxes and points, where present, moved alike.

    Transform i of the list draws from stream i, so each draws independently, and leaving the last one out changes
    nothing for the others. Neighbours that fit together run in one pass over the pixels; see `fuse.py`.

    Args:
        transforms: in the order they run, as `check_pipeline` accepted them.
        fields: by name; "images" (B, C, H, W), or not gathered or made yet, "masks" (B, H, W). They are not written to.
        draws: for the batch's samples.
        ignore_index: value of masks where padding was added.
        batch_draws: for the batch as a whole, for transforms that mix samples.
        coordinates: how fields hold boxes and points.
        output: on the CPU, memory that the images may be written to, if the last transform supports it.
        kept: whether the given batch will be used again, so that functions must not write to it.
        done: how many transforms, from the first on, have been applied to the fields already (the size head).

    Raises:
        OptionError: a user's function returned images that do not fit the other fields, or wrote to those it was given.
    """
    given: object = fields
    if not isinstance(given, Mapping) or "images" not in given:
        raise OptionError('apply_transforms takes a dict of fields, with the batch (B, C, H, W) as "images"')
    images: Images = fields["images"]
    count = len(images.samples if isinstance(images, ImageRows) else images)
    if len(draws) != count:
        raise OptionError(f"draws are for {len(draws)} samples, and the batch has {count}: give Draws of its rows")
    others = {name: tensor for name, tensor in fields.items() if name != "images" and isinstance(tensor, torch.Tensor)}
    spec = ImageSpec.of(images) if isinstance(images, torch.Tensor) else images.spec
    moves = any(isinstance(transform, Transform) and transform.geometric for transform in transforms[done:])
    moved = as_moved(others, coordinates) if moves and coordinates else {}
    parts = passes_of(transforms[done:], spec, first=done)
    for number, part in enumerate(parts):
        if isinstance(part, FusedPass):
            placement = part.placement(spec, draws)
            if part.moves and "masks" in others:
                others["masks"] = place_masks(others["masks"], placement, ignore_index, _mask_pool)
            if part.moves:
                moved = placement.move(moved)
            images = run_pass(part, images, placement, spec, draws, output if number == len(parts) - 1 else None)
        else:
            index, transform = part
            images = gathered(images)
            if isinstance(transform, BatchTransform):
                assert batch_draws is not None, "transforms that mix samples need draws for the batch"
                mixed = transform.apply_batch({"images": images, **others}, batch_draws.stream(index))
                images, others = mixed.pop("images"), mixed
            elif isinstance(transform, Transform):
                if transform.geometric and "masks" in others:
                    assert isinstance(transform, GeometricTransform), "check_pipeline refuses those that move no masks"
                    others["masks"] = transform.apply_masks(others["masks"], draws.stream(index), ignore_index)
                if transform.geometric:
                    for name, values in moved.items():
                        moved[name] = _moved(transform, values, spec, draws.stream(index))
                images = transform.apply(images, draws.stream(index))
            else:
                followers = [name for name in others if name == "masks" or name in moved]
                images = _called(transform, index, images, followers, kept=kept and images is fields["images"])
        spec = ImageSpec.of(gathered(images))
    images = gathered(images)
    if moved:
        others |= as_handed_over(moved, others, coordinates or {}, (spec.height, spec.width))
    return {name: images if name == "images" else others[name] for name in fields}


def _moved(transform: Transform, values: torch.Tensor, spec: ImageSpec, draws: Draws) -> torch.Tensor:
    """Returns points or boxes in images of a spec where the transform moves them."""
    assert isinstance(transform, MovesCoordinates), "check_pipeline refuses those that cannot move coordinates"
    return (transform.move_points if values.shape[-1] == 2 else transform.move_boxes)(values, spec, draws)


def _called(
    function: ImageFunction, index: int, images: torch.Tensor, followers: list[str], *, kept: bool
) -> torch.Tensor:
    """Returns what a user's function makes of the images, checked to fit labels, masks and further echoes."""
    version = images._version
    result: object = function(images)
    what = f"transform: {_name(function)}, number {index} of the list,"
    if not isinstance(result, torch.Tensor) or len(result) != len(images):
        found = f"{tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        raise OptionError(
            f"{what} was given images {tuple(images.shape)} and returned {found}. A function in transform returns a "
            f"tensor of as many images as it is given."
        )
    if kept and images._version != version:
        raise OptionError(
            f"{what} wrote to the images it was given, which the next echo of the batch begins with. Let it return a "
            f"new tensor, for example by images = images.clone() in its first line."
        )
    if followers and result.shape[2:] != images.shape[2:]:
        raise OptionError(
            f"{what} made images of {tuple(result.shape[2:])} out of {tuple(images.shape[2:])} (height, width), and "
            f"{' and '.join(followers)} cannot follow. Use a transform of fastload, or an object that moves them; see "
            f"fastload/transforms/spec.py."
        )
    return result


def _check_moved_fields(transform: Transform, fields: list[str], coordinates: Mapping[str, Coordinates]) -> None:
    unable = f"{_name(transform)} has no move_points and move_boxes to move them with the pixels"
    for name in fields:
        if name in coordinates:
            why = coordinates[name].unusable or ("" if isinstance(transform, MovesCoordinates) else unable)
        else:
            why = "nothing says what its numbers are" if name in COORDINATE_FIELDS else ""
        if why:
            raise OptionError(
                f"transform: {_name(transform)} moves pixels, and the coordinates in {name} cannot follow: {why}. "
                f"Leave {name} out of fields, or {_name(transform)} out of transform."
            )
    if "masks" in fields and not isinstance(transform, GeometricTransform):
        raise OptionError(
            f"transform: {_name(transform)} moves pixels, and has no apply_masks to move the masks with them. "
            f"Add apply_masks(masks, draws, fill), or leave masks out of fields."
        )


def _name(transform: Any) -> str:
    return str(getattr(transform, "__name__", type(transform).__name__))


@dataclass(frozen=True)
class SizeHead:
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
        """How many of the transforms resize."""
        return sum(transform.resizes for transform in self.transforms)

    @property
    def pads(self) -> bool:
        """Whether any of the transforms pads, or would pad a small image."""
        return any(transform.pads(np.ones((1, 2), np.int64)) for transform in self.transforms)

    def with_flips(self) -> SizeHead:
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


def find_size_head(transforms: Sequence[Any], channels: int, dtype: torch.dtype, *, name: str) -> SizeHead:
    """Returns the transforms at the head of a list that give images of some channels and dtype one size.

    The name, of the file or dataset, is for errors.

    Raises:
        OptionError: no transform does, or one that is not a flip or a resize stands before it.
    """
    for index, transform in enumerate(transforms):
        if isinstance(transform, PlacedTransform) and len(transform.size) == 2:
            head, rest = tuple(transforms[: index + 1]), tuple(transforms[index + 1 :])
            return SizeHead(head, rest, ImageSpec(channels, *transform.size, dtype), name)
        if not isinstance(transform, (RandomFlip, Resize)):
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
