"""Applies a list of transforms to a batch, and checks beforehand that they fit it and one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import OptionError
from fastload.transforms.boxes_and_points import COORDINATE_FIELDS, Coordinates, as_handed_over, as_moved
from fastload.transforms.draws import Draws
from fastload.transforms.engine.buffers import OutputPool
from fastload.transforms.engine.fuse import (
    DrawnPass,
    FusedPass,
    Images,
    device_of,
    drawn_now,
    gathered,
    passes_of,
    run_pass,
)
from fastload.transforms.engine.gpu import PassTables
from fastload.transforms.engine.place import place_masks
from fastload.transforms.engine.placement import ImageRows, PlacedImages, Placement, moved_coordinates
from fastload.transforms.normalize import Normalize
from fastload.transforms.spec import (
    BatchTransform,
    CheckedTransform,
    GeometricTransform,
    ImageSpec,
    MovesCoordinates,
    Transform,
)
from fastload.transforms.tv_tensors import refuse_torchvision

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
        done: how many transforms have run when an image has that shape: those run while it is decoded.

    Raises:
        OptionError: a transform is invalid, does not fit the images or stands after Normalize; it moves pixels where a
            field holds coordinates that cannot follow; or it cannot move the masks.
    """
    refuse_torchvision(transforms)
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
        done: how many transforms, from the first on, have been applied to the fields already.

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
    pipeline = Pipeline(transforms, spec_of(images), ignore_index=ignore_index, coordinates=coordinates, done=done)
    return pipeline.apply(fields, draws, batch_draws=batch_draws, output=output, kept=kept)


class _Alone(NamedTuple):
    """A transform that is part of no pass."""

    stream: int  # its index in the list
    transform: Any
    kind: Literal["mixing", "transform", "function"]


@dataclass(frozen=True)
class Drawn:
    """The random numbers of a pipeline's passes for B samples, or for B samples in each of several uses."""

    passes: list[tuple[Placement, bool]]  # of each pass: its placement, and whether any image may change its size
    samples: int  # B
    uses: int


