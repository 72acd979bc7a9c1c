"""Applies a list of transforms to a batch, and checks beforehand that they fit it and one another.

Neighbouring transforms are fused into passes, each of which reads and writes the pixels once:

    crops, resize, flips  ->  colour  ->  erasing  ->  Normalize

A list is cut into passes of that form; a transform that fits into none runs by itself. Each step of a pass rounds as it
does alone, so a pass changes a result only by the one level that a resize may round differently, and by the effect of
colour steps on that. On CUDA a pass is one kernel (`gpu.py`; two with contrast, which needs the mean of an image
first). On the CPU crops, resizes, flips and Normalize are one loop (`resample.py`), and colour and erasing run in
between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import OptionError
from fastload.transforms.boxes_and_points import COORDINATE_FIELDS, Coordinates, as_handed_over, as_moved
from fastload.transforms.colour import ColorJitter, ColourTransform
from fastload.transforms.draws import Draws
from fastload.transforms.engine import gpu
from fastload.transforms.engine.buffers import SMALL_SAMPLE_BYTES, OutputPool, sent
from fastload.transforms.engine.gpu import PassTables
from fastload.transforms.engine.place import place_images, place_masks
from fastload.transforms.engine.placement import ImageRows, PlacedImages, Placement, moved_coordinates, windows
from fastload.transforms.engine.resample import place_batch
from fastload.transforms.erasing import Eraser
from fastload.transforms.geometry import PlacedTransform, RandomFlip, joint_placement
from fastload.transforms.normalize import Normalize
from fastload.transforms.policy import RandomApply
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
    nothing for the others. Neighbours that fit together run in one pass over the pixels; see `FusedPass`.

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


Images = torch.Tensor | ImageRows | PlacedImages

_pool = OutputPool()

_View = tuple[str, bool, tuple[int, ...], tuple[int, ...], int]
"""Of a table in words: its name, whether it holds floats, its shape and strides, and its first word."""


@dataclass(frozen=True)
class FusedPass:
    """Transforms that one pass runs, each with its index in the list, which is its stream of random numbers.

    One of its crops may pad (`padded`), with nothing but flips before it.
    """

    spec: ImageSpec  # of the images that it is given
    moves: tuple[tuple[int, PlacedTransform], ...] = ()
    colours: tuple[tuple[int, ColourTransform], ...] = ()
    eraser: tuple[int, Eraser] | None = None
    normalize: Normalize | None = None
    padded: bool = False

    def __bool__(self) -> bool:
        return bool(self.moves or self.colours or self.eraser or self.normalize)

    @cached_property
    def size(self) -> tuple[int, int]:
        """The (height, width) of the images after it."""
        sizes = self.spec.sizes
        for _, transform in self.moves:
            sizes = transform.target(sizes)
        ((height, width),) = sizes.tolist()
        return height, width

    @property
    def dtype(self) -> torch.dtype:
        """Of the images after it."""
        return self.normalize.dtype if self.normalize else torch.uint8

    def runs_by_kernel(self, device: torch.device) -> bool:
        """Whether images on a device go through the kernel."""
        return device.type != "cpu" and self.spec.channels in gpu.CHANNELS and gpu.kernel_runs(device)

    def placement(self, draws: Draws, table: NDArray[np.int32] | None = None) -> Placement:
        """Returns the crops, resizes and flips together, and writes their numbers to a table; see `joint_placement`."""
        return joint_placement(self.moves, self.spec.sizes, draws, table)

    def draw(self, draws: Draws, words: NDArray[np.int32] | None = None) -> Placement:
        """Returns the placement of samples, and writes all that was drawn for them to the words, if given."""
        return self.placement(draws) if words is None else self.words.draw(draws, words)

    @cached_property
    def words(self) -> PassWords:
        """Its numbers as the kernel takes them."""
        return PassWords(self)

    @cached_property
    def has_contrast(self) -> bool:
        """Whether a colour operation may be contrast."""
        return any(_contrasts(transform) for _, transform in self.colours)


class PassWords:
    """A pass's numbers as the kernel takes them, in one array of words (int32, or float32 in the same bits).

    Of B samples the tables of `gpu.PassTables` lie there one after another, and behind them the constants.
    """

    def __init__(self, part: FusedPass) -> None:
        self._part = part
        one = Draws(0, 0, np.zeros(1, np.int64))
        self._of_one = part.placement(one)  # padding and fill are the same for all
        steps = sum(transform.steps(one).ops.shape[1] for _, transform in part.colours)
        coloured = {"ops": steps, "factors": steps} if steps else {}
        # The words of one sample in each table.
        self._columns: dict[str, int] = {"windows": 10, **coloured, **({"rectangles": 4} if part.eraser else {})}
        self._sample_words = sum(self._columns.values())
        self._constants = self._same_for_all()
        values = np.concatenate([np.empty(0, np.float32), *self._constants.values()])
        self._constant_words: NDArray[np.int32] = values.view(np.int32)
        # Views of the tables, by the samples asked for; made once for each.
        self._views: dict[tuple[int, int, int], list[_View]] = {}

    def number(self, count: int) -> int:
        """Returns the words of so many samples."""
        return count * self._sample_words + len(self._constant_words)

    def draw(self, draws: Draws, words: NDArray[np.int32]) -> Placement:
        """Returns the placement of samples, and writes all that was drawn for them to the words."""
        part, first = self._part, len(draws) * self._columns["windows"]
        placement = part.placement(draws, words[:first])
        tables: list[NDArray[Any]] = []
        if "ops" in self._columns:
            steps = [transform.steps(draws.stream(index)) for index, transform in part.colours]
            tables.append(np.concatenate([step.ops for step in steps], axis=1))
            tables.append(np.concatenate([step.factors for step in steps], axis=1))
        if part.eraser:
            index, eraser = part.eraser
            shown = part.spec._replace(height=part.size[0], width=part.size[1])
            tables.append(eraser.rectangles(shown, draws.stream(index)))
        for table in tables:
            place = words[first : first + table.size]
            (place if table.dtype.kind in "iub" else place.view(np.float32))[:] = table.reshape(-1)
            first += table.size
        words[first:] = self._constant_words  # an error if there are not as many as `number` says
        return placement

    def tables(self, words: torch.Tensor, samples: slice, total: int, begin: int = 0) -> gpu.PassTables:
        """Returns the tables of some samples as views of words on a device, which from `begin` on are of `total`."""
        key = (samples.start, samples.stop, total)
        if (views := self._views.get(key)) is None:
            views, first, count = [], 0, samples.stop - samples.start
            for name, width in self._columns.items():
                views.append((name, name == "factors", (count, width), (width, 1), first + samples.start * width))
                first += total * width
            for name, values in self._constants.items():
                views.append((name, True, (len(values),), (1,), first))
                first += len(values)
            self._views[key] = views
        # A tensor by itself: what is kept with `words` and is a view of them would keep them for good.
        words = words.data
        floats, begin = words.view(torch.float32), begin + int(words.storage_offset())
        return gpu.PassTables(
            **{
                name: (floats if is_float else words).as_strided(shape, stride, begin + first)
                for name, is_float, shape, stride, first in views
            },
            padding=self._of_one.padding,
        )

    def _same_for_all(self) -> dict[str, NDArray[np.float32]]:
        """Returns the numbers that are the same for all samples, float32 (C,)."""
        part, found = self._part, {}
        if part.eraser:
            found["value"] = np.resize(np.asarray(part.eraser[1].filled, np.float32), part.spec.channels)
        if part.normalize:
            scale, shift = part.normalize.scale_and_shift(torch.uint8)
            found |= {"scale": scale.numpy(), "shift": shift.numpy()}
        if self._of_one.padding == "constant":
            found["outside"] = np.resize(np.asarray(self._of_one.fill, np.float32), part.spec.channels)
        return found


class DrawnPass(NamedTuple):
    """A pass's random numbers for the samples of a batch."""

    placement: Placement
    resized: bool  # whether any image may change its size
    tables: gpu.PassTables | None = None  # all numbers, on the images' device; None: it does not run by the kernel


