"""Fuses neighbouring transforms into passes, each of which reads and writes the pixels once.

    crops, resize, flips  ->  colour  ->  erasing  ->  Normalize

A list is cut into passes of that form; a transform that fits into none runs by itself. Each step of a pass rounds as it
does alone, so a pass changes a result only by the one level that a resize may round differently, and by the effect of
colour steps on that. On CUDA a pass is one kernel (`gpu.py`; two with contrast, which needs the mean of an image
first). On the CPU crops, resizes, flips and Normalize are one loop (`resample.py`), and colour and erasing run in
between.
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

from fastload.transforms.colour import ColorJitter, Grayscale, RandomGrayscale
from fastload.transforms.draws import Draws
from fastload.transforms.engine import gpu
from fastload.transforms.engine.buffers import SMALL_SAMPLE_BYTES, OutputPool
from fastload.transforms.engine.place import PlacedTransform, joint_placement, place_images
from fastload.transforms.engine.placement import ImageRows, Placement
from fastload.transforms.engine.resample import place_batch
from fastload.transforms.erasing import Cutout, RandomErasing
from fastload.transforms.geometry import RandomHorizontalFlip, RandomVerticalFlip
from fastload.transforms.normalize import Normalize
from fastload.transforms.spec import ImageSpec

Colour = ColorJitter | Grayscale | RandomGrayscale
Eraser = RandomErasing | Cutout
Images = torch.Tensor | ImageRows

_pool = OutputPool()


@dataclass(frozen=True)
class FusedPass:
    """Transforms that one pass runs, each with its index in the list, which is its stream of random numbers."""

    moves: tuple[tuple[int, PlacedTransform], ...] = ()
    colours: tuple[tuple[int, Colour], ...] = ()
    eraser: tuple[int, Eraser] | None = None
    normalize: Normalize | None = None

    def __bool__(self) -> bool:
        return bool(self.moves or self.colours or self.eraser or self.normalize)

    def placement(self, spec: ImageSpec, draws: Draws) -> Placement:
        """Returns the crops, resizes and flips together, for images of a spec."""
        return joint_placement(self.moves, spec.sizes, draws)


def passes_of(
    transforms: Sequence[Any], spec: ImageSpec | None, *, first: int = 0
) -> list[FusedPass | tuple[int, Any]]:
    """Returns the list as passes and, with its index, each transform that fits into none.

    Args:
        transforms: as `check_pipeline` accepts them.
        spec: of the images; None: not known, nothing is fused.
        first: index of the first transform.
    """
    parts: list[FusedPass | tuple[int, Any]] = []
    current = FusedPass()
    for index, transform in enumerate(transforms, first):
        grown = _grown(current, index, transform, spec)
        if grown is None:
            if current:
                parts.append(current)
            grown = _grown(FusedPass(), index, transform, spec)
        if grown is None:
            parts.append((index, transform))
        current = grown or FusedPass()
        spec = _spec_after(transform, spec)
    return [*parts, current] if current else parts


def _grown(current: FusedPass, index: int, transform: Any, spec: ImageSpec | None) -> FusedPass | None:
    """Returns the pass with one more transform; None if it cannot take it."""
    if spec is None or spec.dtype != torch.uint8 or current.normalize:
        return None
    one = (index, transform)
    if isinstance(transform, Normalize):
        return FusedPass(current.moves, current.colours, current.eraser, transform)
    if current.eraser:
        return None
    if isinstance(transform, PlacedTransform):
        resized = any(other.resizes for _, other in current.moves)
        # A flip after colour is as good as before it: colour looks at single pixels, and at the mean of all.
        only_flips = isinstance(transform, (RandomHorizontalFlip, RandomVerticalFlip))
        if transform.pads(spec.sizes) or (transform.resizes and resized) or (current.colours and not only_flips):
            return None
        return FusedPass((*current.moves, one), current.colours)
    if isinstance(transform, (ColorJitter, Grayscale, RandomGrayscale)) and transform.output(spec) == spec:
        if spec.channels != 3 or (_has_contrast(transform) and any(_has_contrast(t) for _, t in current.colours)):
            return None
        return FusedPass(current.moves, (*current.colours, one))
    if isinstance(transform, (RandomErasing, Cutout)) and _erased_value(transform) is not None:
        return FusedPass(current.moves, current.colours, one)
    return None


def run_pass(
    part: FusedPass, images: Images, spec: ImageSpec, draws: Draws, output: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the images after a pass, (B, C, h, w) in channels_last memory.

    Args:
        part: the pass.
        images: uint8 (B, C, H, W), or rows that are not gathered yet; not written to.
        spec: of the images.
        draws: for the batch's samples; each transform draws from the stream of its index.
        output: on the CPU, memory for the result, in its shape, dtype and memory order.
    """
    device = images.samples.device if isinstance(images, ImageRows) else images.device
    placement = part.placement(spec, draws)
    if device.type != "cpu" and spec.channels in gpu.CHANNELS and kernel_runs(device):
        images = images if _readable(images) else gathered(images)
        return _by_kernel(part, images, placement, spec, draws, device)
    between = (*part.colours, *([part.eraser] if part.eraser else []))
    # Small samples that keep their size are rather moved all at once.
    apart = placement.resized or spec.channels * spec.height * spec.width > SMALL_SAMPLE_BYTES
    if device.type == "cpu" and part.moves and apart and not between:
        return _placed(images, placement, part.normalize, output)
    pixels = gathered(images)
    if part.moves:
        pixels = place_images(pixels, placement, _pool)
    for index, transform in between:
        pixels = transform.apply(pixels, draws.stream(index))
    if not part.normalize:
        return pixels
    return part.normalize.apply(pixels, output=output if device.type == "cpu" else None)