class Pipeline:
    """A list of transforms for batches of one spec: what does not depend on the batch is decided once.

    Any thread may use it.

    Args:
        transforms: in the order they run, as `check_pipeline` accepted them.
        spec: of the images.
        ignore_index, coordinates, done: as in `apply_transforms`.
    """

    def __init__(
        self,
        transforms: Sequence[Transform | BatchTransform | ImageFunction],
        spec: ImageSpec,
        *,
        ignore_index: int = 0,
        coordinates: Mapping[str, Coordinates] | None = None,
        done: int = 0,
    ) -> None:
        self.spec = spec
        self._ignore_index, self._coordinates = ignore_index, coordinates or {}
        parts = passes_of(transforms[done:], spec, first=done)
        self._steps = [part if isinstance(part, FusedPass) else _Alone(*part, _kind(part[1])) for part in parts]
        self._passes = [part for part in parts if isinstance(part, FusedPass)]
        self._moves = any(isinstance(transform, Transform) and transform.geometric for transform in transforms[done:])

    def num_words(self, count: int) -> int:
        """Returns the words that tables of so many samples take: int32, for the kernel; 0: no pass can run by it."""
        return sum(part.words.number(count) for part in self._passes)

    def draw(self, draws: Draws, uses: int = 1, words: NDArray[np.int32] | None = None) -> Drawn:
        """Returns what the passes draw, and writes their tables to the words, if given.

        The draws are for all uses of a batch, one after another.
        """
        passes, first = [], 0
        for part in self._passes:
            stop = first + part.words.number(len(draws))
            placement = part.draw(draws, None if words is None else words[first:stop])
            passes.append((placement, placement.resized))
            first = stop
        return Drawn(passes, len(draws) // uses, uses)

    def apply(
        self,
        fields: Mapping[str, torch.Tensor | ImageRows | PlacedImages],
        draws: Draws,
        *,
        drawn: Drawn | None = None,
        words: torch.Tensor | None = None,
        use: int = 0,
        batch_draws: Draws | None = None,
        output: torch.Tensor | None = None,
        kept: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Returns the transformed fields; as `apply_transforms`, of images of this spec.

        Args:
            fields, draws, batch_draws, output, kept: as there.
            drawn: what `draw` returned for the samples; None: it is drawn now.
            words: what it wrote, on the device of the images.
            use: of the uses that it drew for.
        """
        images: Images = fields["images"]
        device = device_of(images)
        others = {name: value for name, value in fields.items() if name != "images" and isinstance(value, torch.Tensor)}
        moved = as_moved(others, self._coordinates) if self._moves and self._coordinates else {}
        passes = iter(() if drawn is None else self._drawn(drawn, words, use, device, fields))
        for step in self._steps:
            if isinstance(step, FusedPass):
                numbers = next(passes, None)
                if images is not fields["images"] and (spec := spec_of(images)) != step.spec:
                    step, numbers = replace(step, spec=spec), None  # a transform is not true to its `output`
                numbers = numbers or drawn_now(step, draws, device)
                if step.moves and "masks" in others:
                    others["masks"] = place_masks(others["masks"], numbers.placement, self._ignore_index, _mask_pool)
                if step.moves and moved:
                    moved = moved_coordinates(numbers.placement, moved)
                images = run_pass(step, images, draws, numbers, output if step is self._steps[-1] else None)
                continue
            index, transform, kind = step
            images = gathered(images)
            if kind == "mixing":
                assert batch_draws is not None, "transforms that mix samples need draws for the batch"
                mixed = transform.apply_batch({"images": images, **others}, batch_draws.stream(index))
                images, others = mixed.pop("images"), mixed
            elif kind == "transform":
                own = draws.stream(index)
                if transform.geometric and "masks" in others:
                    assert isinstance(transform, GeometricTransform), "check_pipeline refuses those that move no masks"
                    others["masks"] = transform.apply_masks(others["masks"], own, self._ignore_index)
                if transform.geometric and moved:
                    spec = ImageSpec.of(images)
                    moved = {name: _moved(transform, values, spec, own) for name, values in moved.items()}
                images = transform.apply(images, own)
            else:
                followers = [name for name in others if name == "masks" or name in moved]
                images = _called(transform, index, images, followers, kept=kept and images is fields["images"])
        images = gathered(images)
        if moved:
            others |= as_handed_over(moved, others, self._coordinates, (images.shape[2], images.shape[3]))
        return {name: images if name == "images" else others[name] for name in fields}

    def _drawn(
        self, drawn: Drawn, words: torch.Tensor | None, use: int, device: torch.device, fields: Mapping[str, Any]
    ) -> Iterator[DrawnPass | None]:
        """Yields what was drawn for each pass for one use; None: its tables are not on the device."""
        samples, total = slice(use * drawn.samples, (use + 1) * drawn.samples), drawn.uses * drawn.samples
        followed = "masks" in fields or bool(self._coordinates) or isinstance(fields["images"], PlacedImages)
        by_kernel = [part.runs_by_kernel(device) for part in self._passes]
        tables: Sequence[PassTables | None] = [None] * len(by_kernel)
        if words is not None and any(by_kernel):
            tables = self._tables(words, samples, total)
        for runs, (placement, resized), of_pass in zip(by_kernel, drawn.passes, tables, strict=True):
            if runs and of_pass is None:
                yield None
                continue
            if drawn.uses > 1 and (followed or not runs):
                placement = placement.part(samples)
            yield DrawnPass(placement, resized, of_pass if runs else None)

    def _tables(self, words: torch.Tensor, samples: slice, total: int) -> list[PassTables]:
        """Returns the tables of each pass for some of the samples that words on a device are of.

        They are kept with the words, which may lie in memory that one batch after another is copied to.
        """
        kept: dict[Any, list[PassTables]] = vars(words).setdefault("_tables", {})
        key = (self, samples.start, samples.stop, total)
        if key not in kept:
            made, begin = list[PassTables](), 0
            for part in self._passes:
                made.append(part.words.tables(words, samples, total, begin))
                begin += part.words.number(total)
            kept[key] = made
        return kept[key]


def spec_of(images: Images) -> ImageSpec:
    """Returns the spec of images, gathered or not."""
    return ImageSpec.of(images) if isinstance(images, torch.Tensor) else images.spec


def _kind(transform: object) -> Literal["mixing", "transform", "function"]:
    if isinstance(transform, BatchTransform):
        return "mixing"
    return "transform" if isinstance(transform, Transform) else "function"


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