def drawn_now(part: FusedPass, draws: Draws, device: torch.device) -> DrawnPass:
    """Returns what a pass draws for the samples, with tables that are sent to the device where the kernel runs."""
    if not part.runs_by_kernel(device):
        placement = part.draw(draws)
        return DrawnPass(placement, placement.resized)
    count = len(draws)
    words = np.empty(part.words.number(count), np.int32)
    placement = part.draw(draws, words)
    there = sent(words, device)
    return DrawnPass(placement, placement.resized, part.words.tables(there, slice(0, count), count))


def passes_of(
    transforms: Sequence[Any], spec: ImageSpec | None, *, first: int = 0
) -> list[FusedPass | tuple[int, Any]]:
    """Returns the list as passes and, with its index, from `first` on, each transform that fits into none.

    The spec is of the images; None: not known, nothing is fused.
    """
    parts: list[FusedPass | tuple[int, Any]] = []
    current: FusedPass | None = None
    for index, transform in enumerate(transforms, first):
        grown = _grown(current, index, transform, spec)
        if grown is None:
            if current:
                parts.append(current)
            grown = _grown(None, index, transform, spec)
        if grown is None:
            parts.append((index, transform))
        current = grown
        spec = transform.output(spec) if spec is not None and hasattr(transform, "output") else None
    return [*parts, current] if current else parts


def _grown(current: FusedPass | None, index: int, transform: Any, spec: ImageSpec | None) -> FusedPass | None:
    """Returns the pass, or a new one, with one more transform for images of a spec; None if it cannot take it."""
    if spec is None or spec.dtype != torch.uint8:
        return None
    current = current or FusedPass(spec)
    if current.normalize:
        return None
    one = (index, transform)
    if isinstance(transform, Normalize):
        return replace(current, normalize=transform)
    if current.eraser:
        return None
    if isinstance(transform, PlacedTransform):
        resized = any(other.resizes for _, other in current.moves)
        # A flip after colour is as good as before it: colour looks at single pixels, and at the mean of all.
        late = current.colours and not isinstance(transform, RandomFlip)
        turned = all(isinstance(other, RandomFlip) for _, other in current.moves)
        pads = transform.pads(spec.sizes)
        twice = (transform.resizes and (resized or current.padded)) or (pads and not turned)
        if not (late or twice):
            return replace(current, moves=(*current.moves, one), padded=current.padded or pads)
    elif isinstance(transform, ColourTransform) and transform.output(spec) == spec:
        contrasts = sum(_contrasts(one) for one in (transform, *(other for _, other in current.colours)))
        if spec.channels == 3 and contrasts <= 1:
            return replace(current, colours=(*current.colours, one))
    elif isinstance(transform, Eraser) and transform.filled is not None:  # the kernel draws no random pixels
        return replace(current, eraser=one)
    return None


