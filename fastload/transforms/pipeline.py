"""Runs a loader's transforms over a batch, and checks beforehand that they fit it and one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fastload.errors import OptionError
from fastload.transforms.draws import Draws
from fastload.transforms.normalize import Normalize
from fastload.transforms.spec import CheckedTransform, GeometricTransform, ImageSpec, Transform

# A callable of the user's: an image batch (B, C, H, W) in, an image batch out.
ImageFunction = Callable[[torch.Tensor], torch.Tensor]

# Fields that hold places in the image: a moved image leaves them behind.
COORDINATE_FIELDS = ("bbox", "landmarks")


def check_pipeline(
    transforms: Sequence[Transform | ImageFunction],
    image_shape: tuple[int, int, int],
    dtype: torch.dtype,
    fields: Iterable[str],
) -> ImageSpec | None:
    """The spec of the images that the transforms make of such images; None behind a function we know nothing about.

    Args:
        transforms: in the order they run.
        image_shape: (C, H, W), as an image arrives in a batch.
        dtype: of the images, torch.uint8 or torch.uint16.
        fields: names of all fields of the batch.

    Raises:
        OptionError: a transform that is none, does not fit the images or stands behind Normalize; one that moves pixels
            while a field holds coordinates, or while it cannot move the masks.
    """
    if not isinstance(transforms, Sequence):
        raise OptionError(
            f"transform: expected a list of transforms in the order they run, got {type(transforms).__name__}. "
            f"Write transform=[...], also around a single one."
        )
    names = list(fields)
    spec: ImageSpec | None = ImageSpec(*image_shape, dtype)
    normalized = False
    for transform in transforms:
        if isinstance(transform, type) or not (isinstance(transform, Transform) or callable(transform)):
            raise OptionError(
                f"transform: {transform!r} is not a transform. Give an object such as RandomHorizontalFlip() (with its "
                f"parentheses), or a function that takes and returns an image batch (B, C, H, W)."
            )
        if isinstance(transform, Transform):
            if normalized:
                raise OptionError(
                    f"transform: {_name(transform)} stands after Normalize. Normalize comes last, so that all others "
                    f"move bytes and not floats: put it at the end of the list."
                )
            if transform.geometric:
                _check_moved_fields(transform, names)
        normalized |= isinstance(transform, Normalize)
        spec = _output(transform, spec)
    return spec


def apply_transforms(
    transforms: Sequence[Transform | ImageFunction],
    fields: dict[str, torch.Tensor],
    draws: Draws,
    *,
    ignore_index: int = 0,
) -> dict[str, torch.Tensor]:
    """The batch's fields with "images" transformed, and "masks", where present, moved alike; the rest as given.

    Transform i of the list draws from stream i, so each draws independently, and leaving the last one out changes
    nothing for the others.

    Args:
        transforms: in the order they run, as `check_pipeline` accepted them.
        fields: by name; "images" (B, C, H, W), "masks" (B, H, W). None of the tensors is written to.
        draws: for the batch's samples.
        ignore_index: what masks hold where padding was added.
    """
    fields = dict(fields)
    for index, transform in enumerate(transforms):
        if not isinstance(transform, Transform):
            fields["images"] = _called(transform, fields["images"])
            continue
        stream = draws.stream(index)
        fields["images"] = transform.apply(fields["images"], stream)
        if transform.geometric and "masks" in fields:
            assert isinstance(transform, GeometricTransform), "check_pipeline refuses those that cannot move masks"
            fields["masks"] = transform.apply_masks(fields["masks"], stream, ignore_index)
    return fields


def _called(function: ImageFunction, images: torch.Tensor) -> torch.Tensor:
    """What a user's function makes of the images; checked, since labels and masks must still fit."""
    result: object = function(images)
    if not isinstance(result, torch.Tensor) or len(result) != len(images):
        found = f"{tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        raise OptionError(
            f"transform: {_name(function)} was given images {tuple(images.shape)} and returned {found}. A function in "
            f"transform returns a tensor of as many images as it is given."
        )
    return result


def _output(transform: object, spec: ImageSpec | None) -> ImageSpec | None:
    return transform.output(spec) if spec is not None and isinstance(transform, CheckedTransform) else None


def _check_moved_fields(transform: Transform, fields: list[str]) -> None:
    coordinates = [name for name in fields if name in COORDINATE_FIELDS]
    if coordinates:
        raise OptionError(
            f"transform: {_name(transform)} moves pixels, and the coordinates in {' and '.join(coordinates)} would not "
            f"follow in this release. Leave {'them' if len(coordinates) > 1 else 'it'} out of fields, or leave "
            f"{_name(transform)} out of transform."
        )
    if "masks" in fields and not isinstance(transform, GeometricTransform):
        raise OptionError(
            f"transform: {_name(transform)} moves pixels, and has no apply_masks to move the masks with them. "
            f"Add apply_masks(masks, draws, fill), or leave masks out of fields."
        )


def _name(transform: Any) -> str:
    return type(transform).__name__
