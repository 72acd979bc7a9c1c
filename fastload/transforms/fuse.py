"""Neighbouring transforms done in one pass over the pixels.

    crops, resize, flips  ->  colour  ->  erasing  ->  Normalize

A list is cut into passes of that form, and what fits in none runs by itself. Each step of a pass rounds as it does
alone, so a pass changes a result by the one level that a resize may round otherwise, and by what colour makes of it.
On CUDA a pass is one kernel (`kernel.py`; two with contrast, which needs the mean of an image first). On the CPU crops,
resizes, flips and Normalize are one call (`one_call.py`), and colour and erasing run in between.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.transforms import kernel
from fastload.transforms.buffers import OutputPool
from fastload.transforms.colour import ColorJitter, Grayscale, RandomGrayscale
from fastload.transforms.draws import Draws
from fastload.transforms.erasing import Cutout, RandomErasing
from fastload.transforms.geometry import RandomHorizontalFlip, RandomVerticalFlip
from fastload.transforms.normalize import Normalize
from fastload.transforms.one_call import available, normalize_in_one_call, place_in_one_call
from fastload.transforms.place import place_images
from fastload.transforms.placed import PlacedTransform
from fastload.transforms.placement import Placement, joined, windows
from fastload.transforms.rows import ImageRows
from fastload.transforms.spec import SMALL_SAMPLE_BYTES, ImageSpec

Colour = ColorJitter | Grayscale | RandomGrayscale
Eraser = RandomErasing | Cutout
Images = torch.Tensor | ImageRows

_pool = OutputPool()


@dataclass(frozen=True)
class Pass:
    """Transforms that one pass does, each with its place in the list, which is its stream of random numbers."""

    places: tuple[tuple[int, PlacedTransform], ...] = ()
    colours: tuple[tuple[int, Colour], ...] = ()
    eraser: tuple[int, Eraser] | None = None
    normalize: Normalize | None = None

    def __bool__(self) -> bool:
        return bool(self.places or self.colours or self.eraser or self.normalize)

    def placement(self, spec: ImageSpec, draws: Draws) -> Placement:
        """The crops, resizes and flips together, of images of a spec."""
        size, steps = (spec.height, spec.width), []
        for index, transform in self.places:
            steps.append(transform.place(spec, draws.stream(index)))
            spec = transform.output(spec)
        zeros = np.zeros(len(draws), np.int64)
        return joined(steps) if steps else windows(zeros, zeros, size)


def passes_of(transforms: Sequence[Any], spec: ImageSpec | None, *, first: int = 0) -> list[Pass | tuple[int, Any]]:
    """The list as passes and, with its index, each transform that fits in none.

    Args:
        transforms: as `check_pipeline` accepts them.
        spec: of the images; None: not known, nothing is fused.
        first: the index of the first one.
    """
    parts: list[Pass | tuple[int, Any]] = []
    current = Pass()
    for index, transform in enumerate(transforms, first):
        grown = _grown(current, index, transform, spec)
        if grown is None:
            if current:
                parts.append(current)
            grown = _grown(Pass(), index, transform, spec)
        if grown is None:
            parts.append((index, transform))
        current = grown or Pass()
        spec = _spec_after(transform, spec)
    return [*parts, current] if current else parts


def _grown(current: Pass, index: int, transform: Any, spec: ImageSpec | None) -> Pass | None:
    """The pass with one more transform; None if it cannot take it."""
    if spec is None or spec.dtype != torch.uint8 or current.normalize:
        return None
    one = (index, transform)
    if isinstance(transform, Normalize):
        return Pass(current.places, current.colours, current.eraser, transform)
    if current.eraser:
        return None
    if isinstance(transform, PlacedTransform):
        resized = any(other.resizes for _, other in current.places)
        # A turn after colour is as good as before it: colour looks at single pixels, and at the mean of all.
        turns = isinstance(transform, (RandomHorizontalFlip, RandomVerticalFlip))
        if transform.pads(spec) or (transform.resizes and resized) or (current.colours and not turns):
            return None
        return Pass((*current.places, one), current.colours)
    if isinstance(transform, (ColorJitter, Grayscale, RandomGrayscale)) and transform.output(spec) == spec:
        if spec.channels != 3 or (_has_contrast(transform) and any(_has_contrast(t) for _, t in current.colours)):
            return None
        return Pass(current.places, (*current.colours, one))
    if isinstance(transform, (RandomErasing, Cutout)) and _erased_value(transform) is not None:
        return Pass(current.places, current.colours, one)
    return None


def run_pass(
    part: Pass, images: Images, spec: ImageSpec, draws: Draws, output: torch.Tensor | None = None
) -> torch.Tensor:
    """The images after a pass, (B, C, h, w) in channels_last memory.

    Args:
        part: its transforms.
        images: uint8 (B, C, H, W), or rows that are not gathered yet; not written to.
        spec: of them.
        draws: for the batch's samples; each transform draws from the stream of its index.
        output: on the CPU, memory for the result, in its shape, dtype and memory order.
    """
    device = images.samples.device if isinstance(images, ImageRows) else images.device
    if device.type != "cpu":
        if spec.channels in kernel.CHANNELS and kernel_runs(device):
            images = images if _readable(images) else gathered(images)
            return _by_kernel(part, images, part.placement(spec, draws), spec, draws, device)
        images = gathered(images)
    if device.type == "cpu" and available() and _in_one_call(part, spec):
        return _placed_and_normalized(part, images, part.placement(spec, draws), output)
    pixels = gathered(images)
    if part.places:
        pixels = place_images(pixels, part.placement(spec, draws), _pool)
    for index, transform in (*part.colours, *([part.eraser] if part.eraser else [])):
        pixels = transform.apply(pixels, draws.stream(index))
    if not part.normalize:
        return pixels
    if device.type != "cpu" or not available():
        return part.normalize.apply(pixels)
    if output is None:
        output = _pool.empty(tuple(pixels.permute(0, 2, 3, 1).shape), part.normalize.dtype).permute(0, 3, 1, 2)
    normalize_in_one_call(pixels, output, *part.normalize.scale_and_shift(torch.uint8))
    return output


def _in_one_call(part: Pass, spec: ImageSpec) -> bool:
    """Whether samples are best taken one by one: they are resized, or so large that a call each costs nothing."""
    if part.colours or part.eraser or not part.places:
        return False
    resizes = any(transform.resizes for _, transform in part.places)
    return resizes or spec.channels * spec.height * spec.width > SMALL_SAMPLE_BYTES


def gathered(images: Images) -> torch.Tensor:
    """The images as a batch, (B, C, H, W). A kernel fetches pinned rows over the bus, so that the CPU is left alone."""
    if not isinstance(images, ImageRows):
        return images
    device = images.samples.device
    if device.type != "cpu" and images.source.device.type == "cpu" and _readable(images) and kernel_runs(device):
        zeros = np.zeros(len(images.samples), np.int64)
        whole = windows(zeros, zeros, (images.spec.height, images.spec.width))
        return _by_kernel(Pass(), images, whole, images.spec, Draws(0, 0, zeros), device)
    return images.gather()


def _readable(images: Images) -> bool:
    """Whether the kernel can read the pixels where they are: uint8, on the device or in pinned memory of the host."""
    if not isinstance(images, ImageRows):
        return True
    source = images.source
    return source.dtype == torch.uint8 and (source.device.type != "cpu" or source.is_pinned())


@functools.cache
def kernel_runs(device: torch.device) -> bool:
    """Whether batches on a device go through the Triton kernel; warns, once, if they do not."""
    why = "Triton is not installed; CUDA builds of torch bring it along, else `pip install triton`"
    if kernel.triton_available():
        try:
            kernel.try_out(device)
            return True
        # Whatever Triton meets when it compiles and launches: no C compiler, a driver too old, a card too old.
        except Exception as error:  # noqa: BLE001
            why = f"Triton does not run here ({type(error).__name__}: {error})"
    warnings.warn(
        f"Augmentation on {device} runs as separate torch operations, each of which reads and writes the whole batch: "
        f"{why}.",
        stacklevel=2,
    )
    return False


def _by_kernel(
    part: Pass, images: Images, placement: Placement, spec: ImageSpec, draws: Draws, device: torch.device
) -> torch.Tensor:
    steps = [transform.steps(draws.stream(index)) for index, transform in part.colours]
    coloured = any(step.ops.shape[1] for step in steps)
    ops = np.concatenate([step.ops for step in steps], axis=1) if coloured else None
    factors = np.concatenate([step.factors for step in steps], axis=1) if coloured else None
    rectangles = value = scale = shift = None
    if part.eraser:
        index, eraser = part.eraser
        rectangles = eraser.rectangles(_shown(spec, placement), draws.stream(index))
        value = np.resize(np.asarray(_erased_value(eraser), np.float32), spec.channels)
    if part.normalize:
        scale, shift = (constants.numpy() for constants in part.normalize.scale_and_shift(torch.uint8))
    sent = _sent(device, placement.table(), ops, rectangles, factors, value, scale, shift)
    table, ops_there, rectangles_there, factors_there, value_there, scale_there, shift_there = sent
    assert table is not None, "every sample has a window"
    rows = images.samples if isinstance(images, ImageRows) else None
    return kernel.fused(
        images.source if isinstance(images, ImageRows) else images.permute(0, 2, 3, 1),
        rows,
        table,
        placement.scaled,
        placement.size,
        ops=ops_there,
        factors=factors_there,
        has_contrast=any(_has_contrast(transform) for _, transform in part.colours),
        rectangles=rectangles_there,
        value=value_there,
        scale=scale_there,
        shift=shift_there,
        dtype=part.normalize.dtype if part.normalize else torch.uint8,
        resampled=placement.resized,
    )


def _sent(device: torch.device, *tables: NDArray[Any] | None) -> list[torch.Tensor | None]:
    """Tables of integers (as int32) and floats (as float32) on the device, by one copy that nothing waits for."""
    flat = [
        None if table is None else np.ascontiguousarray(table, np.int32 if table.dtype.kind in "iub" else np.float32)
        for table in tables
    ]
    packed = torch.from_numpy(np.concatenate([table.reshape(-1).view(np.int32) for table in flat if table is not None]))
    # torch keeps pinned memory until the stream has read it, and then uses it again.
    there = (packed.pin_memory() if device.type == "cuda" else packed).to(device, non_blocking=True)
    parts: list[torch.Tensor | None] = []
    first = 0
    for table in flat:
        if table is None:
            parts.append(None)
            continue
        part = there[first : first + table.size].view(table.shape)
        parts.append(part if table.dtype == np.int32 else part.view(torch.float32))
        first += table.size
    return parts


def _placed_and_normalized(
    part: Pass, images: Images, placement: Placement, output: torch.Tensor | None
) -> torch.Tensor:
    """On the CPU, samples one after the other without asking for the GIL in between."""
    if isinstance(images, ImageRows):
        source, samples = images.source.permute(0, 3, 1, 2), images.samples
    else:
        source, samples = images, torch.arange(len(images), device="cpu")
    if output is None:
        dtype = part.normalize.dtype if part.normalize else source.dtype
        shape = (len(samples), *placement.size, source.shape[1])
        output = _pool.empty(shape, dtype).permute(0, 3, 1, 2)
    constants = part.normalize.scale_and_shift(torch.uint8) if part.normalize else ()
    place_in_one_call(source, samples, torch.from_numpy(placement.table()), placement.scaled, output, *constants)
    return output


def _has_contrast(transform: Colour) -> bool:
    return isinstance(transform, ColorJitter) and transform.contrast != (1, 1)


def _erased_value(eraser: Eraser) -> tuple[float, ...] | None:
    """What erased pixels hold; None: each a random value, which the kernel does not draw."""
    return eraser.fill if isinstance(eraser, Cutout) else eraser.value


def _shown(spec: ImageSpec, placement: Placement) -> ImageSpec:
    return spec._replace(height=placement.size[0], width=placement.size[1])


def _spec_after(transform: Any, spec: ImageSpec | None) -> ImageSpec | None:
    return transform.output(spec) if spec is not None and hasattr(transform, "output") else None