def gathered(images: Images) -> torch.Tensor:
    """Returns the images as a batch, (B, C, H, W); a kernel fetches rows in pinned memory, without the CPU."""
    if not isinstance(images, ImageRows):
        return images
    device = images.samples.device
    if device.type != "cpu" and images.source.device.type == "cpu" and _readable(images) and kernel_runs(device):
        undrawn = Draws(0, 0, np.zeros(len(images.samples), np.int64))
        whole = FusedPass().placement(images.spec, undrawn)
        return _by_kernel(FusedPass(), images, whole, images.spec, undrawn, device)
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
    if gpu.triton_available():
        try:
            gpu.try_out(device)
            return True
        # Triton fails to compile or launch in many ways: no C compiler, a driver too old, a card too old.
        except Exception as error:  # noqa: BLE001
            why = f"Triton does not run here ({type(error).__name__}: {error})"
    warnings.warn(
        f"Augmentation on {device} runs as separate torch operations, each of which reads and writes the whole batch: "
        f"{why}.",
        stacklevel=2,
    )
    return False


def _by_kernel(
    part: FusedPass, images: Images, placement: Placement, spec: ImageSpec, draws: Draws, device: torch.device
) -> torch.Tensor:
    """Returns the images of a pass by the Triton kernel."""
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
    tables = _sent(device, placement.table(), ops, factors, rectangles, value, scale, shift)
    rows = images.samples if isinstance(images, ImageRows) else None
    return gpu.fused(
        images.source if isinstance(images, ImageRows) else images.permute(0, 2, 3, 1),
        rows,
        tables,
        placement.size,
        has_contrast=any(_has_contrast(transform) for _, transform in part.colours),
        dtype=part.normalize.dtype if part.normalize else torch.uint8,
        resampled=placement.resized,
    )


def _sent(device: torch.device, *tables: NDArray[Any] | None) -> gpu.PassTables:
    """Returns tables of integers (int32) and floats (float32) on the device, by one copy that nothing waits for."""
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
    return gpu.PassTables(*parts)  # type: ignore[arg-type]  # every sample has a window


def _placed(
    images: Images, placement: Placement, normalize: Normalize | None, output: torch.Tensor | None
) -> torch.Tensor:
    """Returns the images of a pass on the CPU, read where they lie and made one after the other."""
    rows = images.samples.numpy() if isinstance(images, ImageRows) else None
    source = images.source if isinstance(images, ImageRows) else images.permute(0, 2, 3, 1)
    if output is None:
        dtype = normalize.dtype if normalize else torch.uint8
        output = _pool.empty((len(placement), *placement.size, source.shape[3]), dtype).permute(0, 3, 1, 2)
    constants = normalize.scale_and_shift(torch.uint8) if normalize else None
    place_batch(source, rows, placement, output, constants)
    return output


def _has_contrast(transform: Colour) -> bool:
    return isinstance(transform, ColorJitter) and transform.contrast != (1, 1)


def _erased_value(eraser: Eraser) -> tuple[float, ...] | None:
    """Returns the value of erased pixels; None: random values, which the kernel does not draw."""
    return eraser.fill if isinstance(eraser, Cutout) else eraser.value


def _shown(spec: ImageSpec, placement: Placement) -> ImageSpec:
    return spec._replace(height=placement.size[0], width=placement.size[1])


def _spec_after(transform: Any, spec: ImageSpec | None) -> ImageSpec | None:
    return transform.output(spec) if spec is not None and hasattr(transform, "output") else None
