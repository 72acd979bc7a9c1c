"""Fuses neighbouring transforms into passes, each of which reads and writes the pixels once.

    crops, resize, flips  ->  colour  ->  erasing  ->  Normalize

A list is cut into passes of that form; a transform that fits into none runs by itself. Each step of a pass rounds as it
does alone, so a pass changes a result only by the one level that a resize may round differently, and by the effect of
colour steps on that. On CUDA a pass is one kernel (`gpu.py`; two with contrast, which needs the mean of an image
first). On the CPU crops, resizes, flips and Normalize are one loop (`resample.py`), and colour and erasing run in
between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.transforms.chance import RandomApply
from fastload.transforms.colour import ColorJitter, ColourTransform
from fastload.transforms.draws import Draws
from fastload.transforms.engine import gpu
from fastload.transforms.engine.buffers import SMALL_SAMPLE_BYTES, OutputPool, sent
from fastload.transforms.engine.place import place_images
from fastload.transforms.engine.placement import ImageRows, PlacedImages, Placement, windows
from fastload.transforms.engine.resample import place_batch
from fastload.transforms.erasing import Eraser
from fastload.transforms.geometry import PlacedTransform, RandomFlip, joint_placement
from fastload.transforms.normalize import Normalize
from fastload.transforms.spec import ImageSpec

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
    apart = drawn.resized or spec.channels * spec.height * spec.width > SMALL_SAMPLE_BYTES
    if device.type == "cpu" and part.moves and apart and not between:
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