def run_pass(
    part: FusedPass, images: Images, draws: Draws, drawn: DrawnPass, output: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the images after a pass, (B, C, h, w) in channels_last memory; each draws from the stream of its index.

    Args:
        part: the pass.
        images: uint8 (B, C, H, W), rows that are not gathered yet, or images not made yet; not written to.
        draws: for the batch's samples.
        drawn: what the pass drew from them.
        output: on the CPU, memory for the result, in its shape, dtype and memory order.
    """
    if isinstance(images, PlacedImages):
        joined = images.then(drawn.placement)
        if drawn.tables is not None and joined is not None:
            return _by_kernel_where_placed(part, joined, drawn.tables)
        images = gathered(images)
    if drawn.tables is not None:
        return _by_kernel(part, images, drawn.tables, drawn.resized)
    device = device_of(images)
    spec, placement = part.spec, drawn.placement
    between: list[tuple[int, ColourTransform | Eraser]] = [*part.colours, *([part.eraser] if part.eraser else [])]
    # Small samples that keep their size are rather moved all at once.
    singly = drawn.resized or spec.channels * spec.height * spec.width > SMALL_SAMPLE_BYTES
    if device.type == "cpu" and part.moves and singly and not between:
        if placement.padding is not None:
            upright = replace(placement, turned=np.zeros_like(placement.turned))
            images = place_images(gathered(images), upright, _pool)
            first = np.zeros_like(placement.first)
            placement = replace(windows(first, placement.sizes), turned=placement.turned)
        source, rows = _where_they_lie(images)
        if output is None:
            output = _pool.empty((len(placement), *part.size, spec.channels), part.dtype).permute(0, 3, 1, 2)
        constants = part.normalize.scale_and_shift(torch.uint8) if part.normalize else None
        place_batch(source, None if rows is None else rows.numpy(), placement, output, constants)
        return output
    pixels = gathered(images)
    if part.moves:
        pixels = place_images(pixels, placement, _pool)
    for index, transform in between:
        pixels = transform.apply(pixels, draws.stream(index))
    if not part.normalize:
        return pixels
    return part.normalize.apply(pixels, output=output if device.type == "cpu" else None)


def gathered(images: Images) -> torch.Tensor:
    """Returns the images as a batch, (B, C, H, W)."""
    if not isinstance(images, PlacedImages):
        return images.gather() if isinstance(images, ImageRows) else images
    whole = FusedPass(images.spec)
    if whole.runs_by_kernel(images.pixels.device):
        return _by_kernel_where_placed(whole, images, None)
    one_by_one = enumerate(images.whole())
    placed = [place_images(one[None], images.placement.part(slice(at, at + 1)), _pool) for at, one in one_by_one]
    return torch.cat(placed).contiguous(memory_format=torch.channels_last)


def device_of(images: Images) -> torch.device:
    """Returns the device that the batch is made on."""
    if isinstance(images, ImageRows):
        return images.samples.device
    return images.pixels.device if isinstance(images, PlacedImages) else images.device


def _by_kernel_where_placed(part: FusedPass, images: PlacedImages, tables: gpu.PassTables | None) -> torch.Tensor:
    """Returns the images of a pass by the kernel, with the windows of the images instead of the tables'."""
    windows = sent(images.placement.table().astype(np.int32), images.pixels.device)
    tables = replace(tables, windows=windows) if tables else gpu.PassTables(windows)
    return _by_kernel(part, images, tables, images.placement.resized)


def _by_kernel(part: FusedPass, images: Images, tables: gpu.PassTables, resized: bool) -> torch.Tensor:
    """Returns the images of a pass by the Triton kernel."""
    return gpu.fused(
        *_where_they_lie(images),
        tables,
        part.size,
        has_contrast=part.has_contrast,
        dtype=part.dtype,
        resampled=resized,
        channels=part.spec.channels,
    )


def _where_they_lie(images: Images) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns images (N, H, W, C) or (T,), and which of them the samples are, as `gpu.fused` takes them."""
    if isinstance(images, PlacedImages):
        return images.pixels, images.layout
    if isinstance(images, ImageRows):
        return images.source, images.samples
    return images.permute(0, 2, 3, 1), None


def _contrasts(transform: ColourTransform) -> int:
    """Returns how many operations of contrast a transform may do to an image."""
    if isinstance(transform, RandomApply):
        return sum(map(_contrasts, transform.transforms))
    return int(isinstance(transform, ColorJitter) and transform.contrast != (1, 1))
